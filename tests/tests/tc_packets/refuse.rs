//! Who is turned away, and how: refused with an answer, or met with silence.

use std::net::SocketAddr;

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{FLOWS_FULL, MISS, NEW_FLOW, POLICY_DROPPED, REFUSED, SOURCE_DENIED, TRANSLATED, UNANSWERED},
    frontend::flag,
};
use lb_tests::{
    packet::{self, Packet, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{Scene, Web, hello, syn};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("tcp_without_a_backend_is_reset", reset),
    ("udp_without_a_backend_is_told_that_nobody_listens", unreachable),
    ("what_cannot_be_answered_is_dropped_and_counted", unanswered),
    (
        "local_policy_without_a_local_endpoint_is_silent_outside",
        silent_outside,
    ),
    ("internal_local_policy_is_silent_to_guests", silent_inside),
    ("sources_outside_the_ranges_are_denied", ranges),
    ("a_refused_packet_leaves_no_flow", no_flow),
    ("weights_of_zero_are_no_backends", weightless),
];

/// A Service without endpoints.
fn empty(s: &mut Scene, id: u8, proto: u8) -> Result<Web> {
    let web = s.serve(id, proto, 1)?;
    s.publish(web.sets.0, &[])?;
    s.publish(web.sets.1, &[])?;
    Ok(web)
}

/// The reset that answers a packet.
fn rst(packet: &Packet) -> Packet {
    let packet::Body::Tcp(tcp) = &packet.body else {
        panic!("TCP is reset")
    };
    let (src, dst) = ((packet.src, tcp.src).into(), (packet.dst, tcp.dst).into());
    let answer = packet::tcp(dst, src, flags::RST).id(0).window(0);
    if tcp.flags & flags::ACK == 0 {
        let mut answer = answer.seq(0).ack(tcp.seq.wrapping_add(1));
        if let packet::Body::Tcp(tcp) = &mut answer.body {
            tcp.flags |= flags::ACK;
        }
        answer
    } else {
        answer.seq(tcp.ack).ack(0)
    }
}

/// The ICMP error that answers a datagram: it carries the IP header and the UDP header.
fn port_unreachable(packet: &Packet) -> Packet {
    let (kind, length) = if packet.src.is_ipv6() {
        ((1, 4, 0), 48)
    } else {
        ((3, 3, 0), 28)
    };
    packet::error(packet.dst, packet.src, kind, packet, length).id(0)
}

fn reset(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = empty(&mut s, 1, TCP)?;
    s.plane.forget_counters()?;
    let mut rejected = 0;
    for (n, vip) in (1..).zip(web.outside()) {
        let client = s.client(n);
        let forms = [
            syn(client, vip),
            syn(client, vip)
                .seq(u32::MAX)
                .tcp_options(&[2, 4, 5, 180, 1, 3, 3, 7, 4, 2, 0, 0]),
            syn(client, vip).payload(b"data in a SYN").tos(0x10).ttl(1),
            packet::tcp(client, vip, flags::ACK).ack(0xdead_beef),
            packet::tcp(client, vip, flags::PSH | flags::ACK).payload(&[7; 1_000]),
            packet::tcp(client, vip, flags::FIN | flags::ACK),
            packet::tcp(client, vip, flags::FIN),
            syn(client, vip).trailer(&[0; 6]),
            syn(client, vip).vlan(9),
        ];
        for packet in forms {
            let mut answer = rst(&packet);
            answer.link = packet.link.clone();
            s.comes(Device::Uplink, &packet).answered(&answer, &[REFUSED]);
            rejected += 1;
        }
        let packet = syn(s.guest(n), web.cluster);
        s.comes(Device::Guest, &packet).answered(&rst(&packet), &[REFUSED]);
        rejected += 1;
    }
    assert_eq!(s.plane.service(web.id).rejected, rejected);
    Ok(())
}

fn unreachable(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = empty(&mut s, 2, UDP)?;
    let (client, vip) = (s.client(1), dns.external);
    for length in [0, 1, 7, 8, 100, 1_472] {
        let packet = packet::udp(client, vip, &vec![5; length]);
        s.comes(Device::Uplink, &packet)
            .answered(&port_unreachable(&packet), &[REFUSED]);
    }
    let unsummed = packet::udp(client, vip, b"?").unsummed().tos(0xb8).ttl(2);
    s.comes(Device::Uplink, &unsummed)
        .answered(&port_unreachable(&unsummed), &[REFUSED]);
    let padded = packet::udp(client, vip, b"").trailer(&[0; 18]);
    s.comes(Device::Uplink, &padded)
        .answered(&port_unreachable(&padded), &[REFUSED]);
    let packet = packet::udp(s.guest(1), dns.cluster, b"?");
    s.comes(Device::Guest, &packet)
        .answered(&port_unreachable(&packet), &[REFUSED]);
    Ok(())
}

fn unanswered(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = empty(&mut s, 1, TCP)?;
    let dns = empty(&mut s, 2, UDP)?;
    let client = s.client(1);
    let odd = |packet: Packet| match dial {
        Dial::V6 => packet.extension(packet::wire::HOP_BY_HOP, &[5, 2, 0, 0]),
        _ => packet.options(&[1, 1, 1, 0]),
    };
    let mut forms = vec![
        packet::tcp(client, web.node, flags::RST),
        packet::tcp(client, web.node, flags::RST | flags::ACK),
        odd(syn(client, web.node)),
        odd(packet::udp(client, dns.node, b"x")),
    ];
    // Of fragments, whole datagrams are refused by who puts them together: nobody here.
    let long = packet::udp(client, dns.node, &[1; 60]);
    forms.extend(packet::fragments(&long, 9, 32));
    for packet in forms {
        s.comes(Device::Uplink, &packet).dropped(&[UNANSWERED]);
    }
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn silent_outside(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 2)?;
        // Endpoints are elsewhere: whoever is inside is served by all, whoever is outside by those here, and there are none.
        s.publish(web.sets.1, &[])?;
        for vip in web.outside() {
            s.change_flags(vip, proto, |flags| {
                *flags &= !flag::MASQUERADE_OUTSIDE;
                *flags |= flag::SILENT_WHEN_EMPTY_OUTSIDE;
            })?;
        }
        s.plane.forget_counters()?;
        for vip in [web.node, web.external] {
            let first = hello(s.client(1), vip, proto);
            s.comes(Device::Uplink, &first).dropped(&[POLICY_DROPPED]);
            let guest = SocketAddr::new(s.guest(id).ip(), vip.port());
            let inside = hello(guest, vip, proto);
            let (_, chosen) = s.choice(web.sets.0, guest, vip, proto);
            s.comes(Device::Guest, &inside)
                .becomes(&inside.clone().to(chosen), &[NEW_FLOW, TRANSLATED]);
        }
        assert_eq!(s.plane.service(web.id).rejected, 2);
    }
    Ok(())
}

fn silent_inside(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 2)?;
        s.publish(web.sets.0, &[])?;
        for vip in web.outside().into_iter().chain([web.cluster]) {
            s.change_flags(vip, proto, |flags| *flags |= flag::UNREACHABLE_WHEN_EMPTY)?;
        }
        let inside = hello(s.guest(1), web.cluster, proto);
        s.comes(Device::Guest, &inside).dropped(&[POLICY_DROPPED]);
        // That flag says nothing of clients outside.
        let client = s.client(id);
        let first = hello(client, web.node, proto);
        let (_, chosen) = s.choice(web.sets.1, client, web.node, proto);
        s.comes(Device::Uplink, &first)
            .becomes(&first.clone().to(chosen), &[NEW_FLOW, TRANSLATED]);
        s.publish(web.sets.1, &[])?;
        let other = hello(s.client(id + 10), web.node, proto);
        let seen = s.comes(Device::Uplink, &other);
        assert_eq!(seen.verdict, lb_tests::plane::Verdict::Answer);
        seen.counted(&[REFUSED]);
    }
    Ok(())
}

fn ranges(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = web.backends[0].1;
        s.change_flags(web.balancer, proto, |flags| *flags |= flag::SOURCE_RANGES)?;
        // Nobody is admitted where no range is.
        let first = |n: u8, s: &Scene| hello((s.address(200, n), 1_000).into(), web.balancer, proto);
        let packet = first(1, &s);
        s.comes(Device::Uplink, &packet).dropped(&[SOURCE_DENIED]);
        let (all, host) = if dial == Dial::V6 { (128, 125) } else { (32, 29) };
        s.rules.admit(web.id, s.address(200, 8), host);
        s.rules.admit(web.id, s.address(200, 77), all);
        // Another Service's range admits nobody here, nor does the other family's.
        s.rules.admit(web.id + 10, s.address(200, 0), 0);
        let other = if dial == Dial::V6 {
            ("0.0.0.0", 0)
        } else {
            ("2000::", 3)
        };
        s.rules.admit(web.id, other.0.parse()?, other.1);
        s.write()?;
        for (n, admitted) in [
            (7, false),
            (8, true),
            (15, true),
            (16, false),
            (77, true),
            (76, false),
            (78, false),
        ] {
            let packet = first(n, &s);
            let seen = s.comes(Device::Uplink, &packet);
            if admitted {
                seen.becomes(&packet.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
            } else {
                seen.dropped(&[SOURCE_DENIED]);
            }
        }
        // The ranges are the balancer's alone, and guests are inside.
        let packet = hello((s.address(200, 1), 1_001).into(), web.node, proto);
        s.comes(Device::Uplink, &packet)
            .becomes(&packet.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        let packet = hello(s.guest(id), web.balancer, proto);
        s.comes(Device::Guest, &packet)
            .becomes(&packet.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        // A flow that was admitted goes on when its range has gone: what is asked is asked of beginnings.
        s.rules.sources.clear();
        s.write()?;
        let packet = match proto {
            UDP => first(8, &s),
            _ => packet::tcp((s.address(200, 8), 1_000).into(), web.balancer, flags::ACK),
        };
        s.comes(Device::Uplink, &packet)
            .becomes(&packet.clone().to(backend), &[TRANSLATED]);
    }
    Ok(())
}

fn no_flow(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = empty(&mut s, 1, TCP)?;
    let packet = syn(s.client(1), web.node);
    s.comes(Device::Uplink, &packet).answered(&rst(&packet), &[REFUSED]);
    assert!(s.plane.tuples()?.is_empty());
    assert_eq!(s.plane.hand()?, 0);
    // A stray answer of the backend that there was is nobody's.
    let answer = packet::tcp(web.backends[0].1, s.client(1), flags::SYN | flags::ACK);
    s.leaves(Device::Uplink, &answer).untouched(&[MISS]);
    // The table's limit is silent: the client says its SYN again.
    s.publish(web.sets.1, &web.members([0]))?;
    s.shrink(0);
    s.comes(Device::Uplink, &packet).dropped(&[FLOWS_FULL]);
    Ok(())
}

fn weightless(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 2)?;
    let only = web.backends[1];
    s.publish(web.sets.1, &[(web.backends[0].0, 0), (only.0, 1)])?;
    for n in 0..20 {
        assert_eq!(s.begin(s.client(n), web.node), only.1);
    }
    s.publish(web.sets.1, &[(web.backends[0].0, 0), (only.0, 0)])?;
    let packet = syn(s.client(30), web.node);
    s.comes(Device::Uplink, &packet).answered(&rst(&packet), &[REFUSED]);
    Ok(())
}

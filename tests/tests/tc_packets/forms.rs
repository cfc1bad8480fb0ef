//! Forms of packets: tags, options, extension headers, no link header, padding, and what is cut off anywhere.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{MALFORMED, MISS, NEW_FLOW, TRANSLATED},
};
use lb_tests::{
    packet::{self, Packet, Tag, flags, wire},
    plane::{Device, Hook, Verdict},
    runner::{Body, skip},
    world::Dial,
};

use crate::scene::{Scene, hello, reply, syn};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("packets_in_vlans_are_translated_within_them", vlans),
    ("ip_options_and_extension_headers_are_kept", headers),
    ("more_headers_than_are_looked_behind_are_malformed", too_many),
    ("packets_without_a_link_header_are_translated", bare),
    ("padding_behind_the_packet_stays", padding),
    ("type_of_service_time_to_live_and_identification_are_kept", fields),
    ("a_packet_that_is_cut_off_is_read_no_further_than_it_goes", cut),
    ("what_is_neither_tcp_nor_udp_over_ip_passes_untouched", foreign),
    ("headers_that_contradict_themselves_are_malformed", contradictions),
    ("mapped_addresses_on_the_wire_are_nobodys", mapped),
    ("the_sum_that_a_card_made_stays_true", summed),
];

fn vlans(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
        let plain = hello(client, vip, proto);
        s.comes(Device::Uplink, &plain)
            .becomes(&plain.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        for tags in 1..=2 {
            let tagged = |packet: Packet| (0..tags).fold(packet, |packet, i| packet.vlan(0x6007 + i));
            let there = tagged(plain.clone());
            s.comes(Device::Uplink, &there)
                .becomes(&there.clone().to(backend), &[TRANSLATED]);
            let back = tagged(reply(backend, client, proto));
            s.leaves(Device::Uplink, &back)
                .becomes(&back.clone().from(vip), &[TRANSLATED]);
        }
        // A third tag is not looked behind.
        let deep = plain.vlan(1).vlan(2).vlan(3);
        s.comes(Device::Uplink, &deep).untouched(&[MISS]);
    }
    Ok(())
}

/// A packet with so many extension headers of all sorts, or so many words of options.
fn with_headers(dial: Dial, packet: Packet, count: usize) -> Packet {
    match dial {
        Dial::V6 => (0..count).fold(packet, |packet, i| match i % 3 {
            0 => packet.extension(wire::HOP_BY_HOP, &[5, 2, 0, 0]),
            1 => packet.extension(wire::ROUTING, &[0; 22]),
            _ => packet.extension(wire::DESTINATION, &[1; 6]),
        }),
        _ => packet.options(&vec![1; count * 4]),
    }
}

fn headers(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (vip, backend) = (web.external, web.backends[0].1);
        let most = if dial == Dial::V6 { 6 } else { 10 };
        for count in 1..=most {
            let client = s.client(count as u8);
            let there = with_headers(dial, hello(client, vip, proto), count);
            s.comes(Device::Uplink, &there)
                .becomes(&there.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
            let back = with_headers(dial, reply(backend, client, proto), count);
            s.leaves(Device::Uplink, &back)
                .becomes(&back.clone().from(vip), &[TRANSLATED]);
        }
        if dial == Dial::V6 {
            let client = s.client(50);
            let long = hello(client, vip, proto).extension(wire::DESTINATION, &[0; 8 * 100 - 2]);
            s.comes(Device::Uplink, &long)
                .becomes(&long.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
            // The sixth header is that of a fragment.
            let last = with_headers(dial, hello(s.client(51), vip, proto), 5).fragment(3, 0, true);
            s.comes(Device::Uplink, &last)
                .becomes(&last.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        }
    }
    Ok(())
}

fn too_many(dial: Dial) -> Result<()> {
    if dial != Dial::V6 {
        return Ok(());
    }
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    for count in 7..9 {
        let packet = with_headers(dial, syn(s.client(1), web.external), count);
        s.comes(Device::Uplink, &packet).untouched(&[MALFORMED]);
        s.leaves(Device::Uplink, &packet).untouched(&[MALFORMED]);
    }
    Ok(())
}

/// An address that a test-run takes for a packet of the family without a link header: it believes that the packet has one, and
/// reads the protocol from where the source address lies.
fn readable(dial: Dial, n: u8) -> IpAddr {
    match dial {
        Dial::V6 => std::net::Ipv6Addr::new(0x2001, 0xdb8, 0x86dd, 0, 0, 0, 0, u16::from(n)).into(),
        _ => std::net::Ipv4Addr::new(8, 0, 7, n).into(),
    }
}

fn bare(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = (readable(dial, 100 + id), web.backends[0].1.port()).into();
        s.rules.add_backend(web.backends[0].0, web.id, backend, proto);
        s.publish(web.sets.1, &web.members([0]))?;
        let (client, vip) = ((readable(dial, id), 40_000).into(), web.external);
        let there = hello(client, vip, proto).bare();
        s.run_bare(Hook::Ingress, Device::Uplink, &there.bytes())
            .becomes(&there.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        let back = reply(backend, client, proto).bare();
        s.run_bare(Hook::Egress, Device::Uplink, &back.bytes())
            .becomes(&back.clone().from(vip), &[TRANSLATED]);
        // The flow is the same on a device with link headers.
        let there = hello(client, vip, proto);
        s.comes(Device::Second, &there)
            .becomes(&there.clone().to(backend), &[TRANSLATED]);
    }
    // A refusal has no link header either.
    let web = s.serve(3, TCP, 1)?;
    s.publish(web.sets.1, &[])?;
    let packet = syn((readable(dial, 9), 40_000).into(), web.external).bare();
    let seen = s.run_bare(Hook::Ingress, Device::Uplink, &packet.bytes());
    let answer = packet::tcp(
        web.external,
        (readable(dial, 9), 40_000).into(),
        flags::RST | flags::ACK,
    )
    .bare()
    .id(0)
    .window(0)
    .seq(0)
    .ack(1_001);
    seen.answered(&answer, &[lb_common::counter::action::REFUSED]);
    Ok(())
}

fn padding(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let there = hello(s.client(id), web.external, proto).trailer(&[0xaa; 18]);
        s.comes(Device::Uplink, &there)
            .becomes(&there.clone().to(web.backends[0].1), &[NEW_FLOW, TRANSLATED]);
    }
    Ok(())
}

fn fields(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.begin(client, vip);
    for (tos, ttl, id) in [(0, 1, 0), (0xff, 255, u16::MAX), (0xb9, 2, 1)] {
        for packet in [
            packet::tcp(client, vip, flags::ACK).tos(tos).ttl(ttl).id(id),
            packet::tcp(client, vip, flags::ACK)
                .tos(tos)
                .ttl(ttl)
                .id(id)
                .divisible(),
        ] {
            s.comes(Device::Uplink, &packet)
                .becomes(&packet.clone().to(backend), &[TRANSLATED]);
        }
    }
    Ok(())
}

/// Runs the first bytes of a packet; `None` where the kernel does not take so few.
fn run_cut(s: &mut Scene, hook: Hook, bytes: &[u8]) -> Result<Option<(Verdict, Vec<u8>)>> {
    match s.plane.run(hook, Device::Uplink, bytes) {
        Ok(done) => Ok(Some(done)),
        Err(error) => {
            let refused = error
                .downcast_ref::<std::io::Error>()
                .and_then(std::io::Error::raw_os_error);
            anyhow::ensure!(
                refused == Some(22) && bytes.len() < 14 + 40,
                "{} bytes: {error:#}",
                bytes.len()
            );
            Ok(None)
        }
    }
}

fn cut(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
        let first = hello(client, vip, proto);
        s.comes(Device::Uplink, &first)
            .becomes(&first.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        let forms = |packet: Packet| {
            [
                packet.clone(),
                packet.clone().vlan(1).vlan(2),
                with_headers(dial, packet.clone(), 3),
                packet.fragment(7, 0, true),
            ]
        };
        let there = forms(first.payload(b"some more bytes"));
        let back = forms(reply(backend, client, proto).payload(b"some more bytes"));
        for (hook, packet, wanted) in there
            .iter()
            .map(|packet| (Hook::Ingress, packet, packet.clone().to(backend)))
            .chain(
                back.iter()
                    .map(|packet| (Hook::Egress, packet, packet.clone().from(vip))),
            )
        {
            let bytes = packet.bytes();
            let layers = packet::layers(&bytes, false)?;
            let needed = layers.body + if proto == TCP { 20 } else { 8 };
            for length in 14..bytes.len() {
                s.plane.forget_counters_of_programs()?;
                let Some((verdict, out)) = run_cut(&mut s, hook, &bytes[..length])? else {
                    continue;
                };
                let moved = s.plane.moved()?;
                let action = if length < needed { MALFORMED } else { TRANSLATED };
                let told = packet::tell(&bytes[..length], false);
                assert_eq!(moved, [((hook.number(), action), 1)].into(), "{hook:?} {told}");
                assert_eq!(verdict, Verdict::Next, "{hook:?} {told}");
                // The checksum over what is missing is kept right by the difference alone.
                let wanted = if length < needed {
                    bytes[..length].to_vec()
                } else {
                    wanted.cut(length)
                };
                assert!(
                    packet::same(&out, &wanted, false),
                    "{hook:?} {told}{}",
                    packet::hex(&out)
                );
            }
        }
    }
    Ok(())
}

fn foreign(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let mut others = Vec::new();
    for proto in [0x2f, 50, 51, 89, 132, 255, wire::NONE] {
        let mut packet = syn(client, vip);
        packet.body = packet::Body::Raw(proto, packet.body_bytes());
        others.push(packet.bytes());
    }
    // The other family's ICMP, and protocols of the link.
    let mut packet = syn(client, vip);
    let other = if dial == Dial::V6 { wire::ICMP } else { wire::ICMPV6 };
    packet.body = packet::Body::Raw(other, vec![3; 60]);
    others.push(packet.bytes());
    for ether_type in [0x0806u16, 0x8847, 0x88cc, 0x0600, 46] {
        let mut bytes = syn(client, vip).bytes();
        bytes[12..14].copy_from_slice(&ether_type.to_be_bytes());
        others.push(bytes);
    }
    for bytes in others {
        for hook in Hook::ALL {
            s.run(hook, Device::Uplink, &bytes).untouched(&[MISS]);
        }
    }
    Ok(())
}

fn contradictions(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let packet = syn(s.client(1), web.external);
    let mut broken = Vec::new();
    // The version is the other family's, or nobody's.
    for version in [0u8, 1, 5, 15, if dial == Dial::V6 { 4 } else { 6 }] {
        let mut bytes = packet.bytes();
        bytes[14] = version << 4 | bytes[14] & 15;
        broken.push(bytes);
    }
    if dial != Dial::V6 {
        // A header of less than five words.
        for words in 0..5 {
            let mut bytes = packet.bytes();
            bytes[14] = 0x40 | words;
            broken.push(bytes);
        }
    }
    // A tag announces another family than is there.
    let mut tagged = packet.clone();
    tagged.link = packet::Link::Ethernet(vec![Tag {
        ether_type: wire::VLAN,
        control: 7,
    }]);
    let mut bytes = tagged.bytes();
    let other = if dial == Dial::V6 { wire::IPV4 } else { wire::IPV6 };
    bytes[16..18].copy_from_slice(&other.to_be_bytes());
    broken.push(bytes);
    for bytes in broken {
        for hook in Hook::ALL {
            s.run(hook, Device::Uplink, &bytes).untouched(&[MALFORMED]);
        }
    }
    Ok(())
}

fn mapped(dial: Dial) -> Result<()> {
    if dial != Dial::V4 {
        return Ok(());
    }
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    // An IPv6 packet whose addresses are those that the maps hold IPv4 addresses as.
    let of = |end: SocketAddr| match end.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), end.port()),
        IpAddr::V6(_) => end,
    };
    let packet = syn(of(s.client(1)), of(web.external));
    for hook in Hook::ALL {
        s.run(hook, Device::Uplink, &packet.bytes()).untouched(&[MISS]);
    }
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn summed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
        let long = |packet: Packet| packet.payload(&[0xc3; 1_001]);
        let there = long(hello(client, vip, proto));
        let forward = there.clone().to(backend);
        let back = long(reply(backend, client, proto));
        let router = s.address(201, 1);
        let kind = if dial == Dial::V6 { (2, 0, 1_400) } else { (3, 4, 1_400) };
        let error = packet::error(router, client.ip(), kind, &forward, 500);
        let mut steps = vec![
            (Hook::Ingress, there.clone()),
            (Hook::Egress, back.clone()),
            (Hook::Ingress, there.vlan(4)),
            (Hook::Egress, back.clone().vlan(4).vlan(5)),
            (Hook::Egress, forward.clone()),
            (Hook::Ingress, error.clone()),
            (Hook::Egress, error),
        ];
        steps.extend(
            packet::fragments(&back, 7, 400)
                .into_iter()
                .map(|part| (Hook::Egress, part)),
        );
        for (hook, packet) in steps {
            let bytes = packet.bytes();
            let Some((verdict, out)) = s.plane.run_summed(hook, Device::Uplink, &bytes)? else {
                return Err(skip("this kernel cannot say what a program made of a card's sum"));
            };
            assert_eq!(verdict, Verdict::Next);
            assert_ne!(out, bytes, "{hook:?} {}", packet::tell(&bytes, false));
        }
    }
    Ok(())
}

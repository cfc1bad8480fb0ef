//! ICMP errors about translated flows: in whichever direction they come, their receiver recognises its own packet.

use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{ICMP_TRANSLATED, MALFORMED, MISS, NEW_FLOW, TRANSLATED},
};
use lb_tests::{
    packet::{self, Packet, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{Scene, Web, hello, reply};

pub(crate) const CASES: &[(&str, Body)] = &[
    (
        "an_error_about_a_masqueraded_packet_reaches_the_client",
        beyond_the_uplink,
    ),
    (
        "an_error_about_a_packet_with_its_own_source_names_the_frontend",
        own_source,
    ),
    ("an_error_about_an_answer_reaches_the_backend", about_answers),
    ("an_error_of_a_backend_comes_from_the_frontend", of_backends),
    ("an_error_of_the_node_itself_comes_from_the_frontend", of_the_node),
    ("as_little_as_eight_bytes_of_a_packet_are_enough", cut),
    ("errors_about_others_and_other_messages_pass_untouched", strangers),
    ("an_error_that_was_translated_is_not_translated_again", twice),
];

/// The errors of a family: fragmentation needed or packet too big with its size, unreachable, time exceeded, parameter problem.
fn kinds(dial: Dial) -> [(u8, u8, u32); 4] {
    match dial {
        Dial::V6 => [(2, 0, 1_400), (1, 0, 0), (3, 0, 0), (4, 1, 40)],
        _ => [(3, 4, 1_400), (3, 1, 0), (11, 0, 0), (12, 0, 0x0800_0000)],
    }
}

/// A flow of a client outside with a Service's only backend.
struct Flow {
    web: Web,
    client: SocketAddr,
    vip: SocketAddr,
    backend: SocketAddr,
}

fn flow(s: &mut Scene, id: u8, proto: u8) -> Result<Flow> {
    let web = s.serve(id, proto, 1)?;
    let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
    let first = hello(client, vip, proto);
    s.comes(Device::Uplink, &first)
        .becomes(&first.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
    Ok(Flow {
        web,
        client,
        vip,
        backend,
    })
}

/// Lets the flow leave by the uplink; returns the node's source.
fn masquerade(s: &mut Scene, flow: &Flow) -> SocketAddr {
    let forward = hello(flow.client, flow.backend, flow.web.proto);
    let out = s.leaves(Device::Uplink, &forward).passed(&[TRANSLATED]);
    SocketAddr::new(s.node(Device::Uplink), packet::ports(&out).expect("ports").0)
}

/// The packet inside an error as its sender sent it, with the transport checksum that it had where the error arose:
/// whoever gets an error looks at addresses and ports alone.
fn inside(sent: &Packet, seen: &Packet) -> Packet {
    let (sent_sum, seen_sum) = (checksum_of(sent), checksum_of(seen));
    sent.clone().wrong_body(seen_sum.wrapping_sub(sent_sum))
}

fn checksum_of(packet: &Packet) -> u16 {
    let body = packet.body_bytes();
    let at = if packet.proto() == TCP { 16 } else { 6 };
    u16::from_be_bytes([body[at], body[at + 1]])
}

/// A packet of some length of the client or the backend.
fn data(from: SocketAddr, to: SocketAddr, proto: u8) -> Packet {
    match proto {
        UDP => packet::udp(from, to, &[3; 64]),
        _ => packet::tcp(from, to, flags::ACK).payload(&[3; 64]),
    }
}

/// An error inside a packet whose checksum is checked as a whole.
fn error(from: IpAddr, to: IpAddr, kind: (u8, u8, u32), about: &Packet) -> Packet {
    packet::error(from, to, kind, about, 1_000)
}

fn beyond_the_uplink(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let flow = flow(&mut s, id, proto)?;
        let source = masquerade(&mut s, &flow);
        let router = s.address(201, 1);
        let sent = data(flow.client, flow.vip, proto);
        let seen = data(source, flow.backend, proto);
        for kind in kinds(dial) {
            for from in [router, flow.backend.ip()] {
                let comes = error(from, source.ip(), kind, &seen);
                let to_client = error(from, flow.client.ip(), kind, &inside(&sent, &seen));
                s.comes(Device::Uplink, &comes).becomes(&to_client, &[ICMP_TRANSLATED]);
                // Whoever sent to the frontend hears of it from there, whoever says it.
                let wanted = to_client.clone().addresses(flow.vip.ip(), flow.client.ip());
                s.leaves(Device::Uplink, &to_client)
                    .becomes(&wanted, &[ICMP_TRANSLATED]);
            }
        }
    }
    Ok(())
}

fn own_source(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let flow = flow(&mut s, id, proto)?;
        let router = s.address(201, 1);
        let sent = data(flow.client, flow.vip, proto);
        let seen = data(flow.client, flow.backend, proto);
        for kind in kinds(dial) {
            let comes = error(router, flow.client.ip(), kind, &seen);
            let wanted = error(router, flow.client.ip(), kind, &inside(&sent, &seen));
            s.comes(Device::Second, &comes).becomes(&wanted, &[ICMP_TRANSLATED]);
            // Or where it leaves, if it came in where no program is.
            let wanted = wanted.addresses(flow.vip.ip(), flow.client.ip());
            s.leaves(Device::Uplink, &comes).becomes(&wanted, &[ICMP_TRANSLATED]);
        }
    }
    Ok(())
}

fn about_answers(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        for masqueraded in [false, true] {
            let flow = flow(&mut s, id + if masqueraded { 4 } else { 0 }, proto)?;
            let peer = if masqueraded {
                masquerade(&mut s, &flow)
            } else {
                flow.client
            };
            let router = s.address(201, 2);
            let sent = data(flow.backend, peer, proto);
            let seen = data(flow.vip, flow.client, proto);
            for kind in kinds(dial) {
                for from in [router, flow.client.ip()] {
                    let comes = error(from, flow.vip.ip(), kind, &seen);
                    let wanted = error(from, flow.backend.ip(), kind, &inside(&sent, &seen));
                    s.comes(Device::Uplink, &comes).becomes(&wanted, &[ICMP_TRANSLATED]);
                    // A backend that talks to the node hears of it from the node.
                    let leaves = s.leaves(Device::Uplink, &wanted);
                    if masqueraded {
                        let wanted = wanted.clone().addresses(peer.ip(), flow.backend.ip());
                        leaves.becomes(&wanted, &[ICMP_TRANSLATED]);
                    } else {
                        leaves.untouched(&[MISS]);
                    }
                }
            }
        }
    }
    Ok(())
}

fn of_backends(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let flow = flow(&mut s, id, proto)?;
        let sent = data(flow.client, flow.vip, proto);
        let seen = data(flow.client, flow.backend, proto);
        for kind in kinds(dial) {
            let leaves = error(flow.backend.ip(), flow.client.ip(), kind, &seen);
            let wanted = error(flow.vip.ip(), flow.client.ip(), kind, &inside(&sent, &seen));
            s.leaves(Device::Uplink, &leaves).becomes(&wanted, &[ICMP_TRANSLATED]);
        }
    }
    Ok(())
}

fn of_the_node(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let flow = flow(&mut s, id, proto)?;
        let node = s.node(Device::Uplink);
        let sent = data(flow.client, flow.vip, proto);
        let seen = data(flow.client, flow.backend, proto);
        for kind in kinds(dial) {
            let leaves = error(node, flow.client.ip(), kind, &seen);
            let wanted = error(flow.vip.ip(), flow.client.ip(), kind, &inside(&sent, &seen));
            s.leaves(Device::Uplink, &leaves).becomes(&wanted, &[ICMP_TRANSLATED]);
            // To the backend, about an answer that did not get through the node.
            let answer = data(flow.backend, flow.client, proto);
            let about = error(node, flow.backend.ip(), kind, &answer);
            s.leaves(Device::Second, &about).untouched(&[MISS]);
        }
    }
    Ok(())
}

fn cut(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let flow = flow(&mut s, id, proto)?;
        let router = s.address(201, 1);
        let sent = data(flow.client, flow.vip, proto);
        let seen = data(flow.client, flow.backend, proto);
        let ip = if dial == Dial::V6 { 40 } else { 20 };
        let whole = seen.ip_bytes().len();
        for length in 0..=whole {
            let comes = packet::error(router, flow.client.ip(), kinds(dial)[0], &seen, length);
            let wanted = packet::error(router, flow.client.ip(), kinds(dial)[0], &inside(&sent, &seen), length);
            let seen = s.comes(Device::Uplink, &comes);
            if length < ip + 8 {
                seen.untouched(&[MISS]);
            } else {
                seen.becomes(&wanted, &[ICMP_TRANSLATED]);
            }
        }
        // The error itself is cut off behind its type.
        let comes = packet::error(router, flow.client.ip(), kinds(dial)[0], &seen, 1_000);
        let start = 14 + ip;
        for length in start..start + 8 + ip {
            let seen = s.run(lb_tests::plane::Hook::Ingress, Device::Uplink, &comes.cut(length));
            seen.untouched(if length == start { &[MALFORMED] } else { &[MISS] });
        }
    }
    Ok(())
}

fn strangers(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let flow = flow(&mut s, 1, TCP)?;
    let router = s.address(201, 1);
    let to = flow.client.ip();
    let about = data(flow.client, flow.backend, TCP);
    let echo = if dial == Dial::V6 {
        (128, 0, 0x0001_0001)
    } else {
        (8, 0, 0x0001_0001)
    };
    let redirect = if dial == Dial::V6 { (137, 0, 0) } else { (5, 1, 0) };
    let kind = kinds(dial)[0];
    let later = packet::fragments(&about, 7, 32).remove(1);
    let others = [
        packet::error(router, to, echo, &about, 64),
        packet::error(router, to, redirect, &about, 64),
        // About a packet of another client, of another protocol, of no flow, and about a later fragment.
        error(router, to, kind, &about.clone().from((to, 1).into())),
        error(router, to, kind, &packet::udp(flow.client, flow.backend, b"x")),
        error(router, to, kind, &error(to, router, kind, &about)),
        error(router, to, kind, &later),
        // A fragment of an error is put together where it is received.
        error(router, to, kind, &about).fragment(3, 0, true),
        error(router, to, kind, &about).fragment(3, 9, false),
    ];
    for packet in others {
        s.comes(Device::Uplink, &packet).untouched(&[MISS]);
        s.leaves(Device::Uplink, &packet).untouched(&[MISS]);
    }
    // About a first fragment: that has the ports.
    let first = packet::fragments(&about, 7, 32).remove(0);
    let wanted = packet::fragments(&about.clone().to(flow.vip), 7, 32).remove(0);
    let seen = s.comes(Device::Uplink, &error(router, to, kind, &first));
    let wanted = error(router, to, kind, &wanted);
    let out = seen.passed(&[ICMP_TRANSLATED]);
    let ends = |bytes: &[u8]| {
        let outer = packet::layers(bytes, false).expect("whole");
        packet::inner(bytes, &outer).map(|inner| (inner.layers.src, inner.layers.dst))
    };
    assert_eq!(ends(&out), ends(&wanted.bytes()));
    Ok(())
}

fn twice(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let flow = flow(&mut s, 1, TCP)?;
    let answer = reply(flow.backend, flow.client, TCP);
    s.leaves(Device::Uplink, &answer)
        .becomes(&answer.clone().from(flow.vip), &[TRANSLATED]);
    let source = masquerade(&mut s, &flow);
    let router = s.address(201, 1);
    let sent = data(flow.client, flow.vip, TCP);
    let seen = data(source, flow.backend, TCP);
    let comes = error(router, source.ip(), kinds(dial)[0], &seen);
    let wanted = error(router, flow.client.ip(), kinds(dial)[0], &inside(&sent, &seen));
    s.comes(Device::Uplink, &comes).becomes(&wanted, &[ICMP_TRANSLATED]);
    s.comes(Device::Second, &wanted).untouched(&[MISS]);
    let left = wanted.clone().addresses(flow.vip.ip(), flow.client.ip());
    s.leaves(Device::Second, &wanted).becomes(&left, &[ICMP_TRANSLATED]);
    s.leaves(Device::Uplink, &left).untouched(&[MISS]);
    Ok(())
}

//! Who is believed: half handshakes, resets and errors that anybody can forge, tuples that lead nowhere, flows that are over.

use std::net::SocketAddr;

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{
        EVICTED, FLOWS_FULL, ICMP_TRANSLATED, MISS, NEW_FLOW, RECORDED, REFUSED, RERESOLVED, RESUMED, REUSED,
        TRANSLATED, UNANSWERED,
    },
    event::outcome,
    flow::sent,
};
use lb_tests::{
    packet::{self, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{SECOND, Scene, hello, reply, syn, tuple};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("a_handshake_that_the_client_never_took_up_gives_way", half_handshake),
    ("a_reset_is_undone_by_whoever_goes_on", reset_undone),
    ("what_answers_no_syn_is_no_answer", no_answer),
    ("a_flow_that_is_over_is_nobodys", over),
    ("a_client_that_dials_the_backend_itself_is_left_alone", direct),
    ("a_flow_whose_first_tuple_is_missing_is_found_by_the_second", adopted),
    ("a_flow_that_was_lost_comes_back_from_the_same_port", same_port),
    ("an_error_goes_to_who_sent_the_packet_alone", errors),
    ("nobody_answers_what_comes_from_nobody_or_from_many", from_nobody),
    ("a_datagram_flow_ends_with_its_frontend", frontend_gone),
];

fn half_handshake(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.shrink(2);
    let (vip, backend) = (web.external, web.backends[0].1);
    s.open(s.client(1), vip);
    // A SYN in another's name is answered, and that is all.
    let forged = s.client(2);
    s.begin(forged, vip);
    s.answer(forged, vip, backend, flags::SYN | flags::ACK, &[TRANSLATED]);
    s.pass(SECOND + 1);
    let next = syn(s.client(3), vip);
    s.comes(Device::Uplink, &next)
        .becomes(&next.clone().to(backend), &[RECORDED, EVICTED, NEW_FLOW, TRANSLATED]);
    assert_eq!(s.record()?.client, forged.ip().into());
    // So it is with a question and its answer.
    let dns = s.serve(2, UDP, 1)?;
    let (vip, backend) = (dns.external, dns.backends[0].1);
    s.pass(SECOND + 1);
    let question = packet::udp(s.client(4), vip, b"?");
    s.comes(Device::Uplink, &question)
        .passed(&[RECORDED, EVICTED, NEW_FLOW, TRANSLATED]);
    s.leaves(Device::Uplink, &reply(backend, s.client(4), UDP))
        .passed(&[TRANSLATED]);
    s.pass(SECOND + 1);
    let other = packet::udp(s.client(5), vip, b"?");
    s.comes(Device::Uplink, &other).passed(&[EVICTED, NEW_FLOW, TRANSLATED]);
    // Who goes on stays.
    s.leaves(Device::Uplink, &reply(backend, s.client(5), UDP))
        .passed(&[TRANSLATED]);
    s.comes(Device::Uplink, &other).passed(&[TRANSLATED]);
    s.pass(SECOND + 1);
    let third = packet::udp(s.client(6), vip, b"?");
    s.comes(Device::Uplink, &third).dropped(&[FLOWS_FULL]);
    Ok(())
}

fn reset_undone(dial: Dial) -> Result<()> {
    for by_client in [true, false] {
        let mut s = Scene::new(dial)?;
        let web = s.serve(1, TCP, 1)?;
        s.shrink(1);
        let (client, vip) = (s.client(1), web.external);
        let backend = s.open(client, vip);
        if by_client {
            s.say(client, vip, backend, flags::RST, &[TRANSLATED, RECORDED]);
            s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
        } else {
            s.answer(client, vip, backend, flags::RST, &[TRANSLATED, RECORDED]);
            s.answer(client, vip, backend, flags::ACK, &[TRANSLATED]);
        }
        // A sequence number that nobody expected: the connection goes on, and keeps its slot.
        let (_, flow) = s.flow_of(client, vip, TCP).expect("a flow");
        assert_eq!((flow.client_sent | flow.backend_sent) & sent::RST, 0);
        s.pass(100 * SECOND);
        s.comes(Device::Uplink, &syn(s.client(9), vip)).dropped(&[FLOWS_FULL]);
        s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
        // Its end was told once.
        s.record()?;
        s.say(client, vip, backend, flags::RST, &[TRANSLATED]);
        assert!(s.plane.records()?.is_empty());
    }
    Ok(())
}

fn no_answer(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip, (id, backend)) = (s.client(1), web.external, web.backends[0]);
    s.plane.forget_counters()?;
    s.begin(client, vip);
    // The backend remembers an earlier connection on these ports, and acknowledges that.
    for flags in [flags::ACK, flags::PSH | flags::ACK, flags::FIN | flags::ACK] {
        s.answer(client, vip, backend, flags, &[TRANSLATED]);
    }
    assert_eq!(s.plane.backend(id).outside.established, 0);
    // The client resets that one, and says its SYN again.
    s.say(client, vip, backend, flags::RST, &[TRANSLATED, RECORDED]);
    assert_eq!(s.record()?.outcome, outcome::ABANDONED);
    let again = syn(client, vip);
    s.comes(Device::Uplink, &again)
        .becomes(&again.clone().to(backend), &[NEW_FLOW, REUSED, TRANSLATED]);
    s.answer(client, vip, backend, flags::SYN | flags::ACK, &[TRANSLATED]);
    assert_eq!(s.plane.backend(id).outside.established, 1);
    Ok(())
}

fn over(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 2)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    s.close(client, vip, backend);
    s.record()?;
    s.pass(61 * SECOND);
    s.leaves(Device::Uplink, &packet::tcp(backend, client, flags::FIN | flags::ACK))
        .untouched(&[MISS]);
    // What the client says now is the middle of something that nobody knows.
    s.publish(
        web.sets.1,
        &web.members((0..2).filter(|i| web.backends[*i].1 != backend)),
    )?;
    let (_, other) = s.choice(web.sets.1, client, vip, TCP);
    s.say(client, vip, other, flags::ACK, &[RESUMED, TRANSLATED]);
    Ok(())
}

fn direct(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    let dial_itself = syn(client, backend);
    s.close(client, vip, backend);
    s.record()?;
    // The flow is over, and its tuple goes to who dials the backend itself: answers come from the backend then.
    s.comes(Device::Uplink, &dial_itself).untouched(&[MISS]);
    s.leaves(Device::Uplink, &packet::tcp(backend, client, flags::SYN | flags::ACK))
        .untouched(&[MISS]);
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn adopted(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
        let first = hello(client, vip, proto);
        s.comes(Device::Uplink, &first)
            .becomes(&first.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
        let (before, _) = s.flow_of(client, vip, proto).expect("a flow");
        s.plane.remove_tuple(&tuple(client, vip, proto))?;
        let more = match proto {
            UDP => packet::udp(client, vip, b"more"),
            _ => packet::tcp(client, vip, flags::ACK),
        };
        s.comes(Device::Uplink, &more)
            .becomes(&more.clone().to(backend), &[TRANSLATED]);
        let (after, _) = s.flow_of(client, vip, proto).expect("the same flow");
        assert_eq!(before, after);
    }
    Ok(())
}

fn same_port(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.node, web.backends[0].1);
        let first = hello(client, vip, proto);
        let forward = first.clone().to(backend);
        let mut ports = Vec::new();
        for _ in 0..2 {
            s.comes(Device::Uplink, &first).passed(&[NEW_FLOW, TRANSLATED]);
            let out = s.leaves(Device::Uplink, &forward).passed(&[TRANSLATED]);
            ports.push(packet::ports(&out).expect("ports").0);
            s.plane.forget_flows()?;
        }
        assert_eq!(ports[0], ports[1], "the backend knows the connection by it");
    }
    Ok(())
}

fn errors(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.begin(client, vip);
    let kind = if dial == Dial::V6 { (2, 0, 1_400) } else { (3, 4, 1_400) };
    let router = s.address(201, 1);
    let about = packet::tcp(client, backend, flags::ACK);
    for to in [s.client(2).ip(), vip.ip(), backend.ip()] {
        let stray = packet::error(router, to, kind, &about, 1_000);
        s.comes(Device::Uplink, &stray).untouched(&[MISS]);
        s.leaves(Device::Uplink, &stray).untouched(&[MISS]);
    }
    let right = packet::error(router, client.ip(), kind, &about, 1_000);
    s.comes(Device::Uplink, &right).passed(&[ICMP_TRANSLATED]);
    Ok(())
}

fn from_nobody(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.publish(web.sets.1, &[])?;
    let nobodies: &[&str] = match dial {
        Dial::V6 => &["::", "::1", "ff02::1", "ff0e::5"],
        _ => &[
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "239.1.1.1",
            "255.255.255.255",
        ],
    };
    for nobody in nobodies {
        let packet = syn(SocketAddr::new(nobody.parse()?, 40_000), web.external);
        s.comes(Device::Uplink, &packet).dropped(&[UNANSWERED]);
    }
    let packet = syn(s.client(1), web.external);
    s.comes(Device::Uplink, &packet).counted(&[REFUSED]);
    Ok(())
}

fn frontend_gone(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let other = s.serve(3, UDP, 1)?;
    let (client, vip) = (s.client(1), dns.external);
    let question = packet::udp(client, vip, b"?");
    s.comes(Device::Uplink, &question).passed(&[NEW_FLOW, TRANSLATED]);
    // Another Service has the address now.
    let key = lb_tests::plane::key(vip, UDP);
    let theirs = s.rules.frontends[&lb_tests::plane::key(other.external, UDP)];
    s.rules.frontends.insert(key, theirs);
    s.write()?;
    s.comes(Device::Uplink, &question)
        .becomes(&question.clone().to(other.backends[0].1), &[RERESOLVED, TRANSLATED]);
    s.rules.frontends.remove(&key);
    s.write()?;
    s.comes(Device::Uplink, &question).untouched(&[MISS]);
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

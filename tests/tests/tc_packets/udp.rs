//! UDP: a flow goes on while its backend is there, and is chosen anew when it has left. And affinity, by source, of both protocols.

use std::net::SocketAddr;

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    backend::state,
    counter::action::{NEW_FLOW, RECLAIMED, REFUSED, RERESOLVED, REUSED, TRANSLATED},
    flow::{flag as flow_flag, sent},
};
use lb_tests::{packet, plane::Device, runner::Body, world::Dial};

use crate::scene::{SECOND, Scene, Web, hello};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("a_datagram_flow_goes_on", goes_on),
    ("a_flow_whose_backend_left_is_chosen_anew", left),
    (
        "an_id_that_went_to_another_address_is_no_backend_of_the_flow",
        other_address,
    ),
    ("a_flow_stays_while_its_backend_drains", drains),
    (
        "a_client_that_asked_before_there_was_an_endpoint_is_served_after",
        first_endpoint,
    ),
    ("a_datagram_without_checksum_stays_without_in_ipv4", unsummed),
    ("a_silent_flow_is_reclaimed_without_a_record", silent),
    ("affinity_is_by_source_whatever_the_port", affinity),
    ("affinity_ends_with_its_timeout_and_with_its_backend", affinity_ends),
    (
        "affinity_of_clients_inside_and_outside_are_two_memories",
        affinity_sides,
    ),
];

/// A datagram of a flow that goes to a backend.
fn ask(s: &mut Scene, client: SocketAddr, web: &Web, backend: SocketAddr, counts: &[u32]) {
    let question = packet::udp(client, web.external, b"question");
    s.comes(Device::Uplink, &question)
        .becomes(&question.clone().to(backend), counts);
}

fn goes_on(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 3)?;
    let client = s.client(1);
    let (_, backend) = s.choice(dns.sets.1, client, dns.external, UDP);
    ask(&mut s, client, &dns, backend, &[NEW_FLOW, TRANSLATED]);
    // Another set does not move it, nor does time, as long as the client goes on.
    s.publish(dns.sets.1, &dns.members([2]))?;
    for seconds in [1, 29, 179, 179] {
        s.pass(seconds * SECOND);
        ask(&mut s, client, &dns, backend, &[TRANSLATED]);
        let answer = packet::udp(backend, client, b"answer");
        s.leaves(Device::Uplink, &answer)
            .becomes(&answer.clone().from(dns.external), &[TRANSLATED]);
    }
    let (_, flow) = s.flow_of(client, dns.external, UDP).expect("a flow");
    assert_eq!(
        (flow.client_sent, flow.backend_sent, flow.flags),
        (sent::ANY | sent::AGAIN, sent::ANY, flow_flag::MASQUERADE)
    );
    assert!(flow.established_ns >= flow.start_ns && flow.isn == 0);
    Ok(())
}

fn left(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 3)?;
    let client = s.client(1);
    let (id, backend) = s.choice(dns.sets.1, client, dns.external, UDP);
    ask(&mut s, client, &dns, backend, &[NEW_FLOW, TRANSLATED]);
    s.rules.vacate(id);
    let others: Vec<usize> = (0..3).filter(|i| dns.backends[*i].0 != id).collect();
    s.publish(dns.sets.1, &dns.members(others))?;
    let (_, next) = s.choice(dns.sets.1, client, dns.external, UDP);
    s.plane.forget_counters()?;
    ask(&mut s, client, &dns, next, &[RERESOLVED, TRANSLATED]);
    assert_eq!(s.plane.service(dns.id).connects, 1);
    ask(&mut s, client, &dns, next, &[TRANSLATED]);
    assert_eq!(s.plane.tuples()?.len(), 2);
    assert!(s.plane.records()?.is_empty(), "datagrams have no ends");
    Ok(())
}

fn other_address(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let client = s.client(1);
    let (id, backend) = dns.backends[0];
    ask(&mut s, client, &dns, backend, &[NEW_FLOW, TRANSLATED]);
    let moved = [
        SocketAddr::new(s.address(99, 1), backend.port()),
        SocketAddr::new(s.address(99, 1), backend.port() + 1),
    ];
    for next in moved {
        s.rules.add_backend(id, dns.id, next, UDP);
        s.publish(dns.sets.1, &[(id, 1)])?;
        ask(&mut s, client, &dns, next, &[RERESOLVED, TRANSLATED]);
    }
    Ok(())
}

fn drains(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 2)?;
    let client = s.client(1);
    let (id, backend) = s.choice(dns.sets.1, client, dns.external, UDP);
    ask(&mut s, client, &dns, backend, &[NEW_FLOW, TRANSLATED]);
    for how in [state::DRAINING, state::EJECTED] {
        s.rules.set_state(id, how);
        s.publish(dns.sets.1, &[])?;
        ask(&mut s, client, &dns, backend, &[TRANSLATED]);
    }
    Ok(())
}

fn first_endpoint(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let client = s.client(1);
    s.publish(dns.sets.1, &[])?;
    let question = packet::udp(client, dns.external, b"question");
    let seen = s.comes(Device::Uplink, &question);
    assert_eq!(seen.verdict, lb_tests::plane::Verdict::Answer);
    seen.counted(&[REFUSED]);
    s.publish(dns.sets.1, &dns.members([0]))?;
    ask(&mut s, client, &dns, dns.backends[0].1, &[NEW_FLOW, TRANSLATED]);
    Ok(())
}

fn unsummed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let (client, backend) = (s.client(1), dns.backends[0].1);
    let question = packet::udp(client, dns.external, b"odd").unsummed();
    s.comes(Device::Uplink, &question)
        .becomes(&question.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
    let answer = packet::udp(backend, client, b"").unsummed();
    s.leaves(Device::Uplink, &answer)
        .becomes(&answer.clone().from(dns.external), &[TRANSLATED]);
    // One whose sum happens to be zero has all ones, for zero is none.
    for filler in 0..=u16::MAX {
        let question = packet::udp(client, dns.external, &filler.to_be_bytes());
        let wanted = question.clone().to(backend);
        let body = wanted.body_bytes();
        if body[6..8] == [255, 255] {
            s.comes(Device::Uplink, &question).becomes(&wanted, &[TRANSLATED]);
            return Ok(());
        }
    }
    panic!("some filler makes the sum zero");
}

fn silent(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    let backend = dns.backends[0].1;
    s.shrink(1);
    let clients = [s.client(1), s.client(2), s.client(3)];
    // Unanswered for 30 s, answered for 180 s.
    ask(&mut s, clients[0], &dns, backend, &[NEW_FLOW, TRANSLATED]);
    s.pass(31 * SECOND);
    ask(&mut s, clients[1], &dns, backend, &[RECLAIMED, NEW_FLOW, TRANSLATED]);
    let answer = packet::udp(backend, clients[1], b"answer");
    s.leaves(Device::Uplink, &answer)
        .becomes(&answer.clone().from(dns.external), &[TRANSLATED]);
    // A question and its answer are kept no longer; a client that goes on is.
    s.pass(29 * SECOND);
    ask(&mut s, clients[1], &dns, backend, &[TRANSLATED]);
    s.pass(179 * SECOND);
    let third = packet::udp(clients[2], dns.external, b"question");
    s.comes(Device::Uplink, &third)
        .dropped(&[lb_common::counter::action::FLOWS_FULL]);
    s.pass(2 * SECOND);
    ask(&mut s, clients[2], &dns, backend, &[RECLAIMED, NEW_FLOW, TRANSLATED]);
    assert!(s.plane.records()?.is_empty());
    Ok(())
}

/// A client's first packet from one of its ports; returns its backend.
fn from_port(s: &mut Scene, device: Device, client: SocketAddr, vip: SocketAddr, proto: u8) -> SocketAddr {
    let first = hello(client, vip, proto);
    let seen = s.comes(device, &first);
    let (_, flow) = s.flow_of(client, vip, proto).expect("a flow");
    let backend = lb_tests::plane::end(flow.backend, flow.backend_port);
    seen.becomes(&first.to(backend), &[NEW_FLOW, TRANSLATED]);
    backend
}

fn sticky(s: &mut Scene, id: u8, proto: u8, seconds: u32) -> Result<Web> {
    let web = s.serve(id, proto, 8)?;
    for vip in web.outside().into_iter().chain([web.cluster]) {
        s.rules.stick(vip, proto, seconds);
    }
    s.write()?;
    Ok(web)
}

fn affinity(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = sticky(&mut s, id, proto, 10)?;
        let mut met = std::collections::BTreeSet::new();
        for n in 0..20 {
            let client = s.client(n).ip();
            let backend = from_port(&mut s, Device::Uplink, (client, 40_000).into(), web.external, proto);
            met.insert(backend);
            for port in [40_001, 1, 65_535] {
                s.plane.age_affinities(9 * SECOND)?;
                let vip = web.outside()[usize::from(port % 3 == 0)];
                let next = from_port(&mut s, Device::Uplink, (client, port).into(), vip, proto);
                assert_eq!(next, backend, "each new flow refreshes the memory");
            }
        }
        assert!(met.len() > 3, "clients are spread: {met:?}");
    }
    Ok(())
}

fn affinity_ends(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = sticky(&mut s, 1, TCP, 10)?;
    let (client, vip) = (s.client(1).ip(), web.external);
    let first = from_port(&mut s, Device::Uplink, (client, 40_000).into(), vip, TCP);
    let (id, _) = *web.backends.iter().find(|(_, end)| *end == first).expect("a backend");
    // The memory holds though the hash of another port says otherwise.
    let port = (40_001..=u16::MAX)
        .find(|port| s.choice(web.sets.1, (client, *port).into(), vip, TCP).0 != id)
        .expect("some port's hash falls elsewhere");
    assert_eq!(
        from_port(&mut s, Device::Uplink, (client, port).into(), vip, TCP),
        first
    );
    // A backend that may get nothing new ends it at once, and the next one is remembered.
    s.rules.set_state(id, state::DRAINING);
    let rest: Vec<usize> = (0..8).filter(|i| web.backends[*i].0 != id).collect();
    s.publish(web.sets.1, &web.members(rest))?;
    let (_, wanted) = s.choice(web.sets.1, (client, 50_000).into(), vip, TCP);
    assert_eq!(
        from_port(&mut s, Device::Uplink, (client, 50_000).into(), vip, TCP),
        wanted
    );
    assert_eq!(
        from_port(&mut s, Device::Uplink, (client, 50_001).into(), vip, TCP),
        wanted
    );
    // Affinity off: the hash alone.
    s.rules
        .frontends
        .get_mut(&lb_tests::plane::key(vip, TCP))
        .expect("a frontend")
        .affinity_seconds = 0;
    s.write()?;
    let (_, wanted) = s.choice(web.sets.1, (client, 50_002).into(), vip, TCP);
    assert_eq!(
        from_port(&mut s, Device::Uplink, (client, 50_002).into(), vip, TCP),
        wanted
    );
    // A timeout that is over.
    s.rules
        .frontends
        .get_mut(&lb_tests::plane::key(vip, TCP))
        .expect("a frontend")
        .affinity_seconds = 10;
    s.write()?;
    s.plane.age_affinities(10 * SECOND)?;
    let port = (51_000..=u16::MAX)
        .find(|port| s.choice(web.sets.1, (client, *port).into(), vip, TCP).1 != wanted)
        .expect("some port's hash falls elsewhere");
    let (_, by_hash) = s.choice(web.sets.1, (client, port).into(), vip, TCP);
    assert_eq!(
        from_port(&mut s, Device::Uplink, (client, port).into(), vip, TCP),
        by_hash
    );
    Ok(())
}

fn affinity_sides(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = sticky(&mut s, 1, TCP, 10)?;
    s.publish(web.sets.0, &web.members(0..4))?;
    s.publish(web.sets.1, &web.members(4..8))?;
    // One address, here a guest and there outside: it is remembered apart, for the sets are two.
    let address = s.guest(1).ip();
    let here = from_port(&mut s, Device::Guest, (address, 1_000).into(), web.external, TCP);
    let there = from_port(&mut s, Device::Uplink, (address, 1_001).into(), web.external, TCP);
    assert_ne!(here, there);
    assert_eq!(
        from_port(&mut s, Device::Guest, (address, 1_002).into(), web.cluster, TCP),
        here
    );
    assert_eq!(
        from_port(&mut s, Device::Uplink, (address, 1_003).into(), web.node, TCP),
        there
    );
    // A SYN on a known tuple asks the memory too.
    let syn = packet::tcp((address, 1_003).into(), web.node, 2).seq(9);
    s.comes(Device::Uplink, &syn).becomes(
        &syn.clone().to(there),
        &[lb_common::counter::action::RECORDED, NEW_FLOW, REUSED, TRANSLATED],
    );
    Ok(())
}

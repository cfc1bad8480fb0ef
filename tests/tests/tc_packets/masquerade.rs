//! The node's own source: towards backends beyond an uplink under policy Cluster, and where a guest meets itself. And its ports:
//! collisions, exhaustion, and when they are free again.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    counter::action::{COLLISION, MISS, NEW_FLOW, NO_SOURCE, PORTS_EXHAUSTED, RECORDED, REFUSED, REUSED, TRANSLATED},
    event::outcome,
    flow::{FIRST_PORT, LAST_PORT, role},
    frontend::flag,
};
use lb_tests::{
    packet::{self, Packet, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{SECOND, Scene, Web, hello, reply, syn};

pub(crate) const CASES: &[(&str, Body)] = &[
    (
        "a_flow_to_a_backend_beyond_the_uplink_has_the_nodes_source",
        out_and_back,
    ),
    ("each_uplink_has_its_own_source", uplinks),
    ("policy_local_keeps_the_source", local),
    ("a_guests_flow_keeps_its_source_on_the_uplink", guests_keep),
    ("a_flow_from_outside_to_a_guest_keeps_its_source", to_guest),
    ("a_guest_that_meets_itself_meets_the_node", hairpin),
    ("ports_are_unique_towards_one_backend_and_shared_by_several", ports),
    ("a_taken_port_is_tried_again_elsewhere", collisions),
    ("exhausted_ports_are_refused_and_counted", exhausted),
    ("ports_are_free_after_their_flows", freed),
    ("an_interface_without_an_address_sends_nothing_from_itself", no_source),
    (
        "a_client_with_two_frontends_on_one_backend_is_told_apart",
        two_frontends,
    ),
];

/// Sends a client's packet through the node to a remote backend; returns what the backend sees as its sender.
fn through(s: &mut Scene, device: Device, first: &Packet, backend: SocketAddr, counts: &[u32]) -> SocketAddr {
    let forward = first.clone().to(backend);
    s.comes(Device::Uplink, first).becomes(&forward, counts);
    masqueraded(s, device, &forward)
}

/// Sends a packet out with the node's source; returns that source.
fn masqueraded(s: &mut Scene, device: Device, forward: &Packet) -> SocketAddr {
    let node = s.node(device);
    let range = (s.plane.settings().first_port, s.plane.settings().last_port);
    let seen = s.leaves(device, forward);
    let port = packet::ports(&seen.out).expect("ports").0;
    assert!((range.0..=range.1).contains(&port), "{port}");
    let source = SocketAddr::new(node, port);
    seen.becomes(&forward.clone().from(source), &[TRANSLATED]);
    source
}

/// A remote backend's answer to the node's source, back to the client.
fn back(s: &mut Scene, web: &Web, source: SocketAddr, client: SocketAddr, vip: SocketAddr) {
    let backend = web.backends[0].1;
    let answer = reply(backend, source, web.proto);
    let inside = answer.clone().to(client);
    s.comes(Device::Uplink, &answer).becomes(&inside, &[TRANSLATED]);
    s.leaves(Device::Uplink, &inside)
        .becomes(&inside.clone().from(vip), &[TRANSLATED]);
}

fn out_and_back(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.node, web.backends[0].1);
        let first = hello(client, vip, proto);
        let source = through(&mut s, Device::Uplink, &first, backend, &[NEW_FLOW, TRANSLATED]);
        assert!((FIRST_PORT..=LAST_PORT).contains(&source.port()));
        back(&mut s, &web, source, client, vip);
        // The source stays, and whatever enters by the other uplink is the flow's too.
        let forward = first.clone().to(backend);
        s.comes(Device::Second, &first).becomes(&forward, &[TRANSLATED]);
        s.leaves(Device::Second, &forward)
            .becomes(&forward.clone().from(source), &[TRANSLATED]);
        let (entry, flow) = s.flow_of(source, backend, proto).expect("the flow of its source");
        assert_eq!((entry.role(), flow.source_port.get()), (role::BACK, source.port()));
        let answer = reply(backend, source, proto);
        s.comes(Device::Second, &answer)
            .becomes(&answer.clone().to(client), &[TRANSLATED]);
        // Who asks the node's source for something else is nobody of ours.
        let stray = reply((backend.ip(), backend.port() + 1).into(), source, proto);
        s.comes(Device::Uplink, &stray).untouched(&[MISS]);
    }
    Ok(())
}

fn uplinks(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    for (n, device) in [(1, Device::Uplink), (2, Device::Second)] {
        let first = syn(s.client(n), web.external);
        let source = through(&mut s, device, &first, web.backends[0].1, &[NEW_FLOW, TRANSLATED]);
        assert_eq!(source.ip(), s.node(device));
    }
    Ok(())
}

fn local(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        s.change_flags(web.node, proto, |flags| *flags &= !flag::MASQUERADE_OUTSIDE)?;
        let first = hello(s.client(id), web.node, proto);
        let forward = first.clone().to(web.backends[0].1);
        s.comes(Device::Uplink, &first)
            .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
        s.leaves(Device::Uplink, &forward).untouched(&[MISS]);
    }
    Ok(())
}

fn guests_keep(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        for (n, vip) in (1..).zip([web.cluster, web.node, web.balancer]) {
            let guest = s.guest(n + 10 * id);
            let first = hello(guest, vip, proto);
            let forward = first.clone().to(web.backends[0].1);
            s.comes(Device::Guest, &first)
                .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
            s.leaves(Device::Uplink, &forward).untouched(&[MISS]);
            s.leaves(Device::OtherGuest, &forward).untouched(&[MISS]);
        }
    }
    Ok(())
}

fn to_guest(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let client = s.client(id);
        let first = hello(client, web.node, proto);
        let forward = first.clone().to(web.backends[0].1);
        s.comes(Device::Uplink, &first)
            .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
        s.leaves(Device::Guest, &forward).untouched(&[MISS]);
        let answer = reply(web.backends[0].1, client, proto);
        s.leaves(Device::Uplink, &answer)
            .becomes(&answer.clone().from(web.node), &[TRANSLATED]);
    }
    Ok(())
}

fn hairpin(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = web.backends[0].1;
        // The guest is its own Service's backend.
        let guest = SocketAddr::new(backend.ip(), 45_000);
        let first = hello(guest, web.cluster, proto);
        let forward = first.clone().to(backend);
        s.comes(Device::Guest, &first)
            .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
        let source = masqueraded(&mut s, Device::Guest, &forward);
        assert_eq!(source.ip(), s.node(Device::Guest));
        // It answers the node, and hears from the frontend.
        let answer = reply(backend, source, proto);
        let inside = answer.clone().to(guest);
        s.comes(Device::Guest, &answer).becomes(&inside, &[TRANSLATED]);
        s.leaves(Device::Guest, &inside)
            .becomes(&inside.clone().from(web.cluster), &[TRANSLATED]);
        // By another interface it does not meet itself.
        let second = hello((backend.ip(), 45_001).into(), web.cluster, proto);
        let forward = second.clone().to(backend);
        s.comes(Device::Guest, &second)
            .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
        s.leaves(Device::Uplink, &forward).untouched(&[MISS]);
    }
    Ok(())
}

/// Makes the range of the node's own ports small.
fn narrow(s: &mut Scene, first: u16, last: u16) {
    let mut settings = s.plane.settings();
    (settings.first_port, settings.last_port) = (first, last);
    s.plane.set_settings(settings);
}

fn ports(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 2)?;
        narrow(&mut s, 20_000, 20_015);
        let mut used: BTreeSet<(SocketAddr, u16)> = BTreeSet::new();
        for n in 0..20 {
            let client = s.client(n);
            let (_, backend) = s.choice(web.sets.1, client, web.external, proto);
            let first = hello(client, web.external, proto);
            let source = through(&mut s, Device::Uplink, &first, backend, &[NEW_FLOW, TRANSLATED]);
            assert!(used.insert((backend, source.port())), "{backend} sees {source} twice");
        }
        // The protocols and the uplinks have ports of their own.
        assert_eq!(used.len(), 20);
    }
    Ok(())
}

fn collisions(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    // As many flows as ports, and each port is found wherever the search begins: it goes round.
    narrow(&mut s, 65_520, u16::MAX);
    let mut used = BTreeSet::new();
    for n in 0..16 {
        let first = syn(s.client(n), web.external);
        let source = through(
            &mut s,
            Device::Uplink,
            &first,
            web.backends[0].1,
            &[NEW_FLOW, TRANSLATED],
        );
        used.insert(source.port());
    }
    assert_eq!(used, (65_520..=u16::MAX).collect());
    Ok(())
}

fn exhausted(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = web.backends[0].1;
        narrow(&mut s, 20_000, 20_000);
        let (one, two) = (s.client(1), s.client(2));
        let first = hello(one, web.node, proto);
        through(&mut s, Device::Uplink, &first, backend, &[NEW_FLOW, TRANSLATED]);
        let second = hello(two, web.node, proto);
        let forward = second.clone().to(backend);
        s.comes(Device::Uplink, &second)
            .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
        s.leaves(Device::Uplink, &forward).dropped(&[PORTS_EXHAUSTED]);
        // The client says it again, and is refused; the flow is gone.
        let seen = s.comes(Device::Uplink, &second);
        assert_eq!(seen.verdict, lb_tests::plane::Verdict::Answer);
        assert_eq!(packet::check(&seen.out, false), []);
        seen.counted(if proto == TCP { &[RECORDED, REFUSED] } else { &[REFUSED] });
        if proto == TCP {
            assert_eq!(s.record()?.outcome, outcome::NO_LOCAL_PORT);
        }
        assert!(s.flow_of(two, web.node, proto).is_none() && s.flow_of(two, backend, proto).is_none());
        // The other uplink has another address, and so the port once more.
        let third = hello(s.client(3), web.node, proto);
        through(&mut s, Device::Second, &third, backend, &[NEW_FLOW, TRANSLATED]);
    }
    Ok(())
}

fn freed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (vip, backend) = (web.node, web.backends[0].1);
    narrow(&mut s, 20_000, 20_000);
    let one = s.client(1);
    let source = through(&mut s, Device::Uplink, &syn(one, vip), backend, &[NEW_FLOW, TRANSLATED]);
    // What has closed gives way where nothing else is free.
    s.answer(one, vip, backend, flags::SYN | flags::ACK, &[TRANSLATED]);
    s.close(one, vip, backend);
    s.record()?;
    s.pass(SECOND + 1);
    let two = s.client(2);
    let next = through(&mut s, Device::Uplink, &syn(two, vip), backend, &[NEW_FLOW, TRANSLATED]);
    assert_eq!(next, source);
    assert!(s.flow_of(one, vip, TCP).is_none(), "it went with its port");
    let (_, flow) = s.flow_of(next, backend, TCP).expect("the new owner");
    assert_eq!(flow.client, two.ip().into());
    // What was never answered gives it up when it expires, and fails then.
    s.pass(61 * SECOND);
    let three = syn(s.client(3), vip);
    s.comes(Device::Uplink, &three)
        .becomes(&three.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
    let forward = three.clone().to(backend);
    s.leaves(Device::Uplink, &forward)
        .becomes(&forward.clone().from(source), &[RECORDED, TRANSLATED]);
    assert_eq!(s.record()?.outcome, outcome::TIMED_OUT);
    // A SYN that takes its tuple back gives the port free at once.
    let again = three.clone().seq(31);
    s.comes(Device::Uplink, &again)
        .becomes(&again.clone().to(backend), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
    s.record()?;
    assert!(s.flow_of(source, backend, TCP).is_none());
    let forward = again.clone().to(backend);
    s.leaves(Device::Uplink, &forward)
        .becomes(&forward.clone().from(source), &[TRANSLATED]);
    Ok(())
}

fn no_source(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let other: std::net::IpAddr = if dial == Dial::V6 { "192.0.2.1" } else { "2001:db8::1" }.parse()?;
    // It has an address of the other family alone.
    s.rules.uplink(s.plane.index(Device::Uplink), &[other]);
    s.write()?;
    let first = syn(s.client(1), web.node);
    let forward = first.clone().to(web.backends[0].1);
    s.comes(Device::Uplink, &first)
        .becomes(&forward, &[NEW_FLOW, TRANSLATED]);
    s.leaves(Device::Uplink, &forward).dropped(&[NO_SOURCE]);
    // By an interface that the programs know nothing of, nothing is changed.
    s.leaves(Device::Unknown, &forward).untouched(&[MISS]);
    masqueraded(&mut s, Device::Second, &forward);
    Ok(())
}

fn two_frontends(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 2)?;
        let client = s.client(id);
        // One port of the client, three frontends, two backends: each backend can be met once.
        let mut met = BTreeSet::new();
        for vip in [web.node, web.external] {
            let first = hello(client, vip, proto);
            let seen = s.comes(Device::Uplink, &first);
            let (_, flow) = s.flow_of(client, vip, proto).expect("a flow");
            let backend = lb_tests::plane::end(flow.backend, flow.backend_port);
            seen.becomes(&first.to(backend), &[NEW_FLOW, TRANSLATED]);
            assert!(met.insert(backend), "answers of {backend} could not be told apart");
            let answer = reply(backend, client, proto);
            s.leaves(Device::Uplink, &answer)
                .becomes(&answer.clone().from(vip), &[TRANSLATED]);
        }
        let third = hello(client, web.balancer, proto);
        let seen = s.comes(Device::Uplink, &third);
        assert_eq!(seen.verdict, lb_tests::plane::Verdict::Answer);
        seen.counted(&[COLLISION]);
        // Those that it has go on.
        for vip in [web.node, web.external] {
            let (_, flow) = s.flow_of(client, vip, proto).expect("a flow");
            let backend = lb_tests::plane::end(flow.backend, flow.backend_port);
            let more = hello(client, vip, proto);
            s.comes(Device::Uplink, &more)
                .becomes(&more.clone().to(backend), &[TRANSLATED]);
        }
    }
    Ok(())
}

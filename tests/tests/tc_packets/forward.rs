//! From a client to a backend and back: which frontends are served to whom, and what a connection's packets become.

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    backend::{BackendCounters, ServiceCounters, Tally},
    counter::action,
    event::outcome,
    flow::{Flow, flag as flow_flag, role, sent, state},
};
use lb_tests::{
    packet::{self, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{Scene, hello, reply, syn, tuple};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("what_is_for_no_frontend_passes_untouched", strangers),
    ("node_port_external_ip_and_balancer_are_served_outside", outside),
    ("a_cluster_ip_is_served_to_guests_alone", cluster_ip),
    (
        "an_interface_that_the_programs_were_not_told_of_begins_nothing",
        unknown_interface,
    ),
    ("a_connection_is_translated_from_its_syn_to_its_last_ack", connection),
    ("a_new_flow_is_written_whole", record_of_a_flow),
    ("every_client_is_sent_where_its_hash_falls", by_hash),
    ("payload_options_and_every_flag_pass_through_a_flow", payload),
    ("wrong_checksums_stay_as_wrong_as_they_were", wrong_checksums),
    ("a_second_pass_over_the_same_packet_changes_nothing", two_passes),
    ("tcp_and_udp_of_one_number_are_two_services", protocols),
    (
        "the_packets_of_others_between_the_same_hosts_pass_untouched",
        neighbours,
    ),
    ("counters_of_service_and_backend_follow_a_connection", counters),
];

fn strangers(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 2)?;
    let client = s.client(1);
    let mut elsewhere = vec![s.client(9), web.backends[0].1];
    // The frontend's address on another port, and its port on another address.
    elsewhere.push((web.external.ip(), web.external.port() + 1).into());
    elsewhere.push((s.address(97, 200), web.external.port()).into());
    for to in elsewhere {
        for packet in [
            syn(client, to),
            packet::tcp(client, to, flags::ACK),
            packet::udp(client, to, b"x"),
        ] {
            s.comes(Device::Uplink, &packet).untouched(&[action::MISS]);
            s.leaves(Device::Uplink, &packet).untouched(&[action::MISS]);
        }
    }
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn outside(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = web.backends[0].1;
        for (n, vip) in (1..).zip(web.outside()) {
            for (device, client) in [(Device::Uplink, s.client(n)), (Device::Second, s.client(100 + n))] {
                let first = hello(client, vip, proto);
                s.comes(device, &first)
                    .becomes(&first.clone().to(backend), &[action::NEW_FLOW, action::TRANSLATED]);
                let answer = reply(backend, client, proto);
                s.leaves(device, &answer)
                    .becomes(&answer.clone().from(vip), &[action::TRANSLATED]);
            }
        }
    }
    Ok(())
}

fn cluster_ip(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let backend = web.backends[0].1;
        let stray = hello(s.client(1), web.cluster, proto);
        s.comes(Device::Uplink, &stray).untouched(&[action::MISS]);
        let guest = s.guest(id);
        let first = hello(guest, web.cluster, proto);
        s.comes(Device::Guest, &first)
            .becomes(&first.clone().to(backend), &[action::NEW_FLOW, action::TRANSLATED]);
        let answer = reply(backend, guest, proto);
        s.leaves(Device::Guest, &answer)
            .becomes(&answer.clone().from(web.cluster), &[action::TRANSLATED]);
        // All other kinds are served to guests as well.
        for (n, vip) in (10..).zip(web.outside()) {
            let first = hello(s.guest(n), vip, proto);
            s.comes(Device::OtherGuest, &first)
                .becomes(&first.clone().to(backend), &[action::NEW_FLOW, action::TRANSLATED]);
        }
    }
    Ok(())
}

fn unknown_interface(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let first = syn(s.client(1), web.external);
    s.comes(Device::Unknown, &first).untouched(&[action::MISS]);
    // What began elsewhere goes on there: a route may have changed.
    let backend = s.open(s.client(1), web.external);
    let more = packet::tcp(s.client(1), web.external, flags::ACK);
    s.comes(Device::Unknown, &more)
        .becomes(&more.clone().to(backend), &[action::TRANSLATED]);
    let answer = packet::tcp(backend, s.client(1), flags::ACK);
    s.leaves(Device::Unknown, &answer)
        .becomes(&answer.clone().from(web.external), &[action::TRANSLATED]);
    Ok(())
}

fn connection(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    let (client, vip) = (s.client(1), web.node);
    let backend = s.open(client, vip);
    for _ in 0..3 {
        s.say(client, vip, backend, flags::PSH | flags::ACK, &[action::TRANSLATED]);
        s.answer(client, vip, backend, flags::PSH | flags::ACK, &[action::TRANSLATED]);
    }
    s.close(client, vip, backend);
    let record = s.record()?;
    assert_eq!(
        (record.outcome, record.vip, record.vip_port.get()),
        (outcome::ESTABLISHED, vip.ip().into(), vip.port())
    );
    // A late packet finds its way, and says nothing new.
    s.answer(client, vip, backend, flags::FIN | flags::ACK, &[action::TRANSLATED]);
    s.say(client, vip, backend, flags::ACK, &[action::TRANSLATED]);
    assert!(s.plane.records()?.is_empty());
    Ok(())
}

fn record_of_a_flow(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(5, TCP, 2)?;
    s.publish(web.sets.1, &web.members([0, 1]))?;
    let (client, vip) = (s.client(1), web.balancer);
    let (id, chosen) = s.choice(web.sets.1, client, vip, TCP);
    let before = lb_user::observe::monotonic_ns();
    let backend = s.begin(client, vip);
    let after = lb_user::observe::monotonic_ns();
    assert_eq!(backend, chosen);
    let (front, flow) = s.flow_of(client, vip, TCP).expect("a flow");
    let (middle, _) = s.flow_of(client, backend, TCP).expect("the same flow");
    assert_eq!((front.role(), middle.role()), (role::FRONT, role::MIDDLE));
    assert_eq!((front.slot, front.serial()), (middle.slot, middle.serial()));
    assert!((before..=after).contains(&flow.start_ns) && flow.seen_ns == flow.start_ns);
    let wanted = Flow {
        client: client.ip().into(),
        vip: vip.ip().into(),
        backend: backend.ip().into(),
        start_ns: flow.start_ns,
        seen_ns: flow.seen_ns,
        version: front.serial() << 2 | state::LIVE,
        // As it lies in the packet.
        isn: 1_000u32.to_be(),
        service_id: web.id,
        set_id: web.sets.1,
        backend_id: id,
        generation: s.rules.sets[&web.sets.1].generation,
        client_port: lb_common::addr::Port::new(client.port()),
        vip_port: lb_common::addr::Port::new(vip.port()),
        backend_port: lb_common::addr::Port::new(backend.port()),
        proto: TCP,
        flags: flow_flag::MASQUERADE,
        client_sent: sent::ANY,
        ..Flow::default()
    };
    assert_eq!(flow, wanted);
    assert_eq!(s.plane.tuples()?.len(), 2);
    assert_eq!(s.plane.hand()?, 1);
    Ok(())
}

fn by_hash(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let tcp = s.serve(1, TCP, 4)?;
    let udp = s.serve(2, UDP, 4)?;
    let mut met = std::collections::BTreeSet::new();
    for n in 0..40 {
        for web in [&tcp, &udp] {
            let (client, vip) = (s.client(n), web.outside()[usize::from(n) % 3]);
            let (id, chosen) = s.choice(web.sets.1, client, vip, web.proto);
            met.insert(id);
            let first = hello(client, vip, web.proto);
            s.comes(Device::Uplink, &first)
                .becomes(&first.clone().to(chosen), &[action::NEW_FLOW, action::TRANSLATED]);
        }
    }
    assert_eq!(met.len(), 8, "every backend was met: {met:?}");
    Ok(())
}

fn payload(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    for length in [0, 1, 2, 3, 535, 1_400] {
        let bytes: Vec<u8> = (0..length).map(|i| i as u8).collect();
        let timestamps = [1, 1, 8, 10, 0, 1, 2, 3, 4, 5, 6, 7];
        let there = packet::tcp(client, vip, flags::PSH | flags::ACK)
            .tcp_options(&timestamps)
            .payload(&bytes);
        s.comes(Device::Uplink, &there)
            .becomes(&there.clone().to(backend), &[action::TRANSLATED]);
        let back = there.clone().between(backend, client).tos(0xb8).ttl(3);
        s.leaves(Device::Uplink, &back)
            .becomes(&back.clone().from(vip), &[action::TRANSLATED]);
    }
    // Flags that begin and end nothing, and those of congestion.
    for flags in [
        0,
        flags::ACK,
        flags::PSH,
        0x20,
        0xc0 | flags::ACK,
        flags::SYN | flags::ACK,
    ] {
        s.say(client, vip, backend, flags, &[action::TRANSLATED]);
        s.answer(client, vip, backend, flags, &[action::TRANSLATED]);
    }
    Ok(())
}

fn wrong_checksums(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let dns = s.serve(2, UDP, 1)?;
    let client = s.client(1);
    let backend = s.begin(client, web.external);
    for by in [1u16, 0x100, 0x7fff] {
        let there = packet::tcp(client, web.external, flags::ACK);
        for wrong in [there.clone().wrong_body(by), there.clone().wrong_header(by)] {
            let faults = packet::check(&wrong.bytes(), false);
            let seen = s.comes(Device::Uplink, &wrong);
            let out = seen.passed(&[action::TRANSLATED]);
            let after = packet::check(&out, false);
            assert_eq!(
                faults.iter().map(|fault| fault.what).collect::<Vec<_>>(),
                after.iter().map(|fault| fault.what).collect::<Vec<_>>(),
                "{}",
                packet::tell(&out, false)
            );
        }
        let back = packet::tcp(backend, client, flags::ACK).wrong_body(by);
        let out = s.leaves(Device::Uplink, &back).passed(&[action::TRANSLATED]);
        assert_eq!(packet::check(&out, false)[0].what, "TCP");
        let question = packet::udp(client, dns.external, b"?").wrong_body(by);
        let seen = s.comes(Device::Uplink, &question);
        assert_eq!(packet::check(&seen.out, false)[0].what, "UDP");
    }
    Ok(())
}

fn two_passes(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    for (id, proto) in [(1, TCP), (2, UDP)] {
        let web = s.serve(id, proto, 1)?;
        let (client, vip, backend) = (s.client(id), web.external, web.backends[0].1);
        // A packet passes a bridge and its port, or a VLAN device and what it lies on.
        let there = hello(client, vip, proto);
        let forward = there.clone().to(backend);
        s.comes(Device::Uplink, &there)
            .becomes(&forward, &[action::NEW_FLOW, action::TRANSLATED]);
        s.comes(Device::Second, &forward).untouched(&[action::MISS]);
        let back = reply(backend, client, proto);
        let reverse = back.clone().from(vip);
        s.leaves(Device::Second, &back).becomes(&reverse, &[action::TRANSLATED]);
        s.leaves(Device::Uplink, &reverse).untouched(&[action::MISS]);
    }
    Ok(())
}

fn protocols(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let client = s.client(1);
    let datagram = packet::udp(client, web.external, b"x");
    s.comes(Device::Uplink, &datagram).untouched(&[action::MISS]);
    let backend = s.begin(client, web.external);
    // The flow is TCP's alone.
    s.comes(Device::Uplink, &datagram).untouched(&[action::MISS]);
    s.leaves(Device::Uplink, &packet::udp(backend, client, b"x"))
        .untouched(&[action::MISS]);
    Ok(())
}

fn neighbours(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    let other_port = |end: std::net::SocketAddr| (end.ip(), end.port() + 1).into();
    for packet in [
        packet::tcp(backend, other_port(client), flags::ACK),
        packet::tcp(other_port(backend), client, flags::ACK),
        packet::tcp(vip, client, flags::ACK),
    ] {
        s.leaves(Device::Uplink, &packet).untouched(&[action::MISS]);
        s.comes(Device::Uplink, &packet).untouched(&[action::MISS]);
    }
    // A backend's packet that comes in belongs to nobody's translation here.
    s.comes(Device::Uplink, &packet::tcp(backend, client, flags::ACK))
        .untouched(&[action::MISS]);
    assert!(s.plane.tuple(&tuple(client, vip, TCP)).is_some());
    Ok(())
}

fn counters(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let (id, backend) = web.backends[0];
    s.plane.forget_counters()?;
    let outside = |connects, established, failed, closed| BackendCounters {
        outside: Tally {
            connects,
            established,
            failed,
            closed,
        },
        ..BackendCounters::default()
    };
    let service = |connects, established, closed| ServiceCounters {
        connects,
        attributed: connects,
        outside: connects,
        established,
        closed,
        ..ServiceCounters::default()
    };
    s.begin(client, vip);
    assert_eq!(
        (s.plane.backend(id), s.plane.service(web.id)),
        (outside(1, 0, 0, 0), service(1, 0, 0))
    );
    s.answer(client, vip, backend, flags::SYN | flags::ACK, &[action::TRANSLATED]);
    assert_eq!(
        (s.plane.backend(id), s.plane.service(web.id)),
        (outside(1, 1, 0, 0), service(1, 1, 0))
    );
    s.close(client, vip, backend);
    assert_eq!(
        (s.plane.backend(id), s.plane.service(web.id)),
        (outside(1, 1, 0, 1), service(1, 1, 1))
    );
    // A connection that is refused.
    let (second, reset) = (s.client(2), flags::RST | flags::ACK);
    s.begin(second, vip);
    s.answer(second, vip, backend, reset, &[action::TRANSLATED, action::RECORDED]);
    let mut refused = service(2, 1, 1);
    refused.failed[usize::from(outcome::REFUSED)] = 1;
    assert_eq!(
        (s.plane.backend(id), s.plane.service(web.id)),
        (outside(2, 1, 1, 1), refused)
    );
    Ok(())
}

//! A SYN never trusts an entry: closing, outdated, unusable or silent for long, it is chosen anew in that packet. And what keeps
//! its backend: the repetition of a SYN, and whatever is no SYN.

use anyhow::Result;
use lb_common::{
    abi::TCP,
    backend::state,
    counter::action::{MISS, NEW_FLOW, RECORDED, RESUMED, REUSED, TRANSLATED},
    event::outcome,
    flow::flag as flow_flag,
};
use lb_tests::{
    packet::{self, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};

use crate::scene::{SECOND, Scene, Web, syn};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("a_repeated_syn_keeps_its_backend", repeated),
    ("a_syn_on_an_open_connection_begins_another", on_open),
    ("a_syn_on_a_half_closed_connection_begins_another", on_half_closed),
    ("fins_and_resets_of_either_side_end_a_flow_once", ends),
    ("a_tuple_is_reused_at_any_time_after_its_close", intervals),
    ("a_syn_goes_to_no_backend_that_drains_is_ejected_or_gone", unusable),
    ("a_draining_backend_keeps_its_flows", draining),
    ("flows_outlive_their_service", outlive),
    ("an_empty_set_affects_new_flows_alone", emptied),
    ("the_middle_of_a_connection_is_resumed_where_its_hash_falls", resumed),
    (
        "a_resumed_connection_is_counted_neither_as_begun_nor_as_ended",
        resumed_counts,
    ),
    ("a_reset_that_belongs_to_no_flow_makes_none", stray_reset),
    (
        "a_segment_that_neither_begins_nor_acknowledges_makes_no_flow",
        nothing_said,
    ),
];

/// A client's SYN with another initial sequence number.
fn again(client: std::net::SocketAddr, vip: std::net::SocketAddr) -> packet::Packet {
    syn(client, vip).seq(77_777)
}

fn repeated(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.begin(client, vip);
    let first = syn(client, vip);
    for seconds in [1, 2, 4, 8] {
        s.pass(seconds * SECOND);
        s.comes(Device::Uplink, &first)
            .becomes(&first.clone().to(backend), &[TRANSLATED]);
    }
    // The answer was lost: the client says its SYN again, and the choice stands, whatever the set is by now.
    s.answer(client, vip, backend, flags::SYN | flags::ACK, &[TRANSLATED]);
    let others = web.members((0..3).filter(|i| web.backends[*i].1 != backend));
    s.publish(web.sets.1, &others)?;
    s.comes(Device::Uplink, &first)
        .becomes(&first.clone().to(backend), &[TRANSLATED]);
    Ok(())
}

fn on_open(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    // While the same backend would be chosen it gets the SYN, and tells the client what it thinks of it: a forged one ends nothing.
    let syn = again(client, vip);
    s.comes(Device::Uplink, &syn)
        .becomes(&syn.clone().to(backend), &[TRANSLATED]);
    s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
    assert!(s.plane.records()?.is_empty());
    // In another publication of the set it is chosen anew.
    let chosen = without(&mut s, &web, backend, client, vip)?;
    s.comes(Device::Uplink, &syn)
        .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
    let record = s.record()?;
    assert_eq!(record.outcome, outcome::ESTABLISHED);
    assert_eq!(s.plane.tuples()?.len(), 2, "the old flow's tuples went");
    // Unanswered, it gives way at once, and failed.
    let syn = again(client, vip).seq(5);
    s.comes(Device::Uplink, &syn)
        .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
    assert_eq!(s.record()?.outcome, outcome::TIMED_OUT);
    // And answered, but never taken up: whoever sent that SYN may not have been the client.
    s.answer(client, vip, chosen, flags::SYN | flags::ACK, &[TRANSLATED]);
    let syn = again(client, vip).seq(6);
    s.comes(Device::Uplink, &syn)
        .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
    Ok(())
}

/// Publishes the set without a client's backend; returns the one that it will be given.
fn without(
    s: &mut Scene,
    web: &Web,
    backend: std::net::SocketAddr,
    client: std::net::SocketAddr,
    vip: std::net::SocketAddr,
) -> Result<std::net::SocketAddr> {
    let others = web.members((0..web.backends.len()).filter(|i| web.backends[*i].1 != backend));
    s.publish(web.sets.1, &others)?;
    let (_, chosen) = s.choice(web.sets.1, client, vip, TCP);
    assert_ne!(chosen, backend);
    Ok(chosen)
}

fn on_half_closed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    for (n, by_client) in [(1, true), (2, false)] {
        let (client, vip) = (s.client(n), web.external);
        s.publish(web.sets.1, &web.members(0..3))?;
        let backend = s.open(client, vip);
        if by_client {
            s.say(client, vip, backend, flags::FIN | flags::ACK, &[TRANSLATED]);
        } else {
            s.answer(client, vip, backend, flags::FIN | flags::ACK, &[TRANSLATED]);
        }
        let chosen = without(&mut s, &web, backend, client, vip)?;
        // The same sequence number again is no repetition either, once something is closed.
        let syn = syn(client, vip);
        s.comes(Device::Uplink, &syn)
            .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
        assert_eq!(s.record()?.outcome, outcome::ESTABLISHED);
    }
    Ok(())
}

fn ends(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (fin, rst, ack) = (flags::FIN | flags::ACK, flags::RST | flags::ACK, flags::ACK);
    // Who sends what (true is the client), and whether the last packet ends the flow.
    let ways: [&[(bool, u8)]; 8] = [
        &[(true, fin), (false, ack), (false, fin)],
        &[(false, fin), (true, ack), (true, fin)],
        &[(true, fin), (false, fin)],
        &[(true, rst)],
        &[(false, rst)],
        &[(true, flags::RST)],
        &[(true, fin), (false, rst)],
        &[(false, fin), (true, rst)],
    ];
    for (n, way) in (1..).zip(ways) {
        let (client, vip) = (s.client(n), web.node);
        let backend = s.open(client, vip);
        for (i, &(by_client, flags)) in way.iter().enumerate() {
            let last = i + 1 == way.len();
            let counts: &[u32] = if last { &[TRANSLATED, RECORDED] } else { &[TRANSLATED] };
            if by_client {
                s.say(client, vip, backend, flags, counts);
            } else {
                s.answer(client, vip, backend, flags, counts);
            }
        }
        assert_eq!(s.record()?.outcome, outcome::ESTABLISHED, "{way:?}");
        // What is still to come finds its way, both ways, and ends nothing again.
        for flags in [ack, fin, rst] {
            s.say(client, vip, backend, flags, &[TRANSLATED]);
            s.answer(client, vip, backend, flags, &[TRANSLATED]);
        }
        assert!(s.plane.records()?.is_empty());
    }
    Ok(())
}

fn intervals(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 4)?;
    for (n, seconds) in (1..).zip([0, 1, 29, 31, 59, 61, 119, 121, 86_401]) {
        for (group, reset) in [(0, false), (100, true)] {
            let (client, vip) = (s.client(group + n), web.node);
            s.publish(web.sets.1, &web.members(0..4))?;
            let backend = s.open(client, vip);
            if reset {
                s.say(client, vip, backend, flags::RST, &[TRANSLATED, RECORDED]);
            } else {
                s.close(client, vip, backend);
            }
            s.record()?;
            s.pass(seconds * SECOND);
            let chosen = without(&mut s, &web, backend, client, vip)?;
            let syn = again(client, vip);
            // After a minute the table knows it no more.
            let wanted: &[u32] = if seconds <= 60 {
                &[NEW_FLOW, REUSED, TRANSLATED]
            } else {
                &[NEW_FLOW, TRANSLATED]
            };
            s.comes(Device::Uplink, &syn).becomes(&syn.clone().to(chosen), wanted);
            // And its answers come from the new backend, at once.
            s.answer(client, vip, chosen, flags::SYN | flags::ACK, &[TRANSLATED]);
            assert!(s.plane.records()?.is_empty(), "its end was told when it closed");
        }
    }
    Ok(())
}

fn unusable(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    for (n, how) in [(1, state::DRAINING), (2, state::EJECTED), (3, state::VACANT)] {
        let (client, vip) = (s.client(n), web.balancer);
        let backend = s.begin(client, vip);
        let (id, _) = *web.backends.iter().find(|(_, end)| *end == backend).expect("a backend");
        let before = s.rules.backends[&id];
        if how == state::VACANT {
            s.rules.vacate(id);
        } else {
            s.rules.set_state(id, how);
        }
        s.write()?;
        let chosen = without(&mut s, &web, backend, client, vip)?;
        // Not even a repetition goes there.
        let syn = syn(client, vip);
        s.comes(Device::Uplink, &syn)
            .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
        assert_eq!(s.record()?.outcome, outcome::TIMED_OUT);
        s.rules.backends.insert(id, before);
        s.publish(web.sets.1, &web.members(0..3))?;
    }
    Ok(())
}

fn draining(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    let (id, _) = *web.backends.iter().find(|(_, end)| *end == backend).expect("a backend");
    s.rules.set_state(id, state::DRAINING);
    let chosen = without(&mut s, &web, backend, client, vip)?;
    for seconds in [1, 60, 3_600] {
        s.pass(seconds * SECOND);
        s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
        s.answer(client, vip, backend, flags::ACK, &[TRANSLATED]);
    }
    // Other clients' SYNs go elsewhere, and this client's next connection too.
    for n in 2..20 {
        assert_ne!(s.begin(s.client(n), vip), backend);
    }
    s.close(client, vip, backend);
    let syn = again(client, vip);
    s.comes(Device::Uplink, &syn)
        .becomes(&syn.clone().to(chosen), &[NEW_FLOW, REUSED, TRANSLATED]);
    Ok(())
}

fn outlive(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    let rules = s.rules.clone();
    s.rules.frontends.clear();
    s.rules.sets.clear();
    s.rules.backends.clear();
    s.write()?;
    s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
    s.answer(client, vip, backend, flags::ACK, &[TRANSLATED]);
    // A new connection has no Service; the old one ended by it.
    let syn = again(client, vip);
    s.comes(Device::Uplink, &syn).untouched(&[RECORDED, MISS]);
    s.rules = rules;
    s.write()?;
    s.begin(client, vip);
    Ok(())
}

fn emptied(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 2)?;
    let (client, vip) = (s.client(1), web.external);
    let backend = s.open(client, vip);
    s.publish(web.sets.0, &[])?;
    s.publish(web.sets.1, &[])?;
    s.say(client, vip, backend, flags::ACK, &[TRANSLATED]);
    s.answer(client, vip, backend, flags::ACK, &[TRANSLATED]);
    Ok(())
}

fn resumed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 4)?;
    for (n, flags) in (1..).zip([
        flags::ACK,
        flags::PSH | flags::ACK,
        flags::FIN | flags::ACK,
        flags::SYN | flags::ACK,
    ]) {
        let (client, vip) = (s.client(n), web.node);
        let (id, chosen) = s.choice(web.sets.1, client, vip, TCP);
        let packet = packet::tcp(client, vip, flags).payload(b"in the middle");
        s.comes(Device::Uplink, &packet)
            .becomes(&packet.clone().to(chosen), &[RESUMED, TRANSLATED]);
        let (_, flow) = s.flow_of(client, vip, TCP).expect("a flow");
        assert_eq!(flow.backend_id, id);
        assert_eq!(flow.flags, flow_flag::RESUMED | flow_flag::MASQUERADE);
        s.answer(client, vip, chosen, flags::ACK, &[TRANSLATED]);
        // No SYN is the repetition of one that nobody saw.
        let syn = syn(client, vip).seq(0);
        s.comes(Device::Uplink, &syn)
            .becomes(&syn.clone().to(chosen), &[RECORDED, NEW_FLOW, REUSED, TRANSLATED]);
    }
    Ok(())
}

fn nothing_said(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 4)?;
    let (client, vip) = (s.client(1), web.node);
    let (_, chosen) = s.choice(web.sets.1, client, vip, TCP);
    for flags in [0, flags::PSH, flags::FIN, 0xe0] {
        s.say(client, vip, chosen, flags, &[TRANSLATED]);
    }
    assert!(s.plane.tuples()?.is_empty());
    Ok(())
}

fn resumed_counts(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip) = (s.client(1), web.node);
    let (id, backend) = web.backends[0];
    s.plane.forget_counters()?;
    s.say(client, vip, backend, flags::ACK, &[RESUMED, TRANSLATED]);
    s.answer(client, vip, backend, flags::ACK, &[TRANSLATED]);
    s.say(client, vip, backend, flags::FIN | flags::ACK, &[TRANSLATED]);
    let fin = packet::tcp(backend, client, flags::FIN | flags::ACK);
    let _ = s.leaves(Device::Uplink, &fin);
    // Open connections are those established less those closed: none is ended that was not begun.
    let counted = s.plane.backend(id).outside;
    assert_eq!(
        (counted.connects, counted.established, counted.closed, counted.failed),
        (0, 0, 0, 0)
    );
    let service = s.plane.service(web.id);
    assert_eq!((service.connects, service.established, service.closed), (0, 0, 0));
    Ok(())
}

fn stray_reset(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 3)?;
    let (client, vip) = (s.client(1), web.node);
    let (_, chosen) = s.choice(web.sets.1, client, vip, TCP);
    for flags in [flags::RST, flags::RST | flags::ACK] {
        s.say(client, vip, chosen, flags, &[TRANSLATED]);
    }
    assert!(s.plane.tuples()?.is_empty());
    assert_eq!(s.plane.hand()?, 0);
    // A backend's reset that belongs to nobody passes.
    s.leaves(Device::Uplink, &packet::tcp(chosen, client, flags::RST))
        .untouched(&[MISS]);
    Ok(())
}

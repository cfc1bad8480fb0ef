//! The flow table at its limits, and what it tells of connections when they end.

use anyhow::Result;
use lb_common::{
    abi::{TCP, UDP},
    addr::Port,
    counter::action::{EVICTED, FLOWS_FULL, MISS, NEW_FLOW, RECLAIMED, RECORDED, REUSED, TRANSLATED},
    event::{ConnRecord, kind, mark, outcome},
    flow::{Flow, LOOKS, SERIAL_MASK, TupleEntry, role, state},
};
use lb_tests::{
    packet::{self, flags},
    plane::Device,
    runner::Body,
    world::Dial,
};
use lb_user::observe::monotonic_ns;

use crate::scene::{SECOND, Scene, syn, tuple};

pub(crate) const CASES: &[(&str, Body)] = &[
    ("a_full_table_refuses_new_flows_and_keeps_the_old", full),
    ("unanswered_flows_give_way_and_answered_ones_never", eviction),
    ("closed_flows_give_way_after_a_second", closed_give_way),
    ("expired_flows_are_reclaimed_and_their_record_is_written", reclaimed),
    ("how_long_a_flow_is_kept_without_a_packet", limits),
    ("packets_keep_a_flow", kept),
    ("the_hand_looks_at_so_many_slots_and_no_more", hand),
    ("slots_and_serial_numbers_go_round", serials),
    ("a_tuple_that_names_an_earlier_flow_of_its_slot_means_nothing", stale),
    ("records_tell_what_became_of_each_connection", records),
];

fn full(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 2)?;
    s.shrink(4);
    let vip = web.external;
    let backends: Vec<_> = (0..4).map(|n| s.open(s.client(n), vip)).collect();
    for seconds in [0, 2, 80_000] {
        s.pass(seconds * SECOND);
        s.comes(Device::Uplink, &syn(s.client(9), vip)).dropped(&[FLOWS_FULL]);
        // Those that both sides use go on.
        for (n, backend) in (0..4).zip(&backends) {
            s.say(s.client(n), vip, *backend, flags::ACK, &[TRANSLATED]);
            s.answer(s.client(n), vip, *backend, flags::ACK, &[TRANSLATED]);
        }
    }
    // A client's next connection takes the slot of its last.
    s.publish(web.sets.1, &web.members([0, 1]))?;
    let again = syn(s.client(2), vip).seq(5);
    s.comes(Device::Uplink, &again)
        .passed(&[RECORDED, REUSED, NEW_FLOW, TRANSLATED]);
    assert_eq!(s.plane.tuples()?.len(), 8);
    Ok(())
}

fn eviction(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.shrink(3);
    let (vip, backend) = (web.external, web.backends[0].1);
    let answered = s.client(0);
    s.open(answered, vip);
    s.begin(s.client(1), vip);
    s.begin(s.client(2), vip);
    // It is too early to give up on those.
    s.comes(Device::Uplink, &syn(s.client(3), vip)).dropped(&[FLOWS_FULL]);
    s.pass(SECOND + 1);
    // A repetition of one keeps it.
    let repeated = syn(s.client(1), vip);
    s.comes(Device::Uplink, &repeated)
        .becomes(&repeated.clone().to(backend), &[TRANSLATED]);
    let next = syn(s.client(3), vip);
    s.comes(Device::Uplink, &next)
        .becomes(&next.clone().to(backend), &[RECORDED, EVICTED, NEW_FLOW, TRANSLATED]);
    let record = s.record()?;
    assert_eq!(
        (record.outcome, record.client),
        (outcome::TIMED_OUT, s.client(2).ip().into())
    );
    assert!(s.flow_of(s.client(2), vip, TCP).is_none());
    assert!(s.flow_of(s.client(1), vip, TCP).is_some() && s.flow_of(answered, vip, TCP).is_some());
    // A flood of others never costs the answered one its slot.
    for n in 10..40 {
        s.pass(2 * SECOND);
        let flood = syn(s.client(n), vip);
        let _ = s.comes(Device::Uplink, &flood);
        assert!(s.flow_of(answered, vip, TCP).is_some());
    }
    s.say(answered, vip, backend, flags::ACK, &[TRANSLATED]);
    Ok(())
}

fn closed_give_way(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.shrink(1);
    let (vip, backend) = (web.external, web.backends[0].1);
    s.open(s.client(1), vip);
    s.close(s.client(1), vip, backend);
    s.record()?;
    s.comes(Device::Uplink, &syn(s.client(2), vip)).dropped(&[FLOWS_FULL]);
    s.pass(SECOND + 1);
    let next = syn(s.client(2), vip);
    s.comes(Device::Uplink, &next)
        .becomes(&next.clone().to(backend), &[EVICTED, NEW_FLOW, TRANSLATED]);
    assert!(s.plane.records()?.is_empty(), "its record was written when it closed");
    // What is left of the old one passes: nobody knows it.
    s.leaves(
        Device::Uplink,
        &packet::tcp(backend, s.client(1), flags::FIN | flags::ACK),
    )
    .untouched(&[MISS]);
    Ok(())
}

fn reclaimed(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.shrink(2);
    let (vip, backend) = (web.external, web.backends[0].1);
    s.open(s.client(1), vip);
    s.begin(s.client(2), vip);
    s.pass(86_401 * SECOND);
    s.plane.forget_counters()?;
    for (n, wanted) in [(3, outcome::ESTABLISHED), (4, outcome::TIMED_OUT)] {
        let next = syn(s.client(n), vip);
        s.comes(Device::Uplink, &next)
            .becomes(&next.clone().to(backend), &[RECORDED, RECLAIMED, NEW_FLOW, TRANSLATED]);
        let record = s.record()?;
        assert_eq!((record.outcome, record.client), (wanted, s.client(n - 2).ip().into()));
        assert!(s.flow_of(s.client(n - 2), vip, TCP).is_none());
        assert!(s.flow_of(s.client(n - 2), backend, TCP).is_none());
    }
    let counted = s.plane.backend(web.backends[0].0).outside;
    assert_eq!(
        (counted.connects, counted.established, counted.failed, counted.closed),
        (2, 0, 1, 1)
    );
    Ok(())
}

/// What brings a flow into a state, and how many seconds it may be silent in it.
type Life = (
    fn(&mut Scene, std::net::SocketAddr, std::net::SocketAddr, std::net::SocketAddr),
    u64,
);

fn limits(dial: Dial) -> Result<()> {
    let lives: [Life; 4] = [
        (
            |s, client, vip, _| {
                s.begin(client, vip);
            },
            60,
        ),
        (
            |s, client, vip, _| {
                s.open(client, vip);
            },
            86_400,
        ),
        (
            |s, client, vip, backend| {
                s.open(client, vip);
                s.answer(client, vip, backend, flags::FIN | flags::ACK, &[TRANSLATED]);
            },
            3_600,
        ),
        (
            |s, client, vip, backend| {
                s.open(client, vip);
                s.close(client, vip, backend);
            },
            60,
        ),
    ];
    for (live, seconds) in lives {
        let mut s = Scene::new(dial)?;
        let web = s.serve(1, TCP, 1)?;
        let (vip, backend) = (web.external, web.backends[0].1);
        s.shrink(1);
        let client = s.client(1);
        live(&mut s, client, vip, backend);
        let ended = !s.plane.records()?.is_empty();
        s.pass((seconds - 1) * SECOND);
        let next = syn(s.client(2), vip);
        let (_, flow) = s.flow_of(s.client(1), vip, TCP).expect("still there");
        if flow.is_evictable(flow.seen_ns + 2 * SECOND) {
            // It would give way before; that is another case's matter.
        } else {
            s.comes(Device::Uplink, &next).dropped(&[FLOWS_FULL]);
        }
        s.pass(2 * SECOND);
        let wanted: &[u32] = if ended {
            &[RECLAIMED, NEW_FLOW, TRANSLATED]
        } else {
            &[RECORDED, RECLAIMED, NEW_FLOW, TRANSLATED]
        };
        s.comes(Device::Uplink, &next)
            .becomes(&next.clone().to(backend), wanted);
    }
    Ok(())
}

fn kept(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let dns = s.serve(2, UDP, 1)?;
    s.shrink(1);
    let (client, vip, backend) = (s.client(1), dns.external, dns.backends[0].1);
    let question = packet::udp(client, vip, b"?");
    let answer = packet::udp(backend, client, b"!");
    s.comes(Device::Uplink, &question)
        .becomes(&question.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
    s.leaves(Device::Uplink, &answer)
        .becomes(&answer.clone().from(vip), &[TRANSLATED]);
    s.comes(Device::Uplink, &question)
        .becomes(&question.clone().to(backend), &[TRANSLATED]);
    // Either side's packet is enough, once the client has gone on after an answer.
    for i in 0..6 {
        s.pass(170 * SECOND);
        if i % 2 == 0 {
            s.comes(Device::Uplink, &question)
                .becomes(&question.clone().to(backend), &[TRANSLATED]);
        } else {
            s.leaves(Device::Uplink, &answer)
                .becomes(&answer.clone().from(vip), &[TRANSLATED]);
        }
        let other = packet::udp(s.client(2), vip, b"?");
        s.comes(Device::Uplink, &other).dropped(&[FLOWS_FULL]);
    }
    Ok(())
}

fn hand(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let slots = LOOKS + 1;
    s.shrink(slots);
    let vip = web.external;
    for n in 0..LOOKS {
        s.open(s.client(n as u8), vip);
    }
    // One slot is free, and the hand stands before it: it has gone round when it meets it again.
    s.begin(s.client(100), vip);
    assert_eq!(s.plane.hand()?, u64::from(slots));
    let next = syn(s.client(101), vip);
    s.comes(Device::Uplink, &next).dropped(&[FLOWS_FULL]);
    assert_eq!(s.plane.hand()?, u64::from(slots + LOOKS));
    // The slot of the unanswered one is the next.
    s.pass(61 * SECOND);
    s.comes(Device::Uplink, &next)
        .passed(&[RECORDED, RECLAIMED, NEW_FLOW, TRANSLATED]);
    assert_eq!(s.plane.hand()?, u64::from(slots + LOOKS + 1));
    Ok(())
}

fn serials(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    s.shrink(2);
    let at_the_end = Flow {
        version: (SERIAL_MASK - 1) << 2 | state::FREE,
        ..Flow::default()
    };
    s.plane.set_flow(0, at_the_end);
    let vip = web.external;
    let mut met = Vec::new();
    for n in 0..6 {
        let next = syn(s.client(n), vip);
        let wanted: &[u32] = if n < 2 {
            &[NEW_FLOW, TRANSLATED]
        } else {
            &[RECORDED, RECLAIMED, NEW_FLOW, TRANSLATED]
        };
        s.comes(Device::Uplink, &next).passed(wanted);
        let (entry, flow) = s.flow_of(s.client(n), vip, TCP).expect("a flow");
        assert_eq!((flow.serial(), flow.state()), (entry.serial(), state::LIVE));
        met.push((entry.slot, entry.serial()));
        s.pass(61 * SECOND);
    }
    assert_eq!(met, [(0, SERIAL_MASK), (1, 1), (0, 1), (1, 2), (0, 2), (1, 3)]);
    Ok(())
}

fn stale(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (client, vip, backend) = (s.client(1), web.external, web.backends[0].1);
    s.begin(client, vip);
    let (entry, _) = s.flow_of(client, vip, TCP).expect("a flow");
    // Another client's tuples, left over from an earlier flow in the slot, or leading out of the table.
    let other = s.client(2);
    for serial in [entry.serial() + 1, 0] {
        for slot in [entry.slot, 5_000_000] {
            for role in [role::FRONT, role::MIDDLE, role::BACK] {
                let left_over = TupleEntry::new(slot, serial, role);
                s.plane.set_tuple(&tuple(other, vip, TCP), left_over)?;
                s.plane.set_tuple(&tuple(other, backend, TCP), left_over)?;
                s.leaves(Device::Uplink, &packet::tcp(backend, other, flags::ACK))
                    .untouched(&[MISS]);
                let syn = syn(other, vip);
                s.comes(Device::Uplink, &syn)
                    .becomes(&syn.clone().to(backend), &[NEW_FLOW, TRANSLATED]);
                let (now, _) = s.flow_of(other, vip, TCP).expect("a flow");
                assert_eq!(now.role(), role::FRONT);
            }
        }
    }
    Ok(())
}

fn records(dial: Dial) -> Result<()> {
    let mut s = Scene::new(dial)?;
    let web = s.serve(1, TCP, 1)?;
    let (vip, (id, backend)) = (web.balancer, web.backends[0]);
    let (rst, fin) = (flags::RST | flags::ACK, flags::FIN | flags::ACK);
    // What is sent after the SYN (true is the client), and what is told.
    let ways: [(&[(bool, u8)], u8); 7] = [
        (&[(false, rst)], outcome::REFUSED),
        (&[(true, flags::RST)], outcome::ABANDONED),
        (&[(true, fin), (true, flags::RST)], outcome::ABANDONED),
        (
            &[(false, flags::SYN | flags::ACK), (true, flags::RST)],
            outcome::ESTABLISHED,
        ),
        (
            &[(false, flags::SYN | flags::ACK), (false, flags::RST)],
            outcome::ESTABLISHED,
        ),
        (
            &[(false, flags::SYN | flags::ACK), (true, fin), (false, fin)],
            outcome::ESTABLISHED,
        ),
        (&[(true, fin), (false, rst)], outcome::REFUSED),
    ];
    for (n, (way, wanted)) in (1..).zip(ways) {
        let client = s.client(n);
        let before = monotonic_ns();
        s.begin(client, vip);
        for (i, &(by_client, flags)) in way.iter().enumerate() {
            let counts: &[u32] = if i + 1 == way.len() {
                &[TRANSLATED, RECORDED]
            } else {
                &[TRANSLATED]
            };
            if by_client {
                s.say(client, vip, backend, flags, counts);
            } else {
                s.answer(client, vip, backend, flags, counts);
            }
        }
        let after = monotonic_ns();
        let record = s.record()?;
        let answered = wanted == outcome::ESTABLISHED;
        assert!(before <= record.start_ns && record.start_ns <= record.end_ns && record.end_ns <= after);
        if answered {
            assert!(record.start_ns <= record.established_ns && record.established_ns <= record.end_ns);
        }
        let told = ConnRecord {
            kind: kind::CONNECTION,
            start_ns: record.start_ns,
            established_ns: if answered { record.established_ns } else { 0 },
            end_ns: record.end_ns,
            client: client.ip().into(),
            vip: vip.ip().into(),
            service_id: web.id,
            backend_id: id,
            client_port: Port::new(client.port()),
            vip_port: Port::new(vip.port()),
            proto: TCP,
            outcome: wanted,
            marks: mark::OUTSIDE,
            ..ConnRecord::default()
        };
        assert_eq!(record, told, "{way:?}");
    }
    Ok(())
}

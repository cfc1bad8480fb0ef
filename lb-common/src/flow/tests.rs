use core::net::IpAddr;

use proptest::prelude::*;

use super::*;

fn addr(text: &str) -> Addr {
    text.parse::<IpAddr>().unwrap().into()
}

fn flow(proto: u8) -> Flow {
    Flow {
        client: addr("203.0.113.5"),
        client_port: Port::new(40_000),
        vip: addr("192.0.2.1"),
        vip_port: Port::new(80),
        backend: addr("10.244.0.7"),
        backend_port: Port::new(8080),
        proto,
        isn: 7,
        client_sent: sent::ANY,
        seen_ns: 1_000 * SECOND,
        ..Flow::default()
    }
}

#[test]
fn a_connection_is_established_by_its_answer_and_ended_by_both() {
    let mut flow = flow(TCP);
    assert_eq!(flow.idle_limit_ns(), UNANSWERED_NS);
    assert_eq!(flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 5), Event::Established);
    assert_eq!((flow.established_ns, flow.idle_limit_ns()), (5, UNANSWERED_NS));
    assert!(!flow.is_open(), "the client may not hear the answer");
    assert_eq!(flow.note_client(tcp_flag::ACK), Event::Nothing);
    assert_eq!(flow.idle_limit_ns(), ESTABLISHED_NS);
    assert!(flow.is_open());
    assert_eq!(flow.note_client(tcp_flag::FIN | tcp_flag::ACK), Event::Nothing);
    assert_eq!(flow.idle_limit_ns(), HALF_CLOSED_NS);
    let end = Event::Ended(outcome::ESTABLISHED);
    assert_eq!(flow.note_backend(tcp_flag::FIN | tcp_flag::ACK, 6), end);
    assert_eq!(flow.idle_limit_ns(), CLOSED_NS);
    assert_eq!(flow.note_client(tcp_flag::RST), Event::Nothing, "an end is told once");
}

#[test]
fn a_reset_of_either_side_ends_both_directions() {
    for by_client in [true, false] {
        let mut flow = flow(TCP);
        assert_eq!(flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 5), Event::Established);
        let event = if by_client {
            flow.note_client(tcp_flag::RST)
        } else {
            flow.note_backend(tcp_flag::RST, 6)
        };
        assert_eq!(event, Event::Ended(outcome::ESTABLISHED));
        assert!(flow.is_closed() && !flow.repeats(7));
    }
}

#[test]
fn a_refusal_and_a_client_that_gives_up_are_told_apart() {
    let mut refused = flow(TCP);
    assert_eq!(
        refused.note_backend(tcp_flag::RST | tcp_flag::ACK, 5),
        Event::Ended(outcome::REFUSED)
    );
    let mut abandoned = flow(TCP);
    assert_eq!(abandoned.note_client(tcp_flag::RST), Event::Ended(outcome::ABANDONED));
    assert_eq!(flow(TCP).outcome_of_silence(), outcome::TIMED_OUT);
}

#[test]
fn only_the_same_syn_repeats_a_flow_that_is_not_closing() {
    let mut flow = flow(TCP);
    assert!(flow.repeats(7) && !flow.repeats(8));
    flow.flags = flag::RESUMED;
    assert!(!flow.repeats(7), "what began it is not known");
    flow.flags = 0;
    let _ = flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 5);
    assert!(flow.repeats(7), "the answer may have been lost");
    let _ = flow.note_client(tcp_flag::FIN);
    assert!(!flow.repeats(7));
}

#[test]
fn datagrams_have_neither_fin_nor_reset() {
    let mut flow = flow(UDP);
    assert_eq!(flow.idle_limit_ns(), DATAGRAM_ONCE_NS);
    assert_eq!(flow.note_client(0xff), Event::Nothing);
    assert_eq!(flow.note_backend(0xff, 5), Event::Established);
    assert!(!flow.is_closed());
    assert_eq!(flow.idle_limit_ns(), DATAGRAM_ONCE_NS, "a question and its answer");
    assert_eq!(flow.note_client(0), Event::Nothing);
    assert_eq!(flow.idle_limit_ns(), DATAGRAM_NS);
}

#[test]
fn a_slot_is_given_away_when_its_flow_expired_or_was_never_settled() {
    let mut flow = flow(TCP);
    let then = flow.seen_ns;
    assert!(!flow.is_expired(then + UNANSWERED_NS) && flow.is_expired(then + UNANSWERED_NS + 1));
    assert!(!flow.is_evictable(then + EVICTABLE_NS) && flow.is_evictable(then + EVICTABLE_NS + 1));
    let _ = flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 5);
    assert!(
        flow.is_evictable(then + EVICTABLE_NS + 1),
        "anybody can have a SYN answered"
    );
    let _ = flow.note_client(tcp_flag::ACK);
    assert!(
        !flow.is_evictable(then + ESTABLISHED_NS),
        "a settled flow is never given up"
    );
    assert!(flow.is_expired(then + ESTABLISHED_NS + 1));
    assert_eq!(flow.idle_ns(then - 1), 0);
}

#[test]
fn a_forged_reset_is_undone_by_what_follows() {
    for by_client in [true, false] {
        let mut flow = flow(TCP);
        let _ = flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 5);
        let _ = flow.note_client(tcp_flag::ACK);
        let (reset, more) = (tcp_flag::RST, tcp_flag::ACK);
        if by_client {
            assert_eq!(flow.note_client(reset), Event::Ended(outcome::ESTABLISHED));
            assert_eq!((flow.is_closed(), flow.note_client(more)), (true, Event::Nothing));
        } else {
            assert_eq!(flow.note_backend(reset, 6), Event::Ended(outcome::ESTABLISHED));
            assert_eq!((flow.is_closed(), flow.note_backend(more, 7)), (true, Event::Nothing));
        }
        assert!(!flow.is_closed());
        assert_eq!(flow.idle_limit_ns(), ESTABLISHED_NS);
    }
}

#[test]
fn what_is_no_answer_to_a_syn_establishes_nothing() {
    let mut flow = flow(TCP);
    assert_eq!(
        flow.note_backend(tcp_flag::ACK, 5),
        Event::Nothing,
        "a backend in TIME_WAIT"
    );
    assert!(!flow.is_answered());
    assert_eq!(flow.note_backend(tcp_flag::SYN | tcp_flag::ACK, 6), Event::Established);
}

#[test]
fn a_resumed_flow_is_kept_once_both_have_spoken() {
    let mut flow = flow(TCP);
    flow.flags = flag::RESUMED;
    let then = flow.seen_ns + EVICTABLE_NS + 1;
    assert!(flow.is_evictable(then), "a stray packet begins it");
    assert_eq!(flow.note_backend(tcp_flag::ACK, 5), Event::Nothing);
    assert_eq!(flow.note_client(tcp_flag::ACK), Event::Nothing);
    assert!(!flow.is_evictable(then));
}

#[test]
fn looks_are_in_a_row_and_then_scattered() {
    let slots = 1_000;
    for look in 0..LOOKS_IN_A_ROW {
        assert_eq!(slot_at(7 + u64::from(look), look, slots), 7 + look);
    }
    let scattered: alloc::collections::BTreeSet<u32> = (LOOKS_IN_A_ROW..LOOKS)
        .map(|look| slot_at(7 + u64::from(look), look, slots))
        .collect();
    assert!(scattered.len() > 20 && scattered.iter().all(|slot| *slot < slots));
}

fn any_addr() -> impl Strategy<Value = Addr> {
    // Few values, so that words are often equal.
    proptest::array::uniform4(0u32..3).prop_map(|words| Addr { words })
}

proptest! {
    #[test]
    fn both_directions_have_one_key(a in any_addr(), b in any_addr(), ap in 0u16..3, bp in 0u16..3) {
        let forth = TupleKey::between(a, Port(ap), b, Port(bp), TCP);
        prop_assert_eq!(forth, TupleKey::between(b, Port(bp), a, Port(ap), TCP));
        let ends = [(forth.low, forth.low_port), (forth.high, forth.high_port)];
        prop_assert!(ends.contains(&(a, Port(ap))) && ends.contains(&(b, Port(bp))));
    }

    #[test]
    fn an_entry_gives_back_what_it_was_made_of(slot: u32, serial in 0..=SERIAL_MASK, role in 0u32..3) {
        let entry = TupleEntry::new(slot, serial, role);
        prop_assert_eq!((entry.slot, entry.serial(), entry.role()), (slot, serial, role));
        prop_assert_eq!(version(serial, state::LIVE) >> 2, serial);
    }

    /// Whatever the packets, each flow is established at most once, and closes with an end.
    #[test]
    fn events_come_once(packets in proptest::collection::vec((any::<bool>(), any::<u8>()), 0..40), tcp: bool) {
        let mut flow = flow(if tcp { TCP } else { UDP });
        let (mut established, mut ended) = (0, 0);
        for (i, (by_client, flags)) in packets.into_iter().enumerate() {
            let event = if by_client { flow.note_client(flags) } else { flow.note_backend(flags, i as u64 + 1) };
            match event {
                Event::Nothing => {}
                Event::Established => established += 1,
                Event::Ended(_) => ended += 1,
            }
        }
        // A reset that was forged may come again: whoever counts ends notes that one was told.
        prop_assert!(established <= 1);
        prop_assert!(ended >= 1 || !flow.is_closed());
    }
}

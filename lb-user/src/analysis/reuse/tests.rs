use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn tuple(port: u16) -> ClientTuple {
    ClientTuple {
        netns: 1,
        client: [1; 16],
        vip: [2; 16],
        client_port: port,
        vip_port: 80,
        protocol: 6,
    }
}

fn record(port: u16, start_ns: u64, end_ns: u64, backend: u32) -> ConnRecord {
    ConnRecord {
        start_ns,
        end_ns,
        tuple: tuple(port),
        service: u32::from(port % 3),
        backend,
    }
}

fn in_order() -> ReuseConfig {
    ReuseConfig {
        disorder_ns: 0,
        ..ReuseConfig::default()
    }
}

fn always(_: u32, _: u64) -> bool {
    true
}

fn fold(config: ReuseConfig, records: &[ConnRecord]) -> ReuseTracker {
    let mut tracker = ReuseTracker::new(config);
    for &record in records {
        tracker.push(record, always);
    }
    tracker.drain(always);
    tracker
}

#[test]
fn the_interval_runs_from_close_to_start() {
    let tracker = fold(
        in_order(),
        &[
            record(1, SECOND, 2 * SECOND, 7),
            record(1, 62 * SECOND, 63 * SECOND, 7),
            record(1, 64 * SECOND, 65 * SECOND, 8),
        ],
    );
    let total = tracker.total();
    assert_eq!(
        (total.connections, total.same_backend, total.moved, total.total()),
        (3, 1, 1, 2)
    );
    // 60 s belongs to the bucket that ends at 60 s, 1 s to the one that ends at 1 s.
    assert_eq!(total.intervals, [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]);
    assert!((total.interval_seconds - 61.0).abs() < 1e-9);
    assert_eq!(total.same_share(), Some(0.5));
}

#[test]
fn the_horizon_is_included_and_beyond_it_is_first() {
    let at = fold(
        in_order(),
        &[record(1, 1, SECOND, 7), record(1, 121 * SECOND, 122 * SECOND, 7)],
    );
    assert_eq!(at.total().total(), 1);
    let beyond = fold(
        in_order(),
        &[record(1, 1, SECOND, 7), record(1, 121 * SECOND + 1, 122 * SECOND, 7)],
    );
    assert_eq!(beyond.total().total(), 0);
}

#[test]
fn another_namespace_or_port_is_another_tuple() {
    let mut foreign = record(1, 3 * SECOND, 4 * SECOND, 7);
    foreign.tuple.netns = 2;
    let tracker = fold(
        in_order(),
        &[
            record(1, SECOND, 2 * SECOND, 7),
            foreign,
            record(2, 5 * SECOND, 6 * SECOND, 7),
        ],
    );
    assert_eq!(tracker.total().total(), 0);
    assert_eq!(tracker.tuples(), 3);
}

#[test]
fn a_backend_that_is_gone_makes_the_reuse_stale() {
    let mut tracker = ReuseTracker::new(in_order());
    let usable = |backend: u32, at_ns: u64| backend != 7 || at_ns < 3 * SECOND;
    for record in [
        record(1, SECOND, 2 * SECOND, 7),
        record(1, 2 * SECOND + 1, 2 * SECOND + 2, 7),
        record(1, 3 * SECOND, 4 * SECOND, 8),
    ] {
        tracker.push(record, usable);
    }
    tracker.drain(usable);
    let total = tracker.total();
    assert_eq!((total.same_backend, total.moved, total.stale_backend), (1, 0, 1));
}

#[test]
fn nothing_is_claimed_of_backends_that_were_not_seen() {
    let mut tracker = ReuseTracker::new(in_order());
    // No unseen backend is usable, and none is gone either.
    let usable = |backend: u32, _| backend != UNKNOWN_BACKEND;
    for record in [
        record(1, SECOND, 2 * SECOND, UNKNOWN_BACKEND),
        record(1, 3 * SECOND, 4 * SECOND, UNKNOWN_BACKEND),
        record(1, 5 * SECOND, 6 * SECOND, 7),
        record(1, 7 * SECOND, 8 * SECOND, UNKNOWN_BACKEND),
    ] {
        tracker.push(record, usable);
    }
    tracker.drain(usable);
    let total = tracker.total();
    assert_eq!((total.unknown_backend, total.total()), (3, 3));
    assert_eq!(total.same_share(), None);
}

#[test]
fn of_two_that_overlap_the_later_end_counts() {
    let tracker = fold(
        in_order(),
        &[record(1, 2 * SECOND, 3 * SECOND, 8), record(1, SECOND, 10 * SECOND, 7)],
    );
    assert_eq!((tracker.total().overlap, tracker.total().total()), (1, 0));
}

#[test]
fn with_openings_the_later_start_counts() {
    let mut opened = record(1, SECOND, 0, 7);
    opened.end_ns = 0;
    let tracker = fold(
        in_order(),
        &[
            record(1, 1, SECOND / 2, 9),
            opened,
            record(1, 2 * SECOND, 3 * SECOND, 8),
            record(1, SECOND, 10 * SECOND, 7),
        ],
    );
    let total = tracker.total();
    assert_eq!((total.overlap, total.moved, total.intervals[1]), (1, 1, 1));
}

#[test]
fn disorder_within_the_window_changes_nothing() {
    let early = record(1, SECOND, 2 * SECOND, 7);
    let later = record(1, 2 * SECOND + 5, 2 * SECOND + 6, 7);
    for records in [[early, later], [later, early]] {
        let tracker = fold(ReuseConfig::default(), &records);
        assert_eq!((tracker.total().same_backend, tracker.late()), (1, 0));
    }
}

#[test]
fn disorder_beyond_the_window_is_counted_late() {
    let mut tracker = ReuseTracker::new(ReuseConfig::default());
    tracker.push(record(1, 8 * SECOND, 9 * SECOND, 7), always);
    tracker.push(record(2, 11 * SECOND, 12 * SECOND, 7), always);
    tracker.push(record(1, SECOND, 2 * SECOND, 7), always);
    tracker.drain(always);
    assert_eq!(
        (tracker.late(), tracker.total().connections, tracker.total().total()),
        (1, 3, 0)
    );
}

#[test]
fn records_are_held_back_until_their_place_is_certain() {
    let mut tracker = ReuseTracker::new(ReuseConfig::default());
    tracker.push(record(1, SECOND, 2 * SECOND, 7), always);
    assert_eq!((tracker.held_back(), tracker.total().connections), (1, 0));
    tracker.advance(4 * SECOND, always);
    assert_eq!((tracker.held_back(), tracker.total().connections), (0, 1));
}

#[test]
fn a_record_that_ends_before_it_starts_is_refused() {
    let tracker = fold(in_order(), &[record(1, 2 * SECOND, SECOND, 7)]);
    assert_eq!((tracker.malformed(), tracker.total().connections), (1, 0));
}

#[test]
fn memory_is_bounded_and_evictions_are_counted() {
    let config = ReuseConfig {
        capacity: 100,
        disorder_ns: SECOND,
        pending: 10,
        ..ReuseConfig::default()
    };
    let mut tracker = ReuseTracker::new(config);
    for i in 0..5_000_u64 {
        tracker.push(record((i % 1_000) as u16, 1 + i * 1_000, 2 + i * 1_000, 7), always);
        assert!(tracker.tuples() <= 100 && tracker.held_back() <= 10);
        assert!(
            tracker.memories[0].order.len() <= 201,
            "{}",
            tracker.memories[0].order.len()
        );
    }
    tracker.drain(always);
    assert_eq!(tracker.evicted(), 4_900);
    // One tuple alone, used over and over, costs one entry.
    let before = tracker.evicted();
    for i in 0..5_000_u64 {
        tracker.push(record(1, SECOND + i * 1_000, SECOND + i * 1_000 + 1, 7), always);
    }
    tracker.drain(always);
    assert_eq!(tracker.evicted() - before, 1);
    assert!(tracker.memories[0].order.len() <= 201);
}

#[test]
fn clients_outside_do_not_drive_out_the_nodes_own() {
    let mut tracker = ReuseTracker::new(ReuseConfig {
        capacity: 100,
        ..in_order()
    });
    tracker.push(record(1, 1, 2, 7), always);
    for i in 0..5_000_u64 {
        let mut outside = record(i as u16, 3 + i, 4 + i, 7);
        outside.tuple.netns = 0;
        outside.tuple.client = u128::from(i).to_be_bytes();
        tracker.push(outside, always);
    }
    tracker.push(record(1, SECOND, SECOND + 1, 7), always);
    tracker.drain(always);
    assert_eq!(
        tracker.total().same_backend,
        1,
        "the node's own tuple is still remembered"
    );
    assert_eq!(tracker.evicted(), 4_900);
    let own = tracker.clients().find(|(client, _)| client.netns != 0);
    assert_eq!(own.map(|(_, counts)| counts.connections), Some(2));
}

#[test]
fn a_forgotten_service_leaves_the_totals() {
    let mut tracker = fold(
        in_order(),
        &[record(1, SECOND, 2 * SECOND, 7), record(1, 3 * SECOND, 4 * SECOND, 7)],
    );
    assert_eq!(tracker.service(1).map(ReuseCounts::total), Some(1));
    tracker.forget_service(1);
    assert!(tracker.service(1).is_none());
    assert_eq!(tracker.total().total(), 1);
}

#[test]
fn chance_is_one_over_k_and_follows_weights() {
    assert_eq!(chance_of_same([1, 1, 1, 1]), Some(0.25));
    assert_eq!(chance_of_same([3, 1]), Some(0.625));
    assert_eq!(chance_of_same([0, 5]), Some(1.0));
    assert_eq!(chance_of_same([]), None);
    assert_eq!(chance_of_same([0]), None);
}

/// The definition, read literally over records in the order of their ends.
fn naive_by_end(records: &[ConnRecord], horizon_ns: u64) -> ReuseCounts {
    let mut sorted = records.to_vec();
    sorted.sort_by_key(|r| (r.end_ns, r.start_ns, r.service, r.tuple, r.backend));
    let mut counts = ReuseCounts::default();
    for (i, record) in sorted.iter().enumerate() {
        let before = || sorted[..i].iter().filter(|other| other.tuple == record.tuple);
        counts.add(if before().any(|other| other.end_ns > record.start_ns) {
            Outcome::Overlap
        } else {
            after(before().next_back(), record, horizon_ns)
        });
    }
    counts
}

/// The definition, read literally over records in the order of their starts, all openings known.
fn naive_by_start(records: &[ConnRecord], horizon_ns: u64) -> ReuseCounts {
    let mut counts = ReuseCounts::default();
    for record in records {
        let before = || {
            records
                .iter()
                .filter(|other| other.tuple == record.tuple && other.start_ns < record.start_ns)
        };
        counts.add(if before().any(|other| other.end_ns > record.start_ns) {
            Outcome::Overlap
        } else {
            after(
                before().max_by_key(|other| (other.end_ns, other.start_ns)),
                record,
                horizon_ns,
            )
        });
    }
    counts
}

fn after(last: Option<&ConnRecord>, record: &ConnRecord, horizon_ns: u64) -> Outcome {
    match last {
        Some(last) if record.start_ns - last.end_ns <= horizon_ns => {
            let interval = record.start_ns - last.end_ns;
            if last.backend == UNKNOWN_BACKEND || record.backend == UNKNOWN_BACKEND {
                Outcome::UnknownBackend(interval)
            } else if last.backend == record.backend {
                Outcome::SameBackend(interval)
            } else {
                Outcome::Moved(interval)
            }
        }
        _ => Outcome::First,
    }
}

fn alike(found: &ReuseCounts, wanted: &ReuseCounts) -> Result<(), TestCaseError> {
    prop_assert!((found.interval_seconds - wanted.interval_seconds).abs() < 1e-6);
    let mut found = found.clone();
    found.interval_seconds = wanted.interval_seconds;
    prop_assert_eq!(&found, wanted);
    Ok(())
}

fn any_records() -> impl Strategy<Value = Vec<ConnRecord>> {
    let one = (0_u16..4, 1_u64..2_000, 0_u64..300, 0_u32..3)
        .prop_map(|(port, start, length, backend)| record(port, start * SECOND, (start + length) * SECOND, backend));
    proptest::collection::vec(one, 0..80)
}

proptest! {
    #[test]
    fn agrees_with_the_definition_whatever_the_arrival(records in any_records(), jitter in proptest::collection::vec(0_u64..30, 80)) {
        let config = ReuseConfig { disorder_ns: 30 * SECOND, ..ReuseConfig::default() };
        // A record arrives up to 30 s after its end: so the order of arrival is disturbed by less than the window.
        let mut arrivals: Vec<(u64, ConnRecord)> = records
            .iter()
            .zip(&jitter)
            .map(|(record, jitter)| (record.end_ns + jitter * SECOND, *record))
            .collect();
        arrivals.sort_by_key(|&(at, record)| (at, record.start_ns));
        let arrived: Vec<ConnRecord> = arrivals.into_iter().map(|(_, record)| record).collect();
        let tracker = fold(config, &arrived);
        alike(tracker.total(), &naive_by_end(&records, config.horizon_ns))?;
        let summed = tracker.services().map(|(_, counts)| counts.total()).sum::<u64>();
        prop_assert_eq!(summed, tracker.total().total());
        prop_assert_eq!(tracker.late(), 0);
    }

    #[test]
    fn agrees_with_the_definition_where_openings_are_known(records in any_records()) {
        // As the kernel does: one full tuple (with the backend) is never used twice at once, and no two begin together.
        let mut kept: Vec<ConnRecord> = Vec::new();
        for record in records {
            let clash = kept.iter().any(|other| {
                other.tuple == record.tuple
                    && (other.start_ns == record.start_ns
                        || (other.backend == record.backend
                            && other.start_ns <= record.end_ns
                            && record.start_ns <= other.end_ns))
            });
            // At most three backends, hence three open at once: within what the tracker follows.
            if !clash {
                kept.push(record);
            }
        }
        let mut events: Vec<(u64, u8, ConnRecord)> = Vec::new();
        for &record in &kept {
            events.push((record.start_ns, 1, ConnRecord { end_ns: 0, ..record }));
            events.push((record.end_ns, if record.end_ns == record.start_ns { 2 } else { 0 }, record));
        }
        events.sort_by_key(|&(at, rank, record)| (at, rank, record.start_ns));
        let arrived: Vec<ConnRecord> = events.into_iter().map(|(_, _, record)| record).collect();
        let config = in_order();
        let tracker = fold(config, &arrived);
        alike(tracker.total(), &naive_by_start(&kept, config.horizon_ns))?;
    }

    #[test]
    fn never_panics_and_never_grows(records in proptest::collection::vec((any::<u16>(), any::<u64>(), any::<u64>(), any::<u32>()), 0..300)) {
        let config = ReuseConfig { capacity: 16, pending: 8, ..ReuseConfig::default() };
        let mut tracker = ReuseTracker::new(config);
        for (port, start, end, backend) in records {
            tracker.push(record(port, start, end, backend), always);
            prop_assert!(tracker.tuples() <= 16 && tracker.held_back() <= 8);
        }
        tracker.drain(always);
        prop_assert_eq!(tracker.held_back(), 0);
    }
}

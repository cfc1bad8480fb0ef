//! Keep-alive clients, and what only looks like them.

use proptest::prelude::*;

use super::{
    super::simulated::{SECOND, World, fair, first_two},
    *,
};

fn member(backend: u32, started: u64, open: u64) -> MemberReading {
    MemberReading {
        backend,
        weight: 1,
        usable_since_ns: SECOND,
        started,
        open: Some(open),
    }
}

/// Two backends with `each` connections that never end, then a third.
fn keep_alive(each: u64) -> World {
    let mut world = World::new(5, 2);
    world.mean_life_ns = 1e18;
    for at in 0..2 {
        for _ in 0..each {
            world.connect(at, world.now_ns);
        }
    }
    world.run(60, 0.0, fair);
    world.add(3, 1);
    world
}

#[test]
fn keep_alive_clients_without_new_connections_are_found() {
    let mut world = keep_alive(150);
    let born_ns = world.now_ns;
    world.run(120, 0.0, fair);
    let [raised] = world.drift_changes[..] else {
        panic!("{:?}", world.drift_changes);
    };
    let found = raised.judgement;
    assert_eq!(
        (raised.transition, found.backend, found.open),
        (Transition::Raised, 3, 0)
    );
    assert_eq!(found.status, DriftStatus::LongLived);
    assert!((found.fair - 100.0).abs() < 1e-9 && found.probability < 1e-40);
    // ln(3000) = 8.0 expected at 50 connections in 300 s take 48 s, and two for the grace.
    let after = (raised.at_ns - born_ns) / SECOND;
    assert!((49..=53).contains(&after), "after {after} s");
    assert!(found.seconds_to_half > SLOW_SECONDS, "{found:?}");
    assert!(
        world.changes.is_empty(),
        "no new ones, so that nobody starves: {:?}",
        world.changes
    );
    // The clients are restarted at last: new connections come, and it fills up.
    world.run(60, 10.0, fair);
    world.run(60, 10.0, |_, _| 2);
    assert_eq!(world.drift_changes.len(), 2);
    assert_eq!(world.drift_changes[1].transition, Transition::Recovered);
}

#[test]
fn keep_alive_clients_with_a_few_fair_new_connections_are_found() {
    let mut world = keep_alive(1500);
    world.run(240, 0.6, fair);
    assert_eq!(world.drift_changes.len(), 1);
    // It was raised before the first came, and they do not take it back.
    let found = world.drift.judgement(3).unwrap();
    assert!(
        found.new_observed > 10 && found.status == DriftStatus::LongLived,
        "{found:?}"
    );
    assert!(found.rate_at_most > found.new_observed as f64 / found.new_seconds);
    assert!(world.changes.is_empty(), "{:?}", world.changes);
}

#[test]
fn few_open_connections_prove_nothing() {
    let mut world = keep_alive(10);
    world.run(1200, 0.0, fair);
    world.assert_silent();
    assert_eq!(world.drift.judgement(3).unwrap().status, DriftStatus::Unknown);
}

#[test]
fn the_fewest_that_prove_something_are_found_within_the_horizon() {
    // ln(3000) = 8.006: 25 connections are a fair share of 8.3.
    let mut world = keep_alive(12);
    world.connect(0, world.now_ns);
    world.run(620, 0.0, fair);
    assert_eq!(world.drift_changes.len(), 1);
}

#[test]
fn one_that_new_connections_pass_by_is_the_other_views() {
    let mut world = World::new(5, 2);
    world.mean_life_ns = 60e9;
    world.run(120, 20.0, fair);
    world.add(3, 1);
    world.run(600, 20.0, first_two);
    assert_eq!(world.changes.len(), 1, "it starves");
    assert!(world.drift_changes.is_empty(), "{:?}", world.drift_changes);
}

#[test]
fn a_drift_that_becomes_starvation_is_handed_over() {
    let mut world = keep_alive(150);
    world.run(120, 0.0, fair);
    assert_eq!(world.drift_changes.len(), 1);
    world.run(60, 5.0, first_two);
    assert_eq!(world.changes[0].transition, Transition::Raised);
    assert_eq!(world.drift_changes[1].transition, Transition::Recovered);
    assert_eq!(world.drift_changes.len(), 2);
}

#[test]
fn a_ramp_up_in_which_new_connections_flow_is_silent() {
    for seed in 0..20 {
        for (life_s, rate) in [(5.0, 30.0), (60.0, 5.0), (300.0, 2.0)] {
            let mut world = World::new(seed, 3);
            world.mean_life_ns = life_s * 1e9;
            world.run(600, rate, fair);
            world.add(4, 1);
            world.run(600, rate, fair);
            world.assert_silent();
        }
    }
}

#[test]
fn evenness_is_of_open_connections_alone() {
    let mut drift = Drift::new();
    drift.read(10 * SECOND, &[member(1, 0, 500), member(2, 9_999, 500)]);
    assert_eq!(drift.imbalance().dispersion, Some(0.0));
    drift.read(11 * SECOND, &[member(1, 0, 990), member(2, 9_999, 10)]);
    let found = drift.imbalance();
    assert!(found.alarm && found.n == 1000, "{found:?}");
}

#[test]
fn unknown_open_counts_and_weight_zero_take_no_part() {
    let mut drift = Drift::new();
    let unknown = MemberReading {
        open: None,
        ..member(3, 0, 0)
    };
    let drained = MemberReading {
        weight: 0,
        ..member(4, 0, 900)
    };
    drift.read(10 * SECOND, &[member(1, 0, 50), member(2, 0, 50), unknown, drained]);
    assert_eq!((drift.imbalance().n, drift.judgements().len()), (100, 2));
    assert!(drift.judgement(3).is_none());
}

#[test]
fn one_that_goes_takes_its_verdict_along() {
    let mut world = keep_alive(150);
    world.run(120, 0.0, fair);
    world.remove(3);
    world.run(1, 0.0, fair);
    assert_eq!(world.drift_changes[1].transition, Transition::Gone);
}

proptest! {
    #[test]
    fn any_readings_are_survived_in_bounded_memory(
        steps in proptest::collection::vec(
            (0_u64..40, proptest::collection::vec((0_u32..5, 0_u32..4, any::<u64>(), proptest::option::of(any::<u64>())), 0..7)), 0..60),
    ) {
        let mut drift = Drift::new();
        let mut now = 0;
        let (mut raised, mut over) = (0, 0);
        for (by, members) in steps {
            now += by * SECOND;
            let readings: Vec<MemberReading> = members
                .iter()
                .map(|&(backend, weight, started, open)| MemberReading { backend, weight, started, open, usable_since_ns: SECOND })
                .collect();
            for change in drift.read(now, &readings) {
                match change.transition {
                    Transition::Raised => raised += 1,
                    Transition::Recovered | Transition::Gone => over += 1,
                }
            }
            let judged = drift.judgements();
            prop_assert_eq!(raised - over, judged.iter().filter(|j| j.status == DriftStatus::LongLived).count());
            prop_assert!(judged.iter().all(|j| (0.0..=1.0).contains(&j.probability) && !j.seconds_to_half.is_nan()));
            prop_assert!(drift.backends.values().all(|b| b.buckets.len() <= (HORIZON_NS / BUCKET_NS) as usize + 2));
        }
    }
}

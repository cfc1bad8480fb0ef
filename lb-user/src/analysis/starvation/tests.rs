//! The definitions, number by number.

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn member(backend: u32, usable_s: u64, started: u64) -> MemberReading {
    MemberReading {
        backend,
        weight: 1,
        usable_since_ns: usable_s * SECOND,
        started,
        open: None,
    }
}

/// Two old members that share all, from second 10 on, and a third that is usable from second 20 and gets nothing.
fn born_into(per_second: u64, seconds: u64) -> (Detector, Vec<Change>) {
    let mut detector = Detector::new();
    let mut changes = Vec::new();
    for s in 10..=20 + seconds {
        let mut members = vec![member(1, 1, (s - 10) * per_second), member(2, 1, (s - 10) * per_second)];
        if s > 20 {
            members.push(member(3, 20, 0));
        }
        changes.extend(detector.read(s * SECOND, &members));
    }
    (detector, changes)
}

#[test]
fn birth_counts_from_two_seconds_after_usable() {
    let (detector, changes) = born_into(3, 3);
    assert!(changes.is_empty());
    let newborn = detector.judgement(3).unwrap();
    assert_eq!((newborn.clock, newborn.status), (Clock::Birth, Status::Unknown));
    assert_eq!(newborn.window_start_ns, 22 * SECOND);
    assert!((newborn.expected - 2.0).abs() < 1e-12, "{newborn:?}");
}

#[test]
fn birth_is_unknown_below_ln_1000_k_and_starved_above() {
    // λ grows by 2 a second from 22 on; ln(3000) = 8.006, so that four seconds give 8 and five give 10.
    let (detector, changes) = born_into(3, 6);
    assert!(changes.is_empty());
    assert_eq!(detector.judgement(3).unwrap().status, Status::Unknown);
    let (detector, changes) = born_into(3, 7);
    let [raised] = changes[..] else {
        panic!("{changes:?}");
    };
    assert_eq!((raised.transition, raised.at_ns), (Transition::Raised, 27 * SECOND));
    let found = raised.judgement;
    assert_eq!(
        (found.backend, found.clock, found.status, found.observed),
        (3, Clock::Birth, Status::Starved, 0)
    );
    assert!((found.expected - 10.0).abs() < 1e-12);
    assert!((found.probability - (-10_f64).exp()).abs() < 1e-12);
    assert_eq!((found.window_start_ns, found.window_end_ns), (22 * SECOND, 27 * SECOND));
    assert_eq!(found.starved_since_ns, Some(22 * SECOND));
    assert_eq!(detector.starved(), 1);
    assert_eq!(detector.judgements().len(), 3);
}

#[test]
fn a_trickle_does_not_end_the_birth_clock() {
    // The third one's first connection comes while λ is 4; then nothing more.
    let mut detector = Detector::new();
    let mut changes = Vec::new();
    for s in 10..=40_u64 {
        let mut members = vec![member(1, 1, s * 3), member(2, 1, s * 3)];
        if s > 20 {
            members.push(member(3, 20, u64::from(s > 23)));
        }
        changes.extend(detector.read(s * SECOND, &members));
    }
    assert_eq!(changes.len(), 1);
    let found = changes[0].judgement;
    assert_eq!((found.clock, found.observed), (Clock::Birth, 1));
    // e^−λ (1 + λ) < 1e-4/3 from λ = 13.0 on; readings are 7/3 or 2 apart.
    assert!(found.expected > 13.0 && found.expected < 15.4, "{found:?}");
}

proptest! {
    #[test]
    fn a_zero_share_is_found_at_the_first_look(k in 2_u64..100, per_second in 10_u64..3_000) {
        let mut detector = Detector::new();
        let others = |total: u64| (1..k).map(|id| member(id as u32, 1, if id == 1 { total } else { 0 })).collect::<Vec<_>>();
        detector.read(10 * SECOND, &others(0));
        let least = (1_000.0 * k as f64).ln();
        let each = per_second as f64 / k as f64;
        for s in 1_u64.. {
            let mut members = others(s * per_second);
            members.push(member(k as u32, 10, 0));
            let changes = detector.read((10 + s) * SECOND, &members);
            // Others starve as well, as the first one gets all; this is about the newborn.
            let newborn = changes.iter().find(|change| change.judgement.backend == k as u32);
            if let Some(raised) = newborn {
                let found = raised.judgement;
                prop_assert_eq!((found.clock, raised.transition), (Clock::Birth, Transition::Raised));
                prop_assert!(found.expected >= least && found.expected <= least + each + 1e-6, "{:?}", found);
                break;
            }
            prop_assert!(detector.judgement(k as u32).is_some_and(|newborn| newborn.expected < least + 1e-6));
        }
    }
}

#[test]
fn half_the_share_ends_the_birth_and_windows_follow() {
    let mut detector = Detector::new();
    detector.read(10 * SECOND, &[member(1, 1, 0)]);
    let mut changes = Vec::new();
    for s in 0..=60_u64 {
        let fresh = s.saturating_sub(1) * 4;
        // Fair for 20 seconds, then nothing.
        let third = fresh.min(80);
        let members = [member(1, 1, 100 + fresh), member(2, 11, fresh), member(3, 11, third)];
        changes.extend(detector.read((11 + s) * SECOND, &members));
    }
    let [raised] = changes[..] else {
        panic!("{changes:?}");
    };
    assert_eq!(raised.transition, Transition::Raised);
    let found = raised.judgement;
    assert_eq!((found.backend, found.clock), (3, Clock::Running));
    assert!(found.expected >= RUNNING_EXPECTED + 3_f64.ln());
    assert!(found.probability < RUNNING_P / 3.0);
    // The windows follow one another without a gap, so that it is found in the first whole one.
    let window = found.window_end_ns - found.window_start_ns;
    assert!(raised.at_ns <= 32 * SECOND + 2 * window, "{raised:?}");
}

/// Feeds one running member of two with `theirs` beside `own` connections a second, for some seconds.
fn feed(detector: &mut Detector, from: &mut (u64, u64, u64), seconds: u64, own: u64, theirs: u64) -> Vec<Change> {
    let mut changes = Vec::new();
    for _ in 0..seconds {
        *from = (from.0 + 1, from.1 + own, from.2 + theirs);
        changes.extend(detector.read(from.0 * SECOND, &[member(1, 1, from.1), member(2, 1, from.2)]));
    }
    changes
}

#[test]
fn those_there_at_the_first_reading_run_and_show_hysteresis() {
    let mut detector = Detector::new();
    let mut from = (9, 1000, 5000);
    assert!(feed(&mut detector, &mut from, 1, 0, 0).is_empty());
    assert_eq!(detector.judgement(1).unwrap().clock, Clock::Running);
    assert_eq!(detector.judgement(1).unwrap().status, Status::Unknown);
    // 4 a second, λ = 2 a second.
    let raised = feed(&mut detector, &mut from, 12, 0, 4);
    assert_eq!((raised.len(), raised[0].transition), (1, Transition::Raised));
    assert_eq!(raised[0].judgement.starved_since_ns, Some(10 * SECOND));
    // A third of its share is between a quarter and a half: it stays.
    let proof = detector.judgement(1).unwrap();
    assert!(feed(&mut detector, &mut from, 60, 1, 5).is_empty());
    assert_eq!(detector.judgement(1).unwrap(), proof);
    // Six tenths clear it, within one whole window.
    let cleared = feed(&mut detector, &mut from, 24, 3, 7);
    assert_eq!((cleared.len(), cleared[0].transition), (1, Transition::Recovered));
    assert_eq!(cleared[0].judgement.status, Status::Fair);
    assert_eq!(cleared[0].judgement.starved_since_ns, None);
    assert_eq!(detector.starved(), 0);
    // And a third alone does not raise it.
    assert!(feed(&mut detector, &mut from, 600, 1, 5).is_empty());
}

#[test]
fn a_window_closes_only_where_zero_is_proof() {
    for k in [1_usize, 2, 7, 100] {
        let bounds = Bounds::of(k);
        for seconds in [1_u64, 2, 5, 10, 26, 60, 3600] {
            let p = Bounds::running_p(seconds * SECOND);
            // 1 in 1,000 service-days, spent evenly; never more than the bound of one window.
            assert!(p <= RUNNING_P && p * 86_400.0 / seconds as f64 <= RUNNING_BUDGET_PER_DAY * 1.000_001);
            assert!(seconds < 26 || p > 0.999 * RUNNING_P);
            let closes = |expected| {
                let tally = Tally {
                    start_ns: 0,
                    expected,
                    observed: 0,
                };
                bounds.closing_p(tally, seconds * SECOND).is_some()
            };
            let least = (1..4_000).map(|i| f64::from(i) / 100.0).find(|&l| closes(l)).unwrap();
            assert!(least >= RUNNING_EXPECTED + bounds.ln_k);
            assert!(
                least <= RUNNING_EXPECTED + bounds.ln_k + 3.4,
                "k {k}, {seconds} s: {least}"
            );
            let zero = Tally {
                start_ns: 0,
                expected: least,
                observed: 0,
            };
            assert!(zero.is_starved(p / bounds.k));
        }
    }
    // No time has passed: nothing may be spent.
    let full = Tally {
        start_ns: 5,
        expected: 1e9,
        observed: 0,
    };
    assert!(Bounds::of(2).closing_p(full, 5).is_none());
}

#[test]
fn a_verdict_of_birth_is_cleared_by_a_window() {
    let mut detector = Detector::new();
    let mut changes = Vec::new();
    // An hour without a connection, then its fair third.
    for s in 10..=3_700_u64 {
        let own = s.saturating_sub(3_620) * 3;
        let mut members = vec![member(1, 1, s * 3), member(2, 1, s * 3)];
        if s > 20 {
            members.push(member(3, 20, own));
        }
        changes.extend(detector.read(s * SECOND, &members));
    }
    let kinds: Vec<_> = changes.iter().map(|change| change.transition).collect();
    assert_eq!(kinds, [Transition::Raised, Transition::Recovered]);
    assert!(changes[1].at_ns < 3_640 * SECOND, "{:?}", changes[1]);
    assert_eq!(detector.judgement(3).unwrap().clock, Clock::Running);
}

#[test]
fn one_that_goes_takes_its_verdict_along() {
    let (mut detector, _) = born_into(3, 10);
    let changes = detector.read(31 * SECOND, &[member(1, 1, 60), member(2, 1, 60)]);
    assert_eq!((changes.len(), changes[0].transition), (1, Transition::Gone));
    assert_eq!(changes[0].judgement.backend, 3);
    assert!(detector.judgement(3).is_none());
    // Weight 0 is the same.
    let (mut detector, _) = born_into(3, 10);
    let mut drained = member(3, 20, 0);
    drained.weight = 0;
    let changes = detector.read(31 * SECOND, &[member(1, 1, 60), member(2, 1, 60), drained]);
    assert_eq!(changes[0].transition, Transition::Gone);
}

#[test]
fn an_id_used_again_is_another_member() {
    let (mut detector, _) = born_into(3, 10);
    let changes = detector.read(31 * SECOND, &[member(1, 1, 60), member(2, 1, 60), member(3, 30, 7)]);
    assert_eq!((changes.len(), changes[0].transition), (1, Transition::Gone));
    let newborn = detector.judgement(3).unwrap();
    assert_eq!(
        (newborn.clock, newborn.status, newborn.observed),
        (Clock::Birth, Status::Unknown, 0)
    );
}

#[test]
fn a_birth_time_learned_later_is_no_new_birth() {
    let mut detector = Detector::new();
    detector.read(10 * SECOND, &[member(1, 0, 0), member(2, 0, 0)]);
    detector.read(11 * SECOND, &[member(1, 3, 5), member(2, 0, 5)]);
    assert_eq!(detector.judgement(1).unwrap().clock, Clock::Running);
}

#[test]
fn one_that_becomes_eligible_again_is_born_then() {
    let mut detector = Detector::new();
    let mut off = member(2, 1, 0);
    off.weight = 0;
    detector.read(10 * SECOND, &[member(1, 1, 0), off]);
    for s in 11..14 {
        detector.read(s * SECOND, &[member(1, 1, 0), member(2, 1, 0)]);
    }
    let again = detector.judgement(2).unwrap();
    assert_eq!((again.clock, again.window_start_ns), (Clock::Birth, 13 * SECOND));
}

#[test]
fn a_counter_that_went_back_or_a_new_weight_skips_the_interval() {
    let mut detector = Detector::new();
    let weighted = |backend, weight, started| MemberReading {
        weight,
        ..member(backend, 1, started)
    };
    detector.read(10 * SECOND, &[weighted(1, 1, 500), weighted(2, 1, 500)]);
    detector.read(11 * SECOND, &[weighted(1, 1, 3), weighted(2, 1, 503)]);
    detector.read(12 * SECOND, &[weighted(1, 3, 9), weighted(2, 1, 505)]);
    detector.read(13 * SECOND, &[weighted(1, 3, 12), weighted(2, 1, 506)]);
    let found = detector.judgement(1).unwrap();
    assert_eq!((found.observed, found.expected), (3, 3.0));
    let other = detector.judgement(2).unwrap();
    // Where the first one says nothing, the second is compared with itself.
    assert_eq!((other.observed, other.expected), (6, 6.0));
}

#[test]
fn nothing_and_one_are_quiet() {
    let mut detector = Detector::new();
    assert!(detector.read(SECOND, &[]).is_empty());
    assert!(detector.judgements().is_empty());
    for s in 2..100 {
        assert!(detector.read(s * SECOND, &[member(1, 1, s * 50)]).is_empty());
    }
    assert_eq!(detector.judgement(1).unwrap().status, Status::Fair);
}

#[test]
fn a_clock_that_stands_or_goes_back_judges_nothing() {
    let mut detector = Detector::new();
    detector.read(10 * SECOND, &[member(1, 1, 0), member(2, 1, 0)]);
    for i in 1..50 {
        assert!(
            detector
                .read(10 * SECOND, &[member(1, 1, 0), member(2, 1, i * 100)])
                .is_empty()
        );
        assert!(
            detector
                .read(9 * SECOND, &[member(1, 1, 0), member(2, 1, i * 100)])
                .is_empty()
        );
    }
}

proptest! {
    #[test]
    fn expected_and_observed_agree_in_sum(
        steps in proptest::collection::vec(proptest::collection::vec(0_u64..6, 4), 1..30),
        weights in proptest::collection::vec(1_u32..5, 4),
    ) {
        let mut detector = Detector::new();
        let mut totals = [0_u64; 4];
        let reading = |totals: &[u64; 4]| -> Vec<MemberReading> {
            (0..4).map(|i| MemberReading { weight: weights[i], ..member(i as u32 + 1, 1, totals[i]) }).collect()
        };
        detector.read(10 * SECOND, &reading(&totals));
        let mut open = 0.0;
        for (s, step) in steps.iter().enumerate() {
            for (total, fresh) in totals.iter_mut().zip(step) {
                *total += fresh;
            }
            detector.read((11 + s as u64) * SECOND, &reading(&totals));
            open += step.iter().sum::<u64>() as f64;
            // While no window has closed, all that came is in the open ones.
            if detector.judgements().iter().all(|judgement| judgement.status == Status::Unknown) {
                let expected: f64 = detector.judgements().iter().map(|j| j.expected).sum();
                let observed: u64 = detector.judgements().iter().map(|j| j.observed).sum();
                prop_assert!((expected - open).abs() < 1e-6 && (observed as f64 - open).abs() < 0.5);
            }
        }
    }

    #[test]
    fn any_readings_are_survived(
        steps in proptest::collection::vec(
            (0_u64..5, proptest::collection::vec((0_u32..6, 0_u32..4, any::<u64>(), any::<u64>()), 0..8)), 0..40),
    ) {
        let mut detector = Detector::new();
        let mut now = 0;
        let (mut raised, mut over) = (0, 0);
        for (by, members) in steps {
            now += by * SECOND;
            let readings: Vec<MemberReading> = members
                .iter()
                .map(|&(backend, weight, usable_since_ns, started)| MemberReading {
                    backend, weight, usable_since_ns, started, open: None,
                })
                .collect();
            for change in detector.read(now, &readings) {
                match change.transition {
                    Transition::Raised => raised += 1,
                    Transition::Recovered | Transition::Gone => over += 1,
                }
            }
            // The events alone tell how many starve.
            prop_assert_eq!(raised - over, detector.starved());
            for judgement in detector.judgements() {
                prop_assert!((0.0..=1.0).contains(&judgement.probability));
                prop_assert_eq!(judgement.status == Status::Starved, judgement.starved_since_ns.is_some());
            }
        }
    }
}

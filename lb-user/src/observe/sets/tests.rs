use lb_common::backend::Tally;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn sample(backend: u32, connects: u64, direct: u64) -> Sample {
    Sample {
        backend,
        weight: 1,
        counters: BackendCounters {
            inside: Tally {
                connects,
                ..Tally::default()
            },
            direct: Tally {
                connects: direct,
                ..Tally::default()
            },
            ..BackendCounters::default()
        },
    }
}

fn service(connects: u64, attributed: u64, direct: u64) -> ServiceCounters {
    ServiceCounters {
        connects,
        attributed,
        direct,
        ..ServiceCounters::default()
    }
}

/// Feeds seconds of a story: each gives the connections of every backend so far and how many were told.
fn tell(
    watch: &mut Watch,
    seconds: std::ops::Range<u64>,
    story: impl Fn(u64) -> (Vec<Sample>, ServiceCounters),
) -> Vec<AlarmChange> {
    tell_of(watch, Traffic::Translated, seconds, story)
}

fn tell_of(
    watch: &mut Watch,
    traffic: Traffic,
    seconds: std::ops::Range<u64>,
    story: impl Fn(u64) -> (Vec<Sample>, ServiceCounters),
) -> Vec<AlarmChange> {
    tell_to(watch, traffic, Audience::INSIDE, seconds, story)
}

fn tell_to(
    watch: &mut Watch,
    traffic: Traffic,
    audience: Audience,
    seconds: std::ops::Range<u64>,
    story: impl Fn(u64) -> (Vec<Sample>, ServiceCounters),
) -> Vec<AlarmChange> {
    let mut changes = Vec::new();
    for second in seconds {
        let (samples, service) = story(second);
        changes.extend(watch.read(
            second * SECOND,
            traffic,
            audience,
            &service,
            &samples,
            &ReuseCounts::default(),
        ));
    }
    changes
}

#[test]
fn a_newcomer_that_gets_nothing_raises_one_alarm_and_recovery_clears_it() {
    let mut watch = Watch::default();
    let starved = |s: u64| {
        let mut samples = vec![sample(1, 50 * s, 0), sample(2, 50 * s, 0)];
        if s >= 10 {
            samples.push(sample(3, 0, 0));
        }
        (samples, service(100 * s, 100 * s, 0))
    };
    let changes = tell(&mut watch, 1..20, starved);
    assert_eq!(changes.len(), 1, "{changes:?}");
    let alarm = &changes[0].alarm;
    assert!(changes[0].raised && alarm.backend == 3 && alarm.kind == Kind::New);
    assert_eq!(alarm.born_ns, Some(10 * SECOND));
    assert!(
        alarm.since_birth && alarm.seen == 0 && alarm.raised_ns <= 14 * SECOND,
        "{alarm:?}"
    );
    watch.explain(
        3,
        Verdict {
            cause: Cause::PortReuse,
            because: vec![],
        },
    );
    let healed = |s: u64| {
        let samples = [1, 2, 3].map(|id| {
            sample(
                id,
                if id == 3 {
                    40 * (s - 19)
                } else {
                    50 * 20 + 40 * (s - 19)
                },
                0,
            )
        });
        (
            samples.to_vec(),
            service(2_000 + 120 * (s - 19), 2_000 + 120 * (s - 19), 0),
        )
    };
    let changes = tell(&mut watch, 20..60, healed);
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert!(!changes[0].raised);
    assert_eq!(
        changes[0].alarm.verdict.cause,
        Cause::PortReuse,
        "it ends as it was explained"
    );
    assert_eq!(watch.alarms().count(), 0);
}

#[test]
fn nobody_is_judged_while_many_connections_are_not_told() {
    let mut watch = Watch::default();
    let hidden = |s: u64| {
        let samples = vec![sample(1, 50 * s, 0), sample(2, 50 * s, 0), sample(3, 0, 0)];
        (samples, service(150 * s, 100 * s, 0))
    };
    assert_eq!(tell(&mut watch, 1..120, hidden), []);
    assert!(watch.told_share().is_some_and(|share| share < 0.7));
    // The negative control: the same counts with all connections told.
    let mut watch = Watch::default();
    let told = |s: u64| {
        let samples = vec![sample(1, 50 * s, 0), sample(2, 50 * s, 0), sample(3, 0, 0)];
        (samples, service(100 * s, 100 * s, 0))
    };
    assert_eq!(tell(&mut watch, 1..120, told).len(), 1);
}

#[test]
fn what_was_not_told_may_be_the_whole_share_of_one_endpoint() {
    // Ten endpoints; 5 % of the connections are not told, half a fair share: the one that seems to get nothing may have them.
    let story = |untold: u64| {
        move |s: u64| {
            let samples: Vec<Sample> = (1..=10)
                .map(|id| sample(id, if id == 10 { 0 } else { 20 * s }, 0))
                .collect();
            (samples, service(180 * s + untold * s, 180 * s, 0))
        }
    };
    let mut watch = Watch::default();
    assert_eq!(tell(&mut watch, 1..60, story(10)), []);
    assert!(watch.told_share().is_some_and(|share| share > MIN_ATTRIBUTED));
    let mut watch = Watch::default();
    assert_eq!(
        tell(&mut watch, 1..60, story(1)).len(),
        1,
        "with half a percent not told it is certain"
    );
}

#[test]
fn who_comes_again_is_counted_from_then_on() {
    let mut watch = Watch::default();
    let story = |s: u64| {
        let mut samples = vec![sample(1, 10 * s, 0)];
        if !(5..=8).contains(&s) {
            samples.push(sample(2, 1_000 + 10 * s, 0));
        }
        (samples, service(20 * s, 20 * s, 0))
    };
    tell(&mut watch, 1..12, story);
    assert_eq!(watch.counts(2), (20, 0));
}

#[test]
fn behind_a_userspace_proxy_direct_dials_tell() {
    let mut watch = Watch::default();
    let relayed = |s: u64| {
        let samples = vec![sample(1, 0, 50 * s), sample(2, 0, 50 * s), sample(3, 0, 0)];
        (samples, service(100 * s, 0, 100 * s))
    };
    // Probes that dial endpoints look the same: unless a relaying process is known they say nothing.
    let mut probed = Watch::default();
    assert_eq!(tell(&mut probed, 1..60, relayed), []);
    assert_eq!(probed.basis(), Basis::default());
    let changes = tell_of(&mut watch, Traffic::Relayed, 1..60, relayed);
    assert_eq!(watch.basis(), Basis::Direct);
    assert_eq!(
        changes
            .iter()
            .filter(|change| change.raised)
            .map(|c| c.alarm.backend)
            .collect::<Vec<_>>(),
        [3]
    );
}

#[test]
fn since_start_leaves_out_what_was_before_and_who_came_later() {
    let mut watch = Watch::default();
    let story = |s: u64| {
        let mut samples = vec![sample(1, 1_000 + 10 * s, 0), sample(2, 10 * s, 0)];
        if s > 5 {
            samples.push(sample(3, 10 * (s - 5), 0));
        }
        (samples, service(1_000 + 30 * s, 1_000 + 30 * s, 0))
    };
    tell(&mut watch, 1..12, story);
    let evenness = watch.since_start();
    assert_eq!((evenness.n, evenness.backends), (200, 2));
    assert_eq!(evenness.dispersion, Some(0.0));
    assert_eq!(watch.counts(3), (60, 0));
}

/// A second of a Service under externalTrafficPolicy Local: three endpoints for the node's own sockets, of which one is here and
/// has all connections from outside.
fn external_local(second: u64) -> (Vec<Sample>, ServiceCounters) {
    let samples = [1, 2, 3].map(|id| {
        let outside = Tally {
            connects: if id == 1 { 200 * second } else { 0 },
            established: if id == 1 { 200 * second } else { 0 },
            ..Tally::default()
        };
        let counters = BackendCounters {
            inside: Tally {
                connects: 10 * second,
                established: 10 * second,
                closed: 10 * second,
                ..Tally::default()
            },
            outside,
            ..BackendCounters::default()
        };
        Sample {
            backend: id,
            weight: 1,
            counters,
        }
    });
    (samples.to_vec(), service(230 * second, 230 * second, 0))
}

#[test]
fn connections_from_outside_that_go_to_local_endpoints_alone_starve_nobody() {
    let mut watch = Watch::default();
    let changes = tell_to(&mut watch, Traffic::Balanced, Audience::INSIDE, 1..180, external_local);
    assert_eq!(changes, []);
    let evenness = watch.imbalance();
    assert!(
        !evenness.alarm && !evenness.insufficient && evenness.n > 1_000,
        "{evenness:?}"
    );
    assert!(!watch.open().alarm);
    // The negative control: judged by all connections the others would starve, of new ones and of open ones.
    let mut blind = Watch::default();
    let changes = tell_to(&mut blind, Traffic::Balanced, Audience::ALL, 1..180, external_local);
    let starved: Vec<u32> = changes
        .iter()
        .filter(|change| change.raised)
        .map(|c| c.alarm.backend)
        .collect();
    assert_eq!(starved, [2, 3]);
    assert!(blind.imbalance().alarm && blind.open().alarm);
}

#[test]
fn a_local_endpoint_that_outside_clients_never_meet_is_found() {
    let mut watch = Watch::default();
    let story = |second: u64| {
        let (mut samples, service) = external_local(second);
        samples.truncate(2);
        (samples, service)
    };
    let changes = tell_to(&mut watch, Traffic::Balanced, Audience::OUTSIDE, 1..60, story);
    let starved: Vec<u32> = changes
        .iter()
        .filter(|change| change.raised)
        .map(|c| c.alarm.backend)
        .collect();
    assert_eq!(
        starved,
        [2],
        "it is among the Local set's members and gets nothing from outside"
    );
}

#[test]
fn sets_that_cannot_be_told_apart_raise_no_alarm() {
    let mixed = Audience {
        mixed: true,
        ..Audience::ALL
    };
    let mut watch = Watch::default();
    assert_eq!(tell_to(&mut watch, Traffic::Balanced, mixed, 1..60, external_local), []);
    assert!(!watch.is_told() && watch.imbalance().insufficient && watch.open().insufficient);
    assert!(watch.has_traffic());
    // As soon as they can be told apart they are judged, from then on.
    tell_to(&mut watch, Traffic::Balanced, Audience::INSIDE, 60..180, external_local);
    assert!(watch.is_told() && !watch.imbalance().insufficient);
    assert_eq!(watch.alarms().count(), 0);
}

#[test]
fn an_alarm_ends_when_the_set_is_for_other_clients() {
    let mut watch = Watch::default();
    tell_to(&mut watch, Traffic::Balanced, Audience::ALL, 1..60, external_local);
    assert_eq!(watch.alarms().count(), 2);
    let idle = external_local(60).0;
    assert!(
        !watch.is_idle(60 * SECOND, Audience::INSIDE, &idle),
        "the policy has changed"
    );
    let changes = tell_to(&mut watch, Traffic::Balanced, Audience::INSIDE, 60..120, external_local);
    assert_eq!(changes.iter().filter(|change| change.raised).count(), 0);
    assert_eq!((changes.len(), watch.alarms().count()), (2, 0));
}

#[test]
fn local_endpoints_that_come_and_go_do_not_keep_the_judge_from_judging() {
    let mut watch = Watch::default();
    let starving = |second: u64| {
        let (mut samples, service) = external_local(second);
        samples[2].counters.inside.connects = 0;
        (samples, service)
    };
    // Every ten seconds the Local set has all members, or lacks some again.
    let mut raised = Vec::new();
    for second in 1..120 {
        let audience = if second / 10 % 2 == 0 {
            Audience::INSIDE
        } else {
            Audience::ALL
        };
        let changes = tell_to(&mut watch, Traffic::Balanced, audience, second..second + 1, starving);
        raised.extend(changes.iter().map(|change| (change.alarm.backend, change.raised)));
    }
    assert_eq!(raised, [(3, true)], "found once, and never given up");
    // Once it has been for all of them for long (since the last change, at 110), it is judged by all of them.
    let wider = Basis::Frontends(Audience::ALL);
    tell_to(&mut watch, Traffic::Balanced, Audience::ALL, 120..410, starving);
    assert_ne!(watch.basis, wider);
    tell_to(&mut watch, Traffic::Balanced, Audience::ALL, 410..411, starving);
    assert_eq!(watch.basis, wider);
}

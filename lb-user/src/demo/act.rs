//! From the client's records to an act's numbers. Pure.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::outcome::{Act, Latency, NewBackends, RemovedBackend, Window};
use crate::lab::client::{Attempt, Failure};

/// What happened in an act beside the client's work.
#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    /// The backends while nothing changed: those that evenness is judged over.
    pub(super) members: Vec<SocketAddr>,
    /// Where the part that evenness is judged over begins and ends; `None`: with the act.
    pub(super) even: (Option<Instant>, Option<Instant>),
    /// Backends that joined.
    pub(super) added: Option<(Change, Added)>,
    /// The backend that left.
    pub(super) removed: Option<(Change, SocketAddr)>,
}

/// Backends that joined, and all there were from then on.
#[derive(Clone, Debug)]
pub(super) struct Added {
    pub(super) new: Vec<SocketAddr>,
    pub(super) all: Vec<SocketAddr>,
}

/// When a change was made and when the balancer said that it was in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) made: Instant,
    pub(super) reported: Instant,
}

impl Change {
    /// When backends that joined were ready: by report, or by the first connection to one of them, whichever was first.
    ///
    /// A report comes a poll later than the truth, and connections in between would be left out of sight: a flood onto a
    /// new backend in its first moments above all. The connection that proves readiness counts; one in hundreds.
    pub(super) fn ready(&self, new: &[SocketAddr], attempts: &[Attempt]) -> (Instant, &'static str) {
        let met = attempts
            .iter()
            .find(|a| a.started >= self.made && a.outcome.is_ok_and(|backend| new.contains(&backend)))
            .map(|a| a.started);
        match met {
            Some(met) if met < self.reported => (met, "connection"),
            _ => (self.reported, "report"),
        }
    }
}

/// Computes an act's numbers from the records, which are in the order of their beginning.
pub(super) fn evaluate(name: &'static str, attempts: &[Attempt], script: &Script) -> Act {
    let even = window(attempts, &script.members, script.even.0, script.even.1);
    let imbalance = even.imbalance();
    let mut failures = BTreeMap::new();
    let mut per_backend: BTreeMap<_, u64> = script.members.iter().map(|&b| (b, 0)).collect();
    for attempt in attempts {
        match attempt.outcome {
            Ok(backend) => *per_backend.entry(backend).or_default() += 1,
            Err(failure) => *failures.entry(failure.to_string()).or_default() += 1,
        }
    }
    let new_backends = script
        .added
        .as_ref()
        .map(|(change, added)| new_backends(attempts, *change, added));
    Act {
        name,
        connections: attempts.len() as u64,
        failed: failures.values().sum(),
        failures,
        per_backend,
        max_over_mean: imbalance.max_over_mean,
        dispersion: imbalance.dispersion,
        even,
        new_backend_share_of_fair: new_backends.as_ref().map(|n| n.1.clone()).unwrap_or_default(),
        new_backends: new_backends.map(|n| n.0),
        removed_backend: script.removed.map(|(change, backend)| RemovedBackend {
            backend,
            programmed_ms: millis(change.reported.saturating_duration_since(change.made)),
            connections_after: attempts
                .iter()
                .filter(|a| a.started >= change.reported && a.outcome == Ok(backend))
                .count() as u64,
            failed_open: attempts
                .iter()
                .filter(|a| matches!(a.outcome, Err(Failure::Answer(_))))
                .count() as u64,
        }),
        restart_ms: None,
        connect_us: latency(attempts),
        reuse: None,
    }
}

fn new_backends(attempts: &[Attempt], change: Change, added: &Added) -> (NewBackends, BTreeMap<SocketAddr, f64>) {
    let (ready, ready_by) = change.ready(&added.new, attempts);
    let split = ready + Duration::from_secs(1);
    let first_second = window(attempts, &added.all, Some(ready), Some(split));
    let after = window(attempts, &added.all, Some(split), None);
    let whole = window(attempts, &added.all, Some(ready), None);
    let shares = |w: &Window| -> BTreeMap<_, _> {
        added
            .new
            .iter()
            .filter_map(|&backend| Some((backend, w.share_of_fair(backend)?)))
            .collect()
    };
    let found = NewBackends {
        ready_ms: millis(ready.saturating_duration_since(change.made)),
        ready_by,
        first_second_share_of_fair: shares(&first_second),
        after_share_of_fair: shares(&after),
        first_second,
        after,
    };
    (found, shares(&whole))
}

/// Counts the answered attempts that began in a span, with a zero for members that got none.
pub(super) fn window(
    attempts: &[Attempt],
    members: &[SocketAddr],
    from: Option<Instant>,
    until: Option<Instant>,
) -> Window {
    let mut per_backend: BTreeMap<_, u64> = members.iter().map(|&b| (b, 0)).collect();
    let inside = |a: &&Attempt| from.is_none_or(|t| a.started >= t) && until.is_none_or(|t| a.started < t);
    for backend in attempts.iter().filter(inside).filter_map(|a| a.outcome.ok()) {
        // One that is no member and answers all the same makes the window uneven, as it should.
        *per_backend.entry(backend).or_default() += 1;
    }
    Window {
        connections: per_backend.values().sum(),
        per_backend,
    }
}

fn latency(attempts: &[Attempt]) -> Latency {
    let mut took: Vec<_> = attempts.iter().filter(|a| a.outcome.is_ok()).map(|a| a.took).collect();
    took.sort_unstable();
    let quantile = |q: f64| {
        let index = (took.len() as f64 * q) as usize;
        let found = took.get(index.min(took.len().saturating_sub(1)));
        found.map_or(0.0, |took| (took.as_secs_f64() * 1e7).round() / 10.0)
    };
    Latency {
        p50: quantile(0.5),
        p99: quantile(0.99),
    }
}

pub(super) fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    fn backend(n: u8) -> SocketAddr {
        super::super::stage::backend(n)
    }

    /// Attempts a millisecond apart, from the backends that `choose` names.
    fn attempts(begin: Instant, count: u64, choose: impl Fn(u64) -> Result<SocketAddr, Failure>) -> Vec<Attempt> {
        (0..count)
            .map(|n| Attempt {
                started: begin + Duration::from_millis(n),
                took: Duration::from_micros(n + 1),
                outcome: choose(n),
            })
            .collect()
    }

    /// The second backend's share of fair, in whole percent.
    fn percent(shares: &BTreeMap<SocketAddr, f64>) -> i64 {
        (shares[&backend(2)] * 100.0).round() as i64
    }

    #[test]
    fn a_steady_act_counts_all() {
        let records = attempts(Instant::now(), 300, |n| Ok(backend((n % 3) as u8 + 1)));
        let script = Script {
            members: vec![backend(1), backend(2), backend(3)],
            ..Script::default()
        };
        let act = evaluate("steady", &records, &script);
        assert_eq!((act.connections, act.failed, act.max_over_mean), (300, 0, Some(1.0)));
        assert_eq!(act.connect_us, Latency { p50: 151.0, p99: 298.0 });
    }

    #[test]
    fn the_first_connection_makes_ready_when_the_report_is_later() {
        let begin = Instant::now();
        let made = begin + Duration::from_secs(1);
        // Backend 2 is met from 1,100 ms on, each other time.
        let records = attempts(begin, 4_000, |n| {
            Ok(backend(if n >= 1_100 && n % 2 == 0 { 2 } else { 1 }))
        });
        let added = Added {
            new: vec![backend(2)],
            all: vec![backend(1), backend(2)],
        };
        let change = |reported_ms| Change {
            made,
            reported: begin + Duration::from_millis(reported_ms),
        };
        let run = |change| {
            let script = Script {
                members: added.all.clone(),
                added: Some((change, added.clone())),
                ..Script::default()
            };
            evaluate("scale_out", &records, &script)
                .new_backends
                .expect("new backends")
        };
        let late = run(change(1_500));
        assert_eq!((late.ready_by, late.ready_ms), ("connection", 100.0));
        assert_eq!(late.first_second.connections, 1_000);
        assert_eq!(percent(&late.first_second_share_of_fair), 100);
        let early = run(change(1_050));
        assert_eq!((early.ready_by, early.ready_ms), ("report", 50.0));
        assert_eq!(percent(&early.first_second_share_of_fair), 95);
        assert_eq!(percent(&early.after_share_of_fair), 100);
    }

    #[test]
    fn a_flood_before_the_report_is_not_hidden() {
        let begin = Instant::now();
        let records = attempts(begin, 3_000, |n| {
            Ok(backend(if (1_000..1_200).contains(&n) {
                2
            } else {
                (n % 2) as u8 + 1
            }))
        });
        let change = Change {
            made: begin + Duration::from_secs(1),
            reported: begin + Duration::from_millis(1_200),
        };
        let added = Added {
            new: vec![backend(2)],
            all: vec![backend(1), backend(2)],
        };
        let script = Script {
            members: added.all.clone(),
            added: Some((change, added)),
            ..Script::default()
        };
        let new = evaluate("scale_out", &records, &script)
            .new_backends
            .expect("new backends");
        assert_eq!(percent(&new.first_second_share_of_fair), 120);
    }

    #[test]
    fn only_connections_that_were_open_are_excused() {
        let begin = Instant::now();
        let records = attempts(begin, 100, |n| match n {
            10 => Err(Failure::Answer(Errno::ECONNRESET)),
            20 | 30 => Err(Failure::Connect(Errno::ECONNREFUSED)),
            n if n < 50 => Ok(backend(2)),
            80 => Ok(backend(2)),
            _ => Ok(backend(1)),
        });
        let change = Change {
            made: begin + Duration::from_millis(40),
            reported: begin + Duration::from_millis(60),
        };
        let script = Script {
            members: vec![backend(1)],
            even: (Some(change.reported), None),
            removed: Some((change, backend(2))),
            ..Script::default()
        };
        let act = evaluate("backend_removed", &records, &script);
        let removed = act.removed_backend.expect("a removed backend");
        assert_eq!((act.failed, removed.failed_open, removed.connections_after), (3, 1, 1));
        assert_eq!(removed.programmed_ms.to_string(), "20");
    }
}

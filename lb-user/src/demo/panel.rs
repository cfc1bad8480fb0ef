//! What a picture shows of each act: bars and facts, Evenkeel's beside the reference's. Pure.

use std::{collections::BTreeSet, net::SocketAddr};

use super::outcome::{Act, Outcome, Reuse, Window};
use crate::draw::thousands;

/// One act in both arms.
#[derive(Debug)]
pub(super) struct Panel {
    /// What happens in it.
    pub(super) title: &'static str,
    /// Which connections the bars count.
    pub(super) counted: &'static str,
    /// True if the reference took part.
    pub(super) compared: bool,
    /// A bar a backend.
    pub(super) bars: Vec<Bar>,
    /// Facts, a line each.
    pub(super) facts: Vec<Fact>,
}

/// The share of one backend: Evenkeel's, the reference's.
#[derive(Debug)]
pub(super) struct Bar {
    pub(super) backend: SocketAddr,
    /// True for a backend that joined during the act.
    pub(super) is_new: bool,
    pub(super) shares: [Option<f64>; 2],
}

/// One fact: Evenkeel's, the reference's.
#[derive(Debug)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) values: [String; 2],
}

/// The panels of an outcome, in the order of its acts.
pub(super) fn panels(outcome: &Outcome) -> Vec<Panel> {
    outcome
        .acts
        .iter()
        .map(|act| {
            let other = outcome.reference.acts.iter().find(|other| other.name == act.name);
            panel(act, other)
        })
        .collect()
}

fn panel(act: &Act, other: Option<&Act>) -> Panel {
    let (title, counted) = match act.name {
        "steady" => ("Steady: 3 backends", "all connections"),
        "scale_out" => (
            "Scale-out: 3 → 6 backends while connecting",
            "from when the new ones were ready",
        ),
        "backend_removed" => (
            "One of 6 backends removed while connecting",
            "from when the removal was in force",
        ),
        "agent_killed" => (
            "Agent killed (SIGKILL) and started again",
            "until the new backend joined",
        ),
        _ => ("UDP: request and answer on new sockets", "all requests"),
    };
    let arms = [Some(act), other];
    let windows = arms.map(|arm| arm.map(shown));
    let new: BTreeSet<_> = act.new_backend_share_of_fair.keys().copied().collect();
    let members: BTreeSet<_> = windows
        .iter()
        .flatten()
        .flat_map(|w| w.per_backend.keys().copied())
        .collect();
    let bars = members
        .into_iter()
        .map(|backend| Bar {
            backend,
            is_new: new.contains(&backend),
            shares: windows.each_ref().map(|w| w.as_ref().and_then(|w| share(w, backend))),
        })
        .collect();
    let mut facts = Vec::new();
    let mut fact = |name, tell: &dyn Fn(&Act) -> Option<String>| {
        let values = arms.map(|arm| arm.and_then(tell));
        if values.iter().any(Option::is_some) {
            facts.push(Fact {
                name,
                values: values.map(Option::unwrap_or_default),
            });
        }
    };
    fact("max/mean", &|a| a.max_over_mean.map(|x| format!("{x:.3}")));
    fact("dispersion", &|a| {
        a.dispersion
            .map(|x| format!("{x:.2} (n = {})", thousands(a.even.connections)))
    });
    fact("new, first s", &|a| {
        let new = a.new_backends.as_ref()?;
        of_fair(new.first_second_share_of_fair.values(), new.first_second.connections)
    });
    fact("new, later", &|a| {
        let new = a.new_backends.as_ref()?;
        of_fair(new.after_share_of_fair.values(), new.after.connections)
    });
    fact("ready", &|a| {
        let new = a.new_backends.as_ref()?;
        Some(format!("{:.1} ms after the change", new.ready_ms))
    });
    fact("in force", &|a| {
        let gone = a.removed_backend.as_ref()?;
        Some(format!("{:.1} ms after the change", gone.programmed_ms))
    });
    fact("to it since", &|a| {
        let gone = a.removed_backend.as_ref()?;
        Some(format!("{} connections", thousands(gone.connections_after)))
    });
    fact("agent ready", &|a| {
        a.restart_ms.map(|ms| format!("{ms:.0} ms after its start"))
    });
    fact("failed", &|a| {
        Some(format!("{} of {}", thousands(a.failed), thousands(a.connections)))
    });
    fact("connect", &|a| {
        Some(format!(
            "p50 {:.0} µs, p99 {:.0} µs",
            a.connect_us.p50, a.connect_us.p99
        ))
    });
    fact("tuple reuse", &|a| a.reuse.as_ref().map(reuse_in_short));
    Panel {
        title,
        counted,
        compared: other.is_some(),
        bars,
        facts,
    }
}

/// The part of an act whose shares are drawn.
fn shown(act: &Act) -> Window {
    match &act.new_backends {
        Some(new) if act.name == "scale_out" => {
            let mut whole = new.first_second.clone();
            whole.connections += new.after.connections;
            for (&backend, &count) in &new.after.per_backend {
                *whole.per_backend.entry(backend).or_default() += count;
            }
            whole
        }
        _ => act.even.clone(),
    }
}

fn share(window: &Window, backend: SocketAddr) -> Option<f64> {
    let own = *window.per_backend.get(&backend)?;
    (window.connections > 0).then(|| own as f64 / window.connections as f64)
}

fn of_fair<'a>(shares: impl Iterator<Item = &'a f64> + Clone, n: u64) -> Option<String> {
    let least = shares.clone().copied().reduce(f64::min)? * 100.0;
    let most = shares.copied().reduce(f64::max)? * 100.0;
    let n = thousands(n);
    Some(if format!("{least:.0}") == format!("{most:.0}") {
        format!("{least:.0} % of fair (n = {n})")
    } else {
        format!("{least:.0} to {most:.0} % of fair (n = {n})")
    })
}

fn reuse_in_short(reuse: &Reuse) -> String {
    match same_share(reuse) {
        Some(share) => format!("{}, {share:.1} % same backend", thousands(reuse.total)),
        None => thousands(reuse.total),
    }
}

/// The percentage of reuses that met the same backend, of those that could.
pub(super) fn same_share(reuse: &Reuse) -> Option<f64> {
    let comparable = reuse.same_backend + reuse.moved;
    (comparable > 0).then(|| reuse.same_backend as f64 * 100.0 / comparable as f64)
}

/// The labels and counts of the reuse histogram, without empty buckets at its ends.
pub(super) fn intervals(reuse: &Reuse) -> Vec<(String, u64)> {
    let mut last = None;
    let mut rows = Vec::new();
    for bucket in &reuse.histogram {
        let label = match bucket.le {
            Some(edge) => format!("≤ {edge} s"),
            None => last.map_or_else(|| "any".to_owned(), |edge| format!("> {edge} s")),
        };
        last = bucket.le.or(last);
        rows.push((label, bucket.count));
    }
    let end = rows.iter().rposition(|row| row.1 > 0).map_or(0, |last| last + 1);
    rows.truncate(end);
    let start = rows.iter().position(|row| row.1 > 0).unwrap_or(0);
    rows.split_off(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::ReuseBucket;

    #[test]
    fn empty_ends_of_the_histogram_are_left_out() {
        let bucket = |le, count| ReuseBucket { le, count };
        let reuse = Reuse {
            histogram: vec![
                bucket(Some(0.1), 0),
                bucket(Some(1.0), 3),
                bucket(Some(2.0), 0),
                bucket(None, 1),
            ],
            ..Reuse::default()
        };
        let rows = [("≤ 1 s", 3), ("≤ 2 s", 0), ("> 2 s", 1)].map(|(label, n)| (label.to_owned(), n));
        assert_eq!(intervals(&reuse), rows);
        assert_eq!(intervals(&Reuse::default()), []);
    }
}

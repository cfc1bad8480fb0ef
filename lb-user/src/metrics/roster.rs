//! Which Services have series of their own.
//!
//! A Service gets series with its first traffic and keeps them until 60 s after it has gone. Beyond the cap the further ones
//! are added up as `~other`. Nobody changes sides while it lives, and what the gone ones of `~other` had counted stays in its
//! sums: so no counter ever falls, which `rate()` would take for a restart.

use std::collections::HashMap;

use super::{
    families::CONNECT_EDGES,
    snapshot::{Buckets, ServiceSample},
};
use crate::view::{BackendCountsView, Timestamp};

/// How long series outlive their object.
const LINGER_MILLIS: i64 = 60_000;
/// The namespace and name of what is added up.
const OTHER: &str = "~other";

#[derive(Debug)]
struct Known {
    sample: ServiceSample,
    own_series: bool,
    seen: Timestamp,
}

/// The Services with traffic, and what was added up of those that have gone.
#[derive(Debug)]
pub(super) struct Roster {
    cap: usize,
    known: HashMap<(String, String), Known>,
    gone: ServiceSample,
    other_existed: bool,
}

impl Roster {
    pub(super) fn new(cap: usize) -> Self {
        Self {
            cap,
            known: HashMap::new(),
            gone: nothing(),
            other_existed: false,
        }
    }

    /// Takes the Services of now and gives those to export: sorted by name, `~other` last if there ever was one.
    pub(super) fn settle(&mut self, now: Timestamp, services: Vec<ServiceSample>) -> Vec<ServiceSample> {
        let mut fresh = Vec::new();
        for sample in services {
            let key = (sample.namespace.clone(), sample.name.clone());
            match self.known.get_mut(&key) {
                Some(known) => {
                    known.sample = sample;
                    known.seen = now;
                }
                None if sample.has_traffic() => fresh.push((key, sample)),
                None => {}
            }
        }
        self.forget(now);
        // The busiest get the room that is left; names break ties, so that a restart decides alike.
        fresh.sort_by(|a, b| b.1.connects.cmp(&a.1.connects).then_with(|| a.0.cmp(&b.0)));
        let taken = self.known.values().filter(|known| known.own_series).count();
        for (index, (key, sample)) in fresh.into_iter().enumerate() {
            let own_series = taken + index < self.cap;
            self.other_existed |= !own_series;
            let seen = now;
            self.known.insert(
                key,
                Known {
                    sample,
                    own_series,
                    seen,
                },
            );
        }
        self.export()
    }

    /// Lets go of what has been gone for long enough, and quiets the gauges of what has just gone.
    fn forget(&mut self, now: Timestamp) {
        let gone = &mut self.gone;
        self.known.retain(|_, known| {
            if known.seen == now {
                return true;
            }
            known.sample.active = 0;
            known.sample.backends = BackendCountsView::default();
            known.sample.imbalance = None;
            known.sample.open_imbalance = None;
            known.sample.starved = [0; _];
            known.sample.ports_used = 0.0;
            for backend in &mut known.sample.by_backend {
                backend.active = 0;
            }
            let keep = now.unix_millis() - known.seen.unix_millis() <= LINGER_MILLIS;
            if !keep && !known.own_series {
                add(gone, &known.sample);
            }
            keep
        });
    }

    fn export(&self) -> Vec<ServiceSample> {
        let mut own: Vec<ServiceSample> = Vec::new();
        let mut other = self.gone.clone();
        for known in self.known.values() {
            if known.own_series {
                own.push(known.sample.clone());
            } else {
                add(&mut other, &known.sample);
            }
        }
        own.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        if self.other_existed {
            own.push(other);
        }
        own
    }
}

fn nothing() -> ServiceSample {
    ServiceSample {
        namespace: OTHER.to_owned(),
        name: OTHER.to_owned(),
        connects: 0,
        outside: 0,
        attributed: 0,
        direct: 0,
        failed: [0; _],
        latency: Buckets::new(CONNECT_EDGES),
        active: 0,
        backends: BackendCountsView::default(),
        imbalance: None,
        open_imbalance: None,
        starved: [0; _],
        ports_used: 0.0,
        reuse: [0; _],
        by_backend: Vec::new(),
    }
}

/// Adds what can be added; evenness and single backends cannot.
fn add(sum: &mut ServiceSample, sample: &ServiceSample) {
    sum.connects += sample.connects;
    sum.outside += sample.outside;
    sum.attributed += sample.attributed;
    sum.direct += sample.direct;
    for (own, other) in sum.failed.iter_mut().zip(sample.failed) {
        *own += other;
    }
    for (own, other) in sum.starved.iter_mut().zip(sample.starved) {
        *own += other;
    }
    for (own, other) in sum.reuse.iter_mut().zip(sample.reuse) {
        *own += other;
    }
    sum.ports_used = sum.ports_used.max(sample.ports_used);
    sum.latency.add(&sample.latency);
    sum.active += sample.active;
    sum.backends.active += sample.backends.active;
    sum.backends.draining += sample.backends.draining;
    sum.backends.ejected += sample.backends.ejected;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, connects: u64) -> ServiceSample {
        ServiceSample {
            namespace: "shop".into(),
            name: name.into(),
            connects,
            active: 3,
            starved: [0, 1, 0, 0, 0, 0, 0],
            ..nothing()
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_millis(seconds * 1_000)
    }

    fn told(samples: &[ServiceSample]) -> Vec<(&str, u64)> {
        samples
            .iter()
            .map(|sample| (sample.name.as_str(), sample.connects))
            .collect()
    }

    #[test]
    fn only_services_with_traffic_have_series() {
        let mut roster = Roster::new(10);
        let mut idle = service("idle", 0);
        idle.active = 0;
        let found = roster.settle(at(1), vec![service("web", 5), idle.clone()]);
        assert_eq!(told(&found), [("web", 5)]);
        idle.failed[0] = 1;
        let found = roster.settle(at(2), vec![service("web", 6), idle]);
        assert_eq!(told(&found), [("idle", 0), ("web", 6)]);
    }

    #[test]
    fn series_go_a_minute_after_their_object() {
        let mut roster = Roster::new(10);
        roster.settle(at(1), vec![service("web", 5)]);
        let lingering = roster.settle(at(30), vec![]);
        assert_eq!((told(&lingering), lingering[0].active), (vec![("web", 5)], 0));
        assert_eq!(lingering[0].starved, [0; _], "what is gone does not starve");
        assert_eq!(told(&roster.settle(at(61), vec![])), [("web", 5)]);
        assert!(roster.settle(at(62), vec![]).is_empty());
    }

    #[test]
    fn beyond_the_cap_the_rest_is_added_up_and_never_falls() {
        let mut roster = Roster::new(2);
        let found = roster.settle(
            at(1),
            vec![service("a", 1), service("b", 30), service("c", 20), service("d", 2)],
        );
        assert_eq!(told(&found), [("b", 30), ("c", 20), (OTHER, 3)]);
        // One of those with own series goes: there is room again, but nobody changes sides.
        let mut last = 0;
        for second in [2, 40, 80, 140, 200] {
            let found = roster.settle(at(second), vec![service("a", 100), service("c", 20)]);
            let other = found
                .iter()
                .find(|sample| sample.name == OTHER)
                .map_or(0, |sample| sample.connects);
            assert!(other >= last, "{other} after {last}");
            last = other;
        }
        assert_eq!(last, 102);
        let found = roster.settle(at(201), vec![service("a", 100), service("c", 20), service("e", 7)]);
        assert_eq!(told(&found), [("c", 20), ("e", 7), (OTHER, 102)]);
    }
}

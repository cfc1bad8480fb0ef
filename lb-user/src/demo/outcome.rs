//! What the demo found: the shape of its JSON, and the promises that it is held to.
//!
//! Pure; the numbers are made in `act`.

use std::{collections::BTreeMap, net::SocketAddr};

use serde::Serialize;

use crate::analysis::imbalance::{Imbalance, by_weight};

/// Most that a backend may have over the mean in the steady act.
pub(super) const STEADY_MAX_OVER_MEAN: f64 = 1.02;
/// Least and most of its fair share that a new backend may get.
pub(super) const NEW_BACKEND_SHARE: (f64, f64) = (0.90, 1.10);

/// The demo's outcome, as `--json` writes it.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The kernel's release.
    pub kernel: String,
    /// How long the acts took.
    pub seconds: f64,
    /// Source ports of the client.
    pub source_ports: u16,
    /// The acts with the agent, in the order in which they were played.
    pub acts: Vec<Act>,
    /// Tuple reuse over all acts, as the agent counted it.
    pub reuse: Reuse,
    /// The same client against other rules.
    pub reference: Reference,
}

/// The reference arm.
#[derive(Clone, Debug, Serialize)]
pub struct Reference {
    /// What it is.
    pub kind: &'static str,
    /// What it is, in words.
    pub label: &'static str,
    /// Its acts; empty if it could not be played.
    pub acts: Vec<Act>,
    /// Why it could not be played.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

impl Reference {
    pub(super) fn played(acts: Vec<Act>) -> Self {
        Self {
            kind: "nftables",
            label: "nftables rules as kube-proxy writes them, run here",
            acts,
            missing: None,
        }
    }

    pub(super) fn missing(why: String) -> Self {
        Self {
            missing: Some(why),
            ..Self::played(Vec::new())
        }
    }
}

/// One act.
#[derive(Clone, Debug, Serialize)]
pub struct Act {
    /// `steady`, `scale_out`, `backend_removed`, `agent_killed` or `udp`.
    pub name: &'static str,
    /// Attempts to connect (UDP: requests on sockets of their own).
    pub connections: u64,
    /// Attempts that failed.
    pub failed: u64,
    /// Failures by what the application saw.
    pub failures: BTreeMap<String, u64>,
    /// Connections by the backend that answered.
    pub per_backend: BTreeMap<SocketAddr, u64>,
    /// The largest share over the mean share, in the part of the act that [`Self::even`] describes.
    pub max_over_mean: Option<f64>,
    /// X²/(k−1) of the same part: 1 is what chance alone gives.
    pub dispersion: Option<f64>,
    /// The part of the act in which the backends were the same all the time.
    pub even: Window,
    /// Each new backend's connections over its fair share, from when it was ready to the end.
    pub new_backend_share_of_fair: BTreeMap<SocketAddr, f64>,
    /// The same for the first second after they were ready, and after that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_backends: Option<NewBackends>,
    /// The same for a backend that left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed_backend: Option<RemovedBackend>,
    /// From starting the killed agent again until it was ready, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_ms: Option<f64>,
    /// How long `connect()` took (UDP: a request with its answer), in microseconds.
    pub connect_us: Latency,
    /// Tuple reuse within this act, as the agent counted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse: Option<Reuse>,
}

/// A part of an act.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Window {
    /// Connections in it that a backend answered.
    pub connections: u64,
    /// Those by backend; every usable backend is named.
    pub per_backend: BTreeMap<SocketAddr, u64>,
}

impl Window {
    /// A backend's connections over what an equal share would be.
    pub(super) fn share_of_fair(&self, backend: SocketAddr) -> Option<f64> {
        let fair = self.connections as f64 / self.per_backend.len() as f64;
        let own = *self.per_backend.get(&backend)?;
        (fair > 0.0).then(|| own as f64 / fair)
    }

    /// How even it is, against equal shares.
    pub(super) fn imbalance(&self) -> Imbalance {
        by_weight(self.per_backend.values().map(|&count| (1, count)))
    }
}

/// How backends that joined were taken up.
#[derive(Clone, Debug, Serialize)]
pub struct NewBackends {
    /// From the change of the manifests (or rules) until they were ready, in milliseconds.
    pub ready_ms: f64,
    /// `report` if the balancer said so first, `connection` if a connection met one of them first.
    pub ready_by: &'static str,
    /// The first second after they were ready.
    pub first_second: Window,
    /// All that came later.
    pub after: Window,
    /// Shares of fair in the first second.
    pub first_second_share_of_fair: BTreeMap<SocketAddr, f64>,
    /// Shares of fair later.
    pub after_share_of_fair: BTreeMap<SocketAddr, f64>,
}

/// How a backend that left was let go.
#[derive(Clone, Debug, Serialize)]
pub struct RemovedBackend {
    /// Which one.
    pub backend: SocketAddr,
    /// From the change of the manifests (or rules) until the balancer said that it was in force, in milliseconds.
    pub programmed_ms: f64,
    /// Connections that began after that and met it all the same.
    pub connections_after: u64,
    /// Failures of connections that had been made before it went; the others would break a promise.
    pub failed_open: u64,
}

/// Quantiles of the successful attempts, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
}

/// Counts of tuple reuse.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Reuse {
    /// New connections on a client tuple that had been used before.
    pub total: u64,
    /// Those that met the same backend as before.
    pub same_backend: u64,
    /// Those that met another one.
    pub moved: u64,
    /// Those whose earlier backend was no longer usable.
    pub stale_backend: u64,
    /// New connections on a tuple whose earlier use was still open; not part of the total.
    pub overlap: u64,
    /// Intervals between the uses.
    pub histogram: Vec<ReuseBucket>,
}

/// Reuses whose interval was at most `le` and more than the bucket before.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReuseBucket {
    /// Upper edge in seconds; the last bucket has none.
    pub le: Option<f64>,
    /// Reuses in this bucket alone.
    pub count: u64,
}

impl Reuse {
    /// Both counts together.
    pub(super) fn plus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    /// What was counted since `earlier`.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        self.combine(earlier, u64::saturating_sub)
    }

    fn combine(&self, other: &Self, with: impl Fn(u64, u64) -> u64) -> Self {
        let longer = if self.histogram.len() >= other.histogram.len() {
            self
        } else {
            other
        };
        let count = |reuse: &Self, n: usize| reuse.histogram.get(n).map_or(0, |bucket| bucket.count);
        Self {
            total: with(self.total, other.total),
            same_backend: with(self.same_backend, other.same_backend),
            moved: with(self.moved, other.moved),
            stale_backend: with(self.stale_backend, other.stale_backend),
            overlap: with(self.overlap, other.overlap),
            histogram: longer
                .histogram
                .iter()
                .enumerate()
                .map(|(n, bucket)| ReuseBucket {
                    le: bucket.le,
                    count: with(count(self, n), count(other, n)),
                })
                .collect(),
        }
    }
}

impl Outcome {
    /// The promises that were not kept, a sentence each; the reference has promised nothing.
    pub fn broken_promises(&self) -> Vec<String> {
        let mut broken: Vec<_> = self.acts.iter().flat_map(Act::broken_promises).collect();
        if self.reuse.total == 0 {
            broken.push(format!(
                "No reuse of a client tuple was counted, with {} source ports for thousands of connections.",
                self.source_ports
            ));
        }
        broken
    }
}

impl Act {
    fn broken_promises(&self) -> Vec<String> {
        let mut broken = Vec::new();
        // Whoever was connected to a backend that goes away may notice; nobody else may.
        let excused = self.removed_backend.as_ref().map_or(0, |removed| removed.failed_open);
        let failed = self.failed.saturating_sub(excused);
        if failed > 0 {
            let list: Vec<_> = self.failures.iter().map(|(what, n)| format!("{n} × {what}")).collect();
            broken.push(format!(
                "{}: {failed} of {} connections failed ({}).",
                self.name,
                self.connections,
                list.join("; ")
            ));
        }
        if self.name == "steady" {
            match self.max_over_mean {
                Some(ratio) if ratio <= STEADY_MAX_OVER_MEAN => {}
                Some(ratio) => broken.push(format!(
                    "steady: max/mean is {ratio:.3} with {} connections; promised is {STEADY_MAX_OVER_MEAN}.",
                    self.even.connections
                )),
                None => broken.push("steady: no connection was made.".to_owned()),
            }
        }
        if let Some(new) = &self.new_backends {
            let spans = [
                (
                    "in the first second after it was ready",
                    &new.first_second_share_of_fair,
                ),
                ("after its first second", &new.after_share_of_fair),
            ];
            for (when, shares) in spans {
                for (backend, share) in shares {
                    if !(NEW_BACKEND_SHARE.0..=NEW_BACKEND_SHARE.1).contains(share) {
                        broken.push(format!(
                            "{}: new backend {backend} got {:.0} % of its fair share {when}; promised is {:.0} to {:.0} %.",
                            self.name,
                            share * 100.0,
                            NEW_BACKEND_SHARE.0 * 100.0,
                            NEW_BACKEND_SHARE.1 * 100.0
                        ));
                    }
                }
                if shares.is_empty() {
                    broken.push(format!("{}: no connection was made {when}.", self.name));
                }
            }
        }
        if let Some(removed) = &self.removed_backend
            && removed.connections_after > 0
        {
            broken.push(format!(
                "{}: {} connections went to {} after its removal was in force.",
                self.name, removed.connections_after, removed.backend
            ));
        }
        broken
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn window(counts: &[u64]) -> Window {
        let per_backend = counts
            .iter()
            .zip(1..)
            .map(|(&n, host)| (SocketAddr::from(([10, 244, 1, host], 8080)), n))
            .collect();
        Window {
            connections: counts.iter().sum(),
            per_backend,
        }
    }

    /// An outcome with every part filled, for the pictures.
    pub(in crate::demo) fn example() -> Outcome {
        let act = |name, counts: &[u64]| {
            let even = window(counts);
            Act {
                name,
                connections: even.connections,
                failed: 0,
                failures: BTreeMap::new(),
                per_backend: even.per_backend.clone(),
                max_over_mean: even.imbalance().max_over_mean,
                dispersion: even.imbalance().dispersion,
                even,
                new_backend_share_of_fair: BTreeMap::new(),
                new_backends: None,
                removed_backend: None,
                restart_ms: None,
                connect_us: Latency { p50: 31.0, p99: 92.5 },
                reuse: None,
            }
        };
        let scaled = |counts: &[u64], first: &[u64]| {
            let (after, first_second) = (window(counts), window(first));
            let new: Vec<_> = after.per_backend.keys().skip(3).copied().collect();
            let shares = |w: &Window| new.iter().filter_map(|&b| Some((b, w.share_of_fair(b)?))).collect();
            Act {
                new_backend_share_of_fair: shares(&after),
                new_backends: Some(NewBackends {
                    ready_ms: 12.4,
                    ready_by: "connection",
                    first_second_share_of_fair: shares(&first_second),
                    after_share_of_fair: shares(&after),
                    first_second,
                    after,
                }),
                ..act("scale_out", counts)
            }
        };
        let removed = |counts: &[u64], after| Act {
            removed_backend: Some(RemovedBackend {
                backend: SocketAddr::from(([10, 244, 1, 2], 8080)),
                programmed_ms: 8.1,
                connections_after: after,
                failed_open: 0,
            }),
            ..act("backend_removed", counts)
        };
        let reuse = Reuse {
            total: 41_234,
            same_backend: 9_104,
            moved: 31_900,
            stale_backend: 230,
            overlap: 0,
            histogram: vec![
                ReuseBucket {
                    le: Some(0.1),
                    count: 39_000,
                },
                ReuseBucket {
                    le: Some(1.0),
                    count: 2_200,
                },
                ReuseBucket {
                    le: Some(10.0),
                    count: 34,
                },
                ReuseBucket { le: None, count: 0 },
            ],
        };
        Outcome {
            kernel: "6.12.0".to_owned(),
            seconds: 29.6,
            source_ports: 200,
            acts: vec![
                Act {
                    reuse: Some(reuse.clone()),
                    ..act("steady", &[2_000, 2_001, 1_999])
                },
                scaled(
                    &[2_000, 2_010, 1_990, 2_000, 2_000, 2_000],
                    &[830, 835, 832, 833, 834, 836],
                ),
                removed(&[2_400, 2_400, 2_401, 2_399, 2_400], 0),
                Act {
                    restart_ms: Some(140.0),
                    ..act("agent_killed", &[2_400, 2_400, 2_401, 2_399, 2_400])
                },
                act("udp", &[333, 333, 334, 333, 333, 334]),
            ],
            reuse,
            reference: Reference::played(vec![
                act("steady", &[2_060, 1_990, 1_950]),
                scaled(
                    &[2_040, 1_970, 1_990, 2_080, 1_930, 1_990],
                    &[800, 870, 832, 850, 810, 838],
                ),
                removed(&[2_450, 2_350, 2_401, 2_399, 2_400], 3),
            ]),
        }
    }

    #[test]
    fn a_good_outcome_keeps_every_promise() {
        assert_eq!(example().broken_promises(), Vec::<String>::new());
    }

    #[test]
    fn each_broken_promise_is_named() {
        let mut outcome = example();
        let [steady, scale_out, removed, killed, _udp] = &mut outcome.acts[..] else {
            panic!("five acts")
        };
        steady.max_over_mean = Some(1.031);
        let new = scale_out.new_backends.as_mut().expect("new backends");
        *new.first_second_share_of_fair.values_mut().next().expect("one") = 0.4;
        *new.after_share_of_fair.values_mut().last().expect("one") = 1.3;
        removed.failed = 3;
        let gone = removed.removed_backend.as_mut().expect("a removed backend");
        gone.failed_open = 2;
        gone.connections_after = 1;
        killed.failed = 1;
        killed.failures.insert("connect: refused".to_owned(), 1);
        outcome.reuse = Reuse::default();
        insta::assert_snapshot!(outcome.broken_promises().join("\n"));
    }

    #[test]
    fn counts_are_added_and_taken_bucket_by_bucket() {
        let all = example().reuse;
        assert_eq!(all.plus(&all).since(&all), all);
        assert_eq!(Reuse::default().plus(&all), all);
        assert_eq!(all.since(&Reuse::default()), all);
    }

    #[test]
    fn the_json_has_the_agreed_shape() {
        insta::assert_snapshot!(serde_json::to_string_pretty(&example()).expect("JSON"));
    }
}

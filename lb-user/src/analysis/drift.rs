//! How evenly the *open* connections are spread, and which backend is short of them because connections live long.
//!
//! This is the second of the two views that are never mixed: `starvation` and `window` look at new connections, this at open
//! ones. Open counts are uneven after every scale-out and every restart; mostly that heals by itself, as connections end
//! and new ones are dialled. Where clients keep theirs for hours it does not, and no proxy can help: that is `long_lived`.
//!
//! With k eligible backends whose open counts are known, e a backend's share of them by weight and o what it has, it is
//! long-lived drift if all of these hold:
//!
//! 1. *It has far too few, beyond chance:* e ≥ ln(1000 k), o < e/4 and P(Poisson(e) ≤ o) < 1e-3/k. These are the birth clock's
//!    bounds: below that expectation even a zero proves nothing.
//! 2. *New connections do not pass it by:* over the last ten minutes at most, it got a fair part of the new ones or there were
//!    hardly any. Otherwise it starves, which the other view reports and explains; open connections then only follow.
//! 3. *It will stay so:* at the present rate of new connections it would need more than five minutes to come to e/2, even if
//!    none of them ended meanwhile. The rate is an upper bound: so high that as few as were counted would come with the
//!    probability 1e-3/k (with none counted over T seconds that is ln(1000 k)/T, a rule of three at this significance). Thus few
//!    seconds without a connection prove nothing, and a fair ramp-up stays silent: a backend's fill time is half the mean
//!    life of its connections, so that lives below ten minutes do not get here.
//!
//! It is cleared at o ≥ e/2, when e falls below one connection, or when 2 no longer holds. Memory: some twenty counts a backend.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use super::{
    imbalance::{self, Imbalance},
    poisson,
    starvation::{BIRTH_P, GRACE_NS, MemberReading, Transition},
};

/// A backend that comes to half its share sooner than this, in seconds, is left to heal by itself.
pub const SLOW_SECONDS: f64 = 300.0;
/// How far back the rate of new connections looks, in nanoseconds.
pub const HORIZON_NS: u64 = 600_000_000_000;
/// The grain in which it forgets.
const BUCKET_NS: u64 = 30_000_000_000;

/// What is known of a backend's open connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriftStatus {
    /// Too few open connections to say anything.
    Unknown,
    /// It has its part of them, or is on its way there, or the cause is not that they live long.
    Fair,
    /// It has far too few of them and will for long, because the others' do not end.
    LongLived,
}

/// The verdict on one backend's open connections, with its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriftJudgement {
    /// The backend's id.
    pub backend: u32,
    /// The verdict.
    pub status: DriftStatus,
    /// Connections open on it.
    pub open: u64,
    /// Connections that its weight entitles it to, of all that are open.
    pub fair: f64,
    /// P(Poisson(fair) ≤ open).
    pub probability: f64,
    /// New connections that it got over the time looked at.
    pub new_observed: u64,
    /// New connections that its weight entitled it to over that time.
    pub new_expected: f64,
    /// The time looked at, in seconds: ten minutes at most.
    pub new_seconds: f64,
    /// The highest rate of new connections a second that those counted still allow.
    pub rate_at_most: f64,
    /// Seconds to half its fair share at that rate, at least; 0 when it has that.
    pub seconds_to_half: f64,
    /// When the verdict was raised; none while it is not.
    pub since_ns: Option<u64>,
}

/// A verdict on open connections that changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriftChange {
    /// What happened.
    pub transition: Transition,
    /// When: the reading's time.
    pub at_ns: u64,
    /// The judgement at that time.
    pub judgement: DriftJudgement,
}

/// Watches the open connections of one backend set.
#[derive(Clone, Debug, Default)]
pub struct Drift {
    last_read_ns: Option<u64>,
    backends: BTreeMap<u32, Backend>,
    /// All open connections, and the weight of all that may have them.
    open: u64,
    weights: f64,
}

/// New connections of one stretch of time.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    end_ns: u64,
    span_ns: u64,
    observed: u64,
    expected: f64,
}

impl Bucket {
    fn add(&mut self, other: &Self) {
        self.end_ns = other.end_ns;
        self.span_ns += other.span_ns;
        self.observed = self.observed.saturating_add(other.observed);
        self.expected += other.expected;
    }
}

#[derive(Clone, Debug)]
struct Backend {
    weight: u32,
    usable_since_ns: u64,
    started: u64,
    open: u64,
    buckets: VecDeque<Bucket>,
    since_ns: Option<u64>,
}

impl Drift {
    /// Makes a view that has seen nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a reading of all members at `now_ns`, and returns the verdicts that it changed.
    ///
    /// Members of weight 0 and those whose open connections are not known take no part.
    pub fn read(&mut self, now_ns: u64, members: &[MemberReading]) -> Vec<DriftChange> {
        let readings: BTreeMap<u32, (&MemberReading, u64)> = (members.iter().rev())
            .filter(|member| member.weight > 0)
            .filter_map(|member| Some((member.backend, (member, member.open?))))
            .collect();
        let mut changes = self.drop_gone(now_ns, &readings);
        self.open = readings
            .values()
            .fold(0, |sum: u64, &(_, open)| sum.saturating_add(open));
        self.weights = readings.values().map(|(member, _)| f64::from(member.weight)).sum();
        self.count_new(now_ns, &readings);
        self.last_read_ns = Some(now_ns);
        let bound = BIRTH_P / self.backends.len().max(1) as f64;
        let mut changed = Vec::new();
        for (&id, backend) in &mut self.backends {
            let fair = self.open as f64 * f64::from(backend.weight) / self.weights;
            let raised = backend.since_ns.is_some();
            let holds = if raised {
                backend.persists(fair, bound)
            } else {
                backend.is_long_lived(fair, bound)
            };
            if holds != raised {
                backend.since_ns = holds.then_some(now_ns);
                changed.push((
                    id,
                    if holds {
                        Transition::Raised
                    } else {
                        Transition::Recovered
                    },
                ));
            }
        }
        for (id, transition) in changed {
            changes.extend(self.judgement(id).map(|judgement| DriftChange {
                transition,
                at_ns: now_ns,
                judgement,
            }));
        }
        changes
    }

    /// How even the open connections are, by weight, beside what chance alone would give.
    pub fn imbalance(&self) -> Imbalance {
        imbalance::by_weight(self.backends.values().map(|backend| (backend.weight, backend.open)))
    }

    /// The verdict on each backend, by id.
    pub fn judgements(&self) -> Vec<DriftJudgement> {
        self.backends.keys().filter_map(|&id| self.judgement(id)).collect()
    }

    /// The verdict on one backend; none when it is not eligible or its open connections are not known.
    pub fn judgement(&self, id: u32) -> Option<DriftJudgement> {
        let backend = self.backends.get(&id)?;
        let bound = BIRTH_P / self.backends.len().max(1) as f64;
        let fair = self.open as f64 * f64::from(backend.weight) / self.weights;
        let new = backend.recent();
        let seconds = new.span_ns as f64 / 1e9;
        let rate_at_most = poisson::upper_bound(new.observed, bound) / seconds;
        let missing = fair / 2.0 - backend.open as f64;
        Some(DriftJudgement {
            backend: id,
            status: match backend.since_ns {
                Some(_) => DriftStatus::LongLived,
                None if fair < -bound.ln() => DriftStatus::Unknown,
                None => DriftStatus::Fair,
            },
            open: backend.open,
            fair,
            probability: poisson::at_most(backend.open, fair),
            new_observed: new.observed,
            new_expected: new.expected,
            new_seconds: seconds,
            rate_at_most,
            seconds_to_half: if missing > 0.0 { missing / rate_at_most } else { 0.0 },
            since_ns: backend.since_ns,
        })
    }

    /// Drops what is no longer in the reading, or is another endpoint under the same id.
    fn drop_gone(&mut self, now_ns: u64, readings: &BTreeMap<u32, (&MemberReading, u64)>) -> Vec<DriftChange> {
        let gone: Vec<u32> = (self.backends.iter())
            .filter(|&(id, backend)| {
                readings.get(id).is_none_or(|(member, _)| {
                    backend.usable_since_ns != 0 && member.usable_since_ns > backend.usable_since_ns
                })
            })
            .map(|(&id, _)| id)
            .collect();
        let changes = (gone.iter())
            .filter_map(|&id| self.judgement(id))
            .filter(|judgement| judgement.since_ns.is_some())
            .map(|judgement| DriftChange {
                transition: Transition::Gone,
                at_ns: now_ns,
                judgement,
            })
            .collect();
        for id in gone {
            self.backends.remove(&id);
        }
        changes
    }

    /// Counts the interval's new connections, for the backends for which it says something.
    fn count_new(&mut self, now_ns: u64, readings: &BTreeMap<u32, (&MemberReading, u64)>) {
        let last_ns = self.last_read_ns.unwrap_or(now_ns);
        let mut parts = Vec::with_capacity(readings.len());
        for (&id, &(member, open)) in readings {
            let backend = self.backends.entry(id).or_insert_with(|| Backend {
                weight: member.weight,
                usable_since_ns: member.usable_since_ns,
                started: member.started,
                open,
                buckets: VecDeque::new(),
                since_ns: None,
            });
            // As in the other view: a counter that went back or a weight that changed makes the interval say nothing.
            let started = member.started.checked_sub(backend.started);
            let counts = backend.weight == member.weight
                && backend.usable_since_ns.saturating_add(GRACE_NS) <= last_ns
                && last_ns < now_ns;
            if let Some(started) = started.filter(|_| counts) {
                parts.push((id, started));
            }
            backend.started = member.started;
            backend.weight = member.weight;
            backend.usable_since_ns = backend.usable_since_ns.max(member.usable_since_ns);
            backend.open = open;
        }
        let weight_of = |backends: &BTreeMap<u32, Backend>, id| backends.get(&id).map_or(0.0, |b| f64::from(b.weight));
        let total: f64 = parts.iter().map(|&(_, started)| started as f64).sum();
        let weights: f64 = parts.iter().map(|&(id, _)| weight_of(&self.backends, id)).sum();
        for (id, observed) in parts {
            let expected = total * weight_of(&self.backends, id) / weights;
            if let Some(backend) = self.backends.get_mut(&id) {
                backend.count(&Bucket {
                    end_ns: now_ns,
                    span_ns: now_ns - last_ns,
                    observed,
                    expected,
                });
            }
        }
    }
}

impl Backend {
    fn count(&mut self, interval: &Bucket) {
        match self.buckets.back_mut() {
            Some(last) if last.span_ns < BUCKET_NS => last.add(interval),
            _ => self.buckets.push_back(*interval),
        }
        let oldest = interval.end_ns.saturating_sub(HORIZON_NS);
        while self.buckets.front().is_some_and(|bucket| bucket.end_ns <= oldest) {
            self.buckets.pop_front();
        }
    }

    /// New connections over the time looked at.
    fn recent(&self) -> Bucket {
        let mut sum = Bucket::default();
        for bucket in &self.buckets {
            sum.add(bucket);
        }
        sum
    }

    /// Far too few open ones, beyond chance, though the new ones do not pass it by, and for long.
    fn is_long_lived(&self, fair: f64, bound: f64) -> bool {
        let open = self.open as f64;
        if fair < -bound.ln() || open >= fair / 4.0 || poisson::at_most(self.open, fair) >= bound {
            return false;
        }
        let new = self.recent();
        // The rate that fills half the share in time is refuted by so few new connections: the upper bound lies below it.
        let needed = (fair / 2.0 - open) / SLOW_SECONDS;
        let seconds = new.span_ns as f64 / 1e9;
        !passed_by(&new, bound) && poisson::at_most(new.observed, needed * seconds) < bound
    }

    /// What keeps the verdict once it is raised.
    fn persists(&self, fair: f64, bound: f64) -> bool {
        fair >= 1.0 && (self.open as f64) < fair / 2.0 && !passed_by(&self.recent(), bound)
    }
}

/// Whether new connections pass a backend by, beyond chance: then it starves.
fn passed_by(new: &Bucket, bound: f64) -> bool {
    new.expected >= -bound.ln()
        && (new.observed as f64) < new.expected / 4.0
        && poisson::at_most(new.observed, new.expected) < bound
}

//! Which endpoint gets far fewer new connections than its weight entitles it to: beyond chance, and by how much.
//!
//! Here live the two clocks of the verdict "starved"; why an endpoint starves is `cause`, and connections that stay open are
//! `drift`. One [`Detector`] watches one backend set and is fed the totals of its members about once a second.
//!
//! What a member should have got, λ, is its weight's part of the new connections that were counted, interval by interval. An
//! interval counts for a member that was eligible with one weight at both of its ends and whose clock had started by then;
//! so λ stays right while a set is scaled. With k eligible members:
//!
//! - *Birth* starts two seconds after the member became usable and counts on from there. Nothing is said while λ < ln(1000 k).
//!   Starved if P(Poisson(λ) ≤ o) < 1e-3/k and o < λ/4; over at the first o ≥ λ/2. The count is looked at again and again, and
//!   every look is a chance to be wrong; so after the first one, which finds every share of zero, the bound is 1e-4/k.
//! - *Running*, from then on, works in windows one after the other. One closes when λ ≥ 15 + ln k *and* a share of zero would
//!   be proof. Starved if P < p/k and o < λ/4, cleared by a window with o ≥ λ/2, as before in between. Here p is 3e-7, or
//!   less for windows of less than half a minute: as much as spends 1 false alarm in 1,000 service-days evenly over time,
//!   however many windows a day has. (See the decision on the clocks in `docs/adr`.)
//!
//! Three things that the two definitions leave open are decided here. A member that was there at the detector's first reading
//! is on the running clock at once, for its birth was not seen. The birth clock ends only once it may judge, λ ≥ ln(1000 k):
//! otherwise the first connection of a trickle would end it. And while the birth clock says starved, windows run beside it, and
//! one with o ≥ λ/2 clears the verdict too: else a member that starved for an hour would need another hour to be cleared.
//!
//! Memory: one record of fixed size a member. Time and counts come in as arguments.

mod member;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use super::poisson;
use member::Member;

/// From usable to the start of the birth clock, in nanoseconds: time for every node and client to hear of the endpoint.
pub const GRACE_NS: u64 = 2_000_000_000;
/// The birth clock's bound on the probability of chance at its first look, over all members of a set.
pub const BIRTH_P: f64 = 1e-3;
/// The same at every later look: all of them together cost little more than the first one alone.
pub const BIRTH_LATER_P: f64 = 1e-4;
/// The running clock's bound on the probability of chance in one window, over all members of a set.
pub const RUNNING_P: f64 = 3e-7;
/// What the running clock may spend on false alarms: this many a service and day.
pub const RUNNING_BUDGET_PER_DAY: f64 = 1e-3;
/// A running window expects at least this plus ln k.
pub const RUNNING_EXPECTED: f64 = 15.0;

/// One member of a backend set at one reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberReading {
    /// The backend's id.
    pub backend: u32,
    /// Its weight; 0 is not eligible.
    pub weight: u32,
    /// When it became usable and programmed, in nanoseconds of the readings' clock; 0 where that is not known.
    pub usable_since_ns: u64,
    /// New connections attributed to it since its counter began.
    pub started: u64,
    /// Connections open on it now; none where that is not known.
    pub open: Option<u64>,
}

/// Which of the two clocks judges a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Cumulative since it became usable.
    Birth,
    /// Window by window.
    Running,
}

/// What is known of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Too few connections were expected to say anything.
    Unknown,
    /// No evidence that it starves.
    Fair,
    /// It gets less than a quarter of its share, and not by chance.
    Starved,
}

/// The verdict on one member, with the numbers that decided it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// The backend's id.
    pub backend: u32,
    /// The clock that judged.
    pub clock: Clock,
    /// The verdict.
    pub status: Status,
    /// λ: new connections that it should have got by weight in the window that decided; while unknown, so far.
    pub expected: f64,
    /// New connections that it got in that window.
    pub observed: u64,
    /// P(Poisson(λ) ≤ observed): how often chance alone gives so few.
    pub probability: f64,
    /// When that window began, in nanoseconds of the readings' clock.
    pub window_start_ns: u64,
    /// When it ended.
    pub window_end_ns: u64,
    /// When the window began that raised the verdict "starved"; none while it is not.
    pub starved_since_ns: Option<u64>,
}

/// Why a verdict changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The member starves from now on.
    Raised,
    /// It got at least half its share over a window.
    Recovered,
    /// It is not eligible any more, or another endpoint took its place.
    Gone,
}

/// A verdict that changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// What happened.
    pub transition: Transition,
    /// When: the reading's time.
    pub at_ns: u64,
    /// The judgement that raised or cleared it; the last one of a member that has gone.
    pub judgement: Judgement,
}

/// Watches the members of one backend set.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    last_read_ns: Option<u64>,
    /// Eligible members by id.
    members: Vec<Member>,
    /// The last reading's eligible members by id; kept for its room alone.
    sorted: Vec<MemberReading>,
}

impl Detector {
    /// Makes a detector that has seen nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a reading of all members at `now_ns`, and returns the verdicts that it changed.
    ///
    /// Members of weight 0 are not eligible. Of several readings of one backend the first counts.
    pub fn read(&mut self, now_ns: u64, members: &[MemberReading]) -> Vec<Change> {
        let mut changes = Vec::new();
        self.sorted.clear();
        self.sorted
            .extend(members.iter().filter(|member| member.weight > 0).copied());
        // Mostly they come in order; to see that is cheaper than to sort.
        if !self.sorted.is_sorted_by(|a, b| a.backend < b.backend) {
            self.sorted.sort_by_key(|member| member.backend);
            self.sorted.dedup_by_key(|member| member.backend);
        }
        self.meet(now_ns, &mut changes);
        let last_ns = self.last_read_ns.unwrap_or(now_ns);
        let (mut total, mut weights) = (0_u64, 0.0);
        for (member, reading) in self.members.iter_mut().zip(&self.sorted) {
            if let Some(started) = member.take(reading, last_ns) {
                total = total.saturating_add(started);
                weights += f64::from(member.weight());
            }
        }
        // An idle interval adds nothing to λ, but it may be the one after which a window has lasted long enough.
        let each = if weights > 0.0 { total as f64 / weights } else { 0.0 };
        let bounds = Bounds::of(self.members.len());
        for member in &mut self.members {
            if let Some(transition) = member.judge(each, last_ns, now_ns, bounds) {
                changes.push(Change {
                    transition,
                    at_ns: now_ns,
                    judgement: member.judgement(now_ns),
                });
            }
        }
        self.last_read_ns = Some(now_ns);
        changes
    }

    /// The verdict on each eligible member, by id.
    pub fn judgements(&self) -> Vec<Judgement> {
        let now_ns = self.last_read_ns.unwrap_or(0);
        self.members.iter().map(|member| member.judgement(now_ns)).collect()
    }

    /// The verdict on one member; none when it is not eligible.
    pub fn judgement(&self, backend: u32) -> Option<Judgement> {
        let at = self.members.binary_search_by_key(&backend, Member::backend).ok()?;
        let now_ns = self.last_read_ns.unwrap_or(0);
        self.members.get(at).map(|member| member.judgement(now_ns))
    }

    /// Members that starve now.
    pub fn starved(&self) -> usize {
        self.members.iter().filter(|member| member.is_starved()).count()
    }

    /// Lets members go that are not in the reading, and takes in those that are new, so that both lists go side by side.
    fn meet(&mut self, now_ns: u64, changes: &mut Vec<Change>) {
        let same = self.members.len() == self.sorted.len()
            && (self.members.iter().zip(&self.sorted)).all(|(member, reading)| member.is(reading));
        if same {
            return;
        }
        let last_read_ns = self.last_read_ns;
        let mut gone = |member: Member| {
            if member.is_starved() {
                changes.push(Change {
                    transition: Transition::Gone,
                    at_ns: now_ns,
                    judgement: member.judgement(now_ns),
                });
            }
        };
        let mut met = Vec::with_capacity(self.sorted.len());
        let mut old = std::mem::take(&mut self.members).into_iter().peekable();
        for reading in &self.sorted {
            let mut kept = None;
            while let Some(member) = old.next_if(|member| member.backend() <= reading.backend) {
                match member.backend().cmp(&reading.backend) {
                    Ordering::Equal if member.is(reading) => kept = Some(member),
                    _ => gone(member),
                }
            }
            met.push(kept.unwrap_or_else(|| Member::new(reading, last_read_ns, now_ns)));
        }
        old.for_each(gone);
        self.members = met;
    }
}

/// The bounds that depend on the number of eligible members alone.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    k: f64,
    ln_k: f64,
}

impl Bounds {
    fn of(members: usize) -> Self {
        let k = members.max(1) as f64;
        Self { k, ln_k: k.ln() }
    }

    /// The bound on the probability of one running window of so many nanoseconds, over all members.
    fn running_p(span_ns: u64) -> f64 {
        const DAY_NS: f64 = 86_400e9;
        (RUNNING_BUDGET_PER_DAY * span_ns as f64 / DAY_NS).min(RUNNING_P)
    }

    /// The bound that a window holds its probability against, once it may close: when a share of zero would meet it.
    fn closing_p(self, window: Tally, now_ns: u64) -> Option<f64> {
        if window.expected < RUNNING_EXPECTED + self.ln_k {
            return None;
        }
        let p = Self::running_p(now_ns.saturating_sub(window.start_ns)) / self.k;
        // Strictly, as the verdict is; a bound of 0 has −∞ here and never closes.
        (-window.expected < p.ln()).then_some(p)
    }
}

/// Connections that were expected and that came, since a time.
#[derive(Clone, Copy, Debug)]
struct Tally {
    start_ns: u64,
    expected: f64,
    observed: u64,
}

impl Tally {
    fn starting(start_ns: u64) -> Self {
        Self {
            start_ns,
            expected: 0.0,
            observed: 0,
        }
    }

    fn add(&mut self, expected: f64, observed: u64) {
        self.expected += expected;
        self.observed = self.observed.saturating_add(observed);
    }

    /// Half the share or more: what ends the birth clock and clears a verdict.
    fn is_healthy(&self) -> bool {
        self.observed as f64 >= self.expected / 2.0
    }

    /// Less than a quarter of the share, and rarer by chance than `p`.
    fn is_starved(&self, p: f64) -> bool {
        (self.observed as f64) < self.expected / 4.0 && self.probability() < p
    }

    fn probability(&self) -> f64 {
        poisson::at_most(self.observed, self.expected)
    }
}

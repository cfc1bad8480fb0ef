//! How soon a share of zero is found.

use anyhow::{Context, Result};
use lb_user::analysis::starvation::{
    BIRTH_P, Clock, Detector, GRACE_NS, MemberReading, RUNNING_BUDGET_PER_DAY, RUNNING_EXPECTED, RUNNING_P, Transition,
};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use rand_distr::{Distribution as _, Poisson};

const SECOND_NS: u64 = 1_000_000_000;
/// Longer than any window here; what is not found by then is a fault.
const DEADLINE_SECONDS: u32 = 20_000;

/// What the runs of one size and rate gave.
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    /// Runs.
    pub runs: u32,
    /// Connections that the endpoint should have got until it was found, on average: counted at birth since its clock's start,
    /// while running since it stopped getting any.
    pub expected: f64,
    /// The largest of them.
    pub most: f64,
    /// Seconds until it was found, on average.
    pub seconds: f64,
    /// Runs that took longer than is promised.
    pub late: u32,
}

/// The promise at birth: ln(1000 k) + 2, or the connections of one reading where they are more.
pub fn birth_bound(k: u32, rate: f64) -> f64 {
    let each = rate / f64::from(k);
    f64::from(k).ln() - BIRTH_P.ln() + (each + 6.0 * each.sqrt()).max(2.0)
}

/// The λ of one running window at this rate, with the connections of its last reading.
pub fn window(k: u32, rate: f64) -> f64 {
    let each = rate / f64::from(k);
    let size = f64::from(k);
    let least = RUNNING_EXPECTED + size.ln();
    let p = (RUNNING_BUDGET_PER_DAY * (least / each).max(1.0) / 86_400.0).min(RUNNING_P);
    least.max((size / p).ln()) + each
}

struct Members {
    dice: SmallRng,
    arrivals: Poisson<f64>,
    readings: Vec<MemberReading>,
    detector: Detector,
    second: u32,
}

impl Members {
    fn new(seed: u64, k: u32, rate: f64) -> Result<Self> {
        let readings = (1..=k).map(|backend| MemberReading {
            backend,
            weight: 1,
            usable_since_ns: SECOND_NS,
            started: 0,
            open: None,
        });
        let mut members = Self {
            dice: SmallRng::seed_from_u64(seed),
            arrivals: Poisson::new(rate)?,
            readings: readings.collect(),
            detector: Detector::new(),
            second: 100,
        };
        members.detector.read(100 * SECOND_NS, &members.readings);
        Ok(members)
    }

    fn now_ns(&self) -> u64 {
        u64::from(self.second) * SECOND_NS
    }

    /// One second in which only the first `served` get anything, by a fair choice; gives how many came, and any alarm.
    fn second(&mut self, served: usize) -> (f64, Option<lb_user::analysis::starvation::Change>) {
        self.second += 1;
        let total = self.arrivals.sample(&mut self.dice);
        for _ in 0..total as u64 {
            let at = self.dice.random_range(0..served);
            self.readings[at].started += 1;
        }
        let raised = (self.detector.read(self.now_ns(), &self.readings).into_iter())
            .find(|change| change.transition == Transition::Raised);
        (total, raised)
    }
}

impl Found {
    fn add(&mut self, expected: f64, seconds: u32, late: bool) {
        let before = f64::from(self.runs);
        self.runs += 1;
        let mean = |old: f64, new: f64| (old * before + new) / (before + 1.0);
        self.expected = mean(self.expected, expected);
        self.seconds = mean(self.seconds, f64::from(seconds));
        self.most = self.most.max(expected);
        self.late += u32::from(late);
    }
}

/// An endpoint is born as the last of `k`, and gets nothing.
pub fn birth(k: u32, rate: f64, runs: u32) -> Result<Found> {
    let mut found = Found::default();
    for run in 0..runs {
        let mut members = Members::new(u64::from(run), k - 1, rate)?;
        members.second(k as usize - 1);
        members.readings.push(MemberReading {
            backend: k,
            weight: 1,
            usable_since_ns: members.now_ns(),
            started: 0,
            open: None,
        });
        let born = members.second;
        let raised = (0..DEADLINE_SECONDS)
            .find_map(|_| members.second(k as usize - 1).1)
            .context("a zero share was never found")?;
        anyhow::ensure!(
            raised.judgement.backend == k && raised.judgement.clock == Clock::Birth,
            "another one was found: {raised:?}"
        );
        let grace = (GRACE_NS / SECOND_NS) as u32;
        let late = raised.judgement.expected > birth_bound(k, rate);
        found.add(raised.judgement.expected, members.second - born - grace, late);
    }
    Ok(found)
}

/// One of `k` that ran for a while gets nothing any more.
pub fn running(k: u32, rate: f64, runs: u32) -> Result<Found> {
    let mut found = Found::default();
    for run in 0..runs {
        let mut members = Members::new(u64::from(run), k, rate)?;
        // Into a window, anywhere.
        let window_seconds = (window(k, rate) * f64::from(k) / rate).ceil() as u32;
        for _ in 0..run % (2 * window_seconds) {
            members.second(k as usize);
        }
        let from = members.second;
        let mut expected = 0.0;
        let raised = (0..DEADLINE_SECONDS)
            .find_map(|_| {
                let (total, raised) = members.second(k as usize - 1);
                expected += total / f64::from(k);
                raised
            })
            .context("a zero share was never found")?;
        anyhow::ensure!(
            raised.judgement.backend == k && raised.judgement.clock == Clock::Running,
            "another one was found: {raised:?}"
        );
        // The window that was open when it began may pass; the first whole one must not.
        let each = rate / f64::from(k);
        let late = expected > 2.0 * window(k, rate) + 6.0 * each.sqrt();
        found.add(expected, members.second - from, late);
    }
    Ok(found)
}

//! A day of a fair service, and the alarms that it raises.

use std::{cmp::Ordering, sync::OnceLock};

use anyhow::Result;
use lb_user::analysis::{
    drift::Drift,
    poisson,
    starvation::{Clock, Detector, MemberReading, RUNNING_EXPECTED, RUNNING_P, Transition},
};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use rand_distr::{Binomial, Distribution as _, Poisson, weighted::WeightedAliasIndex};

use super::exact::{self, Rule};

/// Seconds of a day.
pub const DAY_SECONDS: u32 = 86_400;

const SECOND_NS: u64 = 1_000_000_000;
const SIZES: (u32, u32) = (2, 100);
const RATES: (f64, f64) = (1.0, 1000.0);
const LIVES: (f64, f64) = (0.1, 600.0);
const SCALE_EVENTS: f64 = 4.0;
/// Seconds within which every proxy has heard of a new endpoint.
const HEARD_SECONDS: u32 = 2;
/// Open connections are read this often at most: what is drawn anew each time is slow, and their verdict is about minutes.
const DRIFT_SECONDS: u32 = 30;

/// False alarms, and what they are held against.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Alarms {
    /// Of the birth clock.
    pub birth: u64,
    /// Of the running clock.
    pub running: u64,
    /// Of the view of open connections.
    pub drift: u64,
    /// Of running windows that close at 15 + ln k and are held against 3e-7/k however short they are.
    pub unbudgeted: u64,
    /// Of "less than half the mean in a minute", counted once a minute and service.
    pub naive: u64,
    /// Minutes with a connection.
    pub minutes: u64,
    /// Endpoints born.
    pub births: u64,
    /// False alarms of the birth clock that exact arithmetic expects of them.
    pub births_expected: f64,
    /// The same if every later look were held against the bound of the first.
    pub births_expected_unbudgeted: f64,
}

impl Alarms {
    /// Adds those of another time.
    pub fn add(&mut self, other: &Self) {
        self.birth += other.birth;
        self.running += other.running;
        self.drift += other.drift;
        self.unbudgeted += other.unbudgeted;
        self.naive += other.naive;
        self.minutes += other.minutes;
        self.births += other.births;
        self.births_expected += other.births_expected;
        self.births_expected_unbudgeted += other.births_expected_unbudgeted;
    }

    /// Those of all rules that the agent runs.
    pub fn all(&self) -> u64 {
        self.birth + self.running + self.drift
    }

    /// The share of minutes in which the naive rule alarms.
    pub fn naive_share(&self) -> f64 {
        self.naive as f64 / self.minutes.max(1) as f64
    }
}

/// What the simulation knows of a backend beside its reading.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    /// Seconds until the proxies have heard of it.
    unheard: u32,
    /// Connections started when its open ones were last brought up to date.
    opened: u64,
    /// Connections started at the last full minute; none for one that was born within it.
    minute: Option<u64>,
    /// Expected and observed in the open window of the rule without a budget.
    window: (f64, u64),
}

/// The chance of a false alarm over one endpoint that is born as one of `k`, with and without the budget for later looks.
fn chances_at_birth(k: u32) -> (f64, f64) {
    static CHANCES: OnceLock<Vec<(f64, f64)>> = OnceLock::new();
    let both = |k| (exact::birth(k, Rule::Budgeted), exact::birth(k, Rule::Written));
    let chances = CHANCES.get_or_init(|| (1..=SIZES.1).map(both).collect());
    chances.get(k as usize - 1).copied().unwrap_or_default()
}

struct Service {
    dice: SmallRng,
    rate: f64,
    life: f64,
    members: Vec<MemberReading>,
    sides: Vec<Side>,
    /// Connections a second on one backend.
    arrivals: WeightedAliasIndex<f64>,
    /// Connections a second on all of them.
    all: WeightedAliasIndex<f64>,
    next_id: u32,
    /// Seconds until the windows without a budget begin anew after a scale event.
    settling: u32,
    alarms: Alarms,
}

/// Simulates one service for so many seconds, and counts what alarms. The same seed gives the same service.
pub fn service_day(seed: u64, seconds: u32) -> Result<Alarms> {
    let mut dice = SmallRng::seed_from_u64(seed);
    let spread = |dice: &mut SmallRng, (low, high): (f64, f64)| low * (high / low).powf(dice.random::<f64>());
    let k = spread(&mut dice, (f64::from(SIZES.0), f64::from(SIZES.1))).round() as u32;
    let rate = spread(&mut dice, RATES);
    let life = spread(&mut dice, LIVES);
    let mut service = Service {
        arrivals: arrivals(rate / f64::from(k))?,
        all: arrivals(rate)?,
        dice,
        rate,
        life,
        members: Vec::new(),
        sides: Vec::new(),
        next_id: 1,
        settling: 0,
        alarms: Alarms::default(),
    };
    service.grow(k, 1);
    service.settle()?;
    service.run(seconds)?;
    Ok(service.alarms)
}

/// The Poisson distribution with this mean as a table, to far beyond what a year of seconds brings.
fn arrivals(mean: f64) -> Result<WeightedAliasIndex<f64>> {
    let most = (mean + 12.0 * mean.sqrt() + 20.0) as u32;
    let mut ln_p = -mean;
    let mut table = vec![ln_p.exp()];
    for i in 1..=most {
        ln_p += (mean / f64::from(i)).ln();
        table.push(ln_p.exp());
    }
    Ok(WeightedAliasIndex::new(table)?)
}

impl Service {
    fn run(&mut self, seconds: u32) -> Result<()> {
        let mut detector = Detector::new();
        let mut drift = Drift::new();
        let drift_step = DRIFT_SECONDS.max((self.life / 20.0) as u32);
        let mut events = self.scale_events(seconds)?;
        let began = 1_000_u32;
        detector.read(u64::from(began) * SECOND_NS, &self.members);
        drift.read(u64::from(began) * SECOND_NS, &self.members);
        for second in 1..=seconds {
            let now_ns = u64::from(began + second) * SECOND_NS;
            self.connect();
            for change in detector.read(now_ns, &self.members) {
                if change.transition == Transition::Raised {
                    match change.judgement.clock {
                        Clock::Birth => self.alarms.birth += 1,
                        Clock::Running => self.alarms.running += 1,
                    }
                }
            }
            if second % drift_step == 0 {
                self.age(f64::from(drift_step))?;
                let changes = drift.read(now_ns, &self.members);
                self.alarms.drift += (changes.iter())
                    .filter(|change| change.transition == Transition::Raised)
                    .count() as u64;
            }
            if second % 60 == 0 {
                self.judge_naively();
            }
            while events.last() == Some(&second) {
                events.pop();
                self.scale(now_ns)?;
            }
        }
        Ok(())
    }

    /// One second of new connections, and the windows without a budget over them.
    fn connect(&mut self) {
        let mut total = 0;
        if self.settling == 0 && self.rate < self.members.len() as f64 {
            // Few come: to deal them out is the same in distribution, and cheaper than to ask for each backend.
            total = self.all.sample(&mut self.dice) as u64;
            for _ in 0..total {
                let at = self.dice.random_range(0..self.members.len());
                self.members[at].started += 1;
                self.sides[at].window.1 += 1;
            }
        } else {
            for (member, side) in self.members.iter_mut().zip(&mut self.sides) {
                if side.unheard > 0 {
                    side.unheard -= 1;
                    continue;
                }
                let fresh = self.arrivals.sample(&mut self.dice) as u64;
                member.started += fresh;
                side.window.1 += fresh;
                total += fresh;
            }
        }
        if self.settling > 0 {
            self.settling -= 1;
            for side in &mut self.sides {
                side.window = (0.0, 0);
            }
            return;
        }
        let k = self.members.len() as f64;
        let each = total as f64 / k;
        let enough = RUNNING_EXPECTED + k.ln();
        for side in &mut self.sides {
            side.window.0 += each;
            let (expected, observed) = side.window;
            if expected >= enough {
                let few = (observed as f64) < expected / 4.0;
                if few && poisson::at_most(observed, expected) < RUNNING_P / k {
                    self.alarms.unbudgeted += 1;
                }
                side.window = (0.0, 0);
            }
        }
    }

    /// Ends connections that were open, or came, during the last `step` seconds; their lives are exponential.
    fn age(&mut self, step: f64) -> Result<()> {
        let stays = (-step / self.life).exp();
        let fresh_stays = self.life / step * (1.0 - stays);
        for (member, side) in self.members.iter_mut().zip(&mut self.sides) {
            let fresh = member.started - side.opened;
            side.opened = member.started;
            let old = Binomial::new(member.open.unwrap_or(0), stays)?.sample(&mut self.dice);
            let new = Binomial::new(fresh, fresh_stays.min(1.0))?.sample(&mut self.dice);
            member.open = Some(old + new);
        }
        Ok(())
    }

    /// "Less than half the mean in a minute", over the backends that were there all the minute.
    fn judge_naively(&mut self) {
        let counts: Vec<u64> = (self.members.iter().zip(&self.sides))
            .filter_map(|(member, side)| Some(member.started - side.minute?))
            .collect();
        let mean = counts.iter().sum::<u64>() as f64 / counts.len().max(1) as f64;
        self.alarms.minutes += u64::from(mean > 0.0);
        self.alarms.naive += u64::from(counts.iter().any(|&count| (count as f64) < mean / 2.0));
        for (member, side) in self.members.iter().zip(&mut self.sides) {
            side.minute = Some(member.started);
        }
    }

    /// The seconds at which the service is scaled, latest first.
    fn scale_events(&mut self, seconds: u32) -> Result<Vec<u32>> {
        let mean = SCALE_EVENTS * f64::from(seconds) / f64::from(DAY_SECONDS);
        let count = Poisson::new(mean)?.sample(&mut self.dice) as u32;
        let mut events: Vec<u32> = (0..count).map(|_| self.dice.random_range(1..=seconds)).collect();
        events.sort_unstable_by(|a, b| b.cmp(a));
        Ok(events)
    }

    /// Adds or removes up to a quarter of the backends.
    fn scale(&mut self, now_ns: u64) -> Result<()> {
        let k = self.members.len() as u32;
        let by = self.dice.random_range(1..=(k / 4).max(1));
        let wanted = if self.dice.random::<bool>() {
            k + by
        } else {
            k.saturating_sub(by)
        };
        let wanted = wanted.clamp(SIZES.0, SIZES.1);
        match wanted.cmp(&k) {
            Ordering::Greater => {
                let born = wanted - k;
                self.alarms.births += u64::from(born);
                let (budgeted, written) = chances_at_birth(wanted);
                self.alarms.births_expected += f64::from(born) * budgeted;
                self.alarms.births_expected_unbudgeted += f64::from(born) * written;
                self.grow(born, now_ns);
            }
            Ordering::Less => {
                for _ in wanted..k {
                    let at = self.dice.random_range(0..self.members.len());
                    self.members.remove(at);
                    self.sides.remove(at);
                }
            }
            Ordering::Equal => {}
        }
        self.settling = HEARD_SECONDS + 1;
        self.arrivals = arrivals(self.rate / f64::from(wanted))?;
        Ok(())
    }

    /// Adds backends that are usable from now on, and that the proxies hear of within two seconds.
    fn grow(&mut self, by: u32, usable_since_ns: u64) {
        for _ in 0..by {
            self.members.push(MemberReading {
                backend: self.next_id,
                weight: 1,
                usable_since_ns,
                started: 0,
                open: Some(0),
            });
            self.sides.push(Side {
                unheard: self.dice.random_range(0..=HEARD_SECONDS),
                ..Side::default()
            });
            self.next_id += 1;
        }
    }

    /// Gives the first backends the open connections of a service that has run for long.
    fn settle(&mut self) -> Result<()> {
        let mean = self.rate / self.members.len() as f64 * self.life;
        let open = Poisson::new(mean)?;
        for (member, side) in self.members.iter_mut().zip(&mut self.sides) {
            member.open = Some(open.sample(&mut self.dice) as u64);
            side.unheard = 0;
        }
        Ok(())
    }
}

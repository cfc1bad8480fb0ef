//! A Service in simulated seconds, for the tests of the verdicts: a clock, members, connections that live and end.

use std::collections::BinaryHeap;

use super::{
    drift::{Drift, DriftChange},
    starvation::{Change, Detector, MemberReading},
};

pub(super) const SECOND: u64 = 1_000_000_000;

/// A small generator (splitmix64), the same on every run.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// An exponential time with this mean, in nanoseconds.
    fn lifetime(&mut self, mean_ns: f64) -> u64 {
        let uniform = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        (-(1.0 - uniform).ln() * mean_ns) as u64
    }
}

/// How the proxy chooses among the members.
pub(super) type Choose = fn(&mut Dice, &[MemberReading]) -> usize;

/// A fair choice by weight.
pub(super) fn fair(dice: &mut Dice, members: &[MemberReading]) -> usize {
    let weights: u64 = members.iter().map(|member| u64::from(member.weight)).sum();
    let mut at = dice.below(weights);
    for (i, member) in members.iter().enumerate() {
        match at.checked_sub(u64::from(member.weight)) {
            Some(left) => at = left,
            None => return i,
        }
    }
    unreachable!("the draw is below the sum of the weights")
}

/// Whoever has started the fewest connections: better than chance.
pub(super) fn round_robin(_: &mut Dice, members: &[MemberReading]) -> usize {
    (0..members.len())
        .min_by_key(|&i| members[i].started)
        .expect("there are members")
}

/// One of the first two members, whatever came after.
pub(super) fn first_two(dice: &mut Dice, members: &[MemberReading]) -> usize {
    dice.below(2.min(members.len() as u64)) as usize
}

pub(super) struct World {
    pub(super) now_ns: u64,
    pub(super) members: Vec<MemberReading>,
    pub(super) detector: Detector,
    pub(super) drift: Drift,
    pub(super) changes: Vec<Change>,
    pub(super) drift_changes: Vec<DriftChange>,
    pub(super) mean_life_ns: f64,
    dice: Dice,
    /// Negated ends of open connections, with their backends: the earliest is on top.
    ends: BinaryHeap<(std::cmp::Reverse<u64>, u32)>,
    owed: f64,
}

impl World {
    /// Starts with backends 1..=k of weight 1, long usable; they have been read once.
    pub(super) fn new(seed: u64, k: u32) -> Self {
        let mut world = Self {
            now_ns: 1_000 * SECOND,
            members: Vec::new(),
            detector: Detector::new(),
            drift: Drift::new(),
            changes: Vec::new(),
            drift_changes: Vec::new(),
            mean_life_ns: 0.2e9,
            dice: Dice(seed),
            ends: BinaryHeap::new(),
            owed: 0.0,
        };
        for backend in 1..=k {
            world.add(backend, 1);
            world.members[backend as usize - 1].usable_since_ns = SECOND;
        }
        world.read();
        world
    }

    /// Adds a backend that is usable from now on.
    pub(super) fn add(&mut self, backend: u32, weight: u32) {
        self.members.push(MemberReading {
            backend,
            weight,
            usable_since_ns: self.now_ns,
            started: 0,
            open: Some(0),
        });
    }

    /// Takes a backend out; its connections end.
    pub(super) fn remove(&mut self, backend: u32) {
        self.members.retain(|member| member.backend != backend);
        self.ends.retain(|&(_, of)| of != backend);
    }

    /// Runs for some seconds at `rate` new connections a second, evenly in time, with a reading at the end of each.
    pub(super) fn run(&mut self, seconds: u32, rate: f64, choose: Choose) {
        for _ in 0..seconds {
            self.owed += rate;
            let n = self.owed.floor();
            self.owed -= n;
            for i in 0..n as u64 {
                let at_ns = self.now_ns + i * SECOND / n as u64;
                if self.members.iter().any(|member| member.weight > 0) {
                    let chosen = choose(&mut self.dice, &self.members);
                    self.connect(chosen, at_ns);
                }
            }
            self.now_ns += SECOND;
            self.end_connections();
            self.read();
        }
    }

    /// Opens a connection on the member at this place.
    pub(super) fn connect(&mut self, at: usize, at_ns: u64) {
        let member = &mut self.members[at];
        member.started += 1;
        member.open = member.open.map(|open| open + 1);
        let end_ns = at_ns + self.dice.lifetime(self.mean_life_ns);
        self.ends.push((std::cmp::Reverse(end_ns), member.backend));
    }

    /// A new agent, that knows nothing of what was.
    pub(super) fn restart(&mut self) {
        self.detector = Detector::new();
        self.drift = Drift::new();
    }

    pub(super) fn assert_silent(&self) {
        assert!(self.changes.is_empty(), "{:?}", self.changes);
        assert!(self.drift_changes.is_empty(), "{:?}", self.drift_changes);
    }

    fn end_connections(&mut self) {
        while let Some(&(std::cmp::Reverse(end_ns), backend)) = self.ends.peek() {
            if end_ns > self.now_ns {
                break;
            }
            self.ends.pop();
            if let Some(member) = self.members.iter_mut().find(|member| member.backend == backend) {
                member.open = member.open.map(|open| open.saturating_sub(1));
            }
        }
    }

    pub(super) fn read(&mut self) {
        self.changes.extend(self.detector.read(self.now_ns, &self.members));
        self.drift_changes.extend(self.drift.read(self.now_ns, &self.members));
    }
}

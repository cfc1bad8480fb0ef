//! What was counted over time, step by step, from the start to now: the material of pictures.
//!
//! All histories share one grid. When it is full, neighbouring steps are put together and the step doubles: the whole time
//! since the start stays in view, in fewer and longer steps. Memory: at most [`MAX_STEPS`] steps of [`MAX_BACKENDS`] backends a
//! set, of [`MAX_SETS`] sets.

use std::collections::{BTreeMap, BTreeSet};

use super::window::Reading;

/// Steps of the grid.
pub const MAX_STEPS: usize = 360;
/// Backends of a set that are followed; further ones are left out of its picture.
pub const MAX_BACKENDS: usize = 32;
/// Sets that are followed; those that come later have no history.
pub const MAX_SETS: usize = 128;
/// The first step, in nanoseconds.
const FIRST_STEP_NS: u64 = 1_000_000_000;

/// One step of one set.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its end, in nanoseconds of the readings' clock.
    pub end_ns: u64,
    /// New connections in it, by the order of [`History::backends`]; backends that came later have none.
    pub started: Vec<u32>,
    /// Connections open at its end, in the same order.
    pub open: Vec<u32>,
    /// Dispersion at its end.
    pub dispersion: Option<f64>,
}

/// One backend of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// The backend's id.
    pub backend: u32,
    /// When it became usable, in nanoseconds; none if it was there at the first reading.
    pub born_ns: Option<u64>,
    /// When it ceased to be a member, in nanoseconds.
    pub gone_ns: Option<u64>,
}

/// One set over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    backends: Vec<Line>,
    steps: Vec<Step>,
    totals: BTreeMap<u32, u64>,
}

impl History {
    /// The backends, in the order in which they came.
    pub fn backends(&self) -> &[Line] {
        &self.backends
    }

    /// The steps, oldest first.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn index(&mut self, backend: u32, now_ns: u64, first: bool) -> Option<usize> {
        let known = self.backends.iter().rposition(|line| line.backend == backend);
        if let Some(at) = known
            && self.backends[at].gone_ns.is_none()
        {
            return Some(at);
        }
        if self.backends.len() >= MAX_BACKENDS {
            return None;
        }
        self.backends.push(Line {
            backend,
            born_ns: (!first).then_some(now_ns),
            gone_ns: None,
        });
        Some(self.backends.len() - 1)
    }

    fn take(
        &mut self,
        now_ns: u64,
        grid: &Grid,
        members: &[Reading],
        open: &BTreeMap<u32, u64>,
        dispersion: Option<f64>,
    ) {
        let first = self.steps.is_empty() && self.totals.is_empty();
        let there: BTreeSet<u32> = members.iter().filter(|m| m.weight > 0).map(|m| m.backend).collect();
        for line in &mut self.backends {
            if line.gone_ns.is_none() && !there.contains(&line.backend) {
                line.gone_ns = Some(now_ns);
            }
        }
        let mut counted: Vec<(usize, u32, u32)> = Vec::new();
        for member in members.iter().filter(|member| member.weight > 0) {
            let Some(at) = self.index(member.backend, now_ns, first) else {
                continue;
            };
            let before = self.totals.insert(member.backend, member.total);
            let before = before.unwrap_or(if first { member.total } else { 0 });
            let started = member.total.saturating_sub(before);
            let open = open.get(&member.backend).copied().unwrap_or(0);
            counted.push((at, clamp(started), clamp(open)));
        }
        let same_step = self
            .steps
            .last()
            .is_some_and(|last| grid.cell(last.end_ns) == grid.cell(now_ns));
        if !same_step {
            self.steps.push(Step {
                end_ns: now_ns,
                started: Vec::new(),
                open: Vec::new(),
                dispersion: None,
            });
        }
        let width = self.backends.len();
        let Some(step) = self.steps.last_mut() else { return };
        step.end_ns = now_ns;
        step.dispersion = dispersion;
        step.started.resize(width, 0);
        step.open.clear();
        step.open.resize(width, 0);
        for (at, started, open) in counted {
            step.started[at] = step.started[at].saturating_add(started);
            step.open[at] = open;
        }
    }

    /// Puts steps of one cell together.
    fn merge(&mut self, grid: &Grid) {
        let mut merged: Vec<Step> = Vec::with_capacity(self.steps.len() / 2 + 1);
        for step in self.steps.drain(..) {
            match merged.last_mut() {
                Some(last) if grid.cell(last.end_ns) == grid.cell(step.end_ns) => {
                    last.started.resize(step.started.len().max(last.started.len()), 0);
                    for (sum, more) in last.started.iter_mut().zip(&step.started) {
                        *sum = sum.saturating_add(*more);
                    }
                    last.end_ns = step.end_ns;
                    last.open = step.open;
                    last.dispersion = step.dispersion;
                }
                _ => merged.push(step),
            }
        }
        self.steps = merged;
    }
}

fn clamp(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Where steps begin and end.
#[derive(Clone, Copy, Debug)]
struct Grid {
    start_ns: u64,
    step_ns: u64,
}

impl Grid {
    fn cell(&self, at_ns: u64) -> u64 {
        at_ns.saturating_sub(self.start_ns).saturating_sub(1) / self.step_ns
    }
}

/// The histories of all sets, by a key of the caller's.
#[derive(Clone, Debug)]
pub struct Histories<K> {
    grid: Grid,
    sets: BTreeMap<K, History>,
}

impl<K: Ord + Copy> Histories<K> {
    /// Begins at `start_ns`.
    pub fn new(start_ns: u64) -> Self {
        Self {
            grid: Grid {
                start_ns,
                step_ns: FIRST_STEP_NS,
            },
            sets: BTreeMap::new(),
        }
    }

    /// Whether a reading of a set would be kept.
    pub fn follows(&self, set: &K) -> bool {
        self.sets.len() < MAX_SETS || self.sets.contains_key(set)
    }

    /// Takes a reading of one set's members at `now_ns`, with the connections that are open on each.
    pub fn read(
        &mut self,
        set: K,
        now_ns: u64,
        members: &[Reading],
        open: &BTreeMap<u32, u64>,
        dispersion: Option<f64>,
    ) {
        while self.grid.cell(now_ns) >= MAX_STEPS as u64 {
            self.grid.step_ns *= 2;
            for history in self.sets.values_mut() {
                history.merge(&self.grid);
            }
        }
        if !self.follows(&set) {
            return;
        }
        self.sets
            .entry(set)
            .or_default()
            .take(now_ns, &self.grid, members, open, dispersion);
    }

    /// The length of a step, in seconds.
    pub fn step_seconds(&self) -> f64 {
        self.grid.step_ns as f64 / 1e9
    }

    /// One set's history.
    pub fn get(&self, set: &K) -> Option<&History> {
        self.sets.get(set)
    }

    /// Forgets sets that are gone.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        self.sets.retain(|set, _| keep(set));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn members(totals: &[(u32, u64)]) -> Vec<Reading> {
        totals
            .iter()
            .map(|&(backend, total)| Reading {
                backend,
                weight: 1,
                total,
            })
            .collect()
    }

    #[test]
    fn a_newcomer_is_born_and_one_that_left_is_gone() {
        let mut all = Histories::new(0);
        let open = BTreeMap::from([(1, 3)]);
        all.read(7, SECOND, &members(&[(1, 100), (2, 50)]), &open, None);
        all.read(7, 2 * SECOND, &members(&[(1, 110), (2, 60), (3, 4)]), &open, Some(1.5));
        all.read(7, 3 * SECOND, &members(&[(1, 120), (3, 9)]), &open, Some(2.5));
        let history = all.get(&7).expect("it was read");
        let lines: Vec<_> = history
            .backends()
            .iter()
            .map(|l| (l.backend, l.born_ns, l.gone_ns))
            .collect();
        assert_eq!(
            lines,
            [
                (1, None, None),
                (2, None, Some(3 * SECOND)),
                (3, Some(2 * SECOND), None)
            ]
        );
        let started: Vec<_> = history.steps().iter().map(|step| step.started.clone()).collect();
        assert_eq!(started, [vec![0, 0], vec![10, 10, 4], vec![10, 0, 5]]);
        assert_eq!(history.steps()[2].open, [3, 0, 0]);
        assert_eq!(history.steps()[2].dispersion, Some(2.5));
    }

    #[test]
    fn the_whole_time_stays_in_view() {
        let mut all = Histories::new(0);
        for second in 1..=10_000_u64 {
            all.read(
                1,
                second * SECOND,
                &members(&[(1, second * 5), (2, second)]),
                &BTreeMap::new(),
                None,
            );
        }
        let history = all.get(&1).expect("it was read");
        assert!(history.steps().len() <= MAX_STEPS, "{}", history.steps().len());
        assert!((all.step_seconds() - 32.0).abs() < f64::EPSILON);
        let sum: u32 = history.steps().iter().map(|step| step.started[0]).sum();
        assert_eq!(sum, 5 * 9_999, "nothing is lost by putting steps together");
        assert!(history.steps().is_sorted_by_key(|step| step.end_ns));
    }

    #[test]
    fn memory_is_bounded() {
        let mut all = Histories::new(0);
        for set in 0..2 * MAX_SETS {
            let many: Vec<_> = (0..2 * MAX_BACKENDS as u32).map(|id| (id, 1)).collect();
            all.read(set, SECOND, &members(&many), &BTreeMap::new(), None);
        }
        assert_eq!(all.sets.len(), MAX_SETS);
        assert!(all.sets.values().all(|history| history.backends.len() == MAX_BACKENDS));
    }
}

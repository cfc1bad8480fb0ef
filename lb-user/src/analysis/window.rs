//! A sliding window over counters that only grow, with members that come and go.
//!
//! The caller reads the totals of a set's eligible backends now and then and hands them in with the time; the window keeps
//! one small record an interval. An interval counts for a backend only if it was eligible, with one weight, at both ends:
//! then what it should have got by weight is known, also while the set is being scaled.

use std::collections::{BTreeMap, VecDeque};

use super::imbalance::{self, Imbalance, Share};

/// One eligible backend at one reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The backend's id.
    pub backend: u32,
    /// Its weight; 0 is not eligible.
    pub weight: u32,
    /// Connections started on it since its counter began.
    pub total: u64,
}

/// One backend's part of one interval.
#[derive(Clone, Copy, Debug)]
struct Part {
    backend: u32,
    weight: u32,
    started: u64,
}

#[derive(Clone, Debug)]
struct Interval {
    end_ns: u64,
    parts: Box<[Part]>,
}

/// The sliding window of one backend set.
#[derive(Clone, Debug)]
pub struct Window {
    span_ns: u64,
    max_intervals: usize,
    intervals: VecDeque<Interval>,
    last: BTreeMap<u32, (u32, u64)>,
    /// What each member was judged by since it came, whatever has left the window.
    totals: BTreeMap<u32, Share>,
}

impl Window {
    /// Makes a window that looks back `span_ns` nanoseconds and keeps at most `max_intervals` intervals (at least one).
    pub fn new(span_ns: u64, max_intervals: usize) -> Self {
        Self {
            span_ns,
            max_intervals: max_intervals.max(1),
            intervals: VecDeque::new(),
            last: BTreeMap::new(),
            totals: BTreeMap::new(),
        }
    }

    /// Takes a reading of all members at `now_ns`; what is older than the window's span is dropped.
    pub fn read(&mut self, now_ns: u64, members: &[Reading]) {
        let next: BTreeMap<u32, (u32, u64)> = members
            .iter()
            .filter(|member| member.weight > 0)
            .map(|member| (member.backend, (member.weight, member.total)))
            .collect();
        let parts: Box<[Part]> = next
            .iter()
            .filter_map(|(&backend, &(weight, total))| {
                let &(weight_before, total_before) = self.last.get(&backend)?;
                // A counter that went back was made anew (another backend under this id): this interval says nothing.
                let started = total.checked_sub(total_before)?;
                (weight == weight_before).then_some(Part {
                    backend,
                    weight,
                    started,
                })
            })
            .collect();
        self.last = next;
        self.add_to_totals(members, &parts);
        // An idle interval says nothing either, and a quiet Service should not cost memory.
        if parts.iter().any(|part| part.started > 0) {
            self.intervals.push_back(Interval { end_ns: now_ns, parts });
        }
        let oldest = now_ns.saturating_sub(self.span_ns);
        while self
            .intervals
            .front()
            .is_some_and(|interval| interval.end_ns <= oldest && oldest > 0)
            || self.intervals.len() > self.max_intervals
        {
            self.intervals.pop_front();
        }
    }

    fn add_to_totals(&mut self, members: &[Reading], parts: &[Part]) {
        self.totals
            .retain(|id, _| members.iter().any(|member| member.backend == *id));
        let weights: f64 = parts.iter().map(|part| f64::from(part.weight)).sum();
        let n: u64 = parts.iter().map(|part| part.started).sum();
        for part in parts {
            let total = self.totals.entry(part.backend).or_insert(Share {
                expected: 0.0,
                observed: 0,
            });
            total.observed += part.started;
            total.expected += n as f64 * f64::from(part.weight) / weights;
        }
    }

    /// Expected and observed counts since each member came, by id: sums that only grow while a member is in the set, and of which
    /// both add up to the same over the members that were always there.
    pub fn totals(&self) -> &BTreeMap<u32, Share> {
        &self.totals
    }

    /// Expected and observed counts within the window, for the backends eligible at the last reading, by id.
    ///
    /// Each interval is judged among those of them that were eligible in it, so that one that came late is compared from then on.
    pub fn shares(&self) -> BTreeMap<u32, Share> {
        let mut shares: BTreeMap<u32, Share> = self
            .last
            .keys()
            .map(|&backend| {
                let nothing = Share {
                    expected: 0.0,
                    observed: 0,
                };
                (backend, nothing)
            })
            .collect();
        for interval in &self.intervals {
            let current = || {
                interval
                    .parts
                    .iter()
                    .filter(|part| self.last.contains_key(&part.backend))
            };
            let weights: f64 = current().map(|part| f64::from(part.weight)).sum();
            let n: u64 = current().map(|part| part.started).sum();
            for part in current() {
                if let Some(share) = shares.get_mut(&part.backend) {
                    share.observed += part.started;
                    share.expected += n as f64 * f64::from(part.weight) / weights;
                }
            }
        }
        shares
    }

    /// The evenness within the window.
    pub fn imbalance(&self) -> Imbalance {
        let shares: Vec<Share> = self.shares().into_values().collect();
        imbalance::of_shares(&shares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn reading(backend: u32, total: u64) -> Reading {
        Reading {
            backend,
            weight: 1,
            total,
        }
    }

    #[test]
    fn counts_only_what_came_after_the_first_reading() {
        let mut window = Window::new(60 * SECOND, 60);
        window.read(SECOND, &[reading(1, 1000), reading(2, 10)]);
        assert_eq!(window.imbalance().n, 0);
        window.read(2 * SECOND, &[reading(1, 1050), reading(2, 60)]);
        let found = window.imbalance();
        assert_eq!((found.n, found.max_over_mean), (100, Some(1.0)));
    }

    #[test]
    fn forgets_what_left_the_span() {
        let mut window = Window::new(10 * SECOND, 100);
        window.read(SECOND, &[reading(1, 0), reading(2, 0)]);
        window.read(2 * SECOND, &[reading(1, 500), reading(2, 0)]);
        assert_eq!(window.imbalance().n, 500);
        window.read(11 * SECOND, &[reading(1, 600), reading(2, 100)]);
        assert_eq!(window.imbalance().n, 700);
        window.read(12 * SECOND, &[reading(1, 600), reading(2, 100)]);
        let found = window.imbalance();
        assert_eq!((found.n, found.dispersion), (200, Some(0.0)));
    }

    #[test]
    fn a_new_backend_is_compared_from_its_second_reading() {
        let mut window = Window::new(60 * SECOND, 60);
        window.read(SECOND, &[reading(1, 0), reading(2, 0)]);
        window.read(2 * SECOND, &[reading(1, 100), reading(2, 100)]);
        window.read(3 * SECOND, &[reading(1, 200), reading(2, 200), reading(3, 40)]);
        window.read(4 * SECOND, &[reading(1, 250), reading(2, 250), reading(3, 90)]);
        let shares = window.shares();
        assert_eq!(shares[&3].observed, 50);
        assert!((shares[&3].expected - 50.0).abs() < 1e-9);
        assert_eq!(window.imbalance().dispersion, Some(0.0));
    }

    #[test]
    fn totals_keep_what_left_the_window() {
        let mut window = Window::new(10 * SECOND, 100);
        window.read(SECOND, &[reading(1, 900), reading(2, 0)]);
        window.read(2 * SECOND, &[reading(1, 990), reading(2, 10)]);
        window.read(30 * SECOND, &[reading(1, 1_000), reading(2, 20), reading(3, 5)]);
        assert_eq!(window.shares()[&1].observed, 10);
        let of = |window: &Window, id| window.totals().get(&id).map(|share| (share.observed, share.expected));
        assert_eq!(
            (of(&window, 1), of(&window, 2), of(&window, 3)),
            (Some((100, 60.0)), Some((20, 60.0)), None)
        );
        // One without weight keeps its sums, one that is gone does not.
        let drained = Reading {
            weight: 0,
            ..reading(1, 1_000)
        };
        window.read(31 * SECOND, &[drained, reading(3, 15)]);
        assert_eq!(
            (of(&window, 1), of(&window, 2), of(&window, 3)),
            (Some((100, 60.0)), None, Some((10, 10.0)))
        );
    }

    #[test]
    fn one_that_left_no_longer_counts() {
        let mut window = Window::new(60 * SECOND, 60);
        window.read(SECOND, &[reading(1, 0), reading(2, 0), reading(3, 0)]);
        window.read(2 * SECOND, &[reading(1, 100), reading(2, 100), reading(3, 900)]);
        window.read(3 * SECOND, &[reading(1, 200), reading(2, 200)]);
        let found = window.imbalance();
        assert_eq!((found.n, found.backends, found.max_over_mean), (400, 2, Some(1.0)));
    }

    #[test]
    fn a_counter_that_went_back_is_not_believed() {
        let mut window = Window::new(60 * SECOND, 60);
        window.read(SECOND, &[reading(1, 100), reading(2, 100)]);
        window.read(2 * SECOND, &[reading(1, 5), reading(2, 150)]);
        window.read(3 * SECOND, &[reading(1, 55), reading(2, 200)]);
        assert_eq!(window.shares()[&1].observed, 50);
    }

    #[test]
    fn keeps_no_more_intervals_than_told() {
        let mut window = Window::new(u64::MAX, 3);
        for i in 0..10 {
            window.read(i * SECOND, &[reading(1, i * 10), reading(2, i * 10)]);
        }
        assert_eq!(window.imbalance().n, 60);
    }

    #[test]
    fn a_change_of_weight_skips_its_interval() {
        let mut window = Window::new(60 * SECOND, 60);
        let weighted = |backend, weight, total| Reading { backend, weight, total };
        window.read(SECOND, &[weighted(1, 1, 0), weighted(2, 1, 0)]);
        window.read(2 * SECOND, &[weighted(1, 3, 90), weighted(2, 1, 10)]);
        window.read(3 * SECOND, &[weighted(1, 3, 390), weighted(2, 1, 110)]);
        let shares = window.shares();
        assert_eq!(shares[&1].observed, 300);
        assert_eq!(shares[&2].observed, 110);
    }
}

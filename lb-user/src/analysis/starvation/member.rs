//! One member's clocks.

use super::{BIRTH_LATER_P, BIRTH_P, Bounds, Clock, GRACE_NS, Judgement, MemberReading, Status, Tally, Transition};

/// One eligible member: its last reading, and what its clock has counted.
#[derive(Clone, Debug)]
pub(super) struct Member {
    backend: u32,
    weight: u32,
    usable_since_ns: u64,
    started: u64,
    clock: Clock,
    /// No interval that began earlier counts.
    clock_start_ns: u64,
    /// New connections in the interval that is being judged; none when it says nothing about this member.
    fresh: Option<u64>,
    /// Since birth, or in the open window.
    tally: Option<Tally>,
    /// The window beside a birth clock that says starved.
    relief: Option<Tally>,
    /// The tally that decided last, when, and on which clock.
    decided: Option<(Tally, u64, Clock)>,
    starved_since_ns: Option<u64>,
}

impl Member {
    /// A member met for the first time at `now_ns`; `last_read_ns` is none at the detector's own first reading.
    pub(super) fn new(reading: &MemberReading, last_read_ns: Option<u64>, now_ns: u64) -> Self {
        let usable_ns = match last_read_ns {
            // It became eligible since the last reading, whatever made it so (a weight that was 0, say).
            Some(last_ns) if reading.usable_since_ns < last_ns => now_ns,
            _ => reading.usable_since_ns,
        };
        Self {
            backend: reading.backend,
            weight: reading.weight,
            usable_since_ns: reading.usable_since_ns,
            started: reading.started,
            clock: if last_read_ns.is_some() {
                Clock::Birth
            } else {
                Clock::Running
            },
            clock_start_ns: usable_ns.saturating_add(GRACE_NS),
            fresh: None,
            tally: None,
            relief: None,
            decided: None,
            starved_since_ns: None,
        }
    }

    pub(super) fn backend(&self) -> u32 {
        self.backend
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight
    }

    pub(super) fn is_starved(&self) -> bool {
        self.starved_since_ns.is_some()
    }

    /// Whether a reading is of this member; an endpoint that became usable later than it is another one under its id.
    pub(super) fn is(&self, reading: &MemberReading) -> bool {
        self.backend == reading.backend
            && (self.usable_since_ns == 0 || reading.usable_since_ns <= self.usable_since_ns)
    }

    /// Takes the reading that ends the interval since `last_ns`; gives the new connections if the interval counts.
    pub(super) fn take(&mut self, reading: &MemberReading, last_ns: u64) -> Option<u64> {
        // A counter that went back was made anew, and a weight that changed did so at a time unknown.
        let started = reading.started.checked_sub(self.started);
        self.fresh = started.filter(|_| reading.weight == self.weight && self.clock_start_ns <= last_ns);
        self.started = reading.started;
        self.weight = reading.weight;
        if self.usable_since_ns == 0 {
            self.usable_since_ns = reading.usable_since_ns;
        }
        self.fresh
    }

    /// Judges the interval from `last_ns` to `now_ns`, in which `each` new connections came on a unit of weight.
    pub(super) fn judge(&mut self, each: f64, last_ns: u64, now_ns: u64, bounds: Bounds) -> Option<Transition> {
        let fresh = self.fresh?;
        let expected = each * f64::from(self.weight);
        let tally = self.tally.get_or_insert(Tally::starting(last_ns));
        tally.add(expected, fresh);
        let tally = *tally;
        match self.clock {
            Clock::Running => self.judge_window(tally, now_ns, bounds),
            Clock::Birth => {
                // λ < ln(1000 k), in the form that the verdict has: the first look finds every share of zero.
                if (-tally.expected).exp() >= BIRTH_P / bounds.k {
                    return None;
                }
                let p = if self.decided.is_none() { BIRTH_P } else { BIRTH_LATER_P };
                self.decided = Some((tally, now_ns, Clock::Birth));
                if tally.is_healthy() {
                    return self.grow_up();
                }
                if self.is_starved() {
                    return self.judge_relief(expected, fresh, last_ns, now_ns, bounds);
                }
                if tally.is_starved(p / bounds.k) {
                    return Some(self.raise(tally));
                }
                None
            }
        }
    }

    /// The running clock: closes the window when it can decide.
    fn judge_window(&mut self, tally: Tally, now_ns: u64, bounds: Bounds) -> Option<Transition> {
        let p = bounds.closing_p(tally, now_ns)?;
        self.tally = None;
        if self.is_starved() {
            // In between, the window that last proved it stays the evidence.
            if tally.is_healthy() {
                self.decided = Some((tally, now_ns, Clock::Running));
                return self.clear();
            }
            if tally.is_starved(p) {
                self.decided = Some((tally, now_ns, Clock::Running));
            }
            return None;
        }
        self.decided = Some((tally, now_ns, Clock::Running));
        if tally.is_starved(p) {
            return Some(self.raise(tally));
        }
        None
    }

    /// The window beside a birth clock that says starved: it can clear the verdict, and then the birth is over.
    fn judge_relief(
        &mut self,
        expected: f64,
        fresh: u64,
        last_ns: u64,
        now_ns: u64,
        bounds: Bounds,
    ) -> Option<Transition> {
        let relief = self.relief.get_or_insert(Tally::starting(last_ns));
        relief.add(expected, fresh);
        let relief = *relief;
        bounds.closing_p(relief, now_ns)?;
        self.relief = None;
        if relief.is_healthy() {
            self.decided = Some((relief, now_ns, Clock::Running));
            return self.grow_up();
        }
        None
    }

    /// Ends the birth clock.
    fn grow_up(&mut self) -> Option<Transition> {
        self.clock = Clock::Running;
        self.tally = None;
        self.relief = None;
        self.clear()
    }

    fn raise(&mut self, tally: Tally) -> Transition {
        self.starved_since_ns = Some(tally.start_ns);
        Transition::Raised
    }

    fn clear(&mut self) -> Option<Transition> {
        self.starved_since_ns.take().map(|_| Transition::Recovered)
    }

    /// The verdict, with the numbers of the window that decided, or of the open one while nothing is decided.
    pub(super) fn judgement(&self, now_ns: u64) -> Judgement {
        let status = match (self.starved_since_ns, &self.decided) {
            (Some(_), _) => Status::Starved,
            (None, Some(_)) => Status::Fair,
            (None, None) => Status::Unknown,
        };
        let (tally, end_ns, clock) = self.decided.unwrap_or_else(|| {
            let open = self.tally.unwrap_or(Tally::starting(now_ns));
            (open, now_ns, self.clock)
        });
        Judgement {
            backend: self.backend,
            clock,
            status,
            expected: tally.expected,
            observed: tally.observed,
            probability: tally.probability(),
            window_start_ns: tally.start_ns,
            window_end_ns: end_ns,
            starved_since_ns: self.starved_since_ns,
        }
    }
}

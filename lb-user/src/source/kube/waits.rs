//! How long to wait before the API server is asked again.
//!
//! Pure: the time and the dice come in as arguments. The invariant: who could not be reached is asked again within half a
//! second however long it was away, because that costs it nothing; who answers that it will not serve is left alone, the
//! longer the more, and never less than it asks for. ADR 0016 has the sums.

use std::time::Duration;

use super::Timing;

/// What went wrong, by what it cost the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Nobody was met: no address, no connection. It cost the server nothing.
    Unreachable,
    /// Somebody was met and did not serve, for a reason that somebody may put right at any moment: a credential or a right
    /// that is missing, a certificate that does not fit, a cut, nonsense, a watch that ended.
    Unserved,
    /// The server says, or shows, that it has too much to do or is not well.
    Overloaded {
        /// How long it asks to be left alone.
        retry_after: Option<Duration>,
    },
}

/// The waits of one feed.
#[derive(Clone, Debug)]
pub(super) struct Waits {
    first: Duration,
    unreachable: Duration,
    patient: Duration,
    most: Duration,
    patience: Duration,
    overload_patience: Duration,
    /// Waits in a row since the last success, or since the server was met or lost.
    row: u32,
    /// When the row of tries began in which the server was met; `None` while nobody is met.
    met: Option<Duration>,
}

impl Waits {
    pub(super) fn new(timing: &Timing) -> Self {
        Self {
            first: timing.first_wait,
            unreachable: timing.unreachable_wait,
            patient: timing.patient_wait,
            most: timing.most_wait,
            patience: timing.patience,
            overload_patience: timing.overload_patience,
            row: 0,
            met: None,
        }
    }

    /// The wait after a failure at `now` (any clock that only goes on); `dice` lies in 0..=1 and draws evenly from half of
    /// to the whole wait, so that nodes that failed in the same instant do not come back in the same instant.
    pub(super) fn next(&mut self, trouble: Trouble, now: Duration, dice: f64) -> Duration {
        let most = match trouble {
            Trouble::Unreachable => {
                if self.met.take().is_some() {
                    self.row = 0;
                }
                self.unreachable
            }
            Trouble::Unserved => self.most_after(self.patience, now),
            Trouble::Overloaded { .. } => self.most_after(self.overload_patience, now),
        };
        let factor = 1_u32.checked_shl(self.row).unwrap_or(u32::MAX);
        self.row = (self.row + 1).min(31);
        let wait = self.first.saturating_mul(factor).min(most);
        let wait = wait.mul_f64(0.5 + 0.5 * dice);
        match trouble {
            Trouble::Overloaded {
                retry_after: Some(asked),
            } => wait.max(asked.min(self.most).mul_f64(1.0 + 0.25 * dice)),
            _ => wait,
        }
    }

    /// After a success: the next wait is a short one again.
    pub(super) fn reset(&mut self) {
        self.row = 0;
        self.met = None;
    }

    /// The longest wait where the server is met: short while there is patience, then growing with half of the time that
    /// has gone by since, so that the trouble is never prolonged by more than half.
    fn most_after(&mut self, patience: Duration, now: Duration) -> Duration {
        let began = *self.met.get_or_insert_with(|| {
            self.row = 0;
            now
        });
        let over = now.saturating_sub(began).saturating_sub(patience);
        (self.patient + over / 2).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_mins(1);
    const OVERLOADED: Trouble = Trouble::Overloaded { retry_after: None };

    /// All waits of a trouble that lasts, each with the time at which it began, counted from the first failure.
    fn waits(trouble: Trouble, lasts: Duration, dice: f64) -> Vec<(Duration, Duration)> {
        let mut waits = Waits::new(&Timing::default());
        let mut now = Duration::ZERO;
        let mut all = Vec::new();
        while now < lasts {
            let wait = waits.next(trouble, now, dice);
            all.push((now, wait));
            now += wait;
        }
        all
    }

    #[test]
    fn who_is_away_is_asked_within_half_a_second_however_long_it_was_away() {
        for (began, wait) in waits(Trouble::Unreachable, 60 * MINUTE, 1.0) {
            assert!(wait <= Duration::from_millis(500), "{wait:?} after {began:?}");
        }
        let first = waits(Trouble::Unreachable, MINUTE, 1.0)[0].1;
        assert_eq!(first, Timing::default().first_wait);
    }

    #[test]
    fn a_right_that_is_given_back_within_a_minute_is_used_within_a_second() {
        for (began, wait) in waits(Trouble::Unserved, 10 * MINUTE, 1.0) {
            let most = if began <= MINUTE {
                Duration::from_millis(700)
            } else {
                Duration::from_millis(700) + began.saturating_sub(MINUTE) / 2
            };
            assert!(wait <= most, "{wait:?} after {began:?}");
        }
    }

    #[test]
    fn a_refusal_that_lasts_costs_the_server_three_tries_a_minute_in_the_end() {
        for trouble in [Trouble::Unserved, OVERLOADED] {
            let late: Vec<Duration> = waits(trouble, 10 * MINUTE, 1.0)
                .into_iter()
                .filter(|(began, _)| *began > 5 * MINUTE)
                .map(|(_, wait)| wait)
                .collect();
            assert!(late.iter().all(|wait| *wait == Duration::from_secs(20)), "{late:?}");
        }
    }

    #[test]
    fn overload_is_met_with_less_patience_than_a_missing_right() {
        let within = |trouble| waits(trouble, MINUTE, 1.0).len();
        let (overloaded, unserved) = (within(OVERLOADED), within(Trouble::Unserved));
        assert!(2 * overloaded < unserved, "{overloaded} tries, {unserved} tries");
        let starting = waits(OVERLOADED, Duration::from_secs(10), 1.0);
        assert!(
            starting.iter().all(|(_, wait)| *wait <= Duration::from_millis(700)),
            "a server that starts answers so for some seconds: {starting:?}"
        );
    }

    #[test]
    fn what_the_server_asks_for_is_the_least_and_never_for_ever() {
        let asked = |seconds| Trouble::Overloaded {
            retry_after: Some(Duration::from_secs(seconds)),
        };
        for dice in [0.0, 0.3, 1.0] {
            for seconds in [1, 7, 20] {
                let wait = Waits::new(&Timing::default()).next(asked(seconds), MINUTE, dice);
                let least = Duration::from_secs(seconds);
                assert!(wait >= least && wait <= least.mul_f64(1.25), "{wait:?} for {least:?}");
            }
            let wait = Waits::new(&Timing::default()).next(asked(86_400), MINUTE, dice);
            assert!(wait <= Duration::from_secs(25), "{wait:?}");
        }
        let mut waits = Waits::new(&Timing::default());
        let none = waits.next(asked(0), MINUTE, 1.0);
        assert_eq!(
            none,
            Timing::default().first_wait,
            "0 asks for nothing, and gets a wait"
        );
    }

    #[test]
    fn nodes_that_fail_together_come_back_apart() {
        let at = |dice| Waits::new(&Timing::default()).next(Trouble::Unreachable, MINUTE, dice);
        assert_eq!(at(0.0) * 2, at(1.0));
        assert!(at(0.0) < at(0.5) && at(0.5) < at(1.0));
    }

    #[test]
    fn patience_begins_anew_when_the_server_comes_back_or_serves() {
        let timing = Timing::default();
        let mut waits = Waits::new(&timing);
        for minute in 0..10 {
            waits.next(Trouble::Unserved, minute * MINUTE, 1.0);
        }
        assert!(waits.next(Trouble::Unserved, 10 * MINUTE, 1.0) > timing.patient_wait);
        // The server was away, and has come back without its rights yet: that is a start, not a refusal of ten minutes.
        waits.next(Trouble::Unreachable, 11 * MINUTE, 1.0);
        assert_eq!(waits.next(Trouble::Unserved, 12 * MINUTE, 1.0), timing.first_wait);
        waits.next(Trouble::Unserved, 20 * MINUTE, 1.0);
        waits.reset();
        assert_eq!(waits.next(Trouble::Unserved, 21 * MINUTE, 1.0), timing.first_wait);
    }

    #[test]
    fn waits_stay_within_bounds_for_any_order_of_troubles() {
        let timing = Timing::default();
        let mut waits = Waits::new(&timing);
        let mut seed = 1_u64;
        let mut now = Duration::ZERO;
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let trouble = match seed >> 62 {
                0 => Trouble::Unreachable,
                1 => Trouble::Unserved,
                2 => OVERLOADED,
                _ => Trouble::Overloaded {
                    retry_after: Some(Duration::from_secs(seed >> 50 & 63)),
                },
            };
            let wait = waits.next(trouble, now, (seed >> 40 & 255) as f64 / 255.0);
            assert!(
                wait >= timing.first_wait / 2 && wait <= timing.most_wait.mul_f64(1.25),
                "{wait:?}"
            );
            now += wait;
        }
    }
}

//! The rates of false alarms over a fair random choice, by arithmetic instead of by dice.
//!
//! Connections come by a Poisson process, each goes to one of k backends with equal chance. A detector knows the number that
//! came, n, and a backend's part of it, which given n is binomial: so λ = n/k and o ~ Binomial(n, 1/k).

use lb_user::analysis::{
    poisson,
    starvation::{BIRTH_LATER_P, BIRTH_P, RUNNING_BUDGET_PER_DAY, RUNNING_EXPECTED, RUNNING_P},
};

/// Which rule the clocks follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A window closes at 15 + ln k and is held against 3e-7/k, every look at a birth against 1e-3/k.
    Written,
    /// The agent's: what short windows may spend is a part of the day's budget, and later looks at a birth spend less.
    Budgeted,
}

/// Seconds of a day.
const DAY: f64 = 86_400.0;

impl Rule {
    /// The bound on a window's probability over all backends, and the λ from which it may close.
    fn window(self, seconds: u32, k: f64) -> (f64, f64) {
        let least = RUNNING_EXPECTED + k.ln();
        match self {
            Self::Written => (RUNNING_P, least),
            Self::Budgeted => {
                let p = (RUNNING_BUDGET_PER_DAY * f64::from(seconds) / DAY).min(RUNNING_P);
                (p, least.max((k / p).ln()))
            }
        }
    }
}

/// False alarms of the running clock a day, over all `k` backends, at `rate` new connections a second and a reading each.
pub fn running_per_day(k: u32, rate: f64, rule: Rule) -> f64 {
    let size = f64::from(k);
    // How many came in one second; what lies beyond ten deviations is rarer than anything here.
    let spread = 10.0 * rate.sqrt() + 20.0;
    let first = (rate - spread).max(0.0) as usize;
    let arrivals: Vec<f64> = (first..=(rate + spread) as usize)
        .map(|n| (n as f64 * rate.ln() - rate - ln_factorial(n)).exp())
        .collect();
    // The chance that the window is open, by what came so far.
    let mut open = vec![1.0];
    let (mut alarms, mut seconds) = (0.0, 0.0);
    for second in 1..=86_400 {
        let left: f64 = open.iter().sum();
        if left < 1e-12 {
            break;
        }
        seconds += left;
        let mut next = vec![0.0; open.len() + first + arrivals.len()];
        for (n, chance) in open.iter().enumerate().filter(|&(_, &chance)| chance > 1e-18) {
            for (i, arrival) in arrivals.iter().enumerate() {
                next[n + first + i] += chance * arrival;
            }
        }
        let (p, enough) = rule.window(second, size);
        let close = ((enough * size).ceil() as usize).min(next.len());
        for (n, chance) in next.iter().enumerate().skip(close).filter(|&(_, &chance)| chance > 0.0) {
            alarms += chance * size * chance_of_alarm(n, k, p / size);
        }
        next.truncate(close);
        open = next;
    }
    alarms / seconds * DAY
}

/// The chance that one of `k` backends has so few of `n` that it alarms.
fn chance_of_alarm(n: usize, k: u32, p: f64) -> f64 {
    let share = 1.0 / f64::from(k);
    let expected = n as f64 * share;
    // Binomial terms from zero on, each from the one before.
    let mut term = (n as f64 * (-share).ln_1p()).exp();
    let mut sum = 0.0;
    for observed in 0..n {
        let alarms = (observed as f64) < expected / 4.0 && poisson::at_most(observed as u64, expected) < p;
        if !alarms {
            break;
        }
        sum += term;
        term *= (n - observed) as f64 / (observed as f64 + 1.0) * share / (1.0 - share);
    }
    sum
}

/// The chance that the birth clock alarms falsely over one endpoint of `k`, if it looked after every single connection.
///
/// That is an upper bound for looks once a second.
pub fn birth(k: u32, rule: Rule) -> f64 {
    let share = 1.0 / f64::from(k);
    let first = BIRTH_P * share;
    let later = match rule {
        Rule::Written => first,
        Rule::Budgeted => BIRTH_LATER_P * share,
    };
    let least = -first.ln();
    // An endpoint that is still judged at four times the least λ is rarer than anything here.
    let most = (4.0 * least / share) as usize;
    let mut judged = vec![1.0_f64];
    let mut alarms = 0.0;
    let mut bound = first;
    for n in 1..=most {
        let mut next = vec![0.0; judged.len() + 1];
        for (o, chance) in judged.iter().enumerate() {
            next[o] += chance * (1.0 - share);
            next[o + 1] += chance * share;
        }
        let expected = n as f64 * share;
        if expected >= least {
            let healthy = (expected / 2.0).ceil() as usize;
            next.truncate(healthy);
            for (o, chance) in next.iter_mut().enumerate() {
                if (o as f64) < expected / 4.0 && poisson::at_most(o as u64, expected) < bound {
                    alarms += *chance;
                    *chance = 0.0;
                }
            }
            bound = later;
        }
        judged = next;
    }
    alarms
}

/// False alarms of the running clock a day, on average over sizes and rates spread evenly over their logarithm.
pub fn running_per_day_on_average(rule: Rule) -> f64 {
    const STEPS: u32 = 12;
    let at = |low: f64, high: f64, step: u32| low * (high / low).powf((f64::from(step) + 0.5) / f64::from(STEPS));
    let mut sum = 0.0;
    for size in 0..STEPS {
        for rate in 0..STEPS {
            let k = at(2.0, 100.0, size).round() as u32;
            sum += running_per_day(k, at(1.0, 1000.0, rate), rule);
        }
    }
    sum / f64::from(STEPS * STEPS)
}

fn ln_factorial(n: usize) -> f64 {
    (2..=n).map(|i| (i as f64).ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_one_second_is_the_binomial() {
        // 32 of 2: an alarm needs a zero share, (1/2)^32 on either side, or one connection.
        let found = chance_of_alarm(32, 2, 1.5e-7);
        assert!((found / 0.5_f64.powi(32) - 1.0).abs() < 1e-9, "{found:e}");
        assert!(chance_of_alarm(30, 2, 1.5e-7).abs() < f64::MIN_POSITIVE);
    }

    #[test]
    fn windows_follow_one_another() {
        // At 1 a second over 2 backends a window takes 32 connections, and what else came within the reading's second, by
        // which its chance of a false alarm is lower: halved by each.
        let found = running_per_day(2, 1.0, Rule::Written);
        let once = 2.0 * chance_of_alarm(32, 2, 1.5e-7);
        let windows = found / once / (DAY / 32.0);
        assert!((0.7..=1.0).contains(&windows), "{windows} at {found:e}");
    }
}

//! The lower tail of the Poisson distribution: how often chance alone gives so few.
//!
//! It is exact far out, where the thresholds of the starvation detector lie: about ten digits, down to the smallest number
//! that a double holds (1e-308), and 0 below that.

use super::gamma;

/// P(Poisson(`lambda`) ≤ `observed`).
///
/// Gives 1 for a `lambda` of 0, below 0 or that is not a number: nothing was expected, so nothing is missing.
pub fn at_most(observed: u64, lambda: f64) -> f64 {
    if lambda.is_nan() || lambda <= 0.0 {
        return 1.0;
    }
    if lambda.is_infinite() {
        return 0.0;
    }
    if observed == 0 {
        return (-lambda).exp();
    }
    gamma::upper(observed as f64 + 1.0, lambda)
}

/// The largest mean that `observed` events still allow: the one at which so few come with the probability `alpha`.
///
/// This is the one-sided upper confidence bound; with nothing seen and `alpha` = 5 % it is the rule of three. Gives infinity
/// unless 0 < `alpha` < 1.
pub fn upper_bound(observed: u64, alpha: f64) -> f64 {
    if !(alpha > 0.0 && alpha < 1.0) {
        return f64::INFINITY;
    }
    if observed == 0 {
        return -alpha.ln();
    }
    let mut low = 0.0;
    let mut high = observed as f64 + 1.0;
    while at_most(observed, high) > alpha {
        low = high;
        high *= 2.0;
    }
    // Halving, until the bounds are neighbours for every purpose.
    while high - low > high * 1e-12 {
        let middle = low.midpoint(high);
        if at_most(observed, middle) > alpha {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "edges are exact")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sum itself, smallest terms first, each from its logarithm.
    fn sum(observed: u64, lambda: f64) -> f64 {
        let mut log = -lambda;
        let mut logs = vec![log];
        for i in 1..=observed {
            log += (lambda / i as f64).ln();
            logs.push(log);
        }
        logs.sort_by(f64::total_cmp);
        logs.into_iter().map(f64::exp).sum()
    }

    fn close(found: f64, wanted: f64) {
        assert!(
            (found - wanted).abs() <= wanted.abs() * 1e-9,
            "found {found:e}, wanted {wanted:e}"
        );
    }

    #[test]
    fn meets_the_sum() {
        for lambda in [0.01, 0.7, 3.0, 9.2, 16.0, 40.0, 120.0, 600.0] {
            for observed in [0, 1, 2, 5, 9, 30, 100, 400] {
                close(at_most(observed, lambda), sum(observed, lambda).min(1.0));
            }
        }
    }

    #[test]
    fn stays_exact_far_out() {
        // e^−700 (1 + 700 + 700²/2), a number of 300 zeros.
        close(at_most(2, 700.0), (-700.0_f64).exp() * (1.0 + 700.0 + 245_000.0));
        assert_eq!(at_most(0, 1e6), 0.0);
        assert_eq!(at_most(3, f64::INFINITY), 0.0);
    }

    #[test]
    fn edges_give_one() {
        for lambda in [0.0, -1.0, f64::NAN] {
            assert_eq!(at_most(0, lambda), 1.0);
        }
        assert!(at_most(u64::MAX, 5.0) > 0.999_999);
    }

    #[test]
    fn the_bound_is_the_rule_of_three_and_its_kin() {
        close(upper_bound(0, 0.05), 20_f64.ln());
        // Half the customary 10 % points of χ² with 2(o + 1) degrees.
        close((upper_bound(1, 0.05) * 1e6).round() / 1e6, 4.743_865);
        close((upper_bound(10, 0.05) * 1e5).round() / 1e5, 16.962_22);
        assert_eq!(upper_bound(3, 0.0), f64::INFINITY);
        assert_eq!(upper_bound(3, 1.0), f64::INFINITY);
        assert_eq!(upper_bound(3, f64::NAN), f64::INFINITY);
    }

    proptest! {
        #[test]
        fn grows_with_the_count_and_falls_with_the_mean(observed in 0_u64..5_000, lambda in 0.001_f64..20_000.0) {
            let p = at_most(observed, lambda);
            prop_assert!((0.0..=1.0).contains(&p));
            prop_assert!(at_most(observed + 1, lambda) >= p - 1e-12);
            prop_assert!(at_most(observed, lambda * 1.01) <= p + 1e-12);
        }

        #[test]
        fn the_bound_turns_the_tail_around(observed in 0_u64..3_000, alpha in 1e-9_f64..0.5) {
            let bound = upper_bound(observed, alpha);
            prop_assert!((at_most(observed, bound) / alpha - 1.0).abs() < 1e-6);
        }
    }
}

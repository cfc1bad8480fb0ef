//! The upper tail of the χ² distribution, for the alarm on uneven load.
//!
//! It is accurate to about ten digits, also far out in the tail where the alarm's threshold of 1e-6 lies.

use super::gamma;

/// The probability that a χ² variable with `degrees` degrees of freedom is at least `x`.
///
/// Gives 1 for `x` ≤ 0, for no degrees of freedom and for arguments that are not numbers.
pub fn upper_tail(degrees: u32, x: f64) -> f64 {
    if degrees == 0 || x.is_nan() || x <= 0.0 {
        return 1.0;
    }
    if x.is_infinite() {
        return 0.0;
    }
    gamma::upper(f64::from(degrees) / 2.0, x / 2.0)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "edges are exact")]
mod tests {
    use super::*;

    fn close(found: f64, wanted: f64) {
        assert!(
            (found - wanted).abs() <= wanted.abs() * 1e-9,
            "found {found:e}, wanted {wanted:e}"
        );
    }

    /// Even degrees have a closed form: e^(−x/2) Σ (x/2)^i / i! for i < degrees/2.
    fn closed_form(degrees: u32, x: f64) -> f64 {
        let half = x / 2.0;
        let mut term = 1.0;
        let mut sum = 1.0;
        for i in 1..degrees / 2 {
            term *= half / f64::from(i);
            sum += term;
        }
        (-half).exp() * sum
    }

    #[test]
    fn meets_the_closed_form_for_even_degrees() {
        for degrees in [2, 4, 10, 20, 98] {
            for x in [0.1, 1.0, 5.0, 20.0, 60.0, 150.0] {
                close(upper_tail(degrees, x), closed_form(degrees, x));
            }
        }
    }

    #[test]
    fn meets_tabled_values_for_odd_degrees() {
        // The customary 5 %, 1 % and 0.1 % points, to the digits that tables print.
        for (degrees, x, p) in [
            (1, 3.841_458_820_694_124, 0.05),
            (1, 6.634_896_601_021_213, 0.01),
            (3, 7.814_727_903_251_178, 0.05),
            (5, 11.070_497_693_516_351, 0.05),
            (9, 27.877_164_871_256_57, 0.001),
        ] {
            close(upper_tail(degrees, x), p);
        }
    }

    #[test]
    fn stays_exact_far_out() {
        close(upper_tail(2, 100.0), (-50.0_f64).exp());
        assert_eq!(upper_tail(3, f64::INFINITY), 0.0);
        assert!(upper_tail(99, 1e6) >= 0.0);
    }

    #[test]
    fn edges_give_one() {
        assert_eq!(upper_tail(0, 5.0), 1.0);
        assert_eq!(upper_tail(4, 0.0), 1.0);
        assert_eq!(upper_tail(4, f64::NAN), 1.0);
    }

    #[test]
    fn falls_as_x_grows() {
        for degrees in [1, 2, 3, 9, 99, 999] {
            let mut last = 1.0;
            for step in 1..400 {
                let p = upper_tail(degrees, f64::from(step) * 3.0);
                assert!(p <= last + 1e-12, "degrees {degrees}, step {step}");
                last = p;
            }
        }
    }
}

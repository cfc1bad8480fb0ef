//! The upper tail of the χ² distribution, for the alarm on uneven load.
//!
//! Only what that needs is here: the regularised upper incomplete gamma function for positive arguments. It is accurate to
//! about ten digits, also far out in the tail where the alarm's threshold of 1e-6 lies.

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
    upper_gamma(f64::from(degrees) / 2.0, x / 2.0).clamp(0.0, 1.0)
}

/// Terms after which both expansions have long converged (they need some √a of them).
const MAX_TERMS: u32 = 10_000;

/// Q(a, x): the series of its complement below the mean, the continued fraction above.
fn upper_gamma(a: f64, x: f64) -> f64 {
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        1.0 - scale * series(a, x)
    } else {
        scale * fraction(a, x)
    }
}

/// Σ xⁿ / (a (a+1) … (a+n)).
fn series(a: f64, x: f64) -> f64 {
    let mut term = 1.0 / a;
    let mut sum = term;
    for n in 1..MAX_TERMS {
        term *= x / (a + f64::from(n));
        sum += term;
        if term < sum * f64::EPSILON {
            break;
        }
    }
    sum
}

/// The continued fraction for Q without its scale, evaluated from the front by Lentz's method.
fn fraction(a: f64, x: f64) -> f64 {
    // Stands in for a denominator that comes out as zero.
    const TINY: f64 = 1e-300;
    let nonzero = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut partial = x + 1.0 - a;
    let mut numerators = 1.0 / TINY;
    let mut denominators = 1.0 / partial;
    let mut value = denominators;
    for n in 1..MAX_TERMS {
        let n = f64::from(n);
        let coefficient = n * (a - n);
        partial += 2.0;
        denominators = 1.0 / nonzero(coefficient * denominators + partial);
        numerators = nonzero(partial + coefficient / numerators);
        let step = denominators * numerators;
        value *= step;
        if (step - 1.0).abs() < f64::EPSILON {
            break;
        }
    }
    value
}

/// ln Γ(a) for a > 0: Stirling's series, after moving small arguments up to where it is exact to double precision.
fn ln_gamma(mut a: f64) -> f64 {
    let mut shift = 0.0;
    while a < 12.0 {
        shift += a.ln();
        a += 1.0;
    }
    let inverse = 1.0 / a;
    let square = inverse * inverse;
    let series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square * (1.0 / 1680.0))));
    (a - 0.5) * a.ln() - a + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
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

//! The regularised incomplete gamma function: what the χ² and the Poisson distribution have in common.
//!
//! Only what those two need is here, for positive arguments. It is accurate to about ten digits, also far out in the tail,
//! down to the smallest number that a double holds; for a above a million, to some four digits.

/// Above this the expansions take too many terms, and the cube root of a gamma variable is normal for every purpose.
const LARGE: f64 = 1e6;

/// Terms after which both expansions have converged below [`LARGE`] (they need some 9 √a of them).
const MAX_TERMS: u32 = 10_000;

/// Q(a, x) = Γ(a, x) / Γ(a) for a > 0 and x > 0: the part of the gamma density beyond `x`.
///
/// The series of its complement below the mean, the continued fraction above: so a small result is never a difference.
pub(super) fn upper(a: f64, x: f64) -> f64 {
    if a > LARGE {
        return upper_of_large(a, x);
    }
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    let part = if x < a + 1.0 {
        1.0 - scale * series(a, x)
    } else {
        scale * fraction(a, x)
    };
    part.clamp(0.0, 1.0)
}

/// Q(a, x) by Wilson and Hilferty's cube root; the normal tail is ½ Q(½, z²/2).
fn upper_of_large(a: f64, x: f64) -> f64 {
    let z = ((x / a).cbrt() - (1.0 - 1.0 / (9.0 * a))) * 3.0 * a.sqrt();
    let beyond = 0.5 * upper(0.5, (z * z / 2.0).max(f64::MIN_POSITIVE));
    if z > 0.0 { beyond } else { 1.0 - beyond }
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
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_that_of_the_factorial() {
        let mut factorial = 0.0_f64;
        for n in 1..60 {
            assert!(
                (ln_gamma(f64::from(n)) - factorial).abs() < 1e-11 * (1.0 + factorial),
                "Γ({n})"
            );
            factorial += f64::from(n).ln();
        }
        assert!((ln_gamma(0.5) - std::f64::consts::PI.sqrt().ln()).abs() < 1e-12);
    }

    #[test]
    fn of_one_it_is_the_exponential() {
        for x in [1e-3_f64, 0.5, 1.9, 2.1, 40.0, 700.0] {
            let wanted = (-x).exp();
            assert!((upper(1.0, x) / wanted - 1.0).abs() < 1e-10, "Q(1, {x})");
        }
    }

    #[test]
    fn large_arguments_go_on_where_the_expansions_end() {
        let (below, above) = (LARGE, LARGE * (1.0 + 1e-12));
        for z in [-5.0, -1.0, 0.0, 0.5, 2.0, 4.0] {
            let x = LARGE + z * LARGE.sqrt();
            let (exact, rough) = (upper(below, x), upper(above, x));
            assert!((rough / exact - 1.0).abs() < 1e-3, "at {z}: {exact:e}, {rough:e}");
        }
        assert!((upper(1e15, 1e15) - 0.5).abs() < 1e-6);
        assert!(upper(1e15, 1.1e15) < 1e-300);
        assert!(upper(1e15, 0.9e15) > 1.0 - 1e-12);
    }

    #[test]
    fn the_two_expansions_meet() {
        for a in [1.0_f64, 2.5, 30.0, 1e3, 1e6] {
            let scale = |x: f64| (a * x.ln() - x - ln_gamma(a)).exp();
            let x = a + 1.0;
            let below = 1.0 - scale(x) * series(a, x);
            assert!((below - upper(a, x)).abs() < 1e-9, "at {a}");
        }
    }
}

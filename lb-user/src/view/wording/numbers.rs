//! Numbers in people's form: `1,012`, `33.3 %`, `28 s`, `1 in 10^144`.

/// A count with a comma between thousands.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A count with its noun, in the plural unless it is 1.
pub fn counted(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(n), if n == 1 { "" } else { "s" })
}

/// An expected number: whole from 100 on, with one decimal below.
pub fn expected(value: f64) -> String {
    if value >= 99.95 {
        count(value.round() as u64)
    } else {
        trimmed(value)
    }
}

/// A share (0 to 1) as a percentage with one decimal; never rounded to none or all.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 0.0 && percent < 0.05 {
        "under 0.1 %".to_owned()
    } else if (99.95..100.0).contains(&percent) {
        "over 99.9 %".to_owned()
    } else {
        format!("{} %", trimmed(percent))
    }
}

/// `part` of `whole` as a percentage; none of nothing is 0 %.
pub fn percent_of(part: u64, whole: u64) -> String {
    percent(if whole == 0 { 0.0 } else { part as f64 / whole as f64 })
}

/// A probability as `12 in 100`, `1 in 1,200` or, below one in a million, a power of ten that is not less than it.
pub fn chance(probability: f64) -> String {
    if probability >= 0.1 {
        return format!("{:.0} in 100", probability.min(1.0) * 100.0);
    }
    if probability > 1.000_001e-6 {
        return format!("1 in {}", count(two_digits(1.0 / probability)));
    }
    if probability <= 1e-300 {
        return "less than 1 in 10^300".to_owned();
    }
    // The small addition undoes what the logarithm of an exact power lost.
    format!("1 in 10^{:.0}", (-probability.log10() + 1e-9).floor())
}

/// A duration: `72 µs`, `4.1 ms`, `28 s`, `2 min 5 s`, `1 h 2 min`, `3 d 4 h`.
pub fn seconds(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    if seconds == 0.0 {
        return "0 s".to_owned();
    }
    for (scale, unit) in [(1e6, "µs"), (1e3, "ms")] {
        let scaled = seconds * scale;
        if scaled < 999.5 {
            return format!(
                "{} {unit}",
                if scaled < 9.95 {
                    trimmed(scaled)
                } else {
                    format!("{scaled:.0}")
                }
            );
        }
    }
    // A decimal is kept up to here, because it tells on which side of 60 s a reuse is.
    if seconds < 119.95 {
        return format!("{} s", trimmed(seconds));
    }
    let whole = seconds.round() as u64;
    let two = |high: u64, high_unit: &str, low: u64, low_unit: &str| {
        if low == 0 {
            format!("{} {high_unit}", count(high))
        } else {
            format!("{} {high_unit} {low} {low_unit}", count(high))
        }
    };
    match whole {
        0..7_200 => two(whole / 60, "min", whole % 60, "s"),
        7_200..172_800 => two(whole / 3_600, "h", whole / 60 % 60, "min"),
        _ => two(whole / 86_400, "d", whole / 3_600 % 24, "h"),
    }
}

/// A measure without a unit, such as a dispersion: whole from 100 on, one decimal from 10 on, two below.
pub fn measure(value: f64) -> String {
    if value >= 9.995 {
        expected(value)
    } else {
        format!("{value:.2}")
    }
}

/// One decimal, unless it is 0.
fn trimmed(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
}

/// The two leading digits of a number, the others 0, rounded down so that a chance is never made smaller than it is.
fn two_digits(value: f64) -> u64 {
    let whole = (value * (1.0 + 1e-12)).floor() as u64;
    let step = 10_u64.pow(whole.max(1).ilog10().saturating_sub(1));
    whole / step * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_commas() {
        for (n, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (28_232, "28,232"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(count(n), text);
        }
        assert_eq!(
            (counted(1, "client"), counted(2, "client")),
            ("1 client".into(), "2 clients".into())
        );
    }

    #[test]
    fn shares_are_never_rounded_to_none_or_all() {
        for (share, text) in [
            (0.0, "0 %"),
            (0.000_1, "under 0.1 %"),
            (1.0 / 3.0, "33.3 %"),
            (0.5, "50 %"),
            (0.999_9, "over 99.9 %"),
            (1.0, "100 %"),
            (1.545, "154.5 %"),
        ] {
            assert_eq!(percent(share), text);
        }
        assert_eq!(percent_of(0, 0), "0 %");
        assert_eq!(percent_of(1, 8), "12.5 %");
    }

    #[test]
    fn a_chance_is_one_in_so_many_and_never_smaller_than_it_is() {
        for (probability, text) in [
            (1.0, "100 in 100"),
            (0.12, "12 in 100"),
            (0.01, "1 in 100"),
            (8.3e-4, "1 in 1,200"),
            (2e-6, "1 in 500,000"),
            (1e-6, "1 in 10^6"),
            (1e-12, "1 in 10^12"),
            (1.6e-145, "1 in 10^144"),
            (9.9e-146, "1 in 10^145"),
            (0.0, "less than 1 in 10^300"),
        ] {
            assert_eq!(chance(probability), text, "{probability}");
        }
    }

    #[test]
    fn durations_have_the_unit_that_fits() {
        for (length, text) in [
            (-1.0, "0 s"),
            (0.000_072, "72 µs"),
            (0.000_4, "400 µs"),
            (0.001_3, "1.3 ms"),
            (0.013, "13 ms"),
            (4.12, "4.1 s"),
            (28.0, "28 s"),
            (61.5, "61.5 s"),
            (119.0, "119 s"),
            (119.96, "2 min"),
            (125.0, "2 min 5 s"),
            (3_725.0, "62 min 5 s"),
            (10_800.0, "3 h"),
            (273_600.0, "3 d 4 h"),
        ] {
            assert_eq!(seconds(length), text);
        }
    }

    #[test]
    fn measures_have_the_digits_that_matter() {
        for (value, text) in [(0.914, "0.91"), (1.0, "1.00"), (12.34, "12.3"), (501.3, "501")] {
            assert_eq!(measure(value), text);
        }
        for (value, text) in [(333.3, "333"), (1_333.3, "1,333"), (33.33, "33.3"), (4.0, "4")] {
            assert_eq!(expected(value), text);
        }
    }
}

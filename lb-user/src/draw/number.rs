//! Numbers as people read them.

/// A count with a comma between groups of three digits.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A share (0 to 1) in percent, finer where it is small.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 0.0 && percent < 0.05 {
        "< 0.1 %".to_owned()
    } else if percent == 0.0 || percent >= 99.95 {
        format!("{percent:.0} %")
    } else {
        format!("{percent:.1} %")
    }
}

/// A number in few characters: `0.25`, `7.5`, `340`, `12k`, `3.4M`.
pub(crate) fn compact(value: f64) -> String {
    let trim = |text: String| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    };
    match value.abs() {
        size if size >= 1e9 => format!("{value:.1e}"),
        size if size >= 999_500.0 => trim(format!("{:.1}", value / 1e6)) + "M",
        size if size >= 10_000.0 => trim(format!("{:.0}", value / 1e3)) + "k",
        size if size >= 1_000.0 => trim(format!("{:.1}", value / 1e3)) + "k",
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => trim(format!("{value:.1}")),
        _ => trim(format!("{value:.2}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        for (n, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(n), text);
        }
        for (share, text) in [(0.0, "0 %"), (0.0001, "< 0.1 %"), (0.333_3, "33.3 %"), (1.0, "100 %")] {
            assert_eq!(percent(share), text);
        }
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (1.0, "1"),
            (12.34, "12.3"),
            (340.4, "340"),
            (1_500.0, "1.5k"),
            (12_345.0, "12k"),
            (3_400_000.0, "3.4M"),
            (2e12, "2.0e12"),
        ] {
            assert_eq!(compact(value), text);
        }
    }
}

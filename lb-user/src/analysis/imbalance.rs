//! How even a set of counts is, next to what chance alone would give.
//!
//! The measure that means the same at every sample size is the dispersion D = X²/(k−1); max/mean and the coefficient of
//! variation are given beside it because people know them, and never without the sample size.

use super::chi_square;

/// The smallest expected count at which the χ² approximation holds.
pub const MIN_EXPECTED: f64 = 5.0;
/// The alarm's bound on the probability that chance alone is at least as uneven.
pub const ALARM_P: f64 = 1e-6;
/// The alarm's bound on a share's deviation from fair (a fraction of the fair share).
pub const ALARM_DEVIATION: f64 = 0.25;

/// What one backend got, and what its weight entitles it to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Connections expected by weight.
    pub expected: f64,
    /// Connections counted.
    pub observed: u64,
}

/// The evenness of one set of eligible backends over one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Imbalance {
    /// Connections in the sample.
    pub n: u64,
    /// Eligible backends: those with a weight.
    pub backends: usize,
    /// The largest observed/expected; none without connections.
    pub max_over_mean: Option<f64>,
    /// Standard deviation of observed/expected around 1, weighted by share; none without connections.
    pub cv: Option<f64>,
    /// X² = Σ(o−e)²/e.
    pub chi_square: f64,
    /// X²/(k−1): 1 is chance, below 1 is better than chance; none with fewer than two backends or no connections.
    pub dispersion: Option<f64>,
    /// P(χ² with k−1 degrees ≥ X²): how often chance alone is at least this uneven.
    pub p_upper: f64,
    /// True while some expected count is below [`MIN_EXPECTED`]: then no number here should alarm anybody.
    pub insufficient: bool,
    /// True when the unevenness is beyond chance *and* large enough to matter.
    pub alarm: bool,
}

/// Judges (weight, count) pairs; pairs of weight 0 are not eligible and do not take part.
pub fn by_weight(pairs: impl IntoIterator<Item = (u32, u64)>) -> Imbalance {
    let eligible: Vec<(u32, u64)> = pairs.into_iter().filter(|&(weight, _)| weight > 0).collect();
    let weights: f64 = eligible.iter().map(|&(weight, _)| f64::from(weight)).sum();
    let n = eligible
        .iter()
        .fold(0_u64, |sum, &(_, count)| sum.saturating_add(count));
    let shares: Vec<Share> = eligible
        .iter()
        .map(|&(weight, observed)| Share {
            expected: n as f64 * f64::from(weight) / weights,
            observed,
        })
        .collect();
    of_shares(&shares)
}

/// Judges counts against expectations that sum to the same total, such as those of a window over changing members.
pub fn of_shares(shares: &[Share]) -> Imbalance {
    let n = shares
        .iter()
        .fold(0_u64, |sum, share| sum.saturating_add(share.observed));
    let compared: Vec<&Share> = shares.iter().filter(|share| share.expected > 0.0).collect();
    let chi_square: f64 = compared
        .iter()
        .map(|share| deviation(share).powi(2) * share.expected)
        .sum();
    let max_over_mean = compared
        .iter()
        .map(|share| share.observed as f64 / share.expected)
        .reduce(f64::max);
    let degrees = u32::try_from(shares.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let insufficient = shares.is_empty() || shares.iter().any(|share| share.expected < MIN_EXPECTED);
    let p_upper = chi_square::upper_tail(degrees, chi_square);
    let worst = compared.iter().map(|share| deviation(share).abs()).fold(0.0, f64::max);
    Imbalance {
        n,
        backends: shares.len(),
        max_over_mean,
        cv: (n > 0 && !compared.is_empty()).then(|| (chi_square / n as f64).sqrt()),
        chi_square,
        dispersion: (degrees > 0 && n > 0).then(|| chi_square / f64::from(degrees)),
        p_upper,
        insufficient,
        alarm: !insufficient && degrees > 0 && p_upper < ALARM_P && worst > ALARM_DEVIATION,
    }
}

/// How far a share is from fair, as a fraction of fair.
fn deviation(share: &Share) -> f64 {
    share.observed as f64 / share.expected - 1.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn equal(counts: &[u64]) -> Imbalance {
        by_weight(counts.iter().map(|&count| (1, count)))
    }

    #[test]
    fn an_even_split_is_perfect() {
        let even = equal(&[100, 100, 100]);
        assert_eq!(even.n, 300);
        assert_eq!(even.max_over_mean, Some(1.0));
        assert_eq!(even.cv, Some(0.0));
        assert_eq!(even.dispersion, Some(0.0));
        assert!(!even.insufficient && !even.alarm);
    }

    #[test]
    fn the_founding_story_alarms() {
        let starved = equal(&[515, 485, 0]);
        assert!(starved.alarm);
        assert!(starved.dispersion.is_some_and(|d| d > 100.0), "{starved:?}");
        assert!(!equal(&[333, 333, 334]).alarm);
    }

    #[test]
    fn few_connections_are_insufficient_and_never_alarm() {
        let few = equal(&[8, 0, 0]);
        assert!(few.insufficient);
        assert!(!few.alarm);
    }

    #[test]
    fn beyond_chance_but_small_does_not_alarm() {
        // 2 % off with a million connections each: certainly not chance, and nobody's problem.
        let slight = equal(&[1_020_000, 980_000]);
        assert!(slight.p_upper < ALARM_P);
        assert!(!slight.alarm);
    }

    #[test]
    fn large_but_within_chance_does_not_alarm() {
        let noisy = equal(&[10, 5]);
        assert!(!noisy.insufficient && !noisy.alarm, "{noisy:?}");
    }

    #[test]
    fn weights_set_what_is_fair() {
        let fair = by_weight([(3, 300), (1, 100)]);
        assert_eq!(fair.max_over_mean, Some(1.0));
        let turned = by_weight([(3, 100), (1, 300)]);
        assert_eq!(turned.max_over_mean, Some(3.0));
        assert!(turned.alarm);
    }

    #[test]
    fn weight_zero_takes_no_part() {
        let two = by_weight([(1, 50), (1, 50), (0, 7)]);
        assert_eq!((two.n, two.backends), (100, 2));
    }

    #[test]
    fn nothing_to_compare_gives_nothing() {
        let none = equal(&[]);
        assert_eq!(
            (none.n, none.max_over_mean, none.cv, none.dispersion),
            (0, None, None, None)
        );
        assert!(!none.alarm);
        let idle = equal(&[0, 0]);
        assert_eq!((idle.max_over_mean, idle.dispersion), (None, None));
        assert!(idle.insufficient);
        let alone = equal(&[500]);
        assert_eq!((alone.max_over_mean, alone.dispersion), (Some(1.0), None));
        assert!(!alone.alarm);
    }

    proptest! {
        #[test]
        fn the_measures_agree_with_each_other(counts in proptest::collection::vec(0_u64..10_000, 2..40)) {
            let found = equal(&counts);
            let n: u64 = counts.iter().sum();
            prop_assert_eq!(found.n, n);
            prop_assert!((0.0..=1.0).contains(&found.p_upper));
            if n > 0 {
                let mean = n as f64 / counts.len() as f64;
                let variance = counts.iter().map(|&c| (c as f64 - mean).powi(2)).sum::<f64>() / counts.len() as f64;
                let most = counts.iter().copied().max().unwrap_or_default() as f64;
                let close = |found: Option<f64>, wanted: f64| found.is_some_and(|found| (found - wanted).abs() < 1e-9);
                prop_assert!(close(found.cv, variance.sqrt() / mean));
                prop_assert!(close(found.max_over_mean, most / mean));
                prop_assert!(most / mean >= 1.0 - 1e-9);
            }
        }

        #[test]
        fn scaling_all_weights_changes_nothing(pairs in proptest::collection::vec((1_u32..100, 0_u64..1000), 1..20), by in 1_u32..50) {
            let plain = by_weight(pairs.iter().copied());
            let scaled = by_weight(pairs.iter().map(|&(weight, count)| (weight * by, count)));
            prop_assert!((plain.chi_square - scaled.chi_square).abs() <= 1e-6 * (1.0 + plain.chi_square));
            prop_assert_eq!(plain.insufficient, scaled.insufficient);
        }

        #[test]
        fn fair_dice_do_not_alarm(seed in any::<u64>(), k in 2_usize..12, n in 200_u32..4000) {
            // A false alarm is rarer than one in a million windows, so a few hundred cases see none.
            let mut state = seed;
            let mut counts = vec![0_u64; k];
            for _ in 0..n {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^= z >> 31;
                counts[(z % k as u64) as usize] += 1;
            }
            prop_assert!(!equal(&counts).alarm, "{:?}", counts);
        }
    }
}

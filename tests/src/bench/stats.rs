//! Order statistics of samples, without interpolation: every number that is printed was measured.

/// The value below which a fraction `q` of the samples lies; sorts them. Zero without samples.
pub(super) fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let last = samples.len().saturating_sub(1);
    let at = (q * samples.len() as f64) as usize;
    samples.get(at.min(last)).copied().unwrap_or(0.0)
}

/// The middle sample; sorts them.
pub(super) fn median(samples: &mut [f64]) -> f64 {
    quantile(samples, 0.5)
}

/// The smallest sample.
pub(super) fn min(samples: &[f64]) -> f64 {
    samples.iter().copied().reduce(f64::min).unwrap_or(0.0)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the values are picked, not computed")]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let mut samples: Vec<f64> = (0..100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut samples, 0.01), 1.0);
        assert_eq!(median(&mut samples), 50.0);
        assert_eq!(quantile(&mut samples, 1.0), 99.0);
        assert_eq!(min(&samples), 0.0);
        assert_eq!(median(&mut []), 0.0);
    }
}

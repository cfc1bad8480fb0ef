//! Scales from values to places on a sheet, and the ticks of their axes.

use crate::view::Timestamp;

/// A mapping from a range of values to a range of places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// The smallest and the largest value; they differ.
    domain: (f64, f64),
    places: (f64, f64),
    log: bool,
}

impl Scale {
    /// A scale on which equal differences are equally far apart.
    pub(crate) fn linear(domain: (f64, f64), places: (f64, f64)) -> Self {
        let (low, high) = domain;
        let high = if high > low { high } else { low + 1.0 };
        Self {
            domain: (low, high),
            places,
            log: false,
        }
    }

    /// A scale on which equal ratios are equally far apart; it covers whole decades and needs positive values.
    pub(crate) fn log(domain: (f64, f64), places: (f64, f64)) -> Self {
        let low = domain.0.max(f64::MIN_POSITIVE).log10().floor();
        let high = domain.1.max(f64::MIN_POSITIVE).log10().ceil().max(low + 1.0);
        Self {
            domain: (low, high),
            places,
            log: true,
        }
    }

    /// Where a value is; values beyond the ends are at the ends.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let value = if self.log {
            value.max(f64::MIN_POSITIVE).log10()
        } else {
            value
        };
        let (low, high) = self.domain;
        let part = ((value - low) / (high - low)).clamp(0.0, 1.0);
        self.places.0 + part * (self.places.1 - self.places.0)
    }

    /// The values that get a tick: round ones, about `wanted` of them; decades on a logarithmic scale.
    pub(crate) fn ticks(&self, wanted: usize) -> Vec<f64> {
        let (low, high) = self.domain;
        if self.log {
            let decades = (high - low) as usize;
            let step = decades.div_ceil(wanted.max(1)).max(1);
            return (0..=decades)
                .step_by(step)
                .map(|i| 10f64.powf(low + i as f64))
                .collect();
        }
        let step = round_step((high - low) / wanted.max(1) as f64);
        let first = (low / step).ceil();
        (0..)
            .map(|i| (first + f64::from(i)) * step)
            .take_while(|value| *value <= high + step * 1e-9)
            .take(64)
            .collect()
    }
}

/// The next larger of 1, 2 and 5 times a power of ten.
fn round_step(rough: f64) -> f64 {
    let rough = rough.max(1e-9);
    let power = 10f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * power >= rough * 0.999);
    times.unwrap_or(10.0) * power
}

/// The times of an axis' ticks between two times: whole seconds, minutes or hours, about `wanted` of them.
pub(crate) fn time_ticks(from: Timestamp, to: Timestamp, wanted: usize) -> Vec<Timestamp> {
    const STEPS: [i64; 17] = [
        1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400,
    ];
    let span = to.since(from).as_secs_f64();
    let rough = span / wanted.max(1) as f64;
    let step = STEPS
        .into_iter()
        .find(|step| *step as f64 >= rough)
        .unwrap_or_else(|| (rough / 86_400.0).ceil() as i64 * 86_400)
        * 1_000;
    let first = from.unix_millis().div_euclid(step) + i64::from(from.unix_millis().rem_euclid(step) > 0);
    (first..)
        .map(|i| i * step)
        .take_while(|millis| *millis <= to.unix_millis())
        .take(64)
        .map(Timestamp::from_unix_millis)
        .collect()
}

/// The time of day, UTC: `12:00:05`.
pub(crate) fn clock(time: Timestamp) -> String {
    let seconds = time.unix_millis().div_euclid(1_000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        let near = |found: Vec<f64>, wanted: &[f64]| {
            assert_eq!(found.len(), wanted.len(), "{found:?}");
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?}");
        };
        near(Scale::linear((0.0, 0.62), (0.0, 1.0)).ticks(4), &[0.0, 0.2, 0.4, 0.6]);
        near(Scale::linear((0.0, 0.0), (0.0, 1.0)).ticks(2), &[0.0, 0.5, 1.0]);
        near(Scale::log((0.3, 80.0), (0.0, 1.0)).ticks(4), &[0.1, 1.0, 10.0, 100.0]);
        assert!(Scale::log((1e-300, 1e300), (0.0, 1.0)).ticks(4).len() <= 6);
    }

    #[test]
    fn places_stay_on_the_sheet() {
        let scale = Scale::linear((0.0, 10.0), (100.0, 0.0));
        assert!((scale.at(2.5) - 75.0).abs() < 1e-9);
        assert!((scale.at(-3.0) - 100.0).abs() < 1e-9 && scale.at(99.0).abs() < 1e-9);
        let log = Scale::log((0.1, 100.0), (0.0, 90.0));
        assert!((log.at(1.0) - 30.0).abs() < 1e-9 && log.at(0.0).abs() < 1e-9);
    }

    #[test]
    fn times_get_ticks_on_whole_minutes() {
        let from = Timestamp::from_unix_millis(1_790_000_001_500);
        let to = Timestamp::from_unix_millis(1_790_000_301_500);
        let ticks: Vec<String> = time_ticks(from, to, 5).into_iter().map(clock).collect();
        assert_eq!(ticks, ["14:14:00", "14:15:00", "14:16:00", "14:17:00", "14:18:00"]);
        assert_eq!(time_ticks(from, from, 5).len(), 0);
    }
}

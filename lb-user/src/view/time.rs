//! Points in time as people and scripts read them: RFC 3339, UTC, milliseconds.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A point in time, in milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    millis: i64,
}

/// The latest time that four digits of a year can write: 9999-12-31T23:59:59.999Z.
const MAX_MILLIS: i64 = 253_402_300_799_999;
const DAY_MILLIS: i64 = 86_400_000;

/// Text that is not an RFC 3339 time in UTC.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an RFC 3339 time in UTC, such as 2026-01-31T12:00:00Z")]
pub struct ParseTimestampError(String);

impl Timestamp {
    /// Takes milliseconds since the epoch; times outside the years 1970 to 9999 are moved to the nearer end.
    pub fn from_unix_millis(millis: i64) -> Self {
        Self {
            millis: millis.clamp(0, MAX_MILLIS),
        }
    }

    /// Takes a time of the system's clock.
    pub fn from_system(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from_unix_millis(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }

    /// Milliseconds since the epoch.
    pub fn unix_millis(self) -> i64 {
        self.millis
    }

    /// Seconds since the epoch, as metrics want them.
    pub fn unix_seconds(self) -> f64 {
        self.millis as f64 / 1e3
    }

    /// The time that passed since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.millis - earlier.millis).unwrap_or(0))
    }
}

/// Days since the epoch to (year, month, day), by eras of 400 years that begin in March.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

/// The inverse of [`civil`].
fn days((year, month, day): (i64, i64, i64)) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = civil(self.millis.div_euclid(DAY_MILLIS));
        let of_day = self.millis.rem_euclid(DAY_MILLIS);
        let (seconds, millis) = (of_day / 1_000, of_day % 1_000);
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z"
        )
    }
}

impl FromStr for Timestamp {
    type Err = ParseTimestampError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParseTimestampError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Timestamp> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(clock, ':')?;
    let day_number = days((year, month, day));
    if !(1970..=9999).contains(&year) || civil(day_number) != (year, month, day) {
        return None;
    }
    if hour > 23 || minute > 59 || second > 59 || fraction.is_empty() || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let millis: i64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    let seconds = (hour * 60 + minute) * 60 + second;
    Some(Timestamp::from_unix_millis(
        day_number * DAY_MILLIS + seconds * 1_000 + millis,
    ))
}

/// Three unsigned numbers with a separator between; at most four digits each.
fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts = text.split(separator).map(|part| {
        let digits = (1..=4).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        if digits { part.parse().ok() } else { None }
    });
    let three = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(three)
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_times_are_written_as_everybody_does() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (MAX_MILLIS, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(Timestamp::from_unix_millis(millis).to_string(), text);
        }
    }

    #[test]
    fn what_is_not_a_time_is_refused() {
        for text in [
            "",
            "2026-01-31",
            "2026-01-31T12:00:00",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-01-31T24:00:00Z",
            "2026-01-31T12:00:00.Z",
            "2026-01-31T12:00:00+01:00",
            "99999-01-01T00:00:00Z",
            "2026-01-31T12:00:00.1x3Z",
            "2026-01--1T12:00:00Z",
        ] {
            assert!(text.parse::<Timestamp>().is_err(), "{text}");
        }
        assert_eq!(
            "2026-01-31T12:00:00Z".parse::<Timestamp>().map(|t| t.to_string()),
            Ok("2026-01-31T12:00:00.000Z".to_owned())
        );
        assert_eq!(
            "2026-01-31T12:00:00.5Z"
                .parse::<Timestamp>()
                .map(|t| t.unix_millis() % 1000),
            Ok(500)
        );
    }

    #[test]
    fn out_of_range_moves_to_the_nearer_end() {
        assert_eq!(Timestamp::from_unix_millis(i64::MAX).unix_millis(), MAX_MILLIS);
        assert_eq!(Timestamp::from_unix_millis(-1).unix_millis(), 0);
    }

    proptest! {
        #[test]
        fn writing_and_reading_give_the_same_time(millis in 0..=MAX_MILLIS) {
            let time = Timestamp::from_unix_millis(millis);
            prop_assert_eq!(time.to_string().parse::<Timestamp>(), Ok(time));
        }

        #[test]
        fn reading_never_panics(text in "\\PC{0,40}") {
            let _outcome = text.parse::<Timestamp>();
        }
    }
}

//! Moments, as they stand in JSON.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment: RFC 3339 in JSON, in UTC, with nine digits of the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String, format = DateTime, examples("2025-11-21T09:05:47.123456789Z")))]
pub struct Timestamp(u64);

/// The text is not a moment that the appliance can hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a time is written as RFC 3339, between 1970 and 2554, such as 2025-11-21T09:05:47Z; got `{}`",
    got.escape_debug()
)]
pub struct TimestampParseError {
    /// The text.
    pub got: String,
}

impl Timestamp {
    /// The moment `nanos` after the Unix epoch.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the Unix epoch.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every u64 of nanoseconds lies before the year 2555, far inside jiff's range.
        let moment =
            jiff::Timestamp::from_nanosecond(i128::from(self.0)).map_err(|_| fmt::Error)?;
        write!(f, "{moment:.9}")
    }
}

impl FromStr for Timestamp {
    type Err = TimestampParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<jiff::Timestamp>()
            .ok()
            .and_then(|moment| u64::try_from(moment.as_nanosecond()).ok())
            .map(Self)
            .ok_or_else(|| TimestampParseError { got: text.chars().take(64).collect() })
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_keep_every_nanosecond() {
        for (nanos, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (1_763_715_947_000_000_001, "2025-11-21T09:05:47.000000001Z"),
            (u64::MAX, "2554-07-21T23:34:33.709551615Z"),
        ] {
            assert_eq!(Timestamp::from_nanos(nanos).to_string(), text);
            assert_eq!(text.parse::<Timestamp>().unwrap().as_nanos(), nanos);
        }
        let offset = "2025-11-21T10:05:47+01:00".parse::<Timestamp>().unwrap();
        assert_eq!(offset.as_nanos(), 1_763_715_947_000_000_000);
        for bad in ["", "yesterday", "1969-12-31T23:59:59Z", "2555-01-01T00:00:00Z", "2025-11-21"] {
            assert!(bad.parse::<Timestamp>().is_err(), "{bad}");
        }
    }
}

//! Sizes as people write them: `8GiB`, `512MiB`, `4096`.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// A number of bytes in the configuration. Units are binary (1 KiB is 1024 bytes), because
/// memory and blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

/// The units and how many bits each shifts by, largest first so that display finds the
/// largest one that divides.
const UNITS: [(&str, u32); 5] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It does not begin with a whole number.
    #[error("`{got}` is not a size: expected a whole number and a unit, such as 8GiB or 512MiB")]
    Number {
        /// The text.
        got: String,
    },
    /// The unit is none that is known, or one with two meanings.
    #[error("`{got}` is not a unit of size: expected B, KiB, MiB, GiB, TiB or PiB (1024-based)")]
    Unit {
        /// The unit found.
        got: String,
    },
    /// More than 2^64 - 1 bytes.
    #[error("`{got}` is over the largest size of 2^64 - 1 bytes")]
    TooLarge {
        /// The text.
        got: String,
    },
}

impl Size {
    /// This many bytes.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::Number { got: text.to_owned() });
        }
        let too_large = || SizeError::TooLarge { got: text.to_owned() };
        let number: u64 = number.parse().map_err(|_| too_large())?;
        let shift = shift_of(unit.trim())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }
}

/// The shift of a unit. `8G` is taken for `8GiB`, as dd and truncate take it; `GB` is
/// refused, because half of all tools mean 10^9 by it.
fn shift_of(unit: &str) -> Result<u32, SizeError> {
    if unit.is_empty() || unit == "B" {
        return Ok(0);
    }
    UNITS
        .iter()
        .find(|(name, _)| unit.eq_ignore_ascii_case(name) || unit == &name[..1])
        .map(|&(_, shift)| shift)
        .ok_or_else(|| SizeError::Unit { got: unit.to_owned() })
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        match unit {
            Some((name, shift)) => write!(f, "{}{name}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

/// Takes a text with a unit, or a bare number of bytes.
struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"8GiB\", or a number of bytes")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
        u64::try_from(number)
            .map(Size)
            .map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Size, E> {
        Ok(Size(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("3KiB", 3 << 10),
            ("512MiB", 512 << 20),
            ("512 mib", 512 << 20),
            ("8GiB", 8 << 30),
            ("8G", 8 << 30),
            ("1TiB", 1 << 40),
            ("2PiB", 2 << 50),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_has_no_one_meaning() {
        for text in ["", "GiB", "-1", "x"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::Number { .. })), "{text}");
        }
        for text in ["8GB", "8g", "1.5GiB", "8 GiB x"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::Unit { .. })), "{text}");
        }
        for text in ["18446744073709551616", "16384PiB"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeError::TooLarge { .. })), "{text}");
        }
    }

    #[test]
    fn display_is_exact_and_parses_back() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1024, "1KiB"),
            (1025, "1025"),
            (3 << 30, "3GiB"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
    }
}

//! Sizes as people write them: `8GiB`, `512MiB`, `4096`; and those that a disk can have.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::worker::IMAGE_SIZE_BYTES;

/// Smallest disk: ext4 with its journal, and a layer of some size.
const DISK_BYTES_MIN: u64 = 64 << 20;

/// Largest disk: ext4 with blocks of 4 KiB ends here.
const DISK_BYTES_MAX: u64 = 16 << 40;

/// A block of the store; a disk is whole blocks.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// A number of bytes. Units are binary (1 KiB is 1024 bytes), because disks and blocks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

/// The units and how many bits each shifts by, largest first so that display finds the largest
/// one that divides.
const UNITS: [(&str, u32); 5] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

/// The text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{got}` is not a size: expected a whole number of bytes, or one with a unit of KiB, MiB, \
     GiB, TiB or PiB (1024-based), such as 64GiB"
)]
pub struct SizeError {
    /// The text.
    pub got: String,
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

    /// The number of bytes, if a disk can have so many.
    ///
    /// # Errors
    /// What is expected instead.
    pub(crate) fn of_disk(self) -> Result<u64, String> {
        if self.0 == IMAGE_SIZE_BYTES {
            return Err(
                "expected another size: by this one the driver knows images of layers".to_owned()
            );
        }
        let is_whole = self.0.is_multiple_of(BLOCK_BYTES);
        if is_whole && (DISK_BYTES_MIN..=DISK_BYTES_MAX).contains(&self.0) {
            return Ok(self.0);
        }
        let (least, most) = (Self(DISK_BYTES_MIN), Self(DISK_BYTES_MAX));
        Err(format!("expected {least} to {most}, in whole blocks of {BLOCK_BYTES} bytes"))
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let refused = || SizeError { got: text.to_owned() };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number: u64 = number.parse().map_err(|_| refused())?;
        let shift = shift_of(unit.trim()).ok_or_else(refused)?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(refused)
    }
}

/// The shift of a unit. `8G` is taken for `8GiB`, as dd and truncate take it; `GB` is refused,
/// because half of all tools mean 10^9 by it.
fn shift_of(unit: &str) -> Option<u32> {
    if unit.is_empty() || unit == "B" {
        return Some(0);
    }
    let known = |name: &str| unit.eq_ignore_ascii_case(name) || unit == &name[..1];
    UNITS.iter().find(|(name, _)| known(name)).map(|&(_, shift)| shift)
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift) {
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

/// Takes a number of bytes or a text with a unit.
struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes, or a text such as \"64GiB\"")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
        u64::try_from(number).map(Size).map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Size, E> {
        Ok(Size(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
        text.parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        for (text, bytes, shown) in [
            ("0", 0, "0"),
            ("4097", 4097, "4097"),
            ("64GiB", 64 << 30, "64GiB"),
            ("64 gib", 64 << 30, "64GiB"),
            ("20G", 20 << 30, "20GiB"),
            ("1536KiB", 1536 << 10, "1536KiB"),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, shown), "{text}");
        }
        for bad in ["", "GiB", "-1", "1.5GiB", "8GB", "8X", "18446744073709551616", "99999999PiB"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }
}

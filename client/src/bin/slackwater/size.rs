//! Sizes as people write and read them, always in binary units: 1K is 1024 bytes.

use std::fmt;
use std::str::FromStr;

/// The units, each 1024 times the one before.
const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// How to write a size; part of help texts.
pub(crate) const SIZE_HELP: &str = "bytes, or a number and a binary unit: 4096, 512M, 1.5GiB, 1T (K, KB and KiB all mean 1024 bytes)";

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(u64);

/// The text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SizeError {
    /// Not a number and a unit.
    #[error("expected {SIZE_HELP}")]
    Form,
    /// A fraction that is no whole number of bytes.
    #[error("it is not a whole number of bytes")]
    Fraction,
    /// Over 2^64 - 1.
    #[error("it is over the largest number of bytes, 16EiB less one")]
    TooLarge,
}

impl Size {
    pub(crate) const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let exponent = unit_exponent(unit.trim_start()).ok_or(SizeError::Form)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
            return Err(SizeError::Form);
        }
        let scale = 1_u128 << (10 * exponent);
        let parse = |digits: &str| digits.parse::<u64>().map(u128::from);
        let whole_bytes = parse(whole).map_err(|_| SizeError::TooLarge)? * scale;
        let fraction_bytes = if fraction.is_empty() {
            0
        } else {
            // 18 digits of a fraction times 2^60 fit in 128 bits; more are never needed.
            let digits = u32::try_from(fraction.len()).unwrap_or(u32::MAX);
            if digits > 18 {
                return Err(SizeError::Fraction);
            }
            let divisor = 10_u128.pow(digits);
            let scaled = parse(fraction).map_err(|_| SizeError::Form)? * scale;
            if !scaled.is_multiple_of(divisor) {
                return Err(SizeError::Fraction);
            }
            scaled / divisor
        };
        u64::try_from(whole_bytes + fraction_bytes).map(Self).map_err(|_| SizeError::TooLarge)
    }
}

fn unit_exponent(unit: &str) -> Option<u32> {
    let lower = unit.to_ascii_lowercase();
    let letter = match lower.as_str() {
        "" | "b" => return Some(0),
        other => other.strip_suffix("ib").or_else(|| other.strip_suffix('b')).unwrap_or(other),
    };
    let position = ["k", "m", "g", "t", "p", "e"].iter().position(|&known| known == letter)?;
    u32::try_from(position + 1).ok()
}

/// The size with one digit after the point, such as `1.5 GiB`; bytes exactly.
pub(crate) fn human(bytes: u64) -> String {
    let mut exponent = 0;
    while exponent + 1 < UNITS.len() && bytes >> (10 * (exponent + 1)) > 0 {
        exponent += 1;
    }
    if exponent == 0 {
        return format!("{bytes} B");
    }
    let tenths = (u128::from(bytes) * 10 + (1 << (10 * exponent - 1))) >> (10 * exponent);
    // 1023.96 KiB would read 1024.0 KiB.
    if tenths >= 10_240 && exponent + 1 < UNITS.len() {
        return format!("1.0 {}", UNITS[exponent + 1]);
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[exponent])
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&human(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_binary_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("8GiB", 8 << 30),
            ("512M", 512 << 20),
            ("512 mb", 512 << 20),
            ("1T", 1 << 40),
            ("1.5GiB", 3 << 29),
            ("0.5k", 512),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse::<Size>().map(Size::bytes), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for (text, error) in [
            ("", SizeError::Form),
            ("GiB", SizeError::Form),
            ("1.G", SizeError::Form),
            (".5G", SizeError::Form),
            ("1.2.3G", SizeError::Form),
            ("-1", SizeError::Form),
            ("1X", SizeError::Form),
            ("1GiBs", SizeError::Form),
            ("1 2", SizeError::Form),
            ("0.3K", SizeError::Fraction),
            ("1.5", SizeError::Fraction),
            ("1.0000000000000000001G", SizeError::Fraction),
            ("16EiB", SizeError::TooLarge),
            ("99999999999999999999", SizeError::TooLarge),
        ] {
            assert_eq!(text.parse::<Size>(), Err(error), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_with_one_digit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1_048_575, "1.0 MiB"),
            (8 << 30, "8.0 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }
}

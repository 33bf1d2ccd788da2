//! PAX records: `LENGTH KEY=VALUE\n`, where the length counts the whole record. A value may hold
//! any byte, line ends too.

use std::collections::BTreeMap;

/// The prefix of the keys that carry extended attributes.
pub(crate) const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";

/// Records by key. The last of several with one key counts.
pub(crate) type Records = BTreeMap<Vec<u8>, Vec<u8>>;

/// A point in time: seconds since 1970, rounded down, and what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Time {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
}

const NANOSECONDS: u32 = 1_000_000_000;

/// The records of an extended header, `None` where it is malformed.
pub(crate) fn parse(mut rest: &[u8]) -> Option<Records> {
    let mut records = Records::new();
    while !rest.is_empty() {
        let space = rest.iter().position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
        if length <= space + 1 || length > rest.len() || rest[length - 1] != b'\n' {
            return None;
        }
        let record = &rest[space + 1..length - 1];
        let equals = record.iter().position(|byte| *byte == b'=')?;
        records.insert(record[..equals].to_vec(), record[equals + 1..].to_vec());
        rest = &rest[length..];
    }
    Some(records)
}

/// The bytes of an extended header with these records.
pub(crate) fn compose(records: &Records) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (key, value) in records {
        let fixed = key.len() + value.len() + b" =\n".len();
        // The length counts its own digits; adding them can add one more.
        let mut length = fixed;
        while length != fixed + length.to_string().len() {
            length = fixed + length.to_string().len();
        }
        bytes.extend_from_slice(format!("{length} ").as_bytes());
        bytes.extend_from_slice(key);
        bytes.push(b'=');
        bytes.extend_from_slice(value);
        bytes.push(b'\n');
    }
    bytes
}

/// A decimal time; digits behind the ninth of the fraction are dropped.
pub(crate) fn parse_time(text: &[u8]) -> Option<Time> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_negative = whole.starts_with('-');
    if fraction.bytes().any(|digit| !digit.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let seconds: i64 = whole.parse().ok()?;
    let nanoseconds: u32 = digits.parse().ok()?;
    if is_negative && nanoseconds > 0 {
        let seconds = seconds.checked_sub(1)?;
        return Some(Time { seconds, nanoseconds: NANOSECONDS - nanoseconds });
    }
    Some(Time { seconds, nanoseconds })
}

/// The time as a decimal number.
pub(crate) fn compose_time(time: Time) -> Vec<u8> {
    let (seconds, nanoseconds) = (i128::from(time.seconds), i128::from(time.nanoseconds));
    let total = seconds * i128::from(NANOSECONDS) + nanoseconds;
    let sign = if total < 0 { "-" } else { "" };
    let unit = u128::from(NANOSECONDS);
    let (whole, fraction) = (total.unsigned_abs() / unit, total.unsigned_abs() % unit);
    let text = format!("{sign}{whole}.{fraction:09}");
    text.trim_end_matches('0').trim_end_matches('.').as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_whatever_they_hold() {
        let mut records = Records::new();
        for length in [0, 1, 80, 88, 89, 90, 97, 98, 990, 995, 9_990] {
            records.insert(format!("k{length}").into_bytes(), vec![b'\n'; length]);
        }
        records.insert(b"SCHILY.xattr.user.x".to_vec(), b"a=b\n\0 5 c=d\n".to_vec());
        assert_eq!(parse(&compose(&records)).unwrap(), records);
    }

    #[test]
    fn malformed_records_are_refused() {
        for bad in ["5", "5 a=b", "99 a=b\n", "0 a=b\n", "2 \n", "6 abcd\n", "x a=b\n", "-1 a=b\n"]
        {
            assert_eq!(parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn times_keep_their_nanoseconds() {
        let time = |seconds, nanoseconds| Time { seconds, nanoseconds };
        let cases = [
            ("1.5", time(1, 500_000_000)),
            ("-1.5", time(-2, 500_000_000)),
            ("-0.000000001", time(-1, 999_999_999)),
            ("0", time(0, 0)),
            ("1700000000.123456789", time(1_700_000_000, 123_456_789)),
        ];
        for (text, time) in cases {
            assert_eq!(parse_time(text.as_bytes()), Some(time), "{text}");
            assert_eq!(compose_time(time), text.as_bytes());
        }
        assert_eq!(parse_time(b"1.1234567891"), Some(time(1, 123_456_789)));
        for bad in ["", "x", "1.x", "1.-5", "1 ", "99999999999999999999"] {
            assert_eq!(parse_time(bad.as_bytes()), None, "{bad:?}");
        }
    }
}

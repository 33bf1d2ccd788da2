//! Range requests (RFC 9110 section 14).

use std::ops::Range;

use axum::http::{HeaderMap, header};

/// What part of the bytes a request is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All: no range was asked for, or one that a server is to ignore.
    All,
    /// These bytes; never empty, never beyond the end.
    Part(Range<u64>),
    /// A range that begins at or after the end.
    Unsatisfiable,
}

/// The part of `size_bytes` bytes that a `GET` asks for. `entity_tag` is that of the bytes:
/// with an `If-Range` that names another one the range is ignored (section 13.1.5).
///
/// A range that cannot be read, one of another unit, and a list of ranges are ignored, as
/// section 14.2 allows.
pub(crate) fn wanted(headers: &HeaderMap, entity_tag: &str, size_bytes: u64) -> Wanted {
    if headers.get(header::IF_RANGE).is_some_and(|tag| tag.as_bytes() != entity_tag.as_bytes()) {
        return Wanted::All;
    }
    let mut values = headers.get_all(header::RANGE).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Wanted::All;
    };
    match value.to_str().ok().and_then(parse) {
        None => Wanted::All,
        Some(Spec::Last(0)) => Wanted::Unsatisfiable,
        Some(Spec::Last(_)) if size_bytes == 0 => Wanted::Unsatisfiable,
        Some(Spec::Last(count)) => Wanted::Part(size_bytes.saturating_sub(count)..size_bytes),
        Some(Spec::From(first, _)) if first >= size_bytes => Wanted::Unsatisfiable,
        Some(Spec::From(first, last)) => {
            Wanted::Part(first..last.saturating_add(1).min(size_bytes))
        }
    }
}

enum Spec {
    /// The first and the last byte.
    From(u64, u64),
    /// So many bytes at the end.
    Last(u64),
}

fn parse(text: &str) -> Option<Spec> {
    let (unit, range) = text.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = range.trim().split_once('-')?;
    match (first, last) {
        ("", count) => number(count).map(Spec::Last),
        (first, "") => number(first).map(|first| Spec::From(first, u64::MAX)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(Spec::From(first, last))
        }
    }
}

/// Digits alone: `parse` would take a sign. A number too large for a file is as good as the
/// largest one.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(range: &str, size_bytes: u64) -> Wanted {
        let headers = HeaderMap::from_iter([(header::RANGE, range.parse().unwrap())]);
        wanted(&headers, "\"tag\"", size_bytes)
    }

    #[test]
    fn ranges_are_cut_at_the_end() {
        assert_eq!(ask("bytes=0-0", 10), Wanted::Part(0..1));
        assert_eq!(ask("bytes=2-5", 10), Wanted::Part(2..6));
        assert_eq!(ask("Bytes=2-", 10), Wanted::Part(2..10));
        assert_eq!(ask("bytes=2-99999999999999999999999", 10), Wanted::Part(2..10));
        assert_eq!(ask("bytes=-3", 10), Wanted::Part(7..10));
        assert_eq!(ask("bytes=-30", 10), Wanted::Part(0..10));
    }

    #[test]
    fn ranges_beyond_the_end_cannot_be_given() {
        for (range, size_bytes) in
            [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-5", 0)]
        {
            assert_eq!(ask(range, size_bytes), Wanted::Unsatisfiable, "{range} of {size_bytes}");
        }
    }

    #[test]
    fn what_is_no_single_range_is_ignored() {
        for range in [
            "bytes=5-2",
            "bytes=a-b",
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes",
            "bytes=-",
            "bytes=+1-2",
        ] {
            assert_eq!(ask(range, 10), Wanted::All, "{range}");
        }
        assert_eq!(wanted(&HeaderMap::new(), "\"tag\"", 10), Wanted::All);
    }

    #[test]
    fn a_range_of_other_bytes_is_ignored() {
        let mut headers = HeaderMap::from_iter([(header::RANGE, "bytes=2-".parse().unwrap())]);
        headers.insert(header::IF_RANGE, "\"tag\"".parse().unwrap());
        assert_eq!(wanted(&headers, "\"tag\"", 10), Wanted::Part(2..10));
        assert_eq!(wanted(&headers, "\"new\"", 10), Wanted::All);
    }
}

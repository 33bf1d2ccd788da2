//! Times as people write and read them.

use std::time::Duration;

use slackwater_client::types::Timestamp;

pub(super) fn since(earlier: Timestamp, moment: Timestamp) -> Duration {
    Duration::from_nanos(moment.as_nanos().saturating_sub(earlier.as_nanos()))
}

/// A time in its largest whole unit.
pub(super) fn ago(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

pub(super) fn parse_age(text: &str) -> Result<Duration, String> {
    let refused = || "expected a number and a unit: 30d, 12h, 90m or 45s".to_owned();
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(refused)?;
    let number: u64 = number.parse().map_err(|_| refused())?;
    let seconds = match unit {
        "d" => 86_400,
        "h" => 3_600,
        "m" => 60,
        "s" => 1,
        _ => return Err(refused()),
    };
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_read_and_shown() {
        for (text, seconds) in [("30d", 30 * 86_400), ("12h", 43_200), ("90m", 5_400), ("0s", 0)] {
            assert_eq!(parse_age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "d", "30", "1w", "-1d", "99999999999999999999d", "1\u{e9}"] {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
        assert_eq!(ago(Duration::from_secs(59)), "59s");
        assert_eq!(ago(Duration::from_secs(90_000)), "1d");
    }
}

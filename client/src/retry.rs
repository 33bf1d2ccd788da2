//! When a failed call is sent again, and after how long.

use std::time::Duration;

/// How often, and how far apart, a call that may be sent again is tried.
///
/// The wait doubles from `delay_first` up to `delay_max`; half of each wait is random, so that
/// clients that failed together do not come back together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Tries in all, the first one included.
    pub attempts_max: u32,
    /// Wait after the first try.
    pub delay_first: Duration,
    /// Longest wait, also where the appliance asks for a longer one by `Retry-After`.
    pub delay_max: Duration,
}

impl Default for RetryPolicy {
    /// Five tries within two seconds: enough for a lost connection or a moment of load, short
    /// enough that a person is soon told that the appliance is down.
    fn default() -> Self {
        Self {
            attempts_max: 5,
            delay_first: Duration::from_millis(100),
            delay_max: Duration::from_secs(1),
        }
    }
}

impl RetryPolicy {
    /// Each call is sent once.
    #[must_use]
    pub const fn never() -> Self {
        Self { attempts_max: 1, delay_first: Duration::ZERO, delay_max: Duration::ZERO }
    }

    /// For long transfers: rides out a restart of the appliance of up to about 20 seconds.
    #[must_use]
    pub const fn patient() -> Self {
        Self {
            attempts_max: 10,
            delay_first: Duration::from_millis(100),
            delay_max: Duration::from_secs(5),
        }
    }

    /// The wait after try number `attempt` (from 1) failed, or `None` when no try is left.
    /// `random` is any number; `asked` is what the appliance asked for by `Retry-After`.
    pub(crate) fn delay(
        &self,
        attempt: u32,
        random: u64,
        asked: Option<Duration>,
    ) -> Option<Duration> {
        if attempt >= self.attempts_max {
            return None;
        }
        let doubled = 1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX);
        let whole = self.delay_first.saturating_mul(doubled).min(self.delay_max);
        let half_nanos = u64::try_from(whole.as_nanos() / 2).unwrap_or(u64::MAX - 1);
        let delay = Duration::from_nanos(half_nanos + random % (half_nanos + 1));
        Some(asked.map_or(delay, |asked| asked.min(self.delay_max).max(delay)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_end() {
        let policy = RetryPolicy::default();
        let longest = |attempt| {
            let half_nanos = |whole_ms: u64| whole_ms * 500_000;
            let whole_ms = [100, 200, 400, 800][usize::try_from(attempt - 1).unwrap()];
            policy.delay(attempt, half_nanos(whole_ms), None).unwrap()
        };
        assert_eq!(longest(1), Duration::from_millis(100));
        assert_eq!(longest(2), Duration::from_millis(200));
        assert_eq!(longest(4), Duration::from_millis(800));
        assert_eq!(policy.delay(5, 0, None), None);
        assert_eq!(RetryPolicy::never().delay(1, 7, None), None);
    }

    #[test]
    fn half_of_a_wait_is_random() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.delay(1, 0, None), Some(Duration::from_millis(50)));
        for random in [1, 12_345, u64::MAX] {
            let delay = policy.delay(1, random, None).unwrap();
            assert!(delay >= Duration::from_millis(50) && delay <= Duration::from_millis(100));
        }
    }

    #[test]
    fn retry_after_is_honoured_within_the_limit() {
        let policy = RetryPolicy::default();
        let asked = |seconds| policy.delay(1, 0, Some(Duration::from_millis(seconds)));
        assert_eq!(asked(700), Some(Duration::from_millis(700)));
        assert_eq!(asked(60_000), Some(policy.delay_max));
        assert_eq!(asked(0), Some(Duration::from_millis(50)));
    }

    #[test]
    fn a_late_attempt_does_not_overflow() {
        let policy = RetryPolicy { attempts_max: u32::MAX, ..RetryPolicy::default() };
        assert_eq!(policy.delay(4_000_000_000, 0, None), Some(Duration::from_millis(500)));
    }
}

//! Time stamps, and the one clock that gives them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since the Unix epoch (good until the year 2554).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

const NANOS_PER_SECOND: u64 = 1_000_000_000;

impl Timestamp {
    /// The stamp `nanos` after the epoch.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The stamp `seconds` and `nanos` after the epoch; `None` past the year 2554.
    #[must_use]
    pub fn new(seconds: u64, nanos: u32) -> Option<Self> {
        seconds.checked_mul(NANOS_PER_SECOND)?.checked_add(u64::from(nanos)).map(Self)
    }

    /// Nanoseconds since the epoch.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// This stamp, or the first one behind `before` if it is not behind that.
    pub(crate) fn behind(self, before: Self) -> Self {
        self.max(Self(before.0.saturating_add(1)))
    }

    /// Whole seconds since the epoch.
    #[must_use]
    pub const fn seconds(self) -> u64 {
        self.0 / NANOS_PER_SECOND
    }

    /// The nanoseconds past [`Self::seconds`], under 10^9.
    #[must_use]
    pub fn subsecond_nanos(self) -> u32 {
        u32::try_from(self.0 % NANOS_PER_SECOND).unwrap_or(0)
    }
}

/// The machine's clock as it is, which may jump.
pub(crate) fn wall() -> Timestamp {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX - 1))
}

/// A clock whose stamps always grow, so that two changes of a file never carry one mtime and
/// a client's cache notices each of them.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    last_nanos: AtomicU64,
}

impl Clock {
    /// A stamp later than every one given before.
    pub(crate) fn now(&self) -> Timestamp {
        let wall_nanos = wall().as_nanos();
        let mut given = 0;
        // The closure always answers Some, so both arms carry the value before the update.
        let (Ok(last) | Err(last)) =
            self.last_nanos.fetch_update(Ordering::AcqRel, Ordering::Acquire, |last| {
                given = wall_nanos.max(last.saturating_add(1));
                Some(given)
            });
        debug_assert!(given > last || last == u64::MAX, "the clock went backwards");
        Timestamp(given)
    }
}

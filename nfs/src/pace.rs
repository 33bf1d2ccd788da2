//! How fast a client moves bytes while the server waits for it.
//!
//! A client may be as slow as its `patience` allows, as long as what it holds up is its own. Once
//! calls of others wait for the memory that it holds it must keep the pace of
//! [`limits::PRESSED_BYTES_MIN`] in [`limits::PRESSED_TIME`]. A server that was held up itself, and
//! so looks late, took nothing meanwhile: that once it is not the client who was slow.

use std::time::Duration;

use tokio::time::Instant;

use crate::budget::ConnectionBudget;
use crate::limits;

/// The progress of one client.
#[derive(Debug)]
pub(crate) struct Pace {
    begun: Instant,
    bytes: usize,
    /// The look before was late: another one in sequence excuses nobody.
    was_late: bool,
}

impl Pace {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self { begun: Instant::now(), bytes: 0, was_late: false }
    }

    /// When to look again, at the latest.
    pub(crate) fn next_look(&self) -> Instant {
        self.begun + limits::PRESSED_TIME
    }

    /// Notes bytes that moved.
    pub(crate) const fn moved(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// The limit that the client broke, if it is too slow. To be asked before it is waited for: one
    /// that has moved all is not.
    pub(crate) fn broken(&mut self, budget: &ConnectionBudget) -> Option<Duration> {
        let late = Instant::now().checked_duration_since(self.next_look())?;
        let is_slow = self.bytes < limits::PRESSED_BYTES_MIN;
        let is_excused = late >= limits::LOOK_LATE && !self.was_late;
        *self = Self { was_late: is_excused, ..Self::new() };
        (is_slow && !is_excused && budget.is_wanted()).then_some(limits::PRESSED_TIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::budget::{Budget, Purpose};
    use crate::metrics::NfsMetrics;

    /// A client that moved too little since so long.
    fn slow(since: Duration, was_late: bool) -> Pace {
        Pace { begun: Instant::now().checked_sub(since).unwrap(), bytes: 100, was_late }
    }

    #[tokio::test]
    async fn a_late_look_excuses_a_slow_client_once_and_only_that() {
        let all = Budget::new(limits::IN_FLIGHT_BYTES_MIN, Arc::new(NfsMetrics::new()));
        let (one, other) = (all.connection(), all.connection());
        let half = usize::try_from(limits::IN_FLIGHT_BYTES_MIN / 2).unwrap();
        let _held = one.charge(Purpose::Change, half).await;
        let due = limits::PRESSED_TIME;
        assert!(slow(due, false).broken(&one).is_none(), "nobody waits");
        let waits = tokio::spawn(async move { drop(other.charge(Purpose::Change, 1).await) });
        while !one.is_wanted() {
            tokio::task::yield_now().await;
        }
        assert!(slow(Duration::ZERO, false).broken(&one).is_none(), "too early to tell");
        assert!(slow(due, false).broken(&one).is_some());
        let late = due + limits::LOOK_LATE;
        let mut pace = slow(late, false);
        assert!(pace.broken(&one).is_none());
        // It has another period from then on, and is not excused again.
        assert!(pace.broken(&one).is_none() && pace.was_late && pace.bytes == 0);
        assert!(slow(late, true).broken(&one).is_some());
        waits.abort();
    }
}

//! How fast a client moves bytes while the server waits for it.
//!
//! A client may be as slow as its `patience` allows, as long as what it holds up is its own. Once
//! calls of others wait for the memory that it holds it must keep the pace of
//! [`limits::PRESSED_BYTES_MIN`] in [`limits::PRESSED_TIME`].

use std::time::Duration;

use tokio::time::Instant;

use crate::budget::ConnectionBudget;
use crate::limits;

/// The progress of one client.
#[derive(Debug)]
pub(crate) struct Pace {
    begun: Instant,
    bytes: usize,
}

impl Pace {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self { begun: Instant::now(), bytes: 0 }
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
        if Instant::now() < self.next_look() {
            return None;
        }
        let is_slow = self.bytes < limits::PRESSED_BYTES_MIN;
        *self = Self::new();
        (is_slow && budget.is_wanted()).then_some(limits::PRESSED_TIME)
    }
}

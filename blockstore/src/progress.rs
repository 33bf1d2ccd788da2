//! How far long work is, and whether it is still wanted.
//!
//! ```text
//! the thread that works      begin(part) -> point()? -> advance -> ... -> begin(part)
//! others, at any moment      step(), cancel()
//! ```
//! Invariant: work that was cancelled ends with [`Error::Cancelled`] at its next point. Behind its last one it has a
//! result all the same.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// How far a check or a garbage collection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The part of the work that is under way; empty before the first one.
    pub part: &'static str,
    /// What of the part is done: chunks of a check, map entries of a reclaim, files of a compaction.
    pub done: u64,
    /// How much of it there is; 0 if that is not known.
    pub total: u64,
}

/// Shared between the thread that works and those that look at it or end it.
#[derive(Debug, Default)]
pub struct Progress {
    is_cancelled: AtomicBool,
    step: Mutex<Step>,
}

impl Progress {
    /// Ends the work at its next point. May be called more than once, and after its end.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// How far it is now.
    #[must_use]
    pub fn step(&self) -> Step {
        *self.step.lock()
    }

    /// A place where the work can end.
    ///
    /// # Errors
    /// `Cancelled`, if it is not wanted any more.
    pub fn point(&self) -> Result<()> {
        if self.is_cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// The next part begins, of this size if it is known.
    pub(crate) fn begin(&self, part: &'static str, total: u64) {
        *self.step.lock() = Step { part, done: 0, total };
    }

    /// So much more of the part is done.
    pub(crate) fn advance(&self, done: u64) {
        let mut step = self.step.lock();
        step.done = step.done.saturating_add(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_was_cancelled_ends_at_its_next_point() {
        let progress = Progress::default();
        progress.point().unwrap();
        progress.begin("chunks", 7);
        progress.advance(3);
        assert_eq!(progress.step(), Step { part: "chunks", done: 3, total: 7 });
        progress.cancel();
        assert!(matches!(progress.point(), Err(Error::Cancelled)));
        progress.begin("names", 0);
        assert_eq!(progress.step(), Step { part: "names", done: 0, total: 0 });
    }
}

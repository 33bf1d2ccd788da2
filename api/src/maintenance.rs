//! Checks and garbage collections: one at a time, and others see how far it is.
//!
//! ```text
//! handler --- Waiting: dropped with it ------> cancel
//!    |                                            |
//!    +-- Turn --> blocking thread: Store, Progress <--- GET /v1/stats
//!                       |
//!                       +-- its end: the next one may begin
//! ```
//! A caller that hangs up drops the handler; the thread ends at the next point of its work, and its turn with it. One
//! whose request has an idempotency key asked for the opposite: that request goes on without it.

use std::sync::Arc;

use parking_lot::Mutex;
use slackwater_blockstore::Progress;

use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::types::{self, Timestamp};

/// What is under way.
#[derive(Debug, Default)]
pub(crate) struct Maintenance(Mutex<Option<Running>>);

#[derive(Debug)]
struct Running {
    call: &'static str,
    started_at: Timestamp,
    progress: Arc<Progress>,
}

impl Maintenance {
    /// The turn of a call that begins now.
    ///
    /// # Errors
    /// `busy`, if another one is under way.
    pub(crate) fn begin(
        self: &Arc<Self>,
        call: &'static str,
        started_at: Timestamp,
    ) -> Result<Turn, Failure> {
        let mut running = self.0.lock();
        if let Some(running) = running.as_ref() {
            let detail = format!(
                "a {} is under way since {}: wait for its end, GET /v1/stats tells how far it is; its caller ends it by \
                 leaving, unless the request has an idempotency key",
                running.call, running.started_at
            );
            return Err(Failure::new(ProblemCode::Busy, detail));
        }
        let progress = Arc::<Progress>::default();
        *running = Some(Running { call, started_at, progress: Arc::clone(&progress) });
        Ok(Turn { maintenance: Arc::clone(self), progress })
    }

    /// How far it is, if one is under way.
    pub(crate) fn status(&self) -> Option<types::Maintenance> {
        let running = self.0.lock();
        let running = running.as_ref()?;
        let step = running.progress.step();
        Some(types::Maintenance {
            call: running.call.to_owned(),
            started_at: running.started_at,
            part: step.part.to_owned(),
            done: step.done,
            total: (step.total > 0).then_some(step.total),
        })
    }
}

/// The one that is under way; another may begin when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    maintenance: Arc<Maintenance>,
    progress: Arc<Progress>,
}

impl Turn {
    pub(crate) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.maintenance.0.lock() = None;
    }
}

/// The caller who waits for the result: dropped before the answer, it ends the work.
#[derive(Debug)]
pub(crate) struct Waiting {
    call: &'static str,
    progress: Arc<Progress>,
    is_answered: bool,
}

impl Waiting {
    pub(crate) const fn new(call: &'static str, progress: Arc<Progress>) -> Self {
        Self { call, progress, is_answered: false }
    }

    /// The work has ended.
    pub(crate) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_answered {
            self.progress.cancel();
            tracing::info!(call = self.call, "ending it: its caller left, or its time is over");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_runs_at_a_time_and_is_seen_while_it_does() {
        let maintenance = Arc::new(Maintenance::default());
        assert_eq!(maintenance.status(), None);
        let turn = maintenance.begin("check", Timestamp::from_nanos(7)).unwrap();
        let refused = maintenance.begin("gc", Timestamp::from_nanos(8)).unwrap_err();
        assert_eq!(refused.code(), ProblemCode::Busy);
        assert!(refused.detail().contains("a check is under way since 1970"), "{refused:?}");
        let status = maintenance.status().unwrap();
        assert_eq!((status.call.as_str(), status.total), ("check", None));
        drop(turn);
        assert_eq!(maintenance.status(), None);
        maintenance.begin("gc", Timestamp::from_nanos(9)).unwrap();
    }

    #[test]
    fn work_ends_with_its_caller_and_not_with_its_answer() {
        let progress = Arc::<Progress>::default();
        Waiting::new("check", Arc::clone(&progress)).answered();
        progress.point().unwrap();
        drop(Waiting::new("check", Arc::clone(&progress)));
        progress.point().unwrap_err();
    }
}

//! A command on several things: each is tried, failures are told one by one, and the exit code
//! is that of the first failure.

use crate::failure::{Exit, Failure};
use crate::output::Output;

/// Counts what succeeded and failed.
#[derive(Debug, Default)]
pub(crate) struct Several {
    total: usize,
    failed: usize,
    first: Option<Exit>,
}

impl Several {
    /// Notes one outcome; a failure is printed with the thing's name, unless it must end all.
    pub(crate) fn note(
        &mut self,
        output: Output,
        name: &str,
        outcome: Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.total += 1;
        let failure = match outcome {
            Ok(()) => return Ok(()),
            // The rest would fail alike, after as many waits.
            Err(failure) if failure.exit() == Exit::Unreachable => return Err(failure),
            Err(failure @ Failure::Output(_)) => return Err(failure),
            Err(failure) => failure,
        };
        self.failed += 1;
        self.first.get_or_insert(failure.exit());
        if output.is_json() {
            output.failure(&failure);
        } else {
            output.remark(&format!("slackwater: {name}: {failure}"));
        }
        Ok(())
    }

    /// The outcome of all.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self.first {
            None => Ok(()),
            Some(exit) => Err(Failure::Several { failed: self.failed, total: self.total, exit }),
        }
    }
}

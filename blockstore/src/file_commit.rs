//! COMMIT of files. Those who commit one file at the same time share its commits:
//!
//! ```text
//! caller 1   commit_then --> flush for 1 --> flush for 2 and 3 --> nobody waits: done
//!                                                             \--> others wait: CommitDuty
//! caller 2        commit_then ---^ waits, holding no thread
//! caller 3          join_commit -^
//! ```
//! What a caller wrote before is in the flush that answers it, since its turn is taken before
//! the flush begins. A thread commits one file a few times at most: then what is left is given
//! back to its caller, so that callers who keep coming do not keep it for ever.

use std::fmt;
use std::sync::Arc;

use crate::access_times;
use crate::commit::again;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::{File, Told};
use crate::flush::{flush, flush_locked};
use crate::id::InodeId;
use crate::types::{Attributes, Change};

/// Commits of one file that a thread does in a row: one for who brought it, one for those who came
/// meanwhile.
const COMMIT_ROUNDS_MAX: usize = 2;

pub(crate) fn commit_file(core: &Core, inode: InodeId) -> Result<(Change, u64)> {
    core.committer.healthy()?;
    let verifier = core.committer.verifier();
    let file = core.file(inode)?;
    flush(core, &file)?;
    let after = file.state.read().attributes(inode);
    Ok((unchanged(after), verifier))
}

/// What a COMMIT changes in the attributes: nothing, as the writes did. What others wrote while it
/// waited must not look as if it were of it: who commits would take what it has cached for current
/// (RFC 1813 section 2.6 `wcc_data`).
const fn unchanged(attributes: Attributes) -> Change {
    Change { before: attributes, after: attributes }
}

/// What is told once a COMMIT is done.
pub type Committed = Box<dyn FnOnce(Result<(Change, u64)>) + Send>;

/// Commits the file, then calls `done`: on this thread, or on the one that is committing the
/// file already, which then commits once more for all who came meanwhile. When those keep coming
/// the duty to go on is given back.
pub(crate) fn commit_then(core: &Core, inode: InodeId, done: Committed) -> Option<CommitDuty> {
    let begun = core.committer.healthy().and_then(|()| core.file(inode));
    let file = match begun {
        Ok(file) => file,
        Err(error) => {
            done(Err(error));
            return None;
        }
    };
    let verifier = core.committer.verifier();
    let told = move |outcome: Result<Attributes>| {
        done(outcome.map(|after| (unchanged(after), verifier)));
    };
    {
        let mut waiting = file.waiting.lock();
        waiting.told.push(Box::new(told));
        if waiting.is_served {
            return None;
        }
        waiting.is_served = true;
    }
    serve_commits(core, CommitDuty { file, told: Answers::default(), is_done: false })
}

/// The duty to commit a file for all who wait for it. One thread has it, and hands it on with
/// [`crate::Store::serve_commits`]. Dropped, as by a panic, it leaves nobody waiting for ever.
#[derive(Debug)]
#[must_use = "those who wait are answered only by `Store::serve_commits`"]
pub struct CommitDuty {
    file: Arc<File>,
    /// Those whom the commit under way will answer.
    told: Answers,
    /// Nobody waits any more.
    is_done: bool,
}

/// Those whom one commit answers.
#[derive(Default)]
struct Answers(Vec<Told>);

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Answers").field(&self.0.len()).finish()
    }
}

impl Drop for CommitDuty {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let later = {
            let mut waiting = self.file.waiting.lock();
            waiting.is_served = false;
            std::mem::take(&mut waiting.told)
        };
        for told in std::mem::take(&mut self.told.0).into_iter().chain(later) {
            told(Err(Error::Poisoned {
                reason: "a commit of this file was broken off".to_owned(),
            }));
        }
    }
}

/// As [`commit_then`], if that needs no waiting here: a thread is committing the file, and will
/// do it once more. `done` is asked for only then; answers whether it was.
pub(crate) fn join_commit(
    core: &Core,
    inode: InodeId,
    done: &mut dyn FnMut() -> Committed,
) -> bool {
    let Some(file) = core.files.get(inode) else { return false };
    let verifier = core.committer.verifier();
    let Some(mut waiting) = file.waiting.try_lock() else { return false };
    if !waiting.is_served {
        return false;
    }
    let done = done();
    waiting.told.push(Box::new(move |outcome: Result<Attributes>| {
        done(outcome.map(|after| (unchanged(after), verifier)));
    }));
    true
}

/// Commits the file until nobody waits for it, or [`COMMIT_ROUNDS_MAX`] times: then the duty is
/// to be handed on.
pub(crate) fn serve_commits(core: &Core, mut duty: CommitDuty) -> Option<CommitDuty> {
    for _ in 0..COMMIT_ROUNDS_MAX {
        serve_once(core, &mut duty);
        if duty.is_done {
            return None;
        }
    }
    Some(duty)
}

/// One commit, for those who wait when it begins. The duty is done when nobody waits after it.
fn serve_once(core: &Core, duty: &mut CommitDuty) {
    let file = &*duty.file;
    let flushing = file.flush.lock();
    duty.told.0 = std::mem::take(&mut file.waiting.lock().told);
    let outcome = flush_locked(core, file);
    drop(flushing);
    let after = file.state.read().attributes(file.inode);
    while let Some(told) = duty.told.0.pop() {
        told(match &outcome {
            Ok(()) => Ok(after),
            Err(error) => Err(again(error)),
        });
    }
    let mut waiting = file.waiting.lock();
    if waiting.told.is_empty() {
        waiting.is_served = false;
        duty.is_done = true;
    }
}

pub(crate) fn commit_all(core: &Core) -> Result<()> {
    // If it fails, nothing is lost that was promised.
    let _ = access_times::commit(core);
    // Every file has its turn, also behind one that fails.
    let outcomes = core.files.all().into_iter().map(|file| flush(core, &file));
    outcomes.fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests;

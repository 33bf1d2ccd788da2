//! Times of last reads, as Linux keeps them with `relatime`.
//!
//! ```text
//! READ --> due? --> the file in memory, which shows it --> a minute later, or when many wait: one commit
//! ```
//! A read moves a file's time of access if that is not behind its last change, or is a day old. So programs
//! see whether a file was read since it was written, and what has not been used for long, and reads cost no
//! commit each. What is not committed yet is lost by a crash: no client is told otherwise, as READ
//! promises nothing of it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::File;
use crate::id::InodeId;
use crate::store::Store;
use crate::time::{Timestamp, wall};
use crate::transaction::Transaction;
use crate::types::Attributes;

/// An older time of access is moved by each read, as Linux does.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// How long times wait for others to be committed with them.
pub(crate) const WAIT: Duration = Duration::from_secs(60);

/// Files whose times wait: a fraction of those that are kept in memory, and one short commit. They are committed
/// early when half of that is reached; beyond it, reads move no times until that is done.
const FILES_MAX: usize = 1024;

/// Files whose times are to be committed. The times themselves are in [`crate::file::FileState`].
#[derive(Debug, Default)]
pub(crate) struct AccessTimes {
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    files: HashSet<InodeId>,
    /// Since when the first one waits.
    since: Option<Instant>,
}

impl Waiting {
    fn add(&mut self, inode: InodeId) {
        self.files.insert(inode);
        self.since.get_or_insert_with(Instant::now);
    }
}

/// Whether a read at `now` moves the time of access.
fn is_due(attributes: &Attributes, now: Timestamp) -> bool {
    let accessed_at = attributes.accessed_at;
    let old_nanos = u64::try_from(OLD.as_nanos()).unwrap_or(u64::MAX);
    // Times that are ahead of the clock move none: they would do so with each read.
    let is_before = |change: Timestamp| accessed_at <= change && change < now;
    accessed_at < now
        && (is_before(attributes.modified_at)
            || is_before(attributes.changed_at)
            || now.as_nanos() - accessed_at.as_nanos() >= old_nanos)
}

/// Notes that a client has read the file, and returns its time of access after that.
pub(crate) fn note_read(core: &Core, attributes: &Attributes) -> Timestamp {
    let now = wall();
    if !is_due(attributes, now) {
        return attributes.accessed_at;
    }
    // What was read is in memory, unless many other files were read since.
    let Some(file) = core.files.get(attributes.inode) else { return attributes.accessed_at };
    let mut state = file.state.write();
    // Others may have read it since, or set the time.
    let attributes = state.attributes(attributes.inode);
    if state.deleted || !is_due(&attributes, now) {
        return attributes.accessed_at;
    }
    if state.accessed_at.is_none() {
        let mut waiting = core.access_times.waiting.lock();
        if waiting.files.len() >= FILES_MAX {
            return attributes.accessed_at;
        }
        waiting.add(attributes.inode);
    }
    state.accessed_at = Some(now);
    now
}

/// Takes the noted time of a file that is given another one. Before that is committed: a commit of noted times
/// beside it finds none then, or is done before it.
pub(crate) fn take(file: &File) -> Option<Timestamp> {
    file.state.write().accessed_at.take()
}

/// Puts a noted time back, if none was noted since.
pub(crate) fn put_back(core: &Core, file: &File, noted: Option<Timestamp>) {
    let mut state = file.state.write();
    if noted.is_some() && state.accessed_at.is_none() && !state.deleted {
        state.accessed_at = noted;
        core.access_times.waiting.lock().add(file.inode);
    }
}

/// Commits the times, if some have waited for so long or many do.
pub(crate) fn commit_due(core: &Core, wait: Duration) {
    let is_due = {
        let waiting = core.access_times.waiting.lock();
        waiting.files.len() >= FILES_MAX / 2
            || waiting.since.is_some_and(|since| since.elapsed() >= wait)
    };
    if is_due && let Err(error) = commit(core) {
        tracing::debug!(%error, "times of last reads could not be committed, and are dropped");
    }
}

/// Commits the times that wait. If that fails they are as before the reads.
pub(crate) fn commit(core: &Core) -> Result<()> {
    let files = {
        let mut waiting = core.access_times.waiting.lock();
        waiting.since = None;
        std::mem::take(&mut waiting.files)
    };
    if files.is_empty() {
        return Ok(());
    }
    let files: Vec<_> = files.into_iter().filter_map(|inode| core.files.get(inode)).collect();
    let noted = files.clone();
    let outcome = core.commit(move |txn| {
        // Reads take no room of the reserve, which deletes need.
        txn.grows()?;
        let mut committed = Vec::with_capacity(noted.len());
        for file in noted {
            // Looked up now: a SETATTR that sets this time has taken the noted one away before its commit.
            let accessed_at = file.state.read().accessed_at;
            if let Some(accessed_at) = accessed_at {
                set(txn, file.inode, accessed_at)?;
                committed.push((file, accessed_at));
            }
        }
        Ok(committed)
    });
    match outcome {
        Ok(committed) => {
            committed.iter().for_each(|(file, accessed_at)| settle(core, file, *accessed_at));
            Ok(())
        }
        Err(error) => {
            files.iter().for_each(|file| file.state.write().accessed_at = None);
            Err(error)
        }
    }
}

/// A noted time is committed. One that was noted since waits for the next commit.
fn settle(core: &Core, file: &File, committed: Timestamp) {
    let mut state = file.state.write();
    match state.accessed_at {
        Some(noted) if noted != committed => core.access_times.waiting.lock().add(file.inode),
        _ => state.accessed_at = None,
    }
}

fn set(txn: &mut Transaction<'_>, inode: InodeId, accessed_at: Timestamp) -> Result<()> {
    let mut record = match txn.inode(inode) {
        Ok(record) => record,
        Err(Error::Stale { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    record.accessed_at = accessed_at;
    txn.put_inode(inode, &record);
    Ok(())
}

impl Store {
    /// Notes that a client has read the file, whose attributes these were then: its time of last access moves
    /// if it is not behind the last change, or is a day old. Returns that time; nothing waits for the disk, and a
    /// crash may forget it.
    #[must_use]
    pub fn note_read(&self, attributes: &Attributes) -> Timestamp {
        note_read(&self.core, attributes)
    }
}

#[cfg(test)]
mod tests;

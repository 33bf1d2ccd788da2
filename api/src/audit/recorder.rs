//! Which changes go into the log: writing to a file is one for an hour.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{AuditLog, NewChange};

/// How long writing to the same file by the same caller is one change: an import is a call for each few MiB, and a
/// driver writes a file each minute to show that it lives.
const WRITING: Duration = Duration::from_secs(3600);

/// Files that are remembered so, by hashes: what callers wrote into paths takes no memory.
const WRITTEN_MAX: usize = 4096;

/// The way from requests into the log.
#[derive(Debug)]
pub(crate) struct Recorder {
    log: Option<Arc<AuditLog>>,
    /// Who wrote to which file with what outcome, and when that was recorded.
    written: Mutex<HashMap<blake3::Hash, Instant>>,
    /// Whether a change failed by a sync, after which the store takes none.
    pub(crate) is_poisoned: AtomicBool,
}

impl Recorder {
    pub(crate) fn new(log: Option<Arc<AuditLog>>) -> Self {
        Self { log, written: Mutex::default(), is_poisoned: AtomicBool::new(false) }
    }

    /// Whether there is a log.
    pub(crate) fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Appends a change; what it returns is done once it is in the log.
    pub(crate) fn append(&self, change: NewChange) -> Option<oneshot::Receiver<()>> {
        self.log.as_ref()?.append(change)
    }

    /// The same for writing to a file, unless this was recorded already.
    pub(crate) fn append_writing(&self, change: NewChange) -> Option<oneshot::Receiver<()>> {
        let (key, now) = (key(&change), Instant::now());
        if !self.is_new_writing(key, now) {
            return None;
        }
        let appended = self.append(change);
        if appended.is_some() {
            self.remember(key, now);
        }
        appended
    }

    fn is_new_writing(&self, key: blake3::Hash, now: Instant) -> bool {
        let written = self.written.lock();
        written.get(&key).is_none_or(|at| now.duration_since(*at) >= WRITING)
    }

    fn remember(&self, key: blake3::Hash, now: Instant) {
        let mut written = self.written.lock();
        if written.len() >= WRITTEN_MAX {
            written.retain(|_, at| now.duration_since(*at) < WRITING);
            if written.len() >= WRITTEN_MAX {
                // What is forgotten is recorded once more.
                written.clear();
            }
        }
        written.insert(key, now);
    }
}

/// What makes a writing another one: who, from where, with what outcome, to which file. What failed says nothing of what
/// succeeds.
fn key(change: &NewChange) -> blake3::Hash {
    let NewChange { kind, by, from, status, call, .. } = change;
    blake3::hash(format!("{kind:?} {by} {from:?} {status:?} {call}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Timestamp;

    #[test]
    fn writing_to_a_file_is_told_once_an_hour_for_each_caller_and_outcome() {
        let recorder = Recorder::new(None);
        let now = Instant::now();
        let told = |by: &str, call: &str, status: u16, seconds| {
            let change = NewChange::of_appliance(Timestamp::from_nanos(0), call, None);
            let change = NewChange { by: by.to_owned(), status: Some(status), ..change };
            let (key, now) = (key(&change), now + Duration::from_secs(seconds));
            let is_new = recorder.is_new_writing(key, now);
            if is_new {
                recorder.remember(key, now);
            }
            is_new
        };
        assert!(told("a", "PUT /x", 507, 0));
        assert!(told("a", "PUT /x", 200, 0));
        assert!(!told("a", "PUT /x", 200, 3599));
        assert!(told("b", "PUT /x", 200, 3599));
        assert!(told("a", "PUT /y", 200, 3599));
        assert!(told("a", "PUT /x", 200, 3600));
        for number in 0..2 * WRITTEN_MAX {
            assert!(told("many", &number.to_string(), 200, 3600));
        }
        assert!(recorder.written.lock().len() <= WRITTEN_MAX);
    }
}

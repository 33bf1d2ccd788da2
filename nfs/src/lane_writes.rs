//! The files that have WRITEs in a lane, waiting or being run.
//!
//! ```text
//! WRITE -- none of its file is in the lane? -- yes --> may be run by the reader
//!                                              no ---> lane, behind those
//! ```
//! Invariant: a WRITE is counted before it is in the lane, and until it was run or dropped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use slackwater_blockstore::InodeId;

/// How many WRITEs of which files are in the lane.
#[derive(Debug, Default)]
pub(crate) struct LaneWrites {
    /// Of all files, so that none at all is found without the lock.
    all: AtomicUsize,
    /// Files without any are not in it.
    files: Mutex<HashMap<InodeId, usize>>,
}

impl LaneWrites {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.load(Ordering::Acquire) == 0
    }

    /// Whether there is one of this file.
    pub(crate) fn contains(&self, file: InodeId) -> bool {
        self.files.lock().contains_key(&file)
    }
}

/// A WRITE in the lane. Dropped when it was run, or will not be.
#[derive(Debug)]
pub(crate) struct LaneWrite {
    writes: Arc<LaneWrites>,
    file: InodeId,
}

impl LaneWrite {
    /// One more of this file.
    pub(crate) fn new(writes: &Arc<LaneWrites>, file: InodeId) -> Self {
        *writes.files.lock().entry(file).or_default() += 1;
        writes.all.fetch_add(1, Ordering::Release);
        Self { writes: Arc::clone(writes), file }
    }
}

impl Drop for LaneWrite {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.writes.files.lock().entry(self.file) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.writes.all.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_until_its_last_write_ended() {
        let writes = Arc::new(LaneWrites::default());
        let (file, other) = (InodeId::new(7), InodeId::new(8));
        assert!(writes.is_empty() && !writes.contains(file));
        let first = LaneWrite::new(&writes, file);
        let second = LaneWrite::new(&writes, file);
        let third = LaneWrite::new(&writes, other);
        drop(first);
        assert!(!writes.is_empty() && writes.contains(file) && writes.contains(other));
        drop(second);
        assert!(!writes.is_empty() && !writes.contains(file) && writes.contains(other));
        drop(third);
        assert!(writes.is_empty() && writes.files.lock().is_empty());
    }
}

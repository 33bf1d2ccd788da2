//! The thread that writes to the disk what is in the files of the audit log, so that no change waits for a sync.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

/// How often: each time costs what a commit costs.
pub(super) const SYNC_INTERVAL: Duration = Duration::from_secs(5);

/// Files with lines that are not on the disk yet: the one that is written, and the one before. And the directories of new
/// ones.
type Dirty = Arc<Mutex<Vec<Arc<File>>>>;

/// The way to the thread. It ends when this is dropped, after a last sync.
pub(super) struct Syncer {
    dirty: Dirty,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Syncer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives none.
    pub(super) fn start() -> io::Result<Self> {
        let dirty = Dirty::default();
        let (end, ended) = channel();
        let files = Arc::clone(&dirty);
        let thread = std::thread::Builder::new().name("audit sync".to_owned());
        let thread = thread.spawn(move || run(&files, &ended))?;
        Ok(Self { dirty, end: Some(end), thread: Some(thread) })
    }

    /// There is something new in the file.
    pub(super) fn note(&self, file: &Arc<File>) {
        let mut dirty = self.dirty.lock();
        if !dirty.iter().any(|other| Arc::ptr_eq(other, file)) {
            dirty.push(Arc::clone(file));
        }
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.end = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("writing the audit log to the disk panicked");
        }
    }
}

fn run(dirty: &Dirty, ended: &Receiver<()>) {
    loop {
        let is_end = ended.recv_timeout(SYNC_INTERVAL) != Err(RecvTimeoutError::Timeout);
        let files = std::mem::take(&mut *dirty.lock());
        for file in files {
            // All of it: the data alone of a directory need not be the names in it.
            if let Err(error) = file.sync_all() {
                tracing::error!(%error, "the audit log cannot be written to the disk: a power cut may take its last lines");
            }
        }
        if is_end {
            return;
        }
    }
}

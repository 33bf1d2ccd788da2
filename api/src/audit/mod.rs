//! The audit log: who changed what, in files of the data directory.
//!
//! ```text
//! record.rs   a request that changes something --> NewChange
//!                                                     |  bounded queue
//! writer.rs                                           v  one thread: one line of JSON, then the answer goes out
//! files.rs    audit/00000000000000000001.jsonl, ...       syncer.rs: to the disk, each few seconds
//!             |<----- at most FILES_MAX files, of FILE_BYTES_MAX; the oldest goes first
//! page        the newest first
//! ```
//!
//! Invariants: numbers grow by one for each change, over restarts as well; one that could not be written leaves its number
//! free, as long as the server runs. A line is whole, or is passed over. A log that cannot be written stops no call and no
//! start: a full disk has to take deletes. What is in it outlives the process, and a power cut after
//! [`syncer::SYNC_INTERVAL`].

mod files;
pub(crate) mod record;
pub(crate) mod recorder;
mod syncer;
mod writer;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::oneshot;

use self::syncer::Syncer;
use self::writer::{Message, Writer};
use crate::change::{CallerKind, Change, ChangePage};
use crate::types::Timestamp;

/// Bytes of one file: what a page of the newest changes reads at most.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Files that are kept: 64 MiB, some 250,000 changes of short paths.
const FILES_MAX: usize = 16;

/// Bytes of one text of a change, such as a path.
const TEXT_BYTES_MAX: usize = 1024;

/// Changes that wait for the disk: those of all requests under way, and as many again of callers that have left.
const WAITING_MAX: usize = 1024;

/// The audit log of a data directory.
#[derive(Debug)]
pub struct AuditLog {
    directory: PathBuf,
    queue: SyncSender<Message>,
    writer: Mutex<Option<JoinHandle<()>>>,
    counts: Arc<Counts>,
}

/// What became of changes since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Written.
    pub(crate) written: Counter,
    /// Not written.
    pub(crate) lost: Counter,
}

/// A change without its number.
#[derive(Clone, Debug)]
pub struct NewChange {
    /// When.
    pub at: Timestamp,
    /// What kind of caller.
    pub kind: CallerKind,
    /// Its name.
    pub by: String,
    /// Its address.
    pub from: Option<String>,
    /// What it called, or what the appliance did.
    pub call: String,
    /// What that does not say.
    pub about: Option<String>,
    /// The route of what was made.
    pub made: Option<String>,
    /// What was answered.
    pub status: Option<u16>,
}

/// Which changes to read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    /// Those before this number.
    pub(crate) before: Option<u64>,
    /// Those of this caller.
    pub(crate) by: Option<String>,
    pub(crate) limit: usize,
}

impl AuditLog {
    /// The log in this directory, which is made with the first change. What is wrong with it is in the server's log, and
    /// each change tries again.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn open(directory: PathBuf) -> io::Result<Self> {
        let (queue, messages) = sync_channel(WAITING_MAX);
        let counts = Arc::new(Counts::default());
        let writer = Writer::new(directory.clone(), Arc::clone(&counts), Syncer::start()?);
        let thread = std::thread::Builder::new().name("audit log".to_owned());
        let writer = Mutex::new(Some(thread.spawn(move || writer.run(&messages))?));
        Ok(Self { directory, queue, writer, counts })
    }

    /// Appends a change. Returns at once; what it returns is done once the change outlives the process, or is lost: then
    /// it is counted, and the server's log says so. `None`: it is lost, as too many wait.
    pub fn append(&self, change: NewChange) -> Option<oneshot::Receiver<()>> {
        let (done, is_done) = oneshot::channel();
        match self.queue.try_send(Message::Change(Box::new(change.bounded()), done)) {
            Ok(()) => Some(is_done),
            // The disk stalls; or the server has closed the log.
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.counts.lost.inc();
                None
            }
        }
    }

    /// Writes to the disk what was appended, and ends. What is appended afterwards is lost. Takes as long as the disk
    /// does; to be called beside the runtime.
    pub fn close(&self) {
        let Some(writer) = self.writer.lock().take() else { return };
        // An error means that it has ended.
        let _ = self.queue.send(Message::Close);
        if writer.join().is_err() {
            tracing::error!("the audit log panicked; its last lines may be missing");
        }
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// A page of changes, the newest first. Reads whole files until it has enough; to be called beside the runtime.
    pub(crate) fn page(&self, wanted: &Wanted) -> io::Result<ChangePage> {
        let mut items: Vec<Change> = Vec::new();
        for file in files::list(&self.directory)?.iter().rev() {
            if wanted.before.is_some_and(|before| file.first >= before) {
                continue;
            }
            for change in files::lines::<Change>(&files::read(file, FILE_BYTES_MAX)?) {
                let is_wanted = wanted.before.is_none_or(|before| change.number < before)
                    && wanted.by.as_ref().is_none_or(|by| *by == change.by);
                if !is_wanted {
                    continue;
                }
                if items.len() == wanted.limit {
                    let next = items.last().map(|last| last.number.to_string());
                    return Ok(ChangePage { items, next });
                }
                items.push(change);
            }
        }
        Ok(ChangePage { items, next: None })
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl NewChange {
    /// What the appliance did itself.
    #[must_use]
    pub fn of_appliance(at: Timestamp, call: impl Into<String>, about: Option<String>) -> Self {
        let (kind, by) = (CallerKind::Appliance, String::new());
        Self { at, kind, by, from: None, call: call.into(), about, made: None, status: None }
    }

    fn bounded(self) -> Self {
        Self {
            by: bounded(self.by),
            call: bounded(self.call),
            about: self.about.map(bounded),
            made: self.made.map(bounded),
            ..self
        }
    }

    fn numbered(self, number: u64) -> Change {
        let Self { at, kind, by, from, call, about, made, status } = self;
        Change { number, at, kind, by, from, call, about, made, status }
    }
}

/// The text; of one that is longer than a change may have, its begin and its end.
fn bounded(text: String) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text;
    }
    let begin = text.floor_char_boundary(TEXT_BYTES_MAX / 2);
    let end = text.ceil_char_boundary(text.len() - TEXT_BYTES_MAX / 2);
    format!("{}...{}", &text[..begin], &text[end..])
}

#[cfg(test)]
mod tests;

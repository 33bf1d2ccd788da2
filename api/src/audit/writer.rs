//! The thread that writes lines into the audit log: one, so that a disk that stalls holds one thread, whatever callers
//! do. Another one writes them to the disk (`syncer.rs`).

use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::syncer::Syncer;
use super::{Counts, FILE_BYTES_MAX, FILES_MAX, NewChange, files};
use crate::change::Change;

/// How often the server's log says that changes could not be written.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// What the thread is asked to do.
pub(super) enum Message {
    /// To append a change, and say so.
    Change(Box<NewChange>, oneshot::Sender<()>),
    /// To write all to the disk, and end.
    Close,
}

/// The file that is written.
struct Current {
    file: Arc<File>,
    length_bytes: u64,
    /// Whether a part of a line is at its end, which a fault left.
    is_torn: bool,
}

/// The state of the thread.
pub(super) struct Writer {
    directory: PathBuf,
    counts: Arc<Counts>,
    /// The number of the next change; unknown as long as what is there cannot be read.
    next: Option<u64>,
    /// Of the lost changes, those that have a number.
    numbered: u64,
    /// Of the lost changes, those that this thread could not write; the queue had no room for the others.
    unwritten: u64,
    /// The others that were reported.
    reported: u64,
    current: Option<Current>,
    syncer: Syncer,
    reported_at: Option<Instant>,
}

impl Writer {
    pub(super) fn new(directory: PathBuf, counts: Arc<Counts>, syncer: Syncer) -> Self {
        let (next, current, reported_at) = (None, None, None);
        let (numbered, unwritten, reported) = (0, 0, 0);
        Self {
            directory,
            counts,
            next,
            numbered,
            unwritten,
            reported,
            current,
            syncer,
            reported_at,
        }
    }

    /// Works until it is to end, or no sender is left.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        if let Err(error) = self.recover() {
            self.report(&error);
        }
        while let Ok(Message::Change(change, done)) = messages.recv() {
            self.append(*change);
            // An error means that its caller has left.
            let _ = done.send(());
        }
    }

    /// Finds what is there. A line that a crash cut is taken away, or passed over.
    fn recover(&mut self) -> io::Result<u64> {
        let newest = files::list(&self.directory)?.pop();
        let next = match &newest {
            None => 1,
            Some(newest) => {
                // A process that was killed may not have come to it.
                for directory in [Some(&*self.directory), self.directory.parent()] {
                    if let Some(directory) = directory.and_then(files::opened) {
                        self.syncer.note(&Arc::new(directory));
                    }
                }
                let found = files::recover(newest, FILE_BYTES_MAX)?;
                match found.file {
                    Ok(file) => {
                        let (file, length_bytes) = (Arc::new(file), found.length_bytes);
                        self.current = Some(Current { file, length_bytes, is_torn: false });
                    }
                    // The next change begins another file.
                    Err(error) => self.report(&error),
                }
                found.last.map_or(newest.first, |last| last.saturating_add(1).max(newest.first))
            }
        };
        self.next = Some(next);
        Ok(next)
    }

    fn append(&mut self, change: NewChange) {
        let without_room = self.counts.lost.get() - self.unwritten;
        if without_room > self.reported {
            self.reported = without_room;
            let error = "more changes came than fit into its queue, as the disk is slow";
            self.report(&io::Error::other(error));
        }
        let next = match self.next {
            Some(next) => Ok(next),
            None => self.recover(),
        };
        let written = next.and_then(|next| {
            // What was lost has a number, so that it is missed.
            let lost = self.counts.lost.get();
            let number = next.saturating_add(lost - self.numbered);
            self.numbered = lost;
            self.next = Some(number.saturating_add(1));
            self.write(&change.clone().numbered(number)).inspect_err(|_| self.numbered += 1)
        });
        match written {
            Ok(()) => {
                self.counts.written.inc();
            }
            Err(error) => {
                self.unwritten += 1;
                self.counts.lost.inc();
                let (call, by) = (&change.call, &change.by);
                tracing::debug!(%error, call, by, "a change is not in the audit log");
                self.report(&error);
            }
        }
    }

    fn report(&mut self, error: &io::Error) {
        if self.reported_at.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            self.reported_at = Some(Instant::now());
            tracing::warn!(
                %error, lost = self.counts.lost.get(), directory = %self.directory.display(),
                "the audit log cannot be written; changes are made all the same"
            );
        }
    }

    fn write(&mut self, change: &Change) -> io::Result<()> {
        let mut line = serde_json::to_vec(change)?;
        line.push(b'\n');
        let length = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let has_room = |current: &Current| current.length_bytes + length < FILE_BYTES_MAX;
        if !self.current.as_ref().is_some_and(has_room) {
            let begun = files::begin(&self.directory, change.number, FILES_MAX)?;
            for directory in begun.directories {
                self.syncer.note(&Arc::new(directory));
            }
            let file = Arc::new(begun.file);
            self.current = Some(Current { file, length_bytes: 0, is_torn: false });
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        if current.is_torn {
            (&*current.file).write_all(b"\n")?;
            (current.is_torn, current.length_bytes) = (false, current.length_bytes + 1);
        }
        if let Err(error) = (&*current.file).write_all(&line) {
            // Else the next line would stand behind a part of this one.
            if current.file.set_len(current.length_bytes).is_err() {
                let found = current.file.metadata().map(|found| found.len());
                current.length_bytes = found.unwrap_or(FILE_BYTES_MAX);
                current.is_torn = true;
            }
            return Err(error);
        }
        current.length_bytes += length;
        self.syncer.note(&current.file);
        Ok(())
    }
}

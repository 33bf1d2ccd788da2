//! The loop that takes requests from the kernel and has each answered by a task of its own.
//!
//! ```text
//! /dev/fuse --> receive --> INIT, FORGET, INTERRUPT, DESTROY: here, in order
//!                      \--> all others: a task each, bounded in number --> reply
//! ```
//!
//! Invariant: every request that the kernel waits for is answered once, also if its task
//! panics. A process that dies answers nothing more; the one that resumes asks the kernel to
//! hand out again what was taken and not answered (Linux 6.9). An older kernel cannot do that:
//! there such a request waits until the mount is aborted, and with it who made it.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::device::Device;
use crate::error::ServeError;
use crate::export::Export;
use crate::file::ServedFile;
use crate::journal::Record;
use crate::wire::{
    InitRequest, MAJOR, MINOR_MIN, NOTIFY_RESEND, Operation, REQUEST_HEADER_BYTES, Request,
    UNIQUE_RESENT,
};

/// Requests that are answered at a time: more than the kernel has in the background, for those that a program waits for. At
/// 1 MiB each they hold 256 MiB when the appliance is away and twenty containers write all they can.
const REQUESTS_MAX: usize = 256;

/// Time that the writes of an export that was unmounted have to be committed.
const LAST_COMMITS_MAX: Duration = Duration::from_secs(10);

/// Whether the session goes on.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    End,
}

/// Answers a request if its task panics.
struct Answer {
    device: Arc<Device>,
    unique: u64,
    _slot: OwnedSemaphorePermit,
}

impl Drop for Answer {
    fn drop(&mut self) {
        // A task that is merely dropped belongs to a process that ends: its request is for
        // the next one.
        if std::thread::panicking() {
            self.device.reply(self.unique, Err(Errno::IO));
        }
    }
}

/// One mount.
pub(crate) struct Session {
    device: Arc<Device>,
    export: Arc<Export>,
    is_started: bool,
    slots: Arc<Semaphore>,
    tasks: JoinSet<()>,
}

impl Session {
    pub(crate) fn new(device: Device, export: Arc<Export>) -> Self {
        let is_started = export.journal.lock().state().started.is_some();
        Self {
            device: Arc::new(device),
            export,
            is_started,
            slots: Arc::new(Semaphore::new(REQUESTS_MAX)),
            tasks: JoinSet::new(),
        }
    }

    /// Goes on where a process that died was.
    pub(crate) async fn resume(&self) {
        self.export.recover().await;
        match self.device.notify(NOTIFY_RESEND) {
            Ok(()) => tracing::info!("the kernel hands out again what was not answered"),
            Err(errno) => tracing::error!(
                %errno,
                "the kernel cannot hand out again what the process before took and did not \
                 answer (Linux 6.9 can): what waits for such a request waits for ever; abort the \
                 mount in /sys/fs/fuse/connections if something does"
            ),
        }
    }

    /// Serves until the file system is unmounted.
    pub(crate) async fn run(mut self) -> Result<(), ServeError> {
        let mut buffer = Vec::new();
        loop {
            let received = self.device.receive(&mut buffer).await;
            let Some(bytes) = received.map_err(|source| ServeError::Device { source })? else {
                break;
            };
            while self.tasks.try_join_next().is_some() {}
            let Ok(request) = Request::decode(bytes) else {
                let reason = format!("a request under {REQUEST_HEADER_BYTES} bytes");
                let source = std::io::Error::new(std::io::ErrorKind::InvalidData, reason);
                return Err(ServeError::Device { source });
            };
            if self.take(request).await? == Next::End {
                break;
            }
        }
        self.finish().await;
        Ok(())
    }

    async fn take(&mut self, request: Request) -> Result<Next, ServeError> {
        self.export.statistics.requests.add(1);
        if let Some(Operation::Init(init)) = request.operation {
            self.start(request.unique, &init)?;
            return Ok(Next::GoOn);
        }
        if !self.is_started {
            return Err(self.not_started());
        }
        match &request.operation {
            Some(Operation::Forget(forgotten)) => {
                for (node, count) in forgotten {
                    if let Some(file) = self.export.nodes.forget(*node, *count) {
                        self.give_up(file);
                    }
                }
            }
            // Whoever is interrupted waits on: nothing here takes long but for the appliance,
            // and that has the request already.
            Some(Operation::Interrupt) => {}
            Some(Operation::Destroy) => {
                self.device.reply(request.unique, Ok(&[]));
                return Ok(Next::End);
            }
            _ => self.spawn(request).await,
        }
        Ok(Next::GoOn)
    }

    /// The kernel has no more use for the file: what is kept of it goes, after a last commit. The
    /// answer to its release may still be under way, and need it.
    fn give_up(&mut self, file: Arc<ServedFile>) {
        if file.writes.lock().kept.is_empty() {
            return;
        }
        let export = Arc::clone(&self.export);
        self.tasks.spawn(async move {
            if let Err(errno) = export.commit(&file).await {
                tracing::error!(
                    %errno, source = ?file.source,
                    "uncommitted writes of a file that nobody has open are lost"
                );
            }
            export.change_writes(&file, |writes| writes.kept.clear());
        });
    }

    fn not_started(&self) -> ServeError {
        ServeError::Journal {
            path: self.export.journal.lock().path().to_owned(),
            got: "the kernel was greeted, and nothing tells with what".to_owned(),
        }
    }

    fn start(&mut self, unique: u64, init: &InitRequest) -> Result<(), ServeError> {
        if init.major != MAJOR || init.minor < MINOR_MIN {
            self.device.reply(unique, Err(Errno::PROTO));
            return Err(ServeError::Version {
                got_major: init.major,
                got_minor: init.minor,
                expected_minor: MINOR_MIN,
            });
        }
        let record = Record::Started { minor: init.minor, has_resend: init.has_resend() };
        // Without it nothing could be resumed: better not to begin.
        let mut journal = self.export.journal.lock();
        let path = journal.path().to_owned();
        journal.append(&record).map_err(|source| ServeError::File { path, source })?;
        drop(journal);
        self.is_started = true;
        self.device.reply(unique, Ok(&[init.reply().into()]));
        tracing::info!(minor = init.minor, has_resend = init.has_resend(), "mounted");
        Ok(())
    }

    async fn spawn(&mut self, request: Request) {
        let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else { return };
        if request.unique & UNIQUE_RESENT != 0 {
            tracing::info!(?request.node, "a request of the process before is answered");
        }
        let (unique, device) = (request.unique, Arc::clone(&self.device));
        let export = Arc::clone(&self.export);
        self.tasks.spawn(async move {
            let answer = Answer { device, unique, _slot: slot };
            let outcome = export.answer(request).await;
            answer.device.reply(unique, outcome.as_deref().map_err(|errno| *errno));
        });
    }

    /// Lets what is under way end, and commits what nobody synced, within a bounded time: the
    /// appliance may be away for good.
    async fn finish(mut self) {
        let all = async {
            while self.tasks.join_next().await.is_some() {}
            for file in self.export.nodes.files() {
                if let Err(errno) = self.export.commit(&file).await {
                    tracing::error!(%errno, source = ?file.source, "the last commit failed");
                }
            }
        };
        if timeout(LAST_COMMITS_MAX, all).await.is_err() {
            tracing::error!(
                bytes = self.export.kept_bytes(),
                "unmounted while the appliance is away: writes that nobody synced may be lost"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_kept_of_a_forgotten_file_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let (export, file) = crate::write::tests::served(folder.path());
        let (device, _kernel) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut session = Session::new(Device::new(device.into()).unwrap(), Arc::new(export));
        session.is_started = true;
        let export = Arc::clone(&session.export);
        export.change_writes(&file, |writes| writes.kept.insert(0, "abc".into(), [1; 8]));
        // So that its last commit fails.
        file.writes.lock().is_lost = true;
        let operation = Some(Operation::Forget(vec![(file.node, 1)]));
        let request = Request { unique: 0, node: file.node, operation };
        assert_eq!(session.take(request).await.unwrap(), Next::GoOn);
        assert_eq!(export.nodes.get(file.node).unwrap_err(), Errno::STALE);
        session.finish().await;
        assert_eq!(export.kept_bytes(), 0);
    }
}

//! containerd's diff service, as far as it unpacks: a layer that the appliance has is compared, and not written again.
//!
//! ```text
//! docker pull and load, nerdctl, ctr images pull --local
//!    |
//! containerd --Apply(blob, mounts)--> the active snapshot that has its mount point there
//!    ^                                  the chain id in its key and label --> a snapshot of the appliance (remote.rs)
//!    |                                  the blob --> tar --> SHA-256, the diff id
//!    |                                      chain id of the one below, with the diff id = that chain id?
//!    +------- the diff id <-- the active snapshot is bound to that of the appliance <-- yes
//! ```
//! The engine has fetched the blob before, so that it can save, export and push the image, and build on it, as with any
//! snapshotter; what it would have unpacked is on the appliance.
//!
//! - Nothing is bound that was only looked up: the blob is read to its end, and is that layer.
//! - What this one does not do, or fails at before that, is answered with `Unimplemented`: containerd's own differ
//!   unpacks the layer then, and compares it with the image.
//! - A caller who leaves ends the reading.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes};
use slackwater_client::types::{ChainId, SnapshotId};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::diff::{Caller, Differ, PIECES_MAX, Waiting, bound, other};
use super::error::CallError;
use super::proto::{ApplyRequest, ApplyResponse, Descriptor};
use super::remote;
use super::snapshotter::extra;
use crate::engine::containerd::Containerd;
use crate::image::digest::{Digest, HashingWriter, chain_id};
use crate::image::form::{self, Form};
use crate::trust::unpacking;
use crate::worker::{Engine, Kind, Volume, WorkerError};

/// What the appliance has of a layer that is to be unpacked.
struct Wanted {
    volume: Volume,
    chain: ChainId,
    below: Option<String>,
    snapshot: SnapshotId,
}

impl Differ {
    /// Gives an active snapshot the content of a layer.
    pub(super) async fn apply(
        &self,
        caller: Caller,
        request: ApplyRequest,
    ) -> Result<ApplyResponse, CallError> {
        let layer = request.diff.unwrap_or_default();
        // Payloads are for programs that change a layer first. Such a layer has another media type.
        if !form::is_read(&layer.media_type) {
            let reason = format!("layers of type `{}` are not read here", layer.media_type);
            return Err(other(reason));
        }
        if caller.namespace.is_empty() {
            return Err(other("the call names no namespace"));
        }
        let path = bound(&request.mounts)?.to_owned();
        let waiting = Waiting(Arc::default());
        let has_left = Arc::clone(&waiting.0);
        let differ = self.clone();
        let work = tokio::spawn(async move {
            // Most calls are about layers of others, or new ones: they wait for nobody.
            let wanted = differ.wanted(&path).await?;
            // An error: the driver ends.
            let _turn = differ.readings.acquire().await;
            differ.adopt(&caller, &layer.digest, wanted, &path, has_left).await
        });
        let (diff_id, size_bytes) = work.await??;
        drop(waiting);
        let applied = Descriptor {
            media_type: Form::Tar.media_type().to_owned(),
            digest: diff_id.to_string(),
            size: i64::try_from(size_bytes).unwrap_or(i64::MAX),
        };
        Ok(ApplyResponse { applied: Some(applied) })
    }

    /// What the appliance has of the layer that is to be unpacked at this path.
    async fn wanted(&self, path: &Path) -> Result<Wanted, CallError> {
        let Some(volume) = self.worker.disk_at(Engine::Containerd, path) else {
            // Nothing may be unpacked where a disk was.
            return Err(match self.worker.is_place_of_disk(path) {
                true => CallError::NoDisk { path: path.to_owned() },
                false => other(format!("{} is no disk of this driver", path.display())),
            });
        };
        let active = extra(&volume)?;
        let wanted = unpacking::unpacked_into(&volume.key.name);
        let Some(chain) = wanted.filter(|_| active.kind == Kind::Active) else {
            return Err(other(format!("{} is no layer that an image names", volume.key)));
        };
        let below = match &volume.parent {
            None => None,
            Some(parent) => {
                let below = self.worker.get(parent);
                let known = below.as_ref().and_then(|below| extra(below).ok()?.chain.clone());
                Some(known.ok_or_else(|| other(format!("{parent} is not known to be a chain")))?)
            }
        };
        let found = remote::found(&self.worker, &volume, &chain).await;
        match found.map_err(|error| unpacked(&error))? {
            Some(snapshot) => Ok(Wanted { volume, chain, below, snapshot }),
            None => Err(other(format!("the appliance does not have layer {chain}"))),
        }
    }

    /// Compares the blob with what is wanted, and takes that. Returns the diff id, and the bytes of the tar.
    async fn adopt(
        &self,
        caller: &Caller,
        digest: &str,
        wanted: Wanted,
        path: &Path,
        has_left: Arc<AtomicBool>,
    ) -> Result<(Digest, u64), CallError> {
        let Wanted { volume, chain, below, snapshot } = wanted;
        let read = self.diff_id(caller, digest, Arc::clone(&has_left)).await;
        let (diff_id, size_bytes) =
            read.map_err(|error| match has_left.load(Ordering::Acquire) {
                true => other("the caller waits no more"),
                false => unpacked(&*error),
            })?;
        let got = chain_id(below.as_deref(), &diff_id.to_string());
        if got != chain.as_str() {
            tracing::warn!(key = %volume.key, blob = digest, got, expected = %chain,
                "a blob is not the layer that its image names: containerd unpacks and refuses it");
            return Err(other(format!("the blob is layer {got}, expected {chain}")));
        }
        self.worker.bind(&volume.key, snapshot).await.map_err(|error| match error {
            // It was removed while its blob was read: nothing may be unpacked in its place.
            WorkerError::NotFound { .. } => CallError::NoDisk { path: path.to_owned() },
            other => unpacked(&other),
        })?;
        tracing::debug!(key = %volume.key, %snapshot, "the appliance has this layer: not unpacked");
        Ok((diff_id, size_bytes))
    }

    /// The digest and the size of a blob's tar.
    async fn diff_id(
        &self,
        caller: &Caller,
        digest: &str,
        has_left: Arc<AtomicBool>,
    ) -> Result<(Digest, u64), Box<dyn std::error::Error + Send + Sync>> {
        let containerd = Containerd::connect(&self.api, &caller.namespace).await?;
        let mut parts = containerd.open(digest).await?;
        let (sender, receiver) = mpsc::channel(PIECES_MAX);
        let sink = Until(Arc::clone(&has_left));
        let hashed = spawn_blocking(move || hash(Received::new(receiver), sink));
        // The thread ends with this function, which has the other end.
        let read = loop {
            if has_left.load(Ordering::Acquire) {
                break Err("the caller waits no more".into());
            }
            let part = match parts.next().await {
                Ok(Some(part)) => part,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.into()),
            };
            // What the thread failed at is told below.
            if sender.send(Ok(part)).await.is_err() {
                break Ok(());
            }
        };
        if read.is_err() {
            let cut = io::Error::from(io::ErrorKind::UnexpectedEof);
            let _ = sender.send(Err(cut)).await;
        }
        drop(sender);
        let hashed = hashed.await?;
        read.and(hashed.map_err(Into::into))
    }
}

/// containerd unpacks what this driver was to compare and cannot.
fn unpacked(error: &(dyn std::error::Error + 'static)) -> CallError {
    tracing::warn!(%error, "containerd unpacks a layer that the appliance may have");
    other(error.to_string())
}

/// Where a tar goes until the caller leaves: a short blob can be a very long tar.
struct Until(Arc<AtomicBool>);

impl Write for Until {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.load(Ordering::Acquire) {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hash(blob: Received, sink: Until) -> io::Result<(Digest, u64)> {
    let mut writer = HashingWriter::new(sink);
    io::copy(&mut form::decoder(blob)?, &mut writer)?;
    Ok(writer.finish())
}

/// Reads what comes in parts; a part that is an error ends it.
struct Received {
    parts: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Received {
    fn new(parts: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { parts, current: Bytes::new() }
    }
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.parts.blocking_recv() {
                Some(part) => self.current = part?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.current.len());
        self.current.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

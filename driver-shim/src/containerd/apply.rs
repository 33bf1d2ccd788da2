//! containerd's diff service, as far as it unpacks: a layer that the appliance has is compared, and not written again;
//! where layers are kept as images, others are written as such.
//!
//! ```text
//! docker pull and load, nerdctl, ctr images pull --local
//!    |
//! containerd --Apply(blob, mounts)--> the active snapshot that has its mount point there
//!    ^                                  the chain id in its key and label --> a snapshot of the appliance (remote.rs)
//!    |                                  the blob --> tar --> SHA-256, the diff id
//!    |                                      chain id of the one below, with the diff id = that chain id?
//!    +------- the diff id <-- the active snapshot is bound to that of the appliance <-- yes
//!
//!    where the appliance has none, and layers are images:
//!                                       the blob --> tar --> SHA-256, and an image of it
//!    +------- the diff id <-- the active snapshot is that image                     <-- yes
//! ```
//! The engine has fetched the blob before, so that it can save, export and push the image, and build on it, as with any
//! snapshotter; what it would have unpacked is on the appliance.
//!
//! - Nothing is bound that was only looked up: the blob is read to its end, and is that layer.
//! - A reference is not made an image: containerd unpacks it, and Commit finds it.
//! - What this one does not do, or fails at before that, is answered with `Unimplemented`: containerd's own differ
//!   unpacks the layer then, and compares it with the image.
//! - A caller who leaves ends the reading.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes};
use slackwater_archive::Recognised;
use slackwater_client::types::{ChainId, SnapshotId};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::diff::{Caller, Differ, PIECES_MAX, Waiting, bound, other, upper};
use super::error::CallError;
use super::proto::{ApplyRequest, ApplyResponse, Descriptor, Mount};
use super::remote;
use super::snapshotter::extra;
use crate::engine::containerd::Containerd;
use crate::image::digest::{Digest, HashingReader, chain_id};
use crate::image::form::{self, Form};
use crate::trust::unpacking;
use crate::worker::{Engine, Kind, LayerKind, Volume, WorkerError};

/// A layer that is to be unpacked.
struct Wanted {
    volume: Volume,
    chain: ChainId,
    below: Option<String>,
    /// What the appliance has of it; if nothing, it becomes an image.
    found: Option<(SnapshotId, LayerKind)>,
}

/// A blob that was read to its end.
struct Unpacked<T> {
    diff_id: Digest,
    size_bytes: u64,
    made: T,
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
        let path = place(&request.mounts)?.to_owned();
        let waiting = Waiting(Arc::default());
        let has_left = Arc::clone(&waiting.0);
        let differ = self.clone();
        let work = tokio::spawn(async move {
            // Most calls are about layers of others, or new ones: they wait for nobody.
            let wanted = differ.wanted(&path).await?;
            // An error: the driver ends.
            let _turn = differ.readings.acquire().await;
            let read = Reading { caller: &caller, blob: &layer.digest, has_left };
            match wanted.found {
                Some(found) => differ.adopt(read, wanted, found, &path).await,
                None => differ.unpack(read, wanted, &path).await,
            }
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

    /// The layer that is to be unpacked at this path.
    async fn wanted(&self, path: &Path) -> Result<Wanted, CallError> {
        let Some(volume) = self.worker.written_at(Engine::Containerd, path) else {
            // Nothing may be unpacked where a disk was.
            return Err(match self.worker.is_place_of_volume(path) {
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
        let layers = volume.layers;
        let found = remote::found(&self.worker, &volume, &chain).await;
        let found = found.map_err(|error| unpacked(&error))?;
        if found.is_none() && layers == LayerKind::Disks {
            return Err(other(format!("the appliance does not have layer {chain}")));
        }
        Ok(Wanted { volume, chain, below, found })
    }

    /// Compares the blob with what is wanted, and takes that. Returns the diff id, and the bytes of the tar.
    async fn adopt(
        &self,
        reading: Reading<'_>,
        wanted: Wanted,
        (snapshot, layers): (SnapshotId, LayerKind),
        path: &Path,
    ) -> Result<(Digest, u64), CallError> {
        let read = self.read(&reading, |tar| io::copy(tar, &mut io::sink())).await?;
        wanted.require(&read, reading.blob)?;
        let key = &wanted.volume.key;
        let bound = self.worker.bind_as(key, snapshot, layers).await;
        bound.map_err(|error| gone_or_unpacked(error, path))?;
        tracing::debug!(%key, %snapshot, "the appliance has this layer: not unpacked");
        Ok((read.diff_id, read.size_bytes))
    }

    /// Makes the blob an image, and the snapshot that.
    async fn unpack(
        &self,
        reading: Reading<'_>,
        wanted: Wanted,
        path: &Path,
    ) -> Result<(Digest, u64), CallError> {
        let key = &wanted.volume.key;
        let (worker, of) = (self.worker.clone(), key.clone());
        let runtime = tokio::runtime::Handle::current();
        let write = move |tar: &mut dyn Read| {
            let layer = match slackwater_archive::recognise(tar).map_err(io::Error::other)? {
                Recognised::Ordinary(layer) => layer,
                Recognised::Reference(_) => {
                    return Err(io::Error::other(
                        "it is a reference, which is no layer to be kept",
                    ));
                }
            };
            // Not before: a reference needs no file.
            let new = runtime.block_on(worker.new_image(&of)).map_err(io::Error::other)?;
            let imaged = new.write(layer).map_err(io::Error::other)?;
            Ok((new, imaged))
        };
        let read = self.read(&reading, write).await?;
        wanted.require(&read, reading.blob)?;
        let (new, imaged) = read.made;
        let kept = self.worker.keep_image(key, new, imaged).await;
        kept.map_err(|error| gone_or_unpacked(error, path))?;
        Ok((read.diff_id, read.size_bytes))
    }

    /// Reads the tar of a blob to its end, and does with it what is asked.
    async fn read<T: Send + 'static>(
        &self,
        reading: &Reading<'_>,
        work: impl FnOnce(&mut dyn Read) -> io::Result<T> + Send + 'static,
    ) -> Result<Unpacked<T>, CallError> {
        let read = self.read_parts(reading, work).await;
        read.map_err(|error| match reading.has_left.load(Ordering::Acquire) {
            true => other("the caller waits no more"),
            false => unpacked(&*error),
        })
    }

    async fn read_parts<T: Send + 'static>(
        &self,
        reading: &Reading<'_>,
        work: impl FnOnce(&mut dyn Read) -> io::Result<T> + Send + 'static,
    ) -> Result<Unpacked<T>, Box<dyn std::error::Error + Send + Sync>> {
        let Reading { caller, blob, has_left } = reading;
        let containerd = Containerd::connect(&self.api, &caller.namespace).await?;
        let mut parts = containerd.open(blob).await?;
        let (sender, receiver) = mpsc::channel(PIECES_MAX);
        let until = Arc::clone(has_left);
        let read = spawn_blocking(move || read_tar(Received::new(receiver), until, work));
        // The thread ends with this function, which has the other end.
        let received = loop {
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
        if received.is_err() {
            let cut = io::Error::from(io::ErrorKind::UnexpectedEof);
            let _ = sender.send(Err(cut)).await;
        }
        drop(sender);
        let read = read.await?;
        received.and(read.map_err(Into::into))
    }
}

/// A blob that is read for a caller.
struct Reading<'a> {
    caller: &'a Caller,
    /// Its digest.
    blob: &'a str,
    has_left: Arc<AtomicBool>,
}

impl Wanted {
    /// Sees that a blob is this layer.
    fn require<T>(&self, read: &Unpacked<T>, blob: &str) -> Result<(), CallError> {
        let got = chain_id(self.below.as_deref(), &read.diff_id.to_string());
        if got == self.chain.as_str() {
            return Ok(());
        }
        let (key, expected) = (&self.volume.key, &self.chain);
        tracing::warn!(%key, blob, got, %expected,
            "a blob is not the layer that its image names: containerd unpacks and refuses it");
        Err(other(format!("the blob is layer {got}, expected {expected}")))
    }
}

/// Where a layer is to be unpacked: what is to be bound, or the upper directory of an overlay.
fn place(mounts: &[Mount]) -> Result<&Path, CallError> {
    upper(mounts).map_or_else(|| bound(mounts), Ok)
}

/// What to answer where a layer that was read is not kept.
fn gone_or_unpacked(error: WorkerError, path: &Path) -> CallError {
    match error {
        // It was removed while its blob was read, or another call was faster: nothing may be unpacked in its place.
        WorkerError::NotFound { .. } | WorkerError::ReadOnly { .. } => {
            CallError::NoDisk { path: path.to_owned() }
        }
        other => unpacked(&other),
    }
}

/// containerd unpacks what this driver was to compare and cannot.
fn unpacked(error: &(dyn std::error::Error + 'static)) -> CallError {
    tracing::warn!(%error, "containerd unpacks a layer itself");
    other(error.to_string())
}

/// A tar until the caller leaves: a short blob can be a very long tar.
struct Until<R> {
    tar: R,
    has_left: Arc<AtomicBool>,
}

impl<R: Read> Read for Until<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.has_left.load(Ordering::Acquire) {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => self.tar.read(buffer),
        }
    }
}

fn read_tar<T>(
    blob: Received,
    has_left: Arc<AtomicBool>,
    work: impl FnOnce(&mut dyn Read) -> io::Result<T>,
) -> io::Result<Unpacked<T>> {
    let mut tar = HashingReader::new(Until { tar: form::decoder(blob)?, has_left });
    let made = work(&mut tar)?;
    // The diff id is that of all of it, whatever the end of an archive is.
    io::copy(&mut tar, &mut io::sink())?;
    let (diff_id, size_bytes) = tar.finish();
    Ok(Unpacked { diff_id, size_bytes, made })
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

//! containerd's diff service, as far as it unpacks: a layer that the appliance has is compared, and not written again;
//! where layers are kept as images, others are written as such.
//!
//! ```text
//! docker pull and load, nerdctl, ctr images pull, Kubernetes
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
//!                                           or, of a reference, and above a disk: into the snapshot's tree
//! ```
//! The engine has fetched the blob before, so that it can save, export and push the image, and build on it, as with any
//! snapshotter; what it would have unpacked is on the appliance.
//!
//! - Nothing is bound that was only looked up: the blob is read to its end, and is that layer.
//! - A reference is not made an image: it is unpacked as any layer, and Commit finds it.
//! - What this one does not do, or fails at before that, is answered with `Unimplemented`: containerd's own differ
//!   unpacks the layer then, and compares it with the image. That comes next in containerd's diff service. Its transfer
//!   service knows one differ for each snapshotter, so where layers are images this one does all that is to be unpacked.
//! - While the appliance is away, or does not know this worker's credential, it fails, and no other differ is asked.
//! - A caller who leaves ends the reading.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes};
use slackwater_archive::{ArchiveError, Imaged, Recognised};
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
use crate::worker::{Content, Engine, Key, Kind, LayerKind, NewImage, Volume, Worker, WorkerError};

/// Bytes of a tar that are looked at to tell whether it is a reference: one has a few KiB, and is padded by some programs.
const REFERENCE_TAR_BYTES_MAX: u64 = 128 << 10;

/// A layer that is to be unpacked.
struct Wanted {
    volume: Volume,
    how: How,
}

/// How a volume gets its layer.
enum How {
    /// It is what the appliance has.
    Adopted(Expected, (SnapshotId, LayerKind)),
    /// The driver unpacks it.
    Unpacked(Layer),
}

/// A layer that the driver unpacks.
struct Layer {
    /// It becomes an image. Else it goes into the volume's tree, as containerd unpacks.
    is_image: bool,
    /// What it has to be, if that is known.
    expected: Option<Expected>,
}

/// What the layer has to be.
struct Expected {
    chain: ChainId,
    below: Option<String>,
}

/// What a layer was made.
enum Made {
    Image(NewImage, Imaged),
    Tree,
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
            let key = &wanted.volume.key;
            match wanted.how {
                How::Adopted(layer, found) => differ.adopt(read, (key, &layer), found, &path).await,
                How::Unpacked(layer) => differ.unpack(read, (key, &layer), &path).await,
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
        // Nor into what is committed.
        if matches!(volume.content, Content::Lower { .. }) {
            return Err(CallError::NoDisk { path: path.to_owned() });
        }
        let active = extra(&volume)?;
        let wanted = unpacking::unpacked_into(&volume.key.name);
        let Some(chain) = wanted.filter(|_| active.kind == Kind::Active) else {
            return Err(other(format!("{} is no layer that an image names", volume.key)));
        };
        let below = volume.parent.as_ref().and_then(|parent| self.worker.chain_of(parent));
        if let (Some(parent), None) = (&volume.parent, &below) {
            self.require_images(format!("{parent} is not known to be a chain"))?;
            let how = How::Unpacked(Layer { is_image: false, expected: None });
            return Ok(Wanted { volume, how });
        }
        let found = remote::found(&self.worker, &volume, &chain).await;
        let found = found.map_err(|error| match error {
            CallError::Worker(error) => gone_or_unpacked(error, path),
            other => unpacked(&other),
        })?;
        let is_image = volume.layers == LayerKind::Images;
        if found.is_none() && !is_image {
            self.require_images(format!("the appliance does not have layer {chain}"))?;
        }
        let expected = Expected { chain, below };
        let how = match found {
            Some(found) => How::Adopted(expected, found),
            None => How::Unpacked(Layer { is_image, expected: Some(expected) }),
        };
        Ok(Wanted { volume, how })
    }

    /// Leaves what becomes neither an image nor of the appliance to containerd's own differ, which comes next where layers
    /// are disks.
    fn require_images(&self, reason: String) -> Result<(), CallError> {
        match self.worker.layers_setting() {
            LayerKind::Images => Ok(()),
            LayerKind::Disks => Err(other(reason)),
        }
    }

    /// Compares the blob with what is wanted, and takes that. Returns the diff id, and the bytes of the tar.
    async fn adopt(
        &self,
        reading: Reading<'_>,
        (key, expected): (&Key, &Expected),
        (snapshot, layers): (SnapshotId, LayerKind),
        path: &Path,
    ) -> Result<(Digest, u64), CallError> {
        let read = self.read(&reading, |tar| io::copy(tar, &mut io::sink())).await?;
        expected.require(key, (&read.diff_id, reading.blob))?;
        let bound = self.worker.bind_as(key, snapshot, layers).await;
        bound.map_err(|error| gone_or_unpacked(error, path))?;
        tracing::debug!(%key, %snapshot, "the appliance has this layer: not unpacked");
        Ok((read.diff_id, read.size_bytes))
    }

    /// Makes the blob an image, and the volume that, if that is how it is to be kept. What may be a reference goes into the
    /// volume's tree, and Commit binds what it names.
    async fn unpack(
        &self,
        reading: Reading<'_>,
        (key, layer): (&Key, &Layer),
        path: &Path,
    ) -> Result<(Digest, u64), CallError> {
        let has_begun = Arc::new(AtomicBool::new(false));
        let unpacking = Unpacking {
            worker: self.worker.clone(),
            key: key.clone(),
            is_image: layer.is_image,
            has_begun: Arc::clone(&has_begun),
            runtime: tokio::runtime::Handle::current(),
        };
        let read = self.read_parts(&reading, move |tar| unpacking.run(tar)).await;
        let failed = |reason: String| CallError::Unpack { key: key.clone(), reason };
        let read = match read {
            Ok(read) => read,
            // Another differ would unpack it over what is there already.
            Err(error) if has_begun.load(Ordering::Acquire) => {
                return Err(failed(error.to_string()));
            }
            Err(error) => {
                let error = match error.downcast::<io::Error>().map(|error| error.downcast()) {
                    Ok(Ok(error)) => gone_or_unpacked(error, path),
                    Ok(Err(error)) => reading.left(&error),
                    Err(error) => reading.left(&*error),
                };
                if !matches!(error, CallError::OtherDiffer { .. }) {
                    return Err(error);
                }
                // Another differ would fail where this one did, and not say why.
                let reason = self.worker.reason_of_appliance(&error.to_string()).await;
                return Err(reason.map_or(error, CallError::Worker));
            }
        };
        match (read.made, &layer.expected) {
            (Made::Image(new, imaged), Some(expected)) => {
                expected.require(key, (&read.diff_id, reading.blob))?;
                let kept = self.worker.keep_image(key, new, imaged).await;
                kept.map_err(|error| gone_or_unpacked(error, path))?;
            }
            (Made::Tree, Some(expected)) => {
                let wrong = expected.require(key, (&read.diff_id, reading.blob));
                wrong.map_err(|error| failed(error.to_string()))?;
            }
            (Made::Tree | Made::Image(..), None) => {}
        }
        Ok((read.diff_id, read.size_bytes))
    }

    /// Reads the tar of a blob to its end, and does with it what is asked.
    async fn read<T: Send + 'static>(
        &self,
        reading: &Reading<'_>,
        work: impl FnOnce(&mut dyn Read) -> io::Result<T> + Send + 'static,
    ) -> Result<Unpacked<T>, CallError> {
        self.read_parts(reading, work).await.map_err(|error| reading.left(&*error))
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

impl Reading<'_> {
    /// What to say of what was read, and not kept.
    fn left(&self, error: &(dyn std::error::Error + 'static)) -> CallError {
        match self.has_left.load(Ordering::Acquire) {
            true => other("the caller waits no more"),
            false => unpacked(error),
        }
    }
}

/// The unpacking of a tar, on a thread of its own.
struct Unpacking {
    worker: Worker,
    key: Key,
    is_image: bool,
    /// Something was written where another differ would unpack.
    has_begun: Arc<AtomicBool>,
    runtime: tokio::runtime::Handle,
}

impl Unpacking {
    fn run(&self, tar: &mut dyn Read) -> io::Result<Made> {
        let mut first = Vec::new();
        (&mut *tar).take(REFERENCE_TAR_BYTES_MAX).read_to_end(&mut first)?;
        let (is_reference, alone) = match slackwater_archive::recognise(&first[..]) {
            Ok(Recognised::Reference(_)) => (true, true),
            Err(ArchiveError::BadReference { .. } | ArchiveError::ReferenceNotAlone { .. }) => {
                (true, false)
            }
            // What is wrong with others is found as they are read.
            Ok(Recognised::Ordinary(_)) | Err(_) => (false, false),
        };
        let tar = Read::chain(io::Cursor::new(first), tar);
        if self.is_image && !is_reference {
            // Not before: a reference needs no file.
            let new = self.runtime.block_on(self.worker.new_image(&self.key));
            let new = new.map_err(io::Error::other)?;
            let imaged = new.write(tar).map_err(io::Error::other)?;
            return Ok(Made::Image(new, imaged));
        }
        let written = self.runtime.block_on(self.worker.written(&self.key, alone));
        let written = written.map_err(io::Error::other)?;
        self.has_begun.store(true, Ordering::Release);
        slackwater_archive::unpack(tar, &written.path(), None).map_err(io::Error::other)?;
        Ok(Made::Tree)
    }
}

impl Expected {
    /// Sees that a blob is this layer.
    fn require(&self, key: &Key, (diff_id, blob): (&Digest, &str)) -> Result<(), CallError> {
        let got = chain_id(self.below.as_deref(), &diff_id.to_string());
        if got == self.chain.as_str() {
            return Ok(());
        }
        let expected = &self.chain;
        tracing::warn!(%key, blob, got, %expected,
            "a blob is not the layer that its image names: containerd refuses it");
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
        // What another differ unpacks would wait in the kernel for the appliance, or fail there with an I/O error or as
        // read-only, and nothing would say why.
        other if other.is_without_answer() || other.is_unauthenticated() => other.into(),
        other => unpacked(&other),
    }
}

/// What this driver was to compare or unpack and cannot.
fn unpacked(error: &(dyn std::error::Error + 'static)) -> CallError {
    tracing::warn!(%error, "left to containerd's next differ: containerd unpacks a layer itself, if it has another");
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

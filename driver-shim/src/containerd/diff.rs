//! containerd's diff service, as far as it compares: the layer of what a snapshot has and another has not.
//!
//! ```text
//! docker commit, BuildKit, nerdctl commit, ctr snapshots diff
//!    |
//! containerd --Diff(left, right)--> trees by their mounts --> archive::pack --> form --> digest
//!    ^                                                                                     |
//!    +------------------------------- the content store, piece by piece <------------------+
//! ```
//! containerd's own differ reads both trees whole, where times are in whole seconds. This one goes by inode and times,
//! which clones of a disk share, and reads what changed. Where layers are images, what one adds is read, and nothing else.
//!
//! - What this one does not do, or fails at before containerd has taken the layer, is answered with `Unimplemented`:
//!   containerd goes on to its own differ then.
//! - A layer is in the content store whole or not at all, kept by the caller's lease, or for some minutes by one of its
//!   own, also where it was there before.
//! - A caller who leaves ends the work at the next piece. Until then it has its turn.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use slackwater_archive::{ArchiveError, PATHS_BYTES_MAX, pack_upper};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::spawn_blocking;
use uuid::Uuid;

use super::error::CallError;
use super::proto::{Descriptor, DiffRequest, DiffResponse, Mount};
use crate::engine::containerd::Containerd;
use crate::engine::ingest::{Piece, Whole};
use crate::image::digest::HashingWriter;
use crate::image::form::{Encoder, Form};
use crate::worker::{Added, Engine, Tree, Worker, WorkerError, now};

/// The name of the service, the first part of each path.
pub const DIFF_SERVICE: &str = "containerd.services.diff.v1.Diff";

/// The label that tells the digest of a layer before it was compressed (containerd, `core/images`).
const UNCOMPRESSED: &str = "containerd.io/uncompressed";

/// Layers that are made at once; more wait. Each takes a processor, and memory for the paths of what changed.
const DIFFS_MAX: usize = 4;

/// Blobs that are read at once; more wait. Each takes a processor, and up to 128 MiB for what zstd looks back to.
const READINGS_MAX: usize = 4;

/// How long a layer is kept for a caller without a lease. containerd passes none on from its clients, which name the
/// layer, or put it under their own lease, within seconds.
const LEASE_DURATION: Duration = Duration::from_secs(600);

/// Bytes of one message: containerd takes 16 MiB.
const PIECE_BYTES: usize = 256 << 10;

/// Pieces between a thread and the socket.
pub(super) const PIECES_MAX: usize = 8;

/// Who calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Caller {
    /// containerd's namespace.
    pub(super) namespace: String,
    /// What keeps the layer. It comes from callers inside containerd alone.
    pub(super) lease: Option<String>,
}

/// Makes layers, and compares them (apply.rs).
#[derive(Clone, Debug)]
pub(super) struct Differ {
    pub(super) worker: Worker,
    /// Where containerd listens.
    pub(super) api: PathBuf,
    turns: Arc<Semaphore>,
    /// Layers that are compared at once.
    pub(super) readings: Arc<Semaphore>,
}

/// What a layer is made of.
enum Trees {
    /// Two trees are compared.
    Compared { older: Option<Tree>, newer: Tree },
    /// One layer adds it to those below.
    Added(Added),
}

/// What is to be made of them.
struct Layer {
    form: Form,
    labels: HashMap<String, String>,
    /// The caller waits no more.
    has_left: Arc<AtomicBool>,
}

/// Tells when the caller has left.
pub(super) struct Waiting(pub(super) Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Differ {
    pub(super) fn new(worker: Worker, api: PathBuf) -> Self {
        let (turns, readings) = (Semaphore::new(DIFFS_MAX), Semaphore::new(READINGS_MAX));
        Self { worker, api, turns: Arc::new(turns), readings: Arc::new(readings) }
    }

    /// Writes the layer that makes the right tree of the left one.
    pub(super) async fn diff(
        &self,
        caller: Caller,
        request: DiffRequest,
    ) -> Result<DiffResponse, CallError> {
        let form = Form::of(&request.media_type).ok_or_else(|| {
            other(format!("layers of type `{}` are not written here", request.media_type))
        })?;
        if request.source_date_epoch.is_some() {
            return Err(other("times of a layer are not changed here"));
        }
        if caller.namespace.is_empty() {
            return Err(other("the call names no namespace"));
        }
        let (older, newer) = (request.left, request.right);
        let waiting = Waiting(Arc::default());
        let layer = Layer { form, labels: request.labels, has_left: Arc::clone(&waiting.0) };
        // A disk that is compared is not committed, so not before its turn. `None`: the driver ends.
        let turn = Arc::clone(&self.turns).acquire_owned().await.ok();
        let differ = self.clone();
        let work = tokio::spawn(async move {
            let _turn = turn;
            let trees = differ.trees(&older, &newer).await?;
            differ.write(&caller, trees, layer).await
        });
        let whole = work.await??;
        drop(waiting);
        let diff = Descriptor {
            media_type: form.media_type().to_owned(),
            digest: whole.digest.to_string(),
            size: i64::try_from(whole.size_bytes).unwrap_or(i64::MAX),
        };
        Ok(DiffResponse { diff: Some(diff) })
    }

    async fn trees(&self, older: &[Mount], newer: &[Mount]) -> Result<Trees, CallError> {
        let (mut below, all) = (directories(older), directories(newer));
        below.retain(|path| !self.worker.is_view_of_empty_disk(path));
        if let Some((_, rest)) = all.split_first()
            && *rest == below[..]
        {
            match self.worker.added_at(Engine::Containerd, &all).await {
                Ok(Some(added)) => return Ok(Trees::Added(added)),
                Ok(None) => {}
                Err(error @ WorkerError::Damaged { .. }) => return Err(error.into()),
                Err(error) => return Err(left(&error)),
            }
        }
        let older = match older {
            [] => None,
            mounts => Some(self.tree(bound(mounts)?).await?),
        };
        Ok(Trees::Compared { older, newer: self.tree(bound(newer)?).await? })
    }

    async fn tree(&self, path: &Path) -> Result<Tree, CallError> {
        match self.worker.tree_at(Engine::Containerd, path).await {
            Ok(Some(tree)) => Ok(tree),
            Ok(None) => Err(other(format!("{} is not mounted by this driver", path.display()))),
            // containerd's own differ would read it, and not know.
            Err(error @ WorkerError::Damaged { .. }) => Err(error.into()),
            Err(error) => Err(left(&error)),
        }
    }

    /// Writes the layer, and has it kept.
    async fn write(&self, caller: &Caller, trees: Trees, layer: Layer) -> Result<Whole, CallError> {
        let connected = Containerd::connect(&self.api, &caller.namespace).await;
        let containerd = connected.map_err(|error| left(&error))?;
        if let Some(lease) = &caller.lease {
            return write(&containerd.under_lease(lease)?, trees, layer).await;
        }
        let leased = containerd.leased(now(), LEASE_DURATION).await;
        let leased = leased.map_err(|error| left(&error))?;
        let written = write(&leased, trees, layer).await;
        if written.is_err()
            && let Err(error) = leased.end_lease().await
        {
            tracing::debug!(%error, "a lease ends by itself");
        }
        written
    }
}

/// The source of the one mount of a snapshot of this driver.
pub(super) fn bound(mounts: &[Mount]) -> Result<&Path, CallError> {
    match mounts {
        [mount] if mount.r#type == "bind" && mount.target.is_empty() => {
            Ok(Path::new(&mount.source))
        }
        _ => Err(other("a snapshot of this driver is one bind mount")),
    }
}

/// The upper directory, if the mounts are one overlay that has one.
pub(super) fn upper(mounts: &[Mount]) -> Option<&Path> {
    overlay_option(mounts, "upperdir=").map(Path::new)
}

/// The directories that are seen through mounts, the highest one first; none if it cannot be said.
fn directories(mounts: &[Mount]) -> Vec<&Path> {
    if let Ok(path) = bound(mounts) {
        return vec![path];
    }
    let lowers = overlay_option(mounts, "lowerdir=").into_iter().flat_map(|all| all.split(':'));
    upper(mounts).into_iter().chain(lowers.map(Path::new)).collect()
}

fn overlay_option<'a>(mounts: &'a [Mount], name: &str) -> Option<&'a str> {
    match mounts {
        [mount] if mount.r#type == "overlay" && mount.target.is_empty() => {
            mount.options.iter().find_map(|option| option.strip_prefix(name))
        }
        _ => None,
    }
}

pub(super) fn other(reason: impl Into<String>) -> CallError {
    CallError::OtherDiffer { reason: reason.into() }
}

/// The same for what this driver is to do and cannot.
fn left(error: &dyn std::error::Error) -> CallError {
    tracing::warn!(%error, "containerd makes a layer itself, which reads both trees");
    other(error.to_string())
}

/// Packs, and writes what is packed.
async fn write(containerd: &Containerd, trees: Trees, layer: Layer) -> Result<Whole, CallError> {
    let (sender, pieces) = mpsc::channel(PIECES_MAX);
    let packed = spawn_blocking(move || pack(&trees, layer, sender));
    // Not the name that the caller gives: containerd's own differ may want that afterwards.
    let reference = format!("slackwater-diff-{}", Uuid::new_v4());
    let written = containerd.ingest(&reference, pieces).await;
    match (packed.await?, written) {
        (Ok(whole), Ok(())) => Ok(whole),
        // A write that ends early ends the packing.
        (Ok(_) | Err(ArchiveError::Write { .. }), Err(error)) => Err(error.into()),
        (Err(source @ ArchiveError::Write { .. }), Ok(())) => Err(CallError::Pack { source }),
        (Err(source), _) => {
            left(&source);
            Err(CallError::Pack { source })
        }
    }
}

fn pack(trees: &Trees, layer: Layer, sender: mpsc::Sender<Piece>) -> Result<Whole, ArchiveError> {
    let failed = |source| ArchiveError::Write { source };
    let Layer { form, mut labels, has_left } = layer;
    let pieces = Pieces { sender, has_left, current: BytesMut::new() };
    let encoder = Encoder::new(form, HashingWriter::new(pieces)).map_err(failed)?;
    let mut out = HashingWriter::new(encoder);
    match trees {
        Trees::Compared { older, newer } => {
            let older = older.as_ref().map(Tree::path);
            slackwater_archive::pack(
                older.as_deref(),
                &newer.path(),
                &mut out,
                None,
                PATHS_BYTES_MAX,
            )?;
        }
        Trees::Added(added) => {
            let below = added.below();
            pack_upper(&added.path(), below.as_deref(), &mut out, PATHS_BYTES_MAX)?;
        }
    }
    let (encoder, uncompressed, _) = out.into_parts();
    let (mut pieces, digest, size_bytes) = encoder.finish().map_err(failed)?.into_parts();
    pieces.flush().map_err(failed)?;
    labels.insert(UNCOMPRESSED.to_owned(), uncompressed.to_string());
    let whole = Whole { digest, size_bytes, labels };
    pieces.send(Piece::End(whole.clone())).map_err(failed)?;
    Ok(whole)
}

/// Sends what is written, piece by piece.
struct Pieces {
    sender: mpsc::Sender<Piece>,
    has_left: Arc<AtomicBool>,
    current: BytesMut,
}

impl Pieces {
    fn send(&self, piece: Piece) -> io::Result<()> {
        if self.has_left.load(Ordering::Acquire) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.sender.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn send_current(&mut self) -> io::Result<()> {
        let piece: Bytes = self.current.split().freeze();
        self.send(Piece::Data(piece))
    }
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.current.extend_from_slice(bytes);
        if self.current.len() >= PIECE_BYTES {
            self.send_current()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.current.is_empty() {
            true => Ok(()),
            false => self.send_current(),
        }
    }
}

//! Layers that are on the appliance already: not unpacked, and not fetched but where clients need blobs.
//!
//! ```text
//! Prepare of an unpacker, with the chain id in the key and in a label, in a namespace whose clients need no blobs
//!   a committed snapshot of this worker has that chain id and parent?   it is the one
//!   the manifest's annotation names a snapshot, and the appliance says
//!     that this snapshot is that chain?                                 adopt it
//!   a snapshot of the appliance is registered as the chain, for all,
//!     or the registry lets this worker read the blob?                   adopt it
//!   else                                                                unpack as usual
//!
//! Apply of an unpacker in another namespace (apply.rs)
//!   the same, once the blob was found to be that layer                  bind what is unpacked into
//!
//! Commit, of a client that fetched and unpacked a reference as if it were a layer
//!   a reference and its link were added, nothing else                   adopt what it names
//! ```
//!
//! On a disk a reference counts only in a layer that is being unpacked: a container can write the same file. And only an
//! unpacker is given a layer: who starts a container may choose its labels, not its key. An annotation is the word of the
//! image's author: what it names is taken only if it was registered as that chain; else a manifest could put any content
//! under a chain id that others trust.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use slackwater_archive::{REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER, Reference};
use slackwater_client::types::{ChainId, SnapshotId};
use uuid::Uuid;

use super::error::CallError;
use super::link_target::{self, Found};
use super::snapshotter::extra;
use crate::trust::annotation::{self, Located};
use crate::trust::{TrustError, reference, unpacking};
use crate::worker::{
    Access, ContainerdExtra, Content, Engine, Extra, Key, Kind, LayerKind, Rootfs, SnapshotRef,
    Volume, Worker, WorkerError, now,
};

/// What a snapshot is called until it is adopted. containerd's names begin with a namespace,
/// whose name cannot be empty.
const UNFINISHED: &str = "/adopting/";

/// Largest file that may be a reference.
const REFERENCE_BYTES_MAX: u64 = 4096;

/// Most names in the root directory of a layer that may be a reference: no image has as many.
const NAMES_MAX: usize = 16 << 10;

/// Whether this is a snapshot in the middle of being adopted.
pub(super) fn is_unfinished(key: &Key) -> bool {
    key.name.starts_with(UNFINISHED)
}

/// Removes what could not be finished. What cannot be removed either is tried again at the next
/// start, or by containerd, which removes snapshots that it does not know.
pub(super) async fn forget(worker: &Worker, key: &Key) {
    if let Err(error) = worker.remove(key).await {
        tracing::warn!(%key, %error, "an unfinished snapshot stays for now");
    }
}

/// The committed snapshot that is the layer `chain` above `parent`, made if the appliance has
/// the layer; `None` if it has to be unpacked.
pub(super) async fn adopt(
    worker: &Worker,
    unpack: &Key,
    chain: &ChainId,
    parent: Option<&Volume>,
    labels: &BTreeMap<String, String>,
) -> Result<Option<String>, CallError> {
    let parent = parent.map(|parent| parent.key.clone());
    if let Some(name) = named(worker, unpack, chain, parent.as_ref()) {
        return Ok(Some(name));
    }
    worker.expect_container();
    let place = place_above(worker, parent.as_ref()).await?;
    let Some(snapshot) = locate(worker, chain, labels, &place).await? else { return Ok(None) };
    let key = Key::containerd(format!("{UNFINISHED}{}", Uuid::new_v4()));
    let extra = ContainerdExtra {
        kind: Kind::Active,
        labels: labels.clone(),
        updated_at: now(),
        is_shared: false,
        own_disk: None,
        chain: Some(chain.to_string()),
        is_private: false,
        blob_digest: None,
    };
    let layer = Layer { unpack: unpack.clone(), chain: chain.clone(), parent, extra };
    let worker = worker.clone();
    // To its end, also if containerd stops waiting: what is unfinished would stay.
    tokio::spawn(async move { make(&worker, key, snapshot, layer).await }).await?
}

/// A layer that is being adopted.
struct Layer {
    /// What it would else be unpacked into.
    unpack: Key,
    chain: ChainId,
    parent: Option<Key>,
    extra: ContainerdExtra,
}

/// Makes what is adopted; nothing stays of it unless it could be finished.
async fn make(
    worker: &Worker,
    key: Key,
    snapshot: (SnapshotId, LayerKind),
    mut layer: Layer,
) -> Result<Option<String>, CallError> {
    let extra = Extra::Containerd(layer.extra.clone());
    worker.create(key.clone(), layer.parent.clone(), extra).await?;
    layer.extra.kind = Kind::Committed;
    let adopted = finish(worker, &key, snapshot, &layer).await;
    if worker.get(&key).is_some() {
        forget(worker, &key).await;
    }
    adopted
}

/// Gives what is adopted its content and its name in one step; or finds that another call was
/// faster.
async fn finish(
    worker: &Worker,
    key: &Key,
    snapshot: (SnapshotId, LayerKind),
    layer: &Layer,
) -> Result<Option<String>, CallError> {
    let Layer { unpack, chain, parent, extra } = layer;
    let above = parent.as_ref().map_or("nothing", |parent| parent.name.as_str());
    let names = [
        chain.to_string(),
        format!("{chain} above {above}"),
        format!("{chain} {}", Uuid::new_v4()),
    ];
    for name in names {
        let to = Key::containerd(name.clone());
        let extra = Extra::Containerd(extra.clone());
        match worker.commit_bound(key, to, snapshot, extra).await {
            Ok(_) => return Ok(Some(name)),
            Err(WorkerError::Exists { .. }) => {
                if let Some(name) = named(worker, unpack, chain, parent.as_ref()) {
                    return Ok(Some(name));
                }
            }
            // It went away since it was found: unpack.
            Err(WorkerError::UnknownSnapshot { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// The name of the committed snapshot of this worker that is this layer above this parent, and that a client finds by
/// its label.
fn named(worker: &Worker, unpack: &Key, chain: &ChainId, parent: Option<&Key>) -> Option<String> {
    let is_found = |extra: &ContainerdExtra| {
        unpacking::is_wanted(extra.chain.as_deref(), &extra.labels, chain)
    };
    local(worker, unpack, parent, is_found).map(|volume| volume.key.name)
}

/// The committed snapshot of this worker above this parent that is visible to an unpacker, and is the one.
fn local(
    worker: &Worker,
    unpack: &Key,
    parent: Option<&Key>,
    is_the_one: impl Fn(&ContainerdExtra) -> bool,
) -> Option<Volume> {
    let is_kept = worker.trust().private_layers;
    let is_it = |volume: &Volume| {
        volume.parent.as_ref() == parent
            && extra(volume).is_ok_and(|extra| {
                let is_private = is_kept || extra.is_private;
                extra.kind == Kind::Committed
                    && unpacking::is_visible_to(&volume.key.name, &unpack.name, is_private)
                    && is_the_one(extra)
            })
    };
    worker.find(Engine::Containerd, is_it)
}

/// The snapshot of the appliance that is the layer `chain` above `parent`, for a client that has its blob.
pub(super) async fn found(
    worker: &Worker,
    unpack: &Volume,
    chain: &ChainId,
) -> Result<Option<(SnapshotId, LayerKind)>, CallError> {
    let labels = &extra(unpack)?.labels;
    let is_chain = |extra: &ContainerdExtra| extra.chain.as_deref() == Some(chain.as_str());
    let own = local(worker, &unpack.key, unpack.parent.as_ref(), is_chain);
    if let Some((snapshot, layers)) = own.and_then(|volume| volume.layer()) {
        return Ok(Some((snapshot.id, layers)));
    }
    let place = place_above(worker, unpack.parent.as_ref()).await?;
    locate(worker, chain, labels, &place).await
}

/// Where a layer is wanted.
struct Place {
    layers: LayerKind,
    /// It is the lowest one, or above layers whose chain is known.
    is_known: bool,
    below: Option<String>,
}

async fn place_above(worker: &Worker, parent: Option<&Key>) -> Result<Place, CallError> {
    let layers = worker.layers_above(parent).await?;
    let below = parent.and_then(|parent| worker.chain_of(parent));
    Ok(Place { layers, is_known: parent.is_none() || below.is_some(), below })
}

/// The snapshot of the appliance that is this layer. What an annotation names is a disk, with all that is below the
/// layer; or the image of a layer by reference, whose chain says what is below it.
async fn locate(
    worker: &Worker,
    chain: &ChainId,
    labels: &BTreeMap<String, String>,
    place: &Place,
) -> Result<Option<(SnapshotId, LayerKind)>, CallError> {
    if let Some(annotation) = labels.get(annotation::NAME) {
        match Located::parse(annotation) {
            Some(located) => match proven(worker, chain, &located).await {
                Ok(snapshot) => {
                    return Ok(Some((snapshot, LayerKind::of(located.size_bytes))));
                }
                // So it is with images of workers that list registries.
                Err(WorkerError::Untrusted {
                    source:
                        error @ (TrustError::NotThisChain { .. } | TrustError::NotForThisWorker { .. }),
                }) => {
                    tracing::info!(%chain, annotation, %error, "the layer is looked up by its chain id");
                }
                Err(
                    error @ (WorkerError::Untrusted { .. } | WorkerError::UnknownSnapshot { .. }),
                ) => {
                    tracing::warn!(%chain, annotation, %error,
                        "annotation not trusted: the layer is looked up by its chain id");
                }
                Err(error) => return Err(error.into()),
            },
            None => tracing::warn!(%chain, annotation, "annotation is not STORE/SNAPSHOT/SIZE"),
        }
    }
    let layers = place.layers;
    // A disk has all that is below it; an image is the layer only above the layers that it was made above.
    if layers == LayerKind::Images && !place.is_known {
        return Ok(None);
    }
    let found = worker.find_chain_as(chain, layers, place.below.as_deref()).await?;
    Ok(found.map(|snapshot| (snapshot.id, layers)))
}

/// The snapshot that an annotation names, if the appliance says that it is this chain.
async fn proven(
    worker: &Worker,
    chain: &ChainId,
    located: &Located,
) -> Result<SnapshotId, WorkerError> {
    reference::verify_store(&located.store_id, &worker.store_id().await?)?;
    let id = located.snapshot;
    let snapshot = worker.look_up(id).await?;
    worker.trust().verify_annotation(located, chain, &snapshot)?;
    reference::verify_published(id, worker.is_published(id).await?)?;
    match worker.may_have(&snapshot, chain).await {
        true => Ok(id),
        false => Err(TrustError::NotForThisWorker { id, chain: chain.clone() }.into()),
    }
}

/// Makes ready the mounted root that an unpacker is about to unpack into, for the case that it is a reference.
pub(super) async fn prepare_to_unpack(
    worker: &Worker,
    key: &Key,
    root: PathBuf,
) -> Result<(), CallError> {
    let owned = key.clone();
    let source = match worker.work_on_disk(root, move |root| link_target::make(root, &owned)).await
    {
        Ok(()) => return Ok(()),
        Err(WorkerError::Local { source, .. }) => source,
        Err(other) => return Err(other.into()),
    };
    Err(CallError::Write { key: key.clone(), source })
}

/// The snapshot that was meant, where a reference was unpacked as if it were a layer. Else what
/// [`prepare_to_unpack`] made is gone afterwards.
///
/// # Errors
/// `LinkToNothing` if it is a layer that no other engine could unpack; what reads and believes a reference.
pub(super) async fn unpacked_reference(
    worker: &Worker,
    volume: &Volume,
) -> Result<Option<(SnapshotId, LayerKind)>, CallError> {
    if !matches!(volume.content, Content::Disk { .. } | Content::Upper { .. }) {
        return Ok(None);
    }
    let key = &volume.key;
    let mounted = worker.ensure_rootfs(key, Access::ReadWrite).await?;
    let Some(root) = mounted.written() else { return Ok(None) };
    // The upper directory of an overlay has what was added, and nothing from below.
    let parent = match mounted {
        Rootfs::Directory(_) => volume.parent.as_ref(),
        Rootfs::Overlay { .. } => None,
    };
    let owned = key.clone();
    let found = read_root(key, root.clone(), move |root| link_target::find(root, &owned)).await?;
    if let Some(reference) = reference_in(worker, (key, parent), root.clone(), found).await? {
        // Its size was compared, too.
        let id = worker.believe(&reference).await?;
        return Ok(Some((id, LayerKind::of(reference.size_bytes))));
    }
    if found.is_linked {
        return Err(CallError::LinkToNothing { key: key.clone() });
    }
    if found.is_own {
        let removed = on_disk(root, link_target::remove).await;
        removed.map_err(|source| CallError::Write { key: key.clone(), source })?;
    }
    Ok(None)
}

/// The reference that was unpacked: it and its link are all that was added to the root directory, which has the names of
/// this parent's, too.
async fn reference_in(
    worker: &Worker,
    (key, parent): (&Key, Option<&Key>),
    root: PathBuf,
    found: Found,
) -> Result<Option<Reference>, CallError> {
    let Some(member) = read_root(key, root.clone(), read_member).await? else {
        return Ok(None);
    };
    let mut names = read_root(key, root, names_in).await?;
    names.remove(&OsString::from(REFERENCE_MEMBER));
    if found.is_own {
        names.remove(&OsString::from(REFERENCE_LINK_TARGET));
    }
    if found.is_linked {
        names.remove(&OsString::from(REFERENCE_LINK));
    }
    let below = match parent {
        Some(parent) => match worker.snapshot_of(parent).await? {
            Some(snapshot) => names_of(worker, parent, snapshot).await?,
            None => BTreeSet::new(),
        },
        None => BTreeSet::new(),
    };
    if names != below {
        return Ok(None);
    }
    let reference = Reference::from_member(&member);
    let bad = |source| CallError::Reference { key: key.clone(), source };
    reference.map(Some).map_err(bad)
}

async fn names_of(
    worker: &Worker,
    key: &Key,
    snapshot: SnapshotRef,
) -> Result<BTreeSet<OsString>, CallError> {
    let view = worker.view(snapshot).await?;
    read_root(key, view.path().to_owned(), names_in).await
}

/// Works on a mounted directory on a thread that may wait for the disk.
async fn on_disk<T: Send + 'static>(
    root: PathBuf,
    work: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    let done = tokio::task::spawn_blocking(move || work(&root)).await;
    done.unwrap_or_else(|stopped| Err(std::io::Error::other(stopped)))
}

/// Reads the mounted root directory of a snapshot.
async fn read_root<T: Send + 'static>(
    key: &Key,
    root: PathBuf,
    read: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
) -> Result<T, CallError> {
    let read = on_disk(root, read).await;
    read.map_err(|source| CallError::Read { key: key.clone(), source })
}

/// The bytes of the file that may be a reference. Never through a link, which would lead out of
/// the layer, and never more than one has: what runs in the layer may change it at this moment.
fn read_member(root: &Path) -> std::io::Result<Option<Vec<u8>>> {
    // Looked at before it is opened, and then opened itself: opening a device is an action.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = match rustix::fs::open(root.join(REFERENCE_MEMBER), flags, Mode::empty()) {
        Ok(place) => place,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mode = rustix::fs::fstat(&place)?.st_mode;
    if FileType::from_raw_mode(mode) != FileType::RegularFile {
        return Ok(None);
    }
    let file = std::fs::File::open(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
    let mut bytes = Vec::new();
    file.take(REFERENCE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= REFERENCE_BYTES_MAX).then_some(bytes))
}

/// The names in a root directory, which a stranger filled.
fn names_in(root: &Path) -> std::io::Result<BTreeSet<OsString>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(root)? {
        if names.len() >= NAMES_MAX {
            let reason =
                format!("more than {NAMES_MAX} names in the root directory of a reference");
            return Err(std::io::Error::other(reason));
        }
        names.insert(entry?.file_name());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_short_file_may_be_a_reference() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(REFERENCE_MEMBER);
        let read = || read_member(folder.path()).unwrap();
        assert_eq!(read(), None);
        for length in [4096, 4097] {
            std::fs::write(&path, vec![b'x'; length]).unwrap();
            assert_eq!(read().map(|bytes| bytes.len()), (length == 4096).then_some(length));
        }
        std::fs::remove_file(&path).unwrap();
        symlink("/etc/passwd", &path).unwrap();
        assert_eq!(read(), None);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read(), None);
        std::fs::remove_dir(&path).unwrap();
        // Nobody writes to it: whoever waited would wait for ever.
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(read(), None);
    }

    #[test]
    fn a_root_of_very_many_names_is_not_held_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        for index in 0..NAMES_MAX {
            std::fs::File::create(folder.path().join(index.to_string())).unwrap();
        }
        assert_eq!(names_in(folder.path()).unwrap().len(), NAMES_MAX);
        std::fs::File::create(folder.path().join("more")).unwrap();
        assert!(names_in(folder.path()).unwrap_err().to_string().contains("names"));
    }
}

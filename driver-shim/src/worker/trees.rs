//! What is mounted at a path that an engine was given, held while it is compared with something else, or written.
//!
//! Invariant: the directory is held open. Whatever is unmounted or removed by others, it is the tree that was asked for.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::layers::on_disk;
use super::lowers::LowerLayer;
use super::merging::{Merged, path_of};
use super::mounting::{Pin, View};
use super::uppers::{HeldUpper, directory_of_upper};
use super::volume::{
    Access, Content, Directory, Engine, Key, LayerKind, MountedAs, SnapshotRef, Volume,
};
use super::{Worker, WorkerError};

/// A directory tree of a volume, mounted for as long as this lives.
#[derive(Debug)]
pub struct Tree {
    directory: File,
    /// Keeps it mounted.
    _mounted: Mounted,
}

#[derive(Debug)]
enum Mounted {
    /// A disk that may be written.
    Disk(Pin),
    /// A snapshot.
    Snapshot(View),
}

impl Mounted {
    fn path(&self) -> &Path {
        match self {
            Self::Disk(pin) => pin.path(),
            Self::Snapshot(view) => view.path(),
        }
    }
}

impl Tree {
    /// `None` if nothing is mounted there any more.
    fn open(mounted: Mounted) -> io::Result<Option<Self>> {
        let path = mounted.path();
        let directory = File::open(path)?;
        let around = fs::metadata(path.parent().unwrap_or(path))?;
        let is_mounted = directory.metadata()?.dev() != around.dev();
        Ok(is_mounted.then_some(Self { directory, _mounted: mounted }))
    }

    /// A path of it, for this process alone.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        path_of(&self.directory)
    }
}

/// The tree of a volume as what writes it sees it, for the driver to write, for as long as this lives.
#[derive(Debug)]
pub struct Written {
    directory: File,
    _kept: Kept,
}

/// What keeps it there, and the volume from being committed meanwhile.
#[derive(Debug)]
enum Kept {
    Disk { _mounted: Pin },
    Upper { _held: HeldUpper, _used: Pin },
}

impl Written {
    /// A path of it, for this process alone.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        path_of(&self.directory)
    }
}

/// What one layer adds to those below it, as overlayfs keeps it; mounted for as long as this lives.
#[derive(Debug)]
pub struct Added {
    layer: Layer,
    below: Option<Merged>,
}

#[derive(Debug)]
enum Layer {
    /// An upper directory, which may be written.
    Upper(HeldUpper),
    /// An image.
    Image(Merged),
}

impl Added {
    /// The directory with what is added.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match &self.layer {
            Layer::Upper(held) => held.path().to_owned(),
            Layer::Image(image) => image.path(),
        }
    }

    /// The tree of what is below.
    #[must_use]
    pub fn below(&self) -> Option<PathBuf> {
        self.below.as_ref().map(Merged::path)
    }
}

/// Where a volume is written.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// At the mount point of this disk.
    Disk(Uuid),
    /// On this disk, in the upper directory of this name.
    Upper(Uuid, Uuid),
}

fn has_disk(volume: &Volume, name: Uuid) -> bool {
    matches!(volume.content, Content::Disk { name: own, .. } if own == name)
}

impl Worker {
    /// The tree of a volume that may be written; of one above images the upper directory `alone` if what is written needs
    /// nothing from below, as an overlay that is let go of brings all of its disk to the appliance.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `Appliance`, `Attach`, `State`, `Local`.
    pub async fn written(&self, key: &Key, alone: bool) -> Result<Written, WorkerError> {
        if self.existing(key)?.layers == LayerKind::Disks {
            let mounted = self.pin(key, Access::ReadWrite).await?;
            let directory = on_disk(mounted.path().to_owned(), |path| File::open(path)).await?;
            return Ok(Written { directory, _kept: Kept::Disk { _mounted: mounted } });
        }
        let rootfs = self.ensure_rootfs(key, Access::ReadWrite).await?;
        let (Some(held), Some(upper)) = (self.hold_upper(key), rootfs.written()) else {
            return Err(WorkerError::ReadOnly { key: key.clone() });
        };
        let used = self.pin_at(key, upper.clone());
        let directory = match alone {
            true => on_disk(upper, |path| File::open(path)).await?,
            false => self.open_rootfs(rootfs).await?,
        };
        Ok(Written { directory, _kept: Kept::Upper { _held: held, _used: used } })
    }

    /// The tree of an engine's volume that is mounted here; `None` if none is.
    ///
    /// # Errors
    /// `Damaged`, `NotFound`, `UnknownSnapshot`, `Appliance`, `Attach`, `State`, `Local`.
    pub async fn tree_at(&self, engine: Engine, path: &Path) -> Result<Option<Tree>, WorkerError> {
        let is_viewed = |id| {
            let mounted = Some(MountedAs::View(id));
            self.find(engine, |volume| volume.mounted == mounted).is_some()
        };
        let mounted = if let Some(name) = self.name_below::<Uuid>("mounts", path) {
            let Some(volume) = self.find(engine, |volume| has_disk(volume, name)) else {
                return Ok(None);
            };
            // Nothing is made of a disk whose writes were lost, as with a commit.
            if volume.is_damaged {
                return Err(WorkerError::Damaged { key: volume.key.clone() });
            }
            Mounted::Disk(self.pin(&volume.key, Access::ReadWrite).await?)
        } else if let Some(id) = self.name_below::<SnapshotId>("views", path)
            && is_viewed(id)
        {
            // A view asks for no size.
            Mounted::Snapshot(self.view(SnapshotRef { id, size_bytes: 0 }).await?)
        } else {
            return Ok(None);
        };
        Tree::open(mounted).map_err(|source| WorkerError::Local { path: path.to_owned(), source })
    }

    /// What the highest of these directories adds to the others, if they are those of an engine's volume of images;
    /// the highest one first.
    ///
    /// # Errors
    /// As [`Self::tree_at`]; `OfImages`.
    pub async fn added_at(
        &self,
        engine: Engine,
        directories: &[&Path],
    ) -> Result<Option<Added>, WorkerError> {
        let Some((highest, below)) = directories.split_first() else { return Ok(None) };
        let below: Option<Vec<_>> = below.iter().map(|path| self.lower_at(engine, path)).collect();
        let Some(below) = below else { return Ok(None) };
        if let Some(image @ LowerLayer::Image(_)) = self.lower_at(engine, highest) {
            let Some(image) = self.merged(&[image]).await? else { return Ok(None) };
            let below = self.merged(&below).await?;
            return Ok(Some(Added { layer: Layer::Image(image), below }));
        }
        let Some(volume) = self.written_at(engine, highest) else { return Ok(None) };
        if volume.layers == LayerKind::Disks || self.lowers_below(&volume)? != below {
            return Ok(None);
        }
        if volume.is_damaged {
            return Err(WorkerError::Damaged { key: volume.key });
        }
        let Some(held) = self.hold_upper(&volume.key) else { return Ok(None) };
        let below = self.merged(&below).await?;
        Ok(Some(Added { layer: Layer::Upper(held), below }))
    }

    /// The committed layer of an engine's volume that is seen at this path.
    fn lower_at(&self, engine: Engine, path: &Path) -> Option<LowerLayer> {
        if path.parent() != Some(&self.state_directory().join("images")) {
            let volume = self.written_at(engine, path)?;
            let is_lower = matches!(volume.content, Content::Lower { .. });
            return volume.directory().filter(|_| is_lower).map(LowerLayer::Directory);
        }
        let is_there = |volume: &Volume| match volume.content {
            Content::Image { snapshot, .. } => self.image_target(snapshot.id) == path,
            _ => false,
        };
        Some(LowerLayer::Image(self.find(engine, is_there)?.layer()?.0))
    }

    /// Whether an empty disk is mounted at this path: what nothing is below is seen as one.
    #[must_use]
    pub fn is_view_of_empty_disk(&self, path: &Path) -> bool {
        let seen = self.name_below::<SnapshotId>("views", path);
        seen.is_some_and(|id| self.is_empty_disk(id))
    }

    /// The engine's volume that is written by this path, or was before it was committed: the mount point of its disk, or
    /// its upper directory.
    #[must_use]
    pub fn written_at(&self, engine: Engine, path: &Path) -> Option<Volume> {
        let place = self.place_below(path)?;
        let is_it = |volume: &Volume| match (&volume.content, place) {
            (Content::Disk { name, .. }, Place::Disk(disk)) => *name == disk,
            (_, Place::Upper(disk, name)) => volume.directory() == Some(Directory { disk, name }),
            _ => false,
        };
        self.find(engine, is_it)
    }

    fn place_below(&self, path: &Path) -> Option<Place> {
        if let Some(name) = self.name_below("mounts", path) {
            return Some(Place::Disk(name));
        }
        let directory = directory_of_upper(path)?;
        let name = directory.file_name()?.to_str()?.parse().ok()?;
        Some(Place::Upper(self.name_below("mounts", directory.parent()?)?, name))
    }

    /// Whether a volume may be written by this path, now or before.
    #[must_use]
    pub fn is_place_of_volume(&self, path: &Path) -> bool {
        self.place_below(path).is_some()
    }

    /// The name of what is mounted at a path of this folder of the state directory.
    fn name_below<T: std::str::FromStr>(&self, folder: &str, path: &Path) -> Option<T> {
        let below = self.state_directory().join(folder);
        path.strip_prefix(&below).ok()?.to_str()?.parse().ok()
    }
}

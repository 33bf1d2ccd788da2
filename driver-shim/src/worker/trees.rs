//! What is mounted at a path that an engine was given, held while it is compared with something else.
//!
//! Invariant: the directory is held open. Whatever is unmounted or removed by others, it is the tree that was asked for.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::mounting::{Pin, View};
use super::volume::{Access, Content, Engine, MountedAs, SnapshotRef, Volume};
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
        format!("/proc/self/fd/{}", self.directory.as_raw_fd()).into()
    }
}

fn has_disk(volume: &Volume, name: Uuid) -> bool {
    matches!(volume.content, Content::Disk { name: own, .. } if own == name)
}

impl Worker {
    /// The tree of an engine's volume that is mounted here; `None` if none is.
    ///
    /// # Errors
    /// `Damaged`, `NotFound`, `UnknownSnapshot`, `Appliance`, `Attach`, `State`, `Local`.
    pub async fn tree_at(&self, engine: Engine, path: &Path) -> Result<Option<Tree>, WorkerError> {
        let volumes = self.list(engine);
        let mounted = if let Some(name) = self.name_below::<Uuid>("mounts", path) {
            let Some(volume) = volumes.iter().find(|volume| has_disk(volume, name)) else {
                return Ok(None);
            };
            // Nothing is made of a disk whose writes were lost, as with a commit.
            if volume.is_damaged {
                return Err(WorkerError::Damaged { key: volume.key.clone() });
            }
            Mounted::Disk(self.pin(&volume.key, Access::ReadWrite).await?)
        } else if let Some(id) = self.name_below::<SnapshotId>("views", path)
            && volumes.iter().any(|volume| volume.mounted == Some(MountedAs::View(id)))
        {
            // A view asks for no size.
            Mounted::Snapshot(self.view(SnapshotRef { id, size_bytes: 0 }).await?)
        } else {
            return Ok(None);
        };
        Tree::open(mounted).map_err(|source| WorkerError::Local { path: path.to_owned(), source })
    }

    /// The engine's volume whose disk has its mount point at this path.
    #[must_use]
    pub fn disk_at(&self, engine: Engine, path: &Path) -> Option<Volume> {
        let name = self.name_below::<Uuid>("mounts", path)?;
        self.list(engine).into_iter().find(|volume| has_disk(volume, name))
    }

    /// Whether a disk may have its mount point at this path, now or before.
    #[must_use]
    pub fn is_place_of_disk(&self, path: &Path) -> bool {
        self.name_below::<Uuid>("mounts", path).is_some()
    }

    /// The name of what is mounted at a path of this folder of the state directory.
    fn name_below<T: std::str::FromStr>(&self, folder: &str, path: &Path) -> Option<T> {
        let below = self.state_directory().join(folder);
        path.strip_prefix(&below).ok()?.to_str()?.parse().ok()
    }
}

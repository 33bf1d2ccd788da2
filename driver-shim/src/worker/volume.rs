//! What the driver knows of one layer, container or snapshot of an engine.

use std::collections::BTreeMap;
use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use slackwater_client::types::{SnapshotId, Timestamp};
use uuid::Uuid;

use super::imaging::IMAGE_SIZE_BYTES;
use super::now;

/// An engine that the driver serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Docker, by the graphdriver plugin.
    Docker,
    /// containerd, by the snapshotter plugin.
    Containerd,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
        })
    }
}

/// Names a volume: by its engine, and by the engine's own name for it, which is opaque here and
/// never part of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Whose it is.
    pub engine: Engine,
    /// The engine's name for it.
    pub name: String,
}

impl Key {
    /// A volume of Docker.
    pub fn docker(name: impl Into<String>) -> Self {
        Self { engine: Engine::Docker, name: name.into() }
    }

    /// A volume of containerd.
    pub fn containerd(name: impl Into<String>) -> Self {
        Self { engine: Engine::Containerd, name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.engine, self.name.escape_debug())
    }
}

/// A snapshot of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SnapshotRef {
    /// Its id on the appliance.
    pub id: SnapshotId,
    /// The size of the disk.
    pub size_bytes: u64,
}

/// A directory of a volume on a disk of upper directories, with those of an overlay in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Directory {
    /// The name of the disk below `workers/ID/disks`.
    pub disk: Uuid,
    /// Its own name, on the disk.
    pub name: Uuid,
}

/// Where the bytes of a volume are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Nothing of its own: it reads as its parent, or as an empty disk where it has none.
    Inherited,
    /// A writable disk, a clone of `from`.
    Disk {
        /// Its name below `workers/ID/disks`.
        name: Uuid,
        /// What it was cloned from.
        from: SnapshotRef,
        /// Its size.
        size_bytes: u64,
    },
    /// An immutable snapshot, kept alive by a clone that nobody writes.
    Snapshot {
        /// The snapshot.
        snapshot: SnapshotRef,
        /// The name of the clone below `workers/ID/holds`.
        hold: Uuid,
    },
    /// What is written above images: a directory of its own, mostly on a disk that other volumes have theirs on, too. It
    /// is the upper directory of an overlay, with the one that overlayfs works in.
    Upper {
        /// The name of the disk below `workers/ID/disks`.
        disk: Uuid,
        /// The name of the directory on it.
        name: Uuid,
    },
    /// The same once it is committed: nothing writes it any more, and it is a lower directory of what is above, until its
    /// image is made.
    Lower {
        /// The name of the disk below `workers/ID/disks`.
        disk: Uuid,
        /// The name of the directory on it.
        name: Uuid,
    },
    /// The image of this layer alone, written and not yet a snapshot.
    ImageFile {
        /// Its name below `workers/ID/holds`: the file becomes the clone that keeps the snapshot.
        name: Uuid,
        /// Inodes in it.
        inodes: u64,
    },
    /// The same as an immutable snapshot, kept alive as [`Self::Snapshot`] is. It is read as a lower directory of an
    /// overlay, above the images below it.
    Image {
        /// The snapshot.
        snapshot: SnapshotRef,
        /// The name of the clone below `workers/ID/holds`.
        hold: Uuid,
    },
}

/// How the layers of images are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerKind {
    /// Each as a disk with all layers below it.
    #[default]
    Disks,
    /// Each as an EROFS image of its own, for overlayfs.
    Images,
}

impl LayerKind {
    /// What a snapshot is, as the size of its file tells.
    #[must_use]
    pub fn of(size_bytes: u64) -> Self {
        match size_bytes == IMAGE_SIZE_BYTES {
            true => Self::Images,
            false => Self::Disks,
        }
    }

    /// As each volume had it before there were images. Of the form that serde wants.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
    fn is_disks(&self) -> bool {
        *self == Self::Disks
    }
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disks => "disks",
            Self::Images => "images",
        })
    }
}

/// How a volume is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// For writing, on a disk or in an upper directory of its own.
    ReadWrite,
    /// For reading, on a mount that all readers of the snapshot share.
    ReadOnly,
}

/// What of a volume is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountedAs {
    /// Its disk, for writing.
    Disk,
    /// This snapshot, for reading.
    View(SnapshotId),
    /// The images that it reads, and the disk with its upper directory, if it has one.
    Images,
}

/// What a volume holds of its own, without what is below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of blocks.
    pub size_bytes: u64,
    /// Files, directories and links.
    pub inodes: u64,
    /// Inodes in use on its whole disk.
    pub disk_inodes: u64,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Volume {
    /// Its name.
    pub key: Key,
    /// What it was made above.
    pub parent: Option<Key>,
    /// Where its bytes are.
    pub content: Content,
    /// How what is written to it is kept. With images it has the layer alone, as the upper directory of an overlay.
    #[serde(default, skip_serializing_if = "LayerKind::is_disks")]
    pub layers: LayerKind,
    /// How often it was acquired and not yet released.
    pub users: u32,
    /// The last calls of its engine that changed `users`, for one that is carried out again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_calls: Vec<Uuid>,
    /// How it is mounted, or was when it was last acquired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted: Option<MountedAs>,
    /// It stays mounted without users, until it is sealed or removed.
    #[serde(default)]
    pub is_kept_mounted: bool,
    /// The directories of committed layers that its engine was given as lower ones. They stay for as long as it has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<Directory>,
    /// Writes to its disk were lost: a sync of it failed, and the kernel tells that only once. Of a committed directory,
    /// until the machine was restarted.
    #[serde(default)]
    pub is_damaged: bool,
    /// What it holds of its own; known once it is a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// When it was made.
    pub created_at: Timestamp,
    /// What its engine wants to know of it.
    pub extra: Extra,
}

/// Calls that a volume remembers: more than an engine has under way for one volume at a time.
const RECENT_CALLS_MAX: usize = 8;

impl Volume {
    /// A new one, with nothing of its own.
    pub(super) fn new(key: Key, parent: Option<Key>, extra: Extra, layers: LayerKind) -> Self {
        Self {
            key,
            parent,
            content: Content::Inherited,
            layers,
            users: 0,
            recent_calls: Vec::new(),
            mounted: None,
            is_kept_mounted: false,
            given: Vec::new(),
            is_damaged: false,
            usage: None,
            created_at: now(),
            extra,
        }
    }

    /// Changes the number of users for a call of the engine, unless the same call did so before;
    /// whether it did now.
    pub(super) fn count_once(
        &mut self,
        call: Option<Uuid>,
        count: impl FnOnce(u32) -> u32,
    ) -> bool {
        if let Some(call) = call {
            if self.recent_calls.contains(&call) {
                return false;
            }
            if self.recent_calls.len() >= RECENT_CALLS_MAX {
                self.recent_calls.remove(0);
            }
            self.recent_calls.push(call);
        }
        self.users = count(self.users);
        true
    }

    /// Takes back what a call counted that failed afterwards.
    pub(super) fn uncount(&mut self, call: Option<Uuid>) {
        self.recent_calls.retain(|recent| Some(*recent) != call);
        self.users = self.users.saturating_sub(1);
    }

    /// It is this from now on, and nothing of it is mounted any more.
    pub(super) fn become_content(&mut self, content: Content, usage: Option<Usage>) {
        // Its own layer is still to be read above those.
        if !matches!(content, Content::Lower { .. }) {
            self.given = Vec::new();
        }
        self.content = content;
        self.mounted = None;
        self.is_kept_mounted = false;
        self.usage = usage;
    }

    /// Its own directory on a disk of upper directories.
    #[must_use]
    pub fn directory(&self) -> Option<Directory> {
        match self.content {
            Content::Upper { disk, name } | Content::Lower { disk, name } => {
                Some(Directory { disk, name })
            }
            _ => None,
        }
    }

    /// Whether its own layer is this image.
    pub(super) fn is_image(&self, id: SnapshotId) -> bool {
        matches!(&self.content, Content::Image { snapshot, .. } if snapshot.id == id)
    }

    /// All directories that stay because of it.
    pub(super) fn directories(&self) -> impl Iterator<Item = Directory> {
        self.directory().into_iter().chain(self.given.iter().copied())
    }

    /// Whether somebody relies on its mount.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.users > 0 || self.is_kept_mounted
    }

    /// The snapshot that it is, with all that is below it, if it is one.
    #[must_use]
    pub fn snapshot(&self) -> Option<SnapshotRef> {
        match &self.content {
            Content::Snapshot { snapshot, .. } => Some(*snapshot),
            _ => None,
        }
    }

    /// The snapshot that its layer is, and how that is kept.
    #[must_use]
    pub fn layer(&self) -> Option<(SnapshotRef, LayerKind)> {
        match &self.content {
            Content::Snapshot { snapshot, .. } => Some((*snapshot, LayerKind::Disks)),
            Content::Image { snapshot, .. } => Some((*snapshot, LayerKind::Images)),
            Content::Inherited
            | Content::Disk { .. }
            | Content::Upper { .. }
            | Content::Lower { .. }
            | Content::ImageFile { .. } => None,
        }
    }
}

/// A disk that a container is to have for itself alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnDisk {
    /// Its size; if it is not given, that of the disk below, or that of the worker's disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

/// An engine's own data, stored with the volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extra {
    /// Docker's.
    Docker(DockerExtra),
    /// containerd's.
    Containerd(ContainerdExtra),
}

impl Extra {
    /// The disk that it is to have for itself also where volumes share one.
    #[must_use]
    pub fn own_disk(&self) -> Option<OwnDisk> {
        match self {
            // Each of Docker's has its own.
            Self::Docker(_) => None,
            Self::Containerd(extra) => extra.own_disk,
        }
    }

    /// The size that its disk is to have, where it is not that of the disk below.
    #[must_use]
    pub fn disk_size_bytes(&self) -> Option<u64> {
        match self {
            Self::Docker(extra) => extra.disk_size_bytes,
            Self::Containerd(extra) => extra.own_disk?.size_bytes,
        }
    }
}

/// How the tar of a Docker layer is given again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Archive {
    /// These bytes: a reference.
    Reference(Vec<u8>),
    /// From this file in the directory of recordings, and the layer's own snapshot.
    Recording(String),
}

/// How the tar of what a commit or a build made is given to Docker, and so pushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Push {
    /// As a reference: a few hundred bytes, for workers of the same appliance
    #[default]
    References,
    /// As what was changed: for any engine
    Ordinary,
}

impl fmt::Display for Push {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::References => "references",
            Self::Ordinary => "ordinary",
        })
    }
}

/// What Docker's plugin keeps of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DockerExtra {
    /// A container or its `-init` layer, and not a layer of an image.
    pub is_container: bool,
    /// Its root is the mount that all containers of the image share.
    pub is_shared: bool,
    /// The disk's size where it was asked for.
    pub disk_size_bytes: Option<u64>,
    /// A tar is being, or was only partly, unpacked into it.
    pub is_unpacking: bool,
    /// The process that was last asked to make it, and alone may unpack a tar into it; not of
    /// containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<Uuid>,
    /// How its tar is given again.
    pub archive: Option<Archive>,
    /// How the tar of its commits is given, where that is not as the worker does it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<Push>,
}

/// The kind of a snapshot in containerd's sense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Writable.
    #[default]
    Active,
    /// Read-only, of a committed one.
    View,
    /// Immutable, may be a parent.
    Committed,
}

/// What containerd's plugin keeps of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerdExtra {
    /// Its kind.
    pub kind: Kind,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Last change of its labels or kind.
    pub updated_at: Timestamp,
    /// Its root is the read-only mount that all snapshots above its parent share.
    #[serde(default)]
    pub is_shared: bool,
    /// The disk that it is to have for itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_disk: Option<OwnDisk>,
    /// The chain id of the layers that its content is known to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<String>,
    /// It was unpacked here and is not for all: for this namespace of containerd, and maybe for those who may read
    /// the blob that it was unpacked from.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_private: bool,
    /// The digest of the blob that it was unpacked from, if the client said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blob_digest: Option<String>,
}

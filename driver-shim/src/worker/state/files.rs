//! The files of this worker on the appliance, by the volumes that name them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::worker::volume::{Content, Volume};

/// What a file of this worker on the appliance is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(in crate::worker) enum FileKind {
    /// A disk, below `disks`.
    Disk,
    /// A clone that keeps a snapshot, below `holds`; or an image that is none yet, and becomes the clone of its own.
    Hold,
}

impl FileKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Hold => "hold",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "disk" => Some(Self::Disk),
            "hold" => Some(Self::Hold),
            _ => None,
        }
    }
}

/// A file of this worker on the appliance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::worker) struct OwnFile {
    /// What it is.
    pub kind: FileKind,
    /// Its name.
    pub name: Uuid,
}

/// The files that a volume names.
pub(super) fn files_of(volume: &Volume) -> BTreeSet<OwnFile> {
    let disk = |name| OwnFile { kind: FileKind::Disk, name };
    let own = match volume.content {
        // That of its directory is among the others.
        Content::Inherited | Content::Upper { .. } | Content::Lower { .. } => None,
        Content::Disk { name, .. } => Some(disk(name)),
        Content::ImageFile { name: hold, .. }
        | Content::Snapshot { hold, .. }
        | Content::Image { hold, .. } => Some(OwnFile { kind: FileKind::Hold, name: hold }),
    };
    own.into_iter().chain(volume.directories().map(|one| disk(one.disk))).collect()
}

/// Whether a volume names this file.
pub(super) fn names_file(volume: &Volume, file: OwnFile) -> bool {
    let is_disk = |name| file == OwnFile { kind: FileKind::Disk, name };
    let is_hold = |name| file == OwnFile { kind: FileKind::Hold, name };
    let is_own = match volume.content {
        Content::Inherited | Content::Upper { .. } | Content::Lower { .. } => false,
        Content::Disk { name, .. } => is_disk(name),
        Content::ImageFile { name: hold, .. }
        | Content::Snapshot { hold, .. }
        | Content::Image { hold, .. } => is_hold(hold),
    };
    is_own || volume.directories().any(|one| is_disk(one.disk))
}

//! What a volume becomes that is sealed or bound: a snapshot, and the clone that keeps it (D2).

use slackwater_client::types::Snapshot;
use uuid::Uuid;

use super::appliance::Making;
use super::chains::is_for_some;
use super::volume::{Content, Directory, LayerKind, SnapshotRef, Usage};

/// The clone that keeps a snapshot.
#[derive(Debug)]
pub(super) enum Hold {
    /// The file that the snapshot was taken of.
    File(Uuid),
    /// A new one.
    Clone(Making),
}

impl Hold {
    pub(super) fn name(&self) -> Uuid {
        match self {
            Self::File(name) => *name,
            Self::Clone(making) => making.file.name,
        }
    }
}

/// What a volume is to be recorded as. Its files are deleted if that does not happen.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) snapshot: SnapshotRef,
    pub(super) usage: Usage,
    /// The snapshot is not for all.
    pub(super) is_restricted: bool,
    layers: LayerKind,
    hold: Hold,
    /// The file that became the clone, if no volume names it yet.
    _made: Option<Making>,
}

impl Sealed {
    pub(super) fn new(snapshot: &Snapshot, layers: LayerKind, hold: Hold, usage: Usage) -> Self {
        let is_restricted = is_for_some(snapshot);
        let snapshot = SnapshotRef { id: snapshot.id, size_bytes: snapshot.size_bytes };
        Self { snapshot, usage, is_restricted, layers, hold, _made: None }
    }

    /// What shows the snapshot of what is below it, which has nothing of its own.
    pub(super) fn of_below(snapshot: SnapshotRef, hold: Hold) -> Self {
        let (usage, layers) = (Usage::default(), LayerKind::Disks);
        Self { snapshot, usage, is_restricted: false, layers, hold, _made: None }
    }

    pub(super) fn layers(&self) -> LayerKind {
        self.layers
    }

    pub(super) fn content(&self) -> Content {
        let (snapshot, hold) = (self.snapshot, self.hold.name());
        match self.layers {
            LayerKind::Disks => Content::Snapshot { snapshot, hold },
            LayerKind::Images => Content::Image { snapshot, hold },
        }
    }
}

/// What a volume is recorded as that gets another name.
#[derive(Debug)]
pub(super) enum Became {
    /// What it was.
    Same,
    /// A snapshot.
    Snapshot(Sealed),
    /// A lower directory.
    Lower(Directory),
}

impl Became {
    /// Its new content, if it has another one, and what that holds, if that is known.
    pub(super) fn content(&self) -> Option<(Content, Option<Usage>)> {
        match self {
            Self::Same => None,
            Self::Snapshot(sealed) => Some((sealed.content(), Some(sealed.usage))),
            Self::Lower(Directory { disk, name }) => {
                Some((Content::Lower { disk: *disk, name: *name }, None))
            }
        }
    }
}

/// What sealing a volume comes to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It is this snapshot already, or shows that of what is below it.
    Is(SnapshotRef),
    /// It becomes one.
    Becomes(Sealed),
}

impl Outcome {
    /// The same, with the file of what it becomes kept until that is recorded.
    pub(super) fn keeping(self, made: Making) -> Self {
        match self {
            Self::Becomes(sealed) => Self::Becomes(Sealed { _made: Some(made), ..sealed }),
            Self::Is(snapshot) => Self::Is(snapshot),
        }
    }
}

//! What can go wrong with a volume, in words that Docker and containerd show to people.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use slackwater_archive::ArchiveError;
use slackwater_attach::AttachError;
use slackwater_client::types::{ImageName, SnapshotId};
use slackwater_client::{ClientError, ProblemCode};

use super::layers::IMAGES_MAX;
use super::publications::publisher;
use super::volume::Key;
use crate::trust::TrustError;

/// A failed operation on volumes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// There is no such volume.
    #[error("{key} is not known to the driver")]
    NotFound {
        /// The name that was asked for.
        key: Key,
    },
    /// The name is taken.
    #[error("{key} exists already")]
    Exists {
        /// The name.
        key: Key,
    },
    /// It was to be made above something that is not there.
    #[error("{key} cannot be made above {parent}, which is not known to the driver")]
    ParentNotFound {
        /// The new volume.
        key: Key,
        /// What is missing.
        parent: Key,
    },
    /// Others were made above it.
    #[error("{key} cannot be removed while {count} others are made above it, {child} for one")]
    HasChildren {
        /// The volume.
        key: Key,
        /// How many.
        count: usize,
        /// One of them.
        child: Key,
    },
    /// It is being written.
    #[error("{key} is in use by {users}: stop what uses it first")]
    Busy {
        /// The volume.
        key: Key,
        /// How many have it mounted.
        users: u32,
    },
    /// It is a snapshot, or shared, and cannot be written.
    #[error("{key} is read-only")]
    ReadOnly {
        /// The volume.
        key: Key,
    },
    /// A snapshot is not of the kind that it was taken for.
    #[error(
        "snapshot {id} has {got_bytes} bytes: expected {expected}; pull the image again once its layer is removed"
    )]
    OtherKind {
        /// The snapshot.
        id: SnapshotId,
        /// Its size.
        got_bytes: u64,
        /// What it should be.
        expected: &'static str,
    },
    /// The image of a layer was to be bound above a disk.
    #[error(
        "{key}: snapshot {id} is the image of one layer, and what is below it is a disk: remove the image whose layers are below, and pull it again with layers = \"images\""
    )]
    ImageAboveDisk {
        /// The snapshot.
        id: SnapshotId,
        /// The volume.
        key: Key,
    },
    /// An image was to be bound above itself.
    #[error(
        "{key}: snapshot {id} is the image of a layer that is below it already, and overlayfs takes no directory twice: build the image in another way"
    )]
    ImageTwice {
        /// The snapshot.
        id: SnapshotId,
        /// The volume.
        key: Key,
    },
    /// The appliance took too long while what is written stood still.
    #[error(
        "the appliance took no snapshot within {waited:?}, for which all that writes to {} stood still; it goes on: try it again",
        target.display()
    )]
    Frozen {
        /// Where the disk is mounted.
        target: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// A command of an older release asks for what it does not know.
    #[error(
        "snapshot {id} is the image of one layer, which this command does not know: it is of an older release than the daemon, take that of the same release"
    )]
    OldCommand {
        /// The snapshot.
        id: SnapshotId,
    },
    /// This machine mounts no images.
    #[error(
        "snapshot {id} is the image of a layer, and this kernel has no EROFS: modprobe erofs, or take a kernel with CONFIG_EROFS_FS; or have the image exported (slackwater-driver image export)"
    )]
    NoImages {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The appliance has no such snapshot.
    #[error(
        "the appliance at {appliance} has no snapshot {id} for this worker: the image was made on another appliance, or its snapshot was deleted there, or is not published; push the image again from a worker that has it"
    )]
    UnknownSnapshot {
        /// The snapshot.
        id: SnapshotId,
        /// The appliance's address.
        appliance: String,
    },
    /// This worker published nothing for an image.
    #[error(
        "this worker published nothing for image {image}{}; `slackwater-driver image published` lists what is published",
        told(by)
    )]
    NotPublished {
        /// The image.
        image: ImageName,
        /// Those who did.
        by: BTreeSet<String>,
    },
    /// The appliance does not know a call.
    #[error(
        "the appliance at {appliance} is of an older release than this driver, and lacks calls that the driver needs: update it first"
    )]
    OldAppliance {
        /// The appliance's address.
        appliance: String,
    },
    /// The appliance answers with a MAC that is none.
    #[error("the appliance gave no reference to snapshot {id}: {source}")]
    BadMac {
        /// The snapshot.
        id: SnapshotId,
        /// What is wrong.
        source: slackwater_archive::MacError,
    },
    /// A reference or an annotation of an image is not trusted.
    #[error("{source}")]
    Untrusted {
        /// Why.
        #[from]
        source: TrustError,
    },
    /// What is asked for is one snapshot of a whole tree, and it is put together from images.
    #[error(
        "{key} is made of images, one for each layer, and is not the one disk that this call is about"
    )]
    OfImages {
        /// The volume.
        key: Key,
    },
    /// A volume has nothing of its own.
    #[error("{key} is not written: a container with a shared, read-only root is what its image is")]
    NothingWritten {
        /// The volume.
        key: Key,
    },
    /// More layers than an overlay takes.
    #[error(
        "{key} has {got} layers that are images, at most {IMAGES_MAX} can be mounted as one: build the image with fewer layers, or pull it with layers = \"disks\""
    )]
    TooManyImages {
        /// The volume.
        key: Key,
        /// How many it has.
        got: usize,
    },
    /// What was written cannot be made an image.
    #[error(
        "the image of the layer of {key} cannot be made: {source}; with layers = \"disks\" none is needed"
    )]
    Image {
        /// The volume.
        key: Key,
        /// Why.
        source: ArchiveError,
    },
    /// A disk cannot be made smaller than what it is cloned from.
    #[error(
        "a disk of {got_bytes} bytes was asked for, but what it is made from has {least_bytes}: ask for at least that"
    )]
    TooSmall {
        /// What was asked for.
        got_bytes: u64,
        /// The least that is possible.
        least_bytes: u64,
    },
    /// The appliance refused, or could not be reached.
    #[error("{source}")]
    Appliance {
        /// The call's error, which names the appliance.
        #[from]
        source: ClientError,
    },
    /// The appliance takes no more.
    #[error(
        "the appliance at {appliance} is full ({available_bytes} bytes are left): remove images or files there, or give it more room; what failed first: {reason}"
    )]
    Full {
        /// The appliance's address.
        appliance: String,
        /// What it could still take.
        available_bytes: u64,
        /// How it showed here.
        reason: String,
    },
    /// A disk could not be attached or detached.
    #[error("{source}")]
    Attach {
        /// What failed.
        #[from]
        source: AttachError,
    },
    /// The driver's own state cannot be read or written.
    #[error("the driver's state in {}: {source}; see that the disk is not full and nobody else uses it", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The state was made by another machine, which may still use what it names.
    #[error(
        "{} was made on another machine (its /etc/machine-id differs): if this is a copy of that machine, start with an empty state directory; if it is that machine, restore its machine-id", path.display()
    )]
    OtherMachine {
        /// The state directory.
        path: PathBuf,
    },
    /// Writes to its disk were lost.
    #[error(
        "{key} has lost writes (its disk could not be synced earlier): what it holds is not what was written; make it anew"
    )]
    Damaged {
        /// The volume.
        key: Key,
    },
    /// What dockerd put into the init layer of a container cannot be taken out of a commit of it.
    #[error(
        "the commit cannot be given without `{path}` of Docker's init layer ({source}): see that the appliance has room, and commit again"
    )]
    InitLayer {
        /// Which; `.` is the root directory.
        path: String,
        /// What failed.
        source: std::io::Error,
    },
    /// A file or directory of this worker cannot be used.
    #[error("{}: {source}", path.display())]
    Local {
        /// Which.
        path: PathBuf,
        /// What failed.
        source: std::io::Error,
    },
    /// A task of the driver ended without an answer.
    #[error("the driver gave up an operation ({reason}): see its log")]
    Interrupted {
        /// How.
        reason: String,
    },
}

impl WorkerError {
    /// Whether the appliance gave no answer in time, by either of its faces.
    #[must_use]
    pub const fn is_without_answer(&self) -> bool {
        match self {
            Self::Appliance { source } => source.is_without_answer(),
            Self::Attach { source } => matches!(source, AttachError::TimedOut { .. }),
            _ => false,
        }
    }

    /// Whether the appliance takes nothing of this worker: it does not know the credential, as after it was revoked, or looks at
    /// none for a moment, as too many from its address were not known.
    #[must_use]
    pub fn is_unauthenticated(&self) -> bool {
        match self {
            Self::Appliance { source } => matches!(
                source.code(),
                Some(ProblemCode::Unauthenticated | ProblemCode::TooManyAttempts)
            ),
            _ => false,
        }
    }
}

/// Who published an image, in words, if that is known.
fn told(by: &BTreeSet<String>) -> String {
    match by.is_empty() {
        true => String::new(),
        false => format!(
            ": {} did",
            by.iter().map(|name| publisher(name)).collect::<Vec<_>>().join(", ")
        ),
    }
}

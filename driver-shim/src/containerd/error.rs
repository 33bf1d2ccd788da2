//! What a call of containerd can fail with, and which gRPC code says it.

use std::path::PathBuf;

use slackwater_archive::{ArchiveError, REFERENCE_LINK_TARGET};
use slackwater_attach::AttachError;
use tonic::{Code, Status};

use crate::engine::EngineError;
use crate::worker::{Key, WorkerError};

/// Why a call failed. The text is what a user of containerd reads.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// A name that cannot be.
    #[error("{what} has {got} bytes: expected 1 to {limit}")]
    NameLength {
        /// Which argument.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The longest.
        limit: usize,
    },
    /// More labels than a snapshot may have.
    #[error("{got} labels: a snapshot may have {limit}")]
    LabelCount {
        /// How many were sent.
        got: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// A label larger than containerd itself allows.
    #[error("label `{label}` has {got} bytes with its value: {limit} are allowed")]
    LabelSize {
        /// The beginning of its name.
        label: String,
        /// Bytes of name and value.
        got: usize,
        /// Bytes that are allowed.
        limit: usize,
    },
    /// A label of the driver's that has no meaning.
    #[error("label `{label}` is `{}`: {expected}", got.escape_debug())]
    LabelValue {
        /// Its name.
        label: &'static str,
        /// Its value.
        got: String,
        /// What it can be.
        expected: String,
    },
    /// Labels that exclude each other.
    #[error(
        "label `{label}` asks for a disk, and `{other}=true` for a root that nothing is written to: leave one out"
    )]
    DiskOfSharedRoot {
        /// The first.
        label: &'static str,
        /// The other one.
        other: &'static str,
    },
    /// A filter that cannot be read.
    #[error("filter `{filter}`, at byte {position}: expected {expected}")]
    Filter {
        /// The filter.
        filter: String,
        /// Where reading stopped.
        position: usize,
        /// What should have been there.
        expected: String,
    },
    /// Update of what cannot be changed.
    #[error("field `{field}` of a snapshot cannot be changed: only `labels` and `labels.NAME` can")]
    Field {
        /// The field.
        field: String,
    },
    /// A parent that may still change.
    #[error("parent {parent} is not committed: only a committed snapshot can be a parent")]
    ParentNotCommitted {
        /// The parent.
        parent: Key,
    },
    /// Commit with another parent than it was prepared with.
    #[error("the parent of {key} cannot be changed on commit: it is `{expected}`, got `{got}`")]
    ParentChanged {
        /// The snapshot.
        key: Key,
        /// The parent sent.
        got: String,
        /// Its parent.
        expected: String,
    },
    /// Commit of what is not writable.
    #[error("{key} is not an active snapshot: only an active one can be committed")]
    NotActive {
        /// The snapshot.
        key: Key,
    },
    /// Commit of what can hold nothing of its own.
    #[error("the root of {key} is read-only and shared: there is nothing to commit")]
    SharedRoot {
        /// The snapshot.
        key: Key,
    },
    /// Mounts of what is committed.
    #[error("{key} is committed: prepare an active snapshot or a view above it to mount it")]
    NotMountable {
        /// The snapshot.
        key: Key,
    },
    /// The layer is here already, without having been fetched: good news, which containerd
    /// wants as an error.
    #[error("the layer {chain} is on the appliance: snapshot {name} stands for it")]
    Remote {
        /// Its chain id.
        chain: String,
        /// The snapshot's name.
        name: String,
    },
    /// A reference that was unpacked cannot be read.
    #[error("the reference in {key} cannot be used: {source}")]
    Reference {
        /// The snapshot.
        key: Key,
        /// What is wrong with it.
        source: ArchiveError,
    },
    /// A file of the snapshot's directory cannot be read.
    #[error("read the root directory of {key}: {source}")]
    Read {
        /// The snapshot.
        key: Key,
        /// Why.
        source: std::io::Error,
    },
    /// The file that a reference needs cannot be made in the snapshot's directory, or not be removed.
    #[error("write in the root directory of {key}: {source}")]
    Write {
        /// The snapshot.
        key: Key,
        /// Why.
        source: std::io::Error,
    },
    /// A layer that is no reference has the link of one.
    #[error(
        "the layer in {key} has a hard link to `{REFERENCE_LINK_TARGET}`, which only a reference has, and is none: \
         expected a reference alone; make the image again"
    )]
    LinkToNothing {
        /// The snapshot.
        key: Key,
    },
    /// The worker cannot do it.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A layer is to be unpacked where the disk of a snapshot was.
    #[error("no snapshot has its disk at {}: ask for the snapshot's mounts again", path.display())]
    NoDisk {
        /// Where it is to be unpacked.
        path: PathBuf,
    },
    /// Another differ of containerd is to make the layer, or to unpack it.
    #[error(
        "left to containerd's next differ: {reason}; where there is no other, as in an unpack_config of containerd's \
         transfer service, set differ = \"walking\" there"
    )]
    OtherDiffer {
        /// Why.
        reason: String,
    },
    /// A layer was unpacked in part.
    #[error("unpack the layer of {key}: {reason}")]
    Unpack {
        /// The snapshot.
        key: Key,
        /// Why it ended.
        reason: String,
    },
    /// The trees cannot be packed.
    #[error("left to containerd's next differ: {source}")]
    Pack {
        /// Why not.
        source: ArchiveError,
    },
    /// containerd does not take the layer.
    #[error("the layer cannot be written: {source}")]
    Engine {
        /// Why not.
        #[from]
        source: EngineError,
    },
    /// A task of the driver ended without an answer.
    #[error("the driver gave up an operation ({source}): see its log")]
    Task {
        /// How.
        #[from]
        source: tokio::task::JoinError,
    },
    /// The appliance took longer than this call may.
    #[error("the appliance did not answer within {waited_ms} ms; is it reachable?")]
    Slow {
        /// How long was waited.
        waited_ms: u128,
    },
}

impl CallError {
    /// Whether a file system of this worker refused something, for which the appliance may have the reason.
    pub(super) const fn is_of_disk(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. } | Self::Unpack { .. })
    }

    /// The code that containerd acts on.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::NameLength { .. }
            | Self::LabelCount { .. }
            | Self::LabelSize { .. }
            | Self::LabelValue { .. }
            | Self::DiskOfSharedRoot { .. }
            | Self::Filter { .. }
            | Self::Field { .. }
            | Self::ParentNotCommitted { .. }
            | Self::ParentChanged { .. } => Code::InvalidArgument,
            Self::NotActive { .. }
            | Self::SharedRoot { .. }
            | Self::NotMountable { .. }
            | Self::LinkToNothing { .. }
            | Self::NoDisk { .. }
            | Self::Reference { .. } => Code::FailedPrecondition,
            Self::Remote { .. } => Code::AlreadyExists,
            Self::Read { .. } | Self::Write { .. } | Self::Unpack { .. } | Self::Task { .. } => {
                Code::Internal
            }
            Self::OtherDiffer { .. } | Self::Pack { .. } => Code::Unimplemented,
            Self::Engine { source: EngineError::Grpc { source } } => source.code(),
            Self::Slow { .. } | Self::Engine { .. } => Code::Unavailable,
            Self::Worker(error) => worker_code(error),
        }
    }
}

/// An unknown snapshot of the appliance is no "not found": containerd would take that for a
/// missing parent and unpack everything below once more.
fn worker_code(error: &WorkerError) -> Code {
    match error {
        WorkerError::NotFound { .. } | WorkerError::ParentNotFound { .. } => Code::NotFound,
        WorkerError::Exists { .. } => Code::AlreadyExists,
        WorkerError::TooSmall { .. } => Code::InvalidArgument,
        WorkerError::HasChildren { .. }
        | WorkerError::UnknownSnapshot { .. }
        | WorkerError::Untrusted { .. }
        | WorkerError::OldAppliance { .. }
        | WorkerError::OfImages { .. }
        | WorkerError::TooManyImages { .. }
        | WorkerError::OtherKind { .. }
        | WorkerError::ImageAboveDisk { .. }
        | WorkerError::ImageTwice { .. }
        | WorkerError::NoImages { .. }
        | WorkerError::NothingWritten { .. }
        | WorkerError::Image { .. }
        | WorkerError::Busy { .. }
        | WorkerError::ReadOnly { .. } => Code::FailedPrecondition,
        WorkerError::Appliance { .. }
        | WorkerError::Attach { source: AttachError::TimedOut { .. } } => Code::Unavailable,
        WorkerError::Full { .. } => Code::ResourceExhausted,
        _ => Code::Internal,
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

/// The socket cannot be served any more.
#[derive(Debug, thiserror::Error)]
#[error("serve the snapshotter's socket: {source}")]
pub struct ServeError {
    /// Why.
    #[from]
    source: tonic::transport::Error,
}

//! What is refused about workers, and why a file of them cannot be used.

use std::io;

use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::types::Timestamp;
use crate::worker::WorkerName;

/// A refused change of the workers.
#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    /// The name is taken.
    #[error("a worker `{name}` is there already: choose another name, or revoke it first")]
    Exists {
        /// The name.
        name: WorkerName,
    },
    /// A token has the name.
    #[error("a token of the server's configuration has the name `{name}`: choose another one")]
    NameOfToken {
        /// The name.
        name: WorkerName,
    },
    /// There is no such worker.
    #[error("there is no worker `{name}`")]
    NotFound {
        /// The name.
        name: WorkerName,
    },
    /// The appliance has as many as it can have.
    #[error("the appliance has {limit} workers, which is the most: revoke some that are gone")]
    TooMany {
        /// The most.
        limit: usize,
    },
    /// The join token was exchanged already, for another credential.
    #[error(
        "the join token of worker `{name}` was used at {joined_at}, by another machine or for a credential that is \
         lost: revoke the worker, add it again (with its id if the appliance has files of this machine), and use its \
         new token"
    )]
    JoinTokenUsed {
        /// The worker.
        name: WorkerName,
        /// When it joined.
        joined_at: Timestamp,
    },
    /// Another worker has the id.
    #[error(
        "worker `{name}` has the id {worker_id}: give each machine a state directory of its own, or revoke `{name}` \
         if this is the same machine"
    )]
    IdTaken {
        /// The id.
        worker_id: uuid::Uuid,
        /// The worker that has it.
        name: WorkerName,
    },
    /// The worker was added with another id.
    #[error(
        "the worker was added with the id {expected}, and this machine has {got}: use its state directory, or revoke the worker and add it without an id"
    )]
    OtherId {
        /// The machine's.
        got: uuid::Uuid,
        /// The one that it was added with.
        expected: uuid::Uuid,
    },
    /// There are files or snapshots of the id.
    #[error(
        "the appliance has files or snapshots of a worker with the id {worker_id}: if they are this machine's, revoke `{name}` and add \
         it by `slackwater worker add {name} --id {worker_id}`; else give the machine an empty state directory"
    )]
    IdInUse {
        /// The id.
        worker_id: uuid::Uuid,
        /// The worker.
        name: WorkerName,
    },
    /// Another worker has the credential.
    #[error("worker `{name}` has this credential: revoke it if this is the same machine")]
    CredentialTaken {
        /// The worker that has it.
        name: WorkerName,
    },
    /// What the caller presented is not that of the worker any more.
    #[error(
        "what was presented for worker `{name}` is not valid any more: it was revoked or replaced, or its time has \
         passed"
    )]
    Outdated {
        /// The worker.
        name: WorkerName,
    },
    /// The previous credential still counts.
    #[error(
        "worker `{name}` replaced its credential just now: try again in a minute, when the previous one has ended"
    )]
    ReplacedJustNow {
        /// The worker.
        name: WorkerName,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes: {reason}")]
    NoRandom {
        /// Why not.
        reason: String,
    },
    /// The change could not be written, and was not made.
    #[error("the file of workers cannot be written, so nothing is changed: {source}")]
    Io {
        /// The fault of the disk.
        source: io::Error,
    },
    /// A worker was revoked, but the file still has it.
    #[error(
        "worker `{name}` is revoked until the server restarts, as the file of workers cannot be written; repeat the \
         call once it can: {source}"
    )]
    NotKept {
        /// The worker.
        name: WorkerName,
        /// The fault of the disk.
        source: io::Error,
    },
}

impl WorkersError {
    fn code(&self) -> ProblemCode {
        match self {
            Self::Exists { .. }
            | Self::NameOfToken { .. }
            | Self::IdTaken { .. }
            | Self::IdInUse { .. }
            | Self::OtherId { .. }
            | Self::CredentialTaken { .. } => ProblemCode::Exists,
            Self::NotFound { .. } => ProblemCode::NotFound,
            Self::TooMany { .. } => ProblemCode::InvalidValue,
            Self::JoinTokenUsed { .. } | Self::Outdated { .. } => ProblemCode::Unauthenticated,
            Self::ReplacedJustNow { .. } => ProblemCode::Busy,
            Self::NoRandom { .. } => ProblemCode::Internal,
            Self::Io { source } | Self::NotKept { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ProblemCode::NoSpace,
                _ => ProblemCode::Io,
            },
        }
    }
}

impl From<WorkersError> for Failure {
    fn from(error: WorkersError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

/// A file of workers that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkersFileError {
    /// It is no table of workers.
    #[error("it is no table of workers: {0}")]
    Json(#[from] serde_json::Error),
    /// It is of another release.
    #[error("it has version {got}, expected {expected}: a newer release wrote it")]
    Version {
        /// The version that it names.
        got: u32,
        /// The one that is read.
        expected: u32,
    },
    /// It has more workers than there can be.
    #[error("it has {got} workers, at most {limit} are taken")]
    TooMany {
        /// How many.
        got: usize,
        /// The most.
        limit: usize,
    },
    /// Two have one name.
    #[error("worker `{name}` is in it twice")]
    Twice {
        /// The name.
        name: WorkerName,
    },
}

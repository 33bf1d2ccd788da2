//! What can go wrong with a call of Docker, in words that end up in `docker`'s own output.

use slackwater_archive::ArchiveError;

use super::types::LayerId;
use crate::worker::WorkerError;

/// A refused or failed call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DockerError {
    /// The request cannot be read.
    #[error("this is not a request that the graphdriver plugin knows: {source}")]
    Request {
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// dockerd repeats a call that an earlier process of the driver did not answer, without
    /// saying again what it asked for.
    #[error(
        "the driver was restarted during the call {call}, and dockerd repeats it without its arguments: try the command again"
    )]
    Repeated {
        /// The call.
        call: &'static str,
    },
    /// The name of a layer could not be one of Docker's.
    #[error(
        "`{}` is no name of a layer: expected 1 to {expected_max} of the characters A-Z a-z 0-9 _ -",
        got.escape_debug()
    )]
    Id {
        /// The name, shortened.
        got: String,
        /// The longest that is allowed.
        expected_max: usize,
    },
    /// A storage option that the driver does not have.
    #[error(
        "the driver has no storage option `{}`; it has `size` (of the disk, such as 20GiB), `shared` (true: a read-only root, one for all containers of the image) and `push` (references, or ordinary: how commits of the container are pushed)",
        got.escape_debug()
    )]
    UnknownOption {
        /// Its name.
        got: String,
    },
    /// A storage option with a value that means nothing.
    #[error("storage option {name}=`{}`: expected {expected}", got.escape_debug())]
    OptionValue {
        /// Its name.
        name: &'static str,
        /// Its value.
        got: String,
        /// What it could be.
        expected: &'static str,
    },
    /// dockerd was told something that the driver cannot do.
    #[error("dockerd was started with {got}, which the driver does not have: {advice}")]
    Unsupported {
        /// What.
        got: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The name is taken, by something else than this very call a moment ago.
    #[error("layer {id} exists already, and is not what was to be made")]
    Exists {
        /// The layer.
        id: LayerId,
    },
    /// Its tar came, or may have come, in part only.
    #[error("layer {id} was only partly unpacked, by a call that was interrupted: pull again")]
    Interrupted {
        /// The layer.
        id: LayerId,
    },
    /// A tar was sent for something that has content already.
    #[error("layer {id} has its content already and takes no other: pull again")]
    Complete {
        /// The layer.
        id: LayerId,
    },
    /// A tar was sent for a container.
    #[error("{id} is a container: a layer can be unpacked into an image's layer only")]
    Container {
        /// The container.
        id: LayerId,
    },
    /// Its tar cannot be given, for there is no snapshot of it.
    #[error(
        "layer {id} has no snapshot to take its files from: remove the image and pull it again"
    )]
    Contentless {
        /// The layer.
        id: LayerId,
    },
    /// A volume failed.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A tar is not as it should be, or cannot be unpacked or given.
    #[error("layer {id}: {source}")]
    Archive {
        /// The layer.
        id: LayerId,
        /// What is wrong.
        source: ArchiveError,
    },
    /// What follows a reference is not its padding.
    #[error(
        "layer {id}: a reference to a snapshot is followed by more than {expected_max} bytes: the tar is damaged, push the image again"
    )]
    ReferenceLength {
        /// The layer.
        id: LayerId,
        /// The longest tar that can hold a reference.
        expected_max: usize,
    },
    /// The tar did not arrive.
    #[error("layer {id}: the tar did not arrive as a whole: {source}; pull again")]
    Body {
        /// The layer.
        id: LayerId,
        /// How it ended.
        source: axum::Error,
    },
    /// A task of the driver ended without an answer.
    #[error("the driver gave up an operation ({source}): see its log")]
    Task {
        /// How.
        #[from]
        source: tokio::task::JoinError,
    },
}

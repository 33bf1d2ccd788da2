//! Clients of what listens on unix sockets of this machine: Docker, containerd, and the
//! driver's own daemon.

pub mod containerd;
pub mod daemon;
pub mod docker;
pub mod http;
pub mod ingest;
mod proto;

use std::io;
use std::path::PathBuf;

/// A call to an engine, or to the daemon, that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Nobody listens.
    #[error("cannot reach {peer} at {}: {source}; see that it is running and that the path is right", path.display())]
    Connect {
        /// Who should listen.
        peer: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to {peer} at {} was lost: {source}", path.display())]
    Http {
        /// Whose.
        peer: &'static str,
        /// Where.
        path: PathBuf,
        /// How.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The call was refused.
    #[error("{peer}: {message} (status {status})")]
    Refused {
        /// Who refused.
        peer: &'static str,
        /// With which status of HTTP.
        status: u16,
        /// In its own words.
        message: String,
    },
    /// The call was refused by containerd.
    #[error("containerd: {} ({:?})", source.message(), source.code())]
    Grpc {
        /// What it said.
        source: Box<tonic::Status>,
    },
    /// The answer is not what such a call is answered with.
    #[error("{peer} gave an answer that is not understood: {reason}")]
    Unexpected {
        /// Whose answer.
        peer: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A view of the daemon is not there for this process.
    #[error(
        "the daemon has a snapshot mounted at {}, and here it is not: this process is in another mount namespace; \
         run it where the daemon runs, as by `nsenter --mount --target PID`",
        path.display()
    )]
    NotVisible {
        /// Where the daemon has it.
        path: PathBuf,
    },
    /// A name can mean several things.
    #[error("{peer}: {what} can be any of {found}: give the whole id")]
    Ambiguous {
        /// The engine.
        peer: &'static str,
        /// What was asked for.
        what: String,
        /// What it can be.
        found: String,
    },
    /// There is no such thing in the engine.
    #[error("{peer} has no {what}")]
    NotFound {
        /// The engine.
        peer: &'static str,
        /// What was asked for.
        what: String,
    },
}

impl EngineError {
    pub(crate) fn unexpected(peer: &'static str, reason: impl Into<String>) -> Self {
        Self::Unexpected { peer, reason: reason.into() }
    }
}

impl From<tonic::Status> for EngineError {
    fn from(source: tonic::Status) -> Self {
        Self::Grpc { source: Box::new(source) }
    }
}

//! Why the server did not start, or stopped by itself.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use slackwater_api::ApiServerError;
use slackwater_nfs::NfsError;

use crate::config::ConfigError;

/// The exit code of a fault of usage or configuration, as clap's own is.
pub const EXIT_CONFIGURATION: u8 = 2;

/// The exit code of every other failure.
pub const EXIT_FAILURE: u8 = 1;

/// A failure of the whole server; its message is the one line that the user sees.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log is set up already, which only an embedding program can have done.
    #[error("the log cannot be set up: {0}")]
    Logs(#[source] tracing_subscriber::util::TryInitError),
    /// The operating system gives no threads or no event queue.
    #[error("the runtime cannot be started: {0}")]
    Runtime(#[source] io::Error),
    /// Signals cannot be received.
    #[error("signals cannot be received: {0}")]
    Signals(#[source] io::Error),
    /// An address cannot be bound.
    #[error("cannot listen on {address} (--{setting}): {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The setting that gave it.
        setting: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The store cannot be opened.
    #[error("cannot open the store in {}: {source}", data_dir.display())]
    Open {
        /// The data directory.
        data_dir: PathBuf,
        /// The store's error.
        source: slackwater_blockstore::Error,
    },
    /// The store cannot be closed: what was not committed is in doubt.
    #[error("the store was not closed cleanly: {0}")]
    Close(#[source] slackwater_blockstore::Error),
    /// NFS ended by itself.
    #[error("the NFS server failed: {0}")]
    Nfs(#[source] NfsError),
    /// The REST API ended by itself.
    #[error("the REST server failed: {0}")]
    Api(#[source] ApiServerError),
    /// A server ended without an error and without being asked to.
    #[error("the {server} server ended without being asked to")]
    Ended {
        /// Which one.
        server: &'static str,
    },
    /// A task panicked; the log has the panic.
    #[error("{task} panicked: {source}")]
    Panicked {
        /// Which one.
        task: &'static str,
        /// What tokio says.
        source: tokio::task::JoinError,
    },
}

impl ServerError {
    /// The exit code of the process.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) => EXIT_CONFIGURATION,
            Self::Logs(_)
            | Self::Runtime(_)
            | Self::Signals(_)
            | Self::Listen { .. }
            | Self::Open { .. }
            | Self::Close(_)
            | Self::Nfs(_)
            | Self::Api(_)
            | Self::Ended { .. }
            | Self::Panicked { .. } => EXIT_FAILURE,
        }
    }
}

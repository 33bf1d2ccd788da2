//! Why the server did not start, or stopped by itself.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use slackwater_api::ApiServerError;
use slackwater_nfs::{NfsError, NfsTlsError};

use crate::config::ConfigError;

/// The exit code of a fault of usage or configuration, as clap's own is.
pub const EXIT_CONFIGURATION: u8 = 2;

/// The exit codes of `slackwaterd check` where `slackwater` has the same: nothing there, in use,
/// problems found.
const EXIT_NOT_FOUND: u8 = 3;
const EXIT_CONFLICT: u8 = 4;
const EXIT_PROBLEMS: u8 = 6;

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
    #[error("cannot listen on {address} by {protocol} (--{setting}): {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// TCP or UDP.
        protocol: &'static str,
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
    /// The data directory cannot be looked into.
    #[error("cannot read the data directory, {}: {source}", data_dir.display())]
    DataDir {
        /// The data directory.
        data_dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The data directory holds no store, but something else.
    #[error(
        "{} holds no store, but {found}: name an empty directory by --data-dir, or one that is not there yet, in which a \
         store is made",
        data_dir.display()
    )]
    Foreign {
        /// The data directory.
        data_dir: PathBuf,
        /// Some of what is there.
        found: String,
    },
    /// The workers cannot be read.
    #[error("the workers, {}: {reason}", path.display())]
    Workers {
        /// Their file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// A token file cannot be changed.
    #[error("the token file, {}, cannot be changed: {source}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// The key of references cannot be read or made.
    #[error("the key of references, {}: {source}", path.display())]
    ReferenceKey {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// The administrator's token cannot be read or made.
    #[error(
        "the administrator's token, {}, cannot be used: {source}; a token file, which `slackwaterd token add` makes, does \
         instead (--token-file)",
        path.display()
    )]
    AdminToken {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// The manual pages cannot be written.
    #[error("the manual pages cannot be written to {}: {source}", directory.display())]
    Manual {
        /// Where to.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A certificate cannot be made.
    #[error("{0}")]
    Certificate(String),
    /// There is no store to check.
    #[error("there is no store in {}: name its directory by --data-dir", data_dir.display())]
    NoStore {
        /// The data directory.
        data_dir: PathBuf,
    },
    /// A server, or another check, has the store open.
    #[error(
        "{} is in use by another process: stop it first, or use `slackwater check` while it serves",
        data_dir.display()
    )]
    InUse {
        /// The data directory.
        data_dir: PathBuf,
    },
    /// The index cannot be made anew.
    #[error("the index cannot be made anew, and is left as it was: {0}")]
    Rebuild(#[source] slackwater_blockstore::Error),
    /// The check could not be carried out.
    #[error("the store cannot be checked: {0}")]
    Check(#[source] slackwater_blockstore::Error),
    /// Root has made files in a data directory of another user.
    #[error(
        "files of root are left in {}, whose owner cannot open the store so: {source}; give them to its owner (chown)",
        data_dir.display()
    )]
    Owner {
        /// The data directory.
        data_dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The check found problems, and printed them.
    #[error("problems were found")]
    Problems,
    /// Standard output failed.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
    /// The store cannot be closed: what was not committed is in doubt.
    #[error("the store was not closed cleanly: {0}")]
    Close(#[source] slackwater_blockstore::Error),
    /// NFS ended by itself.
    #[error("the NFS server failed: {0}")]
    Nfs(#[source] NfsError),
    /// By the file of authorities no client can be known.
    #[error("nfs-tls-client-ca: {0}")]
    ClientAuthorities(#[source] NfsTlsError),
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
            Self::Config(_) | Self::Foreign { .. } => EXIT_CONFIGURATION,
            Self::NoStore { .. } => EXIT_NOT_FOUND,
            Self::InUse { .. } => EXIT_CONFLICT,
            Self::Problems => EXIT_PROBLEMS,
            Self::Logs(_)
            | Self::Runtime(_)
            | Self::Signals(_)
            | Self::Listen { .. }
            | Self::Open { .. }
            | Self::DataDir { .. }
            | Self::ReferenceKey { .. }
            | Self::Workers { .. }
            | Self::TokenFile { .. }
            | Self::Certificate(_)
            | Self::Manual { .. }
            | Self::Rebuild(_)
            | Self::Check(_)
            | Self::Output(_)
            | Self::Close(_)
            | Self::Nfs(_)
            | Self::Api(_)
            | Self::ClientAuthorities(_)
            | Self::Ended { .. }
            | Self::Panicked { .. }
            | Self::AdminToken { .. }
            | Self::Owner { .. } => EXIT_FAILURE,
        }
    }
}

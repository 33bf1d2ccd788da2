//! What ends the daemon or a command, in the words that a person reads.

use std::io;
use std::path::PathBuf;

use slackwater_archive::ArchiveError;
use slackwater_attach::AttachError;
use slackwater_client::{ClientError, CredentialError};
use slackwater_fuse::ServeError;

use crate::engine::EngineError;
use crate::settings::SettingsError;
use crate::socket::SocketError;
use crate::worker::WorkerError;

/// Exit code of wrong usage or settings, as clap has it: systemd need not try again.
const EXIT_USAGE: u8 = 2;

/// Exit code of everything else.
const EXIT_FAILURE: u8 = 1;

/// Exit code of `doctor` when something needed is missing; it has said what.
const EXIT_PROBLEMS: u8 = 6;

/// Why the program ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// An argument of a command.
    #[error("{0}")]
    Usage(String),
    /// The certificate of this worker. It may be in the middle of its renewal, so a later start can succeed.
    #[error("nfs-certificate and nfs-key: {0}")]
    Certificate(#[from] slackwater_fuse::WorkerCertificateError),
    /// A socket cannot be listened on.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The volumes.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The appliance.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A credential that cannot be made.
    #[error(transparent)]
    Credential(#[from] CredentialError),
    /// Mounts.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The process that serves the export.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// An engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A layer's archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A file or directory.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another process changes the credential.
    #[error("{}: another process changes the credential of this worker; try again in a minute", path.display())]
    CredentialLocked {
        /// The file that it has locked.
        path: PathBuf,
    },
    /// The state directory is used, and no daemon tells the worker's id.
    #[error(
        "{}: another slackwater-driver uses this state directory, and no daemon answers at {}: give the settings of the \
         daemon (--config, --control-socket), or wait until the other command has ended",
        path.display(), control_socket.display()
    )]
    NoWorkerId {
        /// The directory.
        path: PathBuf,
        /// Where the daemon would answer.
        control_socket: PathBuf,
    },
    /// Another process works with the state directory.
    #[error(
        "{}: another slackwater-driver uses this state directory; stop it, or give another \
         --state-dir", path.display()
    )]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// Other users of this machine reach a directory in which disks are to lie.
    #[error(
        "{} is of user {owner} with mode {mode:03o}, expected one that this user alone can reach: \
         the disks of others are to lie in it; `chmod 700` it, or name a directory that is not \
         there yet", path.display()
    )]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
        /// Its user.
        owner: u32,
    },
    /// The operating system refuses what every program gets.
    #[error("cannot start: {0}")]
    Start(String),
    /// A part of the daemon ended before it was asked to.
    #[error("serving {part} ended: {reason}")]
    Ended {
        /// Which.
        part: &'static str,
        /// Why.
        reason: String,
    },
    /// An image that cannot be treated so.
    #[error("{image}: {reason}")]
    Image {
        /// The image.
        image: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// A file that exists and would be overwritten.
    #[error("{} exists already; give another name, or remove it", path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// `doctor` found that something is missing, and printed it.
    #[error("something that is needed is missing")]
    Problems,
}

impl DriverError {
    /// The fault of an operation on a path.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// The fault of an image.
    pub(crate) fn image(image: &str, reason: impl Into<String>) -> Self {
        Self::Image { image: image.to_owned(), reason: reason.into() }
    }

    /// What the process ends with.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Settings(_) | Self::Usage(_) => EXIT_USAGE,
            Self::Problems => EXIT_PROBLEMS,
            _ => EXIT_FAILURE,
        }
    }
}

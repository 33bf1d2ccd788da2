//! Why an experiment has no result.

use std::path::{Path, PathBuf};

use slackwater_client::ClientError;

/// Why an experiment has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Ctrl-C, SIGTERM or SIGHUP.
    #[error("interrupted")]
    Interrupted,
    /// The experiment's limit.
    #[error("not done after {limit_seconds} seconds")]
    TooLong {
        /// The limit.
        limit_seconds: u64,
    },
    /// The operating system.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The library that draws plots.
    #[error("cannot draw {}: {source}", path.display())]
    Drawing {
        /// The plot.
        path: PathBuf,
        /// Why it failed.
        source: plotters::drawing::DrawingAreaErrorKind<std::io::Error>,
    },
    /// The REST face.
    #[error(transparent)]
    Client(Box<ClientError>),
    /// The store without a server.
    #[error(transparent)]
    Store(#[from] slackwater_blockstore::Error),
    /// The NFS face, ours or a rival's.
    #[error(transparent)]
    Wire(#[from] slackwater_benches::wire::WireError),
    /// Something is not as the experiment needs it.
    #[error("{0}")]
    Unfit(String),
}

impl Failure {
    /// For `map_err`: an error of the operating system on something at a path.
    pub(crate) fn at(what: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let what = format!("cannot {what} {}", path.display());
        move |source| Self::System { what, source }
    }

    /// For `map_err`: an error of the operating system.
    pub(crate) fn on(what: &str) -> impl FnOnce(std::io::Error) -> Self {
        let what = format!("cannot {what}");
        move |source| Self::System { what, source }
    }

    /// Whether the experiment was told to stop: then nothing more is tried.
    pub(crate) const fn is_stop(&self) -> bool {
        matches!(self, Self::Interrupted | Self::TooLong { .. })
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Client(Box::new(error))
    }
}

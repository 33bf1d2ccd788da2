//! Why a registry could not say whether a blob may be read.

use std::path::PathBuf;
use std::time::Duration;

/// A question to a registry that has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// It is not there, or not who it should be.
    #[error("{url}: {}{}", innermost(source), advice(source))]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: reqwest::Error,
    },
    /// It did not answer in time.
    #[error("{host}, or a program that knows its credentials, did not answer within {} s", limit.as_secs())]
    Slow {
        /// The registry.
        host: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// It could not be asked before.
    #[error("{host} could not be asked: it is not asked again for {} s", pause.as_secs())]
    Failed {
        /// The registry.
        host: String,
        /// For how long.
        pause: Duration,
    },
    /// What it shows is not the blob.
    #[error("{url} shows something else than the blob: is it a page to log in?")]
    NoBlob {
        /// Where.
        url: String,
    },
    /// An answer that is neither yes nor no.
    #[error("{url} answered with status {got}, expected 200, 401, 403 or 404")]
    Status {
        /// Where.
        url: String,
        /// The status.
        got: u16,
    },
    /// It asks for something unknown.
    #[error("{host} asks for an authorization that is neither Basic nor Bearer")]
    Challenge {
        /// The registry.
        host: String,
    },
    /// It sends for a token to where a password must not go.
    #[error("{host} sends for a token to `{}`, expected an address that begins with https://", got.escape_debug())]
    Realm {
        /// The registry.
        host: String,
        /// The address.
        got: String,
    },
    /// No token where one should be.
    #[error("the answer of {url} holds no token")]
    Token {
        /// Where.
        url: String,
    },
    /// No host of a registry.
    #[error("`{}` is no host of a registry", got.escape_debug())]
    Host {
        /// What it is.
        got: String,
    },
    /// The file of credentials cannot be used.
    #[error("credentials of {host} in {}: {reason}", path.display())]
    Credentials {
        /// The registry.
        host: String,
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The file of certificates cannot be used.
    #[error("certificates in {}: {reason}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// No client of HTTP can be made.
    #[error("cannot use TLS: {}", innermost(source))]
    Setup {
        /// Why.
        source: reqwest::Error,
    },
}

impl RegistryError {
    /// Whether the next question to the registry would end in the same way, whatever blob it is about.
    pub(super) fn is_of_registry(&self) -> bool {
        match self {
            Self::Status { got, .. } => *got == 429 || *got >= 500,
            Self::NoBlob { .. } | Self::Host { .. } => false,
            _ => true,
        }
    }
}

/// What helps against a certificate that is not trusted.
fn advice(error: &dyn std::error::Error) -> &'static str {
    match innermost(error).to_ascii_lowercase().contains("certificate") {
        true => "; registry-ca names a file with the authority of its own",
        false => "",
    }
}

/// The cause of the causes: reqwest's own texts say little.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

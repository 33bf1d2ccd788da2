//! Why a worker of a soak does not go on.

use slackwater_benches::wire::WireError;
use slackwater_client::ClientError;

/// Why a worker does not go on.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The server is gone: right if it was killed.
    Gone(String),
    /// A promise is broken.
    Broken(String),
}

impl Trouble {
    pub(super) fn broken(what: impl Into<String>) -> Self {
        Self::Broken(what.into())
    }
}

impl From<WireError> for Trouble {
    fn from(error: WireError) -> Self {
        let what = error.to_string();
        match error {
            WireError::Connect { .. } | WireError::Stream(_) | WireError::Silent { .. } => {
                Self::Gone(what)
            }
            _ => Self::Broken(what),
        }
    }
}

impl From<ClientError> for Trouble {
    fn from(error: ClientError) -> Self {
        let what = error.to_string();
        match error {
            ClientError::Unreachable { .. }
            | ClientError::Lost { .. }
            | ClientError::Timeout { .. }
            // An answer that breaks off.
            | ClientError::Protocol { .. } => Self::Gone(what),
            _ => Self::Broken(what),
        }
    }
}

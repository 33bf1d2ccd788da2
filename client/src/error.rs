//! What can go wrong for a caller of the appliance, and what to do about it.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use slackwater_api::error::{Problem, ProblemCode};
use slackwater_api::types::SnapshotId;

use crate::token::TokenError;

/// A failed call. Its text says what happened and what to do; a token is never part of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address that the client was given is none.
    #[error(
        "`{got}` is not the address of an appliance ({reason}): write http://HOST:8049, or https:// where it has a certificate"
    )]
    Address {
        /// The text.
        got: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The token that the client was given is none.
    #[error("{source}")]
    Token {
        /// What is wrong with it.
        #[from]
        source: TokenError,
    },
    /// The token that the client was to send cannot be had.
    #[error("token file {}: {source}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The certificates that the client was given are none.
    #[error(
        "the CA certificate cannot be read ({reason}): it must be PEM, with one certificate or more"
    )]
    Certificate {
        /// What is wrong with them.
        reason: String,
    },
    /// The HTTP client could not be made.
    #[error("the HTTP client cannot be set up: {reason}")]
    Setup {
        /// The innermost cause.
        reason: String,
        /// The failure.
        source: reqwest::Error,
    },
    /// No connection: nothing was sent.
    #[error(
        "cannot reach the appliance at {url}: {reason}; see that slackwaterd is running there and that the address is right"
    )]
    Unreachable {
        /// The address of the appliance.
        url: String,
        /// The innermost cause.
        reason: String,
        /// The failure.
        source: reqwest::Error,
    },
    /// The connection broke during the call: it may have been carried out.
    #[error(
        "the connection was lost during {method} {url}: {reason}; try again (and if the appliance has a certificate, write https:// in its address)"
    )]
    Lost {
        /// The method.
        method: String,
        /// The address that was called.
        url: String,
        /// The innermost cause.
        reason: String,
        /// The failure.
        source: reqwest::Error,
    },
    /// No answer in time: the call may have been carried out.
    #[error(
        "no answer to {method} {url} within {timeout_seconds} s; the appliance may be busy: try again, or allow more time"
    )]
    Timeout {
        /// The method.
        method: String,
        /// The address that was called.
        url: String,
        /// The limit.
        timeout_seconds: u64,
    },
    /// The connection could not be made secure.
    #[error("no secure connection to {url}: {reason}; {}", tls_advice(source))]
    Tls {
        /// The address of the appliance.
        url: String,
        /// The innermost cause.
        reason: String,
        /// The failure.
        source: reqwest::Error,
    },
    /// The appliance refused the call.
    #[error("{detail} ({code}, status {status})")]
    Api {
        /// The status code.
        status: u16,
        /// What went wrong, for programs.
        code: ProblemCode,
        /// What went wrong, for people.
        detail: String,
        /// With [`ProblemCode::Exists`]: the snapshot that holds the wanted name.
        existing_snapshot_id: Option<SnapshotId>,
        /// When the appliance asks to be tried again.
        retry_after: Option<Duration>,
    },
    /// The answer is not one that an appliance gives.
    #[error(
        "{method} {url} was answered with {got}, expected {expected}: is this the REST address of a Slackwater appliance of this release?"
    )]
    Protocol {
        /// The method.
        method: String,
        /// The address that was called.
        url: String,
        /// What came.
        got: String,
        /// What should have come.
        expected: String,
    },
    /// The source of the bytes to be written failed.
    #[error("reading the bytes to be sent: {source}")]
    Source {
        /// The source's error.
        source: io::Error,
    },
}

impl ClientError {
    /// The problem's code, if the appliance refused the call.
    #[must_use]
    pub fn code(&self) -> Option<ProblemCode> {
        match self {
            Self::Api { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the appliance said that no such file or snapshot exists.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(ProblemCode::NotFound)
    }

    /// Whether the appliance gave no answer: it is away, or takes too long.
    #[must_use]
    pub const fn is_without_answer(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Lost { .. } | Self::Timeout { .. })
    }

    /// Whether nothing could be sent, so that any call can be tried again.
    pub(crate) fn was_never_sent(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Whether the call was surely not carried out: it never arrived, or was turned away.
    pub(crate) fn was_not_carried_out(&self) -> bool {
        match self {
            Self::Api { status, .. } => matches!(status, 408 | 409 | 429 | 503),
            other => other.was_never_sent(),
        }
    }

    /// Whether another try of a call that may be sent again can end better.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } | Self::Timeout { .. } => true,
            // A poisoned store stays so until it is restarted by a person.
            Self::Api { code: ProblemCode::Poisoned, .. } => false,
            Self::Api { code: ProblemCode::Busy | ProblemCode::IdempotencyInProgress, .. } => true,
            Self::Api { status, .. } => matches!(status, 408 | 429 | 502 | 503 | 504),
            Self::Address { .. }
            | Self::Token { .. }
            | Self::TokenFile { .. }
            | Self::Certificate { .. }
            | Self::Setup { .. }
            | Self::Tls { .. }
            | Self::Protocol { .. }
            | Self::Source { .. } => false,
        }
    }

    /// How long the appliance asks to be left alone.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Api { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The error of a problem document.
    pub(crate) fn from_problem(problem: Problem, retry_after: Option<Duration>) -> Self {
        Self::Api {
            status: problem.status,
            code: problem.code,
            detail: problem.detail,
            existing_snapshot_id: problem.existing_snapshot_id,
            retry_after,
        }
    }

    /// The error of a request that failed below HTTP. `base` is the appliance's address,
    /// `url` the one that was called.
    pub(crate) fn from_reqwest(
        method: &str,
        base: &str,
        url: &str,
        source: reqwest::Error,
    ) -> Self {
        // The address is told in our own words; reqwest's would also carry the query.
        let source = source.without_url();
        let reason = innermost(&source);
        if chain(&source).any(|error| tls_error(error).is_some()) {
            Self::Tls { url: base.to_owned(), reason, source }
        } else if source.is_connect() {
            Self::Unreachable { url: base.to_owned(), reason, source }
        } else {
            Self::Lost { method: method.to_owned(), url: url.to_owned(), reason, source }
        }
    }
}

/// The error and its sources, the innermost last.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// The text of the innermost cause: `Connection refused (os error 111)`, say.
pub(crate) fn innermost(error: &(dyn Error + 'static)) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

/// The error of rustls that this is, or carries: an `io::Error` hides what it wraps from `source`, and may wrap another
/// one.
fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    error.downcast_ref::<rustls::Error>().or_else(|| {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)?;
        tls_error(inner)
    })
}

/// What to do where no secure connection comes about.
fn tls_advice(source: &(dyn Error + 'static)) -> &'static str {
    use rustls::CertificateError as Wrong;
    let wrong = match chain(source).find_map(tls_error) {
        Some(rustls::Error::InvalidCertificate(wrong)) => wrong,
        Some(rustls::Error::InvalidMessage(_)) => {
            return "is it TLS that is spoken there? an appliance without a certificate has an address of http://";
        }
        _ => {
            return "name the certificate authority of the appliance, and see that its certificate is for this host name \
                    and not expired";
        }
    };
    match wrong {
        Wrong::UnknownIssuer | Wrong::BadSignature => {
            "its authority is not one that is trusted here: name the appliance's certificate authority"
        }
        Wrong::NotValidForName | Wrong::NotValidForNameContext { .. } => {
            "its certificate is for other names: reach it by one of these, or make one for this name"
        }
        Wrong::Expired | Wrong::ExpiredContext { .. } => {
            "its certificate has expired, or this machine's clock is wrong: renew it"
        }
        Wrong::NotValidYet | Wrong::NotValidYetContext { .. } => {
            "its certificate is not valid yet: see to the clocks of both machines"
        }
        // Of the crate below rustls, which it does not show.
        Wrong::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            "its certificate is that of an authority, as `openssl req -x509` makes it, which is refused of a server: make \
             another by `slackwaterd certificate`, or by openssl with `-addext basicConstraints=critical,CA:FALSE`"
        }
        _ => "see to the certificate of the appliance",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(code: ProblemCode) -> ClientError {
        ClientError::from_problem(Problem::new(code, "why"), None)
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        for code in [
            ProblemCode::Overloaded,
            ProblemCode::Closed,
            ProblemCode::Timeout,
            ProblemCode::Busy,
            ProblemCode::IdempotencyInProgress,
            ProblemCode::RequestTimeout,
            ProblemCode::TooManyAttempts,
        ] {
            assert!(api(code).is_passing(), "{code}");
        }
        for code in [
            ProblemCode::NotFound,
            ProblemCode::Exists,
            ProblemCode::Poisoned,
            ProblemCode::NoSpace,
            ProblemCode::Internal,
            ProblemCode::Unauthenticated,
            ProblemCode::InvalidValue,
        ] {
            assert!(!api(code).is_passing(), "{code}");
        }
    }

    #[test]
    fn a_tls_error_is_seen_through_its_wrapping() {
        let wrapped = io::Error::other(rustls::Error::DecryptError);
        assert!(tls_error(&wrapped).is_some());
        assert!(tls_error(&io::Error::other(wrapped)).is_some());
        assert!(tls_error(&rustls::Error::DecryptError).is_some());
        assert!(tls_error(&io::Error::other("plain")).is_none());
    }

    #[test]
    fn what_is_wrong_with_a_certificate_is_told() {
        use rustls::CertificateError as Wrong;
        let advice =
            |wrong| tls_advice(&io::Error::other(rustls::Error::InvalidCertificate(wrong)));
        assert!(advice(Wrong::UnknownIssuer).contains("authority"));
        assert!(advice(Wrong::NotValidForName).contains("other names"));
        assert!(advice(Wrong::Expired).contains("expired"));
        assert!(advice(Wrong::NotValidYet).contains("clocks"));
        assert!(tls_advice(&io::Error::other("plain")).contains("name the certificate authority"));
    }
}

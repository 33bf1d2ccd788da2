//! How a command fails: what is said, and the exit code.

use std::io;
use std::path::PathBuf;

use serde_json::json;
use slackwater_client::{ClientError, ProblemCode};

/// What to do where a token is missing or wrong.
pub(crate) const TOKEN_ADVICE: &str = "give a token by --token-file FILE or SLACKWATER_TOKEN; a server without token files \
                                       has one in `admin-token` of its data directory";

/// The exit codes, as `--help` lists them.
pub(crate) const EXIT_CODES_HELP: &str = "\
Exit codes:
  0    done
  1    failed
  2    the command line, or a value in it, makes no sense
  3    no such file, snapshot or worker
  4    conflict: the name is taken, or the object is in use or of another kind
  5    the appliance cannot be reached, or does not answer in time
  6    check or doctor found problems
  130  interrupted by Ctrl-C (143: by SIGTERM); how to go on is told";

/// An exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Failure,
    Usage,
    NotFound,
    Conflict,
    Unreachable,
    Problems,
    Interrupted,
    Terminated,
}

impl Exit {
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Failure => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::Unreachable => 5,
            Self::Problems => 6,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }
}

/// Why a command did not do all it was asked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A call failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A value of the command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Something named on the command line does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Something is in the way.
    #[error("{0}")]
    Conflict(String),
    /// The operating system failed a call on a local file.
    #[error("cannot {action} {}: {source}", path.display())]
    Local { action: &'static str, path: PathBuf, source: io::Error },
    /// Of several things, some failed; each was reported.
    #[error("{failed} of {total} failed")]
    Several { failed: usize, total: usize, exit: Exit },
    /// Problems were found, and reported on standard output.
    #[error("problems were found")]
    Problems,
    /// A signal ended the command.
    #[error("interrupted{}", resume.as_ref().map(|how| format!("; {how}")).unwrap_or_default())]
    Interrupted { exit: Exit, resume: Option<String> },
    /// Anything else.
    #[error("{0}")]
    Other(String),
    /// Standard output failed.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
}

impl Failure {
    pub(crate) fn local(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Local { action, path: path.into(), source }
    }

    pub(crate) fn input(source: io::Error) -> Self {
        Self::local("read", "standard input", source)
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => exit_of_client(error),
            Self::Usage(_) => Exit::Usage,
            Self::NotFound(_) => Exit::NotFound,
            Self::Conflict(_) => Exit::Conflict,
            Self::Local { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Exit::NotFound
            }
            Self::Several { exit, .. } | Self::Interrupted { exit, .. } => *exit,
            Self::Problems => Exit::Problems,
            Self::Local { .. } | Self::Other(_) | Self::Output(_) => Exit::Failure,
        }
    }

    /// Whether nobody reads standard output any more, as after `slackwater file ls | head -1`:
    /// no failure of ours.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// What to do about it on this command line.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        let Self::Client(error) = self else {
            return None;
        };
        match error {
            ClientError::Unreachable { .. } => Some(
                "the address is set by --api URL or SLACKWATER_API; `slackwater doctor` tells more",
            ),
            ClientError::Tls { .. } => Some("--ca FILE or SLACKWATER_CA names an authority"),
            ClientError::Timeout { .. } => Some("--timeout SECONDS allows more time"),
            ClientError::Api { code: ProblemCode::Unauthenticated, .. } => Some(TOKEN_ADVICE),
            ClientError::Api { code: ProblemCode::Forbidden, .. } => Some(
                "use a token whose role allows this (check, gc and worker need admin; a worker's credential reaches its own)",
            ),
            _ => None,
        }
    }

    /// The failure for programs.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let code = match self {
            Self::Client(error) => error.code().map(ProblemCode::as_str),
            _ => None,
        };
        let mut error = json!({ "message": self.to_string(), "exit_code": self.exit().code() });
        if let Some(code) = code {
            error["code"] = json!(code);
        }
        if let Self::Client(ClientError::Api { existing_snapshot_id: Some(id), .. }) = self {
            error["existing_snapshot_id"] = json!(id);
        }
        json!({ "error": error })
    }
}

fn exit_of_client(error: &ClientError) -> Exit {
    match error {
        ClientError::Address { .. }
        | ClientError::Token { .. }
        | ClientError::TokenFile { .. }
        | ClientError::Certificate { .. } => Exit::Usage,
        ClientError::Unreachable { .. }
        | ClientError::Lost { .. }
        | ClientError::Timeout { .. }
        | ClientError::Tls { .. } => Exit::Unreachable,
        ClientError::Api { code, status, .. } => exit_of_problem(*code, *status),
        // The library may gain errors; none of them has an exit code of its own yet.
        _ => Exit::Failure,
    }
}

/// The one translation of what the appliance refuses into exit codes: no wildcard, so that a
/// new code is given its exit code here.
#[deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]
fn exit_of_problem(code: ProblemCode, status: u16) -> Exit {
    match code {
        ProblemCode::NotFound => Exit::NotFound,
        ProblemCode::Exists
        | ProblemCode::NotDirectory
        | ProblemCode::IsDirectory
        | ProblemCode::WrongKind
        | ProblemCode::NotEmpty
        | ProblemCode::TooManyLinks
        | ProblemCode::Conflict
        | ProblemCode::Busy
        | ProblemCode::IdempotencyInProgress => Exit::Conflict,
        ProblemCode::InvalidValue
        | ProblemCode::NameTooLong
        | ProblemCode::FileTooBig
        | ProblemCode::RangeNotSatisfiable => Exit::Usage,
        ProblemCode::RequestTimeout
        | ProblemCode::TooManyAttempts
        | ProblemCode::Overloaded
        | ProblemCode::Closed
        | ProblemCode::Timeout => Exit::Unreachable,
        ProblemCode::BadJson
        | ProblemCode::BadQuery
        | ProblemCode::BadHeader
        | ProblemCode::IncompleteBody
        | ProblemCode::Unauthenticated
        | ProblemCode::Forbidden
        | ProblemCode::UnknownRoute
        | ProblemCode::MethodNotAllowed
        | ProblemCode::BodyTooLarge
        | ProblemCode::UnsupportedMediaType
        | ProblemCode::IdempotencyKeyReused
        | ProblemCode::Internal
        | ProblemCode::Corrupt
        | ProblemCode::Io
        | ProblemCode::Poisoned
        | ProblemCode::NoSpace => Exit::Failure,
        ProblemCode::Unknown => match status {
            404 => Exit::NotFound,
            409 => Exit::Conflict,
            422 => Exit::Usage,
            408 | 429 | 502..=504 => Exit::Unreachable,
            _ => Exit::Failure,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_of_a_newer_server_goes_by_its_status() {
        assert_eq!(exit_of_problem(ProblemCode::Unknown, 404), Exit::NotFound);
        assert_eq!(exit_of_problem(ProblemCode::Unknown, 409), Exit::Conflict);
        assert_eq!(exit_of_problem(ProblemCode::Unknown, 503), Exit::Unreachable);
        assert_eq!(exit_of_problem(ProblemCode::Unknown, 500), Exit::Failure);
    }

    #[test]
    fn every_exit_code_is_in_the_help() {
        for exit in [
            Exit::Failure,
            Exit::Usage,
            Exit::NotFound,
            Exit::Conflict,
            Exit::Unreachable,
            Exit::Problems,
            Exit::Interrupted,
            Exit::Terminated,
        ] {
            assert!(EXIT_CODES_HELP.contains(&exit.code().to_string()), "{exit:?}");
        }
    }

    #[test]
    fn a_failure_in_json_carries_its_exit_code() {
        let json = Failure::Conflict("in the way".to_owned()).to_json();
        assert_eq!(json["error"]["exit_code"], 4);
        assert_eq!(json["error"]["message"], "in the way");
        let missing = io::Error::from(io::ErrorKind::NotFound);
        assert_eq!(Failure::local("open", "x.img", missing).exit(), Exit::NotFound);
    }
}

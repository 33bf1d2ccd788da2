//! A failed call on its way to the client, and the one translation of the store's errors.
//!
//! A handler answers a [`Failure`]. The response carries it along, and the outermost layer
//! renders it once the face is known: a problem document, or what VMstore clients expect.
#![deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use slackwater_blockstore as blockstore;
use slackwater_blockstore::ErrorKind;

use crate::error::{PROBLEM_MEDIA_TYPE, Problem, ProblemCode};
use crate::types::SnapshotId;

/// Seconds after which a client is asked to try again: background work that holds an object
/// yields in slices shorter than this.
const RETRY_AFTER_SECONDS: u32 = 1;

/// Longest path that a problem names as its instance; longer ones are left out.
const INSTANCE_BYTES_MAX: usize = 2048;

/// A failed call.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    problem: Arc<Problem>,
    header: Option<(HeaderName, HeaderValue)>,
}

impl Failure {
    /// A failure with this code and detail.
    pub(crate) fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        let header = match code {
            ProblemCode::Busy
            | ProblemCode::Overloaded
            | ProblemCode::IdempotencyInProgress
            | ProblemCode::TooManyAttempts
            | ProblemCode::Closed => Some((header::RETRY_AFTER, RETRY_AFTER_SECONDS.into())),
            ProblemCode::Unauthenticated => {
                Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")))
            }
            ProblemCode::BadJson
            | ProblemCode::BadQuery
            | ProblemCode::BadHeader
            | ProblemCode::IncompleteBody
            | ProblemCode::Forbidden
            | ProblemCode::NotFound
            | ProblemCode::UnknownRoute
            | ProblemCode::MethodNotAllowed
            | ProblemCode::RequestTimeout
            | ProblemCode::Exists
            | ProblemCode::NotDirectory
            | ProblemCode::IsDirectory
            | ProblemCode::WrongKind
            | ProblemCode::NotEmpty
            | ProblemCode::TooManyLinks
            | ProblemCode::Conflict
            | ProblemCode::BodyTooLarge
            | ProblemCode::UnsupportedMediaType
            | ProblemCode::RangeNotSatisfiable
            | ProblemCode::InvalidValue
            | ProblemCode::NameTooLong
            | ProblemCode::FileTooBig
            | ProblemCode::IdempotencyKeyReused
            | ProblemCode::Internal
            | ProblemCode::Corrupt
            | ProblemCode::Io
            | ProblemCode::Poisoned
            | ProblemCode::Timeout
            | ProblemCode::NoSpace
            | ProblemCode::Unknown => None,
        };
        Self { problem: Arc::new(Problem::new(code, detail)), header }
    }

    /// The same, telling after how many seconds to try again.
    pub(crate) fn with_retry_after(self, seconds: u32) -> Self {
        Self { header: Some((header::RETRY_AFTER, seconds.into())), ..self }
    }

    /// No valid token.
    pub(crate) fn unauthenticated(detail: impl Into<String>) -> Self {
        Self::new(ProblemCode::Unauthenticated, detail)
    }

    /// A value of the request that has no meaning.
    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self::new(ProblemCode::InvalidValue, detail)
    }

    /// A range beyond the end of `size_bytes` bytes (RFC 9110 section 15.5.17).
    pub(crate) fn beyond_end(size_bytes: u64) -> Self {
        let detail = format!("the range begins at or after the end, at byte {size_bytes}");
        let header = HeaderValue::from_str(&format!("bytes */{size_bytes}")).ok();
        Self {
            header: header.map(|value| (header::CONTENT_RANGE, value)),
            ..Self::new(ProblemCode::RangeNotSatisfiable, detail)
        }
    }

    /// The same, telling which snapshot holds the wanted name.
    pub(crate) fn with_existing_snapshot(mut self, id: Option<SnapshotId>) -> Self {
        Arc::make_mut(&mut self.problem).existing_snapshot_id = id;
        self
    }

    /// What went wrong.
    pub(crate) fn code(&self) -> ProblemCode {
        self.problem.code
    }

    /// What happened, in words.
    pub(crate) fn detail(&self) -> &str {
        &self.problem.detail
    }

    /// The status of the answer.
    pub(crate) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// An answer with `body` in place of the problem document.
    pub(crate) fn render_as(&self, media_type: &'static str, body: Vec<u8>) -> Response {
        let content_type = (header::CONTENT_TYPE, HeaderValue::from_static(media_type));
        let mut response = (self.status(), [content_type], body).into_response();
        if let Some((name, value)) = &self.header {
            response.headers_mut().insert(name.clone(), value.clone());
        }
        response
    }

    /// The answer with the problem document about a request to `path`.
    pub(crate) fn render(&self, path: Option<&str>) -> Response {
        let instance = path.filter(|path| path.len() <= INSTANCE_BYTES_MAX).map(str::to_owned);
        let problem = Problem { instance, ..Problem::clone(&self.problem) };
        self.render_as(PROBLEM_MEDIA_TYPE, serde_json::to_vec(&problem).unwrap_or_default())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = self.render(None);
        response.extensions_mut().insert(self);
        response
    }
}

impl From<blockstore::Error> for Failure {
    fn from(error: blockstore::Error) -> Self {
        let code = code_of(error.kind());
        if code.status() >= 500 {
            tracing::error!(%error, %code, "the store failed a call");
        }
        Self::new(code, error.to_string())
    }
}

/// The code of each kind of the store's errors: the only place where they are translated.
fn code_of(kind: ErrorKind) -> ProblemCode {
    match kind {
        // REST calls name files by path: a file deleted between look-up and use is not there.
        ErrorKind::NotFound | ErrorKind::Stale => ProblemCode::NotFound,
        ErrorKind::Exists => ProblemCode::Exists,
        ErrorKind::NotDirectory => ProblemCode::NotDirectory,
        ErrorKind::IsDirectory => ProblemCode::IsDirectory,
        ErrorKind::WrongKind => ProblemCode::WrongKind,
        ErrorKind::NotEmpty => ProblemCode::NotEmpty,
        ErrorKind::Invalid => ProblemCode::InvalidValue,
        ErrorKind::NameTooLong => ProblemCode::NameTooLong,
        ErrorKind::FileTooBig => ProblemCode::FileTooBig,
        ErrorKind::TooManyLinks => ProblemCode::TooManyLinks,
        ErrorKind::NotSynchronized => ProblemCode::Conflict,
        ErrorKind::NoSpace => ProblemCode::NoSpace,
        ErrorKind::Busy => ProblemCode::Busy,
        ErrorKind::Corrupt => ProblemCode::Corrupt,
        ErrorKind::Poisoned => ProblemCode::Poisoned,
        // Nobody waits for this answer, or the server is stopping.
        ErrorKind::Closed | ErrorKind::Cancelled => ProblemCode::Closed,
        ErrorKind::Io => ProblemCode::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_states_of_the_store_have_their_own_statuses() {
        for (kind, status) in [
            (ErrorKind::Poisoned, 503),
            (ErrorKind::Closed, 503),
            (ErrorKind::NoSpace, 507),
            (ErrorKind::Busy, 409),
            (ErrorKind::Exists, 409),
            (ErrorKind::Invalid, 422),
            (ErrorKind::NotFound, 404),
            (ErrorKind::Corrupt, 500),
        ] {
            assert_eq!(code_of(kind).status(), status, "{kind:?}");
        }
    }

    #[test]
    fn an_answer_says_when_to_come_back() {
        let error = blockstore::Error::Busy { what: "file a".into(), reason: "reclaim".into() };
        let response = Failure::from(error).into_response();
        assert_eq!(response.status(), 409);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert_eq!(response.headers()[header::CONTENT_TYPE], PROBLEM_MEDIA_TYPE);
        let unknown = Failure::unauthenticated("no").into_response();
        assert_eq!(unknown.headers()[header::WWW_AUTHENTICATE], "Bearer");
        let range = Failure::beyond_end(5).into_response();
        assert_eq!(range.headers()[header::CONTENT_RANGE], "bytes */5");
    }
}

//! Errors as the REST face tells them: RFC 9457 problem documents with a stable `code`.
//!
//! Status 400 means that the request could not be read, 422 that it was read and a value in it
//! has no meaning, 409 that the state of the appliance forbids it. The code says which.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::SnapshotId;

/// Media type of a problem document (RFC 9457 section 3).
pub const PROBLEM_MEDIA_TYPE: &str = "application/problem+json";

/// A problem document (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `urn:slackwater:problem:` and the code.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// What happened, the same for every occurrence of the code.
    pub title: String,
    /// The status code of the answer.
    pub status: u16,
    /// What happened here, and what to do about it.
    pub detail: String,
    /// What happened, for programs.
    pub code: ProblemCode,
    /// The path of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// With `exists`: the snapshot that holds the wanted name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub existing_snapshot_id: Option<SnapshotId>,
}

impl Problem {
    /// The document of `code` with this detail.
    #[must_use]
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self {
            type_uri: format!("urn:slackwater:problem:{code}"),
            title: code.title().to_owned(),
            status: code.status(),
            detail: detail.into(),
            code,
            instance: None,
            existing_snapshot_id: None,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, status {})", self.detail, self.code, self.status)
    }
}

impl std::error::Error for Problem {}

macro_rules! problem_codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal, $title:literal;)*) => {
        /// What went wrong, stable for programs: the text never changes its meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
        #[serde(rename_all = "snake_case")]
        pub enum ProblemCode {
            $($(#[$doc])* $name,)*
            /// A code of a newer server; clients go by the status.
            #[serde(other)]
            Unknown,
        }

        impl ProblemCode {
            /// Every code that this server gives.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The text in JSON.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* Self::Unknown => "unknown" }
            }

            /// The status of answers with this code.
            #[must_use]
            pub const fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* Self::Unknown => 500 }
            }

            /// A short sentence, the same for every occurrence.
            #[must_use]
            pub const fn title(self) -> &'static str {
                match self { $(Self::$name => $title,)* Self::Unknown => "Unknown problem" }
            }
        }
    };
}

problem_codes! {
    /// The body is not JSON, or ends early.
    BadJson = "bad_json", 400, "The body is not JSON";
    /// A parameter of the query, or an escape in the route, cannot be read.
    BadQuery = "bad_query", 400, "The address cannot be read";
    /// A header cannot be read.
    BadHeader = "bad_header", 400, "A header cannot be read";
    /// The body ended before its announced length, or broke its encoding.
    IncompleteBody = "incomplete_body", 400, "The body ended early";
    /// No token, an unknown one, or one of another kind.
    Unauthenticated = "unauthenticated", 401, "A valid bearer token is needed";
    /// The token's role does not allow the call.
    Forbidden = "forbidden", 403, "The token's role does not allow this";
    /// No such file or snapshot.
    NotFound = "not_found", 404, "Nothing of that name exists";
    /// No such route.
    UnknownRoute = "unknown_route", 404, "There is no such route";
    /// The route does not take the method; `Allow` lists those that it takes.
    MethodNotAllowed = "method_not_allowed", 405, "The route does not take this method";
    /// The body was not sent in time.
    RequestTimeout = "request_timeout", 408, "The request was not sent in time";
    /// The name or path is taken.
    Exists = "exists", 409, "The name is taken";
    /// A part of the path is a file.
    NotDirectory = "not_directory", 409, "A part of the path is no directory";
    /// The path leads to a directory.
    IsDirectory = "is_directory", 409, "The path leads to a directory";
    /// The path leads to another kind of object.
    WrongKind = "wrong_kind", 409, "The object is of another kind";
    /// The directory has entries.
    NotEmpty = "not_empty", 409, "The directory is not empty";
    /// The file has the largest number of links.
    TooManyLinks = "too_many_links", 409, "The file has too many links";
    /// The object changed at the same time.
    Conflict = "conflict", 409, "The object changed meanwhile";
    /// In use; `Retry-After` says when to try again.
    Busy = "busy", 409, "The object is in use";
    /// A request with the same idempotency key is still being carried out.
    IdempotencyInProgress = "idempotency_in_progress", 409, "A request with this key is under way";
    /// The body is larger than the route takes.
    BodyTooLarge = "body_too_large", 413, "The body is too large";
    /// The body is of another media type than the route takes.
    UnsupportedMediaType = "unsupported_media_type", 415, "The body's media type is not taken";
    /// The range lies beyond the end.
    RangeNotSatisfiable = "range_not_satisfiable", 416, "The range lies beyond the end";
    /// Too many wrong tokens or passwords from this address; `Retry-After` says when to try again.
    TooManyAttempts = "too_many_attempts", 429, "Too many failed authentications";
    /// A value that has no meaning here.
    InvalidValue = "invalid_value", 422, "A value has no meaning here";
    /// A name or path over the limit.
    NameTooLong = "name_too_long", 422, "A name is too long";
    /// A size or offset over the limit.
    FileTooBig = "file_too_big", 422, "The size is over the limit";
    /// The idempotency key was used with another request.
    IdempotencyKeyReused = "idempotency_key_reused", 422, "The key belongs to another request";
    /// A fault of the server.
    Internal = "internal", 500, "The server failed";
    /// Stored bytes are not what was written.
    Corrupt = "corrupt", 500, "Stored data is damaged";
    /// The disk or the index failed.
    Io = "io", 500, "The disk failed";
    /// Too many requests at once; `Retry-After` says when to try again.
    Overloaded = "overloaded", 503, "Too many requests at once";
    /// Writes are refused until the server is restarted.
    Poisoned = "poisoned", 503, "Writes are refused until restart";
    /// The store is closed, or the server is stopping.
    Closed = "closed", 503, "The server is stopping";
    /// The call took too long; it may still be carried out.
    Timeout = "timeout", 504, "The call took too long";
    /// The store is full.
    NoSpace = "no_space", 507, "The store is full";
}

impl fmt::Display for ProblemCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_survive_json() {
        let mut texts = std::collections::BTreeSet::new();
        for &code in ProblemCode::ALL {
            assert!(texts.insert(code.as_str()), "{code} twice");
            let problem = Problem::new(code, "why");
            let json = serde_json::to_value(&problem).unwrap();
            assert_eq!(json["code"], code.as_str());
            assert_eq!(json["status"], code.status());
            assert_eq!(json["type"], format!("urn:slackwater:problem:{code}"));
            assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
        }
    }

    #[test]
    fn a_code_of_a_newer_server_is_read_as_unknown() {
        let json = r#"{"type":"t","title":"t","status":418,"detail":"d","code":"teapot"}"#;
        assert_eq!(serde_json::from_str::<Problem>(json).unwrap().code, ProblemCode::Unknown);
    }
}

//! The VMstore face: snapshot and clone under the paths that clients of Tintri VMstore call.
//!
//! ```text
//! session.rs    login, logout, and who is logged in
//! snapshots.rs  cinder/snapshot, snapshot (list, delete), cinder/clone
//! listing.rs    which snapshots a list holds, and in what order
//! inventory.rs  what clients ask about before they begin
//! ```
//!
//! Bodies follow VMstore's published v310 objects and what the OpenStack drivers and Tintri's
//! own scripts do with them: objects carry a `typeId`, times are milliseconds since 1970, and a
//! request may have fields that are not known here. Paths come below the export, with or
//! without the export's own path before them (`/tintri/`, or what is configured).
//!
//! Errors are VMstore's too: status 400 for all values without meaning, and an object with
//! `code`, `message` and `causeDetails`, in which its clients look for the words "does not
//! exist" and "Failed to lookup" to tell that a snapshot is gone already.

pub(crate) mod inventory;
pub(crate) mod listing;
pub(crate) mod session;
pub(crate) mod snapshots;

use axum::http::{Method, StatusCode};
use axum::response::Response;
use serde::Serialize;
use slackwater_blockstore::FilePath;

use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::router::Mount;
use crate::scope::Scope;
use crate::state::Shared;

/// What the routes of this face begin with.
pub(crate) const PREFIX: &str = "/api/";

pub(crate) const INFO: &str = "/api/info";
pub(crate) const LOGIN: &str = "/api/v310/session/login";
pub(crate) const LOGOUT: &str = "/api/v310/session/logout";
pub(crate) const CINDER_SNAPSHOT: &str = "/api/v310/cinder/snapshot";
pub(crate) const CINDER_CLONE: &str = "/api/v310/cinder/clone";
pub(crate) const SNAPSHOTS: &str = "/api/v310/snapshot";
pub(crate) const SNAPSHOT: &str = "/api/v310/snapshot/{uuid}";
pub(crate) const APPLIANCE: &str = "/api/v310/appliance";
pub(crate) const VIRTUAL_DISK: &str = "/api/v310/virtualDisk";
pub(crate) const HOST_REFRESH: &str = "/api/v310/cinder/host/refresh";

const UUID_TYPE: &str = "com.tintri.api.rest.vcommon.dto.Uuid";
const ERROR_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.beans.TintriError";

/// The path of the export on a real VMstore, which clients leave in or take off.
const TINTRI_EXPORT: &str = "/tintri";

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::POST, LOGIN, session::login)
        .at(Method::GET, LOGOUT, session::logout)
        .at(Method::POST, CINDER_SNAPSHOT, snapshots::create)
        .at(Method::POST, CINDER_CLONE, snapshots::clone)
        .at(Method::GET, SNAPSHOTS, snapshots::list)
        .at(Method::DELETE, SNAPSHOT, snapshots::delete)
        .at(Method::GET, INFO, inventory::info)
        .at(Method::GET, APPLIANCE, inventory::appliance)
        .at(Method::GET, VIRTUAL_DISK, inventory::virtual_disk)
        .at(Method::POST, HOST_REFRESH, inventory::refresh)
}

/// A UUID as VMstore writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmstoreUuid {
    type_id: &'static str,
    pub(crate) uuid: String,
}

impl VmstoreUuid {
    pub(crate) fn new(uuid: impl Into<String>) -> Self {
        Self { type_id: UUID_TYPE, uuid: uuid.into() }
    }
}

/// An error as VMstore writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmstoreError {
    type_id: &'static str,
    /// What happened, for programs.
    code: &'static str,
    /// What happened, the same for every occurrence of the code.
    message: String,
    /// What happened here.
    cause_details: String,
    /// Who says so.
    source: &'static str,
}

/// A failure in this face's form.
pub(crate) fn render(failure: &Failure) -> Response {
    let code = vmstore_code(failure.code());
    let (message, cause_details) = match failure.code() {
        ProblemCode::NotFound => (
            format!("The requested object does not exist: {}", failure.detail()),
            format!("Failed to lookup: {}", failure.detail()),
        ),
        other => (other.title().to_owned(), failure.detail().to_owned()),
    };
    let error =
        VmstoreError { type_id: ERROR_TYPE, code, message, cause_details, source: "slackwater" };
    let body = serde_json::to_vec(&error).unwrap_or_default();
    let mut response = failure.render_as("application/json", body);
    if response.status() == StatusCode::UNPROCESSABLE_ENTITY {
        *response.status_mut() = StatusCode::BAD_REQUEST;
    }
    response
}

/// The codes that VMstore's clients know.
fn vmstore_code(code: ProblemCode) -> &'static str {
    match code {
        ProblemCode::NotFound | ProblemCode::UnknownRoute => "RESOURCE_NOT_FOUND",
        ProblemCode::Exists => "RESOURCE_EXIST",
        ProblemCode::Busy
        | ProblemCode::Conflict
        | ProblemCode::IdempotencyInProgress
        | ProblemCode::TooManyAttempts
        | ProblemCode::Overloaded => "RESOURCE_BUSY",
        ProblemCode::Unauthenticated => "UNAUTHENTICATED",
        ProblemCode::Forbidden => "PERMISSION_DENIED",
        ProblemCode::NoSpace => "RESOURCE_EXHAUSTED",
        ProblemCode::BadJson
        | ProblemCode::BadQuery
        | ProblemCode::BadHeader
        | ProblemCode::IncompleteBody
        | ProblemCode::MethodNotAllowed
        | ProblemCode::NotDirectory
        | ProblemCode::IsDirectory
        | ProblemCode::WrongKind
        | ProblemCode::NotEmpty
        | ProblemCode::TooManyLinks
        | ProblemCode::BodyTooLarge
        | ProblemCode::UnsupportedMediaType
        | ProblemCode::RangeNotSatisfiable
        | ProblemCode::InvalidValue
        | ProblemCode::NameTooLong
        | ProblemCode::FileTooBig
        | ProblemCode::IdempotencyKeyReused => "INVALID_ARGUMENT",
        ProblemCode::RequestTimeout | ProblemCode::Timeout => "TIMEOUT",
        ProblemCode::Poisoned | ProblemCode::Closed => "UNAVAILABLE",
        ProblemCode::Internal | ProblemCode::Corrupt | ProblemCode::Io | ProblemCode::Unknown => {
            "INTERNAL"
        }
    }
}

/// Refuses an object without its `typeId`, as VMstore does.
pub(crate) fn require_type_id(type_id: Option<&str>, expected: &str) -> Result<(), Failure> {
    match type_id {
        Some(got) if got.ends_with(expected) => Ok(()),
        Some(got) => Err(Failure::invalid(format!("typeId is `{got}`, expected ...{expected}"))),
        None => Err(Failure::invalid(format!("typeId is missing, expected ...{expected}"))),
    }
}

/// The file that a client names, below the export.
pub(crate) fn path_below_export(state: &Shared, text: &str) -> Result<FilePath, Failure> {
    let path = strip_export(text, &state.options.export_path);
    // A share with a trailing slash gives an empty name, which NFS passes over as well.
    let names: Vec<_> = path.split('/').filter(|name| !name.is_empty()).collect();
    // Its users are administrators.
    Scope::All.changes(&names.join("/"))
}

/// Takes the export's own path off. Only a path with a leading slash can have it: `tintri/a`
/// is a file in a directory that is called so.
fn strip_export<'a>(text: &'a str, export_path: &str) -> &'a str {
    [TINTRI_EXPORT, export_path.trim_end_matches('/')]
        .into_iter()
        .filter(|export| !export.is_empty())
        .find_map(|export| text.strip_prefix(export).filter(|rest| rest.starts_with('/')))
        .unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_export_is_taken_off_once() {
        for (text, below) in [
            ("/tintri/cinder/v", "/cinder/v"),
            ("/slackwater/cinder/v", "/cinder/v"),
            ("/cinder/v", "/cinder/v"),
            ("cinder/v", "cinder/v"),
            ("tintri/v", "tintri/v"),
            ("/tintri-2/v", "/tintri-2/v"),
            ("/tintri/tintri/v", "/tintri/v"),
        ] {
            assert_eq!(strip_export(text, "/slackwater"), below);
        }
        assert_eq!(strip_export("/a/b", "/"), "/a/b");
    }

    #[test]
    fn a_missing_snapshot_is_told_in_the_words_that_clients_look_for() {
        let failure = Failure::new(ProblemCode::NotFound, "snapshot x does not exist");
        let response = render(&failure);
        assert_eq!(response.status(), 404);
        assert_eq!(vmstore_code(failure.code()), "RESOURCE_NOT_FOUND");
        assert_eq!(render(&Failure::invalid("x")).status(), 400);
    }
}

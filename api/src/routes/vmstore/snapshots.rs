//! Snapshot, list, delete and clone in VMstore's words.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use slackwater_blockstore::{
    DeletionPolicy, Error as StoreError, FilePath, Labels, Name, Snapshot, SnapshotId,
    SnapshotRequest, Store, Timestamp,
};

use crate::audit::record::About;
use crate::convert;
use crate::error::ProblemCode;
use crate::extract::{JsonBody, Segment};
use crate::failure::Failure;
use crate::routes::vmstore::listing::{
    self, Found, LABEL_CREATOR, LABEL_DESCRIPTION, LABEL_INSTANCE_ID, LABEL_VM_NAME, LABEL_VM_UUID,
    Listing,
};
use crate::routes::vmstore::session::LoggedIn;
use crate::routes::vmstore::{
    CINDER_CLONE, CINDER_SNAPSHOT, SNAPSHOT, SNAPSHOTS, VmstoreUuid, path_below_export,
    require_type_id,
};
use crate::scope::Scope;
use crate::state::Shared;

const SNAPSHOT_SPEC_TYPE: &str = ".CinderSnapshotSpec";
const CLONE_SPEC_TYPE: &str = ".CinderCloneSpec";
const SNAPSHOT_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.Snapshot";
const PAGE_TYPE: &str = "com.tintri.api.rest.v310.dto.Page";

/// Who takes the snapshots of this face, for what tells that.
const TAKER: &str = "VMstore login";

const NANOS_PER_MILLISECOND: u64 = 1_000_000;

/// What a client wants a snapshot of. Other fields mean nothing here.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CinderSnapshotSpec {
    type_id: Option<String>,
    /// The file, below the export.
    file: String,
    vm_name: Option<String>,
    description: Option<String>,
    vm_tintri_uuid: Option<String>,
    instance_id: Option<String>,
    snapshot_creator: Option<String>,
    /// `DELETE_ON_EXPIRATION` (also where none is given) or `DELETE_ON_ZERO_CLONE_REFERENCES`.
    deletion_policy: Option<String>,
    /// Minutes after which the snapshot may be deleted; none or a negative number: never.
    retention_minutes: Option<i64>,
}

/// What a client wants a clone of.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CinderCloneSpec {
    type_id: Option<String>,
    tintri_snapshot_uuid: String,
    destination_paths: DestinationPaths,
}

/// VMstore's object has a list; newer clients send the one path itself.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
enum DestinationPaths {
    One(String),
    List(Vec<String>),
}

/// A snapshot as VMstore shows it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmstoreSnapshot {
    type_id: &'static str,
    uuid: VmstoreUuid,
    vm_uuid: Option<VmstoreUuid>,
    vm_name: String,
    instance_id: Option<String>,
    description: String,
    creator_name: String,
    /// Milliseconds since 1970.
    create_time: u64,
    /// Milliseconds since 1970.
    expiration_time: Option<u64>,
    clone_reference_count: u64,
    deletion_policy: &'static str,
    consistency: &'static str,
    hypervisor_type: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    is_deleted: bool,
    is_orphaned: bool,
    is_replica: bool,
}

/// A page of snapshots as VMstore shows it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmstorePage {
    type_id: &'static str,
    absolute_total: usize,
    /// Snapshots that match, on all pages.
    filtered_total: usize,
    total: usize,
    limit: usize,
    page: usize,
    page_total: usize,
    overflow: bool,
    /// The query of the next page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    items: Vec<VmstoreSnapshot>,
}

/// Takes a snapshot of a file
#[utoipa::path(
    post, path = CINDER_SNAPSHOT, tag = "vmstore", operation_id = "vmstoreSnapshot",
    request_body = CinderSnapshotSpec,
    responses(
        (status = 200, description = "A list with the snapshot's UUID", body = [String]),
        (status = 400, description = "A value has no meaning"),
        (status = 404, description = "There is no such file"),
        (status = 409, description = "The path is no file's"),
    ),
)]
pub(crate) async fn create(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    _session: LoggedIn,
    JsonBody(spec): JsonBody<CinderSnapshotSpec>,
) -> Result<Json<[String; 1]>, Failure> {
    require_type_id(spec.type_id.as_deref(), SNAPSHOT_SPEC_TYPE)?;
    let path = path_below_export(&state, &spec.file)?;
    let deletion = deletion(spec.deletion_policy.as_deref())?;
    let request = SnapshotRequest {
        name: None,
        deletion,
        expires_at: spec
            .retention_minutes
            .and_then(|minutes| expiry(state.store.now_for_ends(), minutes)),
        labels: Scope::All.labels_of_snapshot(TAKER, &path, deletion, labels(spec)),
        becomes_clone: false,
    };
    let of = path.to_string();
    let snapshot = state.call(move |store| store.snapshot(&path, request)).await?;
    about.say(format!("snapshot {} of {of}", snapshot.id));
    Ok(Json([snapshot.id.to_string()]))
}

fn deletion(policy: Option<&str>) -> Result<DeletionPolicy, Failure> {
    match policy {
        None | Some("DELETE_ON_EXPIRATION") => Ok(DeletionPolicy::Keep),
        Some("DELETE_ON_ZERO_CLONE_REFERENCES") => Ok(DeletionPolicy::OnZeroClones),
        Some(got) => Err(Failure::invalid(format!(
            "deletionPolicy is `{got}`, expected DELETE_ON_EXPIRATION or \
             DELETE_ON_ZERO_CLONE_REFERENCES"
        ))),
    }
}

fn expiry(now: Timestamp, retention_minutes: i64) -> Option<Timestamp> {
    let minutes = u64::try_from(retention_minutes).ok()?;
    convert::moment_after(now, minutes.checked_mul(60)?)
}

fn labels(spec: CinderSnapshotSpec) -> Labels {
    // The description is always there: it also marks snapshots that came through this face.
    let said = [
        (LABEL_DESCRIPTION, Some(spec.description.unwrap_or_default())),
        (LABEL_VM_NAME, spec.vm_name),
        (LABEL_VM_UUID, spec.vm_tintri_uuid),
        (LABEL_INSTANCE_ID, spec.instance_id),
        (LABEL_CREATOR, spec.snapshot_creator),
    ];
    said.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// Makes a file with a snapshot's content
///
/// It lands inside the directory that `destinationPaths` names, which is made, under the name
/// that the file had of which the snapshot was taken.
#[utoipa::path(
    post, path = CINDER_CLONE, tag = "vmstore", operation_id = "vmstoreClone",
    request_body = CinderCloneSpec,
    responses(
        (status = 204, description = "The file is there"),
        (status = 400, description = "A value has no meaning"),
        (status = 404, description = "There is no such snapshot"),
        (status = 409, description = "The file exists, or the directory is a file"),
    ),
)]
pub(crate) async fn clone(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    _session: LoggedIn,
    JsonBody(spec): JsonBody<CinderCloneSpec>,
) -> Result<StatusCode, Failure> {
    require_type_id(spec.type_id.as_deref(), CLONE_SPEC_TYPE)?;
    let id = parse_uuid(&spec.tintri_snapshot_uuid)?;
    let directory = match &spec.destination_paths {
        DestinationPaths::One(path) => path,
        DestinationPaths::List(paths) => match paths.as_slice() {
            [path] => path,
            paths => {
                let detail = format!("destinationPaths has {} paths, expected one", paths.len());
                return Err(Failure::invalid(detail));
            }
        },
    };
    let directory = path_below_export(&state, directory)?;
    about.say(format!("of snapshot {id} in {directory}"));
    let land = move |store: &Store| {
        let source = store.snapshot_info(id)?.path;
        let name = source.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        let mut names = directory.names().to_vec();
        names.push(Name::new(name)?);
        store.clone_snapshot(id, &FilePath::from_names(names)?)
    };
    state.call(land).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists snapshots
#[utoipa::path(
    get, path = SNAPSHOTS, tag = "vmstore", operation_id = "vmstoreSnapshots",
    params(
        ("vmUuid" = Option<String>, Query, description = "Of this machine"),
        ("uuid" = Option<String>, Query, description = "With this UUID"),
        ("contain" = Option<String>, Query, description = "With this text in the description or the machine's name"),
        ("since" = Option<String>, Query, description = "Taken then or later; ISO 8601, in UTC without a zone"),
        ("until" = Option<String>, Query, description = "Taken then or earlier; ISO 8601, in UTC without a zone"),
        ("hasClone" = Option<String>, Query, description = "Yes, No or Both"),
        ("type" = Option<String>, Query, description = "Of one of these types, separated by commas"),
        ("limit" = Option<usize>, Query, description = "Items of the page, 2000 unless given"),
        ("page" = Option<usize>, Query, description = "Which page, from 1"),
        ("sortedBy" = Option<String>, Query, description = "createTime, description, vmName or cloneReferenceCount"),
        ("sortOrder" = Option<String>, Query, description = "ASC or DESC"),
    ),
    responses(
        (status = 200, description = "A page of snapshots", body = VmstorePage),
        (status = 400, description = "A parameter cannot be read"),
    ),
)]
pub(crate) async fn list(
    State(state): State<Shared>,
    _session: LoggedIn,
    RawQuery(query): RawQuery,
) -> Result<Json<VmstorePage>, Failure> {
    let query = query.unwrap_or_default();
    let listing = Listing::decode(&query)?;
    let (limit, page) = (listing.limit, listing.page);
    let found: Found = state.call(move |store| listing::find(store, &listing)).await?;
    let page_total = found.matched.div_ceil(limit);
    Ok(Json(VmstorePage {
        type_id: PAGE_TYPE,
        absolute_total: found.seen,
        filtered_total: found.matched,
        total: found.matched,
        limit,
        page,
        page_total,
        overflow: found.overflow,
        next: (page < page_total).then(|| next_query(&query, page + 1)),
        items: found.items.iter().map(show).collect(),
    }))
}

/// The same query for another page.
fn next_query(query: &str, page: usize) -> String {
    let others = query.split('&').filter(|pair| !pair.is_empty() && !pair.starts_with("page="));
    let mut pairs: Vec<&str> = others.collect();
    let page = format!("page={page}");
    pairs.push(&page);
    pairs.join("&")
}

fn show(snapshot: &Snapshot) -> VmstoreSnapshot {
    let label = |key: &str| snapshot.labels.get(key).cloned();
    VmstoreSnapshot {
        type_id: SNAPSHOT_TYPE,
        uuid: VmstoreUuid::new(snapshot.id.to_string()),
        vm_uuid: label(LABEL_VM_UUID).map(VmstoreUuid::new),
        vm_name: listing::vm_name(snapshot).to_owned(),
        instance_id: label(LABEL_INSTANCE_ID),
        description: listing::description(snapshot).to_owned(),
        creator_name: label(LABEL_CREATOR).unwrap_or_default(),
        create_time: milliseconds(snapshot.created_at),
        expiration_time: snapshot.expires_at.map(milliseconds),
        clone_reference_count: snapshot.clone_count,
        deletion_policy: listing::deletion_policy(snapshot.deletion),
        consistency: "CRASH_CONSISTENT",
        hypervisor_type: "OPENSTACK",
        kind: listing::snapshot_type(snapshot),
        is_deleted: false,
        is_orphaned: false,
        is_replica: false,
    }
}

fn milliseconds(stamp: Timestamp) -> u64 {
    stamp.as_nanos() / NANOS_PER_MILLISECOND
}

/// Deletes a snapshot
///
/// 404 when it is gone already, which clients count as success.
#[utoipa::path(
    delete, path = SNAPSHOT, tag = "vmstore", operation_id = "vmstoreDeleteSnapshot",
    params(("uuid" = String, Path, description = "The snapshot's UUID")),
    responses(
        (status = 200, description = "It is gone"),
        (status = 404, description = "There is no such snapshot"),
        (status = 409, description = "It is in use; `Retry-After` says when to try again"),
    ),
)]
pub(crate) async fn delete(
    State(state): State<Shared>,
    _session: LoggedIn,
    Segment(uuid): Segment,
) -> Result<StatusCode, Failure> {
    let id = parse_uuid(&uuid)?;
    state.call(move |store| store.delete_snapshot(id)).await?;
    Ok(StatusCode::OK)
}

/// A text that is no UUID names no snapshot: these clients treat the two alike. They may have
/// turned it into upper case.
fn parse_uuid(text: &str) -> Result<SnapshotId, Failure> {
    text.to_ascii_lowercase().parse().map_err(|_| {
        let what = format!("snapshot {}", text.chars().take(64).collect::<String>().escape_debug());
        Failure::new(ProblemCode::NotFound, StoreError::NotFound { what }.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_destination_are_read() {
        for json in [r#"["/dir"]"#, r#""/dir""#] {
            let text =
                format!(r#"{{"typeId":"x","tintriSnapshotUuid":"u","destinationPaths":{json}}}"#);
            assert!(serde_json::from_str::<CinderCloneSpec>(&text).is_ok(), "{json}");
        }
    }

    #[test]
    fn policies_are_translated() {
        assert_eq!(deletion(None).unwrap(), DeletionPolicy::Keep);
        for policy in [DeletionPolicy::Keep, DeletionPolicy::OnZeroClones] {
            assert_eq!(deletion(Some(listing::deletion_policy(policy))).unwrap(), policy);
        }
        assert!(deletion(Some("NEVER")).is_err());
        let now = Timestamp::from_nanos(7);
        assert_eq!(expiry(now, -1), None);
        assert_eq!(expiry(now, 1), Some(Timestamp::from_nanos(60_000_000_007)));
        assert_eq!(expiry(now, i64::MAX), None);
    }

    #[test]
    fn the_next_page_keeps_the_filters() {
        assert_eq!(next_query("limit=1&page=2&vmUuid=x", 3), "limit=1&vmUuid=x&page=3");
        assert_eq!(next_query("", 2), "page=2");
    }
}

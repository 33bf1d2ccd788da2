//! Snapshots: take, list, look at, label, delete, compare, refer to.

use std::collections::BTreeSet;

use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::{Extension, Json};
use slackwater_blockstore::{
    FilePath, Result as StoreResult, SnapshotFilter, SnapshotId as StoreSnapshotId,
    SnapshotRequest, Store, Timestamp as StoreTimestamp,
};

use crate::audit::record::About;
use crate::auth::Caller;
use crate::convert::{self, parse_snapshot_id};
use crate::error::ProblemCode;
use crate::extract::{JsonBody, Segment};
use crate::failure::Failure;
use crate::query::{Diff, ListSnapshots, QueryError, page_limit};
use crate::readable::{SNAPSHOT_BATCH, WorkerReads};
use crate::router::Mount;
use crate::scope::Scope;
use crate::state::Shared;
use crate::types::{
    ChainId, CreateSnapshot, DiffPage, Snapshot, SnapshotPage, SnapshotReference, UpdateSnapshot,
};
use crate::{paths, publishing, reserved};

/// Bytes of labels and names after which a page ends early, so that a page of snapshots with
/// large labels stays an answer of a few MiB.
const PAGE_BYTES_MAX: usize = 4 << 20;

/// Snapshots that are looked at for one page of a worker, which reads some of them.
const LOOKED_AT_MAX: usize = 10_000;

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::GET, paths::SNAPSHOTS, list)
        .at(Method::POST, paths::SNAPSHOTS, create)
        .at(Method::GET, paths::SNAPSHOT, get)
        .at(Method::PATCH, paths::SNAPSHOT, update)
        .at(Method::DELETE, paths::SNAPSHOT, delete)
        .at(Method::GET, paths::SNAPSHOT_DIFF, diff)
        .at(Method::GET, paths::SNAPSHOT_REFERENCE, reference)
}

/// Lists snapshots
///
/// In order of their ids, those that the caller reads. A page may hold fewer items than asked for, or none; only a page
/// whose `next` is null is the last one.
#[utoipa::path(
    get, path = paths::SNAPSHOTS, tag = "snapshots", operation_id = "listSnapshots",
    params(
        ("path" = Option<String>, Query, description = "Only snapshots taken of a file at this path"),
        ("name" = Option<String>, Query, description = "Only the snapshot of this name"),
        ("label" = Option<Vec<String>>, Query, description = "`KEY=VALUE`, may be repeated: only snapshots with all these labels"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 1000, description = "Items of the page, 100 unless given"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A page of snapshots", body = SnapshotPage),
        (status = 422, description = "The path has no meaning"),
    ),
)]
pub(crate) async fn list(
    State(state): State<Shared>,
    scope: Scope,
    RawQuery(query): RawQuery,
) -> Result<Json<SnapshotPage>, Failure> {
    let query = ListSnapshots::decode(query.as_deref().unwrap_or_default())?;
    let limit = page_limit(query.limit);
    let path = query.path.as_deref().map(|path| Scope::All.reads(path)).transpose()?;
    let filter = SnapshotFilter {
        path: path.map(|path| path.to_bytes()),
        name: query.name,
        labels: query.labels,
        after: query.after.as_deref().map(parse_cursor).transpose()?,
    };
    let reads = scope.worker_reads();
    Ok(Json(state.call(move |store| page(store, filter, limit, reads)).await?))
}

fn page(
    store: &Store,
    mut filter: SnapshotFilter,
    limit: usize,
    mut reads: Option<WorkerReads>,
) -> StoreResult<SnapshotPage> {
    let mut items: Vec<Snapshot> = Vec::new();
    let (mut bytes, mut looked_at) = (0, 0);
    loop {
        // One more than asked for tells whether a next page has anything.
        let wanted = match reads {
            None => SNAPSHOT_BATCH.min(limit - items.len() + 1),
            Some(_) => SNAPSHOT_BATCH,
        };
        let batch = store.list_snapshots(&filter, wanted)?;
        let exhausted = batch.len() < wanted;
        for snapshot in batch {
            if items.len() == limit || bytes > PAGE_BYTES_MAX || looked_at == LOOKED_AT_MAX {
                let next = filter.after.map(|after| after.to_string());
                return Ok(SnapshotPage { items, next });
            }
            filter.after = Some(snapshot.id);
            looked_at += 1;
            let is_read = reads.as_mut().map(|reads| reads.reads(store, &snapshot)).transpose()?;
            if is_read == Some(false) {
                continue;
            }
            let snapshot = convert::snapshot(snapshot);
            bytes += weight(&snapshot);
            items.push(snapshot);
        }
        if exhausted {
            return Ok(SnapshotPage { items, next: None });
        }
    }
}

fn weight(snapshot: &Snapshot) -> usize {
    let labels = snapshot.labels.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
    let chain = |(id, makers): (&ChainId, &BTreeSet<String>)| {
        id.as_str().len() + makers.iter().map(String::len).sum::<usize>()
    };
    let chains = snapshot.chains.iter().map(chain).sum::<usize>();
    let publishers = snapshot.publishers.iter().map(String::len).sum::<usize>();
    let image = |(image, by): (&String, &BTreeSet<String>)| {
        image.len() + by.iter().map(String::len).sum::<usize>()
    };
    let images = snapshot.images.iter().map(image).sum::<usize>();
    let blobs = snapshot.restricted_chains.values().flatten();
    let blobs = blobs.map(|blob| blob.as_str().len()).sum::<usize>();
    let name = snapshot.name.as_ref().map_or(0, String::len);
    snapshot.path.len() + name + labels + chains + blobs + publishers + images
}

fn parse_cursor(text: &str) -> Result<StoreSnapshotId, QueryError> {
    text.parse().map_err(|_| QueryError::new("after", "is not the `next` of a page"))
}

/// Takes a snapshot of a file
///
/// Takes the same short time whatever the size. What was written before the call is in it. A
/// named snapshot is safe to ask for again: the second request is refused with `exists`, and
/// the problem names the snapshot that holds the name in `existing_snapshot_id`. What a token takes of a worker's file
/// with the policy `keep`, that worker neither deletes nor relabels; the appliance notes that in one label of its own.
#[utoipa::path(
    post, path = paths::SNAPSHOTS, tag = "snapshots", operation_id = "createSnapshot",
    request_body = CreateSnapshot,
    responses(
        (status = 201, description = "The snapshot; `Location` is its route", body = Snapshot),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The name is taken, the file is a clone already and was to become one, or the path is no file's"),
        (status = 422, description = "A value has no meaning, or is over a limit"),
    ),
)]
pub(crate) async fn create(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    Extension(caller): Extension<Caller>,
    scope: Scope,
    JsonBody(request): JsonBody<CreateSnapshot>,
) -> Result<(StatusCode, [(HeaderName, String); 1], Json<Snapshot>), Failure> {
    reserved::refuse_name(request.name.as_deref())?;
    reserved::refuse_labels(&request.labels)?;
    let path = scope.changes(&request.path)?;
    about.say(format!("of {}", request.path));
    let (name, becomes_clone, of) = (request.name.clone(), request.becomes_clone, path.clone());
    let deletion = convert::store_deletion_policy(request.deletion_policy);
    let request = SnapshotRequest {
        expires_at: expiry(&request, state.store.now_for_ends())?,
        name: request.name,
        labels: scope.labels_of_snapshot(&caller.name, &path, deletion, request.labels),
        deletion,
        becomes_clone,
    };
    match state.call(move |store| store.snapshot(&path, request)).await {
        Ok(snapshot) => {
            let snapshot = convert::snapshot(snapshot);
            let location = paths::snapshot(snapshot.id);
            Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(snapshot)))
        }
        Err(failure) if failure.code() == ProblemCode::Exists => {
            let in_the_way =
                move |store: &Store| in_the_way(store, name, becomes_clone.then_some(&of));
            let id = state.call(in_the_way).await?;
            Err(failure.with_existing_snapshot(id.map(convert::snapshot_id)))
        }
        Err(failure) => Err(failure),
    }
}

/// Why there is no second one: the snapshot that has the name, or whose clone the file is.
fn in_the_way(
    store: &Store,
    name: Option<String>,
    clone: Option<&FilePath>,
) -> StoreResult<Option<StoreSnapshotId>> {
    if let Some(name) = name {
        let filter = SnapshotFilter { name: Some(name), ..SnapshotFilter::default() };
        if let Some(holder) = store.list_snapshots(&filter, 1)?.first() {
            return Ok(Some(holder.id));
        }
    }
    Ok(clone.map(|path| store.file_info(path)).transpose()?.and_then(|file| file.origin_snapshot))
}

fn expiry(
    request: &CreateSnapshot,
    now: StoreTimestamp,
) -> Result<Option<StoreTimestamp>, Failure> {
    match (request.expires_at, request.expires_in_seconds) {
        (Some(_), Some(_)) => {
            Err(Failure::invalid("give either expires_at or expires_in_seconds, not both"))
        }
        (at, None) => Ok(at.map(convert::store_timestamp)),
        (None, Some(seconds)) => match convert::moment_after(now, seconds) {
            Some(moment) => Ok(Some(moment)),
            None => Err(Failure::invalid(format!(
                "expires_in_seconds is {seconds}, which ends after the year 2554"
            ))),
        },
    }
}

/// Shows a snapshot
#[utoipa::path(
    get, path = paths::SNAPSHOT, tag = "snapshots", operation_id = "getSnapshot",
    params(("id" = String, Path, format = Uuid, description = "The snapshot's id")),
    responses(
        (status = 200, description = "The snapshot", body = Snapshot),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "The id is no UUID in lower case"),
    ),
)]
pub(crate) async fn get(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
) -> Result<Json<Snapshot>, Failure> {
    let id = parse_snapshot_id(&id)?;
    let snapshot = scope.snapshot(&state, id).await?;
    Ok(Json(convert::snapshot(snapshot)))
}

/// Replaces a snapshot's labels
///
/// The chains that it was registered as stay.
#[utoipa::path(
    patch, path = paths::SNAPSHOT, tag = "snapshots", operation_id = "updateSnapshot",
    params(("id" = String, Path, format = Uuid, description = "The snapshot's id")),
    request_body = UpdateSnapshot,
    responses(
        (status = 200, description = "The snapshot as it is now", body = Snapshot),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "The id or a label has no meaning, or is over a limit"),
    ),
)]
pub(crate) async fn update(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
    JsonBody(request): JsonBody<UpdateSnapshot>,
) -> Result<Json<Snapshot>, Failure> {
    let id = parse_snapshot_id(&id)?;
    reserved::refuse_labels(&request.labels)?;
    refuse_change(&state, &scope, id).await?;
    let change = Box::new(move |labels| reserved::replaced(labels, request.labels));
    let snapshot = state.call(move |store| store.change_snapshot_labels(id, change)).await?;
    Ok(Json(convert::snapshot(snapshot)))
}

/// Refuses to change a snapshot that is none of the caller's.
async fn refuse_change(state: &Shared, scope: &Scope, id: StoreSnapshotId) -> Result<(), Failure> {
    if *scope == Scope::All {
        return Ok(());
    }
    let snapshot = state.call(move |store| store.snapshot_info(id)).await?;
    scope.changes_snapshot(&snapshot)
}

/// Deletes a snapshot
///
/// Its clones keep working. A worker does not delete one that others publish, or that a token took to keep.
#[utoipa::path(
    delete, path = paths::SNAPSHOT, tag = "snapshots", operation_id = "deleteSnapshot",
    params(("id" = String, Path, format = Uuid, description = "The snapshot's id")),
    responses(
        (status = 204, description = "It is gone"),
        (status = 404, description = "There is no such snapshot"),
        (status = 409, description = "It is in use; `Retry-After` says when to try again"),
        (status = 422, description = "The id is no UUID in lower case"),
    ),
)]
pub(crate) async fn delete(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
) -> Result<StatusCode, Failure> {
    let id = parse_snapshot_id(&id)?;
    refuse_change(&state, &scope, id).await?;
    match &scope {
        Scope::All => state.call(move |store| store.delete_snapshot(id)).await?,
        Scope::Worker { name, .. } => publishing::delete_snapshot(&state, name, id).await?,
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Lists what changed since another snapshot
///
/// The extents, in order of offset, in which the snapshot differs from `base`, as they are in
/// the snapshot; without `base`, from an empty file. Costs in proportion to what changed where
/// the two come from one file or its clones.
#[utoipa::path(
    get, path = paths::SNAPSHOT_DIFF, tag = "snapshots", operation_id = "diffSnapshots",
    params(
        ("id" = String, Path, format = Uuid, description = "The snapshot's id"),
        ("base" = Option<String>, Query, format = Uuid, description = "The snapshot to compare with"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 1000, description = "Items of the page, 100 unless given"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A page of extents", body = DiffPage),
        (status = 404, description = "One of the snapshots does not exist"),
        (status = 422, description = "The id is no UUID in lower case"),
    ),
)]
pub(crate) async fn diff(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
    RawQuery(query): RawQuery,
) -> Result<Json<DiffPage>, Failure> {
    let target = parse_snapshot_id(&id)?;
    let query = Diff::decode(query.as_deref().unwrap_or_default())?;
    let base = query.base.map(convert::store_snapshot_id);
    let limit = page_limit(query.limit);
    let offset_bytes = match query.after.as_deref().map(str::parse::<u64>) {
        None => 0,
        Some(Ok(offset_bytes)) => offset_bytes,
        Some(Err(_)) => return Err(QueryError::new("after", "is not the `next` of a page").into()),
    };
    for id in [Some(target), base].into_iter().flatten() {
        scope.require_snapshot(&state, id).await?;
    }
    let page = state.call(move |store| store.diff(base, target, offset_bytes, limit)).await?;
    Ok(Json(DiffPage {
        items: page.extents.iter().map(convert::diff_extent).collect(),
        next: page.next_offset_bytes.map(|offset| offset.to_string()),
    }))
}

/// Refers to a snapshot
///
/// What the layer of an image holds to stand for the snapshot, the same at each call. Workers bind a layer to a
/// snapshot only if it has the `mac`, which none but the appliance can make.
#[utoipa::path(
    get, path = paths::SNAPSHOT_REFERENCE, tag = "snapshots", operation_id = "referToSnapshot",
    params(("id" = String, Path, format = Uuid, description = "The snapshot's id")),
    responses(
        (status = 200, description = "The reference", body = SnapshotReference),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "The id is no UUID in lower case"),
        (status = 507, description = "There is no room for the key of references"),
    ),
)]
pub(crate) async fn reference(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
) -> Result<Json<SnapshotReference>, Failure> {
    let id = parse_snapshot_id(&id)?;
    let snapshot = scope.snapshot(&state, id).await?;
    let Some(key) = state.options.reference_key.get() else {
        let advice = "the data directory's disk had no room for the key of references: make room, which the server sees within seconds";
        return Err(Failure::new(ProblemCode::NoSpace, advice));
    };
    let store_id = state.store.store_id();
    Ok(Json(SnapshotReference {
        store_id: store_id.to_string(),
        snapshot_id: convert::snapshot_id(id),
        size_bytes: snapshot.size_bytes,
        mac: key.mac(store_id, id, snapshot.size_bytes),
    }))
}

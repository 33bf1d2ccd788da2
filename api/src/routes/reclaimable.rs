//! What a delete would free.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Json;
use axum::extract::State;
use axum::http::Method;
use slackwater_blockstore::{Reclaimable as StoreReclaimable, Result as StoreResult, Store};

use crate::convert::{self, parse_snapshot_id};
use crate::error::ProblemCode;
use crate::extract::Segment;
use crate::failure::Failure;
use crate::paths;
use crate::router::Mount;
use crate::scope::Scope;
use crate::state::{ApiState, Shared};
use crate::types::Reclaimable;

pub(crate) fn mount(mount: Mount) -> Mount {
    mount.at(Method::GET, paths::FILE_RECLAIMABLE, of_file).at(
        Method::GET,
        paths::SNAPSHOT_RECLAIMABLE,
        of_snapshot,
    )
}

/// Tells what a delete of a file would free
///
/// By itself: blocks that other files or snapshots hold too are freed by the last delete. The snapshot that goes with
/// its last clone is counted with that. What was written and is not committed, and what earlier deletes still free, is
/// not. Takes a time in proportion to the entries that go, and to those that they hide. The disk has the space back once the appliance has
/// compacted what lay around it.
#[utoipa::path(
    get, path = paths::FILE_RECLAIMABLE, tag = "files", operation_id = "getFileReclaimable",
    params(("path" = String, Path, description = "The file's path, its slashes as %2F")),
    responses(
        (status = 200, description = "The figures", body = Reclaimable),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The path is no file's"),
        (status = 422, description = "The path has no meaning"),
    ),
)]
pub(crate) async fn of_file(
    State(state): State<Shared>,
    scope: Scope,
    Segment(path): Segment,
) -> Result<Json<Reclaimable>, Failure> {
    let path = scope.reads(&path)?;
    told(&state, move |store, is_wanted| store.reclaimable_of_file(&path, is_wanted)).await
}

/// Tells what a delete of a snapshot would free
///
/// By itself, its clones staying; else as for a file.
#[utoipa::path(
    get, path = paths::SNAPSHOT_RECLAIMABLE, tag = "snapshots", operation_id = "getSnapshotReclaimable",
    params(("id" = String, Path, format = Uuid, description = "The snapshot's id")),
    responses(
        (status = 200, description = "The figures", body = Reclaimable),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "The id is no UUID in lower case"),
    ),
)]
pub(crate) async fn of_snapshot(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
) -> Result<Json<Reclaimable>, Failure> {
    let id = parse_snapshot_id(&id)?;
    scope.require_snapshot(&state, id).await?;
    told(&state, move |store, is_wanted| store.reclaimable_of_snapshot(id, is_wanted)).await
}

/// Says that its caller has left.
struct Left(Arc<AtomicBool>);

impl Drop for Left {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Asks the store, until the caller leaves or its time is up.
async fn told<W>(state: &ApiState, ask: W) -> Result<Json<Reclaimable>, Failure>
where
    W: FnOnce(&Store, &dyn Fn() -> bool) -> StoreResult<Option<StoreReclaimable>> + Send + 'static,
{
    let has_left = Arc::new(AtomicBool::new(false));
    let left = Left(Arc::clone(&has_left));
    let is_wanted = move || !has_left.load(Ordering::Relaxed);
    let told = state.call_sum(move |store| ask(store, &is_wanted)).await;
    drop(left);
    match told? {
        Some(reclaimable) => Ok(Json(convert::reclaimable(reclaimable))),
        // Its future is dropped before, also where its time is up: told for the sake of completeness.
        None => Err(Failure::new(ProblemCode::Timeout, "the caller left before the sum was done")),
    }
}

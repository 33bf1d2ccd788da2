//! Workers: machines with credentials of their own, as administrators add and revoke them, and as they join.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::{Extension, Json};
use slackwater_blockstore::{FilePath, InodeId, Result as StoreResult, Store};

use crate::auth::{Caller, Machine};
use crate::convert;
use crate::error::ProblemCode;
use crate::extract::{JsonBody, Segment};
use crate::failure::Failure;
use crate::mount_paths::Holder;
use crate::paths;
use crate::readable;
use crate::router::Mount;
use crate::scope;
use crate::state::Shared;
use crate::types::Timestamp;
use crate::worker::{
    AddWorker, AddedWorker, EXPORT_MOUNTS, JOIN_TOKEN_SECONDS_DEFAULT, JOIN_TOKEN_SECONDS_MAX,
    JoinWorker, MountPath, ReplaceCredential, WORKER_MOUNTS, Worker, WorkerList, WorkerName,
};
use crate::workers::{Workers, WorkersError, random_text};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::GET, paths::WORKERS, list)
        .at(Method::POST, paths::WORKERS, add)
        .at(Method::GET, paths::WORKER, get)
        .at(Method::DELETE, paths::WORKER, revoke)
        .at(Method::POST, paths::JOIN, join)
        .at(Method::PUT, paths::CREDENTIAL, replace_credential)
        .at(Method::POST, paths::MOUNT_PATHS, add_mount_path)
}

/// Lists the workers
///
/// All at once, in order of their names; there are 4,096 at most.
#[utoipa::path(
    get, path = paths::WORKERS, tag = "workers", operation_id = "listWorkers",
    responses((status = 200, description = "The workers", body = WorkerList)),
)]
pub(crate) async fn list(State(state): State<Shared>) -> Json<WorkerList> {
    Json(WorkerList { workers: state.options.workers.list() })
}

/// Adds a worker, and makes a join token for its machine
///
/// Where the appliance has files or snapshots of the machine's driver already, `worker_id` has to name it: else no machine
/// can take that id. The join token is answered this once, and to the same call by its idempotency key. It can be used
/// once, by `joinWorker`. A worker whose token was lost or has expired is revoked and added again.
#[utoipa::path(
    post, path = paths::WORKERS, tag = "workers", operation_id = "addWorker",
    request_body = AddWorker,
    responses(
        (status = 201, description = "The worker and its join token; `Location` is its route", body = AddedWorker),
        (status = 409, description = "A worker or a token of the configuration has the name, or a worker has the id"),
        (status = 422, description = "The name or the time has no meaning, or there are as many workers as there can be"),
    ),
)]
pub(crate) async fn add(
    State(state): State<Shared>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<AddWorker>,
) -> Result<(StatusCode, [(HeaderName, String); 1], Json<AddedWorker>), Failure> {
    let seconds = request.join_token_seconds.unwrap_or(JOIN_TOKEN_SECONDS_DEFAULT);
    if !(1..=JOIN_TOKEN_SECONDS_MAX).contains(&seconds) {
        let detail =
            format!("join_token_seconds is {seconds}, expected 1 to {JOIN_TOKEN_SECONDS_MAX}");
        return Err(Failure::invalid(detail));
    }
    let name = request.name.clone();
    let now = now(&state);
    let expires_at =
        Timestamp::from_nanos(now.as_nanos().saturating_add(seconds * NANOS_PER_SECOND));
    let (worker, join_token) = {
        let (name, tokens) = (name.clone(), Arc::clone(&state.options.tokens));
        let add = move |workers: &Workers| {
            // What a worker registers carries its name alone.
            let is_of_a_token = || tokens.has_name(name.as_str());
            workers.add(&name, request.worker_id, expires_at, now, is_of_a_token)
        };
        change(&state, add).await?
    };
    tracing::info!(worker = %name, by = &*caller.name, "a worker was added");
    let location = [(header::LOCATION, paths::worker(&name))];
    Ok((StatusCode::CREATED, location, Json(AddedWorker { worker, join_token })))
}

/// Tells about a worker
#[utoipa::path(
    get, path = paths::WORKER, tag = "workers", operation_id = "getWorker",
    params(("name" = String, Path, description = "The worker's name")),
    responses(
        (status = 200, description = "The worker", body = Worker),
        (status = 404, description = "There is no such worker"),
        (status = 422, description = "The name has no meaning"),
    ),
)]
pub(crate) async fn get(
    State(state): State<Shared>,
    Segment(name): Segment,
) -> Result<Json<Worker>, Failure> {
    Ok(Json(state.options.workers.get(&parse_name(&name)?)?))
}

/// Revokes a worker
///
/// Its credential and its join token are refused from now on; calls that are under way go on. Its files stay, and
/// what it registered as chains; its name is free. Where the answer is `io` or `no_space`, it is revoked until the
/// server restarts: repeat the call once the disk can be written. Layers that it registered stay trusted by workers
/// whose `trusted-makers` has its name: give another machine another name.
#[utoipa::path(
    delete, path = paths::WORKER, tag = "workers", operation_id = "revokeWorker",
    params(("name" = String, Path, description = "The worker's name")),
    responses(
        (status = 204, description = "It is revoked"),
        (status = 404, description = "There is no such worker"),
        (status = 422, description = "The name has no meaning"),
    ),
)]
pub(crate) async fn revoke(
    State(state): State<Shared>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment,
) -> Result<StatusCode, Failure> {
    let name = parse_name(&name)?;
    let revoked = name.clone();
    let workers = Arc::clone(&state.options.workers);
    // Not behind other calls, and not behind the disk.
    workers.revoke(&name)?;
    tracing::info!(worker = %name, by = &*caller.name, "a worker was revoked");
    let kept = tokio::task::spawn_blocking(move || workers.keep_revocation(&revoked)).await;
    kept.map_err(|error| {
        tracing::error!(%error, "writing the workers panicked");
        Failure::new(
            ProblemCode::Internal,
            "the worker is revoked until the server restarts, see its log",
        )
    })??;
    Ok(StatusCode::NO_CONTENT)
}

/// Joins, as the worker that the join token was made for
///
/// Safe to repeat: the same token, id and hash are answered again with the worker, as long as the token's time has not
/// passed. The token is taken for nothing else. An id of which the appliance has files or snapshots is taken only if the
/// worker was added with it.
#[utoipa::path(
    post, path = paths::JOIN, tag = "workers", operation_id = "joinWorker",
    request_body = JoinWorker,
    responses(
        (status = 200, description = "The worker", body = Worker),
        (status = 401, description = "The join token is not known, was used or has expired"),
        (status = 409, description = "Another worker has the id or the credential, there are files or snapshots of that id, or the worker was added with another id"),
        (status = 422, description = "The id or the hash has no meaning"),
    ),
)]
pub(crate) async fn join(
    State(state): State<Shared>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<JoinWorker>,
) -> Result<Json<Worker>, Failure> {
    let Some(Machine::Invited(name, join_token)) = caller.machine else {
        return Err(Failure::unauthenticated("send a join token"));
    };
    let now = now(&state);
    let id = request.worker_id;
    let files = format!("{}/{id}/", scope::WORKERS);
    // Its snapshots outlive its files, and who has the id reads them.
    let is_in_use = move |store: &Store| {
        Ok(!store.list_files(&files, None, 1)?.is_empty() || readable::has_snapshots(store, id)?)
    };
    let is_in_use = state.call(is_in_use).await?;
    let worker =
        change(&state, move |workers| workers.join(&name, join_token, &request, is_in_use, now))
            .await?;
    tracing::info!(worker = %worker.name, %id, "a worker joined");
    Ok(Json(worker))
}

/// Replaces the calling worker's credential
///
/// The previous one counts until the new one was used, and a minute more; it replaces none, and the new one is not
/// replaced before. Safe to repeat.
#[utoipa::path(
    put, path = paths::CREDENTIAL, tag = "workers", operation_id = "replaceCredential",
    request_body = ReplaceCredential,
    responses(
        (status = 200, description = "The worker", body = Worker),
        (status = 409, description = "Another worker has the credential, or the previous one still counts"),
        (status = 422, description = "The hash has no meaning"),
    ),
)]
pub(crate) async fn replace_credential(
    State(state): State<Shared>,
    Extension(caller): Extension<Caller>,
    JsonBody(request): JsonBody<ReplaceCredential>,
) -> Result<Json<Worker>, Failure> {
    let Some(Machine::Worker { name, credential: current, .. }) = caller.machine else {
        return Err(Failure::unauthenticated("send the credential of a worker"));
    };
    let (next, now) = (request.credential_blake3, now(&state));
    let replace = move |workers: &Workers| workers.replace_credential(&name, current, next, now);
    let worker = change(&state, replace).await?;
    tracing::info!(worker = %worker.name, "a worker replaced its credential");
    Ok(Json(worker))
}

/// Makes a path by which the caller mounts
///
/// By NFS (MNT of MOUNT version 3, then any NFSv3 client), from an address that the appliance lists. It can be used within
/// five minutes, and for five seconds after its first use: from the same address, and from a port below 1024, if that
/// use was. A worker has sixteen at once, a token 256. The mount goes on as long as the caller's credential or token is
/// there. A token of the role worker or admin mounts the whole export. A worker
/// mounts its own files and the snapshots that it reads: `workers/ID`, which is made if it is not there, and `.snapshot`.
#[utoipa::path(
    post, path = paths::MOUNT_PATHS, tag = "workers", operation_id = "addMountPath",
    responses(
        (status = 201, description = "The path", body = MountPath),
        (status = 507, description = "The worker's directory is not there, and there is no room for it"),
    ),
)]
pub(crate) async fn add_mount_path(
    State(state): State<Shared>,
    Extension(caller): Extension<Caller>,
) -> Result<(StatusCode, Json<MountPath>), Failure> {
    let (mounts, holder) = match caller.machine {
        Some(Machine::Worker { name, worker_id, credential }) => {
            let home = format!("{}/{worker_id}", scope::WORKERS);
            let home = FilePath::parse(&home).map_err(Failure::from)?;
            state.call(move |store| make_if_missing(store, &home)).await?;
            let added_at = state.options.workers.added_at(&name, credential)?;
            (WORKER_MOUNTS, Holder::Worker(name, added_at))
        }
        Some(Machine::Invited(..)) => {
            return Err(Failure::unauthenticated("a join token mounts nothing"));
        }
        None => (EXPORT_MOUNTS, Holder::Token(caller.token)),
    };
    let secret = random_text()?;
    let expires_at = state.options.mount_paths.add(&secret, holder, now(&state));
    let path = format!("{}/{mounts}/{secret}", state.options.export_path);
    Ok((StatusCode::CREATED, Json(MountPath { path, expires_at, nfs_tls: state.options.nfs_tls })))
}

/// A store that is full or takes no writes has it all the same, if it is there.
fn make_if_missing(store: &Store, directory: &FilePath) -> StoreResult<()> {
    let step = |at, name| store.lookup(at, name).map(|found| found.inode);
    match directory.names().iter().try_fold(InodeId::ROOT, step) {
        Ok(_) => Ok(()),
        Err(_) => store.create_directories(directory).map(drop),
    }
}

fn parse_name(text: &str) -> Result<WorkerName, Failure> {
    text.parse::<WorkerName>().map_err(|error| Failure::invalid(error.to_string()))
}

fn now(state: &Shared) -> Timestamp {
    convert::timestamp(state.store.now())
}

/// Changes the workers beside the runtime, as their file is written.
async fn change<T: Send + 'static>(
    state: &Shared,
    change: impl FnOnce(&Workers) -> Result<T, WorkersError> + Send + 'static,
) -> Result<T, Failure> {
    let workers = Arc::clone(&state.options.workers);
    state.call(move |_| Ok(change(&workers))).await?.map_err(Failure::from)
}

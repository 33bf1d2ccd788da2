//! Chains: which snapshot holds the layers that a chain id names, and who said so.

use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::{Extension, Json};
use slackwater_blockstore::{
    DeletionPolicy, ErrorKind, Result as StoreResult, SnapshotFilter, SnapshotRequest, Store,
};

use crate::audit::record::About;
use crate::auth::Caller;
use crate::chain::{ChainId, RegisterChain};
use crate::convert::{self, parse_snapshot_id};
use crate::error::ProblemCode;
use crate::extract::{JsonBody, Segment};
use crate::failure::Failure;
use crate::paths;
use crate::query::AddChain;
use crate::reserved::{self, Audience};
use crate::router::Mount;
use crate::scope::Scope;
use crate::state::Shared;
use crate::types::{Snapshot, SnapshotId};

/// How long a registered snapshot lives that has no clone: its worker makes one at once, where the file is not to become
/// it.
const WITHOUT_CLONE_SECONDS: u64 = 3600;

pub(crate) fn mount(mount: Mount) -> Mount {
    mount.at(Method::POST, paths::CHAINS, register).at(Method::GET, paths::CHAIN, find).at(
        Method::PUT,
        paths::SNAPSHOT_CHAIN,
        add,
    )
}

/// Takes a snapshot of a file and registers it as a chain
///
/// There is one snapshot for each chain id and size of disk: a second request is refused with `exists`, and the
/// problem names the first snapshot in `existing_snapshot_id`. With a `blob` the layer is for those alone who may read
/// that blob of a registry: workers ask the registry. The appliance does not, and shows the snapshot to all who may
/// read chains. The snapshot's `chains` tell the names of the tokens and workers that registered it; a name is empty
/// where the server asks for no token. It goes with its last clone, or some time after
/// an hour without one.
#[utoipa::path(
    post, path = paths::CHAINS, tag = "chains", operation_id = "registerChain",
    request_body = RegisterChain,
    responses(
        (status = 201, description = "The snapshot; `Location` is its route", body = Snapshot),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The chain is registered for this size, the file is a clone already and was to become one, or the path is no file's"),
        (status = 422, description = "A value has no meaning, or is over a limit"),
    ),
)]
pub(crate) async fn register(
    State(state): State<Shared>,
    Extension(Caller { name: maker, .. }): Extension<Caller>,
    Extension(about): Extension<About>,
    scope: Scope,
    JsonBody(request): JsonBody<RegisterChain>,
) -> Result<(StatusCode, [(HeaderName, String); 1], Json<Snapshot>), Failure> {
    reserved::refuse_labels(&request.labels)?;
    let path = scope.changes(&request.path)?;
    let (chain, becomes_clone) = (request.chain_id, request.becomes_clone);
    let readers =
        request.blob.as_ref().map_or(String::new(), |blob| format!(", for readers of {blob}"));
    about.say(format!("{chain} of {}{readers}", request.path));
    let audience = request.blob.map_or(Audience::All, Audience::Readers);
    let labels = reserved::with_chain(request.labels, &chain, &maker, &audience);
    let expires_at = convert::moment_after(state.store.now_for_ends(), WITHOUT_CLONE_SECONDS);
    let wanted = chain.clone();
    let take = move |store: &Store| -> StoreResult<(Option<SnapshotId>, StoreResult<_>)> {
        let size_bytes = store.file_info(&path)?.attributes.size_bytes;
        let name = reserved::chain_name(&wanted, size_bytes);
        let request = SnapshotRequest {
            name: Some(name.clone()),
            labels,
            deletion: DeletionPolicy::OnZeroClones,
            expires_at,
            becomes_clone,
        };
        let taken = store.snapshot(&path, request);
        // What is in the way.
        let holder = match &taken {
            Err(error) if error.kind() == ErrorKind::Exists => match named(store, name)? {
                Some(holder) => Some(holder.id),
                None => store.file_info(&path)?.origin_snapshot.map(convert::snapshot_id),
            },
            _ => None,
        };
        Ok((holder, taken))
    };
    let (holder, taken) = state.call(take).await?;
    match taken.map_err(Failure::from) {
        Ok(snapshot) => {
            tracing::info!(%chain, snapshot = %snapshot.id, maker = &*maker, "a chain is registered");
            let snapshot = convert::snapshot(snapshot);
            let location = paths::snapshot(snapshot.id);
            Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(snapshot)))
        }
        Err(failure) if failure.code() == ProblemCode::Exists => {
            Err(failure.with_existing_snapshot(holder))
        }
        Err(failure) => Err(failure),
    }
}

fn named(store: &Store, name: String) -> StoreResult<Option<Snapshot>> {
    let filter = SnapshotFilter { name: Some(name), ..SnapshotFilter::default() };
    Ok(store.list_snapshots(&filter, 1)?.pop().map(convert::snapshot))
}

/// Shows the snapshot that is registered for a chain
#[utoipa::path(
    get, path = paths::CHAIN, tag = "chains", operation_id = "getChain",
    params(
        ("chain_id" = String, Path, description = "`sha256:` and 64 digits"),
        ("size_bytes" = u64, Path, description = "The size of the disk"),
    ),
    responses(
        (status = 200, description = "The snapshot", body = Snapshot),
        (status = 404, description = "None is registered for the chain and this size"),
        (status = 422, description = "The chain id or the size has no meaning"),
    ),
)]
pub(crate) async fn find(
    State(state): State<Shared>,
    Segment((chain, size)): Segment<(String, String)>,
) -> Result<Json<Snapshot>, Failure> {
    let chain = parse_chain_id(&chain)?;
    let Some(size_bytes) = size.parse::<u64>().ok().filter(|bytes| bytes.to_string() == size)
    else {
        return Err(Failure::invalid(format!(
            "the size of the disk is `{}`: give its bytes as a decimal number, such as 68719476736",
            size.chars().take(32).collect::<String>().escape_debug()
        )));
    };
    let name = reserved::chain_name(&chain, size_bytes);
    match state.call(move |store| named(store, name)).await? {
        // A file that was resized at the moment it was registered made a name of another size.
        Some(snapshot) if snapshot.size_bytes == size_bytes => Ok(Json(snapshot)),
        _ => {
            let detail = format!("no snapshot of {size_bytes} bytes is registered for {chain}");
            Err(Failure::new(ProblemCode::NotFound, detail))
        }
    }
}

/// Registers a snapshot that there is as a chain
///
/// Beside the chains that it is registered as already; it is not found by its chain, only told by its `chains`.
/// Registered again, it has the new caller's name as well. For whom the layer is stays as it was, unless a parameter
/// says otherwise; what is for all once stays so.
#[utoipa::path(
    put, path = paths::SNAPSHOT_CHAIN, tag = "chains", operation_id = "addChain",
    params(
        ("id" = String, Path, format = Uuid, description = "The snapshot's id"),
        ("chain_id" = String, Path, description = "`sha256:` and 64 digits"),
        ("blob" = Option<String>, Query, description = "`HOST/REPOSITORY@sha256:DIGITS`: the layer is for those, too, who may read this blob"),
        ("for_all" = Option<bool>, Query, description = "`true`: the layer is for all from now on"),
    ),
    responses(
        (status = 200, description = "The snapshot as it is now", body = Snapshot),
        (status = 400, description = "A parameter that there is not, or both"),
        (status = 404, description = "There is no such snapshot"),
        (status = 422, description = "An id has no meaning, the snapshot has as many chains and labels as it can have, or 16 chains and is not of the worker's files"),
    ),
)]
pub(crate) async fn add(
    State(state): State<Shared>,
    Extension(Caller { name: maker, .. }): Extension<Caller>,
    Extension(about): Extension<About>,
    scope: Scope,
    Segment((id, chain)): Segment<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Json<Snapshot>, Failure> {
    let AddChain { blob, is_for_all } = AddChain::decode(query.as_deref().unwrap_or_default())?;
    let audience = match blob {
        Some(blob) => {
            about.say(format!("for readers of {blob}"));
            Audience::Readers(blob)
        }
        None if is_for_all => {
            about.say("for all");
            Audience::All
        }
        None => Audience::Same,
    };
    let (id, chain) = (parse_snapshot_id(&id)?, parse_chain_id(&chain)?);
    let may_change = match scope {
        Scope::All => true,
        Scope::Worker { .. } => scope.changes_snapshot(&scope.snapshot(&state, id).await?).is_ok(),
    };
    let add = {
        let (chain, maker) = (chain.clone(), maker.clone());
        let with = if may_change { reserved::with_chain } else { reserved::with_chain_of_another };
        Box::new(move |labels| with(labels, &chain, &maker, &audience))
    };
    let snapshot = state.call(move |store| store.change_snapshot_labels(id, add)).await?;
    let snapshot = convert::snapshot(snapshot);
    if !snapshot.chains.contains_key(&chain) {
        return Err(Failure::invalid(format!(
            "snapshot {id} is not of the files of worker `{maker}` and has {} chains, and others give it at most {}: \
             take a snapshot of a clone, and register that",
            snapshot.chains.len(),
            reserved::CHAINS_OF_OTHERS_MAX
        )));
    }
    tracing::info!(%chain, snapshot = %id, maker = &*maker, "a snapshot is registered as a chain");
    Ok(Json(snapshot))
}

fn parse_chain_id(text: &str) -> Result<ChainId, Failure> {
    text.parse::<ChainId>().map_err(|error| Failure::invalid(error.to_string()))
}

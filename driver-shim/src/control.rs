//! The control socket: HTTP and JSON between the daemon and its commands, on a unix socket that
//! only root reaches.
//!
//! | call | what it does |
//! |---|---|
//! | `GET /status` | what the daemon is and has |
//! | `GET /metrics` | the same and more for Prometheus; also at `--metrics-listen` |
//! | `GET /references/{snapshot}` | the reference to a snapshot |
//! | `POST /references` | the snapshot that a reference of an image names, if it is trusted |
//! | `GET /volumes?engine=` | all volumes of an engine |
//! | `GET /volumes/{engine}/{name}` | one and what it was made above, with their snapshots |
//! | `GET /layers/{namespace}/{chain id}?layers=&below=` | the snapshot of a layer of containerd, of this kind and above this chain; made now if it has none yet |
//! | `POST /capture` | a snapshot of a container's disk, or of what it wrote above images; of containerd's, without what Docker put into an init layer |
//! | `POST /publish`, `/unpublish`, `/unpublish-image`, `GET /published` | snapshots kept for images elsewhere |
//! | `POST /view` | a mount of a snapshot, or of images as one tree, for as long as the connection lasts |
//! | `POST /reconcile` | finishes what was interrupted, now |

mod publications;

pub use self::publications::{PublishRequest, PublishedAnswer, UnpublishImageRequest};

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, VARY};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use slackwater_archive::Reference;
use slackwater_client::exposition;
use slackwater_client::types::SnapshotId;

use crate::containerd::docker_init;
use crate::daemon::Stop;
use crate::settings::Config;
use crate::trust::unpacking;
use crate::worker::{
    BelowContainer, Content, Engine, Extra, Key, Kind, LayerKind, Reconciled, SnapshotRef, View,
    ViewOfImages, Volume, Worker, WorkerError,
};

/// What the calls work with.
#[derive(Clone, Debug)]
pub struct Control {
    worker: Worker,
    config: Config,
    stop: Stop,
}

/// Names a container's disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct CaptureRequest {
    /// Whose it is.
    pub engine: Engine,
    /// Its volume.
    pub name: String,
}

/// Names a snapshot to mount.
#[derive(Debug, Serialize, Deserialize)]
pub struct ViewRequest {
    /// The snapshot: a disk, or the image of a layer.
    pub snapshot: SnapshotRef,
    /// Of an image, those that are to be seen below it, the highest one first. A command of an older release gives none, and
    /// would take the layer for the whole tree.
    #[serde(default)]
    pub below: Option<Vec<SnapshotRef>>,
}

/// Which snapshot of a layer is asked for.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LayerQuery {
    /// Of which kind it is; of any if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerKind>,
    /// The chain that is below it; none below the lowest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<String>,
}

/// Where it is mounted.
#[derive(Debug, Serialize, Deserialize)]
pub struct ViewAnswer {
    /// The directory.
    pub path: PathBuf,
    /// The number of the file system's device: who finds another one there is in a mount namespace without the mount. A
    /// daemon of release 0.2 does not tell it.
    #[serde(default)]
    pub device: Option<u64>,
}

/// A volume and what it was made above.
#[derive(Debug, Serialize, Deserialize)]
pub struct Chain {
    /// From the volume down.
    pub links: Vec<Link>,
}

/// One of them.
#[derive(Debug, Serialize, Deserialize)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// What reading it shows; none for an empty or a writable disk.
    pub snapshot: Option<SnapshotRef>,
}

/// Which volumes to list.
#[derive(Debug, Deserialize)]
struct VolumesQuery {
    engine: Engine,
}

/// A call that failed.
struct Failure(WorkerError);

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match &self.0 {
            WorkerError::NotFound { .. }
            | WorkerError::UnknownSnapshot { .. }
            | WorkerError::NotPublished { .. } => StatusCode::NOT_FOUND,
            WorkerError::Untrusted { .. } => StatusCode::FORBIDDEN,
            WorkerError::Appliance { .. } => StatusCode::BAD_GATEWAY,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(json!({ "error": self.0.to_string() }))).into_response()
    }
}

type Answer<T> = Result<Json<T>, Failure>;

impl Control {
    /// The calls on this worker.
    #[must_use]
    pub fn new(worker: Worker, config: Config, stop: Stop) -> Self {
        Self { worker, config, stop }
    }
}

/// The routes.
pub fn router(control: Control) -> Router {
    Router::new()
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .route("/references/{snapshot}", get(reference))
        .route("/references", post(referenced))
        .route("/volumes", get(volumes))
        .route("/volumes/{engine}/{name}", get(chain))
        .route("/layers/{namespace}/{chain_id}", get(layer))
        .route("/capture", post(capture))
        .route("/publish", post(publications::publish))
        .route("/unpublish", post(publications::unpublish))
        .route("/unpublish-image", post(publications::unpublish_image))
        .route("/published", get(publications::published))
        .route("/view", post(view))
        .route("/reconcile", post(reconcile))
        .with_state(control)
}

async fn status(State(control): State<Control>) -> Json<Value> {
    let Control { worker, config, .. } = &control;
    let appliance = match worker.client().stats().await {
        Ok(stats) => json!({ "reachable": true, "store_id": stats.store_id,
            "available_bytes": stats.available_bytes }),
        Err(error) => json!({ "reachable": false, "reason": error.to_string() }),
    };
    let (attach, mounted_by, is_served_alike, mounts) = match worker.attached() {
        Some(attach) => {
            let mounts = attach.mounts().await.map(|mounts| mounts.len()).ok();
            let mounted_by = attach.mounted_by().map(|by| by.to_string());
            let is_served_alike = attach.is_served_alike();
            (Some(attach.method().to_string()), mounted_by, Some(is_served_alike), mounts)
        }
        None => (None, None, None, None),
    };
    let users = |engine| worker.list(engine).iter().filter(|volume| volume.users > 0).count();
    let volumes = |engine| json!({ "all": worker.list(engine).len(), "in_use": users(engine) });
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "worker_id": worker.worker_id(),
        "api": config.target.api,
        "nfs": config.target.nfs,
        "state_dir": config.state_dir,
        "disk_size_bytes": worker.disk_size_bytes(),
        "layers": worker.layers_setting(),
        "appliance": appliance,
        "attach": attach,
        "mounted_by": mounted_by,
        "served_with_these_settings": is_served_alike,
        "mounts": mounts,
        "volumes": { "docker": volumes(Engine::Docker), "containerd": volumes(Engine::Containerd) },
        "cache": cache_statistics(worker).await,
    }))
}

/// What the process that serves the export counts, if there is one.
async fn cache_statistics(worker: &Worker) -> Option<Value> {
    let file = worker.attached()?.statistics_file()?;
    // On a thread of its own: the file is inside the export, which may be stalled.
    let text = tokio::task::spawn_blocking(move || std::fs::read(file));
    let limit = std::time::Duration::from_secs(2);
    let bytes = tokio::time::timeout(limit, text).await.ok()?.ok()?.ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// The page for Prometheus alone, for a port that others reach.
pub fn metrics_router(control: Control) -> Router {
    Router::new().route("/metrics", get(metrics)).with_state(control)
}

async fn metrics(State(control): State<Control>, headers: HeaderMap) -> Response {
    let worker = &control.worker;
    let page = worker.metrics().render(worker, cache_statistics(worker).await.as_ref());
    let accept: Vec<_> =
        headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let (media_type, page) = exposition::answer(page, Some(&accept.join(",")));
    ([(CONTENT_TYPE, media_type), (VARY, "accept")], page).into_response()
}

async fn reference(
    State(control): State<Control>,
    Path(snapshot): Path<SnapshotId>,
) -> Answer<Reference> {
    Ok(Json(control.worker.reference_to(snapshot).await?))
}

async fn referenced(
    State(control): State<Control>,
    Json(reference): Json<Reference>,
) -> Answer<SnapshotRef> {
    // Its size was compared, too: with what the appliance says of the snapshot.
    let id = control.worker.believe(&reference).await?;
    Ok(Json(SnapshotRef { id, size_bytes: reference.size_bytes }))
}

async fn volumes(
    State(control): State<Control>,
    Query(query): Query<VolumesQuery>,
) -> Json<Vec<Volume>> {
    Json(control.worker.list(query.engine))
}

async fn chain(
    State(control): State<Control>,
    Path((engine, name)): Path<(Engine, String)>,
) -> Answer<Chain> {
    let mut links = Vec::new();
    let mut next = Some(Key { engine, name });
    while let Some(key) = next {
        let volume =
            control.worker.get(&key).ok_or_else(|| WorkerError::NotFound { key: key.clone() })?;
        let snapshot = control.worker.snapshot_of(&key).await?;
        links.push(Link { name: key.name, snapshot });
        next = volume.parent;
    }
    Ok(Json(Chain { links }))
}

/// A layer of this namespace by its own name, as containerd takes it, else one of any namespace or worker
/// that is known to be the chain: names of other namespaces are the word of whatever works there.
async fn layer(
    State(control): State<Control>,
    Path((namespace, chain_id)): Path<(String, String)>,
    Query(query): Query<LayerQuery>,
) -> Answer<Option<SnapshotRef>> {
    let worker = &control.worker;
    let (prefix, suffix) = (format!("{namespace}/"), format!("/{chain_id}"));
    let is_own = |volume: &Volume| {
        let name = &volume.key.name;
        name.starts_with(&prefix) && name.ends_with(&suffix)
    };
    let mut candidates = worker.list(Engine::Containerd);
    let is_kept = worker.trust().private_layers;
    candidates.retain(|volume| is_layer(volume, is_own(volume), &chain_id, &prefix, is_kept));
    candidates.sort_by_key(|volume| !is_own(volume));
    let is_asked = |kind| query.layers.is_none_or(|asked| asked == kind);
    for volume in candidates {
        if matches!(volume.content, Content::Lower { .. }) && !is_asked(LayerKind::Images) {
            continue;
        }
        match worker.layer_as_snapshot(&volume.key).await {
            Ok(Some(snapshot)) if is_asked(LayerKind::of(snapshot.size_bytes)) => {
                return Ok(Json(Some(snapshot)));
            }
            Ok(_) => {}
            // Another one may do.
            Err(
                error @ (WorkerError::NotFound { .. }
                | WorkerError::Damaged { .. }
                | WorkerError::Image { .. }),
            ) => {
                tracing::warn!(key = %volume.key, %error, "a layer is not taken for an image");
            }
            Err(error) => return Err(error.into()),
        }
    }
    // What is no chain id, the appliance does not have.
    let Ok(chain) = chain_id.parse() else { return Ok(Json(None)) };
    for kind in [LayerKind::Disks, LayerKind::Images].into_iter().filter(|kind| is_asked(*kind)) {
        let found = worker.find_chain_as(&chain, kind, query.below.as_deref()).await?;
        if found.is_some() {
            return Ok(Json(found));
        }
    }
    Ok(Json(None))
}

fn is_layer(volume: &Volume, is_own: bool, chain_id: &str, prefix: &str, is_kept: bool) -> bool {
    let Extra::Containerd(extra) = &volume.extra else {
        return false;
    };
    extra.kind == Kind::Committed
        && unpacking::is_visible_to(&volume.key.name, prefix, is_kept || extra.is_private)
        && unpacking::is_of_image(extra.chain.as_deref(), is_own, chain_id)
}

async fn capture(
    State(control): State<Control>,
    Json(request): Json<CaptureRequest>,
) -> Answer<SnapshotRef> {
    let key = Key { engine: request.engine, name: request.name };
    let worker = &control.worker;
    if worker.shows_images(&key)? {
        // Its layer has nothing of what is below it.
        let image = docker_init::image_below(worker, &key)?;
        return Ok(Json(worker.capture_image(&key, image).await?));
    }
    // Before the capture: the container may go at any time. Those of Docker's plugin are committed by that.
    let below = match key.engine {
        Engine::Containerd => docker_init::below_container(worker, &key).await?,
        Engine::Docker => BelowContainer::default(),
    };
    let captured = worker.capture(&key).await?;
    Ok(Json(worker.without_init(captured, below).await?))
}

/// What is mounted for a caller.
enum Seen {
    Disk(View),
    Images(ViewOfImages),
}

impl Seen {
    fn path(&self) -> &std::path::Path {
        match self {
            Self::Disk(view) => view.path(),
            Self::Images(view) => view.path(),
        }
    }
}

/// Answers where the snapshot is mounted, and then nothing more until the caller goes away or
/// the daemon stops; only then the mount is let go, so that no caller can forget one.
async fn view(
    State(control): State<Control>,
    Json(request): Json<ViewRequest>,
) -> Result<Response, Failure> {
    let view = match LayerKind::of(request.snapshot.size_bytes) {
        LayerKind::Disks => Seen::Disk(control.worker.view(request.snapshot).await?),
        LayerKind::Images => {
            let id = request.snapshot.id;
            let below = request.below.ok_or(WorkerError::OldCommand { id })?;
            let images: Vec<_> = [request.snapshot].into_iter().chain(below).collect();
            Seen::Images(control.worker.view_of_images(&images).await?)
        }
    };
    let path = view.path();
    let failed = |source| WorkerError::Local { path: path.to_owned(), source };
    let device = std::fs::metadata(path).map_err(failed)?.dev();
    let answer = json!({ "path": path, "device": device }).to_string();
    let first = stream::once(async { Ok::<_, std::io::Error>(Bytes::from(answer)) });
    let held = stream::once(async move {
        control.stop.asked().await;
        drop(view);
        Ok(Bytes::new())
    });
    Ok(Body::from_stream(first.chain(held)).into_response())
}

/// Snapshots of any age: whoever asks knows that nothing is under way.
async fn reconcile(State(control): State<Control>) -> Answer<Reconciled> {
    let reconciled = control.worker.reconcile(Duration::ZERO).await?;
    control.worker.clean_up().await;
    Ok(Json(reconciled))
}

//! The calls of dockerd, as it sends them: a POST each, JSON without a content type, and an error
//! as a sentence in `Err`.

use std::future::Future;
use std::sync::Once;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::driver::GraphDriver;
use super::error::DockerError;
use super::types::{ApplyQuery, CreateRequest, InitRequest, LayerId, LayerRequest, StorageOptions};

/// Longest request in JSON: names and a few options.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// What dockerd calls its own JSON.
const MEDIA_TYPE: &str = "application/vnd.docker.plugins.v1.2+json";

/// The plugin's routes, for the listener of its socket.
pub fn router(driver: GraphDriver) -> Router {
    Router::new()
        .route("/Plugin.Activate", post(activate))
        .route("/GraphDriver.Init", post(init))
        .route("/GraphDriver.Capabilities", post(capabilities))
        .route("/GraphDriver.Create", post(create))
        .route("/GraphDriver.CreateReadWrite", post(create_read_write))
        .route("/GraphDriver.Remove", post(remove))
        .route("/GraphDriver.Get", post(get))
        .route("/GraphDriver.Put", post(put))
        .route("/GraphDriver.Exists", post(exists))
        .route("/GraphDriver.Status", post(status))
        .route("/GraphDriver.GetMetadata", post(metadata))
        .route("/GraphDriver.Cleanup", post(cleanup))
        .route("/GraphDriver.Diff", post(diff))
        .route("/GraphDriver.Changes", post(changes))
        .route("/GraphDriver.ApplyDiff", post(apply))
        .route("/GraphDriver.DiffSize", post(diff_size))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .fallback(unknown)
        .with_state(driver)
}

type Outcome = Result<Value, DockerError>;

/// Reads the request, runs the call, answers; a failure with status 200, as dockerd shows its
/// text then without more around it.
async fn answer<R, F>(
    driver: &GraphDriver,
    call: &'static str,
    body: Bytes,
    work: impl FnOnce(R) -> F,
) -> Response
where
    R: DeserializeOwned,
    F: Future<Output = Outcome>,
{
    let started = Instant::now();
    // Calls without arguments come with an empty object, or with nothing.
    let text: &[u8] = if body.is_empty() { b"{}" } else { &body };
    let outcome = match serde_json::from_slice(text) {
        Ok(request) => work(request).await,
        Err(source) => Err(DockerError::Request { source }),
    };
    reply(driver, call, &String::from_utf8_lossy(text), started, outcome)
}

/// [`answer`] for a call that names a layer, noted until it is answered.
async fn answer_noted<R, F>(
    driver: &GraphDriver,
    call: &'static str,
    body: Bytes,
    work: impl FnOnce(R, Uuid) -> F,
) -> Response
where
    R: DeserializeOwned,
    F: Future<Output = Outcome>,
{
    let noted = driver.inner.notes.begin(call, body).await;
    if noted.body.is_empty() {
        return reply(driver, call, "", Instant::now(), Err(DockerError::Repeated { call }));
    }
    answer(driver, call, noted.body.clone(), |request| work(request, noted.token)).await
}

fn reply(
    driver: &GraphDriver,
    call: &'static str,
    request: &str,
    started: Instant,
    outcome: Outcome,
) -> Response {
    driver.count(call, started, outcome.is_err());
    let elapsed_us = started.elapsed().as_micros();
    let value = match outcome {
        Ok(value) => {
            tracing::debug!(call, request, elapsed_us, "done");
            value
        }
        Err(error) => {
            tracing::warn!(call, request, elapsed_us, %error, "refused or failed");
            json!({ "Err": error.to_string() })
        }
    };
    json_response(StatusCode::OK, &value)
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = (status, value.to_string()).into_response();
    let media_type = HeaderValue::from_static(MEDIA_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, media_type);
    response
}

/// The answer of a call that has nothing to say.
fn done() -> Outcome {
    Ok(json!({ "Err": "" }))
}

async fn unknown(uri: Uri) -> Response {
    let error = format!("the driver has no call {}", uri.path().escape_debug());
    json_response(StatusCode::NOT_FOUND, &json!({ "Err": error }))
}

async fn activate() -> Response {
    json_response(StatusCode::OK, &json!({ "Implements": ["GraphDriver"] }))
}

/// Checks what dockerd was started with, and keeps nothing: after a restart of this daemon it
/// is not sent again.
async fn init(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer(&driver.clone(), "Init", body, |request: InitRequest| async move {
        if !request.opts.is_empty() {
            let advice = "remove it and set what is meant in the driver's configuration";
            return Err(DockerError::Unsupported { got: "--storage-opt", advice });
        }
        if !request.uid_maps.is_empty() || !request.gid_maps.is_empty() {
            let advice = "layers keep the owners that their images give; remove the option";
            return Err(DockerError::Unsupported { got: "--userns-remap", advice });
        }
        driver.remove_lone_layers().await?;
        driver.tidy().await;
        done()
    })
    .await
}

async fn capabilities(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    let capabilities = json!({ "Capabilities": { "ReproducesExactDiffs": true } });
    answer(&driver, "Capabilities", body, |_: Value| async { Ok(capabilities) }).await
}

/// SELinux labels would have to be mount options, and mounts are shared.
fn warn_of_label(label: &str) {
    static WARNED: Once = Once::new();
    if !label.is_empty() {
        WARNED.call_once(|| {
            tracing::warn!(label, "SELinux labels of containers are ignored: files have their own");
        });
    }
}

async fn create(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Create", body, |request: CreateRequest, _| async move {
        warn_of_label(&request.mount_label);
        let id = LayerId::parse(&request.id)?;
        let parent = LayerId::parse_parent(&request.parent)?;
        // The options are those of dockerd's own configuration, none of which is for layers.
        StorageOptions::parse(&request.storage_opt)?;
        driver.create(&id, parent.as_ref()).await?;
        done()
    })
    .await
}

async fn create_read_write(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "CreateReadWrite", body, |request: CreateRequest, _| async move {
        warn_of_label(&request.mount_label);
        let id = LayerId::parse(&request.id)?;
        let parent = LayerId::parse_parent(&request.parent)?;
        let options = StorageOptions::parse(&request.storage_opt)?;
        driver.create_read_write(&id, parent.as_ref(), options).await?;
        done()
    })
    .await
}

async fn remove(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Remove", body, |request: LayerRequest, _| async move {
        driver.remove(&LayerId::parse(&request.id)?).await?;
        done()
    })
    .await
}

async fn get(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Get", body, |request: LayerRequest, call| async move {
        warn_of_label(&request.mount_label);
        let path = driver.get(&LayerId::parse(&request.id)?, call).await?;
        Ok(json!({ "Dir": path.to_string_lossy(), "Err": "" }))
    })
    .await
}

async fn put(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Put", body, |request: LayerRequest, call| async move {
        driver.put(&LayerId::parse(&request.id)?, call).await?;
        done()
    })
    .await
}

async fn exists(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Exists", body, |request: LayerRequest, _| async move {
        let exists = driver.worker().get(&LayerId::parse(&request.id)?.key()).is_some();
        Ok(json!({ "Exists": exists }))
    })
    .await
}

async fn status(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer(&driver.clone(), "Status", body, |_: Value| async move {
        Ok(json!({ "Status": driver.status().await }))
    })
    .await
}

async fn metadata(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "GetMetadata", body, |request: LayerRequest, _| async move {
        let pairs = driver.metadata(&LayerId::parse(&request.id)?).await?;
        let metadata: Map<String, Value> =
            pairs.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        Ok(json!({ "Metadata": metadata, "Err": "" }))
    })
    .await
}

/// dockerd stops: what is mounted stays, for containers may outlive it.
async fn cleanup(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer(&driver.clone(), "Cleanup", body, |_: Value| async move {
        driver.tidy().await;
        done()
    })
    .await
}

/// The one call whose answer is no JSON: a failure must have another status.
async fn diff(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    let started = Instant::now();
    let noted = driver.inner.notes.begin("Diff", body).await;
    let body = noted.body.clone();
    let work = async {
        if body.is_empty() {
            return Err(DockerError::Repeated { call: "Diff" });
        }
        let request: LayerRequest =
            serde_json::from_slice(&body).map_err(|source| DockerError::Request { source })?;
        let parent = LayerId::parse_parent(&request.parent)?;
        driver.diff(LayerId::parse(&request.id)?, parent).await
    };
    let elapsed_us = || started.elapsed().as_micros();
    let request = String::from_utf8_lossy(&body);
    let outcome = work.await;
    driver.count("Diff", started, outcome.is_err());
    match outcome {
        Ok(tar) => {
            tracing::debug!(call = "Diff", %request, elapsed_us = elapsed_us(), "begins");
            Response::new(tar)
        }
        Err(error) => {
            tracing::warn!(call = "Diff", %request, elapsed_us = elapsed_us(), %error, "failed");
            let value = json!({ "Err": error.to_string() });
            json_response(StatusCode::INTERNAL_SERVER_ERROR, &value)
        }
    }
}

async fn changes(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "Changes", body, |request: LayerRequest, _| async move {
        let id = LayerId::parse(&request.id)?;
        let parent = LayerId::parse_parent(&request.parent)?;
        let changes = driver.changes(id, parent).await?;
        Ok(json!({ "Changes": changes, "Err": "" }))
    })
    .await
}

/// A tar of any length comes as the body, its layer's name in the query.
async fn apply(State(driver): State<GraphDriver>, request: Request) -> Response {
    let started = Instant::now();
    let (head, body) = request.into_parts();
    let text = head.uri.query().unwrap_or_default().to_owned();
    let outcome = apply_query(&driver, &head.uri, body).await;
    reply(&driver, "ApplyDiff", &text, started, outcome)
}

async fn apply_query(driver: &GraphDriver, uri: &Uri, body: Body) -> Outcome {
    let query = Query::<ApplyQuery>::try_from_uri(uri).map(|query| query.0).unwrap_or_default();
    let id = LayerId::parse(&query.id)?;
    // Its parent is known since Create.
    LayerId::parse_parent(&query.parent)?;
    let size_bytes = driver.apply(id, body).await?;
    Ok(json!({ "Size": size_bytes, "Err": "" }))
}

async fn diff_size(State(driver): State<GraphDriver>, body: Bytes) -> Response {
    answer_noted(&driver.clone(), "DiffSize", body, |request: LayerRequest, _| async move {
        let size_bytes = driver.diff_size(&LayerId::parse(&request.id)?).await?;
        Ok(json!({ "Size": size_bytes, "Err": "" }))
    })
    .await
}

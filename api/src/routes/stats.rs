//! How the appliance is: figures, metrics, health, and the care of the store.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Method, header};
use parking_lot::Mutex;
use slackwater_blockstore::InodeId;

use crate::convert;
use crate::error::ProblemCode;
use crate::exposition;
use crate::extract::OptionalJsonBody;
use crate::failure::Failure;
use crate::openapi;
use crate::paths;
use crate::router::Mount;
use crate::state::Shared;
use crate::types::{CheckReport, CheckRequest, GcReport, Health, Stats};

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::GET, paths::STATS, stats)
        .at(Method::POST, paths::CHECK, check)
        .at(Method::POST, paths::GC, gc)
        .at(Method::GET, paths::METRICS, metrics)
        .at(Method::GET, paths::HEALTHZ, healthz)
        .at(Method::GET, paths::READYZ, readyz)
        .at(Method::GET, paths::OPENAPI, document)
}

/// Shows counts and sizes
#[utoipa::path(
    get, path = paths::STATS, tag = "appliance", operation_id = "getStats",
    responses((status = 200, description = "As of one moment", body = Stats)),
)]
pub(crate) async fn stats(State(state): State<Shared>) -> Result<Json<Stats>, Failure> {
    let export_path = state.options.export_path.clone();
    let read = move |store: &slackwater_blockstore::Store| {
        Ok(convert::stats(
            store.stats(),
            store.store_id(),
            &export_path,
            convert::timestamp(store.now()),
        ))
    };
    let stats = state.call(read).await?;
    Ok(Json(Stats { maintenance: state.maintenance.status(), ..stats }))
}

/// Verifies the store while it serves
///
/// A broken invariant is not an error of the call: see `clean` in the report. It can take hours; `maintenance` of
/// `GET /v1/stats` tells how far it is. It ends when its caller hangs up, unless the request has an idempotency key.
#[utoipa::path(
    post, path = paths::CHECK, tag = "appliance", operation_id = "check",
    request_body = CheckRequest,
    responses(
        (status = 200, description = "What was found", body = CheckReport),
        (status = 409, description = "A check or garbage collection is under way already"),
        (status = 422, description = "A value has no meaning"),
    ),
)]
pub(crate) async fn check(
    State(state): State<Shared>,
    OptionalJsonBody(request): OptionalJsonBody<CheckRequest>,
) -> Result<Json<CheckReport>, Failure> {
    let report = state
        .call_maintenance("check", move |store, progress| {
            store.check_watched(request.data, progress)
        })
        .await?;
    Ok(Json(CheckReport::from(report)))
}

/// Reclaims all space that can be reclaimed
///
/// The appliance does so by itself in the background; this call waits for it. It ends when its caller hangs up, unless
/// the request has an idempotency key; what was freed by then stays freed.
#[utoipa::path(
    post, path = paths::GC, tag = "appliance", operation_id = "collectGarbage",
    responses(
        (status = 200, description = "What was done", body = GcReport),
        (status = 409, description = "A check or garbage collection is under way already"),
    ),
)]
pub(crate) async fn gc(State(state): State<Shared>) -> Result<Json<GcReport>, Failure> {
    let report = state.call_maintenance("gc", |store, progress| store.gc_watched(progress)).await?;
    Ok(Json(convert::gc_report(report)))
}

/// Shows metrics for Prometheus
///
/// In OpenMetrics' format where `Accept` names it, else in Prometheus' text format 0.0.4.
#[utoipa::path(
    get, path = paths::METRICS, tag = "appliance", operation_id = "getMetrics",
    responses((status = 200, description = "The metrics", content(
        (String = "text/plain"),
        (String = "application/openmetrics-text"),
    ))),
)]
pub(crate) async fn metrics(
    State(state): State<Shared>,
    headers: HeaderMap,
) -> ([(HeaderName, &'static str); 2], String) {
    answer(state.api_metrics.render_after(&state.metrics.render()), &headers)
}

/// A page in the format that the caller asks for.
fn answer(page: String, headers: &HeaderMap) -> ([(HeaderName, &'static str); 2], String) {
    // Lists in several lines are one list (RFC 9110 section 5.3).
    let accept: Vec<_> =
        headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let (media_type, page) = exposition::answer(page, Some(&accept.join(",")));
    ([(header::CONTENT_TYPE, media_type), (header::VARY, "accept")], page)
}

/// How long a page stands that asks for no token: the numbers are gathered under locks that calls need, and nothing
/// bounds how often a program asks.
const OPEN_PAGE_AGE_MAX: Duration = Duration::from_secs(1);

/// The page of metrics that all may read who reach it.
#[derive(Debug)]
pub(crate) struct OpenPage {
    state: Shared,
    /// The last one, and when it was made.
    last: Mutex<Option<(Instant, String)>>,
}

impl OpenPage {
    pub(crate) fn new(state: Shared) -> Self {
        Self { state, last: Mutex::default() }
    }

    fn text(&self) -> String {
        let mut last = self.last.lock();
        match &*last {
            Some((made, text)) if made.elapsed() < OPEN_PAGE_AGE_MAX => text.clone(),
            _ => {
                let text = self.state.api_metrics.render_after(&self.state.metrics.render());
                *last = Some((Instant::now(), text.clone()));
                text
            }
        }
    }
}

/// The same as [`metrics`], made at most once a second.
pub(crate) async fn open_metrics(
    State(page): State<Arc<OpenPage>>,
    headers: HeaderMap,
) -> ([(HeaderName, &'static str); 2], String) {
    answer(page.text(), &headers)
}

/// Tells that the process is up
#[utoipa::path(
    get, path = paths::HEALTHZ, tag = "appliance", operation_id = "getHealth",
    responses((status = 200, description = "It is", body = Health)),
)]
pub(crate) async fn healthz() -> Json<Health> {
    Json(Health { status: "ok".to_owned() })
}

/// Tells whether the store serves reads and writes
#[utoipa::path(
    get, path = paths::READYZ, tag = "appliance", operation_id = "getReadiness",
    responses((status = 200, description = "It does", body = Health)),
)]
pub(crate) async fn readyz(State(state): State<Shared>) -> Result<Json<Health>, Failure> {
    let probe = |store: &slackwater_blockstore::Store| {
        store.attributes(InodeId::ROOT)?;
        Ok(store.stats().poisoned)
    };
    if state.call(probe).await? {
        return Err(Failure::new(
            ProblemCode::Poisoned,
            "a sync failed: writes are refused until the server is restarted on a sound disk",
        ));
    }
    Ok(Json(Health { status: "ok".to_owned() }))
}

/// Gives this document
#[utoipa::path(
    get, path = paths::OPENAPI, tag = "appliance", operation_id = "getOpenApi",
    responses((status = 200, description = "OpenAPI 3.1", body = Object)),
)]
pub(crate) async fn document(
    State(state): State<Shared>,
) -> ([(HeaderName, &'static str); 1], Cow<'static, str>) {
    let document = openapi::document_text(state.options.vmstore.is_some());
    ([(header::CONTENT_TYPE, "application/json")], Cow::Borrowed(document))
}

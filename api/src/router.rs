//! Puts the routes together and wraps them.
//!
//! ```text
//! request -> observe -> admit -> limit_time -> authorize -> replay -> record -> handler
//!            counts,    503 when  504 when      401, 403     idempotency  audit
//!            renders    too many  too long                   keys         log
//!            failures
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::handler::Handler;
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, get, on};
use slackwater_blockstore::Store;
use tokio::sync::OwnedSemaphorePermit;

use crate::audit::record;
use crate::error::ProblemCode;
use crate::extract::BodyShare;
use crate::failure::Failure;
use crate::metrics::MetricsSource;
use crate::options::ApiOptions;
use crate::paths;
use crate::publishing;
use crate::routes::{self, vmstore};
use crate::state::{ApiState, Shared};
use crate::{auth, dashboard, idempotency};

/// Routes that are being mounted, with a list of them, so that a test can hold the OpenAPI
/// document against what is really there.
#[derive(Debug, Default)]
pub(crate) struct Mount {
    pub(crate) router: Router<Shared>,
    pub(crate) mounted: Vec<(Method, &'static str)>,
}

impl Mount {
    /// Mounts a handler.
    pub(crate) fn at<H, T>(mut self, method: Method, template: &'static str, handler: H) -> Self
    where
        H: Handler<T, Shared>,
        T: 'static,
    {
        // Every method that is mounted here is one of the well-known ones.
        let filter = MethodFilter::try_from(method.clone()).unwrap_or(MethodFilter::GET);
        self.router = self.router.route(template, on(filter, handler));
        self.mounted.push((method, template));
        self
    }
}

/// All routes, those of the VMstore face only where it is on.
pub(crate) fn mount(with_vmstore: bool) -> Mount {
    let mount = Mount::default().at(Method::GET, paths::DASHBOARD, dashboard::page);
    let mount = routes::stats::mount(mount);
    let mount = routes::files::mount(mount);
    let mount = routes::data::mount(mount);
    let mount = routes::map::mount(mount);
    let mount = routes::reclaimable::mount(mount);
    let mount = routes::snapshots::mount(mount);
    let mount = routes::chains::mount(mount);
    let mount = routes::clones::mount(mount);
    let mount = routes::workers::mount(mount);
    let mount = routes::audit::mount(mount);
    if with_vmstore { vmstore::mount(mount) } else { mount }
}

/// The REST face of `store`.
pub fn router(store: Arc<Store>, options: ApiOptions, metrics: Arc<dyn MetricsSource>) -> Router {
    rest(ApiState::new(store, options, metrics))
}

/// The REST face of `store`, and its page of metrics alone, for a listener of its own: that asks for no token.
pub fn router_and_metrics(
    store: Arc<Store>,
    options: ApiOptions,
    metrics: Arc<dyn MetricsSource>,
) -> (Router, Router) {
    let state = ApiState::new(store, options, metrics);
    let page = Router::new()
        .route(paths::METRICS, get(routes::stats::open_metrics))
        .fallback(only_metrics)
        .with_state(Arc::new(routes::stats::OpenPage::new(Arc::clone(&state))));
    (rest(state), page)
}

fn rest(state: Shared) -> Router {
    if let Some(age_max) = state.options.published_age_max {
        publishing::age::start(&state, age_max);
    }
    mount(state.options.vmstore.is_some())
        .router
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&state), record::record))
        .layer(from_fn_with_state(Arc::clone(&state), idempotency::replay))
        .layer(from_fn_with_state(Arc::clone(&state), auth::authorize))
        .layer(from_fn_with_state(Arc::clone(&state), limit_time))
        .layer(from_fn_with_state(Arc::clone(&state), admit))
        .layer(from_fn_with_state(Arc::clone(&state), observe))
        .with_state(state)
}

/// What the address of the metrics says of all else.
async fn only_metrics() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "GET /metrics is all that is here\n")
}

async fn unknown_route(request: Request) -> Failure {
    let path = request.uri().path();
    let mut detail = String::from("GET /openapi.json lists the routes");
    if path.starts_with(paths::FILES) {
        detail.push_str("; slashes inside a file's path are written as %2F");
    }
    Failure::new(ProblemCode::UnknownRoute, detail)
}

async fn method_not_allowed(request: Request) -> Failure {
    let detail = format!("method {} is not known here, see the header Allow", request.method());
    Failure::new(ProblemCode::MethodNotAllowed, detail)
}

/// Counts the answer and gives failures the form that the caller's face has.
async fn observe(State(state): State<Shared>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let template = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    if let Some(failure) = response.extensions_mut().remove::<Failure>() {
        let allow = response.headers_mut().remove(header::ALLOW);
        response = if path.starts_with(vmstore::PREFIX) && state.options.vmstore.is_some() {
            vmstore::render(&failure)
        } else {
            failure.render(Some(&path))
        };
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
        tracing::debug!(%method, path, code = %failure.code(), detail = failure.detail(), "refused");
    }
    let route = template.as_ref().map_or("unmatched", MatchedPath::as_str);
    state.api_metrics.count(&method, route, response.status(), started.elapsed());
    response
}

/// A request's place among those under way; an extension of the request, for what goes on though its
/// caller has gone.
#[derive(Clone, Debug)]
pub(crate) struct Place(
    #[expect(dead_code, reason = "held, not looked at")] Arc<OwnedSemaphorePermit>,
);

/// Refuses a request at once when too many are under way, rather than let all become late.
async fn admit(State(state): State<Shared>, mut request: Request, next: Next) -> Response {
    let Ok(permit) = Arc::clone(&state.requests).try_acquire_owned() else {
        let detail = format!("{} requests are under way", state.options.requests_max);
        return Failure::new(ProblemCode::Overloaded, detail).into_response();
    };
    // Held here until the answer is there; what reads the body takes it.
    let (share, place) = (BodyShare::default(), Place(Arc::new(permit)));
    request.extensions_mut().insert(share.clone());
    request.extensions_mut().insert(place.clone());
    let response = next.run(request).await;
    drop((share, place));
    response
}

/// Ends the wait for a call that takes too long.
async fn limit_time(State(state): State<Shared>, request: Request, next: Next) -> Response {
    let template = request.extensions().get::<MatchedPath>().cloned();
    let template = template.as_ref().map_or("", MatchedPath::as_str);
    let Some(limit) = time_limit(&state.options, request.method(), template) else {
        return next.run(request).await;
    };
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail = format!(
                "no answer within {} s; what was asked for may still be carried out",
                limit.as_secs()
            );
            Failure::new(ProblemCode::Timeout, detail).into_response()
        }
    }
}

/// The longest time of a call; `None` where progress is watched instead.
fn time_limit(options: &ApiOptions, method: &Method, template: &str) -> Option<Duration> {
    match template {
        // By itself.
        paths::CHECK | paths::GC => None,
        paths::FILE_DATA if *method == Method::PUT => None,
        _ => Some(options.request_timeout),
    }
}

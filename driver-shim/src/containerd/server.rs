//! The gRPC face of both services: which path is which call, and how much is taken in.

use std::convert::Infallible;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use futures_util::stream;
use hyper::{Request, Response};
use prost::Message;
use tokio::net::UnixListener;
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use super::diff::{Caller, DIFF_SERVICE, Differ};
use super::error::{CallError, ServeError};
use super::namespaces::Namespaces;
use super::snapshotter::Snapshotter;
use crate::metrics::Metrics;
use crate::worker::{Engine, Worker};

/// The name of the service, the first part of each path.
pub const SERVICE: &str = "containerd.services.snapshots.v1.Snapshots";

/// Largest request: two names and all labels at their largest are a little more than 1 MiB.
const REQUEST_BYTES_MAX: usize = 2 << 20;

/// Calls of one connection that are carried out at once; more wait. containerd has one
/// connection, and each call may wait for a mount.
const CALLS_MAX: usize = 128;

/// What containerd's plugin is told.
#[derive(Clone, Debug)]
pub struct ContainerdOptions {
    /// Where containerd itself listens.
    pub api: PathBuf,
    /// Where layers that the appliance has are not even fetched.
    pub without_blobs: Namespaces,
}

/// Serves the snapshotter on a socket until `stop` completes; then takes no more calls and
/// returns when those in flight are answered. What is mounted stays mounted.
///
/// # Errors
/// [`ServeError`] when the socket fails.
pub async fn serve(
    worker: Worker,
    options: ContainerdOptions,
    listener: UnixListener,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let differ = Differ::new(worker.clone(), options.api);
    let snapshotter = Snapshotter::new(worker, options.without_blobs);
    snapshotter.forget_unfinished().await;
    let services = Arc::new((snapshotter, differ));
    let service = tower::service_fn(move |request: Request<Body>| {
        let services = Arc::clone(&services);
        async move {
            let (snapshotter, differ) = &*services;
            Ok::<_, Infallible>(route(snapshotter, differ, request).await)
        }
    });
    let accept = move |context: &mut std::task::Context<'_>| {
        listener.poll_accept(context).map(|accepted| Some(accepted.map(|(stream, _)| stream)))
    };
    let mut server = Server::builder().concurrency_limit_per_connection(CALLS_MAX);
    server = server.max_concurrent_streams(u32::try_from(2 * CALLS_MAX).ok());
    server.serve_with_incoming_shutdown(service, stream::poll_fn(accept), stop).await?;
    Ok(())
}

async fn route(
    snapshotter: &Snapshotter,
    differ: &Differ,
    request: Request<Body>,
) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let worker = snapshotter.worker();
    let call_of = |service| path.strip_prefix('/').and_then(|path| path.strip_prefix(service));
    match call_of(DIFF_SERVICE) {
        Some("/Diff") => {
            return of_caller(worker, "Diff", request, |caller, body| differ.diff(caller, body))
                .await;
        }
        Some("/Apply") => {
            return of_caller(worker, "Apply", request, |caller, body| differ.apply(caller, body))
                .await;
        }
        Some(_) => {
            return Status::unimplemented(format!("`{path}` is no call of {DIFF_SERVICE}"))
                .into_http();
        }
        None => {}
    }
    match call_of(SERVICE) {
        Some("/Prepare") => {
            unary(worker, "Prepare", request, |body| snapshotter.prepare(body)).await
        }
        Some("/View") => unary(worker, "View", request, |body| snapshotter.view(body)).await,
        Some("/Mounts") => unary(worker, "Mounts", request, |body| snapshotter.mounts(body)).await,
        Some("/Commit") => unary(worker, "Commit", request, |body| snapshotter.commit(body)).await,
        Some("/Remove") => unary(worker, "Remove", request, |body| snapshotter.remove(body)).await,
        Some("/Stat") => unary(worker, "Stat", request, |body| snapshotter.stat(body)).await,
        Some("/Update") => unary(worker, "Update", request, |body| snapshotter.update(body)).await,
        Some("/List") => list(snapshotter, request).await,
        Some("/Usage") => unary(worker, "Usage", request, |body| snapshotter.usage(body)).await,
        Some("/Cleanup") => {
            unary(worker, "Cleanup", request, |body| snapshotter.cleanup(body)).await
        }
        _ => Status::unimplemented(format!("`{path}` is no call of {SERVICE}")).into_http(),
    }
}

/// One request, one answer.
async fn unary<Question, Answer, Call, Pending>(
    worker: &Worker,
    name: &'static str,
    request: Request<Body>,
    call: Call,
) -> Response<Body>
where
    Question: Message + Default + 'static,
    Answer: Message + Default + 'static,
    Call: Fn(Question) -> Pending,
    Pending: Future<Output = Result<Answer, CallError>>,
{
    let service = tower::service_fn(|request: tonic::Request<Question>| {
        let began = Instant::now();
        let pending = call(request.into_inner());
        async move {
            let outcome = with_reason(worker, pending.await).await;
            logged(worker.metrics(), name, began, outcome).map(tonic::Response::new)
        }
    });
    let codec = ProstCodec::<Answer, Question>::default();
    Grpc::new(codec).max_decoding_message_size(REQUEST_BYTES_MAX).unary(service, request).await
}

/// One request, one answer, where it matters who calls.
async fn of_caller<Question, Answer, Call, Pending>(
    worker: &Worker,
    name: &'static str,
    request: Request<Body>,
    call: Call,
) -> Response<Body>
where
    Question: Message + Default + 'static,
    Answer: Message + Default + 'static,
    Call: Fn(Caller, Question) -> Pending,
    Pending: Future<Output = Result<Answer, CallError>>,
{
    let service = tower::service_fn(|request: tonic::Request<Question>| {
        let began = Instant::now();
        let text = |key: &str| {
            request.metadata().get(key).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let namespace = text("containerd-namespace").unwrap_or_default();
        let caller = Caller { namespace, lease: text("containerd-lease") };
        let pending = call(caller, request.into_inner());
        async move {
            let outcome = with_reason(worker, pending.await).await;
            logged(worker.metrics(), name, began, outcome).map(tonic::Response::new)
        }
    });
    let codec = ProstCodec::<Answer, Question>::default();
    Grpc::new(codec).max_decoding_message_size(REQUEST_BYTES_MAX).unary(service, request).await
}

/// List: one request, a stream of answers.
async fn list(snapshotter: &Snapshotter, request: Request<Body>) -> Response<Body> {
    let service = tower::service_fn(|request: tonic::Request<_>| {
        let began = Instant::now();
        let listed = logged(
            snapshotter.worker().metrics(),
            "List",
            began,
            snapshotter.list(request.get_ref()),
        );
        std::future::ready(listed.map(|parts| {
            tonic::Response::new(stream::iter(parts.into_iter().map(Ok::<_, Status>)))
        }))
    });
    let mut grpc = Grpc::new(ProstCodec::default()).max_decoding_message_size(REQUEST_BYTES_MAX);
    grpc.server_streaming(service, request).await
}

/// A file system whose disk takes no more says so in many ways: what the appliance says counts, if that is the reason.
async fn with_reason<T>(worker: &Worker, outcome: Result<T, CallError>) -> Result<T, CallError> {
    match outcome {
        Err(error) if error.is_of_disk() => {
            let reason = worker.reason_of_appliance(&error.to_string()).await;
            Err(reason.map_or(error, CallError::Worker))
        }
        other => other,
    }
}

fn logged<T>(
    metrics: &Metrics,
    call: &'static str,
    began: Instant,
    result: Result<T, CallError>,
) -> Result<T, Status> {
    let elapsed_ms = began.elapsed().as_millis();
    let is_failure = |error: &CallError| matches!(error.code(), Code::Internal | Code::Unavailable);
    let has_failed = result.as_ref().err().is_some_and(is_failure);
    metrics.count(Engine::Containerd, call, began.elapsed(), has_failed);
    match result {
        Ok(answer) => {
            tracing::debug!(call, elapsed_ms, "containerd was answered");
            Ok(answer)
        }
        Err(error) => {
            if has_failed {
                tracing::warn!(call, elapsed_ms, %error, "a call of containerd failed");
            } else {
                let code = error.code();
                tracing::debug!(call, elapsed_ms, ?code, %error, "containerd was refused");
            }
            Err(error.into())
        }
    }
}

//! A store that is full, closed, poisoned, damaged or slow.

use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Method, Request, header};
use futures_util::FutureExt;
use serde_json::json;
use slackwater_api::ApiOptions;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{CheckReport, Stats};
use slackwater_blockstore::disk::{Fault, FileName, FileRole, MemoryDisk};
use slackwater_blockstore::{SegmentId, Store};
use tower::ServiceExt;

use crate::harness::{Face, memory_store, noise};

#[tokio::test]
async fn a_closed_store_is_unavailable_and_the_process_is_up() {
    let face = Face::new();
    face.make_file("a", 1).await;
    face.store.close().unwrap();
    let answer = face.post("/v1/files", json!({"path": "b", "size_bytes": 1})).await;
    assert_eq!(answer.header(header::RETRY_AFTER), "1");
    answer.problem(ProblemCode::Closed);
    face.get("/healthz").await.expect(200);
    face.get("/metrics").await.expect(200);
}

#[tokio::test]
async fn after_a_failed_sync_reads_go_on_and_writes_are_refused() {
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |options| options.background = false);
    let face = Face::over(store, disk, ApiOptions::default());
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", noise(1, 8192)).await.expect(200);
    face.disk.inject(Fault::Sync(0));
    let failed = face.put("/v1/files/a/data", noise(2, 4096)).await;
    assert!(failed.status >= 500, "{failed:?}");
    let refused = face.post("/v1/files", json!({"path": "b", "size_bytes": 1})).await;
    refused.problem(ProblemCode::Poisoned);
    face.get("/readyz").await.problem(ProblemCode::Poisoned);
    assert!(face.get("/v1/stats").await.parse::<Stats>().poisoned);
    assert_eq!(face.get("/v1/files/a/data").await.expect(200).body.len(), 8192);
}

#[tokio::test]
async fn a_full_store_says_so_and_deletes_still_work() {
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |options| {
        options.capacity_bytes = Some(96 << 20);
        options.segment_bytes = 4 << 20;
    });
    let face = Face::over(store, disk, ApiOptions::default());
    face.make_file("a", 0).await;
    let mut answer = None;
    for number in 0..64 {
        let uri = format!("/v1/files/a/data?offset={}", number * (4 << 20));
        let put = face.put(&uri, noise(number + 1, 4 << 20)).await;
        if put.status != 200 {
            answer = Some(put);
            break;
        }
    }
    answer.expect("the store became full").problem(ProblemCode::NoSpace);
    face.get("/v1/files/a").await.expect(200);
    face.delete("/v1/files/a").await.expect(204);
}

#[tokio::test]
async fn damage_is_an_error_and_never_bytes() {
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |options| options.background = false);
    let face = Face::over(store, disk, ApiOptions::default());
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", noise(1, 1 << 20)).await.expect(200);
    // Somewhere in the middle of the megabyte, in whatever file it is.
    for number in 0..8 {
        let name = FileName { role: FileRole::Log, number: SegmentId::new(number) };
        face.disk.flip_bit(name, 500_000);
    }
    let request = Request::get("/v1/files/a/data").body(Body::empty()).unwrap();
    let response = face.router.clone().oneshot(request).await.unwrap();
    // What is in the cache may still be right; what is read from the disk is not given.
    if let Ok(bytes) = to_bytes(response.into_body(), usize::MAX).await {
        assert!(bytes == noise(1, 1 << 20), "damaged bytes were given");
    }
    let checked = face.post("/v1/check", json!({"data": true})).await.expect(200);
    let checked: CheckReport = checked.parse();
    assert!(!checked.clean && !checked.problems.is_empty(), "{checked:?}");
}

#[tokio::test]
async fn a_call_that_takes_too_long_is_ended() {
    // No turn ever comes, and the wait for one would be long.
    let options = ApiOptions {
        store_calls_max: 0,
        queue_timeout: Duration::from_secs(3600),
        request_timeout: Duration::from_millis(20),
        ..ApiOptions::default()
    };
    Face::with(options).get("/v1/stats").await.problem(ProblemCode::Timeout);
}

/// It waits for a thread here; a part of a block waits so for a flush of its file. Its client sends it
/// again, and something newer then.
#[test]
fn what_took_too_long_is_not_written_later() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        // What comes before the wait is done by then, also by a busy machine.
        let request_timeout = Duration::from_secs(2);
        let face = Face::with(ApiOptions { request_timeout, ..ApiOptions::default() });
        face.make_file("a", 5).await;
        let (release, held) = std::sync::mpsc::channel::<()>();
        // By now the file was looked up.
        let body = futures_util::stream::once(async move {
            drop(tokio::task::spawn_blocking(move || held.recv()));
            Ok::<_, std::io::Error>(Bytes::from_static(b"late"))
        });
        let late = face.put("/v1/files/a/data", Body::from_stream(body)).await;
        late.problem(ProblemCode::Timeout);
        release.send(()).unwrap();
        // Behind what waits.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        let answer = face.get("/v1/files/a/data").await.expect(200);
        assert_eq!(answer.body[..], [0; 5]);
    });
}

#[tokio::test]
async fn a_body_that_stops_coming_is_told_from_a_slow_call() {
    let options = ApiOptions { body_timeout: Duration::from_millis(20), ..ApiOptions::default() };
    let face = Face::with(options);
    let stuck = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
    let request = Request::post("/v1/files").header(header::CONTENT_TYPE, "application/json");
    let answer = face.send(request.body(Body::from_stream(stuck)).unwrap()).await;
    answer.problem(ProblemCode::RequestTimeout);
}

#[tokio::test]
async fn bodies_under_way_share_their_memory() {
    let options = ApiOptions {
        body_bytes_max: 1000,
        bodies_bytes_max: 1000,
        queue_timeout: Duration::from_millis(20),
        ..ApiOptions::default()
    };
    let face = Face::with(options);
    let post = |body: Body| {
        let request = Request::post("/v1/files").header(header::CONTENT_TYPE, "application/json");
        face.send(request.body(body).unwrap())
    };
    let small = || Body::from(r#"{"path": "a", "size_bytes": 1}"#);
    let stuck = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
    let mut slow = Box::pin(post(Body::from_stream(stuck)));
    // It may become as long as any.
    assert!((&mut slow).now_or_never().is_none());
    post(small()).await.problem(ProblemCode::Overloaded);
    drop(slow);
    // Once with a key, which has the body read twice.
    let request = Request::post("/v1/files")
        .header(header::CONTENT_TYPE, "application/json")
        .header("idempotency-key", "k");
    let long = format!("{}{}", r#"{"path": "b", "size_bytes": 1}"#, " ".repeat(900));
    face.send(request.body(Body::from(long)).unwrap()).await.expect(201);
    post(small()).await.expect(201);
}

#[tokio::test]
async fn too_many_requests_are_refused_at_once() {
    let options = ApiOptions { requests_max: 0, ..ApiOptions::default() };
    let answer = Face::with(options).router;
    let request = Request::get("/v1/stats").body(Body::empty()).unwrap();
    let response = answer.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()[header::RETRY_AFTER], "1");
}

#[tokio::test]
async fn a_queue_that_does_not_move_is_told() {
    let options = ApiOptions {
        store_calls_max: 0,
        data_streams_max: 0,
        queue_timeout: Duration::from_millis(20),
        ..ApiOptions::default()
    };
    let face = Face::with(options);
    face.get("/v1/stats").await.problem(ProblemCode::Overloaded);
    // What needs no store answers all the same.
    face.get("/healthz").await.expect(200);
    face.get("/metrics").await.expect(200);
}

#[tokio::test]
async fn transfers_of_data_have_their_own_queue() {
    let options = ApiOptions {
        data_streams_max: 0,
        queue_timeout: Duration::from_millis(20),
        ..ApiOptions::default()
    };
    let face = Face::with(options);
    face.make_file("a", 10).await;
    face.get("/v1/files/a/data").await.problem(ProblemCode::Overloaded);
    face.put("/v1/files/a/data", "x").await.problem(ProblemCode::Overloaded);
    face.get("/v1/files/a").await.expect(200);
    let head = face.call(Method::HEAD, "/v1/files/a/data", &[], None).await.expect(200);
    assert_eq!(head.header(header::CONTENT_LENGTH), "10");
}

/// The router keeps the store alive no longer than itself.
#[tokio::test]
async fn the_store_is_let_go() {
    let face = Face::new();
    let store: std::sync::Weak<Store> = std::sync::Arc::downgrade(&face.store);
    drop(face);
    assert!(store.upgrade().is_none());
}

/// A request with a key is carried out though its caller has gone: it counts until it ends.
#[tokio::test]
async fn what_goes_on_without_its_caller_keeps_its_place() {
    let options = ApiOptions {
        // No turn ever comes.
        store_calls_max: 0,
        queue_timeout: Duration::from_secs(3600),
        // Long enough to begin the one with a key.
        request_timeout: Duration::from_millis(500),
        requests_max: 1,
        ..ApiOptions::default()
    };
    let router = Face::with(options).router;
    for (key, status) in [(None, 504), (None, 504), (Some("a"), 504), (Some("b"), 503)] {
        let mut request =
            Request::post("/v1/files").header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let request = request.body(Body::from(r#"{"path":"a","size_bytes":1}"#)).unwrap();
        assert_eq!(router.clone().oneshot(request).await.unwrap().status(), status, "{key:?}");
    }
}

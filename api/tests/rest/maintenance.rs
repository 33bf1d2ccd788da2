//! Checks and garbage collections: seen by others, one at a time, ended when their callers leave.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, header};
use serde_json::json;
use slackwater_api::ApiOptions;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{CheckReport, GcReport, Maintenance, Stats};
use slackwater_blockstore::disk::MemoryDisk;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt;

use crate::harness::{Face, memory_store, noise};

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// A read of the slow disk: with these a check of [`CHUNKS`] takes more than an hour, and is ended within a few of them.
const READ_TIME: Duration = Duration::from_secs(1);

const CHUNKS: usize = 4096;

/// A store that takes long to check.
async fn slow(options: ApiOptions) -> Face {
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |options| {
        options.background = false;
        // Each is read by itself then.
        options.segment_bytes = 64 << 10;
    });
    let face = Face::over(store, disk, options);
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", noise(1, CHUNKS * 4096)).await.expect(200);
    face.disk.slow_down_reads(READ_TIME);
    face
}

async fn under_way(face: &Face) -> Option<Maintenance> {
    face.get("/v1/stats").await.expect(200).parse::<Stats>().maintenance
}

/// Waits for what is under way to be what is wanted.
async fn until(face: &Face, is_wanted: impl Fn(Option<&Maintenance>) -> bool) {
    let wait = async {
        while !is_wanted(under_way(face).await.as_ref()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("it comes to that");
}

fn is_in_chunks(work: Option<&Maintenance>) -> bool {
    work.is_some_and(|work| work.part == "chunks" && work.total.is_some())
}

/// After one that was ended another can begin, and does what it should.
async fn care_works(face: &Face) {
    face.disk.slow_down_reads(Duration::ZERO);
    let report: CheckReport = face.post("/v1/check", json!({})).await.expect(200).parse();
    assert!(report.clean, "{report:?}");
    let report: GcReport = face.post("/v1/gc", json!({})).await.expect(200).parse();
    assert!(report.used_bytes_before > 0 && report.used_bytes > 0, "{report:?}");
    assert_eq!(under_way(face).await, None);
}

#[tokio::test]
async fn a_check_is_seen_and_ends_with_its_caller() {
    let face = slow(ApiOptions::default()).await;
    let check = Request::post("/v1/check").header(header::CONTENT_TYPE, "application/json");
    let check = check.body(Body::from(r#"{"data": true}"#)).unwrap();
    let caller = tokio::spawn(face.router.clone().oneshot(check));
    until(&face, is_in_chunks).await;
    let work = under_way(&face).await.unwrap();
    assert_eq!(work.call, "check");
    assert!(work.total.unwrap() >= u64::try_from(CHUNKS).unwrap(), "{work:?}");
    let refused = face.call(Method::POST, "/v1/gc", &[], None).await.problem(ProblemCode::Busy);
    assert!(refused.detail.contains("a check is under way since"), "{refused:?}");
    caller.abort();
    until(&face, |work| work.is_none()).await;
    care_works(&face).await;
}

/// Also one of a caller who would wait longer.
#[tokio::test]
async fn a_check_that_takes_too_long_is_ended() {
    let options = ApiOptions { maintenance_timeout: READ_TIME, ..ApiOptions::default() };
    let face = slow(options).await;
    let answer = face.post("/v1/check", json!({"data": true})).await;
    let ended = answer.problem(ProblemCode::Timeout);
    assert!(ended.detail.contains("was ended"), "{ended:?}");
    until(&face, |work| work.is_none()).await;
    care_works(&face).await;
}

/// The caller of a real connection, which it closes.
#[tokio::test]
async fn a_connection_that_is_closed_ends_its_check() {
    let face = slow(ApiOptions::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let server = tokio::spawn(slackwater_api::run(
        listener,
        face.router.clone(),
        None,
        std::future::pending(),
    ));
    let mut caller = TcpStream::connect(address).await.unwrap();
    let body = r#"{"data":true}"#;
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    caller.write_all(request.as_bytes()).await.unwrap();
    until(&face, is_in_chunks).await;
    drop(caller);
    until(&face, |work| work.is_none()).await;
    care_works(&face).await;
    server.abort();
}

/// With a key the request is carried out though its caller left, so that the caller finds the answer later.
#[tokio::test]
async fn with_an_idempotency_key_it_goes_on() {
    let face = slow(ApiOptions::default()).await;
    let check = Request::post("/v1/check")
        .header(header::CONTENT_TYPE, "application/json")
        .header("idempotency-key", "one");
    let check = check.body(Body::from(r#"{"data":true}"#)).unwrap();
    let caller = tokio::spawn(face.router.clone().oneshot(check));
    until(&face, is_in_chunks).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    // Longer than the end of one takes that was cancelled.
    tokio::time::sleep(3 * READ_TIME).await;
    assert!(is_in_chunks(under_way(&face).await.as_ref()));
    face.disk.slow_down_reads(Duration::ZERO);
    until(&face, |work| work.is_none()).await;
    let headers = [("idempotency-key", "one")];
    let answer = face.call(Method::POST, "/v1/check", &headers, Some(json!({"data": true}))).await;
    let report: CheckReport = answer.expect(200).parse();
    assert!(report.clean && report.data_bytes > 0, "{report:?}");
}

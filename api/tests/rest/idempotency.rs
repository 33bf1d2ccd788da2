//! Idempotency keys.

use axum::http::{Method, header};
use futures_util::FutureExt;
use serde_json::json;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{Snapshot, SnapshotPage};
use slackwater_api::{ApiOptions, Role, Secret, Token, Tokens};

use crate::harness::{Answer, Face};

const KEY: &str = "idempotency-key";

async fn snapshot(face: &Face, key: &str, path: &str) -> Answer {
    let body = json!({"path": path});
    face.call(Method::POST, "/v1/snapshots", &[(KEY, key)], Some(body)).await
}

async fn count(face: &Face) -> usize {
    face.get("/v1/snapshots").await.parse::<SnapshotPage>().items.len()
}

#[tokio::test]
async fn a_repeated_request_gets_the_first_answer() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let first = snapshot(&face, "k1", "a").await.expect(201);
    assert_eq!(first.header("idempotency-replayed"), "");
    let again = snapshot(&face, "k1", "a").await.expect(201);
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(first.body, again.body);
    assert_eq!(first.header(header::LOCATION), again.header(header::LOCATION));
    assert_eq!(first.header(header::CONTENT_TYPE), again.header(header::CONTENT_TYPE));
    assert_eq!(count(&face).await, 1);
    let other = snapshot(&face, "k2", "a").await.expect(201);
    assert_ne!(other.parse::<Snapshot>().id, first.parse::<Snapshot>().id);
    assert_eq!(count(&face).await, 2);
}

#[tokio::test]
async fn a_long_answer_is_kept_too() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let labels: serde_json::Map<_, _> =
        (0..40).map(|number| (format!("label{number}"), json!("x".repeat(4000)))).collect();
    let body = json!({"path": "a", "labels": labels});
    let send = || face.call(Method::POST, "/v1/snapshots", &[(KEY, "k")], Some(body.clone()));
    let first = send().await.expect(201);
    assert!(first.body.len() > 64 << 10, "{} bytes", first.body.len());
    let again = send().await.expect(201);
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert!(first.body == again.body);
    assert_eq!(count(&face).await, 1);
}

#[tokio::test]
async fn a_key_belongs_to_one_request() {
    let face = Face::new();
    face.make_file("a", 1).await;
    face.make_file("b", 1).await;
    snapshot(&face, "k", "a").await.expect(201);
    snapshot(&face, "k", "b").await.problem(ProblemCode::IdempotencyKeyReused);
    let elsewhere =
        face.call(Method::POST, "/v1/files", &[(KEY, "k")], Some(json!({"path": "a"}))).await;
    elsewhere.problem(ProblemCode::IdempotencyKeyReused);
    assert_eq!(count(&face).await, 1);
}

#[tokio::test]
async fn a_failure_may_be_tried_again() {
    let face = Face::new();
    snapshot(&face, "k", "a").await.problem(ProblemCode::NotFound);
    face.make_file("a", 1).await;
    let answer = snapshot(&face, "k", "a").await.expect(201);
    assert_eq!(answer.header("idempotency-replayed"), "");
}

#[tokio::test]
async fn requests_at_once_are_carried_out_once() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let all = (0..20).map(|_| snapshot(&face, "k", "a"));
    let answers = futures_util::future::join_all(all).await;
    let first = answers[0].parse::<Snapshot>();
    let replayed =
        answers.iter().filter(|answer| !answer.header("idempotency-replayed").is_empty());
    assert_eq!(replayed.count(), 19);
    for answer in &answers {
        assert_eq!((answer.status, answer.parse::<Snapshot>().id), (201, first.id));
    }
    assert_eq!(count(&face).await, 1);
}

#[tokio::test]
async fn one_who_hung_up_finds_the_answer_of_the_first_call() {
    let face = Face::new();
    face.make_file("a", 1).await;
    // Polled once and dropped: what a connection that breaks does to its request.
    let first = snapshot(&face, "k", "a").now_or_never();
    assert!(first.is_none(), "the first call was under way");
    let second = snapshot(&face, "k", "a").await.expect(201);
    assert_eq!(second.header("idempotency-replayed"), "true");
    assert_eq!(count(&face).await, 1);
}

#[tokio::test]
async fn callers_do_not_share_keys() {
    let token =
        |name: &str| Token { name: name.to_owned(), role: Role::Worker, secret: Secret::new(name) };
    let tokens = Tokens::new(vec![token("one"), token("two")]).into();
    let face = Face::with(ApiOptions { tokens, ..ApiOptions::default() });
    let make = async |caller: &str, path: &str| {
        let headers = [("authorization", caller), (KEY, "k")];
        let body = json!({"path": path, "size_bytes": 1});
        face.call(Method::POST, "/v1/files", &headers, Some(body)).await
    };
    make("Bearer one", "a").await.expect(201);
    make("Bearer two", "b").await.expect(201);
    make("Bearer one", "b").await.problem(ProblemCode::IdempotencyKeyReused);
    make("Bearer three", "a").await.problem(ProblemCode::Unauthenticated);
}

#[tokio::test]
async fn a_key_has_a_length() {
    let face = Face::new();
    face.make_file("a", 1).await;
    snapshot(&face, "", "a").await.problem(ProblemCode::BadHeader);
    snapshot(&face, &"x".repeat(129), "a").await.problem(ProblemCode::BadHeader);
    snapshot(&face, &"x".repeat(128), "a").await.expect(201);
}

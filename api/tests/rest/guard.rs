//! What is refused before a handler sees it, and what needs no store: roles, malformed
//! requests, unknown routes, health, metrics, the document, the dashboard.

use std::collections::BTreeSet;

use axum::body::Body;
use axum::http::{Method, Request, header};
use serde_json::json;
use slackwater_api::ApiOptions;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{CheckReport, File, GcReport, Stats};

use crate::harness::{Face, noise, with_each_role};

fn with_tokens() -> Face {
    Face::with(with_each_role())
}

#[tokio::test]
async fn a_wrong_token_is_told_from_none() {
    let face = with_tokens();
    let none = face.get("/v1/files").await;
    assert_eq!(none.header(header::WWW_AUTHENTICATE), "Bearer");
    none.problem(ProblemCode::Unauthenticated);
    for wrong in ["Bearer nobody", "Bearer", "Basic Og==", "Bearer viewer-secret2"] {
        let answer = face.call(Method::GET, "/v1/files", &[("authorization", wrong)], None).await;
        let problem = answer.problem(ProblemCode::Unauthenticated);
        assert!(!problem.detail.contains("nobody"), "the secret is not repeated");
    }
}

#[tokio::test]
async fn malformed_bodies_are_told_apart() {
    let face = Face::new();
    let send = async |media_type: Option<&str>, body: &str| {
        let mut request = Request::post("/v1/files");
        if let Some(media_type) = media_type {
            request = request.header(header::CONTENT_TYPE, media_type);
        }
        face.send(request.body(Body::from(body.to_owned())).unwrap()).await
    };
    let json_type = Some("application/json");
    for bad in ["", "{", "{\"path\":", "not json", "\u{0}"] {
        send(json_type, bad).await.problem(ProblemCode::BadJson);
    }
    let values = [
        "{}",
        "[]",
        "null",
        r#"{"path":"a"}"#,
        r#"{"path":1,"size_bytes":1}"#,
        r#"{"path":"a","size_bytes":-1}"#,
        r#"{"path":"a","size_bytes":1.5}"#,
        r#"{"path":"a","size_bytes":18446744073709551616}"#,
        r#"{"path":"a","size_bytes":1,"extra":1}"#,
        r#"{"path":"a","path":"b","size_bytes":1}"#,
    ];
    for bad in values {
        send(json_type, bad).await.problem(ProblemCode::InvalidValue);
    }
    let good = r#"{"path":"a","size_bytes":1}"#;
    for bad in
        [None, Some("text/plain"), Some("application/jsonx"), Some("application/octet-stream")]
    {
        send(bad, good).await.problem(ProblemCode::UnsupportedMediaType);
    }
    send(Some("Application/JSON; charset=utf-8"), good).await.expect(201);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_announced_or_not() {
    let face = Face::with(ApiOptions { body_bytes_max: 1000, ..ApiOptions::default() });
    let large = json!({"path": "x".repeat(2000), "size_bytes": 1}).to_string();
    let announced = Request::post("/v1/files")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONTENT_LENGTH, large.len());
    let announced = announced.body(Body::from(large.clone())).unwrap();
    face.send(announced).await.problem(ProblemCode::BodyTooLarge);
    let pieces = large
        .into_bytes()
        .chunks(100)
        .map(|piece| Ok::<_, std::io::Error>(piece.to_vec()))
        .collect::<Vec<_>>();
    let streamed = Request::post("/v1/files").header(header::CONTENT_TYPE, "application/json");
    let streamed = streamed.body(Body::from_stream(futures_util::stream::iter(pieces))).unwrap();
    face.send(streamed).await.problem(ProblemCode::BodyTooLarge);
    // Data has no such limit.
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", noise(1, 5000)).await.expect(200);
}

#[tokio::test]
async fn unknown_routes_and_methods_are_problems() {
    let face = Face::new();
    for path in [
        "/v2/files",
        "/v1",
        "/v1/files/",
        "/v1/snapshots/x/y",
        "/favicon.ico",
        "/api/v310/snapshot",
    ] {
        face.get(path).await.problem(ProblemCode::UnknownRoute);
    }
    let problem = face.get("/v1/files/a/b/c").await.problem(ProblemCode::UnknownRoute);
    assert!(problem.detail.contains("%2F"), "{}", problem.detail);
    assert_eq!(problem.instance.as_deref(), Some("/v1/files/a/b/c"));
    let answer = face.call(Method::PUT, "/v1/files", &[], None).await;
    let allowed: BTreeSet<&str> = answer.header(header::ALLOW).split(',').map(str::trim).collect();
    assert_eq!(allowed, BTreeSet::from(["GET", "HEAD", "POST"]));
    answer.problem(ProblemCode::MethodNotAllowed);
    let made_up = Method::from_bytes(b"BREW").unwrap();
    face.call(made_up, "/v1/gc", &[], None).await.problem(ProblemCode::MethodNotAllowed);
}

#[tokio::test]
async fn figures_and_care_answer() {
    let face = Face::new();
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", noise(1, 40_960)).await.expect(200);
    face.take_snapshot("a").await;
    let stats: Stats = face.get("/v1/stats").await.expect(200).parse();
    assert_eq!((stats.file_count, stats.snapshot_count, stats.chunk_count), (1, 1, 10));
    assert_eq!((stats.export_path.as_str(), stats.poisoned), ("/slackwater", false));
    assert_eq!(stats.store_id, face.store.store_id().to_string());
    let file: File = face.get("/v1/files/a").await.expect(200).parse();
    assert!(stats.now.unwrap() >= file.modified_at, "by the clock that dates files");

    let checked: CheckReport =
        face.post("/v1/check", json!({"data": true})).await.expect(200).parse();
    assert!(checked.clean && checked.data_bytes > 0, "{checked:?}");
    let quick = face.call(Method::POST, "/v1/check", &[], None).await.expect(200);
    assert_eq!(quick.parse::<CheckReport>().data_bytes, 0);
    face.post("/v1/check", json!({"dta": true})).await.problem(ProblemCode::InvalidValue);
    face.call(Method::POST, "/v1/gc", &[], None).await.expect(200).parse::<GcReport>();
}

#[tokio::test]
async fn health_and_metrics_answer() {
    let face = Face::new();
    assert_eq!(face.get("/healthz").await.expect(200).json(), json!({"status": "ok"}));
    assert_eq!(face.get("/readyz").await.expect(200).json(), json!({"status": "ok"}));
    face.get("/v1/files/gone").await.expect(404);
    let metrics = face.get("/metrics").await.expect(200);
    assert_eq!(metrics.header(header::CONTENT_TYPE), "text/plain; version=0.0.4; charset=utf-8");
    let text = std::str::from_utf8(&metrics.body).unwrap();
    assert!(text.contains("# TYPE slackwater_api_requests_total counter\n"), "{text}");
    let accept = [("accept", "text/plain;q=0.3"), ("accept", "application/openmetrics-text;q=0.5")];
    let metrics = face.call(Method::GET, "/metrics", &accept, None).await.expect(200);
    assert!(metrics.header(header::CONTENT_TYPE).starts_with("application/openmetrics-text"));
    let openmetrics = std::str::from_utf8(&metrics.body).unwrap();
    assert!(openmetrics.contains("# TYPE slackwater_api_requests counter\n"), "{openmetrics}");
    let is_ended = openmetrics.ends_with("# EOF\n") && openmetrics.matches("# EOF").count() == 1;
    assert!(is_ended, "{openmetrics}");
    assert!(text.starts_with("test_metric 1\n"), "{text}");
    let line =
        r#"slackwater_api_requests_total{method="GET",route="/v1/files/{path}",status="404"} 1"#;
    assert!(text.contains(line), "{text}");
    assert!(!text.contains("# EOF"), "{text}");
}

#[tokio::test]
async fn the_document_lists_the_vmstore_face_where_it_is_on() {
    let on = with_tokens().get("/openapi.json").await.expect(200).json();
    let off = Face::new().get("/openapi.json").await.expect(200).json();
    assert!(on["paths"]["/api/v310/session/login"].is_object());
    assert!(off["paths"]["/api/v310/session/login"].is_null());
    assert!(off["openapi"].as_str().unwrap().starts_with("3.1"));
}

#[tokio::test]
async fn the_dashboard_is_locked_down() {
    let face = with_tokens();
    let page = face.get("/").await.expect(200);
    let text = String::from_utf8(page.body.to_vec()).unwrap();
    let policy = page.header(header::CONTENT_SECURITY_POLICY);
    let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert_eq!(nonce.len(), 32);
    assert_eq!(text.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"));
    let again = face.get("/").await;
    assert_ne!(policy, again.header(header::CONTENT_SECURITY_POLICY), "the nonce is new each time");
}

#[tokio::test]
async fn without_tokens_a_foreign_page_is_refused() {
    let face = Face::new();
    let page = |site| [("sec-fetch-site", site), ("host", "127.0.0.1:8049")];
    let answer = face.call(Method::POST, "/v1/gc", &page("cross-site"), None).await;
    answer.problem(ProblemCode::Forbidden);
    face.call(Method::POST, "/v1/gc", &page("same-origin"), None).await.expect(200);
    // One whose own name was made to resolve to loopback: its browser sends no fetch header.
    let rebound = [("host", "evil.example:8049")];
    face.call(Method::POST, "/v1/gc", &rebound, None).await.problem(ProblemCode::Forbidden);
}

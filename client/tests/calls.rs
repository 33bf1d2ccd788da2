//! One call of the library against a server that misbehaves as prescribed: what is sent again,
//! what is not, and what the caller is told.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unreachable_pub, reason = "tests")]

#[path = "../../tests/held_port.rs"]
mod held_port;
#[path = "support/scripted.rs"]
mod scripted;

use std::time::Duration;

use bytes::Bytes;
use held_port::HeldPort;
use scripted::{Answer, Scripted, json, problem, status, with_headers};
use slackwater_client::types::CreateSnapshot;
use slackwater_client::{
    ByteRange, Client, ClientError, DataSource, ProblemCode, RetryPolicy, Token,
};

const FILE: &str = r#"{"path":"a.img","size_bytes":1,"used_bytes":0,"unique_bytes":0,
    "origin_snapshot_id":null,"created_at":"2025-11-21T09:05:47.000000001Z",
    "modified_at":"2025-11-21T09:05:47.000000001Z"}"#;
const SNAPSHOT: &str = r#"{"id":"6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11","path":"a.img","name":null,
    "labels":{},"size_bytes":1,"used_bytes":0,"created_at":"2025-11-21T09:05:47.000000001Z",
    "clone_count":0,"deletion_policy":"keep","expires_at":null}"#;
const WRITTEN: &str = r#"{"offset_bytes":4096,"length_bytes":3,"size_bytes":8192}"#;

/// A client that tries three times, with waits that a test can afford.
fn client(server: &Scripted) -> Client {
    let retry = RetryPolicy {
        attempts_max: 3,
        delay_first: Duration::from_millis(1),
        delay_max: Duration::from_millis(20),
    };
    Client::builder(server.url.as_str())
        .retry(retry)
        .timeout(Duration::from_secs(60))
        .token(Token::new("s3cret").unwrap())
        .build()
        .unwrap()
}

fn request() -> CreateSnapshot {
    CreateSnapshot { path: "a.img".to_owned(), ..CreateSnapshot::default() }
}

fn snapshot_id() -> slackwater_client::types::SnapshotId {
    "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11".parse().unwrap()
}

#[tokio::test]
async fn a_post_is_sent_again_under_one_key_and_each_call_has_its_own() {
    let server = Scripted::start([
        Answer::Hangup,
        problem(ProblemCode::Overloaded),
        json(201, SNAPSHOT),
        json(201, SNAPSHOT),
    ])
    .await;
    let client = client(&server);
    client.create_snapshot(&request()).await.unwrap();
    client.create_snapshot(&request()).await.unwrap();
    let seen = server.seen();
    let keys: Vec<&str> = seen.iter().map(|seen| seen.header("idempotency-key").unwrap()).collect();
    assert_eq!(keys.len(), 4);
    assert!(keys[0] == keys[1] && keys[1] == keys[2] && keys[2] != keys[3], "{keys:?}");
    assert!(seen.iter().all(|seen| seen.line == "POST /v1/snapshots HTTP/1.1"));
    assert!(seen.iter().all(|other| other.body == seen[0].body));
    assert!(seen[0].body.starts_with(b"{\"path\":\"a.img\""));
    assert!(seen.iter().all(|seen| seen.header("authorization") == Some("Bearer s3cret")));
    assert!(seen.iter().all(|seen| seen.header("content-type") == Some("application/json")));
}

#[tokio::test]
async fn a_token_file_is_read_again_when_it_was_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let server = Scripted::start((0..3).map(|_| json(200, FILE))).await;
    let client = Client::builder(server.url.as_str()).token_file(&path).build().unwrap();
    client.file("a.img").await.unwrap();
    for token in ["first", "second"] {
        std::fs::write(folder.path().join("new"), token).unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        client.file("a.img").await.unwrap();
    }
    let seen = server.seen();
    let sent: Vec<Option<&str>> = seen.iter().map(|seen| seen.header("authorization")).collect();
    assert_eq!(sent, [None, Some("Bearer first"), Some("Bearer second")]);
}

#[tokio::test]
async fn a_patch_that_may_have_arrived_is_not_sent_again() {
    for answer in [Answer::Hangup, problem(ProblemCode::Overloaded)] {
        let server = Scripted::start([answer, json(200, FILE)]).await;
        client(&server).rename_file("a.img", "b.img").await.unwrap_err();
        assert_eq!(server.seen().len(), 1);
    }
}

#[tokio::test]
async fn a_check_that_may_have_begun_is_not_begun_again() {
    let late = problem(ProblemCode::Timeout);
    let server = Scripted::start([late, Answer::Hangup]).await;
    let client = client(&server);
    assert_eq!(client.check(true).await.unwrap_err().code(), Some(ProblemCode::Timeout));
    client.gc().await.unwrap_err();
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn a_delete_cut_off_after_it_succeeded_is_a_success() {
    let server = Scripted::start([Answer::Hangup, problem(ProblemCode::NotFound)]).await;
    client(&server).delete_file("a.img").await.unwrap();
    assert_eq!(server.seen()[1].line, "DELETE /v1/files/a.img HTTP/1.1");
    // Turned away first, then not there: it never was.
    let away = problem(ProblemCode::Overloaded);
    let server = Scripted::start([away, problem(ProblemCode::NotFound)]).await;
    let error = client(&server).delete_file("a.img").await.unwrap_err();
    assert!(error.is_not_found() && server.seen().len() == 2, "{error:?}");
    // What was never there is told.
    let server = Scripted::start([problem(ProblemCode::NotFound)]).await;
    let error = client(&server).delete_snapshot(snapshot_id()).await.unwrap_err();
    assert!(error.is_not_found() && server.seen().len() == 1, "{error:?}");
}

#[tokio::test]
async fn tries_are_bounded_and_final_refusals_are_final() {
    let busy = || problem(ProblemCode::Overloaded);
    let server = Scripted::start([busy(), busy(), busy(), json(200, FILE)]).await;
    let error = client(&server).file("a.img").await.unwrap_err();
    assert_eq!((error.code(), server.seen().len()), (Some(ProblemCode::Overloaded), 3));
    for code in [ProblemCode::NoSpace, ProblemCode::Poisoned, ProblemCode::Unauthenticated] {
        let server = Scripted::start([problem(code), json(200, FILE)]).await;
        let error = client(&server).file("a.img").await.unwrap_err();
        assert_eq!((error.code(), server.seen().len()), (Some(code), 1));
        assert!(error.to_string().starts_with("the reason ("), "{error}");
    }
}

#[tokio::test]
async fn a_server_that_asks_for_an_hour_is_not_waited_for() {
    let body = serde_json::to_string(&slackwater_api::error::Problem::new(ProblemCode::Busy, "b"))
        .unwrap();
    let busy = with_headers(409, "Retry-After: 3600\r\n", body.as_bytes());
    let server = Scripted::start([busy, json(200, FILE)]).await;
    // Far longer than the pause of the policy, also on a busy machine, and far from an hour.
    let client = client(&server);
    tokio::time::timeout(Duration::from_secs(60), client.file("a.img")).await.unwrap().unwrap();
}

#[tokio::test]
async fn silence_ends_as_a_timeout() {
    let server = Scripted::start([Answer::Silence]).await;
    // Long enough to connect, also for a busy machine.
    let client = Client::builder(server.url.as_str())
        .timeout(Duration::from_secs(1))
        .retry(RetryPolicy::never())
        .build()
        .unwrap();
    let error = client.stats().await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error:?}");
}

#[tokio::test]
async fn a_closed_port_is_unreachable_even_for_a_patch_tried_again() {
    let closed = HeldPort::new();
    let client = Client::builder(closed.url())
        .retry(RetryPolicy {
            attempts_max: 2,
            delay_first: Duration::from_millis(1),
            delay_max: Duration::from_millis(1),
        })
        .build()
        .unwrap();
    let error = client.resize_file("a", 1).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn what_is_no_appliance_is_told_apart() {
    let page = with_headers(404, "Content-Type: text/html\r\n", b"<html>nothing here</html>");
    let server = Scripted::start([page, json(200, "[]"), status(302)]).await;
    let client = client(&server);
    for _ in 0..3 {
        let error = client.file("a.img").await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol { .. }), "{error:?}");
    }
    assert_eq!(server.seen().len(), 3, "a redirection is not followed");
    let tls = Client::builder(server.url.replace("http:", "https:"))
        .ca_certificate(
            rcgen::generate_simple_self_signed(["nobody".to_owned()]).unwrap().cert.pem(),
        )
        .retry(RetryPolicy::never())
        .build()
        .unwrap();
    let error = tls.stats().await.unwrap_err();
    assert!(matches!(error, ClientError::Tls { .. }), "{error:?}");
}

#[tokio::test]
async fn an_endless_answer_is_cut_off() {
    let server = Scripted::start([with_headers(200, "", &vec![b' '; 17 << 20])]).await;
    let error = client(&server).stats().await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Protocol { got, .. } if got.contains("more than")),
        "{error:?}"
    );
}

#[tokio::test]
async fn bytes_that_end_early_are_fetched_again() {
    let range = "Content-Range: bytes 10-14/100\r\n";
    let short = Answer::Bytes(
        format!("HTTP/1.1 206 X\r\n{range}Content-Length: 5\r\nConnection: close\r\n\r\nabc")
            .into(),
    );
    let server = Scripted::start([short, with_headers(206, range, b"abcde")]).await;
    let source = DataSource::Snapshot(snapshot_id());
    let asked = ByteRange::new(10, 5).unwrap();
    let bytes = client(&server).read_bytes(source, asked).await.unwrap();
    assert_eq!(bytes, "abcde");
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].header("range"), Some("bytes=10-14"));
    assert_eq!(seen[0].line, format!("GET /v1/snapshots/{}/data HTTP/1.1", snapshot_id()));
}

#[tokio::test]
async fn another_range_than_the_asked_one_is_refused() {
    for (code, header) in [
        (206, "Content-Range: bytes 11-14/100\r\n"),
        (206, "Content-Range: bytes 10-15/100\r\n"),
        (206, ""),
        (200, "Content-Range: bytes 10-14/100\r\n"),
    ] {
        let server = Scripted::start([with_headers(code, header, b"abcd")]).await;
        let asked = ByteRange::new(10, 5).unwrap();
        let error = client(&server).read_bytes(DataSource::File("a"), asked).await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol { .. }), "{header}: {error:?}");
    }
    // At the end of the file less is right, and more bytes than announced are not.
    let end = with_headers(206, "Content-Range: bytes 10-11/12\r\n", b"ab");
    let server = Scripted::start([end]).await;
    let asked = ByteRange::new(10, 5).unwrap();
    assert_eq!(client(&server).read_bytes(DataSource::File("a"), asked).await.unwrap(), "ab");
    let more = with_headers(206, "Content-Range: bytes 10-11/12\r\n", b"abc");
    let server = Scripted::start([more]).await;
    let error = client(&server).read_bytes(DataSource::File("a"), asked).await.unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }), "{error:?}");
}

#[tokio::test]
async fn bytes_are_written_again_where_they_were_not_confirmed() {
    let other = r#"{"offset_bytes":0,"length_bytes":3,"size_bytes":8192}"#;
    let server = Scripted::start([Answer::Hangup, json(200, WRITTEN), json(200, other)]).await;
    let client = client(&server);
    let data = Bytes::from_static(b"abc");
    client.write_bytes("d/a.img", 4096, data.clone()).await.unwrap();
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|seen| seen.body == b"abc"));
    assert_eq!(seen[1].line, "PUT /v1/files/d%2Fa.img/data?offset=4096 HTTP/1.1");
    let error = client.write_bytes("d/a.img", 4096, data).await.unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }), "{error:?}");
}

#[tokio::test]
async fn a_stream_is_sent_once_and_its_own_failure_is_told() {
    let server = Scripted::start([Answer::Hangup]).await;
    let client = client(&server);
    let good = futures_util::stream::iter([Ok(Bytes::from_static(b"abc"))]);
    let error = client.write_stream("a", 0, good).await.unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error:?}");
    assert_eq!(server.seen().len(), 1);
    let bad = futures_util::stream::iter([
        Ok(Bytes::from_static(b"abc")),
        Err(std::io::Error::other("the tape is torn")),
    ]);
    let error = client.write_stream("a", 0, bad).await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Source { source } if source.to_string().contains("torn")),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_stream_that_stalls_ends_as_a_timeout() {
    let server = Scripted::start([Answer::Silence]).await;
    // Long enough to connect, also for a busy machine.
    let client =
        Client::builder(server.url.as_str()).timeout(Duration::from_secs(1)).build().unwrap();
    let stalled = futures_util::stream::pending();
    let error = client.write_stream("a", 0, stalled).await.unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error:?}");
}

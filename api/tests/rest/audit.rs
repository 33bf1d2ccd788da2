//! The audit log: what of the calls is in it, and who reads it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, header};
use futures_util::{FutureExt as _, stream};
use serde_json::{Value, json};
use slackwater_api::change::{CallerKind, Change, ChangePage};
use slackwater_api::error::ProblemCode;
use slackwater_api::listen::ConnectionInfo;
use slackwater_api::types::{File, Snapshot};
use slackwater_api::worker::{AddedWorker, CREDENTIAL_PREFIX, MountPath};
use slackwater_api::{ApiOptions, AuditLog};
use slackwater_blockstore::disk::{Fault, MemoryDisk};
use tower::ServiceExt as _;

use crate::harness::{Answer, Face, memory_store, with_each_role};
use crate::workers::{call, id};

const LOGIN_TYPE: &str = "com.tintri.api.rest.vcommon.dto.rbac.RestApiCredentials";
const SNAPSHOT_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.beans.cinder.CinderSnapshotSpec";

struct Audited {
    face: Face,
    directory: tempfile::TempDir,
}

impl Audited {
    fn new() -> Self {
        Self::over(Face::with)
    }

    fn over(face: impl FnOnce(ApiOptions) -> Face) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = AuditLog::open(directory.path().join("audit")).unwrap();
        let audit = Some(Arc::new(log));
        Self { face: face(ApiOptions { audit, ..with_each_role() }), directory }
    }

    async fn call(&self, secret: &str, method: Method, uri: &str, body: Option<Value>) -> Answer {
        call(&self.face, secret, method, uri, body).await
    }

    async fn page(&self, query: &str) -> ChangePage {
        let uri = format!("/v1/audit{query}");
        self.call("root-secret", Method::GET, &uri, None).await.expect(200).parse()
    }

    /// The newest change.
    async fn last(&self) -> Change {
        self.page("?limit=1").await.items.remove(0)
    }

    fn text(&self) -> String {
        let files = std::fs::read_dir(self.directory.path().join("audit")).unwrap();
        files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
    }
}

#[tokio::test]
async fn what_is_changed_is_told_with_who_did_it() {
    let audited = Audited::new();
    let body = json!({"path": "disks/a b.img", "size_bytes": 4096});
    let file: File = audited
        .call("node-secret", Method::POST, "/v1/files", Some(body))
        .await
        .expect(201)
        .parse();
    let made = audited.last().await;
    assert_eq!((made.number, made.kind, made.by.as_str()), (1, CallerKind::Token, "node"));
    assert_eq!((made.call.as_str(), made.status), ("POST /v1/files", Some(201)));
    assert_eq!(made.made.as_deref(), Some("/v1/files/disks%2Fa%20b.img"));
    assert!(made.at >= file.created_at && made.from.is_none());

    let body = json!({"path": "disks/a b.img"});
    let answer = audited.call("root-secret", Method::POST, "/v1/snapshots", Some(body)).await;
    let snapshot: Snapshot = answer.expect(201).parse();
    let taken = audited.last().await;
    assert_eq!((taken.by.as_str(), taken.about.as_deref()), ("root", Some("of disks/a b.img")));
    assert_eq!(taken.made, Some(format!("/v1/snapshots/{}", snapshot.id)));
    let body = json!({"snapshot_id": snapshot.id, "path": "disks/b.img"});
    audited.call("node-secret", Method::POST, "/v1/clones", Some(body)).await.expect(201);
    let cloned = audited.last().await;
    assert_eq!(cloned.about, Some(format!("of snapshot {}", snapshot.id)));
    assert_eq!(cloned.made.as_deref(), Some("/v1/files/disks%2Fb.img"));
    for (body, about) in [
        (json!({"path": "disks/c.img"}), "to disks/c.img"),
        (json!({"size_bytes": 8192}), "8192 bytes"),
    ] {
        let path = if about.starts_with("to") { "b" } else { "c" };
        let uri = format!("/v1/files/disks%2F{path}.img");
        audited.call("node-secret", Method::PATCH, &uri, Some(body)).await.expect(200);
        assert_eq!(audited.last().await.about.as_deref(), Some(about));
    }
    let uri = format!("/v1/snapshots/{}", snapshot.id);
    let spelled = format!("/v1/%73napshots/{}", snapshot.id).replace('-', "%2D");
    let spelled = spelled.replace("%73", "s");
    audited.call("root-secret", Method::DELETE, &spelled, None).await.expect(204);
    let deleted = audited.last().await;
    assert_eq!((deleted.call, deleted.status), (format!("DELETE {uri}"), Some(204)));
    assert_eq!(deleted.number, 6);

    // Nothing is made, and the caller is a publisher now.
    let body = json!({"path": "disks/a b.img"});
    let answer = audited.call("root-secret", Method::POST, "/v1/snapshots", Some(body)).await;
    let taken: Snapshot = answer.expect(201).parse();
    let path = format!("published/{}", taken.id);
    let publish = json!({"snapshot_id": taken.id, "path": path});
    for (secret, status) in [("node-secret", 201), ("root-secret", 409)] {
        let body = Some(publish.clone());
        audited.call(secret, Method::POST, "/v1/clones", body).await.expect(status);
        assert_eq!(audited.last().await.status, Some(status));
    }
    // Asked for again, it changes nothing.
    audited.call("root-secret", Method::POST, "/v1/clones", Some(publish)).await.expect(409);
    assert_eq!(audited.last().await.number, 9);
    assert_eq!(audited.last().await.about, Some(format!("of snapshot {}", taken.id)));

    let page = audited.page("?by=root&limit=1").await;
    assert_eq!(page.items[0].number, 9);
    let rest = audited.page(&format!("?by=root&after={}", page.next.unwrap())).await;
    assert_eq!(rest.items.iter().map(|change| change.number).collect::<Vec<_>>(), [7, 6, 2]);
    assert_eq!(rest.next, None);
    let bad = audited.call("root-secret", Method::GET, "/v1/audit?after=x", None).await;
    bad.problem(ProblemCode::BadQuery);
}

#[tokio::test]
async fn what_changes_nothing_is_not_told() {
    let audited = Audited::new();
    let body = || Some(json!({"path": "a", "size_bytes": 1}));
    audited.call("node-secret", Method::GET, "/v1/files", None).await.expect(200);
    audited.call("node-secret", Method::DELETE, "/v1/files/gone", None).await.expect(404);
    audited.call("viewer-secret", Method::POST, "/v1/files", body()).await.expect(403);
    audited.call("wrong-secret", Method::POST, "/v1/files", body()).await.expect(401);
    audited.call("node-secret", Method::POST, "/v1/nothing", body()).await.expect(404);
    assert_eq!(audited.page("").await.items, []);
    // An answer that is given again.
    let request = |key: &'static str| {
        let headers = [("authorization", "Bearer node-secret"), ("idempotency-key", key)];
        let face = &audited.face;
        async move { face.call(Method::POST, "/v1/files", &headers, body()).await }
    };
    for _ in 0..3 {
        request("one").await.expect(201);
    }
    assert_eq!(audited.page("").await.items.len(), 1);
}

/// A call that failed in the middle is in the log; those that are refused afterwards are not.
#[tokio::test]
async fn what_failed_is_there_and_what_was_refused_is_not() {
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |options| options.background = false);
    let audited = Audited::over(|options| Face::over(store, disk, options));
    let call = async |method, uri: &str, body| {
        call(&audited.face, "root-secret", method, uri, body).await.status
    };
    let file = |path: &str| Some(json!({"path": path, "size_bytes": 1}));
    assert_eq!(call(Method::POST, "/v1/files", file("a")).await, 201);
    audited.face.disk.inject(Fault::Sync(0));
    let failed = call(Method::DELETE, "/v1/files/a", None).await;
    assert!(failed >= 500, "{failed}");
    for _ in 0..3 {
        assert_eq!(call(Method::POST, "/v1/files", file("b")).await, 503);
    }
    let statuses: Vec<_> = audited.page("").await.items.iter().map(|item| item.status).collect();
    assert_eq!(statuses, [Some(failed), Some(201)]);
}

#[tokio::test]
async fn no_secret_is_in_it() {
    let audited = Audited::new();
    let body = json!({"name": "node-7"});
    let answer = audited.call("root-secret", Method::POST, "/v1/workers", Some(body)).await;
    let added: AddedWorker = answer.expect(201).parse();
    let credentials =
        ["01", "02"].map(|digits| format!("{CREDENTIAL_PREFIX}{}", digits.repeat(32)));
    let hash = |credential: &str| blake3::hash(credential.as_bytes()).to_hex().to_string();
    let body = json!({"worker_id": id(1), "credential_blake3": hash(&credentials[0])});
    audited.call(&added.join_token, Method::POST, "/v1/join", Some(body)).await.expect(200);
    let joined = audited.last().await;
    assert_eq!((joined.kind, joined.by.as_str()), (CallerKind::JoinToken, "node-7"));
    let answer = audited.call(&credentials[0], Method::POST, "/v1/mount-paths", None).await;
    let mounted: MountPath = answer.expect(201).parse();
    let asked = audited.last().await;
    assert_eq!((asked.kind, asked.by.as_str()), (CallerKind::Worker, "node-7"));
    let body = json!({"credential_blake3": hash(&credentials[1])});
    audited.call(&credentials[0], Method::PUT, "/v1/credential", Some(body)).await.expect(200);
    let login = json!({"username": "cinder", "password": "password", "typeId": LOGIN_TYPE});
    let login = audited.face.post("/api/v310/session/login", login).await.expect(200);
    let cookie = login.header(header::SET_COOKIE).split(';').next().unwrap().to_owned();
    let refresh = "/api/v310/cinder/host/refresh";
    let refreshed = audited.face.call(Method::POST, refresh, &[("cookie", &cookie)], None).await;
    assert!((200..300).contains(&refreshed.status), "{refreshed:?}");
    assert_eq!(audited.last().await.call, "PUT /v1/credential", "neither changes anything");
    let file = json!({"path": "volume", "size_bytes": 4096});
    audited.call("root-secret", Method::POST, "/v1/files", Some(file)).await.expect(201);
    let (uri, headers) = ("/api/v310/cinder/snapshot", [("cookie", cookie.as_str())]);
    let body = json!({"typeId": SNAPSHOT_TYPE, "file": "volume"});
    audited.face.call(Method::POST, uri, &headers, Some(body)).await.expect(200);
    let taken = audited.last().await;
    assert_eq!((taken.kind, taken.by.as_str()), (CallerKind::Vmstore, "cinder"));
    assert!(taken.about.unwrap().ends_with(" of volume"));

    let text = audited.text();
    let (_, secret) = mounted.path.rsplit_once('/').unwrap();
    for secret in [
        added.join_token.as_str(),
        &credentials[0],
        &credentials[1],
        secret,
        "root-secret",
        cookie.split('=').nth(1).unwrap(),
    ] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

#[tokio::test]
async fn the_address_of_the_caller_is_told() {
    let audited = Audited::new();
    let peer = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9)), 700);
    let mut request = Request::post("/v1/gc").body(Body::empty()).unwrap();
    request.headers_mut().insert(header::AUTHORIZATION, "Bearer root-secret".parse().unwrap());
    request.extensions_mut().insert(ConnectionInfo { peer, tls: false });
    audited.face.send(request).await.expect(200);
    assert_eq!(audited.last().await.from.as_deref(), Some("10.0.0.9"));
}

/// It left a part in the file.
#[tokio::test]
async fn writing_that_breaks_off_is_told() {
    let audited = Audited::new();
    let body = json!({"path": "a", "size_bytes": 4096});
    audited.call("node-secret", Method::POST, "/v1/files", Some(body)).await.expect(201);
    let pieces = [Ok(Bytes::from("bytes")), Err(std::io::Error::other("it broke off"))];
    let request = Request::put("/v1/files/a/data")
        .header(header::AUTHORIZATION, "Bearer node-secret")
        .header(header::CONTENT_TYPE, "application/octet-stream");
    let body = Body::from_stream(stream::iter(pieces));
    audited.face.send(request.body(body).unwrap()).await.problem(ProblemCode::IncompleteBody);
    let last = audited.last().await;
    assert_eq!((last.call.as_str(), last.status), ("PUT /v1/files/a/data", Some(400)));
}

/// Each piece of an import is a call.
#[tokio::test]
async fn writing_to_a_file_is_told_once() {
    let audited = Audited::new();
    let body = json!({"path": "a", "size_bytes": 4096});
    audited.call("node-secret", Method::POST, "/v1/files", Some(body)).await.expect(201);
    for secret in ["node-secret", "node-secret", "root-secret"] {
        let request = Request::put("/v1/files/a/data?offset=0")
            .header(header::AUTHORIZATION, format!("Bearer {secret}"))
            .header(header::CONTENT_TYPE, "application/octet-stream");
        audited.face.send(request.body(Body::from("bytes")).unwrap()).await.expect(200);
    }
    let by: Vec<_> = audited.page("").await.items.into_iter().map(|change| change.by).collect();
    assert_eq!(by, ["root", "node", "node"]);
}

#[tokio::test]
async fn a_caller_that_leaves_before_the_answer_is_told_without_one() {
    let audited = Audited::new();
    let body = json!({"path": "a", "size_bytes": 4096});
    audited.call("node-secret", Method::POST, "/v1/files", Some(body)).await.expect(201);
    // Data that never comes.
    let never = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
    let request = Request::put("/v1/files/a/data")
        .header(header::AUTHORIZATION, "Bearer node-secret")
        .header(header::CONTENT_TYPE, "application/octet-stream");
    let answered = audited.face.router.clone().oneshot(request.body(never).unwrap());
    assert!(answered.now_or_never().is_none());
    let told = async {
        loop {
            let last = audited.last().await;
            if last.call.starts_with("PUT") {
                return last;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let told = tokio::time::timeout(Duration::from_secs(60), told).await.unwrap();
    assert_eq!((told.by.as_str(), told.status), ("node", None));
}

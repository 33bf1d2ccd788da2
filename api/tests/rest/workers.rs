//! Workers: added by administrators, joined by their machines, revoked; and which caller reaches which route.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, header};
use serde_json::{Value, json};
use slackwater_api::error::ProblemCode;
use slackwater_api::listen::ConnectionInfo;
use slackwater_api::paths::encode_component;
use slackwater_api::types::{FilePage, Snapshot, Timestamp};
use slackwater_api::worker::{AddedWorker, CREDENTIAL_PREFIX, MountPath, Worker, WorkerList};
use slackwater_api::{ApiOptions, Holder, MountPaths, PathUser, ReferenceKey, TokenId, Workers};

use crate::harness::{Answer, Face, with_each_role};

/// A face with a token of each role, on which a previous credential ends with the first use of the new one.
pub fn face() -> Face {
    let reference_key = ReferenceKey::from_bytes([7; ReferenceKey::BYTES]).into();
    let credential_grace = Duration::ZERO;
    Face::with(ApiOptions { credential_grace, reference_key, ..with_each_role() })
}

pub async fn call(
    face: &Face,
    secret: &str,
    method: Method,
    uri: &str,
    body: Option<Value>,
) -> Answer {
    let bearer = format!("Bearer {secret}");
    face.call(method, uri, &[("authorization", &bearer)], body).await
}

async fn add(face: &Face, name: &str) -> AddedWorker {
    let body = json!({"name": name});
    call(face, "root-secret", Method::POST, "/v1/workers", Some(body)).await.expect(201).parse()
}

/// The credential of this number, and the hash that the appliance has of it.
fn credential(number: u8) -> (String, String) {
    let secret = format!("{CREDENTIAL_PREFIX}{}", format!("{number:02x}").repeat(32));
    (secret.clone(), blake3::hash(secret.as_bytes()).to_hex().to_string())
}

pub fn id(number: u8) -> String {
    format!("6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c{number:02x}")
}

async fn join(face: &Face, join_token: &str, number: u8) -> Answer {
    let body = json!({"worker_id": id(number), "credential_blake3": credential(number).1});
    call(face, join_token, Method::POST, "/v1/join", Some(body)).await
}

/// A worker of this name that joined, by the credential of this number.
pub async fn joined(face: &Face, name: &str, number: u8) -> String {
    let added = add(face, name).await;
    join(face, &added.join_token, number).await.expect(200);
    credential(number).0
}

async fn stats(face: &Face, secret: &str) -> Answer {
    call(face, secret, Method::GET, "/v1/stats", None).await
}

/// Which callers each route lets in: `r` a token to read, `w` one of a worker, `a` one of an administrator,
/// `j` a join token, `m` a machine that joined; `*` all callers, `s` a session of VMstore's face alone.
const ROUTES: &str = "
    GET    /                                          *
    GET    /healthz                                   *
    GET    /readyz                                    *
    GET    /openapi.json                              *
    GET    /metrics                                   r w a m
    GET    /v1/stats                                  r w a m
    GET    /v1/audit                                  a
    POST   /v1/check                                  a
    POST   /v1/gc                                     a
    GET    /v1/files                                  r w a m
    POST   /v1/files                                  w a m
    GET    /v1/files/{path}                           r w a m
    PATCH  /v1/files/{path}                           w a m
    DELETE /v1/files/{path}                           w a m
    GET    /v1/files/{path}/data                      r w a m
    PUT    /v1/files/{path}/data                      w a m
    GET    /v1/files/{path}/map                       r w a m
    GET    /v1/files/{path}/reclaimable               r w a m
    GET    /v1/snapshots                              r w a m
    POST   /v1/snapshots                              w a m
    GET    /v1/snapshots/{id}                         r w a m
    PATCH  /v1/snapshots/{id}                         w a m
    DELETE /v1/snapshots/{id}                         w a m
    GET    /v1/snapshots/{id}/data                    r w a m
    GET    /v1/snapshots/{id}/map                     r w a m
    GET    /v1/snapshots/{id}/diff                    r w a m
    GET    /v1/snapshots/{id}/reclaimable             r w a m
    GET    /v1/snapshots/{id}/reference               r w a m
    PUT    /v1/snapshots/{id}/chains/{chain_id}       w a m
    POST   /v1/chains                                 w a m
    GET    /v1/chains/{chain_id}/{size_bytes}         r w a m
    POST   /v1/clones                                 w a m
    GET    /v1/workers                                a
    POST   /v1/workers                                a
    GET    /v1/workers/{name}                         a
    DELETE /v1/workers/{name}                         a
    POST   /v1/join                                   j
    PUT    /v1/credential                             m
    POST   /v1/mount-paths                            w a m
    GET    /api/info                                  *
    POST   /api/v310/session/login                    *
    GET    /api/v310/session/logout                   *
    GET    /api/v310/appliance                        s
    GET    /api/v310/virtualDisk                      s
    POST   /api/v310/cinder/host/refresh              s
    POST   /api/v310/cinder/snapshot                  s
    POST   /api/v310/cinder/clone                     s
    GET    /api/v310/snapshot                         s
    DELETE /api/v310/snapshot/{uuid}                  s
";

/// What the document says of a route that lets these in.
fn documented(let_in: &[&str]) -> Option<&'static str> {
    match *let_in.first().unwrap() {
        "r" => Some("read-only"),
        "w" => Some("worker"),
        "a" => Some("admin"),
        "j" => Some("join token"),
        "m" => Some("credential of a worker"),
        _ => None,
    }
}

fn expected() -> BTreeMap<(String, String), Vec<&'static str>> {
    let lines = ROUTES.lines().map(str::split_whitespace).filter_map(|mut words| {
        let route = (words.next()?.to_owned(), words.next()?.to_owned());
        Some((route, words.collect()))
    });
    lines.collect()
}

#[tokio::test]
async fn every_route_lets_in_whom_the_table_names() {
    let face = face();
    let document = face.get("/openapi.json").await.expect(200).json();
    let machine = joined(&face, "joined", 1).await;
    let invited = add(&face, "invited").await.join_token;
    let callers = [
        ("r", "viewer-secret"),
        ("w", "node-secret"),
        ("a", "root-secret"),
        ("j", &invited),
        ("m", &machine),
    ];
    let mut expected = expected();
    for (template, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let method = method.to_uppercase();
            let route = (method.clone(), template.clone());
            let let_in = expected.remove(&route).unwrap_or_else(|| panic!("no line for {route:?}"));
            let path = template
                .replace("{path}", &format!("workers%2F{}%2Fgone", id(1)))
                .replace("{id}", &id(0))
                .replace("{uuid}", &id(0))
                .replace("{chain_id}", &format!("sha256:{}", "a".repeat(64)))
                .replace("{size_bytes}", "4096")
                .replace("{name}", "gone");
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let role = operation["x-role"].as_str();
            assert_eq!(role, documented(&let_in), "{route:?}");
            let open = face.call(method.clone(), &path, &[], None).await;
            assert_ne!(open.status, 405, "{route:?} is not mounted");
            let is_open = let_in == ["*"];
            assert!(is_open || open.status == 401, "{route:?} without a token: {open:?}");
            for (letter, secret) in callers {
                let answer = call(&face, secret, method.clone(), &path, None).await;
                let about = format!("{route:?} by {letter}: {answer:?}");
                if is_open || let_in.contains(&letter) {
                    assert!(![401, 403].contains(&answer.status), "{about}");
                    continue;
                }
                // A known role is not enough; anything else is no token here.
                let is_of_a_role = let_in.contains(&"a") && letter != "j";
                assert_eq!(answer.status, if is_of_a_role { 403 } else { 401 }, "{about}");
            }
        }
    }
    assert!(expected.is_empty(), "lines without a route: {expected:?}");
}

#[tokio::test]
async fn a_worker_is_added_joins_and_is_known_by_its_credential() {
    let face = face();
    let body = json!({"name": "node-7", "join_token_seconds": 60});
    let answer = call(&face, "root-secret", Method::POST, "/v1/workers", Some(body.clone())).await;
    assert_eq!(answer.header(header::LOCATION), "/v1/workers/node-7");
    let added: AddedWorker = answer.expect(201).parse();
    let lasts =
        added.worker.join_token_expires_at.unwrap().as_nanos() - added.worker.created_at.as_nanos();
    assert_eq!(lasts, 60_000_000_000);
    let taken = call(&face, "root-secret", Method::POST, "/v1/workers", Some(body)).await;
    taken.problem(ProblemCode::Exists);

    stats(&face, &credential(1).0).await.problem(ProblemCode::Unauthenticated);
    stats(&face, &added.join_token).await.problem(ProblemCode::Unauthenticated);
    let first: Worker = join(&face, &added.join_token, 1).await.expect(200).parse();
    assert_eq!(first.worker_id.map(|id| id.to_string()), Some(id(1)));
    let again: Worker = join(&face, &added.join_token, 1).await.expect(200).parse();
    assert_eq!(again, first);
    let used = join(&face, &added.join_token, 2).await.problem(ProblemCode::Unauthenticated);
    assert!(used.detail.contains("was used at"), "{}", used.detail);
    stats(&face, &credential(1).0).await.expect(200);
    stats(&face, &credential(2).0).await.problem(ProblemCode::Unauthenticated);

    add(&face, "a").await;
    let list = call(&face, "root-secret", Method::GET, "/v1/workers", None).await.expect(200);
    assert!(
        !String::from_utf8_lossy(&list.body).contains(&credential(1).1),
        "no hash is in the list"
    );
    let list: WorkerList = list.parse();
    let names: Vec<&str> = list.workers.iter().map(|worker| worker.name.as_str()).collect();
    assert_eq!(names, ["a", "node-7"]);
    assert!(list.workers[0].last_seen_at.is_none() && list.workers[1].last_seen_at.is_some());
    let uri = "/v1/workers/node-7";
    let one: Worker = call(&face, "root-secret", Method::GET, uri, None).await.expect(200).parse();
    assert_eq!(one, list.workers[1]);
}

/// A file of the worker that has this number, and a snapshot of it.
pub async fn disk(face: &Face, machine: &str, number: u8) -> (String, Snapshot) {
    let path = format!("workers/{}/disks/a", id(number));
    let file = json!({"path": path, "size_bytes": 8192});
    call(face, machine, Method::POST, "/v1/files", Some(file)).await.expect(201);
    let request = json!({"path": path});
    let taken = call(face, machine, Method::POST, "/v1/snapshots", Some(request)).await;
    (path, taken.expect(201).parse())
}

/// The calls that change something of this file and this snapshot, or read the file.
fn calls_on(path: &str, snapshot: &Snapshot) -> Vec<(Method, String, Option<Value>)> {
    let route = format!("/v1/files/{}", path.replace('/', "%2F"));
    let of_snapshot = format!("/v1/snapshots/{}", snapshot.id);
    let chain = format!("sha256:{}", "b".repeat(64));
    vec![
        (Method::GET, route.clone(), None),
        (Method::HEAD, route.clone(), None),
        (Method::GET, format!("{route}/data"), None),
        (Method::GET, format!("{route}/map"), None),
        (Method::GET, format!("{route}/reclaimable"), None),
        (Method::PATCH, route.clone(), Some(json!({"size_bytes": 4096}))),
        (Method::POST, "/v1/snapshots".to_owned(), Some(json!({"path": path}))),
        (Method::POST, "/v1/chains".to_owned(), Some(json!({"path": path, "chain_id": chain}))),
        (Method::PATCH, of_snapshot.clone(), Some(json!({"labels": {"a": "b"}}))),
        (
            Method::POST,
            "/v1/files".to_owned(),
            Some(json!({"path": format!("{path}2"), "size_bytes": 1})),
        ),
        (
            Method::POST,
            "/v1/clones".to_owned(),
            Some(json!({"snapshot_id": snapshot.id, "path": format!("{path}3")})),
        ),
        (Method::PATCH, route.clone(), Some(json!({"path": format!("{path}4")}))),
        (Method::DELETE, format!("{route}4"), None),
        (Method::DELETE, of_snapshot, None),
    ]
}

#[tokio::test]
async fn a_worker_reaches_its_own_files_and_no_others() {
    let face = face();
    let [one, two] = [joined(&face, "one", 1).await, joined(&face, "two", 2).await];
    let (path, snapshot) = disk(&face, &one, 1).await;
    let calls = calls_on(&path, &snapshot);
    for (method, uri, body) in &calls {
        let answer = call(&face, &two, method.clone(), uri, body.clone()).await;
        assert_eq!(answer.status, 403, "{method} {uri}: {answer:?}");
        if *method != Method::HEAD {
            let problem = answer.problem(ProblemCode::Forbidden);
            assert!(problem.detail.contains("worker `two` may not"), "{}", problem.detail);
        }
    }
    let route = format!("/v1/files/{}/data", path.replace('/', "%2F"));
    let bytes = Request::put(&route).header(header::CONTENT_TYPE, "application/octet-stream");
    let bytes = bytes.header(header::AUTHORIZATION, format!("Bearer {two}"));
    face.send(bytes.body(Body::from("x")).unwrap()).await.problem(ProblemCode::Forbidden);
    // Into its own directory a worker brings no file of another one either.
    let own = json!({"path": format!("workers/{}/disks/mine", id(2))});
    let uri = format!("/v1/files/{}", path.replace('/', "%2F"));
    call(&face, &two, Method::PATCH, &uri, Some(own)).await.problem(ProblemCode::Forbidden);
    let (theirs, _) = disk(&face, &two, 2).await;
    let out = json!({"path": format!("workers/{}/disks/theirs", id(1))});
    let uri = format!("/v1/files/{}", theirs.replace('/', "%2F"));
    call(&face, &two, Method::PATCH, &uri, Some(out)).await.problem(ProblemCode::Forbidden);
    call(&face, &two, Method::DELETE, &uri, None).await.expect(204);
    let uri = format!("/v1/snapshots/{}", snapshot.id);
    let same: Snapshot = call(&face, &one, Method::GET, &uri, None).await.expect(200).parse();
    assert_eq!(same, snapshot);
    assert_eq!(listed(&face, "viewer-secret", "").await, [path]);
    for (method, uri, body) in calls {
        let answer = call(&face, &one, method.clone(), &uri, body).await;
        assert!((200..300).contains(&answer.status), "{method} {uri}: {answer:?}");
    }
}

#[tokio::test]
async fn a_machine_cannot_take_the_id_of_another_one() {
    let face = face();
    let one = joined(&face, "one", 1).await;
    let (path, _) = disk(&face, &one, 1).await;
    call(&face, "root-secret", Method::DELETE, "/v1/workers/one", None).await.expect(204);
    let thief = add(&face, "thief").await.join_token;
    let body = json!({"worker_id": id(1), "credential_blake3": credential(3).1});
    let refused = call(&face, &thief, Method::POST, "/v1/join", Some(body.clone())).await;
    let refused = refused.problem(ProblemCode::Exists);
    assert!(refused.detail.contains(&format!("--id {}", id(1))), "{}", refused.detail);
    // Nor once its files are gone: its snapshots are read by the id that took them.
    let route = format!("/v1/files/{}", path.replace('/', "%2F"));
    let admin = "root-secret";
    call(&face, admin, Method::DELETE, &route, None).await.expect(204);
    let refused = call(&face, &thief, Method::POST, "/v1/join", Some(body.clone())).await;
    refused.problem(ProblemCode::Exists);
    let again = json!({"path": path, "size_bytes": 4096});
    call(&face, admin, Method::POST, "/v1/files", Some(again)).await.expect(201);
    // The machine itself, as an administrator says.
    let with_id = json!({"name": "again", "worker_id": id(1)});
    let added = call(&face, "root-secret", Method::POST, "/v1/workers", Some(with_id)).await;
    let added: AddedWorker = added.expect(201).parse();
    call(&face, &added.join_token, Method::POST, "/v1/join", Some(body)).await.expect(200);
    let route = format!("/v1/files/{}", path.replace('/', "%2F"));
    call(&face, &credential(3).0, Method::GET, &route, None).await.expect(200);
}

/// The paths that a list in pages has.
async fn listed(face: &Face, secret: &str, query: &str) -> Vec<String> {
    let (mut paths, mut after) = (Vec::new(), String::new());
    loop {
        let uri = format!("/v1/files?limit=2{query}{after}");
        let page: FilePage = call(face, secret, Method::GET, &uri, None).await.expect(200).parse();
        paths.extend(page.items.into_iter().map(|file| file.path));
        match page.next {
            Some(next) => after = format!("&after={}", encode_component(next.as_bytes())),
            None => return paths,
        }
    }
}

#[tokio::test]
async fn a_worker_lists_what_it_reaches() {
    let face = face();
    let [one, two] = [joined(&face, "one", 1).await, joined(&face, "two", 2).await];
    let mut all = vec!["a".to_owned(), "x/y".to_owned()];
    for number in [1, 2] {
        for name in ["disks/a", "disks/b", "holds/a", "lease"] {
            all.push(format!("workers/{}/{name}", id(number)));
        }
        all.push(format!("published/{}", id(number)));
    }
    all.sort();
    for path in &all {
        let body = Some(json!({"path": path, "size_bytes": 1}));
        call(&face, "root-secret", Method::POST, "/v1/files", body).await.expect(201);
    }
    let of = |number: u8| format!("workers/{}/", id(number));
    let expected = |begins: &[&str]| -> Vec<String> {
        let is_one = |path: &&String| begins.iter().any(|begin| path.starts_with(begin));
        all.iter().filter(is_one).cloned().collect()
    };
    assert_eq!(listed(&face, "viewer-secret", "").await, all);
    for (machine, number) in [(&one, 1), (&two, 2)] {
        let own = of(number);
        assert_eq!(listed(&face, machine, "").await, expected(&["published/", &own]));
        assert_eq!(listed(&face, machine, "&prefix=workers/").await, expected(&[&own]));
        assert_eq!(listed(&face, machine, "&prefix=published/").await, expected(&["published/"]));
        let others = format!("&prefix={}", of(3 - number));
        assert_eq!(listed(&face, machine, &others).await, Vec::<String>::new());
    }
}

#[tokio::test]
async fn what_a_worker_registers_carries_its_name() {
    let face = face();
    let machine = joined(&face, "node-7", 1).await;
    let (path, _) = disk(&face, &machine, 1).await;
    let chain = format!("sha256:{}", "a".repeat(64));
    let body = json!({"path": path, "chain_id": chain});
    let made = call(&face, &machine, Method::POST, "/v1/chains", Some(body)).await.expect(201);
    let made: Snapshot = made.parse();
    let makers: Vec<&String> = made.chains.values().flatten().collect();
    assert_eq!(makers, ["node-7"]);
    let gc = call(&face, &machine, Method::POST, "/v1/gc", None).await;
    let refused = gc.problem(ProblemCode::Forbidden);
    assert!(refused.detail.contains("worker `node-7` has role worker"), "{}", refused.detail);
}

#[tokio::test]
async fn a_revoked_worker_reaches_nothing_from_then_on() {
    let face = face();
    let machine = joined(&face, "node-7", 1).await;
    let invited = add(&face, "late").await.join_token;
    for name in ["node-7", "late"] {
        let uri = format!("/v1/workers/{name}");
        call(&face, "root-secret", Method::DELETE, &uri, None).await.expect(204);
        let gone = call(&face, "root-secret", Method::DELETE, &uri, None).await;
        gone.problem(ProblemCode::NotFound);
        call(&face, "root-secret", Method::GET, &uri, None).await.problem(ProblemCode::NotFound);
    }
    let refused = stats(&face, &machine).await.problem(ProblemCode::Unauthenticated);
    assert!(refused.detail.contains("revoked"), "{}", refused.detail);
    join(&face, &invited, 2).await.problem(ProblemCode::Unauthenticated);
    // The name is free, and the machine may come back with another credential.
    let added = add(&face, "node-7").await;
    let body = json!({"worker_id": id(1), "credential_blake3": credential(3).1});
    call(&face, &added.join_token, Method::POST, "/v1/join", Some(body)).await.expect(200);
    stats(&face, &machine).await.problem(ProblemCode::Unauthenticated);
    stats(&face, &credential(3).0).await.expect(200);
}

#[tokio::test]
async fn a_credential_is_replaced_by_its_worker_alone() {
    let face = face();
    let (old, (new, new_hash)) = (joined(&face, "node-7", 1).await, credential(2));
    let body = json!({"credential_blake3": new_hash});
    let replace = async |secret: &str, body: &Value| {
        call(&face, secret, Method::PUT, "/v1/credential", Some(body.clone())).await
    };
    let neighbour = joined(&face, "node-8", 8).await;
    for other in ["root-secret", "node-secret", "x", &new] {
        replace(other, &body).await.problem(ProblemCode::Unauthenticated);
    }
    replace(&old, &body).await.expect(200);
    // The answer was lost, and the call is sent again.
    replace(&old, &body).await.expect(200);
    replace(&neighbour, &body).await.problem(ProblemCode::Exists);
    stats(&face, &old).await.expect(200);
    stats(&face, &new).await.expect(200);
    let retired = async {
        while stats(&face, &old).await.status == 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), retired).await.expect("the old one ends");
    stats(&face, &old).await.problem(ProblemCode::Unauthenticated);
    replace(&new, &body).await.expect(200);
}

#[tokio::test]
async fn what_has_no_meaning_is_refused() {
    let face = face();
    let added = add(&face, "node-7").await;
    let bad_workers = [
        json!({}),
        json!({"name": ""}),
        json!({"name": "Node"}),
        json!({"name": "a b"}),
        json!({"name": "a", "join_token_seconds": 0}),
        json!({"name": "a", "join_token_seconds": 2_592_001}),
        json!({"name": "a", "join_token": "mine"}),
        json!({"name": "a", "worker_id": "x"}),
    ];
    for body in bad_workers {
        let answer = call(&face, "root-secret", Method::POST, "/v1/workers", Some(body)).await;
        answer.problem(ProblemCode::InvalidValue);
    }
    let hash = credential(1).1;
    let bad_joins = [
        json!({"worker_id": id(1)}),
        json!({"worker_id": "x", "credential_blake3": hash}),
        json!({"worker_id": id(1), "credential_blake3": hash.to_uppercase()}),
        json!({"worker_id": id(1), "credential_blake3": credential(1).0}),
    ];
    for body in bad_joins {
        let answer = call(&face, &added.join_token, Method::POST, "/v1/join", Some(body)).await;
        let problem = answer.problem(ProblemCode::InvalidValue);
        assert!(!problem.detail.contains(CREDENTIAL_PREFIX), "{}", problem.detail);
    }
    let named = json!({"name": "node"});
    let taken = call(&face, "root-secret", Method::POST, "/v1/workers", Some(named)).await;
    let taken = taken.problem(ProblemCode::Exists);
    assert!(taken.detail.contains("token"), "{}", taken.detail);
    let uri = "/v1/workers/No%20Name";
    call(&face, "root-secret", Method::GET, uri, None).await.problem(ProblemCode::InvalidValue);
}

/// A face, and what NFS asks about it.
fn face_with_paths() -> (Face, Arc<Workers>, Arc<MountPaths>) {
    let (workers, paths) = (Arc::<Workers>::default(), Arc::<MountPaths>::default());
    let (of_workers, of_paths) = (Arc::clone(&workers), Arc::clone(&paths));
    let options = ApiOptions { workers: of_workers, mount_paths: of_paths, ..with_each_role() };
    (Face::with(options), workers, paths)
}

/// A new path of this caller: its secret below `.worker` or `.export`, and the last moment at which it can be used.
async fn mount_path(face: &Face, bearer: &str, mounts: &str) -> (String, Timestamp) {
    let answer = call(face, bearer, Method::POST, "/v1/mount-paths", None).await;
    let path = answer.expect(201).parse::<MountPath>();
    assert!(!format!("{path:?}").contains(&path.path));
    let secret = path.path.strip_prefix(&format!("/slackwater/{mounts}/")).unwrap();
    (secret.to_owned(), Timestamp::from_nanos(path.expires_at.as_nanos() - 1))
}

/// One that mounts.
const USER: PathUser =
    PathUser { address: IpAddr::V4(Ipv4Addr::LOCALHOST), has_privileged_port: true };

#[tokio::test]
async fn a_secret_path_stands_for_its_worker_until_that_is_revoked() {
    let (face, workers, paths) = face_with_paths();
    let machine = joined(&face, "node-7", 1).await;
    let (first, last) = mount_path(&face, &machine, ".worker").await;
    let (second, _) = mount_path(&face, &machine, ".worker").await;
    let worker = |secret: &str| match paths.take(secret.as_bytes(), USER, last)? {
        Holder::Worker(name, added_at) => workers.id_of(&name, added_at),
        Holder::Token(_) => panic!("the whole export"),
    };
    let worker_id = worker(&first).unwrap();
    assert_eq!(worker_id.to_string(), id(1));
    let other = if second.ends_with('0') { "1" } else { "0" };
    let forged = format!("{}{other}", &second[..second.len() - 1]);
    for wrong in ["", &forged, &machine, &second.to_uppercase()] {
        assert_eq!(worker(wrong), None, "{wrong}");
    }
    assert!(workers.is_worker(worker_id) && !workers.is_worker(uuid::Uuid::from_u128(7)));
    call(&face, "root-secret", Method::DELETE, "/v1/workers/node-7", None).await.expect(204);
    assert!(!workers.is_worker(worker_id) && worker(&second).is_none());
    // The same machine again goes on, but not by paths that it was given before.
    joined(&face, "node-7", 1).await;
    assert!(workers.is_worker(worker_id) && worker(&second).is_none());
    // An invited worker is none yet, though it has an id.
    let body = json!({"name": "node-8", "worker_id": id(2)});
    let added = call(&face, "root-secret", Method::POST, "/v1/workers", Some(body)).await;
    let invited = added.expect(201).parse::<AddedWorker>().worker;
    assert!(!workers.is_worker(invited.worker_id.unwrap()));
    assert_eq!(workers.id_of(&invited.name, invited.created_at), None);
}

#[tokio::test]
async fn a_token_mounts_the_whole_export_by_its_role() {
    let (face, _, paths) = face_with_paths();
    let mut holders = Vec::new();
    for bearer in ["node-secret", "root-secret"] {
        let (secret, last) = mount_path(&face, bearer, ".export").await;
        holders.push(paths.take(secret.as_bytes(), USER, last).unwrap());
    }
    let without = Holder::Token(TokenId::NONE);
    assert!(holders[0] != holders[1] && !holders.contains(&without), "{holders:?}");
    let refused = call(&face, "viewer-secret", Method::POST, "/v1/mount-paths", None).await;
    refused.problem(ProblemCode::Forbidden);
    // Without tokens all who reach REST are administrators.
    let answer = Face::new().call(Method::POST, "/v1/mount-paths", &[], None).await;
    assert!(answer.expect(201).parse::<MountPath>().path.contains("/.export/"));
}

#[tokio::test]
async fn without_tokens_a_machine_is_known_all_the_same() {
    let face = Face::new();
    let added: AddedWorker =
        face.post("/v1/workers", json!({"name": "node-7"})).await.expect(201).parse();
    join(&face, &added.join_token, 1).await.expect(200);
    let machine = credential(1).0;
    stats(&face, &machine).await.expect(200);
    call(&face, &machine, Method::POST, "/v1/gc", None).await.problem(ProblemCode::Forbidden);
    face.call(Method::DELETE, "/v1/workers/node-7", &[], None).await.expect(204);
    // Not taken for one of those who need no token.
    stats(&face, &machine).await.problem(ProblemCode::Unauthenticated);
    stats(&face, "some-token-that-is-left-from-before").await.expect(200);
}

#[tokio::test]
async fn join_tokens_and_credentials_cannot_be_guessed_fast() {
    for (method, uri) in [(Method::POST, "/v1/join"), (Method::PUT, "/v1/credential")] {
        let face = face();
        let guess = async |number: usize| {
            let bearer = format!("Bearer slackwater-join-{number:064x}");
            let request = Request::builder().method(method.clone()).uri(uri);
            let request = request.header(header::AUTHORIZATION, bearer);
            let mut request = request.body(Body::empty()).unwrap();
            let peer: SocketAddr = "10.0.0.1:40000".parse().unwrap();
            request.extensions_mut().insert(ConnectionInfo { peer, tls: false });
            face.send(request).await.status
        };
        // A hundred would pass only if they took more than a minute: beyond the first ones, one is let through each second.
        let mut answers = Vec::new();
        for number in 0..100 {
            answers.push(guess(number).await);
        }
        assert_eq!(answers[0], 401);
        assert!(answers.contains(&429), "{uri}: {answers:?}");
    }
}

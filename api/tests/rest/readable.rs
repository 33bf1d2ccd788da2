//! Which snapshots a worker that joined reads.

use axum::http::Method;
use serde_json::{Value, json};
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{Snapshot, SnapshotPage};
use slackwater_blockstore::{FilePath, InodeId};

use crate::harness::Face;
use crate::workers::{call, disk, face, id, joined};

const ADMIN: &str = "root-secret";

pub fn chain(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

/// The calls that read a snapshot, or make something of it.
fn calls_on(snapshot: &str, own: &str, clone: &str) -> Vec<(Method, String, Option<Value>)> {
    let route = format!("/v1/snapshots/{snapshot}");
    let mut calls = ["", "/data", "/map", "/diff", "/reclaimable", "/reference"]
        .map(|part| (Method::GET, format!("{route}{part}"), None))
        .to_vec();
    calls.push((Method::GET, format!("{route}/diff?base={own}"), None));
    calls.push((Method::GET, format!("/v1/snapshots/{own}/diff?base={snapshot}"), None));
    calls.push((Method::PUT, format!("{route}/chains/{}", chain('a')), None));
    let body = json!({"snapshot_id": snapshot, "path": clone});
    calls.push((Method::POST, "/v1/clones".to_owned(), Some(body)));
    calls
}

async fn assert_reads(face: &Face, worker: &str, is_read: bool, snapshot: &str, own: &str) {
    // Before the calls that share it, or make a clone.
    let listed = listed(face, worker, 1).await;
    assert_eq!(listed.iter().any(|id| id == snapshot), is_read, "{listed:?}");
    let clone = format!("workers/{}/disks/{snapshot}", id(2));
    for (method, uri, body) in calls_on(snapshot, own, &clone) {
        let answer = call(face, worker, method.clone(), &uri, body).await;
        match is_read {
            true => {
                assert!((200..300).contains(&answer.status), "{method} {uri}: {answer:?}");
            }
            false => {
                let problem = answer.problem(ProblemCode::Forbidden);
                assert!(problem.detail.contains("may not read snapshot"), "{}", problem.detail);
            }
        }
    }
}

/// The ids of the snapshots that a caller is shown, by pages of so many.
async fn listed(face: &Face, caller: &str, limit: usize) -> Vec<String> {
    let (mut ids, mut after) = (Vec::new(), String::new());
    loop {
        let uri = format!("/v1/snapshots?limit={limit}{after}");
        let page: SnapshotPage =
            call(face, caller, Method::GET, &uri, None).await.expect(200).parse();
        ids.extend(page.items.iter().map(|snapshot| snapshot.id.to_string()));
        match page.next {
            Some(next) => after = format!("&after={next}"),
            None => return ids,
        }
    }
}

/// A snapshot of a file, by a request with more in it.
pub async fn snapshot(face: &Face, caller: &str, route: &str, request: Value) -> String {
    let taken = call(face, caller, Method::POST, route, Some(request)).await.expect(201);
    let snapshot: Snapshot = taken.parse();
    snapshot.id.to_string()
}

/// Two workers, with a snapshot of a disk of each.
struct Workers {
    face: Face,
    one: String,
    two: String,
    /// The disk of the first, and its snapshot.
    path: String,
    of_one: String,
    /// The snapshot of the second.
    own: String,
}

impl Workers {
    async fn new() -> Self {
        let face = face();
        let [one, two] = [joined(&face, "one", 1).await, joined(&face, "two", 2).await];
        let (path, of_one) = disk(&face, &one, 1).await;
        let (_, of_two) = disk(&face, &two, 2).await;
        let [of_one, own] = [of_one, of_two].map(|snapshot| snapshot.id.to_string());
        Self { face, one, two, path, of_one, own }
    }
}

#[tokio::test]
async fn a_worker_reads_no_snapshot_that_was_not_shared() {
    let Workers { face, one, two, path, of_one, own } = Workers::new().await;
    let file = json!({"path": "backup", "size_bytes": 1});
    call(&face, ADMIN, Method::POST, "/v1/files", Some(file)).await.expect(201);
    let mut unshared = vec![of_one.clone()];
    for (caller, file) in [(ADMIN, "backup"), (ADMIN, path.as_str()), (one.as_str(), &path)] {
        let named = json!({"path": file, "name": format!("nightly-{}", unshared.len())});
        unshared.push(snapshot(&face, caller, "/v1/snapshots", named).await);
    }
    for id in &unshared {
        assert_reads(&face, &two, false, id, &own).await;
    }
    assert_reads(&face, &two, true, &own, &own).await;
    assert_eq!(listed(&face, &two, 100).await, std::slice::from_ref(&own));
    // The one whose file it is, and tokens, read it.
    for caller in [&one, "viewer-secret"] {
        let uri = format!("/v1/snapshots/{of_one}");
        call(&face, caller, Method::GET, &uri, None).await.expect(200);
    }
    // Drivers find each other's empty disks by this name.
    let named = json!({"path": path, "name": "slackwater-empty-ext4-1-1"});
    let registered = json!({"path": path, "chain_id": chain('c')});
    for (route, request) in [("/v1/snapshots", named), ("/v1/chains", registered)] {
        let shared = snapshot(&face, &one, route, request).await;
        assert_reads(&face, &two, true, &shared, &own).await;
    }
    // Registered afterwards.
    let again = json!({"path": path});
    let added = snapshot(&face, &one, "/v1/snapshots", again).await;
    assert_reads(&face, &two, false, &added, &own).await;
    let uri = format!("/v1/snapshots/{added}/chains/{}", chain('d'));
    call(&face, &one, Method::PUT, &uri, None).await.expect(200);
    assert_reads(&face, &two, true, &added, &own).await;
}

#[tokio::test]
async fn a_worker_reads_what_is_published_and_goes_on_with_what_it_cloned() {
    let Workers { face, one, two, of_one: shared, own, .. } = Workers::new().await;
    let clone = |path: String| json!({"snapshot_id": shared, "path": path});
    let published = format!("published/{shared}");
    // It cannot publish for itself what it does not read.
    let publish = Some(clone(published.clone()));
    let refused = call(&face, &two, Method::POST, "/v1/clones", publish.clone()).await;
    refused.problem(ProblemCode::Forbidden);
    // Nor does a file or a directory of that name do, which is no clone; and the list goes on.
    let hold = Some(clone("held".to_owned()));
    call(&face, ADMIN, Method::POST, "/v1/clones", hold).await.expect(201);
    for path in [published.clone(), format!("{published}/x")] {
        let file = json!({"path": path, "size_bytes": 1});
        call(&face, ADMIN, Method::POST, "/v1/files", Some(file)).await.expect(201);
        assert_reads(&face, &two, false, &shared, &own).await;
        let route = format!("/v1/files/{}", path.replace('/', "%2F"));
        call(&face, ADMIN, Method::DELETE, &route, None).await.expect(204);
    }
    let directory = FilePath::parse(&published).unwrap();
    let [first, last] = directory.names() else { panic!("{directory:?}") };
    let above = face.store.lookup(InodeId::ROOT, first).unwrap().inode;
    face.store.remove_directory(above, last).unwrap();
    let route = format!("/v1/files/published%2F{shared}");
    call(&face, &one, Method::POST, "/v1/clones", publish).await.expect(201);
    for part in ["", "/data", "/map", "/reclaimable", "/reference"] {
        let uri = format!("/v1/snapshots/{shared}{part}");
        call(&face, &two, Method::GET, &uri, None).await.expect(200);
    }
    assert!(listed(&face, &two, 100).await.contains(&shared));
    for other in
        ["published/x".to_owned(), format!("{published}/x"), format!("published/{}", id(9))]
    {
        let refused = call(&face, &one, Method::POST, "/v1/clones", Some(clone(other))).await;
        refused.problem(ProblemCode::Forbidden);
    }
    call(&face, &two, Method::GET, &route, None).await.expect(200);
    call(&face, &two, Method::GET, "/v1/files?prefix=published/", None).await.expect(200);
    let resize = Some(json!({"size_bytes": 1}));
    call(&face, &two, Method::PATCH, &route, resize).await.problem(ProblemCode::Forbidden);
    let hold = Some(clone(format!("workers/{}/holds/a", id(2))));
    call(&face, &two, Method::POST, "/v1/clones", hold).await.expect(201);
    call(&face, &two, Method::DELETE, &route, None).await.problem(ProblemCode::NotFound);
    call(&face, &one, Method::DELETE, &route, None).await.expect(204);
    // Its containers start from the snapshot as long as it holds a clone.
    let uri = format!("/v1/snapshots/{shared}/data");
    call(&face, &two, Method::GET, &uri, None).await.expect(200);
    let hold = format!("/v1/files/workers%2F{}%2Fholds%2Fa", id(2));
    call(&face, &two, Method::DELETE, &hold, None).await.expect(204);
    assert_reads(&face, &two, false, &shared, &own).await;
}

/// Else one worker could use up the labels of another's image, for good.
#[tokio::test]
async fn a_worker_registers_what_is_not_its_own_as_a_few_chains() {
    let face = face();
    let [one, two] = [joined(&face, "one", 1).await, joined(&face, "two", 2).await];
    let (path, _) = disk(&face, &one, 1).await;
    let request = json!({"path": path, "chain_id": chain('f')});
    let taken = snapshot(&face, &one, "/v1/chains", request).await;
    let add = async |caller: &str, number: usize| {
        let uri = format!("/v1/snapshots/{taken}/chains/sha256:{number:064x}");
        call(&face, caller, Method::PUT, &uri, None).await
    };
    // With the one that it has, sixteen.
    for number in 0..15 {
        add(&two, number).await.expect(200);
    }
    for _ in 0..2 {
        let problem = add(&two, 15).await.problem(ProblemCode::InvalidValue);
        assert!(problem.detail.contains("at most 16"), "{}", problem.detail);
        add(&two, 7).await.expect(200);
    }
    // Whose it is has the rest.
    for number in 0..63 {
        add(&one, number).await.expect(200);
    }
    add(&one, 63).await.problem(ProblemCode::InvalidValue);
}

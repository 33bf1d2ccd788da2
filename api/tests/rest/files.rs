//! Files and clones: each route's success and its errors.

use axum::http::{Method, header};
use serde_json::json;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{File, FilePage, Reclaimable};
use slackwater_blockstore::{InodeId, SetAttributes, SpecialFile};

use crate::harness::Face;

#[tokio::test]
async fn a_file_is_made_shown_resized_renamed_and_deleted() {
    let face = Face::new();
    let made =
        face.post("/v1/files", json!({"path": "/images/debian.img", "size_bytes": 1 << 30})).await;
    let made = made.expect(201);
    assert_eq!(made.header(header::LOCATION), "/v1/files/images%2Fdebian.img");
    let file: File = made.parse();
    assert_eq!(
        (file.path.as_str(), file.size_bytes, file.used_bytes),
        ("images/debian.img", 1 << 30, 0)
    );
    assert_eq!(face.get(made.header(header::LOCATION)).await.expect(200).parse::<File>(), file);

    let route = "/v1/files/images%2Fdebian.img";
    let grown: File = face.patch(route, json!({"size_bytes": 5000})).await.expect(200).parse();
    assert_eq!(grown.size_bytes, 5000);
    let moved: File = face.patch(route, json!({"path": "other/data"})).await.expect(200).parse();
    assert_eq!((moved.path.as_str(), moved.size_bytes), ("other/data", 5000));
    face.get(route).await.problem(ProblemCode::NotFound);
    // A file may be called like the end of another route.
    face.get("/v1/files/other%2Fdata").await.expect(200);
    assert!(face.delete("/v1/files/other%2Fdata").await.expect(204).body.is_empty());
    face.delete("/v1/files/other%2Fdata").await.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn a_path_or_size_without_meaning_is_refused() {
    let face = Face::new();
    for path in ["", "/", "a//b", "../etc/passwd", "a/../b", "a/.", "a\0b", "a/"] {
        let answer = face.post("/v1/files", json!({"path": path, "size_bytes": 1})).await;
        answer.problem(ProblemCode::InvalidValue);
    }
    let long = "x".repeat(256);
    let answer = face.post("/v1/files", json!({"path": long, "size_bytes": 1})).await;
    answer.problem(ProblemCode::NameTooLong);
    let answer = face.post("/v1/files", json!({"path": "a", "size_bytes": u64::MAX})).await;
    answer.problem(ProblemCode::FileTooBig);
    face.get("/v1/files/a%2F..%2Fb").await.problem(ProblemCode::InvalidValue);
    face.get("/v1/files/%ff").await.problem(ProblemCode::BadQuery);
    assert_eq!(face.get("/v1/files").await.parse::<FilePage>().items, vec![]);
}

#[tokio::test]
async fn what_is_in_the_way_is_a_conflict() {
    let face = Face::new();
    face.make_file("dir/a", 1).await;
    face.make_file("dir/b", 1).await;
    let again = face.post("/v1/files", json!({"path": "dir/a", "size_bytes": 2})).await;
    again.problem(ProblemCode::Exists);
    let below = face.post("/v1/files", json!({"path": "dir/a/b", "size_bytes": 2})).await;
    below.problem(ProblemCode::NotDirectory);
    let onto = face.patch("/v1/files/dir%2Fa", json!({"path": "dir/b"})).await;
    onto.problem(ProblemCode::Exists);
    face.get("/v1/files/dir").await.problem(ProblemCode::WrongKind);
    face.patch("/v1/files/dir", json!({"path": "moved"})).await.problem(ProblemCode::WrongKind);
    face.delete("/v1/files/dir").await.problem(ProblemCode::NotEmpty);
    assert_eq!(face.get("/v1/files/dir%2Fa").await.parse::<File>().size_bytes, 1);
}

/// By REST they can be told, and removed.
#[tokio::test]
async fn special_files_are_no_files() {
    let face = Face::new();
    let name = slackwater_blockstore::Name::new(b"pipe").unwrap();
    let (root, set) = (InodeId::ROOT, SetAttributes::default());
    face.store.make_special_file(root, &name, SpecialFile::Fifo, &set).unwrap();
    assert_eq!(face.get("/v1/files").await.parse::<FilePage>().items, vec![]);
    for answer in [
        face.get("/v1/files/pipe").await,
        face.get("/v1/files/pipe/data").await,
        face.put("/v1/files/pipe/data", "x").await,
        face.patch("/v1/files/pipe", json!({"size_bytes": 2})).await,
        face.post("/v1/snapshots", json!({"path": "pipe"})).await,
    ] {
        let problem = answer.problem(ProblemCode::WrongKind);
        assert!(problem.detail.contains("`pipe` is a named pipe, not a file"), "{problem:?}");
    }
    let taken = face.post("/v1/files", json!({"path": "pipe", "size_bytes": 1})).await;
    taken.problem(ProblemCode::Exists);
    let below = face.post("/v1/files", json!({"path": "pipe/a", "size_bytes": 1})).await;
    below.problem(ProblemCode::NotDirectory);
    assert_eq!(face.delete("/v1/files/pipe").await.status, 204);
    face.get("/v1/files/pipe").await.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn a_change_is_exactly_one() {
    let face = Face::new();
    face.make_file("a", 1).await;
    for body in [json!({}), json!({"size_bytes": 2, "path": "b"})] {
        face.patch("/v1/files/a", body).await.problem(ProblemCode::InvalidValue);
    }
    face.patch("/v1/files/gone", json!({"size_bytes": 2})).await.problem(ProblemCode::NotFound);
    face.patch("/v1/files/gone", json!({"path": "b"})).await.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn pages_hold_every_file_once_and_in_order() {
    let face = Face::new();
    let mut paths: Vec<String> =
        (0..25).map(|number| format!("d{}/f {number:02}", number % 3)).collect();
    for path in &paths {
        face.make_file(path, 4096).await;
    }
    paths.sort();
    let mut listed = Vec::new();
    let mut after = String::new();
    for _ in 0..paths.len() {
        let page: FilePage =
            face.get(&format!("/v1/files?limit=4{after}")).await.expect(200).parse();
        assert!(page.items.len() <= 4);
        listed.extend(page.items.into_iter().map(|file| file.path));
        let Some(next) = page.next else { break };
        after = format!("&after={}", slackwater_api::paths::encode_component(next.as_bytes()));
    }
    assert_eq!(listed, paths);
    let last = face.get("/v1/files?limit=25").await.json();
    assert_eq!(last.get("next"), Some(&serde_json::Value::Null), "{last}");
    let exact: FilePage = face.get("/v1/files?limit=25").await.parse();
    assert_eq!((exact.items.len(), exact.next), (25, None));
    let some: FilePage = face.get("/v1/files?prefix=/d1/f%200").await.parse();
    assert_eq!(some.items.len(), 3);
    for bad in ["limit=0", "limit=1001", "sort=up", "after=a//b", "prefix=a&prefix=b"] {
        face.get(&format!("/v1/files?{bad}")).await.problem(ProblemCode::BadQuery);
    }
}

#[tokio::test]
async fn a_clone_is_a_file_of_its_own() {
    let face = Face::new();
    face.make_file("base", 8192).await;
    face.put("/v1/files/base/data", vec![7; 8192]).await.expect(200);
    let snapshot = face.take_snapshot("base").await;
    let body = json!({"snapshot_id": snapshot.id, "path": "clones/one"});
    let answer = face.post("/v1/clones", body.clone()).await.expect(201);
    assert_eq!(answer.header(header::LOCATION), "/v1/files/clones%2Fone");
    let clone: File = answer.parse();
    assert_eq!((clone.size_bytes, clone.unique_bytes), (8192, 0));
    assert_eq!(clone.origin_snapshot_id, Some(snapshot.id));
    face.put("/v1/files/clones%2Fone/data", vec![9; 4096]).await.expect(200);
    assert_eq!(face.get("/v1/files/base/data").await.body, vec![7; 8192]);
    let expected = [[9; 4096], [7; 4096]].concat();
    assert_eq!(face.get("/v1/files/clones%2Fone/data").await.body, expected);

    face.post("/v1/clones", body).await.problem(ProblemCode::Exists);
    let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    let unknown = face.post("/v1/clones", json!({"snapshot_id": id, "path": "x"})).await;
    unknown.problem(ProblemCode::NotFound);
    let no_id = face.post("/v1/clones", json!({"snapshot_id": "one", "path": "x"})).await;
    no_id.problem(ProblemCode::InvalidValue);
    let outside =
        face.post("/v1/clones", json!({"snapshot_id": snapshot.id, "path": "../x"})).await;
    outside.problem(ProblemCode::InvalidValue);
}

/// Two files that hold the same share it, whatever `unique_bytes` says.
#[tokio::test]
async fn what_a_delete_would_free_is_told() {
    let face = Face::new();
    let told = async |route: &str| -> Reclaimable {
        face.get(&format!("{route}/reclaimable")).await.expect(200).parse()
    };
    for path in ["a", "b"] {
        face.make_file(path, 8192).await;
        face.put(&format!("/v1/files/{path}/data"), vec![7; 4096]).await.expect(200);
        let file: File = face.get(&format!("/v1/files/{path}")).await.parse();
        assert_eq!(file.unique_bytes, 4096);
    }
    let nothing = Reclaimable { bytes: 0, blocks: 0, sampled_one_in: 1 };
    assert_eq!(told("/v1/files/a").await, nothing);
    let snapshot = face.take_snapshot("a").await;
    face.call(Method::DELETE, "/v1/files/b", &[], None).await.expect(204);
    face.store.gc().unwrap();
    assert_eq!(told("/v1/files/a").await, nothing);
    face.call(Method::DELETE, "/v1/files/a", &[], None).await.expect(204);
    face.store.gc().unwrap();
    let snapshot = told(&format!("/v1/snapshots/{}", snapshot.id)).await;
    assert_eq!(snapshot.blocks, 1);
    // As it is stored: one byte 4096 times takes few bytes.
    assert!((1..4096).contains(&snapshot.bytes), "{snapshot:?}");
    face.get("/v1/files/a/reclaimable").await.problem(ProblemCode::NotFound);
    let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    face.get(&format!("/v1/snapshots/{id}/reclaimable")).await.problem(ProblemCode::NotFound);
    face.get("/v1/snapshots/one/reclaimable").await.problem(ProblemCode::InvalidValue);
}

#[tokio::test]
async fn head_answers_as_get_without_a_body() {
    let face = Face::new();
    face.make_file("a", 5000).await;
    let head = face.call(Method::HEAD, "/v1/files/a/data", &[], None).await.expect(200);
    assert_eq!((head.header(header::CONTENT_LENGTH), head.body.len()), ("5000", 0));
    face.call(Method::HEAD, "/v1/files/b/data", &[], None).await.expect(404);
}

//! Snapshots: take, list, label, delete, diff and map.

use std::sync::Arc;

use axum::http::{Method, header};
use serde_json::json;
use slackwater_api::block_map::BlockMap;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{
    DeletionPolicy, DiffPage, ExtentKind, File, Snapshot, SnapshotPage, SnapshotReference, Stats,
};
use slackwater_api::{ApiOptions, ReferenceKey};
use slackwater_blockstore::disk::MemoryDisk;

use crate::harness::{Face, memory_store, noise};
use crate::workers::{call, disk, face as face_with_tokens, joined};

const UNKNOWN: &str = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";

#[tokio::test]
async fn a_snapshot_keeps_what_it_was_given() {
    let face = Face::new();
    face.make_file("dir/a", 8192).await;
    face.put("/v1/files/dir%2Fa/data", vec![1; 4096]).await.expect(200);
    let body = json!({
        "path": "/dir/a", "name": "first", "labels": {"k": "v"},
        "deletion_policy": "on_zero_clones", "expires_at": "2100-01-02T03:04:05Z",
    });
    let answer = face.post("/v1/snapshots", body).await.expect(201);
    let snapshot: Snapshot = answer.parse();
    assert_eq!(answer.header(header::LOCATION), format!("/v1/snapshots/{}", snapshot.id));
    assert_eq!((snapshot.path.as_str(), snapshot.name.as_deref()), ("dir/a", Some("first")));
    assert_eq!((snapshot.size_bytes, snapshot.used_bytes, snapshot.clone_count), (8192, 4096, 0));
    assert_eq!(snapshot.deletion_policy, DeletionPolicy::OnZeroClones);
    assert_eq!(answer.json()["expires_at"], "2100-01-02T03:04:05.000000000Z");
    let route = format!("/v1/snapshots/{}", snapshot.id);
    assert_eq!(face.get(&route).await.parse::<Snapshot>(), snapshot);

    let clone = json!({"snapshot_id": snapshot.id, "path": "clone"});
    face.post("/v1/clones", clone).await.expect(201);
    let labelled = face.patch(&route, json!({"labels": {"x": "y", "z": ""}})).await.expect(200);
    let labelled: Snapshot = labelled.parse();
    assert_eq!((labelled.labels.len(), labelled.clone_count), (2, 1));
    assert!(!labelled.labels.contains_key("k"), "labels are replaced");

    face.delete(&route).await.expect(204);
    face.get(&route).await.problem(ProblemCode::NotFound);
    face.delete(&route).await.problem(ProblemCode::NotFound);
    face.patch(&route, json!({"labels": {}})).await.problem(ProblemCode::NotFound);
    face.get("/v1/files/clone").await.expect(200);
}

/// A caller's clock may be wrong: the appliance counts.
#[tokio::test]
async fn a_snapshot_lives_so_long_by_the_appliances_clock() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let now = async || face.get("/v1/stats").await.parse::<Stats>().now.unwrap().as_nanos();
    let (before, hour) = (now().await, 3_600_000_000_000);
    let taken = face.post("/v1/snapshots", json!({"path": "a", "expires_in_seconds": 3600})).await;
    let ends = taken.expect(201).parse::<Snapshot>().expires_at.unwrap().as_nanos();
    assert!((before + hour..now().await + hour).contains(&ends));
    let both = json!({
        "path": "a", "expires_in_seconds": 1, "expires_at": "2100-01-02T03:04:05Z",
    });
    // By a clock that is believed at once here.
    let past = json!({"path": "a", "expires_at": "2000-01-01T00:00:00Z"});
    let past = face.post("/v1/snapshots", past).await.expect(201).parse::<Snapshot>();
    face.call(axum::http::Method::POST, "/v1/gc", &[], None).await.expect(200);
    face.get(&format!("/v1/snapshots/{}", past.id)).await.expect(404);
    for wrong in [both, json!({"path": "a", "expires_in_seconds": u64::MAX})] {
        face.post("/v1/snapshots", wrong).await.problem(ProblemCode::InvalidValue);
    }
}

#[tokio::test]
async fn a_name_has_one_holder_and_the_conflict_says_which() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let body = json!({"path": "a", "name": "layer"});
    let first: Snapshot = face.post("/v1/snapshots", body.clone()).await.expect(201).parse();
    let problem = face.post("/v1/snapshots", body).await.problem(ProblemCode::Exists);
    assert_eq!(problem.existing_snapshot_id, Some(first.id));
}

#[tokio::test]
async fn what_has_no_meaning_is_refused() {
    let face = Face::new();
    face.make_file("dir/a", 1).await;
    let post = async |body| face.post("/v1/snapshots", body).await;
    post(json!({"path": "gone"})).await.problem(ProblemCode::NotFound);
    post(json!({"path": "dir"})).await.problem(ProblemCode::WrongKind);
    post(json!({"path": "../a"})).await.problem(ProblemCode::InvalidValue);
    post(json!({"path": "dir/a", "nmae": "x"})).await.problem(ProblemCode::InvalidValue);
    post(json!({"path": "dir/a", "expires_at": "tomorrow"}))
        .await
        .problem(ProblemCode::InvalidValue);
    let labels: serde_json::Map<_, _> = (0..65).map(|n| (n.to_string(), json!("x"))).collect();
    post(json!({"path": "dir/a", "labels": labels})).await.problem(ProblemCode::InvalidValue);
    for id in ["1", "6F1F3C1E-5D0C-4D55-9D61-2F5B6F0F6C11"] {
        face.get(&format!("/v1/snapshots/{id}")).await.problem(ProblemCode::InvalidValue);
        face.delete(&format!("/v1/snapshots/{id}")).await.problem(ProblemCode::InvalidValue);
    }
    assert_eq!(face.get("/v1/snapshots").await.parse::<SnapshotPage>().items, vec![]);
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let face = Face::new();
    face.make_file("a", 1).await;
    face.make_file("b c", 1).await;
    let mut ids = Vec::new();
    for number in 0..9 {
        let path = if number % 3 == 0 { "a" } else { "b c" };
        let body = json!({
            "path": path, "name": format!("n{number}"),
            "labels": {"parity": (number % 2).to_string(), "eq": "a=b"},
        });
        ids.push(face.post("/v1/snapshots", body).await.expect(201).parse::<Snapshot>().id);
    }
    ids.sort();
    let mut listed = Vec::new();
    let mut after = String::new();
    while listed.len() < 100 {
        let page = face.get(&format!("/v1/snapshots?limit=2{after}")).await.expect(200);
        let page: SnapshotPage = page.parse();
        listed.extend(page.items.iter().map(|snapshot| snapshot.id));
        let Some(next) = page.next else { break };
        after = format!("&after={next}");
    }
    assert_eq!(listed, ids);
    let count = async |query: &str| {
        face.get(&format!("/v1/snapshots?{query}"))
            .await
            .expect(200)
            .parse::<SnapshotPage>()
            .items
            .len()
    };
    assert_eq!(count("path=/a").await, 3);
    assert_eq!(count("path=b+c").await, 6);
    assert_eq!(count("name=n4").await, 1);
    assert_eq!(count("label=parity%3D1").await, 4);
    assert_eq!(count("label=parity=1&label=eq=a=b&path=a").await, 1);
    assert_eq!(count("label=parity=2").await, 0);
    for bad in ["label=parity", "labels=x=y", "after=x", "limit=many"] {
        face.get(&format!("/v1/snapshots?{bad}")).await.problem(ProblemCode::BadQuery);
    }
}

#[tokio::test]
async fn a_page_of_large_labels_ends_early() {
    let face = Face::new();
    face.make_file("a", 1).await;
    let large: serde_json::Map<_, _> =
        (0..64).map(|number| (number.to_string(), json!("x".repeat(4096)))).collect();
    for _ in 0..20 {
        let body = json!({"path": "a", "labels": large});
        face.post("/v1/snapshots", body).await.expect(201);
    }
    let answer = face.get("/v1/snapshots?limit=1000").await.expect(200);
    assert!(answer.body.len() < 6 << 20, "{} bytes", answer.body.len());
    let mut page: SnapshotPage = answer.parse();
    let mut count = page.items.len();
    while let Some(next) = page.next {
        page = face.get(&format!("/v1/snapshots?limit=1000&after={next}")).await.parse();
        count += page.items.len();
    }
    assert_eq!(count, 20);
}

/// The extents of every page, each as its first block, its length and its kind.
async fn all_pages(face: &Face, route: &str) -> Vec<(u64, u64, ExtentKind)> {
    let mut blocks = Vec::new();
    let mut after = String::new();
    for pages in 1..100 {
        let page: DiffPage = face.get(&format!("{route}{after}")).await.expect(200).parse();
        assert!(page.items.len() <= 2);
        let found = page.items.iter();
        blocks.extend(found.map(|one| (one.offset_bytes / 4096, one.length_bytes, one.kind)));
        let Some(next) = page.next else {
            assert!(pages > 1, "several pages");
            break;
        };
        after = format!("&after={next}");
    }
    blocks
}

#[tokio::test]
async fn a_diff_lists_what_changed_in_pages() {
    let face = Face::new();
    face.make_file("a", 1 << 20).await;
    face.put("/v1/files/a/data?offset=0", noise(1, 64 << 10)).await.expect(200);
    let base = face.take_snapshot("a").await;
    for block in [2, 5, 9, 100] {
        face.put(&format!("/v1/files/a/data?offset={}", block * 4096), noise(block, 4096))
            .await
            .expect(200);
    }
    face.put(&format!("/v1/files/a/data?offset={}", 7 * 4096), vec![0; 4096]).await.expect(200);
    let target = face.take_snapshot("a").await;
    let route = format!("/v1/snapshots/{}/diff", target.id);
    let blocks = all_pages(&face, &format!("{route}?base={}&limit=2", base.id)).await;
    let data = |block| (block, 4096, ExtentKind::Data);
    assert_eq!(blocks, [data(2), data(5), (7, 4096, ExtentKind::Hole), data(9), data(100)]);
    let whole: DiffPage =
        face.get(&format!("/v1/snapshots/{}/diff", base.id)).await.expect(200).parse();
    let data: u64 = whole
        .items
        .iter()
        .filter(|one| one.kind == ExtentKind::Data)
        .map(|one| one.length_bytes)
        .sum();
    assert_eq!(data, 64 << 10);

    face.get(&format!("{route}?base={UNKNOWN}")).await.problem(ProblemCode::NotFound);
    face.get(&format!("/v1/snapshots/{UNKNOWN}/diff")).await.problem(ProblemCode::NotFound);
    for bad in ["base=1", "after=x", "limit=0"] {
        face.get(&format!("{route}?{bad}")).await.problem(ProblemCode::BadQuery);
    }
}

#[tokio::test]
async fn a_map_names_each_block() {
    let face = Face::new();
    face.make_file("a", 20_000).await;
    face.put("/v1/files/a/data?offset=4096", noise(3, 4096)).await.expect(200);
    face.put("/v1/files/a/data?offset=16384", noise(4, 3616)).await.expect(200);
    let snapshot = face.take_snapshot("a").await;
    let mut last = noise(4, 3616);
    last.resize(4096, 0);
    let hash = |bytes: &[u8]| Some(*blake3::hash(bytes).as_bytes());
    let expected = [None, hash(&noise(3, 4096)), None, None, hash(&last)];
    for route in ["/v1/files/a/map".to_owned(), format!("/v1/snapshots/{}/map", snapshot.id)] {
        let answer = face.get(&route).await.expect(200);
        assert_eq!(answer.header(header::CONTENT_TYPE), "application/octet-stream");
        let map = BlockMap::decode(&answer.body).unwrap();
        assert_eq!((map.block_bytes, map.offset_bytes, map.size_bytes), (4096, 0, 20_000));
        assert_eq!(map.blocks, expected);
        let part = face.get(&format!("{route}?offset=5000&length=10")).await.expect(200);
        let part = BlockMap::decode(&part.body).unwrap();
        assert_eq!((part.offset_bytes, part.blocks.as_slice()), (4096, &expected[1..2]));
        let beyond = face.get(&format!("{route}?offset=99999999")).await.expect(200);
        assert_eq!(BlockMap::decode(&beyond.body).unwrap().blocks, vec![]);
        face.get(&format!("{route}?offset=x")).await.problem(ProblemCode::BadQuery);
    }
    face.get("/v1/files/gone/map").await.problem(ProblemCode::NotFound);
    for place in ["/v1/files/a/map".to_owned(), format!("/v1/snapshots/{UNKNOWN}/map")] {
        let beyond = format!("{place}?offset={}", (1_u64 << 62) + 1);
        face.get(&beyond).await.problem(ProblemCode::InvalidValue);
    }
    face.get(&format!("/v1/snapshots/{UNKNOWN}/map")).await.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn a_map_of_a_huge_sparse_file_is_small() {
    let face = Face::new();
    face.make_file("a", 1 << 40).await;
    let answer = face.get("/v1/files/a/map").await.expect(200);
    assert!(answer.body.len() < 100, "{} bytes", answer.body.len());
    let map = BlockMap::decode(&answer.body).unwrap();
    assert_eq!(u64::try_from(map.blocks.len()).unwrap(), slackwater_api::block_map::BLOCKS_MAX);
    assert_eq!(face.get("/v1/files/a").await.parse::<File>().used_bytes, 0);
}

#[tokio::test]
async fn a_reference_is_always_the_same_and_needs_the_key() {
    let with_key = |key: u8| {
        let reference_key = ReferenceKey::from_bytes([key; ReferenceKey::BYTES]).into();
        ApiOptions { reference_key, ..ApiOptions::default() }
    };
    let disk = MemoryDisk::new();
    let store = memory_store(&disk, |_| {});
    let face = Face::over(Arc::clone(&store), disk.clone(), with_key(1));
    face.make_file("a", 8192).await;
    let taken = async |face: &Face| {
        face.post("/v1/snapshots", json!({"path": "a"})).await.expect(201).parse::<Snapshot>()
    };
    let (one, two) = (taken(&face).await, taken(&face).await);
    let refer =
        async |face: &Face, id: &str| face.get(&format!("/v1/snapshots/{id}/reference")).await;
    let first: SnapshotReference = refer(&face, &one.id.to_string()).await.expect(200).parse();
    assert_eq!((first.snapshot_id, first.size_bytes), (one.id, 8192));
    let store_id = face.get("/v1/stats").await.parse::<Stats>().store_id;
    assert_eq!(first.store_id, store_id);
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    assert!(first.mac.len() == 64 && first.mac.bytes().all(is_digit), "{first:?}");
    // Neither a change of the file nor of the labels is one of the snapshot.
    face.put("/v1/files/a/data", vec![1; 4096]).await.expect(200);
    face.patch(&format!("/v1/snapshots/{}", one.id), json!({"labels": {"k": "v"}}))
        .await
        .expect(200);
    assert_eq!(refer(&face, &one.id.to_string()).await.parse::<SnapshotReference>(), first);
    let second: SnapshotReference = refer(&face, &two.id.to_string()).await.expect(200).parse();
    assert_ne!(second.mac, first.mac);
    refer(&face, UNKNOWN).await.problem(ProblemCode::NotFound);
    refer(&face, "x").await.problem(ProblemCode::InvalidValue);

    let other = Face::over(store, disk, with_key(2));
    let foreign: SnapshotReference = refer(&other, &one.id.to_string()).await.expect(200).parse();
    assert_ne!(foreign.mac, first.mac);
    assert_eq!(SnapshotReference { mac: first.mac.clone(), ..foreign }, first);

    let face = Face::new();
    face.make_file("a", 8192).await;
    let snapshot = taken(&face).await;
    refer(&face, &snapshot.id.to_string()).await.problem(ProblemCode::NoSpace);
    refer(&face, UNKNOWN).await.problem(ProblemCode::NotFound);
}

/// What is left when a machine that was taken over deletes all that it can.
#[tokio::test]
async fn what_a_token_keeps_of_a_workers_file_is_not_the_workers_to_end() {
    let (face, admin) = (face_with_tokens(), "root-secret");
    let one = joined(&face, "one", 1).await;
    let (path, by_worker) = disk(&face, &one, 1).await;
    let take = async |caller: &str, policy: &str| -> Snapshot {
        let body = json!({"path": path, "deletion_policy": policy, "labels": {"k": "v"}});
        let taken = call(&face, caller, Method::POST, "/v1/snapshots", Some(body)).await;
        taken.expect(201).parse()
    };
    let kept = take(admin, "keep").await;
    assert_eq!(kept.labels.len(), 1, "what the appliance notes is not shown: {:?}", kept.labels);
    let route = format!("/v1/snapshots/{}", kept.id);
    let labels = json!({"labels": {}});
    for (method, body) in [(Method::DELETE, None), (Method::PATCH, Some(labels.clone()))] {
        let refused = call(&face, &one, method.clone(), &route, body).await;
        let problem = refused.problem(ProblemCode::Forbidden);
        assert!(problem.detail.contains("`root` took it to keep"), "{}", problem.detail);
    }
    // It reads it, and a clone of its own that it deletes again ends nothing.
    let clone = format!("{path}-clone");
    let body = json!({"snapshot_id": kept.id, "path": clone});
    call(&face, &one, Method::POST, "/v1/clones", Some(body)).await.expect(201);
    let of_clone = format!("/v1/files/{}", clone.replace('/', "%2F"));
    call(&face, &one, Method::DELETE, &of_clone, None).await.expect(204);
    let of_file = format!("/v1/files/{}", path.replace('/', "%2F"));
    call(&face, &one, Method::DELETE, &of_file, None).await.expect(204);
    assert_eq!(call(&face, admin, Method::GET, &route, None).await.parse::<Snapshot>(), kept);
    // What a token relabels stays kept.
    call(&face, admin, Method::PATCH, &route, Some(labels)).await.expect(200);
    call(&face, &one, Method::DELETE, &route, None).await.problem(ProblemCode::Forbidden);
    call(&face, admin, Method::DELETE, &route, None).await.expect(204);
    let own = format!("/v1/snapshots/{}", by_worker.id);
    call(&face, &one, Method::DELETE, &own, None).await.expect(204);
}

/// A driver that had a token, and joins later, deletes what it took before.
#[tokio::test]
async fn what_goes_with_its_last_clone_is_the_workers_also_if_a_token_took_it() {
    let face = face_with_tokens();
    let one = joined(&face, "one", 1).await;
    let (path, _) = disk(&face, &one, 1).await;
    let body = json!({"path": path, "deletion_policy": "on_zero_clones"});
    let taken = call(&face, "root-secret", Method::POST, "/v1/snapshots", Some(body)).await;
    let route = format!("/v1/snapshots/{}", taken.expect(201).parse::<Snapshot>().id);
    call(&face, &one, Method::DELETE, &route, None).await.expect(204);
}

//! Chains: registered by calls of their own, told with who did it, and by no other call.

use axum::http::{Method, header};
use serde_json::{Value, json};
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{DeletionPolicy, File, Labels, Snapshot, SnapshotPage};
use slackwater_api::{ApiOptions, Role, Tokens};

use crate::harness::{Answer, Face, noise, token};

const SIZE_BYTES: u64 = 8192;

fn chain(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

/// A face with two workers and one that only reads.
fn face() -> Face {
    Face::with(ApiOptions {
        tokens: Tokens::new(vec![
            token("one", Role::Worker),
            token("two", Role::Worker),
            token("viewer", Role::ReadOnly),
        ])
        .into(),
        ..ApiOptions::default()
    })
}

async fn call(face: &Face, who: &str, method: Method, uri: &str, body: Option<Value>) -> Answer {
    let bearer = format!("Bearer {who}-secret");
    face.call(method, uri, &[("authorization", &bearer)], body).await
}

async fn post(face: &Face, who: &str, uri: &str, body: Value) -> Answer {
    call(face, who, Method::POST, uri, Some(body)).await
}

async fn get(face: &Face, uri: &str) -> Answer {
    call(face, "viewer", Method::GET, uri, None).await
}

/// The chains that a snapshot was registered as, and by whom.
fn makers(snapshot: &Snapshot) -> Vec<(String, Vec<String>)> {
    let told = snapshot.chains.iter();
    told.map(|(id, makers)| (id.to_string(), makers.iter().cloned().collect())).collect()
}

async fn file(face: &Face, path: &str) {
    let body = json!({"path": path, "size_bytes": SIZE_BYTES});
    post(face, "one", "/v1/files", body).await.expect(201);
}

#[tokio::test]
async fn a_chain_is_registered_once_and_tells_its_maker() {
    let face = face();
    file(&face, "a").await;
    let body = json!({"path": "a", "chain_id": chain('1'), "labels": {"k": "v"}});
    post(&face, "viewer", "/v1/chains", body.clone()).await.problem(ProblemCode::Forbidden);
    let answer = post(&face, "one", "/v1/chains", body.clone()).await.expect(201);
    let made: Snapshot = answer.parse();
    assert_eq!(answer.header(header::LOCATION), format!("/v1/snapshots/{}", made.id));
    assert_eq!(makers(&made), [(chain('1'), vec!["one".to_owned()])]);
    assert_eq!(made.labels, Labels::from([("k".to_owned(), "v".to_owned())]));
    assert_eq!(made.deletion_policy, DeletionPolicy::OnZeroClones);
    assert!(made.expires_at.unwrap() > made.created_at);

    let taken = post(&face, "two", "/v1/chains", body).await.problem(ProblemCode::Exists);
    assert_eq!(taken.existing_snapshot_id, Some(made.id));
    let route = |chain: &str, size_bytes: u64| format!("/v1/chains/{chain}/{size_bytes}");
    let found: Snapshot = get(&face, &route(&chain('1'), SIZE_BYTES)).await.expect(200).parse();
    assert_eq!(found, made);
    for (chain, size_bytes) in [(chain('2'), SIZE_BYTES), (chain('1'), SIZE_BYTES + 4096)] {
        get(&face, &route(&chain, size_bytes)).await.problem(ProblemCode::NotFound);
    }
    // One of another size is another one.
    post(&face, "two", "/v1/files", json!({"path": "b", "size_bytes": 4096})).await.expect(201);
    let other = json!({"path": "b", "chain_id": chain('1')});
    let other: Snapshot = post(&face, "two", "/v1/chains", other).await.expect(201).parse();
    assert_eq!(makers(&other), [(chain('1'), vec!["two".to_owned()])]);
    // It is free again when its snapshot is gone.
    let uri = format!("/v1/snapshots/{}", made.id);
    call(&face, "one", Method::DELETE, &uri, None).await.expect(204);
    get(&face, &route(&chain('1'), SIZE_BYTES)).await.problem(ProblemCode::NotFound);
    let again = json!({"path": "a", "chain_id": chain('1')});
    post(&face, "two", "/v1/chains", again).await.expect(201);
}

#[tokio::test]
async fn a_file_that_becomes_the_clone_keeps_what_is_registered() {
    let face = face();
    file(&face, "a").await;
    let origin = async || {
        let file: File = get(&face, "/v1/files/a").await.expect(200).parse();
        file.origin_snapshot_id
    };
    let body = json!({"path": "a", "chain_id": chain('1'), "becomes_clone": true});
    let made: Snapshot = post(&face, "one", "/v1/chains", body.clone()).await.expect(201).parse();
    assert_eq!((made.clone_count, origin().await), (1, Some(made.id)));
    // It is safe to ask again, by either call.
    let asked = [
        ("/v1/chains", body),
        ("/v1/chains", json!({"path": "a", "chain_id": chain('2'), "becomes_clone": true})),
        ("/v1/snapshots", json!({"path": "a", "becomes_clone": true})),
        ("/v1/snapshots", json!({"path": "a", "name": "n", "becomes_clone": true})),
    ];
    for (uri, body) in asked {
        let refused = post(&face, "one", uri, body).await.problem(ProblemCode::Exists);
        assert_eq!((refused.existing_snapshot_id, origin().await), (Some(made.id), Some(made.id)));
    }
    // A second file is refused, and stays as it is.
    file(&face, "b").await;
    let again = json!({"path": "b", "chain_id": chain('1'), "becomes_clone": true});
    let refused = post(&face, "two", "/v1/chains", again).await.problem(ProblemCode::Exists);
    assert_eq!(refused.existing_snapshot_id, Some(made.id));
    let file: File = get(&face, "/v1/files/b").await.expect(200).parse();
    assert_eq!(file.origin_snapshot_id, None);
    let body = json!({"path": "b", "deletion_policy": "on_zero_clones", "becomes_clone": true});
    let other: Snapshot = post(&face, "one", "/v1/snapshots", body).await.expect(201).parse();
    assert_eq!(other.clone_count, 1);
    for (path, snapshot) in [("a", made.id), ("b", other.id)] {
        call(&face, "one", Method::DELETE, &format!("/v1/files/{path}"), None).await.expect(204);
        get(&face, &format!("/v1/snapshots/{snapshot}")).await.problem(ProblemCode::NotFound);
    }
}

#[tokio::test]
async fn what_has_no_meaning_is_refused() {
    let face = face();
    file(&face, "a").await;
    for bad in ["", "sha256:", "x", &chain('g'), &format!("{}0", chain('1'))] {
        let body = json!({"path": "a", "chain_id": bad});
        post(&face, "one", "/v1/chains", body).await.problem(ProblemCode::InvalidValue);
    }
    let gone = json!({"path": "gone", "chain_id": chain('1')});
    post(&face, "one", "/v1/chains", gone).await.problem(ProblemCode::NotFound);
    let reserved = json!({"path": "a", "chain_id": chain('1'), "labels": {"slackwater:x": ""}});
    post(&face, "one", "/v1/chains", reserved).await.problem(ProblemCode::InvalidValue);
    for bad in [format!("/v1/chains/x/{SIZE_BYTES}"), format!("/v1/chains/{}/-1", chain('1'))] {
        get(&face, &bad).await.problem(ProblemCode::InvalidValue);
    }
    let unknown = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    for (id, bad, code) in [
        (unknown, chain('1'), ProblemCode::NotFound),
        ("x", chain('1'), ProblemCode::InvalidValue),
        (unknown, chain('g'), ProblemCode::InvalidValue),
    ] {
        let uri = format!("/v1/snapshots/{id}/chains/{bad}");
        call(&face, "one", Method::PUT, &uri, None).await.problem(code);
    }
}

#[tokio::test]
async fn no_other_call_makes_a_chain_or_takes_one_away() {
    let face = face();
    file(&face, "a").await;
    let reserved = format!("slackwater:chain:{}", chain('1'));
    for bad in [
        json!({"path": "a", "name": format!("{reserved}:{SIZE_BYTES}")}),
        json!({"path": "a", "labels": {"k": "v", (reserved.as_str()): "one"}}),
    ] {
        post(&face, "one", "/v1/snapshots", bad).await.problem(ProblemCode::InvalidValue);
    }
    let body = json!({"path": "a", "name": format!("chain:{}", chain('1'))});
    let plain: Snapshot = post(&face, "one", "/v1/snapshots", body).await.expect(201).parse();
    assert!(plain.chains.is_empty());

    let route = format!("/v1/snapshots/{}", plain.id);
    let add = |who, digit| {
        let (face, uri) = (&face, format!("{route}/chains/{}", chain(digit)));
        async move { call(face, who, Method::PUT, &uri, None).await }
    };
    add("viewer", '1').await.problem(ProblemCode::Forbidden);
    add("one", '1').await.expect(200);
    let both: Snapshot = add("two", '2').await.expect(200).parse();
    let expected = [(chain('1'), vec!["one".to_owned()]), (chain('2'), vec!["two".to_owned()])];
    assert_eq!(makers(&both), expected);
    assert!(both.labels.is_empty());

    let patch = |labels: Value| {
        call(&face, "one", Method::PATCH, &route, Some(json!({ "labels": labels })))
    };
    patch(json!({(reserved.as_str()): "two"})).await.problem(ProblemCode::InvalidValue);
    let changed: Snapshot = patch(json!({"k": "v"})).await.expect(200).parse();
    assert_eq!(makers(&changed), expected);
    assert_eq!(changed.labels.len(), 1);
    let changed: Snapshot = patch(json!({})).await.expect(200).parse();
    assert_eq!((makers(&changed).len(), changed.labels.len()), (2, 0));
    let page: SnapshotPage = get(&face, "/v1/snapshots").await.expect(200).parse();
    assert_eq!(page.items, [changed]);
    // The word of one does not take away that of another.
    for _ in 0..2 {
        let again: Snapshot = add("two", '1').await.expect(200).parse();
        assert_eq!(makers(&again)[0].1, ["one", "two"]);
    }
}

/// Sixty-four labels at most, chains among them: the one too many is refused, and none is lost.
#[tokio::test]
async fn chains_count_as_labels() {
    let face = Face::new();
    face.make_file("a", SIZE_BYTES).await;
    face.put("/v1/files/a/data", noise(1, 100)).await.expect(200);
    let snapshot = face.take_snapshot("a").await;
    let add = |number: usize| {
        let uri = format!("/v1/snapshots/{}/chains/sha256:{number:064x}", snapshot.id);
        let face = &face;
        async move { face.call(Method::PUT, &uri, &[], None).await }
    };
    for number in 0..64 {
        let added: Snapshot = add(number).await.expect(200).parse();
        assert!(makers(&added).iter().all(|(_, makers)| *makers == [""]), "no token was asked for");
    }
    add(64).await.problem(ProblemCode::InvalidValue);
    let uri = format!("/v1/snapshots/{}", snapshot.id);
    assert_eq!(face.get(&uri).await.parse::<Snapshot>().chains.len(), 64);
}

/// None of them is lost when they come at once.
#[tokio::test(flavor = "multi_thread")]
async fn chains_and_labels_that_come_at_once_all_stay() {
    let face = Face::new();
    face.make_file("a", SIZE_BYTES).await;
    let snapshot = face.take_snapshot("a").await;
    let calls = (0..40).map(|number: usize| {
        let uri = format!("/v1/snapshots/{}", snapshot.id);
        let face = &face;
        async move {
            let chain = format!("{uri}/chains/sha256:{number:064x}");
            face.call(Method::PUT, &chain, &[], None).await.expect(200);
            face.patch(&uri, json!({"labels": {"last": number.to_string()}})).await.expect(200);
        }
    });
    futures_util::future::join_all(calls).await;
    let uri = format!("/v1/snapshots/{}", snapshot.id);
    let after: Snapshot = face.get(&uri).await.parse();
    assert_eq!((after.chains.len(), after.labels.len()), (40, 1));
}

/// For whom a snapshot is, as each of its chains.
fn restricted(snapshot: &Snapshot) -> Vec<(String, Vec<String>)> {
    let text =
        |blobs: &std::collections::BTreeSet<_>| blobs.iter().map(ToString::to_string).collect();
    snapshot
        .restricted_chains
        .iter()
        .map(|(chain, blobs)| (chain.to_string(), text(blobs)))
        .collect()
}

#[tokio::test]
async fn a_layer_is_for_those_who_may_read_a_blob_until_it_is_for_all() {
    let face = face();
    file(&face, "a").await;
    let blob = |name: &str| format!("registry.example.com:5000/{name}@{}", chain('b'));
    for bad in ["", "x", "registry.example.com/a", &format!("{}0", blob("a")), &blob("A")] {
        let body = json!({"path": "a", "chain_id": chain('1'), "blob": bad});
        post(&face, "one", "/v1/chains", body).await.problem(ProblemCode::InvalidValue);
    }
    let body = json!({"path": "a", "chain_id": chain('1'), "blob": blob("team/a")});
    let made: Snapshot = post(&face, "one", "/v1/chains", body).await.expect(201).parse();
    assert_eq!(restricted(&made), [(chain('1'), vec![blob("team/a")])]);
    assert!(made.labels.is_empty(), "{:?}", made.labels);
    let put = async |uri: &str| {
        let uri = format!("/v1/snapshots/{}/chains/{uri}", made.id);
        call(&face, "two", Method::PUT, &uri, None).await
    };
    let changed = async |query: &str| -> Snapshot {
        let answer = put(&format!("{}{query}", chain('1'))).await;
        answer.expect(200).parse()
    };
    assert_eq!(restricted(&changed("").await), restricted(&made));
    let escaped = blob("b").replace('@', "%40").replace('/', "%2F");
    let two = changed(&format!("?blob={escaped}")).await;
    assert_eq!(restricted(&two), [(chain('1'), vec![blob("b"), blob("team/a")])]);
    let uri = format!("/v1/chains/{}/{SIZE_BYTES}", chain('1'));
    assert_eq!(get(&face, &uri).await.expect(200).parse::<Snapshot>(), two);
    for bad in [
        "?blob=x".to_owned(),
        "?for_all=yes".to_owned(),
        "?for_all=true&for_all=true".to_owned(),
        "?for=all".to_owned(),
        format!("?for_all=true&blob={escaped}"),
    ] {
        put(&format!("{}{bad}", chain('1'))).await.problem(ProblemCode::BadQuery);
    }
    // Each of its chains for itself.
    let both: Snapshot = put(&format!("{}?blob={escaped}", chain('2'))).await.expect(200).parse();
    assert_eq!(restricted(&both)[1], (chain('2'), vec![blob("b")]));
    let opened = changed("?for_all=true").await;
    assert_eq!(restricted(&opened), [(chain('2'), vec![blob("b")])]);
    assert_eq!(makers(&opened)[0], (chain('1'), vec!["one".to_owned(), "two".to_owned()]));
    let again = changed(&format!("?blob={escaped}")).await;
    assert_eq!(restricted(&again), restricted(&opened), "it is known to all");
}

//! Publishing: what several callers published stays until each of them ended it.

use axum::http::Method;
use serde_json::json;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::Snapshot;
use slackwater_blockstore::{FilePath, SnapshotId};

use crate::harness::{Answer, Face};
use crate::readable::snapshot;
use crate::workers::{call, face, id, joined};

const ADMIN: &str = "root-secret";

/// A snapshot of the first of three workers, which the others read.
struct World {
    face: Face,
    workers: [String; 3],
    snapshot: String,
}

impl World {
    async fn new() -> Self {
        let face = face();
        let mut workers = [const { String::new() }; 3];
        for (number, worker) in (1..).zip(&mut workers) {
            *worker = joined(&face, &format!("node-{number}"), number).await;
        }
        let path = format!("workers/{}/disk", id(1));
        let file = json!({"path": path, "size_bytes": 4096});
        call(&face, &workers[0], Method::POST, "/v1/files", Some(file)).await.expect(201);
        // As drivers take them; named as an empty disk, so that all read it, published or not.
        let request = json!({"path": path, "name": "slackwater-empty-x", "deletion_policy": "on_zero_clones"});
        let snapshot = snapshot(&face, &workers[0], "/v1/snapshots", request).await;
        Self { face, workers, snapshot }
    }

    fn path(&self) -> String {
        format!("published/{}", self.snapshot)
    }

    async fn publish(&self, caller: &str) -> Answer {
        let body = json!({"snapshot_id": self.snapshot, "path": self.path()});
        call(&self.face, caller, Method::POST, "/v1/clones", Some(body)).await
    }

    async fn unpublish(&self, caller: &str) -> Answer {
        let route = format!("/v1/files/published%2F{}", self.snapshot);
        call(&self.face, caller, Method::DELETE, &route, None).await
    }

    async fn is_published(&self) -> bool {
        let route = format!("/v1/files/published%2F{}", self.snapshot);
        call(&self.face, ADMIN, Method::GET, &route, None).await.status == 200
    }

    async fn publishers(&self) -> Vec<String> {
        let uri = format!("/v1/snapshots/{}", self.snapshot);
        let answer = call(&self.face, ADMIN, Method::GET, &uri, None).await.expect(200);
        answer.parse::<Snapshot>().publishers.into_iter().collect()
    }
}

#[tokio::test]
async fn what_several_workers_published_stays_until_the_last_ends_it() {
    let world = World::new().await;
    let [one, two, three] = &world.workers;
    world.publish(one).await.expect(201);
    for _ in 0..2 {
        world.publish(two).await.problem(ProblemCode::Exists);
    }
    assert_eq!(world.publishers().await, ["node-1", "node-2"]);
    let refused = world.unpublish(three).await.problem(ProblemCode::NotFound);
    assert!(refused.detail.contains("node-1, node-2"), "{}", refused.detail);
    world.unpublish(one).await.expect(204);
    assert!(world.is_published().await);
    assert_eq!(world.publishers().await, ["node-2"]);
    world.unpublish(one).await.problem(ProblemCode::NotFound);
    world.unpublish(two).await.expect(204);
    assert!(!world.is_published().await);
    // With its last clone.
    let uri = format!("/v1/snapshots/{}", world.snapshot);
    call(&world.face, ADMIN, Method::GET, &uri, None).await.problem(ProblemCode::NotFound);
    world.unpublish(two).await.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn what_an_administrator_published_no_worker_ends_and_the_other_way_round() {
    let world = World::new().await;
    let [one, two, _] = &world.workers;
    // It stays when it is published no more.
    let hold = json!({"snapshot_id": world.snapshot, "path": "held"});
    call(&world.face, ADMIN, Method::POST, "/v1/clones", Some(hold)).await.expect(201);
    world.publish(ADMIN).await.expect(201);
    world.publish(one).await.problem(ProblemCode::Exists);
    assert_eq!(world.publishers().await, ["node-1", "root"]);
    for expected in [204, 404] {
        world.unpublish(one).await.expect(expected);
        assert!(world.is_published().await);
    }
    world.publish(two).await.problem(ProblemCode::Exists);
    world.unpublish(ADMIN).await.expect(204);
    assert!(!world.is_published().await);
    assert!(world.publishers().await.is_empty());
    // Published again by another one, it is not ended by those of before.
    world.publish(one).await.expect(201);
    world.unpublish(two).await.problem(ProblemCode::NotFound);
    assert_eq!(world.publishers().await, ["node-1"]);
    world.unpublish(one).await.expect(204);
    assert!(!world.is_published().await && world.publishers().await.is_empty());
}

/// Its clones would go on, and the images that refer to it could not be pulled.
#[tokio::test]
async fn the_worker_that_took_it_does_not_delete_what_others_publish() {
    let world = World::new().await;
    let [one, two, _] = &world.workers;
    let uri = format!("/v1/snapshots/{}", world.snapshot);
    let delete =
        async |caller: &str| call(&world.face, caller, Method::DELETE, &uri, None).await.status;
    world.publish(one).await.expect(201);
    world.publish(two).await.problem(ProblemCode::Exists);
    assert_eq!(delete(one).await, 403);
    world.unpublish(two).await.expect(204);
    assert_eq!(delete(one).await, 204);
    assert!(world.is_published().await, "the file is a clone that goes on");
    world.unpublish(one).await.problem(ProblemCode::NotFound);
    world.unpublish(ADMIN).await.expect(204);
}

#[tokio::test]
async fn what_was_published_before_there_were_publishers_is_ended_by_tokens_alone() {
    let world = World::new().await;
    let [one, ..] = &world.workers;
    let taken: SnapshotId = world.snapshot.parse().unwrap();
    let path = FilePath::parse(&world.path()).unwrap();
    world.face.store.clone_snapshot(taken, &path).unwrap();
    let refused = world.unpublish(one).await.problem(ProblemCode::NotFound);
    assert!(refused.detail.contains("by others"), "{}", refused.detail);
    world.publish(one).await.problem(ProblemCode::Exists);
    assert_eq!(world.publishers().await, ["*", "node-1"]);
    world.unpublish(one).await.expect(204);
    assert!(world.is_published().await);
    world.unpublish(ADMIN).await.expect(204);
}

/// As one that lies at such a path, and is no clone of the snapshot.
#[tokio::test]
async fn a_file_that_publishes_nothing_is_no_workers() {
    let world = World::new().await;
    let [one, ..] = &world.workers;
    let file = json!({"path": world.path(), "size_bytes": 1});
    call(&world.face, ADMIN, Method::POST, "/v1/files", Some(file)).await.expect(201);
    world.publish(one).await.problem(ProblemCode::Exists);
    assert!(world.publishers().await.is_empty());
    world.unpublish(one).await.problem(ProblemCode::NotFound);
    assert!(world.is_published().await, "the file is still there");
}

impl World {
    async fn publish_for(&self, caller: &str, image: &str) -> Answer {
        let body = json!({"snapshot_id": self.snapshot, "path": self.path(), "image": image});
        call(&self.face, caller, Method::POST, "/v1/clones", Some(body)).await
    }

    async fn unpublish_for(&self, caller: &str, image: &str) -> Answer {
        let route = format!("/v1/files/published%2F{}?image={image}", self.snapshot);
        call(&self.face, caller, Method::DELETE, &route, None).await
    }

    async fn shown(&self) -> Snapshot {
        let uri = format!("/v1/snapshots/{}", self.snapshot);
        call(&self.face, ADMIN, Method::GET, &uri, None).await.expect(200).parse()
    }

    /// The images with those who publish for them.
    async fn images(&self) -> Vec<(String, Vec<String>)> {
        let images = self.shown().await.images.into_iter();
        images.map(|(image, by)| (image, by.into_iter().collect())).collect()
    }
}

fn image(name: &str, by: &[&str]) -> (String, Vec<String>) {
    (name.to_owned(), by.iter().map(|by| (*by).to_owned()).collect())
}

#[tokio::test]
async fn a_snapshot_stays_published_for_each_of_its_images() {
    let world = World::new().await;
    let [one, two, _] = &world.workers;
    assert_eq!(world.shown().await.published_at, None);
    world.publish_for(one, "r.example/a:1").await.expect(201);
    assert!(world.shown().await.published_at.is_some());
    for caller in [one, two] {
        for _ in 0..2 {
            world.publish_for(caller, "r.example/b:1").await.problem(ProblemCode::Exists);
        }
    }
    let of_both =
        [image("r.example/a:1", &["node-1"]), image("r.example/b:1", &["node-1", "node-2"])];
    assert_eq!(world.images().await, of_both);
    let refused = world.unpublish_for(two, "r.example/a:1").await.problem(ProblemCode::NotFound);
    assert!(refused.detail.contains("for image r.example/a:1"), "{}", refused.detail);
    world.unpublish_for(one, "r.example/b:1").await.expect(204);
    assert_eq!(world.publishers().await, ["node-1", "node-2"]);
    world.unpublish_for(one, "r.example/b:1").await.problem(ProblemCode::NotFound);
    world.unpublish_for(one, "r.example/a:1").await.expect(204);
    assert_eq!(world.publishers().await, ["node-2"]);
    assert_eq!(world.images().await, [image("r.example/b:1", &["node-2"])]);
    world.unpublish_for(two, "r.example/b:1").await.expect(204);
    assert!(!world.is_published().await);
}

#[tokio::test]
async fn by_name_a_token_ends_what_it_published_alone() {
    let world = World::new().await;
    let [one, ..] = &world.workers;
    // It stays when it is published no more.
    let hold = json!({"snapshot_id": world.snapshot, "path": "held"});
    call(&world.face, ADMIN, Method::POST, "/v1/clones", Some(hold)).await.expect(201);
    world.publish_for(one, "a:1").await.expect(201);
    world.unpublish_for(ADMIN, "a:1").await.problem(ProblemCode::NotFound);
    world.publish_for(ADMIN, "a:1").await.problem(ProblemCode::Exists);
    world.unpublish_for(ADMIN, "a:1").await.expect(204);
    assert_eq!(world.publishers().await, ["node-1"]);
    // Without a name it ends all of it, images too.
    world.unpublish(ADMIN).await.expect(204);
    assert!(!world.is_published().await);
    // One that tells no image has one all the same, which no other's name ends.
    world.publish(ADMIN).await.expect(201);
    world.publish_for(ADMIN, "a:1").await.problem(ProblemCode::Exists);
    assert_eq!(world.images().await, [image("*", &["root"]), image("a:1", &["root"])]);
    world.unpublish_for(ADMIN, "a:1").await.expect(204);
    // Nor does what stands for one that gets its name later.
    world.publish_for(ADMIN, "?").await.problem(ProblemCode::Exists);
    world.unpublish_for(ADMIN, "*").await.expect(204);
    world.unpublish_for(ADMIN, "?").await.expect(204);
    assert_eq!(world.images().await, [image("*", &["root"])]);
    world.unpublish_for(ADMIN, "*").await.expect(204);
    assert!(!world.is_published().await);
    let elsewhere = call(&world.face, ADMIN, Method::DELETE, "/v1/files/a?image=a:1", None).await;
    elsewhere.problem(ProblemCode::NotFound);
}

#[tokio::test]
async fn an_image_is_told_where_a_snapshot_is_published_and_has_a_name() {
    let world = World::new().await;
    let [one, ..] = &world.workers;
    let path = format!("workers/{}/held", id(1));
    let body = json!({"snapshot_id": world.snapshot, "path": path, "image": "a:1"});
    call(&world.face, one, Method::POST, "/v1/clones", Some(body))
        .await
        .problem(ProblemCode::InvalidValue);
    for bad in ["", "a b", "a=b", "**"] {
        world.publish_for(one, bad).await.problem(ProblemCode::InvalidValue);
    }
    assert!(!world.is_published().await);
    // Of names beyond what is kept it is known that there are some, and then no name ends it.
    for number in 0..64 {
        let name = format!("registry.example/{}:{number}", "long/".repeat(12));
        world.publish_for(one, &name).await;
    }
    let images = world.shown().await.images;
    assert!(images.contains_key("*") && images.len() < 64, "{images:?}");
    for name in images.keys().filter(|name| *name != "*") {
        world
            .unpublish_for(one, &slackwater_api::paths::encode_component(name.as_bytes()))
            .await
            .expect(204);
    }
    assert!(world.is_published().await);
    world.unpublish(one).await.expect(204);
    assert!(!world.is_published().await);
}

/// By a release that told no images.
#[tokio::test]
async fn what_was_published_before_there_were_images_is_ended_by_no_name() {
    let world = World::new().await;
    let [one, ..] = &world.workers;
    world.publish(one).await.expect(201);
    let id: SnapshotId = world.snapshot.parse().unwrap();
    let older = |mut labels: slackwater_blockstore::Labels| {
        labels.remove("slackwater:images");
        labels
    };
    world.face.store.change_snapshot_labels(id, Box::new(older)).unwrap();
    world.publish_for(one, "a:1").await.problem(ProblemCode::Exists);
    assert_eq!(world.images().await, [image("*", &["node-1"]), image("a:1", &["node-1"])]);
    world.unpublish_for(one, "a:1").await.expect(204);
    assert!(world.is_published().await);
}

//! For which images layers leave: told by a Docker that says what it is given.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path as Segment, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use slackwater_client::types::SnapshotId;
use slackwater_driver::engine::docker::Docker;
use slackwater_driver::worker::{Chosen, Key};
use tokio::sync::{RwLock, broadcast};

use crate::plugin::Plugin;
use crate::support::{Appliance, Machine};
use crate::{base, create_container, id};

/// Ends what Docker tells, as when it ends itself.
const END: &str = "end";

/// When all is done that Docker tells: later than this test.
const TOLD_NANOS: u64 = 4_000_000_000_000_000_000;

/// Longest time until names are known.
const NAMING_TIME: Duration = Duration::from_secs(60);

/// What Docker knows.
#[derive(Debug)]
struct Known {
    /// Images by their ids: names and the uppermost layer.
    images: Mutex<BTreeMap<String, (Vec<String>, String)>>,
    events: broadcast::Sender<String>,
    /// Since when those who follow asked for events.
    asked: Mutex<Vec<String>>,
    /// How often an image was asked for.
    inspected: AtomicUsize,
    /// While this is held to write, no image is described.
    gate: RwLock<()>,
}

type Shared = Arc<Known>;

async fn list(State(known): State<Shared>) -> Json<Value> {
    let images = known.images.lock();
    Json(images.iter().map(|(id, (names, _))| json!({ "Id": id, "RepoTags": names })).collect())
}

/// By id or name.
async fn inspect(
    State(known): State<Shared>,
    Segment(wanted): Segment<String>,
) -> Result<Json<Value>, StatusCode> {
    let wanted = wanted.strip_suffix("/json").ok_or(StatusCode::NOT_FOUND)?;
    known.inspected.fetch_add(1, Ordering::SeqCst);
    let _open = known.gate.read().await;
    let images = known.images.lock();
    let mut found = images.iter();
    let found =
        found.find(|(id, (names, _))| *id == wanted || names.iter().any(|name| name == wanted));
    let (_, (names, layer)) = found.ok_or(StatusCode::NOT_FOUND)?;
    let driver = json!({ "Name": "slackwater", "Data": { "Layer": layer } });
    Ok(Json(json!({ "RootFS": { "Layers": [] }, "GraphDriver": driver, "RepoTags": names })))
}

async fn events(
    State(known): State<Shared>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Body {
    assert_eq!(query["filters"], r#"{"type":["image"],"event":["push","save"]}"#);
    known.asked.lock().push(query["since"].clone());
    let events = futures_util::stream::unfold(known.events.subscribe(), async |mut events| {
        let line = events.recv().await.ok().filter(|line| line != END)?;
        // In two parts, as they may come.
        let (first, rest) = line.split_at(line.len() / 2);
        Some((futures_util::stream::iter([first.to_owned(), format!("{rest}\n")]), events))
    });
    Body::from_stream(events.flatten().map(Ok::<_, std::io::Error>))
}

impl Known {
    fn add(&self, id: &str, names: &[&str], layer: &str) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        self.images.lock().insert(id.to_owned(), (names, layer.to_owned()));
    }

    /// Waits until so many images were asked for.
    async fn await_inspections(&self, count: usize) {
        let deadline = Instant::now() + NAMING_TIME;
        while self.inspected.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < deadline, "no image is asked for");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Tells an event to those who follow; waits for one who does.
    async fn tell(&self, action: &str, image: &str) {
        let deadline = Instant::now() + NAMING_TIME;
        while self.events.receiver_count() == 0 {
            assert!(Instant::now() < deadline, "nobody follows");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let event = json!({ "Type": "image", "Action": action, "Actor": { "ID": image }, "timeNano": TOLD_NANOS });
        self.events.send(event.to_string()).unwrap();
    }
}

/// A Docker for as long as the test runs.
fn docker(socket: &Path) -> (Docker, Shared) {
    let known = Arc::new(Known {
        images: Mutex::default(),
        events: broadcast::channel(16).0,
        asked: Mutex::default(),
        inspected: AtomicUsize::new(0),
        gate: RwLock::default(),
    });
    let routes = Router::new()
        .route("/images/json", get(list))
        .route("/images/{*image}", get(inspect))
        .route("/events", get(events));
    let listener = tokio::net::UnixListener::bind(socket).unwrap();
    let router = routes.with_state(Arc::clone(&known));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (Docker::new(&socket.display().to_string()).unwrap(), known)
}

/// A commit of a container of `below`, as the layer `layer` of an image; its snapshot.
fn committed(
    plugin: &Plugin,
    machine: &Machine,
    below: &str,
    layer: &str,
    container: &str,
) -> SnapshotId {
    create_container(plugin, container, below);
    std::fs::write(plugin.get(container).join("made"), layer).unwrap();
    let reference = plugin.diff(container, &format!("{container}-init"));
    plugin.put(container);
    plugin.create(layer, below);
    plugin.apply(layer, below, &reference);
    machine.worker.get(&Key::docker(layer)).unwrap().snapshot().unwrap().id
}

/// Waits until the published snapshots have exactly these images.
async fn await_images(machine: &Machine, expected: &[(SnapshotId, &[&str])]) {
    let expected: BTreeMap<_, BTreeSet<_>> = expected
        .iter()
        .map(|(id, images)| (*id, images.iter().map(|image| (*image).to_owned()).collect()))
        .collect();
    let deadline = Instant::now() + NAMING_TIME;
    loop {
        let published = machine.worker.published(&Chosen::default()).await.unwrap().into_iter();
        let got: BTreeMap<_, BTreeSet<_>> =
            published.map(|one| (one.snapshot_id, one.images.into_keys().collect())).collect();
        if got == expected {
            return;
        }
        assert!(Instant::now() < deadline, "got {got:?}, expected {expected:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_published_for_the_images_that_left() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (docker, known) = docker(&machine.path().join("docker.sock"));
    let plugin = Plugin::serve_named(&machine.worker, &machine.path().join("plugin.sock"), docker);
    let (image, lower, upper) = (id('a'), id('b'), id('c'));
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    let lower_id = committed(&plugin, &machine, &image, &lower, &id('1'));
    let upper_id = committed(&plugin, &machine, &lower, &upper, &id('2'));
    known.add("lower", &["r.example/lower:1", "r.example/lower:2"], &lower);
    known.add("upper", &["upper:1"], &upper);
    plugin.diff(&lower, &image);
    await_images(&machine, &[(lower_id, &["?"])]).await;
    known.tell("push", "r.example/lower:1").await;
    await_images(&machine, &[(lower_id, &["r.example/lower:1"])]).await;
    // The registry has the lower layer, so that the upper one leaves alone.
    plugin.diff(&upper, &lower);
    known.tell("push", "upper:1").await;
    let of_upper = ["docker.io/library/upper:1"];
    let of_lower = ["docker.io/library/upper:1", "r.example/lower:1"];
    await_images(&machine, &[(lower_id, &of_lower), (upper_id, &of_upper)]).await;
    // With all its tags, of which no layer leaves.
    known.tell("push", "r.example/lower").await;
    let of_lower = ["docker.io/library/upper:1", "r.example/lower:1", "r.example/lower:2"];
    await_images(&machine, &[(lower_id, &of_lower), (upper_id, &of_upper)]).await;
    // Docker starts again, and calls.
    known.events.send(END.to_owned()).unwrap();
    let deadline = Instant::now() + NAMING_TIME;
    while known.asked.lock().len() < 2 {
        assert!(Instant::now() < deadline, "it is not followed again");
        plugin.ok("Status", &json!({}));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(known.asked.lock().last().unwrap(), "4000000000.000000001");
    known.add("third", &["third:1"], &lower);
    known.tell("push", "third:1").await;
    let of_lower = [&["docker.io/library/third:1"], &of_lower[..]].concat();
    await_images(&machine, &[(lower_id, &of_lower), (upper_id, &of_upper)]).await;
    for image in of_lower {
        machine.worker.unpublish_image(&image.parse().unwrap()).await.unwrap();
    }
    await_images(&machine, &[]).await;
}

/// As after a push that failed, or without a Docker that answers.
#[tokio::test(flavor = "multi_thread")]
async fn what_left_for_an_image_without_a_name_is_ended_by_no_name() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (docker, known) = docker(&machine.path().join("docker.sock"));
    let plugin = Plugin::serve_named(&machine.worker, &machine.path().join("plugin.sock"), docker);
    let (image, layer) = (id('a'), id('b'));
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    let snapshot = committed(&plugin, &machine, &image, &layer, &id('1'));
    known.add("saved", &[], &layer);
    known.add("named", &["named:1"], &layer);
    plugin.diff(&layer, &image);
    known.tell("save", "saved").await;
    await_images(&machine, &[(snapshot, &["*"])]).await;
    plugin.diff(&layer, &image);
    known.tell("push", "gone:1").await;
    known.tell("save", "named").await;
    // It may have left for the one that is gone.
    await_images(&machine, &[(snapshot, &["*", "?", "docker.io/library/named:1"])]).await;
    plugin.diff(&layer, &image);
    machine.worker.unpublish_image(&"docker.io/library/named:1".parse().unwrap()).await.unwrap();
    await_images(&machine, &[(snapshot, &["*", "?"])]).await;
    machine.worker.unpublish(snapshot).await.unwrap();
    await_images(&machine, &[]).await;
}

/// What leaves while an image is named does so for another one, of which no event came yet.
#[tokio::test(flavor = "multi_thread")]
async fn what_leaves_while_an_image_is_named_stays_for_one_without_a_name() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (docker, known) = docker(&machine.path().join("docker.sock"));
    let plugin = Plugin::serve_named(&machine.worker, &machine.path().join("plugin.sock"), docker);
    let (image, layer) = (id('a'), id('b'));
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    let snapshot = committed(&plugin, &machine, &image, &layer, &id('1'));
    known.add("named", &["named:1"], &layer);
    let held = known.gate.write().await;
    // Of a push for which no layer left: the registry had all.
    known.tell("push", "named:1").await;
    known.await_inspections(1).await;
    plugin.diff(&layer, &image);
    drop(held);
    // Events are carried out one after the other.
    known.tell("push", "gone:1").await;
    known.await_inspections(2).await;
    await_images(&machine, &[(snapshot, &["?", "docker.io/library/named:1"])]).await;
    machine.worker.unpublish_image(&"docker.io/library/named:1".parse().unwrap()).await.unwrap();
    await_images(&machine, &[(snapshot, &["?"])]).await;
    machine.worker.unpublish(snapshot).await.unwrap();
    await_images(&machine, &[]).await;
}

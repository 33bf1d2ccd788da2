//! The daemon's control socket and its page of metrics against a real worker and a real appliance.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "../../tests/described_metrics.rs"]
mod described_metrics;
#[path = "support/files.rs"]
mod files;
mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use files::await_files;
use rustix::fs::{CWD, FileType, Mode};
use slackwater_archive::Reference;
use slackwater_client::types::{ChainId, ImageName, Timestamp};
use slackwater_driver::control::{self, Control, LayerQuery};
use slackwater_driver::daemon::Stop;
use slackwater_driver::engine::EngineError;
use slackwater_driver::engine::daemon::Daemon;
use slackwater_driver::settings::{Config, Settings};
use slackwater_driver::socket;
use slackwater_driver::worker::{
    Access, Chosen, ContainerdExtra, DockerExtra, Engine, Extra, Key, Kind, LayerKind, SnapshotRef,
    Worker,
};
use support::{Appliance, Machine, Trust, mounts_below};
use tokio::sync::watch;
use tower::ServiceExt as _;

/// Longest time for a mount to be let go.
const RELEASE_TIME: Duration = Duration::from_secs(60);

fn config(appliance: &Appliance, machine: &Machine) -> Config {
    let settings = Settings {
        api: Some(appliance.url.clone()),
        nfs: Some(appliance.nfs.to_string()),
        state_dir: Some(machine.path().join("state")),
        ..Settings::defaults()
    };
    Config::new(&settings).unwrap()
}

/// Serves the control socket until the answered sender is used.
async fn serve(appliance: &Appliance, machine: &Machine) -> (Daemon, watch::Sender<bool>) {
    let config = config(appliance, machine);
    let listener = socket::listen(&config.control_socket).await.unwrap();
    let (sender, stop) = Stop::new();
    let daemon = Daemon::new(&config.control_socket);
    let router = control::router(Control::new(machine.worker.clone(), config, stop.clone()));
    tokio::spawn(async move {
        axum::serve(listener, router).with_graceful_shutdown(stop.asked()).await.unwrap();
    });
    (daemon, sender)
}

/// A volume with one file, named after it.
async fn written(worker: &Worker, key: &Key, parent: Option<&Key>, extra: Extra) {
    worker.create(key.clone(), parent.cloned(), extra).await.unwrap();
    let root = worker.acquire(key, Access::ReadWrite).await.unwrap();
    std::fs::write(root.join("file"), key.name.as_bytes()).unwrap();
    worker.release(key).await.unwrap();
}

fn is_mounted(machine: &Machine, path: &Path) -> bool {
    mounts_below(machine.path()).iter().any(|point| point == path)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chains_are_shown_with_their_snapshots_and_kept_for_images() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (daemon, _stop) = serve(&appliance, &machine).await;
    let worker = &machine.worker;
    let (base, top) = (Key::docker("base"), Key::docker("top"));
    written(worker, &base, None, Extra::Docker(DockerExtra::default())).await;
    let below = worker.seal(&base, None).await.unwrap();
    written(worker, &top, Some(&base), Extra::Docker(DockerExtra::default())).await;
    let above = worker.seal(&top, None).await.unwrap();

    let chain = daemon.chain(Engine::Docker, "top").await.unwrap();
    let links: Vec<_> =
        chain.links.iter().map(|link| (link.name.as_str(), link.snapshot)).collect();
    assert_eq!(links, [("top", Some(above)), ("base", Some(below))]);
    let unknown = daemon.chain(Engine::Docker, "a/b c").await.unwrap_err();
    assert!(matches!(unknown, EngineError::Refused { status: 404, .. }), "{unknown}");
    assert!(unknown.to_string().contains("a/b c"), "{unknown}");

    // Kept for two chains: both can be proved, whoever asks again changes nothing.
    let chain_id = |digit: &str| format!("sha256:{}", digit.repeat(64)).parse::<ChainId>().unwrap();
    let [one, two] = ["1", "2"].map(chain_id);
    for chain in [&one, &two, &one, &two] {
        daemon.publish(above.id, Some(chain.clone()), None).await.unwrap();
    }
    let image: ImageName = "registry.example/top:1".parse().unwrap();
    daemon.publish(above.id, None, Some(image.clone())).await.unwrap();
    let published = daemon.published(&Chosen::default()).await.unwrap().published;
    assert_eq!(published.iter().map(|one| one.snapshot_id).collect::<Vec<_>>(), [above.id]);
    assert_eq!(published[0].images.keys().collect::<Vec<_>>(), ["*", image.as_str()]);
    let registered = worker.client().snapshot(above.id).await.unwrap().chains;
    assert_eq!(registered.into_keys().collect::<Vec<_>>(), [one, two]);
    let reference = daemon.reference(above.id).await.unwrap();
    assert_eq!(reference, worker.reference_to(above.id).await.unwrap());
    assert!(reference.mac.is_some(), "{reference:?}");
    assert_eq!(daemon.referenced(&reference).await.unwrap(), above);
    let larger = Reference { size_bytes: 2 * reference.size_bytes, ..reference.clone() };
    let forged = Reference { mac: Some("07".repeat(32).parse().unwrap()), ..reference.clone() };
    let unpublished = daemon.reference(below.id).await.unwrap();
    for untrusted in [larger, forged, unpublished] {
        let refused = daemon.referenced(&untrusted).await.unwrap_err();
        assert!(matches!(refused, EngineError::Refused { status: 403, .. }), "{refused}");
    }

    // Without its volumes it lives, until it is published no more.
    worker.remove(&top).await.unwrap();
    worker.clean_up().await;
    assert!(worker.client().snapshot(above.id).await.is_ok());
    let other = "registry.example/other:1".parse().unwrap();
    let refused = daemon.unpublish_image(other).await.unwrap_err();
    assert!(matches!(refused, EngineError::Refused { status: 404, .. }), "{refused}");
    let unpublished = daemon.unpublish_image(image).await.unwrap();
    assert_eq!((unpublished.ended, unpublished.kept), (vec![], vec![above.id]));
    assert_eq!(daemon.unpublish(above.id).await.unwrap(), Some(false));
    let gone = worker.client().snapshot(above.id).await.unwrap_err();
    assert!(gone.is_not_found(), "{gone}");
    let gone = daemon.reference(above.id).await.unwrap_err();
    assert!(matches!(gone, EngineError::Refused { status: 404, .. }), "{gone}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_view_ends_with_its_connection_or_with_the_daemon() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (daemon, stop) = serve(&appliance, &machine).await;
    let worker = &machine.worker;
    let key = Key::docker("layer");
    written(worker, &key, None, Extra::Docker(DockerExtra::default())).await;
    let snapshot = worker.seal(&key, None).await.unwrap();

    let view = daemon.view(snapshot, &[]).await.unwrap();
    let path = view.path().to_owned();
    assert_eq!(std::fs::read(path.join("file")).unwrap(), b"layer");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(is_mounted(&machine, &path), "the view was let go while it was in use");
    drop(view);
    let deadline = Instant::now() + RELEASE_TIME;
    while is_mounted(&machine, &path) {
        assert!(Instant::now() < deadline, "the view outlives its connection");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // A forgotten one does not keep the daemon from ending.
    let _view = daemon.view(snapshot, &[]).await.unwrap();
    stop.send(true).unwrap();
    let deadline = Instant::now() + RELEASE_TIME;
    while daemon.status().await.is_ok() {
        assert!(Instant::now() < deadline, "the daemon does not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_are_found_by_chain_id_and_containers_captured() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (daemon, _stop) = serve(&appliance, &machine).await;
    let worker = &machine.worker;
    let chain_id = format!("sha256:{}", "c".repeat(64));
    let extra = |kind| {
        Extra::Containerd(ContainerdExtra {
            kind,
            labels: [("containerd.io/snapshot.ref".to_owned(), chain_id.clone())].into(),
            updated_at: Timestamp::from_nanos(1),
            is_shared: false,
            own_disk: None,
            chain: None,
            is_private: false,
            blob_digest: None,
        })
    };
    let any = LayerQuery::default();
    assert_eq!(daemon.layer("default", &chain_id, &any).await.unwrap(), None);
    let layer = Key::containerd(format!("default/3/{chain_id}"));
    written(worker, &layer, None, extra(Kind::Committed)).await;
    let snapshot = worker.seal(&layer, None).await.unwrap();
    assert_eq!(daemon.layer("default", &chain_id, &any).await.unwrap(), Some(snapshot));
    // What is only called so there, or has the label, is no layer here.
    assert_eq!(daemon.layer("other", &chain_id, &any).await.unwrap(), None);
    let chain = Some(chain_id.clone());
    let known = move |extra: &mut Extra| {
        if let Extra::Containerd(extra) = extra {
            extra.chain = chain;
        }
    };
    let known_too = known.clone();
    worker.update(&layer, known).await.unwrap();
    assert_eq!(daemon.layer("other", &chain_id, &any).await.unwrap(), Some(snapshot));

    // With private layers it is one only in its own namespace.
    let private = Trust { private_layers: true, ..Trust::default() };
    let machine_too = Machine::start_with(&appliance, private).await;
    let (daemon_too, _stop_too) = serve(&appliance, &machine_too).await;
    let mut recorded = extra(Kind::Committed);
    known_too(&mut recorded);
    written(&machine_too.worker, &layer, None, recorded).await;
    let kept = machine_too.worker.seal(&layer, None).await.unwrap();
    assert_eq!(daemon_too.layer("default", &chain_id, &any).await.unwrap(), Some(kept));
    assert_eq!(daemon_too.layer("other", &chain_id, &any).await.unwrap(), None);

    let container = Key::containerd("default/4/web with spaces/and slashes");
    written(worker, &container, Some(&layer), extra(Kind::Active)).await;
    let first = daemon.capture(Engine::Containerd, &container.name).await.unwrap();
    assert_ne!(first.id, snapshot.id);
    daemon.publish(first.id, None, None).await.unwrap();
    let view = daemon.view(first, &[]).await.unwrap();
    assert_eq!(std::fs::read(view.path().join("file")).unwrap(), container.name.as_bytes());
    let status = daemon.status().await.unwrap();
    assert_eq!(status["volumes"]["containerd"]["all"], 2, "{status}");
    assert_eq!(status["appliance"]["reachable"], true, "{status}");
    assert_eq!(status["attach"], "fuse", "{status}");
    assert_eq!(status["mounted_by"], "address", "{status}");
}

fn of_containerd(kind: Kind) -> Extra {
    Extra::Containerd(ContainerdExtra {
        kind,
        labels: [].into(),
        updated_at: Timestamp::from_nanos(1),
        is_shared: false,
        own_disk: None,
        chain: None,
        is_private: false,
        blob_digest: None,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_capture_has_nothing_of_dockers_init_layer() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (daemon, _stop) = serve(&appliance, &machine).await;
    let worker = &machine.worker;
    let image = Key::containerd(format!("moby/1/sha256:{}", "c".repeat(64)));
    written(worker, &image, None, of_containerd(Kind::Committed)).await;
    worker.seal(&image, None).await.unwrap();
    let init = Key::containerd("moby/2/0123-init");
    worker.create(init.clone(), Some(image), of_containerd(Kind::Committed)).await.unwrap();
    let root = worker.acquire(&init, Access::ReadWrite).await.unwrap();
    std::fs::write(root.join(".dockerenv"), "").unwrap();
    worker.release(&init).await.unwrap();
    worker.seal(&init, None).await.unwrap();
    // One whose init layer is another's: by its name it is none.
    for (name, has_init_layer) in [("moby/3/0123", true), ("moby/4/4567", false)] {
        let container = Key::containerd(name);
        written(worker, &container, Some(&init), of_containerd(Kind::Active)).await;
        let captured = daemon.capture(Engine::Containerd, name).await.unwrap();
        let view = daemon.view(captured, &[]).await.unwrap();
        assert_eq!(std::fs::read(view.path().join("file")).unwrap(), name.as_bytes());
        let is_there = view.path().join(".dockerenv").exists();
        assert_eq!(is_there, !has_init_layer, "{name}");
    }
    assert_eq!(worker.list(Engine::Docker), []);
    let gone = daemon.capture(Engine::Containerd, "moby/5/89ab").await.unwrap_err();
    assert!(matches!(gone, EngineError::Refused { status: 404, .. }), "{gone}");
    // Those of the containers; nothing is unmounted any more when the machine ends.
    await_files(&appliance, &machine, "disks", 2).await;
}

/// A volume that is written above images, with one file that is named after it.
async fn written_above_images(
    worker: &Worker,
    name: &str,
    parent: Option<&Key>,
    (kind, chain): (Kind, Option<&str>),
) -> Key {
    let key = Key::containerd(name);
    let Extra::Containerd(extra) = of_containerd(kind) else { panic!("it is of containerd") };
    let extra = Extra::Containerd(ContainerdExtra { chain: chain.map(str::to_owned), ..extra });
    let made = worker.create_keeping(key.clone(), parent.cloned(), extra, LayerKind::Images);
    made.await.unwrap();
    let root = worker.ensure_rootfs(&key, Access::ReadWrite).await.unwrap().written().unwrap();
    std::fs::write(root.join(name.rsplit_once('/').unwrap().1), name).unwrap();
    key
}

fn names_in(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_that_are_images_are_found_shown_as_one_tree_and_captured() {
    let appliance = Appliance::start();
    let machine = Machine::start_keeping(&appliance, LayerKind::Images).await;
    let (daemon, _stop) = serve(&appliance, &machine).await;
    let worker = &machine.worker;
    let [one, two] = ["1", "2"].map(|digit| format!("sha256:{}", digit.repeat(64)));
    let committed = |chain| (Kind::Committed, Some(chain));
    let lower = format!("moby/1/{one}");
    let lower = written_above_images(worker, &lower, None, committed(one.as_str())).await;
    let below = worker.seal(&lower, None).await.unwrap();
    let upper = format!("moby/2/{two}");
    let upper = written_above_images(worker, &upper, Some(&lower), committed(two.as_str())).await;
    let above = worker.seal(&upper, None).await.unwrap();

    // By kind: the same layer may be kept as a disk, too.
    let asked = |layers| LayerQuery { layers, below: Some(one.clone()) };
    let (any, images) = (asked(None), asked(Some(LayerKind::Images)));
    assert_eq!(daemon.layer("moby", &two, &any).await.unwrap(), Some(above));
    assert_eq!(daemon.layer("moby", &two, &images).await.unwrap(), Some(above));
    let disks = asked(Some(LayerKind::Disks));
    assert_eq!(daemon.layer("moby", &two, &disks).await.unwrap(), None);

    let alone = daemon.view(above, &[]).await.unwrap();
    assert_eq!(names_in(alone.path()), [two.as_str()]);
    let both = daemon.view(above, &[below]).await.unwrap();
    let (path, names) = (both.path().to_owned(), [one.clone(), two.clone()]);
    assert_eq!(names_in(&path), names);
    assert!(is_mounted(&machine, &path));
    drop((alone, both));
    let deadline = Instant::now() + RELEASE_TIME;
    while path.exists() {
        assert!(Instant::now() < deadline, "{} is mounted still", path.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    // A container of Docker with its init layer, and one of another client.
    let init =
        written_above_images(worker, "moby/3/0123-init", Some(&upper), (Kind::Committed, None));
    let init = init.await;
    worker.seal(&init, None).await.unwrap();
    let view = async |captured: SnapshotRef| daemon.view(captured, &[]).await.unwrap();
    for (name, parent) in [("moby/4/0123", &init), ("moby/5/4567", &upper)] {
        let key = written_above_images(worker, name, Some(parent), (Kind::Active, None)).await;
        if parent == &init {
            // It deleted what dockerd had made: the image has nothing of that, and no mark either.
            let root = worker.ensure_rootfs(&key, Access::ReadWrite).await.unwrap();
            let whiteout = root.written().unwrap().join("0123-init");
            let device = FileType::CharacterDevice;
            rustix::fs::mknodat(CWD, &whiteout, device, Mode::empty(), 0).unwrap();
        }
        let captured = daemon.capture(Engine::Containerd, name).await.unwrap();
        assert_eq!(LayerKind::of(captured.size_bytes), LayerKind::Images);
        let seen = view(captured).await;
        assert_eq!(names_in(seen.path()), [name.rsplit_once('/').unwrap().1]);
        let told = worker.client().snapshot(captured.id).await.unwrap().labels;
        assert!(told.values().any(|value| *value == two), "made above the image: {told:?}");
    }
    let gone = daemon.capture(Engine::Containerd, "moby/6/89ab").await.unwrap_err();
    assert!(matches!(gone, EngineError::Refused { status: 404, .. }), "{gone}");
    let shared = Key::containerd("moby/7/shared");
    let extra = of_containerd(Kind::Active);
    worker.create(shared.clone(), Some(upper.clone()), extra).await.unwrap();
    for name in [&upper.name, &shared.name] {
        let refused = daemon.capture(Engine::Containerd, name).await.unwrap_err();
        assert!(refused.to_string().contains("is not written"), "{refused}");
    }
    // The disk that they share.
    await_files(&appliance, &machine, "disks", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_process_left_of_a_commit_is_removed_at_the_next_start() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    let container = Key::containerd("moby/3/0123");
    written(worker, &container, None, of_containerd(Kind::Active)).await;
    let captured = worker.capture(&container).await.unwrap();
    let [held, disk] = ["held", "disk"].map(|end| Key::docker(format!("commit:x:{end}")));
    let extra = || Extra::Docker(DockerExtra { is_container: true, ..DockerExtra::default() });
    worker.create(held.clone(), None, extra()).await.unwrap();
    worker.bind(&held, captured.id).await.unwrap();
    worker.create(disk.clone(), Some(held), extra()).await.unwrap();
    worker.acquire(&disk, Access::ReadWrite).await.unwrap();
    let machine = machine.restart(&appliance).await;
    assert_eq!(machine.worker.list(Engine::Docker), []);
    assert!(machine.worker.get(&container).is_some());
    await_files(&appliance, &machine, "disks", 1).await;
    await_files(&appliance, &machine, "holds", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_calls_and_volumes() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let key = Key::docker("layer");
    let extra = Extra::Docker(DockerExtra::default());
    machine.worker.create(key.clone(), None, extra).await.unwrap();
    machine.worker.acquire(&key, Access::ReadWrite).await.unwrap();
    let metrics = machine.worker.metrics();
    metrics.count(Engine::Docker, "Get", Duration::from_millis(3), false);
    metrics.count(Engine::Docker, "Get", Duration::from_secs(3), true);
    let page = metrics.render(&machine.worker, Some(&serde_json::json!({ "cache_hits": 7 })));
    for line in [
        "slackwater_driver_call_seconds_count{engine=\"docker\",call=\"Get\"} 2",
        "slackwater_driver_call_seconds_bucket{le=\"0.005\",engine=\"docker\",call=\"Get\"} 1",
        "slackwater_driver_call_failures_total{engine=\"docker\",call=\"Get\"} 1",
        "slackwater_driver_volumes{engine=\"docker\"} 1",
        "slackwater_driver_volumes_in_use{engine=\"docker\"} 1",
        "slackwater_driver_volumes{engine=\"containerd\"} 0",
        "slackwater_driver_export_cache_hits_total 7",
    ] {
        assert!(page.lines().any(|one| one == line), "no `{line}` in:\n{page}");
    }
    machine.worker.release(&key).await.unwrap();
    machine.worker.remove(&key).await.unwrap();
    machine.worker.clean_up().await;
}

/// The page of `--metrics-listen`, as Prometheus reads it.
async fn page(router: &Router) -> String {
    let request = Request::get("/metrics").body(Body::empty()).unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let page = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    String::from_utf8(page.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_of_the_driver_is_what_its_page_has() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    let key = Key::docker("layer");
    worker.create(key.clone(), None, Extra::Docker(DockerExtra::default())).await.unwrap();
    worker.acquire(&key, Access::ReadWrite).await.unwrap();
    // What has labels is on the page once it has counted something.
    worker.metrics().count(Engine::Docker, "Get", Duration::from_millis(3), true);
    let (_sender, stop) = Stop::new();
    let control = Control::new(worker.clone(), config(&appliance, &machine), stop);
    let router = control::metrics_router(control);
    let deadline = Instant::now() + RELEASE_TIME;
    let page = loop {
        let page = page(&router).await;
        if page.contains("slackwater_driver_export_") {
            break page;
        }
        // On a busy machine that process may not answer in time.
        assert!(Instant::now() < deadline, "nothing of the FUSE process is on the page:\n{page}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(described_metrics::differences(&page, "The driver"), [""; 0], "{page}");
    // Each number of that process, also one that is new to it.
    let counted = std::fs::read(worker.attached().unwrap().statistics_file().unwrap()).unwrap();
    let counted: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&counted).unwrap();
    let shown = page.matches("# TYPE slackwater_driver_export_").count();
    assert_eq!(
        shown,
        counted.values().filter(|value| value.is_u64()).count(),
        "{counted:?}\n{page}"
    );
    worker.release(&key).await.unwrap();
    worker.remove(&key).await.unwrap();
    worker.clean_up().await;
}

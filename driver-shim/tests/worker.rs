//! Volumes on a real appliance, with real mounts: content goes where it should, snapshots are
//! kept exactly as long as they are needed, and nothing is left anywhere in the end (D1 to D5).
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use slackwater_client::query::{ListFiles, ListSnapshots};
use slackwater_client::types::{ChainId, CreateSnapshot};
use slackwater_driver::worker::{
    Access, Chosen, Content, DockerExtra, Engine, Extra, Key, Registration, SnapshotRef, Worker,
    WorkerError,
};
use support::tools::noted;
use support::{Appliance, DISK_BYTES, Machine, kernel_release, mounts_below};

/// Longest time in which unreferenced files are deleted, also on a busy machine.
const REAP_TIME: Duration = Duration::from_secs(60);

/// A file that is seen in figures beside what a journal takes.
const LARGE_BYTES: usize = 24 << 20;

fn extra() -> Extra {
    Extra::Docker(DockerExtra::default())
}

async fn create(worker: &Worker, name: &str, parent: Option<&str>) -> Key {
    let key = Key::docker(name);
    worker.create(key.clone(), parent.map(Key::docker), extra()).await.unwrap();
    key
}

/// A volume with a file that holds its name, sealed.
async fn layer(worker: &Worker, name: &str, parent: Option<&str>) -> Key {
    let key = create(worker, name, parent).await;
    let path = worker.acquire(&key, Access::ReadWrite).await.unwrap();
    std::fs::write(path.join(name), name).unwrap();
    worker.release(&key).await.unwrap();
    worker.seal(&key, None).await.unwrap();
    key
}

fn read(path: &Path, name: &str) -> Option<String> {
    std::fs::read_to_string(path.join(name)).ok()
}

/// Paths of files below `prefix`, and the number of snapshots, without the empty disks.
async fn left_over(worker: &Worker, prefix: &str) -> (Vec<String>, usize) {
    let query = ListFiles { prefix: Some(prefix.to_owned()), ..ListFiles::default() };
    let files = worker.client().files(&query).await.unwrap().items;
    let files = files.into_iter().map(|file| file.path);
    let snapshots = worker.client().snapshots(&ListSnapshots::default()).await.unwrap().items;
    let is_empty_disk = |name: &str| name.starts_with("slackwater-empty");
    let others = snapshots.iter().filter(|one| !one.name.as_deref().is_some_and(is_empty_disk));
    (files.filter(|path| !path.ends_with("/lease")).collect(), others.count())
}

async fn assert_nothing_left(worker: &Worker) {
    let deadline = Instant::now() + REAP_TIME;
    loop {
        worker.reconcile(Duration::ZERO).await.unwrap();
        let left = left_over(worker, "workers/").await;
        if left == (Vec::new(), 0) {
            return;
        }
        assert!(Instant::now() < deadline, "left on the appliance: {left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Reconciles until so many snapshots are left: the start of a worker looks through them at the same
/// time.
async fn await_snapshots(worker: &Worker, age_min: Duration, count: usize) {
    let deadline = Instant::now() + REAP_TIME;
    loop {
        worker.reconcile(age_min).await.unwrap();
        let (_, left) = left_over(worker, "workers/").await;
        if left == count {
            return;
        }
        assert!(Instant::now() < deadline, "{left} snapshots are left");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_read_as_they_were_written_and_leave_nothing() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    let one = layer(worker, "one", None).await;
    let two = layer(worker, "two", Some("one")).await;
    // A volume that nobody writes costs nothing and reads as its parent.
    let idle = create(worker, "idle", Some("two")).await;
    let path = worker.acquire(&idle, Access::ReadOnly).await.unwrap();
    assert_eq!(read(&path, "one").as_deref(), Some("one"));
    assert_eq!(read(&path, "two").as_deref(), Some("two"));
    assert!(!path.join("lost+found").exists());
    let refused = std::fs::write(path.join("x"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(worker.get(&idle).unwrap().content, Content::Inherited);
    // All readers of a snapshot share its mount.
    let second = create(worker, "second", Some("two")).await;
    assert_eq!(worker.acquire(&second, Access::ReadOnly).await.unwrap(), path);
    let error = worker.acquire(&two, Access::ReadWrite).await.unwrap_err();
    assert!(matches!(error, WorkerError::ReadOnly { .. }), "{error}");
    let error = worker.remove(&one).await.unwrap_err();
    assert!(matches!(error, WorkerError::HasChildren { .. }), "{error}");
    let usage = worker.usage(&two).await.unwrap();
    assert!(usage.inodes == 1 && usage.size_bytes < 1 << 20, "{usage:?}");
    for key in [&idle, &second] {
        worker.release(key).await.unwrap();
        worker.release(key).await.unwrap();
        worker.remove(key).await.unwrap();
    }
    worker.remove(&two).await.unwrap();
    worker.remove(&one).await.unwrap();
    assert_nothing_left(worker).await;
}

/// As a driver registered layers before snapshots had labels.
#[tokio::test(flavor = "multi_thread")]
async fn inodes_of_a_layer_whose_maker_told_none_are_those_of_its_file_system() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (worker, client) = (&machine.worker, appliance.client());
    let unlabelled = |path: &str| CreateSnapshot { path: path.to_owned(), ..Default::default() };
    for (name, parent) in [("one", None), ("two", Some("one"))] {
        let made = layer(worker, name, parent).await;
        let told = worker.snapshot_of(&made).await.unwrap().unwrap();
        let (path, bound) = (format!("plain/{name}"), format!("bound {name}"));
        client.create_clone(told.id, &path).await.unwrap();
        let plain = client.create_snapshot(&unlabelled(&path)).await.unwrap();
        assert!(plain.labels.is_empty());
        let parent = parent.map(|parent| format!("bound {parent}"));
        let bound = create(worker, &bound, parent.as_deref()).await;
        worker.bind(&bound, plain.id).await.unwrap();
        client.delete_file(&path).await.unwrap();
        let [made, bound] =
            [worker.usage(&made).await.unwrap(), worker.usage(&bound).await.unwrap()];
        assert_eq!((bound.inodes, bound.disk_inodes), (1, made.disk_inodes));
    }
    let active = create(worker, "active", Some("bound two")).await;
    let path = worker.acquire(&active, Access::ReadWrite).await.unwrap();
    assert_eq!(worker.usage(&active).await.unwrap().inodes, 0);
    std::fs::write(path.join("file"), "own").unwrap();
    assert_eq!(worker.usage(&active).await.unwrap().inodes, 1);
    // Above a layer of which they are not known none is counted: they would be the image's.
    client.create_file("none", DISK_BYTES).await.unwrap();
    let none = client.create_snapshot(&unlabelled("none")).await.unwrap().id;
    let told = worker.snapshot_of(&Key::docker("one")).await.unwrap().unwrap().id;
    for (name, parent, id) in [("none", None, none), ("above", Some("none"), told)] {
        let bound = create(worker, name, parent).await;
        worker.bind(&bound, id).await.unwrap();
        assert_eq!(worker.usage(&bound).await.unwrap().inodes, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_is_of_its_moment_and_lives_when_bound() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    let live = create(worker, "live", None).await;
    let path = worker.acquire(&live, Access::ReadWrite).await.unwrap();
    std::fs::write(path.join("file"), "before").unwrap();
    std::fs::write(path.join("large"), vec![7; LARGE_BYTES]).unwrap();
    let captured = worker.capture(&live).await.unwrap();
    // What it holds stays its own.
    let usage = worker.usage(&live).await.unwrap();
    let least_bytes = (LARGE_BYTES - (1 << 20)) as u64;
    assert!(usage.size_bytes >= least_bytes && usage.inodes == 2, "{usage:?}");
    std::fs::write(path.join("file"), "after").unwrap();
    let bound = create(worker, "bound", None).await;
    worker.bind(&bound, captured.id).await.unwrap();
    // Captures that were not bound go, the bound one stays.
    worker.capture(&live).await.unwrap();
    let view = worker.view(captured).await.unwrap();
    assert_eq!(read(view.path(), "file").as_deref(), Some("before"));
    assert_eq!(read(&path, "file").as_deref(), Some("after"));
    drop(view);
    let error = worker.seal(&live, None).await.unwrap_err();
    assert!(matches!(error, WorkerError::Busy { users: 1, .. }), "{error}");
    let machine = machine.restart(&appliance).await;
    let worker = &machine.worker;
    assert_eq!(read(&path, "file").as_deref(), Some("after"), "mounts outlive the daemon");
    // The bound one.
    await_snapshots(worker, Duration::ZERO, 1).await;
    let unknown = "00000000-0000-4000-8000-000000000000".parse().unwrap();
    let error = worker.bind(&bound, unknown).await.unwrap_err();
    assert!(error.to_string().contains(&appliance.url), "{error}");
    worker.remove(&bound).await.unwrap();
    worker.remove(&live).await.unwrap();
    assert_nothing_left(worker).await;
    let mounts = mounts_below(&machine.path().join("state/mounts"));
    assert_eq!(mounts, Vec::<std::path::PathBuf>::new());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

#[test]
fn a_capture_whose_freeze_lost_writes_is_refused() {
    let Some(directory) = noted("a_capture_whose_freeze_lost_writes_is_refused", 2) else {
        return;
    };
    let log = Path::new(&directory).join("log");
    runtime().block_on(async {
        let appliance = Appliance::start();
        let machine = Machine::start(&appliance).await;
        let worker = &machine.worker;
        let live = create(worker, "live", None).await;
        let path = worker.acquire(&live, Access::ReadWrite).await.unwrap();
        std::fs::write(path.join("file"), "x").unwrap();
        let error = worker.capture(&live).await.unwrap_err();
        assert!(error.to_string().contains("Input/output error"), "{error}");
        let calls = std::fs::read_to_string(&log).unwrap();
        let expected = [
            "sync --file-system",
            "fsfreeze --freeze",
            "fsfreeze --unfreeze",
            "sync --file-system",
        ];
        assert_eq!(calls.lines().collect::<Vec<_>>(), expected);
        // It is told once, and remembered; the disk can be written and removed.
        let error = worker.capture(&live).await.unwrap_err();
        assert!(matches!(error, WorkerError::Damaged { .. }), "{error}");
        let error = worker.tree_at(Engine::Docker, &path).await.unwrap_err();
        assert!(matches!(error, WorkerError::Damaged { .. }), "{error}");
        std::fs::write(path.join("file"), "y").unwrap();
        worker.release(&live).await.unwrap();
        worker.reconcile(Duration::ZERO).await.unwrap();
        worker.remove(&live).await.unwrap();
        assert_nothing_left(worker).await;
    });
}

#[test]
fn writes_that_are_lost_while_a_busy_disk_is_unmounted_are_remembered() {
    let name = "writes_that_are_lost_while_a_busy_disk_is_unmounted_are_remembered";
    let Some(_tools) = noted(name, 2) else { return };
    runtime().block_on(async {
        let appliance = Appliance::start();
        let machine = Machine::start(&appliance).await;
        let worker = &machine.worker;
        let live = create(worker, "live", None).await;
        let path = worker.acquire(&live, Access::ReadWrite).await.unwrap();
        let open = std::fs::File::create(path.join("file")).unwrap();
        worker.release(&live).await.unwrap();
        for _ in 0..600 {
            if worker.get(&live).unwrap().is_damaged {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let error = worker.capture(&live).await.unwrap_err();
        assert!(matches!(error, WorkerError::Damaged { .. }), "{error}");
        drop(open);
        worker.remove(&live).await.unwrap();
        assert_nothing_left(worker).await;
    });
}

#[test]
fn a_disk_that_is_detached_by_hand_tells_of_lost_writes() {
    let Some(tools) = noted("a_disk_that_is_detached_by_hand_tells_of_lost_writes", 2) else {
        return;
    };
    let runtime = runtime();
    let appliance = Appliance::start();
    let machine = runtime.block_on(Machine::start(&appliance));
    let image = runtime.block_on(layer(&machine.worker, "image", None));
    let image = machine.worker.get(&image).unwrap().snapshot().unwrap();
    let log = std::fs::read_to_string(Path::new(&tools).join("log")).unwrap();
    assert_eq!(log.matches("sync").count(), 1, "that of the seal");
    let place = machine.path().join("by-hand");
    let (disk, state) = (place.join("disk"), place.join("state"));
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slackwater-driver"));
        command.args(words).arg(&disk).args(["--attach", "fuse", "--api", &appliance.url]);
        command.args(["--nfs", &appliance.nfs.to_string()]).arg("--state-dir").arg(&state);
        command.arg("--cache-dir").arg(place.join("cache")).output().unwrap()
    };
    let attached = run(&["attach", "--clone", &image.id.to_string()]);
    assert!(attached.status.success(), "{attached:?}");
    // Who wrote the disk has no rights here, and only root sees it and the blocks that are kept.
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mount = table.lines().find(|line| line.contains(disk.to_str().unwrap())).unwrap();
    assert!(mount.contains("nosuid,nodev"), "{mount}");
    for directory in ["", "state", "cache"] {
        let found = std::fs::metadata(place.join(directory)).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o700, "{directory}");
    }
    std::fs::write(disk.join("file"), "x").unwrap();
    // A program that looks at all devices has that one open while it is detached, and a moment longer.
    let device = std::fs::File::open(mount.split(' ').next().unwrap()).unwrap();
    let looked_for = disk.to_str().unwrap().to_owned();
    let looking = std::thread::spawn(move || {
        let is_mounted =
            || std::fs::read_to_string("/proc/self/mounts").unwrap().contains(&looked_for);
        let deadline = std::time::Instant::now() + Duration::from_secs(120);
        while is_mounted() {
            assert!(std::time::Instant::now() < deadline, "it is not unmounted");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(500));
        drop(device);
    });
    let detached = run(&["detach"]);
    looking.join().unwrap();
    let said = String::from_utf8_lossy(&detached.stderr);
    assert!(!detached.status.success() && said.contains("is lost"), "{said}");
    assert_eq!(mounts_below(&place), Vec::<std::path::PathBuf>::new());
    let clone = String::from_utf8(attached.stdout).unwrap();
    runtime.block_on(async {
        machine.worker.client().delete_file(clone.trim()).await.unwrap();
        machine.worker.remove(&Key::docker("image")).await.unwrap();
        assert_nothing_left(&machine.worker).await;
    });
}

/// The archive of a layer with one file.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, name, content).unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn an_image_of_a_layer_is_written_to_the_appliance_and_attached_from_there() {
    let appliance = Appliance::start();
    let runtime = runtime();
    // Takes away what is mounted below its directory, however this ends.
    let machine = runtime.block_on(Machine::start(&appliance));
    let place = &machine.path().join("by-hand");
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slackwater-driver"));
        command.args(words).args(["--attach", "fuse", "--api", &appliance.url]);
        command
            .args(["--nfs", &appliance.nfs.to_string()])
            .arg("--state-dir")
            .arg(place.join("state"));
        let output = command.arg("--cache-dir").arg(place.join("cache")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let at = |name: &str| place.join(name).to_str().unwrap().to_owned();
    let (disk, image, snapshot) = (at("disk"), at("image"), at("snapshot"));
    assert_eq!(run(&["attach", "--file", "disk", "--create", "64MiB", &disk]).0, Some(0));
    let (code, said) =
        run(&["attach", "--file", "new", "--create", "1MiB", "--type", "erofs", &image]);
    assert!(code == Some(2) && said.contains("make an ext4"), "{code:?} {said}");

    // The export keeps the size of a file: the image is smaller.
    let path = slackwater_blockstore::FilePath::parse("layers/one").unwrap();
    appliance.store.create_file(&path, 1 << 30).unwrap();
    let file = place.join("state/attach/export/layers/one");
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let written =
        slackwater_archive::image(&archive("file", &content)[..], None, file, None).unwrap();
    assert!((12_000_000..13_000_000).contains(&written.image_bytes), "{written:?}");
    let client = appliance.client();
    let request = CreateSnapshot { path: "layers/one".to_owned(), ..CreateSnapshot::default() };
    let id = runtime.block_on(client.create_snapshot(&request)).unwrap().id.to_string();

    for (source, directory) in
        [(["--file", "layers/one"], &image), (["--snapshot", &id], &snapshot)]
    {
        let (code, said) =
            run(&[&["attach", "--type", "erofs"], &source[..], &[directory]].concat());
        assert_eq!(code, Some(0), "{said}");
        assert!(
            std::fs::read(Path::new(directory).join("file")).unwrap() == content,
            "{directory}"
        );
    }
    for (source, expected) in [("--file", "is still in use"), ("--snapshot", "cannot be mounted")] {
        let name = if source == "--file" { "layers/one" } else { &id };
        let (code, said) = run(&["attach", source, name, &at("ext4")]);
        assert!(code == Some(1) && said.contains(expected), "{code:?} {said}");
    }
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mount = table.lines().find(|line| line.contains(&image)).unwrap();
    // Before Linux 6.12 by a loop device.
    let is_old = mount.starts_with("/dev/loop");
    assert!(is_old || mount.contains("state/attach/export/layers/one"), "{mount}");
    assert!(!is_old || kernel_release() < (6, 12), "{mount}");
    // The disk first: what is attached is in use, with a loop device or without.
    for directory in [&disk, &image, &snapshot] {
        let (code, said) = run(&["detach", directory]);
        assert_eq!((code, &*said), (Some(0), ""));
    }
    assert_eq!(mounts_below(place), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_age_and_expire_by_the_appliances_clock() {
    let ahead = Duration::from_secs(7200);
    let appliance = Appliance::start_ahead(ahead);
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    let live = create(worker, "live", None).await;
    worker.acquire(&live, Access::ReadWrite).await.unwrap();
    let captured = worker.capture(&live).await.unwrap().id;
    let snapshot = worker.client().snapshot(captured).await.unwrap();
    // An hour that the appliance counts: its faces here refuse a moment that a worker names.
    assert!(snapshot.expires_at.unwrap() > snapshot.created_at);
    // The next process does not know that it was just taken.
    let machine = machine.restart(&appliance).await;
    let worker = &machine.worker;
    await_snapshots(worker, ahead / 2, 0).await;
    worker.release(&live).await.unwrap();
    worker.remove(&live).await.unwrap();
    assert_nothing_left(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_is_one_snapshot_for_all_workers() {
    let appliance = Appliance::start();
    let first = Machine::start(&appliance).await;
    let second = Machine::start(&appliance).await;
    let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
    let mut sealed = Vec::new();
    for machine in [&first, &second] {
        let worker = &machine.worker;
        let key = create(worker, "active", None).await;
        let path = worker.ensure_mounted(&key, Access::ReadWrite).await.unwrap();
        std::fs::write(path.join("file"), "content").unwrap();
        let registration = Registration { chain: chain.clone(), blob: None };
        let snapshot = worker.seal(&key, Some(registration)).await.unwrap();
        let committed =
            worker.commit(&key, None, Key::docker("committed"), |_| extra()).await.unwrap();
        assert_eq!(committed.snapshot(), Some(snapshot));
        assert!(worker.get(&key).is_none());
        sealed.push(committed.snapshot().unwrap());
    }
    assert_eq!(sealed[0], sealed[1]);
    assert_eq!(first.worker.find_chain(&chain).await.unwrap(), Some(sealed[0]));
    // It stays for the second worker when the first lets go, and ends with the last.
    first.worker.remove(&Key::docker("committed")).await.unwrap();
    first.worker.reconcile(Duration::ZERO).await.unwrap();
    assert_eq!(second.worker.find_chain(&chain).await.unwrap(), Some(sealed[0]));
    let view = second.worker.view(sealed[0]).await.unwrap();
    assert_eq!(read(view.path(), "file").as_deref(), Some("content"));
    drop(view);
    second.worker.publish(sealed[0].id).await.unwrap();
    second.worker.publish(sealed[0].id).await.unwrap();
    second.worker.remove(&Key::docker("committed")).await.unwrap();
    second.worker.reconcile(Duration::ZERO).await.unwrap();
    let published = second.worker.published(&Chosen::default()).await.unwrap();
    assert_eq!(published.len(), 1);
    assert_eq!(published[0].snapshot_id, sealed[0].id);
    assert_eq!(published[0].images.keys().collect::<Vec<_>>(), ["*"]);
    assert!(published[0].reclaimable.is_some(), "{published:?}");
    assert_eq!(second.worker.find_chain(&chain).await.unwrap(), Some(sealed[0]));
    second.worker.unpublish(sealed[0].id).await.unwrap();
    assert_nothing_left(&second.worker).await;
    assert_eq!(second.worker.find_chain(&chain).await.unwrap(), None);
}

/// The snapshot that a disk was cloned from.
fn origin(worker: &Worker, key: &Key) -> SnapshotRef {
    let Content::Disk { from, .. } = worker.get(key).unwrap().content else {
        panic!("{key} is no disk");
    };
    from
}

/// Makes a disk of nothing, and tells what it was cloned from and what is in its root.
async fn empty(worker: &Worker, name: &str) -> (SnapshotRef, usize) {
    let key = create(worker, name, None).await;
    let path = worker.acquire(&key, Access::ReadWrite).await.unwrap();
    let found = (origin(worker, &key), std::fs::read_dir(path).unwrap().count());
    worker.release(&key).await.unwrap();
    worker.remove(&key).await.unwrap();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_share_the_empty_disk_that_each_of_them_would_make() {
    let appliance = Appliance::start();
    let first = Machine::start(&appliance).await;
    let second = Machine::start(&appliance).await;
    let (of_first, _) = empty(&first.worker, "one").await;
    assert_eq!(empty(&second.worker, "one").await, (of_first, 0));
    for machine in [&first, &second] {
        assert_nothing_left(&machine.worker).await;
    }
    // Deleted by somebody, it is made once more.
    appliance.client().delete_snapshot(of_first.id).await.unwrap();
    let (again, count) = empty(&first.worker, "two").await;
    assert_ne!(again, of_first);
    assert_eq!(count, 0);
    assert_eq!(empty(&second.worker, "two").await, (again, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_disk_that_somebody_filled_is_used_by_no_other_worker() {
    let appliance = Appliance::start();
    let attacker = Machine::start(&appliance).await;
    let (clean, _) = empty(&attacker.worker, "learn").await;
    let name = appliance.client().snapshot(clean.id).await.unwrap().name.unwrap();
    let disks = [
        // As large as it should be, and with a program for all that start in it.
        layer(&attacker.worker, "ld.so.preload", None).await,
        // All zeros, and shorter.
        create(&attacker.worker, "short", None).await,
    ];
    for (index, disk) in disks.iter().enumerate() {
        let holder = appliance.client().snapshots(&named(&name)).await.unwrap().items;
        appliance.client().delete_snapshot(holder[0].id).await.unwrap();
        let path = format!("evil/{index}");
        match attacker.worker.get(disk).unwrap().snapshot() {
            Some(snapshot) => appliance.client().create_clone(snapshot.id, &path).await.unwrap(),
            None => appliance.client().create_file(&path, 1 << 20).await.unwrap(),
        };
        let request = CreateSnapshot {
            path: path.clone(),
            name: Some(name.clone()),
            ..CreateSnapshot::default()
        };
        let evil = appliance.client().create_snapshot(&request).await.unwrap();
        let fresh = Machine::start(&appliance).await;
        let (own, count) = empty(&fresh.worker, "one").await;
        assert_eq!(count, 0, "{index}");
        assert_ne!(own.id, evil.id);
        // Its own one is made once, not each time, also over a restart.
        let fresh = fresh.restart(&appliance).await;
        assert_eq!(empty(&fresh.worker, "two").await, (own, 0));
        appliance.client().delete_file(&path).await.unwrap();
    }
    for disk in &disks {
        attacker.worker.remove(disk).await.unwrap();
    }
    assert_nothing_left(&attacker.worker).await;
}

fn named(name: &str) -> ListSnapshots {
    ListSnapshots { name: Some(name.to_owned()), ..ListSnapshots::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_grow_but_do_not_shrink() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let worker = &machine.worker;
    layer(worker, "image", None).await;
    let sized = |bytes: u64| {
        Extra::Docker(DockerExtra { disk_size_bytes: Some(bytes), ..DockerExtra::default() })
    };
    let large = Key::docker("large");
    let size_bytes = 2 * support::DISK_BYTES;
    worker.create(large.clone(), Some(Key::docker("image")), sized(size_bytes)).await.unwrap();
    let path = worker.acquire(&large, Access::ReadWrite).await.unwrap();
    let statistics = rustix::fs::statvfs(&path).unwrap();
    assert!(statistics.f_blocks * statistics.f_frsize > support::DISK_BYTES * 3 / 2);
    assert_eq!(read(&path, "image").as_deref(), Some("image"));
    let small = Key::docker("small");
    worker.create(small.clone(), Some(Key::docker("image")), sized(1 << 20)).await.unwrap();
    let error = worker.acquire(&small, Access::ReadWrite).await.unwrap_err();
    assert!(matches!(error, WorkerError::TooSmall { .. }), "{error}");
    worker.release(&large).await.unwrap();
    for name in ["large", "small", "image"] {
        worker.remove(&Key::docker(name)).await.unwrap();
    }
    assert_nothing_left(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_appliance_that_is_away_is_named_and_waited_for() {
    let mut appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    layer(&machine.worker, "image", None).await;
    // What is being unmounted when the appliance goes waits for it.
    machine.worker.clean_up().await;
    appliance.stop();
    // Starting needs no appliance, nor do records.
    let machine = machine.restart(&appliance).await;
    let worker = &machine.worker;
    let key = create(worker, "container", Some("image")).await;
    let error = worker.acquire(&key, Access::ReadWrite).await.unwrap_err();
    assert!(error.to_string().contains(&appliance.url), "{error}");
    worker.remove(&key).await.unwrap();
    appliance.serve();
    let key = create(worker, "container", Some("image")).await;
    let path = worker.acquire(&key, Access::ReadWrite).await.unwrap();
    assert_eq!(read(&path, "image").as_deref(), Some("image"));
    worker.release(&key).await.unwrap();
    worker.remove(&key).await.unwrap();
    worker.remove(&Key::docker("image")).await.unwrap();
    assert_nothing_left(worker).await;
}

//! The graphdriver plugin as dockerd drives it: pull, create, start, commit, build, push, remove,
//! in the sequences of real daemons, over a real appliance with a real FUSE attach.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "support/files.rs"]
mod files;
#[path = "docker/ordinary.rs"]
mod ordinary;
#[path = "support/plugin.rs"]
mod plugin;
#[path = "docker/pushed.rs"]
mod pushed;
mod support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::json;
use slackwater_client::query::ListSnapshots;
use slackwater_client::types::SnapshotId;
use slackwater_driver::worker::{Chosen, Engine, Key};

use self::files::{await_files, files};
use self::plugin::{Plugin, layer, set_up_init};
use self::support::{Appliance, DISK_BYTES, Machine};

/// Names of layers as Docker makes them.
fn id(letter: char) -> String {
    letter.to_string().repeat(64)
}

fn base() -> Vec<u8> {
    layer(&[("etc/hosts", "the image's own\n"), ("bin/tool", "tool\n"), ("etc/old", "old\n")])
}

/// Creates and sets up a container as `docker create` does; its mount, released.
fn create_container(plugin: &Plugin, name: &str, image: &str) {
    let init = format!("{name}-init");
    plugin.create_read_write(&init, image);
    set_up_init(&plugin.get(&init));
    plugin.put(&init);
    plugin.create_read_write(name, &init);
    plugin.get(name);
    plugin.put(name);
}

fn read(root: &Path, name: &str) -> String {
    std::fs::read_to_string(root.join(name)).unwrap()
}

fn is_there(root: &Path, name: &str) -> bool {
    std::fs::symlink_metadata(root.join(name)).is_ok()
}

fn is_read_only(root: &Path) -> bool {
    match std::fs::write(root.join("probe"), "") {
        Ok(()) => false,
        Err(error) => error.kind() == std::io::ErrorKind::ReadOnlyFilesystem,
    }
}

/// Lines of `docker diff`.
fn changes(plugin: &Plugin, id: &str, parent: &str) -> Vec<(String, u64)> {
    let answer = plugin.ok("Changes", &json!({ "ID": id, "Parent": parent }));
    let changes = answer["Changes"].as_array().unwrap().iter();
    changes
        .map(|change| {
            (change["Path"].as_str().unwrap().to_owned(), change["Kind"].as_u64().unwrap())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ordinary_image_is_pulled_and_given_again_byte_for_byte() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (a, b) = (id('a'), id('b'));
    assert_eq!(
        plugin.raw(b"POST /Plugin.Activate HTTP/1.0\r\nContent-Length: 0\r\n\r\n").1,
        br#"{"Implements":["GraphDriver"]}"#
    );
    let capabilities = plugin.ok("Capabilities", &json!({}));
    assert_eq!(capabilities["Capabilities"]["ReproducesExactDiffs"], true);

    let first = base();
    let second = layer(&[("etc/.wh.old", ""), ("etc/hosts", "changed\n"), ("new/", "")]);
    plugin.create(&a, "");
    // dockerd repeats a call whose answer it did not get.
    plugin.create(&a, "");
    assert_eq!(plugin.apply(&a, "", &first), 25);
    plugin.create(&b, &a);
    plugin.apply(&b, &a, &second);
    assert_eq!(plugin.diff(&a, ""), first);
    assert_eq!(plugin.diff(&b, &a), second);
    assert_eq!(plugin.diff(&b, &a), second);

    // Of a pulled image nothing is left but what keeps its snapshots.
    await_files(&appliance, &machine, "disks/", 0).await;
    await_files(&appliance, &machine, "holds/", 2).await;

    let root = plugin.get(&b);
    assert!(is_read_only(&root));
    assert_eq!(read(&root, "etc/hosts"), "changed\n");
    assert!(!is_there(&root, "etc/old") && !is_there(&root, "lost+found"));
    plugin.put(&b);
    let mut expected = vec![
        ("/etc".to_owned(), 0),
        ("/etc/hosts".to_owned(), 0),
        ("/etc/old".to_owned(), 2),
        ("/new".to_owned(), 1),
    ];
    expected.sort();
    let mut got = changes(&plugin, &b, &a);
    got.sort();
    got.retain(|(path, _)| path != "/etc");
    expected.retain(|(path, _)| path != "/etc");
    assert_eq!(got, expected);

    let metadata = plugin.ok("GetMetadata", &json!({ "ID": b }));
    assert_eq!(metadata["Metadata"]["Layer"], b);
    assert!(
        metadata["Metadata"]["Snapshot"].is_string() && metadata["Metadata"]["Store"].is_string()
    );
    let status = plugin.ok("Status", &json!({}))["Status"].to_string();
    assert!(status.contains(&appliance.url) && status.contains("fuse"), "{status}");

    let refusal = plugin.refused("Remove", &json!({ "ID": a }));
    assert!(refusal.contains("made above it"), "{refusal}");
    plugin.remove(&b);
    plugin.remove(&a);
    plugin.remove(&a);
    assert!(!plugin.exists(&a));
    await_files(&appliance, &machine, "", 0).await;
    let recordings = std::fs::read_dir(machine.worker.recordings_directory()).unwrap();
    assert_eq!(recordings.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_of_an_image_share_what_dockerd_sets_up() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (image, x, y) = (id('d'), id('1'), id('2'));
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    create_container(&plugin, &x, &image);
    await_files(&appliance, &machine, "disks/", 1).await;
    let holds = files(&appliance, &machine, "holds/").await.len();
    // One more of the image: its init layer is what the first one's was, with nothing of its own.
    let init = format!("{y}-init");
    plugin.create_read_write(&init, &image);
    let root = plugin.get(&init);
    assert!(is_read_only(&root));
    set_up_init(&root);
    plugin.put(&init);
    plugin.create_read_write(&y, &init);
    let root = plugin.get(&y);
    assert!(is_there(&root, ".dockerenv"));
    assert_eq!(read(&root, "etc/hosts"), "");
    plugin.put(&y);
    await_files(&appliance, &machine, "disks/", 2).await;
    assert_eq!(files(&appliance, &machine, "holds/").await.len(), holds);
    for name in [&x, &y] {
        plugin.remove(name);
        plugin.remove(&format!("{name}-init"));
    }
    // With the image goes what was remembered for it.
    plugin.remove(&image);
    assert!(machine.worker.list(Engine::Docker).is_empty());
    await_files(&appliance, &machine, "", 0).await;
}

fn volumes(machine: &Machine) -> Vec<String> {
    machine.worker.list(Engine::Docker).into_iter().map(|volume| volume.key.name).collect()
}

/// dockerd gives up a container when it does not hear that a call was carried out, and leaves what it
/// has made so far.
#[tokio::test(flavor = "multi_thread")]
async fn what_dockerd_has_forgotten_goes_with_its_image() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (image, x, y) = (id('d'), id('1'), id('2'));
    let make_image = || {
        plugin.create(&image, "");
        plugin.apply(&image, "", &base());
    };
    make_image();
    // Put was not heard.
    let init = format!("{x}-init");
    plugin.create_read_write(&init, &image);
    set_up_init(&plugin.get(&init));
    plugin.remove(&image);
    assert_eq!(volumes(&machine), [""; 0]);
    await_files(&appliance, &machine, "", 0).await;

    make_image();
    create_container(&plugin, &x, &image);
    // CreateReadWrite was not heard: the init layer is one that has nothing of its own.
    let other_init = format!("{y}-init");
    plugin.create_read_write(&other_init, &image);
    plugin.create_read_write(&y, &other_init);
    let refusal = plugin.refused("Remove", &json!({ "ID": image }));
    assert!(refusal.contains(&init), "what a container wrote stays: {refusal}");
    for name in [&x, &init] {
        assert!(plugin.exists(name));
        plugin.remove(name);
    }
    plugin.remove(&image);
    assert_eq!(volumes(&machine), [""; 0]);
    await_files(&appliance, &machine, "", 0).await;
}

/// The driver was killed after it had made a layer, and before dockerd had the answer, or while it was sent a tar.
#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_dockerd_gave_up_goes_with_the_one_below() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let socket = machine.path().join("plugin.sock");
    let plugin = Plugin::serve(&machine.worker, &socket);
    let (image, unheard, cut, whole) = (id('d'), id('1'), id('2'), id('3'));
    let tar = layer(&[("own", "one")]);
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    plugin.create(&unheard, &image);
    let removal = json!({ "ID": image });
    let refusal = plugin.refused("Remove", &removal);
    assert!(refusal.contains(&unheard), "it may be sent its tar still: {refusal}");
    plugin.create(&cut, &image);
    plugin.apply_cut(&cut, &image, &tar[..512]);
    plugin.stop().await;

    let plugin = Plugin::serve(&machine.worker, &socket);
    plugin.create(&whole, &image);
    plugin.apply(&whole, &image, &tar);
    plugin.stop().await;
    let plugin = Plugin::serve(&machine.worker, &socket);
    let refusal = plugin.refused("Remove", &removal);
    assert!(refusal.contains(&whole), "a whole layer stays: {refusal}");
    assert!(!plugin.exists(&unheard) && !plugin.exists(&cut));
    plugin.remove(&whole);
    plugin.create(&unheard, &image);
    plugin.stop().await;
    // By the removal alone.
    let plugin = Plugin::serve(&machine.worker, &socket);
    plugin.remove(&image);
    assert_eq!(volumes(&machine), [""; 0]);
    await_files(&appliance, &machine, "", 0).await;
    assert_eq!(std::fs::read_dir(machine.worker.recordings_directory()).unwrap().count(), 0);
}

/// What BuildKit made and has not written yet has another kind of id, and stays.
#[tokio::test(flavor = "multi_thread")]
async fn layers_that_dockerd_gave_up_go_when_it_begins() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let socket = machine.path().join("plugin.sock");
    let plugin = Plugin::serve(&machine.worker, &socket);
    let (image, above, lone) = (id('d'), id('1'), id('2'));
    let cache_mount = "k3wfr2p0xyzt1v8q9s7m6n5b4";
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    plugin.create(&above, &image);
    plugin.create(&lone, "");
    plugin.create(cache_mount, "");
    plugin.stop().await;
    let plugin = Plugin::serve(&machine.worker, &socket);
    plugin.ok("Init", &json!({ "Home": "/h", "Opts": null }));
    assert!(!plugin.exists(&above) && !plugin.exists(&lone));
    assert!(plugin.exists(&image) && plugin.exists(cache_mount));
    plugin.get(cache_mount);
    plugin.put(cache_mount);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_layer_without_a_container_goes_when_dockerd_begins() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (image, x, y) = (id('d'), id('1'), id('2'));
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    let begun = |name: &str| {
        plugin.create_read_write(&format!("{name}-init"), &image);
        set_up_init(&plugin.get(&format!("{name}-init")));
    };
    begun(&x);
    begun(&y);
    plugin.put(&format!("{y}-init"));
    plugin.create_read_write(&y, &format!("{y}-init"));
    plugin.ok("Init", &json!({ "Home": "/h", "Opts": null }));
    assert!(!plugin.exists(&format!("{x}-init")));
    assert!(plugin.exists(&y) && plugin.exists(&format!("{y}-init")) && plugin.exists(&image));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_what_the_container_changed() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (image, x, n) = (id('d'), id('1'), id('e'));
    let init = format!("{x}-init");
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    create_container(&plugin, &x, &image);
    let root = plugin.get(&x);
    std::fs::write(root.join("etc/made"), vec![b'm'; 1 << 20]).unwrap();
    std::fs::write(root.join("dev/kept"), "the container's").unwrap();
    let mut got = changes(&plugin, &x, &init);
    got.retain(|(_, kind)| *kind != 0);
    assert_eq!(got, [("/dev/kept".to_owned(), 1), ("/etc/made".to_owned(), 1)]);
    let size = plugin.ok("DiffSize", &json!({ "ID": x, "Parent": init }));
    assert!(size["Size"].as_u64().unwrap() > 0, "{size}");

    // While the container has it mounted.
    let reference = plugin.diff(&x, &init);
    assert!(reference.len() <= 4096, "{} bytes", reference.len());
    plugin.create(&n, &image);
    assert!(plugin.apply(&n, &image, &reference) > 1 << 19);
    let again = plugin.diff(&x, &init);
    assert_ne!(again, reference, "each commit is another one");
    plugin.create("again", &image);
    plugin.apply("again", &image, &again);
    plugin.put(&x);

    let root = plugin.get(&n);
    assert!(is_read_only(&root));
    assert_eq!(read(&root, "etc/hosts"), "the image's own\n");
    assert_eq!(read(&root, "etc/made").len(), 1 << 20);
    assert_eq!(read(&root, "dev/kept"), "the container's");
    for name in [".dockerenv", "dev/console", "dev/pts", "etc/mtab", "proc", "sys"] {
        assert!(!is_there(&root, name), "{name}");
    }
    plugin.put(&n);
    let volumes = machine.worker.list(Engine::Docker);
    assert!(volumes.iter().all(|volume| !volume.key.name.starts_with("commit:")));
    for name in [&x, &init, "again", &n, &image] {
        plugin.remove(name);
    }
    await_files(&appliance, &machine, "", 0).await;
    assert_nothing_unnamed(&appliance).await;
}

/// The snapshots that are published.
async fn published(machine: &Machine) -> Vec<SnapshotId> {
    let published = machine.worker.published(&Chosen::default()).await.unwrap();
    published.into_iter().map(|published| published.snapshot_id).collect()
}

/// Nothing is left on the appliance but empty disks, which have names.
async fn assert_nothing_unnamed(appliance: &Appliance) {
    let left = appliance.client().snapshots(&ListSnapshots::default()).await.unwrap().items;
    assert!(left.iter().all(|left| left.name.is_some()), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pushed_commit_is_pulled_by_another_worker() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let (image, x, n) = (id('d'), id('1'), id('e'));
    let init = format!("{x}-init");
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    create_container(&plugin, &x, &image);
    std::fs::write(plugin.get(&x).join("made"), "by x").unwrap();
    let reference = plugin.diff(&x, &init);
    plugin.put(&x);
    plugin.create(&n, &image);
    plugin.apply(&n, &image, &reference);
    assert!(published(&machine).await.is_empty(), "it has not left yet");
    // A push gives the same bytes each time, and keeps the snapshot for whoever pulls it.
    assert_eq!(plugin.diff(&n, &image), reference);
    assert_eq!(plugin.diff(&n, &image), reference);
    let snapshot = machine.worker.get(&Key::docker(n.as_str())).unwrap().snapshot().unwrap();
    assert_eq!(published(&machine).await, [snapshot.id]);
    for name in [&x, &init, &n, &image] {
        plugin.remove(name);
    }
    await_files(&appliance, &machine, "", 0).await;

    let other = Machine::start(&appliance).await;
    let elsewhere = Plugin::serve(&other.worker, &other.path().join("plugin.sock"));
    elsewhere.create(&n, "");
    elsewhere.apply(&n, "", &reference);
    let root = elsewhere.get(&n);
    assert_eq!(read(&root, "made"), "by x");
    assert_eq!(read(&root, "bin/tool"), "tool\n");
    elsewhere.put(&n);
    elsewhere.remove(&n);
    await_files(&appliance, &other, "", 0).await;
    other.worker.unpublish(snapshot.id).await.unwrap();
    assert_nothing_unnamed(&appliance).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buildkit_writes_layers_that_become_references() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let image = id('f');
    let (one, two) = ("0vdk2hqwm1xyz7r8c9t0u1v2w", "1vdk2hqwm1xyz7r8c9t0u1v2w");
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    plugin.create(one, &image);
    let root = plugin.get(one);
    std::fs::write(root.join("etc/one"), "1").unwrap();
    plugin.put(one);
    // Written again, as its cache of a context is.
    let root = plugin.get(one);
    std::fs::write(root.join("etc/one"), "one").unwrap();
    plugin.put(one);
    plugin.create(two, one);
    let root = plugin.get(two);
    assert_eq!(read(&root, "etc/one"), "one");
    std::fs::remove_file(root.join("etc/old")).unwrap();
    plugin.put(two);
    let first = plugin.diff(one, &image);
    let second = plugin.diff(two, one);
    assert!(first.len() <= 4096 && second.len() <= 4096 && first != second);
    assert!(published(&machine).await.is_empty(), "nothing has left yet");
    assert_eq!(plugin.diff(one, &image), first);
    assert_eq!(plugin.diff(two, one), second);
    assert_eq!(published(&machine).await.len(), 2);
    let root = plugin.get(two);
    assert!(is_read_only(&root) && !is_there(&root, "etc/old"));
    plugin.put(two);
    // A step with nothing written, and its view.
    let three = "2vdk2hqwm1xyz7r8c9t0u1v2w";
    plugin.create(three, two);
    assert_eq!(plugin.diff(three, two), plugin.diff(three, two));
    plugin.create_read_write("view0", three);
    let root = plugin.get("view0");
    std::fs::write(root.join("scratch"), "").unwrap();
    plugin.put("view0");
    for name in ["view0", three, two, one, &image] {
        plugin.remove(name);
    }
    await_files(&appliance, &machine, "", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storage_options_size_the_disk_and_share_the_root() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    let image = id('c');
    plugin.create(&image, "");
    plugin.apply(&image, "", &base());
    let create = |name: &str, option: &str, value: &str| {
        let request = json!({ "ID": name, "Parent": image, "StorageOpt": { option: value } });
        plugin.answer("CreateReadWrite", &request)["Err"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(create("large", "size", "1GiB"), "");
    let root = plugin.get("large");
    let total = rustix::fs::statvfs(&root).unwrap();
    assert!(total.f_blocks * total.f_frsize > 2 * DISK_BYTES);
    assert_eq!(read(&root, "bin/tool"), "tool\n");
    plugin.put("large");
    assert_eq!(create("small", "size", "1MiB"), "");
    let refusal = plugin.refused("Get", &json!({ "ID": "small" }));
    assert!(refusal.contains(&DISK_BYTES.to_string()), "{refusal}");
    let refusal = create("odd", "colour", "red");
    assert!(refusal.contains("colour") && refusal.contains("shared"), "{refusal}");
    assert!(!plugin.exists("odd"));

    assert_eq!(create("shared1", "shared", "true"), "");
    assert_eq!(create("shared2", "shared", "true"), "");
    let (first, second) = (plugin.get("shared1"), plugin.get("shared2"));
    assert!(is_read_only(&first));
    let device = |root: &Path| std::fs::metadata(root).unwrap().dev();
    assert_eq!(device(&first), device(&second), "one page cache");
    plugin.put("shared1");
    assert_eq!(read(&second, "bin/tool"), "tool\n");
    plugin.put("shared2");
}

//! Loop devices and ext4, on a local directory in the export's place. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod foreign;
#[path = "support/kernel.rs"]
mod kernel;
mod support;
#[path = "support/tool.rs"]
mod tool;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use slackwater_attach::{Access, Attach, AttachError, Source, run_tool};
use support::{PATIENCE, Place, run, until};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const DISK_SIZE_BYTES: u64 = 256 * MIB;

async fn attach(place: &Place) -> Attach {
    let options = place.options(Vec::new(), tool::program("as_a_tool"));
    Attach::on_directory(options, place.export.clone()).await.unwrap()
}

#[test]
fn as_a_tool() {
    tool::become_one(run_tool);
}

/// An attach and an empty disk `name` on its export.
async fn disk(place: &Place, name: &str) -> Attach {
    let attach = attach(place).await;
    place.make_file(name, DISK_SIZE_BYTES);
    attach.make_file_system(name).await.unwrap();
    attach
}

fn target(place: &Place, name: &str) -> PathBuf {
    place.state.join("mounts").join(name)
}

fn check_disk(path: &Path) {
    run("e2fsck", &["-f", "-n", path.to_str().unwrap()]);
}

/// A process that is ended with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// As an error does on older kernels: no change of this mount namespace's table is signalled.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_became_read_only_elsewhere_is_known_as_it_is_now() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let (source, target) = (Source::File("disk"), target(&place, "a"));
    attach.mount(source, &target, Access::ReadWrite).await.unwrap();
    let is_mounted = || attach.is_mounted(source, &target, Access::ReadWrite);
    let remount = |option| {
        let target = target.to_str().unwrap();
        run("unshare", &["--mount", "--", "mount", "-n", "-o", option, target]);
    };
    assert!(is_mounted().unwrap());
    remount("remount,ro");
    assert!(matches!(is_mounted(), Err(AttachError::Occupied { .. })), "{:?}", is_mounted());
    // The table is read again, and is one of a disk that is read-only.
    let other = place.state.join("other");
    fs::create_dir(&other).unwrap();
    run("mount", &["-n", "-t", "tmpfs", "test", other.to_str().unwrap()]);
    run("umount", &["-n", other.to_str().unwrap()]);
    assert!(matches!(is_mounted(), Err(AttachError::Occupied { .. })), "{:?}", is_mounted());
    remount("remount,rw");
    assert!(is_mounted().unwrap());
    attach.unmount(&target).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_made_written_and_read_again() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    assert_eq!(fs::read_dir(&target).unwrap().count(), 0, "an empty disk has no lost+found");
    // Linux before reads none ahead, and knows no such option.
    let reads_none_ahead = kernel::mount_line(&target).contains("no_prefetch_block_bitmaps");
    assert_eq!(reads_none_ahead, kernel::release() >= (5, 13));
    fs::write(target.join("hello"), "world").unwrap();
    attach.sync(&target).await.unwrap();

    let mounts = attach.mounts().await.unwrap();
    assert_eq!(mounts.len(), 1);
    assert_eq!((&*mounts[0].source, &mounts[0].target), ("disk", &target));
    assert!(!mounts[0].read_only);
    assert_eq!(place.loop_devices(), [mounts[0].loop_device.clone().unwrap()]);
    assert!(!attach.is_released(Source::File("disk")).await.unwrap());
    assert!(matches!(attach.shut_down().await, Err(AttachError::Busy { .. })));

    attach.unmount(&target).await.unwrap();
    assert!(!target.exists());
    until("it is released", async || attach.is_released(Source::File("disk")).await.unwrap()).await;
    attach.unmount(&target).await.unwrap();
    check_disk(&place.export.join("disk"));

    attach.mount(Source::File("disk"), &target, Access::ReadOnly).await.unwrap();
    assert_eq!(fs::read_to_string(target.join("hello")).unwrap(), "world");
    attach.unmount(&target).await.unwrap();
    // Not at once: a test that runs beside this one may hold a copy of the mounts.
    until("it is released", async || attach.is_released(Source::File("disk")).await.unwrap()).await;
    attach.shut_down().await.unwrap();
    assert_eq!(place.loop_devices(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_that_gave_up_writing_is_not_synced() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    attach.sync(&target).await.unwrap();
    let path = target.to_str().unwrap();
    let remount = |options| support::run("mount", &["-n", "-o", options, path]);
    // By hand: all is written, and nothing wrong.
    remount("remount,ro");
    attach.sync(&target).await.unwrap();
    remount("remount,rw");
    let mounts = attach.mounts().await.unwrap();
    let device = mounts[0].loop_device.as_ref().unwrap().file_name().unwrap();
    let errors = Path::new("/sys/fs/ext4").join(device).join("trigger_fs_error");
    fs::write(errors, "an error of the test").unwrap();
    let is_noted = async || {
        let error = attach.sync(&target).await.unwrap_err();
        assert!(matches!(error, AttachError::LostWrites { .. }), "{error:?}");
        attach.unmount(&target).await.unwrap();
    };
    is_noted().await;
    // As older kernels leave it after that, whose own sync is well.
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    remount("remount,ro");
    support::run("sync", &["--file-system", path]);
    is_noted().await;

    // Not at once: a tool that runs beside this, or a test, may hold a copy of the mounts.
    until("it is released", async || attach.is_released(Source::File("disk")).await.unwrap()).await;
    attach.mount(Source::File("disk"), &target, Access::ReadOnly).await.unwrap();
    attach.sync(&target).await.unwrap();
    attach.unmount(&target).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_disk_is_the_same_bytes_each_time() {
    let place = Place::new();
    let attach = disk(&place, "one").await;
    // The tool's clock has whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    place.make_file("two", DISK_SIZE_BYTES);
    attach.make_file_system("two").await.unwrap();
    let read = |name: &str| fs::read(place.export.join(name)).unwrap();
    assert!(read("one") == read("two"));
    check_disk(&place.export.join("one"));
}

#[tokio::test(flavor = "multi_thread")]
async fn mounting_again_is_ok_and_mounting_something_else_is_not() {
    let place = Place::new();
    let attach = disk(&place, "one").await;
    place.make_file("two", DISK_SIZE_BYTES);
    let target = target(&place, "a");
    for _ in 0..2 {
        attach.mount(Source::File("one"), &target, Access::ReadWrite).await.unwrap();
    }
    assert_eq!(place.mounted().len(), 1);
    let other = attach.mount(Source::File("two"), &target, Access::ReadWrite).await.unwrap_err();
    assert!(matches!(other, AttachError::Occupied { .. }), "{other:?}");
    let text = other.to_string();
    assert!(text.contains("`one` writable") && text.contains("`two` writable"), "{text}");
    let other = attach.mount(Source::File("one"), &target, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(other, AttachError::Occupied { .. }), "{other:?}");
    // Two devices on one disk would be two file systems that do not know of each other.
    let elsewhere = target.with_file_name("b");
    let other = attach.mount(Source::File("one"), &elsewhere, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(other, AttachError::InUse { .. }), "{other:?}");
    assert!(!elsewhere.exists());
    let other = attach.grow_file_system("one").await.unwrap_err();
    assert!(matches!(other, AttachError::InUse { .. }), "{other:?}");
    let other = attach.make_file_system("one").await.unwrap_err();
    assert!(matches!(other, AttachError::InUse { .. }), "{other:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_shared_and_refuses_writes() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let id = Uuid::new_v4();
    fs::rename(place.export.join("disk"), place.export.join(".snapshot").join(id.to_string()))
        .unwrap();
    let (a, b) = (target(&place, "a"), target(&place, "b"));
    let source = Source::Snapshot(id);
    let (first, second) = tokio::join!(
        attach.mount(source, &a, Access::ReadOnly),
        // A snapshot is read-only even so.
        attach.mount(source, &b, Access::ReadWrite),
    );
    first.and(second).unwrap();
    assert_eq!(place.loop_devices().len(), 1, "one device, one page cache");
    let mounts = attach.mounts().await.unwrap();
    assert!(mounts.iter().all(|mounted| mounted.read_only));
    assert!(mounts.iter().all(|mounted| mounted.source == format!(".snapshot/{id}")));
    let refused = fs::write(a.join("x"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    attach.unmount(&a).await.unwrap();
    assert!(!attach.is_released(source).await.unwrap());
    attach.unmount(&b).await.unwrap();
    // Not at once: a test that runs beside this one may hold a copy of the mounts.
    until("it is released", async || attach.is_released(source).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_disk_holds_writes_back_until_it_is_thawed() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    let error = attach.freeze(&target).await.unwrap_err();
    assert!(matches!(error, AttachError::NotMounted { .. }), "{error:?}");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    fs::write(target.join("before"), "x").unwrap();
    attach.freeze(&target).await.unwrap();
    attach.freeze(&target).await.unwrap();
    // What is in the file now is a snapshot of the disk, and whole without its journal.
    let id = Uuid::new_v4();
    fs::copy(place.export.join("disk"), place.export.join(".snapshot").join(id.to_string()))
        .unwrap();
    let path = target.join("after");
    let writing = tokio::task::spawn_blocking(move || fs::write(path, "x").unwrap());
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!writing.is_finished());
    attach.thaw(&target).await.unwrap();
    tokio::time::timeout(PATIENCE, writing).await.unwrap().unwrap();
    attach.thaw(&target).await.unwrap();

    let view = target.with_file_name("view");
    attach.mount(Source::Snapshot(id), &view, Access::ReadOnly).await.unwrap();
    assert!(view.join("before").exists());
    assert!(!view.join("after").exists());

    attach.freeze(&target).await.unwrap();
    attach.unmount(&target).await.unwrap();
    attach.thaw(&target).await.unwrap();
    let released = async || attach.is_released(Source::File("disk")).await.unwrap();
    until("it is released, frozen when unmounted", released).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_uses_a_disk_may_go_on_after_it_is_unmounted() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    let source = Source::File("disk");
    attach.mount(source, &target, Access::ReadWrite).await.unwrap();
    let mut file = fs::File::create(target.join("x")).unwrap();
    attach.unmount(&target).await.unwrap();
    assert!(!target.exists());
    assert!(!attach.is_released(source).await.unwrap());
    file.write_all(b"late").unwrap();
    // Mounted again meanwhile it is the same file system, on the same device.
    attach.mount(source, &target, Access::ReadWrite).await.unwrap();
    assert_eq!(fs::read(target.join("x")).unwrap(), b"late");
    assert_eq!(place.loop_devices().len(), 1);
    drop(file);
    attach.unmount(&target).await.unwrap();
    until("it is released", async || attach.is_released(source).await.unwrap()).await;
    check_disk(&place.export.join("disk"));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_mount_namespace_keeps_the_device() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    let source = Source::File("disk");
    attach.mount(source, &target, Access::ReadWrite).await.unwrap();
    // Removing the directory takes the mount away in all namespaces; what stands in it stays.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sleep", "1000"]).current_dir(&target);
    let other = Ended(command.spawn().unwrap());
    let (own, theirs) = (PathBuf::from("/proc/self"), format!("/proc/{}", other.0.id()));
    let namespace = |process: &Path| fs::read_link(process.join("ns/mnt")).unwrap();
    let is_apart = async || namespace(theirs.as_ref()) != namespace(&own);
    until("it has its namespace", is_apart).await;
    attach.unmount(&target).await.unwrap();
    assert!(!attach.is_released(source).await.unwrap());
    assert!(matches!(attach.shut_down().await, Err(AttachError::Busy { .. })));
    drop(other);
    until("it is released", async || attach.is_released(source).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_goes_on_where_a_killed_one_stopped() {
    let place = Place::new();
    let first = disk(&place, "disk").await;
    let target = target(&place, "a");
    first.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    first.freeze(&target).await.unwrap();
    // Killed between attaching a device and mounting it.
    let half = place.make_file("half", MIB);
    run("losetup", &["--find", "--show", half.to_str().unwrap()]);
    let before = first.mounts().await.unwrap();
    drop(first);

    let second = attach(&place).await;
    assert_eq!(second.mounts().await.unwrap(), before);
    // Not at once: a program that probes new devices, such as udev, may have it open.
    let half_released = async || second.is_released(Source::File("half")).await.unwrap();
    until("the half made one is released", half_released).await;
    fs::write(target.join("x"), "thawed").unwrap();
    second.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    second.unmount(&target).await.unwrap();
    assert!(place.mounted().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grown_disk_has_the_new_size_and_its_content() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    fs::write(target.join("x"), "content").unwrap();
    attach.sync(&target).await.unwrap();
    // As a snapshot of a running disk is: its journal is not clean.
    let copy = place.export.join("copy");
    fs::copy(place.export.join("disk"), &copy).unwrap();
    attach.unmount(&target).await.unwrap();

    fs::File::options().write(true).open(&copy).unwrap().set_len(4 * DISK_SIZE_BYTES).unwrap();
    attach.grow_file_system("copy").await.unwrap();
    assert!(place.mounted().is_empty());
    check_disk(&copy);
    attach.mount(Source::File("copy"), &target, Access::ReadWrite).await.unwrap();
    assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "content");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 1, "no lost+found came back");
    let size = run("stat", &["--file-system", "--format=%b", target.to_str().unwrap()]);
    let blocks: u64 = size.trim().parse().unwrap();
    assert!(blocks * 4096 > 3 * DISK_SIZE_BYTES, "{blocks} blocks");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_sources_are_clear_errors_and_leave_nothing() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    place.make_file("zeros", MIB);
    fs::write(place.export.join("noise"), b"noise".repeat(100_000)).unwrap();
    for name in ["zeros", "noise"] {
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let error = attach.mount(Source::File(name), &target, access).await.unwrap_err();
            assert!(matches!(error, AttachError::Damaged { .. }), "{error:?}");
        }
    }
    for name in ["zeros", "noise"] {
        // Found by the first tool, which ends as if all were well.
        let error = attach.grow_file_system(name).await.unwrap_err();
        assert!(matches!(error, AttachError::Damaged { .. }), "{error:?}");
        assert!(error.to_string().contains("not open"), "{error}");
    }
    // A snapshot that was taken of a running disk.
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    fs::write(target.join("x"), "x").unwrap();
    attach.sync(&target).await.unwrap();
    let id = Uuid::new_v4();
    fs::copy(place.export.join("disk"), place.export.join(".snapshot").join(id.to_string()))
        .unwrap();
    attach.unmount(&target).await.unwrap();
    let error = attach.mount(Source::Snapshot(id), &target, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(error, AttachError::Journal { .. }), "{error:?}");
    assert!(error.to_string().contains("--clone"), "{error}");

    let source = Source::Snapshot(Uuid::new_v4());
    let error = attach.mount(source, &target, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(error, AttachError::NotFound { .. }), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1:2049"), "{error}");
    let error = attach.mount(Source::File("../x"), &target, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(error, AttachError::Path { .. }), "{error:?}");
    assert!(!target.exists());
    // Not at once: a test that runs beside this one may hold a copy of the mounts.
    until("no device is left", async || place.loop_devices().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_not_ours_is_left_alone() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    fs::create_dir_all(&target).unwrap();
    run("mount", &["-n", "-t", "tmpfs", "none", target.to_str().unwrap()]);
    let error = attach.unmount(&target).await.unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    let error = attach.freeze(&target).await.unwrap_err();
    assert!(matches!(error, AttachError::NotMounted { .. }), "{error:?}");
    let error = attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    assert_eq!(attach.mounts().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_mounts_at_once_some_of_them_given_up_leave_no_device_behind() {
    const DISKS: u64 = 12;
    let place = Place::new();
    let attach = disk(&place, "0").await;
    for index in 1..DISKS {
        fs::copy(place.export.join("0"), place.export.join(index.to_string())).unwrap();
    }
    let mut mounting = tokio::task::JoinSet::new();
    for index in 0..DISKS {
        let (attach, name) = (attach.clone(), index.to_string());
        let target = target(&place, &name);
        mounting.spawn(async move {
            let mount = attach.mount(Source::File(&name), &target, Access::ReadWrite);
            // Every other caller stops waiting, each at another moment.
            let patience = if index % 2 == 0 { PATIENCE } else { Duration::from_millis(index) };
            let mounted = tokio::time::timeout(patience, mount).await;
            assert!(mounted.map_or(index % 2 == 1, |mounted| mounted.is_ok()), "disk {index}");
        });
    }
    mounting.join_all().await;
    for index in 0..DISKS {
        // Waits for its turn, so it comes after the mount that was begun.
        attach.unmount(&target(&place, &index.to_string())).await.unwrap();
    }
    // Not at once: a test that runs beside this one may hold a copy of the mounts.
    until("no device is left", async || place.loop_devices().is_empty()).await;
    assert!(place.mounted().is_empty());
}

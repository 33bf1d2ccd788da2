//! EROFS images, mounted from files of a local directory in the export's place. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "support/kernel.rs"]
mod kernel;
mod support;
#[path = "support/tool.rs"]
mod tool;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use slackwater_attach::{Access, Attach, AttachError, Rights, Source, run_tool};
use support::{Place, run, until};
use tempfile::TempDir;
use uuid::Uuid;

const MIB: u64 = 1 << 20;

async fn attach(place: &Place) -> Attach {
    let options = place.options(Vec::new(), tool::program("as_a_tool"));
    Attach::on_directory(options, place.export.clone()).await.unwrap()
}

#[test]
fn as_a_tool() {
    tool::become_one(run_tool);
}

/// An image with a file `hello`, as a file of the export of this name.
fn make_image(place: &Place, name: &str) {
    let tree = place.state.join("tree");
    fs::create_dir_all(&tree).unwrap();
    fs::create_dir(tree.join("deep")).unwrap();
    fs::write(tree.join("hello"), "world").unwrap();
    fs::set_permissions(tree.join("hello"), fs::Permissions::from_mode(0o4755)).unwrap();
    let image = place.export.join(name);
    // In Debian's erofs-utils, which deploy/install-needs installs for tests.
    run("mkfs.erofs", &["--quiet", image.to_str().unwrap(), tree.to_str().unwrap()]);
    fs::remove_dir_all(tree).unwrap();
}

fn target(place: &Place, name: &str) -> PathBuf {
    place.state.join("mounts").join(name)
}

/// Makes the export an ext4: not from every file system of a machine images are mounted.
fn on_ext4(place: &Place) -> TempDir {
    let below = tempfile::tempdir().unwrap();
    let disk = below.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(256 * MIB).unwrap();
    run("mkfs.ext4", &["-q", "-F", disk.to_str().unwrap()]);
    let export = place.export.to_str().unwrap();
    run("mount", &["-n", "-o", "loop", disk.to_str().unwrap(), export]);
    fs::create_dir(place.export.join(".snapshot")).unwrap();
    below
}

fn options_of(target: &Path) -> String {
    kernel::mount_line(target).split(' ').nth(5).unwrap().to_owned()
}

async fn is_released(attach: &Attach, source: Source<'_>) {
    until("it is released", async || attach.is_released(source).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_read_from_its_file_and_found_by_the_next_process() {
    let place = Place::new();
    let _below = on_ext4(&place);
    let id = Uuid::from_u128(7);
    make_image(&place, "layers image");
    make_image(&place, &format!(".snapshot/{id}"));
    let sources = [Source::File("layers image"), Source::Snapshot(id)];
    let names = ["layers image".to_owned(), format!(".snapshot/{id}")];
    for (source, name) in sources.into_iter().zip(names) {
        let attach = attach(&place).await;
        let target = target(&place, "a b");
        for _ in 0..2 {
            attach.mount_image(source, &target).await.unwrap();
            assert_eq!(place.mounted(), [target.clone(), place.export.clone()]);
        }
        assert_eq!(fs::read_to_string(target.join("hello")).unwrap(), "world");
        assert_eq!(fs::write(target.join("hello"), "").unwrap_err().raw_os_error(), Some(30));
        let options = options_of(&target);
        assert_eq!(options.split(',').filter(|one| ["ro", "nosuid"].contains(one)).count(), 1);
        assert!(options.starts_with("ro"), "{options}");
        assert!(!attach.is_released(source).await.unwrap());
        drop(attach);

        let next = self::attach(&place).await;
        let mounts = next.mounts().await.unwrap();
        assert_eq!(mounts, next.mounts_anywhere().await.unwrap());
        assert_eq!((&*mounts[0].source, &mounts[0].target, mounts.len()), (&*name, &target, 1));
        assert!(mounts[0].read_only);
        // The export is on a file system that images are mounted from.
        let has_device = mounts[0].loop_device.is_some();
        assert_eq!(has_device, kernel::release() < (6, 12), "{:?}", mounts[0].loop_device);
        assert_eq!(place.loop_devices().len(), usize::from(has_device));
        assert!(matches!(next.shut_down().await, Err(AttachError::Busy { .. })));
        let error = next.freeze(&target).await.unwrap_err();
        assert!(matches!(error, AttachError::NotMounted { .. }), "{error:?}");
        next.unmount(&target).await.unwrap();
        assert!(!target.exists());
        is_released(&next, source).await;
        next.shut_down().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_mounted_twice_is_one_file_system_and_in_use_to_the_last() {
    let place = Place::new();
    let _below = on_ext4(&place);
    let attach = attach(&place).await;
    make_image(&place, "image");
    // Not below the state directory, as people attach them.
    let outside = place.state.parent().unwrap().join("outside");
    let targets = [outside.join("a"), outside.join("b")];
    let source = Source::File("image");
    for target in &targets {
        attach.mount_image(source, target).await.unwrap();
    }
    let device = |target: &Path| fs::metadata(target.join("hello")).unwrap().dev();
    assert_eq!(device(&targets[0]), device(&targets[1]));
    assert_eq!(attach.mounts_anywhere().await.unwrap().len(), 2);
    let error = attach.mount(source, &target(&place, "c"), Access::ReadWrite).await.unwrap_err();
    assert!(matches!(error, AttachError::InUse { .. }), "{error:?}");
    let [a, b] = &targets;
    let c = outside.join("c");
    let looked = attach.mounted_images(&[(source, a), (source, &c), (source, b)]).unwrap();
    assert_eq!(looked, [true, false, true]);
    let error = attach.mounted_images(&[(source, a), (Source::File("other"), b)]).unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    let error = attach.is_mounted(source, a, Access::ReadOnly).unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "an image is no disk: {error:?}");
    // A directory of the image that is bound elsewhere is not taken for the image.
    let (deep, part) = (targets[0].join("deep"), outside.join("part"));
    fs::create_dir(&part).unwrap();
    run("mount", &["-n", "--bind", deep.to_str().unwrap(), part.to_str().unwrap()]);
    for target in &targets {
        attach.unmount(target).await.unwrap();
    }
    for target in &targets {
        attach.mount_image(source, target).await.unwrap();
        assert_eq!(fs::read_to_string(target.join("hello")).unwrap(), "world");
    }
    run("umount", &[part.to_str().unwrap()]);
    let open = fs::File::open(targets[0].join("hello")).unwrap();
    for target in &targets {
        assert!(matches!(attach.shut_down().await, Err(AttachError::Busy { .. })));
        assert!(!attach.is_released(source).await.unwrap());
        attach.unmount(target).await.unwrap();
        assert!(!target.exists());
    }
    // A program may go on with what it has open.
    let mut said = String::new();
    (&open).read_to_string(&mut said).unwrap();
    assert_eq!(said, "world");
    drop(open);
    is_released(&attach, source).await;
    attach.shut_down().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_kernel_does_not_mount_from_the_file_a_loop_device_is_taken() {
    let place = Place::new();
    // No kernel mounts from a file there.
    run("mount", &["-n", "-t", "tmpfs", "tmpfs", place.export.to_str().unwrap()]);
    let attach = attach(&place).await;
    make_image(&place, "image");
    let targets = ["a", "b"].map(|name| target(&place, name));
    for target in &targets {
        attach.mount_image(Source::File("image"), target).await.unwrap();
        assert_eq!(fs::read_to_string(target.join("hello")).unwrap(), "world");
    }
    let mounts = attach.mounts().await.unwrap();
    let devices: Vec<_> = mounts.iter().map(|mounted| mounted.loop_device.clone()).collect();
    assert_eq!(mounts.len(), 2);
    assert!(devices[0].is_some() && devices[0] == devices[1], "{devices:?}");
    for target in &targets {
        attach.unmount(target).await.unwrap();
    }
    is_released(&attach, Source::File("image")).await;
    assert_eq!(place.loop_devices(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_an_image_may_do_no_more_than_was_said() {
    let place = Place::new();
    let options = place.options(Vec::new(), tool::program("as_a_tool"));
    let options = slackwater_attach::Options { rights: Rights::default(), ..options };
    let attach = Attach::on_directory(options, place.export.clone()).await.unwrap();
    make_image(&place, "image");
    let target = target(&place, "a");
    attach.mount_image(Source::File("image"), &target).await.unwrap();
    let options = options_of(&target);
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
    attach.unmount(&target).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_image_is_a_clear_error_and_leaves_nothing() {
    let place = Place::new();
    let _below = on_ext4(&place);
    let attach = attach(&place).await;
    make_image(&place, "image");
    // One byte of the superblock, which has a checksum.
    make_image(&place, "damaged");
    let damaged = fs::File::options().write(true).open(place.export.join("damaged")).unwrap();
    damaged.write_all_at(&[0xff], 1024 + 30).unwrap();
    place.make_file("zeros", MIB);
    place.make_file("disk", 64 * MIB);
    attach.make_file_system("disk").await.unwrap();
    std::os::unix::fs::symlink("image", place.export.join("link")).unwrap();
    fs::create_dir(place.export.join("folder")).unwrap();
    run("mkfifo", &[place.export.join("pipe").to_str().unwrap()]);
    let target = target(&place, "a");
    for (name, expected) in [
        ("zeros", "`zeros` holds no EROFS image that can be mounted"),
        ("disk", "`disk` holds no EROFS image that can be mounted"),
        ("damaged", "`damaged` holds no EROFS image that can be mounted"),
        ("missing", "has no `missing`"),
        ("link", "symbolic link"),
        ("folder", "it is a directory"),
        ("pipe", "special file"),
        ("../up", "is no path of a file below the export"),
    ] {
        let error = attach.mount_image(Source::File(name), &target).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!target.exists() && place.mounted() == [place.export.clone()], "{name}");
        until("no device is left", async || place.loop_devices().is_empty()).await;
    }
    // What is mounted there is not taken for the image.
    attach.mount(Source::File("disk"), &target, Access::ReadOnly).await.unwrap();
    let error = attach.mount_image(Source::File("image"), &target).await.unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    attach.unmount(&target).await.unwrap();
    attach.mount_image(Source::File("image"), &target).await.unwrap();
    let error = attach.mount(Source::File("image"), &target, Access::ReadOnly).await.unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    attach.unmount(&target).await.unwrap();
}

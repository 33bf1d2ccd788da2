//! Disks that others wrote, and what others put in the place of disks: neither gets at anything of
//! this machine.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use slackwater_attach::{Access, Attach, AttachError, Rights, Source};
use uuid::Uuid;

use crate::support::{Place, run, until};
use crate::{DISK_SIZE_BYTES, MIB, attach, check_disk, disk, target, tool};

/// A user of no name and no rights.
const STRANGER: &str = "65534";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A file system of this machine, beside the export, and a block device with another.
struct Own {
    file: PathBuf,
    device: PathBuf,
}

impl Own {
    fn make(place: &Place) -> Self {
        let file = place.state.with_file_name("own");
        let below = place.state.with_file_name("below");
        for path in [&file, &below] {
            fs::File::create_new(path).unwrap().set_len(64 * MIB).unwrap();
            run("mkfs.ext4", &["-q", "-F", text(path)]);
        }
        let device = run("losetup", &["--find", "--show", text(&below)]);
        Self { file, device: device.trim().into() }
    }
}

/// Every way in which a disk is used fails with `expected`, and leaves nothing.
async fn refused(place: &Place, attach: &Attach, name: &str, devices: &[PathBuf]) {
    let target = target(place, "a");
    for access in [Access::ReadWrite, Access::ReadOnly] {
        let error = attach.mount(Source::File(name), &target, access).await.unwrap_err();
        assert!(matches!(error, AttachError::NotRegular { .. }), "{name}: {error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
    let error = attach.make_file_system(name).await.unwrap_err();
    assert!(matches!(error, AttachError::NotRegular { .. }), "{name}: {error:?}");
    let error = attach.grow_file_system(name).await.unwrap_err();
    assert!(matches!(error, AttachError::Sandbox { .. }), "{name}: {error:?}");
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert!(!target.exists());
    until("no device is left", async || place.loop_devices() == devices).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_in_the_place_of_a_disk_leads_to_nothing_of_this_machine() {
    let place = Place::new();
    let own = Own::make(&place);
    let attach = disk(&place, "disk").await;
    until("only that device is left", async || place.loop_devices() == [own.device.clone()]).await;
    // Larger than its file system: growing it would write.
    fs::File::options().write(true).open(&own.file).unwrap().set_len(128 * MIB).unwrap();
    let before = (fs::read(&own.file).unwrap(), fs::read(&own.device).unwrap());
    let devices = place.loop_devices();
    for (name, leads_to) in [("file", &own.file), ("device", &own.device)] {
        symlink(leads_to, place.export.join(name)).unwrap();
        refused(&place, &attach, name, &devices).await;
    }
    symlink("disk", place.export.join("other-disk")).unwrap();
    refused(&place, &attach, "other-disk", &devices).await;
    symlink(own.file.parent().unwrap(), place.export.join("folder")).unwrap();
    refused(&place, &attach, "folder/own", &devices).await;

    let id = Uuid::new_v4();
    symlink(&own.file, place.export.join(".snapshot").join(id.to_string())).unwrap();
    let seen = attach.mount(Source::Snapshot(id), &target(&place, "a"), Access::ReadOnly).await;
    assert!(matches!(seen, Err(AttachError::NotRegular { .. })), "{seen:?}");
    until("no device is left", async || place.loop_devices() == devices).await;

    assert!(before == (fs::read(&own.file).unwrap(), fs::read(&own.device).unwrap()));
    check_disk(&place.export.join("disk"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_regular_file_is_no_disk() {
    let place = Place::new();
    let attach = attach(&place).await;
    run("mkfifo", &[text(&place.export.join("fifo"))]);
    run("mknod", &[text(&place.export.join("device")), "c", "1", "3"]);
    fs::create_dir(place.export.join("folder")).unwrap();
    std::os::unix::fs::symlink("fifo", place.export.join("link")).unwrap();
    let kinds = [
        ("fifo", "special file", "fifo"),
        ("device", "special file", "special file"),
        ("link", "symbolic link", "symbolic link"),
        ("folder", "directory", ""),
    ];
    for (name, expected, read_only) in kinds {
        let error = attach.grow_file_system(name).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let error = attach.make_file_system(name).await.unwrap_err();
        assert!(matches!(error, AttachError::NotRegular { .. }), "{error:?}");
        let target = target(&place, "a");
        attach.mount(Source::File(name), &target, Access::ReadWrite).await.unwrap_err();
        // Nothing opens the pipe, and waits for one that writes.
        let error = attach.mount(Source::File(name), &target, Access::ReadOnly).await.unwrap_err();
        assert!(!matches!(error, AttachError::TimedOut { .. }), "{error}");
        assert!(error.to_string().contains(read_only), "{error}");
        assert!(!target.exists());
    }
    assert_eq!(place.loop_devices(), Vec::<PathBuf>::new());
}

/// Runs a program as a stranger.
fn by_a_stranger(words: &[&str]) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"]);
    command.args(words).output().unwrap()
}

/// As what a stranger acts by a set-user-id program of a disk, and whether its device opens.
async fn rights_of_a_stranger(rights: Rights) -> (String, bool) {
    let place = Place::new();
    let mut options = place.options(Vec::new(), tool::program("as_a_tool"));
    options.rights = rights;
    let attach = Attach::on_directory(options, place.export.clone()).await.unwrap();
    place.make_file("disk", DISK_SIZE_BYTES);
    attach.make_file_system("disk").await.unwrap();
    let target = target(&place, "a");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    let (program, device) = (target.join("id"), target.join("null"));
    fs::copy("/usr/bin/id", &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    run("mknod", &["--mode=666", text(&device), "c", "1", "3"]);
    // They keep strangers out, which another test checks; here the mount itself has to.
    for above in target.ancestors().skip(1).take(3) {
        fs::set_permissions(above, Permissions::from_mode(0o755)).unwrap();
    }
    let user = by_a_stranger(&[text(&program), "-u"]);
    assert!(user.status.success(), "{user:?}");
    let opened = by_a_stranger(&["dd", &format!("if={}", text(&device)), "of=/dev/null"]);
    attach.unmount(&target).await.unwrap();
    (String::from_utf8(user.stdout).unwrap().trim().to_owned(), opened.status.success())
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_disk_have_the_rights_that_were_asked_for() {
    let rights = |set_id, devices| Rights { set_id, devices };
    for (rights, expected) in [
        (Rights::default(), (STRANGER, false)),
        (rights(true, false), ("0", false)),
        (rights(false, true), (STRANGER, true)),
        (Rights::CONTAINER, ("0", true)),
    ] {
        let (user, opens) = rights_of_a_stranger(rights).await;
        assert_eq!((&*user, opens), expected, "{rights:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_with_other_rights_is_another_mount() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = target(&place, "a");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    let mut options = place.options(Vec::new(), Vec::new());
    options.rights = Rights::default();
    let other = Attach::on_directory(options, place.export.clone()).await.unwrap();
    let error = other.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap_err();
    assert!(matches!(error, AttachError::Occupied { .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("with suid,dev") && said.contains("with nosuid,nodev"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_root_reaches_what_is_made_for_a_disk() {
    let place = Place::new();
    let attach = disk(&place, "disk").await;
    let target = place.state.join("one/two/three");
    attach.mount(Source::File("disk"), &target, Access::ReadWrite).await.unwrap();
    for made in [&target.join("../../../one"), &target.join("..")] {
        assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700);
    }
}

//! Upper directories: all containers of a machine on one disk, and what is left of those that are gone.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use slackwater_attach::Attach;
use slackwater_driver::containerd::proto::Mount;
use slackwater_driver::worker::{ContainerdExtra, Extra, Key, Kind, LayerKind, WorkerError};
use tonic::Code;

use crate::images::{Stand, chains, layers, options, set};
use crate::support::snapshots::labels;
use crate::support::tools::noted;
use crate::support::{Appliance, mounts_below};
use crate::{bounded, refused, runtime};

/// Longest time in which what a container wrote is removed, also on a busy machine.
const REMOVED_WITHIN: Duration = Duration::from_secs(60);

/// Time after which what is let go of when it is unused has gone, and a margin.
const LET_GO_AFTER: Duration = Duration::from_secs(13);

/// Time after which what a pull leaves to be done has been written to the disk.
const WRITTEN_AFTER: Duration = Duration::from_secs(5);

/// Longest time in which a call says that the appliance is away.
const SAID_WITHIN: Duration = Duration::from_secs(30);

/// The upper directory of an overlay.
pub(crate) fn upper(mounts: &[Mount]) -> PathBuf {
    PathBuf::from(options(mounts, "upperdir=")[0])
}

/// The directory of one volume on the disk.
pub(crate) fn directory(mounts: &[Mount]) -> PathBuf {
    upper(mounts).parent().unwrap().to_owned()
}

pub(crate) async fn await_gone(path: &Path) {
    let deadline = Instant::now() + REMOVED_WITHIN;
    while path.exists() {
        assert!(Instant::now() < deadline, "{} is left", path.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

impl Stand {
    async fn container(&self, key: &str, parent: &str) -> Vec<Mount> {
        self.snapshots.prepare_mounts(key, parent, labels(&[])).await.unwrap()
    }

    /// The disks that are mounted for writing.
    fn mounted_disks(&self) -> Vec<PathBuf> {
        mounts_below(&self.machine.path().canonicalize().unwrap().join("state/mounts"))
    }

    /// Unmounts what nothing uses; so many images stay. One may be mounted ahead at this moment, and counts as used.
    async fn unmount_unused(&self, expected: usize) {
        let deadline = Instant::now() + REMOVED_WITHIN;
        loop {
            self.machine.worker.unmount_all_unused().await;
            let images = self.mounted_images();
            if images.len() == expected && self.mounted_disks().len() == expected.min(1) {
                return;
            }
            let is_late = images.len() < expected || Instant::now() > deadline;
            assert!(!is_late, "{images:?} are mounted, expected {expected}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until so many images are mounted, and one disk with the first of them.
    async fn await_mounted(&self, expected: usize) {
        let deadline = Instant::now() + REMOVED_WITHIN;
        loop {
            let (images, disks) = (self.mounted_images(), self.mounted_disks());
            if images.len() == expected && disks.len() == expected.min(1) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{images:?} and {disks:?}, expected {expected} images"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The images that are mounted.
    fn mounted_images(&self) -> Vec<PathBuf> {
        mounts_below(&self.machine.path().canonicalize().unwrap().join("state/images"))
    }
}

#[test]
fn containers_share_a_disk_which_stays_for_some_time_after_the_last_of_them() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        // Many at once, and the disk is made by one of them.
        let keys: Vec<String> = (0..10).map(|number| format!("c{number}")).collect();
        let all = keys.iter().map(|key| stand.container(key, &names[0]));
        let all = futures_util::future::join_all(all).await;
        stand.await_disks(1).await;
        assert_eq!(stand.mounted_disks(), [directory(&all[0]).parent().unwrap()]);
        let (one, other) = (stand.mount(&all[0]), stand.mount(&all[1]));
        fs::write(one.path().join("etc/kept"), b"one").unwrap();
        assert_eq!(other.read("etc/kept"), "first");

        // Blocks and inodes, each once, as `du` counts them.
        fs::create_dir(one.path().join("d")).unwrap();
        fs::write(one.path().join("d/file"), vec![1; 100_000]).unwrap();
        fs::hard_link(one.path().join("d/file"), one.path().join("d/link")).unwrap();
        std::os::unix::fs::symlink("/", one.path().join("d/root")).unwrap();
        let usage = stand.snapshots.usage("c0").await.unwrap();
        let counted = ["", "etc", "etc/kept", "d", "d/file", "d/root"];
        let of = |name: &&str| fs::symlink_metadata(upper(&all[0]).join(name)).unwrap().blocks();
        let blocks: u64 = counted.iter().map(of).sum();
        assert_eq!(usage.inodes, i64::try_from(counted.len()).unwrap());
        assert_eq!(usage.size, i64::try_from(blocks * 512).unwrap());

        // What one had goes, and nothing of the others.
        drop(one);
        stand.snapshots.remove("c0").await.unwrap();
        await_gone(&directory(&all[0])).await;
        assert!(all[1..].iter().all(|mounts| upper(mounts).exists()));
        fs::write(other.path().join("etc/kept"), b"other").unwrap();
        drop(other);
        for key in &keys[1..] {
            stand.snapshots.remove(key).await.unwrap();
        }
        // They stay for what comes.
        tokio::time::sleep(LET_GO_AFTER).await;
        let stays = usize::from(Attach::mounts_images_from_files());
        assert_eq!(stand.mounted_images().len(), stays);
        let disks = stand.mounted_disks();
        assert_eq!(disks, [directory(&all[0]).parent().unwrap()]);
        let next = stand.container("next", &names[0]).await;
        assert_eq!(directory(&next).parent(), Some(&*disks[0]));
        assert_eq!(stand.mount(&next).read("etc/kept"), "first");
        for name in ["next", &names[0]] {
            stand.snapshots.remove(name).await.unwrap();
        }
        // This asks for it; the image of a layer that is gone goes by itself.
        stand.await_disks(0).await;
        let deadline = Instant::now() + REMOVED_WITHIN;
        while !stand.mounted_images().is_empty() {
            assert!(Instant::now() < deadline, "{:?} are left", stand.mounted_images());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        stand.stop().await;
    });
}

/// On a machine that has run nothing yet.
#[test]
fn an_image_of_another_worker_is_mounted_before_its_first_container_and_so_is_the_disk() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let first = Stand::start(&appliance, LayerKind::Images).await;
        first.pull(&layers()).await;
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.adopt(&chains(&layers())).await;
        let images = if Attach::mounts_images_from_files() { 3 } else { 0 };
        stand.await_mounted(images).await;
        let container = stand.container("c", &names[2]).await;
        assert_eq!(stand.mounted_disks(), [directory(&container).parent().unwrap()]);
        stand.await_disks(1).await;
        assert_eq!(stand.mount(&container).read("etc/kept"), "first");
        stand.snapshots.remove("c").await.unwrap();
        stand.unmount_unused(0).await;
        for stand in [first, stand] {
            stand.stop().await;
        }
    });
}

/// As where a killed driver starts again with other settings.
#[test]
fn images_that_nothing_uses_make_room_for_another_export() {
    let (appliance, other) = (Appliance::start(), Appliance::start());
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..2]).await;
        stand.snapshots.view_mounts("v", &names[0]).await.unwrap();
        assert_eq!(stand.mounted_disks().len(), 1, "that of the pull");
        let stand = stand.restart(&other, LayerKind::Images).await;
        let error = stand.machine.worker.attach().await.unwrap_err();
        assert!(error.to_string().contains("are in use"), "{error}");
        let left = (stand.mounted_disks().len(), stand.mounted_images().len());
        assert_eq!(left, (0, 1), "that of the view");
        stand.snapshots.remove("v").await.unwrap();
        let stand = stand.restart(&other, LayerKind::Images).await;
        stand.machine.worker.attach().await.unwrap();
        assert_eq!(stand.mounted_images(), Vec::<PathBuf>::new());
        stand.stop().await;
    });
}

/// Unmounting waits for the appliance, and what waits so is in the way of any other, too.
#[test]
fn a_disk_that_nothing_uses_stays_mounted_while_its_appliance_is_away() {
    let (mut appliance, other) = (Appliance::start(), Appliance::start());
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        stand.pull(&layers()[..1]).await;
        let disks = stand.mounted_disks();
        assert_eq!(disks.len(), 1, "that of the pull");
        // A driver that stops waits for that, for a minute if the appliance is away.
        tokio::time::sleep(WRITTEN_AFTER).await;
        rustix::fs::syncfs(fs::File::open(&disks[0]).unwrap()).unwrap();
        appliance.stop();
        let stand = stand.restart(&other, LayerKind::Images).await;
        for _ in 0..2 {
            let error = stand.machine.worker.attach().await.unwrap_err();
            assert!(error.to_string().contains("are in use"), "{error}");
            assert_eq!(stand.mounted_disks(), disks);
        }
        appliance.serve();
        let stand = stand.restart(&other, LayerKind::Images).await;
        stand.machine.worker.attach().await.unwrap();
        assert_eq!(stand.mounted_disks(), Vec::<PathBuf>::new());
        stand.stop().await;
    });
}

/// As the daemon ends.
#[test]
fn images_that_nothing_uses_are_unmounted_and_the_others_stay() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..2]).await;
        let container = stand.container("c", &names[0]).await;
        let view = stand.view(&names[1]).await;
        stand.unmount_unused(2).await;
        drop(view);
        stand.snapshots.remove(&format!("view of {}", names[1])).await.unwrap();
        stand.unmount_unused(1).await;
        assert_eq!(stand.mount(&container).read("etc/removed"), "first");
        stand.snapshots.remove("c").await.unwrap();
        stand.unmount_unused(0).await;
        let next = stand.container("next", &names[1]).await;
        assert_eq!(stand.mount(&next).names(), stand.view(&names[1]).await.names());
        stand.stop().await;
    });
}

#[test]
fn what_a_killed_driver_left_is_removed_and_what_is_a_volume_s_stays() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let mounts = stand.container("c", &names[0]).await;
        fs::write(upper(&mounts).join("kept"), b"x").unwrap();
        let left = directory(&mounts).with_file_name("00000000-0000-4000-8000-000000000001");
        // Under its name once it is whole, as it may be removed at once.
        let made = left.with_file_name("made");
        fs::create_dir_all(made.join("upper/a/b/c")).unwrap();
        fs::write(made.join("upper/a/file"), b"x").unwrap();
        fs::rename(&made, &left).unwrap();
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        await_gone(&left).await;
        assert_eq!(stand.container("d", &names[0]).await.len(), 1);
        // The disk of before takes more.
        stand.await_disks(1).await;
        assert_eq!(fs::read(upper(&mounts).join("kept")).unwrap(), b"x");
        assert_eq!(stand.snapshots.all_mounts("c").await.unwrap(), mounts);
        for key in ["c", "d"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

/// As BuildKit commits a step whose mount it lets go of a moment later.
#[test]
fn what_is_mounted_still_is_not_emptied_by_a_commit() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let mounts = stand.container("c", &names[0]).await;
        let mounted = stand.mount(&mounts);
        fs::write(mounted.path().join("written"), b"x").unwrap();
        stand.snapshots.commit("committed", "c").await.unwrap();
        stand.make_image("committed").await;
        stand.snapshots.cleanup().await.unwrap();
        assert_eq!(mounted.read("written"), "x");
        // The overlay remembers what it has found, so it is looked for below.
        assert!(upper(&mounts).join("written").exists());
        drop(mounted);
        stand.snapshots.cleanup().await.unwrap();
        assert!(!directory(&mounts).exists());
        let view = stand.view("committed").await;
        assert_eq!(view.read("written"), "x");
        assert!(view.names().is_superset(&set(&["etc", "etc/kept", "large"])));
        drop(view);
        stand.stop().await;
    });
}

#[test]
fn lost_writes_are_those_of_all_on_the_disk_and_the_next_has_another() {
    let name = "uppers::lost_writes_are_those_of_all_on_the_disk_and_the_next_has_another";
    let Some(_tools) = noted(name, 1) else { return };
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        // The one of the start, which is not to sync the disk.
        stand.machine.worker.reconcile(Duration::ZERO).await.unwrap();
        let names = stand.pull(&layers()[..1]).await;
        let first = stand.container("c", &names[0]).await;
        stand.container("d", &names[0]).await;
        let error = stand.snapshots.commit("of c", "c").await.unwrap_err();
        assert!(error.message().contains("lost"), "{error}");
        for key in ["c", "d"] {
            let said = refused(stand.snapshots.commit("other", key).await, Code::Internal);
            assert!(said.contains("lost"), "{said}");
            let volume = stand.machine.worker.get(&Key::containerd(key)).unwrap();
            assert!(volume.is_damaged);
            let error = stand.machine.worker.seal(&volume.key, None).await.unwrap_err();
            assert!(matches!(error, WorkerError::Damaged { .. }), "{error}");
        }
        let next = stand.container("e", &names[0]).await;
        assert_ne!(directory(&next).parent(), directory(&first).parent());
        fs::write(upper(&next).join("written"), b"x").unwrap();
        stand.snapshots.commit("of e", "e").await.unwrap();
        let view = stand.view("of e").await;
        assert_eq!(view.read("written"), "x");
        drop(view);
        stand.snapshots.remove("view of of e").await.unwrap();
        // The damaged one goes with its last volume.
        for key in ["c", "d"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

/// An outage in which each change of a file system waits. At its end the appliance serves again, before the file system is
/// thawed: that writes, too.
struct Outage<'a> {
    appliance: &'a mut Appliance,
    directory: PathBuf,
    /// Ends that where this test is killed, whose threads would wait for ever.
    guard: Child,
}

impl<'a> Outage<'a> {
    fn begin(appliance: &'a mut Appliance, directory: &Path) -> Self {
        let mut guard = Command::new("sh");
        guard.args(["-c", "sleep 60; fsfreeze --unfreeze \"$0\""]).arg(directory);
        let guard = guard.process_group(0).spawn().unwrap();
        let done = Command::new("fsfreeze").arg("--freeze").arg(directory).status();
        let outage = Self { appliance, directory: directory.to_owned(), guard };
        outage.appliance.stop();
        assert!(done.unwrap().success(), "freeze {}", directory.display());
        outage
    }
}

impl Drop for Outage<'_> {
    fn drop(&mut self) {
        self.appliance.serve();
        let done = Command::new("fsfreeze").arg("--unfreeze").arg(&self.directory).status();
        let group = Pid::from_child(&self.guard);
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        let _ = self.guard.wait();
        if !std::thread::panicking() {
            assert!(done.unwrap().success(), "thaw {}", self.directory.display());
        }
    }
}

#[test]
fn a_directory_that_waits_for_the_appliance_says_so_and_is_removed_once_it_is_made() {
    let mut appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let first = stand.container("c", &names[0]).await;
        let disk = directory(&first).parent().unwrap().to_owned();
        stand.snapshots.cleanup().await.unwrap();
        let outage = Outage::begin(&mut appliance, &disk);
        let asked = stand.snapshots.prepare_mounts("d", &names[0], labels(&[]));
        let asked = tokio::time::timeout(SAID_WITHIN, asked).await.expect("it says nothing");
        let said = refused(asked, Code::Unavailable);
        assert!(said.contains("cannot reach the appliance"), "{said}");
        drop(outage);
        // The disk is no worse for it, and the name can be had.
        let next = stand.container("d", &names[0]).await;
        assert_eq!(directory(&next).parent(), Some(disk.as_path()));
        let deadline = Instant::now() + REMOVED_WITHIN;
        let expected = [&first, &next].map(|mounts| directory(mounts)).into();
        // By itself.
        loop {
            let found = fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().path());
            let found: BTreeSet<_> = found.filter(|path| !path.ends_with("lost+found")).collect();
            if found == expected {
                break;
            }
            assert!(Instant::now() < deadline, "{found:?} instead of {expected:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for key in ["c", "d"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

/// Its record says that it is mounted.
#[test]
fn a_view_whose_driver_was_killed_before_it_was_mounted_is_so_when_it_is_asked_for() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()).await;
        let parent = Key::containerd(names.last().unwrap());
        let Extra::Containerd(extra) = stand.machine.worker.get(&parent).unwrap().extra else {
            panic!("{parent} is no volume of containerd")
        };
        let extra = Extra::Containerd(ContainerdExtra { kind: Kind::View, ..extra });
        let (worker, key) = (&stand.machine.worker, Key::containerd("v"));
        worker.create_view(key, Some(parent), extra).await.unwrap();
        let stand = stand.restart(&appliance, LayerKind::Images).await;
        // As after a restart of the machine, too.
        let images = stand.machine.worker.state_directory().join("images");
        for image in mounts_below(&images) {
            rustix::mount::unmount(&image, UnmountFlags::empty()).unwrap();
        }
        assert_eq!(mounts_below(&images), Vec::<PathBuf>::new());
        let view = stand.mount(&stand.snapshots.all_mounts("v").await.unwrap());
        let expected = stand.view(names.last().unwrap()).await;
        assert_eq!(view.names(), expected.names());
        drop((view, expected));
        for key in ["v".to_owned(), format!("view of {}", names.last().unwrap())] {
            stand.snapshots.remove(&key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

/// As ext4 mounts itself for reading after an error; here the test does it.
#[test]
fn a_disk_that_cannot_be_written_takes_no_more_volumes() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let stand = Stand::start(&appliance, LayerKind::Images).await;
        let names = stand.pull(&layers()[..1]).await;
        let first = stand.container("c", &names[0]).await;
        let disk = directory(&first).parent().unwrap().to_owned();
        let mount = |option: &str| {
            let mut command = Command::new("mount");
            assert!(command.args(["-o", option]).arg(&disk).status().unwrap().success());
        };
        // What was removed of the pull's directory is written by now.
        stand.snapshots.cleanup().await.unwrap();
        mount("remount,ro");
        let next = stand.container("d", &names[0]).await;
        assert_ne!(directory(&next).parent(), Some(disk.as_path()));
        mount("remount,rw");
        assert_eq!(stand.snapshots.all_mounts("c").await.unwrap(), first);
        let volume = stand.machine.worker.get(&Key::containerd("c")).unwrap();
        assert!(!volume.is_damaged, "nothing was lost");
        for key in ["c", "d"] {
            stand.snapshots.remove(key).await.unwrap();
        }
        stand.await_disks(0).await;
        stand.stop().await;
    });
}

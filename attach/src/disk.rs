//! The disks: loop devices on files of the export, and the ext4 mounted from them. Images that are
//! mounted from files themselves are in `image.rs`; they are mounted and unmounted by the same calls.
//!
//! Invariants:
//! - A file is under at most one loop device that writes. A second mount of it takes the same
//!   device, and with it the same file system in the kernel.
//! - A loop device is marked to be freed by its last user as soon as it has one, so that no
//!   order of deaths leaves one behind for good. What is left between the two, or while a new file system is copied
//!   (`file_system.rs`), is found by the next `open`.
//! - A loop device is mounted only if the kernel says that it is on the very file of the export
//!   that was asked for. `losetup` resolves links by itself, and a link would lead to a file or
//!   disk of this machine.
//! - Nothing is frozen, synced or unmounted that the mount table does not show as a loop mount, or as
//!   an image of the export: the directory below is the machine's own disk.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::export::{Export, FREED_WITHIN, Place, make_directory};
use crate::image::is_from_file;
use crate::kernel::{self, LoopDevice, MountPoint};
use crate::tools::{LOSETUP, MOUNT, STAT, TOOL_TIME_LIMIT, UMOUNT, says};
use crate::{Access, AttachError, FileSystem, Source};

/// How a disk is mounted. Reads shall not write (`noatime`), the inode tables of a sparse file
/// are zeros already (`noinit_itable`), and after an error nothing more is written.
const WRITE_OPTIONS: &str = "rw,noatime,noinit_itable,errors=remount-ro";

/// The option of a writable disk, where the kernel has it: no bitmaps are read before they are needed. Else ext4 reads those of
/// the whole disk some seconds after it is mounted, each some 2 GiB behind the one before: of 1 TiB 500 reads and as many maps
/// of blocks.
const NO_BITMAPS_AHEAD: &str = "no_prefetch_block_bitmaps";

/// How a snapshot is mounted. Its device refuses writes, so a journal that was not clean cannot
/// be replayed and the mount fails: a snapshot of a running disk is no disk to start from, but its clone is.
const READ_OPTIONS: &str = "ro,noatime,errors=continue";

/// How often a mount is tried when the loop device that it wanted to share went away meanwhile.
const MOUNT_ATTEMPTS: u32 = 5;

/// How long a loop device that is losing its last user is waited for until it is looked at again.
const RELEASE_PAUSE: Duration = Duration::from_millis(50);

/// What `stat` calls files that are none, and are not told by `losetup`.
const SPECIAL_FILES: [&str; 5] =
    ["fifo", "socket", "character special file", "block special file", "symbolic link"];

/// How many mounts on top of each other are taken off one directory.
const STACK_MAX: u32 = 16;

impl Access {
    pub(crate) fn is_read_only(self) -> bool {
        self == Self::ReadOnly
    }
}

/// The directory as the kernel prints it: its parent without links, made if it is not there.
pub(crate) fn target_path(target: &Path) -> Result<PathBuf, AttachError> {
    match (target.parent(), target.file_name()) {
        (Some(parent), Some(name)) => Ok(make_directory(parent)?.join(name)),
        _ => Err(AttachError::Path {
            got: target.display().to_string(),
            reason: "a disk is mounted at a directory with a name",
        }),
    }
}

impl Export {
    pub(crate) async fn mount(
        &self,
        source: Source<'_>,
        target: &Path,
        access: Access,
    ) -> Result<(), AttachError> {
        let access = match source {
            Source::File(_) => access,
            Source::Snapshot(_) => Access::ReadOnly,
        };
        self.mount_as(source, target, access, FileSystem::Ext4).await
    }

    pub(crate) async fn mount_image(
        &self,
        source: Source<'_>,
        target: &Path,
    ) -> Result<(), AttachError> {
        self.mount_as(source, target, Access::ReadOnly, FileSystem::Erofs).await
    }

    async fn mount_as(
        &self,
        source: Source<'_>,
        target: &Path,
        access: Access,
        kind: FileSystem,
    ) -> Result<(), AttachError> {
        let place = self.place(source)?;
        let target = target_path(target)?;
        let _target_turn = self.locks.lock(&target).await;
        let _source_turn = self.locks.lock(&place.file).await;
        let points = kernel::mount_points()?;
        if self.is_among(&points, (&place, &target), access, kind)? {
            return Ok(());
        }
        if access == Access::ReadWrite {
            self.require_no_image(&place)?;
        }
        self.require().await?;
        make_directory(&target)?;
        let mounted = match kind {
            FileSystem::Ext4 => self.mount_locked(&place, &target, access, kind).await,
            FileSystem::Erofs => self.mount_image_locked(&place, &target, &points).await,
        };
        if mounted.is_err() {
            // Fails if it was mounted after all, or is not empty; then it stays.
            let _kept = fs::remove_dir(&target);
        }
        mounted
    }

    /// Mounts what a loop device has.
    pub(crate) async fn mount_locked(
        &self,
        place: &Place,
        target: &Path,
        access: Access,
        kind: FileSystem,
    ) -> Result<(), AttachError> {
        for attempt in 1.. {
            let shared = match self.device_on(place)? {
                Some(other) if other.read_only != access.is_read_only() => {
                    self.used_device(place).await?
                }
                same => same,
            };
            let device = match &shared {
                Some(device) if device.read_only == access.is_read_only() => device.device.clone(),
                Some(device) => {
                    return Err(AttachError::InUse {
                        path: place.path.clone(),
                        through: device.device.clone(),
                    });
                }
                None => self.attach_device(place, access).await?,
            };
            let mounted = match kind {
                FileSystem::Ext4 => self.mount_device(place, &device, target, access).await,
                FileSystem::Erofs => self.mount_image_device(place, &device, target).await,
            };
            if shared.is_none() {
                // With a mount this leaves the device to it; without, it is free at once.
                let freed = self.detach_device(&device).await;
                return mounted.and(freed);
            }
            if mounted.is_err() {
                // The device can be losing its last user at this moment.
                tokio::time::sleep(RELEASE_PAUSE).await;
            }
            let is_the_one = self.leave_device(place, &device).await;
            match mounted {
                Ok(()) if matches!(is_the_one, Ok(false)) => self.unmount_top(target).await?,
                Ok(()) => return is_the_one.map(drop),
                Err(error) if !matches!(is_the_one, Ok(false)) || attempt >= MOUNT_ATTEMPTS => {
                    return Err(error);
                }
                Err(_) => {}
            }
        }
        Err(AttachError::Interrupted)
    }

    /// Leaves a device that was shared to its users; whether it is on the file still. It can have
    /// lost its last user meanwhile and be somebody else's: then it is not touched.
    pub(crate) async fn leave_device(
        &self,
        place: &Place,
        device: &Path,
    ) -> Result<bool, AttachError> {
        match kernel::loop_device(device).filter(|now| now.file == place.file) {
            None => Ok(false),
            Some(LoopDevice { is_autoclear: true, .. }) => Ok(true),
            // Not marked yet by the one that attached it.
            Some(_) => self.detach_device(device).await.map(|()| true),
        }
    }

    /// The loop device that is on the file, in whatever mount namespace it is mounted.
    fn device_on(&self, place: &Place) -> Result<Option<LoopDevice>, AttachError> {
        Ok(kernel::loop_devices(|file| file == place.file)?.pop())
    }

    /// The loop device that is on the file and in use. One that was detached while another program had it open is freed
    /// when that one closes it, and is waited for.
    async fn used_device(&self, place: &Place) -> Result<Option<LoopDevice>, AttachError> {
        let deadline = Instant::now() + FREED_WITHIN;
        while let Some(device) = self.device_on(place)? {
            if !device.is_going(&kernel::mount_points()?) || Instant::now() >= deadline {
                return Ok(Some(device));
            }
            tokio::time::sleep(RELEASE_PAUSE).await;
        }
        Ok(None)
    }

    /// Puts a loop device on the file.
    pub(crate) async fn attach_device(
        &self,
        place: &Place,
        access: Access,
    ) -> Result<PathBuf, AttachError> {
        // Direct: else every block would be cached twice, and the loop driver would handle one
        // request after the other.
        let call = self.tools.call(LOSETUP).arguments(["--find", "--show", "--direct-io=on"]);
        let call = match access {
            Access::ReadOnly => call.argument("--read-only"),
            Access::ReadWrite => call,
        };
        let attached = match self.refuse_special(place, access).await {
            Ok(()) => call.argument(&place.file).run().await,
            Err(error) => Err(error),
        };
        match attached {
            Ok(device) => self.require_on(place, device.into()).await,
            Err(error) => {
                // It can have attached the device before it was given up.
                if let Some(device) = self.device_on(place)? {
                    self.detach_device(&device.device).await?;
                }
                Err(match error {
                    error if says(&error, "No such file") => AttachError::NotFound {
                        address: self.tools.address(),
                        path: place.path.clone(),
                    },
                    other => other,
                })
            }
        }
    }

    /// To open a named pipe for reading waits for one that writes, so what is no file is refused before; a link, too,
    /// which `losetup` would follow. What is opened for writing, too, does not wait.
    async fn refuse_special(&self, place: &Place, access: Access) -> Result<(), AttachError> {
        if access == Access::ReadWrite {
            return Ok(());
        }
        let call = self.tools.call(STAT).arguments(["--format=%F", "--"]).argument(&place.file);
        let kind = call.run().await?;
        if !SPECIAL_FILES.contains(&kind.trim()) {
            return Ok(());
        }
        let reason = format!("it is no regular file but a {}", kind.trim());
        Err(AttachError::NotRegular { path: place.path.clone(), reason })
    }

    /// Frees a device that came to be on something else than the file that was asked for.
    async fn require_on(&self, place: &Place, device: PathBuf) -> Result<PathBuf, AttachError> {
        let file = match kernel::loop_device(&device) {
            Some(now) if now.file == place.file => return Ok(device),
            Some(now) => now.file,
            None => {
                let source = io::Error::new(io::ErrorKind::NotFound, "it was detached at once");
                return Err(AttachError::System { action: "use", path: device, source });
            }
        };
        // At once: it is on no file of the export, so that no start would find it.
        let detach = self.tools.call(LOSETUP).argument("--detach").argument(&device);
        if let Err(error) = detach.without_permit().run().await {
            tracing::error!(%error, file = %file.display(), "a loop device is left on a file of this machine: detach it");
        }
        let reason = format!("it leads to {} of this machine", file.display());
        Err(AttachError::NotRegular { path: place.path.clone(), reason })
    }

    /// Frees the device, or has the kernel free it with its last user.
    pub(crate) async fn detach_device(&self, device: &Path) -> Result<(), AttachError> {
        match self.tools.call(LOSETUP).argument("--detach").argument(device).run().await {
            // It is free already.
            Err(error) if says(&error, "No such device") => Ok(()),
            other => other.map(drop),
        }
    }

    async fn mount_device(
        &self,
        place: &Place,
        device: &Path,
        target: &Path,
        access: Access,
    ) -> Result<(), AttachError> {
        let options = match access {
            Access::ReadWrite if kernel::reads_bitmaps_ahead(kernel::release()) => {
                format!("{WRITE_OPTIONS},{NO_BITMAPS_AHEAD}")
            }
            Access::ReadWrite => WRITE_OPTIONS.to_owned(),
            Access::ReadOnly => READ_OPTIONS.to_owned(),
        };
        let options = format!("{options},{}", self.rights().options());
        let call = self.tools.call(MOUNT).arguments(["-n", "-i", "-t", "ext4", "-o", &options]);
        let mounted = call.argument(device).argument(target).run().await;
        mounted.map(drop).map_err(|error| match error {
            AttachError::Tool { reason, .. } if access.is_read_only() && is_journal(&reason) => {
                AttachError::Journal { path: place.path.clone() }
            }
            AttachError::Tool { reason, .. } if is_damage(&reason) => {
                AttachError::Damaged { path: place.path.clone(), reason }
            }
            other => other,
        })
    }

    pub(crate) async fn unmount(&self, target: &Path) -> Result<(), AttachError> {
        let target = target_path(target)?;
        let _turn = self.locks.lock(&target).await;
        self.unmount_locked(&target).await?;
        // Of a disk that is gone; the next one here is another.
        drop(self.lock_late_syncs().remove(&target));
        match fs::remove_dir(&target) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(AttachError::System { action: "remove", path: target, source: error })
            }
            _ => Ok(()),
        }
    }

    async fn unmount_locked(&self, target: &Path) -> Result<(), AttachError> {
        for _ in 0..STACK_MAX {
            let Some(point) = kernel::mounted_at(target)? else {
                return Ok(());
            };
            if !is_disk(&point) && !self.is_mounted_image(&point) {
                return Err(AttachError::Occupied {
                    target: target.to_owned(),
                    got: format!("{} ({})", point.source.display(), point.kind),
                    expected: "a disk of the appliance".to_owned(),
                });
            }
            if !point.read_only {
                self.thaw_before_unmount(target).await?;
            }
            match is_from_file(&point) {
                true => self.unmount_image(target).await?,
                false => self.unmount_top(target).await?,
            }
        }
        Err(AttachError::Busy { targets: vec![target.to_owned()] })
    }

    /// Takes off what is mounted on top. What uses it may go on and lets go when it ends, as
    /// other mount namespaces do; what it wrote until now is on the appliance.
    pub(crate) async fn unmount_top(&self, target: &Path) -> Result<(), AttachError> {
        let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c"]);
        match call.argument(target).run().await {
            Err(error) if says(&error, "target is busy") => {
                // An image has nothing to bring.
                if kernel::mounted_at(target)?.as_ref().is_some_and(is_disk) {
                    self.sync_locked(target, TOOL_TIME_LIMIT).await?;
                }
                let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c", "--lazy"]);
                call.argument(target).run().await.map(drop)
            }
            Err(error) if says(&error, "not mounted") => Ok(()),
            other => other.map(drop),
        }
    }

    pub(crate) fn is_released(&self, source: Source<'_>) -> Result<bool, AttachError> {
        let place = self.place(source)?;
        Ok(self.image_on(&place)?.is_none() && self.device_on(&place)?.is_none())
    }

    /// Refuses a target at which no disk is mounted.
    pub(crate) fn require_disk(target: &Path) -> Result<(), AttachError> {
        let points = kernel::known_mount_points()?;
        if points.iter().rfind(|point| point.target == target).is_some_and(is_disk) {
            return Ok(());
        }
        Err(AttachError::NotMounted { target: target.to_owned() })
    }

    /// Refuses a file that a loop device is on, or from which an image is mounted.
    pub(crate) async fn require_unused(&self, place: &Place) -> Result<(), AttachError> {
        self.require_no_image(place)?;
        match self.used_device(place).await? {
            None => Ok(()),
            Some(LoopDevice { device, .. }) => {
                Err(AttachError::InUse { path: place.path.clone(), through: device })
            }
        }
    }
}

fn is_disk(point: &MountPoint) -> bool {
    point.kind == "ext4" && point.source.to_string_lossy().starts_with("/dev/loop")
}

/// Whether `mount` complains of what is on the disk.
pub(crate) fn is_damage(reason: &str) -> bool {
    // EINVAL and EFSBADCRC, EIO, EUCLEAN, EROFS for a journal that cannot be replayed.
    let complaints =
        ["bad superblock", "read superblock", "needs cleaning", "read-only", "write-protected"];
    complaints.iter().any(|complaint| reason.contains(complaint))
}

/// Whether `mount` was refused because a journal has to be replayed on what cannot be written: EROFS.
fn is_journal(reason: &str) -> bool {
    // Not in a name of the message: mount(8) ends its first line so.
    let line = reason.lines().next().unwrap_or_default().trim_end_matches('.');
    line.contains("cannot mount") && line.ends_with("read-only")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Options, Rights};
    use std::process::Command;
    use std::sync::Arc;

    pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
    pub(crate) const MIB: u64 = 1 << 20;

    /// An export on an ext4 of its own: frozen, it is an appliance that does not answer.
    pub(crate) struct Scratch {
        directory: tempfile::TempDir,
        pub(crate) files: PathBuf,
        pub(crate) target: PathBuf,
    }

    impl Scratch {
        pub(crate) async fn new() -> (Self, Arc<Export>) {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().canonicalize().unwrap();
            let (files, target) = (path.join("files"), path.join("state/a"));
            let scratch = Self { directory, files, target };
            let below = path.join("below");
            make_file(&below, 256 * MIB);
            fs::create_dir_all(&scratch.files).unwrap();
            run("mkfs.ext4", &["-q", "-F", below.to_str().unwrap()]);
            run("mount", &["-n", "-o", "loop", below.to_str().unwrap(), scratch.files()]);
            make_file(&scratch.files.join("disk"), 64 * MIB);
            let export = scratch.open().await;
            (scratch, export)
        }

        /// An empty ext4 on the file `disk`.
        pub(crate) fn make_file_system(&self) {
            let disk = self.files.join("disk");
            run("mkfs.ext4", &["-q", "-F", disk.to_str().unwrap()]);
        }

        /// As the next process does.
        pub(crate) async fn open(&self) -> Arc<Export> {
            let options = Options {
                method: None,
                nfs_address: "127.0.0.1:2049".parse().unwrap(),
                export: "/slackwater".to_owned(),
                mount_path: None,
                state_directory: self.target.parent().unwrap().to_owned(),
                fuse_program: Vec::new(),
                tool_program: crate::test_tool::program("sandbox::tests::as_a_tool"),
                prefers_fuse: false,
                rights: Rights::default(),
                mounts_end: false,
            };
            Export::local(options, &self.files).await.unwrap()
        }

        pub(crate) fn files(&self) -> &str {
            self.files.to_str().unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            for directory in [&self.files, &self.target] {
                // What is below first: the thaw of a disk waits for it.
                let _not_frozen = Command::new("fsfreeze").arg("-u").arg(directory).output();
            }
            for directory in [&self.target, &self.files] {
                let _gone = Command::new("umount").arg("-ncil").arg(directory).output();
            }
            let path = self.directory.path().canonicalize().unwrap();
            for device in kernel::loop_devices(|file| file.starts_with(&path)).unwrap() {
                let _gone = Command::new("losetup").arg("-d").arg(device.device).output();
            }
        }
    }

    fn make_file(path: &Path, size_bytes: u64) {
        fs::File::create_new(path).unwrap().set_len(size_bytes).unwrap();
    }

    pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
        let output = Command::new(program).args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {error}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// A `sync` that hangs until there is a file `go`, and is told of lost writes then; once.
    const HANGING_SYNC: &str = r#"#!/bin/sh
        cd "${0%/*}" && echo >>log
        [ "$(wc -l <log)" = 1 ] || exit 0
        until [ -e go ]; do sleep 0.02; done
        echo 'sync: error syncing: Input/output error' >&2; exit 1"#;

    #[test]
    fn as_root_what_a_sync_that_was_given_up_says_late_fails_the_next_one() {
        const TOOLS: &str = "SLACKWATER_TEST_TOOLS";
        // What finds the tools is the environment, so the test runs itself again in another.
        let Some(tools) = std::env::var_os(TOOLS) else {
            let tools = tempfile::tempdir().unwrap();
            let sync = tools.path().join("sync");
            fs::write(&sync, HANGING_SYNC).unwrap();
            run("chmod", &["755", sync.to_str().unwrap()]);
            let path = std::env::var("PATH").unwrap();
            let name = "as_root_what_a_sync_that_was_given_up_says_late_fails_the_next_one";
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &format!("disk::tests::{name}"), "--nocapture"]);
            again.env("PATH", format!("{}:{path}", tools.path().display()));
            let ended = again.env(TOOLS, tools.path()).output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            assert_eq!(fs::read(tools.path().join("log")).unwrap().len(), 2, "it ran twice");
            return;
        };
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let (scratch, export) = Scratch::new().await;
            let target = &scratch.target;
            scratch.make_file_system();
            export.mount(Source::File("disk"), target, Access::ReadWrite).await.unwrap();
            for _ in 0..2 {
                let error = export.sync_within(target, RELEASE_PAUSE).await.unwrap_err();
                assert!(matches!(error, AttachError::TimedOut { .. }), "{error:?}");
            }
            fs::write(Path::new(&tools).join("go"), "").unwrap();
            let error = export.sync(target).await.unwrap_err();
            assert!(matches!(error, AttachError::LostWrites { .. }), "{error:?}");
            assert!(error.to_string().contains("Input/output error"), "{error:?}");
            export.sync(target).await.unwrap();
            export.unmount(target).await.unwrap();
        });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_shared_device_that_is_somebody_elses_by_now_is_not_touched() {
        let (scratch, export) = Scratch::new().await;
        let other = scratch.files.join("other");
        make_file(&other, MIB);
        let device: PathBuf = run("losetup", &["--find", "--show", other.to_str().unwrap()]).into();
        let wanted = export.place(Source::File("disk")).unwrap();
        assert!(!export.leave_device(&wanted, &device).await.unwrap());
        assert_eq!(kernel::loop_device(&device).unwrap().file, other);

        // One that is on the file and has no mark yet gets it, and nobody uses this one.
        let other = export.place(Source::File("other")).unwrap();
        assert!(export.leave_device(&other, &device).await.unwrap());
        // Not at once: a program that probes new devices, such as udev, may have it open.
        let freed = async {
            while export.device_on(&other).unwrap().is_some() {
                tokio::time::sleep(RELEASE_PAUSE).await;
            }
        };
        tokio::time::timeout(PATIENCE, freed).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_device_that_another_program_has_open_for_a_moment_is_waited_for() {
        let (scratch, export) = Scratch::new().await;
        scratch.make_file_system();
        let disk = scratch.files.join("disk");
        // As `losetup --find` of another process does with a device that it takes for a free one.
        let detach_while_open = || {
            let device = run("losetup", &["--find", "--show", disk.to_str().unwrap()]);
            let opened = fs::File::open(&device).unwrap();
            run("losetup", &["--detach", &device]);
            let place = export.place(Source::File("disk")).unwrap();
            assert!(export.device_on(&place).unwrap().is_some(), "it is kept by who has it open");
            tokio::spawn(async move {
                tokio::time::sleep(4 * RELEASE_PAUSE).await;
                drop(opened);
            })
        };
        let closed = detach_while_open();
        export.grow_file_system("disk").await.unwrap();
        closed.await.unwrap();

        let closed = detach_while_open();
        export.mount(Source::File("disk"), &scratch.target, Access::ReadOnly).await.unwrap();
        closed.await.unwrap();
        export.unmount(&scratch.target).await.unwrap();
    }
}

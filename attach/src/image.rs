//! Images: files of the export that hold an EROFS, mounted for reading.
//!
//! ```text
//!  target directory     erofs
//!        |
//!  STATE/export/PATH    the file itself (since Linux 6.12), or by a loop device on it
//! ```
//!
//! Each mount from a file is a file system of its own, with a page cache of its own: a second mount of the
//! same image is bound to the first. `mount` of util-linux before 2.41 takes a loop device whatever it is
//! told, so the call is made by a child of our own (`mounter.rs`); it can hang while the appliance is away.
//!
//! The kernel parses what is in the file, also what is written there after it was mounted. So it is to be a
//! snapshot, or a file that nothing writes any more, and its writer is to be trusted.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::disk::is_damage;
use crate::export::{Export, Place};
use crate::kernel::{self, MountPoint};
use crate::mounter::{self, Answer};
use crate::probe::has_file_system;
use crate::sandbox;
use crate::tools::{MOUNT, TOOL_TIME_LIMIT, UMOUNT};
use crate::{Access, AttachError, FileSystem};

/// The kernel's name of the file system.
pub(crate) const FILE_SYSTEM: &str = "erofs";

/// How an image is mounted through a loop device.
pub(crate) const OPTIONS: &str = "ro,noatime";

/// The first kernel that mounts an image from its file.
pub(crate) const WITHOUT_LOOP_RELEASE: (u32, u32) = (6, 12);

/// The word for `run_tool` where it is to mount images.
pub(crate) const MOUNT_IMAGES: &str = "mount-images";

/// What it answers where only a loop device may help.
const NEEDS_LOOP_DEVICE: u8 = 124;

/// What the kernel says then: it does not mount from this file. It says the second of an image that is none,
/// too; the attempt with a loop device tells them apart.
const LOOP_DEVICE_MAY_HELP: [Errno; 2] = [Errno::NOTBLK, Errno::INVAL];

/// And where the file holds what the kernel refuses.
const BAD_IMAGE: u8 = 123;

/// And where there is no such file.
const NO_FILE: u8 = 122;

/// And where that is no regular file.
const NOT_REGULAR: u8 = 121;

/// And where its time was over before it began.
const LATE: u8 = 120;

/// And where it did what it was asked to.
const DONE: u8 = 0;

/// What it is asked to do; the other words follow.
const MOUNT_ONE: &str = "mount";
const UNMOUNT_ONE: &str = "unmount";

/// What the kernel says of those: a wrong checksum, damage, features that it has not.
const COMPLAINTS: [Errno; 3] = [Errno::BADMSG, Errno::UCLEAN, Errno::OPNOTSUPP];

impl Export {
    /// Mounts an image that nothing else is mounted at the place of; `points` is what is mounted.
    pub(crate) async fn mount_image_locked(
        &self,
        place: &Place,
        target: &Path,
        points: &[MountPoint],
    ) -> Result<(), AttachError> {
        self.require_file_system().await?;
        if self.bind_image(place, target, points).await? {
            return Ok(());
        }
        let folder = match place.file.strip_prefix(self.snapshot_directory()) {
            Ok(_) => self.snapshot_directory(),
            Err(_) => &*self.directory,
        };
        let below = place.file.strip_prefix(folder).unwrap_or(&place.file);
        let (mount, rights) = (OsStr::new(MOUNT_ONE), OsStr::new(self.rights().options()));
        let words = [mount, folder.as_os_str(), below.as_os_str(), target.as_os_str(), rights];
        let answer = self.ask(format!("mounting image `{}`", place.path), &words).await?;
        let (path, reason) = (place.path.clone(), answer.reason);
        match answer.code {
            DONE => Ok(()),
            NEEDS_LOOP_DEVICE => {
                self.mount_locked(place, target, Access::ReadOnly, FileSystem::Erofs).await
            }
            BAD_IMAGE => Err(AttachError::BadImage { path, reason }),
            NOT_REGULAR => Err(AttachError::NotRegular { path, reason }),
            NO_FILE => Err(AttachError::NotFound { address: self.tools.address(), path }),
            _ => Err(AttachError::Image { path, reason }),
        }
    }

    /// Takes off an image that is mounted from its file. What uses it may go on, and lets go when it ends.
    pub(crate) async fn unmount_image(&self, target: &Path) -> Result<(), AttachError> {
        let words = [OsStr::new(UNMOUNT_ONE), target.as_os_str()];
        let answer = self.ask(format!("unmounting {}", target.display()), &words).await?;
        match answer.code {
            DONE => Ok(()),
            _ => Err(AttachError::Unmount { target: target.to_owned(), reason: answer.reason }),
        }
    }

    /// Has the child do something.
    async fn ask(&self, action: String, words: &[&OsStr]) -> Result<Answer, AttachError> {
        let program = || self.tools.mounting_program();
        let ask = async |limit| self.mounter.call(program, limit, words).await;
        let answer = self.tools.in_turn(action.clone(), TOOL_TIME_LIMIT, ask).await?;
        match answer.code {
            LATE => {
                let (address, limit) = (self.tools.address(), TOOL_TIME_LIMIT);
                Err(AttachError::TimedOut { action, address, limit })
            }
            _ => Ok(answer),
        }
    }

    /// Binds to where the image is mounted already, if it is with the same rights.
    async fn bind_image(
        &self,
        place: &Place,
        target: &Path,
        points: &[MountPoint],
    ) -> Result<bool, AttachError> {
        let rights = self.rights();
        // All of it: of an image that was mounted elsewhere a directory alone may be bound.
        let is_alike = |point: &MountPoint| {
            self.is_image_on(point, place)
                && point.root == Path::new("/")
                && rights.set_id != point.has("nosuid")
                && rights.devices != point.has("nodev")
        };
        let Some(point) = points.iter().find(|point| is_alike(point)) else { return Ok(false) };
        let call = self.tools.call(MOUNT).arguments(["-n", "-i", "--bind", "--"]);
        let made = call.argument(&point.target).argument(target).run().await;
        let bound = kernel::mounted_at(target)?;
        if let Err(error) = made
            && kernel::mounted_at(&point.target)?.as_ref().is_some_and(is_alike)
        {
            return Err(error);
        }
        if bound.as_ref().is_some_and(is_alike) {
            return Ok(true);
        }
        // It was unmounted at that moment, and this is the directory below.
        if bound.is_some() {
            let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c"]);
            call.argument(target).run().await?;
        }
        Ok(false)
    }

    /// Where an image is mounted from this file itself.
    pub(crate) fn image_on(&self, place: &Place) -> Result<Option<MountPoint>, AttachError> {
        let points = kernel::mount_points()?;
        Ok(points.into_iter().find(|point| self.is_image_on(point, place)))
    }

    fn is_image_on(&self, point: &MountPoint, place: &Place) -> bool {
        point.kind == FILE_SYSTEM && point.source == place.file
    }

    /// Refuses a file from which an image is mounted.
    pub(crate) fn require_no_image(&self, place: &Place) -> Result<(), AttachError> {
        match self.image_on(place)? {
            None => Ok(()),
            Some(MountPoint { target, .. }) => {
                Err(AttachError::InUse { path: place.path.clone(), through: target })
            }
        }
    }

    /// Mounts an image from a loop device.
    pub(crate) async fn mount_image_device(
        &self,
        place: &Place,
        device: &Path,
        target: &Path,
    ) -> Result<(), AttachError> {
        let options = format!("{},{}", OPTIONS, self.rights().options());
        let call = self.tools.call(MOUNT).arguments(["-n", "-i", "-t", FILE_SYSTEM]);
        let call = call.arguments(["-o", &options]).argument(device).argument(target);
        call.run().await.map(drop).map_err(|error| match error {
            AttachError::Tool { reason, .. } if is_damage(&reason) => {
                AttachError::BadImage { path: place.path.clone(), reason }
            }
            other => other,
        })
    }

    /// Whether an image of the export is mounted there, from its file or through a loop device.
    pub(crate) fn is_mounted_image(&self, point: &MountPoint) -> bool {
        point.kind == FILE_SYSTEM && self.disk(point).is_some()
    }

    /// Whether the kernel has the file system.
    pub(crate) async fn has_images(&self) -> bool {
        has_file_system(&self.tools, FILE_SYSTEM).await
    }

    /// Sees that the kernel has the file system.
    async fn require_file_system(&self) -> Result<(), AttachError> {
        if self.has_images().await {
            return Ok(());
        }
        let advice = "modprobe erofs, or take a kernel with CONFIG_EROFS_FS".to_owned();
        Err(AttachError::Missing { what: "the file system EROFS".to_owned(), advice })
    }
}

/// Mounts images until standard input is closed; the status to end with.
pub(crate) fn serve() -> u8 {
    // Nothing reads what it would say; the driver logs the status.
    mounter::serve(carry_out).map_or(sandbox::NOT_BEGUN, |()| 0)
}

/// Mounts an image, if the words are the export, the path below it, the target, and what its files may do; or
/// unmounts one, if it is a target.
fn carry_out(words: &[OsString], until: Instant) -> (u8, String) {
    let done = match words {
        [what, target] if what == UNMOUNT_ONE => unmount_image(Path::new(target), until),
        [what, words @ ..] if what == MOUNT_ONE => mount_image(words, until),
        _ => Err(unknown(words)),
    };
    let Err(error) = done else { return (DONE, String::new()) };
    if let AttachError::NotRegular { reason, .. } = error {
        return (NOT_REGULAR, reason);
    }
    let reason = error.to_string();
    let code = match error {
        AttachError::System { source, .. } if is(&source, &LOOP_DEVICE_MAY_HELP) => {
            NEEDS_LOOP_DEVICE
        }
        AttachError::System { source, .. } if is(&source, &COMPLAINTS) => BAD_IMAGE,
        AttachError::System { source, .. } if source.kind() == io::ErrorKind::TimedOut => LATE,
        AttachError::System { action: "open", path, source }
            if is(&source, &[Errno::NOENT]) && path.is_relative() =>
        {
            NO_FILE
        }
        _ => sandbox::NOT_BEGUN,
    };
    (code, reason)
}

fn is(error: &io::Error, any: &[Errno]) -> bool {
    any.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn unknown(words: &[OsString]) -> AttachError {
    AttachError::Path {
        got: format!("{words:?}"),
        reason: "expected `mount`, an export, a path below it, a target and options; or `unmount`, and a target",
    }
}

/// Whether an image is mounted there without a device in between.
pub(crate) fn is_from_file(point: &MountPoint) -> bool {
    point.kind == FILE_SYSTEM && !point.source.starts_with("/dev")
}

/// The caller may have asked again once the time is over: nothing is done twice.
fn require_time(target: &Path, until: Instant) -> Result<(), AttachError> {
    if Instant::now() < until {
        return Ok(());
    }
    let (action, path) = ("mount or unmount in time at", target.to_owned());
    Err(AttachError::System { action, path, source: io::ErrorKind::TimedOut.into() })
}

fn unmount_image(target: &Path, until: Instant) -> Result<(), AttachError> {
    require_time(target, until)?;
    let unmounted = match unmount(target, UnmountFlags::NOFOLLOW) {
        // It has nothing to bring to the appliance.
        Err(Errno::BUSY) => {
            require_time(target, until)?;
            unmount(target, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
        }
        unmounted => unmounted,
    };
    match unmounted {
        // Nothing is mounted there any more.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(AttachError::System {
            action: "unmount the image at",
            path: target.to_owned(),
            source: errno.into(),
        }),
    }
}

fn mount_image(arguments: &[OsString], until: Instant) -> Result<(), AttachError> {
    let [export, path, target, rights] = arguments else { return Err(unknown(arguments)) };
    // A regular file, and no link on the way. The mount of the export follows none either, so the name
    // leads to the same file below, where the kernel opens it; of a descriptor the table of mounts
    // would not say which file it is.
    drop(sandbox::open(Path::new(export), Path::new(path))?);
    let source = Path::new(export).join(path);
    let has = |option: &str| {
        rights.as_bytes().split(|byte| *byte == b',').any(|has| has == option.as_bytes())
    };
    let mut flags = MountFlags::RDONLY | MountFlags::NOATIME;
    if !has("suid") {
        flags |= MountFlags::NOSUID;
    }
    if !has("dev") {
        flags |= MountFlags::NODEV;
    }
    require_time(Path::new(target), until)?;
    let options = None::<&std::ffi::CStr>;
    mount(&source, Path::new(target), FILE_SYSTEM, flags, options).map_err(|errno| {
        AttachError::System { action: "mount the image", path: source, source: errno.into() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_late_is_neither_mounted_nor_unmounted() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("image"), "").unwrap();
        let (export, target) = (folder.path().into(), folder.path().join("target").into());
        let mount = [MOUNT_ONE.into(), export, "image".into(), target, "nosuid,nodev".into()];
        let unmount = [UNMOUNT_ONE.into(), folder.path().into()];
        for words in [&mount[..], &unmount[..]] {
            let (code, reason) = carry_out(words, Instant::now());
            assert_eq!(code, LATE, "{reason}");
        }
    }
}

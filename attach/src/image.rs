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
//! told, so the call is made by a child of our own; it can hang while the appliance is away.
//!
//! The kernel parses what is in the file, also what is written there after it was mounted. So it is to be a
//! snapshot, or a file that nothing writes any more, and its writer is to be trusted.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use crate::disk::is_damage;
use crate::export::{Export, Place};
use crate::kernel::{self, MountPoint};
use crate::probe::has_file_system;
use crate::sandbox;
use crate::tools::{MOUNT, UMOUNT};
use crate::{Access, AttachError, FileSystem};

/// The kernel's name of the file system.
pub(crate) const FILE_SYSTEM: &str = "erofs";

/// How an image is mounted through a loop device.
pub(crate) const OPTIONS: &str = "ro,noatime";

/// The first kernel that mounts an image from its file.
pub(crate) const WITHOUT_LOOP_RELEASE: (u32, u32) = (6, 12);

/// The first word for `run_tool` where it is to mount an image; an export is a path and not this.
pub(crate) const MOUNT_IMAGE: &str = "mount-image";

/// What that program ends with where only a loop device may help.
const NEEDS_LOOP_DEVICE: u8 = 124;

/// What the kernel says then: it does not mount from this file. It says the second of an image that is none,
/// too; the attempt with a loop device tells them apart.
const LOOP_DEVICE_MAY_HELP: [Errno; 2] = [Errno::NOTBLK, Errno::INVAL];

/// And where the file holds what the kernel refuses.
const BAD_IMAGE: u8 = 123;

/// What the kernel says of those: a wrong checksum, damage, features that it has not.
const COMPLAINTS: [Errno; 3] = [Errno::BADMSG, Errno::UCLEAN, Errno::OPNOTSUPP];

impl Export {
    /// Mounts an image that nothing else is mounted at the place of.
    pub(crate) async fn mount_image_locked(
        &self,
        place: &Place,
        target: &Path,
    ) -> Result<(), AttachError> {
        self.require_file_system().await?;
        if self.bind_image(place, target).await? {
            return Ok(());
        }
        let folder = match place.file.strip_prefix(self.snapshot_directory()) {
            Ok(_) => self.snapshot_directory(),
            Err(_) => &*self.directory,
        };
        let below = place.file.strip_prefix(folder).unwrap_or(&place.file);
        let call = self.tools.call_own().argument(MOUNT_IMAGE).argument(folder).argument(below);
        let mounted = call.argument(target).argument(self.rights().options()).run().await;
        let code = match &mounted {
            Err(AttachError::Tool { status, .. }) => status.code(),
            _ => None,
        };
        match mounted {
            Err(_) if code == Some(NEEDS_LOOP_DEVICE.into()) => {
                self.mount_locked(place, target, Access::ReadOnly, FileSystem::Erofs).await
            }
            Err(AttachError::Tool { reason, .. }) if code == Some(BAD_IMAGE.into()) => {
                Err(AttachError::BadImage { path: place.path.clone(), reason })
            }
            Err(AttachError::Tool { reason, .. }) if reason.contains("No such file") => {
                let (address, path) = (self.tools.address(), place.path.clone());
                Err(AttachError::NotFound { address, path })
            }
            other => other.map(drop),
        }
    }

    /// Binds to where the image is mounted already, if it is with the same rights.
    async fn bind_image(&self, place: &Place, target: &Path) -> Result<bool, AttachError> {
        let rights = self.rights();
        // All of it: of an image that was mounted elsewhere a directory alone may be bound.
        let is_alike = |point: &MountPoint| {
            self.is_image_on(point, place)
                && point.root == Path::new("/")
                && rights.set_id != point.has("nosuid")
                && rights.devices != point.has("nodev")
        };
        let points = kernel::mount_points()?;
        let Some(point) = points.into_iter().find(is_alike) else { return Ok(false) };
        let call = self.tools.call(MOUNT).arguments(["-n", "-i", "--bind", "--"]);
        call.argument(&point.target).argument(target).run().await?;
        let bound = kernel::mounted_at(target)?;
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

/// Mounts an image; the words are the export, the path below it, the target, and what its files may do.
/// The reason of a failure is on standard error.
pub(crate) fn run(arguments: &[OsString]) -> u8 {
    match mount_image(arguments) {
        Ok(()) => 0,
        Err(error) => {
            // A standard error that is closed takes no words; the status says enough.
            let _ = writeln!(io::stderr(), "{error}");
            match error {
                AttachError::System { source, .. } if is(&source, &LOOP_DEVICE_MAY_HELP) => {
                    NEEDS_LOOP_DEVICE
                }
                AttachError::System { source, .. } if is(&source, &COMPLAINTS) => BAD_IMAGE,
                _ => sandbox::NOT_BEGUN,
            }
        }
    }
}

fn is(error: &io::Error, any: &[Errno]) -> bool {
    any.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn mount_image(arguments: &[OsString]) -> Result<(), AttachError> {
    let [export, path, target, rights] = arguments else {
        return Err(AttachError::Path {
            got: format!("{arguments:?}"),
            reason: "expected an export, a path below it, a target and options",
        });
    };
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
    let options = None::<&std::ffi::CStr>;
    mount(&source, Path::new(target), FILE_SYSTEM, flags, options).map_err(|errno| {
        AttachError::System { action: "mount the image", path: source, source: errno.into() }
    })
}

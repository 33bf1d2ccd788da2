//! A new file system in a file, mounted as long as an experiment needs it.
//!
//! Whatever happens, it is unmounted and its loop device detached: [`Mount`] does so when it is
//! dropped, and no signal ends this program before that.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;

use crate::failure::Failure;
use crate::process::{command, output};

/// How often unmounting is tried while something still looks at the mount.
const UNMOUNT_ATTEMPTS_MAX: u32 = 50;

/// Time between two of these.
const UNMOUNT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes of a sector in the kernel's counters, whatever the device's own are.
const SECTOR_BYTES: u64 = 512;

/// Which of the counters of a block device is that of sectors written.
const SECTORS_WRITTEN_FIELD: usize = 6;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Xfs,
    Btrfs,
    Ext4,
}

impl Kind {
    /// As it is called in a sentence.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Xfs => "XFS",
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
        }
    }

    /// As mount(8) knows it.
    const fn mount_type(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
        }
    }

    /// The program that makes it, and how it is to.
    const fn maker(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Xfs => ("mkfs.xfs", &["-q", "-m", "reflink=1"]),
            Self::Btrfs => ("mkfs.btrfs", &["-q"]),
            // The kernel would write the tables later, in the middle of what is measured.
            Self::Ext4 => {
                ("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"])
            }
        }
    }
}

/// A mounted file system in a file of a temporary folder.
#[derive(Debug)]
pub(crate) struct Mount {
    // Removed after the file system in it was unmounted.
    folder: TempDir,
}

impl Mount {
    /// Makes the file system, of that size, in a temporary folder in `directory`.
    pub(crate) fn new(kind: Kind, size_bytes: u64, directory: &Path) -> Result<Self, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::Unfit("mounting needs root".to_owned()));
        }
        let folder =
            tempfile::tempdir_in(directory).map_err(Failure::at("make a folder in", directory))?;
        let mount = Self { folder };
        let (image, point) = (mount.image(), mount.point());
        let file = File::create(&image).map_err(Failure::at("create", &image))?;
        file.set_len(size_bytes).map_err(Failure::at("size", &image))?;
        drop(file);
        let (maker, options) = kind.maker();
        output(command(maker).args(options).arg(&image))?;
        std::fs::create_dir(&point).map_err(Failure::at("create", &point))?;
        // Not by `mount -o loop`: that asks for the backing file of every loop device of the
        // machine, and waits for ever if one of them is on a server that is gone.
        let printed = output(command("losetup").args(["--find", "--show"]).arg(&image))?;
        let device = printed.trim();
        let mut command = command("mount");
        let mounted = output(command.args(["-t", kind.mount_type(), device]).arg(&point));
        // A device in use is detached once its last user goes: with the mount.
        let detached = output(self::command("losetup").args(["--detach", device]));
        // From here on the drop undoes it.
        mounted?;
        detached?;
        Ok(mount)
    }

    /// Where it is mounted.
    pub(crate) fn point(&self) -> PathBuf {
        self.folder.path().join("mount")
    }

    /// Writes what is dirty, above the block device and below, so that none of it is written
    /// while something else is measured.
    pub(crate) fn settle(&self) -> Result<(), Failure> {
        for place in [self.point(), self.image()] {
            let opened = File::open(&place).map_err(Failure::at("open", &place))?;
            rustix::fs::syncfs(&opened)
                .map_err(|error| Failure::at("sync", &place)(error.into()))?;
        }
        Ok(())
    }

    /// Bytes that were written to its block device so far.
    pub(crate) fn written_bytes(&self) -> Result<u64, Failure> {
        let point = self.point();
        let device = std::fs::metadata(&point).map_err(Failure::at("look at", &point))?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let path = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat"));
        let text = std::fs::read_to_string(&path).map_err(Failure::at("read", &path))?;
        written_bytes_in(&text)
            .ok_or_else(|| Failure::Unfit(format!("{} told no counters: {text}", path.display())))
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Whether something is mounted there.
    fn is_mounted(&self) -> bool {
        let mut probe = command("mountpoint");
        probe.arg("-q").arg(self.point()).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let point = self.point();
        for _ in 0..UNMOUNT_ATTEMPTS_MAX {
            if !self.is_mounted() || output(command("umount").arg(&point)).is_ok() {
                return;
            }
            std::thread::sleep(UNMOUNT_PAUSE);
        }
        // Goes away with its last user.
        if let Err(failure) = output(command("umount").arg("--lazy").arg(&point)) {
            eprintln!("slackwater-bench: {} stays mounted: {failure}", point.display());
        }
    }
}

/// The bytes written in what the kernel tells of a block device.
fn written_bytes_in(text: &str) -> Option<u64> {
    let sectors: u64 = text.split_whitespace().nth(SECTORS_WRITTEN_FIELD)?.parse().ok()?;
    sectors.checked_mul(SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn written_bytes_are_read_from_the_counters_of_a_device() {
        let text = "  46201    49123  3103162    23361   228651   150842 17092338 1073 0 1 2\n";
        assert_eq!(written_bytes_in(text), Some(17_092_338 * 512));
        assert_eq!(written_bytes_in("1 2 3"), None);
    }

    #[test]
    fn as_root_what_is_written_is_counted_and_nothing_stays_behind() {
        let folder = tempfile::tempdir().unwrap();
        let mount = Mount::new(Kind::Ext4, 64 << 20, folder.path()).unwrap();
        let before = mount.written_bytes().unwrap();
        let mut file = File::create(mount.point().join("file")).unwrap();
        file.write_all(&vec![1; 8 << 20]).unwrap();
        file.sync_all().unwrap();
        let written = mount.written_bytes().unwrap() - before;
        assert!((8 << 20..16 << 20).contains(&written), "{written} bytes");
        drop(file);
        drop(mount);
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 0, "folders that stayed");
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(folder.path().to_str().unwrap()), "{mounts}");
    }

    #[test]
    fn as_root_a_file_system_that_cannot_be_made_is_said_to_be() {
        let folder = tempfile::tempdir().unwrap();
        let error = Mount::new(Kind::Xfs, 4096, folder.path()).unwrap_err().to_string();
        assert!(error.contains("mkfs.xfs"), "{error}");
    }
}

//! Images and overlays, mounted for a test.
#![allow(dead_code, reason = "each test program uses a part")]

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// A mount; dropped, it is none.
#[derive(Debug)]
pub(crate) struct Mount(PathBuf);

impl Mount {
    /// Mounts an image without a loop device, where the kernel can (since 6.12).
    pub(crate) fn image(image: &Path, root: &Path) -> Self {
        let flags = MountFlags::RDONLY | MountFlags::NODEV | MountFlags::NOSUID;
        match rustix::mount::mount(image, root, "erofs", flags, None::<&CStr>) {
            // An older kernel, or a file system that no image can be mounted from.
            Err(Errno::NOTBLK | Errno::INVAL) => {
                let mut mount = Command::new("mount");
                mount.args(["-t", "erofs", "-o", "ro,loop,nodev,nosuid"]).arg(image).arg(root);
                assert!(mount.status().unwrap().success(), "mount {}", image.display());
            }
            result => result.unwrap(),
        }
        Self(root.to_owned())
    }

    /// Mounts an overlay of at least two directories, the topmost first, that cannot be written.
    pub(crate) fn overlay(lowers: &[&Path], root: &Path) -> Self {
        let lowers: Vec<_> = lowers.iter().map(|lower| lower.to_str().unwrap()).collect();
        let options = CString::new(format!("lowerdir={}", lowers.join(":"))).unwrap();
        rustix::mount::mount("overlay", root, "overlay", MountFlags::RDONLY, &*options).unwrap();
        Self(root.to_owned())
    }

    pub(crate) fn root(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

/// What another's program thinks of an image.
pub(crate) fn check(image: &Path) {
    let output = Command::new("fsck.erofs").arg("--extract").arg(image).output();
    let output = output.expect("fsck.erofs is needed: deploy/install-needs test");
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("<E>"), "fsck.erofs: {text}");
}

/// The version of the running kernel.
pub(crate) fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|sign: char| !sign.is_ascii_digit()).map(str::parse);
    (numbers.next().unwrap().unwrap(), numbers.next().unwrap().unwrap())
}

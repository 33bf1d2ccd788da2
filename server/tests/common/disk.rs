//! A disk of a test's own: ext4 on a loop device, which can be filled, stopped, or fail. It needs root
//! and loop devices, as `make test` has them; without them the test fails and says so.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

/// Longest time that a tool may take.
const TOOL_SECONDS: &str = "60";

/// A mounted ext4; unmounted and gone when dropped.
pub struct Disk {
    directory: TempDir,
    device: String,
    is_thin: bool,
    is_mounted: bool,
}

impl Disk {
    /// A disk of this size.
    pub fn new(bytes: u64) -> Self {
        Self::make(bytes, None)
    }

    /// A disk of this size on a pool that has fewer bytes to give: what goes beyond is a failed
    /// write, as of a bad medium.
    pub fn thin(bytes: u64, pool_bytes: u64) -> Self {
        Self::make(bytes, Some(pool_bytes))
    }

    fn make(bytes: u64, pool_bytes: Option<u64>) -> Self {
        let directory = TempDir::new().unwrap();
        let mut disk = Self {
            directory,
            device: String::new(),
            is_thin: pool_bytes.is_some(),
            is_mounted: false,
        };
        for folder in [disk.pool(), disk.path()] {
            std::fs::create_dir(folder).unwrap();
        }
        if let Some(bytes) = pool_bytes {
            let size = format!("size={bytes}");
            tool("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", text(&disk.pool())]);
        }
        let image = disk.pool().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        // No share for root, which the test is: full is full.
        tool("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1", text(&image)]);
        disk.device = tool("losetup", &["--find", "--show", text(&image)]).trim().to_owned();
        disk.mount();
        disk
    }

    fn pool(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("disk")
    }

    fn mount(&mut self) {
        tool("mount", &["-t", "ext4", &self.device, text(&self.path())]);
        self.is_mounted = true;
    }

    /// Unmounts it, has its file system checked and mended, and mounts it again.
    pub fn mend(&mut self) {
        tool("umount", &[text(&self.path())]);
        self.is_mounted = false;
        // 1: errors were corrected.
        let status = command("e2fsck", &["-f", "-y", &self.device]).status().unwrap();
        assert!(matches!(status.code(), Some(0 | 1)), "e2fsck: {status}");
        self.mount();
    }

    /// Takes all room that is left on it, as somebody else might.
    pub fn fill(&self) {
        fill(&self.path().join("filler"));
    }

    /// The same, so slowly that all that a store does by itself is done while only little is left.
    pub fn fill_slowly(&self) {
        let mut file = File::options().create(true).append(true).open(self.path().join("filler"));
        let piece = vec![0x5a; 64 << 10];
        while file.as_mut().unwrap().write_all(&piece).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.fill();
    }

    /// Gives that back.
    pub fn empty(&self) {
        std::fs::remove_file(self.path().join("filler")).unwrap();
    }

    /// Takes all room that is left in the pool: from now on writes fail.
    pub fn fill_pool(&self) {
        fill(&self.pool().join("filler"));
    }

    /// Gives that back: writes work again.
    pub fn empty_pool(&self) {
        std::fs::remove_file(self.pool().join("filler")).unwrap();
    }

    /// Stops all writes until what it answers is dropped.
    pub fn freeze(&self) -> Frozen {
        tool("fsfreeze", &["--freeze", text(&self.path())]);
        Frozen(self.path())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Each on its own: what a failed test left must not stay.
        if self.is_mounted {
            let _ = command("umount", &["--lazy", text(&self.path())]).status();
        }
        if !self.device.is_empty() {
            let _ = command("losetup", &["--detach", &self.device]).status();
        }
        if self.is_thin {
            let _ = command("umount", &["--lazy", text(&self.pool())]).status();
        }
    }
}

/// A disk that takes no writes.
pub struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let thawed = command("fsfreeze", &["--unfreeze", text(&self.0)]).status();
        assert!(thawed.is_ok_and(|status| status.success()), "the disk stays frozen");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn command(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args([TOOL_SECONDS, name]).args(arguments);
    command
}

fn tool(name: &str, arguments: &[&str]) -> String {
    let output = command(name, arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {error}; this test needs root and loop devices, as `make test` does"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Writes a file until there is no room, or on to it.
fn fill(path: &Path) {
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    for length in [1 << 20, 4096, 1] {
        let piece = vec![0x5a; length];
        while file.write_all(&piece).is_ok() {}
    }
    // What is not on the disk takes no room there; that it does not fit is the point.
    let _ = file.sync_all();
}

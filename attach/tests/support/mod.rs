//! A state directory and an export that leave nothing mounted behind, however a test ends.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use slackwater_attach::Options;
use tempfile::TempDir;

/// How long something that happens in the background may take on a machine that is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Directories of one test.
pub(crate) struct Place {
    directory: TempDir,
    pub(crate) state: PathBuf,
    pub(crate) export: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        // A blank, because the mount table escapes it.
        let directory = TempDir::with_prefix("slackwater attach ").unwrap();
        let path = directory.path().canonicalize().unwrap();
        let (state, export) = (path.join("state"), path.join("files"));
        std::fs::create_dir_all(export.join(".snapshot")).unwrap();
        std::fs::create_dir_all(&state).unwrap();
        Self { directory, state, export }
    }

    pub(crate) fn options(
        &self,
        fuse_program: Vec<OsString>,
        tool_program: Vec<OsString>,
    ) -> Options {
        Options {
            method: Some(slackwater_attach::Method::Fuse),
            nfs_address: "127.0.0.1:2049".parse().unwrap(),
            export: "/slackwater".to_owned(),
            mount_path: None,
            state_directory: self.state.clone(),
            fuse_program,
            tool_program,
            prefers_fuse: false,
            rights: slackwater_attach::Rights::CONTAINER,
            mounts_end: false,
        }
    }

    /// A sparse file of the export.
    pub(crate) fn make_file(&self, name: &str, size_bytes: u64) -> PathBuf {
        let path = self.export.join(name);
        std::fs::File::create(&path).unwrap().set_len(size_bytes).unwrap();
        path
    }

    /// Where below this place something is mounted, the last first.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        let prefix = self.directory.path().to_str().unwrap().replace(' ', "\\040");
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let targets = table.lines().filter_map(|line| line.split(' ').nth(4));
        let ours = targets.filter(|target| target.starts_with(&prefix));
        ours.map(|target| target.replace("\\040", " ").into()).rev().collect()
    }

    /// The loop devices on files of this place, or on those of an export that was served from it.
    pub(crate) fn loop_devices(&self) -> Vec<PathBuf> {
        let prefix = self.directory.path().to_str().unwrap();
        let mut devices = Vec::new();
        for entry in std::fs::read_dir("/sys/block").unwrap() {
            let path = entry.unwrap().path();
            let file = std::fs::read_to_string(path.join("loop/backing_file"));
            if file.is_ok_and(|file| file.starts_with(prefix)) {
                devices.push(Path::new("/dev").join(path.file_name().unwrap()));
            }
        }
        devices
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for target in self.mounted() {
            // A frozen file system would outlive its mount.
            let _not_frozen = Command::new("fsfreeze").arg("--unfreeze").arg(&target).output();
            let _gone = Command::new("umount").arg("-ncil").arg(&target).output();
        }
        for device in self.loop_devices() {
            let _gone = Command::new("losetup").arg("--detach").arg(device).output();
        }
    }
}

/// Waits until something holds.
pub(crate) async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Runs a tool that must succeed; what it printed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

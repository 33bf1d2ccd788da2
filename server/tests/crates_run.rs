//! `tests/crates/run`, with a stand-in for cargo: a run that is killed leaves no process and no mount, and
//! the next one removes its files and detaches its loop devices; one that is interrupted removes them itself.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::fs::{self, File, TryLockError};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Only reached if something of a killed run does not end.
const END_TIME: Duration = Duration::from_secs(60);

/// Mounts and attaches, leaves a process to the first one of its namespace, says where, and stays.
const STAYS: &str = r#"#!/bin/sh
    set -e
    mkdir "$TMPDIR/mounted"
    mount -t tmpfs none "$TMPDIR/mounted"
    truncate -s 1M "$TMPDIR/disk"
    device=$(losetup --find --show "$TMPDIR/disk")
    sh -c 'setsid sleep 300 >/dev/null 2>&1 &'
    echo "$TMPDIR $device $*"
    exec sleep 300
"#;

/// What a test run does that fails.
const FAILS: &str = r#"#!/bin/sh
    echo "$TMPDIR"
    touch "$TMPDIR/file"
    exit 101
"#;

struct Run {
    directory: tempfile::TempDir,
}

impl Run {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn command(&self, cargo: &str, arguments: &[&str]) -> Command {
        // By another process: one that a test beside this one forks while the file is written here would
        // hold it open for a moment, and Linux runs no program that is open for writing.
        let program = self.path().join("cargo");
        let mut writer = Command::new("sh");
        writer.args(["-c", r#"printf %s "$1" >"$2" && chmod 755 "$2""#, "sh", cargo]).arg(&program);
        assert!(writer.status().unwrap().success());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        // As from a terminal, also where these tests run in the background of a shell, which ignores Ctrl-C.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").arg(root.join("tests/crates/run"));
        command.args(arguments).env("CARGO", program).env("TMPDIR", self.path());
        command.env("XDG_CACHE_HOME", self.path().join("cache")).stdout(Stdio::piped());
        command
    }
}

/// True once the last process has ended that a run started in its folder.
fn has_ended(folder: &Path) -> bool {
    match File::open(folder).unwrap().try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(error)) => panic!("{error}"),
    }
}

/// Whether the loop device has a file of the folder. Another program may have it with one of its own by now.
fn is_attached(device: &str, folder: &Path) -> bool {
    let entry = Path::new("/sys/block").join(Path::new(device).file_name().unwrap());
    let file = fs::read_to_string(entry.join("loop/backing_file"));
    file.is_ok_and(|file| file.starts_with(folder.to_str().unwrap()))
}

#[test]
fn as_root_an_interrupted_run_ends_and_removes_its_files() {
    let run = Run::new();
    // As a terminal does it: all of the group gets the signal.
    let mut command = run.command(STAYS, &[]);
    let mut interrupted = command.process_group(0).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(interrupted.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let folder = PathBuf::from(line.split(' ').next().unwrap());
    assert!(folder.join("disk").exists(), "got {line:?}");
    let group = format!("-{}", interrupted.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let deadline = Instant::now() + END_TIME;
    while interrupted.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it still runs");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!interrupted.wait().unwrap().success());
    assert!(!folder.exists(), "a run left its own folder");
}

#[test]
fn as_root_a_killed_run_leaves_nothing_that_the_next_does_not_remove() {
    let run = Run::new();
    let mut killed = run.command(STAYS, &["--test", "a name"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(killed.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let [folder, device, arguments] = *line.trim_end().splitn(3, ' ').collect::<Vec<_>>() else {
        panic!("got {line:?}");
    };
    let folder = PathBuf::from(folder);
    assert_eq!(arguments, "test --release --workspace --test a name");
    assert_eq!(folder.parent().unwrap(), run.path());
    assert!(!has_ended(&folder));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(folder.to_str().unwrap()), "a mount reached the machine: {mounts}");

    killed.kill().unwrap();
    killed.wait().unwrap();
    let deadline = Instant::now() + END_TIME;
    while !has_ended(&folder) {
        assert!(Instant::now() < deadline, "a process of {} still runs", folder.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(folder.join("disk").exists() && is_attached(device, &folder));

    let next = run.command(FAILS, &[]).output().unwrap();
    assert_eq!(next.status.code(), Some(101), "{}", String::from_utf8_lossy(&next.stderr));
    let second = String::from_utf8(next.stdout).unwrap();
    assert_ne!(Path::new(second.trim_end()), folder);
    let said = String::from_utf8_lossy(&next.stderr);
    assert!(!folder.exists(), "the folder is left: {said}");
    // While another program looks at the device, its end waits for that.
    let deadline = Instant::now() + END_TIME;
    while is_attached(device, &folder) {
        assert!(Instant::now() < deadline, "{device} is left: {said}");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!Path::new(second.trim_end()).exists(), "a run left its own folder");
}

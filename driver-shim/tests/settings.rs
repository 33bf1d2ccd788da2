//! The settings of the daemon, from all their places, and what it refuses to start with.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "settings/join.rs"]
mod join;
mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use slackwater_client::query::ListSnapshots;
use support::held_port::HeldPort;
use support::{Appliance, abort_exports};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Longest time for a daemon to start or stop.
const TIME_MAX: Duration = Duration::from_secs(60);

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater-driver"));
    command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
    command
}

fn refused(arguments: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command(arguments).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// A folder; what a daemon mounted in it, which it leaves when it stops, is unmounted at the end.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        abort_exports(self.0.path());
    }
}

/// A daemon that is stopped when the test ends.
struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts it, and waits until it says that it is ready.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let daemon = Self { child };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        daemon
    }

    fn stop(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < TIME_MAX, "the daemon does not stop");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn what_is_missing_or_wrong_is_named_with_its_setting() {
    let folder = Folder::new();
    let state = folder.path().join("state");
    let (code, error) = refused(&["--state-dir", text(&state)]);
    assert_eq!(code, Some(2));
    assert!(error.contains("--docker-socket"), "{error}");
    let (code, error) = refused(&["--state-dir", text(&state), "--disk-size", "8GB"]);
    assert_eq!(code, Some(2));
    assert!(error.contains("8GB") && error.contains("GiB"), "{error}");
    let file = folder.path().join("config.toml");
    std::fs::write(&file, "state-dri = \"/x\"\n").unwrap();
    let (code, error) = refused(&["--config", text(&file)]);
    assert_eq!(code, Some(2));
    assert!(error.contains("state-dri") && error.contains("config.toml"), "{error}");
    assert!(!state.exists(), "settings were refused, and something was made all the same");
}

#[test]
fn flag_environment_and_file_are_one() {
    let folder = Folder::new();
    let (state, file) = (folder.path().join("state"), folder.path().join("config.toml"));
    let (flag, variable) = (folder.path().join("flag.sock"), folder.path().join("variable.sock"));
    // The daemon starts without its appliance.
    let closed = HeldPort::new();
    let api = closed.url();
    let settings = format!(
        "api = {:?}\nstate-dir = {:?}\ndocker-socket = \"/nonexistent/not/used.sock\"\ncontainerd-socket = \"/nonexistent/not/used.sock\"\n",
        api, state
    );
    std::fs::write(&file, settings).unwrap();
    let mut command = command(&["--docker-socket", text(&flag)]);
    command.env("SLACKWATER_CONFIG", &file).env("SLACKWATER_CONTAINERD_SOCKET", &variable);
    let daemon = Daemon::start(&mut command);
    for socket in [&flag, &variable, &state.join("control.sock")] {
        UnixStream::connect(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
    }
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_state_directory_has_one_daemon_and_the_next_one_takes_it_over() {
    let folder = Folder::new();
    let (state, socket) = (folder.path().join("state"), folder.path().join("docker.sock"));
    // The daemon starts without its appliance.
    let closed = HeldPort::new();
    let api = closed.url();
    let arguments = ["--api", &api, "--state-dir", text(&state), "--docker-socket", text(&socket)];
    let mut first = Daemon::start(&mut command(&arguments));
    let (code, error) = refused(&arguments);
    assert_eq!(code, Some(1));
    assert!(error.contains("another slackwater-driver"), "{error}");
    // Killed, it leaves its sockets behind.
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    assert!(socket.exists());
    let second = Daemon::start(&mut command(&arguments));
    UnixStream::connect(&socket).unwrap();
    let status = command(&["status", "--state-dir", text(&state)]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("appliance.reachable") && status.contains("false"), "{status}");
    assert_eq!(second.stop(), Some(0));
}

#[test]
fn the_empty_disk_is_made_before_a_container_needs_it() {
    let mut appliance = Appliance::start();
    let folder = Folder::new();
    let (state, socket) = (folder.path().join("state"), folder.path().join("docker.sock"));
    let (api, nfs) = (appliance.url.clone(), appliance.nfs.to_string());
    let (state, socket) = (text(&state), text(&socket));
    let arguments = ["--api", &api, "--nfs", &nfs, "--state-dir", state, "--docker-socket", socket];
    // Also where the appliance comes later.
    appliance.stop();
    let daemon = Daemon::start(&mut command(&arguments));
    appliance.serve();
    let (runtime, client, start) = (Runtime::new().unwrap(), appliance.client(), Instant::now());
    loop {
        let page = runtime.block_on(client.snapshots(&ListSnapshots::default())).unwrap();
        let names = page.items.iter().filter_map(|snapshot| snapshot.name.as_deref());
        if names.into_iter().any(|name| name.starts_with("slackwater-empty-ext4-")) {
            break;
        }
        assert!(start.elapsed() < TIME_MAX, "there is none");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn directories_that_others_reach_are_refused_before_anything_is_mounted() {
    use std::os::unix::fs::PermissionsExt;

    for exposed in ["cache", "state"] {
        let folder = Folder::new();
        let (state, cache) = (folder.path().join("state"), folder.path().join("cache"));
        let directory = &folder.path().join(exposed);
        // Something of somebody else is in it.
        std::fs::create_dir(directory).unwrap();
        std::fs::write(directory.join("letter"), "").unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (state, cache) = (text(&state), text(&cache));
        let socket = format!("{state}.sock");
        let words = ["--api", "http://127.0.0.1:1", "--nfs", "127.0.0.1:1", "--state-dir", &state];
        let words = [&words[..], &["--cache-dir", &cache, "--docker-socket", &socket]].concat();
        let disk = format!("{state}.disk");
        for command in [&["run"][..], &["attach", "--file", "x", &disk]] {
            let (code, said) = refused(&[command, &words].concat());
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains(&text(directory)) && said.contains("mode 755"), "{said}");
            assert!(said.contains("chmod 700"), "{said}");
        }
        let mode = std::fs::metadata(directory).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o755, "it is as it was");
        assert!(!folder.path().join("state/attach").exists());
    }
}

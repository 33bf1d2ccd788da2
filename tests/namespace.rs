//! A network namespace for tests of several crates, which include this file as a module. Takes root.
//!
//! Nothing of it reaches the machine's own network. It ends with the test, or half an hour after a test that was killed.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// No test waits longer for one.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than the test takes; what keeps a namespace ends then if the test was killed.
const KEPT_SECONDS: &str = "1800";

/// A network namespace.
pub struct Namespace {
    keeper: Child,
}

impl Namespace {
    pub fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "sleep", KEPT_SECONDS]).stdin(Stdio::null());
        let keeper = command.spawn().unwrap();
        let mut made = Self { keeper };
        let link = |path: PathBuf| std::fs::read_link(path).ok();
        let own = link("/proc/self/ns/net".into());
        let deadline = Instant::now() + PATIENCE;
        // One that has ended has none.
        while link(made.path()).is_none_or(|link| Some(link) == own) {
            let ended = made.keeper.try_wait().unwrap();
            assert!(ended.is_none(), "unshare makes no namespace, which takes root: {ended:?}");
            assert!(Instant::now() < deadline, "unshare makes no namespace");
            std::thread::sleep(Duration::from_millis(1));
        }
        made.ip("link set lo up");
        made
    }

    /// The process that keeps it, as `ip link` names a namespace.
    pub fn keeper(&self) -> u32 {
        self.keeper.id()
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.keeper.id()).into()
    }

    /// A command that runs in the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Runs a program to its end.
    pub fn done(&self, program: &str, arguments: &[&str]) {
        let output = self.command(program).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {said}");
    }

    /// `ip` with these arguments.
    pub fn ip(&self, arguments: &str) {
        self.done("ip", &arguments.split(' ').collect::<Vec<_>>());
    }

    /// Gives a device an address, and starts it.
    pub fn has_address(&self, device: &str, address: &str) {
        self.ip(&format!("address add {address} dev {device}"));
        self.ip(&format!("link set {device} up"));
    }

    /// Does the work on a thread in the namespace: its sockets are there.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let space = File::open(self.path()).unwrap();
        std::thread::scope(|scope| {
            let done = scope.spawn(move || {
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(space.as_fd(), network).unwrap();
                work()
            });
            done.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

//! An appliance, a worker and a container in network namespaces: a bridge and masquerading, as engines make them.
//!
//! ```text
//! appliance 10.9.0.1 ---wire--- 10.9.0.2 worker 172.18.0.1 ---bridge--- 172.18.0.2 container
//!                                          masquerades
//! ```
//! Nothing of it reaches the machine's own network. It ends with the test, or half an hour after a test that was killed.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::common::{PATIENCE, run_to_end};

/// Where the appliance listens, and the address of the worker.
pub const APPLIANCE: &str = "10.9.0.1";
pub const WORKER: &str = "10.9.0.2";

/// Longer than the test takes; what keeps a namespace ends then if the test was killed.
const KEPT_SECONDS: &str = "1800";

/// A network namespace.
pub struct Namespace {
    keeper: Child,
}

impl Namespace {
    fn new() -> Self {
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

    fn done(&self, program: &str, arguments: &[&str]) {
        let output = run_to_end(self.command(program).args(arguments));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {said}");
    }

    fn ip(&self, arguments: &str) {
        self.done("ip", &arguments.split(' ').collect::<Vec<_>>());
    }

    fn has_address(&self, device: &str, address: &str) {
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

pub struct Network {
    pub appliance: Namespace,
    pub worker: Namespace,
    pub container: Namespace,
}

impl Network {
    pub fn new() -> Self {
        let [appliance, worker, container] = [(); 3].map(|()| Namespace::new());
        let to = |namespace: &Namespace| namespace.keeper.id();
        appliance.ip(&format!("link add wire type veth peer name eth0 netns {}", to(&worker)));
        appliance.has_address("wire", &format!("{APPLIANCE}/24"));
        worker.has_address("eth0", &format!("{WORKER}/24"));
        worker.ip("link add docker0 type bridge");
        worker.has_address("docker0", "172.18.0.1/16");
        worker.ip(&format!("link add veth0 type veth peer name eth0 netns {}", to(&container)));
        worker.ip("link set veth0 master docker0");
        worker.ip("link set veth0 up");
        container.has_address("eth0", "172.18.0.2/16");
        container.ip("route add default via 172.18.0.1");
        // As seen from within the namespace.
        worker.done("sh", &["-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        // Its lock may be the machine's.
        let masquerade = "-w 60 -t nat -A POSTROUTING -s 172.18.0.0/16 -o eth0 -j MASQUERADE";
        worker.done("iptables", &masquerade.split(' ').collect::<Vec<_>>());
        Self { appliance, worker, container }
    }
}

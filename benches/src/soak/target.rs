//! The server that is killed: always on the same directory, behind the same ports.
//!
//! Its ports are held while it is down: a socket stays bound to each and never listens. The server,
//! which sets `SO_REUSEADDR`, gets them all the same; who looks for a free port does not.

use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use slackwater_benches::wire::{Handle, Session};
use slackwater_client::{Client, RetryPolicy, Token};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

use super::chance::Chance;
use super::trouble::Trouble;
use crate::failure::Failure;
use crate::process;
use crate::stop::Stop;

/// The export's path, the server's default.
pub(super) const EXPORT: &str = "/slackwater";

/// Ports below those that outgoing connections get (from 32768 on), of which many are in use.
const PORT_FIRST: u64 = 20_000;
const PORT_COUNT: u64 = 12_000;

/// How often a starting server is asked whether it is ready.
const POLL: Duration = Duration::from_millis(5);

/// Time for one such question: a port that is forwarded into a machine which still boots takes
/// the connection and answers nothing.
const READY_CALL_LIMIT: Duration = Duration::from_secs(2);

/// Longest clean end of a server that starts quickly.
const STOP_LIMIT_MIN: Duration = Duration::from_secs(60);

/// How a server is started.
#[derive(Debug)]
pub(super) struct Target {
    program: PathBuf,
    arguments: Vec<String>,
    folder: PathBuf,
    pub(super) nfs: SocketAddr,
    pub(super) api: SocketAddr,
    /// Sent with each call over REST.
    pub(super) token: Option<Token>,
    /// Whether its export is mounted by address, and not by secret paths.
    pub(super) by_address: bool,
    ready_limit: Duration,
    _holders: [TcpSocket; 2],
}

/// A process, killed without warning when dropped.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
}

impl Target {
    /// A server with its data and its log in that folder.
    pub(super) fn new(
        program: &Path,
        folder: &Path,
        arguments: &[&str],
        ready_limit: Duration,
        chance: &mut Chance,
    ) -> Result<Self, Failure> {
        let ((nfs, nfs_holder), (api, api_holder)) = (held_address(chance)?, held_address(chance)?);
        let mut all = vec!["--data-dir".to_owned(), folder.join("data").display().to_string()];
        all.extend(["--nfs-listen".to_owned(), nfs.to_string()]);
        all.extend(["--api-listen".to_owned(), api.to_string()]);
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Ok(Self {
            program: program.to_owned(),
            arguments: all,
            folder: folder.to_owned(),
            nfs,
            api,
            token: None,
            by_address: false,
            ready_limit,
            _holders: [nfs_holder, api_holder],
        })
    }

    /// Starts the server, and waits for nothing.
    pub(super) fn start(&self) -> Result<Running, Failure> {
        let log = self.open_log()?;
        let errors = log.try_clone().map_err(Failure::at("open", &self.log_path()))?;
        // The kernel kills it when this program is gone, be it by SIGKILL.
        let mut command = process::command("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(&self.program).args(&self.arguments);
        command.stdout(log).stderr(errors);
        // Settings of the user's own appliance are none of this one's.
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"SLACKWATER_") {
                command.env_remove(name);
            }
        }
        // Not as an argument, which an older server does not know.
        command.env("SLACKWATER_INSECURE_NO_TOKENS", "true");
        let child = command.spawn().map_err(Failure::at("run", &self.program))?;
        Ok(Running { child })
    }

    /// Waits until the server serves.
    pub(super) fn wait(
        &self,
        running: &mut Running,
        runtime: &Runtime,
        stop: &Stop,
    ) -> Result<Duration, Failure> {
        let client = self.client(READY_CALL_LIMIT, RetryPolicy::never())?;
        let start = Instant::now();
        while runtime.block_on(client.readyz()).is_err() {
            stop.check()?;
            if let Some(status) = running.exit_status()? {
                let log = self.log_tail();
                return Err(Failure::Unfit(format!("the server ended with {status}: {log}")));
            }
            if start.elapsed() > self.ready_limit {
                let (seconds, log) = (self.ready_limit.as_secs(), self.log_tail());
                return Err(Failure::Unfit(format!("not ready after {seconds} s: {log}")));
            }
            std::thread::sleep(POLL);
        }
        Ok(start.elapsed())
    }

    /// Asks the server to end, and answers what is wrong with how it did. It has ended then.
    pub(super) fn stop(
        &self,
        running: &mut Running,
        stop: &Stop,
    ) -> Result<Option<String>, Failure> {
        running.terminate()?;
        // Slow to start is slow to end.
        let limit = self.ready_limit.max(STOP_LIMIT_MIN);
        let begun = Instant::now();
        loop {
            if let Some(ended) = running.exit_status()? {
                let is_clean = ended.success();
                return Ok((!is_clean).then(|| format!("the server ended with {ended}")));
            }
            stop.check()?;
            if begun.elapsed() > limit {
                running.kill()?;
                let seconds = limit.as_secs();
                return Ok(Some(format!("the server did not end within {seconds} s of SIGTERM")));
            }
            std::thread::sleep(POLL);
        }
    }

    /// A client of the REST face.
    pub(super) fn client(&self, timeout: Duration, retry: RetryPolicy) -> Result<Client, Failure> {
        let mut builder = Client::builder(format!("http://{}", self.api)).retry(retry);
        if let Some(token) = &self.token {
            builder = builder.token(token.clone());
        }
        Ok(builder.timeout(timeout).build()?)
    }

    /// Mounts its export.
    pub(super) fn mount(&self, client: &Client, runtime: &Runtime) -> Result<Handle, Trouble> {
        let path = match self.by_address {
            true => EXPORT.to_owned(),
            false => runtime.block_on(client.mount_path())?.path,
        };
        Ok(Session::mount(self.nfs, &path)?)
    }

    /// Lines of the log that no life of a sound server writes.
    pub(super) fn alarms(&self) -> Vec<String> {
        let log = std::fs::read(self.log_path()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let is_alarm = |line: &&str| {
            ["panicked", "orrupt", " ERROR "].iter().any(|alarm| line.contains(alarm))
        };
        log.lines().filter(is_alarm).map(str::to_owned).collect()
    }

    fn open_log(&self) -> Result<File, Failure> {
        let path = self.log_path();
        let mut options = OpenOptions::new();
        options.create(true).append(true).open(&path).map_err(Failure::at("open", &path))
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("log")
    }

    fn log_tail(&self) -> String {
        const LINES: usize = 5;
        let log = std::fs::read(self.log_path()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Running {
    /// Ends the server without warning.
    pub(super) fn kill(&mut self) -> Result<(), Failure> {
        self.child.kill().map_err(Failure::on("kill the server"))?;
        self.child.wait().map_err(Failure::on("wait for the server"))?;
        Ok(())
    }

    pub(super) fn process_id(&self) -> u32 {
        self.child.id()
    }

    fn terminate(&self) -> Result<(), Failure> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let id = id.ok_or_else(|| Failure::Unfit("the server has no process id".to_owned()))?;
        let failed = |source: Errno| Failure::on("signal the server")(source.into());
        kill_process(id, Signal::TERM).map_err(failed)
    }

    fn exit_status(&mut self) -> Result<Option<ExitStatus>, Failure> {
        self.child.try_wait().map_err(Failure::on("look at the server"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A free address of loopback, and the socket that keeps other programs from it while it exists.
fn held_address(chance: &mut Chance) -> Result<(SocketAddr, TcpSocket), Failure> {
    const TRIES: usize = 1000;
    for _ in 0..TRIES {
        let port = u16::try_from(PORT_FIRST + chance.below(PORT_COUNT)).unwrap_or(u16::MAX);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let holder = TcpSocket::new_v4().map_err(Failure::on("make a socket"))?;
        if holder.bind(address).is_ok() {
            // After the bind, which fails if the port is in use.
            holder.set_reuseaddr(true).map_err(Failure::on("share a port"))?;
            return Ok((address, holder));
        }
    }
    Err(Failure::Unfit(format!("no port of {PORT_COUNT} from {PORT_FIRST} on is free")))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_held_port_is_for_a_server_and_for_nobody_who_looks_for_one() {
        let (address, _holder) = held_address(&mut Chance::new(2)).unwrap();
        let seeker = TcpSocket::new_v4().unwrap();
        assert!(seeker.bind(address).is_err());
        // Again and again, and to a client it is down in between.
        for _ in 0..3 {
            let server = TcpListener::bind(address).unwrap();
            TcpStream::connect(address).unwrap();
            drop(server);
            // A process that a test beside this one forks has it open until it runs its program.
            let dropped = Instant::now();
            while TcpStream::connect(address).is_ok() {
                assert!(dropped.elapsed() < Duration::from_secs(60), "it still serves");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn a_server_that_ends_by_itself_is_told_with_its_words() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("server");
        // By another process: one that a test beside this one forks while the file is written here would hold
        // it open for a moment, and Linux runs no program that is open for writing.
        let text = "#!/bin/sh\necho 'no disk here' >&2\nexit 7\n";
        let script = r#"printf %s "$1" >"$2" && chmod 755 "$2""#;
        let mut writer = std::process::Command::new("sh");
        writer.args(["-c", script, "sh", text]).arg(&program);
        assert!(writer.status().unwrap().success());
        let limit = Duration::from_secs(60);
        let mut chance = Chance::new(1);
        let target = Target::new(&program, folder.path(), &[], limit, &mut chance).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stop = Stop::listen(limit).unwrap();
        let mut running = target.start().unwrap();
        let error = target.wait(&mut running, &runtime, &stop).unwrap_err().to_string();
        assert!(error.contains("status: 7") && error.contains("no disk here"), "{error}");
        assert_eq!(target.alarms(), [""; 0]);
        std::fs::write(folder.path().join("log"), "fine\nthread x panicked at y\n").unwrap();
        assert_eq!(target.alarms(), ["thread x panicked at y"]);
    }
}

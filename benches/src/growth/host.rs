//! A `slackwaterd` on a store that is there before it and stays after it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use slackwater_client::{Client, RetryPolicy};
use tokio::runtime::Runtime;

use crate::compare::context::Context;
use crate::failure::Failure;
use crate::load;
use crate::process;
use crate::stop::Stop;

/// How often a starting server is looked at, beside being listened to.
const POLL: Duration = Duration::from_millis(20);

/// Time that a stopping server is given: it commits what is dirty and makes its index durable.
const STOP_TIME_MAX: Duration = Duration::from_secs(120);

/// Time that one call may take: collecting garbage of a whole experiment takes its time.
const CALL_TIME_MAX: Duration = Duration::from_secs(120);

/// Longest time until a store is quiet.
const QUIET_TIME_MAX: Duration = Duration::from_secs(120);

/// How often its counters are looked at.
const QUIET_POLL: Duration = Duration::from_millis(100);

/// What the lines of the addresses begin with.
const NFS_PREFIX: &str = "NFS  ";
const API_PREFIX: &str = "API  ";

/// The name of the export.
const EXPORT: &str = "/slackwater";

/// A running server; killed when dropped.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) client: Client,
    pub(crate) nfs: SocketAddr,
    /// From its start until it was ready.
    pub(crate) ready_after: Duration,
    running: Running,
}

/// The process.
#[derive(Debug)]
struct Running {
    child: Child,
    log: PathBuf,
}

impl Host {
    /// Starts the server on that data directory, and waits until it is ready.
    pub(crate) fn start(context: &Context, data_dir: &Path, stop: &Stop) -> Result<Self, Failure> {
        let log_path = data_dir.with_extension("log");
        let log = File::create(&log_path).map_err(Failure::at("create", &log_path))?;
        let mut command = process::command(&context.server);
        // Settings of the user's own appliance are none of this one's.
        command.env_clear().arg("--data-dir").arg(data_dir);
        command.args(["--nfs-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"]);
        command.args(["--squash", "no_root_squash", "--memory", &context.memory]);
        // Loads are put on any server of NFS, also on one that has no secret paths.
        // Not as arguments, which an older server does not know.
        command.env("SLACKWATER_INSECURE_ADDRESS_ONLY", "true");
        command.env("SLACKWATER_INSECURE_NO_TOKENS", "true");
        command.stdout(Stdio::piped()).stderr(log);
        let start = Instant::now();
        let mut child = command.spawn().map_err(Failure::at("run", &context.server))?;
        let pipe = child.stdout.take();
        let running = Running { child, log: log_path };
        let lines = pipe.map(read_lines).ok_or_else(|| running.ended())?;
        let nfs = running.told(&lines, NFS_PREFIX, stop)?;
        let nfs = nfs
            .parse()
            .map_err(|error| Failure::Unfit(format!("the server is at `{nfs}`: {error}")))?;
        // Both are printed once it is ready.
        let url = running.told(&lines, API_PREFIX, stop)?;
        let ready_after = start.elapsed();
        // No call is sent twice: a sample is one call.
        let builder = Client::builder(url).retry(RetryPolicy::never()).timeout(CALL_TIME_MAX);
        Ok(Self { client: builder.build()?, nfs, ready_after, running })
    }

    /// Where to mount its export.
    pub(crate) fn target(&self) -> load::Target {
        load::Target { nfs: self.nfs, mount: self.nfs, export: EXPORT.to_owned() }
    }

    /// Waits until it has nothing left to take back or to commit, and its counters stood still
    /// for that time.
    pub(crate) fn wait_until_quiet(
        &self,
        runtime: &Runtime,
        quiet_time: Duration,
        stop: &Stop,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        let mut last = ([0; 3], Instant::now());
        while start.elapsed() < QUIET_TIME_MAX {
            stop.check()?;
            let stats = runtime.block_on(self.client.stats())?;
            let counts = [stats.appended_bytes, stats.compacted_bytes, stats.reclaimed_entries];
            let is_idle = stats.dead_layer_count == 0 && stats.dirty_bytes == 0;
            if !is_idle || counts != last.0 {
                last = (counts, Instant::now());
            } else if last.1.elapsed() >= quiet_time {
                return Ok(());
            }
            std::thread::sleep(QUIET_POLL);
        }
        Err(Failure::Unfit(format!("the store was still at work after {QUIET_TIME_MAX:?}")))
    }

    /// The process.
    pub(crate) fn process(&self) -> u32 {
        self.running.child.id()
    }

    /// Stops it as systemd would, and waits until it has ended.
    pub(crate) fn stop(mut self, stop: &Stop) -> Result<(), Failure> {
        let child = &mut self.running.child;
        let failed = || Failure::on("stop the server");
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).map_err(|error| failed()(error.into()))?;
        }
        let start = Instant::now();
        while start.elapsed() < STOP_TIME_MAX {
            if let Some(status) = child.try_wait().map_err(failed())? {
                return if status.success() { Ok(()) } else { Err(self.running.ended()) };
            }
            stop.check()?;
            std::thread::sleep(POLL);
        }
        Err(Failure::Unfit(format!("the server did not stop in {STOP_TIME_MAX:?}")))
    }

    /// Kills it, wherever it is.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Running {
    /// Waits for a line with that prefix, and answers the rest of it.
    fn told(&self, lines: &Receiver<String>, prefix: &str, stop: &Stop) -> Result<String, Failure> {
        loop {
            stop.check()?;
            match lines.recv_timeout(POLL) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix(prefix) {
                        return Ok(rest.to_owned());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    /// The server ended before it was asked to, or not as it should.
    fn ended(&self) -> Failure {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        Failure::Unfit(format!("the server failed: {}", log.trim()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a pipe, read to its end so that the server never waits for a reader.
fn read_lines(pipe: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            // Nobody listens once the server is ready.
            let _ = sender.send(line);
        }
    });
    receiver
}

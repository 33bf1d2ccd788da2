//! A `slackwaterd` on a temporary store and free ports of loopback, ended with the experiment.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use slackwater_client::{Client, RetryPolicy};
use tempfile::TempDir;

use crate::failure::Failure;
use crate::process;
use crate::stop::Stop;

/// How often a starting server is looked at.
const POLL: Duration = Duration::from_millis(50);

/// What the line of the REST address begins with.
const API_PREFIX: &str = "API  ";

/// A running server and a client of it.
#[derive(Debug)]
pub(crate) struct Appliance {
    pub(crate) client: Client,
    _server: Server,
}

/// Killed when dropped, as nobody needs its store any more.
#[derive(Debug)]
struct Server {
    child: Child,
    folder: TempDir,
}

impl Appliance {
    /// Starts the server and waits until it is ready.
    pub(crate) fn start(server: &Path, stop: &Stop) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(Failure::on("make a temporary folder"))?;
        let log_path = log_path(&folder);
        let log = File::create(&log_path).map_err(Failure::at("create", &log_path))?;
        let mut command = process::command(server);
        // Settings of the user's own appliance are none of this one's.
        command.env_clear().arg("--data-dir").arg(folder.path().join("data"));
        command.args(["--nfs-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"]);
        // Not as arguments, which an older server does not know.
        command.env("SLACKWATER_INSECURE_NO_TOKENS", "true");
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(Failure::at("run", server))?;
        let lines = child.stdout.take().map(read_lines);
        let server = Server { child, folder };
        let url = lines.map_or_else(|| Err(server.ended()), |lines| server.url(&lines, stop))?;
        // No call is sent twice: a sample is one call.
        let client = Client::builder(url).retry(RetryPolicy::never()).build()?;
        Ok(Self { client, _server: server })
    }
}

impl Server {
    /// Waits for the address of the REST face: it is printed once the server is ready.
    fn url(&self, lines: &Receiver<String>, stop: &Stop) -> Result<String, Failure> {
        loop {
            stop.check()?;
            match lines.recv_timeout(POLL) {
                Ok(line) => {
                    if let Some(url) = line.strip_prefix(API_PREFIX) {
                        return Ok(url.to_owned());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            }
        }
    }

    /// The server ended before it was ready.
    fn ended(&self) -> Failure {
        let log = std::fs::read_to_string(log_path(&self.folder)).unwrap_or_default();
        Failure::Unfit(format!("the server did not start: {}", log.trim()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server beside this program.
pub(crate) fn beside() -> Result<PathBuf, Failure> {
    let program = std::env::current_exe().map_err(Failure::on("find this program"))?;
    Ok(program.with_file_name("slackwaterd"))
}

fn log_path(folder: &TempDir) -> PathBuf {
    folder.path().join("log")
}

/// The lines of a pipe, read to its end so that the server never waits for a reader.
fn read_lines(pipe: std::process::ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            // Nobody listens once the server is ready.
            let _ = sender.send(line);
        }
    });
    receiver
}

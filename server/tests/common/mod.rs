//! A `slackwaterd` process for tests: on free ports of loopback, on a store of its own, and
//! never outliving the test.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

pub mod disk;
pub mod nfs;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longest wait for anything that a test expects to happen. A start takes well under a
/// second; the machine may be busy, and its disk slow.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A server that runs and has logged nothing for so long is taken to have no more to say.
const LOG_PAUSE: Duration = Duration::from_millis(200);

/// The command with a clean environment but for what a shell needs.
pub fn slackwaterd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwaterd"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
    command
}

/// The arguments of a server on free ports, which asks for no token unless it has a token file.
pub fn on_free_ports(data_dir: &Path) -> Vec<String> {
    let mut arguments = with_its_token(data_dir);
    arguments.extend(["--insecure-no-tokens", "true"].map(str::to_owned));
    arguments
}

/// The arguments of a server on free ports, which makes its own token.
pub fn with_its_token(data_dir: &Path) -> Vec<String> {
    let data_dir = data_dir.to_str().unwrap();
    ["--data-dir", data_dir, "--nfs-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"]
        .map(str::to_owned)
        .to_vec()
}

/// One HTTP request without a token; answers status and body.
pub fn http_at(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = connect(address);
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// A running server; killed when dropped.
pub struct Server {
    child: Child,
    lines: Receiver<String>,
    stderr: Receiver<String>,
    has_ended: bool,
    pub nfs: SocketAddr,
    pub api: SocketAddr,
    /// All that it printed on standard output until it was ready.
    pub welcome: String,
}

impl Server {
    /// Starts a server on `data_dir` and waits until it is ready.
    pub fn start(data_dir: &Path) -> Self {
        Self::start_with(slackwaterd().args(on_free_ports(data_dir)))
    }

    /// Starts the server that `command` is.
    pub fn start_with(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = read_lines(child.stdout.take().unwrap());
        let stderr = read_lines(child.stderr.take().unwrap());
        let mut server = Self {
            child,
            lines,
            stderr,
            has_ended: false,
            nfs: ([127, 0, 0, 1], 0).into(),
            api: ([127, 0, 0, 1], 0).into(),
            welcome: String::new(),
        };
        server.wait_until_ready();
        server
    }

    /// Reads standard output to the last line of the welcome text.
    fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.welcome.contains("/v1/clones") {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.welcome.push_str(&line);
                    self.welcome.push('\n');
                }
                Err(error) => {
                    let _ = self.child.kill();
                    panic!("not ready ({error}): {}\n{}", self.welcome, self.log());
                }
            }
        }
        self.nfs = self.address("NFS  ");
        self.api = self.address("API  ");
    }

    fn address(&self, prefix: &str) -> SocketAddr {
        let line = self.welcome.lines().find_map(|line| line.strip_prefix(prefix));
        let text = line.unwrap_or_else(|| panic!("no {prefix} in {}", self.welcome));
        let (_scheme, address) = text.split_once("://").unwrap_or(("", text));
        address.parse().unwrap()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    /// Waits for the end.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.has_ended = true;
                return status;
            }
            assert!(Instant::now() < deadline, "still running:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGTERM, and the end that it brings.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// SIGKILL: what a crash of the process leaves.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// What it logged since the last call: all of it if its end was waited for.
    pub fn log(&self) -> String {
        let mut text = String::new();
        let pause = if self.has_ended { PATIENCE } else { LOG_PAUSE };
        // Ends when the process has ended and all is read, or when nothing more comes.
        loop {
            match self.stderr.recv_timeout(pause) {
                Ok(line) => text.push_str(&(line + "\n")),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return text,
            }
        }
    }

    /// One HTTP request; answers status and body.
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        http_at(self.api, method, path, body)
    }

    /// A NULL call of NFSv3 (RFC 1813 section 3.3.0); answers the bytes of the reply.
    pub fn nfs_null(&self) -> Vec<u8> {
        let mut stream = connect(self.nfs);
        // xid, CALL, RPC version 2, program 100003, version 3, procedure 0, no credentials,
        // no verifier (RFC 5531 section 9), behind a record mark (section 11).
        let words: [u32; 11] = [0x8000_0028, 7, 0, 2, 100_003, 3, 0, 0, 0, 0, 0];
        let call: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        stream.write_all(&call).unwrap();
        let mut reply = vec![0; 28];
        stream.read_exact(&mut reply).unwrap();
        reply
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail when the process has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Runs a command that is expected to end by itself.
pub fn run_to_end(command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("{command:?} did not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// The lines of a pipe, read by a thread so that the process never waits for a reader.
fn read_lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

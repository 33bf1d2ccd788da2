//! dockerd's side of the graphdriver plugin, byte by byte: a connection a call, an empty Host, a
//! chunked body for a tar.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "tests"
)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use slackwater_driver::docker::{GraphDriver, router};
use slackwater_driver::engine::docker::Docker;
use slackwater_driver::worker::Push;
use slackwater_driver::worker::Worker;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

/// Longest time of one call in a test.
const CALL_TIME: Duration = Duration::from_secs(120);

/// The plugin on a socket.
pub struct Plugin {
    socket: PathBuf,
    task: JoinHandle<()>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Plugin {
    pub fn serve(worker: &Worker, socket: &Path) -> Self {
        Self::serve_with(worker, socket, Push::References)
    }

    /// A plugin that gives commits and builds in this form.
    pub fn serve_with(worker: &Worker, socket: &Path, push: Push) -> Self {
        Self::listen(GraphDriver::new(worker.clone(), push), socket)
    }

    /// A plugin that asks this Docker for which images layers leave.
    pub fn serve_named(worker: &Worker, socket: &Path, docker: Docker) -> Self {
        Self::listen(GraphDriver::new(worker.clone(), Push::References).named_by(docker), socket)
    }

    fn listen(driver: GraphDriver, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let router = router(driver);
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { socket: socket.to_owned(), task }
    }

    /// Ends the plugin; the worker is free after it.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    /// Sends a request as it stands, and reads the status and the body of the answer.
    pub fn raw(&self, request: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(CALL_TIME)).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        parse(&answer)
    }

    fn post(&self, path: &str, body: &str) -> (u16, Vec<u8>) {
        let head = head(path, &format!("Content-Length: {}", body.len()));
        self.raw(format!("{head}{body}").as_bytes())
    }

    /// A call whose answer has status 200, whatever it says.
    pub fn answer(&self, call: &str, request: &Value) -> Value {
        let (status, body) = self.post(&format!("/GraphDriver.{call}"), &request.to_string());
        assert_eq!(status, 200, "{call}: {}", String::from_utf8_lossy(&body));
        serde_json::from_slice(&body).unwrap()
    }

    /// A call that must succeed.
    pub fn ok(&self, call: &str, request: &Value) -> Value {
        let answer = self.answer(call, request);
        let error = answer["Err"].as_str().unwrap_or_default();
        assert_eq!(error, "", "{call} {request}");
        answer
    }

    /// A call that must be refused; the text of the refusal.
    pub fn refused(&self, call: &str, request: &Value) -> String {
        let answer = self.answer(call, request);
        let error = answer["Err"].as_str().unwrap_or_default().to_owned();
        assert_ne!(error, "", "{call} {request} succeeded: {answer}");
        error
    }

    pub fn create(&self, id: &str, parent: &str) {
        self.ok("Create", &json!({ "ID": id, "Parent": parent, "MountLabel": "" }));
    }

    pub fn create_read_write(&self, id: &str, parent: &str) {
        let request = json!({ "ID": id, "Parent": parent, "MountLabel": "", "StorageOpt": null });
        self.ok("CreateReadWrite", &request);
    }

    pub fn get(&self, id: &str) -> PathBuf {
        let answer = self.ok("Get", &json!({ "ID": id, "MountLabel": "" }));
        PathBuf::from(answer["Dir"].as_str().unwrap())
    }

    pub fn put(&self, id: &str) {
        self.ok("Put", &json!({ "ID": id }));
    }

    pub fn remove(&self, id: &str) {
        self.ok("Remove", &json!({ "ID": id }));
    }

    pub fn exists(&self, id: &str) -> bool {
        self.answer("Exists", &json!({ "ID": id }))["Exists"].as_bool().unwrap()
    }

    /// The tar of a layer.
    pub fn diff(&self, id: &str, parent: &str) -> Vec<u8> {
        let request = json!({ "ID": id, "Parent": parent }).to_string();
        let (status, body) = self.post("/GraphDriver.Diff", &request);
        assert_eq!(status, 200, "Diff {id}: {}", String::from_utf8_lossy(&body));
        body
    }

    /// The refusal of a Diff, which has a status of its own.
    pub fn diff_refused(&self, id: &str) -> String {
        let (status, body) =
            self.post("/GraphDriver.Diff", &json!({ "ID": id, "Parent": "" }).to_string());
        assert_eq!(status, 500, "Diff {id}");
        let answer: Value = serde_json::from_slice(&body).unwrap();
        answer["Err"].as_str().unwrap().to_owned()
    }

    fn apply_request(id: &str, parent: &str, tar: &[u8]) -> Vec<u8> {
        let path = format!("/GraphDriver.ApplyDiff?id={id}&parent={parent}");
        let mut request = head(&path, "Transfer-Encoding: chunked").into_bytes();
        for piece in tar.chunks(32 << 10) {
            request.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            request.extend_from_slice(piece);
            request.extend_from_slice(b"\r\n");
        }
        request
    }

    pub fn apply_answer(&self, id: &str, parent: &str, tar: &[u8]) -> Value {
        let mut request = Self::apply_request(id, parent, tar);
        request.extend_from_slice(b"0\r\n\r\n");
        let (status, body) = self.raw(&request);
        assert_eq!(status, 200);
        serde_json::from_slice(&body).unwrap()
    }

    /// Unpacks a layer that is good; its size.
    pub fn apply(&self, id: &str, parent: &str, tar: &[u8]) -> u64 {
        let answer = self.apply_answer(id, parent, tar);
        assert_eq!(answer["Err"], "", "ApplyDiff {id}");
        answer["Size"].as_u64().unwrap()
    }

    /// Unpacks a layer that is refused; the text of the refusal.
    pub fn apply_refused(&self, id: &str, parent: &str, tar: &[u8]) -> String {
        let answer = self.apply_answer(id, parent, tar);
        let error = answer["Err"].as_str().unwrap_or_default().to_owned();
        assert_ne!(error, "", "ApplyDiff {id} succeeded: {answer}");
        error
    }

    /// Sends this much of a layer, then hangs up without an end.
    pub fn apply_cut(&self, id: &str, parent: &str, part: &[u8]) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(CALL_TIME)).unwrap();
        stream.write_all(&Self::apply_request(id, parent, part)).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        // Whatever comes is no answer that counts; it ends once the call does.
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

fn head(path: &str, length: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: \r\nUser-Agent: Go-http-client/1.1\r\nConnection: close\r\n\
         Accept: application/vnd.docker.plugins.v1.2+json\r\n{length}\r\n\r\n"
    )
}

/// The status of an answer, and its body without the chunks' lengths.
fn parse(answer: &[u8]) -> (u16, Vec<u8>) {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("no answer");
    let head = std::str::from_utf8(&answer[..end]).unwrap().to_ascii_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut rest = &answer[end + 4..];
    if !head.contains("transfer-encoding: chunked") {
        return (status, rest.to_vec());
    }
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n").expect("a cut answer");
        let text = std::str::from_utf8(&rest[..line]).unwrap();
        let length = usize::from_str_radix(text, 16).unwrap();
        rest = &rest[line + 2..];
        if length == 0 {
            return (status, body);
        }
        body.extend_from_slice(&rest[..length]);
        rest = &rest[length + 2..];
    }
}

/// The tar of a directory, as GNU tar packs it: padded to its records, which Docker never does.
pub fn tar_of(directory: &Path) -> Vec<u8> {
    let output = Command::new("tar")
        .args(["--create", "--format=gnu", "--sort=name", "--file=-", "--directory"])
        .arg(directory)
        .arg(".")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// A tar of files with these contents; a name ending in `/` is a directory.
pub fn layer(files: &[(&str, &str)]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        if name.ends_with('/') {
            std::fs::create_dir_all(path).unwrap();
        } else {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
    }
    tar_of(folder.path())
}

/// What dockerd does to an init layer (its daemon/initlayer); errors of removing are ignored
/// there, too.
pub fn set_up_init(root: &Path) {
    let directories = ["dev/pts", "dev/shm", "proc", "sys"];
    let files = ["dev/console", "etc/hosts", "etc/hostname", "etc/resolv.conf", ".dockerenv"];
    for name in files.iter().chain(&["etc/mtab"]) {
        let _ = std::fs::remove_file(root.join(name));
    }
    for name in directories {
        if !root.join(name).exists() {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
    }
    for name in files {
        if !root.join(name).exists() {
            std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            std::fs::write(root.join(name), "").unwrap();
        }
    }
    if std::fs::symlink_metadata(root.join("etc/mtab")).is_err() {
        std::os::unix::fs::symlink("/proc/mounts", root.join("etc/mtab")).unwrap();
    }
}

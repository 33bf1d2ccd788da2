//! A server on loopback that answers one request after the other as a test prescribes, and
//! keeps what it was asked.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What is done with a request.
pub enum Answer {
    /// These bytes are written, then the connection is closed.
    Bytes(Vec<u8>),
    /// The connection is closed without a word.
    Hangup,
    /// Nothing, for longer than any test's patience.
    Silence,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

pub struct Scripted {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scripted {
    pub async fn start(answers: impl IntoIterator<Item = Answer>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut answers: VecDeque<Answer> = answers.into_iter().collect();
        let log = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let Some(request) = read_request(&mut stream).await else {
                    continue;
                };
                log.lock().unwrap().push(request);
                // Beyond the script: an answer that no test expects.
                match answers.pop_front().unwrap_or_else(|| status(418)) {
                    Answer::Bytes(bytes) => {
                        let _ = stream.write_all(&bytes).await;
                    }
                    Answer::Hangup => {}
                    Answer::Silence => tokio::time::sleep(Duration::from_secs(600)).await,
                }
            }
        });
        Self { url, seen, task }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<Seen> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(position) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break position;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
        // A TLS handshake (record type 22): answered as a plain web server does.
        if bytes.first() == Some(&22) {
            stream.write_all(b"HTTP/1.1 400 X\r\nContent-Length: 0\r\n\r\n").await.ok()?;
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let line = lines.next().unwrap().to_owned();
    let headers: Vec<(String, String)> = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let mut seen = Seen { line, headers, body: bytes[head_end + 4..].to_vec() };
    let length = seen.header("content-length").map_or(0, |length| length.parse::<usize>().unwrap());
    while seen.body.len() < length {
        if stream.read_buf(&mut seen.body).await.ok()? == 0 {
            return None;
        }
    }
    Some(seen)
}

/// An answer with a status alone, which is no problem document.
pub fn status(code: u16) -> Answer {
    Answer::Bytes(
        format!("HTTP/1.1 {code} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").into(),
    )
}

pub fn json(code: u16, body: &str) -> Answer {
    with_headers(code, "Content-Type: application/json\r\n", body.as_bytes())
}

/// A problem document.
pub fn problem(code: slackwater_client::ProblemCode) -> Answer {
    let problem = slackwater_api::error::Problem::new(code, "the reason");
    json(code.status(), &serde_json::to_string(&problem).unwrap())
}

pub fn with_headers(code: u16, headers: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {code} X\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    Answer::Bytes([head.as_bytes(), body].concat())
}

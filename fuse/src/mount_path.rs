//! The path by which the export is mounted.
//!
//! ```text
//! a worker's credential --> POST /v1/mount-paths --> EXPORT/.worker/SECRET, good for minutes
//! a token, or none -----------------------------> EXPORT/.export/SECRET, good for minutes
//!   where the appliance knows no such paths ----> EXPORT, by the address of this machine
//! ```
//! All have the same paths below them, but a worker's leads to what it reaches alone.
//!
//! Invariant: a caller that the appliance does not know mounts nothing. The path is in no log.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use slackwater_client::{Client, ClientError, ProblemCode};
use tokio::time::Instant;

/// How long no path is asked for after the appliance gave none, or took none: a worker that was revoked would else use up the tries that
/// its address has, one at each `df`.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// What is asked for it.
#[derive(Clone, Debug)]
pub(crate) struct MountPath {
    client: Client,
    export: String,
    /// The last refusal, and until when it counts.
    refused: Arc<Mutex<Option<(Errno, Instant)>>>,
}

impl MountPath {
    /// The path of the caller of `client`.
    pub(crate) fn new(client: &Client, export: &str) -> Self {
        Self { client: client.clone(), export: export.to_owned(), refused: Arc::default() }
    }

    /// Whether the path is that of the export, which is always the same.
    pub(crate) fn is_fixed(&self, path: &str) -> bool {
        path == self.export
    }

    /// The path now. Waits while the appliance is away.
    ///
    /// # Errors
    /// `ACCESS`: the appliance refuses the caller. `NOSPC`: it has no room for the worker's directory.
    pub(crate) async fn get(&self) -> Result<String, Errno> {
        if let Some((errno, until)) = *self.refused.lock()
            && Instant::now() < until
        {
            return Err(errno);
        }
        self.client.path_to_mount(&self.export).await.map_err(|error| {
            tracing::error!(%error, "the appliance gives this machine no path to mount");
            self.refuse(errno_of(&error))
        })
    }

    /// Has it give no path for a while, as the appliance gives none, or lets nothing be mounted by those that it gives.
    pub(crate) fn refuse(&self, errno: Errno) -> Errno {
        *self.refused.lock() = Some((errno, Instant::now() + REFUSED_PAUSE));
        errno
    }
}

fn errno_of(error: &ClientError) -> Errno {
    match error.code() {
        Some(ProblemCode::Unauthenticated | ProblemCode::Forbidden) => Errno::ACCESS,
        Some(ProblemCode::NoSpace) => Errno::NOSPC,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use slackwater_client::Token;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// An appliance that gives these answers, one to each call.
    async fn answering(answers: &[(&str, &str)]) -> String {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answers: Vec<_> = answers
            .iter()
            .map(|(status, body)| {
                format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
                     connection: close\r\n\r\n{body}",
                    body.len()
                )
            })
            .collect();
        tokio::spawn(async move {
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                assert!(request.starts_with(b"POST /v1/mount-paths "));
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        url
    }

    async fn path(url: String, token: &str) -> Result<String, Errno> {
        let client = Client::builder(url).token(Token::new(token).unwrap()).build().unwrap();
        MountPath::new(&client, "/slackwater").get().await
    }

    fn credential() -> String {
        format!("slackwater-worker-{}", "5a".repeat(32))
    }

    fn problem(status: u16, code: &str) -> String {
        format!(r#"{{"type":"t","title":"t","status":{status},"detail":"d","code":"{code}"}}"#)
    }

    #[tokio::test]
    async fn a_worker_mounts_by_the_path_that_it_is_given() {
        let given = r#"{"path":"/slackwater/.worker/s","expires_at":"2026-11-26T09:00:00Z"}"#;
        let busy = problem(503, "overloaded");
        let url = answering(&[("503 Busy", &busy), ("201 Created", given)]).await;
        assert_eq!(path(url, &credential()).await.as_deref(), Ok("/slackwater/.worker/s"));
    }

    #[tokio::test]
    async fn a_worker_that_is_refused_mounts_nothing() {
        let url = answering(&[("401 Unauthorized", &problem(401, "unauthenticated"))]).await;
        assert_eq!(path(url, &credential()).await, Err(Errno::ACCESS));
    }

    #[tokio::test]
    async fn a_worker_that_is_refused_asks_no_more_for_a_while() {
        // There is one answer: a second call would find no server, and wait.
        let url = answering(&[("401 Unauthorized", &problem(401, "unauthenticated"))]).await;
        let client =
            Client::builder(url).token(Token::new(&credential()).unwrap()).build().unwrap();
        let path = MountPath::new(&client, "/slackwater");
        assert_eq!(path.get().await, Err(Errno::ACCESS));
        // Longer than it is, so that a slow machine counts the same.
        let (errno, _) = path.refused.lock().unwrap();
        *path.refused.lock() = Some((errno, Instant::now() + Duration::from_secs(3600)));
        assert_eq!(path.get().await, Err(Errno::ACCESS));
    }

    #[tokio::test]
    async fn what_is_no_path_of_the_export_is_not_mounted() {
        let other = r#"{"path":"/other/.worker/s","expires_at":"2026-11-26T09:00:00Z"}"#;
        let full = problem(507, "no_space");
        for (status, body, errno) in [
            ("201 Created", other, Errno::IO),
            ("404 Not Found", &problem(404, "not_found"), Errno::IO),
            ("507 Insufficient Storage", &full, Errno::NOSPC),
        ] {
            let url = answering(&[(status, body)]).await;
            assert_eq!(path(url, &credential()).await, Err(errno), "{status}");
        }
    }

    #[tokio::test]
    async fn a_token_mounts_by_the_path_that_it_is_given() {
        let given = r#"{"path":"/slackwater/.export/s","expires_at":"2026-11-26T09:00:00Z"}"#;
        let url = answering(&[("201 Created", given), ("201 Created", given)]).await;
        assert_eq!(path(url.clone(), "a-token").await.as_deref(), Ok("/slackwater/.export/s"));
        let client = Client::builder(url).build().unwrap();
        let path = MountPath::new(&client, "/slackwater");
        assert_eq!(path.get().await.as_deref(), Ok("/slackwater/.export/s"), "without a token");
    }

    #[tokio::test]
    async fn a_token_mounts_by_its_address_where_no_paths_are_known() {
        // An appliance of release 0.2; a token of the role read-only; a token that is not known.
        for (status, problem, expected, of_worker) in [
            ("404 Not Found", problem(404, "unknown_route"), Ok("/slackwater"), Errno::IO),
            ("403 Forbidden", problem(403, "forbidden"), Err(Errno::ACCESS), Errno::ACCESS),
            (
                "401 Unauthorized",
                problem(401, "unauthenticated"),
                Err(Errno::ACCESS),
                Errno::ACCESS,
            ),
        ] {
            let url = answering(&[(status, &problem), (status, &problem)]).await;
            let got = path(url.clone(), "a-token").await;
            assert_eq!(got.as_deref().map_err(|errno| *errno), expected, "{status}");
            assert_eq!(path(url, &credential()).await, Err(of_worker), "{status}");
        }
    }
}

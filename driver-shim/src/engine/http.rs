//! The least HTTP client that a unix socket needs: one connection a call.

use std::path::{Path, PathBuf};

use axum::body::Body;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::EngineError;

/// Longest answer that is held in memory: inspecting the largest image gives some 100 KiB, and
/// all volumes of a full worker a few MiB.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// A server on a unix socket.
#[derive(Clone, Debug)]
pub struct UnixHttp {
    socket: PathBuf,
    peer: &'static str,
}

/// A body and what it is.
#[derive(Clone, Debug)]
pub struct Content {
    /// Its media type.
    pub kind: &'static str,
    /// Its bytes.
    pub bytes: Bytes,
}

impl UnixHttp {
    /// A client of what listens at `socket`, called `peer` in errors. Nothing is connected yet.
    #[must_use]
    pub fn new(socket: &Path, peer: &'static str) -> Self {
        Self { socket: socket.to_owned(), peer }
    }

    /// What it is called in errors.
    #[must_use]
    pub fn peer(&self) -> &'static str {
        self.peer
    }

    /// Sends a call and gives the answer as it begins; its body may be endless.
    ///
    /// # Errors
    /// The connection, and every status that is not a success.
    pub async fn open(
        &self,
        method: Method,
        path: &str,
        content: Option<Content>,
    ) -> Result<Response<Body>, EngineError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| {
            EngineError::Connect { peer: self.peer, path: self.socket.clone(), source }
        })?;
        let io = TokioIo::new(stream);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(io).await.map_err(|error| self.lost(error))?;
        // Ends when the answer was read or dropped; what went wrong is told by the call.
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        let body = match content {
            Some(content) => {
                request = request.header(CONTENT_TYPE, content.kind);
                Body::from(content.bytes)
            }
            None => Body::empty(),
        };
        let request = request.body(body).map_err(|error| self.lost(error))?;
        let answer = sender.send_request(request).await.map_err(|error| self.lost(error))?;
        let (head, body) = answer.into_parts();
        let body = Body::new(body);
        if head.status.is_success() {
            return Ok(Response::from_parts(head, body));
        }
        Err(self.refused(head.status, body).await)
    }

    /// Sends a call and reads the whole answer.
    ///
    /// # Errors
    /// As [`Self::open`], and an answer that is too long.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        content: Option<Content>,
    ) -> Result<Bytes, EngineError> {
        let answer = self.open(method, path, content).await?;
        axum::body::to_bytes(answer.into_body(), ANSWER_BYTES_MAX)
            .await
            .map_err(|error| self.lost(error))
    }

    /// `GET`, answered with JSON.
    ///
    /// # Errors
    /// As [`Self::call`], and an answer of another form.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, EngineError> {
        self.parse(&self.call(Method::GET, path, None).await?)
    }

    /// `POST` of JSON, answered with JSON.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, EngineError> {
        self.parse(&self.call(Method::POST, path, Some(self.json(body)?)).await?)
    }

    /// JSON, to be sent.
    ///
    /// # Errors
    /// A value that JSON cannot hold.
    pub fn json(&self, body: &impl Serialize) -> Result<Content, EngineError> {
        let bytes = serde_json::to_vec(body)
            .map_err(|error| EngineError::unexpected(self.peer, error.to_string()))?;
        Ok(Content { kind: "application/json", bytes: bytes.into() })
    }

    fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, EngineError> {
        serde_json::from_slice(bytes)
            .map_err(|error| EngineError::unexpected(self.peer, error.to_string()))
    }

    async fn refused(&self, status: StatusCode, body: Body) -> EngineError {
        let bytes = axum::body::to_bytes(body, ANSWER_BYTES_MAX).await.unwrap_or_default();
        // Docker says {"message"}, the daemon {"error"}.
        let message = serde_json::from_slice::<serde_json::Value>(&bytes).ok().and_then(|value| {
            let text = value.get("message").or_else(|| value.get("error"))?;
            text.as_str().map(str::to_owned)
        });
        let message = message.unwrap_or_else(|| String::from_utf8_lossy(&bytes).trim().to_owned());
        EngineError::Refused { peer: self.peer, status: status.as_u16(), message }
    }

    fn lost(&self, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> EngineError {
        EngineError::Http { peer: self.peer, path: self.socket.clone(), source: error.into() }
    }
}

/// The text as one segment of a path, or one value of a query.
#[must_use]
pub fn encode(text: &str) -> String {
    use std::fmt::Write;
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_one_segment() {
        assert_eq!(encode("default/1/a b"), "default%2F1%2Fa%20b");
        assert_eq!(encode("sha256:0f"), "sha256%3A0f");
    }

    #[tokio::test]
    async fn a_missing_socket_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.sock");
        let error = UnixHttp::new(&path, "Docker").get::<()>("/").await.unwrap_err().to_string();
        assert!(error.contains("none.sock") && error.contains("Docker"), "{error}");
    }
}

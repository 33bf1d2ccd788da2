//! One logical call: tries and waits, time limits, limits of the answer, and the translation
//! of what fails into [`ClientError`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use slackwater_api::block_map::{BLOCKS_MAX, HASH_BYTES};
use slackwater_api::error::{Problem, ProblemCode};
use slackwater_api::paths::IDEMPOTENCY_KEY;
use slackwater_api::worker::CREDENTIAL_PREFIX;

use crate::authorization::Authorization;
use crate::error::ClientError;
use crate::retry::RetryPolicy;

/// Most bytes of an answer that is held in memory: a block map of the largest size with all
/// its hashes, and as much again; pages are smaller.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Most bytes of a problem document that are read: one is a few hundred bytes.
const PROBLEM_BYTES_MAX: usize = 64 << 10;

/// Bytes of an unexpected answer that an error quotes.
const QUOTED_CHARACTERS_MAX: usize = 200;

const _: () = assert!(BLOCKS_MAX * (HASH_BYTES as u64 + 5) < ANSWER_BYTES_MAX as u64);

/// A client of one appliance. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
    pub(crate) timeout: Duration,
    pub(crate) retry: RetryPolicy,
}

/// What the clones of a client share.
pub(crate) struct Inner {
    pub(crate) http: reqwest::Client,
    /// The address without a slash at its end.
    pub(crate) base: String,
    pub(crate) authorization: Authorization,
    /// The authorities that are trusted, in PEM; `None`: the system's.
    pub(crate) ca_certificate: Option<Vec<u8>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("url", &self.inner.base)
            .field("has_token", &self.inner.authorization.is_some())
            .field("timeout", &self.timeout)
            .field("retry", &self.retry)
            .finish()
    }
}

/// What a logical call carries. By its method, only a `PATCH` must not be sent twice: a `POST`
/// carries an idempotency key, made here, so every try of one call carries the same.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    method: Method,
    route: String,
    headers: HeaderMap,
    body: Bytes,
    timeout: Option<Duration>,
    is_sent_once: bool,
}

impl Call {
    pub(crate) fn new(method: Method, route: String) -> Self {
        Self {
            method,
            route,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            timeout: None,
            is_sent_once: false,
        }
    }

    pub(crate) fn get(route: impl Into<String>) -> Self {
        Self::new(Method::GET, route.into())
    }

    /// A `POST`, with an idempotency key of its own.
    pub(crate) fn post(route: &str, body: &impl Serialize) -> Result<Self, ClientError> {
        let key = uuid::Uuid::new_v4().to_string();
        let mut call = Self::new(Method::POST, route.to_owned()).json(body)?;
        // Hexadecimal digits and hyphens are always a valid header.
        if let Ok(value) = HeaderValue::from_str(&key) {
            call.headers.insert(IDEMPOTENCY_KEY, value);
        }
        Ok(call)
    }

    pub(crate) fn json(mut self, body: &impl Serialize) -> Result<Self, ClientError> {
        let bytes = serde_json::to_vec(body)
            .map_err(|error| ClientError::Source { source: error.into() })?;
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.body = bytes.into();
        Ok(self)
    }

    pub(crate) fn data(mut self, body: Bytes) -> Self {
        self.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        self.body = body;
        self
    }

    pub(crate) fn header(mut self, name: reqwest::header::HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }

    /// Another time limit than the client's.
    pub(crate) fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Not sent again once it may have arrived.
    pub(crate) fn once(mut self) -> Self {
        self.is_sent_once = true;
        self
    }

    fn may_repeat(&self) -> bool {
        !self.is_sent_once && self.method != Method::PATCH
    }
}

/// Counts the tries of one logical call.
#[derive(Debug)]
pub(crate) struct Tries {
    retry: RetryPolicy,
    may_repeat: bool,
    /// An earlier try may have been carried out.
    is_repeated: bool,
    attempt: u32,
}

impl Tries {
    /// Waits until the call may be tried again after `error`, or gives the error back if it may
    /// not.
    pub(crate) async fn wait_after(&mut self, error: ClientError) -> Result<(), ClientError> {
        let repeatable = error.was_never_sent() || (self.may_repeat && error.is_passing());
        // Without random bytes (never seen on Linux) the waits are only less spread.
        let random = getrandom::u64().unwrap_or_default();
        match self.retry.delay(self.attempt, random, error.retry_after()) {
            Some(delay) if repeatable => tokio::time::sleep(delay).await,
            _ => return Err(error),
        }
        self.is_repeated |= !error.was_not_carried_out();
        self.attempt += 1;
        Ok(())
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Bytes,
    method: Method,
    url: String,
}

impl Answer {
    /// The answer read as JSON.
    pub(crate) fn json<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        serde_json::from_slice(&self.bytes)
            .map_err(|error| self.unexpected("JSON of this call", &error.to_string()))
    }

    /// The answer is not `expected`, because of `reason`.
    pub(crate) fn unexpected(&self, expected: &str, reason: &str) -> ClientError {
        let text = String::from_utf8_lossy(&self.bytes);
        ClientError::Protocol {
            method: self.method.to_string(),
            url: self.url.clone(),
            got: format!("`{}` ({reason})", quote(&text)),
            expected: expected.to_owned(),
        }
    }
}

impl Client {
    /// The address of the appliance, without a slash at its end.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.inner.base
    }

    /// Whether its calls carry a worker's credential now.
    ///
    /// # Errors
    /// `TokenFile`: the file that should hold it cannot be read.
    pub fn has_credential(&self) -> Result<bool, ClientError> {
        let bearer = format!("Bearer {CREDENTIAL_PREFIX}");
        let value = self.inner.authorization.value()?;
        Ok(value.is_some_and(|value| value.as_bytes().starts_with(bearer.as_bytes())))
    }

    /// The same client with another rule for retries.
    #[must_use]
    pub fn with_retry(&self, retry: RetryPolicy) -> Self {
        Self { retry, ..self.clone() }
    }

    /// Makes the call and reads its answer as JSON.
    pub(crate) async fn call<T: DeserializeOwned>(&self, call: Call) -> Result<T, ClientError> {
        self.answer(&call).await?.json()
    }

    /// Makes the call and gives its answer.
    pub(crate) async fn answer(&self, call: &Call) -> Result<Answer, ClientError> {
        let mut tries = self.tries(call.may_repeat());
        loop {
            match self.answer_once(call).await {
                Ok(answer) => return Ok(answer),
                Err(error) => tries.wait_after(error).await?,
            }
        }
    }

    /// Deletes; a try that was answered with "not found" after one that was cut off means that
    /// the earlier one had succeeded.
    pub(crate) async fn delete(&self, route: String) -> Result<(), ClientError> {
        let call = Call::new(Method::DELETE, route);
        let mut tries = self.tries(true);
        loop {
            match self.answer_once(&call).await {
                Ok(_) => return Ok(()),
                Err(error) if tries.is_repeated && error.is_not_found() => return Ok(()),
                Err(error) => tries.wait_after(error).await?,
            }
        }
    }

    /// The tries of one logical call. They are a loop of the caller's, and not a closure given
    /// to this, so that the futures of the library are `Send` for every caller.
    pub(crate) fn tries(&self, may_repeat: bool) -> Tries {
        Tries { retry: self.retry, may_repeat, is_repeated: false, attempt: 1 }
    }

    async fn answer_once(&self, call: &Call) -> Result<Answer, ClientError> {
        let timeout = call.timeout.unwrap_or(self.timeout);
        let whole = async {
            let response = self.send_once(call, call.body.clone().into()).await?;
            self.read_answer(call, response).await
        };
        match tokio::time::timeout(timeout, whole).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.timed_out(call, timeout)),
        }
    }

    /// Reads the rest of a successful answer.
    pub(crate) async fn read_answer(
        &self,
        call: &Call,
        response: Response,
    ) -> Result<Answer, ClientError> {
        let url = self.url_of(call);
        let bytes = self.read_bounded(&call.method, &url, response, ANSWER_BYTES_MAX).await?;
        Ok(Answer { bytes, method: call.method.clone(), url })
    }

    /// Sends one try and gives the answer if it is a success, its body still to be read.
    pub(crate) async fn send_once(
        &self,
        call: &Call,
        body: reqwest::Body,
    ) -> Result<Response, ClientError> {
        let url = self.url_of(call);
        let mut request = self.inner.http.request(call.method.clone(), &url);
        if let Some(value) = self.inner.authorization.value()? {
            request = request.header(AUTHORIZATION, value);
        }
        if call.headers.contains_key(CONTENT_TYPE) {
            request = request.body(body);
        }
        let response = request.headers(call.headers.clone()).send().await.map_err(|error| {
            ClientError::from_reqwest(call.method.as_str(), &self.inner.base, &url, error)
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.refusal(&call.method, &url, response).await)
    }

    /// The error that an unsuccessful answer stands for.
    async fn refusal(&self, method: &Method, url: &str, response: Response) -> ClientError {
        let status = response.status();
        let retry_after = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.trim().parse().ok())
            .map(Duration::from_secs);
        let bytes = match self.read_bounded(method, url, response, PROBLEM_BYTES_MAX).await {
            Ok(bytes) => bytes,
            Err(error) => return error,
        };
        if let Ok(mut problem) = serde_json::from_slice::<Problem>(&bytes) {
            // The status line is what proxies and this client act upon.
            problem.status = status.as_u16();
            return ClientError::from_problem(problem, retry_after);
        }
        if matches!(status.as_u16(), 429 | 502 | 503 | 504) {
            // A proxy before an appliance that is away: worth another try.
            let detail = format!("{method} {url} was answered with {status}, not by the appliance");
            return ClientError::Api {
                status: status.as_u16(),
                code: ProblemCode::Unknown,
                detail,
                existing_snapshot_id: None,
                retry_after,
            };
        }
        ClientError::Protocol {
            method: method.to_string(),
            url: url.to_owned(),
            got: format!("status {status} and `{}`", quote(&String::from_utf8_lossy(&bytes))),
            expected: "a success or a problem document".to_owned(),
        }
    }

    async fn read_bounded(
        &self,
        method: &Method,
        url: &str,
        mut response: Response,
        limit: usize,
    ) -> Result<Bytes, ClientError> {
        let mut bytes = BytesMut::new();
        loop {
            let piece = response.chunk().await.map_err(|error| {
                ClientError::from_reqwest(method.as_str(), &self.inner.base, url, error)
            })?;
            match piece {
                None => return Ok(bytes.freeze()),
                Some(piece) if bytes.len() + piece.len() <= limit => {
                    bytes.extend_from_slice(&piece)
                }
                Some(_) => {
                    return Err(ClientError::Protocol {
                        method: method.to_string(),
                        url: url.to_owned(),
                        got: format!("more than {limit} bytes"),
                        expected: "a bounded answer".to_owned(),
                    });
                }
            }
        }
    }

    pub(crate) fn timed_out(&self, call: &Call, timeout: Duration) -> ClientError {
        ClientError::Timeout {
            method: call.method.to_string(),
            url: self.url_of(call),
            // Shown as at least one second: a limit below it is only met in tests.
            timeout_seconds: timeout.as_secs().max(1),
        }
    }

    pub(crate) fn url_of(&self, call: &Call) -> String {
        format!("{}{}", self.inner.base, call.route)
    }
}

/// The text's beginning on one line.
fn quote(text: &str) -> String {
    text.chars().take(QUOTED_CHARACTERS_MAX).collect::<String>().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_post_has_a_key_of_its_own_and_only_patch_is_sent_once() {
        let key = |call: &Call| call.headers.get(IDEMPOTENCY_KEY).unwrap().clone();
        let first = Call::post("/v1/gc", &()).unwrap();
        let second = Call::post("/v1/gc", &()).unwrap();
        assert_ne!(key(&first), key(&second));
        assert!(first.may_repeat());
        assert!(!Call::new(Method::PATCH, String::new()).may_repeat());
    }
}

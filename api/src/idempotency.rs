//! Answers that are kept for requests that come again with the same idempotency key.
//!
//! ```text
//! no entry ------> under way ------> kept (success)      --> given again, for 24 hours
//!                      |
//!                      +-----------> forgotten (failure) --> the next one is carried out
//! ```
//!
//! Failures are not kept: they changed nothing, so trying again is safe and may succeed. A
//! request runs as a task of its own, so that an impatient client that hangs up and comes
//! again finds the answer of its first request. A restart forgets all; see
//! [`crate::paths::IDEMPOTENCY_KEY`] for what is safe then.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::auth::Caller;
use crate::error::ProblemCode;
use crate::extract::{BodyShare, read_body};
use crate::failure::Failure;
use crate::paths::{IDEMPOTENCY_KEY, IDEMPOTENCY_KEY_BYTES_MAX, IDEMPOTENCY_REPLAYED};
use crate::router::Place;
use crate::state::Shared;

/// How long an answer is kept: longer than any sensible client tries again.
const AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Answers that are kept: a day of one request every ten seconds, or a burst.
const ENTRIES_MAX: usize = 8192;

/// Bytes of all answers that are kept.
const BYTES_MAX: usize = 8 << 20;

/// Bytes of one answer that tells of nothing made; larger ones (a report of a check with many
/// problems) are not kept. Of what was made every answer is: without it, a repetition would make
/// another one. A snapshot's with all its labels takes about 600 KiB.
const ANSWER_BYTES_MAX: usize = 64 << 10;

type Digest = [u8; 32];
type Outcome = Option<Arc<Answer>>;

/// An answer in a form that can be given many times.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    failure: Option<Failure>,
}

impl Answer {
    fn is_worth_keeping(&self) -> bool {
        self.status == StatusCode::CREATED
            || (self.status.is_success() && self.body.len() <= ANSWER_BYTES_MAX)
    }

    fn response(&self, replayed: bool) -> Response {
        let mut response = (self.status, self.body.clone()).into_response();
        *response.headers_mut() = self.headers.clone();
        if replayed {
            response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
        }
        if let Some(failure) = self.failure.clone() {
            response.extensions_mut().insert(failure);
        }
        response
    }
}

#[derive(Debug)]
enum Progress {
    UnderWay(watch::Receiver<Outcome>),
    Kept { answer: Arc<Answer>, at: Instant },
}

#[derive(Debug)]
struct Entry {
    request: Digest,
    progress: Progress,
}

/// The kept answers, oldest first in `order`, and the requests under way. Requests under way
/// are bounded by the bound on requests.
#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Digest, Entry>,
    order: VecDeque<Digest>,
    bytes: usize,
}

/// What is to be done with a request.
enum Decision {
    CarryOut(watch::Sender<Outcome>),
    Wait(watch::Receiver<Outcome>),
    Give(Arc<Answer>),
    Refuse,
}

impl Table {
    fn decide(&mut self, key: Digest, request: Digest, now: Instant) -> Decision {
        self.forget_old(now);
        if let Some(entry) = self.entries.get(&key) {
            return match &entry.progress {
                _ if entry.request != request => Decision::Refuse,
                Progress::UnderWay(outcome) => Decision::Wait(outcome.clone()),
                Progress::Kept { answer, .. } => Decision::Give(Arc::clone(answer)),
            };
        }
        let (sender, receiver) = watch::channel(None);
        self.entries.insert(key, Entry { request, progress: Progress::UnderWay(receiver) });
        Decision::CarryOut(sender)
    }

    fn keep(&mut self, key: Digest, answer: Arc<Answer>, now: Instant) {
        self.bytes += answer.body.len();
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.progress = Progress::Kept { answer, at: now };
            self.order.push_back(key);
        }
        while self.order.len() > ENTRIES_MAX || self.bytes > BYTES_MAX {
            self.forget_oldest();
        }
    }

    fn forget(&mut self, key: &Digest) {
        self.entries.remove(key);
    }

    fn forget_old(&mut self, now: Instant) {
        while let Some(key) = self.order.front() {
            match self.entries.get(key).map(|entry| &entry.progress) {
                Some(Progress::Kept { at, .. }) if now.duration_since(*at) < AGE_MAX => return,
                _ => self.forget_oldest(),
            }
        }
    }

    fn forget_oldest(&mut self) {
        let Some(key) = self.order.pop_front() else {
            return;
        };
        if let Some(Entry { progress: Progress::Kept { answer, .. }, .. }) =
            self.entries.remove(&key)
        {
            self.bytes -= answer.body.len();
        }
    }
}

/// The kept answers of a server.
#[derive(Debug, Default)]
pub(crate) struct Replays(Mutex<Table>);

/// Takes the entry of a request out again if its task ends without an answer (a panic).
struct Unfinished {
    state: Shared,
    key: Digest,
    finished: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.finished {
            self.state.replays.0.lock().forget(&self.key);
        }
    }
}

/// Carries out a `POST` that has an idempotency key at most once.
pub(crate) async fn replay(State(state): State<Shared>, request: Request, next: Next) -> Response {
    // The VMstore face knows no keys; its answers, with their cookies, are never kept.
    let applies = request.method() == Method::POST && request.uri().path().starts_with("/v1/");
    if !applies || !request.headers().contains_key(IDEMPOTENCY_KEY) {
        return next.run(request).await;
    }
    match once(state, request, next).await {
        Ok(response) => response,
        Err(failure) => failure.into_response(),
    }
}

async fn once(state: Shared, request: Request, next: Next) -> Result<Response, Failure> {
    let key = key_digest(&request)?;
    let (parts, body) = request.into_parts();
    let head = Request::from_parts(parts.clone(), body);
    let body = read_body(head, &state).await?;
    let fingerprint = request_digest(&parts, &body);
    let decision = state.replays.0.lock().decide(key, fingerprint, Instant::now());
    match decision {
        Decision::Refuse => Err(Failure::new(
            ProblemCode::IdempotencyKeyReused,
            "the idempotency key was used with another route or body: use a new key",
        )),
        Decision::Give(answer) => Ok(answer.response(true)),
        Decision::Wait(outcome) => {
            let limit = state.options.queue_timeout;
            let answer = tokio::time::timeout(limit, wait(outcome)).await.map_err(|_| {
                Failure::new(
                    ProblemCode::IdempotencyInProgress,
                    "the first request with this key is still being carried out",
                )
            })?;
            answer.map(|answer| answer.response(true))
        }
        Decision::CarryOut(sender) => {
            let outcome = sender.subscribe();
            let request = Request::from_parts(parts, Body::from(body));
            tokio::spawn(carry_out(state, key, request, next, sender));
            wait(outcome).await.map(|answer| answer.response(false))
        }
    }
}

async fn carry_out(
    state: Shared,
    key: Digest,
    request: Request,
    next: Next,
    sender: watch::Sender<Outcome>,
) {
    // The one who asked may hang up.
    let _share = request.extensions().get::<BodyShare>().cloned();
    let _place = request.extensions().get::<Place>().cloned();
    let mut unfinished = Unfinished { state: Arc::clone(&state), key, finished: false };
    let response = next.run(request).await;
    let (parts, body) = response.into_parts();
    // Answers of these routes are made in memory; reading them back cannot fail.
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let answer = Arc::new(Answer {
        status: parts.status,
        headers: parts.headers,
        body,
        failure: parts.extensions.get::<Failure>().cloned(),
    });
    {
        let mut table = state.replays.0.lock();
        if answer.is_worth_keeping() {
            table.keep(key, Arc::clone(&answer), Instant::now());
        } else {
            table.forget(&key);
        }
    }
    unfinished.finished = true;
    sender.send_replace(Some(answer));
}

/// Waits for the request under way.
async fn wait(mut outcome: watch::Receiver<Outcome>) -> Result<Arc<Answer>, Failure> {
    let answer = outcome.wait_for(Option::is_some).await.ok().and_then(|answer| answer.clone());
    answer.ok_or_else(|| {
        Failure::new(
            ProblemCode::Internal,
            "the request with this key failed, see the server's log",
        )
    })
}

fn key_digest(request: &Request) -> Result<Digest, Failure> {
    let mut values = request.headers().get_all(IDEMPOTENCY_KEY).iter();
    let key = values.next().map_or(&b""[..], HeaderValue::as_bytes);
    if key.is_empty() || key.len() > IDEMPOTENCY_KEY_BYTES_MAX || values.next().is_some() {
        let detail = format!(
            "{IDEMPOTENCY_KEY} is to come once, with 1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes"
        );
        return Err(Failure::new(ProblemCode::BadHeader, detail));
    }
    // Keys of different callers never meet.
    let caller = request.extensions().get::<Caller>().map_or("", |caller| &*caller.name);
    Ok(digest(&[caller.as_bytes(), key]))
}

fn request_digest(parts: &axum::http::request::Parts, body: &[u8]) -> Digest {
    let media_type =
        parts.headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    digest(&[parts.uri.to_string().as_bytes(), media_type, body])
}

/// A digest in which no two lists of parts look the same: each part is preceded by its length.
fn digest(parts: &[&[u8]]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body_bytes: usize) -> Arc<Answer> {
        Arc::new(Answer {
            status: StatusCode::CREATED,
            headers: HeaderMap::new(),
            body: Bytes::from(vec![0; body_bytes]),
            failure: None,
        })
    }

    fn key(number: usize) -> Digest {
        digest(&[number.to_string().as_bytes()])
    }

    #[test]
    fn an_answer_is_given_again_until_it_is_old() {
        let mut table = Table::default();
        let start = Instant::now();
        assert!(matches!(table.decide(key(1), key(9), start), Decision::CarryOut(_)));
        assert!(matches!(table.decide(key(1), key(9), start), Decision::Wait(_)));
        table.keep(key(1), answer(10), start);
        assert!(matches!(table.decide(key(1), key(9), start), Decision::Give(_)));
        assert!(matches!(table.decide(key(1), key(8), start), Decision::Refuse));
        assert!(matches!(table.decide(key(1), key(9), start + AGE_MAX), Decision::CarryOut(_)));
        assert_eq!(table.bytes, 0);
    }

    #[test]
    fn a_failure_is_forgotten() {
        let mut table = Table::default();
        let now = Instant::now();
        assert!(matches!(table.decide(key(1), key(9), now), Decision::CarryOut(_)));
        table.forget(&key(1));
        assert!(matches!(table.decide(key(1), key(9), now), Decision::CarryOut(_)));
    }

    #[test]
    fn count_and_bytes_are_bounded() {
        let mut table = Table::default();
        let now = Instant::now();
        for number in 0..ENTRIES_MAX + 10 {
            table.decide(key(number), key(0), now);
            table.keep(key(number), answer(1), now);
        }
        assert_eq!((table.order.len(), table.entries.len()), (ENTRIES_MAX, ENTRIES_MAX));
        assert!(matches!(table.decide(key(0), key(0), now), Decision::CarryOut(_)));
        for number in 0..200 {
            table.decide(key(1_000_000 + number), key(0), now);
            table.keep(key(1_000_000 + number), answer(ANSWER_BYTES_MAX), now);
        }
        assert!(table.bytes <= BYTES_MAX);
        assert_eq!(table.order.len() + 1, table.entries.len(), "key 0 is under way");
    }

    #[test]
    fn parts_of_a_digest_do_not_run_into_each_other() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
    }
}

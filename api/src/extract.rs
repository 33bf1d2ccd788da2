//! What handlers take from a request, each refusal a problem document.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::OwnedSemaphorePermit;

use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::query::QueryError;
use crate::state::Shared;

/// A JSON body of type `T`, with its media type.
#[derive(Debug)]
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Shared> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &Shared) -> Result<Self, Failure> {
        require_media_type(request.headers(), "application/json")?;
        let body = read_body(request, state).await?;
        parse_json(&body).map(Self)
    }
}

/// A JSON body of type `T`, or its default where nothing was sent.
#[derive(Debug)]
pub(crate) struct OptionalJsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Default> FromRequest<Shared> for OptionalJsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &Shared) -> Result<Self, Failure> {
        let media_type = require_media_type(request.headers(), "application/json");
        let body = read_body(request, state).await?;
        if body.is_empty() {
            return Ok(Self(T::default()));
        }
        media_type?;
        parse_json(&body).map(Self)
    }
}

/// What is a parameter of the route, decoded: one segment, or a tuple of several in order.
#[derive(Debug)]
pub(crate) struct Segment<T = String>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Shared> for Segment<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Failure> {
        Path::<T>::from_request_parts(parts, state)
            .await
            .map(|Path(segment)| Self(segment))
            .map_err(|error| Failure::new(ProblemCode::BadQuery, error.body_text()))
    }
}

impl From<QueryError> for Failure {
    fn from(error: QueryError) -> Self {
        Self::new(ProblemCode::BadQuery, error.to_string())
    }
}

/// Refuses a body that says it is of another media type than `expected`.
pub(crate) fn require_media_type(headers: &HeaderMap, expected: &str) -> Result<(), Failure> {
    let got = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    // Parameters such as `; charset=utf-8` say nothing that JSON (RFC 8259 section 8.1) or
    // plain bytes would not have anyway.
    let essence = got.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(expected.as_bytes()) {
        return Ok(());
    }
    let detail = format!("content-type is `{}`, expected {expected}", got.escape_ascii());
    Err(Failure::new(ProblemCode::UnsupportedMediaType, detail))
}

/// What a body may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimit {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// Reads a JSON body within the limits on its size and time, and on the memory of all.
pub(crate) async fn read_body(request: Request, state: &Shared) -> Result<Bytes, Failure> {
    let limit = BodyLimit { bytes: state.options.body_bytes_max, time: state.options.body_timeout };
    read_body_within(request, state, limit).await
}

/// Reads a body within these limits, and that on the memory of all bodies.
pub(crate) async fn read_body_within(
    request: Request,
    state: &Shared,
    limit: BodyLimit,
) -> Result<Bytes, Failure> {
    let too_large =
        || Failure::new(ProblemCode::BodyTooLarge, format!("the limit is {} bytes", limit.bytes));
    if content_length::<usize>(request.headers())?.is_some_and(|length| length > limit.bytes) {
        return Err(too_large());
    }
    let share = request.extensions().get::<BodyShare>().cloned().unwrap_or_default();
    // Of one that does not say how long it is, the most that it may become.
    let announced = request.body().size_hint().upper().and_then(|bytes| bytes.try_into().ok());
    share.take(state, announced.map_or(limit.bytes, |bytes: usize| bytes.min(limit.bytes))).await?;
    let read = collect(request.into_body(), limit.bytes);
    match tokio::time::timeout(limit.time, read).await {
        Ok(Ok(Some(body))) => Ok(body),
        Ok(Ok(None)) => Err(too_large()),
        Ok(Err(error)) => Err(incomplete_body(&error)),
        Err(_) => Err(Failure::new(
            ProblemCode::RequestTimeout,
            format!("the body did not come within {} s", limit.time.as_secs()),
        )),
    }
}

/// What a request's body takes of the memory of all bodies; an extension of the request, so that
/// it lasts as long as what is made of the body.
#[derive(Clone, Debug, Default)]
pub(crate) struct BodyShare(Arc<Mutex<Option<OwnedSemaphorePermit>>>);

impl BodyShare {
    /// Takes memory for a body of so many bytes. One that is read again, from memory, has its own.
    async fn take(&self, state: &Shared, bytes: usize) -> Result<(), Failure> {
        if self.0.lock().is_some() {
            return Ok(());
        }
        let permit = state.body_memory(bytes).await?;
        *self.0.lock() = Some(permit);
        Ok(())
    }
}

/// The body, or `None` as soon as it is over the limit.
async fn collect(body: Body, limit: usize) -> Result<Option<Bytes>, axum::Error> {
    let mut pieces = body.into_data_stream();
    let mut all = Vec::new();
    while let Some(piece) = pieces.next().await.transpose()? {
        if all.len() + piece.len() > limit {
            return Ok(None);
        }
        all.extend_from_slice(&piece);
    }
    Ok(Some(all.into()))
}

/// The connection broke, or the encoding did, before the body was whole.
pub(crate) fn incomplete_body(error: &axum::Error) -> Failure {
    Failure::new(ProblemCode::IncompleteBody, error.to_string())
}

/// The announced length of the body.
pub(crate) fn content_length<T: std::str::FromStr>(
    headers: &HeaderMap,
) -> Result<Option<T>, Failure> {
    let Some(value) = headers.get(header::CONTENT_LENGTH) else {
        return Ok(None);
    };
    match value.to_str().ok().and_then(|text| text.parse().ok()) {
        Some(length) => Ok(Some(length)),
        None => Err(Failure::new(ProblemCode::BadHeader, "content-length is not a number")),
    }
}

/// Reads JSON. What is no JSON at all is told apart from values that have no meaning.
pub(crate) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| {
        let code = match error.classify() {
            Category::Io | Category::Syntax | Category::Eof => ProblemCode::BadJson,
            Category::Data => ProblemCode::InvalidValue,
        };
        Failure::new(code, error.to_string())
    })
}

//! What handlers take from a request, each refusal a problem document.

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

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

/// The one segment of the route that is a parameter, decoded.
#[derive(Debug)]
pub(crate) struct Segment(pub(crate) String);

impl FromRequestParts<Shared> for Segment {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Failure> {
        Path::<String>::from_request_parts(parts, state)
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

/// Reads a body within the limits on its size and time.
pub(crate) async fn read_body(request: Request, state: &Shared) -> Result<Bytes, Failure> {
    let limit = state.options.body_bytes_max;
    let too_large =
        || Failure::new(ProblemCode::BodyTooLarge, format!("the limit is {limit} bytes"));
    if content_length::<usize>(request.headers())?.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let read = collect(request.into_body(), limit);
    match tokio::time::timeout(state.options.body_timeout, read).await {
        Ok(Ok(Some(body))) => Ok(body),
        Ok(Ok(None)) => Err(too_large()),
        Ok(Err(error)) => Err(incomplete_body(&error)),
        Err(_) => Err(Failure::new(
            ProblemCode::RequestTimeout,
            format!("the body did not come within {} s", state.options.body_timeout.as_secs()),
        )),
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

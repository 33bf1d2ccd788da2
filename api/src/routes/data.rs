//! Bytes of files and snapshots, in and out, in pieces.
//!
//! ```text
//! GET   Store::read -> piece -> queue of 2 -> connection
//! PUT   connection -> piece of 1 MiB -> Store::write ... Store::commit -> answer
//! ```
//!
//! Out: one who wants holes to stay holes asks for the map or the diff first, and then for the
//! ranges that hold data. In: blocks of zeros are not stored, so a plain upload of a sparse
//! image takes only what it needs; gaps can be left out altogether.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::BytesMut;
use futures_util::{StreamExt, stream};
use slackwater_blockstore::{FILE_BYTES_MAX, InodeId, Source, Stability};
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::audit::record::About;
use crate::convert::parse_snapshot_id;
use crate::crowd::Standing;
use crate::error::ProblemCode;
use crate::extract::{Segment, content_length, incomplete_body, require_media_type};
use crate::failure::Failure;
use crate::options::ApiOptions;
use crate::paths;
use crate::query::PutData;
use crate::router::Mount;
use crate::routes::conditional::has_already;
use crate::routes::range::{Wanted, wanted};
use crate::scope::Scope;
use crate::state::Shared;
use crate::types::DataWritten;

/// Bytes of one piece: the store's window, so that a piece is one read or write of it.
const PIECE_BYTES: usize = 1 << 20;
const PIECE_BYTES_U64: u64 = 1 << 20;

/// Pieces that wait for a slow connection.
const PIECES_AHEAD: usize = 2;

/// Parts of a piece above which they are copied into one: a call of the system for many small
/// ones costs more than the copy.
const PARTS_MAX: usize = 8;

const MEDIA_TYPE: &str = "application/octet-stream";

const _: () = assert!(PIECE_BYTES_U64 == PIECE_BYTES as u64);
const _: () = assert!((PIECES_AHEAD + 1) * PIECE_BYTES <= ApiOptions::STREAM_BYTES_MAX);

pub(crate) fn mount(mount: Mount) -> Mount {
    mount
        .at(Method::GET, paths::FILE_DATA, get_file)
        .at(Method::PUT, paths::FILE_DATA, put_file)
        .at(Method::GET, paths::SNAPSHOT_DATA, get_snapshot)
}

/// Streams a file's bytes
///
/// With `Range`, the part that is asked for. `ETag` changes with every change of the file; a
/// file that changes while it is read may give some bytes of before and some of after: read a
/// snapshot to get one moment.
#[utoipa::path(
    get, path = paths::FILE_DATA, tag = "files", operation_id = "getFileData",
    params(
        ("path" = String, Path, description = "The file's path, its slashes as %2F"),
        ("range" = Option<String>, Header, description = "One range of bytes"),
        ("if-range" = Option<String>, Header, description = "Ignore `Range` unless this is the `ETag`"),
        ("if-none-match" = Option<String>, Header, description = "Answer 304 if one of these is the `ETag`"),
    ),
    responses(
        (status = 200, description = "All bytes", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 304, description = "The bytes are those of `If-None-Match`"),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The path is no file's"),
        (status = 416, description = "The range begins at or after the end"),
        (status = 422, description = "The path has no meaning"),
    ),
)]
pub(crate) async fn get_file(
    State(state): State<Shared>,
    scope: Scope,
    Segment(path): Segment,
    standing: Option<Extension<Arc<Standing>>>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let path = scope.reads(&path)?;
    let attributes = state.call(move |store| store.file_info(&path)).await?.attributes;
    let readable = Readable {
        source: Source::File(attributes.inode),
        size_bytes: attributes.size_bytes,
        entity_tag: format!(
            "\"{}-{}-{}\"",
            attributes.inode,
            attributes.generation,
            attributes.changed_at.as_nanos()
        ),
    };
    send(state, readable, standing, &method, &headers).await
}

/// Streams a snapshot's bytes
///
/// With `Range`, the part that is asked for: a snapshot never changes, so a transfer that broke
/// can go on where it ended.
#[utoipa::path(
    get, path = paths::SNAPSHOT_DATA, tag = "snapshots", operation_id = "getSnapshotData",
    params(
        ("id" = String, Path, format = Uuid, description = "The snapshot's id"),
        ("range" = Option<String>, Header, description = "One range of bytes"),
        ("if-range" = Option<String>, Header, description = "Ignore `Range` unless this is the `ETag`"),
        ("if-none-match" = Option<String>, Header, description = "Answer 304 if one of these is the `ETag`"),
    ),
    responses(
        (status = 200, description = "All bytes", content_type = "application/octet-stream"),
        (status = 206, description = "The range", content_type = "application/octet-stream"),
        (status = 304, description = "The bytes are those of `If-None-Match`"),
        (status = 404, description = "There is no such snapshot"),
        (status = 416, description = "The range begins at or after the end"),
        (status = 422, description = "The id is no UUID in lower case"),
    ),
)]
pub(crate) async fn get_snapshot(
    State(state): State<Shared>,
    scope: Scope,
    Segment(id): Segment,
    standing: Option<Extension<Arc<Standing>>>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let id = parse_snapshot_id(&id)?;
    let snapshot = scope.snapshot(&state, id).await?;
    let readable = Readable {
        source: Source::Snapshot(id),
        size_bytes: snapshot.size_bytes,
        entity_tag: format!("\"{id}\""),
    };
    send(state, readable, standing, &method, &headers).await
}

struct Readable {
    source: Source,
    size_bytes: u64,
    entity_tag: String,
}

async fn send(
    state: Shared,
    readable: Readable,
    standing: Option<Extension<Arc<Standing>>>,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Response, Failure> {
    let size_bytes = readable.size_bytes;
    let tag = HeaderValue::from_str(&readable.entity_tag).ok();
    let tag = tag.map(|tag| [(header::ETAG, tag)]);
    if has_already(headers, &readable.entity_tag) {
        return Ok((StatusCode::NOT_MODIFIED, tag, ()).into_response());
    }
    let (status, range) = match wanted(headers, &readable.entity_tag, size_bytes) {
        Wanted::All => (StatusCode::OK, 0..size_bytes),
        Wanted::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
        Wanted::Unsatisfiable => return Err(Failure::beyond_end(size_bytes)),
    };
    let length_bytes = range.end - range.start;
    let content_range =
        format!("bytes {}-{}/{size_bytes}", range.start, range.end.saturating_sub(1));
    let body = if *method == Method::HEAD || length_bytes == 0 {
        Body::empty()
    } else {
        let permit = state.data_stream().await?;
        stream_out(state, readable.source, range, permit, standing)
    };
    let mut response = (status, tag, body).into_response();
    let answer = response.headers_mut();
    answer.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    answer.insert(header::CONTENT_LENGTH, length_bytes.into());
    answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT
        && let Ok(value) = HeaderValue::from_str(&content_range)
    {
        answer.insert(header::CONTENT_RANGE, value);
    }
    Ok(response)
}

/// Why a transfer that had begun broke off; the connection is cut, which is the only way left
/// to tell the client.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("the read at byte {offset_bytes} failed: {detail}")]
    Read { offset_bytes: u64, detail: String },
    #[error("the file became shorter: {got} bytes at byte {offset_bytes}, expected {expected}")]
    Short { offset_bytes: u64, got: usize, expected: usize },
    #[error("the client took nothing for {} s", limit.as_secs())]
    Stalled { limit: Duration },
}

/// A body that a task of its own reads from the store. The task, with its permit, ends when the
/// client takes nothing for too long, and the connection with it: HTTP/2 would keep what was read
/// for the client as long as that answers pings.
fn stream_out(
    state: Shared,
    source: Source,
    range: Range<u64>,
    permit: OwnedSemaphorePermit,
    standing: Option<Extension<Arc<Standing>>>,
) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    tokio::spawn(async move {
        let stall = state.options.stall_timeout;
        match read_out(&state, source, range, &sender).await {
            Ok(()) => {}
            Err(StreamError::Stalled { .. }) => {
                if let Some(Extension(standing)) = standing {
                    standing.cut();
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a transfer of data broke off");
                // The receiver may be gone or stalled; the cut is what it sees either way.
                let _cut = sender.send_timeout(Err(error), stall).await;
            }
        }
        drop(permit);
    });
    Body::from_stream(stream::unfold(receiver, async |mut receiver| {
        receiver.recv().await.map(|piece| (piece, receiver))
    }))
}

async fn read_out(
    state: &Shared,
    source: Source,
    range: Range<u64>,
    sender: &mpsc::Sender<Result<Bytes, StreamError>>,
) -> Result<(), StreamError> {
    let mut offset_bytes = range.start;
    while offset_bytes < range.end {
        // Pieces end at multiples of their length, so that each is one window of the store.
        let piece_end = (offset_bytes / PIECE_BYTES_U64 + 1) * PIECE_BYTES_U64;
        let expected =
            usize::try_from(piece_end.min(range.end) - offset_bytes).unwrap_or(PIECE_BYTES);
        let reply = match state.store.try_read(source, offset_bytes, expected) {
            Some(reply) => reply.map_err(Failure::from),
            None => state.call_step(move |store| store.read(source, offset_bytes, expected)).await,
        };
        let reply = reply.map_err(|failure| StreamError::Read {
            offset_bytes,
            detail: failure.detail().to_owned(),
        })?;
        let got = reply.length_bytes;
        if got != expected {
            return Err(StreamError::Short { offset_bytes, got, expected });
        }
        let parts = if reply.pieces.len() > PARTS_MAX {
            vec![Bytes::from(reply.to_vec())]
        } else {
            reply.pieces
        };
        for part in parts {
            let limit = state.options.stall_timeout;
            match sender.send_timeout(Ok(part), limit).await {
                Ok(()) => {}
                // The client went away.
                Err(SendTimeoutError::Closed(_)) => return Ok(()),
                Err(SendTimeoutError::Timeout(_)) => return Err(StreamError::Stalled { limit }),
            }
        }
        offset_bytes = piece_end.min(range.end);
    }
    Ok(())
}

/// Writes bytes into a file
///
/// The body goes to `offset`; a file that is too short grows. All is on the disk when 200 is
/// answered. Safe to repeat. A transfer that breaks off leaves the part that had come.
#[utoipa::path(
    put, path = paths::FILE_DATA, tag = "files", operation_id = "putFileData",
    params(
        ("path" = String, Path, description = "The file's path, its slashes as %2F"),
        ("offset" = Option<u64>, Query, description = "Where the first byte goes; 0 unless given"),
    ),
    request_body(content = inline(String), content_type = "application/octet-stream", description = "The bytes"),
    responses(
        (status = 200, description = "Written and on the disk", body = DataWritten),
        (status = 404, description = "Nothing is at the path"),
        (status = 409, description = "The path is no file's"),
        (status = 422, description = "The path has no meaning, or the end is over the limit of 2^62"),
    ),
)]
pub(crate) async fn put_file(
    State(state): State<Shared>,
    Extension(about): Extension<About>,
    scope: Scope,
    Segment(path): Segment,
    RawQuery(query): RawQuery,
    request: Request,
) -> Result<Json<DataWritten>, Failure> {
    let path = scope.changes(&path)?;
    let PutData { offset_bytes } = PutData::decode(query.as_deref().unwrap_or_default())?;
    require_media_type(request.headers(), MEDIA_TYPE)?;
    let announced = content_length::<u64>(request.headers())?.unwrap_or(0);
    if offset_bytes.checked_add(announced).is_none_or(|end| end > FILE_BYTES_MAX) {
        let detail =
            format!("{announced} bytes at {offset_bytes} end over the limit of {FILE_BYTES_MAX}");
        return Err(Failure::new(ProblemCode::FileTooBig, detail));
    }
    let permit = state.data_stream().await?;
    let inode = state.call_step(move |store| store.file_info(&path)).await?.attributes.inode;
    let mut upload = Upload { state, inode, next_bytes: offset_bytes, verifier: None };
    // A body that breaks off leaves what had come.
    about.has_begun();
    upload.take(request.into_body()).await?;
    let size_bytes = upload.commit().await?;
    drop(permit);
    Ok(Json(DataWritten {
        offset_bytes,
        length_bytes: upload.next_bytes - offset_bytes,
        size_bytes,
    }))
}

struct Upload {
    state: Shared,
    inode: InodeId,
    /// Where the next byte goes.
    next_bytes: u64,
    /// The write verifier of the first write: with another one at the commit, bytes were lost.
    verifier: Option<u64>,
}

impl Upload {
    /// Writes the body in pieces that end at multiples of their length.
    async fn take(&mut self, body: Body) -> Result<(), Failure> {
        let mut parts = body.into_data_stream();
        let mut piece = BytesMut::new();
        loop {
            let stall = self.state.options.stall_timeout;
            let part =
                tokio::time::timeout(stall, parts.next()).await.map_err(|_| stalled(stall))?;
            let Some(part) = part else { break };
            let mut part = part.map_err(|error| incomplete_body(&error))?;
            while !part.is_empty() {
                let room = self.room(piece.len());
                piece.extend_from_slice(&part.split_to(room.min(part.len())));
                if self.room(piece.len()) == 0 {
                    self.write(piece.split().freeze()).await?;
                }
            }
        }
        if piece.is_empty() { Ok(()) } else { self.write(piece.freeze()).await }
    }

    /// Bytes that a piece of `held` bytes can still take; 0 when it is full.
    fn room(&self, held: usize) -> usize {
        let misaligned = usize::try_from(self.next_bytes % PIECE_BYTES_U64).unwrap_or(0);
        PIECE_BYTES - misaligned - held
    }

    async fn write(&mut self, piece: Bytes) -> Result<(), Failure> {
        let (inode, offset_bytes) = (self.inode, self.next_bytes);
        let length_bytes = u64::try_from(piece.len()).unwrap_or(u64::MAX);
        let waiting = Waiting::default();
        let is_given_up = Arc::clone(&waiting.is_over);
        let write = move |store: &slackwater_blockstore::Store| {
            let is_given_up = || is_given_up.load(Ordering::Acquire);
            store.write_unless(inode, offset_bytes, piece, Stability::Unstable, &is_given_up)
        };
        let written = self.state.call_step(write).await?;
        self.verifier.get_or_insert(written.verifier);
        self.next_bytes += length_bytes;
        Ok(())
    }

    /// Brings everything to the disk and answers the file's size.
    async fn commit(&self) -> Result<u64, Failure> {
        let inode = self.inode;
        let (file, verifier) = self.state.call_step(move |store| store.commit(inode)).await?;
        match self.verifier {
            Some(expected) if expected != verifier => Err(Failure::new(
                ProblemCode::Io,
                "a sync failed while the bytes were being written: send them again",
            )),
            _ => Ok(file.after.size_bytes),
        }
    }
}

/// Somebody waits for a piece to be written. Once that is over, as its client has left or was told that
/// it took too long, the piece must not be written over what the client sends next.
#[derive(Debug, Default)]
struct Waiting {
    is_over: Arc<AtomicBool>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
    }
}

fn stalled(limit: Duration) -> Failure {
    let detail = format!("no byte of the body came for {} s", limit.as_secs());
    Failure::new(ProblemCode::RequestTimeout, detail)
}

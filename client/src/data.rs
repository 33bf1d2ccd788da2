//! Bytes of files and snapshots: block maps, ranges, streams in both directions.
//!
//! Invariant: what is given to the caller is exactly the range that the appliance announced,
//! and a stream that ends early is an error, never a short success.

use std::fmt;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use reqwest::header::{CONTENT_RANGE, HeaderValue, RANGE};
use reqwest::{Method, Response, StatusCode};
use slackwater_api::block_map::BlockMap;
use slackwater_api::paths;
use slackwater_api::query;
use slackwater_api::types::{DataWritten, SnapshotId};

use crate::error::ClientError;
use crate::transport::{Call, Client};

/// Most bytes that [`Client::read_bytes`] holds in memory.
const READ_BYTES_MAX: u64 = 64 << 20;

/// Slowest transfer that is waited for when bytes are held in memory, in bytes a second.
const SLOWEST_BYTES_PER_SECOND: u64 = 64 << 10;

/// What bytes are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSource<'a> {
    /// A file, by its path.
    File(&'a str),
    /// A snapshot.
    Snapshot(SnapshotId),
}

impl DataSource<'_> {
    fn data_route(self) -> String {
        match self {
            Self::File(path) => paths::file_data(path),
            Self::Snapshot(id) => paths::snapshot_data(id),
        }
    }

    fn map_route(self) -> String {
        match self {
            Self::File(path) => paths::file_map(path),
            Self::Snapshot(id) => paths::snapshot_map(id),
        }
    }
}

/// A range of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    offset_bytes: u64,
    length_bytes: NonZeroU64,
}

impl ByteRange {
    /// The range of `length_bytes` from `offset_bytes` on; `None` if it is empty or ends beyond
    /// 2^64.
    #[must_use]
    pub fn new(offset_bytes: u64, length_bytes: u64) -> Option<Self> {
        offset_bytes.checked_add(length_bytes)?;
        Some(Self { offset_bytes, length_bytes: NonZeroU64::new(length_bytes)? })
    }

    /// Where it begins.
    #[must_use]
    pub const fn offset_bytes(self) -> u64 {
        self.offset_bytes
    }

    /// Its length.
    #[must_use]
    pub const fn length_bytes(self) -> u64 {
        self.length_bytes.get()
    }

    /// The first byte after it.
    #[must_use]
    pub const fn end_bytes(self) -> u64 {
        self.offset_bytes + self.length_bytes.get()
    }

    /// The same range, cut to at most `length_bytes_max`.
    fn at_most(self, length_bytes_max: u64) -> Self {
        let length = self.length_bytes.get().min(length_bytes_max);
        Self { length_bytes: NonZeroU64::new(length).unwrap_or(NonZeroU64::MIN), ..self }
    }

    /// The value of the `Range` header (RFC 9110 section 14.1.2: both ends are inclusive).
    fn header(self) -> Option<HeaderValue> {
        let text = format!("bytes={}-{}", self.offset_bytes, self.end_bytes() - 1);
        HeaderValue::from_str(&text).ok()
    }
}

/// The range in a `Content-Range` header (RFC 9110 section 14.4), such as `bytes 0-9/100`.
fn parse_content_range(text: &str) -> Option<ByteRange> {
    let (range, _total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    ByteRange::new(first, last.checked_sub(first)?.checked_add(1)?)
}

/// Bytes on their way from the appliance.
pub struct DataStream {
    pieces: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send>>,
    /// What the appliance announced.
    length_bytes: u64,
    received_bytes: u64,
    client: Client,
    call: Call,
}

impl fmt::Debug for DataStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataStream")
            .field("length_bytes", &self.length_bytes)
            .field("received_bytes", &self.received_bytes)
            .finish_non_exhaustive()
    }
}

impl DataStream {
    /// Bytes of the whole stream.
    #[must_use]
    pub const fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    /// The next piece; `None` once every announced byte was given.
    ///
    /// # Errors
    /// [`ClientError`]; `Protocol` if the stream is shorter or longer than was announced.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let timeout = self.client.timeout;
        let Ok(piece) = tokio::time::timeout(timeout, self.pieces.next()).await else {
            return Err(self.client.timed_out(&self.call, timeout));
        };
        let Some(piece) = piece else {
            if self.received_bytes < self.length_bytes {
                return Err(self.wrong_length());
            }
            return Ok(None);
        };
        let piece = piece.map_err(|error| {
            let url = self.client.url_of(&self.call);
            ClientError::from_reqwest("GET", self.client.url(), &url, error)
        })?;
        self.received_bytes = self.received_bytes.saturating_add(length_of(&piece));
        if self.received_bytes > self.length_bytes {
            return Err(self.wrong_length());
        }
        Ok(Some(piece))
    }

    fn wrong_length(&self) -> ClientError {
        ClientError::Protocol {
            method: "GET".to_owned(),
            url: self.client.url_of(&self.call),
            got: format!("{} bytes", self.received_bytes),
            expected: format!("{} bytes as announced", self.length_bytes),
        }
    }
}

fn length_of(piece: &Bytes) -> u64 {
    u64::try_from(piece.len()).unwrap_or(u64::MAX)
}

impl Client {
    /// `GET .../map`: for each block of the range its hash, or that it is a hole. The answer
    /// begins at the block that holds the range's first byte, and may cover less than was asked
    /// for: one who wants more goes on where it ends.
    ///
    /// # Errors
    /// [`ClientError`]; code `not_found`.
    pub async fn block_map(
        &self,
        source: DataSource<'_>,
        range: ByteRange,
    ) -> Result<BlockMap, ClientError> {
        let query = query::Map {
            offset_bytes: range.offset_bytes,
            length_bytes: Some(range.length_bytes.get()),
        };
        let answer = self.answer(&Call::get(source.map_route() + &query.encode())).await?;
        let map = BlockMap::decode(&answer.bytes)
            .map_err(|error| answer.unexpected("a block map", &error.to_string()))?;
        let block_bytes = u64::from(map.block_bytes);
        let is_asked_for = block_bytes.is_power_of_two()
            && map.offset_bytes == range.offset_bytes - range.offset_bytes % block_bytes;
        if !is_asked_for {
            let reason = format!("offset {} of {block_bytes}", map.offset_bytes);
            return Err(answer.unexpected("a block map from the asked offset on", &reason));
        }
        Ok(map)
    }

    /// `GET .../data` as a stream, the whole or a range of it (cut at the end of the file).
    /// Sent again if the first try fails; once the stream has begun, its caller goes on.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found` and `range_not_satisfiable`.
    pub async fn read(
        &self,
        source: DataSource<'_>,
        range: Option<ByteRange>,
    ) -> Result<DataStream, ClientError> {
        let call = data_call(source, range);
        let mut tries = self.tries(true);
        loop {
            match self.open_stream(&call, range).await {
                Ok(stream) => return Ok(stream),
                Err(error) => tries.wait_after(error).await?,
            }
        }
    }

    /// `GET .../data` of a range into memory, sent again until it is there as a whole. The
    /// answer is shorter than the range at the end of the file, and for ranges over 64 MiB.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found` and `range_not_satisfiable`.
    pub async fn read_bytes(
        &self,
        source: DataSource<'_>,
        range: ByteRange,
    ) -> Result<Bytes, ClientError> {
        let range = range.at_most(READ_BYTES_MAX);
        let call = data_call(source, Some(range));
        let timeout = self.transfer_timeout(range.length_bytes());
        let mut tries = self.tries(true);
        loop {
            let whole = self.read_whole(&call, range);
            let outcome = match tokio::time::timeout(timeout, whole).await {
                Ok(outcome) => outcome,
                Err(_) => Err(self.timed_out(&call, timeout)),
            };
            match outcome {
                Ok(bytes) => return Ok(bytes),
                Err(error) => tries.wait_after(error).await?,
            }
        }
    }

    /// One try of [`Self::read_bytes`].
    async fn read_whole(&self, call: &Call, range: ByteRange) -> Result<Bytes, ClientError> {
        let mut stream = self.open_stream(call, Some(range)).await?;
        let capacity = usize::try_from(stream.length_bytes()).unwrap_or_default();
        let mut bytes = BytesMut::with_capacity(capacity);
        while let Some(piece) = stream.next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }

    /// `PUT /v1/files/{path}/data`: writes the bytes at the offset, durably once it answers.
    /// Blocks of zeros become holes. Sent again if it fails: writing twice is writing once.
    ///
    /// # Errors
    /// [`ClientError`]; codes `not_found` and `no_space`.
    pub async fn write_bytes(
        &self,
        path: &str,
        offset_bytes: u64,
        data: Bytes,
    ) -> Result<DataWritten, ClientError> {
        let length_bytes = length_of(&data);
        let call =
            put_call(path, offset_bytes).data(data).timeout(self.transfer_timeout(length_bytes));
        let answer = self.answer(&call).await?;
        let written: DataWritten = answer.json()?;
        if (written.offset_bytes, written.length_bytes) != (offset_bytes, length_bytes) {
            let expected = format!("{length_bytes} bytes written at {offset_bytes}");
            return Err(answer.unexpected(&expected, "another range"));
        }
        Ok(written)
    }

    /// `PUT /v1/files/{path}/data` as a stream of any length. Never sent again, since the
    /// stream is used up: a caller that wants that writes pieces by [`Self::write_bytes`].
    /// Fails once no byte moves for the client's timeout.
    ///
    /// # Errors
    /// [`ClientError`]; `Source` if the stream fails.
    pub async fn write_stream<S>(
        &self,
        path: &str,
        offset_bytes: u64,
        stream: S,
    ) -> Result<DataWritten, ClientError>
    where
        S: Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    {
        let call = put_call(path, offset_bytes).data(Bytes::new());
        let sent_bytes = Arc::new(AtomicU64::new(0));
        let failure = Arc::new(std::sync::Mutex::new(None));
        let body = {
            let (sent_bytes, failure) = (Arc::clone(&sent_bytes), Arc::clone(&failure));
            stream.map(move |piece| match piece {
                Ok(piece) => {
                    sent_bytes.fetch_add(length_of(&piece), Ordering::Relaxed);
                    Ok(piece)
                }
                Err(error) => {
                    // Kept aside: HTTP would tell only that the body failed.
                    let kind = error.kind();
                    if let Ok(mut slot) = failure.lock() {
                        *slot = Some(error);
                    }
                    Err(std::io::Error::from(kind))
                }
            })
        };
        let sending = self.send_once(&call, reqwest::Body::wrap_stream(body));
        let outcome = self.unless_stalled(&call, sending, &sent_bytes).await;
        let source = failure.lock().ok().and_then(|mut slot| slot.take());
        if let Some(source) = source {
            return Err(ClientError::Source { source });
        }
        let answer = self.read_answer(&call, outcome?);
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(answer) => answer?.json(),
            Err(_) => Err(self.timed_out(&call, self.timeout)),
        }
    }

    /// Awaits `sending` for as long as `sent_bytes` moves at least once in a timeout.
    async fn unless_stalled(
        &self,
        call: &Call,
        sending: impl Future<Output = Result<Response, ClientError>>,
        sent_bytes: &AtomicU64,
    ) -> Result<Response, ClientError> {
        let mut sending = std::pin::pin!(sending);
        let mut last_bytes = 0;
        loop {
            if let Ok(outcome) = tokio::time::timeout(self.timeout, &mut sending).await {
                return outcome;
            }
            let now_bytes = sent_bytes.load(Ordering::Relaxed);
            if now_bytes == last_bytes {
                return Err(self.timed_out(call, self.timeout));
            }
            last_bytes = now_bytes;
        }
    }

    /// The client's timeout, and the time that these bytes take on a slow line.
    fn transfer_timeout(&self, length_bytes: u64) -> Duration {
        self.timeout + Duration::from_secs(length_bytes / SLOWEST_BYTES_PER_SECOND)
    }

    async fn open_stream(
        &self,
        call: &Call,
        range: Option<ByteRange>,
    ) -> Result<DataStream, ClientError> {
        let sending = self.send_once(call, reqwest::Body::default());
        let Ok(response) = tokio::time::timeout(self.timeout, sending).await else {
            return Err(self.timed_out(call, self.timeout));
        };
        let response = response?;
        let length_bytes =
            announced_length(&response, range).map_err(|got| ClientError::Protocol {
                method: "GET".to_owned(),
                url: self.url_of(call),
                got,
                expected: range.map_or("status 200 with a length".to_owned(), |range| {
                    format!("bytes {} to {}", range.offset_bytes, range.end_bytes() - 1)
                }),
            })?;
        Ok(DataStream {
            pieces: Box::pin(response.bytes_stream()),
            length_bytes,
            received_bytes: 0,
            client: self.clone(),
            call: call.clone(),
        })
    }
}

/// Bytes that the answer announces, or how it differs from what was asked for.
fn announced_length(response: &Response, range: Option<ByteRange>) -> Result<u64, String> {
    let status = response.status();
    let Some(asked) = range else {
        let length = response.content_length().filter(|_| status == StatusCode::OK);
        return length.ok_or_else(|| format!("status {status} and no length"));
    };
    let header = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    match header.and_then(parse_content_range) {
        Some(given)
            if status == StatusCode::PARTIAL_CONTENT
                && given.offset_bytes == asked.offset_bytes
                && given.end_bytes() <= asked.end_bytes() =>
        {
            Ok(given.length_bytes())
        }
        _ => Err(format!("status {status}, range {}", header.unwrap_or("none"))),
    }
}

fn data_call(source: DataSource<'_>, range: Option<ByteRange>) -> Call {
    let call = Call::get(source.data_route());
    match range.and_then(ByteRange::header) {
        Some(value) => call.header(RANGE, value),
        None => call,
    }
}

fn put_call(path: &str, offset_bytes: u64) -> Call {
    let query = query::PutData { offset_bytes };
    Call::new(Method::PUT, paths::file_data(path) + &query.encode())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_not_empty_and_do_not_overflow() {
        assert_eq!(ByteRange::new(0, 0), None);
        assert_eq!(ByteRange::new(u64::MAX, 1), None);
        let range = ByteRange::new(4096, 10).unwrap();
        assert_eq!(range.end_bytes(), 4106);
        assert_eq!(range.header().unwrap(), "bytes=4096-4105");
        assert_eq!(range.at_most(4).length_bytes(), 4);
    }

    #[test]
    fn content_ranges_are_read() {
        assert_eq!(parse_content_range("bytes 0-9/100"), ByteRange::new(0, 10));
        assert_eq!(parse_content_range("bytes 5-5/*"), ByteRange::new(5, 1));
        for bad in ["", "bytes */100", "bytes 9-0/100", "0-9/100", "bytes 0-18446744073709551615/1"]
        {
            assert_eq!(parse_content_range(bad), None, "{bad}");
        }
    }
}

//! Record marking (RFC 5531 section 11): a stream of bytes cut into records, and those into
//! fragments.
//!
//! ```text
//! |L|  length (31) | fragment |L|  length (31) | fragment | ...     L: last of its record
//! ```
//! Small records are slices of the connection's read buffer: one system call may bring many.
//! A large one gets a buffer of its own, after [`limits::FRAME_BYTES_SMALL`] of it arrived
//! and the rest was charged, so a record mark by itself allocates nothing. No record that
//! came in one fragment is copied, but for that beginning.
#![deny(clippy::indexing_slicing)]

use std::io;
use std::pin::pin;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::time::{Instant, timeout, timeout_at};

use crate::budget::{Charge, ConnectionBudget, Purpose};
use crate::limits;
use crate::pace::Pace;
use crate::xdr::LAST_FRAGMENT;

const MARK_BYTES: usize = 4;

/// A whole record.
#[derive(Debug)]
pub(crate) struct Record {
    /// Its bytes, without marks.
    pub(crate) bytes: Bytes,
    /// What a large one was charged already, as a change: only WRITE is that large.
    pub(crate) charge: Option<Charge>,
}

/// Why the stream cannot be read on. The connection is closed: where the next record starts
/// is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The record is longer than any call.
    #[error("a record of at least {got} bytes, the limit is {limit}")]
    TooLong {
        /// Its length as far as its marks tell.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// The record is cut into too many pieces.
    #[error("a record of more than {limit} fragments")]
    Fragments {
        /// The limit.
        limit: usize,
    },
    /// The record has no bytes.
    #[error("an empty record")]
    Empty,
    /// The stream ended inside a record.
    #[error("the connection ended inside a record, {expected} bytes were to come")]
    Truncated {
        /// Bytes that were to come next.
        expected: usize,
    },
    /// The record did not arrive in time.
    #[error("a record did not arrive whole in {} s", limit.as_secs())]
    TooSlow {
        /// The time it had.
        limit: Duration,
    },
    /// The record arrives slowly, and others wait for the memory that it is charged.
    #[error("less than {} bytes of a record arrived in {} s, and calls of others wait for its memory", limits::PRESSED_BYTES_MIN, limit.as_secs())]
    Slow {
        /// The time it had.
        limit: Duration,
    },
    /// The client closed its end while one of its calls waited for the budget.
    #[error("the client is gone, and its calls were not begun")]
    Gone,
    /// Reading failed.
    #[error("read: {0}")]
    Io(#[from] io::Error),
}

/// What records are read from.
pub(crate) trait Source: AsyncRead + Unpin {
    /// Whether the other end was closed, whatever is still to be read.
    fn is_gone(&self) -> bool;
}

impl Source for OwnedReadHalf {
    fn is_gone(&self) -> bool {
        let stream: &TcpStream = self.as_ref();
        let mut asked = [PollFd::new(stream, PollFlags::RDHUP)];
        // Where it cannot be told the client counts as there: its call is answered in vain.
        poll(&mut asked, Some(&Timespec::default())).is_ok_and(|found| found > 0)
    }
}

/// Waits for the budget, but no longer than the client is there: calls that were begun after it
/// had sent them again, by another connection, would put old bytes over newer ones.
pub(crate) async fn charge_unless_gone(
    source: &impl Source,
    budget: &ConnectionBudget,
    purpose: Purpose,
    bytes: usize,
) -> Result<Charge, RecordError> {
    let mut waiting = pin!(budget.charge(purpose, bytes));
    loop {
        let charge = timeout(limits::GONE_PERIOD, &mut waiting).await;
        if source.is_gone() {
            return Err(RecordError::Gone);
        }
        if let Ok(charge) = charge {
            return Ok(charge);
        }
    }
}

/// Reads records from a stream.
#[derive(Debug)]
pub(crate) struct RecordReader<R> {
    source: R,
    buffer: BytesMut,
    bytes_max: usize,
    patience: Duration,
    deadline: Option<Instant>,
}

/// A record under assembly.
#[derive(Debug, Default)]
struct Assembly {
    earlier: BytesMut,
    fragments: usize,
    charge: Option<Charge>,
}

impl RecordReader<OwnedReadHalf> {
    /// Completes when the first bytes are there, or the end.
    pub(crate) async fn begun(&self) -> Result<(), RecordError> {
        Ok(self.source.readable().await?)
    }
}

impl<R: Source> RecordReader<R> {
    /// A reader of records of at most `bytes_max` bytes, each of which has `patience` to
    /// arrive once it has begun.
    pub(crate) fn new(source: R, bytes_max: usize, patience: Duration) -> Self {
        Self { source, buffer: BytesMut::new(), bytes_max, patience, deadline: None }
    }

    /// The stream.
    pub(crate) const fn source(&self) -> &R {
        &self.source
    }

    /// The stream, for reading what is no longer looked at.
    pub(crate) fn into_source(self) -> R {
        self.source
    }

    /// The next record if it is in the buffer, whole and in one fragment.
    pub(crate) fn buffered(&mut self) -> Option<Record> {
        let mark = u32::from_be_bytes(*self.buffer.first_chunk::<MARK_BYTES>()?);
        let length = usize::try_from(mark & !LAST_FRAGMENT).ok()?;
        let is_whole = mark & LAST_FRAGMENT != 0
            && (1..=limits::FRAME_BYTES_SMALL.min(self.bytes_max)).contains(&length)
            && self.buffer.len() >= MARK_BYTES + length;
        if !is_whole {
            return None;
        }
        self.buffer.advance(MARK_BYTES);
        Some(Record { bytes: self.buffer.split_to(length).freeze(), charge: None })
    }

    /// The next record, or `None` when the stream ended between records.
    pub(crate) async fn next(
        &mut self,
        budget: &ConnectionBudget,
    ) -> Result<Option<Record>, RecordError> {
        self.deadline = None;
        let mut assembly = Assembly::default();
        loop {
            let Some(mark) = self.mark(assembly.fragments > 0).await? else {
                return Ok(None);
            };
            let is_last = mark & LAST_FRAGMENT != 0;
            let length = usize::try_from(mark & !LAST_FRAGMENT).unwrap_or(usize::MAX);
            assembly.fragments += 1;
            if assembly.fragments > limits::FRAGMENTS_MAX {
                return Err(RecordError::Fragments { limit: limits::FRAGMENTS_MAX });
            }
            let got = assembly.earlier.len().saturating_add(length);
            if got > self.bytes_max {
                return Err(RecordError::TooLong { got, limit: self.bytes_max });
            }
            let fragment = self.fragment(length, is_last, &mut assembly, budget).await?;
            if !is_last {
                assembly.earlier.put(fragment);
                continue;
            }
            let bytes = if assembly.earlier.is_empty() {
                fragment
            } else {
                assembly.earlier.put(fragment);
                assembly.earlier.freeze()
            };
            if bytes.is_empty() {
                return Err(RecordError::Empty);
            }
            return Ok(Some(Record { bytes, charge: assembly.charge }));
        }
    }

    /// The next fragment's mark, or `None` when the stream ends before it and may.
    async fn mark(&mut self, inside_record: bool) -> Result<Option<u32>, RecordError> {
        while self.buffer.len() < MARK_BYTES {
            // Between records a client may be silent as long as it likes.
            if inside_record || !self.buffer.is_empty() {
                self.start_clock();
            }
            let read = self.fill().await?;
            if read == 0 && self.buffer.is_empty() && !inside_record {
                return Ok(None);
            }
            if read == 0 {
                return Err(RecordError::Truncated { expected: MARK_BYTES - self.buffer.len() });
            }
        }
        Ok(Some(self.buffer.get_u32()))
    }

    async fn fragment(
        &mut self,
        length: usize,
        is_last: bool,
        assembly: &mut Assembly,
        budget: &ConnectionBudget,
    ) -> Result<Bytes, RecordError> {
        let small = length.min(limits::FRAME_BYTES_SMALL);
        while self.buffer.len() < small {
            self.start_clock();
            if self.fill().await? == 0 {
                return Err(RecordError::Truncated { expected: length - self.buffer.len() });
            }
        }
        let record_bytes = assembly.earlier.len() + length;
        if record_bytes > limits::FRAME_BYTES_SMALL && assembly.charge.is_none() {
            // How much more will come is known of the last fragment only.
            let bytes = if is_last { record_bytes } else { self.bytes_max };
            let charge = match budget.try_charge(Purpose::Change, bytes) {
                Some(charge) => charge,
                None => charge_unless_gone(&self.source, budget, Purpose::Change, bytes).await?,
            };
            assembly.charge = Some(charge);
            // The wait for others' calls to end is not the client's slowness.
            self.deadline = None;
        }
        if length <= self.buffer.len() {
            return Ok(self.buffer.split_to(length).freeze());
        }
        self.large_fragment(length, budget).await
    }

    async fn large_fragment(
        &mut self,
        length: usize,
        budget: &ConnectionBudget,
    ) -> Result<Bytes, RecordError> {
        self.start_clock();
        let end = self.deadline.unwrap_or_else(Instant::now);
        let mut pace = Pace::new();
        let mut fragment = BytesMut::with_capacity(length);
        fragment.put(&mut self.buffer);
        while fragment.len() < length {
            let expected = length - fragment.len();
            let mut rest = (&mut fragment).limit(expected);
            let look = end.min(pace.next_look());
            let read = match timeout_at(look, self.source.read_buf(&mut rest)).await {
                Ok(read) => match read? {
                    0 => return Err(RecordError::Truncated { expected }),
                    read => read,
                },
                Err(_) if Instant::now() >= end => {
                    return Err(RecordError::TooSlow { limit: self.patience });
                }
                Err(_) => 0,
            };
            if let Some(limit) = pace.moved(read, budget) {
                return Err(RecordError::Slow { limit });
            }
        }
        Ok(fragment.freeze())
    }

    fn start_clock(&mut self) {
        if self.deadline.is_none() {
            self.deadline = Some(Instant::now() + self.patience);
        }
    }

    /// Reads what is there into the buffer; 0 at the end of the stream.
    async fn fill(&mut self) -> Result<usize, RecordError> {
        if self.buffer.capacity() - self.buffer.len() < limits::READ_BUFFER_SPARE_BYTES {
            self.buffer.reserve(limits::READ_BUFFER_BYTES);
        }
        in_time(self.deadline, self.patience, self.source.read_buf(&mut self.buffer)).await
    }
}

async fn in_time(
    deadline: Option<Instant>,
    limit: Duration,
    read: impl Future<Output = io::Result<usize>>,
) -> Result<usize, RecordError> {
    match deadline {
        None => Ok(read.await?),
        Some(deadline) => match timeout_at(deadline, read).await {
            Ok(read) => Ok(read?),
            Err(_) => Err(RecordError::TooSlow { limit }),
        },
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;
    use std::sync::Arc;

    use tokio::io::AsyncWriteExt;

    use crate::budget::Budget;
    use crate::metrics::NfsMetrics;

    const PATIENCE: Duration = Duration::from_secs(5);

    impl Source for tokio::io::DuplexStream {
        fn is_gone(&self) -> bool {
            false
        }
    }

    fn budget() -> ConnectionBudget {
        Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::new(NfsMetrics::new())).connection()
    }

    fn fragment(bytes: &[u8], is_last: bool) -> Vec<u8> {
        let mark = u32::try_from(bytes.len()).unwrap() | if is_last { LAST_FRAGMENT } else { 0 };
        [&mark.to_be_bytes(), bytes].concat()
    }

    async fn read_all(stream: &[u8], cuts: &[usize]) -> Result<Vec<Vec<u8>>, RecordError> {
        let (mut client, server) = tokio::io::duplex(64 << 10);
        let mut reader = RecordReader::new(server, limits::FRAME_BYTES_MAX, PATIENCE);
        let (stream, cuts) = (stream.to_vec(), cuts.to_vec());
        let writer = tokio::spawn(async move {
            let mut start = 0;
            for cut in cuts.into_iter().chain([stream.len()]) {
                if client.write_all(&stream[start..cut]).await.is_err() {
                    return;
                }
                tokio::task::yield_now().await;
                start = cut;
            }
        });
        let budget = budget();
        let mut records = Vec::new();
        let outcome = loop {
            match reader.next(&budget).await {
                Ok(Some(record)) => records.push(record.bytes.to_vec()),
                Ok(None) => break Ok(records),
                Err(error) => break Err(error),
            }
        };
        drop(reader);
        writer.await.unwrap();
        outcome
    }

    #[tokio::test]
    async fn records_split_at_every_byte_come_out_whole() {
        let stream = [fragment(b"first", true), fragment(b"2", true), fragment(b"third", true)];
        let stream = stream.concat();
        for cut in 0..=stream.len() {
            let records = read_all(&stream, &[cut]).await.unwrap();
            assert_eq!(records, [&b"first"[..], b"2", b"third"], "cut at {cut}");
        }
        let every_byte: Vec<usize> = (0..stream.len()).collect();
        assert_eq!(read_all(&stream, &every_byte).await.unwrap().len(), 3);
    }

    #[tokio::test]
    async fn whole_small_records_are_taken_from_the_buffer() {
        let large = vec![7; limits::FRAME_BYTES_SMALL + 1];
        let records = [
            fragment(b"first", true),
            fragment(b"second", true),
            fragment(&[1; limits::FRAME_BYTES_SMALL - 100], true),
        ];
        let left_to_next =
            [fragment(b"cut", false), fragment(b"", true), fragment(&large, true), vec![0x80, 0]];
        for rest in left_to_next {
            let stream = [records.concat(), rest.clone()].concat();
            let (mut client, server) = tokio::io::duplex(128 << 10);
            client.write_all(&stream).await.unwrap();
            let mut reader = RecordReader::new(server, limits::FRAME_BYTES_MAX, PATIENCE);
            let budget = budget();
            assert!(reader.buffered().is_none(), "nothing was read yet");
            for record in &records {
                let taken = match reader.buffered() {
                    Some(record) => record,
                    None => reader.next(&budget).await.unwrap().unwrap(),
                };
                assert!(taken.bytes == record[MARK_BYTES..]);
            }
            assert!(reader.buffered().is_none(), "{:?}", &rest[..2]);
        }
        let (mut client, server) = tokio::io::duplex(1024);
        client.write_all(&records[..2].concat()).await.unwrap();
        let mut reader = RecordReader::new(server, limits::FRAME_BYTES_MAX, PATIENCE);
        assert_eq!(reader.next(&budget()).await.unwrap().unwrap().bytes, "first");
        assert_eq!(reader.buffered().unwrap().bytes, "second");
    }

    #[tokio::test]
    async fn fragments_are_joined() {
        let stream = [
            fragment(b"ab", false),
            fragment(b"", false),
            fragment(b"cd", false),
            fragment(b"", true),
            fragment(b"ef", true),
        ];
        let stream = stream.concat();
        for cut in 0..=stream.len() {
            let records = read_all(&stream, &[cut]).await.unwrap();
            assert_eq!(records, [&b"abcd"[..], b"ef"], "cut at {cut}");
        }
    }

    #[tokio::test]
    async fn large_records_arrive_whole_in_one_fragment_or_many() {
        let large: Vec<u8> = (0..251).cycle().take(limits::FRAME_BYTES_MAX).collect();
        let whole = fragment(&large, true);
        let after = fragment(b"after", true);
        let records = read_all(&[whole, after.clone()].concat(), &[]).await.unwrap();
        assert_eq!(records, [large.clone(), b"after".to_vec()]);
        let mut pieces: Vec<u8> =
            large.chunks(9000).flat_map(|piece| fragment(piece, false)).collect();
        pieces.extend(fragment(b"", true));
        pieces.extend(after);
        assert_eq!(read_all(&pieces, &[]).await.unwrap(), [large, b"after".to_vec()]);
    }

    #[tokio::test]
    async fn an_oversized_mark_is_refused_before_its_bytes_come() {
        let mark = (0x7fff_ffff_u32 | LAST_FRAGMENT).to_be_bytes();
        let error = read_all(&mark, &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::TooLong { got: 0x7fff_ffff, .. }), "{error}");
        let one_over = vec![0; limits::FRAME_BYTES_MAX - 1];
        let stream = [fragment(&one_over, false), fragment(b"xy", true)].concat();
        let error = read_all(&stream, &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::TooLong { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_stream_that_ends_inside_a_record_is_an_error() {
        let stream = fragment(b"whole", true);
        for end in 1..stream.len() {
            let error = read_all(&stream[..end], &[]).await.unwrap_err();
            assert!(matches!(error, RecordError::Truncated { .. }), "{end}: {error}");
        }
        let error = read_all(&fragment(b"more follows", false), &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::Truncated { expected: 4 }), "{error}");
        assert_eq!(read_all(&[], &[]).await.unwrap(), Vec::<Vec<u8>>::new());
    }

    #[tokio::test]
    async fn empty_fragments_without_end_are_refused() {
        let stream = fragment(b"", false).repeat(limits::FRAGMENTS_MAX + 1);
        let error = read_all(&stream, &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::Fragments { .. }), "{error}");
        let error = read_all(&fragment(b"", true), &[]).await.unwrap_err();
        assert!(matches!(error, RecordError::Empty), "{error}");
    }

    #[tokio::test]
    async fn a_record_that_stops_arriving_is_given_up() {
        let (mut client, server) = tokio::io::duplex(64);
        let patience = Duration::from_millis(20);
        let mut reader = RecordReader::new(server, limits::FRAME_BYTES_MAX, patience);
        client.write_all(&fragment(b"half", true)[..6]).await.unwrap();
        let error = reader.next(&budget()).await.unwrap_err();
        assert!(matches!(error, RecordError::TooSlow { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_large_record_is_charged_when_its_bytes_come_not_by_its_mark() {
        let metrics = Arc::new(NfsMetrics::new());
        let budget = Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::clone(&metrics));
        let connection = budget.connection();
        let (mut client, server) = tokio::io::duplex(2 << 20);
        let mut reader =
            RecordReader::new(server, limits::FRAME_BYTES_MAX, Duration::from_millis(20));
        let record = fragment(&vec![7; 1 << 20], true);
        client.write_all(&record[..1000]).await.unwrap();
        assert!(reader.next(&connection).await.is_err());
        assert_eq!(metrics.snapshot().bytes_in_flight, 0);

        let (mut client, server) = tokio::io::duplex(2 << 20);
        let mut reader = RecordReader::new(server, limits::FRAME_BYTES_MAX, PATIENCE);
        client.write_all(&record).await.unwrap();
        let record = reader.next(&connection).await.unwrap().unwrap();
        assert_eq!(metrics.snapshot().bytes_in_flight, 1 << 20);
        drop(record);
        assert_eq!(metrics.snapshot().bytes_in_flight, 0);
    }
}

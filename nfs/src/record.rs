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
use tokio::time::{Instant, timeout, timeout_at};

use crate::budget::{Charge, ConnectionBudget, Purpose};
use crate::limits;
use crate::pace::Pace;
use crate::transport::ReadHalf;
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
    /// The client closed its end before one of its calls was begun.
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

impl Source for ReadHalf {
    fn is_gone(&self) -> bool {
        is_gone(self.socket())
    }
}

/// Whether the other end of the connection was closed, whatever is still to be read.
pub(crate) fn is_gone(stream: &TcpStream) -> bool {
    let mut asked = [PollFd::new(stream, PollFlags::RDHUP)];
    // Where it cannot be told the client counts as there: its call is answered in vain.
    poll(&mut asked, Some(&Timespec::default())).is_ok_and(|found| found > 0)
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
#[derive(Debug)]
struct Assembly<'a> {
    earlier: BytesMut,
    fragments: usize,
    budget: &'a ConnectionBudget,
    held: Option<Held>,
}

/// What a large record holds, from its charge on until it is whole.
#[derive(Debug)]
struct Held {
    charge: Charge,
    pace: Pace,
}

impl<'a> Assembly<'a> {
    fn new(budget: &'a ConnectionBudget) -> Self {
        Self { earlier: BytesMut::new(), fragments: 0, budget, held: None }
    }
}

impl RecordReader<ReadHalf> {
    /// Completes when the first bytes are there, or the end; they have so much time.
    pub(crate) async fn begun(&self, within: Duration) -> Result<(), RecordError> {
        if !self.buffer.is_empty() {
            return Ok(());
        }
        let begun = timeout(within, self.source.readable()).await;
        Ok(begun.map_err(|_| RecordError::TooSlow { limit: within })??)
    }
}

impl<R: Source> RecordReader<R> {
    /// A reader of records of at most `bytes_max` bytes, each of which has `patience` to
    /// arrive once it has begun. What was read of the first is in `buffer`.
    pub(crate) fn new(source: R, buffer: BytesMut, bytes_max: usize, patience: Duration) -> Self {
        Self { source, buffer, bytes_max, patience, deadline: None }
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
        self.assemble(budget).await
    }

    /// The same of the first one, which has no longer than `within` to come, or to have its memory. The
    /// wait for that memory does not count; afterwards it has as long again.
    pub(crate) async fn first(
        &mut self,
        budget: &ConnectionBudget,
        within: Duration,
    ) -> Result<Option<Record>, RecordError> {
        let patience = self.patience;
        self.patience = patience.min(within);
        self.deadline = None;
        self.start_clock();
        let first = self.assemble(budget).await;
        self.patience = patience;
        first
    }

    async fn assemble(&mut self, budget: &ConnectionBudget) -> Result<Option<Record>, RecordError> {
        let mut assembly = Assembly::new(budget);
        loop {
            let Some(mark) = self.mark(&mut assembly).await? else {
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
            let fragment = self.fragment(length, is_last, &mut assembly).await?;
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
            let charge = assembly.held.map(|held| held.charge);
            return Ok(Some(Record { bytes, charge }));
        }
    }

    /// The next fragment's mark, or `None` when the stream ends before it and may.
    async fn mark(&mut self, assembly: &mut Assembly<'_>) -> Result<Option<u32>, RecordError> {
        let inside_record = assembly.fragments > 0;
        while self.buffer.len() < MARK_BYTES {
            // Between records a client may be silent as long as it likes.
            if inside_record || !self.buffer.is_empty() {
                self.start_clock();
            }
            let read = self.fill(assembly).await?;
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
        assembly: &mut Assembly<'_>,
    ) -> Result<Bytes, RecordError> {
        let small = length.min(limits::FRAME_BYTES_SMALL);
        while self.buffer.len() < small {
            self.start_clock();
            if self.fill(assembly).await? == 0 {
                return Err(RecordError::Truncated { expected: length - self.buffer.len() });
            }
        }
        let record_bytes = assembly.earlier.len() + length;
        if record_bytes > limits::FRAME_BYTES_SMALL && assembly.held.is_none() {
            // How much more will come is known of the last fragment only.
            let bytes = if is_last { record_bytes } else { self.bytes_max };
            let budget = assembly.budget;
            let charge = match budget.try_charge(Purpose::Change, bytes) {
                Some(charge) => charge,
                None => charge_unless_gone(&self.source, budget, Purpose::Change, bytes).await?,
            };
            assembly.held = Some(Held { charge, pace: Pace::new() });
            // The wait for others' calls to end is not the client's slowness.
            self.deadline = None;
        }
        if length <= self.buffer.len() {
            return Ok(self.buffer.split_to(length).freeze());
        }
        self.large_fragment(length, assembly).await
    }

    async fn large_fragment(
        &mut self,
        length: usize,
        assembly: &mut Assembly<'_>,
    ) -> Result<Bytes, RecordError> {
        self.start_clock();
        let mut fragment = BytesMut::with_capacity(length);
        fragment.put(&mut self.buffer);
        while fragment.len() < length {
            let expected = length - fragment.len();
            let mut rest = (&mut fragment).limit(expected);
            let clock = (self.deadline, self.patience);
            if read_more(&mut self.source, &mut rest, clock, assembly).await? == 0 {
                return Err(RecordError::Truncated { expected });
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
    async fn fill(&mut self, assembly: &mut Assembly<'_>) -> Result<usize, RecordError> {
        if self.buffer.capacity() - self.buffer.len() < limits::READ_BUFFER_SPARE_BYTES {
            self.buffer.reserve(limits::READ_BUFFER_BYTES);
        }
        let clock = (self.deadline, self.patience);
        read_more(&mut self.source, &mut self.buffer, clock, assembly).await
    }
}

/// Waits for more bytes, until the deadline of the clock (and the patience that it stands for), and
/// no longer than the pace allows a record that holds memory; 0 at the end of the stream.
async fn read_more(
    source: &mut impl Source,
    buffer: &mut impl BufMut,
    (deadline, patience): (Option<Instant>, Duration),
    assembly: &mut Assembly<'_>,
) -> Result<usize, RecordError> {
    let Some(Held { pace, .. }) = &mut assembly.held else {
        return in_time(deadline, patience, source.read_buf(buffer)).await;
    };
    loop {
        if let Some(limit) = pace.broken(assembly.budget) {
            return Err(RecordError::Slow { limit });
        }
        let look = deadline.map_or(pace.next_look(), |end| end.min(pace.next_look()));
        match timeout_at(look, source.read_buf(buffer)).await {
            Ok(read) => {
                let read = read?;
                pace.moved(read);
                return Ok(read);
            }
            Err(_) if deadline.is_some_and(|end| Instant::now() >= end) => {
                return Err(RecordError::TooSlow { limit: patience });
            }
            Err(_) => {}
        }
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
mod tests;

//! The outlet of a connection: whoever has a reply sends it at once; a writer sends what the
//! socket had no room for.
//!
//! ```text
//! reader ---- replies of a burst --+--> nobody sends? -- yes --> socket, one call for many
//! lane thread ------ its reply ----+         | no                   | no room
//!                                            v                      v
//!                                         waiting <-------- the writer takes over
//! ```
//! Invariants: one at a time sends, and without the outlet's lock held; replies that come meanwhile wait,
//! and whoever sends takes them along. Nobody but the writer ever waits for the socket. What
//! waits is bounded by the budget: each reply holds its call's charge until it is written.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::coop;
use tokio::time::{Instant, timeout_at};

use crate::budget::{Charge, ConnectionBudget};
use crate::dispatch::Finished;
use crate::limits;
use crate::pace::Pace;
use crate::transport::WriteHalf;

/// A reply on its way, with what its call was charged.
#[derive(Debug)]
pub(crate) struct Reply {
    finished: Finished,
    /// Given back when the last byte is with the system.
    _charge: Charge,
}

impl Reply {
    /// A reply to a call that was charged so.
    pub(crate) const fn new(finished: Finished, charge: Charge) -> Self {
        Self { finished, _charge: charge }
    }

    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let pieces = self.finished.pieces.iter().map(Bytes::as_ref);
        std::iter::once(self.finished.head.as_slice()).chain(pieces)
    }

    /// Its bytes on the wire.
    pub(crate) fn length(&self) -> usize {
        self.parts().map(<[u8]>::len).sum()
    }
}

/// Why replies cannot be sent on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The client does not read.
    #[error("the client took no byte of its replies in {} s", limit.as_secs())]
    Stalled {
        /// The time it had.
        limit: Duration,
    },
    /// The client reads slowly what others wait for the memory of.
    #[error("the client took less than {} bytes of its replies in {} s, and calls of others wait for their memory", limits::PRESSED_BYTES_MIN, limit.as_secs())]
    Slow {
        /// The time it had.
        limit: Duration,
    },
    /// Writing failed.
    #[error("write: {0}")]
    Io(#[from] io::Error),
}

/// Replies that are to be sent, in order.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that were sent already.
    sent_bytes: usize,
    /// Bytes of all replies, those included.
    bytes: usize,
}

impl Outgoing {
    /// Adds a reply behind the others.
    pub(crate) fn push(&mut self, reply: Reply) {
        self.bytes += reply.length();
        self.replies.push_back(reply);
    }

    /// Whether this is enough for one call to the system.
    pub(crate) fn is_batch(&self) -> bool {
        self.bytes >= limits::BATCH_BYTES || self.replies.len() >= limits::BATCH_REPLIES
    }

    fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// Bytes that are still to be sent.
    const fn rest_bytes(&self) -> usize {
        self.bytes - self.sent_bytes
    }

    fn clear(&mut self) {
        *self = Self::default();
    }

    /// Adds the replies of another, none of which was begun.
    fn append(&mut self, other: &mut Self) {
        debug_assert_eq!(other.sent_bytes, 0, "what was begun is sent by who began it");
        self.replies.append(&mut other.replies);
        self.bytes += mem::take(&mut other.bytes);
    }

    /// Offers what comes first to the socket, which takes as much as it has room for.
    fn offer(&self, socket: &WriteHalf) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); limits::WRITE_PARTS_MAX];
        let mut count = 0;
        let mut skip = self.sent_bytes;
        let parts = self.replies.iter().flat_map(Reply::parts).filter_map(|part| {
            let rest = part.get(skip..).unwrap_or_default();
            skip = skip.saturating_sub(part.len());
            (!rest.is_empty()).then_some(rest)
        });
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
            count += 1;
        }
        socket.try_write_vectored(slices.get(..count).unwrap_or_default())
    }

    /// Forgets `count` more bytes, which were sent.
    fn advance(&mut self, count: usize) {
        self.sent_bytes += count;
        while let Some(length) = self.replies.front().map(Reply::length)
            && length <= self.sent_bytes
        {
            self.sent_bytes -= length;
            self.bytes -= length;
            self.replies.pop_front();
        }
    }

    /// Sends until nothing is left, not even encrypted. When the socket has no room, or has taken
    /// [`limits::SEND_BYTES_MAX`]: `false`.
    fn send_to(&mut self, socket: &WriteHalf) -> io::Result<bool> {
        let begun_with = self.rest_bytes();
        while !self.is_empty() {
            if begun_with - self.rest_bytes() >= limits::SEND_BYTES_MAX {
                return Ok(false);
            }
            match self.offer(socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.advance(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        socket.flush()
    }
}

/// Who sends at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sending {
    /// Nobody: nothing waits.
    #[default]
    Nobody,
    /// The thread that made a reply.
    Maker,
    /// The writer.
    Writer,
}

#[derive(Debug, Default)]
struct State {
    sending: Sending,
    /// Empty when nobody sends.
    waiting: Outgoing,
    /// No more replies come.
    is_finished: bool,
    /// The client is gone or goes: what it asked before may be dropped. Replies are sent.
    is_abandoned: bool,
    /// The connection is gone: replies are dropped.
    is_broken: bool,
    /// Why, until the writer has told it.
    failure: Option<io::Error>,
}

/// The sending end of a connection. The writer ends when the last clone is gone and all that
/// was sent is with the system.
#[derive(Clone, Debug)]
pub(crate) struct Outlet(Arc<OpenOutlet>);

#[derive(Debug)]
struct OpenOutlet(Arc<Core>);

#[derive(Debug)]
struct Core {
    socket: WriteHalf,
    state: Mutex<State>,
    /// Has the writer look at the state.
    changed: Notify,
}

impl Drop for OpenOutlet {
    fn drop(&mut self) {
        self.0.state.lock().is_finished = true;
        self.0.changed.notify_one();
    }
}

/// Sends what the socket had no room for, and closes it in the end.
#[derive(Debug)]
pub(crate) struct Writer {
    core: Arc<Core>,
    patience: Duration,
    budget: Arc<ConnectionBudget>,
    /// All was sent.
    is_done: bool,
}

/// The two sides of an outlet. The client has `patience` to take some of what waits for it, and
/// less when others want the memory that its replies hold, which `budget` tells.
pub(crate) fn outlet(
    socket: WriteHalf,
    patience: Duration,
    budget: Arc<ConnectionBudget>,
) -> (Outlet, Writer) {
    let core = Arc::new(Core { socket, state: Mutex::default(), changed: Notify::new() });
    let writer = Writer { core: Arc::clone(&core), patience, budget, is_done: false };
    (Outlet(Arc::new(OpenOutlet(core))), writer)
}

impl Outlet {
    /// Sends the replies, without waiting for the client; those of a connection that is gone
    /// are dropped. Nothing is left in `replies`.
    pub(crate) fn send(&self, replies: &mut Outgoing) {
        let core = &*self.0.0;
        if replies.is_empty() || !core.begin(replies) {
            return;
        }
        for _ in 0..limits::SEND_ROUNDS_MAX {
            let sent = replies.send_to(&core.socket);
            if !core.go_on(replies, sent) {
                return;
            }
        }
        core.hand_over(replies);
    }

    /// Sends one reply.
    pub(crate) fn send_one(&self, reply: Reply) {
        let mut replies = Outgoing::default();
        replies.push(reply);
        self.send(&mut replies);
    }

    /// Notes that the client has ended the connection, or is about to lose it.
    pub(crate) fn abandon(&self) {
        self.0.0.state.lock().is_abandoned = true;
    }

    /// Whether the client may have given up what it asked by this connection, and have asked for
    /// it by another.
    pub(crate) fn is_abandoned(&self) -> bool {
        let state = self.0.0.state.lock();
        state.is_abandoned || state.is_broken
    }
}

impl Core {
    /// Whether the caller is to send; otherwise the replies are taken off him.
    fn begin(&self, replies: &mut Outgoing) -> bool {
        let mut state = self.state.lock();
        if state.is_broken {
            drop(state);
            replies.clear();
            return false;
        }
        match state.sending {
            Sending::Nobody => {
                state.sending = Sending::Maker;
                true
            }
            Sending::Maker | Sending::Writer => {
                state.waiting.append(replies);
                false
            }
        }
    }

    /// After a maker has sent what it could: whether it is to send more, which then is in
    /// `replies`.
    fn go_on(&self, replies: &mut Outgoing, sent: io::Result<bool>) -> bool {
        match sent {
            Ok(true) => {
                let mut state = self.state.lock();
                if state.waiting.is_empty() {
                    state.sending = Sending::Nobody;
                    return false;
                }
                mem::swap(replies, &mut state.waiting);
                true
            }
            Ok(false) => {
                self.hand_over(replies);
                false
            }
            Err(error) => {
                replies.clear();
                self.break_off(Some(error));
                false
            }
        }
    }

    /// Leaves the replies, and those that came meanwhile, to the writer.
    fn hand_over(&self, replies: &mut Outgoing) {
        {
            let mut state = self.state.lock();
            if state.is_broken {
                drop(state);
                return replies.clear();
            }
            let state = &mut *state;
            replies.append(&mut state.waiting);
            mem::swap(replies, &mut state.waiting);
            state.sending = Sending::Writer;
        }
        self.changed.notify_one();
    }

    /// Drops what waits and what still comes.
    fn break_off(&self, failure: Option<io::Error>) {
        let dropped = {
            let mut state = self.state.lock();
            state.is_broken = true;
            state.failure = failure;
            mem::take(&mut state.waiting)
        };
        drop(dropped);
        self.changed.notify_one();
    }
}

/// What the writer is to do.
enum Turn {
    Send,
    Wait,
    End,
}

impl Writer {
    /// Sends what is handed over until the outlet is gone, then closes the socket for sending.
    pub(crate) async fn run(mut self) -> Result<(), WriteError> {
        let mut replies = Outgoing::default();
        loop {
            match self.turn(&mut replies)? {
                Turn::Send => self.send_all(&mut replies).await?,
                Turn::Wait => self.core.changed.notified().await,
                Turn::End => break,
            }
        }
        // Without room for the end, it goes as replies do.
        self.core.socket.close();
        self.send_all(&mut replies).await?;
        self.is_done = true;
        Ok(self.core.socket.shut()?)
    }

    fn turn(&self, replies: &mut Outgoing) -> io::Result<Turn> {
        let mut state = self.core.state.lock();
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        if state.sending == Sending::Writer {
            if !state.waiting.is_empty() || self.core.socket.has_unsent() {
                mem::swap(replies, &mut state.waiting);
                return Ok(Turn::Send);
            }
            state.sending = Sending::Nobody;
        }
        let is_end = state.is_finished && state.sending == Sending::Nobody;
        Ok(if is_end { Turn::End } else { Turn::Wait })
    }

    async fn send_all(&self, replies: &mut Outgoing) -> Result<(), WriteError> {
        let mut pace = Pace::new();
        let mut last_progress = Instant::now();
        loop {
            let before = (replies.rest_bytes(), self.core.socket.encrypted_bytes());
            if replies.send_to(&self.core.socket)? {
                return Ok(());
            }
            // What was encrypted before may be all that moves.
            let encrypted = self.core.socket.encrypted_bytes() - before.1;
            let sent = encrypted.max(before.0 - replies.rest_bytes());
            take_turns(sent).await;
            if sent > 0 {
                last_progress = Instant::now();
            }
            pace.moved(sent);
            if let Some(limit) = pace.broken(&self.budget)
                && !replies.is_empty()
            {
                return Err(WriteError::Slow { limit });
            }
            let end = last_progress + self.patience;
            match timeout_at(end.min(pace.next_look()), self.core.socket.writable()).await {
                Ok(ready) => ready?,
                Err(_) if Instant::now() >= end => {
                    return Err(WriteError::Stalled { limit: self.patience });
                }
                Err(_) => {}
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Also when its task is cut off: what lanes still answer has nowhere to go.
        self.core.break_off(None);
        if !self.is_done {
            // A lane that still has a call of this connection keeps the socket open; the client
            // is to learn of the end now.
            self.core.socket.cut_off();
        }
    }
}

/// Gives the others on this thread their turn after so many bytes: copying those to the system is
/// most of the work.
pub(crate) async fn take_turns(bytes: usize) {
    for _ in 0..=bytes / limits::BATCH_BYTES {
        coop::consume_budget().await;
    }
}

#[cfg(test)]
mod tests;

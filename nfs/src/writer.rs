//! The writer of a connection: sends replies as they become ready, several with one system
//! call, none of their payload copied.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio::task::coop;
use tokio::time::timeout;

use crate::budget::Charge;
use crate::dispatch::Finished;
use crate::limits;

/// A reply on its way, with what its call was charged.
#[derive(Debug)]
pub(crate) struct Reply {
    /// Its bytes.
    pub(crate) finished: Finished,
    /// Given back when the last byte is with the system.
    pub(crate) charge: Charge,
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
    /// Writing failed.
    #[error("write: {0}")]
    Io(#[from] io::Error),
}

/// A piece of a reply; the last one carries the charge.
#[derive(Debug)]
struct Part {
    bytes: Bytes,
    charge: Option<Charge>,
}

/// What is to be written, in order.
#[derive(Debug, Default)]
struct Outgoing {
    parts: VecDeque<Part>,
}

impl Outgoing {
    fn push(&mut self, reply: Reply) {
        let Finished { head, pieces } = reply.finished;
        let bytes = std::iter::once(head).chain(pieces).filter(|bytes| !bytes.is_empty());
        self.parts.extend(bytes.map(|bytes| Part { bytes, charge: None }));
        if let Some(last) = self.parts.back_mut() {
            last.charge = Some(reply.charge);
        }
    }

    /// Offers the first parts to the socket, which takes as much as it has room for.
    fn offer(&self, socket: &OwnedWriteHalf) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); limits::WRITE_PARTS_MAX];
        let mut count = 0;
        for (slice, part) in slices.iter_mut().zip(&self.parts) {
            *slice = IoSlice::new(&part.bytes);
            count += 1;
        }
        socket.try_write_vectored(slices.get(..count).unwrap_or_default())
    }

    /// Forgets the first `count` bytes, which were written.
    fn advance(&mut self, mut count: usize) {
        while let Some(part) = self.parts.front_mut() {
            if count < part.bytes.len() {
                part.bytes.advance(count);
                return;
            }
            count -= part.bytes.len();
            self.parts.pop_front();
        }
    }
}

/// Sends the replies of `queue` until it is closed and empty.
pub(crate) async fn run(
    mut socket: OwnedWriteHalf,
    mut queue: mpsc::Receiver<Reply>,
    patience: Duration,
) -> Result<(), WriteError> {
    let mut outgoing = Outgoing::default();
    while let Some(reply) = queue.recv().await {
        outgoing.push(reply);
        while !outgoing.parts.is_empty() {
            while outgoing.parts.len() < limits::WRITE_PARTS_MAX
                && let Ok(reply) = queue.try_recv()
            {
                outgoing.push(reply);
            }
            write_some(&socket, &mut outgoing, patience).await?;
            coop::consume_budget().await;
        }
    }
    Ok(socket.shutdown().await?)
}

async fn write_some(
    socket: &OwnedWriteHalf,
    outgoing: &mut Outgoing,
    patience: Duration,
) -> Result<(), WriteError> {
    loop {
        match outgoing.offer(socket) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Ok(count) => {
                outgoing.advance(count);
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                match timeout(patience, socket.writable()).await {
                    Ok(ready) => ready?,
                    Err(_) => return Err(WriteError::Stalled { limit: patience }),
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

//! A stream whose patience with its peer has an end.
//!
//! Two waits are not bounded by hyper: the one for the first bytes, by which it tells HTTP/1
//! from HTTP/2, and the one for a peer that takes no bytes. Reads in the middle of a connection
//! may be silent for long (while a check of the store runs, say) and are left alone.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Longest wait for the first bytes of a connection.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(10);

/// Length of the text with which HTTP/2 begins (RFC 9113 section 3.4): with as many bytes the
/// version is known.
const FIRST_BYTES: usize = 24;

/// Longest wait for the peer to take bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

/// A stream that fails where its peer makes it wait too long.
pub(crate) struct Patient<S> {
    stream: S,
    /// First bytes that have not come yet, and the end of the wait for them.
    missing: usize,
    opening: Pin<Box<Sleep>>,
    /// The end of the wait for a write; counts while one waits.
    writing: Pin<Box<Sleep>>,
    write_waits: bool,
    write_timeout: Duration,
}

impl<S> Patient<S> {
    /// The stream of a connection that has just begun.
    pub(crate) fn new(stream: S) -> Self {
        Self::with_timeouts(stream, FIRST_BYTES_TIMEOUT, WRITE_TIMEOUT)
    }

    fn with_timeouts(stream: S, first_bytes_timeout: Duration, write_timeout: Duration) -> Self {
        Self {
            stream,
            missing: FIRST_BYTES,
            opening: Box::pin(tokio::time::sleep(first_bytes_timeout)),
            writing: Box::pin(tokio::time::sleep(write_timeout)),
            write_waits: false,
            write_timeout,
        }
    }

    /// Passes on the outcome of a write, or fails when it has waited too long.
    fn bounded<T>(
        &mut self,
        outcome: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.write_waits = false;
            return outcome;
        }
        if !self.write_waits {
            self.write_waits = true;
            let end = Instant::now() + self.write_timeout;
            self.writing.as_mut().reset(end);
        }
        ready!(self.writing.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        if self.missing == 0 {
            return outcome;
        }
        match outcome {
            Poll::Ready(outcome) => {
                let come = buffer.filled().len() - before;
                self.missing = self.missing.saturating_sub(come);
                Poll::Ready(outcome)
            }
            Poll::Pending => {
                ready!(self.opening.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer sends nothing")))
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(outcome, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.bounded(outcome, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.bounded(outcome, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(context);
        self.bounded(outcome, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn a_peer_that_sends_nothing_is_left() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = Patient::with_timeouts(near, SHORT, SHORT);
        far.write_all(b"GET").await.unwrap();
        let mut bytes = [0; 3];
        near.read_exact(&mut bytes).await.unwrap();
        let error = near.read_exact(&mut bytes).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_peer_may_be_silent_once_it_has_begun() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = Patient::with_timeouts(near, SHORT, SHORT);
        far.write_all(&[b'x'; FIRST_BYTES]).await.unwrap();
        let mut bytes = [0; FIRST_BYTES];
        near.read_exact(&mut bytes).await.unwrap();
        let silence = tokio::time::timeout(SHORT * 5, near.read_exact(&mut bytes));
        assert!(silence.await.is_err(), "the read goes on waiting");
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_left() {
        let (near, mut far) = tokio::io::duplex(4);
        let mut near = Patient::with_timeouts(near, SHORT, SHORT);
        near.write_all(b"1234").await.unwrap();
        let mut two = [0; 2];
        far.read_exact(&mut two).await.unwrap();
        let error = near.write_all(b"567890").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

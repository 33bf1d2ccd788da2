//! The two ends of a connection, in plain text or in TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::client_certificate::Shown;
use crate::tls::{TlsReadHalf, TlsSession};

/// Where calls come from.
#[derive(Debug)]
pub(crate) enum ReadHalf {
    /// In plain text.
    Plain(OwnedReadHalf),
    /// In TLS.
    Tls(TlsReadHalf),
}

impl ReadHalf {
    /// The socket.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(source) => source.as_ref(),
            Self::Tls(source) => source.source().as_ref(),
        }
    }

    /// Completes when there is something to read, or the end.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Plain(source) => source.readable().await,
            Self::Tls(source) => source.readable().await,
        }
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(source) => Pin::new(source).poll_read(context, buffer),
            Self::Tls(source) => Pin::new(source).poll_read(context, buffer),
        }
    }
}

/// Where replies go.
#[derive(Debug)]
pub(crate) enum WriteHalf {
    /// In plain text.
    Plain(OwnedWriteHalf),
    /// In TLS.
    Tls(Arc<TlsSession>),
}

impl WriteHalf {
    /// Takes what comes first of the parts, as much as there is room for: the count of its bytes.
    ///
    /// # Errors
    /// `WouldBlock` when there is room for nothing; else the connection is of no more use.
    pub(crate) fn try_write_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.try_write_vectored(parts),
            Self::Tls(session) => session.try_write_vectored(parts),
        }
    }

    /// What the client has shown of who it is, before its first call.
    pub(crate) fn shown(&self) -> Shown {
        match self {
            Self::Plain(_) => Shown::NotAsked,
            Self::Tls(session) => session.shown(),
        }
    }

    /// Gives the system all that was taken; `false` when it has no room for all.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Tls(session) => session.flush(),
        }
    }

    /// Whether something that was taken is still to be given to the system.
    pub(crate) fn has_unsent(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(session) => session.has_unsent(),
        }
    }

    /// Completes when the socket may have room.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        self.socket().writable().await
    }

    /// Tells the client within TLS that nothing more comes, by what is then to be flushed.
    pub(crate) fn close(&self) {
        if let Self::Tls(session) = self {
            session.close();
        }
    }

    /// Bytes that TLS gave to the system so far.
    pub(crate) fn encrypted_bytes(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Tls(session) => session.sent_bytes(),
        }
    }

    /// Sends no more.
    pub(crate) fn shut(&self) -> io::Result<()> {
        match shutdown(self.tcp(), Shutdown::Write) {
            // The client was faster.
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends both directions at once.
    pub(crate) fn cut_off(&self) {
        // That fails if the client knows already.
        let _ = shutdown(self.tcp(), Shutdown::Both);
    }

    fn socket(&self) -> &OwnedWriteHalf {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(session) => session.socket(),
        }
    }

    fn tcp(&self) -> &TcpStream {
        self.socket().as_ref()
    }
}

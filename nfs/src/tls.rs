//! One connection in TLS: what is sent is encrypted, and what is received decrypted, on the way between the connection
//! and its socket.
//!
//! ```text
//! outlet ---- replies --> [ session ] --> socket        the thread that has a reply encrypts it
//! reader <---- calls ---- [ (lock)  ] <-- socket        the reader decrypts
//! ```
//! Both sides share one session of rustls, which waits for nothing: the lock is held for as long as it takes to encrypt
//! or decrypt what is at hand, which is bounded by [`limits::TLS_BUFFER_BYTES`]. So all of a connection's cryptography
//! is done by one processor at a time.
//!
//! Invariant: nothing is encrypted while something that was encrypted before is unsent, so that no more than that waits
//! in a session.
#![deny(clippy::indexing_slicing)]

use std::fmt;
use std::io::{self, BufRead, ErrorKind, IoSlice, Write};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ServerConfig, ServerConnection};
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::client_certificate::{self, Shown};
use crate::limits;

/// The protocol in TLS, as clients name it (RFC 9289 section 8.2).
const ALPN: &[u8] = b"sunrpc";

/// What is asked of the clients on other machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// Nothing: those that ask for TLS get it.
    Offered,
    /// To ask for it: their calls in plain text are refused.
    Required,
    /// To show, in TLS, a certificate of one of these authorities. One that names a worker reaches what that worker
    /// mounts ([`crate::MountScope::Worker`]), and one that names none the whole export. In plain text they may mount, as
    /// Linux's client does it so, and call nothing of NFS.
    Mutual(Vec<CertificateDer<'static>>),
}

/// The policy, without the authorities that are in the configuration of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    Nothing,
    Tls,
    Certificate,
}

/// Why there can be no TLS on NFS.
#[derive(Debug, thiserror::Error)]
pub enum NfsTlsError {
    /// The server's certificate and its key do not serve together.
    #[error("the certificate cannot be used: {0}")]
    Identity(#[source] rustls::Error),
    /// By those certificates no client can be known.
    #[error("the certificates of the authorities cannot be used: {0}")]
    Authorities(#[source] rustls::Error),
}

/// What the server shows to clients that ask for TLS, and what it asks of them.
#[derive(Clone)]
pub struct NfsTls {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) demand: Demand,
}

impl fmt::Debug for NfsTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NfsTls").field("demand", &self.demand).finish_non_exhaustive()
    }
}

impl NfsTls {
    /// TLS 1.3 with this certificate, those that lead from it to a root, and its private key.
    ///
    /// # Errors
    /// The certificate and the key do not serve together, or the policy's authorities are none.
    pub fn new(
        certificates: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        policy: TlsPolicy,
    ) -> Result<Self, NfsTlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (demand, verifier) = match policy {
            TlsPolicy::Offered => (Demand::Nothing, WebPkiClientVerifier::no_client_auth()),
            TlsPolicy::Required => (Demand::Tls, WebPkiClientVerifier::no_client_auth()),
            TlsPolicy::Mutual(authorities) => {
                let verifier = client_certificate::verifier(authorities, &provider);
                (Demand::Certificate, verifier.map_err(NfsTlsError::Authorities)?)
            }
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(NfsTlsError::Identity)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates, key)
            .map_err(NfsTlsError::Identity)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A connection lives for as long as a mount: what would shorten the next handshake is never of use.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), demand })
    }
}

/// The two sides of a connection whose handshake is done.
pub(crate) fn split(
    stream: TcpStream,
    mut connection: ServerConnection,
) -> (TlsReadHalf, Arc<TlsSession>) {
    connection.set_buffer_limit(Some(limits::TLS_BUFFER_BYTES));
    let (source, socket) = stream.into_split();
    let session = Arc::new(TlsSession {
        connection: Mutex::new(connection),
        socket,
        sent_bytes: AtomicUsize::new(0),
    });
    let source = TlsReadHalf {
        session: Arc::clone(&session),
        source,
        received: BytesMut::new(),
        failure: None,
    };
    (source, session)
}

/// The keys of a connection, and the end of its socket that is written to.
pub(crate) struct TlsSession {
    connection: Mutex<ServerConnection>,
    socket: OwnedWriteHalf,
    /// Encrypted bytes that the system took.
    sent_bytes: AtomicUsize,
}

impl fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the keys.
        f.debug_struct("TlsSession").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsSession {
    /// The socket below.
    pub(crate) const fn socket(&self) -> &OwnedWriteHalf {
        &self.socket
    }

    /// What the client has shown in its handshake.
    pub(crate) fn shown(&self) -> Shown {
        let connection = self.connection.lock();
        let shown = connection.peer_certificates().and_then(<[_]>::first);
        match shown {
            Some(certificate) => Shown::Certificate(client_certificate::named_by(certificate)),
            None => Shown::NotAsked,
        }
    }

    /// Encrypts what comes first of the parts, and sends as much of it as the socket has room for: the count of bytes
    /// that it took, of which some may still have to be sent ([`Self::flush`]).
    ///
    /// # Errors
    /// `WouldBlock` while what it took before is not sent; else the connection is of no more use.
    pub(crate) fn try_write_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut connection = self.connection.lock();
        if !self.send(&mut connection)? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = connection.writer().write_vectored(parts)?;
        self.send(&mut connection)?;
        Ok(count)
    }

    /// Sends what was encrypted; `false` when the socket has no room for all of it.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        self.send(&mut self.connection.lock())
    }

    /// Whether something that was encrypted is to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.connection.lock().wants_write()
    }

    /// Encrypts for the client that nothing more comes.
    pub(crate) fn close(&self) {
        self.connection.lock().send_close_notify();
    }

    /// How many encrypted bytes the system took so far.
    pub(crate) fn sent_bytes(&self) -> usize {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn send(&self, connection: &mut ServerConnection) -> io::Result<bool> {
        while connection.wants_write() {
            match connection.write_tls(&mut NonBlocking(&self.socket)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.sent_bytes.fetch_add(count, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Decrypts what was `received`, as far as there is room for it in `buffer`.
    fn decrypt(&self, received: &mut BytesMut, buffer: &mut ReadBuf<'_>) -> io::Result<Decrypted> {
        let mut connection = self.connection.lock();
        loop {
            if take_plain(&mut connection, buffer)? {
                return Ok(Decrypted::End);
            }
            if buffer.remaining() == 0 || received.is_empty() {
                break;
            }
            // Some KiB at a time.
            let count = connection.read_tls(&mut received.as_ref())?;
            received.advance(count);
            if let Err(error) = connection.process_new_packets() {
                // The client is to learn why, if the socket has room for it. What came before is good.
                let _ = self.send(&mut connection);
                let _ = take_plain(&mut connection, buffer);
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
        Ok(Decrypted::More)
    }

    /// Whether something is decrypted that was not taken yet, or the end.
    fn has_plain(&self) -> bool {
        let mut connection = self.connection.lock();
        let found = connection.reader().fill_buf().map(drop);
        found.err().is_none_or(|error| error.kind() != ErrorKind::WouldBlock)
    }
}

/// What may follow on what was decrypted.
enum Decrypted {
    /// More, once it has come.
    More,
    /// Nothing: the client said so.
    End,
}

/// Moves decrypted bytes to `buffer`; `true` when no more will come.
fn take_plain(connection: &mut ServerConnection, buffer: &mut ReadBuf<'_>) -> io::Result<bool> {
    let mut reader = connection.reader();
    while buffer.remaining() > 0 {
        let plain = match reader.fill_buf() {
            Ok([]) => return Ok(true),
            Ok(plain) => plain,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        let count = plain.len().min(buffer.remaining());
        buffer.put_slice(plain.get(..count).unwrap_or_default());
        reader.consume(count);
    }
    Ok(false)
}

/// The socket, as something to write to that does not wait.
struct NonBlocking<'a>(&'a OwnedWriteHalf);

impl Write for NonBlocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the client sends, decrypted.
#[derive(Debug)]
pub(crate) struct TlsReadHalf {
    session: Arc<TlsSession>,
    source: OwnedReadHalf,
    /// What is still to be decrypted: one system call brings many calls.
    received: BytesMut,
    /// What made the rest worthless, once the bytes before it were taken.
    failure: Option<io::Error>,
}

impl TlsReadHalf {
    /// Completes when there is something to read, or the end. No buffer is held until then.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        if !self.received.is_empty() || self.session.has_plain() {
            return Ok(());
        }
        self.source.readable().await
    }

    /// The socket below.
    pub(crate) const fn source(&self) -> &OwnedReadHalf {
        &self.source
    }
}

impl AsyncRead for TlsReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        loop {
            if let Some(failure) = this.failure.take() {
                return Poll::Ready(Err(failure));
            }
            let decrypted = this.session.decrypt(&mut this.received, buffer);
            if buffer.filled().len() > before {
                this.failure = decrypted.err();
                return Poll::Ready(Ok(()));
            }
            if matches!(decrypted?, Decrypted::End) {
                return Poll::Ready(Ok(()));
            }
            this.received.reserve(limits::READ_BUFFER_BYTES);
            let read = pin!(this.source.read_buf(&mut this.received)).poll(context);
            if read.is_pending() {
                // A connection that is silent holds none.
                this.received = BytesMut::new();
            }
            // A client that closed its end without a word has ended inside a record, or has not: the marks tell.
            if ready!(read)? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

#[cfg(test)]
mod tests;

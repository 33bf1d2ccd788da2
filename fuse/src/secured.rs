//! The start of a connection to the appliance's NFS face: in TLS wherever that is offered (RFC 9289).
//!
//! ```text
//! connect -> probe (NULL with AUTH_TLS) -> STARTTLS ----------------> TLS 1.3, confirmed by NULL
//!                                       \-> something else -> REST: is TLS offered?  no: plain text
//!                                                                                    yes: no connection
//! ```
//! An answer to a probe can be forged on the way. One of REST, which is asked by `https`, cannot.
//!
//! Invariant: where the appliance offers TLS nothing but the probe is sent in plain text.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use slackwater_client::{Client, ClientError, ProblemCode, RpcTls};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use crate::certificate::{WorkerCertificate, WorkerIdentity, explained};
use crate::rpc::read_record;
use crate::xdr::Encoder;

/// Bytes that are read of the socket at once: TLS itself asks for one of its records at a time.
const READ_BUFFER_BYTES: usize = 128 << 10;

/// The flavor of a probe's credential.
const AUTH_TLS: u32 = 7;

/// That of a call that needs none.
const AUTH_NONE: u32 = 0;

/// NULL of NFS version 3.
const NFS_NULL: [u32; 3] = [100_003, 3, 0];

/// The protocol in TLS (RFC 9289 section 8.2).
const ALPN: &[u8] = b"sunrpc";

/// How long what REST told counts: connections that are lost one after the other do not ask each time.
const TOLD_FOR: Duration = Duration::from_secs(10);

/// The transaction id of a probe, which has the connection for itself.
const XID: u32 = 0x544c_5321;

/// Both directions of a connection.
pub(crate) struct Stream {
    pub(crate) is_encrypted: bool,
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
}

impl Stream {
    /// A connection in plain text.
    pub(crate) fn plain(stream: TcpStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self { is_encrypted: false, reader: Box::new(reader), writer: Box::new(writer) }
    }

    /// Has a first call answered, if it is encrypted. With TLS 1.3 the client's part of a handshake is done before the
    /// server has looked at its certificate: what it says against that would be lost among other calls. Waits for as
    /// long as the server has no place for the connection.
    ///
    /// # Errors
    /// `PermissionDenied`: the appliance asks for a certificate, or for another one; or those of the connection.
    pub(crate) async fn confirm(&mut self) -> io::Result<()> {
        if !self.is_encrypted {
            return Ok(());
        }
        let sent = async {
            self.writer.write_all(&null(AUTH_NONE)).await?;
            self.writer.flush().await
        };
        // Why the server ended the connection stands in what it sent, also where this could not be sent any more.
        let sent = sent.await;
        let reply = read_record(&mut self.reader).await.map_err(explained)?;
        sent?;
        let (message_reply, accepted, no_verifier, success) = (1, 0, [0, 0], 0);
        let mut expected = Encoder::default();
        for word in [XID, message_reply, accepted].into_iter().chain(no_verifier) {
            expected.u32(word);
        }
        expected.u32(success);
        match reply == expected.bytes {
            true => Ok(()),
            false => {
                let reason = "another reply than that NULL was carried out";
                Err(io::Error::new(io::ErrorKind::InvalidData, reason))
            }
        }
    }
}

/// How connections are begun.
#[derive(Clone, Debug)]
pub(crate) enum Security {
    /// In plain text, without a question: the appliance is on this machine, or its REST face is reached by plain HTTP.
    None,
    /// In TLS, if the appliance offers it.
    Tls(Box<Trust>),
}

/// By what the appliance is known.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    client: Client,
    tls: RpcTls,
    /// What is shown to it, if it asks for a certificate.
    identity: Option<Arc<WorkerIdentity>>,
    told: Arc<Mutex<Told>>,
}

/// What REST told last.
#[derive(Debug, Default)]
struct Told {
    is_offered: Option<bool>,
    /// Until when it is not asked again.
    until: Option<Instant>,
}

impl Security {
    /// That of an appliance whose NFS face is at `address`.
    ///
    /// # Errors
    /// There are no authorities to trust.
    pub(crate) fn of(
        client: &Client,
        address: SocketAddr,
        certificate: Option<WorkerCertificate>,
    ) -> Result<Self, ClientError> {
        if address.ip().to_canonical().is_loopback() {
            return Ok(Self::None);
        }
        Self::of_client(client, certificate)
    }

    /// The same, wherever it is.
    pub(crate) fn of_client(
        client: &Client,
        certificate: Option<WorkerCertificate>,
    ) -> Result<Self, ClientError> {
        let identity = certificate.map(|files| Arc::new(WorkerIdentity::new(files)));
        let resolver = identity.as_ref().map(|identity| Arc::clone(identity) as _);
        Ok(match client.rpc_tls(resolver)? {
            Some(tls) => Self::Tls(Box::new(Trust::new(client, tls, identity))),
            None => Self::None,
        })
    }

    /// Whether an appliance has asked for the certificate of this worker.
    pub(crate) fn is_certificate_asked_for(&self) -> bool {
        match self {
            Self::None => false,
            Self::Tls(trust) => {
                trust.identity.as_ref().is_some_and(|identity| identity.is_asked_for())
            }
        }
    }

    /// Begins a connection.
    ///
    /// # Errors
    /// Those of the connection; `InvalidData`: it is not with the appliance that REST knows.
    pub(crate) async fn begin(&self, mut stream: TcpStream) -> io::Result<Stream> {
        let Self::Tls(trust) = self else { return Ok(Stream::plain(stream)) };
        stream.write_all(&probe()).await?;
        if starts_tls(read_record(&mut stream).await?) {
            return trust.handshake(stream).await;
        }
        if trust.is_offered().await? {
            let reason = "it offers no TLS, though the appliance's REST face says that NFS does: another program, or one \
                 on the way, answers there";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(Stream::plain(stream))
    }
}

impl Trust {
    fn new(client: &Client, tls: RpcTls, identity: Option<Arc<WorkerIdentity>>) -> Self {
        Self { client: client.clone(), tls, identity, told: Arc::default() }
    }

    /// Whether the appliance offers TLS. Where it does not, NFS refuses a worker that was revoked since.
    async fn is_offered(&self) -> io::Result<bool> {
        {
            let told = self.told.lock();
            if told.until.is_some_and(|until| Instant::now() < until) {
                // An appliance that refused to tell, and never told, is not asked soon again either.
                return told.is_offered.ok_or_else(|| io::ErrorKind::PermissionDenied.into());
            }
        }
        let asked = self.client.offers_rpc_tls().await;
        let mut told = self.told.lock();
        match asked {
            Ok(is_offered) => {
                if !is_offered && told.is_offered != Some(false) {
                    tracing::warn!(
                        "the appliance offers no TLS on NFS: data and handles can be read on the way, and changed; \
                         its setting nfs-tls turns it on"
                    );
                }
                *told =
                    Told { is_offered: Some(is_offered), until: Some(Instant::now() + TOLD_FOR) };
                Ok(is_offered)
            }
            Err(error) if is_refusal(&error) => {
                told.until = Some(Instant::now() + TOLD_FOR);
                told.is_offered.ok_or_else(|| io::Error::other(error))
            }
            Err(error) => Err(io::Error::other(error)),
        }
    }

    async fn handshake(&self, stream: TcpStream) -> io::Result<Stream> {
        let connector = TlsConnector::from(Arc::clone(&self.tls.config));
        let stream = BufReader::with_capacity(READ_BUFFER_BYTES, stream);
        let stream = connector.connect(self.tls.name.clone(), stream).await?;
        let spoken = stream.get_ref().1.alpn_protocol();
        if spoken != Some(ALPN) {
            // A server of another kind has the same certificate: calls of NFS are not for it.
            let spoken = spoken.map_or("nothing".into(), String::from_utf8_lossy);
            let reason = format!("TLS is spoken for {spoken} there, expected sunrpc");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        let (reader, writer) = tokio::io::split(stream);
        Ok(Stream { is_encrypted: true, reader: Box::new(reader), writer: Box::new(writer) })
    }
}

fn is_refusal(error: &ClientError) -> bool {
    matches!(error.code(), Some(ProblemCode::Unauthenticated | ProblemCode::Forbidden))
}

/// The record of a probe (RFC 9289 section 4.1).
fn probe() -> Vec<u8> {
    null(AUTH_TLS)
}

/// The record of NULL with a credential of this flavor, which is empty.
fn null(flavor: u32) -> Vec<u8> {
    let mut record = Encoder::default();
    let (mark, call, rpc_version) = (0x8000_0000 | 40, 0, 2);
    for word in [mark, XID, call, rpc_version].into_iter().chain(NFS_NULL) {
        record.u32(word);
    }
    let (empty, no_verifier) = (0, [0, 0]);
    for word in [flavor, empty].into_iter().chain(no_verifier) {
        record.u32(word);
    }
    record.bytes
}

/// Whether the reply to a probe says that a handshake may follow.
fn starts_tls(reply: Bytes) -> bool {
    let mut expected = Encoder::default();
    let (message_reply, accepted, no_flavor, length) = (1, 0, 0, 8);
    for word in [XID, message_reply, accepted, no_flavor, length] {
        expected.u32(word);
    }
    expected.bytes.extend_from_slice(b"STARTTLS");
    expected.u32(0);
    reply.chunk() == expected.bytes
}

#[cfg(test)]
mod tests;

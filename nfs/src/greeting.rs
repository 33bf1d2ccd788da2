//! How a connection begins: with a call, or with the probe of a client that asks for TLS (RFC 9289 section 4.1).
//!
//! ```text
//! client                                     server
//! NULL with AUTH_TLS, alone ---------------> takes it for a probe if it offers TLS, and the client is listed
//!           <------------------------------- success; the verifier says STARTTLS
//! ClientHello ----------------------------->   and on, by TLS 1.3
//! ```
//! The probe is the first record, in one fragment; as a later one, or where no TLS is offered, it is a call with a
//! credential that is not served, and refused as such: the client then goes on in plain text, or does not.
//!
//! Invariant: what comes in plain text behind a probe is never taken for a call.
#![deny(clippy::indexing_slicing)]

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::limits::Patience;
use crate::portmap::{self, Port};
use crate::tls::{self, NfsTls};
use crate::transport::{ReadHalf, WriteHalf};
use crate::xdr::LAST_FRAGMENT;

/// The flavor of a probe's credential.
const AUTH_TLS: u32 = 7;

/// What the verifier of the reply says.
const STARTTLS: &[u8; 8] = b"STARTTLS";

/// The words of a probe: mark, xid, CALL, RPC 2, program, version, NULL, credential and verifier without bodies. `None`:
/// others will do. The program is looked at when all are there.
const PROBE: [Option<u32>; 11] = {
    let zero = Some(0);
    let mark = Some(LAST_FRAGMENT | 40);
    [mark, None, zero, Some(2), None, None, zero, Some(AUTH_TLS), zero, zero, zero]
};

const PROBE_BYTES: usize = 4 * PROBE.len();

/// Why there is no TLS though a client asked for it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetingError {
    /// The first bytes did not come.
    #[error("no call came in {} s", limit.as_secs())]
    Silent {
        /// The time it had.
        limit: Duration,
    },
    /// The handshake failed.
    #[error("the TLS handshake failed: {0}")]
    Handshake(io::Error),
    /// It did not end in time.
    #[error("the TLS handshake took more than {} s", limit.as_secs())]
    TooSlow {
        /// The time it had.
        limit: Duration,
    },
    /// Reading failed.
    #[error("read: {0}")]
    Io(#[from] io::Error),
}

impl GreetingError {
    /// A client that leaves within the handshake has left, whatever for.
    fn of_handshake(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                Self::Io(error)
            }
            _ => Self::Handshake(error),
        }
    }
}

/// A connection that has begun, in plain text or in TLS.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) source: ReadHalf,
    pub(crate) socket: WriteHalf,
    /// What was read of the first call.
    pub(crate) bytes: BytesMut,
}

impl Opened {
    /// A connection in plain text, of which nothing or this much was read.
    pub(crate) fn plain(stream: TcpStream, bytes: BytesMut) -> Self {
        let (source, socket) = stream.into_split();
        Self { source: ReadHalf::Plain(source), socket: WriteHalf::Plain(socket), bytes }
    }

    /// Whether what is sent is encrypted.
    pub(crate) const fn is_encrypted(&self) -> bool {
        matches!(self.source, ReadHalf::Tls(_))
    }
}

/// Begins a connection to this port, at which TLS is offered.
pub(crate) async fn begin(
    mut stream: TcpStream,
    port: Port,
    offered: &NfsTls,
    patience: &Patience,
) -> Result<Opened, GreetingError> {
    let limit = patience.first_call;
    let first = timeout(limit, first_bytes(&mut stream)).await;
    let bytes = first.map_err(|_| GreetingError::Silent { limit })??;
    let probed = probe(&bytes).filter(|probe| port.has(probe.program));
    let Some(Probe { xid, .. }) = probed else { return Ok(Opened::plain(stream, bytes)) };
    let limit = patience.handshake;
    let handshake = async {
        stream.write_all(&reply(xid)).await?;
        TlsAcceptor::from(Arc::clone(&offered.config)).accept(stream).await
    };
    let handshake = timeout(limit, handshake).await;
    let done = handshake.map_err(|_| GreetingError::TooSlow { limit })?;
    let (stream, connection) = done.map_err(GreetingError::of_handshake)?.into_inner();
    let (source, session) = tls::split(stream, connection);
    let (source, socket) = (ReadHalf::Tls(source), WriteHalf::Tls(session));
    Ok(Opened { source, socket, bytes: BytesMut::new() })
}

/// A whole probe, or what tells that it is none.
async fn first_bytes(stream: &mut TcpStream) -> io::Result<BytesMut> {
    let mut bytes = BytesMut::with_capacity(PROBE_BYTES);
    while bytes.len() < PROBE_BYTES && may_be_probe(&bytes) {
        let left = PROBE_BYTES - bytes.len();
        if stream.read_buf(&mut (&mut bytes).limit(left)).await? == 0 {
            break;
        }
    }
    Ok(bytes)
}

/// Whether a probe can begin so.
fn may_be_probe(bytes: &[u8]) -> bool {
    PROBE.iter().zip(bytes.chunks(4)).all(|(expected, got)| {
        expected.is_none_or(|expected| expected.to_be_bytes().starts_with(got))
    })
}

/// What tells one probe from another.
#[derive(Debug, PartialEq, Eq)]
struct Probe {
    xid: [u8; 4],
    program: u32,
}

/// The probe that these bytes are.
fn probe(bytes: &[u8]) -> Option<Probe> {
    if bytes.len() != PROBE_BYTES || !may_be_probe(bytes) {
        return None;
    }
    let word = |at: usize| bytes.get(at * 4..)?.first_chunk::<4>().copied();
    let (program, version) = (u32::from_be_bytes(word(4)?), u32::from_be_bytes(word(5)?));
    let mut served = [portmap::NFS, portmap::MOUNT].into_iter();
    let is_served = served.any(|served| (program, version) == (served.number, served.version));
    if is_served { Some(Probe { xid: word(1)?, program }) } else { None }
}

/// The reply to a probe (RFC 5531 section 9): accepted, with a verifier, success.
fn reply(xid: [u8; 4]) -> Vec<u8> {
    let (message_reply, accepted, none, success) = (1_u32, 0_u32, 0_u32, 0_u32);
    let mark = LAST_FRAGMENT | 32;
    let mut reply = Vec::with_capacity(36);
    reply.extend_from_slice(&mark.to_be_bytes());
    reply.extend_from_slice(&xid);
    for word in [message_reply, accepted, none, 8] {
        reply.extend_from_slice(&word.to_be_bytes());
    }
    reply.extend_from_slice(STARTTLS);
    reply.extend_from_slice(&success.to_be_bytes());
    reply
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    const OF_NFS: [u32; 11] = [0x8000_0028, 9, 0, 2, 100_003, 3, 0, 7, 0, 0, 0];

    #[test]
    fn a_probe_and_its_reply_in_golden_bytes() {
        let found = Probe { xid: [0, 0, 0, 9], program: 100_003 };
        assert_eq!(probe(&bytes(&OF_NFS)), Some(found));
        let mut of_mount = OF_NFS;
        of_mount[4] = 100_005;
        assert!(probe(&bytes(&of_mount)).is_some());
        let words = [0x8000_0020, 9, 1, 0, 0, 8, 0x5354_4152, 0x5454_4c53, 0];
        assert_eq!(reply([0, 0, 0, 9]), bytes(&words));
    }

    #[test]
    fn what_differs_in_any_word_is_no_probe() {
        for at in (0..OF_NFS.len()).filter(|at| *at != 1) {
            for other in [1, 40, 0x0000_0028, 0x8000_0029, u32::MAX] {
                let mut words = OF_NFS;
                words[at] = if other == words[at] { 3_000 } else { other };
                assert_eq!(probe(&bytes(&words)), None, "{at}: {other}");
            }
        }
        let whole = bytes(&OF_NFS);
        for length in 0..whole.len() {
            assert!(may_be_probe(&whole[..length]), "{length}");
            assert_eq!(probe(&whole[..length]), None, "{length}");
        }
        // The first byte that differs tells.
        for at in (0..whole.len()).filter(|at| !(4..8).contains(at) && !(16..24).contains(at)) {
            let mut other = whole[..=at].to_vec();
            other[at] ^= 0x40;
            assert!(!may_be_probe(&other), "{at}");
        }
    }
}

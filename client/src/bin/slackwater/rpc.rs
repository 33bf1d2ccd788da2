//! The smallest ONC RPC call there is: NULL, which tells that a program is served at a port.
//!
//! ```text
//! mark (4: last fragment, 40) | xid | CALL 0 | RPC 2 | program | version | NULL 0
//!                             | credential AUTH_NONE: 0, 0 | verifier AUTH_NONE: 0, 0
//! ```
//! RFC 5531 section 9 (messages) and section 11 (record marking).

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// NFS (RFC 1813 section 2.1).
pub(crate) const NFS: Program = Program { name: "NFS", number: 100_003, version: 3 };
/// MOUNT (RFC 1813 section 5.1).
pub(crate) const MOUNT: Program = Program { name: "MOUNT", number: 100_005, version: 3 };

/// Time for connecting, and for the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of the call after its mark.
const CALL_BYTES: u32 = 40;

/// Largest reply that is read: one to NULL has 24 bytes, and at most 400 of a verifier
/// (RFC 5531 section 8.2).
const REPLY_BYTES_MAX: u32 = 1024;

const LAST_FRAGMENT: u32 = 1 << 31;
const XID: u32 = 0x534c_4b57;

/// A program in a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    number: u32,
    version: u32,
}

/// Why the program is not known to be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RpcError {
    /// The connection cannot be made, or broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Nothing came in time.
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Timeout,
    /// What came is no answer to this call.
    #[error("it does not speak RPC ({0})")]
    NotRpc(&'static str),
    /// The program is not served there, or not in this version.
    #[error("it does not serve {name} version {version} (status {status})")]
    Refused { name: &'static str, version: u32, status: u32 },
}

/// Calls NULL of the program at `host` and `port`.
pub(crate) async fn null(host: &str, port: u16, program: Program) -> Result<(), RpcError> {
    let exchange = async {
        let mut stream = TcpStream::connect((host, port)).await?;
        stream.write_all(&call(program)).await?;
        let mark = stream.read_u32().await?;
        let length = mark & !LAST_FRAGMENT;
        if mark & LAST_FRAGMENT == 0 || length > REPLY_BYTES_MAX {
            return Err(RpcError::NotRpc("its answer has no sensible record mark"));
        }
        let mut reply = vec![0; usize::try_from(length).unwrap_or_default()];
        stream.read_exact(&mut reply).await?;
        parse_reply(&reply, program)
    };
    match tokio::time::timeout(TIMEOUT, exchange).await {
        Ok(outcome) => outcome,
        Err(_) => Err(RpcError::Timeout),
    }
}

fn call(program: Program) -> Vec<u8> {
    let words =
        [LAST_FRAGMENT | CALL_BYTES, XID, 0, 2, program.number, program.version, 0, 0, 0, 0, 0];
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn parse_reply(bytes: &[u8], program: Program) -> Result<(), RpcError> {
    let word = |position: usize| {
        let four = bytes.get(position..).and_then(|rest| rest.first_chunk::<4>());
        four.map(|four| u32::from_be_bytes(*four))
            .ok_or(RpcError::NotRpc("its answer is too short"))
    };
    if word(0)? != XID || word(4)? != 1 {
        return Err(RpcError::NotRpc("its answer is to another call"));
    }
    let refused =
        |status| RpcError::Refused { name: program.name, version: program.version, status };
    if word(8)? != 0 {
        // MSG_DENIED: the version of RPC, or the credential, is not taken.
        return Err(refused(word(12)?));
    }
    let verifier_bytes = usize::try_from(word(16)?).unwrap_or(usize::MAX);
    let status_position = verifier_bytes
        .checked_next_multiple_of(4)
        .and_then(|padded| padded.checked_add(20))
        .ok_or(RpcError::NotRpc("its verifier is too long"))?;
    match word(status_position)? {
        0 => Ok(()),
        status => Err(refused(status)),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// Serves one connection with these bytes and gives what null() made of them.
    async fn answered_with(reply: Vec<u8>) -> (Vec<u8>, Result<(), RpcError>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 44];
            stream.read_exact(&mut request).await.unwrap();
            stream.write_all(&reply).await.unwrap();
            request
        });
        let outcome = null("127.0.0.1", port, NFS).await;
        (server.await.unwrap(), outcome)
    }

    #[tokio::test]
    async fn a_served_program_is_known_by_its_null() {
        let (request, outcome) = answered_with(words(&[0x8000_0018, XID, 1, 0, 0, 0, 0])).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        assert_eq!(request, words(&[0x8000_0028, XID, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]));
        // A verifier of 5 bytes is padded to 8.
        let with_verifier = words(&[0x8000_0020, XID, 1, 0, 1, 5, 0, 0, 0]);
        assert!(answered_with(with_verifier).await.1.is_ok());
    }

    #[tokio::test]
    async fn what_does_not_serve_it_is_told_apart() {
        let unavailable = answered_with(words(&[0x8000_0018, XID, 1, 0, 0, 0, 1])).await.1;
        assert!(matches!(unavailable, Err(RpcError::Refused { status: 1, .. })), "{unavailable:?}");
        let denied = answered_with(words(&[0x8000_0010, XID, 1, 1, 1])).await.1;
        assert!(denied.is_err());
        let other = answered_with(words(&[0x8000_0018, 7, 1, 0, 0, 0, 0])).await.1;
        assert!(matches!(other, Err(RpcError::NotRpc(_))), "{other:?}");
        let web = answered_with(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()).await.1;
        assert!(matches!(web, Err(RpcError::NotRpc(_))), "{web:?}");
        let huge = answered_with(words(&[0xffff_ffff])).await.1;
        assert!(matches!(huge, Err(RpcError::NotRpc(_))), "{huge:?}");
        let short = answered_with(words(&[0x8000_0008, XID, 1])).await.1;
        assert!(matches!(short, Err(RpcError::NotRpc(_))), "{short:?}");
        let liar = answered_with(words(&[0x8000_0018, XID, 1, 0, 0, u32::MAX, 0])).await.1;
        assert!(matches!(liar, Err(RpcError::NotRpc(_))), "{liar:?}");
    }

    #[tokio::test]
    async fn a_closed_port_is_an_error() {
        // Bound, so that no other process takes the port; nothing listens on it.
        let closed = TcpSocket::new_v4().unwrap();
        closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = closed.local_addr().unwrap().port();
        assert!(matches!(null("127.0.0.1", port, MOUNT).await, Err(RpcError::Io(_))));
    }
}

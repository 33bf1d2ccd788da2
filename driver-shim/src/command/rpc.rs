//! The smallest ONC RPC call there is: NULL, which tells that a program is served at a port
//! (RFC 5531 sections 9 and 11).
//!
//! ```text
//! mark (last fragment, 40) | xid | CALL 0 | RPC 2 | program | version | NULL 0 | 0 0 | 0 0
//! mark | xid | REPLY 1 | ACCEPTED 0 | verifier 0 0 | SUCCESS 0
//! ```

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// NFS version 3.
pub(super) const NFS: u32 = 100_003;

/// MOUNT version 3.
pub(super) const MOUNT: u32 = 100_005;

/// Both have this version.
const VERSION: u32 = 3;

/// Time for connecting and the answer: a diagnosis is to be quick.
const TIMEOUT: Duration = Duration::from_secs(5);

/// An answer to NULL without a verifier, as the appliance sends it.
const REPLY_BYTES: u32 = 24;

const LAST_FRAGMENT: u32 = 1 << 31;
const CALL_BYTES: u32 = 40;
const XID: u32 = 0x534c_4b57;

/// Calls NULL of the program.
///
/// # Errors
/// No connection, no answer in time, or another answer than success.
pub(super) async fn null(address: SocketAddr, program: u32) -> io::Result<()> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let call = [LAST_FRAGMENT | CALL_BYTES, XID, 0, 2, program, VERSION, 0, 0, 0, 0, 0];
        let bytes: Vec<u8> = call.iter().flat_map(|word| word.to_be_bytes()).collect();
        stream.write_all(&bytes).await?;
        let expected = [LAST_FRAGMENT | REPLY_BYTES, XID, 1, 0, 0, 0, 0];
        for expected in expected {
            if stream.read_u32().await? != expected {
                let reason = "what listens there does not serve it";
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
        }
        Ok(())
    };
    match tokio::time::timeout(TIMEOUT, exchange).await {
        Ok(outcome) => outcome,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// What null() makes of these words as an answer.
    async fn answered_with(words: &[u32]) -> io::Result<()> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut call = [0; 44];
            stream.read_exact(&mut call).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        });
        let outcome = null(address, NFS).await;
        server.await.unwrap();
        outcome
    }

    #[tokio::test]
    async fn a_program_is_known_by_its_null() {
        let mark = LAST_FRAGMENT | REPLY_BYTES;
        answered_with(&[mark, XID, 1, 0, 0, 0, 0]).await.unwrap();
        // PROG_UNAVAIL, the answer to another call, and something else altogether.
        assert!(answered_with(&[mark, XID, 1, 0, 0, 0, 1]).await.is_err());
        assert!(answered_with(&[mark, 7, 1, 0, 0, 0, 0]).await.is_err());
        assert!(answered_with(&[0x4854_5450]).await.is_err());
    }
}

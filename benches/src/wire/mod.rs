//! NFSv3 and MOUNT (RFC 1813) over record-marked RPC (RFC 5531) as a client speaks them, by
//! hand: so little work that a client on the same cores hardly slows the server it measures.
//!
//! ```text
//! call     appends a call to a buffer          reply    reads an answer in place
//! session  one call after the other, waiting for each answer
//! ```

pub mod call;
mod error;
pub mod reply;
mod session;

pub use error::WireError;
pub use session::{Session, random_xid};

/// RPC program of NFS.
const NFS_PROGRAM: u32 = 100_003;

/// RPC program of MOUNT.
const MOUNT_PROGRAM: u32 = 100_005;

/// Version of both.
const VERSION: u32 = 3;

/// In a record mark: this fragment is the last of its record.
pub const LAST_FRAGMENT: u32 = 1 << 31;

/// Longest handle (RFC 1813).
const HANDLE_BYTES_MAX: usize = 64;

/// How a server names a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle(Vec<u8>);

/// What a server gives with WRITE and COMMIT; it changes when data may have been lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteVerifier([u8; 8]);

//! Every bound of the front end, each with its reason. Sizes in bytes, times in seconds.

use std::time::Duration;

use slackwater_blockstore::BLOCK_BYTES;

/// Largest READ and WRITE payload: what Linux clients send at most.
pub(crate) const TRANSFER_BYTES_MAX: usize = 1 << 20;

/// Multiple of which READ and WRITE sizes are best: the store's block.
pub(crate) const TRANSFER_MULTIPLE_BYTES: usize = BLOCK_BYTES;

/// Largest record: a WRITE of the largest payload with its headers, credentials and padding.
pub(crate) const FRAME_BYTES_MAX: usize = TRANSFER_BYTES_MAX + 4096;

/// Up to here a record is gathered in the connection's own buffer; a larger one gets a buffer
/// of its own once this much of it has arrived and the rest is within the budget. The
/// largest call that is not a WRITE, SYMLINK with a 4 KiB target, is well below.
pub(crate) const FRAME_BYTES_SMALL: usize = 32 << 10;

/// Largest record from an address that no client rule matches: enough for calls that are
/// answered with a refusal.
pub(crate) const FRAME_BYTES_REFUSED_CLIENT: usize = 4096;

/// Fragments of one record. Senders with small buffers cut a 1 MiB WRITE into a few hundred;
/// without a bound, empty fragments would keep the reader busy for ever.
pub(crate) const FRAGMENTS_MAX: usize = 1024;

/// Memory of a connection's read buffer.
pub(crate) const READ_BUFFER_BYTES: usize = FRAME_BYTES_SMALL;

/// When less than this is free in the read buffer it is renewed, so that one system call
/// brings at least a small call.
pub(crate) const READ_BUFFER_SPARE_BYTES: usize = 4096;

/// What each call in flight is charged at least: its reply, its bookkeeping, and the part of
/// the read buffer that it keeps. It turns the byte budgets into bounds on calls as well.
pub(crate) const CALL_BYTES_MIN: usize = 4096;

/// What one connection's calls that change something may hold: 4,096 small calls or 16
/// largest WRITEs.
pub(crate) const CONNECTION_CHANGE_BYTES_MAX: usize = 16 << 20;

/// What one connection's other calls may hold, the same for the same reason.
pub(crate) const CONNECTION_READ_BYTES_MAX: usize = 16 << 20;

/// Default of [`crate::NfsOptions::in_flight_bytes_max`]: under a tenth of the default memory
/// budget, and enough for 48 largest transfers each way.
pub(crate) const IN_FLIGHT_BYTES_DEFAULT: u64 = 96 << 20;

/// Least [`crate::NfsOptions::in_flight_bytes_max`]: half of it must hold a largest call.
pub(crate) const IN_FLIGHT_BYTES_MIN: u64 = 4 << 20;

/// Calls in flight of all clients that no rule matches, which get nothing but refusals and may not
/// hold memory that others wait for: half of it, as they change nothing, is 256 replies.
pub(crate) const IN_FLIGHT_BYTES_REFUSED_CLIENTS: u64 = 2 << 20;

const _: () = assert!(IN_FLIGHT_BYTES_REFUSED_CLIENTS / 2 > MOUNTS_BYTES_MAX as u64);
const _: () = assert!(IN_FLIGHT_BYTES_MIN / 2 > (FRAME_BYTES_MAX + CALL_BYTES_MIN) as u64);
const _: () = assert!(CONNECTION_CHANGE_BYTES_MAX > FRAME_BYTES_MAX + CALL_BYTES_MIN);
const _: () = assert!(CONNECTION_READ_BYTES_MAX > TRANSFER_BYTES_MAX + CALL_BYTES_MIN);

/// Default of [`crate::NfsOptions::connections_max`]: 64 workers with `nconnect=8`, in 16 MiB
/// of read buffers; in TLS those that do not take their replies hold another 16 MiB, and rustls as much.
pub(crate) const CONNECTIONS_DEFAULT: usize = 512;

/// Default of [`crate::NfsOptions::io_threads`]: as many commits then share one sync.
pub(crate) const IO_THREADS_DEFAULT: usize = 16;

/// Connections that have no place among [`crate::NfsOptions::connections_max`], as no whole call
/// came from them yet or none that their address allows; for one more the oldest is closed. Each
/// is a socket and a task, and no buffer. So many that a client which has just connected makes its
/// first call before as many others have connected, also when they come by the thousand a second.
pub(crate) const WITHOUT_PLACE_MAX: usize = 1024;

/// Default anonymous user and group, `nobody` by convention.
pub(crate) const ANONYMOUS_ID: u32 = 65534;

/// Reply size of READDIR and READDIRPLUS: dtpref, and what a larger request is cut to.
pub(crate) const DIRECTORY_BYTES_MAX: usize = 64 << 10;

/// Entries taken from the store at a time while a directory page is filled.
pub(crate) const DIRECTORY_ENTRIES_STEP: usize = 256;

/// Longest path of MNT (RFC 1813 appendix I `MNTPATHLEN`).
pub(crate) const MOUNT_PATH_BYTES_MAX: usize = 1024;

/// Mounts remembered for DUMP, which is advisory (RFC 1813 section 5.2.2): past it the oldest
/// are forgotten.
pub(crate) const MOUNTS_MAX: usize = 256;

/// What a reply to DUMP is charged: every mount with the longest path and address.
pub(crate) const MOUNTS_BYTES_MAX: usize = MOUNTS_MAX * (MOUNT_PATH_BYTES_MAX + 64);

/// Hard links of one inode that PATHCONF promises, as on ext4.
pub(crate) const LINKS_MAX: u32 = 65_000;

/// Files that FSSTAT calls free: inodes are not preallocated, so only space bounds them, and
/// this many would fill any store.
pub(crate) const FILES_FREE: u64 = 1 << 32;

/// Replies kept for resent calls. At 10,000 non-idempotent calls a second a reply is kept for
/// over a second, and TCP clients resend only after a reconnect.
pub(crate) const DUPLICATES_MAX: usize = 16_384;

/// Bytes of those replies.
pub(crate) const DUPLICATES_BYTES_MAX: usize = 8 << 20;

/// How long a reply is kept: longer than a client's major timeout (60 s for TCP on Linux).
pub(crate) const DUPLICATES_AGE: Duration = Duration::from_secs(120);

/// How often a reader that waits for the budget looks whether its client is still there.
pub(crate) const GONE_PERIOD: Duration = Duration::from_millis(100);

/// Parts that one vectored write is given at most; the system's limit is 1,024.
pub(crate) const WRITE_PARTS_MAX: usize = 128;

/// Bytes of replies after which a reader sends what it gathered, though more calls are at hand:
/// enough that the system call is a small part, and the client is at work meanwhile.
pub(crate) const BATCH_BYTES: usize = 64 << 10;

/// Replies of one batch: head and payload of each fit into one vectored write.
pub(crate) const BATCH_REPLIES: usize = WRITE_PARTS_MAX / 2;

/// Times that one who made a reply sends what others made meanwhile, before it leaves that to
/// the connection's writer and goes on with its own work.
pub(crate) const SEND_ROUNDS_MAX: usize = 8;

/// Bytes that one who made a reply sends in a round, before he leaves the rest to the writer: one
/// largest reply, which a client that keeps up takes in about a millisecond.
pub(crate) const SEND_BYTES_MAX: usize = TRANSFER_BYTES_MAX;

/// Payload of a WRITE up to which it is copied out of the read buffer: any that came in one. Otherwise
/// one dirty block would keep the whole buffer, which is charged to nobody; a copy of this much takes
/// two microseconds.
pub(crate) const COPIED_BYTES_MAX: usize = FRAME_BYTES_SMALL;

/// Threads that serve connections: one for each processor, and beyond these the store and the
/// network are what calls wait for.
pub(crate) const REACTORS_MAX: usize = 16;

/// The times after which a connection is given up, and the server's own patience at its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// A new connection that sends nothing, or then no whole call, for so long: nobody is there. The
    /// wait for the memory of a large one does not count.
    pub(crate) first_call: Duration,
    /// A TLS handshake: a few round trips, and a signature.
    pub(crate) handshake: Duration,
    /// A record that has begun must be whole: 1 MiB in this time is under 10 KiB/s.
    pub(crate) record: Duration,
    /// A client that takes no byte of its replies in this time is dropped.
    pub(crate) reply: Duration,
    /// At the end, calls in flight may take this long.
    pub(crate) drain: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            first_call: Duration::from_secs(60),
            handshake: Duration::from_secs(10),
            record: Duration::from_secs(120),
            reply: Duration::from_secs(60),
            drain: Duration::from_secs(10),
        }
    }
}

/// While calls of others wait for memory, a connection that holds some must move this much in
/// [`PRESSED_TIME`], of replies that it takes or of a record that it sends: 32 KiB/s, which any
/// network does on which a disk is of use.
pub(crate) const PRESSED_BYTES_MIN: usize = 64 << 10;

/// See there. Short beside the time after which programs take a disk for dead, long beside a
/// retransmission of TCP.
pub(crate) const PRESSED_TIME: Duration = Duration::from_secs(2);

/// A look at a client's pace that comes so late tells that the server was held up (stopped, or
/// without a processor): timers alone are late by milliseconds.
pub(crate) const LOOK_LATE: Duration = Duration::from_millis(250);

/// Bytes that wait encrypted in a connection, beyond what the system has of it. No call is charged for them, so they are
/// few; each system call sends as many.
pub(crate) const TLS_BUFFER_BYTES: usize = READ_BUFFER_BYTES;

/// Silence after which the system asks a connection's other end whether it lives.
pub(crate) const KEEPALIVE_IDLE: Duration = Duration::from_secs(120);

/// Time between such questions.
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Time that a client has, after the last reply of a server that stops, to take the replies and
/// close its end. Closing at once, with calls still unread, resets the connection, and a reset
/// discards replies that the client has not read yet.
pub(crate) const LINGER: Duration = Duration::from_millis(500);

/// At the end, once the time for calls in flight is over: the time that a thread has to let go
/// of what it does. Longer takes only one that hangs in a call.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(1);

/// Questions without an answer after which the connection is gone.
pub(crate) const KEEPALIVE_PROBES: u32 = 4;

/// Shortest wait after a failed accept (out of file descriptors, say).
pub(crate) const ACCEPT_WAIT_MIN: Duration = Duration::from_millis(5);

/// Longest wait after a failed accept.
pub(crate) const ACCEPT_WAIT_MAX: Duration = Duration::from_secs(1);

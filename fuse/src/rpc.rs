//! A pipelined ONC RPC client (RFC 5531) over one TCP connection, in TLS or not, that is made again for ever.
//!
//! ```text
//! call() --queue--> writer --\                      /--> appliance
//!    ^                        outstanding, by xid -+
//!    +---- reply ---- reader --/                      \--< appliance
//! ```
//!
//! Invariants: a call is in `outstanding` before its first byte is sent, and leaves it with its
//! reply only. When the connection is lost, all of them are sent again on the next one, in the
//! order of their xids; so only calls that may be run twice go through here.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};

use crate::distance::Distance;
use crate::secured::{Security, Stream};
use crate::statistics::Statistics;
use crate::xdr::{Decoder, Encoder, Malformed, padding_of};

/// Largest reply: a READ of 1 MiB with its attributes.
const RECORD_BYTES_MAX: usize = (1 << 20) + 4096;
/// A reply with one block, and less: the time of its transfer does not count.
const SHORT_REPLY_BYTES: usize = 4096 + 512;
/// Bit of a record mark that ends the record (RFC 5531 section 11).
const LAST_FRAGMENT: u32 = 1 << 31;
/// Fragments of one record: without a bound, empty ones would keep the reader busy for ever.
const FRAGMENTS_MAX: usize = 1024;
/// Calls under way on one connection: 64 MiB of largest transfers, enough for any network.
const CALLS_MAX: usize = 64;
/// First and longest wait before the next try to connect.
const RECONNECT_WAIT_MIN: Duration = Duration::from_millis(50);
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(2);
/// The longest where the appliance refuses this machine: each try is a handshake, and a line in its log.
const REFUSED_WAIT_MAX: Duration = Duration::from_secs(15);
/// A host that answers at all does so within a few round trips.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// The same for the handshake of TLS, and for what REST is asked about it.
const SECURE_TIME_MAX: Duration = Duration::from_secs(15);
/// Silence, with calls under way, after which a connection is given up. It doubles each time
/// that happens in a row, so that a server which is only slow is not asked ever more.
const SILENCE_MIN: Duration = Duration::from_secs(15);
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// How often that is looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Wait after a server answered that it is out of resources.
const BUSY_WAIT: Duration = Duration::from_millis(500);

const AUTH_SYS: u32 = 1;

/// A procedure of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Procedure {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) number: u32,
}

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RpcError {
    #[error("the appliance refuses calls of this machine (RPC reject status {status})")]
    Denied { status: u32 },
    #[error("the appliance does not know the call (RPC accept status {status})")]
    NotAccepted { status: u32 },
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("the connection's task has ended")]
    Ended,
}

/// A call on its way.
#[derive(Debug)]
struct Pending {
    xid: u32,
    /// Record mark, header and arguments.
    head: Bytes,
    payload: Bytes,
    sent: Instant,
    answer: oneshot::Sender<Bytes>,
}

type Outstanding = Mutex<BTreeMap<u32, Pending>>;

/// One connection. Its task ends when the last clone of this is dropped.
#[derive(Clone, Debug)]
pub(crate) struct RpcClient {
    queue: mpsc::Sender<Pending>,
    slots: Arc<Semaphore>,
    next_xid: Arc<AtomicU32>,
    distance: Option<Arc<Distance>>,
}

impl RpcClient {
    /// A client of the server at `address`, which is connected to when there is a call. Its calls tell `distance` how far
    /// that is, if the server answers them without waiting for its disk.
    pub(crate) fn new(
        address: SocketAddr,
        security: Security,
        statistics: Arc<Statistics>,
        distance: Option<Arc<Distance>>,
    ) -> Self {
        let (queue, calls) = mpsc::channel(CALLS_MAX);
        tokio::spawn(Connection { address, security, statistics, calls }.run());
        Self {
            queue,
            slots: Arc::new(Semaphore::new(CALLS_MAX)),
            next_xid: Arc::new(AtomicU32::new(1)),
            distance,
        }
    }

    /// Makes the call; its last argument is the opaque `payload`, if there is one. Waits for as
    /// long as the server is away.
    pub(crate) async fn call(
        &self,
        procedure: Procedure,
        arguments: &[u8],
        payload: Option<Bytes>,
    ) -> Result<Decoder, RpcError> {
        let _slot = self.slots.acquire().await.map_err(|_| RpcError::Ended)?;
        loop {
            let begins_alone = self.slots.available_permits() == CALLS_MAX - 1;
            let xid = self.next_xid.fetch_add(1, Ordering::Relaxed);
            let head = encode_call(xid, procedure, arguments, payload.as_ref());
            let payload = payload.clone().unwrap_or_default();
            let (answer, answered) = oneshot::channel();
            let sent = Instant::now();
            let pending = Pending { xid, head: head.into(), payload, sent, answer };
            self.queue.send(pending).await.map_err(|_| RpcError::Ended)?;
            let reply = answered.await.map_err(|_| RpcError::Ended)?;
            // No other call began since.
            let is_alone =
                begins_alone && self.next_xid.load(Ordering::Relaxed) == xid.wrapping_add(1);
            if let Some(distance) = &self.distance
                && is_alone
                && reply.len() <= SHORT_REPLY_BYTES
            {
                distance.note(sent.elapsed());
            }
            if let Some(results) = decode_reply(reply)? {
                return Ok(results);
            }
            sleep(BUSY_WAIT).await;
        }
    }
}

/// The record of a call, up to the payload's bytes.
fn encode_call(
    xid: u32,
    procedure: Procedure,
    arguments: &[u8],
    payload: Option<&Bytes>,
) -> Vec<u8> {
    let mut record = Encoder::default();
    record.u32(0); // The record mark, which is known at the end.
    let (message_call, rpc_version) = (0, 2);
    record.u32(xid);
    for word in [message_call, rpc_version, procedure.program, procedure.version, procedure.number]
    {
        record.u32(word);
    }
    // The credential: a stamp, no machine name, the superuser, no more groups.
    record.u32(AUTH_SYS);
    record.opaque(&[0; 20]);
    // The verifier: none.
    record.u64(0);
    record.bytes.extend_from_slice(arguments);
    let mut length = record.bytes.len() - 4;
    if let Some(payload) = payload {
        record.u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
        length += 4 + payload.len() + padding_of(payload.len());
    }
    let mark = u32::try_from(length).unwrap_or(u32::MAX) | LAST_FRAGMENT;
    if let Some(place) = record.bytes.first_chunk_mut() {
        *place = mark.to_be_bytes();
    }
    record.bytes
}

/// The results in a reply; `None` if the server asks to be called later (`SYSTEM_ERR`).
fn decode_reply(reply: Bytes) -> Result<Option<Decoder>, RpcError> {
    const SYSTEM_ERROR: u32 = 5;
    let mut reply = Decoder::new(reply);
    let _xid = reply.u32()?;
    if reply.u32()? != 1 {
        return Err(Malformed.into());
    }
    if reply.u32()? != 0 {
        return Err(RpcError::Denied { status: reply.u32()? });
    }
    let _verifier = (reply.u32()?, reply.opaque(400)?);
    match reply.u32()? {
        0 => Ok(Some(reply)),
        SYSTEM_ERROR => Ok(None),
        status => Err(RpcError::NotAccepted { status }),
    }
}

/// Reads one record.
pub(crate) async fn read_record(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Bytes> {
    let mut record = BytesMut::new();
    for _ in 0..FRAGMENTS_MAX {
        let mark = reader.read_u32().await?;
        let length = usize::try_from(mark & !LAST_FRAGMENT).unwrap_or(usize::MAX);
        if length > RECORD_BYTES_MAX - record.len() {
            let reason =
                format!("a fragment of {length} bytes, expected {RECORD_BYTES_MAX} in all");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        record.reserve(length);
        let end = record.len() + length;
        let mut fragment = reader.take(u64::try_from(length).unwrap_or(u64::MAX));
        while record.len() < end {
            if fragment.read_buf(&mut record).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        if mark & LAST_FRAGMENT != 0 {
            return Ok(record.freeze());
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "a record of too many fragments"))
}

/// What the task of a connection has.
struct Connection {
    address: SocketAddr,
    security: Security,
    statistics: Arc<Statistics>,
    calls: mpsc::Receiver<Pending>,
}

/// How a connection ended.
enum End {
    /// Nobody will call any more.
    Finished,
    Lost(io::Error),
}

impl Connection {
    async fn run(mut self) {
        let outstanding = Outstanding::default();
        let mut wait = RECONNECT_WAIT_MIN;
        let mut silence_max = SILENCE_MIN;
        // Why it is away, as was logged.
        let mut known = None;
        loop {
            if outstanding.lock().is_empty() {
                let Some(call) = self.calls.recv().await else { return };
                outstanding.lock().insert(call.xid, call);
            }
            let progress = Mutex::new(None);
            let lost = match self.connect(silence_max).await {
                Ok(stream) => {
                    match self.converse(stream, &outstanding, &progress, silence_max).await {
                        End::Finished => return,
                        End::Lost(error) => error,
                    }
                }
                Err(error) => error,
            };
            self.statistics.connections_lost.add(1);
            if progress.lock().is_some() {
                (wait, silence_max, known) = (RECONNECT_WAIT_MIN, SILENCE_MIN, None);
            } else if lost.kind() == io::ErrorKind::TimedOut {
                silence_max = (silence_max * 2).min(SILENCE_MAX);
            }
            let reason = lost.to_string();
            if known.as_ref() != Some(&reason) {
                tracing::warn!(
                    address = %self.address, error = reason, calls = outstanding.lock().len(),
                    "the appliance's NFS face is away; what it is asked waits and is sent again"
                );
                known = Some(reason);
            }
            let wait_max = match lost.kind() {
                // Not where this machine's own kernel refuses.
                io::ErrorKind::PermissionDenied if lost.raw_os_error().is_none() => {
                    REFUSED_WAIT_MAX
                }
                _ => RECONNECT_WAIT_MAX,
            };
            wait = wait.min(wait_max);
            sleep(wait).await;
            wait = (wait * 2).min(wait_max);
        }
    }

    async fn connect(&self, silence_max: Duration) -> io::Result<Stream> {
        let connecting = timeout(CONNECT_TIME_MAX, TcpStream::connect(self.address));
        let stream = connecting.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        stream.set_nodelay(true)?;
        let secured = timeout(SECURE_TIME_MAX, self.security.begin(stream)).await;
        let late = |what| io::Error::new(io::ErrorKind::TimedOut, what);
        let mut stream = secured.map_err(|_| late("the TLS handshake"))??;
        // The server may have no place for it yet, as for a first call.
        let confirmed = timeout(silence_max, stream.confirm()).await;
        confirmed.map_err(|_| late("a first call in TLS"))??;
        Ok(stream)
    }

    /// Sends calls and takes replies until the connection is lost. `progress` is when the last
    /// reply came.
    async fn converse(
        &mut self,
        stream: Stream,
        outstanding: &Outstanding,
        progress: &Mutex<Option<Instant>>,
        silence_max: Duration,
    ) -> End {
        let Stream { reader, writer, .. } = stream;
        tokio::select! {
            end = send_calls(writer, &mut self.calls, outstanding) => end,
            Err(error) = take_replies(reader, outstanding, progress) => End::Lost(error),
            () = watch(outstanding, progress, silence_max) => {
                End::Lost(io::ErrorKind::TimedOut.into())
            }
            else => End::Lost(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

async fn send_calls(
    mut writer: impl AsyncWrite + Unpin,
    calls: &mut mpsc::Receiver<Pending>,
    outstanding: &Outstanding,
) -> End {
    let again: Vec<_> = {
        let mut outstanding = outstanding.lock();
        outstanding.retain(|_, call| !call.answer.is_closed());
        outstanding.values_mut().for_each(|call| call.sent = Instant::now());
        outstanding.values().map(|call| (call.head.clone(), call.payload.clone())).collect()
    };
    for (head, payload) in again {
        if let Err(error) = send(&mut writer, head, payload).await {
            return End::Lost(error);
        }
    }
    while let Some(mut call) = calls.recv().await {
        let (head, payload) = (call.head.clone(), call.payload.clone());
        call.sent = Instant::now();
        // No await between the two: were this cancelled there, the call would be lost.
        outstanding.lock().insert(call.xid, call);
        if let Err(error) = send(&mut writer, head, payload).await {
            return End::Lost(error);
        }
    }
    End::Finished
}

async fn send(
    writer: &mut (impl AsyncWrite + Unpin),
    head: Bytes,
    payload: Bytes,
) -> io::Result<()> {
    let padding = Bytes::from_static(&[0; 3]).slice(..padding_of(payload.len()));
    writer.write_all_buf(&mut head.chain(payload).chain(padding)).await?;
    // What TLS has encrypted need not have left.
    writer.flush().await
}

async fn take_replies(
    reader: impl AsyncRead + Unpin,
    outstanding: &Outstanding,
    progress: &Mutex<Option<Instant>>,
) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(16 << 10, reader);
    loop {
        let record = read_record(&mut reader).await?;
        *progress.lock() = Some(Instant::now());
        let xid = record.clone().try_get_u32().map_err(io::Error::other)?;
        let Some(call) = outstanding.lock().remove(&xid) else {
            let reason = format!("a reply to call {xid}, which is not under way");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        };
        // The caller may have gone.
        let _ = call.answer.send(record);
    }
}

/// Returns when calls are under way and nothing was heard for too long.
async fn watch(
    outstanding: &Outstanding,
    progress: &Mutex<Option<Instant>>,
    silence_max: Duration,
) {
    loop {
        sleep(WATCH_INTERVAL).await;
        let oldest = outstanding.lock().values().map(|call| call.sent).min();
        let heard = *progress.lock();
        if let Some(oldest) = oldest
            && heard.map_or(oldest, |heard| heard.max(oldest)).elapsed() > silence_max
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::future::try_join_all;
    use tokio::net::TcpListener;

    const READ: Procedure = Procedure { program: 100_003, version: 3, number: 6 };

    fn reply_to(call: &Bytes, results: &[u8]) -> Vec<u8> {
        let mut reply = Encoder::default();
        let length = u32::try_from(24 + results.len()).unwrap();
        reply.u32(length | LAST_FRAGMENT);
        reply.bytes.extend_from_slice(&call[..4]);
        [1, 0, 0, 0, 0].into_iter().for_each(|word| reply.u32(word));
        reply.bytes.extend_from_slice(results);
        reply.bytes
    }

    #[test]
    fn a_call_in_golden_bytes() {
        let payload = Bytes::from_static(b"abcde");
        let head = encode_call(9, READ, &[0, 0, 0, 42], Some(&payload));
        let mut expected = vec![0x80, 0, 0, 76];
        for word in [9, 0, 2, 100_003, 3, 6, 1, 20, 0, 0, 0, 0, 0, 0, 0, 42, 5_u32] {
            expected.extend_from_slice(&word.to_be_bytes());
        }
        assert_eq!(head, expected);
        let payload_bytes = 5 + 3;
        assert_eq!(head.len() - 4 + payload_bytes, 76);
    }

    #[test]
    fn refusals_are_told_apart() {
        let decode = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
            decode_reply(bytes.into())
        };
        assert!(decode(&[1, 1, 0, 0, 0, 0]).unwrap().is_some());
        assert!(decode(&[1, 1, 0, 0, 0, 5]).unwrap().is_none());
        assert!(matches!(decode(&[1, 1, 1, 1]), Err(RpcError::Denied { status: 1 })));
        assert!(matches!(decode(&[1, 1, 0, 0, 0, 3]), Err(RpcError::NotAccepted { status: 3 })));
        assert!(matches!(decode(&[1, 0, 0, 0, 0, 0]), Err(RpcError::Malformed(_))));
    }

    #[tokio::test]
    async fn records_are_bounded() {
        let mut long = &[0xff_u8, 0xff, 0xff, 0xff][..];
        assert_eq!(read_record(&mut long).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let empty = [0_u8; 4 * (FRAGMENTS_MAX + 1)];
        let error = read_record(&mut &empty[..]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let mut two = &b"\0\0\0\x02ab\x80\0\0\x01c"[..];
        assert_eq!(read_record(&mut two).await.unwrap(), "abc");
    }

    /// A server that sends payloads back, each after more time than makes it far.
    async fn far_server() -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    while let Ok(record) = read_record(&mut stream).await {
                        sleep(Duration::from_millis(2)).await;
                        stream.write_all(&reply_to(&record, &record[60..])).await.unwrap();
                    }
                });
            }
        });
        address
    }

    #[tokio::test]
    async fn calls_that_are_alone_and_have_a_short_answer_tell_how_far_the_server_is() {
        let address = far_server().await;
        for (at_once, bytes, is_known) in [(1, 4096, true), (2, 4096, false), (1, 8192, false)] {
            let distance = Arc::<Distance>::default();
            let known = Some(Arc::clone(&distance));
            let client = RpcClient::new(address, Security::None, Arc::default(), known);
            for _ in 0..16 {
                let call = || client.call(READ, &[], Some(Bytes::from(vec![7; bytes])));
                try_join_all((0..at_once).map(|_| call())).await.unwrap();
            }
            assert_eq!(distance.is_far(), is_known, "{at_once} calls at once of {bytes} bytes");
        }
    }

    #[tokio::test]
    async fn replies_in_any_order_and_a_lost_connection() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = RpcClient::new(address, Security::None, Arc::default(), None);
        let calls = ["one", "two", "three"].map(|text| {
            let client = client.clone();
            tokio::spawn(async move {
                let payload = Some(Bytes::from_static(text.as_bytes()));
                client.call(READ, &[], payload).await.unwrap().opaque(10).unwrap()
            })
        });
        let served = async {
            // Takes the calls and says nothing.
            let (mut first, _) = listener.accept().await.unwrap();
            for _ in 0..3 {
                read_record(&mut first).await.unwrap();
            }
            drop(first);
            let (mut second, _) = listener.accept().await.unwrap();
            let mut records = Vec::new();
            for _ in 0..3 {
                records.push(read_record(&mut second).await.unwrap());
            }
            for record in records.iter().rev() {
                // The payload is sent back as it came: length, bytes, padding.
                second.write_all(&reply_to(record, &record[60..])).await.unwrap();
            }
            let _ = second.read_u8().await;
        };
        let replies = async {
            let mut replies = Vec::new();
            for call in calls {
                replies.push(call.await.unwrap());
            }
            drop(client);
            replies
        };
        let both = timeout(Duration::from_secs(30), async { tokio::join!(served, replies) });
        assert_eq!(both.await.unwrap().1, ["one", "two", "three"]);
    }
}

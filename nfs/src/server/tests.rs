//! What cannot be brought about from outside: the server's patience with clients that do not
//! keep up, shortened; handles that only the server can make.

use std::pin::pin;
use std::time::Duration;

use slackwater_blockstore::{
    Attributes, CreateMode, InodeId, Name, Options, SetAttributes, Source, Stability,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use crate::auth::{Caller, Credentials};
use crate::client_certificate::Shown;
use crate::crowd::Crowd;
use crate::handle::Target;
use crate::options::ClientAccess;
use crate::portmap::Port;
use crate::proc::{self, Call};
use crate::procedure::NfsProcedure;
use crate::record::is_gone;
use crate::xdr::{Decoder, Encoder};

const LIMIT: Duration = Duration::from_secs(30);

/// A server takes nothing for so long only if it cannot.
const PAUSE: Duration = Duration::from_secs(1);

/// A time that no test waits for.
const LONG: Duration = Duration::from_secs(3600);

fn patient() -> Patience {
    Patience { first_call: LONG, handshake: LONG, record: LONG, reply: LONG, drain: LONG }
}

struct Fixture {
    address: std::net::SocketAddr,
    shared: Arc<Shared>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), NfsError>>,
    _directory: TempDir,
}

impl Fixture {
    async fn start(patience: Patience) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(Options::new(directory.path())).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let metrics = Arc::new(NfsMetrics::new());
        let options = NfsOptions::default();
        let shared = Arc::new(Shared::new(store, options, metrics, patience));
        let (stop, stopped) = oneshot::channel();
        let server = Server::new(Arc::clone(&shared)).unwrap();
        let task = tokio::spawn(async move {
            server.run(listener.into(), async { drop(stopped.await) }).await
        });
        Self { address, shared, stop, task, _directory: directory }
    }

    /// Waits until the server closed its one connection and has all memory back; `warned` tells
    /// whether it counts that as a fault of the client.
    async fn wait_for_end(&self, warned: bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let counters = self.shared.metrics.snapshot();
            if counters.connections_open == 0 && counters.bytes_in_flight == 0 {
                assert_eq!(counters.connections_dropped, u64::from(warned));
                return;
            }
            assert!(Instant::now() < deadline, "{counters:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the server, so that its store is closed before its directory goes.
    async fn end(self) {
        drop(self.stop);
        timeout(LIMIT, self.task).await.unwrap().unwrap().unwrap();
    }

    async fn connect(&self) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        // Small, so that it is soon full.
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(self.address).await.unwrap()
    }
}

/// Sends calls and reads no reply, until the server takes no more for a while: as replies wait, not
/// as it was held up; or until it has dropped the client.
async fn flood(fixture: &Fixture, client: &mut TcpStream) {
    let dump: [u32; 11] = [40 | 1 << 31, 1, 0, 2, 100_000, 2, 4, 0, 0, 0, 0];
    let calls: Vec<u8> = dump.iter().flat_map(|word| word.to_be_bytes()).collect();
    let calls = calls.repeat(1000);
    for _ in 0..2000 {
        let mut sent = pin!(client.write_all(&calls));
        let sent = loop {
            match timeout(PAUSE, &mut sent).await {
                Ok(sent) => break sent,
                Err(_) if fixture.shared.metrics.snapshot().calls_in_flight > 0 => return,
                Err(_) => {}
            }
        };
        if sent.is_err() {
            return;
        }
    }
    panic!("the server takes calls without bound");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_is_dropped() {
    let reply = Duration::from_millis(300);
    let fixture = Fixture::start(Patience { reply, ..patient() }).await;
    let mut client = fixture.connect().await;
    timeout(LIMIT, flood(&fixture, &mut client)).await.unwrap();
    fixture.wait_for_end(true).await;
    fixture.end().await;
}

#[tokio::test]
async fn a_connection_without_a_call_is_dropped() {
    let first_call = Duration::from_millis(50);
    let fixture = Fixture::start(Patience { first_call, ..patient() }).await;
    let mut client = fixture.connect().await;
    let closed = timeout(LIMIT, client.read_u8()).await.unwrap();
    assert!(closed.is_err());
    fixture.wait_for_end(false).await;
    fixture.end().await;
}

#[tokio::test]
async fn a_call_that_stops_half_way_is_dropped() {
    let record = Duration::from_millis(50);
    let fixture = Fixture::start(Patience { record, ..patient() }).await;
    let mut client = fixture.connect().await;
    client.write_all(&[0x80, 0, 0, 40, 0, 0]).await.unwrap();
    let closed = timeout(LIMIT, client.read_u8()).await.unwrap();
    assert!(closed.is_err());
    fixture.wait_for_end(true).await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_does_not_hold_up_the_end_for_ever() {
    let drain = Duration::from_millis(200);
    let fixture = Fixture::start(Patience { drain, ..patient() }).await;
    let mut client = fixture.connect().await;
    timeout(LIMIT, flood(&fixture, &mut client)).await.unwrap();
    fixture.stop.send(()).unwrap();
    let outcome = timeout(LIMIT, fixture.task).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(NfsError::Drain { connections: 1, .. })), "{outcome:?}");
}

/// A file that everybody may write.
fn open_file(shared: &Shared) -> Attributes {
    let name = Name::new(b"file").unwrap();
    let set = SetAttributes { mode: Some(0o666), ..SetAttributes::default() };
    let made = shared.store.create(InodeId::ROOT, &name, CreateMode::Guarded, &set);
    made.unwrap().attributes
}

/// A call of nobody in particular, for this file.
fn call(shared: &Shared, procedure: u32, file: &Attributes) -> Encoder {
    let mut call = Encoder::new();
    [7, 0, 2, 100_003, 3, procedure, 0, 0, 0, 0].into_iter().for_each(|word| call.u32(word));
    let Attributes { inode, generation, .. } = *file;
    call.opaque(&shared.handles.encode(Target::Inode { inode, generation }, None));
    call
}

/// The server's end of a connection by which the client sent this; it has left unless it `stays`.
async fn connection_after(sent: &[u8], stays: bool) -> (TcpStream, Option<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    client.write_all(sent).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    if stays {
        return (stream, Some(client));
    }
    drop(client);
    while !is_gone(&stream) {
        tokio::task::yield_now().await;
    }
    (stream, None)
}

/// Its thread may have been held up so long that the client has sent all again by another
/// connection, and other changes since.
#[tokio::test]
async fn what_a_client_sent_before_it_left_is_not_begun_after_it() {
    let fixture = Fixture::start(patient()).await;
    let shared = &fixture.shared;
    let file = open_file(shared);
    let mut write = call(shared, 7, &file);
    write.u64(0);
    [3, 0].into_iter().for_each(|word| write.u32(word));
    write.opaque(b"old");
    let mut truncate = call(shared, 2, &file);
    [0, 0, 0, 1, 0, 1, 0, 0, 0].into_iter().for_each(|word| truncate.u32(word));
    for (call, done) in [(write, &b"old"[..]), (truncate, b"n")] {
        let call = call.finish().0;
        for stays in [false, true] {
            let data = bytes::Bytes::from_static(b"new");
            shared.store.write(file.inode, 0, data, Stability::FileSync).unwrap();
            let (stream, client) = connection_after(&call, stays).await;
            let (crowd, stop) = (Crowd::new(1), watch::Sender::new(false));
            let guest = crowd.admit();
            assert!(guest.take_place().await);
            let peer = Peer::new("127.0.0.1:1".parse().unwrap(), Port::Nfs(2049), &shared.options);
            let shared = Arc::clone(shared);
            let store = Arc::clone(&shared.store);
            let serving = connection::serve(shared, stream, peer, &guest, stop.subscribe());
            let ending = async {
                if let Some(mut client) = client {
                    client.read_u32().await.unwrap();
                }
            };
            timeout(LIMIT, async { tokio::join!(serving, ending) }).await.unwrap();
            let found = store.read(Source::File(file.inode), 0, 3).unwrap().to_vec();
            assert_eq!(found, if stays { done } else { b"new" });
        }
    }
    fixture.end().await;
}

/// Dirty blocks keep the memory that their data came in, which is counted by the data.
#[tokio::test]
async fn what_follows_the_data_of_a_write_is_not_kept_with_it() {
    let fixture = Fixture::start(patient()).await;
    let shared = &fixture.shared;
    let file = open_file(shared);
    let Attributes { inode, generation, .. } = file;
    let data = vec![7; limits::COPIED_BYTES_MAX + 4096];
    let caller =
        Caller { credentials: Credentials::new(0, 0, &[]), access: ClientAccess::ReadWrite };
    // Only what was written to before is written to without waiting.
    for may_block in [true, false] {
        for rest in [0, 1 << 19] {
            let shown = Shown::NotAsked;
            let call =
                Call { shared, caller: &caller, may_block, outlet: None, scope: None, shown };
            let mut arguments = Encoder::new();
            arguments.opaque(&shared.handles.encode(Target::Inode { inode, generation }, None));
            arguments.u64(0);
            [u32::try_from(data.len()).unwrap(), 0]
                .into_iter()
                .for_each(|word| arguments.u32(word));
            arguments.opaque(&data);
            let frame = bytes::Bytes::from([arguments.finish().0, vec![0; rest]].concat());
            let mut reply = Encoder::new();
            // Behind the record's mark.
            let mut decoder = Decoder::at(&frame, 4);
            proc::run(NfsProcedure::Write, &call, &mut decoder, &mut reply).unwrap();
            assert_eq!(frame.is_unique(), rest > 0, "{may_block} {rest}");
        }
    }
    fixture.end().await;
}

#[tokio::test]
async fn a_handle_of_another_generation_is_stale() {
    let fixture = Fixture::start(patient()).await;
    let shared = &fixture.shared;
    let file = open_file(shared);
    let credentials = Credentials::new(0, 0, &[]);
    let caller = Caller { credentials, access: ClientAccess::ReadWrite };
    let shown = Shown::NotAsked;
    let call = Call { shared, caller: &caller, may_block: true, outlet: None, scope: None, shown };
    let status = |procedure, generation, rest: &[u32]| {
        let target = Target::Inode { inode: file.inode, generation };
        let mut arguments = Encoder::new();
        arguments.opaque(&shared.handles.encode(target, None));
        rest.iter().for_each(|word| arguments.u32(*word));
        let arguments = bytes::Bytes::from(arguments.finish().0).slice(4..);
        let mut reply = Encoder::new();
        proc::run(procedure, &call, &mut Decoder::new(&arguments), &mut reply).unwrap() as u32
    };
    let right = file.generation;
    let calls = [
        (NfsProcedure::GetAttributes, &[][..]),
        (NfsProcedure::Read, &[0, 0, 10]),
        (NfsProcedure::Write, &[0, 0, 0, 0, 0]),
        (NfsProcedure::Commit, &[0, 0, 0]),
        (NfsProcedure::SetAttributes, &[0; 7]),
    ];
    for (procedure, rest) in calls {
        assert_eq!(status(procedure, right, rest), 0, "{procedure:?}");
        assert_eq!(status(procedure, right.wrapping_add(1), rest), 70, "{procedure:?}");
    }
    fixture.end().await;
}

//! What cannot be brought about from outside: the server's patience with clients that do not
//! keep up, shortened; handles that only the server can make.

use std::time::Duration;

use slackwater_blockstore::{CreateMode, InodeId, Name, Options, SetAttributes};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use crate::auth::{Caller, Credentials};
use crate::handle::Target;
use crate::options::ClientAccess;
use crate::proc::{self, Call};
use crate::procedure::NfsProcedure;
use crate::xdr::{Decoder, Encoder};

const LIMIT: Duration = Duration::from_secs(30);

/// A time that no test waits for.
const LONG: Duration = Duration::from_secs(3600);

fn patient() -> Patience {
    Patience { first_call: LONG, record: LONG, reply: LONG, drain: LONG }
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
        let shared = Arc::new(Shared::new(store, options, metrics, address.port(), patience));
        let (stop, stopped) = oneshot::channel();
        let server = Server::new(Arc::clone(&shared)).unwrap();
        let task =
            tokio::spawn(async move { server.run(listener, async { drop(stopped.await) }).await });
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

/// Sends calls and reads no reply, until the server takes no more for a while.
async fn flood(client: &mut TcpStream) {
    let dump: [u32; 11] = [40 | 1 << 31, 1, 0, 2, 100_000, 2, 4, 0, 0, 0, 0];
    let calls: Vec<u8> = dump.iter().flat_map(|word| word.to_be_bytes()).collect();
    let calls = calls.repeat(1000);
    for _ in 0..2000 {
        let sent = timeout(Duration::from_millis(200), client.write_all(&calls)).await;
        if !matches!(sent, Ok(Ok(()))) {
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
    flood(&mut client).await;
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
    flood(&mut client).await;
    fixture.stop.send(()).unwrap();
    let outcome = timeout(LIMIT, fixture.task).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(NfsError::Drain { connections: 1, .. })), "{outcome:?}");
}

#[tokio::test]
async fn a_handle_of_another_generation_is_stale() {
    let fixture = Fixture::start(patient()).await;
    let shared = &fixture.shared;
    let root = shared.store.attributes(InodeId::ROOT).unwrap();
    let name = Name::new(b"file").unwrap();
    let set = SetAttributes { mode: Some(0o666), ..SetAttributes::default() };
    let file = shared.store.create(root.inode, &name, CreateMode::Guarded, &set).unwrap();
    let credentials = Credentials::new(0, 0, &[]);
    let caller = Caller { credentials, access: ClientAccess::ReadWrite };
    let call = Call { shared, caller: &caller, may_block: true };
    let status = |procedure, generation, rest: &[u32]| {
        let target = Target::Inode { inode: file.attributes.inode, generation };
        let mut arguments = Encoder::new();
        arguments.opaque(&shared.handles.encode(target));
        rest.iter().for_each(|word| arguments.u32(*word));
        let arguments = bytes::Bytes::from(arguments.finish().0).slice(4..);
        let mut reply = Encoder::new();
        proc::run(procedure, &call, &mut Decoder::new(&arguments), &mut reply).unwrap() as u32
    };
    let right = file.attributes.generation;
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

//! Bounds and the end: connections, memory, a graceful stop.

use std::collections::HashSet;
use std::pin::pin;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slackwater_nfs::{NfsMetricsSnapshot, NfsOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use crate::common::client::{Client, Cred, FILE_SYNC, NFS, call, proc, record, write_args};
use crate::common::{Args, Body, Server, SetAttr, root_options};
use crate::faults::{server_with, stalling_disk};

/// Longer than the server lets slow clients hold up others, shorter than it waits for silent
/// ones.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server takes or answers nothing for so long only if it cannot.
const PAUSE: Duration = Duration::from_secs(1);

/// Connections without a call that the server keeps.
const WITHOUT_PLACE: usize = 1024;

/// Asks for as many open files as this process may have: a shell gives it 1,024, and both ends of
/// each connection are here.
fn raise_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

#[tokio::test]
async fn connections_over_the_limit_wait_for_a_place() {
    let options = NfsOptions { connections_max: 2, ..root_options() };
    let server = Server::with(options).await;
    let mut one = server.client().await;
    let mut two = server.client().await;
    one.root().await;
    two.root().await;
    let mut three = server.client().await;
    let refused = timeout(Duration::from_millis(100), three.run(NFS, 0, &Args::new())).await;
    assert!(refused.is_err(), "it is not served yet");
    drop(one);
    // The reply to the call that was sent before.
    let mut reply = Body::new(three.receive().await);
    reply.u32();
    assert_eq!(reply.u32(), 1);
    assert!(server.counters().connections_open <= 2);
}

#[tokio::test]
async fn connections_that_say_nothing_give_way_and_those_that_called_stay() {
    // More than are let in without a call.
    const SILENT: usize = 1500;
    raise_open_files();
    let options = NfsOptions { connections_max: 4, ..root_options() };
    let server = Server::with(options).await;
    let mut early = server.client().await;
    let root = early.root().await;
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    for _ in 0..3 {
        let mut late = server.client().await;
        assert_eq!(timeout(PATIENCE, late.root()).await.unwrap(), root);
        silent.push(late.stream);
    }
    assert!(early.getattr(&root).await.is_ok(), "it has made calls");
    server.wait_until(|counters| counters.connections_open < 1100).await;
    // Those that came first went first, and were told.
    let gone = timeout(PATIENCE, silent[0].read(&mut [0; 1])).await.unwrap();
    assert!(matches!(gone, Ok(0) | Err(_)), "{gone:?}");
}

/// Options with memory for one largest READ and one largest WRITE.
fn little_memory() -> NfsOptions {
    NfsOptions { in_flight_bytes_max: 4 << 20, ..root_options() }
}

/// A dropped connection is counted after its memory was freed, so another call may get that first.
async fn one_was_dropped(server: &Server) {
    let dropped = server.wait_until(|counters| counters.connections_dropped > 0);
    timeout(PATIENCE, dropped).await.unwrap();
    assert_eq!(server.counters().connections_dropped, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_a_byte_at_a_time_gives_up_the_memory_that_others_want() {
    let server = Server::with(little_memory()).await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.setattr(&file, &SetAttr::size(1 << 20)).await.unwrap();
    let mut slow = server.client().await;
    flood(&mut slow, &file).await;
    let trickle = tokio::spawn(async move {
        while slow.stream.read_u8().await.is_ok() {
            sleep(Duration::from_millis(100)).await;
        }
    });
    // The slow client takes a byte all the time, so no limit on silence drops it. It has to leave once
    // another call waits for memory, which is not before the kernel's own buffers are full; how large
    // they are only the kernel knows. So the other client reads until that has happened.
    let until_dropped = async {
        while server.counters().connections_dropped == 0 {
            let (data, _) = client.read(&file, 0, 1 << 20).await.unwrap();
            assert_eq!(data.len(), 1 << 20);
        }
    };
    timeout(PATIENCE, until_dropped).await.unwrap();
    assert_eq!(server.counters().connections_dropped, 1);
    trickle.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_trickles_in_gives_up_the_memory_that_others_want() {
    let server = Server::with(little_memory()).await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let args = write_args(&file, 0, &vec![7; 1 << 20], FILE_SYNC);
    let call = record(&call(1, NFS, proc::WRITE, &Cred::user(0, 0), &args));
    let mut slow = server.client().await;
    slow.send(&call[..100 << 10]).await;
    server.wait_until(|counters| counters.bytes_in_flight >= 1 << 20).await;
    let trickle = tokio::spawn(async move {
        for byte in &call[100 << 10..] {
            if slow.stream.write_u8(*byte).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
    });
    let data = vec![8; 1 << 20];
    let write = client.write(&file, 0, &data, FILE_SYNC);
    assert!(timeout(PATIENCE, write).await.unwrap().is_ok());
    one_was_dropped(&server).await;
    trickle.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_in_small_fragments_that_stops_gives_up_the_memory_that_others_want() {
    let server = Server::with(little_memory()).await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let args = write_args(&file, 0, &vec![7; 1 << 20], FILE_SYNC);
    let call = call(1, NFS, proc::WRITE, &Cred::user(0, 0), &args);
    let mut slow = server.client().await;
    // How much more will come is not known, so it is charged for the largest record.
    for fragment in call[..33 << 10].chunks(11 << 10) {
        slow.send(&u32::try_from(fragment.len()).unwrap().to_be_bytes()).await;
        slow.send(fragment).await;
    }
    server.wait_until(|counters| counters.bytes_in_flight >= 1 << 20).await;
    let data = vec![8; 1 << 20];
    let write = client.write(&file, 0, &data, FILE_SYNC);
    assert!(timeout(PATIENCE, write).await.unwrap().is_ok());
    one_was_dropped(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_waits_for_a_place_gives_up_the_memory_that_others_want() {
    let options = NfsOptions { connections_max: 1, ..little_memory() };
    let server = Server::with(options).await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let data = vec![7; 1 << 20];
    let args = write_args(&file, 0, &data, FILE_SYNC);
    let call = record(&call(1, NFS, proc::WRITE, &Cred::user(0, 0), &args));
    let mut without_place = server.client().await;
    without_place.send(&call).await;
    server.wait_until(|counters| counters.bytes_in_flight >= 1 << 20).await;
    // Who has the only place waits for that memory, so that it never comes free.
    let write = client.write(&file, 0, &data, FILE_SYNC);
    assert!(timeout(PATIENCE, write).await.unwrap().is_ok());
    one_was_dropped(&server).await;
}

/// Sends reads of a hole of 1 MiB each until the connection takes no more, reads none of the
/// replies, and answers how many were sent.
async fn flood(client: &mut Client, file: &[u8]) -> u32 {
    let mut sent = 0;
    loop {
        let args = Args::new().opaque(file).u64(0).u32(1 << 20);
        let bytes = record(&call(sent, NFS, proc::READ, &Cred::user(0, 0), &args)).repeat(100);
        let write = client.stream.write_all(&bytes);
        if timeout(Duration::from_millis(300), write).await.is_err() {
            return sent;
        }
        sent += 100;
        assert!(sent < 2_000_000, "the server reads on without bound");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_costs_bounded_memory_and_slows_nobody() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.setattr(&file, &SetAttr::size(1 << 20)).await.unwrap();
    let mut greedy = server.client().await;
    flood(&mut greedy, &file).await;
    // Replies wait.
    server.wait_until(|counters| counters.bytes_in_flight > 1 << 20).await;
    let counters = server.counters();
    assert!(counters.bytes_in_flight <= 16 << 20, "{} bytes", counters.bytes_in_flight);
    assert!(counters.calls_in_flight <= 16, "each is charged the MiB that it answers");
    for _ in 0..100 {
        assert!(client.getattr(&file).await.is_ok());
    }
    let (data, _) = client.read(&file, 0, 1 << 20).await.unwrap();
    assert_eq!(data.len(), 1 << 20);
    client.write(&file, 0, b"data", FILE_SYNC).await.unwrap();
    drop(greedy);
    // Its memory comes back.
    server.wait_until(|counters| counters.bytes_in_flight == 0).await;
}

/// A server with little memory that lets 127.0.0.1 in, and a client at another address.
async fn with_refused() -> (Server, TcpStream) {
    let clients = vec!["127.0.0.1:rw".parse().unwrap()];
    let server = Server::with(NfsOptions { clients, ..little_memory() }).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    // Little room for replies that it does not take.
    socket.set_recv_buffer_size(4096).unwrap();
    let refused = socket.connect(server.address).await.unwrap();
    (server, refused)
}

fn null_calls(count: usize) -> Vec<u8> {
    record(&call(1, NFS, proc::NULL, &Cred::user(0, 0), &Args::new())).repeat(count)
}

/// Sends NULL calls until the connection takes no more, as replies wait, and reads none.
async fn flood_with_null(server: &Server, refused: &mut TcpStream) {
    let calls = null_calls(1000);
    for _ in 0..10_000 {
        let mut write = pin!(refused.write_all(&calls));
        while timeout(PAUSE, &mut write).await.is_err() {
            if server.counters().calls_in_flight > 0 {
                return;
            }
        }
    }
    panic!("the server reads on without bound");
}

/// Sends NULL calls until replies wait, but not so many that the server reads no more.
async fn stall_replies(server: &Server, refused: &mut TcpStream) {
    const STEP: usize = 200;
    let calls = null_calls(STEP);
    let run = |counters: &NfsMetricsSnapshot| {
        counters
            .procedures
            .iter()
            .filter(|one| one.procedure == "NULL")
            .map(|one| one.calls)
            .sum::<u64>()
    };
    for sent in 1..100_000_u64 {
        refused.write_all(&calls).await.unwrap();
        let sent = sent * u64::try_from(STEP).unwrap();
        server.wait_until(|counters| run(counters) == sent).await;
        let answered = server.wait_until(|counters| counters.calls_in_flight == 0);
        if timeout(PAUSE, answered).await.is_err() {
            return;
        }
    }
    panic!("the client's replies go somewhere");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_may_not_mount_holds_no_memory_that_others_wait_for() {
    let (server, mut refused) = with_refused().await;
    timeout(PATIENCE, flood_with_null(&server, &mut refused)).await.unwrap();
    // Its replies wait.
    server.wait_until(|counters| counters.bytes_in_flight > 0).await;
    let mut client = server.client().await;
    let root = timeout(PATIENCE, client.root()).await.unwrap();
    client.getattr(&root).await.unwrap();
    // Nor did it have to be dropped for that.
    assert_eq!(server.counters().connections_dropped, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_has_to_leave_does_not_stay_for_replies_that_it_does_not_take() {
    raise_open_files();
    for is_half_closed in [false, true] {
        let (server, mut refused) = with_refused().await;
        if is_half_closed {
            stall_replies(&server, &mut refused).await;
            refused.shutdown().await.unwrap();
        } else {
            timeout(PATIENCE, flood_with_null(&server, &mut refused)).await.unwrap();
        }
        let mut silent = Vec::new();
        for _ in 0..WITHOUT_PLACE {
            silent.push(TcpStream::connect(server.address).await.unwrap());
        }
        let all = u64::try_from(WITHOUT_PLACE + 1).unwrap();
        let left = server.wait_until(|counters| {
            counters.connections_accepted == all && counters.connections_open < all
        });
        timeout(PATIENCE, left).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_in_flight_are_answered_when_the_server_stops() {
    const CALLS: u32 = 200;
    let (disk, gate) = stalling_disk();
    let mut server = server_with(disk, None, root_options());
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    server.wait_until(|counters| counters.calls_in_flight == 0).await;
    let shut = gate.shut();
    let stream: Vec<u8> = (0..CALLS)
        .flat_map(|number| {
            let args = write_args(&file, u64::from(number) * 4096, &[1; 4096], FILE_SYNC);
            record(&call(number, NFS, proc::WRITE, &Cred::user(0, 0), &args))
        })
        .collect();
    client.send(&stream).await;
    server.wait_until(|counters| counters.calls_in_flight == u64::from(CALLS)).await;
    // The disk goes on once the stop has begun: the server listens no more.
    let address = server.address;
    let stopping = async {
        while TcpStream::connect(address).await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        drop(shut);
    };
    let (ended, ()) =
        timeout(PATIENCE, async { tokio::join!(server.end(), stopping) }).await.unwrap();
    ended.unwrap();
    let counters = server.counters();
    assert_eq!((counters.calls_in_flight, counters.connections_open), (0, 0));
    // Every call was answered, then the connection was closed.
    let mut answered = HashSet::new();
    for _ in 0..CALLS {
        let mut reply = Body::new(client.receive().await);
        let header: Vec<u32> = (0..7).map(|_| reply.u32()).collect();
        assert_eq!(header[1..], [1, 0, 0, 0, 0, 0]);
        assert!(answered.insert(header[0]), "two replies to call {}", header[0]);
    }
    assert!(client.is_closed().await);
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err(), "nobody listens");
}

#[tokio::test]
async fn a_burst_of_calls_is_answered_with_one_write() {
    const CALLS: u32 = 16;
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let args = Args::new().opaque(&root);
    let one = |number| record(&call(number, NFS, proc::GETATTR, &Cred::user(0, 0), &args));
    client.send(&one(0)).await;
    let reply_bytes = client.receive().await.len() + 4;
    let expected = usize::try_from(CALLS).unwrap() * reply_bytes;
    client.send(&(1..=CALLS).flat_map(one).collect::<Vec<_>>()).await;
    // What was written at once is read at once.
    let mut replies = vec![0; 2 * expected];
    let read = client.stream.read(&mut replies);
    assert_eq!(timeout(PATIENCE, read).await.unwrap().unwrap(), expected);
}

#[tokio::test]
async fn an_idle_connection_does_not_hold_up_the_end() {
    let mut server = Server::start().await;
    let mut idle = server.client().await;
    idle.root().await;
    let mut half = server.client().await;
    half.send(&[0x80, 0, 0, 100, 1, 2, 3]).await;
    let start = std::time::Instant::now();
    server.end().await.unwrap();
    // For a call that is under way it waits so long.
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(idle.is_closed().await);
}

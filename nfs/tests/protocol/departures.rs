//! Clients that go away: what they asked before must not come after what is asked later, and
//! nobody is warned of what is ordinary.

use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::AsyncWriteExt;

use crate::common::client::{
    Client, Cred, FILE_SYNC, NFS, UNSTABLE, call, proc, record, write_args,
};
use crate::common::{Args, Body, Server, root_options};
use crate::faults::{Gate, server_with, stalling_disk};
use slackwater_nfs::NfsOptions;

const OLD: [u8; 4096] = [1; 4096];
const LATE: [u8; 4096] = [2; 4096];
const NEW: [u8; 4096] = [3; 4096];

/// More connections than a server has threads for them.
const CONNECTIONS_MANY: usize = 32;

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Departure {
    HalfClose,
    Close,
    Reset,
    BrokenRecord,
}

/// One lane thread over a disk that may stall; two files with old data, and the client that made
/// them.
struct Fixture {
    gate: Arc<Gate>,
    server: Server,
    client: Client,
    file: Vec<u8>,
    other: Vec<u8>,
}

impl Fixture {
    async fn new() -> Self {
        Self::with(NfsOptions { io_threads: 1, ..root_options() }).await
    }

    async fn with(options: NfsOptions) -> Self {
        let (disk, gate) = stalling_disk();
        let server = server_with(disk, None, options);
        let mut client = server.client().await;
        let root = client.root().await;
        let file = client.create(&root, b"file").await.unwrap();
        let other = client.create(&root, b"other").await.unwrap();
        client.write(&file, 0, &OLD, FILE_SYNC).await.unwrap();
        client.write(&other, 0, &OLD, FILE_SYNC).await.unwrap();
        // A call counts for a moment longer than its reply takes.
        server.wait_until(|counters| counters.calls_in_flight == 0).await;
        Self { gate, server, client, file, other }
    }

    /// A client with a WRITE that holds the lane's only thread and one that waits for it.
    async fn leaver(&self) -> Client {
        let mut leaver = self.server.client().await;
        for (number, file) in [(0, &self.other), (1, &self.file)] {
            leaver.send(&write_call(number, file, &LATE, FILE_SYNC)).await;
        }
        self.server.wait_until(|counters| counters.calls_in_flight == 2).await;
        // The first has begun: otherwise it would be dropped, too.
        self.gate.wait_for_a_sync().await;
        leaver
    }

    /// Returns once every thread of the server has looked at its connections.
    async fn let_the_server_notice(&self) {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS_MANY {
            clients.push(self.server.client().await);
        }
        for _ in 0..2 {
            for client in &mut clients {
                client.getattr(&self.file).await.unwrap();
            }
        }
    }

    async fn content(&mut self) -> Vec<u8> {
        self.client.read(&self.file, 0, 4096).await.unwrap().0
    }
}

fn write_call(number: u32, file: &[u8], data: &[u8], stability: u32) -> Vec<u8> {
    let args = write_args(file, 0, data, stability);
    record(&call(number, NFS, proc::WRITE, &Cred::user(0, 0), &args))
}

/// The client as far as it is still there.
async fn leave(mut client: Client, departure: Departure) -> Option<Client> {
    match departure {
        Departure::HalfClose => client.stream.shutdown().await.unwrap(),
        Departure::BrokenRecord => client.send(&[0xff; 4]).await,
        Departure::Close => return None,
        Departure::Reset => {
            sockopt::set_socket_linger(&client.stream, Some(Duration::ZERO)).unwrap();
            return None;
        }
    }
    Some(client)
}

const DEPARTURES: [Departure; 4] =
    [Departure::HalfClose, Departure::Close, Departure::Reset, Departure::BrokenRecord];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_of_a_client_that_leaves_does_not_come_after_newer_data() {
    for departure in DEPARTURES {
        let mut fixture = Fixture::new().await;
        let shut = fixture.gate.shut();
        let leaver = leave(fixture.leaver().await, departure).await;
        // On another connection, as the same client does once it is back.
        let newer = write_call(9, &fixture.file, &NEW, UNSTABLE);
        fixture.client.send(&newer).await;
        fixture.server.wait_until(|counters| counters.calls_in_flight == 3).await;
        drop(shut);
        assert_eq!(Body::new(fixture.client.receive().await).u32(), 9);
        drop(leaver);
        fixture.server.wait_until(|counters| counters.calls_in_flight == 0).await;
        assert!(fixture.content().await == NEW, "{departure:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_of_a_client_that_leaves_is_not_written() {
    for departure in DEPARTURES {
        let mut fixture = Fixture::new().await;
        let shut = fixture.gate.shut();
        let leaver = leave(fixture.leaver().await, departure).await;
        fixture.let_the_server_notice().await;
        drop(shut);
        if let Some(mut leaver) = leaver {
            // What had begun is still answered.
            assert_eq!(Body::new(leaver.receive().await).u32(), 0, "{departure:?}");
            assert!(leaver.is_closed().await, "{departure:?}");
        }
        fixture.server.wait_until(|counters| counters.calls_in_flight == 0).await;
        assert!(fixture.content().await == OLD, "{departure:?}");
    }
}

/// A part of a block waits for a flush of its file, begun already, while its client leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_flush_of_a_client_that_leaves_is_not_written() {
    for departure in DEPARTURES {
        let options = NfsOptions { io_threads: 4, ..root_options() };
        let mut fixture = Fixture::with(options).await;
        let shut = fixture.gate.shut();
        let mut flushing = fixture.server.client().await;
        let behind = write_args(&fixture.file, 4096, &LATE, FILE_SYNC);
        flushing.send(&record(&call(0, NFS, proc::WRITE, &Cred::user(0, 0), &behind))).await;
        fixture.gate.wait_for_a_sync().await;
        let mut leaver = fixture.server.client().await;
        leaver.send(&write_call(1, &fixture.file, &LATE[..10], UNSTABLE)).await;
        fixture.server.wait_until(|counters| counters.calls_in_flight == 2).await;
        // By now a thread of the lane has it, most likely.
        fixture.let_the_server_notice().await;
        let _leaver = leave(leaver, departure).await;
        fixture.let_the_server_notice().await;
        drop(shut);
        fixture.server.wait_until(|counters| counters.calls_in_flight == 0).await;
        assert!(fixture.content().await == OLD, "{departure:?}");
    }
}

/// A reader that waits for room among the calls in flight sees that its client has left, and does not
/// begin what that client has sent again since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_the_budget_of_a_client_that_leaves_is_not_begun() {
    for departure in [Departure::HalfClose, Departure::Close, Departure::Reset] {
        // Half of it is for changes.
        let in_flight_bytes_max = 4 << 20;
        let mut fixture = Fixture::with(NfsOptions { in_flight_bytes_max, ..root_options() }).await;
        let shut = fixture.gate.shut();
        let mut others = Vec::new();
        for data in [vec![4; 1 << 20], vec![5; (1 << 20) - (8 << 10)]] {
            let mut other = fixture.server.client().await;
            other.send(&write_call(0, &fixture.other, &data, FILE_SYNC)).await;
            others.push(other);
        }
        fixture.server.wait_until(|counters| counters.calls_in_flight == 2).await;
        fixture.gate.wait_for_a_sync().await;
        let before = fixture.server.counters().connections_open;
        let mut leavers = Vec::new();
        // One that is charged once it is whole, and one that is charged while it comes.
        for length in [16 << 10, 1 << 20] {
            let mut leaver = fixture.server.client().await;
            leaver.getattr(&fixture.file).await.unwrap();
            let call = write_call(1, &fixture.file, &vec![6; length], FILE_SYNC);
            leaver.send(&call[..call.len().min(40 << 10)]).await;
            leavers.extend(leave(leaver, departure).await);
        }
        fixture.server.wait_until(|counters| counters.connections_open == before).await;
        assert_eq!(fixture.server.counters().calls_in_flight, 2, "the disk still stalls");
        drop(shut);
        fixture.server.wait_until(|counters| counters.calls_in_flight == 0).await;
        assert!(fixture.content().await == OLD, "{departure:?}");
    }
}

/// Nor does one that waits for a place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_place_of_a_client_that_leaves_is_not_begun() {
    for departure in [Departure::HalfClose, Departure::Close, Departure::Reset] {
        let options = NfsOptions { connections_max: 1, ..root_options() };
        let mut fixture = Fixture::with(options).await;
        let mut leaver = fixture.server.client().await;
        // So large that it is charged: by this it is seen that it has come.
        let late = LATE.repeat(256);
        leaver.send(&write_call(1, &fixture.file, &late, UNSTABLE)).await;
        fixture.server.wait_until(|counters| counters.calls_in_flight == 1).await;
        let _leaver = leave(leaver, departure).await;
        fixture.client.write(&fixture.file, 0, &NEW, FILE_SYNC).await.unwrap();
        // The only place comes free.
        fixture.client = fixture.server.client().await;
        assert!(fixture.content().await == NEW, "{departure:?}");
        fixture.server.wait_until(|counters| counters.calls_in_flight == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_does_not_overtake_one_of_another_connection_that_waits() {
    let mut fixture = Fixture::new().await;
    let root = fixture.client.root().await;
    let third = fixture.client.create(&root, b"third").await.unwrap();
    fixture.client.write(&third, 0, &OLD, UNSTABLE).await.unwrap();
    let shut = fixture.gate.shut();
    let mut other = fixture.leaver().await;
    // A file without any that waits is not held up.
    fixture.client.write(&third, 0, &NEW, UNSTABLE).await.unwrap();
    let newer = write_call(9, &fixture.file, &NEW, UNSTABLE);
    fixture.client.send(&newer).await;
    fixture.server.wait_until(|counters| counters.calls_in_flight == 3).await;
    drop(shut);
    for number in 0..2 {
        assert_eq!(Body::new(other.receive().await).u32(), number);
    }
    assert_eq!(Body::new(fixture.client.receive().await).u32(), 9);
    assert!(fixture.content().await == NEW);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_warned_of_clients_that_just_leave() {
    let fixture = Fixture::new().await;
    // With replies that come later.
    for departure in [Departure::Close, Departure::Reset] {
        let shut = fixture.gate.shut();
        let leaver = fixture.leaver().await;
        drop(leave(leaver, departure).await);
        fixture.let_the_server_notice().await;
        drop(shut);
        fixture.server.wait_until(|counters| counters.connections_open == 1).await;
    }
    // With a reply that was not read, in the middle of a call, and by a reset.
    let getattr = Args::new().opaque(&fixture.file);
    let getattr = record(&call(5, NFS, proc::GETATTR, &Cred::user(0, 0), &getattr));
    for sent in [&getattr[..], &getattr[..10]] {
        for departure in [Departure::Close, Departure::Reset] {
            let accepted = fixture.server.counters().connections_accepted + 1;
            let mut leaver = fixture.server.client().await;
            leaver.send(sent).await;
            if sent.len() == getattr.len() {
                leaver.stream.readable().await.unwrap();
            }
            drop(leave(leaver, departure).await);
            // Not before it was let in.
            let gone = fixture.server.wait_until(|counters| {
                counters.connections_accepted == accepted && counters.connections_open == 1
            });
            gone.await;
        }
    }
    assert_eq!(fixture.server.counters().connections_dropped, 0);
    // One that breaks the protocol is worth a warning.
    drop(leave(fixture.server.client().await, Departure::BrokenRecord).await);
    fixture.server.wait_until(|counters| counters.connections_dropped == 1).await;
}

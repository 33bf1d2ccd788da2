//! The outlet against a real socket: order, partial writes, clients that go away.

use std::thread;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::budget::{Budget, ConnectionBudget, Purpose};
use crate::metrics::NfsMetrics;

const LIMIT: Duration = Duration::from_secs(30);

struct Fixture {
    outlet: Outlet,
    writer: JoinHandle<Result<(), WriteError>>,
    client: TcpStream,
    budget: Arc<ConnectionBudget>,
    metrics: Arc<NfsMetrics>,
}

impl Fixture {
    async fn new(patience: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpSocket::new_v4().unwrap();
        // Small, so that it is soon full.
        socket.set_recv_buffer_size(4096).unwrap();
        let client = socket.connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        stream.writable().await.unwrap();
        let (_, write_half) = stream.into_split();
        let metrics = Arc::new(NfsMetrics::new());
        let all = Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::clone(&metrics));
        let budget = Arc::new(all.connection());
        let (outlet, writer) = outlet(WriteHalf::Plain(write_half), patience, Arc::clone(&budget));
        Self { outlet, writer: tokio::spawn(writer.run()), client, budget, metrics }
    }

    fn reply(&self, head: &[u8], pieces: Vec<Bytes>) -> Reply {
        let charge = self.budget.try_charge(Purpose::Read, 0).unwrap();
        Reply::new(Finished { head: head.to_vec(), pieces }, charge)
    }
}

/// A reply of words that tell who made it and its number, of a length of its own.
fn words(maker: u32, number: u32) -> Vec<u8> {
    let word = (maker << 24 | number).to_be_bytes();
    let count = 1 + (number * 7919) % 5000;
    let length = (count * 4).to_be_bytes();
    length.into_iter().chain(word.repeat(usize::try_from(count).unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_many_send_arrives_whole_and_in_each_ones_order_at_a_slow_client() {
    const MAKERS: u32 = 4;
    const REPLIES: u32 = 200;
    let mut fixture = Fixture::new(LIMIT).await;
    let makers: Vec<_> = (0..MAKERS)
        .map(|maker| {
            let outlet = fixture.outlet.clone();
            let replies: Vec<Reply> = (0..REPLIES)
                .map(|number| {
                    // A head, an empty piece, and the rest in pieces.
                    let bytes = Bytes::from(words(maker, number));
                    let rest = bytes.slice(4..);
                    let half = rest.len() / 2;
                    let pieces = vec![Bytes::new(), rest.slice(..half), rest.slice(half..)];
                    fixture.reply(&bytes[..4], pieces)
                })
                .collect();
            thread::spawn(move || {
                let mut batch = Outgoing::default();
                for reply in replies {
                    batch.push(reply);
                    if maker == 0 || batch.is_batch() {
                        outlet.send(&mut batch);
                        assert!(batch.is_empty());
                    }
                }
                outlet.send(&mut batch);
            })
        })
        .collect();
    drop(fixture.outlet);
    let mut next = [0; 4];
    for _ in 0..MAKERS * REPLIES {
        let length = timeout(LIMIT, fixture.client.read_u32()).await.unwrap().unwrap();
        let mut body = vec![0; usize::try_from(length).unwrap()];
        timeout(LIMIT, fixture.client.read_exact(&mut body)).await.unwrap().unwrap();
        let maker = usize::from(body[0]);
        let expected = words(u32::from(body[0]), next[maker]);
        assert!(expected[4..] == body, "maker {maker}, reply {}", next[maker]);
        next[maker] += 1;
    }
    // Then the writer closes the socket, and every charge is given back.
    assert_eq!(timeout(LIMIT, fixture.client.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
    fixture.writer.await.unwrap().unwrap();
    makers.into_iter().for_each(|maker| maker.join().unwrap());
    assert_eq!(fixture.metrics.snapshot().bytes_in_flight, 0);
}

#[tokio::test]
async fn a_reply_is_sent_without_the_writer() {
    let mut fixture = Fixture::new(LIMIT).await;
    fixture.writer.abort();
    // On this one thread the writer has not run yet, and is cut off before it can.
    fixture.outlet.send_one(fixture.reply(b"at once", Vec::new()));
    let mut got = [0; 7];
    timeout(LIMIT, fixture.client.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(&got, b"at once");
    assert!((&mut fixture.writer).await.unwrap_err().is_cancelled());
    // Without its writer the connection is gone, and what comes is dropped.
    assert!(fixture.outlet.is_abandoned());
    fixture.outlet.send_one(fixture.reply(b"too late", Vec::new()));
    assert_eq!(fixture.metrics.snapshot().calls_in_flight, 0);
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_given_up_in_time_and_nobody_waits_for_it() {
    let mut fixture = Fixture::new(Duration::from_millis(50)).await;
    let piece = Bytes::from(vec![7; 1 << 20]);
    // More than the buffers of both ends hold.
    for _ in 0..32 {
        fixture.outlet.send_one(fixture.reply(b"head", vec![piece.clone()]));
    }
    assert!(fixture.metrics.snapshot().calls_in_flight > 1, "replies wait");
    let error = timeout(LIMIT, fixture.writer).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, WriteError::Stalled { .. }), "{error}");
    assert!(fixture.outlet.is_abandoned());
    assert_eq!(fixture.metrics.snapshot().calls_in_flight, 0);
    // The client learns of it, though a call in flight still holds the outlet.
    let mut rest = Vec::new();
    let end = timeout(LIMIT, fixture.client.read_to_end(&mut rest)).await.unwrap();
    assert!(end.is_err() || rest.len() < 32 << 20, "an end before the last reply");
}

#[tokio::test]
async fn a_failure_of_who_sends_ends_the_writer_with_its_reason() {
    let Fixture { outlet, writer, client, budget, metrics } = Fixture::new(LIMIT).await;
    // Closed with bytes unread, a socket answers what comes with a reset.
    let reply = |byte: u8| {
        let charge = budget.try_charge(Purpose::Read, 0).unwrap();
        Reply::new(Finished { head: vec![byte; 100], pieces: Vec::new() }, charge)
    };
    outlet.send_one(reply(1));
    client.readable().await.unwrap();
    drop(client);
    let until_reset = async {
        while !outlet.is_abandoned() {
            outlet.send_one(reply(2));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, until_reset).await.unwrap();
    let error = timeout(LIMIT, writer).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, WriteError::Io(_)), "{error}");
    assert_eq!(metrics.snapshot().calls_in_flight, 0);
}

#[tokio::test]
async fn a_maker_leaves_to_the_writer_what_is_more_than_a_round() {
    let Fixture { outlet, writer, mut client, budget, .. } = Fixture::new(LIMIT).await;
    let reply = |bytes: usize| {
        let charge = budget.try_charge(Purpose::Read, 0).unwrap();
        Reply::new(Finished { head: vec![7; bytes], pieces: Vec::new() }, charge)
    };
    let reading = tokio::spawn(async move {
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        all.len()
    });
    let mut many = Outgoing::default();
    for _ in 0..8 {
        many.push(reply(limits::SEND_BYTES_MAX));
    }
    outlet.send(&mut many);
    assert!(many.is_empty());
    assert_eq!(outlet.0.0.state.lock().sending, Sending::Writer);
    outlet.abandon();
    assert!(outlet.is_abandoned());
    drop(outlet);
    // All the same, what was to be sent is sent.
    assert_eq!(timeout(LIMIT, reading).await.unwrap().unwrap(), 8 * limits::SEND_BYTES_MAX);
    timeout(LIMIT, writer).await.unwrap().unwrap().unwrap();
}

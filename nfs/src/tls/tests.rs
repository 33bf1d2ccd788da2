//! One connection in TLS against a real socket: what has no room, what comes at once, and how it ends.
#![allow(clippy::indexing_slicing, reason = "a panic fails the test")]

use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::budget::{Budget, Purpose};
use crate::dispatch::{Finished, Peer};
use crate::greeting::{self, GreetingError, Opened};
use crate::limits::Patience;
use crate::metrics::NfsMetrics;
use crate::options::NfsOptions;
use crate::outlet::{Reply, outlet};
use crate::portmap::Port;
use crate::transport::{ReadHalf, WriteHalf};

/// No test waits longer for anything.
const LIMIT: Duration = Duration::from_secs(60);

const PROBE: [u32; 11] = [0x8000_0028, 9, 0, 2, 100_003, 3, 0, 7, 0, 0, 0];

fn identity(policy: TlsPolicy) -> (NfsTls, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    (NfsTls::new(vec![certificate.clone()], key, policy).unwrap(), certificate)
}

/// A connection whose client has sent its probe, and both its ends; the client's holds few bytes.
async fn probed() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(listener.local_addr().unwrap()).await.unwrap();
    client.set_nodelay(true).unwrap();
    let (server, _) = listener.accept().await.unwrap();
    let probe: Vec<u8> = PROBE.iter().flat_map(|word| word.to_be_bytes()).collect();
    client.write_all(&probe).await.unwrap();
    (server, client)
}

async fn shake_hands(mut stream: TcpStream, trusted: CertificateDer<'static>) -> Client {
    stream.read_exact(&mut [0; 36]).await.unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(trusted).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

type Client = TlsStream<TcpStream>;

async fn opened() -> (Opened, Client) {
    let (tls, certificate) = identity(TlsPolicy::Offered);
    let (server, client) = probed().await;
    let patience = Patience::default();
    let (opened, client) = tokio::join!(
        greeting::begin(server, Port::Nfs(1), &tls, &patience),
        shake_hands(client, certificate)
    );
    let opened = opened.unwrap();
    assert!(opened.is_encrypted());
    (opened, client)
}

/// Encrypts as the client, for bytes that are sent by hand.
fn encrypted(client: &mut Client, text: &[u8]) -> Vec<u8> {
    let (_, keys) = client.get_mut();
    keys.writer().write_all(text).unwrap();
    let mut bytes = Vec::new();
    while keys.wants_write() {
        keys.write_tls(&mut bytes).unwrap();
    }
    bytes
}

async fn read(source: &mut ReadHalf) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(1024);
    timeout(LIMIT, source.read_buf(&mut bytes)).await.unwrap()?;
    Ok(bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_reply_that_was_encrypted_without_room_for_it_is_sent() {
    let (Opened { socket, source, .. }, mut client) = opened().await;
    let WriteHalf::Tls(session) = &socket else { panic!("in plain text") };
    let session = Arc::clone(session);
    let all = Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::new(NfsMetrics::new()));
    let budget = Arc::new(all.connection());
    let (outlet, writer) = outlet(socket, LIMIT, Arc::clone(&budget));
    let writer = tokio::spawn(writer.run());
    let mut expected = Vec::new();
    // Each is encrypted whole, as nothing is unsent before it.
    while !session.has_unsent() {
        let number = u64::try_from(expected.len()).unwrap();
        let head = number.to_be_bytes().repeat(250);
        expected.extend_from_slice(&head);
        let charge = budget.try_charge(Purpose::Read, 0).unwrap();
        outlet.send_one(Reply::new(Finished { head, pieces: Vec::new() }, charge));
    }
    let mut got = vec![0; expected.len()];
    timeout(LIMIT, client.read_exact(&mut got)).await.unwrap().unwrap();
    assert!(got == expected);
    // And the end, by its alert.
    drop(outlet);
    timeout(LIMIT, writer).await.unwrap().unwrap().unwrap();
    assert_eq!(timeout(LIMIT, client.read(&mut [0; 8])).await.unwrap().unwrap(), 0);
    drop(source);
}

#[tokio::test]
async fn a_client_may_change_its_key() {
    let (Opened { mut source, socket, .. }, mut client) = opened().await;
    for text in [&b"one"[..], b"two"] {
        client.write_all(text).await.unwrap();
        client.flush().await.unwrap();
        assert_eq!(read(&mut source).await.unwrap(), text);
        // The server's answer is in the key that follows.
        assert_eq!(socket.try_write_vectored(&[IoSlice::new(text)]).unwrap(), 3);
        let mut back = [0; 3];
        client.read_exact(&mut back).await.unwrap();
        assert_eq!(back, text);
        client.get_mut().1.refresh_traffic_keys().unwrap();
    }
}

#[tokio::test]
async fn what_comes_with_the_end_or_with_bad_bytes_is_read_before_these() {
    for (is_bad, is_closed) in [(true, false), (false, true), (false, false)] {
        let (Opened { mut source, socket: _socket, .. }, mut client) = opened().await;
        let mut sent = encrypted(&mut client, b"a call");
        if is_bad {
            let mut other = encrypted(&mut client, b"another");
            *other.last_mut().unwrap() ^= 1;
            sent.extend_from_slice(&other);
        }
        if is_closed {
            client.get_mut().1.send_close_notify();
            sent.extend_from_slice(&encrypted(&mut client, b""));
        }
        let (mut stream, keys) = client.into_inner();
        stream.write_all(&sent).await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(read(&mut source).await.unwrap(), b"a call");
        let rest = read(&mut source).await;
        if is_bad {
            assert_eq!(rest.unwrap_err().kind(), ErrorKind::InvalidData);
        } else {
            // Without the alert the marks of records tell what is missing.
            assert_eq!(rest.unwrap(), b"", "{is_closed}");
        }
        drop(keys);
    }
}

#[tokio::test]
async fn a_handshake_that_stands_still_ends_and_one_that_was_left_is_no_failure() {
    let (tls, _) = identity(TlsPolicy::Offered);
    let (server, client) = probed().await;
    let patience = Patience { handshake: Duration::from_millis(1), ..Patience::default() };
    let begun = greeting::begin(server, Port::Nfs(1), &tls, &patience);
    let error = timeout(LIMIT, begun).await.unwrap().unwrap_err();
    assert!(matches!(error, GreetingError::TooSlow { .. }), "{error}");
    drop(client);

    let (server, client) = probed().await;
    drop(client);
    let patience = Patience::default();
    let begun = greeting::begin(server, Port::Nfs(1), &tls, &patience);
    let error = timeout(LIMIT, begun).await.unwrap().unwrap_err();
    assert!(matches!(error, GreetingError::Io(_)), "{error}");
}

#[tokio::test]
async fn portmaps_own_port_offers_none() {
    let (tls, _) = identity(TlsPolicy::Offered);
    let (server, _client) = probed().await;
    let port = Port::Portmap { own: 1, nfs: 2 };
    let opened = greeting::begin(server, port, &tls, &Patience::default()).await.unwrap();
    assert!(!opened.is_encrypted());
    assert_eq!(opened.bytes.len(), 44, "the call is not lost");
}

#[test]
fn plain_text_is_refused_to_other_machines_where_tls_is_required() {
    let options =
        NfsOptions { clients: vec!["0.0.0.0/0:rw".parse().unwrap()], ..NfsOptions::default() };
    let authority = identity(TlsPolicy::Offered).1;
    let mutual = || TlsPolicy::Mutual(vec![authority.clone()]);
    for (address, policy, may, shown) in [
        ("10.0.0.9:700", TlsPolicy::Required, false, Shown::NotAsked),
        ("10.0.0.9:700", TlsPolicy::Offered, true, Shown::NotAsked),
        ("10.0.0.9:700", mutual(), true, Shown::Nothing),
        ("127.0.0.1:700", TlsPolicy::Required, true, Shown::NotAsked),
        ("127.0.0.1:700", mutual(), true, Shown::NotAsked),
        ("[::ffff:127.0.0.1]:700", TlsPolicy::Required, true, Shown::NotAsked),
        ("[::ffff:10.0.0.9]:700", TlsPolicy::Required, false, Shown::NotAsked),
        ("[::ffff:10.0.0.9]:700", mutual(), true, Shown::Nothing),
    ] {
        let mut peer = Peer::new(address.parse().unwrap(), Port::Nfs(1), &options);
        assert!(peer.access.is_some());
        let is_refused = peer.note_plain_text(&identity(policy.clone()).0);
        let got = (peer.access.is_some(), is_refused, peer.shown);
        assert_eq!(got, (may, !may, shown), "{address} {policy:?}");
        assert_eq!(peer.is_served(), may && shown != Shown::Nothing);
    }
}

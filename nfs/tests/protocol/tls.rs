//! RPC-with-TLS (RFC 9289): the probe, the handshake, and all of NFS behind it.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use slackwater_nfs::{NfsOptions, NfsTls, TlsPolicy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::common::client::{Cred, NFS, UNSTABLE, call, proc, record};
use crate::common::server::LIMIT;
use crate::common::{Args, Body, Client, Server, root_options, status};

const AUTH_TLS: u32 = 7;
const MIB: usize = 1 << 20;
const MIB_U32: u32 = 1 << 20;

/// A server that offers TLS, and its certificate.
async fn offering() -> (Server, CertificateDer<'static>) {
    let (tls, certificate) = identity();
    (Server::with(NfsOptions { tls: Some(tls), ..root_options() }).await, certificate)
}

fn identity() -> (NfsTls, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    (NfsTls::new(vec![certificate.clone()], key, TlsPolicy::Offered).unwrap(), certificate)
}

fn probe(xid: u32, program: (u32, u32)) -> Vec<u8> {
    let header = Args::new().u32(xid).u32(0).u32(2).u32(program.0).u32(program.1).u32(0);
    record(&header.u32(AUTH_TLS).u32(0).u32(0).u32(0).0)
}

async fn next(stream: &mut TcpStream) -> Vec<u8> {
    let receive = async {
        let mark = stream.read_u32().await.unwrap();
        let mut record = vec![0; usize::try_from(mark & !(1 << 31)).unwrap()];
        stream.read_exact(&mut record).await.unwrap();
        record
    };
    timeout(LIMIT, receive).await.unwrap()
}

/// The words of a reply.
fn words(reply: &[u8]) -> Vec<u32> {
    reply.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect()
}

/// A connection whose probe was taken.
async fn probed(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&probe(9, NFS)).await.unwrap();
    let said = [u32::from_be_bytes(*b"STAR"), u32::from_be_bytes(*b"TTLS")];
    assert_eq!(words(&next(&mut stream).await), [9, 1, 0, 0, 8, said[0], said[1], 0]);
    stream
}

async fn handshake(
    address: SocketAddr,
    trusted: &CertificateDer<'static>,
    versions: &[&'static SupportedProtocolVersion],
    protocol: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    handshake_with(address, Arc::new(trusting(trusted, versions, protocol, None))).await
}

/// A certificate and its key.
pub(super) type Pair = (CertificateDer<'static>, PrivateKeyDer<'static>);

/// A client that shows a certificate, or none.
pub(super) fn trusting(
    trusted: &CertificateDer<'static>,
    versions: &[&'static SupportedProtocolVersion],
    protocol: &[u8],
    shown: Option<Pair>,
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match shown {
        Some((certificate, key)) => builder.with_client_auth_cert(vec![certificate], key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    config
}

pub(super) async fn handshake_with(
    address: SocketAddr,
    config: Arc<ClientConfig>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(config).connect(name, probed(address).await).await
}

/// An address at which the server is reached in plain text: what comes there goes on in TLS, cut into records of at most
/// so many bytes.
async fn tunnel(server: SocketAddr, trusted: CertificateDer<'static>, cut: usize) -> SocketAddr {
    tunnel_with(server, Arc::new(trusting(&trusted, &[&TLS13], b"sunrpc", None)), cut).await
}

pub(super) async fn tunnel_with(
    server: SocketAddr,
    config: Arc<ClientConfig>,
    cut: usize,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (plain, _) = listener.accept().await.unwrap();
            let encrypted = handshake_with(server, Arc::clone(&config)).await.unwrap();
            let (mut from_server, mut to_server) = tokio::io::split(encrypted);
            let (mut from_client, mut to_client) = plain.into_split();
            tokio::spawn(async move {
                let mut bytes = vec![0; cut];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    to_server.write_all(&bytes[..count]).await.unwrap();
                    to_server.flush().await.unwrap();
                }
                // The server may be gone.
                let _ = to_server.shutdown().await;
            });
            tokio::spawn(async move {
                // Either end may be gone.
                let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
                let _ = to_client.shutdown().await;
            });
        }
    });
    address
}

/// Bytes that tell their place.
fn pattern(block: usize) -> Vec<u8> {
    (0..MIB / 8).flat_map(|at| ((block * MIB + at) as u64).to_be_bytes()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_in_tls_is_read_in_tls_and_in_plain_text() {
    for cut in [MIB, 16 << 10, 1_000, 61] {
        let (server, certificate) = offering().await;
        let tunnel = tunnel(server.address, certificate, cut).await;
        let mut client = Client::connect(tunnel).await;
        let root = client.root().await;
        let file = client.create(&root, b"file").await.unwrap();
        let blocks = if cut < 1_000 { 1 } else { 4 };
        for block in 0..blocks {
            let offset = u64::try_from(block * MIB).unwrap();
            client.write(&file, offset, &pattern(block), UNSTABLE).await.unwrap();
        }
        client.commit(&file).await.unwrap();
        let mut plain = server.client().await;
        for block in 0..blocks {
            let offset = u64::try_from(block * MIB).unwrap();
            for reader in [&mut client, &mut plain] {
                let (data, _) = reader.read(&file, offset, MIB_U32).await.unwrap();
                assert!(data == pattern(block), "{cut}");
            }
        }
        let counters = server.counters();
        assert_eq!((counters.tls_connections, counters.tls_handshakes_failed), (1, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_late_gets_all_replies() {
    const READS: u32 = 48;
    let (server, certificate) = offering().await;
    let mut client = Client::connect(tunnel(server.address, certificate, MIB).await).await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, &pattern(0), UNSTABLE).await.unwrap();
    // Far more than the sockets between hold: the server has to wait.
    for xid in 0..READS {
        let args = Args::new().opaque(&file).u64(0).u32(MIB_U32);
        let call = call(1_000 + xid, NFS, proc::READ, &Cred::user(0, 0), &args);
        client.send(&record(&call)).await;
    }
    let mut answered = Vec::new();
    for _ in 0..READS {
        let reply = client.receive().await;
        assert!(reply.ends_with(&pattern(0)));
        answered.push(words(&reply)[0]);
    }
    answered.sort_unstable();
    assert_eq!(answered, (1_000..1_000 + READS).collect::<Vec<_>>());
    server.wait_until(|counters| counters.calls_in_flight == 0).await;
}

#[tokio::test]
async fn the_end_is_told_in_tls() {
    let (server, certificate) = offering().await;
    let mut stream = handshake(server.address, &certificate, &[&TLS13], b"sunrpc").await.unwrap();
    stream.write_all(&record(&call(3, NFS, 0, &Cred::None, &Args::new()))).await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(stream.read_u32().await.unwrap(), 1 << 31 | 24);
    let mut reply = [0; 24];
    stream.read_exact(&mut reply).await.unwrap();
    assert_eq!(words(&reply), [3, 1, 0, 0, 0, 0]);
    let stopped = server.stop();
    // An end without the alert would be an error here.
    let mut rest = Vec::new();
    let (read, directory) = tokio::join!(timeout(LIMIT, stream.read_to_end(&mut rest)), stopped);
    assert_eq!(read.unwrap().unwrap(), 0);
    drop(directory);
}

#[tokio::test]
async fn a_probe_may_come_in_pieces_and_a_call_is_no_probe() {
    let (server, _) = offering().await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in probe(7, NFS) {
        stream.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(words(&next(&mut stream).await)[..5], [7, 1, 0, 0, 8]);

    // A call that begins as a probe does, also in pieces.
    let mut client = server.client().await;
    let null = record(&call(5, NFS, 0, &Cred::None, &Args::new()));
    for byte in null {
        client.send(&[byte]).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(words(&client.receive().await), [5, 1, 0, 0, 0, 0]);
    // A later one is no probe: the credential is not served.
    client.send(&probe(6, NFS)).await;
    assert_eq!(words(&client.receive().await), [6, 1, 1, 1, 1]);
    // Nor is one of a program or version that is not served.
    for program in [(NFS.0, 4), (100_000, 2), (1, 1)] {
        let mut client = server.client().await;
        client.send(&probe(8, program)).await;
        assert_eq!(words(&client.receive().await)[..3], [8, 1, 1], "{program:?}");
    }
}

#[tokio::test]
async fn without_an_offer_a_probe_is_refused_and_the_client_goes_on() {
    let (tls, _) = identity();
    let others = vec!["10.0.0.1:rw".parse().unwrap()];
    let not_listed = NfsOptions { tls: Some(tls), clients: others, ..root_options() };
    for (options, reaches) in [(root_options(), true), (not_listed, false)] {
        let server = Server::with(options).await;
        let mut client = server.client().await;
        client.send(&probe(9, NFS)).await;
        assert_eq!(words(&client.receive().await), [9, 1, 1, 1, 1]);
        client.run(NFS, 0, &Args::new()).await.end();
        let mount = client.reply((100_005, 3), 1, &Args::new().opaque(b"/slackwater")).await;
        let told = if reaches { status::OK } else { status::ACCES };
        assert_eq!(words_of(mount)[4], told);
        assert_eq!(server.counters().tls_connections, 0);
    }
}

fn words_of(mut body: Body) -> Vec<u32> {
    (0..5).map(|_| body.u32()).collect()
}

#[tokio::test]
async fn nothing_in_plain_text_behind_a_probe_is_a_call() {
    let (server, _) = offering().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.create(&root, b"file").await.unwrap();
    let remove = Args::new().opaque(&root).opaque(b"file");
    let remove = record(&call(8, NFS, proc::REMOVE, &Cred::user(0, 0), &remove));
    // With the probe, and once it was answered.
    for at_once in [true, false] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&probe(7, NFS)).await.unwrap();
        if at_once {
            stream.write_all(&remove).await.unwrap();
        }
        assert_eq!(words(&next(&mut stream).await)[..5], [7, 1, 0, 0, 8]);
        if !at_once {
            stream.write_all(&remove).await.unwrap();
        }
        let mut rest = Vec::new();
        // What is left is an alert at most; a reset ends it as well.
        let _ = timeout(LIMIT, stream.read_to_end(&mut rest)).await.unwrap();
        assert!(rest.len() < 16, "{rest:?}");
    }
    server.wait_until(|counters| counters.tls_handshakes_failed == 2).await;
    client.lookup(&root, b"file").await.unwrap();
}

#[tokio::test]
async fn older_tls_other_protocols_and_other_certificates_are_refused() {
    let (server, certificate) = offering().await;
    let (_, other) = identity();
    for (trusted, version, protocol) in [
        (&certificate, &TLS12, &b"sunrpc"[..]),
        (&certificate, &TLS13, b"h2"),
        (&other, &TLS13, b"sunrpc"),
    ] {
        handshake(server.address, trusted, &[version], protocol).await.unwrap_err();
    }
    server.wait_until(|counters| counters.tls_handshakes_failed == 3).await;
    handshake(server.address, &certificate, &[&TLS13], b"sunrpc").await.unwrap();
}

#[tokio::test]
async fn bytes_that_were_changed_end_the_connection() {
    let (server, certificate) = offering().await;
    let mut client = server.client().await;
    let root = client.root().await;
    client.create(&root, b"file").await.unwrap();
    let stream = handshake(server.address, &certificate, &[&TLS13], b"sunrpc").await.unwrap();
    let (mut stream, mut keys) = stream.into_inner();
    let remove = Args::new().opaque(&root).opaque(b"file");
    let remove = record(&call(8, NFS, proc::REMOVE, &Cred::user(0, 0), &remove));
    std::io::Write::write_all(&mut keys.writer(), &remove).unwrap();
    let mut encrypted = Vec::new();
    while keys.wants_write() {
        keys.write_tls(&mut encrypted).unwrap();
    }
    *encrypted.last_mut().unwrap() ^= 1;
    stream.write_all(&encrypted).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(LIMIT, stream.read_to_end(&mut rest)).await.unwrap();
    client.lookup(&root, b"file").await.unwrap();
    server.wait_until(|counters| counters.connections_dropped == 1).await;
}

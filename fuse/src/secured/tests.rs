//! Connections to appliances that offer TLS, do not, or are made to look as if they did not.

use std::collections::VecDeque;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use slackwater_client::Token;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::*;

/// No test waits longer for anything.
const LIMIT: Duration = Duration::from_secs(60);

/// A certificate of loopback, and what serves with it.
struct Identity {
    pem: String,
    acceptor: TlsAcceptor,
}

impl Identity {
    fn new() -> Self {
        Self::speaking(&[b"sunrpc", b"http/1.1"])
    }

    fn speaking(protocols: &[&[u8]]) -> Self {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Self { pem: made.cert.pem(), acceptor: TlsAcceptor::from(Arc::new(config)) }
    }

    /// A REST face that gives these answers, one to each call, and the trust in it.
    async fn rest(&self, answers: &[(&str, &str)]) -> Security {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let client = Client::builder(format!("https://{}", listener.local_addr().unwrap()))
            .ca_certificate(self.pem.as_bytes())
            .token(Token::new("a-token").unwrap())
            .build()
            .unwrap();
        let mut answers: VecDeque<_> = answers
            .iter()
            .map(|(status, body)| {
                let length = body.len();
                format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                     connection: close\r\n\r\n{body}"
                )
            })
            .collect();
        let acceptor = self.acceptor.clone();
        tokio::spawn(async move {
            while let Some(answer) = answers.pop_front() {
                let (stream, _) = listener.accept().await.unwrap();
                let mut stream = acceptor.accept(stream).await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                assert!(request.starts_with(b"POST /v1/mount-paths "));
                stream.write_all(answer.as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
            }
        });
        Security::of_client(&client, None).unwrap()
    }
}

/// Begins a connection with a server that answers the probe so, and then does `then`, while the client does `talk`.
async fn both<T, U>(
    security: &Security,
    reply: Vec<u8>,
    then: impl AsyncFnOnce(TcpStream) -> T,
    talk: impl AsyncFnOnce(io::Result<Stream>) -> U,
) -> (U, T) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut asked = [0; 44];
        stream.read_exact(&mut asked).await.unwrap();
        assert_eq!(asked, *probe());
        stream.write_all(&reply).await.unwrap();
        then(stream).await
    };
    let client = async { talk(security.begin(stream).await).await };
    timeout(LIMIT, async { tokio::join!(client, server) }).await.unwrap()
}

/// How a connection begins.
async fn begun<T>(
    security: &Security,
    reply: Vec<u8>,
    then: impl AsyncFnOnce(TcpStream) -> T,
) -> (io::Result<Stream>, T) {
    both(security, reply, then, async |begun| begun).await
}

/// What comes back by a connection, of five bytes.
async fn echoed<T>(
    security: &Security,
    reply: Vec<u8>,
    then: impl AsyncFnOnce(TcpStream) -> T,
) -> [u8; 5] {
    let talk = async |begun: io::Result<Stream>| {
        let mut begun = begun.unwrap();
        begun.writer.write_all(b"hello").await.unwrap();
        begun.writer.flush().await.unwrap();
        let mut said = [0; 5];
        begun.reader.read_exact(&mut said).await.unwrap();
        said
    };
    both(security, reply, then, talk).await.0
}

async fn echo<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> S {
    let mut said = [0; 5];
    stream.read_exact(&mut said).await.unwrap();
    stream.write_all(&said).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

fn reply(words: &[u32]) -> Vec<u8> {
    let mark = 0x8000_0000 | u32::try_from(words.len() * 4).unwrap();
    std::iter::once(&mark).chain(words).flat_map(|word| word.to_be_bytes()).collect()
}

const OFFERED: [u32; 8] = [XID, 1, 0, 0, 8, 0x5354_4152, 0x5454_4c53, 0];

/// As an appliance without TLS, or of release 0.2, answers: denied, a credential that is not served.
const REFUSED: [u32; 5] = [XID, 1, 1, 1, 1];

/// As another server answers that knows no TLS: a success that says nothing of it.
const SILENT: [u32; 6] = [XID, 1, 0, 0, 0, 0];

fn told(nfs_tls: &str) -> String {
    format!(r#"{{"path":"/slackwater/.export/s","expires_at":"2026-11-26T09:00:00Z"{nfs_tls}}}"#)
}

async fn nothing(_: TcpStream) {}

#[test]
fn a_probe_in_golden_bytes() {
    let words = [0x8000_0028, XID, 0, 2, 100_003, 3, 0, 7, 0, 0, 0];
    let expected: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
    assert_eq!(probe(), expected);
    assert!(starts_tls(reply(&OFFERED)[4..].to_vec().into()));
    for other in [&REFUSED[..], &SILENT, &[0, 1, 0, 0, 8, OFFERED[5], OFFERED[6], 0]] {
        assert!(!starts_tls(reply(other)[4..].to_vec().into()), "{other:?}");
    }
}

#[tokio::test]
async fn what_is_offered_is_taken_and_rest_is_not_asked() {
    let identity = Identity::new();
    let security = identity.rest(&[]).await;
    let acceptor = identity.acceptor.clone();
    let serve = async |stream| echo(acceptor.accept(stream).await.unwrap()).await;
    assert_eq!(echoed(&security, reply(&OFFERED), serve).await, *b"hello");
}

#[tokio::test]
async fn a_handshake_is_confirmed_by_the_answer_to_a_call() {
    let identity = Identity::new();
    let other = [XID + 1, 1, 0, 0, 0, 0];
    let (denied, unknown) = ([XID, 1, 1, 1, 5], [XID, 1, 0, 0, 0, 1]);
    for (answer, is_confirmed) in
        [(&SILENT[..], true), (&other, false), (&denied, false), (&unknown, false), (&[], false)]
    {
        let security = identity.rest(&[]).await;
        let acceptor = identity.acceptor.clone();
        let serve = async |stream| {
            let mut stream = acceptor.accept(stream).await.unwrap();
            let mut asked = [0; 44];
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, *null(AUTH_NONE));
            if !answer.is_empty() {
                stream.write_all(&reply(answer)).await.unwrap();
            }
            stream.shutdown().await.unwrap();
        };
        let confirm = async |begun: io::Result<Stream>| begun.unwrap().confirm().await;
        let (confirmed, ()) = both(&security, reply(&OFFERED), serve, confirm).await;
        assert_eq!(confirmed.is_ok(), is_confirmed, "{answer:?}: {confirmed:?}");
        assert!(!security.is_certificate_asked_for());
    }
}

#[tokio::test]
async fn another_certificate_is_refused() {
    let (identity, other) = (Identity::new(), Identity::new());
    let security = identity.rest(&[]).await;
    let acceptor = other.acceptor.clone();
    let serve = async |stream| acceptor.accept(stream).await.map(drop);
    let (stream, served) = begun(&security, reply(&OFFERED), serve).await;
    assert!(stream.is_err() && served.is_err());
}

#[tokio::test]
async fn a_server_of_another_kind_with_the_same_certificate_is_refused() {
    let identity = Identity::speaking(&[]);
    let security = identity.rest(&[]).await;
    let acceptor = identity.acceptor.clone();
    let serve = async |stream| acceptor.accept(stream).await.map(drop);
    let (stream, _) = begun(&security, reply(&OFFERED), serve).await;
    let error = stream.err().expect("a connection to it");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    assert!(error.to_string().contains("expected sunrpc"), "{error}");
}

#[tokio::test]
async fn an_offer_that_was_removed_on_the_way_is_no_reason_for_plain_text() {
    let identity = Identity::new();
    for answer in [&REFUSED[..], &SILENT] {
        let security = identity.rest(&[("201 Created", &told(r#","nfs_tls":true"#))]).await;
        let (stream, ()) = begun(&security, reply(answer), nothing).await;
        let error = stream.err().expect("a connection in plain text");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("REST face says that NFS does"), "{error}");
    }
}

#[tokio::test]
async fn where_there_is_no_offer_the_connection_goes_on_in_plain_text() {
    let identity = Identity::new();
    let unknown = r#"{"type":"t","title":"t","status":404,"detail":"d","code":"unknown_route"}"#;
    for (status, body) in [
        ("201 Created", told(r#","nfs_tls":false"#)),
        // Of earlier releases.
        ("201 Created", told("")),
        ("404 Not Found", unknown.to_owned()),
    ] {
        let security = identity.rest(&[(status, &body)]).await;
        let said = echoed(&security, reply(&REFUSED), echo).await;
        assert_eq!(said, *b"hello", "{status}");
    }
}

#[tokio::test]
async fn a_worker_that_is_refused_goes_on_as_rest_told_last() {
    let identity = Identity::new();
    let refused = r#"{"type":"t","title":"t","status":401,"detail":"d","code":"unauthenticated"}"#;
    // Never told: nothing is sent in plain text, and REST is asked once for a while.
    let security = identity.rest(&[("401 Unauthorized", refused)]).await;
    for _ in 0..2 {
        assert!(begun(&security, reply(&REFUSED), nothing).await.0.is_err());
    }
    // Told before, and asked again once that is old.
    let answers = [("201 Created", &*told("")), ("401 Unauthorized", refused)];
    let security = identity.rest(&answers).await;
    for _ in answers {
        for _ in 0..2 {
            assert!(begun(&security, reply(&REFUSED), nothing).await.0.is_ok());
        }
        let Security::Tls(trust) = &security else { panic!("in plain text") };
        trust.told.lock().until = None;
    }
}

#[test]
fn an_appliance_on_this_machine_or_without_https_is_not_asked() {
    let identity = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let client = |url: &str| {
        let builder = Client::builder(url).ca_certificate(identity.cert.pem());
        builder.build().unwrap()
    };
    for (url, address, is_wanted) in [
        ("https://10.0.0.5:8049", "10.0.0.5:2049", true),
        ("https://10.0.0.5:8049", "127.0.0.1:2049", false),
        ("https://10.0.0.5:8049", "[::ffff:127.0.0.1]:2049", false),
        ("http://10.0.0.5:8049", "10.0.0.5:2049", false),
    ] {
        let security = Security::of(&client(url), address.parse().unwrap(), None).unwrap();
        assert_eq!(matches!(security, Security::Tls(_)), is_wanted, "{url} {address}");
    }
}

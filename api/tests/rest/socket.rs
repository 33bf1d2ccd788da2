//! Over real sockets: plain and TLS, HTTP/1.1 and 2, stop and patience.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slackwater_api::{
    ApiOptions, ApiServerError, MetricsSource, TlsFiles, VmstoreCredentials, router, run,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::harness::{Face, noise};

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(60);

struct Served {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ApiServerError>>,
    face: Face,
}

impl Served {
    async fn start(options: ApiOptions, tls: Option<TlsFiles>) -> Self {
        let face = Face::with(options);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let router = face.router.clone();
        let task = tokio::spawn(run(listener, router, tls, async move {
            let _ = stopped.await;
        }));
        Self { address, stop: Some(stop), task, face }
    }

    async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap().unwrap();
    }
}

/// A certificate for `localhost` in files, and what a client needs to trust it.
fn certificate(directory: &Path) -> (TlsFiles, reqwest::Certificate) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = TlsFiles { cert: directory.join("cert.pem"), key: directory.join("key.pem") };
    std::fs::write(&files.cert, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    (files, reqwest::Certificate::from_der(made.cert.der()).unwrap())
}

fn client(address: SocketAddr, trusted: &reqwest::Certificate) -> reqwest::ClientBuilder {
    // Fails when another test was first, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .tls_certs_only([trusted.clone()])
        .resolve("localhost", address)
        .timeout(PATIENCE)
}

async fn talk(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_304_says_nothing_of_a_length() {
    let served = Served::start(ApiOptions::default(), None).await;
    served.face.make_file("a", 10).await;
    for method in ["GET", "HEAD"] {
        let request = format!(
            "{method} /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\nif-none-match: *\r\nconnection: close\r\n\r\n"
        );
        let answer = talk(served.address, request.as_bytes()).await.to_lowercase();
        assert!(answer.starts_with("http/1.1 304") && answer.contains("\r\netag: "), "{answer}");
        assert!(!answer.contains("content-length"), "{answer}");
    }
    served.stop().await;
}

#[tokio::test]
async fn bytes_on_a_socket_are_answered() {
    let served = Served::start(ApiOptions::default(), None).await;
    let answer = talk(
        served.address,
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    .await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with(r#"{"status":"ok"}"#),
        "{answer}"
    );
    let answer = talk(served.address, b"nonsense nonsense nonsense\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let mut long = b"GET / HTTP/1.1\r\nx: ".to_vec();
    long.resize(70 << 10, b'x');
    let answer = talk(served.address, &long).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    served.stop().await;
}

#[tokio::test]
async fn tls_speaks_both_versions_of_http() {
    let directory = tempfile::tempdir().unwrap();
    let (files, trusted) = certificate(directory.path());
    let options = ApiOptions {
        vmstore: Some(VmstoreCredentials {
            username: "u".to_owned(),
            password: slackwater_api::Secret::new("p"),
        }),
        ..ApiOptions::default()
    };
    let served = Served::start(options, Some(files)).await;
    let url = |path: &str| format!("https://localhost:{}{path}", served.address.port());
    let one = client(served.address, &trusted).http1_only().build().unwrap();
    let two = client(served.address, &trusted).build().unwrap();
    let answer = one.get(url("/healthz")).send().await.unwrap();
    assert_eq!(
        (answer.status(), answer.version()),
        (200.try_into().unwrap(), reqwest::Version::HTTP_11)
    );
    let answer = two.get(url("/healthz")).send().await.unwrap();
    assert_eq!(
        (answer.status(), answer.version()),
        (200.try_into().unwrap(), reqwest::Version::HTTP_2)
    );

    // Data in both directions, over HTTP/2's flow control.
    served.face.make_file("a", 0).await;
    let bytes = noise(1, 5_000_000);
    let put = two.put(url("/v1/files/a/data")).header("content-type", "application/octet-stream");
    assert_eq!(put.body(bytes.clone()).send().await.unwrap().status(), 200);
    for client in [&one, &two] {
        let got = client.get(url("/v1/files/a/data")).send().await.unwrap().bytes().await.unwrap();
        assert!(got == bytes);
    }
    let body = r#"{"username":"u","password":"p","typeId":"a.RestApiCredentials"}"#;
    let login = one.post(url("/api/v310/session/login")).header("content-type", "application/json");
    let answer = login.body(body).send().await.unwrap();
    assert!(answer.headers()["set-cookie"].to_str().unwrap().contains("; Secure"));

    // Plain HTTP on the same port is no way in.
    let plain = TcpStream::connect(served.address).await.unwrap();
    let mut plain = plain;
    plain.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    // A reset in place of an end is as good.
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"));
    served.stop().await;
}

#[tokio::test]
async fn bad_certificate_files_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let (files, _) = certificate(directory.path());
    let empty = directory.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let (other, _) = certificate(&{
        let folder = directory.path().join("other");
        std::fs::create_dir(&folder).unwrap();
        folder
    });
    let missing = directory.path().join("missing.pem");
    let cases = [
        (TlsFiles { cert: missing.clone(), ..files.clone() }, "missing.pem"),
        (TlsFiles { key: missing, ..files.clone() }, "missing.pem"),
        (TlsFiles { cert: empty.clone(), ..files.clone() }, "no certificate"),
        (TlsFiles { key: empty, ..files.clone() }, "empty.pem"),
        (TlsFiles { key: other.key, ..files }, "cannot be used"),
    ];
    for (files, expected) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let error = run(listener, axum::Router::new(), Some(files), async {}).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test]
async fn a_stop_lets_a_request_end_and_takes_no_more() {
    let served = Served::start(ApiOptions::default(), None).await;
    let address = served.address;
    served.face.make_file("a", 0).await;
    let mut upload = TcpStream::connect(address).await.unwrap();
    let head = "PUT /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
                content-type: application/octet-stream\r\ncontent-length: 10\r\n\r\n";
    upload.write_all(head.as_bytes()).await.unwrap();
    // The server asks for the body once the handler wants it: the request is under way.
    let mut go_on = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    upload.read_exact(&mut go_on).await.unwrap();
    assert!(go_on.starts_with(b"HTTP/1.1 100"));
    upload.write_all(b"12345").await.unwrap();
    let idle = TcpStream::connect(address).await.unwrap();
    let mut stopping = tokio::spawn(served.stop());
    let waits = tokio::time::timeout(Duration::from_millis(300), &mut stopping).await;
    assert!(waits.is_err(), "the stop waits for the upload");
    assert!(TcpStream::connect(address).await.is_err(), "no more is taken");
    upload.write_all(b"67890").await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, upload.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    drop(idle);
    tokio::time::timeout(PATIENCE, stopping).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_reads_slowly_keeps_little_in_memory_and_gets_all() {
    let served = Served::start(ApiOptions::default(), None).await;
    served.face.make_file("a", 0).await;
    let bytes = noise(3, 20 << 20);
    served.face.put("/v1/files/a/data", bytes.clone()).await.expect(200);
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream
        .write_all(b"GET /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let mut piece = vec![0; 1 << 20];
    while let count @ 1.. =
        tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await.unwrap().unwrap()
    {
        answer.extend_from_slice(&piece[..count]);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(answer.ends_with(&bytes), "{} bytes", answer.len());
    served.stop().await;
}

/// The one place for transfers is free again soon after its client stopped reading.
#[tokio::test]
async fn a_client_that_stops_reading_loses_its_place() {
    let options = ApiOptions {
        data_streams_max: 1,
        stall_timeout: Duration::from_millis(100),
        queue_timeout: PATIENCE,
        request_timeout: PATIENCE,
        ..ApiOptions::default()
    };
    let served = Served::start(options, None).await;
    served.face.make_file("a", 1 << 30).await;
    let mut stuck = TcpStream::connect(served.address).await.unwrap();
    let request = b"GET /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\n\r\n";
    stuck.write_all(request).await.unwrap();
    let mut first = [0; 100];
    stuck.read_exact(&mut first).await.unwrap();
    let request = b"GET /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\nrange: bytes=0-9\r\nconnection: close\r\n\r\n";
    let answer = talk(served.address, request).await;
    assert!(answer.starts_with("HTTP/1.1 206"), "{answer}");
    let mut rest = vec![0; 1 << 20];
    let mut come = first.len();
    // The cut may come as an end or as a reset.
    while let Ok(count @ 1..) = tokio::time::timeout(PATIENCE, stuck.read(&mut rest)).await.unwrap()
    {
        come += count;
    }
    assert!(come < 1 << 30, "the transfer was cut: {come} bytes");
    served.stop().await;
}

/// The same by HTTP/2, whose connection lives as long as it answers pings: what was read for the
/// client must not stay in memory so long.
#[tokio::test]
async fn an_http2_client_that_takes_no_data_is_cut() {
    const DATA: u8 = 0;
    const PING: u8 = 6;
    // The whole window is sent by then, also by a busy machine.
    let options = ApiOptions { stall_timeout: Duration::from_secs(1), ..ApiOptions::default() };
    let served = Served::start(options, None).await;
    served.face.make_file("a", 1 << 30).await;
    let path = b"/v1/files/a/data";
    let fields = [&[0x82, 0x86, 0x01, 9], &b"localhost"[..], &[0x04, 16], path].concat();
    let length = u8::try_from(fields.len()).unwrap();
    // The preface with empty SETTINGS; HEADERS of stream 1 with END_STREAM and END_HEADERS.
    let begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let request = [&begin[..], &[0, 0, length, 1, 5, 0, 0, 0, 1], &fields].concat();
    let mut stuck = TcpStream::connect(served.address).await.unwrap();
    stuck.write_all(&request).await.unwrap();
    let come = async {
        let mut come = 0;
        let mut head = [0; 9];
        // Nothing gives the window back that the data takes.
        while stuck.read_exact(&mut head).await.is_ok() {
            let length =
                usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            come += if head[3] == DATA { length } else { 0 };
            let mut payload = vec![0; length];
            if stuck.read_exact(&mut payload).await.is_err() {
                break;
            }
            if head[3] == PING && head[4] == 0 {
                let answer = [&[0, 0, 8, PING, 1, 0, 0, 0, 0], &payload[..]].concat();
                // It may be closed just now.
                let _ = stuck.write_all(&answer).await;
            }
        }
        come
    };
    let come = tokio::time::timeout(PATIENCE, come).await.expect("it is cut");
    assert_eq!(come, 65_535, "the window, and no more");
    served.stop().await;
}

/// A transfer whose file became shorter is cut, so that the client notices.
#[tokio::test]
async fn a_transfer_that_cannot_be_whole_is_cut() {
    let served = Served::start(ApiOptions::default(), None).await;
    served.face.make_file("a", 64 << 20).await;
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream
        .write_all(b"GET /v1/files/a/data HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut first = [0; 1000];
    stream.read_exact(&mut first).await.unwrap();
    served.face.patch("/v1/files/a", serde_json::json!({"size_bytes": 10})).await.expect(200);
    let mut rest = Vec::new();
    // The cut may come as an end or as a reset.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.len() < 64 << 20, "{} bytes", rest.len());
    served.stop().await;
}

/// Log-ins need no secret to begin with: those whose bodies do not come must not take the requests
/// of all.
#[tokio::test]
async fn log_ins_that_do_not_come_keep_nobody_out() {
    const SLOW: usize = 100;
    let options = ApiOptions {
        vmstore: Some(VmstoreCredentials {
            username: "u".to_owned(),
            password: slackwater_api::Secret::new("p"),
        }),
        requests_max: SLOW / 2,
        ..ApiOptions::default()
    };
    let served = Served::start(options, None).await;
    let mut slow = Vec::new();
    for number in 0..SLOW {
        // Of two addresses: one alone is held back by its number of guesses.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1 + u8::from(number % 2 == 1)], 0))).unwrap();
        let mut stream = socket.connect(served.address).await.unwrap();
        let head = "POST /api/v310/session/login HTTP/1.1\r\nhost: localhost\r\n\
                    content-type: application/json\r\ncontent-length: 1000\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    for _ in 0..10 {
        let request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        let answer = talk(served.address, request).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    drop(slow);
    served.stop().await;
}

/// Many at once, each with its own connection.
#[tokio::test]
async fn many_clients_are_served_at_once() {
    let served = Arc::new(Served::start(ApiOptions::default(), None).await);
    served.face.make_file("a", 4096).await;
    let calls = (0..100).map(|_| {
        let address = served.address;
        tokio::spawn(async move {
            let request =
                b"GET /v1/files/a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            assert!(talk(address, request).await.starts_with("HTTP/1.1 200"));
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    Arc::into_inner(served).unwrap().stop().await;
}

/// Panics when it is asked, as a handler with a bug would.
#[derive(Debug)]
struct Bug;

impl MetricsSource for Bug {
    fn render(&self) -> String {
        panic!("of a test")
    }
}

#[tokio::test]
async fn a_handler_that_panics_ends_its_own_connection_alone() {
    let mut served = Served::start(ApiOptions::default(), None).await;
    served.stop.take().unwrap().send(()).unwrap();
    tokio::time::timeout(PATIENCE, &mut served.task).await.unwrap().unwrap().unwrap();
    // One request at a time: a permit that is lost would show.
    let options = ApiOptions { requests_max: 1, ..ApiOptions::default() };
    let buggy = router(Arc::clone(&served.face.store), options, Arc::new(Bug));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    served.address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    served.stop = Some(stop);
    served.task = tokio::spawn(run(listener, buggy, None, async move {
        let _ = stopped.await;
    }));

    let mut other = TcpStream::connect(served.address).await.unwrap();
    for _ in 0..3 {
        let answer =
            talk(served.address, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        assert!(!answer.starts_with("HTTP/1.1 2"), "{answer}");
        other.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut answer = [0; 15];
        let read = other.read_exact(&mut answer);
        tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();
        assert_eq!(answer, *b"HTTP/1.1 200 OK");
        // The rest of the answer, up to its end.
        let mut rest = Vec::new();
        while !rest.ends_with(br#"{"status":"ok"}"#) {
            let mut byte = [0];
            tokio::time::timeout(PATIENCE, other.read_exact(&mut byte)).await.unwrap().unwrap();
            rest.push(byte[0]);
        }
    }
    drop(other);
    served.stop().await;
}

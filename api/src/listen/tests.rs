//! Connections that say nothing, with bounds that a test can reach.

use axum::Extension;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;

/// No test waits longer for anything; longer than no connection that is to end may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any test: no end of a wait stands for another one.
const NEVER: Duration = Duration::from_secs(3600);

/// What HTTP/2 begins with (RFC 9113 section 3.4), and an empty SETTINGS frame.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Types of frames that are answered with themselves and the flag ACK (section 6.5, 6.7).
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;

/// Of an answer, and the flag of its last frame (section 6.1, 6.2).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;

struct Served {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ApiServerError>>,
}

impl Served {
    /// A server with a route that everybody may call, and one that tells who calls.
    async fn start(limits: Limits) -> Self {
        let known = async |Extension(standing): Extension<Arc<Standing>>| {
            standing.make_known();
            "known"
        };
        let parts = async || {
            let part = async |number: u32| {
                tokio::time::sleep(impatient().silence_max * 5).await;
                (number < 3).then_some((Ok::<_, Infallible>("part"), number + 1))
            };
            Body::from_stream(futures_util::stream::unfold(0, part))
        };
        let router = Router::new()
            .route("/open", get(async || "open"))
            .route("/known", get(known))
            .route("/parts", get(parts));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(run_within(listener, router, None, limits, async move {
            drop(stopped.await);
        }));
        Self { address, stop, task }
    }

    async fn connect(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap().unwrap();
    }
}

/// The beginning of a connection, with these settings, that asks for a route of six characters.
fn http2_request(settings: &[u8], route: &str) -> Vec<u8> {
    let fields = [&[0x82, 0x86, 0x01, 9], &b"localhost"[..], &[0x04, 6], route.as_bytes()].concat();
    let [settings_length, length] = [settings, &fields].map(|it| u8::try_from(it.len()).unwrap());
    let settings_head = [0, 0, settings_length, SETTINGS, 0, 0, 0, 0, 0];
    // With END_STREAM and END_HEADERS.
    let head = [0, 0, length, HEADERS, 5, 0, 0, 0, 1];
    [&HTTP2[..24], &settings_head, settings, &head, &fields].concat()
}

/// Reads frames and answers those that want it, until the server closes the connection; whether an
/// answer came whole.
async fn keep_alive(mut stream: TcpStream) -> bool {
    let mut head = [0; 9];
    let mut is_whole = false;
    while stream.read_exact(&mut head).await.is_ok() {
        let length = usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        if stream.read_exact(&mut payload).await.is_err() {
            break;
        }
        is_whole |= head[3] == DATA && head[4] & END_STREAM != 0;
        if matches!(head[3], SETTINGS | PING) && head[4] & ACK == 0 {
            let payload = if head[3] == PING { &payload[..] } else { &[] };
            let length = u8::try_from(payload.len()).unwrap();
            let answer = [&[0, 0, length, head[3], ACK, 0, 0, 0, 0], payload].concat();
            // It may be closed just now.
            let _ = stream.write_all(&answer).await;
        }
    }
    is_whole
}

async fn ask(stream: &mut TcpStream, route: &str) -> String {
    let request = format!("GET {route} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let end = route.strip_prefix('/').unwrap().as_bytes();
    while !answer.ends_with(end) {
        let mut piece = [0; 1024];
        let count = tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await.unwrap().unwrap();
        assert!(count > 0, "closed after {}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn an_http2_connection_without_a_request_ends_though_it_answers_pings() {
    let silence_max = Duration::from_millis(50);
    let served = Served::start(Limits { silence_max, ..Limits::default() }).await;
    let silent = served.connect(HTTP2).await;
    tokio::time::timeout(PATIENCE, keep_alive(silent)).await.unwrap();
    served.stop().await;
}

/// Bounds that are over soon, but not before a busy machine has read what was sent at once.
fn impatient() -> Limits {
    let short = Duration::from_millis(300);
    Limits { silence_max: short, stuck_max: short, ..Limits::default() }
}

#[tokio::test]
async fn an_http2_connection_that_takes_no_answer_ends_though_it_answers_pings() {
    let served = Served::start(impatient()).await;
    // Its window for answers is empty, and stays so: SETTINGS_INITIAL_WINDOW_SIZE is 0.
    let stuck = served.connect(&http2_request(&[0, 4, 0, 0, 0, 0], "/known")).await;
    assert!(!tokio::time::timeout(PATIENCE, keep_alive(stuck)).await.unwrap());
    served.stop().await;
}

/// It is not the client who is slow.
#[tokio::test]
async fn an_answer_that_is_made_slowly_comes_whole() {
    let served = Served::start(impatient()).await;
    let by_http2 = async {
        let waits = served.connect(&http2_request(&[], "/parts")).await;
        assert!(tokio::time::timeout(PATIENCE, keep_alive(waits)).await.unwrap());
    };
    let by_http1 = async {
        let mut waits = served.connect(b"GET /parts HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        let mut answer = Vec::new();
        tokio::time::timeout(PATIENCE, waits.read_to_end(&mut answer)).await.unwrap().unwrap();
        assert!(answer.ends_with(b"\r\n0\r\n\r\n"), "{}", String::from_utf8_lossy(&answer));
    };
    tokio::join!(by_http2, by_http1);
    served.stop().await;
}

#[tokio::test]
async fn connections_that_nobody_knows_give_way_and_the_known_stay() {
    let limits = Limits { connections_max: 4, silence_max: NEVER, stuck_max: NEVER };
    let served = Served::start(limits).await;
    let mut known = served.connect(b"").await;
    assert!(ask(&mut known, "/known").await.starts_with("HTTP/1.1 200"));
    let mut strangers = Vec::new();
    for _ in 0..3 {
        strangers.push(tokio::spawn(keep_alive(served.connect(HTTP2).await)));
    }
    // An open route tells nothing of who calls it.
    let mut late = Vec::new();
    for _ in 0..6 {
        let mut stream = served.connect(b"").await;
        assert!(ask(&mut stream, "/open").await.starts_with("HTTP/1.1 200"));
        late.push(stream);
    }
    for stranger in strangers {
        tokio::time::timeout(PATIENCE, stranger).await.unwrap().unwrap();
    }
    assert!(ask(&mut known, "/known").await.starts_with("HTTP/1.1 200"));
    drop(late);
    served.stop().await;
}

//! The daemon as a process: start, ready, stop, crash, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;
#[path = "process/metrics.rs"]
mod metrics;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{
    PATIENCE, Server, connect, http_at, on_free_ports, run_to_end, slackwaterd, with_its_token,
};
use rustix::process::Signal;
use tempfile::TempDir;

/// The promise of the specification for a store that was closed cleanly.
const START_LIMIT: Duration = Duration::from_secs(2);

/// What the accepted reply to a NULL call is, behind its record mark: xid 7, REPLY, accepted,
/// no verifier, success (RFC 5531 section 9).
const NULL_REPLY: [u32; 7] = [0x8000_0018, 7, 1, 0, 0, 0, 0];

fn assert_serves(server: &Server) {
    let expected: Vec<u8> = NULL_REPLY.iter().flat_map(|word| word.to_be_bytes()).collect();
    assert_eq!(server.nfs_null(), expected);
    assert_eq!(server.http("GET", "/healthz", "").0, 200);
    assert_eq!(server.http("GET", "/readyz", "").0, 200);
}

/// The one line on standard error of a server that refuses to start.
fn refusal(command: &mut Command, exit_code: i32) -> String {
    let output = run_to_end(command);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit_code), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("slackwaterd: ")).collect();
    assert_eq!(lines.len(), 1, "expected one line of error:\n{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert!(output.stdout.is_empty(), "said to be ready");
    lines[0].to_owned()
}

/// Waits until connections are refused: the stop has begun.
fn wait_until_refused(address: SocketAddr) {
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < deadline, "it still listens");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn starts_serves_and_stops_cleanly() {
    let directory = TempDir::new().unwrap();
    let first = Server::start(directory.path());
    assert_serves(&first);
    assert!(first.stop().success());

    // The least of some starts tells: a busy machine or disk may hold up any.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let begin = Instant::now();
        let again = Server::start(directory.path());
        let taken = begin.elapsed();
        assert_serves(&again);
        assert!(again.stop().success());
        if taken < START_LIMIT {
            break;
        }
        assert!(Instant::now() < deadline, "ready after {taken:?}");
    }
}

/// More let the process grow past its budget.
#[test]
fn the_allocator_has_two_heaps_unless_somebody_chose_otherwise() {
    let directory = TempDir::new().unwrap();
    for (chosen, expected) in [(None, "2"), (Some("5"), "5")] {
        let mut command = slackwaterd();
        command.args(on_free_ports(directory.path()));
        command.envs(chosen.map(|heaps| ("MALLOC_ARENA_MAX", heaps)));
        let server = Server::start_with(&mut command);
        let of_process = |file| {
            let path = format!("/proc/{}/{file}", server.id());
            String::from_utf8(std::fs::read(path).unwrap()).unwrap()
        };
        let environment = of_process("environ");
        let variable = format!("MALLOC_ARENA_MAX={expected}");
        assert!(environment.split('\0').any(|line| line == variable), "{environment}");
        assert_eq!(of_process("comm").trim(), "slackwaterd");
        let arguments = of_process("cmdline");
        assert!(arguments.starts_with(env!("CARGO_BIN_EXE_slackwaterd")), "{arguments}");
        assert!(server.stop().success());
    }
}

#[test]
fn every_signal_that_asks_for_it_stops_cleanly() {
    let directory = TempDir::new().unwrap();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut server = Server::start(directory.path());
        server.signal(signal);
        assert!(server.wait().success(), "{signal:?}:\n{}", server.log());
        let log = server.log();
        assert!(log.contains("closed"), "{log}");
    }
}

#[test]
fn stops_although_clients_stay_connected() {
    let directory = TempDir::new().unwrap();
    let mut server = Server::start(directory.path());
    let idle = [connect(server.nfs), connect(server.api)];
    assert_serves(&server);
    server.signal(Signal::TERM);
    assert!(server.wait().success(), "{}", server.log());
    drop(idle);
    // Neither waited until its time for that was over; how long the store takes is the disk's matter.
    let log = server.log();
    for late in ["did not drain", "still under way"] {
        assert!(!log.contains(late), "{log}");
    }
    assert_eq!(log.matches("drained").count(), 2, "{log}");
}

#[test]
fn the_second_server_on_a_data_directory_is_refused() {
    let directory = TempDir::new().unwrap();
    let server = Server::start(directory.path());
    let text = refusal(slackwaterd().args(on_free_ports(directory.path())), 1);
    assert!(text.contains(directory.path().to_str().unwrap()), "{text}");
    assert!(text.contains("in use by another process"), "{text}");
    assert_serves(&server);
    assert!(server.stop().success());
}

#[test]
fn an_address_in_use_is_named_and_no_store_is_made() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for option in ["--nfs-listen", "--api-listen"] {
        let mut arguments = on_free_ports(&data_dir);
        let place = arguments.iter().position(|argument| argument == option).unwrap();
        arguments[place + 1].clone_from(&address);
        let text = refusal(slackwaterd().args(arguments), 1);
        assert!(text.contains(&address), "{text}");
        assert!(text.contains(option), "{text}");
        assert!(text.contains("in use"), "{text}");
        assert!(!data_dir.exists());
    }
}

#[test]
fn a_data_directory_that_cannot_be_one_is_named() {
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "not a store").unwrap();
    let text = refusal(slackwaterd().args(on_free_ports(&file)), 1);
    assert!(text.contains(file.to_str().unwrap()), "{text}");
    assert_eq!(std::fs::read(&file).unwrap(), b"not a store");
}

#[test]
fn a_wrong_configuration_ends_with_2_before_anything_is_touched() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let mut arguments = on_free_ports(&data_dir);
    arguments.extend(["--config".to_owned(), "/nonexistent/config.toml".to_owned()]);
    let text = refusal(slackwaterd().args(arguments), 2);
    assert!(text.contains("/nonexistent/config.toml"), "{text}");
    assert!(!data_dir.exists());
}

#[test]
fn what_was_acknowledged_outlives_sigkill() {
    let directory = TempDir::new().unwrap();
    let server = Server::start(directory.path());
    let (status, body) =
        server.http("POST", "/v1/files", r#"{"path":"disks/a.img","size_bytes":1048576}"#);
    assert_eq!(status, 201, "{body}");
    let (status, body) = server.http("POST", "/v1/snapshots", r#"{"path":"disks/a.img"}"#);
    assert_eq!(status, 201, "{body}");
    let snapshot: serde_json::Value = serde_json::from_str(&body).unwrap();
    server.kill();

    let server = Server::start(directory.path());
    assert_serves(&server);
    let (status, body) = server.http("GET", "/v1/files/disks%2Fa.img", "");
    assert_eq!(status, 200, "{body}");
    assert!(body.contains("1048576"), "{body}");
    let clone = serde_json::json!({ "snapshot_id": snapshot["id"], "path": "disks/b.img" });
    let (status, body) = server.http("POST", "/v1/clones", &clone.to_string());
    assert_eq!(status, 201, "{body}");
    assert!(server.stop().success());
}

#[test]
fn a_second_signal_ends_at_once() {
    let directory = TempDir::new().unwrap();
    let mut server = Server::start(directory.path());
    // A request that never ends keeps the drain waiting.
    let mut stream = connect(server.api);
    let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                Expect: 100-continue\r\nContent-Length: 100\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    // The server asks for the body once the request is under way.
    let mut go_on = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    stream.read_exact(&mut go_on).unwrap();
    assert!(go_on.starts_with(b"HTTP/1.1 100"));
    stream.write_all(b"{").unwrap();
    server.signal(Signal::TERM);
    // Two signals at once would be one.
    wait_until_refused(server.api);
    server.signal(Signal::TERM);
    let begin = Instant::now();
    let status = server.wait();
    // Else it waits so long for the request.
    assert!(begin.elapsed() < Duration::from_secs(20), "took {:?}", begin.elapsed());
    assert_eq!(status.code(), Some(1), "{}", server.log());
    drop(stream);
    // What a forced end leaves, the next start repairs.
    assert_serves(&Server::start(directory.path()));
}

#[test]
fn the_printed_lines_work_as_they_stand() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("it's new");
    let server = Server::start_with(slackwaterd().args(with_its_token(&data_dir)));
    let port = server.nfs.port();
    let mount = format!(
        "mount -t nfs -o vers=3,proto=tcp,port={port},mountport={port},nolock,hard,nosuid,nodev 127.0.0.1:"
    );
    let line = server.welcome.lines().find_map(|line| line.strip_prefix(&mount)).unwrap();
    // tests/guest runs the command.
    let expected = format!(" --api http://{} mount-path)\" /mnt", server.api);
    assert!(line.ends_with(&expected), "{}", server.welcome);

    let body = r#"{"path":"disks/one.img","size_bytes":1073741824}"#;
    assert_eq!(server.http("POST", "/v1/files", body).0, 401, "it asks for a token");
    let is_token = |line: &&str| line.starts_with("export SLACKWATER_TOKEN=");
    let token = server.welcome.lines().find(is_token).unwrap();
    let (_, lines) = server.welcome.split_once("with curl (in bash or zsh):\n").unwrap();
    let make = "curl -fsS -H @<(printf 'Authorization: Bearer %s' \"$SLACKWATER_TOKEN\") \
                -H 'Content-Type: application/json'";
    let make = format!("{make} http://{}/v1/files -d '{body}' >/dev/null", server.api);
    let lines = format!("{token}\n{make}\n{lines}");
    let output = run_to_end(Command::new("bash").args(["-euo", "pipefail", "-c", &lines]));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{lines}\n{error}");
    let clone: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(clone["path"], "disks/three.img");
    assert_eq!(clone["size_bytes"], 1_073_741_824);
}

#[test]
fn nfs_is_served_at_several_addresses_and_portmap_tells_the_first() {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(on_free_ports(directory.path()));
    let server = Server::start_with(command.args([
        "--nfs-listen",
        "127.0.0.1:0",
        "--portmap-listen",
        "127.0.0.1:0",
    ]));
    let told = |prefix: &str| {
        let lines = server.welcome.lines().filter_map(|line| line.strip_prefix(prefix));
        lines.map(|line| line.parse().unwrap()).collect::<Vec<SocketAddr>>()
    };
    let (nfs, portmap) = (told("NFS  "), told("PORTMAP  "));
    assert_eq!((nfs.len(), portmap.len()), (2, 1), "{}", server.welcome);
    for address in nfs.iter().chain(&portmap) {
        TcpStream::connect(address).unwrap();
    }
    // GETPORT of NFS by UDP (RFC 1833 section 3.2).
    let words = [7_u32, 0, 2, 100_000, 2, 3, 0, 0, 0, 0, 100_003, 3, 6, 0];
    let call: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket.send_to(&call, portmap[0]).unwrap();
    let mut reply = [0; 100];
    let length = socket.recv(&mut reply).unwrap();
    let port = [7, 1, 0, 0, 0, 0, u32::from(nfs[0].port())];
    let expected: Vec<u8> = port.iter().flat_map(|word: &u32| word.to_be_bytes()).collect();
    assert_eq!(reply[..length], expected);
}

#[test]
fn the_address_of_the_metrics_asks_for_no_token_and_has_nothing_else() {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(with_its_token(directory.path())).args(["--metrics-listen", "127.0.0.1:0"]);
    let server = Server::start_with(&mut command);
    let told = server.welcome.lines().find_map(|line| line.strip_prefix("METRICS  http://"));
    let address: SocketAddr = told.unwrap().strip_suffix("/metrics").unwrap().parse().unwrap();
    let (status, page) = http_at(address, "GET", "/metrics", "");
    assert!(status == 200 && page.contains("\nslackwater_store_files "), "{status} {page}");
    assert_eq!(http_at(server.api, "GET", "/metrics", "").0, 401);
    for path in ["/", "/v1/stats", "/v1/files", "/openapi.json", "/healthz"] {
        assert_eq!(http_at(address, "GET", path, "").0, 404, "{path}");
    }
    assert_eq!(http_at(address, "POST", "/metrics", "").0, 405);
    assert!(server.stop().success());
}

#[test]
fn systemd_is_told_and_its_watchdog_fed() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = slackwaterd();
    command
        .args(on_free_ports(&directory.path().join("store")))
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "100000");
    let mut server = Server::start_with(&mut command);
    let received = |wanted: &str| {
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = [0; 4096];
        while Instant::now() < deadline {
            let length = socket.recv(&mut buffer).unwrap();
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if text.lines().any(|line| line == wanted) {
                return text;
            }
        }
        panic!("systemd was not told {wanted}");
    };
    assert!(received("READY=1").contains("STATUS="));
    received("WATCHDOG=1");
    received("WATCHDOG=1");
    server.signal(Signal::TERM);
    received("STOPPING=1");
    assert!(server.wait().success());
}

#[test]
fn json_logs_are_json() {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(on_free_ports(directory.path())).args(["--log-format", "json"]);
    let mut server = Server::start_with(&mut command);
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    let events: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().any(|event| event["message"] == "ready"), "{log}");
    assert!(events.iter().any(|event| event["message"] == "closed"), "{log}");
}

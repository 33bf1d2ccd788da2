//! The page of metrics: its form, and that each number on it moves.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use tempfile::TempDir;

use crate::assert_serves;
use crate::common::nfs::{BY_ADDRESS, Client, NFS, encode};
use crate::common::{PATIENCE, Server, connect, on_free_ports, slackwaterd};

/// Numbers that stand still in a server that fares well, each with a test that moves it: a file, and what it is called
/// there.
const MOVED_ELSEWHERE: [(&str, &str, &str); 12] = [
    ("slackwater_store_poisoned", "server/tests/disk.rs", "[\"poisoned\"], json!(true)"),
    ("slackwater_store_damaged_chunks", "blockstore/src/scrub.rs", ".damaged_chunks, 1"),
    ("slackwater_store_reclaim_failures_total", "blockstore/tests/full.rs", "reclaim_failures"),
    (
        "slackwater_store_reclaim_jobs_set_aside",
        "blockstore/tests/full.rs",
        "set_aside), (failures, 1)",
    ),
    ("slackwater_store_scrub_segment", "blockstore/src/scrub.rs", "fn scrubbed_bytes"),
    (
        "slackwater_store_scrub_finished_at_seconds",
        "blockstore/src/scrub.rs",
        "finished_at_seconds > 0",
    ),
    ("slackwater_store_scrubbed_bytes_total", "blockstore/src/scrub.rs", "fn scrubbed_bytes"),
    (
        "slackwater_nfs_duplicates_dropped_total",
        "nfs/tests/protocol/duplicates.rs",
        "duplicates_dropped",
    ),
    (
        "slackwater_nfs_tls_connections_total",
        "nfs/tests/protocol/tls.rs",
        "(counters.tls_connections, counters.tls_handshakes_failed), (1, 0)",
    ),
    (
        "slackwater_nfs_tls_handshakes_failed_total",
        "nfs/tests/protocol/tls.rs",
        "counters.tls_handshakes_failed == 2",
    ),
    ("slackwater_nfs_panics_total", "nfs/tests/protocol/panics.rs", "panics"),
    (
        "slackwater_audit_lost_changes_total",
        "api/src/audit/tests.rs",
        "does not fit into the queue is lost",
    ),
];

/// What never changes while a process runs.
const FIXED: [&str; 5] = [
    "slackwater_build_info",
    "slackwater_tls_certificate_expires_at_seconds",
    "slackwater_store_capacity_bytes",
    "process_max_fds",
    "process_start_time_seconds",
];

/// The numbers without labels of a procedure, by their names.
fn numbers(server: &Server) -> BTreeMap<String, String> {
    let (status, page) = server.http("GET", "/metrics", "");
    assert_eq!(status, 200);
    let lines = page.lines().filter(|line| !line.starts_with('#') && !line.contains("procedure="));
    let named = lines.filter_map(|line| line.split_once(' '));
    named
        .map(|(name, value)| (name.split('{').next().unwrap().to_owned(), value.to_owned()))
        .collect()
}

/// Notes which numbers are others than at the first look.
struct Moved {
    first: BTreeMap<String, String>,
    moved: BTreeSet<String>,
}

impl Moved {
    fn look(&mut self, server: &Server) {
        for (name, value) in numbers(server) {
            if self.first.get(&name).is_some_and(|first| *first != value) {
                self.moved.insert(name);
            }
        }
    }

    /// Those that have not moved and should.
    fn left(&self) -> Vec<&str> {
        let names = self.first.keys().map(String::as_str);
        let elsewhere = |name: &str| MOVED_ELSEWHERE.iter().any(|(of, ..)| *of == name);
        names
            .filter(|name| !self.moved.contains(*name) && !elsewhere(name) && !FIXED.contains(name))
            .collect()
    }
}

/// Blocks of text, no two alike: `number` tells them from others.
fn text(number: u64, blocks: usize) -> String {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        format!("{state:016x}")
    };
    (0..blocks * 4096 / 16).map(|_| word()).collect()
}

/// Puts data; answers status and body.
fn put(server: &Server, path: &str, data: &str) -> (u16, String) {
    let mut stream = connect(server.api);
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n",
        data.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(data.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// One round of everything that a client and an administrator do.
fn work(server: &Server, round: u64, look: &mut dyn FnMut()) {
    let expect = |(got, body): (u16, String), status: u16| {
        assert_eq!(got, status, "{body}");
        body
    };
    let name = format!("file-{round}");
    let body = format!(r#"{{"path":"{name}","size_bytes":8388608}}"#);
    expect(server.http("POST", "/v1/files", &body), 201);
    let data = format!("/v1/files/{name}/data");
    expect(put(server, &data, &text(round, 64)), 200);
    // Between what is deleted, so that compaction has something to keep.
    let kept = format!(r#"{{"path":"kept-{round}","size_bytes":0}}"#);
    expect(server.http("POST", "/v1/files", &kept), 201);
    expect(put(server, &format!("/v1/files/kept-{round}/data"), &text(round + 4_000_000, 16)), 200);
    // The same once more, and zeros.
    expect(put(server, &format!("{data}?offset=1048576"), &text(round, 64)), 200);
    expect(put(server, &format!("{data}?offset=2097152"), &"\0".repeat(65_536)), 200);
    look();
    let body = format!(r#"{{"path":"{name}"}}"#);
    let snapshot = expect(server.http("POST", "/v1/snapshots", &body), 201);
    let snapshot: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
    let id = snapshot["id"].as_str().unwrap();
    expect(put(server, &data, &text(round + 1_000_000, 32)), 200);
    by_nfs(server.nfs, &name, round, look);
    look();
    expect(server.http("DELETE", &format!("/v1/snapshots/{id}"), ""), 204);
    expect(server.http("DELETE", &format!("/v1/files/{name}"), ""), 204);
    look();
    expect(server.http("POST", "/v1/gc", ""), 200);
}

fn by_nfs(address: SocketAddr, name: &str, round: u64, look: &mut dyn FnMut()) {
    let mut client = Client::connect(address);
    let root = client.mount("/slackwater");
    let file = client.lookup(&root, name);
    // Long runs are read past the cache; short ones are found in it the second time.
    client.read(&file, 0, 1 << 20);
    for _ in 0..2 {
        client.read(&file, 4096, 4096);
    }
    client.write(&file, 3 << 20, text(round + 2_000_000, 8).as_bytes());
    look();
    client.commit(&file);
    // A call that was sent twice, one of a program that there is not, and bytes that are no call.
    client.create(&root, "again");
    for _ in 0..2 {
        let call = encode(9, 0, (NFS, 3, 12), |call| {
            for bytes in [&root[..], b"again"] {
                call.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
                call.extend(bytes);
                call.resize(call.len().next_multiple_of(4), 0);
            }
        });
        exchange(address, &call);
    }
    exchange(address, &encode(1, 0, (NFS + 1_000_000, 1, 0), |_| {}));
    connect(address).write_all(&[0xff; 64]).unwrap();
}

fn exchange(address: SocketAddr, call: &[u8]) {
    let mut stream = connect(address);
    stream.write_all(call).unwrap();
    stream.read_exact(&mut [0; 28]).unwrap();
}

/// Writes and commits until it is told to end, so that calls are under way whenever the page is read.
fn keep_busy(address: SocketAddr, is_over: &AtomicBool) {
    let mut client = Client::connect(address);
    let root = client.mount("/slackwater");
    client.create(&root, "busy");
    let file = client.lookup(&root, "busy");
    let mut number = 0;
    while !is_over.load(Ordering::Relaxed) {
        client.write(&file, 0, text(3_000_000 + number, 16).as_bytes());
        client.commit(&file);
        number += 1;
    }
}

/// Ends what keeps the server busy, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A number that nothing moves is one that nothing counts.
#[test]
fn every_number_moves_or_is_moved_by_a_test_that_is_named() {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(on_free_ports(directory.path())).args(BY_ADDRESS);
    let server = Server::start_with(command.args(["--squash", "no_root_squash"]));
    let mut moved = Moved { first: numbers(&server), moved: BTreeSet::new() };
    assert!(moved.first.len() > 50, "{:?}", moved.first);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| keep_busy(server.nfs, &is_over));
        let deadline = Instant::now() + PATIENCE;
        let mut round = 0;
        while !moved.left().is_empty() && Instant::now() < deadline {
            work(&server, round, &mut || moved.look(&server));
            moved.look(&server);
            round += 1;
        }
    });
    assert_eq!(moved.left(), [""; 0], "nothing moves these");

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for (name, file, word) in MOVED_ELSEWHERE {
        assert!(moved.first.contains_key(name), "{name} is not on the page");
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        assert!(text.contains(word), "{name}: no `{word}` in {file}");
    }
}

#[test]
fn metrics_show_store_nfs_and_process() {
    let directory = TempDir::new().unwrap();
    let server = Server::start(directory.path());
    assert_serves(&server);
    let (status, page) = server.http("GET", "/metrics", "");
    assert_eq!(status, 200);
    let version = env!("CARGO_PKG_VERSION");
    for line in [
        "slackwater_store_files 0",
        "slackwater_store_poisoned 0",
        "slackwater_nfs_calls_total{program=\"nfs\",procedure=\"NULL\"} 1",
        &format!("slackwater_build_info{{version=\"{version}\"}} 1"),
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in:\n{page}");
    }
    assert!(page.contains("\nprocess_resident_memory_bytes "), "{page}");
    assert!(!page.contains("# EOF"), "that is a mark of OpenMetrics:\n{page}");
    assert_eq!(faults_of_metrics(&page), [""; 0], "{page}");
}

/// What Prometheus' own `promtool check metrics` would say of a page in its text format, so far as that can happen here.
fn faults_of_metrics(page: &str) -> Vec<String> {
    let word = |line: &str, number: usize| line.split(' ').nth(number).unwrap_or("").to_owned();
    let named = |kind: &str| -> Vec<(String, String)> {
        let lines = page.lines().filter(|line| line.starts_with(&format!("# {kind} ")));
        lines.map(|line| (word(line, 2), word(line, 3))).collect()
    };
    let (types, helps) = (named("TYPE"), named("HELP"));
    let mut faults = Vec::new();
    for (name, kind) in &types {
        let mut fault = |text: &str| faults.push(format!("{name} ({kind}): {text}"));
        if !helps.iter().any(|(of, text)| of == name && !text.is_empty()) {
            fault("no help");
        }
        if types.iter().filter(|(other, _)| other == name).count() > 1 {
            fault("two of one name");
        }
        if (kind == "counter") != name.ends_with("_total") {
            fault("counters, and no others, end with _total");
        }
        if name.ends_with("_count") || name.ends_with("_sum") || name.ends_with("_bucket") {
            fault("the ending of a part of a histogram");
        }
        if ["milliseconds", "nanos", "kibibytes", "mebibytes", "percent"]
            .iter()
            .any(|unit| name.contains(unit))
        {
            fault("no base unit");
        }
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap_or("");
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
        if !types.iter().any(|(of, _)| of == name || Some(of.as_str()) == family) {
            faults.push(format!("{name}: no type"));
        }
    }
    faults
}

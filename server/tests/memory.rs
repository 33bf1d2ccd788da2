//! Memory stays within the configured budget while 200 clones are written and read at once,
//! and the metrics show it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::net::SocketAddr;

use common::nfs::{BY_ADDRESS, Client};
use common::{Server, on_free_ports, slackwaterd};
use tempfile::TempDir;

/// Clones that are written and read at once, each over a connection of its own.
const CLONES: u32 = 200;

/// What each clone gets written: in all clones together well over the budget.
const BYTES_PER_CLONE: usize = 6 << 20;

/// Bytes of one WRITE and READ.
const TRANSFER_BYTES: usize = 256 << 10;

/// The default of --memory.
const BUDGET_BYTES: f64 = 1024.0 * 1024.0 * 1024.0;

/// A small appliance's.
const SMALL_BUDGET_BYTES: f64 = 256.0 * 1024.0 * 1024.0;

/// Bytes that differ with the clone and the offset and do not compress (xorshift64).
fn content(clone: u32, offset: usize) -> Vec<u8> {
    let mut state = u64::from(clone + 1) << 40 | u64::try_from(offset + 1).unwrap();
    let mut bytes = Vec::with_capacity(TRANSFER_BYTES);
    while bytes.len() < TRANSFER_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes
}

/// Writes a clone and reads it back, once before and once after it is committed.
fn work(nfs: SocketAddr, clone: u32) {
    let mut client = Client::connect(nfs);
    let root = client.mount("/slackwater");
    let directory = client.lookup(&root, "clones");
    let file = client.lookup(&directory, &clone.to_string());
    for offset in (0..BYTES_PER_CLONE).step_by(TRANSFER_BYTES) {
        let position = u64::try_from(offset).unwrap();
        client.write(&file, position, &content(clone, offset));
        // Behind the writes: bytes that are being committed, and bytes that are.
        let behind = offset / 2 / TRANSFER_BYTES * TRANSFER_BYTES;
        let length = u32::try_from(TRANSFER_BYTES).unwrap();
        let read = client.read(&file, u64::try_from(behind).unwrap(), length);
        assert!(read == content(clone, behind), "clone {clone} at {behind}");
    }
    client.commit(&file);
    for offset in (0..BYTES_PER_CLONE).step_by(TRANSFER_BYTES) {
        let length = u32::try_from(TRANSFER_BYTES).unwrap();
        let read = client.read(&file, u64::try_from(offset).unwrap(), length);
        assert!(read == content(clone, offset), "clone {clone} at {offset} after COMMIT");
    }
}

/// One number of the metrics page.
fn metric(page: &str, name: &str) -> f64 {
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("{name} is not in:\n{page}")).parse().unwrap()
}

#[test]
fn two_hundred_clones_at_once_stay_within_the_budget() {
    clones_at_once(&[], BUDGET_BYTES);
}

#[test]
fn two_hundred_clones_at_once_stay_within_a_small_budget() {
    clones_at_once(&["--memory", "256MiB"], SMALL_BUDGET_BYTES);
}

/// Starts a server with `arguments`, works on all clones at once, and looks at its memory.
fn clones_at_once(arguments: &[&str], budget_bytes: f64) {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(on_free_ports(directory.path())).args(arguments).args(BY_ADDRESS);
    command.args(["--squash", "no_root_squash"]);
    let server = Server::start_with(&mut command);
    let body = serde_json::json!({ "path": "image", "size_bytes": 1_u64 << 30 });
    assert_eq!(server.http("POST", "/v1/files", &body.to_string()).0, 201);
    let (status, snapshot) = server.http("POST", "/v1/snapshots", r#"{"path":"image"}"#);
    assert_eq!(status, 201);
    let snapshot: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
    for clone in 0..CLONES {
        let path = format!("clones/{clone}");
        let body = serde_json::json!({ "snapshot_id": snapshot["id"], "path": path });
        assert_eq!(server.http("POST", "/v1/clones", &body.to_string()).0, 201);
    }

    std::thread::scope(|scope| {
        for clone in 0..CLONES {
            let nfs = server.nfs;
            scope.spawn(move || work(nfs, clone));
        }
    });

    let (_, page) = server.http("GET", "/metrics", "");
    let resident_max = metric(&page, "process_resident_memory_max_bytes");
    let counted = metric(&page, "slackwater_store_memory_bytes");
    println!("at most {resident_max} bytes in RAM, the store counts {counted}");
    assert!(resident_max < budget_bytes, "{resident_max} bytes in RAM");
    assert!(counted > 0.0 && counted < budget_bytes, "the store counts {counted}");
    assert!(metric(&page, "slackwater_nfs_written_bytes_total") > BUDGET_BYTES);
    assert!(server.stop().success());
}

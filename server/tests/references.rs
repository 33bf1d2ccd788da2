//! The key of references, as a user of the server sees it: what was pushed by reference can be pulled after a restart and
//! after the index was made again from the log.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::fs;
use std::path::Path;

use common::{Server, run_to_end, slackwaterd};
use serde_json::{Value, json};
use tempfile::TempDir;

fn json_of((status, text): (u16, String)) -> Value {
    assert!((200..300).contains(&status), "{status} {text}");
    serde_json::from_str(&text).unwrap()
}

/// The id of a snapshot in a new store, and the reference to it.
fn populate(data_dir: &Path) -> (String, Value) {
    let server = Server::start(data_dir);
    json_of(server.http("POST", "/v1/files", r#"{"path": "disk.img", "size_bytes": 1048576}"#));
    let snapshot = json_of(server.http("POST", "/v1/snapshots", r#"{"path": "disk.img"}"#));
    let id = snapshot["id"].as_str().unwrap().to_owned();
    let reference = refer(&server, &id);
    assert!(server.stop().success());
    (id, reference)
}

fn refer(server: &Server, id: &str) -> Value {
    json_of(server.http("GET", &format!("/v1/snapshots/{id}/reference"), ""))
}

#[test]
fn references_outlive_the_server_and_its_index() {
    let directory = TempDir::new().unwrap();
    let (id, reference) = populate(directory.path());
    assert_eq!(reference["snapshot_id"], json!(id));
    let server = Server::start(directory.path());
    assert_eq!(refer(&server, &id), reference);
    server.kill();
    fs::remove_file(directory.path().join("index/CURRENT")).unwrap();
    let data_dir = directory.path().to_str().unwrap();
    let output = run_to_end(slackwaterd().args(["check", "--rebuild", "--data-dir", data_dir]));
    assert!(output.status.success(), "{output:?}");
    let server = Server::start(directory.path());
    assert_eq!(refer(&server, &id), reference);
    assert!(server.stop().success());
}

#[test]
fn a_damaged_key_is_an_error_with_its_path_and_a_lost_one_another_key() {
    let directory = TempDir::new().unwrap();
    let (id, reference) = populate(directory.path());
    let path = directory.path().join("reference-key");
    let key = fs::read(&path).unwrap();
    fs::write(&path, &key[..31]).unwrap();
    let output = run_to_end(slackwaterd().args(common::on_free_ports(directory.path())));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(path.to_str().unwrap()) && said.contains("31 bytes"), "{said}");
    // The store was closed, and no key made in its place.
    assert_eq!(fs::read(&path).unwrap(), key[..31]);
    fs::write(&path, &key).unwrap();
    let server = Server::start(directory.path());
    assert_eq!(refer(&server, &id), reference);
    assert!(server.stop().success());

    fs::remove_file(&path).unwrap();
    let server = Server::start(directory.path());
    let other = refer(&server, &id);
    assert_ne!(other["mac"], reference["mac"]);
    assert_eq!(other["store_id"], reference["store_id"]);
    assert!(server.stop().success());
}

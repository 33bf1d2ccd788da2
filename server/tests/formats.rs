//! Upgrade and downgrade: the daemon serves what a released format left, and refuses what it
//! cannot read, with what to do about it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::{Server, on_free_ports, run_to_end, slackwaterd};
use tempfile::TempDir;

/// The store of format 2 that `blockstore/tests/format` holds against FORMAT.md.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../blockstore/tests/fixtures/format-2")
}

/// Its files, by name from its directory.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().to_owned();
                files.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// A copy of the fixture, with another stamp if one is given.
fn copy(stamp: Option<&str>) -> TempDir {
    let target = TempDir::new().unwrap();
    for (name, bytes) in files(&fixture()) {
        let path = target.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    if let Some(stamp) = stamp {
        std::fs::write(target.path().join("FORMAT"), stamp).unwrap();
    }
    target
}

/// The one line of a daemon that refuses the directory, which must be left as it was.
fn refused(directory: &Path) -> String {
    let before = files(directory);
    let output = run_to_end(slackwaterd().args(on_free_ports(directory)));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(output.stdout.is_empty() && !error.contains("panicked"), "{error}");
    let lines: Vec<_> = error.lines().filter(|line| line.starts_with("slackwaterd: ")).collect();
    assert_eq!(lines.len(), 1, "{error}");
    assert!(lines[0].contains(directory.to_str().unwrap()), "{error}");
    let mut after = files(directory);
    // The lock is taken before anything is looked at.
    after.remove(Path::new("lock"));
    assert!(after == before, "the store was touched");
    lines[0].to_owned()
}

#[test]
fn an_older_format_is_refused_with_the_way_out() {
    let line = refused(copy(Some("slackwater 1\n")).path());
    assert!(line.contains("format 1") && line.contains("format 2"), "{line}");
    assert!(line.contains("slackwater export") && line.contains("slackwater import"), "{line}");
}

#[test]
fn a_newer_format_is_refused_with_the_way_out() {
    for newer in [3, 4_000_000_000_u32] {
        let line = refused(copy(Some(&format!("slackwater {newer}\n"))).path());
        assert!(line.contains(&format!("format {newer}")), "{line}");
        assert!(line.contains("install that release or a newer one"), "{line}");
        assert!(!line.contains("slackwater export"), "an older program reads no newer one: {line}");
    }
}

#[test]
fn what_is_no_stamp_is_refused() {
    for stamp in ["", "slackwater\n", "slackwater -1\n", "slackwater 99999999999\n", "other 2\n"] {
        let line = refused(copy(Some(stamp)).path());
        assert!(line.contains("FORMAT") && line.contains("expected `slackwater 2`"), "{line}");
    }
}

#[test]
fn a_store_of_the_released_format_is_served_with_what_it_held() {
    let directory = copy(None);
    let server = Server::start(directory.path());
    let (status, list) = server.http("GET", "/v1/files", "");
    assert_eq!(status, 200, "{list}");
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let paths: Vec<_> = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["path"].as_str().unwrap())
        .collect();
    // `blockstore/tests/format` says what each of them holds.
    for path in ["images/base.img", "images/twin", "clones/one.img", "clones/two.img"] {
        assert!(paths.contains(&path), "{paths:?}");
    }
    let (status, report) = server.http("POST", "/v1/check", r#"{"data":true}"#);
    assert_eq!(status, 200, "{report}");
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["clean"], true, "{report}");
    assert!(report["data_bytes"].as_u64().unwrap() > 0, "{report}");
    // It takes what is new, and is still a store of its format after it.
    let (status, body) = server.http("POST", "/v1/files", r#"{"path":"new","size_bytes":4096}"#);
    assert_eq!(status, 201, "{body}");
    let (status, body) = server.http("POST", "/v1/snapshots", r#"{"path":"images/base.img"}"#);
    assert_eq!(status, 201, "{body}");
    assert!(server.stop().success());
    let stamp = std::fs::read(directory.path().join("FORMAT")).unwrap();
    assert_eq!(stamp, b"slackwater 2\n");
    let again = Server::start(directory.path());
    assert_eq!(again.http("GET", "/v1/files/new", "").0, 200);
    assert!(again.stop().success());
}

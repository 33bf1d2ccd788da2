//! `slackwaterd check`, run as users run it: on a store that no server has open.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Output;

use common::{Server, on_free_ports, run_to_end, slackwaterd};
use tempfile::TempDir;

fn check(data_dir: &Path, arguments: &[&str]) -> Output {
    let data_dir = data_dir.to_str().unwrap();
    run_to_end(slackwaterd().args(["check", "--data-dir", data_dir]).args(arguments))
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A store with a file, a snapshot and a clone, in which something was compacted.
fn populate(data_dir: &Path) {
    let server = Server::start(data_dir);
    let post = |path: &str, body: &str| {
        let (status, text) = server.http("POST", path, body);
        assert!((200..300).contains(&status), "{path}: {status} {text}");
        text
    };
    post("/v1/files", r#"{"path": "disk.img", "size_bytes": 1048576}"#);
    let snapshot: serde_json::Value =
        serde_json::from_str(&post("/v1/snapshots", r#"{"path": "disk.img"}"#)).unwrap();
    let clone = serde_json::json!({ "snapshot_id": snapshot["id"], "path": "clone.img" });
    post("/v1/clones", &clone.to_string());
    assert!(server.stop().success());
}

fn has_clone(data_dir: &Path) -> bool {
    let server = Server::start(data_dir);
    let (status, _) = server.http("GET", "/v1/files/clone.img", "");
    assert!(server.stop().success());
    status == 200
}

#[test]
fn a_sound_store_has_no_problems() {
    let directory = TempDir::new().unwrap();
    populate(directory.path());
    let output = check(directory.path(), &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("verdict    no problems\n"), "{}", stdout(&output));
    let output = check(directory.path(), &["--data", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["clean"], &report["inodes"]), (&true.into(), &3.into()), "{report}");
    assert!(report.get("rebuilt").is_none(), "{report}");
}

/// The name of a directory that holds something else is a slip.
#[test]
fn a_directory_that_holds_something_else_is_refused_and_left_as_it_is() {
    let directory = TempDir::new().unwrap();
    let precious = directory.path().join("precious");
    std::fs::create_dir(&precious).unwrap();
    std::fs::write(directory.path().join("config.toml"), "capacity = \"1GiB\"\n").unwrap();
    let data_dir = directory.path().to_str().unwrap();
    let config = directory.path().join("config.toml");
    let ports = ["--nfs-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"];
    let output = run_to_end(
        slackwaterd().args(ports).args(["--data-dir", data_dir]).arg("--config").arg(&config),
    );
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let told = stderr(&output);
    assert!(told.contains("precious") && !told.contains("config.toml"), "{told}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "nothing was made");
    // What the configuration names may lie there, and so may what a new file system has.
    std::fs::rename(&precious, directory.path().join("lost+found")).unwrap();
    let mut command = slackwaterd();
    command.args(on_free_ports(directory.path())).arg("--config").arg(&config);
    let server = Server::start_with(&mut command);
    assert!(server.stop().success());
}

#[test]
fn a_lost_index_is_refused_with_the_command_that_makes_it_anew() {
    let directory = TempDir::new().unwrap();
    populate(directory.path());
    std::fs::remove_file(directory.path().join("index/CURRENT")).unwrap();
    let output = check(directory.path(), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("slackwaterd check --rebuild"), "{}", stderr(&output));
    let output = check(directory.path(), &["--rebuild", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["clean"], true, "{report}");
    let aside = directory.path().join("index.damaged-1");
    assert_eq!(report["rebuilt"]["set_aside"], aside.to_str().unwrap());
    assert!(report["rebuilt"]["replayed_commits"].as_u64().unwrap() >= 4, "{report}");
    assert!(aside.is_dir());
    assert!(has_clone(directory.path()));
    // And once more, for people.
    let output = check(directory.path(), &["--rebuild"]);
    let text = stdout(&output);
    assert!(text.starts_with("made the index anew from "), "{text}");
    assert!(
        text.contains("index.damaged-2, which may be deleted\nverdict    no problems"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_made_anew_is_told() {
    let directory = TempDir::new().unwrap();
    populate(directory.path());
    std::fs::remove_file(directory.path().join("log/0000000000000001.seg")).unwrap();
    let output = check(directory.path(), &["--rebuild"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert!(stderr(&output).contains("nothing to make an index from"), "{}", stderr(&output));
    assert!(directory.path().join("index/CURRENT").exists(), "it is left as it was");
}

#[test]
fn no_store_is_made_and_none_is_taken_from_a_server() {
    let directory = TempDir::new().unwrap();
    for arguments in [&[][..], &["--rebuild"]] {
        let output = check(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
    let server = Server::start(directory.path());
    for arguments in [&[][..], &["--rebuild"]] {
        let output = check(directory.path(), arguments);
        assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
        assert!(stderr(&output).contains("slackwater check"), "{}", stderr(&output));
    }
    assert!(server.stop().success());
}

#[test]
fn problems_are_printed_and_end_with_their_own_code() {
    let directory = TempDir::new().unwrap();
    populate(directory.path());
    damage_chunk(directory.path());
    let output = check(directory.path(), &["--data"]);
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stdout(&output).contains("PROBLEMS FOUND"), "{}", stdout(&output));
}

/// Writes a block to the file, and flips a bit of it on the disk.
fn damage_chunk(data_dir: &Path) {
    use slackwater_blockstore::{FilePath, Options, Stability, Store};
    let store = Store::open(Options { background: false, ..Options::new(data_dir) }).unwrap();
    let inode = store.resolve(&FilePath::parse("disk.img").unwrap()).unwrap().inode;
    let block: Vec<u8> = (0..4096_u32).map(|n| (n * n % 251).to_le_bytes()[0]).collect();
    let needle = block[1000..1032].to_vec();
    store.write(inode, 0, block.into(), Stability::FileSync).unwrap();
    store.close().unwrap();
    drop(store);
    let path = data_dir.join("log/0000000000000001.seg");
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(32).position(|window| window == needle).expect("stored as it is");
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

/// As an administrator does it with the service's data: the service's user cannot open what is root's.
#[test]
fn as_root_what_root_checks_stays_its_owners() {
    const OWNER: u32 = 12_345;
    let (directory, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let data_dir = directory.path().join("store");
    populate(&data_dir);
    let other = elsewhere.path().join("of-root");
    std::fs::write(&other, "").unwrap();
    let chown = |path: &Path| std::os::unix::fs::lchown(path, Some(OWNER), Some(OWNER)).unwrap();
    let all = || {
        let mut found = vec![data_dir.clone()];
        let mut next = 0;
        while let Some(path) = found.get(next).cloned() {
            if path.symlink_metadata().unwrap().is_dir() {
                found.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            }
            next += 1;
        }
        found
    };
    all().iter().for_each(|path| chown(path));
    // What its owner may put there leads to nothing of the machine's.
    std::fs::hard_link(&other, data_dir.join("another-name")).unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), data_dir.join("link")).unwrap();
    chown(&data_dir.join("link"));
    for arguments in [&["--data"][..], &["--rebuild"]] {
        let output = check(&data_dir, arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        let of_others: Vec<_> = all()
            .into_iter()
            .filter(|path| path.symlink_metadata().unwrap().uid() != OWNER)
            .collect();
        assert_eq!(of_others, [data_dir.join("another-name")], "{arguments:?}");
    }
    assert_eq!(
        (other.metadata().unwrap().uid(), elsewhere.path().metadata().unwrap().uid()),
        (0, 0)
    );
}

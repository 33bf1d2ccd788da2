//! The daemon on a disk that is full, stops for a while, or fails. Needs root and loop devices.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::disk::Disk;
use common::nfs::{BY_ADDRESS, Client, Handle, OK};
use common::{Server, on_free_ports, slackwaterd};
use serde_json::{Value, json};
use slackwater_blockstore::{FilePath, Options, Stability, Store};

/// Statuses of RFC 1813 section 2.6.
const NOT_FOUND: u32 = 2;
const IO: u32 = 5;
const NO_SPACE: u32 = 28;

const PIECE_BYTES: usize = 1 << 20;
const PIECE: u64 = 1 << 20;

/// Longest wait for what the background does.
const PATIENCE: Duration = Duration::from_secs(90);

/// How long the disk stops.
const STALL: Duration = Duration::from_secs(10);

fn start_command(disk: &Disk) -> Command {
    let mut command = slackwaterd();
    command
        .args(on_free_ports(&disk.path().join("store")))
        .args(["--squash", "no_root_squash"])
        .args(BY_ADDRESS);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn start(disk: &Disk) -> Server {
    Server::start_with(&mut start_command(disk))
}

/// A megabyte that neither compresses nor repeats, told by its file and number.
fn piece(file: u64, number: u64) -> Vec<u8> {
    let mut state = ((file << 32) | (number + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(PIECE_BYTES);
    while bytes.len() < PIECE_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes
}

fn stats(server: &Server) -> Value {
    let (status, body) = server.http("GET", "/v1/stats", "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

fn assert_clean(server: &Server) {
    let (status, body) = server.http("POST", "/v1/check", r#"{"data":true}"#);
    assert_eq!(status, 200, "{body}");
    let report: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(report["clean"], json!(true), "{body}");
}

fn root(client: &mut Client) -> Handle {
    client.mount("/slackwater")
}

fn create(client: &mut Client, name: &str) -> Handle {
    let root = root(client);
    assert_eq!(client.create(&root, name), OK, "CREATE {name}");
    client.lookup(&root, name)
}

/// Pieces that were written, and committed, before the status that ended it.
fn write_until_refused(client: &mut Client, file: &Handle, number: u64, pieces: u64) -> (u64, u32) {
    let mut committed = 0;
    for at in 0..pieces {
        if let Err(status) = client.try_write(file, at * PIECE, &piece(number, at)) {
            return (committed, status);
        }
        if at % 4 == 3 {
            if let Err(status) = client.try_commit(file) {
                return (committed, status);
            }
            committed = at + 1;
        }
    }
    (committed, OK)
}

fn assert_holds(client: &mut Client, file: &Handle, number: u64, pieces: u64) {
    for at in 0..pieces {
        let read = client.read(file, at * PIECE, u32::try_from(PIECE_BYTES).unwrap());
        assert!(read == piece(number, at), "file {number}, piece {at}");
    }
}

/// Files and how many pieces of each are committed, until the disk is full.
fn fill_by_nfs(client: &mut Client) -> Vec<(String, u64)> {
    let mut files = Vec::new();
    loop {
        let number = u64::try_from(files.len()).unwrap();
        let name = format!("f{number}");
        let root = root(client);
        match client.create(&root, &name) {
            OK => {}
            status => {
                assert_eq!(status, NO_SPACE);
                return files;
            }
        }
        let file = client.lookup(&root, &name);
        let (pieces, status) = write_until_refused(client, &file, number, 64);
        files.push((name, pieces));
        if status != OK {
            assert_eq!(status, NO_SPACE, "a full disk is told as one");
            return files;
        }
    }
}

fn wait_for_room(server: &Server, bytes: u64) {
    let deadline = Instant::now() + PATIENCE;
    while stats(server)["available_bytes"].as_u64().unwrap() < bytes {
        assert!(Instant::now() < deadline, "no room came back: {}", stats(server));
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Filled by clients to NOSPC, then by somebody else to the last byte; killed and started so.
/// Snapshots and files can be deleted, their room comes back, and writes work again.
#[test]
fn a_full_disk_takes_deletes_and_then_writes_again() {
    let disk = Disk::new(512 << 20);
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    let kept = create(&mut client, "kept");
    assert_eq!(write_until_refused(&mut client, &kept, 1000, 8), (8, OK));
    let (status, snapshot) = server.http("POST", "/v1/snapshots", r#"{"path":"kept"}"#);
    assert_eq!(status, 201, "{snapshot}");
    let snapshot: Value = serde_json::from_str(&snapshot).unwrap();
    let files = fill_by_nfs(&mut client);
    assert!(files.len() > 3, "{files:?}");
    // Data that is refused waits in memory and is tried again; it must not cost the room that is kept for deletes.
    disk.fill_slowly();

    // Nothing is lost, and nothing is stuck.
    assert_eq!(client.getattr(&kept), OK);
    assert_holds(&mut client, &kept, 1000, 8);
    let into = root(&mut client);
    assert_eq!(client.create(&into, "one more"), NO_SPACE);
    server.kill();
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    for (number, (name, pieces)) in (0..).zip(&files) {
        let file = client.lookup(&into, name);
        assert_holds(&mut client, &file, number, *pieces);
    }

    let path = format!("/v1/snapshots/{}", snapshot["id"].as_str().unwrap());
    let (status, body) = server.http("DELETE", &path, "");
    assert_eq!(status, 204, "{body}");
    for (name, _) in &files[1..] {
        assert_eq!(client.remove(&into, name), OK, "REMOVE on a full disk");
    }
    // Somebody else keeps what he took.
    wait_for_room(&server, 128 << 20);
    let again = create(&mut client, "again");
    assert_eq!(write_until_refused(&mut client, &again, 2000, 64), (64, OK));
    assert_holds(&mut client, &again, 2000, 64);
    assert_holds(&mut client, &kept, 1000, 8);
    assert_clean(&server);
    disk.empty();
    assert_audit_log_goes_on(&server, &disk);
    assert!(server.stop().success());
    let server = start(&disk);
    assert_clean(&server);
    assert!(server.stop().success());
}

/// Whatever of it could not be written: each line is whole, and changes are in it again.
fn assert_audit_log_goes_on(server: &Server, disk: &Disk) {
    let (status, body) = server.http("POST", "/v1/files", r#"{"path":"told","size_bytes":1}"#);
    assert_eq!(status, 201, "{body}");
    let (status, page) = server.http("GET", "/v1/audit?limit=1", "");
    assert!(status == 200 && page.contains("/v1/files/told"), "{page}");
    for file in std::fs::read_dir(disk.path().join("store/audit")).unwrap() {
        for line in std::fs::read_to_string(file.unwrap().path()).unwrap().lines() {
            let change = serde_json::from_str::<Value>(line);
            assert!(change.is_ok_and(|change| change["number"].is_u64()), "{line}");
        }
    }
}

/// Moments of kills, by a seed that is printed; `SLACKWATER_DISK_SEED=N` gives it.
struct Moments(u64);

impl Moments {
    fn new() -> Self {
        let given = std::env::var("SLACKWATER_DISK_SEED").ok();
        let seed = given.map_or(u64::from(std::process::id()), |text| text.parse().unwrap());
        println!("SLACKWATER_DISK_SEED={seed}");
        Self(seed)
    }

    /// Waits for some part of a time.
    fn wait_within(&mut self, longest: Duration) {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(longest * u32::try_from(self.0 >> 48).unwrap() / (1 << 16));
    }
}

fn reserve_bytes(disk: &Disk, name: &str) -> u64 {
    std::fs::metadata(disk.path().join("store").join(name)).unwrap().len()
}

/// Somebody else takes what is free, and what was kept for deletes, which the store gave back before.
fn take_all_but_start_reserve(disk: &Disk) {
    let reserve = disk.path().join("store/reserve");
    std::fs::File::options().write(true).open(reserve).unwrap().set_len(0).unwrap();
    disk.fill();
}

/// Killed at any moment, while a client deletes; no byte is free at any start.
#[test]
fn a_server_on_a_disk_without_a_free_byte_starts_after_every_kill() {
    const KILLS: usize = 200;
    // Deletes whose replies are not waited for before the kill.
    const UNANSWERED: usize = 5;
    // What the room that is kept suffices for, by far.
    const DELETES_MIN: usize = 20;
    let mut moments = Moments::new();
    let disk = Disk::new(256 << 20);
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    let kept = create(&mut client, "kept");
    assert_eq!(write_until_refused(&mut client, &kept, 1000, 8), (8, OK));
    let root = root(&mut client);
    let (old, unanswered) = (|kill| format!("old{kill}"), |kill, call| format!("u{kill}-{call}"));
    for kill in 0..KILLS {
        assert_eq!(client.create(&root, &old(kill)), OK);
        for call in 0..UNANSWERED {
            assert_eq!(client.create(&root, &unanswered(kill, call)), OK);
        }
    }
    server.kill();
    let mut statuses = Vec::new();
    for kill in 0..KILLS {
        take_all_but_start_reserve(&disk);
        let server = start(&disk);
        if kill == 0 {
            let log = server.log();
            assert!(log.contains("the store is full"), "it says so: {log}");
        }
        let mut client = Client::connect(server.nfs);
        assert_eq!(client.getattr(&kept), OK);
        statuses.push(client.remove(&root, &old(kill)));
        for call in 0..UNANSWERED {
            client.send_remove(&root, &unanswered(kill, call)).unwrap();
        }
        moments.wait_within(Duration::from_millis(30));
        server.kill();
    }
    let deleted = statuses.iter().filter(|status| **status == OK).count();
    println!("{deleted} of {KILLS} deletes were taken");
    assert!(deleted >= DELETES_MIN, "{statuses:?}");
    disk.empty();
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    // What was answered is so; a delete that was refused was not done.
    for (kill, status) in statuses.into_iter().enumerate() {
        assert!(matches!(status, OK | NO_SPACE), "REMOVE: status {status}");
        let found = client.try_lookup(&root, &old(kill)).map(drop);
        assert_eq!(found, if status == OK { Err(NOT_FOUND) } else { Ok(()) }, "{}", old(kill));
    }
    assert_holds(&mut client, &kept, 1000, 8);
    assert_clean(&server);
    assert!(server.stop().success());
}

/// Killed at any moment of the start itself, too, and each time somebody else takes what is free then.
#[test]
fn a_server_that_was_killed_as_it_started_on_a_full_disk_starts() {
    const ROUNDS: u64 = 10;
    // Fewer than the steps in which a start uses what is kept for it.
    const KILLS: u64 = 3;
    // About as long as a start takes.
    const START: Duration = Duration::from_millis(200);
    let mut moments = Moments::new();
    let disk = Disk::new(512 << 20);
    let mut server = start(&disk);
    let mut client = Client::connect(server.nfs);
    let kept = create(&mut client, "kept");
    assert_eq!(write_until_refused(&mut client, &kept, 1000, 8), (8, OK));
    let whole = reserve_bytes(&disk, "reserve-start");
    assert!(whole > 0, "room is kept");
    for round in 0..ROUNDS {
        server.kill();
        for _ in 0..KILLS {
            take_all_but_start_reserve(&disk);
            let mut child = start_command(&disk).spawn().unwrap();
            moments.wait_within(START);
            child.kill().unwrap();
            child.wait().unwrap();
        }
        take_all_but_start_reserve(&disk);
        server = start(&disk);
        assert_eq!(Client::connect(server.nfs).getattr(&kept), OK, "round {round}");
        disk.empty();
        let deadline = Instant::now() + PATIENCE;
        // The store's share of the disk, of which this is one, is never quite the same.
        while reserve_bytes(&disk, "reserve-start") < whole / 10 * 9 {
            let kept = reserve_bytes(&disk, "reserve-start");
            assert!(Instant::now() < deadline, "{kept} of {whole} bytes are kept again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let mut client = Client::connect(server.nfs);
    assert_holds(&mut client, &kept, 1000, 8);
    assert_clean(&server);
    assert!(server.stop().success());
}

/// One client's work during the stall: writes, COMMITs, no error.
fn write_and_commit(nfs: SocketAddr, number: u64, stop: &AtomicBool) -> u64 {
    let mut client = Client::connect(nfs);
    let name = format!("w{number}");
    let file = create(&mut client, &name);
    let mut written = 0;
    while !stop.load(Ordering::SeqCst) && written < 256 {
        client.try_write(&file, written * PIECE, &piece(number, written)).expect("WRITE");
        written += 1;
        client.try_commit(&file).expect("COMMIT");
    }
    written
}

/// What a client does that hears nothing for long: the same WRITE again, by the same connection
/// and by a new one.
fn resend(nfs: SocketAddr, file: &Handle) {
    let data = piece(77, 0);
    let mut client = Client::connect(nfs);
    let mut other = Client::connect(nfs);
    for _ in 0..3 {
        client.resend_write(900, file, 0, &data);
        other.resend_write(900, file, 0, &data);
    }
    for _ in 0..3 {
        assert_eq!(client.take_status(), (900, OK));
        assert_eq!(other.take_status(), (900, OK));
    }
    assert!(client.try_commit(file).is_ok() && other.try_commit(file).is_ok());
}

/// The disk stops for ten seconds under load: what waits for it waits, and no client sees an error.
#[test]
fn a_disk_that_stops_for_ten_seconds_is_no_error() {
    let disk = Disk::new(2 << 30);
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    let file = create(&mut client, "cached");
    client.write(&file, 0, &piece(7, 0));
    client.commit(&file);
    let (nfs, stop, mut answered) = (server.nfs, &AtomicBool::new(false), 0);
    let written = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|number| scope.spawn(move || (number, write_and_commit(nfs, number, stop))))
            .collect();
        let frozen = disk.freeze();
        let begin = Instant::now();
        let resender = scope.spawn(|| resend(nfs, &file));
        while begin.elapsed() < STALL {
            assert_eq!(client.getattr(&file), OK);
            answered += 1;
        }
        drop(frozen);
        // A reply that waited for the disk would be one of a few.
        assert!(answered > 100, "{answered} GETATTRs in {STALL:?}");
        resender.join().unwrap();
        stop.store(true, Ordering::SeqCst);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect::<Vec<_>>()
    });
    let root = root(&mut client);
    for (number, pieces) in written {
        let file = client.lookup(&root, &format!("w{number}"));
        assert_holds(&mut client, &file, number, pieces);
    }
    assert_holds(&mut client, &file, 77, 1);
    assert_clean(&server);
    assert!(server.stop().success());
}

/// Writes of the disk fail: the store takes no more of them, reads go on, and once the disk is
/// sound a restart has all that was committed.
#[test]
fn a_disk_that_fails_poisons_and_a_restart_recovers() {
    let mut disk = Disk::thin(2 << 30, 192 << 20);
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    let kept = create(&mut client, "kept");
    assert_eq!(write_until_refused(&mut client, &kept, 1, 32), (32, OK));
    let verifier = client.try_write(&kept, 32 * PIECE, &piece(1, 32)).unwrap();
    client.commit(&kept);
    disk.fill_pool();

    let file = create_while_it_lasts(&mut client);
    let (committed, status) = match &file {
        Some(file) => write_until_refused(&mut client, file, 2, 400),
        None => (0, IO),
    };
    assert_eq!(status, IO, "not a word of success, after {committed} pieces");
    assert_eq!(stats(&server)["poisoned"], json!(true));
    assert_holds(&mut client, &kept, 1, 33);
    let into = root(&mut client);
    assert_eq!(client.create(&into, "refused"), IO);
    assert_eq!(client.try_write(&kept, 0, &piece(3, 0)), Err(IO));
    assert_eq!(client.try_commit(&kept), Err(IO));
    server.kill();

    disk.empty_pool();
    disk.mend();
    let server = start(&disk);
    let mut client = Client::connect(server.nfs);
    assert_holds(&mut client, &kept, 1, 33);
    if committed > 0 {
        let file = client.lookup(&into, "late");
        assert_holds(&mut client, &file, 2, committed);
    }
    let again = client.try_write(&kept, 0, &piece(3, 0)).unwrap();
    assert_ne!(again, verifier, "clients must learn that it was another life");
    client.commit(&kept);
    assert_clean(&server);
    assert!(server.stop().success());
}

/// The name may be the first change that fails.
fn create_while_it_lasts(client: &mut Client) -> Option<Handle> {
    let root = root(client);
    match client.create(&root, "late") {
        OK => Some(client.lookup(&root, "late")),
        status => {
            assert_eq!(status, IO);
            None
        }
    }
}

/// RocksDB has to write its files while the disk has no free byte: it gets what was kept.
#[test]
fn an_index_without_room_goes_on_and_loses_nothing() {
    let disk = Disk::new(256 << 20);
    let mut options = Options::new(disk.path().join("store"));
    options.background = false;
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.segment_bytes = 8 << 20;
    let store = Store::open(options.clone()).unwrap();
    let name = |number: u64| FilePath::parse(&format!("d/f{number}")).unwrap();
    for number in 0..120 {
        let inode = store.create_file(&name(number), 0).unwrap().attributes.inode;
        let data = piece(number, 0)[..8192].to_vec().into();
        store.write(inode, 0, data, Stability::Unstable).unwrap();
    }
    store.commit_all().unwrap();
    disk.fill();
    let held = reserve_bytes(&disk, "reserve");
    assert!(held > 0, "room is kept");
    // A flush would find no byte: it has the reserve.
    store.checkpoint().unwrap();
    assert_eq!(reserve_bytes(&disk, "reserve"), 0, "it was given back");
    for number in 0..100 {
        store.remove_path(&name(number)).expect("a delete, whatever the index waits for");
    }
    store.healthy().unwrap();
    disk.empty();
    store.checkpoint().unwrap();
    store.gc().unwrap();
    let is_sound = |store: &Store| {
        assert_eq!(store.list_files("", None, 1000).unwrap().len(), 20);
        let report = store.check(true).unwrap();
        assert!(report.is_clean(), "{:?}", report.problems);
    };
    is_sound(&store);
    assert!(reserve_bytes(&disk, "reserve") >= held, "room is kept again");
    // As after a kill: nothing is closed, and the index is what RocksDB has on the disk.
    drop(store);
    is_sound(&Store::open(options).unwrap());
}

//! A disk that stalls, fails or is full, below a real store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use slackwater_blockstore::disk::{Disk, Fault, MemoryDisk};
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{Options, Store};
use slackwater_nfs::NfsOptions;
use tokio::time::timeout;

use crate::common::client::{Cred, FILE_SYNC, NFS, UNSTABLE, call, proc, record, write_args};
use crate::common::server::LIMIT;
use crate::common::{Args, Body, Server, SetAttr, root_options, status};
use crate::hooked::{During, HookedDisk};

/// A disk whose syncs wait while the gate is shut.
pub fn stalling_disk() -> (Arc<HookedDisk>, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let of_disk = Arc::clone(&gate);
    let disk = HookedDisk::new(move |during| {
        if during == During::Sync {
            of_disk.pass();
        }
    });
    (disk, gate)
}

#[derive(Debug, Default)]
pub struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    /// Syncs that wait.
    waiting: AtomicUsize,
}

impl Gate {
    /// Shuts the gate until what it answers is dropped: also by a test that fails.
    pub fn shut(&self) -> Shut<'_> {
        *self.is_shut.lock() = true;
        Shut(self)
    }

    fn open(&self) {
        *self.is_shut.lock() = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut is_shut = self.is_shut.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while *is_shut {
            self.opened.wait(&mut is_shut);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns once a sync waits.
    pub async fn wait_for_a_sync(&self) {
        let waits = async {
            while self.waiting.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, waits).await.expect("a sync in time");
    }
}

/// A shut gate.
pub struct Shut<'a>(&'a Gate);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// What does not wait for the disk is answered in this time, also by a busy machine: the disk stalls
/// for longer.
const PATIENCE: Duration = Duration::from_secs(30);

fn server(disk: Arc<dyn Disk>, capacity_bytes: Option<u64>) -> Server {
    server_with(disk, capacity_bytes, root_options())
}

pub fn server_with(
    disk: Arc<dyn Disk>,
    capacity_bytes: Option<u64>,
    nfs_options: NfsOptions,
) -> Server {
    let mut options = Options::new("unused");
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.capacity_bytes = capacity_bytes;
    let store = Store::open_with(Arc::new(MemoryKv::new()), disk, options).unwrap();
    Server::over_store(store, nfs_options)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_disk_stalls_what_waits_for_it_and_nothing_else() {
    const WRITES: u32 = 500;
    const DIRECTORIES: u32 = 100;
    const STATISTICS: u32 = 100;
    let (disk, gate) = stalling_disk();
    let server = server(disk, None);
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let other = client.create(&root, b"other").await.unwrap();
    client.write(&other, 0, b"content", FILE_SYNC).await.unwrap();
    let shut = gate.shut();
    let user = Cred::user(0, 0);
    let mut stream = Vec::new();
    for number in 0..WRITES {
        let args = write_args(&file, u64::from(number) * 4096, &[7; 4096], FILE_SYNC);
        stream.extend(record(&call(number, NFS, proc::WRITE, &user, &args)));
    }
    for number in 0..DIRECTORIES {
        let name = format!("directory-{number}");
        let args = Args::new().place(&root, name.as_bytes()).set(&SetAttr::mode(0o755));
        stream.extend(record(&call(WRITES + number, NFS, proc::MKDIR, &user, &args)));
    }
    let pipe = Args::new().place(&root, b"pipe").u32(7).set(&SetAttr::default());
    stream.extend(record(&call(WRITES + DIRECTORIES, NFS, proc::MKNOD, &user, &pipe)));
    let mut writer = server.client().await;
    writer.send(&stream).await;
    // FSSTAT may wait for the commit that stalls; even many of them hold up no READDIR.
    let statistics = Args::new().opaque(&root);
    let statistics = (0..STATISTICS)
        .map(|number| call(WRITES + DIRECTORIES + number, NFS, proc::FSSTAT, &user, &statistics));
    writer.send(&statistics.flat_map(|call| record(&call)).collect::<Vec<_>>()).await;
    // The same connection takes calls behind those that wait, and so do others.
    let last = record(&call(9999, NFS, proc::GETATTR, &user, &Args::new().opaque(&other)));
    writer.send(&last).await;
    let mut statistics_answered = 0;
    while Body::new(writer.receive().await).u32() != 9999 {
        statistics_answered += 1;
    }
    let reads = async {
        for _ in 0..20 {
            client.getattr(&other).await.unwrap();
            client.lookup(&root, b"other").await.unwrap();
            assert_eq!(client.read(&other, 0, 7).await, Ok((b"content".to_vec(), true)));
            let list = Args::new().opaque(&root).u64(0).u64(0).u32(4096);
            assert_eq!(client.nfs(proc::READDIR, &list).await.0, status::OK);
        }
    };
    let answered = timeout(PATIENCE, reads).await;
    assert!(server.counters().calls_in_flight >= u64::from(WRITES), "they do wait");
    drop(shut);
    assert!(answered.is_ok(), "metadata and reads waited for the disk");
    for _ in statistics_answered..WRITES + DIRECTORIES + STATISTICS {
        let mut reply = Body::new(writer.receive().await);
        let header: Vec<u32> = (0..7).map(|_| reply.u32()).collect();
        assert_eq!(header[1..], [1, 0, 0, 0, 0, status::OK]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unstable_writes_are_taken_while_all_that_wait_for_the_disk_stall() {
    const WRITES: u32 = 100;
    let (disk, gate) = stalling_disk();
    let server = server(disk, None);
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let other = client.create(&root, b"other").await.unwrap();
    client.write(&other, 0, b"old", UNSTABLE).await.unwrap();
    let mut writer = server.client().await;
    let shut = gate.shut();
    let stream: Vec<u8> = (0..WRITES)
        .flat_map(|number| {
            let args = write_args(&file, u64::from(number) * 4096, &[7; 4096], FILE_SYNC);
            record(&call(number, NFS, proc::WRITE, &Cred::user(0, 0), &args))
        })
        .collect();
    writer.send(&stream).await;
    server.wait_until(|counters| counters.calls_in_flight >= u64::from(WRITES)).await;
    let write = timeout(PATIENCE, client.write(&other, 0, b"new", UNSTABLE)).await;
    drop(shut);
    assert!(write.expect("an unstable write waited for the disk").is_ok());
    assert_eq!(client.read(&other, 0, 3).await.unwrap().0, b"new");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unstable_write_does_not_overtake_one_that_waits() {
    let (disk, gate) = stalling_disk();
    let options = NfsOptions { io_threads: 1, ..root_options() };
    let server = server_with(disk, None, options);
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, &[0; 8192], FILE_SYNC).await.unwrap();
    let shut = gate.shut();
    // The first holds the lane's only thread, the second waits for it.
    let writes = [(0, [1; 4096], FILE_SYNC), (4096, [2; 4096], FILE_SYNC)];
    let last = (4096, [3; 4096], UNSTABLE);
    for (number, (offset, data, stability)) in (0..).zip(writes.into_iter().chain([last])) {
        let args = write_args(&file, offset, &data, stability);
        client.send(&record(&call(number, NFS, proc::WRITE, &Cred::user(0, 0), &args))).await;
    }
    server.wait_until(|counters| counters.calls_in_flight == 3).await;
    drop(shut);
    for number in 0..3 {
        assert_eq!(Body::new(client.receive().await).u32(), number);
    }
    assert_eq!(client.read(&file, 4096, 4096).await.unwrap().0, [3; 4096]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_that_wait_together_are_all_answered() {
    const COMMITS: u32 = 200;
    let (disk, gate) = stalling_disk();
    let server = server(disk, None);
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", UNSTABLE).await.unwrap();
    let shut = gate.shut();
    let args = Args::new().opaque(&file).u64(0).u32(0);
    let stream = (0..COMMITS)
        .flat_map(|number| record(&call(number, NFS, proc::COMMIT, &Cred::user(0, 0), &args)));
    client.send(&stream.collect::<Vec<_>>()).await;
    server.wait_until(|counters| counters.calls_in_flight == u64::from(COMMITS)).await;
    // The connection goes on behind them.
    let getattr = record(&call(COMMITS, NFS, proc::GETATTR, &Cred::user(0, 0), &args));
    client.send(&getattr).await;
    assert_eq!(Body::new(client.receive().await).u32(), COMMITS);
    drop(shut);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..COMMITS {
        let mut reply = Body::new(client.receive().await);
        assert!(seen.insert(reply.u32()));
        let header: Vec<u32> = (0..6).map(|_| reply.u32()).collect();
        assert_eq!(header, [1, 0, 0, 0, 0, status::OK]);
    }
}

#[tokio::test]
async fn a_failed_sync_fails_the_call_and_reading_goes_on() {
    let disk = MemoryDisk::new();
    let server = server(Arc::new(disk.clone()), None);
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    let verifier = client.write(&file, 0, b"content", FILE_SYNC).await.unwrap().verifier;
    client.write(&file, 7, b" and more", UNSTABLE).await.unwrap();
    disk.inject(Fault::Sync(0));
    assert_eq!(client.commit(&file).await, Err(status::IO), "not a word of success");
    assert_ne!(server.store.write_verifier(), verifier);
    assert_eq!(client.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err(), status::IO);
    assert_eq!(client.create(&root, b"new").await, Err(status::IO));
    assert!(client.getattr(&file).await.is_ok());
    let (read, _) = client.read(&file, 0, 7).await.unwrap();
    assert_eq!(read, b"content");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_says_so_and_deletes_still_work() {
    let server = server(Arc::new(MemoryDisk::new()), Some(64 << 20));
    let mut client = server.client().await;
    let root = client.root().await;
    let small = client.create(&root, b"small").await.unwrap();
    client.write(&small, 0, b"content", FILE_SYNC).await.unwrap();
    let file = client.create(&root, b"large").await.unwrap();
    // No two blocks are alike, and none compresses.
    let mut state = 1_u64;
    let mut noise = || {
        let mut data = Vec::with_capacity(1 << 20);
        while data.len() < 1 << 20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            data.extend_from_slice(&(state >> 16).to_be_bytes()[2..]);
        }
        data.truncate(1 << 20);
        data
    };
    let mut outcome = Ok(());
    for at in 0..100 {
        outcome = client.write(&file, at << 20, &noise(), FILE_SYNC).await.map(drop);
        if outcome.is_err() {
            break;
        }
    }
    assert_eq!(outcome, Err(status::NOSPC));
    assert_eq!(client.read(&small, 0, 7).await, Ok((b"content".to_vec(), true)));
    client.remove(&root, b"large").await.unwrap();
    assert_eq!(client.getattr(&file).await, Err(status::STALE));
    server.blocking(|store| store.gc().unwrap()).await;
    client.write(&small, 4096, &noise(), FILE_SYNC).await.unwrap();
}

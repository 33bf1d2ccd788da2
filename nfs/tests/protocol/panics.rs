//! A call that panics, by a disk that does: it is answered, and nothing else is touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{Options, Store};

use crate::common::client::{Cred, FILE_SYNC, NFS, call, proc, record};
use crate::common::{Args, Body, Server, root_options, status};
use crate::hooked::{During, HookedDisk};

/// What panics while it is set.
#[derive(Debug, Default)]
struct Bombs {
    reads: AtomicBool,
    writes: AtomicBool,
}

/// A disk whose reads or writes panic while they are told to.
fn panicking_disk() -> (Arc<HookedDisk>, Arc<Bombs>) {
    let bombs = Arc::new(Bombs::default());
    let of_disk = Arc::clone(&bombs);
    let disk = HookedDisk::new(move |during| {
        let panics = match during {
            During::Read => of_disk.reads.load(Ordering::SeqCst),
            During::Write => of_disk.writes.load(Ordering::SeqCst),
            During::Sync => false,
        };
        assert!(!panics, "a {during:?} panics, as the test wants it");
    });
    (disk, bombs)
}

fn store(disk: &Arc<HookedDisk>, kv: Arc<MemoryKv>) -> Arc<Store> {
    let mut options = Options::new("unused");
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.background = false;
    Store::open_with(kv, Arc::<HookedDisk>::clone(disk), options).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_panic_are_answered_and_those_after_them_read() {
    const READS: u32 = 16;
    let ((disk, bombs), kv) = (panicking_disk(), Arc::new(MemoryKv::new()));
    let mut server = Server::over_store(store(&disk, Arc::clone(&kv)), root_options());
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, &[7; 4096], FILE_SYNC).await.unwrap();
    drop(client);
    server.end().await.unwrap();
    server.blocking(|store| store.close().unwrap()).await;
    drop(server);

    // A new store: nothing is in memory.
    let server = Server::over_store(store(&disk, kv), root_options());
    let mut client = server.client().await;
    bombs.reads.store(true, Ordering::SeqCst);
    // Some find others that read the same block.
    let args = Args::new().opaque(&file).u64(0).u32(4096);
    let read = |number| record(&call(number, NFS, proc::READ, &Cred::user(0, 0), &args));
    client.send(&(0..READS).flat_map(read).collect::<Vec<_>>()).await;
    for _ in 0..READS {
        let mut reply = Body::new(client.receive().await);
        let header: Vec<u32> = (0..7).map(|_| reply.u32()).collect();
        assert_eq!(header[1..], [1, 0, 0, 0, 0, status::SERVERFAULT]);
    }
    assert_eq!(server.counters().panics, u64::from(READS));
    assert!(server.client().await.getattr(&root).await.is_ok());
    bombs.reads.store(false, Ordering::SeqCst);
    assert_eq!(client.read(&file, 0, 4096).await, Ok((vec![7; 4096], true)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_panics_fails_its_calls_and_reading_goes_on() {
    let (disk, bombs) = panicking_disk();
    let server = Server::over_store(store(&disk, Arc::default()), root_options());
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    bombs.writes.store(true, Ordering::SeqCst);
    let failed = client.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err();
    assert!([status::SERVERFAULT, status::IO].contains(&failed), "{failed}");
    bombs.writes.store(false, Ordering::SeqCst);
    // What the panic left half done is unknown: nothing is built on it before a restart.
    let mut other = server.client().await;
    assert_eq!(other.create(&root, b"new").await, Err(status::IO));
    assert_eq!(other.write(&file, 0, b"y", FILE_SYNC).await.unwrap_err(), status::IO);
    assert!(other.getattr(&file).await.is_ok());
    assert!(client.lookup(&root, b"file").await.is_ok());
}

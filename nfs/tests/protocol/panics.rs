//! A call that panics, by a disk that does: it is answered, and nothing else is touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slackwater_blockstore::disk::{Disk, DiskFile, DiskSpace, FileName, MemoryDisk};
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{Options, Result, Store};

use crate::common::client::{Cred, FILE_SYNC, NFS, call, proc, record};
use crate::common::{Args, Body, Server, root_options, status};

/// A disk whose reads or writes panic while they are told to.
#[derive(Clone, Debug, Default)]
struct PanickingDisk {
    disk: MemoryDisk,
    bombs: Arc<Bombs>,
}

#[derive(Debug, Default)]
struct Bombs {
    reads: AtomicBool,
    writes: AtomicBool,
}

#[derive(Debug)]
struct PanickingFile {
    file: Arc<dyn DiskFile>,
    bombs: Arc<Bombs>,
}

impl PanickingDisk {
    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(PanickingFile { file, bombs: Arc::clone(&self.bombs) })
    }

    fn store(&self, kv: Arc<MemoryKv>) -> Arc<Store> {
        let mut options = Options::new("unused");
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        options.background = false;
        Store::open_with(kv, Arc::new(self.clone()), options).unwrap()
    }
}

impl Disk for PanickingDisk {
    fn list(&self) -> Result<Vec<FileName>> {
        self.disk.list()
    }

    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        self.disk.create(name).map(|file| self.file(file))
    }

    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        self.disk.open(name).map(|file| self.file(file))
    }

    fn remove(&self, name: FileName) -> Result<()> {
        self.disk.remove(name)
    }

    fn rename(&self, from: FileName, to: FileName) -> Result<()> {
        self.disk.rename(from, to)
    }

    fn sync_names(&self) -> Result<()> {
        self.disk.sync_names()
    }

    fn space(&self) -> Result<DiskSpace> {
        self.disk.space()
    }
}

impl DiskFile for PanickingFile {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        assert!(!self.bombs.reads.load(Ordering::SeqCst), "a read panics, as the test wants it");
        self.file.read_at(offset_bytes, length)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        assert!(!self.bombs.writes.load(Ordering::SeqCst), "a write panics, as the test wants it");
        self.file.write_at(offset_bytes, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.file.sync()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn truncate(&self, length_bytes: u64) -> Result<()> {
        self.file.truncate(length_bytes)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_panic_are_answered_and_those_after_them_read() {
    const READS: u32 = 16;
    let (disk, kv) = (PanickingDisk::default(), Arc::new(MemoryKv::new()));
    let mut server = Server::over_store(disk.store(Arc::clone(&kv)), root_options());
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, &[7; 4096], FILE_SYNC).await.unwrap();
    drop(client);
    server.end().await.unwrap();
    server.blocking(|store| store.close().unwrap()).await;
    drop(server);

    // A new store: nothing is in memory.
    let server = Server::over_store(disk.store(kv), root_options());
    let mut client = server.client().await;
    disk.bombs.reads.store(true, Ordering::SeqCst);
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
    disk.bombs.reads.store(false, Ordering::SeqCst);
    assert_eq!(client.read(&file, 0, 4096).await, Ok((vec![7; 4096], true)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_panics_fails_its_calls_and_reading_goes_on() {
    let disk = PanickingDisk::default();
    let server = Server::over_store(disk.store(Arc::default()), root_options());
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    client.write(&file, 0, b"content", FILE_SYNC).await.unwrap();
    disk.bombs.writes.store(true, Ordering::SeqCst);
    let failed = client.write(&file, 0, b"x", FILE_SYNC).await.unwrap_err();
    assert!([status::SERVERFAULT, status::IO].contains(&failed), "{failed}");
    disk.bombs.writes.store(false, Ordering::SeqCst);
    // What the panic left half done is unknown: nothing is built on it before a restart.
    let mut other = server.client().await;
    assert_eq!(other.create(&root, b"new").await, Err(status::IO));
    assert_eq!(other.write(&file, 0, b"y", FILE_SYNC).await.unwrap_err(), status::IO);
    assert!(other.getattr(&file).await.is_ok());
    assert!(client.lookup(&root, b"file").await.is_ok());
}

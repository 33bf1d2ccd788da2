//! A disk in memory that does something else before each call: it stalls or panics, as its test
//! wants it.

use std::fmt;
use std::sync::Arc;

use slackwater_blockstore::Result;
use slackwater_blockstore::disk::{Disk, DiskFile, DiskSpace, FileName, MemoryDisk};

/// What is about to be done with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum During {
    Read,
    Write,
    Sync,
}

#[derive(Clone)]
struct Hook(Arc<dyn Fn(During) + Send + Sync>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

#[derive(Debug)]
pub struct HookedDisk {
    disk: MemoryDisk,
    hook: Hook,
}

impl HookedDisk {
    pub fn new(hook: impl Fn(During) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { disk: MemoryDisk::default(), hook: Hook(Arc::new(hook)) })
    }

    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(HookedFile { file, hook: self.hook.clone() })
    }
}

impl Disk for HookedDisk {
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

#[derive(Debug)]
struct HookedFile {
    file: Arc<dyn DiskFile>,
    hook: Hook,
}

impl DiskFile for HookedFile {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        (self.hook.0)(During::Read);
        self.file.read_at(offset_bytes, length)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        (self.hook.0)(During::Write);
        self.file.write_at(offset_bytes, bytes)
    }

    fn sync(&self) -> Result<()> {
        (self.hook.0)(During::Sync);
        self.file.sync()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn truncate(&self, length_bytes: u64) -> Result<()> {
        self.file.truncate(length_bytes)
    }
}

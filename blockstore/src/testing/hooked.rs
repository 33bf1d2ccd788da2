//! An index and a disk in memory that do something else in the middle of a call, once.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::core::Core;
use crate::disk::{Disk, DiskFile, DiskSpace, FileName, MemoryDisk};
use crate::error::Result;
use crate::kv::{Batch, Family, Kv, KvRead, MemoryKv, Visit};
use crate::open;
use crate::options::Options;

/// The call in which it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum During {
    /// The `n`-th look at a snapshot's record, behind it.
    LoadSnapshot(u64),
    /// The next opening of a file, before it.
    OpenFile,
    /// The next sync of a file, before it.
    Sync,
    /// The next look into the queue of reclaim, before it.
    ScanQueue,
    /// The next scan of a directory in order of cookies, behind it.
    ScanDirectory,
    /// The next moment that is taken of the index, behind it.
    View,
}

type Work = Box<dyn FnOnce() + Send>;

/// What is to be done, and when.
#[derive(Clone, Default)]
pub(crate) struct Hook(Arc<Mutex<Option<(During, Work)>>>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

impl Hook {
    pub(crate) fn set(&self, during: During, work: impl FnOnce() + Send + 'static) {
        *self.0.lock() = Some((during, Box::new(work)));
    }

    /// It was not done yet.
    pub(crate) fn is_set(&self) -> bool {
        self.0.lock().is_some()
    }

    fn call(&self, is_now: impl Fn(&mut During) -> bool) {
        let work = {
            let mut set = self.0.lock();
            let strikes = set.as_mut().is_some_and(|(during, _)| is_now(during));
            if strikes { set.take() } else { None }
        };
        if let Some((_, work)) = work {
            work();
        }
    }
}

/// An open store over both.
pub(crate) fn open(
    (kv, disk): (Arc<MemoryKv>, MemoryDisk),
    options: Options,
    hook: &Hook,
) -> Arc<Core> {
    let kv = hooked_kv(kv, hook);
    let disk = Arc::new(HookedDisk { disk, hook: hook.clone() });
    let core = open::open_core(kv, disk, options, open::Opening::Serve).unwrap();
    open::initialize(&core).unwrap();
    Arc::new(core)
}

/// An index alone.
pub(crate) fn hooked_kv(kv: Arc<MemoryKv>, hook: &Hook) -> Arc<dyn Kv> {
    Arc::new(HookedKv { kv, hook: hook.clone() })
}

#[derive(Debug)]
struct HookedKv {
    kv: Arc<MemoryKv>,
    hook: Hook,
}

impl KvRead for HookedKv {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let found = self.kv.get(family, key);
        if family == Family::Snapshot && key.first() == Some(&b'i') {
            self.hook.call(|during| match during {
                During::LoadSnapshot(0) => true,
                During::LoadSnapshot(left) => {
                    *left -= 1;
                    false
                }
                _ => false,
            });
        }
        found
    }

    fn last_at_or_before(
        &self,
        family: Family,
        bounds: (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        self.kv.last_at_or_before(family, bounds, is_wanted)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        if family == Family::Queue {
            self.hook.call(|during| *during == During::ScanQueue);
        }
        self.kv.scan(family, from, to, visit)?;
        if family == Family::Cookie {
            self.hook.call(|during| *during == During::ScanDirectory);
        }
        Ok(())
    }
}

impl Kv for HookedKv {
    fn apply(&self, batch: &Batch) -> Result<()> {
        self.kv.apply(batch)
    }

    fn flush(&self) -> Result<()> {
        self.kv.flush()
    }

    fn compact(&self) -> Result<()> {
        self.kv.compact()
    }

    fn view(&self) -> Box<dyn KvRead + '_> {
        let view = self.kv.view();
        self.hook.call(|during| *during == During::View);
        view
    }

    fn disk_bytes(&self) -> u64 {
        self.kv.disk_bytes()
    }

    fn memory_bytes(&self) -> u64 {
        self.kv.memory_bytes()
    }
}

#[derive(Debug)]
struct HookedDisk {
    disk: MemoryDisk,
    hook: Hook,
}

impl HookedDisk {
    fn hooked(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(HookedFile { file, hook: self.hook.clone() })
    }
}

impl Disk for HookedDisk {
    fn list(&self) -> Result<Vec<FileName>> {
        self.disk.list()
    }

    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        self.disk.create(name).map(|file| self.hooked(file))
    }

    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        self.hook.call(|during| *during == During::OpenFile);
        self.disk.open(name).map(|file| self.hooked(file))
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
        self.file.read_at(offset_bytes, length)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_at(offset_bytes, bytes)
    }

    fn write_sectors_at(&self, offset_bytes: u64, sectors: &[u8]) -> Result<()> {
        self.file.write_sectors_at(offset_bytes, sectors)
    }

    fn sync(&self) -> Result<()> {
        self.hook.call(|during| *during == During::Sync);
        self.file.sync()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn truncate(&self, length_bytes: u64) -> Result<()> {
        self.file.truncate(length_bytes)
    }
}

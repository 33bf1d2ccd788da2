//! Segment files in memory, for tests: a crash forgets or tears what was not synced, and any
//! call can be made to fail.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Disk, DiskFile, DiskSpace, FileName, SECTOR_BYTES, SECTOR_BYTES_U64};
use crate::error::{Error, Result};

/// The unit that a medium writes whole: a write is torn between two of these, never inside.
/// The smallest there is, which is less than [`SECTOR_BYTES`]: what of a write that the store
/// takes for one sector reaches the medium may be any of the eight in it.
const TORN_BYTES: usize = 512;

/// A failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The `n`-th write from now fails with EIO after half of its bytes.
    ShortWrite(u64),
    /// The `n`-th write from now fails with ENOSPC.
    NoSpace(u64),
    /// The `n`-th sync from now fails with EIO.
    Sync(u64),
    /// The `n`-th sync of names from now fails with EIO.
    SyncNames(u64),
    /// The `n`-th call of any kind that changes something, and all after it, fail: the power
    /// is gone.
    PowerCut(u64),
    /// The `n`-th call of any kind that changes something fails with EIO; of a write half of the
    /// bytes are there.
    Change(u64),
    /// From the `n`-th call of any kind that changes something on, somebody else has taken all
    /// room: nothing grows until [`MemoryDisk::set_capacity`].
    Full(u64),
    /// The `n`-th read from now fails with EIO.
    Read(u64),
}

/// What was done to a file and not synced.
#[derive(Debug)]
enum Pending {
    /// These bytes were written at this offset.
    Write(usize, Vec<u8>),
    /// It was cut to this length.
    Cut(usize),
}

#[derive(Debug, Default)]
struct FileState {
    synced: Vec<u8>,
    live: Vec<u8>,
    /// Since the last sync, in order.
    pending: Vec<Pending>,
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<FileName, Arc<Mutex<FileState>>>,
    /// Those removed since names were synced: a crash may bring them back.
    removed: BTreeMap<FileName, Arc<Mutex<FileState>>>,
    /// New names to old ones, of renames since names were synced: a crash may undo them.
    renamed: BTreeMap<FileName, FileName>,
    /// The names as they were synced.
    durable_names: BTreeSet<FileName>,
    fault: Option<Fault>,
    changes: u64,
    syncs: u64,
    capacity_bytes: Option<u64>,
    read_time: Duration,
    reserved_bytes: u64,
    reserved_for_start_bytes: u64,
}

/// A medium in memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryDisk {
    state: Arc<Mutex<State>>,
}

impl MemoryDisk {
    /// An empty medium.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Injects one failure.
    pub fn inject(&self, fault: Fault) {
        self.state.lock().fault = Some(fault);
    }

    /// Takes back a failure that has not struck yet, and answers whether there was one.
    pub fn disarm(&self) -> bool {
        self.state.lock().fault.take().is_some()
    }

    /// Each read takes so long from now on.
    pub fn slow_down_reads(&self, read_time: Duration) {
        self.state.lock().read_time = read_time;
    }

    /// Writes beyond this many bytes in all files fail with ENOSPC. Nothing is reserved then.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        let mut state = self.state.lock();
        state.capacity_bytes = Some(capacity_bytes);
        state.reserved_bytes = 0;
        state.reserved_for_start_bytes = 0;
    }

    /// Calls that changed something so far.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.state.lock().changes
    }

    /// Syncs so far.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.state.lock().syncs
    }

    /// Bytes in all files.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        used_bytes(&self.state.lock())
    }

    /// What a restart after a power cut finds: of the writes that were not synced each sector,
    /// and each creation and each removal of a name, may or may not have reached the medium, as
    /// `keep` decides.
    #[must_use]
    pub fn crash(&self, mut keep: impl FnMut() -> bool) -> Self {
        let state = self.state.lock();
        let mut names = BTreeMap::new();
        for (name, file) in state.files.iter().chain(&state.removed) {
            let old = state.renamed.get(name).copied();
            let made = state.durable_names.contains(&old.unwrap_or(*name)) || keep();
            let removed = state.removed.contains_key(name) && keep();
            let name = old.as_ref().filter(|_| !removed && !keep()).unwrap_or(name);
            if made && !removed {
                names.insert(*name, Arc::clone(file));
            }
        }
        let mut files = BTreeMap::new();
        for (name, file) in &names {
            let file = file.lock();
            let mut bytes = file.synced.clone();
            for pending in &file.pending {
                pending.survive(&mut bytes, &mut keep);
            }
            let after = FileState { synced: bytes.clone(), live: bytes, pending: Vec::new() };
            files.insert(*name, Arc::new(Mutex::new(after)));
        }
        let durable_names = files.keys().copied().collect();
        let state = State {
            files,
            durable_names,
            capacity_bytes: state.capacity_bytes,
            reserved_bytes: state.reserved_bytes,
            reserved_for_start_bytes: state.reserved_for_start_bytes,
            ..State::default()
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Flips one bit of a file, for tests of detection.
    pub fn flip_bit(&self, name: FileName, offset_bytes: usize) {
        if let Some(file) = self.state.lock().files.get(&name) {
            let mut file = file.lock();
            if let Some(byte) = file.live.get_mut(offset_bytes) {
                *byte ^= 1;
            }
        }
    }
}

impl Pending {
    /// What of it has reached the medium, as `keep` decides: each sector of a write, all of a cut.
    fn survive(&self, bytes: &mut Vec<u8>, keep: &mut impl FnMut() -> bool) {
        match self {
            Self::Write(offset, written) => {
                for (position, sector) in written.chunks(TORN_BYTES).enumerate() {
                    if keep() {
                        overwrite(bytes, offset + position * TORN_BYTES, sector);
                    }
                }
            }
            Self::Cut(length) => {
                if keep() {
                    bytes.truncate(*length);
                }
            }
        }
    }
}

fn used_bytes(state: &State) -> u64 {
    let bytes: usize = state.files.values().map(|file| file.lock().live.len()).sum();
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// With what is reserved.
fn taken_bytes(state: &State) -> u64 {
    used_bytes(state) + state.reserved_bytes + state.reserved_for_start_bytes
}

fn overwrite(bytes: &mut Vec<u8>, offset: usize, written: &[u8]) {
    let end = offset + written.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(written);
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())
}

fn enospc() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error())
}

impl State {
    /// Answers the bytes if there is room for them beside all others.
    fn take_within_capacity(&self, others: u64, bytes: u64) -> Result<u64> {
        if self.capacity_bytes.is_some_and(|capacity| others + bytes > capacity) {
            return Err(Error::io("reserve", "the medium", enospc()));
        }
        Ok(bytes)
    }

    /// Counts one changing call; an error when the power is gone.
    fn change(&mut self) -> io::Result<()> {
        self.changes += 1;
        match &mut self.fault {
            Some(Fault::PowerCut(0)) => Err(eio()),
            Some(Fault::Change(0)) => {
                self.fault = None;
                Err(eio())
            }
            Some(Fault::Full(0)) => {
                self.fault = None;
                self.capacity_bytes = Some(taken_bytes(self));
                Ok(())
            }
            Some(Fault::PowerCut(left) | Fault::Change(left) | Fault::Full(left)) => {
                *left -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether the armed fault of this kind strikes now.
    fn strikes(&mut self, counter: impl Fn(&mut Fault) -> Option<&mut u64>) -> bool {
        let Some(left) = self.fault.as_mut().and_then(counter) else {
            return false;
        };
        if *left == 0 {
            self.fault = None;
            return true;
        }
        *left -= 1;
        false
    }
}

impl Disk for MemoryDisk {
    fn list(&self) -> Result<Vec<FileName>> {
        Ok(self.state.lock().files.keys().copied().collect())
    }

    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        let mut state = self.state.lock();
        state.change().map_err(|source| Error::io("create", name.to_string(), source))?;
        if state.files.contains_key(&name) {
            let source = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(Error::io("create", name.to_string(), source));
        }
        let file = Arc::new(Mutex::new(FileState::default()));
        state.removed.remove(&name);
        state.files.insert(name, Arc::clone(&file));
        Ok(Arc::new(MemoryFile { name, file, disk: self.clone() }))
    }

    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        match self.state.lock().files.get(&name) {
            Some(file) => {
                Ok(Arc::new(MemoryFile { name, file: Arc::clone(file), disk: self.clone() }))
            }
            None => {
                let source = io::Error::from(io::ErrorKind::NotFound);
                Err(Error::io("open", name.to_string(), source))
            }
        }
    }

    fn remove(&self, name: FileName) -> Result<()> {
        let mut state = self.state.lock();
        state.change().map_err(|source| Error::io("remove", name.to_string(), source))?;
        if let Some(file) = state.files.remove(&name) {
            state.removed.insert(name, file);
        }
        Ok(())
    }

    fn rename(&self, from: FileName, to: FileName) -> Result<()> {
        let mut state = self.state.lock();
        let fail = |source| Error::io("rename", from.to_string(), source);
        state.change().map_err(fail)?;
        let Some(file) = state.files.remove(&from) else {
            return Err(fail(io::Error::from(io::ErrorKind::NotFound)));
        };
        let first = state.renamed.remove(&from).unwrap_or(from);
        state.renamed.insert(to, first);
        state.files.insert(to, file);
        Ok(())
    }

    fn sync_names(&self) -> Result<()> {
        let mut state = self.state.lock();
        let fail = |source| Error::io("sync", "folders", source);
        state.change().map_err(fail)?;
        if state.strikes(|fault| match fault {
            Fault::SyncNames(left) => Some(left),
            _ => None,
        }) {
            return Err(fail(eio()));
        }
        state.durable_names = state.files.keys().copied().collect();
        state.removed.clear();
        state.renamed.clear();
        Ok(())
    }

    fn space(&self) -> Result<DiskSpace> {
        let state = self.state.lock();
        let total_bytes = state.capacity_bytes.unwrap_or(1 << 40);
        let available_bytes = total_bytes.saturating_sub(taken_bytes(&state));
        Ok(DiskSpace { total_bytes, available_bytes })
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        let mut state = self.state.lock();
        let others = taken_bytes(&state) - state.reserved_bytes;
        state.reserved_bytes = state.take_within_capacity(others, bytes)?;
        Ok(())
    }

    fn reserved_bytes(&self) -> u64 {
        self.state.lock().reserved_bytes
    }

    fn reserve_for_start(&self, bytes: u64) -> Result<()> {
        let mut state = self.state.lock();
        let others = taken_bytes(&state) - state.reserved_for_start_bytes;
        state.reserved_for_start_bytes = state.take_within_capacity(others, bytes)?;
        Ok(())
    }

    fn reserved_for_start_bytes(&self) -> u64 {
        self.state.lock().reserved_for_start_bytes
    }
}

#[derive(Debug)]
struct MemoryFile {
    name: FileName,
    file: Arc<Mutex<FileState>>,
    disk: MemoryDisk,
}

impl MemoryFile {
    fn fail(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        let name = self.name.to_string();
        move |source| Error::io(action, name, source)
    }

    /// The bytes to write in truth, and the error to answer after it.
    fn plan(&self, offset: u64, bytes: &[u8]) -> (usize, Option<io::Error>) {
        let mut state = self.disk.state.lock();
        if let Err(error) = state.change() {
            return (bytes.len() / 2, Some(error));
        }
        if state.strikes(|fault| match fault {
            Fault::ShortWrite(left) => Some(left),
            _ => None,
        }) {
            return (bytes.len() / 2, Some(eio()));
        }
        if state.strikes(|fault| match fault {
            Fault::NoSpace(left) => Some(left),
            _ => None,
        }) {
            return (0, Some(enospc()));
        }
        let length = u64::try_from(self.file.lock().live.len()).unwrap_or(u64::MAX);
        let end = offset + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let growth = end.saturating_sub(length);
        match state.capacity_bytes {
            Some(capacity) if taken_bytes(&state) + growth > capacity => (0, Some(enospc())),
            _ => (bytes.len(), None),
        }
    }
}

impl DiskFile for MemoryFile {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        if self.disk.state.lock().strikes(|fault| match fault {
            Fault::Read(left) => Some(left),
            _ => None,
        }) {
            return Err(self.fail("read")(eio()));
        }
        let read_time = self.disk.state.lock().read_time;
        if read_time > Duration::ZERO {
            std::thread::sleep(read_time);
        }
        let file = self.file.lock();
        let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
        file.live
            .get(start..start.saturating_add(length))
            .map(<[u8]>::to_vec)
            .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
            .map_err(self.fail("read"))
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let (count, error) = self.plan(offset_bytes, bytes);
        let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
        let written = &bytes[..count];
        let mut file = self.file.lock();
        overwrite(&mut file.live, start, written);
        file.pending.push(Pending::Write(start, written.to_vec()));
        match error {
            Some(error) => Err(self.fail("write")(error)),
            None => Ok(()),
        }
    }

    fn write_sectors_at(&self, offset_bytes: u64, sectors: &[u8]) -> Result<()> {
        // What a disk would refuse, or write through the page cache, must not pass here.
        assert_eq!(offset_bytes % SECTOR_BYTES_U64, 0, "offset of sectors");
        assert_eq!(sectors.len() % SECTOR_BYTES, 0, "length of sectors");
        assert_eq!(sectors.as_ptr().addr() % SECTOR_BYTES, 0, "address of sectors");
        self.write_at(offset_bytes, sectors)
    }

    fn sync(&self) -> Result<()> {
        {
            let mut state = self.disk.state.lock();
            state.syncs += 1;
            state.change().map_err(self.fail("sync"))?;
            if state.strikes(|fault| match fault {
                Fault::Sync(left) => Some(left),
                _ => None,
            }) {
                return Err(self.fail("sync")(eio()));
            }
        }
        let mut file = self.file.lock();
        file.synced = file.live.clone();
        file.pending.clear();
        Ok(())
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(u64::try_from(self.file.lock().live.len()).unwrap_or(u64::MAX))
    }

    fn truncate(&self, length_bytes: u64) -> Result<()> {
        self.disk.state.lock().change().map_err(self.fail("truncate"))?;
        let length = usize::try_from(length_bytes).unwrap_or(usize::MAX);
        let mut file = self.file.lock();
        file.live.truncate(length);
        file.pending.push(Pending::Cut(length));
        Ok(())
    }
}

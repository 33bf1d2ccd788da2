//! Segment files in a directory of the local file system.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags};

use super::{Disk, DiskFile, DiskSpace, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::{ChunkId, SegmentId};

/// Reads of at least this are taken for a part of a stream.
const READAHEAD_MIN_BYTES: usize = 256 << 10;

/// Bytes behind such a read that are fetched along: the next few reads of a stream.
const READAHEAD_BYTES: u64 = 4 << 20;

/// The files whose blocks are the reserve, and the reserve for the next start. They are never read,
/// and may be deleted at any time.
const RESERVE_FILE: &str = "reserve";
const START_RESERVE_FILE: &str = "reserve-start";

/// The unit in which the system counts a file's blocks (`st_blocks`).
const STAT_BLOCK_BYTES: u64 = 512;

/// Segment files in the folders `log` and `compacted` of one directory, copies of the index in
/// `copies`.
#[derive(Debug)]
pub struct LocalDisk {
    directory: PathBuf,
    /// The folders, held open: their names can be synced when no descriptor is left.
    folders: [(PathBuf, File); 3],
    /// The file system takes no direct writes: they go through the page cache.
    refuses_direct: Arc<AtomicBool>,
    reserve: ReserveFile,
    start_reserve: ReserveFile,
}

/// A file that holds blocks, and nothing in them.
#[derive(Debug)]
struct ReserveFile {
    path: PathBuf,
    /// What it holds; locked while it is changed.
    held_bytes: Mutex<u64>,
}

impl ReserveFile {
    fn find(path: PathBuf) -> Self {
        // Blocks, not bytes: a crash may have left a file that is long and empty.
        let found = std::fs::metadata(&path).map_or(0, |found| found.blocks() * STAT_BLOCK_BYTES);
        Self { path, held_bytes: Mutex::new(found) }
    }

    fn hold(&self, bytes: u64) -> Result<()> {
        let mut held = self.held_bytes.lock();
        self.set_blocks(*held, bytes)
            .map_err(|source| Error::io("reserve", self.path.display().to_string(), source))?;
        *held = bytes;
        Ok(())
    }

    /// Makes the file this long, with all its blocks or without any change.
    fn set_blocks(&self, held: u64, bytes: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(&self.path)?;
        file.set_len(bytes.min(held))?;
        if let Some(missing) = bytes.checked_sub(held).filter(|missing| *missing > 0) {
            let outcome = rustix::fs::fallocate(&file, FallocateFlags::empty(), held, missing);
            if let Err(error) = outcome {
                file.set_len(held)?;
                return Err(error.into());
            }
        }
        // Blocks that are given back can be written to once the file system has noted that.
        file.sync_all()
    }

    fn held_bytes(&self) -> u64 {
        *self.held_bytes.lock()
    }
}

impl LocalDisk {
    /// The disk in `directory`, whose folders are made if missing.
    ///
    /// # Errors
    /// `Io`.
    pub fn open(directory: &Path) -> Result<Self> {
        let folders = [
            make_folder(directory, "log")?,
            make_folder(directory, "compacted")?,
            make_folder(directory, "copies")?,
        ];
        File::open(directory)
            .and_then(|opened| opened.sync_all())
            .map_err(|source| Error::io("sync", directory.display().to_string(), source))?;
        let refuses_direct = Arc::new(AtomicBool::new(false));
        let reserve = ReserveFile::find(directory.join(RESERVE_FILE));
        let start_reserve = ReserveFile::find(directory.join(START_RESERVE_FILE));
        let directory = directory.to_path_buf();
        Ok(Self { directory, folders, refuses_direct, reserve, start_reserve })
    }

    fn path(&self, name: FileName) -> PathBuf {
        self.directory.join(name.to_string())
    }

    fn wrap(
        &self,
        path: PathBuf,
        file: io::Result<File>,
        action: &'static str,
    ) -> Result<Arc<dyn DiskFile>> {
        match file {
            Ok(file) => Ok(Arc::new(LocalFile {
                path,
                file,
                direct: OnceLock::new(),
                refuses_direct: Arc::clone(&self.refuses_direct),
            })),
            Err(source) => Err(Error::io(action, path.display().to_string(), source)),
        }
    }

    /// The files of these roles, which share a folder.
    fn list_folder(&self, roles: &[FileRole]) -> Result<Vec<FileName>> {
        let Some((folder, _)) = roles.first().map(|role| role.place()) else {
            return Ok(Vec::new());
        };
        let path = self.directory.join(folder);
        let fail = |source| Error::io("list", path.display().to_string(), source);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let file_name = entry.file_name();
            let name = file_name.to_str().and_then(|text| {
                roles.iter().find_map(|&role| {
                    let number = SegmentId::new(number_of(text, role.place().1)?);
                    Some(FileName { role, number })
                })
            });
            match name {
                Some(name) => names.push(name),
                None => {
                    tracing::warn!(file = ?entry.path(), "a file that is not ours; left alone")
                }
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// The number in a name of ours; `None` for any other name, be it nearly one.
fn number_of(file_name: &str, suffix: &str) -> Option<u64> {
    let number = u64::from_str_radix(file_name.strip_suffix(suffix)?, 16).ok()?;
    // Chunk ids have room for no other.
    let is_possible = (1..1 << (u64::BITS - ChunkId::INDEX_BITS)).contains(&number);
    (is_possible && format!("{number:016x}{suffix}") == file_name).then_some(number)
}

/// A folder, made if missing.
fn make_folder(directory: &Path, folder: &str) -> Result<(PathBuf, File)> {
    let path = directory.join(folder);
    match std::fs::create_dir_all(&path).and_then(|()| File::open(&path)) {
        Ok(opened) => Ok((path, opened)),
        Err(source) => Err(Error::io("create", path.display().to_string(), source)),
    }
}

impl Disk for LocalDisk {
    fn list(&self) -> Result<Vec<FileName>> {
        let mut names = self.list_folder(&[FileRole::Log])?;
        names.extend(self.list_folder(&[FileRole::Compacted])?);
        names.extend(self.list_folder(&[FileRole::IndexCopy, FileRole::IndexDraft])?);
        Ok(names)
    }

    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        self.wrap(path, file, "create")
    }

    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        self.wrap(path, file, "open")
    }

    fn remove(&self, name: FileName) -> Result<()> {
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(Error::io("remove", path.display().to_string(), source))
            }
            _ => Ok(()),
        }
    }

    fn rename(&self, from: FileName, to: FileName) -> Result<()> {
        let path = self.path(from);
        std::fs::rename(&path, self.path(to))
            .map_err(|source| Error::io("rename", path.display().to_string(), source))
    }

    fn sync_names(&self) -> Result<()> {
        for (path, folder) in &self.folders {
            // IMPORTANT: without this a new file can vanish with its synced bytes at a power cut.
            folder
                .sync_all()
                .map_err(|source| Error::io("sync", path.display().to_string(), source))?;
        }
        Ok(())
    }

    fn space(&self) -> Result<DiskSpace> {
        let stat = rustix::fs::statvfs(&self.directory).map_err(|error| {
            Error::io("statvfs", self.directory.display().to_string(), io::Error::from(error))
        })?;
        Ok(DiskSpace {
            total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
            available_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        self.reserve.hold(bytes)
    }

    fn reserved_bytes(&self) -> u64 {
        self.reserve.held_bytes()
    }

    fn reserve_for_start(&self, bytes: u64) -> Result<()> {
        self.start_reserve.hold(bytes)
    }

    fn reserved_for_start_bytes(&self) -> u64 {
        self.start_reserve.held_bytes()
    }
}

#[derive(Debug)]
struct LocalFile {
    path: PathBuf,
    /// For all but direct writes: blocks that are read stay in the page cache.
    file: File,
    /// The same file past the page cache, from the first direct write on. The kernel drops what
    /// the page cache has of the bytes that are written here.
    direct: OnceLock<File>,
    refuses_direct: Arc<AtomicBool>,
}

impl LocalFile {
    /// Writes past the page cache; `EINVAL` when the file system does not do that.
    fn write_direct(&self, offset_bytes: u64, sectors: &[u8]) -> io::Result<()> {
        let direct = match self.direct.get() {
            Some(direct) => direct,
            None => {
                let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC;
                let direct = File::from(rustix::fs::open(&self.path, flags, Mode::empty())?);
                self.direct.get_or_init(|| direct)
            }
        };
        direct.write_all_at(sectors, offset_bytes)
    }

    /// Has the kernel fetch the range and what comes behind it, unless the end of the range is in
    /// the page cache: many threads read one file, whose own guess at the order is wrong then.
    fn fetch_ahead(&self, offset_bytes: u64, length: usize) {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        let mut last = [0];
        let mut parts = [io::IoSliceMut::new(&mut last)];
        let (end, flags) = (offset_bytes.saturating_add(length), ReadWriteFlags::NOWAIT);
        // Where the file system does not know the flag, the kernel is asked each time.
        let is_cached = rustix::io::preadv2(&self.file, &mut parts, end.saturating_sub(1), flags)
            .is_ok_and(|read| read == 1);
        if !is_cached {
            let count = NonZeroU64::new(length.saturating_add(READAHEAD_BYTES));
            // Only a hint.
            let _ = fadvise(&self.file, offset_bytes, count, Advice::WillNeed);
        }
    }

    fn fail(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::io(action, self.path.display().to_string(), source)
    }
}

impl DiskFile for LocalFile {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        self.read_into(offset_bytes, length, Vec::new())
    }

    fn read_into(&self, offset_bytes: u64, length: usize, memory: Vec<u8>) -> Result<Vec<u8>> {
        if length >= READAHEAD_MIN_BYTES {
            self.fetch_ahead(offset_bytes, length);
        }
        let mut bytes = memory;
        bytes.clear();
        bytes.reserve_exact(length);
        if bytes.capacity() > length {
            // Memory of a larger read: only as much as is wanted is read, into zeros.
            bytes.resize(length, 0);
            self.file.read_exact_at(&mut bytes, offset_bytes).map_err(self.fail("read"))?;
            return Ok(bytes);
        }
        // Memory is filled by the read alone.
        while bytes.len() < length {
            let position = offset_bytes + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            match rustix::io::pread(&self.file, spare_capacity(&mut bytes), position) {
                Ok(0) => return Err(self.fail("read")(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(self.fail("read")(error.into())),
            }
        }
        Ok(bytes)
    }

    fn try_read_at(&self, offset_bytes: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut parts = [io::IoSliceMut::new(&mut bytes)];
        let flags = ReadWriteFlags::NOWAIT;
        let read = rustix::io::preadv2(&self.file, &mut parts, offset_bytes, flags).ok()?;
        (read == length).then_some(bytes)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset_bytes).map_err(self.fail("write"))
    }

    fn write_sectors_at(&self, offset_bytes: u64, sectors: &[u8]) -> Result<()> {
        if self.refuses_direct.load(Ordering::Relaxed) {
            return self.write_at(offset_bytes, sectors);
        }
        match self.write_direct(offset_bytes, sectors) {
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                if !self.refuses_direct.swap(true, Ordering::Relaxed) {
                    let directory = self.path.parent().unwrap_or(&self.path).display();
                    tracing::info!(%directory, "no direct writes here: the log is buffered");
                }
                self.write_at(offset_bytes, sectors)
            }
            outcome => outcome.map_err(self.fail("write")),
        }
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(self.fail("sync"))
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.metadata().map(|metadata| metadata.len()).map_err(self.fail("stat"))
    }

    fn truncate(&self, length_bytes: u64) -> Result<()> {
        self.file.set_len(length_bytes).map_err(self.fail("truncate"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SECTOR_BYTES;

    const NAME: FileName = FileName { role: FileRole::Log, number: SegmentId::new(1) };

    /// Three sectors that begin `shift` bytes behind a multiple of the sector size in memory.
    fn sectors(memory: &mut Vec<u8>, shift: usize) -> &[u8] {
        memory.resize(4 * SECTOR_BYTES + shift, 0);
        let address = memory.as_ptr().addr();
        let start = address.next_multiple_of(SECTOR_BYTES) - address + shift;
        let sectors = &mut memory[start..start + 3 * SECTOR_BYTES];
        for (position, byte) in sectors.iter_mut().enumerate() {
            *byte = u8::try_from(position % 251).unwrap();
        }
        sectors
    }

    #[test]
    fn files_that_only_look_like_segments_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        disk.create(NAME).unwrap();
        let others = [
            "2.seg",
            "+000000000000002.seg",
            "000000000000000A.seg",
            "0000000000000000.seg",
            "ffffffffffffffff.seg",
            "0000010000000000.seg",
            "0000000000000002.seg~",
        ];
        for other in others {
            std::fs::write(directory.path().join("log").join(other), b"x").unwrap();
        }
        assert_eq!(disk.list().unwrap(), [NAME]);
    }

    #[test]
    fn reads_see_direct_writes_even_of_pages_that_were_cached() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let file = disk.create(NAME).unwrap();
        let reader = disk.open(NAME).unwrap();
        file.write_at(0, b"header").unwrap();
        let mut memory = Vec::new();
        let sectors = sectors(&mut memory, 0);
        for offset in [0, 1, 0, 3] {
            let offset_bytes = offset * u64::try_from(SECTOR_BYTES).unwrap();
            file.write_sectors_at(offset_bytes, sectors).unwrap();
            file.sync().unwrap();
            assert!(reader.read_at(offset_bytes, sectors.len()).unwrap() == sectors);
        }
        // Cut inside a sector, which is then written again.
        file.truncate(5000).unwrap();
        file.write_sectors_at(4096, &sectors[..SECTOR_BYTES]).unwrap();
        assert_eq!(file.length_bytes().unwrap(), 8192);
        assert!(reader.read_at(4096, SECTOR_BYTES).unwrap() == sectors[..SECTOR_BYTES]);
    }

    #[test]
    fn a_read_into_memory_of_a_larger_one_reads_no_more_than_is_wanted() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let file = disk.create(NAME).unwrap();
        let content: Vec<u8> = (0..1 << 21).map(|at: u32| at.to_le_bytes()[1]).collect();
        file.write_at(0, &content).unwrap();
        // What this thread read so far, by all calls.
        let read_bytes = || -> usize {
            let told = std::fs::read_to_string("/proc/thread-self/io").unwrap();
            let line = told.lines().find_map(|line| line.strip_prefix("rchar: "));
            line.unwrap().parse().unwrap()
        };
        let before = read_bytes();
        let bytes = file.read_into(8192, 128 << 10, Vec::with_capacity(1 << 21)).unwrap();
        let read = read_bytes() - before;
        assert!(bytes == content[8192..8192 + (128 << 10)]);
        assert!(read < 256 << 10, "{read} bytes");
        let error = file.read_into((1 << 21) - 5, 6, Vec::with_capacity(100)).unwrap_err();
        assert!(error.to_string().contains("read"), "{error}");
    }

    #[test]
    fn what_is_read_without_waiting_is_what_is_there() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let file = disk.create(NAME).unwrap();
        file.write_at(0, b"0123456789").unwrap();
        // The bytes are in the page cache: but for file systems that never say so.
        let found = file.try_read_at(2, 5);
        assert!(found.is_none_or(|bytes| bytes == b"23456"));
        assert_eq!(file.try_read_at(8, 5), None, "behind the end");
        assert_eq!(file.try_read_at(10, 1), None);
    }

    #[test]
    fn what_the_file_system_refuses_to_write_directly_is_written_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let disk = LocalDisk::open(directory.path()).unwrap();
        let file = disk.create(NAME).unwrap();
        let mut memory = Vec::new();
        // At an odd address: direct writes are refused with EINVAL, as by a file system that
        // has none. (One that takes any address, as tmpfs does, refuses nothing.)
        let odd = sectors(&mut memory, 1);
        file.write_sectors_at(0, odd).unwrap();
        file.sync().unwrap();
        assert!(file.read_at(0, odd.len()).unwrap() == odd);
        // From then on all files of the disk are written through the page cache.
        disk.refuses_direct.store(true, Ordering::Relaxed);
        let other = disk.create(FileName { number: SegmentId::new(2), ..NAME }).unwrap();
        other.write_sectors_at(0, odd).unwrap();
        assert!(other.read_at(0, odd.len()).unwrap() == odd);
    }
}

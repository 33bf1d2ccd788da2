//! The seam below the segments: files that are appended to, synced, read and removed.
//!
//! Two forms: [`LocalDisk`] for use, [`MemoryDisk`] for tests (it forgets or tears at a crash
//! what was not synced, and fails on demand). Small enough to get an object-store form later:
//! a file is written once, from front to back (but for the sector at the open end of a log, which
//! is written again with more in it), and never changed after it is sealed.

mod local;
mod memory;

use std::fmt;
use std::sync::Arc;

pub use local::LocalDisk;
pub use memory::{Fault, MemoryDisk};

use crate::error::Result;
use crate::id::SegmentId;

/// The unit of [`DiskFile::write_sectors_at`]: a multiple of what direct writes to any usual
/// device ask for, of offset, length and address.
pub const SECTOR_BYTES: usize = 4096;
pub(crate) const SECTOR_BYTES_U64: u64 = 4096;

/// What a file of the store holds. Log, compacted segments and copies of the index have a folder
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileRole {
    /// The log: chunks and commit records as they came.
    Log,
    /// Chunks that compaction moved here.
    Compacted,
    /// A copy of the index, whole.
    IndexCopy,
    /// A copy of the index that is being written.
    IndexDraft,
}

impl FileRole {
    /// The folder of its files, and how their names end.
    const fn place(self) -> (&'static str, &'static str) {
        match self {
            Self::Log => ("log", ".seg"),
            Self::Compacted => ("compacted", ".seg"),
            Self::IndexCopy => ("copies", ".idx"),
            Self::IndexDraft => ("copies", ".new"),
        }
    }

    /// The number in file headers and segment records: never change one.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Log => 1,
            Self::Compacted => 2,
            Self::IndexCopy | Self::IndexDraft => 3,
        }
    }
}

/// The name of a file of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName {
    /// What it holds.
    pub role: FileRole,
    /// Its number, from one count for all roles.
    pub number: SegmentId,
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (folder, ending) = self.role.place();
        write!(f, "{folder}/{:016x}{ending}", self.number.get())
    }
}

/// Room on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    /// All of it.
    pub total_bytes: u64,
    /// What can still be written.
    pub available_bytes: u64,
}

/// A medium that holds segment files.
pub trait Disk: Send + Sync + fmt::Debug {
    /// All files, in order of role and number.
    ///
    /// # Errors
    /// `Io`.
    fn list(&self) -> Result<Vec<FileName>>;

    /// Makes an empty file. Its name is durable after [`Disk::sync_names`].
    ///
    /// # Errors
    /// `Io`; also when the file exists.
    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Opens a file.
    ///
    /// # Errors
    /// `Io`; also when there is none.
    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>>;

    /// Removes a file, if it is there. Those who hold it open can go on reading it.
    ///
    /// # Errors
    /// `Io`.
    fn remove(&self, name: FileName) -> Result<()>;

    /// Gives a file another name, at one moment: whatever a crash leaves, the file has the one or
    /// the other. Durable after [`Disk::sync_names`]. Both names are in one folder, and nothing has
    /// the new one.
    ///
    /// # Errors
    /// `Io`; also when there is no such file.
    fn rename(&self, from: FileName, to: FileName) -> Result<()>;

    /// Makes creations, removals and renames durable.
    ///
    /// # Errors
    /// `Io`.
    fn sync_names(&self) -> Result<()>;

    /// Room on the medium; what is reserved is not part of what is available.
    ///
    /// # Errors
    /// `Io`.
    fn space(&self) -> Result<DiskSpace>;

    /// Makes the reserve this large: room that nobody can take until it is given back, by a
    /// smaller one. A medium that knows no such thing reserves nothing.
    ///
    /// # Errors
    /// `Io`, when there is not so much room; the reserve stays as it was.
    fn reserve(&self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// What is reserved.
    fn reserved_bytes(&self) -> u64 {
        0
    }

    /// As [`Disk::reserve`], for room that is kept for the next start; the two do not touch.
    ///
    /// # Errors
    /// As [`Disk::reserve`].
    fn reserve_for_start(&self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// What is reserved for the next start.
    fn reserved_for_start_bytes(&self) -> u64 {
        0
    }
}

/// One segment file.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// Reads exactly `length` bytes at `offset_bytes`.
    ///
    /// # Errors
    /// `Io`; an end of the file before that is `UnexpectedEof`.
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>>;

    /// Like [`DiskFile::read_at`], for one who has memory for the bytes; its content is lost. A
    /// medium that can, reads into it.
    ///
    /// # Errors
    /// As [`DiskFile::read_at`].
    fn read_into(&self, offset_bytes: u64, length: usize, _memory: Vec<u8>) -> Result<Vec<u8>> {
        self.read_at(offset_bytes, length)
    }

    /// The same bytes if they can be had without waiting for the medium, as those in the kernel's
    /// page cache. `None` says nothing but that: [`DiskFile::read_at`] tells more.
    fn try_read_at(&self, _offset_bytes: u64, _length: usize) -> Option<Vec<u8>> {
        None
    }

    /// Writes all of `bytes` at `offset_bytes`; durable after [`DiskFile::sync`].
    ///
    /// # Errors
    /// `Io`; part of the bytes may have been written.
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()>;

    /// Like [`DiskFile::write_at`], for bytes that begin and end at multiples of
    /// [`SECTOR_BYTES`] in the file, and begin at one in memory: a medium with a page cache
    /// writes them past it, as copying them there costs more than the write. Reads see them.
    ///
    /// # Errors
    /// `Io`; part of the bytes may have been written.
    fn write_sectors_at(&self, offset_bytes: u64, sectors: &[u8]) -> Result<()> {
        self.write_at(offset_bytes, sectors)
    }

    /// Makes all writes so far durable.
    ///
    /// # Errors
    /// `Io`; what is on the medium is unknown then.
    fn sync(&self) -> Result<()>;

    /// Length in bytes.
    ///
    /// # Errors
    /// `Io`.
    fn length_bytes(&self) -> Result<u64>;

    /// Cuts the file to `length_bytes`.
    ///
    /// # Errors
    /// `Io`.
    fn truncate(&self, length_bytes: u64) -> Result<()>;
}

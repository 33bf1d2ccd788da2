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

/// What a segment file holds. Each kind has its own folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileRole {
    /// The log: chunks and commit records as they came.
    Log,
    /// Chunks that compaction moved here.
    Compacted,
}

/// The name of a segment file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileName {
    /// What it holds.
    pub role: FileRole,
    /// Its number, from one count for both roles.
    pub number: SegmentId,
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let folder = match self.role {
            FileRole::Log => "log",
            FileRole::Compacted => "compacted",
        };
        write!(f, "{folder}/{:016x}.seg", self.number.get())
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

    /// Makes creations and removals durable.
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
}

/// One segment file.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// Reads exactly `length` bytes at `offset_bytes`.
    ///
    /// # Errors
    /// `Io`; an end of the file before that is `UnexpectedEof`.
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>>;

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

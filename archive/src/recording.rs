//! The recording of an archive that was unpacked or packed: what is needed to write the same tar again.
//!
//! ```text
//! file    = "SWLAYER1" chunk*
//! chunk   = kind u8 | bytes u32 | stored bytes u32 | stored (one lz4 block)      little-endian
//!   'R'   records, each whole in its chunk:
//!           0 | length u32 | bytes                   bytes of the archive
//!           1 | size u64 | blake3 | length u16 | path    the content of this file in the root
//!   'K'   number u64 | bytes      content number `number` (counted from 0), a part of it
//!   'E'   size u64 | blake3       of the whole archive; the last chunk
//! ```
//! A content is kept here (`K`) when a later member of the same archive took its file away. A
//! recording has its name only once it is whole and synced.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{ArchiveError, failed};
use crate::members::Members;

pub(crate) const MAGIC: &[u8; 8] = b"SWLAYER1";
pub(crate) const CHUNK_RECORDS: u8 = b'R';
pub(crate) const CHUNK_KEPT: u8 = b'K';
pub(crate) const CHUNK_END: u8 = b'E';
pub(crate) const RECORD_RAW: u8 = 0;
pub(crate) const RECORD_CONTENT: u8 = 1;

/// Records are stored once they are this many bytes: enough to compress well.
const RECORDS_BYTES: usize = 256 << 10;

/// Bytes of one raw record and of one kept part.
const PART_BYTES: usize = 128 << 10;

/// Room that a recording leaves on its disk: the driver's state lies beside it, and a driver that
/// cannot write that stands still.
const ROOM_BYTES_MIN: u64 = 128 << 20;

/// Of a small disk an eighth; of one that tells no size, none.
const ROOM_SHARE: u64 = 8;

/// Bytes of a chunk before compression; a reader refuses more.
pub(crate) const CHUNK_BYTES_MAX: usize = 1 << 20;

/// Reads the rest of a member's content, which goes nowhere else, into the recording, if there is one.
pub(crate) fn record_content<R: Read>(
    members: &mut Members<R>,
    buffer: &mut [u8],
    recorder: &mut Option<Recorder>,
) -> Result<(), ArchiveError> {
    record_all(|buffer| members.content(buffer), buffer, recorder)
}

/// Likewise what follows the end marker of the archive.
pub(crate) fn record_trailing<R: Read>(
    members: &mut Members<R>,
    buffer: &mut [u8],
    recorder: &mut Option<Recorder>,
) -> Result<(), ArchiveError> {
    record_all(|buffer| members.trailing(buffer), buffer, recorder)
}

fn record_all(
    mut read: impl FnMut(&mut [u8]) -> Result<usize, ArchiveError>,
    buffer: &mut [u8],
    recorder: &mut Option<Recorder>,
) -> Result<(), ArchiveError> {
    loop {
        let length = read(buffer)?;
        if length == 0 {
            return Ok(());
        }
        if let Some(recorder) = recorder {
            recorder.raw(&buffer[..length])?;
        }
    }
}

/// The writer of a recording. Removes it when dropped before [`Recorder::finish`].
#[derive(Debug)]
pub(crate) struct Recorder {
    target: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    records: Vec<u8>,
    hasher: blake3::Hasher,
    size_bytes: u64,
    contents: u32,
    room_bytes_min: u64,
    is_finished: bool,
}

impl Recorder {
    /// Begins a recording that will be found at `target`.
    pub(crate) fn create(target: &Path) -> Result<Self, ArchiveError> {
        let mut name = OsString::from(target);
        name.push(".partial");
        let temporary = PathBuf::from(name);
        let file = File::create(&temporary).map_err(failed("create", &temporary))?;
        let disk = rustix::fs::fstatvfs(&file).map_err(failed("look up", &temporary))?;
        let size_bytes = disk.f_blocks.saturating_mul(disk.f_frsize);
        let room_bytes_min = ROOM_BYTES_MIN.min(size_bytes / ROOM_SHARE);
        let mut file = BufWriter::new(file);
        file.write_all(MAGIC).map_err(failed("write", &temporary))?;
        Ok(Self {
            target: target.to_owned(),
            temporary,
            file,
            records: Vec::new(),
            hasher: blake3::Hasher::new(),
            size_bytes: 0,
            contents: 0,
            room_bytes_min,
            is_finished: false,
        })
    }

    /// Bytes of the archive that the root does not hold.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.count(bytes);
        for part in bytes.chunks(PART_BYTES) {
            let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
            self.records.push(RECORD_RAW);
            self.records.extend_from_slice(&length.to_le_bytes());
            self.records.extend_from_slice(part);
            self.store_records(RECORDS_BYTES)?;
        }
        Ok(())
    }

    /// Bytes of the archive that went into a file of the root; [`Recorder::content`] follows.
    pub(crate) fn count(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.size_bytes += bytes.len() as u64;
    }

    /// The content of a file of the root, as the archive goes on here.
    pub(crate) fn content(
        &mut self,
        path: &Path,
        size_bytes: u64,
        hash: blake3::Hash,
    ) -> Result<u32, ArchiveError> {
        let path_bytes = path.as_os_str().as_bytes();
        let length = u16::try_from(path_bytes.len()).map_err(|_| {
            failed::<rustix::io::Errno>("record", path)(rustix::io::Errno::NAMETOOLONG)
        })?;
        self.records.push(RECORD_CONTENT);
        self.records.extend_from_slice(&size_bytes.to_le_bytes());
        self.records.extend_from_slice(hash.as_bytes());
        self.records.extend_from_slice(&length.to_le_bytes());
        self.records.extend_from_slice(path_bytes);
        let number = self.contents;
        // The bound on members comes long before.
        self.contents += 1;
        self.store_records(RECORDS_BYTES)?;
        Ok(number)
    }

    /// Keeps a content, whose file at `path` is about to go.
    pub(crate) fn keep(
        &mut self,
        number: u32,
        path: &Path,
        mut content: impl Read,
    ) -> Result<(), ArchiveError> {
        let mut part = u64::from(number).to_le_bytes().to_vec();
        let header_bytes = part.len();
        loop {
            part.truncate(header_bytes);
            let limit = PART_BYTES as u64;
            let read = content.by_ref().take(limit).read_to_end(&mut part);
            if read.map_err(failed("read", path))? == 0 {
                return Ok(());
            }
            self.store(CHUNK_KEPT, &part)?;
        }
    }

    fn store_records(&mut self, from_bytes: usize) -> Result<(), ArchiveError> {
        if self.records.len() < from_bytes {
            return Ok(());
        }
        let records = std::mem::take(&mut self.records);
        self.store(CHUNK_RECORDS, &records)
    }

    fn store(&mut self, kind: u8, bytes: &[u8]) -> Result<(), ArchiveError> {
        assert!(bytes.len() <= CHUNK_BYTES_MAX, "a chunk that no reader takes");
        self.require_room()?;
        let stored = lz4_flex::block::compress(bytes);
        let mut head = vec![kind];
        for length in [bytes.len(), stored.len()] {
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            head.extend_from_slice(&length.to_le_bytes());
        }
        let written = self.file.write_all(&head).and_then(|()| self.file.write_all(&stored));
        written.map_err(failed("write", &self.temporary))
    }

    /// Refuses to fill the disk up.
    fn require_room(&self) -> Result<(), ArchiveError> {
        let disk = rustix::fs::fstatvfs(self.file.get_ref());
        let disk = disk.map_err(failed("look up", &self.temporary))?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) < self.room_bytes_min {
            let full = rustix::io::Errno::NOSPC;
            return Err(failed("write", &self.temporary)(full));
        }
        Ok(())
    }

    /// Ends the recording, syncs it and gives it its name.
    pub(crate) fn finish(mut self) -> Result<(), ArchiveError> {
        self.store_records(1)?;
        let mut end = self.size_bytes.to_le_bytes().to_vec();
        end.extend_from_slice(self.hasher.finalize().as_bytes());
        self.store(CHUNK_END, &end)?;
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        synced.map_err(failed("write", &self.temporary))?;
        std::fs::rename(&self.temporary, &self.target).map_err(failed("create", &self.target))?;
        self.is_finished = true;
        let parent = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let synced = File::open(parent).and_then(|directory| directory.sync_all());
        synced.map_err(failed("sync the directory", parent))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.is_finished {
            // Nobody looks for the name; what stays behind is overwritten by the next attempt.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_does_not_fill_its_disk() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("recording");
        let mut recorder = Recorder::create(&target).unwrap();
        recorder.raw(&[7; 2 * RECORDS_BYTES]).unwrap();
        recorder.room_bytes_min = u64::MAX;
        let error = recorder.raw(&[7; 2 * RECORDS_BYTES]).unwrap_err().to_string();
        assert!(error.contains("recording") && error.contains("No space"), "{error}");
        drop(recorder);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

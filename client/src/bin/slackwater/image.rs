//! A raw disk image on this machine: a sparse file whose holes are found, kept and made.
//!
//! Invariant: nothing here moves bytes by the file's own position, so that several transfers
//! can work on one image at once.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use slackwater_client::ByteRange;

use crate::failure::Failure;

/// An open image.
#[derive(Debug)]
pub(crate) struct Image {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    modified_at: Option<SystemTime>,
}

impl Image {
    /// Opens a file or block device to be read.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let fail = |error| Failure::local("open", path, error);
        let mut file = File::open(path).map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if metadata.is_dir() {
            return Err(Failure::Usage(format!("{} is a directory, not an image", path.display())));
        }
        // A block device has no length, but an end.
        let size_bytes = file
            .seek(io::SeekFrom::End(0))
            .map_err(|error| Failure::local("find the size of", path, error))?;
        let modified_at = modified_at(&metadata);
        Ok(Self { file, path: path.to_owned(), size_bytes, modified_at })
    }

    /// Makes the file, or opens it if it is there, and gives it its size.
    pub(crate) fn create(path: &Path, size_bytes: u64) -> Result<Self, Failure> {
        let fail = |error| Failure::local("write", path, error);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(fail)?;
        let metadata = file.metadata().map_err(fail)?;
        if !metadata.is_file() {
            return Err(Failure::Usage(format!("{} is not a regular file", path.display())));
        }
        file.set_len(size_bytes).map_err(fail)?;
        Ok(Self { file, path: path.to_owned(), size_bytes, modified_at: None })
    }

    /// The open file.
    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    pub(crate) const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The next range that may hold data, from `offset_bytes` on; `None` if all the rest is a
    /// hole. Where the file system cannot tell, the whole rest may hold data.
    pub(crate) fn data_from(&self, offset_bytes: u64) -> Result<Option<Range<u64>>, Failure> {
        if offset_bytes >= self.size_bytes {
            return Ok(None);
        }
        let fail = |error: Errno| Failure::local("find the holes of", &self.path, error.into());
        let start = match rustix::fs::seek(&self.file, SeekFrom::Data(offset_bytes)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::NOTSUP) => return Ok(Some(offset_bytes..self.size_bytes)),
            Err(error) => return Err(fail(error)),
        };
        let end = rustix::fs::seek(&self.file, SeekFrom::Hole(start)).map_err(fail)?;
        // A file that grows meanwhile is taken as it was; one that shrank fails when it is read.
        Ok(Some(start..end.min(self.size_bytes)).filter(|range| !range.is_empty()))
    }

    /// Reads the whole range.
    pub(crate) fn read(&self, range: ByteRange) -> Result<Bytes, Failure> {
        let length = usize::try_from(range.length_bytes()).unwrap_or(usize::MAX);
        let mut bytes = vec![0; length];
        self.file
            .read_exact_at(&mut bytes, range.offset_bytes())
            .map_err(|error| Failure::local("read", &self.path, error))?;
        Ok(bytes.into())
    }

    pub(crate) fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all_at(bytes, offset_bytes)
            .map_err(|error| Failure::local("write", &self.path, error))
    }

    /// Makes the range read as zeros: as a hole, or as written zeros where the file system has
    /// no holes.
    pub(crate) fn clear(&self, range: ByteRange) -> Result<(), Failure> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (range.offset_bytes(), range.length_bytes());
        match rustix::fs::fallocate(&self.file, flags, offset, length) {
            Ok(()) => Ok(()),
            Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL) => self.write_zeros(range),
            Err(error) => Err(Failure::local("write", &self.path, error.into())),
        }
    }

    fn write_zeros(&self, range: ByteRange) -> Result<(), Failure> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut offset = range.offset_bytes();
        while offset < range.end_bytes() {
            let left = usize::try_from(range.end_bytes() - offset).unwrap_or(usize::MAX);
            let piece = &ZEROS[..left.min(ZEROS.len())];
            self.write(offset, piece)?;
            offset += u64::try_from(piece.len()).unwrap_or(u64::MAX);
        }
        Ok(())
    }

    /// Puts everything on the disk.
    pub(crate) fn sync(&self) -> Result<(), Failure> {
        self.file.sync_all().map_err(|error| Failure::local("sync", &self.path, error))
    }

    /// Whether somebody wrote to the image since it was opened.
    pub(crate) fn has_changed(&self) -> Result<bool, Failure> {
        let metadata =
            self.file.metadata().map_err(|error| Failure::local("look at", &self.path, error))?;
        Ok(metadata.is_file()
            && (metadata.len() != self.size_bytes || modified_at(&metadata) != self.modified_at))
    }
}

fn modified_at(metadata: &Metadata) -> Option<SystemTime> {
    metadata.modified().ok().filter(|_| metadata.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(offset_bytes: u64, length_bytes: u64) -> ByteRange {
        ByteRange::new(offset_bytes, length_bytes).unwrap()
    }

    #[test]
    fn holes_are_found_kept_and_made() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        let image = Image::create(&path, 8 * MIB).unwrap();
        assert_eq!(image.data_from(0).unwrap(), None);
        image.write(2 * MIB, &[7; 4096]).unwrap();
        let data = image.data_from(0).unwrap().unwrap();
        assert!(data.contains(&(2 * MIB)) && data.end < 8 * MIB, "{data:?}");
        assert_eq!(image.read(range(2 * MIB - 1, 3)).unwrap()[..], [0, 7, 7]);
        image.clear(range(2 * MIB, 4096)).unwrap();
        assert_eq!(image.data_from(0).unwrap(), None);
        assert_eq!(image.read(range(2 * MIB, 4)).unwrap()[..], [0; 4]);
        image.write(0, &[1; 10]).unwrap();
        image.write_zeros(range(1, 8)).unwrap();
        assert_eq!(image.read(range(0, 10)).unwrap()[..], [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(image.data_from(8 * MIB).unwrap(), None);
    }

    #[test]
    fn a_change_under_our_hands_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        std::fs::write(&path, b"one").unwrap();
        let image = Image::open(&path).unwrap();
        assert_eq!(image.size_bytes(), 3);
        assert!(!image.has_changed().unwrap());
        std::fs::write(&path, b"four").unwrap();
        assert!(image.has_changed().unwrap());
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Image::open(directory.path()), Err(Failure::Usage(_))));
        let missing = Image::open(&directory.path().join("missing")).unwrap_err();
        assert_eq!(missing.exit(), crate::failure::Exit::NotFound);
        let image = Image::create(&directory.path().join("short"), 10).unwrap();
        assert!(image.read(range(5, 10)).is_err());
    }
}

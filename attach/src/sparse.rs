//! A sparse file of this machine, and the copy of what it holds to a loop device on one of the export.
//!
//! ```text
//!  STATE/new/UUID        what a tool of e2fsprogs writes, mostly block by block
//!       |  copy_data     a child: pieces of 1 MiB at most, no holes
//!  /dev/loopN            the kernel writes many of them at once
//!       |
//!  STATE/export/PATH
//! ```
//! The file on the export is to be new: where this one has holes, it stays as it is.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use uuid::Uuid;

use crate::AttachError;
use crate::export::make_directory;
use crate::kernel;

/// The word for `run_tool` where it is to copy what its standard input holds.
pub(crate) const COPY_DATA: &str = "copy-data";

/// Below the state directory: files that are being made. The driver lets one process have a state directory at a time.
const FOLDER: &str = "new";

/// Most bytes that are read and written at once.
const PIECE_BYTES: usize = 1 << 20;

/// A file of zeros of this machine, which is removed with this.
#[derive(Debug)]
pub(crate) struct SparseFile {
    pub(crate) directory: PathBuf,
    pub(crate) name: String,
}

impl SparseFile {
    /// `None` if the file system of the state directory has no files of that size, or does not tell where they have holes.
    pub(crate) fn make(
        state_directory: &Path,
        size_bytes: u64,
    ) -> Result<Option<Self>, AttachError> {
        let directory = make_directory(&state_directory.join(FOLDER))?;
        let made = Self { directory, name: Uuid::new_v4().to_string() };
        let created = File::create_new(made.path()).and_then(|file| {
            file.set_len(size_bytes)?;
            Ok(next_data(&file, 0)?.is_none())
        });
        match created {
            Ok(is_sparse) => Ok(is_sparse.then_some(made)),
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => Ok(None),
            Err(source) => {
                Err(AttachError::System { action: "make a file at", path: made.path(), source })
            }
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// Opens it for reading.
    pub(crate) fn open(&self) -> Result<File, AttachError> {
        let failed = |source| AttachError::System { action: "open", path: self.path(), source };
        File::open(self.path()).map_err(failed)
    }

    /// Removes what a killed process left. What cannot be removed only takes room.
    pub(crate) fn remove_left(state_directory: &Path) {
        let directory = state_directory.join(FOLDER);
        let Ok(entries) = fs::read_dir(directory) else { return };
        let paths = entries.flatten().map(|entry| entry.path());
        let is_ours = |path: &PathBuf| {
            path.file_name()
                .and_then(OsStr::to_str)
                .is_some_and(|name| Uuid::try_parse(name).is_ok())
        };
        for path in paths.filter(is_ours) {
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(%error, path = %path.display(), "a file that was being made stays");
            }
        }
    }
}

impl Drop for SparseFile {
    fn drop(&mut self) {
        // What stays goes with the next start.
        let _absent = fs::remove_file(self.path());
    }
}

/// Copies what standard input, a file, holds to the same places of a loop device on `file`, and has the device bring it to
/// where it stays. The answer is the status that the process is to end with.
pub(crate) fn serve_copy(device: &Path, file: &Path) -> u8 {
    let copied = open_device(device, file).and_then(|to| {
        let from = rustix::stdio::stdin().try_clone_to_owned();
        let from = from.map_err(|error| format!("its copy cannot be read: {error}"))?;
        copy_data(&from.into(), &to)
    });
    match copied {
        Ok(()) => 0,
        Err(reason) => {
            // A standard error that is closed takes no words; the status says enough.
            let _ = writeln!(io::stderr(), "{reason}");
            1
        }
    }
}

/// Opens a loop device that is on `file`. While it is open it stays there.
fn open_device(device: &Path, file: &Path) -> Result<File, String> {
    let opened = File::options().write(true).open(device);
    let opened =
        opened.map_err(|error| format!("{} cannot be opened: {error}", device.display()))?;
    match kernel::loop_device(device) {
        Some(found) if found.file == file => Ok(opened),
        found => {
            let got = found.map(|found| found.file.display().to_string());
            let (got, device) = (got.unwrap_or_else(|| "no file".to_owned()), device.display());
            Err(format!(
                "{device} is on {got}, expected {}: another program took it",
                file.display()
            ))
        }
    }
}

fn copy_data(from: &File, to: &File) -> Result<(), String> {
    let unread = |error: io::Error| format!("its copy on this machine cannot be read: {error}");
    let unwritten = |error: io::Error| format!("it cannot be written: {error}");
    let mut piece = vec![0; PIECE_BYTES];
    let mut end = 0;
    while let Some(start) = next_data(from, end).map_err(unread)? {
        end = seek(from, SeekFrom::Hole(start)).map_err(|error| unread(error.into()))?;
        for at in (start..end).step_by(PIECE_BYTES) {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(PIECE_BYTES);
            from.read_exact_at(&mut piece[..length], at).map_err(unread)?;
            to.write_all_at(&piece[..length], at).map_err(unwritten)?;
        }
    }
    to.sync_all().map_err(unwritten)
}

/// Where the next bytes are that are no hole; `None` if there are none.
fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(start) => Ok(Some(start)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_a_file_holds_is_copied_and_its_holes_stay_holes() {
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| {
            let path = folder.path().join(name);
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            file.set_len(64 * GIB).unwrap();
            file
        });
        // One block, one that ends the file, and more than two pieces that begin in the middle of one.
        let long = vec![7; 2 * PIECE_BYTES + 8192];
        let blocks: [(u64, &[u8]); 3] =
            [(0, &[1; 4096]), (GIB + 4096, &long), (64 * GIB - 4096, &[2; 4096])];
        for (at, bytes) in blocks {
            from.write_all_at(bytes, at).unwrap();
        }
        copy_data(&from, &to).unwrap();
        for (at, bytes) in blocks {
            let mut read = vec![0; bytes.len()];
            to.read_exact_at(&mut read, at).unwrap();
            assert!(read == bytes, "at {at}");
        }
        let data = |file: &File| {
            let mut ranges = Vec::new();
            let mut end = 0;
            while let Some(start) = next_data(file, end).unwrap() {
                end = seek(file, SeekFrom::Hole(start)).unwrap();
                ranges.push(start..end);
            }
            ranges
        };
        assert_eq!(data(&to), data(&from));
    }

    #[test]
    fn a_file_goes_with_its_owner_and_what_was_left_with_the_next_start() {
        let state = tempfile::tempdir().unwrap();
        let made = SparseFile::make(state.path(), GIB).unwrap().unwrap();
        assert_eq!(made.open().unwrap().metadata().unwrap().len(), GIB);
        let path = made.path();
        drop(made);
        assert!(!path.exists());
        fs::write(&path, "left").unwrap();
        let other = path.with_file_name("another's");
        fs::create_dir(&other).unwrap();
        for _ in 0..2 {
            SparseFile::remove_left(state.path());
            assert!(!path.exists() && other.exists());
        }
    }

    #[test]
    fn what_cannot_be_made_is_an_error_that_names_it_and_nothing_stays() {
        let state = tempfile::tempdir().unwrap();
        // No file has as many bytes.
        let error = SparseFile::make(state.path(), u64::MAX).unwrap_err().to_string();
        let directory = state.path().join(FOLDER);
        assert!(error.contains(directory.to_str().unwrap()), "{error}");
        assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
    }

    #[test]
    fn a_device_on_another_file_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no-device");
        fs::write(&path, "as it is").unwrap();
        let error = open_device(&path, folder.path()).unwrap_err();
        assert!(error.contains("on no file"), "{error}");
        assert_eq!(fs::read_to_string(path).unwrap(), "as it is");
    }
}

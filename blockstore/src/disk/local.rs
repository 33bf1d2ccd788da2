//! Segment files in a directory of the local file system.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Disk, DiskFile, DiskSpace, FileName, FileRole};
use crate::error::{Error, Result};
use crate::id::SegmentId;

/// Segment files in the folders `log` and `compacted` of one directory.
#[derive(Debug)]
pub struct LocalDisk {
    directory: PathBuf,
}

impl LocalDisk {
    /// The disk in `directory`, whose folders are made if missing.
    ///
    /// # Errors
    /// `Io`.
    pub fn open(directory: &Path) -> Result<Self> {
        for folder in ["log", "compacted"] {
            let path = directory.join(folder);
            std::fs::create_dir_all(&path)
                .map_err(|source| Error::io("create", path.display().to_string(), source))?;
        }
        let disk = Self { directory: directory.to_path_buf() };
        disk.sync_folder("")?;
        Ok(disk)
    }

    fn path(&self, name: FileName) -> PathBuf {
        self.directory.join(name.to_string())
    }

    fn sync_folder(&self, folder: &str) -> Result<()> {
        let path = self.directory.join(folder);
        // IMPORTANT: without this a new file can vanish with its synced bytes at a power cut.
        File::open(&path)
            .and_then(|directory| directory.sync_all())
            .map_err(|source| Error::io("sync", path.display().to_string(), source))
    }

    fn list_folder(&self, role: FileRole, folder: &str) -> Result<Vec<FileName>> {
        let path = self.directory.join(folder);
        let fail = |source| Error::io("list", path.display().to_string(), source);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let file_name = entry.file_name();
            let number = file_name
                .to_str()
                .and_then(|text| text.strip_suffix(".seg"))
                .and_then(|hex| u64::from_str_radix(hex, 16).ok());
            match number {
                Some(number) => names.push(FileName { role, number: SegmentId::new(number) }),
                None => {
                    tracing::warn!(file = ?entry.path(), "a file that is no segment; left alone")
                }
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

impl Disk for LocalDisk {
    fn list(&self) -> Result<Vec<FileName>> {
        let mut names = self.list_folder(FileRole::Log, "log")?;
        names.extend(self.list_folder(FileRole::Compacted, "compacted")?);
        Ok(names)
    }

    fn create(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        LocalFile::wrap(path, file, "create")
    }

    fn open(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        LocalFile::wrap(path, file, "open")
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

    fn sync_names(&self) -> Result<()> {
        self.sync_folder("log")?;
        self.sync_folder("compacted")
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
}

#[derive(Debug)]
struct LocalFile {
    path: PathBuf,
    file: File,
}

impl LocalFile {
    fn wrap(
        path: PathBuf,
        file: io::Result<File>,
        action: &'static str,
    ) -> Result<Arc<dyn DiskFile>> {
        match file {
            Ok(file) => Ok(Arc::new(Self { path, file })),
            Err(source) => Err(Error::io(action, path.display().to_string(), source)),
        }
    }

    fn fail(&self, action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::io(action, self.path.display().to_string(), source)
    }
}

impl DiskFile for LocalFile {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        let mut buffer = vec![0; length];
        self.file.read_exact_at(&mut buffer, offset_bytes).map_err(self.fail("read"))?;
        Ok(buffer)
    }

    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset_bytes).map_err(self.fail("write"))
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

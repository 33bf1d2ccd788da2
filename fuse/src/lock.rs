//! The lock of a state directory: one process at a time serves from it.
//!
//! Two processes may have the same descriptor of `/dev/fuse`: the one that was told to resume
//! while the one before is not dead after all. The journal is read and written by who has the
//! lock, and by nobody else; the other one waits until it gets it.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::ServeError;

/// How often it is tried: who waits longer than this delays nobody, since the mount is served.
/// It is not waited for in the kernel, where a process that is told to end could not stop it.
const TRY_PAUSE: Duration = Duration::from_millis(100);

/// A state directory that is locked until this is dropped.
#[derive(Debug)]
pub(crate) struct StateLock {
    directory: PathBuf,
    _file: File,
}

impl StateLock {
    /// Locks the directory, which is made if it is not there; waits for who has it.
    pub(crate) async fn take(directory: &Path) -> Result<Self, ServeError> {
        let mut is_told = false;
        loop {
            if let Some(lock) = Self::try_take(directory)? {
                return Ok(lock);
            }
            if !is_told {
                let path = directory.display();
                tracing::warn!(%path, "another process serves this mount: its end is waited for");
                is_told = true;
            }
            tokio::time::sleep(TRY_PAUSE).await;
        }
    }

    /// `None` while another one has it.
    pub(crate) fn try_take(directory: &Path) -> Result<Option<Self>, ServeError> {
        let path = directory.join("lock");
        let open = || -> io::Result<File> {
            std::fs::create_dir_all(directory)?;
            OpenOptions::new().write(true).create(true).truncate(false).open(&path)
        };
        let locked =
            open().and_then(|file| match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Ok(Some(file)),
                Err(Errno::WOULDBLOCK) => Ok(None),
                Err(errno) => Err(errno.into()),
            });
        let file = locked.map_err(|source| ServeError::File { path, source })?;
        Ok(file.map(|file| Self { directory: directory.to_owned(), _file: file }))
    }

    /// What is locked.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("state");
        let lock = StateLock::try_take(&directory).unwrap().unwrap();
        assert!(StateLock::try_take(&directory).unwrap().is_none());
        drop(lock);
        assert!(StateLock::try_take(&directory).unwrap().is_some());
    }
}

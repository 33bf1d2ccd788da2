//! For tests: a state in memory whose disk can be made to fail.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::StorageBackend;
use redb::backends::InMemoryBackend;

use super::State;

/// Fails every sync and write once it was told to.
#[derive(Clone, Debug)]
pub(in crate::worker) struct FailingDisk {
    memory: Arc<InMemoryBackend>,
    fails: Arc<AtomicBool>,
}

impl FailingDisk {
    pub(in crate::worker) fn new() -> Self {
        Self { memory: Arc::new(InMemoryBackend::new()), fails: Arc::default() }
    }

    pub(in crate::worker) fn state(&self) -> State {
        let database = redb::Builder::new().create_with_backend(self.clone()).unwrap();
        State::over(database, Path::new("state.redb")).unwrap()
    }

    pub(in crate::worker) fn fail(&self) {
        self.fails.store(true, Ordering::Relaxed);
    }

    fn check(&self) -> io::Result<()> {
        match self.fails.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the disk of this test fails")),
            false => Ok(()),
        }
    }
}

impl StorageBackend for FailingDisk {
    fn len(&self) -> io::Result<u64> {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.memory.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.memory.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.memory.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.memory.write(offset, data)
    }
}

//! What all requests of one mount share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::beside::Beside;
use crate::cache::BlockCache;
use crate::distance::Distance;
use crate::file::{ServedFile, WriteState};
use crate::flights::Flights;
use crate::journal::Journal;
use crate::maps::Maps;
use crate::nfs::Nfs;
use crate::nodes::Nodes;
use crate::statistics::{Gauges, Statistics};

/// The export as it is served.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) nfs: Nfs,
    pub(crate) maps: Maps,
    /// `None` when nothing is to be kept.
    pub(crate) cache: Option<Arc<BlockCache>>,
    pub(crate) flights: Flights,
    pub(crate) distance: Arc<Distance>,
    pub(crate) beside: Beside,
    pub(crate) nodes: Nodes,
    pub(crate) journal: Arc<Mutex<Journal>>,
    pub(crate) statistics: Arc<Statistics>,
    kept_bytes: AtomicU64,
    is_resumed: bool,
}

impl Export {
    pub(crate) fn new(
        nfs: Nfs,
        maps: Maps,
        cache: Option<BlockCache>,
        journal: Journal,
        (statistics, distance): (Arc<Statistics>, Arc<Distance>),
    ) -> Self {
        let is_resumed = journal.state().started.is_some();
        let journal = Arc::new(Mutex::new(journal));
        Self {
            nfs,
            maps,
            distance,
            beside: Beside::default(),
            cache: cache.map(Arc::new),
            flights: Flights::default(),
            nodes: Nodes::new(Arc::clone(&journal)),
            journal,
            statistics,
            kept_bytes: AtomicU64::new(0),
            is_resumed,
        }
    }

    /// Bytes of uncommitted writes of all files.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes.load(Ordering::Relaxed)
    }

    /// Changes what is known of a file's writes.
    pub(crate) fn change_writes<T>(
        &self,
        file: &ServedFile,
        change: impl FnOnce(&mut WriteState) -> T,
    ) -> T {
        let mut writes = file.writes.lock();
        let before = writes.kept.bytes();
        let outcome = change(&mut writes);
        let after = writes.kept.bytes();
        // Added first, so that the sum never passes below zero.
        self.kept_bytes.fetch_add(after, Ordering::Relaxed);
        self.kept_bytes.fetch_sub(before, Ordering::Relaxed);
        outcome
    }

    /// The content of the file of statistics.
    pub(crate) fn render_statistics(&self) -> Vec<u8> {
        let files = self.nodes.files();
        let files_lost = files.iter().filter(|file| file.writes.lock().is_lost).count();
        self.statistics.render(Gauges {
            cache_bytes: self.cache.as_ref().map_or(0, |cache| cache.used_bytes()),
            kept_bytes: self.kept_bytes(),
            files_lost: u64::try_from(files_lost).unwrap_or(u64::MAX),
            is_resumed: self.is_resumed,
        })
    }
}

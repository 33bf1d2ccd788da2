//! The index in memory, for tests: a crash forgets what was not flushed.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::RwLock;

use super::{Batch, Family, Kv, KvRead, Visit};
use crate::error::{Error, Result};

type Maps = BTreeMap<(Family, Vec<u8>), Vec<u8>>;

/// An index in memory. [`MemoryKv::crash`] takes it back to its last flush, as a power cut
/// takes RocksDB without a log.
#[derive(Debug, Default)]
pub struct MemoryKv {
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    live: Arc<Maps>,
    flushed: Arc<Maps>,
    flushes_left: Option<u64>,
}

impl MemoryKv {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What a restart after a power cut finds: the state of the last flush.
    #[must_use]
    pub fn crash(&self) -> Self {
        let flushed = Arc::clone(&self.state.read().flushed);
        Self {
            state: RwLock::new(State { live: Arc::clone(&flushed), flushed, flushes_left: None }),
        }
    }

    /// After `count` more flushes every flush fails.
    pub fn fail_flush_after(&self, count: u64) {
        self.state.write().flushes_left = Some(count);
    }

    /// Overwrites one entry behind the store's back, for tests of `check`.
    pub fn tamper(&self, family: Family, key: &[u8], value: Option<Vec<u8>>) {
        let mut state = self.state.write();
        let maps = Arc::make_mut(&mut state.live);
        match value {
            Some(value) => maps.insert((family, key.to_vec()), value),
            None => maps.remove(&(family, key.to_vec())),
        };
    }

    /// All entries of a family, for tests.
    #[must_use]
    pub fn entries(&self, family: Family) -> Vec<(Vec<u8>, Vec<u8>)> {
        let state = self.state.read();
        state
            .live
            .range((family, Vec::new())..)
            .take_while(|((of, _), _)| *of == family)
            .map(|((_, key), value)| (key.clone(), value.clone()))
            .collect()
    }
}

impl KvRead for Arc<Maps> {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(BTreeMap::get(self, &(family, key.to_vec())).cloned())
    }

    fn last_at_or_before(&self, family: Family, key: &[u8]) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let found = self.range((family, Vec::new())..=(family, key.to_vec())).next_back();
        Ok(found.map(|((_, key), value)| (key.clone(), value.clone())))
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        for ((_, key), value) in self.range((family, from.to_vec())..(family, to.to_vec())) {
            if visit(key, value)? == ControlFlow::Break(()) {
                break;
            }
        }
        Ok(())
    }
}

impl KvRead for MemoryKv {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        KvRead::get(&self.state.read().live, family, key)
    }

    fn last_at_or_before(&self, family: Family, key: &[u8]) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        KvRead::last_at_or_before(&self.state.read().live, family, key)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        // The clone of the Arc is the one moment that the scan sees.
        let live = Arc::clone(&self.state.read().live);
        live.scan(family, from, to, visit)
    }
}

impl Kv for MemoryKv {
    fn apply(&self, batch: &Batch) -> Result<()> {
        let mut state = self.state.write();
        let maps = Arc::make_mut(&mut state.live);
        for write in batch {
            let key = (write.family, write.key.clone());
            match &write.value {
                Some(value) => maps.insert(key, value.clone()),
                None => maps.remove(&key),
            };
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        let mut state = self.state.write();
        match &mut state.flushes_left {
            Some(0) => {
                return Err(Error::io("flush", "memory index", std::io::Error::other("injected")));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        state.flushed = Arc::clone(&state.live);
        Ok(())
    }

    fn compact(&self) -> Result<()> {
        Ok(())
    }

    fn view(&self) -> Box<dyn KvRead + '_> {
        Box::new(Arc::clone(&self.state.read().live))
    }

    fn disk_bytes(&self) -> u64 {
        0
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

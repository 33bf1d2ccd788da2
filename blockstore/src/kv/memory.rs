//! The index in memory, for tests: a crash forgets what was not flushed, and any call can be
//! made to fail.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::{Batch, Family, Kv, KvRead, Visit};
use crate::error::{Error, Result};

type Maps = BTreeMap<(Family, Vec<u8>), Vec<u8>>;

/// A failure of the index to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFault {
    /// The `n`-th batch from now is not applied.
    Apply(u64),
    /// The `n`-th batch or flush from now finds no room, and the one after it does.
    NoSpace(u64),
    /// The `n`-th flush from now fails, and nothing of it is durable.
    Flush(u64),
    /// The `n`-th compaction from now fails.
    Compact(u64),
    /// The `n`-th read from now fails.
    Read(u64),
}

/// An index in memory. [`MemoryKv::crash`] takes it back to its last flush, as a power cut
/// takes RocksDB without a log.
#[derive(Debug, Default)]
pub struct MemoryKv {
    state: RwLock<State>,
    fault: Mutex<Option<KvFault>>,
}

#[derive(Debug, Default)]
struct State {
    live: Arc<Maps>,
    flushed: Arc<Maps>,
    /// Applied since the last flush.
    unflushed: Vec<Batch>,
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
        self.crash_behind(0)
    }

    /// What a restart after a power cut finds if the index flushed by itself, as RocksDB does:
    /// the state of the last flush and the first `count` batches after it.
    #[must_use]
    pub fn crash_behind(&self, count: usize) -> Self {
        let state = self.state.read();
        let mut flushed = Arc::clone(&state.flushed);
        for batch in state.unflushed.iter().take(count) {
            write(Arc::make_mut(&mut flushed), batch);
        }
        let state = State { live: Arc::clone(&flushed), flushed, unflushed: Vec::new() };
        Self { state: RwLock::new(state), fault: Mutex::new(None) }
    }

    /// Batches applied since the last flush.
    #[must_use]
    pub fn unflushed(&self) -> usize {
        self.state.read().unflushed.len()
    }

    /// Injects one failure.
    pub fn inject(&self, fault: KvFault) {
        *self.fault.lock() = Some(fault);
    }

    /// Takes back a failure that has not struck yet, and answers whether there was one.
    pub fn disarm(&self) -> bool {
        self.fault.lock().take().is_some()
    }

    /// An error if the armed fault of this kind strikes now.
    fn strike(
        &self,
        action: &'static str,
        counter: impl Fn(&mut KvFault) -> Option<&mut u64>,
    ) -> Result<()> {
        let mut fault = self.fault.lock();
        match fault.as_mut().and_then(counter) {
            Some(0) => {
                *fault = None;
                Err(Error::io(action, "memory index", std::io::Error::other("injected")))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn strike_full(&self, action: &'static str) -> Result<()> {
        let struck = self.strike(action, |fault| match fault {
            KvFault::NoSpace(left) => Some(left),
            _ => None,
        });
        let full = |_| Error::io(action, "memory index", ErrorKind::StorageFull.into());
        struck.map_err(full)
    }

    fn strike_read(&self) -> Result<()> {
        self.strike("read", |fault| match fault {
            KvFault::Read(left) => Some(left),
            _ => None,
        })
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

fn write(maps: &mut Maps, batch: &Batch) {
    for write in batch {
        let key = (write.family, write.key.clone());
        match &write.value {
            Some(value) => maps.insert(key, value.clone()),
            None => maps.remove(&key),
        };
    }
}

impl KvRead for Arc<Maps> {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(BTreeMap::get(self, &(family, key.to_vec())).cloned())
    }

    fn last_at_or_before(
        &self,
        family: Family,
        (floor, key): (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        if floor > key {
            return Ok(None);
        }
        let mut between = self.range((family, floor.to_vec())..=(family, key.to_vec()));
        let found = between.rfind(|((_, key), _)| is_wanted(key));
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
        self.strike_read()?;
        KvRead::get(&self.state.read().live, family, key)
    }

    fn last_at_or_before(
        &self,
        family: Family,
        bounds: (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        self.strike_read()?;
        KvRead::last_at_or_before(&self.state.read().live, family, bounds, is_wanted)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        self.strike_read()?;
        // The clone of the Arc is the one moment that the scan sees.
        let live = Arc::clone(&self.state.read().live);
        live.scan(family, from, to, visit)
    }
}

impl Kv for MemoryKv {
    fn apply(&self, batch: &Batch) -> Result<()> {
        self.strike_full("apply")?;
        self.strike("apply", |fault| match fault {
            KvFault::Apply(left) => Some(left),
            _ => None,
        })?;
        let mut state = self.state.write();
        write(Arc::make_mut(&mut state.live), batch);
        state.unflushed.push(batch.clone());
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.strike_full("flush")?;
        self.strike("flush", |fault| match fault {
            KvFault::Flush(left) => Some(left),
            _ => None,
        })?;
        let mut state = self.state.write();
        state.flushed = Arc::clone(&state.live);
        state.unflushed.clear();
        Ok(())
    }

    fn compact(&self) -> Result<()> {
        self.strike("compact", |fault| match fault {
            KvFault::Compact(left) => Some(left),
            _ => None,
        })
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

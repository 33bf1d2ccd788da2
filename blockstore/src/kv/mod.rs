//! The seam below the index: an ordered, atomic key-value store in families.
//!
//! Two forms: [`RocksKv`] for use, [`MemoryKv`] for tests (it forgets at a crash what was not
//! flushed, and fails on demand). Neither has a log of its own: the segments are the log, and
//! the index is replayed from them.

mod manifest;
mod memory;
mod rocks;

use std::fmt;
use std::ops::ControlFlow;

pub use memory::{KvFault, MemoryKv};
pub use rocks::RocksKv;

use crate::error::Result;

/// The column families. The number is the family's name in commit records: never change one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Family {
    /// Format version, store id, log position, counters.
    Meta = 0,
    /// Inode number to inode.
    Inode = 1,
    /// (Directory, name) to inode and cookie.
    Dirent = 2,
    /// (Directory, cookie) to name and inode: the order of READDIR.
    Cookie = 3,
    /// Snapshot id to snapshot, and the secondary keys for name, label and path.
    Snapshot = 4,
    /// Layer id to layer.
    Layer = 5,
    /// (Parent layer, child layer).
    Child = 6,
    /// (Layer, first block) to run.
    Map = 7,
    /// First bytes of a content hash to chunk id.
    Hash = 8,
    /// First of 64 chunks to their counts, where not all are 1.
    Refs = 9,
    /// Logical segment to its place and counts.
    Segment = 10,
    /// Work that waits: dead layers, layers to collapse, snapshots that expire.
    Queue = 11,
}

impl Family {
    /// All families, in the order of their numbers.
    pub const ALL: [Self; 12] = [
        Self::Meta,
        Self::Inode,
        Self::Dirent,
        Self::Cookie,
        Self::Snapshot,
        Self::Layer,
        Self::Child,
        Self::Map,
        Self::Hash,
        Self::Refs,
        Self::Segment,
        Self::Queue,
    ];

    /// The name in RocksDB.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Meta => "meta",
            Self::Inode => "inode",
            Self::Dirent => "dirent",
            Self::Cookie => "cookie",
            Self::Snapshot => "snapshot",
            Self::Layer => "layer",
            Self::Child => "child",
            Self::Map => "map",
            Self::Hash => "hash",
            Self::Refs => "refs",
            Self::Segment => "segment",
            Self::Queue => "queue",
        }
    }

    /// The number in commit records.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The family with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// One change: a put, or a delete where the value is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The family.
    pub family: Family,
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Option<Vec<u8>>,
}

/// Changes that are applied all together or not at all.
pub type Batch = Vec<Write>;

/// What a scan hands to its caller for each entry.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> Result<ControlFlow<()>> + 'a;

/// How a scan that may skip goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// With the next entry.
    Next,
    /// With the last entry at or before this key, or with the first behind it if there is none.
    /// That entry may have been visited before.
    Reach(Vec<u8>),
    /// Not at all.
    Stop,
}

/// What a scan that may skip hands to its caller for each entry.
pub type VisitSkipping<'a> = dyn FnMut(&[u8], &[u8]) -> Result<Step> + 'a;

/// Reading from the index, or from one moment of it.
pub trait KvRead {
    /// The value of `key`.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails.
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// The values of several keys.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails.
    fn get_many(&self, family: Family, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>> {
        keys.iter().map(|key| self.get(family, key)).collect()
    }

    /// The last entry whose key is not before `floor` and not behind `key`, of those whose keys
    /// `is_wanted` takes. The floor spares the search what was deleted before it.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails.
    fn last_at_or_before(
        &self,
        family: Family,
        bounds: (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>>;

    /// As [`KvRead::scan`] from `from` up to `to`, but from the last entry at or before `from`
    /// on, if there is one that is not before `floor`: it may be of a range that reaches in.
    ///
    /// # Errors
    /// As [`KvRead::scan`].
    fn scan_reaching(
        &self,
        family: Family,
        (floor, from, to): (&[u8], &[u8], &[u8]),
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        match self.last_at_or_before(family, (floor, from), &|_| true)? {
            Some((key, _)) => self.scan(family, &key, to, visit),
            None => self.scan(family, from, to, visit),
        }
    }

    /// As [`KvRead::scan_reaching`], but the visitor may skip entries ([`Step::Reach`]), which costs less
    /// than a scan for each part. The caller bounds how often it reaches: forward only.
    ///
    /// # Errors
    /// As [`KvRead::scan`].
    fn scan_skipping(
        &self,
        family: Family,
        (floor, from, to): (&[u8], &[u8], &[u8]),
        visit: &mut VisitSkipping<'_>,
    ) -> Result<()> {
        let mut next = Some(from.to_vec());
        while let Some(from) = next.take() {
            self.scan_reaching(family, (floor, &from, to), &mut |key, value| {
                match visit(key, value)? {
                    Step::Next => return Ok(ControlFlow::Continue(())),
                    Step::Reach(key) => next = Some(key),
                    Step::Stop => {}
                }
                Ok(ControlFlow::Break(()))
            })?;
        }
        Ok(())
    }

    /// Visits the entries from `from` (included) up to `to` (left out) in order of their keys,
    /// until the visitor breaks. The entries are of one moment.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails, and whatever the visitor answers.
    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()>;
}

/// The index.
pub trait Kv: KvRead + Send + Sync + fmt::Debug {
    /// Applies a batch in memory; it survives a crash once [`Kv::flush`] returned.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails; then none of the batch is visible.
    fn apply(&self, batch: &Batch) -> Result<()>;

    /// Makes all that was applied durable, all families at one point.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails.
    fn flush(&self) -> Result<()>;

    /// Gives back the room that deleted entries still take on the disk.
    ///
    /// # Errors
    /// `Index`, when RocksDB fails.
    fn compact(&self) -> Result<()>;

    /// A view of this moment that later batches do not change.
    fn view(&self) -> Box<dyn KvRead + '_>;

    /// Bytes that the index takes on the disk, without what it is about to delete.
    fn disk_bytes(&self) -> u64;

    /// Bytes that the index takes in memory.
    fn memory_bytes(&self) -> u64;

    /// Room on the disk that it may need at any moment, for what it has not flushed.
    fn needed_bytes(&self) -> u64 {
        0
    }

    /// Whether a few more batches may make it flush by itself, so that it needs that room soon.
    fn is_flush_near(&self) -> bool {
        false
    }
}

/// The key just after all keys that begin with `prefix`; for the `to` of a scan.
#[must_use]
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if let Some(next) = last.checked_add(1) {
            end.push(next);
            return end;
        }
    }
    // Every byte was 0xff: nothing sorts after such keys in this store, whose keys are far
    // shorter than 64 bytes of 0xff.
    vec![0xff; 64]
}

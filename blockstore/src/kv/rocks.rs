//! The index in RocksDB.
//!
//! RocksDB's own log is off: segments are the log. Atomic flush takes all families to the disk
//! at one point, so the stored log position always matches the stored entries.

use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType,
    DBRawIterator, DataBlockIndexType, ErrorKind, FlushOptions, Options, ReadOptions,
    SnapshotWithThreadMode, WriteBatch, WriteBufferManager, WriteOptions,
};

use super::manifest::Torn;
use super::{Batch, Family, Kv, KvRead, Step, Visit, VisitSkipping};
use crate::error::{Error, Result};

/// Bits a key in the bloom filters: about 1 % false positives, so that a block that is new
/// rarely costs a read of the `hash` family.
const BLOOM_BITS_A_KEY: f64 = 10.0;

/// The share of its write buffer that the family `hash` spends on a bloom filter of it.
const MEMTABLE_BLOOM_RATIO: f64 = 0.05;

/// Entries to buckets of the index inside a block of a table.
const HASH_INDEX_RATIO: f64 = 0.75;

/// What a flush writes beside the entries: tables' indexes and filters, the manifest.
const FLUSH_BYTES: u64 = 4 << 20;

/// What RocksDB takes for its manifest in advance, rather than its default of 4 MiB: on a full disk
/// that would take the room of the other files that a start writes.
const MANIFEST_STEP_BYTES: usize = 64 << 10;

/// Open files of the index: a bound that leaves most of a process's usual 1024 to connections.
const OPEN_FILES_MAX: i32 = 256;

/// The index in RocksDB.
pub struct RocksKv {
    db: DB,
    cache: Cache,
    write_buffers: WriteBufferManager,
    /// Of one family.
    write_buffer_bytes: u64,
}

impl fmt::Debug for RocksKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RocksKv").field("path", &self.db.path()).finish_non_exhaustive()
    }
}

impl RocksKv {
    /// More than opening an index writes, unless it has some ten thousand tables.
    pub(crate) const OPEN_BYTES: u64 = 1 << 20;

    /// Opens the index in `path`, or makes it, with about `memory_bytes` for its caches and
    /// write buffers.
    ///
    /// # Errors
    /// `IndexLost`, when a file of it is missing or damaged; `Index`, when RocksDB cannot open it.
    pub fn open(path: &Path, memory_bytes: u64) -> Result<Self> {
        let memory_bytes = usize::try_from(memory_bytes).unwrap_or(usize::MAX);
        // Half for blocks read, half for entries not yet flushed.
        let cache = Cache::new_lru_cache(memory_bytes / 2);
        let write_buffers = WriteBufferManager::new_write_buffer_manager(memory_bytes / 2, false);
        let mut options = Options::default();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_atomic_flush(true);
        options.set_max_open_files(OPEN_FILES_MAX);
        options.set_write_buffer_manager(&write_buffers);
        options.set_max_background_jobs(2);
        options.set_keep_log_file_num(2);
        options.set_manifest_preallocation_size(MANIFEST_STEP_BYTES);
        options.set_paranoid_checks(true);
        let open = || {
            let families = Family::ALL.iter().map(|&family| {
                let options = family_options(family, &cache, memory_bytes);
                ColumnFamilyDescriptor::new(family.name(), options)
            });
            let default = ColumnFamilyDescriptor::new("default", Options::default());
            DB::open_cf_descriptors(&options, path, families.chain([default]))
        };
        let db = mended(path, open).map_err(not_opened)?;
        let write_buffer_bytes =
            u64::try_from(write_buffer_bytes(memory_bytes)).unwrap_or(u64::MAX);
        Ok(Self { db, cache, write_buffers, write_buffer_bytes })
    }

    /// Entries of one family of an index that nobody has open, which is not changed; but a manifest that a power cut tore
    /// is mended.
    pub(crate) fn peek<const N: usize>(
        path: &Path,
        family: Family,
        keys: [&[u8]; N],
    ) -> Result<[Option<Vec<u8>>; N]> {
        let mut options = Options::default();
        options.set_max_open_files(OPEN_FILES_MAX);
        options.set_paranoid_checks(true);
        let families = ["default", family.name()];
        let open = || DB::open_cf_for_read_only(&options, path, families, false);
        let db = mended(path, open).map_err(not_opened)?;
        let missing = || Error::corrupt("index", format!("family {} is missing", family.name()));
        let handle = db.cf_handle(family.name()).ok_or_else(missing)?;
        let mut values = [const { None }; N];
        for (value, key) in values.iter_mut().zip(keys) {
            *value = db.get_cf(handle, key)?;
        }
        Ok(values)
    }

    fn family(&self, family: Family) -> Result<&ColumnFamily> {
        self.db
            .cf_handle(family.name())
            .ok_or_else(|| Error::corrupt("index", format!("family {} is missing", family.name())))
    }
}

/// Opens it, if need be once more without the end of the manifest that a power cut tore. That older state of the index is
/// as good: the log makes up for what it lacks.
fn mended(
    path: &Path,
    open: impl Fn() -> std::result::Result<DB, rocksdb::Error>,
) -> std::result::Result<DB, rocksdb::Error> {
    open().or_else(|error| match error.kind() {
        ErrorKind::Corruption if was_mended(path) => open(),
        _ => Err(error),
    })
}

/// Whether a power cut had torn the manifest, and that was cut off.
fn was_mended(path: &Path) -> bool {
    let mend = || {
        let Some(torn) = Torn::find(path)? else { return Ok(false) };
        torn.cut()?;
        let is_whole = has_all_tables(path);
        if !is_whole {
            torn.put_back()?;
        }
        Ok(is_whole)
    };
    mend().unwrap_or_else(|error: io::Error| {
        // What RocksDB said of it is the answer.
        tracing::warn!(%error, path = %path.display(), "cannot mend the index's manifest");
        false
    })
}

/// Whether all tables that the manifest names are there.
fn has_all_tables(path: &Path) -> bool {
    let mut options = Options::default();
    // Without a limit all are opened at once.
    options.set_max_open_files(-1);
    options.set_paranoid_checks(true);
    DB::list_cf(&options, path).is_ok_and(|families| {
        DB::open_cf_for_read_only(&options, path, families, false).is_ok_and(|db| {
            let is_there = |name: &str| path.join(name.trim_start_matches('/')).exists();
            db.live_files().is_ok_and(|files| files.iter().all(|file| is_there(&file.name)))
        })
    })
}

/// A database that is damaged, or of which a file is gone, tells so in several ways.
fn not_opened(error: rocksdb::Error) -> Error {
    let is_missing = || error.to_string().contains("No such file or directory");
    match error.kind() {
        ErrorKind::Corruption | ErrorKind::NotFound => {
            Error::IndexLost { reason: error.to_string() }
        }
        ErrorKind::IOError if is_missing() => Error::IndexLost { reason: error.to_string() },
        _ => error.into(),
    }
}

/// A family is flushed with all others, so a buffer of a quarter of what is for buffers bounds them
/// together.
fn write_buffer_bytes(memory_bytes: usize) -> usize {
    (memory_bytes / 8).max(4 << 20)
}

fn family_options(family: Family, cache: &Cache, memory_bytes: usize) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    table.set_cache_index_and_filter_blocks(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);
    table.set_format_version(5);
    if matches!(family, Family::Hash | Family::Refs | Family::Dirent | Family::Inode) {
        table.set_bloom_filter(BLOOM_BITS_A_KEY, false);
    }
    if matches!(family, Family::Hash | Family::Refs) {
        // Looked up by whole keys only.
        table.set_data_block_index_type(DataBlockIndexType::BinaryAndHash);
        table.set_data_block_hash_ratio(HASH_INDEX_RATIO);
    }
    let mut options = Options::default();
    options.set_block_based_table_factory(&table);
    if family == Family::Hash {
        options.set_memtable_whole_key_filtering(true);
        options.set_memtable_prefix_bloom_ratio(MEMTABLE_BLOOM_RATIO);
    }
    options.set_write_buffer_size(write_buffer_bytes(memory_bytes));
    // Hashes are random bytes: nothing to gain.
    let compression =
        if family == Family::Hash { DBCompressionType::None } else { DBCompressionType::Lz4 };
    options.set_compression_type(compression);
    options
}

/// The options of the iterator hold the floor.
fn seek_last(
    mut iterator: DBRawIterator<'_>,
    key: &[u8],
    is_wanted: &dyn Fn(&[u8]) -> bool,
) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    iterator.seek_for_prev(key);
    while let Some((key, value)) = iterator.item() {
        if is_wanted(key) {
            return Ok(Some((key.to_vec(), value.to_vec())));
        }
        iterator.prev();
    }
    iterator.status()?;
    Ok(None)
}

fn floor_options(floor: &[u8]) -> ReadOptions {
    let mut options = ReadOptions::default();
    options.set_iterate_lower_bound(floor);
    options
}

fn visit_all(
    mut iterator: DBRawIterator<'_>,
    from: &[u8],
    to: &[u8],
    visit: &mut Visit<'_>,
) -> Result<()> {
    iterator.seek(from);
    while let Some((key, value)) = iterator.item() {
        if key >= to || visit(key, value)? == ControlFlow::Break(()) {
            break;
        }
        iterator.next();
    }
    iterator.status()?;
    Ok(())
}

/// Sets the iterator to the last entry at or before `from`, or else to the first behind it.
fn reach(iterator: &mut DBRawIterator<'_>, from: &[u8]) -> Result<()> {
    iterator.seek_for_prev(from);
    if !iterator.valid() {
        iterator.status()?;
        iterator.seek(from);
    }
    Ok(())
}

/// The options of the iterator hold the bounds.
fn visit_skipping(
    mut iterator: DBRawIterator<'_>,
    from: &[u8],
    visit: &mut VisitSkipping<'_>,
) -> Result<()> {
    reach(&mut iterator, from)?;
    while let Some((key, value)) = iterator.item() {
        match visit(key, value)? {
            Step::Next => iterator.next(),
            Step::Reach(key) => reach(&mut iterator, &key)?,
            Step::Stop => break,
        }
    }
    iterator.status()?;
    Ok(())
}

fn scan_options(to: &[u8]) -> ReadOptions {
    let mut options = ReadOptions::default();
    // The bound spares the iterator the tombstones behind the range.
    options.set_iterate_upper_bound(to);
    options
}

/// One moment of the index.
struct View<'a> {
    kv: &'a RocksKv,
    snapshot: SnapshotWithThreadMode<'a, DB>,
}

/// What reads the index: itself, or one moment of it.
trait Reader {
    /// The value of `key`.
    fn value(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// The values of several keys.
    fn values(&self, family: Family, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>> {
        keys.iter().map(|key| self.value(family, key)).collect()
    }

    fn iterator(&self, family: Family, options: ReadOptions) -> Result<DBRawIterator<'_>>;
}

impl Reader for RocksKv {
    fn value(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.db.get_cf(self.family(family)?, key)?)
    }

    fn values(&self, family: Family, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>> {
        let values = self.db.batched_multi_get_cf(self.family(family)?, keys, false);
        values.into_iter().map(|value| Ok(value?.map(|pinned| pinned.to_vec()))).collect()
    }

    fn iterator(&self, family: Family, options: ReadOptions) -> Result<DBRawIterator<'_>> {
        Ok(self.db.raw_iterator_cf_opt(self.family(family)?, options))
    }
}

impl Reader for View<'_> {
    fn value(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.snapshot.get_cf(self.kv.family(family)?, key)?)
    }

    fn iterator(&self, family: Family, options: ReadOptions) -> Result<DBRawIterator<'_>> {
        Ok(self.snapshot.raw_iterator_cf_opt(self.kv.family(family)?, options))
    }
}

impl<R: Reader> KvRead for R {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.value(family, key)
    }

    fn get_many(&self, family: Family, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>> {
        self.values(family, keys)
    }

    fn last_at_or_before(
        &self,
        family: Family,
        (floor, key): (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        seek_last(self.iterator(family, floor_options(floor))?, key, is_wanted)
    }

    /// With one iterator for both.
    fn scan_reaching(
        &self,
        family: Family,
        bounds: (&[u8], &[u8], &[u8]),
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        self.scan_skipping(family, bounds, &mut |key, value| {
            Ok(if visit(key, value)?.is_break() { Step::Stop } else { Step::Next })
        })
    }

    /// With one iterator for all parts.
    fn scan_skipping(
        &self,
        family: Family,
        (floor, from, to): (&[u8], &[u8], &[u8]),
        visit: &mut VisitSkipping<'_>,
    ) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let mut options = scan_options(to);
        options.set_iterate_lower_bound(floor);
        visit_skipping(self.iterator(family, options)?, from, visit)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        visit_all(self.iterator(family, scan_options(to))?, from, to, visit)
    }
}

impl Kv for RocksKv {
    fn apply(&self, batch: &Batch) -> Result<()> {
        let mut writes = WriteBatch::default();
        for write in batch {
            let family = self.family(write.family)?;
            match &write.value {
                Some(value) => writes.put_cf(family, &write.key, value),
                None => writes.delete_cf(family, &write.key),
            }
        }
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        self.db.write_opt(writes, &options)?;
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        let families =
            Family::ALL.iter().map(|&family| self.family(family)).collect::<Result<Vec<_>>>()?;
        let mut options = FlushOptions::default();
        options.set_wait(true);
        self.db.flush_cfs_opt(&families, &options)?;
        Ok(())
    }

    fn compact(&self) -> Result<()> {
        for family in Family::ALL {
            self.db.compact_range_cf(self.family(family)?, None::<&[u8]>, None::<&[u8]>);
        }
        Ok(())
    }

    fn view(&self) -> Box<dyn KvRead + '_> {
        Box::new(View { kv: self, snapshot: self.db.snapshot() })
    }

    fn disk_bytes(&self) -> u64 {
        // Without those that a compaction has replaced: RocksDB deletes them soon, whatever comes next.
        let of_family = |family: &Family| {
            let handle = self.db.cf_handle(family.name())?;
            self.db.property_int_value_cf(handle, "rocksdb.live-sst-files-size").ok().flatten()
        };
        Family::ALL.iter().filter_map(of_family).sum()
    }

    fn needed_bytes(&self) -> u64 {
        u64::try_from(self.write_buffers.get_usage())
            .unwrap_or(u64::MAX)
            .saturating_add(FLUSH_BYTES)
    }

    fn is_flush_near(&self) -> bool {
        let is_half_full = |family: &Family| {
            let handle = self.db.cf_handle(family.name())?;
            let held = self.db.property_int_value_cf(handle, "rocksdb.cur-size-active-mem-table");
            held.ok().flatten().map(|held| held >= self.write_buffer_bytes / 2)
        };
        self.write_buffers.get_usage() >= self.write_buffers.get_buffer_size() / 2
            || Family::ALL.iter().any(|family| is_half_full(family).unwrap_or(true))
    }

    fn memory_bytes(&self) -> u64 {
        let bytes = self.cache.get_usage() + self.write_buffers.get_usage();
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{MemoryKv, Write};

    #[test]
    fn a_scan_that_reaches_back_finds_the_same_as_one_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let rocks = RocksKv::open(directory.path(), 16 << 20).unwrap();
        let memory = MemoryKv::new();
        let put = |key: u8| Write { family: Family::Map, key: vec![key], value: Some(vec![key]) };
        let batch: Vec<Write> = [10, 12, 20, 25, 30].map(put).into();
        rocks.apply(&batch).unwrap();
        memory.apply(&batch).unwrap();
        for (floor, from, to) in (0..32).flat_map(|floor| {
            (floor..33).flat_map(move |from| (from..34).map(move |to| (floor, from, to)))
        }) {
            let found = |kv: &dyn KvRead| {
                let mut keys = Vec::new();
                kv.scan_reaching(Family::Map, (&[floor], &[from], &[to]), &mut |key, _| {
                    keys.extend_from_slice(key);
                    Ok(ControlFlow::Continue(()))
                })
                .unwrap();
                keys
            };
            let expected = found(&memory);
            assert_eq!(found(&rocks), expected, "{floor} {from} {to}");
            assert_eq!(found(&*rocks.view()), expected, "one moment: {floor} {from} {to}");
            let is_wanted = |key: &[u8]| !key[0].is_multiple_of(to);
            let last = |kv: &dyn KvRead| {
                kv.last_at_or_before(Family::Map, (&[floor], &[from]), &is_wanted).unwrap()
            };
            assert_eq!(last(&rocks), last(&memory), "{floor} {from}, but multiples of {to}");
        }
    }

    /// The place of a record that lies over the begin of a sector, in what was written from `from` on.
    fn sector_inside_a_record(manifest: &Path, from: usize) -> Option<usize> {
        let bytes = std::fs::read(manifest).unwrap();
        (from.next_multiple_of(512)..bytes.len()).step_by(512).find(|&at| {
            let mut torn = bytes.clone();
            let end = torn.len().min(at + 512);
            torn[at..end].fill(0);
            std::fs::write(manifest, &torn).unwrap();
            let is_torn = Torn::find(manifest.parent().unwrap()).unwrap().is_some();
            std::fs::write(manifest, &bytes).unwrap();
            is_torn
        })
    }

    #[test]
    fn a_manifest_without_a_sector_opens_at_the_state_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let write = |number: u8| Write {
            family: Family::Inode,
            key: vec![number],
            value: Some(vec![number; 100]),
        };
        let rocks = RocksKv::open(path, 16 << 20).unwrap();
        rocks.apply(&vec![write(1)]).unwrap();
        rocks.flush().unwrap();
        let manifest = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        let manifest = manifest
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("MANIFEST"))
            .max();
        let manifest = manifest.unwrap();
        let synced = usize::try_from(std::fs::metadata(&manifest).unwrap().len()).unwrap();
        rocks.apply(&Family::ALL.map(|family| Write { family, ..write(2) }).to_vec()).unwrap();
        rocks.flush().unwrap();
        drop(rocks);
        let at = sector_inside_a_record(&manifest, synced).expect("a flush writes over a sector");
        let mut torn = std::fs::read(&manifest).unwrap();
        let end = torn.len().min(at + 512);
        torn[at..end].fill(0);
        std::fs::write(&manifest, &torn).unwrap();
        let unmended = DB::open_cf_for_read_only(&Options::default(), path, ["default"], false);
        assert_eq!(unmended.unwrap_err().kind(), ErrorKind::Corruption);
        let rocks = RocksKv::open(path, 16 << 20).unwrap();
        assert_eq!(rocks.get(Family::Inode, &[1]).unwrap(), Some(vec![1; 100]));
        assert_eq!(rocks.get(Family::Inode, &[2]).unwrap(), None);
        drop(rocks);
        RocksKv::open(path, 16 << 20).unwrap();
    }

    #[test]
    fn values_read_at_once_are_those_read_one_by_one() {
        let directory = tempfile::tempdir().unwrap();
        let rocks = RocksKv::open(directory.path(), 16 << 20).unwrap();
        let key = |number: u32| number.to_be_bytes().to_vec();
        let write = |number: u32, value: Option<u32>| Write {
            family: Family::Inode,
            key: key(number),
            value: value.map(|value| vec![7; usize::try_from(value).unwrap()]),
        };
        // Some in tables, others in memory, some over others, some deleted in each way.
        rocks.apply(&(0..600).map(|number| write(number, Some(number))).collect()).unwrap();
        rocks.flush().unwrap();
        let changed =
            |number: u32| write(number, (!number.is_multiple_of(3)).then_some(number + 1));
        rocks.apply(&(300..900).map(changed).collect()).unwrap();
        rocks.apply(&(0..900).step_by(7).map(|number| write(number, None)).collect()).unwrap();
        // In no order, each twice, and some that there are not.
        let keys: Vec<_> = (0..1000).map(|number| key(number * 613 % 1000)).collect();
        let keys = [keys.clone(), keys].concat();
        for kv in [&rocks as &dyn KvRead, &*rocks.view()] {
            let together = kv.get_many(Family::Inode, &keys).unwrap();
            let alone = keys.iter().map(|key| kv.get(Family::Inode, key).unwrap());
            assert!(together == alone.collect::<Vec<_>>());
            assert!(together.iter().filter(|value| value.is_some()).count() > 1000);
        }
        assert!(rocks.get_many(Family::Inode, &[]).unwrap().is_empty());
    }
}

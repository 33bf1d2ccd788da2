//! Opening a store: lock, format, recovery of the log, the tables in memory.
//!
//! ```text
//! DATA_DIR/lock          held while a process has the store open
//! DATA_DIR/FORMAT        "slackwater 2"
//! DATA_DIR/index/        RocksDB
//! DATA_DIR/log/          segments as they were written
//! DATA_DIR/compacted/    segments that compaction made
//! DATA_DIR/copies/       a copy of the index
//! DATA_DIR/reserve*      room that is kept free: for deletes, and for the next start
//! ```

use std::collections::{HashMap, HashSet};
use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use quick_cache::sync::Cache;

use crate::access_times::AccessTimes;
use crate::codec::{Decoder, Encoder};
use crate::commit::{Committer, Leader};
use crate::core::{BlockWeight, Budget, Core, Tally};
use crate::dedup::{DedupIndex, RECENT_CHUNK_BYTES};
use crate::disk::{Disk, FileRole, LocalDisk};
use crate::error::{Error, Result};
use crate::file::FileTable;
use crate::id::{InodeId, SegmentId, StoreId};
use crate::index_copy::{self, IndexCopies};
use crate::kv::{Family, Kv, RocksKv, Write, prefix_end};
use crate::log::{Recovered, Recovery, log_file};
use crate::options::Options;
use crate::rebuild;
use crate::record::{Body, Counters, InodeRecord, LogPosition, SegmentRecord, key};
use crate::reserve;
use crate::resolve::Resolver;
use crate::scrub::Scrub;
use crate::segments::Segments;
use crate::stats::Summary;
use crate::time::Clock;
use crate::units::BLOCK_BYTES_U64;

/// The format that this program writes; FORMAT.md describes it.
pub(crate) const FORMAT_VERSION: u32 = 2;

const STORE_RECORD_VERSION: u8 = 1;

/// How far the threads that hash stand back: 5 is a third of the weight of a usual thread.
const HASH_NICENESS: i32 = 5;

/// Only the owner reaches the data directory: what is in it is every client's disk. One that is there keeps its mode.
const DATA_DIR_MODE: u32 = 0o700;

/// The folders that hold the names of those that are missing on the way to a path.
fn parents_of_missing(path: &Path) -> Vec<&Path> {
    let missing =
        path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let parents = missing.filter_map(Path::parent);
    // A path of one part lies in the working directory.
    let named = |parent: &Path| !parent.as_os_str().is_empty();
    parents.map(|parent| if named(parent) { parent } else { Path::new(".") }).collect()
}

fn sync_folder(folder: &Path) -> std::io::Result<()> {
    File::open(folder).and_then(|opened| opened.sync_all())
}

/// How long [`lock`] waits. A process that starts another gives it all its open files, the lock among them, until the new
/// program runs (`fork`, then `exec`). So the lock can outlive the store for a moment, longer on a busy machine.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// The pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Takes the data directory for this process. Waits for [`LOCK_WAIT`] at most.
pub(crate) fn lock(data_dir: &Path) -> Result<File> {
    lock_within(data_dir, LOCK_WAIT)
}

fn lock_within(data_dir: &Path, limit: Duration) -> Result<File> {
    let fail = |action| {
        let place = data_dir.display().to_string();
        move |source| Error::io(action, place, source)
    };
    let parents = parents_of_missing(data_dir);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(DATA_DIR_MODE)
        .create(data_dir)
        .map_err(fail("create"))?;
    // All that is ever acknowledged lies behind these names.
    parents
        .iter()
        .try_for_each(|parent| sync_folder(parent))
        .map_err(fail("sync the folder of"))?;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(data_dir.join("lock"))
        .map_err(fail("open the lock file in"))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < limit => {
                std::thread::sleep(LOCK_PAUSE);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked { path: data_dir.to_path_buf() });
            }
            Err(TryLockError::Error(source)) => return Err(fail("lock")(source)),
        }
    }
}

/// Checks the format of an existing store, or stamps a new one.
pub(crate) fn check_format(data_dir: &Path) -> Result<()> {
    let path = data_dir.join("FORMAT");
    let place = || path.display().to_string();
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return stamp_format(data_dir, &path);
        }
        Err(source) => return Err(Error::io("read", place(), source)),
    };
    let version = text.strip_prefix("slackwater ").and_then(|rest| rest.trim_end().parse().ok());
    match version {
        Some(FORMAT_VERSION) => Ok(()),
        Some(got) => Err(Error::Format { got, expected: FORMAT_VERSION }),
        None => Err(Error::corrupt(
            place(),
            format!("`{}`, expected `slackwater {FORMAT_VERSION}`", text.trim_end().escape_debug()),
        )),
    }
}

fn stamp_format(data_dir: &Path, path: &Path) -> Result<()> {
    let fail = |source| Error::io("write", path.display().to_string(), source);
    if data_dir.join("log").exists() || data_dir.join("index").exists() {
        return Err(Error::corrupt(
            path.display().to_string(),
            "it is missing, yet the directory holds a store",
        ));
    }
    // Written aside and renamed, so that a crash leaves no half of it.
    let aside = data_dir.join("FORMAT.new");
    let mut file = File::create(&aside).map_err(fail)?;
    file.write_all(format!("slackwater {FORMAT_VERSION}\n").as_bytes()).map_err(fail)?;
    file.sync_all().map_err(fail)?;
    std::fs::rename(&aside, path).map_err(fail)?;
    sync_folder(data_dir).map_err(fail)
}

/// Opens index and segments in a directory.
pub(crate) fn open_local(options: &Options) -> Result<(Arc<dyn Kv>, Arc<dyn Disk>)> {
    let disk = LocalDisk::open(&options.data_dir)?;
    rebuild::remove_unfinished(&options.data_dir);
    let path = options.data_dir.join("index");
    // RocksDB takes a folder without this file for a new database, and clears it.
    let is_headless = !path.join("CURRENT").exists()
        && std::fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_some());
    if is_headless && disk.list()?.iter().any(|name| name.role == FileRole::Log) {
        return Err(Error::IndexLost { reason: format!("{} has no CURRENT", path.display()) });
    }
    let budget = Budget::of(options);
    let open = || RocksKv::open(&path, budget.index_bytes);
    // It writes as it opens; what it deletes then, and what is deleted later, makes room.
    let held = disk.reserved_for_start_bytes();
    let kv = reserve::or_give_back(&disk, open)?;
    reserve::take_again_at_start(&disk, held);
    // The folder of a new index: without its name a store with a copy would not open.
    sync_folder(&options.data_dir)
        .map_err(|source| Error::io("sync", options.data_dir.display().to_string(), source))?;
    Ok((Arc::new(kv), Arc::new(disk)))
}

/// What a store is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    Serve,
    /// The index is being made anew: nothing of a file is removed, and chunks that are damaged do
    /// not end the replay, if it is sure that they were acknowledged. All up to `known` was: the
    /// index that is to be replaced has it.
    Rebuild {
        known: Option<LogPosition>,
    },
}

/// Recovers the log into the index and builds what is held in memory.
pub(crate) fn open_core(
    kv: Arc<dyn Kv>,
    disk: Arc<dyn Disk>,
    options: Options,
    opening: Opening,
) -> Result<Core> {
    let budget = Budget::of(&options);
    let segments = Arc::new(Segments::new(Arc::clone(&disk), budget.directories_bytes / 2));
    let durable = position(kv.as_ref())?;
    let recovered = recover((&kv, &disk, &segments), durable, opening)?;
    if recovered.replayed > 0 {
        tracing::info!(commits = recovered.replayed, "replayed the log");
    }
    let records = load_segments(kv.as_ref(), &segments)?;
    let kept_from = durable.map_or(SegmentId::new(0), |at| at.segment);
    let kept = (kept_from, recovered.log.segment());
    let copies = open_copies(disk.as_ref(), (recovered.log.store(), &records), kept, opening)?;
    let ids: Vec<SegmentId> =
        records.iter().filter(|(_, record)| record.chunks > 0).map(|(id, _)| *id).collect();
    let recent_bytes = options.recent_chunks_max.map_or(budget.directories_bytes / 2, |chunks| {
        u64::try_from(chunks).unwrap_or(u64::MAX).saturating_mul(RECENT_CHUNK_BYTES)
    });
    let dedup = reserve::or_give_back(disk.as_ref(), || {
        DedupIndex::open(kv.as_ref(), &segments, ids.iter().copied(), recent_bytes)
    })?;
    let file_bytes = total_bytes(disk.as_ref(), &segments)?;
    let (store, handle_key, counters) = identity(kv.as_ref(), &recovered)?;
    let start = LogPosition { segment: kept_from, offset_bytes: 0, sequence: 0 };
    let Recovered { log, sealed, replayed } = recovered;
    let spare_bytes = AtomicU64::new(log.spare_bytes());
    let committer = Committer::new(Leader::new(log, counters, records, &sealed))?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.hash_threads.max(1))
        .thread_name(|number| format!("slackwater-hash-{number}"))
        .start_handler(|_| give_way())
        .build()
        .map_err(|error| Error::io("start", "the hash pool", std::io::Error::other(error)))?;
    let index_bytes = AtomicU64::new(kv.disk_bytes());
    let blocks = usize::try_from(budget.blocks_bytes / BLOCK_BYTES_U64).unwrap_or(usize::MAX);
    Ok(Core {
        store,
        handle_key,
        budget,
        resolver: Resolver::new(Arc::clone(&kv), budget.windows_bytes),
        kv,
        disk,
        segments,
        dedup: Arc::new(dedup),
        files: FileTable::default(),
        access_times: AccessTimes::default(),
        clock: Clock::default(),
        steady: Mutex::default(),
        committer,
        blocks: Cache::with_weighter(blocks, budget.blocks_bytes, BlockWeight),
        tally: Tally::default(),
        pool,
        file_bytes: AtomicU64::new(file_bytes),
        spare_bytes,
        index_bytes,
        checkpoint: Mutex::new(start),
        copies,
        replayed_commits: replayed,
        summary: Mutex::new(Summary::default()),
        much_dirty: Arc::default(),
        scrub: Scrub::default(),
        aside: Mutex::default(),
        directory_moves: Arc::default(),
        reclaim: Mutex::new(()),
        gc: Mutex::new(()),
        options,
    })
}

/// Replays the log into the index, which has all up to `durable`.
fn recover(
    (kv, disk, segments): (&Arc<dyn Kv>, &Arc<dyn Disk>, &Arc<Segments>),
    durable: Option<LogPosition>,
    opening: Opening,
) -> Result<Recovered> {
    // A rebuild has looked at the copies, and found none whole.
    if opening == Opening::Serve && durable.is_none() && index_copy::any(disk.as_ref())? {
        let reason = "it is empty, yet there is a copy of it: the index was lost".to_owned();
        return Err(Error::IndexLost { reason });
    }
    Recovery {
        disk: Arc::clone(disk),
        segments: Arc::clone(segments),
        // Nothing is changed before it is sure that index and log belong together.
        store: known_store(kv.as_ref())?.map(|(store, _)| store),
        position: durable,
        opening,
        apply: &mut |mut batch, position| {
            let key = key::META_POSITION.to_vec();
            batch.push(Write { family: Family::Meta, key, value: Some(position.encode()) });
            reserve::fill_index(kv.as_ref(), disk.as_ref(), &batch)
        },
    }
    .run()
}

/// Finds the copy of the index, and takes away what nobody needs; nothing while the index is made.
fn open_copies(
    disk: &dyn Disk,
    (store, records): (StoreId, &HashMap<SegmentId, SegmentRecord>),
    kept: (SegmentId, SegmentId),
    opening: Opening,
) -> Result<IndexCopies> {
    if opening != Opening::Serve {
        return Ok(IndexCopies::default());
    }
    let copies = IndexCopies::open(disk, store)?;
    remove_leftovers(disk, records, kept, &copies)?;
    Ok(copies)
}

fn position(kv: &dyn Kv) -> Result<Option<LogPosition>> {
    let bytes = kv.get(Family::Meta, key::META_POSITION)?;
    bytes.as_deref().map(LogPosition::decode).transpose()
}

fn load_segments(kv: &dyn Kv, segments: &Segments) -> Result<HashMap<SegmentId, SegmentRecord>> {
    let mut records = HashMap::new();
    kv.scan(Family::Segment, &[], &prefix_end(&[0xff; 8]), &mut |key, value| {
        let id = crate::record::decode_segment(key)?;
        let record = SegmentRecord::decode(value)?;
        if let Some(offset) = record.directory_offset_bytes {
            segments.put_sealed(id, record.file, offset, record.chunks);
        }
        records.insert(id, record);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(records)
}

/// Removes files that a crash left between making a file and naming it, or between moving its
/// segments and removing it; but for log files that a replay, or a rebuild of the index, needs.
fn remove_leftovers(
    disk: &dyn Disk,
    records: &HashMap<SegmentId, SegmentRecord>,
    (kept_from, open): (SegmentId, SegmentId),
    copies: &IndexCopies,
) -> Result<()> {
    let named: HashSet<_> = records.values().map(|record| record.file).collect();
    for name in disk.list()? {
        let is_open = name == log_file(open);
        let is_segment = matches!(name.role, FileRole::Log | FileRole::Compacted);
        if is_open || !is_segment || named.contains(&name) {
            continue;
        }
        if !copies.retire(name, disk.open(name)?.length_bytes()?, kept_from) {
            tracing::info!(%name, "removing a segment file that nothing names");
            disk.remove(name)?;
        }
    }
    Ok(())
}

fn total_bytes(disk: &dyn Disk, segments: &Segments) -> Result<u64> {
    let mut total = 0;
    for name in disk.list()? {
        // A copy of the index is not held open: nobody reads it.
        let file = match name.role {
            FileRole::Log | FileRole::Compacted => segments.open_file(name)?,
            FileRole::IndexCopy | FileRole::IndexDraft => disk.open(name)?,
        };
        total += file.length_bytes()?;
    }
    Ok(total)
}

/// The store's id, the key of file handles, and the counters; made anew for a new store.
fn identity(kv: &dyn Kv, recovered: &Recovered) -> Result<(StoreId, [u8; 32], Counters)> {
    let Some((store, handle_key)) = known_store(kv)? else {
        let mut handle_key = [0; 32];
        getrandom::fill(&mut handle_key).map_err(|error| {
            Error::io("read random bytes", "the operating system", std::io::Error::other(error))
        })?;
        let counters = Counters { next_inode: 1, next_layer: 1, ..Counters::default() };
        return Ok((recovered.log.store(), handle_key, counters));
    };
    let counters = kv.get(Family::Meta, key::META_COUNTERS)?;
    let counters = counters.as_deref().map(Counters::decode).transpose()?.unwrap_or_default();
    Ok((store, handle_key, counters))
}

/// The store that the index is of and its key of handles; refuses another format.
fn known_store(kv: &dyn Kv) -> Result<Option<(StoreId, [u8; 32])>> {
    let bytes = kv.get(Family::Meta, key::META_STORE)?;
    bytes.as_deref().map(decode_store).transpose()
}

pub(crate) fn decode_store(bytes: &[u8]) -> Result<(StoreId, [u8; 32])> {
    let mut d = Decoder::versioned("store record", bytes, STORE_RECORD_VERSION)?;
    let (got, store, handle_key) = (d.u32()?, StoreId::from_bytes(d.array()?), d.array()?);
    d.end()?;
    if got != FORMAT_VERSION {
        return Err(Error::Format { got, expected: FORMAT_VERSION });
    }
    Ok((store, handle_key))
}

/// The first commit of a new store: its identity and its root directory.
pub(crate) fn initialize(core: &Core) -> Result<()> {
    if core.kv.get(Family::Meta, key::META_STORE)?.is_some() {
        return Ok(());
    }
    let mut encoder = Encoder::versioned(STORE_RECORD_VERSION);
    encoder.u32(FORMAT_VERSION).raw(core.store.as_bytes()).raw(&core.handle_key);
    let record = encoder.finish();
    let generation = crate::paths::random_generation()?;
    core.commit(move |txn| {
        txn.put(Family::Meta, key::META_STORE.to_vec(), record);
        let root = txn.take_inode()?;
        assert_eq!(root, InodeId::ROOT, "the root is the first inode of a new store");
        let now = txn.now();
        let record = InodeRecord {
            generation,
            mode: 0o755,
            uid: 0,
            gid: 0,
            link_count: 2,
            size_bytes: 0,
            used_blocks: 0,
            accessed_at: now,
            modified_at: now,
            changed_at: now,
            created_at: now,
            body: Body::Directory { parent: root, next_cookie: crate::namespace::FIRST_COOKIE },
        };
        txn.put_inode(root, &record);
        Ok(())
    })
}

/// Lets other threads of the machine go first: a stream of writes must not hold up reads, which wait
/// for a processor far shorter than a commit waits for the disk.
fn give_way() {
    // Without it everything works, only less evenly.
    if let Err(error) = rustix::process::setpriority_process(None, HASH_NICENESS) {
        tracing::debug!(%error, "the hash threads keep their priority");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_all_folders_that_a_start_makes_are_to_be_synced() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        let data_dir = top.join("a/b/data");
        let parents = [top.join("a/b"), top.join("a"), top.to_path_buf()];
        assert_eq!(parents_of_missing(&data_dir), parents);
        std::fs::create_dir(top.join("a")).unwrap();
        assert_eq!(parents_of_missing(&data_dir), parents[..2]);
        drop(lock(&data_dir).unwrap());
        assert!(parents_of_missing(&data_dir).is_empty());
        let here = "no-such-folder-beside-the-tests";
        assert_eq!(parents_of_missing(Path::new(here)), [Path::new(".")]);
    }

    /// What a process has that was forked and does not run its own program yet.
    #[test]
    fn a_lock_that_is_held_for_a_moment_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock(directory.path()).unwrap();
        let refused = lock_within(directory.path(), Duration::ZERO).unwrap_err();
        assert!(matches!(refused, Error::Locked { .. }), "{refused}");
        let holder = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(held);
        });
        // Far longer than a busy machine takes.
        lock_within(directory.path(), Duration::from_secs(60)).unwrap();
        holder.join().unwrap();
    }
}

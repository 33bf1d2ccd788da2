//! Many threads on one store for a bounded time. Every block says which file it belongs to, which
//! block it is and which version, so a torn, foreign, lost or stale block is noticed where it is
//! read. Each run ends with `check`, a restart, and a comparison of every byte.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{assert_sound, content, path};
use slackwater_blockstore::disk::{Disk, MemoryDisk};
use slackwater_blockstore::kv::{Kv, MemoryKv};
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, CreateMode, DirectoryEntry, InodeId, Name, Options,
    SetAttributes, SnapshotId, SnapshotRequest, Source, Stability, Store,
};

/// How long the threads of the main tests work.
const WORK: Duration = Duration::from_millis(2500);

/// Beyond this a thread that has not come back waits for a lock that nobody will release.
const PATIENCE: Duration = Duration::from_secs(60);

/// Files that several threads write to.
const SHARED_FILES: u64 = 4;

/// More map entries than one slice of collapse moves.
const SHARED_BLOCKS: u64 = 1100;

/// Threads that write to the shared files, each to its own stripes.
const WRITERS: u64 = 3;

/// Blocks of a stripe, and the longest write.
const STRIPE_BLOCKS: u64 = 8;

/// Snapshots that are kept and read again.
const SNAPSHOTS_KEPT: usize = 6;

/// Looks at a live store before what `check` finds counts as damage: a segment that compaction
/// moves under one look is in its place at the next, and damage stays.
const LIVE_CHECK_TRIES: usize = 1;

/// Names that no thread touches: every listing shows each of them once.
const STEADY_NAMES: usize = 40;

/// Numbers that look random, the same in each run.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number under `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// The bytes of one version of one block; every third version compresses.
fn stamp(family: u64, block: u64, version: u64) -> Vec<u8> {
    let header: Vec<u8> = [family, block, version].map(u64::to_be_bytes).concat();
    let mut bytes = header.clone();
    if version.is_multiple_of(3) {
        bytes.extend(header.iter().copied().cycle().take(BLOCK_BYTES - header.len()));
    } else {
        let mut random = Random::new(family << 48 ^ block << 24 ^ version);
        while bytes.len() < BLOCK_BYTES {
            bytes.extend(random.below(u64::MAX).to_be_bytes());
        }
    }
    bytes
}

/// The version of a block as read; 0 for a hole. Anything but one whole stamp fails.
fn version_of(family: u64, block: u64, bytes: &[u8], place: &str) -> u64 {
    assert_eq!(bytes.len(), BLOCK_BYTES, "{place}: block {block} is not whole");
    if bytes.iter().all(|byte| *byte == 0) {
        return 0;
    }
    let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let got = (field(0), field(8), field(16));
    assert_eq!((got.0, got.1), (family, block), "{place}: a foreign block at {block}: {got:?}");
    assert!(bytes == stamp(family, block, got.2), "{place}: block {block} is torn, {got:?}");
    got.2
}

/// A file that several threads write to. Versions of a block only grow, and its one writer notes
/// each before it hands it in and after it was taken.
struct Shared {
    name: String,
    inode: InodeId,
    /// Files of one family have equal blocks, so that they deduplicate.
    family: u64,
    handed: Vec<AtomicU64>,
    acknowledged: Vec<AtomicU64>,
}

impl Shared {
    fn make(store: &Store, number: u64) -> Self {
        let name = format!("shared/f{number}");
        let made = store.create_file(&path(&name), SHARED_BLOCKS * BLOCK_BYTES_U64).unwrap();
        let zeros = || (0..SHARED_BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let inode = made.attributes.inode;
        Self { name, inode, family: number / 2, handed: zeros(), acknowledged: zeros() }
    }

    fn floor(&self) -> Vec<u64> {
        self.acknowledged.iter().map(|version| version.load(Ordering::SeqCst)).collect()
    }

    fn ceiling(&self) -> Vec<u64> {
        self.handed.iter().map(|version| version.load(Ordering::SeqCst)).collect()
    }

    /// Every block of `bytes`, which begin at block `first`, is a version within the bounds.
    fn verify(&self, first: u64, bytes: &[u8], (low, high): (&[u64], &[u64]), place: &str) {
        for (block, bytes) in (first..).zip(bytes.chunks(BLOCK_BYTES)) {
            let version = version_of(self.family, block, bytes, place);
            let (low, high) = (low[index(block)], high[index(block)]);
            assert!(
                (low..=high).contains(&version),
                "{place}: {} block {block} is version {version}, expected {low} to {high}",
                self.name
            );
        }
    }
}

/// What the threads share.
struct World {
    store: Arc<Store>,
    files: Vec<Shared>,
    stop: AtomicBool,
    private: InodeId,
}

impl World {
    fn new(store: Arc<Store>) -> Self {
        let files = (0..SHARED_FILES).map(|number| Shared::make(&store, number)).collect();
        let private = store.create_file(&path("private/a"), 0).unwrap().attributes.inode;
        Self { store, files, stop: AtomicBool::new(false), private }
    }

    fn going(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }

    fn any_file(&self, random: &mut Random) -> &Shared {
        &self.files[index(random.below(SHARED_FILES))]
    }

    /// Writes the blocks' next versions. They have one writer, which is the caller.
    fn write_next(&self, file: &Shared, (first, count): (u64, u64), stability: Stability) {
        let mut data = Vec::new();
        for block in first..first + count {
            let version = file.handed[index(block)].fetch_add(1, Ordering::SeqCst) + 1;
            data.extend(stamp(file.family, block, version));
        }
        let offset = first * BLOCK_BYTES_U64;
        self.store.write(file.inode, offset, Bytes::from(data), stability).unwrap();
        for block in first..first + count {
            file.acknowledged[index(block)].fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn writer(world: &World, number: u64) {
    let mut random = Random::new(number + 1);
    let stripes = SHARED_BLOCKS / STRIPE_BLOCKS / WRITERS;
    while world.going() {
        let file = world.any_file(&mut random);
        let stripe = random.below(stripes) * WRITERS + number;
        let skip = random.below(STRIPE_BLOCKS);
        let range = (stripe * STRIPE_BLOCKS + skip, 1 + random.below(STRIPE_BLOCKS - skip));
        let stable = random.below(20) == 0;
        let stability = if stable { Stability::FileSync } else { Stability::Unstable };
        world.write_next(file, range, stability);
        if random.below(50) == 0 {
            world.store.commit(file.inode).unwrap();
        }
    }
}

fn reader(world: &World, number: u64) {
    let mut random = Random::new(100 + number);
    while world.going() {
        let file = world.any_file(&mut random);
        let first = random.below(SHARED_BLOCKS);
        let count = 1 + random.below(300).min(SHARED_BLOCKS - first - 1);
        let (offset, length) = (first * BLOCK_BYTES_U64, index(count) * BLOCK_BYTES);
        let low = file.floor();
        let source = Source::File(file.inode);
        let reply = match random.below(2) {
            0 => world.store.read(source, offset, length).unwrap(),
            _ => match world.store.try_read(source, offset, length) {
                Some(reply) => reply.unwrap(),
                None => continue,
            },
        };
        assert_eq!(reply.length_bytes, length, "a short read inside the file");
        file.verify(first, &reply.to_vec(), (&low, &file.ceiling()), "a read");
    }
}

/// A snapshot and the versions that each of its blocks may have.
struct Taken {
    id: SnapshotId,
    file: usize,
    low: Vec<u64>,
    high: Vec<u64>,
    /// As first read: it must never read otherwise.
    bytes: Option<Vec<u8>>,
}

impl Taken {
    fn verify(&mut self, world: &World) {
        let bytes = content(&world.store, Source::Snapshot(self.id));
        assert_eq!(bytes.len() as u64, SHARED_BLOCKS * BLOCK_BYTES_U64);
        match &self.bytes {
            Some(before) => assert!(*before == bytes, "snapshot {} changed", self.id),
            None => {
                let file = &world.files[self.file];
                file.verify(0, &bytes, (&self.low, &self.high), "a snapshot");
                self.bytes = Some(bytes);
            }
        }
    }
}

/// Takes snapshots while others write, reads them again later, and deletes them.
fn snapshotter(world: &World, number: u64) -> Vec<Taken> {
    let mut random = Random::new(200 + number);
    let mut kept: VecDeque<Taken> = VecDeque::new();
    let mut clones = 0;
    while world.going() {
        let file = index(random.below(SHARED_FILES));
        let shared = &world.files[file];
        let low = shared.floor();
        let request = SnapshotRequest::default();
        let id = world.store.snapshot(&path(&shared.name), request).unwrap().id;
        kept.push_back(Taken { id, file, low, high: shared.ceiling(), bytes: None });
        let any = index(random.below(kept.len() as u64));
        kept[any].verify(world);
        if random.below(2) == 0 {
            clones += 1;
            kept[any].verify(world);
            clone_and_delete(world, &kept[any], &format!("clones/{number}/{clones}"));
        }
        while kept.len() > SNAPSHOTS_KEPT {
            let at = index(random.below(kept.len() as u64));
            let old = kept.remove(at).unwrap();
            world.store.delete_snapshot(old.id).unwrap();
        }
    }
    kept.into()
}

/// A clone reads as its snapshot, takes writes of its own, and goes without a trace.
fn clone_and_delete(world: &World, taken: &Taken, name: &str) {
    let store = &world.store;
    let mut model = taken.bytes.clone().unwrap();
    let inode = store.clone_snapshot(taken.id, &path(name)).unwrap().attributes.inode;
    let mut random = Random::new(model.len() as u64 ^ inode.get());
    for step in 1..12 {
        let block = random.below(SHARED_BLOCKS);
        let data = stamp(1000 + inode.get(), block, step);
        let at = index(block) * BLOCK_BYTES;
        model[at..at + BLOCK_BYTES].copy_from_slice(&data);
        store
            .write(inode, block * BLOCK_BYTES_U64, Bytes::from(data), Stability::Unstable)
            .unwrap();
        if step == 6 {
            store.commit(inode).unwrap();
        }
    }
    let snapshot = store.snapshot(&path(name), SnapshotRequest::default()).unwrap().id;
    assert!(content(store, Source::File(inode)) == model, "clone {name} differs");
    store.remove_path(&path(name)).unwrap();
    assert!(content(store, Source::Snapshot(snapshot)) == model, "the snapshot of {name} differs");
    store.delete_snapshot(snapshot).unwrap();
}

/// One file of one thread: odd offsets, truncates, renames, against an exact model.
fn private(world: &World) -> (Vec<u8>, String) {
    let mut random = Random::new(300);
    let mut model: Vec<u8> = Vec::new();
    let mut name = "private/a".to_owned();
    let mut version = 0;
    let store = &world.store;
    while world.going() {
        version += 1;
        match random.below(8) {
            0 => {
                let size = random.below(3 << 20);
                let set = SetAttributes { size_bytes: Some(size), ..SetAttributes::default() };
                store.set_attributes(world.private, &set, None).unwrap();
                model.resize(index(size), 0);
            }
            1 => {
                let to = format!("private/{}", version % 7);
                if to != name {
                    store.rename_path(&path(&name), &path(&to)).unwrap();
                    name = to;
                }
            }
            2 => drop(store.commit(world.private).unwrap()),
            3 => {
                let id = store.snapshot(&path(&name), SnapshotRequest::default()).unwrap().id;
                assert!(content(store, Source::Snapshot(id)) == model, "a snapshot of {name}");
                store.delete_snapshot(id).unwrap();
            }
            _ => {
                let offset = index(random.below(2 << 20));
                let data = stamp(500, random.below(9), version)
                    .repeat(4)
                    .split_off(index(random.below(4 * BLOCK_BYTES_U64 - 1)));
                let end = offset + data.len();
                model.resize(model.len().max(end), 0);
                model[offset..end].copy_from_slice(&data);
                let data = Bytes::from(data);
                store.write(world.private, offset as u64, data, Stability::Unstable).unwrap();
            }
        }
        if version % 16 == 0 {
            assert!(content(store, Source::File(world.private)) == model, "{name} differs");
        }
    }
    (model, name)
}

/// Names come, move and go in a directory whose other names every listing shows once.
fn names(world: &World) {
    let store = &world.store;
    let directory = store.create_directories(&path("names")).unwrap().inode;
    let name = |text: String| Name::new(text.as_bytes()).unwrap();
    let steady: HashSet<Name> = (0..STEADY_NAMES).map(|n| name(format!("steady{n}"))).collect();
    let none = SetAttributes::default();
    for steady in &steady {
        store.create(directory, steady, CreateMode::Guarded, &none).unwrap();
    }
    let mut step = 0;
    while world.going() {
        step += 1;
        let (first, second) = (name(format!("a{step}")), name(format!("b{step}")));
        let inode =
            store.create(directory, &first, CreateMode::Guarded, &none).unwrap().attributes.inode;
        let data = Bytes::from(stamp(700, step, 1));
        store.write(inode, 0, data, Stability::Unstable).unwrap();
        store.rename(directory, &first, directory, &second).unwrap();
        let listed = list(store, directory);
        let found: HashSet<Name> = listed.iter().map(|entry| entry.name.clone()).collect();
        assert_eq!(found.len(), listed.len(), "a name was listed twice");
        assert!(steady.is_subset(&found), "a name was left out");
        assert!(found.contains(&second) && !found.contains(&first), "the rename is not seen");
        store.remove(directory, &second).unwrap();
    }
}

fn list(store: &Store, directory: InodeId) -> Vec<DirectoryEntry> {
    let mut all: Vec<DirectoryEntry> = Vec::new();
    loop {
        let after = all.last().map_or(0, |entry| entry.cookie);
        let page = store.read_directory(directory, after, 7).unwrap();
        all.extend(page.entries);
        if page.end {
            return all;
        }
    }
}

/// Collects garbage and makes checkpoints while all others work.
fn collector(world: &World) {
    while world.going() {
        world.store.gc().unwrap();
        world.store.checkpoint().unwrap();
        let stats = world.store.stats();
        assert!(!stats.poisoned && stats.file_count > 0, "{stats:?}");
    }
}

/// Verifies the invariants while all others work: they hold at every moment.
fn inspector(world: &World) {
    let mut round = 0_u64;
    while world.going() {
        round += 1;
        let problems = || world.store.check(round.is_multiple_of(2)).unwrap().problems;
        let found: Vec<_> =
            (0..LIVE_CHECK_TRIES).map(|_| problems()).take_while(|p| !p.is_empty()).collect();
        assert!(found.len() < LIVE_CHECK_TRIES, "check {round} on a live store: {found:#?}");
    }
}

/// What the threads leave behind.
#[derive(Default)]
struct Left {
    snapshots: Vec<Taken>,
    private: Option<(Vec<u8>, String)>,
}

type Thread = Box<dyn FnOnce(&World) -> Left + Send>;

/// Runs the threads; fails when one does, or when one does not come back.
fn run(world: &Arc<World>, threads: Vec<(&'static str, Thread)>) -> Vec<Left> {
    let (sender, receiver) = mpsc::channel();
    let mut handles = Vec::new();
    let mut waiting: HashSet<&'static str> = HashSet::new();
    for (name, work) in threads {
        waiting.insert(name);
        let (world, sender) = (Arc::clone(world), sender.clone());
        handles.push(std::thread::spawn(move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&world)));
            world.stop.store(done.is_err() || !world.going(), Ordering::SeqCst);
            let failed = done.is_err();
            sender.send((name, done.ok())).unwrap();
            assert!(!failed, "thread {name} failed");
        }));
    }
    let end = Instant::now() + WORK;
    while world.going() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    world.stop.store(true, Ordering::SeqCst);
    let mut left = Vec::new();
    for _ in &handles {
        let Ok((name, result)) = receiver.recv_timeout(PATIENCE) else {
            panic!("threads that never came back: {waiting:?}");
        };
        waiting.remove(name);
        left.extend(result);
    }
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    left
}

fn named(name: &'static str, work: impl FnOnce(&World) + Send + 'static) -> (&'static str, Thread) {
    let work: Thread = Box::new(move |world| {
        work(world);
        Left::default()
    });
    (name, work)
}

/// All threads on one store, which is then quiet, checked and compared.
fn work_on(store: Arc<Store>) -> (Arc<World>, Vec<Left>) {
    let world = Arc::new(World::new(store));
    let mut threads = vec![
        named("writer 0", |world| writer(world, 0)),
        named("writer 1", |world| writer(world, 1)),
        named("writer 2", |world| writer(world, 2)),
        named("reader 0", |world| reader(world, 0)),
        named("reader 1", |world| reader(world, 1)),
        named("names", names),
        named("collector", collector),
        named("inspector", inspector),
    ];
    for (number, name) in [(0, "snapshotter 0"), (1, "snapshotter 1")] {
        let work: Thread = Box::new(move |world| Left {
            snapshots: snapshotter(world, number),
            ..Left::default()
        });
        threads.push((name, work));
    }
    let work: Thread = Box::new(|world| Left { private: Some(private(world)), ..Left::default() });
    threads.push(("private", work));
    let mut left = run(&world, threads);
    compare(&world, &world.store, &mut left);
    world.store.gc().unwrap();
    compare(&world, &world.store, &mut left);
    (world, left)
}

/// Every byte is what the threads left.
fn compare(world: &World, store: &Store, left: &mut [Left]) {
    assert_sound(store);
    let mut privates = 0;
    for file in &world.files {
        let all = file.floor();
        assert_eq!(all, file.ceiling(), "every write was acknowledged");
        let bytes = content(store, Source::File(file.inode));
        assert_eq!(bytes.len() as u64, SHARED_BLOCKS * BLOCK_BYTES_U64);
        file.verify(0, &bytes, (&all, &all), "the end");
    }
    for left in left {
        for taken in &left.snapshots {
            let bytes = content(store, Source::Snapshot(taken.id));
            match &taken.bytes {
                Some(before) => assert!(*before == bytes, "snapshot {} changed", taken.id),
                None => {
                    let bounds = (taken.low.as_slice(), taken.high.as_slice());
                    world.files[taken.file].verify(0, &bytes, bounds, "a snapshot at the end");
                }
            }
        }
        if let Some((model, name)) = &left.private {
            privates += 1;
            let inode = store.resolve(&path(name)).unwrap().inode;
            assert_eq!(inode, world.private);
            assert!(content(store, Source::File(inode)) == *model, "{name} at the end");
        }
    }
    assert_eq!(privates, 1, "the private file's thread came back");
}

/// Options under which everything happens often.
fn busy(data_dir: impl Into<std::path::PathBuf>) -> Options {
    let mut options = Options::new(data_dir);
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.dirty_age = Duration::from_millis(50);
    options.compaction_live_ratio = 0.8;
    options
}

#[test]
fn threads_on_a_store_in_memory_see_only_what_was_written() {
    let (kv, disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
    let open = || {
        let mut options = busy("unused");
        options.segment_bytes = 64 << 10;
        let kv: Arc<dyn Kv> = Arc::clone(&kv) as Arc<dyn Kv>;
        let disk: Arc<dyn Disk> = Arc::new(disk.clone());
        Store::open_with(kv, disk, options).unwrap()
    };
    let (world, mut left) = work_on(open());
    world.store.close().unwrap();
    assert_eq!(world.store.stats().dirty_bytes, 0, "dirty bytes are counted down");
    let store = open();
    compare(&world, &store, &mut left);
    store.close().unwrap();
}

#[test]
fn threads_on_a_store_on_the_disk_see_only_what_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let mut options = busy(directory.path());
        options.segment_bytes = 1 << 20;
        Store::open(options)
    };
    let (world, mut left) = work_on(open().unwrap());
    world.store.close().unwrap();
    assert_eq!(world.store.stats().dirty_bytes, 0, "dirty bytes are counted down");
    // The store lives until its lock is dropped.
    let world = Arc::into_inner(world).unwrap();
    let World { store, files, private, .. } = world;
    drop(store);
    let store = open().unwrap();
    let world = World { store, files, stop: AtomicBool::new(true), private };
    compare(&world, &world.store, &mut left);
    world.store.close().unwrap();
}

/// Writers that together are always over the budget of dirty bytes flush for each other; none
/// waits for a lock that another holds for good.
#[test]
fn writers_over_the_dirty_budget_go_on() {
    let store =
        Store::open_with(Arc::new(MemoryKv::new()), Arc::new(MemoryDisk::new()), busy("unused"))
            .unwrap();
    let world = Arc::new(World::new(store));
    let big_write = |world: &World, number: u64| {
        let mut random = Random::new(400 + number);
        let inode = world.files[index(number % 2)].inode;
        let data = Bytes::from(stamp(number, 0, 3).repeat(256));
        while world.going() {
            let offset = random.below(14) << 20;
            world.store.write(inode, offset, data.clone(), Stability::Unstable).unwrap();
        }
    };
    let mut threads = Vec::new();
    for (number, name) in (0..).zip(["big 0", "big 1", "big 2", "big 3", "big 4", "big 5"]) {
        threads.push(named(name, move |world| big_write(world, number)));
    }
    run(&world, threads);
    world.store.commit_all().unwrap();
    assert_eq!(world.store.stats().dirty_bytes, 0, "dirty bytes are counted down");
    assert_sound(&world.store);
    world.store.close().unwrap();
}

//! Duplicates are found wherever the hashes are, and nothing is ever shared that is not equal
//! and stored.

use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::background::{gc, settle};
use crate::disk::{Disk, MemoryDisk};
use crate::id::InodeId;
use crate::kv::MemoryKv;
use crate::log::{Log, Recovery};
use crate::open::Opening;
use crate::segment_format::{Codec, PreparedChunk};
use crate::testing::{World, blocks, options};
use crate::units::BLOCK_BYTES;

/// Segments of sixteen raw blocks.
const SEGMENT_BYTES: u64 = 64 << 10;

/// Memory for eight recent chunks.
const RECENT_BYTES: u64 = 8 * RECENT_CHUNK_BYTES;

fn world() -> World {
    World::new(options(SEGMENT_BYTES), Some(RECENT_BYTES))
}

/// Writes the blocks again into a new file and answers how many were found stored.
fn found_again(world: &World, name: &str, seeds: &[u64], one_by_one: bool) -> u64 {
    let (hits, misses) = world.hits_and_misses();
    let inode = world.create(name);
    if one_by_one {
        for (block, seed) in (0..).zip(seeds) {
            world.put(inode, block, &[*seed]);
        }
    } else {
        world.put(inode, 0, seeds);
    }
    assert!(world.content(inode) == blocks(seeds), "{name}");
    let (hits_now, misses_now) = world.hits_and_misses();
    let count = u64::try_from(seeds.len()).unwrap();
    assert_eq!(hits_now - hits + misses_now - misses, count, "{name}");
    hits_now - hits
}

/// In sequence, each by itself, and in an order that no run helps to find.
fn all_found_again(world: &World, name: &str, seeds: &[u64]) {
    let count = u64::try_from(seeds.len()).unwrap();
    let backwards: Vec<u64> = seeds.iter().rev().copied().collect();
    assert_eq!(found_again(world, &format!("{name}-run"), seeds, false), count, "{name}");
    assert_eq!(found_again(world, &format!("{name}-single"), seeds, true), count, "{name}");
    assert_eq!(found_again(world, &format!("{name}-back"), &backwards, false), count, "{name}");
}

fn entries_of(world: &World) -> usize {
    world.kv.entries(Family::Hash).len()
}

#[test]
fn duplicates_are_found_in_memory_and_after_restarts() {
    let mut world = World::new(options(SEGMENT_BYTES), None);
    let seeds = write_singly(&world);
    all_found_again(&world, "recent", &seeds);
    world = world.restart();
    all_found_again(&world, "restarted", &seeds);
    world = world.crash();
    all_found_again(&world, "crashed", &seeds);
    assert_eq!(entries_of(&world), 0, "commits put nothing into the family");
    assert!(!world.has_mark());
    world.check();
}

#[test]
fn duplicates_are_found_in_the_index_and_after_restarts() {
    let mut world = world();
    let seeds = write_singly(&world);
    assert!(world.core.dedup.is_large());
    assert_eq!(entries_of(&world), 0, "commits put nothing into the family");
    settle(&world.core).unwrap();
    assert!(world.has_mark());
    let settled = entries_of(&world);
    assert!((80..=100).contains(&settled), "{settled} of 100 are in the index");
    assert!(world.core.dedup.recent.read().len() <= 100 - settled);
    all_found_again(&world, "settled", &seeds);

    world = world.restart();
    assert!(world.core.dedup.recent.read().len() <= 100 - settled, "only what is not settled");
    all_found_again(&world, "restarted", &seeds);
    // The index does not become durable: the hashes come from the log once more.
    world.put(world.create("more"), 0, &(101..=150).collect::<Vec<_>>());
    settle(&world.core).unwrap();
    world = world.crash();
    all_found_again(&world, "crashed", &(1..=150).collect::<Vec<_>>());
    world.check();
}

/// A hundred blocks, each by a commit of its own.
fn write_singly(world: &World) -> Vec<u64> {
    let first = world.create("first");
    for (block, seed) in (0..).zip(1..=100) {
        world.put(first, block, &[seed]);
    }
    (1..=100).collect()
}

#[test]
fn settling_that_finds_nothing_to_do_changes_nothing() {
    let world = world();
    world.put(world.create("f"), 0, &[1, 2, 3]);
    settle(&world.core).unwrap();
    assert!(!world.has_mark());
    // More than eight, all in the segment that is open.
    world.put(world.create("g"), 0, &(10..22).collect::<Vec<_>>());
    assert!(world.core.dedup.is_large());
    settle(&world.core).unwrap();
    assert_eq!(entries_of(&world), 0);
    assert_eq!(world.core.dedup.recent.read().len(), 15);
}

/// A hash whose first eight bytes are the same for all of a family.
fn hash(family: u8, number: u8) -> ContentHash {
    let mut bytes = [family; 32];
    bytes[31] = number;
    ContentHash::new(bytes)
}

/// A log in memory, whose chunks have whatever hashes a test wants.
struct Bare {
    kv: Arc<MemoryKv>,
    segments: Arc<Segments>,
    log: Log,
    index: DedupIndex,
}

impl Bare {
    fn new() -> Self {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new());
        let segments = Arc::new(Segments::new(Arc::clone(&disk), 1 << 20));
        let recovery = Recovery {
            disk,
            segments: Arc::clone(&segments),
            store: None,
            position: None,
            opening: Opening::Serve,
            apply: &mut |_, _| Ok(()),
        };
        let log = recovery.run().unwrap().log;
        let kv = Arc::new(MemoryKv::new());
        let index = DedupIndex::open(kv.as_ref(), &segments, std::iter::empty(), 0).unwrap();
        Self { kv, segments, log, index }
    }

    /// Appends chunks of these hashes in one segment, which is sealed then.
    fn append(&mut self, hashes: &[ContentHash]) -> ChunkId {
        let first = ChunkId::new(self.log.segment(), self.log.next_chunk_index());
        let stored = Bytes::from(vec![7; BLOCK_BYTES]);
        let crc = crc32c::crc32c(&stored);
        let chunk = |hash: &ContentHash| PreparedChunk {
            hash: *hash,
            codec: Codec::Raw,
            crc,
            stored: stored.clone(),
        };
        let chunks: Vec<_> = hashes.iter().map(chunk).collect();
        self.log.append(&chunks, &Vec::new()).unwrap();
        self.log.roll().unwrap();
        self.index.add(first, hashes.iter());
        first
    }

    /// Settles round by round, as the background does, until nothing is recent.
    fn settle(&self, ids: &[ChunkId]) {
        let sealed: Vec<SegmentId> = ids.iter().map(|id| id.segment()).collect();
        for _ in ids {
            self.index.settle(self.kv.as_ref(), &self.segments, sealed.clone()).unwrap();
        }
        assert!(!self.index.is_large(), "all are settled");
    }

    /// The index as the next start reads it.
    fn reopen(&mut self, ids: &[SegmentId], memory_bytes: u64) {
        let ids = ids.iter().copied();
        self.index = DedupIndex::open(self.kv.as_ref(), &self.segments, ids, memory_bytes).unwrap();
    }

    fn find(&self, hashes: &[ContentHash]) -> Vec<Option<ChunkId>> {
        let hashes: Vec<_> = hashes.iter().collect();
        self.index.find(self.kv.as_ref(), &self.segments, &hashes).unwrap()
    }

    /// What compaction does to the directory of a segment: these chunks have no place there.
    fn drop_of_directory(&self, first: ChunkId, dropped: &[(ChunkId, ContentHash)]) {
        let mut directory = self.segments.directory(first.segment()).unwrap();
        for (chunk, _) in dropped {
            directory.places[usize::try_from(chunk.index()).unwrap()] = None;
        }
        let file = crate::log::log_file(first.segment());
        self.segments.put_open(first.segment(), file, directory);
    }
}

#[test]
fn a_start_with_little_memory_settles_what_it_reads_and_forgets_nothing() {
    let mut bare = Bare::new();
    let hashes: Vec<_> = (0..200).map(|number| hash(number, 1)).collect();
    let mut ids = Vec::new();
    for (number, of_segment) in hashes.chunks(8).enumerate() {
        ids.push(bare.append(of_segment).segment());
        // Memory for less than five segments, read again after every fourth.
        if number % 4 == 3 {
            bare.reopen(&ids, 40 * RECENT_CHUNK_BYTES);
            assert!(!bare.index.is_large());
        }
        let stored = &hashes[..ids.len() * 8];
        assert!(bare.find(stored).iter().all(Option::is_some), "{} segments", ids.len());
    }
    bare.reopen(&ids, 40 * RECENT_CHUNK_BYTES);
    assert!(bare.find(&hashes).iter().all(Option::is_some));
    let entries = bare.kv.entries(Family::Hash).len();
    assert!((150..200).contains(&entries), "{entries} of 200 are in the index");
    // The index is lost: one start reads all. The next one knows what it put there.
    bare.kv = Arc::default();
    for start in 1..=2 {
        bare.reopen(&ids, 40 * RECENT_CHUNK_BYTES);
        assert!(bare.find(&hashes).iter().all(Option::is_some), "start {start}");
    }
}

/// A crash may leave entries without the mark behind them.
#[test]
fn whatever_may_be_in_the_index_is_known_as_such() {
    let mut bare = Bare::new();
    let first = bare.append(&[hash(1, 1)]);
    assert!(!bare.index.is_settled(first));
    bare.reopen(&[first.segment()], 1 << 20);
    assert!(bare.index.is_settled(first), "a round before the crash may have entered it");
    let second = bare.append(&[hash(2, 1)]);
    assert!(!bare.index.is_settled(second));
    bare.reopen(&[first.segment(), second.segment()], 0);
    let third = bare.append(&[hash(3, 1)]);
    bare.settle(&[second, third]);
    assert!(bare.index.is_settled(third));
}

#[test]
fn hashes_that_begin_alike_share_nothing() {
    let mut bare = Bare::new();
    let (a, b, c) = (hash(1, 1), hash(1, 2), hash(1, 3));
    let first = bare.append(&[a]);
    assert_eq!(bare.find(&[a, b, a]), [Some(first), None, Some(first)]);
    assert_eq!(bare.index.find_recent(&bare.segments, &a), Some(first));
    assert_eq!(bare.index.find_recent(&bare.segments, &b), None);
    // The newer one takes the place; the older is stored once more when it comes again.
    let second = bare.append(&[b]);
    assert_eq!(bare.find(&[a, b, c]), [None, Some(second), None]);
    assert_eq!(bare.index.find_recent(&bare.segments, &a), None);
    // One in the index, one in memory.
    bare.settle(&[first, second]);
    assert_eq!(bare.find(&[a, b, c]), [None, Some(second), None]);
    let third = bare.append(&[c]);
    assert_eq!(bare.find(&[a, b, c]), [None, Some(second), Some(third)]);
    assert_eq!(bare.find(&[c, b, c]), [Some(third), Some(second), Some(third)]);
    bare.settle(&[third]);
    assert_eq!(bare.find(&[a, b, c]), [None, None, Some(third)]);
    assert_eq!(bare.kv.entries(Family::Hash).len(), 1);
}

#[test]
fn of_two_chunks_with_one_content_the_newer_one_settles() {
    let mut bare = Bare::new();
    let old = bare.append(&[hash(1, 1), hash(2, 2)]);
    let new = bare.append(&[hash(2, 2), hash(1, 1)]);
    bare.settle(&[new, old]);
    assert_eq!(bare.find(&[hash(1, 1)]), [Some(new.plus(1))]);
    assert_eq!(bare.find(&[hash(2, 2)]), [Some(new)]);
    assert!(bare.index.recent.read().is_empty());
}

#[test]
fn a_dropped_chunk_is_found_by_no_way() {
    let mut bare = Bare::new();
    let hashes: Vec<_> = (0..200).map(|number| hash(number, 9)).collect();
    let first = bare.append(&hashes);
    let places: Vec<_> = (0..200).map(|step| first.plus(step)).collect();
    let dropped = [(first.plus(1), hashes[1]), (first.plus(100), hashes[100])];
    let mut expected: Vec<_> = places.iter().copied().map(Some).collect();
    assert_eq!(bare.find(&hashes), expected);
    bare.drop_of_directory(first, &dropped);
    expected[1] = None;
    expected[100] = None;
    // Between the change of the directory and that of the index, as the chunk behind another,
    // and from memory.
    for round in 0..2 {
        assert_eq!(bare.find(&hashes), expected, "round {round}");
        assert_eq!(bare.find(&hashes[1..]), expected[1..], "round {round}");
        assert_eq!(bare.index.find_recent(&bare.segments, &hashes[1]), None);
        let drops = bare.index.drops();
        bare.index.drop_chunks(&dropped);
        assert_ne!(bare.index.drops(), drops, "what was found before is looked at again");
    }
    assert_eq!(bare.index.recent.read().len(), 198);
    // A dropped chunk never enters the index; one that does lie there stale is not believed.
    bare.settle(&[first]);
    assert_eq!(bare.kv.entries(Family::Hash).len(), 198);
    let stale = Some(dropped[0].0.raw().to_be_bytes().to_vec());
    bare.kv.tamper(Family::Hash, &key::hash(&hashes[1]), stale);
    assert_eq!(bare.find(&hashes), expected);
    let gone = ChunkId::new(SegmentId::new(1 << 30), 5).raw().to_be_bytes().to_vec();
    bare.kv.tamper(Family::Hash, &key::hash(&hashes[0]), Some(gone));
    assert_eq!(bare.find(&hashes[..1]), [None], "its segment is gone");
}

/// A small generator, so that each run is told by one number.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

const BLOCKS: u64 = 24;

/// Few contents, written over and over, while hashes settle, compaction drops chunks and the
/// power goes: whatever is shared is what was written.
#[test]
fn random_writes_settling_compaction_and_crashes_agree_with_a_model() {
    for seed in 1..=6 {
        let mut random = Random(seed * 0x1234_5678_9abc);
        let mut world = world();
        let files: Vec<InodeId> = (0..3).map(|file| world.create(&format!("f{file}"))).collect();
        let mut model = vec![vec![0; usize::try_from(BLOCKS).unwrap()]; files.len()];
        for step in 0..250 {
            let file = usize::try_from(random.below(3)).unwrap();
            match random.below(40) {
                0 => drop(gc(&world.core).unwrap()),
                1..=3 => settle(&world.core).unwrap(),
                4 => world = world.restart(),
                5 => world = world.crash(),
                _ => {
                    let first = random.below(BLOCKS);
                    let count = 1 + random.below((BLOCKS - first).min(6));
                    let content = random.below(60);
                    let seeds: Vec<u64> = (content..content + count).collect();
                    world.put(files[file], first, &seeds);
                    let at = usize::try_from(first).unwrap();
                    model[file][at..at + seeds.len()].copy_from_slice(&seeds);
                }
            }
            if step % 50 == 49 {
                for (file, seeds) in files.iter().zip(&model) {
                    let mut got = world.content(*file);
                    got.resize(seeds.len() * BLOCK_BYTES, 0);
                    assert!(got == blocks(seeds), "seed {seed}, step {step}");
                }
                world.check();
            }
        }
        let (hits, _) = world.hits_and_misses();
        assert!(hits > 0 || entries_of(&world) > 0, "seed {seed}: something was shared");
    }
}

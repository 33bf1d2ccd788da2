//! What compaction copies: spans with gaps, groups, and more chunks than a group holds.

use super::*;
use crate::background::gc;
use crate::error::ErrorKind;
use crate::id::InodeId;
use crate::testing::{World, blocks, options};
use crate::units::{BLOCK_BYTES, BLOCK_BYTES_U64};

/// Longer than all that a test appends.
const SEGMENT_BYTES: u64 = 256 << 20;

/// Blocks that lz4 packs into some dozens of bytes, each another.
fn packed(numbers: impl Iterator<Item = u64>) -> Bytes {
    let mut bytes = Vec::new();
    for number in numbers {
        for _ in 0..BLOCK_BYTES / 8 {
            bytes.extend_from_slice(&(number + 1).to_le_bytes());
        }
    }
    Bytes::from(bytes)
}

fn flush(world: &World, inode: InodeId) {
    crate::flush::flush(&world.core, &world.core.file(inode).unwrap()).unwrap();
}

/// Makes blocks holes: their chunks are dead.
fn kill(world: &World, inode: InodeId, content: &mut [u8], dead: impl Iterator<Item = u64>) {
    for block in dead {
        world.write(inode, block, blocks(&[0]));
        let at = usize::try_from(block * BLOCK_BYTES_U64).unwrap();
        content[at..at + BLOCK_BYTES].fill(0);
    }
    flush(world, inode);
}

/// Stored chunks, of them live, and groups in all compacted files.
fn compacted(world: &World) -> (u32, u32, usize) {
    let segments = world.core.committer.leader.lock().segments.clone();
    let moved = || segments.values().filter(|record| record.file.role == FileRole::Compacted);
    let mut groups = 0;
    for record in moved() {
        let file = world.core.segments.open_file(record.file).unwrap();
        let length = usize::try_from(file.length_bytes().unwrap()).unwrap();
        let bytes = file.read_at(0, length).unwrap();
        groups += bytes.windows(4).filter(|four| *four == b"SWCG").count();
    }
    (
        moved().map(|record| record.stored_chunks).sum(),
        moved().map(|record| record.live_chunks).sum(),
        groups,
    )
}

/// After a compaction the file reads as before, also from the disk and after a restart.
fn verify(world: World, inode: InodeId, content: &[u8]) {
    assert!(world.content(inode) == content);
    world.check();
    let world = world.crash();
    assert!(world.content(inode) == content);
    world.check();
}

#[test]
fn spans_with_gaps_of_all_kinds_come_out_whole() {
    let world = World::new(options(SEGMENT_BYTES), None);
    let inode = world.create("f");
    let seeds: Vec<u64> = (1..=900).collect();
    let mut content = blocks(&seeds).to_vec();
    world.write(inode, 0, Bytes::from(content.clone()));
    flush(&world, inode);
    // The first, single ones, some in a row, all of a span and more but one, and the last.
    let dead =
        [0, 7, 9, 300].into_iter().chain(20..30).chain(400..600).chain(601..850).chain(899..900);
    kill(&world, inode, &mut content, dead);
    let live = u32::try_from(900 - 4 - 10 - 200 - 249 - 1).unwrap();
    gc(&world.core).unwrap();
    let (stored, still_live, groups) = compacted(&world);
    assert_eq!((stored, still_live), (live, live));
    assert!(groups >= 8, "{groups} groups: each gap ends one");
    verify(world, inode, &content);
}

#[test]
fn more_chunks_than_a_group_holds_become_several_groups() {
    let world = World::new(options(SEGMENT_BYTES), None);
    let inode = world.create("f");
    let count = 2 * u64::try_from(GROUP_CHUNKS_MAX).unwrap() + 500;
    let mut content = packed(0..count).to_vec();
    world.write(inode, 0, Bytes::from(content.clone()));
    flush(&world, inode);
    kill(&world, inode, &mut content, std::iter::once(count - 1));
    gc(&world.core).unwrap();
    let live = u32::try_from(count - 1).unwrap();
    assert_eq!(compacted(&world), (live, live, 3), "full groups, and the rest");
    // And once more, out of the compacted file, with gaps.
    kill(&world, inode, &mut content, (0..count - 1).step_by(1000));
    gc(&world.core).unwrap();
    let (stored, still_live, groups) = compacted(&world);
    let left = live - u32::try_from((count - 1).div_ceil(1000)).unwrap();
    assert_eq!((stored, still_live), (left, left));
    assert!(groups >= 9, "{groups} groups");
    verify(world, inode, &content);
}

#[test]
fn several_segments_move_into_one_file_and_an_empty_one_goes() {
    let world = World::new(options(64 << 10), None);
    let inode = world.create("f");
    let mut content = Vec::new();
    for part in 0..6 {
        let seeds: Vec<u64> = (part * 16 + 1..=part * 16 + 16).collect();
        world.put(inode, part * 16, &seeds);
        content.extend_from_slice(&blocks(&seeds));
    }
    // Of the second nothing is left, of the others little.
    let dead = (16..32).chain(1..14).chain(33..47).chain(50..60).chain(64..76).chain(82..96);
    kill(&world, inode, &mut content, dead);
    gc(&world.core).unwrap();
    let segments = world.core.committer.leader.lock().segments.clone();
    let files: HashSet<FileName> = segments
        .values()
        .map(|record| record.file)
        .filter(|file| file.role == FileRole::Compacted)
        .collect();
    let moved = segments.values().filter(|record| files.contains(&record.file)).count();
    assert!(moved > files.len(), "{moved} segments in {} files", files.len());
    verify(world, inode, &content);
}

#[test]
fn damage_is_not_copied_as_if_it_were_sound() {
    let world = World::new(options(SEGMENT_BYTES), None);
    let inode = world.create("f");
    let mut content = blocks(&(1..=40).collect::<Vec<_>>()).to_vec();
    world.write(inode, 0, Bytes::from(content.clone()));
    flush(&world, inode);
    kill(&world, inode, &mut content, [3, 4].into_iter());
    let log = crate::log::log_file(SegmentId::new(1));
    let directory = world.core.segments.directory(SegmentId::new(1)).unwrap();
    let place = directory.places[20].unwrap();
    world.disk.flip_bit(log, usize::try_from(place.offset_bytes).unwrap() + 100);
    let error = gc(&world.core).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(compacted(&world), (0, 0, 0), "nothing moved");
}

/// Segments of which next to nothing is stored have directories all the same, which a compaction holds
/// in memory.
#[test]
fn a_compaction_takes_no_more_entries_of_directories_than_it_may() {
    let world = World::new(options(64 << 10), None);
    let chunks = 1 << 14;
    {
        let mut leader = world.core.committer.leader.lock();
        for number in 1000..2000 {
            let number = SegmentId::new(number);
            let record = SegmentRecord {
                file: FileName { role: FileRole::Compacted, number },
                directory_offset_bytes: Some(1),
                chunks,
                stored_chunks: 1,
                live_chunks: 0,
                stored_bytes: 100,
            };
            leader.segments.insert(number, record);
        }
    }
    let chosen = choose(&world.core, |_| true);
    let entries: u64 = chosen.iter().map(|(_, victim)| victim.entries).sum();
    assert!(entries > COMPACTION_ENTRIES_MAX / 2, "{entries}: several at once");
    assert!(entries <= COMPACTION_ENTRIES_MAX, "{entries} entries of directories");
}

/// Failures since start, what is set aside, damaged chunks.
fn told(world: &World) -> (u64, u64, u64) {
    let stats = crate::stats::stats(&world.core);
    (stats.reclaim_failures, stats.reclaim_jobs_set_aside, stats.damaged_chunks)
}

#[test]
fn a_damaged_chunk_holds_up_the_compaction_of_its_file_alone() {
    let world = World::new(options(64 << 10), None);
    let (inode, content) = world.six_segments();
    let chunk = ChunkId::new(SegmentId::new(2), 1);
    world.flip(chunk);
    for failures in 1..3 {
        let error = gc(&world.core).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("chunk 2/1"), "{error}");
        assert_eq!(told(&world), (failures, 1, 1));
        assert_eq!(world.not_compacted(), [2]);
    }
    assert!(world.core.segments.is_damaged(chunk), "it is not shared");
    world.flip(chunk);
    gc(&world.core).unwrap();
    assert_eq!(told(&world), (2, 0, 0));
    assert_eq!(world.not_compacted(), [0; 0]);
    verify(world, inode, &content);
}

#[test]
fn the_file_at_fault_is_found_among_several() {
    let world = World::new(options(64 << 10), None);
    let (inode, content) = world.six_segments();
    // The move of the third fails, after all were read.
    let key = key::segment(SegmentId::new(3));
    let record = world.core.kv.get(Family::Segment, &key).unwrap().unwrap();
    world.kv.tamper(Family::Segment, &key, Some(vec![0xff]));
    gc(&world.core).unwrap_err();
    assert_eq!(world.not_compacted(), [3]);
    assert_eq!(told(&world), (2, 1, 0));
    world.kv.tamper(Family::Segment, &key, Some(record));
    gc(&world.core).unwrap();
    assert_eq!(world.not_compacted(), [0; 0]);
    assert_eq!(told(&world), (2, 0, 0));
    verify(world, inode, &content);
}

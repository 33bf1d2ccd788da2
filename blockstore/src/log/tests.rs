//! The log by itself, on a medium in memory and on a real one: tails rewritten at every
//! alignment, zeros ahead, power cuts between, and the bytes that files take.

mod forged;

use std::collections::BTreeMap;

use bytes::Bytes;

use super::*;
use crate::disk::{Fault, LocalDisk, MemoryDisk};
use crate::id::ContentHash;
use crate::kv::{Family, Write};
use crate::open::Opening;
use crate::segment_format::{Codec, stream};

const SECTOR: u64 = crate::disk::SECTOR_BYTES_U64;

/// What replay gave: sequence numbers and batches.
type Replay = BTreeMap<u64, Batch>;

fn recover(disk: &Arc<dyn Disk>) -> Result<(Log, Replay)> {
    recover_from(disk, None)
}

fn recover_from(disk: &Arc<dyn Disk>, position: Option<LogPosition>) -> Result<(Log, Replay)> {
    let mut replay = Replay::new();
    let recovered = Recovery {
        disk: Arc::clone(disk),
        segments: Arc::new(Segments::new(Arc::clone(disk), 1 << 20)),
        store: None,
        position,
        opening: Opening::Serve,
        apply: &mut |batch, position| {
            replay.insert(position.sequence, batch);
            Ok(())
        },
    }
    .run()?;
    Ok((recovered.log, replay))
}

fn memory(disk: &MemoryDisk) -> Arc<dyn Disk> {
    Arc::new(disk.clone())
}

/// One write whose value has this length, and bytes that depend on it.
fn batch(length: usize) -> Batch {
    let value = (0..length).map(|n| u8::try_from((n * 7 + length) % 251 + 1).unwrap()).collect();
    vec![Write { family: Family::Map, key: b"key".to_vec(), value: Some(value) }]
}

fn chunk(seed: u8) -> PreparedChunk {
    let stored = Bytes::from(vec![seed; 4096]);
    let (hash, crc) = (ContentHash::of(&stored), crc32c::crc32c(&stored));
    PreparedChunk { hash, codec: Codec::Raw, crc, stored }
}

fn length(disk: &dyn Disk, segment: SegmentId) -> u64 {
    disk.open(log_file(segment)).unwrap().length_bytes().unwrap()
}

/// The number of the record's bytes for `batch(0)`.
fn overhead() -> usize {
    format::commit_bytes(&batch(0))
}

/// Appends and recovers until the end has been at every offset of a sector that the records'
/// own size allows, and just before, at and behind its border.
fn every_alignment(disk: &Arc<dyn Disk>) {
    let (mut log, _) = recover(disk).unwrap();
    let mut expected = Replay::new();
    let room = |log: &Log| SECTOR - log.position().offset_bytes % SECTOR;
    for round in 0..40 {
        for beyond in [-1_i64, 0, 1] {
            let wanted = i64::try_from(room(&log)).unwrap() + beyond + round * 4096 * 3 / 2;
            let value = usize::try_from(wanted).unwrap().saturating_sub(overhead());
            let seed = u8::try_from(round).unwrap() + 1;
            let chunks = vec![chunk(seed); usize::from(round % 4 == 3)];
            let position = log.append(&chunks, &batch(value)).unwrap();
            expected.insert(position.sequence, batch(value));
            if let Some(first) = chunks.first() {
                let id = ChunkId::new(log.segment(), log.next_chunk_index() - 1);
                let read = log.segments.read(id, 1).unwrap().unwrap();
                assert!(read.concat() == first.stored, "round {round}");
            }
        }
        let file = length(disk.as_ref(), log.segment());
        assert_eq!(file, log.tail.length_bytes(), "round {round}");
        let (again, replay) = recover(disk).unwrap();
        assert_eq!(replay, expected, "round {round}");
        assert_eq!(again.position(), log.position());
        assert_eq!(length(disk.as_ref(), log.segment()), file, "zeros behind the end stay");
        log = again;
    }
}

#[test]
fn a_tail_is_written_again_at_every_alignment() {
    every_alignment(&memory(&MemoryDisk::new()));
}

#[test]
fn a_tail_is_written_again_at_every_alignment_of_a_real_file() {
    let directory = tempfile::tempdir().unwrap();
    every_alignment(&(Arc::new(LocalDisk::open(directory.path()).unwrap()) as Arc<dyn Disk>));
}

/// A file that the index has commits of was not being made when the power went.
#[test]
fn a_file_that_lost_its_header_and_was_in_use_is_left_as_it_is() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    let position = log.append(&[chunk(1)], &batch(100)).unwrap();
    let name = log_file(position.segment);
    disk.open(name).unwrap().truncate(30).unwrap();
    let error = recover_from(&memory(&disk), Some(position)).err().unwrap();
    assert!(error.to_string().contains(&name.to_string()), "{error}");
    assert_eq!(disk.list().unwrap(), [name]);
}

/// Any sectors of an append that was not synced may be there: what was acknowledged stays.
#[test]
fn a_power_cut_while_the_tail_is_written_again_keeps_what_was_synced() {
    for value in (1..9000).step_by(523) {
        for pattern in 0..32_u32 {
            let disk = MemoryDisk::new();
            let (mut log, _) = recover(&memory(&disk)).unwrap();
            let synced = [value, 100, 300];
            for value in synced {
                log.append(&[], &batch(value)).unwrap();
            }
            // The write is carried out, its sync fails, and so nothing of it is durable.
            disk.inject(Fault::Sync(0));
            let failed = log.append(&[chunk(9)], &batch(value)).unwrap_err();
            assert!(matches!(failed, AppendError::Fatal(_)));
            let mut sectors = 0;
            let survived = disk.crash(|| {
                sectors += 1;
                (pattern >> (sectors % 5)) & 1 == 1
            });
            let (mut log, replay) = recover(&memory(&survived)).unwrap();
            let context = format!("{value} bytes, pattern {pattern}");
            assert!((3..=4).contains(&replay.len()), "{context}");
            for (number, length) in (1..).zip(synced) {
                assert_eq!(replay[&number], batch(length), "{context}");
            }
            let next = log.append(&[chunk(3)], &batch(50)).unwrap();
            let (_, replay) = recover(&memory(&survived)).unwrap();
            assert_eq!(replay.len(), usize::try_from(next.sequence).unwrap(), "{context}");
            assert_eq!(replay[&next.sequence], batch(50), "{context}");
        }
    }
}

#[test]
fn small_appends_find_zeros_ahead_and_large_ones_write_none() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    let mut grown = 0;
    let mut before = length(&disk, log.segment());
    for append in 1..=400_u64 {
        let end = log.append(&[], &batch(3000)).unwrap().offset_bytes;
        let now = length(&disk, log.segment());
        grown += u64::from(now != before);
        before = now;
        let spare = now - end;
        assert!(spare <= SECTOR + append * 2 * SECTOR, "{spare} bytes after {append} appends");
        assert!(spare <= SECTOR + (1 << 20), "{spare} bytes");
    }
    assert!(grown < 20, "the file grew {grown} times by 400 appends");
    // A restart keeps them, and what they take.
    let (mut log, replay) = recover(&memory(&disk)).unwrap();
    assert_eq!(replay.len(), 400);
    assert_eq!(length(&disk, log.segment()), before);
    for _ in 0..8 {
        let end = log.append(&[], &batch(200_000)).unwrap().offset_bytes;
        let zeros = before.saturating_sub(end).max(SECTOR);
        assert!(length(&disk, log.segment()) - end <= zeros, "behind a large append");
    }
}

#[test]
fn zeros_that_find_no_room_fail_nothing() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    // The first write is the append, the second its zeros.
    disk.inject(Fault::NoSpace(1));
    log.append(&[], &batch(5000)).unwrap();
    assert_eq!(length(&disk, log.segment()), 2 * SECTOR);
    disk.inject(Fault::ShortWrite(1));
    log.append(&[], &batch(5000)).unwrap();
    assert_eq!(log.tail.length_bytes(), length(&disk, log.segment()));
    disk.set_capacity(disk.used_bytes() + 3 * SECTOR);
    for _ in 0..3 {
        log.append(&[], &batch(3000)).unwrap();
    }
    let (_, replay) = recover(&memory(&disk)).unwrap();
    assert_eq!(replay.len(), 5);
}

#[test]
fn a_refused_append_leaves_nothing_behind() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    log.append(&[], &batch(3000)).unwrap();
    let written = |log: &Log| 64 + log.written_bytes() - log.returned_bytes;
    for value in [10, 3000, 9000] {
        let before = log.position();
        // Half of the sectors reach the file: a short record whole, and commit 2 with it.
        disk.inject(Fault::ShortWrite(0));
        let error = log.append(&[chunk(1)], &batch(value)).unwrap_err();
        assert!(matches!(error, AppendError::Refused(_)));
        assert_eq!(log.position(), before);
        assert_eq!(length(&disk, log.segment()), before.offset_bytes);
        assert_eq!(length(&disk, log.segment()), written(&log));
        for keep in [false, true] {
            let (_, replay) = recover(&memory(&disk.crash(|| keep))).unwrap();
            assert_eq!(u64::try_from(replay.len()).unwrap(), before.sequence);
        }
        log.append(&[], &batch(value)).unwrap();
        assert_eq!(length(&disk, log.segment()), written(&log));
    }
    assert_eq!(recover(&memory(&disk)).unwrap().1.len(), 4);
}

#[test]
fn a_sealed_file_ends_with_its_directory_and_the_bytes_are_counted() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    for round in 0..4_u8 {
        for append in 0..30 {
            let seed = round * 30 + append;
            log.append(&[chunk(seed)], &batch(10)).unwrap();
        }
        let end = log.position().offset_bytes;
        let sealed = log.roll().unwrap();
        assert_eq!(sealed.directory_offset_bytes, end);
        let expected = end + 24 + 3076 + 8196;
        assert_eq!(length(&disk, sealed.segment), expected);
        // The first header was there before anything was counted.
        let counted = 64 + log.written_bytes() - log.returned_bytes;
        assert_eq!(counted, disk.used_bytes(), "round {round}");
    }
    let (_, replay) = recover(&memory(&disk)).unwrap();
    assert_eq!(replay.len(), 120);
}

#[test]
fn a_seal_that_fails_is_taken_back_and_the_segment_goes_on() {
    for (fault, zeros) in [(Fault::ShortWrite(0), 0), (Fault::ShortWrite(1), 1)] {
        let disk = MemoryDisk::new();
        let (mut log, _) = recover(&memory(&disk)).unwrap();
        for seed in 0..10 {
            log.append(&[chunk(seed)], &batch(10)).unwrap();
        }
        let before = log.position();
        disk.inject(fault);
        assert!(matches!(log.roll(), Err(AppendError::Refused(_))), "{zeros}");
        assert_eq!(log.position(), before);
        assert_eq!(length(&disk, log.segment()), before.offset_bytes);
        log.append(&[chunk(99)], &batch(10)).unwrap();
        assert_eq!(64 + log.written_bytes() - log.returned_bytes, disk.used_bytes());
        assert_eq!(recover(&memory(&disk)).unwrap().1.len(), 11);
    }
}

/// The file was made in the blocks of another store's, or copied there: its records are as good
/// as ours, but for the store.
#[test]
fn stale_records_of_another_store_are_not_taken() {
    let other = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&other)).unwrap();
    for _ in 0..3 {
        log.append(&[chunk(1)], &batch(10)).unwrap();
    }
    let stale = other.open(log_file(log.segment())).unwrap();
    let stale = stale.read_at(0, usize::try_from(stale.length_bytes().unwrap()).unwrap()).unwrap();

    let disk = MemoryDisk::new();
    let (log, _) = recover(&memory(&disk)).unwrap();
    let file = disk.open(log_file(log.segment())).unwrap();
    file.write_at(64, &stale[64..]).unwrap();
    let (log, replay) = recover(&memory(&disk)).unwrap();
    assert!(replay.is_empty(), "they are of another store");
    assert_eq!(length(&disk, log.segment()), 64, "and are cut off");
}

/// Deterministic answers to "did this reach the medium".
fn by_pattern(pattern: u32) -> impl FnMut() -> bool {
    let mut asked = 0;
    move || {
        asked += 1;
        (pattern >> (asked % 5)) & 1 == 1
    }
}

/// The process is killed between the write of an append and its sync.
fn killed_before_the_sync(disk: &MemoryDisk, log: &mut Log, value: usize) {
    disk.inject(Fault::Sync(0));
    assert!(matches!(log.append(&[chunk(7)], &batch(value)), Err(AppendError::Fatal(_))));
}

#[test]
fn what_a_restart_replays_outlasts_a_power_cut() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    log.append(&[], &batch(100)).unwrap();
    killed_before_the_sync(&disk, &mut log, 300);
    let lost = recover(&memory(&disk.crash(|| false))).unwrap().1;
    assert_eq!(lost.len(), 1, "it was never synced");
    let (log, replay) = recover(&memory(&disk)).unwrap();
    assert_eq!(replay[&2], batch(300), "but the next process sees it");
    // Its client sends it again, and is told that it was done already.
    let (_, replay) = recover(&memory(&disk.crash(|| false))).unwrap();
    assert_eq!(replay.len(), 2);
    assert_eq!(replay[&2], batch(300));
    // Nor is the index, which a clean end makes durable there, ahead of the log.
    let survived = memory(&disk.crash(|| false));
    assert!(recover_from(&survived, Some(log.position())).is_ok());
}

/// Before it is in the index, which may write it down at any moment.
#[test]
fn a_commit_is_durable_before_it_is_replayed() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    killed_before_the_sync(&disk, &mut log, 300);
    let mut seen = 0;
    let recovered = Recovery {
        disk: memory(&disk),
        segments: Arc::new(Segments::new(memory(&disk), 1 << 20)),
        store: None,
        position: None,
        opening: Opening::Serve,
        apply: &mut |_, position| {
            seen += 1;
            let survived = memory(&disk.crash(|| false));
            recover_from(&survived, Some(position)).map(|_| ())
        },
    }
    .run();
    assert_eq!(recovered.unwrap().replayed, 1);
    assert_eq!(seen, 1);
}

/// The process is killed between the write of the seal and its sync; the next one goes on in a
/// new file.
#[test]
fn a_seal_that_a_restart_finds_outlasts_a_power_cut() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    log.append(&[chunk(1)], &batch(100)).unwrap();
    disk.inject(Fault::Sync(0));
    assert!(matches!(log.roll(), Err(AppendError::Fatal(_))));
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    assert_eq!(log.segment().get(), 2);
    log.append(&[], &batch(200)).unwrap();
    for pattern in 0..32 {
        let (_, replay) = recover(&memory(&disk.crash(by_pattern(pattern)))).unwrap();
        assert_eq!(replay.len(), 2, "pattern {pattern}");
    }
}

/// The name of a new file was seen by the next process, but not synced.
#[test]
fn a_name_that_a_restart_finds_outlasts_a_power_cut() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    log.append(&[chunk(1)], &batch(100)).unwrap();
    // Write, cut and sync of the seal, creation, write and sync of the file, and no more.
    disk.inject(Fault::PowerCut(6));
    assert!(matches!(log.roll(), Err(AppendError::Fatal(_))));
    disk.inject(Fault::Sync(u64::MAX));
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    assert_eq!(log.segment().get(), 2);
    log.append(&[], &batch(200)).unwrap();
    let (_, replay) = recover(&memory(&disk.crash(|| false))).unwrap();
    assert_eq!(replay.len(), 2);
}

#[test]
fn a_half_made_next_file_is_gone_before_the_seal_is_taken_back() {
    // The header's sync fails, or that of the names.
    for fault in [Fault::Sync(1), Fault::SyncNames(0)] {
        for pattern in 0..32 {
            let disk = MemoryDisk::new();
            let (mut log, _) = recover(&memory(&disk)).unwrap();
            log.append(&[chunk(1)], &batch(100)).unwrap();
            disk.inject(fault);
            assert!(matches!(log.roll(), Err(AppendError::Refused(_))));
            log.append(&[], &batch(200)).unwrap();
            let survived = memory(&disk.crash(by_pattern(pattern)));
            let (log, replay) =
                recover(&survived).unwrap_or_else(|error| panic!("{pattern}: {error}"));
            assert_eq!(replay.len(), 2);
            assert_eq!(log.segment().get(), 1);
        }
    }
}

#[test]
fn a_next_file_that_may_come_back_ends_the_log() {
    for changes in 4..12 {
        for pattern in 0..32 {
            let disk = MemoryDisk::new();
            let (mut log, _) = recover(&memory(&disk)).unwrap();
            log.append(&[chunk(1)], &batch(100)).unwrap();
            // From the creation on: what takes it back fails as well.
            disk.inject(Fault::PowerCut(changes));
            let rolled = log.roll();
            assert!(!matches!(rolled, Err(AppendError::Refused(_))), "after {changes}");
            let (_, replay) = recover(&memory(&disk.crash(by_pattern(pattern)))).unwrap();
            assert_eq!(replay.len(), 1, "after {changes}, pattern {pattern}");
        }
    }
}

/// Behind the last commit lies a whole directory, but of another segment or of other chunks:
/// it came there as other bytes do.
#[test]
fn a_directory_that_does_not_fit_its_groups_seals_nothing() {
    let of = |chunks| Directory {
        places: vec![None; chunks],
        hashes: vec![ContentHash::of(b"x"); chunks],
    };
    for (segment, chunks, is_ours) in [(1, 1, true), (1, 2, false), (1, 0, false), (2, 1, false)] {
        let disk = MemoryDisk::new();
        let (mut log, _) = recover(&memory(&disk)).unwrap();
        let end = log.append(&[chunk(1)], &batch(100)).unwrap().offset_bytes;
        let name = log_file(log.segment());
        let stale = format::encode_directory(SegmentId::new(segment), &of(chunks));
        let file = disk.open(name).unwrap();
        file.truncate(end).unwrap();
        file.write_at(end, &stale).unwrap();
        let context = format!("segment {segment}, {chunks} chunks");
        let (mut log, replay) = recover(&memory(&disk)).unwrap();
        assert_eq!(replay.len(), 1, "{context}");
        assert_eq!(log.segment().get() == 2, is_ours, "{context}");
        if !is_ours {
            assert_eq!(length(&disk, log.segment()), end, "{context}");
            log.append(&[], &batch(200)).unwrap();
            // In the midst of the log it is damage.
            let header = format::encode_file_header(log.store(), log_file(SegmentId::new(2)));
            disk.create(log_file(SegmentId::new(2))).unwrap().write_at(0, &header).unwrap();
            let file = disk.open(name).unwrap();
            file.truncate(log.position().offset_bytes).unwrap();
            file.write_at(log.position().offset_bytes, &stale).unwrap();
            let error = recover(&memory(&disk)).err().unwrap();
            assert!(error.to_string().contains("not sealed"), "{context}: {error}");
        }
    }
}

#[test]
fn a_segment_of_tiny_chunks_is_full_before_its_directory_is_large() {
    let disk = MemoryDisk::new();
    let (mut log, _) = recover(&memory(&disk)).unwrap();
    let stored = Bytes::from_static(b"tiny");
    let (hash, crc) = (ContentHash::of(&stored), crc32c::crc32c(&stored));
    let many = vec![PreparedChunk { hash, codec: Codec::Raw, crc, stored }; 1 << 16];
    assert!(!log.is_full(1 << 30, 1 << 14));
    log.append(&many, &batch(10)).unwrap();
    assert!(!log.is_full(1 << 30, 1 << 14));
    log.append(&many, &batch(10)).unwrap();
    assert!(log.is_full(1 << 30, 1 << 14));
    assert!(log.has_room(1 << 14), "though the format takes more");
    assert!(!log.has_room(ChunkId::INDEX_LIMIT - (1 << 17) + 1));
    assert!(!log.has_room(1 << 20), "a place has 32 bits");
}

//! Clients choose the bytes of chunks, and may know all that a record of the store needs. What they
//! write there proves nothing about the log, and hides no damage of it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::units::BLOCK_BYTES;

/// A block of whole commits of these sequence numbers, again and again, as a client may write it.
fn forged(store: StoreId, sequences: std::ops::Range<u64>) -> PreparedChunk {
    let mut block = Vec::new();
    for sequence in sequences.cycle() {
        let mut record = Vec::new();
        format::encode_commit(&mut record, (store, sequence), &Batch::new());
        if block.len() + record.len() > BLOCK_BYTES {
            break;
        }
        block.extend_from_slice(&record);
    }
    block.resize(BLOCK_BYTES, 0);
    let stored = Bytes::from(block);
    let (hash, crc) = (ContentHash::of(&stored), crc32c::crc32c(&stored));
    PreparedChunk { hash, codec: Codec::Raw, crc, stored }
}

/// A log of two commits.
fn two_commits(disk: &MemoryDisk) -> Log {
    let (mut log, _) = recover(&memory(disk)).unwrap();
    for seed in 1..3 {
        log.append(&[chunk(seed)], &batch(100)).unwrap();
    }
    log
}

/// The chunks of an append: so many that entries and payload lie in sectors of their own.
fn append_of(log: &Log, sequences: std::ops::Range<u64>) -> Vec<PreparedChunk> {
    let mut chunks: Vec<PreparedChunk> = (10..30).map(chunk).collect();
    chunks[10] = forged(log.store(), sequences.clone());
    chunks[19] = forged(log.store(), sequences);
    chunks
}

/// What is left of a third append whose sync never ended: the sectors that `keep` names.
fn torn(keep: impl Fn(usize) -> bool) -> MemoryDisk {
    let disk = MemoryDisk::new();
    let mut log = two_commits(&disk);
    let chunks = append_of(&log, 4..20);
    disk.inject(Fault::Sync(0));
    assert!(matches!(log.append(&chunks, &batch(700)), Err(AppendError::Fatal(_))));
    let mut sector = 0;
    disk.crash(|| {
        sector += 1;
        keep(sector - 1)
    })
}

/// Sectors of 512 bytes that an append of [`append_of`] takes, and more.
const SECTORS: usize = 180;

#[test]
fn what_a_client_wrote_into_a_torn_append_proves_nothing() {
    let recovered = |disk: &MemoryDisk, what: &str| {
        let (mut log, replay) = recover(&memory(disk)).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!((2..=3).contains(&replay.len()), "{what}: {} commits", replay.len());
        log.append(&[chunk(1)], &batch(50)).unwrap();
        let (_, again) = recover(&memory(disk)).unwrap();
        assert_eq!(again.len(), replay.len() + 1, "{what}");
    };
    for sector in 0..SECTORS {
        recovered(&torn(|n| n != sector), &format!("without sector {sector}"));
        recovered(&torn(|n| n < sector), &format!("{sector} sectors"));
        recovered(&torn(|n| n >= sector), &format!("from sector {sector} on"));
    }
}

/// The third append is damaged long after; a fourth follows, and a torn fifth with bytes that would
/// make the third the last.
#[test]
fn what_a_client_wrote_hides_no_damage() {
    let made = |tear: &dyn Fn(usize) -> bool| {
        let disk = MemoryDisk::new();
        let mut log = two_commits(&disk);
        let third = log.position().offset_bytes;
        let name = log_file(log.segment());
        for _ in 0..2 {
            log.append(&append_of(&log, 3..5), &batch(700)).unwrap();
        }
        disk.inject(Fault::Sync(0));
        assert!(log.append(&append_of(&log, 3..4), &batch(700)).is_err());
        let mut sector = 0;
        let disk = disk.crash(|| {
            sector += 1;
            tear(sector - 1)
        });
        (disk, name, usize::try_from(third).unwrap())
    };
    // The header of its group, an entry, the bytes of a chunk.
    for damage in [5, 100, 2000] {
        for lost in 0..SECTORS {
            let (disk, name, third) = made(&|n| n != lost);
            disk.flip_bit(name, third + damage);
            let error = recover(&memory(&disk)).err().unwrap();
            let text = error.to_string();
            assert!(text.contains("commit 3 is damaged"), "{damage}, {lost}: {text}");
        }
    }
}

#[test]
fn a_commit_behind_is_looked_for_where_records_are() {
    let store = StoreId::random();
    let group = |chunks: &[PreparedChunk]| {
        let mut out = Vec::new();
        format::encode_group(&mut out, 0, (store, SegmentId::new(1), 0), chunks).unwrap();
        out
    };
    let commit = |sequence| {
        let mut out = Vec::new();
        format::encode_commit(&mut out, (store, sequence), &batch(30));
        out
    };
    let behind = |bytes: &[u8]| stream::commit_behind(&mut &bytes[..], 0, store, 3).unwrap();
    let fake = group(&[forged(store, 4..9)]);
    assert_eq!(behind(&[&fake[..], &commit(3), &commit(4)].concat()), Some(4));
    assert_eq!(behind(&[&fake[..], &commit(3), &[0; 100]].concat()), None);
    assert_eq!(behind(&fake[..fake.len() - 10]), None, "a payload that is not all there");
    let headless = &fake[1..];
    assert_eq!(
        behind(&[headless, &commit(3), &[0; 100]].concat()),
        None,
        "it ends what was written"
    );
    assert_eq!(behind(&[headless, &commit(3), b"x"].concat()), Some(7), "something follows");
    assert_eq!(behind(&[headless, &commit(3), &commit(4)].concat()), Some(4));
    // Passed where it must be: a forged one at the end is not the end.
    assert_eq!(behind(&[&commit(3)[..], b"?", &commit(4), b"?", &commit(3)].concat()), Some(4));
}

/// The last append that was acknowledged is damaged, and the next one was torn: any byte of that
/// proves that the one before it was synced.
#[test]
fn the_begin_of_another_append_proves_the_one_before_it() {
    let made = |keep: &dyn Fn(usize) -> bool| {
        let disk = MemoryDisk::new();
        let mut log = two_commits(&disk);
        let third = usize::try_from(log.position().offset_bytes).unwrap();
        let name = log_file(log.segment());
        log.append(&append_of(&log, 3..5), &batch(700)).unwrap();
        disk.inject(Fault::Sync(0));
        assert!(log.append(&append_of(&log, 3..5), &batch(700)).is_err());
        let mut sector = 0;
        let disk = disk.crash(|| {
            sector += 1;
            keep(sector - 1)
        });
        // Far inside the bytes of its chunks.
        disk.flip_bit(name, third + 30_000);
        (disk, name, third)
    };
    for kept in 0..SECTORS - 20 {
        let (disk, name, third) = made(&|sector| sector == kept);
        let length = disk.open(name).unwrap().length_bytes().unwrap();
        let all = disk.open(name).unwrap().read_at(0, usize::try_from(length).unwrap()).unwrap();
        let bare = made(&|_| false).0.open(name).unwrap();
        let bare = bare.read_at(0, usize::try_from(bare.length_bytes().unwrap()).unwrap()).unwrap();
        let is_seen = all.iter().rposition(|&b| b != 0) > bare.iter().rposition(|&b| b != 0);
        let recovered = recover(&memory(&disk));
        if is_seen {
            let text = recovered.err().unwrap().to_string();
            assert!(text.contains("commit 3 is damaged"), "{kept}: {text}");
            let begin = stream::last_append(&mut &all[..], store_of(&all)).unwrap();
            assert!(begin > u64::try_from(third).unwrap(), "a rebuild takes it, {kept}");
        } else {
            // As it might have been torn itself.
            assert_eq!(recovered.unwrap().1.len(), 2, "{kept}");
        }
    }
    assert!((0..SECTORS).any(|kept| recover(&memory(&made(&|sector| sector == kept).0)).is_err()));
}

fn store_of(log: &[u8]) -> StoreId {
    format::decode_file_header(log_file(SegmentId::new(1)), log).unwrap()
}

/// A file that counts what is read of it.
#[derive(Debug)]
struct Counting(Vec<u8>, AtomicU64);

impl DiskFile for Counting {
    fn read_at(&self, offset_bytes: u64, length: usize) -> Result<Vec<u8>> {
        self.1.fetch_add(u64::try_from(length).unwrap(), Ordering::Relaxed);
        let start = usize::try_from(offset_bytes).unwrap();
        Ok(self.0[start..start + length].to_vec())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<()> {
        unreachable!("it is only read")
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(u64::try_from(self.0.len()).unwrap())
    }

    fn truncate(&self, _: u64) -> Result<()> {
        unreachable!("it is only read")
    }
}

/// What only looks like the begin of commits costs no more than it says they have.
#[test]
fn a_torn_append_full_of_begins_of_commits_is_read_a_few_times_at_most() {
    let claim = |body_bytes: u32| {
        let mut record = b"SWCM".to_vec();
        record.extend_from_slice(&body_bytes.to_be_bytes());
        record.extend_from_slice(&7_u64.to_be_bytes());
        record.extend_from_slice(&[1; 4]);
        record
    };
    // One that reaches beyond what is read at a time, and thousands before it that do not.
    let mut bytes: Vec<u8> = (0..3000).flat_map(|_| claim(1)).collect();
    bytes.extend(claim(1_048_000));
    bytes.resize(bytes.len() + (1 << 20), 1);
    let (store, length) = (StoreId::random(), u64::try_from(bytes.len()).unwrap());
    let file = Arc::new(Counting(bytes, AtomicU64::new(0)));
    let mut reader = super::super::reader::FileReader::new(file.clone()).unwrap();
    assert_eq!(stream::commit_behind(&mut reader, 0, store, 3).unwrap(), None);
    let read = file.1.load(Ordering::Relaxed);
    assert!(read <= 8 * length, "{read} bytes of a file of {length}");
}

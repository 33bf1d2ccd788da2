//! Commit, dedup, read, reclaim.

use std::cell::LazyCell;
use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, SamplingMode, Throughput};
use slackwater_blockstore::{BLOCK_BYTES, BLOCK_BYTES_U64, Options, Source};

use crate::common::{path, timed};
use crate::fixture::Fixture;

/// Blocks of one commit of new data.
const COMMITS: [(&str, u64); 3] = [("4KiB", 1), ("1MiB", 256), ("64MiB", 16_384)];

/// Blocks of a MiB.
const MIB_BLOCKS: u64 = 256;

/// MiB that the store holds when data is written a second time.
const KNOWN_MIB: u64 = 64;

/// Blocks of the file that reads go to: four times what the store's memory holds.
const READ_BLOCKS: u64 = (Options::MEMORY_BYTES_MIN << 2) / BLOCK_BYTES_U64;

/// Blocks between two reads that are to miss: beyond any read-ahead, and coprime to the number
/// of blocks, so that each block is read once before one is read again.
const MISS_STRIDE_BLOCKS: u64 = 4099;

/// Blocks that a clone wrote before it is deleted.
const RECLAIMED_BLOCKS: u64 = 1000;

pub(crate) fn commit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("commit");
    group.sampling_mode(SamplingMode::Flat);
    for (name, blocks) in COMMITS {
        // A store of its own, so that none carries what another wrote.
        let mut fixture = LazyCell::new(Fixture::quiet);
        let mut inode = None;
        group.throughput(Throughput::Bytes(blocks * BLOCK_BYTES_U64));
        group.bench_function(name, |bencher| {
            let fixture = &mut *fixture;
            let inode = *inode.get_or_insert_with(|| fixture.file("file", 1 << 30));
            bencher.iter_custom(|count| {
                timed(count, |_| {
                    let data = fixture.content.blocks(blocks);
                    let start = Instant::now();
                    fixture.write_data(inode, 0, &data);
                    start.elapsed()
                })
            });
        });
    }
    group.finish();
}

pub(crate) fn dedup(criterion: &mut Criterion) {
    let mut known = LazyCell::new(|| {
        let mut fixture = Fixture::quiet();
        let source = fixture.file("source", 1 << 30);
        let data = fixture.content.blocks(KNOWN_MIB * MIB_BLOCKS);
        fixture.write_data(source, 0, &data);
        let target = fixture.file("target", 1 << 30);
        (fixture, data, target)
    });
    let mut group = criterion.benchmark_group("dedup");
    group.throughput(Throughput::Bytes(MIB_BLOCKS * BLOCK_BYTES_U64));
    group.bench_function("hit_1MiB", |bencher| {
        let (fixture, data, target) = &mut *known;
        let before = fixture.store.stats();
        let mut turn = 0;
        bencher.iter_custom(|count| {
            timed(count, |_| {
                turn = (turn + 1) % usize::try_from(KNOWN_MIB).expect("a small number");
                let piece = data.slice(turn << 20..(turn + 1) << 20);
                let start = Instant::now();
                fixture.write_data(*target, 0, &piece);
                start.elapsed()
            })
        });
        let after = fixture.store.stats();
        assert_eq!(after.dedup_misses, before.dedup_misses, "the duplicates were stored anew");
    });
    group.bench_function("miss_1MiB", |bencher| {
        let (fixture, _, target) = &mut *known;
        let before = fixture.store.stats();
        bencher.iter_custom(|count| {
            timed(count, |_| {
                let data = fixture.content.blocks(MIB_BLOCKS);
                let start = Instant::now();
                fixture.write_data(*target, 0, &data);
                start.elapsed()
            })
        });
        let after = fixture.store.stats();
        assert_eq!(after.dedup_hits, before.dedup_hits, "new data was taken for known");
    });
    group.finish();
}

pub(crate) fn read(criterion: &mut Criterion) {
    let file = LazyCell::new(|| {
        let mut fixture = Fixture::new();
        let inode = fixture.file("file", READ_BLOCKS * BLOCK_BYTES_U64);
        for first in (0..READ_BLOCKS).step_by(1024) {
            fixture.write(inode, first * BLOCK_BYTES_U64, 1024.min(READ_BLOCKS - first));
        }
        (fixture, inode)
    });
    let read = |block: u64| {
        let (fixture, inode) = &*file;
        let offset_bytes = block % READ_BLOCKS * BLOCK_BYTES_U64;
        fixture.store.read(Source::File(*inode), offset_bytes, BLOCK_BYTES).expect("a read")
    };
    let mut group = criterion.benchmark_group("read_4KiB");
    group.throughput(Throughput::Bytes(BLOCK_BYTES_U64));
    group.bench_function("hit", |bencher| {
        // The first read finds nothing cached, and is not measured.
        black_box(read(0));
        bencher.iter(|| black_box(read(0)));
    });
    let mut block = 0;
    group.bench_function("miss", |bencher| {
        let before = file.0.store.stats();
        bencher.iter(|| {
            block += MISS_STRIDE_BLOCKS;
            black_box(read(block))
        });
        let after = file.0.store.stats();
        let hits = after.cache_hits - before.cache_hits;
        let misses = after.cache_misses - before.cache_misses;
        assert!(hits <= misses, "the misses were {hits} hits and {misses} misses");
    });
    group.finish();
}

pub(crate) fn reclaim(criterion: &mut Criterion) {
    let mut prepared = LazyCell::new(|| {
        let mut fixture = Fixture::quiet();
        let inode = fixture.file("image", 1 << 30);
        fixture.write(inode, 0, RECLAIMED_BLOCKS);
        let snapshot = fixture.snapshot("image");
        (fixture, snapshot)
    });
    let mut group = criterion.benchmark_group("reclaim");
    group.sampling_mode(SamplingMode::Flat);
    group.bench_function(format!("clone_of_{RECLAIMED_BLOCKS}_blocks"), |bencher| {
        let (fixture, snapshot) = &mut *prepared;
        let target = path("clone");
        bencher.iter_custom(|count| {
            timed(count, |_| {
                let clone = fixture.store.clone_snapshot(*snapshot, &target).expect("a clone");
                fixture.write(clone.attributes.inode, 0, RECLAIMED_BLOCKS);
                let start = Instant::now();
                fixture.store.remove_path(&target).expect("removed");
                fixture.store.gc().expect("garbage was collected");
                start.elapsed()
            })
        });
    });
    group.finish();
}

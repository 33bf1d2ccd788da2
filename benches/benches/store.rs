//! The block store alone: clone and snapshot by size, extents and depth, commit, read, dedup.
//!
//! `cargo bench -p slackwater-benches -- --quick`
#![allow(clippy::expect_used, reason = "a failure ends the run, whose store is temporary")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use slackwater_benches::{Content, write_extents};
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FilePath, InodeId, Options, SnapshotId, SnapshotRequest, Source,
    Stability, Store,
};
use tempfile::TempDir;

/// Blocks of the file that reads go to: four times what the store's memory holds.
const READ_BLOCKS: u64 = (Options::MEMORY_BYTES_MIN << 2) / BLOCK_BYTES_U64;

/// Blocks between two reads that are to miss: beyond any read-ahead, and coprime to the number
/// of blocks, so that each block is read once before one is read again.
const MISS_STRIDE_BLOCKS: u64 = 4099;

struct Fixture {
    // Dropped before its folder.
    store: Arc<Store>,
    content: Content,
    _folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = Options::new(folder.path());
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        let store = Store::open(options).expect("a store");
        Self { store, content: Content::new(1), _folder: folder }
    }

    fn file(&self, name: &str, size_bytes: u64) -> InodeId {
        let file = self.store.create_file(&path(name), size_bytes).expect("a file");
        file.attributes.inode
    }

    fn write(&mut self, inode: InodeId, offset_bytes: u64, blocks: u64) {
        let data = self.content.blocks(blocks);
        self.store.write(inode, offset_bytes, data, Stability::FileSync).expect("a write");
    }

    fn snapshot(&self, name: &str) -> SnapshotId {
        let request = SnapshotRequest::default();
        self.store.snapshot(&path(name), request).expect("a snapshot").id
    }

    /// The files whose clones and snapshots are compared: name, inode, snapshot.
    fn shapes(&mut self) -> Vec<(String, InodeId, SnapshotId)> {
        let mut shapes = Vec::new();
        for (name, size_bytes) in [("1MiB", 1 << 20), ("1GiB", 1 << 30), ("1TiB", 1 << 40)] {
            let inode = self.file(name, size_bytes);
            self.write(inode, 0, 16);
            shapes.push((format!("size/{name}"), inode, self.snapshot(name)));
        }
        for extents in [1, 1000, 100_000] {
            let name = format!("extents-{extents}");
            let inode = write_extents(&self.store, &path(&name), extents, &mut self.content)
                .expect("extents");
            shapes.push((format!("extents/{extents}"), inode, self.snapshot(&name)));
        }
        for depth in [1, 100, 1000] {
            let name = format!("depth-{depth}");
            let inode = self.file(&name, 1 << 30);
            for block in 0..depth {
                self.write(inode, block * BLOCK_BYTES_U64, 1);
                self.snapshot(&name);
            }
            self.write(inode, 0, 1);
            shapes.push((format!("depth/{depth}"), inode, self.snapshot(&name)));
        }
        shapes
    }
}

fn path(name: &str) -> FilePath {
    FilePath::parse(name).expect("a path")
}

/// The path of the file that a shape stands for.
fn file_of(shape: &str) -> FilePath {
    let (family, case) = shape.split_once('/').expect("family and case");
    path(&if family == "size" { case.to_owned() } else { format!("{family}-{case}") })
}

fn clone_and_snapshot(criterion: &mut Criterion) {
    let mut fixture = Fixture::new();
    let shapes = fixture.shapes();
    let target = path("clone");
    let mut group = criterion.benchmark_group("clone");
    for (shape, _, snapshot) in &shapes {
        let store = &fixture.store;
        group.bench_function(shape, |bencher| {
            bencher.iter_custom(|count| {
                timed(count, |_| {
                    let start = Instant::now();
                    black_box(store.clone_snapshot(*snapshot, &target).expect("a clone"));
                    let elapsed = start.elapsed();
                    store.remove_path(&target).expect("removed");
                    elapsed
                })
            });
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("snapshot");
    for (shape, inode, _) in &shapes {
        let file = file_of(shape);
        let fixture = &mut fixture;
        group.bench_function(shape, |bencher| {
            bencher.iter_custom(|count| {
                timed(count, |_| {
                    fixture.write(*inode, 0, 1);
                    let request = SnapshotRequest::default();
                    let start = Instant::now();
                    let snapshot = fixture.store.snapshot(&file, request).expect("a snapshot");
                    let elapsed = start.elapsed();
                    fixture.store.delete_snapshot(snapshot.id).expect("deleted");
                    elapsed
                })
            });
        });
    }
    group.finish();
}

/// The sum of what `count` calls say that they took.
fn timed(count: u64, mut once: impl FnMut(u64) -> Duration) -> Duration {
    (0..count).map(&mut once).sum()
}

fn commit(criterion: &mut Criterion) {
    let fixture = Fixture::new();
    let inode = fixture.file("file", 1 << 30);
    let mut content = fixture.content.clone();
    let mut group = criterion.benchmark_group("commit_new");
    for blocks in [1, 256] {
        group.throughput(Throughput::Bytes(blocks * BLOCK_BYTES_U64));
        group.bench_function(BenchmarkId::from_parameter(blocks), |bencher| {
            bencher.iter_batched(
                || content.blocks(blocks),
                |data| fixture.store.write(inode, 0, data, Stability::FileSync).expect("a write"),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("commit_duplicate");
    let blocks = 256;
    let data = content.blocks(blocks);
    let source = fixture.file("source", 1 << 30);
    fixture.store.write(source, 0, data.clone(), Stability::FileSync).expect("a write");
    let before = fixture.store.stats();
    group.throughput(Throughput::Bytes(blocks * BLOCK_BYTES_U64));
    group.bench_function(BenchmarkId::from_parameter(blocks), |bencher| {
        let write = || fixture.store.write(inode, 0, data.clone(), Stability::FileSync);
        bencher.iter(|| write().expect("a write"));
    });
    group.finish();
    let after = fixture.store.stats();
    assert_eq!(after.dedup_misses, before.dedup_misses, "the duplicates were stored anew");
}

fn read(criterion: &mut Criterion) {
    let mut fixture = Fixture::new();
    let inode = fixture.file("file", READ_BLOCKS * BLOCK_BYTES_U64);
    for first in (0..READ_BLOCKS).step_by(1024) {
        fixture.write(inode, first * BLOCK_BYTES_U64, 1024.min(READ_BLOCKS - first));
    }
    let store = &fixture.store;
    let read = |block: u64| {
        let offset = block % READ_BLOCKS * BLOCK_BYTES_U64;
        store.read(Source::File(inode), offset, BLOCK_BYTES).expect("a read")
    };
    let mut group = criterion.benchmark_group("read_4KiB");
    group.throughput(Throughput::Bytes(BLOCK_BYTES_U64));
    group.bench_function("hit", |bencher| bencher.iter(|| black_box(read(0))));
    let before = store.stats();
    let mut block = 0;
    group.bench_function("miss", |bencher| {
        bencher.iter(|| {
            block += MISS_STRIDE_BLOCKS;
            black_box(read(block))
        });
    });
    group.finish();
    let after = store.stats();
    let hits = after.cache_hits - before.cache_hits;
    let misses = after.cache_misses - before.cache_misses;
    // Both are 0 where a filter left this bench out.
    assert!(hits <= misses, "the misses were {hits} hits and {misses} misses");
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
        .configure_from_args();
    clone_and_snapshot(&mut criterion);
    commit(&mut criterion);
    read(&mut criterion);
    criterion.final_summary();
}

//! Clone and snapshot: by size, extents and depth of the file, and by how many clones there are.

use std::cell::LazyCell;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use criterion::{BenchmarkId, Criterion};
use slackwater_benches::write_extents;
use slackwater_blockstore::{BLOCK_BYTES_U64, InodeId, SnapshotId, SnapshotRequest, Store};

use crate::common::{path, timed};
use crate::fixture::Fixture;

/// What differs between files, and the cases of it.
const SHAPES: [(&str, [u64; 3]); 3] = [
    ("size", [1 << 20, 1 << 30, 1 << 40]),
    ("extents", [1, 1000, 100_000]),
    ("depth", [1, 100, 1000]),
];

/// Clones that exist while one more is made.
const EXISTING: [u64; 3] = [100, 10_000, 100_000];

/// Threads that make those: their commits share one sync.
const MAKERS: u64 = 16;

/// Clones in one folder.
const CLONES_PER_FOLDER: u64 = 1000;

/// A file whose clones and snapshots are measured.
struct Shape {
    file: String,
    inode: InodeId,
    snapshot: SnapshotId,
}

/// The name of a case: a size in the unit that it is a power of.
fn case_name(family: &str, case: u64) -> String {
    match (family, case) {
        ("size", 0x10_0000) => "1MiB".to_owned(),
        ("size", 0x4000_0000) => "1GiB".to_owned(),
        ("size", _) => "1TiB".to_owned(),
        _ => case.to_string(),
    }
}

fn make(fixture: &mut Fixture, family: &str, case: u64) -> Shape {
    let file = format!("{family}-{case}");
    let inode = match family {
        "extents" => write_extents(&fixture.store, &path(&file), case, &mut fixture.content)
            .expect("extents"),
        "depth" => {
            let inode = fixture.file(&file, 1 << 30);
            for block in 1..case {
                fixture.write(inode, block * BLOCK_BYTES_U64, 1);
                fixture.snapshot(&file);
            }
            fixture.write(inode, 0, 1);
            inode
        }
        _ => {
            let inode = fixture.file(&file, case);
            fixture.write(inode, 0, 16);
            inode
        }
    };
    let snapshot = fixture.snapshot(&file);
    Shape { file, inode, snapshot }
}

/// The time of one clone; its deletion is not measured.
fn time_clone(store: &Store, snapshot: SnapshotId) -> std::time::Duration {
    let target = path("clone");
    let start = Instant::now();
    black_box(store.clone_snapshot(snapshot, &target).expect("a clone"));
    let elapsed = start.elapsed();
    store.remove_path(&target).expect("removed");
    elapsed
}

pub(crate) fn clone_and_snapshot(criterion: &mut Criterion) {
    let mut fixture = Fixture::new();
    for (family, cases) in SHAPES {
        for case in cases {
            // Made only if no filter leaves both benches out.
            let mut made = None;
            let id = format!("{family}/{}", case_name(family, case));
            criterion.bench_function(&format!("clone/{id}"), |bencher| {
                let shape = made.get_or_insert_with(|| make(&mut fixture, family, case));
                let (store, snapshot) = (&fixture.store, shape.snapshot);
                bencher.iter_custom(|count| timed(count, |_| time_clone(store, snapshot)));
            });
            criterion.bench_function(&format!("snapshot/{id}"), |bencher| {
                let shape = made.get_or_insert_with(|| make(&mut fixture, family, case));
                let file = path(&shape.file);
                bencher.iter_custom(|count| {
                    timed(count, |_| {
                        fixture.write(shape.inode, 0, 1);
                        let start = Instant::now();
                        let request = SnapshotRequest::default();
                        let snapshot = fixture.store.snapshot(&file, request).expect("a snapshot");
                        let elapsed = start.elapsed();
                        fixture.store.delete_snapshot(snapshot.id).expect("deleted");
                        elapsed
                    })
                });
            });
        }
    }
}

/// One image with ever more clones.
struct Crowd {
    fixture: Fixture,
    snapshot: SnapshotId,
    clones: u64,
}

impl Crowd {
    fn new() -> Self {
        let mut fixture = Fixture::new();
        let inode = fixture.file("image", 1 << 30);
        fixture.write(inode, 0, 1024);
        let snapshot = fixture.snapshot("image");
        Self { fixture, snapshot, clones: 0 }
    }

    fn grow(&mut self, clones: u64) {
        let (next, store, snapshot) =
            (AtomicU64::new(self.clones), &self.fixture.store, self.snapshot);
        std::thread::scope(|scope| {
            for _ in 0..MAKERS {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= clones {
                            return;
                        }
                        let target = format!("clones/{}/{number}", number / CLONES_PER_FOLDER);
                        store.clone_snapshot(snapshot, &path(&target)).expect("a clone");
                    }
                });
            }
        });
        self.clones = self.clones.max(clones);
    }
}

pub(crate) fn clone_among_many(criterion: &mut Criterion) {
    let mut crowd = LazyCell::new(Crowd::new);
    let mut group = criterion.benchmark_group("clone_among");
    for existing in EXISTING {
        group.bench_function(BenchmarkId::from_parameter(existing), |bencher| {
            let crowd = &mut *crowd;
            crowd.grow(existing);
            let (store, snapshot) = (&crowd.fixture.store, crowd.snapshot);
            bencher.iter_custom(|count| timed(count, |_| time_clone(store, snapshot)));
        });
    }
    group.finish();
}

//! The block store alone: clone and snapshot by size, extents, depth and existing clones,
//! commit, read, dedup, reclaim, and what the machine itself does beside them.
//!
//! `cargo bench -p slackwater-benches --bench store -- --quick`
#![allow(clippy::expect_used, reason = "a failure ends the run, whose store is temporary")]

#[path = "../common/mod.rs"]
mod common;
mod data;
mod fixture;
mod latency;

use std::io::Write;
use std::time::Instant;

use criterion::Criterion;
use slackwater_benches::Content;

/// The disk and the processor without any store: where these are slower than at the baseline,
/// the machine is, and not the code.
fn machine(criterion: &mut Criterion) {
    let mut file = tempfile::tempfile().expect("a file");
    let block = Content::new(1).blocks(1);
    let mut group = criterion.benchmark_group("machine");
    group.bench_function("append_and_sync_4KiB", |bencher| {
        bencher.iter(|| {
            file.write_all(&block).expect("a write");
            file.sync_data().expect("a sync");
        });
    });
    let mut content = Content::new(2);
    group.bench_function("random_words_1MiB", |bencher| {
        bencher.iter_custom(|count| {
            let start = Instant::now();
            for _ in 0..count {
                std::hint::black_box(content.blocks(256));
            }
            start.elapsed()
        });
    });
    group.finish();
}

fn main() {
    let mut criterion = common::criterion();
    machine(&mut criterion);
    latency::clone_and_snapshot(&mut criterion);
    latency::clone_among_many(&mut criterion);
    data::commit(&mut criterion);
    data::dedup(&mut criterion);
    data::read(&mut criterion);
    data::reclaim(&mut criterion);
    criterion.final_summary();
}

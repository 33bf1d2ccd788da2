//! The REST face over a store, on loopback: one connection, client and server in this process.
//!
//! `cargo bench -p slackwater-benches --bench rest -- --quick`
#![allow(clippy::expect_used, reason = "a failure ends the run, whose store is temporary")]

mod common;

use std::hint::black_box;
use std::time::Instant;

use criterion::Criterion;
use slackwater_benches::Content;
use slackwater_client::types::{CreateSnapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource};
use tokio::runtime::Runtime;

use common::{Appliance, timed};

/// The file that is cloned, and its size.
const IMAGE: &str = "image";
const IMAGE_BYTES: u64 = 1 << 30;

/// Bytes of the file that a map is asked for: a window.
const MAP_BYTES: u64 = 1 << 20;

async fn snapshot(client: &Client) -> SnapshotId {
    let request = CreateSnapshot { path: IMAGE.to_owned(), ..CreateSnapshot::default() };
    client.create_snapshot(&request).await.expect("a snapshot").id
}

fn snapshots_and_clones(criterion: &mut Criterion, runtime: &Runtime, client: &Client) {
    let image = runtime.block_on(snapshot(client));
    let mut group = criterion.benchmark_group("rest");
    group.bench_function("snapshot", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, |_| {
                let start = Instant::now();
                let taken = runtime.block_on(snapshot(client));
                let elapsed = start.elapsed();
                runtime.block_on(client.delete_snapshot(taken)).expect("deleted");
                elapsed
            })
        });
    });
    group.bench_function("clone", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, |_| {
                let start = Instant::now();
                let cloned = runtime.block_on(client.create_clone(image, "clone"));
                let elapsed = start.elapsed();
                black_box(cloned.expect("a clone"));
                runtime.block_on(client.delete_file("clone")).expect("deleted");
                elapsed
            })
        });
    });
    group.finish();
}

fn files(criterion: &mut Criterion, runtime: &Runtime, client: &Client) {
    let mut group = criterion.benchmark_group("rest");
    group.bench_function("create_and_delete_file", |bencher| {
        bencher.iter(|| {
            runtime.block_on(async {
                client.create_file("file", 1 << 20).await.expect("a file");
                client.delete_file("file").await.expect("deleted");
            });
        });
    });
    let range = ByteRange::new(0, MAP_BYTES).expect("a range");
    group.bench_function("map_of_a_window", |bencher| {
        bencher.iter(|| {
            let map = runtime.block_on(client.block_map(DataSource::File(IMAGE), range));
            black_box(map.expect("a map"))
        });
    });
    group.finish();
}

fn main() {
    let mut criterion = common::criterion();
    let appliance = Appliance::start();
    let client = appliance.client();
    // One thread makes the calls and drives their connection: a sample holds no waking of
    // another thread of the client.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        client.create_file(IMAGE, IMAGE_BYTES).await.expect("a file");
        let data = Content::new(1).blocks(1024);
        client.write_bytes(IMAGE, 0, data).await.expect("a write");
    });
    snapshots_and_clones(&mut criterion, &runtime, &client);
    files(&mut criterion, &runtime, &client);
    criterion.final_summary();
}

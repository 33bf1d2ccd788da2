//! The NFS front end over a store, on loopback: one connection, client and server in this
//! process.
//!
//! `cargo bench -p slackwater-benches --bench nfs -- --quick`
#![allow(clippy::expect_used, reason = "a failure ends the run, whose store is temporary")]

mod client;
#[path = "../common/mod.rs"]
mod common;

use std::time::Instant;

use criterion::{Criterion, Throughput};
use slackwater_benches::Content;
use slackwater_benches::wire::{Handle, call};
use slackwater_blockstore::{BLOCK_BYTES, BLOCK_BYTES_U64, Stability};

use client::Client;
use common::{Appliance, path};

/// Size of the files: all of it stays in the store's memory.
const FILE_BYTES: u64 = 32 << 20;

/// Entries of the directory that is listed, which one answer of this size holds.
const ENTRIES: u64 = 256;
const LISTING_BYTES: u32 = 64 << 10;

/// Calls in flight, where it is more than one.
const DEPTH: u64 = 16;

/// Blocks between two that are read or written: coprime to the number of blocks of a file.
const STRIDE_BLOCKS: u64 = 1031;

/// Bytes of a block, as a call has it.
const BLOCK_BYTES_U32: u32 = 4096;
const _: () = assert!(BLOCK_BYTES_U32 as usize == BLOCK_BYTES);

/// What all benches work on.
struct Export {
    client: Client,
    root: Handle,
    listed: Handle,
    read: Handle,
    written: Handle,
}

impl Export {
    fn new(appliance: &Appliance) -> Self {
        let store = &appliance.store;
        let file = store.create_file(&path("read"), FILE_BYTES).expect("a file");
        let inode = file.attributes.inode;
        for offset_bytes in (0..FILE_BYTES).step_by(1 << 20) {
            let data = Content::new(offset_bytes + 1).blocks(256);
            store.write(inode, offset_bytes, data, Stability::Unstable).expect("a write");
        }
        store.commit(inode).expect("a commit");
        store.create_file(&path("written"), FILE_BYTES).expect("a file");
        for number in 0..ENTRIES {
            store.create_file(&path(&format!("listed/{number}")), 0).expect("a file");
        }
        let names = ["listed", "read", "written"];
        let (client, root, [listed, read, written]) = Client::connect(appliance.nfs, names);
        Self { client, root, listed, read, written }
    }
}

/// The offset of the block that a call is about.
fn offset_of(number: u64) -> u64 {
    number * STRIDE_BLOCKS * BLOCK_BYTES_U64 % FILE_BYTES
}

/// Benches calls that carry so many bytes, and are made of the number of the call.
fn bench(
    criterion: &mut Criterion,
    client: &mut Client,
    (name, depth, bytes): (&str, u64, u64),
    encode: impl Fn(&mut Vec<u8>, u32, u64),
) {
    let mut group = criterion.benchmark_group("nfs");
    if bytes > 0 {
        group.throughput(Throughput::Bytes(bytes));
    }
    let mut done = 0;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            let start = Instant::now();
            client.calls((count, depth), |out, xid, number| encode(out, xid, done + number));
            done += count;
            start.elapsed()
        });
    });
    group.finish();
}

fn names(criterion: &mut Criterion, export: &mut Export) {
    let Export { client, root, listed, read, .. } = export;
    let attributes = |out: &mut Vec<u8>, xid, _| call::get_attributes(out, xid, read);
    bench(criterion, client, ("getattr", 1, 0), attributes);
    bench(criterion, client, ("getattr_depth_16", DEPTH, 0), attributes);
    bench(criterion, client, ("lookup", 1, 0), |out, xid, _| call::lookup(out, xid, root, "read"));
    let list = |out: &mut Vec<u8>, xid| {
        let place = call::DirectoryPlace::default();
        call::read_directory_plus(out, xid, listed, place, LISTING_BYTES);
    };
    client.call(list);
    assert_eq!(client.last_word(), 1, "one answer does not hold the whole directory");
    bench(criterion, client, ("readdirplus_256", 1, 0), |out, xid, _| list(out, xid));
}

fn reads(criterion: &mut Criterion, export: &mut Export) {
    let Export { client, read, .. } = export;
    let random = |out: &mut Vec<u8>, xid, number| {
        call::read(out, xid, read, offset_of(number), BLOCK_BYTES_U32);
    };
    bench(criterion, client, ("read_4KiB", 1, BLOCK_BYTES_U64), random);
    bench(criterion, client, ("read_4KiB_depth_16", DEPTH, BLOCK_BYTES_U64), random);
    bench(criterion, client, ("read_1MiB", 1, 1 << 20), |out, xid, number| {
        call::read(out, xid, read, (number << 20) % FILE_BYTES, 1 << 20);
    });
}

fn writes(criterion: &mut Criterion, export: &mut Export) {
    let Export { client, written, .. } = export;
    let random = Content::new(3).blocks(1);
    let write = |out: &mut Vec<u8>, xid, number: u64| {
        call::write_head(out, xid, written, offset_of(number), BLOCK_BYTES_U32);
        // Each block is one that the store has not seen.
        out.extend_from_slice(&number.to_be_bytes());
        out.extend_from_slice(&random[size_of::<u64>()..]);
    };
    bench(criterion, client, ("write_4KiB_depth_16", DEPTH, BLOCK_BYTES_U64), write);
    // Beyond the numbers of the bench before.
    let mut number = 1 << 40;
    let mut group = criterion.benchmark_group("nfs");
    group.bench_function("write_4KiB_and_commit", |bencher| {
        bencher.iter(|| {
            number += 1;
            client.call(|out, xid| write(out, xid, number));
            client.call(|out, xid| call::commit(out, xid, written));
        });
    });
    group.finish();
}

fn main() {
    let mut criterion = common::criterion();
    let appliance = Appliance::start();
    let mut export = Export::new(&appliance);
    names(&mut criterion, &mut export);
    reads(&mut criterion, &mut export);
    writes(&mut criterion, &mut export);
    criterion.final_summary();
}

//! Writers at the limits of what may be dirty, and writes that may not wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::*;
use crate::disk::Fault;
use crate::error::ErrorKind;
use crate::kv::Family;
use crate::options::Options;
use crate::testing::{World, blocks, options};
use crate::time::Timestamp;

const MIB: usize = 1 << 20;

/// Blocks of a mebibyte.
const MIB_BLOCKS: u64 = 256;

const SEGMENT_BYTES: u64 = 256 << 20;

fn world() -> World {
    World::new(options(SEGMENT_BYTES), None)
}

/// Mebibyte `number` of a stream: cheap to make, and each block another.
fn piece(number: u64) -> Bytes {
    let mut bytes = vec![1; MIB];
    for (block, place) in (number * MIB_BLOCKS..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
        place[..8].copy_from_slice(&(block + 1).to_le_bytes());
    }
    Bytes::from(bytes)
}

fn try_it(world: &World, inode: InodeId, offset: u64, data: &Bytes) -> Option<Result<Written>> {
    try_write(&world.core, inode, offset, data)
}

#[test]
fn a_writer_over_the_limit_of_its_file_waits_and_goes_on() {
    let world = world();
    let inode = world.create("f");
    let file = world.core.file(inode).unwrap();
    let pieces = 40;
    let limit = FILE_DIRTY_BYTES_MAX / MIB;
    let written = AtomicUsize::new(0);
    thread::scope(|scope| {
        let flushing = file.flush.lock();
        let writer = scope.spawn(|| {
            for number in 0..pieces {
                world.write(inode, number * MIB_BLOCKS, piece(number));
                written.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Its data is taken before it waits.
        while file.state.read().unflushed_bytes() <= FILE_DIRTY_BYTES_MAX {
            assert!(!writer.is_finished());
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(2 * ROOM_PERIOD);
        assert_eq!(written.load(Ordering::SeqCst), limit, "it waits with the one that is too much");
        assert_eq!(file.state.read().unflushed_bytes(), FILE_DIRTY_BYTES_MAX + MIB);
        drop(flushing);
        writer.join().unwrap();
    });
    flush(&world.core, &file).unwrap();
    assert_eq!(world.core.files.dirty_bytes(), 0);
    let expected: Vec<u8> = (0..pieces).flat_map(|number| piece(number).to_vec()).collect();
    assert!(world.content(inode) == expected);
    world.check();
}

#[test]
fn many_writers_of_one_file_over_its_limit_all_go_on() {
    let world = world();
    let inode = world.create("f");
    thread::scope(|scope| {
        for writer in 0..4 {
            let world = &world;
            scope.spawn(move || {
                for number in 0..16 {
                    let number = number * 4 + writer;
                    world.write(inode, number * MIB_BLOCKS, piece(number));
                }
            });
        }
    });
    let file = world.core.file(inode).unwrap();
    assert!(file.state.read().unflushed_bytes() <= FILE_DIRTY_BYTES_MAX);
    flush(&world.core, &file).unwrap();
    assert_eq!(world.core.files.dirty_bytes(), 0);
    let expected: Vec<u8> = (0..64).flat_map(|number| piece(number).to_vec()).collect();
    assert!(world.content(inode) == expected);
}

#[test]
fn a_writer_that_waits_learns_of_a_failing_disk() {
    let world = world();
    let inode = world.create("f");
    let limit = u64::try_from(FILE_DIRTY_BYTES_MAX / MIB).unwrap();
    for number in 0..limit {
        world.write(inode, number * MIB_BLOCKS, piece(number));
    }
    world.disk.inject(Fault::Sync(0));
    let offset = limit << 20;
    let error = write(&world.core, inode, offset, piece(limit), Stability::Unstable).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    let error = write(&world.core, inode, 0, piece(0), Stability::Unstable).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    let refused = try_it(&world, inode, 0, &piece(0)).unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Poisoned, "a refusal needs no waiting");
}

#[test]
fn a_write_that_may_not_wait_is_taken_only_where_it_need_not() {
    let world = world();
    let inode = world.create("f");
    let file = world.core.file(inode).unwrap();
    let data = |length: usize| Bytes::from(vec![9; length]);
    // Whole blocks, whatever is there.
    let written = try_it(&world, inode, 0, &blocks(&[1, 2, 3, 4])).unwrap().unwrap();
    assert_eq!(written.stability, Stability::Unstable);
    assert_eq!(written.verifier, world.core.committer.verifier());
    assert_eq!((written.file.before.size_bytes, written.file.after.size_bytes), (0, 4 * 4096));
    // A part of a block that is dirty, and one behind the end.
    assert!(try_it(&world, inode, 4100, &data(10)).unwrap().is_ok());
    assert!(try_it(&world, inode, 4 * 4096 + 7, &data(10)).unwrap().is_ok());
    assert!(try_it(&world, inode, 50, &data(0)).unwrap().is_ok());
    let mut expected = blocks(&[1, 2, 3, 4]).to_vec();
    expected[4100..4110].fill(9);
    expected.resize(4 * 4096 + 7, 0);
    expected.resize(4 * 4096 + 17, 9);
    assert!(world.content(inode) == expected);

    flush(&world.core, &file).unwrap();
    for (offset, length, is_taken) in [
        (4100, 10, false),
        (8192, 4097, false),
        (8191, 4097, false),
        (4096, 4096, true),
        (8192, 8192, true),
    ] {
        let got = try_it(&world, inode, offset, &data(length));
        assert_eq!(got.is_some(), is_taken, "{length} bytes at {offset}");
    }
    flush(&world.core, &file).unwrap();
    let reading = file.state.read();
    assert!(try_it(&world, inode, 0, &data(4096)).is_none(), "a reader has it locked");
    drop(reading);
    assert!(try_it(&world, inode, FILE_BYTES_MAX, &data(1)).is_none(), "the other way tells why");
    let unknown = world.create("unknown");
    assert!(world.core.files.get(unknown).is_none());
    assert!(try_it(&world, unknown, 0, &data(4096)).is_none(), "it would have to be loaded");
    world.check();
}

#[test]
fn a_write_that_may_not_wait_keeps_below_the_limits() {
    let of_file = world();
    let inode = of_file.create("f");
    let file = of_file.core.file(inode).unwrap();
    let limit = u64::try_from(FILE_DIRTY_BYTES_MAX / MIB).unwrap();
    for number in 0..limit {
        assert!(try_it(&of_file, inode, number << 20, &piece(number)).unwrap().is_ok());
    }
    let one = blocks(&[5]);
    assert!(try_it(&of_file, inode, 0, &one).is_none(), "the file has as much as it may");
    flush(&of_file.core, &file).unwrap();
    assert!(try_it(&of_file, inode, 0, &one).unwrap().is_ok());

    let mut options = options(SEGMENT_BYTES);
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    let of_store = World::new(options, None);
    let inodes = ["a", "b"].map(|name| of_store.create(name));
    for inode in inodes {
        of_store.core.file(inode).unwrap();
    }
    let budget = usize::try_from(of_store.core.budget.dirty_bytes).unwrap() / MIB;
    for number in 0..u64::try_from(budget).unwrap() {
        let [a, b] = inodes;
        let inode = if number.is_multiple_of(2) { a } else { b };
        assert!(try_it(&of_store, inode, number << 20, &piece(number)).unwrap().is_ok());
    }
    assert!(try_it(&of_store, inodes[0], 1 << 30, &one).is_none(), "the store has");
    let [a, _] = inodes.map(|inode| of_store.core.file(inode).unwrap());
    flush(&of_store.core, &a).unwrap();
    assert!(try_it(&of_store, inodes[0], 1 << 30, &one).unwrap().is_ok());
}

#[test]
fn a_write_that_may_not_wait_refuses_a_deleted_file() {
    let world = world();
    let inode = world.create("f");
    let file: Arc<File> = world.core.file(inode).unwrap();
    world.remove("f");
    assert!(try_it(&world, inode, 0, &blocks(&[1])).is_none(), "it is in memory no more");
    let outcome = put_dirty(&world.core, &file, &mut file.state.write(), (0, &blocks(&[1])), &[]);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(world.core.files.dirty_bytes(), 0);
}

/// Memory of a caller, which knows how much of it the store still holds.
struct Lent(Vec<u8>, Arc<AtomicUsize>);

impl Lent {
    fn new(data: Vec<u8>, held: &Arc<AtomicUsize>) -> Self {
        held.fetch_add(data.len(), Ordering::SeqCst);
        Self(data, Arc::clone(held))
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.1.fetch_sub(self.0.len(), Ordering::SeqCst);
    }
}

/// Of each large write all but one block is written over by the next, and that one holds all of it:
/// what dirty blocks hold is bounded over all files, not only what they are.
#[test]
fn blocks_that_hold_large_writes_count_by_what_they_hold() {
    const FILES: u64 = 8;
    const WRITES: u64 = 12;
    let mut small = options(SEGMENT_BYTES);
    small.memory_bytes = Options::MEMORY_BYTES_MIN;
    let world = World::new(small, None);
    let budget = usize::try_from(world.core.budget.dirty_bytes).unwrap();
    let held = Arc::new(AtomicUsize::new(0));
    let mut held_max = 0;
    for file in 0..FILES {
        let inode = world.create(&format!("f{file}"));
        for number in 0..WRITES {
            let data = piece(file * WRITES + number).to_vec();
            let data = Bytes::from_owner(Lent::new(data, &held));
            world.write(inode, number, data);
            held_max = held_max.max(held.load(Ordering::SeqCst));
        }
    }
    assert!(held_max <= budget + MIB, "{held_max} bytes are held, {budget} may be");
    assert!(held_max > budget / 2, "the test fills the budget");
    for file in 0..FILES {
        world.remove(&format!("f{file}"));
    }
    assert_eq!(held.load(Ordering::SeqCst), 0);
    assert_eq!(world.core.files.held_bytes(), 0);
}

/// It waits for a flush, as a part of a block is laid on what is committed; its client sends it again
/// meanwhile, and something newer.
#[test]
fn a_write_that_was_given_up_while_it_waited_is_not_carried_out() {
    let world = world();
    let inode = world.create("f");
    world.put(inode, 0, &[1]);
    let file = world.core.file(inode).unwrap();
    let late = || (10, Bytes::from(vec![7; 100]));
    let has_left = AtomicUsize::new(0);
    let is_given_up = || has_left.load(Ordering::SeqCst) == 1;
    let try_late = || write_unless(&world.core, inode, late(), Stability::Unstable, &is_given_up);
    thread::scope(|scope| {
        let flushing = file.flush.lock();
        let writer = scope.spawn(try_late);
        has_left.store(1, Ordering::SeqCst);
        drop(flushing);
        let error = writer.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    });
    assert!(world.content(inode) == blocks(&[1]));
    // Nor if it need not have waited.
    world.write(inode, 0, blocks(&[2]));
    assert_eq!(try_late().unwrap_err().kind(), ErrorKind::Busy);
    assert!(world.content(inode) == blocks(&[2]));
    has_left.store(0, Ordering::SeqCst);
    try_late().unwrap();
    assert!(world.content(inode) != blocks(&[2]));
}

/// The clock was ahead before the last start, or a client has set a time that is to come: what is
/// written is noticed all the same.
#[test]
fn a_write_changes_both_stamps_though_they_are_ahead_of_the_clock() {
    let world = world();
    let inode = world.create("f");
    let key = crate::record::key::inode(inode);
    let ahead = Timestamp::new(1 << 33, 0).unwrap();
    let mut record = world.core.inode(inode).unwrap();
    (record.modified_at, record.changed_at) = (ahead, ahead);
    world.kv.tamper(Family::Inode, &key, Some(record.encode()));
    let mut before = (ahead, ahead);
    for number in 0..4 {
        world.write(inode, 0, blocks(&[number + 1]));
        let file = world.core.file(inode).unwrap();
        for is_committed in [false, true] {
            if is_committed {
                flush(&world.core, &file).unwrap();
            }
            let now = file.state.read().attributes(inode);
            assert!(now.modified_at < ahead, "it was modified now");
            assert!(is_committed == (now.changed_at == before.1), "{now:?}");
            assert!(is_committed || now.changed_at > before.1, "{now:?}");
            before = (now.modified_at, now.changed_at);
        }
    }
    let world = world.restart();
    let now = world.core.inode(inode).unwrap();
    assert_eq!((now.modified_at, now.changed_at), before);
}

#[test]
fn the_time_of_change_grows_though_the_clock_was_set_back() {
    let world = world();
    let inode = world.create("f");
    let last = Timestamp::from_nanos(1 << 62);
    let ahead = world.core.commit(move |txn| {
        let mut record = txn.inode(inode)?;
        record.changed_at = last;
        txn.put_inode(inode, &record);
        Ok(())
    });
    ahead.unwrap();
    let mut seen = last;
    for _ in 0..2 {
        world.write(inode, 0, piece(1));
        let unflushed = world.core.file(inode).unwrap().state.read().attributes(inode);
        flush(&world.core, &world.core.file(inode).unwrap()).unwrap();
        let flushed = world.core.file(inode).unwrap().state.read().attributes(inode);
        assert!(unflushed.changed_at > seen && flushed.changed_at == unflushed.changed_at);
        seen = flushed.changed_at;
    }
    assert!(world.core.clock.now() < last, "others are not moved ahead with it");
}

//! Flushes of several parts on a disk that fails, beside a delete, and beside compaction.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::background::gc;
use crate::disk::{Fault, MemoryDisk};
use crate::error::ErrorKind;
use crate::id::InodeId;
use crate::layer_windows::LISTED_RUNS_MAX;
use crate::name::FilePath;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, blocks, options};
use crate::types::{SetAttributes, SnapshotRequest, Stability};
use crate::units::BLOCK_BYTES_U64;
use crate::{attributes, paths, reclaim, snapshot, write};

/// Longer than all that a test appends, so that one part is one write of the disk.
const SEGMENT_BYTES: u64 = 256 << 20;

const PART_BYTES: usize = COMMIT_BLOCKS_MAX * BLOCK_BYTES;

fn world() -> World {
    World::new(options(SEGMENT_BYTES), None)
}

/// Two parts and a bit.
fn seeds(first: u64) -> Vec<u64> {
    (first..).take(2 * COMMIT_BLOCKS_MAX + 100).collect()
}

/// A block of the second part.
const LATER: usize = COMMIT_BLOCKS_MAX + 76;

fn dirty_bytes(world: &World) -> u64 {
    crate::stats::stats(&world.core).dirty_bytes
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap()
}

/// Waits until it holds, or fails after a time that no machine needs.
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_part_that_fails_stays_dirty_and_the_parts_before_it_are_committed() {
    for (fault, kind) in
        [(Fault::NoSpace(1), ErrorKind::NoSpace), (Fault::ShortWrite(1), ErrorKind::Io)]
    {
        let world = world();
        let inode = world.create("f");
        let content = blocks(&seeds(1));
        world.write(inode, 0, content.clone());
        assert_eq!(dirty_bytes(&world), number(content.len()));
        let file = world.core.file(inode).unwrap();
        world.disk.inject(fault);
        let error = flush(&world.core, &file).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        {
            let state = file.state.read();
            assert!(state.flushing.is_empty());
            assert_eq!(state.dirty.len(), content.len() / BLOCK_BYTES - COMMIT_BLOCKS_MAX);
            assert!(state.pending.is_some() && state.dirty_since.is_some(), "it is tried again");
        }
        assert_eq!(dirty_bytes(&world), number(content.len() - PART_BYTES));
        assert!(world.content(inode) == content, "readers see all of it");
        let survived = World::open_copy(&world);
        let after = survived.content(inode);
        assert_eq!(after.len(), content.len(), "the size came with the first part");
        assert!(after[..PART_BYTES] == content[..PART_BYTES]);
        assert!(after[PART_BYTES..].iter().all(|&byte| byte == 0));
        survived.check();

        // Some of it is written anew before the next try.
        let block = number(LATER);
        world.write(inode, block, blocks(&[9_999_999]));
        assert_eq!(dirty_bytes(&world), number(content.len() - PART_BYTES));
        flush(&world.core, &file).unwrap();
        assert_eq!(dirty_bytes(&world), 0);
        let state = file.state.read();
        assert!(!state.is_dirty() && state.dirty_since.is_none());
        drop(state);
        let mut expected = content.to_vec();
        let at = LATER * BLOCK_BYTES;
        expected[at..at + BLOCK_BYTES].copy_from_slice(&blocks(&[9_999_999]));
        assert!(world.content(inode) == expected);
        world.check();
        let world = world.crash();
        assert!(world.content(inode) == expected);
        world.check();
    }
}

/// A store that is dropped behind a flush can be opened again at once.
#[test]
fn no_job_of_a_flush_holds_the_index_after_it() {
    for fault in [None, Some(Fault::NoSpace(0))] {
        let world = world();
        let inode = world.create("f");
        world.write(inode, 0, blocks(&seeds(1)));
        let file = world.core.file(inode).unwrap();
        let holders = Arc::strong_count(&world.kv);
        // While the second part is hashed the first one's append fails.
        let fails = fault.map(|fault| world.disk.inject(fault)).is_some();
        assert_eq!(flush(&world.core, &file).is_err(), fails);
        assert_eq!(Arc::strong_count(&world.kv), holders, "fails: {fails}");
    }
}

#[test]
fn what_was_written_anew_during_a_failing_flush_is_counted_once() {
    let world = world();
    let inode = world.create("f");
    world.write(inode, 0, blocks(&seeds(1)));
    let file = world.core.file(inode).unwrap();
    let leader = world.core.committer.leader.lock();
    let core = Arc::clone(&world.core);
    let flushed = Arc::clone(&file);
    let flushing = thread::spawn(move || flush(&core, &flushed));
    wait_until("the flush begins", || !file.state.read().flushing.is_empty());
    // Both parts: the first will be committed, the second will not.
    world.write(inode, 5, blocks(&[777]));
    world.write(inode, number(LATER), blocks(&[778]));
    let twice = number((seeds(1).len() + 2) * BLOCK_BYTES);
    assert_eq!(dirty_bytes(&world), twice);
    world.disk.inject(Fault::NoSpace(1));
    drop(leader);
    assert_eq!(flushing.join().unwrap().unwrap_err().kind(), ErrorKind::NoSpace);
    let left = file.state.read().dirty.len();
    assert_eq!(left, seeds(1).len() - COMMIT_BLOCKS_MAX + 1);
    assert_eq!(dirty_bytes(&world), number(left * BLOCK_BYTES));
    flush(&world.core, &file).unwrap();
    assert_eq!(dirty_bytes(&world), 0);
    let mut expected = seeds(1);
    expected[5] = 777;
    expected[LATER] = 778;
    assert!(world.content(inode) == blocks(&expected));
    world.check();
}

#[test]
fn a_delete_during_a_flush_leaves_nothing_dirty() {
    // The first part is surely there before the delete, or whichever comes first.
    for is_under_way in [true, false] {
        let world = world();
        let inode = world.create("f");
        world.write(inode, 0, blocks(&seeds(1)));
        let file = world.core.file(inode).unwrap();
        let leader = world.core.committer.leader.lock();
        let (core, flushed) = (Arc::clone(&world.core), Arc::clone(&file));
        let flushing = thread::spawn(move || flush(&core, &flushed));
        if is_under_way {
            wait_until("the flush begins", || !file.state.read().flushing.is_empty());
            world.write(inode, 3, blocks(&[5]));
        }
        thread::scope(|scope| {
            let removing = scope.spawn(|| world.remove("f"));
            // Both wait for the leader by then, or come soon after.
            thread::sleep(Duration::from_millis(50));
            drop(leader);
            removing.join().unwrap();
        });
        let outcome = flushing.join().unwrap().map_err(|error| error.kind());
        assert!(matches!(outcome, Ok(()) | Err(ErrorKind::Stale)), "{outcome:?}");
        assert_eq!(dirty_bytes(&world), 0);
        assert!(file.state.read().flushing.is_empty());
        drop(file);
        gc(&world.core).unwrap();
        world.check();
        assert_eq!(crate::stats::stats(&world.core).chunk_count, 0);
    }
}

/// The blocks as a flush that has looked them up holds them.
fn looked_up(world: &World, seeds: &[u64]) -> Prepared {
    let all = blocks(seeds);
    let parts = (0..)
        .zip(0..seeds.len())
        .map(|(block, at)| (block, all.slice(at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES)));
    prepare(&world.core, parts.collect()).unwrap()
}

fn stored(prepared: &Prepared) -> Vec<bool> {
    let is_stored = |(_, content): &(u64, Content)| matches!(content, Content::Stored { .. });
    prepared.blocks.iter().map(is_stored).collect()
}

fn commit_as(world: &World, inode: InodeId, prepared: Prepared, count: u64) {
    let file = world.core.file(inode).unwrap();
    let _flush = file.flush.lock();
    let size_bytes = count * crate::units::BLOCK_BYTES_U64;
    let now = world.core.clock.now();
    let pending = Pending { size_bytes, modified_at: now, changed_at: now };
    commit_part(&world.core, &file, prepared, Some(pending)).unwrap();
}

#[test]
fn a_chunk_that_compaction_drops_before_the_transaction_is_not_shared() {
    let world = world();
    let old = world.create("old");
    world.put(old, 0, &[1, 2, 3, 4]);
    // 2 and 3 are dead, yet stored.
    world.put(old, 1, &[20, 30]);
    let new = world.create("new");
    let before = looked_up(&world, &[1, 2, 3, 4]);
    assert_eq!(stored(&before), [true; 4]);
    let drops = world.core.dedup.drops();
    gc(&world.core).unwrap();
    assert_ne!(world.core.dedup.drops(), drops);
    commit_as(&world, new, before, 4);
    assert!(world.content(new) == blocks(&[1, 2, 3, 4]));
    world.check();
    assert_eq!(crate::stats::stats(&world.core).chunk_count, 6, "1 and 4 are shared");
    let world = world.crash();
    assert!(world.content(new) == blocks(&[1, 2, 3, 4]));
    world.check();
}

#[test]
fn a_dead_chunk_that_is_still_stored_lives_again() {
    let world = world();
    let old = world.create("old");
    world.put(old, 0, &[1, 2]);
    world.put(old, 0, &[10]);
    let new = world.create("new");
    let before = looked_up(&world, &[1, 2]);
    commit_as(&world, new, before, 2);
    assert_eq!(crate::stats::stats(&world.core).chunk_count, 3);
    gc(&world.core).unwrap();
    assert!(world.content(new) == blocks(&[1, 2]));
    world.check();
}

#[test]
fn blocks_that_become_equal_after_the_look_up_are_stored_once() {
    let world = world();
    let (a, b) = (world.create("a"), world.create("b"));
    // Neither look-up knows the other's blocks; 1 is there twice in each.
    let of_a = looked_up(&world, &[1, 2, 1]);
    let of_b = looked_up(&world, &[1, 1, 2]);
    assert_eq!(stored(&of_b), [false; 3]);
    commit_as(&world, a, of_a, 3);
    commit_as(&world, b, of_b, 3);
    assert_eq!(crate::stats::stats(&world.core).chunk_count, 2);
    assert!(world.content(a) == blocks(&[1, 2, 1]) && world.content(b) == blocks(&[1, 1, 2]));
    world.check();
}

#[test]
fn what_a_flush_that_panicked_left_is_committed_by_the_next() {
    let world = world();
    let inode = world.create("f");
    let content = blocks(&[1, 2, 3, 4]);
    world.write(inode, 0, content.clone());
    let file = world.core.file(inode).unwrap();
    {
        let mut state = file.state.write();
        state.flushing = std::mem::take(&mut state.dirty);
        state.pending = None;
        state.record.size_bytes = number(content.len());
        assert!(state.is_dirty());
    }
    // Written anew since: this version is the one that counts.
    world.write(inode, 2, blocks(&[9]));
    flush(&world.core, &file).unwrap();
    assert_eq!(dirty_bytes(&world), 0);
    assert!(world.crash().content(inode) == blocks(&[1, 2, 9, 4]));
}

#[test]
fn zeros_ahead_of_the_log_are_no_used_space() {
    let world = world();
    let inode = world.create("f");
    let file = world.core.file(inode).unwrap();
    for block in 0..64 {
        world.write(inode, block, blocks(&[block + 1]));
        flush(&world.core, &file).unwrap();
    }
    let of_records = |world: &World| world.core.committer.leader.lock().log.position().offset_bytes;
    assert_eq!(world.core.space().used_bytes, of_records(&world));
    assert!(world.disk.used_bytes() > of_records(&world), "there are some");
    let world = world.restart();
    assert_eq!(world.core.space().used_bytes, of_records(&world));
    assert!(world.disk.used_bytes() > of_records(&world), "a start keeps them");
}

/// A file whose layer, or (`is_cloned`) the one below it, takes long to read; its name is `f`.
fn with_a_large_layer(hook: &Hook, is_cloned: bool) -> (Arc<Core>, InodeId) {
    let core = hooked::open((Arc::default(), MemoryDisk::new()), options(SEGMENT_BYTES), hook);
    let path = |name: &str| FilePath::parse(name).unwrap();
    let write = |inode, block: u64, stability| {
        let offset = block * BLOCK_BYTES_U64;
        write::write(&core, inode, offset, blocks(&[block + 1]), stability).unwrap();
    };
    let mut inode = paths::create_file(&core, &path("f"), 0).unwrap().attributes.inode;
    // Every other block, so that each has an entry of its own.
    for entry in 0..=LISTED_RUNS_MAX {
        write(inode, number(entry) * 2, Stability::Unstable);
    }
    flush(&core, &core.file(inode).unwrap()).unwrap();
    if is_cloned {
        let id = snapshot::create(&core, &path("f"), SnapshotRequest::default()).unwrap().id;
        paths::remove(&core, &path("f")).unwrap();
        inode = snapshot::clone(&core, id, &path("f")).unwrap().attributes.inode;
        snapshot::delete(&core, id).unwrap();
        write(inode, 0, Stability::Unstable);
    }
    (core, inode)
}

#[test]
fn a_file_whose_layers_go_beside_a_change_is_gone_and_not_damaged() {
    type Change = fn(&Core, InodeId) -> Result<()>;
    let flushed: Change = |core, inode| core.file(inode).and_then(|file| flush(core, &file));
    let cut: Change = |core, inode| {
        let size = SetAttributes { size_bytes: Some(1), ..SetAttributes::default() };
        attributes::set_in(core, inode, &size, None).map(|_| ())
    };
    let written_in_part: Change = |core, inode| {
        let data = Bytes::from_static(b"part");
        write::write(core, inode, 1, data, Stability::Unstable).map(|_| ())
    };
    for (change, is_cloned) in [(flushed, true), (cut, false), (written_in_part, false)] {
        let hook = Hook::default();
        let (core, inode) = with_a_large_layer(&hook, is_cloned);
        let other = Arc::clone(&core);
        hook.set(During::View, move || {
            paths::remove(&other, &FilePath::parse("f").unwrap()).unwrap();
            while reclaim::work_next(&other, |_| true).unwrap().is_some() {}
        });
        let error = change(&core, inode).unwrap_err();
        assert!(!hook.is_set());
        assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
        assert_eq!(core.committer.counters.read().layers, 0);
        assert_eq!(core.files.dirty_bytes(), 0);
    }
}

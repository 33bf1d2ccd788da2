//! Reads and writes beside a truncate.

use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::disk::{Fault, MemoryDisk};
use crate::error::ErrorKind;
use crate::name::FilePath;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, blocks, options};
use crate::types::{Source, Stability};
use crate::{data, file_commit, namespace, paths, write};

const SIZE: SetAttributes = SetAttributes {
    size_bytes: Some(4 * BLOCK_BYTES_U64),
    mode: None,
    uid: None,
    gid: None,
    accessed_at: None,
    modified_at: None,
};

/// A file of eight blocks, of which block 5 was written anew and is not committed.
fn with_a_dirty_block(hook: &Hook) -> (Arc<Core>, MemoryDisk, InodeId) {
    let disk = MemoryDisk::new();
    let core = hooked::open((Arc::default(), disk.clone()), options(1 << 20), hook);
    let path = FilePath::parse("one").unwrap();
    let inode = paths::create_file(&core, &path, 0).unwrap().attributes.inode;
    let all = blocks(&[1, 2, 3, 4, 5, 6, 7, 8]);
    write::write(&core, inode, 0, all, Stability::FileSync).unwrap();
    write::write(&core, inode, 5 * BLOCK_BYTES_U64, blocks(&[50]), Stability::Unstable).unwrap();
    (core, disk, inode)
}

fn block_5(core: &Core, inode: InodeId) -> Vec<u8> {
    data::read(core, Source::File(inode), 5 * BLOCK_BYTES_U64, BLOCK_BYTES).unwrap().to_vec()
}

#[test]
fn a_read_beside_a_truncate_gets_what_was_written_last() {
    let hook = Hook::default();
    let (core, _, inode) = with_a_dirty_block(&hook);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (other, found) = (Arc::clone(&core), Arc::clone(&seen));
    hook.set(During::Sync, move || *found.lock() = block_5(&other, inode));
    set_in(&core, inode, &SIZE, None).unwrap();
    assert!(!hook.is_set());
    assert!(*seen.lock() == blocks(&[50]), "the truncate was not done yet");
    assert_eq!(block_5(&core, inode), b"");
    assert_eq!(core.files.dirty_bytes(), 0);
    // What was cut off does not come back.
    let longer = SetAttributes { size_bytes: Some(8 * BLOCK_BYTES_U64), ..SIZE };
    set_in(&core, inode, &longer, None).unwrap();
    assert!(block_5(&core, inode) == [0; BLOCK_BYTES]);
}

#[test]
fn a_write_beside_a_truncate_that_fails_is_laid_on_what_was_written_last() {
    let hook = Hook::default();
    let (core, disk, inode) = with_a_dirty_block(&hook);
    let other = Arc::clone(&core);
    hook.set(During::Sync, move || {
        let at = 5 * BLOCK_BYTES_U64 + 7;
        write::write(&other, inode, at, Bytes::from_static(b"anew"), Stability::Unstable).unwrap();
        disk.inject(Fault::NoSpace(0));
    });
    let error = set_in(&core, inode, &SIZE, None).unwrap_err();
    assert!(!hook.is_set());
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    let mut expected = blocks(&[50]).to_vec();
    expected[7..11].copy_from_slice(b"anew");
    assert!(block_5(&core, inode) == expected);
    flush_locked(&core, &core.file(inode).unwrap()).unwrap();
    assert!(block_5(&core, inode) == expected);
    assert_eq!(core.files.dirty_bytes(), 0);
}

/// A client that has seen the new size writes behind it: that is no write from before.
#[test]
fn a_write_behind_a_truncate_that_is_committed_stays() {
    let hook = Hook::default();
    let (core, _, inode) = with_a_dirty_block(&hook);
    let file = core.file(inode).unwrap();
    let flushing = file.flush.lock();
    let requested = Requested::new(&SIZE).unwrap();
    let aside = Aside::take(&core, &file, 4 * BLOCK_BYTES_U64);
    set_committed(&core, &file, requested, None).unwrap();
    assert_eq!(file.state.read().size_bytes(), 4 * BLOCK_BYTES_U64, "anybody may see it");
    let (at, data) = (5 * BLOCK_BYTES_U64 + 7, Bytes::from_static(b"anew"));
    let written = write::write(&core, inode, at, data, Stability::Unstable).unwrap();
    assert_eq!(written.file.after.size_bytes, at + 4);
    drop(aside);
    drop(flushing);
    let mut expected = [0; 11];
    expected[7..].copy_from_slice(b"anew");
    assert_eq!(block_5(&core, inode), expected);
    flush_locked(&core, &file).unwrap();
    assert_eq!(block_5(&core, inode), expected);
    assert_eq!(core.files.dirty_bytes(), 0);
}

/// It came while the size was being set, when nobody could see that yet: it counts as before it.
#[test]
fn a_write_that_comes_during_a_truncate_is_cut_off_with_the_rest() {
    for inside in [0, 100] {
        let hook = Hook::default();
        let (core, _, inode) = with_a_dirty_block(&hook);
        let other = Arc::clone(&core);
        hook.set(During::Sync, move || {
            let at = 4 * BLOCK_BYTES_U64;
            write::write(&other, inode, at, blocks(&[60, 61, 62, 63, 64]), Stability::Unstable)
                .unwrap();
        });
        let end = 4 * BLOCK_BYTES_U64 + inside;
        let shorter = SetAttributes { size_bytes: Some(end), ..SIZE };
        assert_eq!(set_in(&core, inode, &shorter, None).unwrap().after.size_bytes, end);
        assert!(!hook.is_set());
        let longer = SetAttributes { size_bytes: Some(8 * BLOCK_BYTES_U64), ..SIZE };
        set_in(&core, inode, &longer, None).unwrap();
        for is_committed in [false, true] {
            if is_committed {
                flush_locked(&core, &core.file(inode).unwrap()).unwrap();
            }
            let read = data::read(&core, Source::File(inode), end, 4 * BLOCK_BYTES).unwrap();
            assert!(read.to_vec().iter().all(|&byte| byte == 0), "behind {end}, {is_committed}");
            assert_eq!(read.to_vec().len(), 4 * BLOCK_BYTES - usize::try_from(inside).unwrap());
        }
        assert_eq!(core.files.dirty_bytes(), 0);
    }
}

/// What is cut off may be nearly all of a disk: what is left is looked through then.
#[test]
fn a_truncate_looks_at_the_side_of_its_end_that_is_shorter() {
    const WINDOWS: u64 = 10;
    for (left, is_seen) in [(1, false), (WINDOWS - 1, true)] {
        let world = World::new(options(1 << 20), None);
        let inode = world.create("one");
        for window in 0..WINDOWS {
            world.put(inode, window * WINDOW_BLOCKS, &[window + 1, 0, window + 100]);
        }
        let path = FilePath::parse("one").unwrap();
        crate::snapshot::create(&world.core, &path, crate::SnapshotRequest::default()).unwrap();
        let world = world.restart();
        let below = world
            .core
            .resolver
            .chain(world.core.file(inode).unwrap().state.read().layer().unwrap())
            .unwrap()[1];
        let end = left * WINDOW_BLOCKS * BLOCK_BYTES_U64 + 1;
        let shorter = SetAttributes { size_bytes: Some(end), ..SIZE };
        let after = set_in(&world.core, inode, &shorter, None).unwrap().after;
        // The last one is cut in the first of its blocks.
        assert_eq!(after.used_bytes, (2 * left + 1) * BLOCK_BYTES_U64);
        let is_resolved = |window| world.core.resolver.cached(below, window).is_some();
        assert_eq!(is_resolved(WINDOWS - 1), is_seen);
        assert_eq!(is_resolved(0), !is_seen);
        world.check();
    }
}

/// A client whose own change seems to bring another one's keeps what it has cached of that
/// (RFC 1813 section 2.6 `wcc_data`).
#[test]
fn what_others_write_meanwhile_is_no_part_of_a_change() {
    let hook = Hook::default();
    let (core, _, inode) = with_a_dirty_block(&hook);
    let mode = SetAttributes { mode: Some(0o600), size_bytes: None, ..SIZE };
    type Work = fn(&Core, InodeId, &SetAttributes) -> Change;
    let works: [Work; 4] = [
        |core, inode, _| {
            let data = blocks(&[9]);
            write::write(core, inode, 0, data, Stability::FileSync).unwrap().file
        },
        |core, inode, _| file_commit::commit_file(core, inode).unwrap().0,
        |core, inode, mode| set_in(core, inode, mode, None).unwrap(),
        |core, inode, _| set_in(core, inode, &SIZE, None).unwrap(),
    ];
    for (number, work) in (0_u64..).zip(works) {
        // There is something to sync.
        let own = write::write(&core, inode, 0, blocks(&[1]), Stability::Unstable).unwrap();
        let (other, behind) = (Arc::clone(&core), (100 + number) * BLOCK_BYTES_U64);
        hook.set(During::Sync, move || {
            write::write(&other, inode, behind, blocks(&[7]), Stability::Unstable).unwrap();
        });
        let change = work(&core, inode, &mode);
        assert!(!hook.is_set());
        let now = namespace::attributes(&core, inode).unwrap();
        let is_seen = change.after.changed_at == now.changed_at;
        // The writer's last look shows that there was more.
        assert!(!is_seen || change.before.changed_at > own.file.after.changed_at, "{number}");
    }
}

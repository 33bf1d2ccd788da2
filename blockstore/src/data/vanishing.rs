//! What vanishes or moves while its map is read: the answer is whole, or an error.

use super::*;
use crate::diff::diff;
use crate::disk::{Disk as _, FileName, FileRole, MemoryDisk};
use crate::error::ErrorKind;
use crate::id::{InodeId, SegmentId, SnapshotId};
use crate::kv::MemoryKv;
use crate::name::{FilePath, Name};
use crate::namespace::Removal;
use crate::reclaim::work_next;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{blocks, options};
use crate::types::{SnapshotRequest, Stability};
use crate::{namespace, paths, snapshot, write};

/// More than one slice of reclaim.
const ENTRIES: u64 = 700;

fn store(hook: &Hook) -> Arc<Core> {
    hooked::open((Arc::default(), MemoryDisk::new()), options(1 << 20), hook)
}

fn name() -> FilePath {
    FilePath::parse("one").unwrap()
}

fn create(core: &Core) -> InodeId {
    paths::create_file(core, &name(), 0).unwrap().attributes.inode
}

/// Every other block, so that each is an entry of its own.
fn scatter(core: &Core, inode: InodeId, seed: u64) {
    scatter_first(core, inode, (seed, ENTRIES));
}

fn scatter_first(core: &Core, inode: InodeId, (seed, count): (u64, u64)) {
    for entry in 0..count {
        let (at, data) = (entry * 2 * BLOCK_BYTES_U64, blocks(&[seed + entry % 9]));
        write::write(core, inode, at, data, Stability::Unstable).unwrap();
    }
    crate::flush::flush(core, &core.file(inode).unwrap()).unwrap();
}

fn take(core: &Core) -> SnapshotId {
    snapshot::create(core, &name(), SnapshotRequest::default()).unwrap().id
}

/// Only the snapshots see the layers then.
fn remove_file(core: &Core) {
    let one = Name::new(b"one").unwrap();
    namespace::remove(core, InodeId::ROOT, &one, Removal::Any).unwrap();
    crate::background::gc(core).unwrap();
}

/// Deletes a snapshot, and reclaims a part of what it held.
fn reclaim_a_part(core: &Core, id: SnapshotId) {
    snapshot::delete(core, id).unwrap();
    let worked = work_next(core, |_| true).unwrap().unwrap();
    assert!(worked.failed.is_none() && worked.visited < ENTRIES, "there is more than one slice");
}

/// Before anything is looked at, and with the layer in hand. One window alone: of more, the look at the
/// next would find the snapshot gone.
#[test]
fn a_block_map_of_a_snapshot_that_goes_meanwhile_shows_no_holes() {
    let window_bytes = WINDOW_BLOCKS * BLOCK_BYTES_U64;
    for at in 0..2 {
        let hook = Hook::default();
        let core = store(&hook);
        let inode = create(&core);
        scatter(&core, inode, 1);
        let id = take(&core);
        remove_file(&core);
        let first = || block_map(&core, Source::Snapshot(id), 0, window_bytes);
        let map = first().unwrap();
        assert_eq!(u64::try_from(map.iter().flatten().count()), Ok(WINDOW_BLOCKS / 2));
        let other = Arc::clone(&core);
        hook.set(During::LoadSnapshot(at), move || reclaim_a_part(&other, id));
        let error = first().expect_err("it is gone");
        assert!(!hook.is_set());
        assert_eq!(error.kind(), ErrorKind::NotFound, "look {at}: {error}");
    }
}

#[test]
fn a_diff_to_a_snapshot_that_goes_meanwhile_leaves_nothing_out() {
    let hook = Hook::default();
    let core = store(&hook);
    let inode = create(&core);
    scatter(&core, inode, 1);
    let base = take(&core);
    scatter(&core, inode, 100);
    let target = take(&core);
    remove_file(&core);
    let all = usize::try_from(ENTRIES).unwrap();
    let found = diff(&core, Some(base), target, 0, all).unwrap();
    assert_eq!(found.extents.len(), all);
    let other = Arc::clone(&core);
    // The first look is at the base.
    hook.set(During::LoadSnapshot(1), move || reclaim_a_part(&other, target));
    let error = diff(&core, Some(base), target, 0, all).unwrap_err();
    assert!(!hook.is_set());
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

/// Between the looks at its record, while a layer that takes long to read is read for the first time:
/// nothing of it is visible then.
#[test]
fn a_diff_to_a_snapshot_that_goes_behind_the_last_look_says_that_it_is_gone() {
    let hook = Hook::default();
    let core = store(&hook);
    let inode = create(&core);
    scatter(&core, inode, 1);
    let base = take(&core);
    let large = u64::try_from(crate::layer_windows::LISTED_RUNS_MAX).unwrap() + 100;
    scatter_first(&core, inode, (100, large));
    let target = take(&core);
    remove_file(&core);
    let other = Arc::clone(&core);
    hook.set(During::View, move || {
        snapshot::delete(&other, target).unwrap();
        while work_next(&other, |_| true).unwrap().is_some() {}
    });
    let error = diff(&core, Some(base), target, 0, 99).expect_err("it is gone");
    assert!(!hook.is_set());
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

/// The layer of the base collapses into that of the target, or the other way round.
#[test]
fn a_diff_from_a_snapshot_that_goes_meanwhile_says_that_it_is_gone() {
    for at in 0..6 {
        let hook = Hook::default();
        let core = store(&hook);
        let inode = create(&core);
        scatter(&core, inode, 1);
        let base = take(&core);
        write::write(&core, inode, 0, blocks(&[50]), Stability::FileSync).unwrap();
        let target = take(&core);
        let expected = diff(&core, Some(base), target, 0, 99).unwrap();
        let other = Arc::clone(&core);
        hook.set(During::LoadSnapshot(at), move || {
            snapshot::delete(&other, base).unwrap();
            crate::background::gc(&other).unwrap();
        });
        match diff(&core, Some(base), target, 0, 99) {
            Ok(found) => assert_eq!(found.extents, expected.extents, "look {at}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "look {at}: {error}"),
        }
    }
}

/// A snapshot stays, and the layer below collapses into its layer.
#[test]
fn a_block_map_survives_a_collapse_meanwhile() {
    for at in 0..3 {
        let hook = Hook::default();
        let (kv, disk) = (Arc::new(MemoryKv::new()), MemoryDisk::new());
        let core = hooked::open((Arc::clone(&kv), disk.clone()), options(1 << 20), &hook);
        let inode = create(&core);
        scatter(&core, inode, 1);
        let below = take(&core);
        write::write(&core, inode, 0, blocks(&[50]), Stability::FileSync).unwrap();
        let id = take(&core);
        let expected = block_map(&core, Source::Snapshot(id), 0, u64::MAX).unwrap();
        // After a restart: what is cached of the map would be right whatever becomes of its layers.
        crate::compact::checkpoint(&core).unwrap();
        drop(core);
        let parts = (Arc::new(kv.crash()), disk.crash(|| false));
        let core = hooked::open(parts, options(1 << 20), &hook);
        let other = Arc::clone(&core);
        hook.set(During::LoadSnapshot(at), move || {
            snapshot::delete(&other, below).unwrap();
            crate::background::gc(&other).unwrap();
            assert_eq!(crate::stats::stats(&other).layer_count, 2, "it collapsed");
        });
        assert!(block_map(&core, Source::Snapshot(id), 0, u64::MAX).unwrap() == expected, "{at}");
        assert!(!hook.is_set(), "look {at}");
    }
}

/// Compaction takes a file away between the look at the table and the opening.
#[test]
fn hashes_are_read_where_compaction_put_them_meanwhile() {
    let hook = Hook::default();
    let disk = MemoryDisk::new();
    let core = hooked::open((Arc::default(), disk.clone()), options(1 << 20), &hook);
    let inode = create(&core);
    scatter(&core, inode, 1);
    let first = SegmentId::new(1);
    crate::commit::seal(&core, first).unwrap();
    let expected = block_map(&core, Source::File(inode), 0, u64::MAX).unwrap();
    let record = core.committer.leader.lock().segments[&first];
    let offset_bytes = record.directory_offset_bytes.unwrap();
    // Of a file by another name nothing is in memory.
    let at = |number| FileName { role: FileRole::Compacted, number: SegmentId::new(number) };
    disk.rename(record.file, at(1)).unwrap();
    core.segments.put_sealed(first, at(1), offset_bytes, record.chunks);
    let other = Arc::clone(&core);
    hook.set(During::OpenFile, move || {
        disk.rename(at(1), at(2)).unwrap();
        other.segments.put_sealed(first, at(2), offset_bytes, record.chunks);
    });
    let found = block_map(&core, Source::File(inode), 0, u64::MAX).unwrap();
    assert!(!hook.is_set() && found == expected);
}

//! When a copy is written, and what goes then.

use super::*;
use crate::compact::{checkpoint, compact_once};
use crate::disk::Fault;
use crate::progress::Progress;
use crate::testing::{World, blocks, options};

const SEGMENT_BYTES: u64 = 64 << 10;

/// Blocks of one write: they fill a segment.
const BLOCKS: u64 = 16;

/// A store of so many full log files, of each of which one block is left.
fn worn(files: u64) -> World {
    let world = World::new(options(SEGMENT_BYTES), None);
    let inode = world.create("f");
    wear(&world, inode, 0..files);
    world
}

fn wear(world: &World, inode: crate::id::InodeId, files: std::ops::Range<u64>) {
    for file in files.clone() {
        let seeds: Vec<u64> = (file * BLOCKS + 1..=(file + 1) * BLOCKS).collect();
        world.put(inode, file * BLOCKS, &seeds);
    }
    for file in files {
        let offset = file * BLOCKS + 1;
        let holes = blocks(&[0; 15]);
        world.write(inode, offset, holes);
    }
    crate::flush::flush(&world.core, &world.core.file(inode).unwrap()).unwrap();
    checkpoint(&world.core).unwrap();
}

fn inode(world: &World) -> crate::id::InodeId {
    crate::paths::resolve(&world.core, &crate::name::FilePath::parse("f").unwrap()).unwrap()
}

fn compact(world: &World) {
    while compact_once(&world.core, |_| true).unwrap().is_some() {}
}

fn retired(world: &World) -> Vec<FileName> {
    world.core.copies.state.lock().retired.keys().copied().collect()
}

fn count(world: &World, role: FileRole) -> usize {
    world.disk.list().unwrap().iter().filter(|name| name.role == role).count()
}

fn go_on(world: &World) -> Renewed {
    renew(&world.core, &mut |_| true).unwrap()
}

#[test]
fn what_compaction_emptied_stays_until_a_copy_is_written() {
    let world = worn(6);
    let logs = count(&world, FileRole::Log);
    compact(&world);
    assert_eq!(count(&world, FileRole::Log), logs, "each is needed to make the index anew");
    let waiting = retired(&world);
    assert!(waiting.len() >= 5, "{waiting:?}");
    assert!(world.core.copies.is_due(&world.core, false), "there is no copy at all");

    // A restart finds them, whatever it had kept in memory.
    let world = world.crash();
    assert_eq!(retired(&world), waiting);
    let used = world.core.space().used_bytes;
    let renewed = go_on(&world);
    assert_eq!(renewed.files_removed, u64::try_from(waiting.len()).unwrap());
    assert_eq!(retired(&world), []);
    assert_eq!(count(&world, FileRole::Log), logs - waiting.len());
    assert_eq!((count(&world, FileRole::IndexCopy), count(&world, FileRole::IndexDraft)), (1, 0));
    let freed = renewed.bytes_freed - renewed.bytes_written;
    assert_eq!(world.core.space().used_bytes, used - freed);
    assert_eq!(
        world.disk.used_bytes(),
        used - freed + world.core.spare_bytes.load(Ordering::Relaxed)
    );
    world.check();
    assert_eq!(retired(&world.crash()), []);
}

#[test]
fn with_a_copy_the_next_one_waits_for_what_it_is_worth() {
    let world = worn(6);
    compact(&world);
    go_on(&world);
    let first = world.core.copies.state.lock().current.unwrap();
    assert!(first.length_bytes * RETIRED_COPIES_MAX < RETIRED_SEGMENTS_MAX * SEGMENT_BYTES);
    wear(&world, inode(&world), 100..102);
    compact(&world);
    assert!(!retired(&world).is_empty());
    assert!(!world.core.copies.is_due(&world.core, true), "{:?}", retired(&world));
    assert!(world.core.copies.is_wanted(), "for whoever asks for all there is to free");
    // The disk is nearly full: what waits would double the room.
    world.disk.set_capacity(world.disk.used_bytes() + (64 << 10));
    assert!(world.core.copies.is_due(&world.core, true), "no more comes, and room is short");
    world.disk.set_capacity(1 << 40);
    wear(&world, inode(&world), 200..206);
    compact(&world);
    assert!(world.core.copies.is_due(&world.core, false));
    go_on(&world);
    let second = world.core.copies.state.lock().current.unwrap();
    assert!(second.position > first.position);
    assert_eq!(count(&world, FileRole::IndexCopy), 1, "the older one went");
    world.check();
}

#[test]
fn a_copy_that_is_told_to_stop_leaves_nothing() {
    let world = worn(3);
    let inode = inode(&world);
    // More than one part: each block is a run of its own.
    for part in 0..40 {
        let seeds: Vec<u64> = (0..1000).map(|n| (part * 1000 + n) % 7 * 2 + 1).collect();
        world.put(inode, 1000 * (part + 1), &seeds);
    }
    compact(&world);
    let before = (world.disk.list().unwrap(), world.core.space().used_bytes);
    let mut heard = 0;
    let stopped = renew(&world.core, &mut |bytes| {
        heard += bytes;
        false
    });
    assert_eq!(stopped.unwrap().files_removed, 0);
    assert!(heard > 0, "the copy has more than one part");
    assert_eq!((world.disk.list().unwrap(), world.core.space().used_bytes), before);
}

#[test]
fn on_a_full_disk_old_log_files_go_before_the_copy_is_written() {
    let world = worn(6);
    compact(&world);
    let waiting = retired(&world).len();
    world.disk.inject(Fault::NoSpace(0));
    let renewed = go_on(&world);
    assert_eq!(renewed.files_removed, u64::try_from(waiting).unwrap());
    assert_eq!(count(&world, FileRole::IndexCopy), 1);
    world.check();

    // With little to gain, the old copy is worth more than the room.
    wear(&world, inode(&world), 100..101);
    world.core.copies.state.lock().retired.clear();
    world.disk.inject(Fault::NoSpace(0));
    renew(&world.core, &mut |_| true).unwrap_err();
    assert_eq!((count(&world, FileRole::IndexCopy), count(&world, FileRole::IndexDraft)), (1, 0));
    assert!(!world.core.copies.is_due(&world.core, true), "not tried again at once");
}

#[test]
fn a_damaged_copy_is_found_and_written_anew() {
    let world = worn(6);
    compact(&world);
    go_on(&world);
    let copy = world.core.copies.state.lock().current.unwrap();
    world.disk.flip_bit(copy.name, 200);
    let report = crate::check::check(&world.core, false, &Progress::default()).unwrap();
    assert!(report.problems.iter().any(|p| p.contains(&copy.name.to_string())), "{report:?}");
    assert!(world.core.copies.is_due(&world.core, false));
    crate::background::gc(&world.core).unwrap();
    world.check();
}

/// A file that keeps log/1, then worn ones.
fn worn_behind_a_full_one() -> World {
    let world = World::new(options(SEGMENT_BYTES), None);
    let kept = world.create("kept");
    world.put(kept, 0, &(5001..5001 + BLOCKS).collect::<Vec<u64>>());
    let inode = world.create("f");
    wear(&world, inode, 0..6);
    compact(&world);
    world
}

#[test]
fn that_the_index_could_not_be_made_anew_is_known_after_a_restart() {
    let world = worn_behind_a_full_one();
    abandon(&world.core).unwrap();
    let first = world.disk.list().unwrap()[0];
    assert_eq!((first.role, first.number.get()), (FileRole::Log, 1), "it still has all its data");
    let world = world.restart();
    assert_eq!(retired(&world), []);
    assert!(world.core.copies.is_wanted());
    assert!(world.core.copies.is_due(&world.core, false));
    let report = crate::check::check(&world.core, false, &Progress::default()).unwrap();
    assert!(report.problems.iter().any(|p| p.contains("missing between")), "{report:?}");
    crate::background::gc(&world.core).unwrap();
    assert!(!world.core.copies.is_wanted());
    world.check();
    world.restart().check();
}

/// Nothing lived in the files that went, so that compaction made none: only their numbers tell.
#[test]
fn that_log_files_went_without_a_trace_is_known_after_a_restart() {
    let world = World::new(options(SEGMENT_BYTES), None);
    let kept = world.create("kept");
    world.put(kept, 0, &(5001..5001 + BLOCKS).collect::<Vec<u64>>());
    let inode = world.create("f");
    for file in 0..6 {
        let seeds: Vec<u64> = (file * BLOCKS + 1..=(file + 1) * BLOCKS).collect();
        world.put(inode, 0, &seeds);
    }
    checkpoint(&world.core).unwrap();
    compact(&world);
    abandon(&world.core).unwrap();
    assert_eq!(count(&world, FileRole::Compacted), 0);
    assert_eq!(world.disk.list().unwrap()[0].number.get(), 1, "it still has all its data");
    let world = world.restart();
    assert_eq!(retired(&world), []);
    assert!(world.core.copies.is_wanted());
    crate::background::gc(&world.core).unwrap();
    world.check();
}

#[test]
fn a_retired_file_that_is_damaged_or_gone_is_told() {
    for is_gone in [false, true] {
        let world = worn_behind_a_full_one();
        let waiting = retired(&world);
        let spoiled = waiting[waiting.len() / 2];
        world.check();
        let world = if is_gone {
            let parts = world.open_copy();
            parts.disk.remove(spoiled).unwrap();
            parts.disk.sync_names().unwrap();
            let world = parts.restart();
            assert!(!retired(&world).contains(&spoiled));
            world
        } else {
            // The header of its first group.
            world.disk.flip_bit(spoiled, 70);
            world
        };
        let report = crate::check::check(&world.core, false, &Progress::default()).unwrap();
        let is_told = |text: &str| report.problems.iter().any(|p| p.contains(text));
        if is_gone {
            assert!(is_told("missing between"), "{report:?}");
        } else {
            assert!(is_told(&spoiled.to_string()), "{report:?}");
        }
        let repaired = crate::repair::repair(&world.core, crate::repair::GiveUp::Damaged).unwrap();
        assert!(repaired.after.is_clean(), "{:?}", repaired.after.problems);
        assert_eq!(repaired.lost_blocks, 0);
        assert_eq!(retired(&world), []);
    }
}

#[test]
fn a_copy_whose_header_is_damaged_goes_with_the_next_one() {
    let world = worn(6);
    compact(&world);
    go_on(&world);
    let copy = world.core.copies.state.lock().current.unwrap();
    let file = world.disk.open(copy.name).unwrap();
    file.write_at(10, b"damage").unwrap();
    file.sync().unwrap();
    let world = world.crash();
    assert_eq!(world.core.copies.state.lock().current, None);
    assert!(world.core.copies.is_wanted());
    go_on(&world);
    let now = world.core.copies.state.lock().current.unwrap();
    assert_ne!(now.name, copy.name);
    assert_eq!(count(&world, FileRole::IndexCopy), 1, "{:?}", world.disk.list());
    let used = world.core.space().used_bytes + world.core.spare_bytes.load(Ordering::Relaxed);
    assert_eq!(world.disk.used_bytes(), used);
    world.check();
}

/// The index loses an entry; what is wrong with it must not get into the only copy.
#[test]
fn an_index_that_is_to_be_made_anew_is_not_copied() {
    let world = worn(6);
    compact(&world);
    go_on(&world);
    let copy = world.core.copies.state.lock().current;
    wear(&world, inode(&world), 100..110);
    compact(&world);
    assert!(world.core.copies.is_due(&world.core, false));
    let inode = inode(&world);
    let content = world.content(inode);
    let key = key::inode(inode);
    let record = world.kv.entries(Family::Inode).into_iter().find(|(known, _)| *known == key);
    world.kv.tamper(Family::Inode, &key, None);
    let report = crate::check::check(&world.core, false, &Progress::default()).unwrap();
    assert!(report.problems.iter().any(|problem| problem.contains("--rebuild")), "{report:?}");
    assert!(!world.core.copies.is_due(&world.core, false));
    crate::background::gc(&world.core).unwrap();
    assert_eq!(world.core.copies.state.lock().current, copy);
    assert!(!retired(&world).is_empty());

    let (kv, disk) = (std::sync::Arc::new(crate::kv::MemoryKv::new()), world.disk.crash(|| true));
    let options = world.core.options.clone();
    let index: std::sync::Arc<dyn Kv> = kv.clone();
    crate::Store::rebuild_index_with(index, std::sync::Arc::new(disk.clone()), options.clone())
        .unwrap();
    let store = crate::Store::open_with(kv, std::sync::Arc::new(disk), options).unwrap();
    let report = store.check(true).unwrap();
    assert!(report.is_clean(), "{:#?}", report.problems);
    let length = u32::try_from(content.len()).unwrap();
    let read = store.read(crate::Source::File(inode), 0, usize::try_from(length).unwrap());
    assert!(read.unwrap().to_vec() == content);

    // Once the index is right again, as after a repair, all goes on.
    world.kv.tamper(Family::Inode, &key, record.map(|(_, value)| value));
    world.check();
    assert!(world.core.copies.is_due(&world.core, false));
}

#[test]
fn a_copy_that_could_not_take_the_place_of_the_old_one_is_not_written_again_at_once() {
    let mut failures = 0;
    for nth in 0..40 {
        let world = worn(6);
        compact(&world);
        go_on(&world);
        wear(&world, inode(&world), 100..110);
        compact(&world);
        assert!(world.core.copies.is_due(&world.core, false));
        world.disk.inject(Fault::Change(nth));
        let outcome = renew(&world.core, &mut |_| true);
        if world.disk.disarm() {
            outcome.unwrap();
            break;
        }
        if outcome.is_err() {
            failures += 1;
            assert!(!world.core.copies.is_due(&world.core, false), "change {nth}");
        }
        world.check();
    }
    assert!(failures > 5, "{failures}");
}

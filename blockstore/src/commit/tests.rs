//! Commits whose roll to a new segment is refused, and the count of bytes that files take.

use super::*;
use crate::disk::{Disk, Fault, FileRole};
use crate::testing::{World, options};

fn open_segment(world: &World) -> SegmentId {
    world.core.committer.leader.lock().log.segment()
}

/// The count holds what the files take, and at most what the log has to fill again.
fn assert_counted(world: &World, given_back_bytes: u64) {
    let counted = world.core.file_bytes.load(Ordering::Relaxed);
    let used = world.disk.used_bytes();
    let allowed = used..=used + given_back_bytes;
    assert!(allowed.contains(&counted), "{counted} counted, {used} used");
}

#[test]
fn a_refused_roll_fails_nobody_while_the_segment_takes_more() {
    let world = World::new(options(64 << 10), None);
    let inode = world.create("f");
    world.create("g");
    // By one append, too large to be followed by zeros.
    let seeds: Vec<u64> = (1..=60).collect();
    world.put(inode, 0, &seeds);
    let segment = open_segment(&world);
    // Room for some records, but not for a directory of 11 KiB.
    world.disk.set_capacity(world.disk.used_bytes() + (8 << 10));
    let content = world.content(inode);
    // What adds nothing goes on; the room that is left is for that.
    world.remove("g");
    assert_eq!(open_segment(&world), segment, "no room for the next");
    world.check();
    // There is room again, but each try would cost a directory.
    world.disk.set_capacity(1 << 30);
    world.create("h");
    assert_eq!(open_segment(&world), segment);
    let more: Vec<u64> = (100..100 + ROLL_RETRY_BYTES / 4096).collect();
    world.put(inode, 60, &more);
    world.create("i");
    assert_eq!(open_segment(&world).get(), segment.get() + 1, "tried again");
    world.check();
    let world = world.crash();
    assert_eq!(world.content(inode)[..content.len()], content);
    world.check();
}

#[test]
fn what_a_failed_roll_wrote_is_counted_until_it_is_written_again() {
    let world = World::new(options(64 << 10), None);
    let inode = world.create("f");
    // By one append, too large to be followed by zeros: the directory makes the file longer.
    let seeds: Vec<u64> = (1..=60).collect();
    world.put(inode, 0, &seeds);
    let segment = open_segment(&world);
    assert_counted(&world, 0);
    let directory_bytes = 3 * 4096;
    for round in 0..4 {
        world.core.committer.leader.lock().roll_from_bytes = 0;
        // The directory is written and synced; the header of the next file is not.
        world.disk.inject(Fault::Sync(1));
        let seeds: Vec<u64> = (1..=20).map(|seed| seed + 100 * (round + 1)).collect();
        world.put(inode, 60 + round * 20, &seeds);
        assert_eq!(open_segment(&world), segment, "round {round}");
        assert_counted(&world, directory_bytes);
    }
    world.core.committer.leader.lock().roll_from_bytes = 0;
    world.create("g");
    assert_ne!(open_segment(&world), segment);
    assert_counted(&world, directory_bytes);
    let logs = world.disk.list().unwrap();
    assert_eq!(logs.iter().filter(|name| name.role == FileRole::Log).count(), 2);
    world.check();
}

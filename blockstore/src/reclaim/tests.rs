//! Where slices go on, which jobs wait, and when the queue is looked into.

use std::sync::Arc;

use super::*;
use crate::disk::MemoryDisk;
use crate::name::FilePath;
use crate::namespace::{self, Removal};
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, blocks, options};
use crate::types::SnapshotRequest;
use crate::{paths, snapshot};

/// A layer that could not collapse loses its last child, and is reclaimed instead.
#[test]
fn a_job_that_is_no_longer_to_be_done_is_not_set_aside_for_ever() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    world.put(file, 0, &[1, 2]);
    let path = FilePath::parse("f").unwrap();
    let id = snapshot::create(&world.core, &path, SnapshotRequest::default()).unwrap().id;
    world.put(file, 0, &[3]);
    snapshot::delete(&world.core, id).unwrap();
    let job = next_job(&world.core, |_| true).unwrap().unwrap();
    assert!(matches!(job, Job::Collapse(_)));
    world.core.aside.lock().jobs.note_failure(job, Instant::now());
    let is_due = |job| world.core.aside.lock().jobs.is_due(job, Instant::now());
    assert!(next_job(&world.core, is_due).unwrap().is_none());
    assert_eq!(world.core.aside.lock().count(), 1, "it waits still");
    world.remove("f");
    while work_next(&world.core, is_due).unwrap().is_some() {}
    assert_eq!(crate::stats::stats(&world.core).layer_count, 0);
    assert_eq!(world.core.aside.lock().count(), 0);
    world.check();
}

#[test]
fn an_empty_queue_is_looked_into_again_only_behind_a_commit() {
    let hook = Hook::default();
    let parts = (Arc::default(), MemoryDisk::new());
    let core = hooked::open(parts, options(1 << 20), &hook);
    let delete_one = |core: &Core| {
        let path = FilePath::parse("f").unwrap();
        paths::create_file(core, &path, 1 << 20).unwrap();
        namespace::remove(core, InodeId::ROOT, path.split().1, Removal::Any).unwrap();
    };
    // A commit between the two scans of a look, which finds nothing.
    let (other, again) = (Arc::clone(&core), hook.clone());
    hook.set(During::ScanQueue, move || {
        again.set(During::ScanQueue, move || delete_one(&other));
    });
    assert!(work_next(&core, |_| true).unwrap().is_none());
    assert!(!hook.is_set());
    assert!(work_next(&core, |_| true).unwrap().is_some());
    assert!(work_next(&core, |_| true).unwrap().is_none());
    delete_one(&core);
    assert!(work_next(&core, |_| true).unwrap().is_some());
    assert!(work_next(&core, |_| true).unwrap().is_none());
    hook.set(During::ScanQueue, || {});
    assert!(work_next(&core, |_| true).unwrap().is_none());
    assert!(hook.is_set(), "no look");
    delete_one(&core);
    assert!(work_next(&core, |_| false).unwrap().is_none());
    assert!(!hook.is_set());
    assert!(work_next(&core, |_| true).unwrap().is_some(), "what was not taken is still there");
}

#[test]
fn the_place_that_a_slice_reached_is_only_a_hint() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    for block in 0..10 {
        world.put(file, block * 2, &[block + 1]);
    }
    world.remove("f");
    let job = next_job(&world.core, |_| true).unwrap().unwrap();
    world.core.aside.lock().note_reached(job, Reached { block: 9, ..Reached::default() });
    assert_eq!(work_or_set_aside(&world.core, job).unwrap().unwrap(), 5);
    assert_eq!(next_job(&world.core, |_| true).unwrap(), Some(job));
    assert_eq!(work_or_set_aside(&world.core, job).unwrap().unwrap(), 5);
    assert_eq!(next_job(&world.core, |_| true).unwrap(), None);
    world.check();
}

/// A client writes where slices have been already, into the middle of a run of the layer below.
#[test]
fn what_is_written_behind_a_slice_moves_up_over_what_reaches_in_from_before() {
    let world = World::new(options(64 << 20), None);
    let file = world.create("f");
    let scatter = |seed: u64, count: u64| {
        for number in 0..count {
            world.write(file, 10 + 2 * number, blocks(&[seed + number]));
        }
        crate::flush::flush(&world.core, &world.core.file(file).unwrap()).unwrap();
    };
    world.put(file, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    scatter(1000, 1200);
    let path = FilePath::parse("f").unwrap();
    let id = snapshot::create(&world.core, &path, SnapshotRequest::default()).unwrap().id;
    scatter(3000, 600);
    snapshot::delete(&world.core, id).unwrap();
    let (job, visited) = work_next(&world.core, |_| true).unwrap().unwrap();
    assert_eq!(visited.unwrap(), 512);
    assert!(world.core.aside.lock().reached(job).behind > 8);
    world.put(file, 3, &[9]);
    let expected = world.content(file);
    while work_next(&world.core, |_| true).unwrap().is_some() {}
    assert_eq!(crate::stats::stats(&world.core).layer_count, 1);
    world.check();
    let world = world.crash();
    assert!(world.content(file) == expected);
}

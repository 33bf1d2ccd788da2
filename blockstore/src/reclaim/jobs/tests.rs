//! Jobs of one commit: how many there are, and one among them that fails.

use super::*;
use crate::id::SnapshotId;
use crate::kv::Write;
use crate::name::FilePath;
use crate::testing::{World, options};
use crate::types::SnapshotRequest;

/// More than one commit takes.
const FILES: u64 = 100;

fn job(core: &Core) -> Option<Job> {
    next_jobs(core, |_| true).unwrap().first().copied()
}

fn visited(core: &Core) -> u64 {
    work_next(core, |_| true).unwrap().unwrap().visited
}

#[test]
fn the_place_that_a_slice_reached_is_only_a_hint() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    for block in 0..10 {
        world.put(file, block * 2, &[block + 1]);
    }
    world.remove("f");
    let found = job(&world.core).unwrap();
    world.core.aside.lock().note_reached(found, 9);
    assert_eq!(visited(&world.core), 5);
    assert_eq!(job(&world.core), Some(found));
    assert_eq!(visited(&world.core), 5);
    assert_eq!(job(&world.core), None);
    world.check();
}

fn snapshot(world: &World, name: &str) -> SnapshotId {
    let path = FilePath::parse(name).unwrap();
    crate::snapshot::create(&world.core, &path, SnapshotRequest::default()).unwrap().id
}

/// Files that lost their names, and files whose snapshot is gone, so that layers collapse.
fn many_jobs(world: &World) {
    for number in 0..FILES {
        let name = format!("f{number}");
        let file = world.create(&name);
        world.put(file, 0, &[number + 1]);
        if number % 2 == 0 {
            let id = snapshot(world, &name);
            world.put(file, 1, &[number + 1000]);
            crate::snapshot::delete(&world.core, id).unwrap();
        } else {
            world.remove(&name);
        }
    }
}

#[test]
fn many_small_layers_take_one_commit_together() {
    let world = World::new(options(1 << 20), None);
    many_jobs(&world);
    let commits = || world.core.committer.commits.load(Ordering::Relaxed);
    let before = commits();
    while work_next(&world.core, |_| true).unwrap().is_some() {
        world.check();
    }
    let took = commits() - before;
    assert!((1..=3).contains(&took), "{took} commits");
    let layers = world.core.committer.counters.read().layers;
    assert_eq!(layers, FILES / 2);
}

#[test]
fn files_that_are_committed_meanwhile_are_left_for_later_but_for_the_first() {
    let world = World::new(options(1 << 20), None);
    many_jobs(&world);
    let collapses = |job| matches!(job, Job::Collapse(_));
    let layers = || world.core.committer.counters.read().layers;
    let first = next_jobs(&world.core, collapses).unwrap()[0];
    let idle = open_child_owner(&world.core, first.layer()).unwrap().unwrap();
    let files = world.core.files.all();
    let busy: Vec<_> =
        files.iter().filter(|file| file.inode != idle).map(|file| file.flush.lock()).collect();
    let before = layers();
    assert!(work_next(&world.core, collapses).unwrap().is_some());
    assert_eq!(layers(), before - 1);
    drop(busy);
    while work_next(&world.core, |_| true).unwrap().is_some() {}
    assert_eq!(layers(), FILES / 2);
    world.check();
}

#[test]
fn a_job_that_fails_holds_up_none_of_those_it_shared_a_commit_with() {
    let world = World::new(options(1 << 20), None);
    many_jobs(&world);
    // A layer of which the record tells of more than there is.
    let broken = next_jobs(&world.core, |_| true).unwrap()[5];
    let from = key::map(broken.layer(), 0);
    let to = key::map(broken.layer(), u64::MAX);
    let mut keys = Vec::new();
    let mut list = |key: &[u8], _: &[u8]| {
        keys.push(key.to_vec());
        Ok(ControlFlow::Continue(()))
    };
    world.core.kv.scan(Family::Map, &from, &to, &mut list).unwrap();
    let gone = |key| Write { family: Family::Map, key, value: None };
    world.core.kv.apply(&keys.into_iter().map(gone).collect()).unwrap();
    let mut failed = Vec::new();
    while let Some(worked) = work_next(&world.core, |job| !failed.contains(&job)).unwrap() {
        failed.extend(worked.failed.map(|(job, _)| job));
    }
    assert_eq!(failed, [broken]);
    assert_eq!(world.core.committer.counters.read().layers, FILES / 2 + 1);
    assert!(world.core.aside.lock().jobs.has_failed(broken));
}

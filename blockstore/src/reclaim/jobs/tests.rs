//! Jobs of one commit: how many there are, and one among them that fails; where slices go on, which
//! jobs wait, and when the queue is looked into.

use super::*;
use crate::disk::MemoryDisk;
use crate::id::SnapshotId;
use crate::kv::Write;
use crate::name::{FilePath, Name};
use crate::namespace::{self, Removal};
use crate::paths;
use crate::record::LayerRecord;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, blocks, options};
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
    world.core.aside.lock().note_reached(found, Reached { block: 9, ..Reached::default() });
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
    let idle = open_child_owner(&world.core, first.layer(), None).unwrap().unwrap();
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

/// A layer that could not collapse loses its last child, and is reclaimed instead.
#[test]
fn a_job_that_is_no_longer_to_be_done_is_not_set_aside_for_ever() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    world.put(file, 0, &[1, 2]);
    let id = snapshot(&world, "f");
    world.put(file, 0, &[3]);
    crate::snapshot::delete(&world.core, id).unwrap();
    let job = job(&world.core).unwrap();
    assert!(matches!(job, Job::Collapse(_)));
    // The clock stands still: it is not due again, however long this takes.
    let now = Instant::now();
    world.core.aside.lock().jobs.note_failure(job, now);
    let is_due = |job| world.core.aside.lock().jobs.is_due(job, now);
    assert!(next_jobs(&world.core, is_due).unwrap().is_empty());
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
    let id = snapshot(&world, "f");
    scatter(3000, 600);
    crate::snapshot::delete(&world.core, id).unwrap();
    let job = job(&world.core).unwrap();
    assert_eq!(visited(&world.core), 512);
    assert!(world.core.aside.lock().reached(job).behind > 8);
    world.put(file, 3, &[9]);
    let expected = world.content(file);
    while work_next(&world.core, |_| true).unwrap().is_some() {}
    assert_eq!(crate::stats::stats(&world.core).layer_count, 1);
    world.check();
    let world = world.crash();
    assert!(world.content(file) == expected);
}

/// Else an entry that is wrong would take the data of a file that lives.
#[test]
fn a_layer_that_is_queued_as_dead_and_is_not_keeps_what_it_has() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    world.put(file, 0, &[1, 2]);
    let expected = world.content(file);
    let layer = LayerId::new(1);
    let key = key::queue_layer(key::QUEUE_DEAD, layer);
    let wrong = Write { family: Family::Queue, key, value: Some(Vec::new()) };
    world.core.kv.apply(&vec![wrong]).unwrap();
    let (job, error) = work_next(&world.core, |_| true).unwrap().unwrap().failed.unwrap();
    assert_eq!(job, Job::Reclaim(layer));
    assert!(error.to_string().contains("queued as dead"), "{error}");
    assert!(world.content(file) == expected);
}

/// Else a wrong entry would put a layer below another, and maybe below itself.
#[test]
fn a_layer_collapses_into_no_other_than_its_own_child() {
    let world = World::new(options(1 << 20), None);
    let file = world.create("f");
    world.put(file, 0, &[1]);
    let id = snapshot(&world, "f");
    world.put(file, 1, &[2]);
    crate::snapshot::delete(&world.core, id).unwrap();
    assert_eq!(job(&world.core), Some(Job::Collapse(LayerId::new(1))));
    let key = key::layer(LayerId::new(2));
    let child = LayerRecord::decode(&world.core.kv.get(Family::Layer, &key).unwrap().unwrap());
    let strange = LayerRecord { parent: None, ..child.unwrap() };
    world.kv.tamper(Family::Layer, &key, Some(strange.encode()));
    let entries = || [Family::Map, Family::Layer, Family::Child].map(|of| world.kv.entries(of));
    let before = entries();
    let error = work_next(&world.core, |_| true).unwrap().unwrap().failed.unwrap().1;
    assert!(error.to_string().contains("its parent is none, yet layer 1"), "{error}");
    assert!(entries() == before, "nothing was moved");
}

#[test]
fn the_slices_of_a_large_layer_keep_no_other_file_from_being_committed() {
    const ENTRIES: u64 = 1200;
    let hook = Hook::default();
    let core = hooked::open((Arc::default(), MemoryDisk::new()), options(64 << 20), &hook);
    let create = |name: &str| {
        let path = FilePath::parse(name).unwrap();
        paths::create_file(&core, &path, 1 << 30).unwrap().attributes.inode
    };
    let write = |inode, block: u64| {
        let at = block * crate::units::BLOCK_BYTES_U64;
        let stability = crate::types::Stability::Unstable;
        crate::write::write(&core, inode, at, blocks(&[block + 1]), stability).unwrap();
    };
    let flush = |inode| crate::flush::flush(&core, &core.file(inode).unwrap()).unwrap();
    let large = create("large");
    (0..ENTRIES).for_each(|entry| write(large, entry * 2));
    flush(large);
    let other = create("other");
    write(other, 0);
    flush(other);
    let path = FilePath::parse("other").unwrap();
    let request = SnapshotRequest::default();
    let id = crate::snapshot::create(&core, &path, request).unwrap().id;
    write(other, 1);
    flush(other);
    crate::snapshot::delete(&core, id).unwrap();
    namespace::remove(&core, InodeId::ROOT, &Name::new(b"large").unwrap(), Removal::Any).unwrap();
    assert_eq!(next_jobs(&core, |_| true).unwrap().len(), 2);
    assert!(visited(&core) < ENTRIES, "there is another slice");
    let file = core.file(other).unwrap();
    hook.set(During::Sync, move || assert!(file.flush.try_lock().is_some(), "it can be committed"));
    visited(&core);
    assert!(!hook.is_set());
    while work_next(&core, |_| true).unwrap().is_some() {}
    assert_eq!(core.committer.counters.read().layers, 1);
}

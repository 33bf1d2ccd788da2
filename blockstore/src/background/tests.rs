//! What cleaning does while it compacts, and beside what cannot be compacted.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::disk::MemoryDisk;
use crate::id::{ChunkId, InodeId};
use crate::name::FilePath;
use crate::namespace::Removal;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, options};
use crate::{namespace, paths};

/// Far longer than anything that is waited for takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_that_cannot_be_moved_is_left_alone_for_a_while() {
    let world = World::new(options(64 << 10), None);
    world.six_segments();
    seal(&world.core).unwrap();
    checkpoint(&world.core).unwrap();
    world.flip(ChunkId::new(SegmentId::new(2), 0));
    let bell = Bell::default();
    clean_once(&world.core, &bell).unwrap();
    assert_eq!(world.not_compacted(), [2]);
    let file = crate::log::log_file(SegmentId::new(2));
    assert!(world.core.aside.lock().files.has_failed(file));
    // So long that the test cannot take it.
    for _ in 0..9 {
        world.core.aside.lock().files.note_failure(file, Instant::now());
    }
    let read_bytes = world.core.segments.read_bytes();
    clean_once(&world.core, &bell).unwrap();
    assert_eq!(world.core.segments.read_bytes(), read_bytes);
}

#[test]
fn reclaim_goes_on_while_compaction_takes_its_time() {
    let mut options = options(64 << 10);
    // A pause of hours behind the first.
    options.compaction_bytes_per_second = 1;
    let world = World::new(options, None);
    world.six_segments();
    let other = world.create("other");
    world.put(other, 0, &[1000, 1001]);
    seal(&world.core).unwrap();
    checkpoint(&world.core).unwrap();
    let bell = Arc::new(Bell::default());
    let (core, heard) = (Arc::clone(&world.core), Arc::clone(&bell));
    let cleaning = std::thread::spawn(move || clean_once(&core, &heard));
    let stats = || crate::stats::stats(&world.core);
    wait_for("the first compaction", || stats().compacted_bytes > 0);
    world.remove("other");
    assert_eq!(stats().dead_layer_count, 1);
    wait_for("reclaim", || stats().dead_layer_count == 0);
    bell.stop();
    cleaning.join().unwrap().unwrap();
    world.check();
}

/// Files of a client that deletes without end, as far as a test is concerned.
const CHURN_MAX: u64 = 1000;

/// At each look into the queue one more file of a client has just been created and removed.
fn churn(core: Weak<Core>, hook: Hook, removed: Arc<AtomicU64>) {
    let again = hook.clone();
    hook.set(During::ScanQueue, move || {
        let Some(open) = core.upgrade() else { return };
        let path = FilePath::parse("short-lived").unwrap();
        paths::create_file(&open, &path, 1 << 20).unwrap();
        namespace::remove(&open, InodeId::ROOT, path.split().1, Removal::Any).unwrap();
        let round = removed.fetch_add(1, Ordering::Relaxed);
        // Else a test that fails would not end.
        if round < CHURN_MAX {
            churn(core, again, removed);
        }
    });
}

#[test]
fn garbage_collection_ends_while_clients_go_on_deleting() {
    let hook = Hook::default();
    let core = hooked::open((Arc::default(), MemoryDisk::new()), options(1 << 20), &hook);
    let removed = Arc::new(AtomicU64::new(0));
    churn(Arc::downgrade(&core), hook, Arc::clone(&removed));
    gc(&core).unwrap();
    let rounds = removed.load(Ordering::Relaxed);
    assert!((1..10).contains(&rounds), "{rounds} looks into the queue");
}

/// Expiry, checkpoints and compaction do not wait until clients delete nothing any more.
#[test]
fn cleaning_goes_on_while_clients_go_on_deleting() {
    let hook = Hook::default();
    let core = hooked::open((Arc::default(), MemoryDisk::new()), options(64 << 10), &hook);
    let removed = Arc::new(AtomicU64::new(0));
    let bell = Bell::default();
    churn(Arc::downgrade(&core), hook, Arc::clone(&removed));
    assert_eq!(keep_up(&core, &bell).unwrap(), Left::More);
    let rounds = removed.load(Ordering::Relaxed);
    assert!((1..CHURN_MAX / 2).contains(&rounds), "{rounds} looks into the queue");
    // In the end all is done.
    clean_once(&core, &bell).unwrap();
    assert_eq!(removed.load(Ordering::Relaxed), CHURN_MAX + 1);
    assert_eq!(core.committer.counters.read().dead_layers, 0);
}

/// A damaged key of the queue, of which nobody knows whose it is.
#[test]
fn cleaning_goes_on_though_no_snapshot_can_expire() {
    let world = World::new(options(64 << 10), None);
    world.six_segments();
    seal(&world.core).unwrap();
    checkpoint(&world.core).unwrap();
    world.create("f");
    world.remove("f");
    let cut_off = [crate::record::key::QUEUE_EXPIRY, 0];
    world.kv.tamper(crate::kv::Family::Queue, &cut_off, Some(Vec::new()));
    clean_once(&world.core, &Bell::default()).unwrap();
    assert_eq!(world.not_compacted(), Vec::<u64>::new());
    assert_eq!(crate::stats::stats(&world.core).dead_layer_count, 0);
    assert!(gc(&world.core).unwrap_err().to_string().contains("expiry key"));
    world.kv.tamper(crate::kv::Family::Queue, &cut_off, None);
    gc(&world.core).unwrap();
    world.check();
}

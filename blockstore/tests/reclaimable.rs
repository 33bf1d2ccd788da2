//! What a delete is said to free is what it frees: random trees of files, snapshots and clones that share blocks, where
//! each delete is asked about first and measured after.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use common::{Fixture, bytes, path};
use proptest::prelude::*;
use slackwater_blockstore::{
    DeletionPolicy, ErrorKind, FilePath, InodeId, Name, Reclaimable, SnapshotId, SnapshotRequest,
    Stability, Store,
};

const FILES: usize = 5;
const BLOCKS: u64 = 160;
const BLOCK: u64 = 4096;

#[derive(Clone, Debug)]
enum Op {
    Write { file: usize, first: u64, count: u64, seed: u64 },
    Truncate { file: usize, blocks: u64 },
    Snapshot { file: usize, goes_with_its_clones: bool },
    Clone { snapshot: usize, file: usize },
    Remove { file: usize },
    DeleteSnapshot { snapshot: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let (file, snapshot) = (0..FILES, 0usize..8);
    // Few seeds, so that blocks are shared; 0 are zeros, which are holes.
    let write = (file.clone(), 0..BLOCKS, 1u64..80, 0u64..16);
    prop_oneof![
        8 => write.prop_map(|(file, first, count, seed)| Op::Write { file, first, count, seed }),
        1 => (file.clone(), 0..BLOCKS).prop_map(|(file, blocks)| Op::Truncate { file, blocks }),
        4 => (file.clone(), any::<bool>())
            .prop_map(|(file, goes_with_its_clones)| Op::Snapshot { file, goes_with_its_clones }),
        4 => (snapshot.clone(), file.clone()).prop_map(|(snapshot, file)| Op::Clone { snapshot, file }),
        2 => file.prop_map(|file| Op::Remove { file }),
        2 => snapshot.prop_map(|snapshot| Op::DeleteSnapshot { snapshot }),
    ]
}

fn name(file: usize) -> FilePath {
    path(&format!("f{file}"))
}

fn inode(store: &Store, file: usize) -> Option<InodeId> {
    store.file_info(&name(file)).ok().map(|info| info.attributes.inode)
}

/// Each block has bytes of its own, by the seed and its place, so that two files that were written with the same seed
/// share some.
fn write(store: &Store, inode: InodeId, first: u64, count: u64, seed: u64) {
    for block in first..(first + count).min(BLOCKS) {
        let seed = if seed == 0 { 0 } else { 100 + seed * BLOCKS + block % 40 };
        store.write(inode, block * BLOCK, bytes(seed, 4096), Stability::Unstable).unwrap();
    }
    store.commit(inode).unwrap();
}

/// Answers what is said, once all that earlier deletes left is done.
fn asked(store: &Store, ask: impl FnOnce() -> Reclaimable) -> (Reclaimable, u64) {
    store.gc().unwrap();
    (ask(), store.stats().chunk_count)
}

fn measured(store: &Store, (said, before): (Reclaimable, u64), what: &str) {
    store.gc().unwrap();
    let freed = before - store.stats().chunk_count;
    assert_eq!(said.blocks, freed, "{what}: said {said:?}");
    assert_eq!(said.sampled_one_in, 1, "{what}");
    assert!(said.bytes <= freed * (BLOCK + 256), "{what}: said {said:?}");
    assert_eq!(said.bytes > 0, freed > 0, "{what}: said {said:?}");
}

fn apply(store: &Store, snapshots: &mut Vec<SnapshotId>, op: &Op) {
    let wanted = || true;
    match *op {
        Op::Write { file, first, count, seed } => {
            let made = || store.create_file(&name(file), BLOCKS * BLOCK).unwrap().attributes.inode;
            let inode = inode(store, file).unwrap_or_else(made);
            write(store, inode, first, count, seed);
        }
        Op::Truncate { file, blocks } => {
            if inode(store, file).is_some() {
                store.resize_file(&name(file), blocks * BLOCK).unwrap();
            }
        }
        Op::Snapshot { file, goes_with_its_clones } => {
            let deletion = match goes_with_its_clones {
                true => DeletionPolicy::OnZeroClones,
                false => DeletionPolicy::Keep,
            };
            let request = SnapshotRequest { deletion, ..SnapshotRequest::default() };
            snapshots.extend(store.snapshot(&name(file), request).ok().map(|taken| taken.id));
        }
        Op::Clone { snapshot, file } => {
            if let Some(id) = snapshots.get(snapshot) {
                let _ = store.clone_snapshot(*id, &name(file));
            }
        }
        Op::Remove { file } => {
            if inode(store, file).is_some() {
                let ask = || store.reclaimable_of_file(&name(file), &wanted).unwrap().unwrap();
                let said = asked(store, ask);
                store.remove_path(&name(file)).unwrap();
                measured(store, said, "a file");
                snapshots.retain(|id| store.snapshot_info(*id).is_ok());
            }
        }
        Op::DeleteSnapshot { snapshot } => {
            if snapshot < snapshots.len() {
                let id = snapshots.remove(snapshot);
                let ask = || store.reclaimable_of_snapshot(id, &wanted).unwrap().unwrap();
                let said = asked(store, ask);
                store.delete_snapshot(id).unwrap();
                measured(store, said, "a snapshot");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn what_is_said_is_what_is_freed(ops in prop::collection::vec(op(), 1..60)) {
        let fixture = Fixture::new();
        let store = &fixture.store;
        let mut snapshots = Vec::new();
        for op in &ops {
            apply(store, &mut snapshots, op);
        }
        // All that is left, so that nothing was said to stay for ever.
        for file in 0..FILES {
            apply(store, &mut snapshots, &Op::Remove { file });
        }
        while !snapshots.is_empty() {
            apply(store, &mut snapshots, &Op::DeleteSnapshot { snapshot: 0 });
        }
        prop_assert_eq!(store.stats().chunk_count, 0);
        fixture.check();
    }
}

/// What two files hold is freed by no delete of one alone, whatever `unique_bytes` says.
#[test]
fn the_same_blocks_under_two_names_are_freed_with_the_second() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    for file in 0..2 {
        let made = store.create_file(&name(file), BLOCKS * BLOCK).unwrap();
        write(store, made.attributes.inode, 0, 40, 9);
        assert_eq!(store.file_info(&name(file)).unwrap().unique_bytes, 40 * BLOCK);
    }
    let blocks = |file| {
        let said = store.reclaimable_of_file(&name(file), &|| true).unwrap().unwrap();
        said.blocks
    };
    assert_eq!((blocks(0), blocks(1)), (0, 0));
    store.remove_path(&name(0)).unwrap();
    store.gc().unwrap();
    assert_eq!(blocks(1), 40);
}

/// O keeps P alone, and P keeps C alone: what C hides of O goes, too.
#[test]
fn layers_that_collapse_into_each_other_free_what_each_of_them_hides() {
    let fixture = Fixture::new();
    let (store, mut snapshots) = (&fixture.store, Vec::new());
    for op in [
        Op::Write { file: 0, first: 0, count: 40, seed: 9 },
        Op::Snapshot { file: 0, goes_with_its_clones: true },
        Op::Clone { snapshot: 0, file: 1 },
        Op::Remove { file: 0 },
        Op::Write { file: 1, first: 0, count: 10, seed: 10 },
        Op::Snapshot { file: 1, goes_with_its_clones: false },
        Op::Clone { snapshot: 1, file: 2 },
        Op::DeleteSnapshot { snapshot: 1 },
        Op::Write { file: 2, first: 5, count: 15, seed: 11 },
    ] {
        apply(store, &mut snapshots, &op);
    }
    store.gc().unwrap();
    let said = store.reclaimable_of_file(&name(1), &|| true).unwrap().unwrap();
    assert_eq!(said.blocks, 5 + 10 + 10, "of P below C, of O below P, of O below C alone");
    apply(store, &mut snapshots, &Op::Remove { file: 1 });
}

#[test]
fn what_has_other_names_stays_and_what_is_no_file_is_refused() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    let file = store.create_file(&name(0), BLOCKS * BLOCK).unwrap().attributes.inode;
    write(store, file, 0, 3, 9);
    let said = |at: &FilePath| store.reclaimable_of_file(at, &|| true);
    assert_eq!(said(&name(0)).unwrap().unwrap().blocks, 3);
    store.link(file, InodeId::ROOT, &Name::new(b"other").unwrap()).unwrap();
    assert_eq!(said(&name(0)).unwrap().unwrap().blocks, 0);
    let kind = |at: &str| said(&path(at)).unwrap_err().kind();
    assert_eq!(kind("missing"), ErrorKind::NotFound);
    let id = SnapshotId::from_bytes([7; 16]);
    let missing = store.reclaimable_of_snapshot(id, &|| true).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    // It stops once it is not wanted any more.
    store.remove_path(&path("other")).unwrap();
    assert_eq!(store.reclaimable_of_file(&name(0), &|| false).unwrap(), None);
}

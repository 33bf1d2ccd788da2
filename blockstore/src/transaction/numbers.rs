//! Numbers of inodes and layers are given out once, even when the counters are damaged.

use crate::error::{Error, Result};
use crate::id::InodeId;
use crate::kv::{Family, KvRead};
use crate::name::FilePath;
use crate::record::{Counters, LayerRecord, LayerState, key};
use crate::repair::{self, GiveUp};
use crate::testing::{World, options};
use crate::{id::LayerId, paths, snapshot, types::SnapshotRequest};

/// A store with two files, whose counters were changed while it was not open; and their contents.
fn damaged(change: impl Fn(&mut Counters)) -> (World, [(InodeId, Vec<u8>); 2]) {
    let world = World::new(options(1 << 20), None);
    let files = ["a", "b"].map(|name| {
        let inode = world.create(name);
        world.put(inode, 0, &[inode.get(), 7]);
        (inode, world.content(inode))
    });
    let world = world.restart();
    let key = key::META_COUNTERS;
    let stored = world.kv.get(Family::Meta, key).unwrap().unwrap();
    let mut counters = Counters::decode(&stored).unwrap();
    change(&mut counters);
    world.kv.tamper(Family::Meta, key, Some(counters.encode()));
    (world.restart(), files)
}

fn is_refused<T: std::fmt::Debug>(outcome: Result<T>, expected: &str) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

fn path(text: &str) -> FilePath {
    FilePath::parse(text).unwrap()
}

#[test]
fn nothing_new_takes_the_place_of_what_has_its_number() {
    for what in ["inode", "layer"] {
        for next in [0, 2] {
            let (world, files) = damaged(|counters| match what {
                "inode" => counters.next_inode = next,
                _ => counters.next_layer = next,
            });
            let expected = format!("the next {what} would be {next}, which is not free");
            is_refused(paths::create_file(&world.core, &path("c"), 0), &expected);
            if what == "layer" {
                let taken = snapshot::create(&world.core, &path("a"), SnapshotRequest::default());
                is_refused(taken, &expected);
            }
            for (inode, content) in &files {
                assert_eq!(world.content(*inode), *content);
            }
            let report = repair::repair(&world.core, GiveUp::Damaged).unwrap();
            assert!(report.after.problems.is_empty(), "{report:?}");
            world.create("c");
            world.check();
            for (inode, content) in files {
                assert_eq!(world.content(inode), content);
            }
        }
    }
}

/// An inode without a name gets one in `lost+found`, which is a new inode itself.
#[test]
fn a_repair_mends_the_counters_before_it_makes_lost_and_found() {
    let (world, [(lost, content), _]) = damaged(|counters| counters.next_inode = 2);
    let entry = key::dirent(InodeId::ROOT, b"a");
    let stored = world.kv.get(Family::Dirent, &entry).unwrap();
    assert!(stored.is_some());
    world.kv.tamper(Family::Dirent, &entry, None);
    let report = repair::repair(&world.core, GiveUp::Damaged).unwrap();
    assert!(report.after.problems.is_empty(), "{report:?}");
    assert_eq!(world.content(lost), content);
}

/// A walk down the layers would have no end.
#[test]
fn a_layer_whose_parent_is_not_older_is_refused() {
    let id = LayerId::new(5);
    let record = |parent| LayerRecord {
        parent,
        state: LayerState::Frozen,
        children: 1,
        snapshots: 1,
        runs: 0,
        blocks: 0,
    };
    for parent in [5, 6, u64::MAX] {
        let bytes = record(Some(LayerId::new(parent))).encode();
        is_refused(LayerRecord::decode_of(id, &bytes), "itself or a younger one");
    }
    for parent in [None, Some(LayerId::new(4))] {
        let record = record(parent);
        assert_eq!(LayerRecord::decode_of(id, &record.encode()).unwrap(), record);
    }
}

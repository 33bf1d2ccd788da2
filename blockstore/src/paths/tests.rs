//! Calls by path that fail in the middle.

use super::*;
use crate::kv::KvFault;
use crate::testing::{World, blocks, options};
use crate::types::SnapshotRequest;
use crate::{file_commit, snapshot};

/// Reads of one call at most.
const READS_MAX: u64 = 100;

fn path(text: &str) -> FilePath {
    FilePath::parse(text).unwrap()
}

/// What there is, by path and size.
fn files(world: &World) -> Vec<(String, u64)> {
    let files = list(&world.core, "", None, 100).unwrap();
    files.iter().map(|file| (file.path.to_string(), file.attributes.size_bytes)).collect()
}

/// A caller who repeats it would be told that the file exists, or is not there.
#[test]
fn a_call_that_fails_has_changed_nothing() {
    let world = World::new(options(1 << 20), None);
    for name in ["file", "other"] {
        let inode = world.create(name);
        world.write(inode, 0, blocks(&[1, 2]));
        file_commit::commit_file(&world.core, inode).unwrap();
    }
    let taken = snapshot::create(&world.core, &path("file"), SnapshotRequest::default()).unwrap();
    type Call<'a> = Box<dyn Fn(&Core) -> Result<FileInfo> + 'a>;
    let calls: [Call<'_>; 4] = [
        Box::new(|core| create_file(core, &path("a/new"), 5)),
        Box::new(|core| snapshot::clone(core, taken.id, &path("a/clone"))),
        Box::new(|core| resize_file(core, &path("file"), 4096)),
        Box::new(|core| rename_file(core, &path("other"), &path("b/moved"))),
    ];
    for (number, call) in calls.iter().enumerate() {
        let before = files(&world);
        let done = (0..READS_MAX).find_map(|read| {
            world.kv.inject(KvFault::Read(read));
            let outcome = call(&world.core);
            let has_struck = !world.kv.disarm();
            if outcome.is_err() {
                assert_eq!(files(&world), before, "call {number}, read {read}");
            }
            outcome.ok().map(|done| (done, has_struck))
        });
        let (done, has_struck) = done.unwrap();
        let now = file_info(&world.core, &done.path).unwrap();
        assert_ne!(files(&world), before);
        assert_eq!(done.attributes, now.attributes, "{number}");
        assert!(has_struck || done == now, "what is told is what is there: {done:?} {now:?}");
    }
}

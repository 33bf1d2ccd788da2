//! What moves the time of last access, and what a commit of it leaves.

use super::*;
use crate::attributes::set_in;
use crate::data::read;
use crate::disk::Fault;
use crate::error::ErrorKind;
use crate::namespace;
use crate::rights::Rights;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, blocks, options};
use crate::types::{SetAttributes, SetTime, Source};

fn attributes(core: &Core, inode: InodeId) -> Attributes {
    namespace::attributes(core, inode).unwrap()
}

/// A READ, as front ends do it.
fn read_and_note(core: &Core, inode: InodeId) -> Timestamp {
    let reply = read(core, Source::File(inode), 0, 100).unwrap();
    note_read(core, &reply.attributes)
}

fn committed(core: &Core, inode: InodeId) -> Timestamp {
    core.inode(inode).unwrap().accessed_at
}

#[test]
fn the_first_read_behind_a_change_and_one_after_a_day_are_due() {
    let day = 24 * 3600;
    let at = |seconds: u64| Timestamp::new(seconds, 0).unwrap();
    let world = World::new(options(1 << 20), None);
    let file = attributes(&world.core, world.create("f"));
    let due = |(accessed, modified, changed): (u64, u64, u64), now: u64| {
        let (accessed_at, modified_at, changed_at) = (at(accessed), at(modified), at(changed));
        is_due(&Attributes { accessed_at, modified_at, changed_at, ..file }, at(now))
    };
    assert!(due((10, 10, 10), 11), "never read");
    assert!(!due((11, 10, 10), 12), "read since");
    assert!(due((11, 12, 12), 13), "written since");
    assert!(due((11, 10, 12), 13), "given another owner since");
    assert!(!due((11, 10, 10), 10 + day), "nearly a day ago");
    assert!(due((11, 10, 10), 11 + day), "a day ago");
    assert!(!due((11, 12, 12), 11), "the clock was put back");
    assert!(!due((11, 99, 10), 12), "a time of change that was set ahead");
    assert!(due((11, 99, 99), 11 + day), "a day ago");
}

#[test]
fn reads_cost_one_commit_for_all_files() {
    let world = World::new(options(1 << 20), None);
    let inodes = ["a", "b", "c"].map(|name| world.create(name));
    let core = &world.core;
    let before = inodes.map(|inode| attributes(core, inode));
    let commits = crate::stats::stats(core).commits;
    let noted = inodes.map(|inode| read_and_note(core, inode));
    // Once more, it is as it was.
    assert_eq!(inodes.map(|inode| read_and_note(core, inode)), noted);
    for (inode, (before, noted)) in inodes.into_iter().zip(before.into_iter().zip(noted)) {
        assert!(noted > before.changed_at);
        assert_eq!(attributes(core, inode), Attributes { accessed_at: noted, ..before });
        assert_eq!(committed(core, inode), before.accessed_at);
    }
    commit_due(core, WAIT);
    assert_eq!(crate::stats::stats(core).commits, commits, "none has waited for long");
    commit_due(core, Duration::ZERO);
    assert_eq!(crate::stats::stats(core).commits, commits + 1);
    commit(core).unwrap();
    assert_eq!(crate::stats::stats(core).commits, commits + 1, "nothing is left");
    let world = world.crash();
    for (inode, noted) in inodes.into_iter().zip(noted) {
        assert_eq!(attributes(&world.core, inode).accessed_at, noted);
    }
    world.check();
}

#[test]
fn when_many_wait_they_are_committed_early_and_beyond_a_bound_no_time_moves() {
    let world = World::new(options(1 << 20), None);
    let core = &world.core;
    let inodes: Vec<_> =
        (0..=FILES_MAX).map(|number| world.create(&format!("f{number}"))).collect();
    for inode in &inodes[..FILES_MAX / 2] {
        read_and_note(core, *inode);
    }
    commit_due(core, WAIT);
    let noted_last = inodes[FILES_MAX / 2 - 1];
    assert!(committed(core, noted_last) > attributes(core, noted_last).changed_at);
    for inode in &inodes {
        crate::attributes::set_in(core, *inode, &SetAttributes::default(), None).unwrap();
        read_and_note(core, *inode);
    }
    let last = attributes(core, inodes[FILES_MAX]);
    assert!(last.accessed_at < last.changed_at, "one too many");
    commit_due(core, WAIT);
    assert!(read_and_note(core, inodes[FILES_MAX]) > last.changed_at);
}

#[test]
fn a_time_that_is_set_counts_more_than_a_read_before() {
    let world = World::new(options(1 << 20), None);
    let inode = world.create("f");
    let core = &world.core;
    read_and_note(core, inode);
    let long_ago = Timestamp::new(1000, 0).unwrap();
    let set =
        SetAttributes { accessed_at: Some(SetTime::To(long_ago)), ..SetAttributes::default() };
    let change = set_in(core, inode, &set, None).unwrap();
    assert_eq!(change.after.accessed_at, long_ago);
    commit(core).unwrap();
    assert_eq!(attributes(core, inode).accessed_at, long_ago);
    assert_eq!(committed(core, inode), long_ago);
    // A mode leaves it.
    let noted = read_and_note(core, inode);
    let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
    assert_eq!(set_in(core, inode, &set, None).unwrap().after.accessed_at, noted);
    commit(core).unwrap();
    assert_eq!(committed(core, inode), noted);
}

#[test]
fn a_time_that_could_not_be_set_leaves_the_noted_one() {
    let world = World::new(options(1 << 20), None);
    let inode = world.create("f");
    let core = &world.core;
    let noted = read_and_note(core, inode);
    let of_another = Rights::from(&Attributes { uid: 77, ..attributes(core, inode) });
    let set = SetAttributes { accessed_at: Some(SetTime::Now), ..SetAttributes::default() };
    let refused = crate::attributes::set_judged(core, inode, &set, None, Some(of_another));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(attributes(core, inode).accessed_at, noted);
    commit(core).unwrap();
    assert_eq!(committed(core, inode), noted);
}

/// Files that nobody uses are dropped from memory, but for those whose times are not committed.
#[test]
fn a_noted_time_outlives_reads_of_many_other_files() {
    let world = World::new(options(1 << 20), None);
    let core = &world.core;
    let inode = world.create("f");
    let noted = read_and_note(core, inode);
    for number in 0..crate::file::FILES_IN_MEMORY + 10 {
        let other = world.create(&format!("f{number}"));
        read(core, Source::File(other), 0, 100).unwrap();
    }
    assert_eq!(attributes(core, inode).accessed_at, noted);
}

/// Of a read that comes while the one before is committed nothing is lost.
#[test]
fn a_read_while_times_are_committed_is_committed_with_the_next() {
    let hook = Hook::default();
    let parts = (std::sync::Arc::default(), crate::disk::MemoryDisk::new());
    let core = hooked::open(parts, options(1 << 20), &hook);
    let path = crate::name::FilePath::parse("f").unwrap();
    let inode = crate::paths::create_file(&core, &path, 0).unwrap().attributes.inode;
    let first = read_and_note(&core, inode);
    let other = std::sync::Arc::clone(&core);
    hook.set(During::Sync, move || {
        // Written, and read again.
        let stability = crate::types::Stability::Unstable;
        crate::write::write(&other, inode, 0, blocks(&[1]), stability).unwrap();
        assert!(read_and_note(&other, inode) > first);
    });
    commit(&core).unwrap();
    assert!(!hook.is_set());
    assert_eq!(committed(&core, inode), first);
    let second = attributes(&core, inode).accessed_at;
    assert!(second > first);
    commit(&core).unwrap();
    assert_eq!(committed(&core, inode), second);
}

#[test]
fn a_file_that_is_removed_and_a_commit_that_fails_harm_nothing() {
    let world = World::new(options(1 << 20), None);
    let (gone, kept) = (world.create("gone"), world.create("kept"));
    let core = &world.core;
    read_and_note(core, gone);
    let noted = read_and_note(core, kept);
    world.remove("gone");
    commit(core).unwrap();
    assert_eq!(committed(core, kept), noted);
    // After a failed sync the store takes no changes.
    set_in(core, kept, &SetAttributes::default(), None).unwrap();
    assert!(read_and_note(core, kept) > noted);
    world.disk.inject(Fault::Sync(0));
    assert!(commit(core).is_err());
    assert_eq!(attributes(core, kept).accessed_at, noted);
    world.crash().check();
}

#[test]
fn a_store_that_is_closed_keeps_them() {
    let world = World::new(options(1 << 20), None);
    let inode = world.create("f");
    let noted = read_and_note(&world.core, inode);
    crate::file_commit::commit_all(&world.core).unwrap();
    let world = world.crash();
    assert_eq!(attributes(&world.core, inode).accessed_at, noted);
}

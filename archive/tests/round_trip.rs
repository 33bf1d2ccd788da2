//! There and back: any archive replays byte for byte, and a packed difference makes the newer
//! tree of the older one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use slackwater_archive::{ArchiveError, ChangeKind, changes, replay};
use support::ops::{DIRECTORIES, LEAVES, Op, append, op};
use support::{Tar, copy, pack, tree};
use tempfile::tempdir;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_archive_replays_byte_for_byte(
        lower in prop::collection::vec(op(), 0..8),
        ops in prop::collection::vec(op(), 0..24),
        trailing in prop::collection::vec(any::<u8>(), 0..3_000),
    ) {
        let folder = tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        support::unpack(&lower.iter().fold(Tar::new(), append).end(), &root).unwrap();
        let archive = ops.iter().fold(Tar::new(), append).end();
        let archive = [archive, trailing].concat();
        let recording = folder.path().join("recording");
        let unpacked = slackwater_archive::unpack(&archive[..], &root, Some(&recording)).unwrap();
        let before = tree(&root);
        let mut replayed = Vec::new();
        replay(&recording, &root, &mut replayed).unwrap();
        prop_assert!(replayed == archive, "{} bytes became {}", archive.len(), replayed.len());
        prop_assert_eq!(tree(&root), before);
        let entries = ops.iter().map(|op| if matches!(op, Op::Linked { .. }) { 2 } else { 1 });
        prop_assert_eq!(unpacked.entries, entries.sum::<u64>());
    }
}

/// A change of a tree, made with ordinary calls.
#[derive(Debug, Clone)]
enum Edit {
    File(usize, usize, Vec<u8>),
    Directory(usize, usize),
    Symlink(usize, usize, bool),
    Link(usize, usize, usize),
    Fifo(usize, usize),
    Device(usize, usize),
    Long(usize),
    Remove(usize, usize),
    RemoveDirectory(usize),
    Mode(usize, usize, u32),
    DirectoryMode(usize, u32),
    Owner(usize, usize, u32),
    Xattr(usize, usize, bool),
    Touch(usize, usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    let directory = || 0..DIRECTORIES.len();
    let leaf = || 0..LEAVES.len();
    let mode = || prop::sample::select(vec![0o600, 0o4755, 0o1777, 0o2770, 0o755]);
    let content = prop::collection::vec(any::<u8>(), 0..3);
    prop_oneof![
        4 => (directory(), leaf(), content).prop_map(|(d, l, content)| Edit::File(d, l, content)),
        1 => (directory(), leaf()).prop_map(|(d, l)| Edit::Directory(d, l)),
        1 => (directory(), leaf(), any::<bool>()).prop_map(|(d, l, way)| Edit::Symlink(d, l, way)),
        3 => (directory(), leaf(), directory()).prop_map(|(d, l, to)| Edit::Link(d, l, to)),
        1 => (directory(), leaf()).prop_map(|(d, l)| Edit::Fifo(d, l)),
        1 => (directory(), leaf()).prop_map(|(d, l)| Edit::Device(d, l)),
        1 => directory().prop_map(Edit::Long),
        2 => (directory(), leaf()).prop_map(|(d, l)| Edit::Remove(d, l)),
        1 => directory().prop_map(Edit::RemoveDirectory),
        1 => (directory(), leaf(), mode()).prop_map(|(d, l, mode)| Edit::Mode(d, l, mode)),
        1 => (directory(), mode()).prop_map(|(d, mode)| Edit::DirectoryMode(d, mode)),
        1 => (directory(), leaf(), any::<u32>()).prop_map(|(d, l, owner)| Edit::Owner(d, l, owner >> 1)),
        1 => (directory(), leaf(), any::<bool>()).prop_map(|(d, l, way)| Edit::Xattr(d, l, way)),
        1 => (directory(), leaf()).prop_map(|(d, l)| Edit::Touch(d, l)),
    ]
}

fn remove(path: &Path) {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// Gives a file a time that no other has, before and after 1970, with nanoseconds.
fn stamp(path: &Path, clock: &mut i64) {
    *clock += 1;
    let time = Timespec { tv_sec: *clock - 20, tv_nsec: *clock * 1_000_003 % 1_000_000_000 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

fn apply(root: &Path, edit: &Edit, clock: &mut i64) {
    let at = |directory: usize, leaf: usize| root.join(DIRECTORIES[directory]).join(LEAVES[leaf]);
    // Makes place for something new.
    let fresh = |directory: usize, leaf: usize| {
        let path = at(directory, leaf);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        remove(&path);
        path
    };
    let made = match edit {
        Edit::File(directory, leaf, content) => {
            let path = fresh(*directory, *leaf);
            fs::write(&path, content).unwrap();
            path
        }
        Edit::Directory(directory, leaf) => {
            let path = fresh(*directory, *leaf);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("inner"), "inner").unwrap();
            stamp(&path.join("inner"), clock);
            path
        }
        Edit::Symlink(directory, leaf, way) => {
            let path = fresh(*directory, *leaf);
            let target = if *way { "../one".to_owned() } else { "t".repeat(200) };
            symlink(target, &path).unwrap();
            path
        }
        Edit::Link(directory, leaf, to) => {
            let from = at(*directory, *leaf);
            if !from.symlink_metadata().is_ok_and(|metadata| !metadata.is_dir()) {
                return;
            }
            let path = fresh(*to, (leaf + 1) % LEAVES.len());
            // The time stays: only the link is new.
            return fs::hard_link(from, path).unwrap();
        }
        Edit::Fifo(directory, leaf) => {
            let path = fresh(*directory, *leaf);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
            path
        }
        Edit::Device(directory, leaf) => {
            let path = fresh(*directory, *leaf);
            let device = rustix::fs::makedev(259, 300_000);
            let mode = Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, &path, FileType::BlockDevice, mode, device).unwrap();
            path
        }
        Edit::Long(directory) => {
            let path = root.join(DIRECTORIES[*directory]).join("n".repeat(200));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "long").unwrap();
            path
        }
        Edit::Remove(directory, leaf) => return remove(&at(*directory, *leaf)),
        Edit::RemoveDirectory(directory) => return remove(&root.join(DIRECTORIES[*directory])),
        Edit::DirectoryMode(directory, mode) => {
            let path = root.join(DIRECTORIES[*directory]);
            fs::create_dir_all(&path).unwrap();
            return rustix::fs::chmod(&path, Mode::from_raw_mode(*mode)).unwrap();
        }
        Edit::Mode(directory, leaf, _)
        | Edit::Owner(directory, leaf, _)
        | Edit::Xattr(directory, leaf, _)
        | Edit::Touch(directory, leaf) => {
            return edit_attribute(&at(*directory, *leaf), edit, clock);
        }
    };
    stamp(&made, clock);
}

fn edit_attribute(path: &Path, edit: &Edit, clock: &mut i64) {
    if !path.symlink_metadata().is_ok_and(|metadata| metadata.is_file()) {
        return;
    }
    match edit {
        Edit::Mode(_, _, mode) => rustix::fs::chmod(path, Mode::from_raw_mode(*mode)).unwrap(),
        Edit::Owner(_, _, owner) => chown(path, Some(*owner), Some(*owner / 2)).unwrap(),
        Edit::Xattr(_, _, true) => {
            let (name, value) = ("trusted.slackwater", b"a=b\n\0c");
            rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
            rustix::fs::setxattr(path, "user.one", b"1", XattrFlags::empty()).unwrap();
        }
        Edit::Xattr(_, _, false) => drop(rustix::fs::removexattr(path, "user.one")),
        _ => stamp(path, clock),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_packed_difference_makes_the_newer_tree_of_the_older(
        first in prop::collection::vec(edit(), 0..20),
        second in prop::collection::vec(edit(), 0..20),
    ) {
        let folder = tempdir().unwrap();
        let [older, newer, made] = ["older", "newer", "made"].map(|name| folder.path().join(name));
        fs::create_dir(&older).unwrap();
        let mut clock = 0;
        first.iter().for_each(|edit| apply(&older, edit, &mut clock));
        copy(&older, &newer);
        copy(&older, &made);
        prop_assert_eq!(changes(Some(&older), &newer).unwrap(), vec![]);
        second.iter().for_each(|edit| apply(&newer, edit, &mut clock));

        let archive = pack(Some(&older), &newer).unwrap();
        prop_assert!(pack(Some(&older), &newer).unwrap() == archive, "packed differently");
        let recording = folder.path().join("recording");
        let mut again = Vec::new();
        let recorded = Some(&*recording);
        slackwater_archive::pack(Some(&older), &newer, &mut again, recorded, usize::MAX).unwrap();
        prop_assert!(again == archive, "packed differently with a recording");
        again.clear();
        slackwater_archive::replay(&recording, &newer, &mut again).unwrap();
        prop_assert!(again == archive, "replayed differently");
        support::unpack(&archive, &made).unwrap();
        prop_assert_eq!(tree(&made), tree(&newer));
        prop_assert_eq!(changes(Some(&newer), &made).unwrap(), vec![]);

        // And all of it from nothing.
        let whole = folder.path().join("whole");
        fs::create_dir(&whole).unwrap();
        support::unpack(&pack(None, &newer).unwrap(), &whole).unwrap();
        prop_assert_eq!(tree(&whole), tree(&newer));
        let added = changes(None, &newer).unwrap();
        prop_assert_eq!(added.len() + 1, tree(&newer).len());
        prop_assert!(added.iter().all(|change| change.kind == ChangeKind::Added));
    }
}

#[test]
fn a_replay_from_changed_files_fails_and_names_the_file() {
    let folder = tempdir().unwrap();
    let root = folder.path().join("root");
    let recording = folder.path().join("recording");
    let archive = Tar::new().file("d/x", b"content").file("d/y", b"other").end();
    for change in ["contenT", "conten", "content!", ""] {
        fs::create_dir_all(&root).unwrap();
        slackwater_archive::unpack(&archive[..], &root, Some(&recording)).unwrap();
        fs::write(root.join("d/x"), change).unwrap();
        let error = replay(&recording, &root, &mut Vec::new()).unwrap_err();
        assert!(
            matches!(&error, ArchiveError::ContentDiffers { path, .. } if path == Path::new("d/x"))
        );
    }
    for replace in
        [|path: &Path| symlink("y", path).unwrap(), |path: &Path| fs::create_dir(path).unwrap()]
    {
        remove(&root.join("d/x"));
        replace(&root.join("d/x"));
        let error = replay(&recording, &root, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("d/x"), "{error}");
    }
}

#[test]
fn a_damaged_recording_is_refused() {
    let folder = tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir(&root).unwrap();
    let path = folder.path().join("recording");
    let archive = Tar::new().file("x", b"kept").file("x", b"content").end();
    slackwater_archive::unpack(&archive[..], &root, Some(&path)).unwrap();
    let recording = fs::read(&path).unwrap();
    let replay_of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let mut out = Vec::new();
        replay(&path, &root, &mut out).map(|()| out)
    };
    assert_eq!(replay_of(&recording).unwrap(), archive);
    for length in 0..recording.len() {
        assert!(replay_of(&recording[..length]).is_err(), "cut off at {length}");
    }
    assert!(replay_of(&[&recording[..], b"x"].concat()).is_err(), "something follows");
    for at in 0..recording.len() {
        let mut damaged = recording.clone();
        damaged[at] ^= 0x41;
        // Damage in bytes that say nothing may go unnoticed; other bytes must not come out.
        assert!(replay_of(&damaged).map_or(true, |out| out == archive), "byte {at}");
    }
}

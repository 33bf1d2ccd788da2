//! What a layer means: each kind of member, whiteouts, and the words of `docker diff`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Mode, Timespec, Timestamps};
use slackwater_archive::{ArchiveError, ChangeKind, Unpacked, changes, replay};
use support::{TIME, Tar, pack, paths, tree, unpack, xattrs};
use tempfile::tempdir;

#[test]
fn every_kind_of_member_is_made_with_its_attributes() {
    let folder = tempdir().unwrap();
    let root = folder.path();
    let with = |kind: u8, name: &str, mode: u32| {
        let mut header = Tar::header(kind, name, "", 0);
        header.set_mode(mode);
        header.set_uid(1234);
        header.set_gid(4321);
        header.set_device_major(10).unwrap();
        header.set_device_minor(229).unwrap();
        header
    };
    let archive = Tar::new()
        .with(with(b'5', "./", 0o1755), b"")
        .with(with(b'5', "d/", 0o500), b"")
        .with(with(b'0', "d/suid", 0o104_755), b"")
        .with(with(b'3', "character", 0o600), b"")
        .with(with(b'4', "block", 0o660), b"")
        .with(with(b'6', "fifo", 0o622), b"")
        .with(with(b'0', "hard", 0o000), b"")
        .link("link", "hard")
        .symlink("soft", "/else/where");
    let unpacked = unpack(&archive.end(), root).unwrap();
    assert_eq!(unpacked, Unpacked { size_bytes: 0, entries: 9 });
    let tree = tree(root);
    let expected = [
        ("", 0o041_755),
        ("block", 0o060_660),
        ("character", 0o020_600),
        ("d", 0o040_500),
        ("d/suid", 0o104_755),
        ("fifo", 0o010_622),
        ("hard", 0o100_000),
        ("link", 0o100_000),
        ("soft", 0o120_777),
    ];
    let modes: Vec<_> =
        tree.iter().map(|(path, node)| (path.to_str().unwrap(), node.mode)).collect();
    assert_eq!(modes, expected);
    for (path, node) in tree.iter().filter(|(path, _)| *path != Path::new("soft")) {
        assert_eq!(node.owner, (1234, 4321), "{}", path.display());
    }
    let device = |path: &str| tree[Path::new(path)].device;
    assert_eq!([device("character"), device("block")], [rustix::fs::makedev(10, 229); 2]);
    assert_eq!(tree[Path::new("link")].first, Path::new("hard"));
    for path in ["", "d", "d/suid", "soft"] {
        assert_eq!(root.join(path).symlink_metadata().unwrap().mtime(), TIME, "{path}");
    }
}

#[test]
fn extended_records_win_over_the_header() {
    let folder = tempdir().unwrap();
    let root = folder.path();
    let name = "n".repeat(200);
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let records: [(&str, &[u8]); 9] = [
        ("path", name.as_bytes()),
        ("size", b"7"),
        ("uid", b"4000000000"),
        ("gid", b"3000000"),
        ("mtime", b"-1.5"),
        ("SCHILY.xattr.user.lines", b"a=b\n7 c=d\n\0"),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.security.capability", capability),
        ("comment", b"for nobody"),
    ];
    let mut header = Tar::header(b'0', "short", "", 0);
    header.set_mode(0o755);
    let archive = Tar::new().member(b'g', "global", "", b"18 path=everything\n").pax(&records);
    let mut archive = archive.with(header, b"").raw(b"content").raw(&[0; 505]);
    let target = "t".repeat(300);
    archive = archive.member(b'K', "././@LongLink", "", target.as_bytes()).symlink("soft", "short");
    let unpacked = unpack(&archive.end(), root).unwrap();
    assert_eq!(unpacked, Unpacked { size_bytes: 7, entries: 2 });
    let path = root.join(&name);
    let metadata = path.metadata().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"content");
    assert_eq!((metadata.uid(), metadata.gid()), (4_000_000_000, 3_000_000));
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (-2, 500_000_000));
    let xattrs = xattrs(&path);
    assert_eq!(xattrs.len(), 3);
    assert_eq!(xattrs[&b"user.lines"[..]], b"a=b\n7 c=d\n\0");
    assert_eq!(xattrs[&b"security.capability"[..]], capability);
    assert_eq!(fs::read_link(root.join("soft")).unwrap(), Path::new(&target));
}

#[test]
fn a_member_replaces_what_is_there_and_a_directory_keeps_its_children() {
    let folder = tempdir().unwrap();
    let root = folder.path();
    let lower = Tar::new()
        .file("file", b"1")
        .file("directory/child", b"1")
        .file("kept/child", b"1")
        .symlink("soft", "directory")
        .file("hard", b"1")
        .link("hard2", "hard")
        .pax(&[("SCHILY.xattr.user.old", b"1")])
        .directory("kept/");
    unpack(&lower.end(), root).unwrap();
    let mut kept = Tar::header(b'5', "kept/", "", 0);
    kept.set_mode(0o555);
    let upper = Tar::new()
        .directory("file/")
        .file("file/child", b"2")
        .file("directory", b"2")
        .with(kept, b"")
        .file("kept/other", b"2")
        .directory("soft/")
        .file("hard", b"2");
    unpack(&upper.end(), root).unwrap();
    let expected = "directory file/ file/child hard hard2 kept/ kept/child kept/other soft/";
    assert_eq!(paths(root), expected);
    assert_eq!(fs::read(root.join("hard2")).unwrap(), b"1", "written through a hard link");
    let kept = root.join("kept");
    assert_eq!(kept.metadata().unwrap().mode() & 0o7777, 0o555);
    assert_eq!(kept.metadata().unwrap().mtime(), TIME, "changed after its time was set");
    assert!(xattrs(&kept).is_empty());
}

/// The lower tree of the tests of whiteouts.
fn lower(root: &Path) {
    let archive = Tar::new().file("d/one", b"1").file("d/two", b"1").file("d/e/three", b"1");
    unpack(&archive.file("top", b"1").end(), root).unwrap();
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let cases: [(Tar, &str); 11] = [
        (Tar::new().file(".wh.top", b""), "d/ d/e/ d/e/three d/one d/two"),
        (Tar::new().file("d/.wh.one", b"").file(".wh.nothing", b""), "d/ d/e/ d/e/three d/two top"),
        (Tar::new().file(".wh.d", b""), "top"),
        (Tar::new().file("d/.wh..wh..opq", b""), "d/ top"),
        (Tar::new().file("d/.wh..wh..opq", b"").file("d/new", b""), "d/ d/new top"),
        (
            Tar::new().file("d/new", b"").file("d/one", b"").file("d/.wh..wh..opq", b""),
            "d/ d/new d/one top",
        ),
        (Tar::new().file("d/e/new", b"").file("d/.wh..wh..opq", b""), "d/ d/e/ d/e/new top"),
        (
            Tar::new()
                .file(".wh..wh..opq", b"")
                .file(".wh..wh.plnk/1.2", b"x")
                .file(".wh..wh.aufs", b""),
            "",
        ),
        (Tar::new().file("d/one", b"2").file("d/.wh.one", b"").file(".wh.d", b""), "d/ d/one top"),
        // A file that is moved, as an engine may tell it: the new name is its own, the old is not.
        (
            Tar::new().link("d/e/moved", "top").file(".wh.top", b"").file(".wh.d", b""),
            "d/ d/e/ d/e/moved",
        ),
        (Tar::new().link("new", "d/one").file("d/.wh..wh..opq", b""), "d/ new top"),
    ];
    for (index, (archive, expected)) in cases.into_iter().enumerate() {
        let folder = tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        lower(&root);
        let archive = archive.end();
        let recording = folder.path().join("recording");
        slackwater_archive::unpack(&archive[..], &root, Some(&recording)).unwrap();
        assert_eq!(paths(&root), expected, "case {index}");
        let mut replayed = Vec::new();
        replay(&recording, &root, &mut replayed).unwrap();
        assert!(replayed == archive, "{index} replays differently");
    }
}

#[test]
fn a_sparse_file_of_gnu_tar_is_unpacked_and_replayed() {
    let folder = tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir(&root).unwrap();
    let parts: Vec<(u64, Vec<u8>)> =
        (0..30u8).map(|index| (u64::from(index) * 65_536, vec![index + 1; 600])).collect();
    let real_size = 10 << 20;
    let content: Vec<u8> = parts.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
    let entry = |(offset, bytes): &(u64, Vec<u8>)| format!("{offset:011o}\0{:011o}\0", bytes.len());
    let entries: Vec<String> = parts.iter().map(entry).collect();
    let mut header = Tar::header(b'S', "sparse", "", content.len() as u64);
    let block = header.as_mut_bytes();
    block[386..482].copy_from_slice(entries[..4].concat().as_bytes());
    block[482] = 1;
    block[483..494].copy_from_slice(format!("{real_size:011o}").as_bytes());
    header.set_cksum();
    let mut archive = Tar::new().raw(header.as_bytes());
    for (index, more) in entries[4..].chunks(21).enumerate() {
        let mut block = [0; 512];
        block[..more.len() * 24].copy_from_slice(more.concat().as_bytes());
        block[504] = u8::from(index == 0);
        archive = archive.raw(&block);
    }
    let padding = vec![0; content.len().next_multiple_of(512) - content.len()];
    let archive = archive.raw(&content).raw(&padding).end();
    let recording = folder.path().join("recording");
    let unpacked = slackwater_archive::unpack(&archive[..], &root, Some(&recording)).unwrap();
    assert_eq!(unpacked.size_bytes, real_size);
    let file = fs::File::open(root.join("sparse")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), real_size);
    assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20, "it is not sparse");
    for (offset, bytes) in &parts {
        let mut read = vec![0; 601];
        file.read_exact_at(&mut read, *offset).unwrap();
        assert_eq!(read, [&bytes[..], &[0]].concat());
    }
    let mut replayed = Vec::new();
    replay(&recording, &root, &mut replayed).unwrap();
    assert!(replayed == archive);
    // A map that does not fit the content.
    let mut wrong = archive;
    wrong[386..397].copy_from_slice(b"00077777777");
    wrong[148..156].fill(b' ');
    let sum: u32 = wrong[..512].iter().map(|byte| u32::from(*byte)).sum();
    wrong[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let error = unpack(&wrong, &root).unwrap_err().to_string();
    assert!(error.contains("sparse"), "{error}");
}

/// Sets the time of a file that is no directory, so that it is not by chance another one's.
fn age(path: &Path) {
    let time = Timespec { tv_sec: 1, tv_nsec: 1 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Changes each of the things that `docker diff` tells apart.
fn edit(older: &Path, newer: &Path) {
    rustix::fs::chmod(newer, Mode::from_raw_mode(0o700)).unwrap();
    fs::write(newer.join("etc/changed"), "2").unwrap();
    fs::write(newer.join("etc/new"), "2").unwrap();
    fs::create_dir_all(newer.join("fresh/inner")).unwrap();
    fs::remove_file(newer.join("etc/deep/er/removed")).unwrap();
    fs::remove_dir_all(newer.join("gone")).unwrap();
    fs::remove_dir_all(newer.join("type")).unwrap();
    fs::write(newer.join("type"), "").unwrap();
    fs::write(newer.join("a/b"), "2").unwrap();
    fs::remove_file(newer.join("soft")).unwrap();
    symlink("two", newer.join("soft")).unwrap();
    age(&older.join("soft"));
    age(&newer.join("soft"));
    fs::remove_file(newer.join("linked/2")).unwrap();
    fs::hard_link(newer.join("linked/1"), newer.join("linked/2")).unwrap();
    // Only the time of the directory changes.
    fs::write(newer.join("untouched/x"), "").unwrap();
    fs::remove_file(newer.join("untouched/x")).unwrap();
}

#[test]
fn changes_are_those_of_docker_diff() {
    let folder = tempdir().unwrap();
    let [older, newer] = ["older", "newer"].map(|name| folder.path().join(name));
    fs::create_dir(&older).unwrap();
    let archive = Tar::new()
        .file("etc/changed", b"1")
        .file("etc/deep/er/removed", b"1")
        .file("etc/same", b"1")
        .file("gone/child", b"1")
        .file("type/child", b"1")
        .file("a-b", b"1")
        .file("a/b", b"1")
        .symlink("soft", "one")
        .file("linked/1", b"1")
        .file("linked/2", b"1")
        .directory("untouched/");
    unpack(&archive.end(), &older).unwrap();
    support::copy(&older, &newer);
    edit(&older, &newer);
    let shown: Vec<_> = changes(Some(&older), &newer)
        .unwrap()
        .into_iter()
        .map(|change| {
            let letter = match change.kind {
                ChangeKind::Modified => 'C',
                ChangeKind::Added => 'A',
                ChangeKind::Deleted => 'D',
            };
            format!("{letter} {}", change.path.display())
        })
        .collect();
    let expected = [
        "C /a",
        "C /a/b",
        "C /etc",
        "C /etc/changed",
        "C /etc/deep",
        "C /etc/deep/er",
        "D /etc/deep/er/removed",
        "A /etc/new",
        "A /fresh",
        "A /fresh/inner",
        "D /gone",
        "C /linked",
        "C /linked/1",
        "C /linked/2",
        "C /soft",
        "C /type",
    ];
    assert_eq!(shown, expected);
    let made = folder.path().join("made");
    support::copy(&older, &made);
    unpack(&pack(Some(&older), &newer).unwrap(), &made).unwrap();
    assert_eq!(tree(&made), tree(&newer));
    assert_eq!(
        [ChangeKind::Modified as u8, ChangeKind::Added as u8, ChangeKind::Deleted as u8],
        [0, 1, 2]
    );
}

#[test]
fn a_packed_layer_is_read_by_others() {
    let folder = tempdir().unwrap();
    let [older, newer] = ["older", "newer"].map(|name| folder.path().join(name));
    fs::create_dir(&older).unwrap();
    unpack(&Tar::new().file("d/gone", b"1").file("same", b"1").end(), &older).unwrap();
    support::copy(&older, &newer);
    let long = "n".repeat(150);
    fs::remove_file(newer.join("d/gone")).unwrap();
    fs::write(newer.join("d").join(&long), "content").unwrap();
    fs::hard_link(newer.join("d").join(&long), newer.join("e")).unwrap();
    let mut archive = Vec::new();
    let packed =
        slackwater_archive::pack(Some(&older), &newer, &mut archive, None, usize::MAX).unwrap();
    assert_eq!((packed.size_bytes, packed.entries), (7, 4));
    let mut reader = tar::Archive::new(&archive[..]);
    let members: Vec<_> = reader
        .entries()
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let path = entry.path().unwrap().into_owned();
            let link = entry.link_name().unwrap().map(|link| link.into_owned());
            (path.to_str().unwrap().to_owned(), link, entry.size())
        })
        .collect();
    let long = format!("d/{long}");
    let expected = [
        ("d/".to_owned(), None, 0),
        ("d/.wh.gone".to_owned(), None, 0),
        (long.clone(), None, 7),
        ("e".to_owned(), Some(long.into()), 0),
    ];
    assert_eq!(members, expected);
}

#[test]
fn what_was_changed_is_packed_also_where_size_and_time_are_as_before() {
    let folder = tempdir().unwrap();
    let [older, newer] = ["older", "newer"].map(|name| folder.path().join(name));
    fs::create_dir(&older).unwrap();
    let archive = Tar::new().file("changed", b"one").file("touched", b"two").file("d/x", b"3");
    unpack(&archive.end(), &older).unwrap();
    support::copy(&older, &newer);
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let set = |path: &Path| fs::File::open(path).unwrap().set_modified(past).unwrap();
    fs::write(newer.join("changed"), "ONE").unwrap();
    for name in ["changed", "touched"] {
        for root in [&older, &newer] {
            set(&root.join(name));
        }
    }
    set(&older.join("d"));
    assert_eq!(changes(Some(&older), &newer).unwrap(), vec![]);
    unpack(&pack(Some(&older), &newer).unwrap(), &older).unwrap();
    assert_eq!(fs::read(older.join("changed")).unwrap(), b"ONE");
    let modified = |root: &Path| fs::metadata(root.join("d")).unwrap().modified().unwrap();
    assert_eq!(modified(&older), modified(&newer));
    let packed = pack(Some(&older), &newer).unwrap();
    assert_eq!(packed, [0; 1024], "nothing differs");
}

#[test]
fn sockets_are_left_out_and_reserved_names_refused() {
    let folder = tempdir().unwrap();
    let [older, newer] = ["older", "newer"].map(|name| folder.path().join(name));
    fs::create_dir(&older).unwrap();
    fs::write(older.join("replaced"), "1").unwrap();
    fs::create_dir(&newer).unwrap();
    let _sockets = ["replaced", "new"].map(|name| UnixListener::bind(newer.join(name)).unwrap());
    unpack(&pack(Some(&older), &newer).unwrap(), &older).unwrap();
    assert_eq!(paths(&older), "");
    fs::write(newer.join(".wh.x"), "").unwrap();
    let error = pack(Some(&older), &newer).unwrap_err();
    assert!(matches!(&error, ArchiveError::Unpackable { path, .. } if path == Path::new(".wh.x")));
}

#[test]
fn the_disk_being_full_or_away_is_said_with_the_path() {
    let archive = Tar::new().file("x", b"content").end();
    let error = unpack(&archive, Path::new("/nowhere/at/all")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/at/all") && error.contains("No such file"), "{error}");
    let folder = tempdir().unwrap();
    let recording = folder.path().join("missing/recording");
    let error = slackwater_archive::unpack(&archive[..], folder.path(), Some(&recording));
    assert!(error.unwrap_err().to_string().contains("missing/recording"));
    // A device that is always full, as the way out.
    let mut full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    fs::write(folder.path().join("x"), "content").unwrap();
    let error =
        slackwater_archive::pack(None, folder.path(), &mut full, None, usize::MAX).unwrap_err();
    assert!(matches!(&error, ArchiveError::Write { .. }), "{error}");
}

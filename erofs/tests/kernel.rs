//! What the kernel shows of an image is what was put in, and `fsck.erofs` finds no fault.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod support;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use proptest::prelude::*;
use rustix::fs::SeekFrom;
use slackwater_erofs::{Attributes, BLOCK_BYTES, Kind, Time, Xattrs};
use support::mount::Mount;
use support::{Builder, attributes, shown};

/// Bytes that differ from block to block.
fn bytes(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at / 7 + at / 4096 + seed) % 251).unwrap()).collect()
}

#[test]
fn as_root_an_empty_image_has_its_root() {
    let mounted = Builder::new().mount();
    assert_eq!((mounted.written.inodes, mounted.written.size_bytes), (1, 2 * 4096));
    mounted.assert_as_expected();
}

#[test]
fn as_root_every_kind_of_inode_comes_back_with_all_that_it_has() {
    let mut builder = Builder::new();
    let all = Attributes {
        mode: 0o7751,
        uid: 4_000_000_000,
        gid: 3_000_000,
        modified: Time { seconds: -2, nanoseconds: 999_999_999 },
        xattrs: Xattrs::new(),
    };
    let later = Time { seconds: 1 << 33, nanoseconds: 1 };
    builder.add("directory", all.clone(), Kind::Directory);
    builder.add("directory/deeper", attributes(0o1777), Kind::Directory);
    builder.file("directory/deeper/file", all.clone(), b"content");
    builder.file("empty", Attributes { modified: later, ..attributes(0) }, b"");
    let mut device = |name: &str, major, minor| {
        builder.add(&format!("c{name}"), all.clone(), Kind::CharacterDevice { major, minor });
        builder.add(&format!("b{name}"), all.clone(), Kind::BlockDevice { major, minor });
    };
    device("0", 0, 0);
    device("small", 10, 229);
    device("large", 4095, 1_048_575);
    builder.add("fifo", all.clone(), Kind::Fifo);
    builder.add("socket", all.clone(), Kind::Socket);
    for length in [1, 59, 60, 2048, 2049, 4095] {
        let target = "t".repeat(length).into_bytes().into_boxed_slice();
        builder.add(&format!("symlink{length}"), attributes(0o777), Kind::Symlink(target));
    }
    builder.link("hard", "directory/deeper/file");
    builder.link("directory/hard", "directory/deeper/file");
    builder.link("directory/fifo", "fifo");
    builder.mount().assert_as_expected();
}

#[test]
fn as_root_files_of_all_sizes_around_a_block_have_their_bytes() {
    let mut builder = Builder::new();
    let mut sizes = vec![1, 5 << 20, (1 << 20) - 1, (1 << 20) + 1];
    sizes.extend([1, 2, 15, 16, 17].iter().flat_map(|blocks| {
        let at = blocks * BLOCK_BYTES;
        [at - 1, at, at + 1]
    }));
    sizes.dedup();
    for (seed, size) in sizes.into_iter().enumerate() {
        builder.file(&format!("file{seed}"), attributes(0o600), &bytes(size, seed));
    }
    builder.file("zeros", attributes(0o600), &vec![0; 3 << 20]);
    builder.file("last", attributes(0o600), b"last");
    builder.mount().assert_as_expected();
}

#[test]
fn as_root_attributes_of_all_sizes_come_back() {
    let mut builder = Builder::new();
    let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    let mut xattrs = Xattrs::from([
        (b"user.a".to_vec(), b"".to_vec()),
        (b"trusted.overlay.opaque".to_vec(), b"y".to_vec()),
        (
            b"security.capability".to_vec(),
            b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec(),
        ),
        (b"system.posix_acl_access".to_vec(), acl.to_vec()),
        (format!("user.{}", "n".repeat(250)).into_bytes(), bytes(1000, 1)),
    ]);
    let with = |xattrs: &Xattrs| Attributes { xattrs: xattrs.clone(), ..attributes(0o644) };
    builder.add("directory", with(&xattrs), Kind::Directory);
    builder.file("file", with(&xattrs), b"content");
    xattrs.retain(|name, _| !name.starts_with(b"user.") && !name.starts_with(b"system."));
    builder.add("symlink", with(&xattrs), Kind::Symlink(b"file"[..].into()));
    builder.add("fifo", with(&xattrs), Kind::Fifo);
    for length in [1, 4000, 4095, 4096, 4097, 30_000, 65_535] {
        let large = Xattrs::from([(b"user.large".to_vec(), bytes(length, 2))]);
        builder.file(&format!("large{length}"), with(&large), b"content");
        builder.add(&format!("directory{length}"), with(&large), Kind::Directory);
        builder.file(&format!("directory{length}/in"), attributes(0o644), b"");
    }
    builder.mount().assert_as_expected();
}

#[test]
fn as_root_directories_of_all_sizes_find_each_name() {
    let mut builder = Builder::new();
    for (count, length) in
        [(1, 1), (20, 100), (60, 100), (15, 255), (16, 244), (700, 20), (5000, 9)]
    {
        let directory = format!("d{count}");
        builder.add(&directory, attributes(0o755), Kind::Directory);
        for number in 0..count {
            // Before, between and behind `.` and `..`.
            let first = ["!", "-", ".a", "...", "0", "~", "\u{e9}"][number % 7];
            let name = format!("{first}{number:0width$}", width = length.max(5) - first.len());
            let name: String = name.chars().take(length.max(5)).collect();
            builder.add(&format!("{directory}/{name}"), attributes(0o600), Kind::Fifo);
        }
    }
    let mounted = builder.mount();
    mounted.assert_as_expected();
    for missing in ["d700/!", "d5000/zzz", "d20/-", "d1/."] {
        let exists = mounted.root().join(missing).symlink_metadata().is_ok();
        assert_eq!(exists, missing.ends_with("/."), "{missing}");
    }
}

#[test]
fn as_root_a_sparse_file_keeps_its_holes() {
    let mut builder = Builder::new();
    let mut content = vec![0; 10 * BLOCK_BYTES + 100];
    let parts = [(5000, 10), (5010, 0), (5010, 3000), (30_000, 2), (40_900, 160)];
    for (offset, length) in parts {
        content[offset..offset + length].copy_from_slice(&bytes(length, offset));
    }
    let parts = parts.map(|(offset, length)| (offset as u64, length as u64));
    builder.sparse("sparse", &content, &parts);
    builder.sparse("none", &vec![0; 9000], &[]);
    builder.sparse("empty", b"", &[]);
    builder.sparse("full", &bytes(5000, 9), &[(0, 5000)]);
    builder.file("behind", attributes(0o644), b"behind");
    let mounted = builder.mount();
    mounted.assert_as_expected();
    let file = std::fs::File::open(mounted.root().join("sparse")).unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
        at = rustix::fs::seek(&file, SeekFrom::Hole(data)).unwrap();
        found.push((data / 4096, at.div_ceil(4096)));
    }
    let expected = [(1, 2), (7, 8), (9, 11)];
    // Before 6.13 the kernel told of no hole.
    assert!(
        found == expected || (found == [(0, 11)] && support::mount::kernel() < (6, 13)),
        "{found:?}"
    );
}

#[test]
fn as_root_the_largest_sparse_file_takes_no_more_than_its_parts() {
    let mut builder = Builder::new();
    let size: u64 = (16 << 40) - 4096;
    let mut file = builder.writer.begin_sparse_file(size, &[(7, 3), (size - 3, 3)]).unwrap();
    file.write(b"abcxyz").unwrap();
    let kind = Kind::File(file.finish().unwrap());
    builder.tree.add(builder.tree.root(), b"large", attributes(0o644), kind).unwrap();
    let folder = builder.folder;
    builder.writer.finish(&builder.tree, support::UUID).unwrap();
    let image = folder.path().join("image");
    // The map takes 4 MiB.
    assert!(image.metadata().unwrap().blocks() * 512 < 5 << 20);
    let mounted = support::Mounted::of(folder);
    let large = std::fs::File::open(mounted.root().join("large")).unwrap();
    assert_eq!(large.metadata().unwrap().len(), size);
    let mut end = [0; 6];
    large.read_exact_at(&mut end, size - 6).unwrap();
    assert_eq!(&end, b"\0\0\0xyz");
    large.read_exact_at(&mut end, 5).unwrap();
    assert_eq!(&end, b"\0\0abc\0");
}

#[test]
fn as_root_what_was_removed_is_not_there() {
    let mut builder = Builder::new();
    builder.file("kept", attributes(0o644), b"kept");
    let root = builder.tree.root();
    let directory = builder.tree.add(root, b"gone", attributes(0o755), Kind::Directory).unwrap();
    builder.tree.add(directory, b"in", attributes(0o755), Kind::Directory).unwrap();
    let kept = builder.tree.child(root, b"kept").unwrap();
    builder.tree.link(directory, b"other", kept).unwrap();
    assert_eq!(builder.tree.remove(root, b"gone"), Some(directory));
    assert_eq!(builder.tree.remove(root, b"gone"), None);
    // A content that was begun and not ended leaves no trace either.
    builder.writer.begin_file(100).unwrap().write(b"half").unwrap();
    builder.file("behind", attributes(0o644), b"behind");
    let mounted = builder.mount();
    assert_eq!(mounted.written.inodes, 3);
    mounted.assert_as_expected();
}

/// An entry of a random tree; the numbers choose among what is there.
#[derive(Debug, Clone)]
struct Step {
    parent: usize,
    name: String,
    what: u8,
    size: usize,
    xattrs: Xattrs,
    mode: u16,
}

fn step() -> impl Strategy<Value = Step> {
    let xattrs = prop::collection::btree_map(
        "(user|trusted|security)\\.[a-z]{1,9}".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..200),
        0..4,
    );
    let size = prop_oneof![0_usize..9000, 0_usize..60, Just(4096), 60_000_usize..200_000];
    (any::<usize>(), "[ -.0-~]{1,40}", 0_u8..12, size, xattrs, 0_u16..0o10000).prop_map(
        |(parent, name, what, size, xattrs, mode)| Step { parent, name, what, size, xattrs, mode },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn as_root_random_trees_come_back(steps in prop::collection::vec(step(), 1..120)) {
        let mut builder = Builder::new();
        let mut directories = vec![String::new()];
        let mut files = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            let parent = &directories[step.parent % directories.len()];
            let path = if parent.is_empty() { step.name.clone() } else { format!("{parent}/{}", step.name) };
            if [".", ".."].contains(&&*step.name) || builder.expected.contains_key(&PathBuf::from(&path)) {
                continue;
            }
            let modified = Time { seconds: 1_600_000_000, nanoseconds: u32::try_from(number).unwrap() };
            let with = Attributes { mode: step.mode, modified, xattrs: step.xattrs.clone(), ..Attributes::default() };
            match step.what {
                0..4 => {
                    builder.add(&path, with, Kind::Directory);
                    directories.push(path);
                }
                4..8 => {
                    builder.file(&path, with, &bytes(step.size, number));
                    files.push(path);
                }
                8 if !files.is_empty() => builder.link(&path, &files[step.parent % files.len()]),
                9 => {
                    let mut content = vec![0; step.size];
                    let parts = sparse_parts(step, &mut content);
                    builder.sparse(&path, &content, &parts);
                }
                _ => {
                    let target = "t".repeat(step.size % 4095 + 1).into_bytes().into_boxed_slice();
                    let mut with = with;
                    with.xattrs.retain(|name, _| !name.starts_with(b"user."));
                    builder.add(&path, with, Kind::Symlink(target));
                }
            }
        }
        builder.mount().assert_as_expected();
    }
}

/// Some parts of a file, with bytes in them.
fn sparse_parts(step: &Step, content: &mut [u8]) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    let mut at = step.parent % 5000;
    while at < content.len() {
        let length = (step.parent % 3000 + 1).min(content.len() - at);
        content[at..at + length].copy_from_slice(&bytes(length, at));
        parts.push((at as u64, length as u64));
        at += length + step.parent % 9000;
    }
    parts
}

#[test]
fn as_root_layers_below_an_overlay_hide_and_merge() {
    let mut lower = Builder::new();
    for directory in ["merged", "opaque", "gone"] {
        lower.add(directory, attributes(0o755), Kind::Directory);
        lower.file(&format!("{directory}/lower"), attributes(0o644), b"lower");
    }
    lower.file("file", attributes(0o644), b"lower");
    let lower = lower.mount();
    let mut upper = Builder::new();
    let opaque = Xattrs::from([(b"trusted.overlay.opaque".to_vec(), b"y".to_vec())]);
    upper.add("merged", attributes(0o700), Kind::Directory);
    upper.file("merged/upper", attributes(0o644), b"upper");
    upper.add("opaque", Attributes { xattrs: opaque, ..attributes(0o711) }, Kind::Directory);
    upper.file("opaque/upper", attributes(0o644), b"upper");
    for whiteout in ["gone", "file"] {
        upper.add(whiteout, attributes(0), Kind::CharacterDevice { major: 0, minor: 0 });
    }
    let upper = upper.mount();
    let folder = tempfile::tempdir().unwrap();
    let overlay = Mount::overlay(&[&upper.root(), &lower.root()], folder.path());
    let merged = shown(overlay.root());
    let paths: Vec<_> = merged.keys().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(paths, ["", "merged", "merged/lower", "merged/upper", "opaque", "opaque/upper"]);
    assert_eq!(merged[&PathBuf::from("merged")].mode & 0o7777, 0o700);
}

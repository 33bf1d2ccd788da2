//! Archives of members that are chosen at random and can be made wherever they stand.

use std::path::Path;

use proptest::prelude::*;

use super::Tar;

pub(crate) const DIRECTORIES: [&str; 4] = ["a", "b", "a/c", "b/c/d"];
pub(crate) const LEAVES: [&str; 3] = ["x", "y", "z"];

/// A member that can be made wherever it stands.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Directory(usize),
    /// `a` becomes a link to `b`.
    DirectoryLink,
    File {
        directory: usize,
        leaf: usize,
        content: Vec<u8>,
    },
    /// A file, and a hard link to it of another name.
    Linked {
        directory: usize,
        to: usize,
        leaf: usize,
    },
    Symlink {
        directory: usize,
        leaf: usize,
    },
    LeafDirectory {
        directory: usize,
        leaf: usize,
    },
    Whiteout {
        directory: usize,
        leaf: usize,
    },
    DirectoryWhiteout(usize),
    Opaque(usize),
    Long,
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let directory = 0..DIRECTORIES.len();
    let leaf = 0..LEAVES.len();
    let place = (directory.clone(), leaf);
    let content = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        (any::<u8>(), 500..600usize).prop_map(|(byte, length)| vec![byte; length]),
        (any::<u8>(), 300_000..300_600usize).prop_map(|(byte, length)| vec![byte; length]),
    ];
    prop_oneof![
        2 => directory.clone().prop_map(Op::Directory),
        1 => Just(Op::DirectoryLink),
        8 => (place.clone(), content)
            .prop_map(|((directory, leaf), content)| Op::File { directory, leaf, content }),
        2 => (place.clone(), directory.clone())
            .prop_map(|((directory, leaf), to)| Op::Linked { directory, to, leaf }),
        1 => place.clone().prop_map(|(directory, leaf)| Op::Symlink { directory, leaf }),
        1 => place.clone().prop_map(|(directory, leaf)| Op::LeafDirectory { directory, leaf }),
        1 => place.prop_map(|(directory, leaf)| Op::Whiteout { directory, leaf }),
        1 => directory.clone().prop_map(Op::DirectoryWhiteout),
        1 => directory.prop_map(Op::Opaque),
        1 => Just(Op::Long),
    ]
}

fn path(directory: usize, leaf: usize) -> String {
    format!("{}/{}", DIRECTORIES[directory], LEAVES[leaf])
}

pub(crate) fn append(tar: Tar, op: &Op) -> Tar {
    match op {
        Op::Directory(directory) => tar.directory(&format!("{}/", DIRECTORIES[*directory])),
        Op::DirectoryLink => tar.symlink("a", "b"),
        Op::File { directory, leaf, content } => tar.file(&path(*directory, *leaf), content),
        Op::Linked { directory, to, leaf } => {
            let target = path(*directory, *leaf);
            let link = path(*to, (leaf + 1) % LEAVES.len());
            tar.file(&target, target.as_bytes()).link(&link, &target)
        }
        Op::Symlink { directory, leaf } => tar.symlink(&path(*directory, *leaf), "/a/x"),
        Op::LeafDirectory { directory, leaf } => tar.directory(&path(*directory, *leaf)),
        Op::Whiteout { directory, leaf } => {
            tar.file(&format!("{}/.wh.{}", DIRECTORIES[*directory], LEAVES[*leaf]), b"")
        }
        Op::DirectoryWhiteout(directory) => {
            let path = Path::new(DIRECTORIES[*directory]);
            let name = format!(".wh.{}", path.file_name().unwrap().to_str().unwrap());
            // With a content, which belongs to nothing.
            tar.file(path.with_file_name(name).to_str().unwrap(), b"note")
        }
        Op::Opaque(directory) => {
            tar.file(&format!("{}/.wh..wh..opq", DIRECTORIES[*directory]), b"")
        }
        Op::Long => {
            let name = format!("{}/{}/x", "l".repeat(150), "m".repeat(150));
            let tar = tar.member(b'L', "././@LongLink", "", format!("{name}\0").as_bytes());
            tar.pax(&[("mtime", b"12.25")]).file("cut", b"long")
        }
    }
}

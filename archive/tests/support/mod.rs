//! What the tests share: archives made member by member, and trees written down for comparison.
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod ops;

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use slackwater_archive::{ArchiveError, Unpacked};
use tar::{EntryType, Header};

/// An archive under construction. Names are taken as they are, however hostile.
#[derive(Default, Clone)]
pub(crate) struct Tar(pub(crate) Vec<u8>);

/// The time of every member, where a test does not care.
pub(crate) const TIME: i64 = 1_600_000_000;

impl Tar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A header with these fields; the caller changes what it likes.
    pub(crate) fn header(kind: u8, name: &str, link: &str, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(TIME.unsigned_abs());
        header.set_size(size);
        header.set_device_major(0).unwrap();
        header.set_device_minor(0).unwrap();
        header.set_cksum();
        header
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A header, its checksum set, and its content.
    pub(crate) fn with(self, mut header: Header, content: &[u8]) -> Self {
        header.set_cksum();
        let mut tar = self.raw(header.as_bytes()).raw(content);
        tar.0.resize(tar.0.len().next_multiple_of(512), 0);
        tar
    }

    pub(crate) fn member(self, kind: u8, name: &str, link: &str, content: &[u8]) -> Self {
        self.with(Self::header(kind, name, link, content.len() as u64), content)
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        self.member(b'0', name, "", content)
    }

    pub(crate) fn directory(self, name: &str) -> Self {
        self.member(b'5', name, "", b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.member(b'2', name, target, b"")
    }

    pub(crate) fn link(self, name: &str, target: &str) -> Self {
        self.member(b'1', name, target, b"")
    }

    /// An extended header for the next member.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut content = Vec::new();
        for (key, value) in records {
            let fixed = key.len() + value.len() + 3;
            let mut length = fixed + 1;
            while length != fixed + length.to_string().len() {
                length = fixed + length.to_string().len();
            }
            content.extend_from_slice(format!("{length} {key}=").as_bytes());
            content.extend_from_slice(value);
            content.push(b'\n');
        }
        self.member(b'x', "pax", "", &content)
    }

    pub(crate) fn end(self) -> Vec<u8> {
        self.raw(&[0; 1024]).0
    }
}

/// Unpacks without a recording.
pub(crate) fn unpack(archive: &[u8], root: &Path) -> Result<Unpacked, ArchiveError> {
    slackwater_archive::unpack(archive, root, None)
}

/// Packs into memory.
pub(crate) fn pack(older: Option<&Path>, newer: &Path) -> Result<Vec<u8>, ArchiveError> {
    let mut archive = Vec::new();
    slackwater_archive::pack(older, newer, &mut archive, None, usize::MAX)?;
    Ok(archive)
}

/// A path of a tree, written down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) device: u64,
    /// Not of directories: they change with what is in them.
    pub(crate) modified: Option<(i64, i64)>,
    pub(crate) content: Vec<u8>,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The first path of the same file.
    pub(crate) first: PathBuf,
}

/// The extended attributes of what is at a path.
pub(crate) fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let read = |name: &[u8]| {
        let mut value = vec![0; 65_536];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        value.truncate(length);
        (name.to_vec(), value)
    };
    names.map(read).collect()
}

/// A whole tree, the root as the empty path.
pub(crate) fn tree(root: &Path) -> BTreeMap<PathBuf, Node> {
    let mut nodes = BTreeMap::new();
    let mut firsts = BTreeMap::new();
    let mut waiting = vec![PathBuf::new()];
    let mut paths = Vec::new();
    while let Some(path) = waiting.pop() {
        let here = if path.as_os_str().is_empty() { root.to_owned() } else { root.join(&path) };
        if here.symlink_metadata().unwrap().is_dir() {
            for entry in std::fs::read_dir(&here).unwrap() {
                waiting.push(path.join(entry.unwrap().file_name()));
            }
        }
        paths.push((path, here));
    }
    paths.sort();
    for (path, here) in paths {
        let metadata = here.symlink_metadata().unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_file() {
            std::fs::read(&here).unwrap()
        } else if kind.is_symlink() {
            std::fs::read_link(&here).unwrap().as_os_str().as_bytes().to_vec()
        } else {
            Vec::new()
        };
        let is_device = kind.is_char_device() || kind.is_block_device();
        let inode = (metadata.dev(), metadata.ino());
        let first = firsts.entry(inode).or_insert_with(|| path.clone()).clone();
        let node = Node {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            device: if is_device { metadata.rdev() } else { 0 },
            modified: (!kind.is_dir()).then(|| (metadata.mtime(), metadata.mtime_nsec())),
            content,
            xattrs: xattrs(&here),
            first,
        };
        nodes.insert(path, node);
    }
    nodes
}

/// The paths of a tree as one text, a directory with a slash.
pub(crate) fn paths(root: &Path) -> String {
    let tree = tree(root);
    let shown = tree.iter().filter(|(path, _)| !path.as_os_str().is_empty()).map(|(path, node)| {
        let slash = if node.mode & 0o170_000 == 0o040_000 { "/" } else { "" };
        format!("{}{slash}", path.display())
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// Copies a tree with everything that is compared.
pub(crate) fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(status.success(), "cp -a {} {}", from.display(), to.display());
}

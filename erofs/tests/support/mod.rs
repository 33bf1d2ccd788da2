//! What the tests share: an image of a tree, mounted, and what the kernel shows of it.
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod mount;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use slackwater_erofs::{
    Attributes, ErofsError, FileWriter, ImageWriter, Kind, Time, Tree, Written, Xattrs,
};
use tempfile::TempDir;

/// Enough for each tree of the tests.
pub(crate) const MEMORY: usize = 64 << 20;

pub(crate) const UUID: [u8; 16] = *b"slackwater image";

/// An image under construction, and what a kernel has to show of it.
pub(crate) struct Builder {
    pub(crate) folder: TempDir,
    pub(crate) writer: ImageWriter,
    pub(crate) tree: Tree,
    pub(crate) expected: BTreeMap<PathBuf, Shown>,
}

/// What a path is, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shown {
    /// With the type.
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) modified: (i64, i64),
    pub(crate) links: u64,
    pub(crate) device: u64,
    pub(crate) xattrs: Xattrs,
    /// Of a file, or the target of a link.
    pub(crate) content: Vec<u8>,
    /// The first path of the same inode.
    pub(crate) first: PathBuf,
}

pub(crate) fn attributes(mode: u16) -> Attributes {
    let modified = Time { seconds: 1_600_000_000, nanoseconds: 123_456_789 };
    Attributes { mode, modified, ..Attributes::default() }
}

impl Builder {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create_new(folder.path().join("image")).unwrap();
        let writer = ImageWriter::create(file).unwrap();
        let tree = Tree::new(attributes(0o755), MEMORY).unwrap();
        let mut builder = Self { folder, writer, tree, expected: BTreeMap::new() };
        builder.expect("", (0o040_000, 0), attributes(0o755), b"");
        builder
    }

    /// Notes what the kernel has to show; the content is a file's, or a link's target.
    fn expect(
        &mut self,
        path: &str,
        type_and_device: (u32, u64),
        with: Attributes,
        content: &[u8],
    ) {
        let (kind, device) = type_and_device;
        let Time { seconds, nanoseconds } = with.modified;
        let shown = Shown {
            mode: kind | u32::from(with.mode),
            owner: (with.uid, with.gid),
            modified: (seconds, i64::from(nanoseconds)),
            links: if kind == 0o040_000 { 2 } else { 1 },
            device,
            xattrs: with.xattrs,
            content: content.to_vec(),
            first: PathBuf::from(path),
        };
        assert_eq!(self.expected.insert(PathBuf::from(path), shown), None, "{path} twice");
    }

    fn parent(&self, path: &str) -> slackwater_erofs::InodeId {
        let parent = Path::new(path).parent().unwrap();
        parent.components().fold(self.tree.root(), |directory, name| {
            self.tree.child(directory, name.as_os_str().as_bytes()).unwrap()
        })
    }

    /// Adds what is neither a file nor a link.
    pub(crate) fn add(&mut self, path: &str, attributes: Attributes, kind: Kind) {
        let makedev = rustix::fs::makedev;
        let (type_and_device, content) = match &kind {
            Kind::Directory => ((0o040_000, 0), Vec::new()),
            Kind::Symlink(target) => ((0o120_000, 0), target.to_vec()),
            Kind::CharacterDevice { major, minor } => {
                ((0o020_000, makedev(*major, *minor)), Vec::new())
            }
            Kind::BlockDevice { major, minor } => {
                ((0o060_000, makedev(*major, *minor)), Vec::new())
            }
            Kind::Fifo => ((0o010_000, 0), Vec::new()),
            Kind::Socket => ((0o140_000, 0), Vec::new()),
            Kind::File(_) => panic!("files have contents"),
        };
        let parent = self.parent(path);
        if kind == Kind::Directory {
            let above = Path::new(path).parent().unwrap();
            self.expected.get_mut(above).unwrap().links += 1;
        }
        self.expect(path, type_and_device, attributes.clone(), &content);
        let name = Path::new(path).file_name().unwrap();
        self.tree.add(parent, name.as_bytes(), attributes, kind).unwrap();
    }

    pub(crate) fn file(&mut self, path: &str, attributes: Attributes, content: &[u8]) {
        let file = self.writer.begin_file(content.len() as u64).unwrap();
        let kind = fill(file, content).unwrap();
        self.add_file(path, attributes, content, kind);
    }

    /// A sparse file with these parts; what it holds outside of them is zeros.
    pub(crate) fn sparse(&mut self, path: &str, content: &[u8], parts: &[(u64, u64)]) {
        let mut bytes = Vec::new();
        for (offset, length) in parts {
            let from = usize::try_from(*offset).unwrap();
            bytes.extend_from_slice(&content[from..from + usize::try_from(*length).unwrap()]);
        }
        let file = self.writer.begin_sparse_file(content.len() as u64, parts).unwrap();
        let kind = fill(file, &bytes).unwrap();
        self.add_file(path, attributes(0o644), content, kind);
    }

    fn add_file(&mut self, path: &str, attributes: Attributes, content: &[u8], kind: Kind) {
        self.expect(path, (0o100_000, 0), attributes.clone(), content);
        let name = Path::new(path).file_name().unwrap().as_bytes();
        self.tree.add(self.parent(path), name, attributes, kind).unwrap();
    }

    /// One more name.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        let inode = self.parent(target);
        let target_name = Path::new(target).file_name().unwrap().as_bytes();
        let inode = self.tree.child(inode, target_name).unwrap();
        let name = Path::new(path).file_name().unwrap().as_bytes();
        self.tree.link(self.parent(path), name, inode).unwrap();
        let shown = self.expected[Path::new(target)].clone();
        self.expected.insert(PathBuf::from(path), shown);
    }

    /// Writes the image, looks at it with another's program, and mounts it.
    pub(crate) fn mount(mut self) -> Mounted {
        let written = self.writer.finish(&self.tree, UUID).unwrap();
        let image = self.folder.path().join("image");
        assert_eq!(image.metadata().unwrap().len(), written.size_bytes);
        mount::check(&image);
        // Links of files: each has all of them, and the first path in order.
        let mut firsts: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
        for (path, shown) in &self.expected {
            firsts.entry(shown.first.clone()).or_default().push(path.clone());
        }
        for paths in firsts.values().filter(|paths| paths.len() > 1) {
            for path in paths {
                let shown = self.expected.get_mut(path).unwrap();
                (shown.links, shown.first) = (paths.len() as u64, paths[0].clone());
            }
        }
        Mounted::new(self.folder, written, self.expected)
    }
}

/// A mounted image; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Mounted {
    // Before the folder that it is in.
    mount: mount::Mount,
    pub(crate) folder: TempDir,
    pub(crate) written: Written,
    pub(crate) expected: BTreeMap<PathBuf, Shown>,
}

impl Mounted {
    fn new(folder: TempDir, written: Written, expected: BTreeMap<PathBuf, Shown>) -> Self {
        let root = folder.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mount = mount::Mount::image(&folder.path().join("image"), &root);
        Self { mount, folder, written, expected }
    }

    /// Mounts an image of which nothing is expected.
    pub(crate) fn of(folder: TempDir) -> Self {
        Self::new(folder, Written { size_bytes: 0, inodes: 0 }, BTreeMap::new())
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// The kernel shows what was put in, and nothing else.
    pub(crate) fn assert_as_expected(&self) {
        let shown = shown(&self.root());
        for (path, expected) in &self.expected {
            let got = shown.get(path).unwrap_or_else(|| panic!("{} is missing", path.display()));
            assert!(got.content == expected.content, "other content in {}", path.display());
            assert_eq!(got, expected, "{}", path.display());
        }
        assert_eq!(shown.len(), self.expected.len());
    }
}

fn xattrs(path: &Path) -> Xattrs {
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

/// All that is below a directory, itself as the empty path.
pub(crate) fn shown(root: &Path) -> BTreeMap<PathBuf, Shown> {
    let mut paths = vec![PathBuf::new()];
    let mut next = 0;
    while let Some(path) = paths.get(next).cloned() {
        next += 1;
        if root.join(&path).symlink_metadata().unwrap().is_dir() {
            let entries = std::fs::read_dir(root.join(&path)).unwrap();
            paths.extend(entries.map(|entry| path.join(entry.unwrap().file_name())));
        }
    }
    paths.sort();
    let mut firsts = BTreeMap::new();
    let mut nodes = BTreeMap::new();
    for path in paths {
        let here = if path.as_os_str().is_empty() { root.to_owned() } else { root.join(&path) };
        let metadata = here.symlink_metadata().unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_file() {
            std::fs::read(&here).unwrap()
        } else if kind.is_symlink() {
            std::fs::read_link(&here).unwrap().into_os_string().into_vec()
        } else {
            Vec::new()
        };
        let shown = Shown {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            links: metadata.nlink(),
            device: metadata.rdev(),
            xattrs: xattrs(&here),
            content,
            first: firsts.entry(metadata.ino()).or_insert_with(|| path.clone()).clone(),
        };
        nodes.insert(path, shown);
    }
    nodes
}

/// Writes all of a content in uneven pieces.
pub(crate) fn fill(mut file: FileWriter<'_>, content: &[u8]) -> Result<Kind, ErofsError> {
    for piece in content.chunks(70_001) {
        file.write(piece)?;
    }
    file.finish().map(Kind::File)
}

//! The archive of an overlay's upper directory makes what the overlay shows of what is below.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "support/edits.rs"]
mod edits;
#[path = "../../erofs/tests/support/mount.rs"]
mod mount;
mod support;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use edits::{Counts, apply_all, attribute_names, edit, make_node, set_attribute, stamp};
use mount::Mount;
use proptest::prelude::*;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use slackwater_archive::{ArchiveError, image, pack_upper};
use support::ops::{append, op};
use support::{Node, Tar, tree, unpack, xattrs};
use tempfile::{TempDir, tempdir};

/// The options with which nothing is elsewhere than in the upper directory.
const OPTIONS: &str = "index=off,redirect_dir=off,metacopy=off";

/// An overlay that can be written; dropped, it is none.
struct Writable(PathBuf);

impl Drop for Writable {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

/// Layers as images, one above the other, and an overlay of them that can be written.
struct Layers {
    // Dropped from the first to the last: overlays before what they are of.
    merged: Option<Writable>,
    below: Option<Mount>,
    images: Vec<Mount>,
    archives: Vec<Vec<u8>>,
    /// Of the overlay that can be written.
    options: CString,
    folder: TempDir,
}

impl Layers {
    fn new(archives: &[Vec<u8>]) -> Self {
        Self::with(archives, OPTIONS)
    }

    fn with(archives: &[Vec<u8>], options: &str) -> Self {
        let folder = tempdir().unwrap();
        let (merged, below, images, archives) = (None, None, Vec::new(), archives.to_vec());
        let options = CString::new(options).unwrap();
        let mut layers = Self { merged, below, images, archives, options, folder };
        for index in 0..layers.archives.len() {
            let above = layers.image(&layers.archives[index], index);
            layers.images.push(above);
            if index > 0 {
                let root = layers.directory(&format!("below{index}"));
                layers.below = Some(Mount::overlay(&layers.lowers(), &root));
            }
        }
        let [root, upper, work] = ["merged", "upper", "work"].map(|name| layers.directory(name));
        let lowers: Vec<_> = layers.lowers().iter().map(|lower| lower.to_str().unwrap()).collect();
        let directories =
            format!("upperdir={},workdir={}", upper.to_str().unwrap(), work.to_str().unwrap());
        let options = layers.options.to_str().unwrap();
        let options = format!("lowerdir={},{directories},{options}", lowers.join(":"));
        layers.options = CString::new(options).unwrap();
        layers.mount_merged(root);
        layers
    }

    fn mount_merged(&mut self, root: PathBuf) {
        let (flags, options) = (MountFlags::empty(), &*self.options);
        rustix::mount::mount("overlay", &root, "overlay", flags, options).unwrap();
        self.merged = Some(Writable(root));
    }

    /// Mounts the overlay again. Above images that have one UUID, as those of equal layers, a file that was linked has the
    /// number that it had below until the kernel forgets it, and the link another one: before that they do not look like one
    /// file.
    fn remount(&mut self) {
        let root = self.merged().to_owned();
        self.merged = None;
        self.mount_merged(root);
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir(&path).unwrap();
        // Whatever the umask took: what is above no layer has this mode.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Mounts the image of a layer above those that are there.
    fn image(&self, archive: &[u8], index: usize) -> Mount {
        let path = self.folder.path().join(format!("image{index}"));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        image(archive, self.below(), file, None).unwrap();
        Mount::image(&path, &self.directory(&format!("root{index}")))
    }

    /// The lower directories, the topmost first.
    fn lowers(&self) -> Vec<&Path> {
        self.images.iter().rev().map(Mount::root).collect()
    }

    /// All lower directories as one.
    fn below(&self) -> Option<&Path> {
        self.below.as_ref().or(self.images.first()).map(Mount::root)
    }

    fn merged(&self) -> &Path {
        &self.merged.as_ref().unwrap().0
    }

    fn upper(&self) -> PathBuf {
        self.folder.path().join("upper")
    }

    fn pack(&self) -> Result<Vec<u8>, ArchiveError> {
        packed(&self.upper(), self.below())
    }

    /// Packs the upper directory, and makes what the overlay shows of what is below: in a copy of
    /// that, and by an image above it.
    fn check(&mut self) -> Vec<u8> {
        self.remount();
        let expected = shown(self.merged());
        let archive = self.pack().unwrap();
        assert!(self.pack().unwrap() == archive, "packed differently");
        assert_unmarked(&archive);
        let copy = self.directory("copy");
        for below in &self.archives {
            unpack(below, &copy).unwrap();
        }
        unpack(&archive, &copy).unwrap();
        assert_same(&shown(&copy), &expected);
        let times = directory_times(self.merged());
        let copied = directory_times(&copy);
        for path in directory_times(&self.upper()).keys() {
            assert_eq!(copied[path], times[path], "time of {}", path.display());
        }
        let above = self.image(&archive, self.images.len());
        let lowers = [&[above.root()], &self.lowers()[..]].concat();
        let overlay = Mount::overlay(&lowers, &self.directory("overlay"));
        assert_same(&shown(overlay.root()), &expected);
        assert_eq!(directory_times(overlay.root()), times);
        archive
    }
}

fn packed(upper: &Path, below: Option<&Path>) -> Result<Vec<u8>, ArchiveError> {
    let mut archive = Vec::new();
    pack_upper(upper, below, &mut archive, usize::MAX).map(|_| archive)
}

/// The attributes that no layer of an upper directory holds.
const MARKS: [&str; 2] = ["trusted.overlay.", "user.overlay."];

/// A tree without what no layer holds: sockets, and attributes that mean something to an overlay.
fn shown(root: &Path) -> BTreeMap<PathBuf, Node> {
    let mut nodes = tree(root);
    nodes.retain(|_, node| node.mode & 0o170_000 != 0o140_000);
    for node in nodes.values_mut() {
        node.xattrs.retain(|name, _| !MARKS.iter().any(|mark| name.starts_with(mark.as_bytes())));
    }
    nodes
}

fn assert_unmarked(archive: &[u8]) {
    for mark in MARKS {
        let is_in = archive.windows(mark.len()).any(|bytes| bytes == mark.as_bytes());
        assert!(!is_in, "{mark} is in the archive");
    }
}

fn assert_same(got: &BTreeMap<PathBuf, Node>, expected: &BTreeMap<PathBuf, Node>) {
    let names = |tree: &BTreeMap<PathBuf, Node>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(got), names(expected));
    for (path, node) in expected {
        assert_eq!(&got[path], node, "{}", path.display());
    }
}

/// The times of a tree's directories, without the root: a layer does not always hold that.
fn directory_times(root: &Path) -> BTreeMap<PathBuf, (i64, i64)> {
    let mut times = BTreeMap::new();
    for path in tree(root).into_keys().filter(|path| !path.as_os_str().is_empty()) {
        let metadata = root.join(&path).symlink_metadata().unwrap();
        if metadata.is_dir() {
            times.insert(path, (metadata.mtime(), metadata.mtime_nsec()));
        }
    }
    times
}

#[test]
fn as_root_any_changes_come_through() {
    let made = RefCell::new(Counts::new());
    let config = ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() };
    let layers = prop::collection::vec(prop::collection::vec(op(), 0..14), 1..3);
    let edits = prop::collection::vec(edit(), 0..24);
    proptest!(config, |(layers in layers, edits in edits)| {
        // Something with attributes to be copied and removed, too.
        let first = || {
            let names = attribute_names().into_iter();
            let records: Vec<_> = names.map(|name| format!("SCHILY.xattr.{name}")).collect();
            let records: Vec<_> = records.iter().map(|record| (&**record, &b"y"[..])).collect();
            Tar::new().pax(&records).directory("b/").pax(&records).file("b/x", b"noted")
        };
        let archive = |ops: &Vec<_>| ops.iter().fold(first(), append).end();
        let mut layers = Layers::new(&layers.iter().map(archive).collect::<Vec<_>>());
        apply_all(layers.merged(), &edits, &mut made.borrow_mut());
        layers.check();
    });
    let made = made.into_inner();
    assert!(made.values().all(|count| *count > 0), "edits that were never made: {made:?}");
}

const OPAQUE: &str = "trusted.overlay.opaque";

/// An upper directory as overlayfs leaves it, and what is below, made by hand.
struct Made {
    upper: PathBuf,
    below: PathBuf,
    folder: TempDir,
}

impl Made {
    /// Directories end with a slash, an opaque one with `/=`.
    fn new(upper: &[&str], below: &[&str]) -> Self {
        let folder = tempdir().unwrap();
        let make = |kind: &str, names: &[&str]| {
            let root = folder.path().join(kind);
            fs::create_dir(&root).unwrap();
            for name in names {
                let path = root.join(name.trim_end_matches('='));
                if name.ends_with(['/', '=']) {
                    fs::create_dir(&path).unwrap();
                } else {
                    fs::write(&path, name).unwrap();
                }
                if name.ends_with('=') {
                    set_attribute(&path, OPAQUE, b"y").unwrap();
                }
            }
            root
        };
        Self { upper: make("upper", upper), below: make("below", below), folder }
    }

    fn white_out(&self, name: &str) {
        make_node(&self.upper.join(name), FileType::CharacterDevice, 0).unwrap();
    }

    fn pack(&self) -> Result<Vec<u8>, ArchiveError> {
        packed(&self.upper, Some(&self.below))
    }

    fn assert_refused(&self, reason: &str) {
        let error = self.pack().unwrap_err();
        assert!(matches!(error, ArchiveError::Unpackable { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}, expected {reason}");
    }

    /// Unpacks over what is below.
    fn unpack(&self, archive: &[u8]) -> PathBuf {
        let copy = self.folder.path().join("copy");
        support::copy(&self.below, &copy);
        unpack(archive, &copy).unwrap();
        copy
    }
}

/// The names of an archive's members.
fn members(archive: &[u8]) -> String {
    let mut archive = tar::Archive::new(archive);
    let names = archive
        .entries()
        .unwrap()
        .map(|entry| String::from_utf8(entry.unwrap().path_bytes().to_vec()).unwrap());
    names.collect::<Vec<_>>().join(" ")
}

#[test]
fn as_root_marks_of_overlayfs_become_marks_of_a_layer() {
    let made = Made::new(
        &["d/=", "d/e/=", "d/new", "file/=", "m/", "m/e/", "m/e/f/=", "m/n/=", "soft/", "soft/e/="],
        &["d/", "d/e/", "d/e/old", "file", "gone", "m/", "m/e/", "m/e/f/", "m/e/g"],
    );
    symlink("d", made.below.join("soft")).unwrap();
    made.white_out("gone");
    made.white_out("m/e/g");
    made.white_out("d/e/h");
    let expected = "d/ d/.wh..wh..opq d/e/ d/e/.wh.h d/new file/ .wh.gone m/ m/e/ m/e/f/ \
                    m/e/f/.wh..wh..opq m/e/.wh.g m/n/ soft/ soft/e/";
    let archive = made.pack().unwrap();
    assert_eq!(members(&archive), expected);
    let copy = made.unpack(&archive);
    assert_eq!(support::paths(&copy), "d/ d/e/ d/new file/ m/ m/e/ m/e/f/ m/n/ soft/ soft/e/");
    // A whiteout can stand over nothing, and without anything below there is nothing to hide.
    let alone = packed(&made.upper, None).unwrap();
    let expected =
        "./ d/ d/e/ d/e/.wh.h d/new file/ .wh.gone m/ m/e/ m/e/f/ m/e/.wh.g m/n/ soft/ soft/e/";
    assert_eq!(members(&alone), expected);
    // overlayfs does not look at the root's mark.
    set_attribute(&made.upper, OPAQUE, b"y").unwrap();
    assert!(made.pack().unwrap() == archive, "the root's mark made a difference");
}

#[test]
fn as_root_attributes_that_mean_something_to_an_overlay_are_left_out() {
    let made = Made::new(&["d/", "file"], &["d/", "file"]);
    for own in ["origin", "impure", "uuid", "upper", "protattr"] {
        for path in ["", "d", "file"] {
            let name = format!("trusted.overlay.{own}");
            set_attribute(&made.upper.join(path), &name, b"value").unwrap();
        }
    }
    for users in ["opaque", "metacopy", "overlay.redirect"] {
        let name = format!("trusted.overlay.overlay.{users}");
        set_attribute(&made.upper.join("d"), &name, users.as_bytes()).unwrap();
    }
    for name in ["user.overlay.opaque", "user.overlayer"] {
        set_attribute(&made.upper.join("file"), name, b"y").unwrap();
    }
    let archive = made.pack().unwrap();
    assert_eq!(members(&archive), "d/ file");
    assert_unmarked(&archive);
    let copy = made.unpack(&archive);
    assert_eq!(xattrs(&copy.join("d")), BTreeMap::new());
    let names = xattrs(&copy.join("file")).into_keys().collect::<Vec<_>>();
    assert_eq!(names, [b"user.overlayer"]);
}

#[test]
fn as_root_attributes_whose_name_would_be_another_are_refused() {
    let made = Made::new(&["d/", "d/file"], &[]);
    set_attribute(&made.upper.join("d/file"), "user.a=b", b"c").unwrap();
    made.assert_refused("remove that attribute");
    let error = support::pack(Some(&made.below), &made.upper).unwrap_err().to_string();
    assert!(error.contains("`d/file`") && error.contains("remove that attribute"), "{error}");
}

#[test]
fn as_root_paths_longer_than_an_unpacker_takes_are_refused() {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let pack = |kind, length| {
        let made = Made::new(&[], &[]);
        let name = "x".repeat(250);
        let mut directory = rustix::fs::open(&made.upper, flags, Mode::empty()).unwrap();
        for _ in 0..16 {
            rustix::fs::mkdirat(&directory, &name, Mode::RWXU).unwrap();
            directory = rustix::fs::openat(&directory, &name, flags, Mode::empty()).unwrap();
        }
        match kind {
            FileType::Directory => rustix::fs::mkdirat(&directory, &name[..length], Mode::RWXU),
            _ => rustix::fs::mknodat(&directory, &name[..length], kind, Mode::RUSR, 0),
        }
        .unwrap();
        (made.pack(), made)
    };
    // 4016 bytes with the slash are before the name. A directory ends with a slash, too; a whiteout is longer
    // by four.
    let longest =
        [(FileType::RegularFile, 79), (FileType::Directory, 78), (FileType::CharacterDevice, 75)];
    for (kind, length) in longest {
        let (archive, made) = pack(kind, length);
        unpack(&archive.unwrap(), &made.below).unwrap();
        let (_, made) = pack(kind, length + 1);
        made.assert_refused("longer than an unpacker takes");
    }
}

#[test]
fn as_root_what_overlayfs_has_elsewhere_is_refused() {
    let cases: [(&str, &[u8], &str); 9] = [
        ("redirect", b"/elsewhere", "redirect_dir=off,metacopy=off"),
        ("metacopy", b"", "redirect_dir=off,metacopy=off"),
        ("nlink", b"U+0", "index=off"),
        ("opaque", b"x", "extended attributes"),
        ("opaque", b"", "extended attributes"),
        ("opaque", b"yes", "extended attributes"),
        ("whiteout", b"", "extended attributes"),
        ("whiteouts", b"", "extended attributes"),
        ("later", b"", "does not know"),
    ];
    for (name, value, reason) in cases {
        for path in ["", "d", "d/file"] {
            let made = Made::new(&["d/", "d/file"], &["d/"]);
            set_attribute(&made.upper.join(path), &format!("trusted.overlay.{name}"), value)
                .unwrap();
            made.assert_refused(reason);
        }
    }
}

#[test]
fn as_root_an_overlay_with_other_options_is_refused() {
    let below = Tar::new().file("d/file", b"1").file("file", b"2").link("link", "file").end();
    let refused = |options: &str, change: &dyn Fn(&Path), reason: &str| {
        let layers = Layers::with(std::slice::from_ref(&below), options);
        change(layers.merged());
        let error = layers.pack().unwrap_err();
        assert!(matches!(error, ArchiveError::Unpackable { .. }), "{error:?}");
        assert!(error.to_string().contains(reason), "{error}, expected {reason}");
    };
    let rename = |root: &Path| fs::rename(root.join("d"), root.join("e")).unwrap();
    refused("index=off,redirect_dir=on,metacopy=off", &rename, "redirect_dir=off");
    let chmod = |root: &Path| {
        fs::set_permissions(root.join("d/file"), fs::Permissions::from_mode(0o600)).unwrap();
    };
    refused("index=off,redirect_dir=on,metacopy=on", &chmod, "metacopy=off");
    let append = |root: &Path| fs::write(root.join("file"), "more").unwrap();
    refused("index=on,redirect_dir=off,metacopy=off", &append, "index=off");
}

#[test]
fn as_root_names_that_mean_deletions_are_refused() {
    for name in [".wh.a", ".wh..wh..opq", ".wh.", ".wh.d/"] {
        let made = Made::new(&["d/", &format!("d/{name}")], &["d/"]);
        made.assert_refused("names that begin with `.wh.`");
    }
    let made = Made::new(&[], &[]);
    made.white_out(".wh.a");
    made.assert_refused("names that begin with `.wh.`");
}

#[test]
fn as_root_a_socket_is_left_out_and_hides_what_is_below() {
    let made = Made::new(
        &["d/", "n/", "o/=", "o/e/", "soft/"],
        &["d/", "d/file", "o/", "o/e/", "o/e/file", "real/", "real/file"],
    );
    symlink("real", made.below.join("soft")).unwrap();
    // Over nothing, below an opaque directory, and beside a link there is nothing to hide.
    for name in ["d/file", "d/new", "n/file", "o/e/file", "soft/file"] {
        make_node(&made.upper.join(name), FileType::Socket, 0).unwrap();
    }
    let archive = made.pack().unwrap();
    assert_eq!(members(&archive), "d/ d/.wh.file n/ o/ o/.wh..wh..opq o/e/ soft/");
    assert_eq!(support::paths(&made.unpack(&archive)), "d/ n/ o/ o/e/ real/ real/file soft/");
    assert_eq!(members(&packed(&made.upper, None).unwrap()), "./ d/ n/ o/ o/e/ soft/");
}

#[test]
fn as_root_the_root_is_a_member_if_its_attributes_differ() {
    let made = Made::new(&["a"], &["a"]);
    stamp(&made.upper, &mut 0).unwrap();
    assert_eq!(members(&made.pack().unwrap()), "a");
    set_attribute(&made.upper, "user.one", b"1").unwrap();
    assert_eq!(members(&made.pack().unwrap()), "./ a");
    set_attribute(&made.below, "user.one", b"1").unwrap();
    assert_eq!(members(&made.pack().unwrap()), "a");
    lchown(&made.upper, Some(1), None).unwrap();
    assert_eq!(members(&made.pack().unwrap()), "./ a");
    lchown(&made.below, Some(1), None).unwrap();
    fs::set_permissions(&made.upper, fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(members(&made.pack().unwrap()), "./ a");
    // What means something to an overlay does not count, neither here nor there.
    let record = "SCHILY.xattr.trusted.overlay.note";
    let root = Tar::new().pax(&[(record, b"1")]).directory("./").end();
    let layers = Layers::new(&[root]);
    assert_eq!(members(&layers.pack().unwrap()), "");
    set_attribute(&layers.upper(), "trusted.overlay.overlay.note", b"2").unwrap();
    set_attribute(&layers.upper(), "user.overlay.note", b"2").unwrap();
    assert_eq!(members(&layers.pack().unwrap()), "");
}

#[test]
fn as_root_the_same_files_make_the_same_bytes() {
    let names = ["a-b", "a/", "a/x", "a/y", "a.b", "b/=", "b/c/", "b/c/d"];
    let below = ["a/", "b/"];
    let mut reversed = names;
    // Parents first, as they are.
    reversed.sort_by_key(|name| {
        let path = Path::new(name.trim_end_matches('='));
        (path.components().count(), std::cmp::Reverse(path.to_owned()))
    });
    let links = ["a/one", "b/c/two"];
    let attributes = ["trusted.one", "user.three", "user.two"];
    let archives = [false, true].map(|is_reversed| {
        let made = Made::new(if is_reversed { &reversed } else { &names }, &below);
        let (mut links, mut attributes) = (links, attributes);
        if is_reversed {
            links.reverse();
            attributes.reverse();
        }
        let links = links.map(|link| made.upper.join(link));
        fs::write(&links[0], "linked").unwrap();
        fs::hard_link(&links[0], &links[1]).unwrap();
        for path in [made.upper.join("a"), links[0].clone()] {
            for name in attributes {
                set_attribute(&path, name, name.as_bytes()).unwrap();
            }
        }
        for name in names.iter().rev().chain(["a/one", "b/c"].iter()) {
            let path = made.upper.join(name.trim_end_matches('='));
            stamp(&path, &mut name.len().try_into().unwrap()).unwrap();
        }
        made.pack().unwrap()
    });
    let expected = "a/ a/one a/x a/y a-b a.b b/ b/.wh..wh..opq b/c/ b/c/d b/c/two";
    assert_eq!(members(&archives[0]), expected);
    assert!(archives[0] == archives[1], "other bytes");
}

#[test]
fn as_root_a_link_to_what_is_below_and_a_renamed_directory_come_through() {
    let below = Tar::new().file("one", b"1").link("two", "one").file("old/x", b"2").end();
    let above = Tar::new().file("old/y", b"3").end();
    let mut layers = Layers::new(&[below, above]);
    let root = layers.merged();
    fs::hard_link(root.join("one"), root.join("new")).unwrap();
    fs::create_dir_all(root.join("made/x/in")).unwrap();
    fs::remove_dir_all(root.join("old")).unwrap();
    fs::rename(root.join("made"), root.join("old")).unwrap();
    let archive = layers.check();
    assert_eq!(members(&archive), "new old/ old/.wh..wh..opq old/x/ old/x/in/ one");
    assert!(!archive.windows(15).any(|bytes| bytes == b"trusted.overlay"), "overlayfs' own");
}

#[test]
fn as_root_a_link_to_what_two_layers_have_comes_through() {
    let layer = || Tar::new().directory("b/").file("b/x", b"1").end();
    let mut layers = Layers::new(&[layer(), layer()]);
    let root = layers.merged();
    fs::hard_link(root.join("b/x"), root.join("a")).unwrap();
    let archive = layers.check();
    assert_eq!(members(&archive), "a b/ b/x");
}

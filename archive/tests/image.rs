//! An image of each layer, mounted as an overlay, is the tree that unpacking the layers makes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../../erofs/tests/support/mount.rs"]
mod mount;
mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use mount::Mount;
use proptest::prelude::*;
use slackwater_archive::{ArchiveError, Imaged, image, layer_image, replay};
use support::ops::{DIRECTORIES, LEAVES, Op, append, op};
use support::{Node, Tar, paths, tree, unpack, xattrs};
use tempfile::{TempDir, tempdir};

/// Layers one above the other: as images of their own, and all in one tree.
struct Layers {
    // Dropped from the first to the last: overlays before what they are of.
    overlays: Vec<Mount>,
    images: Vec<Mount>,
    folder: TempDir,
}

impl Layers {
    fn new() -> Self {
        let folder = tempdir().unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        // Whatever the umask took: what is above no layer has this mode.
        fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)).unwrap();
        Self { overlays: Vec::new(), images: Vec::new(), folder }
    }

    fn directory(&self, kind: &str) -> PathBuf {
        let path = self.folder.path().join(format!("{kind}{}", self.images.len()));
        fs::create_dir(&path).unwrap();
        path
    }

    /// All layers as one directory.
    fn merged(&self) -> Option<&Path> {
        let mount = if self.images.len() == 1 { self.images.last() } else { self.overlays.last() };
        mount.map(Mount::root)
    }

    fn tree(&self) -> PathBuf {
        self.folder.path().join("tree")
    }

    fn write(&self, archive: &[u8], recording: &Path) -> Result<(PathBuf, Imaged), ArchiveError> {
        let path = self.folder.path().join(format!("image{}", self.images.len()));
        let _ = fs::remove_file(&path);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        image(archive, self.merged(), file, Some(recording)).map(|imaged| (path, imaged))
    }

    /// Adds a layer both ways, and replays its archive from its image.
    fn add(&mut self, archive: &[u8]) -> Imaged {
        let unpacked = unpack(archive, &self.tree()).unwrap();
        let recording = self.folder.path().join("recording");
        let (path, imaged) = self.write(archive, &recording).unwrap();
        assert_eq!(imaged.unpacked, unpacked);
        mount::check(&path);
        self.images.push(Mount::image(&path, &self.directory("root")));
        let mut replayed = Vec::new();
        replay(&recording, self.images.last().unwrap().root(), &mut replayed).unwrap();
        assert!(replayed == archive, "the image replays differently");
        if self.images.len() > 1 {
            let lowers: Vec<_> = self.images.iter().rev().map(Mount::root).collect();
            let overlay = Mount::overlay(&lowers, &self.directory("overlay"));
            self.overlays.push(overlay);
        }
        imaged
    }

    fn assert_same(&self) {
        self.assert_same_but(|_| {});
    }

    fn assert_same_but(&self, forget: impl Fn(&mut Node)) {
        let mut trees = [tree(&self.tree()), tree(self.merged().unwrap())];
        trees.iter_mut().flat_map(BTreeMap::values_mut).for_each(forget);
        let [expected, got] = trees;
        let names = |tree: &BTreeMap<PathBuf, Node>| tree.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&got), names(&expected));
        for (path, node) in &expected {
            assert_eq!(&got[path], node, "{}", path.display());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn as_root_layers_of_any_members_merge_to_what_unpacking_makes(
        layers in prop::collection::vec(prop::collection::vec(op(), 0..14), 1..5),
    ) {
        let mut made = Layers::new();
        for ops in layers {
            made.add(&ops.iter().fold(Tar::new(), append).end());
            made.assert_same();
        }
    }
}

/// A member of [`op`], or a hard link to what the layer or one below may have at these places.
fn op_or_link() -> impl Strategy<Value = (Option<Op>, usize, usize)> {
    let places = DIRECTORIES.len() * LEAVES.len();
    (prop::option::weighted(0.8, op()), 0..places, 0..places)
}

fn append_any(tar: Tar, (op, from, to): &(Option<Op>, usize, usize)) -> Tar {
    let path = |place: &usize| {
        format!("{}/{}", DIRECTORIES[place / LEAVES.len()], LEAVES[place % LEAVES.len()])
    };
    match op {
        Some(op) => append(tar, op),
        None => tar.link(&path(from), &path(to)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn as_root_hard_links_to_what_is_below_are_copies(
        layers in prop::collection::vec(prop::collection::vec(op_or_link(), 0..14), 1..5),
    ) {
        let mut made = Layers::new();
        for members in layers {
            let archive = members.iter().fold(Tar::new(), append_any).end();
            let recording = made.folder.path().join("recording");
            if made.write(&archive, &recording).is_err() {
                prop_assert!(unpack(&archive, &made.tree()).is_err());
                break;
            }
            made.add(&archive);
            // As on an overlay, other names below stay with the file below.
            made.assert_same_but(|node| node.first = PathBuf::new());
        }
    }
}

#[test]
fn as_root_whiteouts_and_links_mean_what_they_mean_to_unpacking() {
    let lower = Tar::new()
        .file("d/e/one", b"1")
        .file("d/one", b"1")
        .file("d/two", b"2")
        .symlink("soft", "d/e")
        .link("top2", "d/two")
        .file("top", b"3");
    let mut owned = Tar::header(b'5', "d/e/", "", 0);
    owned.set_mode(0o1711);
    owned.set_uid(77);
    let mut grouped = Tar::header(b'5', "group", "", 0);
    grouped.set_mode(0o2775);
    grouped.set_gid(50);
    let lower = lower.pax(&[("SCHILY.xattr.user.note", b"kept")]).with(owned, b"");
    let lower = lower.with(grouped, b"").end();
    let cases = [
        Tar::new().file(".wh.top", b"").file("d/.wh.one", b""),
        Tar::new().file(".wh.d", b""),
        Tar::new().file("d/.wh..wh..opq", b"").file("d/new", b""),
        Tar::new().file("d/new", b"").file("d/one", b"").file("d/.wh..wh..opq", b""),
        Tar::new().file("d/e/new", b"").file("d/.wh..wh..opq", b""),
        Tar::new().file("d/e/new", b""),
        Tar::new().file("soft/new", b"").file("soft/.wh.one", b""),
        Tar::new().file(".wh..wh..opq", b"").file(".wh..wh.plnk/1.2", b"x").directory("d/"),
        Tar::new().directory("d/").file(".wh..wh..opq", b""),
        Tar::new().file("d/one", b"2").file("d/.wh.one", b"").file(".wh.d", b""),
        Tar::new().file("d/e/.wh.one", b"").file(".wh.d", b""),
        Tar::new().file("d/e/.wh.one", b"").file("d/.wh.e", b"").file("d/e/new", b""),
        Tar::new().file(".wh.d", b"").file("d/e/new", b""),
        Tar::new().file(".wh.d", b"").directory("d/"),
        Tar::new().file("d", b"file").directory("d/"),
        Tar::new().file("d", b"file").file(".wh.d", b""),
        Tar::new().directory("top/").file("top/in", b""),
        Tar::new().directory("soft/").file("soft/in", b""),
        Tar::new().symlink("d", "elsewhere"),
        Tar::new().link("d/e/moved", "top").file(".wh.top", b"").file(".wh.d", b""),
        Tar::new().link("new", "d/one").file("d/.wh..wh..opq", b""),
        Tar::new().link("new", "soft/one").file("d/e/one", b"other"),
        Tar::new().link("new", "top2").link("new2", "d/two"),
        Tar::new().link("new", "top2").link("new2", "d/two").file(".wh.top2", b""),
        Tar::new().file("group/new/in", b"").file("group/.wh.none/x", b""),
        Tar::new().link("new", "soft"),
        Tar::new().file("a", b"a").link("b", "a").file("a", b"other"),
        Tar::new().file("x/y/z", b"z").file("x", b"file").file("x2", b""),
        Tar::new().file("/leading/../d/./up", b""),
    ];
    for (index, archive) in cases.into_iter().enumerate() {
        let mut layers = Layers::new();
        layers.add(&lower);
        println!("case {index}");
        layers.add(&archive.end());
        layers.assert_same();
        // And what a layer above sees.
        layers
            .add(&Tar::new().file("above/new", b"").file(".wh.top2", b"").file(".wh.d", b"").end());
        layers.assert_same();
    }
}

#[test]
fn as_root_an_image_holds_no_mark_for_what_is_not_below() {
    let archive = Tar::new()
        .file(".wh.none", b"")
        .file("d/.wh..wh..opq", b"")
        .file("d/.wh.none", b"")
        .file("d/own", b"")
        .end();
    let mut layers = Layers::new();
    layers.add(&archive);
    layers.assert_same();
    layers.add(&archive);
    layers.assert_same();
    assert_eq!(paths(layers.images[0].root()), "d/ d/own");
    assert!(xattrs(&layers.images[0].root().join("d")).is_empty());
    assert_eq!(paths(layers.images[1].root()), "d/ d/own");
    let marks = xattrs(&layers.images[1].root().join("d"));
    assert_eq!(marks[&b"trusted.overlay.opaque"[..]], b"y");
}

#[test]
fn as_root_all_attributes_and_sparse_files_come_through() {
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let records: [(&str, &[u8]); 6] = [
        ("mtime", b"-1.5"),
        ("uid", b"4000000000"),
        ("SCHILY.xattr.user.lines", b"a=b\n7 c=d\n\0"),
        ("SCHILY.xattr.trusted.note", b"t"),
        ("SCHILY.xattr.security.capability", capability),
        ("comment", b"for no program"),
    ];
    let mut header = Tar::header(b'S', "sparse", "", 600);
    let block = header.as_mut_bytes();
    block[386..410].copy_from_slice(b"00000040000\x0000000001130\0");
    block[483..494].copy_from_slice(b"00000300000");
    let mut device = Tar::header(b'4', "block", "", 0);
    device.set_device_major(8).unwrap();
    device.set_device_minor(300).unwrap();
    let archive = Tar::new()
        .pax(&records)
        .file("file", b"content")
        .pax(&[("SCHILY.xattr.user.gone", b"links have none"), ("mtime", b"3.000000001")])
        .symlink("soft", "file")
        .with(header, &[7; 600])
        .with(device, b"")
        .member(b'6', "fifo", "", b"");
    let mut layers = Layers::new();
    layers.add(&archive.end());
    layers.assert_same();
    let sparse = layers.images[0].root().join("sparse");
    assert_eq!(sparse.metadata().unwrap().len(), 0o300_000);
    assert_eq!(
        fs::read(sparse).unwrap()[0o40000 - 1..0o40000 + 601],
        [&[0][..], &[7; 600], &[0]].concat()
    );
}

/// An ACL: tag, permissions, owner or group of each entry.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

#[test]
fn as_root_acls_mean_what_they_mean_to_unpacking() {
    const NONE: u32 = u32::MAX;
    let minimal = acl(&[(1, 6, NONE), (4, 4, NONE), (0x20, 0, NONE)]);
    let named = acl(&[(1, 7, NONE), (2, 5, 1000), (4, 4, NONE), (0x10, 5, NONE), (0x20, 0, NONE)]);
    let access = "SCHILY.xattr.system.posix_acl_access";
    let default = "SCHILY.xattr.system.posix_acl_default";
    let archive = Tar::new()
        .pax(&[(access, &minimal)])
        .file("minimal", b"")
        .pax(&[(access, &named)])
        .file("named", b"")
        .pax(&[(access, &named), (default, &minimal)])
        .directory("d/")
        .pax(&[(access, &acl(&[])), (default, &acl(&[]))])
        .directory("empty/");
    let mut layers = Layers::new();
    layers.add(&archive.end());
    layers.assert_same();
    assert_eq!(layers.merged().unwrap().join("named").metadata().unwrap().mode() & 0o777, 0o750);
    for (record, value) in [(access, &named[..20]), (default, &named[..])] {
        let bad = Tar::new().pax(&[(record, value)]).file("bad", b"").end();
        let error = layers.write(&bad, &layers.tree().join("r")).unwrap_err().to_string();
        assert!(error.contains("posix_acl") && error.contains("cannot be kept"), "{error}");
        assert!(unpack(&bad, &layers.tree()).is_err());
    }
}

#[test]
fn as_root_what_only_overlayfs_may_write_is_not_believed() {
    let mut layers = Layers::new();
    layers.add(&Tar::new().file("d/lower", b"").file("secret", b"lower").end());
    let hostile = Tar::new()
        .pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y")])
        .directory("d/")
        .pax(&[("SCHILY.xattr.trusted.overlay.redirect", b"/secret")])
        .directory("e/");
    layers.add(&hostile.end());
    let merged = layers.merged().unwrap();
    assert_eq!(paths(merged), "d/ d/lower e/ secret");
    if mount::kernel() >= (6, 7) {
        assert_eq!(xattrs(&merged.join("d"))[&b"trusted.overlay.opaque"[..]], b"y");
    }
    // Nor in a first layer, and its copy above.
    let mut layers = Layers::new();
    layers.add(
        &Tar::new().pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y")]).directory("d/").end(),
    );
    layers.add(&Tar::new().file("d/new", b"").end());
    layers.add(&Tar::new().file("d/newer", b"").end());
    let merged = layers.merged().unwrap();
    assert_eq!(paths(merged), "d/ d/new d/newer");
    if mount::kernel() >= (6, 7) {
        layers.assert_same();
    }
    let error =
        layers.write(&Tar::new().member(b'3', "d", "", b"").end(), &layers.tree().join("r"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("whiteout of overlayfs"), "{error}");
}

#[test]
fn as_root_the_same_archive_makes_the_same_bytes() {
    let archive = Tar::new().file("d/a", &[1; 9000]).file("b", b"2").symlink("c", "b").end();
    let layers = Layers::new();
    let recording = layers.folder.path().join("recording");
    let written = || {
        let (path, imaged) = layers.write(&archive, &recording).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, imaged.image_bytes);
        assert_eq!(imaged.inodes, 5);
        bytes
    };
    let first = written();
    assert!(first == written(), "other bytes");
}

#[test]
fn a_member_that_cannot_be_kept_is_named_and_leaves_no_recording() {
    let layers = Layers::new();
    let recording = layers.folder.path().join("recording");
    let cases = [
        (Tar::new().link("b", "missing"), "`b`: it is a link to `missing`, which does not exist"),
        (Tar::new().directory("d/").link("b", "d"), "`b`: it is a link to a directory"),
        (Tar::new().link("b", "b"), "`b`: it is a link to `b`, which does not exist"),
        (Tar::new().file("a", b"").file("a/b", b""), "`a` is not a directory"),
        (Tar::new().file("../a", b""), "leads out of the layer"),
        (Tar::new().file("./", b"").file("", b"x"), "replace the root"),
        (Tar::new().pax(&[("path", &[b'n'; 256])]).file("x", b""), "more than 255 bytes"),
        (Tar::new().pax(&[("SCHILY.xattr.user.", b"v")]).file("x", b""), "`user.` cannot be kept"),
        (Tar::new().pax(&[("uid", b"4294967295")]).file("x", b""), "no valid number"),
    ];
    for (archive, expected) in cases {
        let error = layers.write(&archive.end(), &recording).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
        assert!(!recording.exists(), "{error}");
    }
    let cut = Tar::new().file("a", &[1; 600]).0;
    let error = layers.write(&cut[..700], &recording).unwrap_err();
    assert!(matches!(error, ArchiveError::Truncated { .. }), "{error}");
    let no_room = File::options().read(true).write(true).open("/dev/full").unwrap();
    let archive = Tar::new().file("a", b"1").end();
    let error = image(&archive[..], None, no_room, None).unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
}

#[test]
fn zeros_and_holes_take_no_room() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("image");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let archive = Tar::new().file("zeros", &vec![0; 8 << 20]).end();
    let imaged = image(&archive[..], None, file, None).unwrap();
    assert!(imaged.image_bytes > 8 << 20);
    let allocated = path.metadata().unwrap().blocks() * 512;
    assert!(allocated < 1 << 20, "{allocated} bytes are allocated");
}

#[test]
fn as_root_a_layer_is_as_containerd_applies_it() {
    let mut root = Tar::header(b'5', "./", "", 0);
    root.set_mode(0o700);
    root.set_uid(1000);
    root.set_cksum();
    let archive = Tar::new()
        .with(root, b"")
        .pax(&[("SCHILY.xattr.com.apple.provenance", b"x"), ("SCHILY.xattr.user.kept", b"y")])
        .file("file", b"content")
        .pax(&[("SCHILY.xattr.trusted.note", b"z"), ("mtime", b"9223372036.854775807")])
        .file("last", b"")
        .pax(&[("mtime", b"9223372036.854775808")])
        .file("later", b"")
        .pax(&[("mtime", b"-0.5")])
        .file("earlier", b"")
        .end();
    let folder = tempdir().unwrap();
    let path = folder.path().join("image");
    let points = ["root", "again"].map(|name| folder.path().join(name));
    points.iter().for_each(|point| fs::create_dir(point).unwrap());
    let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
    layer_image(&archive[..], None, open().unwrap()).unwrap();
    mount::check(&path);
    let mounted = Mount::image(&path, &points[0]);
    let root = mounted.root().metadata().unwrap();
    // As the root of a first layer is that says nothing of it.
    assert_eq!((root.mode() & 0o7777, root.uid(), root.gid()), (0o755, 0, 0));
    let found = xattrs(&mounted.root().join("file"));
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [(b"user.kept".to_vec(), b"y".to_vec())]);
    let times = |root: &Path| {
        ["last", "later", "earlier"].map(|name| {
            let found = root.join(name).metadata().unwrap();
            (found.mtime(), found.mtime_nsec())
        })
    };
    assert_eq!(times(mounted.root()), [(9_223_372_036, 854_775_807), (0, 0), (0, 0)]);
    assert_eq!(xattrs(&mounted.root().join("last")).len(), 0);
    drop(mounted);
    // By the other way it counts, as for what a container did to its root.
    fs::remove_file(&path).unwrap();
    image(&archive[..], None, open().unwrap(), None).unwrap();
    let mounted = Mount::image(&path, &points[1]);
    assert_eq!(mounted.root().metadata().unwrap().mode() & 0o7777, 0o700);
    let kept = [(9_223_372_036, 854_775_807), (9_223_372_036, 854_775_808), (-1, 500_000_000)];
    assert_eq!(times(mounted.root()), kept);
    assert_eq!(xattrs(&mounted.root().join("last"))[&b"trusted.note"[..]], b"z");
}

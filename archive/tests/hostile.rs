//! Archives that somebody made to do harm, and archives that were damaged on the way: nothing
//! outside the root is ever touched, and the error names the member.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use slackwater_archive::{ArchiveError, recognise};
use support::{Tar, paths, tree, unpack};
use tempfile::TempDir;

/// A root, and beside it a directory with a secret that no archive may reach.
struct Place {
    folder: TempDir,
    outside_before: String,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("root")).unwrap();
        fs::create_dir(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/secret"), "secret").unwrap();
        let mut place = Self { folder, outside_before: String::new() };
        place.outside_before = place.describe_outside();
        place
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn outside(&self) -> PathBuf {
        self.folder.path().join("outside")
    }

    fn describe_outside(&self) -> String {
        let secret = self.outside().join("secret").symlink_metadata().unwrap();
        let names: Vec<_> = fs::read_dir(self.folder.path()).unwrap().collect();
        let changed = (secret.ctime(), secret.ctime_nsec(), secret.nlink());
        format!("{:?} {changed:?} {}", tree(&self.outside()), names.len())
    }

    /// Unpacks, and checks that what is outside did not change.
    fn unpack(&self, archive: &[u8]) -> Result<(), ArchiveError> {
        let result = unpack(archive, &self.root());
        assert_eq!(self.describe_outside(), self.outside_before, "the outside was touched");
        result.map(|_| ())
    }

    /// Unpacks what has to be refused with these words.
    fn refuses(&self, archive: &[u8], words: &[&str]) {
        let error = self.unpack(archive).expect_err("was accepted").to_string();
        for word in words {
            assert!(error.contains(word), "`{error}` does not say `{word}`");
        }
    }
}

#[test]
fn names_that_lead_above_the_root_are_refused() {
    for name in ["../outside/x", "a/../../outside/x", "..", "/../x", "./.././outside/secret"] {
        for kind in [b'0', b'5', b'2', b'1', b'6', b'3'] {
            let place = Place::new();
            let archive = Tar::new().member(kind, name, "a", b"").end();
            place.refuses(&archive, &[name, "leads out of the layer"]);
            assert_eq!(paths(&place.root()), "");
        }
        let place = Place::new();
        let long = Tar::new().pax(&[("path", name.as_bytes())]).file("harmless", b"x").end();
        place.refuses(&long, &[name]);
        let gnu = Tar::new().member(b'L', "long", "", name.as_bytes()).file("harmless", b"").end();
        place.refuses(&gnu, &[name]);
    }
}

#[test]
fn absolute_names_and_dots_within_are_below_the_root() {
    let place = Place::new();
    let secret = place.outside().join("secret");
    let archive = Tar::new().file(secret.to_str().unwrap(), b"x").file("a/b/../c/./d", b"y").end();
    place.unpack(&archive).unwrap();
    let inside = place.root().join(secret.strip_prefix("/").unwrap());
    assert_eq!(fs::read(inside).unwrap(), b"x");
    assert_eq!(fs::read(place.root().join("a/c/d")).unwrap(), b"y");
}

#[test]
fn links_to_directories_are_followed_within_the_root() {
    let place = Place::new();
    let outside = place.outside();
    let up = "../../../../../../../../..";
    for (index, target) in [outside.to_str().unwrap(), up, "/", "a/../../.."].iter().enumerate() {
        let link = format!("link{index}");
        let archive = Tar::new().symlink(&link, target);
        let archive = archive.file(&format!("{link}/secret"), b"x");
        let archive = archive.directory(&format!("{link}/directory{index}"));
        place.unpack(&archive.end()).unwrap();
    }
    // The same with a link that a layer below left.
    symlink(&outside, place.root().join("below")).unwrap();
    let archive = Tar::new().file("below/secret", b"y").file("below/new", b"y").end();
    place.unpack(&archive).unwrap();
    let inside = place.root().join(outside.strip_prefix("/").unwrap());
    assert_eq!(fs::read(inside.join("new")).unwrap(), b"y");
    assert!(place.root().join("directory1").is_dir());
    assert!(place.root().join("directory3").is_dir());
}

#[test]
fn relative_links_within_the_root_work() {
    let place = Place::new();
    let archive = Tar::new()
        .directory("usr/lib/")
        .symlink("lib", "usr/lib")
        .symlink("usr/up", "../var/./log")
        .file("lib/x", b"x")
        .file("usr/up/y", b"y")
        .link("z", "lib/x");
    place.unpack(&archive.end()).unwrap();
    let expected = "lib usr/ usr/lib/ usr/lib/x usr/up var/ var/log/ var/log/y z";
    assert_eq!(paths(&place.root()), expected);
    let inode = |path: &str| place.root().join(path).metadata().unwrap().ino();
    assert_eq!(inode("z"), inode("usr/lib/x"));
}

#[test]
fn hard_links_reach_nothing_outside() {
    let place = Place::new();
    let secret = place.outside().join("secret");
    place.refuses(&Tar::new().link("l", "../outside/secret").end(), &["`l`", "leads out"]);
    place.refuses(&Tar::new().link("l", secret.to_str().unwrap()).end(), &["`l`"]);
    let through = Tar::new().symlink("s", "../outside").link("l", "s/secret").end();
    place.refuses(&through, &["`l`", "does not exist"]);
    // A link to a link is the link itself, and a file in its place does not go through it.
    let itself = Tar::new()
        .symlink("t", secret.to_str().unwrap())
        .link("l", "t")
        .file("l", b"overwritten")
        .file("t", b"overwritten");
    place.unpack(&itself.end()).unwrap();
    assert!(place.root().join("l").symlink_metadata().unwrap().is_file());
    place.refuses(&Tar::new().directory("d").link("l", "d").end(), &["`l`", "directory"]);
    place.refuses(&Tar::new().link("l", "").end(), &["`l`", "directory"]);
}

#[test]
fn attributes_are_set_on_links_and_not_through_them() {
    let place = Place::new();
    let secret = place.outside().join("secret");
    let secret = secret.to_str().unwrap();
    let mut header = Tar::header(b'2', "s", secret, 0);
    header.set_uid(12);
    header.set_mode(0o777);
    let archive =
        Tar::new().pax(&[("SCHILY.xattr.trusted.x", b"1"), ("SCHILY.xattr.user.x", b"1")]);
    place.unpack(&archive.with(header, b"").end()).unwrap();
    let link = place.root().join("s");
    assert_eq!(link.symlink_metadata().unwrap().uid(), 12);
    assert_eq!(support::xattrs(&link).len(), 1);
}

#[test]
fn whiteouts_reach_nothing_outside() {
    for name in [".wh...", ".wh..", "a/.wh..."] {
        let place = Place::new();
        place.refuses(&Tar::new().directory("a").file(name, b"").end(), &[name, "leads out"]);
    }
    let place = Place::new();
    place.refuses(&Tar::new().file(".wh.", b"").end(), &[".wh."]);
    let through = Tar::new()
        .symlink("s", place.outside().to_str().unwrap())
        .file("s/.wh.secret", b"")
        .file("s/.wh..wh..opq", b"")
        .symlink("up", "..")
        .file("up/.wh.outside", b"")
        .file("up/outside/.wh..wh..opq", b"");
    place.unpack(&through.end()).unwrap();
    // A link is removed itself; a directory that holds one does not take its target along.
    fs::create_dir(place.root().join("lower")).unwrap();
    symlink(place.outside(), place.root().join("lower/s")).unwrap();
    place.unpack(&Tar::new().file(".wh.s", b"").file(".wh.lower", b"").end()).unwrap();
    assert!(!place.root().join("lower").exists());
    assert!(place.root().join("s").symlink_metadata().is_err());
}

#[test]
fn a_loop_of_links_ends() {
    let place = Place::new();
    let archive = Tar::new().symlink("a", "b").symlink("b", "a").file("a/x", b"").end();
    place.refuses(&archive, &["`a/x`", "40 links"]);
    let itself = Tar::new().symlink("c", "c/c/c/c").file("c/x", b"").end();
    place.refuses(&itself, &["`c/x`", "40 links"]);
}

#[test]
fn what_cannot_be_made_is_refused_by_name() {
    let place = Place::new();
    place.refuses(&Tar::new().file("./", b"x").end(), &["`./`", "root"]);
    place.refuses(&Tar::new().symlink("a/..", "x").end(), &["`a/..`", "root"]);
    place.refuses(&Tar::new().file("f", b"").file("f/x", b"").end(), &["`f/x`", "not a directory"]);
    place.refuses(&Tar::new().member(b'M', "volume", "", b"").end(), &["volume", "0x4d"]);
    let mut header = Tar::header(b'0', "owner", "", 0);
    header.set_uid(u64::from(u32::MAX));
    place.refuses(&Tar::new().with(header, b"").end(), &["owner"]);
    let sparse = Tar::new().pax(&[("GNU.sparse.major", b"1")]).file("sparse", b"").end();
    place.refuses(&sparse, &["`sparse`", "--sparse"]);
    let name = "x".repeat(256);
    let long = Tar::new().pax(&[("path", name.as_bytes())]).file("x", b"").end();
    place.refuses(&long, &[&name[..200], "too long"]);
}

#[test]
fn names_with_a_nul_or_without_bounds_are_refused() {
    let place = Place::new();
    let archive = Tar::new().pax(&[("path", b"a\0b")]).file("x", b"").end();
    place.refuses(&archive, &["a\\x00b", "NUL"]);
    let archive = Tar::new().pax(&[("linkpath", b"a\0b")]).symlink("x", "y").end();
    place.refuses(&archive, &["a\\x00b", "NUL"]);
    let deep = "d/".repeat(2_048);
    let archive = Tar::new().pax(&[("path", deep.as_bytes())]).directory("x").end();
    place.refuses(&archive, &["4096 bytes", "limit"]);
}

#[test]
fn a_deep_tree_is_made_and_removed() {
    let place = Place::new();
    let deep = "d/".repeat(2_000);
    let archive = Tar::new().pax(&[("path", deep.as_bytes())]).directory("x");
    place.unpack(&archive.clone().end()).unwrap();
    let packed = support::pack(None, &place.root()).unwrap();
    assert!(packed.len() > 2_000 * 512);
    place.unpack(&Tar::new().file(".wh.d", b"").end()).unwrap();
    assert_eq!(paths(&place.root()), "");
}

#[test]
fn a_wide_tree_is_removed_while_it_is_listed() {
    let place = Place::new();
    // More than the kernel lists in one call.
    for index in 0..600 {
        let name = format!("lower/{index}-{}", "n".repeat(100));
        fs::create_dir_all(place.root().join(&name)).unwrap();
        fs::write(place.root().join(&name).with_extension("file"), "").unwrap();
    }
    let archive = Tar::new().file("lower/own", b"").file("lower/.wh..wh..opq", b"");
    place.unpack(&archive.end()).unwrap();
    assert_eq!(paths(&place.root()), "lower/ lower/own");
}

#[test]
fn impossible_sizes_end_early() {
    let place = Place::new();
    for size in [1 << 32, 1 << 62, i64::MAX.unsigned_abs()] {
        let header = Tar::header(b'0', "huge", "", size);
        place.refuses(&Tar::new().with(header, b"x").end(), &["truncated"]);
    }
    let minus = Tar::new().pax(&[("size", b"-1")]).file("x", b"").end();
    place.refuses(&minus, &["number"]);
    for kind in [b'x', b'L', b'K', b'g'] {
        let header = Tar::header(kind, "huge", "", 1 << 40);
        place.refuses(&Tar::new().with(header, b"x").end(), &["over the limit"]);
    }
    let extensions = Tar::new().member(b'L', "long", "", &vec![b'x'; 1 << 20]);
    let many =
        (0..8).fold(Tar::new(), |tar, _| tar.raw(&extensions.clone().end()[..(1 << 20) + 512]));
    place.refuses(&many.end(), &["over the limit"]);
}

#[test]
fn a_stream_that_ends_anywhere_too_early_is_refused() {
    let archive = Tar::new()
        .directory("d")
        .pax(&[("mtime", b"1.5")])
        .file("d/x", b"content")
        .symlink("s", "d")
        .end();
    let whole = archive.len();
    for length in (0..whole - 512).step_by(64).chain([whole - 513, whole - 511, whole - 1]) {
        let place = Place::new();
        let recording = place.folder.path().join("root/recording");
        let result =
            slackwater_archive::unpack(&archive[..length], &place.root(), Some(&recording));
        let error = result.expect_err("a truncated archive was accepted");
        assert!(
            matches!(error, ArchiveError::Truncated { offset } if offset == length as u64),
            "{error}"
        );
        assert!(!paths(&place.root()).contains("recording"), "a recording was left");
    }
    for length in [whole - 512, whole] {
        Place::new().unpack(&archive[..length]).unwrap();
    }
}

#[test]
fn damaged_headers_are_refused() {
    let archive = Tar::new().file("name", b"content").file("other", b"").end();
    for at in [0, 100, 130, 150, 156, 300, 1024, 1124] {
        let mut damaged = archive.clone();
        damaged[at] ^= 1;
        let place = Place::new();
        place.refuses(&damaged, &[&format!("byte {}", at / 512 * 512), "corrupt"]);
    }
    let mut lone = Tar::new().file("name", b"").end();
    lone[512 + 512 + 7] = 1;
    Place::new().refuses(&lone, &["lone block"]);
    let pending = Tar::new().pax(&[("path", b"x")]).end();
    Place::new().refuses(&pending, &["without its member"]);
    let records = Tar::new().member(b'x', "pax", "", b"9 path=x\n9").file("x", b"").end();
    Place::new().refuses(&records, &["malformed"]);
}

fn junk() -> impl Strategy<Value = Vec<u8>> {
    let archive = Tar::new()
        .directory("d")
        .pax(&[("mtime", b"1.5"), ("path", b"d/long")])
        .file("d/x", b"content")
        .symlink("s", "../outside")
        .link("l", "d/long")
        .file("s/.wh.secret", b"")
        .end();
    let reference = slackwater_archive::Reference {
        store_id: "store".to_owned(),
        snapshot_id: uuid::Uuid::nil(),
        size_bytes: 1,
        mac: Some("01".repeat(32).parse().unwrap()),
    };
    let reference = reference.to_archive();
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    let damaged =
        (prop::sample::select(vec![archive, reference]), damage).prop_map(|(mut bytes, damage)| {
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
                // With its checksum set right again, the fields are looked at.
                let block = at / 512 * 512;
                bytes[block + 148..block + 156].fill(b' ');
                let sum: u32 = bytes[block..block + 512].iter().map(|byte| u32::from(*byte)).sum();
                let text = format!("{sum:06o}\0 ");
                bytes[block + 148..block + 156].copy_from_slice(text.as_bytes());
            }
            bytes
        });
    prop_oneof![prop::collection::vec(any::<u8>(), 0..3_000), damaged]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn junk_harms_nothing(bytes in junk()) {
        let _ = recognise(&bytes[..]);
        let place = Place::new();
        // Checks the outside; whether the archive is accepted is up to the damage.
        let _ = place.unpack(&bytes);
        prop_assert!(Path::new(&place.root()).is_dir());
    }
}

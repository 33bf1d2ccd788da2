//! Directories that change while they are read.

use std::sync::Arc;

use super::*;
use crate::disk::MemoryDisk;
use crate::name::FilePath;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::{World, options};

/// An empty page is taken for the end of the directory.
#[test]
fn a_page_whose_entries_go_while_it_is_read_hides_none_of_those_behind() {
    let hook = Hook::default();
    let core = hooked::open((Arc::default(), MemoryDisk::new()), options(1 << 20), &hook);
    let path = |text: &str| FilePath::parse(text).unwrap();
    for name in ["a", "b", "c"] {
        paths::create_file(&core, &path(name), 0).unwrap();
    }
    let other = Arc::clone(&core);
    hook.set(During::ScanDirectory, move || {
        for name in ["a", "b"] {
            let name = path(name).split().1.clone();
            remove(&other, InodeId::ROOT, &name, Removal::Any).unwrap();
        }
    });
    let page = read_directory(&core, InodeId::ROOT, 0, 2).unwrap();
    assert!(!hook.is_set());
    let names: Vec<&[u8]> = page.entries.iter().map(|entry| entry.name.as_bytes()).collect();
    assert_eq!((names, page.end), (vec![&b"c"[..]], true));
}

fn inode(core: &Core, text: &str) -> InodeId {
    paths::resolve(core, &FilePath::parse(text).unwrap()).unwrap()
}

fn place(directory: InodeId, name: &str) -> Place {
    (directory, Name::new(name.as_bytes()).unwrap())
}

/// Directories of the root, and files in them.
fn with_directories(names: &[&str]) -> World {
    let world = World::new(options(1 << 20), None);
    for name in names {
        world.create(&format!("{name}/file"));
    }
    world
}

/// Others wait for a commit: what takes as long as directories are deep is done before it.
#[test]
fn the_ancestors_of_a_directory_are_not_looked_up_in_a_commit() {
    let world = with_directories(&["a/b/c", "d"]);
    let core = &world.core;
    let [a, b, c, d] = ["a", "a/b", "a/b/c", "d"].map(|path| inode(core, path));
    let (from, to) = (place(InodeId::ROOT, "d"), place(c, "d"));
    let ancestry = Ancestry::look(core, &from, to.0).unwrap();
    // Of one that is looked up no more the record cannot be read.
    let key = key::inode(a);
    let record = core.inode(a).unwrap().encode();
    world.kv.tamper(Family::Inode, &key, Some(vec![0xff]));
    let done = core.commit(move |txn| rename_once(txn, &(from, to), &ancestry)).unwrap();
    assert!(done.is_some());
    assert_eq!(inode(core, "a/b/c/d"), d);
    // Nor before it, in its own directory.
    rename(core, place(b, "c"), place(b, "e"), None).unwrap();
    assert_eq!(inode(core, "a/b/e"), c);
    world.kv.tamper(Family::Inode, &key, Some(record));
    world.check();
}

/// Two that are moved into each other would be a circle that nobody finds any more.
#[test]
fn a_directory_that_came_below_another_since_is_not_moved_into_it() {
    let world = with_directories(&["a", "b"]);
    let core = &world.core;
    let [a, b] = ["a", "b"].map(|path| inode(core, path));
    let a_into_b = || (place(InodeId::ROOT, "a"), place(b, "a"));
    let b_into_a = || (place(InodeId::ROOT, "b"), place(a, "b"));
    let look = |(from, to): (Place, Place)| Ancestry::look(core, &from, to.0).unwrap();
    // In the same commit.
    let looks = (look(a_into_b()), look(b_into_a()));
    let (one, other) = (a_into_b(), b_into_a());
    let done = core.commit(move |txn| {
        let first = rename_once(txn, &one, &looks.0)?;
        Ok((first, rename_once(txn, &other, &looks.1)?))
    });
    let (first, second) = done.unwrap();
    assert!(first.is_some() && second.is_none());
    // Before it, while the other was looked up; and back.
    let (from, to) = a_into_b();
    rename(core, to, from, None).unwrap();
    let old = look(b_into_a());
    let (from, to) = a_into_b();
    rename(core, from, to, None).unwrap();
    let places = b_into_a();
    assert!(core.commit(move |txn| rename_once(txn, &places, &old)).unwrap().is_none());
    let (from, to) = b_into_a();
    let error = rename(core, from, to, None).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
    assert_eq!(inode(core, "b/a"), a);
    world.check();
}

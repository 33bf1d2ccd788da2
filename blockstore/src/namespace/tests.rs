//! Directories that change while they are read.

use std::sync::Arc;

use super::*;
use crate::disk::MemoryDisk;
use crate::name::FilePath;
use crate::testing::hooked::{self, During, Hook};
use crate::testing::options;

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

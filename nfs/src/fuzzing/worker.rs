//! A hostile worker: it mounts by its secret and sends calls of any kind. Files of others stay as they are, and none of
//! their content is in any reply.

use std::sync::Arc;

use bytes::Bytes;
use slackwater_blockstore::{
    Attributes, FilePath, InodeId, Result as StoreResult, SnapshotId, Source, Stability, Store,
};
use uuid::Uuid;

use super::{Service, Words};
use crate::handle::Target;
use crate::scope::{MountGate, MountScope, Mounter};

const OWN: &[u8] = b"11111111-1111-4111-8111-111111111111";
const OTHER: &[u8] = b"22222222-2222-4222-8222-222222222222";

/// What the files of others hold, again and again; no call writes it.
const MARK: &[u8] = b"of another worker, or of none!!!";

const WORDS: Words = Words {
    names: &[
        b"a",
        b"b",
        b".",
        b"..",
        b".snapshot",
        b"workers",
        OWN,
        OTHER,
        b"foreign",
        b"disk",
        b".worker",
        b".export",
        b"a/b",
        b"",
        &[b'n'; 255],
    ],
    mounts: &[
        b"/slackwater/.worker/right",
        b"/slackwater/.worker/right/workers/11111111-1111-4111-8111-111111111111",
        b"/slackwater/.worker/right/workers/22222222-2222-4222-8222-222222222222",
        b"/slackwater/.worker/right/foreign",
        b"/slackwater/.worker/wrong",
        b"/slackwater/.export/right",
        b"/slackwater/.export/right/foreign",
    ],
};

const SCOPE: MountScope =
    MountScope::Worker(Uuid::from_u128(0x1111_1111_1111_4111_8111_1111_1111_1111));

#[derive(Debug)]
struct Gate;

impl MountGate for Gate {
    fn enter(&self, secret: &[u8], _: Mounter) -> Option<MountScope> {
        (secret == b"right").then_some(SCOPE)
    }

    fn is_admitted(&self, scope: MountScope) -> bool {
        scope == SCOPE
    }

    fn reads_snapshot(&self, _: Uuid, _: SnapshotId) -> StoreResult<bool> {
        Ok(true)
    }
}

/// A file or directory of others: what it is, its names or its content.
#[derive(Debug, PartialEq, Eq)]
struct Foreign {
    attributes: Attributes,
    names: Vec<Vec<u8>>,
    content: Vec<u8>,
}

/// A session of calls by a worker.
///
/// # Panics
/// Where a file of others is read or changed, and where [`super::calls`] does.
pub fn worker_calls(bytes: &[u8]) {
    let service = Service::new(Some(Arc::new(Gate)));
    let store = Arc::clone(&service.shared.store);
    let paths = files(&store);
    let before: Vec<Foreign> = paths.iter().map(|path| foreign(&store, path)).collect();
    let handles = [Target::WorkerRoot, Target::WorkersDirectory, own_directory(&store)];
    let handles =
        handles.map(|target| service.shared.handles.encode(target, Some(SCOPE)).to_vec()).to_vec();
    service.session(bytes, handles, WORDS, |reply| {
        let is_marked = reply.windows(MARK.len()).any(|part| part == MARK);
        assert!(!is_marked, "content of others in a reply");
    });
    let after: Vec<Foreign> = paths.iter().map(|path| foreign(&store, path)).collect();
    assert_eq!(before, after, "files of others");
    drop(store);
    service.end();
}

fn own_directory(store: &Store) -> Target {
    let path = [b"workers/", OWN].concat();
    let Attributes { inode, generation, .. } =
        foreign(store, &String::from_utf8_lossy(&path)).attributes;
    Target::Inode { inode, generation }
}

/// Makes a file of the worker, and those of others; returns the paths that are not the worker's.
fn files(store: &Store) -> Vec<String> {
    let [own, other] = [OWN, OTHER].map(|id| format!("workers/{}", String::from_utf8_lossy(id)));
    made(store, &format!("{own}/disk"), b"own");
    let [disk, alone] = [format!("{other}/disk"), "foreign/disk".to_owned()];
    for path in [&disk, &alone] {
        made(store, path, &MARK.repeat(256));
    }
    vec![String::new(), "workers".to_owned(), other, disk, "foreign".to_owned(), alone]
}

fn made(store: &Store, path: &str, content: &[u8]) {
    let path = match FilePath::parse(path) {
        Ok(path) => path,
        Err(error) => panic!("{path}: {error}"),
    };
    if let Err(error) = store.create_file(&path, 1 << 20) {
        panic!("a new file: {error}");
    }
    let inode = find(store, path.names().iter()).inode;
    let content = Bytes::copy_from_slice(content);
    if let Err(error) = store.write(inode, 0, content, Stability::FileSync) {
        panic!("its content: {error}");
    }
}

fn find<'n>(
    store: &Store,
    names: impl Iterator<Item = &'n slackwater_blockstore::Name>,
) -> Attributes {
    let root = store.attributes(InodeId::ROOT);
    let found = names.fold(root, |directory, name| store.lookup(directory?.inode, name));
    match found {
        Ok(found) => found,
        Err(error) => panic!("a file that was made: {error}"),
    }
}

fn foreign(store: &Store, path: &str) -> Foreign {
    let path = if path.is_empty() { None } else { FilePath::parse(path).ok() };
    let attributes = find(store, path.iter().flat_map(|path| path.names().iter()));
    let names = store.read_directory(attributes.inode, 0, 1000).map_or_else(
        |_| Vec::new(),
        |page| page.entries.iter().map(|entry| entry.name.as_bytes().to_vec()).collect(),
    );
    let content = store
        .read(Source::File(attributes.inode), 0, 1 << 20)
        .map_or_else(|_| Vec::new(), |reply| reply.to_vec());
    Foreign { attributes, names, content }
}

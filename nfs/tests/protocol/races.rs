//! What others do between a call's decision and its change.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::{Batch, Family, Kv, KvRead, MemoryKv, Visit};
use slackwater_blockstore::{InodeId, Name, Options, Result, SetAttributes, Store};

use crate::common::client::{Client, Cred, proc};
use crate::common::{Args, Server, SetAttr, root_options, status};

type Work = Box<dyn FnOnce() + Send>;

/// A family and the end of a key in it.
type Looked = (Family, Vec<u8>);

/// An index that does something behind the next look-up of such a key, once.
#[derive(Default)]
struct HookedKv {
    kv: MemoryKv,
    hook: Mutex<Option<(Looked, Work)>>,
}

impl fmt::Debug for HookedKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HookedKv")
    }
}

impl KvRead for HookedKv {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let found = self.kv.get(family, key);
        let work = {
            let mut hook = self.hook.lock();
            let strikes =
                hook.as_ref().is_some_and(|((of, end), _)| *of == family && key.ends_with(end));
            if strikes { hook.take() } else { None }
        };
        if let Some((_, work)) = work {
            work();
        }
        found
    }

    fn last_at_or_before(
        &self,
        family: Family,
        bounds: (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        self.kv.last_at_or_before(family, bounds, is_wanted)
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        self.kv.scan(family, from, to, visit)
    }
}

impl Kv for HookedKv {
    fn apply(&self, batch: &Batch) -> Result<()> {
        self.kv.apply(batch)
    }

    fn flush(&self) -> Result<()> {
        self.kv.flush()
    }

    fn compact(&self) -> Result<()> {
        self.kv.compact()
    }

    fn view(&self) -> Box<dyn KvRead + '_> {
        self.kv.view()
    }

    fn disk_bytes(&self) -> u64 {
        self.kv.disk_bytes()
    }

    fn memory_bytes(&self) -> u64 {
        self.kv.memory_bytes()
    }
}

fn name(text: &[u8]) -> Name {
    Name::new(text).unwrap()
}

/// A root directory that all may write, sticky; in it `x` of user 10 and `theirs` of user 20, who
/// is the client.
struct Fixture {
    kv: Arc<HookedKv>,
    server: Server,
    store: Arc<Store>,
    root: Vec<u8>,
    client: Client,
}

impl Fixture {
    async fn new() -> Self {
        let kv = Arc::new(HookedKv::default());
        let mut options = Options::new("unused");
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        options.background = false;
        let index: Arc<dyn Kv> = Arc::<HookedKv>::clone(&kv);
        let store = Store::open_with(index, Arc::new(MemoryDisk::default()), options).unwrap();
        let server = Server::over_store(Arc::clone(&store), root_options());
        let mut first = server.client().await;
        let root = first.root().await;
        first.setattr(&root, &SetAttr::mode(0o1777)).await.unwrap();
        for (file, uid) in [(&b"x"[..], 10), (b"theirs", 20)] {
            let mut owner = server.client().await.with(Cred::user(uid, uid));
            let file = owner.create(&root, file).await.unwrap();
            owner.write(&file, 0, b"content", 2).await.unwrap();
        }
        let client = first.with(Cred::user(10, 10));
        Self { kv, server, store, root, client }
    }

    /// Has `work` done behind the next look-up of such a key.
    fn hook(&self, key: Looked, work: impl FnOnce(&Store) + Send + 'static) {
        let store = Arc::clone(&self.store);
        *self.kv.hook.lock() = Some((key, Box::new(move || work(&store))));
    }

    fn is_hooked(&self) -> bool {
        self.kv.hook.lock().is_some()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_the_place_of_a_callers_own_file_is_not_taken_for_it() {
    for procedure in [proc::REMOVE, proc::RENAME, proc::CREATE] {
        let mut fixture = Fixture::new().await;
        fixture.hook((Family::Dirent, b"x".to_vec()), |store| {
            for (from, to) in [(&b"x"[..], &b"aside"[..]), (b"theirs", b"x")] {
                store.rename(InodeId::ROOT, &name(from), InodeId::ROOT, &name(to)).unwrap();
            }
        });
        let root = fixture.root.clone();
        let x = Args::new().place(&root, b"x");
        let arguments = match procedure {
            proc::RENAME => x.place(&root, b"y"),
            proc::CREATE => x.u32(0).set(&SetAttr { size: Some(0), ..SetAttr::default() }),
            _ => x,
        };
        let (got, _) = fixture.client.nfs(procedure, &arguments).await;
        assert_eq!(got, status::ACCES, "{procedure}");
        assert!(!fixture.is_hooked());
        let found = fixture.server.store.lookup(InodeId::ROOT, &name(b"x")).unwrap();
        assert_eq!((found.uid, found.size_bytes), (20, 7), "{procedure}");
    }
}

/// Root's chown takes set-id bits from the mode: that of the moment, and nothing that its owner just set is undone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_owner_goes_by_the_mode_that_it_finds() {
    for (before, by_owner, expected) in [(0o4755, 0o600, 0o600), (0o755, 0o4755, 0o755)] {
        let mut fixture = Fixture::new().await;
        let root = fixture.root.clone();
        let file = fixture.client.lookup(&root, b"x").await.unwrap();
        fixture.client.setattr(&file, &SetAttr::mode(before)).await.unwrap();
        let inode = fixture.store.lookup(InodeId::ROOT, &name(b"x")).unwrap().inode;
        fixture.hook((Family::Inode, inode.get().to_be_bytes().to_vec()), move |store| {
            let set = SetAttributes { mode: Some(by_owner), ..SetAttributes::default() };
            store.set_attributes(inode, &set, None).unwrap();
        });
        let mut superuser = fixture.server.client().await;
        let give = SetAttr { uid: Some(20), ..SetAttr::default() };
        superuser.setattr(&file, &give).await.unwrap();
        assert!(!fixture.is_hooked());
        let found = fixture.store.attributes(inode).unwrap();
        assert_eq!((found.uid, found.mode), (20, expected), "{by_owner:o}");
    }
}

/// Its new owner would find it with the set-user-id bit, and a content that is not his.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_given_away_is_no_longer_its_old_owners() {
    let mut fixture = Fixture::new().await;
    let root = fixture.root.clone();
    let file = fixture.client.lookup(&root, b"x").await.unwrap();
    let inode = fixture.store.lookup(InodeId::ROOT, &name(b"x")).unwrap().inode;
    fixture.hook((Family::Inode, inode.get().to_be_bytes().to_vec()), move |store| {
        let give = SetAttributes { uid: Some(0), ..SetAttributes::default() };
        store.set_attributes(inode, &give, None).unwrap();
    });
    let refused = fixture.client.setattr(&file, &SetAttr::mode(0o4755)).await;
    assert_eq!(refused.err(), Some(status::PERM));
    assert!(!fixture.is_hooked());
    let found = fixture.store.attributes(inode).unwrap();
    assert_eq!((found.uid, found.mode), (0, 0o644));
}

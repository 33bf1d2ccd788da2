//! READDIR and READDIRPLUS.

use std::collections::{BTreeMap, BTreeSet};

use slackwater_blockstore::{CreateMode, InodeId, Name, SetAttributes};

use crate::common::client::proc;
use crate::common::{Args, Client, Fattr, Server, status};

/// An entry of a page.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    fileid: u64,
    pub(super) name: Vec<u8>,
    cookie: u64,
    attributes: Option<Fattr>,
    pub(super) handle: Option<Vec<u8>>,
}

/// A page, and whether it is the last.
struct Page {
    entries: Vec<Entry>,
    is_end: bool,
}

async fn page(
    client: &mut Client,
    directory: &[u8],
    cookie: u64,
    is_plus: bool,
    count: u32,
) -> Result<Page, u32> {
    let args = Args::new().opaque(directory).u64(cookie).u64(0);
    let (procedure, args) = if is_plus {
        (proc::READDIRPLUS, args.u32(count / 4).u32(count))
    } else {
        (proc::READDIR, args.u32(count))
    };
    let (got, mut body) = client.nfs(procedure, &args).await;
    let size = body.left();
    assert!(body.post_op().is_some());
    if got != status::OK {
        body.end();
        return Err(got);
    }
    assert!(size <= usize::try_from(count).unwrap(), "{size} bytes for a count of {count}");
    assert_eq!(body.u64(), 0, "cookie verifier");
    let mut entries = Vec::new();
    while body.bool() {
        entries.push(Entry {
            fileid: body.u64(),
            name: body.opaque(),
            cookie: body.u64(),
            attributes: if is_plus { body.post_op() } else { None },
            handle: if is_plus { body.post_op_handle() } else { None },
        });
    }
    let is_end = body.bool();
    body.end();
    Ok(Page { entries, is_end })
}

pub(super) async fn all(
    client: &mut Client,
    directory: &[u8],
    is_plus: bool,
    count: u32,
) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    loop {
        let cookie = entries.last().map_or(0, |last| last.cookie);
        let page = page(client, directory, cookie, is_plus, count).await.unwrap();
        assert!(!page.entries.is_empty() || page.is_end, "no empty page but the last");
        entries.extend(page.entries);
        if page.is_end {
            return entries;
        }
    }
}

#[tokio::test]
async fn a_small_directory_in_pages_of_every_size() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let directory = client.mkdir(&root, b"directory", 0o755).await.unwrap();
    let mut expected = BTreeMap::new();
    for length in 1..12 {
        let name = vec![b'a' + u8::try_from(length).unwrap(); length];
        expected.insert(name.clone(), client.create(&directory, &name).await.unwrap());
    }
    let own = client.getattr(&directory).await.unwrap();
    let parent = client.getattr(&root).await.unwrap();
    for is_plus in [false, true] {
        let smallest = if is_plus { 300 } else { 150 };
        for count in smallest..smallest + 300 {
            let entries = all(&mut client, &directory, is_plus, count).await;
            let head =
                [(&entries[0], b".".to_vec(), 1, own), (&entries[1], b"..".to_vec(), 2, parent)];
            for (entry, name, cookie, attributes) in head {
                assert_eq!((&entry.name, entry.cookie), (&name, cookie));
                assert_eq!(entry.fileid, attributes.fileid);
            }
            let names: BTreeSet<_> = entries[2..].iter().map(|entry| entry.name.clone()).collect();
            assert_eq!(names, expected.keys().cloned().collect(), "count {count}");
            assert_eq!(entries.len(), expected.len() + 2, "each once");
            assert!(entries.windows(2).all(|pair| pair[0].cookie < pair[1].cookie));
            for entry in entries.iter().skip(2).filter(|_| is_plus) {
                assert_eq!(entry.handle.as_ref(), expected.get(&entry.name));
                assert_eq!(entry.attributes.unwrap().fileid, entry.fileid);
            }
        }
    }
}

#[tokio::test]
async fn a_count_that_holds_no_entry_is_too_small() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let name = [b'n'; 255];
    client.create(&root, &name).await.unwrap();
    // Attributes 88, verifier 8, end 8; `.` takes 28 bytes, in READDIRPLUS 144 more.
    for (is_plus, exact) in [(false, 104 + 28), (true, 104 + 28 + 88 + 4 + 52)] {
        assert_eq!(page(&mut client, &root, 0, is_plus, 0).await.err(), Some(status::TOOSMALL));
        let below = page(&mut client, &root, 0, is_plus, exact - 1).await;
        assert_eq!(below.err(), Some(status::TOOSMALL), "READDIRPLUS {is_plus}");
        let fits = page(&mut client, &root, 0, is_plus, exact).await.unwrap();
        assert_eq!((fits.entries.len(), fits.is_end), (1, false));
        let long = exact - 4 + 256;
        let below = page(&mut client, &root, 2, is_plus, long - 1).await;
        assert_eq!(below.err(), Some(status::TOOSMALL));
        let fits = page(&mut client, &root, 2, is_plus, long).await.unwrap();
        assert_eq!((fits.entries.len(), fits.is_end), (1, true));
    }
}

#[tokio::test]
async fn dircount_bounds_the_names_of_a_page() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    for number in 0..50 {
        client.create(&root, format!("{number:04}").as_bytes()).await.unwrap();
    }
    let args = |dircount| Args::new().opaque(&root).u64(2).u64(0).u32(dircount).u32(65536);
    for (dircount, expected) in [(24 * 10, 10), (24 * 10 + 23, 10), (1, 1), (65536, 50)] {
        let (got, mut body) = client.nfs(proc::READDIRPLUS, &args(dircount)).await;
        assert_eq!(got, status::OK);
        body.post_op();
        body.u64();
        let mut entries = 0;
        while body.bool() {
            body.u64();
            body.opaque();
            body.u64();
            assert!(body.post_op().is_some() && body.post_op_handle().is_some());
            entries += 1;
        }
        assert_eq!(entries, expected, "dircount {dircount}");
    }
}

#[tokio::test]
async fn short_names_fill_a_page_to_its_end() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let names: BTreeSet<_> = (0..300_u32).map(|number| number.to_string().into_bytes()).collect();
    for name in &names {
        client.create(&root, name).await.unwrap();
    }
    let whole = page(&mut client, &root, 0, true, 64 << 10).await.unwrap();
    assert!(whole.is_end);
    let dots = [&b"."[..], b".."];
    let listed = whole.entries.iter().map(|entry| entry.name.clone());
    let listed: BTreeSet<_> = listed.filter(|name| !dots.contains(&&name[..])).collect();
    assert!(listed == names);
    // Of all sizes around what a step of the store's holds, and what is left behind it.
    for count in (40_000..52_000).step_by(97) {
        let first = page(&mut client, &root, 0, true, count).await.unwrap();
        let last = first.entries.last().unwrap().cookie;
        let rest = page(&mut client, &root, last, true, 64 << 10).await.unwrap();
        assert_eq!(first.entries.len() + rest.entries.len(), names.len() + dots.len(), "{count}");
        assert!(rest.is_end && first.is_end == rest.entries.is_empty(), "{count}");
    }
}

#[tokio::test]
async fn only_directories_are_listed() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let file = client.create(&root, b"file").await.unwrap();
    for is_plus in [false, true] {
        assert_eq!(page(&mut client, &file, 0, is_plus, 4096).await.err(), Some(status::NOTDIR));
    }
    let after = page(&mut client, &root, u64::MAX, false, 4096).await.unwrap();
    assert!(after.entries.is_empty() && after.is_end, "no cookie is ever bad");
}

const MANY: u64 = 100_000;
const MAKERS: u64 = 64;

/// Makes the entries straight in the store, from several threads that share their syncs.
async fn fill(server: &Server, directory: InodeId) {
    let mut makers = Vec::new();
    for maker in 0..MAKERS {
        let store = std::sync::Arc::clone(&server.store);
        makers.push(tokio::task::spawn_blocking(move || {
            for number in (maker..MANY).step_by(usize::try_from(MAKERS).unwrap()) {
                let name = Name::new(name_of(number).as_bytes()).unwrap();
                let set = SetAttributes { mode: Some(0o644), ..SetAttributes::default() };
                store.create(directory, &name, CreateMode::Guarded, &set).unwrap();
            }
        }));
    }
    for maker in makers {
        maker.await.unwrap();
    }
}

fn name_of(number: u64) -> String {
    format!("entry-{number:06}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_entries_come_once_each_while_others_come_and_go() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let root = client.root().await;
    let directory = client.mkdir(&root, b"many", 0o755).await.unwrap();
    let inode = client.getattr(&directory).await.unwrap().fileid;
    fill(&server, InodeId::new(inode)).await;
    let staying: BTreeSet<Vec<u8>> = (0..MANY)
        .filter(|number| number % 1000 != 7)
        .map(|number| name_of(number).into_bytes())
        .collect();
    for is_plus in [false, true] {
        let mut seen = BTreeSet::new();
        let mut cookie = 0;
        let mut pages = 0_u64;
        loop {
            let page = page(&mut client, &directory, cookie, is_plus, 1 << 20).await.unwrap();
            for entry in &page.entries {
                assert!(entry.cookie > cookie, "cookies grow");
                cookie = entry.cookie;
                assert!(seen.insert(entry.name.clone()), "{:?} twice", entry.name);
            }
            if page.is_end {
                break;
            }
            // Between the pages an entry goes (often one not seen yet) and two come, one of
            // which goes again.
            let gone = (pages * 1000 + 7) % MANY;
            client.remove(&directory, name_of(gone).as_bytes()).await.ok();
            let name = |kind: &str| format!("{kind}-{is_plus}-{pages}").into_bytes();
            client.create(&directory, &name("new")).await.unwrap();
            client.create(&directory, &name("passing")).await.unwrap();
            client.remove(&directory, &name("passing")).await.unwrap();
            pages += 1;
        }
        assert!(pages > 20, "{pages} pages");
        let missing: Vec<_> = staying.difference(&seen).take(3).collect();
        assert!(missing.is_empty(), "entries that were there all the time: {missing:?}");
    }
}

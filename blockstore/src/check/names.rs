//! I7, and what belongs to it: directories, cookies, link counts, snapshots' keys.

use std::collections::{HashMap, HashSet};

use super::{Findings, Tables, each, number};
use crate::error::Result;
use crate::id::{InodeId, SnapshotId};
use crate::kv::{Family, KvRead};
use crate::record::{Body, DirentRecord, decode_cookie, key, split_two};
use crate::types::FileKind;

/// What the directory entries say.
#[derive(Default)]
struct Entries {
    links: HashMap<InodeId, u64>,
    subdirectories: HashMap<InodeId, u64>,
    cookies: HashMap<(InodeId, u64), (InodeId, Vec<u8>)>,
}

pub(super) fn check(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<()> {
    let entries = directories(view, tables, findings)?;
    cookies(view, &entries, findings)?;
    inodes(tables, &entries, findings);
    snapshots(view, tables, findings)?;
    counters(tables, findings);
    Ok(())
}

fn directories(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<Entries> {
    let mut entries = Entries::default();
    each(view, Family::Dirent, |key, value| {
        let directory = InodeId::new(number(key)?);
        let name = key.get(8..).unwrap_or_default();
        let entry = DirentRecord::decode(value)?;
        let shown = || format!("entry `{}` of directory {directory}", name.escape_ascii());
        *entries.links.entry(entry.inode).or_insert(0) += 1;
        entries.cookies.insert((directory, entry.cookie), (entry.inode, name.to_vec()));
        match tables.inodes.get(&directory).map(|record| &record.body) {
            Some(Body::Directory { next_cookie, .. }) => {
                findings.expect(entry.cookie < *next_cookie, || {
                    format!("I7: {} has cookie {}, next is {next_cookie}", shown(), entry.cookie)
                });
            }
            _ => findings.add(format!("I7: {} lies in no directory", shown())),
        }
        match tables.inodes.get(&entry.inode) {
            None => findings.add(format!("I7: {} names no inode ({})", shown(), entry.inode)),
            Some(inode) => {
                if let Body::Directory { parent, .. } = inode.body {
                    *entries.subdirectories.entry(directory).or_insert(0) += 1;
                    findings.expect(parent == directory, || {
                        format!("I7: {} has parent {parent}", shown())
                    });
                }
            }
        }
        Ok(())
    })?;
    Ok(entries)
}

fn cookies(view: &dyn KvRead, entries: &Entries, findings: &mut Findings) -> Result<()> {
    let mut count = 0;
    each(view, Family::Cookie, |key, value| {
        count += 1;
        let (directory, cookie) = split_two("cookie key", key)?;
        let (inode, name) = decode_cookie(value)?;
        let twin = entries.cookies.get(&(InodeId::new(directory), cookie));
        let same = twin.is_some_and(|(of, named)| *of == inode && named.as_slice() == name);
        findings.expect(same, || {
            format!("I7: cookie {cookie} of directory {directory} differs from its entry")
        });
        Ok(())
    })?;
    findings.expect(count == entries.cookies.len(), || {
        format!("I7: {} entries, {count} cookies", entries.cookies.len())
    });
    Ok(())
}

fn inodes(tables: &Tables, entries: &Entries, findings: &mut Findings) {
    findings.expect(tables.inodes.contains_key(&InodeId::ROOT), || "I7: no root".to_owned());
    for (&inode, record) in &tables.inodes {
        let named = entries.links.get(&inode).copied().unwrap_or(0);
        let links = match record.kind() {
            FileKind::Directory => {
                let expected = u64::from(inode != InodeId::ROOT);
                findings
                    .expect_equal(named, expected, || format!("I7: entries of directory {inode}"));
                2 + entries.subdirectories.get(&inode).copied().unwrap_or(0)
            }
            FileKind::File | FileKind::Symlink => {
                findings.expect(named > 0, || format!("I7: inode {inode} is an orphan"));
                named
            }
        };
        findings.expect_equal(record.link_count.into(), links, || {
            format!("I7: links of inode {inode}")
        });
    }
}

fn snapshots(view: &dyn KvRead, tables: &Tables, findings: &mut Findings) -> Result<()> {
    let mut expected: HashSet<Vec<u8>> = HashSet::new();
    let mut clones: HashMap<SnapshotId, u64> = HashMap::new();
    for record in tables.inodes.values() {
        if let Body::File { origin: Some(origin), .. } = record.body {
            *clones.entry(origin).or_insert(0) += 1;
        }
    }
    for (&id, record) in &tables.snapshots {
        let counted = clones.get(&id).copied().unwrap_or(0);
        findings
            .expect_equal(record.clone_count, counted, || format!("I7: clones of snapshot {id}"));
        expected.insert(key::snapshot(id));
        let with_id = |mut prefix: Vec<u8>| {
            prefix.extend_from_slice(id.as_bytes());
            prefix
        };
        expected.insert(with_id(key::snapshot_path_prefix(&record.path)));
        expected.extend(record.name.iter().map(|name| key::snapshot_name(name)));
        let labels = record.labels.iter();
        expected.extend(labels.map(|(l, v)| with_id(key::snapshot_label_prefix(l, v))));
    }
    let mut found = 0;
    each(view, Family::Snapshot, |key, _| {
        found += 1;
        findings.expect(expected.contains(key), || {
            format!("I7: snapshot key `{}` belongs to no snapshot", key.escape_ascii())
        });
        Ok(())
    })?;
    findings.expect(found == expected.len(), || {
        format!("I7: {found} snapshot keys, expected {}", expected.len())
    });
    Ok(())
}

fn counters(tables: &Tables, findings: &mut Findings) {
    let counted = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let files = tables.inodes.values().filter(|r| r.kind() == FileKind::File).count();
    let c = tables.counters;
    for (what, got, expected) in [
        ("inodes", c.inodes, counted(tables.inodes.len())),
        ("files", c.files, counted(files)),
        ("snapshots", c.snapshots, counted(tables.snapshots.len())),
        ("layers", c.layers, counted(tables.layers.len())),
    ] {
        findings.expect_equal(got, expected, || format!("I7: counter of {what}"));
    }
    let highest_inode = tables.inodes.keys().map(|inode| inode.get()).max().unwrap_or(0);
    findings.expect(highest_inode < c.next_inode, || {
        format!("I7: inode {highest_inode} is not below the next number {}", c.next_inode)
    });
    let highest_layer = tables.layers.keys().map(|layer| layer.get()).max().unwrap_or(0);
    findings.expect(highest_layer < c.next_layer, || {
        format!("I5: layer {highest_layer} is not below the next number {}", c.next_layer)
    });
}

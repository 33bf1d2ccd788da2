//! I7: directories, cookies, link counts.

use std::collections::HashMap;
use std::ops::ControlFlow;

use super::findings::differs;
use super::{Check, EVERYTHING_END, Findings, Fix, behind, each, number};
use crate::error::Result;
use crate::id::InodeId;
use crate::kind::FileKind;
use crate::kv::{Family, KvRead, prefix_end};
use crate::record::{
    Body, Counters, DirentRecord, InodeRecord, decode_cookie, encode_cookie, key, split_two,
};

/// Bytes that one inode takes while its names are counted, about.
const COUNTED_INODE_BYTES: usize = 128;

/// An inode whose names are counted.
struct Counted {
    kind: FileKind,
    link_count: u64,
    names: u64,
    subdirectories: u64,
}

pub(super) fn check(check: &mut Check<'_>, findings: &mut Findings) -> Result<()> {
    if inode(check.view, InodeId::ROOT)?.is_none() {
        findings.rebuild("I7: no root");
    }
    entries(check.view, findings)?;
    cookies(check.view, findings)?;
    let mut from = Vec::new();
    loop {
        let (mut part, last) = inodes(check, &from, findings)?;
        if part.is_empty() {
            return Ok(());
        }
        count_names(check.view, &mut part)?;
        links(check.view, part, findings)?;
        let Some(last) = last else { return Ok(()) };
        from = behind(&last);
    }
}

fn inode(view: &dyn KvRead, inode: InodeId) -> Result<Option<InodeRecord>> {
    view.get(Family::Inode, &key::inode(inode))?.as_deref().map(InodeRecord::decode).transpose()
}

/// Each entry: its directory, its inode, its cookie.
fn entries(view: &dyn KvRead, findings: &mut Findings) -> Result<()> {
    let counters = view.get(Family::Meta, key::META_COUNTERS)?;
    let counters = counters.as_deref().and_then(|bytes| Counters::decode(bytes).ok());
    let next_inode = counters.map_or(0, |counters| counters.next_inode);
    let mut directory: Option<(InodeId, Option<Result<InodeRecord>>)> = None;
    each(view, Family::Dirent, |entry_key, value| {
        let of = InodeId::new(number(entry_key)?);
        if directory.as_ref().is_none_or(|(known, _)| *known != of) {
            let bytes = view.get(Family::Inode, &key::inode(of))?;
            directory = Some((of, bytes.as_deref().map(InodeRecord::decode)));
        }
        let entry_bytes = (entry_key, value);
        match &directory {
            Some((_, Some(Ok(record)))) => {
                entry((view, next_inode), (of, record), entry_bytes, findings)
            }
            // It was there once: only the log tells what it was.
            Some((_, None)) => {
                let name = entry_key.get(8..).unwrap_or_default().escape_ascii();
                let problem = format!("I7: directory {of} of entry `{name}` is missing");
                findings.missing(&problem, || Fix::delete(Family::Dirent, entry_key));
                Ok(())
            }
            // One that cannot be decoded is found by the walk of the inodes.
            Some((_, Some(Err(_)))) | None => Ok(()),
        }
    })
}

fn entry(
    (view, next_inode): (&dyn KvRead, u64),
    (directory, directory_record): (InodeId, &InodeRecord),
    (entry_key, value): (&[u8], &[u8]),
    findings: &mut Findings,
) -> Result<()> {
    let name = entry_key.get(8..).unwrap_or_default();
    let shown = format!("entry `{}` of directory {directory}", name.escape_ascii());
    let remove = || Fix::delete(Family::Dirent, entry_key);
    let entry = match DirentRecord::decode(value) {
        Ok(entry) => entry,
        Err(error) => {
            let problem = format!("I7: {shown}: {error}");
            match told_by_cookie(view, directory, name)? {
                Some(told) => findings
                    .wrong(problem, || Fix::put(Family::Dirent, entry_key.to_vec(), told.encode())),
                // What it named would lose its name: the log has it.
                None => findings.missing(&problem, remove),
            }
            return Ok(());
        }
    };
    let Body::Directory { next_cookie, .. } = directory_record.body else {
        findings.wrong(format!("I7: {shown} lies in no directory"), remove);
        return Ok(());
    };
    if entry.cookie >= next_cookie {
        findings.wrong(
            format!("I7: {shown} has cookie {}, next is {next_cookie}", entry.cookie),
            || put_directory(directory, directory_record, None, entry.cookie + 1),
        );
    }
    match view.get(Family::Inode, &key::inode(entry.inode))? {
        None => {
            let problem = format!("I7: {shown} names no inode ({})", entry.inode);
            // One that was given out: only the log tells what it was, a link or an empty directory, say.
            if entry.inode.get() < next_inode {
                findings.missing(&problem, remove);
            } else {
                findings.wrong(problem, remove);
            }
            return Ok(());
        }
        Some(bytes) => {
            // One that cannot be decoded is found by the walk of the inodes.
            if let Ok(record) = InodeRecord::decode(&bytes)
                && let Body::Directory { parent, next_cookie } = record.body
                && parent != directory
            {
                stray(
                    view,
                    (directory, &entry),
                    (parent, &record, next_cookie),
                    (shown.as_str(), entry_key, findings),
                )?;
            }
        }
    }
    cookie_of(view, (directory, name, entry), (directory_record, next_cookie), (&shown, findings))
}

/// A directory's entry in another directory than the one it lies in: without an entry there, it
/// lies here.
fn stray(
    view: &dyn KvRead,
    (directory, entry): (InodeId, &DirentRecord),
    (parent, record, next_cookie): (InodeId, &InodeRecord, u64),
    (shown, entry_key, findings): (&str, &[u8], &mut Findings),
) -> Result<()> {
    let prefix = key::dirent(parent, b"");
    let mut has_entry = false;
    view.scan(Family::Dirent, &prefix, &prefix_end(&prefix), &mut |_, value| {
        has_entry |= DirentRecord::decode(value).is_ok_and(|other| other.inode == entry.inode);
        Ok(if has_entry { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    findings.wrong(format!("I7: {shown} has parent {parent}"), || {
        if has_entry {
            Fix::delete(Family::Dirent, entry_key)
        } else {
            put_directory(entry.inode, record, Some(directory), next_cookie)
        }
    });
    Ok(())
}

fn put_directory(
    inode: InodeId,
    record: &InodeRecord,
    parent: Option<InodeId>,
    next_cookie: u64,
) -> Fix {
    let mut record = record.clone();
    if let Body::Directory { parent: old, next_cookie: next } = &mut record.body {
        *old = parent.unwrap_or(*old);
        *next = next_cookie;
    }
    Fix::put(Family::Inode, key::inode(inode), record.encode())
}

/// What the cookie record of an entry that cannot be decoded tells of it.
fn told_by_cookie(
    view: &dyn KvRead,
    directory: InodeId,
    name: &[u8],
) -> Result<Option<DirentRecord>> {
    let mut told = None;
    let prefix = directory.get().to_be_bytes();
    view.scan(Family::Cookie, &prefix, &prefix_end(&prefix), &mut |cookie_key, value| {
        let (_, cookie) = split_two("cookie key", cookie_key)?;
        let same = decode_cookie(value).ok().filter(|(_, other)| *other == name);
        told = same.map(|(inode, _)| DirentRecord { inode, cookie });
        Ok(if told.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(told)
}

/// The entry's cookie record says the same.
fn cookie_of(
    view: &dyn KvRead,
    (directory, name, entry): (InodeId, &[u8], DirentRecord),
    (record, next_cookie): (&InodeRecord, u64),
    (shown, findings): (&str, &mut Findings),
) -> Result<()> {
    let right = encode_cookie(entry.inode, name);
    let stored = view.get(Family::Cookie, &key::cookie(directory, entry.cookie))?;
    if stored.as_ref() == Some(&right) {
        return Ok(());
    }
    // It may be that of another entry with the same cookie: then this one gets a new one.
    let other = stored.as_deref().and_then(|value| decode_cookie(value).ok());
    let is_taken = match other {
        Some((inode, other)) if other != name => {
            let twin = view.get(Family::Dirent, &key::dirent(directory, other))?;
            twin.as_deref().map(DirentRecord::decode).is_some_and(|twin| {
                twin.is_ok_and(|twin| twin.inode == inode && twin.cookie == entry.cookie)
            })
        }
        _ => false,
    };
    let problem = format!("I7: cookie {} of {shown} differs from its entry", entry.cookie);
    findings.wrong(problem, || {
        let cookie = if is_taken { next_cookie } else { entry.cookie };
        let mut writes = Vec::new();
        let mut put = |fix| {
            if let Fix::Write(more) = fix {
                writes.extend(more);
            }
        };
        put(Fix::put(Family::Cookie, key::cookie(directory, cookie), right));
        if is_taken {
            let moved = DirentRecord { cookie, ..entry };
            put(Fix::put(Family::Dirent, key::dirent(directory, name), moved.encode()));
            put(put_directory(directory, record, None, cookie + 1));
        }
        Fix::Write(writes)
    });
    Ok(())
}

/// Every cookie record has its entry.
fn cookies(view: &dyn KvRead, findings: &mut Findings) -> Result<()> {
    each(view, Family::Cookie, |cookie_key, value| {
        let (directory, cookie) = split_two("cookie key", cookie_key)?;
        let twin = match decode_cookie(value) {
            Ok((inode, name)) => {
                let entry =
                    view.get(Family::Dirent, &key::dirent(InodeId::new(directory), name))?;
                let entry = match entry.as_deref().map(DirentRecord::decode) {
                    // That was told, and this says what it was.
                    Some(Err(_)) => return Ok(()),
                    decoded => decoded.and_then(Result::ok),
                };
                entry.filter(|entry| entry.inode == inode && entry.cookie == cookie)
            }
            Err(_) => None,
        };
        if twin.is_none() {
            findings.wrong(
                format!("I7: cookie {cookie} of directory {directory} has no entry"),
                || Fix::delete(Family::Cookie, cookie_key),
            );
        }
        Ok(())
    })
}

type Part = HashMap<InodeId, Counted>;

/// The next inodes, as many as the budget holds, and the last key if there may be more.
fn inodes(
    check: &mut Check<'_>,
    from: &[u8],
    findings: &mut Findings,
) -> Result<(Part, Option<Vec<u8>>)> {
    let limit = check.at_once(COUNTED_INODE_BYTES);
    let (mut part, mut last) = (Part::new(), None);
    let counted = &mut check.counted;
    check.view.scan(Family::Inode, from, &EVERYTHING_END, &mut |inode_key, value| {
        let inode = InodeId::new(number(inode_key)?);
        counted.inodes += 1;
        counted.next_inode = counted.next_inode.max(inode.get() + 1);
        findings.report.inodes += 1;
        match InodeRecord::decode(value) {
            Ok(record) => {
                counted.files += u64::from(record.kind() == FileKind::File);
                let (kind, link_count) = (record.kind(), record.link_count.into());
                part.insert(inode, Counted { kind, link_count, names: 0, subdirectories: 0 });
            }
            Err(error) => findings.rebuild(&format!("I7: inode {inode}: {error}")),
        }
        if part.len() < limit {
            return Ok(ControlFlow::Continue(()));
        }
        last = Some(inode_key.to_vec());
        Ok(ControlFlow::Break(()))
    })?;
    Ok((part, last))
}

fn count_names(view: &dyn KvRead, part: &mut Part) -> Result<()> {
    // Directories and inodes may be in different parts: the kind is looked up where it matters.
    each(view, Family::Dirent, |entry_key, value| {
        let directory = InodeId::new(number(entry_key)?);
        let entry = match DirentRecord::decode(value) {
            Ok(entry) => Some(entry),
            Err(_) => told_by_cookie(view, directory, entry_key.get(8..).unwrap_or_default())?,
        };
        let Some(entry) = entry else { return Ok(()) };
        let known = part.get_mut(&entry.inode).map(|counted| {
            counted.names += 1;
            counted.kind
        });
        if let Some(of) = part.get_mut(&directory) {
            let kind = match known {
                Some(kind) => Some(kind),
                None => {
                    let bytes = view.get(Family::Inode, &key::inode(entry.inode))?;
                    let record = bytes.and_then(|bytes| InodeRecord::decode(&bytes).ok());
                    record.map(|record| record.kind())
                }
            };
            of.subdirectories += u64::from(kind == Some(FileKind::Directory));
        }
        Ok(())
    })
}

fn links(view: &dyn KvRead, part: Part, findings: &mut Findings) -> Result<()> {
    for (inode, counted) in part {
        let is_directory = counted.kind == FileKind::Directory;
        if counted.names == 0 && inode != InodeId::ROOT {
            findings.wrong(format!("I7: inode {inode} is an orphan"), || Fix::Adopt(inode));
        }
        if is_directory && counted.names > u64::from(inode != InodeId::ROOT) {
            findings.follows(format!("I7: directory {inode} has {} entries", counted.names));
        }
        let expected = if is_directory { 2 + counted.subdirectories } else { counted.names };
        if counted.link_count != expected {
            let record = self::inode(view, inode)?;
            let problem =
                differs(&format!("I7: links of inode {inode}"), counted.link_count, expected);
            findings.wrong(problem, || {
                let writes = record.map(|mut record| {
                    record.link_count = u32::try_from(expected).unwrap_or(u32::MAX);
                    Fix::put(Family::Inode, key::inode(inode), record.encode())
                });
                writes.unwrap_or(Fix::Write(Vec::new()))
            });
        }
    }
    Ok(())
}

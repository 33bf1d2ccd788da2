//! Directories, names and links. Every change is durable before its call returns.

use std::ops::ControlFlow;

use crate::ancestry::{self, Ancestry};
use crate::attributes::{Requested, set_judged};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::attributes_of;
use crate::id::InodeId;
use crate::kind::FileKind;
use crate::kv::Family;
use crate::name::Name;
use crate::paths::{self, enter, entry_in, leave, random_generation};
use crate::reclaim;
use crate::record::{Body, DirentRecord, InodeRecord, LayerState, decode_cookie, key};
use crate::rights::EntryRights;
use crate::snapshot::{clone_deleted, open_layer};
use crate::transaction::Transaction;
use crate::types::{
    Attributes, Change, CreateMode, Created, DirectoryEntry, DirectoryPage, SetAttributes,
};
use crate::units::SYMLINK_BYTES_MAX;

/// Hard links of one inode, as ext4 allows.
const LINKS_MAX: u32 = 65_000;

/// Cookies begin above those that NFS front ends give `.` and `..`.
pub(crate) const FIRST_COOKIE: u64 = 3;

/// Tries of a rename beside others that move directories: each of those is a commit, far slower than a
/// look at the ancestors of a directory that is not very deep.
const RENAME_TRIES: usize = 256;

/// Default modes of new objects when the caller gives none.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
const SYMLINK_MODE: u32 = 0o777;

fn require_directory(record: &InodeRecord, inode: InodeId) -> Result<()> {
    match record.kind() {
        FileKind::Directory => Ok(()),
        FileKind::File | FileKind::Symlink | FileKind::Special(_) => {
            Err(Error::NotDirectory { what: format!("inode {inode}") })
        }
    }
}

/// The attributes, unflushed writes included.
pub(crate) fn attributes(core: &Core, inode: InodeId) -> Result<Attributes> {
    if let Some(file) = core.files.get(inode) {
        let state = file.state.read();
        if state.deleted {
            return Err(Error::Stale { inode: inode.get() });
        }
        return Ok(state.attributes(inode));
    }
    core.inode(inode).map(|record| attributes_of(inode, &record))
}

pub(crate) fn lookup(core: &Core, directory: InodeId, name: &Name) -> Result<Attributes> {
    let missing = || Error::not_found(format!("`{name}`"));
    let found = paths::entry(core.kv.as_ref(), directory, name)?;
    let Some(found) = found else {
        // Tells a missing name from a missing directory and from a file.
        require_directory(&core.inode(directory)?, directory)?;
        return Err(missing());
    };
    match attributes(core, found.inode) {
        // It was removed between the two look-ups.
        Err(Error::Stale { .. }) => Err(missing()),
        other => other,
    }
}

pub(crate) fn parent(core: &Core, directory: InodeId) -> Result<Attributes> {
    let record = core.inode(directory)?;
    match record.body {
        Body::Directory { parent, .. } => attributes(core, parent),
        Body::File { .. } | Body::Symlink { .. } | Body::Special(_) => {
            Err(Error::NotDirectory { what: format!("inode {directory}") })
        }
    }
}

pub(crate) fn read_link(core: &Core, inode: InodeId) -> Result<(Vec<u8>, Attributes)> {
    let record = core.inode(inode)?;
    match &record.body {
        Body::Symlink { target } => Ok((target.clone(), attributes_of(inode, &record))),
        Body::File { .. } | Body::Directory { .. } | Body::Special(_) => Err(Error::WrongKind {
            what: format!("inode {inode}"),
            got: record.kind(),
            expected: FileKind::Symlink,
        }),
    }
}

/// A record with the attributes of a new object.
fn new_record(txn: &Transaction<'_>, generation: u32, set: &Requested, body: Body) -> InodeRecord {
    let now = txn.now();
    let (mode, link_count) = match body {
        Body::File { .. } | Body::Special(_) => (FILE_MODE, 1),
        Body::Directory { .. } => (DIRECTORY_MODE, 2),
        Body::Symlink { .. } => (SYMLINK_MODE, 1),
    };
    let size_bytes = match &body {
        Body::Symlink { target } => u64::try_from(target.len()).unwrap_or(0),
        Body::File { .. } | Body::Directory { .. } | Body::Special(_) => 0,
    };
    let mut record = InodeRecord {
        generation,
        mode,
        uid: 0,
        gid: 0,
        link_count,
        size_bytes,
        used_blocks: 0,
        accessed_at: now,
        modified_at: now,
        changed_at: now,
        created_at: now,
        body,
    };
    set.apply_to(&mut record, now);
    record.changed_at = now;
    record
}

fn created(
    txn: &Transaction<'_>,
    (directory, before): (InodeId, Attributes),
    inode: InodeId,
) -> Result<Created> {
    let after = attributes_of(directory, &txn.inode(directory)?);
    let attributes = attributes_of(inode, &txn.inode(inode)?);
    Ok(Created { attributes, directory: Change { before, after } })
}

fn before(txn: &Transaction<'_>, directory: InodeId) -> Result<Attributes> {
    let record = txn.inode(directory)?;
    require_directory(&record, directory)?;
    Ok(attributes_of(directory, &record))
}

pub(crate) fn create(
    core: &Core,
    (directory, name): (InodeId, &Name),
    mode: CreateMode,
    set: &SetAttributes,
    judged: Option<EntryRights>,
) -> Result<Created> {
    let requested = Requested::new(set)?;
    let generation = random_generation()?;
    let wanted = name.clone();
    let outcome = core.commit(move |txn| {
        judged.map_or(Ok(()), |judged| judged.require(txn, &wanted))?;
        let before = before(txn, directory)?;
        if let Some(found) = entry_in(txn, directory, &wanted)? {
            return take_existing(txn, found, &wanted, mode)
                .and_then(|()| created(txn, (directory, before), found.inode))
                .map(|created| (created, true));
        }
        txn.grows()?;
        let inode = txn.take_inode()?;
        let layer = txn.make_layer(&open_layer(inode, None))?;
        let verifier = match mode {
            CreateMode::Exclusive(verifier) => Some(verifier),
            CreateMode::Unchecked | CreateMode::Guarded => None,
        };
        let body = Body::File { layer, origin: None, verifier };
        let mut record = new_record(txn, generation, &requested, body);
        record.size_bytes = requested.size_bytes().unwrap_or(0);
        txn.put_inode(inode, &record);
        txn.counters().files += 1;
        enter(txn, directory, &wanted, inode, false)?;
        created(txn, (directory, before), inode).map(|created| (created, false))
    })?;
    let (mut created, is_old) = outcome;
    let inode = created.attributes.inode;
    match (is_old, mode, set.size_bytes) {
        (true, CreateMode::Unchecked, Some(size_bytes)) => {
            let size = SetAttributes { size_bytes: Some(size_bytes), ..SetAttributes::default() };
            let of_file = judged.and_then(EntryRights::object);
            created.attributes = set_judged(core, inode, &size, None, of_file)?.after;
        }
        // Unflushed writes count too.
        (true, ..) => created.attributes = attributes(core, inode).unwrap_or(created.attributes),
        (false, ..) => {}
    }
    Ok(created)
}

/// Whether CREATE may take what has the name already.
fn take_existing(
    txn: &Transaction<'_>,
    found: DirentRecord,
    name: &Name,
    mode: CreateMode,
) -> Result<()> {
    let exists = || Error::exists(format!("`{name}`"));
    let record = txn.inode(found.inode)?;
    let Body::File { verifier, .. } = record.body else {
        return Err(exists());
    };
    match mode {
        CreateMode::Unchecked => Ok(()),
        CreateMode::Exclusive(wanted) if verifier == Some(wanted) => Ok(()),
        CreateMode::Guarded | CreateMode::Exclusive(_) => Err(exists()),
    }
}

/// Makes a directory with default attributes inside a transaction; the caller asks for room.
pub(crate) fn new_directory(
    txn: &mut Transaction<'_>,
    parent: InodeId,
    name: &Name,
) -> Result<InodeId> {
    let generation = random_generation()?;
    add_directory(txn, parent, name, (generation, &Requested::default()))
}

fn add_directory(
    txn: &mut Transaction<'_>,
    parent: InodeId,
    name: &Name,
    (generation, set): (u32, &Requested),
) -> Result<InodeId> {
    let inode = txn.take_inode()?;
    let body = Body::Directory { parent, next_cookie: FIRST_COOKIE };
    let record = new_record(txn, generation, set, body);
    txn.put_inode(inode, &record);
    enter(txn, parent, name, inode, true)?;
    Ok(inode)
}

pub(crate) fn make_directory(
    core: &Core,
    directory: InodeId,
    name: &Name,
    set: &SetAttributes,
) -> Result<Created> {
    let requested = Requested::new(set)?;
    let generation = random_generation()?;
    let wanted = name.clone();
    core.commit(move |txn| {
        let before = before(txn, directory)?;
        if entry_in(txn, directory, &wanted)?.is_some() {
            return Err(Error::exists(format!("`{wanted}`")));
        }
        txn.grows()?;
        let inode = add_directory(txn, directory, &wanted, (generation, &requested))?;
        created(txn, (directory, before), inode)
    })
}

pub(crate) fn make_symlink(
    core: &Core,
    directory: InodeId,
    name: &Name,
    target: &[u8],
    set: &SetAttributes,
) -> Result<Created> {
    if target.len() > SYMLINK_BYTES_MAX {
        return Err(Error::NameTooLong { got: target.len(), limit: SYMLINK_BYTES_MAX });
    }
    if target.is_empty() || target.contains(&0) {
        return Err(Error::invalid("a link's target has at least one byte, and no NUL"));
    }
    make_leaf(core, (directory, name), set, Body::Symlink { target: target.to_vec() })
}

/// Makes what has neither entries nor data.
pub(crate) fn make_leaf(
    core: &Core,
    (directory, name): (InodeId, &Name),
    set: &SetAttributes,
    body: Body,
) -> Result<Created> {
    let requested = Requested::new(set)?;
    let generation = random_generation()?;
    let wanted = name.clone();
    core.commit(move |txn| {
        let before = before(txn, directory)?;
        if entry_in(txn, directory, &wanted)?.is_some() {
            return Err(Error::exists(format!("`{wanted}`")));
        }
        txn.grows()?;
        let inode = txn.take_inode()?;
        let record = new_record(txn, generation, &requested, body);
        txn.put_inode(inode, &record);
        enter(txn, directory, &wanted, inode, false)?;
        created(txn, (directory, before), inode)
    })
}

/// One link fewer; the inode goes with its last one, in O(1): its layer waits for reclaim.
fn unlink(txn: &mut Transaction<'_>, inode: InodeId) -> Result<()> {
    let mut record = txn.inode(inode)?;
    record.link_count = record.link_count.saturating_sub(1);
    if record.link_count > 0 {
        record.changed_at = txn.now();
        txn.put_inode(inode, &record);
        return Ok(());
    }
    txn.delete(Family::Inode, key::inode(inode));
    let counters = txn.counters();
    counters.inodes = counters.inodes.saturating_sub(1);
    if let Body::File { layer, origin, .. } = record.body {
        counters.files = counters.files.saturating_sub(1);
        let mut open = txn.layer(layer)?;
        open.state = LayerState::Frozen;
        txn.put_layer(layer, &open);
        reclaim::layer_released(txn, layer)?;
        if let Some(origin) = origin {
            clone_deleted(txn, origin)?;
        }
    }
    Ok(())
}

/// Removes an empty directory's inode.
fn drop_directory(txn: &mut Transaction<'_>, inode: InodeId, name: &Name) -> Result<()> {
    let from = key::dirent(inode, b"");
    let to = key::dirent(InodeId::new(inode.get() + 1), b"");
    if !txn.range(Family::Dirent, (&from, &to), 1)?.is_empty() {
        return Err(Error::NotEmpty { what: format!("`{name}`") });
    }
    txn.delete(Family::Inode, key::inode(inode));
    let counters = txn.counters();
    counters.inodes = counters.inodes.saturating_sub(1);
    Ok(())
}

/// What a removal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// REMOVE: all but directories.
    NotDirectory,
    /// RMDIR: directories.
    Directory,
    /// Either.
    Any,
}

pub(crate) fn remove(
    core: &Core,
    directory: InodeId,
    name: &Name,
    removal: Removal,
) -> Result<Change> {
    remove_judged(core, (directory, name), removal, None)
}

pub(crate) fn remove_judged(
    core: &Core,
    (directory, name): (InodeId, &Name),
    removal: Removal,
    judged: Option<EntryRights>,
) -> Result<Change> {
    let wanted = name.clone();
    core.commit(move |txn| {
        judged.map_or(Ok(()), |judged| judged.require(txn, &wanted))?;
        remove_in(txn, directory, &wanted, removal)
    })
}

fn remove_in(
    txn: &mut Transaction<'_>,
    directory: InodeId,
    name: &Name,
    removal: Removal,
) -> Result<Change> {
    txn.frees();
    let before = before(txn, directory)?;
    let found =
        entry_in(txn, directory, name)?.ok_or_else(|| Error::not_found(format!("`{name}`")))?;
    let is_directory = txn.inode(found.inode)?.kind() == FileKind::Directory;
    match (removal, is_directory) {
        (Removal::NotDirectory, true) => {
            return Err(Error::IsDirectory { what: format!("`{name}`") });
        }
        (Removal::Directory, false) => {
            return Err(Error::NotDirectory { what: format!("`{name}`") });
        }
        (_, true) => drop_directory(txn, found.inode, name)?,
        (_, false) => unlink(txn, found.inode)?,
    }
    leave(txn, directory, name, is_directory)?;
    Ok(Change { before, after: attributes_of(directory, &txn.inode(directory)?) })
}

pub(crate) fn link(
    core: &Core,
    inode: InodeId,
    directory: InodeId,
    name: &Name,
) -> Result<(Attributes, Change)> {
    let wanted = name.clone();
    let (after, change) = core.commit(move |txn| {
        let before = before(txn, directory)?;
        let mut record = txn.inode(inode)?;
        if record.kind() == FileKind::Directory {
            return Err(Error::IsDirectory { what: format!("inode {inode}") });
        }
        if record.link_count >= LINKS_MAX {
            return Err(Error::TooManyLinks { inode: inode.get() });
        }
        if entry_in(txn, directory, &wanted)?.is_some() {
            return Err(Error::exists(format!("`{wanted}`")));
        }
        txn.grows()?;
        record.link_count += 1;
        record.changed_at = txn.now();
        txn.put_inode(inode, &record);
        enter(txn, directory, &wanted, inode, false)?;
        let after = attributes_of(directory, &txn.inode(directory)?);
        Ok((attributes_of(inode, &record), Change { before, after }))
    })?;
    // Unflushed writes count too.
    Ok((attributes(core, inode).unwrap_or(after), change))
}

/// Where a rename goes from or to.
pub(crate) type Place = (InodeId, Name);

pub(crate) fn rename(
    core: &Core,
    from: Place,
    to: Place,
    judged: Option<[EntryRights; 2]>,
) -> Result<(Change, Change)> {
    let mut missing = None;
    for _ in 0..RENAME_TRIES {
        let mut ancestry = Ancestry::look(core, &from, to.0)?;
        missing = ancestry.take_missing();
        let places = (from.clone(), to.clone());
        let rights = judged;
        let done = core.commit(move |txn| {
            if let Some([of_from, of_to]) = rights {
                of_from.require(txn, &places.0.1)?;
                of_to.require(txn, &places.1.1)?;
            }
            rename_once(txn, &places, &ancestry)
        })?;
        if let Some(done) = done {
            return Ok(done);
        }
    }
    let busy = || Error::Busy {
        what: format!("`{}`", from.1),
        reason: "directories above it are moved all the time; try again".to_owned(),
    };
    Err(missing.unwrap_or_else(busy))
}

/// `None`: what was looked up before may have changed.
fn rename_once(
    txn: &mut Transaction<'_>,
    (from, to): &(Place, Place),
    ancestry: &Ancestry,
) -> Result<Option<(Change, Change)>> {
    let before_from = before(txn, from.0)?;
    let before_to = before(txn, to.0)?;
    if !rename_in(txn, from, to, |txn, moved| Ok(ancestry.is_below(txn, moved)))? {
        return Ok(None);
    }
    let after = |inode| Ok::<_, Error>(attributes_of(inode, &txn.inode(inode)?));
    Ok(Some((
        Change { before: before_from, after: after(from.0)? },
        Change { before: before_to, after: after(to.0)? },
    )))
}

/// Renames in a transaction, from and to paths, which are no longer than a path may be.
pub(crate) fn rename_path_in(txn: &mut Transaction<'_>, from: &Place, to: &Place) -> Result<()> {
    let is_below = |txn: &Transaction<'_>, moved| {
        ancestry::lies_below(moved, to.0, |inode| txn.inode(inode)).map(Some)
    };
    rename_in(txn, from, to, is_below).map(|_| ())
}

/// RFC 1813 section 3.3.14: a target of a like kind is replaced; the same file is left alone.
/// `is_below`: whether the target's directory lies below the inode that moves. If that is not known nothing
/// is done, and the answer is `false`.
fn rename_in(
    txn: &mut Transaction<'_>,
    from: &Place,
    to: &Place,
    is_below: impl FnOnce(&Transaction<'_>, InodeId) -> Result<Option<bool>>,
) -> Result<bool> {
    let ((from_directory, from_name), (to_directory, to_name)) = (from, to);
    let moved = entry_in(txn, *from_directory, from_name)?
        .ok_or_else(|| Error::not_found(format!("`{from_name}`")))?;
    let mut record = txn.inode(moved.inode)?;
    let is_directory = record.kind() == FileKind::Directory;
    let is_moved = is_directory && from_directory != to_directory;
    if is_moved {
        match is_below(txn, moved.inode)? {
            Some(false) => txn.moves_directory(),
            Some(true) => return Err(Error::invalid("a directory cannot be moved into itself")),
            None => return Ok(false),
        }
    }
    if let Some(target) = entry_in(txn, *to_directory, to_name)? {
        if target.inode == moved.inode {
            return Ok(true);
        }
        let target_is_directory = txn.inode(target.inode)?.kind() == FileKind::Directory;
        match (is_directory, target_is_directory) {
            (true, false) => {
                return Err(Error::NotDirectory { what: format!("`{to_name}`") });
            }
            (false, true) => {
                return Err(Error::IsDirectory { what: format!("`{to_name}`") });
            }
            (true, true) => drop_directory(txn, target.inode, to_name)?,
            (false, false) => unlink(txn, target.inode)?,
        }
        leave(txn, *to_directory, to_name, target_is_directory)?;
    }
    leave(txn, *from_directory, from_name, is_directory)?;
    enter(txn, *to_directory, to_name, moved.inode, is_directory)?;
    record.changed_at = txn.now();
    if let Body::Directory { parent, .. } = &mut record.body {
        *parent = *to_directory;
    }
    txn.put_inode(moved.inode, &record);
    Ok(true)
}

pub(crate) fn read_directory(
    core: &Core,
    directory: InodeId,
    after_cookie: u64,
    limit: usize,
) -> Result<DirectoryPage> {
    require_directory(&core.inode(directory)?, directory)?;
    let mut after_cookie = after_cookie;
    loop {
        let (found, end) = scan_directory(core, (directory, after_cookie), limit)?;
        let last_cookie = found.last().map(|(_, cookie, _)| *cookie);
        let mut entries = Vec::with_capacity(found.len());
        for (inode, cookie, name) in found {
            match attributes(core, inode) {
                Ok(attributes) => entries.push(DirectoryEntry { name, cookie, attributes }),
                // Removed since the scan.
                Err(Error::Stale { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        match last_cookie {
            // All of them were: a page without entries would be taken for the last one.
            Some(cookie) if entries.is_empty() && !end => after_cookie = cookie,
            _ => return Ok(DirectoryPage { entries, end }),
        }
    }
}

/// An entry of a directory, with its cookie.
type Found = (InodeId, u64, Name);

/// What a directory holds behind a cookie, and whether that is all.
fn scan_directory(
    core: &Core,
    (directory, after_cookie): (InodeId, u64),
    limit: usize,
) -> Result<(Vec<Found>, bool)> {
    let from = key::cookie(directory, after_cookie.saturating_add(1));
    let to = key::cookie(InodeId::new(directory.get() + 1), 0);
    let mut found = Vec::new();
    let mut end = true;
    core.kv.scan(Family::Cookie, &from, &to, &mut |key, value| {
        if found.len() >= limit {
            end = false;
            return Ok(ControlFlow::Break(()));
        }
        let (_, cookie) = crate::record::split_two("cookie key", key)?;
        let (inode, name) = decode_cookie(value)?;
        found.push((inode, cookie, Name::new(name)?));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok((found, end))
}

#[cfg(test)]
mod tests;

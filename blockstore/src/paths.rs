//! Paths inside transactions, and the file calls of the REST face.

use crate::attributes;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::attributes_of;
use crate::id::{InodeId, SnapshotId};
use crate::kind::FileKind;
use crate::kv::{Family, KvRead};
use crate::name::{FilePath, Name, PATH_BYTES_MAX};
use crate::namespace::{self, Removal};
use crate::record::{Body, DirentRecord, InodeRecord, LayerRecord, encode_cookie, key};
use crate::snapshot::open_layer;
use crate::store::Store;
use crate::transaction::Transaction;
use crate::types::{Attributes, FileInfo, SetAttributes};
use crate::units::{BLOCK_BYTES_U64, FILE_BYTES_MAX};

/// Entries of a directory that a listing reads at once.
const LIST_PAGE_ENTRIES: usize = 1000;

/// The name under which the NFS front end shows snapshots; no entry of the root may take it.
const RESERVED_ROOT_NAME: &[u8] = b".snapshot";

/// The generation of a new inode.
pub(crate) fn random_generation() -> Result<u32> {
    getrandom::u32().map_err(|error| {
        Error::io("read random bytes", "the operating system", std::io::Error::other(error))
    })
}

/// The entry of a directory, as committed.
pub(crate) fn entry(
    kv: &dyn KvRead,
    directory: InodeId,
    name: &Name,
) -> Result<Option<DirentRecord>> {
    let found = kv.get(Family::Dirent, &key::dirent(directory, name.as_bytes()))?;
    found.as_deref().map(DirentRecord::decode).transpose()
}

/// The entry of a directory, as the transaction sees it.
pub(crate) fn entry_in(
    txn: &Transaction<'_>,
    directory: InodeId,
    name: &Name,
) -> Result<Option<DirentRecord>> {
    let found = txn.get(Family::Dirent, &key::dirent(directory, name.as_bytes()))?;
    found.as_deref().map(DirentRecord::decode).transpose()
}

/// The inode at a path, as committed; no link is followed.
pub(crate) fn resolve(core: &Core, path: &FilePath) -> Result<InodeId> {
    let missing = || Error::not_found(format!("`{path}`"));
    let mut inode = InodeId::ROOT;
    for name in path.names() {
        inode = entry(core.kv.as_ref(), inode, name)?.ok_or_else(missing)?.inode;
    }
    Ok(inode)
}

/// The file at a path.
pub(crate) fn resolve_file(core: &Core, path: &FilePath) -> Result<InodeId> {
    let inode = resolve(core, path)?;
    match core.inode(inode)?.kind() {
        FileKind::File => Ok(inode),
        got @ (FileKind::Directory | FileKind::Symlink | FileKind::Special(_)) => {
            Err(Error::WrongKind { what: format!("`{path}`"), got, expected: FileKind::File })
        }
    }
}

/// The directory that `path` lies in, made with those on the way if missing, and the last name.
pub(crate) fn parent_or_make(
    txn: &mut Transaction<'_>,
    path: &FilePath,
) -> Result<(InodeId, Name)> {
    let (directories, name) = path.split();
    Ok((directories_or_make(txn, directories)?, name.clone()))
}

/// The directory at these names, made with those on the way if missing.
pub(crate) fn directories_or_make(txn: &mut Transaction<'_>, names: &[Name]) -> Result<InodeId> {
    let mut directory = InodeId::ROOT;
    for name in names {
        directory = match entry_in(txn, directory, name)? {
            None => {
                txn.grows()?;
                namespace::new_directory(txn, directory, name)?
            }
            Some(found) => match txn.inode(found.inode)?.kind() {
                FileKind::Directory => found.inode,
                FileKind::File | FileKind::Symlink | FileKind::Special(_) => {
                    return Err(Error::NotDirectory { what: format!("`{name}`") });
                }
            },
        };
    }
    Ok(directory)
}

pub(crate) fn refuse_existing(
    txn: &Transaction<'_>,
    directory: InodeId,
    name: &Name,
    path: &FilePath,
) -> Result<()> {
    match entry_in(txn, directory, name)? {
        Some(_) => Err(Error::exists(format!("`{path}`"))),
        None => Ok(()),
    }
}

/// Enters a name into a directory and touches the directory.
pub(crate) fn enter(
    txn: &mut Transaction<'_>,
    directory: InodeId,
    name: &Name,
    inode: InodeId,
    is_directory: bool,
) -> Result<()> {
    if directory == InodeId::ROOT && name.as_bytes() == RESERVED_ROOT_NAME {
        return Err(Error::invalid("`.snapshot` in the root is where snapshots are read"));
    }
    let mut record = txn.inode(directory)?;
    let Body::Directory { next_cookie, .. } = &mut record.body else {
        return Err(Error::NotDirectory { what: format!("inode {directory}") });
    };
    let cookie = *next_cookie;
    *next_cookie += 1;
    let dirent = DirentRecord { inode, cookie };
    txn.put(Family::Dirent, key::dirent(directory, name.as_bytes()), dirent.encode());
    let value = encode_cookie(inode, name.as_bytes());
    txn.put(Family::Cookie, key::cookie(directory, cookie), value);
    if is_directory {
        record.link_count += 1;
    }
    let now = txn.now();
    record.modified_at = now;
    record.changed_at = now;
    txn.put_inode(directory, &record);
    Ok(())
}

/// Takes a name out of a directory and touches the directory.
pub(crate) fn leave(
    txn: &mut Transaction<'_>,
    directory: InodeId,
    name: &Name,
    is_directory: bool,
) -> Result<()> {
    if let Some(found) = entry_in(txn, directory, name)? {
        txn.delete(Family::Dirent, key::dirent(directory, name.as_bytes()));
        txn.delete(Family::Cookie, key::cookie(directory, found.cookie));
    }
    let mut record = txn.inode(directory)?;
    if is_directory {
        record.link_count = record.link_count.saturating_sub(1);
    }
    let now = txn.now();
    record.modified_at = now;
    record.changed_at = now;
    txn.put_inode(directory, &record);
    Ok(())
}

/// A file as the REST face shows it, unflushed writes included.
pub(crate) fn info(
    core: &Core,
    path: FilePath,
    inode: InodeId,
    record: &InodeRecord,
) -> Result<FileInfo> {
    let Body::File { layer, origin, .. } = &record.body else {
        let (what, got) = (format!("`{path}`"), record.kind());
        return Err(Error::WrongKind { what, got, expected: FileKind::File });
    };
    let attributes = match core.files.get(inode) {
        Some(file) => file.state.read().attributes(inode),
        None => attributes_of(inode, record),
    };
    let unique_blocks = match core.kv.get(Family::Layer, &key::layer(*layer))? {
        Some(bytes) => LayerRecord::decode(&bytes)?.blocks,
        // A snapshot was taken since the record was read; the new open layer is empty.
        None => 0,
    };
    Ok(FileInfo {
        path,
        attributes,
        unique_bytes: unique_blocks * BLOCK_BYTES_U64,
        origin_snapshot: *origin,
        created_at: record.created_at,
    })
}

/// A file that was just made. It is told without another look at the index: a failure now would say of
/// what is done that it was not.
pub(crate) fn made(
    path: &FilePath,
    inode: InodeId,
    record: &InodeRecord,
    origin: Option<SnapshotId>,
) -> FileInfo {
    FileInfo {
        path: path.clone(),
        attributes: attributes_of(inode, record),
        unique_bytes: 0,
        origin_snapshot: origin,
        created_at: record.created_at,
    }
}

pub(crate) fn file_info(core: &Core, path: &FilePath) -> Result<FileInfo> {
    let inode = resolve(core, path)?;
    info(core, path.clone(), inode, &core.inode(inode)?)
}

pub(crate) fn create_file(core: &Core, path: &FilePath, size_bytes: u64) -> Result<FileInfo> {
    if size_bytes > FILE_BYTES_MAX {
        return Err(Error::FileTooBig { got: size_bytes, limit: FILE_BYTES_MAX });
    }
    let generation = random_generation()?;
    let wanted = path.clone();
    let (inode, record) = core.commit(move |txn| {
        let (directory, name) = parent_or_make(txn, &wanted)?;
        refuse_existing(txn, directory, &name, &wanted)?;
        txn.grows()?;
        let inode = txn.take_inode()?;
        let layer = txn.make_layer(&open_layer(inode, None))?;
        let now = txn.now();
        let record = InodeRecord {
            generation,
            mode: 0o644,
            uid: 0,
            gid: 0,
            link_count: 1,
            size_bytes,
            used_blocks: 0,
            accessed_at: now,
            modified_at: now,
            changed_at: now,
            created_at: now,
            body: Body::File { layer, origin: None, verifier: None },
        };
        txn.put_inode(inode, &record);
        txn.counters().files += 1;
        enter(txn, directory, &name, inode, false)?;
        Ok((inode, record))
    })?;
    Ok(made(path, inode, &record, None))
}

pub(crate) fn rename(core: &Core, from: &FilePath, to: &FilePath) -> Result<()> {
    let (from, to) = (from.clone(), to.clone());
    core.commit(move |txn| {
        let moved = find_in(txn, &from)?;
        move_in(txn, (&from, moved), &to)
    })
}

/// Where a path leads.
type FoundPath = (InodeId, DirentRecord);

/// The directory of what is at a path, and its entry.
fn find_in(txn: &Transaction<'_>, path: &FilePath) -> Result<FoundPath> {
    let missing = || Error::not_found(format!("`{path}`"));
    let (directories, name) = path.split();
    let mut directory = InodeId::ROOT;
    for step in directories {
        directory = entry_in(txn, directory, step)?.ok_or_else(missing)?.inode;
    }
    Ok((directory, entry_in(txn, directory, name)?.ok_or_else(missing)?))
}

fn move_in(
    txn: &mut Transaction<'_>,
    (from, (directory, _)): (&FilePath, FoundPath),
    to: &FilePath,
) -> Result<()> {
    let (to_directory, to_name) = parent_or_make(txn, to)?;
    refuse_existing(txn, to_directory, &to_name, to)?;
    let from = (directory, from.split().1.clone());
    namespace::rename_path_in(txn, &from, &(to_directory, to_name))
}

/// Bytes of blocks that the file alone maps.
fn unique_bytes(txn: &Transaction<'_>, record: &InodeRecord) -> Result<u64> {
    match record.body {
        Body::File { layer, .. } => Ok(txn.layer(layer)?.blocks * BLOCK_BYTES_U64),
        Body::Directory { .. } | Body::Symlink { .. } | Body::Special(_) => Ok(0),
    }
}

pub(crate) fn rename_file(core: &Core, from: &FilePath, to: &FilePath) -> Result<FileInfo> {
    let (old, new) = (from.clone(), to.clone());
    let (inode, record, unique_bytes) = core.commit(move |txn| {
        let moved = find_in(txn, &old)?;
        let inode = moved.1.inode;
        let got = txn.inode(inode)?.kind();
        if got != FileKind::File {
            let what = format!("`{old}`");
            return Err(Error::WrongKind { what, got, expected: FileKind::File });
        }
        move_in(txn, (&old, moved), &new)?;
        let record = txn.inode(inode)?;
        let unique_bytes = unique_bytes(txn, &record)?;
        Ok((inode, record, unique_bytes))
    })?;
    // Unflushed writes count too.
    let file = core.files.get(inode);
    let attributes = file
        .map_or_else(|| attributes_of(inode, &record), |file| file.state.read().attributes(inode));
    let moved = made(to, inode, &record, origin_of(&record));
    Ok(FileInfo { attributes, unique_bytes, ..moved })
}

fn origin_of(record: &InodeRecord) -> Option<SnapshotId> {
    match record.body {
        Body::File { origin, .. } => origin,
        Body::Directory { .. } | Body::Symlink { .. } | Body::Special(_) => None,
    }
}

pub(crate) fn resize_file(core: &Core, path: &FilePath, size_bytes: u64) -> Result<FileInfo> {
    let inode = resolve_file(core, path)?;
    let record = core.inode(inode)?;
    let set = SetAttributes { size_bytes: Some(size_bytes), ..SetAttributes::default() };
    let attributes = attributes::set_in(core, inode, &set, None)?.after;
    // It is resized, though it may be gone by now.
    let unique_bytes =
        core.inode(inode).and_then(|record| info(core, path.clone(), inode, &record));
    let unique_bytes = unique_bytes.map_or(0, |info| info.unique_bytes);
    let resized = made(path, inode, &record, origin_of(&record));
    Ok(FileInfo { attributes, unique_bytes, ..resized })
}

impl Store {
    /// Renames a file; the directories of `to` are made. Never replaces.
    ///
    /// # Errors
    /// As [`Store::rename_path`], and `WrongKind`. Then nothing is renamed.
    pub fn rename_file(&self, from: &FilePath, to: &FilePath) -> Result<FileInfo> {
        rename_file(&self.core, from, to)
    }

    /// Sets the size of the file at `path`.
    ///
    /// # Errors
    /// `NotFound`, `WrongKind`, `FileTooBig`. Then it has the size that it had.
    pub fn resize_file(&self, path: &FilePath, size_bytes: u64) -> Result<FileInfo> {
        resize_file(&self.core, path, size_bytes)
    }
}

pub(crate) fn remove(core: &Core, path: &FilePath) -> Result<()> {
    let (directories, name) = path.split();
    let directory = match FilePath::from_names(directories.to_vec()) {
        Ok(parent) => resolve(core, &parent)?,
        Err(_) => InodeId::ROOT,
    };
    namespace::remove(core, directory, name, Removal::Any).map(|_| ())
}

pub(crate) fn create_directories(core: &Core, path: &FilePath) -> Result<Attributes> {
    let names = path.names().to_vec();
    let (inode, record) = core.commit(move |txn| {
        let inode = directories_or_make(txn, &names)?;
        Ok((inode, txn.inode(inode)?))
    })?;
    Ok(attributes_of(inode, &record))
}

/// Regular files in the order of their paths' names; see [`crate::Store::list_files`].
pub(crate) fn list(
    core: &Core,
    prefix: &str,
    after: Option<&FilePath>,
    limit: usize,
) -> Result<Vec<FileInfo>> {
    let prefix = prefix.strip_prefix('/').unwrap_or(prefix).as_bytes();
    let mut walk = Walk { core, prefix, limit, names: Vec::new(), found: Vec::new() };
    walk.visit_all(after.map(FilePath::names))?;
    Ok(walk.found)
}

struct Walk<'a> {
    core: &'a Core,
    prefix: &'a [u8],
    limit: usize,
    /// From the root down to what is being visited.
    names: Vec<Name>,
    found: Vec<FileInfo>,
}

/// An entry of a directory, as stored.
type StoredEntry = (Vec<u8>, Vec<u8>);

/// A directory that is being visited.
struct Level<'a> {
    directory: InodeId,
    /// What is left of the listing's start below it.
    after: Option<&'a [Name]>,
    page: std::vec::IntoIter<StoredEntry>,
    page_entries_max: usize,
    /// Where the next page begins.
    from: Vec<u8>,
}

impl<'a> Level<'a> {
    /// Below `depth` others. Pages get shorter downwards, so that those of all levels together hold
    /// some thousands of entries, not some thousands for each.
    fn new(directory: InodeId, after: Option<&'a [Name]>, depth: usize) -> Self {
        let first = after.and_then(<[Name]>::first).map_or(&b""[..], Name::as_bytes);
        let from = key::dirent(directory, first);
        let page_entries_max = (LIST_PAGE_ENTRIES / (depth + 1)).max(1);
        Self { directory, after, page: Vec::new().into_iter(), page_entries_max, from }
    }

    /// The next entry, or `None` behind the last.
    fn next(&mut self, core: &Core) -> Result<Option<(Name, InodeId)>> {
        let prefix = key::dirent(self.directory, b"");
        if self.page.len() == 0 {
            let end = crate::kv::prefix_end(&prefix);
            let page = scan_page(core, (&self.from, &end), self.page_entries_max)?;
            if let Some((last, _)) = page.last() {
                self.from.clone_from(last);
                self.from.push(0);
            }
            self.page = page.into_iter();
        }
        let Some((key, value)) = self.page.next() else {
            return Ok(None);
        };
        let name = Name::new(key.get(prefix.len()..).unwrap_or_default())?;
        Ok(Some((name, DirentRecord::decode(&value)?.inode)))
    }

    /// What is left of the listing's start below an entry.
    fn after(&self, name: &Name) -> Option<&'a [Name]> {
        match self.after.and_then(<[Name]>::split_first) {
            Some((first, rest)) if first == name => Some(rest),
            _ => None,
        }
    }
}

fn scan_page(core: &Core, (from, end): (&[u8], &[u8]), limit: usize) -> Result<Vec<StoredEntry>> {
    let mut page = Vec::new();
    core.kv.scan(Family::Dirent, from, end, &mut |key, value| {
        page.push((key.to_vec(), value.to_vec()));
        Ok(if page.len() < limit {
            std::ops::ControlFlow::Continue(())
        } else {
            std::ops::ControlFlow::Break(())
        })
    })?;
    Ok(page)
}

impl Walk<'_> {
    /// Visits all, with a stack of its own: clients make directories as deep as they like.
    fn visit_all(&mut self, after: Option<&[Name]>) -> Result<()> {
        let mut levels = vec![Level::new(InodeId::ROOT, after, 0)];
        while self.found.len() < self.limit
            && let Some(level) = levels.last_mut()
        {
            let Some((name, inode)) = level.next(self.core)? else {
                levels.pop();
                self.names.pop();
                continue;
            };
            let after = level.after(&name);
            self.names.push(name);
            if self.visit(inode, after)? {
                let depth = levels.len();
                levels.push(Level::new(inode, after, depth));
            } else {
                self.names.pop();
            }
        }
        Ok(())
    }

    /// Looks at what `names` lead to; whether it is a directory to be visited.
    fn visit(&mut self, inode: InodeId, after: Option<&[Name]>) -> Result<bool> {
        let path = FilePath::from_names(self.names.clone())?;
        let bytes = path.to_bytes();
        let shared = bytes.len().min(self.prefix.len());
        // A longer path no call can name, be it to ask for the next page.
        if bytes[..shared] != self.prefix[..shared] || bytes.len() > PATH_BYTES_MAX {
            return Ok(false);
        }
        let record = match self.core.inode(inode) {
            Ok(record) => record,
            // It was deleted since the page was read.
            Err(Error::Stale { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        match record.kind() {
            FileKind::Directory => Ok(true),
            // The listing's start itself was in the one before.
            FileKind::File if after.is_some_and(<[Name]>::is_empty) => Ok(false),
            FileKind::File if bytes.len() >= self.prefix.len() => {
                self.found.push(info(self.core, path, inode, &record)?);
                Ok(false)
            }
            FileKind::File | FileKind::Symlink | FileKind::Special(_) => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests;

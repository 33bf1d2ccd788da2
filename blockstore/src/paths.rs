//! Paths inside transactions, and the file calls of the REST face.

use crate::core::Core;
use crate::error::{Error, Result};
use crate::file::attributes_of;
use crate::id::InodeId;
use crate::kv::{Family, KvRead};
use crate::name::{FilePath, Name};
use crate::namespace::{self, Removal};
use crate::record::{Body, DirentRecord, InodeRecord, LayerRecord, encode_cookie, key};
use crate::snapshot::open_layer;
use crate::transaction::Transaction;
use crate::types::{Attributes, FileInfo, FileKind};
use crate::units::{BLOCK_BYTES_U64, FILE_BYTES_MAX};

/// Files that one listing visits directories for at most, per page.
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
        FileKind::Directory | FileKind::Symlink => {
            Err(Error::WrongKind { what: format!("`{path}`"), expected: "file" })
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
                FileKind::File | FileKind::Symlink => {
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
        return Err(Error::WrongKind { what: format!("`{path}`"), expected: "file" });
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
        let inode = txn.take_inode();
        let layer = txn.make_layer(&open_layer(inode, None));
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
    info(core, path.clone(), inode, &record)
}

pub(crate) fn rename(core: &Core, from: &FilePath, to: &FilePath) -> Result<()> {
    let (from, to) = (from.clone(), to.clone());
    core.commit(move |txn| {
        let (directories, name) = from.split();
        let mut directory = InodeId::ROOT;
        for step in directories {
            let found = entry_in(txn, directory, step)?;
            directory = found.ok_or_else(|| Error::not_found(format!("`{from}`")))?.inode;
        }
        if entry_in(txn, directory, name)?.is_none() {
            return Err(Error::not_found(format!("`{from}`")));
        }
        let (to_directory, to_name) = parent_or_make(txn, &to)?;
        refuse_existing(txn, to_directory, &to_name, &to)?;
        namespace::rename_in(txn, &(directory, name.clone()), &(to_directory, to_name))
    })
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
    let mut walk =
        Walk { core, prefix, after: after.map(FilePath::names), limit, found: Vec::new() };
    let from = walk.after;
    walk.directory(InodeId::ROOT, &mut Vec::new(), from)?;
    Ok(walk.found)
}

struct Walk<'a> {
    core: &'a Core,
    prefix: &'a [u8],
    after: Option<&'a [Name]>,
    limit: usize,
    found: Vec<FileInfo>,
}

impl Walk<'_> {
    /// Visits a directory; `after` is what is left of the page's start below it.
    fn directory(
        &mut self,
        directory: InodeId,
        names: &mut Vec<Name>,
        after: Option<&[Name]>,
    ) -> Result<()> {
        let prefix = key::dirent(directory, b"");
        let end = crate::kv::prefix_end(&prefix);
        let mut from = match after.and_then(<[Name]>::first) {
            Some(name) => key::dirent(directory, name.as_bytes()),
            None => prefix.clone(),
        };
        loop {
            let page = self.page(&from, &end)?;
            let Some((last, _)) = page.last() else {
                return Ok(());
            };
            from = last.clone();
            from.push(0);
            for (key, value) in page {
                if self.found.len() >= self.limit {
                    return Ok(());
                }
                let name = Name::new(key.get(prefix.len()..).unwrap_or_default())?;
                let inside = match after.and_then(<[Name]>::split_first) {
                    Some((first, rest)) if *first == name => Some(rest),
                    _ => None,
                };
                names.push(name);
                self.visit(DirentRecord::decode(&value)?.inode, names, inside)?;
                names.pop();
            }
        }
    }

    fn page(&self, from: &[u8], end: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut page = Vec::new();
        self.core.kv.scan(Family::Dirent, from, end, &mut |key, value| {
            page.push((key.to_vec(), value.to_vec()));
            Ok(if page.len() < LIST_PAGE_ENTRIES {
                std::ops::ControlFlow::Continue(())
            } else {
                std::ops::ControlFlow::Break(())
            })
        })?;
        Ok(page)
    }

    fn visit(
        &mut self,
        inode: InodeId,
        names: &mut Vec<Name>,
        after: Option<&[Name]>,
    ) -> Result<()> {
        let path = FilePath::from_names(names.clone())?;
        let bytes = path.to_bytes();
        let shared = bytes.len().min(self.prefix.len());
        if bytes[..shared] != self.prefix[..shared] {
            return Ok(());
        }
        let record = match self.core.inode(inode) {
            Ok(record) => record,
            // It was deleted since the page was read.
            Err(Error::Stale { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        match record.kind() {
            FileKind::Directory => self.directory(inode, names, after),
            // The page's start itself was in the page before.
            FileKind::File if after.is_some_and(<[Name]>::is_empty) => Ok(()),
            FileKind::File if bytes.len() >= self.prefix.len() => {
                self.found.push(info(self.core, path, inode, &record)?);
                Ok(())
            }
            FileKind::File | FileKind::Symlink => Ok(()),
        }
    }
}

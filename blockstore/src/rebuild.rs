//! Making the index anew: the newest whole copy of it, and what the log says from there on. A
//! store that nothing was ever compacted in needs no copy: its log has all.
//!
//! Invariants: nothing of the log is removed or cut, and the old index stays as it was until the
//! new one is whole and durable. What cannot be made whole is refused, and named; so is a log that
//! has less than the old index.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::core::Budget;
use crate::disk::{Disk, FileName, FileRole, LocalDisk};
use crate::error::{Error, Result};
use crate::id::StoreId;
use crate::index_copy;
use crate::kv::{Family, Kv, RocksKv};
use crate::open::{self, Opening};
use crate::options::Options;
use crate::record::{LogPosition, key};
use crate::reserve;
use crate::segment_format::{FILE_HEADER_BYTES, decode_file_header};
use crate::store::Store;

/// The index while it is made; a crash may leave it, and it means nothing then.
const NEW_INDEX: &str = "index.new";

/// What an index was made anew from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// The copy that was taken, as `copies/0000000000000007.idx`; `None`: the log alone.
    pub copy: Option<String>,
    /// Entries of the copy.
    pub copied_entries: u64,
    /// Commits of the log that came behind it.
    pub replayed_commits: u64,
    /// Where the old index is now. It may be deleted.
    pub set_aside: Option<PathBuf>,
}

impl Store {
    /// Makes the index of the store in `options.data_dir` anew, from its newest whole copy and the
    /// log, and sets the old one aside. No server may have the store open. If it fails, the old
    /// index is where it was. An old index that can be read has to be in the new one: what it has
    /// was acknowledged.
    ///
    /// # Errors
    /// `Locked`, `Format` as [`Store::open`]; `Corrupt` when a part of what is needed is missing or
    /// damaged: it is named.
    pub fn rebuild_index(options: &Options) -> Result<Rebuilt> {
        rebuild_local(options)
    }

    /// Fills an empty index from what is on the disk; for tests that inject failures.
    ///
    /// # Errors
    /// As [`Store::rebuild_index`], but for `Locked`.
    pub fn rebuild_index_with(
        kv: Arc<dyn Kv>,
        disk: Arc<dyn Disk>,
        options: Options,
    ) -> Result<Rebuilt> {
        rebuild(kv, disk, options, None)
    }
}

fn rebuild_local(options: &Options) -> Result<Rebuilt> {
    let data_dir = &options.data_dir;
    let _lock = open::lock(data_dir)?;
    open::check_format(data_dir)?;
    let disk: Arc<dyn Disk> = Arc::new(LocalDisk::open(data_dir)?);
    let new = data_dir.join(NEW_INDEX);
    remove_folder(&new)?;
    let known = known(&data_dir.join("index"));
    let open = || RocksKv::open(&new, Budget::of(options).index_bytes);
    let made = reserve::or_give_back(disk.as_ref(), open)
        .and_then(|kv| rebuild(Arc::new(kv), disk, options.clone(), known));
    let mut rebuilt = made.inspect_err(|_| remove_unfinished(data_dir))?;
    rebuilt.set_aside = swap(data_dir, &new)?;
    Ok(rebuilt)
}

/// Removes an index that was not finished: it may be as large as a whole one.
pub(crate) fn remove_unfinished(data_dir: &Path) {
    if let Err(error) = remove_folder(&data_dir.join(NEW_INDEX)) {
        tracing::warn!(%error, "what is left of an unfinished rebuild stays");
    }
}

/// The store that an index is of, and up to where it has the log. One that cannot be read tells
/// nothing: that is why it is made anew.
fn known(index: &Path) -> Option<(StoreId, LogPosition)> {
    let read = || -> Result<Option<(StoreId, LogPosition)>> {
        let [store, position] =
            RocksKv::peek(index, Family::Meta, [key::META_STORE, key::META_POSITION])?;
        let (Some(store), Some(position)) = (store, position) else { return Ok(None) };
        Ok(Some((open::decode_store(&store)?.0, LogPosition::decode(&position)?)))
    };
    read().unwrap_or_else(|error| {
        tracing::warn!(%error, "the old index does not tell up to where it has the log");
        None
    })
}

/// Fills an empty index, and makes it durable. `old`: see [`known`].
fn rebuild(
    kv: Arc<dyn Kv>,
    disk: Arc<dyn Disk>,
    options: Options,
    old: Option<(StoreId, LogPosition)>,
) -> Result<Rebuilt> {
    let logs: Vec<FileName> =
        disk.list()?.into_iter().filter(|name| name.role == FileRole::Log).collect();
    let Some(first) = logs.first().copied() else {
        return Err(Error::corrupt("log", "there is no log file: nothing to make an index from"));
    };
    let store = logs.iter().find_map(|name| store_of(disk.as_ref(), *name));
    let known = old.filter(|(of, _)| store == Some(*of)).map(|(_, position)| position);
    let mut rebuilt = Rebuilt::default();
    let mut of_no_use = Vec::new();
    match index_copy::load(kv.as_ref(), disk.as_ref(), store)? {
        Ok(loaded) => {
            rebuilt.copy = Some(loaded.name.to_string());
            rebuilt.copied_entries = loaded.entries;
        }
        // The replay tells whether a log that begins at the first file has all others too.
        Err(faults) if first.number.get() == 1 => of_no_use = faults,
        Err(faults) => {
            let reason = match faults.as_slice() {
                [] => "there is no copy of it".to_owned(),
                faults => format!("no copy of it is whole ({})", faults.join("; ")),
            };
            let reason = format!(
                "{reason}, and log/0000000000000001.seg, where the log began, is gone: the first \
                 log file is {first}"
            );
            return Err(Error::corrupt("index", reason));
        }
    }
    tracing::info!(log_files = logs.len(), "replaying the log");
    let core = open::open_core(kv, disk, options, Opening::Rebuild { known })
        .map_err(|error| without_copies(error, &of_no_use))?;
    reserve::flush_new_index(core.kv.as_ref(), core.disk.as_ref())
        .map_err(|error| reserve::full_or(&core, error))?;
    rebuilt.replayed_commits = core.replayed_commits;
    Ok(rebuilt)
}

/// What the log alone does not give, a copy might have given.
fn without_copies(error: Error, faults: &[String]) -> Error {
    match error {
        Error::Corrupt { place, reason } if !faults.is_empty() => {
            let reason =
                format!("{reason}; and no copy of the index is whole ({})", faults.join("; "));
            Error::Corrupt { place, reason }
        }
        other => other,
    }
}

/// The store that a log file says it is of.
fn store_of(disk: &dyn Disk, name: FileName) -> Option<StoreId> {
    let header = disk.open(name).ok()?.read_at(0, FILE_HEADER_BYTES).ok()?;
    decode_file_header(name, &header).ok()
}

/// Puts the new index in the place of the old one, which goes aside; answers to where.
fn swap(data_dir: &Path, new: &Path) -> Result<Option<PathBuf>> {
    let index = data_dir.join("index");
    let fail = |source| Error::io("rename", index.display().to_string(), source);
    let aside = (1_u64..)
        .map(|number| data_dir.join(format!("index.damaged-{number}")))
        .find(|path| !path.exists())
        .filter(|_| index.exists());
    match &aside {
        // A crash behind this leaves the old one where an unfinished one would be.
        Some(aside) if exchange(new, &index).map_err(fail)? => std::fs::rename(new, aside),
        // A crash in between leaves no index, which is found, and the command can be given again.
        Some(aside) => std::fs::rename(&index, aside).and_then(|()| std::fs::rename(new, &index)),
        None => std::fs::rename(new, &index),
    }
    .map_err(fail)?;
    File::open(data_dir).and_then(|directory| directory.sync_all()).map_err(fail)?;
    Ok(aside)
}

/// Gives two folders each other's names at one moment; `false` where the file system cannot.
fn exchange(one: &Path, other: &Path) -> std::io::Result<bool> {
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("remove", path.display().to_string(), source))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with one file that has its name.
    fn folder(directory: &Path, name: &str) -> PathBuf {
        let path = directory.join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("file"), name).unwrap();
        path
    }

    fn content(path: &Path) -> String {
        std::fs::read_to_string(path.join("file")).unwrap()
    }

    #[test]
    fn there_is_an_index_at_every_moment_of_the_swap() {
        let directory = tempfile::tempdir().unwrap();
        let (index, new) = (folder(directory.path(), "index"), folder(directory.path(), NEW_INDEX));
        // A kill behind this one call; the file systems of tests know it.
        assert!(exchange(&new, &index).unwrap());
        assert_eq!((content(&index).as_str(), content(&new).as_str()), (NEW_INDEX, "index"));
        remove_unfinished(directory.path());
        assert!(!new.exists() && index.exists());
        remove_unfinished(directory.path());
    }

    #[test]
    fn the_old_index_goes_aside() {
        let directory = tempfile::tempdir().unwrap();
        let new = folder(directory.path(), NEW_INDEX);
        assert_eq!(swap(directory.path(), &new).unwrap(), None);
        let index = directory.path().join("index");
        assert_eq!(content(&index), NEW_INDEX);
        let new = folder(directory.path(), NEW_INDEX);
        std::fs::write(new.join("file"), "second").unwrap();
        let aside = directory.path().join("index.damaged-1");
        assert_eq!(swap(directory.path(), &new).unwrap().as_ref(), Some(&aside));
        assert_eq!((content(&index).as_str(), content(&aside).as_str()), ("second", NEW_INDEX));
        assert!(!new.exists());
    }
}

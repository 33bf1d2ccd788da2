//! Whether a directory lies below another, which must not move there.
//!
//! That takes as long as directories are deep, and clients make them as deep as they like: it is looked
//! up before the transaction, for which others wait. What was found holds as long as no directory has got
//! another parent since: one that is new has nothing below it, and one that has cannot go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::InodeId;
use crate::kind::FileKind;
use crate::namespace::Place;
use crate::paths;
use crate::record::{Body, InodeRecord};
use crate::transaction::Transaction;

/// What was found before a rename's transaction.
#[derive(Debug)]
pub(crate) struct Ancestry {
    /// What is to move; `None`: nothing had the name.
    moved: Option<InodeId>,
    /// `None`: `missing`.
    is_below: Option<bool>,
    /// What could not be looked up: a directory that went meanwhile, or that is missing.
    missing: Option<Error>,
    /// Moves of directories that were applied by then, and by now.
    moves: u64,
    moves_now: Arc<AtomicU64>,
}

impl Ancestry {
    /// Looks whether the directory `to` lies below what has the name `from`, or is that.
    pub(crate) fn look(core: &Core, (directory, name): &Place, to: InodeId) -> Result<Self> {
        let moves_now = Arc::clone(&core.directory_moves);
        let moves = moves_now.load(Ordering::Acquire);
        let moved = paths::entry(core.kv.as_ref(), *directory, name)?.map(|entry| entry.inode);
        // What stays in its directory, or is none, is not asked for.
        let (is_below, missing) = match moved {
            Some(moved) if *directory != to => match look_below(core, moved, to) {
                Err(error @ (Error::Stale { .. } | Error::NotDirectory { .. })) => {
                    (None, Some(error))
                }
                found => (Some(found?), None),
            },
            _ => (None, None),
        };
        Ok(Self { moved, is_below, missing, moves, moves_now })
    }

    /// Why it is to be looked up again, if something was missing.
    pub(crate) const fn take_missing(&mut self) -> Option<Error> {
        self.missing.take()
    }

    /// Whether `to` lies below `moved`; `None`: it is to be looked up again.
    pub(crate) fn is_below(&self, txn: &Transaction<'_>, moved: InodeId) -> Option<bool> {
        let is_old = self.moves_now.load(Ordering::Acquire) != self.moves;
        let holds = self.moved == Some(moved) && !is_old && !txn.has_moved_directory();
        self.is_below.filter(|_| holds)
    }
}

fn look_below(core: &Core, moved: InodeId, to: InodeId) -> Result<bool> {
    if core.inode(moved)?.kind() != FileKind::Directory {
        return Ok(false);
    }
    lies_below(moved, to, |inode| core.inode(inode))
}

/// Whether `inode` lies below `above`, or is that.
pub(crate) fn lies_below(
    above: InodeId,
    inode: InodeId,
    record: impl Fn(InodeId) -> Result<InodeRecord>,
) -> Result<bool> {
    let mut ancestor = inode;
    while ancestor != above {
        if ancestor == InodeId::ROOT {
            return Ok(false);
        }
        let Body::Directory { parent, .. } = record(ancestor)?.body else {
            return Err(Error::NotDirectory { what: format!("inode {ancestor}") });
        };
        ancestor = parent;
    }
    Ok(true)
}

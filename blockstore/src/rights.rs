//! Changes that hold only as long as what their caller judged.
//!
//! ```text
//! front end: looks at owner, group, mode -> decides -> calls with what it saw
//! transaction:        still so? -- yes --> the change
//!                               \- no ---> `RightsChanged`: the caller judges anew
//! ```
//! Between a look and the transaction others may change an owner or a mode, or put another file in the
//! place of the one that was judged. The store itself knows no users.

use crate::attributes;
use crate::error::{Error, Result};
use crate::file::attributes_of;
use crate::id::InodeId;
use crate::name::Name;
use crate::namespace::{self, Removal};
use crate::paths::entry_in;
use crate::store::Store;
use crate::time::Timestamp;
use crate::transaction::Transaction;
use crate::types::{Attributes, Change, CreateMode, Created, SetAttributes};

/// What a decision about an object went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    inode: InodeId,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl From<&Attributes> for Rights {
    fn from(attributes: &Attributes) -> Self {
        let Attributes { inode, mode, uid, gid, .. } = *attributes;
        Self { inode, mode, uid, gid }
    }
}

impl Rights {
    /// Refuses what was decided if the object has others now.
    pub(crate) fn require(self, txn: &Transaction<'_>) -> Result<()> {
        let now = attributes_of(self.inode, &txn.inode(self.inode)?);
        if Self::from(&now) == self { Ok(()) } else { Err(self.changed()) }
    }

    const fn changed(self) -> Error {
        Error::RightsChanged { inode: self.inode.get() }
    }
}

/// What a decision about a directory's entry went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRights {
    /// The directory.
    pub directory: Rights,
    /// What has the name in it.
    pub entry: Named,
}

/// What a decision about a name went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// Whatever has it.
    Anything,
    /// What has it, if anything has.
    Object(Option<Rights>),
}

impl EntryRights {
    /// What was judged of the object that has the name.
    pub(crate) const fn object(self) -> Option<Rights> {
        match self.entry {
            Named::Object(object) => object,
            Named::Anything => None,
        }
    }

    pub(crate) fn require(self, txn: &Transaction<'_>, name: &Name) -> Result<()> {
        self.directory.require(txn)?;
        let Named::Object(judged) = self.entry else { return Ok(()) };
        let found = entry_in(txn, self.directory.inode, name)?.map(|found| found.inode);
        if found != judged.map(|judged| judged.inode) {
            // A name of what is missing is damage, and judged anew it would be no other.
            found.map_or(Ok(()), |found| txn.inode(found).map(drop))?;
            return Err(self.directory.changed());
        }
        judged.map_or(Ok(()), |judged| judged.require(txn))
    }
}

impl Store {
    /// As [`Store::set_attributes`], if the object still has the rights that were judged.
    ///
    /// # Errors
    /// `RightsChanged`, too.
    pub fn set_attributes_judged(
        &self,
        inode: InodeId,
        set: &SetAttributes,
        guard: Option<Timestamp>,
        judged: Option<Rights>,
    ) -> Result<Change> {
        attributes::set_judged(&self.core, inode, set, guard, judged)
    }

    /// As [`Store::create`], if the directory and the entry still are what was judged.
    ///
    /// # Errors
    /// `RightsChanged`, too.
    pub fn create_judged(
        &self,
        (directory, name): (InodeId, &Name),
        mode: CreateMode,
        set: &SetAttributes,
        judged: Option<EntryRights>,
    ) -> Result<Created> {
        namespace::create(&self.core, (directory, name), mode, set, judged)
    }

    /// As [`Store::remove`], if the directory and the entry still are what was judged.
    ///
    /// # Errors
    /// `RightsChanged`, too.
    pub fn remove_judged(
        &self,
        directory: InodeId,
        name: &Name,
        judged: Option<EntryRights>,
    ) -> Result<Change> {
        namespace::remove_judged(&self.core, (directory, name), Removal::NotDirectory, judged)
    }

    /// The same of [`Store::remove_directory`].
    ///
    /// # Errors
    /// `RightsChanged`, too.
    pub fn remove_directory_judged(
        &self,
        directory: InodeId,
        name: &Name,
        judged: Option<EntryRights>,
    ) -> Result<Change> {
        namespace::remove_judged(&self.core, (directory, name), Removal::Directory, judged)
    }

    /// As [`Store::rename`], if directories and entries on both sides still are what was judged.
    ///
    /// # Errors
    /// `RightsChanged`, too.
    pub fn rename_judged(
        &self,
        (from, from_name): (InodeId, &Name),
        (to, to_name): (InodeId, &Name),
        judged: Option<[EntryRights; 2]>,
    ) -> Result<(Change, Change)> {
        let (from, to) = ((from, from_name.clone()), (to, to_name.clone()));
        namespace::rename(&self.core, from, to, judged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::testing::{World, options};

    const NONE: SetAttributes = SetAttributes {
        mode: None,
        uid: None,
        gid: None,
        size_bytes: None,
        accessed_at: None,
        modified_at: None,
    };

    fn name(text: &[u8]) -> Name {
        Name::new(text).unwrap()
    }

    /// Rights of the entry as they are now.
    fn judge(world: &World, name: &Name) -> EntryRights {
        let attributes = |inode| namespace::attributes(&world.core, inode).unwrap();
        let entry = namespace::lookup(&world.core, InodeId::ROOT, name).ok();
        let directory = Rights::from(&attributes(InodeId::ROOT));
        EntryRights { directory, entry: Named::Object(entry.as_ref().map(Rights::from)) }
    }

    #[test]
    fn a_change_is_refused_once_what_was_judged_is_another() {
        let world = World::new(options(1 << 20), None);
        let (mine, theirs) = (world.create("mine"), world.create("theirs"));
        let (core, place) = (&world.core, (InodeId::ROOT, &name(b"mine")));
        let to = || (InodeId::ROOT, name(b"new"));
        let rights = Rights::from(&namespace::attributes(core, mine).unwrap());
        let empty = SetAttributes { size_bytes: Some(0), ..NONE };
        let all = |judged: EntryRights, new: EntryRights| {
            let from = (place.0, place.1.clone());
            let both = Some([judged, new]);
            [
                attributes::set_judged(core, mine, &empty, None, Some(rights)).map(drop),
                namespace::create(core, place, CreateMode::Unchecked, &empty, Some(judged))
                    .map(drop),
                namespace::rename(core, from, to(), both).map(drop),
                namespace::remove_judged(core, place, Removal::Any, Some(judged)).map(drop),
            ]
        };
        let refused = |judged: EntryRights, new: EntryRights, first: usize| {
            for outcome in all(judged, new).into_iter().skip(first) {
                let error = outcome.unwrap_err();
                assert!(matches!(error, Error::RightsChanged { .. }), "{error}");
                assert_eq!(error.kind(), ErrorKind::Busy);
            }
        };
        let (judged, new) = (judge(&world, place.1), judge(&world, &to().1));
        assert_eq!(judged.entry, Named::Object(Some(rights)));
        // Another owner; of the directory, which SETATTR does not ask.
        for (first, inode) in [mine, InodeId::ROOT].into_iter().enumerate() {
            let chown = SetAttributes { uid: Some(7), ..NONE };
            attributes::set_in(core, inode, &chown, None).unwrap();
            refused(judged, new, first);
            let back = SetAttributes { uid: Some(0), ..NONE };
            attributes::set_in(core, inode, &back, None).unwrap();
        }
        // Another file in its place, of which all the same holds.
        let aside = (InodeId::ROOT, name(b"aside"));
        namespace::rename(core, (place.0, place.1.clone()), aside.clone(), None).unwrap();
        let from = (InodeId::ROOT, name(b"theirs"));
        namespace::rename(core, from, (place.0, place.1.clone()), None).unwrap();
        refused(judged, new, 1);
        let now = namespace::lookup(core, place.0, place.1).unwrap();
        assert_eq!(now.inode, theirs);
        // Of a name that was not judged nothing is asked.
        let anything = |judged: EntryRights| EntryRights { entry: Named::Anything, ..judged };
        assert!(all(anything(judged), anything(new))[2].is_ok());
        namespace::rename(core, to(), (place.0, place.1.clone()), None).unwrap();
        // What holds still is carried out.
        let judged = judge(&world, place.1);
        let target = judge(&world, &to().1);
        namespace::rename(core, (place.0, place.1.clone()), to(), Some([judged, target])).unwrap();
    }
}

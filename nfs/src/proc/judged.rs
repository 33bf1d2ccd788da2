//! Decisions about a change that must still hold when it is made.
//!
//! ```text
//! look -> decide -> store: still so? -- yes --> done
//!   ^                          | no
//!   +--------------------------+
//! ```
//! Whether the sticky bit, an owner or a mode allow a change is decided before the store's transaction.
//! The store is told what the decision went by, and refuses the change if that is another by then.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, EntryRights, Error, Name, Named, Rights, SetAttributes};

use super::Call;

/// Times that one call is judged. Each time somebody else has changed rights in between: who is kept
/// from it so often may try again later.
const JUDGEMENTS_MAX: usize = 16;

/// Tells that a change was refused as it was judged by what is outdated.
#[derive(Debug, Default)]
pub(super) struct Outdated(bool);

impl Outdated {
    /// Notes why the store refused it.
    pub(super) fn note(&mut self, error: &Error) {
        self.0 = matches!(error, Error::RightsChanged { .. });
    }
}

/// Judges and makes a change, again if its judgement was outdated.
pub(super) fn judged<T, F>(mut attempt: impl FnMut(&mut Outdated) -> Result<T, F>) -> Result<T, F> {
    let mut left = JUDGEMENTS_MAX;
    loop {
        left -= 1;
        let mut outdated = Outdated::default();
        let outcome = attempt(&mut outdated);
        if !outdated.0 || left == 0 {
            return outcome;
        }
    }
}

/// An entry that is being judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct JudgedEntry {
    /// What has the name now, if that matters.
    pub(super) found: Option<Attributes>,
    /// What the store is to compare with; nothing for the superuser, to whom none of it matters.
    pub(super) rights: Option<EntryRights>,
}

impl Call<'_> {
    /// The directory and, if the decision depends on that, what has the name in it.
    pub(super) fn judge_entry(
        &self,
        directory: &Attributes,
        name: &Name,
        matters: bool,
    ) -> Result<JudgedEntry, nfsstat3> {
        if self.caller.credentials.is_root() {
            return Ok(JudgedEntry { found: None, rights: None });
        }
        let (found, entry) = if matters {
            let found = self.entry(directory.inode, name)?;
            (found, Named::Object(found.as_ref().map(Rights::from)))
        } else {
            (None, Named::Anything)
        };
        let rights = EntryRights { directory: Rights::from(directory), entry };
        Ok(JudgedEntry { found, rights: Some(rights) })
    }

    /// Gives an object a mode, which was decided by its attributes.
    pub(super) fn set_mode(
        &self,
        object: &Attributes,
        mode: u32,
        outdated: &mut Outdated,
    ) -> Result<(), Error> {
        let set = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
        let rights = self.judge(object);
        let outcome = self.shared.store.set_attributes_judged(object.inode, &set, None, rights);
        outcome.map(|_| ()).inspect_err(|error| outdated.note(error))
    }

    /// What the decision about an object went by.
    pub(super) fn judge(&self, object: &Attributes) -> Option<Rights> {
        (!self.caller.credentials.is_root()).then(|| Rights::from(object))
    }
}

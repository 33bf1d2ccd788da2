//! REMOVE and RMDIR (RFC 1813 sections 3.3.12 and 3.3.13).

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, Change, Name};

use super::judged::{JudgedEntry, Outdated, judged};
use super::{Call, Failure, NotRun, Place, encode};
use crate::permission;
use crate::xdr::{Decoder, Encoder};

/// What the call is for; it refuses the other kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    NotDirectory,
    Directory,
}

pub(super) fn remove(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    remove_entry(call, Victim::NotDirectory, arguments, reply)
}

pub(super) fn remove_directory(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    remove_entry(call, Victim::Directory, arguments, reply)
}

fn remove_entry(
    call: &Call<'_>,
    victim: Victim,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    match judged(|outdated| try_remove(call, victim, &place, outdated)) {
        Ok(change) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_change(reply, &change);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_no_change(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_remove(
    call: &Call<'_>,
    victim: Victim,
    place: &Place<'_>,
    outdated: &mut Outdated,
) -> Result<Change, Failure> {
    let directory = call.changeable_directory(place.directory)?;
    let failure = |status| Failure { status, attributes: Some(directory) };
    let name = removable_name(victim, &directory, place).map_err(failure)?;
    let is_guarded = permission::is_guarded_by_sticky(&directory, &call.caller.credentials);
    let entry = call.judge_entry(&directory, &name, is_guarded).map_err(failure)?;
    call.check_sticky(&directory, &entry).map_err(failure)?;
    let store = &call.shared.store;
    let outcome = match victim {
        Victim::NotDirectory => store.remove_judged(directory.inode, &name, entry.rights),
        Victim::Directory => store.remove_directory_judged(directory.inode, &name, entry.rights),
    };
    outcome.map_err(|error| {
        outdated.note(&error);
        call.failure(directory.inode, &error)
    })
}

fn removable_name(
    victim: Victim,
    directory: &Attributes,
    place: &Place<'_>,
) -> Result<Name, nfsstat3> {
    if Call::is_snapshot_directory(directory.inode, place.name) {
        return Err(nfsstat3::NFS3ERR_ACCES);
    }
    match (victim, place.name) {
        (Victim::NotDirectory, b"." | b"..") => Err(nfsstat3::NFS3ERR_ISDIR),
        // RFC 1813 section 3.3.13.
        (Victim::Directory, b".") => Err(nfsstat3::NFS3ERR_INVAL),
        (Victim::Directory, b"..") => Err(nfsstat3::NFS3ERR_EXIST),
        _ => place.entry_name(),
    }
}

impl Call<'_> {
    /// Checks that the sticky bit of the directory lets the caller remove the entry, if there
    /// is one.
    pub(super) fn check_sticky(
        &self,
        directory: &Attributes,
        entry: &JudgedEntry,
    ) -> Result<(), nfsstat3> {
        let user = &self.caller.credentials;
        match &entry.found {
            Some(found) if !permission::may_remove(directory, found, user) => {
                Err(nfsstat3::NFS3ERR_ACCES)
            }
            _ => Ok(()),
        }
    }
}

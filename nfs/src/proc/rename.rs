//! RENAME (RFC 1813 section 3.3.14).

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, Change, FileKind, Name};

use super::judged::{JudgedEntry, Outdated, judged};
use super::{Call, NotRun, Place, encode};
use crate::permission::{self, Permission};
use crate::status;
use crate::xdr::{Decoder, Encoder};

/// A failure, and what is known of the two directories. Boxed, for it is large.
struct RenameFailure {
    status: nfsstat3,
    from: Option<Attributes>,
    to: Option<Attributes>,
}

pub(super) fn rename(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let from = Place::decode(arguments)?;
    let to = Place::decode(arguments)?;
    match judged(|outdated| try_rename(call, &from, &to, outdated)) {
        Ok((from, to)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_change(reply, &from);
            call.put_change(reply, &to);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_no_change(reply, failure.from.as_ref());
            call.put_no_change(reply, failure.to.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_rename(
    call: &Call<'_>,
    from: &Place<'_>,
    to: &Place<'_>,
    outdated: &mut Outdated,
) -> Result<(Change, Change), Box<RenameFailure>> {
    let from_directory = call.changeable_directory(from.directory).map_err(|failure| {
        RenameFailure { status: failure.status, from: failure.attributes, to: None }
    })?;
    let to_directory = call.changeable_directory(to.directory).map_err(|failure| {
        RenameFailure { status: failure.status, from: Some(from_directory), to: failure.attributes }
    })?;
    let failure =
        |status| RenameFailure { status, from: Some(from_directory), to: Some(to_directory) };
    let (from_name, to_name) =
        names(call, (&from_directory, from), (&to_directory, to)).map_err(failure)?;
    let is_guarded =
        |directory| permission::is_guarded_by_sticky(directory, &call.caller.credentials);
    let matters = is_guarded(&from_directory) || from_directory.inode != to_directory.inode;
    let moved = call.judge_entry(&from_directory, &from_name, matters).map_err(failure)?;
    let matters = is_guarded(&to_directory);
    let replaced = call.judge_entry(&to_directory, &to_name, matters).map_err(failure)?;
    check_entries(call, (&from_directory, &moved), (&to_directory, &replaced)).map_err(failure)?;
    let store = &call.shared.store;
    let outcome = store.rename_judged(
        (from_directory.inode, &from_name),
        (to_directory.inode, &to_name),
        moved.rights.zip(replaced.rights).map(|(moved, replaced)| [moved, replaced]),
    );
    let renamed = outcome.map_err(|error| {
        outdated.note(&error);
        RenameFailure {
            status: status::of_error(&error),
            from: store.attributes(from_directory.inode).ok(),
            to: store.attributes(to_directory.inode).ok(),
        }
    })?;
    Ok(renamed)
}

fn names(
    call: &Call<'_>,
    (from_directory, from): (&Attributes, &Place<'_>),
    (to_directory, to): (&Attributes, &Place<'_>),
) -> Result<(Name, Name), nfsstat3> {
    if from.is_dots() || to.is_dots() {
        return Err(nfsstat3::NFS3ERR_INVAL);
    }
    if Call::is_snapshot_directory(from_directory.inode, from.name) {
        return Err(nfsstat3::NFS3ERR_ACCES);
    }
    Ok((from.entry_name()?, call.new_entry_name(to_directory, to)?))
}

/// What a rename asks of the entries themselves: of both the consent of a sticky directory,
/// and of a directory that changes its parent the right to write it, for its `..` changes.
fn check_entries(
    call: &Call<'_>,
    (from_directory, moved): (&Attributes, &JudgedEntry),
    (to_directory, replaced): (&Attributes, &JudgedEntry),
) -> Result<(), nfsstat3> {
    let user = &call.caller.credentials;
    call.check_sticky(from_directory, moved)?;
    call.check_sticky(to_directory, replaced)?;
    if from_directory.inode == to_directory.inode {
        return Ok(());
    }
    match &moved.found {
        Some(moved)
            if moved.kind == FileKind::Directory
                && !permission::allows(moved, user, Permission::Write) =>
        {
            Err(nfsstat3::NFS3ERR_ACCES)
        }
        _ => Ok(()),
    }
}

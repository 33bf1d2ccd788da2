//! CREATE, MKDIR, SYMLINK and MKNOD (RFC 1813 sections 3.3.8 to 3.3.11): calls that make an
//! entry. They share the shape of their results.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{
    Attributes, CreateMode, Created, DeviceNumber, EntryRights, FileKind, Name, SYMLINK_BYTES_MAX,
    SetAttributes, SpecialFile,
};

use super::encode::{self, WantedAttributes};
use super::judged::{Outdated, judged};
use super::{Call, Failure, NotRun, Place};
use crate::limits;
use crate::permission;
use crate::xdr::{Decoder, Encoder, Malformed};

/// Mode of a file, also a special one, whose maker names none. After an EXCLUSIVE create the client sets the real
/// one by SETATTR, so until then it is the owner's alone.
const FILE_MODE: u32 = 0o600;
/// Mode of a directory whose maker names none.
const DIRECTORY_MODE: u32 = 0o755;
/// Mode that symbolic links show; nobody checks it.
const SYMLINK_MODE: u32 = 0o777;

/// What is to be made.
enum New<'a> {
    File { mode: CreateMode, wanted: Option<WantedAttributes> },
    Directory { wanted: WantedAttributes },
    Symlink { wanted: WantedAttributes, target: &'a [u8] },
    Special { wanted: WantedAttributes, special: SpecialFile },
}

impl New<'_> {
    fn wanted(&self) -> Result<SetAttributes, nfsstat3> {
        match self {
            Self::File { wanted: None, .. } => Ok(SetAttributes::default()),
            Self::File { wanted: Some(wanted), .. }
            | Self::Directory { wanted }
            | Self::Symlink { wanted, .. }
            | Self::Special { wanted, .. } => wanted.checked(),
        }
    }

    const fn kind(&self) -> FileKind {
        match self {
            Self::File { .. } => FileKind::File,
            Self::Directory { .. } => FileKind::Directory,
            Self::Symlink { .. } => FileKind::Symlink,
            Self::Special { special, .. } => FileKind::Special(*special),
        }
    }

    const fn default_mode(&self) -> u32 {
        match self {
            Self::File { .. } | Self::Special { .. } => FILE_MODE,
            Self::Directory { .. } => DIRECTORY_MODE,
            Self::Symlink { .. } => SYMLINK_MODE,
        }
    }
}

pub(super) fn create(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    let new = match arguments.u32()? {
        0 => file(CreateMode::Unchecked, arguments)?,
        1 => file(CreateMode::Guarded, arguments)?,
        2 => New::File { mode: CreateMode::Exclusive(arguments.u64()?), wanted: None },
        got => {
            return Err(Malformed::Value { got, expected: "createmode3" }.into());
        }
    };
    Ok(make(call, &place, &new, reply))
}

fn file<'a>(mode: CreateMode, arguments: &mut Decoder<'a>) -> Result<New<'a>, Malformed> {
    Ok(New::File { mode, wanted: Some(WantedAttributes::decode(arguments)?) })
}

pub(super) fn make_directory(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    let wanted = WantedAttributes::decode(arguments)?;
    Ok(make(call, &place, &New::Directory { wanted }, reply))
}

pub(super) fn make_symlink(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    let wanted = WantedAttributes::decode(arguments)?;
    let target = arguments.opaque(limits::FRAME_BYTES_SMALL)?;
    Ok(make(call, &place, &New::Symlink { wanted, target }, reply))
}

pub(super) fn make_node(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    let new = match arguments.u32()? {
        3 => device(arguments, SpecialFile::BlockDevice)?,
        4 => device(arguments, SpecialFile::CharacterDevice)?,
        6 => special(WantedAttributes::decode(arguments)?, SpecialFile::Socket),
        7 => special(WantedAttributes::decode(arguments)?, SpecialFile::Fifo),
        // Files, directories and symbolic links have calls of their own.
        1 | 2 | 5 => {
            let failure = match call.changeable_directory(place.directory) {
                Ok(directory) => {
                    let status = nfsstat3::NFS3ERR_BADTYPE;
                    Failure { status, attributes: Some(directory) }
                }
                Err(failure) => failure,
            };
            return Ok(put_failure(call, &failure, reply));
        }
        got => {
            return Err(Malformed::Value { got, expected: "ftype3" }.into());
        }
    };
    Ok(make(call, &place, &new, reply))
}

/// `devicedata3`: the attributes, then the numbers.
fn device<'a>(
    arguments: &mut Decoder<'a>,
    kind: impl FnOnce(DeviceNumber) -> SpecialFile,
) -> Result<New<'a>, Malformed> {
    let wanted = WantedAttributes::decode(arguments)?;
    let number = DeviceNumber { major: arguments.u32()?, minor: arguments.u32()? };
    Ok(special(wanted, kind(number)))
}

const fn special<'a>(wanted: WantedAttributes, special: SpecialFile) -> New<'a> {
    New::Special { wanted, special }
}

fn make(call: &Call<'_>, place: &Place<'_>, new: &New<'_>, reply: &mut Encoder) -> nfsstat3 {
    match judged(|outdated| try_make(call, place, new, outdated)) {
        Ok(created) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            encode::some_handle(reply, &call.inode_handle(&created.attributes));
            call.put_after(reply, Some(&created.attributes));
            call.put_change(reply, &created.directory);
            nfsstat3::NFS3_OK
        }
        Err(failure) => put_failure(call, &failure, reply),
    }
}

fn put_failure(call: &Call<'_>, failure: &Failure, reply: &mut Encoder) -> nfsstat3 {
    encode::status(reply, failure.status);
    call.put_no_change(reply, failure.attributes.as_ref());
    failure.status
}

fn try_make(
    call: &Call<'_>,
    place: &Place<'_>,
    new: &New<'_>,
    outdated: &mut Outdated,
) -> Result<Created, Failure> {
    let directory = call.changeable_directory(place.directory)?;
    let failure = |status| Failure { status, attributes: Some(directory) };
    let name = call.new_entry_name(&directory, place).map_err(failure)?;
    let wanted = new.wanted().map_err(failure)?;
    let user = &call.caller.credentials;
    if !permission::may_make(new.kind(), user) {
        let is_taken = call.entry(directory.inode, &name).map_err(failure)?.is_some();
        let status = if is_taken { nfsstat3::NFS3ERR_EXIST } else { nfsstat3::NFS3ERR_PERM };
        return Err(failure(status));
    }
    let set = permission::new_object(&directory, user, new.kind(), &wanted, new.default_mode());
    let judged =
        judge_truncation(call, (&directory, &name), (new, &set), outdated).map_err(failure)?;
    if let New::Symlink { target, .. } = new {
        check_symlink_target(target).map_err(failure)?;
    }
    let store = &call.shared.store;
    let outcome = match *new {
        New::File { mode, .. } => store.create_judged((directory.inode, &name), mode, &set, judged),
        New::Directory { .. } => store.make_directory(directory.inode, &name, &set),
        New::Symlink { target, .. } => store.make_symlink(directory.inode, &name, target, &set),
        New::Special { special, .. } => {
            store.make_special_file(directory.inode, &name, special, &set)
        }
    };
    outcome.map_err(|error| {
        outdated.note(&error);
        call.failure(directory.inode, &error)
    })
}

fn check_symlink_target(target: &[u8]) -> Result<(), nfsstat3> {
    if target.len() > SYMLINK_BYTES_MAX {
        return Err(nfsstat3::NFS3ERR_NAMETOOLONG);
    }
    if target.is_empty() || target.contains(&0) {
        return Err(nfsstat3::NFS3ERR_INVAL);
    }
    Ok(())
}

/// An UNCHECKED create that finds a file truncates it, which takes the right to write it, and set-id bits from it.
fn judge_truncation(
    call: &Call<'_>,
    (directory, name): (&Attributes, &Name),
    (new, set): (&New<'_>, &SetAttributes),
    outdated: &mut Outdated,
) -> Result<Option<EntryRights>, nfsstat3> {
    let is_unchecked = matches!(new, New::File { mode: CreateMode::Unchecked, .. });
    if !is_unchecked || set.size_bytes.is_none() {
        return Ok(None);
    }
    let entry = call.judge_entry(directory, name, true)?;
    let user = &call.caller.credentials;
    if let Some(file) = &entry.found {
        if !permission::may_write_data(file, user) {
            return Err(nfsstat3::NFS3ERR_ACCES);
        }
        if let Some(mode) = permission::mode_after_change_of_data(file, user) {
            // The store finds another mode than was judged by, and all is judged once more.
            let outcome = call.set_mode(file, mode, outdated);
            outcome.map_err(|error| call.failure(file.inode, &error).status)?;
        }
    }
    Ok(entry.rights)
}

impl Call<'_> {
    /// The name for a new entry. Those that are there without being entries exist already.
    pub(super) fn new_entry_name(
        &self,
        directory: &Attributes,
        place: &Place<'_>,
    ) -> Result<Name, nfsstat3> {
        if place.is_dots() || Self::is_snapshot_directory(directory.inode, place.name) {
            return Err(nfsstat3::NFS3ERR_EXIST);
        }
        place.entry_name()
    }
}

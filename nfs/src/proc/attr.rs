//! GETATTR, SETATTR and ACCESS (RFC 1813 sections 3.3.1, 3.3.2 and 3.3.4).

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Change, FileKind, Rights, Timestamp};

use super::encode::{self, WantedAttributes};
use super::judged::{Outdated, judged};
use super::{Call, Failure, NotRun, handle};
use crate::handle::Target;
use crate::options::ClientAccess;
use crate::permission::{self, access as bits};
use crate::xdr::{Decoder, Encoder, Malformed};

pub(super) fn get_attributes(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    match call.object(handle(arguments)?) {
        Ok(object) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_attributes(reply, &object.attributes);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(status) => {
            encode::status(reply, status);
            Ok(status)
        }
    }
}

struct SetArguments<'a> {
    handle: &'a [u8],
    wanted: WantedAttributes,
    guard: Guard,
}

/// The change time that the object must have for SETATTR to go ahead.
#[derive(Clone, Copy)]
enum Guard {
    None,
    Is(Timestamp),
    /// It decodes, but is no time: no object has it.
    Impossible,
}

impl<'a> SetArguments<'a> {
    fn decode(arguments: &mut Decoder<'a>) -> Result<Self, Malformed> {
        let handle = handle(arguments)?;
        let wanted = WantedAttributes::decode(arguments)?;
        let guard = if arguments.bool()? {
            encode::decode_time(arguments)?.map_or(Guard::Impossible, Guard::Is)
        } else {
            Guard::None
        };
        Ok(Self { handle, wanted, guard })
    }
}

pub(super) fn set_attributes(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let arguments = SetArguments::decode(arguments)?;
    match judged(|outdated| try_set_attributes(call, &arguments, outdated)) {
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

fn try_set_attributes(
    call: &Call<'_>,
    arguments: &SetArguments<'_>,
    outdated: &mut Outdated,
) -> Result<Change, Failure> {
    let object = call.changeable(arguments.handle)?;
    let failure = |status| Failure { status, attributes: Some(object) };
    let guard = match arguments.guard {
        Guard::None => None,
        Guard::Is(time) => Some(time),
        Guard::Impossible => return Err(failure(nfsstat3::NFS3ERR_NOT_SYNC)),
    };
    let wanted = arguments.wanted.checked().map_err(failure)?;
    let set =
        permission::set_attributes(&object, &call.caller.credentials, &wanted).map_err(failure)?;
    // A change of owner takes set-id bits from the mode that was looked at, also one by the superuser.
    let is_given = set.uid.is_some() || set.gid.is_some();
    let rights = is_given.then(|| Rights::from(&object)).or_else(|| call.judge(&object));
    let outcome = call.shared.store.set_attributes_judged(object.inode, &set, guard, rights);
    outcome.map_err(|error| {
        outdated.note(&error);
        call.failure(object.inode, &error)
    })
}

pub(super) fn access(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let handle = handle(arguments)?;
    let wanted = arguments.u32()?;
    match call.object(handle) {
        Ok(object) => {
            let is_changeable = matches!(object.target, Target::Inode { .. })
                && call.caller.access == ClientAccess::ReadWrite;
            let possible = if is_changeable {
                u32::MAX
            } else if matches!(object.attributes.kind, FileKind::Special(_)) {
                // What is written through it does not come here.
                !bits::DELETE
            } else {
                !(bits::MODIFY | bits::EXTEND | bits::DELETE)
            };
            let user = &call.caller.credentials;
            let granted = permission::granted(&object.attributes, user, wanted & possible);
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_after(reply, Some(&object.attributes));
            reply.u32(granted);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(status) => {
            encode::status(reply, status);
            call.put_after(reply, None);
            Ok(status)
        }
    }
}

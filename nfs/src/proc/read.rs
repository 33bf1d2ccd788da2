//! READ and READLINK (RFC 1813 sections 3.3.6 and 3.3.5).

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{FILE_BYTES_MAX, FileKind, ReadReply, Source};

use super::{Call, Failure, NotRun, encode, handle, stale_if_missing};
use crate::handle::Target;
use crate::limits;
use crate::options::ClientAccess;
use crate::permission;
use crate::status;
use crate::xdr::{Decoder, Encoder, Malformed};

struct Arguments<'a> {
    handle: &'a [u8],
    offset_bytes: u64,
    /// At most [`limits::TRANSFER_BYTES_MAX`]: a client that asks for more gets a short read.
    count: usize,
}

impl<'a> Arguments<'a> {
    fn decode(arguments: &mut Decoder<'a>) -> Result<Self, Malformed> {
        let handle = handle(arguments)?;
        let offset_bytes = arguments.u64()?;
        let count = usize::try_from(arguments.u32()?).unwrap_or(usize::MAX);
        Ok(Self { handle, offset_bytes, count: count.min(limits::TRANSFER_BYTES_MAX) })
    }
}

/// The bytes that a READ with these arguments may answer; its reply is charged with them.
pub(crate) fn peek_count(arguments: &Decoder<'_>) -> usize {
    Arguments::decode(&mut arguments.clone()).map_or(0, |arguments| arguments.count)
}

pub(super) fn read(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let arguments = Arguments::decode(arguments)?;
    match try_read(call, &arguments) {
        Ok(None) => Err(NotRun::WouldBlock),
        Ok(Some(read)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_after(reply, Some(&read.attributes));
            reply.u32(u32::try_from(read.length_bytes).unwrap_or(u32::MAX));
            reply.bool(read.end_of_file);
            let bytes = u64::try_from(read.length_bytes).unwrap_or(u64::MAX);
            call.shared.metrics.bytes_read.add(bytes);
            reply.payload(read.pieces);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_after(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

/// The bytes read, or `None` when they are not in memory and the call may not wait for them.
fn try_read(call: &Call<'_>, arguments: &Arguments<'_>) -> Result<Option<ReadReply>, Failure> {
    let target = call.target(arguments.handle)?;
    let source = match target {
        Target::Inode { inode, .. } => Source::File(inode),
        Target::SnapshotDirectory | Target::WorkerRoot | Target::WorkersDirectory => {
            return Err(nfsstat3::NFS3ERR_ISDIR.into());
        }
        Target::Snapshot(id) => Source::Snapshot(id),
    };
    // No file is larger, and past its end there is nothing at any offset.
    let offset_bytes = arguments.offset_bytes.min(FILE_BYTES_MAX);
    let store = &call.shared.store;
    let outcome = if call.may_block {
        store.read(source, offset_bytes, arguments.count)
    } else {
        match store.try_read(source, offset_bytes, arguments.count) {
            Some(outcome) => outcome,
            None => return Ok(None),
        }
    };
    let mut read = outcome.map_err(|error| read_failure(call, target, status::of_error(&error)))?;
    // The checks come after the read: its reply brings the attributes that they need, which
    // spares a look-up, and nobody sees the bytes before.
    let failure = |status| Failure { status, attributes: Some(read.attributes) };
    if let Target::Inode { generation, .. } = target
        && generation != read.attributes.generation
    {
        return Err(nfsstat3::NFS3ERR_STALE.into());
    }
    if !permission::may_read_data(&read.attributes, &call.caller.credentials) {
        return Err(failure(nfsstat3::NFS3ERR_ACCES));
    }
    // Who may only read changes nothing, not even this.
    if let (Target::Inode { .. }, ClientAccess::ReadWrite) = (target, call.caller.access) {
        read.attributes.accessed_at = store.note_read(&read.attributes);
    }
    Ok(Some(read))
}

fn read_failure(call: &Call<'_>, target: Target, status: nfsstat3) -> Failure {
    match target {
        Target::Inode { inode, generation } => {
            let failure = call.failure_status(inode, status);
            match failure.attributes {
                Some(attributes) if attributes.generation != generation => {
                    nfsstat3::NFS3ERR_STALE.into()
                }
                _ => failure,
            }
        }
        Target::SnapshotDirectory | Target::WorkerRoot | Target::WorkersDirectory => status.into(),
        Target::Snapshot(_) => stale_if_missing(status).into(),
    }
}

pub(super) fn read_link(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    match try_read_link(call, handle(arguments)?) {
        Ok((target, attributes)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_after(reply, Some(&attributes));
            reply.opaque(&target);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_after(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_read_link(
    call: &Call<'_>,
    handle: &[u8],
) -> Result<(Vec<u8>, slackwater_blockstore::Attributes), Failure> {
    let link = call.object(handle)?.attributes;
    if link.kind != FileKind::Symlink {
        return Err(Failure { status: nfsstat3::NFS3ERR_INVAL, attributes: Some(link) });
    }
    call.shared.store.read_link(link.inode).map_err(|error| call.failure(link.inode, &error))
}

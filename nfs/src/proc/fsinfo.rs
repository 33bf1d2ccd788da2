//! FSSTAT, FSINFO and PATHCONF (RFC 1813 sections 3.3.18 to 3.3.20).

use nfsserve::nfs::{FSF_CANSETTIME, FSF_HOMOGENEOUS, FSF_LINK, FSF_SYMLINK, nfsstat3};
use slackwater_blockstore::{FILE_BYTES_MAX, NAME_BYTES_MAX};

use super::{Call, NotRun, Object, encode, handle};
use crate::limits;
use crate::xdr::{Decoder, Encoder};

/// Decodes the handle, and writes the head of the results: status and attributes.
fn begin(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<Result<Object, nfsstat3>, NotRun> {
    let found = call.object(handle(arguments)?);
    match &found {
        Ok(object) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_after(reply, Some(&object.attributes));
        }
        Err(status) => {
            encode::status(reply, *status);
            call.put_after(reply, None);
        }
    }
    Ok(found)
}

pub(super) fn status(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    if let Err(status) = begin(call, arguments, reply)? {
        return Ok(status);
    }
    let stats = call.shared.store.stats();
    let seconds_invariant = 0;
    reply.u64(stats.capacity_bytes);
    // Free bytes count the reserve; available bytes, which clients may write, do not.
    reply.u64(stats.capacity_bytes.saturating_sub(stats.used_bytes));
    reply.u64(stats.available_bytes);
    reply.u64(stats.inode_count.saturating_add(limits::FILES_FREE));
    reply.u64(limits::FILES_FREE);
    reply.u64(limits::FILES_FREE);
    reply.u32(seconds_invariant);
    Ok(nfsstat3::NFS3_OK)
}

pub(super) fn info(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    if let Err(status) = begin(call, arguments, reply)? {
        return Ok(status);
    }
    let word = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
    let transfer = word(limits::TRANSFER_BYTES_MAX);
    let multiple = word(limits::TRANSFER_MULTIPLE_BYTES);
    let read = [transfer, transfer, multiple];
    let write = [transfer, transfer, multiple];
    read.into_iter().chain(write).for_each(|size| reply.u32(size));
    reply.u32(word(limits::DIRECTORY_BYTES_MAX));
    reply.u64(FILE_BYTES_MAX);
    let (time_delta_seconds, time_delta_nanos) = (0, 1);
    reply.u32(time_delta_seconds);
    reply.u32(time_delta_nanos);
    reply.u32(FSF_LINK | FSF_SYMLINK | FSF_HOMOGENEOUS | FSF_CANSETTIME);
    Ok(nfsstat3::NFS3_OK)
}

pub(super) fn path_configuration(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    if let Err(status) = begin(call, arguments, reply)? {
        return Ok(status);
    }
    let (no_truncation, only_root_changes_owner) = (true, true);
    let (is_case_insensitive, preserves_case) = (false, true);
    reply.u32(limits::LINKS_MAX);
    reply.u32(u32::try_from(NAME_BYTES_MAX).unwrap_or(u32::MAX));
    reply.bool(no_truncation);
    reply.bool(only_root_changes_owner);
    reply.bool(is_case_insensitive);
    reply.bool(preserves_case);
    Ok(nfsstat3::NFS3_OK)
}

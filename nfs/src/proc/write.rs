//! WRITE (RFC 1813 section 3.3.7).

use bytes::Bytes;
use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Change, Error, FILE_BYTES_MAX, FileKind, InodeId, Stability, Written};

use super::judged::{Outdated, judged};
use super::{Call, Failure, NotRun, encode, handle};
use crate::limits;
use crate::permission;
use crate::xdr::{Decoder, Encoder, Malformed};

struct Arguments<'a> {
    handle: &'a [u8],
    offset_bytes: u64,
    count: u32,
    stability: Stability,
    data: Bytes,
    /// Nothing follows the data, which then is nearly all of the frame that it is a part of.
    ends_frame: bool,
}

impl<'a> Arguments<'a> {
    fn decode(arguments: &mut Decoder<'a>) -> Result<Self, Malformed> {
        let handle = handle(arguments)?;
        let offset_bytes = arguments.u64()?;
        let count = arguments.u32()?;
        let stability = match arguments.u32()? {
            0 => Stability::Unstable,
            1 => Stability::DataSync,
            2 => Stability::FileSync,
            got => {
                return Err(Malformed::Value { got, expected: "stable_how" });
            }
        };
        let data = arguments.opaque_shared(limits::FRAME_BYTES_MAX)?;
        let ends_frame = arguments.rest().is_empty();
        Ok(Self { handle, offset_bytes, count, stability, data, ends_frame })
    }

    /// The data, cut to the largest WRITE; the reply's count tells the client so.
    fn data(&self) -> Bytes {
        self.data.slice(..self.data.len().min(limits::TRANSFER_BYTES_MAX))
    }
}

pub(super) fn write(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let arguments = Arguments::decode(arguments)?;
    let data = arguments.data();
    let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
    match judged(|outdated| try_write(call, &arguments, &data, outdated)) {
        Ok(None) => Err(NotRun::WouldBlock),
        Ok(Some(written)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_change(reply, &written.file);
            reply.u32(count);
            reply.u32(stable_how(written.stability));
            reply.u64(written.verifier);
            call.shared.metrics.bytes_written.add(u64::from(count));
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_no_change(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

/// What was written, or `None` when the call would have to wait and may not.
fn try_write(
    call: &Call<'_>,
    arguments: &Arguments<'_>,
    data: &Bytes,
    outdated: &mut Outdated,
) -> Result<Option<Written>, Failure> {
    let file = call.changeable(arguments.handle)?;
    let failure = |status| Failure { status, attributes: Some(file) };
    match file.kind {
        FileKind::File => {}
        FileKind::Directory => return Err(failure(nfsstat3::NFS3ERR_ISDIR)),
        FileKind::Symlink | FileKind::Special(_) => return Err(failure(nfsstat3::NFS3ERR_INVAL)),
    }
    if usize::try_from(arguments.count).is_ok_and(|count| count != arguments.data.len()) {
        return Err(failure(nfsstat3::NFS3ERR_INVAL));
    }
    if !permission::may_write_data(&file, &call.caller.credentials) {
        return Err(failure(nfsstat3::NFS3ERR_ACCES));
    }
    let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
    let end = arguments.offset_bytes.checked_add(length);
    if end.is_none_or(|end| end > FILE_BYTES_MAX) {
        return Err(failure(nfsstat3::NFS3ERR_FBIG));
    }
    if data.is_empty() {
        // Nothing is written, so nothing can be lost, and the file does not change.
        let unchanged = Change { before: file, after: file };
        let (stability, verifier) = (arguments.stability, call.shared.store.write_verifier());
        return Ok(Some(Written { file: unchanged, stability, verifier }));
    }
    let failed = |error: Error| call.failure(file.inode, &error);
    if let Some(mode) = permission::mode_after_change_of_data(&file, &call.caller.credentials) {
        if !call.may_block {
            return Ok(None);
        }
        // Its client may have sent it again, and that may be done: then others may have set the bits since.
        if call.is_given_up() {
            return Err(failure(nfsstat3::NFS3ERR_JUKEBOX));
        }
        // Before the data, so that what a crash leaves has them with the old data alone.
        call.set_mode(&file, mode, outdated).map_err(failed)?;
    }
    put(call, file.inode, arguments, data).map_err(failed)
}

/// Gives the data to the store.
fn put(
    call: &Call<'_>,
    file: InodeId,
    arguments: &Arguments<'_>,
    data: &Bytes,
) -> Result<Option<Written>, Error> {
    let (store, offset_bytes) = (&call.shared.store, arguments.offset_bytes);
    if !call.may_block && arguments.stability != Stability::Unstable {
        return Ok(None);
    }
    // The store keeps what it is given, and with it the frame, or the connection's read buffer, of which
    // a small one is a part until it may wait (`Request::detach`).
    let is_in_buffer = !call.may_block && data.len() <= limits::COPIED_BYTES_MAX;
    let data = if is_in_buffer || !arguments.ends_frame {
        Bytes::copy_from_slice(data)
    } else {
        data.clone()
    };
    if call.may_block {
        let is_given_up = || call.is_given_up();
        store.write_unless(file, offset_bytes, data, arguments.stability, &is_given_up).map(Some)
    } else {
        store.try_write(file, offset_bytes, &data).transpose()
    }
}

const fn stable_how(stability: Stability) -> u32 {
    match stability {
        Stability::Unstable => 0,
        Stability::DataSync => 1,
        Stability::FileSync => 2,
    }
}

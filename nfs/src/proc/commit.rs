//! COMMIT (RFC 1813 section 3.3.21). The whole file is committed, whatever range is named: a
//! commit of more than was asked for is always right, and the group commit makes it cheap.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, Change, Error, FileKind, InodeId};

use super::{Call, Failure, NotRun, encode, handle};
use crate::xdr::{Decoder, Encoder};

pub(super) fn commit(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let handle = handle(arguments)?;
    let _offset_bytes = arguments.u64()?;
    let _count = arguments.u32()?;
    match check(call, handle) {
        Ok(_) if !call.may_block => Err(NotRun::WouldBlock),
        Ok(file) => {
            let outcome = call.shared.store.commit(file.inode);
            Ok(put_committed(call, file.inode, outcome, reply))
        }
        Err(failure) => Ok(put_failure(call, failure, reply)),
    }
}

/// Writes the results of a COMMIT that the store has carried out.
pub(crate) fn put_committed(
    call: &Call<'_>,
    file: InodeId,
    outcome: Result<(Change, u64), Error>,
    reply: &mut Encoder,
) -> nfsstat3 {
    match outcome {
        Ok((change, verifier)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_change(reply, &change);
            reply.u64(verifier);
            nfsstat3::NFS3_OK
        }
        Err(error) => put_failure(call, call.failure(file, &error), reply),
    }
}

fn put_failure(call: &Call<'_>, failure: Failure, reply: &mut Encoder) -> nfsstat3 {
    encode::status(reply, failure.status);
    call.put_no_change(reply, failure.attributes.as_ref());
    failure.status
}

/// The file, when it is one that the caller may change.
fn check(call: &Call<'_>, handle: &[u8]) -> Result<Attributes, Failure> {
    let file = call.changeable(handle)?;
    let failure = |status| Failure { status, attributes: Some(file) };
    // No mode bits are asked: the writes that are committed were allowed when they came, and
    // a refusal after a chmod would lose them.
    match file.kind {
        FileKind::File => Ok(file),
        FileKind::Directory => Err(failure(nfsstat3::NFS3ERR_ISDIR)),
        FileKind::Symlink | FileKind::Special(_) => Err(failure(nfsstat3::NFS3ERR_INVAL)),
    }
}

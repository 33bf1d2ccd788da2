//! COMMIT (RFC 1813 section 3.3.21). The whole file is committed, whatever range is named: a
//! commit of more than was asked for is always right, and the group commit makes it cheap.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Change, FileKind};

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
    match try_commit(call, handle) {
        Ok((change, verifier)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_change(reply, &change);
            reply.u64(verifier);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_no_change(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_commit(call: &Call<'_>, handle: &[u8]) -> Result<(Change, u64), Failure> {
    let file = call.changeable(handle)?;
    let failure = |status| Failure { status, attributes: Some(file) };
    match file.kind {
        FileKind::File => {}
        FileKind::Directory => return Err(failure(nfsstat3::NFS3ERR_ISDIR)),
        FileKind::Symlink => return Err(failure(nfsstat3::NFS3ERR_INVAL)),
    }
    // No mode bits are asked: the writes that are committed were allowed when they came, and
    // a refusal after a chmod would lose them.
    call.shared.store.commit(file.inode).map_err(|error| call.failure(file.inode, &error))
}

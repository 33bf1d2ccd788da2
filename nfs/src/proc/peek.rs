//! What the first handle of a call tells before the call is run.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::InodeId;

use super::handle;
use crate::client_certificate::Shown;
use crate::handle::{Target, claimed_scope};
use crate::scope::MountScope;
use crate::server::Shared;
use crate::xdr::Decoder;

/// The file that a WRITE or COMMIT with these arguments is for, if it is for one who shows this.
pub(crate) fn peek_inode(
    shared: &Shared,
    arguments: &Decoder<'_>,
    shown: Shown,
) -> Option<InodeId> {
    let decoded = shared.open_handle(handle(&mut arguments.clone()).ok()?).ok()?;
    if !shown.reaches(decoded.scope) {
        return None;
    }
    match decoded.target {
        Target::Inode { inode, .. } => Some(inode),
        Target::SnapshotDirectory
        | Target::Snapshot(_)
        | Target::WorkerRoot
        | Target::WorkersDirectory => None,
    }
}

/// The scope that the handle says it has.
pub(crate) fn peek_scope(arguments: &Decoder<'_>) -> Option<MountScope> {
    claimed_scope(handle(&mut arguments.clone()).ok()?)
}

/// The scope of the handle; none: by address.
///
/// # Errors
/// It says that it has one, and is no handle, or its holder may not mount any more.
pub(crate) fn verify_scope(
    shared: &Shared,
    arguments: &Decoder<'_>,
) -> Result<Option<MountScope>, nfsstat3> {
    match handle(&mut arguments.clone()) {
        Ok(handle) if claimed_scope(handle).is_some() => Ok(shared.open_handle(handle)?.scope),
        _ => Ok(None),
    }
}

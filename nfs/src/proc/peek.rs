//! What the first handle of a call tells before the call is run.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::InodeId;

use super::handle;
use crate::handle::{Target, claimed_scope};
use crate::scope::WorkerScope;
use crate::server::Shared;
use crate::xdr::Decoder;

/// The file that a WRITE or COMMIT with these arguments is for.
pub(crate) fn peek_inode(shared: &Shared, arguments: &Decoder<'_>) -> Option<InodeId> {
    match shared.open_handle(handle(&mut arguments.clone()).ok()?).ok()?.target {
        Target::Inode { inode, .. } => Some(inode),
        Target::SnapshotDirectory
        | Target::Snapshot(_)
        | Target::WorkerRoot
        | Target::WorkersDirectory => None,
    }
}

/// The scope that the handle says it has.
pub(crate) fn peek_scope(arguments: &Decoder<'_>) -> Option<WorkerScope> {
    claimed_scope(handle(&mut arguments.clone()).ok()?)
}

/// The worker whose the handle is; none where it is no worker's.
///
/// # Errors
/// It says that it is a worker's, and is no handle, or that worker is none any more.
pub(crate) fn verify_scope(
    shared: &Shared,
    arguments: &Decoder<'_>,
) -> Result<Option<WorkerScope>, nfsstat3> {
    match handle(&mut arguments.clone()) {
        Ok(handle) if claimed_scope(handle).is_some() => Ok(shared.open_handle(handle)?.scope),
        _ => Ok(None),
    }
}

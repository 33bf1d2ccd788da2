//! The one translation of the store's errors into NFS status codes.

// A new kind of error must fail to compile here until it is given a status.
#![deny(clippy::wildcard_enum_match_arm, clippy::match_wildcard_for_single_variants)]

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Error, ErrorKind};

/// The status that a client gets for a failure of the store, which is logged if it is the
/// server's own.
pub(crate) fn of_error(error: &Error) -> nfsstat3 {
    let kind = error.kind();
    match kind {
        ErrorKind::Corrupt | ErrorKind::Poisoned | ErrorKind::Io => {
            tracing::error!(%error, "a call failed in the store");
        }
        ErrorKind::NotFound
        | ErrorKind::Stale
        | ErrorKind::Exists
        | ErrorKind::NotDirectory
        | ErrorKind::IsDirectory
        | ErrorKind::WrongKind
        | ErrorKind::NotEmpty
        | ErrorKind::Invalid
        | ErrorKind::NameTooLong
        | ErrorKind::FileTooBig
        | ErrorKind::TooManyLinks
        | ErrorKind::NotSynchronized
        | ErrorKind::NoSpace
        | ErrorKind::Busy
        | ErrorKind::Cancelled
        | ErrorKind::Closed => tracing::debug!(%error, "a call failed"),
    }
    of_kind(kind)
}

/// The status of each kind (RFC 1813 section 2.6).
pub(crate) const fn of_kind(kind: ErrorKind) -> nfsstat3 {
    match kind {
        ErrorKind::NotFound => nfsstat3::NFS3ERR_NOENT,
        ErrorKind::Stale => nfsstat3::NFS3ERR_STALE,
        ErrorKind::Exists => nfsstat3::NFS3ERR_EXIST,
        ErrorKind::NotDirectory => nfsstat3::NFS3ERR_NOTDIR,
        ErrorKind::IsDirectory => nfsstat3::NFS3ERR_ISDIR,
        ErrorKind::WrongKind | ErrorKind::Invalid => nfsstat3::NFS3ERR_INVAL,
        ErrorKind::NotEmpty => nfsstat3::NFS3ERR_NOTEMPTY,
        ErrorKind::NameTooLong => nfsstat3::NFS3ERR_NAMETOOLONG,
        ErrorKind::FileTooBig => nfsstat3::NFS3ERR_FBIG,
        ErrorKind::TooManyLinks => nfsstat3::NFS3ERR_MLINK,
        ErrorKind::NotSynchronized => nfsstat3::NFS3ERR_NOT_SYNC,
        ErrorKind::NoSpace => nfsstat3::NFS3ERR_NOSPC,
        // The store closes only when the server stops: a client that tries again later, as
        // JUKEBOX asks, meets the next server, where SERVERFAULT would be an EIO for its user.
        ErrorKind::Busy | ErrorKind::Cancelled | ErrorKind::Closed => nfsstat3::NFS3ERR_JUKEBOX,
        ErrorKind::Corrupt | ErrorKind::Poisoned | ErrorKind::Io => nfsstat3::NFS3ERR_IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_those_of_the_rfc() {
        let code = |kind| of_kind(kind) as u32;
        assert_eq!(code(ErrorKind::NotFound), 2);
        assert_eq!(code(ErrorKind::Io), 5);
        assert_eq!(code(ErrorKind::Poisoned), 5);
        assert_eq!(code(ErrorKind::Exists), 17);
        assert_eq!(code(ErrorKind::NoSpace), 28);
        assert_eq!(code(ErrorKind::NotEmpty), 66);
        assert_eq!(code(ErrorKind::Stale), 70);
        assert_eq!(code(ErrorKind::NotSynchronized), 10002);
        assert_eq!(code(ErrorKind::Busy), 10008);
    }
}

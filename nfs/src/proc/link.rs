//! LINK (RFC 1813 section 3.3.15).

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, Change, FileKind};

use super::{Call, NotRun, Place, encode, handle};
use crate::status;
use crate::xdr::{Decoder, Encoder};

/// A failure, and what is known of the file and the directory. Boxed, for it is large.
struct LinkFailure {
    status: nfsstat3,
    file: Option<Attributes>,
    directory: Option<Attributes>,
}

pub(super) fn link(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let file = handle(arguments)?;
    let place = Place::decode(arguments)?;
    match try_link(call, file, &place) {
        Ok((file, directory)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            call.put_after(reply, Some(&file));
            call.put_change(reply, &directory);
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_after(reply, failure.file.as_ref());
            call.put_no_change(reply, failure.directory.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_link(
    call: &Call<'_>,
    handle: &[u8],
    place: &Place<'_>,
) -> Result<(Attributes, Change), Box<LinkFailure>> {
    let file = call.changeable(handle).map_err(|status| LinkFailure {
        status,
        file: None,
        directory: None,
    })?;
    let directory = call.changeable_directory(place.directory).map_err(|failure| LinkFailure {
        status: failure.status,
        file: Some(file),
        directory: failure.attributes,
    })?;
    let failure = |status| LinkFailure { status, file: Some(file), directory: Some(directory) };
    if file.kind == FileKind::Directory {
        // A second name of a directory would make a loop possible. RFC 1813 leaves the code
        // to the server; EISDIR would be no outcome of link(2).
        return Err(failure(nfsstat3::NFS3ERR_PERM).into());
    }
    let name = call.new_entry_name(&directory, place).map_err(failure)?;
    let store = &call.shared.store;
    let linked = store.link(file.inode, directory.inode, &name).map_err(|error| LinkFailure {
        status: status::of_error(&error),
        file: store.attributes(file.inode).ok(),
        directory: store.attributes(directory.inode).ok(),
    })?;
    Ok(linked)
}

//! LOOKUP (RFC 1813 section 3.3.3), and the walk of MNT down a path.
//!
//! ```text
//! root -+- .snapshot -+- <snapshot id>      virtual: not listed, read-only
//!       +- entries of the namespace
//! ```
//! What a worker sees in the place of the root is in [`super::view`].

use std::str::FromStr;

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, FileKind, InodeId, SnapshotId};

use super::{
    Call, Failure, NotRun, Object, Place, SNAPSHOT_DIRECTORY_INODE, WORKER_ROOT_INODE, encode,
    virtual_attributes,
};
use crate::handle::{Handle, Target};
use crate::scope::MountScope;
use crate::status;
use crate::xdr::{Decoder, Encoder};

pub(super) fn lookup(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let place = Place::decode(arguments)?;
    match try_lookup(call, &place) {
        Ok((directory, found)) => {
            encode::status(reply, nfsstat3::NFS3_OK);
            reply.opaque(&call.handle_of(found.target));
            call.put_after(reply, Some(&found.attributes));
            call.put_after(reply, Some(&directory));
            Ok(nfsstat3::NFS3_OK)
        }
        Err(failure) => {
            encode::status(reply, failure.status);
            call.put_after(reply, failure.attributes.as_ref());
            Ok(failure.status)
        }
    }
}

fn try_lookup(call: &Call<'_>, place: &Place<'_>) -> Result<(Attributes, Object), Failure> {
    let directory = call.object(place.directory)?;
    let failure = |status| Failure { status, attributes: Some(directory.attributes) };
    call.check_search(&directory.attributes).map_err(failure)?;
    let found = call.step(&directory, place).map_err(failure)?;
    Ok((directory.attributes, found))
}

impl Call<'_> {
    /// The object of that name in a directory.
    pub(super) fn step(&self, directory: &Object, place: &Place<'_>) -> Result<Object, nfsstat3> {
        match directory.target {
            Target::Inode { inode, .. } => {
                self.step_in_namespace(inode, &directory.attributes, place)
            }
            Target::SnapshotDirectory => self.step_in_snapshots(directory, place),
            Target::Snapshot(_) => Err(nfsstat3::NFS3ERR_NOTDIR),
            Target::WorkerRoot => self.step_in_worker_root(directory, place),
            Target::WorkersDirectory => self.step_in_workers(directory, place),
        }
    }

    fn step_in_namespace(
        &self,
        inode: InodeId,
        attributes: &Attributes,
        place: &Place<'_>,
    ) -> Result<Object, nfsstat3> {
        if Self::is_snapshot_directory(inode, place.name) {
            return Ok(snapshot_directory());
        }
        let attributes = match (place.name, self.scope) {
            (b".", _) => *attributes,
            (b"..", Some(MountScope::Worker(worker_id))) => {
                return self.parent_in_view(inode, worker_id);
            }
            (b"..", Some(MountScope::Export(_)) | None) => self.parent(inode)?,
            _ => {
                let name = place.entry_name()?;
                let found = self.shared.store.lookup(inode, &name);
                found.map_err(|error| status::of_error(&error))?
            }
        };
        Ok(inode_object(attributes))
    }

    pub(super) fn parent(&self, directory: InodeId) -> Result<Attributes, nfsstat3> {
        self.shared.store.parent(directory).map_err(|error| status::of_error(&error))
    }

    fn step_in_snapshots(&self, directory: &Object, place: &Place<'_>) -> Result<Object, nfsstat3> {
        match place.name {
            b"." => Ok(*directory),
            b".." => self.root(),
            _ if place.is_too_long() => Err(nfsstat3::NFS3ERR_NAMETOOLONG),
            name => {
                let text = std::str::from_utf8(name).ok();
                let id = text.and_then(|text| SnapshotId::from_str(text).ok());
                // Other names than ids simply do not exist here.
                let id = id.ok_or(nfsstat3::NFS3ERR_NOENT)?;
                self.check_reads(id)?;
                Ok(Object { target: Target::Snapshot(id), attributes: self.snapshot(id)? })
            }
        }
    }

    /// Refuses a snapshot that the caller does not read.
    fn check_reads(&self, snapshot: SnapshotId) -> Result<(), nfsstat3> {
        let Some(MountScope::Worker(worker_id)) = self.scope else { return Ok(()) };
        let gate = self.shared.options.gate.as_ref().ok_or(nfsstat3::NFS3ERR_ACCES)?;
        match gate.reads_snapshot(worker_id, snapshot) {
            Ok(true) => Ok(()),
            // It is there, and may be published later.
            Ok(false) => Err(nfsstat3::NFS3ERR_ACCES),
            Err(error) => Err(status::of_error(&error)),
        }
    }

    /// The root, as the caller sees it.
    pub(super) fn root(&self) -> Result<Object, nfsstat3> {
        match self.scope {
            None | Some(MountScope::Export(_)) => Ok(inode_object(self.attributes(InodeId::ROOT)?)),
            Some(MountScope::Worker(_)) => {
                let attributes = virtual_attributes(WORKER_ROOT_INODE);
                Ok(Object { target: Target::WorkerRoot, attributes })
            }
        }
    }

    /// The handle of the object that the path of `names` leads to, from the root. Symbolic
    /// links are not followed: what MNT hands out depends on the path alone.
    pub(crate) fn walk<'n>(
        &self,
        names: impl Iterator<Item = &'n [u8]>,
    ) -> Result<Handle, nfsstat3> {
        let mut object = self.root()?;
        for name in names {
            if object.attributes.kind != FileKind::Directory {
                return Err(nfsstat3::NFS3ERR_NOTDIR);
            }
            let place = Place { directory: &[], name };
            if place.is_dots() {
                return Err(nfsstat3::NFS3ERR_INVAL);
            }
            object = self.step(&object, &place)?;
        }
        let is_mountable = object.attributes.kind == FileKind::Directory
            || matches!(object.target, Target::Snapshot(_));
        if !is_mountable {
            return Err(nfsstat3::NFS3ERR_NOTDIR);
        }
        Ok(self.handle_of(object.target))
    }
}

/// The virtual directory `.snapshot`.
pub(super) fn snapshot_directory() -> Object {
    let attributes = virtual_attributes(SNAPSHOT_DIRECTORY_INODE);
    Object { target: Target::SnapshotDirectory, attributes }
}

pub(super) fn inode_object(attributes: Attributes) -> Object {
    let Attributes { inode, generation, .. } = attributes;
    Object { target: Target::Inode { inode, generation }, attributes }
}

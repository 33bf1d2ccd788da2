//! What a worker sees: see [`crate::scope`].
//!
//! ```text
//! root -+- .snapshot
//!       +- workers -- ID -- the directory of that name in the store, and all below it
//! ```
//! Invariants: the root and `workers` are virtual: they show no other entries, none is made or removed there, and their
//! attributes tell nothing of others. `..` leads no further up than the root, and from a directory that is not below
//! `workers/ID` any more, nowhere.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, FileKind, InodeId, Name};
use uuid::Uuid;

use super::lookup::{inode_object, snapshot_directory};
use super::{Call, Object, Place, SNAPSHOT_DIRECTORY, WORKERS_DIRECTORY_INODE, virtual_attributes};
use crate::handle::Target;
use crate::scope::{MountScope, WORKERS_NAME};
use crate::status;

/// Directories that are climbed on the way up to that of the worker. Drivers have a few.
const CLIMB_MAX: usize = 128;

impl Call<'_> {
    pub(super) fn step_in_worker_root(
        &self,
        directory: &Object,
        place: &Place<'_>,
    ) -> Result<Object, nfsstat3> {
        match place.name {
            b"." | b".." => Ok(*directory),
            SNAPSHOT_DIRECTORY => Ok(snapshot_directory()),
            WORKERS_NAME => Ok(workers_object()),
            _ if place.is_too_long() => Err(nfsstat3::NFS3ERR_NAMETOOLONG),
            _ => Err(nfsstat3::NFS3ERR_NOENT),
        }
    }

    pub(super) fn step_in_workers(
        &self,
        directory: &Object,
        place: &Place<'_>,
    ) -> Result<Object, nfsstat3> {
        let Some(MountScope::Worker(worker_id)) = self.scope else {
            return Err(nfsstat3::NFS3ERR_BADHANDLE);
        };
        match place.name {
            b"." => Ok(*directory),
            b".." => self.root(),
            name if name == directory_name(worker_id).as_bytes() => {
                Ok(inode_object(self.home(worker_id)?))
            }
            _ if place.is_too_long() => Err(nfsstat3::NFS3ERR_NAMETOOLONG),
            _ => Err(nfsstat3::NFS3ERR_NOENT),
        }
    }

    /// The parent of a directory of the worker.
    pub(super) fn parent_in_view(
        &self,
        directory: InodeId,
        worker_id: Uuid,
    ) -> Result<Object, nfsstat3> {
        let home = self.home(worker_id)?.inode;
        if directory == home {
            return Ok(workers_object());
        }
        let parent = self.parent(directory)?;
        let mut at = parent.inode;
        for _ in 0..CLIMB_MAX {
            if at == home {
                return Ok(inode_object(parent));
            }
            if at == InodeId::ROOT {
                break;
            }
            at = self.parent(at)?.inode;
        }
        Err(nfsstat3::NFS3ERR_ACCES)
    }

    /// The one entry that READDIR shows of a view; `None` for what is no view, and where the worker has no directory.
    pub(super) fn view_entry(
        &self,
        directory: &Object,
    ) -> Result<Option<(Vec<u8>, Object)>, nfsstat3> {
        match (directory.target, self.scope) {
            (Target::WorkerRoot, _) => Ok(Some((WORKERS_NAME.to_vec(), workers_object()))),
            (Target::WorkersDirectory, Some(MountScope::Worker(worker_id))) => match self
                .home(worker_id)
            {
                Ok(home) => Ok(Some((directory_name(worker_id).into_bytes(), inode_object(home)))),
                Err(nfsstat3::NFS3ERR_NOENT) => Ok(None),
                Err(status) => Err(status),
            },
            _ => Ok(None),
        }
    }

    /// The directory of the worker's files in the store.
    fn home(&self, worker_id: Uuid) -> Result<Attributes, nfsstat3> {
        let workers = self.directory_entry(InodeId::ROOT, WORKERS_NAME)?;
        self.directory_entry(workers.inode, directory_name(worker_id).as_bytes())
    }

    fn directory_entry(&self, directory: InodeId, name: &[u8]) -> Result<Attributes, nfsstat3> {
        let name = Name::new(name).map_err(|error| status::of_error(&error))?;
        let found = self.entry(directory, &name)?.ok_or(nfsstat3::NFS3ERR_NOENT)?;
        // What else has that name is not the directory of workers.
        if found.kind != FileKind::Directory {
            return Err(nfsstat3::NFS3ERR_NOENT);
        }
        Ok(found)
    }
}

/// The name of the directory of a worker's files.
fn directory_name(worker_id: Uuid) -> String {
    worker_id.hyphenated().to_string()
}

fn workers_object() -> Object {
    let attributes = virtual_attributes(WORKERS_DIRECTORY_INODE);
    Object { target: Target::WorkersDirectory, attributes }
}

//! The NFSv3 procedures (RFC 1813 section 3.3), one file for each group: arguments decoded,
//! permissions checked, the store called, the results encoded.
//!
//! A procedure writes its results, the status first, behind a reply header that is there
//! already. What it returns is that status, for the counters; or why it did not run.

mod attr;
mod commit;
mod create;
mod encode;
mod fsinfo;
mod judged;
mod link;
mod lookup;
mod peek;
mod read;
mod readdir;
mod remove;
mod rename;
mod view;
mod write;

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{
    Attributes, Error, ErrorKind, FileKind, InodeId, NAME_BYTES_MAX, Name, SnapshotId, Timestamp,
};

use crate::auth::Caller;
use crate::client_certificate::Shown;
use crate::handle::{Handle, Target};
use crate::limits;
use crate::options::ClientAccess;
use crate::outlet::Outlet;
use crate::permission::{self, Permission};
use crate::procedure::NfsProcedure;
use crate::scope::MountScope;
use crate::server::Shared;
use crate::status;
use crate::xdr::{Decoder, Encoder, Malformed};

pub(crate) use commit::put_committed;
pub(crate) use peek::{peek_inode, peek_scope, verify_scope};
pub(crate) use read::peek_count;

/// Longest handle that a client may send (RFC 1813 section 2.4).
const HANDLE_BYTES_MAX: usize = nfsserve::nfs::NFS3_FHSIZE as usize;

/// The name of the virtual directory of snapshots in the root.
pub(crate) const SNAPSHOT_DIRECTORY: &[u8] = b".snapshot";

/// File id of that directory: above all inode numbers, below those of snapshots.
const SNAPSHOT_DIRECTORY_INODE: InodeId = InodeId::new(1 << 48);

/// File ids of what a worker sees in the place of the root and of `workers`. No store gets to these numbers.
const WORKER_ROOT_INODE: InodeId = InodeId::new((1 << 48) - 2);
const WORKERS_DIRECTORY_INODE: InodeId = InodeId::new((1 << 48) - 1);

/// The size that directories without stored entries show.
const DIRECTORY_SIZE_BYTES: u64 = 4096;

/// Why a procedure has no result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotRun {
    /// The arguments cannot be decoded.
    Malformed(Malformed),
    /// It would have to wait for the disk, and the caller cannot.
    WouldBlock,
}

impl From<Malformed> for NotRun {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// What a procedure knows besides its arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    /// The server's state.
    pub(crate) shared: &'a Shared,
    /// On whose behalf.
    pub(crate) caller: &'a Caller,
    /// Whether it may wait for the disk.
    pub(crate) may_block: bool,
    /// Where its reply goes, if it may wait.
    pub(crate) outlet: Option<&'a Outlet>,
    /// How its handles, and those that it answers, were mounted; none: by address. What the first handle claims, until
    /// [`Self::target`] has compared it.
    pub(crate) scope: Option<MountScope>,
    /// What its connection has shown of who the client is.
    pub(crate) shown: Shown,
}

/// An object that a handle names, as it is now.
#[derive(Clone, Copy, Debug)]
struct Object {
    target: Target,
    attributes: Attributes,
}

/// A failure, and what is known of the object for its weak cache consistency data.
#[derive(Clone, Copy, Debug)]
struct Failure {
    status: nfsstat3,
    attributes: Option<Attributes>,
}

impl From<nfsstat3> for Failure {
    fn from(status: nfsstat3) -> Self {
        Self { status, attributes: None }
    }
}

/// Runs `procedure`: decodes its arguments, writes its results to `reply`.
pub(crate) fn run(
    procedure: NfsProcedure,
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    match procedure {
        NfsProcedure::Null => Ok(nfsstat3::NFS3_OK),
        NfsProcedure::GetAttributes => attr::get_attributes(call, arguments, reply),
        NfsProcedure::SetAttributes => attr::set_attributes(call, arguments, reply),
        NfsProcedure::Lookup => lookup::lookup(call, arguments, reply),
        NfsProcedure::Access => attr::access(call, arguments, reply),
        NfsProcedure::ReadLink => read::read_link(call, arguments, reply),
        NfsProcedure::Read => read::read(call, arguments, reply),
        NfsProcedure::Write => write::write(call, arguments, reply),
        NfsProcedure::Create => create::create(call, arguments, reply),
        NfsProcedure::MakeDirectory => create::make_directory(call, arguments, reply),
        NfsProcedure::Symlink => create::make_symlink(call, arguments, reply),
        NfsProcedure::MakeNode => create::make_node(call, arguments, reply),
        NfsProcedure::Remove => remove::remove(call, arguments, reply),
        NfsProcedure::RemoveDirectory => remove::remove_directory(call, arguments, reply),
        NfsProcedure::Rename => rename::rename(call, arguments, reply),
        NfsProcedure::Link => link::link(call, arguments, reply),
        NfsProcedure::ReadDirectory => readdir::read_directory(call, arguments, reply),
        NfsProcedure::ReadDirectoryPlus => readdir::read_directory_plus(call, arguments, reply),
        NfsProcedure::FileSystemStatus => fsinfo::status(call, arguments, reply),
        NfsProcedure::FileSystemInfo => fsinfo::info(call, arguments, reply),
        NfsProcedure::PathConfiguration => fsinfo::path_configuration(call, arguments, reply),
        NfsProcedure::Commit => commit::commit(call, arguments, reply),
    }
}

/// Writes the results of a failure that says nothing more than its status.
pub(crate) fn bare_failure(reply: &mut Encoder, procedure: NfsProcedure, status: nfsstat3) {
    encode::status(reply, status);
    (0..procedure.failure_words()).for_each(|_| reply.bool(false));
}

/// A handle as it was sent.
fn handle<'a>(arguments: &mut Decoder<'a>) -> Result<&'a [u8], Malformed> {
    arguments.opaque(HANDLE_BYTES_MAX)
}

/// A directory and a name in it (RFC 1813 section 2.6 `diropargs3`), as they were sent.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    directory: &'a [u8],
    name: &'a [u8],
}

impl<'a> Place<'a> {
    fn decode(arguments: &mut Decoder<'a>) -> Result<Self, Malformed> {
        let directory = handle(arguments)?;
        // Longer names than the store takes decode, and get their own status.
        let name = arguments.opaque(limits::FRAME_BYTES_SMALL)?;
        Ok(Self { directory, name })
    }

    /// The name, when an entry can have it.
    fn entry_name(&self) -> Result<Name, nfsstat3> {
        Name::new(self.name).map_err(|error| status::of_error(&error))
    }

    /// Whether the name is `.` or `..`.
    fn is_dots(&self) -> bool {
        matches!(self.name, b"." | b"..")
    }

    fn is_too_long(&self) -> bool {
        self.name.len() > NAME_BYTES_MAX
    }
}

impl Call<'_> {
    /// Whether the client has ended its connection while the call waited, and may have sent it again by
    /// another; or may not mount any more.
    fn is_given_up(&self) -> bool {
        self.outlet.is_some_and(Outlet::is_abandoned)
            || self.scope.is_some_and(|scope| !self.shared.is_admitted(scope))
    }

    /// The handle of an object with these attributes.
    fn handle_of(&self, target: Target) -> Handle {
        self.shared.handles.encode(target, self.scope)
    }

    fn inode_handle(&self, attributes: &Attributes) -> Handle {
        let Attributes { inode, generation, .. } = *attributes;
        self.handle_of(Target::Inode { inode, generation })
    }

    /// What the handle names; it may be gone.
    fn target(&self, handle: &[u8]) -> Result<Target, nfsstat3> {
        let decoded = self.shared.open_handle(handle)?;
        if decoded.scope != self.scope || !self.shown.reaches(decoded.scope) {
            return Err(nfsstat3::NFS3ERR_ACCES);
        }
        Ok(decoded.target)
    }

    /// The object that the handle names.
    fn object(&self, handle: &[u8]) -> Result<Object, nfsstat3> {
        let target = self.target(handle)?;
        let attributes = match target {
            Target::Inode { inode, generation } => {
                let attributes = self.attributes(inode)?;
                if attributes.generation != generation {
                    return Err(nfsstat3::NFS3ERR_STALE);
                }
                attributes
            }
            Target::SnapshotDirectory => virtual_attributes(SNAPSHOT_DIRECTORY_INODE),
            Target::Snapshot(id) => self.snapshot(id).map_err(stale_if_missing)?,
            Target::WorkerRoot => virtual_attributes(WORKER_ROOT_INODE),
            Target::WorkersDirectory => virtual_attributes(WORKERS_DIRECTORY_INODE),
        };
        Ok(Object { target, attributes })
    }

    fn attributes(&self, inode: InodeId) -> Result<Attributes, nfsstat3> {
        self.shared.store.attributes(inode).map_err(|error| status::of_error(&error))
    }

    fn snapshot(&self, id: SnapshotId) -> Result<Attributes, nfsstat3> {
        self.shared.store.snapshot_attributes(id).map_err(|error| status::of_error(&error))
    }

    /// The object, when the caller may change such objects at all: his address allows it, it is
    /// no snapshot, and no view of what belongs to others as well.
    fn changeable(&self, handle: &[u8]) -> Result<Attributes, nfsstat3> {
        let object = self.object(handle)?;
        match object.target {
            Target::Inode { .. } if self.caller.access == ClientAccess::ReadWrite => {
                Ok(object.attributes)
            }
            Target::WorkerRoot | Target::WorkersDirectory => Err(nfsstat3::NFS3ERR_ACCES),
            Target::Inode { .. } | Target::SnapshotDirectory | Target::Snapshot(_) => {
                Err(nfsstat3::NFS3ERR_ROFS)
            }
        }
    }

    /// The directory, when the caller may add and remove its entries. A failure carries its
    /// attributes as far as they are known.
    fn changeable_directory(&self, handle: &[u8]) -> Result<Attributes, Failure> {
        let directory = self.changeable(handle)?;
        let failure = |status| Failure { status, attributes: Some(directory) };
        if directory.kind != FileKind::Directory {
            return Err(failure(nfsstat3::NFS3ERR_NOTDIR));
        }
        if !permission::may_change_entries(&directory, &self.caller.credentials) {
            return Err(failure(nfsstat3::NFS3ERR_ACCES));
        }
        Ok(directory)
    }

    /// Checks that the directory may be searched for names.
    fn check_search(&self, directory: &Attributes) -> Result<(), nfsstat3> {
        if directory.kind != FileKind::Directory {
            return Err(nfsstat3::NFS3ERR_NOTDIR);
        }
        if !permission::allows(directory, &self.caller.credentials, Permission::Execute) {
            return Err(nfsstat3::NFS3ERR_ACCES);
        }
        Ok(())
    }

    /// The failure of a call to the store on an object, with the object's attributes as they
    /// are after it.
    fn failure(&self, inode: InodeId, error: &Error) -> Failure {
        self.failure_status(inode, status::of_error(error))
    }

    fn failure_status(&self, inode: InodeId, status: nfsstat3) -> Failure {
        Failure { status, attributes: self.shared.store.attributes(inode).ok() }
    }

    /// Whether the name in the directory is that of the virtual directory of snapshots.
    fn is_snapshot_directory(directory: InodeId, name: &[u8]) -> bool {
        directory == InodeId::ROOT && name == SNAPSHOT_DIRECTORY
    }

    /// The entry of that name, or `None`.
    fn entry(&self, directory: InodeId, name: &Name) -> Result<Option<Attributes>, nfsstat3> {
        match self.shared.store.lookup(directory, name) {
            Ok(attributes) => Ok(Some(attributes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(status::of_error(&error)),
        }
    }
}

/// A snapshot that is gone makes its handle stale, where a look-up of its id would say that it
/// does not exist.
fn stale_if_missing(status: nfsstat3) -> nfsstat3 {
    match status {
        nfsstat3::NFS3ERR_NOENT => nfsstat3::NFS3ERR_STALE,
        other => other,
    }
}

/// A virtual directory always shows the present as its time of change: a client then keeps
/// no memory of a name that did not exist a moment ago.
fn virtual_attributes(inode: InodeId) -> Attributes {
    let since_epoch =
        std::time::UNIX_EPOCH.elapsed().ok().and_then(|time| u64::try_from(time.as_nanos()).ok());
    let now = Timestamp::from_nanos(since_epoch.unwrap_or_default());
    Attributes {
        inode,
        generation: 0,
        kind: FileKind::Directory,
        mode: 0o555,
        link_count: 2,
        uid: 0,
        gid: 0,
        size_bytes: DIRECTORY_SIZE_BYTES,
        used_bytes: 0,
        accessed_at: now,
        modified_at: now,
        changed_at: now,
    }
}

//! The table of procedures: number, name, how a call is run, and what its failure looks like.

use crate::limits;

/// The 22 procedures of NFSv3 (RFC 1813 section 3.3), in order of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NfsProcedure {
    Null,
    GetAttributes,
    SetAttributes,
    Lookup,
    Access,
    ReadLink,
    Read,
    Write,
    Create,
    MakeDirectory,
    Symlink,
    MakeNode,
    Remove,
    RemoveDirectory,
    Rename,
    Link,
    ReadDirectory,
    ReadDirectoryPlus,
    FileSystemStatus,
    FileSystemInfo,
    PathConfiguration,
    Commit,
}

/// How a call is run, so that slow ones do not hold up others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// By the connection's reader: answered from memory.
    Inline,
    /// READ: by the connection's reader if what it reads is in memory, else like
    /// [`Self::Read`].
    Cached,
    /// WRITE and COMMIT: wait for room in memory and for the disk's sync. What needs to wait
    /// for neither, and what is refused, is done by the connection's reader.
    Data,
    /// Changes of the namespace: wait for the disk's sync. FSSTAT too: the store may sum up
    /// its sizes between two commits only.
    Namespace,
    /// What reads more than memory may hold.
    Read,
}

impl NfsProcedure {
    /// All procedures; the position is the number.
    pub(crate) const ALL: [Self; 22] = [
        Self::Null,
        Self::GetAttributes,
        Self::SetAttributes,
        Self::Lookup,
        Self::Access,
        Self::ReadLink,
        Self::Read,
        Self::Write,
        Self::Create,
        Self::MakeDirectory,
        Self::Symlink,
        Self::MakeNode,
        Self::Remove,
        Self::RemoveDirectory,
        Self::Rename,
        Self::Link,
        Self::ReadDirectory,
        Self::ReadDirectoryPlus,
        Self::FileSystemStatus,
        Self::FileSystemInfo,
        Self::PathConfiguration,
        Self::Commit,
    ];

    /// The procedure with this number.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Its name in RFC 1813.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "NULL",
            Self::GetAttributes => "GETATTR",
            Self::SetAttributes => "SETATTR",
            Self::Lookup => "LOOKUP",
            Self::Access => "ACCESS",
            Self::ReadLink => "READLINK",
            Self::Read => "READ",
            Self::Write => "WRITE",
            Self::Create => "CREATE",
            Self::MakeDirectory => "MKDIR",
            Self::Symlink => "SYMLINK",
            Self::MakeNode => "MKNOD",
            Self::Remove => "REMOVE",
            Self::RemoveDirectory => "RMDIR",
            Self::Rename => "RENAME",
            Self::Link => "LINK",
            Self::ReadDirectory => "READDIR",
            Self::ReadDirectoryPlus => "READDIRPLUS",
            Self::FileSystemStatus => "FSSTAT",
            Self::FileSystemInfo => "FSINFO",
            Self::PathConfiguration => "PATHCONF",
            Self::Commit => "COMMIT",
        }
    }

    /// How it is run.
    pub(crate) const fn lane(self) -> Lane {
        match self {
            Self::Null
            | Self::GetAttributes
            | Self::Lookup
            | Self::Access
            | Self::ReadLink
            | Self::FileSystemInfo
            | Self::PathConfiguration => Lane::Inline,
            Self::Write | Self::Commit => Lane::Data,
            Self::SetAttributes
            | Self::Create
            | Self::MakeDirectory
            | Self::Symlink
            | Self::MakeNode
            | Self::Remove
            | Self::RemoveDirectory
            | Self::Rename
            | Self::Link
            | Self::FileSystemStatus => Lane::Namespace,
            Self::Read => Lane::Cached,
            Self::ReadDirectory | Self::ReadDirectoryPlus => Lane::Read,
        }
    }

    /// Whether a second run of the same call could answer otherwise than the first, so that a
    /// resent call must get the first one's reply (RFC 1813 section 4.5).
    pub(crate) const fn is_replayed(self) -> bool {
        match self {
            Self::SetAttributes
            | Self::Create
            | Self::MakeDirectory
            | Self::Symlink
            | Self::MakeNode
            | Self::Remove
            | Self::RemoveDirectory
            | Self::Rename
            | Self::Link => true,
            Self::Null
            | Self::GetAttributes
            | Self::Lookup
            | Self::Access
            | Self::ReadLink
            | Self::Read
            | Self::Write
            | Self::ReadDirectory
            | Self::ReadDirectoryPlus
            | Self::FileSystemStatus
            | Self::FileSystemInfo
            | Self::PathConfiguration
            | Self::Commit => false,
        }
    }

    /// Words of zeros after the status of a failed call that says nothing more: each optional
    /// attribute set in the failure's type is absent.
    pub(crate) const fn failure_words(self) -> usize {
        match self {
            Self::Null | Self::GetAttributes => 0,
            Self::Lookup
            | Self::Access
            | Self::ReadLink
            | Self::Read
            | Self::ReadDirectory
            | Self::ReadDirectoryPlus
            | Self::FileSystemStatus
            | Self::FileSystemInfo
            | Self::PathConfiguration => 1,
            Self::SetAttributes
            | Self::Write
            | Self::Create
            | Self::MakeDirectory
            | Self::Symlink
            | Self::MakeNode
            | Self::Remove
            | Self::RemoveDirectory
            | Self::Commit => 2,
            Self::Link => 3,
            Self::Rename => 4,
        }
    }
}

/// The procedures of MOUNT version 3 (RFC 1813 appendix I), in order of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MountProcedure {
    Null,
    Mount,
    Dump,
    Unmount,
    UnmountAll,
    Export,
}

impl MountProcedure {
    /// All procedures; the position is the number.
    pub(crate) const ALL: [Self; 6] =
        [Self::Null, Self::Mount, Self::Dump, Self::Unmount, Self::UnmountAll, Self::Export];

    /// The procedure with this number.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Its name in RFC 1813.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "NULL",
            Self::Mount => "MNT",
            Self::Dump => "DUMP",
            Self::Unmount => "UMNT",
            Self::UnmountAll => "UMNTALL",
            Self::Export => "EXPORT",
        }
    }
}

/// The procedures of PORTMAP version 2 (RFC 1833 section 3) that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PortmapProcedure {
    Null,
    GetPort,
    Dump,
}

impl PortmapProcedure {
    /// All procedures that are served.
    pub(crate) const ALL: [Self; 3] = [Self::Null, Self::GetPort, Self::Dump];

    /// The procedure with this number. SET, UNSET and CALLIT would let others use this port
    /// mapper for themselves.
    pub(crate) const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Null),
            3 => Some(Self::GetPort),
            4 => Some(Self::Dump),
            _ => None,
        }
    }

    /// Its name in RFC 1833.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "NULL",
            Self::GetPort => "GETPORT",
            Self::Dump => "DUMP",
        }
    }
}

/// A procedure of any of the three programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Procedure {
    /// Of NFS.
    Nfs(NfsProcedure),
    /// Of MOUNT.
    Mount(MountProcedure),
    /// Of PORTMAP.
    Portmap(PortmapProcedure),
}

impl Procedure {
    /// Procedures of all programs.
    pub(crate) const COUNT: usize =
        NfsProcedure::ALL.len() + MountProcedure::ALL.len() + PortmapProcedure::ALL.len();

    /// All procedures in order of [`Self::index`].
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let nfs = NfsProcedure::ALL.into_iter().map(Self::Nfs);
        let mount = MountProcedure::ALL.into_iter().map(Self::Mount);
        let portmap = PortmapProcedure::ALL.into_iter().map(Self::Portmap);
        nfs.chain(mount).chain(portmap)
    }

    /// Its place among all procedures, below [`Self::COUNT`].
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Nfs(procedure) => procedure as usize,
            Self::Mount(procedure) => NfsProcedure::ALL.len() + procedure as usize,
            Self::Portmap(procedure) => {
                NfsProcedure::ALL.len() + MountProcedure::ALL.len() + procedure as usize
            }
        }
    }

    /// The program's name.
    pub(crate) const fn program(self) -> &'static str {
        match self {
            Self::Nfs(_) => "nfs",
            Self::Mount(_) => "mount",
            Self::Portmap(_) => "portmap",
        }
    }

    /// The procedure's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nfs(procedure) => procedure.name(),
            Self::Mount(procedure) => procedure.name(),
            Self::Portmap(procedure) => procedure.name(),
        }
    }

    /// Whether this is a NULL procedure, which anybody may call.
    pub(crate) const fn is_null(self) -> bool {
        matches!(
            self,
            Self::Nfs(NfsProcedure::Null)
                | Self::Mount(MountProcedure::Null)
                | Self::Portmap(PortmapProcedure::Null)
        )
    }

    /// How it is run.
    pub(crate) const fn lane(self) -> Lane {
        match self {
            Self::Nfs(procedure) => procedure.lane(),
            Self::Mount(_) | Self::Portmap(_) => Lane::Inline,
        }
    }

    /// Bytes that its reply may hold on top of [`limits::CALL_BYTES_MIN`]; READ's depend on
    /// its count.
    pub(crate) const fn reply_bytes(self) -> usize {
        match self {
            Self::Nfs(NfsProcedure::ReadDirectory | NfsProcedure::ReadDirectoryPlus) => {
                limits::DIRECTORY_BYTES_MAX
            }
            Self::Mount(MountProcedure::Dump) => limits::MOUNTS_BYTES_MAX,
            Self::Nfs(_) | Self::Mount(_) | Self::Portmap(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_numbers() {
        for (number, procedure) in NfsProcedure::ALL.into_iter().enumerate() {
            assert_eq!(procedure as usize, number);
        }
        for (number, procedure) in MountProcedure::ALL.into_iter().enumerate() {
            assert_eq!(procedure as usize, number);
        }
        assert_eq!(NfsProcedure::from_number(21), Some(NfsProcedure::Commit));
        assert_eq!(NfsProcedure::from_number(22), None);
        assert_eq!(MountProcedure::from_number(6), None);
        assert_eq!(PortmapProcedure::from_number(1), None);
    }

    #[test]
    fn each_procedure_has_an_index_of_its_own() {
        let indices: Vec<usize> = Procedure::all().map(Procedure::index).collect();
        assert_eq!(indices, (0..Procedure::COUNT).collect::<Vec<_>>());
    }

    #[test]
    fn what_changes_something_never_runs_in_the_reader() {
        for procedure in NfsProcedure::ALL {
            let changes = procedure.is_replayed();
            assert!(!changes || procedure.lane() == Lane::Namespace, "{procedure:?}");
        }
    }
}

//! Who may do what: mode bits, owner, group, superuser, sticky bit and the rules of SETATTR,
//! as POSIX has them and RFC 1813 section 4.4 adapts them for a server that sees no open and
//! no close. Pure functions of attributes and credentials.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, FileKind, SetAttributes, SetTime, SpecialFile};

use crate::auth::Credentials;

/// Bits of ACCESS (RFC 1813 section 3.3.4).
pub(crate) mod access {
    /// Read data, or a directory.
    pub(crate) const READ: u32 = 0x01;
    /// Look up a name in a directory.
    pub(crate) const LOOKUP: u32 = 0x02;
    /// Rewrite data, or change entries.
    pub(crate) const MODIFY: u32 = 0x04;
    /// Write new data, or add entries.
    pub(crate) const EXTEND: u32 = 0x08;
    /// Delete an entry.
    pub(crate) const DELETE: u32 = 0x10;
    /// Execute a file.
    pub(crate) const EXECUTE: u32 = 0x20;
}

/// The set-user-id bit of a mode.
const SET_UID: u32 = 0o4000;
/// The set-group-id bit: of a directory, its entries take its group.
const SET_GID: u32 = 0o2000;
/// The sticky bit: of a directory, only an entry's owner removes it.
const STICKY: u32 = 0o1000;
/// Any of the execute bits.
const EXECUTE_ANY: u32 = 0o111;
/// The group's.
const EXECUTE_GROUP: u32 = 0o010;
/// The bits of a mode.
const MODE_BITS: u32 = 0o7777;

/// One of the three permission bits of a class of users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Execute a file, search a directory.
    Execute,
}

impl Permission {
    const fn bit(self) -> u32 {
        match self {
            Self::Read => 4,
            Self::Write => 2,
            Self::Execute => 1,
        }
    }
}

/// Whether the mode bits give the user the permission. The superuser needs none, except that
/// a file which nobody can execute is not executable for him either.
pub(crate) fn allows(object: &Attributes, user: &Credentials, permission: Permission) -> bool {
    if user.is_root() {
        return permission != Permission::Execute
            || object.kind == FileKind::Directory
            || object.mode & EXECUTE_ANY != 0;
    }
    let class_shift = if user.uid == object.uid {
        6
    } else if user.is_in(object.gid) {
        3
    } else {
        0
    };
    (object.mode >> class_shift) & permission.bit() != 0
}

/// Whether the user may read the file's data. The owner always may, since NFSv3 has no open
/// that was checked when the mode still allowed it; and who may execute a file must be able to
/// page it in (RFC 1813 section 4.4).
pub(crate) fn may_read_data(file: &Attributes, user: &Credentials) -> bool {
    user.uid == file.uid
        || allows(file, user, Permission::Read)
        || (file.kind == FileKind::File && allows(file, user, Permission::Execute))
}

/// Whether the user may write the file's data; the owner always may, as for reading.
pub(crate) fn may_write_data(file: &Attributes, user: &Credentials) -> bool {
    user.uid == file.uid || allows(file, user, Permission::Write)
}

/// Whether the user may add and remove entries of the directory.
pub(crate) fn may_change_entries(directory: &Attributes, user: &Credentials) -> bool {
    allows(directory, user, Permission::Write) && allows(directory, user, Permission::Execute)
}

/// Whether the user may make objects of this kind: devices, which reach what a client's kernel drives, are
/// the superuser's to make, as mknod(2) has it.
pub(crate) const fn may_make(kind: FileKind, user: &Credentials) -> bool {
    match kind {
        FileKind::Special(SpecialFile::BlockDevice(_) | SpecialFile::CharacterDevice(_)) => {
            user.is_root()
        }
        FileKind::File
        | FileKind::Directory
        | FileKind::Symlink
        | FileKind::Special(SpecialFile::Socket | SpecialFile::Fifo) => true,
    }
}

/// Whether removal from the directory depends on who owns the entry.
pub(crate) fn is_guarded_by_sticky(directory: &Attributes, user: &Credentials) -> bool {
    directory.mode & STICKY != 0 && !user.is_root() && user.uid != directory.uid
}

/// Whether the user may remove `entry` from the directory or rename it away, given that he
/// [`may_change_entries`].
pub(crate) fn may_remove(directory: &Attributes, entry: &Attributes, user: &Credentials) -> bool {
    !is_guarded_by_sticky(directory, user) || entry.uid == user.uid
}

/// The bits of `wanted` that ACCESS grants.
pub(crate) fn granted(object: &Attributes, user: &Credentials, wanted: u32) -> u32 {
    let read = allows(object, user, Permission::Read);
    let write = allows(object, user, Permission::Write);
    let execute = allows(object, user, Permission::Execute);
    let bit = |allowed: bool, bit: u32| if allowed { bit } else { 0 };
    let granted = match object.kind {
        FileKind::Directory => {
            bit(read, access::READ)
                | bit(execute, access::LOOKUP)
                | bit(write && execute, access::MODIFY | access::EXTEND | access::DELETE)
        }
        FileKind::File | FileKind::Symlink | FileKind::Special(_) => {
            bit(read, access::READ)
                | bit(write, access::MODIFY | access::EXTEND)
                | bit(execute, access::EXECUTE)
        }
    };
    granted & wanted
}

/// What SETATTR may really set, of what the user asks for; or the status that refuses it.
pub(crate) fn set_attributes(
    object: &Attributes,
    user: &Credentials,
    wanted: &SetAttributes,
) -> Result<SetAttributes, nfsstat3> {
    let is_owner = user.is_root() || user.uid == object.uid;
    let mut set = *wanted;
    if let Some(uid) = wanted.uid
        && !user.is_root()
        && !(is_owner && uid == object.uid)
    {
        return Err(nfsstat3::NFS3ERR_PERM);
    }
    if let Some(gid) = wanted.gid
        && !user.is_root()
        && !(is_owner && (gid == object.gid || user.is_in(gid)))
    {
        return Err(nfsstat3::NFS3ERR_PERM);
    }
    let changes_owner = wanted.uid.is_some() || wanted.gid.is_some();
    if let Some(mode) = wanted.mode {
        if !is_owner {
            return Err(nfsstat3::NFS3ERR_PERM);
        }
        let mode = allowed_mode(mode, set.gid.unwrap_or(object.gid), user);
        let is_given = changes_owner && object.kind != FileKind::Directory;
        set.mode = Some(if is_given { without_set_id(mode) } else { mode });
    } else if changes_owner && object.kind != FileKind::Directory {
        set.mode = mode_after_change_of_owner(object, user);
    } else if wanted.size_bytes.is_some() {
        set.mode = mode_after_change_of_data(object, user);
    }
    if wanted.size_bytes.is_some() && !may_write_data(object, user) {
        return Err(nfsstat3::NFS3ERR_ACCES);
    }
    for time in [wanted.accessed_at, wanted.modified_at].into_iter().flatten() {
        check_time(object, user, is_owner, time)?;
    }
    Ok(set)
}

fn check_time(
    object: &Attributes,
    user: &Credentials,
    is_owner: bool,
    time: SetTime,
) -> Result<(), nfsstat3> {
    match time {
        _ if is_owner => Ok(()),
        SetTime::Now if allows(object, user, Permission::Write) => Ok(()),
        SetTime::Now => Err(nfsstat3::NFS3ERR_ACCES),
        SetTime::To(_) => Err(nfsstat3::NFS3ERR_PERM),
    }
}

/// POSIX chmod: set-group-id is dropped when the user is not in the file's group.
fn allowed_mode(mode: u32, gid: u32, user: &Credentials) -> u32 {
    let mode = mode & MODE_BITS;
    if user.is_root() || user.is_in(gid) { mode } else { mode & !SET_GID }
}

/// POSIX chown drops set-user-id and set-group-id; of the superuser's it leaves that open, and Linux does it, too: its
/// client counts on the server.
fn mode_after_change_of_owner(file: &Attributes, user: &Credentials) -> Option<u32> {
    let plain = match user.is_root() {
        true => without_set_id(file.mode),
        false => file.mode & !(SET_UID | SET_GID),
    };
    (plain != file.mode).then_some(plain)
}

/// The mode that a file gets when the user writes it or gives it a size, if that is another one: POSIX lets set-id bits of
/// a program not survive a write by others than the superuser, its owner included.
pub(crate) fn mode_after_change_of_data(file: &Attributes, user: &Credentials) -> Option<u32> {
    if user.is_root() || file.kind != FileKind::File || file.mode & (SET_UID | SET_GID) == 0 {
        return None;
    }
    let plain = without_set_id(file.mode);
    let plain = if user.is_in(file.gid) { plain } else { plain & !SET_GID };
    (plain != file.mode).then_some(plain)
}

/// Without the group's execute bit, set-group-id was a mark for mandatory locks, and stays.
const fn without_set_id(mode: u32) -> u32 {
    if mode & EXECUTE_GROUP == 0 { mode & !SET_UID } else { mode & !(SET_UID | SET_GID) }
}

/// What is set on a new object in `directory`: the caller's own user and group (or the
/// directory's group, if its set-group-id bit asks for it), and `default_mode` if he names no
/// mode. Only the superuser makes objects for others.
pub(crate) fn new_object(
    directory: &Attributes,
    user: &Credentials,
    kind: FileKind,
    wanted: &SetAttributes,
    default_mode: u32,
) -> SetAttributes {
    let inherits_group = directory.mode & SET_GID != 0;
    let own_gid = if inherits_group { directory.gid } else { user.gid };
    let uid = wanted.uid.filter(|_| user.is_root()).unwrap_or(user.uid);
    let gid = wanted.gid.filter(|&gid| user.is_root() || user.is_in(gid)).unwrap_or(own_gid);
    let mut mode = allowed_mode(wanted.mode.unwrap_or(default_mode), gid, user);
    if inherits_group && kind == FileKind::Directory {
        mode |= SET_GID;
    }
    SetAttributes { mode: Some(mode), uid: Some(uid), gid: Some(gid), ..*wanted }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slackwater_blockstore::{InodeId, Timestamp};

    fn object(kind: FileKind, mode: u32, uid: u32, gid: u32) -> Attributes {
        Attributes {
            inode: InodeId::new(9),
            generation: 1,
            kind,
            mode,
            link_count: 1,
            uid,
            gid,
            size_bytes: 0,
            used_bytes: 0,
            accessed_at: Timestamp::default(),
            modified_at: Timestamp::default(),
            changed_at: Timestamp::default(),
        }
    }

    fn user(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
        Credentials::new(uid, gid, groups)
    }

    const ALL: u32 = 0x3f;

    #[test]
    fn the_first_class_that_fits_decides() {
        let file = object(FileKind::File, 0o604, 10, 20);
        assert!(allows(&file, &user(10, 1, &[]), Permission::Read));
        assert!(!allows(&file, &user(11, 20, &[]), Permission::Read), "group, not others");
        assert!(!allows(&file, &user(11, 1, &[20]), Permission::Read), "supplementary group");
        assert!(allows(&file, &user(11, 1, &[2]), Permission::Read));
        assert!(!allows(&file, &user(11, 1, &[2]), Permission::Write));
    }

    #[test]
    fn the_superuser_is_not_held_by_mode_bits() {
        let root = user(0, 0, &[]);
        let file = object(FileKind::File, 0, 10, 20);
        assert_eq!(granted(&file, &root, ALL), access::READ | access::MODIFY | access::EXTEND);
        let program = object(FileKind::File, 0o100, 10, 20);
        assert_ne!(granted(&program, &root, access::EXECUTE), 0);
        let directory = object(FileKind::Directory, 0, 10, 20);
        assert_eq!(granted(&directory, &root, ALL), 0x1f);
    }

    #[test]
    fn access_answers_what_was_asked_only() {
        let directory = object(FileKind::Directory, 0o755, 10, 20);
        let other = user(11, 21, &[]);
        assert_eq!(granted(&directory, &other, ALL), access::READ | access::LOOKUP);
        assert_eq!(granted(&directory, &other, access::LOOKUP | access::MODIFY), access::LOOKUP);
        assert_eq!(granted(&directory, &user(10, 1, &[]), ALL), 0x1f);
    }

    #[test]
    fn the_owner_always_reaches_his_data() {
        let file = object(FileKind::File, 0, 10, 20);
        assert!(
            may_read_data(&file, &user(10, 1, &[])) && may_write_data(&file, &user(10, 1, &[]))
        );
        assert!(!may_read_data(&file, &user(11, 20, &[])));
        let program = object(FileKind::File, 0o711, 10, 20);
        assert!(may_read_data(&program, &user(11, 1, &[])), "who executes must read");
        assert!(!may_write_data(&program, &user(11, 1, &[])));
    }

    #[test]
    fn a_sticky_directory_guards_its_entries() {
        let sticky = object(FileKind::Directory, 0o1777, 0, 0);
        let entry = object(FileKind::File, 0o666, 10, 20);
        assert!(may_remove(&sticky, &entry, &user(10, 1, &[])));
        assert!(!may_remove(&sticky, &entry, &user(11, 20, &[])));
        assert!(may_remove(&sticky, &entry, &user(0, 0, &[])));
        let own = object(FileKind::Directory, 0o1777, 11, 0);
        assert!(may_remove(&own, &entry, &user(11, 20, &[])));
    }

    #[test]
    fn only_the_superuser_gives_files_away() {
        let file = object(FileKind::File, 0o6755, 10, 20);
        let owner = user(10, 20, &[30]);
        let set = |wanted| set_attributes(&file, &owner, &wanted);
        let to_uid = |uid| SetAttributes { uid: Some(uid), ..Default::default() };
        let to_gid = |gid| SetAttributes { gid: Some(gid), ..Default::default() };
        assert!(matches!(set(to_uid(11)), Err(nfsstat3::NFS3ERR_PERM)));
        assert!(set(to_uid(10)).is_ok());
        assert!(matches!(set(to_gid(31)), Err(nfsstat3::NFS3ERR_PERM)));
        assert_eq!(set(to_gid(30)).unwrap().mode, Some(0o755), "set-id bits are dropped");
        let root = set_attributes(&file, &user(0, 0, &[]), &to_uid(11)).unwrap();
        assert_eq!((root.uid, root.mode), (Some(11), Some(0o755)));
        let both = SetAttributes { mode: Some(0o6711), ..to_uid(11) };
        let root = set_attributes(&file, &user(0, 0, &[]), &both).unwrap();
        assert_eq!(root.mode, Some(0o711));
        let locked = object(FileKind::File, 0o2644, 10, 20);
        let root = set_attributes(&locked, &user(0, 0, &[]), &to_uid(11)).unwrap();
        assert_eq!(root.mode, None, "a mark for locks, which gives no rights");
        let directory = object(FileKind::Directory, 0o2775, 10, 20);
        let root = set_attributes(&directory, &user(0, 0, &[]), &to_uid(11)).unwrap();
        assert_eq!(root.mode, None);
        let other = set_attributes(&file, &user(11, 20, &[]), &to_gid(20));
        assert!(matches!(other, Err(nfsstat3::NFS3ERR_PERM)));
    }

    #[test]
    fn set_id_bits_go_with_a_change_of_owner_of_all_but_directories() {
        let to = SetAttributes { uid: Some(11), ..Default::default() };
        let kinds = [FileKind::File, FileKind::Symlink, FileKind::Special(SpecialFile::Fifo)];
        for kind in kinds {
            let set = set_attributes(&object(kind, 0o6777, 10, 20), &user(0, 0, &[]), &to);
            assert_eq!(set.unwrap().mode, Some(0o777), "{kind}");
        }
        let directory = object(FileKind::Directory, 0o6777, 10, 20);
        assert_eq!(set_attributes(&directory, &user(0, 0, &[]), &to).unwrap().mode, None);
    }

    #[test]
    fn devices_are_for_the_superuser_to_make() {
        use slackwater_blockstore::DeviceNumber;
        let number = DeviceNumber { major: 1, minor: 3 };
        let (root, other) = (user(0, 0, &[]), user(10, 20, &[]));
        for special in [SpecialFile::BlockDevice(number), SpecialFile::CharacterDevice(number)] {
            assert!(may_make(FileKind::Special(special), &root));
            assert!(!may_make(FileKind::Special(special), &other));
        }
        for special in [SpecialFile::Socket, SpecialFile::Fifo] {
            assert!(may_make(FileKind::Special(special), &other));
        }
    }

    #[test]
    fn set_id_bits_do_not_survive_a_change_of_the_data() {
        let after = |mode, user: &Credentials| {
            mode_after_change_of_data(&object(FileKind::File, mode, 10, 20), user)
        };
        let (owner, other, root) = (user(10, 20, &[]), user(11, 21, &[]), user(0, 0, &[]));
        for (mode, by_owner, by_other) in [
            (0o777, None, None),
            (0o4777, Some(0o777), Some(0o777)),
            (0o2777, Some(0o777), Some(0o777)),
            (0o6777, Some(0o777), Some(0o777)),
            (0o2666, None, Some(0o666)),
            (0o1777, None, None),
        ] {
            assert_eq!(after(mode, &owner), by_owner, "{mode:o}");
            assert_eq!(after(mode, &other), by_other, "{mode:o}");
            assert_eq!(after(mode, &root), None, "{mode:o}");
        }
        let program = object(FileKind::File, 0o6777, 10, 20);
        let size = SetAttributes { size_bytes: Some(0), ..Default::default() };
        assert_eq!(set_attributes(&program, &other, &size).unwrap().mode, Some(0o777));
        assert_eq!(set_attributes(&program, &root, &size).unwrap().mode, None);
        let both = SetAttributes { mode: Some(0o6755), ..size };
        assert_eq!(set_attributes(&program, &owner, &both).unwrap().mode, Some(0o6755));
    }

    #[test]
    fn mode_size_and_times_have_rules_of_their_own() {
        let file = object(FileKind::File, 0o666, 10, 20);
        let other = user(11, 21, &[]);
        let set = |wanted| set_attributes(&file, &other, &wanted);
        let mode = SetAttributes { mode: Some(0o777), ..Default::default() };
        assert!(matches!(set(mode), Err(nfsstat3::NFS3ERR_PERM)));
        let size = SetAttributes { size_bytes: Some(0), ..Default::default() };
        assert!(set(size).is_ok());
        let now = SetAttributes { modified_at: Some(SetTime::Now), ..Default::default() };
        assert!(set(now).is_ok());
        let to = SetTime::To(Timestamp::default());
        let then = SetAttributes { accessed_at: Some(to), ..Default::default() };
        assert!(matches!(set(then), Err(nfsstat3::NFS3ERR_PERM)));
        let read_only = object(FileKind::File, 0o644, 10, 20);
        let refused = |wanted| set_attributes(&read_only, &other, &wanted).unwrap_err() as u32;
        assert_eq!(refused(size), nfsstat3::NFS3ERR_ACCES as u32);
        assert_eq!(refused(now), nfsstat3::NFS3ERR_ACCES as u32);
        let owner = user(10, 99, &[]);
        let set_gid = SetAttributes { mode: Some(0o2755), ..Default::default() };
        assert_eq!(set_attributes(&file, &owner, &set_gid).unwrap().mode, Some(0o755));
    }

    #[test]
    fn a_new_object_is_its_makers() {
        let directory = object(FileKind::Directory, 0o777, 1, 2);
        let maker = user(10, 20, &[30]);
        let wanted = SetAttributes { uid: Some(5), gid: Some(30), ..Default::default() };
        let set = new_object(&directory, &maker, FileKind::File, &wanted, 0o644);
        assert_eq!((set.mode, set.uid, set.gid), (Some(0o644), Some(10), Some(30)));
        let group = object(FileKind::Directory, 0o2777, 1, 2);
        let set = new_object(&group, &maker, FileKind::Directory, &SetAttributes::default(), 0o755);
        assert_eq!((set.mode, set.gid), (Some(0o2755), Some(2)));
        let set = new_object(&directory, &user(0, 0, &[]), FileKind::File, &wanted, 0o600);
        assert_eq!((set.uid, set.gid), (Some(5), Some(30)));
    }
}

//! POSIX ACLs in the form in which `getxattr` and tar give them (`linux/posix_acl_xattr.h`).
//!
//! ```text
//! version 2 u32 | entries: tag u16 | permissions u16 | owner or group u32        little-endian
//! ```

const VERSION: u32 = 2;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// A valid ACL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosixAcl {
    mode: u16,
    entries: usize,
}

impl PosixAcl {
    /// Reads an ACL; `None` if the kernel would refuse it (`posix_acl_valid`). One without entries
    /// is valid: it stands for none.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (version, entries) = value.split_first_chunk::<HEADER_BYTES>()?;
        if u32::from_le_bytes(*version) != VERSION || !entries.len().is_multiple_of(ENTRY_BYTES) {
            return None;
        }
        let mut acl = Self { mode: 0, entries: entries.len() / ENTRY_BYTES };
        let mut last = 0;
        let mut needs_mask = false;
        for entry in entries.chunks_exact(ENTRY_BYTES) {
            let tag = u16::from_le_bytes([entry[0], entry[1]]);
            let permissions = u16::from_le_bytes([entry[2], entry[3]]);
            let may_repeat = matches!(tag, USER | GROUP);
            // The tags are in the order of their numbers, and named owners follow no group.
            let is_next = tag > last || (may_repeat && tag == last);
            let has_place = match tag {
                USER_OBJ => true,
                USER => last >= USER_OBJ,
                GROUP_OBJ => last >= USER_OBJ,
                GROUP | MASK => last >= GROUP_OBJ,
                OTHER => last >= GROUP_OBJ && (last == MASK || !needs_mask),
                _ => false,
            };
            if !is_next || !has_place || permissions > 7 {
                return None;
            }
            needs_mask |= may_repeat;
            match tag {
                USER_OBJ => acl.mode |= permissions << 6,
                GROUP_OBJ => acl.mode |= permissions << 3,
                MASK => acl.mode = acl.mode & !0o070 | permissions << 3,
                OTHER => acl.mode |= permissions,
                _ => {}
            }
            last = tag;
        }
        (acl.entries == 0 || last == OTHER).then_some(acl)
    }

    /// The permissions that it gives to owner, group and others: an inode with this as its access
    /// ACL has them.
    #[must_use]
    pub fn mode(self) -> u16 {
        self.mode
    }

    /// Whether it has no entries, and stands for none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.entries == 0
    }

    /// Whether it says no more than a mode does: file systems keep no such access ACL.
    #[must_use]
    pub fn is_minimal(self) -> bool {
        self.entries <= 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            bytes.extend_from_slice(&tag.to_le_bytes());
            bytes.extend_from_slice(&permissions.to_le_bytes());
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        bytes
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn the_mode_of_an_acl_is_that_of_its_mask() {
        let minimal = [(USER_OBJ, 6, NONE), (GROUP_OBJ, 5, NONE), (OTHER, 4, NONE)];
        let parsed = PosixAcl::parse(&acl(&minimal)).unwrap();
        assert_eq!((parsed.mode(), parsed.is_minimal()), (0o654, true));
        let mut named = minimal.to_vec();
        named.splice(1..1, [(USER, 7, 1), (USER, 0, 2)]);
        named.splice(4..4, [(GROUP, 7, 1), (MASK, 7, NONE)]);
        let parsed = PosixAcl::parse(&acl(&named)).unwrap();
        assert_eq!((parsed.mode(), parsed.is_minimal()), (0o674, false));
        assert!(PosixAcl::parse(&acl(&[])).unwrap().is_minimal());
    }

    #[test]
    fn what_the_kernel_refuses_is_refused() {
        let good = [
            (USER_OBJ, 6, NONE),
            (USER, 1, 1),
            (GROUP_OBJ, 5, NONE),
            (MASK, 7, NONE),
            (OTHER, 4, NONE),
        ];
        assert!(PosixAcl::parse(&acl(&good)).is_some());
        for without in 0..good.len() {
            let mut some = good.to_vec();
            let removed = some.remove(without);
            let may_go = removed.0 == USER;
            assert_eq!(PosixAcl::parse(&acl(&some)).is_some(), may_go, "{removed:?}");
            let mut twice = good.to_vec();
            twice.insert(without, removed);
            assert_eq!(PosixAcl::parse(&acl(&twice)).is_some(), may_go, "twice {removed:?}");
        }
        for (at, entry) in [(0, (3, 0, NONE)), (4, (OTHER, 8, NONE)), (3, (USER, 7, 1))] {
            let mut some = good.to_vec();
            some[at] = entry;
            assert_eq!(PosixAcl::parse(&acl(&some)), None, "{entry:?}");
        }
        let whole = acl(&good);
        for bad in [&whole[..3], &whole[..whole.len() - 1], b"", b"\x01\0\0\0"] {
            assert_eq!(PosixAcl::parse(bad), None, "{bad:?}");
        }
    }
}

//! Extended attributes behind their inode.
//!
//! ```text
//! 12 bytes of header (no name filter, nothing shared), then for each, at a multiple of 4:
//!   length of the name u8 | prefix u8 | length of the value u16 | name without prefix | value
//! ```

use crate::acl::PosixAcl;
use crate::error::{ErofsError, shown};
use crate::format::{XATTR_HEADER_BYTES, XATTR_UNIT_BYTES};
use crate::tree::{Kind, Xattrs};

/// The prefixes that have a number. What begins with none of them, no kernel would show.
const PREFIXES: [(&[u8], u8); 5] =
    [(b"user.", 1), (ACCESS_ACL, 2), (DEFAULT_ACL, 3), (b"trusted.", 4), (b"security.", 6)];

/// Bytes before a name.
const ENTRY_BYTES: usize = 4;

/// Of a whole name: the kernel takes and gives no longer one (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;

/// Of all names of an inode, each with a NUL: the kernel lists no more (`XATTR_LIST_MAX`).
const LIST_BYTES_MAX: usize = 65_536;

/// The length has 16 bits.
const VALUE_BYTES_MAX: usize = u16::MAX as usize;

/// ACLs by their names: for whom they count, and for new files of a directory.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// The number of units has 16 bits; the header counts as the first.
const TOTAL_BYTES_MAX: usize = XATTR_HEADER_BYTES + (u16::MAX as usize - 1) * XATTR_UNIT_BYTES;

/// The number of a name's prefix, and what is left of the name.
fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(prefix, number)| {
        let rest = name.strip_prefix(*prefix)?;
        // A prefix that ends with a dot needs a name behind it, another allows none.
        (rest.is_empty() != prefix.ends_with(b".")).then_some((*number, rest))
    })
}

/// Refuses attributes that cannot be kept, or that an inode of this kind cannot have.
pub(crate) fn check(xattrs: &Xattrs, kind: &Kind) -> Result<(), ErofsError> {
    let refused = |name: &[u8], reason| Err(ErofsError::Xattr { name: shown(name), reason });
    let mut list_bytes = 0;
    for (name, value) in xattrs {
        if split(name).is_none() {
            return refused(name, "it is no user., trusted. or security. one and no POSIX ACL");
        }
        if name.len() > NAME_BYTES_MAX || name.contains(&0) {
            return refused(name, "its name has more than 255 bytes or holds a NUL");
        }
        if value.len() > VALUE_BYTES_MAX {
            return refused(name, "its value has more than 65,535 bytes");
        }
        if let Some(reason) = misplaced(name, value, kind) {
            return refused(name, reason);
        }
        list_bytes += name.len() + 1;
        if list_bytes > LIST_BYTES_MAX {
            return refused(name, "with the others of its file its name takes more than 64 KiB");
        }
    }
    match xattrs.keys().next_back() {
        Some(last) if encoded_bytes(xattrs) > TOTAL_BYTES_MAX => {
            refused(last, "with the others of its file it takes more than 256 KiB")
        }
        _ => Ok(()),
    }
}

/// Why an inode of this kind does not have this attribute.
fn misplaced(name: &[u8], value: &[u8], kind: &Kind) -> Option<&'static str> {
    let is_acl = name == ACCESS_ACL || name == DEFAULT_ACL;
    if is_acl && PosixAcl::parse(value).is_none() {
        return Some("it is no valid POSIX ACL of version 2");
    }
    if name == DEFAULT_ACL && *kind != Kind::Directory {
        return Some("only directories have such");
    }
    if is_acl && matches!(kind, Kind::Symlink(_)) {
        return Some("symbolic links have none");
    }
    if name.starts_with(b"user.") && !matches!(kind, Kind::File(_) | Kind::Directory) {
        return Some("only files and directories have such");
    }
    None
}

fn entry_bytes(rest: &[u8], value: &[u8]) -> usize {
    (ENTRY_BYTES + rest.len() + value.len()).next_multiple_of(XATTR_UNIT_BYTES)
}

/// Bytes of [`encode`].
pub(crate) fn encoded_bytes(xattrs: &Xattrs) -> usize {
    let entries = xattrs.iter().filter_map(|(name, value)| Some((split(name)?.1, value)));
    let bytes: usize = entries.map(|(rest, value)| entry_bytes(rest, value)).sum();
    if bytes == 0 { 0 } else { XATTR_HEADER_BYTES + bytes }
}

/// Appends the attributes, which [`check`] let pass, with their header; nothing where there are none.
pub(crate) fn encode(xattrs: &Xattrs, out: &mut Vec<u8>) {
    if xattrs.is_empty() {
        return;
    }
    out.extend_from_slice(&[0; XATTR_HEADER_BYTES]);
    for (name, value) in xattrs {
        let Some((prefix, rest)) = split(name) else { continue };
        let end = out.len() + entry_bytes(rest, value);
        let name_length = u8::try_from(rest.len()).unwrap_or(u8::MAX);
        out.extend_from_slice(&[name_length, prefix]);
        out.extend_from_slice(&u16::try_from(value.len()).unwrap_or(u16::MAX).to_le_bytes());
        out.extend_from_slice(rest);
        out.extend_from_slice(value);
        out.resize(end, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, value: &[u8]) -> Xattrs {
        Xattrs::from([(name.as_bytes().to_vec(), value.to_vec())])
    }

    #[test]
    fn what_is_counted_is_what_is_written() {
        let mut all = Xattrs::new();
        for length in 0..9 {
            all.extend(of(&format!("user.{}", "n".repeat(length + 1)), &vec![b'v'; 3 * length]));
            let mut bytes = Vec::new();
            encode(&all, &mut bytes);
            assert_eq!((bytes.len(), bytes.len() % 4), (encoded_bytes(&all), 0));
        }
        assert_eq!(encoded_bytes(&Xattrs::new()), 0);
    }

    #[test]
    fn what_no_kernel_would_give_back_is_refused() {
        let check = |xattrs: &Xattrs| check(xattrs, &Kind::Directory);
        let long = format!("user.{}", "n".repeat(NAME_BYTES_MAX));
        let names = ["user.", "trusted.", "system.other", "system.posix_acl_access.x", "os2.x", ""];
        for name in names.into_iter().chain([&long[..256]]) {
            assert!(check(&of(name, b"")).is_err(), "{name}");
        }
        for name in ["user.a", "trusted.a", "security.a", &long[..255]] {
            check(&of(name, b"")).unwrap();
        }
        check(&of("user.a", &vec![0; VALUE_BYTES_MAX])).unwrap();
        assert!(check(&of("user.a", &vec![0; VALUE_BYTES_MAX + 1])).is_err());
        let four = (0..4).map(|at| (format!("user.{at}").into_bytes(), vec![1; VALUE_BYTES_MAX]));
        let error = check(&four.collect()).unwrap_err().to_string();
        assert!(error.contains("256 KiB"), "{error}");
        let names = |count| (0..count).map(|at| (format!("user.{at:05}").into_bytes(), Vec::new()));
        check(&names(LIST_BYTES_MAX / 11).collect()).unwrap();
        let error = check(&names(LIST_BYTES_MAX / 11 + 1).collect()).unwrap_err().to_string();
        assert!(error.contains("64 KiB"), "{error}");
    }

    #[test]
    fn each_kind_has_its_attributes() {
        let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
        let symlink = Kind::Symlink(b"target"[..].into());
        let cases = [
            ("system.posix_acl_access", &acl[..], [true, true, false]),
            ("system.posix_acl_access", &acl[..20], [false; 3]),
            ("system.posix_acl_default", &acl[..], [true, false, false]),
            ("user.a", b"", [true, false, false]),
            ("trusted.a", b"", [true; 3]),
        ];
        for (name, value, expected) in cases {
            let kinds = [&Kind::Directory, &Kind::Fifo, &symlink];
            assert_eq!(kinds.map(|kind| check(&of(name, value), kind).is_ok()), expected, "{name}");
        }
    }
}

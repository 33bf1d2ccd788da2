//! Extended attributes of overlayfs: its own, and the form in which it keeps those of its users.
//!
//! What begins with `trusted.overlay.` belongs to overlayfs. An attribute of that name which a user of
//! the overlay sets is kept with one more `overlay.` (*escaped*; since Linux 6.7).

use crate::pax::Records;

/// What overlayfs writes, and an archive may not.
const PREFIX: &[u8] = b"trusted.overlay.";

/// The same of an overlay that is mounted with `userxattr`.
const USER_PREFIX: &[u8] = b"user.overlay.";

/// What it shows as such an attribute of a file.
const ESCAPED_PREFIX: &[u8] = b"trusted.overlay.overlay.";

/// On a directory: what is below is not seen.
pub(crate) const OPAQUE: (&[u8], &[u8]) = (b"trusted.overlay.opaque", b"y");

/// Attributes in the form in which overlayfs shows them, and does not take them for its own.
pub(crate) fn escaped(xattrs: Records) -> Records {
    let escape = |(name, value): (Vec<u8>, Vec<u8>)| match name.strip_prefix(PREFIX) {
        Some(rest) => ([ESCAPED_PREFIX, rest].concat(), value),
        None => (name, value),
    };
    xattrs.into_iter().map(escape).collect()
}

/// Attributes without those whose names some overlay gives a meaning, whoever set them.
pub(crate) fn without_marks(mut xattrs: Records) -> Records {
    xattrs.retain(|name, _| !name.starts_with(PREFIX) && !name.starts_with(USER_PREFIX));
    xattrs
}

/// What follows the prefix in the name of an attribute that is overlayfs' own.
pub(crate) fn own(name: &[u8]) -> Option<&[u8]> {
    name.strip_prefix(PREFIX).filter(|_| !name.starts_with(ESCAPED_PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(names: &[&str]) -> Records {
        names.iter().map(|name| (name.as_bytes().to_vec(), b"value".to_vec())).collect()
    }

    #[test]
    fn what_was_escaped_is_not_overlayfs_own_and_no_mark_is_left() {
        let users = [
            "trusted.overlay.",
            "trusted.overlay.opaque",
            "trusted.overlay.overlay.",
            "trusted.overlay.overlay.note",
            "trusted.overlayer",
            "user.overlay.opaque",
        ];
        let kept = escaped(records(&users));
        assert!(kept.keys().all(|name| own(name).is_none()), "{kept:?}");
        for marked in [kept, records(&users), records(&["trusted.overlay.origin"])] {
            assert!(without_marks(marked).into_keys().all(|name| name == b"trusted.overlayer"));
        }
        assert_eq!(without_marks(records(&users)), records(&["trusted.overlayer"]));
        assert_eq!(own(b"trusted.overlay.origin"), Some(&b"origin"[..]));
    }
}

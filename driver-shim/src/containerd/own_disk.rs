//! Disks of their own for single containers, by labels of their snapshots.
//!
//! ```text
//! containerd.io/snapshot/slackwater.disk=own           a disk of the worker's `disk-size`
//! containerd.io/snapshot/slackwater.disk-size=20GiB    one of this size
//! ```
//! Where layers are images, containers share a disk for what they write: one with a disk of its own cannot fill that of
//! the others, loses no writes of theirs, and waits for none of their syncs. Where layers are disks each container has
//! its own, of the size of the disk below, and the second label is for a larger one.

use std::collections::BTreeMap;

use super::error::CallError;
use crate::settings::{Size, SizeError};
use crate::trust::unpacking::{self, Root};
use crate::worker::{Key, OwnDisk};

/// Whether the disk is this snapshot's alone.
const DISK: &str = "containerd.io/snapshot/slackwater.disk";

/// The size of that disk.
const DISK_SIZE: &str = "containerd.io/snapshot/slackwater.disk-size";

/// The one value of [`DISK`].
const OWN: &str = "own";

/// The disk that the labels of a snapshot ask for, which is prepared with this root. A layer has none: its labels may be
/// annotations of its image.
///
/// # Errors
/// `LabelValue`; `DiskOfSharedRoot` if the root is read-only.
pub(super) fn asked_for(
    key: &Key,
    root: Root,
    labels: &BTreeMap<String, String>,
) -> Result<Option<OwnDisk>, CallError> {
    let (disk, size) = (labels.get(DISK), labels.get(DISK_SIZE));
    let label = match (disk, size) {
        (None, None) => return Ok(None),
        (Some(_), _) => DISK,
        (None, Some(_)) => DISK_SIZE,
    };
    if unpacking::may_be_layer(&key.name, labels) {
        tracing::warn!(%key, label, "a layer of an image has no disk of its own: its label is ignored");
        return Ok(None);
    }
    let size_bytes = size.map(|text| size_of(text)).transpose()?;
    if let Some(got) = disk.filter(|value| *value != OWN) {
        return Err(refused(DISK, got, format!("expected `{OWN}`")));
    }
    if root == Root::Shared {
        return Err(CallError::DiskOfSharedRoot { label, other: unpacking::SHARED });
    }
    Ok(Some(OwnDisk { size_bytes }))
}

fn size_of(text: &str) -> Result<u64, CallError> {
    let size: Size = text.parse().map_err(|_: SizeError| {
        let expected =
            "expected a number of bytes, or one with KiB, MiB, GiB or TiB, such as 20GiB";
        refused(DISK_SIZE, text, expected.to_owned())
    })?;
    size.of_disk().map_err(|expected| refused(DISK_SIZE, text, expected))
}

fn refused(label: &'static str, got: &str, expected: String) -> CallError {
    CallError::LabelValue { label, got: got.to_owned(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(key: &str, pairs: &[(&str, &str)]) -> Result<Option<OwnDisk>, CallError> {
        let labels = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let labels = labels.collect();
        let key = Key::containerd(key);
        asked_for(&key, unpacking::root(&key.name, &labels), &labels)
    }

    #[test]
    fn labels_ask_for_a_disk_and_its_size() {
        let of_size = |size_bytes| Some(OwnDisk { size_bytes });
        for (pairs, expected) in [
            (&[][..], None),
            (&[("containerd.io/snapshot/other", "own")][..], None),
            (&[(DISK, OWN)][..], of_size(None)),
            (&[(DISK_SIZE, "20GiB")][..], of_size(Some(20 << 30))),
            (&[(DISK, OWN), (DISK_SIZE, "67108864")][..], of_size(Some(64 << 20))),
            (&[(DISK, OWN), (unpacking::SHARED, "false")][..], of_size(None)),
        ] {
            assert_eq!(asked("default/7/c", pairs).unwrap(), expected, "{pairs:?}");
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (pairs, named) in [
            (&[(DISK, "shared")][..], "`own`"),
            (&[(DISK, "Own")][..], "`own`"),
            (&[(DISK_SIZE, "20GB")][..], "20GiB"),
            (&[(DISK_SIZE, "1MiB")][..], "64MiB"),
            (&[(DISK_SIZE, "17TiB")][..], "16TiB"),
            (&[(DISK_SIZE, "67108865")][..], "4096"),
            (&[(DISK_SIZE, "1099511631872")][..], "images"),
            (&[(DISK, OWN), (unpacking::SHARED, "true")][..], "slackwater.shared"),
            (&[(DISK_SIZE, "1GiB"), (unpacking::SHARED, "true")][..], "slackwater.disk-size"),
        ] {
            let error = asked("default/7/c", pairs).unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn an_image_asks_for_no_disk() {
        let chain = format!("sha256:{}", "1".repeat(64));
        let key = format!("default/7/extract-775838128-m-A0 {chain}");
        for value in [OWN, "bad"] {
            assert_eq!(asked(&key, &[(DISK, value)]).unwrap(), None);
            let labels = [(DISK, value), ("containerd.io/snapshot.ref", &*chain)];
            assert_eq!(asked("default/7/c", &labels).unwrap(), None);
        }
    }
}

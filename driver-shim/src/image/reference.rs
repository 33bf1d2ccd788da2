//! Layers that name snapshots.

use std::io::{self, Cursor, Read};

use slackwater_archive::{ArchiveError, Recognised, Reference, recognise};

use super::digest::Digest;
use super::form;
use crate::engine::EngineError;
use crate::engine::daemon::Daemon;
use crate::worker::SnapshotRef;

/// Longest blob that is looked at for a reference, and its tar: one has 3 KiB, and a program that writes it again may
/// pad it.
pub(super) const BLOB_BYTES_MAX: u64 = 128 << 10;

/// A layer that names a snapshot.
#[derive(Clone, Debug)]
pub(super) struct ReferenceLayer {
    pub(super) snapshot: SnapshotRef,
    /// Its archive, the same for the same snapshot everywhere.
    pub(super) archive: Vec<u8>,
    /// The digest of the archive.
    pub(super) diff_id: Digest,
    /// What tells the snapshot to a snapshotter before the archive is fetched.
    pub(super) annotation: String,
}

impl ReferenceLayer {
    /// `reference` is the one to `snapshot`.
    pub(super) fn new(reference: &Reference, snapshot: SnapshotRef) -> Self {
        let archive = reference.to_archive();
        let diff_id = Digest::of(&archive);
        let Reference { store_id, snapshot_id, size_bytes, .. } = reference;
        let annotation = format!("{store_id}/{snapshot_id}/{size_bytes}");
        Self { snapshot, archive, diff_id, annotation }
    }
}

/// A layer for each snapshot.
///
/// # Errors
/// The daemon or the appliance does not give a reference.
pub(super) async fn layers(
    daemon: &Daemon,
    snapshots: &[SnapshotRef],
) -> Result<Vec<ReferenceLayer>, EngineError> {
    let mut layers = Vec::with_capacity(snapshots.len());
    for snapshot in snapshots {
        let reference = daemon.reference(snapshot.id).await?;
        layers.push(ReferenceLayer::new(&reference, *snapshot));
    }
    Ok(layers)
}

/// The reference that the blob of a layer holds, compressed or not; none if it holds anything else.
///
/// # Errors
/// It is a reference that is not valid, or not the layer of this diff id.
pub(super) fn reference_in(blob: Vec<u8>, diff_id: &str) -> Result<Option<Reference>, String> {
    // What has no such form is for those who unpack it to judge.
    let Ok(tar) = tar_of(blob) else { return Ok(None) };
    let reference = match recognise(&tar[..]) {
        Ok(Recognised::Reference(reference)) => reference,
        Err(error @ ArchiveError::BadReference { .. }) => return Err(error.to_string()),
        Ok(Recognised::Ordinary(_)) | Err(_) => return Ok(None),
    };
    let got = Digest::of(&tar).to_string();
    match got == diff_id {
        true => Ok(Some(reference)),
        false => Err(format!("it is {got}, and not the one that the image's configuration lists")),
    }
}

/// The tar of a blob, as far as it can be one of a reference.
fn tar_of(blob: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut tar = Vec::new();
    form::decoder(Cursor::new(blob))?.take(BLOB_BYTES_MAX + 1).read_to_end(&mut tar)?;
    match u64::try_from(tar.len()) {
        Ok(length) if length <= BLOB_BYTES_MAX => Ok(tar),
        _ => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

/// The digests of the layers, as a configuration lists them.
pub(super) fn diff_ids(layers: &[ReferenceLayer]) -> Vec<String> {
    layers.iter().map(|layer| layer.diff_id.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::form::{Encoder, Form};
    use super::*;

    fn packed(form: Form, tar: &[u8]) -> Vec<u8> {
        let mut encoder = Encoder::new(form, Vec::new()).unwrap();
        encoder.write_all(tar).unwrap();
        encoder.finish().unwrap()
    }

    fn reference() -> Reference {
        Reference {
            store_id: "store".to_owned(),
            snapshot_id: uuid::Uuid::from_bytes([7; 16]),
            size_bytes: 4096,
            mac: Some("07".repeat(32).parse().unwrap()),
        }
    }

    #[test]
    fn a_reference_is_found_in_each_form_of_its_own_blob() {
        let reference = reference();
        let tar = reference.to_archive();
        let diff_id = Digest::of(&tar).to_string();
        for form in [Form::Tar, Form::Gzip, Form::Zstd] {
            let found = reference_in(packed(form, &tar), &diff_id).unwrap();
            assert_eq!(found.as_ref(), Some(&reference), "{form:?}");
            let other = Digest::of(b"other").to_string();
            let error = reference_in(packed(form, &tar), &other).unwrap_err();
            assert!(error.contains(&diff_id), "{form:?}: {error}");
        }
        let mut newer = tar.clone();
        newer[512..527].copy_from_slice(b"{\"slackwater\":9");
        let error = reference_in(newer, &diff_id).unwrap_err();
        assert!(error.contains("version 9"), "{error}");
    }

    #[test]
    fn what_is_no_reference_is_none() {
        let cut = packed(Form::Gzip, &[0; 4096]);
        // Its member is that of a reference, and is not alone.
        let member = reference().to_archive()[..1024].to_vec();
        let with_another = [member.clone(), member, vec![0; 1024]].concat();
        let long = vec![0; usize::try_from(BLOB_BYTES_MAX).unwrap() + 512];
        for blob in [
            vec![],
            b"no tar".repeat(100),
            vec![0; 1024],
            packed(Form::Gzip, &long),
            cut[..cut.len() / 2].to_vec(),
            with_another,
        ] {
            let diff_id = Digest::of(&blob).to_string();
            assert_eq!(reference_in(blob, &diff_id), Ok(None));
        }
    }
}

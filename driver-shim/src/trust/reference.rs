//! References in layers.
//!
//! A reference is a few bytes in a layer, and what runs in a container or in a step of a build can
//! write them with any id. So two things are asked for:
//!
//! ```text
//!  its MAC is the appliance's          who wrote it has read a reference of the appliance, or had its token
//!
//!  the snapshot is published           someone with the appliance's token gave it to others
//!  or this worker has just written it  `docker commit` and builds read a layer's tar and unpack
//!                                      it again at once
//! ```
//!
//! References of release 0.2 have no MAC. A setting takes them; all who know the id of a published
//! snapshot can then name it.

use slackwater_archive::Reference;
use slackwater_client::types::SnapshotId;

use super::{Trust, TrustError};

/// The snapshot that a reference names.
pub(crate) fn snapshot_of(reference: &Reference) -> SnapshotId {
    SnapshotId::from_bytes(*reference.snapshot_id.as_bytes())
}

/// Whether something names this worker's appliance.
///
/// # Errors
/// `OtherStore`.
pub(crate) fn verify_store(got: &str, expected: &str) -> Result<(), TrustError> {
    match got == expected {
        true => Ok(()),
        false => Err(TrustError::OtherStore { got: got.to_owned(), expected: expected.to_owned() }),
    }
}

impl Trust {
    /// What can be verified before the appliance is asked.
    ///
    /// # Errors
    /// `OtherStore`, `WithoutMac`.
    pub(crate) fn verify_form(
        &self,
        reference: &Reference,
        store_id: &str,
    ) -> Result<(), TrustError> {
        verify_store(&reference.store_id, store_id)?;
        match reference.mac.is_some() || self.references_without_mac {
            true => Ok(()),
            false => Err(TrustError::WithoutMac { id: snapshot_of(reference) }),
        }
    }
}

/// Whether a reference is the one that the appliance made. One without MAC, where those count, is held against the rest.
///
/// # Errors
/// `Forged`.
pub(crate) fn verify_mac(reference: &Reference, made: Reference) -> Result<(), TrustError> {
    match *reference == (Reference { mac: reference.mac.and(made.mac), ..made }) {
        true => Ok(()),
        false => Err(TrustError::Forged { id: snapshot_of(reference) }),
    }
}

/// Whether those who have a reference to a snapshot may have it: it is published. To a worker that has just written
/// the reference this is as good.
///
/// # Errors
/// `NotPublished`.
pub(crate) fn verify_published(id: SnapshotId, is_published: bool) -> Result<(), TrustError> {
    match is_published {
        true => Ok(()),
        false => Err(TrustError::NotPublished { id }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(mac: Option<u8>) -> Reference {
        Reference {
            store_id: "store".to_owned(),
            snapshot_id: uuid::Uuid::from_bytes([7; 16]),
            size_bytes: 4096,
            mac: mac.map(|byte| format!("{byte:02x}").repeat(32).parse().unwrap()),
        }
    }

    #[test]
    fn a_reference_is_the_one_that_the_appliance_made() {
        let forged = || Err(TrustError::Forged { id: SnapshotId::from_bytes([7; 16]) });
        assert_eq!(verify_mac(&reference(Some(1)), reference(Some(1))), Ok(()));
        assert_eq!(verify_mac(&reference(Some(2)), reference(Some(1))), forged());
        assert_eq!(verify_mac(&reference(None), reference(Some(1))), Ok(()));
        for mac in [None, Some(1)] {
            let larger = Reference { size_bytes: 8192, ..reference(mac) };
            assert_eq!(verify_mac(&larger, reference(Some(1))), forged());
        }
    }

    #[test]
    fn its_snapshot_has_to_be_published() {
        let id = SnapshotId::from_bytes([7; 16]);
        assert_eq!(verify_published(id, true), Ok(()));
        assert_eq!(verify_published(id, false), Err(TrustError::NotPublished { id }));
    }

    #[test]
    fn its_form_is_verified_before_the_appliance_is_asked() {
        let trust = Trust::default();
        assert_eq!(trust.verify_form(&reference(Some(1)), "store"), Ok(()));
        let (got, expected) = ("store".to_owned(), "other".to_owned());
        let other = Err(TrustError::OtherStore { got, expected });
        assert_eq!(trust.verify_form(&reference(Some(1)), "other"), other);
        let id = SnapshotId::from_bytes([7; 16]);
        assert_eq!(
            trust.verify_form(&reference(None), "store"),
            Err(TrustError::WithoutMac { id })
        );
        let lenient = Trust { references_without_mac: true, ..Trust::default() };
        assert_eq!(lenient.verify_form(&reference(None), "store"), Ok(()));
    }
}

//! The annotation of a layer that says where the layer is. The image's author wrote it.

use slackwater_client::types::{ChainId, Snapshot, SnapshotId};

use super::{Trust, TrustError};

/// Its name: `STORE/SNAPSHOT/SIZE` is its value. containerd hands it down as a label, because of its prefix.
pub(crate) const NAME: &str = "containerd.io/snapshot/slackwater";

/// Where a layer is said to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) store_id: String,
    pub(crate) snapshot: SnapshotId,
    pub(crate) size_bytes: u64,
}

impl Located {
    /// Reads `STORE/SNAPSHOT/SIZE`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let (store_id, snapshot, size) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() || store_id.is_empty() {
            return None;
        }
        Some(Self {
            store_id: store_id.to_owned(),
            snapshot: snapshot.parse().ok()?,
            size_bytes: size.parse().ok()?,
        })
    }
}

impl Trust {
    /// Whether a layer is what an annotation says that it is, on this appliance: `snapshot` is what the appliance says
    /// of the one that it names. It has to be published as well.
    ///
    /// # Errors
    /// `NotThisChain`, `OtherSize`.
    pub(crate) fn verify_annotation(
        &self,
        located: &Located,
        chain: &ChainId,
        snapshot: &Snapshot,
    ) -> Result<(), TrustError> {
        let id = located.snapshot;
        if !self.is_chain_or_labelled(snapshot, chain) {
            return Err(TrustError::NotThisChain { id, chain: chain.clone() });
        }
        let (got, expected) = (located.size_bytes, snapshot.size_bytes);
        match got == expected {
            true => Ok(()),
            false => Err(TrustError::OtherSize { id, got, expected }),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use slackwater_client::types::{DeletionPolicy, Labels, Timestamp};

    use super::*;
    use crate::trust::TrustedMakers;

    #[test]
    fn located() {
        let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
        let good = Located::parse(&format!("store/{id}/4096")).unwrap();
        assert_eq!((good.store_id.as_str(), good.size_bytes), ("store", 4096));
        assert_eq!(good.snapshot.to_string(), id);
        for bad in [
            String::new(),
            format!("store/{id}"),
            format!("/{id}/1"),
            format!("store/{id}/1/2"),
            format!("store/{id}/-1"),
            "store/../1".to_owned(),
        ] {
            assert_eq!(Located::parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn a_layer_is_where_it_was_registered() {
        let (trust, size_bytes) = (Trust::default(), 4096);
        let [chain, other]: [ChainId; 2] = ['1', '2']
            .map(|digit| format!("sha256:{}", digit.to_string().repeat(64)).parse().unwrap());
        let id = SnapshotId::from_bytes([7; 16]);
        let located = Located { store_id: "store".to_owned(), snapshot: id, size_bytes };
        let registered = Snapshot {
            chains: [(chain.clone(), ["node".to_owned()].into())].into(),
            ..snapshot(id, size_bytes)
        };
        assert_eq!(trust.verify_annotation(&located, &chain, &registered), Ok(()));
        let larger = Located { size_bytes: 8192, ..located.clone() };
        let size = TrustError::OtherSize { id, got: 8192, expected: 4096 };
        assert_eq!(trust.verify_annotation(&larger, &chain, &registered), Err(size));
        let no_chain = |chain: &ChainId| Err(TrustError::NotThisChain { id, chain: chain.clone() });
        assert_eq!(trust.verify_annotation(&located, &other, &registered), no_chain(&other));
        let makers = TrustedMakers::Named(["builder".to_owned()].into());
        let wary = Trust { makers, ..Trust::default() };
        assert_eq!(wary.verify_annotation(&located, &chain, &registered), no_chain(&chain));
        // As release 0.2 said it.
        let labels = [("slackwater.chain".to_owned(), chain.to_string())].into();
        let labelled = Snapshot { labels, ..snapshot(id, size_bytes) };
        assert_eq!(trust.verify_annotation(&located, &chain, &labelled), no_chain(&chain));
        let lenient = Trust { references_without_mac: true, ..Trust::default() };
        assert_eq!(lenient.verify_annotation(&located, &chain, &labelled), Ok(()));
    }

    pub(in crate::trust) fn snapshot(id: SnapshotId, size_bytes: u64) -> Snapshot {
        Snapshot {
            id,
            path: "disk".to_owned(),
            name: None,
            labels: Labels::new(),
            chains: BTreeMap::new(),
            restricted_chains: BTreeMap::new(),
            publishers: BTreeSet::new(),
            images: std::collections::BTreeMap::new(),
            published_at: None,
            size_bytes,
            used_bytes: 0,
            created_at: Timestamp::from_nanos(0),
            clone_count: 1,
            deletion_policy: DeletionPolicy::Keep,
            expires_at: None,
        }
    }
}

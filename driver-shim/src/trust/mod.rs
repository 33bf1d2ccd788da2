//! Decides which input of images, registries, containers and other workers to trust: every input that one of them can
//! write, and that changes which content a layer has.
//!
//! ```text
//!  input                           who can write it             what it decides
//!  ---------------------------------------------------------------------------------------------------
//!  key `extract-RANDOM CHAIN`      the engine's unpacker        that a layer is being unpacked: it may be adopted,
//!                                                               a reference in it counts, and if containerd
//!                                                               unpacks, which compares, it is registered
//!  label containerd.io/            the unpacker; who starts     beside such a key, that "already exists" is
//!    snapshot.ref                  a pod; an image's author     understood; and that no root is shared
//!  label .../slackwater.shared     who starts a container;      a container's root; of a layer nothing
//!                                  an image's author
//!  annotation .../slackwater       an image's author            where a layer is, if that is registered as it
//!                                                               and published
//!  member with a reference         an image's author, what      which snapshot a layer is, if its MAC is the
//!                                  runs in a container          appliance's (or insecure-references-without-mac is
//!                                                               on), and it is published or this worker has just
//!                                                               written it
//!  labels of Commit                the same                     whether an unpacker finds a layer that is recorded as
//!                                                               its chain
//!  labels of a parent              the same                     nothing
//!  name of a committed snapshot    who works in its namespace   there, what `image convert` takes for a layer;
//!                                                               elsewhere nothing
//!  hashes in a configuration       an image's author            which layers an image is given that are registered,
//!                                                               or on this worker; with private-layers only in the
//!                                                               namespace that unpacked them; those of a registry that
//!                                                               private-registries lists, if it lets this worker read
//!                                                               the blob
//!  namespace of a key              who calls containerd         whether such a layer is taken for its hashes, or only with
//!                                                               its blob (layers-without-blobs)
//!  blob in the content store       an image's author            that it is the layer that is wanted, once its tar is
//!                                                               hashed; as a member with a reference, which snapshot
//!                                                               `image` commands take; its media type nothing
//!  labels .../cri.image-ref and    the client that pulls; an    from which registry a layer was unpacked: whether it
//!    .../cri.layer-digest          image's author where that    is for all, for those who may read the blob, or for
//!                                  says nothing                 this worker
//!  blobs of a chain                who may register, by a call  which registry is asked, if it is listed
//!  chain of a snapshot             who has a token, by a call   what it holds, for those who trust the maker
//!                                  that records the maker
//!  names, other labels of a        who has a token              nothing; `slackwater.chain`, with
//!    snapshot                                                   insecure-references-without-mac, that it is a chain
//! ```
//! The functions take the input and the facts to compare it with, and make no calls. Their callers collect the facts:
//! `containerd/remote.rs` whether a disk holds a reference and nothing else, `containerd/apply.rs` and
//! `image/reference.rs` what a blob is, `worker/references.rs` which references this worker has just written, `registry/` what registries answer. An empty
//! disk, which is taken by its name, is compared (`worker/empty_disk.rs`), and files that tars and disks hold are the
//! concern of the crates `archive` and `attach`.

pub(crate) mod annotation;
mod error;
pub(crate) mod reference;
pub(crate) mod sharing;
pub(crate) mod unpacking;

use std::collections::BTreeSet;

use slackwater_client::types::{ChainId, Labels, Snapshot};

pub use self::error::TrustError;
pub use self::sharing::{PrivateRegistry, PrivateRegistryParseError};

/// Names the chain of an image by reference, as release 0.2 said it on a snapshot of the appliance: a label, by
/// itself or followed by a dot and more. All who know the ids of an image's snapshots can tell its chain ids then,
/// as references had no MAC.
const PROOF_WITHOUT_MAC: &str = "slackwater.chain";

/// Which references, and whose chains, a worker takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// Whether references and chains count as release 0.2 wrote them.
    pub references_without_mac: bool,
    /// Whose registrations of chains are trusted.
    pub makers: TrustedMakers,
    /// Whether layers that this worker unpacked are for its own containers alone.
    pub private_layers: bool,
    /// The registries whose layers are for those who may pull them.
    pub private_registries: Vec<PrivateRegistry>,
}

/// Whose registrations of chains are trusted, by the names of their tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrustedMakers {
    /// Those of all who may register.
    #[default]
    All,
    /// Those of these alone.
    Named(BTreeSet<String>),
}

impl TrustedMakers {
    fn have(&self, maker: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.contains(maker),
        }
    }
}

impl Trust {
    /// Whether all that this worker unpacks is for all.
    #[must_use]
    pub fn shares_all(&self) -> bool {
        !self.private_layers && self.private_registries.is_empty()
    }

    /// Whether a snapshot was registered as a chain by a maker that is trusted.
    #[must_use]
    pub fn is_chain(&self, snapshot: &Snapshot, chain: &ChainId) -> bool {
        let makers = snapshot.chains.get(chain);
        makers.is_some_and(|makers| makers.iter().any(|maker| self.makers.have(maker)))
    }

    /// The same, or labelled as that chain by release 0.2, where `references_without_mac` takes that.
    fn is_chain_or_labelled(&self, snapshot: &Snapshot, chain: &ChainId) -> bool {
        self.is_chain(snapshot, chain)
            || self.references_without_mac && is_labelled_without_mac(&snapshot.labels, chain)
    }
}

/// Whether release 0.2 labelled a snapshot of the appliance as the content of the chain.
fn is_labelled_without_mac(labels: &Labels, chain: &ChainId) -> bool {
    let is_proof = |name: &str| {
        let rest = name.strip_prefix(PROOF_WITHOUT_MAC);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    labels.iter().any(|(name, value)| is_proof(name) && value == chain.as_str())
}

#[cfg(test)]
mod tests {
    use slackwater_client::types::SnapshotId;

    use super::*;

    #[test]
    fn the_makers_that_are_named_are_trusted() {
        let named = |names: &[&str]| {
            TrustedMakers::Named(names.iter().map(|name| (*name).to_owned()).collect())
        };
        assert!(TrustedMakers::All.have("node") && TrustedMakers::All.have(""));
        assert!(named(&["node", "builder"]).have("node"));
        for other in ["", "nod", "node2", "Node"] {
            assert!(!named(&["node"]).have(other), "{other}");
        }
        assert!(!named(&[]).have("") && named(&[""]).have(""));
    }

    #[test]
    fn a_chain_is_what_a_trusted_maker_registered() {
        let chain: ChainId = format!("sha256:{}", "1".repeat(64)).parse().unwrap();
        let snapshot = annotation::tests::snapshot(SnapshotId::from_bytes([7; 16]), 4096);
        let makers = ["a".to_owned(), "b".to_owned()].into();
        let registered = Snapshot { chains: [(chain.clone(), makers)].into(), ..snapshot.clone() };
        let named = |name: &str| Trust {
            makers: TrustedMakers::Named([name.to_owned()].into()),
            ..Trust::default()
        };
        assert!(!Trust::default().is_chain(&snapshot, &chain));
        assert!(Trust::default().is_chain(&registered, &chain));
        assert!(
            named("b").is_chain(&registered, &chain) && !named("c").is_chain(&registered, &chain)
        );
    }

    #[test]
    fn only_that_label_is_of_release_0_2() {
        let digest = |digit: char| format!("sha256:{}", digit.to_string().repeat(64));
        let one: ChainId = digest('1').parse().unwrap();
        let labels = |name: &str, value: String| Labels::from([(name.to_owned(), value)]);
        for (name, expected) in [
            ("slackwater.chain", true),
            ("slackwater.chain.1111", true),
            ("slackwater.chains", false),
            ("slackwater.image-chain", false),
            ("note", false),
        ] {
            assert_eq!(
                is_labelled_without_mac(&labels(name, digest('1')), &one),
                expected,
                "{name}"
            );
            assert!(!is_labelled_without_mac(&labels(name, digest('2')), &one), "{name}");
        }
    }
}

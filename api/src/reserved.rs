//! What the appliance itself writes into the names and labels of snapshots, and no call sets as it likes.
//!
//! ```text
//! name   slackwater:chain:CHAIN:SIZE           the snapshot that workers with disks of that size take for the chain
//! label  slackwater:chain:CHAIN  =  MAKERS     the snapshot is that chain, say these: names of tokens, which hold no
//!                                              space, with one in between; empty where none is asked for
//! ```
//! Workers take layers from each other by these. So they are made by calls of their own (`routes/chains.rs`), which
//! record who made them; the others refuse what begins with `slackwater:`, and neither show such a label among the
//! labels nor take it away.

use std::collections::{BTreeMap, BTreeSet};

use slackwater_blockstore::Labels;

use crate::chain::ChainId;
use crate::failure::Failure;

/// With what the names and labels begin.
const PREFIX: &str = "slackwater:";

const CHAIN: &str = "slackwater:chain:";

/// What parts the names of makers.
const BETWEEN_MAKERS: char = ' ';

/// The name of the snapshot that is registered for a chain and a size of disk.
pub(crate) fn chain_name(chain: &ChainId, size_bytes: u64) -> String {
    format!("{CHAIN}{chain}:{size_bytes}")
}

/// The labels of a snapshot that this maker registers as a chain.
pub(crate) fn with_chain(mut labels: Labels, chain: &ChainId, maker: &str) -> Labels {
    let makers = labels.entry(format!("{CHAIN}{chain}")).or_insert_with(|| maker.to_owned());
    if !makers.split(BETWEEN_MAKERS).any(|other| other == maker) {
        makers.push(BETWEEN_MAKERS);
        makers.push_str(maker);
    }
    labels
}

/// Refuses a name that only a registering call gives.
pub(crate) fn refuse_name(name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some(name) if name.starts_with(PREFIX) => Err(refused("name", name)),
        _ => Ok(()),
    }
}

/// Refuses labels of which one only a registering call sets.
pub(crate) fn refuse_labels(labels: &Labels) -> Result<(), Failure> {
    match labels.keys().find(|label| label.starts_with(PREFIX)) {
        Some(label) => Err(refused("label", label)),
        None => Ok(()),
    }
}

fn refused(what: &str, got: &str) -> Failure {
    let shown: String = got.chars().take(128).collect();
    Failure::invalid(format!(
        "the {what} `{}` begins with `{PREFIX}`, which is for the appliance alone: choose another one; chains are registered by POST /v1/chains",
        shown.escape_debug()
    ))
}

/// Whether the snapshot with these labels is registered as a chain.
pub(crate) fn is_registered(labels: &Labels) -> bool {
    labels.keys().any(|label| label.starts_with(CHAIN))
}

/// Parts the labels of a snapshot into those that callers set, and the chains with their makers.
pub(crate) fn part(labels: Labels) -> (Labels, BTreeMap<ChainId, BTreeSet<String>>) {
    let mut shown = Labels::new();
    let mut chains = BTreeMap::new();
    for (label, value) in labels {
        if let Some(chain) = label.strip_prefix(CHAIN).and_then(|chain| chain.parse().ok()) {
            chains.insert(chain, value.split(BETWEEN_MAKERS).map(str::to_owned).collect());
        } else if !label.starts_with(PREFIX) {
            shown.insert(label, value);
        }
    }
    (shown, chains)
}

/// The labels of a snapshot after a caller replaced those that he sets.
pub(crate) fn replaced(old: Labels, new: Labels) -> Labels {
    let kept = old.into_iter().filter(|(label, _)| label.starts_with(PREFIX));
    new.into_iter().chain(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_what_begins_so_is_reserved() {
        for free in ["slackwater.worker", "slackwater", "chain:sha256:00", "Slackwater:x", ""] {
            assert!(refuse_name(Some(free)).is_ok(), "{free}");
            assert!(refuse_labels(&labels(&[(free, "x")])).is_ok(), "{free}");
        }
        assert!(refuse_name(None).is_ok());
        for reserved in ["slackwater:", "slackwater:chain:x", "slackwater:else"] {
            assert!(refuse_name(Some(reserved)).is_err(), "{reserved}");
            assert!(refuse_labels(&labels(&[("a", "x"), (reserved, "x")])).is_err(), "{reserved}");
        }
    }

    fn makers(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn reserved_labels_are_shown_apart_and_stay() {
        let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
        let all = with_chain(labels(&[("a", "1"), ("slackwater:later", "x")]), &chain, "node");
        let (shown, chains) = part(all.clone());
        assert_eq!(shown, labels(&[("a", "1")]));
        assert_eq!(chains, BTreeMap::from([(chain.clone(), makers(&["node"]))]));
        let (shown, chains) = part(replaced(all, labels(&[("b", "2")])));
        assert_eq!(shown, labels(&[("b", "2")]));
        assert_eq!(chains.len(), 1);
    }

    #[test]
    fn each_maker_is_there_once() {
        let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
        let told = |names: &[&str]| {
            let add = |labels, name: &&str| with_chain(labels, &chain, name);
            part(names.iter().fold(Labels::new(), add)).1.remove(&chain).unwrap()
        };
        for names in [&[""][..], &["one"], &["", "one"], &["one", "", "on"]] {
            assert_eq!(told(names), makers(names), "{names:?}");
            assert_eq!(told(&[names, names].concat()), makers(names), "{names:?}");
        }
    }
}

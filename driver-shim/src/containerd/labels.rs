//! Labels: those that mean something here, and the bounds of all.

use std::collections::{BTreeMap, HashMap};

use slackwater_client::types::{ChainId, Labels, SnapshotId};

use super::error::CallError;

/// Names the chain id of the layer that Prepare is about: containerd's own label.
pub const CHAIN: &str = "containerd.io/snapshot.ref";

/// `STORE/SNAPSHOT/SIZE`: where the layer is; an annotation of the layer in the manifest, which
/// containerd hands down because of its prefix.
pub const REFERENCE: &str = "containerd.io/snapshot/slackwater";

/// `true` on the snapshot of a container: its root is a read-only mount, shared with all others above
/// the same parent that ask for it. On a layer that is being unpacked it has no effect: there it comes
/// from an annotation, which the image's author wrote.
pub const SHARED: &str = "containerd.io/snapshot/slackwater.shared";

/// A label of a snapshot on the appliance, by itself or followed by a dot and more: its value is the chain id
/// of an image by reference, as release 0.2 said it. Its references have no MAC: all who know the ids of an
/// image's snapshots can tell its chain ids.
const PROOF_WITHOUT_MAC: &str = "slackwater.chain";

/// Most labels of a snapshot. containerd sends about ten.
const COUNT_MAX: usize = 256;

/// Most bytes of one label with its value: containerd's own limit.
const LABEL_BYTES_MAX: usize = 4096;

/// How a snapshot that is being unpacked is called: `extract-RANDOM CHAIN`.
const UNPACK_PREFIX: &str = "extract-";

/// The chain id of the layer that a labelled snapshot is.
pub(super) fn chain(labels: &BTreeMap<String, String>) -> Option<ChainId> {
    labels.get(CHAIN)?.parse().ok()
}

/// The two parts of the key of a snapshot that a layer is being unpacked into.
fn unpack_key(key: &str) -> Option<(&str, ChainId)> {
    let (unpack, chain) = key.rsplit_once(' ')?;
    let random = unpack.rsplit('/').next()?.strip_prefix(UNPACK_PREFIX)?;
    Some((random, chain.parse().ok()?))
}

/// Whether a layer of an image is being unpacked into the snapshot with this key. The unpacker chooses the
/// key. Labels prove nothing: Kubernetes makes labels of a pod's annotations.
pub(super) fn is_unpacking(key: &str) -> bool {
    unpack_key(key).is_some()
}

/// The chain id of the layer that Prepare is about, if the client takes "already exists" for an answer: its
/// unpacker then sends the chain id in a label, too.
pub(super) fn wanted_chain(key: &str, labels: &BTreeMap<String, String>) -> Option<ChainId> {
    let (_, wanted) = unpack_key(key)?;
    chain(labels).filter(|chain| *chain == wanted)
}

/// The chain id of the layer that was unpacked into `key` and is now committed as `name`: both end in it.
/// Only of containerd's unpackers, which compare what they unpacked with the image's diff ids. BuildKit does
/// not; the random part of its keys has another form.
pub(super) fn unpacked_chain(key: &str, name: &str) -> Option<ChainId> {
    let (random, chain) = unpack_key(key)?;
    let is_named = name.rsplit('/').next() == Some(chain.as_str());
    (is_named && is_random_of_containerd(random)).then_some(chain)
}

/// Nanoseconds, a hyphen, and four characters of URL-safe base64.
fn is_random_of_containerd(random: &str) -> bool {
    let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    random.split_once('-').is_some_and(|(nanos, rest)| {
        (1..=9).contains(&nanos.len())
            && nanos.bytes().all(|byte| byte.is_ascii_digit())
            && rest.len() == 4
            && rest.bytes().all(is_base64)
    })
}

/// Whether a snapshot may be for a layer, so that what asks for a shared root may be an annotation of the image.
/// The image can hide neither sign: the unpacker chooses the key, and overwrites an inherited label.
pub(super) fn may_be_of_a_layer(key: &str, labels: &BTreeMap<String, String>) -> bool {
    is_unpacking(key) || labels.contains_key(CHAIN)
}

/// Whether the labels ask for the shared root.
pub(super) fn is_shared(labels: &BTreeMap<String, String>) -> bool {
    labels.get(SHARED).is_some_and(|value| value == "true")
}

/// Whether release 0.2 labelled a snapshot of the appliance as the content of the chain.
pub(super) fn prove_without_mac(labels: &Labels, chain: &ChainId) -> bool {
    let is_proof = |name: &str| {
        let rest = name.strip_prefix(PROOF_WITHOUT_MAC);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    labels.iter().any(|(name, value)| is_proof(name) && value == chain.as_str())
}

/// Where a layer is said to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Located {
    pub store_id: String,
    pub snapshot: SnapshotId,
    pub size_bytes: u64,
}

impl Located {
    /// Reads `STORE/SNAPSHOT/SIZE`.
    pub(super) fn parse(text: &str) -> Option<Self> {
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

/// The labels as they are kept: within their bounds, and without empty ones, which mean "none".
pub(super) fn checked(
    labels: HashMap<String, String>,
) -> Result<BTreeMap<String, String>, CallError> {
    if labels.len() > COUNT_MAX {
        return Err(CallError::LabelCount { got: labels.len(), limit: COUNT_MAX });
    }
    for (name, value) in &labels {
        let got = name.len() + value.len();
        if got > LABEL_BYTES_MAX {
            let label = name.chars().take(64).collect();
            return Err(CallError::LabelSize { label, got, limit: LABEL_BYTES_MAX });
        }
    }
    Ok(labels.into_iter().filter(|(_, value)| !value.is_empty()).collect())
}

/// The labels after an Update with these field paths.
pub(super) fn updated(
    old: &BTreeMap<String, String>,
    new: HashMap<String, String>,
    paths: &[String],
) -> Result<BTreeMap<String, String>, CallError> {
    let mut new = new;
    if paths.is_empty() {
        return checked(new);
    }
    let mut labels: HashMap<String, String> = old.clone().into_iter().collect();
    for path in paths {
        if path == "labels" {
            labels.clone_from(&new);
        } else if let Some(name) = path.strip_prefix("labels.") {
            labels.insert(name.to_owned(), new.remove(name).unwrap_or_default());
        } else {
            return Err(CallError::Field { field: path.chars().take(128).collect() });
        }
    }
    checked(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain_text(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    fn map<M: FromIterator<(String, String)>>(pairs: &[(&str, &str)]) -> M {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_label_is_a_chain_id_or_says_nothing() {
        assert_eq!(chain(&map(&[(CHAIN, "bad")])), None);
        assert_eq!(chain(&map(&[(CHAIN, &chain_text('1'))])).unwrap().as_str(), chain_text('1'));
    }

    #[test]
    fn an_unpack_is_known_by_its_key_and_a_layer_also_by_the_label() {
        let one = chain_text('1');
        let unlabelled = BTreeMap::new();
        let labelled = map(&[(CHAIN, one.as_str())]);
        let other = map(&[(CHAIN, chain_text('2').as_str())]);
        for key in [format!("default/7/extract-775838128-m-A0 {one}"), format!("extract-x {one}")] {
            assert!(is_unpacking(&key) && may_be_of_a_layer(&key, &unlabelled), "{key}");
            assert_eq!(wanted_chain(&key, &labelled).unwrap().as_str(), one, "{key}");
            assert_eq!(wanted_chain(&key, &unlabelled), None, "{key}");
            assert_eq!(wanted_chain(&key, &other), None, "{key}");
        }
        for key in [
            "default/7/container".to_owned(),
            format!("default/7/{one}"),
            format!("default/7/x extract- {one}"),
            format!("default/extract-1/container {one}"),
            "default/7/extract-775838128-m-A0 sha256:00".to_owned(),
            "default/7/extract-775838128-m-A0".to_owned(),
        ] {
            assert!(!is_unpacking(&key) && !may_be_of_a_layer(&key, &unlabelled), "{key}");
            assert!(may_be_of_a_layer(&key, &labelled), "{key}");
            assert_eq!(wanted_chain(&key, &labelled), None, "{key}");
        }
    }

    #[test]
    fn an_unpacked_layer_is_known_by_its_names() {
        let (one, two) = (chain_text('1'), chain_text('2'));
        let key = format!("default/7/extract-775838128-m-A0 {one}");
        assert_eq!(
            unpacked_chain(&key, &format!("default/8/{one}")).unwrap().as_str(),
            one.as_str()
        );
        assert!(unpacked_chain(&key, &one).is_some());
        assert_eq!(unpacked_chain(&key, &two), None, "another layer");
        for other in ["0-AAAA", "999999999-_-zZ"] {
            assert!(unpacked_chain(&format!("extract-{other} {one}"), &one).is_some(), "{other}");
        }
        // The first is BuildKit's.
        for other in
            ["k2x8hz9rqm4n1v7c0t5w3y6pb", "", "-AAAA", "1-AAA", "1-AAAAA", "1-AA/A", "x-AAAA"]
        {
            assert_eq!(unpacked_chain(&format!("extract-{other} {one}"), &one), None, "{other}");
        }
        assert_eq!(unpacked_chain(&format!("default/7/build {one}"), &one), None);
        assert_eq!(unpacked_chain("default/7/extract-1 x", "default/8/x"), None);
        assert_eq!(unpacked_chain(&one, &one), None);
    }

    #[test]
    fn only_that_label_is_the_word_of_release_0_2() {
        let one: ChainId = chain_text('1').parse().unwrap();
        for (name, expected) in [
            ("slackwater.chain", true),
            ("slackwater.chain.1111", true),
            ("slackwater.chains", false),
            ("slackwater.image-chain", false),
            ("note", false),
        ] {
            assert_eq!(prove_without_mac(&map(&[(name, one.as_str())]), &one), expected, "{name}");
            assert!(!prove_without_mac(&map(&[(name, &chain_text('2'))]), &one), "{name}");
        }
    }

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
    fn labels_are_bounded() {
        let many = (0..257).map(|index| (index.to_string(), "x".to_owned())).collect();
        assert!(matches!(checked(many), Err(CallError::LabelCount { got: 257, limit: 256 })));
        let large = map(&[("name", &"x".repeat(4093))]);
        assert!(matches!(checked(large), Err(CallError::LabelSize { got: 4097, .. })));
        let largest: HashMap<_, _> = map(&[("name", &"x".repeat(4092)), ("empty", "")]);
        assert_eq!(checked(largest).unwrap().len(), 1);
    }

    #[test]
    fn update_changes_what_its_paths_name() {
        let old: BTreeMap<_, _> = map(&[("a", "1"), ("b.c", "2")]);
        let paths =
            |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
        let run = |new: &[(&str, &str)], names: &[&str]| updated(&old, map(new), &paths(names));
        assert_eq!(run(&[("z", "9")], &[]).unwrap(), map(&[("z", "9")]));
        assert_eq!(run(&[("z", "9")], &["labels"]).unwrap(), map(&[("z", "9")]));
        assert_eq!(
            run(&[("b.c", "3"), ("z", "9")], &["labels.b.c"]).unwrap(),
            map(&[("a", "1"), ("b.c", "3")])
        );
        assert_eq!(run(&[], &["labels.a"]).unwrap(), map(&[("b.c", "2")]));
        assert!(matches!(run(&[], &["labels.a", "kind"]), Err(CallError::Field { .. })));
        assert!(matches!(run(&[], &["labels2"]), Err(CallError::Field { .. })));
    }
}

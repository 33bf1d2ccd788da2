//! Which snapshots of containerd are layers, by keys and labels.

use std::collections::BTreeMap;

use slackwater_client::types::ChainId;

/// Names the chain id of the layer that Prepare is about: containerd's own label.
const CHAIN: &str = "containerd.io/snapshot.ref";

/// `true` on the snapshot of a container: its root is a read-only mount, shared with all others above
/// the same parent that ask for it.
pub(crate) const SHARED: &str = "containerd.io/snapshot/slackwater.shared";

/// How a snapshot that is being unpacked is called: `extract-RANDOM CHAIN`.
const UNPACK_PREFIX: &str = "extract-";

/// The chain id that a label names.
fn chain(labels: &BTreeMap<String, String>) -> Option<ChainId> {
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
pub(crate) fn is_unpacking(key: &str) -> bool {
    unpack_key(key).is_some()
}

/// The chain id of the layer that Prepare is about, if the client takes "already exists" for an answer: its
/// unpacker then sends the chain id in a label, too.
pub(crate) fn wanted_chain(key: &str, labels: &BTreeMap<String, String>) -> Option<ChainId> {
    let (_, wanted) = unpack_key(key)?;
    chain(labels).filter(|chain| *chain == wanted)
}

/// The chain id of the layer that one of containerd's unpackers unpacks into the snapshot with this key, for a client
/// that has its blob.
pub(crate) fn unpacked_into(key: &str) -> Option<ChainId> {
    let (random, chain) = unpack_key(key)?;
    is_random_of_containerd(random).then_some(chain)
}

/// What a layer was unpacked above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Below {
    Nothing,
    /// A snapshot that is recorded as its chain.
    Chain,
    /// Another one: that of a stopped container, or what was unpacked above such a one.
    Other,
}

/// The chain id of the layer that was unpacked into `key` and is now committed as `name`: both end in it.
/// Only of containerd's unpackers, which compare what they unpacked with the image's diff ids. BuildKit does
/// not; the random part of its keys has another form. And only above nothing, or above a chain.
pub(crate) fn unpacked_chain(key: &str, name: &str, below: Below) -> Option<ChainId> {
    let (random, chain) = unpack_key(key)?;
    let is_named = name.rsplit('/').next() == Some(chain.as_str());
    let is_whole = below != Below::Other;
    (is_whole && is_named && is_random_of_containerd(random)).then_some(chain)
}

/// Whether a committed snapshot of this worker is a layer that an unpacker wants: it is recorded as that chain. Its
/// label is what the unpacker looks for; alone it says nothing.
pub(crate) fn is_wanted(
    recorded: Option<&str>,
    labels: &BTreeMap<String, String>,
    wanted: &ChainId,
) -> bool {
    recorded == Some(wanted.as_str()) && chain(labels).as_ref() == Some(wanted)
}

/// Whether a committed snapshot may be a layer for the namespace of containerd that a key begins with; one that is not
/// for all, only in its own. Snapshots that were unpacked on this worker begin with their namespace. Those that were
/// adopted begin with a chain id: they are for this worker, so every namespace may have them.
pub(crate) fn is_visible_to(name: &str, key: &str, is_private: bool) -> bool {
    !is_private || name.starts_with("sha256:") || namespace(name) == namespace(key)
}

/// The namespace of containerd that a key begins with.
pub(crate) fn namespace(key: &str) -> Option<&str> {
    key.split_once('/').map(|(namespace, _)| namespace)
}

/// Whether a committed snapshot is the layer `wanted` for an image by reference that is made in some namespace of
/// containerd: `has_its_name` there, so that containerd itself takes it for the layer, or it is recorded as that chain.
/// Clients choose the names in their namespaces, so a name in another one proves nothing.
pub(crate) fn is_of_image(recorded: Option<&str>, has_its_name: bool, wanted: &str) -> bool {
    has_its_name || recorded == Some(wanted)
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

/// What a snapshot that is prepared gets for its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Root {
    /// A disk of its own, mounted for writing.
    Own,
    /// The mount of its parent, for reading.
    Shared,
    /// A disk of its own, though the shared root is asked for: it may be for a layer, so the label may be an annotation
    /// of the image.
    SharedRefused,
}

/// The root that key and labels ask for. An image can hide neither sign of a layer: the unpacker chooses the key, and
/// overwrites an inherited label. A parent's labels do not come into it: they were annotations of an image, maybe
/// of another one with the same layer.
pub(crate) fn root(key: &str, labels: &BTreeMap<String, String>) -> Root {
    if labels.get(SHARED).is_none_or(|value| value != "true") {
        return Root::Own;
    }
    match may_be_layer(key, labels) {
        true => Root::SharedRefused,
        false => Root::Shared,
    }
}

/// Whether what is prepared may be a layer, whose labels may be annotations of its image. An image can hide neither sign.
pub(crate) fn may_be_layer(key: &str, labels: &BTreeMap<String, String>) -> bool {
    is_unpacking(key) || labels.contains_key(CHAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain_text(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
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
        let shared = map(&[(SHARED, "true")]);
        let labelled = map(&[(CHAIN, one.as_str())]);
        let other = map(&[(CHAIN, chain_text('2').as_str())]);
        for key in [format!("default/7/extract-775838128-m-A0 {one}"), format!("extract-x {one}")] {
            assert!(is_unpacking(&key), "{key}");
            assert_eq!(root(&key, &shared), Root::SharedRefused, "{key}");
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
            assert!(!is_unpacking(&key), "{key}");
            assert_eq!(root(&key, &shared), Root::Shared, "{key}");
            let labelled_too = map(&[(SHARED, "true"), (CHAIN, "")]);
            assert_eq!(root(&key, &labelled_too), Root::SharedRefused, "{key}");
            assert_eq!(root(&key, &map(&[(SHARED, "false")])), Root::Own, "{key}");
            assert_eq!(wanted_chain(&key, &labelled), None, "{key}");
        }
    }

    #[test]
    fn an_unpacked_layer_is_known_by_its_names() {
        let (one, two) = (chain_text('1'), chain_text('2'));
        let key = format!("default/7/extract-775838128-m-A0 {one}");
        let unpacked_chain = |key: &str, name: &str| unpacked_chain(key, name, Below::Nothing);
        assert_eq!(
            unpacked_chain(&key, &format!("default/8/{one}")).unwrap().as_str(),
            one.as_str()
        );
        assert!(unpacked_chain(&key, &one).is_some());
        assert!(super::unpacked_chain(&key, &one, Below::Chain).is_some());
        assert_eq!(super::unpacked_chain(&key, &one, Below::Other), None);
        assert_eq!(unpacked_chain(&key, &two), None, "another layer");
        assert_eq!(unpacked_into(&key).unwrap().as_str(), one);
        let other = format!("default/7/extract-k2x8hz9rqm4n1v7c0t5w3y6pb {one}");
        assert_eq!((unpacked_into(&other), unpacked_into(&one)), (None, None));
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
    fn private_layers_stay_in_their_namespace() {
        let (one, key) = (chain_text('1'), format!("a/9/extract-1-AAAA {}", chain_text('1')));
        for (name, expected) in [
            (format!("a/7/{one}"), true),
            (format!("b/7/{one}"), false),
            (format!("ab/7/{one}"), false),
            (one.clone(), true),
            (format!("{one} above b/7/x"), true),
        ] {
            assert_eq!(is_visible_to(&name, &key, true), expected, "{name}");
            assert!(is_visible_to(&name, &key, false), "{name}");
        }
    }

    #[test]
    fn what_is_recorded_decides_and_not_names_and_labels() {
        let (one, two) = (chain_text('1'), chain_text('2'));
        let wanted: ChainId = one.parse().unwrap();
        let labelled = map(&[(CHAIN, one.as_str())]);
        assert!(is_wanted(Some(&one), &labelled, &wanted));
        assert!(!is_wanted(None, &labelled, &wanted) && !is_wanted(Some(&two), &labelled, &wanted));
        assert!(!is_wanted(Some(&one), &BTreeMap::new(), &wanted), "the client would not find it");
        assert!(is_of_image(Some(&one), false, &one) && is_of_image(None, true, &one));
        assert!(!is_of_image(None, false, &one) && !is_of_image(Some(&two), false, &one));
    }
}

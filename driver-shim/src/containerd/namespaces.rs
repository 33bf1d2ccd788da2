//! Namespaces of containerd, of a setting.

use std::collections::BTreeSet;

use crate::trust::unpacking;
use crate::worker::Key;

/// Stands for all.
const ALL: &str = "*";

/// Some of containerd's namespaces, or all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces(BTreeSet<String>);

impl Namespaces {
    /// Those of these names, of which `*` stands for all; `None` if one is no name
    /// (containerd, `pkg/identifiers`).
    #[must_use]
    pub fn named(names: &[String]) -> Option<Self> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_name = |name: &String| !name.is_empty() && name.bytes().all(is_allowed);
        let are_names = names.iter().all(|name| name == ALL || is_name(name));
        are_names.then(|| Self(names.iter().cloned().collect()))
    }

    /// Whether the snapshot with this key is in one of them.
    pub(super) fn have(&self, key: &Key) -> bool {
        let namespace = unpacking::namespace(&key.name);
        self.0.contains(ALL) || namespace.is_some_and(|namespace| self.0.contains(namespace))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Option<Namespaces> {
        Namespaces::named(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn keys_begin_with_their_namespace() {
        let has = |names: &[&str], key: &str| named(names).unwrap().have(&Key::containerd(key));
        assert!(has(&["k8s.io", "a"], "k8s.io/7/extract-1-AAAA x") && has(&["*"], "moby/1/x"));
        for key in ["moby/7/x", "k8s.iox/7/x", "k8s.io", "x/k8s.io/7"] {
            assert!(!has(&["k8s.io"], key) && !has(&[], key), "{key}");
        }
    }

    #[test]
    fn names_are_those_that_containerd_takes() {
        for bad in ["", "a b", "a/b", "**"] {
            assert_eq!(named(&["k8s.io", bad]), None, "{bad}");
        }
        assert!(named(&[]).is_some());
    }
}

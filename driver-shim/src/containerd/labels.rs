//! Labels as they are kept: their bounds, and what Update changes.

use std::collections::{BTreeMap, HashMap};

use super::error::CallError;

/// Most labels of a snapshot. containerd sends about ten.
const COUNT_MAX: usize = 256;

/// Most bytes of one label with its value: containerd's own limit.
const LABEL_BYTES_MAX: usize = 4096;

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

    fn map<M: FromIterator<(String, String)>>(pairs: &[(&str, &str)]) -> M {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
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

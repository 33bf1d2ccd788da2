//! Conditional requests (RFC 9110 section 13): a client that has the bytes does not get them once more.

use axum::http::{HeaderMap, header};

/// Whether the client has the bytes with this entity tag, by its `If-None-Match` (section 13.1.2): any bytes that there
/// are, or those of one of the tags. Tags are compared weakly, as that section wants it.
pub(crate) fn has_already(headers: &HeaderMap, entity_tag: &str) -> bool {
    let values = headers.get_all(header::IF_NONE_MATCH).iter();
    let mut lists = values.filter_map(|value| value.to_str().ok());
    // No tag of ours has a comma in it.
    let is_one_of = |list: &str| {
        list.split(',')
            .map(str::trim)
            .any(|tag| tag.strip_prefix("W/").unwrap_or(tag) == entity_tag)
    };
    lists.any(|list| list.trim() == "*" || is_one_of(list))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(values: &[&str]) -> bool {
        let pairs = values.iter().map(|value| (header::IF_NONE_MATCH, value.parse().unwrap()));
        let mut headers = HeaderMap::new();
        pairs.for_each(|(name, value)| {
            headers.append(name, value);
        });
        has_already(&headers, "\"1-2-3\"")
    }

    #[test]
    fn one_of_the_tags_is_enough() {
        assert!(has(&["\"1-2-3\""]));
        assert!(has(&["W/\"1-2-3\""]));
        assert!(has(&["\"other\",W/\"1-2-3\" , \"more\""]));
        assert!(has(&["\"other\"", "\"1-2-3\""]));
        assert!(has(&["*"]));
        for other in [
            &[][..],
            &[""],
            &["1-2-3"],
            &["\"1-2-3"],
            &["\"1-2-30\""],
            &["w/\"1-2-3\""],
            &["\"a,*,b\""],
        ] {
            assert!(!has(other), "{other:?}");
        }
    }
}

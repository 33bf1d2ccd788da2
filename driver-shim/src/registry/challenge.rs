//! What a registry asks for: the header `WWW-Authenticate` (RFC 9110, section 11.6.1).

/// What has to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// Name and password.
    Basic,
    /// A token of another service.
    Bearer(Bearer),
}

/// Where a token is given, and for what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bearer {
    pub(super) realm: String,
    pub(super) service: Option<String>,
    scope: Option<String>,
}

impl Bearer {
    /// What the token is to be good for.
    pub(super) fn scope_for(&self, repository: &str) -> String {
        let own = || format!("repository:{repository}:pull");
        self.scope.clone().unwrap_or_else(own)
    }
}

impl Challenge {
    /// The one of these headers to answer: a token is asked for by name and password, too, and is good for less.
    pub(super) fn strongest<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        let (mut bearer, mut is_basic) = (None, false);
        for header in headers {
            match Self::parse(header) {
                Some(found @ Self::Bearer(_)) => bearer = bearer.or(Some(found)),
                Some(Self::Basic) => is_basic = true,
                None => {}
            }
        }
        bearer.or(is_basic.then_some(Self::Basic))
    }

    fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut bearer = Bearer::default();
        for (name, value) in parameters(rest) {
            match name.to_ascii_lowercase().as_str() {
                "realm" => bearer.realm = value,
                "service" => bearer.service = Some(value),
                "scope" => bearer.scope = Some(value),
                _ => {}
            }
        }
        (!bearer.realm.is_empty()).then_some(Self::Bearer(bearer))
    }
}

/// `name="value", name=value`: up to where it is no list of parameters any more.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = text.trim_start_matches([' ', ',', '\t']);
    while let Some((name, after)) = rest.split_once('=') {
        let after = after.trim_start();
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => match unquoted(quoted) {
                Some(split) => split,
                None => break,
            },
            None => {
                let end = after.find([',', ' ']).unwrap_or(after.len());
                (after[..end].to_owned(), &after[end..])
            }
        };
        found.push((name.trim().to_owned(), value));
        rest = next.trim_start_matches([' ', ',', '\t']);
    }
    found
}

/// A quoted string, its first quote taken off, and what comes after it.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let (service, scope) = (owned(service), owned(scope));
        Some(Challenge::Bearer(Bearer { realm: realm.to_owned(), service, scope }))
    }

    #[test]
    fn challenges_of_registries_are_read() {
        let hub = "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\",scope=\"repository:a/b:pull,push\"";
        let (service, scope) = (Some("registry.docker.io"), Some("repository:a/b:pull,push"));
        assert_eq!(Challenge::parse(hub), bearer("https://auth.docker.io/token", service, scope));
        for (text, expected) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            ("basic", Some(Challenge::Basic)),
            ("bearer realm=https://a/t, service=s", bearer("https://a/t", Some("s"), None)),
            ("Bearer  Realm = \"a\\\"b\" , error=\"x\"", bearer("a\"b", None, None)),
            ("Bearer service=\"s\"", None),
            ("Bearer realm=\"unfinished", None),
            ("Bearer", None),
            ("Digest realm=\"x\"", None),
            ("", None),
        ] {
            assert_eq!(Challenge::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_token_is_preferred() {
        let strongest = |headers: &[&str]| Challenge::strongest(headers.iter().copied());
        let both = ["Basic realm=\"x\"", "Bearer realm=\"a\"", "Bearer realm=\"b\""];
        assert_eq!(strongest(&both), bearer("a", None, None));
        assert_eq!(strongest(&both[..1]), Some(Challenge::Basic));
        assert_eq!(strongest(&["Digest x"]), None);
    }

    #[test]
    fn a_scope_is_that_of_the_registry_or_to_pull() {
        let mut bearer = Bearer::default();
        assert_eq!(bearer.scope_for("a/b"), "repository:a/b:pull");
        bearer.scope = Some("x".to_owned());
        assert_eq!(bearer.scope_for("a/b"), "x");
    }
}

//! Calls that a page of another site makes a browser send to a server without tokens.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Uri, header};

use crate::error::ProblemCode;
use crate::failure::Failure;

/// Characters of a foreign `Host` that a refusal shows: the longest name of DNS.
const HOST_CHARACTERS_SHOWN: usize = 253;

/// Without tokens only loopback is served, but a browser on this machine can be made to call
/// loopback by a page from anywhere. It says so in two ways that pages cannot change: by the name
/// it called (`Host`, or `:authority` in HTTP/2), which is that of the page if the page had its own
/// name resolved to loopback, and by `Sec-Fetch-Site`, which it leaves out where it called plain
/// HTTP by a name. So the name is always checked; only programs call without one.
pub(crate) fn refuse(uri: &Uri, headers: &HeaderMap) -> Result<(), Failure> {
    let hosts = headers.get_all(header::HOST).iter().map(HeaderValue::as_bytes);
    let called = uri.authority().map(|authority| authority.as_str().as_bytes());
    if let Some(other) = hosts.chain(called).find(|host| !is_loopback_host(host)) {
        let got = String::from_utf8_lossy(other);
        let shown: String = got.chars().take(HOST_CHARACTERS_SHOWN).collect();
        let detail = format!(
            "without tokens this server is called as localhost, 127.0.0.1 or [::1], got `{}`: \
             call it so, or configure a token",
            shown.escape_debug()
        );
        return Err(Failure::new(ProblemCode::Forbidden, detail));
    }
    match headers.get("sec-fetch-site").map(HeaderValue::as_bytes) {
        None | Some(b"same-origin" | b"none") => Ok(()),
        Some(_) => Err(Failure::new(
            ProblemCode::Forbidden,
            "without tokens only pages of this server itself, at a loopback address, may call it",
        )),
    }
}

/// Whether `host`, with or without a port, is a name that no page can have resolved elsewhere.
fn is_loopback_host(host: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(host) else {
        return false;
    };
    let name = authority.host();
    // Nothing else but a port: what follows an address in brackets counts as no part of it.
    let rest = authority.as_str().strip_prefix(name);
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':')) {
        return false;
    }
    let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_tokens(uri: &str, headers: &[(&'static str, &str)]) -> bool {
        let uri = uri.parse().unwrap();
        let headers = headers
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()));
        let headers = HeaderMap::from_iter(headers);
        refuse(&uri, &headers).is_ok()
    }

    #[test]
    fn a_foreign_page_cannot_use_the_open_loopback() {
        let check = |site: &str, host: &str| {
            without_tokens("/v1/files", &[("sec-fetch-site", site), ("host", host)])
        };
        assert!(check("same-origin", "127.0.0.1:8049"));
        assert!(check("same-origin", "[::1]:8049"));
        assert!(check("none", "localhost"));
        assert!(!check("cross-site", "127.0.0.1:8049"));
        assert!(!check("same-origin", "evil.example:8049"));
    }

    #[test]
    fn a_name_that_was_made_to_resolve_to_loopback_is_refused() {
        // A browser sends no `Sec-Fetch-Site` to plain HTTP at a name (DNS rebinding).
        for good in
            ["localhost", "LOCALHOST:8049", "127.9.9.9:1", "[::1]:8049", "[::ffff:127.0.0.1]"]
        {
            assert!(without_tokens("/v1/files", &[("host", good)]), "{good}");
        }
        for bad in [
            "evil.example:8049",
            "evil.example",
            "localhost.evil.example:8049",
            "127.0.0.1.evil.example",
            "10.0.0.1:8049",
            "0.0.0.0:8049",
            "[fe80::1]:8049",
            "[::1]evil.example",
            "",
        ] {
            assert!(!without_tokens("/v1/files", &[("host", bad)]), "{bad}");
        }
        // HTTP/2, and HTTP/1 in its absolute form, whatever `Host` says.
        assert!(without_tokens("http://localhost:8049/v1/files", &[]));
        assert!(!without_tokens("http://evil.example:8049/v1/files", &[]));
        assert!(!without_tokens("http://evil.example:8049/v1/files", &[("host", "localhost")]));
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert!(!without_tokens("/v1/files", &two));
        // A browser always names whom it calls.
        assert!(without_tokens("/v1/files", &[]));
    }
}

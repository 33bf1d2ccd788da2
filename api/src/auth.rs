//! Who may call what.
//!
//! | role      | may call                                                        |
//! |-----------|-----------------------------------------------------------------|
//! | read-only | every `GET`, `/metrics` included                                |
//! | worker    | also all that changes files, snapshots and clones               |
//! | admin     | also `POST /v1/check` and `POST /v1/gc`, which load the machine |
//!
//! `/healthz`, `/readyz`, `/openapi.json` and the empty dashboard page are open: they tell
//! nothing about the data. The VMstore face has its own sessions.
//!
//! Secrets are compared as BLAKE3 hashes in constant time, every token each time, so that the
//! time of an answer tells neither how much of a guess was right nor whose token it resembles.
//! How many guesses an address has is bounded by [`crate::attempts`].

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use crate::crowd::Standing;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::listen::ConnectionInfo;
use crate::options::ApiOptions;
use crate::paths;
use crate::routes::vmstore;
use crate::state::Shared;

/// Characters of a foreign `Host` that a refusal shows: the longest name of DNS.
const HOST_CHARACTERS_SHOWN: usize = 253;

/// What a token allows; each role allows what the ones before it allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Looks, changes nothing.
    ReadOnly,
    /// Works with files, snapshots and clones.
    Worker,
    /// Everything.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::Worker => "worker",
            Self::Admin => "admin",
        })
    }
}

/// The text is not a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role `{}` is not known, expected read-only, worker or admin", got.escape_debug())]
pub struct RoleParseError {
    /// The text.
    pub got: String,
}

impl FromStr for Role {
    type Err = RoleParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "read-only" => Ok(Self::ReadOnly),
            "worker" => Ok(Self::Worker),
            "admin" => Ok(Self::Admin),
            _ => Err(RoleParseError { got: text.to_owned() }),
        }
    }
}

/// A secret, kept as its BLAKE3 hash. Its `Debug` form shows nothing.
#[derive(Clone)]
pub struct Secret([u8; 32]);

/// The text is not a BLAKE3 hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a BLAKE3 hash is written as 64 hexadecimal digits, got {got} characters or others")]
pub struct SecretHashError {
    /// Length of the text.
    pub got: usize,
}

impl Secret {
    /// The secret that is this text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(*blake3::hash(text.as_bytes()).as_bytes())
    }

    /// The secret with this BLAKE3 hash: for configurations that are not to hold secrets.
    ///
    /// # Errors
    /// Anything but 64 hexadecimal digits.
    pub fn from_hash(hexadecimal: &str) -> Result<Self, SecretHashError> {
        blake3::Hash::from_hex(hexadecimal)
            .map(|hash| Self(*hash.as_bytes()))
            .map_err(|_| SecretHashError { got: hexadecimal.len() })
    }

    /// Whether `presented` is the secret, in a time that depends on its length only.
    pub(crate) fn matches(&self, presented: &[u8]) -> Choice {
        self.0.as_slice().ct_eq(blake3::hash(presented).as_bytes().as_slice())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A bearer token that is let in.
#[derive(Clone, Debug)]
pub struct Token {
    /// Whose it is; shown in logs, and kept with what it registers; never secret.
    pub name: String,
    /// What it allows.
    pub role: Role,
    /// What the caller sends as `Authorization: Bearer SECRET`.
    pub secret: Secret,
}

/// Who may log in to the VMstore face.
#[derive(Clone, Debug)]
pub struct VmstoreCredentials {
    /// The user's name.
    pub username: String,
    /// The password.
    pub password: Secret,
}

/// An address that others can reach was to be served without tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{address} can be reached from other machines, but no token is configured: \
     configure a token, or listen on a loopback address"
)]
pub struct TokensRequired {
    /// The address.
    pub address: SocketAddr,
}

/// Without tokens everybody who can connect may delete everything, so only a loopback address
/// may be served then. To be called before the address is bound.
///
/// # Errors
/// An address that is not loopback, and no token.
pub fn require_tokens_for(address: SocketAddr, options: &ApiOptions) -> Result<(), TokensRequired> {
    // An IPv4 address in IPv6 form (::ffff:127.0.0.1) is judged as what it is.
    if options.tokens.is_empty() && !address.ip().to_canonical().is_loopback() {
        return Err(TokensRequired { address });
    }
    Ok(())
}

/// What a route asks of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing.
    Open,
    /// A session of the VMstore face, which that face checks by itself.
    Session,
    /// A token of this role or above.
    Role(Role),
}

/// What the route mounted at `template` asks of callers of `method`.
pub(crate) fn access(method: &Method, template: &str) -> Access {
    match template {
        paths::HEALTHZ | paths::READYZ | paths::OPENAPI | paths::DASHBOARD => Access::Open,
        vmstore::INFO | vmstore::LOGIN | vmstore::LOGOUT => Access::Open,
        paths::CHECK | paths::GC => Access::Role(Role::Admin),
        _ if template.starts_with(vmstore::PREFIX) => Access::Session,
        _ if *method == Method::GET || *method == Method::HEAD => Access::Role(Role::ReadOnly),
        _ => Access::Role(Role::Worker),
    }
}

/// Who sent a request, by the name of the token: the scope of its idempotency keys, and the maker of what it
/// registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller(pub(crate) Arc<str>);

/// Lets a request pass, or answers 401 or 403.
pub(crate) async fn authorize(
    State(state): State<Shared>,
    mut request: Request,
    next: Next,
) -> Response {
    let template = request.extensions().get::<MatchedPath>().cloned();
    let template = template.as_ref().map_or("", MatchedPath::as_str);
    match judged(&state, &request, template) {
        Ok(caller) => {
            let is_open =
                matches!(access(request.method(), template), Access::Open | Access::Session);
            if let Some(standing) = request.extensions().get::<Arc<Standing>>().filter(|_| !is_open)
            {
                standing.make_known();
            }
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// The caller of a request, unless its address has guessed too often.
fn judged(state: &Shared, request: &Request, template: &str) -> Result<Caller, Failure> {
    let (method, headers) = (request.method(), request.headers());
    let judge = || caller(&state.options, method, template, request.uri(), headers);
    let is_guess = !state.options.tokens.is_empty()
        && matches!(access(method, template), Access::Role(_))
        && bearer(headers).is_some();
    let Some(peer) = request.extensions().get::<ConnectionInfo>().filter(|_| is_guess) else {
        return judge();
    };
    let (peer, now) = (peer.peer.ip(), Instant::now());
    state.attempts.admit(peer, now)?;
    judge().inspect_err(|failure| {
        if failure.code() == ProblemCode::Unauthenticated {
            state.attempts.failed(peer, now);
            tracing::warn!(%peer, "a token was refused");
        }
    })
}

fn caller(
    options: &ApiOptions,
    method: &Method,
    template: &str,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Caller, Failure> {
    let anonymous = Caller(Arc::from(""));
    let Access::Role(needed) = access(method, template) else {
        return Ok(anonymous);
    };
    if options.tokens.is_empty() {
        refuse_foreign_pages(uri, headers)?;
        return Ok(anonymous);
    }
    let presented = bearer(headers)
        .ok_or_else(|| Failure::unauthenticated("send the header `Authorization: Bearer TOKEN`"))?;
    let token = find(&options.tokens, presented)
        .ok_or_else(|| Failure::unauthenticated("the token is not known here"))?;
    if token.role < needed {
        let detail =
            format!("token `{}` has role {}, this call needs {needed}", token.name, token.role);
        return Err(Failure::new(ProblemCode::Forbidden, detail));
    }
    Ok(Caller(Arc::from(token.name.as_str())))
}

/// The token with the presented secret. All are compared, whichever matches.
fn find<'a>(tokens: &'a [Token], presented: &[u8]) -> Option<&'a Token> {
    tokens.iter().fold(None, |found, token| {
        if bool::from(token.secret.matches(presented)) { Some(token) } else { found }
    })
}

/// The secret of `Authorization: Bearer SECRET`; the scheme in any case (RFC 9110 section 11.1).
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, secret) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| secret.trim_ascii())
}

/// Without tokens only loopback is served, but a browser on this machine can be made to call
/// loopback by a page from anywhere. It says so in two ways that pages cannot change: by the name
/// it called (`Host`, or `:authority` in HTTP/2), which is that of the page if the page had its own
/// name resolved to loopback, and by `Sec-Fetch-Site`, which it leaves out where it called plain
/// HTTP by a name. So the name is judged always; only programs call without one.
fn refuse_foreign_pages(uri: &Uri, headers: &HeaderMap) -> Result<(), Failure> {
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

    fn options() -> ApiOptions {
        let token = |name: &str, role| Token {
            name: name.to_owned(),
            role,
            secret: Secret::new(&format!("{name}-secret")),
        };
        ApiOptions {
            tokens: vec![
                token("viewer", Role::ReadOnly),
                token("node", Role::Worker),
                token("root", Role::Admin),
            ],
            ..ApiOptions::default()
        }
    }

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn roles_allow_what_the_table_says() {
        let cases = [
            (Method::GET, paths::FILES, [true, true, true]),
            (Method::HEAD, paths::SNAPSHOT_DATA, [true, true, true]),
            (Method::GET, paths::METRICS, [true, true, true]),
            (Method::POST, paths::SNAPSHOTS, [false, true, true]),
            (Method::DELETE, paths::FILE, [false, true, true]),
            (Method::PUT, paths::FILE_DATA, [false, true, true]),
            (Method::POST, paths::CHECK, [false, false, true]),
            (Method::POST, paths::GC, [false, false, true]),
        ];
        for (method, template, allowed) in cases {
            for (name, allowed) in ["viewer", "node", "root"].into_iter().zip(allowed) {
                let headers = with(&format!("bearer {name}-secret"));
                let answer = caller(&options(), &method, template, &Uri::default(), &headers);
                assert_eq!(answer.is_ok(), allowed, "{name} {method} {template}");
            }
        }
    }

    #[test]
    fn wrong_tokens_are_refused_and_open_routes_are_open() {
        for value in ["Bearer x", "Bearer ", "Basic cm9vdDpyb290", "root-secret", "Bearer"] {
            let uri = Uri::default();
            let failure =
                caller(&options(), &Method::GET, paths::FILES, &uri, &with(value)).unwrap_err();
            assert_eq!(failure.code(), ProblemCode::Unauthenticated, "{value}");
        }
        for open in [paths::HEALTHZ, paths::READYZ, paths::OPENAPI, paths::DASHBOARD] {
            let (uri, headers) = (Uri::default(), HeaderMap::new());
            assert!(caller(&options(), &Method::GET, open, &uri, &headers).is_ok());
        }
    }

    #[test]
    fn a_secret_can_be_given_as_its_hash_and_is_never_shown() {
        let hash = blake3::hash(b"abc").to_hex();
        assert!(bool::from(Secret::from_hash(&hash).unwrap().matches(b"abc")));
        assert!(!bool::from(Secret::new("abc").matches(b"abd")));
        assert!(Secret::from_hash("abc").is_err());
        assert_eq!(format!("{:?}", Secret::new("abc")), "Secret(..)");
    }

    #[test]
    fn only_loopback_is_served_without_tokens() {
        let open = ApiOptions::default();
        for good in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(require_tokens_for(good.parse().unwrap(), &open).is_ok(), "{good}");
        }
        for bad in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[::ffff:10.0.0.1]:1"] {
            let address = bad.parse().unwrap();
            assert_eq!(require_tokens_for(address, &open), Err(TokensRequired { address }));
            assert!(require_tokens_for(address, &options()).is_ok());
        }
    }

    fn without_tokens(uri: &str, headers: &[(&'static str, &str)]) -> bool {
        let uri = uri.parse().unwrap();
        let headers = headers
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()));
        let headers = HeaderMap::from_iter(headers);
        caller(&ApiOptions::default(), &Method::POST, paths::FILES, &uri, &headers).is_ok()
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

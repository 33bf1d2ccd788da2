//! A registry on loopback that has blobs and asks for an authorization, and the service that gives tokens for it.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, LOCATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Html, IntoResponse, Response};
use parking_lot::Mutex;
use tokio::net::TcpListener;

/// `me:s3cret` as RFC 7617 has it.
pub const BASIC: &str = "Basic bWU6czNjcmV0";

/// What the service of tokens gives.
const TOKEN: &str = "t0ken";

/// What a registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asks {
    Nothing,
    Basic,
    /// A token of the service at this address; `None`: its own.
    Bearer(Option<String>),
    /// Something that no client knows.
    Digest,
    /// It answers with this status.
    Fails(u16),
    /// It sends to the same path of another address.
    Sends(String),
    /// The same, to those who show a name and password.
    SendsKnown(String),
    /// A page to log in.
    Page,
}

/// One request: method and path, and what it showed.
pub type Seen = (String, Option<String>);

struct Inner {
    host: String,
    asks: Asks,
    /// Paths of blobs below `/v2/`.
    blobs: Vec<String>,
    seen: Mutex<Vec<Seen>>,
}

/// The registry. It serves for as long as the runtime does.
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

impl Registry {
    /// One with these blobs, each `REPOSITORY/blobs/DIGEST`.
    pub async fn start(asks: Asks, blobs: &[String]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let seen = Mutex::default();
        let registry = Self(Arc::new(Inner { host, asks, blobs: blobs.to_vec(), seen }));
        let router = Router::new().fallback(answer).with_state(registry.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        registry
    }

    /// What stands before the name of an image in it.
    pub fn host(&self) -> &str {
        &self.0.host
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.0.seen.lock())
    }

    fn blob(&self, path: &str) -> StatusCode {
        let name = path.strip_prefix("/v2/").unwrap_or_default();
        match self.0.blobs.iter().any(|blob| blob == name) {
            true => StatusCode::OK,
            false => StatusCode::NOT_FOUND,
        }
    }
}

async fn answer(State(registry): State<Registry>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let (method, path) = (head.method.to_string(), head.uri.path().to_owned());
    let shown = |headers: &HeaderMap| {
        headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned())
    };
    let shown = shown(&head.headers);
    registry.0.seen.lock().push((format!("{method} {path}"), shown.clone()));
    if path == "/token" {
        return token(&method, head.uri.query().unwrap_or_default(), shown, &body);
    }
    let refuse = |challenge: String| {
        (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, challenge)]).into_response()
    };
    let sent = |to: &str| {
        (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, format!("{to}{path}"))]).into_response()
    };
    let is_known = shown.as_deref() == Some(BASIC);
    match &registry.0.asks {
        Asks::Nothing => registry.blob(&path).into_response(),
        Asks::Basic if is_known => registry.blob(&path).into_response(),
        Asks::SendsKnown(to) if is_known => sent(to),
        Asks::Basic | Asks::SendsKnown(_) => refuse("Basic realm=\"here\"".to_owned()),
        Asks::Bearer(_) if shown == Some(format!("Bearer {TOKEN}")) => {
            registry.blob(&path).into_response()
        }
        Asks::Bearer(realm) => {
            let own = format!("http://{}/token", registry.host());
            let realm = realm.clone().unwrap_or(own);
            refuse(format!("Bearer realm=\"{realm}\",service=\"here\""))
        }
        Asks::Digest => refuse("Digest realm=\"here\"".to_owned()),
        Asks::Fails(status) => StatusCode::from_u16(*status).unwrap().into_response(),
        Asks::Sends(to) => sent(to),
        Asks::Page => Html("log in").into_response(),
    }
}

/// Gives a token for name and password, or for an identity token, and to no others.
fn token(method: &str, query: &str, shown: Option<String>, body: &Bytes) -> Response {
    let form = match method {
        "POST" => std::str::from_utf8(body).unwrap(),
        _ => query,
    };
    let pairs: BTreeMap<_, _> = form.split('&').filter_map(|pair| pair.split_once('=')).collect();
    let is_asked_rightly = pairs.get("service") == Some(&"here")
        && pairs.get("scope") == Some(&"repository%3Ateam%2Fapp%3Apull");
    let is_known = match method {
        "POST" => pairs.get("refresh_token") == Some(&"1dentity"),
        _ => shown.as_deref() == Some(BASIC),
    };
    match is_asked_rightly && is_known {
        true => format!(r#"{{"access_token": "{TOKEN}", "expires_in": 60}}"#).into_response(),
        false => StatusCode::UNAUTHORIZED.into_response(),
    }
}

/// Writes a file of credentials for a registry, as `docker login` does.
pub fn write_credentials(path: &Path, host: &str, of: &str) {
    std::fs::write(path, format!(r#"{{"auths": {{"{host}": {{{of}}}}}}}"#)).unwrap();
    // Whatever the umask.
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

/// What `write_credentials` writes of `me:s3cret`.
pub const ME: &str = r#""auth": "bWU6czNjcmV0""#;

/// The same of another password.
pub const OTHER: &str = r#""auth": "bWU6b3RoZXI=""#;

//! Asks a registry whether this worker may read a blob, with the credentials that this worker has for it.
//!
//! ```text
//! HEAD https://HOST/v2/REPOSITORY/blobs/DIGEST
//!   200                                  it may
//!   30x, to where its blobs are          HEAD of that, without name and password: 200, it may
//!   401, and it asks for Basic           once more, with name and password
//!   401, and it asks for Bearer          GET or POST to the realm that it names --> a token; once more, with it
//!   401, 403, 404                        it may not
//! ```
//! (OCI distribution specification, "Pulling blobs"; the token is that of Docker's registries.)
//!
//! Only registries that `private-registries` lists are asked: the name of a blob comes from other workers. A name and
//! password are shown to the registry, and to the realm that it itself names; by TLS, or from loopback to loopback. No
//! web proxy is used.

mod challenge;
mod credentials;
mod error;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION, WWW_AUTHENTICATE};
use reqwest::{Certificate, Client, RequestBuilder, Response, StatusCode, Url, redirect};
use serde::Deserialize;
use slackwater_client::types::RegistryBlob;
use tokio::sync::OnceCell;

use self::challenge::{Bearer, Challenge};
use self::credentials::{Credential, Credentials};
pub use self::error::RegistryError;
use crate::small_file;

/// Time for all requests about one blob: a pull waits for it, and fetches the blob if it is over.
const QUESTION_TIME_MAX: Duration = Duration::from_secs(10);

/// Time to connect: a host that answers at all does so within a few round trips.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Longest answer with a token; those of large registries have about 5 KiB.
const TOKEN_BYTES_MAX: usize = 64 << 10;

/// Registries send to where their blobs are by one redirection, or two.
const REDIRECTIONS_MAX: usize = 5;

/// How long a registry that could not be asked is not asked again: an image has tens of layers.
const FAILED_TIME: Duration = Duration::from_secs(30);

/// Registries that are remembered so: more than a worker lists.
const FAILED_MAX: usize = 64;

/// The header by which a registry names what it shows (OCI distribution specification).
const DIGEST_HEADER: &str = "docker-content-digest";

/// What Docker Hub is called in names of images, and where its registry is.
const DOCKER_HUB: (&str, &str) = ("docker.io", "index.docker.io");

/// How the registries are asked. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Registries {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    credentials: Credentials,
    ca: Option<PathBuf>,
    client: OnceCell<Client>,
    /// Hosts that could not be asked, and when.
    failed: Mutex<HashMap<String, Instant>>,
}

/// What a request shows.
enum Authorization {
    None,
    Password { name: String, password: String },
    Token(String),
}

impl Authorization {
    fn show(self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::None => request,
            Self::Password { name, password } => request.basic_auth(name, Some(password)),
            Self::Token(token) => request.bearer_auth(token),
        }
    }
}

/// The parts of the answer with a token that are used.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registries {
    /// With the credentials in a file of the form of Docker's `config.json`, and the certificates (PEM) in another
    /// one trusted beside the system's. Credentials are read for each question, certificates for the first.
    #[must_use]
    pub fn new(credentials: Option<PathBuf>, ca: Option<PathBuf>) -> Self {
        let credentials = Credentials::new(credentials);
        Self { inner: Arc::new(Inner { credentials, ca, ..Inner::default() }) }
    }

    /// Whether the registry lets this worker read the blob.
    ///
    /// # Errors
    /// The registry cannot be asked, or its answer is neither yes nor no.
    pub async fn may_read(&self, blob: &RegistryBlob) -> Result<bool, RegistryError> {
        let host = blob.host().to_owned();
        if self.has_just_failed(&host) {
            return Err(RegistryError::Failed { host, pause: FAILED_TIME });
        }
        let asked = tokio::time::timeout(QUESTION_TIME_MAX, self.ask(blob)).await;
        let slow = || RegistryError::Slow { host: host.clone(), limit: QUESTION_TIME_MAX };
        let answer = asked.unwrap_or_else(|_| Err(slow()));
        if answer.as_ref().is_err_and(RegistryError::is_of_registry) {
            self.remember_failed(host);
        }
        answer
    }

    fn has_just_failed(&self, host: &str) -> bool {
        self.inner.failed.lock().get(host).is_some_and(|at| at.elapsed() < FAILED_TIME)
    }

    fn remember_failed(&self, host: String) {
        let mut failed = self.inner.failed.lock();
        failed.retain(|_, at| at.elapsed() < FAILED_TIME);
        if failed.len() < FAILED_MAX {
            failed.insert(host, Instant::now());
        }
    }

    async fn ask(&self, blob: &RegistryBlob) -> Result<bool, RegistryError> {
        let url = blob_url(blob)?;
        let mut answer = self.head(&url, Authorization::None).await?;
        if answer.status() == StatusCode::UNAUTHORIZED {
            let Some(authorization) = self.authorization(blob, answer.headers()).await? else {
                return Ok(false);
            };
            answer = self.head(&url, authorization).await?;
        }
        match answer.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => Ok(false),
            _ => {
                self.follow(&url, answer).await.and_then(|(at, answer)| is_blob(blob, &at, &answer))
            }
        }
    }

    /// Goes to where a registry sends, which is shown nothing; what is there, and where.
    async fn follow(
        &self,
        registry: &Url,
        mut answer: Response,
    ) -> Result<(Url, Response), RegistryError> {
        let mut at = registry.clone();
        for _ in 0..REDIRECTIONS_MAX {
            if !answer.status().is_redirection() {
                break;
            }
            let to = answer.headers().get(LOCATION).and_then(|to| at.join(to.to_str().ok()?).ok());
            let Some(to) = to.filter(|to| is_safe(to, registry)) else { break };
            answer = self.head(&to, Authorization::None).await?;
            at = to;
        }
        Ok((at, answer))
    }

    /// What the registry asks for; `None` if this worker has nothing of the kind.
    async fn authorization(
        &self,
        blob: &RegistryBlob,
        headers: &HeaderMap,
    ) -> Result<Option<Authorization>, RegistryError> {
        let host = blob.host();
        let asked =
            headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let challenge = Challenge::strongest(asked)
            .ok_or_else(|| RegistryError::Challenge { host: host.to_owned() })?;
        let credential = self.inner.credentials.of(host).await?;
        match (challenge, credential) {
            (Challenge::Basic, Some(Credential::Password { name, password })) => {
                Ok(Some(Authorization::Password { name, password }))
            }
            (Challenge::Basic, _) => Ok(None),
            (Challenge::Bearer(bearer), credential) => self.token(blob, &bearer, credential).await,
        }
    }

    /// A token of the realm; `None` if it gives none for this credential. Without one it may give a token for what
    /// is public.
    async fn token(
        &self,
        blob: &RegistryBlob,
        bearer: &Bearer,
        credential: Option<Credential>,
    ) -> Result<Option<Authorization>, RegistryError> {
        let unsafe_realm = || RegistryError::Realm {
            host: blob.host().to_owned(),
            got: bearer.realm.chars().take(128).collect(),
        };
        let mut realm = Url::parse(&bearer.realm).map_err(|_| unsafe_realm())?;
        if !is_safe(&realm, &blob_url(blob)?) {
            return Err(unsafe_realm());
        }
        let mut pairs = vec![("scope", bearer.scope_for(blob.repository()))];
        pairs.extend(bearer.service.as_ref().map(|service| ("service", service.clone())));
        let client = self.client().await?;
        let request = match credential {
            Some(Credential::IdentityToken(token)) => {
                pairs.push(("grant_type", "refresh_token".to_owned()));
                pairs.push(("client_id", "slackwater".to_owned()));
                pairs.push(("refresh_token", token));
                let post = client.post(realm.clone()).body(form(&pairs));
                post.header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            }
            Some(Credential::Password { name, password }) => {
                realm.query_pairs_mut().extend_pairs(&pairs);
                Authorization::Password { name, password }.show(client.get(realm.clone()))
            }
            None => {
                realm.query_pairs_mut().extend_pairs(&pairs);
                client.get(realm.clone())
            }
        };
        let answer = request.send().await.map_err(|source| unreachable(&realm, source))?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Ok(None),
            got => return Err(RegistryError::Status { url: shown(&realm), got: got.as_u16() }),
        }
        let bytes = bounded(answer, &realm).await?;
        let no_token = || RegistryError::Token { url: shown(&realm) };
        let read: TokenAnswer = serde_json::from_slice(&bytes).map_err(|_| no_token())?;
        let given = [read.token, read.access_token].into_iter().flatten();
        let token = given.into_iter().find(|token| !token.is_empty()).ok_or_else(no_token)?;
        Ok(Some(Authorization::Token(token)))
    }

    async fn head(
        &self,
        url: &Url,
        authorization: Authorization,
    ) -> Result<Response, RegistryError> {
        let request = authorization.show(self.client().await?.head(url.clone()));
        request.send().await.map_err(|source| unreachable(url, source))
    }

    async fn client(&self) -> Result<&Client, RegistryError> {
        self.inner.client.get_or_try_init(|| async { make_client(self.inner.ca.as_ref()) }).await
    }
}

fn make_client(ca: Option<&PathBuf>) -> Result<Client, RegistryError> {
    slackwater_client::use_default_cryptography();
    let mut builder = Client::builder()
        .user_agent(concat!("slackwater-driver/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT_TIME_MAX)
        .timeout(QUESTION_TIME_MAX)
        // Followed here, so that what one host is shown goes to no other.
        .redirect(redirect::Policy::none())
        // It would read what is sent to loopback.
        .no_proxy();
    if let Some(path) = ca {
        let bad = |reason: String| RegistryError::Certificates { path: path.clone(), reason };
        let pem = small_file::read(path).map_err(|error| bad(error.to_string()))?;
        let certificates =
            Certificate::from_pem_bundle(&pem).map_err(|error| bad(error.to_string()))?;
        builder = builder.tls_certs_merge(certificates);
    }
    builder.build().map_err(|source| RegistryError::Setup { source })
}

/// A form as the body of a request (WHATWG, `application/x-www-form-urlencoded`).
fn form(pairs: &[(&str, String)]) -> String {
    let url = Url::parse_with_params("http://localhost/", pairs);
    url.ok().and_then(|url| url.query().map(str::to_owned)).unwrap_or_default()
}

/// Where a blob is. Loopback has no TLS, as engines have it.
fn blob_url(blob: &RegistryBlob) -> Result<Url, RegistryError> {
    let host = match blob.host() {
        host if host == DOCKER_HUB.0 => DOCKER_HUB.1,
        host => host,
    };
    let text = format!("//{host}/v2/{}/blobs/{}", blob.repository(), blob.digest());
    let bad = || RegistryError::Host { got: host.to_owned() };
    let secure = Url::parse(&format!("https:{text}")).map_err(|_| bad())?;
    match is_loopback(&secure) {
        true => Url::parse(&format!("http:{text}")).map_err(|_| bad()),
        false => Ok(secure),
    }
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Whether a registry may send there: by TLS, or from loopback to loopback. It must not have this machine's own
/// services called.
fn is_safe(url: &Url, registry: &Url) -> bool {
    let is_local = |url: &Url| url.scheme() == "http" && is_loopback(url);
    url.scheme() == "https" || is_local(url) && is_local(registry)
}

/// Whether the answer at `url` is the blob, and not a page to log in.
fn is_blob(blob: &RegistryBlob, url: &Url, answer: &Response) -> Result<bool, RegistryError> {
    let text = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
    if answer.status() != StatusCode::OK {
        return Err(RegistryError::Status { url: shown(url), got: answer.status().as_u16() });
    }
    let kind = text(CONTENT_TYPE.as_str()).unwrap_or_default().to_ascii_lowercase();
    let is_page = kind.contains("html");
    if is_page || text(DIGEST_HEADER).is_some_and(|digest| digest != blob.digest()) {
        return Err(RegistryError::NoBlob { url: shown(url) });
    }
    Ok(true)
}

/// The body, if it is not longer than an answer with a token.
async fn bounded(mut answer: Response, url: &Url) -> Result<Vec<u8>, RegistryError> {
    let mut bytes = Vec::new();
    while let Some(piece) = answer.chunk().await.map_err(|source| unreachable(url, source))? {
        if bytes.len() + piece.len() > TOKEN_BYTES_MAX {
            return Err(RegistryError::Token { url: shown(url) });
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// A URL without its query and the like, which may hold what is secret.
fn shown(url: &Url) -> String {
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}

fn unreachable(url: &Url, source: reqwest::Error) -> RegistryError {
    RegistryError::Unreachable { url: shown(url), source: source.without_url() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(host: &str) -> String {
        let digest = format!("sha256:{}", "a".repeat(64));
        let blob = format!("{host}/a/b@{digest}").parse().unwrap();
        let url = blob_url(&blob).unwrap().to_string();
        url.strip_suffix(&format!("/v2/a/b/blobs/{digest}")).unwrap().to_owned()
    }

    #[test]
    fn secrets_leave_this_machine_by_tls_alone() {
        for (host, expected) in [
            ("registry.example.com", "https://registry.example.com"),
            ("registry.example.com:5000", "https://registry.example.com:5000"),
            ("docker.io", "https://index.docker.io"),
            ("10.0.0.1", "https://10.0.0.1"),
            ("127.0.0.1.example.com", "https://127.0.0.1.example.com"),
            ("localhost:5000", "http://localhost:5000"),
            ("127.0.0.1:5000", "http://127.0.0.1:5000"),
            ("[::1]:5000", "http://[::1]:5000"),
        ] {
            assert_eq!(url(host), expected);
        }
        let is_safe = |text: &str, registry: &str| {
            is_safe(&Url::parse(text).unwrap(), &Url::parse(registry).unwrap())
        };
        let (local, remote) = ("http://127.0.0.1:5000/", "https://registry.example.com/");
        for (text, of_local, of_remote) in [
            ("https://a/", true, true),
            ("http://127.0.0.2/", true, false),
            ("http://[::1]/", true, false),
            ("http://a/", false, false),
            ("ftp://127.0.0.1/", false, false),
            ("file:///a", false, false),
        ] {
            assert_eq!(
                (is_safe(text, local), is_safe(text, remote)),
                (of_local, of_remote),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_shown_of_a_url_holds_no_secret() {
        let url = Url::parse("https://me:s3cret@a:5/b?token=s3cret#s3cret").unwrap();
        assert_eq!(shown(&url), "https://a:5/b");
    }
}

//! How a client is made.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Certificate, Url, redirect};

use crate::authorization::Authorization;
use crate::error::{ClientError, innermost};
use crate::retry::RetryPolicy;
use crate::token::Token;
use crate::transport::{Client, Inner};

/// Time that one try of a call may take: well above what a healthy appliance needs under load.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Time to connect: a host that answers at all does so within a few round trips.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(5);

/// A peer that vanished without a word is noticed by TCP after a few of these, also during
/// calls that may rightly take hours.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// An idle connection is not used again after this: `slackwaterd` closes one after 75 s, and a call that meets
/// the close is lost.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);

/// Idle connections that are kept to one appliance: as many as a transfer has in flight.
const IDLE_CONNECTIONS_MAX: usize = 16;

/// Makes a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    url: String,
    token: Option<Token>,
    token_files: Vec<PathBuf>,
    ca_certificate: Option<Vec<u8>>,
    timeout: Duration,
    retry: RetryPolicy,
}

impl Client {
    /// A builder of a client for the appliance at `url`, such as `http://127.0.0.1:8049`.
    #[must_use]
    pub fn builder(url: impl Into<String>) -> ClientBuilder {
        ClientBuilder {
            url: url.into(),
            token: None,
            token_files: Vec::new(),
            ca_certificate: None,
            timeout: TIMEOUT_DEFAULT,
            retry: RetryPolicy::default(),
        }
    }
}

impl ClientBuilder {
    /// Sends this bearer token with each call.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Sends the bearer token that this file holds at the time of the call, or none before it is there. A process
    /// that goes on for months has the new token as soon as another has written it. Given several times, the first
    /// file that is there counts.
    #[must_use]
    pub fn token_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.token_files.push(path.into());
        self
    }

    /// Trusts these certificates (PEM, one or more), and none of the system's: an appliance
    /// with an authority of its own is then known by that authority alone.
    #[must_use]
    pub fn ca_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.ca_certificate = Some(pem.into());
        self
    }

    /// Time that one try of a call may take. Streams of bytes have it between two pieces;
    /// `check` and `gc`, which work through the whole store, do not have it.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// When failed calls are tried again.
    #[must_use]
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// The client. No connection is made yet.
    ///
    /// # Errors
    /// `Address`, `Certificate`, `Token` and `Setup`.
    pub fn build(self) -> Result<Client, ClientError> {
        let url = parse_address(&self.url)?;
        use_default_cryptography();
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("slackwater/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.timeout.min(CONNECT_TIMEOUT_MAX))
            .tcp_keepalive(KEEPALIVE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_TIME_MAX)
            // Transfers run side by side: connections of their own are not held up by each
            // other, nor by HTTP/2's windows.
            .http1_only()
            // The appliance redirects nobody: following one could carry the token elsewhere.
            .redirect(redirect::Policy::none())
            // Disks do not travel through a web proxy that the environment happens to name.
            .no_proxy();
        if let Some(pem) = &self.ca_certificate {
            http = http.tls_certs_only(parse_certificates(pem)?);
        } else if url.scheme() == "http" {
            // Spares reading the system's certificates, which need not even exist.
            http = http.tls_certs_only([]);
        }
        let authorization = match &self.token {
            Some(token) => Authorization::fixed(token)?,
            None if self.token_files.is_empty() => Authorization::None,
            None => Authorization::in_files(self.token_files),
        };
        let http = http
            .build()
            .map_err(|source| ClientError::Setup { reason: innermost(&source), source })?;
        Ok(Client {
            inner: Arc::new(Inner {
                http,
                base: url.as_str().trim_end_matches('/').to_owned(),
                authorization,
                ca_certificate: self.ca_certificate,
            }),
            timeout: self.timeout,
            retry: self.retry,
        })
    }
}

/// Gives TLS its cryptography, if the program has not chosen another one: `reqwest` and `rustls` are built without
/// one of their own choice. To be called before either is used otherwise than by this crate.
pub fn use_default_cryptography() {
    // An error means only that there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Whether what is sent to the appliance at `url` can be read on the way: without TLS, beyond this machine.
#[must_use]
pub fn is_readable_on_the_way(url: &str) -> bool {
    let Ok(url) = Url::parse(url) else { return false };
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_local =
        host == "localhost" || address.is_ok_and(|address| address.to_canonical().is_loopback());
    url.scheme() == "http" && !is_local
}

fn parse_address(text: &str) -> Result<Url, ClientError> {
    let refuse =
        |reason: &str| ClientError::Address { got: text.to_owned(), reason: reason.into() };
    let url = Url::parse(text).map_err(|error| refuse(&error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(refuse("it begins with neither http:// nor https://"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        let reason = "a name or password has no place in it: use a token".to_owned();
        // Not quoted: it may hold a password.
        return Err(ClientError::Address { got: format!("{}://...", url.scheme()), reason });
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refuse("it has a query or a fragment"));
    }
    Ok(url)
}

fn parse_certificates(pem: &[u8]) -> Result<Vec<Certificate>, ClientError> {
    let refuse = |reason: String| ClientError::Certificate { reason };
    let certificates =
        Certificate::from_pem_bundle(pem).map_err(|source| refuse(innermost(&source)))?;
    if certificates.is_empty() {
        return Err(refuse("it holds no certificate".to_owned()));
    }
    Ok(certificates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        for good in ["http://127.0.0.1:8049", "https://appliance.example/", "http://[::1]:1/store"]
        {
            assert!(parse_address(good).is_ok(), "{good}");
        }
        for bad in ["", "127.0.0.1:8049", "localhost:8049", "ftp://a", "http://", "http://a/?b=c"] {
            assert!(matches!(parse_address(bad), Err(ClientError::Address { .. })), "{bad}");
        }
        let error = parse_address("https://me:s3cret@a").unwrap_err().to_string();
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[test]
    fn only_plain_http_beyond_this_machine_is_readable_on_the_way() {
        for safe in [
            "https://a",
            "http://127.0.0.1:8049",
            "http://localhost",
            "http://[::1]:1/",
            "http://[::ffff:127.0.0.1]:1",
        ] {
            assert!(!is_readable_on_the_way(safe), "{safe}");
        }
        for exposed in [
            "http://10.0.0.1:8049",
            "HTTP://10.0.0.1:8049",
            "http://appliance/127.0.0.1",
            "http://127.example.com",
            "http://localhost.example.com:1",
        ] {
            assert!(is_readable_on_the_way(exposed), "{exposed}");
        }
    }

    #[test]
    fn a_client_never_shows_its_token() {
        let builder = Client::builder("http://127.0.0.1:1").token(Token::new("s3cret").unwrap());
        assert!(!format!("{builder:?}").contains("s3cret"));
        let client = builder.build().unwrap();
        assert!(!format!("{client:?} {client:#?}").contains("s3cret"));
    }

    #[test]
    fn what_is_no_certificate_is_refused() {
        for bad in
            [&b""[..], b"hello", b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"]
        {
            let built = Client::builder("https://a").ca_certificate(bad).build();
            let error = built.unwrap_err();
            assert!(
                matches!(error, ClientError::Certificate { .. } | ClientError::Setup { .. }),
                "{error:?}"
            );
        }
    }
}

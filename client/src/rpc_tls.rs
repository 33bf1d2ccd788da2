//! With what the appliance's NFS face is spoken to in TLS: its certificate is that of REST, and trusted by the same
//! authorities.

use std::fmt;
use std::sync::Arc;

use reqwest::Url;
use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::TLS13;
use rustls_platform_verifier::BuilderVerifierExt;
use slackwater_api::error::ProblemCode;

use crate::error::{ClientError, innermost};
use crate::retry::RetryPolicy;
use crate::transport::Client;

/// The protocol in TLS (RFC 9289 section 8.2).
const ALPN: &[u8] = b"sunrpc";

/// What a client of RPC-with-TLS (RFC 9289) needs.
#[derive(Clone)]
pub struct RpcTls {
    /// TLS 1.3, with the authorities that are trusted, and the certificate of the client, if there is one.
    pub config: Arc<ClientConfig>,
    /// The name that the appliance's certificate has to have: that of its REST face, however NFS is reached.
    pub name: ServerName<'static>,
}

impl fmt::Debug for RpcTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RpcTls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Client {
    /// How the appliance's NFS face is known, where its REST face is reached by `https`; else `None`. `shown` is the
    /// certificate of the client, for appliances that ask for one.
    ///
    /// # Errors
    /// `Certificate`: there are no authorities to trust, or the address has no name.
    pub fn rpc_tls(
        &self,
        shown: Option<Arc<dyn ResolvesClientCert>>,
    ) -> Result<Option<RpcTls>, ClientError> {
        let refuse = |reason: String| ClientError::Certificate { reason };
        let url = Url::parse(self.url()).map_err(|error| refuse(error.to_string()))?;
        if url.scheme() != "https" {
            return Ok(None);
        }
        let host = url.host_str().unwrap_or_default();
        let name = ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']'))
            .map_err(|error| refuse(format!("`{host}`: {error}")))?
            .to_owned();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let failed = |error: rustls::Error| refuse(innermost(&error));
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?;
        let builder = match &self.inner.ca_certificate {
            Some(pem) => builder.with_root_certificates(authorities(pem)?),
            None => builder.with_platform_verifier().map_err(failed)?,
        };
        let mut config = match shown {
            Some(certificate) => builder.with_client_cert_resolver(certificate),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A connection lives for as long as a mount.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Some(RpcTls { config: Arc::new(config), name }))
    }

    /// Whether the appliance offers TLS on NFS; one of release 0.2 does not. Tries once.
    ///
    /// # Errors
    /// As of [`Self::mount_path`], by which it is asked.
    pub async fn offers_rpc_tls(&self) -> Result<bool, ClientError> {
        match self.with_retry(RetryPolicy::never()).mount_path().await {
            Ok(made) => Ok(made.nfs_tls),
            Err(error) if error.code() == Some(ProblemCode::UnknownRoute) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn authorities(pem: &[u8]) -> Result<RootCertStore, ClientError> {
    let refuse = |reason: String| ClientError::Certificate { reason };
    let mut authorities = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| refuse(error.to_string()))?;
        authorities.add(certificate).map_err(|error| refuse(innermost(&error)))?;
    }
    Ok(authorities)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate() -> Vec<u8> {
        rcgen::generate_simple_self_signed(["localhost".to_owned()])
            .unwrap()
            .cert
            .pem()
            .into_bytes()
    }

    #[test]
    fn only_an_appliance_that_is_reached_by_https_is_known() {
        let plain = Client::builder("http://127.0.0.1:1").build().unwrap();
        assert!(plain.rpc_tls(None).unwrap().is_none());
        for (url, name) in [
            ("https://appliance.example:8049", "appliance.example"),
            ("https://10.0.0.5:8049/", "10.0.0.5"),
            ("https://[fd00::1]:8049", "fd00::1"),
        ] {
            let client = Client::builder(url).ca_certificate(certificate()).build().unwrap();
            let tls = client.rpc_tls(None).unwrap().unwrap();
            assert_eq!(tls.name.to_str(), name);
        }
    }
}

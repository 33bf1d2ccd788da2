//! The certificate of this worker, for appliances that ask for one (mutual TLS).
//!
//! The files are read for each handshake, so one that was renewed counts from the next connection on. While they cannot
//! be used, as in the middle of a renewal, the pair that could be used last is shown.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use slackwater_client::certificate;

/// The files of a certificate, with those that lead from it to a root, and of its private key; both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCertificate {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why a certificate cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum WorkerCertificateError {
    /// A file cannot be read, or is no PEM.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// Certificate or private key.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: pem::Error,
    },
    /// The file has no certificate.
    #[error("certificate {}: it holds none; expected PEM", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The two are no pair, or of a kind that is not served.
    #[error("certificate {} and private key {} are no pair that can be used: {source}", files.certificate.display(), files.key.display())]
    Pair {
        /// The files.
        files: WorkerCertificate,
        /// Why.
        source: rustls::Error,
    },
}

impl WorkerCertificate {
    /// Reads both files.
    ///
    /// # Errors
    /// They cannot be read, or are no pair.
    pub fn check(&self) -> Result<(), WorkerCertificateError> {
        self.load().map(drop)
    }

    /// When the first of the certificates ends, in seconds since 1970; none if that cannot be told.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn ends_at_seconds(&self) -> Result<Option<u64>, WorkerCertificateError> {
        let loaded = self.load()?;
        Ok(certificate::ends_at_seconds(loaded.cert.iter().map(AsRef::as_ref)))
    }

    fn load(&self) -> Result<CertifiedKey, WorkerCertificateError> {
        let unreadable = |what, path: &Path, source| WorkerCertificateError::File {
            what,
            path: path.to_owned(),
            source,
        };
        let certificates = CertificateDer::pem_file_iter(&self.certificate)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|source| unreadable("certificate", &self.certificate, source))?;
        if certificates.is_empty() {
            return Err(WorkerCertificateError::Empty { path: self.certificate.clone() });
        }
        let key = PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|source| unreadable("private key", &self.key, source))?;
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(certificates, key, &provider)
            .map_err(|source| WorkerCertificateError::Pair { files: self.clone(), source })
    }
}

/// Shows the certificate in handshakes that ask for one.
#[derive(Debug)]
pub(crate) struct WorkerIdentity {
    files: WorkerCertificate,
    last: Mutex<Last>,
}

/// What was found at the last handshake that asked for it.
#[derive(Debug, Default)]
struct Last {
    pair: Option<Arc<CertifiedKey>>,
    /// Why the files could not be used, as it was logged.
    reason: Option<String>,
    is_asked_for: bool,
}

impl WorkerIdentity {
    pub(crate) fn new(files: WorkerCertificate) -> Self {
        Self { files, last: Mutex::default() }
    }

    /// Whether a handshake has asked for it.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.last.lock().is_asked_for
    }
}

impl ResolvesClientCert for WorkerIdentity {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let mut last = self.last.lock();
        last.is_asked_for = true;
        match self.files.load() {
            Ok(loaded) => (last.pair, last.reason) = (Some(Arc::new(loaded)), None),
            Err(error) => {
                let reason = error.to_string();
                if last.reason.as_ref() != Some(&reason) {
                    tracing::error!(
                        error = reason,
                        has_last = last.pair.is_some(),
                        "the certificate of this worker cannot be used, and the appliance asks for one; the last \
                         one that could be used is shown, if there is one"
                    );
                }
                last.reason = Some(reason);
            }
        }
        last.pair.clone()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// What is wrong where the appliance ended a handshake for want of a certificate, or of another one; or the error itself.
pub(crate) fn explained(error: io::Error) -> io::Error {
    use rustls::AlertDescription as Alert;
    let reason = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::AlertReceived(alert)) = reason else { return error };
    let text = match alert {
        Alert::CertificateRequired => {
            "the appliance asks for a certificate of this worker (nfs-tls is `mutual` there): see nfs-certificate and \
             nfs-key"
                .to_owned()
        }
        Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateRevoked
        | Alert::CertificateExpired
        | Alert::CertificateUnknown
        | Alert::UnknownCA
        | Alert::DecryptError => format!(
            "the appliance refuses the certificate of this worker ({alert:?}): it has to be valid, for clients, and of \
             an authority in nfs-tls-client-ca there; see nfs-certificate"
        ),
        _ => return error,
    };
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Pair {
        directory: tempfile::TempDir,
        files: WorkerCertificate,
    }

    impl Pair {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let file = |name| directory.path().join(name);
            let files = WorkerCertificate { certificate: file("cert.pem"), key: file("key.pem") };
            let pair = Self { directory, files };
            pair.renew();
            pair
        }

        /// Writes another pair.
        fn renew(&self) {
            let made = rcgen::generate_simple_self_signed(["a-worker".to_owned()]).unwrap();
            std::fs::write(&self.files.certificate, made.cert.pem()).unwrap();
            std::fs::write(&self.files.key, made.signing_key.serialize_pem()).unwrap();
        }
    }

    #[test]
    fn a_renewed_certificate_is_shown_and_the_last_one_while_it_is_half_there() {
        let pair = Pair::new();
        let identity = WorkerIdentity::new(pair.files.clone());
        assert!(!identity.is_asked_for());
        let of = |identity: &WorkerIdentity| identity.resolve(&[], &[]).unwrap().cert[0].clone();
        let first = of(&identity);
        assert_eq!(of(&identity), first);
        // `date -ud 4096-01-01 +%s`, which is what rcgen makes.
        assert_eq!(pair.files.ends_at_seconds().unwrap(), Some(67_090_118_400));
        let key = std::fs::read(&pair.files.key).unwrap();
        pair.renew();
        let other_key = std::fs::read(&pair.files.key).unwrap();
        // The new certificate with the old key.
        std::fs::write(&pair.files.key, key).unwrap();
        assert!(matches!(pair.files.check(), Err(WorkerCertificateError::Pair { .. })));
        assert_eq!(of(&identity), first);
        std::fs::remove_file(&pair.files.key).unwrap();
        assert_eq!(of(&identity), first);
        std::fs::write(&pair.files.key, other_key).unwrap();
        assert!(of(&identity) != first && pair.files.check().is_ok() && identity.is_asked_for());
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let pair = Pair::new();
        std::fs::write(&pair.files.certificate, "no pem").unwrap();
        let error = pair.files.check().unwrap_err();
        assert!(error.to_string().contains("cert.pem"), "{error}");
        assert!(WorkerIdentity::new(pair.files.clone()).resolve(&[], &[]).is_none());
        let missing = WorkerCertificate {
            certificate: pair.directory.path().join("none.pem"),
            ..pair.files.clone()
        };
        assert!(missing.check().unwrap_err().to_string().contains("none.pem"));
        assert!(missing.ends_at_seconds().is_err());
    }

    #[test]
    fn a_refused_certificate_names_the_way_out() {
        let alert =
            |alert| io::Error::new(io::ErrorKind::InvalidData, rustls::Error::AlertReceived(alert));
        use rustls::AlertDescription as Alert;
        let told = explained(alert(Alert::CertificateRequired)).to_string();
        assert!(told.contains("asks for a certificate"), "{told}");
        let told = explained(alert(Alert::UnknownCA)).to_string();
        assert!(told.contains("UnknownCA") && told.contains("nfs-tls-client-ca"), "{told}");
        let other = explained(alert(Alert::InternalError));
        assert_eq!(other.kind(), io::ErrorKind::InvalidData);
        let other = explained(io::ErrorKind::ConnectionReset.into());
        assert_eq!(other.kind(), io::ErrorKind::ConnectionReset);
    }
}

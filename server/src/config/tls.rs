//! The settings of TLS: the files of REST and NFS, and whether NFS speaks it.

use std::path::Path;

use super::TlsPaths;
use super::error::ConfigError;
use super::settings::{NfsTlsMode, Settings};
use super::text_file::read_text;

/// Both files of TLS, or none.
pub(super) fn files(settings: &Settings) -> Result<Option<TlsPaths>, ConfigError> {
    let alone = |given, needed| ConfigError::Alone { given, needed };
    match (&settings.tls_cert, &settings.tls_key) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(alone("tls-cert", "tls-key")),
        (None, Some(_)) => Err(alone("tls-key", "tls-cert")),
        (Some(certificate), Some(key)) => {
            require_pem(certificate, "certificate in PEM form")?;
            require_pem(key, "private key in PEM form")?;
            Ok(Some(TlsPaths { certificate: certificate.clone(), key: key.clone() }))
        }
    }
}

/// Whether NFS speaks TLS, which takes a certificate.
pub(super) fn of_nfs(settings: &Settings) -> Result<NfsTlsMode, ConfigError> {
    match (settings.nfs_tls, &settings.tls_cert) {
        (Some(NfsTlsMode::Offered | NfsTlsMode::Required), None) => {
            Err(ConfigError::Alone { given: "nfs-tls", needed: "tls-cert" })
        }
        (Some(mode), _) => Ok(mode),
        (None, Some(_)) => Ok(NfsTlsMode::Offered),
        (None, None) => Ok(NfsTlsMode::Off),
    }
}

/// Looks for the mark that every PEM file has (RFC 7468 section 2), so that a wrong file is
/// told before anything is started. What stands inside is for the TLS library to judge.
fn require_pem(path: &Path, what: &'static str) -> Result<(), ConfigError> {
    if read_text(path)?.contains("-----BEGIN ") {
        return Ok(());
    }
    Err(ConfigError::Empty { path: path.to_owned(), what })
}

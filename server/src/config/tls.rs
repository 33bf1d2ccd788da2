//! The settings of TLS: the files of REST and NFS, and whether NFS speaks it.

use std::path::{Path, PathBuf};

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

/// Whether NFS speaks TLS, and with whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NfsTlsPolicy {
    /// Not at all.
    Off,
    /// With clients that ask for it.
    Offered,
    /// With all other machines.
    Required,
    /// With other machines that show a certificate of an authority in this file.
    Mutual(PathBuf),
}

/// Whether NFS speaks TLS, which takes a certificate.
pub(super) fn of_nfs(settings: &Settings) -> Result<NfsTlsPolicy, ConfigError> {
    let alone = |given, needed| Err(ConfigError::Alone { given, needed });
    let default = if settings.tls_cert.is_some() { NfsTlsMode::Offered } else { NfsTlsMode::Off };
    let mode = settings.nfs_tls.unwrap_or(default);
    if mode != NfsTlsMode::Off && settings.tls_cert.is_none() {
        return alone("nfs-tls", "tls-cert");
    }
    match (mode, &settings.nfs_tls_client_ca) {
        (NfsTlsMode::Mutual, Some(authorities)) => {
            require_pem(authorities, "certificate in PEM form")?;
            Ok(NfsTlsPolicy::Mutual(authorities.clone()))
        }
        (NfsTlsMode::Mutual, None) => alone("nfs-tls mutual", "nfs-tls-client-ca"),
        (_, Some(_)) => alone("nfs-tls-client-ca", "nfs-tls mutual"),
        (NfsTlsMode::Off, None) => Ok(NfsTlsPolicy::Off),
        (NfsTlsMode::Offered, None) => Ok(NfsTlsPolicy::Offered),
        (NfsTlsMode::Required, None) => Ok(NfsTlsPolicy::Required),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutual_tls_goes_with_authorities_and_they_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let (pem, other) = (directory.path().join("pem"), directory.path().join("other"));
        std::fs::write(&pem, "-----BEGIN X-----\n").unwrap();
        std::fs::write(&other, "no pem").unwrap();
        let policy = |nfs_tls, nfs_tls_client_ca: Option<&PathBuf>| {
            let tls_cert = Some(pem.clone());
            let nfs_tls_client_ca = nfs_tls_client_ca.cloned();
            of_nfs(&Settings { tls_cert, nfs_tls, nfs_tls_client_ca, ..Settings::default() })
        };
        let mutual = Some(NfsTlsMode::Mutual);
        assert_eq!(policy(mutual, Some(&pem)).unwrap(), NfsTlsPolicy::Mutual(pem.clone()));
        for (mode, authorities) in [
            (mutual, None),
            (None, Some(&pem)),
            (Some(NfsTlsMode::Off), Some(&pem)),
            (Some(NfsTlsMode::Required), Some(&pem)),
        ] {
            let error = policy(mode, authorities).unwrap_err().to_string();
            assert!(error.contains("nfs-tls-client-ca") && error.contains("mutual"), "{error}");
        }
        assert!(matches!(policy(mutual, Some(&other)), Err(ConfigError::Empty { .. })));
        let alone = of_nfs(&Settings {
            nfs_tls: mutual,
            nfs_tls_client_ca: Some(pem.clone()),
            ..Settings::default()
        });
        assert!(matches!(alone, Err(ConfigError::Alone { needed: "tls-cert", .. })));
    }
}

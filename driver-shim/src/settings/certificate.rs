//! The settings of this worker's certificate: its two files, and what goes with them.

use slackwater_fuse::WorkerCertificate;

use super::config::{absolute, given, value};
use super::{AttachChoice, Settings, SettingsError};

/// Both files of the certificate, or none.
///
/// # Errors
/// One without the other, or an appliance to which NFS does not go by TLS.
pub(super) fn files(
    settings: &Settings,
    api: &str,
) -> Result<Option<WorkerCertificate>, SettingsError> {
    let alone = |given, needed| Err(SettingsError::Alone { given, needed });
    match (&settings.nfs_certificate, &settings.nfs_key) {
        (None, None) => Ok(None),
        (Some(_), None) => alone("nfs-certificate", "nfs-key"),
        (None, Some(_)) => alone("nfs-key", "nfs-certificate"),
        (Some(certificate), Some(_)) if !api.starts_with("https://") => {
            let expected = format!("expected none, as NFS is not in TLS where api is {api}");
            Err(value("nfs-certificate", &certificate.to_string_lossy(), &expected))
        }
        (Some(certificate), Some(key)) => {
            // The process that serves the export has them for longer than this one.
            let certificate = absolute("nfs-certificate", certificate.clone())?;
            Ok(Some(WorkerCertificate { certificate, key: absolute("nfs-key", key.clone())? }))
        }
    }
}

/// How disks are attached. With a certificate `auto` prefers FUSE, as the kernel's NFS client would not show it.
///
/// # Errors
/// The kernel's client is asked for by name beside a certificate.
pub(crate) fn attach_choice(settings: &Settings) -> Result<AttachChoice, SettingsError> {
    match (given(settings.attach, "attach")?, &settings.nfs_certificate) {
        (AttachChoice::Nfs, Some(_)) => {
            let expected =
                "expected fuse or auto, as the kernel's NFS client does not show nfs-certificate";
            Err(value("attach", "nfs", expected))
        }
        (chosen, _) => Ok(chosen),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(api: &str, certificate: Option<&str>, key: Option<&str>) -> Settings {
        Settings {
            api: Some(api.to_owned()),
            nfs_certificate: certificate.map(Into::into),
            nfs_key: key.map(Into::into),
            ..Settings::defaults()
        }
    }

    #[test]
    fn a_certificate_goes_with_its_key_and_with_https() {
        const API: &str = "https://appliance:8049";
        let of = |api: &str, certificate, key| files(&settings(api, certificate, key), api);
        let found = of(API, Some("/worker.pem"), Some("/key.pem")).unwrap().unwrap();
        assert_eq!((found.certificate, found.key), ("/worker.pem".into(), "/key.pem".into()));
        assert_eq!(of(API, None, None).unwrap(), None);
        for (certificate, key) in [(Some("/worker.pem"), None), (None, Some("/key.pem"))] {
            assert!(matches!(of(API, certificate, key), Err(SettingsError::Alone { .. })));
        }
        let plain = of("http://appliance:8049", Some("/worker.pem"), Some("/key.pem"));
        let error = plain.unwrap_err().to_string();
        assert!(error.contains("nfs-certificate") && error.contains("http://"), "{error}");
    }

    #[test]
    fn the_kernels_client_does_not_go_with_a_certificate() {
        use AttachChoice::{Auto, Fuse, Nfs};
        let choice = |attach, certificate| {
            let settings = settings("https://appliance", certificate, certificate);
            attach_choice(&Settings { attach: Some(attach), ..settings })
        };
        for attach in [Auto, Nfs, Fuse] {
            assert_eq!(choice(attach, None).unwrap(), attach);
        }
        for attach in [Auto, Fuse] {
            assert_eq!(choice(attach, Some("/worker.pem")).unwrap(), attach);
        }
        let error = choice(Nfs, Some("/worker.pem")).unwrap_err().to_string();
        assert!(error.contains("attach is `nfs`") && error.contains("nfs-certificate"), "{error}");
    }
}

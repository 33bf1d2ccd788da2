//! Certificates of clients: who a connection is with, where clients have to show that (mutual TLS).
//!
//! ```text
//! other machines, in TLS ----------> handshake by a certificate of an authority --> the worker that it names
//!                 in plain text ---> MOUNT alone, which Linux sends so also with xprtsec=mtls
//! the appliance itself, in plain text ---------------------------------------------> all, as without certificates
//! ```
//! A certificate names a worker by its id: the UUID is one of its DNS names (RFC 5280 section 4.2.1.6). It then reaches
//! what that worker may mount, and nothing else: a worker's secret path or handle that was seen on the way is of no use
//! without the worker's private key. One that names no worker, as of an administrator's machine, reaches the whole
//! export, by the path of a token, and nothing by the path of a worker.
//!
//! Invariants: a handle is judged by its own scope, not by what was mounted by its connection. A certificate is asked
//! for in addition to what [`crate::scope`] asks, never in its place.
#![deny(clippy::indexing_slicing)]

use std::fmt;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use uuid::Uuid;
use webpki::EndEntityCert;

use crate::scope::MountScope;

/// Characters of an id as a name has it: 36, such as `018fa1c3-7c1e-7f00-8b9a-1f2e3d4c5b6a`.
const ID_CHARACTERS: usize = 36;

/// What a connection has shown of who its client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Nothing, and nothing is asked for: certificates are not, or not of this machine.
    NotAsked,
    /// Nothing, as it is in plain text where certificates are asked for.
    Nothing,
    /// A certificate of an authority.
    Certificate(Named),
}

/// Whom a certificate is for, by its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// The worker with this id.
    Worker(Uuid),
    /// No worker: a machine that mounts the whole export.
    Machine,
    /// That cannot be told: it has the ids of several workers, or cannot be read. It is for none.
    Unclear,
}

impl Shown {
    /// Whether handles of this scope are for it; none: by address.
    pub(crate) fn reaches(self, scope: Option<MountScope>) -> bool {
        match (self, scope) {
            (Self::NotAsked, _) => true,
            (Self::Nothing, _) => false,
            (Self::Certificate(named), Some(MountScope::Worker(id))) => named == Named::Worker(id),
            (Self::Certificate(named), Some(MountScope::Export(_)) | None) => {
                named == Named::Machine
            }
        }
    }

    /// Whether a mount of this scope is answered. In plain text it is: what is mounted is reached by a certificate alone.
    pub(crate) fn may_mount(self, scope: Option<MountScope>) -> bool {
        self == Self::Nothing || self.reaches(scope)
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked | Self::Nothing => f.write_str("no certificate"),
            Self::Certificate(Named::Worker(id)) => write!(f, "the certificate of worker {id}"),
            Self::Certificate(Named::Machine) => f.write_str("a certificate that names no worker"),
            Self::Certificate(Named::Unclear) => {
                f.write_str("a certificate with several ids of workers")
            }
        }
    }
}

/// Takes those who show a certificate for clients, of one of these authorities.
///
/// # Errors
/// There is no authority, or one of the certificates cannot be used as such.
pub(crate) fn verifier(
    authorities: Vec<CertificateDer<'static>>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority)?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| rustls::Error::General(error.to_string()))
}

/// Whom a verified certificate is for: the UUID among its DNS names is a worker's.
pub(crate) fn named_by(certificate: &CertificateDer<'_>) -> Named {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Named::Unclear };
    let is_valid_for = |name: &str| {
        let name = ServerName::try_from(name);
        name.is_ok_and(|name| certificate.verify_is_valid_for_subject_name(&name).is_ok())
    };
    let mut ids = certificate
        .valid_dns_names()
        .filter(|name| name.len() == ID_CHARACTERS && is_valid_for(name))
        .filter_map(|name| Uuid::try_parse(name).ok());
    match ids.next() {
        None => Named::Machine,
        Some(id) if ids.all(|other| other == id) => Named::Worker(id),
        Some(_) => Named::Unclear,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Uuid = Uuid::from_u128(0x018f_a1c3_7c1e_7f00_8b9a_1f2e_3d4c_5b6a);
    const OTHER: Uuid = Uuid::from_u128(0x018f_a1c3_7c1e_7f00_8b9a_1f2e_3d4c_5b6b);

    fn named(names: &[&str]) -> Named {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        named_by(made.cert.der())
    }

    #[test]
    fn a_certificate_names_one_worker_by_its_id() {
        let (own, other) = (OWN.to_string(), OTHER.to_string());
        assert_eq!(named(&[&own]), Named::Worker(OWN));
        assert_eq!(named(&[&own.to_uppercase()]), Named::Worker(OWN));
        assert_eq!(named(&["node-1.example", &own, "10.0.0.7", &own]), Named::Worker(OWN));
        assert_eq!(named(&[&own, &other]), Named::Unclear);
        for name in ["node-1.example", "10.0.0.7", &own.replace('-', ""), &format!("{own}.example")]
        {
            assert_eq!(named(&[name]), Named::Machine, "{name}");
        }
        assert_eq!(named_by(&CertificateDer::from_slice(b"no certificate")), Named::Unclear);
    }

    #[test]
    fn a_certificate_reaches_its_own_worker_or_else_the_whole_export() {
        let scopes = [
            Some(MountScope::Worker(OWN)),
            Some(MountScope::Worker(OTHER)),
            Some(MountScope::Export([1; 16])),
            None,
        ];
        let of = Shown::Certificate;
        for (shown, reached, mounted) in [
            (Shown::NotAsked, [true; 4], [true; 4]),
            (Shown::Nothing, [false; 4], [true; 4]),
            (of(Named::Worker(OWN)), [true, false, false, false], [true, false, false, false]),
            (of(Named::Machine), [false, false, true, true], [false, false, true, true]),
            (of(Named::Unclear), [false; 4], [false; 4]),
        ] {
            assert_eq!(scopes.map(|scope| shown.reaches(scope)), reached, "{shown:?}");
            assert_eq!(scopes.map(|scope| shown.may_mount(scope)), mounted, "{shown:?}");
        }
    }

    #[test]
    fn authorities_are_checked() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        assert!(verifier(Vec::new(), &provider).is_err());
        let nothing = CertificateDer::from_slice(b"no certificate");
        assert!(verifier(vec![nothing], &provider).is_err());
        let made = rcgen::generate_simple_self_signed(["an authority".to_owned()]).unwrap();
        assert!(verifier(vec![made.cert.der().clone()], &provider).is_ok());
    }
}

//! `slackwaterd certificate`: makes what TLS needs, for those who have no authority of their own.
//!
//! ```text
//! ca-key.pem --signs--> ca.pem      the authority: clients know the appliance by it
//!     |
//!     +-------signs---> cert.pem    the appliance's: --tls-cert; its key is key.pem: --tls-key
//! ```
//! Invariants: nothing that is there is replaced, but cert.pem when that is asked for; it keeps its key, so a crash leaves
//! a pair that fits. Keys are for their owner alone: the directory's.

use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SerialNumber,
};
use slackwater_api::TlsFiles;
use time::{Duration, OffsetDateTime};

use crate::config::CertificateArguments;
use crate::data_file;
use crate::error::ServerError;

const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";
const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";

/// What the authority is called. It needs no other name: clients tell authorities by their keys.
const AUTHORITY_NAME: &str = "Slackwater appliance authority";

/// The authority outlives the certificates that it signs, so that clients need not be changed.
const AUTHORITY_DAYS: i64 = 3650;

/// The clocks of clients may be behind by so much.
const CLOCK_DAYS: i64 = 1;

/// By these the appliance itself, and what is forwarded to it, reaches it.
const OWN_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Rights of what all may read, and of keys.
const PUBLIC_MODE: u32 = 0o644;
const SECRET_MODE: u32 = 0o600;

/// Rights of a directory that is made, in which other settings may lie.
const DIRECTORY_MODE: u32 = 0o755;

/// Random bytes of a serial number (RFC 5280 section 4.1.2.2: at most 20, and each number once).
const SERIAL_BYTES: usize = 16;

/// Makes the certificate, and the authority if there is none yet.
///
/// # Errors
/// A name is none; something is there that is not to be replaced, or does not fit; a file cannot be written.
pub fn run(arguments: &CertificateArguments) -> Result<(), ServerError> {
    let directory = &arguments.directory;
    let names = names(&arguments.names)?;
    let is_there = |name: &str| directory.join(name).exists();
    if is_there(CERTIFICATE) && !arguments.renew {
        let text =
            format!("{} is there already: --renew makes another one", at(directory, CERTIFICATE));
        return Err(ServerError::Certificate(text));
    }
    // Of a command that was cut off there is an authority, too.
    if is_there(KEY) && !is_there(CERTIFICATE) && !is_there(AUTHORITY) {
        let text = format!(
            "{} is there, but no {CERTIFICATE}: name another directory",
            at(directory, KEY)
        );
        return Err(ServerError::Certificate(text));
    }
    if arguments.renew && !is_there(AUTHORITY) {
        let text = format!(
            "{} is not there: put it and {AUTHORITY_KEY} back for the renewal, or name another directory",
            at(directory, AUTHORITY)
        );
        return Err(ServerError::Certificate(text));
    }
    if !directory.exists() {
        std::fs::create_dir_all(directory)
            .and_then(|()| {
                std::fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))
            })
            .map_err(|error| failed("make", directory, &error))?;
    }
    let is_new = !is_there(AUTHORITY);
    let authority = if is_new { make_authority(directory)? } else { load_authority(directory)? };
    let key = if is_there(KEY) { load_key(directory, KEY)? } else { generate()? };
    let expires = OffsetDateTime::now_utc() + Duration::days(arguments.days.into());
    let certificate = of_server(&names, expires)?
        .signed_by(&key, &authority)
        .map_err(|error| refused("sign the certificate", &error))?;
    if !is_there(KEY) {
        put(directory, KEY, &key.serialize_pem(), SECRET_MODE)?;
    }
    put(directory, CERTIFICATE, &certificate.pem(), PUBLIC_MODE)?;
    tell(directory, &names, is_new, expires)
}

/// The names to be certified, each once.
fn names(given: &[String]) -> Result<Vec<String>, ServerError> {
    let mut names: Vec<String> = Vec::new();
    for name in given.iter().map(String::as_str).chain(OWN_NAMES) {
        if !is_name(name) {
            let text = format!(
                "`{}` is neither a host name nor an IP address: write it without scheme and port",
                name.escape_debug()
            );
            return Err(ServerError::Certificate(text));
        }
        if !names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// A host name (RFC 1123 section 2.1), with a wildcard as its first label if need be, or an address.
fn is_name(name: &str) -> bool {
    let host = name.strip_prefix("*.").unwrap_or(name);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.parse::<IpAddr>().is_ok() || (host.len() <= 253 && host.split('.').all(is_label))
}

fn generate() -> Result<KeyPair, ServerError> {
    KeyPair::generate().map_err(|error| refused("make a key", &error))
}

fn of_authority() -> CertificateParams {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, AUTHORITY_NAME);
    let mut params = CertificateParams::default();
    params.distinguished_name = name;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = OffsetDateTime::now_utc();
    params.not_before = now - Duration::days(CLOCK_DAYS);
    params.not_after = now + Duration::days(AUTHORITY_DAYS);
    params
}

fn of_server(
    names: &[String],
    not_after: OffsetDateTime,
) -> Result<CertificateParams, ServerError> {
    let mut params = CertificateParams::new(names.to_vec())
        .map_err(|error| refused("take the names", &error))?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "Slackwater appliance");
    params.distinguished_name = name;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    // A renewal has the same key, of which rcgen would make the same number.
    let mut serial = [0; SERIAL_BYTES];
    getrandom::fill(&mut serial)
        .map_err(|error| ServerError::Certificate(format!("cannot have random bytes: {error}")))?;
    // Above 0, and as it is without a byte in front.
    serial[0] = serial[0] & 0x7f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = OffsetDateTime::now_utc() - Duration::days(CLOCK_DAYS);
    params.not_after = not_after;
    Ok(params)
}

/// Makes the authority: its key first, without which the certificate is of no use.
fn make_authority(directory: &Path) -> Result<Issuer<'static, KeyPair>, ServerError> {
    if directory.join(AUTHORITY_KEY).exists() {
        let text = format!(
            "{} is there, but no {AUTHORITY}: put that back, or name another directory",
            at(directory, AUTHORITY_KEY)
        );
        return Err(ServerError::Certificate(text));
    }
    let (key, params) = (generate()?, of_authority());
    let certificate =
        params.self_signed(&key).map_err(|error| refused("make the authority", &error))?;
    put(directory, AUTHORITY_KEY, &key.serialize_pem(), SECRET_MODE)?;
    put(directory, AUTHORITY, &certificate.pem(), PUBLIC_MODE)?;
    Ok(Issuer::new(params, key))
}

/// The authority that is there: one of this command, whose name is known.
fn load_authority(directory: &Path) -> Result<Issuer<'static, KeyPair>, ServerError> {
    if !directory.join(AUTHORITY_KEY).exists() {
        let text = format!(
            "{} is not there: bring it back for the renewal, or name another directory",
            at(directory, AUTHORITY_KEY)
        );
        return Err(ServerError::Certificate(text));
    }
    let key = load_key(directory, AUTHORITY_KEY)?;
    let path = directory.join(AUTHORITY);
    let files = TlsFiles { cert: path.clone(), key: directory.join(AUTHORITY_KEY) };
    let (certificates, _) =
        files.read().map_err(|error| ServerError::Certificate(error.to_string()))?;
    // Not parsed: what this command made has these bytes in it as they are.
    let holds = |part: &[u8]| {
        let found = |der: &[u8]| der.windows(part.len()).any(|window| window == part);
        certificates.first().is_some_and(|certificate| found(certificate))
    };
    if holds(key.public_key_raw()) && holds(AUTHORITY_NAME.as_bytes()) {
        return Ok(Issuer::new(of_authority(), key));
    }
    let text = format!(
        "{} is not the certificate of {AUTHORITY_KEY}, or none that this command made: name another directory",
        path.display()
    );
    Err(ServerError::Certificate(text))
}

fn load_key(directory: &Path, name: &str) -> Result<KeyPair, ServerError> {
    let path = directory.join(name);
    let text = std::fs::read_to_string(&path).map_err(|error| failed("read", &path, &error))?;
    KeyPair::from_pem(&text)
        .map_err(|error| refused(&format!("use the key in {}", path.display()), &error))
}

/// Writes a file, durably, for the owner of the directory.
fn put(directory: &Path, name: &str, content: &str, mode: u32) -> Result<(), ServerError> {
    let give_rights = |file: &File| {
        let (owner, made) = (directory.metadata()?, file.metadata()?);
        if (owner.uid(), owner.gid()) != (made.uid(), made.gid()) {
            std::os::unix::fs::fchown(file, Some(owner.uid()), Some(owner.gid()))?;
        }
        file.set_permissions(Permissions::from_mode(mode))
    };
    data_file::replace_with(directory, name, content.as_bytes(), give_rights)
        .map_err(|error| failed("write", &directory.join(name), &error))
}

fn tell(
    directory: &Path,
    names: &[String],
    is_new: bool,
    expires: OffsetDateTime,
) -> Result<(), ServerError> {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{}: for {}, until {}",
        at(directory, CERTIFICATE),
        names.join(", "),
        expires.date()
    );
    let _ = writeln!(
        text,
        "  the server: --tls-cert {} --tls-key {}; its user must be able to read both",
        at(directory, CERTIFICATE),
        at(directory, KEY)
    );
    if is_new {
        let _ = writeln!(text, "{}: give it to clients, it is no secret", at(directory, AUTHORITY));
        let _ = writeln!(
            text,
            "  slackwater: SLACKWATER_CA or --ca; the driver: `ca` in its configuration"
        );
        let _ = writeln!(
            text,
            "{}: signs certificates that these clients trust; keep it where no other reads it, `--renew` needs it",
            at(directory, AUTHORITY_KEY)
        );
    } else {
        let _ =
            writeln!(text, "  clients go on as they are; the server takes it when it starts again");
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(ServerError::Output)
}

fn at(directory: &Path, name: &str) -> String {
    directory.join(name).display().to_string()
}

fn failed(action: &str, path: &Path, error: &io::Error) -> ServerError {
    ServerError::Certificate(format!("cannot {action} {}: {error}", path.display()))
}

fn refused(action: &str, error: &rcgen::Error) -> ServerError {
    ServerError::Certificate(format!("cannot {action}: {error}"))
}

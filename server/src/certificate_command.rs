//! `slackwaterd certificate`: makes what TLS needs, for those who have no authority of their own.
//!
//! ```text
//! ca-key.pem --signs--> ca.pem      the authority: clients know the appliance by it
//!     |
//!     +-------signs---> cert.pem    the appliance's: --tls-cert; its key is key.pem: --tls-key
//!     +-------signs---> worker-ID.pem, client-NAME.pem   of those who mount with --nfs-tls mutual; the keys are
//!                                                        worker-ID-key.pem and client-NAME-key.pem
//! ```
//! Invariants: nothing that is there is replaced, but a certificate when that is asked for; it keeps its key, so a crash
//! leaves a pair that fits. Keys are for their owner alone: the directory's.

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
use uuid::Uuid;

use crate::config::CertificateArguments;
use crate::data_file;
use crate::error::ServerError;

const AUTHORITY: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";

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

/// Whom a certificate is for.
enum Subject {
    /// The appliance, by these names.
    Appliance(Vec<String>),
    /// The worker with this id.
    Worker(Uuid),
    /// A machine of this name, which is no worker.
    Client(String),
}

impl Subject {
    /// The files of its certificate and of its key.
    fn files(&self) -> (String, String) {
        match self {
            Self::Appliance(_) => ("cert.pem".to_owned(), "key.pem".to_owned()),
            Self::Worker(id) => (format!("worker-{id}.pem"), format!("worker-{id}-key.pem")),
            Self::Client(name) => (format!("client-{name}.pem"), format!("client-{name}-key.pem")),
        }
    }

    /// The names that are certified.
    fn names(&self) -> Vec<String> {
        match self {
            Self::Appliance(names) => names.clone(),
            Self::Worker(id) => vec![id.to_string()],
            Self::Client(name) => vec![name.clone()],
        }
    }

    const fn title(&self) -> &'static str {
        match self {
            Self::Appliance(_) => "Slackwater appliance",
            Self::Worker(_) => "Slackwater worker",
            Self::Client(_) => "Slackwater client",
        }
    }

    const fn purpose(&self) -> ExtendedKeyUsagePurpose {
        match self {
            Self::Appliance(_) => ExtendedKeyUsagePurpose::ServerAuth,
            Self::Worker(_) | Self::Client(_) => ExtendedKeyUsagePurpose::ClientAuth,
        }
    }

    /// Where its two files go.
    fn use_of(&self, certificate: &str, key: &str) -> String {
        match self {
            Self::Appliance(_) => format!(
                "  the server: --tls-cert {certificate} --tls-key {key}; its user must be able to read both"
            ),
            Self::Worker(_) | Self::Client(_) => format!(
                "  take both to the machine. The driver: nfs-certificate and nfs-key in its configuration; tlshd: \
                 x509.certificate and x509.private_key\n  {key} is secret: remove it here once it is there"
            ),
        }
    }
}

/// Makes the certificate, and the authority if there is none yet.
///
/// # Errors
/// A name is none; something is there that is not to be replaced, or does not fit; a file cannot be written.
pub fn run(arguments: &CertificateArguments) -> Result<(), ServerError> {
    let subject = match (arguments.worker, &arguments.client) {
        (Some(id), _) => Subject::Worker(id),
        (None, Some(name)) => Subject::Client(client_name(name)?),
        (None, None) => Subject::Appliance(names(&arguments.names)?),
    };
    make(arguments, &subject)
}

/// The name of a machine that mounts the whole export; the id of a worker would be another right.
fn client_name(name: &str) -> Result<String, ServerError> {
    if Uuid::try_parse(name).is_ok() {
        let text = format!("`{name}` is the id of a worker: give it by --worker");
        return Err(ServerError::Certificate(text));
    }
    if name.starts_with("*.") || name.contains(':') {
        return Err(no_name(name));
    }
    require_name(name).map(|()| name.to_ascii_lowercase())
}

/// Refuses to replace what is there, or to go on from the half of it.
fn check(
    arguments: &CertificateArguments,
    certificate: &str,
    key: &str,
) -> Result<(), ServerError> {
    let directory = &arguments.directory;
    let is_there = |name: &str| directory.join(name).exists();
    let refused = |text| Err(ServerError::Certificate(text));
    if is_there(certificate) && !arguments.renew {
        let there = at(directory, certificate);
        return refused(format!("{there} is there already: --renew makes another one"));
    }
    // Of a command that was cut off there is an authority, too.
    if is_there(key) && !is_there(certificate) && !is_there(AUTHORITY) {
        let there = at(directory, key);
        return refused(format!("{there} is there, but no {certificate}: name another directory"));
    }
    if arguments.renew && !is_there(AUTHORITY) {
        return refused(format!(
            "{} is not there: put it and {AUTHORITY_KEY} back for the renewal, or name another directory",
            at(directory, AUTHORITY)
        ));
    }
    Ok(())
}

fn make(arguments: &CertificateArguments, subject: &Subject) -> Result<(), ServerError> {
    let directory = &arguments.directory;
    let (certificate_file, key_file) = subject.files();
    check(arguments, &certificate_file, &key_file)?;
    let is_there = |name: &str| directory.join(name).exists();
    if !directory.exists() {
        std::fs::create_dir_all(directory)
            .and_then(|()| {
                std::fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))
            })
            .map_err(|error| failed("make", directory, &error))?;
    }
    let is_new = !is_there(AUTHORITY);
    let authority = if is_new { make_authority(directory)? } else { load_authority(directory)? };
    let key = if is_there(&key_file) { load_key(directory, &key_file)? } else { generate()? };
    let expires = OffsetDateTime::now_utc() + Duration::days(arguments.days.into());
    let certificate = params_of(subject, expires)?
        .signed_by(&key, &authority)
        .map_err(|error| refused("sign the certificate", &error))?;
    let has_new_key = !is_there(&key_file);
    if has_new_key {
        put(directory, &key_file, &key.serialize_pem(), SECRET_MODE)?;
    }
    put(directory, &certificate_file, &certificate.pem(), PUBLIC_MODE)?;
    if has_new_key && arguments.renew {
        print(
            "the key was not here any more: the certificate is of another one; take both files to where they are used\n",
        )?;
    }
    tell(directory, subject, is_new, expires)
}

/// The names to be certified, each once.
fn names(given: &[String]) -> Result<Vec<String>, ServerError> {
    let mut names: Vec<String> = Vec::new();
    for name in given.iter().map(String::as_str).chain(OWN_NAMES) {
        require_name(name)?;
        if !names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn require_name(name: &str) -> Result<(), ServerError> {
    if is_name(name) { Ok(()) } else { Err(no_name(name)) }
}

fn no_name(name: &str) -> ServerError {
    ServerError::Certificate(format!(
        "`{}` is neither a host name nor an IP address: write it without scheme and port",
        name.escape_debug()
    ))
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

fn params_of(
    subject: &Subject,
    not_after: OffsetDateTime,
) -> Result<CertificateParams, ServerError> {
    let mut params = CertificateParams::new(subject.names())
        .map_err(|error| refused("take the names", &error))?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, subject.title());
    params.distinguished_name = name;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![subject.purpose()];
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
    subject: &Subject,
    is_new: bool,
    expires: OffsetDateTime,
) -> Result<(), ServerError> {
    let (certificate, key) = subject.files();
    let (certificate, key) = (at(directory, &certificate), at(directory, &key));
    let (names, date) = (subject.names().join(", "), expires.date());
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{certificate}: for {names}, until {date}");
    let _ = writeln!(text, "{}", subject.use_of(&certificate, &key));
    let is_of_client = !matches!(subject, Subject::Appliance(_));
    if is_new && is_of_client {
        let authority = at(directory, AUTHORITY);
        let _ = writeln!(
            text,
            "{authority}: a new authority. The server: --nfs-tls mutual --nfs-tls-client-ca {authority}"
        );
        let _ = writeln!(
            text,
            "{}: signs certificates of clients; keep it where no other reads it",
            at(directory, AUTHORITY_KEY)
        );
    } else if is_new {
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
    } else if !is_of_client {
        let _ =
            writeln!(text, "  clients go on as they are; the server takes it when it starts again");
    }
    print(&text)
}

fn print(text: &str) -> Result<(), ServerError> {
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

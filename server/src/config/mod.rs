//! Configuration: four layers of [`Settings`], checked into one [`Config`].
//!
//! ```text
//! flags > environment > file > defaults  --or-->  Settings  --check-->  Config
//! ```
//!
//! Invariants: a [`Config`] can be served as it is, but for what only the operating system
//! knows (addresses in use, the disk). No error and no text shows a secret.

mod check;
mod command_line;
mod error;
mod exposure;
mod file;
pub(crate) mod findings;
mod secret;
mod settings;
mod show;
mod size;
mod strength;
pub(crate) mod text_file;
mod tls;
pub(crate) mod tokens;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use command_line::{
    CertificateArguments, CheckArguments, Command, CommandLine, ConfigCommand, ParsedCommandLine,
    TokenCommand,
};
pub use error::ConfigError;
pub use findings::Finding;
pub use secret::{REDACTED, Secret};
pub use settings::{LogFilter, LogFormat, NfsTlsMode, Parsed, Settings};
pub use size::{Size, SizeError};
use slackwater_api::{Token, VmstoreCredentials};
use slackwater_nfs::{ClientRule, Squash};
pub use strength::DIFFERENT_CHARACTERS_MIN;
pub use text_file::FILE_BYTES_MAX;
pub use tls::NfsTlsPolicy;
pub use tokens::{TOKEN_CHARACTERS_MIN, TOKENS_MAX, TokenFile};

use crate::memory::MemoryPlan;

/// Addresses of NFS: more than a machine has networks for storage.
pub const NFS_LISTEN_MAX: usize = 8;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the store lives.
    pub data_dir: PathBuf,
    /// Where NFS listens; at least one address, and at most [`NFS_LISTEN_MAX`].
    pub nfs_listen: Vec<SocketAddr>,
    /// Where PORTMAP alone listens, by TCP and UDP.
    pub portmap_listen: Option<SocketAddr>,
    /// Where the REST API listens.
    pub api_listen: SocketAddr,
    /// Where the page of metrics alone is served, to all who reach it.
    pub metrics_listen: Option<SocketAddr>,
    /// Certificate and key, if the REST API speaks TLS, and NFS may.
    pub tls: Option<TlsPaths>,
    /// Whether NFS speaks TLS; not [`NfsTlsPolicy::Off`] only with [`Self::tls`].
    pub nfs_tls: NfsTlsPolicy,
    /// The file of the token that the server makes itself, if it has no token files.
    pub admin_token_file: Option<PathBuf>,
    /// Who may use the REST API; empty: the bearer of [`Self::admin_token_file`], or else all users on loopback.
    pub tokens: Vec<Token>,
    /// The files that these are from, which are read again when they change.
    pub token_files: Vec<TokenFile>,
    /// Who may use the VMstore-compatible API; `None`: it is off.
    pub vmstore: Option<VmstoreCredentials>,
    /// Bytes that the store may occupy; `None`: all of the file system's.
    pub capacity_bytes: Option<u64>,
    /// The shares of the memory budget.
    pub memory: MemoryPlan,
    /// Compress chunks.
    pub compress: bool,
    /// Age at which what is published ends; `None`: never.
    pub unpublish_after: Option<Duration>,
    /// Age at which unstable writes are committed.
    pub dirty_age: Duration,
    /// Bytes a second that compaction may rewrite.
    pub compaction_bytes_per_second: u64,
    /// Bytes a second that are read to find damage; 0: none.
    pub scrub_bytes_per_second: u64,
    /// What clients mount.
    pub export_path: String,
    /// Whose identity is taken from them.
    pub squash: Squash,
    /// Who they become.
    pub anonymous_uid: u32,
    /// And of which group.
    pub anonymous_gid: u32,
    /// Who may mount; `None`: loopback only.
    pub nfs_clients: Option<Vec<ClientRule>>,
    /// Refuse clients with a source port from 1024 on.
    pub nfs_privileged_port: bool,
    /// Let each listed address mount the whole export.
    pub insecure_address_only: bool,
    /// Let all in by REST without a token, on loopback.
    pub insecure_no_tokens: bool,
    /// Serve REST without TLS beyond loopback.
    pub insecure_plain_http: bool,
    /// Take address rules for more than a site.
    pub insecure_any_client: bool,
    /// NFS connections served at once.
    pub nfs_connections: usize,
    /// NFS calls of one kind that may wait for the disk at once.
    pub nfs_io_threads: usize,
    /// What is logged.
    pub log: LogFilter,
    /// And in which form.
    pub log_format: LogFormat,
    /// The files that it names: itself, tokens, certificates, passwords. They may lie in the data directory.
    pub files: Vec<PathBuf>,
    /// What is unsafe about it.
    pub findings: Vec<Finding>,
}

/// Files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPaths {
    /// Certificate chain, PEM.
    pub certificate: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
}

/// A configuration and the text that shows it.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// What `slackwaterd config check` prints.
    pub shown: String,
}

/// Reads the configuration that a command line asks for.
///
/// # Errors
/// A file cannot be read, or a setting is wrong.
pub fn load(parsed: &ParsedCommandLine) -> Result<Loaded, ConfigError> {
    let from_file = from_file(parsed)?;
    let effective = parsed.line.settings.clone().or(from_file.clone()).or(Settings::defaults());
    let shown = show::show(parsed, &from_file, &effective).map_err(|error| ConfigError::Value {
        key: "configuration",
        got: error.to_string(),
        expected: "every path and name must be UTF-8".to_owned(),
    })?;
    let file = parsed.line.config.as_deref().map(|path| (path, &from_file));
    let config = Config::try_from(effective.clone())?;
    let mut findings = findings::find(&effective, &config.token_files, file);
    findings.extend(findings::of_data_dir(&config.data_dir));
    findings.extend(findings::of_older_release(&config));
    findings.extend(findings::of_nfs(&config));
    findings.extend(findings::of_tokens(&config));
    findings.extend(findings::of_rest(&config));
    let files = effective.files().chain(parsed.line.config.clone()).collect();
    Ok(Loaded { config: Config { files, findings, ..config }, shown })
}

/// The token files that a command line asks for, whether they are there or not.
///
/// # Errors
/// The configuration file cannot be read.
pub fn token_files(parsed: &ParsedCommandLine) -> Result<Vec<PathBuf>, ConfigError> {
    let effective = parsed.line.settings.clone().or(from_file(parsed)?);
    Ok(effective.token_file.unwrap_or_default())
}

fn from_file(parsed: &ParsedCommandLine) -> Result<Settings, ConfigError> {
    parsed.line.config.as_deref().map_or_else(|| Ok(Settings::default()), file::read)
}

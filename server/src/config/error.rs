//! What can be wrong with a configuration.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use slackwater_nfs::ClientRule;

use super::size::Size;

/// A fault, or faults, of the configuration; the message names the setting, what was found and what was
/// expected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file that the configuration names, or the configuration file itself.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file too long to be what it should be.
    #[error("{} is longer than the limit of {limit} bytes", path.display())]
    FileTooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// A file that is not text.
    #[error("{} is not UTF-8 text: only its first {valid_bytes} bytes are", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Bytes before the first that is wrong.
        valid_bytes: usize,
    },
    /// The configuration file is not TOML, has an unknown key, or a value of no meaning.
    #[error("{}:{line}:{column}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// Got and expected.
        reason: String,
    },
    /// A setting that has no default was not given.
    #[error("{key} is not set: give --{key}, {variable} or `{key}` in the configuration file")]
    Missing {
        /// The setting.
        key: &'static str,
        /// Its environment variable.
        variable: String,
    },
    /// A setting that means nothing without another.
    #[error("{given} is set without {needed}: set both or neither")]
    Alone {
        /// The setting that was given.
        given: &'static str,
        /// The setting that it needs.
        needed: &'static str,
    },
    /// Two settings of which only one can hold.
    #[error("{first} and {second} are both set: keep one of them")]
    Both {
        /// The one.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A setting whose value cannot be used.
    #[error("{key} is `{got}`: {expected}")]
    Value {
        /// The setting.
        key: &'static str,
        /// Its value.
        got: String,
        /// What would be right.
        expected: String,
    },
    /// Too little memory to work with.
    #[error("memory is {got}: at least {expected} is needed")]
    Memory {
        /// What was given.
        got: Size,
        /// The minimum.
        expected: Size,
    },
    /// A line of a token file that cannot be read. The line itself holds a secret and is not
    /// shown.
    #[error("{}:{line}: {reason}; expected NAME ROLE blake3:HASH, or NAME ROLE SECRET", path.display())]
    Token {
        /// The token file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A secret's file without one.
    #[error("{} holds no {what}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
    },
    /// NFS would be open to every machine that reaches it.
    #[error(
        "{setting} has {address}, which other machines reach, and nothing says which of them \
         may mount: give --nfs-client, such as --nfs-client 10.0.0.0/8:rw"
    )]
    OpenNfs {
        /// The setting that has it.
        setting: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// The REST API would be open to every machine that reaches it.
    #[error(
        "api-listen is {address}, which other machines reach, and there is no token file: \
         give --token-file"
    )]
    OpenApi {
        /// The address.
        address: SocketAddr,
    },
    /// Tokens would go over the network in plain text.
    #[error(
        "api-listen is {address}, which other machines reach, and there is no TLS: tokens and credentials would be sent \
         in plain text: give --tls-cert and --tls-key; or listen on loopback, behind a proxy that speaks TLS; \
         --insecure-plain-http true serves all the same"
    )]
    PlainHttp {
        /// The address.
        address: SocketAddr,
    },
    /// More than one fault, a line each.
    #[error("{}", lines(.0))]
    Several(Vec<Self>),
    /// All of the Internet could try to mount.
    #[error(
        "nfs-client has {rule}, which is more than the machines of one site: list the networks of your clients, such as \
         --nfs-client 10.0.0.0/8:rw; --insecure-any-client true takes it all the same"
    )]
    AnyClient {
        /// The rule.
        rule: ClientRule,
    },
}

fn lines(faults: &[ConfigError]) -> String {
    faults.iter().map(ConfigError::to_string).collect::<Vec<_>>().join("\n")
}

/// Collects faults, so that all are told and not the first alone.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<ConfigError>);

impl Faults {
    /// The value; or none, and its fault is kept.
    pub(super) fn keep<T>(&mut self, result: Result<T, ConfigError>) -> Option<T> {
        result.map_err(|fault| self.0.push(fault)).ok()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// All faults, if there is any.
    pub(super) fn into_result(mut self) -> Result<(), ConfigError> {
        match self.0.len() {
            0 | 1 => self.0.pop().map_or(Ok(()), Err),
            _ => Err(ConfigError::Several(self.0)),
        }
    }
}

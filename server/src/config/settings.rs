//! The settings as they are given: one struct for the command line, the environment, the
//! configuration file and the defaults, so that an option has one name in all four.
//!
//! ```text
//! --memory 2GiB  >  SLACKWATER_MEMORY=2GiB  >  memory = "2GiB" in the file  >  default
//! ```
//!
//! Nothing is checked across settings here; [`super::Config`] does that.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};
use slackwater_nfs::{ClientRule, Squash};
use tracing_subscriber::EnvFilter;

use super::secret::Secret;
use super::size::Size;

/// One layer of settings; `None` leaves a setting to the layer below.
#[derive(Args, Clone, Debug, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Directory of the store; made if missing
    #[arg(long, env = "SLACKWATER_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Address of NFS, MOUNT and PORTMAP. May be given up to eight times [default: 127.0.0.1:2049]
    ///
    /// Or several, with commas between; [::]:2049 takes IPv4 as well. Port 0 takes a free one, which
    /// is printed. An address that other machines reach needs at least one --nfs-client.
    #[arg(long, env = "SLACKWATER_NFS_LISTEN", value_name = "ADDRESS:PORT", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_several", serialize_with = "one_or_list")]
    pub nfs_listen: Option<Vec<SocketAddr>>,

    /// Address of PORTMAP alone, for clients that ask port 111 where NFS is; off without
    ///
    /// By TCP and by UDP; what it tells is the port of the --nfs-listen with the same address, else of
    /// the first. `showmount` and the clients of Windows and ESXi ask there. Port 111 takes root or
    /// CAP_NET_BIND_SERVICE, and the machine's own rpcbind must not have it.
    #[arg(long, env = "SLACKWATER_PORTMAP_LISTEN", value_name = "ADDRESS:PORT")]
    pub portmap_listen: Option<SocketAddr>,

    /// Address of the REST API [default: 127.0.0.1:8049]
    ///
    /// Port 0 takes a free one, which is printed. An address that other machines reach needs
    /// a --token-file.
    #[arg(long, env = "SLACKWATER_API_LISTEN", value_name = "ADDRESS:PORT")]
    pub api_listen: Option<SocketAddr>,

    /// Address of the page of metrics alone, without TLS and without a token; off by default
    ///
    /// For Prometheus on this machine, such as 127.0.0.1:9049. The page has numbers, and no names of files, images or
    /// users. With a token it is at the address of the REST API as well.
    #[arg(long, env = "SLACKWATER_METRICS_LISTEN", value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,

    /// Certificate chain of the REST API and of NFS (PEM): turns on TLS, together with --tls-key
    #[arg(long, env = "SLACKWATER_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of --tls-cert (PEM)
    #[arg(long, env = "SLACKWATER_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// RPC-with-TLS of NFS (RFC 9289) [default: offered with --tls-cert, else off]
    ///
    /// Clients that ask for it are encrypted: drivers that reach REST by https do, with the FUSE attach.
    /// Linux with `xprtsec=tls` encrypts data, but mounts in plain text, which `required` refuses. With
    /// `mutual` clients show a certificate of --nfs-tls-client-ca as well (`xprtsec=mtls`), and what they
    /// mounted is of no use to others.
    #[arg(long, env = "SLACKWATER_NFS_TLS", value_name = "MODE")]
    pub nfs_tls: Option<NfsTlsMode>,

    /// Certificates of the authorities (PEM) by which clients of NFS are known, with --nfs-tls mutual
    ///
    /// `slackwaterd certificate --worker ID` makes certificates of workers by the authority that it made, `ca.pem`.
    #[arg(long, env = "SLACKWATER_NFS_TLS_CLIENT_CA", value_name = "FILE")]
    pub nfs_tls_client_ca: Option<PathBuf>,

    /// Bearer tokens of the REST API, one a line: NAME ROLE blake3:HASH. May be given several times
    ///
    /// `slackwaterd token add` writes such lines. ROLE is admin, worker or read-only. A plain SECRET
    /// of at least 16 characters is taken in the place of its hash, too. Empty lines and lines that
    /// begin with # are skipped. The file is read again when it changes. Without this option the API
    /// serves loopback only, and calls need the token that the server makes: `admin-token` in its data
    /// directory, which its user and root alone read.
    #[arg(long, env = "SLACKWATER_TOKEN_FILE", value_name = "FILE", value_delimiter = ',')]
    pub token_file: Option<Vec<PathBuf>>,

    /// Without --token-file, let all users of this machine in as administrators [default: false]
    ///
    /// Also all containers on its network. Beside --token-file it has no effect.
    #[arg(long, env = "SLACKWATER_INSECURE_NO_TOKENS", value_name = "BOOL")]
    pub insecure_no_tokens: Option<bool>,

    /// Serve REST without TLS where other machines reach it [default: false]
    ///
    /// Tokens, credentials and passwords are then read by all who see the traffic, and all data can be
    /// changed on the way.
    #[arg(long, env = "SLACKWATER_INSECURE_PLAIN_HTTP", value_name = "BOOL")]
    pub insecure_plain_http: Option<bool>,

    /// User of the VMstore-compatible API; it is off without
    #[arg(long, env = "SLACKWATER_VMSTORE_USER", value_name = "NAME")]
    pub vmstore_user: Option<String>,

    /// Password of --vmstore-user: at least 12 characters, six different ones
    ///
    /// Every user of this machine can read a command line (ps), and often the environment of
    /// a service: prefer --vmstore-password-file.
    #[arg(
        long,
        env = "SLACKWATER_VMSTORE_PASSWORD",
        value_name = "SECRET",
        hide_env_values = true
    )]
    pub vmstore_password: Option<Secret>,

    /// File whose first line is the password of --vmstore-user: at least 12 characters, six different ones
    #[arg(long, env = "SLACKWATER_VMSTORE_PASSWORD_FILE", value_name = "FILE")]
    pub vmstore_password_file: Option<PathBuf>,

    /// Bytes that the store may occupy, such as 500GiB [default: all of the file system]
    #[arg(long, env = "SLACKWATER_CAPACITY", value_name = "SIZE")]
    pub capacity: Option<Size>,

    /// Memory of the whole process [default: 1GiB]
    #[arg(long, env = "SLACKWATER_MEMORY", value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Compress what shrinks by at least one eighth [default: true]
    #[arg(long, env = "SLACKWATER_COMPRESS", value_name = "BOOL")]
    pub compress: Option<bool>,

    /// Publish a snapshot no more when no image that refers to it was pushed for so many days [default: never]
    ///
    /// The appliance does not learn when a registry forgets an image. Images that are older, and refer to what only
    /// they need, can be pulled no more.
    #[arg(long, env = "SLACKWATER_UNPUBLISH_AFTER_DAYS", value_name = "DAYS")]
    pub unpublish_after_days: Option<u32>,

    /// Unstable writes older than this are committed without being asked for [default: 5]
    #[arg(long, env = "SLACKWATER_DIRTY_AGE_SECONDS", value_name = "SECONDS")]
    pub dirty_age_seconds: Option<u32>,

    /// Bytes a second that background compaction may rewrite [default: 64MiB]
    #[arg(long, env = "SLACKWATER_COMPACTION_RATE", value_name = "SIZE")]
    pub compaction_rate: Option<Size>,

    /// Bytes a second that are read to find damage early; 0: none [default: 4MiB]
    #[arg(long, env = "SLACKWATER_SCRUB_RATE", value_name = "SIZE")]
    pub scrub_rate: Option<Size>,

    /// Name under which clients mount the store [default: /slackwater]
    #[arg(long, env = "SLACKWATER_EXPORT_PATH", value_name = "PATH")]
    pub export_path: Option<String>,

    /// Users of a client that become the anonymous one [default: root_squash]
    ///
    /// root_squash, no_root_squash or all_squash, as in exports(5). Machines that run
    /// containers mount and write as root, which needs no_root_squash.
    #[arg(long, env = "SLACKWATER_SQUASH", value_name = "MODE")]
    pub squash: Option<Parsed<Squash>>,

    /// User id of squashed users [default: 65534]
    #[arg(long, env = "SLACKWATER_ANONYMOUS_UID", value_name = "UID")]
    pub anonymous_uid: Option<u32>,

    /// Group id of squashed users [default: 65534]
    #[arg(long, env = "SLACKWATER_ANONYMOUS_GID", value_name = "GID")]
    pub anonymous_gid: Option<u32>,

    /// Clients that may mount, such as 10.0.0.0/8:rw or 192.168.7.0/24:ro. May be given
    /// several times [default: loopback:rw]
    #[arg(long, env = "SLACKWATER_NFS_CLIENT", value_name = "CIDR:MODE", value_delimiter = ',')]
    pub nfs_client: Option<Vec<Parsed<ClientRule>>>,

    /// Serve only clients whose source port is below 1024, which takes root on Linux
    /// [default: false]
    #[arg(long, env = "SLACKWATER_NFS_PRIVILEGED_PORT", value_name = "BOOL")]
    pub nfs_privileged_port: Option<bool>,

    /// Let each address of --nfs-client mount the whole export, as release 0.2 did [default: false]
    ///
    /// All users and containers of a machine have its address: with true each of them mounts the whole
    /// export. With false all mount by secret paths, for which drivers ask by themselves: workers that
    /// joined reach their own files and snapshots alone, tokens the whole export (`slackwater
    /// mount-path`). Mounts by address, which drivers of release 0.2 make, are refused then, also those
    /// from before a restart.
    #[arg(long, env = "SLACKWATER_INSECURE_ADDRESS_ONLY", value_name = "BOOL")]
    pub insecure_address_only: Option<bool>,

    /// Take --nfs-client for more addresses than a site has [default: false]
    ///
    /// That is a network of fewer than 8 bits, or 16 with IPv6 (but for fc00::/7 and fe80::/10):
    /// 0.0.0.0/0 and ::/0 are all of the Internet. NFS in plain text shows the secret paths to all
    /// who see the traffic.
    #[arg(long, env = "SLACKWATER_INSECURE_ANY_CLIENT", value_name = "BOOL")]
    pub insecure_any_client: Option<bool>,

    /// NFS connections served at once; the first call of one more waits [default: 512]
    #[arg(long, env = "SLACKWATER_NFS_CONNECTIONS", value_name = "NUMBER")]
    pub nfs_connections: Option<u32>,

    /// NFS calls of one kind that may wait for the disk at once [default: 16]
    ///
    /// The kinds are: writes and commits, changes of names, all others.
    #[arg(long, env = "SLACKWATER_NFS_IO_THREADS", value_name = "NUMBER")]
    pub nfs_io_threads: Option<u32>,

    /// What is logged to standard error, such as debug or info,slackwater_nfs=trace
    /// [default: info]
    #[arg(long, env = "SLACKWATER_LOG", value_name = "FILTER")]
    pub log: Option<Parsed<LogFilter>>,

    /// Form of the log [default: text]
    #[arg(long, env = "SLACKWATER_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

impl Settings {
    /// The lowest layer. What is `None` here has no default: it must be given or is off.
    #[must_use]
    pub fn defaults() -> Self {
        Self {
            nfs_listen: Some(vec![(Ipv4Addr::LOCALHOST, 2049).into()]),
            api_listen: Some((Ipv4Addr::LOCALHOST, 8049).into()),
            memory: Some(Size::from_bytes(1 << 30)),
            compress: Some(true),
            dirty_age_seconds: Some(5),
            compaction_rate: Some(Size::from_bytes(64 << 20)),
            scrub_rate: Some(Size::from_bytes(4 << 20)),
            export_path: Some("/slackwater".to_owned()),
            squash: Squash::default().to_string().parse().ok(),
            anonymous_uid: Some(65534),
            anonymous_gid: Some(65534),
            nfs_privileged_port: Some(false),
            insecure_address_only: Some(false),
            insecure_no_tokens: Some(false),
            insecure_plain_http: Some(false),
            insecure_any_client: Some(false),
            nfs_connections: Some(512),
            nfs_io_threads: Some(16),
            log: "info".parse().ok(),
            log_format: Some(LogFormat::Text),
            ..Self::default()
        }
    }

    /// The files that this layer names.
    pub(super) fn files(&self) -> impl Iterator<Item = PathBuf> {
        let files =
            [&self.tls_cert, &self.tls_key, &self.nfs_tls_client_ca, &self.vmstore_password_file];
        let tokens = self.token_file.iter().flatten();
        files.into_iter().flatten().chain(tokens).cloned()
    }

    /// This layer, with `lower` for what it leaves open. A list is taken whole, never joined.
    #[must_use]
    pub fn or(self, lower: Self) -> Self {
        // One secret in two forms: a password given here must not meet the other form of a
        // lower layer.
        let has_password = self.vmstore_password.is_some() || self.vmstore_password_file.is_some();
        let (lower_password, lower_password_file) = match has_password {
            true => (None, None),
            false => (lower.vmstore_password, lower.vmstore_password_file),
        };
        Self {
            data_dir: self.data_dir.or(lower.data_dir),
            nfs_listen: self.nfs_listen.or(lower.nfs_listen),
            portmap_listen: self.portmap_listen.or(lower.portmap_listen),
            api_listen: self.api_listen.or(lower.api_listen),
            metrics_listen: self.metrics_listen.or(lower.metrics_listen),
            tls_cert: self.tls_cert.or(lower.tls_cert),
            tls_key: self.tls_key.or(lower.tls_key),
            nfs_tls: self.nfs_tls.or(lower.nfs_tls),
            nfs_tls_client_ca: self.nfs_tls_client_ca.or(lower.nfs_tls_client_ca),
            token_file: self.token_file.or(lower.token_file),
            vmstore_user: self.vmstore_user.or(lower.vmstore_user),
            vmstore_password: self.vmstore_password.or(lower_password),
            vmstore_password_file: self.vmstore_password_file.or(lower_password_file),
            capacity: self.capacity.or(lower.capacity),
            memory: self.memory.or(lower.memory),
            compress: self.compress.or(lower.compress),
            unpublish_after_days: self.unpublish_after_days.or(lower.unpublish_after_days),
            dirty_age_seconds: self.dirty_age_seconds.or(lower.dirty_age_seconds),
            compaction_rate: self.compaction_rate.or(lower.compaction_rate),
            scrub_rate: self.scrub_rate.or(lower.scrub_rate),
            export_path: self.export_path.or(lower.export_path),
            squash: self.squash.or(lower.squash),
            anonymous_uid: self.anonymous_uid.or(lower.anonymous_uid),
            anonymous_gid: self.anonymous_gid.or(lower.anonymous_gid),
            nfs_client: self.nfs_client.or(lower.nfs_client),
            nfs_privileged_port: self.nfs_privileged_port.or(lower.nfs_privileged_port),
            insecure_address_only: self.insecure_address_only.or(lower.insecure_address_only),
            insecure_no_tokens: self.insecure_no_tokens.or(lower.insecure_no_tokens),
            insecure_plain_http: self.insecure_plain_http.or(lower.insecure_plain_http),
            insecure_any_client: self.insecure_any_client.or(lower.insecure_any_client),
            nfs_connections: self.nfs_connections.or(lower.nfs_connections),
            nfs_io_threads: self.nfs_io_threads.or(lower.nfs_io_threads),
            log: self.log.or(lower.log),
            log_format: self.log_format.or(lower.log_format),
        }
    }
}

/// One value alone is written so, as releases up to 0.2 read it.
#[expect(clippy::ref_option, reason = "serde gives the field as it is")]
fn one_or_list<S: Serializer>(
    addresses: &Option<Vec<SocketAddr>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match addresses.as_deref() {
        Some([address]) => address.serialize(serializer),
        _ => addresses.serialize(serializer),
    }
}

/// A list, or one value alone.
fn one_or_several<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<SocketAddr>>, D::Error> {
    struct OneOrSeveral;

    impl<'de> de::Visitor<'de> for OneOrSeveral {
        type Value = Vec<SocketAddr>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an address with a port, or a list of such")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
            let expected = |_| E::invalid_value(de::Unexpected::Str(text), &self);
            text.parse().map(|address| vec![address]).map_err(expected)
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut addresses = Vec::new();
            while let Some(address) = list.next_element()? {
                addresses.push(address);
            }
            Ok(addresses)
        }
    }

    deserializer.deserialize_any(OneOrSeveral).map(Some)
}

/// Whether NFS speaks TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NfsTlsMode {
    /// Not at all
    Off,
    /// With clients that ask for it
    Offered,
    /// With all but this machine's own: others are refused without
    Required,
    /// The same with certificates of clients: without one others mount, and call nothing else
    Mutual,
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// A filter of log events, checked when it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter(String);

impl LogFilter {
    /// The filter in the form that the log takes.
    #[must_use]
    pub fn to_env_filter(&self) -> EnvFilter {
        // `from_str` below refused every text that this could drop a part of.
        EnvFilter::new(&self.0)
    }
}

impl FromStr for LogFilter {
    type Err = tracing_subscriber::filter::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EnvFilter::builder().parse(text)?;
        Ok(Self(text.to_owned()))
    }
}

/// A value read from text by [`FromStr`], which keeps its text to be shown again.
#[derive(Clone, Debug)]
pub struct Parsed<T> {
    text: String,
    value: T,
}

impl<T> Parsed<T> {
    /// The value.
    pub const fn value(&self) -> &T {
        &self.value
    }

    /// The text that it was read from.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl<T: FromStr> FromStr for Parsed<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        Ok(Self { value: text.parse()?, text: text.to_owned() })
    }
}

impl<T> Serialize for Parsed<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Parsed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|error| de::Error::custom(format_args!("`{}`: {error}", text.escape_debug())))
    }
}

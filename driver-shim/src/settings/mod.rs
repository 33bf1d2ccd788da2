//! The driver's settings: one struct for the command line, the environment, the configuration
//! file and the defaults, so that an option has one name in all four.
//!
//! ```text
//! --state-dir DIR > SLACKWATER_STATE_DIR > state-dir in the file > default --> Settings
//!                                                          Settings --check--> Config
//! ```
//!
//! Invariants: a [`Config`] can be worked with as it is, but for what only the machine and the
//! appliance know. No error and no text shows the token.

mod certificate;
mod config;
mod layers;
mod size;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use slackwater_attach::Method;
use slackwater_client::{ClientError, TokenError};
use tracing_subscriber::EnvFilter;

use crate::small_file;
use crate::worker::Push;

pub(crate) use certificate::attach_choice;
pub(crate) use config::read_token;
pub use config::{Config, Target};
pub use layers::LayersChoice;
pub use size::{Size, SizeError};

/// Where containerd itself listens, as its packages have it.
pub(crate) const CONTAINERD_API: &str = "/run/containerd/containerd.sock";

/// The namespace of Kubernetes' runtime interface, whose clients pull and run images and do nothing else with them
/// (containerd, `internal/cri/constants`).
const CRI_NAMESPACE: &str = "k8s.io";

/// One layer of settings; `None` leaves a setting to the layer below.
#[derive(Args, Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Address of the appliance's REST face [default: http://127.0.0.1:8049]
    #[arg(long, env = "SLACKWATER_API", value_name = "URL")]
    pub api: Option<String>,

    /// Address of its NFS face, HOST or HOST:PORT [default: host of --api, port 2049]
    #[arg(long, env = "SLACKWATER_NFS", value_name = "ADDRESS")]
    pub nfs: Option<String>,

    /// Its export path, below which the secret path is that it gives [default: /slackwater]
    #[arg(long, env = "SLACKWATER_EXPORT_PATH", value_name = "PATH")]
    pub export_path: Option<String>,

    /// File that holds the bearer token of its REST face; a worker that joined needs none, and does not show its
    /// credential where one is given
    #[arg(long, env = "SLACKWATER_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// File with the certificate (PEM) of the authority to trust, instead of the system's
    #[arg(long, env = "SLACKWATER_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,

    /// File with the certificate (PEM) of this worker, for an appliance whose nfs-tls is `mutual`; with --nfs-key
    ///
    /// It names the worker by its id, as that of `slackwaterd certificate --worker ID` does. It is read for each
    /// connection: one that was renewed needs no restart.
    #[arg(long, env = "SLACKWATER_NFS_CERTIFICATE", value_name = "FILE")]
    pub nfs_certificate: Option<PathBuf>,

    /// File with the private key (PEM) of --nfs-certificate
    #[arg(long, env = "SLACKWATER_NFS_KEY", value_name = "FILE")]
    pub nfs_key: Option<PathBuf>,

    /// Directory of the driver's own state, and of what it mounts; made if missing [default: /var/lib/slackwater-driver]
    #[arg(long, env = "SLACKWATER_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// Directory of the blocks that this worker keeps [default: cache in --state-dir]
    #[arg(long, env = "SLACKWATER_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Bytes that they may occupy; used when attaching by fuse [default: 10GiB]
    #[arg(long, env = "SLACKWATER_CACHE_SIZE", value_name = "SIZE")]
    pub cache_size: Option<Size>,

    /// Size of the disk of a container or layer, which is sparse [default: 64GiB]
    ///
    /// Every worker of an appliance needs the same, to share unpacked images where layers are disks. Where they are
    /// images all containers share a disk of 1 TiB, or of this size if it is larger.
    #[arg(long, env = "SLACKWATER_DISK_SIZE", value_name = "SIZE")]
    pub disk_size: Option<Size>,

    /// How the layers of containerd's images are kept [default: auto]
    ///
    /// With `images` each layer is an EROFS image of its own, mounted once for all containers of this machine, whose
    /// overlay has a disk for what they write: pulls unpack and containers start faster, and share their page cache.
    /// Needs the differ that `engine-config` prints, and EROFS. With `disks` each layer is a disk that has all layers
    /// below it, too, and each container a clone of one: commits by reference take constant time. `auto` takes images
    /// where the kernel mounts them without loop devices (6.12 and newer), else disks: give one of the others where the workers
    /// of an appliance have kernels of both kinds, as they share layers of one kind only. What was pulled stays as it
    /// is, with all that is above it.
    #[arg(long, env = "SLACKWATER_LAYERS", value_name = "KIND")]
    pub layers: Option<LayersChoice>,

    /// Take images that release 0.2 made by reference [default: false]
    ///
    /// Their references have no message authentication code (MAC) of the appliance: what runs in a container
    /// can write one, and become the snapshot of any published image, or of what is committed just now, if it
    /// knows the id.
    #[arg(long, env = "SLACKWATER_INSECURE_REFERENCES_WITHOUT_MAC", value_name = "BOOL")]
    pub insecure_references_without_mac: Option<bool>,

    /// Take unpacked layers only of workers (or tokens) of these names, separated by commas [default: of all]
    ///
    /// What a layer holds is the word of the worker that unpacked it. Name this worker, too. Layers
    /// that are on this worker already stay in use; and a worker can still write to a disk on which another
    /// one is unpacking.
    #[arg(long, env = "SLACKWATER_TRUSTED_MAKERS", value_name = "NAMES", value_delimiter = ',')]
    pub trusted_makers: Option<Vec<String>>,

    /// Do not share the layers that this worker unpacks with other workers [default: false]
    ///
    /// An image's configuration lists the hashes of its layers, so all who know the hashes of a shared layer can have
    /// it. Set this on workers that pull private images. They still take layers that other workers share, and
    /// images by reference still go from worker to worker. Layers that were shared before stay shared.
    #[arg(long, env = "SLACKWATER_PRIVATE_LAYERS", value_name = "BOOL")]
    pub private_layers: Option<bool>,

    /// Registries whose layers are for those who may pull them, separated by commas [default: none]
    ///
    /// Each as it stands in names of images: HOST, HOST:PORT, or with a repository behind it, such as
    /// registry.example.com/team. A layer that was pulled from one of these goes to another worker only if that
    /// lists the registry, too, and the registry shows it the blob: list the same on all workers. Layers whose
    /// registry the engine does not tell are kept on this worker.
    #[arg(
        long,
        env = "SLACKWATER_PRIVATE_REGISTRIES",
        value_name = "REGISTRIES",
        value_delimiter = ','
    )]
    pub private_registries: Option<Vec<String>>,

    /// File with this worker's credentials for them, in the form of Docker's config.json [default: none]
    ///
    /// It may name credential helpers, which are run. Without it registries are asked without a name.
    #[arg(long, env = "SLACKWATER_REGISTRY_CREDENTIALS", value_name = "FILE")]
    pub registry_credentials: Option<PathBuf>,

    /// File with certificates (PEM) of authorities to trust for them, beside the system's
    #[arg(long, env = "SLACKWATER_REGISTRY_CA", value_name = "FILE")]
    pub registry_ca: Option<PathBuf>,

    /// How what Docker commits and builds here is pushed [default: references]
    ///
    /// A reference is a few hundred bytes, whatever was changed, and needs a worker of the same appliance to be
    /// pulled. An ordinary layer is for any engine: to make it takes time by the number of files and the size of what
    /// was changed. A container may have it otherwise: docker run --storage-opt push=ordinary.
    #[arg(long, env = "SLACKWATER_PUSH", value_name = "FORM")]
    pub push: Option<Push>,

    /// How disks are attached [default: auto]
    #[arg(long, env = "SLACKWATER_ATTACH", value_name = "METHOD")]
    pub attach: Option<AttachChoice>,

    /// Serve Docker's graphdriver plugin here, such as /run/docker/plugins/slackwater.sock
    #[arg(long, env = "SLACKWATER_DOCKER_SOCKET", value_name = "PATH")]
    pub docker_socket: Option<PathBuf>,

    /// Where Docker itself listens, which is asked for the names of the images whose layers it pushes [default:
    /// /var/run/docker.sock]
    ///
    /// They are kept with what is published: see `image published`.
    #[arg(long, env = "SLACKWATER_DOCKER_API", value_name = "ADDRESS")]
    pub docker_api: Option<String>,

    /// Serve containerd's snapshotter plugin here, such as /run/slackwater/containerd.sock
    #[arg(long, env = "SLACKWATER_CONTAINERD_SOCKET", value_name = "PATH")]
    pub containerd_socket: Option<PathBuf>,

    /// Where containerd itself listens, which is given the layers that this driver makes of its snapshots, and asked for
    /// the blobs of those that it pulls [default:
    /// /run/containerd/containerd.sock]
    #[arg(long, env = "SLACKWATER_CONTAINERD_API", value_name = "PATH")]
    pub containerd_api: Option<PathBuf>,

    /// Namespaces of containerd in which a layer that the appliance has is not even fetched, separated by commas [default:
    /// k8s.io]
    ///
    /// There images are pulled in no time, and none of them can be saved, exported or pushed by the engine, nor built on
    /// elsewhere: it has no blobs. In all other namespaces the engine fetches the blobs, and with the differ that
    /// `engine-config` prints unpacks nothing of them. `*` stands for all; an empty text for none.
    #[arg(
        long,
        env = "SLACKWATER_LAYERS_WITHOUT_BLOBS",
        value_name = "NAMESPACES",
        value_delimiter = ','
    )]
    pub layers_without_blobs: Option<Vec<String>>,

    /// Socket between the daemon and its commands [default: control.sock in --state-dir]
    #[arg(long, env = "SLACKWATER_CONTROL_SOCKET", value_name = "PATH")]
    pub control_socket: Option<PathBuf>,

    /// Serve the metrics page here, such as 127.0.0.1:9101: whoever reaches it can read it
    #[arg(long, env = "SLACKWATER_METRICS_LISTEN", value_name = "ADDRESS")]
    pub metrics_listen: Option<SocketAddr>,

    /// What is logged to standard error, such as debug or info,slackwater_fuse=trace
    /// [default: info]
    #[arg(long, env = "SLACKWATER_LOG", value_name = "FILTER")]
    pub log: Option<LogFilter>,

    /// Form of the log [default: text]
    #[arg(long, env = "SLACKWATER_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

impl Settings {
    /// The lowest layer. What is `None` here must be given, is off, or follows from another.
    #[must_use]
    pub fn defaults() -> Self {
        Self {
            api: Some("http://127.0.0.1:8049".to_owned()),
            export_path: Some("/slackwater".to_owned()),
            state_dir: Some("/var/lib/slackwater-driver".into()),
            cache_size: Some(Size::from_bytes(10 << 30)),
            disk_size: Some(Size::from_bytes(64 << 30)),
            layers: Some(LayersChoice::Auto),
            insecure_references_without_mac: Some(false),
            private_layers: Some(false),
            push: Some(Push::References),
            attach: Some(AttachChoice::Auto),
            docker_api: Some("/var/run/docker.sock".to_owned()),
            containerd_api: Some(CONTAINERD_API.into()),
            layers_without_blobs: Some(vec![CRI_NAMESPACE.to_owned()]),
            log: "info".parse().ok(),
            log_format: Some(LogFormat::Text),
            ..Self::default()
        }
    }

    /// This layer, with `lower` for what it leaves open.
    #[must_use]
    pub fn or(self, lower: Self) -> Self {
        Self {
            api: self.api.or(lower.api),
            nfs: self.nfs.or(lower.nfs),
            export_path: self.export_path.or(lower.export_path),
            token_file: self.token_file.or(lower.token_file),
            ca: self.ca.or(lower.ca),
            nfs_certificate: self.nfs_certificate.or(lower.nfs_certificate),
            nfs_key: self.nfs_key.or(lower.nfs_key),
            state_dir: self.state_dir.or(lower.state_dir),
            cache_dir: self.cache_dir.or(lower.cache_dir),
            cache_size: self.cache_size.or(lower.cache_size),
            disk_size: self.disk_size.or(lower.disk_size),
            layers: self.layers.or(lower.layers),
            insecure_references_without_mac: self
                .insecure_references_without_mac
                .or(lower.insecure_references_without_mac),
            trusted_makers: self.trusted_makers.or(lower.trusted_makers),
            private_layers: self.private_layers.or(lower.private_layers),
            private_registries: self.private_registries.or(lower.private_registries),
            registry_credentials: self.registry_credentials.or(lower.registry_credentials),
            registry_ca: self.registry_ca.or(lower.registry_ca),
            push: self.push.or(lower.push),
            attach: self.attach.or(lower.attach),
            docker_socket: self.docker_socket.or(lower.docker_socket),
            docker_api: self.docker_api.or(lower.docker_api),
            containerd_socket: self.containerd_socket.or(lower.containerd_socket),
            containerd_api: self.containerd_api.or(lower.containerd_api),
            layers_without_blobs: self.layers_without_blobs.or(lower.layers_without_blobs),
            control_socket: self.control_socket.or(lower.control_socket),
            metrics_listen: self.metrics_listen.or(lower.metrics_listen),
            log: self.log.or(lower.log),
            log_format: self.log_format.or(lower.log_format),
        }
    }

    /// The settings of a configuration file.
    ///
    /// # Errors
    /// It cannot be read, is no TOML, or holds a key that there is not.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = String::from_utf8(read_bounded(path)?)
            .map_err(|_| SettingsError::NotText { path: path.to_owned() })?;
        toml::from_str(&text)
            .map_err(|source| SettingsError::Toml { path: path.to_owned(), source })
    }
}

/// The content of a small file.
fn read_bounded(path: &Path) -> Result<Vec<u8>, SettingsError> {
    small_file::read(path)
        .map_err(|source| SettingsError::Unreadable { path: path.to_owned(), source })
}

/// How disks are to be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachChoice {
    /// As it is mounted, else by the kernel's NFS client where there is one, else by FUSE; with --nfs-certificate by FUSE
    Auto,
    /// By the kernel's NFS client
    Nfs,
    /// By a FUSE process with a cache of blocks
    Fuse,
}

impl AttachChoice {
    /// The method, if one was chosen.
    #[must_use]
    pub fn method(self) -> Option<Method> {
        match self {
            Self::Auto => None,
            Self::Nfs => Some(Method::Nfs),
            Self::Fuse => Some(Method::Fuse),
        }
    }
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// A filter of log events, checked when it is read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct LogFilter(String);

impl LogFilter {
    /// The filter in the form that the log takes.
    #[must_use]
    pub fn to_env_filter(&self) -> EnvFilter {
        // `from_str` below refused every text that this could drop a part of.
        EnvFilter::new(&self.0)
    }

    /// The text that it was read from.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl FromStr for LogFilter {
    type Err = tracing_subscriber::filter::ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        EnvFilter::builder().parse(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for LogFilter {
    type Error = tracing_subscriber::filter::ParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<LogFilter> for String {
    fn from(filter: LogFilter) -> Self {
        filter.0
    }
}

/// Settings that cannot be worked with.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A file that cannot be read.
    #[error("read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file of bytes.
    #[error("{}: it is not text", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
    },
    /// A configuration file that is none.
    #[error("{}: {source}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// What is wrong, and in which line.
        source: toml::de::Error,
    },
    /// A setting that is needed.
    #[error(
        "no {key}: give --{key}, SLACKWATER_{}, or {key} in the configuration file",
        key.replace('-', "_").to_uppercase()
    )]
    Missing {
        /// The setting.
        key: &'static str,
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
    /// Nothing to serve.
    #[error(
        "no engine to serve: give --docker-socket, --containerd-socket or both \
         (`slackwater-driver engine-config` tells which paths the engines expect)"
    )]
    NoSocket,
    /// A setting that means nothing without another.
    #[error("{given} is set without {needed}: set both or neither")]
    Alone {
        /// The setting that was given.
        given: &'static str,
        /// The setting that it needs.
        needed: &'static str,
    },
    /// A name that stands for no address.
    #[error("nfs is `{got}`, which cannot be resolved: {source}")]
    Resolve {
        /// The name.
        got: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A token file without a token.
    #[error("token file {}: {source}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: TokenError,
    },
    /// A client that cannot be made of them.
    #[error(transparent)]
    Client(#[from] ClientError),
}

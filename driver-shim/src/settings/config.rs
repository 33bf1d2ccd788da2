//! Settings checked, and what is made of them: the client, the attach options, the command line
//! of the process that serves the export.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use slackwater_attach::{Options as AttachOptions, Rights};
use slackwater_client::{Client, ClientBuilder, Token};
use slackwater_fuse::WorkerCertificate;

use crate::containerd::Namespaces;
use crate::credential;
use crate::registry::Registries;
use crate::trust::{PrivateRegistry, PrivateRegistryParseError, Trust, TrustedMakers};
use crate::worker::{IMAGED_AFTER, LayerKind, Push, WorkerOptions};

use super::certificate;
use super::{AttachChoice, LogFilter, LogFormat, Settings, SettingsError, Size, read_bounded};

/// The port of NFS (RFC 1813 section 2.1).
const NFS_PORT: u16 = 2049;

/// The appliance, and how it is reached.
#[derive(Clone, Debug)]
pub struct Target {
    /// Address of its REST face.
    pub api: String,
    /// Host and port of its NFS face; the host may be a name.
    pub nfs: String,
    /// Path of its export.
    pub export_path: String,
    /// File with the bearer token, if the settings name one.
    pub token_file: Option<PathBuf>,
    /// Where the credential of this worker is once it joined; used unless a token file is named.
    pub credential: Option<PathBuf>,
    /// File with the certificate authority.
    pub ca: Option<PathBuf>,
    /// What this worker shows to its NFS face, if that asks for a certificate.
    pub certificate: Option<WorkerCertificate>,
}

impl Target {
    /// The appliance that the settings name.
    ///
    /// # Errors
    /// A setting that cannot be used.
    pub fn of(settings: &Settings) -> Result<Self, SettingsError> {
        let api = settings.api.clone().ok_or(SettingsError::Missing { key: "api" })?;
        let nfs = match &settings.nfs {
            Some(given) => with_port(given),
            None => format!("{}:{NFS_PORT}", host_of(&api)?),
        };
        let export_path = given(settings.export_path.clone(), "export-path")?;
        if !export_path.starts_with('/') {
            return Err(value("export-path", &export_path, "expected a path that begins with /"));
        }
        let (token_file, ca) = (settings.token_file.clone(), settings.ca.clone());
        let credential = settings.state_dir.as_deref().map(credential::path);
        let certificate = certificate::files(settings, &api)?;
        Ok(Self { api, nfs, export_path, token_file, credential, ca, certificate })
    }

    /// A client of its REST face.
    ///
    /// # Errors
    /// A file that cannot be read, or an address that is none.
    pub fn client(&self) -> Result<Client, SettingsError> {
        let mut builder = self.builder()?;
        if let Some(path) = &self.token_file {
            read_token(path)?;
            builder = builder.token_file(path);
        } else if let Some(path) = self.credential.as_deref().filter(|path| is_reached(path)) {
            builder = builder.token_file(path);
        }
        Ok(builder.build()?)
    }

    /// The client of the process that serves the export. It goes on for as long as there are containers: once the file
    /// of the token that it was started with is removed, it takes the credential.
    ///
    /// # Errors
    /// As [`Self::client`].
    pub fn client_of_export(&self) -> Result<Client, SettingsError> {
        let paths = self.token_file.iter().chain(&self.credential);
        Ok(paths.fold(self.builder()?, ClientBuilder::token_file).build()?)
    }

    /// Whether [`Self::client`] shows the credential of this worker, which reaches its own files alone.
    #[must_use]
    pub fn shows_credential(&self) -> bool {
        self.token_file.is_none() && self.credential.as_ref().is_some_and(|path| path.exists())
    }

    /// A client of its REST face that sends this token.
    ///
    /// # Errors
    /// As [`Self::client`].
    pub fn client_with(&self, token: Token) -> Result<Client, SettingsError> {
        Ok(self.builder()?.token(token).build()?)
    }

    fn builder(&self) -> Result<ClientBuilder, SettingsError> {
        let builder = Client::builder(&self.api);
        Ok(match &self.ca {
            Some(path) => builder.ca_certificate(read_bounded(path)?),
            None => builder,
        })
    }

    /// The address of its NFS face.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub async fn nfs_address(&self) -> Result<SocketAddr, SettingsError> {
        let failed = |source| SettingsError::Resolve { got: self.nfs.clone(), source };
        let mut found = tokio::net::lookup_host(&self.nfs).await.map_err(failed)?;
        found.next().ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))
    }
}

/// Gives the path by which this machine mounts the export: a secret one, of its worker or of its token.
#[derive(Clone, Debug)]
struct MountPath(Target);

impl slackwater_attach::PathSource for MountPath {
    fn mounts_below(&self) -> Option<&'static str> {
        self.0.client_of_export().ok()?.mounts_below().ok()
    }

    fn get(&self) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + '_>> {
        Box::pin(async {
            // Only now: what mounts nothing needs no files of REST.
            let client = self.0.client_of_export().map_err(|error| error.to_string())?;
            let path = client.path_to_mount(&self.0.export_path).await;
            path.map_err(|error| error.to_string())
        })
    }
}

/// Checked settings of a worker.
#[derive(Clone, Debug)]
pub struct Config {
    /// The appliance.
    pub target: Target,
    /// The driver's state.
    pub state_dir: PathBuf,
    /// The blocks that are kept.
    pub cache_dir: PathBuf,
    /// How many bytes of them.
    pub cache_size: Size,
    /// The size of a disk.
    pub disk_size: Size,
    /// How containerd's layers are kept.
    pub layers: LayerKind,
    /// Whose unpacked layers are taken, whether images that release 0.2 made by reference are, and whether its own
    /// layers are kept from others.
    pub trust: Trust,
    /// How registries are asked for whom a layer is.
    pub registries: Registries,
    /// How what Docker commits and builds is pushed.
    pub push: Push,
    /// How disks are attached.
    pub attach: AttachChoice,
    /// Where Docker's plugin is served.
    pub docker_socket: Option<PathBuf>,
    /// Where Docker itself listens.
    pub docker_api: String,
    /// Where containerd's is.
    pub containerd_socket: Option<PathBuf>,
    /// Where containerd itself listens.
    pub containerd_api: PathBuf,
    /// Where layers that the appliance has are not even fetched.
    pub layers_without_blobs: Namespaces,
    /// Where the commands are.
    pub control_socket: PathBuf,
    /// Where the metrics page is served.
    pub metrics_listen: Option<SocketAddr>,
    /// What is logged.
    pub log: LogFilter,
    /// And in which form.
    pub log_format: LogFormat,
}

impl Config {
    /// Checks settings.
    ///
    /// # Errors
    /// What is missing or wrong.
    pub fn new(settings: &Settings) -> Result<Self, SettingsError> {
        let state_dir = absolute("state-dir", given(settings.state_dir.clone(), "state-dir")?)?;
        let in_state = |chosen: &Option<PathBuf>, name: &str| {
            chosen.clone().unwrap_or_else(|| state_dir.join(name))
        };
        let disk_size = given(settings.disk_size, "disk-size")?;
        if let Err(expected) = disk_size.of_disk() {
            return Err(value("disk-size", &disk_size.to_string(), &expected));
        }
        let layers = given(settings.layers, "layers")?.kind(&state_dir)?;
        Ok(Self {
            target: Target::of(settings)?,
            cache_dir: absolute("cache-dir", in_state(&settings.cache_dir, "cache"))?,
            cache_size: given(settings.cache_size, "cache-size")?,
            disk_size,
            layers,
            trust: Trust {
                references_without_mac: settings
                    .insecure_references_without_mac
                    .unwrap_or_default(),
                makers: trusted_makers(settings.trusted_makers.as_deref())?,
                private_layers: settings.private_layers.unwrap_or_default(),
                private_registries: private_registries(settings.private_registries.as_deref())?,
            },
            registries: Registries::new(
                settings.registry_credentials.clone(),
                settings.registry_ca.clone(),
            ),
            push: given(settings.push, "push")?,
            attach: certificate::attach_choice(settings)?,
            docker_socket: settings.docker_socket.clone(),
            docker_api: docker_api(settings)?,
            containerd_socket: settings.containerd_socket.clone(),
            containerd_api: given(settings.containerd_api.clone(), "containerd-api")?,
            layers_without_blobs: layers_without_blobs(settings.layers_without_blobs.as_deref())?,
            control_socket: in_state(&settings.control_socket, "control.sock"),
            metrics_listen: settings.metrics_listen,
            log: given(settings.log.clone(), "log")?,
            log_format: given(settings.log_format, "log-format")?,
            state_dir,
        })
    }

    /// The options of the attached export. Files of its disks have no rights on this machine.
    ///
    /// # Errors
    /// The appliance's name cannot be resolved, or this program does not know its own path.
    pub async fn attach_options(&self) -> Result<AttachOptions, SettingsError> {
        let program = std::env::current_exe().map_err(|source| SettingsError::Unreadable {
            path: "/proc/self/exe".into(),
            source,
        })?;
        Ok(AttachOptions {
            method: self.attach.method(),
            nfs_address: self.target.nfs_address().await?,
            export: self.target.export_path.clone(),
            mount_path: Some(Arc::new(MountPath(self.target.clone()))),
            state_directory: self.attach_directory(),
            fuse_program: self.export_program(&program),
            tool_program: vec![program.into(), "run-tool".into()],
            // The kernel's NFS client does not show it.
            prefers_fuse: self.target.certificate.is_some(),
            rights: Rights::default(),
            mounts_end: slackwater_attach::mounts_end_with_processes(),
        })
    }

    /// Where the export is mounted.
    #[must_use]
    pub fn attach_directory(&self) -> PathBuf {
        self.state_dir.join("attach")
    }

    /// The options of the worker.
    ///
    /// # Errors
    /// As [`Self::attach_options`] and [`Target::client`].
    pub async fn worker_options(&self) -> Result<WorkerOptions, SettingsError> {
        Ok(WorkerOptions {
            client: self.target.client()?,
            attach: AttachOptions { rights: Rights::CONTAINER, ..self.attach_options().await? },
            state_directory: self.state_dir.clone(),
            disk_size_bytes: self.disk_size.bytes(),
            layers: self.layers,
            imaged_after: IMAGED_AFTER,
            trust: self.trust.clone(),
            registries: self.registries.clone(),
        })
    }

    /// The command line of the keeper, which runs the process that serves the export.
    #[must_use]
    pub fn export_program(&self, program: &Path) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec![program.into(), "serve-export".into(), "--keep".into()];
        let mut add = |flag: &str, value: OsString| {
            line.push(flag.into());
            line.push(value);
        };
        add("--api", self.target.api.clone().into());
        add("--nfs", self.target.nfs.clone().into());
        add("--export-path", self.target.export_path.clone().into());
        add("--state-dir", self.state_dir.clone().into());
        add("--cache-dir", self.cache_dir.clone().into());
        add("--cache-size", self.cache_size.to_string().into());
        add("--log", self.log.text().into());
        let shown = self.target.certificate.as_ref();
        for (flag, path) in [
            ("--token-file", self.target.token_file.as_ref()),
            ("--ca", self.target.ca.as_ref()),
            ("--nfs-certificate", shown.map(|files| &files.certificate)),
            ("--nfs-key", shown.map(|files| &files.key)),
        ] {
            if let Some(path) = path {
                add(flag, path.clone().into());
            }
        }
        line
    }

    /// The sockets of the engines.
    ///
    /// # Errors
    /// There is none.
    pub fn require_socket(&self) -> Result<(), SettingsError> {
        match self.docker_socket.is_some() || self.containerd_socket.is_some() {
            true => Ok(()),
            false => Err(SettingsError::NoSocket),
        }
    }
}

/// The token in a file.
pub(crate) fn read_token(path: &Path) -> Result<Token, SettingsError> {
    let text = String::from_utf8(read_bounded(path)?)
        .map_err(|_| SettingsError::NotText { path: path.to_owned() })?;
    Token::new(&text).map_err(|source| SettingsError::Token { path: path.to_owned(), source })
}

/// Whether this process may look for the file: the state directory is its user's alone, and others run commands that
/// need no token.
fn is_reached(path: &Path) -> bool {
    let found = std::fs::metadata(path);
    !found.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Paths outlive the directory that the daemon was started in: mounts and other processes
/// have them.
pub(super) fn absolute(key: &'static str, path: PathBuf) -> Result<PathBuf, SettingsError> {
    std::path::absolute(&path)
        .map_err(|error| value(key, &path.display().to_string(), &error.to_string()))
}

pub(super) fn given<T>(setting: Option<T>, key: &'static str) -> Result<T, SettingsError> {
    setting.ok_or(SettingsError::Missing { key })
}

/// Whose chains are taken: those of all where nothing is given.
fn trusted_makers(names: Option<&[String]>) -> Result<TrustedMakers, SettingsError> {
    let Some(names) = names else {
        return Ok(TrustedMakers::All);
    };
    let is_name = |name: &String| !name.is_empty() && !name.contains(char::is_whitespace);
    if names.is_empty() || !names.iter().all(is_name) {
        let expected = "expected names of workers or tokens without spaces, such as node-1,builder; leave it out to trust all";
        return Err(value("trusted-makers", &names.join(","), expected));
    }
    Ok(TrustedMakers::Named(names.iter().cloned().collect()))
}

/// Namespaces in which layers are not fetched. The command line has no empty list, but an empty text.
fn layers_without_blobs(names: Option<&[String]>) -> Result<Namespaces, SettingsError> {
    let names = names.unwrap_or_default();
    let names = if *names == [""] { &[] } else { names };
    Namespaces::named(names).ok_or_else(|| {
        let expected = "expected namespaces of containerd, such as k8s.io,moby, or * for all";
        value("layers-without-blobs", &names.join(","), expected)
    })
}

/// Registries whose layers are for those who may pull them.
fn private_registries(texts: Option<&[String]>) -> Result<Vec<PrivateRegistry>, SettingsError> {
    let parse = |text: &String| {
        text.parse().map_err(|error: PrivateRegistryParseError| {
            value("private-registries", text, &error.to_string())
        })
    };
    texts.unwrap_or_default().iter().map(parse).collect()
}

pub(super) fn value(key: &'static str, got: &str, expected: &str) -> SettingsError {
    SettingsError::Value { key, got: got.to_owned(), expected: expected.to_owned() }
}

/// The host of a URL, as it stands in front of a port.
fn host_of(api: &str) -> Result<&str, SettingsError> {
    let refused = || value("api", api, "write http://HOST:8049, or https:// with a certificate");
    let rest =
        api.strip_prefix("http://").or_else(|| api.strip_prefix("https://")).ok_or_else(refused)?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let end = match authority.rfind(']') {
        // The colons of an IPv6 address are inside its brackets.
        Some(bracket) => bracket + 1,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    match &authority[..end] {
        "" => Err(refused()),
        host => Ok(host),
    }
}

/// HOST:PORT of HOST or HOST:PORT.
fn with_port(text: &str) -> String {
    let after_brackets = text.rfind(']').map_or(text, |bracket| &text[bracket + 1..]);
    match after_brackets.contains(':') {
        true => text.to_owned(),
        false => format!("{text}:{NFS_PORT}"),
    }
}

/// Where Docker itself listens: on this machine, as its layers are.
fn docker_api(settings: &Settings) -> Result<String, SettingsError> {
    let address = given(settings.docker_api.clone(), "docker-api")?;
    match address.starts_with('/') || address.starts_with("unix:///") {
        true => Ok(address),
        false => Err(value("docker-api", &address, "expected unix:///PATH, or a path")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::LayersChoice;
    use super::*;

    fn checked(change: impl FnOnce(&mut Settings)) -> Result<Config, SettingsError> {
        let mut settings =
            Settings { state_dir: Some("/var/lib/driver".into()), ..Settings::defaults() };
        change(&mut settings);
        Config::new(&settings)
    }

    #[test]
    fn no_disk_has_the_size_of_an_image() {
        use super::super::size::BLOCK_BYTES;
        use crate::worker::IMAGE_SIZE_BYTES;

        let sized = |bytes| checked(|settings| settings.disk_size = Some(Size::from_bytes(bytes)));
        let error = sized(IMAGE_SIZE_BYTES).unwrap_err().to_string();
        assert!(error.contains("disk-size") && error.contains("images"), "{error}");
        sized(IMAGE_SIZE_BYTES - BLOCK_BYTES).unwrap();
    }

    #[test]
    fn how_layers_are_kept_is_as_asked_for() {
        for (choice, kind) in
            [(LayersChoice::Disks, LayerKind::Disks), (LayersChoice::Images, LayerKind::Images)]
        {
            assert_eq!(checked(|settings| settings.layers = Some(choice)).unwrap().layers, kind);
        }
        let odd = checked(|settings| {
            (settings.layers, settings.state_dir) =
                (Some(LayersChoice::Images), Some("/a,b".into()));
        });
        assert!(odd.unwrap_err().to_string().contains("state-dir"));
    }

    #[test]
    fn what_is_not_given_follows_from_what_is() {
        let config =
            checked(|settings| settings.api = Some("https://[::1]:1/x".to_owned())).unwrap();
        assert_eq!(config.target.nfs, "[::1]:2049");
        assert_eq!(config.cache_dir, Path::new("/var/lib/driver/cache"));
        assert_eq!(config.control_socket, Path::new("/var/lib/driver/control.sock"));
        let config = checked(|settings| settings.nfs = Some("store".to_owned())).unwrap();
        assert_eq!(config.target.nfs, "store:2049");
        let config = checked(|settings| settings.nfs = Some("10.0.0.1:7".to_owned())).unwrap();
        assert_eq!(config.target.nfs, "10.0.0.1:7");
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let text = |outcome: Result<Config, SettingsError>| outcome.unwrap_err().to_string();
        let missing = text(checked(|settings| settings.state_dir = None));
        assert!(missing.contains("SLACKWATER_STATE_DIR"), "{missing}");
        let api = text(checked(|settings| settings.api = Some("10.0.0.1".to_owned())));
        assert!(api.contains("http://HOST:8049"), "{api}");
        let small = text(checked(|settings| settings.disk_size = Some(Size::from_bytes(4096))));
        assert!(small.contains("64MiB"), "{small}");
        let odd = checked(|settings| settings.disk_size = Some(Size::from_bytes((1 << 30) + 1)));
        assert!(text(odd).contains("4096"));
        let none = checked(|_| {}).unwrap().require_socket().unwrap_err().to_string();
        assert!(none.contains("--docker-socket"), "{none}");
    }

    #[tokio::test]
    async fn trusted_makers_are_names() {
        let owned = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        let with = |names: &[&str]| checked(|settings| settings.trusted_makers = owned(names));
        assert_eq!(checked(|_| {}).unwrap().trust.makers, TrustedMakers::All);
        let config = with(&["node-1", "builder"]).unwrap();
        let named = TrustedMakers::Named(["node-1".to_owned(), "builder".to_owned()].into());
        assert_eq!(config.worker_options().await.unwrap().trust.makers, named);
        for bad in [&[][..], &[""], &["a", " b"], &["a b"]] {
            let error = with(bad).unwrap_err().to_string();
            assert!(error.contains("trusted-makers") && error.contains("node-1"), "{error}");
        }
        let upper = Settings { trusted_makers: owned(&["a"]), ..Settings::default() };
        let lower = Settings { trusted_makers: owned(&["b"]), ..Settings::default() };
        assert_eq!(upper.clone().or(lower).trusted_makers, upper.trusted_makers);
        assert_eq!(Settings::default().or(upper.clone()).trusted_makers, upper.trusted_makers);
    }

    #[test]
    fn layers_without_blobs_are_of_namespaces() {
        let with = |names: &[&str]| {
            let owned = names.iter().map(|name| (*name).to_owned()).collect();
            checked(|settings| settings.layers_without_blobs = Some(owned))
        };
        let of = |names: &[&str]| {
            Namespaces::named(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(checked(|_| {}).unwrap().layers_without_blobs, of(&["k8s.io"]).unwrap());
        assert_eq!(with(&["moby", "*"]).unwrap().layers_without_blobs, of(&["moby", "*"]).unwrap());
        for none in [&[][..], &[""]] {
            assert_eq!(with(none).unwrap().layers_without_blobs, Namespaces::default());
        }
        let error = with(&["a b"]).unwrap_err().to_string();
        assert!(error.contains("layers-without-blobs") && error.contains("k8s.io"), "{error}");
    }

    #[tokio::test]
    async fn private_registries_are_registries() {
        let with = |texts: &[&str]| {
            let owned = texts.iter().map(|text| (*text).to_owned()).collect();
            checked(|settings| settings.private_registries = Some(owned))
        };
        let config = with(&["registry.example.com/team", "localhost:5000"]).unwrap();
        assert_eq!(config.worker_options().await.unwrap().trust.private_registries.len(), 2);
        assert_eq!(checked(|_| {}).unwrap().trust.private_registries, []);
        for bad in ["", "team", "https://registry.example.com"] {
            let error = with(&["localhost:5000", bad]).unwrap_err().to_string();
            assert!(
                error.contains("private-registries is") && error.contains("HOST:PORT"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_export_is_served_by_this_program_with_the_same_settings() {
        let config = checked(|settings| {
            settings.token_file = Some("/token".into());
            settings.api = Some("https://appliance:8049".into());
            settings.nfs_certificate = Some("/worker.pem".into());
            settings.nfs_key = Some("/key.pem".into());
        });
        let config = config.unwrap();
        let line = config.export_program(Path::new("/bin/driver"));
        let line: Vec<_> = line.iter().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(line[..3], ["/bin/driver", "serve-export", "--keep"]);
        let follows = |flag, value| line.windows(2).any(|pair| pair == [flag, value]);
        assert!(follows("--cache-dir", "/var/lib/driver/cache"));
        assert!(follows("--cache-size", "10GiB"));
        assert!(follows("--token-file", "/token"));
        assert!(follows("--nfs-certificate", "/worker.pem") && follows("--nfs-key", "/key.pem"));
    }
}

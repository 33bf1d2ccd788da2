//! Docker's API as far as images by reference need it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use futures_util::StreamExt;
use hyper::Method;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::EngineError;
use super::http::{Content, UnixHttp, encode};

const PEER: &str = "Docker";

/// Where Docker listens.
const SOCKET_DEFAULT: &str = "/var/run/docker.sock";

/// What Docker says of its disks where containerd keeps them (moby, `LayerStoreStatus`).
const CONTAINERD_STORE: [&str; 2] = ["driver-type", "io.containerd.snapshotter.v1"];

/// What of a container's configuration is one of an image.
const CONFIG_OF_IMAGES: [&str; 13] = [
    "User",
    "ExposedPorts",
    "Env",
    "Entrypoint",
    "Cmd",
    "Volumes",
    "WorkingDir",
    "Labels",
    "StopSignal",
    "ArgsEscaped",
    "Healthcheck",
    "OnBuild",
    "Shell",
];

/// Longest event: one has the labels of its image.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// Docker.
#[derive(Clone, Debug)]
pub struct Docker {
    http: UnixHttp,
}

/// An image as `docker inspect` shows it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ImageInfo {
    /// Its layers.
    #[serde(rename = "RootFS")]
    pub root_fs: RootFs,
    /// Where they are; nowhere if Docker keeps its images in containerd.
    #[serde(default)]
    pub graph_driver: GraphDriverInfo,
    /// How a container of it is run; the same words as in an image's own configuration.
    #[serde(default)]
    pub config: Value,
    /// Its processor.
    #[serde(default)]
    pub architecture: String,
    /// Its variant of the processor.
    #[serde(default)]
    pub variant: String,
    /// Its system.
    #[serde(default)]
    pub os: String,
    /// When it was made.
    #[serde(default)]
    pub created: String,
    /// By whom.
    #[serde(default)]
    pub author: String,
    /// Its names.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub repo_tags: Vec<String>,
}

impl ImageInfo {
    /// What the driver says of its uppermost layer under this key.
    #[must_use]
    pub fn layer(&self, key: &str) -> Option<&str> {
        self.graph_driver.data.as_ref()?.get(key).map(String::as_str)
    }
}

/// Go's JSON has null for a list without items.
fn null_is_empty<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::<Vec<T>>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// An image of the list of all.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ImageSummary {
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
}

/// What was done with an image.
#[derive(Clone, Debug, Deserialize)]
pub struct ImageEvent {
    /// What: `push`, `save`.
    #[serde(rename = "Action")]
    pub action: String,
    /// With which.
    #[serde(rename = "Actor")]
    pub actor: EventActor,
    /// When, in nanoseconds since the epoch.
    #[serde(rename = "timeNano", default)]
    pub time_nanos: u64,
}

/// The image of an event.
#[derive(Clone, Debug, Deserialize)]
pub struct EventActor {
    /// Its name where it was pushed, its id where it was saved.
    #[serde(rename = "ID")]
    pub id: String,
}

/// Events as they come.
#[derive(Debug)]
pub struct ImageEvents {
    peer: &'static str,
    body: BodyDataStream,
    /// What came of the next one.
    begun: Vec<u8>,
}

impl ImageEvents {
    /// The next one; none once Docker ends. Nothing is lost if this is given up.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn next(&mut self) -> Result<Option<ImageEvent>, EngineError> {
        loop {
            if let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.begun.drain(..=end).collect();
                let unexpected = |error: serde_json::Error| {
                    EngineError::unexpected(self.peer, format!("an event: {error}"))
                };
                return serde_json::from_slice(&line).map(Some).map_err(unexpected);
            }
            if self.begun.len() > EVENT_BYTES_MAX {
                let reason = format!("an event of more than {EVENT_BYTES_MAX} bytes");
                return Err(EngineError::unexpected(self.peer, reason));
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.begun.extend_from_slice(&bytes),
                Some(Err(error)) => {
                    return Err(EngineError::unexpected(self.peer, error.to_string()));
                }
                None => return Ok(None),
            }
        }
    }
}

/// The layers of an image.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct RootFs {
    /// The digest of each, the lowest first.
    #[serde(default)]
    pub layers: Vec<String>,
}

/// What the driver says of the uppermost layer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct GraphDriverInfo {
    /// The driver's name.
    pub name: String,
    /// In its own words.
    pub data: Option<BTreeMap<String, String>>,
}

/// A container as `docker inspect` shows it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ContainerDetails {
    /// Its whole id.
    pub id: String,
    /// The id of its image.
    #[serde(default)]
    pub image: String,
    /// What keeps its disk.
    #[serde(default)]
    pub driver: String,
    /// The manifest that it was made from; told from version 1.48 of the API on.
    #[serde(default)]
    pub image_manifest_descriptor: Option<DescriptorInfo>,
    /// How it runs.
    #[serde(default)]
    pub config: Value,
}

/// A descriptor in Docker's answers.
#[derive(Clone, Debug, Deserialize)]
pub struct DescriptorInfo {
    /// Of what it describes.
    pub digest: String,
}

impl ContainerDetails {
    /// The digest of the manifest, or index, of its image; none if it was made from none.
    #[must_use]
    pub fn image_digest(&self) -> Option<&str> {
        let manifest = self.image_manifest_descriptor.as_ref();
        let digest = manifest.map_or(self.image.as_str(), |told| told.digest.as_str());
        (!digest.is_empty()).then_some(digest)
    }

    /// What of its configuration an image of it has, as `docker commit` takes it (moby,
    /// `daemon/containerd/imagespec.go`).
    #[must_use]
    pub fn image_config(&self) -> Value {
        let kept = CONFIG_OF_IMAGES.iter().filter_map(|key| {
            let value = self.config.get(key).filter(|value| !is_empty(value))?;
            Some(((*key).to_owned(), value.clone()))
        });
        Value::Object(kept.collect())
    }
}

/// Go leaves out of an image what is empty.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::Number(_) => false,
    }
}

/// A step of an image's making.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct HistoryStep {
    /// By which command.
    #[serde(default)]
    pub created_by: String,
    /// When, in seconds since the epoch.
    #[serde(default)]
    pub created: i64,
    /// What was said of it.
    #[serde(default)]
    pub comment: String,
    /// Bytes that it added.
    #[serde(default)]
    pub size: u64,
}

/// What the daemon says of itself.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DaemonInfo {
    /// Its release.
    #[serde(default)]
    pub server_version: String,
    /// What keeps its disks.
    #[serde(default)]
    pub driver: String,
    /// What that says of itself, in pairs.
    #[serde(default, deserialize_with = "null_is_empty")]
    driver_status: Vec<Vec<String>>,
    /// The containerd that it runs on; told from version 1.46 of the API on.
    #[serde(default)]
    containerd: Option<ContainerdInfo>,
}

/// The containerd that a Docker runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ContainerdInfo {
    /// Its socket.
    #[serde(default)]
    pub address: String,
    /// What Docker uses of it.
    #[serde(default)]
    pub namespaces: ContainerdNamespaces,
}

/// The namespaces of containerd that Docker uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ContainerdNamespaces {
    /// That of its containers and images.
    #[serde(default)]
    pub containers: String,
}

impl DaemonInfo {
    /// The containerd in which it keeps its images; none if it keeps them by a driver of its own, as Docker did before
    /// release 29, and later where that was chosen.
    ///
    /// # Errors
    /// `Unexpected`: it keeps them there, and does not tell where that is.
    pub fn image_store(&self) -> Result<Option<&ContainerdInfo>, EngineError> {
        if !self.driver_status.iter().any(|pair| pair.as_slice() == CONTAINERD_STORE) {
            return Ok(None);
        }
        let is_told = |told: &&ContainerdInfo| {
            !told.address.is_empty() && !told.namespaces.containers.is_empty()
        };
        let told = self.containerd.as_ref().filter(is_told);
        told.map(Some).ok_or_else(|| {
            let reason = "it keeps its images in containerd, and does not tell in which (Docker before 27.0): give \
                          --containerd and --namespace moby in the place of --docker-host to convert or export, and \
                          commit by `docker commit`";
            EngineError::unexpected(PEER, reason)
        })
    }
}

impl Docker {
    /// Docker at `host`: `unix:///PATH`, or a path.
    ///
    /// # Errors
    /// Another kind of address: only a daemon of this machine has this machine's volumes.
    pub fn new(host: &str) -> Result<Self, EngineError> {
        let path = match host.strip_prefix("unix://") {
            Some(path) => PathBuf::from(path),
            None if host.contains("://") => {
                let reason = format!("`{host}`: only unix:///PATH is a daemon of this machine");
                return Err(EngineError::unexpected(PEER, reason));
            }
            None => PathBuf::from(host),
        };
        Ok(Self { http: UnixHttp::new(&path, PEER) })
    }

    /// Docker where it usually is.
    #[must_use]
    pub fn usual() -> Self {
        Self { http: UnixHttp::new(Path::new(SOCKET_DEFAULT), PEER) }
    }

    /// What the daemon says of itself.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn info(&self) -> Result<DaemonInfo, EngineError> {
        self.http.get("/info").await
    }

    /// The names, with tags, of the images of a repository.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn names_of(&self, repository: &str) -> Result<Vec<String>, EngineError> {
        let images: Vec<ImageSummary> = self.http.get("/images/json").await?;
        let names = images.into_iter().flat_map(|image| image.repo_tags.unwrap_or_default());
        let is_of = |name: &String| {
            name.rsplit_once(':').is_some_and(|(of, tag)| of == repository && tag != "<none>")
        };
        Ok(names.filter(is_of).collect())
    }

    /// What is pushed and saved after this time, in nanoseconds since the epoch.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn image_events(&self, since_nanos: u64) -> Result<ImageEvents, EngineError> {
        let (seconds, nanos) = (since_nanos / 1_000_000_000, since_nanos % 1_000_000_000);
        let filters = encode(r#"{"type":["image"],"event":["push","save"]}"#);
        let path = format!("/events?since={seconds}.{nanos:09}&filters={filters}");
        let answer = self.http.open(Method::GET, &path, None).await?;
        let body = Body::into_data_stream(answer.into_body());
        Ok(ImageEvents { peer: PEER, body, begun: Vec::new() })
    }

    /// An image.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn image(&self, name: &str) -> Result<ImageInfo, EngineError> {
        self.http.get(&format!("/images/{}/json", checked(name)?)).await
    }

    /// A container, by its id, the beginning of it, or its name.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn container(&self, name: &str) -> Result<ContainerDetails, EngineError> {
        self.http.get(&format!("/containers/{}/json", checked_container(name)?)).await
    }

    /// How it was made, the last step first.
    ///
    /// # Errors
    /// [`EngineError`].
    pub async fn history(&self, name: &str) -> Result<Vec<HistoryStep>, EngineError> {
        self.http.get(&format!("/images/{}/history", checked(name)?)).await
    }

    /// Loads an archive as `docker save` writes it.
    ///
    /// # Errors
    /// [`EngineError`]; Docker's own words where it refuses a layer.
    pub async fn load(&self, archive: Bytes) -> Result<(), EngineError> {
        let content = Content { kind: "application/x-tar", bytes: archive };
        let answer = self.http.call(Method::POST, "/images/load?quiet=1", Some(content)).await?;
        // A failure while loading comes as a line of a successful answer.
        let lines = serde_json::Deserializer::from_slice(&answer).into_iter::<Value>();
        for line in lines.map_while(Result::ok) {
            if let Some(message) = line.get("error").and_then(Value::as_str) {
                let message = message.to_owned();
                return Err(EngineError::Refused { peer: PEER, status: 200, message });
            }
        }
        Ok(())
    }
}

/// A name as Docker takes it; it stands in a path as it is.
///
/// # Errors
/// `Unexpected`: it is none.
pub(crate) fn checked(name: &str) -> Result<&str, EngineError> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/:._-@".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_allowed) || name.split('/').any(|part| part == "..")
    {
        return Err(EngineError::unexpected(PEER, format!("`{name}` is no name of an image")));
    }
    Ok(name)
}

/// The name of a container as Docker takes it; it stands in a path as it is.
fn checked_container(name: &str) -> Result<&str, EngineError> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let begins_well = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    match begins_well && name.bytes().all(is_allowed) {
        true => Ok(name),
        false => {
            let reason = format!("`{}` is no name of a container", name.escape_debug());
            Err(EngineError::unexpected(PEER, reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_containers_are_checked() {
        for good in ["a", "0123abcd", "big_hopper.1-x"] {
            assert!(checked_container(good).is_ok(), "{good}");
        }
        for bad in ["", ".a", "-a", "/a", "a/b", "a?b", "a b", "..", "\u{fc}"] {
            assert!(checked_container(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_an_image_has_of_its_container() {
        // As Docker 29 answers; 27 and before have no descriptor.
        let text = r#"{"Id":"0123","Image":"sha256:1","Driver":"slackwater",
            "ImageManifestDescriptor":{"mediaType":"x","digest":"sha256:2","size":3},
            "Config":{"Hostname":"h","Domainname":"","User":"","Tty":true,"Env":["A=b"],"Cmd":["sh"],
                "Image":"a:1","Volumes":null,"WorkingDir":"/w","Entrypoint":null,"Labels":{},
                "Healthcheck":{"Test":["CMD","x"]},"ExposedPorts":{"80/tcp":{}}}}"#;
        let details: ContainerDetails = serde_json::from_str(text).unwrap();
        assert_eq!(details.image_digest(), Some("sha256:2"));
        let expected = serde_json::json!({ "Env": ["A=b"], "Cmd": ["sh"], "WorkingDir": "/w",
            "Healthcheck": { "Test": ["CMD", "x"] }, "ExposedPorts": { "80/tcp": {} } });
        assert_eq!(details.image_config(), expected);
        let older: ContainerDetails =
            serde_json::from_str(r#"{"Id":"0123","Image":"sha256:1"}"#).unwrap();
        assert_eq!(older.image_digest(), Some("sha256:1"));
        let of_none: ContainerDetails =
            serde_json::from_str(r#"{"Id":"0123","Image":""}"#).unwrap();
        assert_eq!(of_none.image_digest(), None);
    }

    #[test]
    fn names_of_images_are_checked() {
        for good in ["debian", "127.0.0.1:5000/a/b:c_d", "a@sha256:00"] {
            assert!(checked(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a?b", "../containers", "a/../b", "a#b"] {
            assert!(checked(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn where_docker_keeps_its_images() {
        let info = |text: &str| serde_json::from_str::<DaemonInfo>(text).unwrap();
        // Of 20.10 with this driver, and of one that has nothing to say.
        for own in [
            r#"{"ServerVersion":"20.10.24","Driver":"slackwater","DriverStatus":[["Worker","a"]]}"#,
            r#"{"ServerVersion":"28.5.1","Driver":"vfs","DriverStatus":null,
                "Containerd":{"Address":"/c.sock","Namespaces":{"Containers":"moby"}}}"#,
        ] {
            assert_eq!(info(own).image_store().unwrap(), None, "{own}");
        }
        let in_containerd = r#""DriverStatus":[["driver-type","io.containerd.snapshotter.v1"]]"#;
        let told = info(&format!(
            r#"{{{in_containerd},"Containerd":{{"Address":"/c.sock","Namespaces":{{"Containers":"moby"}}}}}}"#
        ));
        let store = told.image_store().unwrap().unwrap();
        assert_eq!(
            (store.address.as_str(), store.namespaces.containers.as_str()),
            ("/c.sock", "moby")
        );
        let untold = info(&format!("{{{in_containerd}}}")).image_store().unwrap_err().to_string();
        assert!(untold.contains("--namespace moby"), "{untold}");
        // An image as such a Docker shows it.
        let image = r#"{"Id":"sha256:1","RepoTags":["a:1"],"RootFS":{"Layers":["sha256:2"]}}"#;
        let image: ImageInfo = serde_json::from_str(image).unwrap();
        assert_eq!(
            (image.repo_tags.as_slice(), image.layer("Layer")),
            (&["a:1".to_owned()][..], None)
        );
    }

    #[test]
    fn only_this_machine_has_this_machines_volumes() {
        assert!(Docker::new("unix:///run/docker.sock").is_ok());
        assert!(Docker::new("tcp://10.0.0.1:2375").is_err());
    }
}

//! containerd's API as far as images by reference need it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use bytes::Bytes;
use futures_util::Stream;
use hyper_util::rt::TokioIo;
use prost::Message;
use slackwater_client::types::Timestamp;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Streaming};
use tonic_prost::ProstCodec;
use uuid::Uuid;

use super::EngineError;
use super::proto::{
    Container, ContainerResponse, CreateLeaseRequest, Descriptor, Image, ImageMessage,
    ListContainersRequest, ListContainersResponse, NameRequest, Nothing, PluginsRequest,
    PluginsResponse, ReadResponse, WRITE_AND_COMMIT, WriteRequest, WriteResponse,
};
use crate::image::digest::Digest;

/// Longest manifest, configuration or index that is read: registries refuse longer ones.
const CONTENT_BYTES_MAX: usize = 8 << 20;

/// How long what was written is kept if this process dies before its image is made.
pub const LEASE_DURATION: Duration = Duration::from_secs(3600);

pub(super) const PEER: &str = "containerd";

/// containerd, in one of its namespaces.
#[derive(Clone, Debug)]
pub struct Containerd {
    channel: Channel,
    namespace: MetadataValue<Ascii>,
    lease: Option<MetadataValue<Ascii>>,
}

/// A content that is named by an image.
#[derive(Clone, Debug)]
pub struct Target {
    /// What it is.
    pub media_type: String,
    /// Its digest.
    pub digest: String,
    /// Its size.
    pub size_bytes: u64,
}

/// A container, as far as a commit needs it.
#[derive(Clone, Debug)]
pub struct ContainerInfo {
    /// Its id.
    pub id: String,
    /// The image that it was made from.
    pub image: String,
    /// What keeps its disk.
    pub snapshotter: String,
    /// The name of its disk.
    pub snapshot_key: String,
}

/// The parts of a content that is read.
#[derive(Debug)]
pub struct Parts {
    digest: String,
    stream: Streaming<ReadResponse>,
}

impl Parts {
    /// The next part; `None` at the end.
    ///
    /// # Errors
    /// `NotFound` if there is no such content, or what the call was refused with.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        let part = self.stream.message().await;
        let part = part.map_err(|status| named(status, || format!("content {}", self.digest)))?;
        Ok(part.map(|part| part.data.into()))
    }
}

impl Containerd {
    /// containerd at `socket`.
    ///
    /// # Errors
    /// Nobody listens there, or the namespace is no name.
    pub async fn connect(socket: &Path, namespace: &str) -> Result<Self, EngineError> {
        let path = socket.to_owned();
        // Connected once here for the error that names the path; the channel has its own.
        UnixStream::connect(&path).await.map_err(|source| EngineError::Connect {
            peer: PEER,
            path: path.clone(),
            source,
        })?;
        let connector = tower::service_fn(move |_: Uri| dial(path.clone()));
        let lost = |error: tonic::transport::Error| EngineError::Http {
            peer: PEER,
            path: socket.to_owned(),
            source: Box::new(error),
        };
        // The address is not used: the connector has the path.
        let endpoint = Endpoint::from_static("http://containerd");
        let channel = endpoint.connect_with_connector(connector).await.map_err(lost)?;
        Ok(Self { channel, namespace: metadata(namespace)?, lease: None })
    }

    /// The image of that name.
    ///
    /// # Errors
    /// `NotFound`, or what the call was refused with.
    pub async fn image(&self, name: &str) -> Result<Target, EngineError> {
        let request = NameRequest { name: name.to_owned() };
        let answer: ImageMessage = self
            .unary("/containerd.services.images.v1.Images/Get", request)
            .await
            .map_err(|status| named(status, || format!("image {name}")))?;
        let target = answer.image.and_then(|image| image.target);
        let target = target.ok_or_else(|| EngineError::unexpected(PEER, "no target"))?;
        Ok(Target {
            media_type: target.media_type,
            digest: target.digest,
            size_bytes: u64::try_from(target.size).unwrap_or_default(),
        })
    }

    /// Makes the image name this content, whether there was one of that name or not.
    ///
    /// # Errors
    /// What the call was refused with.
    pub async fn put_image(&self, name: &str, target: &Target) -> Result<(), EngineError> {
        let target = Descriptor {
            media_type: target.media_type.clone(),
            digest: target.digest.clone(),
            size: i64::try_from(target.size_bytes).unwrap_or(i64::MAX),
        };
        let image = Image { name: name.to_owned(), labels: HashMap::new(), target: Some(target) };
        let message = ImageMessage { image: Some(image) };
        let created: Result<ImageMessage, _> =
            self.unary("/containerd.services.images.v1.Images/Create", message.clone()).await;
        match created {
            Err(status) if status.code() == Code::AlreadyExists => {
                let path = "/containerd.services.images.v1.Images/Update";
                let _: ImageMessage = self.unary(path, message).await?;
                Ok(())
            }
            outcome => Ok(outcome.map(|_| ())?),
        }
    }

    /// A container: that of this id, else the one that nerdctl calls so, or whose id begins so.
    ///
    /// # Errors
    /// `NotFound`, `Ambiguous`, or what a call was refused with.
    pub async fn container(&self, name: &str) -> Result<ContainerInfo, EngineError> {
        let request = NameRequest { name: name.to_owned() };
        let path = "/containerd.services.containers.v1.Containers/Get";
        let answer: Result<ContainerResponse, _> = self.unary(path, request).await;
        let container = match answer {
            Ok(answer) => answer.container,
            Err(status) if [Code::NotFound, Code::InvalidArgument].contains(&status.code()) => {
                let path = "/containerd.services.containers.v1.Containers/List";
                let request = ListContainersRequest { filters: filters_of(name) };
                // Without a filter it would be all.
                let answer: ListContainersResponse = match request.filters.is_empty() {
                    true => ListContainersResponse::default(),
                    false => self.unary(path, request).await?,
                };
                Some(chosen(name, answer.containers)?)
            }
            Err(status) => return Err(status.into()),
        };
        let container = container.ok_or_else(|| EngineError::unexpected(PEER, "no container"))?;
        let Container { id, image, snapshotter, snapshot_key, .. } = container;
        Ok(ContainerInfo { id, image, snapshotter, snapshot_key })
    }

    /// A small content.
    ///
    /// # Errors
    /// `NotFound`, one that is too long, or what the call was refused with.
    pub async fn read(&self, digest: &str) -> Result<Vec<u8>, EngineError> {
        let mut parts = self.open(digest).await?;
        let mut bytes = Vec::new();
        while let Some(part) = parts.next().await? {
            bytes.extend_from_slice(&part);
            if bytes.len() > CONTENT_BYTES_MAX {
                let reason = format!("{digest} has over {CONTENT_BYTES_MAX} bytes");
                return Err(EngineError::unexpected(PEER, reason));
            }
        }
        Ok(bytes)
    }

    /// A content of any size, part by part.
    ///
    /// # Errors
    /// `NotFound`, or what the call was refused with.
    pub async fn open(&self, digest: &str) -> Result<Parts, EngineError> {
        let missing = |status| named(status, || format!("content {digest}"));
        let path = "/containerd.services.content.v1.Content/Read";
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.map_err(unready)?;
        let request = self.request(NameRequest { name: digest.to_owned() });
        let codec = ProstCodec::<NameRequest, ReadResponse>::default();
        let answer = client.server_streaming(request, PathAndQuery::from_static(path), codec).await;
        let stream = answer.map_err(missing)?.into_inner();
        Ok(Parts { digest: digest.to_owned(), stream })
    }

    /// Makes a content of these bytes; one that is there already is left as it is.
    ///
    /// # Errors
    /// What the call was refused with.
    pub async fn write(
        &self,
        bytes: &[u8],
        labels: HashMap<String, String>,
    ) -> Result<Digest, EngineError> {
        let digest = Digest::of(bytes);
        let message = WriteRequest {
            action: WRITE_AND_COMMIT,
            reference: format!("slackwater-{digest}"),
            total: i64::try_from(bytes.len()).unwrap_or(i64::MAX),
            expected: digest.to_string(),
            offset: 0,
            data: Bytes::copy_from_slice(bytes),
            labels,
        };
        match self.send(futures_util::stream::iter([message])).await {
            Err(status) if status.code() != Code::AlreadyExists => Err(status.into()),
            _ => Ok(digest),
        }
    }

    /// Sends the messages of one write, and waits for the end of the answers.
    pub(super) async fn send(
        &self,
        messages: impl Stream<Item = WriteRequest> + Send + 'static,
    ) -> Result<(), tonic::Status> {
        let path = "/containerd.services.content.v1.Content/Write";
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.map_err(unready)?;
        let request = self.request(messages);
        let codec = ProstCodec::<WriteRequest, WriteResponse>::default();
        let answer = client.streaming(request, PathAndQuery::from_static(path), codec).await?;
        let mut answers = answer.into_inner();
        while answers.message().await?.is_some() {}
        Ok(())
    }

    /// The same, with all that is written from now on kept until [`Self::end_lease`], or for so long: without it
    /// containerd may remove what no image names yet.
    ///
    /// # Errors
    /// What the call was refused with.
    pub async fn leased(&self, now: Timestamp, duration: Duration) -> Result<Self, EngineError> {
        let id = format!("slackwater-{}", Uuid::new_v4());
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let expires = Timestamp::from_nanos(now.as_nanos().saturating_add(nanos));
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expires.to_string())]);
        let request = CreateLeaseRequest { id: id.clone(), labels };
        let _: Nothing =
            self.unary("/containerd.services.leases.v1.Leases/Create", request).await?;
        Ok(Self { lease: Some(metadata(&id)?), ..self.clone() })
    }

    /// The same, with all that is written from now on kept by this lease, which another program ends.
    ///
    /// # Errors
    /// The text is no name of a lease.
    pub fn under_lease(&self, lease: &str) -> Result<Self, EngineError> {
        Ok(Self { lease: Some(metadata(lease)?), ..self.clone() })
    }

    /// Ends the lease, once an image names what was written.
    ///
    /// # Errors
    /// What the call was refused with.
    pub async fn end_lease(&self) -> Result<(), EngineError> {
        let Some(lease) = self.lease.as_ref().and_then(|lease| lease.to_str().ok()) else {
            return Ok(());
        };
        let request = NameRequest { name: lease.to_owned() };
        let _: Nothing =
            self.unary("/containerd.services.leases.v1.Leases/Delete", request).await?;
        Ok(())
    }

    /// The names of the snapshotters that it has.
    ///
    /// # Errors
    /// What the call was refused with.
    pub async fn snapshotters(&self) -> Result<Vec<String>, EngineError> {
        let filters = vec!["type==io.containerd.snapshotter.v1".to_owned()];
        let path = "/containerd.services.introspection.v1.Introspection/Plugins";
        let answer: PluginsResponse = self.unary(path, PluginsRequest { filters }).await?;
        let is_snapshotter = |kind: &str| kind == "io.containerd.snapshotter.v1";
        let plugins = answer.plugins.into_iter();
        Ok(plugins
            .filter(|plugin| is_snapshotter(&plugin.r#type))
            .map(|plugin| plugin.id)
            .collect())
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            request.metadata_mut().insert("containerd-lease", lease.clone());
        }
        request
    }

    pub(super) async fn unary<Q, A>(
        &self,
        path: &'static str,
        message: Q,
    ) -> Result<A, tonic::Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut client = Grpc::new(self.channel.clone());
        client.ready().await.map_err(unready)?;
        let codec = ProstCodec::<Q, A>::default();
        let answer =
            client.unary(self.request(message), PathAndQuery::from_static(path), codec).await?;
        Ok(answer.into_inner())
    }
}

/// The label by which nerdctl finds a container by its name.
const NAME_LABEL: &str = "nerdctl/name";

/// Filters for what can be meant by a name; none if no container can be called so (containerd, `pkg/identifiers` and
/// `pkg/filters`).
fn filters_of(name: &str) -> Vec<String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins_well = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    match begins_well && name.bytes().all(is_allowed) {
        true => vec![format!("labels.\"{NAME_LABEL}\"=={name}"), format!("id~=^{name}")],
        false => Vec::new(),
    }
}

/// The container that is meant by a name that is no id. The label may be the image's: it does not go before an id.
fn chosen(name: &str, found: Vec<Container>) -> Result<Container, EngineError> {
    let is_meant = |container: &Container| {
        let is_named = container.labels.get(NAME_LABEL).is_some_and(|label| label == name);
        is_named || container.id.starts_with(name)
    };
    let mut meant: Vec<_> = found.into_iter().filter(is_meant).collect();
    let what = format!("container {name}");
    match meant.len() {
        0 => Err(EngineError::NotFound { peer: PEER, what }),
        1 => Ok(meant.remove(0)),
        _ => {
            let ids: Vec<_> = meant.into_iter().map(|container| container.id).collect();
            Err(EngineError::Ambiguous { peer: PEER, what, found: ids.join(", ") })
        }
    }
}

async fn dial(path: PathBuf) -> std::io::Result<TokioIo<UnixStream>> {
    Ok(TokioIo::new(UnixStream::connect(path).await?))
}

fn unready(error: tonic::transport::Error) -> tonic::Status {
    tonic::Status::unavailable(error.to_string())
}

fn metadata(text: &str) -> Result<MetadataValue<Ascii>, EngineError> {
    text.parse()
        .map_err(|_| EngineError::unexpected(PEER, format!("`{text}` is no name of a namespace")))
}

fn named(status: tonic::Status, what: impl FnOnce() -> String) -> EngineError {
    match status.code() {
        Code::NotFound => EngineError::NotFound { peer: PEER, what: what() },
        _ => status.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(id: &str, name: Option<&str>) -> Container {
        let label = |name: &str| (NAME_LABEL.to_owned(), name.to_owned());
        let labels = name.map(label).into_iter().collect();
        Container { id: id.to_owned(), labels, ..Container::default() }
    }

    #[test]
    fn a_container_is_found_by_its_name_or_the_beginning_of_its_id() {
        let found = || vec![container("ab1", Some("web")), container("db2", None)];
        assert_eq!(chosen("web", found()).unwrap().id, "ab1");
        assert_eq!(chosen("d", found()).unwrap().id, "db2");
        let error = chosen("we", found()).unwrap_err();
        assert!(matches!(error, EngineError::NotFound { .. }), "a part of a name: {error}");
        let both = vec![container("ab1", Some("web")), container("web2", None)];
        let error = chosen("web", both).unwrap_err();
        assert!(matches!(error, EngineError::Ambiguous { .. }), "an image's label: {error}");
        let two = vec![container("ab1", None), container("ab2", None), container("x", None)];
        let error = chosen("ab", two).unwrap_err().to_string();
        assert!(error.contains("ab1, ab2") && error.contains("whole id"), "{error}");
    }

    #[test]
    fn no_name_is_more_than_a_name_in_a_filter() {
        let expected = ["labels.\"nerdctl/name\"==web-1", "id~=^web-1"];
        assert_eq!(filters_of("web-1"), expected);
        for bad in ["", ".a", "-a", "a b", "a,id~=x", "a\"b", "a/b", "a*", "a|b", "\u{fc}"] {
            assert_eq!(filters_of(bad), [""; 0], "{bad}");
        }
    }
}

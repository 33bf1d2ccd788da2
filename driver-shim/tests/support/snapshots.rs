//! A client of the snapshotter as containerd is one, and the snapshotter served on a socket.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper::http::uri::PathAndQuery;
use prost::Message;
use slackwater_driver::containerd::proto::{
    ApplyRequest, ApplyResponse, Descriptor, DiffRequest, DiffResponse,
};
use slackwater_driver::containerd::proto::{
    CleanupRequest, CommitRequest, FieldMask, Info, InfoResponse, KeyRequest, ListRequest,
    ListResponse, Mount, MountsResponse, PrepareRequest, UpdateRequest, UsageResponse,
};
use slackwater_driver::containerd::{ContainerdOptions, DIFF_SERVICE, Namespaces, SERVICE, serve};
use slackwater_driver::worker::Worker;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

/// Longest time in which the appliance of a test is too slow.
const USAGE_TIME_MAX: Duration = Duration::from_secs(60);

pub struct Snapshots {
    channel: Channel,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

pub fn labels(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The one directory that an answer says to bind, and whether it may be written.
fn bound(mounts: &[Mount]) -> (PathBuf, bool) {
    let [mount] = mounts else { panic!("one mount: {mounts:?}") };
    assert_eq!((mount.r#type.as_str(), mount.target.as_str()), ("bind", ""));
    let is_writable = match mount.options.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["rbind", "rw"] => true,
        ["rbind", "ro"] => false,
        ref other => panic!("options {other:?}"),
    };
    (PathBuf::from(&mount.source), is_writable)
}

impl Snapshots {
    pub async fn serve(worker: Worker, socket: &Path) -> Self {
        Self::serve_for(worker, socket, Path::new("/nowhere")).await
    }

    /// Serves for the containerd that listens at `api`, whose clients need no blobs.
    pub async fn serve_for(worker: Worker, socket: &Path, api: &Path) -> Self {
        Self::serve_with(worker, socket, api, "*").await
    }

    /// The same, with this namespace alone, or all, as one whose clients need no blobs.
    pub async fn serve_with(
        worker: Worker,
        socket: &Path,
        api: &Path,
        without_blobs: &str,
    ) -> Self {
        let without_blobs = Namespaces::named(&[without_blobs.to_owned()]).unwrap();
        let options = ContainerdOptions { api: api.to_owned(), without_blobs };
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stopped = async move {
                let _ = stopped.await;
            };
            serve(worker, options, listener, stopped).await.unwrap();
        });
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap();
        Self { channel: endpoint.connect().await.unwrap(), stop, task }
    }

    pub async fn stop(self) {
        drop(self.channel);
        let _ = self.stop.send(());
        self.task.await.unwrap();
    }

    async fn call<Question, Answer>(&self, call: &str, question: Question) -> Result<Answer, Status>
    where
        Question: Message + Default + 'static,
        Answer: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/{SERVICE}/{call}")).unwrap();
        let codec = ProstCodec::<Question, Answer>::default();
        grpc.unary(Request::new(question), path, codec).await.map(tonic::Response::into_inner)
    }

    /// A layer, for this namespace and lease.
    pub async fn diff(
        &self,
        namespace: &str,
        lease: Option<&str>,
        request: DiffRequest,
    ) -> Result<Descriptor, Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/{DIFF_SERVICE}/Diff")).unwrap();
        let mut request = Request::new(request);
        request.metadata_mut().insert("containerd-namespace", namespace.parse().unwrap());
        if let Some(lease) = lease {
            request.metadata_mut().insert("containerd-lease", lease.parse().unwrap());
        }
        let codec = ProstCodec::<DiffRequest, DiffResponse>::default();
        let answer = grpc.unary(request, path, codec).await?.into_inner();
        Ok(answer.diff.unwrap())
    }

    /// Asks to unpack a layer; what was unpacked.
    pub async fn apply(
        &self,
        namespace: &str,
        request: ApplyRequest,
    ) -> Result<Descriptor, Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/{DIFF_SERVICE}/Apply")).unwrap();
        let mut request = Request::new(request);
        request.metadata_mut().insert("containerd-namespace", namespace.parse().unwrap());
        let codec = ProstCodec::<ApplyRequest, ApplyResponse>::default();
        Ok(grpc.unary(request, path, codec).await?.into_inner().applied.unwrap())
    }

    pub async fn prepare_labelled(
        &self,
        key: &str,
        parent: &str,
        labels: HashMap<String, String>,
    ) -> Result<(PathBuf, bool), Status> {
        self.prepare_mounts(key, parent, labels).await.map(|mounts| bound(&mounts))
    }

    /// What is to be mounted, whatever it is.
    pub async fn prepare_mounts(
        &self,
        key: &str,
        parent: &str,
        labels: HashMap<String, String>,
    ) -> Result<Vec<Mount>, Status> {
        let request = PrepareRequest {
            snapshotter: "slackwater".to_owned(),
            key: key.to_owned(),
            parent: parent.to_owned(),
            labels,
        };
        let answer: MountsResponse = self.call("Prepare", request).await?;
        Ok(answer.mounts)
    }

    pub async fn prepare(&self, key: &str, parent: &str) -> Result<PathBuf, Status> {
        let (path, is_writable) = self.prepare_labelled(key, parent, HashMap::new()).await?;
        assert!(is_writable);
        Ok(path)
    }

    /// What is to be mounted for reading, whatever it is.
    pub async fn view_mounts(&self, key: &str, parent: &str) -> Result<Vec<Mount>, Status> {
        let request = PrepareRequest {
            key: key.to_owned(),
            parent: parent.to_owned(),
            ..PrepareRequest::default()
        };
        let answer: MountsResponse = self.call("View", request).await?;
        Ok(answer.mounts)
    }

    pub async fn view(&self, key: &str, parent: &str) -> Result<PathBuf, Status> {
        let (path, is_writable) = bound(&self.view_mounts(key, parent).await?);
        assert!(!is_writable);
        Ok(path)
    }

    pub async fn mounts(&self, key: &str) -> Result<(PathBuf, bool), Status> {
        Ok(bound(&self.all_mounts(key).await?))
    }

    pub async fn all_mounts(&self, key: &str) -> Result<Vec<Mount>, Status> {
        let answer: MountsResponse = self.call("Mounts", named(key)).await?;
        Ok(answer.mounts)
    }

    pub async fn commit(&self, name: &str, key: &str) -> Result<(), Status> {
        let request =
            CommitRequest { name: name.to_owned(), key: key.to_owned(), ..Default::default() };
        self.commit_as(request).await
    }

    pub async fn commit_as(&self, request: CommitRequest) -> Result<(), Status> {
        self.call("Commit", request).await
    }

    pub async fn remove(&self, key: &str) -> Result<(), Status> {
        self.call("Remove", named(key)).await
    }

    pub async fn stat(&self, key: &str) -> Result<Info, Status> {
        let answer: InfoResponse = self.call("Stat", named(key)).await?;
        Ok(answer.info.unwrap())
    }

    pub async fn update(
        &self,
        name: &str,
        labels: HashMap<String, String>,
        paths: &[&str],
    ) -> Result<Info, Status> {
        let request = UpdateRequest {
            info: Some(Info { name: name.to_owned(), labels, ..Info::default() }),
            update_mask: Some(FieldMask {
                paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            }),
            ..UpdateRequest::default()
        };
        let answer: InfoResponse = self.call("Update", request).await?;
        Ok(answer.info.unwrap())
    }

    /// Asked again while the appliance is too slow for the time that the driver has for it.
    pub async fn usage(&self, key: &str) -> Result<UsageResponse, Status> {
        let deadline = Instant::now() + USAGE_TIME_MAX;
        loop {
            match self.call("Usage", named(key)).await {
                Err(status) if status.code() == Code::Unavailable && Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                answer => return answer,
            }
        }
    }

    pub async fn cleanup(&self) -> Result<(), Status> {
        self.call("Cleanup", CleanupRequest::default()).await
    }

    /// The messages of a List.
    pub async fn list(&self, filters: &[&str]) -> Result<Vec<ListResponse>, Status> {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/{SERVICE}/List")).unwrap();
        let filters = filters.iter().map(|filter| (*filter).to_owned()).collect();
        let request = ListRequest { filters, ..ListRequest::default() };
        let codec = ProstCodec::<ListRequest, ListResponse>::default();
        let mut stream =
            grpc.server_streaming(Request::new(request), path, codec).await?.into_inner();
        let mut parts = Vec::new();
        while let Some(part) = stream.message().await? {
            parts.push(part);
        }
        Ok(parts)
    }

    /// The names in a List, in order.
    pub async fn names(&self, filters: &[&str]) -> Vec<String> {
        let parts = self.list(filters).await.unwrap();
        let mut names: Vec<_> =
            parts.into_iter().flat_map(|part| part.info).map(|info| info.name).collect();
        names.sort();
        names
    }
}

fn named(key: &str) -> KeyRequest {
    KeyRequest { snapshotter: "slackwater".to_owned(), key: key.to_owned() }
}

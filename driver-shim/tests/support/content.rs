//! A containerd as far as it takes and gives a layer: its content store and its leases, in memory.

use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use hyper::{Request, Response};
use parking_lot::Mutex;
use prost::Message;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

const COMMIT: i32 = 2;

/// Bytes of one part of a content.
const PART_BYTES: usize = 1 << 20;

#[derive(Clone, PartialEq, Message)]
struct Part {
    #[prost(int64, tag = "1")]
    offset: i64,
    #[prost(bytes = "vec", tag = "2")]
    data: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct WriteRequest {
    #[prost(int32, tag = "1")]
    action: i32,
    #[prost(string, tag = "2")]
    reference: String,
    #[prost(int64, tag = "3")]
    total: i64,
    #[prost(string, tag = "4")]
    expected: String,
    #[prost(int64, tag = "5")]
    offset: i64,
    #[prost(bytes = "vec", tag = "6")]
    data: Vec<u8>,
    #[prost(map = "string, string", tag = "7")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct WriteResponse {
    #[prost(int64, tag = "5")]
    offset: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Named {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Info {
    #[prost(string, tag = "1")]
    digest: String,
    #[prost(map = "string, string", tag = "5")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Answered {
    #[prost(message, optional, tag = "1")]
    info: Option<Info>,
}

#[derive(Clone, PartialEq, Message)]
struct Update {
    #[prost(message, optional, tag = "1")]
    info: Option<Info>,
}

/// A content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    pub namespace: String,
    pub bytes: Vec<u8>,
    pub labels: HashMap<String, String>,
}

/// What it has.
#[derive(Debug, Default)]
pub struct Kept {
    /// By digest.
    pub contents: HashMap<String, Content>,
    /// Writes that were begun and neither committed nor aborted.
    pub open: Vec<String>,
    /// The digests that each lease keeps.
    pub leases: HashMap<String, Vec<String>>,
    /// Writes go no further than their first message.
    pub is_held: bool,
    /// Writes are refused once they have so many bytes.
    pub full_after: Option<usize>,
}

impl Kept {
    fn lease(&mut self, lease: &str, digest: &str) {
        self.leases.entry(lease.to_owned()).or_default().push(digest.to_owned());
    }
}

pub struct Containerd {
    pub kept: Arc<Mutex<Kept>>,
    task: JoinHandle<()>,
}

impl Containerd {
    pub fn serve(socket: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let kept = Arc::new(Mutex::new(Kept::default()));
        let shared = Arc::clone(&kept);
        let service = tower::service_fn(move |request: Request<Body>| {
            let kept = Arc::clone(&shared);
            async move { Ok::<_, Infallible>(answer(kept, request).await) }
        });
        let accept = move |context: &mut std::task::Context<'_>| {
            listener.poll_accept(context).map(|accepted| Some(accepted.map(|(stream, _)| stream)))
        };
        let task = tokio::spawn(async move {
            Server::builder().serve_with_incoming(service, stream::poll_fn(accept)).await.unwrap();
        });
        Self { kept, task }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
    format!("sha256:{}", digits.collect::<String>())
}

async fn answer(kept: Arc<Mutex<Kept>>, request: Request<Body>) -> Response<Body> {
    match request.uri().path() {
        "/containerd.services.content.v1.Content/Write" => {
            let service =
                tower::service_fn(|request: tonic::Request<Streaming<WriteRequest>>| async {
                    let answers = write(&kept, request).await?;
                    let answers = answers.into_iter().map(Ok::<_, Status>);
                    Ok::<_, Status>(tonic::Response::new(stream::iter(answers)))
                });
            let codec = ProstCodec::<WriteResponse, WriteRequest>::default();
            Grpc::new(codec).streaming(service, request).await
        }
        "/containerd.services.content.v1.Content/Read" => {
            let service = tower::service_fn(|request: tonic::Request<Named>| {
                std::future::ready(parts(&kept.lock(), &request.into_inner().name))
            });
            Grpc::new(ProstCodec::<Part, Named>::default()).server_streaming(service, request).await
        }
        "/containerd.services.content.v1.Content/Abort" => {
            unary(request, |named: Named| {
                kept.lock().open.retain(|open| *open != named.name);
            })
            .await
        }
        "/containerd.services.content.v1.Content/Update" => {
            unary(request, |update: Update| {
                let info = update.info.unwrap();
                kept.lock().contents.get_mut(&info.digest).unwrap().labels.extend(info.labels);
            })
            .await
        }
        "/containerd.services.leases.v1.Leases/Create" => {
            unary(request, |named: Named| {
                kept.lock().leases.insert(named.name, Vec::new());
            })
            .await
        }
        "/containerd.services.leases.v1.Leases/Delete" => {
            unary(request, |named: Named| {
                kept.lock().leases.remove(&named.name);
            })
            .await
        }
        "/containerd.services.content.v1.Content/Info" => {
            unary(request, |named: Named| {
                let labels = kept.lock().contents[&named.name].labels.clone();
                Answered { info: Some(Info { digest: named.name, labels }) }
            })
            .await
        }
        other => Status::unimplemented(other.to_owned()).into_http(),
    }
}

async fn unary<Question, Answer>(
    request: Request<Body>,
    answer: impl Fn(Question) -> Answer,
) -> Response<Body>
where
    Question: Message + Default + 'static,
    Answer: Message + Default + 'static,
{
    let service = tower::service_fn(|request: tonic::Request<Question>| {
        let answer = answer(request.into_inner());
        std::future::ready(Ok::<_, Status>(tonic::Response::new(answer)))
    });
    Grpc::new(ProstCodec::<Answer, Question>::default()).unary(service, request).await
}

type Parts = stream::Iter<std::vec::IntoIter<Result<Part, Status>>>;

/// A content, or that there is none.
fn parts(kept: &Kept, digest: &str) -> Result<tonic::Response<Parts>, Status> {
    let Some(content) = kept.contents.get(digest) else {
        return Err(Status::not_found(format!("content {digest}")));
    };
    let part = |(index, data): (usize, &[u8])| {
        let offset = i64::try_from(index * PART_BYTES).unwrap();
        Ok(Part { offset, data: data.to_vec() })
    };
    let parts: Vec<_> = content.bytes.chunks(PART_BYTES).enumerate().map(part).collect();
    Ok(tonic::Response::new(stream::iter(parts)))
}

/// One write, as containerd's content store takes it.
async fn write(
    kept: &Mutex<Kept>,
    request: tonic::Request<Streaming<WriteRequest>>,
) -> Result<Vec<WriteResponse>, Status> {
    let text = |key: &str| {
        let value = request.metadata().get(key).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let (namespace, lease) = (text("containerd-namespace"), text("containerd-lease"));
    let mut messages = request.into_inner();
    let (mut bytes, mut answers) = (Vec::new(), Vec::new());
    while let Some(message) = messages.message().await? {
        while !answers.is_empty() && kept.lock().is_held {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut kept = kept.lock();
        if answers.is_empty() {
            if kept.contents.contains_key(&message.expected) {
                kept.lease(&lease, &message.expected);
                return Err(Status::already_exists(message.expected));
            }
            assert!(!kept.open.contains(&message.reference), "a name of its own");
            kept.open.push(message.reference.clone());
        }
        assert_eq!(usize::try_from(message.offset).unwrap(), bytes.len(), "where it goes on");
        bytes.extend(&message.data);
        if kept.full_after.is_some_and(|limit| bytes.len() > limit) {
            return Err(Status::resource_exhausted("no space left on device"));
        }
        answers.push(WriteResponse { offset: message.offset });
        if message.action != COMMIT {
            continue;
        }
        assert_eq!(usize::try_from(message.total).unwrap(), bytes.len());
        assert_eq!(message.expected, sha256(&bytes));
        kept.open.retain(|open| *open != message.reference);
        // It is not leased here.
        if kept.contents.contains_key(&message.expected) {
            return Err(Status::already_exists(message.expected));
        }
        kept.lease(&lease, &message.expected);
        let (namespace, bytes) = (namespace.clone(), std::mem::take(&mut bytes));
        let content = Content { namespace, bytes, labels: message.labels };
        kept.contents.insert(message.expected, content);
    }
    match answers.is_empty() {
        true => Err(Status::unknown("EOF")),
        false => Ok(answers),
    }
}

//! A REST face in process, over a store in memory whose disk can be made to fail.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, Method, Request, header};
use serde_json::{Value, json};
use slackwater_api::error::{Problem, ProblemCode};
use slackwater_api::types::{File, Snapshot};
use slackwater_api::{
    ApiOptions, MetricsSource, Role, Secret, Token, Tokens, VmstoreCredentials, router,
};
use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{Options, Store};
use tower::ServiceExt;

use crate::schema::assert_documented;

/// No test waits longer for one answer.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        "test_metric 1\n# EOF\n".to_owned()
    }
}

pub struct Face {
    pub router: Router,
    pub store: Arc<Store>,
    pub disk: MemoryDisk,
    document: Value,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("the body is JSON")
    }

    pub fn parse<T: serde::de::DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    pub fn header(&self, name: impl header::AsHeaderName) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Asserts that this is a problem document with this code, and that all of it agrees.
    #[track_caller]
    pub fn problem(&self, code: ProblemCode) -> Problem {
        assert_eq!(self.header(header::CONTENT_TYPE), "application/problem+json", "{self:?}");
        let problem: Problem = self.parse();
        assert_eq!((problem.code, self.status), (code, code.status()), "{problem:?}");
        assert_eq!(problem.status, self.status);
        assert!(problem.instance.is_some() && !problem.detail.is_empty(), "{problem:?}");
        problem
    }

    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{:?}", String::from_utf8_lossy(&self.body));
        self
    }
}

pub fn memory_store(disk: &MemoryDisk, change: impl FnOnce(&mut Options)) -> Arc<Store> {
    let mut options = Options::new("unused");
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.steady_clock = Duration::ZERO;
    change(&mut options);
    Store::open_with(Arc::new(MemoryKv::new()), Arc::new(disk.clone()), options).unwrap()
}

impl Face {
    pub fn new() -> Self {
        Self::with(ApiOptions::default())
    }

    pub fn with(options: ApiOptions) -> Self {
        let disk = MemoryDisk::new();
        let store = memory_store(&disk, |_| {});
        Self::over(store, disk, options)
    }

    pub fn over(store: Arc<Store>, disk: MemoryDisk, options: ApiOptions) -> Self {
        let router = router(Arc::clone(&store), options, Arc::new(NoMetrics));
        Self { router, store, disk, document: Value::Null }
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let answer = self.send_unjudged(request).await;
        let media_type = answer.header(header::CONTENT_TYPE).to_owned();
        let document = self.document().await;
        assert_documented(&document, &method, &path, (answer.status, &media_type, &answer.body));
        answer
    }

    /// The same, which reads the document once, for a test of thousands of calls.
    pub async fn with_document(mut self) -> Self {
        let document = self.document().await.into_owned();
        self.document = document;
        self
    }

    async fn document(&self) -> Cow<'_, Value> {
        if !self.document.is_null() {
            return Cow::Borrowed(&self.document);
        }
        let request = Request::get("/openapi.json").body(Body::empty()).unwrap();
        Cow::Owned(self.send_unjudged(request).await.json())
    }

    async fn send_unjudged(&self, request: Request<Body>) -> Answer {
        let work = async {
            let response = self.router.clone().oneshot(request).await.unwrap();
            let (parts, body) = response.into_parts();
            let body = to_bytes(body, usize::MAX).await.expect("the body comes whole");
            Answer { status: parts.status.as_u16(), headers: parts.headers, body }
        };
        tokio::time::timeout(PATIENCE, work).await.expect("an answer in time")
    }

    /// Calls with these headers. A JSON value is sent as JSON.
    pub async fn call(
        &self,
        method: Method,
        uri: &str,
        headers: &[(&str, &str)],
        body: Option<Value>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = match body {
            Some(value) => {
                request = request.header(header::CONTENT_TYPE, "application/json");
                Body::from(value.to_string())
            }
            None => Body::empty(),
        };
        self.send(request.body(body).unwrap()).await
    }

    pub async fn get(&self, uri: &str) -> Answer {
        self.call(Method::GET, uri, &[], None).await
    }

    pub async fn post(&self, uri: &str, body: Value) -> Answer {
        self.call(Method::POST, uri, &[], Some(body)).await
    }

    pub async fn patch(&self, uri: &str, body: Value) -> Answer {
        self.call(Method::PATCH, uri, &[], Some(body)).await
    }

    pub async fn delete(&self, uri: &str) -> Answer {
        self.call(Method::DELETE, uri, &[], None).await
    }

    pub async fn put(&self, uri: &str, bytes: impl Into<Body>) -> Answer {
        let request = Request::put(uri).header(header::CONTENT_TYPE, "application/octet-stream");
        self.send(request.body(bytes.into()).unwrap()).await
    }

    pub async fn make_file(&self, path: &str, size_bytes: u64) -> File {
        let body = json!({"path": path, "size_bytes": size_bytes});
        self.post("/v1/files", body).await.expect(201).parse()
    }

    pub async fn take_snapshot(&self, path: &str) -> Snapshot {
        self.post("/v1/snapshots", json!({"path": path})).await.expect(201).parse()
    }
}

/// A token whose secret is `NAME-secret`.
pub fn token(name: &str, role: Role) -> Token {
    Token { name: name.to_owned(), role, secret: Secret::new(&format!("{name}-secret")) }
}

/// A token of each role, whose secret is its name and `-secret`, and the VMstore face.
pub fn with_each_role() -> ApiOptions {
    ApiOptions {
        tokens: Tokens::new(vec![
            token("viewer", Role::ReadOnly),
            token("node", Role::Worker),
            token("root", Role::Admin),
        ])
        .into(),
        vmstore: Some(VmstoreCredentials {
            username: "cinder".to_owned(),
            password: Secret::new("password"),
        }),
        ..ApiOptions::default()
    }
}

/// Bytes that differ from block to block and do not compress away.
pub fn noise(seed: u64, length_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(length_bytes + 8);
    while bytes.len() < length_bytes {
        bytes.extend_from_slice(&next());
    }
    bytes.truncate(length_bytes);
    bytes
}

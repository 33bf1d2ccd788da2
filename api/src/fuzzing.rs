//! What a fuzzer drives, from bytes of its choice: requests through the whole router, without
//! sockets, over a live store in memory. Only tests and fuzz targets call it; no program does.
//!
//! ```text
//! bytes -> method, path, query, headers, body -> router -> status and problem document
//! ```
//! [`requests`] panics where the face breaks a promise; a test and a fuzz target find the same
//! faults from the same bytes.

use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Result as Chosen, Unstructured};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, header};
use axum::response::Response;
use serde_json::{Value, json};
use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{Options, Store};
use tower::ServiceExt;

use crate::{
    ApiOptions, MetricsSource, ReferenceKey, Role, Secret, Token, Tokens, VmstoreCredentials,
    block_map, router,
};

/// Requests of one session.
const REQUESTS_MAX: usize = 16;

const METHODS: [&str; 9] = ["GET", "GET", "POST", "POST", "PUT", "PATCH", "DELETE", "HEAD", "BREW"];

/// Routes; `@` is one of the segments below.
const ROUTES: [&str; 36] = [
    "/v1/files",
    "/v1/files",
    "/v1/files/@",
    "/v1/files/@",
    "/v1/files/@/data",
    "/v1/files/@/data",
    "/v1/files/@/map",
    "/v1/files/@/reclaimable",
    "/v1/snapshots",
    "/v1/snapshots",
    "/v1/snapshots/@",
    "/v1/snapshots/@/data",
    "/v1/snapshots/@/map",
    "/v1/snapshots/@/diff",
    "/v1/snapshots/@/reclaimable",
    "/v1/snapshots/@/reference",
    "/v1/clones",
    "/v1/clones",
    "/v1/stats",
    "/v1/audit",
    "/v1/check",
    "/v1/gc",
    "/metrics",
    "/openapi.json",
    "/healthz",
    "/@",
    "/v1/files/@/@",
    "/api/info",
    "/api/v310/session/login",
    "/api/v310/session/logout",
    "/api/v310/cinder/snapshot",
    "/api/v310/cinder/clone",
    "/api/v310/snapshot",
    "/api/v310/snapshot/@",
    "/api/v310/virtualDisk",
    "/api/v310/appliance",
];

/// Segments; `#` is a snapshot's id that an answer told.
const SEGMENTS: [&str; 17] = [
    "a",
    "published%2F#",
    "images%2Fa",
    "#",
    "#",
    "..",
    "%2e%2e%2Fa",
    "a%00b",
    "%ff%fe",
    "%",
    "a%2F%2Fb",
    ".snapshot",
    "%2F",
    "00000000-0000-4000-8000-000000000000",
    "00000000-0000-4000-8000-00000000000G",
    "a+b%20c",
    "%F0%9F%8C%8A",
];

const PARAMETERS: [&str; 18] = [
    "by",
    "image",
    "limit",
    "after",
    "prefix",
    "label",
    "path",
    "name",
    "base",
    "offset",
    "length",
    "page",
    "sortedBy",
    "queryType",
    "contain",
    "files",
    "uuid",
    "x",
];

const VALUES: [&str; 18] = [
    "",
    "0",
    "1",
    "2",
    "1000",
    "1001",
    "-1",
    "4096",
    "4611686018427387904",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "a",
    "a=b",
    "%",
    "%ff",
    "#",
    "images%2Fa",
];

const HEADERS: [(&str, &str); 18] = [
    ("content-type", "application/json"),
    ("content-type", "application/json; charset=utf-8"),
    ("content-type", "application/octet-stream"),
    ("content-type", "text/plain"),
    ("content-length", "18446744073709551616"),
    ("content-length", "-1"),
    ("content-length", "4611686018427387904"),
    ("range", "bytes=0-0"),
    ("range", "bytes=-18446744073709551615"),
    ("range", "bytes=4095-4096,9-"),
    ("range", "bytes=18446744073709551615-"),
    ("if-range", "\"x\""),
    ("idempotency-key", "one"),
    ("idempotency-key", ""),
    ("authorization", "Bearer fuzz-read-only-secret"),
    ("authorization", "Basic eDp5"),
    ("cookie", "JSESSIONID=;;=; $"),
    ("expect", "100-continue"),
];

const TOKEN: &str = "fuzz-admin-secret";

#[derive(Debug)]
struct NoMetrics;

impl MetricsSource for NoMetrics {
    fn render(&self) -> String {
        "# EOF\n".to_owned()
    }
}

/// What a session knows from its answers.
#[derive(Default)]
struct Known {
    snapshot: Option<String>,
    cookie: Option<String>,
}

impl Known {
    fn fill(&self, text: &str) -> String {
        let id = self.snapshot.as_deref().unwrap_or("11111111-1111-4111-8111-111111111111");
        text.replace('#', id)
    }

    fn learn(&mut self, headers: &axum::http::HeaderMap, body: &[u8]) {
        if let Some(cookie) = headers.get(header::SET_COOKIE).and_then(|it| it.to_str().ok()) {
            self.cookie = cookie.split(';').next().map(str::to_owned);
        }
        let Ok(body) = serde_json::from_slice::<Value>(body) else { return };
        let id = body.get("id").or_else(|| body.get(0)).and_then(Value::as_str);
        if let Some(id) = id.filter(|id| id.len() == 36) {
            self.snapshot = Some(id.to_owned());
        }
    }
}

/// One of `all`, or text of the fuzzer's own.
fn pick(choices: &mut Unstructured<'_>, all: &[&str]) -> Chosen<String> {
    if choices.ratio(7, 8)? {
        return Ok((*choices.choose(all)?).to_owned());
    }
    let length = choices.int_in_range(0..=64)?.min(choices.len());
    let bytes = choices.bytes(length)?;
    Ok(bytes.iter().map(|&byte| char::from(byte & 0x7f)).collect())
}

fn uri(choices: &mut Unstructured<'_>, known: &Known) -> Chosen<String> {
    let mut uri = String::new();
    for piece in pick(choices, &ROUTES)?.split_inclusive('@') {
        uri.push_str(piece.trim_end_matches('@'));
        if piece.ends_with('@') {
            uri.push_str(&pick(choices, &SEGMENTS)?);
        }
    }
    for number in 0..choices.int_in_range(0..=3)? {
        uri.push(if number == 0 { '?' } else { '&' });
        uri.push_str(&pick(choices, &PARAMETERS)?);
        uri.push('=');
        uri.push_str(&pick(choices, &VALUES)?);
    }
    Ok(known.fill(&uri))
}

/// A value where a body has one.
fn value(choices: &mut Unstructured<'_>, known: &Known) -> Chosen<Value> {
    const TEXTS: [&str; 14] = [
        "a",
        "images/a",
        "disks/b",
        "/tintri/a",
        "#",
        "",
        "..",
        "a/../b",
        "\0",
        "keep",
        "on_zero_clones",
        "2026-01-01T00:00:00Z",
        "9999-12-31T23:59:59.999999999Z",
        "DELETE_ON_ZERO_CLONE_REFERENCES",
    ];
    Ok(match choices.int_in_range(0..=12)? {
        0..=5 => Value::from(known.fill(&pick(choices, &TEXTS)?)),
        6 => Value::from(choices.arbitrary::<u64>()?),
        7 => Value::from(*choices.choose(&[0_u64, 1, 4096, 1 << 62, (1 << 62) + 1, u64::MAX])?),
        8 => json!({ "k": "v", "": "w" }),
        9 => json!([known.fill("#"), "a"]),
        10 => choices.arbitrary::<f64>().map_or(Value::Null, Value::from),
        11 => Value::from(choices.arbitrary::<bool>()?),
        _ => Value::Null,
    })
}

fn body(choices: &mut Unstructured<'_>, known: &Known) -> Chosen<Vec<u8>> {
    const FIELDS: [&str; 25] = [
        "path",
        "image",
        "path",
        "size_bytes",
        "name",
        "labels",
        "deletion_policy",
        "expires_at",
        "expires_in_seconds",
        "becomes_clone",
        "snapshot_id",
        "data",
        "file",
        "tintriSnapshotUuid",
        "destinationPaths",
        "username",
        "password",
        "typeId",
        "description",
        "vmName",
        "retentionMinutes",
        "consistency",
        "deletionPolicy",
        "expirationTime",
        "x",
    ];
    match choices.int_in_range(0..=9)? {
        0 => Ok(Vec::new()),
        1 => Ok(choices.take_rest_up_to(4096)),
        2 => {
            let depth = choices.int_in_range(0..=5000)?;
            Ok([vec![b'['; depth], b"{\"path\":".to_vec()].concat())
        }
        3 => Ok(json!({ "path": "images/a", "size_bytes": 8192 }).to_string().into_bytes()),
        4 => Ok(json!({ "snapshot_id": known.fill("#"), "path": "disks/b" }).to_string().into()),
        5 => {
            let login = json!({ "username": "fuzz", "password": "fuzz", "typeId": "x" });
            Ok(login.to_string().into_bytes())
        }
        _ => {
            let mut object = serde_json::Map::new();
            for _ in 0..choices.int_in_range(0..=5)? {
                object.insert(pick(choices, &FIELDS)?, value(choices, known)?);
            }
            Ok(Value::from(object).to_string().into_bytes())
        }
    }
}

/// The rest of what there is to choose from, as far as it is wanted.
trait TakeUpTo {
    fn take_rest_up_to(&mut self, limit: usize) -> Vec<u8>;
}

impl TakeUpTo for Unstructured<'_> {
    fn take_rest_up_to(&mut self, limit: usize) -> Vec<u8> {
        let length = self.len().min(limit);
        self.bytes(length).map(<[u8]>::to_vec).unwrap_or_default()
    }
}

/// A request, or `None` for one that no HTTP parser would let through.
fn request(choices: &mut Unstructured<'_>, known: &Known) -> Chosen<Option<Request<Body>>> {
    let method = Method::from_bytes(choices.choose(&METHODS)?.as_bytes());
    let mut request =
        Request::builder().method(method.unwrap_or(Method::GET)).uri(uri(choices, known)?);
    if choices.ratio(15, 16)? {
        request = request.header(header::AUTHORIZATION, format!("Bearer {TOKEN}"));
    }
    if let Some(cookie) = &known.cookie {
        request = request.header(header::COOKIE, cookie);
    }
    let body = body(choices, known)?;
    if choices.ratio(3, 4)? {
        let media_type = if body.first() == Some(&b'{') { "json" } else { "octet-stream" };
        request = request.header(header::CONTENT_TYPE, format!("application/{media_type}"));
    }
    for _ in 0..choices.int_in_range(0..=2)? {
        let (name, value) = *choices.choose(&HEADERS)?;
        request = request.header(name, value);
    }
    Ok(request.body(Body::from(body)).ok())
}

/// A session of requests. Whatever they are, each is answered, none with a fault of the server's
/// own, refusals are documents of the face's form, and the store stays sound.
///
/// # Panics
/// Where one of these does not hold.
pub fn requests(bytes: &[u8]) {
    let mut options = Options::new("unused");
    options.memory_bytes = Options::MEMORY_BYTES_MIN;
    options.hash_threads = 1;
    options.background = false;
    options.steady_clock = Duration::ZERO;
    let (kv, disk) = (Arc::new(MemoryKv::new()), Arc::new(MemoryDisk::new()));
    let store = match Store::open_with(kv, disk, options) {
        Ok(store) => store,
        Err(error) => panic!("a new store in memory: {error}"),
    };
    let token = |role: Role, secret: &str| Token {
        name: role.to_string(),
        role,
        secret: Secret::new(secret),
    };
    let options = ApiOptions {
        tokens: Tokens::new(vec![
            token(Role::Admin, TOKEN),
            token(Role::ReadOnly, "fuzz-read-only-secret"),
        ])
        .into(),
        vmstore: Some(VmstoreCredentials {
            username: "fuzz".to_owned(),
            password: Secret::new("fuzz"),
        }),
        reference_key: ReferenceKey::from_bytes([7; ReferenceKey::BYTES]).into(),
        ..ApiOptions::default()
    };
    let face = router(Arc::clone(&store), options, Arc::new(NoMetrics));
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        panic!("no runtime for requests");
    };
    runtime.block_on(session(&face, bytes));
    drop(runtime);
    match store.check(true) {
        Ok(report) => assert!(report.problems.is_empty(), "{:?}", report.problems),
        Err(error) => panic!("the check of the store: {error}"),
    }
    if let Err(error) = store.close() {
        panic!("the store's end: {error}");
    }
}

async fn session(face: &Router, bytes: &[u8]) {
    let mut choices = Unstructured::new(bytes);
    let mut known = Known::default();
    for _ in 0..REQUESTS_MAX {
        if choices.is_empty() {
            return;
        }
        let Ok(Some(request)) = request(&mut choices, &known) else { continue };
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let response = match face.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let (parts, body) = Response::into_parts(response);
        // A sparse file may be larger than any memory.
        let body = to_bytes(body, 4 << 20).await.unwrap_or_default();
        assert!(parts.status.as_u16() != 500, "{method} {uri}: {}", body.escape_ascii());
        if parts.status.is_client_error() && method != Method::HEAD {
            let is_json = serde_json::from_slice::<Value>(&body).is_ok();
            assert!(is_json, "{method} {uri}: {} {}", parts.status, body.escape_ascii());
        }
        if let Ok(map) = block_map::BlockMap::decode(&body) {
            assert_eq!(map.encode(), body, "a map that is written otherwise again");
        }
        known.learn(&parts.headers, &body);
    }
}

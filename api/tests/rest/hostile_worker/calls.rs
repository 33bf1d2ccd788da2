//! The calls of a hostile worker: operations of the OpenAPI document, with random values.

use axum::http::Method;
use serde_json::{Map, Value, json};
use slackwater_api::paths::encode_component;

use super::Attack;
use super::world::{ATTACKER, VICTIM, of};
use crate::harness::noise;
use crate::readable::chain;
use crate::workers::id;

/// Parts of routes that are sent as they are.
const RAW_PARTS: [&str; 8] =
    ["..", "%2e%2e", "%2F", "%", "%ff", "%00", ".snapshot", "workers%252Fx"];

pub const RANGES: [&str; 4] = ["bytes=0-31", "bytes=-32", "bytes=4000-", "bytes=9-,0-1"];

/// Paths with a meaning of their own, or with none.
pub fn odd_paths() -> Vec<String> {
    let (own, victim) = (id(ATTACKER), id(VICTIM));
    let mut odd = vec![
        format!("/workers/{own}/disks/0"),
        format!("workers/{own}/disks/0/below"),
        format!("workers/{own}/disks/{}", "n".repeat(300)),
        format!("workers/{own}/disks/a\0b"),
        format!("workers/{own}"),
        format!("workers/{own}x/disks/0"),
        format!("workers/{own}/../{victim}/disks/plain"),
        format!("workers/{own}/disks/../../../backups/db"),
        format!("workers/{}/disks/plain", victim.to_uppercase()),
        format!("workers//{victim}/disks/plain"),
        format!("workers/{victim}"),
    ];
    let plain = ["", "/", "..", ".snapshot", "workers", "workers/", "backups", "published"];
    odd.extend(plain.map(str::to_owned));
    odd.extend(["published/readme", "published/new"].map(str::to_owned));
    odd
}

/// An operation of the document.
pub struct Operation {
    pub method: Method,
    pub template: String,
    pub about: Value,
}

impl Operation {
    pub fn all(document: &Value) -> Vec<Self> {
        let mut all = Vec::new();
        for (template, methods) in document["paths"].as_object().unwrap() {
            for (method, about) in methods.as_object().unwrap() {
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                all.push(Self { method, template: template.clone(), about: about.clone() });
            }
        }
        all
    }

    pub fn id(&self) -> String {
        self.about["operationId"].as_str().unwrap().to_owned()
    }

    /// The status of all its answers, where the document lets in no worker.
    pub fn refusal(&self) -> Option<u16> {
        match self.about["x-role"].as_str() {
            Some("admin") => Some(403),
            Some("join token") => Some(401),
            _ => self.about["security"][0].get("session").map(|_| 401),
        }
    }

    /// Where the document has the schema of its JSON body.
    pub fn schema(&self) -> Option<&str> {
        let content = self.about["requestBody"]["content"].get("application/json")?;
        Some(content["schema"]["$ref"].as_str().unwrap())
    }
}

/// A call that is to be made.
pub struct Call {
    pub method: Method,
    pub uri: String,
    pub media_type: &'static str,
    pub body: Vec<u8>,
}

impl Attack {
    /// Whether this call is one of few that have no meaning. With a target none is: what refuses the call then is that
    /// the target is private.
    pub fn strays(&mut self, count: usize) -> bool {
        self.target.is_none() && self.random.is_one_in(count)
    }

    pub fn choose(&mut self, operation: &Operation) -> Call {
        let uri = self.uri(operation);
        let (media_type, body) = self.body(operation);
        let method = if operation.method == Method::GET && self.strays(8) {
            Method::HEAD
        } else if self.strays(32) {
            self.random.pick(&[Method::OPTIONS, Method::TRACE]).clone()
        } else {
            operation.method.clone()
        };
        Call { method, uri, media_type, body }
    }

    fn any_path(&mut self) -> String {
        match &self.target {
            Some(path) if path.contains('/') => return path.clone(),
            Some(_) => return of(ATTACKER, "disks/new"),
            None => {}
        }
        match self.random.below(10) {
            0..=5 => of(ATTACKER, &format!("disks/{}", self.random.below(5))),
            6..=7 => self.random.pick(&self.world.private_paths).clone(),
            8 => format!("published/{}", self.any_id()),
            _ => self.random.pick(&self.odd_paths).clone(),
        }
    }

    fn any_id(&mut self) -> String {
        match &self.target {
            Some(path) if path.contains('/') => return self.world.shared[0].clone(),
            Some(id) => return id.clone(),
            None => {}
        }
        let private = &self.world.private_ids;
        let odd = [id(9), id(VICTIM), private[0].to_uppercase(), private[0].replace('-', "")];
        let own = &self.world.own;
        match self.random.below(12) {
            0..=4 => self.random.pick(&own[own.len().saturating_sub(16)..]).clone(),
            5..=7 => self.random.pick(&self.world.shared).clone(),
            8..=10 => self.random.pick(private).clone(),
            _ => self.random.pick(&odd).clone(),
        }
    }

    /// A value for what has this name in a route, a query or a body.
    fn value(&mut self, name: &str) -> String {
        let values: &[&str] = match name {
            "path" | "prefix" => return self.any_path(),
            "id" | "snapshot_id" | "base" | "uuid" | "worker_id" => return self.any_id(),
            "after" if self.random.is_one_in(2) => return self.any_path(),
            "after" => return self.any_id(),
            "chain_id" if self.target.is_some() => return chain('3'),
            "chain_id" => return chain(*self.random.pick(&['1', '1', '2', '3', 'g'])),
            "credential_blake3" => {
                let credential = *self.random.pick(&["next", self.world.victim.as_str()]);
                return blake3::hash(credential.as_bytes()).to_hex().to_string();
            }
            "blob" => {
                let repository = *self.random.pick(&["team/app", "team//app"]);
                return format!("registry.example.com/{repository}@{}", chain('b'));
            }
            "size_bytes" => &["4096", "4096", "8192", "0", "18446744073709551615"],
            "offset" | "length" => &["0", "1", "4096", "18446744073709551615"],
            "limit" => &["1", "2", "1000", "0"],
            "name" => &["nightly", "image-1", "slackwater-empty-ext4-1-1", "own", "slackwater:x"],
            "label" => &["k=v", "slackwater:chain:x=victim", "k"],
            "deletion_policy" => &["keep", "on_zero_clones", "never"],
            "for_all" => &["true", "false"],
            "image" => &["a:1", "r.example/a:1", "*", "?", "a b"],
            // None comes while the test runs.
            "expires_at" => &["2554-01-01T00:00:00Z", "2553-01-01T00:00:00Z", "tomorrow"],
            "expires_in_seconds" => &["86400", "1000000", "18446744073709551615"],
            _ => &["x", "true", "victim", "/tintri/backups/db"],
        };
        let value = if self.target.is_some() { &values[0] } else { self.random.pick(values) };
        (*value).to_owned()
    }

    fn field(&mut self, name: &str) -> Value {
        if name == "labels" {
            let keys = ["k", "other", "slackwater:chain:x", ""];
            let key = if self.target.is_some() { keys[0] } else { self.random.pick(&keys) };
            return json!({ (key): "v" });
        }
        if name == "becomes_clone" {
            return json!(self.target.is_none() && self.random.is_one_in(2));
        }
        let text = self.value(name);
        text.parse::<u64>().map_or_else(|_| json!(text), |number| json!(number))
    }

    fn uri(&mut self, operation: &Operation) -> String {
        let mut uri = String::new();
        for part in operation.template.split('/').skip(1) {
            uri.push('/');
            match part.strip_prefix('{') {
                Some(_) if self.strays(32) => {
                    let raw = self.random.pick(&RAW_PARTS);
                    uri.push_str(raw);
                }
                Some(name) => {
                    let value = self.value(name.trim_end_matches('}'));
                    uri.push_str(&encode_component(value.as_bytes()));
                }
                None => uri.push_str(part),
            }
        }
        let mut between = '?';
        for parameter in operation.about["parameters"].as_array().into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap();
            let is_there = match self.target {
                // What the target can be the value of.
                Some(_) => ["base", "path", "prefix"].contains(&name),
                None => self.random.is_one_in(3),
            };
            if parameter["in"] == "query" && is_there {
                let value = encode_component(self.value(name).as_bytes());
                uri.push_str(&format!("{between}{name}={value}"));
                between = '&';
            }
        }
        uri
    }

    fn body(&mut self, operation: &Operation) -> (&'static str, Vec<u8>) {
        let bytes = operation.about["requestBody"]["content"].get("application/octet-stream");
        match operation.schema() {
            _ if bytes.is_some() || self.strays(16) => {
                let length_bytes = self.random.below(5000);
                ("application/octet-stream", noise(self.random.draw(), length_bytes))
            }
            Some(_) if self.strays(16) => ("application/json", b"{\"path\":".to_vec()),
            Some(schema) => ("application/json", self.json(schema).to_string().into_bytes()),
            None => ("text/plain", Vec::new()),
        }
    }

    /// What fits the schema at this place, more or less.
    fn json(&mut self, schema: &str) -> Value {
        let schema = self.document.pointer(schema.trim_start_matches('#')).unwrap().clone();
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        let mut body = Map::new();
        for (name, _) in schema["properties"].as_object().into_iter().flatten() {
            let is_required = required.contains(&json!(name));
            let is_there = match self.target {
                Some(_) => is_required || (required.is_empty() && body.is_empty()),
                None => self.random.is_one_in(2) || (is_required && !self.random.is_one_in(16)),
            };
            // A wrong password takes a second.
            if is_there && name != "password" {
                body.insert(name.clone(), self.field(name));
            }
        }
        // Published, where that is possible.
        let snapshot = body.get("snapshot_id").and_then(Value::as_str).map(str::to_owned);
        if let Some(snapshot) = snapshot.filter(|_| self.strays(4)) {
            body.insert("path".to_owned(), json!(format!("published/{snapshot}")));
        }
        Value::from(body)
    }
}

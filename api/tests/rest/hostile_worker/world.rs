//! What a hostile worker finds: files and snapshots of others, some of them shared, and its own.

use axum::body::Body;
use axum::http::{Method, Request, header};
use serde_json::{Value, json};
use slackwater_api::paths::{self, encode_component};
use slackwater_api::types::{File, FilePage, Snapshot, SnapshotId, SnapshotPage};
use slackwater_api::worker::{Worker, WorkerList};

use crate::harness::{Answer, Face};
use crate::readable::{chain, snapshot};
use crate::workers::{call, face, id, joined};

pub const ADMIN: &str = "root-secret";

/// The numbers of the two workers.
pub const VICTIM: u8 = 1;
pub const ATTACKER: u8 = 2;

/// It is in all that the attacker must not learn, and in nothing that it sends.
const MARK: &str = "victims-secret";

/// Files of which the attacker must not learn the content.
const SECRET_FILES: usize = 4;

const FILE_BYTES: usize = 4096;

/// A path below the directory of the worker of this number.
pub fn of(number: u8, below: &str) -> String {
    format!("workers/{}/{below}", id(number))
}

/// One block, full of a text.
fn content(text: &str) -> Vec<u8> {
    text.bytes().cycle().take(FILE_BYTES).collect()
}

/// The content of the secret file of this number.
pub fn secret(number: usize) -> Vec<u8> {
    content(&format!("{MARK}-{number}-"))
}

/// Whether an answer tells what is secret: content, its hash in a map, a path, a name or a label.
pub fn tells_a_secret(answer: &Answer) -> bool {
    let is_marked = String::from_utf8_lossy(&answer.body).contains(MARK)
        || format!("{:?}", answer.headers).contains(MARK);
    if is_marked || !answer.body.starts_with(b"SWM1") {
        return is_marked;
    }
    let hashes: Vec<_> = (0..SECRET_FILES).map(|number| blake3::hash(&secret(number))).collect();
    answer.body.windows(32).any(|part| hashes.iter().any(|hash| hash.as_bytes() == part))
}

/// What there is to attack.
pub struct World {
    pub face: Face,
    pub victim: String,
    pub attacker: String,
    /// Paths and snapshots of others that the attacker knows of and must not reach. At some of the paths nothing is yet.
    pub private_paths: Vec<String>,
    pub private_ids: Vec<String>,
    /// Snapshots of others that it reads.
    pub shared: Vec<String>,
    /// The one among them that it may end, as it has no clone.
    loose: String,
    /// The one of its files that an administrator took, to keep.
    kept: String,
    /// Snapshots of its files, also those that are gone.
    pub own: Vec<String>,
}

/// What an administrator sees of all that is not the attacker's.
#[derive(Debug, PartialEq)]
pub struct Seen {
    files: Vec<(File, blake3::Hash)>,
    snapshots: Vec<(Snapshot, blake3::Hash)>,
    workers: Vec<Worker>,
}

impl World {
    pub async fn new() -> Self {
        let face = face().with_document().await;
        let victim = joined(&face, "victim", VICTIM).await;
        let attacker = joined(&face, "attacker", ATTACKER).await;
        let mut world = Self {
            face,
            victim,
            attacker,
            private_paths: Vec::new(),
            private_ids: Vec::new(),
            shared: Vec::new(),
            loose: String::new(),
            kept: String::new(),
            own: Vec::new(),
        };
        world.add_private().await;
        world.add_shared().await;
        world.add_own().await;
        world
    }

    async fn file(&self, caller: &str, path: &str, bytes: Vec<u8>) {
        let body = json!({"path": path, "size_bytes": bytes.len()});
        call(&self.face, caller, Method::POST, "/v1/files", Some(body)).await.expect(201);
        let put = Request::put(paths::file_data(path))
            .header(header::CONTENT_TYPE, "application/octet-stream")
            .header(header::AUTHORIZATION, format!("Bearer {caller}"));
        self.face.send(put.body(Body::from(bytes)).unwrap()).await.expect(200);
    }

    async fn clone_of(&self, caller: &str, snapshot: &str, path: &str) {
        let body = json!({"snapshot_id": snapshot, "path": path});
        call(&self.face, caller, Method::POST, "/v1/clones", Some(body)).await.expect(201);
    }

    async fn add_private(&mut self) {
        let victim = self.victim.clone();
        let names = ["disks/plain", "disks/victims-secret-path", "disks/clone", "empty"];
        let [plain, hidden, cloned, directory] = names.map(|name| of(VICTIM, name));
        let files: [(&str, &str); SECRET_FILES] = [
            (victim.as_str(), plain.as_str()),
            (victim.as_str(), hidden.as_str()),
            (ADMIN, "backups/db"),
            (ADMIN, "backups/victims-secret-path"),
        ];
        for (number, (caller, path)) in files.into_iter().enumerate() {
            self.file(caller, path, secret(number)).await;
        }
        let labels = json!({"victims-secret-label": "victims-secret-value"});
        let requests = [
            (victim.as_str(), json!({"path": plain, "labels": labels})),
            (victim.as_str(), json!({"path": hidden, "name": "victims-secret-name"})),
            (ADMIN, json!({"path": plain, "name": "nightly"})),
            (ADMIN, json!({"path": "backups/db", "deletion_policy": "on_zero_clones"})),
            (victim.as_str(), json!({"path": plain, "deletion_policy": "on_zero_clones"})),
        ];
        for (caller, request) in requests {
            let taken = snapshot(&self.face, caller, "/v1/snapshots", request).await;
            self.private_ids.push(taken);
        }
        self.clone_of(ADMIN, &self.private_ids[3], "backups/clone").await;
        self.clone_of(&victim, &self.private_ids[4], &cloned).await;
        // A directory with nothing in it.
        let inside = format!("{directory}/x");
        self.file(&victim, &inside, Vec::new()).await;
        let route = paths::file(&inside);
        call(&self.face, &victim, Method::DELETE, &route, None).await.expect(204);
        self.private_paths.extend([plain, cloned, directory, of(VICTIM, "new")]);
        let of_admin = ["backups/db", "backups/clone", "backups/new"];
        self.private_paths.extend(of_admin.map(str::to_owned));
    }

    async fn add_shared(&mut self) {
        let victim = self.victim.clone();
        let names = ["disks/image", "holds/image", "holds/layer"];
        let [image, hold, layer] = names.map(|name| of(VICTIM, name));
        self.file(&victim, &image, content("public-")).await;
        for path in ["backups/base", "published/readme"] {
            self.file(ADMIN, path, content("public-")).await;
        }
        let named = |name: &str| json!({"path": image, "name": name});
        let requests = [
            (victim.as_str(), "/v1/snapshots", named("image-1")),
            (victim.as_str(), "/v1/chains", json!({"path": image, "chain_id": chain('1')})),
            (victim.as_str(), "/v1/snapshots", named("slackwater-empty-ext4-1-1")),
            (ADMIN, "/v1/chains", json!({"path": "backups/base", "chain_id": chain('2')})),
        ];
        for (caller, route, request) in requests {
            let taken = snapshot(&self.face, caller, route, request).await;
            self.shared.push(taken);
        }
        self.loose = self.shared[3].clone();
        let published = format!("published/{}", self.shared[0]);
        for (number, path) in [(0, &published), (0, &hold), (1, &layer)] {
            self.clone_of(&victim, &self.shared[number], path).await;
        }
        self.private_paths.extend([image, hold, layer, "backups/base".to_owned()]);
    }

    async fn add_own(&mut self) {
        let attacker = self.attacker.clone();
        let [path, other] = ["disks/0", "disks/1"].map(|name| of(ATTACKER, name));
        for own in [&path, &other] {
            self.file(&attacker, own, content("own-")).await;
        }
        for caller in [attacker.as_str(), ADMIN] {
            let request = json!({"path": path});
            let taken = snapshot(&self.face, caller, "/v1/snapshots", request).await;
            self.own.push(taken);
        }
        self.kept.clone_from(&self.own[1]);
    }

    /// All that is private and that the attacker knows of.
    pub fn private(&self) -> Vec<String> {
        [&self.private_paths[..], &self.private_ids[..]].concat()
    }

    /// Paths and ids of others that no answer names. Snapshots that are shared name theirs.
    pub fn hidden(&self) -> impl Iterator<Item = &String> {
        let of_shared = [of(VICTIM, "disks/image"), "backups/base".to_owned()];
        let paths = self.private_paths.iter().filter(move |path| !of_shared.contains(path));
        paths.chain(&self.private_ids)
    }

    /// Whether a call is for something that is private, so that it has to be refused.
    pub fn is_private(&self, uri: &str, body: &Value) -> bool {
        let (route, query) = uri.split_once('?').unwrap_or((uri, ""));
        let fields = ["path", "snapshot_id"].map(|name| body[name].as_str().unwrap_or_default());
        self.private().iter().any(|private| {
            let written = encode_component(private.as_bytes());
            route.contains(&written)
                || query.contains(&format!("base={written}"))
                || fields.iter().any(|field| field.contains(private.as_str()))
        })
    }

    async fn by_admin(&self, uri: &str) -> Answer {
        call(&self.face, ADMIN, Method::GET, uri, None).await.expect(200)
    }

    /// The secrets are there, and are found in what tells them.
    pub async fn assert_secrets_are_found(&self) {
        let path = &self.private_paths[0];
        let taken: SnapshotId = self.private_ids[0].parse().unwrap();
        for uri in [
            "/v1/files?limit=1000".to_owned(),
            "/v1/snapshots?limit=1000".to_owned(),
            paths::file_data(path),
            paths::file_map(path),
            paths::snapshot(taken),
            paths::snapshot_data(taken),
            paths::snapshot_map(taken),
        ] {
            assert!(tells_a_secret(&self.by_admin(&uri).await), "{uri}");
        }
    }

    pub async fn seen(&self) -> Seen {
        let directory = paths::file(&of(VICTIM, "empty"));
        call(&self.face, ADMIN, Method::GET, &directory, None).await.expect(409);
        let list: WorkerList = self.by_admin("/v1/workers").await.parse();
        let is_other = |worker: &Worker| worker.name.as_str() != "attacker";
        let workers = list.workers.into_iter().map(|worker| Worker {
            last_seen_at: None,
            // It replaces its own credential.
            credential_since: worker.credential_since.filter(|_| is_other(&worker)),
            ..worker
        });
        let workers = workers.collect();
        Seen { files: self.files().await, snapshots: self.snapshots().await, workers }
    }

    async fn files(&self) -> Vec<(File, blake3::Hash)> {
        let page: FilePage = self.by_admin("/v1/files?limit=1000").await.parse();
        assert_eq!(page.next, None);
        let own = of(ATTACKER, "");
        let mut files = Vec::new();
        let mut is_kept = false;
        for file in page.items {
            let name = file.path.strip_prefix("published/");
            if let Some(published) = name.and_then(|name| name.parse::<SnapshotId>().ok()) {
                // Workers publish what they read.
                assert_eq!(file.origin_snapshot_id, Some(published), "{file:?}");
                assert!(!self.private_ids.contains(&published.to_string()), "{file:?}");
                is_kept |= published.to_string() == self.shared[0];
            } else if !file.path.starts_with(&own) {
                let data = self.by_admin(&paths::file_data(&file.path)).await;
                // How much of it is shared depends on the snapshots that there are.
                files.push((File { unique_bytes: 0, ..file }, blake3::hash(&data.body)));
            }
        }
        assert!(is_kept, "what the victim published is published no more");
        files
    }

    async fn snapshots(&self) -> Vec<(Snapshot, blake3::Hash)> {
        let page: SnapshotPage = self.by_admin("/v1/snapshots?limit=1000").await.parse();
        assert_eq!(page.next, None);
        let own = of(ATTACKER, "");
        let mut snapshots = Vec::new();
        for mut taken in page.items {
            let id = taken.id.to_string();
            let is_kept = id == self.kept;
            if (taken.path.starts_with(&own) && !is_kept) || id == self.loose {
                continue;
            }
            if is_kept || self.shared.contains(&id) {
                // Workers make clones of what they read, and register it.
                taken.clone_count = 0;
                taken.publishers.remove("attacker");
                for makers in taken.chains.values_mut() {
                    makers.remove("attacker");
                }
                taken.chains.retain(|_, makers| !makers.is_empty());
                for by in taken.images.values_mut() {
                    by.remove("attacker");
                }
                taken.images.retain(|_, by| !by.is_empty());
                taken.published_at = None;
                taken.restricted_chains.retain(|chain, _| taken.chains.contains_key(chain));
            }
            let data = self.by_admin(&paths::snapshot_data(taken.id)).await;
            snapshots.push((taken, blake3::hash(&data.body)));
        }
        snapshots
    }
}

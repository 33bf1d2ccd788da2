//! The calls of containerd, one method each.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message;
use slackwater_client::types::{ChainId, Timestamp};
use tokio::time::timeout;

use super::error::CallError;
use super::filter::Filters;
use super::proto::{
    self, CleanupRequest, CommitRequest, Info, InfoResponse, KeyRequest, ListRequest, ListResponse,
    Mount, MountsResponse, PrepareRequest, UpdateRequest, UsageResponse, ViewRequest,
};
use super::{Namespaces, labels, own_disk, remote};
use crate::trust::sharing::{Sharing, is_of_image, layer_digest};
use crate::trust::unpacking::{self, Below, Root};
use crate::worker::{
    Access, ContainerdExtra, Engine, Extra, Key, Kind, Registration, Rootfs, Usage, Volume, Worker,
    WorkerError, now, upper_of,
};

/// Longest name. containerd's own are at most a few hundred bytes.
const NAME_BYTES_MAX: usize = 4096;

/// Most snapshots of one message of List, as in containerd.
const LIST_COUNT_MAX: usize = 100;

/// Size after which a message of List is sent: clients refuse those above 4 MiB, and one
/// snapshot with all its labels takes about 1 MiB at most.
const LIST_BYTES: usize = 1 << 20;

/// How long Usage may wait: Kubernetes asks for every snapshot each ten seconds.
const USAGE_TIME: Duration = Duration::from_millis(1500);

/// Active snapshots whose last known usage is kept, for the time when the appliance is away.
const USAGES_MAX: usize = 4096;

/// containerd's snapshots, over the volumes of the worker.
#[derive(Debug)]
pub(super) struct Snapshotter {
    worker: Worker,
    without_blobs: Namespaces,
    usages: Mutex<HashMap<Key, Usage>>,
}

impl Snapshotter {
    pub(super) fn new(worker: Worker, without_blobs: Namespaces) -> Self {
        Self { worker, without_blobs, usages: Mutex::default() }
    }

    pub(super) const fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Removes what an earlier process was in the middle of adopting.
    pub(super) async fn forget_unfinished(&self) {
        for volume in self.worker.list(Engine::Containerd) {
            if remote::is_unfinished(&volume.key) {
                remote::forget(&self.worker, &volume.key).await;
            }
        }
    }

    pub(super) async fn prepare(
        &self,
        request: PrepareRequest,
    ) -> Result<MountsResponse, CallError> {
        let key = self.new_key("key", request.key)?;
        let labels = labels::checked(request.labels)?;
        let parent = self.parent(request.parent)?;
        // "Already exists" keeps the blob from being fetched, for good.
        if self.without_blobs.have(&key)
            && let Some(chain) = unpacking::wanted_chain(&key.name, &labels)
            && let Some(name) =
                remote::adopt(&self.worker, &key, &chain, parent.as_ref(), &labels).await?
        {
            return Err(CallError::Remote { chain: chain.to_string(), name });
        }
        let root = unpacking::root(&key.name, &labels);
        if root == Root::SharedRefused {
            tracing::warn!(%key, "an image asks for the shared root for one of its own layers: ignored");
        }
        let own_disk = own_disk::asked_for(&key, root, &labels)?;
        let is_shared = root == Root::Shared;
        let extra = ContainerdExtra { is_shared, own_disk, ..new_extra(Kind::Active, labels) };
        self.begin(key, parent, extra).await
    }

    pub(super) async fn view(&self, request: ViewRequest) -> Result<MountsResponse, CallError> {
        let key = self.new_key("key", request.key)?;
        let labels = labels::checked(request.labels)?;
        let parent = self.parent(request.parent)?;
        self.begin(key, parent, new_extra(Kind::View, labels)).await
    }

    pub(super) async fn mounts(&self, request: KeyRequest) -> Result<MountsResponse, CallError> {
        let volume = self.volume(request.key)?;
        self.mount(&volume).await
    }

    pub(super) async fn commit(&self, request: CommitRequest) -> Result<(), CallError> {
        let name = self.new_key("name", request.name)?;
        let labels = labels::checked(request.labels)?;
        let volume = self.volume(request.key)?;
        let active = extra(&volume)?;
        if active.kind != Kind::Active {
            return Err(CallError::NotActive { key: volume.key });
        }
        if active.is_shared {
            return Err(CallError::SharedRoot { key: volume.key });
        }
        let parent = volume.parent.as_ref();
        let parent_name = parent.map_or("", |parent| parent.name.as_str());
        if !request.parent.is_empty() && request.parent != parent_name {
            let expected = parent_name.to_owned();
            return Err(CallError::ParentChanged {
                got: request.parent,
                expected,
                key: volume.key,
            });
        }
        // A container or a step of a build is no chain, whatever it is called and labelled.
        let below = parent.map_or(Below::Nothing, |parent| self.below(parent));
        let chain = unpacking::unpacked_chain(&volume.key.name, &name.name, below);
        let known = chain.as_ref().map(ToString::to_string);
        let sharing = match &chain {
            Some(chain) => self.sharing(active, chain, parent).await?,
            None => Sharing::Kept,
        };
        let is_for_all = sharing == Sharing::All;
        let is_private = known.is_some() && !is_for_all;
        let registered = chain.and_then(|chain| match sharing {
            Sharing::All => Some(Registration { chain, blob: None }),
            Sharing::Readers(blob) => Some(Registration { chain, blob: Some(blob) }),
            Sharing::Kept => None,
        });
        let fresh = new_extra(Kind::Committed, labels);
        let blob_digest = layer_digest(&active.labels).map(str::to_owned);
        let mut committed = ContainerdExtra { chain: known, is_private, blob_digest, ..fresh };
        // What runs in one may write what looks like a reference, too.
        let reference = match unpacking::is_unpacking(&volume.key.name) {
            true => remote::unpacked_reference(&self.worker, &volume).await?,
            false => None,
        };
        match reference {
            Some(named) => {
                committed.is_private |=
                    !self.worker.trust().shares_all() || self.worker.is_restricted(named.0).await?;
                let committed = Extra::Containerd(committed);
                self.worker.commit_bound(&volume.key, name, named, committed).await?
            }
            None => {
                // What it was bound to (apply.rs) may be restricted whatever this worker lists. And the appliance may
                // have this layer of another worker, for fewer than this one.
                let was_bound = volume.layer().is_some();
                let asks = was_bound || is_for_all && !self.worker.trust().shares_all();
                let extra = move |is_restricted| {
                    committed.is_private |= asks && is_restricted;
                    Extra::Containerd(committed)
                };
                self.worker.commit(&volume.key, registered, name, extra).await?
            }
        };
        self.usages.lock().remove(&volume.key);
        Ok(())
    }

    pub(super) async fn remove(&self, request: KeyRequest) -> Result<(), CallError> {
        let key = named("key", request.key)?;
        self.worker.remove(&key).await?;
        self.usages.lock().remove(&key);
        Ok(())
    }

    pub(super) async fn stat(&self, request: KeyRequest) -> Result<InfoResponse, CallError> {
        let volume = self.volume(request.key)?;
        Ok(InfoResponse { info: Some(info(&volume)?) })
    }

    pub(super) async fn update(&self, request: UpdateRequest) -> Result<InfoResponse, CallError> {
        let Info { name, labels: new, .. } = request.info.unwrap_or_default();
        let paths = request.update_mask.unwrap_or_default().paths;
        let volume = self.volume(name)?;
        // Found out before anything is changed: what the closure below does cannot fail.
        labels::updated(&extra(&volume)?.labels, new.clone(), &paths)?;
        let change = move |extra: &mut Extra| {
            if let Extra::Containerd(extra) = extra
                && let Ok(labels) = labels::updated(&extra.labels, new, &paths)
            {
                extra.labels = labels;
                extra.updated_at = now();
            }
        };
        let volume = self.worker.update(&volume.key, change).await?;
        Ok(InfoResponse { info: Some(info(&volume)?) })
    }

    pub(super) fn list(&self, request: &ListRequest) -> Result<Vec<ListResponse>, CallError> {
        let filters = Filters::parse(&request.filters)?;
        let mut parts = Vec::new();
        let mut part = ListResponse::default();
        let mut part_bytes = 0;
        for volume in self.worker.list(Engine::Containerd) {
            let info = info(&volume)?;
            if remote::is_unfinished(&volume.key) || !filters.hold(&info) {
                continue;
            }
            part_bytes += info.encoded_len();
            part.info.push(info);
            if part.info.len() == LIST_COUNT_MAX || part_bytes >= LIST_BYTES {
                parts.push(std::mem::take(&mut part));
                part_bytes = 0;
            }
        }
        if !part.info.is_empty() {
            parts.push(part);
        }
        Ok(parts)
    }

    pub(super) async fn usage(&self, request: KeyRequest) -> Result<UsageResponse, CallError> {
        let volume = self.volume(request.key)?;
        let usage = match volume.usage {
            Some(usage) => usage,
            None => self.usage_now(&volume.key).await?,
        };
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        Ok(UsageResponse { size: number(usage.size_bytes), inodes: number(usage.inodes) })
    }

    pub(super) async fn cleanup(&self, _: CleanupRequest) -> Result<(), CallError> {
        self.worker.clean_up().await;
        self.worker.clean_up_uppers().await;
        Ok(())
    }

    /// The usage of what still changes: what the appliance says, or what it said last.
    async fn usage_now(&self, key: &Key) -> Result<Usage, CallError> {
        let error = match timeout(USAGE_TIME, self.worker.usage(key)).await {
            Ok(Ok(usage)) => {
                let mut usages = self.usages.lock();
                if usages.len() >= USAGES_MAX {
                    usages.clear();
                }
                usages.insert(key.clone(), usage);
                return Ok(usage);
            }
            Ok(Err(error @ WorkerError::NotFound { .. })) => return Err(error.into()),
            Ok(Err(error)) => error.into(),
            Err(_) => CallError::Slow { waited_ms: USAGE_TIME.as_millis() },
        };
        self.usages.lock().get(key).copied().ok_or(error)
    }

    /// Makes a snapshot and mounts it. One that cannot be mounted was never made.
    async fn begin(
        &self,
        key: Key,
        parent: Option<Volume>,
        extra: ContainerdExtra,
    ) -> Result<MountsResponse, CallError> {
        let parent = parent.map(|parent| parent.key);
        let is_written = extra.kind == Kind::Active && !extra.is_shared;
        let extra = Extra::Containerd(extra);
        if !is_written {
            let volume = self.worker.create_view(key, parent, extra).await?;
            let mounted = self.begun(&volume).await;
            if mounted.is_err() {
                remote::forget(&self.worker, &volume.key).await;
            }
            return mounted;
        }
        let layers = self.worker.layers_above(parent.as_ref()).await?;
        let mut is_second = false;
        loop {
            let (key, parent, extra) = (key.clone(), parent.clone(), extra.clone());
            let volume = self.worker.create_keeping(key, parent, extra, layers).await?;
            let mounted = self.begun(&volume).await;
            if mounted.is_ok() {
                return mounted;
            }
            remote::forget(&self.worker, &volume.key).await;
            // One whose disk turned out to be of no use gets another one.
            if is_second || !self.worker.has_other_disk_than(&volume) {
                return mounted;
            }
            is_second = true;
        }
    }

    async fn begun(&self, volume: &Volume) -> Result<MountsResponse, CallError> {
        let (root, access) = self.mounted(volume).await?;
        if access == Access::ReadWrite
            && unpacking::is_unpacking(&volume.key.name)
            && let Some(written) = root.written()
        {
            remote::prepare_to_unpack(&self.worker, &volume.key, written).await?;
        }
        Ok(MountsResponse { mounts: vec![mount_of(&root, access)] })
    }

    /// Sees that a snapshot is mounted, and says how its directory is to be used.
    async fn mount(&self, volume: &Volume) -> Result<MountsResponse, CallError> {
        let (root, access) = self.mounted(volume).await?;
        Ok(MountsResponse { mounts: vec![mount_of(&root, access)] })
    }

    async fn mounted(&self, volume: &Volume) -> Result<(Rootfs, Access), CallError> {
        let extra = extra(volume)?;
        let access = match extra.kind {
            Kind::Active if !extra.is_shared => Access::ReadWrite,
            Kind::Active | Kind::View => Access::ReadOnly,
            Kind::Committed => return Err(CallError::NotMountable { key: volume.key.clone() }),
        };
        Ok((self.worker.ensure_rootfs(&volume.key, access).await?, access))
    }

    fn volume(&self, name: String) -> Result<Volume, CallError> {
        let key = named("key", name)?;
        self.worker.get(&key).ok_or(CallError::Worker(WorkerError::NotFound { key }))
    }

    fn new_key(&self, what: &'static str, name: String) -> Result<Key, CallError> {
        let key = named(what, name)?;
        match self.worker.get(&key) {
            Some(_) => Err(WorkerError::Exists { key }.into()),
            None => Ok(key),
        }
    }

    fn parent(&self, name: String) -> Result<Option<Volume>, CallError> {
        if name.is_empty() {
            return Ok(None);
        }
        let parent = self.volume(name)?;
        if extra(&parent)?.kind != Kind::Committed {
            return Err(CallError::ParentNotCommitted { parent: parent.key });
        }
        Ok(Some(parent))
    }

    /// For whom a layer is that was unpacked as this chain, with these labels and above this one.
    async fn sharing(
        &self,
        layer: &ContainerdExtra,
        chain: &ChainId,
        parent: Option<&Key>,
    ) -> Result<Sharing, CallError> {
        let own = self.worker.trust().sharing(&layer.labels);
        // Its blob may be that of another image: containerd fetches none that it has.
        if own == Sharing::Kept || own == Sharing::All && self.keeps(chain, &layer.labels) {
            return Ok(Sharing::Kept);
        }
        let Some(volume) = parent.and_then(|parent| self.worker.get(parent)) else {
            return Ok(own);
        };
        let extra = extra(&volume)?;
        let below = extra.chain.as_ref().and_then(|chain| chain.parse().ok());
        Ok(own.above(&self.worker.below_is(&volume, below.as_ref(), extra.is_private).await?))
    }

    /// Whether this worker has the layer, or one of the same blob, as one that is not for all; or has begun to pull an image
    /// with that blob so, of which containerd fetches all blobs while it unpacks the first.
    fn keeps(&self, chain: &ChainId, labels: &BTreeMap<String, String>) -> bool {
        let digest = layer_digest(labels);
        let is_it = |volume: &Volume| {
            let Ok(extra) = extra(volume) else { return false };
            let has_blob = digest.is_some_and(|digest| {
                extra.blob_digest.as_deref() == Some(digest) || is_of_image(&extra.labels, digest)
            });
            match extra.kind {
                Kind::Committed => {
                    let is_same_chain = extra.chain.as_deref() == Some(chain.as_str());
                    extra.is_private && (is_same_chain || has_blob)
                }
                Kind::Active => {
                    has_blob && self.worker.trust().sharing(&extra.labels) != Sharing::All
                }
                Kind::View => false,
            }
        };
        self.worker.find(Engine::Containerd, is_it).is_some()
    }

    /// What a layer above a committed snapshot is above.
    fn below(&self, parent: &Key) -> Below {
        let is_chain = |volume: Volume| extra(&volume).is_ok_and(|extra| extra.chain.is_some());
        match self.worker.get(parent).is_some_and(is_chain) {
            true => Below::Chain,
            false => Below::Other,
        }
    }
}

fn named(what: &'static str, name: String) -> Result<Key, CallError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(CallError::NameLength { what, got: name.len(), limit: NAME_BYTES_MAX });
    }
    Ok(Key::containerd(name))
}

fn new_extra(kind: Kind, labels: BTreeMap<String, String>) -> ContainerdExtra {
    ContainerdExtra {
        kind,
        labels,
        updated_at: now(),
        is_shared: false,
        own_disk: None,
        chain: None,
        is_private: false,
        blob_digest: None,
    }
}

/// containerd's part of a volume of containerd.
pub(super) fn extra(volume: &Volume) -> Result<&ContainerdExtra, CallError> {
    match &volume.extra {
        Extra::Containerd(extra) => Ok(extra),
        Extra::Docker(_) => {
            Err(CallError::Worker(WorkerError::NotFound { key: volume.key.clone() }))
        }
    }
}

/// The mount by which an engine sees a root.
fn mount_of(root: &Rootfs, access: Access) -> Mount {
    match root {
        Rootfs::Directory(path) => bind(path, access),
        // overlayfs wants two directories.
        Rootfs::Overlay { lowers, directory: Some(directory) } if lowers.is_empty() => {
            bind(&upper_of(directory), access)
        }
        Rootfs::Overlay { lowers, directory: None } if lowers.len() == 1 => {
            bind(&lowers[0], access)
        }
        Rootfs::Overlay { .. } => Mount {
            r#type: "overlay".to_owned(),
            source: "overlay".to_owned(),
            target: String::new(),
            options: root.overlay_options(),
        },
    }
}

fn bind(path: &Path, access: Access) -> Mount {
    let access = match access {
        Access::ReadWrite => "rw",
        Access::ReadOnly => "ro",
    };
    Mount {
        r#type: "bind".to_owned(),
        source: path.to_string_lossy().into_owned(),
        target: String::new(),
        options: vec!["rbind".to_owned(), access.to_owned()],
    }
}

fn moment(time: Timestamp) -> proto::Timestamp {
    const NANOS: u64 = 1_000_000_000;
    let nanos = time.as_nanos();
    proto::Timestamp {
        seconds: i64::try_from(nanos / NANOS).unwrap_or(i64::MAX),
        nanos: i32::try_from(nanos % NANOS).unwrap_or_default(),
    }
}

fn info(volume: &Volume) -> Result<Info, CallError> {
    let extra = extra(volume)?;
    let kind = match extra.kind {
        Kind::Active => proto::Kind::Active,
        Kind::View => proto::Kind::View,
        Kind::Committed => proto::Kind::Committed,
    };
    Ok(Info {
        name: volume.key.name.clone(),
        parent: volume.parent.as_ref().map(|parent| parent.name.clone()).unwrap_or_default(),
        kind: kind.into(),
        created_at: Some(moment(volume.created_at)),
        // What was never updated has equal times. It was made a moment after its record was.
        updated_at: Some(moment(extra.updated_at.max(volume.created_at))),
        labels: extra.labels.clone().into_iter().collect(),
    })
}

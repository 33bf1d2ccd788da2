//! Images of containerd: made by reference, committed from a container, and exported.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Value, json};
use slackwater_client::types::ChainIdParseError;

use super::digest::{Digest, chain_ids};
use super::layout::Export;
use super::media;
use super::name;
use super::reference::{self, ReferenceLayer, diff_ids};
use crate::control::LayerQuery;
use crate::engine::EngineError;
use crate::engine::containerd::{Containerd, LEASE_DURATION, Target};
use crate::engine::daemon::Daemon;
use crate::engine::docker::ContainerDetails;
use crate::error::DriverError;
use crate::trust::annotation;
use crate::worker::{Content, Engine, Extra, Kind, LayerKind, SnapshotRef, Volume, now};

/// Indexes may name indexes; real ones do not.
const INDEX_DEPTH_MAX: usize = 3;

/// containerd and the driver of this machine.
#[derive(Debug)]
pub struct Images<'a> {
    /// containerd.
    pub containerd: &'a Containerd,
    /// Its namespace.
    pub namespace: &'a str,
    /// The driver's daemon.
    pub daemon: &'a Daemon,
}

/// What a container writes to.
#[derive(Clone, Copy)]
struct Disk<'a> {
    container_id: &'a str,
    snapshot_key: &'a str,
    snapshotter: &'a str,
}

/// An image as containerd has it.
struct Source {
    config: Value,
    snapshots: Vec<SnapshotRef>,
}

impl Images<'_> {
    /// Makes `target` an image whose layers are references to those of `source`.
    ///
    /// # Errors
    /// A layer is not on the appliance, or a call failed.
    pub async fn convert(&self, source: &str, target: &str) -> Result<(), DriverError> {
        let image = self.source(source, None).await?;
        self.write(target, image.config, &image.snapshots).await
    }

    /// Makes `target` an image of what the container's disk holds now, above its own image. Where layers are disks the
    /// time does not depend on how much that is. Returns the container's id.
    ///
    /// # Errors
    /// The container's disk or a layer is not on the appliance, or a call failed.
    pub async fn commit(&self, container: &str, target: &str) -> Result<String, DriverError> {
        let info = self.containerd.container(container).await?;
        if info.snapshot_key.is_empty() {
            let reason = "containerd does not know its disk, as it is Docker's container: give --docker-host in the place \
                          of --containerd";
            return Err(DriverError::image(container, reason));
        }
        let disk = Disk {
            container_id: &info.id,
            snapshot_key: &info.snapshot_key,
            snapshotter: &info.snapshotter,
        };
        let volume = self.active_volume(container, disk).await?;
        let image = self.source(&info.image, layers_of(&volume)).await?;
        self.commit_disk(disk.container_id, &volume.key.name, image, target).await?;
        Ok(info.id)
    }

    /// The same for a container of a Docker that keeps its images in this containerd; as with `docker commit`, the
    /// image's configuration is that of the container.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub async fn commit_of_docker(
        &self,
        container: &str,
        details: &ContainerDetails,
        target: &str,
    ) -> Result<String, DriverError> {
        let digest = details.image_digest().ok_or_else(|| {
            DriverError::image(container, "it was made from no image: use docker commit")
        })?;
        // Docker names the snapshot of a container by its id.
        let disk = Disk {
            container_id: &details.id,
            snapshot_key: &details.id,
            snapshotter: &details.driver,
        };
        let volume = self.active_volume(container, disk).await?;
        let image = self.source_at(container, digest, layers_of(&volume)).await;
        let mut image = image.map_err(|error| match error {
            DriverError::Engine(EngineError::NotFound { .. }) => {
                let reason = format!("its image is gone ({error}): pull that again by docker pull");
                DriverError::image(container, reason)
            }
            other => other,
        })?;
        image.config["config"] = details.image_config();
        self.commit_disk(disk.container_id, &volume.key.name, image, target).await?;
        Ok(details.id.clone())
    }

    /// Makes `target` the image and, above it, what the container's volume holds now.
    async fn commit_disk(
        &self,
        container_id: &str,
        volume: &str,
        mut image: Source,
        target: &str,
    ) -> Result<(), DriverError> {
        let snapshot = self.daemon.capture(Engine::Containerd, volume).await?;
        // At once: a captured snapshot that nobody keeps is taken back soon.
        let target_name = Some(name::of_publication(target));
        self.daemon.publish(snapshot.id, None, target_name).await?;
        image.snapshots.push(snapshot);
        let created = now().to_string();
        let step = json!({ "created": created,
            "created_by": format!("slackwater-driver image commit {container_id}") });
        match image.config.get_mut("history").and_then(Value::as_array_mut) {
            Some(history) => history.push(step),
            None => image.config["history"] = json!([step]),
        }
        image.config["created"] = created.into();
        self.write(target, image.config, &image.snapshots).await
    }

    /// Writes `image` with ordinary layers to an archive.
    ///
    /// # Errors
    /// A layer is not on the appliance, or a call failed.
    pub async fn export(&self, image: &str, output: &Path) -> Result<(), DriverError> {
        let source = self.source(image, None).await?;
        let export = Export { image, config: source.config, layers: &source.snapshots };
        export.write(self.daemon, output).await
    }

    /// The volume that a container writes; the backend calls it `NAMESPACE/NUMBER/KEY`.
    async fn active_volume(&self, container: &str, disk: Disk<'_>) -> Result<Volume, DriverError> {
        let is_active = |volume: &Volume| matches!(&volume.extra, Extra::Containerd(extra) if extra.kind == Kind::Active);
        let is_wanted = |volume: &Volume| {
            let mut parts = volume.key.name.splitn(3, '/');
            let namespace = parts.next();
            parts.next().is_some()
                && namespace == Some(self.namespace)
                && parts.next() == Some(disk.snapshot_key)
        };
        let volumes = self.daemon.volumes(Engine::Containerd).await?;
        let found = volumes.into_iter().find(|volume| is_active(volume) && is_wanted(volume));
        found.ok_or_else(|| {
            let snapshotter = disk.snapshotter;
            DriverError::image(
                container,
                format!("its disk is not this driver's; its snapshotter is {snapshotter}"),
            )
        })
    }

    /// The image's configuration, and the snapshots of its layers; of this kind, if one is asked for.
    async fn source(&self, image: &str, layers: Option<LayerKind>) -> Result<Source, DriverError> {
        let digest = self.containerd.image(image).await?.digest;
        self.source_at(image, &digest, layers).await
    }

    /// The same of the image whose manifest, or index, has this digest.
    async fn source_at(
        &self,
        image: &str,
        digest: &str,
        layers: Option<LayerKind>,
    ) -> Result<Source, DriverError> {
        let manifest = self.manifest(image, digest).await?;
        let digest = manifest["config"]["digest"].as_str().unwrap_or_default();
        let config = self.json(image, digest).await?;
        let listed = config["rootfs"]["diff_ids"].as_array().into_iter().flatten();
        let diff_ids: Vec<_> = listed.filter_map(Value::as_str).map(str::to_owned).collect();
        if diff_ids.is_empty() {
            return Err(DriverError::image(image, "it has no layers"));
        }
        let chains = chain_ids(&diff_ids);
        // From the highest layer down: where that is an image, all below it are.
        let mut query = LayerQuery { layers, below: None };
        let mut snapshots = Vec::new();
        for (index, (chain_id, diff_id)) in chains.iter().zip(&diff_ids).enumerate().rev() {
            query.below = index.checked_sub(1).map(|below| chains[below].clone());
            let found = match self.daemon.layer(self.namespace, chain_id, &query).await? {
                Some(found) => Some(found),
                None => self.referenced(image, &manifest["layers"][index], diff_id).await?,
            };
            let is_asked = |found: &SnapshotRef| {
                query.layers.is_none_or(|kind| kind == LayerKind::of(found.size_bytes))
            };
            let found = found.filter(is_asked).ok_or_else(|| {
                let (number, count) = (index + 1, chains.len());
                let kind = match query.layers {
                    Some(LayerKind::Images) => " as an image of its own, as those above it are",
                    Some(LayerKind::Disks) | None => "",
                };
                let reason = format!(
                    "layer {number} of {count} ({chain_id}) is not on the appliance{kind}; unpack the image first, by \
                     ctr images pull --snapshotter slackwater, or docker pull"
                );
                DriverError::image(image, reason)
            })?;
            // A disk has what is below it, whatever that is.
            query.layers = match LayerKind::of(found.size_bytes) {
                LayerKind::Disks => None,
                LayerKind::Images => Some(LayerKind::Images),
            };
            snapshots.push(found);
        }
        snapshots.reverse();
        Ok(Source { config, snapshots })
    }

    /// The snapshot that a layer names, of which containerd has the blob; none if that is an ordinary layer, or not
    /// there. What the manifest says of it is not asked: it is the word of the image's author.
    async fn referenced(
        &self,
        image: &str,
        layer: &Value,
        diff_id: &str,
    ) -> Result<Option<SnapshotRef>, DriverError> {
        let Some(digest) = layer["digest"].as_str() else { return Ok(None) };
        let failed = |reason: String| {
            let reason = format!("the reference in layer {}: {reason}", digest.escape_debug());
            DriverError::image(image, reason)
        };
        let Some(blob) = self.beginning(digest).await? else { return Ok(None) };
        let Some(reference) = reference::reference_in(blob, diff_id).map_err(failed)? else {
            return Ok(None);
        };
        let found = self.daemon.referenced(&reference).await;
        found.map(Some).map_err(|error| failed(error.to_string()))
    }

    /// A blob, as far as it can be one that holds a reference; none if containerd does not have it.
    async fn beginning(&self, digest: &str) -> Result<Option<Vec<u8>>, DriverError> {
        let mut blob = Vec::new();
        let read = async {
            let mut parts = self.containerd.open(digest).await?;
            while let Some(part) = parts.next().await? {
                blob.extend_from_slice(&part);
                if u64::try_from(blob.len()).is_ok_and(|length| length > reference::BLOB_BYTES_MAX)
                {
                    break;
                }
            }
            Ok::<(), EngineError>(())
        };
        match read.await {
            Err(EngineError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(()) => Ok(Some(blob)),
        }
    }

    /// The manifest for this machine; the digest is of that, or of an index.
    async fn manifest(&self, image: &str, digest: &str) -> Result<Value, DriverError> {
        let mut digest = digest.to_owned();
        for _ in 0..INDEX_DEPTH_MAX {
            let value = self.json(image, &digest).await?;
            // An index alone has a list of these (image-spec, image-index.md).
            if value["manifests"].is_null() {
                return Ok(value);
            }
            digest = for_this_machine(&value).ok_or_else(|| {
                let platform = format!("linux/{}", architecture());
                DriverError::image(image, format!("it has no manifest for {platform}"))
            })?;
        }
        Err(DriverError::image(image, "its index names indexes without end"))
    }

    async fn json(&self, image: &str, digest: &str) -> Result<Value, DriverError> {
        let bytes = self.containerd.read(digest).await?;
        serde_json::from_slice(&bytes)
            .map_err(|error| DriverError::image(image, format!("{digest}: {error}")))
    }

    /// Writes an image of references into containerd.
    async fn write(
        &self,
        target: &str,
        mut config: Value,
        snapshots: &[SnapshotRef],
    ) -> Result<(), DriverError> {
        let layers = reference::layers(self.daemon, snapshots).await?;
        let ids = diff_ids(&layers);
        for (layer, chain_id) in layers.iter().zip(chain_ids(&ids)) {
            let chain_id = chain_id.parse().map_err(|error: ChainIdParseError| {
                DriverError::image(target, error.to_string())
            })?;
            let image = Some(name::of_publication(target));
            self.daemon.publish(layer.snapshot.id, Some(chain_id), image).await?;
        }
        config["rootfs"] = json!({ "type": "layers", "diff_ids": ids });
        let config = to_bytes(target, &config)?;
        let leased = self.containerd.leased(now(), LEASE_DURATION).await?;
        for layer in &layers {
            leased.write(&layer.archive, HashMap::new()).await?;
        }
        leased.write(&config, HashMap::new()).await?;
        let manifest = to_bytes(target, &manifest_of(&config, &layers))?;
        let digest = leased.write(&manifest, manifest_labels(&config, &layers)).await?;
        let image = Target {
            media_type: media::MANIFEST.to_owned(),
            digest: digest.to_string(),
            size_bytes: length(&manifest),
        };
        leased.put_image(target, &image).await?;
        leased.end_lease().await?;
        Ok(())
    }
}

/// How the layers below a container have to be kept, if it writes already.
fn layers_of(volume: &Volume) -> Option<LayerKind> {
    match volume.content {
        Content::Disk { .. } => Some(LayerKind::Disks),
        Content::Upper { .. } => Some(LayerKind::Images),
        _ => None,
    }
}

fn to_bytes(image: &str, value: &Value) -> Result<Vec<u8>, DriverError> {
    serde_json::to_vec(value).map_err(|error| DriverError::image(image, error.to_string()))
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or_default()
}

fn manifest_of(config: &[u8], layers: &[ReferenceLayer]) -> Value {
    let descriptor = |media_type: &str, bytes: &[u8]| {
        json!({ "mediaType": media_type, "digest": Digest::of(bytes).to_string(),
            "size": length(bytes) })
    };
    let layers: Vec<_> = layers
        .iter()
        .map(|layer| {
            let mut descriptor = descriptor(media::LAYER, &layer.archive);
            descriptor["annotations"] = json!({ annotation::NAME: layer.annotation });
            descriptor
        })
        .collect();
    json!({ "schemaVersion": 2, "mediaType": media::MANIFEST,
        "config": descriptor(media::CONFIG, config), "layers": layers })
}

/// What tells containerd's garbage collection that the manifest needs its parts.
fn manifest_labels(config: &[u8], layers: &[ReferenceLayer]) -> HashMap<String, String> {
    let mut labels = HashMap::from([(
        "containerd.io/gc.ref.content.config".to_owned(),
        Digest::of(config).to_string(),
    )]);
    for (index, layer) in layers.iter().enumerate() {
        let key = format!("containerd.io/gc.ref.content.l.{index}");
        labels.insert(key, layer.diff_id.to_string());
    }
    labels
}

/// The digest of the manifest of an index that this machine runs.
fn for_this_machine(index: &Value) -> Option<String> {
    let manifests = index["manifests"].as_array()?;
    let fits = |entry: &&Value| {
        let platform = &entry["platform"];
        platform["os"] == "linux" && platform["architecture"] == architecture()
    };
    // A list of one may leave out for which machine it is.
    let only = (manifests.len() == 1).then(|| manifests.first()).flatten();
    let entry = manifests.iter().find(fits).or(only.filter(|only| only["platform"].is_null()))?;
    entry["digest"].as_str().map(str::to_owned)
}

/// This machine's processor in the words of images.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use slackwater_archive::Reference;
    use slackwater_client::types::SnapshotId;

    use super::*;

    #[test]
    fn a_manifest_names_its_parts_and_their_snapshots() {
        let snapshot = SnapshotRef { id: SnapshotId::from_bytes([7; 16]), size_bytes: 1 << 30 };
        let reference = Reference {
            store_id: "store".to_owned(),
            snapshot_id: uuid::Uuid::from_bytes([7; 16]),
            size_bytes: 1 << 30,
            mac: Some("07".repeat(32).parse().unwrap()),
        };
        let layers = [ReferenceLayer::new(&reference, snapshot)];
        let config = br#"{"os":"linux"}"#;
        let manifest = manifest_of(config, &layers);
        let layer = &manifest["layers"][0];
        assert_eq!(
            layer["annotations"][annotation::NAME],
            format!("store/{}/{}", snapshot.id, 1 << 30)
        );
        assert_eq!(layer["digest"], layers[0].diff_id.to_string());
        let labels = manifest_labels(config, &layers);
        assert_eq!(labels["containerd.io/gc.ref.content.config"], manifest["config"]["digest"]);
        assert_eq!(labels["containerd.io/gc.ref.content.l.0"], layer["digest"]);
    }

    #[test]
    fn the_manifest_of_this_machine_is_taken() {
        let entry = |architecture: &str, digest: &str| {
            json!({ "mediaType": media::MANIFEST, "digest": digest, "size": 1,
                "platform": { "os": "linux", "architecture": architecture } })
        };
        let index = json!({ "manifests": [entry("other", "a"), entry(architecture(), "b")] });
        assert_eq!(for_this_machine(&index).unwrap(), "b");
        assert!(for_this_machine(&json!({ "manifests": [entry("other", "a")] })).is_none());
    }
}

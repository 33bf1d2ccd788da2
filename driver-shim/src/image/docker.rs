//! Images of Docker: made by reference, and exported.

use std::path::Path;

use serde_json::{Value, json};
use slackwater_client::types::Timestamp;

use super::layout::{Export, docker_archive};
use super::name;
use super::reference;
use crate::engine::EngineError;
use crate::engine::daemon::Daemon;
use crate::engine::docker::{Docker, HistoryStep, ImageInfo};
use crate::error::DriverError;
use crate::worker::{Engine, SnapshotRef};

/// What the plugin calls a layer's own name in `docker inspect`.
pub const LAYER_KEY: &str = "Layer";

/// Makes `target` an image whose layers are references to those of `source`.
///
/// # Errors
/// The image is not on this driver, or a call failed.
pub async fn convert(
    docker: &Docker,
    daemon: &Daemon,
    source: &str,
    target: &str,
) -> Result<(), DriverError> {
    let info = docker.image(source).await?;
    let snapshots = snapshots(daemon, source, &info).await?;
    let layers = reference::layers(daemon, &snapshots).await?;
    // Kept before anything names them.
    for layer in &layers {
        daemon.publish(layer.snapshot.id, None, Some(name::of_publication(target))).await?;
    }
    let config = configuration(&info, &docker.history(source).await?);
    let parts: Vec<_> =
        layers.iter().map(|layer| (layer.diff_id, layer.archive.as_slice())).collect();
    let archive = docker_archive(&name::with_tag(target), config, &parts)
        .map_err(|error| DriverError::image(target, error.to_string()))?;
    docker.load(archive.into()).await?;
    Ok(())
}

/// Writes `image` with ordinary layers to an archive.
///
/// # Errors
/// The image is not on this driver, or a call failed.
pub async fn export(
    docker: &Docker,
    daemon: &Daemon,
    image: &str,
    output: &Path,
) -> Result<(), DriverError> {
    let info = docker.image(image).await?;
    let layers = snapshots(daemon, image, &info).await?;
    let config = configuration(&info, &docker.history(image).await?);
    Export { image, config, layers: &layers }.write(daemon, output).await
}

/// The snapshots of an image's layers, the lowest first.
async fn snapshots(
    daemon: &Daemon,
    image: &str,
    info: &ImageInfo,
) -> Result<Vec<SnapshotRef>, DriverError> {
    let wanted = info.root_fs.layers.len();
    if wanted == 0 {
        return Err(DriverError::image(image, "it has no layers"));
    }
    let data = info.graph_driver.data.as_ref();
    let layer = data.and_then(|data| data.get(LAYER_KEY)).ok_or_else(|| {
        let driver = &info.graph_driver.name;
        DriverError::image(
            image,
            format!(
                "Docker keeps it by the driver {driver}; pull it by a Docker with -s slackwater"
            ),
        )
    })?;
    let mut links = daemon.chain(Engine::Docker, layer).await?.links;
    links.reverse();
    if links.len() != wanted {
        let got = links.len();
        let reason = format!("it has {wanted} layers, the driver knows {got}; pull it again");
        return Err(DriverError::image(image, reason));
    }
    let snapshots = links.into_iter().map(|link| {
        let name = link.name;
        link.snapshot.ok_or_else(|| EngineError::NotFound {
            peer: "the driver",
            what: format!("snapshot of layer {name}"),
        })
    });
    Ok(snapshots.collect::<Result<_, _>>()?)
}

/// The configuration of the image; `docker inspect` and `docker history` show all of it that
/// matters to whoever runs it.
fn configuration(info: &ImageInfo, steps: &[HistoryStep]) -> Value {
    let mut config = json!({
        "architecture": info.architecture,
        "os": info.os,
        "created": info.created,
        "config": info.config,
        "history": history(info.root_fs.layers.len(), steps),
    });
    for (key, value) in [("author", &info.author), ("variant", &info.variant)] {
        if !value.is_empty() {
            config[key] = value.as_str().into();
        }
    }
    config
}

/// The steps, the first one first, as many with a layer as there are layers. Docker does not say
/// which step made one; those of no size are taken for those that did not, if that adds up.
fn history(layer_count: usize, steps: &[HistoryStep]) -> Vec<Value> {
    if steps.iter().filter(|step| step.size > 0).count() != layer_count {
        let step = json!({ "created_by": "slackwater-driver image" });
        return vec![step; layer_count];
    }
    let entry = |step: &HistoryStep| {
        let nanos = u64::try_from(step.created).unwrap_or_default().saturating_mul(1_000_000_000);
        let created = Timestamp::from_nanos(nanos).to_string();
        let mut entry = json!({ "created": created, "created_by": step.created_by });
        if !step.comment.is_empty() {
            entry["comment"] = step.comment.as_str().into();
        }
        if step.size == 0 {
            entry["empty_layer"] = true.into();
        }
        entry
    };
    steps.iter().rev().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(created_by: &str, size: u64) -> HistoryStep {
        let (created_by, comment) = (created_by.to_owned(), String::new());
        HistoryStep { created_by, created: 1, comment, size }
    }

    #[test]
    fn history_has_a_step_for_each_layer() {
        let steps = [step("CMD", 0), step("RUN", 7), step("ADD", 5)];
        let history = super::history(2, &steps);
        assert_eq!(history.len(), 3);
        assert_eq!(history[0]["created_by"], "ADD");
        assert_eq!(history[2]["empty_layer"], true);
        let with_layer =
            |history: &[Value]| history.iter().filter(|step| step["empty_layer"] != true).count();
        assert_eq!(with_layer(&history), 2);
        // A layer of no bytes: it cannot be told which, so all are named alike.
        assert_eq!(with_layer(&super::history(3, &steps)), 3);
    }
}

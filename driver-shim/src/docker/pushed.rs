//! Which images the layers belong to that leave for a registry or a file: dockerd's call for a layer's tar names none, and
//! the event that it tells when a push or a save is done names the image.
//!
//! ```text
//! Diff of a layer by reference --> published for an unnamed image (`?`), and counted
//! event: push NAME, save ID    --> the image's uppermost layer --> all below it that are by reference, also those that
//!                                  the registry had: published for NAME, and counted down
//! as often named as it left    --> published no more for the unnamed image
//! ```
//! A layer of which no event comes stays published for the unnamed image, whatever is unpublished by name: the push failed,
//! or dockerd could not be asked, or this process did not count it. What is counted is forgotten where events may have been
//! missed.
//!
//! dockerd is only followed while it calls this plugin: to connect to it may start one that was stopped.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use slackwater_client::types::{ImageName, SnapshotId};
use tokio::sync::Notify;

use super::driver::{GraphDriver, Inner};
use crate::engine::EngineError;
use crate::engine::docker::{Docker, ImageEvent, ImageInfo};
use crate::image::docker::LAYER_KEY;
use crate::image::name;
use crate::worker::{Archive, Extra, Key, Volume, WorkerError, now};

/// Time between two tries to follow dockerd, which calls its plugins before it serves others; and to name an image.
const RETRY: Duration = Duration::from_secs(2);

/// Tries to follow dockerd after one of its calls.
const TRIES_MAX: u32 = 60;

/// Tries to name an image while the appliance does not take it.
const NAMING_TRIES_MAX: u32 = 150;

/// Time after which it is looked whether the driver is still there.
const LOOK: Duration = Duration::from_secs(30);

/// Longest time of one answer of dockerd.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// Snapshots that are counted at a time; of more it is not known how often they left.
const COUNTED_MAX: usize = 4096;

/// What left, and was not named yet.
#[derive(Debug, Default)]
pub(super) struct Pushed {
    /// How often each snapshot left without having been named.
    counts: Mutex<HashMap<SnapshotId, u32>>,
    called: Notify,
}

impl Pushed {
    /// dockerd called.
    pub(super) fn note_call(&self) {
        self.called.notify_one();
    }

    /// A snapshot is about to leave.
    pub(super) fn leaves(&self, snapshot: SnapshotId) {
        let mut counts = self.counts.lock();
        if counts.len() < COUNTED_MAX || counts.contains_key(&snapshot) {
            let count = counts.entry(snapshot).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Those that left, and were not named as often.
    fn counted(&self) -> HashSet<SnapshotId> {
        self.counts.lock().keys().copied().collect()
    }

    /// It was named; whether it was so as often as it left.
    fn is_named(&self, snapshot: SnapshotId) -> bool {
        let mut counts = self.counts.lock();
        let Some(count) = counts.get_mut(&snapshot) else { return false };
        *count -= 1;
        let is_named = *count == 0;
        if is_named {
            counts.remove(&snapshot);
        }
        is_named
    }

    /// An event may have been missed: all that left so far stays for the unnamed image.
    fn forget(&self) {
        self.counts.lock().clear();
    }

    /// Waits until dockerd calls.
    async fn call(&self) {
        self.called.notified().await;
    }

    /// Forgets a call of before.
    fn forget_call(&self) {
        use futures_util::FutureExt;
        let _ = self.called.notified().now_or_never();
    }
}

/// Names what dockerd pushes and saves, until the driver is gone.
pub(super) async fn name_all(pushed: Arc<Pushed>, driver: Weak<Inner>, docker: Docker) {
    let mut names = Names { driver, docker, since_nanos: now().as_nanos(), tries: 0, left: None };
    loop {
        pushed.call().await;
        for _ in 0..TRIES_MAX {
            if names.driver.strong_count() == 0 {
                return;
            }
            match names.follow().await {
                // dockerd ended, and those that it would have told of with it.
                Ok(()) => {
                    pushed.forget();
                    pushed.forget_call();
                    break;
                }
                Err(error) => {
                    tracing::debug!(%error, "Docker does not tell which images are pushed")
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// What names images.
struct Names {
    driver: Weak<Inner>,
    docker: Docker,
    /// Events of before are not asked for.
    since_nanos: u64,
    /// How often the next event was tried.
    tries: u32,
    /// What had left when it was tried first.
    left: Option<HashSet<SnapshotId>>,
}

impl Names {
    /// Follows dockerd until it ends, or the driver is gone.
    async fn follow(&mut self) -> Result<(), EngineError> {
        let events = self.docker.image_events(self.since_nanos);
        let mut events = within(events).await?;
        tracing::debug!("following Docker's events");
        loop {
            match tokio::time::timeout(LOOK, events.next()).await {
                Err(_) if self.driver.strong_count() == 0 => return Ok(()),
                Err(_) => {}
                // A dockerd that is killed ends in the middle of what it tells.
                Ok(Ok(None) | Err(_)) => return Ok(()),
                Ok(Ok(Some(event))) => self.carry_out(&event).await?,
            }
        }
    }

    /// Names what an event tells. What the appliance does not take is told again, if events are asked for once more.
    async fn carry_out(&mut self, event: &ImageEvent) -> Result<(), EngineError> {
        let Some(inner) = self.driver.upgrade() else { return Ok(()) };
        let driver = GraphDriver { inner };
        let image = &event.actor.id;
        // What leaves from now on does so for another image, however often this event is tried.
        let left = self.left.take().unwrap_or_else(|| driver.inner.pushed.counted());
        match driver.name(&self.docker, event, &left).await {
            Ok(()) => {}
            Err(Unnamed::Docker(error)) => {
                driver.inner.pushed.forget();
                tracing::warn!(%image, %error, "what is published for it has no name: Docker did not describe it");
            }
            Err(Unnamed::Appliance(error)) => {
                self.tries += 1;
                if self.tries < NAMING_TRIES_MAX {
                    tracing::debug!(%image, %error, "not named yet");
                    self.left = Some(left);
                    return Err(EngineError::unexpected("the appliance", error.to_string()));
                }
                driver.inner.pushed.forget();
                tracing::warn!(%image, %error, "what is published for it has no name: the appliance did not take it");
            }
        }
        self.tries = 0;
        self.since_nanos = event.time_nanos.saturating_add(1).max(self.since_nanos);
        Ok(())
    }
}

/// Why an image was not named.
enum Unnamed {
    Docker(EngineError),
    Appliance(WorkerError),
}

impl From<EngineError> for Unnamed {
    fn from(error: EngineError) -> Self {
        Self::Docker(error)
    }
}

async fn within<T>(answer: impl Future<Output = Result<T, EngineError>>) -> Result<T, EngineError> {
    let late =
        |_| EngineError::unexpected("Docker", format!("no answer within {ANSWER_TIME_MAX:?}"));
    tokio::time::timeout(ANSWER_TIME_MAX, answer).await.map_err(late)?
}

/// The snapshot that the reference of a layer names.
fn referred(volume: &Volume) -> Option<SnapshotId> {
    match &volume.extra {
        Extra::Docker(extra) if matches!(extra.archive, Some(Archive::Reference(_))) => {
            volume.snapshot().map(|snapshot| snapshot.id)
        }
        _ => None,
    }
}

impl GraphDriver {
    /// Publishes the layers of an image that left for its names.
    async fn name(
        &self,
        docker: &Docker,
        event: &ImageEvent,
        left: &HashSet<SnapshotId>,
    ) -> Result<(), Unnamed> {
        let image = event.actor.id.as_str();
        // One that is pushed with all its tags is named without one.
        if event.action == "push" && !name::has_tag(image) {
            for tagged in within(docker.names_of(image)).await? {
                let info = within(docker.image(&tagged)).await?;
                self.publish_image(&info, &[name::of_publication(&tagged)], left).await?;
            }
            return Ok(());
        }
        let info = within(docker.image(image)).await?;
        let names: Vec<_> = match event.action.as_str() {
            "push" => vec![name::of_publication(image)],
            // What is saved is named by its id.
            _ if info.repo_tags.is_empty() => vec![ImageName::unknown()],
            _ => info.repo_tags.iter().map(|tag| name::of_publication(tag)).collect(),
        };
        self.publish_image(&info, &names, left).await
    }

    /// Publishes what is by reference among an image's layers; of them `left` before.
    async fn publish_image(
        &self,
        image: &ImageInfo,
        names: &[ImageName],
        left: &HashSet<SnapshotId>,
    ) -> Result<(), Unnamed> {
        let parent_of = |volume: &Volume| self.worker().get(volume.parent.as_ref()?);
        let uppermost = image.layer(LAYER_KEY);
        let uppermost = uppermost.and_then(|layer| self.worker().get(&Key::docker(layer)));
        let layers = std::iter::successors(uppermost, parent_of);
        let snapshots: Vec<_> = layers.filter_map(|layer| referred(&layer)).collect();
        for snapshot in &snapshots {
            for name in names {
                match self.worker().publish_for(*snapshot, Some(name)).await {
                    // It was deleted on the appliance: no name keeps it.
                    Ok(()) | Err(WorkerError::UnknownSnapshot { .. }) => {}
                    Err(error) => return Err(Unnamed::Appliance(error)),
                }
            }
        }
        for snapshot in snapshots {
            if left.contains(&snapshot)
                && self.inner.pushed.is_named(snapshot)
                && let Err(error) = self.worker().end_unnamed(snapshot).await
            {
                tracing::warn!(%snapshot, %error, "it stays published for an image without a name, too");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_left_twice_is_named_twice() {
        let pushed = Pushed::default();
        let [one, other] = [1, 2].map(|byte| SnapshotId::from_bytes([byte; 16]));
        pushed.leaves(one);
        pushed.leaves(one);
        assert!(!pushed.is_named(other) && !pushed.is_named(one) && pushed.is_named(one));
        // Another process counted it, or nothing left.
        assert!(!pushed.is_named(one));
        pushed.leaves(one);
        pushed.forget();
        pushed.leaves(other);
        assert!(!pushed.is_named(one) && pushed.is_named(other));
    }
}

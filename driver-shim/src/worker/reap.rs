//! Taking back: obsolete files, mounts that nobody uses, snapshots that nobody bound.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use parking_lot::Mutex;
use slackwater_attach::{Mounted, Source};
use slackwater_client::query::ListSnapshots;
use slackwater_client::types::{Labels, SnapshotId};
use uuid::Uuid;

use super::appliance::WORKER_LABEL;
use super::layers::image_of;
use super::state::{Change, FileKind, OwnFile};
use super::uppers::Removed;
use super::volume::{Content, Key, MountedAs};
use super::{Worker, WorkerError};

/// Time between two looks at files that could not be deleted.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Time between two looks at everything.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(600);

/// Files that are taken back at a time: enough to hide the appliance's answer time.
const REAPED_AT_ONCE: usize = 8;

/// A captured snapshot that was not bound in this time never will be: an engine binds it within
/// the call, or after its own retries of half a minute.
pub(super) const CAPTURE_AGE_MAX: Duration = Duration::from_secs(120);

/// How long a deletion may fail before the log warns: an appliance restarts, and a container ends, in less.
const UNDELETED_TIME_MAX: Duration = Duration::from_secs(600);

/// Time between two warnings of one file.
const WARNING_INTERVAL: Duration = Duration::from_secs(3600);

/// Why a disk stays whose loop device is not free.
const IN_USE: &str = "a process or a mount namespace of this machine still uses its disk";

/// Obsolete files whose deletion failed: when it failed first, and when the log warned last.
#[derive(Debug, Default)]
pub(super) struct Undeleted(Mutex<HashMap<Uuid, (Instant, Option<Instant>)>>);

impl Undeleted {
    /// Forgets all files but these: the others are gone.
    fn keep_only(&self, files: &[OwnFile]) {
        let names: HashSet<Uuid> = files.iter().map(|file| file.name).collect();
        self.0.lock().retain(|name, _| names.contains(name));
    }

    /// It is gone.
    pub(super) fn forget(&self, file: Uuid) {
        self.0.lock().remove(&file);
    }

    /// Whether its last deletion failed.
    pub(super) fn has(&self, file: Uuid) -> bool {
        self.0.lock().contains_key(&file)
    }

    /// Notes a deletion that failed. Returns for how long they have, if it is time for a warning.
    fn note(&self, file: Uuid, now: Instant) -> Option<Duration> {
        let mut failed = self.0.lock();
        let (first, warned) = failed.entry(file).or_insert((now, None));
        let is_due = warned.is_none_or(|at| now.duration_since(at) >= WARNING_INTERVAL);
        let age = now.duration_since(*first);
        if age < UNDELETED_TIME_MAX || !is_due {
            return None;
        }
        *warned = Some(now);
        Some(age)
    }
}

/// What a look at everything took back.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Reconciled {
    /// Files of this worker that no volume named.
    pub files: usize,
    /// Mounts that no volume needed.
    pub mounts: usize,
    /// Snapshots of this worker without a clone.
    pub snapshots: usize,
}

impl Worker {
    /// Removes a volume: a record alone, at once. What it had on the appliance and on this
    /// machine is taken back in the background.
    ///
    /// # Errors
    /// `NotFound`, `HasChildren`, `State`.
    pub async fn remove(&self, key: &Key) -> Result<(), WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            let volume = worker.existing(&key)?;
            let mut images = volume.mounted.map_or_else(Vec::new, |_| worker.images_from(&volume));
            // One that stays mounted is a layer.
            if let Content::Image { snapshot, .. } = &volume.content {
                images.push(snapshot.id);
            }
            worker.apply(vec![Change::Delete(key)]).await?;
            if let Some(MountedAs::View(snapshot)) = volume.mounted {
                worker.unmount_view_later(snapshot);
            }
            worker.unmount_images_later(images);
            Ok(())
        })
        .await
    }

    /// Takes back now what is to be taken back, as far as that is possible; nothing once a change
    /// of the state failed.
    pub async fn clean_up(&self) {
        let _reaping = self.inner.reaping.lock().await;
        if let Err(error) = self.inner.state.require_certain() {
            tracing::debug!(%error, "nothing is taken back");
            return;
        }
        let files = self.obsolete_files();
        self.inner.undeleted.keep_only(&files);
        let reaping = futures_util::stream::iter(files).for_each_concurrent(
            REAPED_AT_ONCE,
            |file| async move {
                match self.take_back(file).await {
                    Ok(true) => {}
                    Ok(false) => self.note_undeleted(file, &IN_USE),
                    Err(error) => self.note_undeleted(file, &error),
                }
            },
        );
        reaping.await;
    }

    /// The files that no volume needs, without those that are being made.
    pub(super) fn obsolete_files(&self) -> Vec<OwnFile> {
        let in_progress = self.inner.in_progress.lock();
        let obsolete = self.inner.state.obsolete().into_iter();
        obsolete.filter(|file| !in_progress.contains(&file.name)).collect()
    }

    /// Logs why a file was not deleted: a warning if that has gone on for long.
    fn note_undeleted(&self, file: OwnFile, reason: &dyn Display) {
        let path = self.path_of(file);
        match self.inner.undeleted.note(file.name, Instant::now()) {
            Some(age) => tracing::warn!(file = %path, %reason, minutes = age.as_secs() / 60,
                "cannot delete a file on the appliance that no volume needs; it keeps its space there; the driver goes on trying"),
            None => tracing::debug!(file = %path, %reason, "not deleted yet"),
        }
    }

    /// Logs why what volumes that are gone had written is not removed from a disk.
    pub(super) fn note_unremoved(&self, disk: Uuid, reason: &std::io::Error) {
        match self.inner.unremoved.note(disk, Instant::now()) {
            Some(age) => tracing::warn!(target = %self.disk_target(disk).display(), %reason,
                minutes = age.as_secs() / 60,
                "cannot remove what containers that are gone had written; it keeps its space; the driver goes on trying"),
            None => tracing::debug!(%disk, %reason, "not removed yet"),
        }
    }

    /// Deletes an obsolete file. Returns `false` if a process still uses its disk.
    async fn take_back(&self, file: OwnFile) -> Result<bool, WorkerError> {
        let path = self.path_of(file);
        if file.kind == FileKind::Disk {
            let attach = self.attach().await?;
            attach.unmount(&self.disk_target(file.name)).await?;
            // A namespace of a container that just ends may still have it.
            if !attach.is_released(Source::File(&path)).await? {
                return Ok(false);
            }
        }
        // A failed change may have made a volume name it, as a restart would then find.
        self.inner.state.require_certain()?;
        match self.client().delete_file(&path).await {
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        let inner = Arc::clone(&self.inner);
        let struck_off = tokio::task::spawn_blocking(move || inner.state.strike_off(file)).await;
        struck_off.map_err(super::interrupted)??;
        Ok(true)
    }

    pub(super) fn start_reaping(&self) {
        // Held weakly while it waits, so that the last worker to go closes the state.
        let inner = Arc::downgrade(&self.inner);
        let wanted = Arc::clone(&self.inner.reap);
        tokio::spawn(async move {
            while let Some(inner) = inner.upgrade() {
                let worker = Self { inner };
                worker.clean_up().await;
                let mut removed = worker.remove_uppers().await;
                while removed == Removed::Some {
                    worker.clean_up().await;
                    removed = worker.remove_uppers().await;
                }
                let has_more = !worker.inner.state.obsolete().is_empty();
                let idle = worker.look_at_idle_upper_disk().await;
                drop(worker);
                let wait = match removed {
                    Removed::All if !has_more => idle.unwrap_or(RECONCILE_INTERVAL),
                    _ => RETRY_INTERVAL,
                };
                let _ = tokio::time::timeout(wait, wanted.notified()).await;
            }
        });
    }

    pub(super) fn start_reconciling(&self) {
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            while let Some(inner) = inner.upgrade() {
                let worker = Self { inner };
                let wait = match worker.compare(CAPTURE_AGE_MAX).await {
                    Ok(done) if done == Reconciled::default() => RECONCILE_INTERVAL,
                    Ok(done) => {
                        tracing::info!(?done, "took back what nobody needs");
                        RECONCILE_INTERVAL
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot compare with the appliance yet");
                        RETRY_INTERVAL
                    }
                };
                drop(worker);
                tokio::time::sleep(wait).await;
            }
        });
    }

    /// Compares what this worker has on the appliance and mounted here with its volumes, and
    /// takes back what no volume needs; snapshots without a clone only if they are older than
    /// `age_min`.
    ///
    /// # Errors
    /// `Appliance`, `Attach`, `State`.
    pub async fn reconcile(&self, age_min: Duration) -> Result<Reconciled, WorkerError> {
        let done = self.compare(age_min).await;
        if let Some(disk) = self.inner.state.upper_disk()
            && self.inner.state.require_certain().is_ok()
        {
            self.let_go_of_empty_disk(disk).await;
            self.clean_up().await;
        }
        done
    }

    /// The same, but for a disk that nothing is on and that waits for what comes.
    async fn compare(&self, age_min: Duration) -> Result<Reconciled, WorkerError> {
        self.inner.state.require_certain()?;
        let mounts = self.reconcile_mounts().await;
        self.clean_up().await;
        // What a crash left is deleted also where something cannot be unmounted.
        let mut done = Reconciled { files: self.reconcile_files().await?, ..Default::default() };
        done.mounts = mounts?;
        done.snapshots = self.reconcile_snapshots(age_min).await?;
        self.look_at_upper_disks().await;
        self.clean_up().await;
        Ok(done)
    }

    async fn reconcile_mounts(&self) -> Result<usize, WorkerError> {
        let attach = self.attach().await?;
        let mut count = 0;
        let images_directory = self.images_directory();
        let is_image = |mounted: &Mounted| mounted.target.parent() == Some(&*images_directory);
        let (images, others): (Vec<_>, Vec<_>) =
            attach.mounts().await?.into_iter().partition(is_image);
        self.found_images(images.iter().filter_map(|mounted| image_of(&mounted.source)).collect());
        for mounted in others {
            let Some(name) = mounted.target.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            if mounted.target.parent() == Some(&self.state_directory().join("views")) {
                if let Ok(snapshot) = name.parse() {
                    self.unmount_view(snapshot).await?;
                }
                continue;
            }
            let Ok(name) = name.parse::<Uuid>() else {
                continue;
            };
            match self.owner_of(name) {
                Some(key) => self.unmount_unused(&key).await?,
                None if self.inner.in_progress.lock().contains(&name) => {}
                None if self.inner.state.upper_disks().contains(&name) => {}
                None => {
                    tracing::info!(target = %mounted.target.display(), "unmounting: no volume has it");
                    attach.unmount(&mounted.target).await?;
                    count += 1;
                }
            }
        }
        Ok(count)
    }

    /// The volume whose disk that is.
    fn owner_of(&self, disk: Uuid) -> Option<Key> {
        let is_owner =
            |content: &Content| matches!(content, Content::Disk { name, .. } if *name == disk);
        let owners = self.inner.state.matching(|volume| is_owner(&volume.content));
        owners.into_iter().next().map(|volume| volume.key)
    }

    async fn unmount_unused(&self, key: &Key) -> Result<(), WorkerError> {
        let _lock = self.inner.volume_locks.lock(key).await;
        if let Some(volume) = self.get(key)
            && !self.is_used(&volume)
        {
            let volume = self.change(key, |volume| volume.mounted = Some(MountedAs::Disk)).await?;
            self.unmount_later(&volume);
        }
        Ok(())
    }

    async fn reconcile_files(&self) -> Result<usize, WorkerError> {
        let prefix = format!("workers/{}/", self.worker_id());
        let mut count = 0;
        let paths = self.file_paths(&prefix).await?;
        let is_first = !self.inner.has_compared_files.swap(true, Ordering::AcqRel);
        for path in paths {
            let file = match path.strip_prefix(&prefix).and_then(|rest| rest.split_once('/')) {
                Some(("disks", name)) => (FileKind::Disk, name.parse()),
                Some(("holds", name)) => (FileKind::Hold, name.parse()),
                _ => continue,
            };
            let (kind, Ok(name)) = file else {
                continue;
            };
            let file = OwnFile { kind, name };
            if !self.inner.state.knows(file) {
                if is_first {
                    tracing::info!(
                        path,
                        "a file that was being made when the driver ended: it is deleted"
                    );
                } else {
                    tracing::warn!(
                        path,
                        "a file of this worker that it does not know: it is deleted"
                    );
                }
                self.apply(vec![Change::Obsolete(file)]).await?;
                count += 1;
            }
        }
        if count > 0 {
            self.clean_up().await;
        }
        Ok(count)
    }

    async fn reconcile_snapshots(&self, age_min: Duration) -> Result<usize, WorkerError> {
        self.inner.captured.lock().retain(|_, taken| taken.elapsed() < CAPTURE_AGE_MAX);
        let mut query = ListSnapshots {
            labels: Labels::from([(WORKER_LABEL.to_owned(), self.worker_id().to_string())]),
            ..ListSnapshots::default()
        };
        let mut unheld = BTreeSet::new();
        let now = self.appliance_now().await?;
        loop {
            let page = self.client().snapshots(&query).await?;
            let is_old = |created: u64| {
                u128::from(now.as_nanos().saturating_sub(created)) >= age_min.as_nanos()
            };
            let without_clone = page.items.into_iter().filter(|snapshot| {
                snapshot.clone_count == 0 && is_old(snapshot.created_at.as_nanos())
            });
            unheld.extend(without_clone.map(|snapshot| snapshot.id));
            match page.next {
                Some(next) => query.after = Some(next),
                None => break,
            }
        }
        let mut count = 0;
        for id in unheld {
            count += usize::from(self.delete_unheld(id).await?);
        }
        if count > 0 {
            self.clean_up().await;
        }
        Ok(count)
    }

    /// Deletes a snapshot that has no clone, unless it may still be bound.
    async fn delete_unheld(&self, id: SnapshotId) -> Result<bool, WorkerError> {
        let is_fresh = |taken: &Instant| taken.elapsed() < CAPTURE_AGE_MAX;
        if self.inner.captured.lock().get(&id).is_some_and(is_fresh) {
            return Ok(false);
        }
        // Cloned and the clone deleted: then the appliance deletes the snapshot, unless another
        // worker found it by its chain and cloned it in between.
        match self.clone_as(FileKind::Hold, id).await {
            Ok(making) => {
                drop(making);
                Ok(true)
            }
            Err(WorkerError::UnknownSnapshot { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicUsize;

    use slackwater_client::{Client, RetryPolicy};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::worker::state::failing::FailingDisk;
    use crate::worker::{Inner, WorkerOptions};

    /// An appliance that deletes whatever it is asked to, and counts the calls; before it answers one
    /// it does `first`.
    async fn appliance(first: impl Fn() + Send + 'static) -> (String, Arc<AtomicUsize>) {
        answering("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned(), first).await
    }

    /// One that answers everything so.
    pub(in crate::worker) async fn answering(
        answer: String,
        first: impl Fn() + Send + 'static,
    ) -> (String, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                count.fetch_add(1, Ordering::Relaxed);
                first();
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        (url, calls)
    }

    /// An answer that refuses.
    pub(in crate::worker) fn problem(status: u16, code: &str) -> String {
        problem_that_says(status, code, "x")
    }

    fn problem_that_says(status: u16, code: &str, detail: &str) -> String {
        let body = format!(
            r#"{{"type":"x","title":"x","status":{status},"code":"{code}","detail":"{detail}"}}"#
        );
        let head = format!("HTTP/1.1 {status} x\r\ncontent-type: application/problem+json\r\n");
        let length = body.len();
        format!("{head}connection: close\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    pub(in crate::worker) fn worker(url: &str, disk: &FailingDisk) -> Worker {
        let client = Client::builder(url).retry(RetryPolicy::never()).build().unwrap();
        worker_with(client, disk)
    }

    /// A worker whose calls are those of this client.
    pub(in crate::worker) fn worker_with(client: Client, disk: &FailingDisk) -> Worker {
        let attach = slackwater_attach::Options {
            method: None,
            nfs_address: ([127, 0, 0, 1], 1).into(),
            export: "/slackwater".to_owned(),
            mount_path: None,
            state_directory: "/nonexistent".into(),
            fuse_program: Vec::new(),
            tool_program: Vec::new(),
            prefers_fuse: false,
            rights: slackwater_attach::Rights::CONTAINER,
            mounts_end: false,
        };
        let options = WorkerOptions {
            client,
            attach,
            state_directory: "/nonexistent".into(),
            disk_size_bytes: 1 << 20,
            layers: crate::worker::LayerKind::default(),
            imaged_after: crate::worker::IMAGED_AFTER,
            trust: crate::trust::Trust::default(),
            registries: crate::registry::Registries::default(),
        };
        Worker { inner: Arc::new(Inner::new(options, Uuid::from_u128(1), disk.state())) }
    }

    /// A seal whose commit failed may be on the disk: then a restart finds that the hold, which
    /// memory lists as obsolete, is all that keeps the snapshot.
    #[tokio::test]
    async fn after_a_failed_change_of_the_state_nothing_is_deleted_on_the_appliance() {
        let (url, calls) = appliance(|| {}).await;
        let disk = FailingDisk::new();
        let worker = worker(&url, &disk);
        let old = worker.making(FileKind::Hold).unwrap();
        drop(old);
        worker.clean_up().await;
        assert_eq!(calls.load(Ordering::Relaxed), 1, "what nobody names is deleted");
        let hold = worker.making(FileKind::Hold).unwrap();
        disk.fail();
        assert!(worker.apply(vec![Change::Deleted(hold.file)]).await.is_err());
        drop(hold);
        worker.clean_up().await;
        assert!(worker.reconcile(Duration::ZERO).await.is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    /// The appliance restarts between clone and answer, and forgets which calls it answered.
    #[tokio::test]
    async fn a_clone_whose_answer_was_lost_is_taken() {
        let (url, _) = answering(problem(409, "exists"), || {}).await;
        let worker = worker(&url, &FailingDisk::new());
        let making =
            worker.clone_as(FileKind::Hold, SnapshotId::from_bytes([7; 16])).await.unwrap();
        assert!(worker.inner.state.knows(making.file));
    }

    /// It then makes the hold by a call of its own.
    #[tokio::test]
    async fn an_older_appliance_is_asked_again_without_what_it_does_not_know() {
        let said = "unknown field `becomes_clone`, expected one of `path`, `name`";
        for (detail, expected) in [(said, 2), ("the path has no meaning", 1)] {
            let answer = problem_that_says(422, "invalid_value", detail);
            let (url, calls) = answering(answer, || {}).await;
            let worker = worker(&url, &FailingDisk::new());
            let labels = Labels::new();
            worker.take_image(Uuid::from_u128(1), None, labels).await.unwrap_err();
            assert_eq!(calls.load(Ordering::Relaxed), expected, "{detail}");
        }
    }

    /// In the middle of taking back: what is under way ends, and no more is begun.
    #[tokio::test]
    async fn a_change_that_fails_meanwhile_ends_the_deletions() {
        let disk = FailingDisk::new();
        let of_appliance = disk.clone();
        let (url, calls) = appliance(move || of_appliance.fail()).await;
        let worker = worker(&url, &disk);
        for _ in 0..3 * REAPED_AT_ONCE {
            let file = OwnFile { kind: FileKind::Hold, name: Uuid::new_v4() };
            worker.apply(vec![Change::Obsolete(file)]).await.unwrap();
        }
        worker.clean_up().await;
        let calls = calls.load(Ordering::Relaxed);
        assert!((1..=REAPED_AT_ONCE).contains(&calls), "{calls}");
    }

    #[test]
    fn a_deletion_that_fails_for_long_is_warned_of_each_hour() {
        let (undeleted, file) = (Undeleted::default(), Uuid::from_u128(1));
        let begin = Instant::now();
        let after = |seconds| undeleted.note(file, begin + Duration::from_secs(seconds));
        assert_eq!(after(0), None);
        assert_eq!(after(599), None);
        assert_eq!(after(600), Some(Duration::from_secs(600)));
        assert_eq!(after(700), None);
        assert_eq!(after(4200), Some(Duration::from_secs(4200)));
        undeleted.keep_only(&[OwnFile { kind: FileKind::Hold, name: file }]);
        assert_eq!(after(7800), Some(Duration::from_secs(7800)));
        undeleted.keep_only(&[]);
        assert_eq!(after(20_000), None);
    }
}

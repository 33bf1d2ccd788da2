//! What becomes of an export that is mounted otherwise than it is to be, or that nothing serves any more.
//!
//! ```text
//! of another appliance, or method    free what nothing uses -> in use? an error : unmount, mount
//! by another path, or settings       free what nothing uses -> in use? goes on, with a warning : unmount, mount
//! without a server (FUSE)            unmount what is on it, and it; serve anew
//! ```
//! Invariant: nothing that is in use is unmounted, but for what can only fail any more.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::mounting::without_secret;
use super::{CLOSED_WITHIN, Export, FREED_PAUSE};
use crate::disk::target_path;
use crate::kernel::{self, MountPoint};
use crate::serving;
use crate::tools::{UMOUNT, says};
use crate::{AttachError, Mounted};

/// How long a disk that nothing uses waits for the appliance. That may be gone for ever, and an engine waits.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

impl Export {
    /// Mounts again what is mounted or served otherwise than it would be now, or refused by the appliance, unless a disk
    /// of it is mounted or attached.
    pub(super) async fn replace_if_idle(
        &self,
        point: MountPoint,
        reason: &str,
    ) -> Result<Option<MountPoint>, AttachError> {
        self.free_unused().await?;
        if !self.is_idle().await? {
            tracing::warn!(
                reason,
                "the export stays mounted as it is, since disks of it are in use; restart the driver when none is"
            );
            return Ok(Some(point));
        }
        match self.replace(&point).await {
            Ok(()) => Ok(None),
            // A program is in it, or the appliance is away. What is mounted may have gone all the same.
            Err(error) => {
                tracing::warn!(%error, reason, "the export stays mounted as it is; restart the driver to mount it again");
                kernel::mounted_at(&self.directory)
            }
        }
    }

    /// Whether no disk of the export is mounted or attached, once what is on its way out has gone.
    async fn is_idle(&self) -> Result<bool, AttachError> {
        match self.wait_until_unused().await {
            Ok(()) => Ok(true),
            Err(AttachError::Busy { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Takes away an export of other options, if no disk of it is in use.
    pub(super) async fn replace(&self, point: &MountPoint) -> Result<(), AttachError> {
        self.free_unused().await?;
        if !self.is_idle().await? {
            return Err(AttachError::OtherExport {
                got: format!("{} ({})", without_secret(&point.source), point.kind),
                expected: format!("{} ({})", self.source(), self.method),
            });
        }
        let nfs_snapshots = self.state_directory.join("export.snapshot");
        for directory in [&nfs_snapshots, &self.directory] {
            self.unmount_all(directory).await?;
        }
        if point.kind == serving::FILE_SYSTEM {
            self.service().end_processes().await;
        }
        Ok(())
    }

    /// Takes away an export that nobody serves any more, with everything on it, and begins anew.
    pub(super) async fn recover(&mut self) -> Result<(), AttachError> {
        let (all, unused) = (self.users()?, self.unused_targets()?);
        let is_lost = |disk: &&Mounted| !unused.contains(&disk.target);
        self.lost = all.iter().filter(is_lost).cloned().collect();
        tracing::error!(
            lost = self.lost.len(),
            "all processes that served the export were killed; its disks are unmounted"
        );
        for disk in all.iter().rev() {
            if !disk.read_only {
                // A frozen file system outlives its last mount.
                let _not_frozen = self.tools.unfreeze(&disk.target).run().await;
            }
            let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c", "--lazy"]);
            call.argument(&disk.target).run().await?;
            let _not_empty = fs::remove_dir(&disk.target);
        }
        let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c", "--lazy"]);
        call.argument(&self.directory).run().await?;
        self.start_serving()
    }

    /// Unmounts a directory as often as something is mounted on it. A loop device is on no file some moments before the
    /// kernel has closed that file, so that a directory that is in use is tried again.
    pub(super) async fn unmount_all(&self, directory: &Path) -> Result<(), AttachError> {
        let deadline = Instant::now() + CLOSED_WITHIN;
        while kernel::mounted_at(directory)?.is_some() {
            let call = self.tools.call(UMOUNT).arguments(["-n", "-i", "-c"]);
            match call.argument(directory).run().await {
                Err(error) if says(&error, "target is busy") => {
                    // A program is in it, or an image that is mounted in another mount namespace.
                    if Instant::now() >= deadline {
                        return Err(AttachError::Busy { targets: vec![directory.to_owned()] });
                    }
                    tokio::time::sleep(FREED_PAUSE).await;
                }
                outcome => drop(outcome?),
            }
        }
        Ok(())
    }

    /// Unmounts the disks that nothing uses. What cannot be is in the way then, and the caller finds that.
    async fn free_unused(&self) -> Result<(), AttachError> {
        let unused = self.unused_targets()?;
        let disks = self.disks()?.into_iter().filter(|disk| unused.contains(&disk.target));
        let (read, mut written): (Vec<_>, Vec<_>) = disks.partition(|disk| disk.read_only);
        // To be unmounted these wait for the appliance, and then are in the way without being in the table.
        if !written.is_empty() && !self.is_answered(ANSWERED_WITHIN).await {
            tracing::warn!(
                disks = written.len(),
                "the appliance that is mounted does not answer: its disks stay mounted, though nothing uses them"
            );
            written.clear();
        }
        for disk in [read, written].concat() {
            if let Err(error) = self.free(&disk).await {
                tracing::warn!(%error, target = %disk.target.display(), "it stays mounted, though nothing uses it");
            }
        }
        Ok(())
    }

    /// Unmounts a disk. What is only read has nothing to bring to the appliance; what is written is needed no more.
    async fn free(&self, disk: &Mounted) -> Result<(), AttachError> {
        if !disk.read_only {
            self.thaw_before_unmount(&disk.target).await?;
            match self.sync_locked(&disk.target, ANSWERED_WITHIN).await {
                Err(AttachError::LostWrites { .. }) => {}
                synced => synced?,
            }
        }
        self.unmount_top(&disk.target).await
    }

    /// Whether nothing uses a disk of the export.
    pub(super) fn are_all_unused(&self) -> Result<bool, AttachError> {
        let unused = self.unused_targets()?;
        Ok(self.disks()?.iter().all(|disk| unused.contains(&disk.target)))
    }

    fn unused_targets(&self) -> Result<Vec<PathBuf>, AttachError> {
        self.unused.iter().map(|target| target_path(target)).collect()
    }
}

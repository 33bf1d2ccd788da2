//! Freezing and thawing disks.
//!
//! ```text
//! freeze -> fsfreeze --freeze ... ends -> snapshot -> thaw
//!              |
//!              +- takes too long, or this process is killed: it goes on by itself, and is undone
//!                 at its end
//! ```
//!
//! Invariants:
//! - No signal ends a freeze that waits for the appliance, and it does not end with the process that
//!   began it. Until it is undone no other freeze of that disk begins, as that would be undone too.
//! - A file system that is unmounted frozen keeps its loop device for good, with its file. So a disk
//!   is thawed before it is unmounted.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;

use crate::AttachError;
use crate::disk::target_path;
use crate::export::Export;
use crate::process::running;
use crate::tools::{CHILDREN_MAX, FSFREEZE, TOOL_TIME_LIMIT, says, timed_out};

/// The pause before a thaw that failed is tried again. Containers wait until then.
const THAW_PAUSE: Duration = Duration::from_secs(1);

/// The pause between two looks whether a process has ended that is not a child of this one.
const END_PAUSE: Duration = Duration::from_millis(100);

/// The directory that a command line freezes, if it is one of [`Export::freeze`].
fn frozen_by<'a>(words: &[&'a Path]) -> Option<&'a Path> {
    match words {
        [tool, option, target]
            if tool.file_name() == Some(FSFREEZE.program.as_ref())
                && *option == Path::new("--freeze") =>
        {
            Some(target)
        }
        _ => None,
    }
}

impl Export {
    pub(crate) async fn freeze(self: Arc<Self>, target: &Path) -> Result<(), AttachError> {
        self.freeze_within(target, TOOL_TIME_LIMIT).await
    }

    async fn freeze_within(
        self: Arc<Self>,
        target: &Path,
        limit: Duration,
    ) -> Result<(), AttachError> {
        let target = target_path(target)?;
        let _turn = self.locks.lock(&target).await;
        Self::require_disk(&target)?;
        let command = format!("fsfreeze --freeze {}", target.display());
        let given_up = || timed_out(&command, self.tools.address(), limit);
        if self.lock_late().contains(&target) {
            // What undoes that freeze would undo this one too, while it is relied on.
            return Err(given_up());
        }
        self.note_frozen(&target, true);
        // No signal reaches a freeze that waits for the appliance, and it goes on when that is
        // back. So it is not given up on, but undone when it has come to its end.
        let call = self.tools.call(FSFREEZE).argument("--freeze").argument(&target);
        let mut freezing = tokio::spawn(call.without_limit().run());
        let Ok(frozen) = tokio::time::timeout(limit, &mut freezing).await else {
            self.undo_at_its_end(target, async { drop(freezing.await) });
            return Err(given_up());
        };
        let frozen = frozen.map_err(|_| AttachError::Interrupted)?;
        match frozen {
            // It is frozen already.
            Err(error) if says(&error, "Device or resource busy") => Ok(()),
            Err(error) => {
                self.note_frozen(&target, false);
                Err(error)
            }
            Ok(_) => Ok(()),
        }
    }

    pub(crate) async fn thaw(&self, target: &Path) -> Result<(), AttachError> {
        let target = target_path(target)?;
        let _turn = self.locks.lock(&target).await;
        match Self::require_disk(&target) {
            Err(AttachError::NotMounted { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => self.unfreeze(&target).await,
        }
    }

    async fn unfreeze(&self, target: &Path) -> Result<(), AttachError> {
        match self.tools.unfreeze(target).run().await {
            // It was not frozen.
            Err(error) if !says(&error, "Invalid argument") => Err(error),
            _ => {
                self.note_frozen(target, false);
                Ok(())
            }
        }
    }

    /// Thaws the disk once its freeze has ended; until then there is no other freeze of it.
    fn undo_at_its_end(
        self: &Arc<Self>,
        target: PathBuf,
        end: impl Future<Output = ()> + Send + 'static,
    ) {
        self.lock_late().insert(target.clone());
        let export = self.clone();
        tokio::spawn(async move {
            end.await;
            // A thaw that was given up can come to its end later still, as the freeze did.
            while let Err(error) = export.thaw(&target).await {
                tracing::error!(%error, target = %target.display(), "a disk stays frozen");
                tokio::time::sleep(THAW_PAUSE).await;
            }
            export.lock_late().remove(&target);
        });
    }

    /// Thaws all disks that a killed process left frozen, and those that it was freezing once they
    /// are frozen.
    pub(crate) async fn thaw_all(self: &Arc<Self>) -> Result<(), AttachError> {
        let disks = self.disks()?;
        let writable: Vec<_> = disks.iter().filter(|disk| !disk.read_only).collect();
        // Looked for before the thaws: a freeze that ends in between is thawed with the others.
        let freezes = running(|words| {
            let target = frozen_by(words)?;
            writable.iter().any(|disk| disk.target == target).then(|| target.to_owned())
        });
        for (process, target) in freezes {
            tracing::warn!(
                target = %target.display(),
                "a freeze goes on that a process began which was killed; the disk is thawed after it"
            );
            self.undo_at_its_end(target, async move {
                while !process.has_ended() {
                    tokio::time::sleep(END_PAUSE).await;
                }
            });
        }
        // A thaw takes no permit, so their number is held here.
        for some in writable.chunks(CHILDREN_MAX) {
            // They say that nothing was frozen, as a rule.
            let thaws = some.iter().map(|disk| self.tools.unfreeze(&disk.target).run());
            thaws.collect::<JoinSet<_>>().join_all().await;
        }
        Ok(())
    }

    /// Thaws a disk that somebody else may have frozen, too.
    pub(crate) async fn thaw_before_unmount(&self, target: &Path) -> Result<(), AttachError> {
        let is_ours = self.is_noted_frozen(target);
        match self.unfreeze(target).await {
            Err(error) if !is_ours => {
                tracing::warn!(%error, target = %target.display(), "it may be unmounted frozen");
                Ok(())
            }
            thawed => thawed,
        }
    }

    fn lock_late(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_frozen(&self, target: &Path, is_frozen: bool) {
        let mut frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if is_frozen {
            frozen.insert(target.to_owned());
        } else {
            frozen.remove(target);
        }
    }

    fn is_noted_frozen(&self, target: &Path) -> bool {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner).contains(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::{PATIENCE, Scratch, run};
    use crate::{Access, Source};
    use std::fs;
    use std::process::Command;

    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_freeze_that_was_given_up_is_undone_before_there_is_another() {
        let (scratch, export) = Scratch::new().await;
        let target = &scratch.target;
        scratch.make_file_system();
        export.mount(Source::File("disk"), target, Access::ReadWrite).await.unwrap();
        fs::write(target.join("x"), "x").unwrap();
        run("fsfreeze", &["--freeze", scratch.files()]);
        let freeze = export.clone().freeze_within(target, Duration::from_secs(1));
        let error = freeze.await.unwrap_err();
        assert!(matches!(error, AttachError::TimedOut { .. }), "{error:?}");
        let again = tokio::time::timeout(PATIENCE, export.clone().freeze(target));
        let error = again.await.unwrap().unwrap_err();
        assert!(matches!(error, AttachError::TimedOut { .. }), "{error:?}");

        run("fsfreeze", &["--unfreeze", scratch.files()]);
        let undone = async {
            while !export.lock_late().is_empty() {
                tokio::time::sleep(END_PAUSE).await;
            }
        };
        tokio::time::timeout(PATIENCE, undone).await.unwrap();
        let file = target.join("y");
        let writing = tokio::task::spawn_blocking(move || fs::write(file, "y").unwrap());
        tokio::time::timeout(PATIENCE, writing).await.unwrap().unwrap();
        export.clone().freeze(target).await.unwrap();
        // Frozen for good: the system refuses another.
        let refused = Command::new("fsfreeze").arg("--freeze").arg(target).output().unwrap();
        assert!(!refused.status.success());
        export.thaw(target).await.unwrap();
        export.unmount(target).await.unwrap();
    }

    /// As by a process that was killed, and whose `fsfreeze` ended after the next one's start.
    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_disk_that_another_process_froze_lets_its_device_go() {
        let (scratch, export) = Scratch::new().await;
        let target = scratch.target.as_path();
        scratch.make_file_system();
        export.mount(Source::File("disk"), target, Access::ReadWrite).await.unwrap();
        run("fsfreeze", &["--freeze", target.to_str().unwrap()]);
        export.unmount(target).await.unwrap();
        let released = async {
            while !export.is_released(Source::File("disk")).unwrap() {
                tokio::time::sleep(END_PAUSE).await;
            }
        };
        tokio::time::timeout(PATIENCE, released).await.unwrap();
    }

    /// Its `fsfreeze` waits for the appliance, which is stood for by a frozen file system below.
    #[tokio::test(flavor = "multi_thread")]
    async fn as_root_a_freeze_that_outlives_its_process_is_undone_by_the_next_one() {
        let (scratch, export) = Scratch::new().await;
        let target = scratch.target.as_path();
        scratch.make_file_system();
        export.mount(Source::File("disk"), target, Access::ReadWrite).await.unwrap();
        fs::write(target.join("x"), "x").unwrap();
        run("fsfreeze", &["--freeze", scratch.files()]);
        let mut freezing = Command::new("fsfreeze").arg("--freeze").arg(target).spawn().unwrap();
        // It is not known by its command line before it has begun.
        let begun = async {
            while running(|words| frozen_by(words).filter(|of| *of == target).map(drop)).is_empty()
            {
                tokio::time::sleep(END_PAUSE).await;
            }
        };
        tokio::time::timeout(PATIENCE, begun).await.unwrap();
        drop(export);
        let next = scratch.open().await;
        assert!(next.lock_late().contains(target), "it knows of it");
        let refused = next.clone().freeze(target).await.unwrap_err();
        assert!(matches!(refused, AttachError::TimedOut { .. }), "{refused:?}");

        run("fsfreeze", &["--unfreeze", scratch.files()]);
        let ended = tokio::task::spawn_blocking(move || freezing.wait().unwrap());
        assert!(tokio::time::timeout(PATIENCE, ended).await.unwrap().unwrap().success());
        let file = target.join("y");
        let writing = tokio::task::spawn_blocking(move || fs::write(file, "y").unwrap());
        tokio::time::timeout(PATIENCE, writing).await.unwrap().unwrap();
        next.unmount(target).await.unwrap();
    }
}

//! The face of the crate: every operation runs as a task of its own, so that a caller who stops
//! waiting leaves nothing half done.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::target_path;
use crate::export::{Export, STATISTICS};
use crate::image::WITHOUT_LOOP_RELEASE;
use crate::probe::{self, Probe};
use crate::{Access, AttachError, FileSystem, Method, Mounted, MountedBy, Options, Source, kernel};

/// The attached export. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Attach {
    export: Arc<Export>,
}

/// Runs `work` to its end even if nobody waits for it any more.
async fn to_the_end<Done: Send + 'static>(
    work: impl Future<Output = Result<Done, AttachError>> + Send + 'static,
) -> Result<Done, AttachError> {
    tokio::spawn(work).await.unwrap_or(Err(AttachError::Interrupted))
}

/// A source that a task can own.
enum OwnedSource {
    File(String),
    Snapshot(uuid::Uuid),
}

impl From<Source<'_>> for OwnedSource {
    fn from(source: Source<'_>) -> Self {
        match source {
            Source::File(path) => Self::File(path.to_owned()),
            Source::Snapshot(id) => Self::Snapshot(id),
        }
    }
}

impl OwnedSource {
    fn borrow(&self) -> Source<'_> {
        match self {
            Self::File(path) => Source::File(path),
            Self::Snapshot(id) => Source::Snapshot(*id),
        }
    }
}

impl Attach {
    /// Whether a kernel of this release mounts EROFS images from their files. Older ones take a loop device for each. The
    /// call does not look whether the kernel has EROFS, and how it was configured.
    #[must_use]
    pub fn mounts_images_from_files() -> bool {
        kernel::release().is_some_and(|release| release >= WITHOUT_LOOP_RELEASE)
    }

    /// What this machine has of what attaching needs, for a method or for whichever works.
    pub async fn probe(method: Option<Method>) -> Probe {
        probe::probe(method).await
    }

    /// Mounts the export, or adopts what an earlier process with the same state directory left:
    /// its mounts go on, what it had frozen is thawed, also if that freeze ends later, loop devices
    /// that it had not mounted yet are freed. An appliance that is away does not make it fail; mounting a disk does then.
    ///
    /// A FUSE export that was started with another command line is mounted again, unless disks of it are in use: then it
    /// goes on with that ([`Self::is_served_alike`]).
    pub async fn open(options: Options) -> Result<Self, AttachError> {
        Self::open_freeing(options, Vec::new()).await
    }

    /// The same, by a caller who knows at which targets nothing uses what is mounted: where the export has to be mounted again,
    /// they are unmounted first. What is lost does not tell of them.
    pub async fn open_freeing(options: Options, unused: Vec<PathBuf>) -> Result<Self, AttachError> {
        let open = async move { Export::open(options, unused).await };
        Ok(Self { export: to_the_end(open).await? })
    }

    /// Takes a local directory as the export; the snapshots are the files of its `.snapshot`.
    pub async fn on_directory(options: Options, directory: PathBuf) -> Result<Self, AttachError> {
        let open = async move { Export::local(options, &directory).await };
        Ok(Self { export: to_the_end(open).await? })
    }

    /// How the export is attached.
    pub fn method(&self) -> Method {
        self.export.method
    }

    /// By what the appliance lets this machine's mount of the export in; none while it is not mounted.
    pub fn mounted_by(&self) -> Option<MountedBy> {
        self.export.mounted_by()
    }

    /// Whether a FUSE export is served with the command line of the options, and not with that of an earlier daemon.
    pub fn is_served_alike(&self) -> bool {
        self.export.is_served_alike()
    }

    /// Where the export is visible.
    pub fn export_directory(&self) -> &Path {
        &self.export.directory
    }

    /// The mounts that were lost because every process that served them was killed. They are
    /// unmounted; what was synced is on the appliance.
    pub fn lost(&self) -> &[Mounted] {
        &self.export.lost
    }

    /// Mounts a source at `target`, which is made. Ok if that is so already; `Occupied` if
    /// something else is mounted there. A snapshot is read-only whatever `access` says.
    pub async fn mount(
        &self,
        source: Source<'_>,
        target: &Path,
        access: Access,
    ) -> Result<(), AttachError> {
        let (export, source, target) =
            (self.export.clone(), OwnedSource::from(source), target.to_owned());
        to_the_end(async move { export.mount(source.borrow(), &target, access).await }).await
    }

    /// Whether a file that holds ext4 is mounted at `target`, with this access. By what the kernel has in
    /// memory: it waits for no mount and not for the appliance. `Occupied` if something else is mounted there.
    pub fn is_mounted(
        &self,
        source: Source<'_>,
        target: &Path,
        access: Access,
    ) -> Result<bool, AttachError> {
        let place = self.export.place(source)?;
        self.export.is_mounted(&place, &target_path(target)?, access, FileSystem::Ext4)
    }

    /// Mounts a source that holds an EROFS image at `target`, which is made, for reading: from the file
    /// itself where the kernel can (Linux 6.12), else through a loop device. Nothing may write the file any
    /// more. Ok if that is so already; `Occupied` if something else is mounted there.
    pub async fn mount_image(&self, source: Source<'_>, target: &Path) -> Result<(), AttachError> {
        let (export, source, target) =
            (self.export.clone(), OwnedSource::from(source), target.to_owned());
        to_the_end(async move { export.mount_image(source.borrow(), &target).await }).await
    }

    /// Which of these images are mounted at their targets already, by one look into the kernel's table. It waits for no
    /// mount and not for the appliance. `Occupied` if something else is mounted at one of them.
    pub fn mounted_images(&self, images: &[(Source<'_>, &Path)]) -> Result<Vec<bool>, AttachError> {
        self.export.mounted_images(images)
    }

    /// Whether the kernel has EROFS, or a module that brings it: then images can be mounted, one way or the other.
    pub async fn has_images(&self) -> bool {
        self.export.has_images().await
    }

    /// Opens a regular file of the export for reading and writing, by its path; the export is mounted first if it is not.
    /// What reads and writes it waits while the appliance is away.
    pub async fn open_file(&self, path: &str) -> Result<File, AttachError> {
        let (export, path) = (self.export.clone(), path.to_owned());
        to_the_end(async move { export.open_file(path).await }).await
    }

    /// Unmounts and removes the directory; Ok if that is so already. Whether what was written came
    /// to the appliance only a `sync` before tells: the kernel drops what it cannot write, and
    /// says nothing. `LostWrites` if one that was needed here failed. The loop device is free, or will be when the last mount namespace or
    /// process that uses the disk lets go: see `is_released`.
    pub async fn unmount(&self, target: &Path) -> Result<(), AttachError> {
        let (export, target) = (self.export.clone(), target.to_owned());
        to_the_end(async move { export.unmount(&target).await }).await
    }

    /// Whether no loop device is on the source any more, and no image is mounted from it in this mount namespace.
    pub async fn is_released(&self, source: Source<'_>) -> Result<bool, AttachError> {
        self.export.is_released(source)
    }

    /// Brings all data to the appliance and stops writes until `thaw`. Frozen already is Ok.
    pub async fn freeze(&self, target: &Path) -> Result<(), AttachError> {
        let (export, target) = (self.export.clone(), target.to_owned());
        to_the_end(async move { export.freeze(&target).await }).await
    }

    /// Lets writes go on. Not frozen, or not mounted, is Ok.
    pub async fn thaw(&self, target: &Path) -> Result<(), AttachError> {
        let (export, target) = (self.export.clone(), target.to_owned());
        to_the_end(async move { export.thaw(&target).await }).await
    }

    /// Brings all data to the appliance, committed there; `LostWrites` if some of it was lost. One that was given up goes on; the next
    /// of that target waits for it, and fails if it did: the kernel tells of a lost write once.
    pub async fn sync(&self, target: &Path) -> Result<(), AttachError> {
        let (export, target) = (self.export.clone(), target.to_owned());
        to_the_end(async move { export.sync(&target).await }).await
    }

    /// Makes an empty ext4 on the file at this path of the export: the same bytes each time for
    /// the same size, without lost+found. The file must be new, that is, all zeros.
    pub async fn make_file_system(&self, path: &str) -> Result<(), AttachError> {
        let (export, path) = (self.export.clone(), path.to_owned());
        to_the_end(async move { export.make_file_system(&path).await }).await
    }

    /// Grows the ext4 on the file to the file's size. It must not be mounted.
    pub async fn grow_file_system(&self, path: &str) -> Result<(), AttachError> {
        let (export, path) = (self.export.clone(), path.to_owned());
        to_the_end(async move { export.grow_file_system(&path).await }).await
    }

    /// The disks that are mounted below the state directory. Paths are without symbolic links.
    pub async fn mounts(&self) -> Result<Vec<Mounted>, AttachError> {
        self.export.disks()
    }

    /// The disks of this export that are mounted anywhere, as this process sees it. Paths are without symbolic links.
    pub async fn mounts_anywhere(&self) -> Result<Vec<Mounted>, AttachError> {
        self.export.disks_anywhere()
    }

    /// Unmounts the export and ends the processes that serve it; `Busy` if a disk is in use.
    pub async fn shut_down(&self) -> Result<(), AttachError> {
        let export = self.export.clone();
        to_the_end(async move { export.close().await }).await
    }

    /// The file with the statistics of the FUSE server; `None` with NFS.
    pub fn statistics_file(&self) -> Option<PathBuf> {
        (self.method() == Method::Fuse).then(|| self.export.directory.join(STATISTICS))
    }
}

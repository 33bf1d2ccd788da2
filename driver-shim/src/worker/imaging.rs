//! The making of images: what a layer's tar holds, or what was written above images, as a file on the appliance.
//!
//! ```text
//!   tar of a layer ------------------------------------> archive::image --> workers/ID/holds/UUID
//!   upper directory ----------> archive::pack_upper --------^
//! ```
//! The file is listed as obsolete until the volume names it, so that one that is not finished goes. It becomes the clone
//! of the snapshot that is taken of it, and so keeps that.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use slackwater_archive::{ArchiveError, Imaged, PATHS_BYTES_MAX, image, layer_image, pack_upper};
use uuid::Uuid;

use super::appliance::Making;
use super::lowers::LowerLayer;
use super::merging::Merged;
use super::state::FileKind;
use super::uppers::upper_of;
use super::volume::{Content, Key, LayerKind, Volume};
use super::{Worker, WorkerError};

/// Size of the file of an image, whatever it holds: the appliance knows chains by the size of their files, and no
/// disk has this one. Sparse, so only what is written counts.
pub const IMAGE_SIZE_BYTES: u64 = (1 << 40) + 4096;

/// Layers that are packed at once; more wait. Each takes a processor, and memory for its names and attributes, twice.
pub(super) const PACKED_AT_ONCE: usize = 4;

/// Bytes between the one who packs and the one who writes the image.
const PIPE_BYTES: usize = 256 << 10;

/// A file that an image is to be written into.
#[derive(Debug)]
pub struct NewImage {
    making: Making,
    file: File,
    below: Option<Merged>,
}

impl NewImage {
    pub(super) fn name(&self) -> Uuid {
        self.making.file.name
    }

    /// What keeps the file from being deleted.
    pub(super) fn into_making(self) -> Making {
        self.making
    }

    /// Writes the image of a layer's tar, as containerd applies it. Blocks.
    ///
    /// # Errors
    /// [`ArchiveError`]; the file is then to be thrown away.
    pub fn write(&self, tar: impl Read) -> Result<Imaged, ArchiveError> {
        let below = self.below.as_ref().map(Merged::path);
        layer_image(tar, below.as_deref(), self.open()?)
    }

    /// Writes the image of what was packed from an upper directory, with its root. Blocks.
    fn write_packed(&self, tar: impl Read) -> Result<Imaged, ArchiveError> {
        let below = self.below.as_ref().map(Merged::path);
        image(tar, below.as_deref(), self.open()?, None)
    }

    fn open(&self) -> Result<File, ArchiveError> {
        self.file.try_clone().map_err(|source| ArchiveError::File {
            action: "open the image",
            path: PathBuf::from(self.making.file.name.to_string()),
            source,
        })
    }
}

impl Worker {
    /// How the layers are kept that have nothing below them, if this machine can do as it is set.
    pub async fn layers(&self) -> Result<LayerKind, WorkerError> {
        if self.inner.options.layers == LayerKind::Disks {
            return Ok(LayerKind::Disks);
        }
        if self.attach().await?.has_images().await {
            return Ok(LayerKind::Images);
        }
        if !self.inner.has_warned_of_images.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "layers are kept as disks: this kernel has no EROFS (modprobe erofs, or CONFIG_EROFS_FS)"
            );
        }
        Ok(LayerKind::Disks)
    }

    /// How a layer is kept that has this one below it.
    ///
    /// # Errors
    /// `NotFound`, `OfImages`, `Attach`.
    pub async fn layers_above(&self, parent: Option<&Key>) -> Result<LayerKind, WorkerError> {
        match parent {
            None => self.layers().await,
            Some(parent) => match self.lowers_of(&self.existing(parent)?)?.is_empty() {
                true => Ok(LayerKind::Disks),
                false => Ok(LayerKind::Images),
            },
        }
    }

    /// A new file for the image of a volume's layer.
    ///
    /// # Errors
    /// `NotFound`, `Appliance`, `Attach`, `State`, `Local`.
    pub async fn new_image(&self, key: &Key) -> Result<NewImage, WorkerError> {
        let volume = self.existing(key)?;
        let lowers = self.lowers_below(&volume)?;
        self.run(async move |worker: Self| worker.new_image_above(&lowers).await).await
    }

    pub(super) async fn new_image_above(
        &self,
        lowers: &[LowerLayer],
    ) -> Result<NewImage, WorkerError> {
        let below = self.merged(lowers).await?;
        let making = self.making(FileKind::Hold)?;
        let path = self.path_of(making.file);
        self.client().create_file(&path, IMAGE_SIZE_BYTES).await?;
        let file = self.attach().await?.open_file(&path).await?;
        Ok(NewImage { making, file, below })
    }

    /// Has a volume be the image that was written; what was written to it is dropped.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly` if it is not written any more, `State`; `Busy` while it is in use.
    pub async fn keep_image(
        &self,
        key: &Key,
        made: NewImage,
        imaged: Imaged,
    ) -> Result<(), WorkerError> {
        let key = key.clone();
        self.run(async move |worker: Self| {
            let _lock = worker.inner.volume_locks.lock(&key).await;
            if !matches!(worker.existing(&key)?.content, Content::Upper { .. }) {
                return Err(WorkerError::ReadOnly { key });
            }
            worker.await_users(&key).await?;
            let content = Content::ImageFile { name: made.name(), inodes: imaged.inodes };
            worker.become_content(&key, content, None).await.map(drop)
        })
        .await
    }

    /// Makes the image of what was written above images. The volume's lock is held.
    pub(super) async fn image_of_upper(
        &self,
        volume: &Volume,
        (disk, name): (Uuid, Uuid),
    ) -> Result<(NewImage, Imaged), WorkerError> {
        let key = &volume.key;
        if volume.is_damaged {
            return Err(WorkerError::Damaged { key: key.clone() });
        }
        self.await_users(key).await?;
        // `None`: the driver ends.
        let _turn = self.inner.packing.acquire().await.ok();
        let made = self.new_image_above(&self.lowers_below(volume)?).await?;
        // One that no engine has mounted yet has no directories.
        let below = made.below.as_ref().map(Merged::path);
        let upper = upper_of(&self.ready_upper(disk, name, below).await?);
        // Last: what it brings to the appliance is what is read.
        self.sync_upper(key, disk).await?;
        self.pack(key, upper, None, made).await
    }

    /// Writes the image of what an upper directory holds, which was written above the tree `seen` if that is other than what
    /// is below the image.
    pub(super) async fn pack(
        &self,
        key: &Key,
        upper: PathBuf,
        seen: Option<Merged>,
        made: NewImage,
    ) -> Result<(NewImage, Imaged), WorkerError> {
        let written = tokio::task::spawn_blocking(move || {
            let below = seen.as_ref().or(made.below.as_ref()).map(Merged::path);
            let imaged = write_upper(&upper, below, &made);
            (made, imaged)
        });
        let (made, imaged) = written.await.map_err(super::interrupted)?;
        let imaged = imaged.map_err(|source| WorkerError::Image { key: key.clone(), source })?;
        Ok((made, imaged))
    }
}

/// Writes the image of what an upper directory holds that was written above the tree `seen`, which is the one below the
/// image or has more.
fn write_upper(
    upper: &Path,
    seen: Option<PathBuf>,
    made: &NewImage,
) -> Result<Imaged, ArchiveError> {
    let failed = |source| ArchiveError::Write { source };
    let (reader, writer) = io::pipe().map_err(failed)?;
    std::thread::scope(|scope| {
        let packing = scope.spawn(move || {
            let mut out = io::BufWriter::with_capacity(PIPE_BYTES, writer);
            pack_upper(upper, seen.as_deref(), &mut out, PATHS_BYTES_MAX)
        });
        let imaged = made.write_packed(reader);
        let packed = packing.join().unwrap_or_else(|_| {
            Err(failed(io::Error::other("the thread that packs the layer ended")))
        });
        // Where the image fails first the writing of its tar fails, too, and the other way about.
        match packed {
            Err(ArchiveError::Write { .. }) | Ok(_) => imaged,
            Err(error) => Err(error),
        }
    })
}

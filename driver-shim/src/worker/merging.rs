//! Images put together as one tree, for the driver itself and for its commands.
//!
//! ```text
//!   STATE/images/B  --\
//!   STATE/images/A  ---+--> overlay at STATE/merged/UUID  --> a descriptor; the mount is taken away at once
//!                                                         or, for another program, a path, until that is let go of
//! ```
//! Invariant: the images stay mounted for as long as the tree is there. What a process that died left at `merged` the next
//! one takes away.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};
use slackwater_client::types::SnapshotId;
use uuid::Uuid;

use super::layers::{Images, OVERLAY_OPTIONS, Rootfs, on_disk};
use super::lowers::{LowerLayer, directories_in, images_in};
use super::uppers::{upper_of, work_of};
use super::volume::SnapshotRef;
use super::{Worker, WorkerError};

/// Images as the one tree that overlayfs makes of them, for reading, for as long as this lives.
#[derive(Debug)]
pub struct Merged {
    directory: File,
    _images: Images,
}

impl Merged {
    /// A path of it, for this process alone.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        path_of(&self.directory)
    }
}

/// Images as one tree, mounted where other programs see it, for as long as this lives.
#[derive(Debug)]
pub struct ViewOfImages {
    path: PathBuf,
    /// It is a mount of its own.
    is_overlay: bool,
    _images: Images,
}

impl ViewOfImages {
    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ViewOfImages {
    fn drop(&mut self) {
        if self.is_overlay {
            // What still reads it keeps it until then.
            take_away(&self.path);
        }
    }
}

/// A path of a directory that is open, for this process alone.
pub(super) fn path_of(directory: &File) -> PathBuf {
    format!("/proc/self/fd/{}", directory.as_raw_fd()).into()
}

impl Worker {
    /// Layers as one tree, which the driver reads; `None` of no layer. A volume that there is has to have been given those
    /// that are directories.
    ///
    /// # Errors
    /// `Appliance`, `Attach`, `Local`.
    pub(super) async fn merged(
        &self,
        lowers: &[LowerLayer],
    ) -> Result<Option<Merged>, WorkerError> {
        if lowers.is_empty() {
            return Ok(None);
        }
        let held = self.held(lowers).await?;
        let paths = held.paths.clone();
        let directory = on_disk(self.merging_point(), move |point| match &paths[..] {
            [only] => File::open(only),
            several => mount_overlay(several, None, point),
        });
        Ok(Some(Merged { directory: directory.await?, _images: held }))
    }

    /// Images as one tree, which another program reads; the highest one first.
    ///
    /// # Errors
    /// `Appliance`, `Attach`, `Local`.
    pub async fn view_of_images(
        &self,
        images: &[SnapshotRef],
    ) -> Result<ViewOfImages, WorkerError> {
        let images: Vec<_> = images.iter().copied().map(LowerLayer::Image).collect();
        self.run(async move |worker: Self| {
            let held = worker.held(&images).await?;
            if let [only] = &held.paths[..] {
                return Ok(ViewOfImages { path: only.clone(), is_overlay: false, _images: held });
            }
            let (point, paths) = (worker.merging_point(), held.paths.clone());
            on_disk(point.clone(), move |point| mount_overlay_at(&paths, None, point)).await?;
            Ok(ViewOfImages { path: point, is_overlay: true, _images: held })
        })
        .await
    }

    /// Layers whose images stay mounted for as long as the answer lives.
    async fn held(&self, lowers: &[LowerLayer]) -> Result<Images, WorkerError> {
        let ids: Vec<SnapshotId> = images_in(lowers).into_iter().map(|image| image.id).collect();
        let _directories = self.hold_directories(&directories_in(lowers))?;
        for id in &ids {
            *self.inner.views.lock().entry(*id).or_default() += 1;
        }
        let mut held = Images { worker: self.clone(), ids, paths: Vec::new(), _directories };
        held.paths = self.mount_lowers(lowers).await?;
        Ok(held)
    }

    /// A new place for a tree.
    fn merging_point(&self) -> PathBuf {
        self.state_directory().join("merged").join(Uuid::new_v4().to_string())
    }

    /// The tree that an engine sees of an overlay, for the driver itself.
    pub(super) async fn open_rootfs(&self, rootfs: Rootfs) -> Result<File, WorkerError> {
        on_disk(self.merging_point(), move |point| match rootfs {
            Rootfs::Directory(path) => File::open(path),
            Rootfs::Overlay { lowers, directory: Some(written) } if lowers.is_empty() => {
                File::open(upper_of(&written))
            }
            Rootfs::Overlay { lowers, directory } => {
                mount_overlay(&lowers, directory.as_deref(), point)
            }
        })
        .await
    }
}

/// Takes away what an earlier process left: trees that it was mounting when it was killed, and the directories of images
/// that are not mounted after a reboot.
pub(super) fn forget_mount_points(state_directory: &Path) {
    for name in ["merged", "images"] {
        let folder = state_directory.join(name);
        let points = match fs::read_dir(&folder) {
            Ok(points) => points,
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "mount points stay");
                continue;
            }
        };
        for point in points.filter_map(|point| Some(point.ok()?.path())) {
            match name {
                // Mostly nothing is mounted there.
                "merged" => take_away(&point),
                // Where an image is mounted the directory is in use, and stays.
                _ => drop(fs::remove_dir(&point)),
            }
        }
    }
}

/// Takes away a mount of an overlay and its directory: what has it open keeps it.
fn take_away(point: &Path) {
    let _ = rustix::mount::unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    let _ = fs::remove_dir(point);
}

/// The tree that overlayfs makes of images, for writing if the overlay's own directories are in `written`. The mount goes
/// with the directory that is returned.
fn mount_overlay(lowers: &[PathBuf], written: Option<&Path>, point: &Path) -> io::Result<File> {
    mount_overlay_at(lowers, written, point)?;
    let directory = File::open(point);
    rustix::mount::unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    // An empty directory says nothing wrong.
    let _ = fs::remove_dir(point);
    directory
}

/// Mounts that tree at a place, which is made.
fn mount_overlay_at(lowers: &[PathBuf], written: Option<&Path>, point: &Path) -> io::Result<()> {
    let own = written.map(|directory| [upper_of(directory), work_of(directory)]);
    let own = own.iter().flatten().map(File::open).collect::<io::Result<Vec<_>>>()?;
    let opened = lowers.iter().map(File::open).collect::<io::Result<Vec<_>>>()?;
    // By descriptors: paths would not all fit into the page that mount(2) takes.
    let names: Vec<_> = opened.iter().map(|file| path_of(file).display().to_string()).collect();
    let mut options = vec![format!("lowerdir={}", names.join(":"))];
    let mut flags = MountFlags::RDONLY;
    if let [upper, work] = &own[..] {
        flags = MountFlags::empty();
        options.extend(OVERLAY_OPTIONS.map(str::to_owned));
        options.push(format!("upperdir={}", path_of(upper).display()));
        options.push(format!("workdir={}", path_of(work).display()));
    }
    let options = std::ffi::CString::new(options.join(","))?;
    fs::create_dir(point)?;
    let mounted = rustix::mount::mount("overlay", point, "overlay", flags, &*options);
    if mounted.is_err() {
        let _ = fs::remove_dir(point);
    }
    Ok(mounted?)
}

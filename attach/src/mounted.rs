//! Whether sources are mounted, from looks into the kernel's table alone.

use std::path::Path;

use crate::disk::target_path;
use crate::export::{Export, Place};
use crate::image;
use crate::kernel::{self, MountPoint};
use crate::{Access, AttachError, FileSystem, Rights, Source};

impl Export {
    /// Whether the target is that mount already; an error if it is another.
    pub(crate) fn is_mounted(
        &self,
        place: &Place,
        target: &Path,
        access: Access,
        kind: FileSystem,
    ) -> Result<bool, AttachError> {
        self.is_among(&kernel::mount_points()?, (place, target), access, kind)
    }

    /// Which of these images are mounted at their targets already, each an export's source with its target; an error if
    /// one of the targets is another mount. The table is read once, which takes as long as all mounts are many.
    pub(crate) fn mounted_images(
        &self,
        images: &[(Source<'_>, &Path)],
    ) -> Result<Vec<bool>, AttachError> {
        let points = kernel::mount_points()?;
        let is_mounted = |(source, target): &(Source<'_>, &Path)| {
            let (place, target) = (self.place(*source)?, target_path(target)?);
            self.is_among(&points, (&place, &target), Access::ReadOnly, FileSystem::Erofs)
        };
        images.iter().map(is_mounted).collect()
    }

    fn is_among(
        &self,
        points: &[MountPoint],
        (place, target): (&Place, &Path),
        access: Access,
        kind: FileSystem,
    ) -> Result<bool, AttachError> {
        let Some(point) = points.iter().rfind(|point| point.target == target) else {
            return Ok(false);
        };
        let (got, read_only) = match self.disk(point) {
            Some(disk) => (disk.source, disk.read_only),
            None => (point.source.display().to_string(), point.read_only),
        };
        let rights = Rights { set_id: !point.has("nosuid"), devices: !point.has("nodev") };
        let describe = |source: &str, kind: &str, read_only, rights: Rights| {
            let access = if read_only { "read-only" } else { "writable" };
            let image = if kind == image::FILE_SYSTEM { ", an image," } else { "" };
            format!("`{source}`{image} {access} with {}", rights.options())
        };
        let got = describe(&got, &point.kind, read_only, rights);
        let expected = describe(&place.path, kind.name(), access.is_read_only(), self.rights());
        if got == expected {
            return Ok(true);
        }
        Err(AttachError::Occupied { target: target.to_owned(), got, expected })
    }
}

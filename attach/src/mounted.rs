//! Whether sources are mounted, from looks into the kernel's table alone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::disk::target_path;
use crate::export::{Export, Place};
use crate::image;
use crate::kernel::{self, MountPoint};
use crate::{Access, AttachError, FileSystem, Rights, Source};

/// Where directories of targets are, each looked at once.
#[derive(Debug, Default)]
struct Targets<'a>(HashMap<&'a Path, PathBuf>);

impl<'a> Targets<'a> {
    /// As [`target_path`].
    fn path(&mut self, target: &'a Path) -> Result<PathBuf, AttachError> {
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return target_path(target);
        };
        if let Some(directory) = self.0.get(parent) {
            return Ok(directory.join(name));
        }
        let path = target_path(target)?;
        self.0.extend(path.parent().map(|directory| (parent, directory.to_owned())));
        Ok(path)
    }
}

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
    /// one of the targets is another mount. The table is read once, which takes as long as all mounts are many, and each
    /// directory of targets is resolved once.
    pub(crate) fn mounted_images(
        &self,
        images: &[(Source<'_>, &Path)],
    ) -> Result<Vec<bool>, AttachError> {
        let points = kernel::mount_points()?;
        let mut targets = Targets::default();
        let mut found = Vec::with_capacity(images.len());
        for (source, target) in images {
            let what = (&self.place(*source)?, &*targets.path(target)?);
            found.push(self.is_among(&points, what, Access::ReadOnly, FileSystem::Erofs)?);
        }
        Ok(found)
    }

    /// [`Self::is_mounted`], of what is mounted as the table says.
    pub(crate) fn is_among(
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

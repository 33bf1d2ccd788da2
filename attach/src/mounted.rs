//! Whether sources are mounted, from looks into the kernel's table: as it was when something was mounted or unmounted last.
//! What else that says is looked at again in the table of now.

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
        let what = (place, target);
        let known = self.is_among(&kernel::known_mount_points()?, what, access, kind);
        // A file system can become read-only and writable again without a change of the table that is signalled.
        let is_certain = match known {
            Ok(is_mounted) => !is_mounted || access.is_read_only() || !kernel::is_read_only(target),
            Err(_) => false,
        };
        match is_certain {
            true => known,
            false => self.is_among(&kernel::mount_points()?, what, access, kind),
        }
    }

    /// Which of these images are mounted at their targets already, each an export's source with its target; an error if
    /// one of the targets is another mount. Each directory of targets is resolved once.
    pub(crate) fn mounted_images<'a>(
        &self,
        images: &[(Source<'_>, &'a Path)],
    ) -> Result<Vec<bool>, AttachError> {
        let (points, mut targets) = (kernel::known_mount_points()?, Targets::default());
        let is_mounted = |(source, target): &(Source<'_>, &'a Path)| {
            let what = (&self.place(*source)?, &*targets.path(target)?);
            self.is_among(&points, what, Access::ReadOnly, FileSystem::Erofs)
        };
        images.iter().map(is_mounted).collect()
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

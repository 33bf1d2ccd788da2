//! The layer of an overlay's upper directory. Only what was copied up or made is read.
//!
//! ```text
//!  in the upper directory                     in the archive
//!  character device 0:0 (whiteout) NAME       .wh.NAME
//!  opaque directory DIR over a directory      DIR/ and DIR/.wh..wh..opq
//!  opaque directory DIR over nothing else     DIR/
//!  socket NAME over something                 .wh.NAME
//!  socket over nothing                        nothing
//!  trusted.overlay.overlay.X (escaped)        nothing
//!  user.overlay.X                             nothing
//!  other attributes of overlayfs              nothing, or a refusal
//!  anything else                              as `pack` writes it
//! ```
//!
//! Attributes that mean something to an overlay are no part of a layer, though a user of the overlay can set
//! some: other engines unpack a layer into a lower directory as it is, and there they would be marks.
//!
//! What overlayfs keeps elsewhere than in the upper directory cannot be packed from there, and is
//! refused: directories that were renamed, files without their content, hard links over an index.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};

use crate::changes::{PathMemory, attributes, bytes_of};
use crate::error::{ArchiveError, vanished};
use crate::overlay::{OPAQUE, own, without_marks};
use crate::pack::{Packed, Packer, check_name};
use crate::pax::Records;
use crate::root::{Place, Root, is_directory};

/// Why a renamed directory or a file without its content is refused.
const ELSEWHERE: &str = "overlayfs has its name or content elsewhere (redirect, metacopy); \
                         mount the overlay with redirect_dir=off,metacopy=off";

/// Why a hard link over an index is refused.
const INDEXED: &str = "overlayfs has other names of this hard link below (nlink); \
                       mount the overlay with index=off";

/// Why deletions that are no character devices are refused.
const XATTR_WHITEOUTS: &str = "it has a mark of overlayfs for whiteouts that are extended attributes; \
                               only character devices 0:0 and opaque=y can be packed: \
                               remove that attribute, and delete through the overlay";

/// Why an attribute of a later overlayfs is refused.
const UNKNOWN: &str = "it has an attribute of overlayfs whose meaning this program does not know; \
                       update the program, or mount the overlay without the option that needs it";

/// Writes the archive that makes of the tree `below` what an overlay shows that has `upper` as its upper
/// directory and `below` as the merged tree of its lower directories: `None` if these hold nothing. Like
/// `image`, it takes the root of an EROFS image for `below` if that is the only lower directory. The work is
/// in proportion to what is in `upper`: `below` is looked up at its root and at the paths of
/// opaque directories and sockets.
///
/// The overlay needs the options `index=off,redirect_dir=off,metacopy=off`, and not `userxattr`. Nothing may
/// write to it until the archive is written: not every change is noticed. Sockets are left out; one becomes a
/// whiteout if `below` has something at its path and no directory above it is opaque. Attributes
/// `trusted.overlay.X` and `user.overlay.X` are left out, also those that a user of the overlay set. The root
/// of the layer is a member if its attributes differ from those of `below`, or without `below`. Names that
/// wait to be packed, and the paths of hard links, take at most `paths_bytes_max` of memory.
///
/// # Errors
/// A tree cannot be read, a name cannot be said in a layer, overlayfs has content or names elsewhere than in
/// `upper`, the names and paths take more memory than is given to them, or `out` fails.
pub fn pack_upper(
    upper: &Path,
    below: Option<&Path>,
    out: &mut impl Write,
    paths_bytes_max: usize,
) -> Result<Packed, ArchiveError> {
    let below = below.map(Root::open).transpose()?;
    let upper = Root::open(upper)?;
    let mut packer = Packer::new(&upper, out, None);
    let mut walk = Walk {
        upper: &upper,
        below: below.as_ref(),
        path: PathBuf::new(),
        directories: Vec::new(),
        memory: PathMemory::new(paths_bytes_max),
    };
    walk.root(&mut packer)?;
    while let Some(directory) = walk.directories.last_mut() {
        let sees_below = directory.sees_below;
        let Some(name) = directory.next() else {
            walk.directories.pop();
            walk.path.pop();
            continue;
        };
        walk.memory.release(bytes_of(Path::new(&name)));
        walk.path.push(&*name);
        if !walk.entry(sees_below, &mut packer)? {
            walk.path.pop();
        }
    }
    packer.finish()
}

/// A directory of which not all is packed yet.
struct Directory {
    /// What of it is still to be packed: the last element is the next name.
    names: Vec<Box<OsStr>>,
    /// Whether neither it nor a directory on the way there is opaque.
    sees_below: bool,
}

impl Directory {
    fn next(&mut self) -> Option<Box<OsStr>> {
        let name = self.names.pop();
        // Otherwise large directories inside one another hold memory of names that are packed already.
        if self.names.len() < self.names.capacity() / 4 {
            self.names.shrink_to_fit();
        }
        name
    }
}

/// A walk of an upper directory in the order of its paths, a directory before what is in it.
struct Walk<'a> {
    upper: &'a Root,
    below: Option<&'a Root>,
    /// What is being packed.
    path: PathBuf,
    /// The directories on the way there: a list and no recursion, as a tree may be deep.
    directories: Vec<Directory>,
    memory: PathMemory,
}

impl Walk<'_> {
    /// Packs the attributes of the root if they differ from those below, and goes on with what is in it.
    fn root<W: Write>(&mut self, packer: &mut Packer<'_, W>) -> Result<(), ArchiveError> {
        let (place, stat) = self.present()?;
        // overlayfs does not look whether a root is opaque.
        let (xattrs, _) = layer_xattrs(&place)?;
        if !self.is_root_below(&stat, &xattrs)? {
            packer.add(&place, &stat, xattrs)?;
        }
        self.enter(true)
    }

    /// Whether there is a root below, and it has these attributes.
    fn is_root_below(&self, stat: &Stat, xattrs: &Records) -> Result<bool, ArchiveError> {
        let Some(below) = self.below else { return Ok(false) };
        let Some((place, stat_below)) = below.look_up(Path::new(""))? else { return Ok(false) };
        let xattrs_below = without_marks(place.xattrs()?);
        Ok(attributes(&stat_below) == attributes(stat) && xattrs_below == *xattrs)
    }

    /// Packs what is at the path. Whether it is a directory, which is entered.
    fn entry<W: Write>(
        &mut self,
        sees_below: bool,
        packer: &mut Packer<'_, W>,
    ) -> Result<bool, ArchiveError> {
        check_name(&self.path)?;
        let (place, stat) = self.present()?;
        if is_whiteout(&stat) {
            return packer.whiteout(&self.path).map(|()| false);
        }
        let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if is_socket && !(sees_below && self.below()?.is_some()) {
            return Ok(false);
        }
        let (xattrs, is_opaque) = layer_xattrs(&place)?;
        if packer.add(&place, &stat, xattrs)? {
            self.memory.take(bytes_of(&self.path))?;
        }
        if !is_directory(&stat) {
            return Ok(false);
        }
        // New directories can be opaque without anything below.
        if is_opaque && sees_below && self.below()?.as_ref().is_some_and(is_directory) {
            packer.opaque(&self.path)?;
        }
        self.enter(sees_below && !is_opaque)?;
        Ok(true)
    }

    /// What the upper directory has at the path.
    fn present(&self) -> Result<(Place, Stat), ArchiveError> {
        self.upper.look_up(&self.path)?.ok_or_else(|| vanished(&self.path))
    }

    /// What is below at the path, seen or not.
    fn below(&self) -> Result<Option<Stat>, ArchiveError> {
        let found = self.below.map_or(Ok(None), |below| below.look_up(&self.path))?;
        Ok(found.map(|(_, stat)| stat))
    }

    /// Goes on with what is in the directory at the path.
    fn enter(&mut self, sees_below: bool) -> Result<(), ArchiveError> {
        let mut names = Vec::new();
        let mut listing = self.upper.listing(&self.path)?;
        while let Some((name, _)) = listing.next()? {
            self.memory.take(bytes_of(Path::new(&name)))?;
            names.push(name.into_boxed_os_str());
        }
        names.sort_unstable_by(|one, other| other.cmp(one));
        self.directories.push(Directory { names, sees_below });
        Ok(())
    }
}

/// Whether it is overlayfs' mark of what is not there any more.
fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// The extended attributes that belong to the layer, and whether it is marked as opaque.
fn layer_xattrs(place: &Place) -> Result<(Records, bool), ArchiveError> {
    let xattrs = place.xattrs()?;
    let mut is_opaque = false;
    for (name, value) in &xattrs {
        let reason = match own(name) {
            // Where it was copied from, what a directory holds, which file system it is, flags.
            None | Some(b"origin" | b"impure" | b"uuid" | b"upper" | b"protattr") => continue,
            Some(b"opaque") if value == OPAQUE.1 => {
                is_opaque = true;
                continue;
            }
            Some(b"opaque" | b"whiteout" | b"whiteouts") => XATTR_WHITEOUTS,
            Some(b"redirect" | b"metacopy") => ELSEWHERE,
            Some(b"nlink") => INDEXED,
            Some(_) => UNKNOWN,
        };
        return Err(ArchiveError::Unpackable { path: place.path.clone(), reason });
    }
    Ok((without_marks(xattrs), is_opaque))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_take_no_more_memory_than_they_are_given_whatever_is_below() {
        let folder = tempfile::tempdir().unwrap();
        let [upper, below] = ["upper", "below"].map(|name| folder.path().join(name));
        for name in ["d/c/1", "d/c/2", "d/c/3"] {
            std::fs::create_dir_all(upper.join(name)).unwrap();
        }
        std::fs::write(upper.join("d/a"), "").unwrap();
        std::fs::hard_link(upper.join("d/a"), upper.join("d/b")).unwrap();
        std::fs::create_dir(&below).unwrap();
        for index in 0..100 {
            std::fs::write(below.join(index.to_string()), "").unwrap();
        }
        // One path of the file stays, and three names wait.
        let held = ["d/a", "1", "2", "3"];
        let needed = held.iter().map(|path| bytes_of(Path::new(path))).sum();
        let pack = |bytes_max| pack_upper(&upper, Some(&below), &mut std::io::sink(), bytes_max);
        assert_eq!(pack(needed).unwrap().entries, 7);
        let error = pack(needed - 1).unwrap_err();
        assert!(matches!(error, ArchiveError::Changes { .. }), "{error}");
    }
}

//! The layer of an overlay's upper directory. Only what changed is read: what is below is not walked.
//!
//! ```text
//!  in the upper directory                     in the archive
//!  character device 0:0 (whiteout) NAME       .wh.NAME
//!  opaque directory DIR over a directory      DIR/ and DIR/.wh..wh..opq
//!  opaque directory DIR over nothing else     DIR/
//!  trusted.overlay.overlay.X (escaped)        trusted.overlay.X
//!  other attributes of overlayfs              nothing, or a refusal
//!  anything else                              as `pack` writes it
//! ```
//!
//! What overlayfs keeps elsewhere than in the upper directory cannot be packed from there, and is
//! refused: directories that were renamed, files without their content, hard links over an index.

use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::changes::{PathMemory, attributes, bytes_of};
use crate::error::{ArchiveError, failed};
use crate::overlay::{OPAQUE, own, unescaped};
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
                               only character devices 0:0 and opaque=y can be packed";

/// Why an attribute of a later overlayfs is refused.
const UNKNOWN: &str = "it has an attribute of overlayfs whose meaning this program does not know";

/// Writes the archive that makes of the tree `below` what an overlay shows that has `upper` as its upper
/// directory and `below` as the merged tree of its lower directories: `None` if these hold nothing. Like
/// `image`, it takes the root of an EROFS image for `below` if that is the only lower directory. The work is
/// in proportion to what is in `upper`: `below` is looked up at its root and at the paths of
/// opaque directories.
///
/// The overlay needs the options `index=off,redirect_dir=off,metacopy=off`, and not `userxattr`. Nothing may
/// write to it until the archive is written. Sockets are left out as [`pack`](crate::pack()) does. The root of the
/// layer is a member if its attributes differ from those of `below`, or without `below`. Paths that wait to be
/// packed, and those of hard links, take at most `paths_bytes_max` of memory.
///
/// # Errors
/// A tree cannot be read or changes under it, a name cannot be said in a layer, overlayfs has content or names
/// elsewhere than in `upper`, there are more paths than memory is given to, or `out` fails.
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
        waiting: Vec::new(),
        memory: PathMemory::new(paths_bytes_max),
    };
    walk.root(&mut packer)?;
    while let Some(next) = walk.waiting.pop() {
        walk.memory.release(bytes_of(&next.path));
        walk.entry(&next, &mut packer)?;
    }
    packer.finish()
}

/// A path of the upper directory that is to be packed.
struct Waiting {
    path: PathBuf,
    /// Whether no directory on the way there is opaque.
    sees_below: bool,
}

/// A walk of an upper directory in the order of its paths, a directory before what is in it.
struct Walk<'a> {
    upper: &'a Root,
    below: Option<&'a Root>,
    /// The next path is the last: a list of what is to be done and no recursion, as a tree may be deep.
    waiting: Vec<Waiting>,
    memory: PathMemory,
}

impl Walk<'_> {
    /// Packs the attributes of the root if they differ from those below, and goes on with what is in it.
    fn root<W: Write>(&mut self, packer: &mut Packer<'_, W>) -> Result<(), ArchiveError> {
        let path = Path::new("");
        let (place, stat) = self.present(path)?;
        // overlayfs does not look whether a root is opaque.
        let (xattrs, _) = users_xattrs(&place)?;
        if !self.is_root_below(&stat, &xattrs)? {
            packer.add(&place, &stat, xattrs)?;
        }
        self.enter(path, true)
    }

    /// Whether there is a root below, and it has these attributes.
    fn is_root_below(&self, stat: &Stat, xattrs: &Records) -> Result<bool, ArchiveError> {
        let Some(below) = self.below else { return Ok(false) };
        let Some((place, stat_below)) = below.look_up(Path::new(""))? else { return Ok(false) };
        let xattrs_below = place.xattrs()?;
        // Of an image itself, without an overlay above, they are as overlayfs keeps them.
        let is_raw = below.is_erofs()?;
        let xattrs_below = if is_raw { unescaped(xattrs_below) } else { xattrs_below };
        Ok(attributes(&stat_below) == attributes(stat) && xattrs_below == *xattrs)
    }

    /// Packs what is at a path, and puts what is in it first in the list.
    fn entry<W: Write>(
        &mut self,
        Waiting { path, sees_below }: &Waiting,
        packer: &mut Packer<'_, W>,
    ) -> Result<(), ArchiveError> {
        check_name(path)?;
        let (place, stat) = self.present(path)?;
        if is_whiteout(&stat) {
            return packer.whiteout(path);
        }
        let (xattrs, is_opaque) = users_xattrs(&place)?;
        if !is_directory(&stat) {
            if stat.st_nlink > 1 {
                // The packer remembers it until the end, for the other names.
                self.memory.take(bytes_of(path))?;
            }
            return packer.add(&place, &stat, xattrs);
        }
        packer.add(&place, &stat, xattrs)?;
        // New directories can be opaque without anything below.
        if is_opaque && *sees_below && self.has_directory_below(path)? {
            packer.opaque(path)?;
        }
        self.enter(path, *sees_below && !is_opaque)
    }

    /// What is at a path of the upper directory.
    fn present(&self, path: &Path) -> Result<(Place, Stat), ArchiveError> {
        let found = self.upper.look_up(path)?;
        found.ok_or_else(|| failed("pack", path)(Errno::NOENT))
    }

    fn has_directory_below(&self, path: &Path) -> Result<bool, ArchiveError> {
        let found = self.below.map_or(Ok(None), |below| below.look_up(path))?;
        Ok(found.is_some_and(|(_, stat)| is_directory(&stat)))
    }

    /// Puts what is in a directory first in the list.
    fn enter(&mut self, directory: &Path, sees_below: bool) -> Result<(), ArchiveError> {
        let first = self.waiting.len();
        let mut listing = self.upper.listing(directory)?;
        while let Some((name, _)) = listing.next()? {
            let path = directory.join(name);
            self.memory.take(bytes_of(&path))?;
            self.waiting.push(Waiting { path, sees_below });
        }
        // All are of one directory: paths are in the order of their last names.
        self.waiting[first..].sort_unstable_by(|one, other| other.path.cmp(&one.path));
        Ok(())
    }
}

/// Whether it is overlayfs' mark of what is not there any more.
fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// The extended attributes that users of the overlay see, and whether it is marked as opaque.
fn users_xattrs(place: &Place) -> Result<(Records, bool), ArchiveError> {
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
    Ok((unescaped(xattrs), is_opaque))
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
        // The links stay, and three directories wait.
        let paths = ["d/a", "d/b", "d/c/1", "d/c/2", "d/c/3"];
        let needed = paths.iter().map(|path| bytes_of(Path::new(path))).sum();
        let pack = |bytes_max| pack_upper(&upper, Some(&below), &mut std::io::sink(), bytes_max);
        assert_eq!(pack(needed).unwrap().entries, 7);
        let error = pack(needed - 1).unwrap_err();
        assert!(matches!(error, ArchiveError::Changes { .. }), "{error}");
    }
}

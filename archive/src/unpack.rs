//! A layer's archive into a directory tree, over what the layers below put there.
//!
//! - A member replaces what is there, but a directory keeps its children and takes the attributes.
//! - `.wh.NAME` removes NAME, `.wh..wh..opq` all that is in its directory; neither touches what
//!   this same archive made, wherever in the archive they stand. Other names that begin with
//!   `.wh..wh.` are notes of AUFS and mean nothing.
//! - Times of directories are set at the end, when nothing changes them any more.
//! - What is remembered of members until the end is bounded, whatever the archive lists.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, makedev};
use rustix::io::Errno;

use crate::error::{ArchiveError, failed, shown};
use crate::members::{Kind, Member, Members, Next};
use crate::pax::Time;
use crate::recording::{Recorder, record_content, record_trailing};
use crate::root::{Place, Root, clean, is_directory};
use crate::whiteout::Meaning;

/// Bytes moved at once.
pub(crate) const BUFFER_BYTES: usize = 256 << 10;

/// What a listed directory takes in memory beside its path.
const DIRECTORY_BYTES: usize = 96;

/// What an archive may list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Members: an ext4 of 64 GiB has no more inodes, and 24 bytes are kept of each.
    pub(crate) members: u64,
    /// Memory of the paths and times of its directories: those of more than half a million, at
    /// usual lengths.
    directory_bytes: usize,
}

pub(crate) const BOUNDS: Bounds = Bounds { members: 4 << 20, directory_bytes: 128 << 20 };

/// A path by its hash, as the text of millions of long ones would take gigabytes. Who finds two
/// paths with the same (2^64 tries) spoils his own layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PathHash([u8; 16]);

impl PathHash {
    pub(crate) fn of(path: &Path) -> Self {
        let hash = blake3::hash(path.as_os_str().as_bytes());
        let mut first = [0; 16];
        first.copy_from_slice(&hash.as_bytes()[..16]);
        Self(first)
    }
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unpacked {
    /// The sum of the members' sizes: what Docker calls the layer's size.
    pub size_bytes: u64,
    /// The number of members.
    pub entries: u64,
}

impl Unpacked {
    /// Counts a member in, unless there are `limit` already.
    pub(crate) fn count(&mut self, member: &Member, limit: u64) -> Result<(), ArchiveError> {
        if self.entries >= limit {
            return Err(ArchiveError::Members { limit });
        }
        self.entries += 1;
        let size_bytes = self.size_bytes.checked_add(member.size_bytes);
        self.size_bytes = size_bytes.ok_or_else(|| member.error("its size is impossible"))?;
        Ok(())
    }
}

/// Unpacks the archive of a layer over the tree at `root`. With `recording`, what
/// [`replay`](crate::replay()) needs is written to a file of that name.
///
/// # Errors
/// A corrupt or truncated archive, a member that leads out of the root or cannot be made; the tree
/// is then half changed and to be thrown away, and no recording is left.
pub fn unpack(
    reader: impl Read,
    root: &Path,
    recording: Option<&Path>,
) -> Result<Unpacked, ArchiveError> {
    unpack_within(BOUNDS, reader, root, recording)
}

fn unpack_within(
    bounds: Bounds,
    reader: impl Read,
    root: &Path,
    recording: Option<&Path>,
) -> Result<Unpacked, ArchiveError> {
    let unpacker = Unpacker {
        bounds,
        root: Root::open(root)?,
        recorder: recording.map(Recorder::create).transpose()?,
        own: HashMap::new(),
        directory_times: BTreeMap::new(),
        directory_bytes: 0,
        buffer: vec![0; BUFFER_BYTES],
    };
    unpacker.run(&mut Members::new(reader))
}

/// An unpacking under way.
struct Unpacker {
    bounds: Bounds,
    root: Root,
    recorder: Option<Recorder>,
    /// The resolved paths of what this archive made or listed: no whiteout of it hides that. Not
    /// by inode: a lower file to which the archive makes a link is not its own for that. With the
    /// number of the content that the recording reads from there.
    own: HashMap<PathHash, Option<u32>>,
    directory_times: BTreeMap<PathBuf, Time>,
    /// What these take.
    directory_bytes: usize,
    buffer: Vec<u8>,
}

impl Unpacker {
    fn run<R: Read>(mut self, members: &mut Members<R>) -> Result<Unpacked, ArchiveError> {
        let mut unpacked = Unpacked::default();
        let end = loop {
            match members.next()? {
                Next::End(raw) => break raw,
                Next::Member(member) => {
                    unpacked.count(&member, self.bounds.members)?;
                    self.record(&member.raw)?;
                    self.apply(&member, members)?;
                    self.record(&members.padding()?)?;
                }
            }
        };
        self.record(&end)?;
        record_trailing(members, &mut self.buffer, &mut self.recorder)?;
        self.set_directory_times()?;
        self.recorder.map_or(Ok(()), Recorder::finish)?;
        Ok(unpacked)
    }

    fn record(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.raw(bytes))
    }

    /// Does what a member says and reads its content.
    fn apply<R: Read>(
        &mut self,
        member: &Member,
        members: &mut Members<R>,
    ) -> Result<(), ArchiveError> {
        let path = clean(&member.shown(), &member.name)?;
        let meaning = Meaning::of(member, &path)?;
        if meaning != Meaning::Member {
            self.white_out(member, &path, &meaning)?;
            return self.pass_over(members);
        }
        if path.as_os_str().is_empty() && member.kind != Kind::Directory {
            return Err(member.error("it would replace the root of the layer"));
        }
        let place = self.root.place(&member.shown(), &path, true)?;
        let present = place.stat()?;
        let stays = member.kind == Kind::Directory && present.as_ref().is_some_and(is_directory);
        if let (Some(stat), false) = (&present, stays) {
            self.remove(&place.path, is_directory(stat), false)?;
        }
        let content = if stays { None } else { self.create(member, &place, members)? };
        if member.kind != Kind::HardLink {
            self.set_attributes(member, &place)?;
        }
        self.own.insert(PathHash::of(&place.path), content);
        Ok(())
    }

    /// Reads a content that goes nowhere.
    fn pass_over<R: Read>(&mut self, members: &mut Members<R>) -> Result<(), ArchiveError> {
        record_content(members, &mut self.buffer, &mut self.recorder)
    }

    /// Removes what a whiteout hides.
    fn white_out(
        &mut self,
        member: &Member,
        path: &Path,
        meaning: &Meaning,
    ) -> Result<(), ArchiveError> {
        if matches!(meaning, Meaning::Member | Meaning::Note) {
            return Ok(());
        }
        let place = self.root.place(&member.shown(), path, true)?;
        let directory = place.path.parent().unwrap_or(Path::new("")).to_owned();
        let Meaning::Removes(hidden) = meaning else { return self.clear(directory, true) };
        let hidden = directory.join(hidden);
        let place = self.root.resolved(&hidden).map_err(failed("open the parent of", &hidden))?;
        match place.stat()? {
            Some(stat) => self.remove(&hidden, is_directory(&stat), true),
            None => Ok(()),
        }
    }

    /// Removes a file or a whole directory, but for what this archive made if `keeps_own`.
    fn remove(
        &mut self,
        path: &Path,
        is_directory: bool,
        keeps_own: bool,
    ) -> Result<(), ArchiveError> {
        if is_directory {
            self.clear(path.to_owned(), keeps_own)?;
        }
        self.remove_one(path, is_directory, keeps_own)
    }

    /// Removes what is in a directory.
    fn clear(&mut self, directory: PathBuf, keeps_own: bool) -> Result<(), ArchiveError> {
        enum Step {
            Enter(OsString),
            Leave,
        }
        // A list of what is to be done and no recursion: a tree may be deep. Names of directories
        // alone: a directory may hold millions of files, and its path be long.
        let mut here = directory;
        let mut steps = Vec::new();
        self.remove_files(&here, keeps_own, |name| steps.push(Step::Enter(name)))?;
        while let Some(step) = steps.pop() {
            match step {
                Step::Enter(name) => {
                    here.push(name);
                    steps.push(Step::Leave);
                    self.remove_files(&here, keeps_own, |name| steps.push(Step::Enter(name)))?;
                }
                Step::Leave => {
                    self.remove_one(&here, true, keeps_own)?;
                    here.pop();
                }
            }
        }
        Ok(())
    }

    /// Removes what is in a directory and is none itself, and gives the others.
    fn remove_files(
        &mut self,
        directory: &Path,
        keeps_own: bool,
        mut on_directory: impl FnMut(OsString),
    ) -> Result<(), ArchiveError> {
        let mut listing = self.root.listing(directory)?;
        while let Some((name, is_directory)) = listing.next()? {
            if is_directory {
                on_directory(name);
            } else {
                self.remove_one(&directory.join(name), false, keeps_own)?;
            }
        }
        Ok(())
    }

    /// Removes a file or an empty directory. The content of a file that the recording points to
    /// moves into the recording.
    fn remove_one(
        &mut self,
        path: &Path,
        is_directory: bool,
        keeps_own: bool,
    ) -> Result<(), ArchiveError> {
        let hash = PathHash::of(path);
        let own = self.own.get(&hash).copied();
        if keeps_own && own.is_some() {
            return Ok(());
        }
        if let (Some(Some(number)), Some(recorder)) = (own, self.recorder.as_mut()) {
            recorder.keep(number, path, self.root.file(path).map_err(failed("read", path))?)?;
        }
        let place = self.root.resolved(path).map_err(failed("open the parent of", path))?;
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(&place.parent, &place.name, flags) {
            // Something of this archive is below.
            Err(Errno::NOTEMPTY) if keeps_own => return Ok(()),
            result => result.map_err(failed("remove", path))?,
        }
        self.own.remove(&hash);
        Ok(())
    }

    /// Makes what a member is, where nothing is. Gives the number of the content that the
    /// recording reads from there.
    fn create<R: Read>(
        &mut self,
        member: &Member,
        place: &Place,
        members: &mut Members<R>,
    ) -> Result<Option<u32>, ArchiveError> {
        let (parent, name) = (&place.parent, &place.name);
        // Nobody else's until its attributes are set.
        let mode = Mode::from_raw_mode(0o600);
        let special = |kind: FileType| {
            let (major, minor) = member.device;
            rustix::fs::mknodat(parent, name, kind, mode, makedev(major, minor))
        };
        let made = match &member.kind {
            Kind::File => return self.write_file(member, place, None, members),
            Kind::Sparse { parts } => return self.write_file(member, place, Some(parts), members),
            Kind::HardLink => return self.link(member, place).map(|()| None),
            Kind::Symlink => rustix::fs::symlinkat(&member.link[..], parent, name),
            Kind::Character => special(FileType::CharacterDevice),
            Kind::Block => special(FileType::BlockDevice),
            Kind::Fifo => special(FileType::Fifo),
            Kind::Directory => rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)),
        };
        made.map_err(failed("create", &place.path)).map(|()| None)
    }

    /// Makes a hard link to a file of this tree.
    fn link(&self, member: &Member, place: &Place) -> Result<(), ArchiveError> {
        let target = clean(&member.shown(), &member.link)?;
        let target = self.root.place(&member.shown(), &target, false)?;
        match target.stat()? {
            None => {
                let target = shown(&member.link);
                Err(member.error(format!("it is a link to `{target}`, which does not exist")))
            }
            Some(stat) if is_directory(&stat) => Err(member.error("it is a link to a directory")),
            Some(_) => {
                let (parent, name) = (&place.parent, &place.name);
                let flags = AtFlags::empty();
                rustix::fs::linkat(&target.parent, &target.name, parent, name, flags)
                    .map_err(failed("create the link", &place.path))
            }
        }
    }

    /// Makes a regular file with its content; a sparse one from its parts.
    fn write_file<R: Read>(
        &mut self,
        member: &Member,
        place: &Place,
        parts: Option<&[(u64, u64)]>,
        members: &mut Members<R>,
    ) -> Result<Option<u32>, ArchiveError> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&place.parent, &place.name, flags, mode)
            .map_err(failed("create", &place.path))?;
        let mut file = File::from(file);
        if let Some(parts) = parts {
            file.set_len(member.size_bytes).map_err(failed("write", &place.path))?;
            let mut parts = parts.iter();
            parts.try_for_each(|part| self.write_part(*part, &file, place, members))?;
            return Ok(None);
        }
        let mut hasher = blake3::Hasher::new();
        loop {
            let length = members.content(&mut self.buffer)?;
            if length == 0 {
                break;
            }
            let bytes = &self.buffer[..length];
            file.write_all(bytes).map_err(failed("write", &place.path))?;
            if let Some(recorder) = &mut self.recorder {
                hasher.update(bytes);
                recorder.count(bytes);
            }
        }
        match &mut self.recorder {
            Some(recorder) if member.size_bytes > 0 => {
                recorder.content(&place.path, member.size_bytes, hasher.finalize()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Writes a part of a sparse file. Its bytes go into the recording: such files are rare, and
    /// the file does not say where its parts ended.
    fn write_part<R: Read>(
        &mut self,
        (mut offset, mut left_bytes): (u64, u64),
        file: &File,
        place: &Place,
        members: &mut Members<R>,
    ) -> Result<(), ArchiveError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        while left_bytes > 0 {
            let wanted = usize::try_from(left_bytes).unwrap_or(usize::MAX).min(buffer.len());
            let bytes = &mut buffer[..wanted];
            // The map was checked against the size: the content does not end here.
            let length = members.content(bytes)?;
            file.write_all_at(&bytes[..length], offset).map_err(failed("write", &place.path))?;
            self.record(&bytes[..length])?;
            offset += length as u64;
            left_bytes -= length as u64;
        }
        self.buffer = buffer;
        Ok(())
    }

    /// Sets owner, permissions, extended attributes and time. In this order: a new owner takes
    /// set-user-id and capabilities away.
    fn set_attributes(&mut self, member: &Member, place: &Place) -> Result<(), ArchiveError> {
        member.check_owner()?;
        let owner = (Uid::from_raw(member.uid), Gid::from_raw(member.gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(&place.parent, &place.name, Some(owner.0), Some(owner.1), flags)
            .map_err(failed("set the owner of", &place.path))?;
        let is_link = member.kind == Kind::Symlink;
        if !is_link {
            place.chmod(member.mode)?;
        }
        let mut xattrs = member.xattrs.clone();
        // The kernel allows none of these on links; other engines leave them out, too.
        xattrs.retain(|name, _| !(is_link && name.starts_with(b"user.")));
        place.set_xattrs(&xattrs)?;
        if member.kind == Kind::Directory {
            return self.note_time(place, member.modified);
        }
        place.set_modified(member.modified)
    }

    /// Remembers the time of a directory.
    fn note_time(&mut self, place: &Place, time: Time) -> Result<(), ArchiveError> {
        if let Some(known) = self.directory_times.get_mut(&place.path) {
            *known = time;
            return Ok(());
        }
        self.directory_bytes += DIRECTORY_BYTES + place.path.as_os_str().len();
        if self.directory_bytes > self.bounds.directory_bytes {
            let limit_mib = self.bounds.directory_bytes >> 20;
            return Err(ArchiveError::Directories { limit_mib });
        }
        self.directory_times.insert(place.path.clone(), time);
        Ok(())
    }

    /// Sets the times of the directories that the archive listed, unless something took one away.
    fn set_directory_times(&self) -> Result<(), ArchiveError> {
        for (path, time) in &self.directory_times {
            let place = match self.root.resolved(path) {
                Ok(place) => place,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => return Err(failed("open the parent of", path)(errno)),
            };
            if place.stat()?.as_ref().is_some_and(is_directory) {
                place.set_modified(*time)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::{self, BLOCK_BYTES, Builder};

    /// An archive of members without content.
    fn archive(members: &[(u8, &str)]) -> Vec<u8> {
        let header = |(kind, name): &(u8, &str)| {
            let builder = Builder::new(*kind).text(header::NAME, name.as_bytes());
            builder.number(header::MODE, 0o755).finish()
        };
        let mut archive = members.iter().flat_map(header).collect::<Vec<_>>();
        archive.resize(archive.len() + 2 * BLOCK_BYTES, 0);
        archive
    }

    fn unpack_here(bounds: Bounds, members: &[(u8, &str)]) -> Result<Unpacked, ArchiveError> {
        let root = tempfile::tempdir().unwrap();
        unpack_within(bounds, &archive(members)[..], root.path(), None)
    }

    #[test]
    fn as_root_members_without_number_are_refused_also_if_they_are_all_of_one_name() {
        let bounds = Bounds { members: 3, ..BOUNDS };
        for name in ["a", "b"] {
            let members = [(b'0', "a"), (b'0', ".wh.x"), (b'0', "a"), (b'0', name)];
            assert_eq!(unpack_here(bounds, &members[..3]).unwrap().entries, 3);
            let error = unpack_here(bounds, &members).unwrap_err().to_string();
            assert!(error.contains("more than 3 members"), "{error}");
        }
    }

    #[test]
    fn as_root_directories_without_bound_are_refused_and_each_counts_once() {
        let bounds = Bounds { directory_bytes: 2 * (DIRECTORY_BYTES + 1), ..BOUNDS };
        let mut members = vec![(b'5', "a"), (b'5', "b"), (b'5', "a/"), (b'0', "file")];
        assert_eq!(unpack_here(bounds, &members).unwrap().entries, 4);
        members.push((b'5', "c"));
        let error = unpack_here(bounds, &members).unwrap_err();
        assert!(matches!(error, ArchiveError::Directories { .. }), "{error}");
    }
}

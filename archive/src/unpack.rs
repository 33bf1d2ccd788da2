//! A layer's archive into a directory tree, over what the layers below put there.
//!
//! - A member replaces what is there, but a directory keeps its children and takes the attributes.
//! - `.wh.NAME` removes NAME, `.wh..wh..opq` all that is in its directory; neither touches what
//!   this same archive made, wherever in the archive they stand. Other names that begin with
//!   `.wh..wh.` are notes of AUFS and mean nothing.
//! - Times of directories are set at the end, when nothing changes them any more.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid, makedev};
use rustix::io::Errno;

use crate::error::{ArchiveError, failed, shown};
use crate::members::{Kind, Member, Members, Next};
use crate::pax::Time;
use crate::recording::Recorder;
use crate::root::{Place, Root, clean, is_directory};

/// What names a removal.
pub(crate) const WHITEOUT_PREFIX: &[u8] = b".wh.";
const METADATA_PREFIX: &[u8] = b".wh..wh.";
const OPAQUE_NAME: &[u8] = b".wh..wh..opq";

/// Bytes moved at once.
const BUFFER_BYTES: usize = 256 << 10;

/// What was unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unpacked {
    /// The sum of the members' sizes: what Docker calls the layer's size.
    pub size_bytes: u64,
    /// The number of members.
    pub entries: u64,
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
    let unpacker = Unpacker {
        root: Root::open(root)?,
        recorder: recording.map(Recorder::create).transpose()?,
        own: HashSet::new(),
        directory_times: BTreeMap::new(),
        buffer: vec![0; BUFFER_BYTES],
    };
    unpacker.run(&mut Members::new(reader))
}

/// An unpacking under way.
struct Unpacker {
    root: Root,
    recorder: Option<Recorder>,
    /// The resolved paths of what this archive made or listed: no whiteout of it hides that. Not
    /// by inode: a lower file to which the archive makes a link is not its own for that.
    own: HashSet<PathBuf>,
    directory_times: BTreeMap<PathBuf, Time>,
    buffer: Vec<u8>,
}

impl Unpacker {
    fn run<R: Read>(mut self, members: &mut Members<R>) -> Result<Unpacked, ArchiveError> {
        let mut unpacked = Unpacked::default();
        let end = loop {
            match members.next()? {
                Next::End(raw) => break raw,
                Next::Member(member) => {
                    self.record(&member.raw)?;
                    self.apply(&member, members)?;
                    self.record(&members.padding()?)?;
                    unpacked.entries += 1;
                    let size = unpacked.size_bytes.checked_add(member.size_bytes);
                    unpacked.size_bytes =
                        size.ok_or_else(|| member.error("its size is impossible"))?;
                }
            }
        };
        self.record(&end)?;
        let mut buffer = std::mem::take(&mut self.buffer);
        loop {
            let length = members.trailing(&mut buffer)?;
            if length == 0 {
                break;
            }
            self.record(&buffer[..length])?;
        }
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
        let name = path.file_name().unwrap_or_default().as_bytes().to_vec();
        let is_note = path.components().any(|component| {
            let component = component.as_os_str().as_bytes();
            component.starts_with(METADATA_PREFIX) && component != OPAQUE_NAME
        });
        if is_note {
            return self.pass_over(members);
        }
        if name.starts_with(WHITEOUT_PREFIX) {
            self.white_out(member, &path, &name)?;
            return self.pass_over(members);
        }
        if path.as_os_str().is_empty() && member.kind != Kind::Directory {
            return Err(member.error("it would replace the root of the layer"));
        }
        let place = self.root.place(&member.shown(), &path, true)?;
        let present = place.stat()?;
        let stays = member.kind == Kind::Directory && present.as_ref().is_some_and(is_directory);
        if let (Some(stat), false) = (&present, stays) {
            self.remove(&place.path, stat, false)?;
        }
        if !stays {
            self.create(member, &place, members)?;
        }
        if member.kind != Kind::HardLink {
            self.set_attributes(member, &place)?;
        }
        self.own.insert(place.path);
        Ok(())
    }

    /// Reads a content that goes nowhere.
    fn pass_over<R: Read>(&mut self, members: &mut Members<R>) -> Result<(), ArchiveError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        loop {
            let length = members.content(&mut buffer)?;
            if length == 0 {
                self.buffer = buffer;
                return Ok(());
            }
            self.record(&buffer[..length])?;
        }
    }

    /// Removes what a whiteout hides.
    fn white_out(&mut self, member: &Member, path: &Path, name: &[u8]) -> Result<(), ArchiveError> {
        let shown_member = member.shown();
        let place = self.root.place(&shown_member, path, true)?;
        let directory = place.path.parent().unwrap_or(Path::new("")).to_owned();
        if name == OPAQUE_NAME {
            return self.clear(directory, true);
        }
        let hidden = &name[WHITEOUT_PREFIX.len()..];
        if hidden == b"." || hidden == b".." {
            let name = shown(&member.name);
            return Err(ArchiveError::Escapes { member: shown_member, name });
        }
        if hidden.is_empty() {
            return Err(member.error("a whiteout that names nothing"));
        }
        let hidden = directory.join(std::ffi::OsStr::from_bytes(hidden));
        let place = self.root.resolved(&hidden).map_err(failed("open the parent of", &hidden))?;
        match place.stat()? {
            Some(stat) => self.remove(&hidden, &stat, true),
            None => Ok(()),
        }
    }

    /// Removes a file or a whole directory, but for what this archive made if `keeps_own`.
    fn remove(&mut self, path: &Path, stat: &Stat, keeps_own: bool) -> Result<(), ArchiveError> {
        if is_directory(stat) {
            self.clear(path.to_owned(), keeps_own)?;
        }
        self.remove_one(path, stat, keeps_own)
    }

    /// Removes what is in a directory.
    fn clear(&mut self, directory: PathBuf, keeps_own: bool) -> Result<(), ArchiveError> {
        enum Step {
            Enter(PathBuf),
            Leave(PathBuf, Stat),
        }
        // A list of what is to be done and no recursion: a tree may be deep.
        let mut steps = vec![Step::Enter(directory)];
        while let Some(step) = steps.pop() {
            match step {
                Step::Leave(path, stat) => self.remove_one(&path, &stat, keeps_own)?,
                Step::Enter(directory) => {
                    for entry in self.root.entries(&directory)? {
                        let path = directory.join(&entry.name);
                        if is_directory(&entry.stat) {
                            steps.push(Step::Leave(path.clone(), entry.stat));
                            steps.push(Step::Enter(path));
                        } else {
                            self.remove_one(&path, &entry.stat, keeps_own)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes a file or an empty directory. The content of a file that the recording points to
    /// moves into the recording.
    fn remove_one(
        &mut self,
        path: &Path,
        stat: &Stat,
        keeps_own: bool,
    ) -> Result<(), ArchiveError> {
        if keeps_own && self.own.contains(path) {
            return Ok(());
        }
        let inode = stat.st_ino;
        if let Some(recorder) = self.recorder.as_mut().filter(|it| it.refers_to(inode, path)) {
            recorder.keep(inode, self.root.file(path).map_err(failed("read", path))?)?;
        }
        let place = self.root.resolved(path).map_err(failed("open the parent of", path))?;
        let flags = if is_directory(stat) { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(&place.parent, &place.name, flags) {
            // Something of this archive is below.
            Err(Errno::NOTEMPTY) if keeps_own => return Ok(()),
            result => result.map_err(failed("remove", path))?,
        }
        self.own.remove(path);
        Ok(())
    }

    /// Makes what a member is, where nothing is.
    fn create<R: Read>(
        &mut self,
        member: &Member,
        place: &Place,
        members: &mut Members<R>,
    ) -> Result<(), ArchiveError> {
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
            Kind::HardLink => return self.link(member, place),
            Kind::Symlink => rustix::fs::symlinkat(&member.link[..], parent, name),
            Kind::Character => special(FileType::CharacterDevice),
            Kind::Block => special(FileType::BlockDevice),
            Kind::Fifo => special(FileType::Fifo),
            Kind::Directory => rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)),
        };
        made.map_err(failed("create", &place.path))
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
    ) -> Result<(), ArchiveError> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&place.parent, &place.name, flags, mode)
            .map_err(failed("create", &place.path))?;
        let mut file = File::from(file);
        if let Some(parts) = parts {
            file.set_len(member.size_bytes).map_err(failed("write", &place.path))?;
            return parts.iter().try_for_each(|part| self.write_part(*part, &file, place, members));
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
        match (&mut self.recorder, place.stat()?) {
            (Some(recorder), Some(stat)) if member.size_bytes > 0 => {
                let hash = hasher.finalize();
                recorder.content(&place.path, stat.st_ino, member.size_bytes, hash)
            }
            _ => Ok(()),
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
        if member.uid == u32::MAX || member.gid == u32::MAX {
            return Err(member.error("its owner or group is no valid number"));
        }
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
            self.directory_times.insert(place.path.clone(), member.modified);
            return Ok(());
        }
        place.set_modified(member.modified)
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

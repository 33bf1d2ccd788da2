//! A layer's archive into an EROFS image of the layer alone, to be a lower directory of overlayfs.
//!
//! - The image holds what the archive says. Of the layers below it has no more than the attributes of
//!   directories that the archive uses and does not list, and copies of files to which it makes links.
//!   What the archive removes, overlayfs' own marks say: a character device 0:0, an opaque directory.
//! - Merged over what is below, it gives the tree that [`unpack`](crate::unpack()) makes; `tests/image.rs`
//!   holds the two against each other.
//! - Each content goes into the image as it comes; names and attributes stay in memory, within a
//!   limit, and are written at the end.
//! - The same archive over the same images makes the same bytes, on every machine.
//! - What only overlayfs may write cannot come from an archive: its attributes are escaped as overlayfs
//!   itself does, its device is refused, as it is on an overlay.

mod layer;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Stat, major, minor};
use slackwater_erofs::{
    Attributes, ErofsError, Extent, ImageWriter, InodeId, Kind, PosixAcl, Time,
};

use crate::error::{ArchiveError, failed, shown};
use crate::members::{Kind as MemberKind, Member, Members, Next};
use crate::overlay::escaped;
use crate::recording::{Recorder, record_content, record_trailing};
use crate::root::{Place, clean, size_bytes};
use crate::unpack::{BOUNDS, BUFFER_BYTES, PathHash, Unpacked};
use crate::whiteout::Meaning;
use layer::{Layer, Seen, Spot};

/// Memory of a layer's names and attributes: those of about a million members.
const TREE_BYTES_MAX: usize = 256 << 20;

/// Permissions that the kernel shows of a symbolic link.
const SYMLINK_MODE: u32 = 0o777;

/// What was made of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imaged {
    /// What the archive had.
    pub unpacked: Unpacked,
    /// The size of the image in bytes, holes with it.
    pub image_bytes: u64,
    /// Inodes in the image.
    pub inodes: u64,
}

/// Writes the archive of a layer into `image`, a file that can be read and written and is empty or of nothing
/// but zeros (see [`ImageWriter::create`]), as an EROFS image that is mounted above `below`: the root of all
/// layers below as overlayfs merges them, or of the image of the only one; `None` if this is the first layer.
/// `below` is only read. With `recording`, what [`replay`](crate::replay()) needs, with the mounted image as
/// the root, is written to a file of that name.
///
/// # Errors
/// A corrupt or truncated archive, a member that leads out of the root or cannot be kept in an image, more
/// members than memory allows. The image is then to be thrown away, and no recording is left.
pub fn image(
    reader: impl Read,
    below: Option<&Path>,
    image: File,
    recording: Option<&Path>,
) -> Result<Imaged, ArchiveError> {
    Imager::new(below, image, recording)?.run(&mut Members::new(reader))
}

/// The same of a layer as containerd applies it (`pkg/archive` there): what it says of the root itself counts for nothing;
/// extended attributes `trusted.*`, which are for the machine's administrator, are left out; and times before 1970, or
/// that an `int64` of nanoseconds cannot hold, are 1970.
///
/// # Errors
/// As [`image`].
pub fn layer_image(
    reader: impl Read,
    below: Option<&Path>,
    image: File,
) -> Result<Imaged, ArchiveError> {
    let imager = Imager { is_as_containerd: true, ..Imager::new(below, image, None)? };
    imager.run(&mut Members::new(reader))
}

/// Turns what the image's writer says about `member` into an error.
fn of_image(member: impl Into<String>) -> impl FnOnce(ErofsError) -> ArchiveError {
    move |source| ArchiveError::Image { member: member.into(), source }
}

/// The making of an image.
struct Imager {
    writer: ImageWriter,
    layer: Layer,
    recorder: Option<Recorder>,
    /// The contents that the recording reads from the image, by their paths, with their numbers.
    recorded: HashMap<PathHash, u32>,
    /// Of all members' headers: the image's UUID comes from it.
    headers: blake3::Hasher,
    buffer: Vec<u8>,
    /// What members say counts as far as it does for containerd: see [`layer_image`].
    is_as_containerd: bool,
}

impl Imager {
    fn new(
        below: Option<&Path>,
        image: File,
        recording: Option<&Path>,
    ) -> Result<Self, ArchiveError> {
        Ok(Self {
            writer: ImageWriter::create(image).map_err(of_image("the image"))?,
            layer: Layer::new(below, TREE_BYTES_MAX)?,
            recorder: recording.map(Recorder::create).transpose()?,
            recorded: HashMap::new(),
            headers: blake3::Hasher::new(),
            buffer: vec![0; BUFFER_BYTES],
            is_as_containerd: false,
        })
    }

    fn run<R: Read>(mut self, members: &mut Members<R>) -> Result<Imaged, ArchiveError> {
        let mut unpacked = Unpacked::default();
        let end = loop {
            match members.next()? {
                Next::End(raw) => break raw,
                Next::Member(member) => {
                    unpacked.count(&member, BOUNDS.members)?;
                    self.headers.update(&member.raw);
                    self.record(&member.raw)?;
                    self.apply(&member, members)?;
                    self.record(&members.padding()?)?;
                }
            }
        };
        self.record(&end)?;
        record_trailing(members, &mut self.buffer, &mut self.recorder)?;
        let tree = self.layer.finish()?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&self.headers.finalize().as_bytes()[..16]);
        let written = self.writer.finish(&tree, uuid).map_err(of_image("the image"))?;
        self.recorder.map_or(Ok(()), Recorder::finish)?;
        Ok(Imaged { unpacked, image_bytes: written.size_bytes, inodes: written.inodes })
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
        let shown_member = member.shown();
        let path = clean(&shown_member, &member.name)?;
        let meaning = Meaning::of(member, &path)?;
        if meaning == Meaning::Note {
            return self.pass_over(members);
        }
        if path.as_os_str().is_empty() && self.is_as_containerd {
            return self.pass_over(members);
        }
        if path.as_os_str().is_empty() {
            if member.kind != MemberKind::Directory {
                return Err(member.error("it would replace the root of the layer"));
            }
            return self.layer.set_attributes(member, self.layer.root(), self.attributes(member)?);
        }
        let spot = self.layer.spot(&shown_member, &path)?;
        match meaning {
            Meaning::Opaque => {
                self.layer.clear(&shown_member, spot.directory, spot.directory_path())?;
                self.pass_over(members)
            }
            Meaning::Removes(hidden) => {
                self.layer.white_out(&shown_member, &spot.beside(&hidden))?;
                self.pass_over(members)
            }
            Meaning::Member | Meaning::Note => match member.kind {
                MemberKind::Directory => self.directory(member, &spot),
                MemberKind::HardLink => self.link(member, &spot),
                _ => {
                    self.remove(&spot)?;
                    let kind = self.content(member, &spot, members)?;
                    let attributes = self.attributes(member)?;
                    self.layer.add(&shown_member, &spot, attributes, kind).map(|_| ())
                }
            },
        }
    }

    /// What a member says of its inode, as far as it counts.
    fn attributes(&self, member: &Member) -> Result<Attributes, ArchiveError> {
        let mut attributes = attributes(member)?;
        if self.is_as_containerd {
            attributes.xattrs.retain(|name, _| !name.starts_with(TRUSTED));
            attributes.modified = as_containerd(attributes.modified);
        }
        Ok(attributes)
    }

    /// Reads a content that goes nowhere.
    fn pass_over<R: Read>(&mut self, members: &mut Members<R>) -> Result<(), ArchiveError> {
        record_content(members, &mut self.buffer, &mut self.recorder)
    }

    /// A directory that is there keeps its children; what else is there gives way to an empty one.
    fn directory(&mut self, member: &Member, spot: &Spot) -> Result<(), ArchiveError> {
        let attributes = self.attributes(member)?;
        let present = self.layer.own(spot);
        if let Some(inode) = present.filter(|inode| self.layer.tree().is_directory(*inode)) {
            return self.layer.set_attributes(member, inode, attributes);
        }
        self.remove(spot)?;
        let inode = self.layer.add(&member.shown(), spot, attributes, Kind::Directory)?;
        if present.is_some() {
            // A file of this archive stood here, or a whiteout: what is below was gone already.
            self.layer.hide_below(inode, &spot.path)?;
        }
        Ok(())
    }

    /// Makes a hard link to a file of this layer, or to a copy of one below.
    fn link(&mut self, member: &Member, spot: &Spot) -> Result<(), ArchiveError> {
        let shown_member = member.shown();
        self.remove(spot)?;
        let target = clean(&shown_member, &member.link)?;
        let target = self.layer.find(&shown_member, &target)?;
        let inode = match target.seen {
            Seen::Nothing => {
                let target = shown(&member.link);
                let reason = format!("it is a link to `{target}`, which does not exist");
                return Err(member.error(reason));
            }
            Seen::Own(inode) => inode,
            Seen::Below(place, stat) => self.copy_up(&shown_member, &target.path, &place, &stat)?,
        };
        if self.layer.tree().is_directory(inode) {
            return Err(member.error("it is a link to a directory"));
        }
        self.layer.link(&shown_member, spot, inode)
    }

    /// Copies what is below into this layer, so that it can have another name.
    fn copy_up(
        &mut self,
        member: &str,
        path: &Path,
        place: &Place,
        stat: &Stat,
    ) -> Result<InodeId, ArchiveError> {
        let spot = self.layer.spot(member, path)?;
        if let Some(copy) = self.layer.copy_of(stat) {
            // Another name below of a file that was copied.
            self.layer.link(member, &spot, copy)?;
            self.layer.note_copy(&spot, stat, copy);
            return Ok(copy);
        }
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let content = self.layer.file_below(path)?;
                let mut file =
                    self.writer.begin_file(size_bytes(stat)).map_err(of_image(member))?;
                loop {
                    let length = (&content).read(&mut self.buffer).map_err(failed("read", path))?;
                    if length == 0 {
                        break Kind::File(file.finish().map_err(of_image(member))?);
                    }
                    file.write(&self.buffer[..length]).map_err(of_image(member))?;
                }
            }
            FileType::Symlink => Kind::Symlink(place.link_target()?.into_vec().into_boxed_slice()),
            FileType::CharacterDevice => {
                Kind::CharacterDevice { major: major(stat.st_rdev), minor: minor(stat.st_rdev) }
            }
            FileType::BlockDevice => {
                Kind::BlockDevice { major: major(stat.st_rdev), minor: minor(stat.st_rdev) }
            }
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::Directory | FileType::Unknown => Kind::Directory,
        };
        let attributes = self.layer.attributes_below(place, stat)?;
        let inode = self.layer.add(member, &spot, attributes, kind)?;
        self.layer.note_copy(&spot, stat, inode);
        Ok(inode)
    }

    /// Takes away what this layer has at a place. The contents that the recording points to move into
    /// the recording.
    fn remove(&mut self, spot: &Spot) -> Result<(), ArchiveError> {
        enum Step {
            Enter(Vec<u8>, InodeId),
            Leave,
        }
        let Some(inode) = self.layer.own(spot) else { return Ok(()) };
        if self.recorder.is_some() {
            // A list of what is to be done and no recursion, of directories alone: see `unpack`.
            self.keep(inode, &spot.path)?;
            let mut here = spot.path.clone();
            here.pop();
            let mut steps = vec![Step::Enter(spot.name.clone(), inode)];
            while let Some(step) = steps.pop() {
                let Step::Enter(name, directory) = step else {
                    here.pop();
                    continue;
                };
                here.push(OsStr::from_bytes(&name));
                steps.push(Step::Leave);
                let children: Vec<_> = self.layer.tree().children(directory).collect();
                let mut files = Vec::new();
                for (name, child) in children {
                    if self.layer.tree().is_directory(child) {
                        steps.push(Step::Enter(name.to_vec(), child));
                    } else {
                        files.push((name.to_vec(), child));
                    }
                }
                for (name, child) in files {
                    self.keep(child, &here.join(OsStr::from_bytes(&name)))?;
                }
            }
        }
        self.layer.remove(spot);
        Ok(())
    }

    /// Moves a content into the recording, if the recording points to it.
    fn keep(&mut self, inode: InodeId, path: &Path) -> Result<(), ArchiveError> {
        let Kind::File(extent) = self.layer.tree().kind(inode) else { return Ok(()) };
        let Some(number) = self.recorded.remove(&PathHash::of(path)) else { return Ok(()) };
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let content = self.writer.content(extent).map_err(of_image(path.display().to_string()))?;
        recorder.keep(number, path, content)
    }

    /// What a member is that is neither a directory nor a hard link.
    fn content<R: Read>(
        &mut self,
        member: &Member,
        spot: &Spot,
        members: &mut Members<R>,
    ) -> Result<Kind, ArchiveError> {
        let (major, minor) = member.device;
        Ok(match &member.kind {
            MemberKind::File => Kind::File(self.file(member, spot, members)?),
            MemberKind::Sparse { parts } => Kind::File(self.sparse_file(member, parts, members)?),
            MemberKind::Symlink => Kind::Symlink(member.link.clone().into_boxed_slice()),
            MemberKind::Character if member.device == (0, 0) => {
                return Err(member.error("a character device 0:0 is a whiteout of overlayfs"));
            }
            MemberKind::Character => Kind::CharacterDevice { major, minor },
            MemberKind::Block => Kind::BlockDevice { major, minor },
            MemberKind::Fifo => Kind::Fifo,
            MemberKind::Directory | MemberKind::HardLink => {
                return Err(member.error("it has no content of its own"));
            }
        })
    }

    fn file<R: Read>(
        &mut self,
        member: &Member,
        spot: &Spot,
        members: &mut Members<R>,
    ) -> Result<Extent, ArchiveError> {
        let error = || of_image(member.shown());
        let mut hasher = blake3::Hasher::new();
        let mut file = self.writer.begin_file(member.size_bytes).map_err(error())?;
        loop {
            let length = members.content(&mut self.buffer)?;
            if length == 0 {
                break;
            }
            let bytes = &self.buffer[..length];
            file.write(bytes).map_err(error())?;
            if let Some(recorder) = &mut self.recorder {
                hasher.update(bytes);
                recorder.count(bytes);
            }
        }
        let extent = file.finish().map_err(error())?;
        if let Some(recorder) = self.recorder.as_mut().filter(|_| member.size_bytes > 0) {
            let number = recorder.content(&spot.path, member.size_bytes, hasher.finalize())?;
            self.recorded.insert(PathHash::of(&spot.path), number);
        }
        Ok(extent)
    }

    /// A sparse file from its parts. Their bytes go into the recording, as `unpack` has it.
    fn sparse_file<R: Read>(
        &mut self,
        member: &Member,
        parts: &[(u64, u64)],
        members: &mut Members<R>,
    ) -> Result<Extent, ArchiveError> {
        let error = || of_image(member.shown());
        let file = self.writer.begin_sparse_file(member.size_bytes, parts);
        let mut file = file.map_err(error())?;
        loop {
            let length = members.content(&mut self.buffer)?;
            if length == 0 {
                return file.finish().map_err(error());
            }
            file.write(&self.buffer[..length]).map_err(error())?;
            if let Some(recorder) = &mut self.recorder {
                recorder.raw(&self.buffer[..length])?;
            }
        }
    }
}

/// How the names of extended attributes begin that Linux' file systems have.
const KNOWN_XATTRS: [&[u8]; 4] = [b"user.", TRUSTED, b"security.", b"system.posix_acl_"];
const TRUSTED: &[u8] = b"trusted.";

/// The last time that an `int64` of nanoseconds since 1970 holds, in the year 2262.
const TIME_MAX: Time = Time { seconds: i64::MAX / 1_000_000_000, nanoseconds: 854_775_807 };

/// A time as containerd sets it.
fn as_containerd(time: Time) -> Time {
    let is_after = (time.seconds, time.nanoseconds) > (TIME_MAX.seconds, TIME_MAX.nanoseconds);
    match time.seconds < 0 || is_after {
        true => Time { seconds: 0, nanoseconds: 0 },
        false => time,
    }
}

/// What a member's headers say of its inode.
fn attributes(member: &Member) -> Result<Attributes, ArchiveError> {
    member.check_owner()?;
    let mut xattrs = member.xattrs.clone();
    // No file system of Linux has others, and the kernel allows none of users on links, devices and pipes: other engines
    // leave all these out, too.
    let is_content = matches!(
        member.kind,
        MemberKind::File | MemberKind::Sparse { .. } | MemberKind::HardLink | MemberKind::Directory
    );
    xattrs.retain(|name, _| {
        let has = |prefix: &&[u8]| name.starts_with(prefix);
        KNOWN_XATTRS.iter().any(has) && (is_content || !name.starts_with(b"user."))
    });
    // Links have no permissions: all other file systems show these.
    let mode = if member.kind == MemberKind::Symlink { SYMLINK_MODE } else { member.mode };
    let mut attributes = Attributes {
        // The bits of permissions are all that a member's mode has.
        mode: u16::try_from(mode).unwrap_or_default(),
        uid: member.uid,
        gid: member.gid,
        modified: layer::time(member.modified),
        xattrs: escaped(xattrs),
    };
    apply_acl(&mut attributes);
    Ok(attributes)
}

/// Does what other file systems do when they are given an access ACL: its permissions are those of the
/// inode, and one that says no more than these is not kept.
fn apply_acl(attributes: &mut Attributes) {
    for name in [&b"system.posix_acl_access"[..], b"system.posix_acl_default"] {
        // One that is not valid is refused by the image's writer.
        let Some(acl) = attributes.xattrs.get(name).and_then(|value| PosixAcl::parse(value)) else {
            continue;
        };
        let is_access = name.ends_with(b"access");
        if is_access && !acl.is_empty() {
            attributes.mode = attributes.mode & !0o777 | acl.mode();
        }
        if acl.is_empty() || is_access && acl.is_minimal() {
            attributes.xattrs.remove(name);
        }
    }
}

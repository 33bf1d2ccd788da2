//! What changed between two trees as the archive of a layer, the same bytes each time.
//!
//! Members come in the order of their paths, a directory before what is in it. What does not fit a
//! POSIX header (long names, nanoseconds, large numbers, extended attributes) is in PAX records.
//! Deletions are OCI whiteouts.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat, major, minor};

use crate::changes::{ChangeKind, Closeness, Comparison};
use crate::error::{ArchiveError, failed, vanished};
use crate::header::{self, BLOCK_BYTES, Builder};
use crate::members::NAME_BYTES_MAX;
use crate::pax::{self, Records, Time};
use crate::recording::Recorder;
use crate::root::{Place, Root, modified, size_bytes};
use crate::whiteout::{OPAQUE_NAME, WHITEOUT_PREFIX};

/// Bytes moved at once.
const BUFFER_BYTES: usize = 256 << 10;

/// The name of extended headers. Readers ignore it.
const EXTENSION_NAME: &[u8] = b"PaxHeaders";

/// What was packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packed {
    /// The sum of the files' sizes.
    pub size_bytes: u64,
    /// The number of members.
    pub entries: u64,
}

/// Writes the archive that makes the tree `newer` of the tree `older`, or of nothing. Neither may
/// change until it is written: not every change is noticed. Sockets are left out: they mean nothing
/// without their process. With `recording`, what [`replay`](crate::replay()) needs to write the same
/// archive again from the tree `newer` is written to a file of that name: also for a later version of
/// this function, which may write other bytes. The paths of what differs take at most `paths_bytes_max`
/// of memory; `usize::MAX` is for a program of its own.
///
/// # Errors
/// A tree cannot be read, a name cannot be said in a layer, the paths of what differs take more memory
/// than is given to them, `out` fails, or the recording cannot be written; then there is none.
pub fn pack(
    older: Option<&Path>,
    newer: &Path,
    out: &mut impl Write,
    recording: Option<&Path>,
    paths_bytes_max: usize,
) -> Result<Packed, ArchiveError> {
    let older = older.map(Root::open).transpose()?;
    let newer = Root::open(newer)?;
    let found = Comparison::run(Closeness::Whole, paths_bytes_max, older.as_ref(), &newer)?;
    let recorder = recording.map(Recorder::create).transpose()?;
    let mut packer = Packer::new(&newer, out, recorder);
    if Comparison::root_differs(older.as_ref(), &newer)? {
        packer.present(Path::new(""))?;
    }
    packer.all(&found)?;
    packer.finish()
}

/// The fields of a member.
struct Fields {
    kind: u8,
    name: Vec<u8>,
    link: Vec<u8>,
    mode: u32,
    uid: u32,
    gid: u32,
    modified: Time,
    size_bytes: u64,
    device: (u32, u32),
    xattrs: Records,
}

/// An archive under way.
pub(crate) struct Packer<'a, W> {
    root: &'a Root,
    out: &'a mut W,
    recorder: Option<Recorder>,
    /// The first path of each file that has several, by inode.
    links: HashMap<u64, PathBuf>,
    packed: Packed,
}

impl<'a, W: Write> Packer<'a, W> {
    /// An archive without members yet; its files are read below `root`.
    pub(crate) fn new(root: &'a Root, out: &'a mut W, recorder: Option<Recorder>) -> Self {
        Self { root, out, recorder, links: HashMap::new(), packed: Packed::default() }
    }

    /// Ends the archive, and the recording.
    pub(crate) fn finish(mut self) -> Result<Packed, ArchiveError> {
        self.write(&[0; 2 * BLOCK_BYTES])?;
        self.out.flush().map_err(|source| ArchiveError::Write { source })?;
        self.recorder.map_or(Ok(()), Recorder::finish)?;
        Ok(self.packed)
    }

    fn all(&mut self, found: &BTreeMap<PathBuf, ChangeKind>) -> Result<(), ArchiveError> {
        for (path, kind) in found {
            check_name(path)?;
            match kind {
                ChangeKind::Deleted => self.whiteout(path)?,
                ChangeKind::Added | ChangeKind::Modified => self.present(path)?,
            }
        }
        Ok(())
    }

    /// Writes that a path is gone.
    pub(crate) fn whiteout(&mut self, path: &Path) -> Result<(), ArchiveError> {
        let name = path.file_name().unwrap_or_default();
        let name = [WHITEOUT_PREFIX, name.as_bytes()].concat();
        self.mark(&path.with_file_name(OsStr::from_bytes(&name)))
    }

    /// Writes that nothing of the layers below is left in a directory.
    pub(crate) fn opaque(&mut self, directory: &Path) -> Result<(), ArchiveError> {
        self.mark(&directory.join(OsStr::from_bytes(OPAQUE_NAME)))
    }

    /// Writes an empty file whose name says something.
    fn mark(&mut self, name: &Path) -> Result<(), ArchiveError> {
        self.member(&Fields {
            kind: b'0',
            name: name.as_os_str().as_bytes().to_vec(),
            link: Vec::new(),
            mode: 0,
            uid: 0,
            gid: 0,
            modified: Time::default(),
            size_bytes: 0,
            device: (0, 0),
            xattrs: Records::new(),
        })
    }

    /// Writes what is at a path now.
    fn present(&mut self, path: &Path) -> Result<(), ArchiveError> {
        let place = self.root.resolved(path).map_err(failed("open the parent of", path))?;
        let stat = place.stat()?.ok_or_else(|| vanished(path))?;
        let xattrs = place.xattrs()?;
        self.add(&place, &stat, xattrs).map(drop)
    }

    /// Writes what is at a place, with these extended attributes. Whether its path stays in memory until
    /// the end, for other names of the file.
    pub(crate) fn add(
        &mut self,
        place: &Place,
        stat: &Stat,
        xattrs: Records,
    ) -> Result<bool, ArchiveError> {
        let path = &place.path;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Socket {
            // Something else may have been there.
            return self.whiteout(path).map(|()| false);
        }
        let mut fields = fields(place, stat, kind, xattrs)?;
        let is_linked = kind != FileType::Directory && stat.st_nlink > 1;
        if is_linked {
            if let Some(first) = self.links.get(&stat.st_ino) {
                fields.kind = b'1';
                fields.link = first.as_os_str().as_bytes().to_vec();
                fields.size_bytes = 0;
                return self.member(&fields).map(|()| false);
            }
            self.links.insert(stat.st_ino, path.clone());
        }
        self.member(&fields)?;
        if kind == FileType::RegularFile && fields.size_bytes > 0 {
            self.content(path, fields.size_bytes)?;
        }
        Ok(is_linked)
    }

    /// Writes the headers of a member.
    fn member(&mut self, fields: &Fields) -> Result<(), ArchiveError> {
        if fields.name.len().max(fields.link.len()) > NAME_BYTES_MAX {
            let path = PathBuf::from(OsStr::from_bytes(&fields.name));
            let reason = "its path or link is longer than an unpacker takes; \
                          give it and the directories above it shorter names";
            return Err(ArchiveError::Unpackable { path, reason });
        }
        let records = records(fields);
        if !records.is_empty() {
            let content = pax::compose(&records);
            let size_bytes = content.len() as u64;
            let header = Builder::new(b'x')
                .text(header::NAME, EXTENSION_NAME)
                .number(header::MODE, 0o644)
                .number(header::UID, 0)
                .number(header::GID, 0)
                .number(header::SIZE, size_bytes)
                .number(header::MTIME, 0);
            self.write(&header.finish())?;
            self.write(&content)?;
            self.write(&vec![0; header::padding_bytes(size_bytes)])?;
        }
        let header = Builder::new(fields.kind)
            .text(header::NAME, &fields.name)
            .text(header::LINK, &fields.link)
            .number(header::MODE, fields.mode.into())
            .number(header::UID, fields.uid.into())
            .number(header::GID, fields.gid.into())
            .number(header::SIZE, fields.size_bytes)
            .number(header::MTIME, u64::try_from(fields.modified.seconds).unwrap_or_default())
            .number(header::MAJOR, fields.device.0.into())
            .number(header::MINOR, fields.device.1.into());
        self.write(&header.finish())?;
        self.packed.entries += 1;
        self.packed.size_bytes += fields.size_bytes;
        Ok(())
    }

    /// Writes the content of a file and what fills its last block.
    fn content(&mut self, path: &Path, size_bytes: u64) -> Result<(), ArchiveError> {
        let file = self.root.file(path).map_err(failed("open", path))?;
        let mut file = file.take(size_bytes);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut got = 0;
        let mut hasher = blake3::Hasher::new();
        loop {
            let length = file.read(&mut buffer).map_err(failed("read", path))?;
            if length == 0 {
                break;
            }
            self.put(&buffer[..length])?;
            if let Some(recorder) = &mut self.recorder {
                recorder.count(&buffer[..length]);
                hasher.update(&buffer[..length]);
            }
            got += length as u64;
        }
        if got != size_bytes {
            return Err(ArchiveError::Changed { path: path.to_owned(), expected: size_bytes, got });
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.content(path, size_bytes, hasher.finalize())?;
        }
        self.write(&vec![0; header::padding_bytes(size_bytes)])
    }

    /// Writes what is in no file of the tree.
    fn write(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.put(bytes)?;
        self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.raw(bytes))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.out.write_all(bytes).map_err(|source| ArchiveError::Write { source })
    }
}

/// Refuses what a layer says deletions with.
pub(crate) fn check_name(path: &Path) -> Result<(), ArchiveError> {
    let name = path.file_name().unwrap_or_default();
    if name.as_bytes().starts_with(WHITEOUT_PREFIX) {
        let reason = "names that begin with `.wh.` mean deletions in a layer; rename it";
        return Err(ArchiveError::Unpackable { path: path.to_owned(), reason });
    }
    Ok(())
}

/// The fields of what is at a place.
fn fields(
    place: &Place,
    stat: &Stat,
    kind: FileType,
    xattrs: Records,
) -> Result<Fields, ArchiveError> {
    if xattrs.keys().any(|name| name.contains(&b'=')) {
        let reason = "it has an extended attribute with `=` in its name, which a layer would give as \
                      another attribute; remove that attribute";
        return Err(ArchiveError::Unpackable { path: place.path.clone(), reason });
    }
    let mut name = place.path.as_os_str().as_bytes().to_vec();
    let mut fields = Fields {
        kind: b'0',
        name: Vec::new(),
        link: Vec::new(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified: modified(stat),
        size_bytes: 0,
        device: (0, 0),
        xattrs,
    };
    match kind {
        FileType::RegularFile => fields.size_bytes = size_bytes(stat),
        FileType::Symlink => {
            fields.kind = b'2';
            fields.link = place.link_target()?.as_bytes().to_vec();
        }
        FileType::Directory => {
            fields.kind = b'5';
            // The root is `./`.
            name = if name.is_empty() { b"./".to_vec() } else { [&name[..], b"/"].concat() };
        }
        FileType::Fifo => fields.kind = b'6',
        FileType::CharacterDevice | FileType::BlockDevice => {
            fields.kind = if kind == FileType::BlockDevice { b'4' } else { b'3' };
            fields.device = (major(stat.st_rdev), minor(stat.st_rdev));
        }
        _ => {
            let reason = "it is of a kind that this program does not know";
            return Err(ArchiveError::Unpackable { path: place.path.clone(), reason });
        }
    }
    fields.name = name;
    Ok(fields)
}

/// What a POSIX header cannot say of a member.
fn records(fields: &Fields) -> Records {
    let mut records = Records::new();
    let mut add = |key: &[u8], value: Vec<u8>| records.insert(key.to_vec(), value);
    if fields.name.len() > header::NAME.len() {
        add(b"path", fields.name.clone());
    }
    if fields.link.len() > header::LINK.len() {
        add(b"linkpath", fields.link.clone());
    }
    let numbers = [
        (&b"uid"[..], header::UID, u64::from(fields.uid)),
        (b"gid", header::GID, u64::from(fields.gid)),
        (b"size", header::SIZE, fields.size_bytes),
    ];
    for (key, field, value) in numbers {
        if !header::fits(&field, value) {
            add(key, value.to_string().into_bytes());
        }
    }
    let is_time_whole = fields.modified.nanoseconds == 0
        && u64::try_from(fields.modified.seconds)
            .is_ok_and(|seconds| header::fits(&header::MTIME, seconds));
    if !is_time_whole {
        add(b"mtime", pax::compose_time(fields.modified));
    }
    for (name, value) in &fields.xattrs {
        add(&[pax::XATTR_PREFIX, name].concat(), value.clone());
    }
    records
}

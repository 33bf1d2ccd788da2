//! The members of a tar archive, with every byte they are made of.
//!
//! A member is its headers (extended ones first), its content, and zeros up to the next block.
//! `tar` libraries hide some of these bytes; an exact replay needs all of them, so the headers are
//! read here. What is understood is what Docker's and containerd's reader (Go's) understands.
//!
//! ```text
//! [x header, records]* [L header, name] [K header, link] header  content  padding   (next member)
//! \------------------------- Member::raw ----------------------/ content() padding()
//! ```

use std::io::{ErrorKind, Read};

use crate::error::{ArchiveError, shown};
use crate::header::{self, BLOCK_BYTES, Block};
use crate::pax::{self, Records, Time};

/// Bytes of one extended header. Go's reader has the same limit: what is longer, no engine made.
const EXTENSION_BYTES_MAX: i64 = 1 << 20;

/// Bytes of all headers of one member: a few full extensions, so that a stream of nothing but
/// extensions does not fill the memory.
const HEADERS_BYTES_MAX: usize = 4 << 20;

/// Bytes of a name: the kernel takes no longer path.
pub(crate) const NAME_BYTES_MAX: usize = 4095;

/// An entry of a sparse file's map: offset and length.
const SPARSE_ENTRY_BYTES: usize = 24;

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    /// A file of which only these parts (offset, length) are in the archive.
    Sparse {
        parts: Vec<(u64, u64)>,
    },
    HardLink,
    Symlink,
    Character,
    Block,
    Directory,
    Fifo,
}

/// The headers of a member.
#[derive(Debug)]
pub(crate) struct Member {
    /// All header blocks as they were.
    pub(crate) raw: Vec<u8>,
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified: Time,
    /// The size that the header says. Only files have content.
    pub(crate) size_bytes: u64,
    pub(crate) device: (u32, u32),
    /// Extended attributes by name.
    pub(crate) xattrs: Records,
}

impl Member {
    /// The name for messages.
    pub(crate) fn shown(&self) -> String {
        shown(&self.name)
    }

    /// Refuses the number that stands for no owner.
    pub(crate) fn check_owner(&self) -> Result<(), ArchiveError> {
        if self.uid == u32::MAX || self.gid == u32::MAX {
            return Err(self.error("its owner or group is no valid number"));
        }
        Ok(())
    }

    /// An error about this member.
    pub(crate) fn error(&self, reason: impl Into<String>) -> ArchiveError {
        ArchiveError::Member { member: self.shown(), reason: reason.into() }
    }
}

/// What comes next in an archive.
pub(crate) enum Next {
    Member(Box<Member>),
    /// The end marker, and extended headers before it that belong to no member.
    End(Vec<u8>),
}

/// Names and records that extended headers set for the next member.
#[derive(Default)]
struct Extension {
    records: Records,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    is_pending: bool,
}

/// The reader of members.
pub(crate) struct Members<R> {
    reader: R,
    offset: u64,
    content_left: u64,
    padding_left: usize,
}

impl<R: Read> Members<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { reader, offset: 0, content_left: 0, padding_left: 0 }
    }

    /// The stream behind what was read so far.
    pub(crate) fn into_inner(self) -> R {
        self.reader
    }

    /// The next member. The content and padding of the one before must have been read.
    pub(crate) fn next(&mut self) -> Result<Next, ArchiveError> {
        assert!(self.content_left == 0 && self.padding_left == 0, "a member was left unread");
        let mut raw = Vec::new();
        let mut extension = Extension::default();
        loop {
            let at = self.offset;
            let block = self.block(&mut raw)?;
            if block.iter().all(|byte| *byte == 0) {
                return self.end(raw, at, extension.is_pending);
            }
            if !header::has_right_checksum(&block) {
                return Err(bad(at, "wrong checksum"));
            }
            match block[header::TYPE] {
                b'x' | b'g' | b'L' | b'K' => self.extend(&block, at, &mut raw, &mut extension)?,
                _ => return self.member(&block, at, raw, extension).map(Next::Member),
            }
        }
    }

    /// Reads the second block of the end marker; a stream may end without it.
    fn end(&mut self, mut raw: Vec<u8>, at: u64, is_pending: bool) -> Result<Next, ArchiveError> {
        if is_pending {
            return Err(bad(at, "an extended header without its member"));
        }
        let mut block = [0; BLOCK_BYTES];
        let length = self.fill(&mut block)?;
        if length != 0 && length != BLOCK_BYTES {
            return Err(ArchiveError::Truncated { offset: self.offset });
        }
        if block.iter().any(|byte| *byte != 0) {
            return Err(bad(at, "a lone block of zeros, followed by more"));
        }
        raw.extend_from_slice(&block[..length]);
        Ok(Next::End(raw))
    }

    /// Takes the content of an extended header in.
    fn extend(
        &mut self,
        block: &Block,
        at: u64,
        raw: &mut Vec<u8>,
        extension: &mut Extension,
    ) -> Result<(), ArchiveError> {
        let size = header::number(&block[header::SIZE]).unwrap_or(-1);
        if !(0..=EXTENSION_BYTES_MAX).contains(&size) || raw.len() > HEADERS_BYTES_MAX {
            return Err(bad(at, &format!("an extended header of {size} bytes, over the limit")));
        }
        let size = usize::try_from(size).unwrap_or(0);
        let start = raw.len();
        for _ in 0..size.div_ceil(BLOCK_BYTES) {
            self.block(raw)?;
        }
        let content = &raw[start..start + size];
        match block[header::TYPE] {
            b'x' => {
                let records = pax::parse(content);
                let records = records.ok_or_else(|| bad(at, "malformed extended records"))?;
                extension.records.extend(records);
            }
            b'L' => extension.long_name = Some(header::text(content).to_vec()),
            b'K' => extension.long_link = Some(header::text(content).to_vec()),
            // Global records: other engines pass them over, too.
            _ => return Ok(()),
        }
        extension.is_pending = true;
        Ok(())
    }

    /// Makes a member of its header and what the extended ones said.
    fn member(
        &mut self,
        block: &Block,
        at: u64,
        raw: Vec<u8>,
        extension: Extension,
    ) -> Result<Box<Member>, ArchiveError> {
        let fields = Fields { block, records: &extension.records, at };
        let name = extension.long_name.unwrap_or_else(|| posix_name(block));
        let name = extension.records.get(&b"path"[..]).cloned().unwrap_or(name);
        let link = extension.long_link.unwrap_or_else(|| header::text(&block[header::LINK]).into());
        let link = extension.records.get(&b"linkpath"[..]).cloned().unwrap_or(link);
        check_name(&name, at)?;
        check_name(&link, at)?;
        let modified = match extension.records.get(&b"mtime"[..]) {
            Some(text) => pax::parse_time(text).ok_or_else(|| bad(at, "a malformed time"))?,
            None => {
                let seconds = header::number(&block[header::MTIME]);
                let seconds = seconds.ok_or_else(|| bad(at, "a malformed time"))?;
                Time { seconds, nanoseconds: 0 }
            }
        };
        let mut member = Member {
            raw,
            link,
            kind: kind(block, &name, at)?,
            name,
            mode: fields.unsigned(header::MODE, b"")? & 0o7777,
            uid: fields.unsigned(header::UID, b"uid")?,
            gid: fields.unsigned(header::GID, b"gid")?,
            modified,
            size_bytes: fields.number(header::SIZE, b"size")?,
            device: (0, 0),
            xattrs: xattrs(&extension.records),
        };
        if extension.records.keys().any(|key| key.starts_with(b"GNU.sparse.")) {
            return Err(member.error("a sparse file in PAX form; pack it without --sparse"));
        }
        match &mut member.kind {
            Kind::File => self.content_left = member.size_bytes,
            Kind::Sparse { parts } => {
                self.content_left = member.size_bytes;
                *parts = self.sparse_parts(block, at, &mut member.raw)?;
                member.size_bytes = fields.number(header::SPARSE_REAL_SIZE, b"")?;
                check_parts(parts, self.content_left, member.size_bytes)
                    .ok_or_else(|| bad(at, "a malformed map of a sparse file"))?;
            }
            Kind::Character | Kind::Block => {
                member.device =
                    (fields.unsigned(header::MAJOR, b"")?, fields.unsigned(header::MINOR, b"")?);
            }
            Kind::HardLink | Kind::Symlink | Kind::Directory | Kind::Fifo => {}
        }
        self.padding_left = header::padding_bytes(self.content_left);
        Ok(Box::new(member))
    }

    /// The map of a sparse file of GNU's tar: four entries in the header, more in blocks behind.
    fn sparse_parts(
        &mut self,
        block: &Block,
        at: u64,
        raw: &mut Vec<u8>,
    ) -> Result<Vec<(u64, u64)>, ArchiveError> {
        let malformed = || bad(at, "a malformed map of a sparse file");
        let mut parts = Vec::new();
        let mut entries = block[header::SPARSE].to_vec();
        let mut is_continued = block[header::SPARSE_CONTINUES] != 0;
        loop {
            for entry in entries.chunks_exact(SPARSE_ENTRY_BYTES) {
                let (offset, length) = entry.split_at(SPARSE_ENTRY_BYTES / 2);
                if header::text(offset).is_empty() && header::text(length).is_empty() {
                    continue;
                }
                let part = (header::number(offset), header::number(length));
                let (Some(offset), Some(length)) = part else { return Err(malformed()) };
                let offset = u64::try_from(offset).map_err(|_| malformed())?;
                parts.push((offset, u64::try_from(length).map_err(|_| malformed())?));
            }
            if !is_continued {
                return Ok(parts);
            }
            if raw.len() > HEADERS_BYTES_MAX {
                return Err(bad(at, "a map of a sparse file over the limit"));
            }
            let more = self.block(raw)?;
            entries = more[header::SPARSE_MORE].to_vec();
            is_continued = more[header::SPARSE_MORE.end] != 0;
        }
    }

    /// Reads content of the current member; 0 at its end.
    pub(crate) fn content(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let wanted = usize::try_from(self.content_left).unwrap_or(usize::MAX).min(buffer.len());
        let length = self.fill(&mut buffer[..wanted])?;
        if length < wanted {
            return Err(ArchiveError::Truncated { offset: self.offset });
        }
        self.content_left -= length as u64;
        Ok(length)
    }

    /// Reads what fills the last block of the content.
    pub(crate) fn padding(&mut self) -> Result<Vec<u8>, ArchiveError> {
        assert!(self.content_left == 0, "content was left unread");
        let mut padding = vec![0; std::mem::take(&mut self.padding_left)];
        if self.fill(&mut padding)? < padding.len() {
            return Err(ArchiveError::Truncated { offset: self.offset });
        }
        Ok(padding)
    }

    /// Reads what follows the end marker; 0 at the end of the stream.
    pub(crate) fn trailing(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        self.fill(buffer)
    }

    /// Reads a block and appends it to `raw`.
    fn block(&mut self, raw: &mut Vec<u8>) -> Result<Block, ArchiveError> {
        let mut block = [0; BLOCK_BYTES];
        if self.fill(&mut block)? < BLOCK_BYTES {
            return Err(ArchiveError::Truncated { offset: self.offset });
        }
        raw.extend_from_slice(&block);
        Ok(block)
    }

    /// Reads until the buffer is full or the stream ends.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let mut length = 0;
        while length < buffer.len() {
            match self.reader.read(&mut buffer[length..]) {
                Ok(0) => break,
                Ok(read) => length += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(ArchiveError::Read { source }),
            }
        }
        self.offset += length as u64;
        Ok(length)
    }
}

/// A header and the records that override its numbers.
struct Fields<'a> {
    block: &'a Block,
    records: &'a Records,
    at: u64,
}

impl Fields<'_> {
    /// A number that is not negative, from the record `key` if there is one.
    fn number(&self, field: std::ops::Range<usize>, key: &[u8]) -> Result<u64, ArchiveError> {
        let value = match self.records.get(key) {
            Some(text) => std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()),
            None => header::number(&self.block[field]).and_then(|value| value.try_into().ok()),
        };
        let value = value.filter(|value| *value <= i64::MAX.unsigned_abs());
        value.ok_or_else(|| bad(self.at, "a malformed number"))
    }

    /// A number of 32 bits.
    fn unsigned(&self, field: std::ops::Range<usize>, key: &[u8]) -> Result<u32, ArchiveError> {
        let value = self.number(field, key)?;
        u32::try_from(value).map_err(|_| bad(self.at, &format!("the number {value} is too large")))
    }
}

fn bad(offset: u64, reason: &str) -> ArchiveError {
    ArchiveError::BadHeader { offset, reason: reason.to_owned() }
}

/// The name in the header itself.
fn posix_name(block: &Block) -> Vec<u8> {
    let name = header::text(&block[header::NAME]);
    let prefix = header::text(&block[header::PREFIX]);
    if &block[header::MAGIC] != header::MAGIC_USTAR || prefix.is_empty() {
        return name.to_vec();
    }
    [prefix, b"/", name].concat()
}

fn check_name(name: &[u8], at: u64) -> Result<(), ArchiveError> {
    if name.contains(&0) {
        return Err(bad(at, &format!("the name `{}` holds a NUL", shown(name))));
    }
    if name.len() > NAME_BYTES_MAX {
        let length = name.len();
        let text = shown(name);
        return Err(bad(at, &format!("the name `{text}` of {length} bytes is over the limit")));
    }
    Ok(())
}

fn kind(block: &Block, name: &[u8], at: u64) -> Result<Kind, ArchiveError> {
    Ok(match block[header::TYPE] {
        // Before POSIX, a directory was a file whose name ends so.
        0 if name.ends_with(b"/") => Kind::Directory,
        0 | b'0' | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::Character,
        b'4' => Kind::Block,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        b'S' => Kind::Sparse { parts: Vec::new() },
        other => {
            let text = format!("member `{}` is of unknown type {other:#04x}", shown(name));
            return Err(bad(at, &text));
        }
    })
}

/// Whether the parts are in order, hold all of the content, and lie within the file.
fn check_parts(parts: &[(u64, u64)], content_bytes: u64, size_bytes: u64) -> Option<()> {
    let mut end = 0;
    let mut total: u64 = 0;
    for (offset, length) in parts {
        if *offset < end {
            return None;
        }
        end = offset.checked_add(*length)?;
        total = total.checked_add(*length)?;
    }
    (end <= size_bytes && total == content_bytes).then_some(())
}

fn xattrs(records: &Records) -> Records {
    let named = records.iter().filter_map(|(key, value)| {
        Some((key.strip_prefix(pax::XATTR_PREFIX)?.to_vec(), value.clone()))
    });
    named.collect()
}

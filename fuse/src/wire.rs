//! The kernel's FUSE protocol, version 7.31 and later, as far as block files need it.
//!
//! Numbers are in the machine's own byte order (it is the same machine). A request:
//!
//! ```text
//! 0        4        8                16               24    28    32    36        40
//! | length | opcode | unique         | node           | uid | gid | pid | padding | body ...
//! ```
//!
//! A reply is `| length (4) | error (4) | unique (8) | body`, the error being 0 or a negative
//! errno. With `unique` 0 it is a notification and `error` its code.
//!
//! Invariant: `unique` is sent back bit by bit as it came. Its highest bit tells that the
//! request was given to an earlier process already; it is part of the kernel's key.

use bytes::{Buf, Bytes, TryGetError};
use rustix::io::Errno;

/// Bytes before the body of a request.
pub(crate) const REQUEST_HEADER_BYTES: usize = 40;

/// Largest WRITE and READ: what the kernel's pipe of pages holds at most by default.
pub(crate) const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// Pages of such a transfer.
const TRANSFER_PAGES_MAX: u16 = 256;

/// The kernel refuses to read into less than a largest WRITE with its headers.
pub(crate) const REQUEST_BYTES_MAX: usize = (1 << 20) + 4096;

/// Set in `unique` of a request that was resent.
pub(crate) const UNIQUE_RESENT: u64 = 1 << 63;

/// Version 7.31 is Linux 5.4; earlier ones differ in ways that are not worth knowing.
pub(crate) const MINOR_MIN: u32 = 31;
pub(crate) const MAJOR: u32 = 7;
/// What this file follows.
const MINOR: u32 = 40;

/// Requests that the kernel has under way and that no program waits in (readahead): enough to fill a network, few enough
/// that a stalled appliance does not pin much memory.
const BACKGROUND_MAX: u16 = 64;
/// The same with those of loop devices: more than one of them has under way (128), so that it leaves room for others.
const BACKGROUND_WITH_LOOPS_MAX: u16 = 192;

const FLAG_ASYNC_READ: u32 = 1;
const FLAG_BIG_WRITES: u32 = 1 << 5;
/// Direct requests, as those of loop devices, go on side by side, and count as in the background. Without it each waits
/// for the one before.
const FLAG_ASYNC_DIO: u32 = 1 << 15;
const FLAG_PARALLEL_DIROPS: u32 = 1 << 18;
const FLAG_MAX_PAGES: u32 = 1 << 22;
const FLAG_EXTENDED: u32 = 1 << 30;
/// In the second word: the kernel knows [`NOTIFY_RESEND`] (Linux 6.9).
const FLAG2_HAS_RESEND: u32 = 1 << 7;

/// Asks the kernel to hand out again what was read but never answered.
pub(crate) const NOTIFY_RESEND: i32 = 7;

/// Keep what is cached of the file when it is opened again.
pub(crate) const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// Cache nothing: for content that is made when it is read.
pub(crate) const OPEN_DIRECT: u32 = 1;

const SET_SIZE: u32 = 1 << 3;
const OPEN_ACCESS_MASK: u32 = 3;

/// Seconds for which the kernel believes names and attributes: the driver may resize a file or
/// put another one in its place over REST.
const VALID_SECONDS: u64 = 1;

/// Block size that `stat` shows.
const BLOCK_BYTES: u32 = 4096;

/// An inode as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct NodeId(pub(crate) u64);

impl NodeId {
    /// The root of the mount.
    pub(crate) const ROOT: Self = Self(1);
    /// The virtual file of statistics.
    pub(crate) const STATISTICS: Self = Self(2);
    /// The first that a look-up gives.
    pub(crate) const FIRST: Self = Self(3);
}

/// What the kernel offers at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InitRequest {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead_bytes: u32,
    pub(crate) flags: u32,
    pub(crate) flags2: u32,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Init(InitRequest),
    Lookup { name: Bytes },
    Forget(Vec<(NodeId, u64)>),
    GetAttributes,
    SetAttributes { size_bytes: Option<u64> },
    Open { is_for_writing: bool },
    Read { offset_bytes: u64, size_bytes: u32 },
    Write { offset_bytes: u64, data: Bytes },
    FileSystemStatus,
    Sync,
    Release,
    OpenDirectory,
    ReadDirectory { offset: u64, size_bytes: u32 },
    ReleaseDirectory,
    Interrupt,
    Destroy,
    Unknown { opcode: u32 },
}

/// A request of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) unique: u64,
    pub(crate) node: NodeId,
    /// `None` if the body is not what the opcode demands.
    pub(crate) operation: Option<Operation>,
}

/// The bytes are shorter than a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Short;

impl From<TryGetError> for Short {
    fn from(_: TryGetError) -> Self {
        Self
    }
}

impl Request {
    /// The request in `bytes`, which are one whole read of the device.
    pub(crate) fn decode(mut bytes: Bytes) -> Result<Self, Short> {
        let got = bytes.len();
        let length = usize::try_from(bytes.try_get_u32_ne()?).unwrap_or(usize::MAX);
        let opcode = bytes.try_get_u32_ne()?;
        let unique = bytes.try_get_u64_ne()?;
        let node = NodeId(bytes.try_get_u64_ne()?);
        if length != got || got < REQUEST_HEADER_BYTES {
            return Err(Short);
        }
        let body = bytes.split_off(16);
        Ok(Self { unique, node, operation: decode_operation(opcode, node, body).ok() })
    }
}

fn decode_operation(opcode: u32, node: NodeId, mut body: Bytes) -> Result<Operation, Short> {
    Ok(match opcode {
        1 => Operation::Lookup { name: decode_name(&body)? },
        2 => Operation::Forget(vec![(node, body.try_get_u64_ne()?)]),
        3 => Operation::GetAttributes,
        4 => {
            let valid = body.try_get_u32_ne()?;
            skip(&mut body, 12)?;
            let size_bytes = body.try_get_u64_ne()?;
            Operation::SetAttributes { size_bytes: (valid & SET_SIZE != 0).then_some(size_bytes) }
        }
        14 => {
            let flags = body.try_get_u32_ne()?;
            Operation::Open { is_for_writing: flags & OPEN_ACCESS_MASK != 0 }
        }
        15 => {
            let (offset_bytes, size_bytes) = decode_range(&mut body)?;
            Operation::Read { offset_bytes, size_bytes: size_bytes.min(TRANSFER_BYTES_MAX) }
        }
        16 => {
            let (offset_bytes, size_bytes) = decode_range(&mut body)?;
            skip(&mut body, 20)?;
            if usize::try_from(size_bytes) != Ok(body.len()) {
                return Err(Short);
            }
            Operation::Write { offset_bytes, data: body }
        }
        17 => Operation::FileSystemStatus,
        18 => Operation::Release,
        20 => Operation::Sync,
        26 => Operation::Init(decode_init(&mut body)?),
        27 => Operation::OpenDirectory,
        28 => {
            let (offset, size_bytes) = decode_range(&mut body)?;
            Operation::ReadDirectory { offset, size_bytes: size_bytes.min(TRANSFER_BYTES_MAX) }
        }
        29 => Operation::ReleaseDirectory,
        36 => Operation::Interrupt,
        38 => Operation::Destroy,
        42 => Operation::Forget(decode_forgets(&mut body)?),
        _ => Operation::Unknown { opcode },
    })
}

fn skip(body: &mut Bytes, count: usize) -> Result<(), Short> {
    if body.len() < count {
        return Err(Short);
    }
    body.advance(count);
    Ok(())
}

/// Handle, offset, size: what READ, WRITE and READDIR begin with.
fn decode_range(body: &mut Bytes) -> Result<(u64, u32), Short> {
    skip(body, 8)?;
    Ok((body.try_get_u64_ne()?, body.try_get_u32_ne()?))
}

fn decode_name(body: &Bytes) -> Result<Bytes, Short> {
    let end = body.iter().position(|&byte| byte == 0).ok_or(Short)?;
    Ok(body.slice(..end))
}

fn decode_init(body: &mut Bytes) -> Result<InitRequest, Short> {
    let (major, minor) = (body.try_get_u32_ne()?, body.try_get_u32_ne()?);
    let max_readahead_bytes = body.try_get_u32_ne()?;
    let flags = body.try_get_u32_ne()?;
    let has_more = flags & FLAG_EXTENDED != 0;
    let flags2 = if has_more { body.try_get_u32_ne()? } else { 0 };
    Ok(InitRequest { major, minor, max_readahead_bytes, flags, flags2 })
}

fn decode_forgets(body: &mut Bytes) -> Result<Vec<(NodeId, u64)>, Short> {
    let count = usize::try_from(body.try_get_u32_ne()?).map_err(|_| Short)?;
    skip(body, 4)?;
    if body.len() / 16 < count {
        return Err(Short);
    }
    (0..count).map(|_| Ok((NodeId(body.try_get_u64_ne()?), body.try_get_u64_ne()?))).collect()
}

/// The header of a reply whose body has `body_bytes`.
pub(crate) fn reply_header(unique: u64, outcome: Result<usize, Errno>) -> Vec<u8> {
    let (error, body_bytes) = match outcome {
        Ok(body_bytes) => (0, body_bytes),
        Err(errno) => (-errno.raw_os_error(), 0),
    };
    header(unique, error, body_bytes)
}

/// A notification without a body.
pub(crate) fn notification(code: i32) -> Vec<u8> {
    header(0, code, 0)
}

fn header(unique: u64, error: i32, body_bytes: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16);
    let length = u32::try_from(16 + body_bytes).unwrap_or(u32::MAX);
    put_u32(&mut bytes, length);
    bytes.extend_from_slice(&error.to_ne_bytes());
    put_u64(&mut bytes, unique);
    bytes
}

fn put_u16(bytes: &mut Vec<u8>, value: u16) {
    bytes.extend_from_slice(&value.to_ne_bytes());
}

fn put_u32(bytes: &mut Vec<u8>, value: u32) {
    bytes.extend_from_slice(&value.to_ne_bytes());
}

fn put_u64(bytes: &mut Vec<u8>, value: u64) {
    bytes.extend_from_slice(&value.to_ne_bytes());
}

impl InitRequest {
    /// Whether the kernel hands unanswered requests out again when it is asked to.
    pub(crate) const fn has_resend(&self) -> bool {
        self.flags2 & FLAG2_HAS_RESEND != 0
    }

    /// The reply. There is no write-back cache: what was written is at the appliance when the
    /// write is answered, so that a sync has only to commit it.
    pub(crate) fn reply(&self) -> Vec<u8> {
        // What a dead server had taken is answered by none where the kernel does not hand it out again. In the background
        // it would take its place there for good, and with it, in the end, those of all files.
        let (loops, background_max) = match self.has_resend() {
            true => (FLAG_ASYNC_DIO, BACKGROUND_WITH_LOOPS_MAX),
            false => (0, BACKGROUND_MAX),
        };
        let wanted = FLAG_ASYNC_READ
            | FLAG_BIG_WRITES
            | loops
            | FLAG_PARALLEL_DIROPS
            | FLAG_MAX_PAGES
            | FLAG_EXTENDED;
        let mut bytes = Vec::with_capacity(64);
        put_u32(&mut bytes, MAJOR);
        put_u32(&mut bytes, self.minor.min(MINOR));
        put_u32(&mut bytes, self.max_readahead_bytes);
        put_u32(&mut bytes, self.flags & wanted);
        let congestion_threshold = background_max / 4 * 3;
        put_u16(&mut bytes, background_max);
        put_u16(&mut bytes, congestion_threshold);
        put_u32(&mut bytes, TRANSFER_BYTES_MAX);
        let time_granularity_nanoseconds = 1;
        put_u32(&mut bytes, time_granularity_nanoseconds);
        put_u16(&mut bytes, TRANSFER_PAGES_MAX);
        let map_alignment = 0;
        put_u16(&mut bytes, map_alignment);
        put_u32(&mut bytes, self.flags2 & FLAG2_HAS_RESEND);
        bytes.resize(64, 0);
        bytes
    }
}

/// A moment as the kernel writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Time {
    pub(crate) seconds: u32,
    pub(crate) nanoseconds: u32,
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) inode: u64,
    pub(crate) size_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) accessed: Time,
    pub(crate) modified: Time,
    pub(crate) changed: Time,
    /// File type and permissions.
    pub(crate) mode: u32,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// File type bits of a mode.
pub(crate) const MODE_DIRECTORY: u32 = 0o040_000;
/// File type bits of a mode.
pub(crate) const MODE_FILE: u32 = 0o100_000;

impl Attributes {
    /// Attributes of a directory or file that is not stored anywhere.
    pub(crate) fn of_virtual(inode: NodeId, mode: u32, size_bytes: u64) -> Self {
        Self { inode: inode.0, size_bytes, mode, links: 1, ..Self::default() }
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        put_u64(bytes, self.inode);
        put_u64(bytes, self.size_bytes);
        let sectors = self.used_bytes.div_ceil(512);
        put_u64(bytes, sectors);
        let times = [self.accessed, self.modified, self.changed];
        times.iter().for_each(|time| put_u64(bytes, u64::from(time.seconds)));
        times.iter().for_each(|time| put_u32(bytes, time.nanoseconds));
        let (device, flags) = (0, 0);
        for word in [self.mode, self.links, self.uid, self.gid, device, BLOCK_BYTES, flags] {
            put_u32(bytes, word);
        }
    }

    /// The reply to GETATTR and SETATTR.
    pub(crate) fn reply(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(104);
        put_u64(&mut bytes, VALID_SECONDS);
        put_u64(&mut bytes, 0);
        self.encode(&mut bytes);
        bytes
    }

    /// The reply to LOOKUP.
    pub(crate) fn entry_reply(&self, node: NodeId) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        let generation = 0;
        for word in [node.0, generation, VALID_SECONDS, VALID_SECONDS, 0] {
            put_u64(&mut bytes, word);
        }
        self.encode(&mut bytes);
        bytes
    }
}

/// The reply to OPEN and OPENDIR. There is no handle: everything is known by the node.
pub(crate) fn open_reply(flags: u32) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    put_u32(&mut bytes, flags);
    put_u32(&mut bytes, 0);
    bytes
}

/// The reply to WRITE.
pub(crate) fn write_reply(size_bytes: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8);
    put_u32(&mut bytes, size_bytes);
    put_u32(&mut bytes, 0);
    bytes
}

/// The state of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSystemStatus {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) files: u64,
    pub(crate) free_files: u64,
}

impl FileSystemStatus {
    /// The reply to STATFS.
    pub(crate) fn reply(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(80);
        for total in [self.total_bytes, self.free_bytes, self.available_bytes] {
            put_u64(&mut bytes, total / u64::from(BLOCK_BYTES));
        }
        put_u64(&mut bytes, self.files);
        put_u64(&mut bytes, self.free_files);
        let name_bytes_max = 255;
        for word in [BLOCK_BYTES, name_bytes_max, BLOCK_BYTES] {
            put_u32(&mut bytes, word);
        }
        bytes.resize(80, 0);
        bytes
    }
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryEntry {
    pub(crate) inode: u64,
    pub(crate) name: String,
    pub(crate) is_directory: bool,
}

/// The reply to READDIR: the entries after the first `offset`, as many as fit.
pub(crate) fn directory_reply(entries: &[DirectoryEntry], offset: u64, size_bytes: u32) -> Vec<u8> {
    let limit = usize::try_from(size_bytes).unwrap_or(0);
    let mut bytes = Vec::new();
    let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
    for (next, entry) in (1_u64..).zip(entries).skip(skipped) {
        let length = (24 + entry.name.len()).next_multiple_of(8);
        if bytes.len() + length > limit {
            break;
        }
        let end = bytes.len() + length;
        put_u64(&mut bytes, entry.inode);
        put_u64(&mut bytes, next);
        put_u32(&mut bytes, u32::try_from(entry.name.len()).unwrap_or(u32::MAX));
        let kind = if entry.is_directory { MODE_DIRECTORY } else { MODE_FILE } >> 12;
        put_u32(&mut bytes, kind);
        bytes.extend_from_slice(entry.name.as_bytes());
        bytes.resize(end, 0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request as the kernel writes it, with node 5.
    fn request(opcode: u32, unique: u64, body: &[u8]) -> Bytes {
        let mut bytes = Vec::new();
        put_u32(&mut bytes, u32::try_from(REQUEST_HEADER_BYTES + body.len()).unwrap());
        put_u32(&mut bytes, opcode);
        put_u64(&mut bytes, unique);
        put_u64(&mut bytes, 5);
        bytes.resize(REQUEST_HEADER_BYTES, 0xee);
        bytes.extend_from_slice(body);
        bytes.into()
    }

    fn operation(opcode: u32, body: &[u8]) -> Option<Operation> {
        Request::decode(request(opcode, 1, body)).unwrap().operation
    }

    /// Words of 4 bytes.
    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Words of 8 bytes.
    fn longs(longs: &[u64]) -> Vec<u8> {
        longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
    }

    #[test]
    fn requests_in_golden_bytes() {
        let unique = UNIQUE_RESENT | 8;
        let request = Request::decode(request(1, unique, b"name\0")).unwrap();
        assert_eq!((request.unique, request.node), (unique, NodeId(5)));
        assert_eq!(request.operation, Some(Operation::Lookup { name: "name".into() }));

        // fuse_write_in: handle, offset, size, flags, lock owner, flags, padding.
        let write = [longs(&[1, 4096]), words(&[3, 0, 0, 0, 0, 0]), b"abc".to_vec()].concat();
        let expected = Operation::Write { offset_bytes: 4096, data: "abc".into() };
        assert_eq!(operation(16, &write), Some(expected));
        assert_eq!(operation(16, &write[..write.len() - 1]), None, "one byte is missing");

        let read = [longs(&[1, 8192]), words(&[u32::MAX, 0, 0, 0, 0, 0])].concat();
        let expected = Operation::Read { offset_bytes: 8192, size_bytes: TRANSFER_BYTES_MAX };
        assert_eq!(operation(15, &read), Some(expected));

        let forgets = [words(&[2, 0]), longs(&[7, 1, 8, 2])].concat();
        let expected = Operation::Forget(vec![(NodeId(7), 1), (NodeId(8), 2)]);
        assert_eq!(operation(42, &forgets), Some(expected));
        assert_eq!(operation(42, &words(&[u32::MAX, 0])), None, "a lie about its length");

        // fuse_setattr_in: valid, padding, handle, size, ...
        let cut = [words(&[SET_SIZE, 0]), longs(&[0, 99])].concat();
        let expected = Operation::SetAttributes { size_bytes: Some(99) };
        assert_eq!(operation(4, &cut), Some(expected));
        assert_eq!(operation(14, &words(&[2, 0])), Some(Operation::Open { is_for_writing: true }));
        assert_eq!(operation(9, b"x"), Some(Operation::Unknown { opcode: 9 }));
    }

    #[test]
    fn a_request_of_another_length_is_none() {
        let whole = request(3, 1, &[]);
        assert!(Request::decode(whole.clone()).is_ok());
        for length in 0..whole.len() {
            assert_eq!(Request::decode(whole.slice(..length)), Err(Short), "{length}");
        }
    }

    #[test]
    fn the_greeting_is_answered_without_a_write_back_cache() {
        let write_back_cache = 1 << 16;
        let asked = FLAG_ASYNC_READ | FLAG_ASYNC_DIO | FLAG_MAX_PAGES | FLAG_EXTENDED;
        let flags = asked | write_back_cache;
        let body = words(&[7, 45, 131_072, flags, FLAG2_HAS_RESEND | 1]);
        let Some(Operation::Init(init)) = operation(26, &body) else { panic!("no greeting") };
        assert!(init.has_resend());
        let mut expected = words(&[7, 40, 131_072, flags & !write_back_cache]);
        expected.extend([192_u16, 144].iter().flat_map(|word| word.to_ne_bytes()));
        expected.extend(words(&[1 << 20, 1]));
        expected.extend([256_u16, 0].iter().flat_map(|word| word.to_ne_bytes()));
        expected.extend(words(&[FLAG2_HAS_RESEND]));
        expected.resize(64, 0);
        assert_eq!(init.reply(), expected);
        // Before Linux 6.9.
        let body = words(&[7, 38, 131_072, flags, 0]);
        let Some(Operation::Init(init)) = operation(26, &body) else { panic!("no greeting") };
        assert!(!init.has_resend());
        let reply = init.reply();
        assert_eq!(reply[12..16], words(&[flags & !(write_back_cache | FLAG_ASYNC_DIO)]));
        assert_eq!(reply[16..20], [64_u16, 48].map(u16::to_ne_bytes).concat());
    }

    #[test]
    fn replies_in_golden_bytes() {
        let header = reply_header(UNIQUE_RESENT | 6, Err(Errno::NOSPC));
        let mut expected = words(&[16, 0]);
        expected[4..8].copy_from_slice(&(-28_i32).to_ne_bytes());
        expected.extend(longs(&[UNIQUE_RESENT | 6]));
        assert_eq!(header, expected);
        assert_eq!(notification(NOTIFY_RESEND), [words(&[16, 7]), longs(&[0])].concat());

        let time = |seconds| Time { seconds, nanoseconds: seconds + 1 };
        let attributes = Attributes {
            inode: 42,
            size_bytes: 10_000,
            used_bytes: 8192,
            accessed: time(1),
            modified: time(2),
            changed: time(3),
            mode: MODE_FILE | 0o644,
            links: 1,
            uid: 8,
            gid: 9,
        };
        let encoded =
            [longs(&[42, 10_000, 16, 1, 2, 3]), words(&[2, 3, 4, 0o100_644, 1, 8, 9, 0, 4096, 0])]
                .concat();
        assert_eq!(attributes.reply(), [longs(&[1, 0]), encoded.clone()].concat());
        let entry = attributes.entry_reply(NodeId(5));
        assert_eq!(entry, [longs(&[5, 0, 1, 1, 0]), encoded].concat());
        assert_eq!(entry.len(), 128);
        assert_eq!(open_reply(OPEN_KEEP_CACHE), words(&[0, 0, 2, 0]));
        assert_eq!(write_reply(7), words(&[7, 0]));
    }

    #[test]
    fn a_directory_is_read_in_parts() {
        let entry =
            |name: &str| DirectoryEntry { inode: 3, name: name.to_owned(), is_directory: true };
        let entries = [entry("a"), entry("ninechars"), entry("c")];
        let first = directory_reply(&entries, 0, 71);
        let expected = [longs(&[3, 1]), words(&[1, 4]), b"a\0\0\0\0\0\0\0".to_vec()].concat();
        assert_eq!(first, expected, "the second takes 40 bytes more");
        let rest = directory_reply(&entries, 1, 4096);
        assert_eq!(rest.len(), 40 + 32);
        assert_eq!(rest[8..16], 2_u64.to_ne_bytes());
        assert!(directory_reply(&entries, 3, 4096).is_empty());
    }
}

//! Calls, appended to a buffer: many of them can be sent at once.
//!
//! ```text
//! |mark| xid 0 2 program version procedure | AUTH_SYS, user 0 | AUTH_NONE | arguments |
//! ```

use super::{Handle, LAST_FRAGMENT, MOUNT_PROGRAM, NFS_PROGRAM, VERSION};

/// RPC's own version.
const RPC_VERSION: u32 = 2;

/// Length of a record mark.
const MARK_BYTES: usize = 4;

/// AUTH_SYS of the user and group 0 with stamp 0, an empty machine name and no more groups, and
/// the verifier AUTH_NONE.
const CREDENTIALS: [u32; 9] = [1, 5 * 4, 0, 0, 0, 0, 0, 0, 0];

/// Numbers of the procedures (RFC 1813).
mod procedure {
    pub(super) const MOUNT: u32 = 1;
    pub(super) const GETATTR: u32 = 1;
    pub(super) const SETATTR: u32 = 2;
    pub(super) const LOOKUP: u32 = 3;
    pub(super) const READ: u32 = 6;
    pub(super) const WRITE: u32 = 7;
    pub(super) const CREATE: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const REMOVE: u32 = 12;
    pub(super) const RENAME: u32 = 14;
    pub(super) const READDIRPLUS: u32 = 17;
    pub(super) const COMMIT: u32 = 21;
}

/// MNT: the handle of an export's root.
pub fn mount(out: &mut Vec<u8>, xid: u32, export: &str) {
    let mut call = Call::begin(out, xid, MOUNT_PROGRAM, procedure::MOUNT);
    call.opaque(export.as_bytes());
    call.end();
}

/// GETATTR.
pub fn get_attributes(out: &mut Vec<u8>, xid: u32, file: &Handle) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::GETATTR);
    call.opaque(&file.0);
    call.end();
}

/// SETATTR of the size alone, without a guard.
pub fn set_size(out: &mut Vec<u8>, xid: u32, file: &Handle, size_bytes: u64) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::SETATTR);
    call.opaque(&file.0);
    // Neither mode nor owner nor group.
    call.words(&[0, 0, 0, 1]);
    call.long(size_bytes);
    // Neither time, no guard.
    call.words(&[0, 0, 0]);
    call.end();
}

/// LOOKUP.
pub fn lookup(out: &mut Vec<u8>, xid: u32, directory: &Handle, name: &str) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::LOOKUP);
    call.opaque(&directory.0);
    call.opaque(name.as_bytes());
    call.end();
}

/// CREATE of a file that may be there already, for its owner to read and write.
pub fn create(out: &mut Vec<u8>, xid: u32, directory: &Handle, name: &str) {
    const UNCHECKED: u32 = 0;
    const MODE: u32 = 0o644;
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::CREATE);
    call.opaque(&directory.0);
    call.opaque(name.as_bytes());
    // The mode alone: neither owner nor group nor size nor times.
    call.words(&[UNCHECKED, 1, MODE, 0, 0, 0, 0, 0]);
    call.end();
}

/// MKDIR, for its owner to write to and for all to read.
pub fn make_directory(out: &mut Vec<u8>, xid: u32, directory: &Handle, name: &str) {
    const MODE: u32 = 0o755;
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::MKDIR);
    call.opaque(&directory.0);
    call.opaque(name.as_bytes());
    // The mode alone: neither owner nor group nor size nor times.
    call.words(&[1, MODE, 0, 0, 0, 0, 0]);
    call.end();
}

/// REMOVE.
pub fn remove(out: &mut Vec<u8>, xid: u32, directory: &Handle, name: &str) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::REMOVE);
    call.opaque(&directory.0);
    call.opaque(name.as_bytes());
    call.end();
}

/// READ.
pub fn read(out: &mut Vec<u8>, xid: u32, file: &Handle, offset_bytes: u64, count: u32) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::READ);
    call.opaque(&file.0);
    call.long(offset_bytes);
    call.words(&[count]);
    call.end();
}

/// WRITE, UNSTABLE, up to its payload: `count` bytes, a multiple of four, must follow.
pub fn write_head(out: &mut Vec<u8>, xid: u32, file: &Handle, offset_bytes: u64, count: u32) {
    const UNSTABLE: u32 = 0;
    debug_assert!(count.is_multiple_of(4), "no padding is sent");
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::WRITE);
    call.opaque(&file.0);
    call.long(offset_bytes);
    call.words(&[count, UNSTABLE, count]);
    call.end_before(count);
}

/// How durable a WRITE is to be when it is answered (RFC 1813 section 3.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Not before a COMMIT.
    Unstable,
    /// Data and attributes.
    FileSync,
}

/// WRITE of any length, its payload included.
pub fn write(out: &mut Vec<u8>, xid: u32, file: &Handle, place: (u64, Stability), data: &[u8]) {
    let (offset_bytes, stability) = place;
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::WRITE);
    call.opaque(&file.0);
    call.long(offset_bytes);
    let stable = match stability {
        Stability::Unstable => 0,
        Stability::FileSync => 2,
    };
    call.words(&[length(data.len()), stable]);
    call.opaque(data);
    call.end();
}

/// RENAME within one directory.
pub fn rename(out: &mut Vec<u8>, xid: u32, directory: &Handle, from: &str, to: &str) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::RENAME);
    for name in [from, to] {
        call.opaque(&directory.0);
        call.opaque(name.as_bytes());
    }
    call.end();
}

/// Where a listing goes on: `Default` is the beginning of the directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectoryPlace {
    /// Of the last entry of the page before.
    pub cookie: u64,
    /// Of the page before.
    pub verifier: [u8; 8],
}

/// READDIRPLUS, for an answer of at most that many bytes.
pub fn read_directory_plus(
    out: &mut Vec<u8>,
    xid: u32,
    directory: &Handle,
    place: DirectoryPlace,
    bytes_max: u32,
) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::READDIRPLUS);
    call.opaque(&directory.0);
    call.long(place.cookie);
    call.long(u64::from_be_bytes(place.verifier));
    // The bound is that of the names, too.
    call.words(&[bytes_max, bytes_max]);
    call.end();
}

/// COMMIT of the whole file.
pub fn commit(out: &mut Vec<u8>, xid: u32, file: &Handle) {
    let mut call = Call::begin(out, xid, NFS_PROGRAM, procedure::COMMIT);
    call.opaque(&file.0);
    call.long(0);
    call.words(&[0]);
    call.end();
}

/// A call that is being appended.
struct Call<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
}

impl<'a> Call<'a> {
    fn begin(out: &'a mut Vec<u8>, xid: u32, program: u32, procedure: u32) -> Self {
        let start = out.len();
        let mut call = Self { out, start };
        // The mark comes last, when the length is known. 0: this is a call.
        call.words(&[0, xid, 0, RPC_VERSION, program, VERSION, procedure]);
        call.words(&CREDENTIALS);
        call
    }

    fn words(&mut self, words: &[u32]) {
        for word in words {
            self.out.extend_from_slice(&word.to_be_bytes());
        }
    }

    fn long(&mut self, long: u64) {
        self.out.extend_from_slice(&long.to_be_bytes());
    }

    fn opaque(&mut self, bytes: &[u8]) {
        self.words(&[length(bytes.len())]);
        self.out.extend_from_slice(bytes);
        let padded = bytes.len().next_multiple_of(4);
        self.out.resize(self.out.len() + padded - bytes.len(), 0);
    }

    fn end(self) {
        self.end_before(0);
    }

    /// Ends the call, of which that many bytes are sent from elsewhere.
    fn end_before(self, follow_bytes: u32) {
        let here = length(self.out.len() - self.start - MARK_BYTES);
        let mark = LAST_FRAGMENT | (here + follow_bytes);
        let place = &mut self.out[self.start..self.start + MARK_BYTES];
        place.copy_from_slice(&mark.to_be_bytes());
    }
}

/// A length as it is sent. Names, handles and calls are far below the limit; a server refuses
/// what is not.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: &[u8]) -> Vec<u32> {
        assert!(bytes.len().is_multiple_of(4));
        let words = bytes.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap()));
        words.collect()
    }

    /// Everything before the arguments, of a call with so many bytes after the mark.
    fn head(length: u32, program: u32, procedure: u32) -> Vec<u32> {
        let mut head = vec![LAST_FRAGMENT | length, 7, 0, 2, program, 3, procedure];
        head.extend([1, 20, 0, 0, 0, 0, 0, 0, 0]);
        head
    }

    #[test]
    fn a_read_is_the_bytes_of_the_rfc() {
        let mut out = Vec::new();
        read(&mut out, 7, &Handle(b"handle..".to_vec()), 0x1_0000_2000, 4096);
        let arguments = [8, 0x6861_6e64, 0x6c65_2e2e, 1, 0x2000, 4096];
        assert_eq!(words(&out), [head(84, 100_003, 6), arguments.to_vec()].concat());
    }

    #[test]
    fn the_mark_of_a_write_counts_the_payload_that_follows() {
        let mut out = Vec::new();
        write_head(&mut out, 7, &Handle(b"abcd".to_vec()), 4096, 8192);
        let arguments = [4, 0x6162_6364, 0, 4096, 8192, 0, 8192];
        assert_eq!(words(&out), [head(88 + 8192, 100_003, 7), arguments.to_vec()].concat());
    }

    #[test]
    fn names_are_padded_and_calls_follow_each_other() {
        let mut out = Vec::new();
        mount(&mut out, 7, "/slack");
        let first = out.len();
        lookup(&mut out, 7, &Handle(vec![9]), "a");
        let mounted = [head(72, 100_005, 1), vec![6, 0x2f73_6c61, 0x636b_0000]].concat();
        assert_eq!(words(&out[..first]), mounted);
        let looked_up = [head(76, 100_003, 3), vec![1, 9 << 24, 1, 0x6100_0000]].concat();
        assert_eq!(words(&out[first..]), looked_up);
    }

    #[test]
    fn other_calls_have_the_arguments_of_the_rfc() {
        let file = Handle(vec![9, 9, 9, 9]);
        let handle = [4, 0x0909_0909];
        let mut out = Vec::new();
        let mut arguments = |encode: &dyn Fn(&mut Vec<u8>)| {
            out.clear();
            encode(&mut out);
            let words = words(&out);
            assert_eq!(words[0], LAST_FRAGMENT | length(out.len() - 4));
            assert_eq!(words[16..18], handle);
            words[18..].to_vec()
        };
        assert_eq!(arguments(&|out| get_attributes(out, 7, &file)), []);
        assert_eq!(arguments(&|out| set_size(out, 7, &file, 5)), [0, 0, 0, 1, 0, 5, 0, 0, 0]);
        assert_eq!(arguments(&|out| commit(out, 7, &file)), [0, 0, 0]);
        let created = arguments(&|out| create(out, 7, &file, "a"));
        assert_eq!(created, [1, 0x6100_0000, 0, 1, 0o644, 0, 0, 0, 0, 0]);
        let made = arguments(&|out| make_directory(out, 7, &file, "a"));
        assert_eq!(made, [1, 0x6100_0000, 1, 0o755, 0, 0, 0, 0, 0]);
        assert_eq!(arguments(&|out| remove(out, 7, &file, "a")), [1, 0x6100_0000]);
        let place = DirectoryPlace { cookie: (1 << 32) + 2, verifier: [0, 0, 0, 3, 0, 0, 0, 4] };
        let listed = arguments(&|out| read_directory_plus(out, 7, &file, place, 512));
        assert_eq!(listed, [1, 2, 3, 4, 512, 512]);
        let renamed = arguments(&|out| rename(out, 7, &file, "a", "b"));
        assert_eq!(renamed, [1, 0x6100_0000, 4, 0x0909_0909, 1, 0x6200_0000]);
        let place = (0x1_0000_0005, Stability::FileSync);
        let written = arguments(&|out| write(out, 7, &file, place, b"abcde"));
        assert_eq!(written, [1, 5, 5, 2, 5, 0x6162_6364, 0x6500_0000]);
    }
}

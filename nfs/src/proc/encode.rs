//! Attributes and weak cache consistency data on the wire (RFC 1813 sections 2.5 and 2.6).

use nfsserve::nfs::{ftype3, nfsstat3};
use slackwater_blockstore::{
    Attributes, Change, DeviceNumber, FileKind, SetAttributes, SetTime, SpecialFile, Timestamp,
};

use super::Call;
use crate::handle::Handle;
use crate::xdr::{Decoder, Encoder, Malformed};

/// Bytes of `fattr3` on the wire.
pub(super) const ATTRIBUTES_BYTES: usize = 5 * 4 + 2 * 8 + 2 * 4 + 2 * 8 + 3 * TIME_BYTES;

const TIME_BYTES: usize = 2 * 4;

const NANOS_PER_SECOND: u32 = 1_000_000_000;

const _: () = assert!(ATTRIBUTES_BYTES == 84);

/// The status, which every result begins with.
pub(super) fn status(reply: &mut Encoder, status: nfsstat3) {
    reply.u32(status as u32);
}

/// The file type of a kind.
fn file_type(kind: FileKind) -> ftype3 {
    match kind {
        FileKind::File => ftype3::NF3REG,
        FileKind::Directory => ftype3::NF3DIR,
        FileKind::Symlink => ftype3::NF3LNK,
        FileKind::Special(SpecialFile::BlockDevice(_)) => ftype3::NF3BLK,
        FileKind::Special(SpecialFile::CharacterDevice(_)) => ftype3::NF3CHR,
        FileKind::Special(SpecialFile::Socket) => ftype3::NF3SOCK,
        FileKind::Special(SpecialFile::Fifo) => ftype3::NF3FIFO,
    }
}

/// The numbers of a device (`specdata3`); other objects have none.
fn device_number(kind: FileKind) -> DeviceNumber {
    match kind {
        FileKind::Special(
            SpecialFile::BlockDevice(number) | SpecialFile::CharacterDevice(number),
        ) => number,
        FileKind::Special(SpecialFile::Socket | SpecialFile::Fifo)
        | FileKind::File
        | FileKind::Directory
        | FileKind::Symlink => DeviceNumber { major: 0, minor: 0 },
    }
}

/// A time. The wire has 32 bits of seconds (until 2106): later times show as the last one.
/// Earlier ones than 1970 do not exist in the store.
pub(super) fn time(reply: &mut Encoder, time: Timestamp) {
    match u32::try_from(time.seconds()) {
        Ok(seconds) => {
            reply.u32(seconds);
            reply.u32(time.subsecond_nanos());
        }
        Err(_) => {
            reply.u32(u32::MAX);
            reply.u32(NANOS_PER_SECOND - 1);
        }
    }
}

/// A time as a client sent it; `None` when its nanoseconds are a second or more.
pub(super) fn decode_time(arguments: &mut Decoder<'_>) -> Result<Option<Timestamp>, Malformed> {
    let seconds = u64::from(arguments.u32()?);
    let nanos = arguments.u32()?;
    Ok(Timestamp::new(seconds, nanos).filter(|_| nanos < NANOS_PER_SECOND))
}

/// Attributes to set (`sattr3`), as they were sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedAttributes {
    set: SetAttributes,
    has_bad_time: bool,
}

impl WantedAttributes {
    pub(super) fn decode(arguments: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let mode = arguments.bool()?.then(|| arguments.u32()).transpose()?;
        let uid = arguments.bool()?.then(|| arguments.u32()).transpose()?;
        let gid = arguments.bool()?.then(|| arguments.u32()).transpose()?;
        let size_bytes = arguments.bool()?.then(|| arguments.u64()).transpose()?;
        let accessed = WantedTime::decode(arguments)?;
        let modified = WantedTime::decode(arguments)?;
        let set = SetAttributes {
            mode,
            uid,
            gid,
            size_bytes,
            accessed_at: accessed.time(),
            modified_at: modified.time(),
        };
        let has_bad_time =
            [accessed, modified].iter().any(|time| matches!(time, WantedTime::Impossible));
        Ok(Self { set, has_bad_time })
    }

    /// The attributes, when they can be set on anything.
    pub(super) fn checked(&self) -> Result<SetAttributes, nfsstat3> {
        if self.has_bad_time { Err(nfsstat3::NFS3ERR_INVAL) } else { Ok(self.set) }
    }
}

enum WantedTime {
    Keep,
    Set(SetTime),
    /// It decodes, but is no time.
    Impossible,
}

impl WantedTime {
    fn decode(arguments: &mut Decoder<'_>) -> Result<Self, Malformed> {
        match arguments.u32()? {
            0 => Ok(Self::Keep),
            1 => Ok(Self::Set(SetTime::Now)),
            2 => Ok(decode_time(arguments)?
                .map_or(Self::Impossible, |time| Self::Set(SetTime::To(time)))),
            got => Err(Malformed::Value { got, expected: "time_how" }),
        }
    }

    const fn time(&self) -> Option<SetTime> {
        match self {
            Self::Set(time) => Some(*time),
            Self::Keep | Self::Impossible => None,
        }
    }
}

impl Call<'_> {
    /// `fattr3`.
    pub(super) fn put_attributes(&self, reply: &mut Encoder, attributes: &Attributes) {
        reply.u32(file_type(attributes.kind) as u32);
        reply.u32(attributes.mode);
        reply.u32(attributes.link_count);
        reply.u32(attributes.uid);
        reply.u32(attributes.gid);
        reply.u64(attributes.size_bytes);
        reply.u64(attributes.used_bytes);
        let device = device_number(attributes.kind);
        reply.u32(device.major);
        reply.u32(device.minor);
        reply.u64(self.shared.filesystem_id);
        reply.u64(attributes.inode.get());
        time(reply, attributes.accessed_at);
        time(reply, attributes.modified_at);
        time(reply, attributes.changed_at);
    }

    /// `post_op_attr`.
    pub(super) fn put_after(&self, reply: &mut Encoder, attributes: Option<&Attributes>) {
        reply.bool(attributes.is_some());
        if let Some(attributes) = attributes {
            self.put_attributes(reply, attributes);
        }
    }

    /// `wcc_data` of a change whose both sides the store took atomically.
    pub(super) fn put_change(&self, reply: &mut Encoder, change: &Change) {
        reply.bool(true);
        reply.u64(change.before.size_bytes);
        time(reply, change.before.modified_at);
        time(reply, change.before.changed_at);
        self.put_after(reply, Some(&change.after));
    }

    /// `wcc_data` without its first half: what was before a failed call is not known for
    /// certain, and a wrong claim would make the client keep stale pages.
    pub(super) fn put_no_change(&self, reply: &mut Encoder, attributes: Option<&Attributes>) {
        reply.bool(false);
        self.put_after(reply, attributes);
    }
}

/// `post_op_fh3` with a handle.
pub(super) fn some_handle(reply: &mut Encoder, handle: &Handle) {
    reply.bool(true);
    reply.opaque(handle);
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn words(write: impl FnOnce(&mut Encoder)) -> Vec<u32> {
        let mut encoder = Encoder::new();
        write(&mut encoder);
        encoder.finish().0[4..]
            .chunks(4)
            .map(|word| u32::from_be_bytes(word.try_into().unwrap()))
            .collect()
    }

    fn wanted(words: &[u32]) -> Result<WantedAttributes, Malformed> {
        let frame: Bytes =
            words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>().into();
        WantedAttributes::decode(&mut Decoder::new(&frame))
    }

    #[test]
    fn times_past_the_wire_show_as_the_last() {
        let stamp = |seconds, nanos| Timestamp::new(seconds, nanos).unwrap();
        assert_eq!(words(|reply| time(reply, stamp(5, 6))), [5, 6]);
        let last = stamp(u64::from(u32::MAX), 999_999_999);
        assert_eq!(words(|reply| time(reply, last)), [u32::MAX, 999_999_999]);
        let past = stamp(u64::from(u32::MAX) + 1, 0);
        assert_eq!(words(|reply| time(reply, past)), [u32::MAX, 999_999_999]);
    }

    #[test]
    fn attributes_to_set_are_decoded() {
        let none = wanted(&[0, 0, 0, 0, 0, 0]).unwrap().checked().unwrap();
        assert_eq!(none, SetAttributes::default());
        let all = [1, 0o644, 1, 10, 1, 20, 1, 0, 4096, 1, 2, 7, 8];
        let all = wanted(&all).unwrap().checked().unwrap();
        let expected = SetAttributes {
            mode: Some(0o644),
            uid: Some(10),
            gid: Some(20),
            size_bytes: Some(4096),
            accessed_at: Some(SetTime::Now),
            modified_at: Some(SetTime::To(Timestamp::new(7, 8).unwrap())),
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn a_time_of_too_many_nanoseconds_is_invalid() {
        let bad = wanted(&[0, 0, 0, 0, 0, 2, 1, 1_000_000_000]).unwrap();
        assert!(matches!(bad.checked(), Err(nfsstat3::NFS3ERR_INVAL)));
        let unknown = Err(Malformed::Value { got: 3, expected: "time_how" });
        assert_eq!(wanted(&[0, 0, 0, 0, 3, 0]).map(|_| ()), unknown);
    }
}

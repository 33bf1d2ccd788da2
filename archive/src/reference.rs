//! References: small archives that stand for a snapshot of the appliance.
//!
//! ```text
//! ustar header ".slackwater-reference", mode 0444, everything else zero   512 bytes
//! {"slackwater":2,"store_id":"...","snapshot_id":"...","size_bytes":N,"mac":"..."}\n   padded to 512
//! ustar header of a hard link, whose name is a sentence, to ".slackwater-reference-target"   512
//! end marker                                                             1024
//! ```
//! No layer has a file of that last name. So an engine without the driver, which would else make an empty layer of a
//! reference, cannot unpack it, and its error shows the sentence. Where the driver has the archive unpacked by
//! the engine, it makes that file before.
//!
//! The same reference is always the same bytes: engines know a layer by the hash of its archive. One of
//! version 1 has no `mac` and no link: release 0.2 wrote those, and anything else can.

use std::fmt;
use std::io::{Cursor, Read};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

use crate::error::{ArchiveError, shown};
use crate::header::{self, BLOCK_BYTES, Block, Builder};
use crate::members::{Kind, Member, Members, Next};
use crate::root::clean;

/// The name of the member that is the reference.
pub const REFERENCE_MEMBER: &str = ".slackwater-reference";

/// The name of the hard link behind it, which engines show that cannot make it. At most 100 bytes, as a ustar header
/// holds; without `/`, so that it is one name.
pub const REFERENCE_LINK: &str = "slackwater reference: pull on a worker with slackwater-driver or run slackwater-driver image export";

/// What it is a link to.
pub const REFERENCE_LINK_TARGET: &str = ".slackwater-reference-target";

/// The version of the text below with a MAC, and without.
const VERSION: u32 = 2;
const VERSION_WITHOUT_MAC: u32 = 1;

/// Bytes of a reference's text. One has about 230; with this limit the archive stays below 4 KiB.
const TEXT_BYTES_MAX: usize = 1024;

/// Bytes that may follow the member: the end marker, and what pads an archive to 20 blocks.
const TRAILING_BYTES_MAX: usize = 64 << 10;

/// Permissions of the members.
const MODE: u64 = 0o444;

/// The message authentication code of a reference (BLAKE3 with a key), which only its appliance can make. Compared in
/// constant time; its `Debug` form shows nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mac(blake3::Hash);

/// The text is not such a code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the MAC of a reference is 64 hexadecimal digits in lower case, not these {got} characters"
)]
pub struct MacError {
    /// Length of the text.
    pub got: usize,
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Only the form that Display writes: one reference has one spelling.
        let hash = blake3::Hash::from_hex(text).ok();
        let hash = hash.filter(|hash| hash.to_hex().as_str() == text);
        hash.map(Self).ok_or(MacError { got: text.len() })
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mac(..)")
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A snapshot of an appliance, named in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    /// The appliance's store.
    pub store_id: String,
    /// The snapshot in it.
    pub snapshot_id: Uuid,
    /// The size of the disk that the snapshot is of.
    pub size_bytes: u64,
    /// What tells it from a forged one; `None` in those of release 0.2.
    #[serde(default)]
    pub mac: Option<Mac>,
}

/// What is read first: the rest depends on it.
#[derive(Deserialize)]
struct Version {
    slackwater: u32,
}

impl Reference {
    /// The archive that stands for the snapshot: always the same bytes.
    #[must_use]
    pub fn to_archive(&self) -> Vec<u8> {
        let store_id = serde_json::Value::from(self.store_id.as_str());
        let (version, mac) = match self.mac {
            Some(mac) => (VERSION, format!(",\"mac\":\"{mac}\"")),
            None => (VERSION_WITHOUT_MAC, String::new()),
        };
        let text = format!(
            "{{\"slackwater\":{version},\"store_id\":{store_id},\"snapshot_id\":\"{}\",\"size_bytes\":{}{mac}}}\n",
            self.snapshot_id, self.size_bytes
        );
        let size_bytes = text.len() as u64;
        let header = Builder::new(b'0')
            .text(header::NAME, REFERENCE_MEMBER.as_bytes())
            .number(header::MODE, MODE)
            .number(header::UID, 0)
            .number(header::GID, 0)
            .number(header::SIZE, size_bytes)
            .number(header::MTIME, 0)
            .finish();
        let mut archive = header.to_vec();
        archive.extend_from_slice(text.as_bytes());
        archive.resize(archive.len() + header::padding_bytes(size_bytes), 0);
        if self.mac.is_some() {
            archive.extend_from_slice(&link_header());
        }
        archive.resize(archive.len() + 2 * BLOCK_BYTES, 0);
        archive
    }

    /// Reads the content of the member [`REFERENCE_MEMBER`].
    ///
    /// # Errors
    /// The bytes are no reference, or one of a newer version.
    pub fn from_member(bytes: &[u8]) -> Result<Self, ArchiveError> {
        let bad = |reason: String| ArchiveError::BadReference { reason };
        if bytes.len() > TEXT_BYTES_MAX {
            let length = bytes.len();
            return Err(bad(format!("it has {length} bytes, at most {TEXT_BYTES_MAX}")));
        }
        let broken = |error: serde_json::Error| bad(error.to_string());
        let Version { slackwater: version } = serde_json::from_slice(bytes).map_err(broken)?;
        if ![VERSION_WITHOUT_MAC, VERSION].contains(&version) {
            return Err(bad(format!(
                "it has version {version}, this program knows {VERSION_WITHOUT_MAC} and {VERSION}; \
                 update slackwater-driver"
            )));
        }
        let reference: Self = serde_json::from_slice(bytes).map_err(broken)?;
        if reference.store_id.is_empty() {
            return Err(bad("it names no store".to_owned()));
        }
        match (version, reference.mac) {
            (VERSION, None) => Err(bad("it has no `mac`".to_owned())),
            (VERSION, mac) => Ok(Self { mac, ..reference }),
            _ => Ok(Self { mac: None, ..reference }),
        }
    }
}

/// The header of the link that no other unpacker can make.
fn link_header() -> Block {
    Builder::new(b'1')
        .text(header::NAME, REFERENCE_LINK.as_bytes())
        .text(header::LINK, REFERENCE_LINK_TARGET.as_bytes())
        .number(header::MODE, MODE)
        .number(header::UID, 0)
        .number(header::GID, 0)
        .number(header::SIZE, 0)
        .number(header::MTIME, 0)
        .finish()
}

/// What an archive turned out to be.
#[derive(Debug)]
pub enum Recognised<R: Read> {
    /// A reference; the stream was read to its end.
    Reference(Reference),
    /// Anything else: the same bytes again, from the first one.
    Ordinary(Prefixed<R>),
}

/// A stream that begins with bytes which were read from it already.
#[derive(Debug)]
pub struct Prefixed<R> {
    prefix: Cursor<Vec<u8>>,
    rest: R,
}

impl<R: Read> Read for Prefixed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.prefix.read(buffer)? {
            0 => self.rest.read(buffer),
            length => Ok(length),
        }
    }
}

/// Tells a reference from an ordinary layer by its first member.
///
/// # Errors
/// The stream fails, is no tar archive, or is a reference that is not valid, not whole, or not
/// alone.
pub fn recognise<R: Read>(reader: R) -> Result<Recognised<R>, ArchiveError> {
    let mut members = Members::new(reader);
    let prefix = match members.next()? {
        Next::Member(member) if is_reference(&member) => {
            return read_reference(&member, &mut members).map(Recognised::Reference);
        }
        Next::Member(member) => member.raw,
        Next::End(raw) => raw,
    };
    let prefix = Cursor::new(prefix);
    Ok(Recognised::Ordinary(Prefixed { prefix, rest: members.into_inner() }))
}

fn is_reference(member: &Member) -> bool {
    let path = clean(&member.shown(), &member.name);
    member.kind == Kind::File && path.is_ok_and(|path| path == Path::new(REFERENCE_MEMBER))
}

fn is_link(member: &Member) -> bool {
    let path = clean(&member.shown(), &member.name);
    member.kind == Kind::HardLink
        && path.is_ok_and(|path| path == Path::new(REFERENCE_LINK))
        && member.link == REFERENCE_LINK_TARGET.as_bytes()
}

/// Reads a reference and the rest of its archive.
fn read_reference<R: Read>(
    member: &Member,
    members: &mut Members<R>,
) -> Result<Reference, ArchiveError> {
    if member.size_bytes > TEXT_BYTES_MAX as u64 {
        let got = member.size_bytes;
        let reason = format!("it has {got} bytes, at most {TEXT_BYTES_MAX}");
        return Err(ArchiveError::BadReference { reason });
    }
    let mut text = vec![0; TEXT_BYTES_MAX];
    let length = members.content(&mut text)?;
    members.padding()?;
    let reference = Reference::from_member(&text[..length])?;
    let mut next = members.next()?;
    if let Next::Member(member) = &next
        && is_link(member)
    {
        next = members.next()?;
    }
    if let Next::Member(next) = next {
        return Err(ArchiveError::ReferenceNotAlone { member: shown(&next.name) });
    }
    let mut trailing = vec![0; TRAILING_BYTES_MAX + 1];
    let length = members.trailing(&mut trailing)?;
    if length > TRAILING_BYTES_MAX || trailing[..length].iter().any(|byte| *byte != 0) {
        let reason = "something follows the end of its archive".to_owned();
        return Err(ArchiveError::BadReference { reason });
    }
    Ok(reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference() -> Reference {
        Reference { mac: Some("0123456789abcdef".repeat(4).parse().unwrap()), ..without_mac() }
    }

    /// As release 0.2 wrote it.
    fn without_mac() -> Reference {
        Reference {
            store_id: "store \"one\"".to_owned(),
            snapshot_id: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
            size_bytes: 64 << 30,
            mac: None,
        }
    }

    /// The archive with that text, whose header has that length and checksum.
    fn archive(text: &str, length: &[u8; 12], checksum: &[u8; 8]) -> Vec<u8> {
        let mut archive = vec![0; 2048];
        let mut put =
            |at: usize, bytes: &[u8]| archive[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b".slackwater-reference");
        put(100, b"0000444\x000000000\x000000000\x00");
        put(124, length);
        put(136, b"00000000000\x00");
        put(148, checksum);
        put(156, b"0");
        put(257, b"ustar\x0000");
        put(512, text.as_bytes());
        archive
    }

    /// The same with the link.
    fn archive_with_link(text: &str, length: &[u8; 12], checksum: &[u8; 8]) -> Vec<u8> {
        let mut archive = archive(text, length, checksum);
        archive.resize(2560, 0);
        let mut put =
            |at: usize, bytes: &[u8]| archive[at..at + bytes.len()].copy_from_slice(bytes);
        put(1024, b"slackwater reference: pull on a worker with slackwater-driver ");
        put(1086, b"or run slackwater-driver image export");
        put(1124, b"0000444\x000000000\x000000000\x00");
        put(1148, b"00000000000\x0000000000000\x00");
        put(1172, b"036145\x00 ");
        put(1180, b"1.slackwater-reference-target");
        put(1281, b"ustar\x0000");
        archive
    }

    #[test]
    fn the_bytes_of_a_reference_never_change() {
        let text = "{\"slackwater\":1,\"store_id\":\"store \\\"one\\\"\",\
            \"snapshot_id\":\"01234567-89ab-cdef-0123-456789abcdef\",\"size_bytes\":68719476736}\n";
        let expected = archive(text, b"00000000172\x00", b"012040\x00 ");
        assert_eq!(without_mac().to_archive(), expected);
        let text = "{\"slackwater\":2,\"store_id\":\"store \\\"one\\\"\",\
            \"snapshot_id\":\"01234567-89ab-cdef-0123-456789abcdef\",\"size_bytes\":68719476736,\
            \"mac\":\"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"}\n";
        let expected = archive_with_link(text, b"00000000303\x00", b"012034\x00 ");
        assert_eq!(reference().to_archive(), expected);
    }

    #[test]
    fn a_reference_is_recognised_and_read_back() {
        let archive = reference().to_archive();
        let mut padded = archive.clone();
        padded.resize(10_240, 0);
        let without_link = [&archive[..1024], &[0; 1024]].concat();
        let old = without_mac();
        for (archive, expected) in [
            (archive, reference()),
            (padded, reference()),
            (without_link, reference()),
            (old.to_archive(), old.clone()),
        ] {
            let mut stream = Cursor::new(archive);
            let Recognised::Reference(read) = recognise(&mut stream).unwrap() else {
                panic!("not recognised");
            };
            assert_eq!(read, expected);
            assert_eq!(stream.position(), stream.get_ref().len() as u64, "not read to its end");
        }
    }

    #[test]
    fn damaged_references_are_refused() {
        let archive = reference().to_archive();
        for length in (1..archive.len()).filter(|length| *length != archive.len() - 512) {
            assert!(recognise(&archive[..length]).is_err(), "{length} bytes");
        }
        let (text, link) = (&archive[..1024], &archive[1024..1536]);
        let mut symbolic = link.to_vec();
        symbolic[156] = b'2';
        symbolic[153] += 1;
        let mut elsewhere = link.to_vec();
        elsewhere.swap(157, 158);
        for more in [text, &symbolic, &elsewhere, &[link, link].concat(), &[link, text].concat()] {
            let followed = [text, more, &[0; 1024]].concat();
            let error = recognise(&followed[..]).unwrap_err();
            assert!(matches!(error, ArchiveError::ReferenceNotAlone { .. }), "{error}");
        }
        let alone = [link, &[0; 1024]].concat();
        assert!(matches!(recognise(&alone[..]).unwrap(), Recognised::Ordinary(_)));
        let followed = [&archive[..], b"x"].concat();
        assert!(recognise(&followed[..]).is_err());
        let mut other = archive;
        other[512] = b'x';
        assert!(recognise(&other[..]).is_err());
    }

    #[test]
    fn other_texts_are_refused_with_the_reason() {
        let valid = "{\"slackwater\":1,\"store_id\":\"s\",\
            \"snapshot_id\":\"01234567-89ab-cdef-0123-456789abcdef\",\"size_bytes\":1}";
        assert!(Reference::from_member(valid.as_bytes()).is_ok());
        let mac = "0123456789abcdef".repeat(4);
        let with_mac = valid.replace(":1,", ":2,").replace('}', &format!(",\"mac\":\"{mac}\"}}"));
        let read = Reference::from_member(with_mac.as_bytes()).unwrap();
        assert_eq!(read.mac, Some(mac.parse().unwrap()));
        assert!(!format!("{read:?}").contains("0123456789abcdef0"), "{read:?}");
        // In the version without, it says nothing.
        let read = Reference::from_member(with_mac.replace(":2,", ":1,").as_bytes()).unwrap();
        assert_eq!(read.mac, None);
        let cases = [
            (valid.replace(":1,", ":2,"), "no `mac`"),
            (valid.replace(":1,", ":3,"), "version 3"),
            (with_mac.replace(":2,", ":3,").replace(&mac, "another form"), "version 3"),
            (with_mac.replace(&mac, &mac[1..]), "63 characters"),
            (with_mac.replace(&mac, &mac.to_uppercase()), "lower case"),
            (valid.replace("\"s\"", "\"\""), "no store"),
            (valid.replace("cdef\"", "\""), "UUID"),
            (valid.replace("\"size_bytes\":1", "\"size_bytes\":-1"), "-1"),
            ("x".to_owned(), "expected"),
            ("x".repeat(1025), "1025"),
        ];
        for (text, expected) in cases {
            let error = Reference::from_member(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} does not say {expected}");
        }
    }

    #[test]
    fn other_archives_come_out_as_they_went_in() {
        let mut archive = Builder::new(b'0').text(header::NAME, b"a").finish().to_vec();
        archive.resize(archive.len() + 1024, 0);
        for archive in [archive, vec![0; 1024], vec![0; 512]] {
            let Recognised::Ordinary(mut stream) = recognise(&archive[..]).unwrap() else {
                panic!("taken for a reference");
            };
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, archive);
        }
    }
}

//! RocksDB's manifest after a power cut.
//!
//! ```text
//! CURRENT -> MANIFEST-000022: [record] [record] [record .. 0000 .. ]
//!                                              ^ synced to here     ^ a sector that the disk did not get
//! ```
//! A record that was not synced can be there but for some sectors. RocksDB takes one that is cut short for the end, but a
//! wrong checksum for damage, and opens nothing. Here such an end is cut off.
//!
//! Invariants: only the end behind the last whole record goes, and only where a sector of the next one is missing: other
//! damage is left for a rebuild. The caller sees that all tables of the older state are there, else it puts the end back.
//! What that state lacks is made up for from the log, which is kept from the last state that was synced on; else the start
//! is refused (`log/recovery.rs`).

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Blocks of a log file of RocksDB, which no header crosses (db/log_format.h).
const BLOCK_BYTES: usize = 32 << 10;

/// Checksum, length, type.
const HEADER_BYTES: usize = 7;

/// Types of records: a whole one, and the parts of one. Other types are not in manifests.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// What a disk writes whole at least.
const SECTOR_BYTES: usize = 512;

/// Most bytes of a manifest that is looked at. It is written anew at each start.
const MANIFEST_BYTES_MAX: u64 = 1 << 30;

/// A manifest whose end a power cut tore.
#[derive(Debug)]
pub(super) struct Torn {
    manifest: PathBuf,
    bytes: Vec<u8>,
    /// Where its whole records end.
    end: usize,
}

impl Torn {
    /// Looks at the manifest of the index in `path`.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn find(path: &Path) -> io::Result<Option<Self>> {
        let Some(manifest) = current(path)? else { return Ok(None) };
        if std::fs::metadata(&manifest)?.len() > MANIFEST_BYTES_MAX {
            return Ok(None);
        }
        let bytes = std::fs::read(&manifest)?;
        let Whole { end, bad } = whole(&bytes);
        // Without a first record it is no manifest.
        Ok((end > 0 && lacks_a_sector(&bytes, bad)).then_some(Self { manifest, bytes, end }))
    }

    /// Cuts the end off.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn cut(&self) -> io::Result<()> {
        let file = File::options().write(true).open(&self.manifest)?;
        file.set_len(u64::try_from(self.end).unwrap_or(u64::MAX))?;
        file.sync_all()?;
        tracing::warn!(
            manifest = %self.manifest.display(),
            offset_bytes = self.end,
            cut_bytes = self.bytes.len() - self.end,
            "the end of the index's manifest was torn by a power cut, and is cut off; the log has what it told"
        );
        Ok(())
    }

    /// Puts the end back, as it was no torn one after all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn put_back(&self) -> io::Result<()> {
        let file = File::options().write(true).open(&self.manifest)?;
        let end = self.bytes.get(self.end..).unwrap_or_default();
        file.write_all_at(end, u64::try_from(self.end).unwrap_or(u64::MAX))?;
        file.sync_all()?;
        tracing::warn!(
            manifest = %self.manifest.display(),
            "tables are missing without the end of the index's manifest, so it is put back"
        );
        Ok(())
    }
}

/// The manifest that is in use.
fn current(path: &Path) -> io::Result<Option<PathBuf>> {
    let text = match std::fs::read_to_string(path.join("CURRENT")) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let name = text.trim_end();
    let is_manifest = name.strip_prefix("MANIFEST-").is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    Ok(is_manifest.then(|| path.join(name)).filter(|manifest| manifest.exists()))
}

/// How much of a manifest is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Whole {
    /// The end of the last record before which all are whole.
    end: usize,
    /// Where the part of a record begins that is not, or the end of the file.
    bad: usize,
}

fn whole(bytes: &[u8]) -> Whole {
    let (mut at, mut end, mut is_inside) = (0, 0, false);
    loop {
        let left = BLOCK_BYTES - at % BLOCK_BYTES;
        if left < HEADER_BYTES {
            at += left;
            continue;
        }
        let Some((kind, length)) = record(bytes, at, left) else { break };
        if !matches!((is_inside, kind), (false, FULL | FIRST) | (true, MIDDLE | LAST)) {
            break;
        }
        at += length;
        is_inside = matches!(kind, FIRST | MIDDLE);
        if !is_inside {
            end = at;
        }
    }
    Whole { end, bad: at.min(bytes.len()) }
}

/// Type and length, with the header, of the record at an offset, if its checksum is right.
fn record(bytes: &[u8], at: usize, left: usize) -> Option<(u8, usize)> {
    let [c0, c1, c2, c3, low, high, kind] = *bytes.get(at..)?.first_chunk::<HEADER_BYTES>()?;
    let length = HEADER_BYTES + usize::from(u16::from_le_bytes([low, high]));
    if length > left {
        return None;
    }
    // The type counts for the checksum.
    let checked = bytes.get(at + HEADER_BYTES - 1..at + length)?;
    let expected = u32::from_le_bytes([c0, c1, c2, c3]);
    (masked(crc32c::crc32c(checked)) == expected).then_some((kind, length))
}

/// As RocksDB stores a checksum (util/crc32c.h).
const fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Whether a sector of the part of a record at `bad` is zeros, as it was before the record was written, and something was
/// written behind it.
fn lacks_a_sector(bytes: &[u8], bad: usize) -> bool {
    let rest = bytes.get(bad..).unwrap_or_default();
    let is_zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    // RocksDB passes over zeros at the end, and takes a record that ends behind the file for the end.
    if rest.len() < HEADER_BYTES || is_zero(rest) {
        return false;
    }
    let to_boundary = SECTOR_BYTES - bad % SECTOR_BYTES;
    let (begin, others) = rest.split_at(to_boundary.min(rest.len()));
    if is_zero(begin) {
        return true;
    }
    let length = rest
        .get(4..6)
        .and_then(|length| length.first_chunk())
        .map_or(0, |length| usize::from(u16::from_le_bytes(*length)));
    let left = (HEADER_BYTES + length).saturating_sub(begin.len());
    HEADER_BYTES + length <= rest.len()
        && others.chunks(SECTOR_BYTES).take(left.div_ceil(SECTOR_BYTES)).any(is_zero)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of this type with the right checksum.
    fn written(kind: u8, payload: &[u8]) -> Vec<u8> {
        let checked = [&[kind], payload].concat();
        let mut bytes = masked(crc32c::crc32c(&checked)).to_le_bytes().to_vec();
        bytes.extend(u16::try_from(payload.len()).unwrap().to_le_bytes());
        bytes.extend(checked);
        bytes
    }

    fn end(bytes: &[u8]) -> usize {
        whole(bytes).end
    }

    #[test]
    fn records_are_whole_up_to_the_first_that_is_not() {
        let one = written(FULL, &[7; 100]);
        let parts = [written(FIRST, &[8; 300]), written(MIDDLE, &[9; 20]), written(LAST, &[1; 9])];
        let all = [one.clone(), parts.concat()].concat();
        assert_eq!(whole(&all), Whole { end: all.len(), bad: all.len() });
        let cut = whole(&all[..all.len() - 1]);
        assert_eq!(cut, Whole { end: one.len(), bad: all.len() - parts[2].len() }, "cut short");
        assert_eq!(end(&[one.clone(), parts[1].clone()].concat()), one.len(), "no first part");
        assert_eq!(end(&[]), 0);
        let mut flipped = all.clone();
        flipped[10] ^= 1;
        assert_eq!(end(&flipped), 0);
        // The last bytes of a block that cannot hold a header are passed over.
        let long = written(FULL, &vec![5; BLOCK_BYTES - HEADER_BYTES - 6]);
        let over = [long.clone(), vec![0; 6], one.clone()].concat();
        assert_eq!((long.len(), end(&over)), (BLOCK_BYTES - 6, over.len()));
    }

    #[test]
    fn only_an_end_that_lacks_a_sector_is_torn() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = folder.path().join("MANIFEST-000005");
        let current = folder.path().join("CURRENT");
        assert!(Torn::find(folder.path()).unwrap().is_none(), "there is no index");
        std::fs::write(&current, "MANIFEST-000005\n").unwrap();
        assert!(Torn::find(folder.path()).unwrap().is_none(), "there is no manifest");
        let one = written(FULL, &[7; 100]);
        let all = [one.clone(), written(FULL, &[8; 2000]), written(FULL, &[9; 300])].concat();
        // Where it is cut.
        let torn_at = |bytes: &[u8]| {
            std::fs::write(&manifest, bytes).unwrap();
            let torn = Torn::find(folder.path()).unwrap()?;
            torn.cut().unwrap();
            let cut = std::fs::read(&manifest).unwrap();
            torn.put_back().unwrap();
            assert!(std::fs::read(&manifest).unwrap() == bytes);
            Some(cut.len())
        };
        let zeroed = |bytes: &[u8], range: std::ops::Range<usize>| {
            let mut bytes = bytes.to_vec();
            bytes[range].fill(0);
            bytes
        };
        assert_eq!(torn_at(&all), None);
        assert_eq!(torn_at(&zeroed(&all, 1024..1536)), Some(one.len()));
        assert_eq!(torn_at(&zeroed(&all, one.len()..512)), Some(one.len()), "its begin");
        assert_eq!(torn_at(&zeroed(&all, one.len()..all.len())), None, "all of it: no harm");
        let last = one.len() + 2007;
        assert_eq!(
            torn_at(&zeroed(&all, 2048..all.len())),
            Some(one.len()),
            "the last begins in it"
        );
        assert_eq!(torn_at(&zeroed(&all, last..all.len())), None, "the last is not there");
        assert_eq!(torn_at(&all[..all.len() - 1]), None, "RocksDB takes that for the end");
        let mut rotten = all.clone();
        rotten[1024] ^= 1;
        assert_eq!(torn_at(&rotten), None, "damage is for a rebuild");
        let tail = [rotten, vec![0; 2048]].concat();
        assert_eq!(torn_at(&tail), None, "zeros behind the record are none of it");
        let headless = zeroed(&zeroed(&all, 1024..1536), 8..10);
        assert_eq!(torn_at(&headless), None, "nothing would be left");
        // A header on both sides of a sector's end, of which the first is missing.
        let first = written(FULL, &[3; 512 - 2 * HEADER_BYTES - 3 + 7]);
        let both = [first.clone(), written(FULL, &[4; 600])].concat();
        assert_eq!(first.len(), 512 - 3);
        assert_eq!(torn_at(&zeroed(&both, 509..512)), Some(first.len()));
        std::fs::write(&current, "../secret\n").unwrap();
        assert!(Torn::find(folder.path()).unwrap().is_none());
    }
}

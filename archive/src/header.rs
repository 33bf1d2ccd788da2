//! The 512 bytes of a tar header: where the fields are, and how numbers are written in them.
//!
//! ```text
//! 0 name 100 | 100 mode 8 | 108 uid 8 | 116 gid 8 | 124 size 12 | 136 mtime 12 | 148 checksum 8
//! 156 type 1 | 157 link 100 | 257 "ustar\0" "00" | 265 user 32 | 297 group 32
//! 329 major 8 | 337 minor 8 | 345 prefix 155
//! ```
//! GNU's headers have `ustar  \0` at 257 and, in place of the prefix, the map of a sparse file.

use std::ops::Range;

/// The unit of a tar archive.
pub(crate) const BLOCK_BYTES: usize = 512;

/// One block.
pub(crate) type Block = [u8; BLOCK_BYTES];

pub(crate) const NAME: Range<usize> = 0..100;
pub(crate) const MODE: Range<usize> = 100..108;
pub(crate) const UID: Range<usize> = 108..116;
pub(crate) const GID: Range<usize> = 116..124;
pub(crate) const SIZE: Range<usize> = 124..136;
pub(crate) const MTIME: Range<usize> = 136..148;
const CHECKSUM: Range<usize> = 148..156;
/// The place of the type.
pub(crate) const TYPE: usize = 156;
pub(crate) const LINK: Range<usize> = 157..257;
pub(crate) const MAGIC: Range<usize> = 257..265;
pub(crate) const MAJOR: Range<usize> = 329..337;
pub(crate) const MINOR: Range<usize> = 337..345;
pub(crate) const PREFIX: Range<usize> = 345..500;
/// GNU: the first four entries of a sparse file's map, each an offset and a length of 12 bytes.
pub(crate) const SPARSE: Range<usize> = 386..482;
/// GNU: whether a block with more entries follows.
pub(crate) const SPARSE_CONTINUES: usize = 482;
/// GNU: the size of the sparse file.
pub(crate) const SPARSE_REAL_SIZE: Range<usize> = 483..495;
/// GNU: the entries in a block that follows; behind them whether there is one more.
pub(crate) const SPARSE_MORE: Range<usize> = 0..504;

/// Magic and version of POSIX headers; only these have a prefix.
pub(crate) const MAGIC_USTAR: &[u8; 8] = b"ustar\x0000";

/// The bytes of a text field, up to its first NUL.
pub(crate) fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// The number in a field: octal digits, or big-endian two's complement behind a set first bit.
/// An empty field is zero, as other readers have it.
pub(crate) fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // The sign is the bit below the marker.
        let start: i128 = if first & 0x40 != 0 { -1 } else { 0 };
        let mut value = start << 6 | i128::from(first & 0x3f);
        for byte in &field[1..] {
            value = value << 8 | i128::from(*byte);
        }
        return i64::try_from(value).ok();
    }
    let digits = text(field).trim_ascii();
    if digits.is_empty() {
        return Some(0);
    }
    let is_octal = digits.iter().all(|digit| (b'0'..=b'7').contains(digit));
    let digits = is_octal.then(|| std::str::from_utf8(digits).ok()).flatten()?;
    i64::from_str_radix(digits, 8).ok()
}

/// Whether the header's checksum is right. Some old writers summed signed bytes.
pub(crate) fn has_right_checksum(block: &Block) -> bool {
    let Some(expected) = number(&block[CHECKSUM]) else {
        return false;
    };
    let sum_with = |value: fn(u8) -> i64| -> i64 {
        let bytes = block.iter().enumerate();
        bytes.map(|(at, byte)| value(if CHECKSUM.contains(&at) { b' ' } else { *byte })).sum()
    };
    expected == sum_with(i64::from) || expected == sum_with(|byte| i64::from(byte.cast_signed()))
}

/// Whether `value` fits the octal digits of `field`, which ends with a NUL.
pub(crate) fn fits(field: &Range<usize>, value: u64) -> bool {
    let bits = 3 * (field.len() - 1);
    bits >= 64 || value >> bits == 0
}

/// A POSIX header under construction.
pub(crate) struct Builder(Block);

impl Builder {
    /// A header of this type, everything else zero.
    pub(crate) fn new(kind: u8) -> Self {
        let mut block = [0; BLOCK_BYTES];
        block[TYPE] = kind;
        block[MAGIC].copy_from_slice(MAGIC_USTAR);
        Self(block)
    }

    /// Sets a text field to as much of `text` as fits.
    pub(crate) fn text(mut self, field: Range<usize>, text: &[u8]) -> Self {
        let length = text.len().min(field.len());
        self.0[field.start..field.start + length].copy_from_slice(&text[..length]);
        self
    }

    /// Sets a number, or zero where it does not fit: then a PAX record says it.
    pub(crate) fn number(self, field: Range<usize>, value: u64) -> Self {
        let value = if fits(&field, value) { value } else { 0 };
        let digits = format!("{value:0width$o}", width = field.len() - 1);
        self.text(field, digits.as_bytes())
    }

    /// The header with its checksum.
    pub(crate) fn finish(mut self) -> Block {
        self.0[CHECKSUM].fill(b' ');
        let sum: u64 = self.0.iter().map(|byte| u64::from(*byte)).sum();
        self.text(CHECKSUM, format!("{sum:06o}\0 ").as_bytes()).0
    }
}

/// How many zeros follow a content of `size_bytes` up to the next block.
pub(crate) fn padding_bytes(size_bytes: u64) -> usize {
    let unit = BLOCK_BYTES as u64;
    usize::try_from(size_bytes.next_multiple_of(unit) - size_bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_other_readers_do() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(number(b"77777777"), Some(0o7777_7777));
        assert_eq!(number(b"0000648\0"), None);
        assert_eq!(number(b"-000644\0"), None);
        assert_eq!(number(b"\x80\0\0\0\0\0\x01\x00"), Some(256));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(number(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
    }

    #[test]
    fn checksums_are_right_or_wrong() {
        let mut block = Builder::new(b'0').text(NAME, b"name").number(SIZE, 5).finish();
        assert!(has_right_checksum(&block));
        block[0] ^= 1;
        assert!(!has_right_checksum(&block));
    }

    #[test]
    fn padding_fills_the_block() {
        assert_eq!([0, 1, 511, 512, 513].map(padding_bytes), [0, 511, 1, 0, 511]);
    }
}

//! A directory's blocks.
//!
//! ```text
//! block = entries of 12 bytes | their names
//! entry = nid u64 | where its name begins in the block u16 | type u8 | 0
//! ```
//! The names, `.` and `..` among them, are in the order of their bytes, within a block and from one
//! to the next: the kernel looks for a name by halving. A name ends where the next one begins, the last of
//! a block with the block, with the directory, or before a NUL. The first entry says how many there are.

use crate::format::{BLOCK_BYTES, Nid};

/// Bytes of an entry without its name.
const ENTRY_BYTES: usize = 12;

/// A name with what it stands for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) nid: Nid,
    /// `FT_...` of the kernel.
    pub(crate) file_type: u8,
}

/// Bytes of a directory with these names in their order.
pub(crate) fn encoded_bytes<'a>(names: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut full_blocks = 0_u64;
    let mut used = 0;
    for name in names {
        let bytes = ENTRY_BYTES + name.len();
        if used + bytes > BLOCK_BYTES {
            full_blocks += 1;
            used = 0;
        }
        used += bytes;
    }
    full_blocks * BLOCK_BYTES as u64 + used as u64
}

/// A directory with these entries in the order of their names; its end is not filled up.
pub(crate) fn encode(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = entries;
    while !rest.is_empty() {
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        let mut used = 0;
        let fits = rest.iter().take_while(|entry| {
            used += ENTRY_BYTES + entry.name.len();
            used <= BLOCK_BYTES
        });
        let (block, behind) = rest.split_at(fits.count());
        encode_block(block, &mut out);
        rest = behind;
    }
    out
}

fn encode_block(entries: &[Entry<'_>], out: &mut Vec<u8>) {
    let mut name_offset = entries.len() * ENTRY_BYTES;
    for entry in entries {
        out.extend_from_slice(&entry.nid.0.to_le_bytes());
        // Within a block, so 16 bits are enough.
        out.extend_from_slice(&u16::try_from(name_offset).unwrap_or(u16::MAX).to_le_bytes());
        out.extend_from_slice(&[entry.file_type, 0]);
        name_offset += entry.name.len();
    }
    for entry in entries {
        out.extend_from_slice(entry.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_what_is_written_also_at_the_ends_of_blocks() {
        for count in [1, 2, 15, 16, 17, 300] {
            for length in [1, 100, 116, 244, 255] {
                let names: Vec<_> = (0..count).map(|_| vec![b'n'; length]).collect();
                let entries: Vec<_> =
                    names.iter().map(|name| Entry { name, nid: Nid(7), file_type: 1 }).collect();
                let counted = encoded_bytes(names.iter().map(Vec::as_slice));
                assert_eq!(encode(&entries).len() as u64, counted, "{count} of {length}");
            }
        }
    }
}

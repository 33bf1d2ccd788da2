//! Right checksums around bytes of a fuzzer's choice, which it would not find by itself.

use super::{
    CHUNK_ENTRY_BYTES, COMMIT_HEADER_BYTES, COMMIT_MAGIC, CRC_BYTES, DIRECTORY_HEADER_BYTES,
    DIRECTORY_MAGIC, GROUP_HEADER_BYTES, GROUP_MAGIC, put_crc,
};
use crate::id::StoreId;

/// Makes the checksums right of the record that `bytes` begin with, whatever it holds.
pub(crate) fn make_crc_right(bytes: &mut [u8], store: StoreId) {
    let number = |bytes: &[u8], at: usize| {
        let four = bytes.get(at..at + 4).and_then(<[u8]>::first_chunk::<4>);
        four.map_or(0, |four| usize::try_from(u32::from_be_bytes(*four)).unwrap_or(usize::MAX))
    };
    let (header_bytes, behind) = match u32::try_from(number(bytes, 0)).unwrap_or(0) {
        GROUP_MAGIC => (GROUP_HEADER_BYTES, number(bytes, 4).saturating_mul(CHUNK_ENTRY_BYTES)),
        COMMIT_MAGIC => (COMMIT_HEADER_BYTES, number(bytes, 4)),
        DIRECTORY_MAGIC => (DIRECTORY_HEADER_BYTES, 0),
        _ => return,
    };
    let is_directory = header_bytes == DIRECTORY_HEADER_BYTES;
    if let Some(record) = bytes.get_mut(..header_bytes.saturating_add(behind)) {
        put_crc(record, store, (0, header_bytes));
        if is_directory {
            let (covered, crc) = record.split_at_mut(DIRECTORY_HEADER_BYTES - CRC_BYTES);
            crc.copy_from_slice(&crc32c::crc32c(covered).to_be_bytes());
        }
    }
}

//! Sizes of the store, each with its reason.
//!
//! ```text
//! file    | window 0 (1 MiB)                | window 1                        | ...
//!         | block 0 | block 1 | ... | 255   | block 256 | ...
//! ```

/// Bytes of one block: the unit of copy-on-write, of deduplication and of ext4's default layout.
pub const BLOCK_BYTES: usize = 4096;

/// [`BLOCK_BYTES`] as the width that offsets have.
pub const BLOCK_BYTES_U64: u64 = 4096;

/// Blocks of one window, the unit in which resolved extents are cached: 1 MiB, the largest
/// READ a Linux client sends, so that one READ touches at most two windows.
pub const WINDOW_BLOCKS: u64 = 256;

/// Largest file size in bytes: 2^62, under RFC 1813's 2^63 - 1 so that sums of an offset and
/// a length never overflow.
pub const FILE_BYTES_MAX: u64 = 1 << 62;

/// Longest name of a directory entry in bytes, as on ext4.
pub const NAME_BYTES_MAX: usize = 255;

/// Longest target of a symbolic link in bytes (Linux `PATH_MAX` less the NUL).
pub const SYMLINK_BYTES_MAX: usize = 4095;

const _: () = assert!(BLOCK_BYTES_U64 == BLOCK_BYTES as u64);
const _: () = assert!(BLOCK_BYTES.is_power_of_two());

/// The block that holds the byte at `offset`.
#[must_use]
pub const fn block_of(offset_bytes: u64) -> u64 {
    offset_bytes / BLOCK_BYTES_U64
}

/// The number of blocks that `length` bytes from the start of a file occupy.
#[must_use]
pub const fn blocks_in(length_bytes: u64) -> u64 {
    length_bytes.div_ceil(BLOCK_BYTES_U64)
}

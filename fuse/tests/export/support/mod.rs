//! A real appliance, a network that can be stopped, and a mount of it, all of one test.
//!
//! Needs root and /dev/fuse. Whatever a test leaves is unmounted and stopped when it is dropped.

pub mod appliance;
pub mod gate;
#[path = "../../../../tests/held_port.rs"]
pub mod held_port;
pub mod mount;
#[path = "../../../../tests/namespace.rs"]
pub mod namespace;

/// Bytes that cannot be compressed or deduplicated, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

//! What stands for a token in what outlives a call.

/// Stands for a token in what outlives a call, such as a file handle of NFS. With another name or secret it is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenId([u8; Self::BYTES]);

impl TokenId {
    /// Its length.
    pub const BYTES: usize = 16;

    /// That of callers of a server without tokens.
    pub const NONE: Self = Self([0; Self::BYTES]);

    /// The id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

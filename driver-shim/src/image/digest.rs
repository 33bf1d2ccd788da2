//! SHA-256, by which images name their parts.

use std::fmt;
use std::io::{self, Read, Write};

use ring::digest::{Context, SHA256, digest};

/// Bytes of a SHA-256.
const DIGEST_BYTES: usize = 32;

/// The digest of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; DIGEST_BYTES]);

impl Digest {
    /// Of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::from_ring(&digest(&SHA256, bytes))
    }

    fn from_ring(digest: &ring::digest::Digest) -> Self {
        let mut bytes = [0; DIGEST_BYTES];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }

    /// In hexadecimal digits, without the name of the algorithm.
    #[must_use]
    pub fn hex(&self) -> String {
        use fmt::Write;
        self.0.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

/// The chain id of each layer: the digest of it and all below (OCI image specification,
/// "Layer ChainID").
#[must_use]
pub fn chain_ids(diff_ids: &[String]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let chain = chain_id(chains.last().map(String::as_str), diff_id);
        chains.push(chain);
    }
    chains
}

/// The chain id of a layer above one of that chain id, or above nothing.
#[must_use]
pub fn chain_id(below: Option<&str>, diff_id: &str) -> String {
    match below {
        Some(below) => Digest::of(format!("{below} {diff_id}").as_bytes()).to_string(),
        None => diff_id.to_owned(),
    }
}

/// Passes bytes on, and knows their digest and number.
pub(crate) struct HashingWriter<W> {
    inner: W,
    context: Context,
    length_bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, context: Context::new(&SHA256), length_bytes: 0 }
    }

    pub(crate) fn finish(self) -> (Digest, u64) {
        let (_, digest, length_bytes) = self.into_parts();
        (digest, length_bytes)
    }

    /// What the bytes were passed on to, their digest and their number.
    pub(crate) fn into_parts(self) -> (W, Digest, u64) {
        (self.inner, Digest::from_ring(&self.context.finish()), self.length_bytes)
    }
}

/// Passes on what it reads, and knows the digest and number of these bytes.
pub(crate) struct HashingReader<R> {
    inner: R,
    context: Context,
    length_bytes: u64,
}

impl<R: Read> HashingReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, context: Context::new(&SHA256), length_bytes: 0 }
    }

    pub(crate) fn finish(self) -> (Digest, u64) {
        (Digest::from_ring(&self.context.finish()), self.length_bytes)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.context.update(&buffer[..length]);
        self.length_bytes += length as u64;
        Ok(length)
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.context.update(&bytes[..written]);
        self.length_bytes += u64::try_from(written).unwrap_or_default();
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").hex(), empty);
        let mut writer = HashingWriter::new(Vec::new());
        writer.write_all(b"ab").unwrap();
        writer.write_all(b"c").unwrap();
        assert_eq!(writer.finish(), (Digest::of(b"abc"), 3));
    }

    #[test]
    fn a_chain_names_what_is_below() {
        let of = |digits: &str| format!("sha256:{}", digits.repeat(64));
        let chains = chain_ids(&[of("a"), of("b")]);
        assert_eq!(chains[0], of("a"));
        let joined = format!("{} {}", of("a"), of("b"));
        assert_eq!(chains[1], Digest::of(joined.as_bytes()).to_string());
        assert_ne!(chain_ids(&[of("b"), of("b")])[1], chains[1]);
    }
}

//! The primitives of every stored value: big-endian integers, length-prefixed bytes, a version
//! byte in front. Encode and decode of each record stand side by side in `record.rs` and
//! `segment_format.rs`; FORMAT.md has the pictures.

use crate::error::{Error, Result};

/// Builds a stored value.
#[derive(Debug, Default)]
pub(crate) struct Encoder(Vec<u8>);

impl Encoder {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// A value that begins with its version.
    pub(crate) fn versioned(version: u8) -> Self {
        Self(vec![version])
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }

    /// Bytes of a length that the reader knows.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Bytes behind their length in 32 bits.
    ///
    /// # Panics
    /// Over 4 GiB: all byte strings of the store are bounded far below that.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        let Ok(length) = u32::try_from(bytes.len()) else {
            panic!("a stored byte string of {} bytes", bytes.len())
        };
        self.u32(length).raw(bytes)
    }

    /// Zero or one byte string.
    pub(crate) fn optional_bytes(&mut self, bytes: Option<&[u8]>) -> &mut Self {
        match bytes {
            None => self.u8(0),
            Some(bytes) => self.u8(1).bytes(bytes),
        }
    }

    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

/// Reads a stored value; every failure is `Corrupt` and names the value.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }

    /// A value that must begin with `version`.
    pub(crate) fn versioned(what: &'static str, bytes: &'a [u8], version: u8) -> Result<Self> {
        let mut decoder = Self::new(what, bytes);
        let got = decoder.u8()?;
        if got != version {
            return Err(Error::corrupt(what, format!("version {got}, expected {version}")));
        }
        Ok(decoder)
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        match self.rest.split_at_checked(count) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(Error::corrupt(
                self.what,
                format!("{} bytes left, {count} expected", self.rest.len()),
            )),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A number that the store counts up, or a size: nothing adds up to more than `limit`, so that
    /// whatever is added to it afterwards does not overflow.
    pub(crate) fn bounded(&mut self, limit: u64) -> Result<u64> {
        let got = self.u64()?;
        if got > limit {
            return Err(Error::corrupt(self.what, format!("{got}, expected at most {limit}")));
        }
        Ok(got)
    }

    /// As [`Self::bounded`], in 32 bits.
    pub(crate) fn bounded_u32(&mut self, limit: u32) -> Result<u32> {
        let got = self.u32()?;
        if got > limit {
            return Err(Error::corrupt(self.what, format!("{got}, expected at most {limit}")));
        }
        Ok(got)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.u32()?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        self.take(length)
    }

    pub(crate) fn optional_bytes(&mut self) -> Result<Option<&'a [u8]>> {
        match self.u8()? {
            0 => Ok(None),
            1 => self.bytes().map(Some),
            got => Err(Error::corrupt(self.what, format!("option tag {got}, expected 0 or 1"))),
        }
    }

    pub(crate) fn text(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec())
            .map_err(|error| Error::corrupt(self.what, format!("text is not UTF-8: {error}")))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Nothing may be left.
    pub(crate) fn end(self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(Error::corrupt(self.what, format!("{} bytes too many", self.rest.len())))
    }
}

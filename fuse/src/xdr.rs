//! XDR (RFC 4506) as far as the calls of [`crate::nfs`] need it. Opaque bytes are slices of the
//! record that they came in.

use bytes::{Buf, Bytes, TryGetError};

/// The bytes end early, or a length in them is beyond what its field may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reply is shorter than its fields, or one of its lengths is over the limit")]
pub(crate) struct Malformed;

impl From<TryGetError> for Malformed {
    fn from(_: TryGetError) -> Self {
        Self
    }
}

/// Writes values.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    pub(crate) bytes: Vec<u8>,
}

impl Encoder {
    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    pub(crate) fn opaque(&mut self, value: &[u8]) {
        self.u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len() + padding_of(value.len()), 0);
    }
}

/// Zeros that follow `length` opaque bytes.
pub(crate) const fn padding_of(length: usize) -> usize {
    (4 - length % 4) % 4
}

/// Reads values.
#[derive(Debug)]
pub(crate) struct Decoder {
    bytes: Bytes,
}

impl Decoder {
    pub(crate) const fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(self.bytes.try_get_u32()?)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(self.bytes.try_get_u64()?)
    }

    pub(crate) fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        self.bytes.try_copy_to_slice(&mut array)?;
        Ok(array)
    }

    pub(crate) fn opaque(&mut self, length_max: usize) -> Result<Bytes, Malformed> {
        let length = usize::try_from(self.u32()?).map_err(|_| Malformed)?;
        if length > length_max {
            return Err(Malformed);
        }
        self.bytes(length)
    }

    pub(crate) fn skip(&mut self, count: usize) -> Result<(), Malformed> {
        self.bytes(count).map(|_| ())
    }

    /// `length` bytes; what pads them is passed over.
    fn bytes(&mut self, length: usize) -> Result<Bytes, Malformed> {
        let padding = padding_of(length);
        if self.bytes.len() < length + padding {
            return Err(Malformed);
        }
        let value = self.bytes.split_to(length);
        self.bytes.advance(padding);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back() {
        let mut encoder = Encoder::default();
        encoder.u32(7);
        encoder.opaque(b"abcde");
        encoder.u64(1 << 40);
        assert_eq!(&encoder.bytes[4..16], b"\0\0\0\x05abcde\0\0\0");
        let mut decoder = Decoder::new(encoder.bytes.into());
        assert_eq!(decoder.u32(), Ok(7));
        assert_eq!(decoder.opaque(5).unwrap(), "abcde");
        assert_eq!(decoder.u64(), Ok(1 << 40));
        assert_eq!(decoder.u32(), Err(Malformed));
    }

    #[test]
    fn lengths_are_bounded() {
        let decode = |bytes: &'static [u8], limit| Decoder::new(bytes.into()).opaque(limit);
        assert_eq!(decode(b"\0\0\0\x04abcd", 3), Err(Malformed));
        assert_eq!(decode(b"\xff\xff\xff\xffabcd", usize::MAX), Err(Malformed));
        assert_eq!(decode(b"\0\0\0\x03abc", 3), Err(Malformed), "no padding");
        assert_eq!(Decoder::new(Bytes::from_static(b"\0\0\0\x02")).bool(), Err(Malformed));
    }
}

//! XDR (RFC 4506): decoding of untrusted arguments and encoding of results.
//!
//! ```text
//! unsigned int | 4 bytes, big endian
//! hyper        | 8 bytes, big endian
//! opaque<n>    | length (4) | bytes | zeros up to a multiple of 4
//! ```
//! A decoder allocates nothing: variable-length data are borrowed from the frame (or share it,
//! for the payload of WRITE), and a length is checked against its limit and against what is
//! left of the frame before it is used.
#![deny(clippy::indexing_slicing)]

use bytes::Bytes;

/// Bytes of one XDR unit; every item is padded to a multiple of it.
pub(crate) const UNIT_BYTES: usize = 4;

/// Bytes that pad `length` bytes to a whole number of units.
pub(crate) const fn padding(length: usize) -> usize {
    (UNIT_BYTES - length % UNIT_BYTES) % UNIT_BYTES
}

/// Bytes of an opaque of `length` bytes on the wire: its length word, itself, its padding.
pub(crate) const fn opaque_bytes(length: usize) -> usize {
    UNIT_BYTES + length + padding(length)
}

/// The arguments cannot be decoded: the call is answered GARBAGE_ARGS (RFC 5531 section 9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    /// The frame ends inside an item.
    #[error("the frame ends early: {expected} more bytes expected, {got} are left")]
    Truncated {
        /// Bytes left.
        got: usize,
        /// Bytes that the item needs.
        expected: usize,
    },
    /// A length over the limit of its type.
    #[error("{got} bytes or items where at most {limit} are allowed")]
    TooLong {
        /// The length.
        got: usize,
        /// The limit.
        limit: usize,
    },
    /// A number that its enumeration does not have.
    #[error("{got} is no {expected}")]
    Value {
        /// The number.
        got: u32,
        /// The enumeration.
        expected: &'static str,
    },
}

/// Reads XDR items from a frame, in order.
#[derive(Clone, Debug)]
pub(crate) struct Decoder<'a> {
    frame: &'a Bytes,
    position: usize,
}

impl<'a> Decoder<'a> {
    /// A decoder at the start of `frame`.
    pub(crate) const fn new(frame: &'a Bytes) -> Self {
        Self { frame, position: 0 }
    }

    /// A decoder at byte `position` of `frame`.
    pub(crate) const fn at(frame: &'a Bytes, position: usize) -> Self {
        Self { frame, position }
    }

    /// Where the next item starts in the frame.
    pub(crate) const fn position(&self) -> usize {
        self.position
    }

    /// What has not been decoded yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.frame.get(self.position..).unwrap_or_default()
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let rest = self.rest();
        let taken =
            rest.get(..length).ok_or(Malformed::Truncated { got: rest.len(), expected: length })?;
        self.position += length;
        Ok(taken)
    }

    /// An array of fixed length, which must be a multiple of the unit.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        const { assert!(N.is_multiple_of(UNIT_BYTES), "fixed arrays are not padded here") };
        let rest = self.rest();
        let array =
            rest.first_chunk::<N>().ok_or(Malformed::Truncated { got: rest.len(), expected: N })?;
        self.position += N;
        Ok(*array)
    }

    /// An unsigned integer.
    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    /// An unsigned hyper integer.
    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// A boolean.
    pub(crate) fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            got => Err(Malformed::Value { got, expected: "boolean" }),
        }
    }

    /// A length of at most `limit`.
    pub(crate) fn length(&mut self, limit: usize) -> Result<usize, Malformed> {
        let got = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if got > limit {
            return Err(Malformed::TooLong { got, limit });
        }
        Ok(got)
    }

    /// An opaque or string of at most `limit` bytes.
    pub(crate) fn opaque(&mut self, limit: usize) -> Result<&'a [u8], Malformed> {
        let length = self.length(limit)?;
        let bytes = self.take(length)?;
        self.take(padding(length))?;
        Ok(bytes)
    }

    /// The same as a slice that shares the frame's memory and can outlive the decoder.
    pub(crate) fn opaque_shared(&mut self, limit: usize) -> Result<Bytes, Malformed> {
        let length = self.length(limit)?;
        let start = self.position;
        self.take(length)?;
        self.take(padding(length))?;
        Ok(self.frame.slice(start..start + length))
    }
}

/// Writes XDR items, behind room for a record mark that is filled in at the end.
///
/// ```text
/// head: | record mark | RPC reply header | items ... |   pieces: | payload of READ | padding
/// ```
#[derive(Debug)]
pub(crate) struct Encoder {
    head: Vec<u8>,
    pieces: Vec<Bytes>,
    pieces_bytes: usize,
}

/// Room taken at once for a reply: holds every reply but directory pages and long links.
const HEAD_BYTES: usize = 384;

/// Marks the last fragment of a record (RFC 5531 section 11).
pub(crate) const LAST_FRAGMENT: u32 = 1 << 31;

impl Encoder {
    /// An empty record.
    pub(crate) fn new() -> Self {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend_from_slice(&[0; UNIT_BYTES]);
        Self { head, pieces: Vec::new(), pieces_bytes: 0 }
    }

    /// Bytes written so far, the record mark left out.
    pub(crate) const fn length(&self) -> usize {
        self.head.len() + self.pieces_bytes - UNIT_BYTES
    }

    /// Cuts the record back to `length` bytes, as [`Self::length`] gave it before.
    pub(crate) fn truncate(&mut self, length: usize) {
        self.head.truncate(length + UNIT_BYTES);
        self.pieces.clear();
        self.pieces_bytes = 0;
    }

    /// An unsigned integer.
    pub(crate) fn u32(&mut self, value: u32) {
        self.head.extend_from_slice(&value.to_be_bytes());
    }

    /// An unsigned hyper integer.
    pub(crate) fn u64(&mut self, value: u64) {
        self.head.extend_from_slice(&value.to_be_bytes());
    }

    /// A boolean.
    pub(crate) fn bool(&mut self, value: bool) {
        self.u32(u32::from(value));
    }

    /// A length word; lengths are bounded by the frame limit long before this could fail.
    fn length_word(&mut self, length: usize) {
        debug_assert!(u32::try_from(length).is_ok(), "a length of {length} bytes in a reply");
        self.u32(u32::try_from(length).unwrap_or(u32::MAX));
    }

    /// An opaque or string.
    pub(crate) fn opaque(&mut self, bytes: &[u8]) {
        self.length_word(bytes.len());
        self.head.extend_from_slice(bytes);
        self.pad(bytes.len());
    }

    fn pad(&mut self, length: usize) {
        let zeros = [0; UNIT_BYTES];
        self.head.extend_from_slice(zeros.get(..padding(length)).unwrap_or_default());
    }

    /// The opaque that ends a reply, made of `pieces`, which are not copied.
    pub(crate) fn payload(&mut self, pieces: Vec<Bytes>) {
        const PADDING: &[u8] = &[0; UNIT_BYTES];
        debug_assert!(self.pieces.is_empty(), "a reply has one payload");
        let length = pieces.iter().map(Bytes::len).sum();
        self.length_word(length);
        self.pieces = pieces;
        let pad = padding(length);
        if pad > 0 {
            self.pieces.push(Bytes::from_static(PADDING.get(..pad).unwrap_or_default()));
        }
        self.pieces_bytes = length + pad;
    }

    /// The finished record: its head with the record mark filled in, and the pieces after it.
    pub(crate) fn finish(mut self) -> (Vec<u8>, Vec<Bytes>) {
        let mark = u32::try_from(self.length()).unwrap_or(LAST_FRAGMENT - 1) | LAST_FRAGMENT;
        if let Some(room) = self.head.first_chunk_mut::<UNIT_BYTES>() {
            *room = mark.to_be_bytes();
        }
        (self.head, self.pieces)
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_decodes_to_the_same() {
        let mut encoder = Encoder::new();
        encoder.u32(7);
        encoder.u64(u64::MAX - 1);
        encoder.bool(true);
        encoder.opaque(b"abcde");
        encoder.payload(vec![Bytes::from_static(b"xy"), Bytes::from_static(b"z")]);
        let (head, pieces) = encoder.finish();
        let mut wire = head.to_vec();
        pieces.iter().for_each(|piece| wire.extend_from_slice(piece));
        assert_eq!(wire.len() % UNIT_BYTES, 0);

        let wire = Bytes::from(wire);
        let mut decoder = Decoder::new(&wire);
        let length = u32::try_from(wire.len() - UNIT_BYTES).unwrap();
        assert_eq!(decoder.u32(), Ok(length | LAST_FRAGMENT));
        assert_eq!(decoder.u32(), Ok(7));
        assert_eq!(decoder.u64(), Ok(u64::MAX - 1));
        assert_eq!(decoder.bool(), Ok(true));
        assert_eq!(decoder.opaque(5), Ok(&b"abcde"[..]));
        assert_eq!(decoder.opaque_shared(3), Ok(Bytes::from_static(b"xyz")));
        assert_eq!(decoder.rest(), b"");
    }

    #[test]
    fn a_length_is_checked_before_it_is_believed() {
        let huge = Bytes::from_static(&[0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4]);
        let limit = 64;
        let too_long = Err(Malformed::TooLong { got: 0xffff_ffff, limit });
        assert_eq!(Decoder::new(&huge).opaque(limit), too_long);
        assert_eq!(
            Decoder::new(&huge).opaque(usize::MAX),
            Err(Malformed::Truncated { got: 4, expected: 0xffff_ffff })
        );
        let unpadded = Bytes::from_static(&[0, 0, 0, 1, 9]);
        assert_eq!(
            Decoder::new(&unpadded).opaque(limit),
            Err(Malformed::Truncated { got: 0, expected: 3 })
        );
    }

    #[test]
    fn every_truncation_is_an_error() {
        let whole = [0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0];
        for end in 0..whole.len() {
            let cut = Bytes::copy_from_slice(&whole[..end]);
            assert!(Decoder::new(&cut).opaque(16).is_err(), "{end} bytes");
        }
        assert!(Decoder::new(&Bytes::copy_from_slice(&whole)).opaque(16).is_ok());
    }

    #[test]
    fn booleans_are_zero_or_one() {
        let two = Bytes::from_static(&[0, 0, 0, 2]);
        assert_eq!(
            Decoder::new(&two).bool(),
            Err(Malformed::Value { got: 2, expected: "boolean" })
        );
    }

    #[test]
    fn the_payload_shares_the_frame() {
        let frame = Bytes::from(vec![0, 0, 0, 4, 1, 2, 3, 4]);
        let payload = Decoder::new(&frame).opaque_shared(4).unwrap();
        assert_eq!(payload.as_ptr(), frame[4..].as_ptr());
    }
}

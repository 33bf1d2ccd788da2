//! Records as they arrive: of each only the beginning is kept, and the rest is let pass.

use slackwater_benches::wire::LAST_FRAGMENT;

use crate::failure::Failure;

/// What is kept of a record: more than any answer has but for a payload.
pub(super) const HEAD_BYTES: usize = 512;

/// A stream of records.
#[derive(Debug)]
pub(super) struct Inbound {
    /// Most that is kept of a record.
    head_bytes_max: usize,
    head: Vec<u8>,
    /// All of the record that has come so far.
    record_bytes: usize,
    mark: Vec<u8>,
    fragment_left: usize,
    is_last: bool,
}

impl Inbound {
    pub(super) fn new(head_bytes_max: usize) -> Self {
        Self {
            head_bytes_max,
            head: Vec::new(),
            record_bytes: 0,
            mark: Vec::new(),
            fragment_left: 0,
            is_last: false,
        }
    }

    /// Takes what has come, and hands over each record that is whole by it: its beginning and
    /// its length.
    pub(super) fn take(
        &mut self,
        mut bytes: &[u8],
        mut on_record: impl FnMut(&[u8], usize) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        while !bytes.is_empty() {
            if self.fragment_left == 0 {
                bytes = self.take_mark(bytes);
            } else {
                bytes = self.take_fragment(bytes);
            }
            if self.is_last && self.fragment_left == 0 {
                on_record(&self.head, self.record_bytes)?;
                self.head.clear();
                self.record_bytes = 0;
                self.is_last = false;
            }
        }
        Ok(())
    }

    fn take_mark<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let missing = size_of::<u32>() - self.mark.len();
        let (taken, rest) = bytes.split_at(missing.min(bytes.len()));
        self.mark.extend_from_slice(taken);
        if let Some(mark) = self.mark.first_chunk() {
            let mark = u32::from_be_bytes(*mark);
            self.is_last = mark & LAST_FRAGMENT != 0;
            self.fragment_left = usize::try_from(mark & !LAST_FRAGMENT).unwrap_or(usize::MAX);
            self.mark.clear();
        }
        rest
    }

    fn take_fragment<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(self.fragment_left.min(bytes.len()));
        let kept = taken.len().min(self.head_bytes_max.saturating_sub(self.head.len()));
        self.head.extend_from_slice(&taken[..kept]);
        self.record_bytes += taken.len();
        self.fragment_left -= taken.len();
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(bytes: &[u8], is_last: bool) -> Vec<u8> {
        let mark = u32::try_from(bytes.len()).unwrap() | if is_last { LAST_FRAGMENT } else { 0 };
        [&mark.to_be_bytes(), bytes].concat()
    }

    #[test]
    fn records_come_out_whole_however_they_arrive() {
        let long: Vec<u8> = (0..=255).cycle().take(3000).collect();
        let mut stream = fragment(b"one", true);
        stream.extend(fragment(&long[..1000], false));
        stream.extend(fragment(b"", false));
        stream.extend(fragment(&long[1000..], true));
        stream.extend(fragment(b"three", true));
        for piece_bytes in [1, 2, 3, 5, 7, 100, 1003, stream.len()] {
            let mut inbound = Inbound::new(HEAD_BYTES);
            let mut records = Vec::new();
            for piece in stream.chunks(piece_bytes) {
                let keep = |head: &[u8], length: usize| {
                    records.push((head.to_vec(), length));
                    Ok(())
                };
                inbound.take(piece, keep).unwrap();
            }
            let expected =
                [(b"one".to_vec(), 3), (long[..HEAD_BYTES].to_vec(), 3000), (b"three".to_vec(), 5)];
            assert_eq!(records, expected, "in pieces of {piece_bytes}");
        }
    }
}

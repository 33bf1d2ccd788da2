//! How often chunks are named: one record for 64 of them that follow each other, so that a run
//! of blocks costs one record, not one a block.

use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::ChunkId;

/// Chunks of one page: small enough that one count alone costs little, large enough that a
/// megabyte of blocks in sequence is four records.
pub(crate) const COUNTS_PER_PAGE: usize = 64;

const VERSION: u8 = 1;

/// A count that does not fit a byte stands behind the page.
const LARGE: u8 = u8::MAX;

/// The counts of chunks whose ids differ in the lowest six bits only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CountPage([u32; COUNTS_PER_PAGE]);

impl Default for CountPage {
    /// Chunks are born with a count of one.
    fn default() -> Self {
        Self([1; COUNTS_PER_PAGE])
    }
}

impl CountPage {
    /// The first chunk of the page that holds `chunk`.
    pub(crate) fn first(chunk: ChunkId) -> ChunkId {
        ChunkId::from_raw(chunk.raw() - u64::try_from(slot(chunk)).unwrap_or(0))
    }

    pub(crate) fn get(&self, chunk: ChunkId) -> u32 {
        self.0[slot(chunk)]
    }

    /// Sets a count and answers what it was.
    pub(crate) fn set(&mut self, chunk: ChunkId, count: u32) -> u32 {
        std::mem::replace(&mut self.0[slot(chunk)], count)
    }

    /// The counts in order.
    pub(crate) fn counts(&self) -> &[u32; COUNTS_PER_PAGE] {
        &self.0
    }

    /// The stored form; `None` for a page that needs no record.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        if self.0.iter().all(|&count| count == 1) {
            return None;
        }
        let mut e = Encoder::versioned(VERSION);
        let small = |count: u32| u8::try_from(count).unwrap_or(LARGE);
        for count in self.0 {
            e.u8(small(count));
        }
        for count in self.0.into_iter().filter(|&count| small(count) == LARGE) {
            e.u32(count);
        }
        Some(e.finish())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut d = Decoder::versioned("page of counts", bytes, VERSION)?;
        let small: [u8; COUNTS_PER_PAGE] = d.array()?;
        let mut page = Self::default();
        for (count, small) in page.0.iter_mut().zip(small) {
            *count = u32::from(small);
            if small == LARGE {
                *count = d.u32()?;
                if *count < u32::from(LARGE) {
                    let reason = format!("a large count of {count}, expected {LARGE} at least");
                    return Err(Error::corrupt("page of counts", reason));
                }
            }
        }
        d.end()?;
        if page == Self::default() {
            return Err(Error::corrupt("page of counts", "every count is 1"));
        }
        Ok(page)
    }
}

fn slot(chunk: ChunkId) -> usize {
    usize::try_from(chunk.raw()).unwrap_or(0) % COUNTS_PER_PAGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_page_reads_as_it_was_written(
            changes in proptest::collection::vec((0..64u64, prop_oneof![0..4u32, 250..260u32, any::<u32>()]), 0..70),
        ) {
            let mut page = CountPage::default();
            for (slot, count) in changes {
                page.set(ChunkId::from_raw(slot), count);
            }
            match page.encode() {
                Some(bytes) => prop_assert_eq!(CountPage::decode(&bytes).unwrap(), page),
                None => prop_assert_eq!(page, CountPage::default()),
            }
        }
    }

    #[test]
    fn a_page_of_ones_has_no_record_and_is_refused_as_one() {
        assert_eq!(CountPage::default().encode(), None);
        let mut bytes = vec![VERSION];
        bytes.extend([1; COUNTS_PER_PAGE]);
        assert!(CountPage::decode(&bytes).is_err());
        bytes[1] = 0;
        assert!(CountPage::decode(&bytes).is_ok());
        bytes.push(0);
        assert!(CountPage::decode(&bytes).is_err());
    }
}

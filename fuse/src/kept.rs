//! What was written and is not committed: kept, so that it can be sent again.
//!
//! ```text
//! file   |----AAAA--BBBBBB------CC----|     extents by offset, none overlaps another;
//!             v1    v1          v2          each with the verifier it was answered with
//! ```
//!
//! Invariants: a newer write cuts what it overlaps out of older ones, so that extents may be
//! sent again in any order. A read must lay these bytes over what the appliance gives: after a
//! restart of the appliance they are not there until they were sent again.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::nfs::Verifier;

/// One extent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extent {
    data: Bytes,
    verifier: Verifier,
    /// Grows with each write.
    sequence: u64,
}

/// The uncommitted writes of one file.
#[derive(Debug, Default)]
pub(crate) struct KeptWrites {
    extents: BTreeMap<u64, Extent>,
    next_sequence: u64,
    bytes: u64,
}

fn length_of(data: &Bytes) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

/// Where `position` lies in data that begins at `offset`.
fn index_in(offset: u64, position: u64) -> usize {
    usize::try_from(position - offset).unwrap_or(usize::MAX)
}

impl KeptWrites {
    /// Bytes of all extents.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// All extents of now have a lower number, all later ones not.
    pub(crate) const fn watermark(&self) -> u64 {
        self.next_sequence
    }

    /// Keeps a write, in place of what it overlaps.
    pub(crate) fn insert(&mut self, offset: u64, data: Bytes, verifier: Verifier) {
        let end = offset.saturating_add(length_of(&data));
        self.cut(offset, end);
        self.bytes += length_of(&data);
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.extents.insert(offset, Extent { data, verifier, sequence });
    }

    /// Offsets of the extents that overlap the range.
    fn overlapping(&self, start: u64, end: u64) -> Vec<u64> {
        let before = self.extents.range(..start).next_back();
        let before = before.filter(|(offset, extent)| *offset + length_of(&extent.data) > start);
        let inside = self.extents.range(start..end.max(start));
        before.into_iter().chain(inside).map(|(offset, _)| *offset).collect()
    }

    /// Forgets the range, which the appliance has durably by now.
    pub(crate) fn cut(&mut self, start: u64, end: u64) {
        for offset in self.overlapping(start, end) {
            let Some(extent) = self.extents.remove(&offset) else { continue };
            let extent_end = offset + length_of(&extent.data);
            self.bytes -= length_of(&extent.data);
            for (from, to) in [(offset, start.min(extent_end)), (end.max(offset), extent_end)] {
                if from < to {
                    let rest = &extent.data[index_in(offset, from)..index_in(offset, to)];
                    // A slice would hold the memory of the whole write, which is not counted.
                    let data = Bytes::copy_from_slice(rest);
                    self.bytes += to - from;
                    self.extents.insert(from, Extent { data, ..extent.clone() });
                }
            }
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.extents.clear();
        self.bytes = 0;
    }

    /// Forgets what a commit that was answered with `verifier` made durable: what was written
    /// before it began, under that verifier. Tells whether older extents remain, which must be
    /// sent again.
    pub(crate) fn settle(&mut self, watermark: u64, verifier: Verifier) -> bool {
        self.extents
            .retain(|_, extent| extent.sequence >= watermark || extent.verifier != verifier);
        self.bytes = self.extents.values().map(|extent| length_of(&extent.data)).sum();
        self.extents.values().any(|extent| extent.sequence < watermark)
    }

    /// What was answered with another verifier than this.
    pub(crate) fn stale(&self, verifier: Verifier) -> Vec<(u64, Bytes)> {
        let stale = self.extents.iter().filter(|(_, extent)| extent.verifier != verifier);
        stale.map(|(offset, extent)| (*offset, extent.data.clone())).collect()
    }

    /// The parts of the range that are kept, in order.
    pub(crate) fn overlay(&self, start: u64, end: u64) -> Vec<(u64, Bytes)> {
        let part = |offset: u64| {
            let data = &self.extents.get(&offset)?.data;
            let from = start.max(offset);
            let to = end.min(offset + length_of(data));
            Some((from, data.slice(index_in(offset, from)..index_in(offset, to))))
        };
        self.overlapping(start, end).into_iter().filter_map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST: Verifier = [1; 8];
    const SECOND: Verifier = [2; 8];

    #[test]
    fn a_commit_settles_what_came_before_it_under_its_verifier() {
        let mut kept = KeptWrites::default();
        kept.insert(0, "aaaa".into(), FIRST);
        kept.insert(10, "bb".into(), SECOND);
        let watermark = kept.watermark();
        kept.insert(20, "c".into(), SECOND);
        assert!(kept.settle(watermark, SECOND), "the first is lost");
        assert_eq!(kept.stale(SECOND), [(0, "aaaa".into())]);
        assert_eq!(kept.bytes(), 5);
        kept.insert(0, "aaaa".into(), SECOND);
        assert!(!kept.settle(kept.watermark(), SECOND));
        assert!(kept.is_empty() && kept.bytes() == 0);
    }

    #[test]
    fn a_write_inside_another_leaves_both_ends() {
        let mut kept = KeptWrites::default();
        kept.insert(0, "aaaaaa".into(), FIRST);
        kept.insert(2, "bb".into(), SECOND);
        assert_eq!(kept.stale(SECOND), [(0, "aa".into()), (4, "aa".into())]);
        assert_eq!(kept.overlay(1, 5), [(1, "a".into()), (2, "bb".into()), (4, "a".into())]);
        assert_eq!(kept.bytes(), 6);
    }

    #[test]
    fn what_was_cut_out_gives_its_memory_back() {
        let mut kept = KeptWrites::default();
        let whole = Bytes::from(vec![1; 1 << 20]);
        kept.insert(0, whole.clone(), FIRST);
        assert!(!whole.is_unique());
        kept.insert(4096, vec![2; (1 << 20) - 8192].into(), FIRST);
        assert_eq!(kept.extents.len(), 3);
        assert!(whole.is_unique(), "what remains of it is a copy");
        kept.clear();
        assert!(kept.is_empty() && kept.bytes() == 0);
    }

    proptest! {
        #[test]
        fn it_is_a_sparse_file(
            writes in prop::collection::vec((0_u64..64, 1_usize..20, any::<u8>()), 0..40),
            (start, length) in (0_u64..80, 0_u64..40),
        ) {
            let mut kept = KeptWrites::default();
            let mut model = [None; 128];
            for (offset, length, value) in writes {
                kept.insert(offset, vec![value; length].into(), FIRST);
                let offset = usize::try_from(offset).unwrap();
                model[offset..offset + length].fill(Some(value));
            }
            let end = start + length;
            let mut got = [None; 128];
            for (offset, data) in kept.overlay(start, end) {
                let offset = usize::try_from(offset).unwrap();
                for (slot, value) in got[offset..].iter_mut().zip(&data) {
                    prop_assert!(slot.is_none());
                    *slot = Some(*value);
                }
            }
            for (position, value) in (0_u64..).zip(model) {
                let expected = if (start..end).contains(&position) { value } else { None };
                prop_assert_eq!(got[usize::try_from(position).unwrap()], expected);
            }
            let bytes = u64::try_from(model.iter().flatten().count()).unwrap();
            prop_assert_eq!(kept.bytes(), bytes);
        }
    }
}

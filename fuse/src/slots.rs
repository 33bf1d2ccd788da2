//! Which block is in which slot of the cache, and which slot is given up next.
//!
//! ```text
//! slot          0     1     2     3     ...
//! fingerprint | f7  | 0   | f2  | f9  |       0: empty
//! heat        | 2   | 0   | 0   | PIN |       PIN: its bytes are being written
//!                     ^ hand
//! ```
//!
//! The hand goes round: a slot that was used since loses heat, one without any is given up. A
//! new block begins without heat, so that one long scan passes through without driving out
//! what is used again and again; this is the CLOCK of old with a counter of two bits.
//!
//! A block is known by the first 8 bytes of its hash. That two blocks share them does no harm:
//! who reads a slot verifies the whole hash. So about 20 bytes of memory serve a block.
//!
//! Invariant: a slot is in the table exactly if its fingerprint is not 0 and it is not pinned.

use hashbrown::HashTable;

/// The first bytes of a hash; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

/// An index into the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// The slot behind this one.
    pub(crate) const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Fingerprint {
    /// That of a hash; `None` for the one in 2^64 that means "empty".
    pub(crate) fn of(hash: &[u8; 32]) -> Option<Self> {
        let first = hash.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
        Self::from_stored(first)
    }

    /// As it stands in the index.
    pub(crate) const fn stored(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_stored(value: u64) -> Option<Self> {
        if value == 0 { None } else { Some(Self(value)) }
    }
}

const HEAT_MAX: u8 = 3;
const PINNED: u8 = u8::MAX;
const EMPTY: u64 = 0;

/// The slots of a cache.
#[derive(Debug)]
pub(crate) struct Slots {
    capacity: usize,
    fingerprints: Vec<u64>,
    heat: Vec<u8>,
    table: HashTable<u32>,
    hand: usize,
}

impl Slots {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            capacity: Slot(capacity).index(),
            fingerprints: Vec::new(),
            heat: Vec::new(),
            table: HashTable::new(),
            hand: 0,
        }
    }

    /// Takes up the next slot as the index of an earlier process tells it.
    pub(crate) fn restore(&mut self, stored: u64) {
        if self.fingerprints.len() < self.capacity {
            let slot = Slot(u32::try_from(self.fingerprints.len()).unwrap_or(u32::MAX));
            self.fingerprints.push(EMPTY);
            self.heat.push(PINNED);
            self.release(slot, Fingerprint::from_stored(stored));
        }
    }

    /// Blocks that are there.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether the block is there.
    pub(crate) fn has(&self, fingerprint: Fingerprint) -> bool {
        let fingerprints = &self.fingerprints;
        let is_it = |slot: &u32| fingerprints.get(Slot(*slot).index()) == Some(&fingerprint.0);
        self.table.find(fingerprint.0, is_it).is_some()
    }

    /// Where the block is, which is thereby used once more.
    pub(crate) fn find(&mut self, fingerprint: Fingerprint) -> Option<Slot> {
        let fingerprints = &self.fingerprints;
        let is_it = |slot: &u32| fingerprints.get(Slot(*slot).index()) == Some(&fingerprint.0);
        let slot = Slot(*self.table.find(fingerprint.0, is_it)?);
        if let Some(heat) = self.heat.get_mut(slot.index()) {
            *heat = (*heat + 1).min(HEAT_MAX);
        }
        Some(slot)
    }

    /// A slot to write a block to, a new one if there `may_grow` be more, or taken from another
    /// block; it belongs to the caller until [`Self::release`]. `None` while all slots are being
    /// written.
    pub(crate) fn claim(&mut self, may_grow: bool) -> Option<Slot> {
        if may_grow && self.fingerprints.len() < self.capacity {
            let slot = u32::try_from(self.fingerprints.len()).ok()?;
            self.fingerprints.push(EMPTY);
            self.heat.push(PINNED);
            return Some(Slot(slot));
        }
        // After this many steps every slot was met without heat.
        let count = self.fingerprints.len();
        for _ in 0..count * (usize::from(HEAT_MAX) + 1) {
            let index = self.hand;
            self.hand = (self.hand + 1) % count;
            let Some(heat) = self.heat.get_mut(index) else { continue };
            match *heat {
                PINNED => {}
                0 => {
                    *heat = PINNED;
                    let slot = Slot(u32::try_from(index).ok()?);
                    self.unlink(slot);
                    return Some(slot);
                }
                _ => *heat -= 1,
            }
        }
        None
    }

    /// Gives a claimed slot back, with what is in it now. Tells whether the block is found
    /// there: not if it is in another slot already.
    pub(crate) fn release(&mut self, slot: Slot, content: Option<Fingerprint>) -> bool {
        let Some(heat) = self.heat.get_mut(slot.index()) else { return false };
        *heat = 0;
        let Some(fingerprint) = content else { return false };
        let fingerprints = &self.fingerprints;
        let is_it = |other: &u32| fingerprints.get(Slot(*other).index()) == Some(&fingerprint.0);
        if self.table.find(fingerprint.0, is_it).is_some() {
            return false;
        }
        let hash_of = |other: &u32| fingerprints.get(Slot(*other).index()).map_or(0, |own| *own);
        self.table.insert_unique(fingerprint.0, slot.0, hash_of);
        if let Some(own) = self.fingerprints.get_mut(slot.index()) {
            *own = fingerprint.0;
        }
        true
    }

    /// Empties the slot if it still is that of the block. Tells whether it was.
    pub(crate) fn forget(&mut self, slot: Slot, fingerprint: Fingerprint) -> bool {
        let is_its = self.fingerprints.get(slot.index()) == Some(&fingerprint.0);
        let is_pinned = self.heat.get(slot.index()) == Some(&PINNED);
        if is_its && !is_pinned {
            self.unlink(slot);
        }
        is_its && !is_pinned
    }

    fn unlink(&mut self, slot: Slot) {
        let Some(own) = self.fingerprints.get_mut(slot.index()) else { return };
        let fingerprint = std::mem::replace(own, EMPTY);
        if let Ok(entry) = self.table.find_entry(fingerprint, |other| *other == slot.0) {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn print(value: u64) -> Fingerprint {
        Fingerprint::from_stored(value).unwrap()
    }

    fn put(slots: &mut Slots, value: u64) -> Slot {
        let slot = slots.claim(true).unwrap();
        slots.release(slot, Some(print(value)));
        slot
    }

    #[test]
    fn what_is_used_stays_when_a_scan_passes() {
        let mut slots = Slots::new(4);
        for value in 1..=4 {
            put(&mut slots, value);
        }
        for value in 100..200 {
            assert!(slots.find(print(2)).is_some(), "before {value}");
            put(&mut slots, value);
        }
        assert_eq!(slots.len(), 4);
        assert!(slots.find(print(1)).is_none());
    }

    #[test]
    fn a_slot_that_is_written_is_nobodys() {
        let mut slots = Slots::new(2);
        let (one, two) = (slots.claim(true).unwrap(), slots.claim(true).unwrap());
        assert_eq!(slots.claim(true), None);
        assert!(slots.release(one, Some(print(7))));
        assert!(!slots.release(two, Some(print(7))), "it is there already");
        assert_eq!(slots.find(print(7)), Some(one));
        assert!(slots.forget(one, print(7)));
        assert!(!slots.forget(one, print(7)));
        assert_eq!((slots.len(), slots.find(print(7))), (0, None));
    }

    #[test]
    fn nothing_fits_into_nothing() {
        let mut slots = Slots::new(0);
        slots.restore(5);
        assert_eq!(slots.claim(true), None);
        assert_eq!(slots.len(), 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u64),
        Find(u64),
        Forget(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1_u64..30).prop_map(Step::Put),
            (1_u64..30).prop_map(Step::Find),
            (1_u64..30).prop_map(Step::Forget),
        ]
    }

    proptest! {
        /// The slots against a map: nothing is found that was not put there, each slot holds
        /// one block, and never more than the capacity.
        #[test]
        fn it_is_a_bounded_map(capacity in 1_u32..12, steps in prop::collection::vec(step(), 0..200)) {
            let mut slots = Slots::new(capacity);
            let mut content = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Put(value) => {
                        let slot = slots.claim(true).unwrap();
                        content.remove(&slot.0);
                        if slots.release(slot, Some(print(value))) {
                            content.insert(slot.0, value);
                        }
                    }
                    Step::Find(value) => {
                        let found = slots.find(print(value));
                        let expected = content.iter().find(|(_, held)| **held == value);
                        prop_assert_eq!(found, expected.map(|(slot, _)| Slot(*slot)));
                    }
                    Step::Forget(value) => {
                        if let Some(slot) = slots.find(print(value)) {
                            prop_assert!(slots.forget(slot, print(value)));
                            content.remove(&slot.0);
                        }
                    }
                }
                prop_assert_eq!(slots.len(), content.len());
                prop_assert!(slots.fingerprints.len() <= Slot(capacity).index());
            }
        }
    }
}

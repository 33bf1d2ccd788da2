//! A set of windows, kept as disjoint ranges: which windows of a file one layer has entries in.
//!
//! Ranges rather than a bitmap, because one truncate can put a hole over billions of windows
//! and still be one range here. The set may name a window too many (its entries were moved or
//! overwritten since), never one too few.

use std::collections::BTreeMap;

/// Disjoint, not touching ranges: start to end (left out).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowSet(BTreeMap<u64, u64>);

impl WindowSet {
    /// Adds the windows from `start` up to `end` (left out).
    pub(crate) fn insert(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let (mut start, mut end) = (start, end);
        // Ranges that overlap or touch [start, end) begin at or before `end`.
        while let Some((&other_start, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            start = start.min(other_start);
            end = end.max(other_end);
            self.0.remove(&other_start);
        }
        self.0.insert(start, end);
    }

    /// Takes out the windows from `start` up to `end` (left out).
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        while let Some((&other_start, &other_end)) = self.0.range(..end).next_back() {
            if other_end <= start {
                break;
            }
            self.0.remove(&other_start);
            if other_end > end {
                self.0.insert(end, other_end);
            }
            if other_start < start {
                self.0.insert(other_start, start);
                break;
            }
        }
    }

    /// The first window of the range that holds `window`, if one does.
    pub(crate) fn start_of(&self, window: u64) -> Option<u64> {
        let (&start, &end) = self.0.range(..=window).next_back()?;
        (window < end).then_some(start)
    }

    pub(crate) fn contains(&self, window: u64) -> bool {
        self.0.range(..=window).next_back().is_some_and(|(_, &end)| window < end)
    }

    /// The ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|(start, end)| (*start, *end))
    }

    /// How many ranges there are.
    pub(crate) fn ranges(&self) -> usize {
        self.0.len()
    }

    /// Adds all windows of another set.
    pub(crate) fn join(&mut self, other: Self) {
        if self.0.is_empty() {
            *self = other;
            return;
        }
        for (start, end) in other.0 {
            self.insert(start, end);
        }
    }

    /// If there are more ranges than `ranges_max`, joins those that lie nearest to each other, so
    /// that half as many are left.
    pub(crate) fn bound(&mut self, ranges_max: usize) {
        if self.0.len() <= ranges_max {
            return;
        }
        let pairs = self.0.values().zip(self.0.keys().skip(1));
        let mut gaps: Vec<u64> = pairs.map(|(end, next)| next - end).collect();
        let mut surplus = (self.0.len() - ranges_max / 2).min(gaps.len());
        let Some(last) = surplus.checked_sub(1) else { return };
        let (_, widest, _) = gaps.select_nth_unstable(last);
        let widest = *widest;
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (&start, &end) in &self.0 {
            match joined.last_mut() {
                Some(before) if surplus > 0 && start - before.1 <= widest => {
                    before.1 = end;
                    surplus -= 1;
                }
                _ => joined.push((start, end)),
            }
        }
        self.0 = joined.into_iter().collect();
    }

    /// The first window of the set at or behind `window`.
    pub(crate) fn next_from(&self, window: u64) -> Option<u64> {
        if self.contains(window) {
            return Some(window);
        }
        self.0.range(window..).next().map(|(&start, _)| start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_bounded_set_names_all_that_it_did(
            parts in prop::collection::vec((0u64..9, 1u64..5), 0..60),
            ranges_max in 2usize..20,
        ) {
            let mut set = WindowSet::default();
            let mut end = 0;
            for (gap, length) in parts {
                set.insert(end + gap, end + gap + length);
                end += gap + length;
            }
            let before = set.clone();
            set.bound(ranges_max);
            prop_assert!(set.ranges() <= ranges_max);
            prop_assert!((0..end).all(|window| set.contains(window) || !before.contains(window)));
            prop_assert!(set == before || before.ranges() > ranges_max);
            prop_assert!(before.ranges() <= ranges_max || set.ranges() >= ranges_max / 2);
            let mut joined = before.clone();
            joined.join(set.clone());
            prop_assert_eq!(joined, set);
        }

        #[test]
        fn behaves_like_a_set_of_numbers(
            ranges in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..20),
        ) {
            let mut set = WindowSet::default();
            let mut model = BTreeSet::new();
            for (is_added, start, length) in ranges {
                if is_added {
                    set.insert(start, start + length);
                    model.extend(start..start + length);
                } else {
                    set.remove(start, start + length);
                    model.retain(|window| !(start..start + length).contains(window));
                }
            }
            for window in 0..80 {
                let start = (0..=window).rev().take_while(|w| model.contains(w)).last();
                prop_assert_eq!(set.start_of(window), start);
                prop_assert_eq!(set.contains(window), model.contains(&window));
                prop_assert_eq!(set.next_from(window), model.range(window..).next().copied());
            }
            let mut last_end = None;
            for (&start, &end) in &set.0 {
                prop_assert!(start < end);
                prop_assert!(last_end.is_none_or(|last| last < start), "ranges touch");
                last_end = Some(end);
            }
        }
    }
}

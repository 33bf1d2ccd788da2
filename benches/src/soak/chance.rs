//! Chance from a seed: the same seed draws the same numbers.

use slackwater_benches::mix;

/// A source of numbers.
#[derive(Clone, Debug)]
pub(super) struct Chance {
    state: u64,
}

impl Chance {
    pub(super) const fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    /// Another source, which has nothing in common with this one nor with those of other numbers.
    pub(super) const fn branch(&self, number: u64) -> Self {
        Self::new(self.state ^ mix(number.wrapping_add(1)))
    }

    pub(super) const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(1);
        mix(self.state)
    }

    /// A number below `limit`, which is above zero.
    pub(super) const fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// The same for a place in a slice.
    pub(super) fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    pub(super) const fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the items; `None` if there are none.
    pub(super) fn pick<T>(&mut self, mut items: impl ExactSizeIterator<Item = T>) -> Option<T> {
        let count = items.len();
        if count == 0 { None } else { items.nth(self.index(count)) }
    }
}

/// A seed that nobody chose.
pub(super) fn any_seed() -> u64 {
    mix(u64::from(slackwater_benches::wire::random_xid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_again_and_branches_differ() {
        let draw = |mut chance: Chance| (0..100).map(|_| chance.next()).collect::<Vec<_>>();
        assert_eq!(draw(Chance::new(7)), draw(Chance::new(7)));
        let branches = [Chance::new(7).branch(0), Chance::new(7).branch(1), Chance::new(8)];
        let drawn = branches.map(draw);
        assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2]);
        let mut chance = Chance::new(7);
        assert!((0..1000).all(|_| chance.below(3) < 3));
        assert_eq!(chance.pick([0; 0].iter()), None);
    }
}

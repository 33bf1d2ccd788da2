//! Choices by chance for hostile tests of several crates, which include this file as a module.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::time::{SystemTime, UNIX_EPOCH};

/// Choices by a seed that is printed (splitmix64); `SLACKWATER_HOSTILE_SEED` repeats a run.
pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        let given = std::env::var("SLACKWATER_HOSTILE_SEED").ok();
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let seed = given.map_or_else(now, |text| text.parse().unwrap());
        println!("SLACKWATER_HOSTILE_SEED={seed}");
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.draw() % u64::try_from(count).unwrap()).unwrap()
    }

    pub fn is_one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.draw().to_le_bytes()[0]).collect()
    }
}

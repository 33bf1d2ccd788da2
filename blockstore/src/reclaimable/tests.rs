//! Samples: of more pages than there is memory for.

use super::*;
use crate::testing::{World, options};

/// 128 pages of 64 blocks, no block like another.
const BLOCKS: u64 = 128 * 64;

#[test]
fn a_sample_tells_about_as_much_as_the_whole() {
    let world = World::new(options(1 << 20), None);
    let inode = world.create("f");
    for first in (0..BLOCKS).step_by(512) {
        let seeds: Vec<u64> = (first + 1..=first + 512).collect();
        world.put(inode, first, &seeds);
    }
    let path = FilePath::parse("f").unwrap();
    let told = |pages_max| {
        let mut tally = Tally::new(pages_max, &|| true);
        let told = of_file(&world.core, &path, &mut tally).unwrap().unwrap();
        assert!(tally.pages.len() <= pages_max);
        told
    };
    let whole = told(PAGES_MAX);
    assert_eq!((whole.blocks, whole.sampled_one_in), (BLOCKS, 1));
    for pages_max in [64, 16] {
        let sample = told(pages_max);
        assert!(sample.sampled_one_in > 1, "{sample:?}");
        assert!(
            sample.blocks.abs_diff(whole.blocks) <= whole.blocks / 2,
            "{sample:?} of {whole:?}"
        );
        assert!(sample.bytes.abs_diff(whole.bytes) <= whole.bytes / 2, "{sample:?} of {whole:?}");
    }
    // It stops as soon as it is asked to.
    let asked = std::cell::Cell::new(0);
    let is_wanted = || {
        asked.set(asked.get() + 1);
        asked.get() < 10
    };
    let mut tally = Tally::new(PAGES_MAX, &is_wanted);
    assert_eq!(of_file(&world.core, &path, &mut tally).unwrap(), None);
    assert!(asked.get() < 20, "asked {} times", asked.get());
}

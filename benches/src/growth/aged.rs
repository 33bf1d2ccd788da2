//! A disk as it looks after some use, the same on every side: its blocks of data lie apart, were
//! written in no order and partly twice, and some images of it were taken in between.
//!
//! ```text
//! block  0        20        40        60  ...        each one an extent of one block
//!        x . . .  x . . .   x . . .   x              written in shuffled order
//! half of them - image - the other half - image - every fifth again - image
//! ```

use bytes::Bytes;
use slackwater_benches::Content;
use slackwater_blockstore::BLOCK_BYTES_U64;

use crate::failure::Failure;
use crate::stop::Stop;

/// Size of the disk.
pub(crate) const SIZE_BYTES: u64 = 8 << 30;

/// Blocks of data, and extents, as no two of them touch.
pub(crate) const EXTENTS: u64 = 100_000;

/// From one block of data to the next.
const STRIDE_BLOCKS: u64 = SIZE_BYTES / BLOCK_BYTES_U64 / EXTENTS;

/// Coprime to the number of extents, so that steps of this length visit each one once.
const SHUFFLE_STEP: u64 = 61_803;

/// How many blocks are written before each image.
const PHASES: [u64; 3] = [EXTENTS / 2, EXTENTS / 2, EXTENTS / 5];

/// Blocks between two looks whether to stop.
const STOP_PERIOD_BLOCKS: u64 = 1000;

/// A side that has such a disk.
pub(crate) trait Disk {
    /// Writes one block of the disk.
    fn write(&mut self, offset_bytes: u64, block: Bytes) -> Result<(), Failure>;

    /// Makes what was written durable, and takes an image that is kept.
    fn keep_image(&mut self) -> Result<(), Failure>;
}

/// Ages an empty disk.
pub(crate) fn age(disk: &mut impl Disk, seed: u64, stop: &Stop) -> Result<(), Failure> {
    let mut content = Content::new(seed);
    let mut step = 0;
    for blocks in PHASES {
        for _ in 0..blocks {
            if step % STOP_PERIOD_BLOCKS == 0 {
                stop.check()?;
            }
            disk.write(offset_bytes(step), content.blocks(1))?;
            step += 1;
        }
        disk.keep_image()?;
    }
    Ok(())
}

/// Where the block of that step lies.
const fn offset_bytes(step: u64) -> u64 {
    step * SHUFFLE_STEP % EXTENTS * STRIDE_BLOCKS * BLOCK_BYTES_U64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;

    #[derive(Default)]
    struct Recorded {
        offsets: Vec<u64>,
        images: Vec<usize>,
    }

    impl Disk for Recorded {
        fn write(&mut self, offset_bytes: u64, block: Bytes) -> Result<(), Failure> {
            assert_eq!(block.len(), 4096);
            self.offsets.push(offset_bytes);
            Ok(())
        }

        fn keep_image(&mut self) -> Result<(), Failure> {
            self.images.push(self.offsets.len());
            Ok(())
        }
    }

    #[test]
    fn an_aged_disk_has_its_extents_apart_and_partly_written_twice() {
        let stop = Stop::listen(Duration::from_secs(600)).unwrap();
        let mut disk = Recorded::default();
        age(&mut disk, 1, &stop).unwrap();
        assert_eq!(disk.images, [50_000, 100_000, 120_000]);
        let distinct: HashSet<u64> = disk.offsets.iter().copied().collect();
        assert_eq!(distinct.len(), 100_000);
        let mut sorted: Vec<u64> = distinct.into_iter().collect();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= 2 * BLOCK_BYTES_U64));
        assert!(sorted.last().is_some_and(|last| last + BLOCK_BYTES_U64 <= SIZE_BYTES));
        assert!(disk.offsets.windows(2).any(|pair| pair[1] < pair[0]), "written in order");
    }
}

//! What the indexes take of memory and disk, by a line through what a store of this process
//! takes at growing sizes.
//!
//! The caches of the store are small, and full before the first point: what then still grows with
//! the data cannot be given back.

use std::path::Path;

use slackwater_blockstore::{BLOCK_BYTES_U64, Options, Store};

use super::fill::{self, Filled};
use super::fit::slope;
use super::{folder, row};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Memory of the store: twice the least, with which most of the time would go by in sorting the
/// index on the disk.
const MEMORY_BYTES: u64 = 2 * Options::MEMORY_BYTES_MIN;

/// Blocks before the first point: the caches are full then.
const FIRST_BLOCKS: u64 = 3_000_000;

/// Blocks from one point to the next.
const STEP_BLOCKS: u64 = 250_000;

/// For a first look the blocks are so many times fewer, and the line is as much rougher.
const QUICK_DIVISOR: u64 = 4;

/// Points: many, as the allocator keeps now more and now less of what it was given back.
const POINTS: u64 = 13;

/// What the indexes may take of memory, a TiB of unique data.
const MEBIBYTES_MAX: f64 = 1024.0;

const BYTES_PER_MEBIBYTE: f64 = 1_048_576.0;

/// Blocks of a TiB.
const BLOCKS_PER_TEBIBYTE: u64 = (1 << 40) / BLOCK_BYTES_U64;

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let divisor = if context.is_quick { QUICK_DIVISOR } else { 1 };
    let blocks_of = |point: u64| (FIRST_BLOCKS + STEP_BLOCKS * point) / divisor;
    let folder = folder(context)?;
    let data_dir = folder.path().join("data");
    let mut options = fill::options(&data_dir);
    options.memory_bytes = MEMORY_BYTES;
    let store = Store::open(options)?;
    let mut filled = Filled::new(&store, blocks_of(POINTS))?;
    let (mut resident, mut on_disk) = (Vec::new(), Vec::new());
    for point in 0..POINTS {
        let blocks = blocks_of(point);
        filled.grow(&store, blocks, stop)?;
        store.checkpoint()?;
        let tebibytes = to_float(blocks) / to_float(BLOCKS_PER_TEBIBYTE);
        let memory = to_float(resident_bytes()?) / BYTES_PER_MEBIBYTE;
        let disk = to_float(files_bytes(&data_dir.join("index"))?) / BYTES_PER_MEBIBYTE;
        progress(&format!("{blocks} blocks: {memory:.1} MiB resident, {disk:.1} MiB on disk"));
        resident.push((tebibytes, memory));
        on_disk.push((tebibytes, disk));
    }
    let told = format!(
        "a TiB of unique 4 KiB blocks, least squares over {POINTS} sizes up to {} blocks",
        blocks_of(POINTS - 1)
    );
    let fitted = |points: &[(f64, f64)]| {
        slope(points).ok_or_else(|| Failure::Unfit("the points have no line".to_owned()))
    };
    let memory = Row {
        samples: vec![fitted(&resident)?],
        target: Some(Target::MedianAtMost(MEBIBYTES_MAX)),
        ..row("index-memory-resident", "MiB", format!("resident memory that grows with {told}"))
    };
    let disk = Row {
        samples: vec![fitted(&on_disk)?],
        ..row("index-memory-disk", "MiB", format!("index on disk for {told}"))
    };
    Ok(vec![memory, disk])
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^52")]
const fn to_float(count: u64) -> f64 {
    count as f64
}

/// Bytes of memory that this process has for itself: what files are mapped is the kernel's.
fn resident_bytes() -> Result<u64, Failure> {
    let path = Path::new("/proc/self/status");
    let text = std::fs::read_to_string(path).map_err(Failure::at("read", path))?;
    resident_bytes_in(&text)
        .ok_or_else(|| Failure::Unfit(format!("{} told no memory", path.display())))
}

fn resident_bytes_in(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let told = lines.find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kibibytes: u64 = told.trim().strip_suffix(" kB")?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The lengths of the files of a folder, summed up.
fn files_bytes(folder: &Path) -> Result<u64, Failure> {
    let failed = || Failure::at("look at", folder);
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        // What the index deletes in the background may be gone already.
        bytes += entry.metadata().map_or(0, |metadata| metadata.len());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_of_a_process() {
        let status = "VmRSS:\t   20 kB\nRssAnon:\t      12 kB\nRssFile:\t 8 kB\n";
        assert_eq!(resident_bytes_in(status), Some(12 * 1024));
        assert_eq!(resident_bytes_in("VmRSS: 20 kB\n"), None);
        assert!(resident_bytes().unwrap() > 0);
    }

    #[test]
    fn the_files_of_a_folder_are_summed_up() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), [0; 10]).unwrap();
        std::fs::write(folder.path().join("b"), [0; 7]).unwrap();
        assert_eq!(files_bytes(folder.path()).unwrap(), 17);
    }
}

//! Reading through many layers against reading through one, in a store of this process.
//!
//! Both files are written with the same pattern in the same order, so that both end in as many
//! runs of blocks; but in the deep one a snapshot is taken after each pass, so that each pass is
//! a layer of its own, and every layer has blocks in every window. They are written by turns, pass
//! by pass. After an opening both are read; what is read first also warms what both need, so each
//! round opens the store for each order.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater_benches::Content;
use slackwater_blockstore::{
    BLOCK_BYTES, BLOCK_BYTES_U64, FilePath, InodeId, Options, SnapshotRequest, Source, Stability,
    Store,
};

use super::{folder, row};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Layers of the deep file.
const LAYERS: u64 = 64;

/// Size of each file.
const FILE_BLOCKS: u64 = 32_768;

/// A pass above the first writes one block in each so many: two in every window of 256.
const PASS_STRIDE_BLOCKS: u64 = 128;

/// Blocks of one large read: a window.
const WINDOW_BLOCKS: u64 = 256;

/// Memory of the store: its cache of blocks holds both files.
const MEMORY_BYTES: u64 = 2 << 30;

/// Reads of 4 KiB go from a block to the one so many further: coprime to the number of blocks,
/// so that each has its turn, and never one that lies beside the last.
const READ_STRIDE_BLOCKS: u64 = 12_289;

/// How long one sample of reads of 4 KiB takes.
const SAMPLE_TIME: Duration = Duration::from_millis(200);

/// Samples of these for each order of a round: they are short, and what else the machine does weighs on them.
const CACHED_TURNS: usize = 2;

/// The deep file may be slower by this much.
const RATIO_MIN: f64 = 0.9;

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    progress(&format!("a file of {LAYERS} layers and one of a single layer"));
    let folder = folder(context)?;
    let data_dir = folder.path().join("data");
    let mut store = Store::open(options(&data_dir))?;
    let files = write_passes(&store, stop)?;
    let of = |key: &str, unit: &str, work: &str| Row {
        subject: format!("{LAYERS} layers"),
        rival: Some("1 layer".to_owned()),
        higher_is_better: true,
        ..row(key, unit, format!("{work}, in the store"))
    };
    let target = Some(Target::RatioAtLeast(RATIO_MIN));
    let mut cached =
        Row { target, ..of("depth-random-cached", "op/s", "4 KiB random read, blocks cached") };
    let mut anew = Row {
        target,
        ..of(
            "depth-sequential-anew",
            "MiB/s",
            "1 MiB sequential read after opening the store, windows resolved anew",
        )
    };
    let mut first_touch = of(
        "depth-first-touch",
        "op/s",
        "first 4 KiB read in each window after opening the store, windows resolved anew",
    );
    progress("reads by turns");
    for _ in 0..context.rounds {
        for deep_first in [true, false] {
            store = reopen(store, &data_dir)?;
            files
                .by_turns(deep_first, &mut first_touch, |file| touch_windows(&store, file, stop))?;
            store = reopen(store, &data_dir)?;
            files.by_turns(deep_first, &mut anew, |file| read_sequentially(&store, file, stop))?;
            // All is cached from here on.
            for _ in 0..CACHED_TURNS {
                files
                    .by_turns(deep_first, &mut cached, |file| read_randomly(&store, file, stop))?;
            }
        }
    }
    Ok(vec![cached, anew, first_touch])
}

/// The two files.
#[derive(Clone, Copy)]
struct Files {
    deep: InodeId,
    flat: InodeId,
}

impl Files {
    /// One sample of each.
    fn by_turns(
        self,
        deep_first: bool,
        row: &mut Row,
        sample: impl Fn(InodeId) -> Result<f64, Failure>,
    ) -> Result<(), Failure> {
        if deep_first {
            row.samples.push(sample(self.deep)?);
        }
        row.rival_samples.push(sample(self.flat)?);
        if !deep_first {
            row.samples.push(sample(self.deep)?);
        }
        Ok(())
    }
}

/// Closes the store and opens it again: nothing of it is in its own memory then, but in the page
/// cache.
fn reopen(store: Arc<Store>, data_dir: &Path) -> Result<Arc<Store>, Failure> {
    store.close()?;
    // The lock on the folder goes with the store that has it.
    drop(store);
    Ok(Store::open(options(data_dir))?)
}

fn options(data_dir: &Path) -> Options {
    let mut options = Options::new(data_dir);
    options.memory_bytes = MEMORY_BYTES;
    options
}

/// Writes all passes to both files; of the deep one each becomes a layer.
fn write_passes(store: &Store, stop: &Stop) -> Result<Files, Failure> {
    let (deep_path, flat_path) = (FilePath::parse("deep.img")?, FilePath::parse("flat.img")?);
    let create = |path| store.create_file(path, FILE_BLOCKS * BLOCK_BYTES_U64);
    let deep = create(&deep_path)?.attributes.inode;
    let flat = create(&flat_path)?.attributes.inode;
    let mut content = Content::new(31);
    for file in [deep, flat] {
        for first in (0..FILE_BLOCKS).step_by(1024) {
            let data = content.blocks(1024);
            store.write(file, first * BLOCK_BYTES_U64, data, Stability::Unstable)?;
        }
        store.commit(file)?;
    }
    for pass in 1..LAYERS {
        stop.check()?;
        store.snapshot(&deep_path, SnapshotRequest::default())?;
        // Who was written last has no place of its own.
        let turns = if pass % 2 == 0 { [deep, flat] } else { [flat, deep] };
        for file in turns {
            for strip in 0..FILE_BLOCKS / PASS_STRIDE_BLOCKS {
                let block = strip * PASS_STRIDE_BLOCKS + 2 * pass % PASS_STRIDE_BLOCKS;
                let data = content.blocks(1);
                store.write(file, block * BLOCK_BYTES_U64, data, Stability::Unstable)?;
            }
            store.commit(file)?;
        }
    }
    Ok(Files { deep, flat })
}

/// Reads one block; answers an error for a short read.
fn read(store: &Store, file: InodeId, block: u64, bytes: usize) -> Result<(), Failure> {
    let reply = store.read(Source::File(file), block * BLOCK_BYTES_U64, bytes)?;
    if reply.length_bytes == bytes {
        return Ok(());
    }
    Err(Failure::Unfit(format!("a read gave {} bytes, not {bytes}", reply.length_bytes)))
}

/// Reads a second at 4 KiB, spread over the file.
fn read_randomly(store: &Store, file: InodeId, stop: &Stop) -> Result<f64, Failure> {
    stop.check()?;
    let (start, mut block, mut reads) = (Instant::now(), 0, 0.0);
    while start.elapsed() < SAMPLE_TIME {
        for _ in 0..100 {
            block = (block + READ_STRIDE_BLOCKS) % FILE_BLOCKS;
            read(store, file, block, BLOCK_BYTES)?;
            reads += 1.0;
        }
    }
    Ok(reads / start.elapsed().as_secs_f64())
}

/// MiB a second over the whole file.
fn read_sequentially(store: &Store, file: InodeId, stop: &Stop) -> Result<f64, Failure> {
    stop.check()?;
    let (start, mut mebibytes) = (Instant::now(), 0.0);
    for block in (0..FILE_BLOCKS).step_by(256) {
        read(store, file, block, 256 * BLOCK_BYTES)?;
        mebibytes += 1.0;
    }
    Ok(mebibytes / start.elapsed().as_secs_f64())
}

/// Reads a second at 4 KiB, one in each window.
fn touch_windows(store: &Store, file: InodeId, stop: &Stop) -> Result<f64, Failure> {
    stop.check()?;
    let (start, mut reads) = (Instant::now(), 0.0);
    let windows = FILE_BLOCKS / WINDOW_BLOCKS;
    for step in 0..windows {
        // Coprime to the number of windows, which is a power of two.
        let window = step * 37 % windows;
        read(store, file, window * WINDOW_BLOCKS, BLOCK_BYTES)?;
        reads += 1.0;
    }
    Ok(reads / start.elapsed().as_secs_f64())
}

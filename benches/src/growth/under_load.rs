//! The latency of a read while the store works in the background and is written to, against that
//! of an idle one: the 99th percentile of reads one after the other.
//!
//! ```text
//! prepare  1,000 clones with data of their own; files written in strips, one kept, two doomed
//! idle     reads alone
//! loaded   reads, while clones and doomed files are deleted - so the store reclaims, then
//!          compacts the segments whose greater part is dead - and a stream of 1 MiB is written;
//!          until all is reclaimed and something was compacted; the slowest second counts
//! ```

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{Advice, fadvise};
use slackwater_benches::Content;
use slackwater_blockstore::BLOCK_BYTES_U64;
use slackwater_client::ClientError;
use slackwater_client::types::{CreateSnapshot, SnapshotId, Stats};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::callers::{self, call_all};
use super::host::Host;
use super::{folder, row};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::load::{self, Amount, CommitPace, Load, Work};
use crate::row::{Row, Target};
use crate::stop::Stop;

/// The loaded side may take this many times as long.
const SLOWDOWN_MAX: f64 = 3.0;

/// How long reads of one kind are measured at a time.
const READ_TIME: Duration = Duration::from_secs(1);

/// How long the cache is warmed up before.
const WARM_UP_TIME: Duration = Duration::from_millis(300);

/// How long a stream writes before it is looked whether the reads are over.
const STREAM_TIME: Duration = Duration::from_secs(1);

/// Most times that reads of all kinds are measured until the store has done its work.
const LOADED_READS_MAX: usize = 20;

/// Clones that are deleted in one sample.
const CLONES: u64 = 1000;

/// The same for a first look.
const CLONES_QUICK: u64 = 200;

/// Data of its own that each has.
const CLONE_BLOCKS: u64 = 16;

/// Strips of the file that is kept, and of each that is doomed.
const STRIPS: u64 = 64;

/// Blocks of one strip: 1 MiB.
const STRIP_BLOCKS: u64 = 256;

/// Files that are doomed: with one that is kept, two thirds of each segment are dead.
const DOOMED: u64 = 2;

/// The file whose blocks are all cached.
const CACHED_BYTES: u64 = 64 << 20;

/// The files of which few blocks are: they are far larger than the block cache.
const LARGE_BYTES: u64 = 2 << 30;

/// The same for a first look.
const LARGE_BYTES_QUICK: u64 = 1 << 29;

/// The store is quiet after so long without any work: some periods of its background's.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// Far from those of other content.
const SEED_FIRST: u64 = 1000;

const CACHED_FILE: &str = "cached.img";
const LARGE_FILE: &str = "large.img";
const COLD_FILE: &str = "cold.img";
const STREAM_FILE: &str = "stream.img";
const KEPT_FILE: &str = "kept.img";

/// Where the blocks are that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the memory of the server.
    BlockCache,
    /// In that of the kernel.
    PageCache,
    Disk,
}

impl Place {
    const ALL: [Self; 3] = [Self::BlockCache, Self::PageCache, Self::Disk];

    /// A row without samples.
    fn row(self, clones: u64) -> Row {
        let (key, what) = match self {
            Self::BlockCache => ("cached", "cached"),
            Self::PageCache => ("uncached", "in the page cache alone"),
            Self::Disk => ("cold", "in no cache"),
        };
        // Of reads from the disk most is the disk's, which the stream keeps busy.
        let target = (self != Self::Disk).then_some(Target::RatioAtLeast(1.0 / SLOWDOWN_MAX));
        Row {
            subject: format!("compaction, reclaim of {clones} clones, a write stream"),
            rival: Some("idle".to_owned()),
            target,
            ..row(
                &format!("latency-under-load-{key}"),
                "us",
                format!("p99 of a 4 KiB read over NFS, depth 1, {what}"),
            )
        }
    }
}

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    progress("files to read");
    let mut site = Site::prepare(context, stop)?;
    let mut rows = Place::ALL.map(|place| place.row(site.clones));
    for _ in 0..context.rounds {
        progress("clones and files to take back");
        let image = site.prepare_work(stop)?;
        // The store writes past the page cache.
        warm(&site.warm_segments)?;
        progress("reads by turns");
        let idle = site.read_all(stop)?;
        let loaded = site.read_all_loaded(stop)?;
        for ((row, idle), loaded) in rows.iter_mut().zip(idle).zip(loaded) {
            row.rival_samples.push(idle);
            row.samples.push(loaded);
        }
        site.finish_work(image, stop)?;
    }
    Ok(rows.into())
}

/// The server.
struct Site {
    runtime: Runtime,
    // Killed before its folder goes.
    host: Host,
    content: Content,
    data_dir: PathBuf,
    clones: u64,
    large_bytes: u64,
    /// Those with the blocks that are to be in the page cache.
    warm_segments: Vec<PathBuf>,
    /// Those with the blocks that are to be on the disk alone.
    cold_segments: Vec<PathBuf>,
    /// The one used last: no content is written twice, and no row of places read twice.
    seed: AtomicU64,
    _folder: TempDir,
}

impl Site {
    fn prepare(context: &Context, stop: &Stop) -> Result<Self, Failure> {
        let folder = folder(context)?;
        let data_dir = folder.path().join("data");
        let host = Host::start(context, &data_dir, stop)?;
        let (runtime, content) = (callers::runtime()?, Content::new(51));
        let (clones, large_bytes) = if context.is_quick {
            (CLONES_QUICK, LARGE_BYTES_QUICK)
        } else {
            (CLONES, LARGE_BYTES)
        };
        let seed = AtomicU64::new(SEED_FIRST);
        let mut site = Self {
            runtime,
            host,
            content,
            data_dir,
            clones,
            large_bytes,
            warm_segments: Vec::new(),
            cold_segments: Vec::new(),
            seed,
            _folder: folder,
        };
        for place in Place::ALL {
            let before = site.segments()?;
            let (file, bytes) = site.file(place);
            let load = site.stream(file, Amount::Bytes(bytes));
            load::run(&site.host.target(), &load, stop)?;
            let mut segments = site.segments()?;
            segments.retain(|segment| !before.contains(segment));
            match place {
                Place::BlockCache => {}
                Place::PageCache => site.warm_segments = segments,
                Place::Disk => site.cold_segments = segments,
            }
        }
        Ok(site)
    }

    /// The file that holds blocks in such a place, and its size.
    const fn file(&self, place: Place) -> (&'static str, u64) {
        match place {
            Place::BlockCache => (CACHED_FILE, CACHED_BYTES),
            Place::PageCache => (LARGE_FILE, self.large_bytes),
            Place::Disk => (COLD_FILE, self.large_bytes),
        }
    }

    /// The files that the store writes to.
    fn segments(&self) -> Result<Vec<PathBuf>, Failure> {
        let folder = self.data_dir.join("log");
        let failed = || Failure::at("look at", &folder);
        let entries = std::fs::read_dir(&folder).map_err(failed())?;
        entries.map(|entry| Ok(entry.map_err(failed())?.path())).collect()
    }

    /// A stream of new data.
    fn stream(&self, file: &str, amount: Amount) -> Load {
        Load {
            work: Work::SequentialWrite,
            block_bytes: 1 << 20,
            depth: 1,
            connections: 1,
            span_bytes: match amount {
                Amount::Bytes(bytes) => bytes,
                Amount::Time(_) => 16 << 30,
            },
            amount,
            commit: CommitPace::EverySecond,
            seed: self.seed.fetch_add(1, Ordering::Relaxed),
            file: file.to_owned(),
            is_verified: false,
        }
    }

    /// Makes what is to be taken back, and waits until the store is idle.
    fn prepare_work(&mut self, stop: &Stop) -> Result<SnapshotId, Failure> {
        let client = self.host.client.clone();
        let image = self.runtime.block_on(async {
            client.create_file("image.img", CLONE_BLOCKS * BLOCK_BYTES_U64).await?;
            let request =
                CreateSnapshot { path: "image.img".to_owned(), ..CreateSnapshot::default() };
            Ok::<_, ClientError>(client.create_snapshot(&request).await?.id)
        })?;
        let mut content = self.content.clone();
        let data: Vec<_> = (0..self.clones).map(|_| content.blocks(CLONE_BLOCKS)).collect();
        call_all(&self.runtime, self.clones, stop, {
            let (client, data) = (client.clone(), data);
            move |index| {
                let (client, path) = (client.clone(), clone_path(index));
                let data = usize::try_from(index).ok().and_then(|index| data.get(index).cloned());
                async move {
                    client.create_clone(image, &path).await?;
                    client.write_bytes(&path, 0, data.unwrap_or_default()).await?;
                    Ok(())
                }
            }
        })?;
        self.content = content;
        self.write_strips(stop)?;
        self.host.wait_until_quiet(&self.runtime, QUIET_TIME, stop)?;
        Ok(image)
    }

    /// Writes the kept file and the doomed ones strip by strip, so that they share segments.
    fn write_strips(&mut self, stop: &Stop) -> Result<(), Failure> {
        let client = &self.host.client;
        let paths = || (0..DOOMED).map(doomed_path).chain([KEPT_FILE.to_owned()]);
        let content = &mut self.content;
        self.runtime.block_on(async {
            for path in paths() {
                client.create_file(&path, STRIPS * STRIP_BLOCKS * BLOCK_BYTES_U64).await?;
            }
            for strip in 0..STRIPS {
                stop.check()?;
                for path in paths() {
                    let data = content.blocks(STRIP_BLOCKS);
                    let offset_bytes = strip * STRIP_BLOCKS * BLOCK_BYTES_U64;
                    client.write_bytes(&path, offset_bytes, data).await?;
                }
            }
            Ok(())
        })
    }

    /// One sample of reads of each kind, in microseconds.
    fn read_all(&self, stop: &Stop) -> Result<[f64; 3], Failure> {
        let mut micros = [0.0; 3];
        for (micros, place) in micros.iter_mut().zip(Place::ALL) {
            *micros = self.read(place, stop)?;
        }
        Ok(micros)
    }

    fn read(&self, place: Place, stop: &Stop) -> Result<f64, Failure> {
        let target = self.host.target();
        match place {
            Place::BlockCache => {
                load::run(&target, &self.read_for(place, WARM_UP_TIME), stop)?;
            }
            Place::PageCache => {}
            Place::Disk => evict(&self.cold_segments)?,
        }
        let measured = load::run(&target, &self.read_for(place, READ_TIME), stop)?;
        Ok(measured.p99.as_secs_f64() * 1e6)
    }

    fn read_for(&self, place: Place, time: Duration) -> Load {
        let (file, span_bytes) = self.file(place);
        Load {
            work: Work::RandomRead,
            block_bytes: 4096,
            depth: 1,
            connections: 1,
            span_bytes,
            amount: Amount::Time(time),
            commit: CommitPace::AtEnd,
            seed: self.seed.fetch_add(1, Ordering::Relaxed),
            file: file.to_owned(),
            is_verified: false,
        }
    }

    /// The same while the store works.
    fn read_all_loaded(&self, stop: &Stop) -> Result<[f64; 3], Failure> {
        let before = self.runtime.block_on(self.host.client.stats())?;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let deleting = scope.spawn(|| self.delete_work(stop));
            let writing = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let stream = self.stream(STREAM_FILE, Amount::Time(STREAM_TIME));
                    load::run(&self.host.target(), &stream, stop)?;
                }
                Ok::<_, Failure>(())
            });
            let micros = self.read_until_worked(&before, stop);
            is_over.store(true, Ordering::Relaxed);
            let ended = || Failure::Unfit("a thread that loads the server ended".to_owned());
            deleting.join().map_err(|_| ended())??;
            writing.join().map_err(|_| ended())??;
            micros
        })
    }

    /// The slowest samples of reads until the store has done its work.
    fn read_until_worked(&self, before: &Stats, stop: &Stop) -> Result<[f64; 3], Failure> {
        let mut slowest = [0.0; 3];
        let mut done = String::new();
        for _ in 0..LOADED_READS_MAX {
            for (slowest, micros) in slowest.iter_mut().zip(self.read_all(stop)?) {
                *slowest = f64::max(*slowest, micros);
            }
            let stats = self.runtime.block_on(self.host.client.stats())?;
            let reclaimed = stats.reclaimed_entries - before.reclaimed_entries;
            let compacted = stats.compacted_bytes - before.compacted_bytes;
            if reclaimed >= self.clones && compacted > 0 {
                return Ok(slowest);
            }
            done = format!("{reclaimed} entries were reclaimed, {compacted} bytes compacted");
        }
        Err(Failure::Unfit(format!(
            "while all kinds were read {LOADED_READS_MAX} times only {done}"
        )))
    }

    /// Deletes the clones, then the doomed files.
    fn delete_work(&self, stop: &Stop) -> Result<(), Failure> {
        let (client, clones) = (self.host.client.clone(), self.clones);
        call_all(&self.runtime, clones + DOOMED, stop, move |index| {
            let client = client.clone();
            async move {
                match index.checked_sub(clones) {
                    None => client.delete_file(&clone_path(index)).await,
                    Some(doomed) => client.delete_file(&doomed_path(doomed)).await,
                }
            }
        })?;
        Ok(())
    }

    /// Deletes what a sample leaves behind.
    fn finish_work(&self, image: SnapshotId, stop: &Stop) -> Result<(), Failure> {
        let client = &self.host.client;
        self.runtime.block_on(async {
            for path in [KEPT_FILE, STREAM_FILE, "image.img"] {
                client.delete_file(path).await?;
            }
            client.delete_snapshot(image).await
        })?;
        self.host.wait_until_quiet(&self.runtime, QUIET_TIME, stop)
    }
}

fn clone_path(index: u64) -> String {
    format!("clones/{index}.img")
}

fn doomed_path(index: u64) -> String {
    format!("doomed-{index}.img")
}

/// Reads files into the page cache.
fn warm(files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        // Compaction may have moved what little else the last one held.
        let Ok(mut file) = File::open(path) else { continue };
        std::io::copy(&mut file, &mut std::io::sink()).map_err(Failure::at("read", path))?;
    }
    Ok(())
}

/// Drops files from the page cache.
fn evict(files: &[PathBuf]) -> Result<(), Failure> {
    for path in files {
        // Compaction may have moved what little else the last one held.
        let Ok(file) = File::open(path) else { continue };
        fadvise(&file, 0, None, Advice::DontNeed)
            .map_err(|error| Failure::at("evict", path)(error.into()))?;
    }
    Ok(())
}

//! Clone of an aged disk: in a store of this process and over REST, against FICLONE on XFS and
//! on btrfs.
//!
//! The rival is the system call itself, with no start of a program in it, and is not asked to
//! sync what it did; a clone of ours is durable when it is answered.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use slackwater_blockstore::{
    FilePath, InodeId, Options, SnapshotId, SnapshotRequest, Stability, Store,
};
use slackwater_client::{RetryPolicy, types};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::aged::{self, Disk};
use super::callers;
use super::host::Host;
use super::{folder, median_millis, millis, row};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::mount::{Kind, Mount};
use crate::process::{command, output};
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Clones of ours whose median is one sample.
const CLONES_A_SAMPLE: usize = 50;

/// Clones before these: caches and code are warm then.
const WARM_UP_CLONES: usize = 20;

/// From the end of a rival's turn until ours: the disk below is still at work for a while with
/// what the rival had written.
const SETTLING_TIME: Duration = Duration::from_secs(1);

/// Size of the rivals' file systems: the blocks of data, those written again and the metadata of
/// all copies fit well.
const IMAGE_BYTES: u64 = 16 << 30;

/// What a clone in the store must be ahead of XFS by.
const STORE_SPEEDUP_MIN: f64 = 5000.0;

/// What a clone over REST must be ahead of XFS by.
const REST_SPEEDUP_MIN: f64 = 500.0;

/// The path of the disk.
const SOURCE: &str = "source.img";

/// The path of its clone, deleted again each time.
const CLONE: &str = "clone.img";

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    progress("an aged disk in two stores");
    let in_store = InStore::prepare(context, stop)?;
    let over_rest = OverRest::prepare(context, stop)?;
    let mut rows = Vec::new();
    for kind in [Kind::Xfs, Kind::Btrfs] {
        progress(&format!("an aged disk on {}, and clones by turns", kind.name()));
        let [mut store, mut rest] = rows_against(kind);
        match alternate(context, kind, [&mut store, &mut rest], (&in_store, &over_rest), stop) {
            Err(failure) if failure.is_stop() => return Err(failure),
            Err(failure) => {
                for row in [&mut store, &mut rest] {
                    row.not_run = Some(failure.to_string());
                }
            }
            Ok(()) => {}
        }
        rows.extend([store, rest]);
    }
    Ok(rows)
}

/// The rows against one rival, without samples.
fn rows_against(kind: Kind) -> [Row; 2] {
    let of = |way: &str, text: &str, speedup_min: f64| Row {
        rival: Some(format!("FICLONE on {}", kind.name())),
        target: (kind == Kind::Xfs).then_some(Target::RatioAtLeast(speedup_min)),
        ..row(
            &format!("clone-reflink-{way}-{}", kind.name().to_lowercase()),
            "ms",
            format!("clone of an aged 8 GiB disk of 100,000 extents, {text}"),
        )
    };
    [of("store", "in the store", STORE_SPEEDUP_MIN), of("rest", "over REST", REST_SPEEDUP_MIN)]
}

/// Takes the samples of one rival's rows.
fn alternate(
    context: &Context,
    kind: Kind,
    rows: [&mut Row; 2],
    (in_store, over_rest): (&InStore, &OverRest),
    stop: &Stop,
) -> Result<(), Failure> {
    let rival = Reflink::prepare(kind, context, stop)?;
    let [store, rest] = rows;
    for _ in 0..context.rounds {
        stop.check()?;
        std::thread::sleep(SETTLING_TIME);
        store.samples.push(in_store.sample()?);
        rest.samples.push(over_rest.sample(stop)?);
        let taken = rival.sample()?;
        store.rival_samples.push(taken);
        rest.rival_samples.push(taken);
    }
    Ok(())
}

/// The disk in a store of this process.
struct InStore {
    // Dropped before its folder.
    store: Arc<Store>,
    snapshot: SnapshotId,
    target: FilePath,
    _folder: TempDir,
}

/// A disk in a store while it is aged.
struct StoreDisk<'a> {
    store: &'a Store,
    path: FilePath,
    inode: InodeId,
    /// The images, the latest one last.
    images: Vec<SnapshotId>,
}

impl Disk for StoreDisk<'_> {
    fn write(&mut self, offset_bytes: u64, block: Bytes) -> Result<(), Failure> {
        self.store.write(self.inode, offset_bytes, block, Stability::Unstable)?;
        Ok(())
    }

    fn keep_image(&mut self) -> Result<(), Failure> {
        let request = SnapshotRequest::default();
        self.images.push(self.store.snapshot(&self.path, request)?.id);
        Ok(())
    }
}

/// Makes an aged disk in the store, and answers its latest snapshot.
fn age_in(store: &Store, seed: u64, stop: &Stop) -> Result<SnapshotId, Failure> {
    let path = FilePath::parse(SOURCE)?;
    let inode = store.create_file(&path, aged::SIZE_BYTES)?.attributes.inode;
    let mut disk = StoreDisk { store, path, inode, images: Vec::new() };
    aged::age(&mut disk, seed, stop)?;
    disk.images.pop().ok_or_else(|| Failure::Unfit("the disk has no image".to_owned()))
}

impl InStore {
    fn prepare(context: &Context, stop: &Stop) -> Result<Self, Failure> {
        let folder = folder(context)?;
        let store = Store::open(Options::new(folder.path()))?;
        let snapshot = age_in(&store, 11, stop)?;
        Ok(Self { store, snapshot, target: FilePath::parse(CLONE)?, _folder: folder })
    }

    /// The median of some clones, in milliseconds; their deletion is not timed.
    fn sample(&self) -> Result<f64, Failure> {
        let mut taken = Vec::new();
        for _ in 0..WARM_UP_CLONES + CLONES_A_SAMPLE {
            let start = Instant::now();
            self.store.clone_snapshot(self.snapshot, &self.target)?;
            taken.push(start.elapsed());
            self.store.remove_path(&self.target)?;
        }
        Ok(median_millis(taken.get(WARM_UP_CLONES..).unwrap_or_default()))
    }
}

/// The disk at a server.
struct OverRest {
    runtime: Runtime,
    // Killed before its folder goes.
    host: Host,
    snapshot: types::SnapshotId,
    _folder: TempDir,
}

impl OverRest {
    fn prepare(context: &Context, stop: &Stop) -> Result<Self, Failure> {
        let folder = folder(context)?;
        let data_dir = folder.path().join("data");
        let store = Store::open(Options::new(&data_dir))?;
        let snapshot = super::snapshot_id(age_in(&store, 12, stop)?)?;
        store.close()?;
        drop(store);
        let host = Host::start(context, &data_dir, stop)?;
        Ok(Self { runtime: callers::runtime()?, host, snapshot, _folder: folder })
    }

    /// The median of some clones, in milliseconds; their deletion is not timed.
    fn sample(&self, stop: &Stop) -> Result<f64, Failure> {
        let client = &self.host.client;
        let taken: Vec<Duration> = self.runtime.block_on(async {
            // The server closes a connection that was idle as long as a rival was prepared: a
            // call that may be sent twice finds that out.
            client.with_retry(RetryPolicy::default()).healthz().await?;
            let mut taken = Vec::new();
            for _ in 0..WARM_UP_CLONES + CLONES_A_SAMPLE {
                stop.check()?;
                let start = Instant::now();
                client.create_clone(self.snapshot, CLONE).await?;
                taken.push(start.elapsed());
                client.delete_file(CLONE).await?;
            }
            Ok::<_, Failure>(taken)
        })?;
        Ok(median_millis(taken.get(WARM_UP_CLONES..).unwrap_or_default()))
    }
}

/// The disk on a file system of the kernel's.
struct Reflink {
    source: File,
    target: PathBuf,
    // Unmounted after its files were closed.
    mount: Mount,
}

/// A disk in a file while it is aged.
struct FileDisk {
    file: File,
    point: PathBuf,
    images: usize,
}

impl Disk for FileDisk {
    fn write(&mut self, offset_bytes: u64, block: Bytes) -> Result<(), Failure> {
        self.file.write_all_at(&block, offset_bytes).map_err(Failure::at("write in", &self.point))
    }

    fn keep_image(&mut self) -> Result<(), Failure> {
        self.file.sync_all().map_err(Failure::at("sync in", &self.point))?;
        self.images += 1;
        reflink(&self.file, &self.point.join(format!("image-{}", self.images)))?;
        Ok(())
    }
}

impl Reflink {
    fn prepare(kind: Kind, context: &Context, stop: &Stop) -> Result<Self, Failure> {
        let mount = Mount::new(kind, IMAGE_BYTES, &context.directory)?;
        let point = mount.point();
        let path = point.join(SOURCE);
        let failed = || Failure::at("create", &path);
        let mut options = File::options();
        let source =
            options.read(true).write(true).create_new(true).open(&path).map_err(failed())?;
        source.set_len(aged::SIZE_BYTES).map_err(failed())?;
        let file = source.try_clone().map_err(failed())?;
        aged::age(&mut FileDisk { file, point: point.clone(), images: 0 }, 13, stop)?;
        // Its short form counts extents that happen to lie one behind the other as one.
        let extents = extents_in(&output(command("filefrag").arg("-v").arg(&path))?);
        if extents < aged::EXTENTS {
            let (name, wanted) = (kind.name(), aged::EXTENTS);
            return Err(Failure::Unfit(format!("{name} made {extents} extents, not {wanted}")));
        }
        mount.settle()?;
        Ok(Self { source, target: point.join(CLONE), mount })
    }

    /// One copy, in milliseconds; its deletion is not timed.
    fn sample(&self) -> Result<f64, Failure> {
        let elapsed = reflink(&self.source, &self.target)?;
        std::fs::remove_file(&self.target).map_err(Failure::at("remove", &self.target))?;
        self.mount.settle()?;
        Ok(millis(elapsed))
    }
}

/// Makes a copy that shares all blocks.
fn reflink(source: &File, target: &PathBuf) -> Result<Duration, Failure> {
    let start = Instant::now();
    let copy = File::create_new(target).map_err(Failure::at("create", target))?;
    rustix::fs::ioctl_ficlone(&copy, source)
        .map_err(|error| Failure::at("reflink to", target)(error.into()))?;
    Ok(start.elapsed())
}

/// The extents in what `filefrag -v` prints: a line each, which begins with its number.
fn extents_in(text: &str) -> u64 {
    let is_extent = |line: &&str| {
        let number = line.split_once(':').map(|(number, _)| number.trim());
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    text.lines().filter(is_extent).map(|_| 1).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_read_from_what_filefrag_prints() {
        let text = "Filesystem type is: 58465342\n\
                    File size of s is 8589934592 (2097152 blocks of 4096 bytes)\n \
                    ext:     logical_offset:  physical_offset: length:   expected: flags:\n   \
                    0:        0..       0:      24..        24:      1:\n   \
                    1:       20..      20:      25..        25:      1:         44: last\n\
                    s: 2 extents found\n";
        assert_eq!(extents_in(text), 2);
        assert_eq!(extents_in("s: 0 extents found\n"), 0);
    }

    #[test]
    fn as_root_a_copy_by_reflink_reads_as_its_source() {
        let folder = tempfile::tempdir().unwrap();
        let mount = Mount::new(Kind::Btrfs, 256 << 20, folder.path()).unwrap();
        let path = mount.point().join("source");
        std::fs::write(&path, b"some bytes".repeat(1000)).unwrap();
        let source = File::open(&path).unwrap();
        let target = mount.point().join("copy");
        reflink(&source, &target).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"some bytes".repeat(1000));
        assert!(reflink(&source, &target).is_err(), "a copy was written over");
    }
}

//! Many clones of one image: the last of a thousand against the first, and a clone beside a
//! hundred thousand others against one beside a hundred.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slackwater_benches::Content;
use slackwater_blockstore::{FilePath, Options, SnapshotRequest, Stability, Store};
use slackwater_client::types::SnapshotId;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::callers::{self, call_all};
use super::host::Host;
use super::{folder, median_millis, row, snapshot_id};
use crate::compare::context::Context;
use crate::compare::progress;
use crate::failure::Failure;
use crate::row::{Row, Target};
use crate::stop::Stop;

/// Clones of one storm.
const STORM_CLONES: u64 = 1000;

/// Clones at its beginning and at its end that are compared.
const EDGE_CLONES: usize = 100;

/// Clones that exist already, in the small and in the large store.
const EXISTING_FEW: u64 = 100;
const EXISTING_MANY: u64 = 100_000;

/// The same for a first look.
const EXISTING_MANY_QUICK: u64 = 10_000;

/// Clones beside the existing ones whose median is one sample.
const CLONES_A_SAMPLE: u64 = 400;

/// Clones before the first sample: connections, caches and code are warm then.
const WARM_UP_CLONES: u64 = 100;

/// The slower side may take this many times as long.
const SLOWDOWN_MAX: f64 = 1.5;

/// Threads that make the existing clones: their commits share a sync.
const MAKERS: u64 = 16;

/// Size of the image, and its data.
const IMAGE_BYTES: u64 = 1 << 30;
const IMAGE_DATA_BLOCKS: u64 = 4096;

/// The store is quiet after so long without any work: a period of its background's.
const QUIET_TIME: Duration = Duration::from_millis(600);

pub(super) fn run(context: &Context, stop: &Stop) -> Result<Vec<Row>, Failure> {
    let many = if context.is_quick { EXISTING_MANY_QUICK } else { EXISTING_MANY };
    progress(&format!("a store with {EXISTING_FEW} clones and one with {many}"));
    let mut few = Site::prepare(context, EXISTING_FEW, stop)?;
    let mut many_site = Site::prepare(context, many, stop)?;
    for site in [&mut few, &mut many_site] {
        site.storm(WARM_UP_CLONES, stop)?;
    }
    progress("clones by 8 callers");
    let mut edges = Row {
        subject: format!("the last {EDGE_CLONES}"),
        rival: Some(format!("the first {EDGE_CLONES}")),
        target: Some(Target::RatioAtLeast(1.0 / SLOWDOWN_MAX)),
        ..row(
            "clone-storm-edges",
            "ms",
            format!("{STORM_CLONES} clones of one image over REST, from 8 callers"),
        )
    };
    let mut existing = Row {
        subject: format!("{many} clones exist"),
        rival: Some(format!("{EXISTING_FEW} clones exist")),
        target: Some(Target::RatioAtLeast(1.0 / SLOWDOWN_MAX)),
        ..row("clone-storm-existing", "ms", "clone over REST, from 8 callers")
    };
    for _ in 0..context.rounds {
        let storm = few.storm(STORM_CLONES, stop)?;
        let (first, last) = (storm.get(..EDGE_CLONES), storm.get(storm.len() - EDGE_CLONES..));
        edges.rival_samples.push(median_millis(first.unwrap_or_default()));
        edges.samples.push(median_millis(last.unwrap_or_default()));
        existing.samples.push(median_millis(&many_site.storm(CLONES_A_SAMPLE, stop)?));
        existing.rival_samples.push(median_millis(&few.storm(CLONES_A_SAMPLE, stop)?));
    }
    Ok(vec![edges, existing])
}

/// A server with one image and its clones.
struct Site {
    runtime: Runtime,
    // Killed before its folder goes.
    host: Host,
    image: SnapshotId,
    _folder: TempDir,
}

impl Site {
    fn prepare(context: &Context, existing: u64, stop: &Stop) -> Result<Self, Failure> {
        let folder = folder(context)?;
        let data_dir = folder.path().join("data");
        let store = Store::open(Options::new(&data_dir))?;
        let image = populate(&store, existing, stop)?;
        store.close()?;
        drop(store);
        let host = Host::start(context, &data_dir, stop)?;
        Ok(Self { runtime: callers::runtime()?, host, image, _folder: folder })
    }

    /// How long each of that many clones took; deletes them, and waits until they are gone.
    fn storm(&mut self, clones: u64, stop: &Stop) -> Result<Vec<Duration>, Failure> {
        let (client, image) = (self.host.client.clone(), self.image);
        let taken = call_all(&self.runtime, clones, stop, move |index| {
            let client = client.clone();
            async move {
                client.create_clone(image, &format!("storm/{index}.img")).await?;
                Ok(())
            }
        })?;
        let client = self.host.client.clone();
        call_all(&self.runtime, clones, stop, move |index| {
            let client = client.clone();
            async move { client.delete_file(&format!("storm/{index}.img")).await }
        })?;
        self.host.wait_until_quiet(&self.runtime, QUIET_TIME, stop)?;
        Ok(taken)
    }
}

/// Makes an image and that many clones of it; answers the image.
fn populate(store: &Arc<Store>, existing: u64, stop: &Stop) -> Result<SnapshotId, Failure> {
    let path = FilePath::parse("image.img")?;
    let inode = store.create_file(&path, IMAGE_BYTES)?.attributes.inode;
    let data = Content::new(21).blocks(IMAGE_DATA_BLOCKS);
    store.write(inode, 0, data, Stability::FileSync)?;
    let image = store.snapshot(&path, SnapshotRequest::default())?.id;
    store.create_directories(&FilePath::parse("existing")?)?;
    store.create_directories(&FilePath::parse("storm")?)?;
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let make = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= existing {
                    return Ok::<_, Failure>(());
                }
                stop.check()?;
                let path = FilePath::parse(&format!("existing/{index}.img"))?;
                store.clone_snapshot(image, &path)?;
            }
        };
        let makers: Vec<_> = (0..MAKERS).map(|_| scope.spawn(make)).collect();
        for maker in makers {
            let ended = || Failure::Unfit("a thread that makes clones ended".to_owned());
            maker.join().map_err(|_| ended())??;
        }
        Ok::<_, Failure>(())
    })?;
    snapshot_id(image)
}

//! The files whose snapshots and clones are timed, made over REST.

use bytes::Bytes;
use slackwater_benches::{Content, EXTENTS_PER_WRITE, extents_bytes};
use slackwater_blockstore::BLOCK_BYTES_U64;
use slackwater_client::types::{CreateSnapshot, SnapshotId};
use slackwater_client::{ByteRange, Client, DataSource};

use crate::failure::Failure;
use crate::stop::Stop;

/// Extents of the file that the rival copies too.
pub(crate) const EXTENTS_MAX: u64 = 100_000;

/// Sizes in bytes of the family of sizes: 1 MiB, 1 GiB, 1 TiB.
const SIZES: [(&str, u64); 3] = [("1 MiB", 1 << 20), ("1 GiB", 1 << 30), ("1 TiB", 1 << 40)];

/// Extents of the family of extents, each file of the same size.
const EXTENTS: [(&str, u64); 3] = [("1", 1), ("1,000", 1000), ("100,000", EXTENTS_MAX)];

/// Snapshots in a row of the family of depths.
const DEPTHS: [(&str, u64); 3] = [("1", 1), ("100", 100), ("1,000", 1000)];

/// Size of the files of the family of depths.
const DEPTH_FILE_BYTES: u64 = 1 << 30;

/// Blocks at the beginning, in the middle and at the end of the files of the family of sizes.
const SPOT_BLOCKS: u64 = 16;

/// Blocks of a file that one block map is asked for: the most that is answered.
const MAP_BLOCKS: u64 = 1 << 16;

/// What differs between the cases that are compared with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Size,
    Extents,
    Depth,
}

impl Family {
    pub(crate) const ALL: [Self; 3] = [Self::Size, Self::Extents, Self::Depth];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Extents => "extents",
            Self::Depth => "depth",
        }
    }
}

/// A file and its latest snapshot.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) family: Family,
    /// As the table shows it.
    pub(crate) label: &'static str,
    pub(crate) path: String,
    pub(crate) snapshot: SnapshotId,
}

/// Makes the files of all cases, in order of their families, the smallest case first.
pub(crate) async fn prepare(client: &Client, stop: &Stop) -> Result<Vec<Case>, Failure> {
    let mut maker = Maker { client, stop, content: Content::new(1), cases: Vec::new() };
    for (label, size_bytes) in SIZES {
        maker.of_size(label, size_bytes).await?;
    }
    for (label, extents) in EXTENTS {
        maker.of_extents(label, extents).await?;
    }
    for (label, depth) in DEPTHS {
        maker.of_depth(label, depth).await?;
    }
    Ok(maker.cases)
}

/// Takes a snapshot without a name.
pub(crate) async fn snapshot(client: &Client, path: &str) -> Result<SnapshotId, Failure> {
    let request = CreateSnapshot { path: path.to_owned(), ..CreateSnapshot::default() };
    Ok(client.create_snapshot(&request).await?.id)
}

struct Maker<'a> {
    client: &'a Client,
    stop: &'a Stop,
    content: Content,
    cases: Vec<Case>,
}

impl Maker<'_> {
    async fn of_size(&mut self, label: &'static str, size_bytes: u64) -> Result<(), Failure> {
        let path = self.file(Family::Size, size_bytes, size_bytes).await?;
        let spot_bytes = SPOT_BLOCKS * BLOCK_BYTES_U64;
        for offset_bytes in [0, size_bytes / 2, size_bytes - spot_bytes] {
            let data = self.content.blocks(SPOT_BLOCKS);
            self.write(&path, offset_bytes, data).await?;
        }
        self.done(Family::Size, label, path).await
    }

    async fn of_extents(&mut self, label: &'static str, extents: u64) -> Result<(), Failure> {
        let size_bytes = extents_bytes(EXTENTS_MAX);
        let path = self.file(Family::Extents, extents, size_bytes).await?;
        let mut written = 0;
        while written < extents {
            let count = EXTENTS_PER_WRITE.min(extents - written);
            let data = self.content.alternating(count);
            self.write(&path, extents_bytes(written), data).await?;
            written += count;
        }
        let got = self.count_extents(&path, size_bytes).await?;
        if got != extents {
            let what = format!("{path} has {got} extents, {extents} were written");
            return Err(Failure::Unfit(what));
        }
        self.done(Family::Extents, label, path).await
    }

    async fn of_depth(&mut self, label: &'static str, depth: u64) -> Result<(), Failure> {
        let path = self.file(Family::Depth, depth, DEPTH_FILE_BYTES).await?;
        // The last snapshot is the one that the case is about.
        for block in 0..depth - 1 {
            let data = self.content.blocks(1);
            self.write(&path, block * BLOCK_BYTES_U64, data).await?;
            snapshot(self.client, &path).await?;
        }
        let data = self.content.blocks(1);
        self.write(&path, (depth - 1) * BLOCK_BYTES_U64, data).await?;
        self.done(Family::Depth, label, path).await
    }

    async fn file(&self, family: Family, case: u64, size_bytes: u64) -> Result<String, Failure> {
        let path = format!("{}-{case}.img", family.name());
        self.client.create_file(&path, size_bytes).await?;
        Ok(path)
    }

    async fn write(&self, path: &str, offset_bytes: u64, data: Bytes) -> Result<(), Failure> {
        self.stop.check()?;
        self.client.write_bytes(path, offset_bytes, data).await?;
        Ok(())
    }

    async fn done(
        &mut self,
        family: Family,
        label: &'static str,
        path: String,
    ) -> Result<(), Failure> {
        let snapshot = snapshot(self.client, &path).await?;
        self.cases.push(Case { family, label, path, snapshot });
        Ok(())
    }

    /// The runs of data in the file, as the appliance itself tells them.
    async fn count_extents(&self, path: &str, size_bytes: u64) -> Result<u64, Failure> {
        let (mut extents, mut was_data, mut offset_bytes) = (0, false, 0);
        while offset_bytes < size_bytes {
            self.stop.check()?;
            let Some(range) = ByteRange::new(offset_bytes, MAP_BLOCKS * BLOCK_BYTES_U64) else {
                break;
            };
            let map = self.client.block_map(DataSource::File(path), range).await?;
            if map.blocks.is_empty() {
                return Err(Failure::Unfit(format!("no block map of {path} at {offset_bytes}")));
            }
            for block in &map.blocks {
                extents += u64::from(block.is_some() && !was_data);
                was_data = block.is_some();
                offset_bytes += BLOCK_BYTES_U64;
            }
        }
        Ok(extents)
    }
}

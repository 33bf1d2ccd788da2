//! The store's values as the REST types show them, and back.

use std::time::Duration;

use slackwater_blockstore as store;

use crate::failure::Failure;
use crate::reserved;
use crate::types;

pub(crate) fn snapshot_id(id: store::SnapshotId) -> types::SnapshotId {
    types::SnapshotId::from_bytes(*id.as_bytes())
}

pub(crate) fn store_snapshot_id(id: types::SnapshotId) -> store::SnapshotId {
    store::SnapshotId::from_bytes(*id.as_bytes())
}

/// The snapshot that a route or a query names.
pub(crate) fn parse_snapshot_id(text: &str) -> Result<store::SnapshotId, Failure> {
    match text.parse::<types::SnapshotId>() {
        Ok(id) => Ok(store_snapshot_id(id)),
        Err(error) => Err(Failure::invalid(error.to_string())),
    }
}

pub(crate) fn timestamp(stamp: store::Timestamp) -> types::Timestamp {
    types::Timestamp::from_nanos(stamp.as_nanos())
}

/// So long from `now`; `None`: no stamp is as late.
pub(crate) fn moment_after(now: store::Timestamp, seconds: u64) -> Option<store::Timestamp> {
    let nanos = u64::try_from(Duration::from_secs(seconds).as_nanos()).ok()?;
    now.as_nanos().checked_add(nanos).map(store::Timestamp::from_nanos)
}

pub(crate) fn store_timestamp(stamp: types::Timestamp) -> store::Timestamp {
    store::Timestamp::from_nanos(stamp.as_nanos())
}

pub(crate) fn file(info: &store::FileInfo) -> types::File {
    types::File {
        path: info.path.to_string(),
        size_bytes: info.attributes.size_bytes,
        used_bytes: info.attributes.used_bytes,
        unique_bytes: info.unique_bytes,
        origin_snapshot_id: info.origin_snapshot.map(snapshot_id),
        created_at: timestamp(info.created_at),
        modified_at: timestamp(info.attributes.modified_at),
    }
}

pub(crate) fn reclaimable(told: store::Reclaimable) -> types::Reclaimable {
    types::Reclaimable {
        bytes: told.bytes,
        blocks: told.blocks,
        sampled_one_in: told.sampled_one_in,
    }
}

/// The text of a path that is kept as bytes; names that are not UTF-8 are escaped, in the way
/// in which paths of files are shown.
pub(crate) fn path_text(bytes: &[u8]) -> String {
    let name = |name: &[u8]| match std::str::from_utf8(name) {
        Ok(text) => text.to_owned(),
        Err(_) => name.escape_ascii().to_string(),
    };
    bytes.split(|&byte| byte == b'/').map(name).collect::<Vec<_>>().join("/")
}

pub(crate) fn snapshot(snapshot: store::Snapshot) -> types::Snapshot {
    let reserved::Parted { labels, chains, restricted, publishers, images, published_at } =
        reserved::part(snapshot.labels);
    types::Snapshot {
        id: snapshot_id(snapshot.id),
        path: path_text(&snapshot.path),
        name: snapshot.name,
        labels,
        chains,
        restricted_chains: restricted,
        publishers,
        images,
        published_at: published_at.map(|date| date.at),
        size_bytes: snapshot.size_bytes,
        used_bytes: snapshot.used_bytes,
        created_at: timestamp(snapshot.created_at),
        clone_count: snapshot.clone_count,
        deletion_policy: match snapshot.deletion {
            store::DeletionPolicy::Keep => types::DeletionPolicy::Keep,
            store::DeletionPolicy::OnZeroClones => types::DeletionPolicy::OnZeroClones,
        },
        expires_at: snapshot.expires_at.map(timestamp),
    }
}

pub(crate) fn store_deletion_policy(policy: types::DeletionPolicy) -> store::DeletionPolicy {
    match policy {
        types::DeletionPolicy::Keep => store::DeletionPolicy::Keep,
        types::DeletionPolicy::OnZeroClones => store::DeletionPolicy::OnZeroClones,
    }
}

pub(crate) fn diff_extent(extent: &store::ChangedExtent) -> types::DiffExtent {
    types::DiffExtent {
        offset_bytes: extent.offset_bytes,
        length_bytes: extent.length_bytes,
        kind: match extent.kind {
            store::ExtentKind::Data => types::ExtentKind::Data,
            store::ExtentKind::Hole => types::ExtentKind::Hole,
        },
    }
}

impl From<store::CheckReport> for types::CheckReport {
    fn from(report: store::CheckReport) -> Self {
        Self {
            clean: report.is_clean(),
            problems: report.problems,
            problems_left_out: report.problems_left_out,
            inodes: report.inodes,
            layers: report.layers,
            runs: report.runs,
            chunks: report.chunks,
            files: report.files,
            damaged_chunks: report.damaged_chunks,
            lost_blocks: report.lost_blocks,
            hits: report.hits.into_iter().map(hit).collect(),
            hits_left_out: report.hits_left_out,
            data_bytes: report.data_bytes,
        }
    }
}

fn hit(hit: store::Hit) -> types::Hit {
    types::Hit {
        path: hit.path,
        snapshot_id: hit.snapshot.map(|id| id.to_string()),
        offset_bytes: hit.offset_bytes,
        length_bytes: hit.length_bytes,
        lost: hit.is_lost,
    }
}

pub(crate) fn gc_report(report: store::GcReport) -> types::GcReport {
    types::GcReport {
        layers: report.layers,
        entries: report.entries,
        segments: report.segments,
        freed_bytes: report.freed_bytes,
        used_bytes_before: report.used_bytes_before,
        used_bytes: report.used_bytes,
    }
}

/// Every field by name: a figure that the store gains fails to compile here until it is shown.
pub(crate) fn stats(
    store::Stats {
        capacity_bytes,
        used_bytes,
        available_bytes,
        chunk_bytes,
        chunk_count,
        dead_bytes,
        mapped_blocks,
        file_count,
        inode_count,
        snapshot_count,
        layer_count,
        dead_layer_count,
        segment_count,
        dirty_bytes,
        memory_bytes,
        dedup_hits,
        dedup_misses,
        zero_blocks,
        commits,
        appended_bytes,
        segment_read_bytes,
        cache_hits,
        cache_misses,
        cache_bypassed,
        reclaimed_entries,
        compacted_bytes,
        scrubbed_bytes,
        scrub_segment,
        scrub_finished_at_seconds,
        damaged_chunks,
        reclaim_failures,
        reclaim_jobs_set_aside,
        poisoned,
    }: store::Stats,
    store_id: store::StoreId,
    export_path: &str,
    now: types::Timestamp,
) -> types::Stats {
    types::Stats {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store_id: store_id.to_string(),
        export_path: export_path.to_owned(),
        now: Some(now),
        capacity_bytes,
        used_bytes,
        available_bytes,
        chunk_bytes,
        chunk_count,
        dead_bytes,
        mapped_blocks,
        file_count,
        inode_count,
        snapshot_count,
        layer_count,
        dead_layer_count,
        segment_count,
        dirty_bytes,
        memory_bytes,
        dedup_hits,
        dedup_misses,
        zero_blocks,
        commits,
        appended_bytes,
        segment_read_bytes,
        cache_hits,
        cache_misses,
        cache_bypassed,
        reclaimed_entries,
        compacted_bytes,
        scrubbed_bytes,
        scrub_segment,
        scrub_finished_at_seconds,
        damaged_chunks,
        reclaim_failures,
        reclaim_jobs_set_aside,
        poisoned,
        // The store does not know for whom it works.
        maintenance: None,
    }
}

//! The store's numbers: every field of [`Stats`].

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use slackwater_blockstore::{Stats, Store};

use super::plain::{Plain, counter, encode, gauge};

/// What every name begins with.
const PREFIX: &str = "slackwater_store_";

/// Reads the store's statistics for each page.
#[derive(Debug)]
pub(super) struct StoreCollector {
    store: Arc<Store>,
}

impl StoreCollector {
    pub(super) const fn new(store: Arc<Store>) -> Self {
        Self { store }
    }
}

impl Collector for StoreCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_stats(&mut encoder, &self.store.stats())
    }
}

/// Writes all of `stats`.
fn encode_stats(encoder: &mut DescriptorEncoder<'_>, stats: &Stats) -> fmt::Result {
    encode(encoder, PREFIX, &space(stats))?;
    encode(encoder, PREFIX, &objects(stats))?;
    encode(encoder, PREFIX, &work(stats))?;
    encode(encoder, PREFIX, &damage(stats))
}

/// What is known of damage, and how far the search for it is.
fn damage(stats: &Stats) -> [Plain; 4] {
    [
        counter("scrubbed_bytes", stats.scrubbed_bytes, "Bytes read to find damage"),
        gauge("scrub_segment", stats.scrub_segment, "The logical segment scrubbed next"),
        gauge(
            "scrub_finished_at_seconds",
            stats.scrub_finished_at_seconds,
            "When all live chunks had last been verified, since 1970; 0: never",
        ),
        gauge("damaged_chunks", stats.damaged_chunks, "Chunks known to be damaged"),
    ]
}

/// Bytes, on the disk and in memory.
fn space(stats: &Stats) -> [Plain; 7] {
    [
        gauge("capacity_bytes", stats.capacity_bytes, "Bytes that the store may occupy"),
        gauge("used_bytes", stats.used_bytes, "Bytes that the store occupies, index included"),
        gauge("available_bytes", stats.available_bytes, "Bytes that can still be written"),
        gauge("chunk_bytes", stats.chunk_bytes, "Bytes of live chunks as stored, compressed"),
        gauge("dead_bytes", stats.dead_bytes, "Bytes of dead chunks that compaction will free"),
        gauge("dirty_bytes", stats.dirty_bytes, "Bytes of dirty blocks in memory"),
        gauge("memory_bytes", stats.memory_bytes, "Bytes of memory in caches and buffers"),
    ]
}

/// What is in the store, and how the store is.
fn objects(stats: &Stats) -> [Plain; 10] {
    [
        gauge("chunks", stats.chunk_count, "Live chunks: distinct blocks"),
        gauge("mapped_blocks", stats.mapped_blocks, "Blocks that name chunks, over all layers"),
        gauge("files", stats.file_count, "Regular files"),
        gauge("inodes", stats.inode_count, "Files, directories and all else that has a name"),
        gauge("snapshots", stats.snapshot_count, "Snapshots"),
        gauge("layers", stats.layer_count, "Layers, those that wait for reclaim included"),
        gauge("dead_layers", stats.dead_layer_count, "Layers that wait for reclaim"),
        gauge("segments", stats.segment_count, "Segment files"),
        gauge(
            "reclaim_jobs_set_aside",
            stats.reclaim_jobs_set_aside,
            "Jobs of reclaim, and files to compact, that failed and wait to be tried again",
        ),
        gauge("poisoned", stats.poisoned.into(), "1 since a sync failed: writes are refused"),
    ]
}

/// What was done since start.
fn work(stats: &Stats) -> [Plain; 12] {
    [
        counter("dedup_hits", stats.dedup_hits, "Blocks found to be stored already"),
        counter("dedup_misses", stats.dedup_misses, "Blocks that were new"),
        counter("zero_blocks", stats.zero_blocks, "Blocks that were all zeros"),
        counter("commits", stats.commits, "Group commits, each one sync of the log"),
        counter("appended_bytes", stats.appended_bytes, "Bytes appended to the log"),
        counter("segment_read_bytes", stats.segment_read_bytes, "Bytes read from segments"),
        counter("cache_hits", stats.cache_hits, "Blocks answered from the block cache"),
        counter("cache_misses", stats.cache_misses, "Blocks that were not in the block cache"),
        counter(
            "cache_bypassed",
            stats.cache_bypassed,
            "Blocks of long runs, which are read past the block cache",
        ),
        counter("reclaimed_entries", stats.reclaimed_entries, "Map entries visited by reclaim"),
        counter("compacted_bytes", stats.compacted_bytes, "Bytes rewritten by compaction"),
        counter(
            "reclaim_failures",
            stats.reclaim_failures,
            "Slices of reclaim, and compactions, that failed",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prometheus_client::encoding::text::encode_registry;
    use prometheus_client::registry::Registry;

    use super::*;

    /// Every field with a value of its own, so that two exchanged fields are seen.
    fn distinct() -> Stats {
        Stats {
            capacity_bytes: 101,
            used_bytes: 102,
            available_bytes: 103,
            chunk_bytes: 104,
            chunk_count: 105,
            dead_bytes: 106,
            mapped_blocks: 107,
            file_count: 108,
            inode_count: 109,
            snapshot_count: 110,
            layer_count: 111,
            dead_layer_count: 112,
            segment_count: 113,
            dirty_bytes: 114,
            memory_bytes: 115,
            dedup_hits: 116,
            dedup_misses: 117,
            zero_blocks: 118,
            commits: 119,
            appended_bytes: 120,
            segment_read_bytes: 121,
            cache_hits: 122,
            cache_misses: 123,
            cache_bypassed: 132,
            reclaimed_entries: 124,
            compacted_bytes: 125,
            scrubbed_bytes: 126,
            scrub_segment: 127,
            scrub_finished_at_seconds: 128,
            damaged_chunks: 129,
            reclaim_failures: 130,
            reclaim_jobs_set_aside: 131,
            poisoned: true,
        }
    }

    /// The fields of [`Stats`] and their values, as its `Debug` form names them, so that a
    /// field that is added to it is missed here.
    fn fields(stats: &Stats) -> BTreeMap<String, u64> {
        let text = format!("{stats:?}");
        let inside = text.strip_prefix("Stats { ").unwrap().strip_suffix(" }").unwrap();
        let number = |value: &str| match value {
            "true" => 1,
            "false" => 0,
            digits => digits.parse().unwrap(),
        };
        inside
            .split(", ")
            .map(|field| field.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_owned(), number(value)))
            .collect()
    }

    #[derive(Debug)]
    struct Fixed(Stats);

    impl Collector for Fixed {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            encode_stats(&mut encoder, &self.0)
        }
    }

    #[test]
    fn every_field_is_on_the_page_with_kind_and_help() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Fixed(distinct())));
        let mut page = String::new();
        encode_registry(&mut page, &registry).unwrap();
        let has_line = |line: String| page.lines().any(|found| found == line);

        let fields = fields(&distinct());
        assert!(fields.len() >= 26);
        for (field, value) in &fields {
            // What ends with `_count` is a part of a histogram.
            let name = &field.strip_suffix("_count").map_or(field.clone(), |one| format!("{one}s"));
            let is_gauge = has_line(format!("{PREFIX}{name} {value}"))
                && has_line(format!("# TYPE {PREFIX}{name} gauge"));
            let is_counter = has_line(format!("{PREFIX}{name}_total {value}"))
                && has_line(format!("# TYPE {PREFIX}{name} counter"));
            assert!(is_gauge != is_counter, "{name} is missing or wrong:\n{page}");
            let help = format!("# HELP {PREFIX}{name} ");
            assert!(page.lines().any(|line| line.starts_with(&help)), "{name} has no help");
        }
        let values = page.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(values, fields.len());
    }

    #[test]
    fn what_counts_since_start_is_a_counter() {
        // The last ten numbers before `poisoned`, by their documentation in `Stats`.
        let names: Vec<_> = work(&distinct()).iter().map(|plain| format!("{plain:?}")).collect();
        assert!(names.iter().all(|plain| plain.contains("Counter")), "{names:?}");
        let rest = space(&distinct()).into_iter().chain(objects(&distinct()));
        for plain in rest {
            assert!(format!("{plain:?}").contains("Gauge"), "{plain:?}");
        }
    }
}

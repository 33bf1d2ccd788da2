//! What the serving process counts, as the virtual file `.slackwater-stats` shows it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;

/// Bytes of the virtual file: the text is filled up with spaces, which JSON allows, so that its
/// size is known before it is read. All counters at their largest take about half of it.
pub(crate) const FILE_BYTES: usize = 1024;

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn add_length(&self, length: usize) {
        self.add(u64::try_from(length).unwrap_or(u64::MAX));
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters since the process began to serve.
#[derive(Debug)]
pub(crate) struct Statistics {
    started: Instant,
    pub(crate) bytes_read_from_appliance: Counter,
    pub(crate) bytes_read_beside: Counter,
    pub(crate) bytes_written: Counter,
    pub(crate) cache_hits: Counter,
    pub(crate) cache_misses: Counter,
    pub(crate) cache_damaged: Counter,
    pub(crate) map_bytes: Counter,
    pub(crate) maps_stale: Counter,
    pub(crate) requests: Counter,
    pub(crate) commits: Counter,
    pub(crate) writes_sent_again: Counter,
    pub(crate) connections_lost: Counter,
}

impl Default for Statistics {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            bytes_read_from_appliance: Counter::default(),
            bytes_read_beside: Counter::default(),
            bytes_written: Counter::default(),
            cache_hits: Counter::default(),
            cache_misses: Counter::default(),
            cache_damaged: Counter::default(),
            map_bytes: Counter::default(),
            maps_stale: Counter::default(),
            requests: Counter::default(),
            commits: Counter::default(),
            writes_sent_again: Counter::default(),
            connections_lost: Counter::default(),
        }
    }
}

#[derive(Serialize)]
struct Shown {
    /// Payload of READ, that is without block maps.
    bytes_read_from_appliance: u64,
    /// Those of them that nothing had asked for, as the appliance is far.
    bytes_read_beside: u64,
    bytes_written: u64,
    /// Blocks.
    cache_hits: u64,
    /// Blocks.
    cache_misses: u64,
    /// Blocks of the cache that were not what they should be, and were fetched again.
    cache_damaged: u64,
    cache_bytes: u64,
    kept_bytes: u64,
    map_bytes: u64,
    maps_stale: u64,
    requests: u64,
    commits: u64,
    writes_sent_again: u64,
    connections_lost: u64,
    files_lost: u64,
    resumed: bool,
    uptime_seconds: u64,
}

/// What is measured when the file is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gauges {
    pub(crate) cache_bytes: u64,
    pub(crate) kept_bytes: u64,
    pub(crate) files_lost: u64,
    pub(crate) is_resumed: bool,
}

impl Statistics {
    /// The content of the virtual file.
    pub(crate) fn render(&self, gauges: Gauges) -> Vec<u8> {
        let shown = Shown {
            bytes_read_from_appliance: self.bytes_read_from_appliance.get(),
            bytes_read_beside: self.bytes_read_beside.get(),
            bytes_written: self.bytes_written.get(),
            cache_hits: self.cache_hits.get(),
            cache_misses: self.cache_misses.get(),
            cache_damaged: self.cache_damaged.get(),
            cache_bytes: gauges.cache_bytes,
            kept_bytes: gauges.kept_bytes,
            map_bytes: self.map_bytes.get(),
            maps_stale: self.maps_stale.get(),
            requests: self.requests.get(),
            commits: self.commits.get(),
            writes_sent_again: self.writes_sent_again.get(),
            connections_lost: self.connections_lost.get(),
            files_lost: gauges.files_lost,
            resumed: gauges.is_resumed,
            uptime_seconds: self.started.elapsed().as_secs(),
        };
        let mut text = serde_json::to_vec(&shown).unwrap_or_default();
        text.resize(FILE_BYTES - 1, b' ');
        text.push(b'\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_numbers_fit() {
        let statistics = Statistics::default();
        statistics.bytes_written.add(u64::MAX);
        let most = u64::MAX;
        let gauges =
            Gauges { cache_bytes: most, kept_bytes: most, files_lost: most, is_resumed: true };
        let text = statistics.render(gauges);
        assert_eq!(text.len(), FILE_BYTES);
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(value["bytes_written"], u64::MAX);
        assert_eq!(value["resumed"], true);
        // Each of the other counters may be 19 digits longer.
        assert!(value.to_string().len() + 16 * 19 < FILE_BYTES);
    }
}

//! `slackwater top`: the appliance at work, as rates between two looks at its counters.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use slackwater_client::types::Stats;

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{fields, percent};
use crate::size::human;

/// Moves the cursor home and clears the screen below (ECMA-48 CUP and ED).
const CLEAR_SCREEN: &str = "\u{1b}[H\u{1b}[J";

/// Shows rates, refreshed until Ctrl-C; with --json one line of JSON for each interval.
#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// Seconds between two looks
    #[arg(long, short, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// End after this many intervals
    #[arg(long, short, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

pub(crate) async fn run(context: &Context, arguments: TopArguments) -> Result<(), Failure> {
    let interval = Duration::from_secs(arguments.interval);
    let mut before = (Instant::now(), context.client.stats().await?);
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 {
        tokio::time::sleep(interval).await;
        left -= 1;
        let stats = match context.client.stats().await {
            Ok(stats) => stats,
            // A watch goes on over a restart of what it watches.
            Err(error) if left > 0 => {
                context.output.remark(&format!("slackwater: {error}"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let now = (Instant::now(), stats);
        let rates = Rates::between(&before.1, &now.1, now.0.duration_since(before.0));
        show(context, &now.1, &rates)?;
        before = now;
    }
    Ok(())
}

fn show(context: &Context, stats: &Stats, rates: &Rates) -> Result<(), Failure> {
    context.output.result(&rates.to_json(stats), || {
        let clear = if std::io::stdout().is_terminal() { CLEAR_SCREEN } else { "" };
        format!("{clear}{}\n", describe(context.client.url(), stats, rates))
    })
}

/// Changes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rates {
    elapsed_milliseconds: u64,
    commits: u64,
    appended_bytes: u64,
    segment_read_bytes: u64,
    dedup_hits: u64,
    dedup_misses: u64,
    zero_blocks: u64,
    cache_hits: u64,
    cache_misses: u64,
    cache_bypassed: u64,
    reclaimed_entries: u64,
    compacted_bytes: u64,
}

impl Rates {
    fn between(before: &Stats, now: &Stats, elapsed: Duration) -> Self {
        let elapsed_milliseconds = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
        // A counter that went back was begun anew by a restart: then it counts from zero.
        let rate = |before: u64, now: u64| {
            let change = now.checked_sub(before).unwrap_or(now);
            let scaled = u128::from(change) * 1000 / u128::from(elapsed_milliseconds);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        Self {
            elapsed_milliseconds,
            commits: rate(before.commits, now.commits),
            appended_bytes: rate(before.appended_bytes, now.appended_bytes),
            segment_read_bytes: rate(before.segment_read_bytes, now.segment_read_bytes),
            dedup_hits: rate(before.dedup_hits, now.dedup_hits),
            dedup_misses: rate(before.dedup_misses, now.dedup_misses),
            zero_blocks: rate(before.zero_blocks, now.zero_blocks),
            cache_hits: rate(before.cache_hits, now.cache_hits),
            cache_misses: rate(before.cache_misses, now.cache_misses),
            cache_bypassed: rate(before.cache_bypassed, now.cache_bypassed),
            reclaimed_entries: rate(before.reclaimed_entries, now.reclaimed_entries),
            compacted_bytes: rate(before.compacted_bytes, now.compacted_bytes),
        }
    }

    fn to_json(self, stats: &Stats) -> Value {
        json!({
            "elapsed_milliseconds": self.elapsed_milliseconds,
            "per_second": {
                "commits": self.commits,
                "appended_bytes": self.appended_bytes,
                "segment_read_bytes": self.segment_read_bytes,
                "dedup_hits": self.dedup_hits,
                "dedup_misses": self.dedup_misses,
                "zero_blocks": self.zero_blocks,
                "cache_hits": self.cache_hits,
                "cache_misses": self.cache_misses,
                "cache_bypassed": self.cache_bypassed,
                "reclaimed_entries": self.reclaimed_entries,
                "compacted_bytes": self.compacted_bytes,
            },
            "stats": stats,
        })
    }
}

fn describe(url: &str, stats: &Stats, rates: &Rates) -> String {
    let bytes = |bytes: u64| format!("{}/s", human(bytes));
    let number = |number: u64| format!("{number}/s");
    let blocks = rates.dedup_hits.saturating_add(rates.dedup_misses);
    let read = rates.cache_hits.saturating_add(rates.cache_misses);
    let read = read.saturating_add(rates.cache_bypassed);
    let used = percent(stats.used_bytes, stats.capacity_bytes);
    fields(&[
        ("appliance", url.to_owned()),
        (
            "used",
            format!("{} of {} ({used})", human(stats.used_bytes), human(stats.capacity_bytes)),
        ),
        ("files, snapshots", format!("{}, {}", stats.file_count, stats.snapshot_count)),
        ("commits", number(rates.commits)),
        ("log written", bytes(rates.appended_bytes)),
        ("segments read", bytes(rates.segment_read_bytes)),
        (
            "blocks written",
            format!(
                "{}, {} known, {} zero",
                number(blocks),
                percent(rates.dedup_hits, blocks),
                number(rates.zero_blocks)
            ),
        ),
        (
            "blocks read",
            format!("{}, {} from cache", number(read), percent(rates.cache_hits, read)),
        ),
        ("reclaimed entries", number(rates.reclaimed_entries)),
        ("compacted", bytes(rates.compacted_bytes)),
        ("dirty, memory", format!("{}, {}", human(stats.dirty_bytes), human(stats.memory_bytes))),
        ("layers to reclaim", stats.dead_layer_count.to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(commits: u64) -> Stats {
        let mut value: Value =
            json!({ "version": "1", "store_id": "s", "export_path": "/e", "poisoned": false });
        for name in [
            "capacity_bytes",
            "used_bytes",
            "available_bytes",
            "chunk_bytes",
            "chunk_count",
            "dead_bytes",
            "mapped_blocks",
            "file_count",
            "inode_count",
            "snapshot_count",
            "layer_count",
            "dead_layer_count",
            "segment_count",
            "dirty_bytes",
            "memory_bytes",
            "dedup_hits",
            "dedup_misses",
            "zero_blocks",
            "appended_bytes",
            "segment_read_bytes",
            "cache_hits",
            "cache_misses",
            "reclaimed_entries",
            "compacted_bytes",
        ] {
            value[name] = json!(0);
        }
        value["commits"] = json!(commits);
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn rates_are_changes_a_second_and_survive_a_restart() {
        let rates = |before, now, milliseconds| {
            Rates::between(&stats(before), &stats(now), Duration::from_millis(milliseconds)).commits
        };
        assert_eq!(rates(100, 300, 2000), 100);
        assert_eq!(rates(100, 101, 500), 2);
        assert_eq!(rates(100, 40, 1000), 40);
        assert_eq!(rates(0, u64::MAX, 0), u64::MAX);
    }
}

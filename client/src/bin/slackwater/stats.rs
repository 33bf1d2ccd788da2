//! `slackwater stats`: what is stored, and how well it is shared.

use slackwater_client::types::Stats;

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{fields, percent};
use crate::size::human;

/// Bytes of one block, the unit that the appliance counts by.
const BLOCK_BYTES: u64 = 4096;

pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let stats = context.client.stats().await?;
    context.output.result(&stats, || describe(&stats))
}

fn describe(stats: &Stats) -> String {
    let mapped_bytes = stats.mapped_blocks.saturating_mul(BLOCK_BYTES);
    let distinct_bytes = stats.chunk_count.saturating_mul(BLOCK_BYTES);
    let looked_up = stats.dedup_hits.saturating_add(stats.dedup_misses);
    let state =
        if stats.poisoned { "WRITES REFUSED: a sync failed, restart it" } else { "serving" };
    fields(&[
        ("appliance", format!("release {}, store {}", stats.version, stats.store_id)),
        ("export", stats.export_path.clone()),
        ("state", state.to_owned()),
        ("capacity", human(stats.capacity_bytes)),
        (
            "used",
            format!(
                "{} ({})",
                human(stats.used_bytes),
                percent(stats.used_bytes, stats.capacity_bytes)
            ),
        ),
        ("available", human(stats.available_bytes)),
        ("files", stats.file_count.to_string()),
        ("snapshots", stats.snapshot_count.to_string()),
        ("layers", format!("{}, {} to be reclaimed", stats.layer_count, stats.dead_layer_count)),
        ("mapped", human(mapped_bytes)),
        ("distinct", format!("{} in {} blocks", human(distinct_bytes), stats.chunk_count)),
        (
            "stored",
            format!(
                "{} ({} of distinct)",
                human(stats.chunk_bytes),
                percent(stats.chunk_bytes, distinct_bytes)
            ),
        ),
        ("to be compacted", human(stats.dead_bytes)),
        ("dirty", human(stats.dirty_bytes)),
        ("memory", human(stats.memory_bytes)),
        ("deduplicated", format!("{} of blocks since start", percent(stats.dedup_hits, looked_up))),
    ])
}

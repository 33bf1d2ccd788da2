//! Snapshot and clone over REST and clone in a store, the cases by turns, so that what else the machine does falls
//! upon all of them alike.

use std::time::{Duration, Instant};

use slackwater_benches::Content;
use slackwater_client::Client;

use crate::cases::{self, Case};
use crate::embedded::Embedded;
use crate::failure::Failure;
use crate::statistics::Summary;
use crate::stop::Stop;

/// Rounds before the first sample: connections, caches and code are warm then.
const WARM_UP_ROUNDS: u32 = 10;

/// Where the clones of all cases are made and deleted again.
const CLONE_PATH: &str = "clone.img";

/// What was measured.
#[derive(Clone, Debug)]
pub(crate) struct Latencies {
    pub(crate) over_rest: Vec<Latency>,
    pub(crate) clone_in_store: Summary,
}

/// What was measured of one case.
#[derive(Clone, Debug)]
pub(crate) struct Latency {
    pub(crate) case: Case,
    pub(crate) clone: Summary,
    pub(crate) snapshot: Summary,
}

/// The samples of one case.
#[derive(Clone, Debug, Default)]
struct Samples {
    clones: Vec<Duration>,
    snapshots: Vec<Duration>,
}

/// Takes that many samples of each case.
pub(crate) async fn measure(
    client: &Client,
    cases: Vec<Case>,
    embedded: &Embedded,
    samples: u32,
    stop: &Stop,
) -> Result<Latencies, Failure> {
    let mut content = Content::new(2);
    let mut taken = vec![Samples::default(); cases.len()];
    let mut in_store = Vec::new();
    for round in 0..WARM_UP_ROUNDS + samples {
        let mut order: Vec<_> = cases.iter().zip(&mut taken).collect();
        // Forth and back, so that no case always comes after the same other one.
        if round % 2 == 1 {
            order.reverse();
        }
        for (case, samples) in order {
            stop.check()?;
            let clone = time_clone(client, case).await?;
            let snapshot = time_snapshot(client, case, &mut content).await?;
            if round >= WARM_UP_ROUNDS {
                samples.clones.push(clone);
                samples.snapshots.push(snapshot);
            }
        }
        // Holds up this thread, which has no call under way.
        let clone = embedded.time_clone()?;
        if round >= WARM_UP_ROUNDS {
            in_store.push(clone);
        }
    }
    let over_rest = cases.into_iter().zip(taken).map(|(case, samples)| Latency {
        case,
        clone: Summary::of(&samples.clones),
        snapshot: Summary::of(&samples.snapshots),
    });
    Ok(Latencies { over_rest: over_rest.collect(), clone_in_store: Summary::of(&in_store) })
}

/// A clone of the case's snapshot; its deletion is not timed.
async fn time_clone(client: &Client, case: &Case) -> Result<Duration, Failure> {
    let start = Instant::now();
    client.create_clone(case.snapshot, CLONE_PATH).await?;
    let elapsed = start.elapsed();
    client.delete_file(CLONE_PATH).await?;
    Ok(elapsed)
}

/// A snapshot of the case's file after one small write: that write, which commits, and the
/// deletion, which keeps the case's depth as it is, are not timed.
async fn time_snapshot(
    client: &Client,
    case: &Case,
    content: &mut Content,
) -> Result<Duration, Failure> {
    client.write_bytes(&case.path, 0, content.blocks(1)).await?;
    let start = Instant::now();
    let snapshot = cases::snapshot(client, &case.path).await?;
    let elapsed = start.elapsed();
    client.delete_snapshot(snapshot).await?;
    Ok(elapsed)
}

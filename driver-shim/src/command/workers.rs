//! `slackwater-driver workers`: who has disks on the appliance, and the end of those that never
//! come back. A worker's files keep the snapshots that it uses; when they are deleted, the
//! appliance deletes by itself what nobody else uses.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use futures_util::StreamExt;
use serde_json::{Value, json};
use slackwater_client::query::ListFiles;
use slackwater_client::types::{PAGE_LIMIT_MAX, Timestamp};
use slackwater_client::{ByteRange, Client, DataSource};
use uuid::Uuid;

use super::age::{ago, parse_age, since};
use super::{Format, print};
use crate::error::DriverError;
use crate::settings::{Settings, Target};
use crate::worker::{FULL_BELOW_BYTES, LEASE_INTERVAL, Lease, now};

/// Where workers have their files.
const FOLDER: &str = "workers/";

/// Files that are deleted at a time.
const DELETED_AT_ONCE: usize = 16;

/// Longest lease that is read; one is shorter.
const LEASE_BYTES_MAX: u64 = 4096;

/// A worker that was heard of in this many intervals of its heartbeat (an hour) may live: it, or
/// the network, may be down for a moment.
const INTERVALS_ALIVE: u32 = 60;

/// Workers.
#[derive(Clone, Debug, Args)]
pub(super) struct WorkersArguments {
    #[command(subcommand)]
    command: Option<WorkersCommand>,
}

/// What to do with them.
#[derive(Clone, Debug, Subcommand)]
enum WorkersCommand {
    /// Delete all disks of a worker that is lost for good; needs a token
    ///
    /// A worker that comes back after that finds its containers' and images' disks gone.
    Sweep(SweepArguments),
}

/// Which workers are swept.
#[derive(Clone, Debug, Args)]
#[command(group(ArgGroup::new("which").required(true).args(["id", "older_than"])))]
struct SweepArguments {
    /// This worker
    id: Option<Uuid>,
    /// All that were not heard of for this long, such as 30d, 12h or 90m
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    older_than: Option<Duration>,
    /// Sweep a worker whose heartbeat is fresh, too, or while the heartbeats tell nothing: the
    /// appliance is full, or heard of no worker for an hour
    #[arg(long)]
    force: bool,
}

/// What is known of a worker.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Its heartbeat.
    pub(super) lease: Option<Lease>,
    /// When that came, by the appliance's clock.
    pub(super) heard_at: Option<Timestamp>,
    disks: usize,
    holds: usize,
    paths: Vec<String>,
}

impl Found {
    /// When it was last heard of: by the appliance's clock, or by its own if that says later. A
    /// clock that is slow makes nobody look lost.
    fn heard(&self) -> Option<Timestamp> {
        self.heard_at.max(self.lease.as_ref().map(|lease| lease.renewed_at))
    }

    /// Since it was heard of; for ever if it never was.
    fn age(&self, moment: Timestamp) -> Duration {
        self.heard().map_or(Duration::MAX, |heard| since(heard, moment))
    }

    fn is_alive(&self, moment: Timestamp) -> bool {
        self.age(moment) < LEASE_INTERVAL * INTERVALS_ALIVE
    }

    /// Whether its heartbeat came lately, by the appliance's clock alone: that of a lost worker may
    /// have been years ahead.
    fn proves_that_heartbeats_come(&self, moment: Timestamp) -> bool {
        let is_lately = |at| since(at, moment) < LEASE_INTERVAL * INTERVALS_ALIVE;
        self.heard_at.is_some_and(is_lately)
    }
}

/// What the appliance says of itself.
#[derive(Clone, Copy, Debug)]
struct Appliance {
    /// Its time: ages count by it, not by the clock of the machine that asks.
    moment: Timestamp,
    /// Bytes that it takes still.
    available_bytes: u64,
}

impl Appliance {
    async fn ask(client: &Client) -> Result<Self, DriverError> {
        let stats = client.stats().await?;
        let moment = stats.now.unwrap_or_else(now);
        Ok(Self { moment, available_bytes: stats.available_bytes })
    }
}

pub(super) async fn run(
    arguments: &WorkersArguments,
    settings: &Settings,
    format: Format,
) -> Result<(), DriverError> {
    let target = Target::of(settings)?;
    if target.shows_credential() && arguments.command.is_some() {
        let needed = "the credential of this worker reaches no files of others: give a token of the role worker or admin by --token-file";
        return Err(DriverError::Usage(needed.to_owned()));
    }
    let client = target.client()?;
    // The workers first, so that no heartbeat is younger than the moment.
    let workers = find(&client).await?;
    let appliance = Appliance::ask(&client).await?;
    match &arguments.command {
        None => {
            match format {
                Format::Json => print(&format!("{:#}\n", list(&workers))),
                Format::Text => print(&table(&workers, appliance.moment)),
            }
            if target.shows_credential() {
                // Nothing can be done when standard error is gone.
                let _ = writeln!(
                    std::io::stderr(),
                    "only this worker: a token (--token-file) shows the others"
                );
            }
            Ok(())
        }
        Some(WorkersCommand::Sweep(chosen)) => {
            let swept = sweep(&client, &workers, appliance, chosen, format).await?;
            if format == Format::Json {
                print(&format!("{:#}\n", json!(swept)));
            }
            Ok(())
        }
    }
}

/// All workers by their files.
pub(super) async fn find(client: &Client) -> Result<BTreeMap<Uuid, Found>, DriverError> {
    let mut workers: BTreeMap<Uuid, Found> = BTreeMap::new();
    let mut query =
        ListFiles { prefix: Some(FOLDER.to_owned()), limit: Some(PAGE_LIMIT_MAX), after: None };
    loop {
        let page = client.files(&query).await?;
        for file in page.items {
            let mut parts = file.path.trim_start_matches('/').splitn(4, '/').skip(1);
            let Some(id) = parts.next().and_then(|id| id.parse().ok()) else {
                continue;
            };
            let found = workers.entry(id).or_default();
            match parts.next() {
                Some("disks") => found.disks += 1,
                Some("holds") => found.holds += 1,
                Some("lease") => {
                    found.lease = lease(client, &file.path).await;
                    found.heard_at = Some(file.modified_at);
                }
                _ => {}
            }
            found.paths.push(file.path);
        }
        match page.next {
            Some(next) => query.after = Some(next),
            None => return Ok(workers),
        }
    }
}

/// The lease, if it can be read: a worker may be writing it.
async fn lease(client: &Client, path: &str) -> Option<Lease> {
    let range = ByteRange::new(0, LEASE_BYTES_MAX)?;
    let bytes = client.read_bytes(DataSource::File(path), range).await.ok()?;
    Lease::from_bytes(&bytes).ok()
}

/// The same as JSON.
fn list(workers: &BTreeMap<Uuid, Found>) -> Value {
    let one = |(id, found): (&Uuid, &Found)| {
        let lease = found.lease.as_ref();
        json!({ "worker_id": id, "host": lease.map(|lease| &lease.host), "version": lease.map(|lease| &lease.version),
            "heard_at": found.heard(), "disks": found.disks, "holds": found.holds })
    };
    workers.iter().map(one).collect()
}

fn table(workers: &BTreeMap<Uuid, Found>, moment: Timestamp) -> String {
    let mut text =
        format!("{:36}  {:20}  {:10}  {:>6}  {:>6}\n", "WORKER", "HOST", "HEARD", "DISKS", "HOLDS");
    for (id, found) in workers {
        let host =
            found.lease.as_ref().map_or("-".into(), |lease| lease.host.escape_debug().to_string());
        let heard = found.heard().map_or("never".into(), |heard| ago(since(heard, moment)));
        let (disks, holds) = (found.disks, found.holds);
        text.push_str(&format!("{id:36}  {host:20}  {heard:10}  {disks:>6}  {holds:>6}\n"));
    }
    text
}

async fn sweep(
    client: &Client,
    workers: &BTreeMap<Uuid, Found>,
    appliance: Appliance,
    arguments: &SweepArguments,
    format: Format,
) -> Result<Vec<Value>, DriverError> {
    let chosen = choose(workers, appliance, arguments).map_err(DriverError::Usage)?;
    let mut swept = Vec::new();
    for (id, found) in chosen {
        // The heartbeat last: a sweep that was cut off is found again.
        let (leases, disks): (Vec<_>, Vec<_>) =
            found.paths.iter().partition(|path| path.ends_with("/lease"));
        delete(client, &disks).await?;
        delete(client, &leases).await?;
        let files = found.paths.len();
        if format == Format::Text {
            print(&format!("{id}: {files} files deleted\n"));
        }
        swept.push(json!({ "worker_id": id, "deleted_files": files }));
    }
    Ok(swept)
}

/// The workers to be swept, or why none is.
fn choose<'a>(
    workers: &'a BTreeMap<Uuid, Found>,
    appliance: Appliance,
    arguments: &SweepArguments,
) -> Result<Vec<(&'a Uuid, &'a Found)>, String> {
    let moment = appliance.moment;
    let is_chosen = |id: &Uuid, found: &Found| match (arguments.id, arguments.older_than) {
        (Some(wanted), _) => *id == wanted,
        // One without a heartbeat is being made, or never lived: its age is not known.
        (None, Some(age)) => found.heard().is_some() && found.age(moment) >= age,
        (None, None) => false,
    };
    let chosen: Vec<_> = workers.iter().filter(|(id, found)| is_chosen(id, found)).collect();
    if let (Some(id), true) = (arguments.id, chosen.is_empty()) {
        return Err(format!("worker {id} has nothing on the appliance"));
    }
    if arguments.force || chosen.is_empty() {
        return Ok(chosen);
    }
    if let Some((id, found)) = chosen.iter().find(|(_, found)| found.is_alive(moment)) {
        let heard = ago(found.age(moment));
        return Err(format!(
            "worker {id} was heard of {heard} ago and may live: stop it first, or give --force"
        ));
    }
    // Old heartbeats tell that a worker is lost only where new ones would have come.
    let bytes = appliance.available_bytes;
    let reason = if bytes < FULL_BELOW_BYTES {
        format!(
            "the appliance has room for {bytes} bytes, so it may have refused the heartbeats of workers that live: make room first"
        )
    } else if !workers.values().any(|found| found.proves_that_heartbeats_come(moment)) {
        "no worker was heard of for an hour, so those that live may not have reached the appliance: wait for a heartbeat, see `slackwater-driver workers`".to_owned()
    } else {
        return Ok(chosen);
    };
    Err(format!("{reason}; if the workers to be swept are lost for good, give --force"))
}

async fn delete(client: &Client, paths: &[&String]) -> Result<(), DriverError> {
    let mut deletions = futures_util::stream::iter(paths)
        .map(|path| client.delete_file(path))
        .buffer_unordered(DELETED_AT_ONCE);
    while let Some(deleted) = deletions.next().await {
        match deleted {
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_NANOS: u64 = 86_400_000_000_000;
    const NOW: Timestamp = Timestamp::from_nanos(20_000 * DAY_NANOS);
    const ROOM: Appliance = Appliance { moment: NOW, available_bytes: 1 << 40 };

    fn days_ago(days: u64) -> Timestamp {
        Timestamp::from_nanos(NOW.as_nanos() - days * DAY_NANOS)
    }

    /// A worker that says that it wrote its heartbeat so long ago, and of which the appliance says
    /// the other.
    fn heard(own_days: u64, appliance_days: u64) -> Found {
        let lease = Lease { host: "a".into(), version: "0".into(), renewed_at: days_ago(own_days) };
        let heard_at = Some(days_ago(appliance_days));
        Found { lease: Some(lease), heard_at, ..Found::default() }
    }

    fn workers<const N: usize>(found: [Found; N]) -> BTreeMap<Uuid, Found> {
        (0..).map(Uuid::from_u128).zip(found).collect()
    }

    fn older_than(days: u64, force: bool) -> SweepArguments {
        let older_than = Some(Duration::from_nanos(days * DAY_NANOS));
        SweepArguments { id: None, older_than, force }
    }

    fn swept(
        workers: &BTreeMap<Uuid, Found>,
        appliance: Appliance,
        arguments: &SweepArguments,
    ) -> Result<Vec<u128>, String> {
        let chosen = choose(workers, appliance, arguments)?;
        Ok(chosen.into_iter().map(|(id, _)| id.as_u128()).collect())
    }

    #[test]
    fn one_without_a_heartbeat_is_not_known_to_live() {
        assert!(!Found::default().is_alive(NOW));
        assert!(heard(0, 0).is_alive(NOW));
        assert_eq!(
            swept(&workers([Found::default(), heard(0, 0)]), ROOM, &older_than(1, false)),
            Ok(vec![])
        );
    }

    #[test]
    fn a_worker_whose_clock_is_wrong_is_not_swept_while_it_runs() {
        let all = workers([heard(20_000, 0), heard(40, 40), heard(0, 0), heard(0, 40)]);
        assert_eq!(swept(&all, ROOM, &older_than(30, false)), Ok(vec![1]));
        // Nor because of the clock of whoever asks: ages count by the appliance's.
        assert_eq!(since(days_ago(0), days_ago(2)), Duration::ZERO);
    }

    #[test]
    fn heartbeats_that_could_not_come_sweep_nobody() {
        let full = Appliance { available_bytes: 0, ..ROOM };
        let stale = workers([heard(2, 2), heard(3, 3)]);
        let mixed = workers([heard(2, 2), heard(0, 0)]);
        for (all, appliance) in [(&stale, ROOM), (&stale, full), (&mixed, full)] {
            let refused = swept(all, appliance, &older_than(1, false)).unwrap_err();
            assert!(refused.contains("--force"), "{refused}");
            let id = SweepArguments { id: Some(Uuid::from_u128(0)), ..older_than(1, false) };
            assert!(swept(all, appliance, &id).is_err(), "nor by its id");
            assert!(swept(all, appliance, &older_than(1, true)).is_ok());
        }
        assert_eq!(swept(&mixed, ROOM, &older_than(1, false)), Ok(vec![0]));
        // One whose clock was ahead looks alive for ever: no other one is swept by that.
        let mut ahead = heard(0, 40);
        ahead.lease.as_mut().unwrap().renewed_at = Timestamp::from_nanos(2 * NOW.as_nanos());
        let ahead = workers([heard(2, 2), ahead]);
        assert!(swept(&ahead, ROOM, &older_than(1, false)).is_err());
    }
}

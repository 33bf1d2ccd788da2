//! `slackwater-driver workers`: who has disks on the appliance, and the end of those that never
//! come back. A worker's files keep the snapshots that it uses; when they are deleted, the
//! appliance deletes by itself what nobody else uses.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use futures_util::StreamExt;
use slackwater_client::query::ListFiles;
use slackwater_client::types::{PAGE_LIMIT_MAX, Timestamp};
use slackwater_client::{ByteRange, Client, DataSource};
use uuid::Uuid;

use super::print;
use crate::error::DriverError;
use crate::settings::{Settings, Target};
use crate::worker::{LEASE_INTERVAL, Lease, now};

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
    /// Delete all disks of a worker that is lost for good
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
    /// Sweep a worker whose heartbeat is fresh, too
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
    /// Since it was heard of; for ever if it never was.
    fn age(&self) -> Duration {
        self.lease.as_ref().map_or(Duration::MAX, |lease| since(lease.renewed_at))
    }

    fn is_alive(&self) -> bool {
        self.age() < LEASE_INTERVAL * INTERVALS_ALIVE
    }
}

pub(super) async fn run(
    arguments: &WorkersArguments,
    settings: &Settings,
) -> Result<(), DriverError> {
    let client = Target::of(settings)?.client()?;
    let workers = find(&client).await?;
    match &arguments.command {
        None => {
            print(&table(&workers));
            Ok(())
        }
        Some(WorkersCommand::Sweep(chosen)) => sweep(&client, &workers, chosen).await,
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

fn table(workers: &BTreeMap<Uuid, Found>) -> String {
    let mut text =
        format!("{:36}  {:20}  {:10}  {:>6}  {:>6}\n", "WORKER", "HOST", "HEARD", "DISKS", "HOLDS");
    for (id, found) in workers {
        let (host, heard) = match &found.lease {
            Some(lease) => (lease.host.escape_debug().to_string(), ago(found.age())),
            None => ("-".to_owned(), "never".to_owned()),
        };
        let (disks, holds) = (found.disks, found.holds);
        text.push_str(&format!("{id:36}  {host:20}  {heard:10}  {disks:>6}  {holds:>6}\n"));
    }
    text
}

async fn sweep(
    client: &Client,
    workers: &BTreeMap<Uuid, Found>,
    arguments: &SweepArguments,
) -> Result<(), DriverError> {
    let is_chosen = |id: &Uuid, found: &Found| match (arguments.id, arguments.older_than) {
        (Some(wanted), _) => *id == wanted,
        // One without a heartbeat is being made, or never lived: its age is not known.
        (None, Some(age)) => found.lease.is_some() && found.age() >= age,
        (None, None) => false,
    };
    let chosen: Vec<_> = workers.iter().filter(|(id, found)| is_chosen(id, found)).collect();
    if let (Some(id), true) = (arguments.id, chosen.is_empty()) {
        return Err(DriverError::Usage(format!("worker {id} has nothing on the appliance")));
    }
    if let Some((id, found)) = chosen.iter().find(|(_, found)| found.is_alive())
        && !arguments.force
    {
        let heard = ago(found.age());
        return Err(DriverError::Usage(format!(
            "worker {id} was heard of {heard} ago and may live: stop it first, or give --force"
        )));
    }
    for (id, found) in chosen {
        // The heartbeat last: a sweep that was cut off is found again.
        let (leases, disks): (Vec<_>, Vec<_>) =
            found.paths.iter().partition(|path| path.ends_with("/lease"));
        delete(client, &disks).await?;
        delete(client, &leases).await?;
        print(&format!("{id}: {} files deleted\n", found.paths.len()));
    }
    Ok(())
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

fn since(moment: Timestamp) -> Duration {
    Duration::from_nanos(now().as_nanos().saturating_sub(moment.as_nanos()))
}

/// A time in its largest whole unit.
fn ago(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn parse_age(text: &str) -> Result<Duration, String> {
    let refused = || "expected a number and a unit: 30d, 12h, 90m or 45s".to_owned();
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(refused)?;
    let number: u64 = number.parse().map_err(|_| refused())?;
    let seconds = match unit {
        "d" => 86_400,
        "h" => 3_600,
        "m" => 60,
        "s" => 1,
        _ => return Err(refused()),
    };
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_read_and_shown() {
        for (text, seconds) in [("30d", 30 * 86_400), ("12h", 43_200), ("90m", 5_400), ("0s", 0)] {
            assert_eq!(parse_age(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "d", "30", "1w", "-1d", "99999999999999999999d", "1\u{e9}"] {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
        assert_eq!(ago(Duration::from_secs(59)), "59s");
        assert_eq!(ago(Duration::from_secs(90_000)), "1d");
    }

    #[test]
    fn one_without_a_heartbeat_is_not_known_to_live() {
        let mut found = Found::default();
        assert!(!found.is_alive());
        let lease = Lease { host: "a".into(), version: "0".into(), renewed_at: now() };
        found.lease = Some(lease);
        assert!(found.is_alive());
    }
}

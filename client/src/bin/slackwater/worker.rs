//! `slackwater worker ...`: the machines that have credentials of their own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use slackwater_client::types::Timestamp;
use slackwater_client::worker::{AddWorker, Worker, WorkerName};
use uuid::Uuid;

use crate::context::Context;
use crate::failure::Failure;
use crate::name;
use crate::output::{Align, JsonList, Table, moment, or_dash};
use crate::several::Several;

/// What to do with workers.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Add a worker; prints the token by which its machine joins, once
    ///
    /// On that machine: `slackwater-driver join`, which asks for the token. Send it so that others cannot read it.
    Add {
        /// A name, unique in the appliance: lower-case letters, digits, `.` and `-`
        name: WorkerName,
        /// How long the token can be used: 1h, 7d; 30 days at most
        #[arg(long, value_name = "DURATION", value_parser = name::duration, default_value = "24h")]
        expires_in: Duration,
        /// The id of its driver, where the appliance has files or snapshots of it: of a machine that joins again,
        /// or that had a token before. `slackwater-driver status` tells it
        #[arg(long, value_name = "UUID")]
        id: Option<Uuid>,
    },
    /// List the workers, in order of their names
    #[command(visible_alias = "ls")]
    List,
    /// Revoke workers: their credentials and their mounts are refused from then on
    ///
    /// Running containers get I/O errors. Their files stay. Mounts by a token go on: take the token away, too; so do
    /// those by address, if the server has `insecure-address-only`. Layers that they registered stay trusted where
    /// `trusted-makers` has their names. To delete the disks of one that is gone for good: `slackwater-driver workers
    /// sweep`.
    Revoke {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<WorkerName>,
    },
}

pub(crate) async fn run(context: &Context, command: WorkerCommand) -> Result<(), Failure> {
    match command {
        WorkerCommand::Add { name, expires_in, id } => {
            let join_token_seconds = Some(expires_in.as_secs());
            add(context, AddWorker { name, join_token_seconds, worker_id: id }).await
        }
        WorkerCommand::List => list(context).await,
        WorkerCommand::Revoke { names } => {
            let mut several = Several::default();
            for name in names {
                let outcome = context.client.revoke_worker(&name).await.map_err(Failure::from);
                several.note(context.output, name.as_str(), outcome)?;
            }
            several.finish()
        }
    }
}

async fn add(context: &Context, request: AddWorker) -> Result<(), Failure> {
    let added = context.client.add_worker(&request).await?;
    context.output.result(&added, || format!("{}\n", added.join_token))?;
    let until = added.worker.join_token_expires_at.map(moment);
    context.output.remark(&format!(
        "give it to `slackwater-driver join` on {}, with the settings of its daemon, until {}",
        request.name,
        or_dash(until)
    ));
    Ok(())
}

async fn list(context: &Context) -> Result<(), Failure> {
    let workers = context.client.workers().await?;
    let mut list = JsonList::new(context.output);
    if context.output.is_json() {
        list.items(&workers)?;
        return list.finish();
    }
    let mut table = Table::new(&[
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("SINCE OR UNTIL", Align::Left),
        ("LAST SEEN", Align::Left),
        ("ID", Align::Left),
    ]);
    let rows: Vec<Vec<String>> = workers.iter().map(row).collect();
    context.output.text(&table.page(&rows))
}

/// Whether a moment has passed, by this machine's clock.
fn is_past(moment: Timestamp) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    u128::from(moment.as_nanos()) <= now
}

fn row(worker: &Worker) -> Vec<String> {
    let (state, time) = match worker.joined_at {
        Some(joined_at) => ("joined", Some(joined_at)),
        None if worker.join_token_expires_at.is_some_and(is_past) => {
            ("expired", worker.join_token_expires_at)
        }
        None => ("invited", worker.join_token_expires_at),
    };
    vec![
        worker.name.to_string(),
        state.to_owned(),
        or_dash(time.map(moment)),
        or_dash(worker.last_seen_at.map(moment)),
        or_dash(worker.worker_id),
    ]
}

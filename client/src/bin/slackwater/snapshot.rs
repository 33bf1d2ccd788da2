//! `slackwater snapshot ...`: take, list, look at, label, delete and compare snapshots.

use std::time::Duration;

use clap::{Args, Subcommand};
use slackwater_client::query::{Diff, ListSnapshots};
use slackwater_client::types::{
    CreateSnapshot, DeletionPolicy, DiffExtent, ExtentKind, ImageName, Snapshot, SnapshotId,
    Timestamp,
};

use crate::context::Context;
use crate::failure::Failure;
use crate::name::{self, LabelChange};
use crate::output::{Align, Table, fields, moment, or_dash};
use crate::pages;
use crate::reclaimable::{self, Told};
use crate::several::Several;
use crate::size::human;

/// Most snapshots that are sorted, in memory: some 200 MB with what is sorted next.
const SORTED_MAX: usize = 100_000;

/// What to do with snapshots. SNAPSHOT is an id or a name.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot of a file; prints its id alone
    Create(CreateArguments),
    /// List snapshots
    Ls(ListArguments),
    /// Show a snapshot
    Show {
        /// Id or name
        snapshot: String,
    },
    /// Set and remove labels
    Label {
        /// Id or name
        snapshot: String,
        /// KEY=VALUE sets a label, KEY- removes it
        #[arg(required = true, value_name = "CHANGE")]
        changes: Vec<LabelChange>,
        /// Remove all labels that are not set here
        #[arg(long)]
        replace: bool,
    },
    /// Delete snapshots; their clones stay
    Rm {
        /// Ids or names
        #[arg(required = true)]
        snapshots: Vec<String>,
        /// A snapshot that does not exist is no failure
        #[arg(long, short)]
        force: bool,
    },
    /// List the ranges in which a snapshot differs from an older one
    Diff {
        /// Id or name
        snapshot: String,
        /// Id or name of the older snapshot; without it, from an empty file
        #[arg(long, value_name = "SNAPSHOT")]
        base: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateArguments {
    /// Path of the file
    path: String,
    /// A name, unique in the appliance
    #[arg(long)]
    name: Option<String>,
    /// A label; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = name::label)]
    labels: Vec<(String, String)>,
    /// Let the appliance delete it after this time, if it has no clones then: 12h, 7d
    #[arg(long, value_name = "DURATION", value_parser = name::duration)]
    expires_in: Option<Duration>,
    /// Let the appliance delete it when its last clone is deleted
    #[arg(long)]
    delete_with_last_clone: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Only snapshots of the file at this path
    #[arg(long)]
    path: Option<String>,
    /// Only the snapshot of this name
    #[arg(long)]
    name: Option<String>,
    /// Only snapshots with this label; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = name::label)]
    labels: Vec<(String, String)>,
    /// Order of the list [default: oldest; of JSON: id]
    #[arg(long, value_name = "ORDER")]
    sort: Option<Sort>,
    /// Also what a delete of each would free: a call a snapshot, which takes a time in proportion to what it alone has
    #[arg(long)]
    reclaimable: bool,
    /// Most snapshots to list, the first in that order
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Sort {
    /// By the time when they were taken, the oldest first
    Oldest,
    /// The newest first
    Newest,
    /// By id, as they come: a list of any length, printed while it comes
    Id,
}

pub(crate) async fn run(context: &Context, command: SnapshotCommand) -> Result<(), Failure> {
    match command {
        SnapshotCommand::Create(arguments) => create(context, arguments).await,
        SnapshotCommand::Ls(arguments) => list(context, arguments).await,
        SnapshotCommand::Show { snapshot } => show(context, &snapshot).await,
        SnapshotCommand::Label { snapshot, changes, replace } => {
            label(context, &snapshot, changes, replace).await
        }
        SnapshotCommand::Rm { snapshots, force } => remove(context, &snapshots, force).await,
        SnapshotCommand::Diff { snapshot, base } => diff(context, &snapshot, base.as_deref()).await,
    }
}

async fn create(context: &Context, arguments: CreateArguments) -> Result<(), Failure> {
    let request = CreateSnapshot {
        path: context.path(&arguments.path)?,
        name: arguments.name,
        labels: arguments.labels.into_iter().collect(),
        deletion_policy: if arguments.delete_with_last_clone {
            DeletionPolicy::OnZeroClones
        } else {
            DeletionPolicy::Keep
        },
        // By the appliance's clock: this machine's may be wrong.
        expires_in_seconds: arguments.expires_in.map(|duration| duration.as_secs()),
        ..CreateSnapshot::default()
    };
    let snapshot = context.client.create_snapshot(&request).await?;
    context.output.remark(&format!(
        "took a snapshot of {}: {}, {} used",
        snapshot.path,
        human(snapshot.size_bytes),
        human(snapshot.used_bytes)
    ));
    context.output.result(&snapshot, || format!("{}\n", snapshot.id))
}

async fn list(context: &Context, arguments: ListArguments) -> Result<(), Failure> {
    let mut query = ListSnapshots {
        path: arguments.path.map(|path| context.path(&path)).transpose()?,
        name: arguments.name,
        labels: arguments.labels.into_iter().collect(),
        ..ListSnapshots::default()
    };
    let is_asked = arguments.reclaimable;
    let mut columns = vec![
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("PATH", Align::Left),
        ("SIZE", Align::Right),
        ("USED", Align::Right),
        ("CLONES", Align::Right),
        ("CREATED", Align::Left),
    ];
    columns.extend(is_asked.then_some(("RECLAIMABLE", Align::Right)));
    let table = Table::new(&columns);
    let row = |snapshot: &Told<Snapshot>| {
        let mut cells = row(&snapshot.item);
        cells.extend(is_asked.then(|| snapshot.shown()));
        cells
    };
    let page = async |limit, after| {
        (query.limit, query.after) = (Some(limit), after);
        let page = context.client.snapshots(&query).await?;
        Ok((page.items, page.next))
    };
    // Programs get a list of any length as it comes.
    let default = if context.output.is_json() { Sort::Id } else { Sort::Oldest };
    let order = match arguments.sort.unwrap_or(default) {
        Sort::Id => {
            let page = reclaimable::pages(&context.client, is_asked, page);
            return pages::print(context.output, arguments.limit, table, row, page).await;
        }
        Sort::Oldest => |one: &Snapshot, other: &Snapshot| moment_of(one).cmp(&moment_of(other)),
        Sort::Newest => |one: &Snapshot, other: &Snapshot| moment_of(other).cmp(&moment_of(one)),
    };
    let limit = arguments.limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let is_all_wanted = limit > SORTED_MAX;
    let sorted = pages::first((limit.min(SORTED_MAX), is_all_wanted), order, page).await?;
    if sorted.left_out && is_all_wanted {
        return Err(Failure::Usage(format!(
            "there are more than {SORTED_MAX} snapshots to sort: list them by --sort id, give a --limit of at most that, or \
             choose some by --path, --name or --label"
        )));
    }
    let page = reclaimable::pages(&context.client, is_asked, pages::of(sorted.items));
    pages::print(context.output, arguments.limit, table, row, page).await
}

fn moment_of(snapshot: &Snapshot) -> (Timestamp, SnapshotId) {
    (snapshot.created_at, snapshot.id)
}

fn row(snapshot: &Snapshot) -> Vec<String> {
    vec![
        snapshot.id.to_string(),
        or_dash(snapshot.name.as_ref()),
        snapshot.path.clone(),
        human(snapshot.size_bytes),
        human(snapshot.used_bytes),
        snapshot.clone_count.to_string(),
        moment(snapshot.created_at),
    ]
}

async fn show(context: &Context, text: &str) -> Result<(), Failure> {
    let id = name::snapshot(&context.client, text).await?;
    let snapshot = context.client.snapshot(id).await?;
    let told = Told::of(&context.client, snapshot).await?;
    context.output.result(&told, || describe(&told))
}

fn describe(told: &Told<Snapshot>) -> String {
    let snapshot = &told.item;
    let size = |bytes: u64| format!("{} ({bytes} bytes)", human(bytes));
    let mut pairs = vec![
        ("id", snapshot.id.to_string()),
        ("name", or_dash(snapshot.name.as_ref())),
        ("path", snapshot.path.clone()),
        ("size", size(snapshot.size_bytes)),
        ("used", size(snapshot.used_bytes)),
        ("reclaimable", told.described()),
        ("clones", snapshot.clone_count.to_string()),
        ("created", moment(snapshot.created_at)),
        ("expires", or_dash(snapshot.expires_at.map(moment))),
    ];
    if snapshot.deletion_policy == DeletionPolicy::OnZeroClones {
        pairs.push(("deletion", "with its last clone".to_owned()));
    }
    for (chain, makers) in &snapshot.chains {
        for maker in makers {
            let maker = if maker.is_empty() { "a caller without a token" } else { maker };
            pairs.push(("chain", format!("{chain}, says {maker}")));
        }
    }
    for publisher in &snapshot.publishers {
        pairs.push(("published by", publisher_name(publisher).to_owned()));
    }
    for (image, publishers) in &snapshot.images {
        let image = if ImageName::is_name(image) { image } else { "images without names" };
        let publishers: Vec<_> = publishers.iter().map(|name| publisher_name(name)).collect();
        pairs.push(("for image", format!("{image}, says {}", publishers.join(", "))));
    }
    if let Some(at) = snapshot.published_at {
        pairs.push(("published", moment(at)));
    }
    for (chain, blobs) in &snapshot.restricted_chains {
        for blob in blobs {
            pairs.push(("restricted", format!("{chain} to those who may read {blob}")));
        }
    }
    for (key, value) in &snapshot.labels {
        pairs.push(("label", format!("{key}={value}")));
    }
    fields(&pairs)
}

fn publisher_name(publisher: &str) -> &str {
    match publisher {
        "" => "a caller without a token",
        "*" => "others",
        name => name,
    }
}

async fn label(
    context: &Context,
    text: &str,
    changes: Vec<LabelChange>,
    replace: bool,
) -> Result<(), Failure> {
    let id = name::snapshot(&context.client, text).await?;
    let mut labels = if replace {
        slackwater_client::types::Labels::new()
    } else {
        context.client.snapshot(id).await?.labels
    };
    for change in changes {
        match change {
            LabelChange::Set(key, value) => drop(labels.insert(key, value)),
            LabelChange::Remove(key) => drop(labels.remove(&key)),
        }
    }
    let snapshot = context.client.set_snapshot_labels(id, labels).await?;
    if context.output.is_json() {
        return context.output.json(&snapshot);
    }
    let labels = match snapshot.labels.len() {
        0 => "no labels".to_owned(),
        1 => "1 label".to_owned(),
        number => format!("{number} labels"),
    };
    context.output.remark(&format!("{id} now has {labels}"));
    Ok(())
}

async fn remove(context: &Context, snapshots: &[String], force: bool) -> Result<(), Failure> {
    let mut several = Several::default();
    for text in snapshots {
        let outcome = remove_one(context, text, force).await;
        if snapshots.len() == 1 {
            return outcome;
        }
        several.note(context.output, text, outcome)?;
    }
    several.finish()
}

async fn remove_one(context: &Context, text: &str, force: bool) -> Result<(), Failure> {
    let id = match name::snapshot(&context.client, text).await {
        Err(Failure::NotFound(_)) if force => return Ok(()),
        outcome => outcome?,
    };
    match context.client.delete_snapshot(id).await {
        Err(error) if force && error.is_not_found() => return Ok(()),
        outcome => outcome?,
    }
    context.output.remark(&format!("deleted {id}"));
    if context.output.is_json() {
        context.output.json(&serde_json::json!({ "deleted": id }))?;
    }
    Ok(())
}

async fn diff(context: &Context, text: &str, base: Option<&str>) -> Result<(), Failure> {
    let id = name::snapshot(&context.client, text).await?;
    let base = match base {
        Some(base) => Some(name::snapshot(&context.client, base).await?),
        None => None,
    };
    let mut query = Diff { base, ..Diff::default() };
    let columns = [("OFFSET", Align::Right), ("LENGTH", Align::Right), ("KIND", Align::Left)];
    let (mut data_bytes, mut hole_bytes) = (0_u64, 0_u64);
    let page = async |limit, after| {
        (query.limit, query.after) = (Some(limit), after);
        let page = context.client.diff(id, &query).await?;
        for extent in &page.items {
            let sum = match extent.kind {
                ExtentKind::Data => &mut data_bytes,
                ExtentKind::Hole => &mut hole_bytes,
            };
            *sum = sum.saturating_add(extent.length_bytes);
        }
        Ok((page.items, page.next))
    };
    pages::print(context.output, None, Table::new(&columns), extent_row, page).await?;
    context.output.remark(&format!(
        "{} of data and {} of holes differ",
        human(data_bytes),
        human(hole_bytes)
    ));
    Ok(())
}

fn extent_row(extent: &DiffExtent) -> Vec<String> {
    let kind = match extent.kind {
        ExtentKind::Data => "data",
        ExtentKind::Hole => "hole",
    };
    vec![extent.offset_bytes.to_string(), extent.length_bytes.to_string(), kind.to_owned()]
}

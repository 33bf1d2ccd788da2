//! `slackwater file ...`: make, list, look at, resize, rename and delete files.

use clap::{Args, Subcommand};
use slackwater_client::query::ListFiles;
use slackwater_client::types::{File, PAGE_LIMIT_MAX};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Align, Table, fields, moment, or_dash};
use crate::pages;
use crate::reclaimable::{self, Told};
use crate::several::Several;
use crate::size::{SIZE_HELP, Size, human};

/// Where drivers have their disks, and what keeps published snapshots.
const DRIVER_DIRECTORIES: [&str; 2] = ["workers/", "published/"];

/// Files of up to so many times the capacity of the appliance are made without a question.
const CAPACITIES_MAX: u64 = 1000;

/// And files of up to this size.
const SURELY_MEANT_BYTES: u64 = 1 << 40;

/// What to do with files.
#[derive(Debug, Subcommand)]
pub(crate) enum FileCommand {
    /// Make a sparse file, and the directories on the way; prints its path
    Create {
        /// Path of the new file
        path: String,
        #[arg(help = SIZE_HELP)]
        size: Size,
        /// Allow a size of over a thousand times what the appliance can hold
        #[arg(long)]
        over_capacity: bool,
    },
    /// List files, in order of their paths
    Ls(ListArguments),
    /// Show files
    Stat {
        /// Paths
        #[arg(required = true)]
        paths: Vec<String>,
    },
    /// Give a file another size: what is added reads as zeros
    Resize(ResizeArguments),
    /// Give a file another path, at which nothing may be
    Mv {
        /// The path that it has
        from: String,
        /// The path that it is to have
        to: String,
    },
    /// Delete files; their snapshots stay
    Rm {
        /// Paths
        #[arg(required = true)]
        paths: Vec<String>,
        /// A file that does not exist is no failure
        #[arg(long, short)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ResizeArguments {
    /// Path of the file
    path: String,
    #[arg(help = SIZE_HELP)]
    size: Size,
    /// Allow a smaller size: what lies beyond is lost
    #[arg(long)]
    shrink: bool,
    /// Allow a size of over a thousand times what the appliance can hold
    #[arg(long)]
    over_capacity: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Only files whose path begins with this
    #[arg(default_value = "")]
    prefix: String,
    /// Also the files of drivers, below workers/ and published/. JSON has them always, and so has a table
    /// of a PREFIX that names them
    #[arg(long)]
    all: bool,
    /// Also what a delete of each would free: a call a file, which takes a time in proportion to what it alone has
    #[arg(long)]
    reclaimable: bool,
    /// Most files to list
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

pub(crate) async fn run(context: &Context, command: FileCommand) -> Result<(), Failure> {
    match command {
        FileCommand::Create { path, size, over_capacity } => {
            if !over_capacity {
                ask_back(context, size.bytes()).await?;
            }
            create(context, &path, size).await
        }
        FileCommand::Ls(arguments) => list(context, &arguments).await,
        FileCommand::Stat { paths } => stat(context, &paths).await,
        FileCommand::Resize(arguments) => resize(context, &arguments).await,
        FileCommand::Mv { from, to } => rename(context, &from, &to).await,
        FileCommand::Rm { paths, force } => remove(context, &paths, force).await,
    }
}

async fn create(context: &Context, path: &str, size: Size) -> Result<(), Failure> {
    let file = context.client.create_file(&context.path(path)?, size.bytes()).await?;
    context.output.remark(&format!("made a sparse file of {}", human(file.size_bytes)));
    context.output.result(&file, || format!("{}\n", file.path))
}

/// Refuses a size that is likely a slip of the unit: files are sparse, but not by so much.
async fn ask_back(context: &Context, size_bytes: u64) -> Result<(), Failure> {
    // Of a file that no store is too small for, the appliance need not be asked.
    if size_bytes <= SURELY_MEANT_BYTES {
        return Ok(());
    }
    let capacity_bytes = context.client.stats().await?.capacity_bytes;
    if size_bytes / CAPACITIES_MAX <= capacity_bytes {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "a file of {} is over {CAPACITIES_MAX} times what the appliance can hold ({}): add --over-capacity if that is meant",
        human(size_bytes),
        human(capacity_bytes)
    )))
}

async fn list(context: &Context, arguments: &ListArguments) -> Result<(), Failure> {
    let prefix = crate::name::prefix(&arguments.prefix, &context.export_path);
    let is_named = DRIVER_DIRECTORIES.iter().any(|directory| is_part(prefix, directory));
    let with_drivers = arguments.all || context.output.is_json() || is_named;
    let is_asked = arguments.reclaimable;
    let mut left_out = false;
    let mut columns = vec![
        ("PATH", Align::Left),
        ("SIZE", Align::Right),
        ("USED", Align::Right),
        ("UNIQUE", Align::Right),
        ("MODIFIED", Align::Left),
    ];
    columns.extend(is_asked.then_some(("RECLAIMABLE", Align::Right)));
    let table = Table::new(&columns);
    let mut query = ListFiles {
        prefix: (!prefix.is_empty()).then(|| prefix.to_owned()),
        ..ListFiles::default()
    };
    let page = async |limit, after| {
        // Of what is left out, there may be much: whole pages.
        query.limit = Some(if with_drivers || is_asked { limit } else { PAGE_LIMIT_MAX });
        query.after = after;
        let mut page = context.client.files(&query).await?;
        if !with_drivers {
            let before = page.items.len();
            page.items.retain(|file| !is_of_driver(file));
            left_out |= page.items.len() < before;
        }
        Ok((page.items, page.next))
    };
    let page = reclaimable::pages(&context.client, is_asked, page);
    let row = |file: &Told<File>| {
        let mut cells = row(&file.item);
        cells.extend(is_asked.then(|| file.shown()));
        cells
    };
    pages::print(context.output, arguments.limit, table, row, page).await?;
    if left_out {
        context.output.remark(
            "files of drivers, below workers/ and published/, are left out: --all shows them",
        );
    }
    Ok(())
}

/// Whether the prefix of paths names a directory: some of its letters, or a path in it.
fn is_part(prefix: &str, directory: &str) -> bool {
    !prefix.is_empty() && (directory.starts_with(prefix) || prefix.starts_with(directory))
}

fn is_of_driver(file: &File) -> bool {
    DRIVER_DIRECTORIES.iter().any(|directory| file.path.starts_with(directory))
}

fn row(file: &File) -> Vec<String> {
    vec![
        file.path.clone(),
        human(file.size_bytes),
        human(file.used_bytes),
        human(file.unique_bytes),
        moment(file.modified_at),
    ]
}

async fn stat(context: &Context, paths: &[String]) -> Result<(), Failure> {
    let mut several = Several::default();
    for (position, text) in paths.iter().enumerate() {
        let outcome = stat_one(context, text, position > 0).await;
        if paths.len() == 1 {
            return outcome;
        }
        several.note(context.output, text, outcome)?;
    }
    several.finish()
}

async fn stat_one(context: &Context, text: &str, is_later: bool) -> Result<(), Failure> {
    let file = context.client.file(&context.path(text)?).await?;
    let told = Told::of(&context.client, file).await?;
    context.output.result(&told, || {
        let gap = if is_later { "\n" } else { "" };
        format!("{gap}{}", describe(&told))
    })
}

fn describe(told: &Told<File>) -> String {
    let file = &told.item;
    let size = |bytes: u64| format!("{} ({bytes} bytes)", human(bytes));
    fields(&[
        ("path", file.path.clone()),
        ("size", size(file.size_bytes)),
        ("used", size(file.used_bytes)),
        ("unique", size(file.unique_bytes)),
        ("reclaimable", told.described()),
        ("clone of", or_dash(file.origin_snapshot_id)),
        ("created", moment(file.created_at)),
        ("modified", moment(file.modified_at)),
    ])
}

async fn resize(context: &Context, arguments: &ResizeArguments) -> Result<(), Failure> {
    let path = context.path(&arguments.path)?;
    let size_bytes = arguments.size.bytes();
    if !arguments.shrink || !arguments.over_capacity {
        let file = context.client.file(&path).await?;
        if size_bytes > file.size_bytes && !arguments.over_capacity {
            ask_back(context, size_bytes).await?;
        }
        if size_bytes < file.size_bytes && !arguments.shrink {
            return Err(Failure::Usage(format!(
                "{path} has {}: what lies beyond {} would be lost; add --shrink if that is meant",
                human(file.size_bytes),
                human(size_bytes)
            )));
        }
    }
    let file = context.client.resize_file(&path, size_bytes).await?;
    context.output.remark(&format!("{} now has {}", file.path, human(file.size_bytes)));
    if context.output.is_json() { context.output.json(&file) } else { Ok(()) }
}

async fn rename(context: &Context, from: &str, to: &str) -> Result<(), Failure> {
    let file = context.client.rename_file(&context.path(from)?, &context.path(to)?).await?;
    context.output.remark(&format!("now {}", file.path));
    if context.output.is_json() { context.output.json(&file) } else { Ok(()) }
}

async fn remove(context: &Context, paths: &[String], force: bool) -> Result<(), Failure> {
    let mut several = Several::default();
    for text in paths {
        let outcome = remove_one(context, text, force).await;
        if paths.len() == 1 {
            return outcome;
        }
        several.note(context.output, text, outcome)?;
    }
    several.finish()
}

async fn remove_one(context: &Context, text: &str, force: bool) -> Result<(), Failure> {
    let path = context.path(text)?;
    match context.client.delete_file(&path).await {
        Err(error) if force && error.is_not_found() => return Ok(()),
        outcome => outcome?,
    }
    context.output.remark(&format!("deleted {path}"));
    if context.output.is_json() {
        context.output.json(&serde_json::json!({ "deleted": path }))?;
    }
    Ok(())
}

//! `slackwater clone`: a writable file from a snapshot.

use clap::Args;

use crate::context::Context;
use crate::failure::Failure;
use crate::size::human;

/// Makes a writable file with a snapshot's content, in a time that does not depend on its size.
#[derive(Debug, Args)]
pub(crate) struct CloneArguments {
    /// Id or name of the snapshot
    snapshot: String,
    /// Path of the new file; nothing may be there
    path: String,
}

pub(crate) async fn run(context: &Context, arguments: CloneArguments) -> Result<(), Failure> {
    let path = context.path(&arguments.path)?;
    let id = crate::name::snapshot(&context.client, &arguments.snapshot).await?;
    let file = context.client.create_clone(id, &path).await?;
    context.output.remark(&format!(
        "cloned {id}: {}, {} shared",
        human(file.size_bytes),
        human(file.used_bytes)
    ));
    context.output.result(&file, || format!("{}\n", file.path))
}

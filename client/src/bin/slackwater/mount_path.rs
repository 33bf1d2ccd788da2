//! `slackwater mount-path`: a path by which this machine mounts the export.

use crate::context::Context;
use crate::failure::Failure;
use crate::output::moment;

pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let made = context.client.mount_path().await?;
    context.output.result(&made, || format!("{}\n", made.path))?;
    context.output.remark(&format!("use it once, before {}", moment(made.expires_at)));
    Ok(())
}

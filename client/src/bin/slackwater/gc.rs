//! `slackwater gc`: reclaims and compacts all that waits for it now.

use crate::context::Context;
use crate::failure::Failure;
use crate::output::fields;
use crate::progress;
use crate::size::human;

pub(crate) async fn run(context: &Context) -> Result<(), Failure> {
    let waiting = progress::spinner(context.output, "collecting");
    let report = context.client.gc().await;
    waiting.finish_and_clear();
    let report = report?;
    context.output.result(&report, || {
        fields(&[
            ("freed", human(report.freed_bytes)),
            ("segments removed", report.segments.to_string()),
            ("layers", report.layers.to_string()),
            ("map entries", report.entries.to_string()),
        ])
    })
}

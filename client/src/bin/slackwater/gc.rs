//! `slackwater gc`: reclaims and compacts all that waits for it now.

use slackwater_client::types::GcReport;

use crate::care;
use crate::context::Context;
use crate::failure::Failure;
use crate::interrupt::Notice;
use crate::output::fields;
use crate::size::human;

pub(crate) async fn run(context: &Context, notice: &Notice) -> Result<(), Failure> {
    let report = care::wait(context, "collecting", notice, context.client.gc()).await?;
    context.output.result(&report, || describe(&report))
}

fn describe(report: &GcReport) -> String {
    let (before, after) = (report.used_bytes_before, report.used_bytes);
    // Release 0.2 does not tell what is used.
    let freed = if before > 0 { before.saturating_sub(after) } else { report.freed_bytes };
    let mut lines = vec![("freed", human(freed))];
    if before > 0 {
        lines.push(("used", format!("{}, {} before", human(after), human(before))));
    }
    lines.extend([
        ("segments removed", report.segments.to_string()),
        ("layers", report.layers.to_string()),
        ("map entries", report.entries.to_string()),
    ]);
    fields(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_is_what_the_store_takes_less() {
        let mut report = GcReport {
            layers: 1,
            entries: 2,
            segments: 3,
            freed_bytes: 1 << 20,
            used_bytes_before: 5 << 20,
            used_bytes: 2 << 20,
        };
        let text = describe(&report);
        assert!(text.contains("3.0 MiB\n") && text.contains("2.0 MiB, 5.0 MiB before"), "{text}");
        // Clients wrote more than it freed.
        report.used_bytes = 6 << 20;
        assert!(describe(&report).contains("0 B\n"));
        // Release 0.2.
        (report.used_bytes_before, report.used_bytes) = (0, 0);
        let text = describe(&report);
        assert!(text.contains("1.0 MiB\n") && !text.contains("used"), "{text}");
    }
}

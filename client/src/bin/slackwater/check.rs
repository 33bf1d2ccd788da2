//! `slackwater check`: verifies the store while it serves.

use clap::Args;
use slackwater_client::types::CheckReport;

use crate::care;
use crate::context::Context;
use crate::failure::Failure;
use crate::interrupt::Notice;
use crate::output::{fields, printable};
use crate::size::human;

/// Verifies the store's invariants; problems are listed on standard output.
#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// Read and hash every stored block too; takes as long as reading them all
    #[arg(long)]
    data: bool,
}

pub(crate) async fn run(
    context: &Context,
    arguments: CheckArguments,
    notice: &Notice,
) -> Result<(), Failure> {
    let call = context.client.check(arguments.data);
    let report = care::wait(context, "checking", notice, call).await?;
    context.output.result(&report, || describe(&report))?;
    if report.clean { Ok(()) } else { Err(Failure::Problems) }
}

fn describe(report: &CheckReport) -> String {
    let mut text = String::new();
    for problem in &report.problems {
        text.push_str(&format!("{}\n", printable(problem)));
    }
    if report.problems_left_out > 0 {
        text.push_str(&format!("... and {} more\n", report.problems_left_out));
    }
    for hit in &report.hits {
        text.push_str(&format!("{}\n", printable(&hit.describe())));
    }
    if report.hits_left_out > 0 {
        text.push_str(&format!("... and {} more places\n", report.hits_left_out));
    }
    let verdict = if report.clean { "no problems" } else { "PROBLEMS FOUND" };
    text + &fields(&[
        ("verdict", verdict.to_owned()),
        ("inodes", report.inodes.to_string()),
        ("layers", report.layers.to_string()),
        ("map runs", report.runs.to_string()),
        ("chunks", report.chunks.to_string()),
        ("damaged chunks", report.damaged_chunks.to_string()),
        ("lost blocks", report.lost_blocks.to_string()),
        ("segment files", report.files.to_string()),
        ("data read", human(report.data_bytes)),
    ])
}

#[cfg(test)]
mod tests {
    use slackwater_client::types::Hit;

    use super::*;

    #[test]
    fn problems_come_first_and_none_is_passed_over() {
        let report = CheckReport {
            clean: false,
            problems: vec!["I1: a count is wrong".to_owned()],
            problems_left_out: 7,
            inodes: 1,
            layers: 2,
            runs: 3,
            chunks: 4,
            files: 5,
            damaged_chunks: 1,
            lost_blocks: 0,
            hits: vec![Hit {
                path: "a".to_owned(),
                snapshot_id: None,
                offset_bytes: 4096,
                length_bytes: 8192,
                lost: false,
            }],
            hits_left_out: 9,
            data_bytes: 0,
        };
        let text = describe(&report);
        let begin = "I1: a count is wrong\n... and 7 more\ndamaged: a, bytes 4096 to 12288\n\
                     ... and 9 more places\nverdict ";
        assert!(text.starts_with(begin), "{text}");
        assert!(text.contains("PROBLEMS FOUND\n"), "{text}");
    }
}

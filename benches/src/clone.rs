//! The experiment `clone`: what a snapshot and a clone cost, by size, extents and depth.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::appliance::{self, Appliance};
use crate::arguments::CloneArguments;
use crate::embedded::Embedded;
use crate::failure::Failure;
use crate::latency::Latencies;
use crate::reflink::Rival;
use crate::report::Report;
use crate::stop::Stop;
use crate::{cases, latency, reflink};

/// Longest time of the experiment; it takes about half a minute on an idle machine.
const TIME_MAX: Duration = Duration::from_secs(170);

/// Runs the experiment and prints what it found; answers whether every promise held.
pub(crate) fn run(arguments: &CloneArguments) -> Result<bool, Failure> {
    let stop = Stop::listen(TIME_MAX)?;
    let server = match &arguments.server {
        Some(server) => server.clone(),
        None => appliance::beside()?,
    };
    let latencies = latencies(&server, arguments.samples, &stop)?;
    let rival = if arguments.no_rival {
        Rival::LeftOut
    } else {
        progress("copies on XFS");
        reflink::measure(&stop)?
    };
    let report = Report::new(&latencies, &rival);
    if let Some(path) = &arguments.json {
        write_json(path, &report)?;
    }
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{report}").map_err(Failure::on("print the report"))?;
    Ok(report.held())
}

/// Snapshots and clones at a server and in a store of their own.
fn latencies(server: &Path, samples: u32, stop: &Stop) -> Result<Latencies, Failure> {
    let appliance = Appliance::start(server, stop)?;
    // One thread makes the calls and drives their connection: a sample holds no waking of
    // another thread of this program.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::on("start a runtime"))?;
    runtime.block_on(async {
        progress("files of all cases");
        let cases = cases::prepare(&appliance.client, stop).await?;
        let embedded = Embedded::prepare()?;
        progress("snapshots and clones");
        latency::measure(&appliance.client, cases, &embedded, samples, stop).await
    })
}

fn write_json(path: &Path, report: &Report) -> Result<(), Failure> {
    let failed = Failure::at("write", path);
    let text = match serde_json::to_string_pretty(report) {
        Ok(text) => text + "\n",
        Err(error) => return Err(failed(error.into())),
    };
    std::fs::write(path, text).map_err(failed)
}

/// Tells what is being done. On standard error: the report alone is on standard output.
fn progress(what: &str) {
    // Nobody to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "slackwater-bench: {what} ...");
}

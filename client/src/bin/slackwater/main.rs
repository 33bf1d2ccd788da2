//! The command `slackwater`: what a person or a script does with the appliance.
//!
//! ```text
//! arguments -> context -> one file a command -> client library -> REST
//!                              |
//!              name size output failure    what goes in and comes out
//!              transfer image blocks       the engine of import and export; pipe: without a file
//!              care                        waits for check and gc
//! ```

mod arguments;
mod audit;
mod blocks;
mod care;
mod check;
mod clone;
mod completions;
mod context;
mod doctor;
mod export;
mod failure;
mod file;
mod gc;
mod held;
mod image;
mod import;
mod interrupt;
mod mount_path;
mod name;
mod output;
mod pages;
mod pipe;
mod progress;
mod reclaimable;
mod rpc;
mod several;
mod size;
mod snapshot;
mod stats;
mod top;
mod transfer;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use arguments::{Arguments, Command, Global};
use context::Context;
use failure::{Exit, Failure};
use output::Output;

/// Time that file work under way gets when the command ends early.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.global.json);
    let outcome = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(run(&arguments.global, arguments.command));
            runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
            outcome
        }
        Err(error) => Err(Failure::Other(format!("cannot start the runtime: {error}"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // Check and doctor have said what they found.
            if failure.exit() != Exit::Problems {
                output.failure(&failure);
            }
            ExitCode::from(failure.exit().code())
        }
    }
}

/// Runs the command until it ends or a signal does.
async fn run(global: &Global, command: Command) -> Result<(), Failure> {
    let notice = interrupt::Notice::default();
    tokio::select! {
        outcome = dispatch(global, command, &notice) => outcome,
        exit = interrupt::signal() => Err(Failure::Interrupted { exit, resume: notice.take() }),
    }
}

async fn dispatch(
    global: &Global,
    command: Command,
    notice: &interrupt::Notice,
) -> Result<(), Failure> {
    // These work without an appliance.
    let command = match command {
        Command::Completions(arguments) => return completions::run(arguments),
        Command::Manual(arguments) => return completions::manual(&arguments),
        Command::Doctor(arguments) => return doctor::run(global, arguments).await,
        other => other,
    };
    let context = Context::new(global)?;
    match command {
        Command::File(command) => file::run(&context, command).await,
        Command::Snapshot(command) => snapshot::run(&context, command).await,
        Command::Clone(arguments) => clone::run(&context, arguments).await,
        Command::Import(arguments) => import::run(&context, arguments, notice).await,
        Command::Export(arguments) => export::run(&context, arguments, notice).await,
        Command::Stats => stats::run(&context).await,
        Command::Top(arguments) => top::run(&context, arguments).await,
        Command::Check(arguments) => check::run(&context, arguments, notice).await,
        Command::Gc => gc::run(&context, notice).await,
        Command::MountPath => mount_path::run(&context).await,
        Command::Worker(command) => worker::run(&context, command).await,
        Command::Audit(arguments) => audit::run(&context, arguments).await,
        Command::Doctor(_) | Command::Completions(_) | Command::Manual(_) => Ok(()),
    }
}

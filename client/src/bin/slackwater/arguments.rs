//! The command line: what it may hold. Each command's own arguments stand in its file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::failure::EXIT_CODES_HELP;
use crate::{
    audit, check, clone, completions, doctor, export, file, import, snapshot, top, worker,
};

/// Where the appliance listens unless it is told otherwise.
const API_DEFAULT: &str = "http://127.0.0.1:8049";

/// Snapshots and clones of disks in a millisecond: the command of the Slackwater appliance.
///
/// Results go to standard output, everything else to standard error. Sizes are in binary units:
/// 1K, 1KB and 1KiB all mean 1024 bytes. Paths are taken with or without a leading slash, and
/// with the export's path in front: /slackwater/a.img, /a.img and a.img are one file.
#[derive(Debug, Parser)]
#[command(name = "slackwater", version, after_help = EXIT_CODES_HELP, propagate_version = true)]
#[command(subcommand_required = true, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// Address of the appliance's REST face
    #[arg(long, global = true, value_name = "URL", env = "SLACKWATER_API", default_value = API_DEFAULT)]
    pub(crate) api: String,

    /// File that holds the bearer token (else: environment variable SLACKWATER_TOKEN)
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// File with the certificate (PEM) of the authority to trust, instead of the system's
    #[arg(long, global = true, value_name = "FILE", env = "SLACKWATER_CA")]
    pub(crate) ca: Option<PathBuf>,

    /// Print exact machine output: JSON, sizes in bytes; failures as JSON on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Seconds to wait for an answer
    #[arg(
        long,
        global = true,
        value_name = "SECONDS",
        env = "SLACKWATER_TIMEOUT",
        default_value_t = slackwater_client::TIMEOUT_DEFAULT.as_secs(),
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub(crate) timeout: u64,

    /// Path of the NFS export, which may stand in front of paths
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "SLACKWATER_EXPORT_PATH",
        default_value = "/slackwater"
    )]
    pub(crate) export_path: String,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make, list, look at, resize, rename and delete files
    #[command(subcommand)]
    File(file::FileCommand),
    /// Take, list, look at, label, delete and compare snapshots
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Make a writable file from a snapshot; prints its path
    Clone(clone::CloneArguments),
    /// Copy a raw image from this machine into a file of the appliance
    Import(import::ImportArguments),
    /// Copy a snapshot to a raw image on this machine
    Export(export::ExportArguments),
    /// Show what is stored, and how well it is shared
    Stats,
    /// Watch the appliance at work: rates, refreshed
    Top(top::TopArguments),
    /// Verify the store while it serves; exit code 6 if something is wrong
    Check(check::CheckArguments),
    /// Reclaim and compact all that waits for it now
    Gc,
    /// Print a secret path by which the whole export is mounted; needs the role worker. With a worker's credential it is
    /// what the worker reaches
    ///
    /// `mount -t nfs -o vers=3,proto=tcp,port=2049,mountport=2049,nolock,hard,nosuid,nodev HOST:"$(slackwater mount-path)" DIRECTORY`.
    /// It counts for five minutes, and for some seconds after it was used, for the same address. Other users of the
    /// machine see it in the list of processes and of mounts: mount below a directory of root alone. What was mounted
    /// goes on for as long as the token is there.
    MountPath,
    /// Add, list and revoke the machines that have credentials of their own; needs the role admin
    #[command(subcommand)]
    Worker(worker::WorkerCommand),
    /// List who changed what by REST, the newest first; needs the role admin
    ///
    /// STATUS is that of the outcome, `-` where the caller left before the answer, or there was none in time. Writing to
    /// a file is recorded once an hour for each caller. Changes over NFS are not recorded; giving out a path to mount
    /// (`POST /v1/mount-paths`) is.
    Audit(audit::AuditArguments),
    /// Tell what this machine lacks to attach disks of the appliance
    Doctor(doctor::DoctorArguments),
    /// Print the completion script of a shell
    Completions(completions::CompletionsArguments),
    /// Write the manual pages; `make install` calls it
    #[command(hide = true)]
    Manual(completions::ManualArguments),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_help_tells_exit_codes_and_units() {
        let help = Arguments::command().render_long_help().to_string();
        assert!(help.contains("Exit codes:") && help.contains("binary units"), "{help}");
    }
}

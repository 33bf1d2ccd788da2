//! The command line of the soaks.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use slackwater_client::Token;

/// A soak.
#[derive(Debug, Subcommand)]
pub(crate) enum SoakCommand {
    /// Kill the server at random moments, and compare all that it acknowledged
    Kill(KillArguments),
    /// Work by hundreds of connections beside slow, silent and vanishing ones
    Load(LoadArguments),
}

/// What `soak load` takes.
#[derive(Debug, Args)]
pub(crate) struct LoadArguments {
    /// The server [default: slackwaterd beside this program]
    #[arg(long, value_name = "FILE")]
    pub(super) server: Option<PathBuf>,

    /// Directory in which the store is made [default: that of temporary files]
    #[arg(long = "dir", value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,

    /// Time of the load, once all files and snapshots are made
    #[arg(long, value_name = "SECONDS", default_value = "600",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) seconds: u64,

    /// What the clients do is drawn from this number [default: any]
    #[arg(long, value_name = "NUMBER")]
    pub(super) seed: Option<u64>,

    /// Clients, each with an NFS connection and one of REST
    #[arg(long, value_name = "COUNT", default_value = "500", value_parser = clients)]
    pub(super) connections: usize,

    /// Files of all clients, and as many snapshots
    #[arg(long, value_name = "COUNT", default_value = "10000",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) files: u32,

    /// Connections that say nothing
    #[arg(long, value_name = "COUNT", default_value = "10000",
          value_parser = clap::value_parser!(u32).range(0..=25_000))]
    pub(super) silent: u32,

    /// Clients of each kind that is slow or vanishes
    #[arg(long, value_name = "COUNT", default_value = "8",
          value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(super) slow: u32,

    /// Memory of the server, as its own --memory takes it
    #[arg(long, value_name = "MEBIBYTES", default_value = "1024",
          value_parser = clap::value_parser!(u64).range(192..=1_048_576))]
    pub(super) memory_mebibytes: u64,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

/// A number of clients that one machine can be.
fn clients(text: &str) -> Result<usize, String> {
    let clients = text.parse().ok().filter(|clients| (1..=5_000).contains(clients));
    clients.ok_or_else(|| "expected a number from 1 to 5000".to_owned())
}

/// What `soak kill` takes.
#[derive(Debug, Args)]
pub(crate) struct KillArguments {
    /// The server to kill [default: slackwaterd beside this program]
    ///
    /// Any program that takes the options of slackwaterd and serves at the addresses that it is
    /// given: tests/power/server runs slackwaterd in a machine of its own, so that a kill is a
    /// power cut.
    #[arg(long, value_name = "FILE")]
    pub(super) server: Option<PathBuf>,

    /// Directory in which the store is made [default: that of temporary files]
    #[arg(long = "dir", value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,

    /// Lives of the server
    #[arg(long, value_name = "COUNT", default_value = "300",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(super) rounds: u64,

    /// What the clients do and when the server dies is drawn from this number [default: any]
    ///
    /// It is printed. Which call a kill meets is up to the machine all the same.
    #[arg(long, value_name = "NUMBER")]
    pub(super) seed: Option<u64>,

    /// Clients, each with two connections
    #[arg(long, value_name = "COUNT", default_value = "6", value_parser = workers)]
    pub(super) workers: usize,

    /// A life lasts at most this long once the clients have compared everything
    #[arg(long, value_name = "MILLISECONDS", default_value = "2000",
          value_parser = clap::value_parser!(u64).range(0..=600_000))]
    pub(super) load_max_ms: u64,

    /// Of a hundred lives, so many are preceded by one that ends before the server is ready
    #[arg(long, value_name = "PERCENT", default_value = "25",
          value_parser = clap::value_parser!(u64).range(0..=100))]
    pub(super) start_kill_percent: u64,

    /// Such a life lasts at most this long
    #[arg(long, value_name = "MILLISECONDS", default_value = "300",
          value_parser = clap::value_parser!(u64).range(0..=600_000))]
    pub(super) start_max_ms: u64,

    /// A server that is not ready after this time has failed
    #[arg(long, value_name = "SECONDS", default_value = "60",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) ready_limit_seconds: u64,

    /// Token of the server's REST face, if it wants one
    #[arg(long, value_name = "TOKEN", value_parser = Token::new)]
    pub(super) token: Option<Token>,

    /// Memory of the server, as its own --memory takes it
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub(super) memory: String,

    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

/// A number of clients that are threads here.
fn workers(text: &str) -> Result<usize, String> {
    let workers = text.parse().ok().filter(|workers| (1..=256).contains(workers));
    workers.ok_or_else(|| "expected a number from 1 to 256".to_owned())
}

//! `slackwater-driver`: the daemon that a worker runs beside Docker and containerd.
//!
//! This release holds its first command only: `doctor`, which tells whether the appliance can
//! be reached from this worker and takes reads and writes. The engines' plugins come with the
//! release that CHANGELOG.md will name; until then a worker mounts the export itself, as
//! README.md shows.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use slackwater_client::{Client, ClientError, RetryPolicy, Token, TokenError};

/// Time to wait for each answer: a diagnosis is to be quick.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What a worker needs to know of its appliance.
#[derive(Debug, Parser)]
#[command(name = "slackwater-driver", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Ask the appliance whether it serves; exit code 1 if it does not
    Doctor(DoctorArguments),
}

#[derive(Debug, clap::Args)]
struct DoctorArguments {
    /// Address of the appliance's REST face
    #[arg(
        long,
        value_name = "URL",
        env = "SLACKWATER_API",
        default_value = "http://127.0.0.1:8049"
    )]
    api: String,
    /// File that holds the bearer token
    #[arg(long, value_name = "FILE", env = "SLACKWATER_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// File with the certificate authority of the appliance, in PEM
    #[arg(long, value_name = "FILE", env = "SLACKWATER_CA")]
    ca: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum DriverError {
    #[error("read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("token file {}: {source}", path.display())]
    Token { path: PathBuf, source: TokenError },
    #[error(transparent)]
    Client(#[from] ClientError),
}

fn read(path: &PathBuf) -> Result<Vec<u8>, DriverError> {
    std::fs::read(path).map_err(|source| DriverError::Read { path: path.clone(), source })
}

async fn doctor(arguments: &DoctorArguments) -> Result<(), DriverError> {
    let mut builder = Client::builder(&arguments.api).timeout(TIMEOUT).retry(RetryPolicy::never());
    if let Some(path) = &arguments.token_file {
        let text = String::from_utf8_lossy(&read(path)?).trim().to_owned();
        let token = Token::new(&text)
            .map_err(|source| DriverError::Token { path: path.clone(), source })?;
        builder = builder.token(token);
    }
    if let Some(path) = &arguments.ca {
        builder = builder.ca_certificate(read(path)?);
    }
    let client = builder.build()?;
    client.readyz().await?;
    let stats = client.stats().await?;
    println!(
        "{} serves: {} files, {} snapshots, {} bytes available",
        arguments.api, stats.file_count, stats.snapshot_count, stats.available_bytes
    );
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Command::Doctor(arguments) = Arguments::parse().command;
    match doctor(&arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slackwater-driver: {error}");
            ExitCode::FAILURE
        }
    }
}

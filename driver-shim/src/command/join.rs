//! `slackwater-driver join`: this machine becomes a worker with a credential of its own.

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use slackwater_client::worker::JOIN_TOKEN_PREFIX;
use slackwater_client::{Token, is_readable_on_the_way};
use uuid::Uuid;

use super::{Format, print};
use crate::credential::{Origin, Turn};
use crate::daemon;
use crate::engine::daemon::Daemon;
use crate::error::DriverError;
use crate::settings::{Config, read_token};
use crate::worker::worker_id_in;

/// Longest input that is read; a join token has some 80 bytes.
const INPUT_BYTES_MAX: u64 = 4096;

/// Joins the appliance.
#[derive(Clone, Debug, Args)]
pub(super) struct JoinArguments {
    /// File that holds the join token [default: standard input]
    #[arg(long, value_name = "FILE")]
    join_token_file: Option<PathBuf>,
}

pub(super) async fn run(
    arguments: &JoinArguments,
    config: &Config,
    format: Format,
) -> Result<(), DriverError> {
    if let Some(path) = &config.target.token_file {
        return Err(DriverError::Usage(format!(
            "token-file is {}, so the credential would not be used: leave it out (--token-file, \
             SLACKWATER_TOKEN_FILE, token-file in the configuration file)",
            path.display()
        )));
    }
    let token = join_token(arguments.join_token_file.as_deref())?;
    if is_readable_on_the_way(&config.target.api) {
        // Nothing can be done when standard error is gone.
        let _ = writeln!(
            std::io::stderr(),
            "slackwater-driver: warning: the join token and the credential are sent unencrypted; use https:// beyond \
             this machine"
        );
    }
    let worker_id = worker_id(config).await?;
    let exchange = Turn::take(&config.state_dir)?.begin(Origin::JoinToken, token.reveal())?;
    let client = config.target.client_with(token)?;
    let worker = client.join(worker_id, exchange.next().hash()).await?;
    exchange.adopt()?;
    match format {
        Format::Json => {
            print(&format!("{:#}\n", json!({ "name": worker.name, "worker_id": worker_id })))
        }
        Format::Text => print(&format!("joined as {}\n", worker.name)),
    }
    Ok(())
}

/// The id of this worker: of its state, or told by the daemon that has the state open.
async fn worker_id(config: &Config) -> Result<Uuid, DriverError> {
    match daemon::lock(&config.state_dir) {
        Ok(_lock) => return Ok(worker_id_in(&config.state_dir)?),
        Err(DriverError::Locked { .. }) => {}
        Err(error) => return Err(error),
    }
    let status = Daemon::new(&config.control_socket).status().await.ok();
    let id = status.and_then(|status| status["worker_id"].as_str()?.parse().ok());
    id.ok_or_else(|| DriverError::NoWorkerId {
        path: config.state_dir.clone(),
        control_socket: config.control_socket.clone(),
    })
}

fn join_token(file: Option<&Path>) -> Result<Token, DriverError> {
    let (token, text) = match file {
        Some(path) => (read_token(path)?, path.display().to_string()),
        None => (read_standard_input()?, "standard input".to_owned()),
    };
    if token.begins_with(JOIN_TOKEN_PREFIX) {
        return Ok(token);
    }
    Err(DriverError::Usage(format!(
        "{text} holds no join token: one begins with `{JOIN_TOKEN_PREFIX}`, and `slackwater worker add NAME` makes it"
    )))
}

fn read_standard_input() -> Result<Token, DriverError> {
    let mut stdin = std::io::stdin().lock();
    let failed = DriverError::io("read", "standard input");
    let mut text = String::new();
    let read = if stdin.is_terminal() {
        // Nothing can be done when standard error is gone.
        let _ = write!(std::io::stderr(), "join token: ");
        std::io::BufRead::read_line(&mut stdin, &mut text)
    } else {
        stdin.take(INPUT_BYTES_MAX).read_to_string(&mut text)
    };
    read.map_err(failed)?;
    Token::new(&text).map_err(|error| DriverError::Usage(format!("standard input: {error}")))
}

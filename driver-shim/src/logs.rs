//! The log: structured events on standard error, so that standard output stays what a person
//! or a script reads.

use std::io::IsTerminal;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, fmt};

use crate::settings::{LogFilter, LogFormat};

/// Sends events that pass `filter` to standard error.
///
/// # Errors
/// A log was set up before.
pub fn start(filter: &LogFilter, format: LogFormat) -> Result<(), TryInitError> {
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter.to_env_filter()).with(layer).try_init()
}

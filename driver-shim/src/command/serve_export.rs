//! `slackwater-driver serve-export`: the processes between the kernel and the appliance, which
//! outlive the daemon. The keeper has the descriptor of `/dev/fuse`, and starts what serves it
//! again when that died.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};

use clap::Args;
use slackwater_fuse::ServeOptions;

use crate::error::DriverError;
use crate::private;
use crate::settings::Config;

/// Serves the export on the descriptor that is the standard input.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct ServeExportArguments {
    /// Keep a process that serves, instead of serving
    #[arg(long)]
    pub(super) keep: bool,
    /// The descriptor was served before
    #[arg(long)]
    pub(super) resume: bool,
}

/// Runs the program with the same arguments, but for `--keep`, until the export is unmounted.
pub(super) fn keep(arguments: &[OsString]) -> Result<(), DriverError> {
    let program: Vec<OsString> =
        arguments.iter().filter(|argument| *argument != "--keep").cloned().collect();
    slackwater_attach::keep_serving(&program, standard_input()?)?;
    Ok(())
}

/// Serves until the export is unmounted.
pub(super) async fn serve(config: &Config, resume: bool) -> Result<(), DriverError> {
    let state_directory = config.state_dir.join("fuse");
    match private::take(&config.cache_dir, slackwater_fuse::CACHE_FILE) {
        // Containers wait for it, and the one before used that directory, too.
        Err(error @ DriverError::Exposed { .. }) if resume => tracing::error!(%error, "used still"),
        taken => taken?,
    }
    std::fs::create_dir_all(&state_directory).map_err(DriverError::io("make", &state_directory))?;
    let options = ServeOptions {
        client: config.target.client_of_export()?,
        nfs_address: config.target.nfs_address().await?,
        certificate: config.target.certificate.clone(),
        export: config.target.export_path.clone(),
        cache_directory: config.cache_dir.clone(),
        cache_size_bytes: config.cache_size.bytes(),
        state_directory,
    };
    Ok(slackwater_fuse::serve(options, standard_input()?, resume).await?)
}

fn standard_input() -> Result<OwnedFd, DriverError> {
    let input = std::io::stdin();
    input.as_fd().try_clone_to_owned().map_err(DriverError::io("use", "standard input"))
}

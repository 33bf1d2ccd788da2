//! The command line: what it may hold, and what is done for it.

mod age;
mod attach;
mod completions;
mod doctor;
mod engine_config;
mod image;
mod join;
mod published;
mod rpc;
mod serve_export;
mod status;
mod workers;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tokio::runtime::Runtime;

use crate::error::DriverError;
use crate::settings::{Config, Settings};
use crate::{daemon, logs};

/// Ends the help text.
const EXIT_CODES: &str = "Exit codes: 0 done, 1 failure, 2 wrong usage or settings, 6 doctor found that something is missing";

/// State directory of `attach` and `detach`, unless the command line or the environment names one.
const ATTACH_STATE_DIR: &str = "/var/lib/slackwater-attach";

/// Why `--json` is refused.
const NO_JSON: &str = "run, engine-config, completions and manual have no answer in JSON; the daemon logs in JSON by --log-format json";

/// Time for threads that still run at the end; they wait for an appliance that does not answer.
const RUNTIME_END_LIMIT: Duration = Duration::from_secs(1);

/// Docker and containerd run their containers on the Slackwater appliance
///
/// Without a command, or with `run`, it is the daemon that serves the engines. Every setting is
/// also an environment variable (shown beside it) and a key of the configuration file (its name
/// without the dashes). A flag wins over the environment, that over the file, that over the
/// default.
#[derive(Debug, Parser)]
#[command(name = "slackwater-driver", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct CommandLine {
    /// Configuration file (TOML)
    #[arg(long, env = "SLACKWATER_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print what a command answers as JSON; no setting, so neither a variable nor a key of the file
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    settings: Settings,

    #[command(subcommand)]
    command: Option<Command>,
}

/// What to do.
#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the engines (also without a command)
    Run,
    /// Tell what this machine, the appliance and the engines lack; exit code 6 if that is something
    /// without which nothing works
    Doctor(doctor::DoctorArguments),
    /// Print the configuration that an engine needs
    EngineConfig(engine_config::EngineConfigArguments),
    /// Join the appliance as a worker with a credential of its own, by the token that `slackwater worker add` printed
    ///
    /// The token is read from standard input, or from a file: an argument could be read by every user of this machine.
    /// It can be used on one machine; there the same call can be repeated, as after one that was cut off. Run it as the
    /// daemon's user, with the daemon's settings.
    Join(join::JoinArguments),
    /// Show what the daemon has
    Status,
    /// Attach a file, a snapshot or a new clone as a directory, without a daemon
    ///
    /// Its state is in /var/lib/slackwater-attach unless --state-dir is given, so that a daemon of this machine goes on.
    Attach(attach::AttachArguments),
    /// Detach what `attach` attached
    Detach(attach::DetachArguments),
    /// List the workers that have disks on the appliance, or take back what a lost one left; a worker that joined needs a
    /// token for others than itself
    Workers(workers::WorkersArguments),
    /// Make images by reference, commit by reference, export to ordinary layers
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Print the completion script of a shell
    Completions(completions::CompletionsArguments),
    /// Write the manual pages; `make install-worker` calls it
    #[command(hide = true)]
    Manual(completions::ManualArguments),
    /// Serve the export to the kernel; the daemon starts it by itself
    #[command(hide = true)]
    ServeExport(serve_export::ServeExportArguments),
    /// Become a tool of e2fsprogs on one file, mount images, or copy to a disk; attaching starts it by itself
    #[command(hide = true)]
    RunTool(RunToolArguments),
}

/// Not for people.
#[derive(Clone, Debug, clap::Args)]
struct RunToolArguments {
    /// What `slackwater_attach::run_tool` takes
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Does what the arguments (the program's name first) ask for.
#[must_use]
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let line = match parse(arguments.clone()) {
        Ok(CommandLine { command: Some(Command::RunTool(run)), .. }) => {
            return ExitCode::from(slackwater_attach::run_tool(&run.words));
        }
        Ok(line) => line,
        // Prints help and version too, and ends with 0 after those and 2 after a fault.
        Err(error) => error.exit(),
    };
    match carry_out(line, &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line: whoever reads a journal greps for it. Nothing can be done when standard
            // error is gone.
            let _ = writeln!(std::io::stderr(), "slackwater-driver: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn parse(arguments: Vec<OsString>) -> Result<CommandLine, clap::Error> {
    let mut command = definition();
    let matches = command.try_get_matches_from_mut(arguments)?;
    CommandLine::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// The definition, with the settings on either side of a command.
fn definition() -> clap::Command {
    CommandLine::command().mut_args(|argument| argument.global(true))
}

fn carry_out(line: CommandLine, arguments: &[OsString]) -> Result<(), DriverError> {
    // These need no settings, and no runtime.
    let command = match line.command.unwrap_or(Command::Run) {
        Command::Completions(_) | Command::Manual(_) if line.json => {
            return Err(DriverError::Usage(NO_JSON.to_owned()));
        }
        Command::Completions(arguments) => return completions::run(&arguments),
        Command::Manual(arguments) => return completions::manual(&arguments),
        Command::ServeExport(chosen) if chosen.keep => {
            logged(&line.settings.or(Settings::defaults()))?;
            return serve_export::keep(arguments);
        }
        other => other,
    };
    let from_file = match &line.config {
        // It has all that it needs on its command line, and must start whatever became of the
        // file: containers wait for it.
        _ if matches!(command, Command::ServeExport(_)) => Settings::default(),
        Some(path) => Settings::read(path)?,
        None => Settings::default(),
    };
    let settings = layered(&command, line.settings, from_file);
    let format = if line.json { Format::Json } else { Format::Text };
    let runtime = Runtime::new().map_err(|error| DriverError::Start(error.to_string()))?;
    let outcome = runtime.block_on(dispatch(command, settings, format));
    runtime.shutdown_timeout(RUNTIME_END_LIMIT);
    outcome
}

/// The settings of a command, by its line and the configuration file.
fn layered(command: &Command, line: Settings, file: Settings) -> Settings {
    match command {
        // They have directories of their own: a daemon would take their mounts for its own.
        Command::Attach(_) | Command::Detach(_) => {
            let file = Settings { state_dir: None, cache_dir: None, ..file };
            let own = Settings { state_dir: Some(ATTACH_STATE_DIR.into()), ..Settings::defaults() };
            line.or(file).or(own)
        }
        _ => line.or(file).or(Settings::defaults()),
    }
}

async fn dispatch(command: Command, settings: Settings, format: Format) -> Result<(), DriverError> {
    match command {
        Command::Run | Command::EngineConfig(_) if format == Format::Json => {
            Err(DriverError::Usage(NO_JSON.to_owned()))
        }
        Command::Run => daemon::run(logged(&settings)?).await,
        Command::ServeExport(arguments) => {
            serve_export::serve(&logged(&settings)?, arguments.resume).await
        }
        Command::Doctor(arguments) => doctor::run(&arguments, &settings, format).await,
        Command::Join(arguments) => join::run(&arguments, &Config::new(&settings)?, format).await,
        Command::Status => status::run(&Config::new(&settings)?, format).await,
        Command::Attach(arguments) => {
            attach::attach(&arguments, &Config::new(&settings)?, format).await
        }
        Command::Detach(arguments) => {
            attach::detach(&arguments, &Config::new(&settings)?, format).await
        }
        Command::Workers(arguments) => workers::run(&arguments, &settings, format).await,
        Command::Image(command) => image::run(command, &Config::new(&settings)?, format).await,
        Command::EngineConfig(arguments) => engine_config::run(&arguments, &settings),
        // Done before.
        Command::Completions(_) | Command::Manual(_) | Command::RunTool(_) => Ok(()),
    }
}

/// The configuration, with the log begun.
fn logged(settings: &Settings) -> Result<Config, DriverError> {
    let config = Config::new(settings)?;
    logs::start(&config.log, config.log_format)
        .map_err(|error| DriverError::Start(error.to_string()))?;
    Ok(config)
}

/// How a command answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Json,
}

/// Writes to standard output; a reader that closed its end early, such as `head`, wants no more.
fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn settings_stand_on_either_side_of_the_command() {
        for line in [
            ["slackwater-driver", "--state-dir", "/s", "status"],
            ["slackwater-driver", "status", "--state-dir", "/s"],
        ] {
            let parsed = parse(line.iter().map(OsString::from).collect()).unwrap();
            assert_eq!(parsed.settings.state_dir, Some("/s".into()));
            assert!(matches!(parsed.command, Some(Command::Status)));
        }
    }

    #[test]
    fn what_needs_no_daemon_leaves_its_directories_alone() {
        let file = || Settings {
            state_dir: Some("/daemon".into()),
            cache_dir: Some("/daemon/cache".into()),
            api: Some("http://a:1".to_owned()),
            ..Settings::default()
        };
        let of = |words: &[&str]| {
            let words = std::iter::once("slackwater-driver").chain(words.iter().copied());
            let parsed = parse(words.map(OsString::from).collect()).unwrap();
            layered(&parsed.command.unwrap(), parsed.settings, file())
        };
        for words in [&["attach", "/mnt", "--file", "a"][..], &["detach", "/mnt"]] {
            let settings = of(words);
            assert_eq!(settings.state_dir, Some(ATTACH_STATE_DIR.into()), "{words:?}");
            assert_eq!((settings.cache_dir, settings.api.as_deref()), (None, Some("http://a:1")));
        }
        assert_eq!(of(&["detach", "/mnt", "--state-dir", "/x"]).state_dir, Some("/x".into()));
        assert_eq!(of(&["status"]).state_dir, Some("/daemon".into()));
        let parsed = parse(["slackwater-driver", "status"].map(OsString::from).to_vec()).unwrap();
        let settings = layered(&Command::Status, parsed.settings, Settings::default());
        assert_eq!(settings.state_dir, Some("/var/lib/slackwater-driver".into()));
    }

    #[test]
    fn every_setting_has_its_variable_and_its_default_is_told() {
        let help = definition().render_long_help().to_string();
        let defaults = toml::Table::try_from(Settings::defaults()).unwrap();
        assert!(defaults.len() >= 7);
        for (key, value) in defaults {
            let text = match &value {
                toml::Value::String(text) => text.clone(),
                // As it is given on the command line.
                toml::Value::Array(names) => {
                    names.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
                }
                other => other.to_string(),
            };
            let option = help.split("\n      --").find(|part| part.starts_with(&format!("{key} ")));
            let option = option.unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(option.contains(&format!("[default: {text}]")), "--{key}: {option}");
        }
        for argument in definition().get_arguments() {
            let Some(name) = argument.get_long().filter(|name| *name != "help") else {
                continue;
            };
            if ["version", "json"].contains(&name) {
                continue;
            }
            let variable = format!("SLACKWATER_{}", name.replace('-', "_").to_uppercase());
            let given = argument.get_env().and_then(|name| name.to_str());
            assert_eq!(given, Some(variable.as_str()));
        }
    }
}

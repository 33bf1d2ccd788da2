//! The command line of `slackwaterd`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use clap_complete::Shell;
use slackwater_api::Role;
use uuid::Uuid;

use super::settings::Settings;

/// Serve sparse files over NFSv3, with snapshots and clones that cost nothing, by REST
///
/// Every option is also an environment variable (shown beside it) and a key of the
/// configuration file (its name without the dashes). A flag wins over the environment, that
/// over the file, that over the default.
#[derive(Debug, Parser)]
#[command(name = "slackwaterd", version, after_help = EXIT_CODES)]
pub struct CommandLine {
    /// Configuration file (TOML)
    #[arg(long, env = "SLACKWATER_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// The highest layer of settings: flags, and the environment below them.
    #[command(flatten)]
    pub settings: Settings,

    /// What to do; to serve, if nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Ends the help text.
const EXIT_CODES: &str = "Exit codes: 0 stopped as asked, 1 failure, 2 wrong usage or configuration; of check also \
     3 no store there, 4 a server has it open, 6 problems were found";

/// A command other than to serve.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Make a certificate for TLS, and an authority by which clients know it
    ///
    /// The directory then has cert.pem and key.pem for the server, ca.pem for clients, and ca-key.pem, which signs. An
    /// authority that is there signs again, so clients need not be changed. With --worker and --client it signs a
    /// certificate by which a machine is known that mounts (--nfs-tls mutual): worker-ID.pem, or client-NAME.pem, and its
    /// key beside it.
    Certificate(CertificateArguments),
    /// Verify, or repair, the store of --data-dir while no server has it open; exit code 6 if
    /// something is wrong (after a repair: still)
    Check(CheckArguments),
    /// Look at the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Change the token file of the REST API
    #[command(subcommand)]
    Token(TokenCommand),
    /// Print the completion script of a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages; `make install` calls it
    #[command(hide = true)]
    Manual {
        /// A directory that is there
        directory: PathBuf,
    },
}

/// What is certified, and where it goes.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct CertificateArguments {
    /// Names and addresses by which clients reach the server; localhost, 127.0.0.1 and ::1 are added
    #[arg(required_unless_present_any = ["worker", "client"], value_name = "NAME")]
    pub names: Vec<String>,

    /// Id of a worker, for which a certificate is made instead; `slackwater worker list` shows it
    #[arg(long, value_name = "ID", conflicts_with_all = ["names", "client"])]
    pub worker: Option<Uuid>,

    /// Name of a machine that mounts the whole export, for which a certificate is made instead
    #[arg(long, value_name = "NAME", conflicts_with = "names")]
    pub client: Option<String>,

    /// Where the files go; made if it is not there
    #[arg(long, value_name = "DIR")]
    pub directory: PathBuf,

    /// Days for which the certificate is good
    #[arg(long, value_name = "DAYS", default_value_t = 825, value_parser = clap::value_parser!(u16).range(1..=3650))]
    pub days: u16,

    /// Replace a certificate that is there
    #[arg(long)]
    pub renew: bool,
}

/// What to check, and how to tell.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckArguments {
    /// Read and hash every stored block too; takes as long as reading them all
    #[arg(long)]
    pub data: bool,

    /// First make the index anew, from its copy and the log; the old one is set aside. For an
    /// index that was lost or is damaged
    #[arg(long)]
    pub rebuild: bool,

    /// Put right what is wrong: what cannot be read becomes lost, and reading it an error; the
    /// rest is kept. Reads all that is stored; says what was lost
    #[arg(long)]
    pub repair: bool,

    /// With --repair: give up what is missing, too: blocks in segment files that are gone for good,
    /// and what only --rebuild could restore, if it did not. Without this a repair stops there
    #[arg(long, requires = "repair")]
    pub give_up: bool,

    /// Print the result as one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// A command on the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
pub enum ConfigCommand {
    /// Print the effective configuration, secrets redacted, or what is wrong with it
    Check,
}

/// A command on token files.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand)]
pub enum TokenCommand {
    /// Add a token to --token-file; prints its secret, once
    ///
    /// The file gets the hash of the secret alone, and is made if it is not there. A server that runs
    /// with it takes the token within seconds. To take a token away, delete its line; to give it another
    /// secret, delete the line and add it again.
    Add {
        /// Whose it is: shown in logs, and kept with what is registered. Not the name of a worker
        name: String,
        /// What it allows: admin, worker or read-only
        role: Role,
    },
    /// Put hashes in the place of the secrets in --token-file; clients go on with the secrets
    Hash,
}

/// A command line, and where each of its values came from.
#[derive(Debug)]
pub struct ParsedCommandLine {
    /// The values.
    pub line: CommandLine,
    matches: ArgMatches,
}

impl ParsedCommandLine {
    /// The command line, with the options on either side of a command such as `config check`.
    #[must_use]
    pub fn definition() -> clap::Command {
        CommandLine::command().mut_args(|argument| argument.global(true))
    }

    /// Reads the arguments (the program's name first) and the environment.
    ///
    /// # Errors
    /// What clap finds wrong, or the help or version text that was asked for.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut command = Self::definition();
        let matches = command.try_get_matches_from_mut(arguments)?;
        let mut line =
            CommandLine::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        let parsed = |setting: &str| matches.value_source(setting);
        drop_overridden_secret(&mut line.settings, parsed);
        Ok(Self { line, matches })
    }

    /// Where the value of the setting with this key came from, if it came from here.
    #[must_use]
    pub fn source_of(&self, key: &str) -> Option<ValueSource> {
        self.matches.value_source(&key.replace('-', "_"))
    }
}

/// Lets a flag for the one form of the password win over the environment's other form.
fn drop_overridden_secret(
    settings: &mut Settings,
    source_of: impl Fn(&str) -> Option<ValueSource>,
) {
    match (source_of("vmstore_password"), source_of("vmstore_password_file")) {
        (Some(ValueSource::CommandLine), Some(ValueSource::EnvVariable)) => {
            settings.vmstore_password_file = None;
        }
        (Some(ValueSource::EnvVariable), Some(ValueSource::CommandLine)) => {
            settings.vmstore_password = None;
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> ParsedCommandLine {
        let all = std::iter::once("slackwaterd").chain(arguments.iter().copied());
        ParsedCommandLine::parse(all.map(OsString::from)).unwrap()
    }

    #[test]
    fn definition_is_sound() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn options_stand_on_either_side_of_the_command() {
        for arguments in [
            ["--data-dir", "/one", "config", "check"],
            ["config", "--data-dir", "/one", "check"],
            ["config", "check", "--data-dir", "/one"],
        ] {
            let parsed = parse(&arguments);
            assert_eq!(parsed.line.settings.data_dir, Some("/one".into()), "{arguments:?}");
            assert_eq!(parsed.line.command, Some(Command::Config(ConfigCommand::Check)));
            assert_eq!(parsed.source_of("data-dir"), Some(ValueSource::CommandLine));
        }
    }

    #[test]
    fn lists_are_repeated_or_joined_by_commas() {
        for arguments in [
            &["--nfs-client", "10.0.0.0/8:rw", "--nfs-client", "::1/128:ro"][..],
            &["--nfs-client", "10.0.0.0/8:rw,::1/128:ro"],
        ] {
            let rules = parse(arguments).line.settings.nfs_client.unwrap();
            let texts: Vec<_> = rules.iter().map(super::super::Parsed::text).collect();
            assert_eq!(texts, ["10.0.0.0/8:rw", "::1/128:ro"]);
        }
    }

    #[test]
    fn help_names_every_default() {
        let help = CommandLine::command().render_long_help().to_string();
        let defaults = toml::Table::try_from(Settings::defaults()).unwrap();
        assert!(defaults.len() > 10);
        for (key, value) in defaults {
            let text = match value {
                toml::Value::String(text) => text,
                other => other.to_string(),
            };
            let option =
                help.split("\n      --").find(|part| part.starts_with(&format!("{key} "))).unwrap();
            let option = option.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(
                option.contains(&format!("[default: {text}]")),
                "--{key} does not name its default {text}: {option}"
            );
        }
    }

    #[test]
    fn every_option_has_its_variable() {
        let mut options = 0;
        for argument in CommandLine::command().get_arguments() {
            let Some(name) = argument.get_long() else {
                continue;
            };
            let variable = format!("SLACKWATER_{}", name.replace('-', "_").to_uppercase());
            assert_eq!(argument.get_env().and_then(|name| name.to_str()), Some(variable.as_str()));
            options += 1;
        }
        assert!(options > 20);
    }
}

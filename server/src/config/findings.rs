//! What is unsafe about a configuration that can be served all the same.
//!
//! It is in the log at the start and told by `slackwaterd config check`, each with the way out. Files with secrets that
//! more people reach than should are used all the same: where secrets are mounted into a container, their modes are not
//! the administrator's to choose.

use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use slackwater_nfs::ClientRule;

use super::settings::Settings;
use super::tokens::{ADMIN_TOKEN_FILE, TokenFile};
use super::{Config, exposure};
use crate::reference_key;

/// Permission bits that expose a secret: any for others, and writing for the group. A group
/// that may read is a common way to share a key among services.
const EXPOSING_BITS: u32 = 0o027;

/// Permission bits by which others than its owner reach a directory.
const ENTERING_BITS: u32 = 0o077;

/// Permission bits by which others than its owner can change a file.
const CHANGING_BITS: u32 = 0o022;

/// Something unsafe; its text is a sentence with the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A file that holds a secret, and that others reach.
    Exposed(PathBuf),
    /// The data directory, which others reach.
    OpenDataDir(PathBuf),
    /// A data directory whose machines mount by address, and are refused from the start on.
    FromOlderRelease(PathBuf),
    /// A token file that holds no secrets, and that others can change.
    Changeable(PathBuf),
    /// A token file with secrets, where their hashes would do.
    PlainSecrets(TokenFile),
    /// NFS at this address, where the address alone lets machines mount the whole export.
    AddressOnly(SocketAddr),
    /// REST at this address, where no token is asked for.
    NoTokens(SocketAddr),
    /// An option that opens something, and has no effect with the others as they are.
    Unused(&'static str),
    /// REST at this address, which other machines reach, without TLS.
    PlainHttp(SocketAddr),
    /// A rule for more machines than a site has.
    AnyClient(ClientRule),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exposed(path) => {
                let path = path.display();
                write!(f, "{path} holds a secret and others may reach it: chmod 600 {path}")
            }
            Self::OpenDataDir(path) => {
                let path = path.display();
                write!(
                    f,
                    "other users of this machine may enter {path}, where the disks are: chmod 700 {path}"
                )
            }
            Self::FromOlderRelease(path) => write!(
                f,
                "no release newer than 0.2 has served {}, and 0.2 let machines mount by address: such mounts get errors \
                 from the start of this release on, and lose what they did not sync, unless --insecure-address-only is true: see \
                 `From release 0.2` in OPERATION.md",
                path.display()
            ),
            Self::Changeable(path) => {
                let path = path.display();
                write!(f, "others may change {path} and so let themselves in: chmod go-w {path}")
            }
            Self::AddressOnly(address) => write!(
                f,
                "--insecure-address-only is true: each user and container of a machine that --nfs-client lists mounts the \
                 whole export at {address}: let workers join, mount by `slackwater mount-path`, then set it to false"
            ),
            Self::NoTokens(address) => write!(
                f,
                "--insecure-no-tokens is true: each user of this machine is administrator by REST at {address}, and can \
                 mount all files: set it to false, and calls need the token in `{}` of the data directory",
                ADMIN_TOKEN_FILE
            ),
            Self::Unused(option) => write!(
                f,
                "--{option} is true and has no effect with the other settings: set it to false, or it opens the appliance \
                 once they change"
            ),
            Self::PlainHttp(address) => write!(
                f,
                "--insecure-plain-http is true: tokens and credentials are sent to {address} in plain text, and all who \
                 see the traffic have their rights: give --tls-cert and --tls-key, then set it to false"
            ),
            Self::AnyClient(rule) => write!(
                f,
                "--insecure-any-client is true: {rule} of nfs-client is for more machines than a site has, and NFS in \
                 plain text shows the secret paths: list the networks of your clients, then set it to false"
            ),
            Self::PlainSecrets(TokenFile { path, plain_secrets }) => {
                let path = path.display();
                write!(
                    f,
                    "{path} holds secrets in plain text ({plain_secrets}): `slackwaterd token hash \
                     --token-file {path}` puts their hashes there, and clients go on with the secrets"
                )
            }
        }
    }
}

/// What is unsafe about these settings. `tokens` are their token files, as they were read; `file` is the configuration
/// file and what it says.
pub(super) fn find(
    effective: &Settings,
    tokens: &[TokenFile],
    file: Option<(&Path, &Settings)>,
) -> Vec<Finding> {
    let of_file = file.filter(|(_, settings)| settings.vmstore_password.is_some());
    let named = [&effective.vmstore_password_file, &effective.tls_key];
    let with_secret = named
        .into_iter()
        .flatten()
        .map(PathBuf::as_path)
        .chain(of_file.map(|(path, _)| path))
        .filter(|path| has_bits(path, EXPOSING_BITS))
        .map(|path| Finding::Exposed(path.to_owned()));
    tokens.iter().flat_map(of_token_file).chain(with_secret).collect()
}

/// That others reach the data directory. One that is made by the server is its owner's alone.
pub(super) fn of_data_dir(path: &Path) -> Option<Finding> {
    has_bits(path, ENTERING_BITS).then(|| Finding::OpenDataDir(path.to_owned()))
}

/// That no release newer than 0.2 has served the data directory, and how that lets machines mount ends. Each newer one
/// has made the key of references there; after going back to 0.2 this is not noticed.
pub(super) fn of_older_release(config: &Config) -> Option<Finding> {
    let has = |name: &str| config.data_dir.join(name).exists();
    let is_older = has("FORMAT") && !has(reference_key::NAME);
    (is_older && !config.insecure_address_only)
        .then(|| Finding::FromOlderRelease(config.data_dir.clone()))
}

/// What is unsafe about NFS: that machines mount the whole export by their address alone, on loopback too, where each
/// local user is; and that the addresses are those of all the world.
pub(super) fn of_nfs(config: &Config) -> impl Iterator<Item = Finding> {
    let reached = exposure::open_nfs(config).map(|(_, address)| address);
    let reached = reached.or(config.nfs_listen.first().copied());
    let by_address = reached.filter(|_| config.insecure_address_only).map(Finding::AddressOnly);
    let any_client = match exposure::wide_rule(config) {
        Some(rule) => Some(Finding::AnyClient(rule)),
        None => config.insecure_any_client.then_some(Finding::Unused("insecure-any-client")),
    };
    by_address.into_iter().chain(any_client)
}

/// What is unsafe about REST for other machines.
pub(super) fn of_rest(config: &Config) -> Option<Finding> {
    match exposure::is_readable_on_the_way(config) {
        true => Some(Finding::PlainHttp(config.api_listen)),
        false => config.insecure_plain_http.then_some(Finding::Unused("insecure-plain-http")),
    }
}

/// What is unsafe about the token that the server makes itself, or about that there is none.
pub(super) fn of_tokens(config: &Config) -> Option<Finding> {
    match &config.admin_token_file {
        Some(path) => has_bits(path, EXPOSING_BITS).then(|| Finding::Exposed(path.clone())),
        None if config.tokens.is_empty() => Some(Finding::NoTokens(config.api_listen)),
        None => config.insecure_no_tokens.then_some(Finding::Unused("insecure-no-tokens")),
    }
}

pub(crate) fn of_token_file(file: &TokenFile) -> impl Iterator<Item = Finding> {
    let path = || file.path.clone();
    let rights = match file.plain_secrets {
        0 => has_bits(&file.path, CHANGING_BITS).then(|| Finding::Changeable(path())),
        _ => has_bits(&file.path, EXPOSING_BITS).then(|| Finding::Exposed(path())),
    };
    let plain = (file.plain_secrets > 0).then(|| Finding::PlainSecrets(file.clone()));
    rights.into_iter().chain(plain)
}

/// Whether the file is there and has one of these bits; one that is not there is an error when it is read.
fn has_bits(path: &Path, bits: u32) -> bool {
    let metadata = std::fs::metadata(path);
    metadata.is_ok_and(|metadata| metadata.permissions().mode() & bits != 0)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};

    use super::*;

    fn file(directory: &tempfile::TempDir, name: &str, mode: u32) -> PathBuf {
        let path = directory.path().join(name);
        write(&path, "x").unwrap();
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn only_what_others_reach_is_exposed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let settings = Settings { tls_key: Some(path.clone()), ..Settings::default() };
        assert!(find(&settings, &[], None).is_empty(), "a file that is not there");
        write(&path, "x").unwrap();
        for (mode, is_exposed) in
            [(0o600, false), (0o400, false), (0o640, false), (0o644, true), (0o660, true)]
        {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let expected = is_exposed.then(|| Finding::Exposed(path.clone()));
            assert_eq!(find(&settings, &[], None), Vec::from_iter(expected), "{mode:o}");
        }
    }

    #[test]
    fn a_data_directory_that_others_reach_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(of_data_dir(&path.join("none")), None);
        for (mode, is_told) in [(0o700, false), (0o750, true), (0o701, true), (0o755, true)] {
            set_permissions(path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(of_data_dir(path).is_some(), is_told, "{mode:o}");
        }
        let told = of_data_dir(path).unwrap().to_string();
        assert!(told.contains("chmod 700") && told.contains(&path.display().to_string()), "{told}");
    }

    #[test]
    fn a_data_directory_of_an_older_release_is_told_before_its_mounts_end() {
        let directory = tempfile::tempdir().unwrap();
        let found = |insecure_address_only| {
            let settings = Settings {
                data_dir: Some(directory.path().to_owned()),
                insecure_address_only: Some(insecure_address_only),
                ..Settings::default()
            };
            of_older_release(&Config::try_from(settings).unwrap()).map(|found| found.to_string())
        };
        assert_eq!(found(false), None, "a new one");
        file(&directory, "FORMAT", 0o600);
        assert!(found(false).unwrap().contains("--insecure-address-only"));
        assert_eq!(found(true), None);
        file(&directory, reference_key::NAME, 0o600);
        assert_eq!(found(false), None);
    }

    #[test]
    fn that_no_token_is_asked_for_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let found = |is_open| {
            let data_dir = Some(directory.path().to_owned());
            let insecure_no_tokens = Some(is_open);
            let settings = Settings { data_dir, insecure_no_tokens, ..Settings::default() };
            of_tokens(&Config::try_from(settings).unwrap())
        };
        assert_eq!(found(false), None, "there is no file yet");
        let told = found(true).unwrap().to_string();
        assert!(told.contains("127.0.0.1:8049") && told.contains(ADMIN_TOKEN_FILE), "{told}");
        let path = file(&directory, ADMIN_TOKEN_FILE, 0o644);
        assert_eq!(found(false), Some(Finding::Exposed(path.clone())));
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(found(false), None);
    }

    /// The findings about a configuration of the defaults, a data directory, and `change`.
    fn told(change: impl FnOnce(&mut Settings)) -> Vec<String> {
        let mut settings =
            Settings { data_dir: Some("/nonexistent".into()), ..Settings::default() };
        change(&mut settings);
        let config = Config::try_from(settings).unwrap();
        let found = of_nfs(&config).chain(of_tokens(&config)).chain(of_rest(&config));
        found.map(|finding| finding.to_string()).collect()
    }

    #[test]
    fn what_opens_the_appliance_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = file(&directory, "tokens", 0o600);
        write(&tokens, "ops admin 0123456789abcdef\n").unwrap();
        assert_eq!(told(|_| {}), [""; 0]);
        for address in ["10.0.0.5:2049", "127.0.0.1:2049"] {
            let found = told(|settings| {
                settings.nfs_listen = Some(vec![address.parse().unwrap()]);
                settings.nfs_client = Some(vec!["10.0.0.0/8:rw".parse().unwrap()]);
                settings.insecure_address_only = Some(true);
            });
            assert!(found.len() == 1 && found[0].contains(address), "{found:?}");
        }
        for (option, is_meant) in [("any-client", true), ("plain-http", false)] {
            let found = told(|settings| {
                settings.token_file = Some(vec![tokens.clone()]);
                settings.nfs_listen = Some(vec!["10.0.0.5:2049".parse().unwrap()]);
                let rule = if is_meant { "0.0.0.0/0:rw" } else { "10.0.0.0/8:rw" };
                settings.nfs_client = Some(vec![rule.parse().unwrap()]);
                settings.insecure_any_client = Some(is_meant);
                let reached = if is_meant { "127.0.0.1:8049" } else { "10.0.0.5:8049" };
                settings.api_listen = Some(reached.parse().unwrap());
                settings.insecure_plain_http = Some(!is_meant);
            });
            assert!(found.len() == 1 && found[0].contains(option), "{found:?}");
        }
        let found = told(|settings| {
            settings.token_file = Some(vec![tokens.clone()]);
            settings.insecure_no_tokens = Some(true);
            settings.insecure_plain_http = Some(true);
            settings.insecure_any_client = Some(true);
        });
        assert!(found.iter().all(|told| told.contains("no effect")), "{found:?}");
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn every_file_with_a_secret_is_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| file(&directory, name, 0o644);
        let settings = Settings {
            vmstore_password_file: Some(file("c")),
            tls_key: Some(file("d")),
            tls_cert: Some(file("public")),
            ..Settings::default()
        };
        let config = file("config");
        let plain = Settings::default();
        assert_eq!(find(&settings, &[], Some((&config, &plain))).len(), 2);
        let with_password =
            Settings { vmstore_password: Some(super::super::Secret::new("p")), ..plain };
        assert_eq!(find(&settings, &[], Some((&config, &with_password))).len(), 3);
    }

    #[test]
    fn a_token_file_of_hashes_may_be_read_and_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings::default();
        for (mode, with_hashes, with_secrets) in
            [(0o600, 0, 1), (0o640, 0, 1), (0o644, 0, 2), (0o664, 1, 2), (0o646, 1, 2)]
        {
            let path = file(&directory, "tokens", mode);
            for (plain_secrets, expected) in [(0, with_hashes), (3, with_secrets)] {
                let files = [TokenFile { path: path.clone(), plain_secrets }];
                let found = find(&settings, &files, None);
                assert_eq!(found.len(), expected, "{mode:o} {plain_secrets} {found:?}");
                assert!(found.iter().all(|finding| finding.to_string().contains(": ")));
            }
        }
    }
}

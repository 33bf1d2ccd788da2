//! From settings to a configuration: what must be given, what goes together, what is in range.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater_api::{Token, VmstoreCredentials, require_tokens_for};

use super::error::{ConfigError, Faults};
use super::exposure;
use super::secret::{REDACTED, Secret};
use super::settings::Settings;
use super::size::Size;
use super::strength::weakness;
use super::text_file::read_text;
use super::tls;
use super::tokens::{self, TokenFile};
use super::{Config, NFS_LISTEN_MAX, NfsTlsPolicy, TlsPaths};
use crate::memory::{BUDGET_BYTES_MIN, MemoryPlan};
use crate::options;

/// Longest export path in bytes: of the 1,024 that MNT takes (RFC 1813 section 5.1.4 `MNTPATHLEN`), so many that the secret
/// paths and the paths below the export have room.
const EXPORT_PATH_BYTES_MAX: usize = 512;

/// Longest age of unstable writes in seconds: past an hour of unwritten data a client's own
/// flushing has long decided.
const DIRTY_AGE_SECONDS_MAX: u32 = 3600;

/// Most connections: each takes a file descriptor and its buffers, and 16,384 are those of
/// 2,000 workers with `nconnect=8`.
const NFS_CONNECTIONS_MAX: u32 = 16_384;

/// Most calls of one kind that wait for the disk: each takes a thread, and no disk gets
/// faster by more than this many.
const NFS_IO_THREADS_MAX: u32 = 128;

/// Slowest background compaction: a segment of 64 MiB in about a minute. Slower than that,
/// space would come back later than it is needed.
const COMPACTION_RATE_MIN: Size = Size::from_bytes(1 << 20);

/// Longest age at which what is published ends: a century, so that a slip of some digits is told.
const UNPUBLISH_AFTER_DAYS_MAX: u32 = 36_500;

/// Shortest password of the VMstore-compatible API. Callers of one address try one a second; a token has to hold against one
/// who reads a file of hashes. Known passwords are not refused: length alone does not make one good.
const PASSWORD_CHARACTERS_MIN: usize = 12;

impl TryFrom<Settings> for Config {
    type Error = ConfigError;

    /// Checks settings; defaults are taken for what they leave open.
    ///
    /// # Errors
    /// All faults of single settings; if there is none, all of settings that do not go together.
    fn try_from(settings: Settings) -> Result<Self, ConfigError> {
        let settings = settings.or(Settings::defaults());
        let Checked {
            tokens,
            token_files,
            data_dir,
            tls,
            nfs_tls,
            vmstore,
            memory,
            compaction_bytes_per_second,
            dirty_age,
            unpublish_after,
            nfs_connections,
            nfs_io_threads,
            export_path,
            nfs_listen,
        } = Checked::of(&settings)?;
        let is_open = given(settings.insecure_no_tokens, "insecure-no-tokens")?;
        let makes_token = tokens.is_empty() && !is_open;
        let config = Self {
            admin_token_file: makes_token.then(|| data_dir.join(tokens::ADMIN_TOKEN_FILE)),
            tls,
            nfs_tls,
            tokens,
            token_files,
            vmstore,
            capacity_bytes: settings.capacity.map(Size::bytes),
            memory,
            compaction_bytes_per_second,
            scrub_bytes_per_second: given(settings.scrub_rate, "scrub-rate")?.bytes(),
            dirty_age,
            unpublish_after,
            nfs_connections,
            nfs_io_threads,
            export_path,
            nfs_clients: settings
                .nfs_client
                .map(|rules| rules.iter().map(|rule| *rule.value()).collect()),
            data_dir,
            nfs_listen,
            portmap_listen: settings.portmap_listen,
            api_listen: given(settings.api_listen, "api-listen")?,
            metrics_listen: settings.metrics_listen,
            compress: given(settings.compress, "compress")?,
            squash: *given(settings.squash, "squash")?.value(),
            anonymous_uid: given(settings.anonymous_uid, "anonymous-uid")?,
            anonymous_gid: given(settings.anonymous_gid, "anonymous-gid")?,
            nfs_privileged_port: given(settings.nfs_privileged_port, "nfs-privileged-port")?,
            insecure_address_only: given(settings.insecure_address_only, "insecure-address-only")?,
            insecure_no_tokens: is_open,
            insecure_plain_http: given(settings.insecure_plain_http, "insecure-plain-http")?,
            insecure_any_client: given(settings.insecure_any_client, "insecure-any-client")?,
            log: given(settings.log, "log")?.value().clone(),
            log_format: given(settings.log_format, "log-format")?,
            files: Vec::new(),
            findings: Vec::new(),
        };
        refuse_open_addresses(&config)?;
        Ok(config)
    }
}

/// What single settings can be wrong about.
struct Checked {
    tokens: Vec<Token>,
    token_files: Vec<TokenFile>,
    data_dir: PathBuf,
    tls: Option<TlsPaths>,
    nfs_tls: NfsTlsPolicy,
    vmstore: Option<VmstoreCredentials>,
    memory: MemoryPlan,
    compaction_bytes_per_second: u64,
    dirty_age: Duration,
    unpublish_after: Option<Duration>,
    nfs_connections: usize,
    nfs_io_threads: usize,
    export_path: String,
    nfs_listen: Vec<SocketAddr>,
}

impl Checked {
    /// # Errors
    /// All faults.
    fn of(settings: &Settings) -> Result<Self, ConfigError> {
        let mut faults = Faults::default();
        let data_dir = faults.keep(given(settings.data_dir.clone(), "data-dir"));
        let files = settings.token_file.as_deref().unwrap_or(&[]);
        let tokens = faults.keep(tokens::read(files));
        let tls = faults.keep(tls::files(settings));
        let nfs_tls = faults.keep(tls::of_nfs(settings));
        let vmstore = faults.keep(vmstore(settings));
        let memory = faults.keep(given(settings.memory, "memory").and_then(memory));
        let rate = faults.keep(compaction_rate(settings));
        let dirty_age = faults.keep(dirty_age(settings));
        let unpublish_after = faults.keep(unpublish_after(settings));
        let connections = settings.nfs_connections;
        let connections = faults.keep(within(connections, "nfs-connections", NFS_CONNECTIONS_MAX));
        let threads = settings.nfs_io_threads;
        let threads = faults.keep(within(threads, "nfs-io-threads", NFS_IO_THREADS_MAX));
        let path = settings.export_path.clone();
        let path = faults.keep(given(path, "export-path").and_then(export_path));
        let listen = settings.nfs_listen.clone();
        let listen = faults.keep(given(listen, "nfs-listen").and_then(nfs_listen));
        faults.into_result()?;
        let all = || {
            let (tokens, token_files) = tokens?;
            Some(Self {
                tokens,
                token_files,
                data_dir: data_dir?,
                tls: tls?,
                nfs_tls: nfs_tls?,
                vmstore: vmstore?,
                memory: memory?,
                compaction_bytes_per_second: rate?,
                dirty_age: dirty_age?,
                unpublish_after: unpublish_after?,
                nfs_connections: connections?,
                nfs_io_threads: threads?,
                export_path: path?,
                nfs_listen: listen?,
            })
        };
        // None is missing without a fault.
        all().ok_or(ConfigError::Missing { key: "a setting", variable: String::new() })
    }
}

/// The value of a setting that must have one.
fn given<T>(value: Option<T>, key: &'static str) -> Result<T, ConfigError> {
    value.ok_or_else(|| ConfigError::Missing {
        key,
        variable: format!("SLACKWATER_{}", key.replace('-', "_").to_uppercase()),
    })
}

/// The shares of the memory budget.
fn memory(budget: Size) -> Result<MemoryPlan, ConfigError> {
    MemoryPlan::new(budget.bytes())
        .ok_or(ConfigError::Memory { got: budget, expected: Size::from_bytes(BUDGET_BYTES_MIN) })
}

/// User and password of the VMstore-compatible API, or neither.
fn vmstore(settings: &Settings) -> Result<Option<VmstoreCredentials>, ConfigError> {
    let (key, password) = match (&settings.vmstore_password, &settings.vmstore_password_file) {
        (Some(_), Some(_)) => {
            return Err(ConfigError::Both {
                first: "vmstore-password",
                second: "vmstore-password-file",
            });
        }
        (Some(password), None) => ("vmstore-password", Some(password.clone())),
        (None, Some(path)) => ("vmstore-password-file", Some(first_line(path)?)),
        (None, None) => ("vmstore-password", None),
    };
    let alone = |given, needed| ConfigError::Alone { given, needed };
    match (&settings.vmstore_user, password) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(alone("vmstore-user", "vmstore-password-file")),
        (None, Some(_)) => Err(alone(key, "vmstore-user")),
        (Some(user), Some(password)) => {
            if user.is_empty() {
                return Err(value("vmstore-user", "", "it must not be empty"));
            }
            if let Some(reason) = weakness(password.reveal(), PASSWORD_CHARACTERS_MIN) {
                let path = settings.vmstore_password_file.as_ref();
                let shown = path.map_or(REDACTED.to_owned(), |path| path.display().to_string());
                return Err(value(key, &shown, &format!("the password is weak: {reason}")));
            }
            Ok(Some(VmstoreCredentials {
                username: user.clone(),
                password: slackwater_api::Secret::new(password.reveal()),
            }))
        }
    }
}

/// The secret on the first line of a file.
fn first_line(path: &Path) -> Result<Secret, ConfigError> {
    let text = read_text(path)?;
    match text.lines().next() {
        Some(line) if !line.is_empty() => Ok(Secret::new(line)),
        _ => Err(ConfigError::Empty { path: path.to_owned(), what: "password on its first line" }),
    }
}

/// The age of unstable writes.
fn dirty_age(settings: &Settings) -> Result<Duration, ConfigError> {
    let seconds: u32 =
        within(settings.dirty_age_seconds, "dirty-age-seconds", DIRTY_AGE_SECONDS_MAX)?;
    Ok(Duration::from_secs(seconds.into()))
}

/// The age at which what is published ends.
fn unpublish_after(settings: &Settings) -> Result<Option<Duration>, ConfigError> {
    let Some(days) = settings.unpublish_after_days else { return Ok(None) };
    let days: u32 = within(Some(days), "unpublish-after-days", UNPUBLISH_AFTER_DAYS_MAX)?;
    Ok(Some(Duration::from_secs(u64::from(days) * 86_400)))
}

/// A number from 1 to `limit`.
fn within<T: TryFrom<u32>>(
    number: Option<u32>,
    key: &'static str,
    limit: u32,
) -> Result<T, ConfigError> {
    let number = given(number, key)?;
    let fault = || value(key, &number.to_string(), &format!("expected 1 to {limit}"));
    if !(1..=limit).contains(&number) {
        return Err(fault());
    }
    T::try_from(number).map_err(|_| fault())
}

/// The rate of background compaction in bytes a second.
fn compaction_rate(settings: &Settings) -> Result<u64, ConfigError> {
    let rate = given(settings.compaction_rate, "compaction-rate")?;
    if rate >= COMPACTION_RATE_MIN {
        return Ok(rate.bytes());
    }
    let expected = format!("expected at least {COMPACTION_RATE_MIN}");
    Err(value("compaction-rate", &rate.to_string(), &expected))
}

/// An export path that MOUNT can carry and that stands unquoted in a mount line.
fn export_path(path: String) -> Result<String, ConfigError> {
    let fault = |expected: &str| value("export-path", &path, expected);
    if path.len() > EXPORT_PATH_BYTES_MAX {
        let expected = format!("expected at most {EXPORT_PATH_BYTES_MAX} bytes");
        return Err(fault(&expected));
    }
    let Some(names) = path.strip_prefix('/') else {
        return Err(fault("expected a path that begins with /"));
    };
    if names.split('/').any(|name| matches!(name, "" | "." | "..")) {
        return Err(fault("expected names joined by single /, none of them . or .."));
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    if !path.bytes().all(is_plain) {
        return Err(fault("expected letters, digits, and the characters / . _ -"));
    }
    Ok(path)
}

fn nfs_listen(addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, ConfigError> {
    if addresses.is_empty() || addresses.len() > NFS_LISTEN_MAX {
        let got = format!("{} addresses", addresses.len());
        return Err(value("nfs-listen", &got, &format!("expected 1 to {NFS_LISTEN_MAX}")));
    }
    for (number, address) in addresses.iter().enumerate() {
        if address.port() != 0 && addresses[..number].contains(address) {
            let expected = "expected each address once";
            return Err(value("nfs-listen", &address.to_string(), expected));
        }
    }
    Ok(addresses)
}

/// Nothing is opened to other machines by an address alone, and nothing to the whole Internet or to all who see the
/// traffic but by an option that says so.
fn refuse_open_addresses(config: &Config) -> Result<(), ConfigError> {
    let mut faults = Faults::default();
    let mut refuse = |fault| faults.keep::<()>(Err(fault));
    if let Some((setting, address)) = exposure::open_nfs(config)
        && config.nfs_clients.is_none()
    {
        refuse(ConfigError::OpenNfs { setting, address });
    }
    if let Some(rule) = exposure::wide_rule(config)
        && !config.insecure_any_client
    {
        refuse(ConfigError::AnyClient { rule });
    }
    if let Err(refused) = require_tokens_for(config.api_listen, &options::api(config, &[])) {
        refuse(ConfigError::OpenApi { address: refused.address });
    }
    if exposure::is_readable_on_the_way(config) && !config.insecure_plain_http {
        refuse(ConfigError::PlainHttp { address: config.api_listen });
    }
    faults.into_result()
}

/// The fault of a setting whose value cannot be used.
fn value(key: &'static str, got: &str, expected: &str) -> ConfigError {
    ConfigError::Value { key, got: got.to_owned(), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NfsTlsMode;

    /// What is wrong with the default settings, a data directory, and `change`.
    fn fault(change: impl FnOnce(&mut Settings)) -> ConfigError {
        checked(change).unwrap_err()
    }

    fn checked(change: impl FnOnce(&mut Settings)) -> Result<Config, ConfigError> {
        let mut settings =
            Settings { data_dir: Some("/srv/slackwater".into()), ..Settings::default() };
        change(&mut settings);
        Config::try_from(settings)
    }

    #[test]
    fn defaults_need_only_a_data_directory() {
        let config = checked(|_| {}).unwrap();
        assert_eq!(config.nfs_listen, ["127.0.0.1:2049".parse().unwrap()]);
        assert_eq!(config.export_path, "/slackwater");
        let error = fault(|settings| settings.data_dir = None);
        assert!(matches!(error, ConfigError::Missing { key: "data-dir", .. }));
        assert!(error.to_string().contains("SLACKWATER_DATA_DIR"), "{error}");
    }

    #[test]
    fn pairs_stay_together() {
        let alone = |error| matches!(error, ConfigError::Alone { .. });
        assert!(alone(fault(|s| s.tls_cert = Some("c".into()))));
        assert!(alone(fault(|s| s.tls_key = Some("k".into()))));
        assert!(alone(fault(|s| s.nfs_tls = Some(NfsTlsMode::Required))));
        assert!(alone(fault(|s| s.nfs_tls = Some(NfsTlsMode::Offered))));
        let off = checked(|s| s.nfs_tls = Some(NfsTlsMode::Off)).unwrap();
        assert_eq!(off.nfs_tls, checked(|_| {}).unwrap().nfs_tls);
        assert!(alone(fault(|s| s.vmstore_user = Some("u".into()))));
        assert!(alone(fault(|s| s.vmstore_password = Some(Secret::new("correct horse")))));
        assert!(matches!(
            fault(|s| {
                s.vmstore_password = Some(Secret::new("p"));
                s.vmstore_password_file = Some("p".into());
            }),
            ConfigError::Both { .. }
        ));
        let login = |password: &str| {
            checked(|s| {
                s.vmstore_user = Some("u".into());
                s.vmstore_password = Some(Secret::new(password));
            })
        };
        assert_eq!(login("correct horse").unwrap().vmstore.unwrap().username, "u");
        for weak in ["", "p", "hunter2", "123456123456"] {
            let error = login(weak).unwrap_err().to_string();
            assert!(error.contains("vmstore-password") && error.contains("weak"), "{error}");
            assert!(weak.len() < 2 || !error.contains(weak), "{error}");
        }
    }

    #[test]
    fn all_faults_are_told() {
        let of_settings = fault(|s| {
            s.data_dir = None;
            s.memory = Some(Size::from_bytes(1));
            s.tls_cert = Some("c".into());
            s.export_path = Some("x".to_owned());
            // Not judged before these are right.
            s.nfs_listen = Some(vec!["0.0.0.0:0".parse().unwrap()]);
        });
        let lines: Vec<_> = of_settings.to_string().lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        for (line, word) in lines.iter().zip(["data-dir", "tls-cert", "memory", "export-path"]) {
            assert!(line.contains(word), "{word}: {line}");
        }
        let of_addresses = fault(|s| {
            s.nfs_listen = Some(vec!["0.0.0.0:0".parse().unwrap()]);
            s.api_listen = Some("0.0.0.0:0".parse().unwrap());
        });
        let lines = of_addresses.to_string();
        for word in ["nfs-client", "token-file", "plain-http"] {
            assert!(lines.contains(word), "{word}: {lines}");
        }
        assert_eq!(lines.lines().count(), 3, "{lines}");
    }

    #[test]
    fn files_are_looked_into() {
        let directory = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let path = directory.path().join("file");
            std::fs::write(&path, text).unwrap();
            path
        };
        let secret = first_line(&file("word pass\nsecond\n")).unwrap();
        assert_eq!(secret.reveal(), "word pass");
        let login = |path| {
            fault(|s| {
                s.vmstore_user = Some("u".into());
                s.vmstore_password_file = Some(path);
            })
        };
        assert!(matches!(login(file("\n")), ConfigError::Empty { .. }));
        assert!(matches!(login("/nonexistent".into()), ConfigError::Unreadable { .. }));
        let tls = |path: std::path::PathBuf| {
            checked(|s| {
                s.tls_cert = Some(path.clone());
                s.tls_key = Some(path);
            })
        };
        assert!(matches!(tls(file("no pem")), Err(ConfigError::Empty { .. })));
        let config = tls(file("-----BEGIN X-----\n")).unwrap();
        assert!(config.tls.is_some() && config.nfs_tls == NfsTlsPolicy::Offered);
    }

    #[test]
    fn nfs_has_one_to_eight_addresses() {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        for count in [1, 2, NFS_LISTEN_MAX] {
            let config = checked(|s| s.nfs_listen = Some(vec![address; count])).unwrap();
            assert_eq!(config.nfs_listen.len(), count);
        }
        let twice = vec!["127.0.0.1:7".parse().unwrap(); 2];
        let refused = fault(|s| s.nfs_listen = Some(twice)).to_string();
        assert!(refused.contains("127.0.0.1:7") && refused.contains("once"), "{refused}");
        for count in [0, NFS_LISTEN_MAX + 1] {
            let refused = fault(|s| s.nfs_listen = Some(vec![address; count])).to_string();
            for word in ["nfs-listen", &format!("{count} addresses"), "1 to 8"] {
                assert!(refused.contains(word), "{word}: {refused}");
            }
        }
    }

    #[test]
    fn nothing_is_opened_by_an_address_alone() {
        let everywhere = || Some("0.0.0.0:0".parse().unwrap());
        let loopback = "127.0.0.1:2049".parse().unwrap();
        for change in [
            |s: &mut Settings, open| s.nfs_listen = Some(vec![open]),
            |s: &mut Settings, open| s.nfs_listen.as_mut().unwrap().push(open),
            |s: &mut Settings, open| s.portmap_listen = Some(open),
        ] {
            let refused = fault(|s| {
                s.nfs_listen = Some(vec![loopback]);
                change(s, everywhere().unwrap());
            });
            assert!(matches!(refused, ConfigError::OpenNfs { .. }), "{refused}");
        }
        let error = fault(|s| s.api_listen = everywhere());
        let ConfigError::Several(faults) = error else { panic!("got {error}") };
        assert!(matches!(faults[0], ConfigError::OpenApi { .. }), "{faults:?}");
        let allowed = checked(|s| {
            s.nfs_listen = everywhere().map(|address| vec![address]);
            s.nfs_client = Some(vec!["10.0.0.0/8:rw".parse().unwrap()]);
        });
        assert_eq!(allowed.unwrap().nfs_clients.unwrap().len(), 1);
        let wide = |listen: &str, is_meant| {
            checked(|s| {
                s.nfs_listen = Some(vec![listen.parse().unwrap()]);
                s.nfs_client =
                    Some(vec!["10.0.0.0/8:rw".parse().unwrap(), "0.0.0.0/1:ro".parse().unwrap()]);
                s.insecure_any_client = Some(is_meant);
            })
        };
        let error = wide("10.0.0.5:2049", false).unwrap_err();
        assert!(matches!(error, ConfigError::AnyClient { .. }), "{error}");
        let told = error.to_string();
        assert!(told.contains("0.0.0.0/1:ro") && told.contains("--insecure-any-client"), "{told}");
        assert!(wide("10.0.0.5:2049", true).is_ok());
        assert!(wide("127.0.0.1:2049", false).is_ok());
        for loopback in ["127.8.8.8:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            let address = loopback.parse().unwrap();
            assert!(checked(|s| s.nfs_listen = Some(vec![address])).is_ok(), "{loopback}");
        }
    }

    #[test]
    fn secrets_do_not_go_in_plain_text() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let tokens = file("tokens", "ops admin 0123456789abcdef\n");
        let pem = file("pem", "-----BEGIN X-----\n");
        let served = |listen: &str, with_tls: bool, is_meant| {
            checked(|s| {
                s.api_listen = Some(listen.parse().unwrap());
                s.token_file = Some(vec![tokens.clone()]);
                s.tls_cert = with_tls.then(|| pem.clone());
                s.tls_key = with_tls.then(|| pem.clone());
                s.insecure_plain_http = Some(is_meant);
            })
        };
        for reached in ["0.0.0.0:1", "10.0.0.5:1", "[::]:1", "[::ffff:10.0.0.1]:1", "[fe80::1]:1"] {
            let error = served(reached, false, false).unwrap_err();
            assert!(matches!(error, ConfigError::PlainHttp { .. }), "{reached}: {error}");
            assert!(error.to_string().contains("--tls-cert"), "{error}");
            assert!(served(reached, true, false).is_ok(), "{reached}");
            assert!(served(reached, false, true).is_ok(), "{reached}");
        }
        for loopback in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(served(loopback, false, false).is_ok(), "{loopback}");
        }
    }

    #[test]
    fn values_are_in_range() {
        let key_of = |error| match error {
            ConfigError::Value { key, .. } => key,
            other => panic!("expected a fault of a value, got {other}"),
        };
        for seconds in [0, DIRTY_AGE_SECONDS_MAX + 1] {
            let error = fault(|s| s.dirty_age_seconds = Some(seconds));
            assert_eq!(key_of(error), "dirty-age-seconds");
        }
        for days in [0, UNPUBLISH_AFTER_DAYS_MAX + 1] {
            let error = fault(|s| s.unpublish_after_days = Some(days));
            assert_eq!(key_of(error), "unpublish-after-days");
        }
        let checked =
            |days| unpublish_after(&Settings { unpublish_after_days: days, ..Settings::default() });
        assert_eq!(checked(Some(1)).unwrap(), Some(Duration::from_secs(86_400)));
        assert_eq!(checked(None).unwrap(), None);
        assert_eq!(key_of(fault(|s| s.nfs_connections = Some(0))), "nfs-connections");
        let many = NFS_IO_THREADS_MAX + 1;
        assert_eq!(key_of(fault(|s| s.nfs_io_threads = Some(many))), "nfs-io-threads");
        let slow = Size::from_bytes(1);
        assert_eq!(key_of(fault(|s| s.compaction_rate = Some(slow))), "compaction-rate");
        for path in ["", "/", "x", "/a//b", "/a/", "/a/..", "/a b", "/a\u{e9}", "/a'b"] {
            let error = fault(|s| s.export_path = Some(path.to_owned()));
            assert_eq!(key_of(error), "export-path", "{path}");
        }
        let long = format!("/{}", "x".repeat(EXPORT_PATH_BYTES_MAX));
        assert_eq!(key_of(fault(|s| s.export_path = Some(long))), "export-path");
        assert!(matches!(
            fault(|s| s.memory = Some(Size::from_bytes(BUDGET_BYTES_MIN - 1))),
            ConfigError::Memory { .. }
        ));
    }
}

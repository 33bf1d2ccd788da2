//! The configuration as users meet it: `slackwaterd config check`, run as a process because
//! the environment is part of it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// `slackwaterd` with a clean environment.
fn slackwaterd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwaterd"));
    command.env_clear();
    command
}

fn check(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    slackwaterd()
        .args(["config", "check"])
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The value and the origin of one key, as they are printed.
fn shown(text: &str, key: &str) -> (String, String) {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{key} = ")))
        .unwrap_or_else(|| panic!("{key} is not in:\n{text}"));
    let (value, origin) = line.split_once('#').unwrap();
    let value = value.trim().strip_prefix(&format!("{key} = ")).unwrap();
    (value.to_owned(), origin.trim().to_owned())
}

fn file(directory: &TempDir, text: &str) -> String {
    let path = directory.path().join("config.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// One line on standard error, and the exit code of a wrong configuration.
fn refused(output: &Output) -> String {
    refused_for(output, 1)
}

/// What is told of so many faults, a line each.
fn refused_for(output: &Output, faults: usize) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.lines().count(), faults, "expected {faults} lines: {text}");
    assert!(text.lines().all(|line| line.starts_with("slackwaterd: ")), "{text}");
    assert!(output.stdout.is_empty());
    text
}

#[test]
fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    let directory = TempDir::new().unwrap();
    let path = file(
        &directory,
        "data-dir = \"/from-file\"\nmemory = \"2GiB\"\nlog = \"warn\"\nanonymous-uid = 7\n",
    );
    let environment = [
        ("SLACKWATER_CONFIG", path.as_str()),
        ("SLACKWATER_MEMORY", "3GiB"),
        ("SLACKWATER_LOG", "error"),
    ];
    let text = stdout(&check(&["--log", "debug"], &environment));
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    assert_eq!(shown(&text, "log"), pair("\"debug\"", "flag"));
    assert_eq!(shown(&text, "memory"), pair("\"3GiB\"", "environment"));
    assert_eq!(shown(&text, "anonymous-uid"), pair("7", "file"));
    assert_eq!(shown(&text, "data-dir"), pair("\"/from-file\"", "file"));
    assert_eq!(shown(&text, "anonymous-gid"), pair("65534", "default"));
    assert_eq!(shown(&text, "nfs-listen"), pair("\"127.0.0.1:2049\"", "default"));
    let unset = text.lines().find(|line| line.starts_with("# not set: ")).unwrap();
    assert!(unset.contains("tls-cert, tls-key"), "{unset}");
    assert!(!unset.contains("data-dir"), "{unset}");
}

#[test]
fn the_flag_config_wins_over_its_variable() {
    let directory = TempDir::new().unwrap();
    let path = file(&directory, "data-dir = \"/right\"\n");
    let environment = [("SLACKWATER_CONFIG", "/nonexistent.toml")];
    let text = stdout(&check(&["--config", &path], &environment));
    assert_eq!(shown(&text, "data-dir").0, "\"/right\"");
}

#[test]
fn what_is_printed_is_a_configuration_file_that_gives_the_same() {
    let directory = TempDir::new().unwrap();
    let arguments = [
        "--data-dir",
        "/a \"b\"",
        "--nfs-client",
        "10.0.0.0/8:rw",
        "--nfs-client",
        "::1/128:ro",
        "--squash",
        "all_squash",
        "--capacity",
        "1TiB",
        "--log-format",
        "json",
    ];
    let first = stdout(&check(&arguments, &[]));
    let path = file(&directory, &first);
    let second = stdout(&check(&["--config", &path], &[]));
    let values = |text: &str| -> toml::Table { text.parse().unwrap() };
    assert_eq!(values(&first), values(&second));
    assert_eq!(values(&first)["nfs-client"].as_array().unwrap().len(), 2);
    assert_eq!(shown(&second, "squash").1, "file");
}

#[test]
fn secrets_are_not_printed() {
    let directory = TempDir::new().unwrap();
    let secret = "correct-horse-battery";
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, format!("ops admin {secret}\n")).unwrap();
    let by_file = file(
        &directory,
        &format!(
            "vmstore-user = \"u\"\nvmstore-password = \"{secret}\"\ntoken-file = [{tokens:?}]"
        ),
    );
    let user = ["--data-dir", "/d", "--vmstore-user", "u"];
    for (arguments, environment) in [
        ([&user[..], &["--vmstore-password", secret]].concat(), &[][..]),
        (user.to_vec(), &[("SLACKWATER_VMSTORE_PASSWORD", secret)]),
        (vec!["--data-dir", "/d", "--config", &by_file], &[]),
    ] {
        let output = check(&arguments, environment);
        let text = stdout(&output);
        assert_eq!(shown(&text, "vmstore-password").0, "\"<redacted>\"");
        assert!(!text.contains(secret), "{text}");
        assert!(!stderr(&output).contains(secret));
    }
    let help =
        slackwaterd().arg("--help").env("SLACKWATER_VMSTORE_PASSWORD", secret).output().unwrap();
    assert!(!stdout(&help).contains(secret));
}

#[test]
fn one_form_of_the_password_wins_over_the_other_of_a_lower_layer() {
    let directory = TempDir::new().unwrap();
    let password = directory.path().join("password");
    std::fs::write(&password, "from the file\n").unwrap();
    let password = password.to_str().unwrap();
    let flags = ["--data-dir", "/d", "--vmstore-user", "u", "--vmstore-password-file", password];
    let text = stdout(&check(&flags, &[("SLACKWATER_VMSTORE_PASSWORD", "other")]));
    assert_eq!(shown(&text, "vmstore-password-file").1, "flag");
    assert!(!text.contains("vmstore-password ="), "{text}");

    let path = file(&directory, "vmstore-user = \"u\"\nvmstore-password = \"another one\"\n");
    let flags = ["--data-dir", "/d", "--config", &path, "--vmstore-password-file", password];
    let text = stdout(&check(&flags, &[]));
    assert!(!text.contains("vmstore-password ="), "{text}");

    let flags =
        ["--data-dir", "/d", "--vmstore-password", "x", "--vmstore-password-file", password];
    let text = refused(&check(&flags, &[]));
    assert!(text.contains("both set"), "{text}");
}

#[test]
fn faults_of_the_file_are_placed() {
    let directory = TempDir::new().unwrap();
    for (text, place, reason) in [
        ("data-dir = \"/d\"\nmemroy = \"1GiB\"\n", ":2:1: ", "unknown field `memroy`"),
        ("data-dir = \"/d\"\nmemory = \"1GB\"\n", ":2:10: ", "not a unit of size"),
        ("data-dir = \"/d\"\nlog = \"info\n", ":2:", ""),
        ("nfs-client = [\"10.0.0.0/8\"]\n", ":1:14: ", "10.0.0.0/8"),
        ("log = \"a=b=c\"\n", ":1:7: ", "a=b=c"),
    ] {
        let path = file(&directory, text);
        let error = refused(&check(&["--config", &path], &[]));
        assert!(error.contains(&format!("{path}{place}")), "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn an_unreadable_file_is_named() {
    let directory = TempDir::new().unwrap();
    let missing = directory.path().join("none.toml");
    let error = refused(&check(&["--config", missing.to_str().unwrap()], &[]));
    assert!(error.contains("none.toml"), "{error}");
    assert!(error.contains("No such file"), "{error}");

    let error = refused(&check(&["--config", directory.path().to_str().unwrap()], &[]));
    assert!(error.contains("Is a directory"), "{error}");

    let binary = directory.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe]).unwrap();
    let error = refused(&check(&["--config", binary.to_str().unwrap()], &[]));
    assert!(error.contains("not UTF-8"), "{error}");
}

#[test]
fn what_cannot_be_served_is_refused() {
    let directory = TempDir::new().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, "ops admin 0123456789abcdef\n").unwrap();
    let tokens = tokens.to_str().unwrap();
    for (arguments, reasons) in [
        (&[][..], &["data-dir is not set"][..]),
        (&["--data-dir", "/d", "--nfs-listen", "0.0.0.0:2049"], &["--nfs-client"]),
        (
            &["--data-dir", "/d", "--api-listen", "[::]:8049"],
            &["--token-file", "--insecure-plain-http"],
        ),
        (
            &["--data-dir", "/d", "--api-listen", "[::]:8049", "--insecure-no-tokens", "true"],
            &["--token-file", "--insecure-plain-http"],
        ),
        (
            &["--data-dir", "/d", "--nfs-listen", "[::]:2049", "--nfs-client", "0.0.0.0/0:rw"],
            &["--insecure-any-client"],
        ),
        (
            &["--data-dir", "/d", "--api-listen", "10.0.0.5:8049", "--token-file", tokens],
            &["--insecure-plain-http"],
        ),
        (&["--data-dir", "/d", "--memory", "1MiB"], &["at least"]),
        (
            &["--tls-cert", "/c", "--export-path", "slack", "--memory", "1MiB"],
            &["data-dir is not set", "without tls-key", "at least", "begins with /"],
        ),
    ] {
        let error = refused_for(&check(arguments, &[]), reasons.len());
        for (line, reason) in error.lines().zip(reasons) {
            assert!(line.contains(reason), "expected {reason}: {error}");
        }
    }
}

#[test]
fn what_is_unsafe_is_told_with_the_way_out() {
    let directory = TempDir::new().unwrap();
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, "ops admin 0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&tokens, Permissions::from_mode(0o644)).unwrap();
    let store = directory.path().join("store");
    std::fs::create_dir(&store).unwrap();
    std::fs::set_permissions(&store, Permissions::from_mode(0o755)).unwrap();
    let (tokens, store) = (tokens.to_str().unwrap(), store.to_str().unwrap());
    let arguments = [
        &["--data-dir", store, "--token-file", tokens][..],
        &["--nfs-listen", "10.0.0.5:2049", "--nfs-client", "0.0.0.0/0:rw"],
        &["--api-listen", "10.0.0.5:8049", "--insecure-any-client", "true"],
        &["--insecure-plain-http", "true", "--insecure-address-only", "true"],
        &["--insecure-no-tokens", "true"],
    ];
    let output = check(&arguments.concat(), &[]);
    assert_eq!(output.status.code(), Some(0));
    let told = stderr(&output);
    for words in [
        ["holds a secret", "chmod 600"],
        ["in plain text (1)", "slackwaterd token hash"],
        ["where the disks are", "chmod 700"],
        ["--insecure-address-only is true", "mount-path"],
        ["--insecure-any-client is true", "list the networks"],
        ["--insecure-no-tokens is true", "set it to false"],
        ["--insecure-plain-http is true", "--tls-cert"],
    ] {
        let has = |line: &&str| words.iter().all(|word| line.contains(word));
        assert_eq!(told.lines().filter(has).count(), 1, "{words:?}: {told}");
    }
    assert!(told.lines().all(|line| line.starts_with("slackwaterd: warning: ")), "{told}");
    assert_eq!(told.lines().count(), 7, "{told}");
}

#[test]
fn wrong_usage_ends_with_2() {
    for arguments in [
        &["--no-such-option"][..],
        &["--nfs-listen", "localhost"],
        &["--memory", "8GB"],
        &["config"],
        &["serve"],
    ] {
        let output = slackwaterd().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
    let version = stdout(&slackwaterd().arg("--version").output().unwrap());
    assert_eq!(version.trim(), format!("slackwaterd {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_example_is_accepted_and_names_every_key() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/config.example.toml");
    let example = std::fs::read_to_string(&path).unwrap();
    let text = stdout(&check(&["--config", path.to_str().unwrap()], &[]));
    let set = text.lines().filter_map(|line| line.split_once(" = ").map(|(key, _)| key));
    let unset = text.lines().find_map(|line| line.strip_prefix("# not set: ")).unwrap();
    let keys: Vec<_> = set.chain(unset.split(", ")).collect();
    assert!(keys.len() > 20, "{keys:?}");
    for key in keys {
        let is_shown = example
            .lines()
            .any(|line| line.trim_start_matches("# ").starts_with(&format!("{key} = ")));
        // The secret itself is only spoken of: the example shows the form with a file.
        assert!(is_shown || key == "vmstore-password", "{key} is not in the example");
    }
}

#[test]
fn examples_in_comments_are_accepted_too() {
    let directory = TempDir::new().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/config.example.toml");
    let example = std::fs::read_to_string(path).unwrap();
    // A comment that is a setting has the form `# key = value`; files that it names do not
    // exist here and are left out, with what needs them.
    let uncommented: Vec<_> = example
        .lines()
        .map(|line| line.strip_prefix("# ").unwrap_or(line))
        .filter(|line| line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' ')))
        .filter(|line| !line.contains("/etc/"))
        .filter(|line| !["vmstore-user", "nfs-tls"].iter().any(|key| line.starts_with(key)))
        .collect();
    assert!(uncommented.len() > 15, "{uncommented:?}");
    let path = file(&directory, &uncommented.join("\n"));
    let text = stdout(&check(&["--config", &path], &[]));
    assert_eq!(shown(&text, "capacity").0, "\"500GiB\"");
}

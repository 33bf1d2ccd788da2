//! What is secret stays so: nothing in the log at its most talkative, in the process's
//! arguments, on any page, or in files that others may read.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::nfs::Client;
use common::{Server, on_free_ports, run_to_end, slackwaterd, with_its_token};
use rustix::process::Signal;
use tempfile::TempDir;

const TOKEN: &str = "right-token-0123456789abcdef";
const WRONG_TOKEN: &str = "wrong-token-0123456789abcdef";
const PASSWORD: &str = "right-password-of-the-appliance";
const WRONG_PASSWORD: &str = "wrong-password-of-the-appliance";

fn write(directory: &TempDir, name: &str, mode: u32, text: &str) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The whole answer that curl gets, its head included.
fn curl(arguments: &[&str]) -> String {
    // More than a pipe holds may come: `output` reads along, and curl bounds the time.
    let curl = Command::new("curl").args(["-sSi", "--max-time", "60"]).args(arguments).output();
    let output = curl.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Secrets that are in `text`.
fn found<'a>(text: &str, secrets: &'a [String]) -> Vec<&'a String> {
    secrets.iter().filter(|secret| text.contains(secret.as_str())).collect()
}

#[test]
fn the_token_that_the_server_makes_is_not_logged_or_shown() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let mut command = slackwaterd();
    command.args(with_its_token(&data_dir)).args(["--log", "trace"]);
    let mut server = Server::start_with(&mut command);
    let token = std::fs::read_to_string(data_dir.join("admin-token")).unwrap();
    let token = token.trim_end();
    let header = format!("Authorization: Bearer {token}");
    let url = |path: &str| format!("http://{}{path}", server.api);
    let pages = ["/v1/stats", "/metrics", "/", "/openapi.json", "/v1/workers"];
    let mut shown: String = pages.map(|path| curl(&["-H", &header, &url(path)])).concat();
    shown.push_str(&server.welcome);
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    assert!(log.contains("admin-token"), "{log}");
    shown.push_str(&log);
    let secrets = [token.to_owned(), blake3::hash(token.as_bytes()).to_hex().to_string()];
    assert_eq!(found(&shown, &secrets), Vec::<&String>::new(), "{shown}");
}

#[test]
fn no_secret_is_logged_or_shown() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", 0o600, &format!("ops admin {TOKEN}\n"));
    let password = write(&directory, "password", 0o600, &format!("{PASSWORD}\n"));
    let mut command = slackwaterd();
    command.args(on_free_ports(&directory.path().join("store"))).args([
        "--log",
        "trace",
        "--token-file",
        text(&tokens),
        "--vmstore-user",
        "cinder",
        "--vmstore-password-file",
        text(&password),
    ]);
    let mut server = Server::start_with(&mut command);
    let url = |path: &str| format!("http://{}{path}", server.api);
    let mut pages = String::new();
    for token in [TOKEN, WRONG_TOKEN] {
        let header = format!("Authorization: Bearer {token}");
        for path in ["/v1/stats", "/metrics", "/", "/openapi.json", "/v1/files/a%2Fb"] {
            pages.push_str(&curl(&["-H", &header, &url(path)]));
        }
    }
    let mut session = String::new();
    for password in [PASSWORD, WRONG_PASSWORD] {
        let body = format!(
            "{{\"username\":\"cinder\",\"password\":\"{password}\",\"typeId\":\"x.RestApiCredentials\"}}"
        );
        let json = ["-H", "Content-Type: application/json", "-d", &body];
        let answer = curl(&[&json[..], &[&url("/api/v310/session/login")]].concat());
        if let Some((_, rest)) = answer.split_once("JSESSIONID=") {
            session = rest.split(';').next().unwrap().to_owned();
        }
    }
    assert_eq!(session.len(), 64, "no session was given");
    let cookie = format!("JSESSIONID={session}");
    assert!(curl(&["-b", &cookie, &url("/api/v310/appliance")]).starts_with("HTTP/1.1 200"));
    let header = format!("Authorization: Bearer {TOKEN}");
    let made = curl(&["-X", "POST", "-H", &header, &url("/v1/mount-paths")]);
    let (_, path) = made.split_once("\"path\":\"").unwrap();
    let path = path.split('"').next().unwrap();
    Client::connect(server.nfs).mount(path);
    let path_secret = path.rsplit('/').next().unwrap();

    let secrets = [TOKEN, WRONG_TOKEN, PASSWORD, WRONG_PASSWORD, &session, path_secret];
    let mut secrets = secrets.map(str::to_owned).to_vec();
    // Who has the hash can try words against it for as long as he likes.
    let hashes = secrets.iter().map(|secret| blake3::hash(secret.as_bytes()).to_hex().to_string());
    secrets.extend(hashes.collect::<Vec<_>>());
    let arguments = std::fs::read(format!("/proc/{}/cmdline", server.id())).unwrap();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    assert!(log.contains("DEBUG"), "the log is not talkative:\n{log}");
    assert!(log.contains("a token was refused") && log.contains("log-in"), "{log}");
    assert_eq!(found(&log, &secrets), Vec::<&String>::new(), "in the log:\n{log}");
    assert_eq!(found(&pages, &secrets), Vec::<&String>::new(), "on a page");
    let arguments = String::from_utf8_lossy(&arguments);
    assert_eq!(found(&arguments, &secrets), Vec::<&String>::new(), "in the arguments");
    assert_eq!(found(&format!("x{TOKEN}y"), &secrets).len(), 1, "the search finds what is there");
}

#[test]
fn a_secret_that_others_can_read_is_told() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    for (mode, is_told) in [(0o644, true), (0o600, false)] {
        let tokens = write(&directory, "tokens", mode, &format!("ops admin {TOKEN}\n"));
        let advice = format!("chmod 600 {}", tokens.display());
        let mut command = slackwaterd();
        command.args(on_free_ports(&data_dir)).args(["--token-file", text(&tokens)]);
        let mut server = Server::start_with(&mut command);
        server.signal(Signal::TERM);
        assert!(server.wait().success());
        let log = server.log();
        assert_eq!(log.contains(&advice), is_told, "mode {mode:o}:\n{log}");

        let mut check = slackwaterd();
        check.args(["config", "check", "--data-dir", "/d", "--token-file", text(&tokens)]);
        let output = run_to_end(&mut check);
        assert!(output.status.success());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.contains(&advice), is_told, "mode {mode:o}:\n{error}");
    }
}

#[test]
fn the_data_directory_is_the_owners_alone() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("deep/store");
    let mode = || std::fs::metadata(&data_dir).unwrap().permissions().mode() & 0o777;
    let advice = format!("may enter {}", data_dir.display());
    let log_of_a_run = || {
        let mut server = Server::start(&data_dir);
        server.signal(Signal::TERM);
        assert!(server.wait().success());
        server.log().lines().filter(|line| line.contains("WARN")).collect::<String>()
    };
    let log = log_of_a_run();
    assert_eq!(mode(), 0o700);
    assert!(!log.contains(&advice), "{log}");
    // One that an administrator made is left as it is, and the log names it.
    std::fs::set_permissions(&data_dir, Permissions::from_mode(0o755)).unwrap();
    let log = log_of_a_run();
    assert_eq!(mode(), 0o755);
    assert!(log.contains(&advice), "{log}");
    // What is in it is for the owner alone all the same.
    let (files, exposed) = files_below(&data_dir);
    assert!(files > 5, "{files}");
    assert_eq!(exposed, [""; 0]);
}

/// How many files and directories there are below one, and those of them that have bits for others than the owner.
fn files_below(directory: &Path) -> (usize, Vec<String>) {
    let (mut count, mut exposed) = (0, Vec::new());
    for entry in std::fs::read_dir(directory).unwrap() {
        let (path, metadata) =
            entry.map(|entry| (entry.path(), entry.metadata().unwrap())).unwrap();
        count += 1;
        if metadata.permissions().mode() & 0o077 != 0 {
            exposed.push(format!("{} {:o}", path.display(), metadata.permissions().mode()));
        }
        if metadata.is_dir() {
            let (more, others) = files_below(&path);
            count += more;
            exposed.extend(others);
        }
    }
    (count, exposed)
}

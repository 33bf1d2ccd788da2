//! Who is let in, as configured: tokens, TLS and the VMstore login reach the servers. What
//! each of them does is tested beside it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::nfs::Client;
use common::{Server, on_free_ports, run_to_end, slackwaterd};
use rustix::process::Signal;
use tempfile::TempDir;

const ADMIN: &str = "admin-0123456789abcdef";
const VIEWER: &str = "viewer-0123456789abcdef";

/// A server with more arguments, on a store of its own.
fn start(directory: &TempDir, arguments: &[&str]) -> Server {
    let data_dir = directory.path().join("store");
    Server::start_with(slackwaterd().args(on_free_ports(&data_dir)).args(arguments))
}

fn write(directory: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// The status that curl gets, and the body.
fn curl(arguments: &[&str]) -> (String, String) {
    let common = ["-sS", "--max-time", "60", "-w", "\n%{http_code}"];
    let output = run_to_end(Command::new("curl").args(common).args(arguments));
    let text = String::from_utf8(output.stdout).unwrap();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (status.to_owned(), body.to_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn tokens_of_the_file_are_asked_for() {
    let directory = TempDir::new().unwrap();
    let tokens = format!("# ours\nops admin {ADMIN}\ngrafana read-only {VIEWER}\n");
    let tokens = write(&directory, "tokens", &tokens);
    let mut server = start(&directory, &["--token-file", text(&tokens)]);
    let url = format!("http://{}", server.api);
    let status = |token: &str, path: &str, more: &[&str]| {
        let header = format!("Authorization: Bearer {token}");
        curl(&[&["-H", &header, &format!("{url}{path}")], more].concat()).0
    };
    let post = ["-H", "Content-Type: application/json", "-d", r#"{"path":"a","size_bytes":1}"#];
    assert_eq!(server.http("GET", "/v1/stats", "").0, 401);
    assert_eq!(server.http("GET", "/healthz", "").0, 200);
    assert_eq!(status("wrong-0123456789abcdef", "/v1/stats", &[]), "401");
    assert_eq!(status(VIEWER, "/v1/stats", &[]), "200");
    assert_eq!(status(VIEWER, "/v1/files", &post), "403");
    assert_eq!(status(ADMIN, "/v1/files", &post), "201");
    assert!(server.welcome.contains("$SLACKWATER_TOKEN"));
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    assert!(!log.contains(ADMIN) && !log.contains(VIEWER), "{log}");
}

#[test]
fn tls_and_the_vmstore_login_work_together() {
    let directory = TempDir::new().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = write(&directory, "tls.crt", &made.cert.pem());
    let key = write(&directory, "tls.key", &made.signing_key.serialize_pem());
    let password = write(&directory, "password", "correct horse\n");
    let server = start(
        &directory,
        &[
            "--tls-cert",
            text(&certificate),
            "--tls-key",
            text(&key),
            "--vmstore-user",
            "admin",
            "--vmstore-password-file",
            text(&password),
        ],
    );
    let url = format!("https://{}", server.api);
    assert!(server.welcome.contains(&format!("API  {url}\n")));
    let trusted = ["--cacert", text(&certificate)];
    let ready = format!("{url}/readyz");
    assert_eq!(curl(&[&trusted[..], &[&ready]].concat()).0, "200");
    assert_eq!(curl(&[&ready]).0, "000", "an unknown certificate was taken");

    let login = format!("{url}/api/v310/session/login");
    let with_password = |password: &str| {
        let body = format!(
            "{{\"username\":\"admin\",\"password\":\"{password}\",\
             \"typeId\":\"com.tintri.api.rest.vcommon.dto.rbac.RestApiCredentials\"}}"
        );
        let json = ["-H", "Content-Type: application/json", "-d", &body, &login];
        curl(&[&trusted[..], &json].concat()).0
    };
    assert_eq!(with_password("correct horse"), "200");
    assert_ne!(with_password("wrong horse"), "200");
    assert!(server.stop().success());
}

#[test]
fn a_key_that_is_none_ends_the_server_with_its_name() {
    let directory = TempDir::new().unwrap();
    let certificate = write(&directory, "tls.crt", "-----BEGIN NOTHING-----\n");
    let mut command = slackwaterd();
    command.args(on_free_ports(&directory.path().join("store"))).args([
        "--tls-cert",
        text(&certificate),
        "--tls-key",
        text(&certificate),
    ]);
    let output = run_to_end(&mut command);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let line = error.lines().find(|line| line.starts_with("slackwaterd: ")).unwrap();
    assert!(line.contains(text(&certificate)), "{error}");
}

#[test]
fn the_vmstore_login_is_off_unless_it_is_configured() {
    let directory = TempDir::new().unwrap();
    let server = start(&directory, &[]);
    let (status, _) = server.http("POST", "/api/v310/session/login", "{}");
    assert_eq!(status, 404);
    assert!(server.stop().success());
}

#[test]
fn the_export_path_is_the_configured_one() {
    let directory = TempDir::new().unwrap();
    let server = start(&directory, &["--export-path", "/other/name"]);
    assert!(server.welcome.contains("127.0.0.1:/other/name /mnt"));
    let root = Client::connect(server.nfs).mount("/other/name");
    assert!(!root.is_empty());
    assert!(server.stop().success());
}

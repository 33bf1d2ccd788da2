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

/// A JSON field of an answer.
fn field(body: &str, name: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(body).unwrap();
    value[name].as_str().unwrap_or_else(|| panic!("no {name} in {body}")).to_owned()
}

#[test]
fn workers_outlive_the_server_and_revoked_ones_stay_away() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", &format!("ops admin {ADMIN}\n"));
    let start = || start(&directory, &["--token-file", text(&tokens), "--log", "trace"]);
    let call = |server: &Server, token: &str, more: &[&str], path: &str| {
        let header = format!("Authorization: Bearer {token}");
        let url = format!("http://{}{path}", server.api);
        let json = ["-H", "Content-Type: application/json", "-H", &header, &url];
        curl(&[&json[..], more].concat())
    };
    let server = start();
    let (status, added) = call(&server, ADMIN, &["-d", r#"{"name":"node-7"}"#], "/v1/workers");
    assert_eq!(status, "201", "{added}");
    let join_token = field(&added, "join_token");
    server.kill();

    let server = start();
    let credential = format!("slackwater-worker-{}", "5a".repeat(32));
    let hash = blake3::hash(credential.as_bytes()).to_hex();
    let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    let joining = format!(r#"{{"worker_id":"{id}","credential_blake3":"{hash}"}}"#);
    assert_eq!(call(&server, &join_token, &["-d", &joining], "/v1/join").0, "200");
    server.kill();

    let mut server = start();
    assert_eq!(call(&server, &credential, &[], "/v1/stats").0, "200");
    assert_eq!(call(&server, ADMIN, &["-X", "DELETE"], "/v1/workers/node-7").0, "204");
    assert_eq!(call(&server, &credential, &[], "/v1/stats").0, "401");
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    assert!(log.contains("a worker was revoked") && log.contains("by=\"ops\""), "{log}");
    for secret in [join_token.as_str(), &credential, &hash, ADMIN] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }

    let server = start();
    assert_eq!(call(&server, &credential, &[], "/v1/stats").0, "401");
    let file = directory.path().join("store/workers.json");
    let content = std::fs::read_to_string(&file).unwrap();
    assert!(!content.contains("node-7"), "{content}");
    assert!(server.stop().success());
    // A name is of a worker or of a token.
    let server = start();
    assert_eq!(call(&server, ADMIN, &["-d", r#"{"name":"node-8"}"#], "/v1/workers").0, "201");
    assert!(server.stop().success());
    let tokens =
        write(&directory, "twice", &format!("ops admin {ADMIN}\nnode-8 worker {VIEWER}\n"));
    let data_dir = directory.path().join("store");
    let mut command = slackwaterd();
    command.args(on_free_ports(&data_dir)).args(["--token-file", text(&tokens)]);
    let output = run_to_end(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("`node-8`") && said.contains("workers.json"), "{said}");
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

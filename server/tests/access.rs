//! Who is let in, as configured: tokens, TLS and the VMstore login reach the servers. What
//! each of them does is tested beside it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::nfs::{BY_ADDRESS, Client};
use common::{Server, connect, on_free_ports, run_to_end, slackwaterd, with_its_token};
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

/// What `slackwaterd token ...` prints on standard output; the rest it says is in the panic.
fn token_command(arguments: &[&str], token_file: &Path) -> String {
    let mut command = slackwaterd();
    command.arg("token").args(arguments).args(["--token-file", text(token_file)]);
    let output = run_to_end(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The status of a call with this token.
fn status_of(server: &Server, token: &str, path: &str) -> String {
    call(server, token, &[], path).0
}

/// Waits until `is_so`, far longer than it takes on a machine with little to do.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..80 {
        if is_so() {
            return;
        }
        // An address that guesses has one try a second.
        std::thread::sleep(Duration::from_millis(1500));
    }
    panic!("{what}: not so within two minutes");
}

#[test]
fn token_files_are_read_again_while_the_server_runs() {
    let directory = TempDir::new().unwrap();
    let tokens = directory.path().join("tokens");
    let ops = token_command(&["add", "ops", "admin"], &tokens).trim_end().to_owned();
    let mut server = start(&directory, &["--token-file", text(&tokens), "--log", "trace"]);
    assert_eq!(status_of(&server, &ops, "/v1/workers"), "200");
    let viewer = token_command(&["add", "grafana", "read-only"], &tokens).trim_end().to_owned();
    wait_until("the new token is taken", || status_of(&server, &viewer, "/v1/stats") == "200");
    wait_until("the start and the new token are in the audit log", || {
        let changes = call(&server, &ops, &[], "/v1/audit").1;
        changes.contains(r#""call":"start""#) && changes.contains(r#""about":"added grafana""#)
    });
    assert_eq!(status_of(&server, &viewer, "/v1/workers"), "403");
    let both = std::fs::read_to_string(&tokens).unwrap();
    let only_viewer = both.lines().last().unwrap().to_owned() + "\n";
    std::fs::write(&tokens, &only_viewer).unwrap();
    wait_until("the old token is refused", || status_of(&server, &ops, "/v1/stats") == "401");
    assert_eq!(status_of(&server, &viewer, "/v1/stats"), "200");

    // An empty file does not open the server to all callers.
    let is_valid = |expected: &str| {
        let page = call(&server, &viewer, &[], "/metrics").1;
        page.lines().any(|line| line == format!("slackwater_token_files_valid {expected}"))
    };
    assert!(is_valid("1"));
    std::fs::write(&tokens, "").unwrap();
    wait_until("the fault is on the metrics page", || is_valid("0"));
    assert_eq!(server.http("GET", "/v1/stats", "").0, 401);
    assert_eq!(status_of(&server, &ops, "/v1/stats"), "401");
    std::fs::write(&tokens, &only_viewer).unwrap();
    wait_until("the fault is mended", || is_valid("1"));
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    for said in ["removed=[\"ops\"]", "added=[\"grafana\"]", "holds no token"] {
        assert!(log.contains(said), "{said} is not in {log}");
    }
    for secret in [&ops, &viewer] {
        let hash = blake3::hash(secret.as_bytes()).to_hex();
        assert!(!log.contains(secret.as_str()) && !log.contains(hash.as_str()), "{log}");
    }
}

#[test]
fn a_token_file_of_secrets_becomes_one_of_hashes() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", &format!("# ours\nops admin {ADMIN}\n"));
    std::fs::set_permissions(&tokens, PermissionsExt::from_mode(0o600)).unwrap();
    let warnings = || {
        let mut check = slackwaterd();
        check.args(["config", "check", "--data-dir", "/d", "--token-file", text(&tokens)]);
        String::from_utf8(run_to_end(&mut check).stderr).unwrap()
    };
    assert!(warnings().contains("slackwaterd token hash"), "{}", warnings());
    let said = token_command(&["hash"], &tokens);
    assert!(said.contains("hashes: 1"), "{said}");
    let content = std::fs::read_to_string(&tokens).unwrap();
    assert!(content.starts_with("# ours\nops admin blake3:") && !content.contains(ADMIN));
    assert_eq!(warnings(), "");
    let server = start(&directory, &["--token-file", text(&tokens)]);
    assert_eq!(status_of(&server, ADMIN, "/v1/workers"), "200");
    let hash = content.split_whitespace().last().unwrap();
    assert_eq!(status_of(&server, hash, "/v1/stats"), "401");
    assert!(server.stop().success());
}

#[test]
fn a_token_command_that_cannot_do_it_says_why_and_prints_nothing() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", &format!("ops admin {ADMIN}\n"));
    let away = directory.path().join("away/tokens");
    for (arguments, code, reason) in [
        (&["add", "ops", "worker", "--token-file", text(&tokens)][..], 2, "delete its line"),
        (&["add", "new", "root", "--token-file", text(&tokens)], 2, "read-only"),
        (&["add", "new", "admin"], 2, "--token-file"),
        (&["hash"], 2, "--token-file"),
        (&["add", "new", "admin", "--token-file", text(&away)], 1, "away/tokens"),
        (&["hash", "--token-file", text(&away)], 2, "away/tokens"),
    ] {
        let output = run_to_end(slackwaterd().arg("token").args(arguments));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(reason) && !said.contains(ADMIN), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    let content = std::fs::read_to_string(&tokens).unwrap();
    assert_eq!(content, format!("ops admin {ADMIN}\n"));
}

/// A call with this token, and what more curl is to do; the status and the body.
fn call(server: &Server, token: &str, more: &[&str], path: &str) -> (String, String) {
    let header = format!("Authorization: Bearer {token}");
    let url = format!("http://{}{path}", server.api);
    let json = ["-H", "Content-Type: application/json", "-H", &header, &url];
    curl(&[&json[..], more].concat())
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
fn a_worker_mounts_by_a_secret_path_and_is_cut_off_when_it_is_revoked() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", &format!("ops admin {ADMIN}\n"));
    let start = || {
        let tokens = ["--token-file", text(&tokens)];
        let more = ["--squash", "no_root_squash", "--log", "trace"];
        start(&directory, &[&tokens[..], &more].concat())
    };
    let mut server = start();
    let added = call(&server, ADMIN, &["-d", r#"{"name":"node-7"}"#], "/v1/workers").1;
    let credential = format!("slackwater-worker-{}", "5a".repeat(32));
    let hash = blake3::hash(credential.as_bytes()).to_hex();
    let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    let joining = format!(r#"{{"worker_id":"{id}","credential_blake3":"{hash}"}}"#);
    let join_token = field(&added, "join_token");
    assert_eq!(call(&server, &join_token, &["-d", &joining], "/v1/join").0, "200");
    let made = call(&server, &credential, &["-X", "POST"], "/v1/mount-paths");
    assert_eq!(made.0, "201", "{}", made.1);
    let path = field(&made.1, "path");
    let mut client = Client::connect(server.nfs);
    let root = client.mount(&path);
    let workers = client.lookup(&root, "workers");
    // A worker that has no files yet has its directory.
    let home = client.lookup(&workers, id);
    for path in [format!("workers/{id}/disk"), "foreign".to_owned()] {
        let body = format!(r#"{{"path":"{path}","size_bytes":4096}}"#);
        assert_eq!(call(&server, ADMIN, &["-d", &body], "/v1/files").0, "201");
    }
    assert_eq!(client.try_lookup(&root, "foreign"), Err(2));
    // Of an administrator's file it reads no snapshot, until that is published.
    let taken = call(&server, ADMIN, &["-d", r#"{"path":"foreign"}"#], "/v1/snapshots");
    let snapshot = field(&taken.1, "id");
    let snapshots = client.lookup(&root, ".snapshot");
    assert_eq!(client.try_lookup(&snapshots, &snapshot), Err(13));
    let clone = format!(r#"{{"snapshot_id":"{snapshot}","path":"published/{snapshot}"}}"#);
    assert_eq!(call(&server, ADMIN, &["-d", &clone], "/v1/clones").0, "201");
    client.lookup(&snapshots, &snapshot);
    let disk = client.lookup(&home, "disk");
    client.write(&disk, 0, b"content");
    client.commit(&disk);
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let secret = path.rsplit('/').next().unwrap();
    let log = server.log();
    assert!(log.contains("DEBUG") && !log.contains(secret), "{log}");

    // Handles go on after a restart; the path does not, as nothing of it is kept.
    let server = start();
    let mut client = Client::connect(server.nfs);
    assert_eq!(client.read(&disk, 0, 7), b"content");
    assert_eq!(call(&server, ADMIN, &["-X", "DELETE"], "/v1/workers/node-7").0, "204");
    assert_eq!(client.try_write(&disk, 0, b"changed"), Err(13));
    assert_eq!(client.try_lookup(&home, "disk"), Err(13));
    assert_eq!(client.try_commit(&disk), Err(13));
    assert!(server.stop().success());
}

#[test]
fn without_mounts_by_address_no_machine_mounts_the_export() {
    let directory = TempDir::new().unwrap();
    let tokens = write(&directory, "tokens", &format!("ops admin {ADMIN}\n"));
    let arguments = ["--token-file", text(&tokens)];
    let server = start(&directory, &arguments);
    let mut client = Client::connect(server.nfs);
    assert_eq!(client.try_mount("/slackwater"), Err(13));
    assert!(server.welcome.contains("mount-path)\" /mnt"), "{}", server.welcome);
    // An administrator mounts all of it, by a secret path.
    let file = r#"{"path":"workers/a/disk","size_bytes":4096}"#;
    assert_eq!(call(&server, ADMIN, &["-d", file], "/v1/files").0, "201");
    let made = call(&server, ADMIN, &["-X", "POST"], "/v1/mount-paths");
    assert_eq!(made.0, "201", "{}", made.1);
    let path = field(&made.1, "path");
    let root = client.mount(&path);
    let workers = client.lookup(&root, "workers");
    let home = client.lookup(&workers, "a");
    let disk = client.lookup(&home, "disk");
    assert_eq!(client.read(&disk, 0, 4), [0; 4]);
    // A path of one kind is none of the other.
    assert_eq!(client.try_mount(&path.replace(".export", ".worker")), Err(13));
    // What it mounted ends with the token.
    let next = token_command(&["add", "next", "admin"], &tokens).trim_end().to_owned();
    let lines = std::fs::read_to_string(&tokens).unwrap();
    std::fs::write(&tokens, lines.lines().last().unwrap()).unwrap();
    wait_until("the token is gone", || status_of(&server, ADMIN, "/v1/workers") == "401");
    assert_eq!(status_of(&server, &next, "/v1/workers"), "200");
    assert_eq!(client.try_lookup(&home, "disk"), Err(13));
    assert!(server.stop().success());
    // Only an option that names it lets the address be enough, and each start says so.
    let mut server = start(&directory, &[&arguments[..], &BY_ADDRESS].concat());
    assert!(server.welcome.contains("127.0.0.1:/slackwater /mnt"), "{}", server.welcome);
    assert!(Client::connect(server.nfs).try_mount("/slackwater").is_ok());
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    let is_told = |line: &str| line.contains("WARN") && line.contains("--insecure-address-only");
    assert!(log.lines().any(is_told), "{log}");
}

#[test]
fn the_export_path_is_the_configured_one() {
    let directory = TempDir::new().unwrap();
    let server = start(&directory, &["--export-path", "/other/name"]);
    let (status, body) = server.http("POST", "/v1/mount-paths", "");
    assert_eq!(status, 201, "{body}");
    let path = field(&body, "path");
    assert!(path.starts_with("/other/name/.export/"), "{path}");
    let mut client = Client::connect(server.nfs);
    assert!(!client.mount(&path).is_empty());
    assert_eq!(client.try_mount(&path.replace("/other/name", "/slackwater")), Err(2));
    assert!(server.stop().success());
}

/// The token that a server on this data directory made.
fn admin_token(data_dir: &Path) -> String {
    let path = data_dir.join("admin-token");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::read_to_string(path).unwrap().trim_end().to_owned()
}

#[test]
fn without_token_files_the_server_makes_a_token_of_its_own() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let start = || Server::start_with(slackwaterd().args(with_its_token(&data_dir)));
    let server = start();
    let token = admin_token(&data_dir);
    // As all local users who do not read it.
    for (method, path) in [("GET", "/v1/stats"), ("POST", "/v1/mount-paths"), ("GET", "/metrics")] {
        assert_eq!(server.http(method, path, "").0, 401, "{path}");
    }
    let guessed = format!("/slackwater/.export/{}", "5a".repeat(32));
    assert_eq!(Client::connect(server.nfs).try_mount(&guessed), Err(13));
    assert_eq!(status_of(&server, &token, "/v1/workers"), "200");
    let made = call(&server, &token, &["-X", "POST"], "/v1/mount-paths");
    let root = Client::connect(server.nfs).mount(&field(&made.1, "path"));
    assert!(server.stop().success());
    // It is the same after a restart, and so is what was mounted by it.
    let server = start();
    assert_eq!(status_of(&server, &token, "/v1/workers"), "200");
    assert_eq!(Client::connect(server.nfs).getattr(&root), 0);
    assert!(server.stop().success());
    // Another one ends both.
    std::fs::remove_file(data_dir.join("admin-token")).unwrap();
    let server = start();
    assert_eq!(status_of(&server, &token, "/v1/workers"), "401");
    assert_ne!(Client::connect(server.nfs).getattr(&root), 0);
    assert_eq!(status_of(&server, &admin_token(&data_dir), "/v1/workers"), "200");
    assert!(server.stop().success());
}

#[test]
fn with_token_files_its_own_token_counts_no_more_unless_they_have_it() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let server = Server::start_with(slackwaterd().args(with_its_token(&data_dir)));
    let token = admin_token(&data_dir);
    let made = call(&server, &token, &["-X", "POST"], "/v1/mount-paths");
    let root = Client::connect(server.nfs).mount(&field(&made.1, "path"));
    assert!(server.stop().success());
    let with_it = format!("ops admin {ADMIN}\n@local-admin admin {token}\n");
    for (lines, status, mounted) in
        [(with_it, "200", 0), (format!("ops admin {ADMIN}\n"), "401", 13)]
    {
        let tokens = write(&directory, "tokens", &lines);
        let mut command = slackwaterd();
        command.args(with_its_token(&data_dir)).args(["--token-file", text(&tokens)]);
        let server = Server::start_with(&mut command);
        assert_eq!(status_of(&server, &token, "/v1/workers"), status);
        assert_eq!(status_of(&server, ADMIN, "/v1/workers"), "200");
        assert_eq!(Client::connect(server.nfs).getattr(&root), mounted);
        assert!(server.stop().success());
    }
}

#[test]
fn only_an_option_that_names_it_lets_all_in_and_each_start_says_so() {
    let directory = TempDir::new().unwrap();
    let data_dir = directory.path().join("store");
    let is_told = |line: &str| line.contains("WARN") && line.contains("--insecure-no-tokens");
    let is_told_by = |mut server: Server| {
        server.signal(Signal::TERM);
        assert!(server.wait().success());
        server.log().lines().any(is_told)
    };
    for _ in 0..2 {
        let server = Server::start(&data_dir);
        assert_eq!(server.http("GET", "/v1/workers", "").0, 200);
        assert!(!data_dir.join("admin-token").exists(), "nothing needs it");
        assert!(is_told_by(server));
    }
    let server = Server::start_with(slackwaterd().args(with_its_token(&data_dir)));
    assert!(!is_told_by(server));
}

#[test]
fn a_bad_admin_token_file_ends_the_start_and_is_named() {
    let directory = TempDir::new().unwrap();
    let mut command = slackwaterd();
    command.args(with_its_token(directory.path()));
    assert!(Server::start_with(&mut command).stop().success());
    let path = write(&directory, "admin-token", "short\n");
    let output = run_to_end(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(text(&path)) && said.contains("remove the file"), "{said}");
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

/// The words of the answer to a client that asks NFS for TLS.
fn probe(server: &Server) -> Vec<u32> {
    let mut stream = connect(server.nfs);
    let probe = [0x8000_0028_u32, 9, 0, 2, 100_003, 3, 0, 7, 0, 0, 0];
    let probe: Vec<u8> = probe.iter().flat_map(|word| word.to_be_bytes()).collect();
    stream.write_all(&probe).unwrap();
    let mut mark = [0; 4];
    stream.read_exact(&mut mark).unwrap();
    let mut reply = vec![0; usize::try_from(u32::from_be_bytes(mark) & 0xff).unwrap()];
    stream.read_exact(&mut reply).unwrap();
    reply.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn nfs_offers_tls_where_there_is_a_certificate_and_rest_says_so() {
    let directory = TempDir::new().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = write(&directory, "tls.crt", &made.cert.pem());
    let key = write(&directory, "tls.key", &made.signing_key.serialize_pem());
    let files = ["--tls-cert", text(&certificate), "--tls-key", text(&key)];
    let offered = [9, 1, 0, 0, 8, 0x5354_4152, 0x5454_4c53, 0];
    let mutual = ["--nfs-tls", "mutual", "--nfs-tls-client-ca", text(&certificate)];
    for (more, is_offered) in [
        (&[][..], true),
        (&["--nfs-tls", "required"], true),
        (&mutual, true),
        (&["--nfs-tls", "off"], false),
    ] {
        let server = start(&directory, &[&files[..], more].concat());
        let said = probe(&server);
        assert_eq!(said == offered, is_offered, "{said:?}");
        let url = format!("https://{}/v1/mount-paths", server.api);
        let ask = ["--cacert", text(&certificate), "-X", "POST", &url];
        let (status, body) = curl(&ask);
        assert_eq!(status, "201", "{body}");
        assert!(body.contains(&format!("\"nfs_tls\":{is_offered}")), "{body}");
        assert!(server.stop().success());
    }
    let server = start(&directory, &[]);
    assert_eq!(probe(&server), [9, 1, 1, 1, 1]);
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
fn authorities_of_clients_that_are_none_end_the_server_with_the_setting() {
    let directory = TempDir::new().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = write(&directory, "tls.crt", &made.cert.pem());
    let key = write(&directory, "tls.key", &made.signing_key.serialize_pem());
    let of_no_use = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
    for (name, content, says) in [
        ("none", "-----BEGIN X-----\n-----END X-----\n", "none"),
        ("bad", of_no_use, "nfs-tls-client-ca"),
    ] {
        let authorities = write(&directory, name, content);
        let mut command = slackwaterd();
        command.args(on_free_ports(&directory.path().join("store")));
        command.args(["--tls-cert", text(&certificate), "--tls-key", text(&key)]);
        command.args(["--nfs-tls", "mutual", "--nfs-tls-client-ca", text(&authorities)]);
        let output = run_to_end(&mut command);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{error}");
        let line = error.lines().find(|line| line.starts_with("slackwaterd: ")).unwrap();
        assert!(line.contains(says), "{error}");
    }
}

#[test]
fn the_vmstore_login_is_off_unless_it_is_configured() {
    let directory = TempDir::new().unwrap();
    let server = start(&directory, &[]);
    let (status, _) = server.http("POST", "/api/v310/session/login", "{}");
    assert_eq!(status, 404);
    assert!(server.stop().success());
}

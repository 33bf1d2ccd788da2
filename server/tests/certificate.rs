//! `slackwaterd certificate`, and a server that shows what it made.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod common;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use common::{Server, http_at, on_free_ports, run_to_end, slackwaterd};
use tempfile::TempDir;

fn certificate(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = slackwaterd();
    command.args(["certificate", "--directory"]).arg(directory).args(arguments);
    run_to_end(&mut command)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The exit code of curl, which knows the server by the authority alone: 0 trusted, 60 not.
fn ask(server: &Server, authority: &Path, name: &str) -> Option<i32> {
    let (host, port) = (server.api.ip(), server.api.port());
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--noproxy", "*", "--max-time", "60", "--cacert"]).arg(authority);
    curl.arg("--connect-to").arg(format!("{name}:{port}:{host}:{port}"));
    curl.arg(format!("https://{name}:{port}/healthz"));
    run_to_end(&mut curl).status.code()
}

fn serve(data_dir: &Path, tls: &Path) -> Server {
    let mut command = slackwaterd();
    command.args(on_free_ports(data_dir));
    command.arg("--tls-cert").arg(tls.join("cert.pem")).arg("--tls-key").arg(tls.join("key.pem"));
    Server::start_with(&mut command)
}

/// What the page of metrics says of the end of the certificate.
fn told_end(server: &Server) -> u64 {
    let address = server.welcome.lines().find_map(|line| line.strip_prefix("METRICS  http://"));
    let address = address.unwrap().strip_suffix("/metrics").unwrap().parse().unwrap();
    let (_, page) = http_at(address, "GET", "/metrics", "");
    let mut lines = page.lines();
    let name = "slackwater_tls_certificate_expires_at_seconds ";
    lines.find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
}

#[test]
fn the_end_of_the_certificate_is_told_before() {
    const DAY_SECONDS: u64 = 24 * 60 * 60;
    let directory = TempDir::new().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for (days, is_soon) in [(20_u64, true), (100, false)] {
        let tls = directory.path().join(format!("tls-{days}"));
        let made = certificate(&tls, &["appliance.example", "--days", &days.to_string()]);
        assert!(made.status.success(), "{}", text(&made.stderr));
        let mut command = slackwaterd();
        command.args(on_free_ports(&directory.path().join("data")));
        command.arg("--tls-cert").arg(tls.join("cert.pem"));
        command.arg("--tls-key").arg(tls.join("key.pem"));
        let server = Server::start_with(command.args(["--metrics-listen", "127.0.0.1:0"]));
        let left_seconds = told_end(&server) - now;
        // An hour is room for the test.
        let expected = days * DAY_SECONDS..days * DAY_SECONDS + 3600;
        assert!(expected.contains(&left_seconds), "{left_seconds} s of {days} days");
        assert_eq!(server.log().contains("the certificate of TLS ends soon"), is_soon);
        assert!(server.stop().success());
    }
    let mut command = slackwaterd();
    command.args(on_free_ports(&directory.path().join("data")));
    let server = Server::start_with(command.args(["--metrics-listen", "127.0.0.1:0"]));
    assert_eq!(told_end(&server), 0, "without TLS");
}

#[test]
fn clients_trust_the_appliance_by_the_authority_and_still_do_after_a_renewal() {
    let directory = TempDir::new().unwrap();
    let tls = directory.path().join("etc/tls");
    let made = certificate(&tls, &["appliance.example", "10.0.0.5"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let told = text(&made.stdout);
    assert!(told.contains("--tls-cert") && told.contains("SLACKWATER_CA"), "{told}");
    for (name, mode) in
        [("cert.pem", 0o644), ("ca.pem", 0o644), ("key.pem", 0o600), ("ca-key.pem", 0o600)]
    {
        let metadata = tls.join(name).metadata().unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "{name}");
        assert_eq!(metadata.uid(), tls.metadata().unwrap().uid(), "{name}");
    }
    let data_dir = directory.path().join("data");
    let server = serve(&data_dir, &tls);
    for (name, code) in
        [("appliance.example", 0), ("localhost", 0), ("127.0.0.1", 0), ("other.example", 60)]
    {
        assert_eq!(ask(&server, &tls.join("ca.pem"), name), Some(code), "{name}");
    }
    assert!(server.stop().success());

    let before = ["cert.pem", "ca.pem", "key.pem", "ca-key.pem"]
        .map(|name| std::fs::read(tls.join(name)).unwrap());
    let refused = certificate(&tls, &["appliance.example"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("--renew"), "{}", text(&refused.stderr));
    let renewed = certificate(&tls, &["new.example", "--renew", "--days", "30"]);
    assert!(renewed.status.success(), "{}", text(&renewed.stderr));
    let after = ["cert.pem", "ca.pem", "key.pem", "ca-key.pem"]
        .map(|name| std::fs::read(tls.join(name)).unwrap());
    assert_ne!(before[0], after[0]);
    assert_eq!(before[1..], after[1..]);
    let server = serve(&data_dir, &tls);
    assert_eq!(ask(&server, &tls.join("ca.pem"), "new.example"), Some(0));
    assert_eq!(ask(&server, &tls.join("ca.pem"), "appliance.example"), Some(60));
    assert!(server.stop().success());
}

#[test]
fn a_worker_gets_a_certificate_of_the_same_authority() {
    const ID: &str = "018fa1c3-7c1e-7f00-8b9a-1f2e3d4c5b6a";
    let directory = TempDir::new().unwrap();
    let tls = directory.path();
    assert!(certificate(tls, &["appliance.example"]).status.success());
    let made = certificate(tls, &["--worker", ID]);
    let told = text(&made.stdout);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(told.contains("nfs-certificate") && !told.contains("a new authority"), "{told}");
    let (public, key) = (format!("worker-{ID}.pem"), format!("worker-{ID}-key.pem"));
    for (name, mode) in [(&public, 0o644), (&key, 0o600)] {
        assert_eq!(tls.join(name).metadata().unwrap().permissions().mode() & 0o777, mode);
    }
    // It is good for a client of that name, and for no server.
    for (purpose, is_good) in [("sslclient", true), ("sslserver", false)] {
        let mut openssl = Command::new("openssl");
        openssl.args(["verify", "-purpose", purpose, "-verify_hostname", ID, "-CAfile"]);
        openssl.args([&tls.join("ca.pem"), &tls.join(&public)]);
        assert_eq!(run_to_end(&mut openssl).status.success(), is_good, "{purpose}");
    }
    let keep = std::fs::read(tls.join(&key)).unwrap();
    assert!(text(&certificate(tls, &["--worker", ID]).stderr).contains("--renew"));
    assert!(certificate(tls, &["--worker", ID, "--renew"]).status.success());
    assert_eq!(std::fs::read(tls.join(&key)).unwrap(), keep);
    std::fs::remove_file(tls.join(&key)).unwrap();
    let told = text(&certificate(tls, &["--worker", ID, "--renew"]).stdout);
    assert!(told.contains("the certificate is of another one"), "{told}");
    assert_ne!(std::fs::read(tls.join(&key)).unwrap(), keep);

    // Names of an appliance do not go with it, nor what is no id.
    for wrong in [
        &["--worker", ID, "a.example"][..],
        &["--worker", "node-1"],
        &["--worker", ID, "--client", "node-1"],
        &["--client", "node-1", "a.example"],
    ] {
        assert_eq!(certificate(tls, wrong).status.code(), Some(2), "{wrong:?}");
    }
    // A machine that is no worker is not to have the id of one.
    for wrong in [ID, "*.example", "a/b", "::1", ""] {
        assert_eq!(certificate(tls, &["--client", wrong]).status.code(), Some(1), "{wrong:?}");
    }
    assert!(certificate(tls, &["--client", "Admin.example"]).status.success());
    for name in ["client-admin.example.pem", "client-admin.example-key.pem"] {
        assert!(tls.join(name).exists(), "{name}");
    }
    // An authority of workers alone.
    let other = directory.path().join("workers");
    let made = text(&certificate(&other, &["--worker", ID]).stdout);
    assert!(made.contains("--nfs-tls-client-ca") && !other.join("cert.pem").exists(), "{made}");
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_made() {
    let directory = TempDir::new().unwrap();
    let tls = directory.path().join("tls");
    for name in ["https://a.example", "a.example:8049", "", "-a", "a..b", "a b", "\u{e9}.example"] {
        let refused = certificate(&tls, &["--", name]);
        assert_eq!(refused.status.code(), Some(1), "{name}");
        assert!(text(&refused.stderr).contains("without scheme and port"), "{name}");
    }
    assert_eq!(certificate(&tls, &[]).status.code(), Some(2));
    assert!(!tls.exists());
    // The authority of others, or half of one.
    assert!(certificate(&tls, &["a.example"]).status.success());
    std::fs::copy(tls.join("cert.pem"), tls.join("ca.pem")).unwrap();
    let refused = certificate(&tls, &["a.example", "--renew"]);
    assert!(text(&refused.stderr).contains("is not the certificate of ca-key.pem"), "{refused:?}");
    let authority = std::fs::read(tls.join("ca-key.pem")).unwrap();
    std::fs::remove_file(tls.join("ca-key.pem")).unwrap();
    let refused = certificate(&tls, &["a.example", "--renew"]);
    assert!(text(&refused.stderr).contains("bring it back"), "{refused:?}");
    // No new authority in silence, which no client knows.
    std::fs::remove_file(tls.join("ca.pem")).unwrap();
    let refused = certificate(&tls, &["a.example", "--renew"]);
    assert!(text(&refused.stderr).contains("put it and ca-key.pem back"), "{refused:?}");
    std::fs::remove_file(tls.join("cert.pem")).unwrap();
    let refused = certificate(&tls, &["a.example"]);
    assert!(text(&refused.stderr).contains("but no cert.pem"), "{refused:?}");
    std::fs::remove_file(tls.join("key.pem")).unwrap();
    std::fs::write(tls.join("ca-key.pem"), authority).unwrap();
    let refused = certificate(&tls, &["a.example"]);
    assert!(text(&refused.stderr).contains("but no ca.pem"), "{refused:?}");
}

#[test]
fn a_command_that_was_cut_off_can_be_repeated() {
    let directory = TempDir::new().unwrap();
    let tls = directory.path();
    assert!(certificate(tls, &["a.example"]).status.success());
    let authority = std::fs::read(tls.join("ca.pem")).unwrap();
    for last in ["cert.pem", "key.pem"] {
        std::fs::remove_file(tls.join("cert.pem")).unwrap();
        let _ = std::fs::remove_file(tls.join(last));
        let again = certificate(tls, &["a.example"]);
        assert!(again.status.success(), "{last}: {}", text(&again.stderr));
        assert_eq!(std::fs::read(tls.join("ca.pem")).unwrap(), authority);
    }
}

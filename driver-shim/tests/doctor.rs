//! `doctor` and `engine-config` as a person runs them.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "../../tests/held_port.rs"]
mod held_port;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};

use held_port::HeldPort;

/// Exit code of a doctor that found something missing.
const PROBLEMS: i32 = 6;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slackwater-driver"))
        .args(arguments)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .output()
        .unwrap()
}

/// What `doctor` prints about an appliance whose NFS face is away.
fn doctor(api: &str) -> String {
    // Engines that happen to run on this machine are not part of the test.
    let nowhere = ["--docker-host", "unix:///nonexistent/d.sock", "--containerd", "/nonexistent/c"];
    // Nor is what listens at the default port of NFS, such as the appliance of `make run`.
    let closed = HeldPort::new();
    let nfs = closed.address().to_string();
    // Nor a daemon with the default state directory.
    let state = ["--state-dir", "/nonexistent/state"];
    let words = [&["doctor", "--api", api, "--nfs", &nfs][..], &nowhere, &state].concat();
    let output = run(&words);
    assert_eq!(output.status.code(), Some(PROBLEMS), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The line about one need.
fn line<'a>(text: &'a str, what: &str) -> &'a str {
    let found = text.lines().find(|line| line.get(6..).is_some_and(|rest| rest.starts_with(what)));
    found.unwrap_or_else(|| panic!("no line about {what}:\n{text}"))
}

#[test]
fn an_appliance_that_is_not_there_is_named() {
    let closed = HeldPort::new();
    let address = closed.address();
    let text = doctor(&format!("http://{address}"));
    let rest = line(&text, "appliance, REST");
    assert!(rest.starts_with("FAIL") && rest.contains(&address.to_string()), "{rest}");
    assert!(line(&text, "appliance, NFS").starts_with("FAIL"), "{text}");
}

#[test]
fn a_credential_that_is_sent_unencrypted_is_told() {
    let closed = HeldPort::new();
    let port = closed.address().port();
    let told = |host: &str| doctor(&format!("http://{host}:{port}")).contains("sent unencrypted");
    // By the first, this machine is reached as well, and the name could be another one's.
    assert!(told("0.0.0.0"));
    assert!(!told("127.0.0.1"));
}

#[test]
fn an_appliance_that_refuses_is_reported_with_its_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let api = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).unwrap();
        let body = r#"{"type":"about:blank","title":"Poisoned","status":503,"code":"poisoned","detail":"a sync failed"}"#;
        let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n";
        let length = body.len();
        let answer = format!("{head}connection: close\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let text = doctor(&api);
    server.join().unwrap();
    assert!(line(&text, "appliance, REST").contains("a sync failed"), "{text}");
}

#[test]
fn what_the_machine_has_is_listed_and_absent_engines_are_no_fault() {
    let closed = HeldPort::new();
    let text = doctor(&format!("http://{}", closed.address()));
    assert!(line(&text, "loop devices").starts_with("ok"), "{text}");
    assert!(line(&text, "mkfs.ext4").starts_with("ok"), "{text}");
    for engine in ["Docker", "containerd"] {
        let line = line(&text, engine);
        assert!(line.starts_with("warn") && line.contains("/nonexistent/"), "{line}");
    }
}

#[test]
fn every_engine_has_its_configuration_with_the_paths_that_are_served() {
    for engine in ["docker-containerd", "containerd-1", "containerd-2", "cri"] {
        let output = run(&["engine-config", engine, "--containerd-socket", "/run/mine.sock"]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("address = \"/run/mine.sock\""), "{text}");
    }
    let output =
        run(&["engine-config", "docker", "--docker-socket", "/run/docker/plugins/me.sock"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"storage-driver\": \"me\""), "{text}");
}

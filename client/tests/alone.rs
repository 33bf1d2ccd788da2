//! The command without an appliance: usage, exit codes, unreachable servers, completions.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "../../tests/held_port.rs"]
mod held_port;

use std::process::{Command, Output};

use held_port::HeldPort;

fn slackwater(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slackwater")).args(arguments).env_clear().output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_command_line_without_sense_is_exit_2() {
    for arguments in [
        &["nonsense"][..],
        &["file", "create", "a.img"],
        &["file", "create", "a.img", "8XB"],
        &["file", "create", "../a.img", "1G"],
        &["snapshot", "create", "a.img", "--label", "novalue"],
        &["snapshot", "label", "name", "novalue"],
        &["snapshot", "create", "a.img", "--expires-in", "soon"],
        &["import", "a.img", "a.img", "--jobs", "99"],
        &["export", "snap", "a.img", "--base", "b", "--force"],
        &["--api", "nonsense", "stats"],
        &["--api", "http://me:s3cret@127.0.0.1", "stats"],
        &["--timeout", "0", "stats"],
    ] {
        let output = slackwater(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
    let output = slackwater(&["--api", "http://me:s3cret@127.0.0.1", "stats"]);
    assert!(!text(&output.stderr).contains("s3cret"));
}

#[test]
fn the_help_tells_every_command_and_exit_code() {
    let output = slackwater(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let help = text(&output.stdout);
    for word in [
        "file",
        "snapshot",
        "clone",
        "import",
        "export",
        "stats",
        "top",
        "check",
        "gc",
        "mount-path",
        "audit",
        "doctor",
        "completions",
        "SLACKWATER_API",
        "SLACKWATER_TOKEN",
        "Exit codes:",
        "binary units",
    ] {
        assert!(help.contains(word), "{word} is not in\n{help}");
    }
    let create = text(&slackwater(&["file", "create", "--help"]).stdout);
    assert!(create.contains("1.5GiB"), "{create}");
}

#[test]
fn an_appliance_that_is_away_is_exit_5_and_says_where() {
    let closed = HeldPort::new();
    let url = closed.url();
    for arguments in [
        &["file", "stat", "a.img"][..],
        &["file", "rm", "a", "b", "c"],
        &["snapshot", "create", "a.img"],
        &["stats"],
    ] {
        let output = slackwater(&[&["--api", url.as_str()], arguments].concat());
        assert_eq!(output.status.code(), Some(5), "{arguments:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains(&url) && stderr.contains("--api"), "{stderr}");
    }
    let output = slackwater(&["--json", "--api", &url, "stats"]);
    let error: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(error["error"]["exit_code"], 5);
}

#[test]
fn tokens_and_certificates_that_cannot_be_used_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    for (arguments, code) in [
        (["--token-file", missing], 3),
        (["--token-file", &file("empty", "\n")], 2),
        (["--token-file", &file("two", "s3cret s3cret")], 2),
        (["--ca", missing], 3),
        (["--ca", &file("ca", "no certificate")], 2),
    ] {
        let output = slackwater(&[&arguments[..], &["stats"]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("s3cret"), "{stderr}");
    }
}

#[test]
fn each_command_has_a_page_in_the_manual() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    assert_eq!(slackwater(&["manual", directory]).status.code(), Some(0));
    let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(page("slackwater.1").contains("slackwater\\-file(1)"), "{}", page("slackwater.1"));
    assert!(page("slackwater-file-create.1").contains("over\\-capacity"));
    assert!(!folder.path().join("slackwater-manual.1").exists());
    let missing = folder.path().join("missing");
    let output = slackwater(&["manual", missing.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("missing"));
}

#[test]
fn completions_come_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = slackwater(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0), "{shell}");
        assert!(text(&output.stdout).contains("snapshot"), "{shell}");
    }
}

#[test]
fn doctor_without_an_appliance_finds_problems_and_their_remedies() {
    let closed = HeldPort::new();
    let (api, nfs) = (closed.url(), closed.address().to_string());
    let output = slackwater(&["--json", "--api", &api, "doctor", "--nfs", &nfs]);
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ready"], false);
    let checks = report["checks"].as_array().unwrap();
    assert_eq!(checks.len(), 9);
    for check in checks {
        assert_eq!(check["ok"] == false, check["remedy"].is_string(), "{check}");
        if check["name"].as_str().unwrap().starts_with("appliance") {
            assert_eq!(check["ok"], false, "{check}");
        }
    }
}

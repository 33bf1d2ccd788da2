//! `tests/all`, with a stand-in for the suites: it finds a suite that talks to a default port or socket, and what one
//! leaves. Each run has a network, a `/run` and processes of its own, so that the default places are free there.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::path::Path;
use std::process::Command;

/// Makes the default places free, and runs the suites `first` and `second`.
const RUNS: &str = r#"
    set -e
    mount -t tmpfs tmpfs /run
    ip link set lo up
    exec "$1/tests/all" --take-defaults --side-by-side "$2"
"#;

struct Ended {
    is_passed: bool,
    said: String,
    /// The lines for `tests/repeat --table`.
    noted: String,
}

/// Runs `tests/all` with suites that are a shell script, two side by side; their name is `$1`, the project's folder
/// `$root`.
fn run(script: &str) -> Ended {
    run_side_by_side("2", script)
}

fn run_side_by_side(suites: &str, script: &str) -> Ended {
    let directory = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let suite = directory.path().join("suite");
    // By another process: one that a test beside this one forks while the file is written here would hold it open for a
    // moment, and Linux runs no program that is open for writing.
    let listing = r#"[ "$1" != --list ] || { echo "first second"; exit; }"#;
    let text = format!("#!/usr/bin/env bash\nroot='{}'\n{listing}\n{script}\n", root.display());
    let mut writer = Command::new("sh");
    writer.args(["-c", r#"printf %s "$1" >"$2" && chmod 755 "$2""#, "sh", &text]).arg(&suite);
    assert!(writer.status().unwrap().success());
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["--propagation", "private", "sh", "-c", RUNS, "sh"]).arg(root).arg(suites);
    command.env("SUITE", suite).env("SUITE_END_LIMIT_SECONDS", "3");
    command.env("XDG_CACHE_HOME", directory.path()).env("TMPDIR", directory.path());
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let noted = std::fs::read_to_string(directory.path().join("slackwater/repeat/runs.jsonl"));
    Ended {
        is_passed: output.status.success(),
        said: String::from_utf8(said).unwrap(),
        noted: noted.unwrap_or_default(),
    }
}

/// Returns what it found, which is one thing.
fn assert_found(script: &str, expected: &[&str]) -> String {
    let ended = run(script);
    assert!(!ended.is_passed, "`{script}` passed: {}", ended.said);
    let found: Vec<_> = ended.said.lines().filter(|line| line.contains("FAILED:")).collect();
    assert_eq!(found.len(), 1, "`{script}`: {}", ended.said);
    for word in expected {
        assert!(found[0].contains(word), "`{script}`: got {found:?}, expected {word}");
    }
    found[0].to_owned()
}

fn detach(device: &str) {
    assert!(Command::new("losetup").args(["--detach", device]).status().unwrap().success());
}

#[test]
fn as_root_suites_that_pass_and_leave_nothing_pass() {
    let ended = run(r#"echo "suite $1""#);
    assert!(ended.is_passed, "{}", ended.said);
    for word in ["suite first", "suite second", "=== first", "=== second"] {
        assert!(ended.said.contains(word), "no `{word}` in {}", ended.said);
    }
}

#[test]
fn as_root_the_first_suite_that_fails_ends_the_run() {
    let ended = run_side_by_side("1", r#"echo "suite $1"; exit 3"#);
    assert!(!ended.is_passed && ended.said.contains("suite first"), "{}", ended.said);
    assert!(!ended.said.contains("suite second"), "{}", ended.said);
    let line = r#"{"suite": "first", "beside": [], "passed": false, "#;
    assert!(ended.noted.starts_with(line), "{}", ended.noted);
    assert_eq!(ended.noted.lines().count(), 1, "{}", ended.noted);
}

/// Each waits for the other, and neither's lines stand among the other's.
#[test]
fn as_root_suites_run_side_by_side_and_their_output_is_whole() {
    let script = r#"
        echo "begin $1"
        touch "$TMPDIR/$1"
        for _ in $(seq 600); do
            [ -e "$TMPDIR/first" ] && [ -e "$TMPDIR/second" ] && break
            sleep 0.1
        done
        [ -e "$TMPDIR/first" ] && [ -e "$TMPDIR/second" ] || exit 4
        echo "end $1"
    "#;
    let ended = run(script);
    assert!(ended.is_passed, "{}", ended.said);
    for name in ["first", "second"] {
        let whole = format!("begin {name}\nend {name}\n");
        assert!(ended.said.contains(&whole), "no `{whole}` in {}", ended.said);
        let line = format!(r#"{{"suite": "{name}", "beside": ["a suite"], "passed": true, "#);
        assert!(ended.noted.contains(&line), "no `{line}` in {}", ended.noted);
    }
    assert_eq!(ended.noted.lines().count(), 2, "{}", ended.noted);
}

#[test]
fn as_root_a_suite_that_fails_ends_the_one_beside_it() {
    let script = r#"
        echo "begin $1"
        [ $1 = first ] || { touch "$TMPDIR/second"; exec sleep 600; }
        until [ -e "$TMPDIR/second" ]; do sleep 0.1; done
        exit 3
    "#;
    let ended = run(script);
    assert!(!ended.is_passed, "{}", ended.said);
    for word in ["begin first", "begin second", "second: stopped after", "=== first"] {
        assert!(ended.said.contains(word), "no `{word}` in {}", ended.said);
    }
}

/// Whoever has the end of the output alone learns what failed, and why.
#[test]
fn as_root_what_failed_stands_last() {
    let script = r#"
        echo "begin $1"
        [ $1 = first ] || { touch "$TMPDIR/second"; exec sleep 600; }
        until [ -e "$TMPDIR/second" ]; do sleep 0.1; done
        echo "reads what it wrote ... FAIL (3 s)"
        echo "      got 4 bytes, expected 5"
        for number in $(seq 100); do echo "reads again ... ok ($number s)"; done
        exit 3
    "#;
    let ended = run(script);
    assert!(!ended.is_passed, "{}", ended.said);
    let place = |text: &str| {
        ended.said.find(text).unwrap_or_else(|| panic!("no `{text}` in {}", ended.said))
    };
    assert!(place("second: stopped after") < place("begin first"), "{}", ended.said);
    let output_end = place("\nreads again ... ok (100 s)\n");
    for line in [
        "=== first: reads what it wrote ... FAIL (3 s)\n",
        "=== first:       got 4 bytes, expected 5\n",
    ] {
        assert!(output_end < place(line), "{}", ended.said);
    }
    assert!(!ended.said.contains("=== first: reads again ... ok (100 s)"), "{}", ended.said);
}

/// The suite beside the one that failed takes its time to end, and the run is interrupted meanwhile.
#[test]
fn as_root_what_failed_is_shown_also_if_the_end_of_the_others_is_interrupted() {
    let script = r#"
        [ $1 = first ] || {
            trap 'kill -TERM $(pgrep -f "[t]ests/all --take-defaults" | head -n 1); sleep 1; exit' TERM
            touch "$TMPDIR/second"
            while :; do sleep 0.1; done
        }
        until [ -e "$TMPDIR/second" ]; do sleep 0.1; done
        echo "reads what it wrote ... FAIL (3 s)"
        exit 3
    "#;
    let ended = run(script);
    assert!(!ended.is_passed, "{}", ended.said);
    let line = "=== first: reads what it wrote ... FAIL (3 s)\n";
    assert!(ended.said.contains(line), "no `{line}` in {}", ended.said);
}

#[test]
fn as_root_of_a_failure_in_no_known_words_the_last_lines_are_repeated() {
    let script = r#"
        [ $1 = first ] || exec sleep 600
        for number in $(seq 100); do echo "$1 at $number"; done
        echo "=== first: FAILED with exit code 3 after 1 s; alone: tests/suite first"
        exit 3
    "#;
    let ended = run(script);
    assert!(!ended.is_passed, "{}", ended.said);
    assert!(ended.said.contains("=== first: first at 100\n"), "{}", ended.said);
    assert!(!ended.said.contains("=== first: first at 50\n"), "{}", ended.said);
}

#[test]
fn as_root_a_suite_that_talks_to_a_default_place_is_found() {
    let mut places = vec![
        ("http://127.0.0.1:8049/v1/files", "127.0.0.1 port 8049"),
        (
            "--unix-socket /run/slackwater/containerd.sock http://driver/",
            "/run/slackwater/containerd.sock",
        ),
    ];
    if Path::new("/proc/net/tcp6").exists() {
        places.push(("http://[::1]:2049/", "::1 port 2049"));
    }
    for (place, expected) in places {
        let call = format!("curl --silent --noproxy '*' --max-time 60 {place} || true");
        assert_found(&format!("[ $1 = second ] || {call}"), &["curl --silent", expected]);
        // Also of a program that is started without any environment.
        assert_found(&format!("[ $1 = second ] || env -i PATH=$PATH {call}"), &["curl", expected]);
    }
}

#[test]
fn as_root_what_a_suite_leaves_is_found() {
    let once = "[ $1 = first ] || exit 0";
    let process = format!("{once}; setsid sleep 600 >/dev/null 2>&1 &");
    assert_found(&process, &["process", "sleep 600"]);
    let folder = format!(r#"{once}; . "$root/tests/scratch.sh"; scratch_make left true"#);
    assert_found(&folder, &["folder", "slackwater-left."]);
    let disk =
        r#"disk=$TMPDIR/${scratch##*/}.disk; truncate -s 1M "$disk"; losetup --find "$disk""#;
    let attached = format!(r#"{folder}; {disk}; rmdir "$scratch""#);
    let found = assert_found(&attached, &["loop device /dev/loop", "slackwater-left."]);
    detach(found.split(' ').find(|word| word.starts_with("/dev/loop")).unwrap());
}

/// A run that was killed in the middle of a commit leaves such a disk: nothing is mounted, and the kernel keeps it.
#[test]
fn as_root_a_disk_that_a_killed_run_left_frozen_is_detached() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("disk");
    let freeze = r#"
        set -e
        truncate -s 16M "$1/disk"
        mkfs.ext4 -q "$1/disk"
        mkdir "$1/mounted"
        mount -o loop "$1/disk" "$1/mounted"
        fsfreeze --freeze "$1/mounted"
    "#;
    let mut freezing = Command::new("unshare");
    freezing.args(["--mount", "--propagation", "private", "sh", "-c", freeze, "sh"]);
    assert!(freezing.arg(directory.path()).status().unwrap().success());
    let devices = || {
        let listing = Command::new("losetup").arg("--associated").arg(&file).output().unwrap();
        String::from_utf8(listing.stdout).unwrap()
    };
    assert!(devices().starts_with("/dev/loop"), "the kernel let a frozen disk go");

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut detaching = Command::new("bash");
    detaching.args(["-c", r#"set -euo pipefail; . "$1/tests/scratch.sh"; scratch_detach "$2""#]);
    detaching.arg("bash").arg(root).arg(directory.path().file_name().unwrap());
    assert!(detaching.status().unwrap().success());
    assert_eq!(devices(), "");
}

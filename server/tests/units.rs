//! The systemd units: systemd understands them, and each is shut in as far as it can be.
//! Needs `systemd-analyze` (Debian's package systemd), and no running systemd.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Units of services, with the most exposure that is let pass, in tenths of systemd's scale from
/// 0 (shut in) to 10. The driver mounts, which takes most of what a sandbox would take away; for the one
/// call of @debug that it needs the scale counts the whole group (0.2), and for each kind of namespace
/// in which it shuts the tools of e2fsprogs in 0.1.
const SERVICES: [(&str, u32); 3] = [
    ("slackwaterd.service", 15),
    ("slackwater-driver.service", 61),
    ("backup/slackwater-backup.service", 15),
];

const TIMERS: [&str; 1] = ["backup/slackwater-backup.timer"];

/// Options that bring a list of allowed devices, so that others are refused (systemd.exec(5)).
const DEVICE_LISTS: [&str; 4] = ["ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"];

/// All that the driver can do as root; the unit says for what.
const DRIVER_CAPABILITIES: [&str; 13] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_RESOURCE",
];

/// Groups of system calls that the driver cannot make, but for the one that is named behind them.
const DRIVER_SYSTEM_CALLS: [&str; 2] = [
    "~@clock @cpu-emulation @debug @keyring @module @obsolete @raw-io @reboot @swap",
    "pidfd_getfd",
];

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn text(unit: &str) -> String {
    std::fs::read_to_string(deploy().join(unit)).unwrap()
}

/// The values of a key, in order.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn analyze(arguments: &[&str]) -> Output {
    Command::new("systemd-analyze")
        .args(arguments)
        .output()
        .expect("systemd-analyze, of the package systemd, is needed")
}

/// Asserts that systemd has nothing to say about the units in the folder.
fn assert_verified(folder: &Path) {
    let mut units: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().to_str().unwrap().to_owned())
        .collect();
    units.insert(0, "verify".to_owned());
    let output = analyze(&units.iter().map(String::as_str).collect::<Vec<_>>());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.trim().is_empty(), "{said}");
}

/// A folder with the units, their programs replaced by one that is there.
fn with_programs() -> TempDir {
    let folder = TempDir::new().unwrap();
    for unit in SERVICES.iter().map(|(unit, _)| *unit).chain(TIMERS) {
        let lines = text(unit).lines().map(with_program).collect::<Vec<_>>().join("\n");
        let name = Path::new(unit).file_name().unwrap();
        std::fs::write(folder.path().join(name), lines + "\n").unwrap();
    }
    folder
}

fn with_program(line: &str) -> String {
    match line.split_once('=') {
        Some((key @ ("ExecStart" | "ExecStartPre"), _)) => format!("{key}=/bin/true"),
        _ => line.to_owned(),
    }
}

#[test]
fn systemd_understands_every_unit() {
    let folder = with_programs();
    assert_verified(folder.path());
    // A word that systemd does not know is said, so silence means something.
    let unit = folder.path().join("slackwaterd.service");
    let known = std::fs::read_to_string(&unit).unwrap();
    std::fs::write(&unit, known.replace("ProtectHome=", "ProtectHomes=")).unwrap();
    let output = analyze(&["verify", unit.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("ProtectHomes"));
}

#[test]
fn every_service_is_shut_in() {
    for (unit, exposure_max) in SERVICES {
        let path = deploy().join(unit);
        let threshold = format!("--threshold={exposure_max}");
        let arguments = ["security", "--offline=true", "--no-pager", &threshold];
        let output = analyze(&[&arguments[..], &[path.to_str().unwrap()]].concat());
        let table = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{unit} is more exposed than {exposure_max}:\n{table}");
        let unit = text(unit);
        assert_eq!(values(&unit, "NoNewPrivileges"), ["yes"]);
        assert_eq!(values(&unit, "UMask"), ["0077"]);
        assert_eq!(values(&unit, "StateDirectoryMode"), ["0700"]);
    }
}

#[test]
fn only_the_driver_is_root_and_not_wholly() {
    for (unit, _) in SERVICES {
        let text = text(unit);
        if unit == "slackwater-driver.service" {
            let mut capabilities: Vec<_> = values(&text, "CapabilityBoundingSet")
                .into_iter()
                .flat_map(str::split_whitespace)
                .collect();
            capabilities.sort_unstable();
            assert_eq!(capabilities, DRIVER_CAPABILITIES);
            assert!(values(&text, "User").is_empty());
            assert_eq!(values(&text, "SystemCallFilter"), DRIVER_SYSTEM_CALLS);
            for option in DEVICE_LISTS {
                assert!(values(&text, option).is_empty(), "{option} would take the loop devices");
            }
        } else {
            assert_eq!(values(&text, "DynamicUser"), ["yes"], "{unit}");
            assert_eq!(values(&text, "CapabilityBoundingSet"), [""], "{unit}");
        }
        let environment = values(&text, "Environment").join("\n");
        for word in ["TOKEN=", "PASSWORD=", "SECRET"] {
            assert!(!environment.contains(word), "{unit}: a secret in the environment");
        }
    }
}

//! What makes a release, in a clone of the test's own, and the archive for other systems.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

/// A clone with the scripts as they are here now.
struct Clone {
    folder: TempDir,
}

impl Clone {
    fn new() -> Self {
        let clone = Self { folder: tempfile::tempdir().unwrap() };
        let path = clone.path();
        let mut git = Command::new("git");
        git.args(["clone", "--quiet", "--depth", "1"]);
        git.arg(format!("file://{}", project().display())).arg(&path);
        // git tells root nothing of a clone of another user, unless a setting says so.
        git.env("GIT_CONFIG_COUNT", "1").env("GIT_CONFIG_KEY_0", "safe.directory");
        assert!(git.env("GIT_CONFIG_VALUE_0", "*").status().unwrap().success());
        for name in ["release", "version"] {
            let script = Path::new("deploy").join(name);
            std::fs::copy(project().join(&script), path.join(&script)).unwrap();
        }
        for (name, value) in [
            ("user.name", "test"),
            ("user.email", "test@invalid"),
            ("tag.gpgSign", "false"),
            ("commit.gpgSign", "false"),
        ] {
            clone.git(&["config", name, value]);
        }
        clone.git(&["add", "--all"]);
        clone.git(&["commit", "--quiet", "--allow-empty", "--message", "the scripts"]);
        clone
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("clone")
    }

    fn git(&self, words: &[&str]) -> String {
        let output = Command::new("git").arg("-C").arg(self.path()).args(words).output().unwrap();
        assert!(output.status.success(), "git {words:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn release(&self, words: &[&str]) -> Output {
        Command::new(self.path().join("deploy/release")).args(words).output().unwrap()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(name)).unwrap()
    }

    fn version(&self) -> String {
        let output = Command::new(self.path().join("deploy/version"))
            .env_remove("VERSION")
            .env_remove("SOURCE_DATE_EPOCH")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

#[test]
fn a_release_is_a_commit_and_a_tag_with_its_version_everywhere() {
    let clone = Clone::new();
    let before = clone.git(&["rev-parse", "HEAD"]);
    assert!(clone.version().contains("+git"), "{}", clone.version());
    let output = clone.release(&["99.1.0"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("make dist"), "{}", said(&output));
    assert_eq!(clone.git(&["status", "--porcelain"]), "");
    assert_eq!(clone.git(&["rev-parse", "HEAD~1"]), before);
    assert_eq!(clone.git(&["describe", "--exact-match"]), "v99.1.0");
    let time = clone.git(&["log", "-1", "--format=%ct"]);
    assert_eq!(clone.version(), format!("99.1.0 {time}"));

    assert!(clone.read("Cargo.toml").contains("\nversion = \"99.1.0\"\n"));
    let changelog = clone.read("CHANGELOG.md");
    let begin = changelog.find("## Unreleased\n\n## 99.1.0 - 20").expect(&changelog[..300]);
    assert!(changelog[begin..].contains("### Added"));
    // Cargo finds the locks as it would write them, and no other package has changed.
    let metadata = Command::new(std::env::var("CARGO").unwrap_or("cargo".to_owned()))
        .args(["metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"])
        .current_dir(clone.path())
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", said(&metadata));
    for lock in ["Cargo.lock", "fuzz/Cargo.lock"] {
        let diff = clone.git(&["diff", "--unified=1", "HEAD~1", "--", lock]);
        let names: Vec<_> = diff.lines().filter(|line| line.starts_with(" name = ")).collect();
        assert!(!names.is_empty(), "{lock}");
        assert!(names.iter().all(|name| name.starts_with(" name = \"slackwater-")), "{diff}");
    }

    // Nothing has changed since.
    let output = clone.release(&["99.2.0"]);
    assert!(
        !output.status.success() && said(&output).contains("nothing under"),
        "{}",
        said(&output)
    );
}

#[test]
fn what_is_no_release_is_refused_and_changes_nothing() {
    let clone = Clone::new();
    let before = clone.git(&["rev-parse", "HEAD"]);
    let refused = |words: &[&str], expected: &str| {
        let output = clone.release(words);
        assert!(!output.status.success() && said(&output).contains(expected), "{}", said(&output));
        assert_eq!(clone.git(&["rev-parse", "HEAD"]), before);
        assert_eq!(clone.git(&["tag", "--list", "v99*"]), "");
    };
    refused(&[], "usage");
    for version in ["99", "v99.0.0", "99.0.0-rc1", "99.00.0", "99.0.0;x", ""] {
        refused(&[version], "is no version");
    }
    refused(&["0.1.0"], "not greater");
    refused(&["0.1.9"], "not greater");
    std::fs::write(clone.path().join("left"), "").unwrap();
    refused(&["99.0.0"], "not committed");
    std::fs::remove_file(clone.path().join("left")).unwrap();
    clone.git(&["tag", "v98.0.0"]);
    refused(&["98.0.0"], "a tag v98.0.0 already");
}

#[test]
fn the_archive_has_all_that_installs_and_is_the_same_bytes_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("release");
    std::fs::create_dir(&release).unwrap();
    for name in ["slackwaterd", "slackwater", "slackwater-driver"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_slackwaterd"), release.join(name)).unwrap();
    }
    let make = |to: &str| {
        let output = Command::new(project().join("deploy/tarball"))
            .arg(folder.path().join(to))
            .env("RELEASE", &release)
            .envs([("VERSION", "9.8.7"), ("SOURCE_DATE_EPOCH", "1600000000")])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    };
    let archive = make("one");
    let name = format!("slackwater-9.8.7-linux-{}", std::env::consts::ARCH);
    assert_eq!(archive.file_name().unwrap().to_str(), Some(&*format!("{name}.tar.gz")));
    assert!(std::fs::read(&archive).unwrap() == std::fs::read(make("two")).unwrap(), "other bytes");

    let unpacked = Command::new("tar").arg("-xzf").arg(&archive).current_dir(&folder).output();
    assert!(unpacked.unwrap().status.success());
    let root = folder.path().join(&name);
    for name in [
        "README.md",
        "SECURITY.md",
        "LICENSE-MIT",
        "programs/slackwater-driver",
        "deploy/config.example.toml",
        "deploy/grafana/dashboards/slackwater.json",
    ] {
        assert!(root.join(name).exists(), "{name}");
    }
    let installed = folder.path().join("installed");
    for what in ["appliance", "worker"] {
        let output = Command::new(root.join("install"))
            .arg(what)
            .env_remove("RELEASE")
            .envs([("PREFIX", "/usr/local"), ("SYSCONFDIR", "/etc")])
            .env("DESTDIR", &installed)
            .output()
            .unwrap();
        assert!(output.status.success(), "{what}: {}", said(&output));
    }
    for name in [
        "usr/local/bin/slackwaterd",
        "usr/local/bin/slackwater-driver",
        "usr/local/lib/systemd/system/slackwaterd.service",
        "usr/local/share/man/man8/slackwaterd.8",
        "etc/slackwater/driver.toml",
    ] {
        assert!(installed.join(name).exists(), "{name} is not installed");
    }
}

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

/// The archive, made below a folder; each program in it is the server.
fn archive(folder: &Path, to: &str) -> PathBuf {
    let release = folder.join("release");
    std::fs::create_dir_all(&release).unwrap();
    for name in ["slackwaterd", "slackwater", "slackwater-driver"] {
        let link = release.join(name);
        let _is_there = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_slackwaterd"), link).unwrap();
    }
    let output = Command::new(project().join("deploy/tarball"))
        .arg(folder.join(to))
        .env("RELEASE", &release)
        .envs([("VERSION", "9.8.7"), ("SOURCE_DATE_EPOCH", "1600000000")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// What an archive becomes below a folder.
fn unpacked(folder: &Path, archive: &Path) -> PathBuf {
    let name = format!("slackwater-9.8.7-linux-{}", std::env::consts::ARCH);
    assert_eq!(archive.file_name().unwrap().to_str(), Some(&*format!("{name}.tar.gz")));
    let unpacked = Command::new("tar").arg("-xzf").arg(archive).current_dir(folder).output();
    assert!(unpacked.unwrap().status.success());
    folder.join(&name)
}

#[test]
fn the_archive_has_all_that_installs_and_is_the_same_bytes_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let one = archive(folder.path(), "one");
    let two = archive(folder.path(), "two");
    assert!(std::fs::read(&one).unwrap() == std::fs::read(two).unwrap(), "other bytes");
    let root = unpacked(folder.path(), &one);
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
    // As on a system without binutils.
    let without_strip = folder.path().join("path");
    std::fs::create_dir(&without_strip).unwrap();
    std::os::unix::fs::symlink("/bin/false", without_strip.join("strip")).unwrap();
    let path = format!("{}:{}", without_strip.display(), std::env::var("PATH").unwrap());
    let installed = folder.path().join("installed");
    for what in ["appliance", "worker"] {
        let output = Command::new(root.join("install"))
            .arg(what)
            .env("PATH", &path)
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
        "usr/local/lib/slackwater/libgcc_s.so.1",
        "etc/slackwater/driver.toml",
    ] {
        assert!(installed.join(name).exists(), "{name} is not installed");
    }
}

/// That of an archive which was unpacked and installed below this prefix.
#[test]
fn programs_of_the_archive_start_by_their_own_loader_and_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let made = archive(folder.path(), "archive");
    let root = unpacked(folder.path(), &made);
    let prefix = folder.path().join("prefix with a blank");
    let install = |root: &Path, what: &str| {
        let output = Command::new(root.join("install"))
            .arg(what)
            // Not the machine's, but in the same places: no service is asked for.
            .envs([("DESTDIR", Path::new("/")), ("PREFIX", &prefix)])
            .env("UNITDIR", folder.path().join("units"))
            .env("SYSCONFDIR", folder.path().join("etc"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{what}: {}", said(&output));
    };
    // Twice, as for the next release.
    install(&root, "appliance");
    install(&root, "appliance");
    // The archive is not needed any more.
    std::fs::remove_dir_all(&root).unwrap();
    let program = prefix.join("bin/slackwaterd");
    let output = Command::new(&program).arg("--version").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let libraries = prefix.join("lib/slackwater");
    let listed = Command::new(&program)
        .arg("--version")
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .output()
        .unwrap();
    let listed = said(&listed);
    for line in listed.lines().filter(|line| line.contains(".so") && !line.contains("vdso")) {
        let of_archive = line.contains("/bin/../lib/slackwater/")
            || line.contains(&*libraries.to_string_lossy());
        assert!(of_archive, "another one's library: {line}");
    }
    assert!(listed.contains("libc.so.6"), "{listed}");
    // Another copy of the archive takes it away again.
    let again = tempfile::tempdir().unwrap();
    let root = unpacked(again.path(), &made);
    install(&root, "uninstall");
    assert!(!libraries.exists() && !program.exists());
}

//! `deploy/install`, into a root of the test's own: what it puts there, what it leaves alone, what it takes away.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

struct Root {
    folder: TempDir,
}

impl Root {
    /// With a program in the place of all three: this one is there when this test runs.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let release = folder.path().join("release");
        std::fs::create_dir(&release).unwrap();
        for name in ["slackwaterd", "slackwater", "slackwater-driver"] {
            let program = env!("CARGO_BIN_EXE_slackwaterd");
            std::os::unix::fs::symlink(program, release.join(name)).unwrap();
        }
        Self { folder }
    }

    fn run(&self, what: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/install");
        let mut command = Command::new(script);
        command.arg(what).env("RELEASE", self.folder.path().join("release"));
        command.env("DESTDIR", self.path("")).env("PREFIX", "/opt/slackwater");
        command.env_remove("UNITDIR").env("SYSCONFDIR", "/opt/etc");
        command.output().unwrap()
    }

    fn ok(&self, what: &str) {
        let output = self.run(what);
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("root").join(name)
    }

    /// The files below the root.
    fn files(&self) -> BTreeSet<String> {
        let mut files = BTreeSet::new();
        let mut left = vec![self.path("")];
        while let Some(directory) = left.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    left.push(path);
                } else {
                    let name = path.strip_prefix(self.path("")).unwrap();
                    files.insert(name.to_str().unwrap().to_owned());
                }
            }
        }
        files
    }
}

#[test]
fn what_is_installed_is_found_and_goes_again() {
    let root = Root::new();
    root.ok("appliance");
    root.ok("worker");
    let files = root.files();
    for name in [
        "opt/slackwater/bin/slackwaterd",
        "opt/slackwater/bin/slackwater",
        "opt/slackwater/bin/slackwater-driver",
        "opt/slackwater/bin/slackwater-backup",
        // Where systemd looks for those of such a prefix.
        "etc/systemd/system/slackwaterd.service",
        "etc/systemd/system/slackwater-driver.service",
        "etc/systemd/system/slackwater-backup.timer",
        "opt/slackwater/share/man/man8/slackwaterd.8",
        "opt/slackwater/share/man/man8/slackwaterd-token-add.8",
        "opt/slackwater/share/man/man8/slackwater-backup.8",
        "opt/slackwater/share/bash-completion/completions/slackwaterd",
        "opt/slackwater/share/zsh/site-functions/_slackwaterd",
        "opt/slackwater/share/fish/vendor_completions.d/slackwaterd.fish",
        "opt/etc/slackwater/config.toml",
        "opt/etc/slackwater/driver.toml",
    ] {
        assert!(files.contains(name), "{name} is not in {files:#?}");
    }
    let mode = |name: &str| root.path(name).metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("opt/etc/slackwater/driver.toml"), 0o600, "it may name a token");
    assert_eq!(mode("opt/slackwater/bin/slackwaterd"), 0o755);
    let unit = std::fs::read_to_string(root.path("etc/systemd/system/slackwaterd.service"));
    let unit = unit.unwrap();
    for line in [
        "ExecStart=/opt/slackwater/bin/slackwaterd\n",
        "Environment=SLACKWATER_CONFIG=/opt/etc/slackwater/config.toml\n",
        "Environment=PATH=/opt/slackwater/bin:",
    ] {
        assert!(unit.contains(line), "{line} is not in {unit}");
    }
    let page = std::fs::read_to_string(root.path("opt/slackwater/share/man/man8/slackwaterd.8"));
    let page = page.unwrap();
    assert!(page.contains("data\\-dir") && page.contains("SLACKWATER_DATA_DIR"), "{page}");

    // An upgrade leaves the settings as they are.
    std::fs::write(root.path("opt/etc/slackwater/config.toml"), "# ours\n").unwrap();
    root.ok("appliance");
    assert_eq!(root.files(), files);
    let settings = std::fs::read_to_string(root.path("opt/etc/slackwater/config.toml")).unwrap();
    assert_eq!(settings, "# ours\n");

    root.ok("uninstall");
    let left: Vec<String> = root.files().into_iter().collect();
    assert_eq!(left, ["opt/etc/slackwater/config.toml", "opt/etc/slackwater/driver.toml"]);
    root.ok("uninstall");
}

#[test]
fn the_parts_of_packages_share_no_file() {
    let mut all = BTreeSet::new();
    for (part, program) in
        [("server", "slackwaterd"), ("client", "slackwater"), ("driver", "slackwater-driver")]
    {
        let root = Root::new();
        root.ok(part);
        let files = root.files();
        assert!(files.contains(&format!("opt/slackwater/bin/{program}")), "{part}: {files:#?}");
        // Pages bear the name of the program that was there in the place of all.
        for file in files.into_iter().filter(|file| !file.contains("/man8/slackwaterd")) {
            assert!(all.insert(file.clone()), "{file} is in {part} and in another part");
        }
    }
    let root = Root::new();
    root.ok("appliance");
    root.ok("worker");
    let mut files = root.files();
    files.retain(|file| !file.contains("/man8/slackwaterd"));
    assert_eq!(files, all);
}

#[test]
fn what_cannot_be_installed_is_told() {
    let root = Root::new();
    let output = root.run("everything");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage: install appliance|worker"));
    std::fs::remove_file(root.folder.path().join("release/slackwater-driver")).unwrap();
    let output = root.run("worker");
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("slackwater-driver is missing: run `make build`"), "{told}");
}

//! `deploy/target-directory`: each clone has a directory for what it compiles, which begins with what another clone has
//! compiled of other people's crates.
//!
//! The clones here are folders that hold nothing but the script, in a cache of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SCRIPT: &str = "deploy/target-directory";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A cache and clones, gone when dropped.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn clone(&self, name: &str) -> PathBuf {
        let clone = self.0.path().join(name);
        fs::create_dir_all(clone.join("deploy")).unwrap();
        fs::copy(root().join(SCRIPT), clone.join(SCRIPT)).unwrap();
        clone
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("cache/slackwater")
    }

    fn command(&self, clone: &Path, arguments: &[&str]) -> Command {
        // Not by its name alone: a process that another thread forks while the copy is written holds it
        // open for a moment, and Linux runs no program that is open for writing.
        let mut command = Command::new("bash");
        command.arg(clone.join(SCRIPT)).args(arguments).env_remove("CARGO_TARGET_DIR");
        command.env("XDG_CACHE_HOME", self.0.path().join("cache")).current_dir("/");
        command
    }

    fn run(&self, clone: &Path, arguments: &[&str]) -> PathBuf {
        printed(self.command(clone, arguments))
    }

    fn made(&self, clone: &Path) -> PathBuf {
        self.run(clone, &["--make"])
    }
}

fn printed(mut command: Command) -> PathBuf {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim_end_matches('\n').into()
}

/// Puts there what cargo would leave of a build, with `text` in each file.
fn compile(directory: &Path, text: &str) {
    let release = directory.join("release");
    for file in COMPILED {
        let path = release.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    File::open(release.join(COMPILED[1])).unwrap().set_modified(long_ago).unwrap();
}

/// How many of [`COMPILED`] are of other people's crates, or cargo's mark of them.
const OTHERS: usize = 3;
const COMPILED: [&str; 9] = [
    ".fingerprint/librocksdb-sys-01/lib-librocksdb_sys",
    "deps/liblibrocksdb_sys-01.rlib",
    "build/librocksdb-sys-02/out/librocksdb.a",
    ".fingerprint/slackwater-server-03/bin-slackwaterd",
    "deps/libslackwater_server-03.rlib",
    "deps/tidy-04",
    "build/slackwater-benches-05/output",
    "slackwaterd",
    ".cargo-lock",
];

/// Those of [`COMPILED`] that are there.
fn compiled(directory: &Path) -> Vec<&'static str> {
    COMPILED.into_iter().filter(|file| directory.join("release").join(file).exists()).collect()
}

#[test]
fn each_clone_has_its_own() {
    let machine = Machine::new();
    let clones = ["one", "two", "other/one"].map(|name| machine.clone(name));
    let directories = clones.clone().map(|clone| machine.run(&clone, &[]));
    for (clone, directory) in clones.iter().zip(&directories) {
        let below = directory.strip_prefix(machine.cache()).unwrap().to_str().unwrap();
        let name = clone.file_name().unwrap().to_str().unwrap();
        assert!(below.starts_with(&format!("targets/{name}-")), "{below}");
        assert!(!directory.exists(), "printing it makes nothing");
        assert_eq!(directories.iter().filter(|other| *other == directory).count(), 1);
        assert_eq!(machine.made(clone), *directory);
        assert!(directory.is_dir());
        let made_from = fs::read_to_string(directory.join("clone")).unwrap();
        assert_eq!(Path::new(made_from.trim_end()), clone.canonicalize().unwrap());
    }
    // By another way to it, and with a name that the shell and make would read in pieces.
    let odd = machine.clone("a clone's $name");
    std::os::unix::fs::symlink(&odd, machine.0.path().join("link")).unwrap();
    let directory = machine.made(&odd);
    assert!(directory.file_name().unwrap().to_str().unwrap().starts_with("a_clone_s__name-"));
    assert_eq!(machine.run(&machine.0.path().join("link"), &[]), directory);
}

#[test]
fn one_that_is_named_is_left_alone() {
    let machine = Machine::new();
    let clone = machine.clone("one");
    let named = machine.0.path().join("named");
    for arguments in [&[][..], &["--make"]] {
        let mut command = machine.command(&clone, arguments);
        command.env("CARGO_TARGET_DIR", &named);
        assert_eq!(printed(command), named);
    }
    assert!(!named.exists() && !machine.cache().exists());
    // make hands its own on to what it calls.
    let own = machine.run(&clone, &[]);
    let mut command = machine.command(&clone, &["--make"]);
    command.env("CARGO_TARGET_DIR", &own);
    assert_eq!(printed(command), own);
    assert!(own.is_dir());
    let output = machine.command(&clone, &["--print"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage"), "{output:?}");
}

#[test]
fn a_new_one_begins_with_what_others_compiled() {
    let machine = Machine::new();
    // As it was before there was one for each clone.
    compile(&machine.cache().join("target"), "shared");
    let first = machine.made(&machine.clone("first"));
    assert_eq!(compiled(&first), COMPILED[..OTHERS]);
    let read = |directory: &Path, file: &str| fs::read_to_string(directory.join(file)).unwrap();
    let library = Path::new("release").join(COMPILED[1]);
    let library = library.to_str().unwrap();
    assert_eq!(read(&first, library), "shared");
    // By its times cargo tells whether it is up to date.
    let modified =
        |directory: &Path| directory.join(library).metadata().unwrap().modified().unwrap();
    assert_eq!(modified(&first), modified(&machine.cache().join("target")));

    // Of several, the one that was compiled into last.
    compile(&first, "first");
    fs::write(first.join("release/deps/libnew-06.rlib"), "first").unwrap();
    let other = machine.clone("second");
    let second = machine.made(&other);
    assert_eq!(read(&second, library), "first");
    assert!(second.join("release/deps/libnew-06.rlib").is_file());
    // A copy: what one clone compiles does not change what the other has.
    fs::write(first.join(library), "again").unwrap();
    assert_eq!(read(&second, library), "first");
    // What is there is kept.
    assert_eq!(machine.made(&other), second);
    assert_eq!(read(&second, library), "first");
}

/// Else it would take what is half written.
#[test]
fn a_build_that_is_under_way_is_waited_for() {
    let machine = Machine::new();
    let first = machine.made(&machine.clone("first"));
    compile(&first, "half");
    let lock = File::open(first.join("release/.cargo-lock")).unwrap();
    lock.lock().unwrap();
    let clone = machine.clone("second");
    let mut making = machine
        .command(&clone, &["--make"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(making.stderr.take().unwrap()).lines();
    let line = said.next().unwrap().unwrap();
    assert!(line.contains("waits for the build in") && line.contains("first-"), "{line}");
    fs::write(first.join("release").join(COMPILED[1]), "whole").unwrap();
    lock.unlock().unwrap();
    assert!(said.next().unwrap().unwrap().contains("takes compiled dependencies from"));
    assert!(making.wait().unwrap().success());
    let second = machine.run(&clone, &[]);
    assert_eq!(fs::read_to_string(second.join("release").join(COMPILED[1])).unwrap(), "whole");
}

#[test]
fn what_was_cut_off_is_made_again_and_what_is_left_over_goes() {
    let machine = Machine::new();
    let [first, second] = ["first", "second"].map(|name| machine.clone(name));
    let compiled_first = machine.made(&first);
    compile(&compiled_first, "first");
    // Killed while it copied.
    let half = machine.run(&second, &[]).with_extension("new");
    fs::create_dir_all(half.join("release/deps")).unwrap();
    fs::write(half.join("release/deps/libhalf-07.rlib"), "half").unwrap();
    // No clone says that this is its own.
    let strange = machine.cache().join("targets/strange");
    fs::create_dir(&strange).unwrap();

    fs::remove_dir_all(&first).unwrap();
    let output = machine.command(&second, &["--make"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains(&*compiled_first.to_string_lossy()) && said.contains("gone"), "{said}");
    let made = machine.run(&second, &[]);
    // It had what the other left.
    assert_eq!(compiled(&made), COMPILED[..OTHERS]);
    assert!(!half.exists() && !made.join("release/deps/libhalf-07.rlib").exists());
    assert!(!compiled_first.exists() && strange.is_dir());
}

/// What takes it from elsewhere runs the programs of another clone, or none.
#[test]
fn the_scripts_take_it_from_there() {
    let scripts = [
        "Makefile",
        "tests/suite",
        "tests/repeat",
        "tests/guest/run",
        "tests/openapi/run",
        "tests/power/run",
        "tests/units/run",
        "tests/vm/run",
        "tests/engines/run",
        "tests/compose/run",
        "fuzz/run",
    ];
    for script in scripts {
        let text = fs::read_to_string(root().join(script)).unwrap();
        assert!(text.contains("target-directory"), "{script}");
        assert!(!text.contains("slackwater/target"), "{script}");
    }
}

//! All commands of the Makefile, and of tests/suite, share what they compile: no package is compiled twice for differing
//! features, least of all RocksDB, which takes a quarter of an hour.
//!
//! ```text
//! make test     --workspace, with tests   the widest: what the others compile is among it,
//! make run      --workspace               each package with the same features
//! make bench-*  -p slackwater-benches
//! ```
//! Cargo turns on of each package what those that are built together ask for. What is missing in a
//! command goes into `benches/Cargo.toml`, as that crate is part of all of them.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Commands that compile with one set of features. `cargo check` is not among them: it tries whether
/// the types of `api` compile alone, which is to be apart.
const BUILDS: [&str; 4] = ["build", "test", "bench", "clippy"];

/// Arguments that choose features: with them a command would compile apart.
const CHOICES: [&str; 5] =
    ["--features", "-F", "--all-features", "--no-default-features", "--profile"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// What a command of cargo compiles.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Selection {
    /// `--workspace`, or `-p` and a package.
    packages: Vec<String>,
    /// Whether what only tests and benches need is compiled along.
    has_tests: bool,
}

impl Selection {
    /// From the words of a command; `None` when it compiles nothing of ours.
    fn of(command: &str) -> Option<Self> {
        // What stands before `cargo` only starts it.
        let words = command.split([' ', '\t', '(', ')']).filter(|word| !word.is_empty());
        let mut words = words.skip_while(|word| *word != "cargo").skip(1);
        let verb = words.next().filter(|verb| BUILDS.contains(verb))?;
        // What stands behind `--` is for the program.
        let words: Vec<_> = words.take_while(|word| *word != "--").collect();
        for choice in CHOICES {
            assert!(!words.contains(&choice), "`{command}` compiles apart, by {choice}");
        }
        let package = words.iter().position(|word| *word == "-p");
        let packages = match package {
            Some(at) => words[at..=at + 1].iter().map(|word| (*word).to_owned()).collect(),
            None => {
                assert!(words.contains(&"--workspace"), "`{command}` names no packages");
                vec!["--workspace".to_owned()]
            }
        };
        let has_tests = verb != "build" || words.contains(&"--all-targets");
        Some(Self { packages, has_tests })
    }

    fn everything() -> Self {
        Self { packages: vec!["--workspace".to_owned()], has_tests: true }
    }

    /// Its packages, each with the features that it has: `NAME VERSION|FEATURE,...`.
    fn resolved(&self) -> BTreeSet<String> {
        let edges = if self.has_tests { "normal,build,dev" } else { "normal,build" };
        let form =
            ["--offline", "--locked", "--prefix", "none", "--format", "{p}|{f}", "-e", edges];
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.arg("tree").args(form).arg("--no-dedupe").args(&self.packages);
        let output = command.current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{self:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.replace(" (*)", "").replace(" (proc-macro)", "")).collect()
    }
}

/// Those of a Makefile, or of a script.
fn selections(text: &str) -> BTreeSet<Selection> {
    text.lines().filter(|line| line.starts_with([' ', '\t'])).filter_map(Selection::of).collect()
}

#[test]
fn no_command_of_the_makefile_compiles_a_package_again() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let selections = selections(&(read("Makefile") + &read("tests/suite")));
    assert!(selections.contains(&Selection::everything()), "{selections:?}");
    assert!(selections.len() >= 3, "{selections:?}");
    let all = Selection::everything().resolved();
    assert!(all.iter().any(|package| package.starts_with("librocksdb-sys")), "{all:?}");
    let mut faults = Vec::new();
    for selection in &selections {
        let apart = selection.resolved();
        faults.extend(apart.difference(&all).map(|package| format!("{selection:?}: {package}")));
    }
    let advice = "turn on in benches/Cargo.toml what they have under `cargo test --workspace`";
    assert!(faults.is_empty(), "{}\n{advice}", faults.join("\n"));
}

/// One crate alone asks for less of what it shares with others.
#[test]
fn a_command_that_compiles_a_package_again_is_found() {
    let alone = ["-p", "slackwater-blockstore"].map(str::to_owned).to_vec();
    let alone = Selection { packages: alone, has_tests: true };
    assert!(!alone.resolved().is_subset(&Selection::everything().resolved()));
}

#[test]
fn commands_are_read_as_cargo_reads_them() {
    let makefile = "build: needs\n\tcargo build --release --workspace --bins\n\techo done\n    command=(cargo test --release --workspace)\n\
        check:\n\t$(LEASH) cargo clippy --workspace --all-targets -- -D warnings\n\tcargo fmt --all\n\
        bench:\n\tcargo bench -p one --benches -- --features x\n";
    let selection = |packages: &[&str], has_tests| {
        let packages = packages.iter().map(|word| (*word).to_owned()).collect();
        Selection { packages, has_tests }
    };
    let expected = [
        selection(&["--workspace"], false),
        selection(&["--workspace"], true),
        selection(&["-p", "one"], true),
    ];
    assert_eq!(selections(makefile), expected.into());
}

#[test]
#[should_panic(expected = "compiles apart, by --all-features")]
fn a_command_with_features_of_its_own_is_refused() {
    Selection::of("cargo test --workspace --all-features");
}

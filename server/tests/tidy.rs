//! The house rules, as tests: who imports whom, how long a file is, what no file holds.
//!
//! Each rule is a function from text to faults, and each has a test that it finds what it is
//! for, so that a rule which stopped working is seen.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Who may import whom in this workspace, and nobody else anybody else. `blockstore` knows no
/// protocol, `nfs` and `api` never see each other, and the client side never sees the store.
const ALLOWED_EDGES: [(&str, &str); 15] = [
    ("slackwater-driver", "slackwater-client"),
    ("slackwater-driver", "slackwater-archive"),
    ("slackwater-archive", "slackwater-erofs"),
    ("slackwater-driver", "slackwater-attach"),
    ("slackwater-driver", "slackwater-fuse"),
    ("slackwater-fuse", "slackwater-client"),
    ("slackwater-client", "slackwater-api"),
    ("slackwater-api", "slackwater-blockstore"),
    ("slackwater-nfs", "slackwater-blockstore"),
    ("slackwater-server", "slackwater-nfs"),
    ("slackwater-server", "slackwater-api"),
    ("slackwater-server", "slackwater-blockstore"),
    ("slackwater-benches", "slackwater-client"),
    ("slackwater-benches", "slackwater-blockstore"),
    // The stock server of its vocabulary crate is a rival there.
    ("slackwater-benches", "slackwater-nfs"),
];

/// Edges that hold only behind a feature: the types of `api` are free of the store.
const OPTIONAL_EDGES: [(&str, &str); 1] = [("slackwater-api", "slackwater-blockstore")];

/// What the block store never depends on, however indirectly: it is synchronous.
const ASYNC_CRATES: [&str; 6] = ["tokio", "async-std", "smol", "hyper", "axum", "futures-executor"];

/// Longest source file in lines; 300 are aimed at.
const FILE_LINES_MAX: usize = 600;

/// Folders at the top that are no part of the sources.
const SKIPPED_FOLDERS: [&str; 5] = [".git", "target", "data", "settings", ".cache"];

/// What no file holds, and why. Written in two parts, so that this list does not find itself.
const BANNED: [(&str, &str, &str); 17] = [
    ("to", "do!", "unfinished code"),
    ("unimpl", "emented!", "unfinished code"),
    ("TO", "DO", "unfinished work belongs in an issue"),
    ("FIX", "ME", "unfinished work belongs in an issue"),
    ("dbg", "!(", "left from debugging"),
    ("generated ", "by", "say what a thing is, not how it was typed"),
    ("/ro", "ot/", "a path of one machine"),
    ("/ho", "me/", "a path of one machine"),
    ("/Us", "ers/", "a path of one machine"),
    ("/wo", "rk/", "a path of one machine"),
    ("static.crates", ".io", "the host of a registry"),
    ("index.crates", ".io", "the host of a registry"),
    ("deb.debian", ".org", "the host of a registry"),
    ("proxy.golang", ".org", "the host of a registry"),
    ("registry.npmjs", ".org", "the host of a registry"),
    ("registry-1.docker", ".io", "the host of a registry"),
    ("#[ig", "nore", "a test that does not run proves nothing"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().canonicalize().unwrap()
}

/// A file of the project: its path from the root and its text.
struct Source {
    path: String,
    text: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        Path::new(&self.path).extension().is_some_and(|extension| extension == "rs")
    }
}

/// Every text file of the project.
fn sources() -> Vec<Source> {
    let root = root();
    let mut folders = vec![root.clone()];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                let is_skipped = SKIPPED_FOLDERS.iter().any(|skipped| path == root.join(skipped));
                if !is_skipped && !path.is_symlink() {
                    folders.push(path);
                }
            } else if name != "Cargo.lock"
                // The licences' words are not ours to choose.
                && !name.starts_with("LICENSE-")
                // Not text: an image, a recorded store.
                && let Ok(text) = std::fs::read_to_string(&path)
            {
                let path = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
                sources.push(Source { path, text });
            }
        }
    }
    assert!(sources.len() > 50, "the sources were not found");
    sources
}

/// Fails with all faults at once.
fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(arguments).current_dir(root()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn metadata() -> Value {
    let text = cargo(&["metadata", "--no-deps", "--format-version", "1", "--offline"]);
    serde_json::from_str(&text).unwrap()
}

/// The dependencies of a package on others of the workspace, those of its tests left out.
fn inner_dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    let all = package["dependencies"].as_array().unwrap().iter();
    all.filter(|dependency| dependency["path"].is_string() && dependency["kind"] != "dev")
}

/// What is wrong with the edges of `metadata`.
fn edge_faults(metadata: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let from = package["name"].as_str().unwrap();
        for dependency in inner_dependencies(package) {
            let edge = (from, dependency["name"].as_str().unwrap());
            let (from, to) = edge;
            if !ALLOWED_EDGES.contains(&edge) {
                faults.push(format!("{from} must not import {to}"));
            }
            if OPTIONAL_EDGES.contains(&edge) && dependency["optional"] != true {
                faults.push(format!("{from} must import {to} behind a feature only"));
            }
            let takes_server = dependency["uses_default_features"] == true
                || dependency["features"].as_array().unwrap().contains(&"server".into());
            if edge == ("slackwater-client", "slackwater-api") && takes_server {
                faults.push(format!("{from} must import the types of {to} only"));
            }
        }
    }
    faults
}

#[test]
fn imports_follow_the_design() {
    let metadata = metadata();
    assert_none(&edge_faults(&metadata));
    let packages = metadata["packages"].as_array().unwrap();
    let edges: usize = packages.iter().map(|package| inner_dependencies(package).count()).sum();
    assert!(edges >= 5, "only {edges} edges were found");
}

#[test]
fn a_forbidden_import_is_found() {
    let dependency = |name: &str| {
        serde_json::json!({
            "name": name, "path": "/x", "kind": null, "optional": false, "features": ["server"],
            "uses_default_features": false,
        })
    };
    let package = |name: &str, to: &str| serde_json::json!({ "name": name, "dependencies": [dependency(to)] });
    let metadata = serde_json::json!({ "packages": [
        package("slackwater-nfs", "slackwater-api"),
        package("slackwater-client", "slackwater-api"),
        package("slackwater-api", "slackwater-blockstore"),
        package("slackwater-server", "slackwater-nfs"),
    ]});
    let faults = edge_faults(&metadata);
    assert_eq!(faults.len(), 3, "{faults:?}");
    assert!(faults[0].contains("slackwater-nfs must not import slackwater-api"));
    assert!(faults[1].contains("types"));
    assert!(faults[2].contains("feature"));
}

#[test]
fn the_block_store_has_no_async_runtime() {
    let arguments = ["tree", "-p", "slackwater-blockstore", "-e", "normal", "--prefix", "none"];
    let tree = cargo(&[&arguments[..], &["--offline", "--all-features"]].concat());
    let crates: BTreeSet<_> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(crates.contains("rocksdb"), "{tree}");
    for name in ASYNC_CRATES {
        assert!(!crates.contains(name), "the block store depends on {name}");
    }
}

#[test]
fn every_crate_takes_the_lints_and_the_licence() {
    for package in metadata()["packages"].as_array().unwrap() {
        let path = package["manifest_path"].as_str().unwrap();
        let manifest: toml::Table = std::fs::read_to_string(path).unwrap().parse().unwrap();
        let inherits = |table: &str, key: &str| {
            manifest.get(table).and_then(|table| table.get(key))
                == Some(&toml::Value::Boolean(true))
        };
        assert!(inherits("lints", "workspace"), "{path} does not take the lints");
        assert_eq!(package["license"], "Apache-2.0 OR MIT", "{path}");
    }
}

/// The files that are too long.
fn length_faults(sources: &[Source]) -> Vec<String> {
    let too_long = sources.iter().filter_map(|source| {
        let lines = source.text.lines().count();
        let fault = format!("{} has {lines} lines, at most {FILE_LINES_MAX}", source.path);
        (lines > FILE_LINES_MAX).then_some(fault)
    });
    too_long.collect()
}

#[test]
fn no_source_file_is_too_long() {
    let is_code = |source: &Source| {
        let extension = Path::new(&source.path).extension();
        extension
            .is_none_or(|extension| ["rs", "sh", "py", "c", "toml"].iter().any(|e| extension == *e))
    };
    let code: Vec<_> = sources().into_iter().filter(is_code).collect();
    assert_none(&length_faults(&code));
    let long = Source { path: "x.rs".to_owned(), text: "\n".repeat(FILE_LINES_MAX + 1) };
    assert_eq!(length_faults(&[long]).len(), 1);
}

/// The lines of a file with something that is banned.
fn banned_faults(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        for (first, second, why) in BANNED {
            if line.contains(&format!("{first}{second}")) {
                faults.push(format!("{}:{}: `{first}{second}`: {why}", source.path, index + 1));
            }
        }
    }
    faults
}

#[test]
fn no_file_holds_what_is_banned() {
    assert_none(&sources().iter().flat_map(banned_faults).collect::<Vec<_>>());
    for (first, second, _) in BANNED {
        let text = format!("fine\nx {first}{second} x\n");
        let faults = banned_faults(&Source { path: "x".to_owned(), text });
        assert_eq!(faults.len(), 1, "{first}{second}");
        assert!(faults[0].starts_with("x:2: "));
    }
}

/// The faults of a Rust file that no lint finds.
fn rust_faults(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    let is_text = |character: char| matches!(character, '\n' | ' '..='~');
    if let Some(character) = source.text.chars().find(|character| !is_text(*character)) {
        faults.push(format!("{}: `{}` is no ASCII text", source.path, character.escape_unicode()));
    }
    if !source.text.starts_with("//!") {
        faults.push(format!("{}: does not begin with what it is (`//!`)", source.path));
    }
    let in_sources = !source.path.contains("/tests/") && !source.path.contains("/benches/");
    let undocumented = ["#![allow(missing", "_docs"].concat();
    if in_sources && source.text.contains(&undocumented) {
        faults.push(format!("{}: lets public items go undocumented", source.path));
    }
    faults
}

#[test]
fn every_rust_file_is_ascii_and_says_what_it_is() {
    let sources = sources();
    let rust: Vec<_> = sources.iter().filter(|source| source.is_rust()).collect();
    assert_none(&rust.into_iter().flat_map(rust_faults).collect::<Vec<_>>());
    let allow = ["#![allow(missing", "_docs)]"].concat();
    // A byte of zero would make the file a binary one for git, which then shows no changes of it.
    for character in ['\u{fc}', '\0', '\t', '\r', '\u{7f}'] {
        let text = format!("{allow}\nfn main() {{}} // {character}");
        let faults = rust_faults(&Source { path: "x/src/main.rs".to_owned(), text });
        assert_eq!(faults.len(), 3, "{faults:?}");
    }
}

/// The Rust files under `src` that no file names as a module: nobody compiles them.
fn dead_files(sources: &[Source]) -> Vec<String> {
    let names_module = |folder: &str, name: &str| {
        let wanted = [format!("mod {name};"), format!("mod {name} {{")];
        sources
            .iter()
            .filter(|source| source.is_rust() && source.path.starts_with(folder))
            .any(|source| wanted.iter().any(|wanted| source.text.contains(wanted)))
    };
    let mut dead = Vec::new();
    for source in sources.iter().filter(|source| source.is_rust()) {
        let Some((crate_folder, inner)) = source.path.split_once("/src/") else {
            continue;
        };
        let path = Path::new(inner);
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let is_program = path.parent() == Some(Path::new("bin"));
        let module = match stem {
            "mod" => path.parent().unwrap().file_name().unwrap().to_str().unwrap(),
            other => other,
        };
        let is_entry = matches!(stem, "lib" | "main") || is_program;
        if !is_entry && !names_module(&format!("{crate_folder}/src/"), module) {
            dead.push(format!("{}: no module of this name is declared", source.path));
        }
    }
    dead
}

#[test]
fn every_source_file_is_compiled() {
    assert_none(&dead_files(&sources()));
    let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
    let dead = dead_files(&[
        source("a/src/lib.rs", "mod one;\npub mod two;"),
        source("a/src/one.rs", ""),
        source("a/src/two/mod.rs", ""),
        source("a/src/three.rs", ""),
        source("b/src/lib.rs", "mod three;"),
        source("b/src/three.rs", ""),
        source("b/src/bin/tool/main.rs", ""),
    ]);
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert!(dead[0].starts_with("a/src/three.rs"), "{dead:?}");
}

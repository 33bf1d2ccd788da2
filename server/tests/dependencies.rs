//! What comes in through Cargo.lock, held against deny.toml: licences, sources, bans. It needs
//! neither the network nor cargo-deny, which `make deny` runs for what this cannot know: the
//! advisories, and licences by the text of their files.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn rules() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

fn texts(list: &toml::Value) -> BTreeSet<String> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Every package that is compiled on Linux, the tests' own included.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let platform = ["--filter-platform", "x86_64-unknown-linux-gnu"];
    let arguments =
        ["metadata", "--offline", "--locked", "--format-version", "1", "--all-features"];
    let output =
        Command::new(cargo).args(arguments).args(platform).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().clone();
    assert!(packages.len() > 100, "only {} packages were found", packages.len());
    packages
}

/// Whether a licence expression (SPDX specification annex D, and the older `MIT/Apache-2.0`)
/// can be met by the allowed licences alone.
fn is_met(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let met = any(&mut words, allowed);
    assert!(words.next().is_none(), "`{expression}` is no licence expression");
    met
}

type Words<'a, 'w> = &'a mut std::iter::Peekable<std::str::SplitWhitespace<'w>>;

fn any(words: Words<'_, '_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: Words<'_, '_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: Words<'_, '_>, allowed: &BTreeSet<String>) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let met = any(words, allowed);
        assert_eq!(words.next(), Some(")"));
        return met;
    }
    let licence = words.next().expect("a licence");
    match words.next_if_eq(&"WITH") {
        Some(_) => allowed.contains(&format!("{licence} WITH {}", words.next().unwrap())),
        None => allowed.contains(licence),
    }
}

/// What is wrong with a package.
fn faults(package: &Value, rules: &toml::Table) -> Vec<String> {
    let name = package["name"].as_str().unwrap();
    let mut faults = Vec::new();
    let licence = package["license"].as_str().unwrap_or("");
    if licence.is_empty() || !is_met(licence, &texts(&rules["licenses"]["allow"])) {
        faults.push(format!("{name}: licence `{licence}` is not in deny.toml"));
    }
    // Packages of this workspace have no source.
    if let Some(source) = package["source"].as_str() {
        let registries = texts(&rules["sources"]["allow-registry"]);
        let registry = source.strip_prefix("registry+").unwrap_or("");
        if !registries.contains(registry) {
            faults.push(format!("{name}: source `{source}` is not in deny.toml"));
        }
    }
    let banned = rules["bans"]["deny"].as_array().unwrap();
    if banned.iter().any(|banned| banned["crate"].as_str() == Some(name)) {
        faults.push(format!("{name} is banned by deny.toml"));
    }
    faults
}

#[test]
fn every_dependency_is_allowed() {
    let rules = rules();
    let faults: Vec<_> = packages().iter().flat_map(|package| faults(package, &rules)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn no_rule_is_left_open() {
    let rules = rules();
    assert!(rules["advisories"]["ignore"].as_array().unwrap().is_empty());
    assert_eq!(rules["sources"]["unknown-registry"].as_str(), Some("deny"));
    assert_eq!(rules["sources"]["unknown-git"].as_str(), Some("deny"));
    assert!(rules["sources"]["allow-git"].as_array().unwrap().is_empty());
    let copyleft = ["GPL", "MPL", "EPL", "CDDL", "SSPL", "BUSL"];
    for licence in texts(&rules["licenses"]["allow"]) {
        assert!(copyleft.iter().all(|word| !licence.contains(word)), "{licence} is not permissive");
    }
}

#[test]
fn what_is_not_allowed_is_found() {
    let package = |name: &str, licence: Value, source: &str| serde_json::json!({ "name": name, "license": licence, "source": source });
    let index = "registry+https://github.com/rust-lang/crates.io-index";
    let rules = rules();
    let count = |package: Value| faults(&package, &rules).len();
    assert_eq!(count(package("good", "MIT".into(), index)), 0);
    assert_eq!(count(package("copyleft", "GPL-3.0-only".into(), index)), 1);
    assert_eq!(count(package("silent", Value::Null, index)), 1);
    assert_eq!(count(package("git", "MIT".into(), "git+https://example.com/x")), 1);
    assert_eq!(count(package("other", "MIT".into(), "registry+https://example.com/x")), 1);
    assert_eq!(count(package("openssl-sys", "MIT".into(), index)), 1);
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    let allowed = ["MIT", "ISC", "A WITH B"].map(str::to_owned).into();
    for met in ["MIT", "MIT/X", "X / MIT", "X OR MIT", "MIT AND ISC", "(X OR ISC) AND MIT"] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for met in ["A WITH B", "X AND Y OR MIT", "MIT OR X AND Y"] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for not in ["X", "MIT AND X", "X AND (MIT OR ISC)", "A", "MIT WITH B", "MITX"] {
        assert!(!is_met(not, &allowed), "{not}");
    }
}

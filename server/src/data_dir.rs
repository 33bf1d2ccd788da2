//! Whether a directory may become a store: not one that holds something else.
//!
//! ```text
//! FORMAT is there ---------------------> a store
//! nothing, or what goes beside a store -> may become one
//! anything else ------------------------> refused, and left as it is
//! ```
//! A name that was mistyped by one part (`/var`) would mix a store with what lies there, and its backups and deletes
//! with it.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::error::ServerError;

/// Names beside or of a store that count for nothing: `mkfs` makes the first, the others are of a store whose FORMAT is
/// not there, of which the store itself says more.
const OF_A_STORE: [&str; 13] = [
    "lost+found",
    "lock",
    "FORMAT",
    "index",
    "log",
    "compacted",
    "copies",
    "reserve",
    "reserve-start",
    "audit",
    "admin-token",
    "reference-key",
    "workers.json",
];

/// Names that are told of what is there: enough to know the place by.
const TOLD_MAX: usize = 3;

/// Refuses a directory that holds something else than a store, and what the configuration names.
///
/// # Errors
/// `Foreign`; `DataDir` if it cannot be read.
pub(crate) fn require_own(config: &Config) -> Result<(), ServerError> {
    let data_dir = &config.data_dir;
    let found = foreign(data_dir, &config.files)
        .map_err(|source| ServerError::DataDir { data_dir: data_dir.clone(), source })?;
    if found.is_empty() {
        return Ok(());
    }
    let told = found.iter().take(TOLD_MAX).cloned().collect::<Vec<_>>().join(", ");
    let more = if found.len() > TOLD_MAX { ", ..." } else { "" };
    Err(ServerError::Foreign { data_dir: data_dir.clone(), found: format!("{told}{more}") })
}

/// The names of what is neither of a store nor named by the configuration, in order; none where a store is.
fn foreign(data_dir: &Path, files: &[PathBuf]) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(data_dir) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let named: HashSet<PathBuf> =
        files.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
    let names: Vec<OsString> = entries.iter().map(std::fs::DirEntry::file_name).collect();
    if names.iter().any(|name| name == "FORMAT") {
        return Ok(Vec::new());
    }
    let is_foreign = |name: &&OsString| {
        let text = name.to_string_lossy();
        let text = text.strip_suffix(".new").unwrap_or(&text);
        // Hidden ones are of file systems (`.zfs`) and tools; an index that was damaged is kept aside as `index.`.
        let is_known =
            text.starts_with('.') || text.starts_with("index.") || OF_A_STORE.contains(&text);
        let is_named = || {
            let path = std::fs::canonicalize(data_dir.join(name));
            path.is_ok_and(|path| named.iter().any(|named| named.starts_with(&path)))
        };
        !is_known && !is_named()
    };
    let mut found: Vec<String> =
        names.iter().filter(is_foreign).map(|name| shown(name.as_os_str())).collect();
    found.sort();
    Ok(found)
}

/// A name that steers no terminal.
fn shown(name: &OsStr) -> String {
    name.to_string_lossy().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_holds_something_else_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let none: [PathBuf; 0] = [];
        assert!(foreign(&path.join("missing"), &none).unwrap().is_empty());
        assert!(foreign(path, &none).unwrap().is_empty());
        for name in ["lost+found", ".snapshot", "lock", "FORMAT.new", "index.damaged-1"] {
            std::fs::write(path.join(name), "").unwrap();
        }
        assert!(foreign(path, &none).unwrap().is_empty());
        std::fs::write(path.join("tokens"), "").unwrap();
        std::os::unix::fs::symlink(path.join("tokens"), path.join("link")).unwrap();
        let tokens = [path.join("../").join(path.file_name().unwrap()).join("tokens")];
        assert_eq!(foreign(path, &none).unwrap(), ["link", "tokens"]);
        assert!(foreign(path, &tokens).unwrap().is_empty(), "the configuration names it");
        std::fs::create_dir(path.join("tls")).unwrap();
        std::fs::write(path.join("tls/key.pem"), "").unwrap();
        let [tokens] = tokens;
        let tokens = [tokens, path.join("tls/key.pem")];
        assert!(foreign(path, &tokens).unwrap().is_empty(), "it names one below it");
        std::fs::create_dir(path.join("a\x1bb")).unwrap();
        assert_eq!(foreign(path, &tokens).unwrap(), ["a\\u{1b}b"]);
        std::fs::write(path.join("FORMAT"), "").unwrap();
        assert!(foreign(path, &none).unwrap().is_empty(), "a store is there");
    }
}

//! Token files are read again while the server runs.
//!
//! ```text
//! each second: look at all files --the same as a second ago, and other ones than were read--> read --> Tokens::replace
//!                                                              |
//!                                  a fault: an error in the log, and the tokens before are still taken
//! ```
//! A file that changes is left alone until it has not changed for a second, so that one that is just being written in
//! place is not read by half. What is no regular file, such as a pipe, is read at the start alone.
//!
//! Invariants: what is taken is the content of all files together, or what was taken before. A fault is in the log and
//! on the metrics page until it is mended.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use slackwater_api::{TokenChanges, Tokens, TokensError, Workers};

use crate::config::{ConfigError, Finding, TokenFile, findings, tokens};

/// How often the files are looked at: a person who takes a token away does not wait longer than that twice. A look is a
/// `stat` of each file.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Looks in a row at files that have changed each time, after which that is a fault.
const UNSETTLED_LOOKS_MAX: u32 = 30;

/// By what a file that was replaced or written is known: device, inode, length, time of the last change. None where
/// there is none.
type Version = Option<(u64, u64, u64, i64, i64)>;

/// Why the tokens before are still taken.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Tokens(#[from] TokensError),
    #[error("{} is no regular file any more", path.display())]
    NoFile { path: PathBuf },
    #[error("they change each second, so they are not read: let them be for two seconds")]
    Unsettled,
}

/// The token files of a server that runs.
#[derive(Debug)]
pub(crate) struct TokenFiles {
    paths: Vec<PathBuf>,
    tokens: Arc<Tokens>,
    workers: Arc<Workers>,
    /// 1 if what the files hold is taken, else 0.
    valid: Gauge,
    /// The files at the last look.
    seen: Vec<Version>,
    /// The files that were read, and are taken.
    taken: Option<Vec<Version>>,
    /// The fault that was told.
    fault: Option<String>,
    /// Looks in a row that found a change.
    unsettled: u32,
    /// What is unsafe about them and was told, at the start if not here.
    findings: Vec<Finding>,
    /// Gets each change of the tokens.
    told: Told,
}

/// What is done with a change of the tokens.
struct Told(Box<dyn Fn(&TokenChanges) + Send>);

impl fmt::Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}

impl TokenFiles {
    /// These files, of which the tokens have the content. `valid` is kept up to date.
    pub(crate) fn new(
        files: &[TokenFile],
        tokens: Arc<Tokens>,
        workers: Arc<Workers>,
        valid: Gauge,
    ) -> Self {
        valid.set(1);
        Self {
            paths: files.iter().map(|file| file.path.clone()).collect(),
            tokens,
            workers,
            valid,
            seen: Vec::new(),
            taken: None,
            fault: None,
            unsettled: 0,
            findings: findings_of(files),
            told: Told(Box::new(|_| ())),
        }
    }

    /// The same, which gives each change of the tokens to `tell`, beside the runtime.
    pub(crate) fn telling(self, tell: impl Fn(&TokenChanges) + Send + 'static) -> Self {
        Self { told: Told(Box::new(tell)), ..self }
    }

    /// Looks at the files as long as the runtime lives.
    pub(crate) async fn follow(mut self) {
        if let Some(path) = self.paths.iter().find(|path| is_no_file(path)) {
            let path = path.display();
            tracing::warn!(%path, "it is no regular file, so the token files are not read again: restart after a change");
            return;
        }
        let valid = self.valid.clone();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let looked = tokio::task::spawn_blocking(move || {
                self.look();
                self
            });
            match looked.await {
                Ok(files) => self = files,
                Err(error) => {
                    valid.set(0);
                    tracing::error!(%error, "reading the token files panicked: restart the server to read them again");
                    return;
                }
            }
        }
    }

    /// Looks at the files, and reads them if they are other ones that have settled.
    fn look(&mut self) {
        let now: Vec<Version> =
            self.paths.iter().map(|path| std::fs::metadata(path).ok().map(version)).collect();
        let has_settled = now == self.seen;
        self.seen.clone_from(&now);
        self.unsettled = if has_settled { 0 } else { self.unsettled.saturating_add(1) };
        if self.unsettled > UNSETTLED_LOOKS_MAX {
            return self.tell(&Fault::Unsettled);
        }
        let is_taken = self.fault.is_none() && self.taken.as_ref() == Some(&now);
        if !has_settled || is_taken {
            return;
        }
        match self.read() {
            Ok(changes) => {
                self.taken = Some(now);
                if !changes.is_empty() {
                    self.told.0(&changes);
                }
                if self.fault.take().is_some() || !changes.is_empty() {
                    let TokenChanges { added, changed, removed } = changes;
                    tracing::info!(?added, ?changed, ?removed, "the token files were read again");
                }
                self.valid.set(1);
            }
            // Tried again at the next look, as what is missing may come without a change of the files.
            Err(fault) => self.tell(&fault),
        }
    }

    fn tell(&mut self, fault: &Fault) {
        let fault = fault.to_string();
        if self.fault.as_ref() != Some(&fault) {
            tracing::error!(
                %fault,
                "the token files cannot be used: the tokens before are still taken, also those that were removed"
            );
        }
        self.fault = Some(fault);
        self.valid.set(0);
    }

    fn read(&mut self) -> Result<TokenChanges, Fault> {
        // A pipe would wait for its writer.
        if let Some(path) = self.paths.iter().find(|path| is_no_file(path)) {
            return Err(Fault::NoFile { path: path.clone() });
        }
        let (tokens, files) = tokens::read(&self.paths)?;
        let found = findings_of(&files);
        for finding in found.iter().filter(|finding| !self.findings.contains(finding)) {
            tracing::warn!("{finding}");
        }
        self.findings = found;
        Ok(self.tokens.replace(tokens, &self.workers)?)
    }
}

/// Whether something else than a regular file is there.
fn is_no_file(path: &Path) -> bool {
    path.exists() && !path.is_file()
}

fn findings_of(files: &[TokenFile]) -> Vec<Finding> {
    files.iter().flat_map(findings::of_token_file).collect()
}

fn version(found: Metadata) -> (u64, u64, u64, i64, i64) {
    (found.dev(), found.ino(), found.len(), found.ctime(), found.ctime_nsec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "ops admin 0123456789abcdef\n";
    const SECOND: &str = "ops admin fedcba9876543210\nviewer read-only 0123456789abcdef\n";

    /// The files of a server that started with what they hold.
    fn started(paths: &[&Path]) -> TokenFiles {
        let paths: Vec<_> = paths.iter().map(|&path| path.to_owned()).collect();
        let (tokens, files) = tokens::read(&paths).unwrap();
        TokenFiles::new(&files, Tokens::new(tokens).into(), Arc::default(), Gauge::default())
    }

    /// Two looks: the files are the same at both.
    fn settle(files: &mut TokenFiles) {
        files.look();
        files.look();
    }

    /// Whether the tokens of `text` are those that are taken.
    fn is_taken(files: &TokenFiles, text: &str) -> bool {
        let tokens = tokens::parse(Path::new("t"), text).unwrap();
        files.tokens.replace(tokens, &files.workers).unwrap().is_empty()
    }

    #[test]
    fn a_file_that_has_settled_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, FIRST).unwrap();
        let mut files = started(&[&path]);
        for _ in 0..3 {
            files.look();
        }
        std::fs::write(&path, SECOND).unwrap();
        files.look();
        assert!(is_taken(&files, FIRST), "it may still be written");
        files.look();
        assert!(is_taken(&files, SECOND));
        // Replaced, as editors and configuration management do.
        let new = directory.path().join("new");
        std::fs::write(&new, FIRST).unwrap();
        std::fs::rename(&new, &path).unwrap();
        settle(&mut files);
        assert!(is_taken(&files, FIRST));
    }

    #[test]
    fn a_change_before_the_first_look_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, FIRST).unwrap();
        let mut files = started(&[&path]);
        std::fs::write(&path, SECOND).unwrap();
        settle(&mut files);
        assert!(is_taken(&files, SECOND));
    }

    #[test]
    fn a_fault_leaves_the_tokens_before_and_is_shown_until_it_is_mended() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| directory.path().join(name));
        let second = "viewer read-only 0123456789abcdef\n";
        let write_both = || {
            std::fs::write(&paths[0], FIRST).unwrap();
            std::fs::write(&paths[1], second).unwrap();
        };
        write_both();
        let mut files = started(&[&paths[0], &paths[1]]);
        for fault in [
            "",
            "# none\n",
            "ops admin",
            "ops admin 0123456789abcdef\nops admin 1\n",
            "viewer admin fedcba9876543210\n",
        ] {
            std::fs::write(&paths[0], fault).unwrap();
            settle(&mut files);
            assert!(is_taken(&files, &format!("{FIRST}{second}")), "{fault:?}");
            assert_eq!(files.valid.get(), 0, "{fault:?}");
            write_both();
            settle(&mut files);
            assert_eq!(files.valid.get(), 1, "{fault:?}");
        }
        // One that is a pipe, on which a reader would wait.
        std::fs::remove_file(&paths[0]).unwrap();
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &paths[0], kind, mode, 0).unwrap();
        settle(&mut files);
        assert_eq!(files.valid.get(), 0);
        std::fs::remove_file(&paths[0]).unwrap();
        write_both();
        settle(&mut files);
        assert_eq!(files.valid.get(), 1);
        // One that is not there for a while; nothing else changes when it is back.
        std::fs::rename(&paths[1], directory.path().join("away")).unwrap();
        settle(&mut files);
        assert_eq!(files.valid.get(), 0);
        assert!(is_taken(&files, &format!("{FIRST}{second}")));
        std::fs::rename(directory.path().join("away"), &paths[1]).unwrap();
        settle(&mut files);
        assert_eq!(files.valid.get(), 1);
    }

    #[test]
    fn files_that_never_settle_are_a_fault() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, FIRST).unwrap();
        let mut files = started(&[&path]);
        for round in 0..=UNSETTLED_LOOKS_MAX {
            assert_eq!(files.valid.get(), 1, "{round}");
            std::fs::write(
                &path,
                format!("{SECOND}{}", "#".repeat(usize::try_from(round).unwrap())),
            )
            .unwrap();
            files.look();
        }
        assert_eq!(files.valid.get(), 0);
        files.look();
        assert_eq!(files.valid.get(), 1);
        assert!(is_taken(&files, SECOND));
    }
}

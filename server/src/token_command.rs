//! `slackwaterd token ...`: changes token files, whether a server runs or not.
//!
//! ```text
//! add    new secret --> standard output, once
//!            |
//!            +-- its hash --> a line at the end of the file
//! hash   FILE --> FILE.new, with hashes for secrets --> rename to FILE
//! ```
//! Invariants: a file that cannot be used as it is, is left as it is. Owner and mode of a file stay. Two commands on one
//! file wait for each other. Standard output has the result alone.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use slackwater_api::{Role, Secret, Token};

use crate::config::{self, ConfigError, ParsedCommandLine, TokenCommand, text_file, tokens};
use crate::data_file;
use crate::error::ServerError;

/// Begins a secret, so that people and programs that look for leaks see what it is.
const SECRET_PREFIX: &str = "slackwater-token-";

/// Random bytes of a secret.
const SECRET_BYTES: usize = 32;

/// What a name that cannot be taken is called in errors.
const NAME_KEY: &str = "the name of the token";

/// Longest name: that of a worker.
const NAME_BYTES_MAX: usize = slackwater_api::worker::WORKER_NAME_BYTES_MAX;

/// Rights of a new file, whatever the umask: a server that runs as another user reads it, and the hashes of secrets that
/// are random are of no use to others.
const NEW_FILE_MODE: u32 = 0o644;

/// Carries out a command on the token files of a command line.
///
/// # Errors
/// No file is named, or more than one to add to; a file has a fault, or cannot be read or written.
pub fn run(parsed: &ParsedCommandLine, command: &TokenCommand) -> Result<(), ServerError> {
    let paths = config::token_files(parsed)?;
    match command {
        TokenCommand::Add { name, role } => {
            let path = only(&paths)?;
            let secret = add(path, name, *role)?;
            let shown = path.display();
            print(&format!("{secret}\n")).inspect_err(|_| {
                remark(&format!("the secret is lost: delete the line of `{name}` in {shown}"));
            })?;
            remark(&format!(
                "token `{name}` of role {role} is in {shown}, by its hash: this is the only copy of the secret. A server \
                 that runs with the file takes it within seconds, unless a worker has that name (its log says so)"
            ));
            Ok(())
        }
        TokenCommand::Hash if paths.is_empty() => Err(none_named()),
        TokenCommand::Hash => paths.iter().try_for_each(|path| {
            let count = hash(path)?;
            print(&format!("{}: secrets replaced by their hashes: {count}\n", path.display()))?;
            if count > 0 {
                remark(
                    "a secret that a person chose can be found from its hash by trying: keep the file to its owner, or \
                     make new tokens by `slackwaterd token add`",
                );
            }
            Ok(())
        }),
    }
}

/// The one file that is named.
fn only(paths: &[PathBuf]) -> Result<&Path, ServerError> {
    match paths {
        [] => Err(none_named()),
        [path] => Ok(path),
        _ => {
            let names = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
            let expected = "name the file to add to by --token-file".to_owned();
            let (key, got) = ("token-file", names.join(", "));
            Err(ConfigError::Value { key, got, expected }.into())
        }
    }
}

fn none_named() -> ServerError {
    ConfigError::Missing { key: "token-file", variable: "SLACKWATER_TOKEN_FILE".to_owned() }.into()
}

/// Adds a token to a file, which is made if it is not there; returns the secret.
fn add(path: &Path, name: &str, role: Role) -> Result<String, ServerError> {
    check_name(name)?;
    let secret = new_secret().map_err(|source| failed(path, source))?;
    let token = Token { name: name.to_owned(), role, secret: Secret::new(&secret) };
    let (file, is_new) = open_to_append(path).map_err(|source| failed(path, source))?;
    let added = append(&file, path, &token);
    // Not if another command wrote to it first.
    if added.is_err() && is_new && file.metadata().is_ok_and(|found| found.len() == 0) {
        let _ = std::fs::remove_file(path);
    }
    added?;
    if is_new {
        data_file::sync(directory_of(path)).map_err(|source| failed(path, source))?;
    }
    Ok(secret)
}

/// Opens a file, locked against other commands, and says whether it was made.
fn open_to_append(path: &Path) -> io::Result<(File, bool)> {
    let made = OpenOptions::new().append(true).create_new(true).mode(NEW_FILE_MODE).open(path);
    match made {
        Ok(file) => {
            file.set_permissions(PermissionsExt::from_mode(NEW_FILE_MODE))?;
            file.lock()?;
            return Ok((file, true));
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    Ok((open_locked(path, OpenOptions::new().append(true))?, false))
}

/// Opens the file that is there once no other command has it.
fn open_locked(path: &Path, how: &OpenOptions) -> io::Result<File> {
    loop {
        let file = how.open(path)?;
        file.lock()?;
        // A command that had the lock may have put another file in its place.
        let (locked, there) = (file.metadata()?, path.metadata()?);
        if (locked.dev(), locked.ino()) == (there.dev(), there.ino()) {
            return Ok(file);
        }
    }
}

/// Appends the line of a token, or leaves the file as it is.
fn append(mut file: &File, path: &Path, token: &Token) -> Result<(), ServerError> {
    let text = text_file::read_text(path)?;
    // What stands there has to be right as well, before the file is touched.
    let tokens = tokens::parse(path, &text)?;
    if tokens.iter().any(|other| other.name == token.name) {
        let expected = format!(
            "{} has a token of that name: delete its line first, or choose another name",
            path.display()
        );
        return Err(ConfigError::Value { key: NAME_KEY, got: token.name.clone(), expected }.into());
    }
    let mut line = tokens::line(token);
    if !text.is_empty() && !text.ends_with('\n') {
        line.insert(0, '\n');
    }
    tokens::parse(path, &format!("{text}{line}"))?;
    let length = file.metadata().map_err(|source| failed(path, source))?.len();
    file.write_all(line.as_bytes()).and_then(|()| file.sync_all()).map_err(|source| {
        // Not by half, and not with a secret that was not printed.
        let _ = file.set_len(length);
        failed(path, source)
    })
}

/// A name that is one word of a line, and can stand in logs.
fn check_name(name: &str) -> Result<(), ServerError> {
    let is_word = name.bytes().all(|byte| byte.is_ascii_graphic()) && !name.starts_with('#');
    if is_word && (1..=NAME_BYTES_MAX).contains(&name.len()) {
        return Ok(());
    }
    let expected =
        format!("a name has 1 to {NAME_BYTES_MAX} visible ASCII characters, and no # in front");
    let got = name.escape_debug().to_string();
    Err(ConfigError::Value { key: NAME_KEY, got, expected }.into())
}

pub(crate) fn new_secret() -> io::Result<String> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{SECRET_PREFIX}{digits}"))
}

/// Puts hashes in the place of the secrets of a file; returns how many there were.
fn hash(path: &Path) -> Result<usize, ServerError> {
    // So that no line comes between the reading and the writing.
    let _locked = open_locked(path, OpenOptions::new().read(true))
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    let (text, count) = tokens::hashed(path, &text_file::read_text(path)?)?;
    if count > 0 {
        data_file::replace_alike(path, text.as_bytes()).map_err(|source| failed(path, source))?;
    }
    Ok(count)
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn failed(path: &Path, source: io::Error) -> ServerError {
    ServerError::TokenFile { path: path.to_owned(), source }
}

fn print(text: &str) -> Result<(), ServerError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(ServerError::Output)
}

fn remark(text: &str) {
    // Nothing can be done when standard error is gone.
    let _ = writeln!(io::stderr(), "slackwaterd: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_token_is_added_by_its_hash() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let first = add(&path, "ops", Role::Admin).unwrap();
        assert_eq!(mode(&path), 0o644, "whatever the umask");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let second = add(&path, "node-7", Role::Worker).unwrap();
        assert!(first.starts_with(SECRET_PREFIX) && first != second);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&first) && !text.contains(&second), "{text}");
        let tokens = tokens::parse(&path, &text).unwrap();
        let hashes = [&first, &second].map(|secret| Secret::new(secret).hash());
        assert_eq!(tokens.iter().map(|token| token.secret.hash()).collect::<Vec<_>>(), hashes);
        assert_eq!((tokens[0].role, tokens[1].role), (Role::Admin, Role::Worker));
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn what_cannot_be_added_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        for name in ["", "a b", "#a", "a\n", "\u{e9}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            add(&path, name, Role::Admin).unwrap_err();
        }
        assert!(!path.exists());
        // No end of the last line, and a name that is taken.
        let before = "ops admin 0123456789abcdef".to_owned();
        std::fs::write(&path, &before).unwrap();
        let taken = add(&path, "ops", Role::Worker).unwrap_err().to_string();
        assert!(taken.contains("delete its line"), "{taken}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
        add(&path, "other", Role::Worker).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
        std::fs::write(&path, "no token\n").unwrap();
        add(&path, "ops", Role::Worker).unwrap_err();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "no token\n");
    }

    #[test]
    fn commands_at_once_lose_no_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, "plain admin 0123456789abcdef\n").unwrap();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let path = &path;
                scope.spawn(move || add(path, &format!("t{number}"), Role::Worker).unwrap());
                scope.spawn(move || hash(path).unwrap());
            }
        });
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(tokens::parse(&path, &text).unwrap().len(), 9, "{text}");
        assert!(!text.contains("0123456789abcdef"), "{text}");
    }

    #[test]
    fn hashes_are_put_where_secrets_were() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("tokens"), directory.path().join("link"));
        std::fs::write(&path, "# ours\nops admin 0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(hash(&link).unwrap(), 1);
        assert!(link.is_symlink());
        assert_eq!(mode(&path), 0o640);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("# ours\nops admin blake3:"), "{text}");
        assert_eq!(hash(&path).unwrap(), 0);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn one_file_is_added_to() {
        let paths = ["a", "b"].map(PathBuf::from);
        assert_eq!(only(&paths[..1]).unwrap(), Path::new("a"));
        let error = only(&paths).unwrap_err().to_string();
        assert!(error.contains("a, b"), "{error}");
        let error = only(&[]).unwrap_err().to_string();
        assert!(error.contains("--token-file"), "{error}");
    }
}

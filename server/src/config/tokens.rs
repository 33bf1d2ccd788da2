//! The token files of the REST API.
//!
//! ```text
//! # NAME   ROLE       blake3:HASH or SECRET
//! ops      admin      blake3:8f2c...
//! grafana  read-only  7be2...
//! ```
//! The hash of a random secret is of no use to those who read it. Such a line is what `slackwaterd token add` writes; `slackwaterd
//! token hash` puts hashes in the place of secrets.
//!
//! Invariants: no error and no text shows a secret. A secret never begins with `blake3:`, as no bearer token can have a
//! colon (RFC 6750 section 2.1).

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use slackwater_api::worker::SecretHash;
use slackwater_api::{Role, Secret, Token};

use super::error::{ConfigError, Faults};
use super::strength::weakness;
use super::text_file::read_text;

/// Shortest secret of a token: 16 characters, which at the 64 letters of base64 are 96 bits.
pub const TOKEN_CHARACTERS_MIN: usize = 16;

/// Most tokens in all files: one for each worker of a large cluster. Each is compared with
/// every request's, so the number bounds that work.
pub const TOKENS_MAX: usize = 1024;

/// Faults of token files after which no more is read: one of another kind has a fault in each line.
const FAULTS_MAX: usize = 16;

/// The file of the token that a server without token files makes, in its data directory.
pub(crate) const ADMIN_TOKEN_FILE: &str = "admin-token";

/// What stands before the hash of a secret.
const HASH_PREFIX: &str = "blake3:";

/// A token file, and what it is to be warned of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFile {
    /// Where it is.
    pub path: PathBuf,
    /// How many of its lines hold a secret and not the hash of one.
    pub plain_secrets: usize,
}

/// The tokens of all files, and the files.
///
/// # Errors
/// A file cannot be read, has a line that is no token, or all have too many.
pub(crate) fn read(paths: &[PathBuf]) -> Result<(Vec<Token>, Vec<TokenFile>), ConfigError> {
    let mut known = Known::default();
    let mut files = Vec::new();
    for path in paths {
        if known.faults.count() >= FAULTS_MAX {
            break;
        }
        let Some(text) = known.faults.keep(read_text(path)) else {
            continue;
        };
        let before = (known.tokens.len(), known.faults.count());
        let plain_secrets = known.add(path, &text);
        if (known.tokens.len(), known.faults.count()) == before {
            let empty = ConfigError::Empty { path: path.clone(), what: "token" };
            known.faults.keep::<()>(Err(empty));
        }
        files.push(TokenFile { path: path.clone(), plain_secrets });
    }
    known.faults.into_result()?;
    Ok((known.tokens, files))
}

/// The tokens of the text of one file. It may have none.
///
/// # Errors
/// A line is no token, two have one name, or there are too many.
pub(crate) fn parse(path: &Path, text: &str) -> Result<Vec<Token>, ConfigError> {
    let mut known = Known::default();
    known.add(path, text);
    known.faults.into_result()?;
    Ok(known.tokens)
}

/// The tokens of the files so far.
#[derive(Default)]
struct Known {
    tokens: Vec<Token>,
    names: HashSet<String>,
    faults: Faults,
}

impl Known {
    /// Adds the tokens of one file; returns how many of its secrets are plain.
    fn add(&mut self, path: &Path, text: &str) -> usize {
        let mut plain_secrets = 0;
        for (index, line) in text.lines().enumerate() {
            let (path, line_number) = (path.to_owned(), index + 1);
            let fault = |reason| ConfigError::Token { path, line: line_number, reason };
            let outcome = self.add_line(line).map_err(fault);
            plain_secrets += usize::from(self.faults.keep(outcome) == Some(true));
            if self.faults.count() >= FAULTS_MAX {
                break;
            }
        }
        plain_secrets
    }

    /// Whether the line has a token with a plain secret.
    fn add_line(&mut self, line: &str) -> Result<bool, String> {
        let Some(line) = Line::of(line)? else {
            return Ok(false);
        };
        let token = line.token()?;
        if !self.names.insert(token.name.clone()) {
            return Err(format!("the name `{}` is taken", token.name));
        }
        if self.tokens.len() == TOKENS_MAX {
            return Err(format!("more than {TOKENS_MAX} tokens"));
        }
        self.tokens.push(token);
        Ok(line.is_plain())
    }
}

/// The text of a token file with hashes in the place of its secrets, and how many there were. Comments, blanks and the
/// order stay.
///
/// # Errors
/// A line is no token.
pub(crate) fn hashed(path: &Path, text: &str) -> Result<(String, usize), ConfigError> {
    let mut count = 0;
    let mut result = String::with_capacity(text.len());
    for (index, whole) in text.split_inclusive('\n').enumerate() {
        let fault =
            |reason: String| ConfigError::Token { path: path.to_owned(), line: index + 1, reason };
        let line = Line::of(whole).map_err(fault)?;
        let token = line.as_ref().map(Line::token).transpose().map_err(fault)?;
        match line.zip(token) {
            Some((line, token)) if line.is_plain() => {
                let end = whole.trim_end().len();
                let (before, after) = (&whole[..end - line.secret.len()], &whole[end..]);
                result.extend([before, &hash_text(&token.secret), after]);
                count += 1;
            }
            _ => result.push_str(whole),
        }
    }
    Ok((result, count))
}

/// A line of this token, without its secret.
pub(crate) fn line(token: &Token) -> String {
    format!("{} {} {}\n", token.name, token.role, hash_text(&token.secret))
}

fn hash_text(secret: &Secret) -> String {
    let digits: String =
        secret.hash().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{HASH_PREFIX}{digits}")
}

/// A line with a token. Its errors show no part that may be a secret.
struct Line<'a> {
    name: &'a str,
    role: &'a str,
    secret: &'a str,
}

impl<'a> Line<'a> {
    /// The parts of a line; none if it is blank or a comment.
    fn of(line: &'a str) -> Result<Option<Self>, String> {
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some(name), Some(role), Some(secret), None) => Ok(Some(Self { name, role, secret })),
            _ => Err(format!("got {} words", line.split_whitespace().count())),
        }
    }

    fn is_plain(&self) -> bool {
        !self.secret.starts_with(HASH_PREFIX)
    }

    fn token(&self) -> Result<Token, String> {
        // Its own error shows the word, which is the secret where the role was forgotten.
        let role: Role = self
            .role
            .parse()
            .map_err(|_| "the role is none of admin, worker and read-only".to_owned())?;
        let secret = match self.secret.strip_prefix(HASH_PREFIX) {
            Some(digits) => {
                Secret::from_hash(digits.parse::<SecretHash>().map_err(|error| error.to_string())?)
            }
            None => plain(self.secret)?,
        };
        Ok(Token { name: self.name.to_owned(), role, secret })
    }
}

/// The secret that is this text.
///
/// # Errors
/// It can be none; the error does not show it.
pub(crate) fn plain(text: &str) -> Result<Secret, String> {
    if let Some(reason) = weakness(text, TOKEN_CHARACTERS_MIN) {
        return Err(format!(
            "the secret is weak: {reason} (`openssl rand -hex 32` makes a good one, and for this release `slackwaterd token add`)"
        ));
    }
    if !text.bytes().all(is_bearer_byte) {
        return Err("the secret has a character that a bearer token cannot hold".to_owned());
    }
    Ok(Secret::new(text))
}

/// Whether the byte may stand in a bearer token (RFC 6750 section 2.1 `b64token`).
const fn is_bearer_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'+' | b'/' | b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn parsed(text: &str) -> Result<Vec<Token>, ConfigError> {
        parse(Path::new("tokens"), text)
    }

    fn fault_line(text: &str) -> usize {
        let error = parsed(text).unwrap_err();
        assert!(!error.to_string().contains("0123456789"), "{error}");
        match error {
            ConfigError::Token { line, .. } => line,
            other => panic!("expected a token error, got {other}"),
        }
    }

    fn hash_of(text: &str) -> String {
        format!("blake3:{}", hash_digits(text))
    }

    fn hash_digits(text: &str) -> String {
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }

    #[test]
    fn reads_names_roles_and_secrets() {
        let text =
            format!("# ours\n\nops admin {SECRET}\n w\tworker\t{SECRET}= \nro read-only {SECRET}");
        let tokens = parsed(&text).unwrap();
        assert_eq!(
            tokens.iter().map(|t| (t.name.as_str(), t.role)).collect::<Vec<_>>(),
            [("ops", Role::Admin), ("w", Role::Worker), ("ro", Role::ReadOnly)]
        );
    }

    #[test]
    fn a_hash_stands_for_its_secret() {
        let [plain, hashed] = [SECRET.to_owned(), hash_of(SECRET)]
            .map(|secret| parsed(&format!("ops admin {secret}\n")).unwrap().remove(0));
        assert_eq!(plain.secret.hash(), hashed.secret.hash());
        assert_eq!(line(&plain), format!("ops admin {}\n", hash_of(SECRET)));
    }

    #[test]
    fn faults_are_placed_and_show_no_secret() {
        assert_eq!(fault_line(&format!("ops admin {SECRET}\nx root {SECRET}")), 2);
        assert_eq!(fault_line(&format!("admin {SECRET}")), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET} more")), 1);
        assert_eq!(fault_line("a admin 0123456789abcde"), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET}\"")), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET}\n\na worker {SECRET}")), 3);
        for hash in
            ["blake3:", "blake3:0123456789", &hash_of(SECRET).to_uppercase(), "BLAKE3:0123456789ab"]
        {
            assert_eq!(fault_line(&format!("\na admin {hash}")), 2, "{hash}");
        }
    }

    #[test]
    fn the_faults_of_all_lines_are_told() {
        let error = parsed(&format!(
            "a admin short\nb admin {SECRET}\nc root {SECRET}\nb admin {SECRET}\n"
        ));
        let error = error.unwrap_err().to_string();
        let lines: Vec<_> = error.lines().collect();
        assert_eq!(lines.len(), 3, "{error}");
        for (line, place) in lines.iter().zip(["tokens:1: ", "tokens:3: ", "tokens:4: "]) {
            assert!(line.starts_with(place), "{error}");
        }
        let error = parsed(&"what is this\n".repeat(1000)).unwrap_err().to_string();
        assert_eq!(error.lines().count(), FAULTS_MAX, "{error}");
    }

    #[test]
    fn what_can_be_guessed_is_refused() {
        for weak in ["aaaaaaaaaaaaaaaa", "1234512345123451", "passwordpassword"] {
            let error = parsed(&format!("ops admin {weak}")).unwrap_err().to_string();
            assert!(error.contains("guessed") && !error.contains(weak), "{error}");
        }
        assert_eq!(parsed("ops admin 1234561234561235").unwrap().len(), 1);
    }

    #[test]
    fn hashes_take_the_place_of_secrets_and_nothing_else_changes() {
        let hash = hash_of(SECRET);
        let text = format!(
            "# {SECRET}\n\n  ops\tadmin  {SECRET} \r\nhas admin {hash}\nlast {role} {SECRET}",
            role = "read-only"
        );
        let (result, count) = hashed(Path::new("t"), &text).unwrap();
        let expected = format!(
            "# {SECRET}\n\n  ops\tadmin  {hash} \r\nhas admin {hash}\nlast read-only {hash}"
        );
        assert_eq!((result.as_str(), count), (expected.as_str(), 2));
        assert_eq!(hashed(Path::new("t"), &result).unwrap(), (expected, 0));
        let (before, after) = (parsed(&text).unwrap(), parsed(&result).unwrap());
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before.secret.hash(), after.secret.hash());
        }
        assert!(hashed(Path::new("t"), "ops admin short").is_err());
    }

    #[test]
    fn number_is_bounded() {
        let mut text = String::new();
        for index in 0..TOKENS_MAX {
            text.push_str(&format!("t{index} worker {SECRET}\n"));
        }
        assert_eq!(parsed(&text).unwrap().len(), TOKENS_MAX);
        text.push_str(&format!("over worker {SECRET}\n"));
        assert_eq!(fault_line(&text), TOKENS_MAX + 1);
    }

    #[test]
    fn plain_secrets_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let text = format!("a admin {SECRET}\nb admin {}\nc worker {SECRET}\n", hash_of("x"));
        std::fs::write(&path, text).unwrap();
        let (tokens, files) = read(std::slice::from_ref(&path)).unwrap();
        assert_eq!(tokens.len(), 3);
        assert_eq!(files, [TokenFile { path, plain_secrets: 2 }]);
    }

    #[test]
    fn a_file_without_tokens_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, "# none yet\n").unwrap();
        assert!(matches!(read(&[path]), Err(ConfigError::Empty { .. })));
    }
}

//! The token file of the REST API.
//!
//! ```text
//! # NAME   ROLE       SECRET
//! ops      admin      0f3c...
//! node-7   worker     91aa...
//! grafana  read-only  7be2...
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use slackwater_api::{Role, Secret, Token};

use super::error::ConfigError;
use super::text_file::read_text;

/// Shortest secret of a token: 16 characters, which at the 64 letters of base64 are 96 bits.
pub const TOKEN_CHARACTERS_MIN: usize = 16;

/// Most tokens in all files: one for each worker of a large cluster. Each is compared with
/// every request's, so the number bounds that work.
pub const TOKENS_MAX: usize = 1024;

/// The tokens of all files.
///
/// # Errors
/// A file cannot be read, has a line that is no token, or all have too many.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Token>, ConfigError> {
    let mut tokens = Vec::new();
    let mut names = HashSet::new();
    for path in paths {
        let before = tokens.len();
        read_into(path, &read_text(path)?, &mut names, &mut tokens)?;
        if tokens.len() == before {
            return Err(ConfigError::Empty { path: path.clone(), what: "token" });
        }
    }
    Ok(tokens)
}

/// Adds the tokens of one file.
fn read_into(
    path: &Path,
    text: &str,
    names: &mut HashSet<String>,
    tokens: &mut Vec<Token>,
) -> Result<(), ConfigError> {
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let fault =
            |reason: String| ConfigError::Token { path: path.to_owned(), line: index + 1, reason };
        let token = parse_line(line).map_err(fault)?;
        if !names.insert(token.name.clone()) {
            return Err(fault(format!("the name `{}` is taken", token.name)));
        }
        if tokens.len() == TOKENS_MAX {
            return Err(fault(format!("more than {TOKENS_MAX} tokens")));
        }
        tokens.push(token);
    }
    Ok(())
}

/// The token that stands on one line; the error shows no part that may be a secret.
fn parse_line(line: &str) -> Result<Token, String> {
    let mut words = line.split_whitespace();
    let (Some(name), Some(role), Some(secret), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        let got = line.split_whitespace().count();
        return Err(format!("got {got} words"));
    };
    // Its own error shows the word, which is the secret where the role was forgotten.
    let role: Role =
        role.parse().map_err(|_| "the role is none of admin, worker and read-only".to_owned())?;
    if secret.len() < TOKEN_CHARACTERS_MIN {
        return Err(format!(
            "the secret has {} characters, at least {TOKEN_CHARACTERS_MIN} are needed",
            secret.len()
        ));
    }
    if !secret.bytes().all(is_bearer_byte) {
        return Err("the secret has a character that a bearer token cannot hold".to_owned());
    }
    Ok(Token { name: name.to_owned(), role, secret: Secret::new(secret) })
}

/// Whether the byte may stand in a bearer token (RFC 6750 section 2.1 `b64token`).
const fn is_bearer_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'+' | b'/' | b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn parse(text: &str) -> Result<Vec<Token>, ConfigError> {
        let mut tokens = Vec::new();
        read_into(Path::new("tokens"), text, &mut HashSet::new(), &mut tokens)?;
        Ok(tokens)
    }

    fn fault_line(text: &str) -> usize {
        let error = parse(text).unwrap_err();
        assert!(!error.to_string().contains("0123456789"), "{error}");
        match error {
            ConfigError::Token { line, .. } => line,
            other => panic!("expected a token error, got {other}"),
        }
    }

    #[test]
    fn reads_names_roles_and_secrets() {
        let text =
            format!("# ours\n\nops admin {SECRET}\n w\tworker\t{SECRET}= \nro read-only {SECRET}");
        let tokens = parse(&text).unwrap();
        assert_eq!(
            tokens.iter().map(|t| (t.name.as_str(), t.role)).collect::<Vec<_>>(),
            [("ops", Role::Admin), ("w", Role::Worker), ("ro", Role::ReadOnly)]
        );
    }

    #[test]
    fn faults_are_placed_and_show_no_secret() {
        assert_eq!(fault_line(&format!("ops admin {SECRET}\nx root {SECRET}")), 2);
        assert_eq!(fault_line(&format!("admin {SECRET}")), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET} more")), 1);
        assert_eq!(fault_line("a admin 0123456789abcde"), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET}\"")), 1);
        assert_eq!(fault_line(&format!("a admin {SECRET}\n\na worker {SECRET}")), 3);
    }

    #[test]
    fn number_is_bounded() {
        let mut text = String::new();
        for index in 0..TOKENS_MAX {
            text.push_str(&format!("t{index} worker {SECRET}\n"));
        }
        assert_eq!(parse(&text).unwrap().len(), TOKENS_MAX);
        text.push_str(&format!("over worker {SECRET}\n"));
        assert_eq!(fault_line(&text), TOKENS_MAX + 1);
    }

    #[test]
    fn a_file_without_tokens_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        std::fs::write(&path, "# none yet\n").unwrap();
        assert!(matches!(read(&[path]), Err(ConfigError::Empty { .. })));
    }
}

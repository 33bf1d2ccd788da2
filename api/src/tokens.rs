//! The tokens of the configuration: what they are, and which of them are taken now.
//!
//! ```text
//! token files --> Vec<Token> --replace--> Tokens <--find-- each call with a token
//!                                |
//!                             Workers: no worker has the name of a token
//! ```
//! Invariants: secrets are kept as hashes. A server that has tokens never loses the last one, as without any it lets in
//! all who can connect. A presented secret is hashed once and compared with every token in constant time, so that the
//! time of an answer tells neither how much of a guess was right nor whose token it resembles.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;

use parking_lot::RwLock;
use subtle::{Choice, ConstantTimeEq};

use crate::token_id::TokenId;
use crate::worker::{SecretHash, WorkerName};
use crate::workers::Workers;

/// What a token allows; each role allows what the ones before it allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Looks, changes nothing.
    ReadOnly,
    /// Works with files, snapshots and clones.
    Worker,
    /// Everything.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::Worker => "worker",
            Self::Admin => "admin",
        })
    }
}

/// The text is not a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("role `{}` is not known, expected read-only, worker or admin", got.escape_debug())]
pub struct RoleParseError {
    /// The text.
    pub got: String,
}

impl FromStr for Role {
    type Err = RoleParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "read-only" => Ok(Self::ReadOnly),
            "worker" => Ok(Self::Worker),
            "admin" => Ok(Self::Admin),
            _ => Err(RoleParseError { got: text.to_owned() }),
        }
    }
}

/// A secret, kept as its BLAKE3 hash. Its `Debug` form shows nothing.
#[derive(Clone, Copy, Debug)]
pub struct Secret(SecretHash);

impl Secret {
    /// The secret that is this text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self::of(text.as_bytes())
    }

    /// The secret with this BLAKE3 hash: for configurations that hold no secrets.
    #[must_use]
    pub const fn from_hash(hash: SecretHash) -> Self {
        Self(hash)
    }

    /// Its hash.
    #[must_use]
    pub const fn hash(&self) -> SecretHash {
        self.0
    }

    fn of(bytes: &[u8]) -> Self {
        Self(SecretHash::from_bytes(*blake3::hash(bytes).as_bytes()))
    }

    /// Whether `presented` is the secret, in a time that depends on its length only.
    pub(crate) fn matches(&self, presented: &[u8]) -> Choice {
        self.is(&Self::of(presented))
    }

    /// Whether both are the same, in constant time.
    fn is(&self, other: &Self) -> Choice {
        self.0.as_bytes().ct_eq(other.0.as_bytes())
    }
}

/// A bearer token that is let in.
#[derive(Clone, Debug)]
pub struct Token {
    /// Whose it is; shown in logs, and kept with what it registers; never secret.
    pub name: String,
    /// What it allows.
    pub role: Role,
    /// What the caller sends as `Authorization: Bearer SECRET`.
    pub secret: Secret,
}

impl Token {
    /// Its id. It is seen by others, and without the key, secrets that people choose could be found from it by trying.
    fn id(&self, key: &[u8; 32]) -> TokenId {
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(self.secret.hash().as_bytes());
        hasher.update(self.name.as_bytes());
        let mut id = [0; TokenId::BYTES];
        hasher.finalize_xof().fill(&mut id);
        TokenId::from_bytes(id)
    }

    fn is(&self, other: &Self) -> bool {
        self.name == other.name
            && self.role == other.role
            && bool::from(self.secret.is(&other.secret))
    }
}

/// Why tokens are not taken in the place of others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokensError {
    /// No token would be left.
    #[error("no token is left, and without tokens the API would let everybody in: keep one")]
    NoneLeft,
    /// What a worker and the token register could not be told apart.
    #[error("worker `{name}` has the name of a token: give the token another name")]
    NameOfWorker {
        /// The name.
        name: WorkerName,
    },
}

/// What a replacement changed, by the names of the tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenChanges {
    /// Tokens that were not there.
    pub added: Vec<String>,
    /// Tokens with another role or secret than before.
    pub changed: Vec<String>,
    /// Tokens that are refused from now on.
    pub removed: Vec<String>,
}

impl TokenChanges {
    /// Whether all is as it was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn between(before: &[Token], after: &[Token]) -> Self {
        fn by_name(tokens: &[Token]) -> HashMap<&str, &Token> {
            tokens.iter().map(|token| (token.name.as_str(), token)).collect()
        }
        let (earlier, later) = (by_name(before), by_name(after));
        let mut changes = Self::default();
        for token in after {
            match earlier.get(token.name.as_str()) {
                None => changes.added.push(token.name.clone()),
                Some(earlier) if !earlier.is(token) => changes.changed.push(token.name.clone()),
                Some(_) => {}
            }
        }
        let removed = before.iter().filter(|token| !later.contains_key(token.name.as_str()));
        changes.removed = removed.map(|token| token.name.clone()).collect();
        changes
    }
}

/// The tokens that are taken now.
#[derive(Default)]
pub struct Tokens(RwLock<Table>);

#[derive(Default)]
struct Table {
    tokens: Vec<Token>,
    /// Of those that may mount. Each call of NFS looks here.
    mounting: HashSet<TokenId>,
    /// Of ids.
    key: [u8; 32],
}

impl Table {
    fn new(tokens: Vec<Token>, key: [u8; 32]) -> Self {
        let may_mount = tokens.iter().filter(|token| token.role >= Role::Worker);
        let mounting = may_mount.map(|token| token.id(&key)).collect();
        Self { tokens, mounting, key }
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("count", &self.0.read().tokens.len()).finish()
    }
}

impl Tokens {
    /// These, with ids that are the same in each process: for tests and checks. Their names are unique.
    #[must_use]
    pub fn new(tokens: Vec<Token>) -> Self {
        Self::with_key(tokens, &[])
    }

    /// These, with ids that are the same for the same secret of the server.
    #[must_use]
    pub fn with_key(tokens: Vec<Token>, secret: &[u8]) -> Self {
        let key = blake3::derive_key("slackwater 2026-11 token id", secret);
        Self(RwLock::new(Table::new(tokens, key)))
    }

    /// Takes these from now on, and those before no longer. Calls that were let in go on. May wait for the file of
    /// workers.
    ///
    /// # Errors
    /// None would be left, or a worker has the name of one; then those before are still taken.
    pub fn replace(
        &self,
        tokens: Vec<Token>,
        workers: &Workers,
    ) -> Result<TokenChanges, TokensError> {
        // One replacement at a time; calls wait for the last step alone.
        workers.with_names(|names| {
            let changes = {
                let current = self.0.read();
                if tokens.is_empty() && !current.tokens.is_empty() {
                    return Err(TokensError::NoneLeft);
                }
                TokenChanges::between(&current.tokens, &tokens)
            };
            refuse_names_of_workers(&tokens, names)?;
            let key = self.0.read().key;
            let table = Table::new(tokens, key);
            *self.0.write() = table;
            Ok(changes)
        })
    }

    /// Refuses tokens that have the name of a worker.
    ///
    /// # Errors
    /// `NameOfWorker`.
    pub fn check_names(&self, workers: &Workers) -> Result<(), TokensError> {
        workers.with_names(|names| refuse_names_of_workers(&self.0.read().tokens, names))
    }

    /// Whether the token with this id is there, and may mount the whole export; without tokens all may.
    #[must_use]
    pub fn may_mount(&self, id: TokenId) -> bool {
        let table = self.0.read();
        table.mounting.contains(&id) || (id == TokenId::NONE && table.tokens.is_empty())
    }

    /// Whether there is none, so that callers need none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.read().tokens.is_empty()
    }

    /// Whether a token has this name.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.0.read().tokens.iter().any(|token| token.name == name)
    }

    /// The token with the presented secret, and its id. All are compared, whichever matches.
    pub(crate) fn find(&self, presented: &[u8]) -> Option<(Token, TokenId)> {
        let presented = Secret::of(presented);
        let table = self.0.read();
        let found = table.tokens.iter().fold(None, |found, token| {
            if bool::from(token.secret.is(&presented)) { Some(token) } else { found }
        });
        found.map(|token| (token.clone(), token.id(&table.key)))
    }
}

fn refuse_names_of_workers(tokens: &[Token], names: &[WorkerName]) -> Result<(), TokensError> {
    let of_tokens: HashSet<&str> = tokens.iter().map(|token| token.name.as_str()).collect();
    match names.iter().find(|name| of_tokens.contains(name.as_str())) {
        Some(name) => Err(TokensError::NameOfWorker { name: name.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Timestamp;

    fn token(name: &str, role: Role, secret: &str) -> Token {
        Token { name: name.to_owned(), role, secret: Secret::new(secret) }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_secret_can_be_given_as_its_hash_and_is_never_shown() {
        let hash: SecretHash = blake3::hash(b"abc").to_hex().parse().unwrap();
        let secret = Secret::from_hash(hash);
        assert!(bool::from(secret.matches(b"abc")) && secret.hash() == hash);
        assert!(!bool::from(Secret::new("abc").matches(b"abd")));
        let shown = format!("{secret:?} {:?}", token("ops", Role::Admin, "abc"));
        assert!(!shown.contains("abc") && !shown.contains(hash_text("abc").as_str()), "{shown}");
    }

    fn hash_text(secret: &str) -> String {
        blake3::hash(secret.as_bytes()).to_hex().to_string()
    }

    #[test]
    fn a_hash_lets_no_caller_in() {
        let tokens = Tokens::new(vec![token("ops", Role::Admin, "s")]);
        assert_eq!(tokens.find(b"s").unwrap().0.name, "ops");
        for text in [hash_text("s"), format!("blake3:{}", hash_text("s")), String::new()] {
            assert!(tokens.find(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn a_replacement_is_whole_and_says_what_changed() {
        let tokens = Tokens::new(vec![
            token("gone", Role::Admin, "1"),
            token("same", Role::Worker, "2"),
            token("role", Role::Worker, "3"),
            token("secret", Role::Worker, "4"),
        ]);
        let next = vec![
            token("secret", Role::Worker, "5"),
            token("new", Role::ReadOnly, "6"),
            token("same", Role::Worker, "2"),
            token("role", Role::Admin, "3"),
        ];
        let changes = tokens.replace(next.clone(), &Workers::default()).unwrap();
        assert_eq!(changes.added, names(&["new"]));
        assert_eq!(changes.changed, names(&["secret", "role"]));
        assert_eq!(changes.removed, names(&["gone"]));
        assert!(tokens.find(b"1").is_none() && tokens.find(b"4").is_none());
        assert_eq!(tokens.find(b"3").unwrap().0.role, Role::Admin);
        assert!(tokens.replace(next, &Workers::default()).unwrap().is_empty());
    }

    #[test]
    fn what_is_refused_leaves_the_tokens_before() {
        let tokens = Tokens::new(vec![token("ops", Role::Admin, "1")]);
        let workers = Workers::default();
        let name: WorkerName = "node-7".parse().unwrap();
        let (now, later) = (Timestamp::from_nanos(1), Timestamp::from_nanos(u64::MAX));
        workers.add(&name, None, later, now, || false).unwrap();
        assert_eq!(tokens.replace(Vec::new(), &workers), Err(TokensError::NoneLeft));
        let next = vec![token("ops", Role::Admin, "2"), token("node-7", Role::Worker, "3")];
        let refused = Err(TokensError::NameOfWorker { name });
        assert_eq!(tokens.replace(next.clone(), &workers), refused);
        assert!(tokens.find(b"1").is_some() && tokens.find(b"2").is_none());
        assert!(tokens.check_names(&workers).is_ok());
        // And the other way round.
        let named = || tokens.has_name("ops");
        let taken = workers.add(&"ops".parse().unwrap(), None, later, now, named).unwrap_err();
        assert!(taken.to_string().contains("token"), "{taken}");
        assert_eq!(Tokens::new(next).check_names(&workers), refused.map(|_| ()));
        // A server on loopback may have been without.
        assert!(Tokens::default().replace(Vec::new(), &workers).unwrap().is_empty());
    }

    #[test]
    fn an_id_is_of_one_secret_and_name_and_of_a_role_that_may_mount() {
        let tokens = Tokens::with_key(
            vec![
                token("ops", Role::Admin, "1"),
                token("node", Role::Worker, "2"),
                token("viewer", Role::ReadOnly, "3"),
            ],
            b"key",
        );
        let id = |secret: &str| tokens.find(secret.as_bytes()).unwrap().1;
        let (ops, node) = (id("1"), id("2"));
        assert!(tokens.may_mount(ops) && tokens.may_mount(node) && ops != node);
        assert!(!tokens.may_mount(id("3")) && !tokens.may_mount(TokenId::NONE));
        // With another key, or another name, it is another one.
        for (name, key, is_same) in
            [("ops", b"key", true), ("ops", b"KEY", false), ("oops", b"key", false)]
        {
            let others = Tokens::with_key(vec![token(name, Role::Admin, "1")], key);
            assert_eq!(others.may_mount(ops), is_same, "{name}");
        }
        // From the moment on in which it has another secret, or a role that may not.
        let next = vec![token("ops", Role::Admin, "4"), token("node", Role::ReadOnly, "2")];
        tokens.replace(next, &Workers::default()).unwrap();
        assert!(!tokens.may_mount(ops) && !tokens.may_mount(node));
        assert!(tokens.may_mount(tokens.find(b"4").unwrap().1));
        assert!(Tokens::default().may_mount(TokenId::NONE));
    }
}

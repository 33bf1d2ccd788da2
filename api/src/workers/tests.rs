//! Workers as they are added, join, change their credentials and are revoked; and a disk that fails.

use uuid::Uuid;

use super::*;
use crate::error::ProblemCode;
use crate::failure::Failure;

/// A file in memory, of a disk that can be full.
#[derive(Clone, Debug, Default)]
struct MemoryFile {
    content: Arc<Mutex<Option<Vec<u8>>>>,
    is_full: Arc<AtomicBool>,
    writes: Arc<AtomicU64>,
}

impl WorkersFile for MemoryFile {
    fn replace(&self, content: &[u8]) -> io::Result<()> {
        if self.is_full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.writes.fetch_add(1, Ordering::Relaxed);
        *self.content.lock() = Some(content.to_vec());
        Ok(())
    }
}

impl MemoryFile {
    fn open(&self) -> Workers {
        let content = self.content.lock().clone();
        Workers::open(content.as_deref(), Box::new(self.clone())).unwrap()
    }

    fn fill(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
    }

    fn text(&self) -> String {
        String::from_utf8(self.content.lock().clone().unwrap()).unwrap()
    }
}

const LATER: Timestamp = Timestamp::from_nanos(1000);

/// A credential that a test calls by a short name.
fn secret(text: &str) -> String {
    format!("{CREDENTIAL_PREFIX}{}", blake3::hash(text.as_bytes()).to_hex())
}

fn hash_of(text: &str) -> SecretHash {
    hash(secret(text).as_bytes())
}

fn joining(credential: &str) -> JoinWorker {
    JoinWorker { worker_id: Uuid::new_v4(), credential_blake3: hash_of(credential) }
}

/// Joins by a token.
fn join(
    workers: &Workers,
    text: &str,
    token: &str,
    joining: &JoinWorker,
) -> Result<Worker, WorkersError> {
    workers.join(&name(text), hash(token.as_bytes()), joining, false, at(2))
}

fn replace(workers: &Workers, text: &str, from: &str, to: &str) -> Result<Worker, WorkersError> {
    workers.replace_credential(&name(text), hash_of(from), hash_of(to), at(7))
}

fn revoke(workers: &Workers, text: &str) -> Result<(), WorkersError> {
    workers.revoke(&name(text))?;
    workers.keep_revocation(&name(text))
}

fn at(nanos: u64) -> Timestamp {
    Timestamp::from_nanos(nanos)
}

fn name(text: &str) -> WorkerName {
    text.parse().unwrap()
}

fn add(workers: &Workers, text: &str) -> String {
    workers.add(&name(text), None, LATER, at(1), || false).unwrap().1
}

/// Adds a worker that joins with this credential.
fn joined(workers: &Workers, text: &str, credential: &str) {
    let token = add(workers, text);
    join(workers, text, &token, &joining(credential)).unwrap();
}

fn bearer(workers: &Workers, credential: &str) -> Option<Bearer> {
    workers.identify(secret(credential).as_bytes(), at(5))
}

fn is_worker(workers: &Workers, credential: &str) -> bool {
    matches!(bearer(workers, credential), Some(Bearer::Worker { .. }))
}

fn code(error: WorkersError) -> ProblemCode {
    Failure::from(error).code()
}

#[test]
fn a_join_token_invites_one_machine_until_its_time_has_passed() {
    let file = MemoryFile::default();
    let workers = file.open();
    let (shown, token) = workers.add(&name("a"), None, LATER, at(1), || false).unwrap();
    assert_eq!((shown.join_token_expires_at, shown.joined_at), (Some(LATER), None));
    assert!(token.starts_with(JOIN_TOKEN_PREFIX) && token.len() == JOIN_TOKEN_PREFIX.len() + 64);
    assert!(!file.text().contains(&token), "the file has no secret");
    let invited = Bearer::Invited { name: name("a"), join_token: hash(token.as_bytes()) };
    // Also after a restart.
    for workers in [&workers, &file.open()] {
        assert_eq!(workers.identify(token.as_bytes(), at(999)).as_ref(), Some(&invited));
        assert_eq!(workers.identify(token.as_bytes(), LATER), None);
        let other = format!("{JOIN_TOKEN_PREFIX}{}", "0".repeat(64));
        assert_eq!(workers.identify(other.as_bytes(), at(5)), None);
    }
    let late = workers.join(&name("a"), hash(token.as_bytes()), &joining("c"), false, LATER);
    assert!(matches!(late, Err(WorkersError::Outdated { .. })), "{late:?}");
    assert_ne!(add(&workers, "b"), token);
    let again = workers.add(&name("a"), None, LATER, at(1), || false).unwrap_err();
    assert_eq!(code(again), ProblemCode::Exists);
}

#[test]
fn a_worker_joins_once_and_the_same_call_again_changes_nothing() {
    let file = MemoryFile::default();
    let workers = file.open();
    let (token, first) = (add(&workers, "a"), joining("one"));
    let shown = join(&workers, "a", &token, &first).unwrap();
    assert_eq!((shown.worker_id, shown.joined_at), (Some(first.worker_id), Some(at(2))));
    assert_eq!((shown.join_token_expires_at, shown.credential_since), (None, Some(at(2))));
    let writes = file.writes.load(Ordering::Relaxed);
    assert_eq!(join(&workers, "a", &token, &first).unwrap(), shown);
    assert_eq!(file.writes.load(Ordering::Relaxed), writes, "nothing was written again");
    let other_credential = JoinWorker { credential_blake3: hash_of("other"), ..first };
    let other_id = JoinWorker { worker_id: Uuid::new_v4(), ..first };
    for other in [other_credential, other_id] {
        let used = join(&workers, "a", &token, &other).unwrap_err();
        assert!(matches!(used, WorkersError::JoinTokenUsed { .. }), "{used}");
    }
    let workers = file.open();
    assert!(is_worker(&workers, "one") && !is_worker(&workers, "other"));
    let seen = workers.get(&name("a")).unwrap();
    assert_eq!(seen, Worker { last_seen_at: Some(at(5)), ..shown });
}

#[test]
fn ids_and_credentials_are_of_one_worker() {
    let workers = Workers::default();
    let first = joining("one");
    let token = add(&workers, "a");
    join(&workers, "a", &token, &first).unwrap();
    let token = add(&workers, "b");
    let taken = join(&workers, "b", &token, &JoinWorker { ..first }).unwrap_err();
    assert!(taken.to_string().contains(&first.worker_id.to_string()), "{taken}");
    assert_eq!(code(taken), ProblemCode::Exists);
    let taken = join(&workers, "b", &token, &joining("one")).unwrap_err();
    assert!(matches!(taken, WorkersError::CredentialTaken { .. }), "{taken}");
    join(&workers, "b", &token, &joining("two")).unwrap();
    assert_eq!(code(replace(&workers, "b", "two", "one").unwrap_err()), ProblemCode::Exists);
}

#[test]
fn an_id_of_which_there_are_files_is_taken_only_by_the_worker_that_was_added_with_it() {
    let file = MemoryFile::default();
    let workers = file.open();
    let in_use = joining("one");
    let token = add(&workers, "a");
    let join_in_use = |workers: &Workers, text: &str, token: &str, joining: &JoinWorker| {
        workers.join(&name(text), hash(token.as_bytes()), joining, true, at(2))
    };
    let refused = join_in_use(&workers, "a", &token, &in_use).unwrap_err();
    assert!(refused.to_string().contains(&format!("--id {}", in_use.worker_id)), "{refused}");
    assert_eq!(code(refused), ProblemCode::Exists);

    let id = Some(in_use.worker_id);
    let (shown, token) = workers.add(&name("b"), id, LATER, at(1), || false).unwrap();
    assert_eq!((shown.worker_id, shown.joined_at), (id, None));
    assert!(matches!(
        workers.add(&name("c"), id, LATER, at(1), || false),
        Err(WorkersError::IdTaken { .. })
    ));
    let workers = file.open();
    let other = join(&workers, "b", &token, &joining("one")).unwrap_err();
    assert!(matches!(other, WorkersError::OtherId { .. }), "{other}");
    let shown = join_in_use(&workers, "b", &token, &in_use).unwrap();
    assert_eq!((shown.worker_id, shown.joined_at), (id, Some(at(2))));
    // The answer was lost, and there are files of it by now.
    assert_eq!(join_in_use(&workers, "b", &token, &in_use).unwrap().joined_at, Some(at(2)));
}

#[test]
fn the_previous_credential_counts_until_it_is_retired_and_replaces_none() {
    let file = MemoryFile::default();
    let workers = file.open();
    joined(&workers, "a", "one");
    assert_eq!(replace(&workers, "a", "one", "two").unwrap().credential_since, Some(at(7)));
    // The answer was lost: sent again by the old one.
    replace(&workers, "a", "one", "two").unwrap();
    let stolen = replace(&workers, "a", "one", "three").unwrap_err();
    assert_eq!(code(stolen), ProblemCode::Unauthenticated);
    assert!(is_worker(&workers, "one"));
    assert!(is_worker(&file.open(), "one") && is_worker(&file.open(), "two"));
    let retires = |workers: &Workers| match bearer(workers, "two") {
        Some(Bearer::Worker { retires_previous, .. }) => retires_previous,
        other => panic!("{other:?}"),
    };
    assert!(retires(&workers));
    assert!(!retires(&workers), "told once");
    file.fill(true);
    workers.retire_previous(&name("a"), hash_of("two")).unwrap_err();
    assert!(is_worker(&workers, "one"));
    file.fill(false);
    assert!(retires(&workers), "told again");
    workers.retire_previous(&name("a"), hash_of("two")).unwrap();
    for workers in [&workers, &file.open()] {
        assert!(!is_worker(workers, "one") && !retires(workers));
    }
}

#[test]
fn a_credential_is_replaced_in_turn_once_the_previous_one_has_ended() {
    let workers = Workers::default();
    joined(&workers, "a", "one");
    replace(&workers, "a", "one", "two").unwrap();
    let early = replace(&workers, "a", "two", "three").unwrap_err();
    assert_eq!(code(early), ProblemCode::Busy);
    // Of a worker that was there before under this name.
    workers.retire_previous(&name("a"), hash_of("one")).unwrap();
    assert!(is_worker(&workers, "one"));
    workers.retire_previous(&name("a"), hash_of("two")).unwrap();
    replace(&workers, "a", "two", "three").unwrap();
    let used = bearer(&workers, "three");
    assert!(matches!(used, Some(Bearer::Worker { retires_previous: true, .. })), "{used:?}");
    let counts = ["one", "two", "three"].map(|credential| is_worker(&workers, credential));
    assert_eq!(counts, [false, true, true]);
}

#[test]
fn what_is_revoked_is_refused_and_its_name_is_free() {
    let file = MemoryFile::default();
    let workers = file.open();
    joined(&workers, "a", "one");
    replace(&workers, "a", "one", "two").unwrap();
    let token = add(&workers, "b");
    revoke(&workers, "a").unwrap();
    revoke(&workers, "b").unwrap();
    for workers in [&workers, &file.open()] {
        assert_eq!(["one", "two"].map(|credential| bearer(workers, credential)), [None, None]);
        assert_eq!(workers.identify(token.as_bytes(), at(5)), None);
        assert_eq!(code(revoke(workers, "a").unwrap_err()), ProblemCode::NotFound);
    }
    let late = workers.retire_previous(&name("gone"), hash_of("two")).unwrap_err();
    assert_eq!(code(late), ProblemCode::NotFound);
}

/// A call that began before a worker was revoked, and comes to its end after the name was given to another machine.
#[test]
fn what_was_shown_before_a_revocation_changes_nothing_after_it() {
    let workers = Workers::default();
    let old_token = add(&workers, "a");
    join(&workers, "a", &old_token, &joining("one")).unwrap();
    revoke(&workers, "a").unwrap();
    let token = add(&workers, "a");
    let late = replace(&workers, "a", "one", "thief").unwrap_err();
    assert_eq!(code(late), ProblemCode::Unauthenticated);
    let late = join(&workers, "a", &old_token, &joining("thief")).unwrap_err();
    assert_eq!(code(late), ProblemCode::Unauthenticated);
    let late = workers.added_at(&name("a"), hash_of("one")).unwrap_err();
    assert_eq!(code(late), ProblemCode::Unauthenticated);
    join(&workers, "a", &token, &joining("two")).unwrap();
    let late = replace(&workers, "a", "one", "thief").unwrap_err();
    assert_eq!(code(late), ProblemCode::Unauthenticated);
    let counts = ["one", "two", "thief"].map(|credential| is_worker(&workers, credential));
    assert_eq!(counts, [false, true, false]);
}

#[test]
fn on_a_full_disk_nothing_is_acknowledged_but_a_revocation_holds() {
    let file = MemoryFile::default();
    let workers = file.open();
    joined(&workers, "a", "one");
    let token = add(&workers, "b");
    file.fill(true);
    let full = |error| assert_eq!(code(error), ProblemCode::NoSpace);
    full(workers.add(&name("c"), None, LATER, at(3), || false).unwrap_err());
    full(join(&workers, "b", &token, &joining("b")).unwrap_err());
    full(replace(&workers, "a", "one", "two").unwrap_err());
    assert_eq!(workers.names(), [name("a"), name("b")]);
    let counts = ["one", "b", "two"].map(|credential| is_worker(&workers, credential));
    assert_eq!(counts, [true, false, false]);
    full(revoke(&workers, "a").unwrap_err());
    assert!(!is_worker(&workers, "one"));
    assert!(is_worker(&file.open(), "one"), "the file still has it, as the error says");
    full(revoke(&workers, "a").unwrap_err());
    assert_eq!(code(revoke(&workers, "never").unwrap_err()), ProblemCode::NotFound);
    file.fill(false);
    revoke(&workers, "a").unwrap();
    assert!(!is_worker(&file.open(), "one"));
    assert_eq!(code(revoke(&workers, "a").unwrap_err()), ProblemCode::NotFound);
}

#[test]
fn a_revocation_that_was_not_written_goes_with_the_next_change() {
    let file = MemoryFile::default();
    let workers = file.open();
    joined(&workers, "a", "one");
    file.fill(true);
    revoke(&workers, "a").unwrap_err();
    file.fill(false);
    add(&workers, "b");
    assert_eq!(file.open().names(), [name("b")]);
}

/// A file that revokes a worker while a change is being written.
#[derive(Clone, Default)]
struct Meddling(Arc<Mutex<Option<Arc<Workers>>>>);

impl fmt::Debug for Meddling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meddling")
    }
}

impl WorkersFile for Meddling {
    fn replace(&self, _content: &[u8]) -> io::Result<()> {
        if let Some(workers) = self.0.lock().take() {
            workers.revoke(&name("a")).unwrap();
            assert!(!is_worker(&workers, "one"), "it waits for no disk");
        }
        Ok(())
    }
}

#[test]
fn a_change_under_way_brings_back_nothing_that_is_revoked() {
    let file = Meddling::default();
    let workers = Arc::new(Workers::open(None, Box::new(file.clone())).unwrap());
    joined(&workers, "a", "one");
    *file.0.lock() = Some(Arc::clone(&workers));
    add(&workers, "b");
    assert!(!is_worker(&workers, "one"));
    assert_eq!(workers.names(), [name("b")]);
    workers.keep_revocation(&name("a")).unwrap();
    assert_eq!(code(revoke(&workers, "a").unwrap_err()), ProblemCode::NotFound);
}

#[test]
fn only_what_has_the_form_of_a_secret_is_looked_for() {
    let workers = Workers::default();
    for text in ["", "x", CREDENTIAL_PREFIX, &secret("a")[1..], &secret("a")[..81]] {
        let token = add(&workers, "a");
        let chosen =
            JoinWorker { worker_id: Uuid::new_v4(), credential_blake3: hash(text.as_bytes()) };
        join(&workers, "a", &token, &chosen).unwrap();
        assert_eq!(workers.identify(text.as_bytes(), at(5)), None, "{text}");
        revoke(&workers, "a").unwrap();
    }
}

#[test]
fn their_number_is_bounded_and_the_largest_file_is_read_again() {
    let file = MemoryFile::default();
    let long =
        |number: usize| format!("{number:0>width$}", width = crate::worker::WORKER_NAME_BYTES_MAX);
    let one = |number: usize| {
        let mut record = Record::new(name(&long(number)), None, LATER, hash(b"t"), LATER);
        record
            .join(hash(b"t"), Uuid::new_v4(), hash(number.to_string().as_bytes()), at(2))
            .unwrap();
        record.previous = Some(hash(b"p"));
        record
    };
    let records: Vec<Record> = (0..WORKERS_MAX).map(one).collect();
    *file.content.lock() = Some(record::write(records.iter()).unwrap());
    let workers = file.open();
    let full = workers.add(&name("over"), None, LATER, at(1), || false).unwrap_err();
    assert!(full.to_string().contains("4096"), "{full}");
    revoke(&workers, &long(7)).unwrap();
    add(&workers, "over");
    assert_eq!(file.open().names().len(), WORKERS_MAX);
}

#[test]
fn a_file_that_cannot_be_used_is_refused() {
    let file = MemoryFile::default();
    add(&file.open(), "a");
    let good = file.text();
    let record = &good[good.find("[{").unwrap() + 1..good.rfind(']').unwrap()];
    let cases = [
        (String::new(), "no table"),
        ("{}".to_owned(), "version"),
        (good.replace("\"version\":1", "\"version\":2"), "version 2, expected 1"),
        (good.replace("created_at", "made_at"), "made_at"),
        (good.replace("\"a\"", "\"A\""), "node-7"),
        (format!("{{\"version\":1,\"workers\":[{record},{record}]}}"), "twice"),
    ];
    for (content, said) in cases {
        let opened = Workers::open(Some(content.as_bytes()), Box::new(NoFile));
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(said), "{content}: {error}");
    }
    assert!(Workers::open(None, Box::new(NoFile)).unwrap().names().is_empty());
}

#[test]
fn nothing_shows_a_secret() {
    let workers = Workers::default();
    let token = add(&workers, "a");
    joined(&workers, "b", "s3cret");
    let bearer = bearer(&workers, "s3cret").unwrap();
    let hash = blake3::hash(secret("s3cret").as_bytes()).to_hex();
    let shown = format!("{workers:?} {bearer:?} {:?}", workers.list());
    assert!(!shown.contains(&token) && !shown.contains(hash.as_str()), "{shown}");
}

//! The format of the state database, so that a release never guesses what another one meant.
//!
//! The fact `format` holds its number. Release 0.2 wrote none: a state without it is of format
//! 1. Fields that are added to a volume, each with a default, are the same format.
//!
//! Format 2 has volumes that are kept as images. A state gets it with the first one, and keeps it: a program that
//! knows none would take the disk of such a volume for a whole tree.

use redb::{DatabaseError, ReadableTable, Table};

/// The fact's name.
const FACT: &str = "format";

/// The format that this program writes where no volume needs a later one, and that it reads.
const FORMAT: &str = "1";

/// The format of a state that has, or had, volumes that are kept as images. This program reads it, too.
const WITH_IMAGES: &str = "2";

/// What the state is of, where this program cannot read it.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormatError {
    /// Another release wrote it.
    #[error(
        "it has format {}, this program reads formats {FORMAT} and {WITH_IMAGES}: run the release of slackwater-driver that wrote it, or a newer one",
        got.escape_debug()
    )]
    Other {
        /// What stands there.
        got: String,
    },
    /// The database below is of another format.
    #[error(
        "its database has redb's format {got}, which this program does not read: run the release of slackwater-driver that wrote it"
    )]
    Database {
        /// The number that redb gives.
        got: u8,
    },
}

/// What a failure to open the database means.
pub(super) fn of_open(error: DatabaseError) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        DatabaseError::UpgradeRequired(got) => FormatError::Database { got }.into(),
        other => other.into(),
    }
}

/// Stamps a state that has volumes which are kept as images.
///
/// # Errors
/// It cannot be written.
pub(super) fn note_images(facts: &mut Table<'_, &str, &str>) -> Result<(), redb::StorageError> {
    facts.insert(FACT, WITH_IMAGES).map(drop)
}

/// Sees that the state is of a format of this program, and stamps one that has none.
///
/// # Errors
/// It is of another format, or cannot be read; nothing may be changed then.
pub(super) fn check(
    facts: &mut Table<'_, &str, &str>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let got = facts.get(FACT)?.map(|value| value.value().to_owned());
    match got {
        Some(got) if got == FORMAT || got == WITH_IMAGES => Ok(()),
        Some(got) => Err(FormatError::Other { got }.into()),
        None => {
            facts.insert(FACT, FORMAT)?;
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use redb::{Database, ReadableDatabase};

    use super::super::tests::volume;
    use super::super::{Change, FACTS, LayerKind, State, VOLUMES, Volume};
    use super::*;
    use crate::worker::volume::Content;

    /// Puts a fact and an unreadable volume into a state, as another release might.
    fn written_by_another(path: &std::path::Path, format: &str) {
        let database = Database::create(path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(FACTS).unwrap().insert(FACT, format).unwrap();
        let volume: &[u8] = b"{\"of\":\"another release\"}";
        transaction.open_table(VOLUMES).unwrap().insert("docker\0x", volume).unwrap();
        transaction.commit().unwrap();
    }

    fn fact(path: &std::path::Path) -> Option<String> {
        let database = Database::open(path).unwrap();
        let transaction = database.begin_read().unwrap();
        let facts = transaction.open_table(FACTS).unwrap();
        facts.get(FACT).unwrap().map(|value| value.value().to_owned())
    }

    #[test]
    fn a_state_of_another_format_is_refused_with_advice_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for format in ["0", "3", "99999999999999999999", ""] {
            let path = folder.path().join(format!("state{format}.redb"));
            written_by_another(&path, format);
            let error = State::open(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("format {format},")), "{error}");
            assert!(error.contains("this program reads formats 1 and 2"), "{error}");
            assert!(error.contains("run the release"), "{error}");
            assert_eq!(fact(&path).as_deref(), Some(format));
        }
    }

    #[test]
    fn a_state_without_a_format_is_the_first_and_is_stamped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        // What release 0.2 left: the tables, and no such fact.
        let database = Database::create(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(FACTS).unwrap().insert("worker_id", "x").unwrap();
        transaction.commit().unwrap();
        drop(database);
        let state = State::open(&path).unwrap();
        assert_eq!(state.fact("worker_id").as_deref(), Some("x"));
        drop(state);
        assert_eq!(fact(&path).as_deref(), Some(FORMAT));
        State::open(&path).unwrap();
    }

    #[test]
    fn a_state_with_images_is_of_a_format_of_its_own_and_stays_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        for (layers, expected) in [(LayerKind::Disks, FORMAT), (LayerKind::Images, WITH_IMAGES)] {
            let state = State::open(&path).unwrap();
            let volume = Volume { layers, ..volume(1, None, Content::Inherited) };
            let key = volume.key.clone();
            state.apply(&[Change::Create(Box::new(volume))]).unwrap();
            state.apply(&[Change::Delete(key)]).unwrap();
            drop(state);
            assert_eq!(fact(&path).as_deref(), Some(expected));
        }
        State::open(&path).unwrap();
        assert_eq!(fact(&path).as_deref(), Some(WITH_IMAGES));
    }

    #[test]
    fn a_database_that_redb_does_not_read_is_told() {
        let error = of_open(DatabaseError::UpgradeRequired(2)).to_string();
        assert!(error.contains("redb's format 2") && error.contains("run the release"), "{error}");
    }
}

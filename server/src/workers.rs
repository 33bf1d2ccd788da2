//! The workers of the appliance: `workers.json` of the data directory, which the REST face changes.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use slackwater_api::workers::WORKERS_FILE_BYTES_MAX;
use slackwater_api::{Tokens, Workers, WorkersFile};

use crate::data_file;
use crate::error::ServerError;

const NAME: &str = "workers.json";

/// The file, in a data directory that this process has open.
#[derive(Debug)]
struct InDirectory(PathBuf);

impl WorkersFile for InDirectory {
    fn replace(&self, content: &[u8]) -> io::Result<()> {
        data_file::replace(&self.0, NAME, content)
    }
}

/// The workers of a data directory that this process has open.
///
/// # Errors
/// The file cannot be read, or is none of workers; a worker has the name of one of these tokens, so that what either
/// registers could not be told from the other's.
pub(crate) fn open(data_dir: &Path, tokens: &Tokens) -> Result<Workers, ServerError> {
    let path = data_dir.join(NAME);
    let fault = |reason: String| ServerError::Workers { path: path.clone(), reason };
    let content = read(&path).map_err(|error| fault(error.to_string()))?;
    if content.is_some() {
        // The process that wrote it may have been killed before its name was on the disk.
        data_file::sync(data_dir).map_err(|error| fault(error.to_string()))?;
    }
    let file = Box::new(InDirectory(data_dir.to_owned()));
    let workers =
        Workers::open(content.as_deref(), file).map_err(|error| fault(error.to_string()))?;
    tokens.check_names(&workers).map_err(|error| fault(error.to_string()))?;
    Ok(workers)
}

/// The content; none if there is no file.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut content = Vec::new();
    let length = file.take(WORKERS_FILE_BYTES_MAX + 1).read_to_end(&mut content)?;
    if u64::try_from(length).is_ok_and(|length| length <= WORKERS_FILE_BYTES_MAX) {
        return Ok(Some(content));
    }
    let reason =
        format!("it has more than {WORKERS_FILE_BYTES_MAX} bytes, which no file of workers has");
    Err(io::Error::new(ErrorKind::InvalidData, reason))
}

#[cfg(test)]
mod tests {
    use slackwater_api::{Role, Secret, Token};

    use super::*;

    fn fault(data_dir: &Path) -> String {
        open(data_dir, &Tokens::default()).unwrap_err().to_string()
    }

    #[test]
    fn there_are_none_before_one_is_added() {
        let directory = tempfile::tempdir().unwrap();
        assert!(open(directory.path(), &Tokens::default()).unwrap().names().is_empty());
        assert!(!directory.path().join(NAME).exists());
    }

    #[test]
    fn a_file_that_cannot_be_used_keeps_the_server_from_starting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        std::fs::write(&path, "{}").unwrap();
        let error = fault(directory.path());
        assert!(error.contains("workers.json") && error.contains("version"), "{error}");
        let length = usize::try_from(WORKERS_FILE_BYTES_MAX).unwrap() + 1;
        std::fs::write(&path, vec![b' '; length]).unwrap();
        assert!(fault(directory.path()).contains("more than"), "{}", fault(directory.path()));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(fault(directory.path()).contains("workers.json"));
    }

    #[test]
    fn a_name_is_of_a_worker_or_of_a_token() {
        let directory = tempfile::tempdir().unwrap();
        let at = "2026-11-26T09:00:00Z";
        let content = format!(
            r#"{{"version":1,"workers":[{{"name":"node-7","created_at":"{at}","join":{{"blake3":"{}","expires_at":"{at}"}}}}]}}"#,
            "0".repeat(64)
        );
        std::fs::write(directory.path().join(NAME), content).unwrap();
        let token = |name: &str| Token {
            name: name.to_owned(),
            role: Role::Worker,
            secret: Secret::new("secret"),
        };
        let tokens = |names: &[&str]| Tokens::new(names.iter().map(|name| token(name)).collect());
        assert_eq!(open(directory.path(), &tokens(&["ops"])).unwrap().names().len(), 1);
        let error = open(directory.path(), &tokens(&["ops", "node-7"])).unwrap_err();
        assert!(error.to_string().contains("`node-7`"), "{error}");
    }
}

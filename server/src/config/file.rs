//! The configuration file: TOML whose keys are the options' names.

use std::ops::Range;
use std::path::Path;

use super::error::ConfigError;
use super::settings::Settings;
use super::text_file::read_text;

/// The settings of a configuration file.
///
/// # Errors
/// The file cannot be read, or what stands in it is wrong, with line and column.
pub(super) fn read(path: &Path) -> Result<Settings, ConfigError> {
    parse(path, &read_text(path)?)
}

/// The settings in `text`, which stands in `path`.
pub(super) fn parse(path: &Path, text: &str) -> Result<Settings, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let (line, column) = position(text, error.span());
        ConfigError::Syntax {
            path: path.to_owned(),
            line,
            column,
            reason: error.message().replace('\n', "; "),
        }
    })
}

/// Line and column, both from 1, where a span of bytes begins.
fn position(text: &str, span: Option<Range<usize>>) -> (usize, usize) {
    let start = span.map_or(0, |span| span.start);
    let before = text.get(..start).unwrap_or(text);
    let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (line, before[line_start..].chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Size;

    fn failure(text: &str) -> (usize, usize, String) {
        match parse(Path::new("x.toml"), text) {
            Err(ConfigError::Syntax { line, column, reason, .. }) => (line, column, reason),
            other => panic!("expected a syntax error, got {other:?}"),
        }
    }

    #[test]
    fn reads_every_type() {
        let settings = parse(
            Path::new("x.toml"),
            "data-dir = \"/srv\"\nnfs-listen = \"[::1]:0\"\nmemory = \"2GiB\"\ncapacity = 4096\n\
             compress = false\nsquash = \"no_root_squash\"\nnfs-client = [\"10.0.0.0/8:rw\"]\n\
             log = \"warn\"\n",
        )
        .unwrap();
        assert_eq!(settings.data_dir, Some("/srv".into()));
        assert_eq!(settings.nfs_listen, Some(vec!["[::1]:0".parse().unwrap()]));
        let several: Settings =
            toml::from_str("nfs-listen = [\"[::1]:1\", \"10.0.0.5:2\"]").unwrap();
        let expected = ["[::1]:1", "10.0.0.5:2"].map(|address| address.parse().unwrap());
        assert_eq!(several.nfs_listen, Some(expected.to_vec()));
        assert_eq!(settings.memory, Some(Size::from_bytes(2 << 30)));
        assert_eq!(settings.capacity, Some(Size::from_bytes(4096)));
        assert_eq!(settings.compress, Some(false));
        assert_eq!(settings.squash.unwrap().value(), &slackwater_nfs::Squash::NoRootSquash);
        assert_eq!(settings.nfs_client.unwrap()[0].text(), "10.0.0.0/8:rw");
        assert_eq!(settings.api_listen, None);
    }

    #[test]
    fn unknown_key_is_named_with_its_place() {
        let (line, column, reason) = failure("memory = \"1GiB\"\n  memroy = 3\n");
        assert_eq!((line, column), (2, 3));
        assert!(reason.contains("unknown field `memroy`"), "{reason}");
        assert!(reason.contains("`memory`"), "{reason}");
    }

    #[test]
    fn wrong_values_are_placed() {
        let (line, column, reason) = failure("\nmemory = \"8GB\"\n");
        assert_eq!((line, column), (2, 10));
        assert!(reason.contains("`GB` is not a unit"), "{reason}");

        let (line, column, _) = failure("nfs-listen = \"localhost\"\n");
        assert_eq!((line, column), (1, 14));

        // The place of a list is its beginning; the text of the item finds it.
        let (line, column, reason) =
            failure("nfs-client = [\"10.0.0.0/8:rw\", \"10.0.0.0/99:rw\"]");
        assert_eq!((line, column), (1, 14));
        assert!(reason.contains("10.0.0.0/99:rw"), "{reason}");

        let (line, _, reason) = failure("squash = \"some\"");
        assert_eq!(line, 1);
        assert!(reason.contains("root_squash"), "{reason}");
    }

    #[test]
    fn broken_toml_is_placed() {
        let (line, _, reason) = failure("memory = \"1GiB\"\nlog = \"info\n");
        assert_eq!(line, 2, "{reason}");
        assert!(!reason.contains('\n'));
        let (line, _, reason) = failure("log = \"info\"\nlog = \"warn\"\n");
        assert_eq!(line, 2);
        assert!(reason.contains("duplicate"), "{reason}");
    }
}

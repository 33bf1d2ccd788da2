//! The queries of the REST calls: how a client writes them, how the server reads them.
//!
//! A query is form-encoded (`name=value&...`, a space is `+` or `%20`). A parameter that a
//! route does not know, or that comes twice where one value is meant, is refused: a misspelt
//! filter must not list everything.

use std::fmt;

use crate::paths::{decode_component, encode_component};
use crate::types::{
    ImageName, Labels, PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX, RegistryBlob, SnapshotId,
};

/// Which files to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFiles {
    /// Those whose path begins with this text, which may end inside a name.
    pub prefix: Option<String>,
    /// Items of the page, 1 to 1000.
    pub limit: Option<usize>,
    /// The `next` of the page before.
    pub after: Option<String>,
}

/// For what a file is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeleteFile {
    /// Of `published/SNAPSHOT` alone: the image for which the caller publishes the snapshot no more.
    pub image: Option<ImageName>,
}

/// Which snapshots to list; all conditions hold at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListSnapshots {
    /// Taken of a file at this path.
    pub path: Option<String>,
    /// Of this name: at most one.
    pub name: Option<String>,
    /// Carrying all these labels; each is one parameter `label=KEY=VALUE`.
    pub labels: Labels,
    /// Items of the page, 1 to 1000.
    pub limit: Option<usize>,
    /// The `next` of the page before.
    pub after: Option<String>,
}

/// Which part of a diff to give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// The snapshot to compare with; without it, an empty file.
    pub base: Option<SnapshotId>,
    /// Items of the page, 1 to 1000.
    pub limit: Option<usize>,
    /// The `next` of the page before.
    pub after: Option<String>,
}

/// Which part of a block map to give. It is widened to whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Map {
    /// Where to begin.
    pub offset_bytes: u64,
    /// How much; without it, up to the end. An answer may cover less.
    pub length_bytes: Option<u64>,
}

/// Where data is to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutData {
    /// Where the first byte goes.
    pub offset_bytes: u64,
}

/// For whom a layer is, when a snapshot that there is is registered as a chain; without either, for those whom the
/// snapshot was for, and for all if it was no chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddChain {
    /// Those, too, who may read this blob of a registry.
    pub blob: Option<RegistryBlob>,
    /// All.
    pub is_for_all: bool,
}

/// Which changes of the audit log to list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListChanges {
    /// Those of the token or worker of this name.
    pub by: Option<String>,
    /// Items of the page, 1 to 1000.
    pub limit: Option<usize>,
    /// The `next` of the page before.
    pub after: Option<String>,
}

/// A query that a route does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("query parameter `{}`: {reason}", name.escape_debug())]
pub struct QueryError {
    /// The parameter.
    pub name: String,
    /// What is wrong, and what would be right.
    pub reason: String,
}

impl ListFiles {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("prefix", self.prefix.as_ref());
        query.add("limit", self.limit);
        query.add("after", self.after.as_ref());
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self {
            prefix: reader.one("prefix")?,
            limit: reader.limit()?,
            after: reader.one("after")?,
        };
        reader.finish(read)
    }
}

impl DeleteFile {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("image", self.image.as_ref());
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self { image: reader.parsed("image")? };
        reader.finish(read)
    }
}

impl ListSnapshots {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("path", self.path.as_ref());
        query.add("name", self.name.as_ref());
        for (key, value) in &self.labels {
            query.add("label", Some(format!("{key}={value}")));
        }
        query.add("limit", self.limit);
        query.add("after", self.after.as_ref());
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let mut labels = Labels::new();
        for text in reader.all("label") {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| QueryError::new("label", "is written label=KEY=VALUE"))?;
            if labels.insert(key.to_owned(), value.to_owned()).is_some_and(|other| other != value) {
                return Err(QueryError::new(
                    "label",
                    "a snapshot has one value for a key, two are asked for",
                ));
            }
        }
        let read = Self {
            path: reader.one("path")?,
            name: reader.one("name")?,
            labels,
            limit: reader.limit()?,
            after: reader.one("after")?,
        };
        reader.finish(read)
    }
}

impl Diff {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("base", self.base);
        query.add("limit", self.limit);
        query.add("after", self.after.as_ref());
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self {
            base: reader.parsed("base")?,
            limit: reader.limit()?,
            after: reader.one("after")?,
        };
        reader.finish(read)
    }
}

impl Map {
    /// The query, with its `?`.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("offset", Some(self.offset_bytes));
        query.add("length", self.length_bytes);
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self {
            offset_bytes: reader.parsed("offset")?.unwrap_or(0),
            length_bytes: reader.parsed("length")?,
        };
        reader.finish(read)
    }
}

impl ListChanges {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("by", self.by.as_ref());
        query.add("limit", self.limit);
        query.add("after", self.after.as_ref());
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read =
            Self { by: reader.one("by")?, limit: reader.limit()?, after: reader.one("after")? };
        reader.finish(read)
    }
}

impl AddChain {
    /// The query, with its `?`, or nothing.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("blob", self.blob.as_ref());
        query.add("for_all", self.is_for_all.then_some(true));
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters; both.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self {
            blob: reader.parsed("blob")?,
            is_for_all: reader.parsed("for_all")?.unwrap_or(false),
        };
        if read.is_for_all && read.blob.is_some() {
            return Err(QueryError::new(
                "for_all",
                "a layer for all needs no blob: give one of the two",
            ));
        }
        reader.finish(read)
    }
}

impl PutData {
    /// The query, with its `?`.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut query = Writer::default();
        query.add("offset", Some(self.offset_bytes));
        query.0
    }

    /// Reads the part after the `?`.
    ///
    /// # Errors
    /// Unknown, repeated or unreadable parameters.
    pub fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        let read = Self { offset_bytes: reader.parsed("offset")?.unwrap_or(0) };
        reader.finish(read)
    }
}

impl QueryError {
    /// The error of one parameter.
    pub(crate) fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), reason: reason.into() }
    }
}

/// A query that is being written.
#[derive(Default)]
struct Writer(String);

impl Writer {
    fn add(&mut self, name: &str, value: Option<impl fmt::Display>) {
        if let Some(value) = value {
            self.0.push(if self.0.is_empty() { '?' } else { '&' });
            self.0.push_str(name);
            self.0.push('=');
            self.0.push_str(&encode_component(value.to_string().as_bytes()));
        }
    }
}

/// The parameters of a query that were not yet asked for.
#[derive(Debug)]
pub(crate) struct Reader(Vec<(String, String)>);

impl Reader {
    pub(crate) fn new(query: &str) -> Result<Self, QueryError> {
        let decode = |text: &str| {
            let bytes = decode_component(&text.replace('+', " "))
                .map_err(|error| QueryError::new(text, error.to_string()))?;
            String::from_utf8(bytes).map_err(|_| QueryError::new(text, "is not UTF-8"))
        };
        query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(name)?, decode(value)?))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Takes every value of `name`.
    pub(crate) fn all(&mut self, name: &str) -> Vec<String> {
        self.0.extract_if(.., |(other, _)| other == name).map(|(_, value)| value).collect()
    }

    /// Takes the value of `name`, at most one.
    pub(crate) fn one(&mut self, name: &str) -> Result<Option<String>, QueryError> {
        let mut values = self.all(name);
        match values.len() {
            0 | 1 => Ok(values.pop()),
            got => Err(QueryError::new(name, format!("comes {got} times, expected once"))),
        }
    }

    /// Takes the value of `name` as a number, an id or the like.
    pub(crate) fn parsed<T>(&mut self, name: &str) -> Result<Option<T>, QueryError>
    where
        T: std::str::FromStr<Err: fmt::Display>,
    {
        let Some(text) = self.one(name)? else {
            return Ok(None);
        };
        text.parse()
            .map(Some)
            .map_err(|error| QueryError::new(name, format!("`{}`: {error}", text.escape_debug())))
    }

    fn limit(&mut self) -> Result<Option<usize>, QueryError> {
        match self.parsed("limit")? {
            Some(got) if !(1..=PAGE_LIMIT_MAX).contains(&got) => {
                Err(QueryError::new("limit", format!("is {got}, expected 1 to {PAGE_LIMIT_MAX}")))
            }
            limit => Ok(limit),
        }
    }

    /// Answers `read` unless a parameter is left that nobody asked for.
    pub(crate) fn finish<T>(self, read: T) -> Result<T, QueryError> {
        match self.0.into_iter().next() {
            Some((name, _)) => Err(QueryError::new(name, "is not known here")),
            None => Ok(read),
        }
    }
}

/// The limit of a page that the request asked for, or the default.
#[must_use]
pub fn page_limit(asked: Option<usize>) -> usize {
    asked.unwrap_or(PAGE_LIMIT_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_question_mark(query: &str) -> &str {
        query.strip_prefix('?').unwrap_or(query)
    }

    #[test]
    fn what_is_written_is_read() {
        let files =
            ListFiles { prefix: Some("a b/&+c".into()), limit: Some(7), after: Some("x".into()) };
        assert_eq!(files.encode(), "?prefix=a%20b%2F%26%2Bc&limit=7&after=x");
        assert_eq!(ListFiles::decode(after_question_mark(&files.encode())).unwrap(), files);
        assert_eq!(ListFiles::default().encode(), "");
        let delete = DeleteFile { image: Some("a/b:1+c".parse().unwrap()) };
        assert_eq!(delete.encode(), "?image=a%2Fb%3A1%2Bc");
        assert_eq!(DeleteFile::decode(after_question_mark(&delete.encode())).unwrap(), delete);
        let labels = [("k".to_owned(), "v=w".to_owned()), ("l".to_owned(), String::new())].into();
        let snapshots =
            ListSnapshots { labels, name: Some("n".into()), ..ListSnapshots::default() };
        assert_eq!(
            ListSnapshots::decode(after_question_mark(&snapshots.encode())).unwrap(),
            snapshots
        );
        let diff = Diff { base: Some(SnapshotId::from_bytes([7; 16])), ..Diff::default() };
        assert_eq!(Diff::decode(after_question_mark(&diff.encode())).unwrap(), diff);
        let changes =
            ListChanges { by: Some("a&b".into()), limit: Some(1), after: Some("7".into()) };
        assert_eq!(ListChanges::decode(after_question_mark(&changes.encode())).unwrap(), changes);
        let map = Map { offset_bytes: 4096, length_bytes: Some(1) };
        assert_eq!(Map::decode(after_question_mark(&map.encode())).unwrap(), map);
        let put = PutData { offset_bytes: u64::MAX };
        assert_eq!(PutData::decode(after_question_mark(&put.encode())).unwrap(), put);
        assert_eq!(ListFiles::decode("prefix=a+b").unwrap().prefix.as_deref(), Some("a b"));
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for bad in [
            "prefx=a",
            "limit=0",
            "limit=1001",
            "limit=ten",
            "limit=1&limit=2",
            "prefix=%",
            "prefix=%ff",
        ] {
            assert!(ListFiles::decode(bad).is_err(), "{bad}");
        }
        for bad in ["label=a", "label=a=1&label=a=2"] {
            assert!(ListSnapshots::decode(bad).is_err(), "{bad}");
        }
        for bad in ["offset=-1", "offset=18446744073709551616", "length=1k"] {
            assert!(Map::decode(bad).is_err(), "{bad}");
        }
        assert!(Diff::decode("base=1").is_err());
        assert!(ListChanges::decode("who=a").is_err());
    }
}

//! Filters of List, in the language of containerd:
//!
//! ```text
//! filter   := selector ("," selector)*            all of them must hold; empty: always
//! selector := field ("." field)* [operator value]  without operator: the field is there
//! field    := quoted | letter (letter | digit | "_")*
//! operator := "==" | "!=" | "~="                   "~=" is a regular expression
//! value    := quoted | anything but blanks and commas
//! quoted   := "..." or '...', and after "~=" also /.../ and |...|
//! ```

use regex::{Regex, RegexBuilder};

use super::error::CallError;
use super::proto::{Info, Kind};

/// Longest filter. The longest that containerd sends holds two names.
const FILTER_BYTES_MAX: usize = 16 << 10;

/// Most filters of a request.
const FILTERS_MAX: usize = 64;

/// Memory of a compiled regular expression; its matching is linear in the text anyway.
const REGEX_BYTES_MAX: usize = 1 << 20;

/// Most regular expressions of a request: a filter of a few KiB could name a thousand, of a
/// megabyte each. containerd's own commands send one.
const REGEXES_MAX: usize = 32;

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    Matches(Box<Regex>),
}

#[derive(Debug)]
struct Selector {
    path: Vec<String>,
    test: Test,
}

impl Selector {
    fn holds(&self, info: &Info) -> bool {
        let value = field(info, &self.path);
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(expected) => value == Some(expected),
            // What is not there differs from every value but the empty one, as in containerd.
            Test::NotEqual(expected) => value.unwrap_or_default() != expected,
            Test::Matches(regex) => regex.is_match(value.unwrap_or_default()),
        }
    }
}

fn field<'a>(info: &'a Info, path: &[String]) -> Option<&'a str> {
    let (first, rest) = path.split_first()?;
    match (first.as_str(), rest) {
        ("name", []) => Some(&info.name),
        // Also of one without: containerd looks for `parent==""`.
        ("parent", []) => Some(&info.parent),
        ("kind", []) => match info.kind() {
            Kind::Unknown => None,
            Kind::View => Some("view"),
            Kind::Active => Some("active"),
            Kind::Committed => Some("committed"),
        },
        ("labels", [_, ..]) => info.labels.get(&rest.join(".")).map(String::as_str),
        _ => None,
    }
}

/// The filters of a request: one of them must hold, or there are none.
#[derive(Debug)]
pub(super) struct Filters(Vec<Vec<Selector>>);

impl Filters {
    pub(super) fn parse(filters: &[String]) -> Result<Self, CallError> {
        if filters.len() > FILTERS_MAX {
            return Err(CallError::Filter {
                filter: format!("the {FILTERS_MAX} first and more"),
                position: 0,
                expected: format!("at most {FILTERS_MAX} filters"),
            });
        }
        let mut regexes_left = REGEXES_MAX;
        let parse = |filter: &String| -> Result<Vec<Selector>, CallError> {
            let mut parser = Parser::new(filter, regexes_left)?;
            let selectors = parser.filter()?;
            regexes_left = parser.regexes_left;
            Ok(selectors)
        };
        filters.iter().map(parse).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn hold(&self, info: &Info) -> bool {
        self.0.is_empty()
            || self.0.iter().any(|selectors| selectors.iter().all(|selector| selector.holds(info)))
    }
}

struct Parser<'a> {
    filter: &'a str,
    position: usize,
    /// Regular expressions that may still come.
    regexes_left: usize,
}

impl<'a> Parser<'a> {
    fn new(filter: &'a str, regexes_left: usize) -> Result<Self, CallError> {
        let parser = Self { filter, position: 0, regexes_left };
        if filter.len() > FILTER_BYTES_MAX {
            return Err(parser.error(&format!("at most {FILTER_BYTES_MAX} bytes")));
        }
        Ok(parser)
    }

    fn error(&self, expected: &str) -> CallError {
        CallError::Filter {
            filter: self.filter.chars().take(256).collect(),
            position: self.position,
            expected: expected.to_owned(),
        }
    }

    fn rest(&self) -> &'a str {
        self.filter.get(self.position..).unwrap_or_default()
    }

    fn take(&mut self, expected: &str) -> bool {
        let is_there = self.rest().starts_with(expected);
        if is_there {
            self.position += expected.len();
        }
        is_there
    }

    fn take_while(&mut self, holds: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|character| !holds(character)).unwrap_or(rest.len());
        self.position += end;
        rest.get(..end).unwrap_or_default()
    }

    fn filter(&mut self) -> Result<Vec<Selector>, CallError> {
        let mut selectors = Vec::new();
        if self.filter.is_empty() {
            return Ok(selectors);
        }
        loop {
            selectors.push(self.selector()?);
            if self.rest().is_empty() {
                return Ok(selectors);
            }
            if !self.take(",") {
                return Err(self.error("a comma or the end"));
            }
        }
    }

    fn selector(&mut self) -> Result<Selector, CallError> {
        let mut path = vec![self.field()?];
        while self.take(".") {
            path.push(self.field()?);
        }
        let test = if self.rest().is_empty() || self.rest().starts_with(',') {
            Test::Present
        } else if self.take("==") {
            Test::Equal(self.value("\"'")?)
        } else if self.take("!=") {
            Test::NotEqual(self.value("\"'")?)
        } else if self.take("~=") {
            let position = self.position;
            let Some(left) = self.regexes_left.checked_sub(1) else {
                return Err(self.error(&format!("at most {REGEXES_MAX} regular expressions")));
            };
            self.regexes_left = left;
            let text = self.value("\"'/|")?;
            let regex = RegexBuilder::new(&text).size_limit(REGEX_BYTES_MAX).build();
            Test::Matches(Box::new(regex.map_err(|error| {
                self.position = position;
                self.error(&format!("a regular expression: {error}"))
            })?))
        } else {
            return Err(self.error("`==`, `!=` or `~=`"));
        };
        Ok(Selector { path, test })
    }

    fn field(&mut self) -> Result<String, CallError> {
        if let Some(quoted) = self.quoted("\"'")? {
            return Ok(quoted);
        }
        let is_first = |character: char| character.is_ascii_alphabetic();
        if !self.rest().starts_with(is_first) {
            return Err(self.error("the name of a field, or a quoted one"));
        }
        let is_more = |character: char| character.is_ascii_alphanumeric() || character == '_';
        Ok(self.take_while(is_more).to_owned())
    }

    fn value(&mut self, quotes: &str) -> Result<String, CallError> {
        if let Some(quoted) = self.quoted(quotes)? {
            return Ok(quoted);
        }
        let value = self.take_while(|character| character != ',' && !character.is_whitespace());
        if value.is_empty() { Err(self.error("a value")) } else { Ok(value.to_owned()) }
    }

    /// A quoted text, if one of these quotes is next. Escapes are those that Go writes.
    fn quoted(&mut self, quotes: &str) -> Result<Option<String>, CallError> {
        let mut characters = self.rest().char_indices();
        let Some((_, quote)) = characters.next().filter(|(_, first)| quotes.contains(*first))
        else {
            return Ok(None);
        };
        let mut text = String::new();
        let start = self.position;
        while let Some((offset, character)) = characters.next() {
            self.position = start + offset;
            if character == quote {
                self.position += quote.len_utf8();
                return Ok(Some(text));
            }
            if character != '\\' {
                text.push(character);
                continue;
            }
            let escaped = characters.next().map(|(_, escaped)| escaped);
            let mut code = |digits: usize| {
                let code: String =
                    characters.by_ref().take(digits).map(|(_, digit)| digit).collect();
                u32::from_str_radix(&code, 16).ok().and_then(char::from_u32)
            };
            let unescaped = match escaped {
                Some('n') => Some('\n'),
                Some('r') => Some('\r'),
                Some('t') => Some('\t'),
                Some('x') => code(2).filter(char::is_ascii),
                Some('u') => code(4),
                Some('U') => code(8),
                Some(same) if same == quote || same == '\\' => Some(same),
                // A regular expression keeps the escapes that are its own.
                Some(other) if matches!(quote, '/' | '|') => {
                    text.push('\\');
                    Some(other)
                }
                _ => None,
            };
            text.push(unescaped.ok_or_else(|| self.error("an escape such as \\\" or \\n"))?);
        }
        self.position = self.filter.len();
        Err(self.error("the closing quote"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info() -> Info {
        let labels = [("containerd.io/snapshot.ref", "sha256:12"), ("a", "x y"), ("b.c", "1,2")];
        Info {
            name: "default/1/extract-1 sha256:12".to_owned(),
            parent: "default/2/base".to_owned(),
            kind: Kind::Active.into(),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            ..Info::default()
        }
    }

    fn holds(filters: &[&str]) -> bool {
        let filters: Vec<_> = filters.iter().map(|filter| (*filter).to_owned()).collect();
        Filters::parse(&filters).unwrap().hold(&info())
    }

    #[test]
    fn filters_hold() {
        for filter in [
            "",
            "kind==active",
            "kind!=view,parent==default/2/base",
            "name==\"default/1/extract-1 sha256:12\"",
            "parent~=^default/",
            "parent~=/^default\\/[0-9]+/",
            "parent~=|base$|",
            "labels.\"containerd.io/snapshot.ref\"==\"sha256:12\"",
            "labels.\"containerd.io/snapshot.ref\"==sha256:12",
            "labels.a",
            "labels.a==\"x y\"",
            "labels.a=='x\\x20y'",
            "labels.b.c==\"1,2\"",
            "labels.missing!=x",
            "parent",
        ] {
            assert!(holds(&[filter]), "{filter}");
        }
        assert!(holds(&[]));
        let bottom = Info { parent: String::new(), ..info() };
        assert!(Filters::parse(&["parent==\"\"".to_owned()]).unwrap().hold(&bottom));
        assert!(holds(&["kind==view", "kind==active"]), "one of several is enough");
    }

    #[test]
    fn filters_do_not_hold() {
        for filter in [
            "kind==committed",
            "kind==active,name==x",
            "name==default/1/extract-1",
            "labels.missing",
            "labels.missing==\"\"",
            "labels",
            "unknown",
            "kind.active",
            "parent~=^base",
        ] {
            assert!(!holds(&[filter]), "{filter}");
        }
        assert!(!holds(&["kind==view", "kind==committed"]));
    }

    #[test]
    fn what_is_no_filter_is_refused() {
        for (filter, at) in [
            ("kind=active", 4),
            ("==x", 0),
            ("kind==", 6),
            ("kind==active,", 13),
            ("name==\"open", 11),
            ("name==\"\\q\"", 7),
            ("labels.", 7),
            ("name~=(", 6),
            ("kind==active x", 12),
            ("1a", 0),
        ] {
            match Filters::parse(&[filter.to_owned()]) {
                Err(CallError::Filter { position, .. }) => assert_eq!(position, at, "{filter}"),
                other => panic!("{filter}: {other:?}"),
            }
        }
        assert!(Filters::parse(&vec![String::new(); FILTERS_MAX + 1]).is_err());
        assert!(Filters::parse(&[format!("a=={}", "x".repeat(FILTER_BYTES_MAX))]).is_err());
        assert!(Filters::parse(&["name~=(x{1000}){1000}".to_owned()]).is_err());
        // The bound is on those of the whole request.
        let regexes = |filters: usize, each: usize| {
            Filters::parse(&vec![vec!["name~=x{100}"; each].join(","); filters])
        };
        assert!(regexes(4, REGEXES_MAX / 4).is_ok());
        assert!(regexes(1, REGEXES_MAX + 1).is_err());
        assert!(regexes(5, REGEXES_MAX / 4).is_err());
    }

    proptest! {
        #[test]
        fn no_filter_is_too_strange(filter in "\\PC{0,40}") {
            let _ = Filters::parse(&[filter]);
        }

        #[test]
        fn a_quoted_name_is_found(name in "[ -~]{1,40}") {
            let quoted = name.replace('\\', "\\\\").replace('"', "\\\"");
            let filters = Filters::parse(&[format!("name==\"{quoted}\"")]).unwrap();
            let named = Info { name: name.clone(), ..Info::default() };
            prop_assert!(filters.hold(&named));
            let other = Info { name: format!("{name}x"), ..Info::default() };
            prop_assert!(!filters.hold(&other));
        }
    }
}

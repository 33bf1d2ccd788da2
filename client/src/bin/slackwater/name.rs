//! What the command line names: paths on the appliance, snapshots, labels, durations.

use std::str::FromStr;
use std::time::Duration;

use slackwater_client::Client;
use slackwater_client::query::ListSnapshots;
use slackwater_client::types::SnapshotId;

use crate::failure::Failure;

/// The path below the export that `text` means: `/slackwater/images/a.img` (as an NFS client
/// sees the export), `/images/a.img` and `images/a.img` are one path.
pub(crate) fn path(text: &str, export_path: &str) -> Result<String, Failure> {
    let path = below_export(text, export_path);
    let is_plain = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if !is_plain || path.contains('\0') {
        return Err(Failure::Usage(format!(
            "`{text}` is no path of a file: expected names joined by `/`, such as images/debian.img"
        )));
    }
    Ok(path.to_owned())
}

/// The beginning of a path below the export; the export itself is the beginning of all.
pub(crate) fn prefix<'a>(text: &'a str, export_path: &str) -> &'a str {
    if text == export_path { "" } else { below_export(text, export_path) }
}

fn below_export<'a>(text: &'a str, export_path: &str) -> &'a str {
    let export_path = export_path.trim_end_matches('/');
    let below = text
        .strip_prefix(export_path)
        .filter(|rest| !export_path.is_empty() && rest.starts_with('/'))
        .unwrap_or(text);
    below.strip_prefix('/').unwrap_or(below)
}

/// The snapshot that `text` means: an id, or else a name.
pub(crate) async fn snapshot(client: &Client, text: &str) -> Result<SnapshotId, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let query = ListSnapshots { name: Some(text.to_owned()), limit: Some(1), ..Default::default() };
    let page = client.snapshots(&query).await?;
    let found = page.items.iter().find(|snapshot| snapshot.name.as_deref() == Some(text));
    found.map(|snapshot| snapshot.id).ok_or_else(|| {
        Failure::NotFound(format!("no snapshot has the name `{text}`, and it is not an id"))
    })
}

/// A label, `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// A change of labels: `KEY=VALUE` sets one, `KEY-` removes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LabelChange {
    Set(String, String),
    Remove(String),
}

impl FromStr for LabelChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok((key, value)) = label(text) {
            return Ok(Self::Set(key, value));
        }
        match text.strip_suffix('-') {
            Some(key) if !key.is_empty() && !key.contains('=') => Ok(Self::Remove(key.to_owned())),
            _ => Err("expected KEY=VALUE to set a label, or KEY- to remove it".to_owned()),
        }
    }
}

/// A duration such as `90s`, `30m`, `12h` or `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let refuse = || "expected a number and s, m, h or d, such as 30m, 12h or 7d".to_owned();
    let unit_seconds = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 60 * 60,
        Some('d') => 24 * 60 * 60,
        _ => return Err(refuse()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| refuse())?;
    number.checked_mul(unit_seconds).filter(|&n| n > 0).map(Duration::from_secs).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_taken_in_every_form_people_have_it() {
        for text in ["images/a.img", "/images/a.img", "/slackwater/images/a.img"] {
            assert_eq!(path(text, "/slackwater").unwrap(), "images/a.img", "{text}");
        }
        // A directory that happens to bear the export's name stays reachable.
        assert_eq!(path("slackwater/a.img", "/slackwater").unwrap(), "slackwater/a.img");
        assert_eq!(path("/slackwater2/a", "/slackwater").unwrap(), "slackwater2/a");
        assert_eq!(path("/slackwater", "/slackwater").unwrap(), "slackwater");
        assert_eq!(path("/a", "/").unwrap(), "a");
        for bad in ["", "/", "a//b", "a/", "../a", "a/../b", "./a", "/slackwater/", "a\0b"] {
            let failure = path(bad, "/slackwater").unwrap_err();
            assert!(matches!(failure, Failure::Usage(_)), "{bad}");
        }
    }

    #[test]
    fn a_prefix_may_be_empty_or_end_anywhere() {
        for (text, expected) in [("", ""), ("/", ""), ("/slackwater", ""), ("/slackwater/", "")] {
            assert_eq!(prefix(text, "/slackwater"), expected, "{text}");
        }
        assert_eq!(prefix("/slackwater/ima", "/slackwater"), "ima");
        assert_eq!(prefix("images/", "/slackwater"), "images/");
    }

    #[test]
    fn labels_are_read() {
        assert_eq!(label("k=v=w").unwrap(), ("k".to_owned(), "v=w".to_owned()));
        assert!(label("=v").is_err() && label("k").is_err());
        assert_eq!("k-".parse(), Ok(LabelChange::Remove("k".to_owned())));
        assert_eq!("k=-".parse(), Ok(LabelChange::Set("k".to_owned(), "-".to_owned())));
        assert!("k".parse::<LabelChange>().is_err() && "-".parse::<LabelChange>().is_err());
    }

    #[test]
    fn durations_are_read() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(604_800)));
        for bad in ["", "d", "7", "0h", "-1h", "1w", "1.5h", "99999999999999999999d", "5\u{e9}"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}

//! `slackwater-driver image published` and `unpublish`: what is kept for images elsewhere, and the end of that.

use std::io::Write as _;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use slackwater_client::types::{ImageName, SnapshotId, Timestamp};

use super::age::{ago, parse_age, since};
use super::{Format, print};
use crate::control::PublishedAnswer;
use crate::engine::daemon::Daemon;
use crate::error::DriverError;
use crate::image::name;
use crate::worker::{Chosen, Published, Unpublished, publisher};

/// Which of them are listed; all conditions hold at once.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct PublishedArguments {
    /// Only those of images whose name has this text in it
    text: Option<String>,
    /// Only those that this worker (or token) publishes
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Only those that were published last so long ago, such as 30d, 12h or 90m
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    older_than: Option<Duration>,
}

/// Arguments of unpublish.
#[derive(Clone, Debug, Args)]
pub(super) struct UnpublishArguments {
    /// The image, or a snapshot by its id
    ///
    /// Of an image, the snapshots that other images refer to stay. A snapshot is published no more for any image.
    #[arg(value_name = "IMAGE|SNAPSHOT")]
    what: String,
}

pub(super) async fn list(
    arguments: &PublishedArguments,
    daemon: &Daemon,
    format: Format,
) -> Result<(), DriverError> {
    let chosen = Chosen {
        text: arguments.text.clone(),
        by: arguments.by.clone(),
        older_than_seconds: arguments.older_than.map(|age| age.as_secs()),
    };
    let PublishedAnswer { moment, mut published } = daemon.published(&chosen).await?;
    let text = arguments.text.as_deref().unwrap_or_default();
    // By image; of each the layers that were published last come first.
    published.sort_by_cached_key(|published| {
        let image = shown_image(published, text).map(str::to_owned);
        (image.is_none(), image, std::cmp::Reverse(published.published_at), published.snapshot_id)
    });
    match format {
        Format::Json => print(&format!("{:#}\n", json!(published))),
        Format::Text => print(&table(&published, moment, text)),
    }
    Ok(())
}

/// The image of which the row is: the first that has the text in its name.
fn shown_image<'a>(published: &'a Published, text: &str) -> Option<&'a str> {
    let mut names = published.images.keys().map(String::as_str);
    names.find(|name| ImageName::is_name(name) && name.contains(text))
}

fn table(published: &[Published], moment: Timestamp, text: &str) -> String {
    let mut rows = vec![["IMAGE", "SNAPSHOT", "PUBLISHED", "RECLAIMABLE", "BY"].map(str::to_owned)];
    rows.extend(published.iter().map(|published| row(published, moment, text)));
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let [image, snapshot, at, bytes] = [0, 1, 2, 3].map(width);
    let lines = rows.iter().map(|[name, id, published, reclaimable, by]| {
        format!("{name:image$}  {id:snapshot$}  {published:at$}  {reclaimable:>bytes$}  {by}\n")
    });
    lines.collect()
}

fn row(published: &Published, moment: Timestamp, text: &str) -> [String; 5] {
    let reclaimable = published.reclaimable.map_or_else(
        || "-".to_owned(),
        |told| {
            let about = if told.sampled_one_in > 1 { "about " } else { "" };
            format!("{about}{}", bytes(told.bytes))
        },
    );
    [
        images(published, text),
        published.snapshot_id.to_string(),
        format!("{} ago", ago(since(published.published_at, moment))),
        reclaimable,
        publishers(published),
    ]
}

/// That image, and how many others there are.
fn images(published: &Published, text: &str) -> String {
    let Some(shown) = shown_image(published, text) else { return "-".to_owned() };
    let shown = shown.escape_debug();
    match published.images.len() {
        1 => shown.to_string(),
        many => format!("{shown} and {} more", many - 1),
    }
}

fn publishers(published: &Published) -> String {
    match published.publishers.is_empty() {
        true => "others".to_owned(),
        false => {
            published.publishers.iter().map(|name| publisher(name)).collect::<Vec<_>>().join(", ")
        }
    }
}

/// A size in binary units.
fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut whole, mut rest, mut unit) = (bytes, 0, "B");
    for next in units {
        if whole < 1024 {
            break;
        }
        (whole, rest, unit) = (whole / 1024, whole % 1024, next);
    }
    match unit {
        "B" => format!("{whole} B"),
        unit => format!("{whole}.{} {unit}", rest * 10 / 1024),
    }
}

pub(super) async fn unpublish(
    arguments: &UnpublishArguments,
    daemon: &Daemon,
    format: Format,
) -> Result<(), DriverError> {
    let unpublished = match arguments.what.parse::<SnapshotId>() {
        Ok(snapshot) => one(daemon, snapshot).await?,
        Err(_) => daemon.unpublish_image(image(&arguments.what)?).await?,
    };
    match format {
        Format::Json => print(&format!("{:#}\n", json!(unpublished))),
        Format::Text => remark(&arguments.what, &unpublished),
    }
    Ok(())
}

/// The name by which an image was published.
fn image(text: &str) -> Result<ImageName, DriverError> {
    match name::in_full(text).parse() {
        Ok(image) if !text.is_empty() && ImageName::is_name(text) => Ok(image),
        _ => Err(DriverError::Usage(format!(
            "`{}` is neither an image's name, such as registry.example/work:1, nor a snapshot's id",
            text.escape_debug()
        ))),
    }
}

async fn one(daemon: &Daemon, snapshot: SnapshotId) -> Result<Unpublished, DriverError> {
    let mut unpublished = Unpublished::default();
    match daemon.unpublish(snapshot).await? {
        Some(true) => unpublished.kept.push(snapshot),
        Some(false) => unpublished.ended.push(snapshot),
        // This worker publishes it no more. Whether others do, the appliance did not say.
        None => {}
    }
    Ok(unpublished)
}

/// Says what was done, on standard error: standard output has what was asked for, and nothing was.
fn remark(what: &str, unpublished: &Unpublished) {
    let text = match (unpublished.ended.len(), unpublished.kept.len()) {
        (0, 0) => "ended; the appliance did not say whether others publish it".to_owned(),
        (ended, 0) => format!("{} published no more", snapshots(ended)),
        (0, kept) => format!("{} still published, {KEPT}", snapshots(kept)),
        (ended, kept) => format!(
            "{} published no more, {} still published, {KEPT}",
            snapshots(ended),
            snapshots(kept)
        ),
    };
    // Nothing can be done when standard error is gone.
    let _ = writeln!(std::io::stderr(), "slackwater-driver: {what}: {text}");
}

/// Why what was unpublished is published all the same.
const KEPT: &str = "for other images or by others: `slackwater snapshot show` tells";

fn snapshots(count: usize) -> String {
    match count {
        1 => "1 snapshot is".to_owned(),
        count => format!("{count} snapshots are"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use slackwater_client::types::Reclaimable;

    use super::*;

    const DAY_NANOS: u64 = 86_400_000_000_000;
    const NOW: Timestamp = Timestamp::from_nanos(20_000 * DAY_NANOS);

    fn published(images: &[&str], publishers: &[&str], days: u64) -> Published {
        let by: std::collections::BTreeSet<_> =
            publishers.iter().map(|by| (*by).to_owned()).collect();
        Published {
            snapshot_id: SnapshotId::from_bytes([7; 16]),
            images: images
                .iter()
                .map(|image| ((*image).to_owned(), by.clone()))
                .collect::<BTreeMap<_, _>>(),
            publishers: by,
            published_at: Timestamp::from_nanos(NOW.as_nanos() - days * DAY_NANOS),
            used_bytes: 4096,
            reclaimable: Some(Reclaimable { bytes: 3 << 19, blocks: 384, sampled_one_in: 1 }),
        }
    }

    #[test]
    fn the_table_names_images_dates_sizes_and_publishers() {
        let all = [
            published(&["r.example/a:1", "r.example/b:1"], &["node-1", "node-2"], 3),
            published(&["*", "?"], &["*"], 0),
            published(&[], &[], 400),
        ];
        let table = table(&all, NOW, "");
        let lines: Vec<_> = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        let id = SnapshotId::from_bytes([7; 16]);
        assert_eq!(
            lines,
            [
                "IMAGE SNAPSHOT PUBLISHED RECLAIMABLE BY".to_owned(),
                format!("r.example/a:1 and 1 more {id} 3d ago 1.5 MiB node-1, node-2"),
                format!("- {id} 0s ago 1.5 MiB others"),
                format!("- {id} 400d ago 1.5 MiB others"),
            ]
        );
        let chosen = super::table(&all[..1], NOW, "b:");
        assert!(chosen.contains("r.example/b:1 and 1 more"), "{chosen}");
        assert_eq!([0, 1023, 1024, 1 << 40].map(bytes), ["0 B", "1023 B", "1.0 KiB", "1.0 TiB"]);
    }

    #[test]
    fn an_image_is_found_by_its_short_name_and_nothing_by_a_wildcard() {
        assert_eq!(image("work").unwrap().as_str(), "docker.io/library/work:latest");
        for bad in ["*", "?", "", "a b"] {
            assert!(image(bad).is_err(), "{bad}");
        }
    }
}

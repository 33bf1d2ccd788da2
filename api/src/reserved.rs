//! What the appliance itself writes into the names and labels of snapshots, and no call sets as it likes.
//!
//! ```text
//! name   slackwater:chain:CHAIN:SIZE           the snapshot that workers with disks of that size take for the chain
//! label  slackwater:chain:CHAIN  =  MAKERS     the snapshot is that chain, say these: names of tokens, which hold no
//!                                              space, with one in between; empty where none is asked for
//! label  slackwater:blobs:CHAIN  =  BLOBS      as that chain it is for those who may read one of these blobs of
//!                                              registries, a space in between; without this label it is for all
//! label  slackwater:published    =  PUBLISHERS these callers published the snapshot, a space in between; `*` for others
//!                                              whose names are not known
//! label  slackwater:images       =  IMAGES     for these images: PUBLISHER=NAME each, a space in between; `*` is the
//!                                              name of those whose names are not known, or beyond IMAGES_BYTES_MAX
//! label  slackwater:taken-by     =  NAME       the token of that name took it of a worker's file, to keep: that worker
//!                                              does not end it
//! label  slackwater:published-at =  TIME       when a caller published it last, or at most an hour before; with `~` before
//!                                              it if the clock had not run steadily then
//! ```
//! Workers take layers from each other by these. So they are made by calls of their own (`routes/chains.rs`,
//! `publishing.rs`), which record who made them; the others refuse what begins with `slackwater:`, and neither show such a label among the
//! labels nor take it away.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use slackwater_blockstore::{LABEL_BYTES_MAX, LABELS_MAX, Labels};

use crate::chain::{ChainId, RegistryBlob};
use crate::failure::Failure;
use crate::image_name::ImageName;
use crate::timestamp::Timestamp;

/// With what the names and labels begin.
const PREFIX: &str = "slackwater:";

const CHAIN: &str = "slackwater:chain:";

const BLOBS: &str = "slackwater:blobs:";

const PUBLISHED: &str = "slackwater:published";

const IMAGES: &str = "slackwater:images";

const PUBLISHED_AT: &str = "slackwater:published-at";

const TAKEN_BY: &str = "slackwater:taken-by";

/// Most bytes of names of images: what a label's value has, less those that say of publishers that they have more.
const IMAGES_BYTES_MAX: usize = 3072;

/// What parts an image's publisher from its name, which has none.
const OF_PUBLISHER: char = '=';

/// Begins the time of a publishing when the clock had not run steadily yet.
const NOT_BELIEVED: &str = "~";

/// How old the time of the last publishing may get: a push of what was pushed lately changes nothing then.
const DATE_AGE_MAX: Duration = Duration::from_secs(3600);

/// Stands for publishers whose names are not known: of before there was the label, or beyond [`PUBLISHERS_BYTES_MAX`].
pub(crate) const OTHERS: &str = "*";

/// Most bytes of names of publishers: half of what a label's value has.
const PUBLISHERS_BYTES_MAX: usize = 2048;

/// What parts the names of makers, and blobs.
const BETWEEN: char = ' ';

/// Most blobs of a chain: a layer that is in more private repositories is found by the first of them. A label's value
/// has 4,096 bytes.
const BLOBS_MAX: usize = 6;

/// Chains of a snapshot beyond which those who may not change it add none: the rest of its labels is for its owner. It
/// needs one, and one for each way in which images by reference are made of it.
pub(crate) const CHAINS_OF_OTHERS_MAX: usize = 16;

/// For whom a registering call wants a layer to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// For those whom it was for. If it is not registered yet, for those whom the snapshot is for as other chains; for
    /// all, if it is no chain, or one that is for all.
    Same,
    /// For all.
    All,
    /// For those, too, who may read this blob.
    Readers(RegistryBlob),
}

/// The name of the snapshot that is registered for a chain and a size of disk.
pub(crate) fn chain_name(chain: &ChainId, size_bytes: u64) -> String {
    format!("{CHAIN}{chain}:{size_bytes}")
}

/// The labels of a snapshot that this maker registers as a chain. A chain that is for all stays for all: it is known.
pub(crate) fn with_chain(
    mut labels: Labels,
    chain: &ChainId,
    maker: &str,
    audience: &Audience,
) -> Labels {
    let (registered, restricted) = (format!("{CHAIN}{chain}"), format!("{BLOBS}{chain}"));
    let is_for_all = labels.contains_key(&registered) && !labels.contains_key(&restricted);
    match audience {
        Audience::Same if labels.contains_key(&registered) => {}
        Audience::Same => {
            // What it holds is known to those who have it as another chain, and to no more.
            if let Some(blobs) = blobs_of_all(&labels) {
                labels.insert(restricted, blobs);
            }
        }
        Audience::All => {
            labels.remove(&restricted);
        }
        Audience::Readers(_) if is_for_all => {}
        Audience::Readers(blob) => match labels.get_mut(&restricted) {
            Some(blobs) if blobs.split(BETWEEN).count() >= BLOBS_MAX => {}
            Some(blobs) => push_once(blobs, blob.as_str()),
            None => {
                labels.insert(restricted, blob.to_string());
            }
        },
    }
    push_once(labels.entry(registered).or_insert_with(|| maker.to_owned()), maker);
    labels
}

/// The blobs of a snapshot that has chains, none of which is for all.
fn blobs_of_all(labels: &Labels) -> Option<String> {
    let chains = labels.keys().filter_map(|label| label.strip_prefix(CHAIN));
    let mut known = String::new();
    for chain in chains {
        for blob in labels.get(&format!("{BLOBS}{chain}"))?.split(BETWEEN) {
            match known.is_empty() {
                true => blob.clone_into(&mut known),
                false if known.split(BETWEEN).count() < BLOBS_MAX => push_once(&mut known, blob),
                false => {}
            }
        }
    }
    (!known.is_empty()).then_some(known)
}

/// Adds one to a list of words, unless it is there.
fn push_once(words: &mut String, word: &str) {
    if !words.split(BETWEEN).any(|other| other == word) {
        words.push(BETWEEN);
        words.push_str(word);
    }
}

/// [`with_chain`] of one who may not change the snapshot: nothing is added if it has as many chains as others can
/// give it.
pub(crate) fn with_chain_of_another(
    labels: Labels,
    chain: &ChainId,
    maker: &str,
    audience: &Audience,
) -> Labels {
    let chains = labels.keys().filter(|label| label.starts_with(CHAIN)).count();
    let is_known = labels.contains_key(&format!("{CHAIN}{chain}"));
    match is_known || chains < CHAINS_OF_OTHERS_MAX {
        true => with_chain(labels, chain, maker, audience),
        false => labels,
    }
}

/// The labels of a snapshot that this caller published, too.
pub(crate) fn with_publisher(mut labels: Labels, publisher: &str) -> Labels {
    match labels.get_mut(PUBLISHED) {
        None => {
            labels.insert(PUBLISHED.to_owned(), publisher.to_owned());
        }
        Some(known) if known.split(BETWEEN).any(|other| other == publisher) => {}
        Some(known) if known.len() + publisher.len() < PUBLISHERS_BYTES_MAX => {
            push_once(known, publisher);
        }
        Some(known) => push_once(known, OTHERS),
    }
    labels
}

/// The labels of a snapshot that this caller published for an image, too.
pub(crate) fn with_image(mut labels: Labels, publisher: &str, image: &ImageName) -> Labels {
    let entry = |image: &str| format!("{publisher}{OF_PUBLISHER}{image}");
    let (named, more) = (entry(image.as_str()), entry(ImageName::UNKNOWN));
    match labels.get_mut(IMAGES) {
        None => insert_if_room(&mut labels, IMAGES, named),
        Some(known) if known.len() + named.len() < IMAGES_BYTES_MAX => push_once(known, &named),
        Some(known) if known.split(BETWEEN).any(|other| other == named) => {}
        Some(known) if known.len() + more.len() < LABEL_BYTES_MAX => push_once(known, &more),
        Some(_) => {}
    }
    labels
}

/// The labels of a snapshot that this caller does not publish for that image any more.
pub(crate) fn without_image(labels: Labels, publisher: &str, image: &ImageName) -> Labels {
    let gone = format!("{publisher}{OF_PUBLISHER}{image}");
    without_words(labels, IMAGES, |entry| entry == gone)
}

/// When something was published last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Date {
    pub(crate) at: Timestamp,
    /// The clock had run steadily then.
    pub(crate) is_believed: bool,
}

impl Date {
    /// Whether it need not be changed for what is published now.
    pub(crate) fn is_recent(self, now: Self) -> bool {
        // One that is ahead was the word of a clock that was wrong.
        let age = now.at.as_nanos().checked_sub(self.at.as_nanos());
        let is_near = age.is_some_and(|nanos| Duration::from_nanos(nanos) < DATE_AGE_MAX);
        is_near && (self.is_believed || !now.is_believed)
    }

    fn parse(text: &str) -> Option<Self> {
        let (at, is_believed) = match text.strip_prefix(NOT_BELIEVED) {
            Some(at) => (at, false),
            None => (text, true),
        };
        Some(Self { at: at.parse().ok()?, is_believed })
    }
}

/// The labels of a snapshot that was published last at this time.
pub(crate) fn with_date(mut labels: Labels, date: Date) -> Labels {
    if !date_of(&labels).is_some_and(|before| before.is_recent(date)) {
        let mark = if date.is_believed { "" } else { NOT_BELIEVED };
        insert_if_room(&mut labels, PUBLISHED_AT, format!("{mark}{}", date.at));
    }
    labels
}

fn date_of(labels: &Labels) -> Option<Date> {
    Date::parse(labels.get(PUBLISHED_AT)?)
}

/// Sets a label that can be done without: a snapshot may have all the labels that one can have.
fn insert_if_room(labels: &mut Labels, label: &str, value: String) {
    if labels.len() < LABELS_MAX || labels.contains_key(label) {
        labels.insert(label.to_owned(), value);
    }
}

/// The labels of a snapshot that is published by no caller.
pub(crate) fn without_publishers(mut labels: Labels) -> Labels {
    for label in [PUBLISHED, IMAGES, PUBLISHED_AT] {
        labels.remove(label);
    }
    labels
}

/// The labels without the words of one that are to go, and without it if none is left.
fn without_words(mut labels: Labels, label: &str, is_gone: impl Fn(&str) -> bool) -> Labels {
    if let Some(words) = labels.remove(label) {
        let mut others = words.split(BETWEEN).filter(|word| !is_gone(word));
        if let Some(first) = others.next() {
            let mut left = first.to_owned();
            others.for_each(|other| push_once(&mut left, other));
            labels.insert(label.to_owned(), left);
        }
    }
    labels
}

/// The labels of a snapshot that this caller does not publish any more.
pub(crate) fn without_publisher(labels: Labels, publisher: &str) -> Labels {
    let labels = without_words(labels, PUBLISHED, |other| other == publisher);
    match labels.contains_key(PUBLISHED) {
        true => without_words(labels, IMAGES, |entry| publisher_of(entry) == Some(publisher)),
        false => without_publishers(labels),
    }
}

/// Whose entry of an image this is.
fn publisher_of(entry: &str) -> Option<&str> {
    entry.rsplit_once(OF_PUBLISHER).map(|(publisher, _)| publisher)
}

/// Refuses a name that only a registering call gives.
pub(crate) fn refuse_name(name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some(name) if name.starts_with(PREFIX) => Err(refused("name", name)),
        _ => Ok(()),
    }
}

/// Refuses labels of which one only a registering call sets.
pub(crate) fn refuse_labels(labels: &Labels) -> Result<(), Failure> {
    match labels.keys().find(|label| label.starts_with(PREFIX)) {
        Some(label) => Err(refused("label", label)),
        None => Ok(()),
    }
}

fn refused(what: &str, got: &str) -> Failure {
    let shown: String = got.chars().take(128).collect();
    Failure::invalid(format!(
        "the {what} `{}` begins with `{PREFIX}`, which is for the appliance alone: choose another one; chains are registered by POST /v1/chains",
        shown.escape_debug()
    ))
}

/// The labels of a snapshot that this token takes, to keep, of a file of a worker.
pub(crate) fn with_taker(mut labels: Labels, taker: &str) -> Labels {
    labels.insert(TAKEN_BY.to_owned(), taker.to_owned());
    labels
}

/// Which token took the snapshot with these labels, of a file of a worker, to keep.
pub(crate) fn taker(labels: &Labels) -> Option<&str> {
    labels.get(TAKEN_BY).map(String::as_str)
}

/// Whether the snapshot with these labels is registered as a chain.
pub(crate) fn is_registered(labels: &Labels) -> bool {
    labels.keys().any(|label| label.starts_with(CHAIN))
}

/// The labels of a snapshot, by who wrote them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parted {
    /// Those that callers set.
    pub(crate) labels: Labels,
    /// The chains with their makers.
    pub(crate) chains: BTreeMap<ChainId, BTreeSet<String>>,
    /// The chains that are not for all, with the blobs that one has to be able to read one of.
    pub(crate) restricted: BTreeMap<ChainId, BTreeSet<RegistryBlob>>,
    /// Those who published it.
    pub(crate) publishers: BTreeSet<String>,
    /// The images for which they did, each with those who did.
    pub(crate) images: BTreeMap<String, BTreeSet<String>>,
    /// When the last of them did, or at most an hour before that.
    pub(crate) published_at: Option<Date>,
}

/// Parts the labels of a snapshot.
pub(crate) fn part(labels: Labels) -> Parted {
    let mut parted = Parted::default();
    let chain_of = |label: &str, prefix| label.strip_prefix(prefix)?.parse().ok();
    for (label, value) in labels {
        if let Some(chain) = chain_of(&label, CHAIN) {
            let makers = value.split(BETWEEN).map(str::to_owned).collect();
            parted.chains.insert(chain, makers);
        } else if let Some(chain) = chain_of(&label, BLOBS) {
            let blobs = value.split(BETWEEN).filter_map(|blob| blob.parse().ok()).collect();
            parted.restricted.insert(chain, blobs);
        } else if label == PUBLISHED {
            parted.publishers = value.split(BETWEEN).map(str::to_owned).collect();
        } else if label == IMAGES {
            for (publisher, image) in
                value.split(BETWEEN).filter_map(|entry| entry.rsplit_once(OF_PUBLISHER))
            {
                parted.images.entry(image.to_owned()).or_default().insert(publisher.to_owned());
            }
        } else if label == PUBLISHED_AT {
            parted.published_at = Date::parse(&value);
        } else if !label.starts_with(PREFIX) {
            parted.labels.insert(label, value);
        }
    }
    parted
}

/// The labels of a snapshot after a caller replaced those that he sets.
pub(crate) fn replaced(old: Labels, new: Labels) -> Labels {
    let kept = old.into_iter().filter(|(label, _)| label.starts_with(PREFIX));
    new.into_iter().chain(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_what_begins_so_is_reserved() {
        for free in ["slackwater.worker", "slackwater", "chain:sha256:00", "Slackwater:x", ""] {
            assert!(refuse_name(Some(free)).is_ok(), "{free}");
            assert!(refuse_labels(&labels(&[(free, "x")])).is_ok(), "{free}");
        }
        assert!(refuse_name(None).is_ok());
        for reserved in ["slackwater:", "slackwater:chain:x", "slackwater:else"] {
            assert!(refuse_name(Some(reserved)).is_err(), "{reserved}");
            assert!(refuse_labels(&labels(&[("a", "x"), (reserved, "x")])).is_err(), "{reserved}");
        }
    }

    fn makers(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn reserved_labels_are_shown_apart_and_stay() {
        let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
        let set = labels(&[("a", "1"), ("slackwater:later", "x")]);
        let all = with_chain(set, &chain, "node", &Audience::Readers(blob(0)));
        let expected = Parted {
            labels: labels(&[("a", "1")]),
            chains: [(chain.clone(), makers(&["node"]))].into(),
            restricted: [(chain.clone(), [blob(0)].into())].into(),
            publishers: makers(&["node", "other"]),
            images: [("a:1".to_owned(), makers(&["node"]))].into(),
            published_at: Some(Date { at: Timestamp::from_nanos(7), is_believed: true }),
        };
        let all = with_publisher(with_publisher(all, "node"), "other");
        let all = with_image(all, "node", &"a:1".parse().unwrap());
        let all = with_date(all, Date { at: Timestamp::from_nanos(7), is_believed: true });
        assert_eq!(part(all.clone()), expected);
        let replaced = part(replaced(all, labels(&[("b", "2")])));
        assert_eq!(replaced, Parted { labels: labels(&[("b", "2")]), ..expected });
    }

    #[test]
    fn another_chain_of_a_snapshot_is_for_no_more_than_the_others() {
        let chains = ["a", "b", "c"]
            .map(|digit| format!("sha256:{}", digit.repeat(64)).parse::<ChainId>().unwrap());
        let [first, second, third] = &chains;
        let readers = |number| Audience::Readers(blob(number));
        let one = with_chain(Labels::new(), first, "node", &readers(1));
        let two = with_chain(one.clone(), second, "node", &readers(2));
        let restricted =
            |labels| part(with_chain(labels, third, "node", &Audience::Same)).restricted;
        assert_eq!(restricted(one)[third], [blob(1)].into());
        assert_eq!(restricted(two.clone())[third], [blob(1), blob(2)].into());
        let open = with_chain(two, second, "node", &Audience::All);
        assert_eq!(restricted(open).get(third), None);
        let many = (0..9).map(readers);
        let add = |labels, audience| with_chain(labels, first, "node", &audience);
        assert_eq!(restricted(many.fold(Labels::new(), add))[third].len(), BLOBS_MAX);
    }

    fn blob(number: usize) -> RegistryBlob {
        let digits = "a".repeat(64);
        format!("registry.example.com/{number}@sha256:{digits}").parse().unwrap()
    }

    #[test]
    fn a_layer_is_for_those_whom_each_registration_adds_and_once_for_all_stays_so() {
        let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
        let after = |audiences: &[Audience]| {
            let add = |labels, audience: &Audience| with_chain(labels, &chain, "node", audience);
            let parted = part(audiences.iter().fold(Labels::new(), add));
            parted.restricted.get(&chain).map(|blobs| blobs.iter().cloned().collect::<Vec<_>>())
        };
        let readers = |number| Audience::Readers(blob(number));
        assert_eq!(after(&[Audience::Same]), None);
        assert_eq!(after(&[readers(1)]), Some(vec![blob(1)]));
        assert_eq!(after(&[readers(1), Audience::Same]), Some(vec![blob(1)]));
        let two = Some(vec![blob(1), blob(2)]);
        assert_eq!(after(&[readers(2), readers(1), readers(2)]), two);
        assert_eq!(after(&[readers(1), Audience::All, readers(2), Audience::Same]), None);
        assert_eq!(after(&[Audience::Same, readers(1)]), None);
        let many: Vec<_> = (0..9).map(readers).collect();
        assert_eq!(after(&many).unwrap(), (0..BLOBS_MAX).map(blob).collect::<Vec<_>>());
    }

    #[test]
    fn publishers_come_and_go_and_those_without_a_place_stay() {
        let publishers = |labels: &Labels| part(labels.clone()).publishers;
        let mut labels = Labels::new();
        for (name, expected) in [("a", &["a"][..]), ("b", &["a", "b"]), ("a", &["a", "b"])] {
            labels = with_publisher(labels, name);
            assert_eq!(publishers(&labels), makers(expected));
        }
        labels = without_publisher(without_publisher(labels, "c"), "a");
        assert_eq!(publishers(&labels), makers(&["b"]));
        assert_eq!(without_publisher(labels.clone(), "b"), Labels::new());
        assert_eq!(without_publishers(labels), Labels::new());
        let many = (0..PUBLISHERS_BYTES_MAX).fold(Labels::new(), |labels, number| {
            with_publisher(labels, &format!("worker-{number}"))
        });
        assert!(publishers(&many).contains(OTHERS));
        assert!(many[PUBLISHED].len() <= PUBLISHERS_BYTES_MAX + 2);
        // One that has a place keeps it, and takes none of others.
        let full: String = "x".repeat(PUBLISHERS_BYTES_MAX - 1);
        let labels = with_publisher(with_publisher(Labels::new(), &full), &full);
        assert_eq!(publishers(&labels), makers(&[&full]));
    }

    #[test]
    fn the_time_of_publishing_is_an_hour_old_at_most() {
        let date = |seconds: u64, is_believed| Date {
            at: Timestamp::from_nanos(seconds * 1_000_000_000),
            is_believed,
        };
        let labels = with_date(Labels::new(), date(10_000, true));
        for (now, expected) in
            [(10_000, 10_000), (13_599, 10_000), (13_600, 13_600), (9_999, 9_999)]
        {
            let later = with_date(labels.clone(), date(now, true));
            assert_eq!(date_of(&later), Some(date(expected, true)), "{now}");
        }
        // A time that is believed takes the place of one that was not, and not the other way round.
        assert_eq!(
            date_of(&with_date(labels.clone(), date(10_001, false))),
            Some(date(10_000, true))
        );
        let doubtful = with_date(Labels::new(), date(10_000, false));
        assert_eq!(date_of(&doubtful), Some(date(10_000, false)));
        assert_eq!(date_of(&with_date(doubtful, date(10_001, true))), Some(date(10_001, true)));
        let full: Labels =
            (0..LABELS_MAX).map(|number| (number.to_string(), String::new())).collect();
        assert_eq!(with_date(full.clone(), date(1, true)), full);
    }

    #[test]
    fn images_go_with_those_who_told_them() {
        let image = |name: &str| name.parse::<ImageName>().unwrap();
        let images = |labels: &Labels| {
            let images = part(labels.clone()).images.into_iter();
            images
                .map(|(image, by)| (image, by.into_iter().collect::<Vec<_>>()))
                .collect::<Vec<_>>()
        };
        let told = |by: &str, name: &str| (name.to_owned(), vec![by.to_owned()]);
        // The name of a token may have the sign that parts it from the image.
        let mut labels = Labels::new();
        for (by, name) in [("a=b", "x:1"), ("", "y:1"), ("a=b", "y:2")] {
            labels = with_image(with_publisher(labels, by), by, &image(name));
        }
        assert_eq!(images(&labels), [told("a=b", "x:1"), told("", "y:1"), told("a=b", "y:2")]);
        let labels = without_image(labels, "a=b", &image("x:1"));
        assert_eq!(images(&labels), [told("", "y:1"), told("a=b", "y:2")]);
        assert_eq!(images(&without_publisher(labels.clone(), "a=b")), [told("", "y:1")]);
        let neither = without_publisher(without_publisher(labels, "a=b"), "");
        assert_eq!(neither, Labels::new());
        let many = (0..300).fold(Labels::new(), |labels, number| {
            with_image(labels, &format!("worker-{number}"), &image("long/name/of/an/image:1"))
        });
        assert!(part(many.clone()).images.contains_key("*"));
        assert!(many[IMAGES].len() <= LABEL_BYTES_MAX);
    }

    #[test]
    fn each_maker_is_there_once() {
        let chain: ChainId = format!("sha256:{}", "a".repeat(64)).parse().unwrap();
        let told = |names: &[&str]| {
            let add = |labels, name: &&str| with_chain(labels, &chain, name, &Audience::Same);
            part(names.iter().fold(Labels::new(), add)).chains.remove(&chain).unwrap()
        };
        for names in [&[""][..], &["one"], &["", "one"], &["one", "", "on"]] {
            assert_eq!(told(names), makers(names), "{names:?}");
            assert_eq!(told(&[names, names].concat()), makers(names), "{names:?}");
        }
    }
}

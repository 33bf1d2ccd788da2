//! Which snapshots a list of the VMstore face holds, and in what order.

use std::cmp::Ordering;

use slackwater_blockstore::{
    DeletionPolicy, Labels, Result as StoreResult, Snapshot, SnapshotFilter, SnapshotId, Store,
    Timestamp,
};

use crate::query::{QueryError, Reader};

/// Items of a page: VMstore's own default, which clients that do not page rely on.
pub(crate) const LIMIT_DEFAULT: usize = 2000;

/// Most items of a page.
const LIMIT_MAX: usize = LIMIT_DEFAULT;

/// Snapshots that one list looks at. Beyond that the list says `overflow`.
const SCAN_MAX: usize = 100_000;

/// Snapshots that are read from the store in one go.
const BATCH: usize = 64;

/// Bytes of a text that count for the order: what tells snapshots apart comes first. With the longest
/// labels those of all would take hundreds of MiB.
const SORTED_BYTES_MAX: usize = 128;

/// Labels under which what VMstore's clients say about a snapshot is kept.
pub(crate) const LABEL_DESCRIPTION: &str = "vmstore/description";
pub(crate) const LABEL_VM_NAME: &str = "vmstore/vm-name";
pub(crate) const LABEL_VM_UUID: &str = "vmstore/vm-uuid";
pub(crate) const LABEL_INSTANCE_ID: &str = "vmstore/instance-id";
pub(crate) const LABEL_CREATOR: &str = "vmstore/creator";

/// All of them.
const LABELS: [&str; 5] =
    [LABEL_DESCRIPTION, LABEL_VM_NAME, LABEL_VM_UUID, LABEL_INSTANCE_ID, LABEL_CREATOR];

/// The type of snapshots that were taken through this face.
pub(crate) const TYPE_CINDER: &str = "CINDER_GENERATED_SNAPSHOT";
/// The type of all others.
pub(crate) const TYPE_USER: &str = "USER_GENERATED_SNAPSHOT";

/// Filters that VMstore knows and this face does not, with the values that choose all there is here. A client that
/// deletes what a list holds must not get more than it asked for.
const UNSUPPORTED: [(&str, &[&str]); 11] = [
    ("consistency", &["CRASH_CONSISTENT"]),
    ("deleted", FLAGS),
    ("fromDate", &["0"]),
    ("instanceId", &[]),
    ("location", &[]),
    ("locked", FLAGS),
    ("name", &[]),
    ("offset", &["0"]),
    ("orphaned", FLAGS),
    ("replica", FLAGS),
    ("toDate", &[]),
];

/// What a filter of flags may ask for, as no snapshot here has one.
const FLAGS: &[&str] = &["no", "false", "both"];

/// What the query asks for. Other parameters that VMstore knows and this face does not are ignored,
/// as its clients send them without need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    vm_uuid: Option<String>,
    uuid: Option<String>,
    contain: Option<String>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    has_clone: Option<bool>,
    /// Any of these; empty: all.
    types: Vec<String>,
    pub(crate) limit: usize,
    /// From 1.
    pub(crate) page: usize,
    sorted_by: SortKey,
    descending: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SortKey {
    CreateTime,
    Description,
    VmName,
    CloneReferenceCount,
}

impl Listing {
    pub(crate) fn decode(query: &str) -> Result<Self, QueryError> {
        let mut reader = Reader::new(query)?;
        for (name, harmless) in UNSUPPORTED {
            let is_harmless = |value: &String| {
                value.is_empty() || harmless.iter().any(|one| one.eq_ignore_ascii_case(value))
            };
            if !reader.all(name).iter().all(is_harmless) {
                return Err(QueryError::new(
                    name,
                    "is a filter that is not supported: leave it out",
                ));
            }
        }
        let since = time(&mut reader, "since")?;
        let until = time(&mut reader, "until")?;
        let has_clone = match reader.one("hasClone")?.map(|text| text.to_ascii_lowercase()) {
            None => None,
            Some(text) => match text.as_str() {
                "yes" | "true" => Some(true),
                "no" | "false" => Some(false),
                "both" => None,
                _ => return Err(QueryError::new("hasClone", "expected Yes, No or Both")),
            },
        };
        let types = reader.all("type");
        let sorted_by = match reader.one("sortedBy")?.as_deref() {
            None | Some("createTime") => SortKey::CreateTime,
            Some("description") => SortKey::Description,
            Some("vmName") => SortKey::VmName,
            Some("cloneReferenceCount") => SortKey::CloneReferenceCount,
            Some(_) => {
                let known = "expected createTime, description, vmName or cloneReferenceCount";
                return Err(QueryError::new("sortedBy", known));
            }
        };
        let descending = match reader.one("sortOrder")?.map(|text| text.to_ascii_uppercase()) {
            None => false,
            Some(text) if text == "ASC" => false,
            Some(text) if text == "DESC" => true,
            Some(_) => return Err(QueryError::new("sortOrder", "expected ASC or DESC")),
        };
        Ok(Self {
            vm_uuid: reader.one("vmUuid")?,
            uuid: reader.one("uuid")?,
            contain: reader.one("contain")?,
            since,
            until,
            has_clone,
            types: types.iter().flat_map(|list| list.split(',')).map(str::to_owned).collect(),
            limit: positive(&mut reader, "limit")?.unwrap_or(LIMIT_DEFAULT).min(LIMIT_MAX),
            page: positive(&mut reader, "page")?.unwrap_or(1),
            sorted_by,
            descending,
        })
    }

    fn matches(&self, snapshot: &Snapshot) -> bool {
        let has_clone = snapshot.clone_count > 0;
        self.uuid.as_ref().is_none_or(|uuid| *uuid == snapshot.id.to_string())
            && self.contain.as_ref().is_none_or(|word| contains(snapshot, word))
            && self.since.is_none_or(|since| snapshot.created_at >= since)
            && self.until.is_none_or(|until| snapshot.created_at <= until)
            && self.has_clone.is_none_or(|wanted| wanted == has_clone)
            && (self.types.is_empty()
                || self.types.iter().any(|one| one == snapshot_type(snapshot)))
    }
}

/// Whether the word is in what names the snapshot or its machine. VMstore does not tell upper
/// from lower case.
fn contains(snapshot: &Snapshot, word: &str) -> bool {
    let word = word.to_lowercase();
    [description(snapshot), vm_name(snapshot)]
        .iter()
        .any(|text| text.to_lowercase().contains(&word))
}

fn positive(reader: &mut Reader, name: &str) -> Result<Option<usize>, QueryError> {
    match reader.parsed(name)? {
        Some(0) => Err(QueryError::new(name, "is 0, expected 1 or more")),
        number => Ok(number),
    }
}

/// A time in ISO 8601, or in milliseconds since 1970 as answers give it. One without a zone is in UTC: Cinder's driver sends
/// `1970-01-01T00:00:00`.
fn time(reader: &mut Reader, name: &str) -> Result<Option<Timestamp>, QueryError> {
    let Some(text) = reader.one(name)? else {
        return Ok(None);
    };
    if let Ok(milliseconds) = text.parse::<u64>() {
        return Ok(Some(Timestamp::from_nanos(milliseconds.saturating_mul(1_000_000))));
    }
    // An unescaped `+` before the offset came as a space.
    let text = text.replace(' ', "+");
    let parse = |text: &str| text.parse::<crate::types::Timestamp>();
    match parse(&text).or_else(|error| parse(&format!("{text}Z")).map_err(|_| error)) {
        Ok(stamp) => Ok(Some(Timestamp::from_nanos(stamp.as_nanos()))),
        Err(error) => Err(QueryError::new(name, error.to_string())),
    }
}

/// What names a snapshot: what the client said, else its name.
pub(crate) fn description(snapshot: &Snapshot) -> &str {
    let said = snapshot.labels.get(LABEL_DESCRIPTION);
    said.or(snapshot.name.as_ref()).map_or("", String::as_str)
}

/// What names the machine: what the client said, else nothing.
pub(crate) fn vm_name(snapshot: &Snapshot) -> &str {
    snapshot.labels.get(LABEL_VM_NAME).map_or("", String::as_str)
}

/// Who took it.
pub(crate) fn snapshot_type(snapshot: &Snapshot) -> &'static str {
    let through_this_face = snapshot.labels.contains_key(LABEL_DESCRIPTION);
    if through_this_face { TYPE_CINDER } else { TYPE_USER }
}

/// The policy in VMstore's words.
pub(crate) fn deletion_policy(policy: DeletionPolicy) -> &'static str {
    match policy {
        DeletionPolicy::Keep => "DELETE_ON_EXPIRATION",
        DeletionPolicy::OnZeroClones => "DELETE_ON_ZERO_CLONE_REFERENCES",
    }
}

/// What a list found.
#[derive(Debug)]
pub(crate) struct Found {
    /// The page.
    pub(crate) items: Vec<Snapshot>,
    /// Snapshots that match, on all pages.
    pub(crate) matched: usize,
    /// Snapshots that were looked at.
    pub(crate) seen: usize,
    /// There were more than a list looks at.
    pub(crate) overflow: bool,
}

/// What a snapshot is sorted by; all that is kept of one while a list is made.
type Place = (Vec<u8>, u64, Timestamp, SnapshotId);

/// Reads the snapshots in small batches, keeps the places of those that match, sorts them, and
/// reads those of the page again.
pub(crate) fn find(store: &Store, listing: &Listing) -> StoreResult<Found> {
    let mut filter = SnapshotFilter::default();
    if let Some(vm_uuid) = &listing.vm_uuid {
        filter.labels = Labels::from([(LABEL_VM_UUID.to_owned(), vm_uuid.clone())]);
    }
    let mut places: Vec<Place> = Vec::new();
    let mut seen = 0;
    let overflow = loop {
        let batch = store.list_snapshots(&filter, BATCH)?;
        seen += batch.len();
        filter.after = batch.last().map(|last| last.id);
        let exhausted = batch.len() < BATCH;
        places
            .extend(batch.iter().filter(|one| listing.matches(one)).map(|one| place(one, listing)));
        if exhausted || seen >= SCAN_MAX {
            break !exhausted;
        }
    };
    places.sort_unstable_by(|left, right| {
        let order = left.cmp(right);
        if listing.descending { Ordering::reverse(order) } else { order }
    });
    let matched = places.len();
    let first = (listing.page - 1).saturating_mul(listing.limit);
    let mut items = Vec::new();
    for (.., id) in places.into_iter().skip(first).take(listing.limit) {
        match store.snapshot_info(id) {
            Ok(snapshot) => items.push(shown(snapshot)),
            // Deleted since: the list is as of its end.
            Err(error) if error.kind() == slackwater_blockstore::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Found { items, matched, seen, overflow })
}

/// The snapshot with what of it is shown: those of a page with all their labels could take a GiB.
fn shown(mut snapshot: Snapshot) -> Snapshot {
    snapshot.labels.retain(|label, _| LABELS.contains(&label.as_str()));
    snapshot
}

fn place(snapshot: &Snapshot, listing: &Listing) -> Place {
    let (text, number) = match listing.sorted_by {
        SortKey::CreateTime => ("", 0),
        SortKey::Description => (description(snapshot), 0),
        SortKey::VmName => (vm_name(snapshot), 0),
        SortKey::CloneReferenceCount => ("", snapshot.clone_count),
    };
    let text = text.as_bytes().iter().take(SORTED_BYTES_MAX).copied().collect();
    (text, number, snapshot.created_at, snapshot.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(description: &str, nanos: u64, clone_count: u64) -> Snapshot {
        Snapshot {
            id: SnapshotId::random(),
            path: b"a".to_vec(),
            name: None,
            labels: Labels::from([(LABEL_DESCRIPTION.to_owned(), description.to_owned())]),
            size_bytes: 0,
            used_bytes: 0,
            created_at: Timestamp::from_nanos(nanos),
            clone_count,
            deletion: DeletionPolicy::Keep,
            expires_at: None,
        }
    }

    #[test]
    fn filters_hold_together() {
        let old = snapshot("Snapshot-1 (vol)", 1_000_000_000, 0);
        let new = snapshot("other", 9_000_000_000, 2);
        let matching = |query: &str| {
            let listing = Listing::decode(query).unwrap();
            (listing.matches(&old), listing.matches(&new))
        };
        assert_eq!(matching(""), (true, true));
        assert_eq!(matching("contain=snapshot-1"), (true, false));
        assert_eq!(matching("hasClone=Yes"), (false, true));
        assert_eq!(matching("hasClone=Both"), (true, true));
        assert_eq!(matching("since=1970-01-01T00:00:05.000Z"), (false, true));
        assert_eq!(matching("until=1970-01-01T01:00:05.000+0100"), (true, false));
        assert_eq!(matching("until=5000"), (true, false));
        assert_eq!(matching("since=1970-01-01T00:00:00"), (true, true));
        assert_eq!(
            matching("since=1970-01-01T00:00:05&until=1970-01-01T00:00:09.5"),
            (false, true)
        );
        assert_eq!(matching("type=SCHEDULED_SNAPSHOT,CINDER_GENERATED_SNAPSHOT"), (true, true));
        assert_eq!(matching("type=USER_GENERATED_SNAPSHOT"), (false, false));
        assert_eq!(matching("contain=o&hasClone=No&refresh=TRUE"), (true, false));
    }

    #[test]
    fn no_more_of_a_snapshot_is_kept_than_is_needed() {
        let long = "d".repeat(4096);
        let mut snapshot = snapshot(&long, 1, 0);
        let listing = Listing::decode("sortedBy=description").unwrap();
        assert_eq!(place(&snapshot, &listing).0, vec![b'd'; SORTED_BYTES_MAX]);
        snapshot.labels.extend((0..63).map(|number| (number.to_string(), long.clone())));
        let shown = shown(snapshot);
        assert_eq!((shown.labels.len(), description(&shown)), (1, &*long));
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        for bad in [
            "hasClone=perhaps",
            "sortOrder=UP",
            "sortedBy=colour",
            "limit=0",
            "page=0",
            "since=now",
            "since=1970-01-01",
            "instanceId=7",
            "replica=Yes",
            "fromDate=5000",
            "offset=10",
            "name=No",
            "instanceId=0",
            "toDate=0",
            "consistency=VM_CONSISTENT",
            "since=1970-01-01T00:00:00ZZ",
        ] {
            assert!(Listing::decode(bad).is_err(), "{bad}");
        }
        assert!(
            Listing::decode("replica=No&deleted=false&offset=0&consistency=CRASH_CONSISTENT")
                .is_ok()
        );
        let large = Listing::decode("limit=99999&page=3").unwrap();
        assert_eq!((large.limit, large.page), (LIMIT_MAX, 3));
    }
}

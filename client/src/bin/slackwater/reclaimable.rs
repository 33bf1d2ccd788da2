//! What deletes would free, beside what is listed.

use serde::Serialize;
use slackwater_client::types::{File, Reclaimable, Snapshot};
use slackwater_client::{Client, ClientError, ProblemCode, RetryPolicy};

use crate::failure::Failure;
use crate::pages::Page;
use crate::size::human;

/// Items of a page where each is asked about.
const PAGE_ITEMS: usize = 32;

/// A file or a snapshot, with what a delete of it would free if that was asked for and the appliance tells it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Told<T> {
    #[serde(flatten)]
    pub(crate) item: T,
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaimable: Option<Reclaimable>,
}

impl<T> Told<T> {
    /// The figure in few words.
    pub(crate) fn shown(&self) -> String {
        let figure = |told: Reclaimable| {
            let about = if told.sampled_one_in > 1 { "about " } else { "" };
            format!("{about}{}", human(told.bytes))
        };
        self.reclaimable.map_or_else(|| "-".to_owned(), figure)
    }

    /// The figure in full.
    pub(crate) fn described(&self) -> String {
        let Some(told) = self.reclaimable else {
            return "not told: the appliance is busy, or of an older release".to_owned();
        };
        let blocks = match told.blocks {
            1 => "1 block".to_owned(),
            blocks => format!("{blocks} blocks"),
        };
        format!("{} ({} bytes in {blocks})", self.shown(), told.bytes)
    }
}

/// What can be asked about.
pub(crate) trait Ask: Sized {
    /// Asks the appliance.
    async fn ask(&self, client: &Client) -> Result<Reclaimable, ClientError>;
}

impl Ask for File {
    async fn ask(&self, client: &Client) -> Result<Reclaimable, ClientError> {
        client.file_reclaimable(&self.path).await
    }
}

impl Ask for Snapshot {
    async fn ask(&self, client: &Client) -> Result<Reclaimable, ClientError> {
        client.snapshot_reclaimable(self.id).await
    }
}

impl<T: Ask> Told<T> {
    /// Asks about an item. One that was deleted by now has no figure.
    pub(crate) async fn of(client: &Client, item: T) -> Result<Self, Failure> {
        // What takes too long takes as long once more.
        let client = client.with_retry(RetryPolicy::never());
        let reclaimable = figure(item.ask(&client).await)?;
        Ok(Self { item, reclaimable })
    }
}

/// Pages of items, each asked about if that is wanted: then so few at a time that they are shown while others are asked
/// about.
pub(crate) fn pages<T: Ask>(
    client: &Client,
    is_asked: bool,
    mut page: impl AsyncFnMut(usize, Option<String>) -> Result<Page<T>, Failure>,
) -> impl AsyncFnMut(usize, Option<String>) -> Result<Page<Told<T>>, Failure> {
    async move |wanted, after| {
        let wanted = if is_asked { wanted.min(PAGE_ITEMS) } else { wanted };
        let (items, next) = page(wanted, after).await?;
        let mut told = Vec::new();
        for item in items {
            told.push(match is_asked {
                true => Told::of(client, item).await?,
                false => Told { item, reclaimable: None },
            });
        }
        Ok((told, next))
    }
}

fn figure(told: Result<Reclaimable, ClientError>) -> Result<Option<Reclaimable>, Failure> {
    match told {
        Ok(reclaimable) => Ok(Some(reclaimable)),
        // A name that is not UTF-8 is shown escaped, and names nothing. What takes long, or waits for others that do, is
        // shown without a figure: the rest is there.
        Err(error)
            if matches!(
                error.code(),
                Some(
                    ProblemCode::NotFound
                        | ProblemCode::UnknownRoute
                        | ProblemCode::Timeout
                        | ProblemCode::Overloaded
                )
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

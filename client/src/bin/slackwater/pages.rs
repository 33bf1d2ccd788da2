//! Lists that come in pages: printed while they come, as a table or as a JSON array, up to a limit.

use serde::Serialize;
use slackwater_client::types::PAGE_LIMIT_MAX;

use crate::failure::Failure;
use crate::output::{JsonList, Output, Table};

/// A page: its items, and the `after` of the next one.
pub(crate) type Page<T> = (Vec<T>, Option<String>);

/// Prints at most `limit` items, all if there is none. `page` asks for a page of at most so many items, behind the
/// `after` of the page before.
pub(crate) async fn print<T: Serialize>(
    output: Output,
    limit: Option<u64>,
    mut table: Table,
    row: impl Fn(&T) -> Vec<String>,
    mut page: impl AsyncFnMut(usize, Option<String>) -> Result<Page<T>, Failure>,
) -> Result<(), Failure> {
    let mut left = limit.unwrap_or(u64::MAX);
    let mut list = JsonList::new(output);
    let mut after = None;
    loop {
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(PAGE_LIMIT_MAX);
        let (items, next) = page(wanted, after).await?;
        left = left.saturating_sub(u64::try_from(items.len()).unwrap_or(u64::MAX));
        if output.is_json() {
            list.items(&items)?;
        } else {
            let rows: Vec<_> = items.iter().map(&row).collect();
            output.text(&table.page(&rows))?;
        }
        after = next;
        if after.is_none() || left == 0 {
            return list.finish();
        }
    }
}

/// All items, if they are at most `limit`.
pub(crate) async fn all<T>(
    limit: usize,
    mut page: impl AsyncFnMut(usize, Option<String>) -> Result<Page<T>, Failure>,
) -> Result<Option<Vec<T>>, Failure> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let (items, next) = page(PAGE_LIMIT_MAX, after).await?;
        all.extend(items);
        if all.len() > limit {
            return Ok(None);
        }
        after = next;
        if after.is_none() {
            return Ok(Some(all));
        }
    }
}

/// Pages of items that are here, for [`print`].
pub(crate) fn of<T>(
    items: Vec<T>,
) -> impl AsyncFnMut(usize, Option<String>) -> Result<Page<T>, Failure> {
    let mut items = items.into_iter();
    async move |wanted, _| {
        let page = items.by_ref().take(wanted).collect();
        Ok((page, (items.len() > 0).then(String::new)))
    }
}

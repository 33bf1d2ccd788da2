//! Lists that come in pages: printed while they come, as a table or as a JSON array, up to a limit.

use std::cmp::Ordering;

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
        let wanted = usize::try_from(left).unwrap_or(usize::MAX);
        let (mut items, next) = page(wanted.min(PAGE_LIMIT_MAX), after).await?;
        items.truncate(wanted);
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

/// The first items of a list by an order.
#[derive(Debug)]
pub(crate) struct First<T> {
    pub(crate) items: Vec<T>,
    /// There are more than these.
    pub(crate) left_out: bool,
}

/// The first `limit` items by an order; about twice that many are in memory. If `is_all_wanted`, it stops as soon as there
/// are more.
pub(crate) async fn first<T>(
    (limit, is_all_wanted): (usize, bool),
    order: impl Fn(&T, &T) -> Ordering,
    mut page: impl AsyncFnMut(usize, Option<String>) -> Result<Page<T>, Failure>,
) -> Result<First<T>, Failure> {
    let mut first = First { items: Vec::new(), left_out: false };
    let mut after = None;
    loop {
        let (items, next) = page(PAGE_LIMIT_MAX, after).await?;
        first.items.extend(items);
        // Sorted only once there is as much again, so that each item is moved a few times.
        let is_much = first.items.len() >= limit.saturating_mul(2).max(PAGE_LIMIT_MAX);
        if is_much || next.is_none() {
            first.items.sort_by(&order);
            first.left_out |= first.items.len() > limit;
            first.items.truncate(limit);
            if is_all_wanted && first.left_out {
                return Ok(first);
            }
        }
        after = next;
        if after.is_none() {
            return Ok(first);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of numbers, of seven each.
    fn numbers(
        all: Vec<u32>,
    ) -> impl AsyncFnMut(usize, Option<String>) -> Result<Page<u32>, Failure> {
        let mut all = all.into_iter();
        async move |_, _| {
            let page = all.by_ref().take(7).collect();
            Ok((page, (all.len() > 0).then(String::new)))
        }
    }

    #[tokio::test]
    async fn the_first_are_those_of_all_pages() {
        let all: Vec<u32> = (0..5_000).map(|number| number * 7919 % 5_000).collect();
        for limit in [1, 3, 700, 4_999, 5_000, 9_000] {
            let first = first((limit, false), u32::cmp, numbers(all.clone())).await.unwrap();
            let expected: Vec<u32> = (0..5_000).take(limit).collect();
            assert_eq!(first.items, expected, "{limit}");
            assert_eq!(first.left_out, limit < 5_000, "{limit}");
        }
        let none = first((3, true), u32::cmp, numbers(Vec::new())).await.unwrap();
        assert!(none.items.is_empty() && !none.left_out);
        let too_many = first((3, true), u32::cmp, numbers(all)).await.unwrap();
        assert!(too_many.left_out);
    }
}

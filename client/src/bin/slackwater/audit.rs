//! `slackwater audit`: who changed what.

use clap::Args;
use slackwater_client::change::{CallerKind, Change};
use slackwater_client::query::ListChanges;
use slackwater_client::types::PAGE_LIMIT_MAX;

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Align, JsonList, Table, moment, or_dash};

/// Which changes to list.
#[derive(Debug, Args)]
pub(crate) struct AuditArguments {
    /// Only changes of the token or worker of this name
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Most changes to list
    #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
}

pub(crate) async fn run(context: &Context, arguments: AuditArguments) -> Result<(), Failure> {
    let mut left = arguments.limit;
    let mut query = ListChanges { by: arguments.by, ..ListChanges::default() };
    let mut table = Table::new(&[
        ("TIME", Align::Left),
        ("BY", Align::Left),
        ("FROM", Align::Left),
        ("STATUS", Align::Right),
        ("CALL", Align::Left),
        ("ABOUT", Align::Left),
    ]);
    let mut list = JsonList::new(context.output);
    loop {
        query.limit = Some(usize::try_from(left).unwrap_or(usize::MAX).min(PAGE_LIMIT_MAX));
        let page = context.client.changes(&query).await?;
        left = left.saturating_sub(u64::try_from(page.items.len()).unwrap_or(u64::MAX));
        if context.output.is_json() {
            list.items(&page.items)?;
        } else {
            let rows: Vec<_> = page.items.iter().map(row).collect();
            context.output.text(&table.page(&rows))?;
        }
        query.after = page.next;
        if query.after.is_none() || left == 0 {
            return list.finish();
        }
    }
}

fn row(change: &Change) -> Vec<String> {
    let by = match change.kind {
        CallerKind::JoinToken => format!("{} (join token)", change.by),
        CallerKind::Vmstore => format!("{} (VMstore)", change.by),
        CallerKind::Appliance => "(appliance)".to_owned(),
        _ if change.by.is_empty() => "-".to_owned(),
        _ => change.by.clone(),
    };
    let details: Vec<_> = [&change.made, &change.about].into_iter().flatten().cloned().collect();
    vec![
        moment(change.at),
        by,
        or_dash(change.from.as_ref()),
        or_dash(change.status),
        change.call.clone(),
        details.join(" "),
    ]
}

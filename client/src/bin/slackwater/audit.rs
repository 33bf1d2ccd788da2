//! `slackwater audit`: who changed what.

use clap::Args;
use slackwater_client::change::{CallerKind, Change};
use slackwater_client::query::ListChanges;

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Align, Table, moment, or_dash};
use crate::pages;

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
    let mut query = ListChanges { by: arguments.by, ..ListChanges::default() };
    let table = Table::new(&[
        ("TIME", Align::Left),
        ("BY", Align::Left),
        ("FROM", Align::Left),
        ("STATUS", Align::Right),
        ("CALL", Align::Left),
        ("ABOUT", Align::Left),
    ]);
    let page = async |limit, after| {
        (query.limit, query.after) = (Some(limit), after);
        let page = context.client.changes(&query).await?;
        Ok((page.items, page.next))
    };
    pages::print(context.output, Some(arguments.limit), table, row, page).await
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

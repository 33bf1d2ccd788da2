//! Waits for a check or a garbage collection, and shows how far it is.

use std::time::Duration;

use slackwater_client::types::Maintenance;
use slackwater_client::{Client, ClientError};

use crate::context::Context;
use crate::failure::Failure;
use crate::interrupt::Notice;
use crate::output::printable;
use crate::progress;

/// How often the appliance is asked how far it is.
const PERIOD: Duration = Duration::from_secs(1);

/// Waits for the call, which the appliance ends if this command is interrupted.
pub(crate) async fn wait<T>(
    context: &Context,
    verb: &'static str,
    notice: &Notice,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, Failure> {
    notice.set("the appliance ends it, too".to_owned());
    let spinner = progress::spinner(context.output, verb);
    let show = async {
        // Nobody sees it, so it need not be asked for.
        while !spinner.is_hidden() {
            tokio::time::sleep(PERIOD).await;
            spinner.set_message(how_far(&context.client).await.unwrap_or_default());
        }
        std::future::pending().await
    };
    let outcome = tokio::select! {
        outcome = call => outcome,
        never = show => never,
    };
    spinner.finish_and_clear();
    Ok(outcome?)
}

async fn how_far(client: &Client) -> Option<String> {
    // A call that fails is not what the user waits for.
    client.stats().await.ok()?.maintenance.map(|work| describe(&work))
}

fn describe(work: &Maintenance) -> String {
    let part = printable(&work.part);
    match work.total {
        _ if part.is_empty() => String::new(),
        Some(total) if total > 0 => {
            let percent = u128::from(work.done) * 100 / u128::from(total);
            format!(": {part}, {percent} % of {total}")
        }
        _ if work.done > 0 => format!(": {part}, {}", work.done),
        _ => format!(": {part}"),
    }
}

#[cfg(test)]
mod tests {
    use slackwater_client::types::Timestamp;

    use super::*;

    #[test]
    fn how_far_it_is_is_told_as_far_as_it_is_known() {
        let told = |part: &str, done, total| {
            let (call, started_at) = ("check".to_owned(), Timestamp::from_nanos(0));
            describe(&Maintenance { call, started_at, part: part.to_owned(), done, total })
        };
        assert_eq!(told("", 0, None), "");
        assert_eq!(told("layers", 0, None), ": layers");
        assert_eq!(told("reclaim", 12, None), ": reclaim, 12");
        assert_eq!(told("chunks", 3, Some(4)), ": chunks, 75 % of 4");
        assert_eq!(told("chunks", 3, Some(0)), ": chunks, 3");
    }
}

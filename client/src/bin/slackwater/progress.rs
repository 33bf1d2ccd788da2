//! Signs of life on a terminal: a bar for transfers, a spinner for calls that take long. Silent
//! with `--json` and where standard error is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(120);

/// A bar over `size_bytes`.
pub(crate) fn bar(output: Output, verb: &'static str, size_bytes: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(size_bytes), target(output));
    let template =
        "{prefix} {bar:32} {percent:>3} % of {binary_total_bytes}, {msg} moved, {eta} left";
    bar.set_style(style(template));
    bar.set_prefix(verb);
    bar
}

/// A spinner that counts bytes, where nobody knows how many there will be.
pub(crate) fn counter(output: Output, verb: &'static str) -> ProgressBar {
    let counter = ProgressBar::with_draw_target(None, target(output));
    counter.set_style(style("{spinner} {prefix} for {elapsed}: {binary_bytes} read, {msg} moved"));
    counter.set_prefix(verb);
    counter.enable_steady_tick(TICK);
    counter
}

/// A spinner beside `verb`, with room for how far it is.
pub(crate) fn spinner(output: Output, verb: &'static str) -> ProgressBar {
    let spinner = ProgressBar::with_draw_target(None, target(output));
    spinner.set_style(style("{spinner} {prefix} for {elapsed}{msg}"));
    spinner.set_prefix(verb);
    spinner.enable_steady_tick(TICK);
    spinner
}

fn target(output: Output) -> ProgressDrawTarget {
    if output.is_lively() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

/// The templates are constants that a test reads; one that could not be read would only look
/// plain.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_terminal_nothing_is_drawn() {
        let output = Output::new(true);
        assert!(bar(output, "importing", 1).is_hidden());
        assert!(spinner(output, "checking").is_hidden());
    }
}

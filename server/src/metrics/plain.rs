//! Metrics without labels, as tables: name, help, kind and value on one line each.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// How a number moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Up and down.
    Gauge,
    /// Up only, from 0 at start; its name ends in `_total` on the page.
    Counter,
}

/// One number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    value: u64,
}

/// A number that moves up and down.
pub(super) const fn gauge(name: &'static str, value: u64, help: &'static str) -> Plain {
    Plain { name, help, kind: Kind::Gauge, value }
}

/// A number that moves up only. OpenMetrics adds `_total` to the name.
pub(super) const fn counter(name: &'static str, value: u64, help: &'static str) -> Plain {
    Plain { name, help, kind: Kind::Counter, value }
}

/// Writes the numbers, each name behind `prefix`.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    prefix: &str,
    numbers: &[Plain],
) -> fmt::Result {
    for number in numbers {
        let name = format!("{prefix}{}", number.name);
        match number.kind {
            Kind::Gauge => encode_one(encoder, &name, number.help, &ConstGauge::new(number.value))?,
            Kind::Counter => {
                encode_one(encoder, &name, number.help, &ConstCounter::new(number.value))?;
            }
        }
    }
    Ok(())
}

/// Writes one metric with its head lines.
pub(super) fn encode_one(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    // The page's writer adds the full stop that `Registry::register` would have added.
    let help = format!("{help}.");
    metric.encode(encoder.encode_descriptor(name, &help, None, metric.metric_type())?)
}

//! The Prometheus page of a worker: calls of the engines with their latency, volumes, and what
//! the process that serves the export counts.
//!
//! Calls are counted as they end; everything else is read when the page is asked for.

use std::time::Duration;

use prometheus_client::encoding::text::encode_registry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::worker::{Engine, Worker};

/// Upper bounds of the latency of a call, in seconds: from a record in the state to an image
/// layer that is unpacked.
const LATENCY_BOUNDS_SECONDS: [f64; 9] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0];

/// A call of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    engine: EngineLabel,
    call: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(non_camel_case_types, reason = "the names are the values of the label")]
enum EngineLabel {
    docker,
    containerd,
}

impl From<Engine> for EngineLabel {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Docker => Self::docker,
            Engine::Containerd => Self::containerd,
        }
    }
}

/// What is counted as it happens. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics {
    latency: Family<CallLabels, Histogram>,
    failures: Family<CallLabels, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let histogram = || Histogram::new(LATENCY_BOUNDS_SECONDS);
        Self { latency: Family::new_with_constructor(histogram), failures: Family::default() }
    }
}

impl Metrics {
    /// Counts a call that ended. A refusal that the engine expects is no failure.
    pub fn count(&self, engine: Engine, call: &'static str, elapsed: Duration, has_failed: bool) {
        let labels = CallLabels { engine: engine.into(), call };
        self.latency.get_or_create(&labels).observe(elapsed.as_secs_f64());
        if has_failed {
            self.failures.get_or_create(&labels).inc();
        }
    }

    /// The page, in OpenMetrics text; `export` is what the process that serves the export counts.
    #[must_use]
    pub fn render(&self, worker: &Worker, export: Option<&Value>) -> String {
        let mut registry = Registry::with_prefix("slackwater_driver");
        registry.register("call_seconds", "Latency of the engines' calls", self.latency.clone());
        registry.register("call_failures", "Calls that failed", self.failures.clone());
        for engine in [Engine::Docker, Engine::Containerd] {
            let volumes = worker.list(engine);
            let in_use = volumes.iter().filter(|volume| volume.is_in_use()).count();
            gauge(
                &mut registry,
                &format!("{engine}_volumes"),
                "Layers and containers",
                volumes.len(),
            );
            gauge(&mut registry, &format!("{engine}_volumes_in_use"), "Those in use", in_use);
        }
        let without_image = worker.without_image().len();
        gauge(&mut registry, "layers_without_image", "Committed ones", without_image);
        let waiting = worker.waiting_to_be_deleted();
        gauge(&mut registry, "obsolete_files", "Files on the appliance to be deleted", waiting);
        for (name, value) in export.and_then(Value::as_object).into_iter().flatten() {
            if let Some(value) = value.as_u64().and_then(|value| usize::try_from(value).ok()) {
                gauge(
                    &mut registry,
                    &format!("export_{name}"),
                    "Of the FUSE export, since it began",
                    value,
                );
            }
        }
        let mut text = String::new();
        if let Err(error) = encode_registry(&mut text, &registry) {
            // Writing to a string does not fail.
            tracing::error!(%error, "the metrics page is cut short");
        }
        text
    }
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: usize) {
    let gauge: Gauge = Gauge::default();
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    registry.register(name, help, gauge);
}

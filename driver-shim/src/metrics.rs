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
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::worker::{Engine, Worker};

/// Upper bounds of the latency of a call, in seconds: from a record in the state to an image
/// layer that is unpacked.
const LATENCY_BOUNDS_SECONDS: [f64; 9] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0];

/// A number of the process that serves the export.
struct ExportNumber {
    /// As that process calls it.
    counted: &'static str,
    /// On the page, behind `export_`; that of a counter gets `_total` behind it.
    name: &'static str,
    help: &'static str,
    is_counter: bool,
}

const fn counter(counted: &'static str, name: &'static str, help: &'static str) -> ExportNumber {
    ExportNumber { counted, name, help, is_counter: true }
}

const fn level(counted: &'static str, help: &'static str) -> ExportNumber {
    ExportNumber { counted, name: counted, help, is_counter: false }
}

/// All but what is no number. Counters begin at 0 with each process that serves the export.
const EXPORT_NUMBERS: [ExportNumber; 16] = [
    counter("bytes_read_from_appliance", "read_bytes", "Data fetched from the appliance"),
    counter(
        "bytes_read_beside",
        "read_beside_bytes",
        "Fetched data that nothing had asked for yet",
    ),
    counter("bytes_written", "written_bytes", "Data written to the appliance"),
    counter("cache_hits", "cache_hits", "Blocks read from the cache"),
    counter("cache_misses", "cache_misses", "Blocks that were not in the cache"),
    counter("cache_damaged", "cache_damaged", "Damaged blocks of the cache"),
    level("cache_bytes", "Data in the cache"),
    level("kept_bytes", "Written data that the appliance has not synced yet"),
    counter("map_bytes", "map_bytes", "Hashes of blocks fetched from the appliance"),
    counter("maps_stale", "maps_stale", "Reads of other data than the hashes say"),
    counter("requests", "requests", "Requests of the kernel"),
    counter("commits", "commits", "Syncs asked of the appliance"),
    counter("writes_sent_again", "writes_sent_again", "Writes sent again to a restarted appliance"),
    counter(
        "connections_lost",
        "connections_lost",
        "Connections to NFS that broke or did not come about",
    ),
    level("files_lost", "Disks that lost written data"),
    level("uptime_seconds", "Age of the process that serves the export"),
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    engine: EngineLabel,
}

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
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the driver", version);
        registry.register("call_seconds", "Latency of the engines' calls", self.latency.clone());
        registry.register("call_failures", "Calls that failed", self.failures.clone());
        register_volumes(&mut registry, worker);
        let without_image = worker.without_image().len();
        gauge(&mut registry, "layers_without_image", "Committed ones", without_image);
        let waiting = worker.waiting_to_be_deleted();
        gauge(&mut registry, "obsolete_files", "Files on the appliance to be deleted", waiting);
        for number in &EXPORT_NUMBERS {
            if let Some(value) = export.and_then(|export| export.get(number.counted)?.as_u64()) {
                number.register(&mut registry, value);
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

impl ExportNumber {
    fn register(&self, registry: &mut Registry, value: u64) {
        let name = format!("export_{}", self.name);
        if self.is_counter {
            let counter: Counter = Counter::default();
            counter.inc_by(value);
            registry.register(name, self.help, counter);
        } else {
            gauge(registry, &name, self.help, usize::try_from(value).unwrap_or(usize::MAX));
        }
    }
}

fn register_volumes(registry: &mut Registry, worker: &Worker) {
    let (all, in_use): (Family<EngineLabels, Gauge>, Family<EngineLabels, Gauge>) =
        Default::default();
    for engine in [Engine::Docker, Engine::Containerd] {
        let labels = EngineLabels { engine: engine.into() };
        let volumes = worker.list(engine);
        all.get_or_create(&labels).set(signed(volumes.len()));
        let used = volumes.iter().filter(|volume| volume.is_in_use()).count();
        in_use.get_or_create(&labels).set(signed(used));
    }
    registry.register("volumes", "Layers and containers", all);
    registry.register("volumes_in_use", "Those in use", in_use);
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: usize) {
    let gauge: Gauge = Gauge::default();
    gauge.set(signed(value));
    registry.register(name, help, gauge);
}

/// As gauges have it.
fn signed(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

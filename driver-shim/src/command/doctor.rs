//! `slackwater-driver doctor`: what is missing for containers to run on the appliance, each with
//! what to do. It changes nothing.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use slackwater_attach::{Attach, Method};
use slackwater_client::{Client, RetryPolicy, is_readable_on_the_way};
use slackwater_fuse::{Encryption, WorkerCertificate};
use tokio::net::UnixStream;

use super::{Format, print, rpc, workers};
use crate::engine::containerd::Containerd;
use crate::engine::daemon::Daemon;
use crate::engine::docker::Docker;
use crate::error::DriverError;
use crate::settings::{AttachChoice, CONTAINERD_API, Settings, Target, attach_choice};
use crate::worker::LayerKind;

/// Time to wait for each answer: a diagnosis is to be quick.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Clocks may differ by this much. The appliance takes back a new snapshot that nothing keeps
/// when the worker said so, by the worker's clock: an hour behind would be at once.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(300);

/// A certificate with less time left is warned of.
const CERTIFICATE_DAYS_MIN: u64 = 30;

const SECONDS_A_DAY: u64 = 24 * 60 * 60;

const WORKER_CERTIFICATE: &str = "certificate of this worker";

/// The first release of Docker without graphdriver plugins.
const DOCKER_WITHOUT_PLUGINS: u32 = 28;

/// What is asked, besides the settings.
#[derive(Clone, Debug, Args)]
pub(super) struct DoctorArguments {
    /// Docker, such as unix:///var/run/docker.sock [default: docker-api of the settings]
    #[arg(long, value_name = "ADDRESS")]
    docker_host: Option<String>,
    /// containerd [default: containerd-api of the settings]
    #[arg(long, value_name = "PATH")]
    containerd: Option<PathBuf>,
}

/// How a need is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    Ok,
    /// Missing, but not needed by everybody.
    Warn,
    Fail,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        })
    }
}

/// One need.
#[derive(Debug, Serialize)]
struct Line {
    level: Level,
    what: String,
    detail: String,
}

impl Line {
    fn new(level: Level, what: &str, detail: impl Into<String>) -> Self {
        Self { level, what: what.to_owned(), detail: detail.into() }
    }
}

pub(super) async fn run(
    arguments: &DoctorArguments,
    settings: &Settings,
    format: Format,
) -> Result<(), DriverError> {
    let target = Target::of(settings)?;
    let client = target.client()?.with_retry(RetryPolicy::never());
    let (mut lines, method) = machine(settings).await;
    lines.extend(appliance(&target, &client, method).await);
    lines.extend(daemon(settings).await);
    lines.extend(engines(arguments, settings).await);
    if format == Format::Json {
        print(&format!("{:#}\n", json!(lines)));
    }
    for line in lines.iter().filter(|_| format == Format::Text) {
        let separator = if line.detail.is_empty() { "" } else { ": " };
        print(&format!("{:4}  {}{separator}{}\n", line.level, line.what, line.detail));
    }
    match lines.iter().any(|line| line.level == Level::Fail) {
        true => Err(DriverError::Problems),
        false => Ok(()),
    }
}

/// The kernel and the tools, and how disks are attached.
async fn machine(settings: &Settings) -> (Vec<Line>, Option<Method>) {
    let (wanted, wrong) = match attach_choice(settings) {
        Ok(AttachChoice::Auto) if settings.nfs_certificate.is_some() => (Some(Method::Fuse), None),
        Ok(chosen) => (chosen.method(), None),
        Err(error) => (None, Some(Line::new(Level::Fail, "settings", error.to_string()))),
    };
    let probe = Attach::probe(wanted).await;
    let mut lines: Vec<_> = wrong.into_iter().collect();
    let findings = probe.findings.into_iter().map(|finding| {
        let level = match (finding.is_present, finding.is_required) {
            (true, _) => Level::Ok,
            (false, true) => Level::Fail,
            (false, false) => Level::Warn,
        };
        Line::new(level, &finding.what, finding.advice)
    });
    lines.extend(findings);
    lines.push(match probe.method {
        Some(method) => Line::new(Level::Ok, "disks are attached by", method.to_string()),
        None => Line::new(Level::Fail, "attaching", "no way works; see the lines above"),
    });
    lines.push(layers(settings, probe.has_images));
    (lines, probe.method)
}

/// How layers of containerd's images are kept.
fn layers(settings: &Settings, has_images: bool) -> Line {
    let what = "layers of containerd's images are kept as";
    let state_dir = settings.state_dir.clone().unwrap_or_default();
    match settings.layers.unwrap_or_default().kind(&state_dir) {
        Ok(LayerKind::Images) if !has_images => {
            let why =
                "disks, as this kernel has no EROFS: modprobe erofs, or set layers = \"disks\"";
            Line::new(Level::Warn, what, why)
        }
        Ok(kind) => Line::new(Level::Ok, what, kind.to_string()),
        Err(error) => Line::new(Level::Fail, what, error.to_string()),
    }
}

/// The appliance, by both its faces.
async fn appliance(target: &Target, client: &Client, method: Option<Method>) -> Vec<Line> {
    let mut lines = vec![rest(target, client).await];
    let reached = lines.iter().all(|line| line.level == Level::Ok);
    match target.nfs_address().await {
        Ok(address) => {
            for (name, program) in [("NFS", rpc::NFS), ("MOUNT", rpc::MOUNT)] {
                let what = format!("appliance, {name}");
                lines.push(match rpc::null(address, program).await {
                    Ok(()) => Line::new(Level::Ok, &what, target.nfs.as_str()),
                    Err(error) => Line::new(
                        Level::Fail,
                        &what,
                        format!("{}: {error}; see --nfs, and slackwaterd's --nfs-listen and --nfs-client", target.nfs),
                    ),
                });
            }
            if target.api.starts_with("https:") && !address.ip().to_canonical().is_loopback() {
                lines.push(nfs_tls(target, client, address, method).await);
            }
        }
        Err(error) => lines.push(Line::new(Level::Fail, "appliance, NFS", error.to_string())),
    }
    if is_readable_on_the_way(&target.api) {
        let advice =
            "tokens and credentials are sent unencrypted; use https:// beyond this machine";
        lines.push(Line::new(Level::Warn, "appliance, TLS", format!("{}: {advice}", target.api)));
    }
    if let Some(certificate) = &target.certificate {
        lines.push(worker_certificate(certificate));
    }
    if reached {
        lines.push(mount_path(target, client).await);
        lines.push(clock(client).await);
    }
    lines
}

/// Whether NFS is encrypted on its way to the appliance, as REST is.
async fn nfs_tls(
    target: &Target,
    client: &Client,
    address: SocketAddr,
    method: Option<Method>,
) -> Line {
    let what = "appliance, NFS in TLS";
    if let Some(Err(error)) = target.certificate.as_ref().map(WorkerCertificate::check) {
        return Line::new(Level::Fail, what, error.to_string());
    }
    if method == Some(Method::Nfs) {
        let advice =
            "no: a kernel's NFS client sends data and paths in plain text; see --attach fuse";
        return Line::new(Level::Warn, what, advice);
    }
    let (export, shown) = (target.export_path.as_str(), target.certificate.clone());
    let has_certificate = shown.is_some();
    let asked = slackwater_fuse::encryption(client, address, export, shown);
    match tokio::time::timeout(TIMEOUT, asked).await {
        Ok(Ok(Encryption::Mutual)) => {
            Line::new(Level::Ok, what, "by the certificate of REST, and that of this worker")
        }
        Ok(Ok(Encryption::Tls)) if has_certificate => {
            let detail = "by the certificate of REST; that of this worker is not asked for";
            Line::new(Level::Ok, what, detail)
        }
        Ok(Ok(Encryption::Tls)) => Line::new(Level::Ok, what, "by the certificate of REST"),
        Ok(Ok(Encryption::None)) => Line::new(
            Level::Warn,
            what,
            "not offered, so data goes in plain text; see nfs-tls there",
        ),
        Ok(Err(error)) => {
            // Where the certificate of this worker is refused the text says so.
            let advice = match error.kind() {
                std::io::ErrorKind::PermissionDenied => "",
                _ => "; see --ca and --api",
            };
            Line::new(Level::Fail, what, format!("{address}: {error}{advice}"))
        }
        Err(_) => Line::new(Level::Warn, what, "the appliance takes long to answer"),
    }
}

/// Whether the certificate of this worker can be used, and for how long.
fn worker_certificate(certificate: &WorkerCertificate) -> Line {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match certificate.ends_at_seconds() {
        Ok(Some(ends_at)) => certificate_end(ends_at, now),
        Ok(None) => Line::new(Level::Warn, WORKER_CERTIFICATE, "when it ends cannot be told"),
        Err(error) => Line::new(Level::Fail, WORKER_CERTIFICATE, error.to_string()),
    }
}

/// For how long it is good, both in seconds since 1970. An appliance that asks for it refuses one that has ended, which
/// another line tells.
fn certificate_end(ends_at: u64, now: u64) -> Line {
    let days = ends_at.saturating_sub(now) / SECONDS_A_DAY;
    if days >= CERTIFICATE_DAYS_MIN {
        return Line::new(Level::Ok, WORKER_CERTIFICATE, format!("good for {days} days"));
    }
    let when = match ends_at <= now {
        true => "it, or one behind it in the file, has ended".to_owned(),
        false => format!("it ends in {days} days"),
    };
    let advice = "have another one made where the authority's key is kept, such as by slackwaterd certificate --worker ID \
                  --renew --directory DIR, and take it here";
    Line::new(Level::Warn, WORKER_CERTIFICATE, format!("{when}: {advice}"))
}

/// Whether the appliance gives this machine a path to mount.
async fn mount_path(target: &Target, client: &Client) -> Line {
    let what = "appliance, a path to mount";
    match tokio::time::timeout(TIMEOUT, client.path_to_mount(&target.export_path)).await {
        Ok(Ok(path)) if path == target.export_path => Line::new(
            Level::Warn,
            what,
            "none, as it is of release 0.2 and goes by the address of this machine",
        ),
        Ok(Ok(_)) => Line::new(Level::Ok, what, "a secret one, for a few minutes"),
        Ok(Err(error)) => Line::new(Level::Fail, what, error.to_string()),
        Err(_) => Line::new(Level::Warn, what, "the appliance takes long to answer"),
    }
}

async fn rest(target: &Target, client: &Client) -> Line {
    let ask = async {
        client.readyz().await?;
        client.stats().await
    };
    let what = "appliance, REST";
    match tokio::time::timeout(TIMEOUT, ask).await {
        Ok(Ok(stats)) if stats.export_path != target.export_path => {
            let (got, expected) = (&target.export_path, &stats.export_path);
            let detail = format!("export-path is {got}, the appliance exports {expected}");
            Line::new(Level::Fail, what, detail)
        }
        Ok(Ok(stats)) => {
            let available = stats.available_bytes;
            Line::new(Level::Ok, what, format!("{}, {available} bytes available", target.api))
        }
        Ok(Err(error)) => Line::new(Level::Fail, what, error.to_string()),
        Err(_) => {
            let seconds = TIMEOUT.as_secs();
            let detail = format!("no answer from {} within {seconds} s", target.api);
            Line::new(Level::Fail, what, detail)
        }
    }
}

/// Compares the clocks by the last heartbeat of this machine: it holds the worker's time, and
/// the file has the appliance's.
async fn clock(client: &Client) -> Line {
    let what = "clock";
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let workers = match tokio::time::timeout(TIMEOUT, workers::find(client)).await {
        Ok(Ok(workers)) => workers,
        Ok(Err(error)) => return Line::new(Level::Warn, what, error.to_string()),
        Err(_) => return Line::new(Level::Warn, what, "the appliance takes long to answer"),
    };
    let of_this_machine = workers.values().filter_map(|found| {
        let lease = found.lease.as_ref().filter(|lease| lease.host == host.trim())?;
        Some((lease.renewed_at.as_nanos(), found.heard_at?.as_nanos()))
    });
    match of_this_machine.max() {
        None => Line::new(Level::Ok, what, "not compared: no heartbeat of this machine yet"),
        Some((ours, theirs)) => {
            let difference = Duration::from_nanos(ours.abs_diff(theirs));
            let seconds = difference.as_secs();
            match difference <= CLOCK_DIFFERENCE_MAX {
                true => Line::new(Level::Ok, what, format!("{seconds} s from the appliance's")),
                false => Line::new(
                    Level::Fail,
                    what,
                    format!("{seconds} s from the appliance's; run NTP on both machines"),
                ),
            }
        }
    }
}

/// The daemon and its sockets.
async fn daemon(settings: &Settings) -> Vec<Line> {
    let mut lines = Vec::new();
    let in_state = settings.state_dir.as_ref().map(|state| state.join("control.sock"));
    if let Some(socket) = settings.control_socket.clone().or(in_state) {
        let what = "daemon";
        let status = Daemon::new(&socket).status().await;
        if let Ok(status) = &status {
            lines.extend(other_layers(settings, status["layers"].as_str()));
        }
        lines.push(match status {
            Ok(status) => {
                let worker = status["worker_id"].as_str().unwrap_or_default();
                match status["served_with_these_settings"] == false {
                    true => Line::new(
                        Level::Warn,
                        what,
                        format!(
                            "worker {worker}: its export is served with earlier settings, until the driver is \
                             restarted while none of its disks is mounted"
                        ),
                    ),
                    false => Line::new(Level::Ok, what, format!("worker {worker}")),
                }
            }
            Err(error) => Line::new(Level::Warn, what, error.to_string()),
        });
    }
    let sockets = [
        ("plugin socket for Docker", &settings.docker_socket),
        ("plugin socket for containerd", &settings.containerd_socket),
    ];
    for (what, socket) in sockets {
        if let Some(socket) = socket {
            lines.push(listening(what, socket).await);
        }
    }
    lines
}

/// What is wrong if the daemon keeps layers in another way than these settings say.
fn other_layers(settings: &Settings, kept: Option<&str>) -> Option<Line> {
    let kept = kept?;
    let state_dir = settings.state_dir.clone().unwrap_or_default();
    let kind = settings.layers.unwrap_or_default().kind(&state_dir).ok()?;
    (kept != kind.to_string()).then(|| {
        let detail = format!(
            "the daemon was started with {kept}, these settings say {kind}: give doctor and engine-config the settings of \
             the daemon (--config, or its environment), or restart it"
        );
        Line::new(Level::Warn, "layers", detail)
    })
}

async fn listening(what: &str, socket: &Path) -> Line {
    match UnixStream::connect(socket).await {
        Ok(_) => Line::new(Level::Ok, what, socket.display().to_string()),
        Err(error) => {
            let detail = format!("{}: {error}; start slackwater-driver", socket.display());
            Line::new(Level::Fail, what, detail)
        }
    }
}

/// The engines that run here: only those whose socket the settings name must be configured.
async fn engines(arguments: &DoctorArguments, settings: &Settings) -> Vec<Line> {
    vec![docker(arguments, settings).await, containerd(arguments, settings).await]
}

async fn docker(arguments: &DoctorArguments, settings: &Settings) -> Line {
    let what = "Docker";
    let socket = settings.docker_socket.as_deref();
    let needed = if socket.is_some() { Level::Fail } else { Level::Warn };
    let docker = match arguments.docker_host.as_ref().or(settings.docker_api.as_ref()) {
        Some(host) => Docker::new(host),
        None => Ok(Docker::usual()),
    };
    let asked = match docker {
        Ok(docker) => docker.info().await,
        Err(error) => Err(error),
    };
    let info = match asked {
        Ok(info) => info,
        Err(error) => return Line::new(Level::Warn, what, error.to_string()),
    };
    let (version, driver) = (&info.server_version, &info.driver);
    let plugin = plugin_name(socket);
    if *driver == plugin {
        return Line::new(Level::Ok, what, format!("{version}, storage driver {driver}"));
    }
    let which = match major(version) {
        Some(major) if major >= DOCKER_WITHOUT_PLUGINS => "docker-containerd",
        _ => "docker",
    };
    let detail = format!(
        "{version} has the storage driver {driver}, not {plugin}: see `slackwater-driver \
         engine-config {which}`"
    );
    Line::new(needed, what, detail)
}

/// Docker calls a plugin by the name of its socket.
pub(super) fn plugin_name(socket: Option<&Path>) -> String {
    let stem = socket.and_then(Path::file_stem).and_then(|stem| stem.to_str());
    stem.unwrap_or("slackwater").to_owned()
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

async fn containerd(arguments: &DoctorArguments, settings: &Settings) -> Line {
    let what = "containerd";
    let needed = if settings.containerd_socket.is_some() { Level::Fail } else { Level::Warn };
    let ask = async {
        let given = arguments.containerd.as_deref().or(settings.containerd_api.as_deref());
        let path = given.unwrap_or(Path::new(CONTAINERD_API));
        let containerd = Containerd::connect(path, "default").await?;
        containerd.snapshotters().await
    };
    match tokio::time::timeout(TIMEOUT, ask).await {
        Ok(Ok(names)) if names.iter().any(|name| name == "slackwater") => {
            Line::new(Level::Ok, what, "has the snapshotter slackwater")
        }
        Ok(Ok(names)) => {
            let names = names.join(", ");
            let detail = format!(
                "its snapshotters are {names}; see `slackwater-driver engine-config containerd-1` \
                 and containerd-2"
            );
            Line::new(needed, what, detail)
        }
        Ok(Err(error)) => Line::new(Level::Warn, what, error.to_string()),
        Err(_) => Line::new(Level::Warn, what, "it does not answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_called_by_its_socket() {
        assert_eq!(plugin_name(Some(Path::new("/run/docker/plugins/mine.sock"))), "mine");
        assert_eq!(plugin_name(None), "slackwater");
    }

    #[test]
    fn the_end_of_a_certificate_is_told_before() {
        let day = |days: u64| days * SECONDS_A_DAY;
        let told = |ends_at, now| {
            let line = certificate_end(ends_at, now);
            (line.level, line.detail)
        };
        assert_eq!(told(day(130), day(100)), (Level::Ok, "good for 30 days".to_owned()));
        let (level, detail) = told(day(130) - 1, day(100));
        assert!(level == Level::Warn && detail.contains("in 29 days"), "{detail}");
        for ended in [day(100), day(99)] {
            let (level, detail) = told(ended, day(100));
            assert!(level == Level::Warn && detail.contains("has ended"), "{detail}");
        }
    }

    #[test]
    fn releases_are_told_apart() {
        assert_eq!(major("20.10.24+dfsg1"), Some(20));
        assert_eq!(major("29.0.0-rc.1"), Some(29));
        assert_eq!(major(""), None);
    }
}

//! `slackwater-driver engine-config`: what each engine needs in its own configuration, ready to
//! paste, with the paths of this driver's settings.

use std::path::Path;

use clap::{Args, ValueEnum};

use super::doctor::plugin_name;
use super::print;
use crate::error::DriverError;
use crate::settings::{CONTAINERD_API, Settings};
use crate::worker::LayerKind;

/// Where Docker looks for a plugin of this name.
const DOCKER_SOCKET: &str = "/run/docker/plugins/slackwater.sock";

/// Where the snapshotter's socket is by default.
const CONTAINERD_SOCKET: &str = "/run/slackwater/containerd.sock";

/// Where the systemd unit has the state.
const STATE_DIR: &str = "/var/lib/slackwater-driver";

/// Which engine.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct EngineConfigArguments {
    /// The engine
    engine: Engine,
}

/// An engine, as far as its configuration differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Engine {
    /// Docker up to 27
    Docker,
    /// Docker from 24 on, with the images in containerd
    DockerContainerd,
    /// containerd 1.6 and 1.7
    #[value(name = "containerd-1")]
    Containerd1,
    /// containerd 2
    #[value(name = "containerd-2")]
    Containerd2,
    /// Kubernetes with containerd
    Cri,
}

/// The paths that appear in what is printed.
struct Paths {
    docker_socket: String,
    plugin: String,
    containerd_socket: String,
    containerd_api: String,
    state_dir: String,
    platform: String,
    layers: LayerKind,
}

pub(super) fn run(
    arguments: &EngineConfigArguments,
    settings: &Settings,
) -> Result<(), DriverError> {
    let text = |path: Option<&Path>, usual: &str| {
        path.map_or_else(|| usual.to_owned(), |path| path.display().to_string())
    };
    let state_dir = settings.state_dir.as_deref().unwrap_or(Path::new(STATE_DIR));
    let paths = Paths {
        docker_socket: text(settings.docker_socket.as_deref(), DOCKER_SOCKET),
        plugin: plugin_name(settings.docker_socket.as_deref()),
        containerd_socket: text(settings.containerd_socket.as_deref(), CONTAINERD_SOCKET),
        containerd_api: text(settings.containerd_api.as_deref(), CONTAINERD_API),
        state_dir: state_dir.display().to_string(),
        platform: format!("linux/{}", crate::image::containerd::architecture()),
        layers: settings.layers.unwrap_or_default().kind(state_dir)?,
    };
    print(&match arguments.engine {
        Engine::Docker => docker(&paths),
        Engine::DockerContainerd => docker_containerd(&paths),
        Engine::Containerd1 => containerd_1(&paths),
        Engine::Containerd2 => containerd_2(&paths),
        Engine::Cri => cri(&paths),
    });
    Ok(())
}

fn docker(paths: &Paths) -> String {
    let Paths { docker_socket, plugin, .. } = paths;
    format!(
        r#"# Docker up to 27, by its graphdriver plugins. Docker 28 has none any more: see
# `slackwater-driver engine-config docker-containerd`.
#
# Docker finds the plugin by its socket, which must be there before dockerd starts:
#   slackwater-driver --docker-socket {docker_socket} ...
# (Docker looks in /run/docker/plugins; the socket's name is that of the storage driver.)

# ---- /etc/docker/daemon.json
{{
  "experimental": true,
  "storage-driver": "{plugin}"
}}

# ---- /etc/systemd/system/docker.service.d/slackwater.conf
[Unit]
Wants=slackwater-driver.service
After=slackwater-driver.service
[Service]
# Docker 27 asks for this; others ignore it.
Environment=DOCKERD_DEPRECATED_GRAPHDRIVER_PLUGINS=1

# ---- then
systemctl daemon-reload && systemctl restart docker
docker info --format '{{{{.Driver}}}}'     # {plugin}

# Options of one container:
#   docker run --storage-opt size=100GiB ...     a larger disk
#   docker run --storage-opt shared=true ...     one read-only root for all of the image
#   docker run --storage-opt push=ordinary ...   its commits are pushed for any engine
"#
    )
}

fn docker_containerd(paths: &Paths) -> String {
    let containerd = proxy_plugin(paths, Exports::Plain);
    let differ = differ(paths);
    format!(
        r#"# Docker from 24 on, with the containerd image store (from 29 on it is the default).
#
# The driver serves the snapshotter:
#   slackwater-driver --containerd-socket {socket} --containerd-api {api} ...

# ---- /etc/docker/daemon.json
{{
  "features": {{ "containerd-snapshotter": true }},
  "storage-driver": "slackwater"
}}

# ---- /etc/containerd/config.toml, of the containerd that Docker uses: dockerd is started with
#      --containerd={api}, as the packages have it. A dockerd that starts a containerd of
#      its own has no such file. Write version = 2 for containerd 1.7, and leave out
#      the tables of the differ before 1.7.4
version = 3
{containerd}
{differ}
# ---- then
systemctl restart containerd docker
docker info --format '{{{{.Driver}}}}'     # slackwater

# Docker fetches all layers of what it pulls, so that it can save and push them. On a host that only
# runs images, layers-without-blobs = ["k8s.io", "moby"] of the driver spares that.
#
# Commit by reference:
#   slackwater-driver image commit --docker-host unix:///var/run/docker.sock CONTAINER IMAGE

# `docker run --storage-opt size=...` does nothing on a containerd image store, and Docker says nothing:
# where layers are disks each has the driver's disk-size, and where they are images all containers share
# one of 1 TiB, or of disk-size if that is larger.
"#,
        socket = paths.containerd_socket,
        api = paths.containerd_api,
    )
}

fn containerd_1(paths: &Paths) -> String {
    let (containerd, later) = (proxy_plugin(paths, Exports::Comment), later_differ(paths));
    format!(
        r#"# containerd 1.6 and 1.7.
#
# The driver serves the snapshotter:
#   slackwater-driver --containerd-socket {socket} --containerd-api {api} ...

# ---- /etc/containerd/config.toml
version = 2
{containerd}
{later}
# ---- then
systemctl restart containerd
ctr images pull --snapshotter slackwater IMAGE
ctr run --snapshotter slackwater IMAGE NAME

# `ctr images pull` of these releases fetches and unpacks every layer, whatever is set. Kubernetes
# fetches none that the appliance has, and nerdctl none in the namespaces that the driver's
# layers-without-blobs lists. Commit by reference:
#   slackwater-driver image commit --containerd {api} NAME IMAGE
"#,
        socket = paths.containerd_socket,
        api = paths.containerd_api,
    )
}

fn containerd_2(paths: &Paths) -> String {
    let containerd = proxy_plugin(paths, Exports::Annotations);
    let (differ, unpack) = (differ(paths), unpack_config(paths));
    format!(
        r#"# containerd 2.
#
# The driver serves the snapshotter:
#   slackwater-driver --containerd-socket {socket} --containerd-api {api} ...

# ---- /etc/containerd/config.toml
version = 3
{containerd}
{differ}
{unpack}

# ---- then
systemctl restart containerd
ctr images pull --snapshotter slackwater IMAGE
ctr run --snapshotter slackwater IMAGE NAME

# Leave max_concurrent_unpacks at 1: unpacking side by side prepares layers without their
# parents, and then no layer is found on the appliance.
"#,
        socket = paths.containerd_socket,
        api = paths.containerd_api,
    )
}

fn cri(paths: &Paths) -> String {
    let (old, later) = (proxy_plugin(paths, Exports::Plain), later_differ(paths));
    let new = proxy_plugin(paths, Exports::Annotations);
    let (differ, unpack) = (differ(paths), unpack_config(paths));
    format!(
        r#"# Kubernetes (the CRI plugin of containerd), on every node.
#
# The driver serves the snapshotter:
#   slackwater-driver --containerd-socket {socket} --containerd-api {api} ...

# ---- /etc/containerd/config.toml of containerd 1.7 (1.6 has no exports; leave them out)
version = 2
{old}
{later}
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "slackwater"
  disable_snapshot_annotations = false

# ---- /etc/containerd/config.toml of containerd 2
version = 3
{new}
{differ}
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "slackwater"
  disable_snapshot_annotations = false

{unpack}

# ---- then
systemctl restart containerd kubelet

# The images of the node must be pulled again; the pause image too.
#
# The thresholds of kubelet for images (imageGCHighThresholdPercent, imagefs.available) measure the
# disk of {state_dir}, on which this worker caches blocks. The appliance's room is in its own metrics.
"#,
        socket = paths.containerd_socket,
        api = paths.containerd_api,
        state_dir = paths.state_dir,
    )
}

/// What stands below the plugin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exports {
    /// As a comment: containerd 1.6 does not know them.
    Comment,
    /// Where kubelet looks for disk space.
    Plain,
    /// And that labels are to be sent.
    Annotations,
}

fn proxy_plugin(paths: &Paths, exports: Exports) -> String {
    let Paths { containerd_socket, state_dir, .. } = paths;
    let comment = if exports == Exports::Comment { "# 1.7 only: " } else { "" };
    let mut text = format!(
        r#"[proxy_plugins.slackwater]
  type = "snapshot"
  address = "{containerd_socket}"
{comment}  [proxy_plugins.slackwater.exports]
{comment}    root = "{state_dir}"
"#
    );
    if exports == Exports::Annotations {
        text.push_str("    enable_remote_snapshot_annotations = \"true\"\n");
    }
    text
}

/// What makes layers of this driver's snapshots, takes those that the appliance has, and unpacks where layers are images.
/// containerd's own differ does all else.
fn differ(paths: &Paths) -> String {
    let socket = &paths.containerd_socket;
    format!(
        r#"[proxy_plugins.slackwater-diff]
  type = "diff"
  address = "{socket}"

# Commits and builds read what changed, and not the image; pulls unpack nothing that the appliance
# has. While the driver is down, containerd commits nothing, and unpacks nothing but by its transfer
# service, for other snapshotters either.
[plugins."io.containerd.service.v1.diff-service"]
  default = ["slackwater-diff", "walking"]
"#
    )
}

/// The same for a file of containerd 1, most releases of which refuse it.
fn later_differ(paths: &Paths) -> String {
    let advice = match paths.layers {
        LayerKind::Disks => "",
        LayerKind::Images => {
            "# Before containerd 1.7.4 set layers = \"disks\" of the driver: pulls unpack faster so.\n"
        }
    };
    let mut text = format!(
        "{advice}# containerd 1.7.4 and newer: remove `# ` from each line below, up to the empty one.\n"
    );
    for line in differ(paths).lines() {
        text.push_str(format!("# {line}").trim_end());
        text.push('\n');
    }
    text
}

/// What containerd 2 unpacks with. Where layers are images the driver writes them as such.
fn unpack_config(paths: &Paths) -> String {
    let platform = &paths.platform;
    let entry = |snapshotter: &str, differ: &str| {
        format!(
            r#"[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "{platform}"
  snapshotter = "{snapshotter}"
  differ = "{differ}""#
        )
    };
    let differ = match paths.layers {
        LayerKind::Disks => "walking",
        LayerKind::Images => "slackwater-diff",
    };
    let (overlayfs, own) = (entry("overlayfs", "walking"), entry("slackwater", differ));
    format!(
        r#"# This takes the place of containerd's own list, which has overlayfs, and erofs since 2.3: add an
# entry for each other snapshotter that you pull for.
{overlayfs}

{own}"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        Paths {
            docker_socket: "/run/docker/plugins/x.sock".to_owned(),
            plugin: "x".to_owned(),
            containerd_socket: "/run/x.sock".to_owned(),
            containerd_api: "/run/y.sock".to_owned(),
            state_dir: "/state".to_owned(),
            platform: "linux/amd64".to_owned(),
            layers: LayerKind::Disks,
        }
    }

    #[test]
    fn the_driver_unpacks_where_layers_are_images() {
        for (layers, expected) in
            [(LayerKind::Disks, "walking"), (LayerKind::Images, "slackwater-diff")]
        {
            let paths = Paths { layers, ..paths() };
            for text in [containerd_2(&paths), cri(&paths)] {
                let own = text.split("snapshotter = \"slackwater\"\n  differ = ").nth(1).unwrap();
                assert!(own.starts_with(&format!("\"{expected}\"")), "{layers} {own}");
            }
        }
    }

    #[test]
    fn what_is_printed_as_a_comment_for_later_releases_can_be_pasted() {
        for layers in [LayerKind::Disks, LayerKind::Images] {
            let text = later_differ(&Paths { layers, ..paths() });
            let (advice, tables) = text.split_once("below, up to the empty one.\n").unwrap();
            assert_eq!(advice.contains("disks"), layers == LayerKind::Images);
            let lines = tables.lines().map(|line| line.strip_prefix("# ").unwrap_or("#"));
            let table: toml::Table = lines.collect::<Vec<_>>().join("\n").parse().unwrap();
            assert_eq!(table["proxy_plugins"]["slackwater-diff"]["type"].as_str(), Some("diff"));
            let order = &table["plugins"]["io.containerd.service.v1.diff-service"]["default"];
            assert_eq!(order.as_array().unwrap().len(), 2);
        }
    }

    /// The part of the text that goes into the file of that name, comments left out.
    fn file(text: &str, name: &str) -> String {
        let part = text.split("# ---- ").find(|part| part.starts_with(name)).unwrap();
        part.lines().skip(1).filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_is_printed_can_be_pasted() {
        for text in [docker(&paths()), docker_containerd(&paths())] {
            let json: serde_json::Value =
                serde_json::from_str(&file(&text, "/etc/docker/daemon.json")).unwrap();
            assert!(json["storage-driver"].is_string());
        }
        for text in [containerd_1(&paths()), containerd_2(&paths()), cri(&paths())] {
            let table: toml::Table = file(&text, "/etc/containerd/config.toml").parse().unwrap();
            let plugin = &table["proxy_plugins"]["slackwater"];
            assert_eq!(plugin["address"].as_str(), Some("/run/x.sock"));
        }
        let cri = cri(&paths()).split("# ---- ").map(str::to_owned).collect::<Vec<_>>();
        let of_cri = cri.iter().find(|part| part.contains("version = 3")).unwrap();
        for text in
            [containerd_2(&paths()), docker_containerd(&paths()), format!("# ---- {of_cri}")]
        {
            let table: toml::Table = file(&text, "/etc/containerd").parse().unwrap();
            let differ = &table["proxy_plugins"]["slackwater-diff"];
            assert_eq!(differ["type"].as_str(), Some("diff"));
            assert_eq!(differ["address"].as_str(), Some("/run/x.sock"));
            let order = &table["plugins"]["io.containerd.service.v1.diff-service"]["default"];
            assert_eq!(order.as_array().unwrap().len(), 2);
            let Some(transfer) = table["plugins"].get("io.containerd.transfer.v1.local") else {
                assert!(text.contains("daemon.json"));
                continue;
            };
            let unpack = transfer["unpack_config"].as_array().unwrap().iter();
            let names: Vec<_> =
                unpack.map(|entry| entry["snapshotter"].as_str().unwrap()).collect();
            assert_eq!(names, ["overlayfs", "slackwater"]);
        }
        let second: toml::Table = file(&containerd_2(&paths()), "/etc/containerd").parse().unwrap();
        assert_eq!(
            second["proxy_plugins"]["slackwater"]["exports"]["root"].as_str(),
            Some("/state")
        );
        assert_eq!(second["version"].as_integer(), Some(3));
    }
}

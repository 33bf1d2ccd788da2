"""Releases of containerd and Docker: where their programs are, and how they are configured."""

import dataclasses
import json
import os
import pathlib
import shutil

import newer
from process import run
from scenario import require

# After the keys of a release that stand in no table.
_COMMON = """
root = "{root}"
state = "{state}"
[debug]
  level = "warn"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_port = "0"
"""
_CONFIGURATION_2 = """
version = 2
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
""" + _COMMON + """
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{snapshotter}"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{root}/cni"
  conf_dir = "{root}/cni"
"""
_CONFIGURATION_3 = """
version = 3
disabled_plugins = ["io.containerd.nri.v1.nri"]
""" + _COMMON + """
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{root}/cni"]
  conf_dir = "{root}/cni"
"""
_SNAPSHOTTER_3 = """
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  disable_snapshot_annotations = false
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux"
  snapshotter = "{snapshotter}"
"""
_PLUGIN = """
[proxy_plugins.slackwater]
  type = "snapshot"
  address = "{address}"
"""
# By it containerd's own clients say from where they pull, too (containerd, remote-snapshotter.md).
_ANNOTATIONS = """
  [proxy_plugins.slackwater.exports]
    enable_remote_snapshot_annotations = "true"
"""


@dataclasses.dataclass(frozen=True)
class Release:
    """One containerd, and maybe a Docker on it."""

    title: str
    # As containerd's client and server say it, or the beginning.
    version: str
    # Below the engines' cache, as newer.py makes them; none: Debian's, on the path.
    directories: tuple[str, ...]
    _configuration: str
    # How the driver is its snapshotter.
    _snapshotter: str = ""
    # What is added to the driver's plugin.
    _exports: str = ""
    # What `engine-config` is asked for, to print the tables of containerd.
    _printed: str = ""
    # How its drivers keep layers, where a scenario does not say.
    layers: str = "auto"
    # Tells its workers and its appliance from Debian's.
    suffix: str = ""
    # Its Docker keeps its images in containerd; else Docker is Debian's, which Debian's containerd alone has.
    has_docker: bool = False

    def program(self, name):
        """What is run by that name."""
        if not self.directories:
            return name
        path = shutil.which(name, path=self._programs)
        require(path, f"no {name} in {self._programs}: tests/engines/run makes it")
        return path

    @property
    def _programs(self):
        cache = pathlib.Path(os.environ["SLACKWATER_ENGINES_CACHE"])
        return ":".join(str(cache / directory) for directory in self.directories)

    @property
    def settings(self):
        """Of its environment: it looks for its shim on the path first, where Debian's is."""
        if not self.directories:
            return {}
        return {"PATH": f"{self._programs}:{os.environ['PATH']}"}

    def docker_configuration(self, driver_socket, driver_arguments, socket):
        """The text of daemon.json of its own Docker, with the driver."""
        text = printed(driver_socket, driver_arguments, socket, "docker-containerd", "daemon.json")
        settings = json.loads(text)
        # Debian's runc knows no namespaces of time.
        settings["features"]["time-namespaces"] = False
        return json.dumps(settings)

    def configuration(self, driver_socket, driver_arguments, **values):
        """The text of its configuration; with a driver's socket, that is a snapshotter."""
        text = self._configuration.format(**values)
        if self._printed and driver_socket:
            tables = printed(driver_socket, driver_arguments, values["socket"], self._printed, "config.toml")
            require("version = 3" in tables.splitlines(), f"engine-config prints another version: {tables}")
            return text + tables.replace("version = 3\n", "")
        text += self._snapshotter.format(**values)
        return text + _PLUGIN.format(address=driver_socket) + self._exports if driver_socket else text


def printed(driver_socket, driver_arguments, socket, engine, file):
    """What `engine-config` says of a file, to be pasted. Where there are several, that of containerd 2."""
    said = run(os.environ["SLACKWATER_DRIVER"], *driver_arguments, "--containerd-socket", driver_socket,
               "--containerd-api", socket, "engine-config", engine)
    parts = [part for part in said.split("# ---- ") if file in part.splitlines()[0]]
    require(parts, f"engine-config {engine} prints no {file}: {said}")
    chosen = next((part for part in parts if "containerd 2" in part.splitlines()[0]), parts[0])
    return "\n".join(chosen.splitlines()[1:]) + "\n"


# Debian 12's own kernel is older than 6.12: its drivers keep disks. So do those of 2.2, for CRI and ctr of containerd 2. Those
# of the newest engines keep what fits this machine's kernel.
DEBIAN = Release("containerd 1.6", "1.6.", (), _CONFIGURATION_2, layers="disks")
NEWER = Release(
    "containerd 2.4", newer.CONTAINERD.version, (newer.CONTAINERD.directory_name,), _CONFIGURATION_3, _SNAPSHOTTER_3,
)
NEWER_AS_PRINTED = dataclasses.replace(NEWER, _printed="cri")
LONG_SUPPORTED = dataclasses.replace(
    NEWER_AS_PRINTED, title="containerd 2.2", version=newer.CONTAINERD_2_2.version, directories=(newer.CONTAINERD_2_2.directory_name,), suffix="-22",
    layers="disks",
)
NEWER_DOCKER = dataclasses.replace(
    NEWER, directories=(*NEWER.directories, newer.DOCKERD.directory_name), _printed="docker-containerd",
    has_docker=True,
)
# For Docker, and for Kubernetes and ctr, too.
NEWER_FOR_ALL = dataclasses.replace(
    NEWER_DOCKER, title="containerd 2.4 and Docker 29", _printed="cri", suffix="-29",
)
NEWER_WITH_SOURCES = dataclasses.replace(NEWER, _exports=_ANNOTATIONS)

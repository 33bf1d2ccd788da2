"""Releases of containerd: where their programs are, and how they are configured."""

import dataclasses
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
    """One containerd."""

    title: str
    # Below the engines' cache, as newer.py makes it; None: Debian's, on the path.
    directory: str | None
    _configuration: str
    # How the driver is its snapshotter.
    _snapshotter: str = ""
    # What is added to the driver's plugin.
    _exports: str = ""
    # The driver prints the tables of both.
    _is_printed: bool = False

    def program(self, name):
        """What is run by that name."""
        if self.directory is None:
            return name
        path = shutil.which(name, path=str(self._programs))
        require(path, f"no {name} in {self._programs}: tests/engines/run makes it")
        return path

    @property
    def _programs(self):
        return pathlib.Path(os.environ["SLACKWATER_ENGINES_CACHE"]) / self.directory

    @property
    def settings(self):
        """Of its environment: it looks for its shim on the path first, where Debian's is."""
        if self.directory is None:
            return {}
        return {"PATH": f"{self._programs}:{os.environ['PATH']}"}

    def configuration(self, driver_socket, driver_arguments, **values):
        """The text of its configuration; with a driver's socket, that is a snapshotter."""
        text = self._configuration.format(**values)
        if self._is_printed:
            return text + printed(driver_socket, driver_arguments, values["socket"])
        text += self._snapshotter.format(**values)
        return text + _PLUGIN.format(address=driver_socket) + self._exports if driver_socket else text


def printed(driver_socket, driver_arguments, socket):
    """What `engine-config cri` says of containerd 2, to be pasted, without its version."""
    said = run(os.environ["SLACKWATER_DRIVER"], *driver_arguments, "--containerd-socket", driver_socket,
               "--containerd-api", socket, "engine-config", "cri")
    part = next(part for part in said.split("# ---- ") if "containerd 2" in part.splitlines()[0])
    lines = part.splitlines()[1:]
    require("version = 3" in lines, f"engine-config prints another version: {part}")
    return "\n".join(line for line in lines if line != "version = 3") + "\n"


DEBIAN = Release("containerd 1.6", None, _CONFIGURATION_2)
NEWER = Release("containerd 2.4", newer.directory_name(), _CONFIGURATION_3, _SNAPSHOTTER_3)
NEWER_AS_PRINTED = dataclasses.replace(NEWER, _is_printed=True)
NEWER_WITH_SOURCES = dataclasses.replace(NEWER, _exports=_ANNOTATIONS)

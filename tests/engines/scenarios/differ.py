"""The layers of what containers changed, which the driver makes for containerd 2.4: configured as the
driver prints it."""

import tarfile

from process import run
from releases import NEWER_AS_PRINTED
from scenario import require, require_equal, scenario, wait_until

# The image has one program that runs, and no links to it.
BUSYBOX = "/bin/busybox"
CHANGE = """
b=/bin/busybox
echo new >/new && $b rm /etc/debian_version && $b touch -d @1000000000 /etc/issue &&
# The same length and time: the inode alone tells.
m=$($b stat -c %Y /etc/issue.net) && $b tr a-z A-Z </etc/issue.net >/copy && $b cat /copy >/etc/issue.net &&
$b touch -d @$m /etc/issue.net && $b rm /copy && $b sync -f / && echo >/done && exec $b sleep 1000
"""
CHANGED = {"new", "done", "etc", "etc/.wh.debian_version", "etc/issue", "etc/issue.net"}
# What runc makes to mount over.
MAY_BE_THERE = {".", "dev", "proc", "sys", "run", "tmp", "etc/hosts", "etc/resolv.conf", "etc/hostname"}
# The image has more than 200 MB, of which the shell and what lists names are read.
READ_MAX_BYTES = 60 << 20
CHANGE_LIMIT_SECONDS = 60


def layer_of(containerd, snapshot, path):
    """Writes the layer that containerd makes of a container's snapshot to a file; its members."""
    release = NEWER_AS_PRINTED
    words = (release.program("ctr"), "--address", containerd.socket, "--namespace", containerd.namespace,
             "snapshots", "--snapshotter", containerd.snapshotter, "diff", snapshot)
    run("sh", "-c", 'out=$1; shift; exec "$@" >"$out"', "sh", path, *words, limit_seconds=120)
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() if member.isfile() else b"" for member in tar}


@scenario("differ: a container's layer reads what changed, by containerd 2.4 as engine-config prints it", 400,
          newer=True)
def differ(world):
    image = world.images.debian()
    server = world.server("differ-appliance")
    # What it unpacked is on the appliance for as long as it has the image.
    with world.fresh_worker("unpacks", server, release=NEWER_AS_PRINTED) as worker:
        worker.containerd.must_pull_through_cri(image)
        # Its own snapshotter goes on as before.
        worker.containerd.ctr("images", "pull", "--plain-http", "--snapshotter", "overlayfs", image)
        with world.fresh_worker("adopts", server, release=NEWER_AS_PRINTED) as other:
            position = world.registry.position()
            other.containerd.must_pull_through_cri(image)
            configuration = world.registry.manifest(image.split("/", 1)[1])["config"]["digest"]
            require_equal("blobs that it fetched", world.registry.blobs_fetched(position), {configuration})
            read = read_of_layer(other, image)
    return f"{read >> 10} KiB read"


def read_of_layer(worker, image):
    """Has containerd make the layer of a container that changed some files, and checks it. Returns the bytes of the
    appliance's blocks that were read for it."""
    containerd = worker.containerd
    containerd.ctr(*containerd.run_words("--detach", image, "changes", BUSYBOX, "sh", "-c", CHANGE))
    wait_until("the container changed its files", CHANGE_LIMIT_SECONDS, lambda: containerd.attempt(
        "tasks", "exec", "--exec-id", "look", "changes", BUSYBOX, "test", "-e", "/done").code == 0)
    worker.meter.reset()
    found = layer_of(containerd, "changes", worker.directory / "layer")
    read = worker.meter.received
    names = set(found)
    require(CHANGED <= names and names <= CHANGED | MAY_BE_THERE, f"members are {sorted(names)}")
    require_equal("a new file", found["new"], b"new\n")
    require(b"DEBIAN" in found["etc/issue.net"], f"it kept its time and length: {found['etc/issue.net']}")
    require(read <= READ_MAX_BYTES, f"{read} bytes were read of the appliance")
    log = worker.driver.process.log_path.read_text("utf-8", "replace")
    require("containerd makes a layer itself" not in log, f"the driver left it: {log[-2000:]}")
    containerd.ctr("tasks", "kill", "--signal", "SIGKILL", "changes")
    return read

"""Layers that are kept as images: pulled, run, compared with overlayfs', changed, adopted by another worker."""

import re
import time

import leftover
from releases import NEWER, NEWER_AS_PRINTED
from scenario import require, require_equal, scenario, wait_until
from scenarios.chain import mounted
from scenarios.differ import BUSYBOX, layer_of
from tree import manifest, require_same

IMAGES = ("--layers", "images")
CHANGE = "echo new >/new && rm -r /one && mkdir /one && echo again >/one/again && echo >/done && exec sleep 1000"
CHANGED = {"new", "done", "one", "one/.wh..wh..opq", "one/again"}
# What runc makes to mount over.
MAY_BE_THERE = {".", "dev", "proc", "sys", "run", "tmp", "etc", "etc/hosts", "etc/resolv.conf", "etc/hostname"}
CHANGE_LIMIT_SECONDS = 60
# After so long without a user a disk or a view is unmounted, and a margin.
UNUSED_SECONDS = 12
OWN_DISK = "containerd.io/snapshot/slackwater.disk-size=96MiB"
OWN_DISK_KIB = 96 << 10
# Of the times of the images' files: those that a build made are equal on one image, whoever unpacks it.
SET_BEFORE_SECONDS = 1 << 40


def highest(containerd, snapshotter):
    """The committed snapshot that no other one is above."""
    lines = containerd.ctr("snapshots", "--snapshotter", snapshotter, "list").splitlines()[1:]
    rows = [line.split() for line in lines if "Committed" in line]
    parents = {row[1] for row in rows if len(row) == 3}
    (name,) = {row[0] for row in rows} - parents
    return name


def seen(world, containerd, snapshotter, snapshot=None):
    """The tree of a snapshot; where none is named, of the only image that this snapshotter has."""
    own = containerd.snapshotter
    containerd.snapshotter = snapshotter
    try:
        containerd.view("seen", snapshot or highest(containerd, snapshotter))
        with mounted(world, containerd, "seen") as root:
            found = manifest(root, SET_BEFORE_SECONDS)
        # No layer of the image says when its root was made.
        del found[""]["modified"]
        containerd.snapshots("remove", "seen")
    finally:
        containerd.snapshotter = own
    return found


def image_mounts(driver):
    """Where layers are mounted as images, with the kind of file system."""
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        rows = [line.split() for line in table]
    return {row[4]: row[row.index("-") + 1] for row in rows if row[4].startswith(f"{driver.state}/images/")}


def require_none_left(driver):
    """Fails if the driver left a layer to containerd."""
    log = driver.process.log_path.read_text("utf-8", "replace")
    left = re.search(r".*(containerd makes a layer itself|containerd unpacks a layer).*", log)
    require(not left, f"the driver left it to containerd: {left and left[0]}")


@scenario("layers: images of layers by containerd 2.4 are overlayfs' trees, run, and go to another worker", 500,
          newer=True)
def images(world):
    image = world.images.layered()
    server = world.server("layers-appliance")
    with world.fresh_worker("unpacks", server, release=NEWER_AS_PRINTED, arguments=IMAGES) as worker:
        containerd = worker.containerd
        # `--local` unpacks by the diff service.
        pull = ("images", "pull", "--plain-http", "--local", "--snapshotter")
        containerd.ctr(*pull, containerd.snapshotter, image)
        containerd.ctr(*pull, "overlayfs", image)
        expected = seen(world, containerd, "overlayfs")
        require_same(seen(world, containerd, containerd.snapshotter), expected, "the image", "overlayfs' one")
        require_equal("file systems", set(image_mounts(worker.driver).values()), {"erofs"})
        run_and_change(worker, image)
        require_none_left(worker.driver)
        with world.fresh_worker("adopts", server, release=NEWER_AS_PRINTED, arguments=IMAGES) as other:
            position = world.registry.position()
            other.containerd.must_pull_through_cri(image)
            configuration = world.registry.manifest(image.split("/", 1)[1])["config"]["digest"]
            require_equal("blobs that it fetched", world.registry.blobs_fetched(position), {configuration})
            require_equal("there", other.containerd.run(image, "y", "cat", "/three"), "three\n")
            by_reference(world, worker, other, image)
    # Other appliances have none of it. The transfer service unpacks by this driver, or through the mounts.
    for name, release, what in (("transfer", NEWER_AS_PRINTED, "the image that the driver unpacked"),
                                ("mounts", NEWER, "the image that containerd unpacked")):
        apart = world.server(f"{name}-appliance")
        with world.fresh_worker(name, apart, release=release, arguments=IMAGES) as worker:
            containerd = worker.containerd
            containerd.ctr("images", "pull", "--plain-http", "--snapshotter", containerd.snapshotter, image)
            require_same(seen(world, containerd, containerd.snapshotter), expected, what, "overlayfs' one")
            unpacked = 4 if release is NEWER_AS_PRINTED else 0
            require_equal(f"{name}: layers that the driver unpacked", worker.driver.calls("Apply"), unpacked)


@scenario("layers: images without a container stay mounted until the driver stops, those of containers beyond that", 200,
          newer=True)
def unused(world):
    image = world.images.layered()
    with world.fresh_worker("unused", release=NEWER_AS_PRINTED, arguments=IMAGES) as worker:
        containerd, driver = worker.containerd, worker.driver
        containerd.must_pull_through_cri(image)
        require_equal("there", containerd.run(image, "x", "cat", "/three"), "three\n")
        images = set(image_mounts(driver))
        require_equal("layers that are mounted", len(images), 4)
        time.sleep(UNUSED_SECONDS)
        require_equal("images that stay mounted", set(image_mounts(driver)), images)
        require_equal("the driver ends with", driver.process.stop(), 0)
        require_equal("mounts that it leaves", leftover.mounted(driver), [])
        driver.start()
        containerd.wait_connected()
        containerd.ctr(*containerd.run_words("--detach", image, "runs", BUSYBOX, "sleep", "1000"))
        require_equal("the driver ends with", driver.process.stop(), 0)
        require_equal("images of the container", set(image_mounts(driver)), images)
        driver.start()
        containerd.wait_connected()
        read = containerd.ctr("tasks", "exec", "--exec-id", "read", "runs", "cat", "/one/file")
        require_equal("the one that ran", read, "one\n")


def by_reference(world, worker, other, image):
    """Another worker has an image by reference: the images that it has already, or by CRI without any layer."""
    name, containerd = world.registry.name("layers-converted:1"), worker.containerd
    worker.driver.image("convert", "--containerd", containerd.socket, "--namespace", containerd.namespace, image, name)
    containerd.ctr("images", "push", "--plain-http", name)
    before = set(image_mounts(other.driver).values())
    position = world.registry.position()
    other.containerd.must_pull_through_cri(name)
    manifest_of = world.registry.manifest(name.split("/", 1)[1])
    require_equal("blobs of references that it fetched", world.registry.blobs_fetched(position),
                  {manifest_of["config"]["digest"]})
    require_equal("by reference", other.containerd.run(name, "z", "sh", "-c", "cat /three; ls /one"), "three\nfile\n")
    require_equal("file systems", set(image_mounts(other.driver).values()) | before, {"erofs"})


def run_and_change(worker, image):
    """Containers of the image, while the driver is killed; and the layer of what one of them changed."""
    containerd = worker.containerd
    containerd.ctr(*containerd.run_words("--detach", image, "changes", "/bin/sh", "-c", CHANGE))
    wait_until("the container changed its files", CHANGE_LIMIT_SECONDS, lambda: containerd.attempt(
        "tasks", "exec", "--exec-id", "look", "changes", BUSYBOX, "test", "-e", "/done").code == 0)
    before = set(image_mounts(worker.driver))
    worker.driver.restart(kill=True)
    containerd.wait_connected()
    require_equal("another container", containerd.run(image, "other", "cat", "/one/file"), "one\n")
    require_equal("mounts of images", set(image_mounts(worker.driver)), before)
    again = containerd.ctr("tasks", "exec", "--exec-id", "read", "changes", "cat", "/one/again")
    require_equal("the one that ran", again, "again\n")
    found = layer_of(containerd, "changes", worker.directory / "layer")
    names = set(found)
    require(CHANGED <= names and names <= CHANGED | MAY_BE_THERE, f"members are {sorted(names)}")
    require_equal("a new file", found["new"], b"new\n")
    containerd.ctr("tasks", "kill", "--signal", "SIGKILL", "changes")
    # A label of the container's snapshot, as programs give it.
    run, *words = containerd.run_words("--rm", image, "own", BUSYBOX, "df", "-k", "/")
    size_kib = int(containerd.ctr(run, "--snapshotter-label", OWN_DISK, *words).splitlines()[-1].split()[1])
    require(OWN_DISK_KIB * 3 // 4 < size_kib <= OWN_DISK_KIB, f"a disk of {size_kib} KiB, not of {OWN_DISK_KIB}")

"""The end of the run: nothing is left, the store is whole, and the logs are quiet."""

import re

from leftover import require_nothing_left
from releases import LONG_SUPPORTED, NEWER_FOR_ALL
from scenario import require, require_equal, scenario

TROUBLE = re.compile(r"panicked|[Cc]orrupt|stack overflow")
# What the driver says of the archives that other scenarios damage.
REFUSED_ARCHIVE = re.compile(r'(call="ApplyDiff"|containerd::apply: left).*the archive is ')


@scenario("end: images on two workers, removed, leave nothing on the appliance", 240, also=(NEWER_FOR_ALL,))
def nothing(world):
    image = world.images.layered()
    for name in ("a", "b"):
        worker = world.worker(name)
        worker.docker("pull", image)
        worker.docker.run(image, "sh", "-c", "echo x >/x")
        worker.containerd.must_pull_through_cri(image)
        worker.containerd.run(image, "x", "sh", "-c", "echo x >/x")
    # The first to leave must not take what the other uses.
    world.worker("a").clear()
    other = world.worker("b")
    require_equal("docker there", other.docker.run(image, "cat", "/three"), "three")
    require_equal("containerd there", other.containerd.run(image, "y", "cat", "/three"), "three\n")
    world.clear()
    require_nothing_left(world.server(), [worker.driver for worker in world.workers])
    report = world.server().call("POST", "/v1/check", {"data": True})
    require(report["clean"], f"the store: {report}")


@scenario("end: an image on two workers, by containerd alone, removed, leaves nothing", 240, also=(LONG_SUPPORTED,))
def nothing_of_containerd(world):
    image = world.images.layered()
    for name in ("a", "b"):
        containerd = world.worker(name).containerd
        containerd.must_pull_through_cri(image)
        containerd.run(image, "x", "sh", "-c", "echo x >/x")
    world.worker("a").driver.restart(kill=True)
    world.worker("a").wait_connected()
    world.worker("a").clear()
    other = world.worker("b").containerd
    require_equal("there", other.run(image, "y", "cat", "/three"), "three\n")
    world.clear()
    require_nothing_left(world.server(), [worker.driver for worker in world.workers])
    report = world.server().call("POST", "/v1/check", {"data": True})
    require(report["clean"], f"the store: {report}")


@scenario("end: no panic in any log", 30, stand_in=True)
def quiet(world):
    world.worker("a")
    bad = []
    for path in world.logs():
        if path.name == "driver.log" or "appliance" in path.name:
            bad += [
                f"{path.name}: {line[:300]}"
                for line in path.read_text("utf-8", "replace").splitlines()
                if TROUBLE.search(line) and not REFUSED_ARCHIVE.search(line)
            ]
    require(not bad, f"{len(bad)} lines, the first:\n" + "\n".join(bad[:5]))

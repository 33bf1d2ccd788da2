"""From an earlier release to this one, as OPERATION.md says under "From release 0.2", beneath running containers.

    SLACKWATER_EARLIER=DIR tests/engines/run upgrade     DIR has slackwaterd and slackwater-driver of that release

Nothing builds that release, so the scenario is there only where it is asked for so. The worker attaches by FUSE:

    earlier driver, earlier appliance   containers run, and write
    earlier driver, this appliance      they go on, by their address; the engine's other calls, too
    this driver, the earlier's mount    they go on
    this driver, a mount of its own     containers that were stopped are started on what they wrote
    this appliance without addresses    all that the earlier release left is gone
"""

import os
import pathlib

from driver import CACHE
from process import Process
from scenario import require, require_equal, scenario, wait_until

EARLIER = os.environ.get("SLACKWATER_EARLIER")
# A line for each number that is on the disk: the shell's counter outlives no container.
APPEND = "dd of=/log oflag=append conv=notrunc,fsync 2>/dev/null"
WRITE = f"i=$(wc -l </log); while :; do i=$((i+1)); echo $i | {APPEND} || exit 1; sleep 0.1; done"
# Of the writers, after each change.
PROGRESS = 3
NAMES = ("first", "second")


def program(name):
    """A program of the earlier release."""
    return str(pathlib.Path(EARLIER).resolve() / name)


def run_earlier(worker):
    """Has the worker's driver be the earlier release's, which has a token and does not join."""
    driver, server = worker.driver, worker.server
    token = worker.directory / "token"
    token.touch(mode=0o600)
    token.write_text(server.token)
    worker.known_as = "of an earlier release"
    driver.process = Process(
        "earlier slackwater-driver",
        [program("slackwater-driver"), "--api", driver.api_url, "--nfs", driver.nfs_address,
         "--token-file", token, "--state-dir", driver.state, "--cache-dir", driver.cache,
         "--docker-socket", driver.docker_socket, "--containerd-socket", driver.containerd_socket,
         "--attach", "fuse", "--cache-size", CACHE, "run"],
        driver.process.log_path,
    )


class Writers:
    """Containers that write numbers, and sync each."""

    def __init__(self, docker, image):
        self._docker = docker
        for name in NAMES:
            docker.run_detached(image, "sh", "-c", f"touch /log; {WRITE}", options=("--name", name))

    def written(self, name):
        """The numbers that the container has written, which have no gap."""
        numbers = [int(line) for line in self._docker("exec", name, "cat", "/log").split()]
        require_equal(f"numbers of {name}", numbers, list(range(1, len(numbers) + 1)))
        return len(numbers)

    def require_progress(self, when):
        """Each goes on from where it is."""
        for name in NAMES:
            before = self.written(name)
            wait_until(f"{name} writes {when}", 60, lambda: self.written(name) >= before + PROGRESS)


def use(worker, image, name):
    """What an engine asks of its driver: a container that ends, a commit, its removal."""
    docker = worker.docker
    docker("run", "--name", name, "--network", "none", image, "sh", "-c", f"echo {name} >/made")
    docker("commit", name, f"{name}:1")
    docker("rm", name)
    require_equal("what was committed", docker.run(f"{name}:1", "cat", "/made", "/one/file"), f"{name}\none")
    worker.containerd.run(image, name, "true")


def collect_garbage(worker, image):
    """Has containerd remove the snapshots of containers that are gone. It does so with a collection after it removed
    one, and does not repeat what failed while the driver was restarted."""
    name = "of.no/use:1"
    worker.containerd.run(image, "last", "true")
    worker.containerd.ctr("images", "tag", image, name)
    worker.containerd.ctr("images", "rm", "--sync", name)


def update_driver(worker, process, writers, image):
    """The worker's part: this driver beside the earlier release's mount, then a mount of its own."""
    driver = worker.driver
    worker_id = driver.control("GET", "/status")["worker_id"]
    require_equal("the earlier driver ends with", driver.process.stop(), 0)
    driver.process = process
    worker.join(worker_id)
    driver.start()
    writers.require_progress("below the earlier release's mount, beside this driver")
    for name in NAMES:
        worker.docker("stop", "--time", "1", name)
    collect_garbage(worker, image)
    # Else it stays mounted by address, and the driver says so.
    disks = f"{driver.state}/mounts/"
    wait_until("no disk is mounted", 12, lambda: not any(point.startswith(disks) for point in driver.mounts()))
    driver.restart(kill=False)
    for name in NAMES:
        worker.docker("start", name)
    mounted_by = driver.control("GET", "/status")["mounted_by"]
    writers.require_progress(f"below a mount by {mounted_by}")
    return mounted_by


def upgrade(world):
    """The whole way."""
    image = world.images.layered()
    server = world.server("older", program=program("slackwaterd"))
    with world.fresh_worker("upgraded", server, prepare=run_earlier) as worker:
        # What it would be by itself.
        process = worker.own_process
        worker.docker("pull", image)
        require_equal("pull by CRI", worker.containerd.pull_through_cri(image), "")
        writers = Writers(worker.docker, image)
        use(worker, image, "earlier")
        writers.require_progress("on the earlier release")
        server.stop()
        server.use(os.environ["SLACKWATERD"])
        server.start("--insecure-address-only", "true")
        writers.require_progress("on this appliance")
        use(worker, image, "between")
        mounted_by = update_driver(worker, process, writers, image)
        require("worker" in mounted_by, f"mounted by {mounted_by}")
        server.stop()
        server.start()
        writers.require_progress("without mounts by address")
        use(worker, image, "now")
        for name in ("earlier", "between"):
            require_equal("an image of before", worker.docker.run(f"{name}:1", "cat", "/made"), name)
        lines = sum(writers.written(name) for name in NAMES)
        worker.docker("rm", "--force", *NAMES)
    report = server.call("POST", "/v1/check", {"data": True})
    require_equal("problems of the store", report["problems"], [])
    server.stop()
    return f"{lines} synced lines, mounted by {mounted_by}"


if EARLIER:
    scenario("upgrade: containers of an earlier release go on under this one, and its workers join", 400)(upgrade)

"""The driver ends, in order or by SIGKILL, and its FUSE processes too, under a running container."""

import os
import signal
import time

from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario, wait_until

# Each line is synced, then counted; an error ends the loop.
WRITER = (
    "n=0; while n=$((n+1)); do echo line $n >>/log && sync -f / && head -c 100000 /dev/urandom >/noise "
    "&& cat /noise >/dev/null && echo $n >/count || { echo failed at $n >/failed; exit 1; }; "
    "sleep 0.05; done"
)
GOES_ON_LIMIT_SECONDS = 60


def start_writer(docker, image, name):
    """A container that writes, syncs and reads all the time."""
    docker("pull", image)
    docker.run_detached(image, "sh", "-c", WRITER, options=("--name", name))
    wait_until("the writer writes", GOES_ON_LIMIT_SECONDS, lambda: count(docker, name) > 2)


def count(docker, name):
    """How far the writer is."""
    said = docker.attempt("exec", name, "cat", "/count", limit_seconds=GOES_ON_LIMIT_SECONDS)
    return int(said.output or 0) if said.code == 0 and said.output.strip().isdigit() else 0


def require_goes_on(docker, name):
    """Fails unless the writer writes on, and wrote all there is to write."""
    require_equal("the container runs", docker.inspect(name, "{{.State.Running}}"), "true")
    reached = count(docker, name)
    wait_until("the writer goes on", GOES_ON_LIMIT_SECONDS, lambda: count(docker, name) > reached + 3)
    said = docker("exec", name, "sh", "-c", "ls /failed 2>/dev/null; wc -l </log; tail -n 1 /log")
    lines = said.split()
    require(lines[0].isdigit(), f"the writer failed: {said}")


def whole_log(docker, name):
    """After a stop: all lines there, in order, none twice."""
    docker("kill", name)
    docker("commit", name, "writer-log:1")
    text = docker.run("writer-log:1", "cat", "/log").splitlines()
    require_equal("the log", text, [f"line {index + 1}" for index in range(len(text))])
    return len(text)


@scenario("restart: SIGTERM and kill -9 of the driver under a running container", 300, also=(NEWER_FOR_ALL,))
def driver(world):
    worker, image = world.worker("a"), world.images.layered()
    start_writer(worker.docker, image, "writer")
    for kill in (False, True, False, True):
        worker.driver.restart(kill)
        require_goes_on(worker.docker, "writer")
        worker.wait_connected()
        require_equal("a new container", worker.docker.run(image, "cat", "/one/file"), "one")
    return f"{whole_log(worker.docker, 'writer')} lines"


@scenario("restart: the FUSE processes are killed under a running container", 300, also=(NEWER_FOR_ALL,))
def fuse(world):
    worker, image = world.worker("a"), world.images.layered()
    start_writer(worker.docker, image, "writer")
    for round_number in range(3):
        servers = worker.driver.servers()
        require(servers, "no FUSE process serves: the name of its command has changed?")
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        require_goes_on(worker.docker, "writer")
        require(worker.driver.servers(), f"no FUSE process after round {round_number}")
    require_equal("a new container", worker.docker.run(image, "cat", "/one/file"), "one")
    return f"{whole_log(worker.docker, 'writer')} lines"


@scenario("restart: both engines and the driver, and images are still there", 300, also=(NEWER_FOR_ALL,))
def everything(world):
    worker, image = world.worker("a"), world.images.layered()
    docker, containerd = worker.docker, worker.containerd
    docker("pull", image)
    containerd.must_pull_through_cri(image)
    docker("create", "--name", "kept", "--network", "none", image, "sh", "-c", "echo on >>/log; cat /log")
    docker("start", "--attach", "kept")
    docker.process.stop()
    containerd.process.stop()
    # Beyond the delay after which unused mounts go.
    time.sleep(1)
    worker.driver.restart(kill=True)
    containerd.start()
    worker.wait_connected()
    docker.start()
    require_equal("the container", docker("start", "--attach", "kept"), "on\non")
    require_equal("docker's image", docker.run(image, "cat", "/three"), "three")
    require_equal("containerd's image", containerd.run(image, "again", "cat", "/three"), "three\n")

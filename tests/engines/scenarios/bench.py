"""`slackwater-bench containers` on a containerd, and `docker` on two Dockers: every row is there, and nothing is left. How
fast is what, no test says."""

import json
import os
import pathlib
import signal
import subprocess

from process import attempt, environment
from releases import DEBIAN, NEWER_AS_PRINTED, NEWER_DOCKER
from scenario import PATIENCE, require, require_equal, scenario, wait_until
from without_driver import docker_29

NAMESPACE = "slackwater-bench"
# All but the memory, for which the whole machine has to read its files again.
ROWS = ("pull", "prepare", "run", "at-once", "diff-fresh", "diff-written")
DOCKER_ROWS = ("pull", "deploy", "run", "at-once", "commit-fresh", "commit-written", "build-1", "build-4", "build-14")
LIMIT_SECONDS = 300
# As the command's help says.
NOT_RUN, FAILED = 1, 3


def words(containerd, image, *more, rounds=1):
    """How it is called."""
    program = pathlib.Path(os.environ["SLACKWATERD"]).with_name("slackwater-bench")
    return [str(word) for word in (
        program, "containers", "--ctr", containerd.program, "--address", containerd.socket, "--image", image,
        "--plain-http", "--rounds", rounds, "--at-once", "3", "--run-argument=--cgroup",
        f"--run-argument={containerd.group_of('{}')}", *more,
    )]


def bench(containerd, image, *more):
    """Runs it; its outcome."""
    return attempt(words(containerd, image, *more), limit_seconds=LIMIT_SECONDS)


def listed(containerd, *what):
    """What is in the bench's namespace."""
    return containerd.ctr("--namespace", NAMESPACE, *what).splitlines()


def require_empty(containerd):
    """Fails if something is left there."""
    for what in ("containers", "tasks", "images", "leases", "content"):
        require_equal(f"{what} that are left", listed(containerd, what, "ls", "--quiet"), [])
    for snapshotter in (containerd.snapshotter, "overlayfs"):
        rows = listed(containerd, "snapshots", "--snapshotter", snapshotter, "ls")
        require_equal(f"snapshots of {snapshotter} that are left", rows[1:], [])


def require_rows(world, containerd, image):
    """Runs all, and reads what it found."""
    found = world.scratch / f"bench-{containerd.directory.parent.name}.json"
    done = bench(containerd, image, "--only", ",".join(ROWS), "--json", found)
    done.must_succeed()
    rows = {row["key"]: row for row in json.loads(found.read_text("utf-8"))["rows"]}
    require_equal("rows", list(rows), [f"{key}-overlayfs" for key in ROWS])
    for key, row in rows.items():
        samples = row["samples"] + row["rival_samples"]
        require(len(samples) == 2 and min(samples) > 0, f"{key}: {row}")
        require(row["work"] in done.output, f"{key} is not in the table: {done.output}")
    require_empty(containerd)


def require_none_left(dockers):
    """Fails if a container or an image is left."""
    for docker in dockers:
        require_equal("containers", docker("ps", "--all", "--quiet"), "")
        require_equal("images", docker("image", "ls", "--quiet"), "")


def stopped_in_the_middle(call, dockers):
    """Stops it by Ctrl-C while a container is there."""
    call[call.index("--rounds") + 1] = "100"
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=environment()) as process:
        try:
            wait_until("a container runs", 120, lambda: process.poll() is not None or dockers[0]("ps", "--quiet"))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_SECONDS * PATIENCE)
        finally:
            process.kill()
    require_equal("after Ctrl-C", (process.returncode, "interrupted" in said), (FAILED, True))
    require_none_left(dockers)


def require_deploy(world, worker, image):
    """Measures an image that another worker has: no layer is unpacked then."""
    found, containerd = world.scratch / "bench-deploy.json", worker.containerd
    with world.fresh_worker("bench-holder", release=NEWER_AS_PRINTED, arguments=("--layers", "images")) as other:
        holder = other.containerd
        said = bench(containerd, image, "--only", "deploy").must_fail()
        require("needs --holder" in said, f"without another worker: {said}")
        said = bench(containerd, image, "--only", "deploy", "--holder", containerd.socket).must_fail()
        require("is not empty (leases: slackwater-bench)" in said, f"another worker that is the same: {said}")
        require_empty(containerd)
        # What is there is not the bench's to remove.
        listed(holder, "leases", "create", "--id", "mine")
        said = bench(containerd, image, "--only", "deploy", "--holder", holder.socket).must_fail()
        require("is not empty (leases: mine)" in said, f"another worker that has something: {said}")
        require_equal("leases of the other worker", listed(holder, "leases", "ls", "--quiet"), ["mine"])
        listed(holder, "leases", "rm", "mine")
        worker.meter.reset()
        bench(containerd, image, "--only", "pull").must_succeed()
        unpacked_bytes = worker.meter.sent
        worker.meter.reset()
        done = bench(containerd, image, "--only", "deploy", "--holder", holder.socket, "--json", found)
        done.must_succeed()
        require(worker.meter.sent < unpacked_bytes / 2,
                f"{worker.meter.sent} bytes were written where another worker has the image, and {unpacked_bytes} to unpack it")
        require_equal("rows", [row["key"] for row in json.loads(found.read_text("utf-8"))["rows"]], ["deploy-overlayfs"])
        require_empty(holder)
        require_empty(containerd)


def require_interrupted(containerd, image):
    """Stops it in the middle, by Ctrl-C."""
    call = words(containerd, image, "--only", "at-once", rounds=100)
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=environment()) as process:
        try:
            wait_until("a container runs", 120, lambda: process.poll() is not None
                       or listed(containerd, "containers", "ls", "--quiet"))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LIMIT_SECONDS * PATIENCE)
        finally:
            process.kill()
    require_equal("after Ctrl-C", (process.returncode, "interrupted" in said), (FAILED, True))
    require_empty(containerd)


def require_all(world, release, arguments=(), more=None):
    """On a new worker, and what more of it."""
    image = world.images.busybox()
    with world.fresh_worker("bench", release=release, arguments=arguments) as worker:
        containerd = worker.containerd
        require_rows(world, containerd, image)
        # What was there before stays.
        containerd.ctr("--namespace", NAMESPACE, "images", "pull", "--plain-http", "--snapshotter", "overlayfs", image)
        said = bench(containerd, image).must_fail()
        require("--namespace" in said and "is not empty" in said, f"a namespace with an image: {said}")
        require_equal("images", listed(containerd, "images", "ls", "--quiet"), [image])
        containerd.ctr("--namespace", NAMESPACE, "images", "rm", "--sync", image)
        # One row that cannot be had is no end of the others, and leaves nothing, either.
        done = bench(containerd, image, "--only", "prepare,run", "--shell", "/nonexistent")
        require_equal("without the shell", done.code, NOT_RUN)
        require("NOT RUN  run-overlayfs: " in done.output and "/nonexistent" in done.output, done.text)
        require("NOT RUN  prepare" not in done.output, done.text)
        require_empty(containerd)
        require_interrupted(containerd, image)
        if more:
            more(world, worker, image)


@scenario("bench: slackwater-bench docker measures Docker 29 beside another one on overlayfs", 600, newer=True)
def dockers(world):
    image = world.images.busybox()
    with (world.fresh_worker("bench-29", release=NEWER_DOCKER) as worker, docker_29(world, "bench-other") as other,
          world.fresh_worker("bench-29-holder", release=NEWER_DOCKER) as holder):
        found = world.scratch / "bench-29.json"
        program = pathlib.Path(os.environ["SLACKWATERD"]).with_name("slackwater-bench")
        call = [
            program, "docker", "--docker", worker.docker.client, "--docker-host", f"unix://{worker.docker.socket}",
            "--image", image, "--rounds", 1, "--at-once", 3, "--run-argument=--network=none",
            "--build-argument=--network=none",
        ]
        same = attempt([*map(str, call), "--rival", f"same=unix://{worker.docker.socket}"]).must_fail()
        require("is the same Docker" in same, f"compared with itself: {same}")
        call += ["--rival", f"overlayfs=unix://{other.socket}", "--json", found]
        said = attempt([str(word) for word in (*call, "--only", "deploy")]).must_fail()
        require("needs --holder" in said, f"without another worker: {said}")
        holding = [str(word) for word in (*call, "--holder", f"unix://{holder.docker.socket}")]
        attempt(holding, limit_seconds=LIMIT_SECONDS).must_succeed()
        rows = {row["key"]: row for row in json.loads(found.read_text("utf-8"))["rows"]}
        require_equal("rows", list(rows), [f"{key}-overlayfs" for key in DOCKER_ROWS])
        for key, row in rows.items():
            samples = row["samples"] + row["rival_samples"]
            require(len(samples) == 2 and min(samples) > 0, f"{key}: {row}")
        require_none_left((worker.docker, other, holder.docker))
        # What was there before stays.
        other("pull", image)
        done = attempt([str(word) for word in (*call, "--only", "pull,run")], limit_seconds=LIMIT_SECONDS)
        require_equal("with the image there", done.code, NOT_RUN)
        require("NOT RUN  pull-overlayfs: " in done.output and "NOT RUN  run" not in done.output, done.text)
        require(other("image", "ls", "--quiet", image), "an image that was there before is gone")
        other("image", "rm", image)
        stopped_in_the_middle([str(word) for word in (*call, "--only", "run")], (worker.docker, other))
        done = attempt([str(word) for word in (*call, "--only", "run,build-1", "--shell", "/nonexistent")],
                       limit_seconds=LIMIT_SECONDS)
        require_equal("without the shell", done.code, NOT_RUN)
        require("NOT RUN  run-overlayfs: " in done.output and "/nonexistent" in done.output, done.text)
        require_none_left((worker.docker, other))


@scenario("bench: slackwater-bench containers measures containerd 1.6 and leaves nothing", 600)
def debian(world):
    require_all(world, DEBIAN)


@scenario("bench: slackwater-bench containers measures containerd 2.4, with layers as images", 600, newer=True)
def newer(world):
    require_all(world, NEWER_AS_PRINTED, ("--layers", "images"), require_deploy)

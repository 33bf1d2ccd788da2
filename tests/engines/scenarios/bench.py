"""`slackwater-bench containers` on a containerd: every row is there, and nothing is left. How fast is what, no test
says."""

import json
import os
import pathlib

from process import attempt
from releases import DEBIAN, NEWER_AS_PRINTED
from scenario import require, require_equal, scenario

NAMESPACE = "slackwater-bench"
# All but the memory, for which the whole machine has to read its files again.
ROWS = ("pull", "prepare", "run", "at-once", "diff-fresh", "diff-written")


def bench(containerd, image, *words):
    """Runs it; its outcome."""
    program = pathlib.Path(os.environ["SLACKWATERD"]).with_name("slackwater-bench")
    return attempt([
        program, "containers", "--ctr", containerd.program, "--address", containerd.socket, "--image", image,
        "--plain-http", "--rounds", "1", "--at-once", "3", "--run-argument=--cgroup",
        f"--run-argument={containerd.group_of('{}')}", *words,
    ], limit_seconds=300)


def require_empty(containerd):
    """Fails if something is left in the bench's namespace."""
    for what in ("images", "containers"):
        left = containerd.ctr("--namespace", NAMESPACE, what, "ls", "--quiet")
        require_equal(f"{what} that are left", left, "")


def require_measured(world, release, arguments=()):
    """Runs it on a new worker, and reads what it found."""
    image, found = world.images.busybox(), world.scratch / f"bench-{release.title}.json"
    with world.fresh_worker("bench", release=release, arguments=arguments) as worker:
        containerd = worker.containerd
        done = bench(containerd, image, "--only", ",".join(ROWS), "--json", found)
        done.must_succeed()
        rows = {row["key"]: row for row in json.loads(found.read_text("utf-8"))["rows"]}
        require_equal("rows", list(rows), [f"{key}-overlayfs" for key in ROWS])
        for key, row in rows.items():
            samples = row["samples"] + row["rival_samples"]
            require(len(samples) == 2 and min(samples) > 0, f"{key}: {row}")
            require(row["work"] in done.output, f"{key} is not in the table: {done.output}")
        require_empty(containerd)
        # What was there before stays.
        containerd.ctr("--namespace", NAMESPACE, "images", "pull", "--plain-http", "--snapshotter", "overlayfs", image)
        said = bench(containerd, image).must_fail()
        require("--namespace" in said and image in said, f"a namespace with an image: {said}")
        kept = containerd.ctr("--namespace", NAMESPACE, "images", "ls", "--quiet").split()
        require_equal("images", kept, [image])
        containerd.ctr("--namespace", NAMESPACE, "images", "rm", "--sync", image)
        # One that fails in the middle leaves nothing, either.
        said = bench(containerd, image, "--only", "run", "--shell", "/nonexistent").must_fail()
        require("/nonexistent" in said, f"a shell that there is not: {said}")
        require_empty(containerd)


@scenario("bench: slackwater-bench containers measures containerd 1.6 and leaves nothing", 300)
def debian(world):
    require_measured(world, DEBIAN)


@scenario("bench: slackwater-bench containers measures containerd 2.4, with layers as images", 300, newer=True)
def newer(world):
    require_measured(world, NEWER_AS_PRINTED, ("--layers", "images"))

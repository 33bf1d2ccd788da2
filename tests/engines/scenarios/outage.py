"""The appliance is away for 20 s: running containers wait, new pulls say who is missing."""

import time

from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario
from scenarios.restart import require_goes_on, start_writer, whole_log

AWAY_SECONDS = 20
# dockerd and the driver may try again for a while before they give up.
PULL_LIMIT_SECONDS = 90


def new_pull(world, worker, image, must_name):
    """A pull while the appliance is away."""
    outcome = worker.docker.attempt("pull", image, limit_seconds=PULL_LIMIT_SECONDS)
    if outcome.code == 0 and not must_name:
        return "the pull waited"
    said = outcome.must_fail()
    server = world.server()
    require("appliance" in said and server.url in said,
            f"the pull does not name the appliance at {server.url}: {said}")
    require(not worker.docker("image", "ls", "--quiet", image), "a failed pull left an image")
    return said.strip().splitlines()[-1][:160]


@scenario(f"outage: the appliance is killed for {AWAY_SECONDS} s", 300, also=(NEWER_FOR_ALL,))
def killed(world):
    worker, image = world.worker("a"), world.images.layered()
    start_writer(worker.docker, image, "writer")
    missing, server = world.images.debian(), world.server()
    server.kill()
    try:
        started = time.monotonic()
        said = new_pull(world, worker, missing, must_name=True)
        time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - started)))
    finally:
        server.start()
    require_goes_on(worker.docker, "writer")
    require_equal("a new container", worker.docker.run(image, "cat", "/one/file"), "one")
    worker.docker("pull", missing, limit_seconds=250)
    whole_log(worker.docker, "writer")
    return said


@scenario(f"outage: the appliance stops to answer for {AWAY_SECONDS} s", 300, also=(NEWER_FOR_ALL,))
def paused(world):
    worker, image = world.worker("a"), world.images.layered()
    start_writer(worker.docker, image, "writer")
    server = world.server()
    server.pause()
    try:
        time.sleep(AWAY_SECONDS)
    finally:
        server.resume()
    require_goes_on(worker.docker, "writer")
    require_equal("a new container", worker.docker.run(image, "cat", "/one/file"), "one")
    whole_log(worker.docker, "writer")

"""A worker is known by its credential: one that was revoked pulls nothing more, and may come back.

All other scenarios run with workers that joined as well.
"""

import re

from releases import NEWER_FOR_ALL
from scenario import require, require_equal, scenario


def listed(server):
    """The workers that the appliance has, by name."""
    return {worker["name"]: worker for worker in server.call("GET", "/v1/workers")["workers"]}


WRITE = ("dd", "if=/dev/zero", "of=/new", "bs=4096", "count=1", "conv=fsync")


@scenario("identity: a revoked worker pulls and writes nothing, and does again once it has joined again", 120,
          also=(NEWER_FOR_ALL,))
def revoked(world):
    server, first, other = world.server(), world.images.busybox(), world.images.layered()
    with world.fresh_worker("revoked", server) as worker:
        worker.docker("pull", first)
        known = listed(server)[worker.known_as]
        require_equal("id", known["worker_id"], worker.driver.control("GET", "/status")["worker_id"])
        require(known["last_seen_at"], f"the worker was not seen: {known}")
        worker.docker.run_detached(first, "sleep", "1000", options=("--name", "cut"))
        worker.docker("exec", "cut", *WRITE)
        server.revoke(worker.known_as)
        said = worker.docker.attempt("pull", other).must_fail()
        require("revoked" in said and "slackwater worker add" in said,
                f"the pull does not say what is to be done: {said}")
        require_equal("images", worker.docker("image", "ls", "--quiet", other), "")
        # Its containers have lost their disks, which are the appliance's.
        refused = worker.docker.attempt("exec", "cut", *WRITE).must_fail()
        require(re.search("I/O error|Input/output error|Read-only file system", refused, re.I),
                f"the container still writes: {refused}")
        # The daemon goes on with the new credential as it is.
        worker.join(known["worker_id"])
        worker.docker("pull", other)
        started = worker.docker.attempt("run", "--rm", "--network", "none", other, "true")
        if world.release.has_docker and started.code != 0:
            # What was written while it was refused is lost; the first commit of a layer on that disk may find that.
            require(re.search("is lost|has lost writes", started.text), f"a container: {started.text}")
        require_equal("a container", worker.docker.run(other, "cat", "/one/file"), "one")
        worker.docker("rm", "--force", "cut")
        worker.docker.run(first, *WRITE)
    return said.strip().splitlines()[-1][:200]

"""A Docker 29 without the driver: on a containerd of its own, whose overlayfs has its images."""

import contextlib
import dataclasses
import json

from engine import Containerd, Docker
from releases import NEWER_DOCKER


@contextlib.contextmanager
def docker_29(world, name):
    """It runs for as long as the block, in a directory of that name."""
    directory = world.scratch / name
    directory.mkdir()
    plain = dataclasses.replace(NEWER_DOCKER, _printed="", _snapshotter="")
    containerd = Containerd(directory, name, world.scratch.name, None, plain)
    # Debian's runc knows no namespaces of time.
    settings = json.dumps({"features": {"containerd-snapshotter": True, "time-namespaces": False}})
    docker = Docker(directory, name, "overlayfs", containerd, world.scratch.name, NEWER_DOCKER, settings)
    try:
        containerd.start()
        docker.start()
        yield docker
        docker.clear()
    finally:
        docker.process.stop()
        containerd.process.stop()

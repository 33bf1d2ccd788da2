"""Private images as most registries have them: by TLS with an authority of their own, for those with a password."""

import base64
import contextlib
import json
import os

from ports import held_port
from registry import PASSWORD, USER, PasswordRegistry
from releases import NEWER_WITH_SOURCES
from scenario import require, require_equal, scenario
from scenarios.hostile import Genuine, chain_id, digest

REPOSITORY = "locked/app"
HELPER = "slackwater-test"
# What a driver says where the registry refuses.
NOT_SHOWN = "the registry does not let this worker read the blob"


def credentials(directory, name, text):
    """A file of credentials for the driver."""
    path = directory / f"{name}.json"
    path.write_text(json.dumps(text))
    path.chmod(0o600)
    return ("--registry-credentials", path)


def by_password(directory, name, host, password):
    """What `docker login` writes on a machine without a store of its own."""
    pair = base64.b64encode(f"{USER}:{password}".encode()).decode()
    return credentials(directory, name, {"auths": {host: {"auth": pair}}})


def by_helper(directory, host):
    """A program that is asked for the password (docker-credential-helpers); and how the driver finds it."""
    programs = directory / "programs"
    programs.mkdir()
    helper = programs / f"docker-credential-{HELPER}"
    said = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\n[ \"$1\" = get ] && [ \"$(cat)\" = {host} ] && echo '{said}'\n")
    helper.chmod(0o700)
    found = ("env", f"PATH={programs}:{os.environ['PATH']}")
    return credentials(directory, "helper", {"credHelpers": {host: HELPER}}), found


@contextlib.contextmanager
def password_registry(world):
    """The registry, which ends with the scenario."""
    registry = PasswordRegistry(world.scratch / "password-registry", world.registry, held_port)
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()


def fetch(worker, registry, image):
    """Pulls as one who has the password; the digests of the blobs that were fetched."""
    containerd, position = worker.containerd, registry.position()
    containerd.ctr("images", "pull", "--snapshotter", containerd.snapshotter, "--hosts-dir", registry.hosts(),
                   "--user", f"{USER}:{PASSWORD}", image)
    return registry.blobs_fetched(position)


def log_of(worker):
    """What its driver said."""
    return worker.driver.process.log_path.read_text("utf-8", "replace")


@scenario("hostile: a registry with passwords and a certificate of its own authority is asked as it wants", 300,
          newer=True)
def password(world):
    server = world.server("password-appliance")
    genuine = Genuine(world, REPOSITORY)
    all_layers = {digest(layer) for layer in genuine.layers}
    with password_registry(world) as registry:
        directory = world.scratch / "password-registry"
        image = f"{registry.host}/{genuine.full_name.split('/', 1)[1]}"
        listing = ("--private-registries", registry.host)
        trust = ("--registry-ca", registry.authority)
        right = by_password(directory, "right", registry.host, PASSWORD)
        helped, found = by_helper(directory, registry.host)

        @contextlib.contextmanager
        def pulled(name, *arguments, wrapper=()):
            """A worker that has pulled, and the layers that it fetched; it keeps them until it ends."""
            with world.fresh_worker(name, server, wrapper, NEWER_WITH_SOURCES, (*listing, *arguments)) as worker:
                fetched = fetch(worker, registry, image) & all_layers
                require_equal("the last layer's file", worker.containerd.run(image, "whole", "cat", "/etc/last"),
                              genuine.last)
                yield worker, fetched

        with pulled("owner", *trust, *right) as (_, first):
            require_equal("fetched first", first, all_layers)
            for count, layer in enumerate(genuine.layers, 1):
                chain, blob = chain_id(genuine.layers[:count]), f"{registry.host}/{REPOSITORY}@{digest(layer)}"
                known = next((item for item in server.listing("snapshots") if chain in item.get("chains", {})), {})
                require_equal("for whom a layer is", known.get("restricted_chains"), {chain: [blob]})
            with pulled("reader", *trust, *right) as (_, fetched):
                require_equal("fetched with a password", fetched, set())
            with pulled("helped", *trust, *helped, wrapper=found) as (_, fetched):
                require_equal("fetched with a helper", fetched, set())
            wrong = by_password(directory, "wrong", registry.host, f"no {PASSWORD}")
            for name, arguments, said in (
                ("stranger", trust, NOT_SHOWN),
                ("mistaken", (*trust, *wrong), NOT_SHOWN),
                ("distrustful", right, "registry-ca"),
            ):
                with pulled(name, *arguments) as (worker, fetched):
                    require_equal(f"fetched by the {name}", fetched, all_layers)
                    log = log_of(worker)
                    require(said in log, f"the log of the {name} does not say {said!r}: {log[-2000:]}")

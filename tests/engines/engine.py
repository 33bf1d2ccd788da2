"""The engines: a dockerd and a containerd with roots and sockets of their own."""

import itertools
import json
import os
import pathlib
import re
import subprocess

import newer
from process import Process, attempt, environment, run
from releases import DEBIAN
from scenario import PATIENCE, Failure, require, require_equal, wait_until

START_LIMIT_SECONDS = 60
RECONNECT_LIMIT_SECONDS = 20
# Debian's client goes with Debian's daemon; a newer one may be first on the path.
CLIENTS = ("/usr/bin/docker", "docker")
CONTAINER_ID = re.compile("[0-9a-f]{64}")
# What dockerd 29 logs where it closed the pipe of a container that had ended, and had not begun to read it. The log is
# written before the client is answered.
LOST_OUTPUT = "copy stream failed"
RUN_ATTEMPTS = 3
# The name of the proxy plugin in containerd's configuration.
SNAPSHOTTER = "slackwater"


class Containerd:
    """A containerd; with a driver's socket, its snapshotter is the driver."""

    def __init__(self, directory, name, control_group, driver_socket=None, release=DEBIAN, driver_arguments=()):
        self._control_group = control_group
        self._release = release
        self._ran = itertools.count(1)
        self.directory = directory / "containerd"
        self.directory.mkdir(parents=True)
        self.socket = directory / "containerd.sock"
        self.snapshotter = SNAPSHOTTER if driver_socket else "overlayfs"
        # Where CRI puts its images.
        self.namespace = "k8s.io"
        configuration = self.directory / "config.toml"
        configuration.write_text(release.configuration(
            driver_socket, driver_arguments, root=self.directory / "root", state=self.directory / "state",
            socket=self.socket, snapshotter=self.snapshotter,
        ))
        self.process = Process(
            f"{release.title} {name}", [release.program("containerd"), "--config", configuration],
            directory / "containerd.log",
        )

    def start(self):
        """Starts it and returns when it answers, and CRI as well, which begins after the rest."""
        self.process.start(self._release.settings)
        self.process.wait_ready(
            START_LIMIT_SECONDS, lambda: self.attempt("version", limit_seconds=10).code == 0
        )
        said, wanted = self.ctr("version"), self._release.version
        versions = re.findall(r"^\s*Version:\s*(\S+)", said, re.MULTILINE)
        are_wanted = len(versions) == 2 and all(version.startswith(wanted) for version in versions)
        require(are_wanted, f"expected client and server {wanted}, got {said}")
        # The request is empty.
        self.process.wait_ready(START_LIMIT_SECONDS, lambda: not self.cri("RuntimeService/Status", b"", 10))

    def wait_connected(self):
        """Returns once it reaches its snapshotter again: after a restart of that, the connection's
        back-off refuses calls for up to three seconds, and none is tried again."""
        wait_until("containerd reaches its snapshotter", RECONNECT_LIMIT_SECONDS, lambda:
                   self.attempt("snapshots", "--snapshotter", self.snapshotter, "list").code == 0)

    @property
    def program(self):
        """ctr."""
        return self._release.program("ctr")

    def group_of(self, name):
        """The control group of a container."""
        return f"/{self._control_group}/{name}"

    def attempt(self, *words, **options):
        """Runs ctr, however it ends."""
        return attempt(
            [self.program, "--address", self.socket, "--namespace", self.namespace, *words], **options
        )

    def ctr(self, *words, **options):
        """Runs ctr, which has to succeed; returns its output."""
        return self.attempt(*words, **options).must_succeed()

    def snapshots(self, *words, **options):
        """`ctr snapshots` with this containerd's snapshotter."""
        return self.ctr("snapshots", "--snapshotter", self.snapshotter, *words, **options)

    def view(self, key, parent):
        """A view that stays until it is removed: ctr makes one that the garbage collector may take at once."""
        def make():
            self.snapshots("view", key, parent)
            return self.attempt("snapshots", "--snapshotter", self.snapshotter, "label", key,
                                "containerd.io/gc.root=test").code == 0
        wait_until(f"the view {key} is kept", RECONNECT_LIMIT_SECONDS, make)

    def run_words(self, option, image, name, *words):
        """What ctr has to be told for a new container; the option is --rm or --detach."""
        return ("run", option, "--snapshotter", self.snapshotter,
                "--cgroup", self.group_of(name), image, name, *words)

    def run(self, image, name, *words):
        """The command `words` in a new container, which is removed; what it printed, also on its standard error. The id
        is new each time: containerd removes what it has below an id some moments after it has said that the container
        is gone. The container's shim writes the output to a file: on a busy machine `ctr` may end before it has begun
        to read it (containerd, `client/task.go`, "io.Cancel")."""
        name = f"{name}-{self.directory.parent.name}-{next(self._ran)}"
        output = self.directory / f"{name}.output"
        command, *more = self.run_words("--rm", image, name, *words)
        try:
            self.ctr(command, "--log-uri", f"file://{output}", *more)
            return output.read_text("utf-8", "replace")
        finally:
            output.unlink(missing_ok=True)

    def pull_through_cri(self, image, limit_seconds=300):
        """What the kubelet does: CRI's PullImage, by hand, as ctr's own pull of 1.6 passes the
        unpacker by. Returns the empty text, or the error's."""
        # PullImageRequest.image (field 1) is an ImageSpec whose image (field 1) is the name.
        name = image.encode()
        require(len(name) < 120, "the lengths below are of one byte")
        spec = b"\x0a" + bytes([len(name)]) + name
        return self.cri("ImageService/PullImage", b"\x0a" + bytes([len(spec)]) + spec, limit_seconds)

    def cri(self, method, message, limit_seconds):
        """A call of CRI with an encoded request. Returns the empty text, or the error's."""
        limit_seconds *= PATIENCE
        body = b"\0" + len(message).to_bytes(4, "big") + message
        done = subprocess.run(
            ["curl", "--silent", "--show-error", "--http2-prior-knowledge", "--unix-socket",
             str(self.socket), "--max-time", str(limit_seconds), "--dump-header", "/dev/stdout",
             "--output", "/dev/null", "--header", "content-type: application/grpc",
             "--header", "te: trailers", "--data-binary", "@-",
             f"http://localhost/runtime.v1.{method}"],
            input=body, capture_output=True, check=False, timeout=limit_seconds + 10,
            env=environment(),
        )
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        status = re.search(r"^grpc-status: *(\d+)", said, re.MULTILINE | re.IGNORECASE)
        if status and status[1] == "0":
            return ""
        return said.strip()

    def must_pull_through_cri(self, image, **options):
        """As above; fails if it does."""
        trouble = self.pull_through_cri(image, **options)
        require(not trouble, f"CRI could not pull {image}: {trouble}")

    def clear(self):
        """Removes containers, images, snapshots of hand and leases of every namespace."""
        kept = self.namespace
        for namespace in self.ctr("namespaces", "list", "-q").split():
            # Docker's own business.
            if namespace == "moby":
                continue
            self.namespace = namespace
            for task in self.ctr("tasks", "list", "-q").split():
                self.attempt("tasks", "kill", "--signal", "SIGKILL", task)
                self.attempt("tasks", "delete", "--force", task)
            for container in self.ctr("containers", "list", "-q").split():
                self.ctr("containers", "delete", container)
            self.clear_snapshots()
            for lease in self.ctr("leases", "list", "-q").split():
                self.ctr("leases", "delete", "--sync", lease)
            images = self.ctr("images", "list", "-q").split()
            if images:
                self.ctr("images", "remove", "--sync", *images)
        self.namespace = kept
        # containerd tells its snapshotters what was removed when it collects garbage. The end of a lease waits for that.
        self.ctr("leases", "create", "--id", "cleared")
        self.ctr("leases", "delete", "--sync", "cleared")

    def clear_snapshots(self):
        """Removes the snapshots that ctr made and that no image needs, children first."""
        while True:
            names = [
                line.split()[0] for line in self.snapshots("list").splitlines()[1:]
                if line and not line.startswith("sha256:")
            ]
            removed = [
                name for name in reversed(names)
                if self.attempt("snapshots", "--snapshotter", self.snapshotter, "remove",
                                name).code == 0
            ]
            if not removed:
                return


class Docker:
    """A dockerd with the given storage driver, on a containerd of the test's; a newer one by its configuration."""

    def __init__(self, directory, name, storage, containerd, control_group, release=DEBIAN, configuration=None):
        self._release = release
        self._containerd = containerd
        self.directory = directory / "docker"
        self.directory.mkdir(parents=True)
        self.socket = directory / "docker.sock"
        self.storage = storage
        self.client = next(
            client for client in CLIENTS if "/" not in client or os.access(client, os.X_OK)
        )
        file = self.directory / "daemon.json"
        file.write_text(configuration or "{}")
        # dockerd 29 does not start without a docker-proxy, unless it is not asked to have one.
        own = ["--userland-proxy=false"] if configuration else ["--experimental", "--storage-driver", storage]
        self._settings = {
            "DOCKER_HOST": f"unix://{self.socket}",
            # No credential helpers, no contexts.
            "DOCKER_CONFIG": str(self.directory / "client"),
        }
        self.process = Process(
            f"dockerd {name}",
            [release.program("dockerd"), *own, "--log-level", "warn", "--config-file", file,
             "--data-root", self.directory / "root", "--exec-root", self.directory / "run",
             "--pidfile", self.directory / "pid", "--host", f"unix://{self.socket}",
             "--containerd", containerd.socket, "--bridge=none", "--iptables=false",
             "--ip6tables=false", "--cgroup-parent", f"/{control_group}"],
            directory / "docker.log",
        )

    def start(self):
        """Starts it and returns when it answers."""
        self.process.start(self._release.settings)
        self.process.wait_ready(
            START_LIMIT_SECONDS,
            lambda: self.attempt("info", "--format", "{{.Driver}}", limit_seconds=10).output.strip()
            == self.storage,
        )
        if self._release.has_docker:
            got = self("version", "--format", "{{.Server.Version}}")
            require_equal("version of dockerd", got, newer.DOCKERD.version)

    def attempt(self, *words, settings=None, **options):
        """Runs the client, however it ends."""
        return attempt(
            [self.client, *words], settings={**self._settings, **(settings or {})}, **options
        )

    def begin(self, *words):
        """Starts the client and does not wait for it."""
        return subprocess.Popen(
            [self.client, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=environment(**self._settings),
        )

    def __call__(self, *words, **options):
        """Runs the client, which has to succeed; returns its output without the last newline."""
        return self.attempt(*words, **options).must_succeed().rstrip("\n")

    def run(self, image, *words, options=(), limit_seconds=300):
        """The command `words` in a new container, which is removed; its output. On a busy machine dockerd can lose that of a
        container which ends at once, and says so in its log: then it runs once more."""
        for _ in range(RUN_ATTEMPTS):
            position = self.process.log_position()
            output = self("run", "--rm", "--network", "none", *options, image, *words, limit_seconds=limit_seconds)
            if output or LOST_OUTPUT not in self.process.log_since(position):
                return output
        raise Failure(f"dockerd lost the output of {words} {RUN_ATTEMPTS} times: {self.process.log_path}")

    def run_detached(self, image, *words, options=()):
        """Starts a container; its id."""
        return self("run", "--detach", "--network", "none", *options, image, *words)

    def inspect(self, name, template):
        """`docker inspect`."""
        return self("inspect", "--format", template, name)

    def inspect_json(self, name):
        """`docker inspect`, all of it."""
        return json.loads(self("inspect", name))[0]

    def root(self, container):
        """The root of a running container, as seen from here."""
        pid = int(self.inspect(container, "{{.State.Pid}}"))
        if pid == 0:
            raise Failure(f"container {container} does not run: {self('logs', container)}")
        return pathlib.Path(f"/proc/{pid}/root")

    def build(self, context, tag, buildkit):
        """`docker build` with one of the two builders."""
        return self(
            "build", "--network", "none", "--tag", tag, str(context), limit_seconds=400,
            settings={"DOCKER_BUILDKIT": "1" if buildkit else "0", "BUILDKIT_PROGRESS": "plain"},
        )

    def clear(self):
        """Removes all containers, images and build caches."""
        containers = self("ps", "--all", "--quiet").split()
        if containers:
            self("rm", "--force", "--volumes", *containers)
        self.attempt("builder", "prune", "--all", "--force")
        images = self("image", "ls", "--all", "--quiet", "--no-trunc").split()
        while images:
            # With --force all names of an image go; its parents may have gone with it.
            self.attempt("image", "rm", "--force", *sorted(set(images)))
            left = self("image", "ls", "--all", "--quiet", "--no-trunc").split()
            require(len(left) < len(images), f"images that cannot be removed: {left}")
            images = left
        if self._release.has_docker:
            self._end_leases()

    def _end_leases(self):
        """Ends the leases of containers that are no more. dockerd leaves that of one which it could not make, as when the
        driver was killed, and with it the snapshots (moby, `daemon/containerd/image_snapshot.go`)."""
        leases = ("--namespace", "moby", "leases")
        for lease in self._containerd.ctr(*leases, "list", "-q").split():
            if CONTAINER_ID.fullmatch(lease):
                self._containerd.ctr(*leases, "delete", "--sync", lease)

"""The driver under test: a slackwater-driver process, its control socket, and what it leaves."""

import http.client
import json
import re
import socket

from process import Process, attempt, processes
from scenario import PATIENCE, Failure, require

START_LIMIT_SECONDS = 60
# A reconcile walks the state and the appliance's lists.
CONTROL_LIMIT_SECONDS = 120
CACHE = "2GiB"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=CONTROL_LIMIT_SECONDS * PATIENCE)
        self._path = path

    def connect(self):
        """Connects to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Driver:
    """One worker's driver."""

    def __init__(self, program, directory, name, api_url, nfs_address, plugin, wrapper=(),
                 arguments=()):
        self._program = program
        self.api_url, self.nfs_address = api_url, nfs_address
        self.state = directory / "state"
        self.cache = directory / "cache"
        self.docker_socket = f"/run/docker/plugins/{plugin}.sock"
        self.containerd_socket = directory / "snapshots.sock"
        self.process = Process(
            f"slackwater-driver {name}",
            [*wrapper, program, "--api", api_url, "--nfs", nfs_address, "--state-dir", self.state,
             "--cache-dir", self.cache, "--docker-socket", self.docker_socket,
             "--docker-api", directory / "docker.sock",
             "--containerd-socket", self.containerd_socket,
             "--containerd-api", directory / "containerd.sock", "--attach", "fuse",
             "--cache-size", CACHE, *arguments, "run"],
            directory / "driver.log",
        )

    def start(self):
        """Starts it and returns when it says that it serves."""
        position = self.process.log_position()
        self.process.start()
        self.process.wait_ready(
            START_LIMIT_SECONDS,
            lambda: any(line.strip() == "ready"
                        for line in self.process.log_since(position).splitlines()),
        )

    def join(self, join_token):
        """Joins the appliance."""
        self.attempt(
            "join", "--api", self.api_url, "--state-dir", self.state,
            input_bytes=f"{join_token}\n".encode(),
        ).must_succeed()

    def restart(self, kill):
        """Ends it, with or without warning, and starts it again."""
        if kill:
            self.process.kill()
        else:
            code = self.process.stop()
            require(code == 0, f"{self.process.title} ended with {code} after SIGTERM")
        self.start()

    def control(self, method, path, body=None):
        """A call on the control socket; the JSON of its answer."""
        data = self._ask(method, path, body)
        return json.loads(data) if data else None

    def calls(self, name):
        """How often containerd has called this."""
        counts = re.compile(rf'_call_seconds_count\{{engine="containerd",call="{name}"\}} ([0-9]+)')
        found = counts.search(self._ask("GET", "/metrics"))
        return int(found[1]) if found else 0

    def _ask(self, method, path, body=None):
        connection = UnixConnection(self.state / "control.sock")
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if answer.status >= 300:
            raise Failure(f"{method} {path} on the control socket: {answer.status} {data}")
        return data

    def attempt(self, *words, **options):
        """Runs one of the driver's commands, however it ends."""
        return attempt([self._program, *words], limit_seconds=300, **options)

    def image(self, *words):
        """Makes images with the driver's command, which has to succeed; it talks to this driver."""
        return self.attempt("--state-dir", self.state, "image", *words).must_succeed()

    def servers(self):
        """The ids of the FUSE processes that serve (not of those that keep), of this worker."""
        return [
            pid for pid, words in processes().items()
            if "serve-export" in words and "--keep" not in words
            and str(self.state) in words
        ]

    def mounts(self):
        """Mount points below the state directory."""
        points = []
        with open("/proc/self/mountinfo", encoding="utf-8") as table:
            for line in table:
                point = line.split()[4]
                if point.startswith(f"{self.state}/"):
                    points.append(point)
        return points

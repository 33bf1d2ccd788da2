"""The appliance under test: a slackwaterd process on loopback ports of its own, and its REST face.

Invariants: the ports stay the same for the whole run, so that a mount outlives a restart, and no other
program gets them while the server is down; only the process that was started here is ended, by its id;
it does not outlive the test.
"""

import copy
import json
import os
import pathlib
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

from ports import held_port

# What df has to report in the guest; far more than the scenarios write.
CAPACITY, CAPACITY_BYTES = "8GiB", 8 << 30
# A start after SIGKILL replays the log: seconds at most, with room for a machine that is five times
# slower and busy. No promise is in these: beyond them the server hangs.
START_LIMIT_SECONDS = 300
STOP_LIMIT_SECONDS = 150
REQUEST_LIMIT_SECONDS = 300
# What the command behind it is killed by when the process that started it is gone, however that ended.
LEASH = ("setpriv", "--pdeathsig", "KILL", "--")


class ApplianceError(Exception):
    """The server did not start, stop or answer as it has to."""


def _environment():
    """The caller's environment without settings of ours: the command line alone has these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLACKWATER")}


def file_route(path):
    """The route of a file: its path is one segment, slashes written as %2F."""
    return "/v1/files/" + urllib.parse.quote(path, safe="")


class Appliance:
    """One data directory and the server process that owns it."""

    def __init__(self, program, data_dir, log_path, client="127.0.0.0/8:rw",
                 squash="no_root_squash", capacity=CAPACITY, token=None, authority=None):
        self._program = program
        self._data_dir = data_dir
        self.log_path = log_path
        self._access = ["--nfs-client", client, "--squash", squash]
        self._capacity = capacity
        self.nfs_port = held_port()
        self.api_port = held_port()
        # Who calls REST by another name than that of loopback needs one.
        self._token = token
        # Of this appliance alone: it reads the file again when it changes.
        self._token_file = log_path.with_suffix(".tokens")
        self._process = None
        # Whatever the machine's settings say: it is on loopback, and its token goes nowhere else.
        handlers = [urllib.request.ProxyHandler({})]
        # REST speaks TLS where the server is started with a certificate; this authority's, then.
        self._scheme = "http" if authority is None else "https"
        if authority is not None:
            context = ssl.create_default_context(cafile=authority)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._rest = urllib.request.build_opener(*handlers)

    def start(self, *arguments):
        """Starts the server, with more arguments if they are given, and returns when it serves."""
        command = [
            *LEASH, self._program, "--data-dir", str(self._data_dir),
            "--nfs-listen", f"127.0.0.1:{self.nfs_port}",
            "--api-listen", f"127.0.0.1:{self.api_port}",
            "--capacity", self._capacity, *self._access, *arguments,
        ]
        if self._token is not None:
            self._token_file.touch(mode=0o600)
            self._token_file.write_text(f"test admin {self._token}\n")
            command += ["--token-file", str(self._token_file)]
        with self.log_path.open("a") as log:
            log.write(f"--- start: {' '.join(command)}\n")
            log.flush()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment()
            )
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while True:
            if self._process.poll() is not None:
                raise ApplianceError(f"slackwaterd ended with {self._process.returncode} at start")
            try:
                self.request("GET", "/readyz")
                return
            except (OSError, ApplianceError) as error:
                if time.monotonic() > deadline:
                    raise ApplianceError(f"slackwaterd is not ready: {error}") from error
                time.sleep(0.05)

    def is_running(self):
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def kill(self):
        """Ends the server without warning, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self):
        """Asks the server to end; it has to end cleanly."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ApplianceError(f"no end within {STOP_LIMIT_SECONDS} s of SIGTERM") from None
        self._process = None
        if code != 0:
            raise ApplianceError(f"slackwaterd ended with {code} after SIGTERM")

    def aside(self):
        """The same data directory behind other ports, where no client of this run connects.
        Only for a time in which this one is stopped: a directory has one owner."""
        return Appliance(self._program, self._data_dir, self.log_path, token=self._token)

    def another(self, data_dir, **access):
        """A second appliance with a data directory and rules of its own."""
        return Appliance(self._program, data_dir, self.log_path, token=self._token, **access)

    def introduction(self):
        """The script by which a guest knows this appliance: its ports, and the token."""
        return (
            f"printf 'nfs_port=%s\\napi_port=%s\\n' {self.nfs_port} {self.api_port} >/run/appliance\n"
            f"(umask 077; echo {self._token} >/run/token; "
            f"echo 'Authorization: Bearer {self._token}' >/run/authorization)"
        )

    def for_bearer(self, token):
        """The same server, as it answers those who show this token."""
        other = copy.copy(self)
        other._token = token
        return other

    def request(self, method, path, body=None, content_type="application/octet-stream"):
        """One REST call; returns the bytes of its answer."""
        headers = {"Content-Type": content_type}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(
            f"{self._scheme}://127.0.0.1:{self.api_port}{path}", method=method, data=body, headers=headers
        )
        try:
            with self._rest.open(request, timeout=REQUEST_LIMIT_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode("utf-8", "replace")
            raise ApplianceError(f"{method} {path}: {error.code} {detail}") from error

    def call(self, method, path, body=None):
        """One REST call with JSON for body and answer; None for an answer without body."""
        data = None if body is None else json.dumps(body).encode()
        answer = self.request(method, path, data, "application/json")
        return json.loads(answer) if answer else None

    def file(self, path):
        """What REST says of a file."""
        return self.call("GET", file_route(path))

    def snapshot(self, path):
        """Takes a snapshot and returns its id."""
        return self.call("POST", "/v1/snapshots", {"path": path})["id"]

    def clone(self, snapshot_id, path):
        """Makes a clone."""
        return self.call("POST", "/v1/clones", {"snapshot_id": snapshot_id, "path": path})

    def let_in(self, secret):
        """Has the token `other` have this secret, until the next start: the file is read again."""
        self._token_file.write_text(f"test admin {self._token}\nother worker {secret}\n")

    def mount_path(self):
        """A path by which the export is mounted, a secret one."""
        return self.call("POST", "/v1/mount-paths")["path"]

    def printed(self, command):
        """What a command that the server printed answers, as pasted into a shell with the token."""
        # Where a `slackwater` is installed, the server prints its bare name.
        ours = f"{pathlib.Path(os.environ['SLACKWATER']).parent}:{os.environ['PATH']}"
        more = {"SLACKWATER_TOKEN": self._token, "PATH": ours}
        done = subprocess.run(
            ["sh", "-c", command], env=_environment() | more,
            capture_output=True, check=False, timeout=REQUEST_LIMIT_SECONDS, text=True,
        )
        if done.returncode != 0:
            raise ApplianceError(f"{command}: {done.stderr}")
        return done.stdout.strip()

    def nfs_url(self, path=""):
        """The URL of a path below the export for libnfs, which asks no port mapper then; for one use. The
        user ids make the caller root whoever runs the tests, as in the guest."""
        ports = f"nfsport={self.nfs_port}&mountport={self.nfs_port}&uid=0&gid=0"
        return f"nfs://127.0.0.1{self.mount_path()}/{path}?{ports}"

    def read_over_nfs(self, path):
        """A file's bytes as a client in user space reads them, past every cache of the guest."""
        done = subprocess.run(
            ["nfs-cat", self.nfs_url(path)],
            capture_output=True, check=False, timeout=REQUEST_LIMIT_SECONDS,
        )
        if done.returncode != 0:
            raise ApplianceError(f"nfs-cat {path}: {done.stderr.decode('utf-8', 'replace')}")
        return done.stdout

    def list_over_nfs(self, path):
        """The names in a directory, as a client in user space reads them."""
        done = subprocess.run(
            ["nfs-ls", self.nfs_url(path)],
            capture_output=True, check=False, timeout=REQUEST_LIMIT_SECONDS,
        )
        if done.returncode != 0:
            raise ApplianceError(f"nfs-ls {path}: {done.stderr.decode('utf-8', 'replace')}")
        return {line.split()[-1] for line in done.stdout.decode().splitlines() if line}

    def log_tail(self, lines):
        """The last lines of the server's log."""
        return tail(self.log_path, lines)


def tail(path, lines):
    """The last lines of a text file; nothing where there is none."""
    if not pathlib.Path(path).exists():
        return ""
    return "\n".join(path.read_text("utf-8", "replace").splitlines()[-lines:])

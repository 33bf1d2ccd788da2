"""Processes of the test: started with a log, ended by id; and short commands with a limit.

Invariant: all run in the test's own process namespace, so the ones that are seen are the test's.
"""

import os
import pathlib
import signal
import subprocess
import time

from scenario import PATIENCE, Failure

STOP_LIMIT_SECONDS = 30
# A command that takes longer hangs.
COMMAND_LIMIT_SECONDS = 120
# Of a failed command's output.
SHOWN_CHARACTERS = 2000


def environment(**settings):
    """The caller's environment without what would configure the programs under test."""
    kept = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("SLACKWATER", "DOCKER_", "CONTAINERD_", "REGISTRY_"))
        and name.lower() not in ("http_proxy", "https_proxy", "all_proxy")
    }
    return {**kept, "no_proxy": "*", "NO_PROXY": "*", **settings}


class Outcome:
    """How a command ended."""

    def __init__(self, command, code, output, errors):
        self.command = command
        self.code = code
        self.output = output
        self.errors = errors

    @property
    def text(self):
        """All that it said."""
        return self.output + self.errors

    def must_succeed(self):
        """Fails if it did not; returns what it said on its standard output."""
        if self.code != 0:
            shown = self.text[-SHOWN_CHARACTERS:].strip()
            raise Failure(f"`{' '.join(self.command)[:300]}` ended with {self.code}: {shown}")
        return self.output

    def must_fail(self):
        """Fails if it succeeded; returns all that it said."""
        if self.code == 0:
            raise Failure(f"`{' '.join(self.command)[:300]}` succeeded and must not")
        return self.text


def attempt(command, limit_seconds=COMMAND_LIMIT_SECONDS, input_bytes=None, settings=None,
            directory=None):
    """Runs a command and returns its Outcome, however it ended."""
    limit_seconds *= PATIENCE
    command = [str(word) for word in command]
    try:
        done = subprocess.run(
            command, input=b"" if input_bytes is None else input_bytes, capture_output=True,
            check=False, timeout=limit_seconds, env=environment(**(settings or {})), cwd=directory,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode("utf-8", "replace")[-SHOWN_CHARACTERS:]
        raise Failure(
            f"`{' '.join(command)[:300]}` not done within {limit_seconds} s; it said: {said}"
        ) from None
    return Outcome(command, done.returncode, done.stdout.decode("utf-8", "replace"),
                   done.stderr.decode("utf-8", "replace"))


def run(*command, **options):
    """Runs a command that has to succeed; returns its standard output."""
    return attempt(command, **options).must_succeed()


class Process:
    """A program that goes on until it is stopped."""

    def __init__(self, title, command, log_path):
        self.title = title
        self._command = [str(word) for word in command]
        self.log_path = log_path
        self._process = None

    def start(self, settings=None):
        """Starts it; whether it serves is for the caller to find out."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("a") as log:
            log.write(f"--- start: {' '.join(self._command)}\n")
            log.flush()
            # A session of its own: Ctrl-C is for the test, which then stops things in order.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(**(settings or {})), start_new_session=True,
            )

    @property
    def pid(self):
        """Its id."""
        return self._process.pid

    def is_running(self):
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, limit_seconds, check):
        """Returns once the check is true; fails if it ends before."""
        limit_seconds *= PATIENCE
        deadline = time.monotonic() + limit_seconds
        while not check():
            if not self.is_running():
                code = self._process.returncode
                self._process = None
                raise Failure(f"{self.title} ended with {code} at start:\n{self.tail(8)}")
            if time.monotonic() > deadline:
                raise Failure(f"{self.title} not ready after {limit_seconds} s:\n{self.tail(8)}")
            time.sleep(0.05)

    def signal(self, number):
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self):
        """Ends it without warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_LIMIT_SECONDS * PATIENCE)
            self._process = None

    def stop(self, limit_seconds=STOP_LIMIT_SECONDS):
        """Asks it to end; returns its exit code."""
        if self._process is None:
            return None
        limit_seconds *= PATIENCE
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"{self.title}: no end within {limit_seconds} s of SIGTERM") from None
        self._process = None
        return code

    def log_position(self):
        """Where its log ends now."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_since(self, position):
        """Its log from there on."""
        with self.log_path.open("rb") as log:
            log.seek(position)
            return log.read().decode("utf-8", "replace")

    def tail(self, lines):
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-lines:])


def processes():
    """Ids and command lines of the processes of this namespace."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found[int(entry.name)] = [word.decode("utf-8", "replace") for word in words if word]
    return found


def kill_strangers():
    """Kills what is in the namespace besides the test itself and its first process."""
    for pid in processes():
        if pid not in (1, os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

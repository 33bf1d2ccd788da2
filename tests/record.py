"""What a run of suites started and made, wherever it is.

```
variable of the environment ----> processes that have it
the file that it names ---------> folders of suites (scratch.sh adds them)
```
Whatever a suite starts inherits the variable, also in other namespaces and sessions. Not what it starts by
sudo, which clears it.
"""

import contextlib
import fcntl
import os
import pathlib
import tempfile
import time

# Not one of those that begin with SLACKWATER_, which are settings: suites keep them from what they start.
VARIABLE = "SUITE_RECORD"
RECORDS = (
    pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    / "slackwater" / "records"
)
# Only reached if something does not end. Tests of this file wait for less.
END_LIMIT_SECONDS = int(os.environ.get("SUITE_END_LIMIT_SECONDS") or 120)
LOOK_SECONDS = 0.1


class Record:
    """One run's record."""

    def __init__(self):
        RECORDS.mkdir(parents=True, exist_ok=True)
        with (RECORDS / "lock").open("w", encoding="utf-8") as lock:
            # Between the making of a file and its lock, no other run may take it for one that is left.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_left()
            # Stays open: the lock says that the run goes on.
            self._file = tempfile.NamedTemporaryFile(dir=RECORDS, prefix="run-")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def path(self):
        """The file that names the folders."""
        return pathlib.Path(self._file.name)

    @property
    def environment(self):
        """This process's environment with the record in it, for what the run starts."""
        return os.environ | {VARIABLE: str(self.path)}

    def folders(self):
        """What the suites made, also what they have removed."""
        return [pathlib.Path(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def has(self, process):
        """Whether the process with this id is of the run."""
        try:
            variables = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{VARIABLE}={self.path}".encode() in variables

    def processes(self):
        """Those of the run that live: their ids and commands."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdecimal() and self.has(entry.name):
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
        return found

    def wait_for_end(self):
        """Waits until no process of the run is left; returns those that stay nonetheless."""
        return _wait_for_none(self.processes)

    def left(self):
        """What the run has left, a line each. Called when all its suites have ended."""
        left = [f"process {number}: {command}" for number, command in self.wait_for_end().items()]
        folders = [folder for folder in self.folders() if not (folder / "kept").exists()]
        return left + [line for folder in folders for line in _wait_for_none(lambda: _of(folder))]


def _wait_for_none(look):
    """Looks until nothing is found, for some time; returns what is still there."""
    deadline = time.monotonic() + END_LIMIT_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _of(folder):
    """What there is of a suite's folder and of what has its name."""
    found = [f"folder {folder}"] if folder.exists() else []
    # Read from /sys: a tool that looks at the files themselves would hang on a dead one.
    for entry in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            file = entry.read_text(encoding="utf-8").strip()
            if folder.name in file:
                found.append(f"loop device /dev/{entry.parts[3]} on {file}")
    mounts = pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line}" for line in mounts if folder.name in line]
    groups = pathlib.Path("/sys/fs/cgroup").rglob(f"{folder.name}*")
    return found + [f"control group {group}" for group in groups]


def _remove_left():
    """Removes the files of runs that were killed."""
    for file in RECORDS.glob("run-*"):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), file.open("rb") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()

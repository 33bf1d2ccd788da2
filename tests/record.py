"""What a run of suites started and made, wherever it is.

```
variable of the environment ----> processes that have it, and those that they started
the file that it names ---------> folders of suites, and other texts that their loop devices have (scratch.sh)
```
Whatever a suite starts inherits the variable, also in other namespaces and sessions, but by sudo where that is not
asked to keep it. What a program starts without any environment is known by its parents.
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
# More parents than a process has here.
PARENTS_MAX = 64


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
        """The file that has the folders and texts."""
        return pathlib.Path(self._file.name)

    @property
    def environment(self):
        """This process's environment with the record in it, for what the run starts."""
        return os.environ | {VARIABLE: str(self.path)}

    def lines(self):
        """The folders that suites made, also those that they have removed, and other texts."""
        return list(filter(None, self.path.read_text(encoding="utf-8").splitlines()))

    def folders(self):
        """The folders."""
        return [pathlib.Path(line) for line in self.lines() if _is_folder(line)]

    def has(self, process):
        """Whether the process with this id is of the run."""
        for _ in range(PARENTS_MAX):
            if process <= 1:
                return False
            if self._is_marked(process):
                return True
            process = _parent(process)
        return False

    def _is_marked(self, process):
        try:
            variables = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{VARIABLE}={self.path}".encode() in variables

    def processes(self):
        """Those of the run that live: their ids, and the words that they were started by."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdecimal() and self._is_marked(int(entry.name)):
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    found[int(entry.name)] = [word.decode(errors="replace") for word in words]
        return found

    def wait_for_end(self):
        """Waits until no process of the run is left; returns those that stay nonetheless."""
        return _wait_for_none(self.processes)

    def left(self):
        """What the run has left, a line each. Called when all its suites have ended."""
        def look():
            processes = self.processes().items()
            return [f"process {number}: {' '.join(words)}" for number, words in processes] + \
                _left_of(self.lines())
        return _wait_for_none(look)


def _wait_for_none(look):
    """Looks until nothing is found, for some time; returns what is still there."""
    deadline = time.monotonic() + END_LIMIT_SECONDS
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _is_folder(line):
    """Folders are made by mktemp; other texts are parts of the paths of loop devices' files."""
    return pathlib.Path(line).name.startswith("slackwater-")


def _left_of(lines):
    """What there is of folders and texts."""
    folders = [pathlib.Path(line) for line in lines if _is_folder(line)]
    names = [folder.name for folder in folders]
    texts = names + [line for line in lines if not _is_folder(line)]
    found = [f"folder {folder}" for folder in folders if folder.exists()]
    # Read from /sys: a tool that looks at the files themselves would hang on a dead one.
    for entry in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            file = entry.read_text(encoding="utf-8").strip()
            if any(text in file for text in texts):
                found.append(f"loop device /dev/{entry.parts[3]} on {file}")
    mounts = pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line}" for line in mounts if any(name in line for name in names)]
    # Others make and remove control groups meanwhile, which os.walk passes over.
    groups = (group for _, groups, _ in os.walk("/sys/fs/cgroup") for group in groups)
    return found + [f"control group {group}" for group in groups if group.startswith(tuple(names or ["/"]))]


def _parent(process):
    """The id of a process's parent; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        # Behind the name, which may hold anything.
        status = pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return int(status.rsplit(")", 1)[1].split()[1])
    return 0


def _remove_left():
    """Removes the files of runs that were killed."""
    for file in RECORDS.glob("run-*"):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), file.open("rb") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()

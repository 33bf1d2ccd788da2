"""Takes the places that nothing may count on, and tells which process of a run talks to one of them.

```
a suite --> 127.0.0.1:2049 --> listener here: not an appliance, says nothing, notes the process
```
They are default ports and sockets of an appliance, of a driver, of engines and of others. What is taken already,
say by `make run` in the next terminal, is left to its owner.
"""

import contextlib
import os
import pathlib
import selectors
import socket
import struct
import threading

# Web server, port mapper, NFS, registry, REST of the appliance, another web server.
PORTS = (80, 111, 2049, 5000, 8049, 8080)
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
SOCKETS = (
    "/run/docker.sock",
    "/run/docker/plugins/slackwater.sock",
    "/run/containerd/containerd.sock",
    "/run/slackwater/containerd.sock",
)
# Made by no suite: they would be those of this machine's own appliance or driver.
DIRECTORIES = ("/etc/slackwater", "/var/lib/slackwater", "/var/lib/slackwater-driver")
BACKLOG = 64
# What is read of a process's command.
SHOWN = 200


class Defaults:
    """Holds the places for as long as the block lasts. `is_of_run` tells for a process id whether the run is to
    blame; what others do, is theirs."""

    def __init__(self, is_of_run):
        self._is_of_run = is_of_run
        self._cleanup = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()
        self._found = {}
        self._were_there = {path for path in DIRECTORIES if os.path.lexists(path)}
        self.taken = []

    def __enter__(self):
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._selector.close)
            for port in PORTS:
                for family, address in LOOPBACK:
                    self._listen(cleanup, family, (address, port), f"{address} port {port}")
            for path in SOCKETS if os.geteuid() == 0 else ():
                if not is_served(path):
                    self._make_folder(cleanup, os.path.dirname(path))
                    # Of a run that was killed, or of another program that has ended.
                    _remove(os.unlink, path)
                    self._listen(cleanup, socket.AF_UNIX, path, path)
            self._watch(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_):
        self._cleanup.close()

    def found(self):
        """What the run took for granted, a line each."""
        made = [
            f"{path} was made, which is where a real one's files are"
            for path in DIRECTORIES if os.path.lexists(path) and path not in self._were_there
        ]
        return [f"{command} talked to {place}, which is not the run's"
                for (place, command) in sorted(self._found)] + made

    @staticmethod
    def _make_folder(cleanup, folder):
        """Makes it if it is missing, and then removes it in the end."""
        parents = [folder, *map(str, pathlib.Path(folder).parents)]
        for path in reversed([path for path in parents if not os.path.exists(path)]):
            os.mkdir(path)
            # It stays if another has put something into it.
            cleanup.callback(_remove, os.rmdir, path)

    def _listen(self, cleanup, family, address, place):
        """Takes one place, if it is free."""
        listener = socket.socket(family)
        # A connection of the run before may still be in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            return
        listener.setblocking(False)
        cleanup.callback(listener.close)
        if family == socket.AF_UNIX:
            cleanup.callback(_remove, os.unlink, address)
        self._selector.register(listener, selectors.EVENT_READ, place)
        self.taken.append(place)

    def _watch(self, cleanup):
        """Takes connections until the block ends."""
        ended, end = socket.socketpair()
        cleanup.callback(ended.close)
        self._selector.register(ended, selectors.EVENT_READ, None)

        def run():
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        return
                    self._note(key.fileobj, key.data)
        thread = threading.Thread(target=run)
        cleanup.callback(thread.join)
        cleanup.callback(end.close)
        thread.start()

    def _note(self, listener, place):
        """Takes one connection, finds out whose it is, and ends it."""
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            for process in _peers(connection):
                if self._is_of_run(process):
                    self._found[place, _command(process)] = True


def is_served(address):
    """Whether a process listens at a port of loopback, or at the path of a socket."""
    is_path = isinstance(address, str)
    with socket.socket(socket.AF_UNIX if is_path else socket.AF_INET) as probe:
        return probe.connect_ex(address if is_path else ("127.0.0.1", address)) == 0


def _remove(call, path):
    """Removes what may be gone or in use."""
    with contextlib.suppress(OSError):
        call(path)


def _peers(connection):
    """The ids of the processes that have the other end."""
    if connection.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return [struct.unpack("3i", credentials)[0]]
    inode = _inode(connection)
    return _holders(inode) if inode else []


def _inode(connection):
    """That of the socket at the other end, if that is of this machine and still open."""
    table = "/proc/net/tcp6" if connection.family == socket.AF_INET6 else "/proc/net/tcp"
    there, here = connection.getpeername()[1], connection.getsockname()[1]
    with open(table, encoding="ascii") as lines:
        next(lines)
        for fields in map(str.split, lines):
            ports = [int(field.rsplit(":", 1)[1], 16) for field in fields[1:3]]
            if ports == [there, here] and fields[9] != "0":
                return fields[9]
    return None


def _holders(inode):
    """The ids of the processes that have the socket."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if any(os.readlink(file) == f"socket:[{inode}]" for file in os.scandir(entry / "fd")):
                    found.append(int(entry.name))
    return found


def _command(process):
    """What a process was started as."""
    try:
        words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return f"process {process}"
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:SHOWN]

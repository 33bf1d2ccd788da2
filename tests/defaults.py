"""Takes the places that nothing may count on, and tells which process of a run talks to one of them.

```
a suite --> 127.0.0.1:2049 --> listener here: not an appliance, says nothing, notes the process
```
They are default ports of an appliance and of other common services, and sockets of a driver and of containerd, not
Docker's, which has no folder of its own. What is
taken already, say by `make run` in the next terminal, is left to its owner. A caller that connects and closes at
once, without waiting for a word, is missed: the kernel does not say any more whose the connection was.

Ports are the machine's, so nothing else can start there in the meantime. Sockets are the run's alone: tmpfs in the mount
namespace of this process, which it has to have for itself.
"""

import contextlib
import os
import pathlib
import selectors
import socket
import struct
import subprocess
import threading

# Web server, port mapper, NFS, registry, REST of the appliance, another web server.
PORTS = (80, 111, 2049, 5000, 8049, 8080)
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
# Folders that are hidden from the run, with the sockets in them.
SOCKETS = {
    "/run/docker": "/run/docker/plugins/slackwater.sock",
    "/run/containerd": "/run/containerd/containerd.sock",
    "/run/slackwater": "/run/slackwater/containerd.sock",
}
BACKLOG = 64
# What is shown of a process's command.
SHOWN = 200


class Defaults:
    """Holds the places for as long as the block lasts. `is_of_run` tells for a process id whether the run is to
    blame; what others do, is theirs."""

    def __init__(self, is_of_run, has_namespace):
        self._is_of_run = is_of_run
        self._has_namespace = has_namespace
        self._cleanup = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()
        self._found = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.taken = []
        self.not_taken = []

    def __enter__(self):
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._selector.close)
            for port in PORTS:
                for family, address in LOOPBACK:
                    self._listen(cleanup, family, (address, port), f"{address} port {port}")
            for folder, path in SOCKETS.items():
                if self._has_namespace:
                    _hide(folder)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    self._listen(cleanup, socket.AF_UNIX, path, path)
                else:
                    self.not_taken.append(path)
            ended, end = socket.socketpair()
            cleanup.callback(ended.close)
            self._selector.register(ended, selectors.EVENT_READ, None)
            cleanup.callback(self._thread.join)
            cleanup.callback(end.close)
            self._thread.start()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_):
        self._cleanup.close()

    def found(self):
        """What the run took for granted, a line each. To be called in the block."""
        dead = [] if self._thread.is_alive() else ["the default places were not watched to the end"]
        return dead + [f"{command} talked to {place}, which is not the run's"
                       for place, command in sorted(self._found)]

    def _listen(self, cleanup, family, address, place):
        """Takes one place, if it is free."""
        try:
            listener = cleanup.enter_context(contextlib.closing(socket.socket(family)))
            # A connection of the run before may still be in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            self.not_taken.append(place)
            return
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, place)
        self.taken.append(place)

    def _watch(self):
        """Takes connections until the block ends."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                self._note(key.fileobj, key.data)

    def _note(self, listener, place):
        """Takes one connection, finds out whose it is, and ends it."""
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            for process in _peers(connection):
                if self._is_of_run(process):
                    self._found.add((place, _command(process)))


def is_served(port):
    """Whether a process listens at a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _hide(folder):
    """Puts an empty folder over one, for this mount namespace."""
    os.makedirs(folder, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder], check=True)


def _peers(connection):
    """The ids of the processes that have the other end."""
    if connection.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return [struct.unpack("3i", credentials)[0]]
    inode = _inode(connection.getpeername()[1], connection.getsockname()[1])
    return _holders(inode) if inode else []


def _inode(there, here):
    """That of the socket of the port `there` of a connection, if that is of this machine and still open."""
    # A socket for IPv6 can have an end of IPv4.
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as lines:
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
                if any(_target(file) == f"socket:[{inode}]" for file in os.scandir(entry / "fd")):
                    found.append(int(entry.name))
    return found


def _target(file):
    """What a descriptor is of, unless it was closed meanwhile."""
    try:
        return os.readlink(file)
    except OSError:
        return None


def _command(process):
    """What a process was started as."""
    try:
        words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return f"process {process}"
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:SHOWN]

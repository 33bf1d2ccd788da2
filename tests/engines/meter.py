"""Passes TCP connections on and counts their bytes: what a worker or a registry really transferred.

A program of its own, so that it competes with nothing in the test:

    meter.py LISTEN_PORT TARGET_PORT COUNTERS

COUNTERS is a file of two 64 bit numbers that the test maps: bytes to the target, bytes from it.
"""

import mmap
import pathlib
import socket
import struct
import sys
import threading

BUFFER_BYTES = 256 << 10
COUNTERS = struct.Struct("=QQ")
CONNECT_LIMIT_SECONDS = 10


class Reading:
    """The test's side: how much has passed since the last reset."""

    def __init__(self, path):
        path.write_bytes(bytes(COUNTERS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), COUNTERS.size)
        self._start = (0, 0)

    def reset(self):
        """Counts from here."""
        self._start = COUNTERS.unpack(self._map[:])

    @property
    def sent(self):
        """Bytes to the target."""
        return COUNTERS.unpack(self._map[:])[0] - self._start[0]

    @property
    def received(self):
        """Bytes from the target."""
        return COUNTERS.unpack(self._map[:])[1] - self._start[1]


def pump(source, sink, counters, index, lock):
    """Passes one direction on until its end."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    try:
        while True:
            size = source.recv_into(buffer)
            if size == 0:
                sink.shutdown(socket.SHUT_WR)
                return
            with lock:
                totals = list(COUNTERS.unpack(counters[:]))
                totals[index] += size
                counters[:] = COUNTERS.pack(*totals)
            sink.sendall(buffer[:size])
    except OSError:
        # One side is gone: the other must see that.
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def serve(listen_port, target_port, path):
    """Accepts for ever."""
    with path.open("r+b") as file:
        counters = mmap.mmap(file.fileno(), COUNTERS.size)
    lock = threading.Lock()
    listener = socket.create_server(("127.0.0.1", listen_port), backlog=128)
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", target_port), CONNECT_LIMIT_SECONDS)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index, (source, sink) in enumerate(((near, far), (far, near))):
            threading.Thread(
                target=pump, args=(source, sink, counters, index, lock), daemon=True
            ).start()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))

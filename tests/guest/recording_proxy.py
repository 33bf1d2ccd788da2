"""A TCP proxy between the guest and the appliance that writes down every byte of both directions.

    guest's kernel -> Proxy.port -> appliance's NFS port

What it heard is what anybody on the way could read. A connection is either in plain text to its end, or
it begins with the question for TLS (RFC 9289 section 4.1) and its answer, and the rest of it is records of
TLS (RFC 8446 section 5.1) without a gap.

Invariants: listening sockets and connections are on loopback; while the server is down a client's
connection waits for it, so that the client does not begin to wait longer and longer between its attempts.
"""

import dataclasses
import socket
import struct
import threading
import time

LAST_FRAGMENT = 1 << 31
CALL = 0
AUTH_TLS = 7
# xid, message type, RPC version, program, program's version, procedure, flavor of the credential.
HEAD = struct.Struct(">7I")
# Type, version, length.
TLS_HEAD = struct.Struct(">BHH")
HANDSHAKE, APPLICATION_DATA = 22, 23
TLS_TYPES = {20, 21, HANDSHAKE, APPLICATION_DATA}
TLS_VERSIONS = {0x0301, 0x0303}
TLS_RECORD_BYTES_MAX = (1 << 14) + 256
RETRY_SECONDS = 0.05


class Readable(Exception):
    """Something went by in another form than it had to; the text says what."""


@dataclasses.dataclass
class Connection:
    """What was heard of one connection."""

    calls: bytearray = dataclasses.field(default_factory=bytearray)
    replies: bytearray = dataclasses.field(default_factory=bytearray)

    def asks_for_tls(self):
        """Whether it begins with the question for TLS."""
        heads = [head for head, _ in _records(self.calls[:4 + 40])]
        return bool(heads) and heads[0][6] == AUTH_TLS

    def procedures(self):
        """The (program, procedure) of the calls in plain text. Raises Readable if what follows the
        question for TLS is anything but TLS."""
        if not self.asks_for_tls():
            return [(head[3], head[5]) for head, _ in _records(self.calls) if head[1] == CALL]
        for stream in (self.calls, self.replies):
            if len(stream) >= 4:
                _require_tls(stream, 4 + _length(stream, 0))
        return []

    def data_records(self):
        """How many records of encrypted data the client sent."""
        at = 4 + _length(self.calls, 0)
        return sum(kind == APPLICATION_DATA for kind in _require_tls(self.calls, at))


def _length(stream, at):
    (mark,) = struct.unpack_from(">I", stream, at)
    if not mark & LAST_FRAGMENT:
        raise Readable("a call in more than one fragment, which Linux does not send")
    return mark & ~LAST_FRAGMENT


def _records(stream):
    """The head of each whole record, and where it begins."""
    at = 0
    while at + 4 + HEAD.size <= len(stream):
        yield HEAD.unpack_from(stream, at + 4), at
        at += 4 + _length(stream, at)


def _require_tls(stream, at):
    """The types of the records of TLS that the stream has from there; it has nothing else."""
    kinds = []
    while at + TLS_HEAD.size <= len(stream):
        kind, version, length = TLS_HEAD.unpack_from(stream, at)
        if kind not in TLS_TYPES or version not in TLS_VERSIONS or length > TLS_RECORD_BYTES_MAX:
            raise Readable(f"no TLS at byte {at} of {len(stream)}: {bytes(stream[at:at + 32]).hex()}")
        kinds.append(kind)
        at += TLS_HEAD.size + length
    return kinds


class Proxy:
    """Serves from its construction to `close`."""

    def __init__(self, server_port):
        self._server_port = server_port
        self._lock = threading.Lock()
        self._is_closed = False
        self._open = set()
        self._heard = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def heard(self):
        """A copy of what was heard so far, by connection."""
        with self._lock:
            return [Connection(bytes(one.calls), bytes(one.replies)) for one in self._heard]

    def forget(self):
        """What was heard so far is heard no more; for when no connection is open."""
        with self._lock:
            self._heard.clear()

    def close(self):
        """Closes everything; no thread outlives it for long."""
        with self._lock:
            self._is_closed = True
            connections = list(self._open)
        # A thread in accept is not woken by close alone.
        _shut(self._listener, *connections)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _connect(self):
        """A connection to the server, as soon as it takes one; None if the proxy ends before."""
        while True:
            server = socket.socket()
            with self._lock:
                if self._is_closed:
                    return None
            try:
                server.connect(("127.0.0.1", self._server_port))
                return server
            except OSError:
                server.close()
                time.sleep(RETRY_SECONDS)

    def _serve(self, client):
        """One connection of the client, in this thread from it and in another one to it."""
        server = self._connect()
        if server is None:
            client.close()
            return
        connection = Connection()
        with self._lock:
            if self._is_closed:
                _shut(client, server)
            self._open |= {client, server}
            self._heard.append(connection)
        replies = threading.Thread(
            target=self._pass, args=(server, client, connection.replies), daemon=True
        )
        replies.start()
        self._pass(client, server, connection.calls)
        replies.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pass(self, source, sink, heard):
        """Passes on what comes, until either end closes; both are closed then."""
        try:
            while piece := source.recv(1 << 18):
                with self._lock:
                    heard += piece
                sink.sendall(piece)
        except OSError:
            pass
        _shut(source, sink)


def _shut(*connections):
    """Ends connections, so that blocked reads and writes of them return."""
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not connected, or no longer

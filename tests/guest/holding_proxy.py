"""A TCP proxy between the guest and the appliance that can hold back the client's COMMITs.

    guest's kernel -> Proxy.port -> appliance's NFS port
              every call goes through, but COMMITs while they are held: those go nowhere
              every reply goes through

It reads the record marks of ONC RPC (RFC 5531 section 11) and the head of each call, so that a
scenario decides by itself, and without luck, that a server dies between WRITE and COMMIT.

Invariants: listening sockets and connections are on loopback; while COMMITs are held no connection
of the client is closed, whatever the server does, so that the client does not begin to wait longer
and longer between its attempts to connect.
"""

import collections
import socket
import struct
import threading

NFS_PROGRAM = 100003
# RFC 1813 section 3: procedure numbers.
WRITE, COMMIT = 7, 21
CALL = 0
LAST_FRAGMENT = 1 << 31
# The largest record that the appliance takes is 1 MiB and its head.
RECORD_BYTES_MAX = 2 << 20
# xid, message type, RPC version, program, program's version, procedure.
HEAD = struct.Struct(">6I")


class _Closed(Exception):
    """The peer closed the connection, or it broke."""


def _receive(connection, count):
    """Exactly `count` bytes."""
    received = bytearray()
    while len(received) < count:
        try:
            piece = connection.recv(min(count - len(received), 1 << 18))
        except OSError as error:
            raise _Closed from error
        if not piece:
            raise _Closed
        received += piece
    return bytes(received)


def _record(connection):
    """The next record as it came, marks included, and its payload."""
    raw, payload = bytearray(), bytearray()
    while True:
        mark = _receive(connection, 4)
        (length,) = struct.unpack(">I", mark)
        if len(payload) + (length & ~LAST_FRAGMENT) > RECORD_BYTES_MAX:
            raise _Closed
        fragment = _receive(connection, length & ~LAST_FRAGMENT)
        raw += mark + fragment
        payload += fragment
        if length & LAST_FRAGMENT:
            return bytes(raw), bytes(payload)


def _procedure(payload):
    """The NFS procedure that a record calls; None for anything else."""
    if len(payload) < HEAD.size:
        return None
    _, message, _, program, _, procedure = HEAD.unpack_from(payload)
    return procedure if (message, program) == (CALL, NFS_PROGRAM) else None


class Proxy:
    """Serves from its construction to `close`. COMMITs are held from the start to `release`."""

    def __init__(self, server_port):
        self._server_port = server_port
        self._changed = threading.Condition()
        self._is_holding = True
        self._is_closed = False
        self._held = 0
        self._passed = collections.Counter()
        self._connections = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for_commit(self):
        """Returns when a COMMIT is held; the scenario's limit ends the wait."""
        with self._changed:
            # With a timeout the main thread still takes the signal of the scenario's limit.
            while not self._held:
                self._changed.wait(0.1)

    def calls(self, procedure):
        """How many calls of an NFS procedure were passed on to the server so far."""
        with self._changed:
            return self._passed[procedure]

    def release(self):
        """From now on all calls go through. The client's connections are closed: it connects
        again at once, and sends again what was not answered."""
        with self._changed:
            self._is_holding = False
        self._cut()

    def close(self):
        """Closes everything; no thread outlives it for long."""
        with self._changed:
            self._is_closed = True
            self._is_holding = False
        # A thread in accept is not woken by close alone.
        self._shut(self._listener)
        self._listener.close()
        self._cut()

    def _cut(self):
        with self._changed:
            connections = list(self._connections)
            self._changed.notify_all()
        self._shut(*connections)

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        """One connection of the client, in this thread from it and in another one to it."""
        server = socket.socket()
        with self._changed:
            if self._is_closed:
                client.close()
                return
            self._connections |= {client, server}
        replies = threading.Thread(target=self._replies, args=(server, client), daemon=True)
        try:
            server.connect(("127.0.0.1", self._server_port))
            replies.start()
            self._calls(client, server)
        except (OSError, _Closed):
            pass
        finally:
            self._shut(client, server)
            if replies.ident is not None:
                replies.join()
            with self._changed:
                self._connections -= {client, server}
            for connection in (client, server):
                connection.close()

    @staticmethod
    def _shut(*connections):
        """Ends connections, so that blocked reads and writes of them return."""
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is not connected, or no longer

    def _calls(self, client, server):
        """Passes calls on until the client's end closes; what a server that has died is sent while
        COMMITs are held is dropped."""
        while True:
            raw, payload = _record(client)
            procedure = _procedure(payload)
            with self._changed:
                if procedure == COMMIT and self._is_holding:
                    self._held += 1
                    self._changed.notify_all()
                    continue
                self._passed[procedure] += 1
            try:
                server.sendall(raw)
            except OSError:
                with self._changed:
                    if not self._is_holding:
                        raise

    def _replies(self, server, client):
        """Passes replies on until the server's end closes, and closes the client's end then, but
        for one that is held."""
        try:
            while piece := server.recv(1 << 18):
                client.sendall(piece)
        except OSError:
            pass
        with self._changed:
            while self._is_holding:
                self._changed.wait()
        self._shut(client)

"""A disk with a volatile write cache, served over NBD (newstyle, simple replies) on a socket.

    WRITE  ->  cache (by sector) --FLUSH, FUA--> file
                    \\--chance-----------------> file

Invariants: a WRITE that is answered and not flushed may or may not be in the file, each sector of
512 bytes for itself; after FLUSH is answered all are. The cache is memory of this process alone:
killing it is what a power cut is to a disk. The file need not be synced, as the host lives on.
"""

import os
import random
import socket
import struct

SECTOR_BYTES = 512

OPTION_MAGIC = 0x49484156454F5054  # "IHAVEOPT"
OPTION_REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC, REPLY_MAGIC = 0x25609513, 0x67446698
FIXED_NEWSTYLE, NO_ZEROES = 1, 2
OPTION_EXPORT_NAME, OPTION_ABORT, OPTION_INFO, OPTION_GO = 1, 2, 6, 7
REPLY_ACK, REPLY_INFO, REPLY_UNSUPPORTED = 1, 3, 0x80000001
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
COMMAND_FUA = 1
# Has flags, takes FLUSH, takes FUA.
TRANSMISSION_FLAGS = 1 | 4 | 8
INVALID = 22

# What happens to the sectors of one write before a flush: all stay in the cache, all go to the
# medium at once, or each as chance has it.
FATES = (0.0, 0.0, 1.0, 0.5, 0.1, 0.9)


class Disk:
    """A file and what was written and not flushed."""

    def __init__(self, path, chance=None):
        self._file = os.open(path, os.O_RDWR)
        self.size_bytes = os.fstat(self._file).st_size
        self._cache = {}
        self._chance = chance or random.Random()

    def read(self, offset_bytes, length):
        """The newest bytes, flushed or not."""
        data = bytearray(os.pread(self._file, length, offset_bytes))
        first = offset_bytes // SECTOR_BYTES
        if self._cache:
            for index in range(length // SECTOR_BYTES):
                cached = self._cache.get(first + index)
                if cached is not None:
                    at = index * SECTOR_BYTES
                    data[at:at + SECTOR_BYTES] = cached
        return data

    def write(self, offset_bytes, data, is_durable=False):
        """Takes whole sectors."""
        first, count = offset_bytes // SECTOR_BYTES, len(data) // SECTOR_BYTES
        fate = 1.0 if is_durable else self._chance.choice(FATES)
        if fate == 1.0:
            os.pwrite(self._file, data, offset_bytes)
            for sector in range(first, first + count):
                self._cache.pop(sector, None)
            return
        for index in range(count):
            piece = data[index * SECTOR_BYTES:(index + 1) * SECTOR_BYTES]
            if fate and self._chance.random() < fate:
                os.pwrite(self._file, piece, (first + index) * SECTOR_BYTES)
                self._cache.pop(first + index, None)
            else:
                self._cache[first + index] = bytes(piece)

    def flush(self):
        """Makes everything durable."""
        run, start = [], None
        for sector in sorted(self._cache):
            if start is not None and sector != start + len(run):
                os.pwrite(self._file, b"".join(run), start * SECTOR_BYTES)
                run, start = [], None
            if start is None:
                start = sector
            run.append(self._cache[sector])
        if run:
            os.pwrite(self._file, b"".join(run), start * SECTOR_BYTES)
        self._cache.clear()

    def unflushed(self):
        """Sectors that a power cut would take."""
        return len(self._cache)


class Server:
    """Serves one disk, one client after the other."""

    def __init__(self, disk, path):
        self._disk = disk
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)

    def run(self):
        """Until the process ends."""
        while True:
            client, _ = self._listener.accept()
            with client:
                stream = client.makefile("rb", buffering=1 << 20)
                try:
                    if self._negotiate(client, stream):
                        while self._serve(client, stream):
                            pass
                except (OSError, EOFError):
                    pass  # the machine is gone

    def _negotiate(self, client, stream):
        client.sendall(b"NBDMAGIC" + struct.pack(">QH", OPTION_MAGIC, FIXED_NEWSTYLE | NO_ZEROES))
        take(stream, 4)
        export = struct.pack(">QH", self._disk.size_bytes, TRANSMISSION_FLAGS)
        while True:
            _, option, length = struct.unpack(">QII", take(stream, 16))
            take(stream, length)

            def answer(kind, data=b""):
                head = struct.pack(">QIII", OPTION_REPLY_MAGIC, option, kind, len(data))
                client.sendall(head + data)

            if option == OPTION_EXPORT_NAME:
                client.sendall(export)
                return True
            if option in (OPTION_INFO, OPTION_GO):
                answer(REPLY_INFO, struct.pack(">H", 0) + export)
                answer(REPLY_ACK)
                if option == OPTION_GO:
                    return True
            elif option == OPTION_ABORT:
                answer(REPLY_ACK)
                return False
            else:
                answer(REPLY_UNSUPPORTED)

    def _serve(self, client, stream):
        """One request; whether there may be more."""
        head = struct.unpack(">IHHQQI", take(stream, 28))
        _, flags, command, handle, offset_bytes, length = head
        error, data = 0, b""
        if command == READ:
            data = self._disk.read(offset_bytes, length)
        elif command == WRITE:
            self._disk.write(offset_bytes, take(stream, length), flags & COMMAND_FUA)
        elif command == FLUSH:
            self._disk.flush()
        elif command == DISCONNECT:
            return False
        else:
            error = INVALID
        client.sendall(struct.pack(">IIQ", REPLY_MAGIC, error, handle) + data)
        return True


def take(stream, length):
    """Exactly so many bytes."""
    data = stream.read(length)
    if len(data) != length:
        raise EOFError
    return data


def tell(path, text):
    """Writes to a socket that listens at a path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(path))
        line.sendall(text)

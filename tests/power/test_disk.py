"""What disk.py promises: flushed sectors stay, others are lost by chance, each for itself."""

import pathlib
import random
import socket
import struct
import tempfile
import threading
import unittest

import disk

SECTOR = disk.SECTOR_BYTES
DISK_BYTES = 64 * SECTOR


class Tests(unittest.TestCase):
    """A disk in a temporary file."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "disk.img"
        self.path.write_bytes(bytes(DISK_BYTES))

    def tearDown(self):
        self.folder.cleanup()

    def disk(self, seed=1):
        """The disk, as it is after a power cut when there was one before."""
        return disk.Disk(self.path, random.Random(seed))

    def test_reads_see_the_newest_and_flushed_sectors_stay(self):
        for seed in range(50):
            one = self.disk(seed)
            for number in range(20):
                one.write(number * SECTOR, bytes([number + seed]) * 3 * SECTOR)
            seen = bytes(one.read(0, DISK_BYTES))
            for number in range(20):
                self.assertEqual(seen[number * SECTOR], number + seed)
            one.flush()
            self.assertEqual(one.unflushed(), 0)
            self.assertEqual(bytes(self.disk().read(0, DISK_BYTES)), seen)

    def test_unflushed_sectors_are_old_or_new_and_both_happen(self):
        kinds = set()
        for seed in range(50):
            self.path.write_bytes(b"o" * DISK_BYTES)
            self.disk(seed).write(0, b"n" * 16 * SECTOR)
            left = self.path.read_bytes()
            for number in range(16):
                sector = left[number * SECTOR:(number + 1) * SECTOR]
                self.assertIn(sector, (b"o" * SECTOR, b"n" * SECTOR))
            kinds.add((b"o" in left[:16 * SECTOR], b"n" in left[:16 * SECTOR]))
            self.assertEqual(left[16 * SECTOR:], b"o" * (DISK_BYTES - 16 * SECTOR))
        self.assertEqual(kinds, {(True, False), (False, True), (True, True)})

    def test_a_durable_write_replaces_what_waited(self):
        for seed in range(20):
            one = self.disk(seed)
            one.write(0, b"a" * 4 * SECTOR)
            one.write(SECTOR, b"b" * SECTOR, is_durable=True)
            self.assertEqual(self.path.read_bytes()[SECTOR:2 * SECTOR], b"b" * SECTOR)
            one.flush()
            self.assertEqual(bytes(one.read(SECTOR, SECTOR)), b"b" * SECTOR)

    def test_a_client_talks_to_it(self):
        path = pathlib.Path(self.folder.name) / "nbd"
        server = disk.Server(self.disk(), path)
        threading.Thread(target=server.run, daemon=True).start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(30)
            client.connect(str(path))
            stream = client.makefile("rb")
            magic, option, _ = struct.unpack(">8sQH", disk.take(stream, 18))
            self.assertEqual((magic, option), (b"NBDMAGIC", disk.OPTION_MAGIC))
            client.sendall(struct.pack(">I", 3))
            # Structured replies are not spoken; GO begins.
            client.sendall(struct.pack(">QII", disk.OPTION_MAGIC, 8, 0))
            answer = struct.unpack(">QIII", disk.take(stream, 20))
            self.assertEqual(answer[2], disk.REPLY_UNSUPPORTED)
            client.sendall(struct.pack(">QII", disk.OPTION_MAGIC, disk.OPTION_GO, 0))
            _, _, kind, length = struct.unpack(">QIII", disk.take(stream, 20))
            _, size_bytes, _ = struct.unpack(">HQH", disk.take(stream, length))
            self.assertEqual((kind, size_bytes), (disk.REPLY_INFO, DISK_BYTES))
            disk.take(stream, 20)

            def call(command, offset_bytes, length, data=b"", wanted=0):
                head = (disk.REQUEST_MAGIC, 0, command, 7, offset_bytes, length)
                client.sendall(struct.pack(">IHHQQI", *head) + data)
                reply = struct.unpack(">IIQ", disk.take(stream, 16))
                self.assertEqual(reply, (disk.REPLY_MAGIC, 0, 7))
                return disk.take(stream, wanted)

            data = bytes(range(256)) * 4
            call(disk.WRITE, SECTOR, len(data), data)
            call(disk.FLUSH, 0, 0)
            self.assertEqual(call(disk.READ, SECTOR, len(data), wanted=len(data)), data)
        self.assertEqual(self.path.read_bytes()[SECTOR:SECTOR + len(data)], data)


if __name__ == "__main__":
    unittest.main()

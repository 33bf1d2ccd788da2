"""What writers.py promises: its checks pass on what it wrote, and find each kind of loss."""

import pathlib
import random
import tempfile
import unittest

import writers

CHANGES = 60


class Tests(unittest.TestCase):
    """All writers have been at work in a directory that lost nothing."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name) / "root"
        self.notes = pathlib.Path(self.folder.name) / "notes"
        self.root.mkdir()
        self.notes.mkdir()
        for kind in writers.KINDS:
            path = self.notes / kind
            write = getattr(writers, f"write_{kind}")
            write(self.root, writers.Notes(path), lambda path=path: writers.done(path) >= CHANGES,
                  random.Random(1))

    def tearDown(self):
        self.folder.cleanup()

    def require_wrong(self, words):
        """The check fails, and says this."""
        with self.assertRaisesRegex(writers.Wrong, words):
            writers.check(self.root, self.notes)

    def made(self):
        """A name that is there."""
        return sorted((self.root / "names").iterdir())[0]

    def test_what_was_written_is_right(self):
        writers.check(self.root, self.notes)
        kinds = {words[1] for words in writers.lines(self.notes / "names")}
        self.assertEqual(kinds, {"make", "remove"})

    def test_what_is_begun_may_be_there_or_not(self):
        # All marks of the end of the last change gone: each may be done or not, and is done.
        for kind in writers.KINDS:
            text = (self.notes / kind).read_text().splitlines()
            self.assertEqual(text[-1].split()[0], "done")
            (self.notes / kind).write_text("\n".join(text[:-1]) + "\n")
        writers.check(self.root, self.notes)
        # Nor is a record that is there in part, or not at all.
        records = self.root / "records"
        data = records.read_bytes()
        for length in (len(data) - 1, len(data) - writers.RECORD_BYTES):
            records.write_bytes(data[:length])
            writers.check(self.root, self.notes)
        records.write_bytes(data[:-writers.RECORD_BYTES - 1])
        self.require_wrong("record 58")

    def test_records(self):
        path = self.root / "records"
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        self.require_wrong("record 59 of 60")
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        self.require_wrong("record 7 of 60")
        path.write_bytes(data + data[:2 * writers.RECORD_BYTES])
        self.require_wrong("60 records were fsynced")
        path.unlink()
        self.require_wrong("records: ")

    def test_a_name_that_is_gone(self):
        self.made().unlink()
        self.require_wrong("fsynced names are gone")

    def test_a_name_that_is_back(self):
        removed = [words[2] for words in writers.lines(self.notes / "names")
                   if words[:2] == ["done", "remove"]][0]
        (self.root / "names" / f"made-{removed}").touch()
        self.require_wrong("removed or were never made")

    def test_a_name_with_another_content(self):
        path = self.made()
        path.write_bytes(path.read_bytes() + b"x")
        self.require_wrong("holds something else")

    def test_a_block_of_an_older_generation(self):
        block = writers.lines(self.notes / "blocks")[-1][2]
        with (self.root / "blocks").open("r+b") as file:
            file.seek(int(block) * writers.BLOCK_BYTES)
            file.write(writers.pattern("blocks", int(block), 0, writers.BLOCK_BYTES))
        self.require_wrong(f"block {block}, fdatasynced")

    def test_a_block_that_is_torn(self):
        with (self.root / "blocks").open("r+b") as file:
            file.seek(3 * writers.BLOCK_BYTES + 512)
            file.write(bytes(512))
        self.require_wrong("block 3, fdatasynced")


if __name__ == "__main__":
    unittest.main()

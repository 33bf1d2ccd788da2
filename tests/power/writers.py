#!/usr/bin/env python3
"""Writers in a mounted file system, and what has to be there of what they wrote.

    writer --change, fsync--> file system        (lost with the power, or not)
       '----before and after----> notes          (lines in a file that no power cut reaches)

    records  appends a record, fsync
    names    makes a file, fsync, renames it, fsync of the directory; removes old ones
    blocks   writes one block of a file over, fdatasync

Invariants: "done" is noted only after the system call that makes the change durable has returned;
"begin" is noted before the change. So what is done has to be there; what has begun and is not
done may be there or not, and is the only thing that may.
"""

import hashlib
import os
import pathlib
import random
import sys

# Crosses blocks and pages.
RECORD_BYTES = 700
BLOCK_BYTES = 4096
BLOCKS = 1024
FILE_BYTES_MAX = 60_000
# Older ones are removed.
FILES_KEPT = 40
KINDS = ("records", "names", "blocks")


class Wrong(Exception):
    """The file system does not hold what was made durable; the text says what."""


def pattern(kind, number, generation, length):
    """Bytes that say what they are."""
    return hashlib.shake_128(f"{kind} {number} {generation}".encode()).digest(length)


def file_pattern(number):
    """The content of a file of `names`; the first number, 0, makes a short one."""
    return pattern("names", number, 0, number * 7919 % FILE_BYTES_MAX + 1)


class Notes:
    """The lines of one writer."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, *words):
        """One line; it is in the file when this returns."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def lines(path):
    """The words of each line of a writer's notes."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def done(path):
    """How many changes were acknowledged."""
    return sum(words[0] == "done" for words in lines(path))


def sync_directory(path):
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)


def write_records(root, notes, is_stopped, _chance):
    """Appends."""
    file = os.open(root / "records", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sync_directory(root)
    number = 0
    while not is_stopped():
        notes.add("begin", "record", number)
        os.write(file, pattern("records", number, 0, RECORD_BYTES))
        os.fsync(file)
        notes.add("done", "record", number)
        number += 1


def write_names(root, notes, is_stopped, chance):
    """Makes, renames, removes."""
    folder = root / "names"
    folder.mkdir()
    sync_directory(root)
    number, kept = 0, []
    while not is_stopped():
        notes.add("begin", "make", number)
        with (folder / f"new-{number}").open("wb") as file:
            file.write(file_pattern(number))
            file.flush()
            os.fsync(file.fileno())
        (folder / f"new-{number}").rename(folder / f"made-{number}")
        sync_directory(folder)
        notes.add("done", "make", number)
        kept.append(number)
        number += 1
        if len(kept) > FILES_KEPT or chance.random() < 0.3:
            victim = kept.pop(chance.randrange(len(kept)))
            notes.add("begin", "remove", victim)
            (folder / f"made-{victim}").unlink()
            sync_directory(folder)
            notes.add("done", "remove", victim)


def write_blocks(root, notes, is_stopped, chance):
    """Writes over."""
    file = os.open(root / "blocks", os.O_WRONLY | os.O_CREAT)
    for block in range(BLOCKS):
        os.pwrite(file, pattern("blocks", block, 0, BLOCK_BYTES), block * BLOCK_BYTES)
    os.fsync(file)
    sync_directory(root)
    notes.add("done", "fill", 0, 0)
    generation = 1
    while not is_stopped():
        block = chance.randrange(BLOCKS)
        notes.add("begin", "block", block, generation)
        os.pwrite(file, pattern("blocks", block, generation, BLOCK_BYTES), block * BLOCK_BYTES)
        os.fdatasync(file)
        notes.add("done", "block", block, generation)
        generation += 1


def check_records(root, words):
    """All records that are done; of the next one anything."""
    count = sum(line[0] == "done" for line in words)
    if not count:
        return
    data = (root / "records").read_bytes()
    for number in range(count):
        got = data[number * RECORD_BYTES:(number + 1) * RECORD_BYTES]
        if got != pattern("records", number, 0, RECORD_BYTES):
            raise Wrong(f"record {number} of {count} fsynced ones is {len(got)} bytes: "
                        f"{got[:16].hex()}; the file has {len(data)}")
    if len(data) > (count + 1) * RECORD_BYTES:
        raise Wrong(f"{count} records were fsynced, and the file has {len(data)} bytes")


def check_names(root, words):
    """Every name that is made and not removed, with its content; no other but the one begun."""
    made, removed = set(), set()
    begun = None
    for state, change, text in words:
        begun = (change, int(text)) if state == "begin" else None
        if state == "done":
            (made if change == "make" else removed).add(int(text))
    wanted = {f"made-{number}" for number in made - removed}
    if not wanted and begun is None:
        return
    allowed = set()
    if begun:
        allowed = {f"made-{begun[1]}", f"new-{begun[1]}"}
        if begun[0] == "remove":
            wanted.discard(f"made-{begun[1]}")
    # Nothing acknowledged yet: not even the directory.
    found = set(os.listdir(root / "names")) if made or (root / "names").exists() else set()
    if wanted - found:
        raise Wrong(f"fsynced names are gone: {sorted(wanted - found)[:5]}")
    if found - wanted - allowed:
        raise Wrong(f"names that are removed or were never made: {sorted(found - wanted - allowed)[:5]}")
    for name in found:
        kind, number = name.split("-")
        # Of a file that is not fsynced anything may be there; it got its name after that.
        if kind == "made" and (root / "names" / name).read_bytes() != file_pattern(int(number)):
            raise Wrong(f"{name} was fsynced before it was renamed, and holds something else")


def check_blocks(root, words):
    """Each block as it was last acknowledged, or, of the one begun, as it would have become."""
    if not words:
        return
    current, begun = [0] * BLOCKS, None
    for state, change, block, generation in words:
        begun = (int(block), int(generation)) if state == "begin" else None
        if state == "done" and change == "block":
            current[int(block)] = int(generation)
    data = (root / "blocks").read_bytes()
    for block, generation in enumerate(current):
        got = data[block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES]
        allowed = [generation] + ([begun[1]] if begun and begun[0] == block else [])
        if got not in [pattern("blocks", block, each, BLOCK_BYTES) for each in allowed]:
            raise Wrong(f"block {block}, fdatasynced as generation {generation}, holds something "
                        f"else: {got[:16].hex()}")


def check(root, notes):
    """Fails with Wrong unless a mounted copy holds what the notes in a directory say."""
    for kind in KINDS:
        try:
            globals()[f"check_{kind}"](root, lines(notes / kind))
        except OSError as error:
            raise Wrong(f"{kind}: {error}") from error


def main():
    """Entry point: KIND ROOT NOTES SEED. Ends when there is a file `stop` in NOTES."""
    kind, root, notes, seed = sys.argv[1:]
    stop = pathlib.Path(notes) / "stop"
    write = {"records": write_records, "names": write_names, "blocks": write_blocks}[kind]
    chance = random.Random(f"{seed} {kind}")
    write(pathlib.Path(root), Notes(f"{notes}/{kind}"), stop.exists, chance)


if __name__ == "__main__":
    main()

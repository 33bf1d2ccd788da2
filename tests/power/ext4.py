#!/usr/bin/env python3
"""ext4 in a file of the appliance, while the power of the appliance's machine is cut.

    writers.py -> ext4 -> loop -> FUSE mount of slackwater-driver --NFS--> tests/power/server
                                                                              | SIGKILL: a cut
    a cut;  aside: the same disk, served at other ports -> export -> replay, e2fsck, compare
            again: served at the old ports; the mount rides it out, the writers go on

Invariants: between a cut and the comparison nobody who wrote can reach the data, so that no
client repairs a loss by sending it again. What is compared is what the writers noted as
acknowledged, on the host, whose power stays. The copy's journal is replayed by mounting it, not
by e2fsck, which would repair more than that. All runs in process and mount namespaces of its own
(tests/power/run makes them): whatever ends this program ends all it started.

    ext4.py CUTS SCRATCH    environment: POWER_* of tests/power/server, POWER_PROGRAMS (directory of
                            slackwater and slackwater-driver), SLACKWATER_POWER_SEED (default: any)
"""

import contextlib
import os
import pathlib
import random
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "engines"))
sys.path.append(str(HERE.parent / "guest"))

import writers
from leftover import loop_devices
from ports import held_port
from process import Process, processes, run
from scenario import Failure, require, wait_until

# Guards nothing but this test (tests/power/init).
TOKEN = "power-cut-test-token"
DISK_BYTES = 256 << 20
# Emulated, and the machine may be busy with other tests.
READY_LIMIT_SECONDS = 300
PROGRESS_LIMIT_SECONDS = 300
STOP_LIMIT_SECONDS = 120
COPY_LIMIT_SECONDS = 600
GONE_LIMIT_SECONDS = 60
# What every writer has to get done before each cut: it meets all of them at work.
PROGRESS = 3
CUT_SECONDS = (1.0, 6.0)


class Appliance:
    """The machine with the appliance, at one pair of ports, which no other program gets between its
    lives."""

    def __init__(self, title, scratch):
        self.nfs = f"127.0.0.1:{held_port()}"
        self.api = f"http://127.0.0.1:{held_port()}"
        self._token_file = scratch / "token"
        command = [
            HERE / "server", "--data-dir", scratch / "machine", "--nfs-listen", self.nfs,
            "--api-listen", self.api.removeprefix("http://"), "--squash", "no_root_squash",
        ]
        self.process = Process(title, command, scratch / "logs" / f"{title}.log")

    def start(self):
        """Boots it and returns when it serves."""
        self.process.start()
        self.process.wait_ready(READY_LIMIT_SECONDS, self._is_ready)

    def _is_ready(self):
        try:
            with urllib.request.urlopen(f"{self.api}/readyz", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def command(self, *words):
        """Runs `slackwater`, which has to succeed."""
        access = ["--api", self.api, "--token-file", self._token_file, "--timeout", "120"]
        return run(program("slackwater"), *words, *access, limit_seconds=COPY_LIMIT_SECONDS)


class Disk:
    """The disk under test: mounted here by the driver, copied from any appliance."""

    def __init__(self, scratch):
        self.path = f"{scratch.name}.img"
        self.target = scratch / "target"
        self._scratch = scratch

    def make(self, appliance):
        """An empty ext4, as a file of the appliance."""
        image = self._scratch / "empty.img"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", image)
        appliance.command("import", image, self.path)
        image.unlink()

    def attach(self, appliance):
        """Mounts it over FUSE."""
        self._driver("attach", appliance, "--file", self.path)

    def detach(self, appliance):
        """Unmounts it."""
        self._driver("detach", appliance)

    def _driver(self, word, appliance, *more):
        run(
            program("slackwater-driver"), word, "--api", appliance.api, "--nfs", appliance.nfs,
            "--token-file", self._scratch / "token", "--state-dir", self._scratch / "state",
            "--attach", "fuse", *more, self.target, limit_seconds=PROGRESS_LIMIT_SECONDS,
        )

    def verify(self, appliance, notes, is_clean):
        """Copies it as the appliance has it now, and checks the copy."""
        copy = self._scratch / "copy.img"
        appliance.command("export", "--force", "--file", self.path, copy)
        with looped(copy) as device:
            if not is_clean:
                with mounted(device, self._scratch / "copy"):
                    pass  # the kernel has replayed the journal
            run("e2fsck", "-fn", device)
            with mounted(device, self._scratch / "copy", "ro,noload"):
                writers.check(self._scratch / "copy", notes)
        copy.unlink()


@contextlib.contextmanager
def looped(image):
    """A loop device on an image of this machine, for a while.

    `mount -o loop` looks at the files of all loop devices, and so does e2fsck of a file: they
    would wait for the server that is away. This and e2fsck of a device do not.
    """
    device = run("losetup", "--find", "--show", image).strip()
    # Detached while it is open, it goes with its last user: with this process, however that ends.
    user = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        run("losetup", "--detach", device)
        yield device
    finally:
        os.close(user)


@contextlib.contextmanager
def mounted(device, point, options="rw"):
    """A device with an ext4, mounted for a while."""
    point.mkdir(exist_ok=True)
    run("mount", "-t", "ext4", "-o", options, device, point)
    try:
        yield
    finally:
        run("umount", point)


def program(name):
    """One of the project's programs."""
    return pathlib.Path(os.environ["POWER_PROGRAMS"]) / name


class Crew:
    """The writers, and their notes."""

    def __init__(self, scratch, root, seed):
        self.notes = scratch / "notes"
        self.notes.mkdir()
        self._writers = [
            Process(f"writer-{kind}",
                    [sys.executable, HERE / "writers.py", kind, root, self.notes, seed],
                    scratch / "logs" / f"writer-{kind}.log")
            for kind in writers.KINDS
        ]

    def start(self):
        """Lets them begin."""
        for writer in self._writers:
            writer.start()

    def done(self):
        """What each got acknowledged; all have to be at work."""
        for writer in self._writers:
            require(writer.is_running(), f"{writer.title} has ended:\n{writer.tail(8)}")
        return [writers.done(self.notes / kind) for kind in writers.KINDS]

    def wait_for_progress(self, since):
        """Returns once each got something done."""
        wait_until(f"every writer has {PROGRESS} more than {since} changes",
                   PROGRESS_LIMIT_SECONDS,
                   lambda: all(now >= then + PROGRESS
                               for now, then in zip(self.done(), since, strict=True)))

    def stop(self):
        """Lets them end in order."""
        (self.notes / "stop").touch()
        for writer in self._writers:
            wait_until(f"{writer.title} ends", PROGRESS_LIMIT_SECONDS,
                       lambda writer=writer: not writer.is_running())
            code = writer.stop()
            require(code == 0, f"{writer.title} ended with {code}:\n{writer.tail(8)}")


def cut(number, appliance, aside, disk, crew, chance):
    """One cut: under the writers, verified aside, ridden out."""
    wait = chance.uniform(*CUT_SECONDS)
    time.sleep(wait)
    crew.done()
    appliance.process.kill()
    began = time.monotonic()
    aside.start()
    acknowledged = crew.done()
    disk.verify(aside, crew.notes, is_clean=False)
    require(crew.done() == acknowledged, "something was acknowledged while no server was there")
    # Another cut: nobody writes.
    aside.process.kill()
    appliance.start()
    crew.wait_for_progress(acknowledged)
    counts = ", ".join(f"{kind} {count}" for kind, count in zip(writers.KINDS, acknowledged))
    print(f"cut {number} after {wait:.1f} s: all there ({counts}); e2fsck clean; "
          f"went on within {time.monotonic() - began:.0f} s", flush=True)


def require_nothing_left(scratch):
    """No mount, loop device or process of ours."""

    def left():
        found = [line.split()[4] for line in open("/proc/self/mountinfo", encoding="utf-8")
                 if line.split()[4].startswith(f"{scratch}/")]
        found += [str(device) for device in loop_devices(scratch)]
        return found + [
            " ".join(words)[:120] for pid, words in processes().items()
            if pid not in (1, os.getpid()) and any(str(scratch) in word for word in words)
        ]

    # The FUSE process and its mount may outlive the last disk by a little.
    deadline = time.monotonic() + GONE_LIMIT_SECONDS
    while left():
        require(time.monotonic() < deadline, f"left behind: {left()}")
        time.sleep(0.5)


def test(cuts, scratch, seed):
    """The whole test."""
    chance = random.Random(seed)
    (scratch / "token").write_text(f"{TOKEN}\n")
    (scratch / "token").chmod(0o600)
    appliance = Appliance("appliance", scratch)
    aside = Appliance("aside", scratch)
    disk = Disk(scratch)
    appliance.start()
    disk.make(appliance)
    disk.attach(appliance)
    crew = Crew(scratch, disk.target, seed)
    crew.start()
    crew.wait_for_progress([0] * len(writers.KINDS))
    for number in range(1, cuts + 1):
        cut(number, appliance, aside, disk, crew, chance)
    crew.stop()
    disk.detach(appliance)
    disk.verify(appliance, crew.notes, is_clean=True)
    code = appliance.process.stop(STOP_LIMIT_SECONDS)
    require(code == 0, f"the appliance ended with {code} after SIGTERM")
    require_nothing_left(scratch)


def main():
    """Entry point."""
    cuts, scratch = int(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    seed = os.environ.get("SLACKWATER_POWER_SEED") or str(random.SystemRandom().getrandbits(32))
    os.environ.setdefault("POWER_DISK_SEED", seed)
    print(f"ext4 over power cuts: {cuts} cuts, SLACKWATER_POWER_SEED={seed}, "
          f"POWER_DISK_SEED={os.environ['POWER_DISK_SEED']}", flush=True)
    try:
        test(cuts, scratch, seed)
    except (Failure, writers.Wrong) as failure:
        print(f"FAILED: {failure}", flush=True)
        return 1
    print(f"ext4 over power cuts: {cuts} cuts, nothing lost", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

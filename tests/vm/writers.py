"""What writes while the power of the appliance's machine is cut, and what of it was acknowledged.

    Importers      threads of this program: files by REST, one call of `slackwater import` each
    KernelWriter   another machine: files on a mount of its kernel's NFS client, each synced

Invariants: a file counts as acknowledged when its call has ended without an error, not before; no file is written twice.
"""

import contextlib
import hashlib
import os
import subprocess
import threading
import time

from emulated import BOOT_LIMIT_SECONDS, Failure

IMPORTERS = 2
IMPORTED_BYTES = 512 << 10
# Ten times what an idle emulated machine takes for the files that are waited for.
WRITE_LIMIT_SECONDS = 600
LOOK_SECONDS = 0.2
# What qemu's own network calls the machine that it runs on.
HOST = "10.0.2.2"


class Importers:
    """Import one file after the other, each of other bytes, until a call fails."""

    def __init__(self, appliance):
        self._appliance = appliance
        # By writer: path and SHA-256 of what was acknowledged.
        self._acknowledged = [[] for _ in range(IMPORTERS)]
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(IMPORTERS)]

    @contextlib.contextmanager
    def running(self):
        """They write from the begin of this to its end, by which the appliance has to be down: that ends them."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        except BaseException:
            # So that they end here, too.
            self._appliance.machine.cut_power()
            raise
        finally:
            for thread in self._threads:
                thread.join()

    def _write(self, number):
        source = self._appliance.scratch / f"import-{number}"
        while True:
            content = os.urandom(IMPORTED_BYTES)
            source.write_bytes(content)
            path = f"disks/imported-{number}-{len(self._acknowledged[number])}.img"
            try:
                ended = self._appliance.call("import", source, path, may_fail=True)
            except subprocess.TimeoutExpired:
                return
            if ended is None:
                return
            self._acknowledged[number].append((path, hashlib.sha256(content).hexdigest()))

    def until_acknowledged(self, count):
        """Waits until each has so many."""
        deadline = time.monotonic() + WRITE_LIMIT_SECONDS
        while min(map(len, self._acknowledged)) < count:
            if time.monotonic() > deadline or not all(thread.is_alive() for thread in self._threads):
                found = [len(files) for files in self._acknowledged]
                raise Failure(f"imports acknowledged before one failed or it was too late: {found}, expected {count} each")
            time.sleep(LOOK_SECONDS)

    def require_all(self):
        """All that was acknowledged is there, whole; how many files that are."""
        files = [file for files in self._acknowledged for file in files]
        for path, digest in files:
            if hashlib.sha256(self._appliance.read(path)).hexdigest() != digest:
                raise Failure(f"{path} was acknowledged, and has other bytes")
        return len(files)


# A file counts once it is synced: dd ends without an error only then.
WRITER = """
number=0
while [ ! -e /run/stop ]; do
    number=$((number + 1))
    head -c 200000 /dev/urandom >/run/content
    dd if=/run/content of=/mnt/disks/synced-$number.img bs=64K conv=fsync status=none
    echo "synced-$number.img $(sha256sum </run/content)" >>/run/acknowledged
done
"""


class KernelWriter:
    """Another machine's kernel, with a mount of the appliance that waits for it while it is down."""

    def __init__(self, client, appliance):
        self._client = client
        self._appliance = appliance

    def mount(self):
        """Mounts it at /mnt. Without mount.nfs, which the machine has not, the kernel wants the address once more."""
        port = self._appliance.machine.nfs
        self._client.root(
            f"mount -i -t nfs -o addr={HOST},vers=3,proto=tcp,port={port},mountproto=tcp,mountport={port},nolock,hard,nosuid,nodev "
            f"{HOST}:{self._appliance.call('mount-path')} /mnt")

    def sha256(self, path):
        """Of a file there."""
        return self._client.root(f"sha256sum </mnt/{path}").split()[0]

    def begin(self):
        """It writes from now on."""
        self._client.root("cat >/run/writer && systemd-run --quiet --unit=writer bash -e /run/writer", WRITER.encode())

    def _count(self):
        return int(self._client.root("cat /run/acknowledged 2>/dev/null | wc -l"))

    def until_acknowledged(self, count):
        """Waits until it has so many files; how many it has."""
        deadline = time.monotonic() + BOOT_LIMIT_SECONDS
        while (found := self._count()) < count:
            if time.monotonic() > deadline:
                raise Failure(f"the other machine has synced {found} files, expected {count}")
            time.sleep(LOOK_SECONDS)
        return found

    def require_all(self):
        """It has ended in order, and all that it has synced is there, as the appliance gives it; how many files."""
        self._client.root("touch /run/stop && while systemctl --quiet is-active writer; do sleep 0.2; done")
        if (failed := self._client.root("systemctl is-failed writer || true")) == "failed":
            raise Failure(f"the other machine's writer is {failed}: {self._client.root('journalctl --no-pager --unit writer')}")
        # Not by what it remembers.
        self._client.root("echo 3 >/proc/sys/vm/drop_caches")
        self._client.root("while read -r name digest _; do echo \"$digest  /mnt/disks/$name\"; done </run/acknowledged "
                          "| sha256sum --check --quiet")
        return self._count()

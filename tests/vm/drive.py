#!/usr/bin/env python3
"""Makes the appliance's virtual machine, boots it, and uses it as people do: from its console and from another machine.

    scratch/packages/      the packages, and in newer/ their next release
    scratch/vm/            what deploy/vm/build makes of them
    cache/debian-HASH.tar  the Debian below them, made once for each way to make it
    scratch/system.qcow2   the machine's system disk, over that image
    scratch/data.img       its data disk, empty at first
    scratch/client.qcow2   the system disk of a second machine of the image, which mounts what the first serves

Each step goes on where the one before ended. The first that fails ends the run.
"""

import argparse
import hashlib
import itertools
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "guest")]

from emulated import BOOT_LIMIT_SECONDS, LEASH_THAT_ASKS, Failure, Machine, held_ports
from packaged import NEWER, folder_of_run, newer, packages, run_to_its_end
from writers import Importers, KernelWriter

DATA_BYTES, GROWN_BYTES = 2 << 30, 3 << 30
# Ten times what a network and a machine without other work take to make the Debian and the image.
BUILD_LIMIT_SECONDS = 2400
# After this time without a run a Debian of another revision goes.
UNUSED_SECONDS = 14 * 86400
CHOOSES_THE_DEBIAN = ("debian", "files/etc/initramfs-tools/modules", "files/etc/initramfs-tools/conf.d/slackwater-vm")
CONTENT_BYTES = 24 << 20
CALL_LIMIT_SECONDS = 300
SERVES = rb"REST: https://ADDRESS:8049"
# With the address that qemu gives.
MOUNT_LINE = (
    "mount -t nfs -o vers=3,proto=tcp,port=2049,mountport=2049,nolock,hard,nosuid,nodev "
    '10.0.2.15:"$(slackwater mount-path)" /mnt'
)
SSH_FAILED = 255
SHOWN_LINES = 60


class Appliance:
    """The machine as its users see it: at the same ports after each boot."""

    _boots = itertools.count(1)

    def __init__(self, scratch, programs):
        self.scratch = scratch
        self.programs = programs
        self.token = None
        self.machine = None
        self._ports = held_ports()

    def boot(self, *disks, system="system.qcow2", uefi=False):
        """Boots it with these disks."""
        disks = [self.scratch / name for name in disks]
        self.machine = Machine(self.scratch, self.scratch / system, disks, next(self._boots), self._ports, uefi)

    def call(self, *words, may_fail=False):
        """The command `slackwater` on this machine."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLACKWATER")}
        environment.update(SLACKWATER_API=f"https://localhost:{self.machine.rest}", SLACKWATER_TOKEN=self.token,
                           SLACKWATER_CA=str(self.scratch / "ca.pem"))
        done = subprocess.run([self.programs / "slackwater", *words], capture_output=True, text=True, check=False,
                              env=environment, timeout=CALL_LIMIT_SECONDS)
        if done.returncode and not may_fail:
            raise Failure(f"slackwater {' '.join(map(str, words))}: {done.stderr}")
        return done.stdout.strip() if not done.returncode else None

    def read(self, path):
        """A file by NFS, with a client of others."""
        below = self.call("mount-path")
        port = self.machine.nfs
        done = subprocess.run(
            ["nfs-cat", f"nfs://127.0.0.1{below}/{path}?version=3&nfsport={port}&mountport={port}"],
            capture_output=True, check=False, timeout=CALL_LIMIT_SECONDS)
        if done.returncode:
            raise Failure(f"nfs-cat {path}: {done.stderr.decode('utf-8', 'replace')}")
        return done.stdout

    def _ssh(self, script):
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=60",
                   "IdentitiesOnly=yes", "BatchMode=yes")
        return ["ssh", "-F", "/dev/null", "-p", str(self.machine.ssh), "-i", self.scratch / "key",
                *(word for option in options for word in ("-o", option)), "root@127.0.0.1", script]

    def root(self, script, input_bytes=b""):
        """A script of root's there, by ssh with the key of the seed; its output."""
        deadline = time.monotonic() + BOOT_LIMIT_SECONDS
        while True:
            done = subprocess.run(self._ssh(script), input=input_bytes, capture_output=True, check=False,
                                  timeout=CALL_LIMIT_SECONDS)
            # ssh's own: its server may not be there yet.
            if done.returncode == SSH_FAILED and time.monotonic() < deadline:
                time.sleep(1)
                continue
            if done.returncode:
                raise Failure(f"{script}: {(done.stdout + done.stderr).decode('utf-8', 'replace')}")
            return done.stdout.decode("utf-8", "replace").strip()

    def shut_down(self):
        """Has it end by itself."""
        # The call may end with the machine.
        subprocess.run(self._ssh("systemctl poweroff --no-block"), capture_output=True, check=False,
                       timeout=CALL_LIMIT_SECONDS)
        self.machine.await_end()

    def end(self):
        """Ends it, if it runs."""
        if self.machine:
            self.machine.cut_power()

    def require_content(self, name):
        """A file is what was written to it, as a client of NFS reads it."""
        require(self.read(name) == (self.scratch / "content").read_bytes(), f"{name}: NFS gives other bytes")

    def require_no_failed_unit(self):
        """systemd has no unit that failed."""
        failed = self.root("systemctl --failed --no-legend --plain")
        require(not failed, f"units that failed: {failed}")

    def until_served(self):
        """Waits for the console to say that it serves, and for an answer; how long that took since power-on."""
        self.machine.await_console(SERVES)
        deadline = time.monotonic() + BOOT_LIMIT_SECONDS
        while self.call("stats", may_fail=True) is None:
            if time.monotonic() > deadline:
                raise Failure("REST does not answer")
            time.sleep(0.5)
        return time.monotonic() - self.machine.begun


def require(condition, otherwise):
    """Fails with this text unless it is so."""
    if not condition:
        raise Failure(otherwise)


def change_settings(content):
    """As a release may, of which dpkg then asks."""
    settings = content / "etc/slackwater/config.toml"
    if settings.exists():
        settings.write_text(settings.read_text() + "\n# Of the next release.\n")


def build(scratch, cache, programs):
    """Makes the image, and disks for a machine of it."""
    found = packages(scratch / "packages", programs)
    (scratch / "newer").mkdir()
    for package in found:
        if not package.name.startswith("slackwater-driver_"):
            newer(package, scratch / "newer", change_settings)
    chosen = b"".join((PROJECT / "deploy/vm" / name).read_bytes() for name in CHOOSES_THE_DEBIAN)
    base = cache / f"debian-{hashlib.sha256(chosen).hexdigest()[:16]}.tar"
    cache.mkdir(parents=True, exist_ok=True)
    for other in cache.glob("debian-*"):
        # Another clone may use it.
        if other != base and time.time() - other.stat().st_mtime > UNUSED_SECONDS:
            other.unlink(missing_ok=True)
    if base.exists():
        base.touch()
    run_to_its_end(
        # By SIGTERM at first, so that it tidies up.
        [*LEASH_THAT_ASKS, "timeout", "--kill-after=60", str(BUILD_LIMIT_SECONDS), PROJECT / "deploy/vm/build",
         scratch / "packages", scratch / "vm"],
        env=dict(os.environ, BASE=str(base), TMPDIR=str(scratch)), stdout=subprocess.DEVNULL)
    (image,) = (scratch / "vm").glob("*.qcow2")
    print(f"vm: the image has {image.stat().st_size >> 20} MiB", flush=True)
    for name in ("system", "other-system", "client"):
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", image, scratch / f"{name}.qcow2"],
                       check=True)
    for name in ("data.img", "empty.img"):
        with (scratch / name).open("wb") as disk:
            disk.truncate(DATA_BYTES)
    (scratch / "content").write_bytes(os.urandom(CONTENT_BYTES))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", scratch / "key"], check=True)
    subprocess.run(["mkfs.vfat", "-n", "SLACKWATER", "-C", scratch / "seed.img", "1024"], check=True,
                   stdout=subprocess.DEVNULL)
    (scratch / "hostname").write_text("storage-1\n")
    (scratch / "authorized_keys").write_bytes((scratch / "key.pub").read_bytes())
    for name in ("hostname", "authorized_keys"):
        subprocess.run(["mcopy", "-i", scratch / "seed.img", scratch / name, f"::/{name}"], check=True)


def a_disk_is_taken_that_is_attached_later(appliance):
    """Without a data disk it does not serve, and says so; it takes the one that is attached. Its root can log in before."""
    appliance.boot("seed.img")
    appliance.machine.await_console(rb"NOT SERVING: there is no data disk")
    require(appliance.root("hostname") == "storage-1", "the seed's name does not count")
    appliance.machine.attach_disk(appliance.scratch / "data.img")
    appliance.machine.await_console(SERVES)
    appliance.token = appliance.root("cat /etc/slackwater/admin-token")
    (appliance.scratch / "ca.pem").write_text(appliance.root("cat /etc/slackwater/ca.pem") + "\n")
    appliance.until_served()
    said = appliance.machine.console
    require(b"token of" not in said and b"password" not in said, "secrets are shown to one that has a key")
    appliance.require_no_failed_unit()


def files_are_written_cloned_and_read(appliance):
    """As from another machine: by REST in TLS, and by NFS."""
    appliance.call("import", appliance.scratch / "content", "disks/one.img", "--verify")
    snapshot = appliance.call("snapshot", "create", "disks/one.img")
    appliance.call("clone", snapshot, "disks/two.img")
    appliance.require_content("disks/two.img")
    # It does not wait long for its own REST.
    deadline = time.monotonic() + BOOT_LIMIT_SECONDS
    while "  store:      takes writes" not in (said := appliance.root("slackwater-vm status")):
        require(time.monotonic() < deadline, f"its status: {said}")
        time.sleep(1)
    for line in (MOUNT_LINE, "  clock:      "):
        require(line in said, f"its status lacks `{line}`: {said}")


def a_power_cut_loses_nothing(appliance):
    """What was acknowledged before is there after the power was cut in the middle of writes, and more room on the disk that
    grew; no seed is needed any more."""
    writers = Importers(appliance)
    with writers.running():
        writers.until_acknowledged(4)
        appliance.machine.cut_power()
    os.truncate(appliance.scratch / "data.img", GROWN_BYTES)
    appliance.boot("data.img")
    seconds = appliance.until_served()
    print(f"vm: {seconds:.0f} s from power-on to an answer by REST", flush=True)
    for name in ("one", "two"):
        appliance.require_content(f"disks/{name}.img")
    print(f"vm: {writers.require_all()} imports acknowledged before the power was cut", flush=True)
    appliance.root("bash --login -c 'slackwater check --data'")
    require(appliance.root("hostname") == "storage-1", "the seed's name counts no more")
    size_kib = int(appliance.root("df -k --output=size /data | tail -n 1"))
    require(size_kib << 10 > DATA_BYTES, f"the data disk did not grow: {size_kib} KiB")
    appliance.require_no_failed_unit()


def another_machine_mounts_it_through_a_power_cut(appliance):
    """The NFS client of another machine's kernel reads a clone, and writes while the power is cut: it goes on, and what was
    synced is there."""
    client = Appliance(appliance.scratch, appliance.programs)
    client.boot("seed.img", system="client.qcow2")
    try:
        client.machine.await_console(rb"NOT SERVING: there is no data disk")
        writer = KernelWriter(client, appliance)
        writer.mount()
        content = hashlib.sha256((appliance.scratch / "content").read_bytes()).hexdigest()
        require(writer.sha256("disks/two.img") == content, "the other machine reads other bytes of the clone")
        writer.begin()
        before = writer.until_acknowledged(10)
        appliance.machine.cut_power()
        appliance.boot("data.img")
        appliance.until_served()
        writer.until_acknowledged(before + 10)
        print(f"vm: {writer.require_all()} files synced by another machine, {before} of them before the power was cut", flush=True)
    except Failure as error:
        lines = client.machine.console.decode("utf-8", "replace").splitlines()[-SHOWN_LINES:]
        raise Failure(f"{error}; the other machine:\n" + "\n".join(lines)) from error
    finally:
        client.machine.cut_power()
    appliance.root("bash --login -c 'slackwater check --data'")


def its_console_says_whether_it_serves(appliance):
    """After a crash it serves again; stopped, or with settings that are wrong, it says so."""
    appliance.root("systemctl kill --signal=KILL slackwaterd")
    deadline = time.monotonic() + BOOT_LIMIT_SECONDS
    while appliance.root("systemctl show --property=NRestarts,SubState --value slackwaterd").split() != ["1", "running"]:
        require(time.monotonic() < deadline, "it was not started again")
        time.sleep(1)
    said = len(appliance.machine.console)
    appliance.root("echo wrong >>/etc/slackwater/config.toml; ! systemctl restart slackwaterd")
    appliance.machine.await_console(rb"NOT SERVING: slackwaterd does not run", said)
    require("NOT SERVING" in appliance.root("slackwater-vm status"), "its status does not say that it does not serve")
    said = len(appliance.machine.console)
    appliance.root("sed -i '/^wrong$/d' /etc/slackwater/config.toml && systemctl restart slackwaterd")
    appliance.machine.await_console(SERVES, said)


def an_update_keeps_the_data(appliance):
    """The next release's packages, as an administrator installs them; and the machine is started again in order."""
    for package in sorted((appliance.scratch / "newer").glob("*.deb")):
        appliance.root(f"cat >/tmp/{package.name}", package.read_bytes())
    appliance.root("dpkg --install /tmp/*.deb && rm /tmp/*.deb")
    require(NEWER in appliance.root("dpkg-query --show --showformat='${Version}' slackwater"), "it has the old release")
    require(appliance.root("systemctl is-active slackwaterd") == "active", "slackwaterd does not run")
    appliance.until_served()
    appliance.shut_down()
    appliance.boot("data.img")
    appliance.until_served()
    appliance.require_content("disks/one.img")
    appliance.require_no_failed_unit()


def no_store_begins_beside_one_that_is_missing(appliance):
    """With an empty disk in the place of its own it serves nothing, and leaves that as it is."""
    appliance.shut_down()
    appliance.boot("empty.img")
    appliance.machine.await_console(rb"NOT SERVING: the data disk with the UUID \S+ is missing")
    require(appliance.call("stats", may_fail=True) is None, "it serves")
    appliance.machine.cut_power()
    require((appliance.scratch / "empty.img").stat().st_blocks == 0, "something was written to the empty disk")


def another_system_disk_goes_on_with_the_data(appliance):
    """A new machine of the image, by UEFI, with the data disk of the first. Without a key of ssh it shows its secrets."""
    appliance.boot("data.img", system="other-system.qcow2", uefi=True)
    appliance.until_served()
    appliance.require_content("disks/two.img")
    appliance.machine.await_console(rb"password of root on this console: \S+\r?\n")
    token = appliance.machine.await_console(rb"token of the administrator: (\S+)\r?\n")
    require(token.group(1).decode() == appliance.token, "the console shows another token")
    authority = appliance.machine.await_console(rb"-----BEGIN CERTIFICATE-----[^-]*-----END CERTIFICATE-----")
    shown = authority.group(0).decode("ascii", "replace").split()
    require(shown == (appliance.scratch / "ca.pem").read_text().split(), "the console shows another authority")
    appliance.machine.cut_power()


STEPS = [
    a_disk_is_taken_that_is_attached_later, files_are_written_cloned_and_read, a_power_cut_loses_nothing,
    another_machine_mounts_it_through_a_power_cut, its_console_says_whether_it_serves, an_update_keeps_the_data, no_store_begins_beside_one_that_is_missing,
    another_system_disk_goes_on_with_the_data,
]
SHORT = STEPS[:3]


def run(appliance, steps):
    """Runs them; whether all passed."""
    for step in steps:
        name, started = step.__name__.replace("_", " "), time.monotonic()
        try:
            step(appliance)
        except (Failure, OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"failed {name}: {error}", flush=True)
            if appliance.machine:
                lines = appliance.machine.console.decode("utf-8", "replace").splitlines()
                print("\n".join(f"    {line}" for line in lines[-SHOWN_LINES:]), flush=True)
            return False
        print(f"ok {name} ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def main():
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--scratch", type=pathlib.Path, required=True)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    steps = SHORT if options.short else STEPS
    appliance = Appliance(options.scratch, options.programs)
    with folder_of_run("vm", options.scratch, options.keep, appliance.end):
        build(options.scratch, options.cache, options.programs)
        passed = run(appliance, steps)
        print(f"vm: {len(steps)} steps passed" if passed else "vm: FAILED", flush=True)
        return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

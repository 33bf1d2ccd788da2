"""A machine of the image, emulated: its disks, its console, and the ports by which it is reached.

    this program -- loopback ports --> qemu's own network --> the machine: REST, NFS, ssh
                 <-- console.log ----- ttyS0: GRUB, the kernel, the login
                 --- monitor --------> a disk that is attached while it runs

Invariants: what was made here is killed when this program ends, however that is; no port of this machine is opened but on
loopback; each boot has a console of its own.
"""

import re
import socket
import subprocess
import time

import ports
import stall

MEMORY_MEBIBYTES = 1024
# Ten times what an idle machine takes to its login; beyond that it hangs.
BOOT_LIMIT_SECONDS = 900
LOOK_SECONDS = 0.5
MONITOR_LIMIT_SECONDS = 60
FIRMWARE = "/usr/share/ovmf/OVMF.fd"
# Killed when this program is gone, however that ended.
LEASH = ("setpriv", "--pdeathsig", "KILL", "--")
LEASH_THAT_ASKS = ("setpriv", "--pdeathsig", "TERM", "--")
# What the console says once Debian's own services run.
USERLAND_BEGINS = b"login:"


class Failure(Exception):
    """What was expected is not so."""


def held_ports():
    """Ports of this machine for REST, NFS and ssh of one that is emulated, for all its boots."""
    return tuple(ports.held_port() for _ in range(3))


class Machine:
    """One that runs, reached at such ports."""

    def __init__(self, scratch, system, disks, number, reached, uefi=False):
        self.console_path = scratch / f"console-{number}.log"
        self._monitor_path = scratch / f"monitor-{number}"
        self._errors_path = scratch / f"qemu-{number}.log"
        self.rest, self.nfs, self.ssh = reached
        self._command = self._words(system, disks, uefi)
        self.boots = 0
        self.begun = None
        self._boot()

    def _words(self, system, disks, uefi):
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{port}-:{inside}" for port, inside in
                           ((self.rest, 8049), (self.nfs, 2049), (self.ssh, 22)))
        words = [
            *LEASH, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MEBIBYTES), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-serial", f"file:{self.console_path}", "-monitor", f"unix:{self._monitor_path},server=on,wait=off",
            "-netdev", f"user,id=network{forwards}", "-device", "virtio-net-pci,netdev=network",
            "-drive", f"file={system},if=virtio,format=qcow2,cache=unsafe",
        ]
        if uefi:
            words += ["-bios", FIRMWARE]
        for disk in disks:
            # What the machine has synced is to survive its end, not that of this machine.
            words += ["-drive", f"file={disk},if=virtio,format=raw,cache=writeback"]
        return words

    def _boot(self):
        self.boots += 1
        self.console_path.unlink(missing_ok=True)
        self._monitor_path.unlink(missing_ok=True)
        self.begun = time.monotonic()
        with self._errors_path.open("w") as errors:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    @property
    def console(self):
        """What it has said."""
        return self.console_path.read_bytes() if self.console_path.exists() else b""

    def await_console(self, pattern, since=0, limit_seconds=BOOT_LIMIT_SECONDS):
        """Waits until the console has what the pattern matches, after so many bytes; the match. One whose kernel stands still
        before its login is booted again."""
        deadline = time.monotonic() + limit_seconds
        while True:
            said = self.console
            if match := re.search(pattern, said[since:]):
                return match
            if USERLAND_BEGINS not in said and stall.is_one(said) and self.boots < stall.BOOTS_MAX:
                print(f"vm: boot {self.boots} of {stall.BOOTS_MAX}: {stall.EXPLAINED}: it boots again", flush=True)
                self.cut_power()
                self._boot()
                deadline = time.monotonic() + limit_seconds
            if self._process.poll() is not None:
                raise Failure(f"qemu ended with {self._process.returncode}: {self._errors_path.read_text()}")
            if time.monotonic() > deadline:
                raise Failure(f"the console never said {pattern}")
            time.sleep(LOOK_SECONDS)

    def attach_disk(self, path):
        """Attaches a disk while it runs."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(MONITOR_LIMIT_SECONDS)
            monitor.connect(str(self._monitor_path))
            self._answer(monitor)
            for line in (f"drive_add 0 if=none,id=added,file={path},format=raw,cache=writeback",
                         "device_add virtio-blk-pci,drive=added,id=added-disk"):
                monitor.sendall(line.encode() + b"\n")
                said = self._answer(monitor)
                if b"Error" in said or b"rror:" in said:
                    raise Failure(f"qemu: {line}: {said.decode('utf-8', 'replace')}")

    @staticmethod
    def _answer(monitor):
        """What qemu says up to its prompt."""
        said = b""
        while not said.endswith(b"(qemu) "):
            part = monitor.recv(65536)
            if not part:
                raise Failure(f"qemu's monitor ended: {said}")
            said += part
        return said

    def cut_power(self):
        """Ends it, without a word to what runs there."""
        self._process.kill()
        self._process.wait()

    def await_end(self, limit_seconds=BOOT_LIMIT_SECONDS):
        """Waits until it has ended by itself."""
        self._process.wait(limit_seconds)

"""A qemu guest and the line to its agent.

    host                                   guest
    Machine.run(script) -- ttyS1 socket -> agent -> sh script
              (exit code, output) <------- agent
    console.log <---------- ttyS0 -------- kernel messages, verdicts

Invariants: one command is under way on a port at a time; a number is never used twice, so a late
answer to a command that ran out of time is not taken for the next one's.
"""

import base64
import socket
import subprocess
import time

import stall
from appliance import LEASH

MEMORY_MEBIBYTES = 768
# Emulated on every machine: /dev/kvm of a machine that is itself virtual may be there and fail.
ACCELERATOR = "tcg,thread=multi"
# Emulated, a busy two-core machine takes half a minute to the first prompt, one that is five times
# slower two and a half; more than twice that is stuck.
BOOT_LIMIT_SECONDS = 360
# How often the console of a guest that boots is looked at.
LOOK_SECONDS = 5
# How long a guest whose command ran out of time may take to answer again before it is given up.
RECOVER_LIMIT_SECONDS = 50
# One answer: the agent's bound in base64 and a little more.
ANSWER_BYTES_MAX = 64 << 10


class GuestError(Exception):
    """A command in the guest failed; the text is its output."""


class GuestLost(Exception):
    """The guest no longer answers."""


class _Port:
    """One serial port: numbered commands out, numbered answers in."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._pending = b""
        self._number = 0

    def _line(self, deadline):
        while b"\n" not in self._pending:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError("the guest did not answer in time")
            self._socket.settimeout(left_seconds)
            received = self._socket.recv(65536)
            if not received:
                raise GuestLost("the guest's control port closed")
            self._pending += received
            if len(self._pending) > ANSWER_BYTES_MAX:
                raise GuestLost("the guest sent an answer beyond its bound")
        line, self._pending = self._pending.split(b"\n", 1)
        return line.decode("ascii", "replace").split()

    def wait(self, number, limit_seconds):
        """The exit code and output of command `number`; older answers are dropped."""
        deadline = time.monotonic() + limit_seconds
        while True:
            words = self._line(deadline)
            if len(words) == 3 and words[0] == str(number):
                text = b"" if words[2] == "-" else base64.b64decode(words[2])
                return int(words[1]), text.decode("utf-8", "replace").strip()

    def send(self, script):
        """Sends a script and returns its number."""
        self._number += 1
        encoded = base64.b64encode(script.encode())
        self._socket.settimeout(RECOVER_LIMIT_SECONDS)
        self._socket.sendall(b"%d %s\n" % (self._number, encoded))
        return self._number

    def close(self):
        self._socket.close()


class Machine:
    """The guest. `run` is what scenarios use."""

    def __init__(self, scratch, kernel, initramfs):
        self.console_path = scratch / "console.log"
        self._stuck = None
        for number in range(1, stall.BOOTS_MAX + 1):
            try:
                # The last one has all its time.
                self._boot(scratch, kernel, initramfs, number < stall.BOOTS_MAX)
                return
            except stall.Stalled as error:
                print(f"guest: boot {number} of {stall.BOOTS_MAX}: {error}: it boots again", flush=True)

    def _boot(self, scratch, kernel, initramfs, is_watched):
        """Starts qemu, and waits for the agent. Stalled if its kernel says that it stands still."""
        sockets = [scratch / "control", scratch / "spare"]
        for path in (self.console_path, *sockets):
            path.unlink(missing_ok=True)
        command = [
            *LEASH, "qemu-system-x86_64", "-accel", ACCELERATOR, "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MEBIBYTES), "-kernel", str(kernel), "-initrd", str(initramfs),
            "-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check",
            "-no-reboot", "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none",
            "-serial", f"file:{self.console_path}",
            "-netdev", "user,id=network", "-device", "virtio-net-pci,netdev=network",
        ]
        for name in sockets:
            command += ["-chardev", f"socket,id={name.name},path={name},server=on,wait=off"]
            command += ["-serial", f"chardev:{name.name}"]
        self._errors = (scratch / "qemu.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors
        )
        self._ports = []
        try:
            for name in sockets:
                self._ports.append(self._connect(name))
            self._wait_for_agent(is_watched)
        except (OSError, GuestLost) as error:
            self.stop()
            raise GuestLost(f"the guest did not boot: {error}") from error
        except BaseException:
            self.stop()  # interrupted: nobody else knows of the process yet
            raise

    def _wait_for_agent(self, is_watched):
        deadline = time.monotonic() + BOOT_LIMIT_SECONDS
        while True:
            try:
                return self._ports[0].wait(0, LOOK_SECONDS)
            except TimeoutError:
                # qemu opens it after the line to the agent.
                if is_watched and self.console_path.exists() and stall.is_one(self.console_path.read_bytes()):
                    raise stall.Stalled() from None
                if time.monotonic() > deadline:
                    raise

    def _connect(self, path):
        deadline = time.monotonic() + BOOT_LIMIT_SECONDS
        while True:
            try:
                return _Port(path)
            except (FileNotFoundError, ConnectionRefusedError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise GuestLost(f"qemu ended with {self._process.poll()}") from None
                time.sleep(0.05)

    def run(self, script, limit_seconds=60.0):
        """Runs a shell script in the guest and returns its output, or raises GuestError."""
        if self._stuck is not None:
            raise GuestLost(self._stuck)
        port = self._ports[0]
        number = port.send(f". /functions.sh\n. /writers.sh\n. /driver.sh\nset -eu\n{script}\n")
        code, text = port.wait(number, limit_seconds)
        if code != 0:
            raise GuestError(text or f"exit code {code} and no output from: {script}")
        return text

    def note(self, text):
        """Writes a line to the guest's console, so that its log shows what came when."""
        try:
            self.run(f"cat >/dev/console <<'END'\n--- {text}\nEND", RECOVER_LIMIT_SECONDS)
        except (OSError, GuestLost, GuestError):
            pass  # a note is not worth a verdict; the next command meets the same trouble

    def recover(self):
        """After a failure: is the guest usable? A script that still runs is ended, background
        writers too. What does not even die hangs in the kernel: its place is printed, and every
        later `run` fails."""
        end_writers = "touch /run/writers.stop"
        if self._stuck is not None or self._answers(self._ports[0], end_writers):
            return
        self._answers(self._ports[1], "kill -9 $(cat /run/agent-ttyS1/process)")
        if not self._answers(self._ports[0], end_writers):
            self._stuck = "the guest hangs since an earlier scenario"
            # Blocked tasks with their stacks, on the console.
            self._answers(
                self._ports[1], "echo 9 >/proc/sys/kernel/printk; echo w >/proc/sysrq-trigger"
            )

    def _answers(self, port, script):
        try:
            port.wait(port.send(script), RECOVER_LIMIT_SECONDS)
            return True
        except (OSError, GuestLost):
            return False

    def stop(self):
        """Ends the guest; nothing in it is worth keeping."""
        for port in self._ports:
            port.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

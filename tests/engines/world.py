"""What scenarios act on.

```
plain dockerd (overlay2) --> registry <-- worker a: dockerd, containerd --> driver --meter--\
                                      <-- worker b: ...                                      appliance
```

The registry and the plain Docker stay for the whole run. The appliance and the workers are made when
a scenario first asks for them, and are thrown away after a failed one.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time

import appliance
import leftover
from driver import Driver
from engine import SNAPSHOTTER, Containerd, Docker
from images import Images
from ports import held_port
from process import kill_strangers, processes
from registry import Registry, metered
from releases import DEBIAN
from scenario import require

# Far more than the scenarios write.
CAPACITY = "48GiB"
UNMOUNT_LIMIT_SECONDS = 20


class Server(appliance.Appliance):
    """The appliance, which asks for tokens, and can also stop to answer."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, token=secrets.token_hex(16), **options)
        self._names = {}

    def add_worker(self, name, worker_id=None):
        """Adds a worker, under another name each time; returns that and its join token. The id is that of
        a driver that has files here."""
        self._names[name] = self._names.get(name, 0) + 1
        unique = f"{name}-{self._names[name]}"
        request = {"name": unique} | ({"worker_id": worker_id} if worker_id else {})
        return unique, self.call("POST", "/v1/workers", request)["join_token"]

    @property
    def token(self):
        """The administrator's."""
        return self._token

    def use(self, program):
        """Is another release from the next start on."""
        self._program = program

    def revoke(self, name):
        """The worker reaches no REST call from now on."""
        self.call("DELETE", f"/v1/workers/{name}")

    def pause(self):
        """It keeps its connections and says nothing any more."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    @property
    def url(self):
        """Where REST is served."""
        return f"http://127.0.0.1:{self.api_port}"

    def listing(self, kind):
        """All files or all snapshots."""
        items, after = [], ""
        while True:
            page = self.call("GET", f"/v1/{kind}?limit=1000{after}")
            items += page["items"]
            if not page.get("next"):
                return items
            after = f"&after={appliance.urllib.parse.quote(str(page['next']), safe='')}"


class Worker:
    """One worker: its engines, and with them the driver unless the engines stand in for it. Debian's Docker goes
    with Debian's containerd, a newer one with a newer, which may also be alone."""

    def __init__(self, directory, name, server, control_group, wrapper=(), release=DEBIAN,
                 arguments=()):
        directory.mkdir()
        if "--layers" not in arguments:
            arguments = ("--layers", release.layers, *arguments)
        self.name = name
        self.server = server
        # The one that it has on the appliance.
        self.known_as = None
        self.directory = directory
        self.driver = None
        self.meter = None
        storage, socket = "overlay2", None
        if server:
            plugin = f"slackwater-{directory.parent.name}-{name}"
            port = held_port()
            _, self.meter = metered(directory, "nfs", server.nfs_port, port)
            self.driver = Driver(
                os.environ["SLACKWATER_DRIVER"], directory, name, server.url,
                f"127.0.0.1:{port}", plugin, wrapper, arguments,
            )
            storage, socket = plugin, self.driver.containerd_socket
            # A scenario may have another one run in its place.
            self.own_process = self.driver.process
        self.containerd = Containerd(directory, name, control_group, socket, release, arguments)
        self.docker = None
        if release is DEBIAN:
            self.docker = Docker(directory, name, storage, self.containerd, control_group)
        elif release.has_docker:
            self.docker = Docker(
                directory, name, SNAPSHOTTER, self.containerd, control_group, release,
                release.docker_configuration(socket, arguments, self.containerd.socket),
            )

    @property
    def engines(self):
        """Its engines, each before those that it needs."""
        return [engine for engine in (self.docker, self.containerd) if engine]

    def start(self):
        """Starts all of it, in the order of a booting machine."""
        if self.driver:
            if not self.known_as:
                self.join()
            self.driver.start()
        self._start_engines()

    def join(self, worker_id=None):
        """Becomes a worker of the appliance, with a credential of its own; an id if it was one."""
        self.known_as, join_token = self.server.add_worker(self.name, worker_id)
        self.driver.join(join_token)

    def _start_engines(self):
        for engine in reversed(self.engines):
            engine.start()

    def wait_connected(self):
        """Returns once containerd, which a newer Docker asks too, reaches the driver again."""
        self.containerd.wait_connected()

    def clear(self):
        """Removes what scenarios left in the engines."""
        for engine in self.engines:
            engine.clear()

    def restart_engines(self):
        """New engines on the same data."""
        for engine in self.engines:
            engine.process.stop()
        self._start_engines()

    def stop(self):
        """Stops the programs; mounts stay, as the driver leaves them."""
        for program in (*self.engines, *([self.driver] if self.driver else [])):
            program.process.stop()


class World:
    """The programs of a run, and the scenarios' way to them."""

    def __init__(self, scratch, stand_in):
        self.scratch = scratch
        self.stand_in = stand_in
        self.registry = Registry(scratch, held_port)
        directory = scratch / "plain"
        directory.mkdir()
        self.plain_containerd = Containerd(directory, "plain", scratch.name)
        self.plain = Docker(
            directory, "plain", "overlay2", self.plain_containerd, scratch.name
        )
        self.images = Images(self)
        self._generation = 0
        # Of the workers that are asked for next.
        self.release = DEBIAN
        # By the engines that were in use, and their name.
        self._workers = {}
        self._servers = []

    def start(self):
        """Starts what stays for the whole run."""
        self.registry.start()
        self.plain_containerd.start()
        self.plain.start()

    @property
    def _directory(self):
        directory = self.scratch / f"g{self._generation}"
        directory.mkdir(exist_ok=True)
        return directory

    def use(self, release):
        """Workers have these engines, where nothing else is said, and an appliance of their own; None: Debian's."""
        self.release = release or DEBIAN

    def server(self, name="appliance", capacity=CAPACITY, program=None):
        """The appliance; another name makes another one."""
        name += self.release.suffix
        for known, server in self._servers:
            if known == name:
                return server
        server = Server(
            program or os.environ["SLACKWATERD"], self._directory / name, self._directory / f"{name}.log",
            capacity=capacity,
        )
        server.start()
        self._servers.append((name, server))
        return server

    def worker(self, name, server=None, wrapper=(), release=None, arguments=(), prepare=None):
        """The worker of that name, started when it is first asked for. The wrapper is a command
        that the driver is started by, with more arguments; the release is the engines', in place of the one that is
        in use; `prepare` is called with a worker before it starts."""
        known_as, name = (self.release, name), name + self.release.suffix
        if known_as not in self._workers:
            if not self.stand_in:
                server = server or self.server()
            worker = Worker(
                self._directory / name, name, server, self.scratch.name, wrapper, release or self.release,
                arguments,
            )
            self._workers[known_as] = worker
            if prepare:
                prepare(worker)
            worker.start()
        return self._workers[known_as]

    @contextlib.contextmanager
    def fresh_worker(self, name, server=None, wrapper=(), release=None, arguments=(), prepare=None):
        """A worker for one scenario, with nothing in its caches."""
        known_as = (self.release, name)
        require(known_as not in self._workers, f"worker {name} is not fresh")
        worker = self.worker(name, server, wrapper, release, arguments, prepare)
        yield worker
        worker.clear()
        # One that was started in a crippled world cannot, and has nothing.
        if worker.driver and not wrapper:
            # Stopped in the middle of its removals, it would finish them at its next start, which there is not. What
            # is published stays: other workers pull it.
            leftover.require_taken_back(worker.server, worker.driver)
        worker.stop()
        self._end_all_below(worker.directory)
        worker.directory.rename(f"{worker.directory}-{time.monotonic_ns()}")
        del self._workers[known_as]

    def clear(self):
        """Empties the engines; the images' cache in the registry and the plain Docker stays."""
        for worker in self.workers:
            worker.clear()
        self.plain("container", "prune", "--force")

    @property
    def workers(self):
        """The workers that run with the engines in use: no others have done anything since they were cleared."""
        return [worker for (release, _), worker in self._workers.items() if release == self.release]

    def throw_away(self):
        """Ends workers and appliance with all that hangs on them, in whatever state they are."""
        for worker in self._workers.values():
            for engine in worker.engines:
                engine.process.kill()
        self._end_all_below(self._directory)
        for _, server in self._servers:
            server.kill()
        self._workers = {}
        self._servers = []
        self._generation += 1

    def end(self):
        """Ends everything."""
        self._unmount(self.scratch)
        kill_strangers()

    def _end_all_below(self, directory):
        """Containers, then mounts, and what serves the mounts last: also the meter on the way to the appliance."""
        self._kill_strangers_below(
            directory, lambda words: not {"serve-export", "--data-dir"} & set(words)
            and not any(word.endswith("/meter.py") for word in words)
        )
        self._unmount(directory)
        self._kill_strangers_below(directory, lambda words: "--data-dir" not in words)

    def _kill_strangers_below(self, directory, chosen):
        """Kills processes whose command names the directory: shims, containers' keepers."""
        for pid, words in processes().items():
            if pid not in (1, os.getpid()) and chosen(words) \
                    and any(str(directory) in word for word in words):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _unmount(self, directory):
        """Unmounts what is below the directory, the latest first."""
        mounts = mounts_below(directory)
        for point in [point for point, kind in reversed(mounts) if not kind.startswith("fuse")]:
            self._umount(point)
        # One that was attached and not yet mounted when the driver was killed.
        for device, _ in leftover.loop_devices(directory):
            # Held open, the kernel cannot free it, and another program have it, between the look and the detach.
            with contextlib.suppress(OSError), open(f"/dev/{device}", "rb"):
                if device in [name for name, _ in leftover.loop_devices(directory)]:
                    subprocess.run(["losetup", "--detach", f"/dev/{device}"], check=False, timeout=100)
        for point in [point for point, kind in reversed(mounts) if kind.startswith("fuse")]:
            self._umount(point)

    def _umount(self, point):
        """Unmounts one, or leaves it."""
        # Not `run`: it waits for what it killed, and a hanging unmount cannot be killed.
        umount = subprocess.Popen(["umount", "--lazy", point], stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            umount.wait(UNMOUNT_LIMIT_SECONDS)

    def logs(self):
        """The logs of this run's programs."""
        # No deeper: mounts that hang are there.
        found = [path for depth in ("*", "*/*", "*/state/*")
                 for path in self._directory.glob(f"{depth}.log")]
        return sorted(found)


def mounts_below(directory):
    """Mount points below a directory with their types, in the order in which they were made."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            before, after = line.split(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            if point.startswith(f"{directory}/"):
                found.append((point, after.split()[0]))
    return found

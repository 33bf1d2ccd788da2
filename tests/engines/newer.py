#!/usr/bin/env python3
"""Engines that are newer than Debian's, compiled once into a cache.

    tests/engines/newer.py CACHE        makes what is missing; tests/engines/run does, where it is needed

```
the machine's go --fetches--> the pinned Go, sources --build--> CACHE/containerd-v2.4.2-HASH/
                              (each held against `versions`)    CACHE/containerd-v2.2.9-HASH/
                                                                CACHE/dockerd-v2.0.0-beta.24-HASH/
```

The programs of one version are one directory, which is complete: it is renamed there when all is
compiled. The hash is that of the pinned module and Go, the flags and the suite's sources. What the compilation needs
(Go, modules, objects: about 4 GB) is below CACHE/compiling, and removed at the end, or by the next run.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

VERSIONS = pathlib.Path(__file__).with_name("versions")
# It takes seconds, or minutes over a slow network.
FETCH_LIMIT_SECONDS = 1800
# Two cores take five minutes for all.
COMPILE_LIMIT_SECONDS = 3600
# Of what a compilation said that failed.
SHOWN_CHARACTERS = 2000
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

GO = "golang.org/toolchain"
# containerd's suite of a snapshotter: what calls it, and the program that is made of both.
SUITE_SOURCES, SUITE_PROGRAM = pathlib.Path(__file__).with_name("conformance"), "snapshotter.test"


@dataclasses.dataclass(frozen=True)
class Engine:
    """What is compiled of one module."""

    # Of its directory in the cache.
    name: str
    module: str
    version: str
    programs: tuple[str, ...]
    # Without storage that needs libraries of C, or devices: it is not tried.
    tags: str
    # The variable that says its version.
    version_variable: str
    # Sources of a test that are put into the module, and its program.
    suite: tuple[pathlib.Path, str] | None = None

    @property
    def flags(self):
        """What all commands of the compiler are given."""
        version = f"-s -w -X {self.module}/{self.version_variable}={self.version}"
        return ("-trimpath", "-buildvcs=false", "-tags", self.tags, "-ldflags", version)

    @property
    def directory_name(self):
        """Where its programs are in the cache."""
        suite = [path.read_text("utf-8") for path in sorted(SUITE_SOURCES.glob("*.go"))] if self.suite else []
        # All of Go's: also a machine for which there is none has names, and can run what is Debian's.
        go_lines = [line for line in VERSIONS.read_text("utf-8").splitlines() if line.startswith(GO)]
        parts = (pinned(self.module, self.version), go_lines, self.flags, self.programs, suite)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return f"{self.name}-{self.version}-{digest[:12]}"

    @property
    def commands(self):
        """The compiler's, as far as what they make; `{}` is the directory for the programs."""
        yield ("build", *self.flags, "-o", "{}/", *(f"./cmd/{program}" for program in self.programs))
        if self.suite:
            sources, program = self.suite
            yield ("test", "-c", *self.flags, "-o", f"{{}}/{program}", f"./{sources.name}")


CONTAINERD = Engine(
    "containerd", "github.com/containerd/containerd/v2", "v2.4.2", ("containerd", "containerd-shim-runc-v2", "ctr"),
    "no_btrfs no_devmapper no_zfs", "version.Version", (SUITE_SOURCES, SUITE_PROGRAM),
)
# The one with long support.
CONTAINERD_2_2 = dataclasses.replace(CONTAINERD, version="v2.2.9", suite=None)
# Docker 29 is this module's version 2.
DOCKERD = Engine(
    "dockerd", "github.com/moby/moby/v2", "v2.0.0-beta.24", ("dockerd",),
    "exclude_graphdriver_btrfs exclude_graphdriver_zfs", "dockerversion.Version",
)
ENGINES = (CONTAINERD, CONTAINERD_2_2, DOCKERD)


class Trouble(Exception):
    """What to say instead of going on."""


# What `make` fails with.
FAILURES = (Trouble, subprocess.SubprocessError, OSError)


def pinned(module, suffix=""):
    """(version, hash) of a module in `versions`."""
    for line in VERSIONS.read_text("utf-8").splitlines():
        words = line.split("#")[0].split()
        if len(words) == 3 and words[0] == module and words[1].endswith(suffix):
            return words[1], words[2]
    raise Trouble(f"{VERSIONS} has no {module} {suffix}: add it with its hash")


def fetch(module, suffix, compiler, environment):
    """The directory with the files of a module that is pinned."""
    version, expected = pinned(module, suffix)
    command = [compiler, "mod", "download", "-json", f"{module}@{version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment,
                          cwd=environment["GOTMPDIR"], timeout=FETCH_LIMIT_SECONDS)
    if done.returncode != 0:
        raise Trouble(f"cannot fetch {module} {version}; the tests of newer engines need it once: "
                      f"{(done.stdout + done.stderr)[-SHOWN_CHARACTERS:]}")
    fetched = json.loads(done.stdout)
    if fetched["Sum"] != expected:
        raise Trouble(f"{module} {version} is not what {VERSIONS} says: "
                      f"got {fetched['Sum']}, expected {expected}")
    return pathlib.Path(fetched["Dir"])


def go_suffix():
    """How the version of the Go for this machine ends."""
    return f"linux-{MACHINES.get(platform.machine(), platform.machine())}"


def go(environment):
    """The Go compiler that is pinned, fetched by the machine's."""
    root = fetch(GO, go_suffix(), "go", environment)
    # The archives of modules have no rights.
    for program in (*root.glob("bin/*"), *root.glob("pkg/tool/*/*")):
        program.chmod(0o755)
    return root / "bin" / "go"


def settings(directory):
    """The environment that keeps all that Go makes below a directory. Where modules come from is the
    machine's setting."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("GO") or name in ("GOPROXY", "GONOSUMDB", "GOSUMDB", "GOPRIVATE")}
    return {
        **kept, "GOTOOLCHAIN": "local", "GOFLAGS": "-modcacherw", "CGO_ENABLED": "0",
        "GOPATH": str(directory / "path"), "GOMODCACHE": str(directory / "modules"),
        "GOCACHE": str(directory / "objects"), "GOTMPDIR": str(directory), "GO111MODULE": "on",
    }


def compiled(engine, directory):
    """The directory with an engine's programs."""
    environment = settings(directory)
    compiler = go(environment)
    sources, programs = (directory / f"{engine.directory_name}-{end}" for end in ("sources", "programs"))
    # Go builds nothing in its cache of modules.
    shutil.copytree(fetch(engine.module, engine.version, compiler, environment), sources)
    if engine.suite:
        shutil.copytree(engine.suite[0], sources / engine.suite[0].name)
    for command in engine.commands:
        words = [word.format(programs) if word.startswith("{}") else word for word in command]
        done = subprocess.run(
            [compiler, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            cwd=sources, env=environment, timeout=COMPILE_LIMIT_SECONDS,
        )
        if done.returncode != 0:
            raise Trouble(f"cannot compile {engine.directory_name}: {done.stdout[-SHOWN_CHARACTERS:]}")
    return programs


def make(cache):
    """Compiles what the cache lacks, and removes other versions that no run uses. Returns descriptors:
    as long as they are open, no other run removes the programs."""
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / "compiling"
    with (cache / "compiling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [engine for engine in ENGINES if not (cache / engine.directory_name).exists()]
        if missing:
            names = ", ".join(f"{engine.name} {engine.version}" for engine in missing)
            print(f"engines: compiling {names}, once: some minutes", file=sys.stderr, flush=True)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            try:
                for engine in missing:
                    compiled(engine, directory).rename(cache / engine.directory_name)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        used = []
        for engine in ENGINES:
            target = cache / engine.directory_name
            used.append(os.open(target, os.O_RDONLY))
            fcntl.flock(used[-1], fcntl.LOCK_SH)
        if missing:
            remove_unused(cache)
        return used


def remove_unused(cache):
    """Removes the programs of other versions, unless a run of another clone has them."""
    wanted = {engine.directory_name for engine in ENGINES}
    for other in (path for engine in ENGINES for path in cache.glob(f"{engine.name}-*")):
        if other.name not in wanted and other.exists():
            descriptor = os.open(other, os.O_RDONLY)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)
            os.close(descriptor)


def main():
    """Entry point."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        make(pathlib.Path(sys.argv[1]))
    except FAILURES as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

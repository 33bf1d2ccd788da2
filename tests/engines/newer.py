#!/usr/bin/env python3
"""Engines that are newer than Debian's, compiled once into a cache.

    tests/engines/newer.py CACHE        makes what is missing; tests/engines/run does, where it is needed

```
the machine's go --fetches--> the pinned Go, sources --build--> CACHE/containerd-v2.4.2-HASH/
                              (each held against `versions`)
```

The programs of one version are one directory, which is complete: it is renamed there when all is
compiled. The hash is that of the versions, the flags and the suite's sources. What the compilation needs (Go, modules,
objects: about 2 GB) is below CACHE/compiling, and removed at the end, or by the next run.
"""

import contextlib
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
# Two cores take three minutes.
COMPILE_LIMIT_SECONDS = 3600
# Of what a compilation said that failed.
SHOWN_CHARACTERS = 2000
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

CONTAINERD = "github.com/containerd/containerd/v2"
CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
# containerd's suite of a snapshotter: what calls it, and the program that is made of both.
SUITE_SOURCES, SUITE_PROGRAM = pathlib.Path(__file__).with_name("conformance"), "snapshotter.test"
# Without the snapshotters that need libraries of C, or devices: they are not tried.
CONTAINERD_FLAGS = ("-trimpath", "-buildvcs=false", "-tags", "no_btrfs no_devmapper no_zfs")


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


def go(environment):
    """The Go compiler that is pinned, fetched by the machine's."""
    machine = MACHINES.get(platform.machine(), platform.machine())
    root = fetch("golang.org/toolchain", f"linux-{machine}", "go", environment)
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


def compile_containerd(version, directory):
    """The directory with containerd's programs."""
    environment = settings(directory)
    compiler = go(environment)
    sources, programs = directory / "sources", directory / "programs"
    # Go builds nothing in its cache of modules.
    shutil.copytree(fetch(CONTAINERD, "", compiler, environment), sources)
    shutil.copytree(SUITE_SOURCES, sources / SUITE_SOURCES.name)
    flags = (*CONTAINERD_FLAGS, "-ldflags", f"-s -w -X {CONTAINERD}/version.Version={version}")
    for command in (
        ("build", *flags, "-o", f"{programs}/", *(f"./cmd/{program}" for program in CONTAINERD_PROGRAMS)),
        ("test", "-c", *flags, "-o", programs / SUITE_PROGRAM, f"./{SUITE_SOURCES.name}"),
    ):
        done = subprocess.run(
            [compiler, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            cwd=sources, env=environment, timeout=COMPILE_LIMIT_SECONDS,
        )
        if done.returncode != 0:
            raise Trouble(f"cannot compile containerd {version}: {done.stdout[-SHOWN_CHARACTERS:]}")
    return programs


def directory_name():
    """Where containerd's programs are in the cache."""
    suite = [path.read_text("utf-8") for path in sorted(SUITE_SOURCES.glob("*.go"))]
    parts = (VERSIONS.read_text("utf-8"), CONTAINERD_FLAGS, CONTAINERD_PROGRAMS, SUITE_PROGRAM, suite)
    return f"containerd-{pinned(CONTAINERD)[0]}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def make(cache):
    """Compiles what the cache lacks, and removes other versions that no run uses. Returns a descriptor:
    as long as it is open, no other run removes the programs."""
    version, _ = pinned(CONTAINERD)
    target = cache / directory_name()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "compiling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(f"engines: compiling containerd {version}, once: some minutes", file=sys.stderr, flush=True)
            directory = cache / "compiling"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            try:
                compile_containerd(version, directory).rename(target)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            remove_unused(cache, target)
        used = os.open(target, os.O_RDONLY)
        fcntl.flock(used, fcntl.LOCK_SH)
        return used


def remove_unused(cache, target):
    """Removes the programs of other versions, unless a run of another clone has them."""
    for other in cache.glob("containerd-*"):
        if other != target:
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

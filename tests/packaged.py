"""What the suites of packages have in common: the Debian packages of the programs, as `make packages` makes them, a newer
release of each, and the folder of a run."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess

PROJECT = pathlib.Path(__file__).resolve().parent.parent
# Of the packages that are installed, and of the release after it.
VERSION, NEWER = "1.0~1", "1.0~2"
COUNT = 3


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(_signal, _frame):
    raise KeyboardInterrupt


@contextlib.contextmanager
def folder_of_run(name, folder, is_kept, end=lambda: None):
    """Removes the folder in the end, however that comes, after `end` has ended what runs there; says where it is, if it is
    kept."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        # A second Ctrl-C does not end this half way.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end()
        if is_kept:
            print(f"{name}: kept {folder}")
        else:
            shutil.rmtree(folder)


def run_to_its_end(command, **options):
    """Runs a command that has to succeed. When this program is to end, it is asked to, and waited for: it tidies up."""
    with subprocess.Popen(command, **options) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def packages(directory, programs):
    """Makes them; their paths."""
    # Little compressed: they are unpacked once.
    environment = dict(os.environ, RELEASE=str(programs), VERSION=VERSION, SOURCE_DATE_EPOCH="1700000000",
                       DPKG_DEB_COMPRESSOR_LEVEL="1")
    subprocess.run([PROJECT / "deploy/packages", directory], check=True, env=environment, stdout=subprocess.DEVNULL)
    found = sorted(directory.glob("*.deb"))
    assert len(found) == COUNT, found
    return found


def newer(package, directory, change=lambda content: None):
    """Makes the same package as its next release, with a change of what it holds."""
    content = directory / "content"
    subprocess.run(["dpkg-deb", "--raw-extract", package, content], check=True)
    control = content / "DEBIAN/control"
    control.write_text(control.read_text().replace(VERSION, NEWER))
    change(content)
    # Not compressed: it is unpacked by an emulated machine.
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", content, directory], check=True,
                   stdout=subprocess.DEVNULL)
    shutil.rmtree(content)

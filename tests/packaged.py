"""The Debian packages of the programs, as `make packages` makes them, and a newer release of each."""

import os
import pathlib
import shutil
import subprocess

PROJECT = pathlib.Path(__file__).resolve().parent.parent
# Of the packages that are installed, and of the release after it.
VERSION, NEWER = "1.0~1", "1.0~2"
COUNT = 3


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

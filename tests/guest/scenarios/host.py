"""A client in user space on the host: libnfs, which shares no code with the kernel's client."""

import subprocess

from scenario import require, scenario

# A few MiB: seconds at most, on a slow machine too.
COPY_LIMIT_SECONDS = 150


def _copy(source, target):
    done = subprocess.run(
        ["nfs-cp", str(source), str(target)],
        capture_output=True, text=True, check=False, timeout=COPY_LIMIT_SECONDS,
    )
    require(done.returncode == 0, f"nfs-cp {source} {target}: {done.stderr or done.stdout}")


@scenario("libnfs on the host: nfs-cp there and back, nfs-ls, nfs-cat", 60)
def libnfs_round_trip(world):
    # An odd length: the last block is a partial one.
    data = world.pool[:3_000_001]
    there, back = world.scratch / "there", world.scratch / "back"
    there.write_bytes(data)
    _copy(there, world.appliance.nfs_url("libnfs"))
    listed = world.appliance.list_over_nfs("")
    require("libnfs" in listed, f"nfs-ls does not list the copy: {sorted(listed)}")
    _copy(world.appliance.nfs_url("libnfs"), back)
    require(back.read_bytes() == data, "what nfs-cp brought back differs from what it took there")
    require(world.appliance.read_over_nfs("libnfs") == data, "nfs-cat reads something else")
    size_bytes = world.appliance.file("libnfs")["size_bytes"]
    require(size_bytes == len(data), f"REST says {size_bytes} bytes, {len(data)} were written")

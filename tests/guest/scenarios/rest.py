"""The two doors to one store: what REST does is seen by the mount, and the other way round."""

from appliance import file_route
from scenario import require, scenario

FILE_BYTES = 1_000_000
PATH = "doors/rest/made by REST.img"


@scenario("what REST creates, writes, resizes, renames and deletes, the mount shows", 60)
def rest_to_mount(world):
    world.fact("mounted")
    server = world.appliance
    server.call("POST", "/v1/files", {"path": PATH, "size_bytes": FILE_BYTES})
    server.request("PUT", f"{file_route(PATH)}/data?offset=5000", world.pool[:70_001])
    world.guest(f"""
        cd "/fresh/doors/rest"
        is "size" "$(stat -c %s 'made by REST.img')" {FILE_BYTES}
        (head -c 5000 /dev/zero; pool 0 70001; head -c 924999 /dev/zero) | cmp - 'made by REST.img'""")
    server.call("PATCH", file_route(PATH), {"size_bytes": 6000})
    world.guest("""
        (head -c 5000 /dev/zero; pool 0 1000) | cmp - '/fresh/doors/rest/made by REST.img'""")
    server.call("PATCH", file_route(PATH), {"path": "doors/renamed.img"})
    world.guest("""
        is "names after a rename" "$(cd /fresh/doors; find . -type f)" ./renamed.img
        is "size after a rename" "$(stat -c %s /fresh/doors/renamed.img)" 6000""")
    server.request("DELETE", file_route("doors/renamed.img"))
    world.guest("""
        refused 'No such file' cat /fresh/doors/renamed.img
        rm -r /n/doors""")


@scenario("a file deleted by REST is stale to who has it open, and to nobody else", 60)
def deleted_under_the_mount(world):
    world.fact("mounted")
    world.guest("mkdir /n/gone; pool 0 5000 >/n/gone/file; pool 0 5000 >/n/gone/other; sync")
    world.guest("""
        (
            trap 'touch /run/gone.ended' EXIT
            exec 7<>/fresh/gone/file
            touch /run/gone.open
            while [ ! -e /run/gone.deleted ]; do sleep 0.1; done
            refused 'tale' cat <&7
            # A new file of the old name is another file, and the old handle is not its handle.
            echo new >/fresh/gone/file
            refused 'tale' cat <&7
            is "content of the new file" "$(cat /fresh/gone/file)" new
            touch /run/gone.ok
        ) >/run/gone.log 2>&1 &
        while [ ! -e /run/gone.open ]; do sleep 0.1; done""")
    world.appliance.request("DELETE", file_route("gone/file"))
    world.guest("""
        touch /run/gone.deleted
        while [ ! -e /run/gone.ended ]; do sleep 0.1; done
        [ -e /run/gone.ok ] || fail "$(cat /run/gone.log)"
        pool 0 5000 | cmp - /fresh/gone/other
        rm -r /n/gone""")


@scenario("what the mount writes, REST shows; a snapshot's bytes by REST are its bytes", 60)
def mount_to_rest(world):
    world.fact("mounted")
    server = world.appliance
    world.guest("""
        mkdir /n/doors
        pool 100 700001 >/n/doors/file
        sync /n/doors/file""")
    data = world.pool[100:700_101]
    route = file_route("doors/file")
    require(server.request("GET", f"{route}/data") == data, "GET of the file's data differs")
    listed = {file["path"] for file in server.call("GET", "/v1/files?prefix=doors/")["items"]}
    require(listed == {"doors/file"}, f"the list of files below doors/ is {listed}")
    snapshot_id = server.snapshot("doors/file")
    world.guest("pool 9 50000 | dd of=/n/doors/file bs=64K iflag=fullblock conv=notrunc,fsync "
                "status=none")
    route = f"/v1/snapshots/{snapshot_id}"
    require(server.request("GET", f"{route}/data") == data, "the snapshot changed with its file")
    later = server.snapshot("doors/file")
    changed = server.call("GET", f"/v1/snapshots/{later}/diff?base={snapshot_id}")["items"]
    # 50,000 bytes from the start: 13 blocks, the last one in part.
    require(
        changed == [{"offset_bytes": 0, "length_bytes": 13 * 4096, "kind": "data"}],
        f"the difference of the snapshots is {changed}",
    )
    world.guest("rm -r /n/doors")

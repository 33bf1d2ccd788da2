"""What needs a server or a transport of its own: squashed users, the list of client addresses,
several connections (Linux keeps one transport for each server, so nconnect counts only at the
first mount of one)."""

import contextlib

from scenario import require, scenario

FILE_BYTES = 8192


@contextlib.contextmanager
def _another(world, name, **access):
    """A second server, mounted nowhere yet, for one block of code."""
    server = world.appliance.another(world.scratch / name, **access)
    server.start()
    try:
        server.call("POST", "/v1/files", {"path": "file", "size_bytes": FILE_BYTES})
        yield server
    finally:
        server.kill()


@scenario("root_squash and all_squash: the guest's root is nobody", 60)
def squash(world):
    for mode in ("root_squash", "all_squash"):
        with _another(world, mode, squash=mode) as server:
            world.guest(f"""
                nfs_port={server.nfs_port} api_port={server.api_port}
                export_mount /squashed
                is "bytes that everybody may read" "$(wc -c </squashed/file)" {FILE_BYTES}
                refused 'denied' dd if=/pool of=/squashed/file bs=4096 count=1 conv=notrunc
                refused 'denied' touch /squashed/new
                refused 'denied' rm -f /squashed/file
                refused 'permitted' chmod 777 /squashed/file
                umount /squashed""")


@scenario("the list of client addresses: read-only ones, and strangers", 60)
def addresses(world):
    with _another(world, "read-only", client="127.0.0.0/8:ro") as server:
        world.guest(f"""
            nfs_port={server.nfs_port} api_port={server.api_port}
            export_mount /listed
            is "bytes read" "$(wc -c </listed/file)" {FILE_BYTES}
            # ACCESS offers no writing, so the client does not even try.
            refused 'denied' dd if=/pool of=/listed/file bs=4096 count=1 conv=notrunc
            refused 'ead-only' touch /listed/new
            refused 'ead-only' mkdir /listed/new
            umount /listed""")
    # Loopback is what the guest's connections come from; it is not in this list.
    with _another(world, "strangers", client="192.0.2.0/24:rw") as server:
        world.guest(f"""
            mkdir -p /stranger
            # It has the secret path, and comes from the wrong address.
            path=$(api_port={server.api_port} mount_path)
            case $path in */.export/?*) ;; *) fail "no path: '$path'" ;; esac
            refused 'denied' /tools/mount.nfs "10.0.2.2:$path" /stranger -o \
                vers=3,proto=tcp,port={server.nfs_port},mountport={server.nfs_port},nolock""")


@scenario("an address that is listed mounts nothing without a secret path", 60)
def by_address(world):
    world.guest("""
        mkdir -p /addressed
        for path in /slackwater /slackwater/.export /slackwater/.export/x /slackwater/.snapshot; do
            refused 'denied' /tools/mount.nfs "10.0.2.2:$path" /addressed -o \
                "vers=3,proto=tcp,port=$nfs_port,mountport=$nfs_port,nolock"
        done""")


@scenario("a worker that is revoked: its mount by the kernel, also what it has open, is refused", 60)
def revoked(world):
    with _another(world, "revoked") as server:
        token = server.call("POST", "/v1/workers", {"name": "guest"})["join_token"]
        world.guest(f"""
            nfs_port={server.nfs_port} api=http://10.0.2.2:{server.api_port}
            (umask 077; echo {token} >/run/join-token)
            env -u SLACKWATER_TOKEN_FILE /tools/slackwater-driver --state-dir /run/revoked --api $api --nfs 10.0.2.2:$nfs_port \
                join --join-token-file /run/join-token
            (umask 077; echo "Authorization: Bearer $(cat /run/revoked/credential)" >/run/credential)
            path=$(/tools/curl --silent --show-error --fail-with-body --request POST --header @/run/credential $api/v1/mount-paths |
                sed -n 's/.*"path":"\\([^"]*\\)".*/\\1/p')
            case $path in */.worker/?*) ;; *) fail "no path: '$path'" ;; esac
            mkdir -p /revoked
            mount -i -t nfs -o "nolock,vers=3,proto=tcp,mountproto=tcp,port=$nfs_port,mountport=$nfs_port,\
addr=10.0.2.2,hard" "10.0.2.2:$path" /revoked
            home=$(echo /revoked/workers/*)
            pool 0 {FILE_BYTES} >$home/kept
            pool 0 {FILE_BYTES} >$home/open
            sync $home/kept $home/open
            refused 'No such file' cat /revoked/file
            exec 5<>$home/open 6<$home/open
            /tools/curl --silent --fail --request DELETE --header @/run/authorization $api/v1/workers/guest
            caches_drop
            refused 'denied' dd if=$home/kept of=/dev/null bs=4096 count=1
            refused 'denied' touch $home/new
            refused 'denied' rm $home/kept
            refused 'denied' dd bs=4096 count=1 of=/dev/null <&6
            refused 'denied' sh -c '/tools/dd if=/pool bs=4096 count=1 conv=notrunc,fsync >&5'
            umount -l /revoked""")
        files = [item["path"] for item in server.call("GET", "/v1/files")["items"]]
        require(any(path.endswith("/kept") for path in files), f"of the worker's files there are {files}")


@scenario("four writers over four connections (nconnect=4)", 60)
def four_connections(world):
    with _another(world, "wide") as server:
        world.guest(f"""
            nfs_port={server.nfs_port} api_port={server.api_port}
            export_mount /wide hard,nconnect=4
            for number in 1 2 3 4; do
                (
                    for part in 1 2 3 4; do
                        pool $((number * 1000 + part)) 1000003 >/wide/$number-$part
                    done
                    sync /wide/$number-*
                ) &
            done
            wait
            # Each connection is a line of the mount's part of the statistics.
            connections=$(awk '/^device/ {{ here = / on \\/wide / }}
                here && /xprt:/ {{ count++ }} END {{ print count + 0 }}' /proc/self/mountstats)
            is "connections" "$connections" 4""")
        for number in range(1, 5):
            for part in range(1, 5):
                start = number * 1000 + part
                got = server.read_over_nfs(f"{number}-{part}")
                require(got == world.pool[start : start + 1_000_003], f"{number}-{part} differs")
        world.guest("umount /wide")

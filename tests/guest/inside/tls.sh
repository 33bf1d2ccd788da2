# Debian 13's tlshd and mount.nfs, for NFS in TLS.

# Their own loader, with their own libraries.
TRIXIE="/trixie/lib/ld-linux-x86-64.so.2 --library-path /trixie/lib"

# tlshd_start AUTHORITY [CERTIFICATE KEY]: the daemon that makes the kernel's handshakes, and what it shows
tlshd_start() {
    printf '[debug]\nloglevel=0\n[authenticate.client]\nx509.truststore=%s\n' "$1" >/run/tlshd.conf
    if [ $# -eq 3 ]; then
        printf 'x509.certificate=%s\nx509.private_key=%s\n' "$2" "$3" >>/run/tlshd.conf
    fi
    $TRIXIE /trixie/tlshd -s -c /run/tlshd.conf >/run/tlshd.log 2>&1 &
    echo $! >/run/tlshd.process
    # While nobody listens for its handshakes, the kernel refuses a mount at once.
    until tlshd_listens; do
        kill -0 "$(cat /run/tlshd.process)" 2>/dev/null || fail "tlshd ended: $(cat /run/tlshd.log)"
        sleep 0.1
    done
}

# tlshd_listens: whether it is in its group of generic netlink, which is protocol 16; the upper bits of an
# address count the sockets of a process
tlshd_listens() {
    awk -v process="$(cat /run/tlshd.process)" \
        '$2 == 16 && $3 % 4194304 == process && $4 != "00000000" { found = 1 } END { exit !found }' /proc/net/netlink
}

tlshd_end() {
    kill "$(cat /run/tlshd.process)"
    while kill -0 "$(cat /run/tlshd.process)" 2>/dev/null; do sleep 0.1; done
}

# tls_mount HOST:PATH DIRECTORY [MORE-OPTIONS]: of the appliance at $nfs_port
tls_mount() {
    mkdir -p "$2"
    $TRIXIE /trixie/mount.nfs "$1" "$2" -o "vers=3,proto=tcp,port=$nfs_port,mountport=$nfs_port,nolock,hard,\
nosuid,nodev,${3:-xprtsec=tls}"
}

# tls_unmount DIRECTORY: without umount.nfs, which asks at port 111 for the port of MOUNT
tls_unmount() {
    umount "$1"
}

# Helpers of the guest; the agent's scripts read this first. Functions print why they fail.
# The shell prefers busybox's own commands to those of PATH; these are the real ones.
dd() { /tools/dd "$@"; }
sync() { /tools/sync "$@"; }
stat() { /tools/stat "$@"; }
du() { /tools/du "$@"; }
df() { /tools/df "$@"; }

# Ports of the appliance, written by the host at the start.
[ ! -e /run/appliance ] || . /run/appliance

fail() {
    echo "$*"
    exit 1
}

# is WHAT GOT EXPECTED
is() {
    [ "$2" = "$3" ] || fail "$1: got '$2', expected '$3'"
}

# refused REASON COMMAND...: the command must fail, and say REASON
refused() {
    reason=$1
    shift
    if answer=$("$@" 2>&1); then
        fail "succeeded, expected '$reason': $*"
    fi
    case $answer in
    *"$reason"*) ;;
    *) fail "got '$answer', expected '$reason': $*" ;;
    esac
}

# mount_path: a path by which the export of the appliance at $api_port is mounted, a secret one
mount_path() {
    /tools/curl --silent --show-error --fail --request POST --header @/run/authorization \
        "http://10.0.2.2:$api_port/v1/mount-paths" | sed -n 's/.*"path":"\([^"]*\)".*/\1/p'
}

# export_mount DIRECTORY [MORE-OPTIONS [PATH-BELOW-EXPORT]]: of the appliance at $nfs_port and $api_port
export_mount() {
    mkdir -p "$1"
    # -i: the kernel alone, without mount.nfs.
    mount -i -t nfs -o "nolock,vers=3,proto=tcp,mountproto=tcp,port=$nfs_port,mountport=$nfs_port,\
rsize=1048576,wsize=1048576,addr=10.0.2.2,${2:-hard}" "10.0.2.2:$(mount_path)${3:-}" "$1"
}

# disk_mount IMAGE DIRECTORY: ext4 of an image through a loop device. A journal that was in use
# is replayed.
disk_mount() {
    mkdir -p "$2"
    device=$(losetup -f)
    losetup "$device" "$1"
    mount -t ext4 -o noatime "$device" "$2"
}

# disk_device DIRECTORY: the loop device below a mount
disk_device() {
    awk -v directory="$1" '$2 == directory { print $1 }' /proc/mounts
}

# disk_unmount DIRECTORY
disk_unmount() {
    device=$(disk_device "$1")
    umount "$1"
    losetup -d "$device"
}

# disk_check IMAGE: e2fsck must find nothing to repair, on what the server holds
disk_check() {
    caches_drop
    device=$(losetup -f)
    losetup -r "$device" "$1"
    code=0
    answer=$(/usr/sbin/e2fsck -fn "$device" 2>&1) || code=$?
    losetup -d "$device"
    [ "$code" -eq 0 ] || fail "e2fsck -fn $1: exit code $code: $answer"
}

# What is read after this comes from the server.
caches_drop() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}

# pool OFFSET COUNT: bytes of /pool, which the host knows too
pool() {
    tail -c "+$(($1 + 1))" /pool | head -c "$2"
}

# tree_write DIRECTORY: 12 directories with 30 files each, odd sizes, modes, times, links
tree_write() {
    mkdir "$1"
    text="the quick brown fox jumps over the lazy dog; "
    directory=0
    while [ "$directory" -lt 12 ]; do
        here=$1/directory-$directory/nested
        mkdir -p "$here"
        file=0
        line=
        while [ "$file" -lt 30 ]; do
            line="$line$text$directory.$file "
            echo "$line" >"$here/file-$file"
            file=$((file + 1))
        done
        pool $((directory * 70001)) $((directory * 40009 + 1)) >"$here/../large"
        ln "$here/file-0" "$here/../hard"
        ln -s "nested/file-$directory" "$here/../soft"
        chmod $((directory % 7 + 1))44 "$here/file-1"
        touch -d "2001-02-03 04:05:$((10 + directory))" "$here/file-2"
        dd if=/pool of="$here/sparse" bs=4096 count=1 seek=$((directory * 10)) status=none
        directory=$((directory + 1))
    done
}

# tree_print DIRECTORY: everything that a user can see of a tree, in a fixed order
tree_print() {
    (
        cd "$1" || exit 1
        find . | sort | xargs /tools/stat -c '%n %F %a %u:%g %h %s %Y %N'
        find . -type f | sort | xargs sha256sum
    )
}

# tree_compare DIRECTORY: the tree must be what /run/tree.expected says
tree_compare() {
    tree_print "$1" >/run/tree.actual
    cmp -s /run/tree.expected /run/tree.actual \
        || fail "$1 differs: $(diff /run/tree.expected /run/tree.actual | head -n 6)"
}

# The driver in the guest: as a daemon behind the socket that dockerd would call, and without one.
driver_state=/run/driver
driver_socket=/run/plugins/slackwater.sock

# The program's options that are the same for every call. None are needed before there is an
# appliance.
export SLACKWATER_API="http://10.0.2.2:${api_port:-}" SLACKWATER_NFS="10.0.2.2:${nfs_port:-}"
[ ! -e /run/token ] || export SLACKWATER_TOKEN_FILE=/run/token
# Its log goes to the console, which is read as text.
export NO_COLOR=1

# driver ARGUMENTS...: the program, with the daemon's settings. The machine is a worker that joined, without a token
driver() {
    env -u SLACKWATER_TOKEN_FILE /tools/slackwater-driver --state-dir "$driver_state" --docker-socket "$driver_socket" "$@"
}

# driver_join: becomes a worker of the appliance, by its administrator's token
driver_join() {
    (umask 077
        /tools/curl --silent --show-error --fail --data-binary '{"name": "guest"}' \
            --header @/run/authorization --header 'Content-Type: application/json' \
            "$SLACKWATER_API/v1/workers" >/run/added
        sed -n 's/.*"join_token":"\([^"]*\)".*/\1/p' /run/added >/run/join-token)
    driver join --join-token-file /run/join-token
    rm /run/added /run/join-token
}

# attached ARGUMENTS...: the program where no daemon is
attached() {
    /tools/slackwater-driver --state-dir /run/attach "$@"
}

# rights DIRECTORY: which of nosuid and nodev what is mounted there has
rights() {
    awk -v at="$1" '$2 == at { print $4 }' /proc/mounts | tr , '\n' | grep -e nosuid -e nodev |
        tr '\n' , | sed 's/,$//'
}

# driver_start: returns when the daemon serves
driver_start() {
    rm -f /run/driver.ready
    # Not by `driver`: its process is to be the one that is ended.
    env -u SLACKWATER_TOKEN_FILE /tools/slackwater-driver --state-dir "$driver_state" --docker-socket "$driver_socket" \
        >/run/driver.ready 2>/dev/console &
    echo $! >/run/driver.process
    while ! grep -q '^ready$' /run/driver.ready 2>/dev/null; do
        kill -0 $! || fail "the driver ended; its log is on the console"
        sleep 0.1
    done
}

# other_once: a daemon with the token of /run/other-token, which mounts a disk, removes it and ends; prints by what
# path the export stays mounted
other_once() {
    driver_socket=/run/plugins/other.sock
    rm -f /run/other.ready
    /tools/slackwater-driver --state-dir /run/other --token-file /run/other-token \
        --docker-socket "$driver_socket" >/run/other.ready 2>/dev/console &
    daemon=$!
    while ! grep -q '^ready$' /run/other.ready 2>/dev/null; do
        kill -0 $daemon || fail "the driver ended; its log is on the console"
        sleep 0.1
    done
    for call in CreateReadWrite Get Put Remove; do
        answer=$(plugin GraphDriver.$call '{"ID": "other", "Parent": "", "MountLabel": ""}')
        case $answer in *'"Err":""'* | *'"Err":null'* | *'"Dir"'*) ;; *) fail "$call: $answer" ;; esac
    done
    while [ -n "$(driver_mounts /run/other)" ]; do sleep 0.2; done
    # It deletes a disk after it has let it go, and what it has not deleted yet is the next one's, of which there is none.
    worker=$(/tools/curl --silent --fail --unix-socket /run/other/control.sock http://driver/status \
        | sed -n 's/.*"worker_id":"\([^"]*\)".*/\1/p')
    [ -n "$worker" ] || fail "the driver does not tell its worker's id"
    files=path
    while case $files in *path*) true ;; *) false ;; esac; do
        sleep 0.2
        files=$(/tools/curl --silent --fail --header @/run/authorization \
            "$SLACKWATER_API/v1/files?prefix=workers/$worker/disks") || fail "the appliance does not list its files"
    done
    kill $daemon
    wait $daemon
    awk '$2 == "/run/other/export" { print $1 }' /proc/mounts
}

# driver_end SIGNAL: returns when the process is gone
driver_end() {
    process=$(cat /run/driver.process)
    kill "-$1" "$process"
    while kill -0 "$process" 2>/dev/null; do
        sleep 0.1
    done
    rm /run/driver.process
}

# plugin CALL JSON: one call as dockerd makes it; prints the answer
plugin() {
    /tools/curl --silent --show-error --fail --unix-socket "$driver_socket" \
        --data-binary "$2" "http://plugin/$1"
}

# plugin_apply LAYER PARENT TAR: unpacks a layer, sent in chunks as dockerd sends it
plugin_apply() {
    /tools/curl --silent --show-error --fail --unix-socket "$driver_socket" \
        --header 'Transfer-Encoding: chunked' --data-binary "@$3" \
        "http://plugin/GraphDriver.ApplyDiff?id=$1&parent=$2"
}

# driver_mounts [DIRECTORY]: the disks that are mounted below a driver's state, and loop devices
# on files of its export; nothing where all is let go
driver_mounts() {
    awk -v below="${1:-$driver_state}/" 'index($2, below) == 1 && $3 == "ext4"' /proc/mounts
    for backing in /sys/block/loop*/loop/backing_file; do
        [ ! -e "$backing" ] || grep -F "${1:-$driver_state}/" "$backing" || true
    done
}

# contained ROOT COMMAND...: runs it as a container would, in a mount namespace of its own, with
# the root as its root
contained() {
    unshare -m chroot "$@"
}

# contained_write ROOT: numbered records, each fsynced by the program of the image. `/stop` ends
# it, an error too, which leaves no `/ended`.
contained_write() {
    # The variables are those of the shell inside.
    # shellcheck disable=SC2016
    contained "$1" /program/busybox sh -c '
        set -e
        number=0
        while [ ! -e /stop ]; do
            number=$((number + 1))
            printf "record %010d\n" "$number" >>/records
            /program/busybox sync /records
        done
        echo "$number" >/ended' >/run/contained.log 2>&1 &
}

# contained_progress ROOT COUNT: waits until there are so many records more
contained_progress() {
    last=$(($(records_last "$1/records") + $2))
    while [ "$(wc -l <"$1/records")" -lt "$last" ]; do
        [ ! -s /run/contained.log ] || fail "in the container: $(cat /run/contained.log)"
        sleep 0.2
    done
}

# Writers that run in the background while the server is snapshotted, killed and started again.
# Each adds the number of what is durable to a list in the guest's memory, so that the list is
# what the server promised. They end when /run/writers.stop is there; one that meets an error
# says so in /run/writers.failed and ends.

# background NAME FUNCTION [ARGUMENTS...]
background() {
    mkdir -p /run/writers
    : >"/run/writers/$1"
    (
        writer=$1
        shift
        "$@" || echo "$writer: $(cat "/run/$writer.error")" >>/run/writers.failed
        rm "/run/writers/$writer"
    ) >/dev/null 2>&1 &
}

writers_clear() {
    rm -rf /run/writers /run/writers.stop /run/writers.failed
}

# writers_stop: asks all to end, waits for them, and fails if one of them met an error
writers_stop() {
    touch /run/writers.stop
    while [ -n "$(ls /run/writers 2>/dev/null)" ]; do
        sleep 0.1
    done
    writers_healthy
}

writers_healthy() {
    [ ! -e /run/writers.failed ] || fail "a writer failed: $(cat /run/writers.failed)"
}

# acknowledged NAME: the last number of a writer's list, 0 where there is none
acknowledged() {
    if [ -s "/run/$1.list" ]; then tail -n 1 "/run/$1.list"; else echo 0; fi
}

# records_write NAME FILE DD-OPTION...: appends numbered records
records_write() {
    name=$1
    file=$2
    shift 2
    number=0
    while [ ! -e /run/writers.stop ]; do
        number=$((number + 1))
        printf 'record %010d\n' "$number" >"/run/$name.record"
        dd if="/run/$name.record" of="$file" status=none "$@" 2>"/run/$name.error" || return 1
        echo "$number" >>"/run/$name.list"
    done
}

# records_last FILE: checks that the records are 1, 2, 3... and prints the last one's number
records_last() {
    awk '$0 != sprintf("record %010d", NR) { print "line " NR " is: " $0; bad = 1; exit }
        END { if (bad) exit 1; print NR }' "$1"
}

# renames_write NAME DIRECTORY: makes a name and renames it
renames_write() {
    number=0
    while [ ! -e /run/writers.stop ]; do
        number=$((number + 1))
        : >"$2/made-$number"
        # A server that was killed has no memory of a rename that it did and could not answer; the
        # client's second attempt then finds the source gone. The change itself must be there.
        mv "$2/made-$number" "$2/done-$number" 2>"/run/$1.error" \
            || [ -e "$2/done-$number" ] || return 1
        echo "$number" >>"/run/$1.list"
    done
}

# bulk_write NAME DIRECTORY COUNT: files of COUNT bytes, fsynced once at their end; the last 20
# are kept
bulk_write() {
    number=0
    while [ ! -e /run/writers.stop ]; do
        number=$((number + 1))
        # Another offset each time, so that no block is one that is stored already.
        pool "$number" "$3" | dd of="$2/bulk-$number" bs=1M iflag=fullblock conv=fsync \
            status=none 2>"/run/$1.error" || return 1
        echo "$number" >>"/run/$1.list"
        rm -f "$2/bulk-$((number - 20))"
    done
}

# churn_write NAME DIRECTORY: many files, never synced
churn_write() {
    number=0
    while [ ! -e /run/writers.stop ]; do
        number=$((number + 1))
        pool $((number % 100 * 4099)) 300000 2>"/run/$1.error" >"$2/file-$((number % 40))" \
            || return 1
    done
}

# held_write NAME FILE: reads a file that it keeps open, and writes to it at the very end
held_write() {
    exec 7<>"$2"
    cat <&7 >"/run/$1.list"
    while [ ! -e /run/writers.stop ]; do
        sleep 0.2
    done
    echo more 2>"/run/$1.error" >&7
}

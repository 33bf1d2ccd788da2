#!/usr/bin/env bash
# The steps of tests/compose/run, which reads this file. Each runs in a shell of its own with
# `set -e`; what one leaves for the next is a file in $scratch.
# shellcheck disable=SC2154  # the variables of `run`

DISK_BYTES=$((64 * 1024 * 1024))
# What the disk image holds at its start; the rest is a hole.
DISK_DATA_BYTES=$((24 * 1024 * 1024))
CHANGE_BYTES=10000
# Neither begins on a block boundary.
SOURCE_CHANGE_OFFSET=5000
CLONE_CHANGE_OFFSET=9000001

engine_answers() {
    wait_until 150 "docker version" timeout 25 docker version
    timeout 25 docker info --format '{{.ServerVersion}}, {{.Driver}}, root {{.DockerRootDir}}'
    # It is ours, and empty.
    [ "$(docker info --format '{{.DockerRootDir}} {{.Containers}}')" = "$scratch/data 0" ]
}

# ---- images

# make_image NAME OPTION...: Debian 12 into the cache, once, by mmdebstrap. As with apt, proxies
# count here.
make_image() {
    local image
    image=$cache/$1-$(dpkg --print-architecture).tar
    shift
    [ ! -e "$image" ] || return 0
    mkdir -p "$cache"
    timeout 1800 env -u no_proxy -u NO_PROXY mmdebstrap --quiet --format=tar "$@" bookworm "$image.$$" || {
        rm -f "$image.$$"
        return 1
    }
    mv "$image.$$" "$image"
}

load_images() {
    local architecture
    architecture=$(dpkg --print-architecture)
    make_image debian-12 --variant=minbase
    # The package is unpacked and never configured: nothing of it runs outside the container.
    make_image registry-2 --variant=extract --include=docker-registry,ca-certificates
    docker import --change 'CMD ["bash"]' "$cache/debian-12-$architecture.tar" debian:12
    # The program, the command and the volume of the image that has this name elsewhere.
    mkdir "$scratch/registry"
    cat >"$scratch/registry/Dockerfile" <<'END'
FROM registry-packages
COPY config.yml /etc/docker/registry/config.yml
VOLUME /var/lib/registry
ENTRYPOINT ["docker-registry", "serve"]
CMD ["/etc/docker/registry/config.yml"]
END
    cat >"$scratch/registry/config.yml" <<'END'
version: 0.1
storage:
  filesystem:
    rootdirectory: /var/lib/registry
http:
  addr: :5000
END
    docker import "$cache/registry-2-$architecture.tar" registry-packages
    docker build --tag registry:2 "$scratch/registry"
    make_image prometheus --variant=extract --include=prometheus
    mkdir -p "$scratch/prometheus/data"
    cat >"$scratch/prometheus/Dockerfile" <<'END'
FROM prometheus-packages
ENV PATH=/usr/bin:/bin
COPY --chown=65534:65534 data /prometheus
USER 65534
VOLUME /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
END
    docker import "$cache/prometheus-$architecture.tar" prometheus-packages
    docker build --tag "$(sed -n 's/^ *image: \(prom.*\)/\1/p' "$root/docker-compose.yml")" "$scratch/prometheus"
}

# ---- up and down

# Not with the settings of the caller's own appliance, which `.env` may have.
: >"$scratch/no-settings"
compose_command="docker-compose --env-file $scratch/no-settings"
! docker compose version >/dev/null 2>&1 || compose_command="docker compose --env-file $scratch/no-settings"

compose() {
    local files=(--file "$root/docker-compose.yml")
    [ -z "${COMPOSE_FILE:-}" ] || files+=(--file "$root/deploy/compose/network.yml")
    # shellcheck disable=SC2086  # words
    SLACKWATER_IMAGE_TARGET=prebuilt timeout 1000 $compose_command "${files[@]}" "$@"
}

default_ports() {
    compose config >"$scratch/config.yml"
    grep -E 'SLACKWATER_NFS_LISTEN: .?127\.0\.0\.1:2049' "$scratch/config.yml"
    grep -E 'SLACKWATER_API_LISTEN: .?127\.0\.0\.1:8049' "$scratch/config.yml"
    grep -E 'REGISTRY_HTTP_ADDR: .?127\.0\.0\.1:5000' "$scratch/config.yml"
    grep -E 'SLACKWATER_METRICS_LISTEN: .?127\.0\.0\.1:9049' "$scratch/config.yml"
    COMPOSE_PROFILES=monitoring compose config >"$scratch/config.yml"
    grep -E 'web.listen-address=127\.0\.0\.1:9090' "$scratch/config.yml"
    grep -E 'GF_SERVER_HTTP_ADDR: .?127\.0\.0\.1' "$scratch/config.yml"
}

# The programs are there; whether they are new is for `make test-compose`, which builds first.
make_target() {
    SLACKWATER_NFS_LISTEN=127.0.0.1:$nfs_port SLACKWATER_API_LISTEN=127.0.0.1:$api_port \
        REGISTRY_LISTEN=127.0.0.1:$registry_port SLACKWATER_METRICS_LISTEN=127.0.0.1:$metrics_port \
        timeout 1500 make --no-print-directory --directory "$root" --old-file=build "COMPOSE=$compose_command" "$1"
}

container() {
    compose ps --quiet "$1"
}

inspect() {
    docker inspect --format "$2" "$(container "$1")"
}

is_healthy() {
    [ "$(inspect slackwater '{{.State.Health.Status}}')" = healthy ]
}

listens() {
    (: >"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

make_up() {
    make_target up
    [ "$(inspect slackwater '{{.State.Running}}')" = true ]
    [ "$(inspect registry '{{.State.Running}}')" = true ]
    # Prometheus and Grafana are started by their profile alone.
    [ "$(docker ps --quiet | wc -l)" = 2 ]
}

appliance_healthy() {
    wait_until "$HEALTHY_LIMIT_SECONDS" "the container is healthy" is_healthy || {
        compose logs --tail=20
        inspect slackwater '{{json .State.Health}}'
        return 1
    }
    curl --silent --show-error --fail --max-time 60 "$SLACKWATER_API/readyz"
}

token_read() {
    [ "$(curl --silent --output /dev/null --write-out '%{http_code}' --max-time 60 "$SLACKWATER_API/v1/stats")" = 401 ]
    # As docker-compose.yml says.
    (umask 077
        compose exec -T slackwater cat /var/lib/slackwater/admin-token >"$scratch/token"
        echo "Authorization: Bearer $(cat "$scratch/token")" >"$scratch/authorization")
    curl --silent --show-error --fail --max-time 60 --header "@$scratch/authorization" "$SLACKWATER_API/v1/stats"
}

appliance_confined() {
    local name
    name=$(container slackwater)
    [ "$(docker exec "$name" id -u)" = 10049 ]
    [ "$(docker exec "$name" sed -n 's/^CapEff:\s*//p' /proc/1/status)" = 0000000000000000 ]
    docker exec "$name" bash -c '! : >/usr/local/bin/probe' 2>&1 | grep "Read-only file system"
}

# The check of the compose file, run by hand against a port where nobody is.
health_check_fails() {
    local name check
    name=$(container slackwater)
    check=$(docker inspect --format '{{index .Config.Healthcheck.Test 3}}' "$name")
    docker exec "$name" bash -c "$check"
    for address in 127.0.0.1:1 '[::1]:1'; do
        not docker exec --env "SLACKWATER_API_LISTEN=$address" "$name" bash -c "$check"
    done
}

# ---- monitoring

prometheus_up() {
    sed "s/127\.0\.0\.1:9049/127.0.0.1:$metrics_port/" "$root/deploy/prometheus/compose.yml" >"$scratch/prometheus.yml"
    chmod 644 "$scratch/prometheus.yml"
    monitored up -d prometheus
    wait_until "$HEALTHY_LIMIT_SECONDS" "Prometheus is healthy" is_prometheus_healthy || {
        compose logs --tail=20 prometheus
        inspect prometheus '{{json .State.Health}}'
        return 1
    }
    docker exec "$(container prometheus)" promtool check config /etc/prometheus/prometheus.yml
}

# As `compose`, with the addresses of this run.
monitored() {
    SLACKWATER_NFS_LISTEN=127.0.0.1:$nfs_port SLACKWATER_API_LISTEN=127.0.0.1:$api_port \
        REGISTRY_LISTEN=127.0.0.1:$registry_port SLACKWATER_METRICS_LISTEN=127.0.0.1:$metrics_port \
        PROMETHEUS_CONFIG=$scratch/prometheus.yml PROMETHEUS_LISTEN=127.0.0.1:$prometheus_port compose "$@"
}

is_prometheus_healthy() {
    [ "$(inspect prometheus '{{.State.Health.Status}}')" = healthy ]
}

query() {
    curl --silent --show-error --fail --max-time 60 --get --data-urlencode "query=$1" \
        "http://127.0.0.1:$prometheus_port/api/v1/query"
}

is_read() {
    query 'up{job="slackwater"}' | grep '"value":\[[0-9.]*,"1"\]'
}

prometheus_reads() {
    wait_until "$HEALTHY_LIMIT_SECONDS" "Prometheus reads the appliance" is_read
    curl --silent --fail --max-time 60 "http://127.0.0.1:$prometheus_port/api/v1/rules" | grep SlackwaterStorePoisoned
    # Each expression of the dashboard is one that Prometheus can compute.
    python3 - "$root/deploy/grafana/dashboards/slackwater.json" >"$scratch/expressions" <<'END'
import json, sys
for panel in json.load(open(sys.argv[1]))["panels"]:
    for target in panel.get("targets", []):
        print(target["expr"].replace("$appliance", ".*").replace("$worker", ".*"))
END
    [ "$(wc -l <"$scratch/expressions")" -gt 20 ]
    local expression
    while read -r expression; do
        query "$expression" | grep '"status":"success"' >/dev/null || {
            echo "not computed: $expression"
            return 1
        }
    done <"$scratch/expressions"
    # Those of the appliance that need no two readings have a value, and so the labels that they should.
    while read -r expression; do
        query "$expression" | grep '"result":\[{' >/dev/null || {
            echo "without a value: $expression"
            return 1
        }
    done < <(grep -v 'rate(\|driver\|> 0' "$scratch/expressions")
}

alerts_fire() {
    local rules=$root/deploy/prometheus files=$scratch/rules alert
    while read -r alert; do
        grep "alertname=\"$alert\"\|alertname: $alert\$" "$rules/alerts_test.yml" >/dev/null || {
            echo "without a case in alerts_test.yml: $alert"
            return 1
        }
    done < <(sed -n 's/^ *- alert: //p' "$rules/alerts.yml")
    # As METRICS.md has it. What is in the last two is not looked at.
    mkdir "$files"
    cp "$rules"/{prometheus,alerts,alerts_test}.yml "$files"
    touch "$files"/slackwater-{token,ca.pem}
    chmod -R go+rX "$files"
    promtool check config /etc/prometheus/prometheus.yml
    promtool test rules /etc/prometheus/alerts_test.yml
}

# In a container of its own: that of the service has a read-only root, no place for temporary files, and of these files
# only what users need.
promtool() {
    timeout 300 docker run --rm --network none --tmpfs /tmp --volume "$scratch/rules:/etc/prometheus:ro" \
        --entrypoint promtool "$(inspect prometheus '{{.Config.Image}}')" "$@"
}

# An NFSv3 NULL call in one record; the reply must be an accepted success of the same number.
nfs_answers() {
    local call='\x80\x00\x00\x28\x00\x00\x10\x49\x00\x00\x00\x00\x00\x00\x00\x02'
    call+='\x00\x01\x86\xa3\x00\x00\x00\x03\x00\x00\x00\x00'
    call+='\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00'
    exec {socket}<>"/dev/tcp/127.0.0.1/$nfs_port"
    # shellcheck disable=SC2059  # the call has no percent sign
    printf "$call" >&"$socket"
    timeout 60 head --bytes=28 <&"$socket" | od -A n -t x1 -v | tr -d ' \n' >"$scratch/reply"
    cat "$scratch/reply"
    [ "$(cat "$scratch/reply")" = \
        80000018000010490000000100000000000000000000000000000000 ]
}

# ---- data

# The command, with the token that `token_read` has written.
cli() {
    "$slackwater" --token-file "$scratch/token" "$@"
}

import_disk() {
    head --bytes="$DISK_DATA_BYTES" /dev/urandom >"$scratch/original.img"
    truncate --size="$DISK_BYTES" "$scratch/original.img"
    cli file create /empty.img 1GiB
    [ "$(cli --json file stat /empty.img | grep -o '"size_bytes": *[0-9]*' \
        | grep -o '[0-9]*$')" = $((1024 * 1024 * 1024)) ]
    cli import --verify "$scratch/original.img" /disk.img
}

# change PATH COPY OFFSET: new bytes into the file, and into the copy that says what it must hold.
change() {
    head --bytes="$CHANGE_BYTES" /dev/urandom >"$scratch/change"
    curl --silent --show-error --fail --max-time 150 --request PUT \
        --header 'Content-Type: application/octet-stream' --header "@$scratch/authorization" \
        --data-binary "@$scratch/change" "$SLACKWATER_API/v1/files/$1/data?offset=$3"
    dd if="$scratch/change" of="$2" oflag=seek_bytes seek="$3" conv=notrunc status=none
}

take_snapshot() {
    cli snapshot create /disk.img --name before >"$scratch/snapshot"
    cp --sparse=always "$scratch/original.img" "$scratch/source.img"
    change disk.img "$scratch/source.img" "$SOURCE_CHANGE_OFFSET"
}

make_clone() {
    cli clone before /clone.img
    cp --sparse=always "$scratch/original.img" "$scratch/clone.img"
    change clone.img "$scratch/clone.img" "$CLONE_CHANGE_OFFSET"
}

# Three ways to read; three different contents.
all_equal() {
    curl --silent --show-error --fail --max-time 300 --output "$scratch/read.img" \
        --header "@$scratch/authorization" \
        "$SLACKWATER_API/v1/snapshots/$(cat "$scratch/snapshot")/data"
    cmp "$scratch/original.img" "$scratch/read.img"
    cli export --force before "$scratch/read.img"
    cmp "$scratch/original.img" "$scratch/read.img"
    cli export --force --file /disk.img "$scratch/read.img"
    cmp "$scratch/source.img" "$scratch/read.img"
    cli export --force --file /clone.img "$scratch/read.img"
    cmp "$scratch/clone.img" "$scratch/read.img"
    not cmp --silent "$scratch/clone.img" "$scratch/original.img"
    not cmp --silent "$scratch/source.img" "$scratch/original.img"
}

# ---- the registry

registry_answers() {
    wait_until 150 "the registry listens" listens "$registry_port"
    curl --silent --show-error --fail --max-time 60 "http://127.0.0.1:$registry_port/v2/"
}

push_and_pull() {
    local name=127.0.0.1:$registry_port/probe:1
    head --bytes=100000 /dev/urandom >"$scratch/probe"
    tar --create --directory "$scratch" probe | docker import - "$name"
    timeout 300 docker push "$name"
    docker image rm "$name"
    timeout 300 docker pull "$name"
    docker create --name probe --network none "$name" /probe
    docker cp probe:/probe "$scratch/probe.pulled"
    docker rm probe
    cmp "$scratch/probe" "$scratch/probe.pulled"
}

# ---- the worker

# A command of its Docker.
worker_docker() {
    COMPOSE_PROFILES=worker compose exec -T worker docker "$@"
}

is_worker_healthy() {
    [ "$(COMPOSE_PROFILES=worker inspect worker '{{.State.Health.Status}}')" = healthy ]
}

worker_healthy() {
    wait_until "$HEALTHY_LIMIT_SECONDS" "the worker is healthy" is_worker_healthy || {
        COMPOSE_PROFILES=worker compose logs --tail=40 worker
        return 1
    }
}

worker_up() {
    # As the image has it that is made where packages can be fetched.
    make_image worker-base --variant=minbase --include=ca-certificates,docker.io,e2fsprogs
    docker import "$cache/worker-base-$(dpkg --print-architecture).tar" worker-base
    SLACKWATER_WORKER_BASE=worker-base COMPOSE_PROFILES=worker make_target up
    worker_healthy
    cli worker list | grep 'compose-.*joined'
    # Devices of its disks are found by it.
    cli worker list | grep -o '[0-9a-f]*-[0-9a-f]*-[0-9a-f]*-[0-9a-f]*-[0-9a-f]*' | sed 's|^|/workers/|' >"$scratch/workers"
    [ -s "$scratch/workers" ]
}

worker_runs() {
    local name=127.0.0.1:$registry_port/hello:1
    worker_docker import - debian:12 <"$cache/debian-12-$(dpkg --print-architecture).tar"
    worker_docker run --name work --network none debian:12 sh -c 'echo hello >/hello'
    worker_docker commit work "$name"
    worker_docker push "$name"
    worker_docker image rm "$name"
    worker_docker pull "$name"
    [ "$(worker_docker run --rm --network host "$name" cat /hello)" = hello ]
    # Its disks are the appliance's.
    cli snapshot ls | grep workers/
}

# That it is the same worker, with its images, and works.
worker_same() {
    local name=127.0.0.1:$registry_port/again:1
    worker_healthy
    [ "$(cli worker list | grep -c compose-)" = 1 ]
    [ "$(worker_docker run --rm --network none "127.0.0.1:$registry_port/hello:1" cat /hello)" = hello ]
    worker_docker start --attach work
    worker_docker commit work "$name"
    [ "$(worker_docker run --rm --network none "$name" cat /hello)" = hello ]
    worker_docker image rm "$name"
}

worker_restarts() {
    # Nothing has synced it.
    worker_docker run --name late --network none debian:12 sh -c 'seq 100000 >/late'
    COMPOSE_PROFILES=worker compose restart worker
    worker_same
    worker_docker cp late:/late - | tar --extract --to-stdout | cmp - <(seq 100000)
}

# ---- endurance

restart_keeps() {
    local started_before
    started_before=$(inspect slackwater '{{.State.StartedAt}}')
    # Its own limit is two minutes, after which it would be killed.
    compose restart slackwater
    [ "$(inspect slackwater '{{.State.StartedAt}}')" != "$started_before" ]
    # What it says last before it ends in order, and no sooner.
    docker logs "$(container slackwater)" >"$scratch/log" 2>&1
    cat "$scratch/log"
    [ "$(grep -c 'closed$' "$scratch/log")" = 1 ]
    appliance_healthy
    all_equal
    worker_same
}

# Both volumes, and no container in any state.
only_volumes_left() {
    [ -z "$(docker ps --all --quiet)" ]
    # docker-compose 1.29 makes those of services that are not started, too.
    [ "$(docker volume ls --quiet --filter name=slackwater- | grep -v 'slackwater-\(grafana\|prometheus\|worker\)' | sort \
        | tr '\n' ' ')" = "slackwater-data slackwater-registry " ]
}

make_down() {
    make_target down
    only_volumes_left
    not listens "$api_port"
}

up_again() {
    make_target up
    appliance_healthy
    all_equal
    cli check
    timeout 300 docker pull "127.0.0.1:$registry_port/probe:1"
}

# ---- other machines

# As deploy/compose/network.yml says, with loopback as the network.
with_network() {
    export COMPOSE_FILE=docker-compose.yml:deploy/compose/network.yml
    export SLACKWATER_SETTINGS=$scratch/settings SLACKWATER_NFS_CLIENT=127.0.0.0/8:rw
}

for_others() {
    local settings=$scratch/settings
    make_target down
    install -d -o 10049 -g 10049 -m 700 "$settings"
    in_image() { compose run --rm -T --no-deps -v "$settings:/settings" slackwater "$@"; }
    (umask 077; in_image token add ops admin --token-file /settings/tokens >"$scratch/ops")
    in_image certificate 127.0.0.1 --directory /settings
    rm "$settings/ca-key.pem"
    with_network
    compose config >"$scratch/config.yml"
    grep -E 'SLACKWATER_NFS_LISTEN: .?0\.0\.0\.0:2049' "$scratch/config.yml"
    grep -E 'SLACKWATER_API_LISTEN: .?0\.0\.0\.0:8049' "$scratch/config.yml"
    not env --unset=SLACKWATER_NFS_CLIENT make --no-print-directory --directory "$root" --old-file=build \
        "COMPOSE=$compose_command" up >"$scratch/said" 2>&1
    grep "the networks of the clients" "$scratch/said"
    make_target up
}

others_health() {
    with_network
    wait_until "$HEALTHY_LIMIT_SECONDS" "the container is healthy" is_healthy || {
        compose logs --tail=20
        inspect slackwater '{{json .State.Health}}'
        return 1
    }
    local name check port said
    name=$(container slackwater)
    check=$(docker inspect --format '{{index .Config.Healthcheck.Test 3}}' "$name")
    docker exec "$name" bash -c "$check"
    not docker exec --env "SLACKWATER_METRICS_LISTEN=127.0.0.1:1" "$name" bash -c "$check"
    # Pages of an appliance that refuses writes, and of something else.
    port=$prometheus_port
    for said in 'slackwater_store_poisoned 1' 'something else'; do
        python3 -c '
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
client, _ = server.accept()
client.recv(1000)
client.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + sys.argv[2].encode() + b"\n")
' "$port" "$said" &
        wait_until 60 "the page listens" listening_without_a_connection "$port"
        not docker exec --env "SLACKWATER_METRICS_LISTEN=127.0.0.1:$port" "$name" bash -c "$check"
        wait
    done
}

# A connection to look would be the one that is answered.
listening_without_a_connection() {
    grep -q "0100007F:$(printf '%04X' "$1") 00000000:0000 0A" /proc/net/tcp
}

others_reach() {
    with_network
    local ca=$scratch/settings/ca.pem
    "$slackwater" --api "https://127.0.0.1:$api_port" --ca "$ca" --token-file "$scratch/ops" file stat /disk.img
    # The token that it made for itself counts no more.
    [ "$(curl --silent --output /dev/null --write-out '%{http_code}' --max-time 60 --cacert "$ca" \
        --header "@$scratch/authorization" "https://127.0.0.1:$api_port/v1/stats")" = 401 ]
    not curl --silent --fail --max-time 60 "http://127.0.0.1:$api_port/readyz"
    nfs_answers
}

down_again() {
    make_target down
    only_volumes_left
    local port
    for port in "$nfs_port" "$api_port" "$registry_port" "$metrics_port" "$prometheus_port"; do
        not listens "$port"
    done
}

"""The client of Linux in TLS (RFC 9289): Debian 13's kernel and tlshd, in a second guest.

    kernel -- plain text: MNT ------------> recording proxy --> appliance, which offers TLS
    kernel -- question, then TLS: NFS ----> (every byte is kept)
       tlshd makes the handshakes, and knows the appliance by the authority in /run/own.pem

The proxy's recording is what those see who see the traffic: it may have nothing of what is written.
"""

import contextlib
import os
import re
import subprocess
import time

import appliance
import recording_proxy
import trixie
from scenario import require, scenario
from scenarios import kernel_mutual_tls

# Names by which the guest knows its gateway, behind which the appliance is; the certificate has the first.
NAME, OTHER_NAME = "appliance", "stranger"
MOUNT_PROGRAM = 100005
BULK_BYTES = 4_000_000
# What the lists of the writers must grow by before and after the server's end.
PROGRESS = 2
# So many pieces of what is written are looked for in the recording, of so many bytes each.
SAMPLES, SAMPLE_BYTES = 64, 32


def _certify(directory):
    """Makes an authority and a certificate of it with what the server has for that."""
    command = [os.environ["SLACKWATERD"], "certificate", NAME, "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{command}: {done.stderr}")


def _put(guest, path, text):
    """Writes a text file in the guest."""
    guest.run(f"cat >{path} <<'END'\n{text}\nEND")


class _Trial:
    """An appliance with a certificate, the proxy before it, and the guest behind that."""

    def __init__(self, world, cleanup):
        home = world.scratch / "tls"
        home.mkdir()
        for name in ("own", "foreign"):
            _certify(home / name)
        own = home / "own"
        self.home, self.authority = home, own / "ca.pem"
        self._files = ["--tls-cert", str(own / "cert.pem"), "--tls-key", str(own / "key.pem")]
        self.server = world.appliance.another(home / "data", authority=own / "ca.pem")
        cleanup.callback(self.server.kill)
        self.start()
        self.proxy = recording_proxy.Proxy(self.server.nfs_port)
        cleanup.callback(self.proxy.close)
        self._machine = trixie.boot(world, home)
        cleanup.callback(self._machine.stop)
        for name in ("own", "foreign"):
            _put(self._machine, f"/run/{name}.pem", (home / name / "ca.pem").read_text())
        _put(self._machine, "/etc/hosts", f"127.0.0.1 localhost\n10.0.2.2 {NAME} {OTHER_NAME}")
        _put(self._machine, "/run/appliance", f"nfs_port={self.proxy.port}")

    def start(self):
        """Starts the server, which offers TLS."""
        self.server.start(*self._files)

    def ask_for_certificates(self):
        """From the next start on, clients in TLS are asked for a certificate of the same authority."""
        self._files += ["--nfs-tls", "mutual", "--nfs-tls-client-ca", str(self.authority)]

    def put(self, path, text):
        """Writes a text file in the guest."""
        _put(self._machine, path, text)

    def guest(self, script):
        """Runs a script in the guest; a failure tells what tlshd and the kernel said."""
        return trixie.run(self._machine, f". /tls.sh\n{script}", "/run/tlshd.log")

    def connections(self):
        """How many connections in TLS the server has had since its start."""
        text = self.server.request("GET", "/metrics").decode()
        return int(re.search(r"^slackwater_nfs_tls_connections_total (\d+)", text, re.M).group(1))

    def acknowledged(self):
        """What the writers know to be durable, by list."""
        answer = self.guest("writers_healthy; acknowledged records; acknowledged bulk")
        return [int(word) for word in answer.split()]

    def wait_for_progress(self, since):
        """Returns when every list has grown by PROGRESS; the scenario's limit ends the wait."""
        while any(now < then + PROGRESS for now, then in zip(self.acknowledged(), since, strict=True)):
            time.sleep(0.2)


def _require_refusals(trial):
    """Who does not know the appliance's authority, or calls it by another name, mounts nothing."""
    for authority, name, why in (
        ("foreign", NAME, "signer not found"), ("own", OTHER_NAME, "owner unexpected"),
    ):
        trial.guest(f"""
            tlshd_start /run/{authority}.pem
            refused 'access denied' tls_mount {name}:{trial.server.mount_path()} /t
            grep -q '{why}' /run/tlshd.log || fail "tlshd has another reason"
            tlshd_end
            if grep ' /t nfs ' /proc/mounts; then fail "it is mounted"; fi""")
    _require_no_call_in_plain_text(trial.proxy.heard())
    require(trial.connections() == 0, "the server counts a connection in TLS whose client refused it")


def _write_through_a_restart(world, trial):
    """Mounts, and kills the server while the guest writes; what was acknowledged is there in the end."""
    mounted = trial.guest(f"""
        tlshd_start /run/own.pem
        tls_mount {NAME}:{trial.server.mount_path()} /t
        grep ' /t nfs ' /proc/mounts
        dd if=/pool of=/t/whole bs=1M conv=fsync status=none
        writers_clear
        background records records_write records /t/records oflag=append conv=notrunc,fsync
        background bulk bulk_write bulk /t {BULK_BYTES}""")
    require(",xprtsec=tls," in mounted, f"mounted otherwise: {mounted}")
    trial.wait_for_progress([0, 0])
    require(trial.connections() >= 1, "the server counts no connection in TLS")
    trial.server.kill()
    acknowledged = trial.acknowledged()
    trial.start()
    trial.wait_for_progress(acknowledged)
    require(trial.connections() >= 1, "the server counts no connection in TLS after its restart")
    trial.guest("writers_stop; caches_drop; cmp /pool /t/whole; records_last /t/records")
    records, bulk = trial.acknowledged()
    whole = trial.server.request("GET", f"{appliance.file_route('whole')}/data")
    require(whole == world.pool, "REST reads other bytes than the kernel wrote")
    written = trial.server.request("GET", f"{appliance.file_route(f'bulk-{bulk}')}/data")
    require(written == world.pool[bulk:bulk + BULK_BYTES], f"file {bulk} of the writer differs")
    lines = trial.server.request("GET", f"{appliance.file_route('records')}/data").splitlines()
    require(len(lines) >= records, f"{records} records were acknowledged, {len(lines)} are there")
    trial.guest("tls_unmount /t")


def _require_no_call_in_plain_text(heard):
    """Nothing but the calls of the mount protocol went in plain text."""
    called = {call for connection in heard for call in connection.procedures()}
    others = {call for call in called if call[0] != MOUNT_PROGRAM}
    require(not others, f"(program, procedure) in plain text: {sorted(others)}")


def _has_data_of(heard, pool):
    """Whether any connection shows a piece of the pool as it is."""
    places = range(0, len(pool) - SAMPLE_BYTES, len(pool) // SAMPLES)
    streams = [stream for connection in heard for stream in (connection.calls, connection.replies)]
    return any(pool[at:at + SAMPLE_BYTES] in stream for at in places for stream in streams)


def _require_secrecy(world, trial):
    """What was heard of the writing tells nothing of it; the same in plain text would have."""
    heard = trial.proxy.heard()
    _require_no_call_in_plain_text(heard)
    require(not _has_data_of(heard, world.pool), "the data can be read on the way")
    encrypted = [connection for connection in heard if connection.asks_for_tls()]
    sent = sum(len(connection.calls) for connection in encrypted if connection.data_records())
    require(sent > len(world.pool), f"{sent} bytes went to the server in TLS")
    trial.proxy.forget()
    trial.guest(f"""
        tls_mount {NAME}:{trial.server.mount_path()} /t xprtsec=none
        cmp /pool /t/whole
        tls_unmount /t""")
    require(_has_data_of(trial.proxy.heard(), world.pool), "the recording shows no data in plain text either")


@scenario("Debian 13's kernel and tlshd: xprtsec=tls and mtls through restarts; no data in plain text", 240)
def kernel_in_tls(world):
    with contextlib.ExitStack() as cleanup:
        trial = _Trial(world, cleanup)
        _require_refusals(trial)
        trial.proxy.forget()
        _write_through_a_restart(world, trial)
        _require_secrecy(world, trial)
        kernel_mutual_tls.check(trial)
        trial.server.stop()

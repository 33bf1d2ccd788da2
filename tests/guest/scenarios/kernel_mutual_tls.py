"""The client of Linux in mutual TLS: `xprtsec=mtls`, with the certificate of a worker that joined.

    kernel -- plain text: MNT of the worker's secret path --> appliance
    kernel -- TLS, with a certificate: NFS -----------------> appliance: reaches that worker's files alone

It goes on where kernel_tls.py ends: with its appliance, its proxy and its guest. The proxy calls the appliance from
loopback, where plain text is served; fuse/tests/export/encrypted.rs calls it from elsewhere.
"""

import json
import os
import subprocess
import uuid

from scenario import require

NAME = "appliance"
MOUNT_PROGRAM = 100005


def _join(trial):
    """Has a worker join the appliance; returns its id, and the appliance as it is for that worker."""
    server, state = trial.server, trial.home / "worker"
    state.mkdir()
    token = server.call("POST", "/v1/workers", {"name": "guest"})["join_token"]
    command = [
        os.environ["SLACKWATER_DRIVER"], "--api", f"https://127.0.0.1:{server.api_port}",
        "--ca", str(trial.authority), "--state-dir", str(state), "join",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLACKWATER")}
    done = subprocess.run(command, input=token, capture_output=True, text=True, env=environment, check=False)
    require(done.returncode == 0, f"{command}: {done.stderr}")
    credential = (state / "credential").read_text().strip()
    listed = server.call("GET", "/v1/workers")
    joined = [worker for worker in listed["workers"] if worker["name"] == "guest"]
    require(joined, f"no worker `guest`: {json.dumps(listed)}")
    return joined[0]["worker_id"], server.for_bearer(credential)


def _certify(trial, directory, worker_id, name):
    """Makes a certificate of the worker by the authority in the directory, and puts it and its key into the guest."""
    command = [os.environ["SLACKWATERD"], "certificate", "--worker", worker_id, "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"{command}: {done.stderr}")
    for end in (".pem", "-key.pem"):
        trial.put(f"/run/{name}{end}", (directory / f"worker-{worker_id}{end}").read_text())
    trial.guest(f"chmod 600 /run/{name}-key.pem")
    return f"/run/{name}.pem /run/{name}-key.pem"


def check(trial):
    """A worker's mount by the kernel, through a restart; and what others get of it."""
    worker_id, worker = _join(trial)
    home = trial.authority.parent
    own = _certify(trial, home, worker_id, "worker")
    refused = [
        ("of another worker", "mtls", _certify(trial, home, str(uuid.uuid4()), "other")),
        ("of another authority", "mtls", _certify(trial, home.with_name("foreign"), worker_id, "unknown")),
        ("none", "tls", ""),
    ]
    trial.server.stop()
    trial.ask_for_certificates()
    trial.start()
    trial.proxy.forget()
    trial.guest(f"""
        tlshd_end
        tlshd_start /run/own.pem {own}
        tls_mount {NAME}:{worker.mount_path()} /t xprtsec=mtls
        grep -q ' /t nfs .*,xprtsec=mtls,' /proc/mounts || fail "mounted otherwise: $(grep ' /t ' /proc/mounts)"
        dd if=/pool of=/t/workers/{worker_id}/whole bs=1M conv=fsync status=none""")
    trial.server.kill()
    trial.start()
    trial.guest(f"""
        caches_drop
        cmp /pool /t/workers/{worker_id}/whole
        tls_unmount /t
        tlshd_end""")
    # The path is the worker's, as one that was seen on the way: it is of no use by itself.
    for what, mode, shown in refused:
        trial.guest(f"""
            tlshd_start /run/own.pem {shown}
            refused 'access denied' tls_mount {NAME}:{worker.mount_path()} /t xprtsec={mode}
            if grep ' /t nfs ' /proc/mounts; then fail "mounted by a certificate that is {what}"; fi
            tlshd_end""")
    called = {call for connection in trial.proxy.heard() for call in connection.procedures()}
    require({program for program, _ in called} == {MOUNT_PROGRAM}, f"(program, procedure) in plain text: {called}")

"""The registry: Debian's docker-registry on loopback, with its access log and a byte meter.

```
engines --meter--> Registry, by HTTP, for all  --\
engines ---------> PasswordRegistry, by TLS    --- the same images
```
"""

import contextlib
import hashlib
import json
import pathlib
import re
import sys
import urllib.parse
import urllib.request

from meter import Reading
from process import Process, run
from scenario import PATIENCE, require

METER = pathlib.Path(__file__).with_name("meter.py")
START_LIMIT_SECONDS = 30
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
CONFIGURATION = """
version: 0.1
log: {{accesslog: {{disabled: false}}, level: warn}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http:
  addr: "127.0.0.1:{port}"
"""
PASSWORD_CONFIGURATION = """
  tls: {{certificate: {directory}/server.pem, key: {directory}/server.key}}
auth:
  htpasswd: {{realm: slackwater, path: {directory}/htpasswd}}
"""
# Is 127.0.0.1 in the run's own /etc/hosts: a name of loopback would have no TLS.
PASSWORD_HOST = "registry.test"
USER, PASSWORD = "reader", "secret-of-readers"
# The password, by bcrypt, which is all that docker-registry takes.
PASSWORD_HASH = "$2y$05$abcdefghijklmnopqrstuuD5PLJgjcwe1Jqg9cRu5mXXU5UYKydqe"
CERTIFICATE_DAYS = 2
ACCESS = re.compile(r'"(GET|HEAD|PUT|POST|PATCH|DELETE) (\S+) HTTP/[0-9.]+" (\d+) (\d+)')


def metered(directory, name, target_port, listen_port):
    """A meter in front of a port: its process and its reading."""
    counters = directory / f"{name}.counters"
    reading = Reading(counters)
    process = Process(
        f"meter {name}", [sys.executable, METER, listen_port, target_port, counters],
        directory / f"{name}.meter.log",
    )
    process.start()
    process.wait_ready(START_LIMIT_SECONDS, lambda: listens(listen_port))
    return process, reading


def listens(port):
    """Whether a port of this machine is listened on; connects to nobody."""
    wanted = f"0100007F:{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return any(
            words[1] in (wanted, f"00000000:{port:04X}") and words[3] == "0A"
            for words in map(str.split, table)
        )


class Served:
    """A docker-registry, and what its log tells."""

    def __init__(self, title, configuration, text, port, log_path):
        configuration.write_text(text)
        self._port = port
        self._process = Process(title, ["docker-registry", "serve", configuration], log_path)

    def start(self):
        """Starts it and returns when it serves."""
        self._process.start()
        self._process.wait_ready(START_LIMIT_SECONDS, lambda: listens(self._port))

    def stop(self):
        """Ends it."""
        self._process.stop()

    @contextlib.contextmanager
    def away(self):
        """Does not serve in between."""
        self.stop()
        try:
            yield
        finally:
            Served.start(self)

    def position(self):
        """Now, for `requests`."""
        return self._process.log_position()

    def requests(self, position):
        """The requests since: (method, path, status, bytes of the answer)."""
        return [
            (found[1], found[2], int(found[3]), int(found[4]))
            for found in ACCESS.finditer(self._process.log_since(position))
        ]

    def blobs_fetched(self, position):
        """Digests of blobs whose bytes were sent since."""
        return {
            path.rsplit("/", 1)[1] for method, path, status, _ in self.requests(position)
            if method == "GET" and "/blobs/sha256:" in path and status < 300
        }


class Registry(Served):
    """The one for all; engines reach it through a meter."""

    def __init__(self, directory, new_port):
        self._directory = directory / "registry"
        self._directory.mkdir()
        self.port = new_port()
        self._inner_port = new_port()
        self.root = self._directory / "data"
        super().__init__(
            "docker-registry", self._directory / "config.yml",
            CONFIGURATION.format(root=self.root, port=self._inner_port), self._inner_port,
            directory / "registry.log",
        )
        self.meter = None

    def start(self):
        """Starts it and its meter."""
        super().start()
        _, self.meter = metered(self._directory, "registry", self._inner_port, self.port)

    def name(self, path):
        """The full name of an image in it."""
        return f"127.0.0.1:{self.port}/{path}"

    def manifest(self, image):
        """The manifest of `path:tag`."""
        path, tag = image.rsplit(":", 1)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._inner_port}/v2/{path}/manifests/{tag}",
            headers={"Accept": MANIFESTS},
        )
        with urllib.request.urlopen(request, timeout=START_LIMIT_SECONDS * PATIENCE) as answer:
            manifest = json.load(answer)
        require("layers" in manifest, f"no manifest of one image: {manifest}")
        return manifest

    def _send(self, method, url, data, content_type):
        """A request with a body; the headers of the answer."""
        url = urllib.parse.urljoin(f"http://127.0.0.1:{self._inner_port}/", url)
        headers = {"Content-Type": content_type, "Content-Length": str(len(data))}
        request = urllib.request.Request(url, method=method, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=START_LIMIT_SECONDS * PATIENCE) as answer:
            return answer.headers

    def put_blob(self, path, data):
        """Uploads a blob into a repository; its digest. (OCI distribution: POST, then PUT.)"""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        upload = self._send("POST", f"/v2/{path}/blobs/uploads/", b"", "")["Location"]
        joint = "&" if "?" in upload else "?"
        self._send("PUT", f"{upload}{joint}digest={digest}", data, "application/octet-stream")
        return digest

    def delete_blob(self, path, digest):
        """Takes a blob away from a repository."""
        self._send("DELETE", f"/v2/{path}/blobs/{digest}", b"", "")

    def put_manifest(self, image, manifest):
        """Uploads the manifest of `path:tag`; the image's full name."""
        path, tag = image.rsplit(":", 1)
        self._send("PUT", f"/v2/{path}/manifests/{tag}", json.dumps(manifest).encode(),
                   manifest["mediaType"])
        return self.name(image)


class PasswordRegistry(Served):
    """The images of another registry, by TLS, for those with a password. Its certificate is of an
    authority that only `authority` holds."""

    def __init__(self, directory, registry, new_port):
        directory.mkdir()
        self._directory = directory
        port = new_port()
        self.host = f"{PASSWORD_HOST}:{port}"
        self.authority = directory / "authority.pem"
        self._make_certificates()
        (directory / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
        text = CONFIGURATION + PASSWORD_CONFIGURATION
        super().__init__(
            "docker-registry with passwords", directory / "config.yml",
            text.format(root=registry.root, port=port, directory=directory), port,
            directory / "registry.log",
        )

    def _make_certificates(self):
        """An authority, and a certificate of it."""
        make = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-nodes", "-days", CERTIFICATE_DAYS)
        key = self._directory / "authority.key"
        run(*make, "-subj", "/CN=the authority of this test", "-keyout", key, "-out", self.authority)
        run(*make, "-CA", self.authority, "-CAkey", key, "-subj", f"/CN={PASSWORD_HOST}",
            "-addext", f"subjectAltName=DNS:{PASSWORD_HOST}", "-addext", "basicConstraints=CA:FALSE",
            "-keyout", self._directory / "server.key", "-out", self._directory / "server.pem")

    def hosts(self):
        """The directory by which containerd trusts it (containerd, hosts.md)."""
        directory = self._directory / "hosts"
        of_host = directory / self.host
        of_host.mkdir(parents=True, exist_ok=True)
        (of_host / "hosts.toml").write_text(
            f'server = "https://{self.host}"\n[host."https://{self.host}"]\nca = "{self.authority}"\n'
        )
        return directory

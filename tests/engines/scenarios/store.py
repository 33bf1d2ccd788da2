"""Images of a Docker that keeps them in containerd, as release 29 does: found there by what Docker's API tells. That
API is a stand-in here, over a real containerd."""

import contextlib
import http.server
import json
import pathlib
import socketserver
import threading
import urllib.parse

from scenario import require, require_equal, scenario
from scenarios.cri import NEWER_ONES


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def docker(socket, containerd, names):
    """What `image` commands ask of such a Docker, which calls images by these names."""

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers as Docker 29 does (API 1.52)."""

        def do_GET(self):
            path = urllib.parse.unquote(self.path)
            known = {f"/images/{name}/json": name for name in names}
            if path == "/info":
                self.answer(200, {
                    "ServerVersion": "29.0.0", "Driver": "slackwater",
                    "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
                    "Containerd": {
                        "Address": str(containerd.socket),
                        "Namespaces": {"Containers": containerd.namespace, "Plugins": "plugins.moby"},
                    },
                })
            elif path in known:
                self.answer(200, {"Id": "sha256:" + "0" * 64, "RepoTags": [names[known[path]]],
                                  "RootFS": {"Type": "layers", "Layers": []}})
            else:
                self.answer(404, {"message": f"No such image: {path}"})

        def answer(self, status, body):
            """One answer of JSON."""
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

        def address_string(self):
            return "unix"

    pathlib.Path(socket).unlink(missing_ok=True)
    with _Server(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"unix://{socket}"
        finally:
            server.shutdown()


@scenario("image: convert and export of a Docker that keeps its images in containerd", 300, also=NEWER_ONES)
def containerd_store(world):
    worker, image = world.worker("a"), world.images.layered()
    containerd, made = worker.containerd, world.registry.name("stored:1")
    containerd.must_pull_through_cri(image)
    archive = worker.directory / "stored.tar"
    # As `docker inspect` takes an image: by its name, or its id.
    names = {image: image, "0123456789ab": image, made: made, "familiar": "familiar:latest"}
    containerd.ctr("images", "tag", image, "docker.io/library/familiar:latest")
    second = world.registry.name("stored:2")
    with docker(worker.directory / "docker-29.sock", containerd, names) as host:
        worker.driver.image("convert", "--docker-host", host, image, made)
        worker.driver.image("convert", "--docker-host", host, "0123456789ab", second)
        worker.driver.image("export", "--docker-host", host, "familiar",
                            "--output", worker.directory / "familiar.tar")
        worker.driver.image("export", "--docker-host", host, made, "--output", archive)
        refused = worker.driver.attempt(
            "--state-dir", worker.driver.state, "image", "export", "--docker-host", host, "missing:1",
            "--output", str(worker.directory / "none.tar"))
        require("No such image" in refused.must_fail(), refused.text)
    for number, converted in enumerate([made, second]):
        output = containerd.run(converted, f"stored-{number}", "cat", "/three")
        require_equal(f"run of {converted}", output, "three\n")
    world.plain("load", "--input", str(archive))
    require_equal("exported", world.plain.run(made, "cat", "/two/link"), "one")
    world.plain("image", "rm", made)

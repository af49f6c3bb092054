"""A server in place of Google's, and the startup script of a machine, for the scenario of the release.

Objects and secrets are files; any token will do.
"""

import base64
import json
import shutil
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SOURCES = Path("/opt/src/infra")
OBJECTS, SECRETS = Path("/cloud/objects"), Path("/cloud/secrets")
PROGRAM = Path("/usr/local/lib/diloco-startup.py")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        what, _, rest = urllib.parse.urlsplit(self.path).path[1:].partition("/")
        if what == "m" and rest == "attributes/diloco":
            self.answer(json.dumps(self.server.parameters).encode())
        elif what == "m":
            about = {"zone": b"projects/1/zones/us-central1-a", "id": b"7", "name": b"here"}
            self.answer(about.get(rest, b'{"access_token": "any"}'))
        elif what == "s":
            data = (SECRETS / rest.removesuffix(":access")).read_bytes()
            encoded = base64.b64encode(data).decode()
            self.answer(json.dumps({"payload": {"data": encoded}}).encode())
        else:
            self.send(self.server.objects / urllib.parse.unquote(rest.partition("/o/")[2]))

    def do_PUT(self):
        value = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.attributes[self.path.removeprefix("/m/guest-attributes/")] = value
        self.answer(b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.logged += body["entries"]
        self.answer(b"{}")

    def send(self, path):
        self.send_response(200)
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        with path.open("rb") as file:
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def answer(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Cloud:
    """Metadata, objects and secrets on this machine; `parameters` are what it is to be.

    Args:
        objects: a folder to which a scenario may add some.
    """

    def __init__(self, objects):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.parameters, self.server.objects = {}, objects
        self.server.attributes, self.server.logged = {}, []
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        PROGRAM.write_text(self.startup_script())

    def startup_script(self):
        """Returns Terraform's startup script, but for the addresses of Google's services."""
        files = {path.name: path.read_text() for path in SOURCES.glob("*.py")}
        url = f"http://127.0.0.1:{self.server.server_port}"
        for there, here in (
            ("http://metadata.google.internal/computeMetadata/v1/instance/", f"{url}/m/"),
            ("https://storage.googleapis.com/storage/v1/", f"{url}/o/"),
            ("https://secretmanager.googleapis.com/v1/", f"{url}/s/"),
            ("https://logging.googleapis.com/v2/entries:write", f"{url}/logged"),
        ):
            assert there in files["cloud.py"]
            files["cloud.py"] = files["cloud.py"].replace(there, here)
        template = (SOURCES / "terraform/startup.py.tftpl").read_text()
        assert "${jsonencode(files)}" in template
        return template.replace("${jsonencode(files)}", json.dumps(files))

    def actions(self):
        """Returns the actions in the daemons' logs that have left the machine."""
        found = [entry.get("jsonPayload", {}).get("action") for entry in list(self.server.logged)]
        return set(filter(None, found))

    def boot(self, **parameters):
        """Boot as this; the status, and what was said."""
        self.server.parameters = {"bucket": "configuration", "kind": "cpu"} | parameters
        said = []
        with subprocess.Popen(
            [sys.executable, PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as boot:
            for line in boot.stdout:
                print(f"   | {line[:300]}", end="", flush=True)
                said.append(line)
                if "again in" in line:
                    boot.kill()
        return boot.returncode, "".join(said)

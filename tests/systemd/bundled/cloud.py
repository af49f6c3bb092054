"""A server in place of Google's, and the startup script of a machine, for the scenario of the bundle.

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
            self.answer(b'{"access_token": "any"}')
        elif what == "s":
            data = (SECRETS / rest.removesuffix(":access")).read_bytes()
            encoded = base64.b64encode(data).decode()
            self.answer(json.dumps({"payload": {"data": encoded}}).encode())
        else:
            self.send(self.server.objects / urllib.parse.unquote(rest.partition("/o/")[2]))

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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        PROGRAM.write_text(self.startup_script())

    def startup_script(self):
        """What Terraform would write, but for the addresses of Google's services."""
        files = {name: (SOURCES / name).read_text() for name in ("boot.py", "release.py")}
        url = f"http://127.0.0.1:{self.server.server_port}"
        for there, here in (
            ("http://metadata.google.internal/computeMetadata/v1/instance/", f"{url}/m/"),
            ("https://storage.googleapis.com/storage/v1/", f"{url}/o/"),
            ("https://secretmanager.googleapis.com/v1/", f"{url}/s/"),
        ):
            assert there in files["boot.py"]
            files["boot.py"] = files["boot.py"].replace(there, here)
        template = (SOURCES / "terraform/startup.py.tftpl").read_text()
        assert "${jsonencode(files)}" in template
        return template.replace("${jsonencode(files)}", json.dumps(files))

    def boot(self, **parameters):
        """Boot as this; the status, and what was said."""
        self.server.parameters = {"bucket": "configuration", "kind": "cpu"} | parameters
        done = subprocess.run(
            [sys.executable, PROGRAM], check=False, capture_output=True, text=True, timeout=600
        )
        print("\n".join(f"   | {line[:300]}" for line in done.stdout.splitlines()), flush=True)
        if done.stderr.strip():
            print(done.stderr[-2000:], flush=True)
        return done.returncode, done.stdout

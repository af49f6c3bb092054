"""Servers that speak as S3 and Azure do: moto and Azurite, each a process of its own.

`make test-stores` has them installed in `.venv-stores`, and says so in DILOCO_TEST_SERVERS.
"""

import atexit
import base64
import contextlib
import functools
import hashlib
import hmac
import http.server
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

SERVERS = Path(os.environ["DILOCO_TEST_SERVERS"]) if "DILOCO_TEST_SERVERS" in os.environ else None
# Of Azurite's one account; its documentation names it.
ACCOUNT = "devstoreaccount1"
# Ends with this process.
_LIVING = contextlib.ExitStack()
atexit.register(_LIVING.close)
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def moto() -> Path:
    """The program that speaks S3."""
    return SERVERS / "bin" / "moto_server" if SERVERS else Path()


def azurite() -> Path:
    """The program that speaks as Azure's blobs do."""
    return SERVERS / "node_modules" / ".bin" / "azurite-blob" if SERVERS else Path()


@contextlib.contextmanager
def environment(scheme: str, address: str) -> Iterator[None]:
    """Returns the environment variables that a user of such a server would set."""
    said = {
        "s3": {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        },
        "az": {
            "AZURE_STORAGE_ENDPOINT": address, "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY, "AZURE_ALLOW_HTTP": "true",
        },
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said[scheme].items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[str]:
    """Its address, with a bucket."""
    port = _free_port()
    command = [moto(), "-H", "127.0.0.1", "-p", str(port)]
    with _served(command, folder, port) as address:
        ask("PUT", f"{address}/{bucket}", {})
        yield address


@contextlib.contextmanager
def azure_server(folder: Path, container: str) -> Iterator[str]:
    """Its address, with a container."""
    port = _free_port()
    command = [
        azurite(), "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder,
    ]  # fmt: skip
    with _served(command, folder, port) as address:
        _make_container(f"{address}/{ACCOUNT}", container)
        yield f"{address}/{ACCOUNT}"


@functools.cache
def shared(scheme: str) -> str:
    """Address of a server that lives as long as this process, with a bucket named `bucket`."""
    folder = Path(_LIVING.enter_context(tempfile.TemporaryDirectory()))
    serve = {"s3": s3_server, "az": azure_server}[scheme]
    return _LIVING.enter_context(serve(folder, "bucket"))


@contextlib.contextmanager
def changed(address: str, without: str) -> Iterator[str]:
    """A server that hands everything on to another, without one header of the requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_all(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            kept = {k: v for k, v in self.headers.items() if k.lower() != without.lower()}
            status, headers, body = ask(
                self.command, address + self.path, kept, self.rfile.read(size) if size else None
            )
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_all  # noqa: N815 - their names

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def _served(command: list, folder: Path, port: int) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _until_answers(process, port, folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _until_answers(process: subprocess.Popen, port: int, log: Path) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args}: {log.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(
    method: str, url: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, method=method, headers=headers, data=body)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def _make_container(address: str, container: str) -> None:
    """By a request that is signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    told = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    text = "PUT" + "\n" * 12 + told + resource
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Length"] = "0"
    status, _, body = ask("PUT", f"{address}/{container}?restype=container", headers)
    if status != 201:
        raise RuntimeError(f"no container: {status} {body.decode()}")

"""A webhook's receiver: a real HTTP server on the loopback interface that keeps what it is sent."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """A webhook's receiver, which remembers all posts.

    Attributes:
        url: takes POST.
        taken: bodies that were answered with 200, in order; `headers` of all requests.
        answers: statuses to give first, before all is well.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/hook/s3cr3t-path"
        self.taken: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []

    def of(self, status: str) -> list[dict[str, Any]]:
        """Bodies with a status."""
        return [one for one in self.taken if one["status"] == status]


@contextlib.contextmanager
def receiving(answers: Sequence[int] = (), port: int = 0) -> Iterator[Receiver]:
    """A receiver for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            found.headers.append(dict(self.headers))
            status = found.answers.pop(0) if found.answers else 200
            if status == 200:
                found.taken.append(json.loads(data))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found = Receiver(server.server_port)
    found.answers = [*answers]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

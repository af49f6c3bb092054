"""Answers Google's health checks, which ask whether a machine lives.

The machine's daemon is not asked: whether the daemon compiles, waits, has failed or has ended, a
new machine would not help it.
"""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# As infra/terraform has it.
LIVEZ_PORT = 9463


class _Livez(BaseHTTPRequestHandler):
    timeout = 10.0

    def do_GET(self) -> None:
        lives = self.path.partition("?")[0] == "/livez"
        self.send_response(HTTPStatus.OK if lives else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing, as health checks are no events."""


def livez_server(address: str = "", port: int = LIVEZ_PORT) -> ThreadingHTTPServer:
    """Returns a server for health checks, which succeed if it answers at all."""
    return ThreadingHTTPServer((address, port), _Livez)


if __name__ == "__main__":
    livez_server().serve_forever()

"""Answers Google's health checks, by which Google decides whether to recreate a machine.

A check succeeds if this process answers. The state of the machine's daemon does not count: a daemon
that compiles, waits, has failed or has ended would do the same on a new machine.
"""

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The port of infra/terraform's health checks.
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
    """Returns an HTTP server that answers GET /livez with 200, and other paths with 404."""
    return ThreadingHTTPServer((address, port), _Livez)


if __name__ == "__main__":
    livez_server().serve_forever()

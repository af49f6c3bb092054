"""The page over HTTP, on loopback: files, a stream of events, and learners page by page.

It only answers GET. What asks must have asked for this machine by a name of loopback (else a
foreign site that resolves to it could read the run, by DNS rebinding), and not from another site's
page. Requests, connections and open streams are bounded, and so is what a client may leave unread.
"""

import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

from diloco.common.errors import ConfigError
from diloco.dashboard import frames, runbook
from diloco.dashboard.board import Board

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8780
HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
# Open pages, connections of all kinds; more are turned away.
MOST_PAGES, MOST_CONNECTIONS = 16, 64
# A client that reads or writes nothing for so long has gone.
PATIENCE_S = 15.0
# Between two signs of life on a stream where nothing changes.
ALIVE_S = 3.0
QUERY, PAGE_DIGITS = 200, 9
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
}
FILES = (
    "dom.js",
    "lists.js",
    "page.css",
    "page.js",
    "plots.js",
    "theme.js",
    "uplot.css",
    "uplot.js",
)
# Nothing from elsewhere, nothing inline, nothing around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@contextmanager
def serving(board: Board, port: int | None) -> Iterator[str]:
    """Serve the page while the block lasts; its address.

    Args:
        board: what it shows.
        port: of loopback; None for the usual one, or another if that is in use.

    Raises:
        ConfigError: the port is not to be had.
    """
    server = _listen(board, port)
    thread = threading.Thread(target=server.serve_forever, name="dashboard", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/"
    finally:
        board.close()
        server.shutdown()
        server.server_close()
        thread.join()


def _listen(board: Board, port: int | None) -> "_Server":
    try:
        return _Server(board, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is None:
            return _Server(board, 0)
        raise ConfigError(
            f"cannot listen on {LOOPBACK}, port {port}: {error.strerror}",
            hint="another program has it, such as a second dashboard: give another --port, or "
            "--port 0 for any that is free",
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, board: Board, port: int) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.board = board
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Give the connection a thread, if one is free."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answer, and give the thread back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is the client's affair."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_S
    server_version = "diloco"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer, unless whoever asks is a stranger."""
        if not self._is_own():
            self.send_error(HTTPStatus.FORBIDDEN, explain="ask for http://127.0.0.1 or localhost")
            return
        path, _, query = self.path.partition("?")
        kept: dict[str, Callable[[], None]] = {
            "/": lambda: self._send("html", _asset("page.html")),
            "/events": self._events,
            "/learners": lambda: self._learners(query),
            "/settings": lambda: self._send("json", self.server.board.settings),
        }
        if path in kept:
            kept[path]()
        elif path[1:] in FILES:
            self._send(path.rpartition(".")[2], _asset(path[1:]))
        elif path.removeprefix("/runbooks/") in runbook.runbook_names():
            self._send("html", runbook.render(path.removeprefix("/runbooks/")).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _is_own(self) -> bool:
        """Whether a person or our own page asks: by a name of loopback, for no other site."""
        try:
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        site = self.headers.get("Sec-Fetch-Site", "none")
        navigates = self.headers.get("Sec-Fetch-Mode") == "navigate"
        return host in HOSTS and (site in ("none", "same-origin") or navigates)

    def _send(self, kind: str, body: bytes) -> None:
        self._begin(TYPES[kind])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)

    def end_headers(self) -> None:
        """With what keeps a browser from doing more with it than to show it."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _learners(self, query: str) -> None:
        given = urllib.parse.parse_qs(query[:QUERY])
        page = given.get("page", ["0"])[0]
        found = frames.learners(
            self.server.board.learners,
            page=int(page) if page.isdecimal() and len(page) < PAGE_DIGITS else 0,
            find=given.get("find", [""])[0],
        )
        self._send("json", frames.as_bytes(found))

    def _events(self) -> None:
        """The stream, until the page is closed or the server is."""
        board = self.server.board
        if not board.enter(MOST_PAGES):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        try:
            self._begin("text/event-stream")
            self.end_headers()
            # What a page leaves unread is dropped with it, and not kept for it.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            self._stream(board)
        finally:
            board.leave()

    def _stream(self, board: Board) -> None:
        number = 0
        with suppress(OSError):
            self.wfile.write(b"retry: 2000\n\n")
            while (found := board.after(number, ALIVE_S)) is not None:
                for event, frame in found.items():
                    self.wfile.write(b"event: %s\ndata: %s\n\n" % (event.encode(), frame.data))
                    number = max(number, frame.number)
                if not found:
                    self.wfile.write(b"event: alive\ndata: {}\n\n")

    def log_message(self, *_: object) -> None:
        """Requests are no events."""


def _asset(name: str) -> bytes:
    return files(__package__).joinpath("assets", name).read_bytes()

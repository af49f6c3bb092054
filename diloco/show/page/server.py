"""Serves the page over HTTP on loopback: files, a stream of changes, and learners page by page.

The server answers only GET. A request's header Host must name loopback (otherwise a foreign site
whose name resolves to loopback could read the run, by DNS rebinding), and the request must not come
from another site's page. Requests, connections, open streams and a client's unread bytes are
bounded. Each connection has a thread; beyond the bound, the oldest connection that is not an open
page is closed, so that no client blocks another.
"""

import json
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from diloco.common.protocol.errors import ConfigError
from diloco.show.page import runbook
from diloco.show.page.html_page import asset
from diloco.show.page.svg import NOTHING, Markup

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8780
HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
# The most open pages (more are refused), and other connections (then the oldest is closed).
MOST_PAGES, MOST_CONNECTIONS = 16, 64
# Seconds without reading or writing after which a client counts as gone.
PATIENCE_S = 15.0
# Seconds between two keep-alives on a stream where nothing changes.
ALIVE_S = 3.0
QUERY, PAGE_DIGITS = 200, 9
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
FILES = ("live.js", "page.css", "page.js", "theme.js")
# No resource of another site, no inline script, no embedding in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageEvent(NamedTuple):
    """A server-sent event.

    Attributes:
        number: greater than that of every earlier event.
        event: the event's type, for the page's script.
        data: JSON.
    """

    number: int
    event: str
    data: bytes


class Board:
    """The current contents of the page, shared by threads: `LivePage` writes, the server reads.

    Args:
        page: the HTML of the page with empty sections.

    Attributes:
        learners: returns the learners' section; takes the number of the page of learners, and a
            text that the learners' names contain.
    """

    def __init__(self, page: str) -> None:
        self.page = page.encode()
        self.learners: Callable[[int, str], Markup] = lambda _page, _find: NOTHING
        self._changed = threading.Condition()
        self._frames: dict[str, PageEvent] = {}
        self._number = 0
        self._readers = 0
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether a browser has the page open."""
        return self._readers > 0

    def show(self, parts: Mapping[str, Markup]) -> None:
        """Replaces sections by id; a section that has not changed is not sent again."""
        for name, part in parts.items():
            self._hang(name, "part", json.dumps(part).encode())

    def show_learners(self, learners: Callable[[int, str], Markup]) -> None:
        """Sets the attribute `learners`; open pages then request the learners' section again."""
        self.learners = learners
        self._hang("learners", "drawn", b"%d" % self._number)

    def say(self, said: Mapping[str, Any]) -> None:
        """Replaces the status at the page's head: JSON values for the page's script."""
        self._hang("", "state", json.dumps(said).encode())

    def _hang(self, name: str, event: str, data: bytes) -> None:
        with self._changed:
            if name not in self._frames or self._frames[name].data != data:
                self._number += 1
                self._frames[name] = PageEvent(self._number, event, data)
                self._changed.notify_all()

    def clear(self) -> None:
        """Removes all contents, since these become stale while no page is open."""
        with self._changed:
            self._frames.clear()

    def close(self) -> None:
        """Ends all streams: calls of `after` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def enter(self, most: int) -> bool:
        """Counts an open page; returns False if `most` are open already, or the board is closed."""
        with self._changed:
            if self._readers >= most or self._closed:
                return False
            self._readers += 1
            return True

    def leave(self) -> None:
        """Counts a page as closed."""
        with self._changed:
            self._readers -= 1

    def after(self, number: int, within_s: float) -> list[PageEvent] | None:
        """Waits for events with a greater number than `number`, and returns them in order.

        Returns an empty list if none comes within `within_s` seconds, None if the board is closed.
        """
        ends_s = time.monotonic() + within_s
        with self._changed:
            while not self._closed:
                found = [one for one in self._frames.values() if one.number > number]
                left_s = ends_s - time.monotonic()
                if found or left_s <= 0:
                    return sorted(found)
                self._changed.wait(left_s)
        return None


@contextmanager
def serving(board: Board, port: int | None) -> Iterator[str]:
    """Serves the page while the block lasts; yields the page's URL.

    Args:
        board: the contents of the page.
        port: port on loopback; 0: any free one; None: `DEFAULT_PORT`, or any free one.

    Raises:
        ConfigError: the port is in use.
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


def _listen(board: Board, port: int | None) -> "_PageServer":
    try:
        return _PageServer(board, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is None:
            return _PageServer(board, 0)
        raise ConfigError(
            f"cannot listen on {LOOPBACK}, port {port}: {error.strerror}",
            hint="another program has it, such as a second dashboard: give another --port, or "
            "--port 0 for any that is free",
        ) from error


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # A client waits for seconds if the queue of unaccepted connections is full.
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, board: Board, port: int) -> None:
        super().__init__((LOOPBACK, port), _PageHandler)
        self.board = board
        self._lock = threading.Lock()
        self._answered: dict[socket.socket, None] = {}  # the oldest first

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Gives the connection a thread; with too many connections, closes the oldest."""
        with self._lock:
            if len(self._answered) >= MOST_CONNECTIONS:
                oldest = next(iter(self._answered))
                del self._answered[oldest]
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._answered[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answers the connection's request, and then no longer counts the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.keep(request)

    def keep(self, request: socket.socket) -> None:
        """No longer counts a connection, so that it is not closed: it is an open page, or over."""
        with self._lock:
            self._answered.pop(request, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints the error, unless the connection broke or the client did not read on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageServer
    timeout = PATIENCE_S
    server_version = "diloco"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers a request; refuses it if another site sent it, or if Host is not loopback."""
        if not self._is_own():
            self.send_error(HTTPStatus.FORBIDDEN, explain="ask for http://127.0.0.1 or localhost")
            return
        path, _, query = self.path.partition("?")
        kept: dict[str, Callable[[], None]] = {
            "/": lambda: self._send("html", self.server.board.page),
            "/events": self._events,
            "/learners": lambda: self._learners(query),
        }
        if path in kept:
            kept[path]()
        elif path[1:] in FILES:
            self._send(path.rpartition(".")[2], asset(path[1:]).encode())
        elif path.removeprefix("/runbooks/") in runbook.runbook_names():
            self._send("html", runbook.render(path.removeprefix("/runbooks/")).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _is_own(self) -> bool:
        """Returns whether Host names loopback, and a person or this page sent the request."""
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
        """Adds `HEADERS`, which restrict what a browser may do with the page."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _learners(self, query: str) -> None:
        given = urllib.parse.parse_qs(query[:QUERY])
        page = given.get("page", ["0"])[0]
        number = int(page) if page.isdecimal() and len(page) < PAGE_DIGITS else 0
        found = self.server.board.learners(number, given.get("find", [""])[0])
        self._send("html", found.encode())

    def _events(self) -> None:
        """Sends the stream of events until the browser closes the page, or the server ends."""
        board = self.server.board
        if not board.enter(MOST_PAGES):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        self.server.keep(self.connection)
        try:
            self._begin("text/event-stream")
            self.end_headers()
            # Bytes that a page leaves unread are dropped with its connection.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            self._stream(board)
        finally:
            board.leave()

    def _stream(self, board: Board) -> None:
        number = 0
        with suppress(OSError):
            self.wfile.write(b"retry: 2000\n\n")
            while (found := board.after(number, ALIVE_S)) is not None:
                for one in found:
                    self.wfile.write(b"event: %s\ndata: %s\n\n" % (one.event.encode(), one.data))
                    number = one.number
                if not found:
                    self.wfile.write(b"event: alive\ndata: {}\n\n")

    def log_message(self, *_: object) -> None:
        """Logs nothing for requests."""

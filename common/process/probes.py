"""The probes of a daemon: /metrics for Prometheus, /livez, /readyz, and systemd's watchdog.

HTTP requests are answered on their own threads, so that a main loop that hangs can be seen.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from diloco.common.process import metrics
from diloco.common.process.config import MetricsSection, ServiceManager, service_manager
from diloco.common.process.health import Answer, Health, Starting
from diloco.common.process.metrics import Metrics
from diloco.common.process.retry import Retries
from diloco.common.protocol.errors import ConfigError

ANSWER_S = 10.0


@dataclass(frozen=True)
class Probes:
    """The metrics and the health of one daemon.

    Attributes:
        manager: the systemd to which the daemon reports its health, if any.
        start: reports the daemon's start to systemd.
    """

    metrics: Metrics
    health: Health
    manager: ServiceManager
    start: Starting


def make_probes(retries: Retries, **labels: str) -> Probes:
    """Returns the probes of a daemon that is starting.

    Args:
        retries: the daemon's retries, which health and metrics show.
        labels: labels of all metrics: `run`, and `learner` or `aggregator`, each with a name.
    """
    counted = Metrics(labels)
    health = Health(waiting=retries.now)
    counted.on_scrape(lambda: _show_health(counted, health))
    counted.on_scrape(lambda: _show_retries(counted, retries))
    manager = service_manager()
    return Probes(counted, health, manager, Starting(health, manager))


@contextmanager
def serving(section: MetricsSection, probes: Probes) -> Iterator[None]:
    """Serves the probes while the block runs, and reports the daemon's start to systemd.

    /metrics, /livez and /readyz are served only if `section.port` is not 0.

    Raises:
        ConfigError: another process uses the address and port, or they cannot be bound.
    """
    probes.start.begin()
    try:
        with _pages(section, probes) if section.port else nullcontext():
            yield
    finally:
        probes.start.over()


@contextmanager
def _pages(section: MetricsSection, probes: Probes) -> Iterator[None]:
    pages = {
        "/metrics": lambda: (HTTPStatus.OK, metrics.CONTENT_TYPE, probes.metrics.exposition()),
        "/livez": lambda: _answer(probes.health, lambda answer: answer.live),
        "/readyz": lambda: _answer(probes.health, lambda answer: answer.ready),
    }
    server = _listen(section, pages)
    thread = threading.Thread(target=server.serve_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Page = Callable[[], tuple[HTTPStatus, str, bytes]]


def _show_health(counted: Metrics, health: Health) -> None:
    answer = health.answer()
    counted.set(metrics.LIVE, answer.live)
    counted.set(metrics.READY, answer.ready)


def _show_retries(counted: Metrics, retries: Retries) -> None:
    for key, count in retries.faults.copy().items():
        counted.set(metrics.FAULTS, count, *key)
        counted.set(metrics.WAITING, retries.waiting[key], *key)


def _answer(health: Health, well: Callable[[Answer], bool]) -> tuple[HTTPStatus, str, bytes]:
    answer = health.answer()
    status = HTTPStatus.OK if well(answer) else HTTPStatus.SERVICE_UNAVAILABLE
    return status, "application/json", json.dumps(answer._asdict()).encode() + b"\n"


class _ProbeServer(ThreadingHTTPServer):
    daemon_threads = True
    # Does not wait for the threads of scrapers that have hung up.
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores a broken connection, which is the client's fault."""


def _listen(section: MetricsSection, pages: dict[str, Page]) -> _ProbeServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = ANSWER_S
        server_version = "diloco"
        sys_version = ""

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            status, kind, body = page()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, as scrapes are no events."""

    try:
        return _ProbeServer((section.listen, section.port), Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on metrics.listen {section.listen!r}, port {section.port}: "
            f"{error.strerror}",
            hint="each daemon of a machine needs a port of its own: set metrics.port, "
            "DILOCO_METRICS_PORT or --metrics-port",
        ) from error

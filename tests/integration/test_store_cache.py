"""A region's cache between learners and a bucket: nginx itself, and caches that lie.

Tests with nginx need Debian's package `nginx-light`; without it they are skipped.
"""

import contextlib
import getpass
import http.server
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from audit import read_tape
from google.auth.credentials import AnonymousCredentials
from harness import ENDLESS, ROOT, eventually
from small_disk import small_disk
from test_probes import page, total

from diloco.common.process.nats_server import free_port
from diloco.common.protocol import names, shards
from diloco.common.protocol.codecs import Encoded
from diloco.common.storage.store import CachedStore, MemoryStore, cached
from diloco.common.storage.store.gcs import GcsStore
from diloco.learner.background import TrafficCounts
from diloco.learner.wire.fetch_versions import VersionFetcher

sys.path.insert(0, str(Path(__file__).parents[1]))
from gcs_server import GcsServer

TEMPLATE = ROOT / "infra/terraform/modules/cache/nginx.conf.tftpl"
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None, reason="Debian's package `nginx-light` is not installed"
)


# --- A cache that does as a test says


class Liar(http.server.ThreadingHTTPServer):
    """Answers each request by `answer`, which gets the handler and the object's name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Lie)
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.kind = "true"
        self.objects: dict[str, bytes] = {}
        self.gone = threading.Event()

    def handle_error(self, *_: object) -> None:
        """A client that went away is no news."""


class _Lie(http.server.BaseHTTPRequestHandler):
    server: Liar

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        name = self.path[1:]
        server.asked.append(name)
        server.headers.append(dict(self.headers))
        data = server.objects[name]
        span, status = self.headers.get("Range"), 200
        if span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            data, status = data[first : last + 1], 206
        length = len(data)
        match server.kind:
            case "wrong bytes":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            case "truncated":
                data, length = data[:-1], length - 1
            case "cut off":
                data = data[:-1]
            case "an error page with 200":
                data = b"<html>Welcome</html>"
                length = len(data)
            case "an error":
                status = 502
            case "too much":
                length = 1 << 50
        if server.kind == "drips its headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            self._drip(b"X: y\r\n" * 10_000)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("X-Cache-Status", "HIT")
        self.end_headers()
        if server.kind == "drips":
            self._drip(data)
        else:
            self.wfile.write(data)

    def _drip(self, data: bytes) -> None:
        for byte in data:
            if self.server.gone.wait(0.05):
                return
            with contextlib.suppress(OSError):
                self.wfile.write(bytes([byte]))
                self.wfile.flush()


@pytest.fixture
def liar() -> Iterator[Liar]:
    server = Liar()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.gone.set()
    server.shutdown()
    server.server_close()


def stored(data: bytes) -> tuple[MemoryStore, str]:
    """A store with an object, named as aggregators do."""
    store = MemoryStore()
    name = names.version_object("lab", 0, 3, "delta", shards.digest(data))
    store.put(name, data)
    return store, name


DATA = np.random.default_rng(0).bytes(3000)
LIES = {
    "wrong bytes": "refused",
    "truncated": "refused",
    "cut off": "away",
    "an old object": "refused",
    "an error page with 200": "refused",
    "an error": "away",
    "too much": "away",
    "drips": "slow",
    "drips its headers": "slow",
}


@pytest.mark.parametrize("kind", LIES)
def test_what_a_cache_gives_is_not_believed(
    liar: Liar, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cached, "FIRST_S", 1.0)
    monkeypatch.setattr(cached, "BODY_S", 1.0)
    store, name = stored(DATA)
    liar.kind = kind
    liar.objects = {name: DATA[::-1] if kind == "an old object" else DATA}
    through = CachedStore(store, liar.url)
    began_s = time.monotonic()
    assert through.get(name) == DATA
    assert time.monotonic() - began_s < 3
    assert through.reads == {LIES[kind]: 1}
    # It is left alone for a while, and then asked again.
    assert through.get(name) == DATA
    assert through.reads == {LIES[kind]: 1, "paused": 1}
    liar.kind, liar.objects = "true", {name: DATA}
    again = CachedStore(store, liar.url, pause_s=0.0)
    assert again.get(name) == DATA
    assert again.reads == {"hit": 1}
    assert again.read_bytes == len(DATA)
    assert len(liar.asked) == 2


def test_a_cache_that_is_away_costs_a_second_at_most() -> None:
    store, name = stored(DATA)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        place = silent.getsockname()
        # What is full takes no connection: as a machine that is gone.
        full = [socket.socket() for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(place)
        through = CachedStore(store, f"http://127.0.0.1:{place[1]}")
        began_s = time.monotonic()
        assert through.get(name) == DATA
        assert time.monotonic() - began_s < 2
        assert through.reads == {"away": 1}
        for one in full:
            one.close()


def test_only_what_its_name_proves_is_asked_of_a_cache(liar: Liar) -> None:
    store, _ = stored(DATA)
    own = (
        "lab/learner/a/update/0/1-2-3.0",
        f"lab/learner/a/checkpoint/7-{'0' * 32}",
        "lab/global/proof",
    )
    through = CachedStore(store, liar.url)
    for name in own:
        through.put(name, DATA)
        assert through.get(name) == DATA
        assert through.get_range(name, 1, 3) == DATA[1:3]
    assert not liar.asked
    assert [info.name for info in through.list("lab/learner/")] == sorted(own[:2])
    through.delete(own[0])
    assert [info.name for info in store.list("lab/learner/")] == [own[1]]


BLOCK, BLOCKS = 256, 600


def delta_of(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.5, 2, BLOCKS).astype(ml_dtypes.bfloat16)
    codes = (rng.integers(1, 16, BLOCKS * BLOCK // 2) | (8 << 4)).astype(np.uint8)
    return shards.pack_delta("int4", Encoded(scales, codes), BLOCK)


@pytest.mark.parametrize("kind", ["true", "an old object", "wrong bytes", "truncated"])
def test_ranges_are_held_against_checksums_of_the_store(liar: Liar, kind: str) -> None:
    """As each host of a slice reads its blocks: an old delta is whole, and is another one."""
    data = delta_of(1)
    store, name = stored(data)
    liar.kind = kind
    liar.objects = {name: delta_of(0) if kind == "an old object" else data}
    through, blocks = CachedStore(store, liar.url), np.arange(70, 90)

    reader = VersionFetcher(SimpleNamespace(store=through, traffic=TrafficCounts()), None)  # type: ignore[arg-type]
    form = {"codec": "int4", "count": BLOCK * BLOCKS, "block": BLOCK}
    found = reader._blocks(name, partial(shards.read_blocks, blocks=blocks, **form))
    whole, half = shards.unpack_delta(data, **form), BLOCK // 2
    assert found.scales.tobytes() == whole.scales[70:90].tobytes()
    assert found.codes.tobytes() == whole.codes[70 * half : 90 * half].tobytes()
    assert through.reads["refused"] == (kind != "true")


# --- nginx


class Nginx:
    """nginx with the configuration that Terraform writes, filled in for a test.

    Args:
        folder: of its objects; `origin` is the bucket's server.
    """

    def __init__(self, folder: Path, origin: str, run: str, *, size: str = "100m") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/runs"
        folder.mkdir(exist_ok=True)
        token = folder / "token.conf"
        token.write_text('proxy_set_header Authorization "Bearer of-the-cache";\n')
        text = TEMPLATE.read_text()
        for key, value in {
            "user": getpass.getuser(), "folder": str(folder), "max_size": size,
            "listen": f"127.0.0.1:{self.port}", "prefix": f"runs/{run}", "origin": origin,
            "bucket": "bucket", "token": str(token),
        }.items():  # fmt: skip
            text = text.replace(f"${{{key}}}", value)
        self.config = folder / "nginx.conf"
        self.config.write_text(text)
        self.log = folder / "nginx.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                ["nginx", "-p", str(self.config.parent), "-c", str(self.config), "-g", "daemon off;"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        eventually(lambda: page(self.port, "/"), "nginx listens")
        return process

    def kill(self) -> None:
        """SIGKILL to the master and its workers, which would else live on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()


@contextlib.contextmanager
def nginx(folder: Path, origin: str, run: str, **options: str) -> Iterator[Nginx]:
    server = Nginx(folder, origin, run, **options)
    try:
        yield server
    finally:
        server.kill()


def read_by_cache(server: GcsServer, what: str) -> list[str]:
    return [
        seen.target
        for seen in server.requests
        if seen.method == "GET" and seen.target.startswith("/bucket/") and what in seen.target
    ]


@needs_nginx
def test_nginx_reads_each_part_once_for_all_and_keeps_no_error(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(20 << 20)
    name = names.version_object("lab", 0, 3, "delta", shards.digest(data))
    with (
        GcsServer(tmp_path / "gcs", "bucket", gbit=0.5) as origin,
        nginx(tmp_path / "nginx", origin.url, "lab") as server,
    ):
        store = _gcs(origin)
        store.put(name, data)
        stores = [CachedStore(store, server.url, pause_s=0.0) for _ in range(8)]
        got: list[bytes] = []
        threads = [
            threading.Thread(target=lambda one=one: got.append(one.get(name))) for one in stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [data] * 8
        # Three parts of 8 MiB, once each, by the cache's own right.
        assert len(read_by_cache(origin, "delta")) == 3
        assert not origin.count("GET", "alt=media")
        assert {
            seen.headers["Authorization"]
            for seen in origin.requests
            if seen.target[:8] == "/bucket/"
        } == {"Bearer of-the-cache"}
        sizes = [(0, 100), (8 << 20, (8 << 20) + 5), ((8 << 20) - 3, (8 << 20) + 3), (5, 20 << 20)]
        for start, stop in sizes:
            assert stores[0].get_range_nearby(name, start, stop) == data[start:stop]
        assert len(read_by_cache(origin, "delta")) == 3
        assert stores[0].reads["hit"] >= 4
        # An error of the bucket's is passed on, and asked again.
        other = names.version_object("lab", 0, 4, "delta", shards.digest(data[:5]))
        through = CachedStore(store, server.url, pause_s=0.0)
        store.put(other, data[:5])
        origin.fail("status", method="GET", contains=f"/bucket/runs/{other}", status=503)
        assert through.get(other) == data[:5]
        assert through.get(other) == data[:5]
        assert through.reads == {"away": 1, "miss": 1}
        # Nothing else is to be had of it.
        for path in (
            "/runs/lab/learner/a/update/0/1",
            "/runs/lab/global/../learner/a/x",
            "/",
            "/runs/other/global/x",
        ):
            assert "404" in page(server.port, path)
        assert not origin.count("GET", "learner/a")


def _gcs(origin: GcsServer) -> GcsStore:
    return GcsStore("bucket", "runs", AnonymousCredentials(), endpoint=origin.url)


@pytest.mark.long
@needs_nginx
@pytest.mark.parametrize("disk", ["large", "full"])
def test_a_region_reads_each_object_once_until_its_cache_is_killed(
    new_world, tmp_path, monkeypatch, unique, disk
) -> None:
    folder = tmp_path / "nginx"
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(GcsServer(tmp_path / "gcs", "bucket"))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", origin.url)
        if disk == "full":
            stack.enter_context(small_disk(folder, size="128k"))
        server = stack.enter_context(nginx(folder, origin.url, unique))
        section = {"url": "gs://bucket/runs", "emulator": True, "cache": server.url}
        world = new_world(run=ENDLESS, store=section, metrics={"listen": "127.0.0.1"})
        ports = [free_port() for _ in range(3)]
        aggregator = world.aggregator()
        learners = [
            world.learner(f"learner-{index}", ["--metrics-port", str(port)])
            for index, port in enumerate(ports)
        ]

        def reads(outcome: str) -> list[float]:
            found = []
            for port in ports:
                lines = page(port, "/metrics").splitlines()
                mine = [line for line in lines if "cache_reads" in line and f'"{outcome}"' in line]
                found.append(float(mine[0].rpartition(" ")[2]) if mine else 0.0)
            return found

        if disk == "full":
            world.until(lambda: min(reads("away")) > 0, "the cache's disk is full")
        else:
            world.until(lambda: min(reads("hit")) >= 20, "each learner reads what another has read")
            once = read_by_cache(origin, "delta")
            assert len(once) == len(set(once))
            by_learners = [
                seen.target
                for seen in origin.requests
                if "alt=media" in seen.target and "delta" in seen.target
            ]
            assert not by_learners
            assert sum(reads("hit")) + sum(reads("miss")) > 2.5 * len(once)
        assert not sum(reads("refused") + reads("slow"))
        server.kill()
        before = [total(port, "diloco_learner_updates_sent_total") for port in ports]
        world.until(lambda: min(reads("paused")) >= 5, "they read the bucket")
        world.until(
            lambda: all(
                total(port, "diloco_learner_updates_sent_total") > sent + 5
                for port, sent in zip(ports, before, strict=True)
            ),
            "and train on",
        )
        world.stop()
        assert aggregator.wait() == 0
        assert [learner.wait() for learner in learners] == [0, 0, 0]
        for process in (aggregator, *learners):
            process.check_clean_log()
        read_tape(world).check()


SERVES = """
import sys
from pathlib import Path
from diloco.infra.cache import serve
from diloco.infra.cloud import Google

metadata, token, config = sys.argv[1:]
nginx = ("nginx", "-p", str(Path(config).parent), "-c", config, "-g", "daemon off;")
sys.exit(serve(Google(metadata), Path(token), nginx, every_s=0.2))
"""


@needs_nginx
def test_a_new_token_is_read_by_nginx_and_it_ends_with_its_program(tmp_path: Path) -> None:
    tokens = ["first"]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if tokens else 503)
            self.end_headers()
            if tokens:
                self.wfile.write(json.dumps({"access_token": tokens[-1]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with (
        GcsServer(tmp_path / "gcs", "bucket") as origin,
        nginx(tmp_path / "nginx", origin.url, "lab") as server,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as metadata,
    ):
        server.kill()
        threading.Thread(target=metadata.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{metadata.server_address[1]}/"
        process = subprocess.Popen(
            [sys.executable, "-c", SERVES, url, str(server.config.parent / "token.conf"), str(server.config)],
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        server.process = process
        store = _gcs(origin)

        def sent(number: int) -> str:
            """The token with which a new object is read."""
            data = bytes([number]) * 100
            name = names.version_object("lab", 0, number, "delta", shards.digest(data))
            store.put(name, data)
            assert CachedStore(store, server.url, pause_s=0.0).get(name) == data
            return origin.requests[-1].headers.get("Authorization", "")

        eventually(lambda: page(server.port, "/"), "nginx listens")
        assert sent(1) == "Bearer first"
        # Without the metadata server it goes on with what it has.
        tokens.clear()
        time.sleep(0.5)
        assert sent(2) == "Bearer first"
        tokens.append("second")
        numbers = itertools.count(3)
        eventually(lambda: sent(next(numbers)) == "Bearer second", "the new token is used")
        assert (server.config.parent / "token.conf").stat().st_mode & 0o777 == 0o600
        process.terminate()
        assert process.wait(60) == 0
        eventually(lambda: not page(server.port, "/"), "nginx has ended")
        metadata.shutdown()

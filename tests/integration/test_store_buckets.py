"""Errors that only the client of S3 and Azure can make; the rest is in tests/conformance.

Without servers (`make test-stores`) nothing but refusals is tested.
"""

import http.server
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from audit import read_tape

from diloco.common.protocol.errors import (
    ConfigError,
    ObjectUnreadableError,
    StoreError,
    StoreSlowError,
    StoreUnavailableError,
)
from diloco.common.storage.store import open_store

sys.path.insert(0, str(Path(__file__).parents[1]))
import bucket_servers

served = pytest.mark.skipif(bucket_servers.SERVERS is None, reason="needs `make test-stores`")
SCHEMES = ("s3", "az")


@contextmanager
def store_at(scheme: str, address: str, *, create: bool = False) -> Iterator:
    with bucket_servers.environment(scheme, address):
        yield open_store(f"{scheme}://bucket/{secrets.token_hex(8)}", create=create)


@served
@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_creates_a_run_tries_that_nothing_is_overwritten(scheme: str) -> None:
    address = bucket_servers.shared(scheme)
    with store_at(scheme, address, create=True) as store:
        assert store.list("") == []
    if scheme == "az":
        return  # Its requests are signed with that header.
    with bucket_servers.changed(address, without="If-None-Match") as careless:
        with store_at(scheme, careless) as store:
            store.put("o", b"one")
            store.put("o", b"two")  # As the conformance suite would find.
        with (
            pytest.raises(StoreError, match="overwrites what stands there"),
            store_at(scheme, careless, create=True),
        ):
            pass


@served
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_large_object_comes_in_parts_and_whole(scheme: str) -> None:
    data = secrets.token_bytes((20 << 20) + 7)
    with store_at(scheme, bucket_servers.shared(scheme)) as store:
        store.put("o", data)
        store.put("o", data)
        assert store.get("o") == data
        assert store.get_range("o", 1, len(data) - 1) == data[1:-1]


@served
def test_an_object_that_is_stored_encoded_is_refused() -> None:
    address = bucket_servers.shared("s3")
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/octet-stream"}
    bucket_servers.ask("PUT", f"{address}/bucket/encoded/o", headers, b"\x1f\x8b")
    with bucket_servers.environment("s3", address):
        store = open_store("s3://bucket/encoded")
        for read in (lambda: store.get("o"), lambda: store.get_range("o", 0, 1)):
            with pytest.raises(ObjectUnreadableError, match="gzip"):
                read()


@served
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bucket_that_is_not_there_is_named(scheme: str) -> None:
    with bucket_servers.environment(scheme, bucket_servers.shared(scheme)):
        store = open_store(f"{scheme}://nobody/x")
        for call in (
            lambda: store.put("o", b"1"),
            lambda: store.get("o"),
            lambda: store.get_range("o", 0, 1),
            lambda: store.list(""),
        ):
            with pytest.raises(StoreError, match="there is no bucket 'nobody'") as caught:
                call()
            assert not caught.value.retry


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_service_that_is_away_is_tried_again_later(scheme: str) -> None:
    with (
        store_at(scheme, "http://127.0.0.1:1") as store,
        pytest.raises(StoreUnavailableError, match="cannot list"),
    ):
        store.list("")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_sent_without_tls_unless_somebody_says_so(scheme, monkeypatch) -> None:
    with bucket_servers.environment(scheme, "http://127.0.0.1:1"):
        name = {"s3": "AWS_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}[scheme]
        monkeypatch.delenv(name)
        with pytest.raises(StoreError) as caught:
            open_store(f"{scheme}://bucket/x").get("o")
        assert name in caught.value.hint
        assert not caught.value.retry


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "az://b/x/../y", "s3://b/.tmp"])
def test_urls_that_name_no_place_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"no bucket|not an object name"):
        open_store(url)


def test_without_an_account_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="Account") as caught:
        open_store("az://container/x")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint


def test_without_the_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [
        name for name in sys.modules if name.startswith("diloco.common.storage.store.s3_azure")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_store("s3://bucket/x")
    assert "diloco[buckets]" in caught.value.hint


class Trickle(http.server.BaseHTTPRequestHandler):
    """An object that comes byte by byte."""

    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Length": "1000", "ETag": '"x"',
            "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        try:
            for _ in range(1000):
                self.wfile.write(b"0")
                time.sleep(0.05)
        except OSError:
            return

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_an_object_that_comes_byte_by_byte_is_given_up_in_time() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with (
            store_at("s3", f"http://127.0.0.1:{server.server_port}") as store,
            pytest.raises(StoreSlowError),
        ):
            store.get("o", within_s=0.5)
    finally:
        server.shutdown()
        server.server_close()


@served
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_trains_over_a_bucket_to_its_end(scheme, new_world) -> None:
    with bucket_servers.environment(scheme, bucket_servers.shared(scheme)):
        world = new_world(store={"url": f"{scheme}://bucket/runs"})
        aggregator = world.aggregator()
        learners = [world.learner(f"learner-{index}") for index in range(2)]
        assert aggregator.wait() == 0
        assert [learner.wait() for learner in learners] == [0, 0]
        for process in (aggregator, *learners):
            process.check_clean_log()
        read_tape(world).check()
        names = [info.name for info in open_store(f"{scheme}://bucket/runs").list("")]
        assert names
        assert all(name.startswith(f"{world.name}/") for name in names)

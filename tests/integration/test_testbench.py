"""The store `gs://` under each instruction of Google's storage testbench, in each operation."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.auth.credentials import AnonymousCredentials

from diloco.common.protocol.errors import StoreError, StoreUnavailableError
from diloco.common.storage.store import ObjectInfo
from diloco.common.storage.store.gcs import PART_BYTES, GcsStore

sys.path.insert(0, str(Path(__file__).parents[1]))
import testbench
from gcs_server import GcsServer

# A reset leaves sockets to the garbage collector: urllib3 closes them while an answer's file is open.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <socket\.socket:pytest.PytestUnraisableExceptionWarning"
)
SMALL = os.urandom(400_000)
LARGE = os.urandom(PART_BYTES + 400_000)
REQUESTS = {
    "put": ("POST", "uploadType=multipart"),
    "resumable upload": ("PUT", "upload_id="),
    "get": ("GET", "/download/"),
    "range": ("GET", "/download/"),
    "list": ("GET", "/o?"),
    "delete": ("DELETE", "/o/"),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "server", "bucket") as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """The sockets of resets go while their warning is still expected."""
    yield
    gc.collect()


def open_at(server: GcsServer, retry_s: float, wait_s: float) -> GcsStore:
    """Connecting, and sending a piece, may take three times as long as an answer."""
    return GcsStore(
        "bucket",
        "p",
        AnonymousCredentials(),
        endpoint=server.url,
        retry_s=retry_s,
        timeout_s=(3 * wait_s, wait_s),
    )


def perform(store: GcsStore, operation: str) -> bytes:
    """Do it; what was read."""
    match operation:
        case "put":
            store.put("new", SMALL)
        case "resumable upload":
            store.put("new", LARGE)
        case "get":
            return store.get("there")
        case "range":
            return store.get_range("there", 100, 390_000)
        case "list":
            assert store.list("th") == [ObjectInfo("there", len(SMALL))]
        case "delete":
            store.delete("there")
    return b""


def check(store: GcsStore, operation: str, read: bytes) -> None:
    """Compare what was done with what was asked for."""
    match operation:
        case "put" | "resumable upload":
            assert store.get("new") == (SMALL if operation == "put" else LARGE)
        case "get":
            assert read == SMALL
        case "range":
            assert read == SMALL[100:390_000]
        case "delete":
            assert store.list("") == []


def continued(server: GcsServer, operation: str) -> bool:
    """Whether a request began where another one had ended."""
    method, contains = REQUESTS[operation]
    begun = 100 if operation == "range" else 0
    spans = [
        seen.headers.get("Content-Range" if method == "PUT" else "Range", "")
        for seen in server.requests
        if seen.method == method and contains in seen.target
    ]
    starts = [int(found[1]) for span in spans if (found := re.search(r"bytes[= ](\d+)-", span))]
    return any(start > begun for start in starts)


@pytest.mark.parametrize(("instruction", "operation"), [*testbench.cases()])
def test_an_instruction_to_fail_comes_to_what_the_table_says(
    server: GcsServer, instruction: str, operation: str
) -> None:
    expected = testbench.expected(instruction, operation)
    patient = open_at(server, 60.0, 60.0)
    patient.put("there", SMALL)
    wait_s = testbench.STALL_S if instruction.startswith("stall") else 60.0
    store = open_at(server, 60.0, wait_s)
    method, contains = REQUESTS[operation]
    fault = server.fail(**testbench.fault(instruction), method=method, contains=contains)
    if expected == "told":
        with pytest.raises(StoreError, match="hint: g") as caught:
            perform(store, operation)
        assert not caught.value.retry
        return
    read = perform(store, operation)
    assert fault.times == 0
    if expected == "caller":
        assert read[:1000] == SMALL[100:1100]
        assert len(read) == 389_900
        assert read != SMALL[100:390_000]
        return
    check(patient, operation, read)
    assert continued(server, operation) == (expected == "goes on")


@pytest.mark.parametrize("operation", testbench.OPERATIONS)
def test_a_stall_that_outlasts_the_time_for_retries_is_tried_again_once(
    server: GcsServer, operation: str
) -> None:
    """As in production, where a silent connection is given up after longer than `RETRY_S`."""
    open_at(server, 60.0, 60.0).put("there", SMALL)
    method, contains = REQUESTS[operation]
    fault = server.fail("stall", method=method, contains=contains)
    perform(open_at(server, 0.1, testbench.STALL_S), operation)
    assert fault.times == 0


def test_what_stalls_always_is_told_as_passing(server: GcsServer) -> None:
    server.fail("stall", times=100)
    with pytest.raises(StoreUnavailableError) as caught:
        open_at(server, 0.1, 0.2).get("there")
    assert caught.value.retry


def test_an_empty_object_whose_size_the_server_leaves_out_has_none(server: GcsServer) -> None:
    store = open_at(server, 60.0, 60.0)
    store.put("empty", b"")
    store.put("empty", b"")
    assert store.list("") == [ObjectInfo("empty", 0)]
    assert store.get("empty") == b""

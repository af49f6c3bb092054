"""The store `gs://` under faults: each kind, and what is left in memory and in the bucket."""

import gc
import gzip
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from google.auth import compute_engine
from google.auth.credentials import AnonymousCredentials

from diloco.common.protocol.errors import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectUnreadableError,
    StoreError,
    StoreSlowError,
    StoreUnavailableError,
)
from diloco.common.storage.store import ObjectInfo, open_store
from diloco.common.storage.store.gcs import PART_BYTES, GcsStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from gcs_server import GcsServer

# A reset leaves sockets to the garbage collector: urllib3 closes them while an answer's file is open.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <socket\.socket:pytest.PytestUnraisableExceptionWarning"
)
SMALL = os.urandom(100_000)
LARGE = os.urandom(3 * PART_BYTES + 12_345)
BODY = "/upload/storage"
MEDIA = "/download/storage"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServer]:
    with GcsServer(tmp_path / "server", "bucket") as server:
        yield server


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """The sockets of resets go while their warning is still expected."""
    yield
    gc.collect()


def open_at(server: GcsServer, bucket: str = "bucket", retry_s: float = 120.0) -> GcsStore:
    """A store that gives up on a silent connection after a second."""
    return GcsStore(
        bucket,
        "p",
        AnonymousCredentials(),
        endpoint=server.url,
        retry_s=retry_s,
        timeout_s=(5.0, 1.0),
    )


@pytest.fixture
def store(server: GcsServer) -> GcsStore:
    return open_at(server)


PASSING = {
    "408": {"kind": "status", "status": 408},
    "429": {"kind": "status", "status": 429, "headers": {"Retry-After": "1"}},
    "500": {"kind": "status", "status": 500},
    "502": {"kind": "status", "status": 502},
    "503": {"kind": "status", "status": 503},
    "504": {"kind": "status", "status": 504},
    "reset at once": {"kind": "reset"},
    "reset in the body": {"kind": "reset", "after_bytes": 70_000},
    "lost": {"kind": "lost"},
    "stall": {"kind": "stall"},
    "truncate": {"kind": "truncate", "after_bytes": 70_000},
    "flip": {"kind": "flip", "after_bytes": 70_000},
}


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_of_a_download_is_bridged(
    server: GcsServer, store: GcsStore, fault: str, data: bytes
) -> None:
    store.put("o", data)
    made = server.fail(**PASSING[fault], method="GET", contains=MEDIA)
    assert store.get("o") == data
    assert made.times == 0


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_an_object_that_comes_byte_by_byte_is_given_up_in_time(
    server: GcsServer, store: GcsStore, data: bytes
) -> None:
    store.put("o", data)
    server.fail("trickle", method="GET", contains=MEDIA, stall_s=0.05)
    with pytest.raises(StoreSlowError, match="'o' was not read within"):
        store.get("o", within_s=0.3)
    # The fault is used up, and the connections are whole.
    assert store.get("o", within_s=600.0) == data


@pytest.mark.parametrize(("start", "stop"), [(7, 99_999), (PART_BYTES - 1, 3 * PART_BYTES + 1)])
@pytest.mark.parametrize("fault", sorted(PASSING.keys() - {"flip"}))
def test_a_passing_fault_of_a_range_is_bridged(
    server: GcsServer, store: GcsStore, fault: str, start: int, stop: int
) -> None:
    data = SMALL if stop <= len(SMALL) else LARGE
    store.put("o", data)
    made = server.fail(**PASSING[fault], method="GET", contains=MEDIA)
    assert store.get_range("o", start, stop) == data[start:stop]
    assert made.times == 0


def test_a_range_costs_one_request_and_no_more_than_its_bytes(
    server: GcsServer, store: GcsStore
) -> None:
    store.put("o", LARGE)
    assert store.get_range("o", 5, PART_BYTES + 5) == LARGE[5 : PART_BYTES + 5]
    asked = [seen.headers["Range"] for seen in server.requests if MEDIA in seen.target]
    assert asked == [f"bytes=5-{PART_BYTES + 4}"]


@pytest.mark.parametrize("fault", sorted(PASSING.keys() - {"truncate"}))
def test_a_passing_fault_of_a_small_upload_is_bridged(
    server: GcsServer, store: GcsStore, fault: str
) -> None:
    made = server.fail(**PASSING[fault], method="POST", contains=BODY)
    store.put("o", SMALL)
    assert made.times == 0
    assert store.get("o") == SMALL
    assert store.list("") == [ObjectInfo("o", len(SMALL))]


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    "fault", sorted(PASSING.keys() - {"truncate", "flip", "reset in the body"})
)
def test_a_passing_fault_of_a_large_upload_is_bridged(
    server: GcsServer, store: GcsStore, fault: str, method: str
) -> None:
    made = server.fail(**PASSING[fault], method=method, contains=BODY)
    store.put("o", LARGE)
    assert made.times == 0
    assert store.get("o") == LARGE


@pytest.mark.parametrize("fault", ["503", "reset at once", "lost"])
def test_a_passing_fault_of_a_list_or_a_deletion_is_bridged(
    server: GcsServer, store: GcsStore, fault: str
) -> None:
    store.put("o", SMALL)
    server.fail(**PASSING[fault], method="GET", contains="/o?")
    assert store.list("") == [ObjectInfo("o", len(SMALL))]
    server.fail(**PASSING[fault], method="DELETE")
    store.delete("o")
    assert store.list("") == []


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_fault_that_stays_is_told_within_the_deadline_and_may_be_retried(
    server: GcsServer, data: bytes
) -> None:
    store = open_at(server, retry_s=0.5)
    store.put("there", data)
    server.fail("status", times=1_000_000)
    for call in (
        lambda: store.put("o", data),
        lambda: store.get("there"),
        lambda: store.get_range("there", 0, 9),
        lambda: store.list(""),
        lambda: store.delete("there"),
    ):
        with pytest.raises(StoreUnavailableError, match="fault 503") as caught:
            call()
        assert caught.value.retry
    server.mend()
    assert store.get("there") == data
    with pytest.raises(ObjectMissingError):
        store.get("o")


def test_no_server_at_all_is_a_passing_fault(tmp_path: Path) -> None:
    with GcsServer(tmp_path, "bucket") as server:
        store = open_at(server, retry_s=0.5)
    with pytest.raises(StoreUnavailableError, match="gs://bucket/p/o"):
        store.get("o")


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_an_upload_whose_answer_was_lost_has_not_failed(
    server: GcsServer, store: GcsStore, data: bytes
) -> None:
    last = "POST" if data is SMALL else "PUT"
    server.fail("lost", method=last, contains=BODY)
    store.put("o", data)
    assert store.get("o") == data
    server.fail("lost", method="POST", contains=BODY)
    with pytest.raises(ObjectExistsError):
        store.put("o", data[:-1] + bytes([data[-1] ^ 1]))
    assert store.get("o") == data


def test_another_writer_that_finishes_first_is_met_at_the_end(
    server: GcsServer, store: GcsStore
) -> None:
    bucket = store._bucket
    blob = bucket.client.blob(bucket.prefix + "o")
    upload = blob.create_resumable_upload_session(size=len(LARGE), if_generation_match=0)
    store.put("o", LARGE)
    span = f"bytes 0-{len(LARGE) - 1}/{len(LARGE)}"
    answer = store._bucket.session.put(upload, data=LARGE, headers={"Content-Range": span})
    assert answer.status_code == 412
    assert store.get("o") == LARGE


OTHER = LARGE[:-1] + bytes([LARGE[-1] ^ 1])


@pytest.mark.parametrize("hasty", [False, True], ids=["exact", "hasty"])
def test_a_session_that_answers_for_bytes_that_do_not_stand_is_not_believed(
    server: GcsServer, store: GcsStore, hasty: bool
) -> None:
    """Another object comes between, the 412 for it is lost, and a hasty server then says 200."""
    rival = open_at(server)

    def come_between(_name: str) -> None:
        server.before_finish = lambda _: None
        rival.put("o", OTHER)

    server.hasty, server.before_finish = hasty, come_between
    server.fail("lost", method="PUT", contains=BODY)
    with pytest.raises((ObjectExistsError, StoreUnavailableError)) as caught:
        store.put("o", LARGE)
    assert hasty == isinstance(caught.value, ObjectExistsError)
    with pytest.raises(ObjectExistsError):
        store.put("o", LARGE)
    assert store.get("o") == OTHER


def test_a_session_that_has_every_byte_and_no_object_is_finished(
    server: GcsServer, store: GcsStore
) -> None:
    fault = server.fail("unfinished", method="PUT", contains=BODY, times=2)
    store.put("o", LARGE)
    assert fault.times == 0
    assert store.get("o") == LARGE


def test_an_upload_that_is_refused_for_no_object_ends_with_a_sentence(
    server: GcsServer, store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.common.storage.store.gcs.gcs_store._PAUSE_S", 0.0)
    server.fail("status", method="POST", contains=BODY, status=412, times=1000)
    with pytest.raises(StoreError, match="no object of that name is there") as caught:
        store.put("o", SMALL)
    assert not caught.value.retry
    assert server.count("POST", BODY) == 3


SIZES = (len(SMALL), PART_BYTES + 1_000_000, len(LARGE))  # one request, a session, a long one
# At nice 19 on a busy machine.
AN_HOUR = (pytest.mark.slow, pytest.mark.timeout(7200))
# Ten thousand in all, ten seeds of a thousand: docs/reliability.md.
RACES = [
    (12, 0),
    pytest.param(100, 10, marks=pytest.mark.long),
    *(pytest.param(1000, seed, marks=AN_HOUR) for seed in range(10)),
]


def lies_of_a_race(server: GcsServer, chance: random.Random, name: str) -> list[str]:
    """Two writers put bytes under one name at once, beside faults; who was told wrongly.

    Of eight races one is of equal bytes, which are stored whoever came first.
    """
    size = chance.choice(SIZES)
    ours = LARGE[-size:]
    contents = {"a": ours, "b": ours if chance.random() < 1 / 8 else OTHER[-size:]}
    server.hasty = chance.random() < 0.5
    for _ in range(chance.randrange(5)):
        kind = chance.choice(["lost", "reset", "unfinished", "status", "flip"])
        method, contains = chance.choice([("PUT", BODY), ("POST", BODY), ("GET", "/o/")])
        server.fail(
            kind,
            method=method,
            contains=contains,
            after_bytes=chance.choice([0, 1 << 16, 1 << 20, size // 2]),
            status=chance.choice([408, 429, 500, 503]),
            times=chance.choice([1, 1, 2, 3]),  # Twice: of each writer the first request.
        )

    def put(data: bytes) -> str:
        for _ in range(10):
            try:
                open_at(server).put(name, data)
            except StoreUnavailableError:
                continue
            except ObjectExistsError:
                return "exists"
            return "stored"
        return "unavailable"

    with ThreadPoolExecutor(2) as pool:
        told = dict(zip(contents, pool.map(put, contents.values()), strict=True))
    server.mend()
    stands = open_at(server).get(name)
    # A thousand races would leave 25 GB.
    open_at(server).delete(name)
    truth = {who: "stored" if data == stands else "exists" for who, data in contents.items()}
    return [who for who in contents if told[who] != truth[who]]


@pytest.mark.parametrize(("races", "seed"), RACES)
def test_of_two_writers_of_one_name_none_is_told_wrongly(
    server: GcsServer, races: int, seed: int
) -> None:
    chance = random.Random(seed)
    found = [lies_of_a_race(server, chance, f"o{race}") for race in range(races)]
    assert [(race, who) for race, who in enumerate(found) if who] == []


MALFORMED = {
    "no checksum": {"kind": "without", "message": "x-goog-hash"},
    "no generation": {"kind": "without", "message": "x-goog-generation"},
    "no size": {"kind": "without", "message": "Content-Range"},
    "no bytes": {"kind": "empty"},
    "a byte more": {"kind": "longer"},
}


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("read", ["whole", "range"])
def test_an_answer_that_is_not_the_services_is_asked_for_again_and_then_told(
    server: GcsServer, store: GcsStore, malformed: str, read: str
) -> None:
    store.put("o", LARGE)

    def fetch(store: GcsStore) -> bytes:
        return store.get("o") if read == "whole" else store.get_range("o", 0, len(LARGE))

    server.fail(**MALFORMED[malformed], method="GET", contains=MEDIA)
    assert fetch(store) == LARGE
    server.fail(**MALFORMED[malformed], method="GET", contains=MEDIA, times=10_000)
    with pytest.raises(StoreUnavailableError, match="MalformedAnswerError"):
        fetch(open_at(server, retry_s=0.3))


def test_a_session_without_an_address_is_begun_again(server: GcsServer, store: GcsStore) -> None:
    server.fail("without", method="POST", contains=BODY, message="Location")
    store.put("o", LARGE)
    assert store.get("o") == LARGE


def test_a_service_that_asks_for_a_pause_gets_it(
    server: GcsServer, store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    monkeypatch.setattr("diloco.common.storage.store.gcs.retries.time.sleep", paused.append)
    server.fail("status", status=429, headers={"Retry-After": "7"}, times=2)
    store.put("o", SMALL)
    assert paused.count(7) == 2


def test_an_object_that_comes_byte_by_byte_is_given_up_though_nobody_names_a_time(
    server: GcsServer, store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.common.storage.store.gcs.downloads._LEAST_S", 0.2)
    store.put("o", SMALL)
    server.fail("trickle", method="GET", contains=MEDIA, stall_s=0.1, times=1000)
    with pytest.raises(StoreSlowError):
        store.get("o")


class MetadataServer(BaseHTTPRequestHandler):
    """Gives tokens as a machine at Google's does, once it may: `status` until then."""

    status = 503

    def do_GET(self) -> None:
        token = {"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}
        account = {"scopes": ["s"], "email": "a@b", "aliases": ["default"]}
        body = json.dumps(token if "/token" in self.path else account).encode()
        self.send_response(self.status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[MetadataServer]]:
    from google.auth.compute_engine import _metadata

    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer) as http:
        root = f"http://127.0.0.1:{http.server_address[1]}"
        monkeypatch.setattr(
            _metadata, "_get_metadata_root", lambda *_: f"{root}/computeMetadata/v1/"
        )
        once = partial(_metadata.ExponentialBackoff, total_attempts=1)
        monkeypatch.setattr(_metadata, "ExponentialBackoff", lambda **_: once())
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield MetadataServer
        http.shutdown()
        thread.join()


def test_a_metadata_server_that_is_away_is_a_passing_fault_and_one_without_account_is_told(
    server: GcsServer, metadata: type[MetadataServer]
) -> None:
    machine = GcsStore(
        "bucket", "p", compute_engine.Credentials(), endpoint=server.url, retry_s=0.2
    )
    metadata.status = 503
    with pytest.raises(StoreUnavailableError):
        machine.put("o", SMALL)
    metadata.status = 404
    with pytest.raises(StoreError, match="service account") as caught:
        machine.put("o", SMALL)
    assert not caught.value.retry
    metadata.status = 200
    machine.put("o", SMALL)
    assert machine.get("o") == SMALL


def test_a_broken_upload_goes_on_where_the_service_has_got_to(
    server: GcsServer, store: GcsStore
) -> None:
    store.list("")
    server.fail("reset", method="PUT", after_bytes=3 << 20)
    store.put("o", LARGE)
    spans = [seen.headers["Content-Range"] for seen in server.requests if seen.method == "PUT"]
    size = len(LARGE)
    assert spans[0] == f"bytes 0-{size - 1}/{size}"
    assert spans[1] == f"bytes */{size}"
    # Whole pieces of 256 KiB are kept; the reset took what was on its way.
    begun = int(spans[2].split()[1].partition("-")[0])
    assert 0 < begun <= 3 << 20
    assert begun % (256 << 10) == 0
    assert store.get("o") == LARGE


def test_an_upload_goes_on_after_the_server_came_back(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    with GcsServer(folder, "bucket") as first, ThreadPoolExecutor(1) as pool:
        store = open_at(first)
        first.fail("reset", method="PUT", after_bytes=10 << 20)
        stall = first.fail("stall", method="PUT", times=0)
        arrived = threading.Event()
        real = first.note

        def stop_at_the_question(method: str, target: str, headers: dict[str, str]):
            if method == "PUT" and headers["Content-Range"].startswith("bytes */"):
                stall.times = 1
                arrived.set()
            return real(method, target, headers)

        first.note = stop_at_the_question  # type: ignore[method-assign]
        put = pool.submit(store.put, "o", LARGE)
        assert arrived.wait(30)
        first.__exit__()
        with GcsServer(folder, "bucket", port=first.port) as second:
            put.result(60)
            assert second.count("POST") == 0
            assert store.get("o") == LARGE


def test_a_session_that_is_gone_is_a_passing_fault(server: GcsServer, store: GcsStore) -> None:
    server.fail("status", method="PUT", status=410, reason="gone")
    with pytest.raises(StoreUnavailableError, match="must restart"):
        store.put("o", LARGE)
    store.put("o", LARGE)


def test_bytes_damaged_on_their_way_up_are_never_stored(server: GcsServer, store: GcsStore) -> None:
    server.fail("flip", method="PUT", after_bytes=1000)
    with pytest.raises(StoreUnavailableError, match="CRC32C"):
        store.put("o", LARGE)
    assert store.list("") == []
    store.put("o", LARGE)
    assert store.get("o") == LARGE


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_bytes_that_always_come_damaged_are_never_given_out(
    server: GcsServer, store: GcsStore, data: bytes
) -> None:
    store.put("o", data)
    server.fail("flip", method="GET", contains=MEDIA, times=1_000_000, after_bytes=1000)
    with pytest.raises(StoreUnavailableError, match="damaged 3 times"):
        store.get("o")


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(
    server: GcsServer, store: GcsStore
) -> None:
    store.put("o", LARGE)
    real, other = server.find, os.urandom(len(LARGE))
    done: list[int] = []

    def replace_before_the_second_range(bucket: str, name: str, generation: str | None = None):
        if generation is not None and not done:
            done.append(1)
            server.delete(bucket, name, {})
            open_at(server).put("o", other)
        return real(bucket, name, generation)

    server.find = replace_before_the_second_range  # type: ignore[method-assign]
    with pytest.raises(ObjectMissingError):
        store.get("o")
    assert store.get("o") == other


CALLS = {
    "storage.objects.create": lambda store: store.put("o", b"1"),
    "storage.objects.get": lambda store: store.get("o"),
    "storage.objects.list": lambda store: store.list(""),
    "storage.objects.delete": lambda store: store.delete("o"),
}


@pytest.mark.parametrize("permission", CALLS)
def test_a_missing_permission_is_named_at_once(
    server: GcsServer, store: GcsStore, permission: str
) -> None:
    fault = server.fail("status", status=403, reason="forbidden", contains="/o", times=100)
    with pytest.raises(StoreError, match=rf"hint: grant {permission} on bucket 'bucket'") as caught:
        CALLS[permission](store)
    assert not caught.value.retry
    assert fault.times == 99


def test_a_missing_object_is_missing_for_a_reader_who_may_not_list_too(
    server: GcsServer, store: GcsStore
) -> None:
    """Google answers 403 then, and names the permission that would have made it a 404."""
    message = "a@b does not have storage.objects.list access to the Google Cloud Storage bucket."
    for read in (lambda: store.get("o"), lambda: store.get_range("o", 0, 1)):
        server.fail("status", status=403, message=message, method="GET", contains="/o/")
        with pytest.raises(ObjectMissingError):
            read()


def test_looking_at_what_is_there_needs_a_permission_of_its_own(
    server: GcsServer, store: GcsStore
) -> None:
    store.put("o", b"1")
    server.fail("status", status=403, method="GET", contains="/o/")
    with pytest.raises(StoreError, match=r"grant storage\.objects\.get"):
        store.put("o", b"1")


@pytest.mark.parametrize("permission", CALLS)
def test_credentials_that_are_refused_are_told_at_once(
    server: GcsServer, store: GcsStore, permission: str
) -> None:
    fault = server.fail("status", status=401, reason="authError", contains="/o", times=100)
    with pytest.raises(StoreError, match="hint: give this daemon a service account") as caught:
        CALLS[permission](store)
    assert not caught.value.retry
    assert fault.times >= 98


@pytest.mark.parametrize("permission", CALLS)
def test_a_bucket_that_is_not_there_is_told_at_once(server: GcsServer, permission: str) -> None:
    with pytest.raises(StoreError, match="there is no bucket 'other'") as caught:
        CALLS[permission](open_at(server, bucket="other"))
    assert not isinstance(caught.value, ObjectMissingError)
    assert not caught.value.retry


def test_without_credentials_a_store_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StoreError, match="no Google credentials") as caught:
        open_store("gs://bucket/p")
    assert "service account" in (caught.value.hint or "")


def test_a_small_object_costs_one_request_each_way(server: GcsServer, store: GcsStore) -> None:
    store.put("o", SMALL)
    store.get("o")
    assert server.count("POST") == 1
    assert server.count("GET", MEDIA) == 1
    assert server.count("GET", "/o/") == 1


def test_many_threads_keep_their_connections(server: GcsServer, store: GcsStore) -> None:
    accepted: list[object] = []
    real = server._http.process_request

    def count(request: object, address: object) -> None:
        accepted.append(address)
        real(request, address)

    server._http.process_request = count  # type: ignore[method-assign]
    barrier = threading.Barrier(24)

    def work(number: int) -> None:
        barrier.wait(150)
        for turn in range(8):
            store.put(f"o/{number}/{turn}", SMALL)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(work, range(24)))
    assert len(store.list("o/")) == 24 * 8
    # One for each thread; on a busy machine some attempts take too long, and come again on another.
    assert len(accepted) <= 2 * 24


MEMORY = """
import resource, sys, threading
from diloco.common.storage.store.gcs import PART_BYTES, open_gcs

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

SIZE = 256 << 20
store = open_gcs("gs://bucket/p", sys.argv[1])
store.put("warm", bytes(3 * PART_BYTES))
store.get("warm")
if sys.argv[2] == "put":
    data = memoryview(bytearray(SIZE))
    data[:] = bytes(SIZE)
    del data
    data = bytearray(b"x") * SIZE
    before = peak()
    store.put("o", memoryview(data))
else:
    before = peak()
    data = store.get("o")
    assert len(data) == SIZE
print((peak() - before) / SIZE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_is_bounded(server: GcsServer) -> None:
    def copies(way: str) -> float:
        environment = {key: v for key, v in os.environ.items() if key != "STORAGE_EMULATOR_HOST"}
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, server.url, way],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return float(done.stdout)

    # Beyond the bytes themselves: parts on their way, a quarter of a copy at most.
    assert copies("put") < 0.25
    assert copies("get") < 1.25


# --- Objects that are none of ours


@pytest.mark.parametrize("accepted", ["identity", "gzip"])
def test_an_encoded_object_is_refused_before_anything_is_decoded(
    server: GcsServer, store: GcsStore, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    """A few kilobytes would become megabytes, or gigabytes, whether the service decodes them or the client."""
    bomb = gzip.compress(bytes(4 << 20))
    head = json.dumps({"name": "p/bomb", "contentEncoding": "gzip"}).encode()
    kind = b"\r\nContent-Type: application/json\r\n\r\n"
    body = b"--part" + kind + head + b"\r\n--part" + kind + bomb + b"\r\n--part--"
    sent = requests.post(
        f"{server.url}/upload/storage/v1/b/bucket/o?uploadType=multipart",
        data=body,
        headers={"Content-Type": "multipart/related; boundary=part"},
        timeout=300,
    )
    assert sent.ok
    if accepted == "gzip":
        session = store._bucket.session
        get = session.get
        monkeypatch.setattr(
            session,
            "get",
            lambda *args, headers, **more: get(
                *args, headers=headers | {"Accept-Encoding": "gzip"}, **more
            ),
        )
    for read in (lambda: store.get("bomb", 1 << 16), lambda: store.get_range("bomb", 0, 10)):
        with pytest.raises(ObjectUnreadableError, match="encoding 'gzip'") as caught:
            read()
        assert not caught.value.retry

"""The rules of every object store; a new backend is one more entry of `STORES`.

With DILOCO_TEST_BUCKET=gs://bucket/prefix also over real Google Cloud Storage, by the
application-default credentials; by `make test-stores` also over moto and Azurite.
"""

import errno
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diloco.common.storage.store.directory
from diloco.common.protocol.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectRangeError,
    ObjectTooLargeError,
    ObjectUnreadableError,
    StoreError,
    StoreSlowError,
    StoreUnavailableError,
)
from diloco.common.protocol.shards import Buffers
from diloco.common.storage.store import (
    DirectoryStore,
    MemoryStore,
    ObjectInfo,
    ObjectStore,
    open_store,
)
from diloco.common.storage.store.gcs import open_gcs

sys.path.insert(0, str(Path(__file__).parents[1]))
import bucket_servers
from gcs_server import GcsServer

REAL_BUCKET = os.environ.get("DILOCO_TEST_BUCKET")


@contextmanager
def memory(_: Path) -> Iterator[ObjectStore]:
    yield MemoryStore()


@contextmanager
def directory(folder: Path) -> Iterator[ObjectStore]:
    yield DirectoryStore(folder / "store")


@contextmanager
def gcs(folder: Path) -> Iterator[ObjectStore]:
    with GcsServer(folder / "server", "bucket") as server:
        server.page_size = 2
        yield open_gcs("gs://bucket/some/prefix", server.url)


@contextmanager
def real_gcs(_: Path) -> Iterator[ObjectStore]:
    store = open_gcs(f"{REAL_BUCKET}/{secrets.token_hex(8)}")
    try:
        yield store
    finally:
        for info in store.list(""):
            store.delete(info.name)


@contextmanager
def bucket(scheme: str) -> Iterator[ObjectStore]:
    address = bucket_servers.shared(scheme)
    with bucket_servers.environment(scheme, address):
        yield open_store(f"{scheme}://bucket/some/{secrets.token_hex(8)}")


STORES: dict[str, Callable[[Path], AbstractContextManager[ObjectStore]]] = {
    "memory": memory,
    "directory": directory,
    "gcs": gcs,
    **({"real gcs": real_gcs} if REAL_BUCKET else {}),
    **({s: lambda _, s=s: bucket(s) for s in ("s3", "az")} if bucket_servers.SERVERS else {}),  # type: ignore[misc]
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    with STORES[request.param](tmp_path) as store:
        yield store


def names(store: ObjectStore, prefix: str) -> list[str]:
    return [info.name for info in store.list(prefix)]


def test_what_was_put_is_got(store: ObjectStore) -> None:
    store.put("run/a=1/x.bin", b"abc")
    assert store.get("run/a=1/x.bin") == b"abc"


@pytest.mark.parametrize("data", [b"", b"\0" * 3_000_000, memoryview(b"xyz")[1:]])
def test_any_bytes(store: ObjectStore, data: bytes | memoryview) -> None:
    store.put("o", data)
    assert store.get("o") == bytes(data)
    store.put("o", data)


def test_a_view_of_numbers_is_stored_as_its_bytes(store: ObjectStore) -> None:
    view = memoryview(bytes(range(16))).cast("f")
    store.put("o", view)
    store.put("o", view)
    assert store.get("o") == bytes(range(16))


@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 5), (9_000_000, 1, 4_000_000)])
def test_bytes_from_several_places_are_one_object(
    store: ObjectStore, lengths: tuple[int, ...]
) -> None:
    runs = [bytes([index + 1]) * length for index, length in enumerate(lengths)]
    store.put("o", Buffers(*runs))
    assert store.get("o") == b"".join(runs)
    store.put("o", Buffers(*runs))
    store.put("o", b"".join(runs))
    with pytest.raises(ObjectExistsError):
        store.put("o", Buffers(*runs, b"more"))
    if any(lengths):
        with pytest.raises(ObjectExistsError):
            store.put("o", Buffers(*runs[1:], runs[0]))


def test_the_callers_buffer_may_change_afterwards(store: ObjectStore) -> None:
    buffer = bytearray(b"before")
    store.put("o", memoryview(buffer))
    buffer[:] = b"after!"
    assert store.get("o") == b"before"


def test_putting_the_same_again_succeeds(store: ObjectStore) -> None:
    store.put("o", b"abc")
    store.put("o", b"abc")
    assert store.list("") == [ObjectInfo("o", 3)]


@pytest.mark.parametrize("other", [b"abd", b"ab", b"abcd", b""])
def test_putting_other_bytes_is_refused_and_changes_nothing(
    store: ObjectStore, other: bytes
) -> None:
    store.put("o", b"abc")
    with pytest.raises(ObjectExistsError, match="'o'"):
        store.put("o", other)
    assert store.get("o") == b"abc"


def test_walking_meets_what_is_listed(store: ObjectStore) -> None:
    for name in ("a/b", "a/c/d", "ab", "b"):
        store.put(name, b"123")
    for prefix in ("", "a", "a/", "a/c/", "x"):
        assert sorted(store.walk(prefix)) == store.list(prefix)


def test_what_is_not_there(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    for name in ("x", "a", "a/b/c", "x/y"):
        with pytest.raises(ObjectMissingError):
            store.get(name)
        with pytest.raises(ObjectMissingError):
            store.get_range(name, 0, 1)
    assert store.list("x") == []
    assert store.list("a/b/c/") == []


@pytest.fixture
def folder_store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def spoilt(store: DirectoryStore, how: str) -> None:
    """Damages the folder as a learner that may write to it could."""
    path = store.root / "a/o"
    path.unlink()
    if how == "replaced":
        path.write_bytes(b"other")
    if how == "a link":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("how", ["deleted", "replaced", "a link"])
@pytest.mark.parametrize("linked", [True, False])
def test_what_is_kept_stays_whatever_its_writer_does(
    folder_store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, how: str, linked: bool
) -> None:
    store = folder_store
    store.put("a/o", b"bytes")
    if not linked:
        link = os.link

        def refused(source: Path, target: Path, **options: bool) -> None:
            if diloco.common.storage.store.directory.TEMP not in source.parts:
                raise PermissionError(errno.EPERM, "not its owner")
            link(source, target, **options)

        monkeypatch.setattr(os, "link", refused)
    for _ in range(2):
        store.keep("a/o", 5)
    spoilt(store, how)
    assert store.get("a/o") == b"bytes"
    assert store.get_range("a/o", 1, 3) == b"yt"
    assert [info.name for info in store.list("a/")] == ["a/o"]
    store.delete("a/o")
    assert store.list("") == []
    with pytest.raises(ObjectMissingError):
        store.get("a/o")


@pytest.mark.parametrize("linked", [True, False])
def test_what_is_no_object_of_its_size_is_not_kept_or_told_as_before(
    folder_store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    store = folder_store
    store.put("a/long", b"bytes")
    (store.root / "a/link").symlink_to("/dev/zero")
    if not linked:
        monkeypatch.setattr(diloco.common.storage.store.directory, "_link", not_permitted)
    for name in ("a/long", "a/link", "a/missing"):
        store.keep(name, 4)
    with pytest.raises(ObjectTooLargeError):
        store.get("a/long", 4)
    with pytest.raises(ObjectUnreadableError):
        store.get("a/link", 4)
    with pytest.raises(ObjectMissingError):
        store.get("a/missing", 4)


def not_permitted(*_: object) -> bool:
    raise PermissionError(errno.EPERM, "not its owner")


def test_a_read_that_has_no_time_is_given_up(store: ObjectStore) -> None:
    store.put("o", b"bytes")
    with pytest.raises(StoreSlowError, match="'o' was not read within"):
        store.get("o", within_s=-1.0)
    assert store.get("o", within_s=600.0) == b"bytes"


@pytest.mark.parametrize("size", [1, 5, 9 << 20])
def test_what_is_larger_than_wanted_is_not_read(store: ObjectStore, size: int) -> None:
    data = bytes(size)
    store.put("run/large", data)
    assert store.get("run/large", size) == data
    with pytest.raises(ObjectTooLargeError, match=f"has {size} bytes, at most {size - 1}"):
        store.get("run/large", size - 1)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 256), (255, 256), (10, 20), (17, 255), (254, 256)]
)
def test_a_range_are_the_bytes_from_its_first_to_before_its_last(
    store: ObjectStore, start: int, stop: int
) -> None:
    data = bytes(range(256))
    store.put("run/o", data)
    assert store.get_range("run/o", start, stop) == data[start:stop]


def test_a_range_may_be_long_and_begin_anywhere(store: ObjectStore) -> None:
    data = secrets.token_bytes(20 << 20)
    store.put("run/large", data)
    for start, stop in ((3, len(data) - 5), (8 << 20, 16 << 20), ((8 << 20) - 1, len(data))):
        assert store.get_range("run/large", start, stop) == data[start:stop]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 6), (4, 6), (5, 6), (7, 9), (5, 5), (3, 2), (-1, 2)]
)
def test_a_range_that_is_empty_or_not_within_its_object_is_refused(
    store: ObjectStore, start: int, stop: int
) -> None:
    store.put("o", b"abcde")
    with pytest.raises(ObjectRangeError, match="'o'"):
        store.get_range("o", start, stop)


def test_an_empty_object_has_no_range(store: ObjectStore) -> None:
    store.put("o", b"")
    with pytest.raises(ObjectRangeError, match="'o'"):
        store.get_range("o", 0, 1)


def test_list_is_by_any_prefix_in_order_of_name(store: ObjectStore) -> None:
    for name in ("b/2", "b/10", "a/z", "b-", "b/1/x", "bb"):
        store.put(name, b"1")
    assert names(store, "") == ["a/z", "b-", "b/1/x", "b/10", "b/2", "bb"]
    assert names(store, "b") == ["b-", "b/1/x", "b/10", "b/2", "bb"]
    assert names(store, "b/") == ["b/1/x", "b/10", "b/2"]
    assert names(store, "b/1") == ["b/1/x", "b/10"]
    assert names(store, "b/1/") == ["b/1/x"]


def test_delete_is_idempotent_and_frees_the_name(store: ObjectStore) -> None:
    store.put("a/o", b"1")
    for name in ("a/o", "a/o", "never", "a/o/below"):
        store.delete(name)
    assert store.list("") == []
    store.put("a/o", b"2")
    assert store.get("a/o") == b"2"


BAD_NAMES = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a b",
    "a\n",
    "ä",
    "a\\b",
    "a\0b",
    ".tmp/x",
    "x" * 256,
    "x/" * 256 + "x",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(store: ObjectStore, name: str) -> None:
    for call in (
        lambda: store.put(name, b""),
        lambda: store.get(name),
        lambda: store.get_range(name, 0, 1),
        lambda: store.delete(name),
    ):
        with pytest.raises(StoreError, match="is not an object name"):
            call()


@given(name=st.text(max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_is_refused_or_holds_an_object_and_never_leaves_the_store(
    store: ObjectStore, tmp_path: Path, name: str
) -> None:
    before = [path.name for path in tmp_path.iterdir()]
    try:
        store.put(name, b"1")
    except StoreError:
        return
    assert ObjectInfo(name, 1) in store.list(name)
    store.delete(name)
    assert [path.name for path in tmp_path.iterdir()] == before


def test_one_of_many_writers_wins_and_all_see_its_bytes(store: ObjectStore) -> None:
    won: list[int] = []
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait()
        try:
            store.put("a/deep/o", bytes([number]) * 1000)
        except ObjectExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("a/deep/o") == bytes([won[0]]) * 1000


def test_listing_while_objects_come_and_go(store: ObjectStore) -> None:
    store.put("kept", b"1")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for n in range(5):
                store.put(f"d/{n}", b"1")
            for n in range(5):
                store.delete(f"d/{n}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all("kept" in names(store, "") for _ in range(100))
    finally:
        stop.set()
        thread.join()


def test_what_is_deleted_while_a_directory_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    for name in ("a/x", "b", "c"):
        store.put(name, b"1")
    real = diloco.common.storage.store.directory._entries

    def entries_then_deletion(folder: Path) -> list[os.DirEntry[str]]:
        found = real(folder)
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        store.delete("b")
        return found

    monkeypatch.setattr(diloco.common.storage.store.directory, "_entries", entries_then_deletion)
    assert names(store, "") == ["c"]


def test_a_put_that_meets_an_object_just_being_deleted_stores_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.put("o", b"old")
    real = diloco.common.storage.store.directory._link

    def link_then_deletion(source: Path, target: Path) -> bool:
        made = real(source, target)
        if not made:
            store.delete("o")
        return made

    monkeypatch.setattr(diloco.common.storage.store.directory, "_link", link_then_deletion)
    store.put("o", b"new")
    assert store.get("o") == b"new"


def test_a_crash_in_a_put_leaves_nothing_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)

    class Crash(BaseException):
        pass

    def crash(_: int) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(Crash):
            store.put("a/o", b"half")
    (tmp_path / ".tmp" / "left by a power cut").write_bytes(b"ha")
    assert store.list("") == []
    DirectoryStore(tmp_path).put("a/o", b"whole")
    assert store.get("a/o") == b"whole"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = DirectoryStore(tmp_path)

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreUnavailableError, match="hint") as caught:
            store.put("o", b"1")
    assert caught.value.retry
    assert [*(tmp_path / ".tmp").iterdir()] == []
    store.put("o", b"1")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what was synced")
def test_the_directory_syncs_the_object_and_every_folder_above_it_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    synced: list[Path] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    store.put("a/b/o", b"1")
    assert synced[0].parent == tmp_path / ".tmp"
    assert synced[1:] == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_name_cannot_be_object_and_folder_in_a_directory(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", b"1")
    store.put("b/c", b"1")
    for name in ("a/x", "b"):
        with pytest.raises(StoreError):
            store.put(name, b"1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="permission") as caught:
            DirectoryStore(tmp_path / "s")
    finally:
        tmp_path.chmod(0o700)
    assert not caught.value.retry


@pytest.mark.parametrize("what", ["link to a device", "link to a file", "loop", "pipe"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path, what: str) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a/own", b"1")
    place = tmp_path / "a" / "o"
    match what:
        case "link to a device":
            place.symlink_to("/dev/zero")
        case "link to a file":
            place.symlink_to(tmp_path / "a" / "own")
        case "loop":
            place.symlink_to(place)
        case "pipe":
            os.mkfifo(place)
    for read in (lambda: store.get("a/o"), lambda: store.get_range("a/o", 0, 1)):
        with pytest.raises(ObjectUnreadableError) as caught:
            read()
        assert not caught.value.retry
    # It is listed, so that garbage collection comes to its end, and can be deleted.
    assert [info.name for info in store.list("a/")] == ["a/o", "a/own"]
    store.delete("a/o")
    assert [info.name for info in store.list("a/")] == ["a/own"]


def test_open_store_takes_file_urls_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"file://{tmp_path}/s%20x", f"{tmp_path}/s x", "s x"):
        store = open_store(url, create=True)
        assert isinstance(store, DirectoryStore)
        assert store.root == tmp_path / "s x"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://", "no bucket"),
        ("gs:///x", "no bucket"),
        ("gs://b/x/../y", "not an object name"),
        ("ftp://b", "'ftp'"),
        ("", "empty"),
        ("file://x/y", "absolute"),
    ],
)
def test_open_store_refuses_what_it_does_not_know(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)

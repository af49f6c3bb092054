"""Reads objects that are named by their contents through a cache nearby (docs/adr/0091).

The cache is an HTTP server that answers GET with the object's bytes, or a range of them, such as
nginx with `infra/terraform/modules/cache/nginx.conf.tftpl`. It gets no credentials. No byte of it
is believed: a whole object must have the digest that its name states, and of a range the caller
verifies the bytes by checksums from the store itself. Whatever is wrong with the cache, the store
is read instead.
"""

import contextlib
import http.client
import io
import socket
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from diloco.common.process import log
from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import StoreSlowError
from diloco.common.protocol.shards import Data
from diloco.common.storage.store.protocol import (
    Deadline,
    ObjectInfo,
    ObjectStore,
    check_object_name,
    check_range,
)

# Seconds to connect, to the first byte of an answer, and for a body in addition to the time that
# 10 Mbit/s need.
CONNECT_S, FIRST_S, BODY_S, SLOWEST_BYTES_PER_S = 1.0, 10.0, 5.0, 1_250_000
# Seconds for which a cache that failed is not asked again.
PAUSE_S = 30.0
# No object is larger: a fragment has less than 2^30 parameters of float32, with two outer states.
_MOST_BYTES = 16 << 30

Failure = Literal["away", "slow", "refused"]
OUTCOMES = ("hit", "miss", "away", "slow", "refused", "paused")


class CachedStore(ObjectStore):
    """A store whose content-named objects are read through a cache, if the cache has them whole.

    Args:
        store: the store itself.
        address: the cache's URL, below which objects have the same names as in the store.
        pause_s: seconds for which a cache that failed is not asked again.

    Attributes:
        reads: the number of reads for which the cache was asked, by outcome: "hit" or "miss" as
            the cache says; "away" (no connection, an error, a broken answer), "slow", "refused"
            (wrong bytes), and "paused" (not asked after one of these three), for which the store
            was read.
        read_bytes: bytes that the cache gave.
    """

    def __init__(self, store: ObjectStore, address: str, pause_s: float = PAUSE_S) -> None:
        url = urllib.parse.urlsplit(address)
        secure = url.scheme == "https"
        self._connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._path = url.netloc, url.path.rstrip("/")
        self._store, self._pause_s, self._asked_from_s = store, pause_s, 0.0
        self.reads: Counter[str] = Counter()
        self.read_bytes = 0

    def put(self, name: str, data: Data) -> None:
        """Implements `ObjectStore.put`, in the store."""
        self._store.put(name, data)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Implements `ObjectStore.get`; the cache is asked only for a name that states a digest."""
        digest = names.content_digest(name)
        if digest is not None and within_s is None:
            most = _MOST_BYTES if limit_bytes is None else limit_bytes
            data = self._ask(name, None, most, lambda data: shards.digest(data) == digest)
            if data is not None:
                return data
        return self._store.get(name, limit_bytes, within_s)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Implements `ObjectStore.get_range`, from the store."""
        return self._store.get_range(name, start, stop)

    def get_range_nearby(self, name: str, start: int, stop: int) -> bytes:
        """Returns what `get_range` does, from the cache if possible: any bytes of that number.

        The caller verifies the bytes by what it has read from the store, and calls `refuse` if
        they are wrong.

        Raises:
            StoreError: as `get_range`.
        """
        check_range(name, start, stop)
        size = stop - start
        data = self._ask(name, (start, stop), size, lambda data: len(data) == size)
        return self._store.get_range(name, start, stop) if data is None else data

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Implements `ObjectStore.walk`, in the store."""
        return self._store.walk(prefix)

    def delete(self, name: str) -> None:
        """Implements `ObjectStore.delete`, in the store."""
        self._store.delete(name)

    def refuse(self, name: str) -> None:
        """Notes that the cache gave wrong bytes for `name`, and stops asking it for a while."""
        self._fail("refused", name, "its bytes are not those of the object")

    def _fail(self, failure: Failure, name: str, why: str) -> None:
        self.reads[failure] += 1
        self._asked_from_s = time.monotonic() + self._pause_s
        logger = log.get()
        logger.warning("cache_failed", name=name, failure=failure, why=why)

    def _ask(
        self,
        name: str,
        span: tuple[int, int] | None,
        limit_bytes: int,
        fits: Callable[[bytes], bool],
    ) -> bytes | None:
        """Returns what the cache gives for an object or a range; None if it fails or is refused."""
        check_object_name(name)
        if time.monotonic() < self._asked_from_s:
            self.reads["paused"] += 1
            return None
        connection = self._connect(self._host, timeout=CONNECT_S)
        try:
            data, outcome = self._exchange(connection, name, span, limit_bytes)
        except StoreSlowError as error:
            self._fail("slow", name, error.message)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._fail("away", name, f"{type(error).__name__}: {error}")
        else:
            if fits(data):
                self.reads[outcome] += 1
                self.read_bytes += len(data)
                return data
            self.refuse(name)
        finally:
            connection.close()
        return None

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        name: str,
        span: tuple[int, int] | None,
        limit_bytes: int,
    ) -> tuple[bytes, str]:
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        connection.connect()
        link = connection.sock
        with _limited(link, name, FIRST_S):
            connection.request("GET", f"{self._path}/{name}", headers=headers)
            answer = connection.getresponse()
        size = int(answer.getheader("Content-Length", "-1"))
        if answer.status != (200 if span is None else 206) or not 0 < size <= limit_bytes:
            raise ValueError(f"status {answer.status} with {size} bytes")
        # A BytesIO of zeros, filled through its buffer, returns `bytes` without another copy.
        body = io.BytesIO(bytes(size))
        with _limited(link, name, BODY_S + size / SLOWEST_BYTES_PER_S), body.getbuffer() as left:
            if answer.readinto(left) != size:
                raise ValueError(f"less than {size} bytes came")
        hit = answer.getheader("X-Cache-Status") == "HIT"
        return body.getvalue(), "hit" if hit else "miss"


@contextlib.contextmanager
def _limited(link: socket.socket, name: str, within_s: float) -> Iterator[None]:
    """Ends the block with `StoreSlowError` if it takes longer than `within_s`, byte by byte too."""
    deadline = Deadline(name, within_s)
    link.settimeout(within_s)
    try:
        with deadline.interrupting(lambda: link.shutdown(socket.SHUT_RDWR)):
            yield
        deadline.check()  # what was interrupted may look like an end
    except (OSError, http.client.HTTPException, ValueError):
        deadline.check()
        raise

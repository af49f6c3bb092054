"""Downloads objects as ranges on several threads, into one buffer."""

import contextlib
import io
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import requests
from google.api_core import exceptions as api

from diloco.common.protocol.errors import ObjectRangeError, ObjectTooLargeError
from diloco.common.protocol.shards import PIECE_BYTES
from diloco.common.storage.store.gcs.bucket import PART_BYTES, Bucket, stored_checksum
from diloco.common.storage.store.gcs.faults import BROKEN, MalformedAnswerError, header
from diloco.common.storage.store.protocol import Deadline, check_range, check_size

_RANGE_THREADS = 8
_LEAST_S, _SLOWEST_BYTES_PER_S = 60.0, 125_000
# The group is the object's size, 1000 in "bytes 0-9/1000".
_RANGE = r"^bytes \d+-\d+/(\d+)$"
_GENERATION = r"^(\d+)$"


class Downloads:
    """Downloads objects of one bucket, on threads that all downloads share."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._pool = ThreadPoolExecutor(_RANGE_THREADS, thread_name_prefix="gcs")

    def whole(
        self, name: str, limit_bytes: int | None, deadline: Deadline | None
    ) -> tuple[bytes, str]:
        """Returns an object's bytes, not yet verified, and the crc32c that the service states.

        Args:
            name: the object's name without the prefix.
            limit_bytes: the largest size to read; None for no limit.
            deadline: when to give up; None: after 60 s plus the time that 1 Mbit/s needs.

        Raises:
            ObjectTooLargeError: the object has more than `limit_bytes`.
            StoreSlowError: the deadline has passed.
        """
        try:
            first, size = self._bucket.retry(self._begin)(name, 0, PART_BYTES)
        except api.RequestRangeNotSatisfiable:  # An empty object has no range.
            return self._bucket.retry(self._read_empty)(name)
        try:
            check_size(name, size, limit_bytes)
        except ObjectTooLargeError:
            first.close()
            raise
        return self._span(name, first, 0, size, deadline or _patience(name, size)), stored_checksum(
            first
        )

    def _begin(self, name: str, start: int, count: int) -> tuple[requests.Response, int]:
        """Requests `count` bytes from `start`; returns the answer and the whole object's size."""
        response = self._bucket.read(name, start, count)
        try:
            stored_checksum(response)
            header(response, "x-goog-generation", _GENERATION)
            return response, int(header(response, "Content-Range", _RANGE))
        except MalformedAnswerError:
            response.close()
            raise

    def _read_empty(self, name: str) -> tuple[bytes, str]:
        with self._bucket.read(name, 0, None) as response:
            return response.content, stored_checksum(response)

    def range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of an object.

        Raises:
            ObjectRangeError: the object ends before `stop`.
        """
        try:
            count = min(stop - start, PART_BYTES)
            first, size = self._bucket.retry(self._begin)(name, start, count)
        except api.RequestRangeNotSatisfiable as error:
            raise ObjectRangeError(
                f"object {name!r} ends before byte {start}, [{start}, {stop}) were expected"
            ) from error
        try:
            check_range(name, start, stop, size)
        except ObjectRangeError:
            first.close()
            raise
        return self._span(name, first, start, stop, _patience(name, stop - start))

    def _span(
        self, name: str, first: requests.Response, start: int, stop: int, deadline: Deadline
    ) -> bytes:
        """Returns the bytes [start, stop) of an object.

        `first` answers the request for the first part.
        """
        # A BytesIO of zeros, filled through its buffer, returns `bytes` without another copy.
        buffer = io.BytesIO(bytes(stop - start))
        with buffer.getbuffer() as window:
            self._fill(name, first, start, window, deadline)
        return buffer.getvalue()

    def _fill(
        self,
        name: str,
        first: requests.Response,
        begin: int,
        window: memoryview,
        deadline: Deadline,
    ) -> None:
        """Fills `window` with the object's bytes from `begin` on, each part on a thread.

        `first` answers the request for the first part.
        """
        generation = first.headers["x-goog-generation"]
        broken = threading.Event()

        def read(start: int, opened: requests.Response | None) -> None:
            part = window[start : start + PART_BYTES]
            try:
                self._read_part(name, generation, begin + start, part, opened, broken, deadline)
            except BaseException:
                broken.set()
                raise
            finally:
                part.release()

        starts = range(PART_BYTES, len(window), PART_BYTES)
        others = [self._pool.submit(read, start, None) for start in starts]
        try:
            read(0, first)
        finally:
            wait(others)
        for other in others:
            other.result()

    def _read_part(
        self,
        name: str,
        generation: str,
        start: int,
        part: memoryview,
        opened: requests.Response | None,
        broken: threading.Event,
        deadline: Deadline,
    ) -> None:
        """Fills `part` with the object's bytes from `start` on; resumes after a broken connection.

        Returns early once `broken` is set, as another part has failed. `opened` is an answer to
        read first, if the request was already sent.
        """
        filled = 0

        def attempt() -> int:
            nonlocal opened
            response, opened = opened, None
            if response is None:
                deadline.check()
                left = len(part) - filled
                response = self._bucket.read(name, start + filled, left, generation)
            return _read_into(response, part[filled:], deadline)

        while filled < len(part) and not broken.is_set():
            filled += self._bucket.retry(attempt)()


def _patience(name: str, size_bytes: int) -> Deadline:
    """Returns the deadline for an object of `size_bytes` whose reader has set none."""
    return Deadline(name, _LEAST_S + size_bytes / _SLOWEST_BYTES_PER_S)


def _read_into(response: requests.Response, part: memoryview, deadline: Deadline) -> int:
    """Reads an answer's body into `part`; returns the number of bytes that came.

    The number is less than asked for if the connection broke.

    Raises:
        MalformedAnswerError: the body is empty, or longer than what was asked for.
    """
    count = 0
    with response, deadline.interrupting(lambda: _interrupt(response)):
        deadline.check()
        try:
            for piece in response.iter_content(PIECE_BYTES):
                if count + len(piece) > len(part):
                    raise MalformedAnswerError(f"more than the {len(part)} bytes of a range came")
                part[count : count + len(piece)] = piece
                count += len(piece)
        except BROKEN:
            if not count:
                raise
    if not count:
        raise MalformedAnswerError(f"a range of {len(part)} bytes came without any")
    return count


def _interrupt(response: requests.Response) -> None:
    """Shuts down an answer's connection, so that the thread that reads the answer fails."""
    with contextlib.suppress(ValueError, RuntimeError, OSError):  # read to its end
        response.raw.shutdown()

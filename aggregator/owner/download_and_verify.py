"""Downloads an update's shards from the store, verifies them, and puts their blocks in order.

A fragment's owner has an `UpdateFetcher`, which does this for a few updates at once, while the
fragment's state machine works.

If the store is slow for all learners' updates, no update is rejected: each attempt may take twice
as long as the previous one. If one update is slow while updates of other learners are read
completely, the update's sender is at fault, and the update is rejected.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import ml_dtypes
import numpy as np

from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.core.events import Fetch
from diloco.common.process import cores, log, metrics
from diloco.common.process.tasks import Tasks
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import (
    Encoded,
    aligned_empty,
    code_count,
    code_dtype,
    scale_count,
)
from diloco.common.protocol.errors import (
    ObjectMissingError,
    ObjectTooLargeError,
    ObjectUnreadableError,
    StoreSlowError,
    WireError,
)
from diloco.common.protocol.reasons import Reason
from diloco.common.storage.store import ProtectsObjects

if TYPE_CHECKING:
    from diloco.aggregator.arrays.arithmetic import Arithmetic
    from diloco.aggregator.arrays.fragment import Payload


class Reads(Protocol):
    """The method of an object store that is needed to read an update."""

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Returns the bytes of the object `name`; arguments and errors as of `ObjectStore.get`."""


def read_payload(
    store: Reads,
    manifest: wire.Manifest,
    grid: Grid,
    arithmetic: "Arithmetic | None" = None,
    threads: int = 1,
) -> "Payload":
    """Reads and verifies all shards of an update; returns the update with its norms.

    Args:
        store: the store.
        manifest: the update's manifest.
        grid: the grid of the update's fragment.
        arithmetic: the functions that compute the norms; None: `PRODUCTION`.
        threads: the number of threads that compute the norms.

    Raises:
        ObjectMissingError: a shard that the manifest names is missing.
        WireError: a shard differs from the manifest. The reason is "oversize" (nothing was read),
            "checksum", "unreadable", "shards" (the slices do not cover the fragment once), or one
            of `shards.unpack`.
        StoreUnavailableError: a transient fault.
        StoreSlowError: a `Limited` store's time is over.
    """
    # Imported here, so that callers that only inspect updates do not load Numba.
    from diloco.aggregator.arrays.arithmetic import PRODUCTION
    from diloco.aggregator.arrays.fragment import payload_of

    parts = tuple(read_parts(store, manifest.codec, manifest.shards, grid))
    return payload_of(grid, manifest.codec, parts, arithmetic or PRODUCTION, threads)


def read_input(store: Reads, grid: Grid, taken: wire.Input) -> tuple[Encoded, ...]:
    """Returns the verified parts of an update that a record names as an input.

    Raises:
        As `read_payload`.
    """
    return tuple(read_parts(store, taken.codec, taken.shards, grid))


def read_parts(
    store: Reads, codec: Any, entries: Sequence[wire.Shard], grid: Grid
) -> Iterator[Encoded]:
    """Yields an update's scales and codes as one part for each of the grid's ranges, in order.

    The sender may have divided the update into shards in another way. Memory: shards that equal the
    grid's ranges are read one by one as the parts are asked for, and not copied. Other shards are
    copied into arrays of the whole update, which takes memory for these arrays and for one shard;
    no shard is longer than the longest range.

    Raises:
        As `read_payload`.
    """
    if not cut_alike(entries, grid):
        yield from _assemble(store, codec, entries, grid)
        return
    for entry, (start, stop) in zip(entries, grid.ranges, strict=True):
        yield _read_shard(store, codec, entry, stop - start, grid.block)


def cut_alike(entries: Sequence[wire.Shard], grid: Grid) -> bool:
    """True if an update's shards are exactly the grid's ranges, in order."""
    if len(entries) != len(grid.ranges):
        return False
    return all(
        slices.is_range(entry.slices, start, stop, grid.block)
        for entry, (start, stop) in zip(entries, grid.ranges, strict=True)
    )


def _assemble(
    store: Reads, codec: Any, entries: Sequence[wire.Shard], grid: Grid
) -> tuple[Encoded, ...]:
    blocks = grid.size // grid.block
    most = max(stop - start for start, stop in grid.ranges) // grid.block
    counts = slices.partition([entry.slices for entry in entries], blocks, most)
    scales = aligned_empty(scale_count(codec, grid.size, grid.block), np.dtype(ml_dtypes.bfloat16))
    codes = aligned_empty(code_count(codec, grid.size), code_dtype(codec))
    for entry, count in zip(entries, counts, strict=True):
        part = _read_shard(store, codec, entry, count * grid.block, grid.block)
        slices.scatter(codes.reshape(blocks, -1), entry.slices, part.codes.reshape(count, -1))
        if scales.size:
            slices.scatter(scales[:, None], entry.slices, part.scales[:, None])
    return tuple(
        Encoded(
            scales[slice(*(scale_count(codec, end, grid.block) for end in ends))],
            codes[slice(*(code_count(codec, end) for end in ends))],
        )
        for ends in grid.ranges
    )


def _read_shard(store: Reads, codec: Any, entry: wire.Shard, count: int, block: int) -> Encoded:
    try:
        data = store.get(entry.name, entry.size_bytes)
    except ObjectTooLargeError as error:
        raise WireError(Reason.OVERSIZE, error.message) from error
    except ObjectUnreadableError as error:
        raise WireError(Reason.UNREADABLE, error.message) from error
    if len(data) == entry.size_bytes and shards.crc32c(data) != entry.crc32c:
        raise WireError(Reason.CHECKSUM, f"object {entry.name!r} is not what its manifest says")
    return shards.unpack(data, codec=codec, count=count, block=block)


# The time limit of the first attempt: FIRST_S, and a second for each LEAST_BYTES_PER_S bytes.
FIRST_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 1 << 20
# The limit is doubled at most this many times.
DOUBLINGS: Final = 10


class Limited:
    """A store whose reads together may take a limited time.

    Args:
        store: the store to read from.
        left_s: the seconds that all reads together may take.
    """

    def __init__(self, store: Reads, left_s: float) -> None:
        self._store = store
        self._left_s = left_s

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Returns the bytes of the object `name`, read within the seconds that are left.

        Other arguments and errors as of `ObjectStore.get`.

        Raises:
            StoreSlowError: the read takes longer.
        """
        left_s = self._left_s if within_s is None else min(within_s, self._left_s)
        began_s = time.monotonic()
        try:
            return self._store.get(name, limit_bytes, left_s)
        finally:
            self._left_s -= time.monotonic() - began_s


class Patience:
    """The time limits of the attempts to read one update, and the count of slow attempts."""

    def __init__(self, manifest: wire.Manifest) -> None:
        size_bytes = sum(shard.size_bytes for shard in manifest.shards)
        self._first_s = FIRST_S + size_bytes / LEAST_BYTES_PER_S
        self._slow = 0  # the attempts that took too long
        self._alone = 0  # of these, the attempts during which others' updates were read

    @property
    def within_s(self) -> float:
        """The seconds that the next attempt may take."""
        return float(self._first_s * 2 ** min(self._slow, DOUBLINGS))

    def lost(self, error: StoreSlowError, *, others_read: bool) -> None:
        """Notes an attempt that took too long.

        Args:
            error: the error of the attempt.
            others_read: True if updates of other learners were read during the attempt.

        Raises:
            WireError: with reason "slow", at the second attempt with `others_read`: the sender is
                at fault.
        """
        self._slow += 1
        self._alone += others_read
        # One such attempt proves nothing: the store may have recovered after the attempt began, and
        # before the reading of the others' updates did.
        if self._alone > 1:
            what = f"slow {self._slow} times, while others were read: {error.message}"
            raise WireError(Reason.SLOW, what) from error


# The most payloads of one fragment in memory that are not merged yet.
FETCHES = 2
# Pauses between attempts at an update that cannot be read for an unknown reason.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

Answer = Callable[[events.Fetched | events.Failed, "Payload | None"], Awaitable[None]]


class UpdateFetcher:
    """Reads the shards of one fragment's updates.

    Args:
        context: the aggregator's context.
        grid: the fragment's grid.
        answer: called with the event for the machine, `Fetched` or `Failed`, and with the payload
            if the update is verified. Whoever has used a payload must call `release`.
        tasks: the tenure's tasks.
        logger: the fragment's logger.
    """

    def __init__(
        self, context: Context, grid: Grid, answer: Answer, tasks: Tasks, logger: log.Logger
    ) -> None:
        self._context = context
        self._grid = grid
        self._answer = answer
        self._logger = logger
        self._free = asyncio.Semaphore(FETCHES)
        self._passed: Counter[str] = Counter()
        # By learner: when the reading of its last verified update began.
        self._began_s: dict[str, float] = {}
        self._tasks = tasks

    def start(self, fetch: Fetch) -> None:
        """Starts to read an update, as soon as fewer than `FETCHES` payloads are in memory."""
        self._tasks.start(self._fetch(fetch))

    def release(self) -> None:
        """Notes that a payload was used, so that another update may be read."""
        self._free.release()

    async def _fetch(self, fetch: Fetch) -> None:
        """Reads an update, and calls `answer` with `Fetched` and the payload, or with `Failed`."""
        runtime = self._context.runtime
        try:
            payload = await self._read_at_last(fetch)
        except ObjectMissingError as error:
            failed = events.Failed(runtime.clock(), fetch.update, Reason.MISSING, error.message)
        except WireError as error:
            failed = events.Failed(runtime.clock(), fetch.update, error.reason, error.message)
        else:
            self._passed[fetch.update.learner] += 1
            fetched = events.Fetched(runtime.clock(), fetch.update, payload.norm)
            received = sum(shard.size_bytes for shard in fetch.manifest.shards)
            self._context.metrics.add(metrics.RECEIVED, received)
            await self._answer(fetched, payload)
            return
        await self._answer(failed, None)

    async def _read_at_last(self, fetch: Fetch) -> "Payload":
        """Reads the update; retries for as long as the store is unreachable.

        A failure that is neither a transient fault nor explained by the sender's bytes may be a
        lack of memory or file handles, or a bug of ours. Then the reading is repeated, and the
        update is rejected only if its reading failed twice while other learners' updates were
        verified.

        Raises:
            ObjectMissingError, WireError: as `read_payload`. Further reasons of `WireError` are
                "internal" for such a repeated failure, and "slow" (`Patience.lost`).
        """
        failures, pause_s = 0, FIRST_PAUSE_S
        patience = Patience(fetch.manifest)
        passed = self._passed_of_others(fetch)
        while True:
            try:
                return await self._context.runtime.retry(
                    "reading shards", lambda: self._read(fetch, patience), logger=self._logger
                )
            except (ObjectMissingError, WireError):
                raise
            except Exception as error:
                failures += 1
                self._logger.exception(
                    "reading_failed", update=list(fetch.update), failures=failures
                )
                if failures > 1 and self._passed_of_others(fetch) > passed:
                    what = f"reading it failed {failures} times, while others were read: {error}"
                    raise WireError(Reason.INTERNAL, what) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _passed_of_others(self, fetch: Fetch) -> int:
        return sum(self._passed.values()) - self._passed[fetch.update.learner]

    async def _read(self, fetch: Fetch, patience: Patience) -> "Payload":
        """Makes one attempt to read an update; after a failure no payload counts as in memory."""
        await self._free.acquire()
        context, learner = self._context, fetch.update.learner
        began_s = context.runtime.clock()
        store = Limited(context.store, patience.within_s)
        try:
            payload = await context.runtime.call(self._read_and_keep, store, fetch.manifest)
        except StoreSlowError as error:
            self._free.release()
            patience.lost(error, others_read=self._others_read_since(began_s, learner))
            raise
        except BaseException:
            self._free.release()
            raise
        self._began_s[learner] = began_s
        return payload

    def _read_and_keep(self, store: Limited, manifest: wire.Manifest) -> "Payload":
        """Reads and verifies an update; first protects its shards from deletion by their sender."""
        if isinstance(self._context.store, ProtectsObjects):
            for shard in manifest.shards:
                self._context.store.keep(shard.name, shard.size_bytes)
        return read_payload(
            store, manifest, self._grid, self._context.arithmetic, cores.available()
        )

    def _others_read_since(self, since_s: float, learner: str) -> bool:
        """True if an update of another learner, read from `since_s` on, was verified."""
        return any(at_s >= since_s for name, at_s in self._began_s.items() if name != learner)

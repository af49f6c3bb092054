"""The context that all parts of one aggregator process share, and the two ways in which it writes.

Objects are stored under names that contain their digest; messages that commit use compare-and-swap.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.common.process import log, metrics
from diloco.common.process.config import AggregatorSection, GcSection
from diloco.common.process.health import Health
from diloco.common.process.metrics import Metrics
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import RunMismatchError
from diloco.common.protocol.shards import Buffers
from diloco.common.storage.tape import RunContext

if TYPE_CHECKING:
    from diloco.aggregator.arrays.arithmetic import Arithmetic

import asyncio

from diloco.common.process.retry import Runtime
from diloco.common.storage.store import ObjectInfo, ObjectStore


class ShardListing:
    """Lists the shards in the store, once for all fragments that an aggregator owns.

    In object names the learner precedes the fragment, so that one access rule restricts a learner.
    Listing one fragment's shards would take a request for each learner; listing all shards takes
    one for each page of objects. Each fragment takes its part of a listing once; the part is kept
    until then, and may be as old as the fragment's previous collection. That only leaves newer
    shards to the next collection, as the tape is read after the listing.
    """

    def __init__(self) -> None:
        self._fragments: set[int] = set()
        self._parts: dict[int, list[ObjectInfo]] = {}
        self._listing = asyncio.Lock()

    async def of(
        self, fragment: int, run: str, store: ObjectStore, runtime: Runtime
    ) -> list[ObjectInfo]:
        """Returns the shards of all learners' updates of a fragment.

        Raises:
            StoreError: the store cannot be listed.
        """
        self._fragments.add(fragment)
        async with self._listing:
            if fragment not in self._parts:
                self._parts = await runtime.call(_parts, store, run, frozenset(self._fragments))
            return self._parts.pop(fragment)

    def forget(self, fragment: int) -> None:
        """Notes that a fragment needs no more listings."""
        self._fragments.discard(fragment)
        self._parts.pop(fragment, None)


def _parts(store: ObjectStore, run: str, fragments: frozenset[int]) -> dict[int, list[ObjectInfo]]:
    """Lists the shards, by fragment; blocks."""
    found: dict[int, list[ObjectInfo]] = {fragment: [] for fragment in fragments}
    for info in store.walk(names.learners_prefix(run)):
        sent = names.parse_shard(run, info.name)
        if sent is not None and sent.fragment in found:
            found[sent.fragment].append(info)
    return found


@dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """The state that all parts of one aggregator process share; its records state `name`.

    `record_bytes`: the body of a longer record is stored as an object.
    `most_positions`: a specification with more data positions stores them as an object.
    `share_expiry_s`: silence in seconds after which a learner's shares of the data become free.
    `arithmetic`: numeric functions for arrays; None for production's, which load Numba where they
    are used, and not here, as operators' commands have a context too.
    `shard_listing`: shared by the garbage collectors of all fragments.
    """

    name: str
    record_bytes: int = field(default_factory=lambda: wire.RECORD_BYTES)
    most_positions: int = wire.MAX_KEYS
    gc: GcSection = field(default_factory=GcSection)
    share_expiry_s: float = AggregatorSection().share_expiry_s
    arithmetic: "Arithmetic | None" = None
    metrics: Metrics = field(default_factory=Metrics)
    health: Health = field(default_factory=Health)
    shard_listing: ShardListing = field(default_factory=ShardListing)


def resumed_since(context: RunContext, epoch: int) -> RunMismatchError:
    """Returns the error for a process whose run was resumed on a newer tape, of this epoch."""
    return RunMismatchError(
        f"run {context.run!r} was resumed as epoch {epoch}, this is epoch {context.epoch}",
        hint="this process is connected to the server of an earlier tape: stop it",
    )


def identity(context: Context) -> str:
    """Returns 128 random bits in hex that name one attempt to commit; nobody can predict them."""
    return context.runtime.new_id()


async def store_version_object(
    context: Context,
    fragment: int,
    version: int,
    what: str,
    data: bytes | Buffers,
    logger: log.Logger,
) -> wire.ObjectRef:
    """Stores an object of a version under a name with its digest; retries for ever."""
    name = names.version_object(context.run, fragment, version, what, shards.digest(data))
    await context.runtime.retry(
        f"storing {what}",
        lambda: context.runtime.call(context.store.put, name, data),
        logger=logger,
    )
    context.metrics.add(metrics.STORED, len(data))
    return wire.ObjectRef(name=name, size_bytes=len(data), crc32c=shards.crc32c(data))

"""Deletes the garbage that `core/garbage.py` finds, for a fragment's owner or for an operator.

The order of the steps matters, and stopping after any of them does no harm:
1. list the store; objects stored later are not considered;
2. find out which learners may still announce updates;
3. read the fragment's records up to the newest, so that no verdict given since step 2 is missed;
4. find out which checkpoints there are: what step 3 makes garbage may be of a new checkpoint;
5. check that no newer tape of the run exists: its objects are not this collector's to delete;
6. trim the tape, then delete objects: a record on the tape may name the object of its body.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from diloco.aggregator.context import Context, resumed_since
from diloco.aggregator.core import garbage, memory
from diloco.aggregator.core.garbage import Announcers, Ledger, Trim
from diloco.aggregator.core.state import State
from diloco.aggregator.core.updates import UpdateId
from diloco.common.process import log, metrics
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    DilocoError,
    IntegrityError,
    ObjectMissingError,
    WireError,
)
from diloco.common.storage.store import ObjectInfo, ObjectStore
from diloco.common.storage.tape import (
    RunContext,
    decode_as,
    first_message,
    last_record,
    messages_up_to,
    records_of,
)

# The number of objects that one call off the event loop deletes.
BATCH = 64
# Seconds between two looks at a machine that stores a record.
STORING_S = 0.1


class RetainedCheckpoints(NamedTuple):
    """The checkpoints that keep their objects.

    Attributes:
        versions: for each such checkpoint, the version of each fragment.
        stale: the files of the other checkpoints, to be deleted.
    """

    versions: tuple[tuple[int, ...], ...]
    stale: tuple[ObjectInfo, ...]

    def of(self, fragment: int) -> frozenset[int]:
        """Returns the versions of a fragment whose view and outer state checkpoints need."""
        return frozenset(versions[fragment] for versions in self.versions)


class ShardListing:
    """Lists the shards in the store, once for all fragments that an aggregator owns.

    In object names the learner precedes the fragment, so that one access rule restricts a learner.
    Listing one fragment's shards would take a request for each learner; listing all shards takes
    one for each page of objects. A listing is divided by fragment. The list of a fragment stays in
    memory until the fragment's next collection takes it, so it may be as old as the fragment's
    previous collection. Shards that were stored later are in the next listing.
    """

    def __init__(self) -> None:
        self._fragments: set[int] = set()
        self._parts: dict[int, list[ObjectInfo]] = {}
        self._listing = asyncio.Lock()

    async def of(
        self, fragment: int, run: str, store: ObjectStore, runtime: Runtime
    ) -> list[ObjectInfo]:
        """Returns the shards of all learners' updates of a fragment; lists the store if necessary.

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
    """Lists the shards of these fragments, by fragment; blocks the thread."""
    found: dict[int, list[ObjectInfo]] = {fragment: [] for fragment in fragments}
    for info in store.walk(names.learners_prefix(run)):
        sent = names.parse_shard(run, info.name)
        if sent is not None and sent.fragment in found:
            found[sent.fragment].append(info)
    return found


class Collector:
    """Collects the garbage of one fragment in the background.

    The owner of fragment 0 also collects the garbage of the whole run: joins and leaves on the
    tape, and files of old checkpoints.

    Args:
        context: the aggregator's context.
        fragment: the fragment's index.
        state: returns the state of the owner's machine; None while it recovers.
        shards: the listing of shards, shared by the collectors of all fragments of this process.
    """

    def __init__(
        self,
        context: Context,
        fragment: int,
        state: Callable[[], State | None],
        shards: ShardListing,
    ) -> None:
        self._context = context
        self._fragment = fragment
        self._state = state
        self._shards = shards
        self._logger = context.logger.bind(fragment=fragment)
        self._ledger = Ledger(context.run, fragment, context.epoch)
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Starts a collection; called when a snapshot is committed."""
        self._woken.set()

    async def work(self) -> None:
        """Collects after each `wake`, for ever; a failure is logged and does not end it."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                if self._context.gc.enabled:
                    await self._try()
        finally:
            self._shards.forget(self._fragment)

    async def _try(self) -> None:
        try:
            await self._context.runtime.retry(
                "collecting garbage", self._collect, logger=self._logger
            )
        except DilocoError as error:
            self._logger.warning("not_collected", error=error.message, hint=error.hint)
        except Exception:
            # A bug here may cost space, but must not stop the fragment.
            self._logger.exception("collection_failed")

    async def _collect(self) -> None:
        context, began_s = self._context, self._context.runtime.clock()
        state = await self._settled()
        if state is None or not memory.has_caught_up(state):
            return  # It may know an incarnation, but not yet all updates of the one before.
        fleet = fleet_of(state)
        found = await self._list()
        await read_on(context, self._ledger)
        retained = await read_retained(context, context.gc.keep_checkpoints, self._logger)
        await check_epoch(context)
        check_tape_is_newest(self._ledger, found)
        plan = garbage.plan(
            self._ledger,
            found,
            fleet=fleet,
            pinned=retained.of(self._fragment),
            replay_window_s=context.gc.replay_window_s,
        )
        if plan is None:
            return
        await trim_tape(context, plan.trims)
        self._ledger.forget_below(plan.floor_seq)
        await delete(context, [item.name for item in plan.objects])
        if self._fragment == 0:
            await trim_tape(context, await self._plan_run(fleet.lives))
            await delete(context, [info.name for info in retained.stale])
        size_bytes = sum(item.size_bytes for item in plan.objects)
        context.metrics.add(metrics.COLLECTED, size_bytes)
        self._logger.info(
            "collected",
            floor=plan.floor_version,
            objects=dict(Counter(item.kind for item in plan.objects)),
            size_bytes=size_bytes,
            took_s=round(context.runtime.clock() - began_s, 3),
        )

    async def _settled(self) -> State | None:
        """Returns the state of the owner's machine once it stores no record."""
        # While a record is being stored, no record on the tape names its inputs yet. Nothing wakes
        # the collector again before the next snapshot, which a run's last one does not have.
        state = self._state()
        while state is not None and state.storing is not None:
            await asyncio.sleep(STORING_S)
            state = self._state()
        return state

    async def _plan_run(self, learners: Iterable[str]) -> tuple[Trim, ...]:
        """Plans which joins and leaves of learners to trim, by each fragment's records."""
        context = self._context
        answered: list[int] = []
        marked: list[tuple[str, int]] = []
        for fragment in range(len(context.layout.fragments)):
            newest, _ = await last_record(context, fragment)
            oldest = await first_message(context, names.record(context.run, fragment))
            answered.append(min(newest.position, oldest.seq))
            marked += ((mark.learner, mark.incarnation) for mark in newest.policy.marks)
        return garbage.plan_run(context.run, answered, learners, marked)

    async def _list(self) -> list[ObjectInfo]:
        """Returns the fragment's objects in the store, and the shards of its updates."""
        context, prefix = self._context, names.fragment_prefix(self._context.run, self._fragment)
        stored = await context.runtime.call(context.store.list, prefix)
        return stored + await self._shards.of(
            self._fragment, context.run, context.store, context.runtime
        )


def fleet_of(state: State) -> Announcers:
    """Returns each learner's newest incarnation, and the updates without a committed verdict."""
    manifests = [
        *(waiting.manifest for waiting in state.pending.values()),
        *(admitted.manifest for admitted in state.admitted),
        *(refused.manifest for refused in state.rejected),
    ]
    pending = {UpdateId(sent.learner, sent.incarnation, sent.seq) for sent in manifests}
    lives = {learner: member.incarnation for learner, member in state.members.items()}
    return Announcers(lives, pending)


async def read_retained(context: RunContext, keep: int, logger: log.Logger) -> RetainedCheckpoints:
    """Returns the checkpoints that keep their objects, of this tape and of earlier ones.

    Args:
        context: the run's context.
        keep: the number of newest checkpoints that keep their objects, as `gc.keep_checkpoints`.
        logger: gets a warning for each message or file that cannot be decoded.

    Raises:
        BusError, StoreError: bus or store are unreachable, or do not permit reading.
    """
    marked = await _marked(context, logger)
    files = await context.runtime.call(context.store.list, names.checkpoint_prefix(context.run))
    whole = {info.name.removeprefix(names.checkpoint_prefix(context.run)): info for info in files}
    pinned = garbage.pinned_checkpoints(marked, whole, keep)
    versions = {name: marked[name] for name in pinned & marked.keys()}
    for name in pinned - versions.keys():
        with contextlib.suppress(ObjectMissingError):
            data = await context.runtime.call(context.store.get, whole[name].name)
            try:
                file = wire.decode(wire.CheckpointFile, data)
            except WireError as error:
                logger.warning("unreadable", subject=whole[name].name, reason=error.reason)
            else:
                versions[name] = tuple(record.version for record in file.records)
    stale = tuple(info for name, info in whole.items() if name not in pinned)
    fragments = len(context.layout.fragments)
    return RetainedCheckpoints(tuple(v for v in versions.values() if len(v) == fragments), stale)


async def _marked(context: RunContext, logger: log.Logger) -> dict[str, tuple[int, ...]]:
    """Returns the version of each fragment, for each checkpoint on the tape, by its name."""
    subject = names.checkpoint(context.run)
    last = await context.bus.last(context.tape, subject)
    found: dict[str, tuple[int, ...]] = {}
    if last is None:
        return found
    async for message in messages_up_to(context, [subject], last.seq):
        try:
            checkpoint = decode_as(wire.Checkpoint, subject, message.payload)
        except WireError as error:
            logger.warning("unreadable", subject=subject, reason=error.reason)
        else:
            found[checkpoint.name] = checkpoint.versions
    return found


async def read_on(context: RunContext, ledger: Ledger) -> None:
    """Adds the fragment's records since the last call to a ledger, up to the newest.

    Raises:
        DilocoError: a record cannot be read.
    """
    async for item in records_of(context, ledger.fragment, ledger.newest_seq + 1):
        body = item.body.name if item.body else None
        ledger.take(item.record, item.record_seq, item.stored_at_s, body)


async def check_epoch(context: RunContext) -> None:
    """Raises if the run has a newer tape, whose aggregators may have stored some of the objects.

    Raises:
        RunMismatchError: the run was resumed on a newer tape.
    """
    prefix = names.epoch_prefix(context.run)
    claimed = await context.runtime.call(context.store.list, prefix)
    epochs = [info.name.removeprefix(prefix) for info in claimed]
    newest = max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)
    if newest > context.epoch:
        raise resumed_since(context, newest)


def check_tape_is_newest(ledger: Ledger, found: Iterable[ObjectInfo]) -> None:
    """Raises if the store has objects of versions beyond the tape's end.

    Raises:
        IntegrityError: the tape ends before the fragment's objects.
    """
    newer = next(garbage.newer_than_tape(ledger, found), None)
    if newer is not None:
        raise IntegrityError(
            f"run {ledger.run!r}: the tape ends before its objects, it knows nothing of {newer!r}",
            hint="the stream was cut, or an older copy restored; nothing is deleted: "
            "runbooks/debug-with-replay.md",
        )


async def trim_tape(context: RunContext, trims: Iterable[Trim]) -> None:
    """Removes old messages from the tape; the last message of each subject always stays.

    Raises:
        BusError: the bus is unreachable, or does not permit the removal.
    """
    for trim in trims:
        await context.bus.trim(context.tape, trim.subject, trim.below_seq)


async def delete(context: RunContext, objects: Sequence[str]) -> None:
    """Deletes objects from the store, in batches off the event loop.

    Raises:
        StoreError: the store is unreachable, or does not permit the deletion.
    """

    def some(batch: Sequence[str]) -> None:
        for name in batch:
            context.store.delete(name)

    for begin in range(0, len(objects), BATCH):
        await context.runtime.call(some, objects[begin : begin + BATCH])

"""Saves, uploads, finds and restores checkpoints of a learner's inner optimizer.

The training thread only copies the state on the device. Another thread does the rest, and no
further checkpoint is due meanwhile. A learner that starts searches for a checkpoint on this
machine's disk, then among its own uploads in the object store, and for a warm start among other
learners' uploads.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from diloco.common.process import metrics
from diloco.common.process.config import LearnerSection
from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import CheckpointError, DilocoError, NoSnapshotError
from diloco.learner.background import Context
from diloco.learner.core.carry import Unsent
from diloco.learner.core.handover import CheckpointId
from diloco.learner.tensors import checkpoint as checkpoints
from diloco.learner.tensors import checkpoint_encryption as encryption
from diloco.learner.tensors.checkpoint import (
    CheckpointFolder,
    CheckpointObject,
    Facts,
    Folder,
    HostCheckpoint,
    PartFolder,
)

T = TypeVar("T")
Read = Callable[[], tuple[Facts, Any]]


class PatientFetch(Protocol):
    """Calls a function that reads the store, and repeats the call after a transient fault."""

    def __call__(self, what: str, function: Callable[[], T]) -> T:
        """Calls `function`, and returns its result; `what` names the call in the log."""


class TrainingProgress(NamedTuple):
    """A learner's counters, as checkpoints have them.

    Attributes:
        local_step: the learner's inner steps.
        tokens: the tokens that it has trained.
        position: its position in its data, in batches.
        global_step: the run's clock.
    """

    local_step: int
    tokens: int
    position: int
    global_step: int


class UnsentWork(NamedTuple):
    """What makes a checkpoint a snapshot.

    Attributes:
        stated: what the snapshot states of each fragment's unsent work.
        values: the values of that work, which nobody else uses, a tree of arrays.
        loss: returns the mean training loss of its steps; waits if it is still computing.
    """

    stated: tuple[Unsent, ...]
    values: Any
    loss: Callable[[], float]


class Restored(NamedTuple):
    """The state in a checkpoint, and the steps and tokens at which the counters resume."""

    state: Any
    local_step: int
    tokens: int


def open_folder(
    context: Context, section: LearnerSection, part: str = ""
) -> CheckpointFolder | None:
    """Returns this host's folder of checkpoints; None if the learner keeps none.

    Args:
        context: the learner's context.
        section: the learner's section, which says where and how many to keep.
        part: the name of this host's part of each checkpoint (`names.checkpoint_part`); "": the
            learner has one host.
    """
    if section.checkpoint_dir is None:
        return None
    path = Path(section.checkpoint_dir) / context.run / context.learner
    if not part:
        return Folder(path, section.checkpoint_keep)
    return PartFolder(path / part, section.checkpoint_keep)


# --- Saving

# Seconds for which an update's announcement waits for a snapshot.
COVERED_S = 20.0


class Coverage:
    """The steps that stored snapshots cover, for updates that wait to be announced.

    An update is announced once a snapshot of its boundary, or of a later one, is stored, so that
    the next life knows what was sent. After `COVERED_S` seconds, or while snapshots fail, it is
    announced without: the next life then goes on with nothing of this one.
    """

    def __init__(self, context: Context) -> None:
        self._logger = context.logger
        self._steps = 0
        self._fail = self._released = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    def stored(self, local_step: int) -> None:
        """Notes that a snapshot at `local_step` is stored; from any thread."""
        self._steps, self._fail = max(self._steps, local_step), False
        self._wake()

    def failed(self) -> None:
        """Notes that a checkpoint could not be stored; from any thread."""
        self._fail = True
        self._wake()

    def release(self) -> None:
        """Ends all waiting: the run has stopped, and no further snapshot is made."""
        if not self._released:
            self._released = True
            self._wake()

    async def cover(self, local_step: int) -> None:
        """Waits until a snapshot with more steps than `local_step` is stored."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COVERED_S):
                while self._steps <= local_step and not (self._fail or self._released):
                    news = self._news
                    await news.wait()
        if self._steps <= local_step and not self._released:
            self._logger.warning("announced_uncovered", local_step=local_step)

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Saver:
    """Makes a learner's checkpoints, on a thread of its own.

    Args:
        context: the learner's context.
        section: says how often to make a checkpoint, and whether to upload it.
        folder: the folder on this machine's disk.
        incarnation: the sequence of the learner's join in the stream.
        part: the name of this host's part of each checkpoint, if the learner has several hosts;
            each host saves the arrays on its devices. "": the learner has one host.
        made: is called with the local step of each checkpoint that is made, or could not be.
        others_made: returns whether the learner's other hosts are done with the checkpoint at a
            local step. So no host, however slow, is asked for two at once.
    """

    def __init__(
        self,
        context: Context,
        section: LearnerSection,
        folder: CheckpointFolder,
        incarnation: int,
        part: str = "",
        *,
        made: Callable[[int], None] = lambda _step: None,
        others_made: Callable[[int], bool] = lambda _step: True,
    ) -> None:
        self._context = context
        self._section = section
        self._folder = folder
        self._incarnation = incarnation
        self._part = part
        self._key = key_of(section)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._made, self._others_made = made, others_made
        self._running: Future[None] | None = None
        self._newest_step = self._turn = 0
        self._made_s = self._uploaded_s = time.monotonic()
        self._coverage = Coverage(context)

    def due(self) -> bool:
        """True if the last checkpoint is old enough for the next, and none is being made."""
        waited_s = time.monotonic() - self._made_s
        return waited_s >= self._section.checkpoint_interval_s and self.idle()

    def idle(self) -> bool:
        """True if no checkpoint is being made, on no host of the learner."""
        if self._running is None:
            return True
        return self._running.done() and self._others_made(self._newest_step)

    async def cover(self, local_step: int) -> None:
        """Waits until a snapshot with more steps than `local_step` is stored (`Coverage`)."""
        if self._section.snapshot_steps:
            await self._coverage.cover(local_step)

    def release(self) -> None:
        """Ends the waiting of updates for snapshots, of which no more is made."""
        self._coverage.release()

    def save(
        self,
        state: Any,
        progress: TrainingProgress,
        unsent: UnsentWork | None = None,
    ) -> None:
        """Copies the state on the devices, and returns; the thread then makes the checkpoint.

        A failure is logged, and ends nothing.

        Args:
            state: the contents of the checkpoint, a tree of arrays.
            progress: the learner's counters.
            unsent: the unsent work, if a snapshot is to be made.
        """
        self._newest_step = progress.local_step
        began_s = self._made_s = time.monotonic()
        copies = checkpoints.copied(state)
        if self._part:
            copies = checkpoints.local_part(copies)
        if unsent is not None:
            copies = copies, checkpoints.local_part(unsent.values)
        stall_s = time.monotonic() - began_s
        self._running = self._worker.submit(self._make, copies, progress, unsent, stall_s)

    def close(self) -> None:
        """Waits for the checkpoint that is being made, if there is one, and ends the thread."""
        self._worker.shutdown()

    def _make(
        self, copies: Any, progress: TrainingProgress, unsent: UnsentWork | None, stall_s: float
    ) -> None:
        context, began_s = self._context, time.monotonic()
        try:
            arrays = checkpoints.on_host(copies)
            facts = Facts(
                run=context.run,
                learner=context.learner,
                layout=context.layout.digest,
                epoch=context.epoch,
                incarnation=self._incarnation,
                leaves=checkpoints.describe(copies, arrays),
                unsent=() if unsent is None else unsent.stated,
                loss=None if unsent is None else unsent.loss(),
                holds=context.holds,
                **progress._asdict(),
            )
            number = self._folder.write(HostCheckpoint(facts, arrays))
            if unsent is not None:
                self._coverage.stored(progress.local_step)
            context.logger.info(
                "checkpoint_saved",
                number=number,
                local_step=progress.local_step,
                size_bytes=sum(array.nbytes for array in arrays.values()),
                took_s=round(time.monotonic() - began_s, 4),
                stall_s=round(stall_s, 6),
            )
            if self._uploads(snapshot=unsent is not None):
                self._upload(checkpoints.state_in(HostCheckpoint(facts, arrays)))
            context.metrics.set(metrics.CHECKPOINTED_AT, context.runtime.clock())
            context.health.troubles.pop("checkpoint", None)
        except Exception as error:  # noqa: BLE001 - training goes on without this checkpoint
            context.logger.warning(
                "checkpoint_failed", local_step=progress.local_step, why=str(error)
            )
            context.metrics.add(metrics.CHECKPOINT_FAILURES)
            self._coverage.failed()
            context.health.troubles["checkpoint"] = f"checkpoints fail: {error}"
        self._made(progress.local_step)

    def _uploads(self, *, snapshot: bool) -> bool:
        """True if a checkpoint is to be uploaded; of snapshots, one in an interval at most."""
        now_s = time.monotonic()
        early = snapshot and now_s - self._uploaded_s < self._section.checkpoint_interval_s
        if not self._section.checkpoint_upload or early:
            return False
        self._uploaded_s = now_s
        # Counted and not timed: all hosts upload their parts of the same checkpoints.
        turn, self._turn = self._turn, self._turn + 1
        return turn % self._section.checkpoint_upload_every == 0

    def _upload(self, checkpoint: HostCheckpoint) -> None:
        """Uploads a checkpoint, and deletes all but the newest of this learner's uploads.

        Uploads with more steps are deleted too: an earlier process made them, and this one did not
        resume from them.
        """
        context, local_step = self._context, checkpoint.facts.local_step
        data = checkpoints.pack(checkpoint)
        if self._key is not None:
            about = encryption.about(context.run, context.learner, local_step, self._part)
            data = encryption.seal(self._key, data, about)
        name = names.learner_checkpoint(
            context.run, context.learner, local_step, shards.digest(data), self._part
        )
        context.store.put(name, data)
        context.traffic.bytes_up += len(data)
        context.logger.info("checkpoint_uploaded", name=name, size_bytes=len(data))
        others = [
            one
            for one in checkpoints.stored(context.store, context.run, context.learner, self._part)
            if one.name != name
        ]
        before = [one for one in others if one.local_step <= local_step]
        kept = before[: self._section.checkpoint_keep - 1]
        for one in others:
            if one not in kept:
                context.store.delete(one.name)


def key_of(section: LearnerSection) -> bytes | None:
    """Returns the key of uploaded checkpoints, uint8 [32]; None: they are not encrypted.

    Raises:
        ConfigError: the key's file cannot be read, or is no key.
    """
    return None if section.checkpoint_key is None else encryption.read_key(section.checkpoint_key)


# --- Searching


class ReadablePart(NamedTuple):
    """A host's part of a checkpoint, which is read and checked.

    Attributes:
        where: "folder" or "store".
        restore: puts the state on the devices; all hosts of the learner must call it.
    """

    where: str
    restore: Callable[[], Restored]


def readable_parts(
    context: Context,
    section: LearnerSection,
    folder: CheckpointFolder | None,
    like: Any,
    shardings: Any,
    fetch: PatientFetch,
    part: str,
) -> dict[CheckpointId, ReadablePart]:
    """Returns the checkpoints of which this host can read its part, in a learner of several hosts.

    A learner resumes from a checkpoint of which every host has its part. Each host has its parts on
    its own disk, and in the store if checkpoints are uploaded, for a machine whose disk is empty
    after a restart. The store is not read for checkpoints that are on the disk. If the mesh or the
    slice has changed, no part fits, and the inner optimizer begins fresh.

    Args:
        context: the learner's context.
        section: the learner's section of the configuration.
        folder: this host's folder; None: the learner keeps no checkpoints.
        like: shapes of the whole state, a tree.
        shardings: shardings of the state's leaves.
        fetch: reads the store, and retries transient faults.
        part: the name of this host's part.

    Returns:
        The parts, by (incarnation, local step) of their checkpoint.
    """
    if folder is None:
        return {}
    shapes = checkpoints.local_shapes(like, shardings)
    search = _Search(context, section, folder, shapes, fetch, checkpoints.part_of, part)

    def restored(facts: Facts, arrays: Any) -> Restored:
        state = checkpoints.of_local_part(like, shardings, arrays)
        return Restored(state, facts.local_step, facts.tokens)

    found: dict[CheckpointId, ReadablePart] = {}
    for source in (search.of_folder(), search.uploaded(lambda: {step for _, step in found})):
        for candidate, facts, arrays in _healthy(context, source):
            number = (facts.incarnation, facts.local_step)
            found[number] = ReadablePart(candidate.where, partial(restored, facts, arrays))
    return found


class ReadableSnapshot(NamedTuple):
    """A snapshot of this learner, of which this host's part of the unsent work is read and checked.

    Attributes:
        facts: what the snapshot states.
        values: puts the work on the devices; all hosts of the learner must call it.
    """

    facts: Facts
    values: Callable[[], Any]


def readable_snapshots(
    context: Context, section: LearnerSection, folder: CheckpointFolder, shapes: Any
) -> dict[CheckpointId, ReadableSnapshot]:
    """Returns the snapshots in this host's folder whose unsent work it can read.

    Args:
        context: the learner's context.
        section: the learner's section of the configuration.
        folder: this host's folder.
        shapes: the shapes of the unsent work's values, with their shardings, a tree.

    Returns:
        The snapshots, by (incarnation, local step).
    """
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    like = checkpoints.local_shapes(shapes, shardings)
    search = _Search(
        context, section, folder, like, _at_once, checkpoints.part_of, choose=checkpoints.unsent_in
    )

    def values(part: Any) -> Any:
        return checkpoints.of_local_part(shapes, shardings, part)

    found: dict[CheckpointId, ReadableSnapshot] = {}
    for _, facts, part in _healthy(context, search.of_folder()):
        found[facts.incarnation, facts.local_step] = ReadableSnapshot(facts, partial(values, part))
    return found


def _at_once(what: str, function: Callable[[], T]) -> T:
    """Calls a function that reads this machine's disk."""
    del what
    return function()


def _skip(context: Context, where: str, name: str, error: DilocoError) -> None:
    context.logger.warning("checkpoint_skipped", where=where, name=name, why=error.message)


class _Candidate(NamedTuple):
    where: str
    name: str
    read: Read


def restore(
    context: Context,
    section: LearnerSection,
    folder: CheckpointFolder | None,
    like: Any,
    fetch: PatientFetch,
) -> Restored | None:
    """Returns the newest readable checkpoint of a learner of one host; None if there is none.

    Searches this machine's disk, then this learner's uploads, then with `learner.warm_start` other
    learners' uploads. Of another learner's checkpoint only the state is used: steps and tokens are
    0. If this learner held other modules, leaves that the checkpoint lacks are shapes.

    Args:
        context: the learner's context.
        section: the learner's section of the configuration.
        folder: the folder on this machine's disk; None: the learner keeps no checkpoints.
        like: shapes of the state, a tree.
        fetch: reads the store, and retries transient faults.
    """
    search = _Search(context, section, folder, like, fetch, checkpoints.rebuild, some=True)
    for candidate, facts, state in _healthy(context, search.candidates()):
        context.logger.info(
            "checkpoint_restored",
            where=candidate.where,
            name=candidate.name,
            of=facts.learner,
            local_step=facts.local_step,
            global_step=facts.global_step,
        )
        own = facts.learner == context.learner
        return Restored(state, facts.local_step if own else 0, facts.tokens if own else 0)
    return None


def _healthy(
    context: Context, candidates: Iterator[_Candidate]
) -> Iterator[tuple[_Candidate, Facts, Any]]:
    """Yields (candidate, facts, state) for candidates that can be read; logs and skips others.

    A candidate is read only when the iterator comes to it.
    """
    for candidate in candidates:
        try:
            facts, state = candidate.read()
        except NoSnapshotError:
            continue
        except DilocoError as error:
            _skip(context, candidate.where, candidate.name, error)
            continue
        yield candidate, facts, state


def unsealed(
    run: str, stored: CheckpointObject, data: bytes, key: bytes | None, part: str = ""
) -> HostCheckpoint:
    """Returns the checkpoint in the bytes of an uploaded object; its facts are not checked.

    Args:
        run: the run's name.
        stored: the object.
        data: its bytes.
        key: the key of uploaded checkpoints, uint8 [32]; None: they are not encrypted.
        part: the name of the host's part; "": the learner has one host.

    Raises:
        CheckpointError: the bytes are not those that were uploaded, or the key does not open them.
    """
    if shards.digest(data) != stored.digest:
        raise CheckpointError(f"its bytes have digest {shards.digest(data)}")
    about = encryption.about(run, stored.learner, stored.local_step, part)
    return checkpoints.unpack(encryption.opened(key, data, about))


class _Search(NamedTuple):
    """A search for checkpoints on the disk and in the store.

    Attributes:
        build: (shapes, checkpoint) -> the state, or one host's part of the state.
        part: the name of this host's part; "": the learner has one host.
        choose: what to take of a checkpoint: the state, or a snapshot's unsent work.
        some: also what there is of the state in checkpoints of this learner with other modules.
    """

    context: Context
    section: LearnerSection
    folder: CheckpointFolder | None
    like: Any
    fetch: PatientFetch
    build: Callable[[Any, HostCheckpoint], Any]
    part: str = ""
    choose: Callable[[HostCheckpoint], HostCheckpoint] = checkpoints.state_in
    some: bool = False

    def candidates(self) -> Iterator[_Candidate]:
        own = self.context.learner
        if self.folder is not None:
            yield from self.of_folder()
            yield from self._in_store("store", own)
        if self.section.warm_start:
            yield from self._in_store("warm_start", None)

    def of_folder(self) -> Iterator[_Candidate]:
        assert self.folder is not None
        for number in self.folder.numbers():
            yield _Candidate("folder", str(number), partial(self._read_folder, number))

    def uploaded(self, besides: Callable[[], Container[int]]) -> Iterator[_Candidate]:
        """Yields this host's uploads; leaves out those whose local step is in `besides()`."""
        if self.section.checkpoint_upload:
            yield from self._in_store("store", self.context.learner, besides)

    def _in_store(
        self, where: str, learner: str | None, besides: Callable[[], Container[int]] = tuple
    ) -> Iterator[_Candidate]:
        context = self.context
        try:
            found = self.fetch(
                "listing checkpoints",
                lambda: checkpoints.stored(context.store, context.run, learner, self.part),
            )
        except DilocoError as error:
            _skip(context, where, "*", error)
            return
        for one in found:
            if one.local_step in besides():
                continue
            if (learner is None) == (one.learner != context.learner):
                yield _Candidate(where, one.name, partial(self._read_stored, one))

    def _read_folder(self, number: int) -> tuple[Facts, Any]:
        assert self.folder is not None
        facts = self.folder.facts(number)
        arrays = self.folder.arrays(number, facts)
        checkpoint = self.choose(HostCheckpoint(facts, arrays))
        return checkpoint.facts, self._built(checkpoint, self.context.learner)

    def _read_stored(self, stored: CheckpointObject) -> tuple[Facts, Any]:
        context = self.context
        largest = encryption.sealed_bytes(checkpoints.largest_object(self.like))
        if self.some and stored.learner == context.learner:  # It may have held all modules.
            held = sum(one.size for one in context.layout.held(context.holds))
            largest *= math.ceil(sum(one.size for one in context.layout.fragments) / held)
        if stored.size_bytes > largest:
            raise CheckpointError(f"{stored.size_bytes} bytes, more than {largest}")
        data = self.fetch("reading a checkpoint", lambda: context.store.get(stored.name))
        context.traffic.bytes_down += len(data)
        checkpoint = unsealed(context.run, stored, data, key_of(self.section), self.part)
        return checkpoint.facts, self._built(checkpoint, stored.learner)

    def _built(self, checkpoint: HostCheckpoint, learner: str) -> Any:
        context, facts = self.context, checkpoint.facts
        own = self.some and learner == context.learner
        others = own and facts.holds != context.holds
        checkpoints.check_facts(
            facts,
            None if others else self.like,
            run=context.run,
            layout=context.layout.digest,
            learner=learner,
        )
        build = checkpoints.rebuild_some if others else self.build
        return build(self.like, checkpoint)

"""Saves, uploads, finds and restores checkpoints of a learner's inner optimizer.

Saving costs the training thread a copy on the device. A worker thread does the rest, and meanwhile
no other checkpoint is begun. A checkpoint is searched from near to far: on this machine's disk,
among this learner's uploads, and, for a warm start, among other learners' uploads.
"""

import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from diloco.common.process import metrics
from diloco.common.process.config import LearnerSection
from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import CheckpointError, DilocoError
from diloco.learner.background import Context
from diloco.learner.tensors import checkpoint as checkpoints
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
    """Calls a function that reads the store, and repeats the call on a transient fault."""

    def __call__(self, what: str, function: Callable[[], T]) -> T:
        """Calls `function` and returns its result; the log names `what`."""


class TrainingProgress(NamedTuple):
    """A learner's progress: `position` in batches of its data, `global_step` of the run."""

    local_step: int
    tokens: int
    position: int
    global_step: int


class Restored(NamedTuple):
    """The inner optimizer's state, and the values at which this learner's counters resume."""

    state: Any
    local_step: int
    tokens: int


def open_folder(
    context: Context, section: LearnerSection, host: int = 0, hosts: int = 1
) -> CheckpointFolder | None:
    """Returns this learner's folder of checkpoints, or None if it keeps none; one for each host."""
    if section.checkpoint_dir is None:
        return None
    path = Path(section.checkpoint_dir) / context.run / context.learner
    if hosts == 1:
        return Folder(path, section.checkpoint_keep)
    return PartFolder(path / names.checkpoint_part(host, hosts), section.checkpoint_keep)


# --- Saving


class Saver:
    """Makes the checkpoints of one life of a learner.

    Args:
        context: the learner's context.
        section: how often to make a checkpoint, and whether to upload it.
        folder: where the checkpoints are kept.
        incarnation: the life.
        part: this host's part, if the learner has several hosts: each saves its devices' arrays.
    """

    def __init__(
        self,
        context: Context,
        section: LearnerSection,
        folder: CheckpointFolder,
        incarnation: int,
        part: str = "",
    ) -> None:
        self._context = context
        self._section = section
        self._folder = folder
        self._incarnation = incarnation
        self._part = part
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._made_s = time.monotonic()

    def due(self) -> bool:
        """True if it is time for a checkpoint, and none is being made."""
        waited_s = time.monotonic() - self._made_s
        idle = self._running is None or self._running.done()
        return waited_s >= self._section.checkpoint_interval_s and idle

    def save(self, state: Any, progress: TrainingProgress) -> None:
        """Begins to make a checkpoint, after the one that is being made."""
        self._made_s = time.monotonic()
        copies = checkpoints.copied(state)
        if self._part:
            copies = checkpoints.local_part(copies)
        stall_s = time.monotonic() - self._made_s
        self._running = self._worker.submit(self._make, copies, progress, stall_s)

    def close(self) -> None:
        """Waits for the checkpoint that is being made."""
        self._worker.shutdown()

    def _make(self, copies: Any, progress: TrainingProgress, stall_s: float) -> None:
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
                **progress._asdict(),
            )
            number = self._folder.write(HostCheckpoint(facts, arrays))
            context.logger.info(
                "checkpoint_saved",
                number=number,
                local_step=progress.local_step,
                size_bytes=sum(array.nbytes for array in arrays.values()),
                took_s=round(time.monotonic() - began_s, 4),
                stall_s=round(stall_s, 6),
            )
            if self._section.checkpoint_upload:
                self._upload(HostCheckpoint(facts, arrays))
            context.metrics.set(metrics.CHECKPOINTED_AT, context.runtime.clock())
            context.health.troubles.pop("checkpoint", None)
        except Exception as error:  # noqa: BLE001 - training goes on without this checkpoint
            context.logger.warning(
                "checkpoint_failed", local_step=progress.local_step, why=str(error)
            )
            context.metrics.add(metrics.CHECKPOINT_FAILURES)
            context.health.troubles["checkpoint"] = f"checkpoints fail: {error}"

    def _upload(self, checkpoint: HostCheckpoint) -> None:
        """Puts a checkpoint into the store, and deletes this learner's older ones beyond a few.

        Checkpoints with more steps are deleted too: this life did not resume from them.
        """
        context, local_step = self._context, checkpoint.facts.local_step
        data = checkpoints.pack(checkpoint)
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


# --- Looking

# Incarnation and local step, which the hosts' parts of one checkpoint have in common.
CheckpointId = tuple[int, int]


class ReadablePart(NamedTuple):
    """A host's part of a checkpoint, read and checked; `restore` brings it to the devices."""

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
    """Returns this host's parts of a learner's checkpoints, read and checked.

    Each host of the learner has its part on its own disk, and in the store if checkpoints are
    uploaded, for a machine that returns with an empty disk; a learner resumes from a checkpoint of
    which all hosts have their parts. The store is not read for checkpoints that the disk has. A
    learner that returns on a slice of another shape has none: its inner optimizer begins fresh.

    Args:
        context: the learner's context.
        section: the learner's section of the configuration.
        folder: this host's folder.
        like: shapes of the whole state.
        shardings: shardings of the state's leaves.
        fetch: reads the store, and retries transient faults.
        part: this host's part, as in names of objects.
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
    """Returns the newest healthy checkpoint, from the nearest place that has one; None if none has.

    Args:
        context: the learner's context.
        section: the learner's section: where to search.
        folder: the learner's checkpoints on disk, if it keeps any.
        like: shapes of the optimizer's state.
        fetch: reads the store, and retries transient faults.
    """
    search = _Search(context, section, folder, like, fetch, checkpoints.rebuild)
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
    """Yields the candidates that can be read, each read when it is requested."""
    for candidate in candidates:
        try:
            facts, state = candidate.read()
        except DilocoError as error:
            _skip(context, candidate.where, candidate.name, error)
            continue
        yield candidate, facts, state


class _Search(NamedTuple):
    """A search for a checkpoint, from near to far; `build` makes a state from a checkpoint."""

    context: Context
    section: LearnerSection
    folder: CheckpointFolder | None
    like: Any
    fetch: PatientFetch
    build: Callable[[Any, HostCheckpoint], Any]
    part: str = ""

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
        """Yields this host's parts in the store, except those of step numbers in `besides()`."""
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
        self._check(facts, self.context.learner)
        arrays = self.folder.arrays(number, facts)
        return facts, self.build(self.like, HostCheckpoint(facts, arrays))

    def _read_stored(self, stored: CheckpointObject) -> tuple[Facts, Any]:
        largest = checkpoints.largest_object(self.like)
        if stored.size_bytes > largest:
            raise CheckpointError(f"{stored.size_bytes} bytes, more than {largest}")
        data = self.fetch("reading a checkpoint", lambda: self.context.store.get(stored.name))
        if shards.digest(data) != stored.digest:
            raise CheckpointError(f"its bytes have digest {shards.digest(data)}")
        self.context.traffic.bytes_down += len(data)
        checkpoint = checkpoints.unpack(data)
        self._check(checkpoint.facts, stored.learner)
        return checkpoint.facts, self.build(self.like, checkpoint)

    def _check(self, facts: Facts, learner: str) -> None:
        context = self.context
        checkpoints.check_facts(
            facts, self.like, run=context.run, layout=context.layout.digest, learner=learner
        )

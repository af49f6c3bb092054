"""Checks that a tape and its store are whole: finds losses that garbage collection cannot explain.

Garbage collection first trims the tape, and then deletes objects. So it never removes

- an object that a record names, if the tape has an older record of the same fragment;
- a message that was stored after the oldest record of every fragment.

Anything else that is missing was deleted by hand, or lost with a disk. Objects of versions beyond
the tape's end mean that the tape was cut there. These functions read neither bus nor store.
"""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from diloco.aggregator.core.garbage import Ledger, newer_than_tape
from diloco.common.protocol import names, wire
from diloco.judge.audit import ObjectsReport
from diloco.run.history import History
from diloco.run.state import Finding

DEBUG_WITH_REPLAY = "runbooks/debug-with-replay.md"
KEEP = (
    "stop the aggregators and copy tape and store before anything else; `diloco replay` says what "
    "is left"
)


class Hole(NamedTuple):
    """A gap in a tape: the first and the last stream sequence of the messages that are missing."""

    first_seq: int
    last_seq: int

    @property
    def messages(self) -> int:
        """The number of missing messages."""
        return self.last_seq - self.first_seq + 1


def holes(history: History) -> list[Hole]:
    """Returns the gaps in the tape that garbage collection does not explain."""
    oldest = [chain[0][0] for chain in history.records.values() if chain]
    kept_from = max(oldest, default=0)
    seqs = (seq for seq in history.times_s if seq >= kept_from)
    return [
        Hole(before + 1, after - 1)
        for before, after in itertools.pairwise(seqs)
        if after > before + 1
    ]


def missing_objects(history: History, there: Container[str]) -> dict[str, int]:
    """Finds the missing objects that garbage collection would not have removed.

    Args:
        history: the tape.
        there: the names of the objects in the store.

    Returns:
        For each missing object's name the stream sequence of the first record that names it.
    """
    found: dict[str, int] = {}
    for chain in history.records.values():
        for index, (seq, record) in enumerate(chain):
            for ref in _needed_for(record, oldest=index == 0):
                if ref.name not in there:
                    found.setdefault(ref.name, seq)
    return found


def _needed_for(record: wire.Record, *, oldest: bool) -> Iterator[wire.ObjectRef | wire.Shard]:
    yield from (record.snapshot, record.outer)
    # A replay begins with the oldest record, whose inputs may be collected.
    if oldest:
        return
    if record.delta is not None and record.what == "version":
        yield record.delta
    for taken in record.inputs:
        yield from taken.shards


def newer_objects(history: History, listed: Iterable[str]) -> Iterator[str]:
    """Yields the names of objects of versions and checkpoints beyond the tape's end.

    Args:
        history: the tape; read after the store was listed, or once the run has ended.
        listed: names of the run's objects.
    """
    newest: dict[int, LastRecord | None] = dict.fromkeys(range(len(history.layout.fragments)))
    for fragment, chain in history.records.items():
        for seq, record in chain[-1:]:
            newest[fragment] = LastRecord(seq, record, history.times_s[seq])
    epoch = history.specification.epoch
    yield from newer_than(history.run, epoch, newest, [*listed], history.last_seq)


def under_way(history: History, listed: Iterable[str]) -> Iterator[str]:
    """Yields the names of listed objects of each fragment's next version, which may be being made.

    An aggregator stores them before it commits the record. It yields none of a run that has ended
    or was resumed on a new tape.
    """
    if history.end or history.specification.epoch:
        return
    newest = {fragment: chain[-1][1].version for fragment, chain in history.records.items()}
    for name in listed:
        for fragment, version in newest.items():
            made = names.parse_version_object(history.run, fragment, name)
            if made is not None and made.version == version + 1:
                yield name


class LastRecord(NamedTuple):
    """A fragment's newest record, its stream sequence, and when the server stored it."""

    seq: int
    record: wire.Record
    time_s: float


def newer_than(
    run: str,
    epoch: int,
    newest: Mapping[int, LastRecord | None],
    listed: Sequence[str],
    last_seq: int,
) -> Iterator[str]:
    """Yields the names of objects of versions and checkpoints beyond the end of a tape.

    Args:
        run: the run's name.
        epoch: the epoch of the tape.
        newest: by fragment, its newest record; None if it has none.
        listed: names of the run's objects.
        last_seq: the tape's last stream sequence.
    """
    found = [(name, 0) for name in listed]
    for fragment, last in newest.items():
        ledger = Ledger(run, fragment, epoch)
        if last is not None:
            ledger.take(last.record, last.seq, last.time_s, None)
        yield from newer_than_tape(ledger, found)
    prefix = names.checkpoint_prefix(run)
    for name, _ in found:
        of, _, seq_text = name.removeprefix(prefix).partition("-")
        if name.startswith(prefix) and of == f"{epoch:04d}" and int(seq_text) > last_seq:
            yield name


def wholeness(history: History, objects: ObjectsReport) -> Iterator[Finding]:
    """Yields findings on gaps in the tape, and on objects of versions beyond its end."""
    for hole in holes(history):
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"{hole.messages} messages are gone, {hole.first_seq} to {hole.last_seq}: no "
            "garbage collection takes messages from there",
            advice=KEEP,
            runbook=DEBUG_WITH_REPLAY,
        )
    if objects.newer:
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"the tape ends before its objects: the store has {len(objects.newer):,} of "
            f"later versions, such as {next(iter(objects.newer))}",
            advice=f"the stream was cut, or an older copy restored; {KEEP}",
            runbook=DEBUG_WITH_REPLAY,
        )

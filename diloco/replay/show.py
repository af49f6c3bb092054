"""`diloco show`: prints one message, version, update or object of a run, and what belongs to it.

WHAT on the command line names it in one of several forms (see `HINT`), such as a line of a log.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from diloco.aggregator.arrays.fragment import make_grid
from diloco.aggregator.owner.download_and_verify import read_parts
from diloco.common.process.config import sync_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.codecs import decode_numpy
from diloco.common.protocol.errors import ConfigError, ObjectMissingError, WireError
from diloco.common.storage.tape import InvalidMessage, Unreadable
from diloco.replay.blame_learners import Effect
from diloco.run.agreement import tensor_ranges
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import say_plainly
from diloco.run.history import History, Sent, answered, identity, read_history, resolves

# Updates of a round are compared tensor by tensor if they have at most this many bytes.
MEMORY_BYTES = 512 << 20
OBSERVATIONS = 40
_VERSION = re.compile(r"(\d+)@(\d+)")
_UPDATE = re.compile(r"([A-Za-z0-9_-]+):(\d+)-(\d+)")
# Fields of a log line, in JSON or as text for people.
_SEQ_IN_LOG = re.compile(r"\brecord_seq\W{1,4}(\d+)")
_FRAGMENT_IN_LOG = re.compile(r"\bfragment\W{1,4}(\d+)")
_VERSION_IN_LOG = re.compile(r"\bversion\W{1,4}(\d+)")
HINT = (
    "give a sequence (57), FRAGMENT@VERSION (0@12), LEARNER:INCARNATION-SEQ (island-a:4-7), the "
    "name of an object, or a line of an aggregator's log in quotes"
)


@dataclass(frozen=True)
class Selection:
    """The messages, by stream sequence, or the update in each fragment, that a name stands for."""

    seqs: tuple[int, ...] = ()
    updates: tuple[Sent, ...] = ()


def run_show(target: str, what: str) -> None:
    """Prints the message, round, update or object that WHAT names.

    Raises:
        ConfigError: the run has nothing of that name.
        DilocoError: no such run; bus or store are unreachable.
    """
    for line in asyncio.run(_show(target, what)):
        say_plainly(line)


async def _show(target: str, what: str) -> list[str]:
    async with open_run(target, name="show", reads=True) as opened:
        history = await read_history(opened.context)
        return await asyncio.to_thread(lambda: [*tell(history, find(history, what))])


def find(history: History, what: str) -> Selection:
    """Finds what WHAT names.

    Raises:
        ConfigError: the run has nothing of that name.
    """
    if what.isdecimal():
        return _message(history, int(what))
    if version := _VERSION.fullmatch(what):
        return Selection((_record_seq(history, int(version[1]), int(version[2])),))
    if update := _UPDATE.fullmatch(what):
        return _update(history, update[1], int(update[2]), int(update[3]))
    if what.startswith(f"{history.run}/"):
        return _object(history, what)
    if seq := _SEQ_IN_LOG.search(what):
        return _message(history, int(seq[1]))
    fragment, version = _FRAGMENT_IN_LOG.search(what), _VERSION_IN_LOG.search(what)
    if fragment and version:
        return Selection((_record_seq(history, int(fragment[1]), int(version[1])),))
    if update := _UPDATE.search(what):
        return _update(history, update[1], int(update[2]), int(update[3]))
    raise ConfigError(f"{what!r} names nothing of run {history.run!r}", hint=HINT)


def _message(history: History, seq: int) -> Selection:
    if seq not in history.times_s:
        last = history.last_seq
        gone = "it was trimmed, or is gone" if seq <= last else f"the tape ends at {last}"
        raise ConfigError(f"the tape has no message {seq}: {gone}", hint=HINT)
    return Selection((seq,))


def _record_seq(history: History, fragment: int, version: int) -> int:
    chain = history.records.get(fragment, [])
    for seq, record in chain:
        if record.version == version and record.what != "verdict":
            return seq
    has = (
        f"which has {chain[0][1].version} to {chain[-1][1].version}" if chain else "which has none"
    )
    raise ConfigError(f"the tape has no version {version} of fragment {fragment}, {has}", hint=HINT)


def _update(history: History, learner: str, incarnation: int, seq: int) -> Selection:
    known = {*history.sent(), *history.merged(), *history.rejected()}
    found = [one for one in known if (one.learner, one.incarnation, one.seq) == (
        learner, incarnation, seq)]  # fmt: skip
    if not found:
        raise ConfigError(
            f"the tape has no update {learner}:{incarnation}-{seq}",
            hint=f"lives of {learner}: {history.lives(learner) or 'none'}",
        )
    return Selection(updates=tuple(sorted(found)))


def _object(history: History, name: str) -> Selection:
    shard = names.parse_shard(history.run, name)
    if shard is not None:
        return _update(history, shard.learner, shard.incarnation, shard.seq)
    for chain in history.records.values():
        for seq, record in chain:
            own = (record.delta, record.snapshot, record.outer)
            if name in {ref.name for ref in own if ref is not None}:
                return Selection((seq,))
    raise ConfigError(
        f"no record on the tape names the object {name!r}",
        hint="an attempt that failed stored the object, or its record was trimmed",
    )


# Telling


def tell(history: History, found: Selection) -> Iterator[str]:
    """Yields the lines to print for the selected messages."""
    for seq in found.seqs:
        record = record_at(history, seq)
        if record is not None:
            yield from tell_record(history, seq, record)
        else:
            yield from _tell_message(history, seq)
    for update in found.updates:
        yield from tell_update(history, update)


def record_at(history: History, seq: int) -> wire.Record | None:
    """Returns the record at a stream sequence; None if the message there is no readable record."""
    for chain in history.records.values():
        for at, record in chain:
            if at == seq:
                return record
    return None


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def update_name(update: wire.Input | wire.Rejected | Sent | Effect) -> str:
    """Returns an update's name, LEARNER:INCARNATION-SEQ."""
    return f"{update.learner}:{update.incarnation}-{update.seq}"


def _tell_message(history: History, seq: int) -> Iterator[str]:
    at = _clock(history.times_s[seq])
    if (entry := history.entries.at(seq)) is not None:
        if isinstance(entry.body, wire.Manifest):
            yield from tell_update(history, identity(entry.body))
        else:
            yield f"message {seq}: {entry.body.kind}, stored {at}, on {entry.subject}"
            for field in type(entry.body).model_fields:
                yield f"  {field:<14} {str(getattr(entry.body, field))[:300]}"
        return
    unread: list[Unreadable | InvalidMessage] = [*history.unreadable, *history.garbage]
    for bad in unread:
        if bad.seq == seq:
            yield f"message {seq}: cannot be read, stored {at}, on {bad.subject}: {bad.why}"


def tell_record(history: History, seq: int, record: wire.Record) -> Iterator[str]:
    """Yields lines on a record and its round, in order of events."""
    began_s = record.opened_at_s

    def since(at_s: float) -> str:
        return f"{at_s - began_s:+.3f} s"

    yield (
        f"record {seq}: {record.what} {record.version} of fragment {record.fragment}, stored "
        f"{_clock(history.times_s[seq])}, by {record.aggregator} (release "
        f"{record.release}, packages {record.lock[:8]})"
    )
    yield (
        f"  builds on record {record.base_seq}; global step {record.global_step}; learning rate "
        f"{record.learning_rate:g}, {_momentum(history, record)}, settings "
        f"{record.policy.settings_seq or 'of the specification'}"
    )
    quorum = since(record.quorum_at_s) if record.quorum_at_s else "never"
    cuts = [one.seq for one in record.observations if one.what == "cut"]
    cut = f", cut at sequence {cuts[-1]}" if cuts else ""
    yield (
        f"  opened {_clock(began_s)}; quorum {quorum}; closed {since(record.closed_at_s)} for "
        f"{record.reason}{cut}; outer step {since(record.merged_at_s)}; stored "
        f"{since(history.times_s[seq])}"
    )
    yield f"  merged {len(record.inputs)}, in this order:"
    for taken in record.inputs:
        manifest = history.manifest_at(taken.stream_seq)
        yield f"    {_merged_line(history, taken, manifest, began_s)}"
    yield from _not_merged(history, seq, record)
    yield from _observed(record, began_s)
    yield from _by_tensor(history, record)
    yield from _objects(record)
    yield f"  in the log: committed ... fragment={record.fragment} record_seq={seq}"


def _momentum(history: History, record: wire.Record) -> str:
    """Returns the record's momentum as text; plain SGD has none, whatever `outer.momentum` is."""
    settings = history.settings_of(record)
    plain = settings is not None and settings.outer.optimizer == "sgd"
    return "no momentum (plain SGD)" if plain else f"momentum {record.momentum:g}"


def _merged_line(
    history: History, taken: wire.Input, manifest: wire.Manifest | None, began_s: float
) -> str:
    clip = f", shortened to {taken.clip:.3g} of it" if taken.clip < 1 else ""
    stale = f"staleness {taken.staleness}"
    if taken.staleness:
        stale += f" (counts {taken.discount:.3g})"
    said = ""
    if manifest is not None:
        announced_s = history.times_s[taken.stream_seq] - began_s
        said = (
            f"; announced {announced_s:+.3f} s, its step {manifest.local_step}, "
            f"{manifest.step_time_s:.3g} s a step, encoded {manifest.encode_s:.3g} s, uploaded "
            f"{manifest.upload_s:.3g} s"
        )
    return (
        f"{update_name(taken)} (message {taken.stream_seq}): weight {taken.weight:g}, {stale}, "
        f"norm {taken.norm:.4g}{clip}, loss {taken.loss:.4g}, {taken.steps} steps{said}"
    )


def _not_merged(history: History, seq: int, record: wire.Record) -> Iterator[str]:
    """Yields lines on updates that the record at `seq` rejects, or leaves without a verdict."""
    for refused in record.rejected:
        yield f"  refused {update_name(refused)} (message {refused.stream_seq}): {refused.reason}"
        yield f"    {refused.detail}"
    own = {answered(record, taken) for taken in resolves(record)}
    later: dict[Sent, int] = {}
    for answer_seq, other in history.records[record.fragment]:
        for taken in resolves(other):
            later[answered(other, taken)] = answer_seq
    for update, stream_seq in history.sent(record.fragment).items():
        waits = stream_seq < seq and update not in own
        if waits and (answer := later.get(update, seq + 1)) > seq:
            where = f"record {answer}" if update in later else "no record yet"
            yield f"  late {update_name(update)} (message {stream_seq}): answered by {where}"


def _observed(record: wire.Record, began_s: float) -> Iterator[str]:
    told = record.observations
    if told:
        yield f"  what its maker observed, {len(told)} in order:"
    for one in told[:OBSERVATIONS]:
        who = f" {one.learner}:{one.incarnation}" if one.learner else ""
        update = f"-{one.seq}" if one.learner and one.seq else ""
        value = f" ({one.value:.4g})" if one.value else ""
        yield f"    {one.at_s - began_s:+.3f} s {one.what}{who}{update}{value}"
    if len(told) > OBSERVATIONS:
        yield f"    ... and {len(told) - OBSERVATIONS} more"


def _by_tensor(history: History, record: wire.Record) -> Iterator[str]:
    """Yields lines with each update's norm by tensor, and its cosine to the sum of the others."""
    fragment = history.layout.fragments[record.fragment]
    if not record.inputs:
        return
    if 4 * fragment.size * (len(record.inputs) + 1) > MEMORY_BYTES:
        yield "  by tensor: not compared, the updates are too large for that"
        return
    try:
        updates = [*gradients(history, record)]
    except (ObjectMissingError, WireError) as error:
        yield f"  by tensor: not compared, {error.message}"
        return
    summed = np.sum(updates, axis=0)
    yield "  by tensor: norm, cosine to the sum of the others"
    for tensor, where in tensor_ranges(fragment):
        parts_of = [np.concatenate([u[a:b] for a, b in where]) for u in (*updates, summed)]
        cells = [
            f"{taken.learner} {np.linalg.norm(part):.3g} {_cosine(part, parts_of[-1] - part):+.2f}"
            for taken, part in zip(record.inputs, parts_of[:-1], strict=True)
        ]
        yield f"    {tensor}: {'; '.join(cells)}"


def gradients(history: History, record: wire.Record) -> Iterator[np.ndarray]:
    """Yields the outer gradients that a record merged, one after the other, float32 [N].

    Raises:
        ObjectMissingError, WireError: an update is missing or damaged.
    """
    settings = history.settings_at(record.policy.settings_seq)
    grid = make_grid(settings, history.layout, record.fragment)
    codec = sync_of(settings.sync, history.layout.fragments[record.fragment]).codec
    for taken in record.inputs:
        parts = read_parts(history.store, taken.codec, taken.shards, grid)
        yield np.concatenate([decode_numpy(codec, part, grid.block) for part in parts])


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0


def _objects(record: wire.Record) -> Iterator[str]:
    if record.delta is not None:
        yield f"  delta {record.delta.name} ({record.delta.size_bytes:,} bytes)"
    yield f"  snapshot of version {record.snapshot_version}: {record.snapshot.name}"
    yield f"  outer state of version {record.outer_version}: {record.outer.name}"


def tell_update(history: History, update: Sent) -> Iterator[str]:
    """Yields lines on an update, from its announcement to its verdict."""
    yield f"update {update_name(update)} of fragment {update.fragment}"
    for seq, manifest in history.announced(update.fragment):
        if identity(manifest) == update:
            yield (
                f"  announced by message {seq}, {_clock(history.times_s[seq])}, attempt "
                f"{manifest.attempt}: base version {manifest.base_version}, {manifest.tokens} "
                f"tokens in {manifest.steps} steps up to its step {manifest.local_step}, loss "
                f"{manifest.loss:.4g}, {manifest.step_time_s:.3g} s a step, encoded "
                f"{manifest.encode_s:.3g} s, uploaded {manifest.upload_s:.3g} s"
            )
            for shard in manifest.shards:
                yield f"  shard {shard.name} ({shard.size_bytes:,} bytes)"
    answer = "  no record answers it: it is in flight, or was never taken"
    for seq, record in history.records[update.fragment]:
        for taken in record.inputs:
            if answered(record, taken) == update:
                place = f"version {record.version} of fragment {record.fragment}, record {seq}"
                answer = f"  merged into {place}: {_merged_line(history, taken, None, 0.0)}"
        for refused in record.rejected:
            if answered(record, refused) == update:
                answer = f"  refused by record {seq}: {refused.reason}: {refused.detail}"
    yield answer

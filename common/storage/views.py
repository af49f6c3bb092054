"""Loads a view of a fragment from its stored snapshot and the deltas since the snapshot."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco.common.process.config import sync_of
from diloco.common.protocol import shards, wire
from diloco.common.protocol.codecs import Encoded, decode_numpy
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError
from diloco.common.storage.catchup import Change
from diloco.common.storage.tape import (
    Recorded,
    RecordedWord,
    RunContext,
    get_object,
    last_word,
    lost_for_good,
    records_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedView:
    """A view, and the objects from which it was made.

    Attributes:
        view: the view, float32 [N].
        read_bytes: size in bytes of all objects that were read.
        snapshot: the stored view that was read.
        deltas: the deltas that were added to the stored view, in order.
    """

    view: npt.NDArray[np.float32]
    read_bytes: int
    snapshot: wire.ObjectRef
    deltas: tuple[wire.ObjectRef, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(LoadedView):
    """The newest version of a fragment, loaded.

    Attributes:
        told: the word of the version's record.
    """

    told: RecordedWord

    @property
    def record(self) -> wire.RecordWord:
        """The word of the version's record."""
        return self.told.word

    @property
    def record_seq(self) -> int:
        """The record's stream sequence."""
        return self.told.record_seq


async def load_view(context: RunContext, fragment: int) -> Loaded:
    """Loads the newest view of a fragment, and verifies the view's digest.

    If the snapshot is damaged or gone, an older snapshot is used.

    Raises:
        IntegrityError: the stored objects do not give the recorded digest, or are gone.
    """
    told = await last_word(context, fragment)
    while True:
        word = told.word
        try:
            made = await _load(context, word, word.snapshot, word.deltas)
        except (ObjectMissingError, IntegrityError) as error:
            newest = await last_word(context, fragment)
            if newest.record_seq == told.record_seq:
                # The record is still the newest, so garbage collection did not remove its objects.
                made = await _load_from_older(context, word, told.record_seq, error)
            else:
                told = newest
                continue
        return Loaded(
            told=told,
            view=made.view,
            read_bytes=made.read_bytes,
            snapshot=made.snapshot,
            deltas=made.deltas,
        )


async def load_recorded(context: RunContext, record: wire.AnyRecord, record_seq: int) -> LoadedView:
    """Loads the version that a record on the tape committed, and verifies the view's digest.

    If the snapshot is damaged or gone, an older snapshot is used.

    Raises:
        IntegrityError: the stored objects do not give the recorded digest, or are gone.
    """
    try:
        return await _load(context, record, record.snapshot, record.deltas)
    except (ObjectMissingError, IntegrityError) as error:
        return await _load_from_older(context, record, record_seq, error)


async def load_version(context: RunContext, record: wire.AnyRecord) -> npt.NDArray[np.float32]:
    """Returns the view after any record, float32 [N], after verifying the view's digest.

    Raises:
        IntegrityError: the stored objects do not give the recorded digest.
        ObjectMissingError: garbage collection has removed an object.
    """
    return (await _load(context, record, record.snapshot, record.deltas)).view


async def _load(
    context: RunContext,
    record: wire.AnyRecord,
    snapshot: wire.ObjectRef,
    deltas: tuple[wire.ObjectRef, ...],
) -> LoadedView:
    view, read_bytes = await context.runtime.call(
        assemble_view, context, record.fragment, record.view_digest, snapshot, deltas
    )
    return LoadedView(view=view, read_bytes=read_bytes, snapshot=snapshot, deltas=deltas)


async def _load_from_older(
    context: RunContext,
    record: wire.AnyRecord,
    record_seq: int,
    error: ObjectMissingError | IntegrityError,
) -> LoadedView:
    """Loads `record`'s view from an older snapshot than the one that the record names.

    `error` is why the record's snapshot, or a delta, could not be read.

    Raises:
        IntegrityError: no older snapshot leads to the view.
    """
    older = await older_snapshot(context, record, record_seq)
    if older is not None:
        basis, since = older
        context.logger.warning(
            "snapshot_skipped",
            fragment=record.fragment,
            version=record.snapshot_version,
            instead=basis.record.version,
            why=error.message,
        )
        deltas = tuple(after.record.delta for after in since if after.record.delta is not None)
        with contextlib.suppress(ObjectMissingError, IntegrityError):
            return await _load(context, record, basis.record.snapshot, deltas)
    if isinstance(error, ObjectMissingError):
        what = f"version {record.version} of fragment {record.fragment}"
        raise lost_for_good(what, error) from error
    raise error


class Older(NamedTuple):
    """A version whose view and outer state were stored, and later versions.

    Attributes:
        basis: the version's record.
        since: the records of later versions, in order, up to the record that was asked for.
    """

    basis: Recorded
    since: list[Recorded]


async def older_snapshot(
    context: RunContext, record: wire.AnyRecord, record_seq: int
) -> Older | None:
    """Returns the newest stored version before `record.snapshot_version`, with the versions since.

    Every version between the stored version and `record` was made by a merge, so that deltas, or
    inputs, lead from one version to the next. Returns None if there is no such version, as right
    after a rollback, or after a record that cannot be read.

    Raises:
        NewTapeError: the run was resumed on a new tape.
    """
    found: list[Older] = []
    if not record.base_seq:
        return None  # The first record of an epoch, which may not be on the tape yet.
    async for item in records_of(context, record.fragment, unreadable=found.clear):
        if item.record_seq > record_seq:
            break
        if item.record.what == "verdict":
            continue
        if item.record.what != "version":
            found.clear()  # No chain of deltas leads across a rollback.
        for older in found:
            older.since.append(item)
        if item.record.snapshot_version == item.record.outer_version == item.record.version:
            found[:] = [*found[-1:], Older(item, [])]
    newest = [older for older in found if older.basis.record.version < record.snapshot_version]
    return newest[-1] if newest else None


def assemble_view(
    context: RunContext,
    fragment: int,
    view_digest: str,
    snapshot: wire.ObjectRef,
    deltas: Iterable[wire.ObjectRef],
) -> tuple[npt.NDArray[np.float32], int]:
    """Returns a view, float32 [N], and the number of bytes read for it.

    Args:
        context: the run's context.
        fragment: the fragment's index.
        view_digest: the digest that the view must have.
        snapshot: the stored view to begin with.
        deltas: the deltas to add, in order.

    Raises:
        ObjectMissingError: garbage collection has removed an object.
        IntegrityError: the objects do not give the digest.
    """
    data = get_object(context.store, snapshot)
    read_bytes = len(data)
    view = np.frombuffer(data, np.float32).copy()
    for delta in deltas:
        _add(context, fragment, view, _read_delta(context, fragment, view.size, delta))
        read_bytes += delta.size_bytes
    if shards.digest(view) != view_digest:
        raise IntegrityError(
            f"fragment {fragment}: the stored view {snapshot.name} and the deltas behind it "
            f"give digest {shards.digest(view)}, the record says {view_digest}",
            hint="runbooks/digest-mismatch.md",
        )
    return view, read_bytes


class ViewStep(NamedTuple):
    """The result of a change.

    Attributes:
        view: the view after the change, float32 [N].
        read_bytes: size in bytes of the objects that were read.
        encoded: scales and codes of the one delta that was added; None if the change began with a
            stored view.
    """

    view: npt.NDArray[np.float32]
    read_bytes: int
    encoded: Encoded | None


def take_step(context: RunContext, view: npt.NDArray[np.float32], change: Change) -> ViewStep:
    """Applies a change to a view, float32 [N], which stays unchanged; verifies the result's digest.

    Raises:
        ObjectMissingError: garbage collection has removed an object.
        IntegrityError, WireError: an object is damaged, or the result has another digest.
    """
    if change.snapshot is not None:
        objects = (change.snapshot, change.deltas)
        return ViewStep(
            *assemble_view(context, change.fragment, change.view_digest, *objects), None
        )
    (delta,) = change.deltas
    encoded, moved = _read_delta(context, change.fragment, view.size, delta), view.copy()
    _add(context, change.fragment, moved, encoded)
    if shards.digest(moved) != change.view_digest:
        raise IntegrityError(
            f"fragment {change.fragment}: {delta.name} gives digest {shards.digest(moved)}, the "
            f"record says {change.view_digest}",
            hint="runbooks/digest-mismatch.md",
        )
    return ViewStep(moved, delta.size_bytes, encoded)


def _read_delta(context: RunContext, fragment: int, size: int, delta: wire.ObjectRef) -> Encoded:
    data = get_object(context.store, delta)
    sync = sync_of(context.settings.sync, context.layout.fragments[fragment])
    return shards.unpack_delta(data, codec=sync.delta_codec, count=size, block=sync.block)


def _add(
    context: RunContext, fragment: int, view: npt.NDArray[np.float32], encoded: Encoded
) -> None:
    sync = sync_of(context.settings.sync, context.layout.fragments[fragment])
    view += decode_numpy(sync.delta_codec, encoded, sync.block)

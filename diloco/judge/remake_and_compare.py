"""Recomputes a run's versions from its objects, one fragment at a time, in order.

`FragmentRemaker` merges each version again from its recorded inputs and compares digests, bit for
bit, and on request also the stored delta, view and outer state. Garbage collection takes objects
that recovery no longer needs; remaking then begins at the oldest version whose view and outer state
still exist.

`merge_round` makes a version that the run did not make: with other inputs, or under other settings.
`objects.py` tells which objects must exist.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.updates import Admitted, UpdateCredit
from diloco.aggregator.owner.download_and_verify import read_input, read_payload
from diloco.common.process import cores
from diloco.common.process.config import RunSettings, sync_of
from diloco.common.protocol import shards, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import get_object
from diloco.judge.audit import Breach, ObjectsReport
from diloco.run.history import History

# A function that is called with the number of records done, and the number of all.
Progress = Callable[[int, int], None]


def remake(history: History, found: ObjectsReport, progress: Progress | None = None) -> None:
    """Reads every stored object, and recomputes every version; adds breaches to `found`.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    total = sum(len(chain) for chain in history.records.values())
    done = 0
    for fragment in sorted(history.records):
        remaker = FragmentRemaker(history, fragment)
        for seq, record in history.records[fragment]:
            try:
                remaker.take(seq, record)
            except IntegrityError as error:
                where = f"fragment {fragment}, record {seq}"
                found.breaches.append(Breach("digests", where, error.message))
            done += 1
            if progress is not None:
                progress(done, total)
        found.remade += remaker.remade


def is_stored(record: wire.Record) -> bool:
    """True if a record names a view and outer state of its own version."""
    return record.outer_version == record.version and record.what != "verdict"


class FragmentRemaker:
    """Recomputes the arrays of one fragment from record to record, from the first stored state on.

    Args:
        history: the tape.
        fragment: its index.
        compare: also read the stored objects of recomputed versions, and compare them.

    Attributes:
        arrays: the arrays after the last record; None if they are unavailable.
        missing: the missing object because of which the last version was not recomputed, or "".
        remade: number of versions that were merged again.
    """

    def __init__(self, history: History, fragment: int, *, compare: bool = True) -> None:
        self.arrays: FragmentArrays | None = None
        self.missing = ""
        self.remade = 0
        self._history = history
        self._compare = compare
        newest_seq, newest = history.records[fragment][-1]
        self._covered = newest.outer_seq or newest_seq
        self._was = ("", "")

    @property
    def view(self) -> Vector:
        """The view after the last record, float32 [elements].

        Raises:
            IntegrityError: it could not be recomputed.
        """
        if self.arrays is None:
            raise IntegrityError(f"the version cannot be recomputed: {self.missing}")
        return self.arrays.view

    def take(self, seq: int, record: wire.Record) -> None:
        """Advances the arrays to the next record, at stream sequence `seq`, and compares digests.

        Raises:
            IntegrityError: an object is damaged, or does not give the recorded digests; remaking
                restarts at the next stored state.
        """
        try:
            self._take(seq, record)
        except IntegrityError:
            self.arrays = None
            raise

    def _take(self, seq: int, record: wire.Record) -> None:
        self.missing = ""
        if record.base_digest not in ("", self._was[0]):
            # The record before is unreadable or missing, so the arrays cannot follow from it.
            self.arrays = None
        if record.what == "verdict":
            if self.arrays is not None:
                self._hold(record, "digests", (record.view_digest, record.outer_digest), self._was)
            return
        self._was = (record.view_digest, record.outer_digest)
        if record.what == "version" and self.arrays is not None and record.inputs:
            self._merge_again(self.arrays, seq, record)
        else:
            self.arrays = None
        if self.arrays is None and is_stored(record):
            self.load(seq, record)
        elif self.arrays is not None and is_stored(record) and self._compare:
            self._check_stored(record, self.arrays)

    def _merge_again(self, arrays: FragmentArrays, seq: int, record: wire.Record) -> None:
        try:
            delta = arrays.merge_again(
                record, partial(read_input, self._history.store, arrays.grid)
            )
        except IntegrityError as error:
            if not isinstance(error.__cause__, ObjectMissingError) or seq > self._covered:
                raise
            self.missing = error.__cause__.message
            self.arrays = None
            return
        if self._compare:
            self._check_delta(record, delta)
        self.remade += 1

    def load(self, seq: int, record: wire.Record) -> None:
        """Loads the arrays from a record's view and outer state; None if one was collected.

        Raises:
            IntegrityError: an object is damaged, or missing though needed.
        """
        try:
            self.arrays = load_arrays(self._history, record)
        except ObjectMissingError as error:
            if seq >= self._covered:
                raise IntegrityError(error.message) from error
            self.missing = self.missing or error.message

    def _check_delta(self, record: wire.Record, delta: Encoded) -> None:
        """Checks that the stored delta, which learners apply, is the one that was recomputed."""
        assert record.delta is not None
        history = self._history
        codec = sync_of(
            history.settings.sync, history.layout.fragments[record.fragment]
        ).delta_codec
        data = shards.pack_delta(codec, delta, self._history.layout.block)
        again = wire.ObjectRef(
            name=record.delta.name, size_bytes=len(data), crc32c=shards.crc32c(data)
        )
        self._hold(record, f"delta {record.delta.name!r}", record.delta, again)
        # If it was collected, `check_objects` tells whether that is allowed.
        with contextlib.suppress(ObjectMissingError):
            get_object(self._history.store, record.delta)

    def _check_stored(self, record: wire.Record, arrays: FragmentArrays) -> None:
        """Checks that the stored view and outer state are those that were recomputed."""
        for ref, data in (
            (record.snapshot, arrays.view_object()),
            (record.outer, arrays.outer_object()),
        ):
            try:
                same = get_object(self._history.store, ref) == data
            except ObjectMissingError:
                continue
            if not same:
                raise IntegrityError(f"object {ref.name!r} is not what recomputing it gives")

    def _hold(self, record: wire.Record, what: str, said: object, found: object) -> None:
        if said != found:
            raise IntegrityError(f"{record.what} {record.version}: {what}: {found}, not {said}")


def load_arrays(history: History, record: wire.Record) -> FragmentArrays:
    """Loads the arrays from a record's view and outer state, and checks their digests.

    Raises:
        IntegrityError, ObjectMissingError: an object is damaged, not the record's, or missing.
    """
    arrays = FragmentArrays.from_objects(
        history.settings,
        history.layout,
        record.fragment,
        view=get_object(history.store, record.snapshot),
        outer_state=get_object(history.store, record.outer),
        threads=cores.available(),
    )
    found = arrays.digests()
    if found != (said := (record.view_digest, record.outer_digest)):
        raise IntegrityError(
            f"version {record.version} of fragment {record.fragment} has the digests {found} as "
            f"it is stored, and its record says {said}"
        )
    return arrays


def copy_arrays(arrays: FragmentArrays) -> FragmentArrays:
    """Returns a copy of arrays that can be changed independently."""
    state = {name: slot.copy() for name, slot in arrays.state.items()}
    return replace(arrays, view=arrays.view.copy(), theta=arrays.theta.copy(), state=state)


def merge_round(
    store: ObjectStore,
    arrays: FragmentArrays,
    settings: RunSettings,
    admitted: Sequence[Admitted],
    share: float,
) -> None:
    """Advances `arrays` in place by a hypothetical round of the fragment.

    Args:
        store: has the updates' objects.
        arrays: the fragment's arrays.
        settings: the settings of the round.
        admitted: the updates to merge; if there are none, nothing changes.
        share: the factor of the outer learning rate, as for a real round.

    Raises:
        ObjectMissingError, WireError: an update is missing or damaged.
    """
    arrays.settings = settings
    for one in admitted:
        arrays.merge(read_payload(store, one.manifest, arrays.grid), one)
    if admitted:
        arrays.close_round(admitted, share)


def admitted_again(record: wire.Record, taken: wire.Input, settings: RunSettings) -> Admitted:
    """Returns a recorded input as its aggregator admitted it, with the discount of `settings`."""
    discount = formulas.discount(settings.staleness, taken.staleness)
    return Admitted(
        _manifest(record, taken),
        taken.stream_seq,
        UpdateCredit(taken.steps_credited, taken.tokens_credited, taken.weight),
        taken.staleness,
        discount,
        taken.clip,
        taken.norm,
        stored_at_s=taken.announced_at_s,
    )


def _manifest(record: wire.Record, taken: wire.Input) -> wire.Manifest:
    """Returns the manifest of a recorded input, made from its record, as the tape may lack it.

    Fields that no record has and no merge reads are 0.
    """
    return wire.Manifest(
        run=record.run,
        learner=taken.learner,
        epoch=record.epoch,
        incarnation=taken.incarnation,
        seq=taken.seq,
        fragment=record.fragment,
        base_version=max(0, record.version - 1 - taken.staleness),
        base_digest="0" * 32,
        layout=record.layout,
        codec=taken.codec,  # type: ignore[arg-type]
        shards=taken.shards,
        tokens=taken.tokens,
        steps=taken.steps,
        position=0,
        local_step=0,
        loss=taken.loss,
        step_time_s=0.0,
        encode_s=0.0,
        upload_s=0.0,
        attempt=0,
        final=taken.final,
    )

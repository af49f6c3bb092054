"""Makes a run's versions again from its objects: do these give the recorded digests?

Every object that is there is read, each version is merged again from its recorded inputs, and its
delta and stored states are compared, bit for bit. Garbage collection takes what recovery no longer
needs; remaking then begins at the oldest version whose view and outer state are still there.
`objects.py` has which objects are to be there.
"""

import contextlib
from collections.abc import Callable
from functools import partial

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.shard_reader import read_input
from diloco.check.audit import Breach, Objects
from diloco.common import cores, shards, wire
from diloco.common.averaged import sync_of
from diloco.common.codec import Encoded
from diloco.common.errors import IntegrityError, ObjectMissingError
from diloco.common.tape import get_object
from diloco.projections.history import History

# Called with how many of how many records are done.
Progress = Callable[[int, int], None]


def remake(history: History, found: Objects, progress: Progress | None = None) -> None:
    """Read every object that is there, and make every version again; breaches go to `found`.

    Raises:
        StoreUnavailableError: the store is away.
    """
    total = sum(len(chain) for chain in history.records.values())
    done = 0
    for fragment in sorted(history.records):
        remaker = Remaker(history, found, fragment)
        for seq, record in history.records[fragment]:
            try:
                remaker.take(seq, record)
            except IntegrityError as error:
                where = f"fragment {fragment}, record {seq}"
                found.breaches.append(Breach("digests", where, error.message))
                remaker.arrays = None
            done += 1
            if progress is not None:
                progress(done, total)


class Remaker:
    """Follows one fragment's records, with its arrays once they can be had.

    Attributes:
        missing: the object for want of which the last version could not be made again, or "".
    """

    def __init__(self, history: History, found: Objects, fragment: int) -> None:
        self.arrays: FragmentArrays | None = None
        self.missing = ""
        self._history = history
        self._found = found
        self._fragment = fragment
        chain = history.records[fragment]
        newest = chain[-1][1]
        self._newest_seq = chain[-1][0]
        self._covered = newest.outer_seq or self._newest_seq
        self._was = ("", "")

    def take(self, seq: int, record: wire.Record) -> None:
        """Bring the arrays to a record, and compare.

        Raises:
            IntegrityError: something is damaged, or does not give the recorded digests.
        """
        self.missing = ""
        if record.base_digest not in ("", self._was[0]):
            # The record before it cannot be read or is gone: it says nothing of this one.
            self.arrays = None
        if record.what == "verdict":
            if self.arrays is not None:
                self._hold(record, "digests", (record.view_digest, record.outer_digest), self._was)
            return
        if record.what == "version" and self.arrays is not None and record.inputs:
            self._merge_again(seq, record)
        else:
            self.arrays = None
        self._was = (record.view_digest, record.outer_digest)
        stored = record.outer_version == record.version
        if self.arrays is not None and stored:
            self._check_stored(record, self.arrays)
        elif self.arrays is None and stored:
            self._load(seq, record)

    def _merge_again(self, seq: int, record: wire.Record) -> None:
        assert self.arrays is not None
        try:
            delta = self.arrays.merge_again(
                record, partial(read_input, self._history.store, self.arrays.grid)
            )
        except IntegrityError as error:
            if not isinstance(error.__cause__, ObjectMissingError) or seq > self._covered:
                raise
            self.missing = error.__cause__.message
            self.arrays = None
        else:
            self._check_delta(record, delta)
            self._found.remade += 1

    def _load(self, seq: int, record: wire.Record) -> None:
        """Arrays from what a version has stored; they stay None if it was collected."""
        try:
            arrays = FragmentArrays.from_objects(
                self._history.settings,
                self._history.layout,
                self._fragment,
                view=get_object(self._history.store, record.snapshot),
                outer_state=get_object(self._history.store, record.outer),
                threads=cores.available(),
            )
        except ObjectMissingError as error:
            if seq >= self._covered:
                raise IntegrityError(error.message) from error
            self.missing = self.missing or error.message
            return
        found = arrays.digests()
        self._hold(record, "stored view and outer state", self._was, found)
        self.arrays = arrays

    def _check_delta(self, record: wire.Record, delta: Encoded) -> None:
        """The delta as stored, which learners apply, is the one that moved this view."""
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
        # Where it was collected, `check_objects` knows whether it may be.
        with contextlib.suppress(ObjectMissingError):
            get_object(self._history.store, record.delta)

    def _check_stored(self, record: wire.Record, arrays: FragmentArrays) -> None:
        """View and outer state as stored are those of the version."""
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

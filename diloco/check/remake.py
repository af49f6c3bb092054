"""Holds a run's objects against its records: are they there, whole, and do they give the digests?

Shallow: a listing tells whether what recovery needs is there, with the right sizes. Deep: every
object that is there is read, each version is merged again from its recorded inputs, and its delta
and stored states are compared, bit for bit. Garbage collection takes what recovery no longer
needs; remaking then begins at the oldest version whose view and outer state are still there.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.shard_reader import read_input
from diloco.check.audit import Breach, Objects
from diloco.check.evidence import missing_objects, newer_objects
from diloco.check.listing import Listing, list_now, may_be_newer
from diloco.common import cores, names, shards, wire
from diloco.common.averaged import sync_of
from diloco.common.codec import Encoded
from diloco.common.errors import IntegrityError, ObjectMissingError
from diloco.common.tape import get_object
from diloco.projections.history import History

# Called with how many of how many records are done.
Progress = Callable[[int, int], None]


def needed_now(history: History) -> Iterator[tuple[int, wire.ObjectRef | wire.Shard]]:
    """(record's sequence, object) of all that recovery and joining learners need."""
    for chain in history.records.values():
        newest_seq, newest = chain[-1]
        yield from ((newest_seq, ref) for ref in (newest.snapshot, newest.outer, *newest.deltas))
        covered = newest.outer_seq or newest_seq
        for seq, record in reversed(chain):
            if seq <= covered:
                break
            for taken in record.inputs:
                yield from ((seq, shard) for shard in taken.shards)


def named(record: wire.Record) -> Iterator[wire.ObjectRef | wire.Shard]:
    """Every object that a record names."""
    yield from (record.snapshot, record.outer, *record.deltas)
    if record.delta is not None:
        yield record.delta
    for taken in record.inputs:
        yield from taken.shards


def all_named(history: History) -> Iterator[wire.ObjectRef | wire.Shard]:
    """Every object that a record names, without those that the record before names as well."""
    for chain in history.records.values():
        before: set[str] = set()
        for _, record in chain:
            own = {ref.name: ref for ref in named(record)}
            yield from (ref for name, ref in own.items() if name not in before)
            before = {*own}


def check_objects(
    history: History, *, everything: bool = False, before: Listing | None = None
) -> Objects:
    """Compare a listing of the store with the tape.

    Args:
        history: the tape.
        before: objects that were there before the tape was read, where it goes on: those that it
            does not know of are newer. None: those of now.
        everything: want all that the tape names, as where nothing is ever collected.

    Raises:
        StoreError: the store cannot be listed.
    """
    found, run = Objects(), history.run
    wanted = {ref.name: (seq, ref) for seq, ref in needed_now(history)}
    found.needed = len(wanted)
    found.needed_bytes = sum(ref.size_bytes for _, ref in wanted.values())
    known = Listing((ref.name, ref.size_bytes) for ref in all_named(history))
    there = list_now(history.store, run, _unknown(history, known))
    if amiss := known.beside(there):
        _check_named(found, history, amiss, there, wanted, everything=everything)
    newer = {*newer_objects(history, (there if before is None else before).picked)}
    sizes = {name: there.size(name) for name in sorted(newer)}
    found.newer = {name: size for name, size in sizes.items() if size is not None}
    prefixes = tuple(names.fragment_prefix(run, f) for f in range(len(history.layout.fragments)))
    kept = tuple(_pinned(history))
    others = Listing((name, 0) for name in _other_names(history)) if there.picked else Listing()
    found.orphans = {
        name: there.size(name) or 0
        for name in there.picked
        if (name.startswith(prefixes) or "/update/" in name)
        and not (name in known or name in others or name in newer)
        and not name.startswith(kept)
    }
    return found


def _unknown(history: History, known: Listing) -> Callable[[str], bool]:
    """Whether no record names an object, or it may be newer than the tape."""
    newest = {
        fragment: chain[-1][1].version if chain else -1
        for fragment in range(len(history.layout.fragments))
        for chain in [history.records[fragment]]
    }
    newer = may_be_newer(history.run, newest, history.last_seq)
    return lambda name: name not in known or newer(name)


def _check_named(
    found: Objects,
    history: History,
    amiss: Listing,
    there: Listing,
    wanted: Mapping[str, tuple[int, wire.ObjectRef | wire.Shard]],
    *,
    everything: bool,
) -> None:
    """Objects that are gone though they are needed, or have another size."""
    standing = missing_objects(history, there)
    for name, ref in {r.name: r for r in all_named(history) if r.name in amiss}.items():
        seq = wanted[name][0] if name in wanted else 0
        where = f"record {seq}" if seq else "an older record"
        size = there.size(name)
        if size is not None:
            what = f"{name!r} has {size} bytes, not {ref.size_bytes}"
            found.breaches.append(Breach("objects", where, what))
            continue
        found.collected += 1
        if seq or everything:
            found.breaches.append(Breach("objects", where, f"no object {name!r}"))
        elif name in standing:
            where = f"record {standing[name]}"
            what = f"no object {name!r}, and no collection takes it while that record stands"
            found.breaches.append(Breach("objects", where, what))


def _other_names(history: History) -> Iterator[str]:
    """Objects that the tape names outside of records' own fields."""
    for _, manifest in history.manifests:
        yield from (shard.name for shard in manifest.shards)
    yield from history.bodies


def _pinned(history: History) -> set[str]:
    """How the names of all that checkpoints keep begin."""
    return {
        names.version_object(history.run, fragment, version, "", "").removesuffix("--")
        for _, checkpoint in history.checkpoints
        for fragment, version in enumerate(checkpoint.versions)
    }


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
        found = (shards.digest(arrays.view), arrays.outer_digest())
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
            (record.snapshot, arrays.view_bytes()),
            (record.outer, arrays.outer_bytes()),
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

"""Compares a listing of a run's store with its records: which objects exist, and with which size.

The functions tell the objects that recovering aggregators and joining learners need from those that
garbage collection may have removed. Only `check_bytes` reads contents; `remake_and_compare.py`
compares all contents with recomputed versions.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    IntegrityError,
    RunMismatchError,
    WireError,
)
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import RunContext, last_record
from diloco.judge.audit import Breach, ObjectsReport
from diloco.judge.evidence import missing_objects, newer_objects
from diloco.run.history import History
from diloco.run.newest_objects import BytesRead, newest_first


class Listing:
    """Sizes of objects, by a 63-bit hash of their names: 16 bytes for each object.

    Args:
        listed: names and sizes in bytes.
        picked: returns True for each name that is kept in full too.

    Attributes:
        picked: the names that were kept in full.
    """

    def __init__(
        self,
        listed: Iterable[tuple[str, int]] = (),
        picked: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._added = array("q")
        self._rows = np.empty((0, 2), np.int64)
        self.picked: list[str] = []
        for name, size_bytes in listed:
            self.add(name, size_bytes)
            if picked(name):
                self.picked.append(name)

    def add(self, name: str, size_bytes: int = 0) -> None:
        """Adds an object, or replaces the size of the one with this name."""
        self._added.extend((_hash(name), size_bytes))

    def _table(self) -> npt.NDArray[np.int64]:
        """Returns the rows (hash, size), int64 [n, 2], sorted by hash, each hash once."""
        if self._added:
            new = np.frombuffer(self._added, np.int64).reshape(-1, 2)
            rows = np.concatenate([self._rows, new])
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            self._rows = rows[np.diff(rows[:, 0], append=-1) != 0]
            self._added = array("q")
        return self._rows

    def size(self, name: str) -> int | None:
        """Returns the size of an object in bytes; None if it is not listed."""
        rows, wanted = self._table(), _hash(name)
        index = int(np.searchsorted(rows[:, 0], wanted))
        found = index < len(rows) and rows[index, 0] == wanted
        return int(rows[index, 1]) if found else None

    def __contains__(self, name: object) -> bool:
        return self.size(str(name)) is not None

    def __len__(self) -> int:
        return len(self._table())

    def missing_from(self, other: "Listing") -> "Listing":
        """Returns this listing's objects that `other` lacks, or lists with another size."""
        found, rows = Listing(), self._table()
        found._rows = rows[~_are_among(other._table(), rows)]  # noqa: SLF001 - of this class
        return found


def _are_among(rows: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns bool [n]: whether `rows`, sorted by hash, have each of the n rows of `wanted`."""
    if not len(rows):
        return np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(rows[:, 0], wanted[:, 0]), len(rows) - 1)
    same: npt.NDArray[np.bool_] = (rows[at] == wanted).all(axis=1)
    return same


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


async def read_listing(context: RunContext) -> Listing:
    """Lists the run's objects, and keeps the names of those that may be newer than the tape.

    These are checkpoints, and objects of versions without a record when the listing begins.

    Raises:
        BusError, StoreError: bus or store are unreachable.
    """
    fragments = range(len(context.layout.fragments))
    newest = {index: await _newest_version(context, index) for index in fragments}
    return await context.runtime.call(
        list_now, context.store, context.run, may_be_newer(context.run, newest)
    )


def list_now(
    store: ObjectStore, run: str, picked: Callable[[str], bool] = lambda _: False
) -> Listing:
    """Lists a run's present objects; blocks.

    Raises:
        StoreError: the store cannot be listed.
    """
    return Listing(store.walk(f"{run}/"), picked)


async def _newest_version(context: RunContext, fragment: int) -> int:
    try:
        return (await last_record(context, fragment))[0].version
    except (IntegrityError, RunMismatchError, WireError):
        # All its objects may be newer; reading the tape reports what is wrong with it.
        return -1


def fragment_of(run: str, name: str) -> int | None:
    """Returns the fragment of an object, by its name; None for an object of the whole run."""
    if (sent := names.parse_shard(run, name)) is not None:
        return sent.fragment
    fragment = name.removeprefix(names.global_prefix(run)).partition("/")[0]
    return int(fragment) if fragment.isdecimal() else None


def may_be_newer(run: str, newest: Mapping[int, int]) -> Callable[[str], bool]:
    """Returns a test of names: True for checkpoints, and for objects of versions after `newest`.

    `newest` maps a fragment to its newest known version. `diloco.judge.evidence.newer_objects`
    decides by the tape, once that is read.
    """

    def judge(name: str) -> bool:
        if name.startswith(names.checkpoint_prefix(run)):
            return True
        fragment, _, rest = name.removeprefix(names.global_prefix(run)).partition("/")
        version = rest.partition("-")[0]
        known = fragment.isdecimal() and version.isdecimal() and int(fragment) in newest
        return known and int(version) > newest[int(fragment)]

    return judge


def needed_now(history: History) -> Iterator[tuple[int, wire.ObjectRef | wire.Shard]]:
    """Yields (sequence of a record, object that it names) for all that recovery and joins need."""
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
    """Yields every object that a record names."""
    yield from (record.snapshot, record.outer, *record.deltas)
    if record.delta is not None:
        yield record.delta
    for taken in record.inputs:
        yield from taken.shards


def all_named(history: History) -> Iterator[wire.ObjectRef | wire.Shard]:
    """Yields each object that a record names, unless its fragment's record before names it too."""
    for chain in history.records.values():
        before: set[str] = set()
        for _, record in chain:
            own = {ref.name: ref for ref in named(record)}
            yield from (ref for name, ref in own.items() if name not in before)
            before = {*own}


def check_objects(history: History, before: Listing | None = None) -> ObjectsReport:
    """Compares a listing of the store with the tape.

    Args:
        history: the tape.
        before: in a run in progress, a listing from before the tape was read. An object in it of a
            version beyond the tape's end is newer than the tape; an object not in it is no orphan.
            None: the present listing serves for this too.

    Raises:
        StoreError: the store cannot be listed.
    """
    found, run = ObjectsReport(), history.run
    wanted = {ref.name: (seq, ref) for seq, ref in needed_now(history)}
    found.needed = len(wanted)
    found.needed_bytes = sum(ref.size_bytes for _, ref in wanted.values())
    known = Listing((ref.name, ref.size_bytes) for ref in all_named(history))
    there = list_now(history.store, run, _unknown(history, known))
    if amiss := known.missing_from(there):
        _check_named(found, history, amiss, there, wanted)
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
        and (before is None or name in before)
    }
    if not found.newer:
        found.invented = _invented(history, found.orphans)
    return found


def _invented(history: History, orphans: Iterable[str]) -> Counter[str]:
    """Returns, by learner, the number of objects under incarnations that no join began."""
    sent = (names.parse_shard(history.run, name) for name in orphans)
    return Counter(
        one.learner
        for one in sent
        if one is not None
        and one.epoch == history.specification.epoch
        and one.incarnation >= history.whole_from
        and one.incarnation not in history.lives(one.learner)
    )


def _unknown(history: History, known: Listing) -> Callable[[str], bool]:
    """Returns a test of names: True if no record names the object, or it may be newer."""
    newest = {
        fragment: chain[-1][1].version if chain else -1
        for fragment in range(len(history.layout.fragments))
        for chain in [history.records[fragment]]
    }
    newer = may_be_newer(history.run, newest)
    return lambda name: name not in known or newer(name)


def _check_named(
    found: ObjectsReport,
    history: History,
    amiss: Listing,
    there: Listing,
    wanted: Mapping[str, tuple[int, wire.ObjectRef | wire.Shard]],
) -> None:
    """Adds to `found` what is wrong with the named objects in `amiss`: missing, or of another size.

    `there` lists the store; `wanted` has the objects that recovery needs, with their records'
    sequence.
    """
    standing = missing_objects(history, there)
    for name, ref in {r.name: r for r in all_named(history) if r.name in amiss}.items():
        seq = wanted[name][0] if name in wanted else 0
        where = f"record {seq}" if seq else "an older record"
        size = there.size(name)
        if size is not None:
            what = f"{name!r} has {size} bytes, not {ref.size_bytes}"
            found.breaches.append(Breach("objects", where, what))
            continue
        found.missing += 1
        if seq:
            found.breaches.append(Breach("objects", where, f"no object {name!r}"))
        elif name in standing:
            where = f"record {standing[name]}"
            what = f"no object {name!r}, and no collection takes it while that record stands"
            found.breaches.append(Breach("objects", where, what))


def _other_names(history: History) -> Iterator[str]:
    """Yields the names of shards in manifests, and of objects that hold records."""
    for _, manifest in history.manifests:
        yield from (shard.name for shard in manifest.shards)
    yield from history.bodies


def _pinned(history: History) -> set[str]:
    """Returns the prefixes of the names of all objects that checkpoints keep."""
    return {
        names.version_object(history.run, fragment, version, "", "").removesuffix("--")
        for _, checkpoint in history.checkpoints
        for fragment, version in enumerate(checkpoint.versions)
    }


# The most bytes of objects that `check_bytes` reads.
READ_BYTES = 64 << 20


def check_bytes(history: History, found: ObjectsReport) -> None:
    """Reads the newest objects of versions and compares their bytes with their records; blocks.

    It adds breaches to `found`. A running learner reads a delta once, so later damage stays
    unnoticed until a learner joins or the run is replayed. Objects that cannot be read are left to
    other checks.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    chains = history.records.values()
    reading = BytesRead(
        history.store,
        lambda: newest_first(
            history.run, [(record for _, record in reversed(chain)) for chain in chains]
        ),
    )
    found.breaches += [Breach("bytes", *told) for told in reading.wrong(READ_BYTES)]
    found.read = reading.read

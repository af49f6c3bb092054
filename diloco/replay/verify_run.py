"""`diloco replay`: recomputes every version of a run, and compares digests bit for bit.

`diloco/judge/remake_and_compare.py` makes and compares each version; this file passes through the
run. It begins at a version whose view and outer state are stored (a *stored state*), and makes the
following versions from their recorded inputs, with the code that made them. After a difference, or
a gap, it continues at the next stored state. A file can keep the progress, from which a later call
resumes.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError, IntegrityError, ObjectMissingError
from diloco.common.storage.store import ObjectStore, check_size
from diloco.judge.remake_and_compare import FragmentRemaker, Progress, is_stored
from diloco.replay.coverage import Versions
from diloco.run.history import Chain, History, up_to

# Objects are read in advance by READERS threads, for the next AHEAD records.
READERS = 4
AHEAD = 4


class Difference(NamedTuple):
    """A record that its recomputed version does not match; `what` says how, as a sentence."""

    fragment: int
    record_seq: int
    record: wire.Record
    what: str


class Lost(NamedTuple):
    """A version that cannot be recomputed since an object is missing; `why` is a sentence."""

    fragment: int
    record_seq: int
    version: int
    why: str


@dataclass
class Verified:
    """The result of verifying.

    Attributes:
        records: number of records checked.
        versions: counts of the versions by result, but for those in `lost`.
        differences: the records that do not match.
        lost: versions that could not be recomputed because an object is missing.
        views: by fragment, the view after its last record; without fragments not recomputed so far.
    """

    records: int = 0
    versions: Versions = field(default_factory=Versions)
    differences: list[Difference] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    views: dict[int, Vector] = field(default_factory=dict)

    def unbroken(self, fragment: int) -> bool:
        """True if no version of a fragment differed from its record or was lost so far."""
        broken = {one.fragment for one in self.differences}
        return fragment not in broken | {one.fragment for one in self.lost}


class VerifyProgress:
    """The progress of earlier calls: by fragment, the stored state up to which all is verified.

    Args:
        path: the file, which need not exist yet; None to store nothing.
        history: the run's tape.

    Raises:
        ConfigError: the file is not of this run, or not of this command.
    """

    def __init__(self, path: Path | None, history: History) -> None:
        self._path = path
        self._of = {"run": history.run, "epoch": history.specification.epoch}
        self._reached: dict[int, tuple[int, str]] = {}
        if path is None or not path.exists():
            return
        try:
            document = json.loads(path.read_text())
            of, reached = document["of"], document["reached"]
            self._reached = {
                int(f): (int(seq), str(digest)) for f, (seq, digest) in reached.items()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{str(path)!r} is not a progress file of diloco replay: {error}",
                hint="give a file written by an earlier diloco replay --resume",
            ) from error
        if of != self._of:
            raise ConfigError(f"{str(path)!r} is about {of}, not {self._of}")

    def begin(self, fragment: int, chain: Chain) -> int:
        """Returns the index in `chain` of the record at which verifying begins."""
        if fragment not in self._reached:
            return 0
        seq, digest = self._reached[fragment]
        for index, (at, record) in enumerate(chain):
            if (at, record.outer_digest) == (seq, digest):
                return index
        return 0

    def note(self, fragment: int, seq: int, record: wire.Record) -> None:
        """Notes, in the file too, that all is verified up to a record with a stored state."""
        self._reached[fragment] = (seq, record.outer_digest)
        if self._path is not None:
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text(json.dumps({"of": self._of, "reached": self._reached}))
            partial.rename(self._path)


def chains(
    history: History, fragments: Sequence[int], first: int | None, until: Mapping[int, int]
) -> dict[int, Chain]:
    """Returns the records to check, by fragment.

    Args:
        history: the tape.
        fragments: indices of the fragments to check.
        first: a version; records begin at the newest stored state up to it. None: all.
        until: by fragment, the stream sequence of the last record; fragments without one go to
            their end.

    Raises:
        ConfigError: no state is stored up to `first`.
    """
    found = {}
    for fragment in fragments:
        chain = up_to(history.records[fragment], until.get(fragment, history.last_seq))
        if first is not None:
            begins = [
                index
                for index, (_, record) in enumerate(chain)
                if is_stored(record) and record.version <= first
            ]
            if not begins:
                raise ConfigError(
                    f"fragment {fragment}: no view is stored of version {first} or before",
                    hint="start later; gc.replay_window_s sets how much garbage collection keeps",
                )
            chain = chain[begins[-1] :]
        found[fragment] = chain
    return found


def verify(
    history: History,
    chosen: Mapping[int, Chain],
    memory: VerifyProgress,
    progress: Progress | None = None,
    *,
    keep_views: bool = False,
) -> Verified:
    """Recomputes the versions of these chains, and compares them.

    Args:
        history: the tape.
        chosen: the result of `chains`.
        memory: the progress of earlier calls.
        progress: called with the number of records done, and of all.
        keep_views: return each fragment's last view.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    found = Verified()
    begins = {fragment: memory.begin(fragment, chain) for fragment, chain in chosen.items()}
    total = sum(len(chain) - begins[fragment] for fragment, chain in chosen.items())
    with ThreadPoolExecutor(READERS, thread_name_prefix="replay") as pool:
        for fragment, chain in chosen.items():
            earlier = chain[: begins[fragment]]
            found.versions.earlier += sum(_is_version(record) for _, record in earlier)
            ahead = _ReadAhead(history.store, pool)
            remaker = FragmentRemaker(replace(history, store=ahead), fragment)
            for seq, record in _announced(ahead, chain[begins[fragment] :]):
                _take(found, remaker, seq, record)
                if is_stored(record) and remaker.arrays is not None and found.unbroken(fragment):
                    memory.note(fragment, seq, record)
                if progress is not None:
                    progress(found.records, total)
            if keep_views and remaker.arrays is not None:
                found.views[fragment] = remaker.arrays.view
            ahead.forget()
    return found


def _is_version(record: wire.Record) -> bool:
    """True if a record made a version; records of verdicts alone are not counted."""
    return record.what != "verdict"


def _take(found: Verified, remaker: FragmentRemaker, seq: int, record: wire.Record) -> None:
    """Recomputes the next record's version if possible, and counts the result in `found`."""
    began, versions = remaker.arrays is not None, found.versions
    found.records += 1
    try:
        remaker.take(seq, record)
    except IntegrityError as error:
        if isinstance(error.__cause__, ObjectMissingError):
            found.lost.append(Lost(record.fragment, seq, record.version, error.__cause__.message))
            return
        found.differences.append(Difference(record.fragment, seq, record, error.message))
        versions.wrong += 1
        return
    if not _is_version(record):
        return
    if remaker.arrays is None and remaker.missing:
        found.lost.append(Lost(record.fragment, seq, record.version, remaker.missing))
    elif remaker.arrays is None:
        versions.unreached += 1
    elif began and record.what == "version":
        versions.again += 1
    else:
        versions.stored += 1


def _announced(ahead: "_ReadAhead", chain: Chain) -> Iterator[tuple[int, wire.Record]]:
    """Yields the chain's records, while objects of the following ones are read in advance."""
    coming = iter(chain)
    near = list(itertools.islice(coming, AHEAD))
    for _, record in near:
        ahead.expect(_read_names(record))
    while near:
        yield near.pop(0)
        for seq, record in itertools.islice(coming, 1):
            ahead.expect(_read_names(record))
            near.append((seq, record))


def _read_names(record: wire.Record) -> Iterator[str]:
    """Yields the names of the objects that recomputing a record's version reads, in order."""
    for taken in record.inputs:
        yield from (shard.name for shard in taken.shards)
    if record.delta is not None and record.what == "version":
        yield record.delta.name
    if is_stored(record):
        yield from (record.snapshot.name, record.outer.name)


class _ReadAhead:
    """A store that reads objects in advance on other threads, once `expect` has named them."""

    def __init__(self, store: ObjectStore, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool
        self._coming: dict[str, Future[bytes]] = {}
        self.put, self.list, self.walk = store.put, store.list, store.walk
        self.get_range, self.delete = store.get_range, store.delete

    def expect(self, names: Iterable[str]) -> None:
        """Begins to read objects; `get` then returns them."""
        for name in names:
            if name not in self._coming:
                self._coming[name] = self._pool.submit(self._store.get, name)

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        """Returns an object, as `ObjectStore.get`; waits for it if it is being read already."""
        coming = self._coming.pop(name, None)
        if coming is None:
            return self._store.get(name, limit_bytes, within_s)
        data = coming.result()
        check_size(name, len(data), limit_bytes)
        return data

    def forget(self) -> None:
        """Cancels the reads whose objects nobody has asked for."""
        for coming in self._coming.values():
            coming.cancel()
        self._coming = {}

"""Checks the stored objects of a run's newest versions.

An object may be missing, be damaged, have the bytes of another version, or have been deleted from a
folder that still has a copy. Status and page check the newest objects every few seconds; the doctor
checks more (`judge/objects.py`). The functions block while the store answers.
"""

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ObjectMissingError, ObjectUnreadableError
from diloco.common.protocol.shards import crc32c
from diloco.common.storage.store import DirectoryStore, ObjectStore
from diloco.common.storage.store.protocol import KEPT
from diloco.run.health_findings import DIGEST_MISMATCH, MISSING_OBJECT
from diloco.run.state import Finding

# The most bytes of objects that each of the repeated checks reads.
LOOK_BYTES = 8 << 20

# A record that made a version, and an object that was stored for it.
Made = tuple[wire.Record, wire.ObjectRef]


def newest_first(run: str, chains: Iterable[Iterable[wire.Record]]) -> Iterator[Made]:
    """Yields (record, object) for each delta, view and outer state that a record's version stored.

    The newest versions come first. Each object is yielded once: with the version that stored it,
    not with later records that refer to it.

    Args:
        run: the run's name.
        chains: records of each fragment, the newest first.
    """
    for record in heapq.merge(*chains, key=lambda one: -one.version):
        for ref in (record.delta, record.snapshot, record.outer):
            if ref is None:
                continue
            made = names.parse_version_object(run, record.fragment, ref.name)
            if made is not None and made.version == record.version:
                yield record, ref


class BytesRead:
    """Reads objects of versions, and compares their bytes with size and CRC in the records.

    Args:
        store: the run's store.
        every: returns the objects to read, the newest first. Of an object with wrong bytes, the
            fault says whether these are the bytes of another of the objects.

    Attributes:
        read: the number of objects that were read.
    """

    def __init__(self, store: ObjectStore, every: Callable[[], Iterator[Made]]) -> None:
        self.read = 0
        self._store, self._every = store, every

    def wrong(self, limit_bytes: int) -> Iterator[tuple[str, str]]:
        """Yields (version and fragment, fault) of each object with other bytes than were stored.

        Objects that are missing or cannot be read are skipped.

        Args:
            limit_bytes: the most bytes to read; the objects beyond that are not checked.

        Raises:
            StoreUnavailableError: the store is unreachable.
        """
        for record, ref in self._every():
            limit_bytes -= ref.size_bytes
            if limit_bytes < 0:
                return
            with contextlib.suppress(ObjectMissingError, ObjectUnreadableError):
                data = self._store.get(ref.name)
                self.read += 1
                is_of = len(data), crc32c(data)
                if is_of != (ref.size_bytes, ref.crc32c):
                    where = f"version {record.version} of fragment {record.fragment}"
                    yield where, f"{ref.name!r} {self._named(is_of)}"

    def _named(self, is_of: tuple[int, int]) -> str:
        for other, ref in self._every():
            if is_of == (ref.size_bytes, ref.crc32c):
                return f"has the bytes of version {other.version}"
        return "has damaged bytes: not those that its maker stored"


def object_findings(
    store: ObjectStore,
    run: str,
    records: Sequence[wire.Record],
    newest: Callable[[], Sequence[wire.Record]],
) -> list[Finding]:
    """Returns findings on the objects of a run in progress: wrong bytes, missing, or deleted.

    Args:
        store: the run's store.
        run: the run's name.
        records: earlier records of any fragment, the oldest first; `LOOK_BYTES` of objects of these
            and the newest records are compared with their records.
        newest: returns the newest record of each fragment; called again before an object counts as
            missing, since garbage collection may have removed objects of older records.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    chains = {one.fragment: [one] for one in newest()}
    for one in reversed(records):
        if one.version < chains[one.fragment][-1].version:
            chains[one.fragment].append(one)
    reading = BytesRead(store, lambda: newest_first(run, chains.values()))
    wrong = [f"{where}: {what}" for where, what in reading.wrong(LOOK_BYTES)]
    found = [breach("bytes", wrong, DIGEST_MISMATCH)] if wrong else []
    missing = {ref.name for ref in _needed(newest()) if not _is_there(store, ref.name)}
    if gone := [repr(ref.name) for ref in _needed(newest()) if ref.name in missing]:
        found.append(breach("objects", [f"the newest versions lack {gone[0]}"], MISSING_OBJECT))
    return [*found, *deleted(store, run)]


def _needed(records: Sequence[wire.Record]) -> list[wire.ObjectRef]:
    return [ref for one in records for ref in (one.snapshot, one.outer, *one.deltas)]


def _is_there(store: ObjectStore, name: str) -> bool:
    with contextlib.suppress(ObjectMissingError, ObjectUnreadableError):
        store.get_range(name, 0, 1)
        return True
    return False


def breach(rule: str, told: Sequence[str], runbook: str, about: str = "store") -> Finding:
    """Returns a finding of severity "error" for a broken rule: stop, and delete nothing.

    Args:
        rule: the rule's name.
        told: a sentence for each breach; the finding has the first, and the number of the others.
        runbook: path of the runbook.
        about: the finding's subject: "store" or "tape".
    """
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return Finding(
        severity="error",
        about=f"{about}: {rule}",
        sentence=f"{told[0]}{more}",
        advice="stop and delete nothing until the cause is known",
        runbook=runbook,
    )


def deleted(store: ObjectStore, run: str) -> Iterator[Finding]:
    """Yields findings on objects whose files were deleted: one a learner, and one for the others.

    Only for a store in a folder, which has a protected copy of each object; for any other store,
    yields nothing.
    """
    if not isinstance(store, DirectoryStore):
        return
    gone: dict[str, list[str]] = defaultdict(list)
    for name in store.protected_only(f"{run}/"):
        sent = names.parse_shard(run, name)
        gone[f"learner {sent.learner}" if sent is not None else "store"].append(name)
    for about, found in sorted(gone.items()):
        yield Finding(
            severity="warning",
            about=about,
            sentence=f"{len(found):,} of its objects were deleted, and the folder's own copies "
            f"answer for them, such as {found[0]}",
            advice="nothing is lost yet: find out who deletes files there, and copy them back "
            f"from {store.root / KEPT}",
            runbook=MISSING_OBJECT,
        )

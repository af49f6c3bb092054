"""Shards in the store, by fragment: one listing for all fragments that an aggregator owns.

Learners' prefixes stand above fragments', so that one access rule fences a learner: one fragment's
shards alone would be a request for each learner; all of them are one for each page of objects. Each
fragment takes its part of a listing once. A part may be as old as the fragment's collection before,
which only leaves for the next what came since: whoever judges it reads the tape later.
"""

import asyncio

from diloco.common.process.service import Runtime
from diloco.common.protocol import names
from diloco.common.storage.store import ObjectInfo, ObjectStore


class ShardListing:
    """Gives fragments their shards; a part is kept for each that has asked, until it asks again."""

    def __init__(self) -> None:
        self._fragments: set[int] = set()
        self._parts: dict[int, list[ObjectInfo]] = {}
        self._listing = asyncio.Lock()

    async def of(
        self, fragment: int, run: str, store: ObjectStore, runtime: Runtime
    ) -> list[ObjectInfo]:
        """A fragment's shards, whoever sent them.

        Raises:
            StoreError: the store cannot be listed.
        """
        self._fragments.add(fragment)
        async with self._listing:
            if fragment not in self._parts:
                self._parts = await runtime.call(_parts, store, run, frozenset(self._fragments))
            return self._parts.pop(fragment)

    def forget(self, fragment: int) -> None:
        """A fragment asks no more."""
        self._fragments.discard(fragment)
        self._parts.pop(fragment, None)


def _parts(store: ObjectStore, run: str, fragments: frozenset[int]) -> dict[int, list[ObjectInfo]]:
    """One listing, by fragment; blocks."""
    found: dict[int, list[ObjectInfo]] = {fragment: [] for fragment in fragments}
    for info in store.walk(names.learners_prefix(run)):
        sent = names.parse_shard(run, info.name)
        if sent is not None and sent.fragment in found:
            found[sent.fragment].append(info)
    return found

"""Which fragments an aggregator takes and gives up, so that all have about equally many.

Everybody decides for itself from what it has heard of the others. That may be old: what keeps two
owners apart is never this, but the compare-and-swap on a fragment's records (invariant 1).
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from diloco.common.protocol import shards

Pinned = frozenset[int] | None


class OwnershipDivision(NamedTuple):
    """The fragments that an aggregator acquires, those it likeliest keeps first, and releases."""

    acquire: tuple[int, ...]
    release: tuple[int, ...]


def divide(
    me: str, members: Mapping[str, Pinned], holders: Mapping[int, str | None], fragments: int
) -> OwnershipDivision:
    """The step of one aggregator towards an even division.

    Args:
        me: this aggregator's life.
        members: what each live aggregator, this one too, is pinned to; None: to nothing.
        holders: who holds each fragment that is not done; None for nobody.
        fragments: P, of the run.
    """
    held = {fragment for fragment, holder in holders.items() if holder == me}
    free = {fragment for fragment, holder in holders.items() if holder is None}
    pinned = members[me]
    if pinned is not None:
        # An operator has said which: nothing is shared out, and nothing else is taken.
        return OwnershipDivision(_by_rank(me, free & pinned), tuple(sorted(held - pinned)))
    reserved: set[int] = set().union(*(kept for kept in members.values() if kept is not None))
    target = _share(me, members, [f for f in range(fragments) if f in holders.keys() - reserved])
    keep = _by_rank(me, held - reserved)[:target]
    # Only what is free: a fragment that is taken from a live owner costs a recovery, so it is the
    # owner that gives up what is too much.
    wanted = _by_rank(me, free - reserved)[: target - len(keep)]
    return OwnershipDivision(wanted, tuple(sorted(held - set(keep))))


def _share(me: str, members: Mapping[str, Pinned], fragments: Collection[int]) -> int:
    """How many of `fragments` are this aggregator's: equal numbers, the rest to the first."""
    sharing = sorted(life for life, pinned in members.items() if pinned is None)
    each, rest = divmod(len(fragments), len(sharing))
    return each + (sharing.index(me) < rest)


def _by_rank(me: str, fragments: Iterable[int]) -> tuple[int, ...]:
    """In an order of this aggregator's own, so that two seldom reach for the same."""
    return tuple(sorted(fragments, key=lambda fragment: _rank(me, fragment)))


@lru_cache(1 << 16)
def _rank(me: str, fragment: int) -> str:
    return shards.digest(f"{me}-{fragment}".encode())

"""Divides the fragments among aggregators: pure functions of the leases.

Each aggregator computes from the leases that it sees which fragments it must acquire and release
now; `aggregator/leases.py` does so. An aggregator is identified by the random id of its process,
the field `life` of its leases.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from diloco.common.protocol import shards

Pinned = frozenset[int] | None


class AggregatorTerms(NamedTuple):
    """The conditions under which a live aggregator owns fragments.

    Attributes:
        pinned: the fragments that the aggregator is pinned to; None: it is not pinned.
        refuses: fragments that the aggregator has failed at; another one may serve them.
        cut_off: True if the store does not answer the aggregator.
    """

    pinned: Pinned = None
    refuses: frozenset[int] = frozenset()
    cut_off: bool = False

    def may_serve(self, fragment: int) -> bool:
        """True if the aggregator may own the fragment."""
        mine = self.pinned is None or fragment in self.pinned
        return mine and fragment not in self.refuses


class OwnershipDivision(NamedTuple):
    """The fragments that one aggregator must acquire and release now.

    Attributes:
        acquire: free fragments to acquire, in the order in which to try them.
        release: own fragments to release, ascending.
    """

    acquire: tuple[int, ...]
    release: tuple[int, ...]


def divide(
    me: str,
    members: Mapping[str, AggregatorTerms],
    holders: Mapping[int, str | None],
    fragments: int,
) -> OwnershipDivision:
    """Returns what one aggregator acquires and releases now, towards an even division.

    Args:
        me: the id of this aggregator's process.
        members: the terms of each live aggregator by the id of its process, this one included.
        holders: the id of the owner of each fragment that is not done; None: the fragment is free.
        fragments: number of fragments of the run, P.
    """
    held = {fragment for fragment, holder in holders.items() if holder == me}
    free = {fragment for fragment, holder in holders.items() if holder is None}
    reached = {life: one for life, one in members.items() if not one.cut_off}
    if reached and me not in reached:
        served = {f for f in held if any(one.may_serve(f) for one in reached.values())}
        return OwnershipDivision((), tuple(sorted(served)))
    # If the store answers nobody, a change of owners would help nobody.
    members = reached or members
    mine = members[me]
    if mine.pinned is not None:
        # The operator has chosen the fragments, so this aggregator takes no share of the others.
        kept = {fragment for fragment in held if mine.may_serve(fragment)}
        taken = {fragment for fragment in free if mine.may_serve(fragment)}
        return OwnershipDivision(_by_rank(me, taken), tuple(sorted(held - kept)))
    sharing = {life: one for life, one in members.items() if one.pinned is None}
    reserved = {
        fragment
        for life in members.keys() - sharing.keys()
        for fragment in holders
        if members[life].may_serve(fragment)
    }
    # Refused fragments are divided separately, as even shares could give them to a refuser.
    refused = {f for one in sharing.values() for f in one.refuses} - reserved
    even = [f for f in range(fragments) if f in holders.keys() - reserved - refused]
    target = _share(me, sharing, even)
    keep = _by_rank(me, held & set(even))[:target]
    also = {f for f in refused & held if mine.may_serve(f)}
    falls_to_me = {f for f in refused & free if _first_able(sharing, f) == me}
    # Only free fragments: taking one from a live owner would cost a recovery, so owners release
    # what exceeds their share.
    wanted = _by_rank(me, free & set(even))[: target - len(keep)]
    acquire = wanted + _by_rank(me, falls_to_me)
    return OwnershipDivision(acquire, tuple(sorted(held - also - set(keep))))


def _share(me: str, sharing: Collection[str], fragments: Collection[int]) -> int:
    """Returns the number of `fragments` that `me` gets: equal shares, the rest to the first ids."""
    each, rest = divmod(len(fragments), len(sharing))
    return each + (sorted(sharing).index(me) < rest)


def _first_able(sharing: Mapping[str, AggregatorTerms], fragment: int) -> str | None:
    """Returns the aggregator that gets a fragment refused by some; None if all refuse it."""
    able = [life for life, one in sharing.items() if one.may_serve(fragment)]
    return min(able, key=lambda life: _rank(life, fragment), default=None)


def _by_rank(me: str, fragments: Iterable[int]) -> tuple[int, ...]:
    """Sorts fragments in an order that depends on `me`: two aggregators seldom try the same one."""
    return tuple(sorted(fragments, key=lambda fragment: _rank(me, fragment)))


@lru_cache(1 << 16)
def _rank(me: str, fragment: int) -> str:
    return shards.digest(f"{me}-{fragment}".encode())

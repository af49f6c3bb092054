"""The unsent work of a life that ended by a crash, with which the next life of the learner goes on.

A *snapshot* is a checkpoint with each fragment's unsent work; `Unsent` states which work that is.
An update is announced only once a snapshot of its boundary, or of a later one, is stored. So the
newest snapshot knows each update of its life that can be on the tape, and whether it is there
decides what the snapshot's work is: nothing is sent twice. Pure, as `sync.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from diloco.learner.core.events import Start, SyncRules
from diloco.learner.core.sync import NO_WORK, State, Work, next_due, overwrites, unsent_of


class Unsent(NamedTuple):
    """What a snapshot states of a fragment.

    Attributes:
        version: the adopted version.
        seq: the number of the life's newest update of the fragment; 0: it has sent none.
        work: the work that no update covers.
        flying: the work of the newest update, if it was not announced yet; else none.
    """

    version: int
    seq: int
    work: Work
    flying: Work = NO_WORK


# Of a fragment that the life does not hold.
NOTHING = Unsent(-1, 0, NO_WORK)


class Carried(NamedTuple):
    """How a fragment's work in a snapshot is taken over.

    Attributes:
        work: the work with which the fragment begins.
        again: the newest update was never announced, so that its work is unsent again.
        dropped: a rollback has undone the work, or versions of the fragment overwrite it.
        held: this life and the one before hold the fragment's module.
    """

    work: Work
    again: bool = False
    dropped: bool = False
    held: bool = True


def snapshot(state: State) -> tuple[Unsent, ...]:
    """Returns what a snapshot at this boundary states, by fragment."""
    found = []
    for fragment in state.fragments:
        if not fragment.held:
            found.append(NOTHING)
            continue
        flying = fragment.in_flight
        here = flying is not None and not flying.announced_at_s and not flying.void
        found.append(
            Unsent(
                fragment.version,
                fragment.next_seq - 1,
                unsent_of(state, fragment),
                Work(flying.steps, flying.tokens) if flying is not None and here else NO_WORK,
            )
        )
    return tuple(found)


def carried(
    rules: SyncRules,
    unsent: Sequence[Unsent],
    announced: Sequence[int],
    starts: Sequence[Start | None],
    ended: Sequence[bool],
) -> tuple[Carried, ...] | None:
    """Returns how a snapshot's work is taken over, by fragment; None if it does not fit the tape.

    With `sync.adopt = "blend"` nothing is: what a merged update leaves of later work is not known.

    Args:
        rules: the core's rules.
        unsent: what the snapshot states.
        announced: the number of the newest update on the tape of the snapshot's life, by fragment;
            0: there is none.
        starts: the versions with which the new life begins; None: it does not hold the fragment.
            A life that holds others than the one before goes on with nothing.
        ended: for each fragment, whether its newest update has all steps up to the snapshot.
    """
    if rules.blend < 1:
        return None
    found = []
    given = zip(unsent, announced, starts, ended, strict=True)
    for index, (one, seq, start, sent) in enumerate(given):
        if (start is None) != (one == NOTHING):
            return None
        if start is None:
            found.append(Carried(NO_WORK, dropped=True, held=False))
            continue
        if sent and seq > one.seq:  # A life that was asked to leave has sent the rest.
            found.append(Carried(NO_WORK, dropped=True))
            continue
        again = bool(one.flying.steps) and seq == one.seq - 1
        # The life has sent more after the snapshot: its work would be sent twice.
        if seq != one.seq and not again:
            return None
        if overwrites(rules, index) or start.floor > one.version:
            found.append(Carried(NO_WORK, dropped=True))
            continue
        steps = one.work.steps + (one.flying.steps if again else 0)
        tokens = one.work.tokens + (one.flying.tokens if again else 0)
        found.append(Carried(Work(steps, tokens), again))
    # Data would be skipped for the sake of nothing.
    return None if all(one.dropped for one in found) else tuple(found)


def carry(rules: SyncRules, state: State, found: Sequence[Carried]) -> State:
    """Returns the state of a life that has just begun, and goes on with the work of `found`.

    `found` may be empty: the life goes on with nothing.
    """
    if not found:
        return state
    fragments = tuple(
        # As if nothing had happened between: the next update is due H steps after the last.
        fragment._replace(
            sent=Work(-one.work.steps, -one.work.tokens),
            due_steps=fragment.due_steps if one.dropped else next_due(rules, state, index),
        )
        for index, (fragment, one) in enumerate(zip(state.fragments, found, strict=True))
    )
    return replace(state, fragments=fragments)

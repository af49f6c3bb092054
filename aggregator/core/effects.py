"""What the machine can ask the driver for, to be done in the order in which it asks."""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Admitted, State, UpdateId
from diloco.common import wire


class Fetch(NamedTuple):
    """Read and verify an update's shards; answer `Fetched` or `Failed`. Any number in parallel."""

    # No order among fetches: what is merged in which order is decided by their answers, and noted
    # (invariant 5).
    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Add the update just fetched to the round's accumulator, before the next event."""

    # In the order of these effects and no other, since the sum of floats depends on it (invariant
    # 3).
    admitted: Admitted


class OpenRound(NamedTuple):
    """Begin an empty accumulator, then tell the learners that a round of this version is open."""

    # The word to learners is a hint and may be lost: a learner that does not hear it sends when its
    # own H steps are over.
    version: int


class Commit(NamedTuple):
    """Store the objects, then publish the record, then answer `Committed`.

    `state` is the machine's at the close: all that the record says is in it.
    """

    # The objects first: a record that stands must name nothing that is missing (invariant 3).
    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """A message that is no update of the protocol: count it, keep a sample, do nothing."""

    manifest: wire.Manifest
    reason: str


class Quarantine(NamedTuple):
    """Say on the tape that a learner is quarantined; said again until the tape has it."""

    learner: str
    reason: str


Effect = Fetch | Merge | OpenRound | Commit | Ignored | Quarantine


Result = tuple[State, tuple[Effect, ...]]

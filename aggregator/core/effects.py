"""What the machine can ask the driver for, to be done in the order in which it asks."""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Admitted, State, UpdateId
from diloco.common import wire


class Fetch(NamedTuple):
    """Read and verify an update's shards; answer `Fetched` or `Failed`. Any number in parallel."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Add the update just fetched to the round's accumulator, before the next event."""

    admitted: Admitted


class OpenRound(NamedTuple):
    """Begin an empty accumulator, then tell the learners that a round of this version is open."""

    version: int


class Commit(NamedTuple):
    """Store the objects, then publish the record, then answer `Committed`.

    `state` is the machine's at the close: all that the record says is in it.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """A message that is no update of the protocol: count it, keep a sample, do nothing."""

    manifest: wire.Manifest
    reason: str


class ShutOut(NamedTuple):
    """Say on the tape that a learner is quarantined; said again until the tape has it."""

    learner: str
    reason: str


Effect = Fetch | Merge | OpenRound | Commit | Ignored | ShutOut


Result = tuple[State, tuple[Effect, ...]]

"""What the machine can ask the driver for, to be done in the order in which it asks."""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Quarantine, State
from diloco.aggregator.core.updates import Admitted, UpdateId
from diloco.common import wire


class Fetch(NamedTuple):
    """Read and verify an update's shards; answer `Fetched` or `Failed`. Any number in parallel."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Add the update just fetched to the round's accumulator, before the next event."""

    admitted: Admitted


class Discard(NamedTuple):
    """Forget the round's accumulator: what it holds is read again."""


class OpenRound(NamedTuple):
    """Tell the learners that a round of this version waits for them."""

    version: int


class AskCut(NamedTuple):
    """Ask the stream's leader for its last update of the fragment; answer `CutKnown`.

    The answer comes after the announcement of that update, and of all before it.
    """


class Commit(NamedTuple):
    """Make a version, if it is one, and commit the record.

    Answer `Made` for a version before any other event; then, beside what follows, store the
    objects, publish the record, and answer `Committed`.

    `state` is the machine's at the close: all that the record says is in it.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """A message that is no update of the protocol: count it, keep a sample, do nothing."""

    learner: str
    reason: str
    detail: str


Effect = Fetch | Merge | Discard | OpenRound | AskCut | Commit | Ignored | Quarantine


Result = tuple[State, tuple[Effect, ...]]

"""Events, which the machine is told (tape, driver, time), and effects, which it asks for.

Times are in seconds since the epoch: `stored_at_s` is by the server's clock, `at_s` by the
owner's.
"""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Quarantine, State
from diloco.aggregator.core.updates import Admitted, UpdateId
from diloco.common.protocol import wire


class Joined(NamedTuple):
    """A learner's join, from the tape; its sequence is the incarnation."""

    stored_at_s: float
    stream_seq: int
    learner: str


class Departed(NamedTuple):
    """A learner's leave, from the tape."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Finished(NamedTuple):
    """A learner's word, from the tape, that it sends nothing more of this fragment."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Announced(NamedTuple):
    """A manifest of this fragment, from the tape, and the length of its message."""

    stored_at_s: float
    stream_seq: int
    manifest: wire.Manifest
    size_bytes: int = 0


class Undecoded(NamedTuple):
    """A message under an update's subject that cannot be decoded, or is not decoded on purpose.

    Nothing is decoded of a sender without allowance (`admission.may_announce`).
    """

    stored_at_s: float
    stream_seq: int
    learner: str
    size_bytes: int


class Stopped(NamedTuple):
    """The run's stop message, from the tape."""

    stored_at_s: float
    stream_seq: int


class Changed(NamedTuple):
    """Event: settings on the tape were changed; the rules given with this event follow them."""

    stored_at_s: float
    stream_seq: int


class Quarantined(NamedTuple):
    """Event: the tape puts a learner in quarantine, or with `active` False releases it."""

    stored_at_s: float
    stream_seq: int
    learner: str
    active: bool


class Fetched(NamedTuple):
    """All shards of an update are here and verified; `norm` is the update's L2 norm."""

    at_s: float
    # When it came and with which norm is on no tape: the machine notes both.
    update: UpdateId
    norm: float


class Failed(NamedTuple):
    """An update's shards are not what its manifest says."""

    at_s: float
    update: UpdateId
    reason: str
    detail: str


class Broke(NamedTuple):
    """Adding an update to the sum failed, for a reason that its bytes do not explain."""

    at_s: float
    update: UpdateId


class Liveness(NamedTuple):
    """A learner has shown a sign of life again, or has been silent for too long."""

    at_s: float
    learner: str
    incarnation: int
    live: bool


class Timer(NamedTuple):
    """The time that `deadline` asked for has come."""

    at_s: float


class CutKnown(NamedTuple):
    """Event: the stream leader's last update of the fragment has this sequence; 0: it has none."""

    at_s: float
    stream_seq: int


class Made(NamedTuple):
    """The version of the last `Commit` is made: the sum is free, its view has this digest."""

    at_s: float
    view_digest: str


class Tick(NamedTuple):
    """The time, told before a message of the tape that comes long after the last event."""

    at_s: float


class Committed(NamedTuple):
    """The record of the last `Commit` is on the tape."""

    at_s: float
    # Not the machine's own guess: after a doubt the publisher has read back which record stands
    # (invariant 1).
    record_seq: int


FromTape = Joined | Departed | Finished | Announced | Undecoded | Stopped | Changed | Quarantined
Event = FromTape | Fetched | Failed | Broke | Liveness | Timer | Tick | CutKnown | Made | Committed


class Fetch(NamedTuple):
    """Read and verify an update's shards; answer `Fetched` or `Failed`. Any number in parallel."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Add the update just fetched to the round's accumulator, before the next event."""

    admitted: Admitted


class Discard(NamedTuple):
    """Forget the round's accumulator: the updates in it are read again."""


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

"""Events, the machine's inputs, and effects, which the machine asks its driver to carry out.

Events of the tape have `stored_at_s`, when the server stored the message, by the server's clock,
and `stream_seq`, the message's stream sequence. Other events come from the driver and have `at_s`,
by the owner's clock. Times are in seconds of Unix time.
"""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Quarantine, State
from diloco.aggregator.core.updates import Admitted, UpdateId
from diloco.common.protocol import wire


class Joined(NamedTuple):
    """Event: a learner's join on the tape; `stream_seq` is the learner's new incarnation.

    `holds` are the modules that this incarnation holds; empty: all.
    """

    stored_at_s: float
    stream_seq: int
    learner: str
    holds: tuple[str, ...] = ()


class Departed(NamedTuple):
    """Event: a leave on the tape: an incarnation of a learner has ended."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Finished(NamedTuple):
    """Event: a learner has announced that it sends no more updates of this fragment."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Announced(NamedTuple):
    """Event: a manifest of this fragment on the tape, with the length of its message."""

    stored_at_s: float
    stream_seq: int
    manifest: wire.Manifest
    size_bytes: int = 0


class Undecoded(NamedTuple):
    """Event: a message under an update's subject was not decoded.

    The message is invalid, or its sender has no allowance left
    (`admission_and_credit.may_announce`).
    """

    stored_at_s: float
    stream_seq: int
    learner: str
    size_bytes: int


class Stopped(NamedTuple):
    """Event: the run's stop message on the tape."""

    stored_at_s: float
    stream_seq: int


class Changed(NamedTuple):
    """Event: a message on the tape changed settings; the driver gives the new rules from now on."""

    stored_at_s: float
    stream_seq: int


class Quarantined(NamedTuple):
    """Event: a message on the tape quarantines a learner, or releases it (`active` is False)."""

    stored_at_s: float
    stream_seq: int
    learner: str
    active: bool


class Fetched(NamedTuple):
    """Event: all shards of an update are read and verified; `norm` is the update's L2 norm."""

    at_s: float
    # Time and norm are not on the tape, so the machine records both as an observation.
    update: UpdateId
    norm: float


class Failed(NamedTuple):
    """Event: an update's shards are missing or differ from what its manifest states."""

    at_s: float
    update: UpdateId
    reason: str
    detail: str


class AdditionFailed(NamedTuple):
    """Event: adding an update to the sum failed for another reason than the update's bytes."""

    at_s: float
    update: UpdateId


class Liveness(NamedTuple):
    """Event: a silent learner has shown a sign of life, or a live one is silent for too long."""

    at_s: float
    learner: str
    incarnation: int
    live: bool


class Timer(NamedTuple):
    """Event: the time that `rounds.deadline` asked for has come."""

    at_s: float


class CutKnown(NamedTuple):
    """Event: the stream's leader has told the sequence of the fragment's last update; 0: none."""

    at_s: float
    stream_seq: int


class Made(NamedTuple):
    """Event: the version of the last `Commit` is made; the sum is free for the next round."""

    at_s: float
    view_digest: str


class Tick(NamedTuple):
    """Event: the present time.

    Comes before a tape message that the driver receives more than `machine.TICK_S` seconds after
    the previous event.
    """

    at_s: float


class Committed(NamedTuple):
    """Event: the record of the last `Commit` is on the tape."""

    at_s: float
    # Not a guess: in doubt the publisher has read back which record is on the tape (invariant 1).
    record_seq: int


FromTape = Joined | Departed | Finished | Announced | Undecoded | Stopped | Changed | Quarantined
Event = (
    FromTape
    | Fetched
    | Failed
    | AdditionFailed
    | Liveness
    | Timer
    | Tick
    | CutKnown
    | Made
    | Committed
)


class Fetch(NamedTuple):
    """Effect: read and verify an update's shards; later give the event `Fetched` or `Failed`."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Effect: add the update of the present `Fetched` to the sum, before the next event."""

    admitted: Admitted


class Discard(NamedTuple):
    """Effect: drop the round's sum; further `Fetch` effects read its updates again."""


class OpenRound(NamedTuple):
    """Effect: tell the learners that a round for this version is open."""

    version: int


class AskCut(NamedTuple):
    """Effect: ask the stream's leader for the fragment's last update; later give `CutKnown`.

    Give `CutKnown` only after the machine has received all announcements up to that update.
    """


class Commit(NamedTuple):
    """Effect: make a version, unless the record has only verdicts, and commit the record.

    For a version, make it and give the event `Made` before any other event. Then, while later
    events are handled, store the objects, publish the record, and give `Committed`.

    Attributes:
        what: "verdict" for a record without a version.
        reason: why the round closed, as in `wire.Record.reason`.
        final: True if no version of the fragment follows.
        at_s: when the round closed.
        state: the machine's state at that time, which determines the record.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """Effect: count a message that is no valid update, and log some of these messages."""

    learner: str
    reason: str
    detail: str


Effect = Fetch | Merge | Discard | OpenRound | AskCut | Commit | Ignored | Quarantine


Result = tuple[State, tuple[Effect, ...]]
